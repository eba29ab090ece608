//! Captured operations on streams of the host device: order, replays, lifetimes, what is refused.

use super::rig::{ranks, seeds, submit, Ranks, Sum};
use super::*;
use crate::device::host::{Event, Executable, Scheduler, Stream};
use crate::error::Code;
use std::sync::Weak;

/// A rank's streams: captures begin in the first, and the second joins.
struct Pair {
    origin: Stream,
    fork: Stream,
}

fn pairs(scheduler: &Scheduler, ranks: &Ranks) -> Vec<Pair> {
    let pair = |_| Pair {
        origin: scheduler.stream(),
        fork: scheduler.stream(),
    };
    ranks.engines.iter().map(pair).collect()
}

impl Pair {
    fn begin(&self) {
        self.origin.begin_capture().unwrap();
        self.fork.wait(&self.origin.record().unwrap()).unwrap();
    }

    fn end(&self) -> Executable {
        self.origin.wait(&self.fork.record().unwrap()).unwrap();
        self.origin.end_capture().unwrap().instantiate()
    }
}

fn finish(pairs: &[Pair]) {
    for pair in pairs {
        pair.origin.synchronize().unwrap();
        pair.fork.synchronize().unwrap();
    }
}

fn call(ranks: &Ranks, rank: usize, sum: &Sum, stream: &Stream) -> Result<()> {
    submit(&[(&ranks.engines[rank], sum.request(rank, stream))])
}

/// A graph for each rank with the sums in turns on both streams.
fn capture(ranks: &Ranks, pairs: &[Pair], sums: &[Sum]) -> Vec<Executable> {
    let one = |(rank, pair): (usize, &Pair)| {
        pair.begin();
        for (i, sum) in sums.iter().enumerate() {
            call(ranks, rank, sum, [&pair.fork, &pair.origin][i % 2]).unwrap();
        }
        pair.end()
    };
    pairs.iter().enumerate().map(one).collect()
}

fn replay(pairs: &[Pair], graphs: &[Executable]) {
    for (pair, graph) in pairs.iter().zip(graphs) {
        pair.origin.launch(graph).unwrap();
    }
}

fn sums<const N: usize>(ranks: &Ranks, seed: u64) -> [Sum; N] {
    std::array::from_fn(|i| Sum::new(ranks, 30 + 60 * i, seed + i as u64))
}

fn check(sums: &[Sum], what: &str) {
    sums.iter().for_each(|sum| sum.check(what));
    sums.iter().for_each(Sum::forget);
}

#[test]
fn graphs_are_replayed_many_times_with_eager_operations_between() {
    for seed in seeds(6) {
        let scheduler = Scheduler::new(seed).unwrap();
        let ranks = ranks(2 + (seed % 3) as u32, Algorithm::ALL[seed as usize % 3], 2);
        let pairs = pairs(&scheduler, &ranks);
        let (first, second, between) = (
            sums::<3>(&ranks, seed),
            sums::<2>(&ranks, seed + 10),
            sums::<1>(&ranks, seed + 20),
        );
        let others: Vec<Stream> = pairs.iter().map(|_| scheduler.stream()).collect();
        between[0].call(&ranks, &others);
        others.iter().for_each(|stream| stream.synchronize().unwrap());
        let graphs = [capture(&ranks, &pairs, &first), capture(&ranks, &pairs, &second)];
        assert!(first[0].is_untouched(), "a capture runs nothing");
        for round in 0..5 {
            let what = format!("seed {seed}, round {round}");
            replay(&pairs, &graphs[round % 2]);
            for (rank, pair) in pairs.iter().enumerate() {
                call(&ranks, rank, &between[0], &pair.origin).unwrap();
            }
            replay(&pairs, &graphs[(round + 1) % 2]);
            replay(&pairs, &graphs[round % 2]);
            finish(&pairs);
            check(&first, &what);
            check(&second, &what);
            check(&between, &what);
        }
    }
}

/// A call that holds its stream up until `gate` is passed.
fn hold(stream: &Stream, gate: &Event) {
    let gate = gate.clone();
    stream
        .call(move || {
            while gate.is_reached() != Ok(true) {
                std::thread::sleep(Duration::from_micros(50));
            }
        })
        .unwrap();
}

/// Sixteen captures of one communicator are open at once; in each the second launch is on the other stream.
#[test]
fn launches_of_each_open_capture_follow_each_other() {
    for seed in seeds(2) {
        let scheduler = Scheduler::new(seed).unwrap();
        let ranks = ranks(2, Algorithm::ALL[seed as usize % 3], 1);
        let gate = Event::of_caller();
        let graphs: Vec<_> = (0..16)
            .map(|_| (pairs(&scheduler, &ranks), sums::<3>(&ranks, seed)))
            .collect();
        for pair in graphs.iter().flat_map(|(pairs, _)| pairs) {
            pair.begin();
            hold(&pair.origin, &gate);
        }
        for turn in 0..3 {
            for (rank, (pairs, sums)) in (0..2).flat_map(|rank| graphs.iter().map(move |graph| (rank, graph))) {
                let pair = &pairs[rank];
                call(&ranks, rank, &sums[turn], [&pair.origin, &pair.fork][turn % 2]).unwrap();
            }
        }
        for (number, (pairs, sums)) in graphs.iter().enumerate() {
            let executables: Vec<Executable> = pairs.iter().map(Pair::end).collect();
            replay(pairs, &executables);
            if number == 0 {
                scheduler.settle(2).unwrap();
                assert!(
                    sums.iter().all(Sum::is_untouched),
                    "seed {seed}: without the launch before"
                );
                gate.pass();
            }
            finish(pairs);
            check(sums, &format!("seed {seed}, graph {number}"));
        }
    }
}

/// Replays count up what has left, so that the count says nothing of eager launches any more.
#[test]
fn eager_launches_are_waited_for_although_replays_have_left() {
    for seed in seeds(4) {
        let scheduler = Scheduler::new(seed).unwrap();
        let ranks = ranks(2, Algorithm::ALL[seed as usize % 3], 2);
        let pairs = pairs(&scheduler, &ranks);
        let [captured, held, behind] = sums::<3>(&ranks, seed);
        let graphs = capture(&ranks, &pairs, std::slice::from_ref(&captured));
        for _ in 0..5 {
            replay(&pairs, &graphs);
        }
        finish(&pairs);
        captured.check("replayed");
        let gate = Event::of_caller();
        for (rank, pair) in pairs.iter().enumerate() {
            pair.origin.wait(&gate).unwrap();
            call(&ranks, rank, &held, &pair.origin).unwrap();
            call(&ranks, rank, &behind, &pair.fork).unwrap();
        }
        scheduler.settle(0).unwrap();
        assert!(held.is_untouched() && behind.is_untouched(), "seed {seed}");
        for engine in &ranks.engines {
            assert!(
                engine.synchronize(&|| Some(Error::internal("waits"))).is_err(),
                "seed {seed}"
            );
        }
        gate.pass();
        for engine in &ranks.engines {
            assert_eq!(engine.synchronize(&|| None), Ok(()));
        }
        check(&[held, behind], &format!("seed {seed}"));
    }
}

/// Two graphs share a stream's work with each other and with eager calls on another, ordered by the user's events.
#[test]
fn replays_run_beside_other_communicators_eager_work() {
    for seed in seeds(4) {
        let scheduler = Scheduler::new(seed).unwrap();
        let (one, two) = (ranks(2, Algorithm::OneShot, 2), ranks(2, Algorithm::Ring, 1));
        let (captured, eager) = (pairs(&scheduler, &one), pairs(&scheduler, &two));
        let (first, second) = (sums::<2>(&one, seed), sums::<2>(&two, seed));
        let graphs = capture(&one, &captured, &first);
        for _ in 0..3 {
            replay(&captured, &graphs);
            for (rank, pair) in eager.iter().enumerate() {
                call(&two, rank, &second[0], &pair.origin).unwrap();
                call(&two, rank, &second[1], &pair.fork).unwrap();
            }
        }
        finish(&captured);
        finish(&eager);
        check(&first, &format!("seed {seed}"));
        check(&second, &format!("seed {seed}"));
    }
}

fn memories(ranks: &Ranks) -> Vec<Weak<KernelMemory>> {
    ranks
        .engines
        .iter()
        .map(|engine| Arc::downgrade(&engine.memory))
        .collect()
}

fn counts(memories: &[Weak<KernelMemory>]) -> Vec<usize> {
    memories.iter().map(Weak::strong_count).collect()
}

/// A stream's last entry is let go a moment after the stream is found empty.
#[track_caller]
fn await_counts(memories: &[Weak<KernelMemory>], expected: usize) {
    for _ in 0..2000 {
        if counts(memories).iter().all(|count| *count == expected) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(counts(memories), vec![expected; memories.len()]);
}

#[test]
fn a_graph_outlives_its_communicator_and_its_replays_return() {
    for seed in seeds(4) {
        let scheduler = Scheduler::new(seed).unwrap();
        let algorithm = Algorithm::ALL[seed as usize % 3];
        let ranks = ranks(2, algorithm, 1 + (seed % 2) as u32);
        let pairs = pairs(&scheduler, &ranks);
        let sums = sums::<2>(&ranks, seed);
        let graphs = capture(&ranks, &pairs, &sums);
        replay(&pairs, &graphs);
        finish(&pairs);
        check(&sums, "before the end");
        let memories = memories(&ranks);
        await_counts(&memories, 2);
        drop(ranks);
        assert_eq!(counts(&memories), [1, 1], "the graph alone keeps the memory");
        // All ranks, then one without its peer.
        replay(&pairs, &graphs);
        replay(&pairs[..1], &graphs[..1]);
        finish(&pairs);
        let again = super::rig::ranks(2, algorithm, 2);
        let fresh = Sum::new(&again, 100, seed);
        for (rank, pair) in pairs.iter().enumerate() {
            call(&again, rank, &fresh, &pair.origin).unwrap();
        }
        finish(&pairs);
        fresh.check("a new communicator");
        await_counts(&memories, 1);
        drop(graphs);
        assert_eq!(counts(&memories), [0, 0]);
    }
}

#[test]
fn each_capture_keeps_the_memory_once_and_while_anything_of_it_can_run() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(2, Algorithm::Ring, 1);
    let pairs = pairs(&scheduler, &ranks);
    let sums = sums::<4>(&ranks, 1);
    let memories = memories(&ranks);
    let one = capture(&ranks, &pairs, &sums);
    assert_eq!(counts(&memories), [2, 2], "four operations of one capture keep it once");
    let two = capture(&ranks, &pairs, &sums[..1]);
    assert_eq!(counts(&memories), [3, 3]);
    drop(two);
    assert_eq!(counts(&memories), [2, 2]);
    let gate = Event::of_caller();
    pairs.iter().for_each(|pair| pair.origin.wait(&gate).unwrap());
    replay(&pairs, &one);
    drop(one);
    assert_eq!(counts(&memories), [2, 2], "a replay that is queued needs it");
    gate.pass();
    finish(&pairs);
    check(&sums, "a graph that was dropped when launched");
    await_counts(&memories, 1);
}

/// The end of a capture is not seen, so that only so many are remembered; an operation in an older one is taken for the
/// first of a new one, which keeps the memory once more.
#[test]
fn the_seventeenth_open_capture_makes_the_first_forgotten() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(2, Algorithm::Ring, 1);
    let memories = memories(&ranks);
    let sums = sums::<1>(&ranks, 1);
    let origins: Vec<Stream> = (0..17).map(|_| scheduler.stream()).collect();
    origins.iter().for_each(|origin| origin.begin_capture().unwrap());
    let mut expected = 1;
    let turns = [(0..16, 16), (0..16, 0), (16..17, 1), (16..17, 0), (0..1, 1)];
    for (captures, kept) in turns {
        for origin in &origins[captures.clone()] {
            call(&ranks, 0, &sums[0], origin).unwrap();
        }
        expected += kept;
        assert_eq!(counts(&memories)[0], expected, "captures {captures:?}");
    }
    let graphs: Vec<_> = origins.iter().map(|origin| origin.end_capture().unwrap()).collect();
    drop(graphs);
    assert_eq!(counts(&memories), [1, 1]);
}

#[track_caller]
fn refused(result: Result<()>, words: &str) {
    let error = result.expect_err("refused");
    assert_eq!(error.code, Code::InvalidUsage, "{error}");
    assert!(error.text.contains(words), "{error}");
}

#[test]
fn what_is_refused_leaves_a_capture_whole() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(2, Algorithm::Ring, 1);
    let pairs = pairs(&scheduler, &ranks);
    let (other, eager) = (scheduler.stream(), scheduler.stream());
    let [first, second, third] = sums::<3>(&ranks, 1);
    pairs.iter().for_each(Pair::begin);
    other.begin_capture().unwrap();
    let [zero, one] = [&ranks.engines[0], &ranks.engines[1]];
    let on = |sum: &Sum, rank: usize, stream: &Stream| sum.request(rank, stream);
    let attempts = |word: &str| {
        let both = |a: &Stream, b: &Stream| submit(&[(zero, on(&first, 0, a)), (one, on(&first, 1, b))]);
        let twice = |a: &Stream, b: &Stream| submit(&[(zero, on(&first, 0, a)), (zero, on(&second, 0, b))]);
        let origin = &pairs[0].origin;
        refused(twice(origin, &other), "captured into different CUDA graphs");
        refused(twice(origin, &eager), "captured into different CUDA graphs");
        refused(both(origin, &eager), "one is under CUDA graph capture");
        assert!(first.is_untouched(), "{word}");
    };
    attempts("before the first launch");
    for (rank, pair) in pairs.iter().enumerate() {
        call(&ranks, rank, &first, &pair.origin).unwrap();
    }
    attempts("after it");
    for (rank, pair) in pairs.iter().enumerate() {
        call(&ranks, rank, &second, &pair.fork).unwrap();
    }
    // A capture that the user broke is refused, and no other is touched by that.
    other.synchronize().unwrap_err();
    let broken = on(&third, 0, &other);
    let error = zero.prepare(&broken).err().expect("refused");
    assert_eq!(error.code, Code::InvalidUsage);
    other.end_capture().err().expect("broken");
    let graphs: Vec<Executable> = pairs.iter().map(Pair::end).collect();
    replay(&pairs, &graphs);
    finish(&pairs);
    check(&[first, second], "captured between refusals");
}

/// All ranks on one captured stream: branches of one graph, with no event of the user's. Eager groups on the same stream
/// come in between, and a capture of another communicator is open meanwhile.
#[test]
fn ranks_of_one_group_share_a_captured_stream() {
    for seed in seeds(6) {
        let scheduler = Scheduler::new(seed).unwrap();
        let number = 2 + (seed % 3) as u32;
        let ranks = ranks(number, Algorithm::ALL[seed as usize % 3], 2);
        let (stream, eager) = (scheduler.stream(), scheduler.stream());
        let sums = sums::<5>(&ranks, seed);
        let together = |sums: &[Sum], stream: &Stream| {
            let calls = sums
                .iter()
                .flat_map(|sum| (0..number as usize).map(move |rank| (rank, sum)));
            let calls: Vec<_> = calls
                .map(|(rank, sum)| (&ranks.engines[rank], sum.request(rank, stream)))
                .collect();
            submit(&calls)
        };
        let alone = |rank: usize, stream: &Stream| call(&ranks, rank, &sums[4], stream);
        let memories = memories(&ranks);
        stream.begin_capture().unwrap();
        together(&sums[..2], &stream).unwrap();
        together(&sums[2..3], &stream).unwrap();
        // Eager work takes no side stream that the capture has.
        together(&sums[3..4], &eager).unwrap();
        eager.synchronize().unwrap();
        sums[3].check("eager beside a capture");
        assert!(sums[..3].iter().all(Sum::is_untouched), "a capture runs nothing");
        let graph = stream.end_capture().unwrap().instantiate();
        // In different groups the second would wait behind the first: of no consequence for the capture.
        stream.begin_capture().unwrap();
        alone(0, &stream).unwrap();
        refused(alone(1, &stream), "ranks 0 and 1 of one communicator use one stream");
        drop(stream.end_capture().unwrap());
        assert_eq!(
            counts(&memories),
            vec![2; number as usize],
            "the graph keeps each rank's memory once"
        );
        for round in 0..4 {
            let what = format!("seed {seed}, round {round}");
            stream.launch(&graph).unwrap();
            together(&sums[3..4], &stream).unwrap();
            stream.launch(&graph).unwrap();
            stream.synchronize().unwrap();
            check(&sums[..4], &what);
        }
    }
}

/// A stream that is dropped under capture makes a launch fail when others of the group are in side streams already.
#[test]
fn a_group_that_fails_under_capture_leaves_no_branch_behind() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(3, Algorithm::Ring, 1);
    let (stream, dropped) = (scheduler.stream(), scheduler.stream());
    let [before, sum, next] = sums::<3>(&ranks, 1);
    stream.begin_capture().unwrap();
    dropped.wait(&stream.record().unwrap()).unwrap();
    let on = [&stream, &stream, &dropped];
    let calls: Vec<_> = (0..3)
        .map(|rank| (&ranks.engines[rank], before.request(rank, on[rank])))
        .collect();
    submit(&calls).unwrap();
    stream.wait(&dropped.record().unwrap()).unwrap();
    let works: Vec<Work> = (0..3)
        .map(|rank| {
            ranks.engines[rank]
                .prepare(&sum.request(rank, on[rank]))
                .unwrap()
                .unwrap()
        })
        .collect();
    let batch: Vec<Part> = ranks.engines.iter().zip(works.chunks(1)).collect();
    let admitted = admit(&batch).unwrap();
    drop(dropped);
    assert!(admitted.launch().is_err());
    assert!(stream.end_capture().is_ok(), "all branches are joined");
    drop(batch);
    let calls: Vec<_> = (0..3)
        .map(|rank| (&ranks.engines[rank], next.request(rank, &stream)))
        .collect();
    stream.begin_capture().unwrap();
    submit(&calls).unwrap();
    let graph = stream.end_capture().unwrap().instantiate();
    stream.launch(&graph).unwrap();
    stream.synchronize().unwrap();
    next.check("a capture after one that failed");
}

/// An eager operation that waited for a stream under capture would be drawn into the capture.
#[test]
fn eager_work_is_never_drawn_into_a_capture() {
    let scheduler = Scheduler::new(1).unwrap();
    let ranks = ranks(2, Algorithm::OneShot, 1);
    let pairs = pairs(&scheduler, &ranks);
    let [first, second, captured] = sums::<3>(&ranks, 1);
    let gate = Event::of_caller();
    for (rank, pair) in pairs.iter().enumerate() {
        pair.origin.wait(&gate).unwrap();
        call(&ranks, rank, &first, &pair.origin).unwrap();
        pair.origin.begin_capture().unwrap();
        refused(call(&ranks, rank, &second, &pair.fork), "still runs in stream");
        // From the first captured launch on it waits for a mark instead: but the work before has none yet.
        call(&ranks, rank, &captured, &pair.origin).unwrap();
        refused(call(&ranks, rank, &second, &pair.fork), "still runs in stream");
    }
    gate.pass();
    for engine in &ranks.engines {
        assert_eq!(engine.synchronize(&|| None), Ok(()));
    }
    let mut graphs = Vec::new();
    for (rank, pair) in pairs.iter().enumerate() {
        call(&ranks, rank, &second, &pair.fork).unwrap();
        assert_eq!(
            engine_capture(&ranks, rank, &pair.fork),
            None,
            "rank {rank}: drawn into the capture"
        );
        graphs.push(pair.origin.end_capture().unwrap().instantiate());
    }
    finish(&pairs);
    replay(&pairs, &graphs);
    finish(&pairs);
    check(&[first, second, captured], "beside a capture");
}

fn engine_capture(ranks: &Ranks, rank: usize, stream: &Stream) -> Option<u64> {
    ranks.engines[rank]
        .device
        .check_stream(stream.handle())
        .unwrap()
        .capture
}
