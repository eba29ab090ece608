//! Zero copy: every mix of ranks that lend and do not, and what an abort takes back.

use super::moves::{check_broadcast, check_gather};
use super::oracle::Patterns;
use super::*;
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
        lending.of(Devices::ALL, reached).to_string()
    };
    for (said, words) in [
        (
            lent(Path::P2p, 2, true, Devices::ALL),
            "input direct, output direct: all ranks are in one process",
        ),
        (
            lent(Path::P2p, 2, false, Devices::ALL),
            "input staged, output staged: OSSICLE_ZERO_COPY is not 1 on all ranks",
        ),
        (lent(Path::Shm, 2, true, Devices::ALL), "not all in one process"),
    ] {
        assert!(said.contains(words), "{said}");
    }
}

/// Rank 0 is aborted while rank 1 and 2 are in the operation, or come to it then: the wait for them ends, and so do they.
#[test]
fn an_aborted_rank_takes_back_what_it_lent() {
    for round in 0..40 {
        let engines: Vec<Arc<Engine>> = lenders(3, 1, u64::MAX).into_iter().map(Arc::new).collect();
        let begun = Arc::new(Barrier::new(4));
        let mut threads = Vec::new();
        // Rank 2 never comes in half of the rounds, so that the others are in mid-operation.
        for (rank, engine) in engines.iter().enumerate().take(2 + round as usize % 2) {
            let (engine, begun) = (engine.clone(), begun.clone());
            threads.push(std::thread::spawn(move || {
                let mut buffer = vec![1f32; 20_000];
                let request = Request {
                    collective: Collective::AllReduce,
                    send: buffer.as_ptr().cast(),
                    recv: buffer.as_mut_ptr().cast(),
                    count: buffer.len(),
                    datatype: DataType::Float32,
                    op: ReduceOp::Sum,
                    stream: std::ptr::null_mut(),
                };
                begun.wait();
                let mut ended = Ok(());
                while ended.is_ok() {
                    let work = engine.prepare(&request).unwrap().unwrap();
                    ended = admit(&[(&*engine, &[work])]).and_then(Admitted::launch);
                }
                drop(engine);
                (rank, ended, buffer)
            }));
        }
        (threads.len()..3).for_each(|_| {
            drop(std::thread::spawn({
                let begun = begun.clone();
                move || begun.wait()
            }))
        });
        begun.wait();
        std::thread::sleep(Duration::from_micros(100 * round));
        engines[0].stop(Stop::Abort);
        engines[0].wait_for_borrowers();
        // What the session says of the abort, which stops those that wait for an operation that rank 0 never began.
        engines.iter().for_each(|engine| engine.stop(Stop::PeerLost));
        for thread in threads {
            let (_, ended, buffer) = thread.join().unwrap();
            assert_eq!(ended.unwrap_err().code, crate::error::Code::RemoteError);
            drop(buffer);
        }
    }
}

/// Without zero copy an abort is the rank's own affair: nobody else is stopped, nothing is waited for.
#[test]
fn without_zero_copy_an_abort_in_mid_operation_stops_nobody_else() {
    let engines = cluster(&profile(2, Algorithm::TwoShot, 1), Path::P2p);
    // As if it were in mid-operation.
    engines[0].launched.fetch_add(1, Ordering::SeqCst);
    engines[0].stop(Stop::Abort);
    assert!(engines[0].stopped() && !engines[1].stopped());
    assert!(!engines[0].took_back.load(Ordering::SeqCst));
    engines[0].launched.fetch_sub(1, Ordering::SeqCst);
}

/// An abort that comes when all is done stops nobody else.
#[test]
fn an_abort_between_operations_leaves_peers_alone() {
    let engines = lenders(2, 1, u64::MAX);
    check::<i32>(&engines, Order::Ranks, 1, &[1000]);
    engines[0].stop(Stop::Abort);
    assert!(engines[0].stopped() && !engines[1].stopped());
}
