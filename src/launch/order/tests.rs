//! What is asked of a GPU to keep the order, and what is refused, by a device that writes it down.

use super::*;
use crate::device::{host, Device, DeviceKind, Devices, Launch, Memory, Placement};
use crate::error::Code;
use crate::launch::layout::STOP_ABORT;
use crate::launch::{admit, clique, running, tests, Admitted, Algorithm, KernelMemory};
use crate::request::{Collective, DataType, ReduceOp, Request};
use crate::transport::Path;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::Weak;

/// A GPU that writes down what it is asked; its memory is the host's, and no kernel runs.
#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<String>>,
    captures: Mutex<HashMap<usize, u64>>,
    running: AtomicBool,
    kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// A launch here fails.
    broken: AtomicUsize,
    marks: AtomicUsize,
    sides: AtomicUsize,
}

impl Recorder {
    fn note(&self, call: String) {
        self.calls.lock().push(call);
    }

    /// Kernels are written down once a side stream was asked for.
    fn note_of_group(&self, call: String) {
        if self.sides.load(Ordering::Relaxed) > 0 {
            self.note(call);
        }
    }

    fn take(&self) -> String {
        std::mem::take(&mut *self.calls.lock()).join(", ")
    }

    fn capture(&self, stream: usize, capture: u64) {
        self.captures.lock().insert(stream, capture);
    }
}

impl Device for Recorder {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }
    fn ordinal(&self) -> i32 {
        0
    }
    fn uuid(&self) -> [u8; 16] {
        [1; 16]
    }
    fn describe(&self) -> String {
        "recorder".into()
    }
    fn multiprocessors(&self) -> u32 {
        100
    }
    fn allocate(self: Arc<Self>, bytes: usize, placement: Placement) -> Result<Memory> {
        host::open(0).allocate(bytes, placement)
    }
    fn write(&self, _memory: &Memory, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
    fn free(&self, _address: *mut u8, _bytes: usize, _placement: Placement) {}
    fn register(&self, address: *mut u8, _bytes: usize) -> Result<*mut u8> {
        Ok(address)
    }
    fn unregister(&self, _address: *mut u8) {}
    fn check_pointer(&self, _name: &str, _pointer: *const c_void, _bytes: usize, _always: bool) -> Result<Devices> {
        Ok(Devices::ALL)
    }
    fn check_stream(&self, stream: *mut c_void) -> Result<StreamKey> {
        Ok(StreamKey {
            stream: stream as u64,
            capture: self.captures.lock().get(&(stream as usize)).copied(),
        })
    }
    fn enqueue(&self, launch: &Launch) -> Result<()> {
        let stream = launch.stream as usize;
        if stream == self.broken.load(Ordering::Relaxed) {
            return Err(Error::cuda("broken on purpose"));
        }
        self.note_of_group(format!("kernel {stream}"));
        Ok(())
    }
    fn order_streams(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
        self.note(format!("{} -> {}", last as usize, next as usize));
        Ok(())
    }
    fn mark(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark> {
        self.note(format!("mark {}", stream as usize));
        Ok(mark.unwrap_or_else(|| Mark(7 + self.marks.fetch_add(1, Ordering::Relaxed))))
    }
    fn reached(&self, mark: Mark) -> Result<bool> {
        assert!(mark.0 >= 7, "not given: {mark:?}");
        Ok(!self.running.load(Ordering::Relaxed))
    }
    fn wait_for_mark(&self, mark: Mark, next: *mut c_void) -> Result<()> {
        self.note(format!("{} waits for {mark:?}", next as usize));
        Ok(())
    }
    fn unmark(&self, mark: Mark) {
        self.note(format!("unmark {mark:?}"));
    }
    fn side_stream(&self, beside: *mut c_void) -> Result<*mut c_void> {
        let side = 100 + self.sides.fetch_add(1, Ordering::Relaxed);
        self.note(format!("side {side} beside {}", beside as usize));
        Ok(side as *mut c_void)
    }
    fn give_side_stream_back(&self, stream: *mut c_void) {
        self.note(format!("back {}", stream as usize));
    }
    fn keep_for_graph(&self, stream: *mut c_void, kept: Arc<dyn Any + Send + Sync>) -> Result<()> {
        self.note(format!("keep {}", stream as usize));
        self.kept.lock().push(kept);
        Ok(())
    }
    fn allocate_user(&self, _bytes: usize) -> Result<*mut c_void> {
        Err(Error::internal("not asked for"))
    }
    fn free_user(&self, _pointer: *mut c_void) -> Result<()> {
        Err(Error::internal("not asked for"))
    }
}

fn recorded() -> (Arc<Recorder>, Vec<Engine>) {
    let recorder: Arc<Recorder> = Arc::default();
    let devices: Vec<Arc<dyn Device>> = vec![recorder.clone(), recorder.clone()];
    let engines = tests::cluster_on(&devices, &tests::profile(2, Algorithm::Ring, 1), Path::P2p);
    (recorder, engines)
}

fn work(engine: &Engine, stream: usize) -> Work {
    let mut buffer = [0f32; 4];
    let request = Request {
        collective: Collective::AllReduce,
        send: buffer.as_ptr().cast(),
        recv: buffer.as_mut_ptr().cast(),
        count: 4,
        datatype: DataType::Float32,
        op: ReduceOp::Sum,
        stream: stream as *mut c_void,
    };
    engine.prepare(&request).expect("accepted").expect("work")
}

fn launch(engine: &Engine, stream: usize) {
    let work = work(engine, stream);
    admit(&[(engine, &[work])])
        .and_then(Admitted::launch)
        .expect("launched");
}

fn all_left(engine: &Engine, left: u64) {
    engine.control().left.store(left, Ordering::Release);
}

#[test]
fn launches_of_one_capture_are_ordered_among_themselves() {
    let (recorder, engines) = recorded();
    for (stream, capture) in [(1, 5), (2, 5), (3, 6)] {
        recorder.capture(stream, capture);
    }
    launch(&engines[0], 9);
    assert_eq!(
        recorder.take(),
        "",
        "no event for a communicator that was never captured"
    );
    for (stream, expected) in [
        (1, "keep 1"),
        (1, ""),
        (2, "1 -> 2"),
        (3, "keep 3"),
        (2, ""),
        (1, "2 -> 1"),
        (3, ""),
    ] {
        launch(&engines[0], stream);
        assert_eq!(recorder.take(), expected, "stream {stream}");
    }
    assert_eq!(
        engines[0].launched.load(Ordering::Relaxed),
        1,
        "captured launches do not count"
    );
    all_left(&engines[0], 1);
    for capture in 0..1000 {
        recorder.capture(4, 100 + capture);
        launch(&engines[0], 4);
    }
    assert_eq!(engines[0].order.lock().captures.len(), CAPTURES_AT_ONCE);
}

#[test]
fn eager_launches_of_a_captured_communicator_are_marked_since_replays_count_up_left() {
    let (recorder, engines) = recorded();
    let engine = &engines[0];
    recorder.capture(1, 5);
    launch(engine, 8);
    launch(engine, 1);
    assert_eq!(engine.idle(), Ok(false), "the first eager one runs");
    launch(engine, 8);
    assert_eq!(recorder.take(), "keep 1, mark 8");
    all_left(engine, 100);
    recorder.running.store(true, Ordering::Relaxed);
    assert_eq!(engine.idle(), Ok(false), "what left were replays");
    launch(engine, 9);
    assert_eq!(recorder.take(), "9 waits for Mark(7), mark 9");
    recorder.running.store(false, Ordering::Relaxed);
    launch(engine, 8);
    assert_eq!(recorder.take(), "mark 8");
    assert_eq!(engine.synchronize(&|| Some(Error::internal("waits"))), Ok(()));
    drop(engines);
    assert_eq!(recorder.take(), "unmark Mark(7)");
}

#[test]
fn a_graph_keeps_the_kernels_memory_with_the_stop_word_raised() {
    let (recorder, engines) = recorded();
    recorder.capture(1, 5);
    launch(&engines[0], 1);
    let memory = Arc::downgrade(&engines[0].memory);
    drop(engines);
    let kept = memory.upgrade().expect("the graph keeps it");
    assert_eq!(kept.control().stop.load(Ordering::SeqCst), STOP_ABORT);
    drop(kept);
    recorder.kept.lock().clear();
    goes(&memory);
}

/// Other tests' engines may still have kernels, so that it goes later.
fn goes(memory: &Weak<KernelMemory>) {
    for _ in 0..10_000 {
        running::let_go();
        if memory.strong_count() == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("the memory is kept");
}

#[test]
fn memory_stays_while_another_engine_has_a_kernel() {
    let (first, second) = (recorded().1, recorded());
    let memory: Vec<_> = first.iter().map(|engine| Arc::downgrade(&engine.memory)).collect();
    let stays = |why: &str| {
        running::let_go();
        assert!(memory.iter().all(|memory| memory.strong_count() > 0), "{why}");
    };
    let (recorder, busy) = (&second.0, &second.1);
    launch(&busy[1], 1);
    drop(first);
    stays("a kernel was launched and has not left");
    all_left(&busy[1], 1);
    let held = busy[0].order.lock();
    stays("a launch may be under way");
    drop(held);
    // Of replays nothing is seen.
    recorder.capture(2, 5);
    launch(&busy[0], 2);
    stays("a graph may be replayed");
    launch(&busy[0], 3);
    all_left(&busy[0], 100);
    stays("a graph may be replayed, also beside an eager launch that has left");
    drop(second);
    memory.iter().for_each(goes);
}

/// As `goes`, by the beat alone.
#[test]
fn memory_goes_also_where_no_engine_begins_or_ends() {
    let (first, second) = (recorded().1, recorded());
    let memory: Vec<_> = first.iter().map(|engine| Arc::downgrade(&engine.memory)).collect();
    launch(&second.1[1], 1);
    drop(first);
    crate::launch::beat();
    assert!(memory.iter().all(|memory| memory.strong_count() > 0));
    all_left(&second.1[1], 1);
    for _ in 0..10_000 {
        crate::launch::beat();
        if memory.iter().all(|memory| memory.strong_count() == 0) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("the memory is kept");
}

/// One group, with the streams of each rank's works.
fn group(engines: &[Engine], streams: [&[usize]; 2], run: impl FnOnce(&[Part])) {
    let works: Vec<Vec<Work>> = engines
        .iter()
        .zip(streams)
        .map(|(engine, streams)| streams.iter().map(|stream| work(engine, *stream)).collect())
        .collect();
    let parts = engines.iter().zip(&works);
    run(&parts.map(|(engine, works)| (engine, &works[..])).collect::<Vec<Part>>());
}

fn launch_group(engines: &[Engine], streams: [&[usize]; 2]) -> Result<()> {
    let mut outcome = Ok(());
    group(engines, streams, |batch| {
        outcome = admit(batch).and_then(Admitted::launch)
    });
    outcome
}

#[track_caller]
fn refused(engines: &[Engine], streams: [&[usize]; 2], words: &str) {
    group(engines, streams, |batch| match admit(batch) {
        Ok(_) => {
            assert_eq!(words, "", "accepted");
            batch.iter().for_each(clique::leave);
        }
        Err(error) => {
            assert_eq!(error.code, Code::InvalidUsage);
            assert!(!words.is_empty() && error.text.contains(words), "{error}");
        }
    });
}

#[test]
fn a_group_captures_all_of_a_communicator_or_nothing() {
    let (recorder, engines) = recorded();
    for (stream, capture) in [(1, 5), (2, 5), (3, 6)] {
        recorder.capture(stream, capture);
    }
    refused(&engines, [&[1, 9], &[2, 2]], "rank 0: the operations of one group");
    refused(&engines, [&[1, 2], &[2, 3]], "rank 1: the operations of one group");
    refused(
        &engines,
        [&[1], &[9]],
        "ranks 0 and 1 of one communicator: one is under",
    );
    refused(&engines, [&[1], &[1]], "");
    refused(&engines, [&[1, 2], &[2, 1]], "");
    refused(&engines, [&[1], &[2]], "");
    refused(&engines, [&[1], &[3]], "");
    refused(&engines, [&[1], &[]], "");
    // A capture that is over says nothing of the stream.
    recorder.captures.lock().clear();
    refused(&engines, [&[], &[1]], "");
    refused(&engines, [&[1], &[1]], "");
}

#[test]
fn eager_work_behind_a_stream_that_came_under_capture_is_refused() {
    let (recorder, engines) = recorded();
    launch(&engines[0], 1);
    recorder.capture(1, 5);
    refused(&engines, [&[2], &[]], "still runs in stream 0x1");
    refused(&engines, [&[1], &[]], "");
    all_left(&engines[0], 1);
    refused(&engines, [&[2], &[]], "");
}

#[test]
fn ranks_of_one_group_on_one_stream_are_forked_and_joined() {
    let (recorder, engines) = recorded();
    assert_eq!(launch_group(&engines, [&[1, 1], &[1, 1]]), Ok(()));
    assert_eq!(
        recorder.take(),
        "side 100 beside 1, mark 1, 100 waits for Mark(7), kernel 1, kernel 100, kernel 1, kernel 100, mark 100, \
         1 waits for Mark(7), unmark Mark(7)"
    );
    // What comes next of rank 1 is behind its own work alone: the stream may have another rank's next operation.
    launch(&engines[1], 2);
    launch(&engines[0], 3);
    assert_eq!(recorder.take(), "100 -> 2, kernel 2, 1 -> 3, kernel 3");
    // Each of several streams is left behind what was in it, and goes on behind the last work that it had.
    assert_eq!(launch_group(&engines, [&[4, 3], &[5, 3, 5]]), Ok(()));
    let crossed = "mark 5, mark 3, 3 -> 4, 100 waits for Mark(8), 2 -> 100, kernel 4, kernel 100, 4 -> 3, \
                   100 waits for Mark(9), kernel 3, kernel 100, mark 100, kernel 100, mark 100, 5 waits for Mark(8), \
                   3 waits for Mark(9), unmark Mark(8), unmark Mark(9)";
    assert_eq!(recorder.take(), crossed);
    // No stream, no event more where none is shared.
    assert_eq!(launch_group(&engines, [&[3], &[100]]), Ok(()));
    assert_eq!(recorder.take(), "kernel 3, kernel 100");
    all_left(&engines[0], 6);
    all_left(&engines[1], 7);
    drop(engines);
    assert_eq!(recorder.take(), "back 100");
}

#[test]
fn all_of_a_group_are_ordered_before_any_is_launched() {
    let (recorder, engines) = recorded();
    assert_eq!(launch_group(&engines, [&[1], &[1]]), Ok(()));
    assert_eq!(launch_group(&engines, [&[2], &[3]]), Ok(()));
    recorder.take();
    assert_eq!(launch_group(&engines, [&[3], &[2]]), Ok(()));
    assert_eq!(recorder.take(), "2 -> 3, 3 -> 2, kernel 3, kernel 2");
    engines.iter().for_each(|engine| all_left(engine, 3));
}

#[test]
fn each_open_capture_has_a_side_stream_and_eager_work_another() {
    let (recorder, engines) = recorded();
    recorder.capture(1, 5);
    recorder.capture(2, 6);
    let launched = |stream: usize, side: &str| {
        assert_eq!(launch_group(&engines, [&[stream], &[stream]]), Ok(()));
        let calls = recorder.take();
        assert!(calls.starts_with(side), "{calls}");
        calls
    };
    let calls = launched(
        1,
        "side 100 beside 1, mark 1, keep 1, 100 waits for Mark(7), keep 100, kernel 1, kernel 100, mark 100",
    );
    assert!(calls.ends_with("1 waits for Mark(7), unmark Mark(7)"), "{calls}");
    recorder.capture(100, 5);
    launched(2, "side 101 beside 2");
    recorder.capture(101, 6);
    let again = launched(1, "mark 1");
    assert!(again.contains("100 waits for Mark(9), kernel 1, kernel 100"), "{again}");
    launched(9, "side 102 beside 9");
    assert_eq!(engines[1].launched.load(Ordering::Relaxed), 1);
    recorder.captures.lock().clear();
    recorder.capture(3, 7);
    launched(3, "mark 3");
    engines.iter().for_each(|engine| all_left(engine, 1));
    drop(engines);
    let calls = recorder.take();
    assert!(
        ["back 100", "back 101", "back 102"]
            .iter()
            .all(|back| calls.contains(back)),
        "{calls}"
    );
}

#[test]
fn a_launch_that_fails_leaves_no_branch_of_a_capture_behind() {
    let (recorder, engines) = recorded();
    recorder.capture(1, 5);
    // Rank 0 fails before rank 1's kernel, then rank 1's own.
    for broken in [1, 100] {
        recorder.broken.store(broken, Ordering::Relaxed);
        let error = launch_group(&engines, [&[1], &[1]]).unwrap_err();
        assert_eq!(error.text, "broken on purpose");
        let calls = recorder.take();
        assert!(calls.contains("100 waits for"), "{calls}");
        let mark = if broken == 1 { "Mark(7)" } else { "Mark(8)" };
        assert!(
            calls.ends_with(&format!("mark 100, 1 waits for {mark}, unmark {mark}")),
            "{calls}"
        );
        recorder.capture(100, 5);
    }
}

#[test]
fn ranks_on_one_captured_stream_in_different_groups_are_refused() {
    let (recorder, engines) = recorded();
    for (stream, capture) in [(1, 5), (2, 5), (3, 6)] {
        recorder.capture(stream, capture);
    }
    let words = "ranks 0 and 1 of one communicator use one stream";
    launch(&engines[0], 1);
    for _ in 0..2 {
        refused(&engines, [&[], &[1]], words);
    }
    // Rank 0 is one ahead: its next may share a stream with rank 1's first, if that is not behind the one before.
    refused(&engines, [&[1], &[1]], words);
    refused(&engines, [&[2], &[2]], "");
    launch(&engines[1], 2);
    // In turns is no conflict, and captures have nothing to do with each other or with eager work.
    launch(&engines[1], 1);
    refused(&engines, [&[1], &[]], "ranks 1 and 0");
    launch(&engines[0], 2);
    assert_eq!(launch_group(&engines, [&[1], &[1]]), Ok(()));
    launch(&engines[0], 3);
    launch(&engines[0], 9);
    refused(&engines, [&[], &[9]], words);
    refused(&engines, [&[], &[1]], "");
    for capture in 0..100 {
        recorder.capture(4, 100 + capture);
        launch(&engines[0], 4);
    }
    assert_eq!(engines[0].clique.remembered_captures(0), CAPTURES_AT_ONCE);
    engines.iter().for_each(|engine| all_left(engine, 1));
}
