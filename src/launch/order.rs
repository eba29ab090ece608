//! The order of one rank's launches in different streams, eager and captured, and when the eager ones are done.
//!
//! Kernels of one rank must run one after another. Of eager launches the library sees to it with an event where the
//! stream changes, and of captured ones with an edge within their graph. Between replays, which the library does not
//! see, and everything else of the communicator the order is the caller's duty.
//!
//! Until a communicator is captured its kernels are counted: as many left as were launched. Every replay counts up
//! `Control::left` too, so that from the first capture on each eager launch is followed by an event instead, and the
//! count stands for the launches before only: those are done before a replay begins, by the caller's duty.

use super::{Engine, Part, Work};
use crate::device::{Mark, StreamKey};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// A communicator may be captured into so many graphs at once. The end of a capture is not seen; one that is forgotten
/// while it goes on is taken for a new one, and its next launch has no edge from the one before.
const CAPTURES_AT_ONCE: usize = 16;

#[derive(Default)]
pub(super) struct StreamOrder {
    /// The caller's stream of the last eager launch: its key and handle.
    eager: Option<(u64, usize)>,
    /// Behind the last eager launch, if that came after the first captured one.
    mark: Option<Mark>,
    captured: bool,
    /// An eager launch has begun and is not counted yet.
    launching: bool,
    /// The latest captures, oldest first.
    captures: VecDeque<CaptureTail>,
}

impl StreamOrder {
    pub(super) fn mark(&self) -> Option<Mark> {
        self.mark
    }

    pub(super) fn is_launching(&self) -> bool {
        self.launching
    }
}

/// The stream of the last launch in a capture.
struct CaptureTail {
    capture: u64,
    stream: u64,
    handle: usize,
}

impl Engine {
    /// Whether all eager launches have left.
    pub(super) fn idle(&self) -> Result<bool> {
        self.is_idle(&self.order.lock())
    }

    fn is_idle(&self, order: &StreamOrder) -> Result<bool> {
        match order.mark {
            _ if order.launching => Ok(false),
            Some(mark) => self.device.reached(mark),
            None => Ok(self.control().left.load(Ordering::Acquire) >= self.launched.load(Ordering::Acquire)),
        }
    }

    /// Refuses eager work that could not be ordered behind this rank's last: nothing can wait for a stream that has
    /// come under capture since, and the caller's own thread waits for no stream.
    pub(super) fn check_order(&self, works: &[Work]) -> Result<()> {
        let order = self.order.lock();
        let (Some(first), Some((stream, handle))) = (works.first(), order.eager) else {
            return Ok(());
        };
        // A stream can wait for the mark whatever has become of the one that it was put into.
        if order.mark.is_some() && !first.on_callers_thread() {
            return Ok(());
        }
        let StreamKey { stream: next, capture } = first.stream_key;
        if capture.is_some() || next == stream || self.is_idle(&order)? {
            return Ok(());
        }
        let last = handle as *mut c_void;
        if first.on_callers_thread() {
            return Err(Error::usage(format!(
                "rank {}: the operation before this one still runs in stream {last:p}: synchronise that before an operation \
                 on the default stream",
                self.rank
            )));
        }
        match self.device.check_stream(last)?.capture {
            None => Ok(()),
            Some(_) => Err(Error::usage(format!(
                "rank {}: the operation before this one still runs in stream {last:p}, which is under CUDA graph capture \
                 now: synchronise a stream before capturing it",
                self.rank
            ))),
        }
    }

    /// Orders a launch behind this rank's work in another stream, and says which stream comes last. Where that work
    /// has left, the other stream is not asked: its owner may have destroyed it.
    pub(super) fn before_launch(&self, work: &Work) -> Result<()> {
        let mut order = self.order.lock();
        let (key, handle) = (work.stream_key.stream, work.stream as usize);
        let Some(capture) = work.stream_key.capture else {
            if let Some((_, last)) = order.eager.filter(|(stream, _)| *stream != key) {
                match order.mark {
                    _ if self.is_idle(&order)? => {}
                    Some(mark) => self.device.wait_for_mark(mark, work.stream)?,
                    None => self.device.order_streams(last as *mut c_void, work.stream)?,
                }
            }
            order.eager = Some((key, handle));
            order.launching = true;
            return Ok(());
        };
        match order.captures.iter_mut().find(|tail| tail.capture == capture) {
            Some(tail) => {
                if tail.stream != key {
                    self.device.order_streams(tail.handle as *mut c_void, work.stream)?;
                }
                (tail.stream, tail.handle) = (key, handle);
            }
            None => {
                self.device.keep_for_graph(work.stream, Arc::clone(&self.memory) as _)?;
                order.captured = true;
                if order.captures.len() == CAPTURES_AT_ONCE {
                    order.captures.pop_front();
                }
                order.captures.push_back(CaptureTail {
                    capture,
                    stream: key,
                    handle,
                });
            }
        }
        Ok(())
    }

    pub(super) fn after_launch(&self, work: &Work) -> Result<()> {
        if work.stream_key.capture.is_some() {
            return Ok(());
        }
        let mut order = self.order.lock();
        self.launched.fetch_add(1, Ordering::SeqCst);
        order.launching = false;
        if order.captured {
            order.mark = Some(self.device.mark(order.mark, work.stream)?);
        }
        Ok(())
    }

    /// Of a launch on the caller's thread, which nothing orders: it is under way, or `launched` operations are done.
    pub(super) fn note_here(&self, launching: bool, launched: u64) {
        let mut order = self.order.lock();
        order.launching = launching;
        self.launched.fetch_add(launched, Ordering::SeqCst);
    }

    /// The launch that `before_launch` let pass was refused.
    pub(super) fn launch_failed(&self) {
        self.order.lock().launching = false;
    }

    /// At the end of the engine.
    pub(super) fn give_mark_back(&self) {
        if let Some(mark) = self.order.lock().mark.take() {
            self.device.unmark(mark);
        }
    }
}

/// Works of one rank in one group run on the caller's thread or go to streams, which run beside it.
pub(super) fn check_streams(batch: &[Part]) -> Result<()> {
    for (engine, works) in batch {
        let Some((first, others)) = works.split_first() else {
            continue;
        };
        if others
            .iter()
            .any(|work| work.on_callers_thread() != first.on_callers_thread())
        {
            return Err(Error::usage(format!(
                "rank {}: some operations of one group are on the default stream of the host device and some are not: give all \
                 of them streams, or none",
                engine.rank
            )));
        }
    }
    Ok(())
}

/// What one group may capture: all works of a rank into one graph or none, and all ranks of a communicator or none. Two
/// ranks of one communicator in one stream are refused as when eager.
pub(super) fn check_captures(batch: &[Part]) -> Result<()> {
    for (index, (engine, works)) in batch.iter().enumerate() {
        let Some(first) = works.first() else { continue };
        let capture = first.stream_key.capture;
        if works.iter().any(|work| work.stream_key.capture != capture) {
            return Err(Error::usage(format!(
                "rank {}: the operations of one group are captured into different CUDA graphs, or some are and some are \
                 not: give them streams of one capture, or of none",
                engine.rank
            )));
        }
        let peers = batch[..index]
            .iter()
            .filter(|(other, works)| Arc::ptr_eq(&other.clique, &engine.clique) && !works.is_empty());
        for (other, theirs) in peers {
            if theirs[0].stream_key.capture.is_some() != capture.is_some() {
                return Err(Error::usage(format!(
                    "ranks {} and {} of one communicator: one is under CUDA graph capture in this group and the other is not: \
                     capture all ranks or none",
                    other.rank, engine.rank
                )));
            }
            let same = |work: &Work| theirs.iter().any(|their| their.stream_key == work.stream_key);
            let one_device =
                super::clique::streams_of(engine.device.as_ref()) == super::clique::streams_of(other.device.as_ref());
            if capture.is_some() && one_device && works.iter().any(same) {
                return Err(super::clique::one_stream(other.rank, engine.rank));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{host, Device, DeviceKind, Devices, Launch, Memory, Placement};
    use crate::error::Code;
    use crate::launch::{admit, running, tests, Algorithm, KernelMemory, Stop};
    use crate::request::{Collective, DataType, ReduceOp, Request};
    use crate::transport::Path;
    use parking_lot::Mutex;
    use std::any::Any;
    use std::collections::HashMap;
    use std::sync::atomic::AtomicBool;
    use std::sync::Weak;

    /// A GPU that writes down what it is asked; its memory is the host's, and no kernel runs.
    #[derive(Default)]
    struct Recorder {
        calls: Mutex<Vec<String>>,
        captures: Mutex<HashMap<usize, u64>>,
        running: AtomicBool,
        kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    }

    impl Recorder {
        fn note(&self, call: String) {
            self.calls.lock().push(call);
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
        fn enqueue(&self, _launch: &Launch) -> Result<()> {
            Ok(())
        }
        fn order_streams(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
            self.note(format!("{} -> {}", last as usize, next as usize));
            Ok(())
        }
        fn mark(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark> {
            self.note(format!("mark {}", stream as usize));
            Ok(mark.unwrap_or(Mark(7)))
        }
        fn reached(&self, mark: Mark) -> Result<bool> {
            assert_eq!(mark, Mark(7));
            Ok(!self.running.load(Ordering::Relaxed))
        }
        fn wait_for_mark(&self, mark: Mark, next: *mut c_void) -> Result<()> {
            self.note(format!("{} waits for {mark:?}", next as usize));
            Ok(())
        }
        fn unmark(&self, mark: Mark) {
            self.note(format!("unmark {mark:?}"));
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
        crate::launch::launch(&[(engine, &[work])]).expect("launched");
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
        assert_eq!(kept.control().stop.load(Ordering::SeqCst), Stop::Abort as u32);
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
        // From the first capture on an event says so.
        all_left(&busy[1], 1);
        recorder.running.store(true, Ordering::Relaxed);
        recorder.capture(2, 5);
        launch(&busy[0], 2);
        launch(&busy[0], 1);
        stays("the mark is not reached");
        recorder.running.store(false, Ordering::Relaxed);
        let held = busy[0].order.lock();
        stays("a launch may be under way");
        drop(held);
        memory.iter().for_each(goes);
    }

    #[track_caller]
    fn refused(engines: &[Engine], streams: [&[usize]; 2], words: &str) {
        let works: Vec<Vec<Work>> = engines
            .iter()
            .zip(streams)
            .map(|(engine, streams)| streams.iter().map(|stream| work(engine, *stream)).collect())
            .collect();
        let batch: Vec<Part> = engines
            .iter()
            .zip(&works)
            .map(|(engine, works)| (engine, &works[..]))
            .collect();
        match admit(&batch) {
            Ok(()) => assert_eq!(words, "", "accepted"),
            Err(error) => {
                assert_eq!(error.code, Code::InvalidUsage);
                assert!(!words.is_empty() && error.text.contains(words), "{error}");
            }
        }
        engines.iter().for_each(Engine::leave_clique);
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
        refused(
            &engines,
            [&[1], &[1]],
            "ranks 0 and 1 of one communicator use one stream",
        );
        refused(&engines, [&[1, 2], &[2, 1]], "use one stream");
        refused(&engines, [&[1], &[2]], "");
        refused(&engines, [&[1], &[3]], "");
        refused(&engines, [&[1], &[]], "");
        // A capture that is over says nothing of the stream.
        recorder.captures.lock().clear();
        refused(&engines, [&[], &[1]], "");
        refused(&engines, [&[1], &[1]], "use one stream");
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
}
