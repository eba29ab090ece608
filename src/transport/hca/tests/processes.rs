//! Two HCAs in two processes: the segment goes over by its descriptor, and the initiator writes the peer's memory.

use super::*;
use crate::bootstrap::Cancel;
use crate::transport::descriptors::{Address, Exchange};
use crate::transport::Limit;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const ROLE: &str = "OSSICLE_TEST_HCA_PEER";
const NAME: &str = "transport::hca::tests::processes::two_processes_write_each_others_memory";
const ROUNDS: u64 = 300;

/// What the two tell each other in text.
#[derive(Serialize, Deserialize)]
struct Card {
    ticket: Ticket,
    address: Address,
    number: u32,
    memory: u64,
    rkey: u32,
}

/// Makes this rank's side and connects it with the other's, of whom it gives what was heard.
fn meet(rank: usize, tell: &mut dyn FnMut(&str), hear: &mut dyn FnMut() -> String) -> (Side, Card) {
    let timeouts = Timeouts {
        silence_ns: FOR_EVER,
        no_receive_ns: FOR_EVER,
    };
    let side = Side::new(&Shape::default());
    let exchange = Exchange::open().unwrap();
    let mine = Card {
        ticket: side.hca.ticket(),
        address: exchange.address().clone(),
        number: side.qp.number(),
        memory: side.address(0),
        rkey: side.registration.key(),
    };
    tell(&serde_json::to_string(&mine).unwrap());
    let theirs: Card = serde_json::from_str(&hear()).unwrap();
    let mut addresses = [None, None];
    addresses[1 - rank] = Some(&theirs.address);
    let cancel = Cancel::default();
    let limit = Limit {
        timeout: LONG,
        cancel: &cancel,
    };
    let mut fds = exchange.run(rank, &addresses, side.hca.descriptor(), &limit).unwrap();
    let fd = fds[1 - rank].take().unwrap();
    let peer = side.hca.attach(&theirs.ticket, Some(fd.as_fd())).unwrap();
    side.connect(peer, theirs.number, timeouts);
    (side, theirs)
}

impl Card {
    fn remote(&self, at: u64) -> Remote {
        Remote {
            address: self.memory + at,
            rkey: self.rkey,
        }
    }
}

impl Side {
    /// Until the word at this place of its memory is at least so much.
    fn await_word(&self, at: usize, least: u64) {
        // SAFETY: a word of this side's memory that all change atomically.
        let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(self.memory.address().add(at).cast()) };
        awaited("the peer's word", || {
            (word.load(Ordering::Acquire) >= least).then_some(())
        });
    }
}

/// Payload, a flag behind it, an immediate behind both; the peer does the same. Then each says that it has read.
fn one_round(side: &mut Side, peer: &Card, rank: u64, round: u64) {
    let salt = round * 2 + rank;
    side.bytes()[..4096].as_chunks_mut::<8>().0.fill(salt.to_ne_bytes());
    let payload = side.write(0, peer.remote(8192), 4096);
    side.queue.post(payload, Report::OnError, Fence::None).unwrap();
    let flag = round.to_ne_bytes();
    let flag = write_of(peer.remote(16384), vec![Data::Inline(&flag)]);
    side.queue.post(flag, Report::OnError, Fence::None).unwrap();
    let index = side.post(Operation::Write {
        remote: peer.remote(0),
        immediate: Some(round as u32),
        data: List::Owned(vec![]),
    });
    side.ring();
    side.await_word(16384, round);
    let expected = (round * 2 + 1 - rank).to_ne_bytes();
    let inbox = &side.bytes()[8192..8192 + 4096];
    assert!(inbox.as_chunks::<8>().0.iter().all(|word| *word == expected));
    side.await_good(index);
    let got = awaited("the peer's immediate", || side.received.poll());
    let expected = Outcome::Received {
        immediate: round as u32,
        bytes: 0,
    };
    assert_eq!(got.outcome, expected);
    side.queue.post_receives(1);
    let index = side.post(Operation::FetchAdd {
        remote: peer.remote(16392),
        add: 1,
        sink: side.local(24576, 8),
    });
    side.ring();
    side.await_good(index);
    side.await_word(16392, round);
}

/// One rank's part: both run it.
fn play(rank: usize, mut tell: impl FnMut(&str), mut hear: impl FnMut() -> String) {
    let (mut side, peer) = meet(rank, &mut tell, &mut hear);
    side.queue.post_receives(8);
    for round in 1..=ROUNDS {
        one_round(&mut side, &peer, rank as u64, round);
    }
    // Memory outside the peer's segment is not to be reached from here.
    let mut own = vec![0u8; 64];
    // SAFETY: it outlives the registration, and nobody reaches it.
    let outside = unsafe {
        side.hca
            .register_outside(side.domain, own.as_mut_ptr(), 64, access::ALL)
    };
    tell(&format!("{} {}", own.as_ptr() as u64, outside.as_ref().unwrap().key()));
    let theirs = hear();
    if rank == 0 {
        let (address, rkey) = theirs.trim().split_once(' ').unwrap();
        let remote = Remote {
            address: address.parse().unwrap(),
            rkey: rkey.parse().unwrap(),
        };
        let write = side.write(0, remote, 8);
        side.post(write);
        side.ring();
        side.await_failure(wire::syndrome::REMOTE_OPERATION, check::UNMAPPED);
    }
    tell("done");
    assert_eq!(hear().trim(), "done");
}

#[test]
fn two_processes_write_each_others_memory() {
    let line = |from: &mut dyn BufRead| {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(from.read_line(&mut line).unwrap() > 0, "the other process has ended");
            // The test harness prints lines of its own.
            if let Some((_, text)) = line.split_once("peer> ") {
                return text.to_owned();
            }
        }
    };
    if std::env::var_os(ROLE).is_some() {
        let mut input = std::io::stdin().lock();
        let output = || std::io::stdout().lock();
        play(
            1,
            |text| writeln!(output(), "peer> {text}").unwrap(),
            || line(&mut input),
        );
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
        .env(ROLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    play(0, |text| writeln!(input, "peer> {text}").unwrap(), || line(&mut output));
    std::io::copy(&mut output, &mut std::io::sink()).unwrap();
    assert!(child.wait().unwrap().success());
}
