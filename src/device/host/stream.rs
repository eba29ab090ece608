//! Handles of the host device's streams, and events.
//!
//! Only Rust callers of this crate can make a stream: the C ABI has no function for it, so that a C caller has the
//! default stream alone.

use super::graph::{Executable, Graph};
use super::scheduler::{Shared, Task};
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The default stream's handles: NULL, cudaStreamLegacy, cudaStreamPerThread.
const LAST_DEFAULT_STREAM: usize = 2;

/// Whether the handle is one of the default stream's, whose work runs on the caller's thread.
pub(super) fn is_default(handle: *mut c_void) -> bool {
    handle as usize <= LAST_DEFAULT_STREAM
}

/// How long a caller may wait for streams: a stream that stands still for so long waits for something that never comes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Streams of this process by their handles, which are their numbers.
static STREAMS: ProcessLocal<Mutex<HashMap<usize, Weak<Shared>>>> = ProcessLocal::new();

pub(super) fn find(handle: *mut c_void) -> Result<(Arc<Shared>, u64)> {
    let found = STREAMS.get().lock().get(&(handle as usize)).and_then(Weak::upgrade);
    found.map(|shared| (shared, handle as u64)).ok_or_else(|| {
        Error::argument(format!(
            "stream is {handle:p}; the host device has the default stream only: pass NULL, or set OSSICLE_DEVICE=cuda"
        ))
    })
}

/// A place in the work of a stream.
#[derive(Default)]
pub(super) struct Moment {
    passed: AtomicBool,
    /// Of a stream under capture: the capture, and the nodes that lie before.
    pub(super) captured: Option<(u64, BTreeSet<usize>)>,
}

impl Moment {
    pub(super) fn of_capture(capture: u64, nodes: BTreeSet<usize>) -> Moment {
        Moment {
            passed: AtomicBool::new(false),
            captured: Some((capture, nodes)),
        }
    }

    pub(super) fn pass(&self) {
        self.passed.store(true, Ordering::Release);
    }

    pub(super) fn is_passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    pub(super) fn is_reached(&self) -> Result<bool> {
        match self.captured {
            None => Ok(self.is_passed()),
            Some(_) => Err(Error::usage("an event of a graph capture is never reached")),
        }
    }
}

/// What a stream's `record` gave: all work that was in it then.
#[derive(Clone)]
pub struct Event(Arc<Moment>);

impl Event {
    /// An event that is reached when `pass` is called.
    pub fn of_caller() -> Event {
        Event(Arc::default())
    }

    pub fn pass(&self) {
        self.0.pass();
    }

    pub fn is_reached(&self) -> Result<bool> {
        self.0.is_reached()
    }
}

/// A stream of a scheduler. Dropping it leaves the work that is in it to run, as CUDA does.
pub struct Stream {
    shared: Arc<Shared>,
    number: u64,
}

impl Stream {
    pub(super) fn new(shared: Arc<Shared>) -> Stream {
        /// Numbers of default streams are no stream's.
        static NEXT: AtomicU64 = AtomicU64::new(LAST_DEFAULT_STREAM as u64 + 1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        shared.open(number);
        STREAMS.get().lock().insert(number as usize, Arc::downgrade(&shared));
        Stream { shared, number }
    }

    /// What an operation takes as its stream.
    pub fn handle(&self) -> *mut c_void {
        self.number as *mut c_void
    }

    /// Work of the caller's own. Under capture it becomes a node, and runs at every replay.
    pub fn call(&self, call: impl Fn() + Send + Sync + 'static) -> Result<()> {
        self.shared.enqueue(self.number, Task::Call(Box::new(call)))
    }

    pub fn record(&self) -> Result<Event> {
        self.shared.record(self.number).map(Event)
    }

    /// All that is put into the stream from here on comes after the event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.shared.wait(self.number, &event.0)
    }

    /// Until `end_capture`, work of this stream and of those that wait for it becomes a graph.
    pub fn begin_capture(&self) -> Result<()> {
        self.shared.begin_capture(self.number)
    }

    pub fn end_capture(&self) -> Result<Graph> {
        self.shared.end_capture(self.number)
    }

    pub fn launch(&self, graph: &Executable) -> Result<()> {
        self.shared.launch(self.number, graph)
    }

    /// Waits until all work of the stream is done.
    pub fn synchronize(&self) -> Result<()> {
        let stuck = format!("stream {:#x} is not done", self.number);
        patiently(&self.shared, &stuck, || self.shared.is_done(self.number))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        STREAMS.get().lock().remove(&(self.number as usize));
        self.shared.close(self.number);
    }
}

/// Waits until `done` answers true. Past all patience the error says what every stream of the scheduler is at.
pub(super) fn patiently(shared: &Shared, stuck: &str, done: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !done()? {
        match begun.elapsed() {
            waited if waited < Duration::from_millis(1) => std::thread::yield_now(),
            waited if waited < PATIENCE => std::thread::sleep(Duration::from_micros(50)),
            _ => {
                let limit = PATIENCE.as_secs();
                return Err(Error::system(format!("{stuck} after {limit} s: {}", shared.describe())));
            }
        }
    }
    Ok(())
}
