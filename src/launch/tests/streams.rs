//! Eager operations on streams that are queues: a communicator's order, events of the user's, groups, ends.

use super::rig::{ranks, seeds, submit, Buffer, Ranks, Sum};
use super::*;
use crate::device::host::{Event, Scheduler, Stream};
use crate::error::Code;

fn streams(scheduler: &Scheduler, ranks: &Ranks) -> Vec<Stream> {
    ranks.engines.iter().map(|_| scheduler.stream()).collect()
}

fn finish(streams: &[Stream]) {
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}

#[track_caller]
fn refused(result: Result<()>, words: &str) {
    let error = result.expect_err("refused");
    assert_eq!(error.code, Code::InvalidUsage, "{error}");
    assert!(error.text.contains(words), "{error}");
}

#[test]
fn an_operation_waits_for_the_one_before_it_in_another_stream() {
    for seed in seeds(10) {
        let scheduler = Scheduler::new(seed).unwrap();
        let ranks = ranks(2 + (seed % 2) as u32, Algorithm::ALL[seed as usize % 3], 2);
        let (held, free) = (streams(&scheduler, &ranks), streams(&scheduler, &ranks));
        let (first, second) = (Sum::new(&ranks, 300, seed), Sum::new(&ranks, 200, seed + 1));
        let gate = Event::of_caller();
        held.iter().for_each(|stream| stream.wait(&gate).unwrap());
        first.call(&ranks, &held);
        second.call(&ranks, &free);
        scheduler.settle(0).unwrap();
        assert!(first.is_untouched() && second.is_untouched(), "seed {seed}");
        assert!(ranks.engines.iter().all(|engine| engine.idle() == Ok(false)));
        gate.pass();
        finish(&free);
        first.check(&format!("seed {seed}, first"));
        second.check(&format!("seed {seed}, second"));
        assert!(ranks.engines.iter().all(|engine| engine.idle() == Ok(true)));
    }
}

/// Each rank in a thread of its own picks a stream for each call; the user's events order what shares a buffer.
#[test]
fn ranks_in_threads_change_streams_at_every_call() {
    const CALLS: usize = 20;
    for seed in seeds(4) {
        let scheduler = Arc::new(Scheduler::new(seed).unwrap());
        let ranks = Arc::new(ranks(3, Algorithm::ALL[seed as usize % 3], 2));
        let mut expected: Vec<f32> = Patterns(seed).elements(150);
        let data: Vec<_> = (0..3).map(|_| Buffer::new(&expected)).collect();
        // The result of a call is the input of the next.
        for _ in 0..CALLS {
            expected = oracle::all_reduce(&vec![expected; 3], ReduceOp::Avg, ranks.order);
        }
        let threads: Vec<_> = (0..3)
            .map(|rank| {
                let (scheduler, ranks, data) = (scheduler.clone(), ranks.clone(), data[rank].clone());
                std::thread::spawn(move || {
                    let mut patterns = Patterns(seed + rank as u64);
                    let streams: Vec<Stream> = (0..3).map(|_| scheduler.stream()).collect();
                    let mut before: Option<Event> = None;
                    for _ in 0..CALLS {
                        let stream = &streams[patterns.next() as usize % 3];
                        before.iter().for_each(|event| stream.wait(event).unwrap());
                        let request = Request {
                            op: ReduceOp::Avg,
                            ..rig::sum_request(&data, &data, stream)
                        };
                        submit(&[(&ranks.engines[rank], request)]).unwrap();
                        before = Some(stream.record().unwrap());
                    }
                    finish(&streams);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for (rank, data) in data.iter().enumerate() {
            data.check(&expected, &format!("seed {seed}, rank {rank}"));
        }
    }
}

#[test]
fn a_group_launches_several_operations_of_several_communicators() {
    for seed in seeds(6) {
        let scheduler = Scheduler::new(seed).unwrap();
        let (one, two) = (ranks(3, Algorithm::OneShot, 1), ranks(3, Algorithm::Ring, 2));
        let (some, others) = (streams(&scheduler, &one), streams(&scheduler, &one));
        let sums: Vec<Sum> = (0..6)
            .map(|i| Sum::new([&one, &two][i % 2], 50 + 70 * i, seed + i as u64))
            .collect();
        let mut calls = Vec::new();
        for (i, sum) in sums.iter().enumerate() {
            for rank in 0..3 {
                let stream = [&some, &others][i / 2 % 2];
                calls.push((&[&one, &two][i % 2].engines[rank], sum.request(rank, &stream[rank])));
            }
        }
        submit(&calls).unwrap();
        finish(&some);
        finish(&others);
        sums.iter().for_each(|sum| sum.check(&format!("seed {seed}")));
    }
}

#[test]
fn an_abort_ends_what_runs_and_what_is_queued_behind_it() {
    for seed in seeds(6) {
        let scheduler = Scheduler::new(seed).unwrap();
        let late = ranks(2, Algorithm::ALL[seed as usize % 3], 2);
        let (one, two) = (streams(&scheduler, &late), streams(&scheduler, &late));
        let sums: Vec<Sum> = (0..4).map(|i| Sum::new(&late, 100, seed + i)).collect();
        // Rank 1 comes to the first operation only.
        sums[0].call(&late, &one);
        for (sum, stream) in sums[1..].iter().zip([&one[0], &two[0], &one[0]]) {
            submit(&[(&late.engines[0], sum.request(0, stream))]).unwrap();
        }
        one[1].synchronize().unwrap();
        let engine = &late.engines[0];
        assert!(engine.synchronize(&|| Some(Error::internal("waits"))).is_err());
        std::thread::scope(|scope| {
            scope.spawn(|| engine.stop(Stop::Abort));
        });
        finish(&one);
        finish(&two);
        assert_eq!(engine.synchronize(&|| Some(Error::internal("waits"))), Ok(()));
        sums[0].check(&format!("seed {seed}"));
        drop(late);
        let fresh = ranks(2, Algorithm::ALL[seed as usize % 3], 2);
        let sum = Sum::new(&fresh, 100, seed);
        sum.call(&fresh, &two);
        finish(&two);
        sum.check(&format!("seed {seed}, afterwards"));
    }
}

#[test]
fn ranks_on_one_stream_in_different_groups_are_refused_whatever_their_devices() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(2, Algorithm::Ring, 1);
    let own = streams(&scheduler, &ranks);
    let sums: Vec<Sum> = (0..20).map(|i| Sum::new(&ranks, 10, i)).collect();
    let call = |sum: &Sum, rank: usize, stream| submit(&[(&ranks.engines[rank], sum.request(rank, stream))]);
    // A call behind another rank's, by itself and in a group.
    call(&sums[0], 0, &own[0]).unwrap();
    refused(
        call(&sums[0], 1, &own[0]),
        "ranks 0 and 1 of one communicator use one stream",
    );
    let group = [(1, &sums[0]), (0, &sums[1])].map(|(rank, sum)| (&ranks.engines[rank], sum.request(rank, &own[0])));
    refused(submit(&group), "ranks 0 and 1 of one communicator use one stream");
    call(&sums[0], 1, &own[1]).unwrap();
    finish(&own);
    sums[0].check("after refusals");
    // In turns is no conflict, and calls on the default stream leave no trace that looks like one.
    for (i, sum) in sums.iter().enumerate().skip(1) {
        if i % 3 > 0 {
            let calls: Vec<_> = (0..2)
                .map(|rank| (&ranks.engines[rank], on_default_stream(sum.request(rank, &own[0]))))
                .collect();
            submit(&calls).unwrap();
        } else {
            call(sum, 0, &own[i / 3 % 2]).unwrap();
            call(sum, 1, &own[1 - i / 3 % 2]).unwrap();
            finish(&own);
        }
        sum.check(&format!("operation {i}"));
    }
}

/// All ranks of two communicators on one stream, then on streams that they share in part, in turns with a stream each.
#[test]
fn ranks_of_one_group_share_streams() {
    for seed in seeds(8) {
        let scheduler = Scheduler::new(seed).unwrap();
        let number = 2 + (seed % 3) as u32;
        let algorithm = Algorithm::ALL[seed as usize % 3];
        let comms = [ranks(number, algorithm, 1), ranks(number, Algorithm::Ring, 2)];
        let streams: Vec<Stream> = (0..number).map(|_| scheduler.stream()).collect();
        let sums: Vec<Sum> = (0..18)
            .map(|i| Sum::new(&comms[i % 2], 20 + 30 * i, seed + i as u64))
            .collect();
        let gate = Event::of_caller();
        streams[0].wait(&gate).unwrap();
        for (turn, group) in sums.chunks(6).enumerate() {
            let mut calls = Vec::new();
            for (i, sum) in group.iter().enumerate() {
                for rank in 0..number as usize {
                    let stream = [0, (rank + i / 2) % 2, rank][turn];
                    calls.push((&comms[i % 2].engines[rank], sum.request(rank, &streams[stream])));
                }
            }
            submit(&calls).unwrap();
        }
        scheduler.settle(0).unwrap();
        assert!(
            sums.iter().all(Sum::is_untouched),
            "seed {seed}: the first wait for the stream"
        );
        let last = streams[0].record().unwrap();
        let after = scheduler.stream();
        after.wait(&last).unwrap();
        gate.pass();
        // What is behind a stream of the group is behind all ranks: of the first turns too, in which it was shared.
        after.synchronize().unwrap();
        sums[..6].iter().for_each(|sum| sum.check(&format!("seed {seed}")));
        finish(&streams);
        sums.iter().for_each(|sum| sum.check(&format!("seed {seed}")));
    }
}

/// After a group on one stream a rank alone comes behind its own operation there, not behind what the stream has got since.
#[test]
fn a_rank_that_shared_a_stream_comes_behind_its_own_work_alone() {
    for seed in seeds(4) {
        let scheduler = Scheduler::new(seed).unwrap();
        let ranks = ranks(2, Algorithm::ALL[seed as usize % 3], 1);
        let (shared, other) = (scheduler.stream(), scheduler.stream());
        let [first, second] = [0, 1].map(|i| Sum::new(&ranks, 60, seed + i));
        let gate = Event::of_caller();
        shared.wait(&gate).unwrap();
        let call = |sum: &Sum, rank: usize, stream: &Stream| (&ranks.engines[rank], sum.request(rank, stream));
        submit(&[call(&first, 0, &shared), call(&first, 1, &shared)]).unwrap();
        submit(&[call(&second, 0, &shared)]).unwrap();
        submit(&[call(&second, 1, &other)]).unwrap();
        gate.pass();
        shared.synchronize().unwrap();
        other.synchronize().unwrap();
        [first, second]
            .iter()
            .for_each(|sum| sum.check(&format!("seed {seed}")));
    }
}

fn on_default_stream(request: Request) -> Request {
    Request {
        stream: std::ptr::null_mut(),
        ..request
    }
}

#[test]
fn the_default_stream_is_not_used_beside_running_streams() {
    let scheduler = Scheduler::new(2).unwrap();
    let ranks = ranks(2, Algorithm::OneShot, 1);
    let own = streams(&scheduler, &ranks);
    let sums: Vec<Sum> = (0..3).map(|i| Sum::new(&ranks, 40, i)).collect();
    let gate = Event::of_caller();
    own.iter().for_each(|stream| stream.wait(&gate).unwrap());
    sums[0].call(&ranks, &own);
    let default = |sum: &Sum, rank| on_default_stream(sum.request(rank, &own[rank]));
    let calls = [0, 1].map(|rank| (&ranks.engines[rank], default(&sums[1], rank)));
    refused(
        submit(&calls),
        "synchronise that before an operation on the default stream",
    );
    let engine = &ranks.engines[0];
    let mixed = [(engine, default(&sums[1], 0)), (engine, sums[1].request(0, &own[0]))];
    refused(submit(&mixed), "give all of them streams, or none");
    gate.pass();
    finish(&own);
    submit(&calls).unwrap();
    // Of one communicator's ranks some may be on streams and some on callers' threads.
    submit(&[
        (engine, sums[2].request(0, &own[0])),
        (&ranks.engines[1], default(&sums[2], 1)),
    ])
    .unwrap();
    finish(&own);
    sums.iter().for_each(|sum| sum.check("streams and default stream"));
}
