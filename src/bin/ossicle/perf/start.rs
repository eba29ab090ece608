//! Starts the ranks: as threads of this process, or spread over processes that are this program started again.
//!
//! Either way the news of all ranks come out of one channel. A process gets the communicator's id, which is a secret,
//! as a line on its standard input and not among its arguments; it writes its news to its standard output, a line of
//! JSON each, and ends when its input ends, so that no process outlives the one that started it.

use super::message::Message;
use super::options::Options;
use super::rank::Run;
use nccl::error::{Error, Result};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender};

/// The processes of a run; they end when this goes.
pub(crate) struct Processes(Vec<(Child, Option<ChildStdin>)>);

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, stdin) in &mut self.0 {
            drop(stdin.take());
            // Fails only where the process has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs `ranks` on threads; returns when all have ended. Every failure is sent as a message.
pub(crate) fn run_ranks(run: &Run, ranks: Range<u32>, news: &Sender<Message>) {
    std::thread::scope(|scope| {
        for rank in ranks {
            let news = news.clone();
            scope.spawn(move || {
                // The receiver is gone only when the run is over.
                let report = |message| drop(news.send(message));
                if let Err(error) = run.rank(rank, &report) {
                    report(Message::Failed {
                        text: format!("rank {rank}: {error}"),
                    });
                }
            });
        }
    });
}

/// Starts this program once for each process, with the same arguments.
pub(crate) fn start_processes(options: &Options, id: &[u8; 128], news: &Sender<Message>) -> Result<Processes> {
    let program = std::env::current_exe().map_err(|error| Error::system(format!("own path: {error}")))?;
    let mut started = Processes(Vec::new());
    for index in 0..options.processes() {
        let failed = |error: std::io::Error| Error::system(format!("cannot start process {index}: {error}"));
        let mut child = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .args(["--worker", &index.to_string()])
            .envs(options.host_of(index).map(|host| ("NCCL_HOSTID", host)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        started.0.push((child, stdin));
        let (Some((_, Some(stdin))), Some(stdout)) = (started.0.last_mut(), stdout) else {
            continue;
        };
        writeln!(stdin, "{}", to_hex(id)).map_err(failed)?;
        let news = news.clone();
        std::thread::Builder::new()
            .name(format!("news-{index}"))
            .spawn(move || forward(index, BufReader::new(stdout), &news))
            .map_err(failed)?;
    }
    Ok(started)
}

/// Passes a process's lines on until it ends; its end is news too.
fn forward(index: u32, lines: impl BufRead, news: &Sender<Message>) {
    let failed = |why: String| Message::Failed {
        text: format!("process {index} {why}"),
    };
    for line in lines.lines() {
        let message = match line {
            Ok(line) => serde_json::from_str(&line).unwrap_or_else(|_| failed(format!("wrote no message: {line:?}"))),
            Err(error) => failed(format!("cannot be read: {error}")),
        };
        if news.send(message).is_err() {
            return;
        }
    }
    // A failed send: the run is over, and nobody waits for this process any more.
    let _ = news.send(Message::Ended { process: index });
}

/// The part of a process that `start_processes` started: reads the id, and from then on watches for the end of input.
pub(crate) fn receive_id(index: u32, processes: u32) -> Result<[u8; 128]> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|error| Error::system(format!("standard input: {error}")))?;
    let id = from_hex(line.trim())
        .filter(|_| index < processes)
        .ok_or_else(|| Error::usage("--worker is for the program's own use"))?;
    std::thread::spawn(|| {
        let mut rest = String::new();
        // End of input and an error mean the same: whoever started this process is gone.
        let _ = std::io::stdin().lock().read_line(&mut rest);
        std::process::exit(1);
    });
    Ok(id)
}

/// Writes news to standard output until all senders are gone; whether none of them was of a failure.
pub(crate) fn write_news(news: &Receiver<Message>) -> bool {
    let mut good = true;
    for message in news {
        good &= !matches!(message, Message::Failed { .. });
        let written = serde_json::to_string(&message)
            .map_err(std::io::Error::from)
            .and_then(|line| writeln!(std::io::stdout().lock(), "{line}"));
        if written.is_err() {
            return false;
        }
    }
    good
}

fn to_hex(id: &[u8; 128]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<[u8; 128]> {
    let mut id = [0; 128];
    if text.len() != 2 * id.len() || !text.is_ascii() {
        return None;
    }
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_way_as_text() {
        let id: [u8; 128] = std::array::from_fn(|at| (at * 7) as u8);
        assert_eq!(from_hex(&to_hex(&id)), Some(id));
        for text in ["", "00", &"zz".repeat(128), &"é".repeat(128)] {
            assert_eq!(from_hex(text), None, "{text}");
        }
    }

    #[test]
    fn lines_become_messages_and_the_end_is_told() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let left = serde_json::to_string(&Message::Left { rank: 3 }).unwrap();
        forward(5, format!("{left}\njunk\n").as_bytes(), &sender);
        drop(sender);
        let news: Vec<Message> = receiver.iter().collect();
        assert!(matches!(news[0], Message::Left { rank: 3 }));
        assert!(matches!(&news[1], Message::Failed { text } if text.contains("process 5") && text.contains("junk")));
        assert!(matches!(news[2], Message::Ended { process: 5 }));
    }
}
