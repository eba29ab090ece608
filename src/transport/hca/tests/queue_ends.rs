//! Doorbells and records, completion queues that are full, states, injected faults, an engine that sleeps.

use super::*;
use parking_lot::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

fn value(next: u32, qpn: u32) -> u64 {
    u64::from_ne_bytes(wire::doorbell(next, qpn))
}

#[test]
fn doorbells_are_checked() {
    let bad = wire::syndrome::LOCAL_QP_OP;
    let with = |ring: fn(&mut Side), vendor: u8, record_first: bool| {
        let (mut a, _b) = pair(&Shape {
            record_first,
            ..Shape::default()
        });
        a.post(Operation::Nop);
        ring(&mut a);
        a.hca.wake();
        a.await_failure(bad, vendor);
    };
    let other_qp = |a: &mut Side| a.queue.ring_with(value(1, a.qp.number() + 1));
    with(other_qp, check::DOORBELL_QP, false);
    with(
        |a| a.queue.ring_with(value(100, a.qp.number())),
        check::DOORBELL_RANGE,
        false,
    );
    let far_record = |a: &mut Side| {
        a.queue.record(1).store(500u32.to_be(), Ordering::Release);
        a.queue.ring_with(value(1, a.qp.number()));
    };
    with(far_record, check::DOORBELL_RANGE, false);
    with(
        |a| a.queue.ring_with(value(1, a.qp.number())),
        check::RECORD_BEHIND,
        true,
    );
    // What was never written has the index of nothing.
    let beyond = |a: &mut Side| {
        a.queue.record(1).store(3u32.to_be(), Ordering::Release);
        a.queue.ring_with(value(3, a.qp.number()));
        a.hca.wake();
        a.await_good(0);
    };
    with(beyond, check::WQE_INDEX, true);
}

#[test]
fn a_doorbell_may_come_first_or_carry_the_last_index() {
    let (mut a, _b) = pair(&Shape {
        record_first: false,
        ..Shape::default()
    });
    let qpn = a.qp.number();
    let index = a.post(Operation::Nop);
    a.queue.ring_with(value(1, qpn));
    a.hca.wake();
    a.await_good(index);
    // As rdma-core does: the record says what is next, the doorbell has the last request's own index.
    let index = a.post(Operation::Nop);
    a.queue.record(1).store(2u32.to_be(), Ordering::Release);
    a.queue.ring_with(value(1, qpn) | 0x7 << 24);
    a.hca.wake();
    a.await_good(index);
    // A stale one takes nothing back.
    a.queue.ring_with(value(1, qpn));
    let index = a.post(Operation::Nop);
    a.ring();
    a.await_good(index);
}

#[test]
fn a_full_completion_queue_breaks_unless_it_is_told_to_go_on() {
    let post = |a: &mut Side| {
        for _ in 0..9 {
            a.post(Operation::Nop);
        }
        a.ring();
    };
    let (mut a, _b) = pair(&Shape {
        entries: 8,
        ..Shape::default()
    });
    post(&mut a);
    awaited("the overrun", || a.send_cq.overran().then_some(()));
    awaited("the error state", || (a.qp.state() == State::Error).then_some(()));
    (0..8).for_each(|index| a.await_good(index));
    assert!(a.sent.poll().is_none());
    let (mut a, _b) = pair(&Shape {
        entries: 8,
        ignore_overrun: true,
        ..Shape::default()
    });
    post(&mut a);
    // The ninth took the first one's place, with the other owner bit.
    let place = a.send_cq.place();
    // SAFETY: the last byte of the first completion, which the engine changes with the seven before it.
    let last = unsafe { std::sync::atomic::AtomicU64::from_ptr(place.ring.add(56).cast()) };
    awaited("the ninth", || {
        (last.load(Ordering::Acquire).to_ne_bytes()[5] == 8).then_some(())
    });
    assert_eq!(last.load(Ordering::Acquire).to_ne_bytes()[7], 1);
    assert!(!a.send_cq.overran() && a.qp.state() == State::ReadyToSend);
}

#[test]
fn a_peers_full_completion_queue_fails_the_request() {
    let (mut a, mut b) = pair(&Shape {
        entries: 8,
        ..Shape::default()
    });
    b.queue.post_receives(9);
    let remote = b.remote(0);
    for turn in 0..9u16 {
        a.post(Operation::Write {
            remote,
            immediate: Some(0),
            data: List::Owned(vec![]),
        });
        a.ring();
        if turn < 8 {
            a.await_good(turn);
        }
    }
    a.await_failure(wire::syndrome::REMOTE_OPERATION, check::PEER_CQ);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn a_failed_queue_gives_back_what_was_posted_and_states_follow_each_other() {
    let mut a = Side::new(&Shape::default());
    let refused =
        a.qp.start(Timeouts {
            silence_ns: 0,
            no_receive_ns: 0,
        })
        .unwrap_err();
    assert!(
        refused.text.contains("Init") && refused.text.contains("ReadyToSend"),
        "{refused}"
    );
    a.queue.post_receives(2);
    // Not yet ready to send: it stays where it is.
    a.post(Operation::Nop);
    a.post(Operation::Nop);
    a.ring();
    a.qp.fail().unwrap();
    a.await_failure(wire::syndrome::WR_FLUSH, check::FLUSHED);
    a.await_failure(wire::syndrome::WR_FLUSH, check::FLUSHED);
    for index in 0..2 {
        let got = awaited("a flushed receive", || a.received.poll());
        assert_eq!(got.index, index);
        let flushed = matches!(
            got.outcome,
            Outcome::Failed {
                receive: true,
                syndrome: wire::syndrome::WR_FLUSH,
                ..
            }
        );
        assert!(flushed, "{got:?}");
    }
    assert!(a.qp.init(0).is_err());
}

#[test]
fn faults_come_where_they_are_wanted() {
    let (mut a, mut b) = pair(&Shape::default());
    let number = a.qp.number();
    a.hca.inject(number, 0, Fault::DropCqe).unwrap();
    a.hca.inject(number, 1, Fault::Delay { steps: 100 }).unwrap();
    a.hca
        .inject(
            number,
            3,
            Fault::Syndrome {
                syndrome: wire::syndrome::TRANSPORT_RETRY_EXCEEDED,
                vendor: 0x81,
            },
        )
        .unwrap();
    a.bytes()[..8].fill(1);
    let write = a.write(0, b.remote(0), 8);
    a.post(write);
    let delayed = a.post(Operation::Nop);
    let good = a.post(Operation::Nop);
    let spoiled = a.write(0, b.remote(8), 8);
    a.post(spoiled);
    a.post(Operation::Nop);
    a.ring();
    a.await_good(delayed);
    a.await_good(good);
    a.await_failure(wire::syndrome::TRANSPORT_RETRY_EXCEEDED, 0x81);
    a.await_failure(wire::syndrome::WR_FLUSH, check::FLUSHED);
    assert_eq!(b.bytes()[..16], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn an_engine_that_sleeps_is_woken() {
    let (mut a, _b) = pair(&Shape::default());
    for turn in 0..3u16 {
        awaited("sleep", || a.hca.service.is_asleep().then_some(()));
        a.post(Operation::Nop);
        a.queue.ring();
        // The doorbell alone wakes nobody.
        assert!(a.sent.poll().is_none());
        a.hca.wake();
        a.await_good(turn);
    }
    // While it is kept awake, or told that something is outstanding, a doorbell is enough.
    for watched in [false, true] {
        awaited("sleep", || a.hca.service.is_asleep().then_some(()));
        let _awake = (!watched).then(|| a.hca.keep_awake());
        let _watch = watched.then(|| a.hca.watch(|| true));
        std::thread::sleep(Duration::from_millis(20));
        let index = a.post(Operation::Nop);
        a.queue.ring();
        a.await_good(index);
    }
}

/// A kernel waits for long, then rings its last doorbell and leaves between two looks of the thread.
#[test]
fn the_last_doorbell_of_what_was_outstanding_is_seen() {
    let (mut a, _b) = pair(&Shape::default());
    let (ask, asked) = mpsc::channel();
    let (ring, rung) = mpsc::channel::<()>();
    let (left, ends) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
    let (ending, exchange) = (ends.clone(), Mutex::new((ask, rung)));
    let _watch = a.hca.watch(move || {
        if !ending.load(Ordering::SeqCst) || left.swap(true, Ordering::SeqCst) {
            return !ending.load(Ordering::SeqCst);
        }
        let (ask, rung) = &*exchange.lock();
        ask.send(()).unwrap();
        rung.recv().is_err()
    });
    let index = a.post(Operation::Nop);
    // Longer than the thread goes on after work.
    std::thread::sleep(Duration::from_millis(50));
    ends.store(true, Ordering::SeqCst);
    asked.recv().unwrap();
    a.queue.ring();
    ring.send(()).unwrap();
    a.await_good(index);
}

#[test]
fn what_an_hca_has_is_bounded_and_comes_back() {
    let side = Side::new(&Shape::default());
    let registered: Vec<Registration> = (0..6)
        .map(|_| side.hca.register(side.domain, &side.memory, 0).unwrap())
        .collect();
    let keys: std::collections::HashSet<u32> = registered.iter().map(Registration::key).collect();
    assert_eq!(keys.len(), 6);
    let refused = side.hca.register(side.domain, &side.memory, 0).err().unwrap();
    assert!(refused.text.contains("8 regions"), "{refused}");
    drop(registered);
    let again = side.hca.register(side.domain, &side.memory, 0).unwrap();
    assert!(!keys.contains(&again.key()));
    let refused = side.hca.allocate(2 << 20).err().unwrap();
    assert!(refused.text.contains("no 2097152 left"), "{refused}");
    let other = Side::new(&Shape::default());
    assert!(side.hca.register(side.domain, &other.memory, 0).is_err());
    assert_eq!(side.hca.attach(&side.hca.ticket(), None), Ok(Peer::SELF));
}

#[test]
fn a_forked_child_lets_its_parents_hca_lie() {
    let side = Side::new(&Shape::default());
    let watch = side.hca.watch(|| true);
    // SAFETY: the child drops what it inherited, which takes no lock that a thread of the parent may hold, asks for one
    // change, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = side.qp.fail().is_err();
        drop(watch);
        drop(side);
        // SAFETY: ends the child without running anything of its parent's.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above and writes its status to a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(side.qp.state(), State::Init);
}
