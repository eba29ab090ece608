//! Each operation against a plain model, and indices that come round.

use super::*;
use proptest::prelude::*;

fn fill(bytes: &mut [u8], salt: u8) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i as u8)
            .wrapping_mul(31)
            .wrapping_add(i as u8 ^ (i >> 8) as u8)
            .wrapping_add(salt);
    }
}

#[derive(Clone, Debug)]
enum Act {
    Write { pieces: Vec<(usize, usize)>, to: usize },
    Inline { bytes: usize, to: usize },
    Read { from: usize, pieces: Vec<(usize, usize)> },
    Add { word: usize, add: u64, sink: usize },
    Nop,
}

/// Sources lie in the first half of a side's memory, sinks and targets in the second, so that an act's order is its own.
const HALF: usize = MEMORY / 2;

fn act() -> impl Strategy<Value = Act> {
    let pieces = || prop::collection::vec((0..HALF - 600, 1..600usize), 1..4);
    prop_oneof![
        (pieces(), 0..HALF - 2000).prop_map(|(pieces, to)| Act::Write { pieces, to: HALF + to }),
        (0..200usize, 0..HALF - 300).prop_map(|(bytes, to)| Act::Inline { bytes, to: HALF + to }),
        (0..HALF - 2000, pieces()).prop_map(|(from, pieces)| Act::Read { from, pieces }),
        (0..HALF / 8, any::<u64>(), 0..HALF / 8).prop_map(|(word, add, sink)| Act::Add {
            word: HALF + word * 8,
            add,
            sink: HALF + sink * 8
        }),
        Just(Act::Nop),
    ]
}

/// Posts the act on `a` and does it to both models.
fn perform(act: &Act, a: &mut Side, b: &Side, near: &mut [u8], far: &mut [u8]) -> u16 {
    static PAYLOAD: [u8; 200] = [0x5a; 200];
    match act {
        Act::Write { pieces, to } => {
            let mut at = *to;
            for (from, bytes) in pieces {
                far[at..at + bytes].copy_from_slice(&near[*from..from + bytes]);
                at += bytes;
            }
            let data = pieces.iter().map(|(from, bytes)| Data::Memory(a.local(*from, *bytes)));
            a.post(write_of(b.remote(*to), data.collect()))
        }
        Act::Inline { bytes, to } => {
            far[*to..to + bytes].copy_from_slice(&PAYLOAD[..*bytes]);
            a.post(write_of(b.remote(*to), vec![Data::Inline(&PAYLOAD[..*bytes])]))
        }
        Act::Read { from, pieces } => {
            let mut at = *from;
            let sinks = pieces.iter().map(|(to, bytes)| {
                near[HALF + to..HALF + to + bytes].copy_from_slice(&far[at..at + bytes]);
                at += bytes;
                Data::Memory(a.local(HALF + to, *bytes))
            });
            let sink = List::Owned(sinks.collect());
            a.post(Operation::Read {
                remote: b.remote(*from),
                sink,
            })
        }
        Act::Add { word, add, sink } => {
            let before = u64::from_ne_bytes(far[*word..word + 8].try_into().unwrap());
            far[*word..word + 8].copy_from_slice(&before.wrapping_add(*add).to_ne_bytes());
            near[*sink..sink + 8].copy_from_slice(&before.to_ne_bytes());
            a.post(Operation::FetchAdd {
                remote: b.remote(*word),
                add: *add,
                sink: a.local(*sink, 8),
            })
        }
        Act::Nop => a.post(Operation::Nop),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn requests_do_what_a_plain_model_does(acts in prop::collection::vec(act(), 1..60), batch in 1usize..5) {
        let (mut a, mut b) = pair(&Shape::default());
        let (mut near, mut far) = (vec![0; MEMORY], vec![0; MEMORY]);
        fill(&mut near, 3);
        fill(&mut far, 77);
        a.bytes().copy_from_slice(&near);
        b.bytes().copy_from_slice(&far);
        for acts in acts.chunks(batch) {
            let posted: Vec<u16> = acts.iter().map(|act| perform(act, &mut a, &b, &mut near, &mut far)).collect();
            a.ring();
            posted.into_iter().for_each(|index| a.await_good(index));
        }
        prop_assert!(a.bytes() == near.as_slice());
        prop_assert!(b.bytes() == far.as_slice());
    }
}

#[test]
fn indices_and_owner_bits_come_round() {
    // Requests of 1 and 2 blocks on a ring of 16, completions on a CQ of 8: every edge is crossed, and 16 bits are.
    let shape = Shape {
        send_blocks: 16,
        entries: 8,
        ..Shape::default()
    };
    let (mut a, mut b) = pair(&shape);
    let payload: Vec<u8> = (0..60).map(|i| i * 3 + 1).collect();
    let mut blocks = 0u32;
    let mut round = 0usize;
    while blocks < 70_000 {
        let short = (round as u64).to_ne_bytes();
        let first = a
            .queue
            .post(
                write_of(b.remote(0), vec![Data::Inline(&payload)]),
                Report::OnError,
                Fence::None,
            )
            .unwrap();
        let second = a.post(write_of(b.remote(64), vec![Data::Inline(&short)]));
        assert_eq!((first, second), (blocks as u16, (blocks + 2) as u16));
        blocks += 3;
        if round.is_multiple_of(5) {
            let nop = a.post(Operation::Nop);
            assert_eq!(nop, blocks as u16);
            blocks += 1;
            a.ring();
            a.await_good(second);
            a.await_good(nop);
        } else {
            a.ring();
            a.await_good(second);
        }
        if round.is_multiple_of(1000) {
            assert_eq!(&b.bytes()[..60], payload.as_slice());
            assert_eq!(&b.bytes()[64..72], &short);
        }
        round += 1;
    }
}

#[test]
fn flags_tell_that_payload_written_before_is_there() {
    let (mut a, b) = pair(&Shape::default());
    let flag = b.memory.address() as u64 + 8192;
    let words = b.memory.address() as u64;
    const ROUNDS: u64 = 2000;
    let reader = std::thread::spawn(move || {
        // SAFETY: words of b's memory, which lives until the thread was joined; others change them atomically.
        let flag = unsafe { std::sync::atomic::AtomicU64::from_ptr(flag as *mut u64) };
        for round in 1..=ROUNDS {
            awaited("a flag", || (flag.load(Ordering::Acquire) >= round).then_some(()));
            for word in 0..32 {
                // SAFETY: as above; the payload of later rounds may be on its way.
                let word = unsafe { std::sync::atomic::AtomicU64::from_ptr((words as *mut u64).add(word)) };
                assert!(word.load(Ordering::Relaxed) >= round);
            }
        }
    });
    for round in 1..=ROUNDS {
        let at = (round % 4) as usize * 512;
        a.bytes()[at..at + 256].as_chunks_mut::<8>().0.fill(round.to_ne_bytes());
        let (to_data, to_flag) = (b.remote(0), b.remote(8192));
        let write = a.write(at, to_data, 256);
        a.queue.post(write, Report::OnError, Fence::None).unwrap();
        let flag = round.to_ne_bytes();
        let index = a.post(write_of(to_flag, vec![Data::Inline(&flag)]));
        a.ring();
        a.await_good(index);
    }
    reader.join().unwrap();
}

#[test]
fn an_immediate_takes_a_receive_and_is_reported_to_the_peer() {
    let (mut a, mut b) = pair(&Shape::default());
    b.queue.post_receives(3);
    a.bytes()[..100].fill(9);
    for turn in 0..3u16 {
        let data = if turn == 2 {
            vec![]
        } else {
            vec![Data::Memory(a.local(0, 100))]
        };
        let bytes = if turn == 2 { 0 } else { 100 };
        let index = a.post(Operation::Write {
            remote: b.remote(usize::from(turn) * 100),
            immediate: Some(0xdead_0000 + u32::from(turn)),
            data: List::Owned(data),
        });
        a.ring();
        a.await_good(index);
        let got = awaited("an immediate", || b.received.poll());
        let immediate = 0xdead_0000 + u32::from(turn);
        assert_eq!((got.qpn, got.index), (b.qp.number(), turn));
        assert_eq!(got.outcome, Outcome::Received { immediate, bytes });
    }
    assert_eq!(b.bytes()[..200], [9; 200]);
    // None is left.
    let remote = b.remote(0);
    a.post(Operation::Write {
        remote,
        immediate: Some(1),
        data: List::Owned(vec![]),
    });
    a.ring();
    a.await_failure(wire::syndrome::RNR_RETRY_EXCEEDED, check::NO_RECEIVE);
}

#[test]
fn a_queue_waits_for_a_receive_as_long_as_it_is_told() {
    let timeouts = Timeouts {
        silence_ns: 0,
        no_receive_ns: FOR_EVER,
    };
    let (mut a, mut b) = pair(&Shape {
        timeouts,
        ..Shape::default()
    });
    let remote = b.remote(0);
    let index = a.post(Operation::Write {
        remote,
        immediate: Some(5),
        data: List::Owned(vec![]),
    });
    a.ring();
    assert!(a.sent.poll().is_none());
    b.queue.post_receives(1);
    a.hca.wake();
    a.await_good(index);
    assert!(awaited("an immediate", || b.received.poll()).outcome == Outcome::Received { immediate: 5, bytes: 0 });
}

#[test]
fn memory_outside_the_segment_is_reached_within_a_process() {
    let (mut a, mut b) = pair(&Shape::default());
    let (mut source, mut target) = (vec![7u8; 5000], vec![0u8; 5000]);
    // SAFETY: both outlive their registrations, and are looked at after the completion.
    let (from, to) = unsafe {
        (
            a.hca.register_outside(a.domain, source.as_mut_ptr(), 5000, 0).unwrap(),
            b.hca
                .register_outside(b.domain, target.as_mut_ptr(), 5000, access::REMOTE_WRITE)
                .unwrap(),
        )
    };
    let remote = Remote {
        address: target.as_ptr() as u64 + 1,
        rkey: to.key(),
    };
    let memory = Memory {
        address: source.as_ptr() as u64,
        lkey: from.key(),
        bytes: 4999,
    };
    let index = a.post(write_of(remote, vec![Data::Memory(memory)]));
    a.ring();
    a.await_good(index);
    assert_eq!(target[0], 0);
    assert!(target[1..].iter().all(|byte| *byte == 7));
    drop(to);
    let index = a.post(Operation::Nop);
    a.ring();
    a.await_good(index);
    a.post(write_of(remote, vec![Data::Memory(memory)]));
    a.ring();
    a.await_failure(wire::syndrome::REMOTE_ACCESS, check::REMOTE_KEY);
    assert_eq!(b.qp.state(), State::Error);
    let _ = b.bytes();
}
