//! Zero copy: every mix of ranks that lend and do not, and what an abort takes back.

use super::moves::{check_broadcast, check_gather};
use super::oracle::Patterns;
use super::*;
use crate::launch::layout::{STOP_ABORT, STOP_FROM_SHIFT, STOP_PEER_LOST};
use crate::launch::lending::Reached;
use std::sync::atomic::AtomicBool;
use std::sync::Barrier;

/// Engines of which rank r lends what bits 2r (its input) and 2r + 1 (its output) of `mix` say.
fn lenders(ranks: u32, channels: u32, mix: u64) -> Vec<Engine> {
    let devices: Vec<_> = (0..ranks).map(|rank| host::open(rank as i32)).collect();
    let mut engines = cluster_with(&devices, &profile(ranks, Algorithm::TwoShot, channels), Path::P2p, true);
    for (rank, engine) in engines.iter_mut().enumerate() {
        engine.lending.input = mix >> (2 * rank) & 1 != 0;
        engine.lending.output = mix >> (2 * rank + 1) & 1 != 0;
    }
    engines
}

#[test]
fn every_mix_of_direct_and_staged_buffers_gives_the_same_bits() {
    for (ranks, mixes) in [(2, 16), (3, 64)] {
        for mix in 0..mixes {
            let engines = lenders(ranks, 1 + ranks % 2, mix);
            check::<f32>(&engines, Order::Ranks, mix, &[1, 17, 1000, 5003]);
            check::<bf16>(&engines, Order::Ranks, mix + 100, &[3, 2000]);
        }
    }
    let mut patterns = Patterns(5);
    for ranks in [4, 8, 16] {
        for _ in 0..3 {
            check_all_types(&lenders(ranks, 2, patterns.next()), Order::Ranks, &[2, 255, 3001]);
        }
    }
}

/// All-reduces of every mix between moves, which go on with the same slots, counters and numbers of rounds.
#[test]
fn all_reduces_that_lend_mix_with_moves() {
    let mut patterns = Patterns(11);
    for ranks in [2, 3, 5] {
        let mut engines = lenders(ranks, 2, 0);
        for operation in 0..60 {
            for engine in &mut engines {
                let drawn = patterns.next() >> 20;
                (engine.lending.input, engine.lending.output) = (drawn & 3 != 0, drawn & 12 != 0);
            }
            let count = 1 + patterns.next() as usize % 6000;
            let mut bytes = || (0..count).map(|_| patterns.next() as u8).collect::<Vec<u8>>();
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| bytes()).collect();
            match operation % 4 {
                0 => check_gather(&engines, &inputs, operation % 3, operation % 2 == 0),
                1 => check_broadcast(&engines, count % ranks as usize, &inputs, 0, operation % 2 == 0),
                _ => check::<i32>(&engines, Order::Ranks, operation as u64, &[count]),
            }
        }
    }
}

/// Who lends changes from call to call, on the same staging, and so do counts.
#[test]
fn ranks_may_lend_in_one_operation_and_not_in_the_next() {
    let mut patterns = Patterns(9);
    for ranks in [2, 3, 5] {
        let mut engines = lenders(ranks, 3, 0);
        for operation in 0..60 {
            for engine in &mut engines {
                let drawn = patterns.next() >> 20;
                (engine.lending.input, engine.lending.output) = (drawn & 1 != 0, drawn & 6 != 0);
            }
            let count = 1 + patterns.next() as usize % 4000;
            check::<i32>(&engines, Order::Ranks, operation, &[count]);
        }
    }
}

#[test]
fn what_is_lent_is_said_with_the_reason() {
    let device = host::open(0);
    let lent = |path, ranks: usize, enabled, reached| {
        let lending = Lending::new(device.as_ref(), path, &vec![device.uuid(); ranks], enabled);
        let input = Devices::ALL;
        lending.of(Reached { input, output: reached }).to_string()
    };
    for (said, words) in [
        (
            lent((Path::P2p, 1), 2, true, Devices::ALL),
            "input direct, output direct: all ranks are in one process",
        ),
        (
            lent((Path::P2p, 1), 2, false, Devices::ALL),
            "input staged, output staged: OSSICLE_ZERO_COPY is 0 on a rank",
        ),
        (lent((Path::Shm, 1), 2, true, Devices::ALL), "not all in one process"),
        (
            lent((Path::P2p, 2), 2, true, Devices::ALL),
            "not all in one process on one host",
        ),
    ] {
        assert!(said.contains(words), "{said}");
    }
}

/// What a rank of the tests below does in a thread of its own: all-reduces until it is told to stop. The buffer goes when
/// the call has returned, as its user's does.
fn reduce_until_stopped(engine: &Engine) -> Error {
    let mut buffer = vec![1f32; 20_000];
    let request = sum_in_place(&mut buffer);
    loop {
        let work = engine.prepare(&request).unwrap().unwrap();
        if let Err(error) = admit(&[(engine, &[work])]).and_then(Admitted::launch) {
            return error;
        }
    }
}

fn sum_in_place(buffer: &mut [f32]) -> Request {
    Request {
        collective: Collective::AllReduce,
        send: buffer.as_ptr().cast(),
        recv: buffer.as_mut_ptr().cast(),
        count: buffer.len(),
        datatype: DataType::Float32,
        op: ReduceOp::Sum,
        stream: std::ptr::null_mut(),
    }
}

/// Rank 0 is aborted while the others are in an operation, or come to one; in half of the rounds rank 2 never comes. They
/// end without anybody else's word, since they were told.
#[test]
fn an_aborted_rank_takes_back_what_it_lent() {
    for round in 0..40 {
        let engines = lenders(3, 1, u64::MAX);
        let coming = 2 + round as usize % 2;
        let begun = Barrier::new(coming + 1);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = engines[..coming]
                .iter()
                .map(|engine| {
                    scope.spawn(|| {
                        begun.wait();
                        reduce_until_stopped(engine)
                    })
                })
                .collect();
            begun.wait();
            std::thread::sleep(Duration::from_micros(100 * round));
            engines[0].stop(Stop::Abort);
            for rank in ranks {
                assert_eq!(rank.join().unwrap().code, crate::error::Code::RemoteError);
            }
        });
    }
}

#[test]
fn ranks_that_are_aborted_at_once_do_not_wait_for_each_other() {
    for round in 0..40 {
        let engines = lenders(3, 2, u64::MAX);
        let begun = Barrier::new(6);
        std::thread::scope(|scope| {
            for engine in &engines {
                scope.spawn(|| {
                    begun.wait();
                    reduce_until_stopped(engine)
                });
                scope.spawn(|| {
                    begun.wait();
                    std::thread::sleep(Duration::from_micros(100 * round));
                    engine.stop(Stop::Abort);
                });
            }
        });
    }
}

/// An end waits for a kernel that says it may be using what was lent in an unfinished operation, and for no other: none
/// that has not begun, which only this thread could let run, is parked, has left, or finishes what this rank has finished.
#[test]
fn an_end_waits_for_kernels_that_use_what_was_lent_and_for_no_others() {
    let waits = |borrowing: u64, out: u64, left: u64| {
        let engines = lenders(2, 1, u64::MAX);
        // Rank 0 has finished operations 0 to 3.
        engines[0].control().left.store(4, Ordering::SeqCst);
        let peer = engines[1].control();
        peer.borrowing.store(borrowing, Ordering::SeqCst);
        peer.out.store(out, Ordering::SeqCst);
        peer.left.store(left, Ordering::SeqCst);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = scope.spawn(|| {
                engines[0].stop(Stop::Abort);
                ended.store(true, Ordering::SeqCst);
            });
            if borrowing == 5 && out < 5 && left < 5 {
                // It may take as long as it likes: what it waits for is not there yet.
                std::thread::sleep(Duration::from_millis(20));
                assert!(!ended.load(Ordering::SeqCst) && engines[0].control().stop.load(Ordering::SeqCst) == 0);
                peer.out.store(5, Ordering::SeqCst);
            }
            end.join().unwrap();
        });
        assert_eq!(engines[0].control().stop.load(Ordering::SeqCst), STOP_ABORT);
        assert_eq!(
            engines[1].control().stop.load(Ordering::SeqCst),
            4 << STOP_FROM_SHIFT | STOP_PEER_LOST
        );
        // So that the end of the engines finds them idle.
        peer.left.store(9, Ordering::SeqCst);
    };
    for (borrowing, out, left) in [(0, 0, 0), (4, 0, 3), (5, 5, 4), (5, 0, 5), (5, 0, 4)] {
        waits(borrowing, out, left);
    }
}

/// Of several losses the first unfinished operation counts, and an abort is an abort.
#[test]
fn the_stop_word_keeps_the_first_operation_that_is_unfinished() {
    let engines = lenders(4, 1, u64::MAX);
    let stop = || engines[0].control().stop.load(Ordering::SeqCst);
    for (peer, left, kept) in [(1, 7, 7), (2, 9, 7), (3, 2, 2)] {
        engines[peer].control().left.store(left, Ordering::SeqCst);
        engines[peer].stop(Stop::Abort);
        assert_eq!(stop(), kept << STOP_FROM_SHIFT | STOP_PEER_LOST);
    }
    assert!(!engines[0].control().was_stopped());
    engines[0].control().left.store(3, Ordering::SeqCst);
    assert!(engines[0].control().was_stopped());
    engines[0].stop(Stop::Abort);
    assert_eq!(stop(), 2 << STOP_FROM_SHIFT | STOP_PEER_LOST | STOP_ABORT);
}

/// Operations that the aborted rank has finished are finished by the others too.
#[test]
fn an_abort_between_operations_spoils_none_before_it() {
    let engines = lenders(3, 1, u64::MAX);
    check::<i32>(&engines, Order::Ranks, 1, &[1000, 2000]);
    engines[0].stop(Stop::Abort);
    assert!(engines[0].control().was_stopped() && !engines[1].control().was_stopped());
    // The next one cannot be.
    let mut buffer = vec![1f32; 100];
    let work = engines[1].prepare(&sum_in_place(&mut buffer)).unwrap().unwrap();
    let refused = admit(&[(&engines[1], &[work])]).and_then(Admitted::launch);
    assert_eq!(refused.unwrap_err().code, crate::error::Code::RemoteError);
}

/// A rank may end before another one has its engine.
#[test]
fn who_comes_later_is_told_what_stays_unfinished() {
    let (engines, late) = (lenders(2, 1, u64::MAX), lenders(2, 1, u64::MAX));
    engines[0].control().left.store(6, Ordering::SeqCst);
    engines[0].stop(Stop::Abort);
    engines[0].clique.members.lock().enter(&late[1]);
    assert_eq!(
        late[1].control().stop.load(Ordering::SeqCst),
        6 << STOP_FROM_SHIFT | STOP_PEER_LOST
    );
}

/// Without zero copy an abort is the rank's own affair: nobody else is told, nothing is waited for.
#[test]
fn without_zero_copy_an_abort_tells_nobody_else() {
    let engines = cluster(&profile(2, Algorithm::TwoShot, 1), Path::P2p);
    engines[1].control().borrowing.store(1, Ordering::SeqCst);
    engines[0].stop(Stop::Abort);
    assert_eq!(engines[0].control().stop.load(Ordering::SeqCst), STOP_ABORT);
    assert_eq!(engines[1].control().stop.load(Ordering::SeqCst), 0);
}

/// A replay of a graph whose communicator is gone lends nothing to a peer that is still there, and touches nothing of it.
#[test]
fn a_replay_that_comes_after_the_end_lends_nothing() {
    for seed in 0..8 {
        let scheduler = host::Scheduler::new(seed).unwrap();
        let stream = scheduler.stream();
        let mut engines = lenders(2, 1, u64::MAX);
        let (mut gone, mut there) = (vec![1f32; 5000], vec![1f32; 5000]);
        let mut request = sum_in_place(&mut gone);
        request.stream = stream.handle().cast();
        stream.begin_capture().unwrap();
        let work = engines[0].prepare(&request).unwrap().unwrap();
        admit(&[(&engines[0], &[work])]).and_then(Admitted::launch).unwrap();
        let graph = stream.end_capture().unwrap().instantiate();
        drop(engines.remove(0));
        stream.launch(&graph).unwrap();
        let work = engines[0].prepare(&sum_in_place(&mut there)).unwrap().unwrap();
        let refused = admit(&[(&engines[0], &[work])]).and_then(Admitted::launch);
        assert_eq!(refused.unwrap_err().code, crate::error::Code::RemoteError);
        stream.synchronize().unwrap();
        assert!(gone.iter().chain(&there).all(|element| *element == 1.0));
    }
}
