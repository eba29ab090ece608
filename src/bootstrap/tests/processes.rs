//! Ranks that are processes, and processes in a poor state. The child is this test program, told on stdin what to be.

use super::super::{PeerEvent, UniqueId};
use super::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;

fn hex(id: &UniqueId) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> UniqueId {
    let mut id = UniqueId([0; 128]);
    for (byte, digits) in id.0.iter_mut().zip(0..) {
        *byte = u8::from_str_radix(&text[2 * digits..2 * digits + 2], 16).unwrap();
    }
    id
}

/// A child process of this role: "ROLE RANK RANKS ID".
fn child(role: &str, rank: u32, ranks: u32, id: &UniqueId) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "bootstrap::tests::processes::child_process",
            "--ignored",
            "--nocapture",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "{role} {rank} {ranks} {}", hex(id)).unwrap();
    child
}

/// Waits until the child says so on stdout.
fn await_line(child: &mut Child, line: &str) {
    let stdout = BufReader::new(child.stdout.take().unwrap());
    assert!(
        stdout.lines().any(|found| found.unwrap().ends_with(line)),
        "the child ended without \"{line}\""
    );
}

fn await_end(child: Child) -> ExitStatus {
    child.wait_with_output().unwrap().status
}

#[test]
#[ignore = "the body of the child processes of the tests in this file"]
fn child_process() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let [role, rank, ranks, id] = words.as_slice() else {
        return;
    };
    let (rank, ranks, id) = (rank.parse().unwrap(), ranks.parse().unwrap(), from_hex(id));
    match *role {
        "exits" | "stays" => {
            let session = join(&id, introduction(rank, ranks), TIMEOUT).unwrap().0;
            session.all_gather(Ok(vec![]), TIMEOUT, &Cancel::default()).unwrap();
            if *role == "exits" {
                std::process::exit(0);
            }
            println!("joined");
            std::thread::sleep(TIMEOUT);
        }
        "poor" => poor(),
        "bare" => bare(),
        other => panic!("no role {other}"),
    }
}

/// No descriptor is free, then one, and so on, until a communicator of two ranks can be made.
fn poor() {
    use rustix::process::{setrlimit, Resource, Rlimit};
    let limit = Some(descriptors() as u64 + 20);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit,
            maximum: limit,
        },
    )
    .unwrap();
    let mut taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let mut refused = 0;
    loop {
        match create_unique_id_with(&on_loopback()) {
            Ok(id) => {
                let short = Duration::from_millis(100);
                let joined = ranks(2, move |rank| join(&id, introduction(rank, 2), short).map(|_| ()));
                if joined.iter().all(Result::is_ok) {
                    std::process::exit(if refused > 0 { 0 } else { 1 });
                }
            }
            Err(error) => {
                assert!(error.text.contains("limit of open files"), "{error}");
                refused += 1;
            }
        }
        // Three at a time: every attempt that fails costs a join's deadline.
        assert!(!taken.is_empty());
        taken.truncate(taken.len().saturating_sub(3));
    }
}

/// Standard descriptors are closed: none of ours may take their place.
fn bare() {
    for fd in 0..3 {
        // SAFETY: nothing in this child uses them afterwards; it ends by exit.
        unsafe { rustix::io::close(fd) };
    }
    let sessions = communicator(2);
    let taken =
        (0..3).any(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|to| !to.starts_with("/proc")));
    sessions.into_iter().for_each(Session::leave);
    std::process::exit(taken.into());
}

#[test]
fn a_process_that_exits_or_is_killed_is_lost_to_all_others() {
    let _alone = alone();
    for role in ["exits", "stays"] {
        for lost in [2, 0] {
            let id = new_id();
            let mut child = child(role, lost, 3, &id);
            let here = [1, if lost == 0 { 2 } else { 0 }];
            let heard = ranks(2, move |index| {
                let rank = here[index as usize];
                let session = join(&id, introduction(rank, 3), TIMEOUT).unwrap().0;
                let (sender, receiver) = mpsc::channel();
                session.watch(reporting(move |event| sender.send(event).unwrap_or_default()));
                session.all_gather(Ok(vec![]), TIMEOUT, &Cancel::default()).unwrap();
                (session, receiver)
            });
            if role == "stays" {
                await_line(&mut child, "joined");
                child.kill().unwrap();
            }
            await_end(child);
            let event = PeerEvent::Lost {
                rank: lost,
                place: format!("host:{}", 100 + lost),
            };
            for (session, receiver) in heard {
                assert_eq!(receiver.recv_timeout(TIMEOUT), Ok(event.clone()), "{role} {lost}");
                let error = session.all_gather(Ok(vec![]), TIMEOUT, &Cancel::default()).unwrap_err();
                assert!(
                    error.text.contains(&format!("rank {lost} (host:{})", 100 + lost)),
                    "{error}"
                );
                session.leave();
                assert!(receiver.iter().next().is_none(), "{role} {lost}: one event a rank");
            }
        }
    }
}

#[test]
fn want_of_descriptors_is_an_error_and_closed_standard_ones_are_left_alone() {
    let _alone = alone();
    for role in ["poor", "bare"] {
        let status = await_end(child(role, 0, 1, &UniqueId([0; 128])));
        assert!(status.success(), "{role}: {status}");
    }
}
