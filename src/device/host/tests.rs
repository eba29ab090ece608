//! Streams, events and graphs of the host device by themselves; what uses them is tested in `launch`.

use super::*;
use crate::error::Code;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;

type Log = Arc<Mutex<Vec<u32>>>;

/// Work that writes its number down.
fn note(stream: &Stream, log: &Log, number: u32) {
    let log = Arc::clone(log);
    stream.call(move || log.lock().push(number)).unwrap();
}

fn scheduler(seed: u64) -> (Scheduler, Log) {
    (Scheduler::new(seed).unwrap(), Arc::default())
}

#[track_caller]
fn refused<T>(result: Result<T>, word: &str) {
    let error = result.err().expect("refused");
    assert_eq!(error.code, Code::InvalidUsage, "{error}");
    assert!(error.text.contains(word), "{error}");
}

#[test]
fn a_stream_keeps_its_order_and_streams_do_not_wait_for_each_other() {
    for seed in 0..20 {
        let (scheduler, log) = scheduler(seed);
        let (held, free) = (scheduler.stream(), scheduler.stream());
        let event = Event::of_caller();
        held.wait(&event).unwrap();
        (0..5).for_each(|number| note(&held, &log, number));
        (10..15).for_each(|number| note(&free, &log, number));
        free.synchronize().unwrap();
        scheduler.settle(0).unwrap();
        assert_eq!(*log.lock(), [10, 11, 12, 13, 14], "seed {seed}");
        event.pass();
        held.synchronize().unwrap();
        assert_eq!(log.lock()[5..], [0, 1, 2, 3, 4], "seed {seed}");
    }
}

#[test]
fn the_seed_decides_which_stream_goes_first() {
    let first = |seed| {
        let (scheduler, log) = scheduler(seed);
        let streams: Vec<Stream> = (0..3).map(|_| scheduler.stream()).collect();
        let event = Event::of_caller();
        let all = scheduler.stream();
        all.wait(&event).unwrap();
        let begin = all.record().unwrap();
        for (stream, number) in streams.iter().zip(0..) {
            stream.wait(&begin).unwrap();
            note(stream, &log, number);
        }
        event.pass();
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let first = log.lock()[0];
        first
    };
    let seen: std::collections::BTreeSet<u32> = (0..64).map(first).collect();
    assert_eq!(seen.len(), 3, "{seen:?}");
}

#[test]
fn an_event_stands_for_the_work_before_its_record() {
    for seed in 0..20 {
        let (scheduler, log) = scheduler(seed);
        let (one, two) = (scheduler.stream(), scheduler.stream());
        note(&one, &log, 1);
        let event = one.record().unwrap();
        two.wait(&event).unwrap();
        note(&two, &log, 2);
        two.synchronize().unwrap();
        assert_eq!(
            (&log.lock()[..], event.is_reached()),
            (&[1, 2][..], Ok(true)),
            "seed {seed}"
        );
    }
    // A stream of another scheduler can wait too.
    let ((first, log), (second, _)) = (scheduler(1), scheduler(2));
    let (one, two) = (first.stream(), second.stream());
    let gate = Event::of_caller();
    one.wait(&gate).unwrap();
    note(&one, &log, 1);
    two.wait(&one.record().unwrap()).unwrap();
    note(&two, &log, 2);
    gate.pass();
    two.synchronize().unwrap();
    assert_eq!(*log.lock(), [1, 2]);
}

#[test]
fn a_mark_is_an_event_that_is_used_again() {
    let (scheduler, _) = scheduler(3);
    let (one, two) = (scheduler.stream(), scheduler.stream());
    let device = open(0);
    let gate = Event::of_caller();
    one.wait(&gate).unwrap();
    let mark = device.mark(None, one.handle()).unwrap();
    device.wait_for_mark(mark, two.handle()).unwrap();
    scheduler.settle(0).unwrap();
    assert_eq!(device.reached(mark), Ok(false));
    // Another record of the mark does not change what `two` waits for.
    let third = scheduler.stream();
    assert_eq!(device.mark(Some(mark), third.handle()), Ok(mark));
    third.synchronize().unwrap();
    assert_eq!(device.reached(mark), Ok(true));
    scheduler.settle(0).unwrap();
    let behind = two.record().unwrap();
    assert_eq!(behind.is_reached(), Ok(false));
    gate.pass();
    two.synchronize().unwrap();
    device.unmark(mark);
    assert_eq!(device.reached(mark).unwrap_err().code, Code::InternalError);
}

#[test]
fn handles_that_are_no_stream_are_refused() {
    let (scheduler, _) = scheduler(4);
    let device = open(0);
    for default in 0..3usize {
        let key = device.check_stream(default as *mut c_void).unwrap();
        assert_eq!((key.stream, key.capture), (CALLERS_THREAD_KEY, None));
    }
    let stream = scheduler.stream();
    let handle = stream.handle();
    assert!(device.check_stream(handle).is_ok());
    drop(stream);
    for bad in [handle, usize::MAX as *mut c_void] {
        let error = device.check_stream(bad).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains("default stream only: pass NULL"), "{error}");
    }
    assert!(device.order_streams(null_mut(), null_mut()).is_err());
    let late = scheduler.stream();
    drop(scheduler);
    refused(late.call(|| {}), "scheduler was dropped");
}

#[test]
fn a_dropped_stream_finishes_its_work_and_a_panic_is_told() {
    let (scheduler, log) = scheduler(5);
    let stream = scheduler.stream();
    let gate = Event::of_caller();
    stream.wait(&gate).unwrap();
    note(&stream, &log, 1);
    drop(stream);
    gate.pass();
    let other = scheduler.stream();
    while log.lock().is_empty() {
        std::thread::yield_now();
    }
    other.call(|| panic!("on purpose")).unwrap();
    let error = other.synchronize().unwrap_err();
    assert!(error.text.contains("on purpose"), "{error}");
}

#[test]
fn a_capture_runs_nothing_and_its_graph_keeps_the_order_at_every_launch() {
    for seed in 0..20 {
        let (scheduler, log) = scheduler(seed);
        let (origin, fork) = (scheduler.stream(), scheduler.stream());
        origin.begin_capture().unwrap();
        note(&origin, &log, 1);
        fork.wait(&origin.record().unwrap()).unwrap();
        note(&fork, &log, 2);
        note(&fork, &log, 3);
        note(&origin, &log, 4);
        origin.wait(&fork.record().unwrap()).unwrap();
        note(&origin, &log, 5);
        let graph = origin.end_capture().unwrap();
        scheduler.settle(0).unwrap();
        assert!(log.lock().is_empty());
        let executable = graph.instantiate();
        drop(graph);
        let others = [scheduler.stream(), scheduler.stream()];
        for _ in 0..3 {
            // Launches of one executable follow each other, also in different streams.
            others.iter().for_each(|stream| stream.launch(&executable).unwrap());
        }
        others.iter().for_each(|stream| stream.synchronize().unwrap());
        let log = log.lock();
        assert_eq!(log.len(), 6 * 5);
        for run in log.chunks(5) {
            let place = |number| run.iter().position(|found| *found == number).expect("ran once");
            assert_eq!((place(1), place(5)), (0, 4), "seed {seed}: {run:?}");
            assert!(place(2) < place(3), "seed {seed}: {run:?}");
        }
    }
}

#[test]
fn branches_of_a_graph_run_at_once() {
    let (scheduler, _) = scheduler(6);
    let streams: Vec<Stream> = (0..6).map(|_| scheduler.stream()).collect();
    let arrived: Arc<AtomicU32> = Arc::default();
    streams[0].begin_capture().unwrap();
    let begin = streams[0].record().unwrap();
    for stream in &streams[1..] {
        stream.wait(&begin).unwrap();
    }
    for stream in &streams {
        let arrived = Arc::clone(&arrived);
        // Each waits for all, as kernels of one communicator do.
        let meet = move || {
            arrived.fetch_add(1, Ordering::SeqCst);
            while !arrived.load(Ordering::SeqCst).is_multiple_of(6) {
                std::thread::yield_now();
            }
        };
        stream.call(meet).unwrap();
    }
    for stream in &streams[1..] {
        streams[0].wait(&stream.record().unwrap()).unwrap();
    }
    let executable = streams[0].end_capture().unwrap().instantiate();
    streams[3].launch(&executable).unwrap();
    streams[3].synchronize().unwrap();
    assert_eq!(arrived.load(Ordering::SeqCst), 6);
}

#[test]
fn captures_that_cannot_be_are_broken_and_the_stream_can_capture_again() {
    let (scheduler, log) = scheduler(7);
    let (origin, fork, eager) = (scheduler.stream(), scheduler.stream(), scheduler.stream());
    let device = open(0);
    let free = |stream: &Stream| device.check_stream(stream.handle()).unwrap().capture.is_none();
    let again = || {
        origin.begin_capture().unwrap();
        refused(origin.begin_capture(), "already");
        fork.wait(&origin.record().unwrap()).unwrap();
        assert!(!free(&origin) && !free(&fork));
    };
    again();
    note(&fork, &log, 0);
    refused(origin.end_capture(), "lacks a wait");
    assert!(free(&origin) && free(&fork));
    again();
    refused(fork.end_capture(), "where it must end");
    again();
    refused(origin.synchronize(), "is waited for");
    refused(device.check_stream(fork.handle()), "invalid by an earlier call");
    refused(origin.end_capture(), "invalid");
    again();
    refused(fork.wait(&eager.record().unwrap()), "an event that is not captured");
    refused(origin.end_capture(), "invalid");
    again();
    eager.begin_capture().unwrap();
    refused(eager.wait(&origin.record().unwrap()), "another capture");
    refused(eager.end_capture(), "invalid");
    refused(origin.end_capture(), "invalid");
    again();
    let stale = origin.record().unwrap();
    refused(stale.is_reached(), "never reached");
    origin.wait(&fork.record().unwrap()).unwrap();
    note(&origin, &log, 1);
    let executable = origin.end_capture().unwrap().instantiate();
    refused(eager.wait(&stale), "has ended");
    refused(origin.end_capture(), "in no graph capture");
    again();
    refused(origin.launch(&executable), "cannot be captured");
    refused(origin.end_capture(), "invalid");
    origin.launch(&executable).unwrap();
    origin.synchronize().unwrap();
    assert_eq!(*log.lock(), [1]);
    // A graph of nothing ends too.
    origin.begin_capture().unwrap();
    let nothing = origin.end_capture().unwrap().instantiate();
    origin.launch(&nothing).unwrap();
    origin.synchronize().unwrap();
}

#[test]
fn what_a_graph_needs_goes_with_the_last_that_can_run() {
    let (scheduler, _) = scheduler(8);
    let stream = scheduler.stream();
    let device = open(0);
    let kept: Arc<()> = Arc::default();
    let count = || Arc::strong_count(&kept) - 1;
    refused(device.keep_for_graph(stream.handle(), kept.clone()), "has ended");
    stream.begin_capture().unwrap();
    device.keep_for_graph(stream.handle(), kept.clone()).unwrap();
    let graph = stream.end_capture().unwrap();
    let (one, two) = (graph.instantiate(), graph.instantiate());
    drop((graph, one));
    assert_eq!(count(), 1);
    let gate = Event::of_caller();
    stream.wait(&gate).unwrap();
    stream.launch(&two).unwrap();
    drop(two);
    assert_eq!(count(), 1, "a launch that is queued needs it");
    gate.pass();
    stream.synchronize().unwrap();
    // The stream is empty before its last entry is let go.
    for _ in 0..1000 {
        if count() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(count(), 0);
    stream.begin_capture().unwrap();
    device.keep_for_graph(stream.handle(), kept.clone()).unwrap();
    stream.wait(&gate).unwrap_err();
    stream.end_capture().err().expect("broken");
    assert_eq!(count(), 0, "a capture that gave no graph keeps nothing");
}
