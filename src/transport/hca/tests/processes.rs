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

/// One rank's part: both run it.
fn play(rank: usize, mut tell: impl FnMut(&str), mut hear: impl FnMut() -> String) {
    let timeouts = Timeouts {
        silence_ns: FOR_EVER,
        no_receive_ns: FOR_EVER,
    };
    let mut side = Side::new(&Shape::default());
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
    let remote = |at: u64| Remote {
        address: theirs.memory + at,
        rkey: theirs.rkey,
    };
    side.queue.post_receives(8);
    for round in 1..=ROUNDS {
        // Payload of this round, a flag behind it, an immediate behind both; the peer does the same.
        let salt = round * 2 + rank as u64;
        side.bytes()[..4096].as_chunks_mut::<8>().0.fill(salt.to_ne_bytes());
        let payload = side.write(0, remote(8192), 4096);
        side.queue.post(payload, Report::OnError, Fence::None).unwrap();
        let flag = round.to_ne_bytes();
        let flag = write_of(remote(16384), vec![Data::Inline(&flag)]);
        side.queue.post(flag, Report::OnError, Fence::None).unwrap();
        let index = side.post(Operation::Write {
            remote: remote(0),
            immediate: Some(round as u32),
            data: List::Owned(vec![]),
        });
        side.ring();
        // SAFETY: a word of this side's memory that all change atomically.
        let flag = unsafe { std::sync::atomic::AtomicU64::from_ptr(side.memory.address().add(16384).cast()) };
        awaited("the peer's flag", || {
            (flag.load(Ordering::Acquire) >= round).then_some(())
        });
        let expected = (round * 2 + 1 - rank as u64).to_ne_bytes();
        assert!(side.bytes()[8192..8192 + 4096]
            .as_chunks::<8>()
            .0
            .iter()
            .all(|word| *word == expected));
        side.await_good(index);
        let got = awaited("the peer's immediate", || side.received.poll());
        assert_eq!(
            got.outcome,
            Outcome::Received {
                immediate: round as u32,
                bytes: 0
            }
        );
        side.queue.post_receives(1);
        // The peer may overwrite the payload once this has said so.
        let add = Operation::FetchAdd {
            remote: remote(16392),
            add: 1,
            sink: side.local(24576, 8),
        };
        let index = side.post(add);
        side.ring();
        side.await_good(index);
        // SAFETY: as above.
        let read = unsafe { std::sync::atomic::AtomicU64::from_ptr(side.memory.address().add(16392).cast()) };
        awaited("the peer's reading", || {
            (read.load(Ordering::Acquire) >= round).then_some(())
        });
    }
    // Memory outside the peer's segment is not to be reached from here.
    let mut own = vec![0u8; 64];
    // SAFETY: it outlives the registration, and nobody reaches it.
    let outside = unsafe {
        side.hca
            .register_outside(side.domain, own.as_mut_ptr(), 64, access::ALL)
    }
    .unwrap();
    tell(&format!("{} {}", own.as_ptr() as u64, outside.key()));
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
