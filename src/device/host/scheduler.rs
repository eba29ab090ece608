//! Runs streams of the host device: which of them goes next, and how many at once, is drawn from a seed.
//!
//! A stream is a queue whose first entry runs until it is done; then comes the next. One thread, the dispatcher, looks
//! at the first entries that could run and draws one. Records and waits of events it does itself; kernels and calls run
//! on threads of a pool, which grows as needed, since kernels of one communicator wait for each other: whatever may run
//! is started sooner or later, while others still run. Between two starts it may pause, so that in one run kernels come
//! all at once and in the next one by one.
//!
//! ```text
//! enqueue, record, wait, launch --> queues --> dispatcher --> pool
//!      \--> capture, for a stream that is in one                \--> entry done, next
//! ```

use super::capture::Capture;
use super::graph::{Executable, Graph, Kept, Replay};
use super::stream::{patiently, Moment, Stream};
use super::{run_blocks, HostKernel, Worker};
use crate::abi::entry::panic_text;
use crate::device::StreamKey;
use crate::error::{Error, Result};
use crate::sys::condvar::Condvar;
use crate::sys::thread::{self, Thread};
use crate::warning;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the dispatcher looks at events that other schedulers or callers pass.
const POLL: Duration = Duration::from_millis(1);
/// The longest pause between two starts that waits for something to end first.
const PAUSE: Duration = Duration::from_micros(100);
const YIELDS: u64 = 32;

/// What runs on the pool.
pub(super) enum Task {
    Kernel {
        kernel: HostKernel,
        blocks: u32,
        /// The kernel's parameter, in words so that it is aligned as its struct is.
        arguments: Box<[u64]>,
    },
    Call(Box<dyn Fn() + Send + Sync>),
}

impl Task {
    pub(super) fn kernel(kernel: HostKernel, blocks: u32, arguments: &[u8]) -> Task {
        let words = arguments.chunks(size_of::<u64>()).map(|bytes| {
            let mut word = [0; size_of::<u64>()];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        });
        Task::Kernel {
            kernel,
            blocks,
            arguments: words.collect(),
        }
    }

    /// `crew` is the pool thread's own, for all blocks but the first.
    fn run(&self, crew: &mut Vec<Worker>) -> Result<()> {
        match self {
            Task::Call(call) => catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
                let text = panic_text(panic.as_ref());
                Error::internal(format!("a call in a stream panicked: {text}"))
            }),
            Task::Kernel {
                kernel,
                blocks,
                arguments,
            } => {
                while crew.len() + 1 < *blocks as usize {
                    crew.push(Worker::start()?);
                }
                run_blocks(crew, arguments.as_ptr().cast(), *blocks, *kernel);
                Ok(())
            }
        }
    }
}

enum Entry {
    Task(Arc<Task>),
    Record(Arc<Moment>),
    Wait(Arc<Moment>),
    Replay(Replay),
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    /// The first entry is a task that was started.
    running: bool,
    /// The capture that the stream is in.
    capture: Option<u64>,
    /// Its owner has no more work for it.
    closed: bool,
}

/// A thread of the pool and the threads of its kernels' other blocks.
struct Runner {
    worker: Worker,
    crew: Arc<Mutex<Vec<Worker>>>,
}

struct State {
    random: u64,
    queues: BTreeMap<u64, Queue>,
    captures: BTreeMap<u64, Capture>,
    runners: Vec<Runner>,
    /// Places in `runners`.
    idle: Vec<usize>,
    running: usize,
    /// The first thing that went wrong on the scheduler's own threads.
    failed: Option<Error>,
    ending: bool,
}

/// Something that may be started: a stream's first entry, or one of the ready nodes of a replay there.
#[derive(Clone, Copy)]
struct Candidate {
    stream: u64,
    place: usize,
}

impl State {
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn candidates(&self) -> Vec<Candidate> {
        let mut found = Vec::new();
        for (stream, queue) in self.queues.iter().filter(|(_, queue)| !queue.running) {
            let places = match queue.entries.front() {
                None => 0,
                Some(Entry::Wait(moment)) => usize::from(moment.is_passed()),
                // A graph without nodes has none that could end.
                Some(Entry::Replay(replay)) if replay.ended() => 1,
                Some(Entry::Replay(replay)) => replay.ready.len(),
                Some(Entry::Task(_) | Entry::Record(_)) => 1,
            };
            found.extend((0..places).map(|place| Candidate { stream: *stream, place }));
        }
        found
    }

    fn waits(&self) -> bool {
        self.queues
            .values()
            .any(|queue| matches!(queue.entries.front(), Some(Entry::Wait(_))))
    }

    /// Starts or does what was drawn. Returns what is over by that: to be dropped without the lock.
    fn advance(&mut self, shared: &Arc<Shared>, Candidate { stream, place }: Candidate) -> Option<Entry> {
        let queue = self.queues.get_mut(&stream)?;
        let (node, task) = match queue.entries.front_mut()? {
            Entry::Task(task) => {
                queue.running = true;
                (None, Arc::clone(task))
            }
            Entry::Replay(replay) if !replay.ended() => {
                let (node, task) = replay.start(place);
                (Some(node), task)
            }
            Entry::Record(moment) => {
                moment.pass();
                return self.pop(stream);
            }
            Entry::Wait(_) | Entry::Replay(_) => return self.pop(stream),
        };
        match self.runner() {
            Ok(place) => {
                self.running += 1;
                let (shared, crew) = (Arc::clone(shared), Arc::clone(&self.runners[place].crew));
                self.runners[place].worker.run(move || {
                    let outcome = task.run(&mut crew.lock());
                    // The caller must not find its own values still held here when the stream is done.
                    drop(task);
                    shared.ended(stream, node, place, outcome);
                });
            }
            Err(error) => self.fail(error),
        }
        None
    }

    fn runner(&mut self) -> Result<usize> {
        if let Some(place) = self.idle.pop() {
            return Ok(place);
        }
        self.runners.push(Runner {
            worker: Worker::start()?,
            crew: Arc::default(),
        });
        Ok(self.runners.len() - 1)
    }

    fn pop(&mut self, stream: u64) -> Option<Entry> {
        let queue = self.queues.get_mut(&stream)?;
        queue.running = false;
        let over = queue.entries.pop_front();
        if queue.closed && queue.entries.is_empty() {
            self.queues.remove(&stream);
        }
        over
    }

    fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    /// Work that cannot be captured breaks the capture that it meets.
    fn break_capture(&mut self, capture: u64, why: &str) -> Error {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.broken = true;
        }
        Error::usage(format!("{why}: the graph capture is broken by it"))
    }

    fn queue(&mut self, stream: u64) -> Result<&mut Queue> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let queue = self.queues.get_mut(&stream);
        queue.ok_or_else(|| Error::argument(format!("stream {stream:#x} was dropped")))
    }

    /// The capture that the stream is in, or the queue that takes its work.
    fn target(&mut self, stream: u64) -> Result<std::result::Result<(u64, &mut Capture), &mut Queue>> {
        let Some(number) = self.queue(stream)?.capture else {
            return self.queue(stream).map(Err);
        };
        match self.captures.get_mut(&number) {
            Some(capture) if !capture.broken => Ok(Ok((number, capture))),
            _ => Err(broken(stream)),
        }
    }
}

fn broken(stream: u64) -> Error {
    Error::usage(format!(
        "the graph capture of stream {stream:#x} was made invalid by an earlier call: end it and capture again"
    ))
}

/// What streams, pool and dispatcher share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Only the dispatcher waits for it.
    changed: Condvar,
}

impl Shared {
    pub(super) fn open(&self, stream: u64) {
        self.state.lock().queues.insert(stream, Queue::default());
    }

    pub(super) fn close(&self, stream: u64) {
        let mut state = self.state.lock();
        if let Some(queue) = state.queues.get_mut(&stream) {
            queue.closed = true;
            if queue.entries.is_empty() {
                state.queues.remove(&stream);
            }
        }
    }

    pub(super) fn key(&self, stream: u64) -> Result<StreamKey> {
        let capture = self.state.lock().target(stream)?.ok().map(|(number, _)| number);
        Ok(StreamKey {
            stream: stream << 1,
            capture,
        })
    }

    pub(super) fn enqueue(&self, stream: u64, task: Task) -> Result<()> {
        let task = Arc::new(task);
        match self.state.lock().target(stream)? {
            Ok((_, capture)) => capture.add(stream, task),
            Err(queue) => self.put(queue, Entry::Task(task)),
        }
        Ok(())
    }

    fn put(&self, queue: &mut Queue, entry: Entry) {
        queue.entries.push_back(entry);
        self.changed.notify_one();
    }

    pub(super) fn record(&self, stream: u64) -> Result<Arc<Moment>> {
        match self.state.lock().target(stream)? {
            Ok((number, capture)) => Ok(Arc::new(Moment::of_capture(number, capture.tail(stream)))),
            Err(queue) => {
                let moment: Arc<Moment> = Arc::default();
                self.put(queue, Entry::Record(Arc::clone(&moment)));
                Ok(moment)
            }
        }
    }

    pub(super) fn wait(&self, stream: u64, moment: &Arc<Moment>) -> Result<()> {
        let mut state = self.state.lock();
        let own = state.target(stream)?.ok().map(|(number, _)| number);
        match (&moment.captured, own) {
            (None, None) => self.put(state.queue(stream)?, Entry::Wait(Arc::clone(moment))),
            (None, Some(own)) => {
                let why = format!("captured stream {stream:#x} waits for an event that is not captured");
                return Err(state.break_capture(own, &why));
            }
            (Some((other, _)), Some(own)) if *other != own => {
                let why = format!("captured stream {stream:#x} waits for an event of another capture");
                state.break_capture(*other, &why);
                return Err(state.break_capture(own, &why));
            }
            (Some((number, nodes)), _) => {
                let Some(capture) = state.captures.get_mut(number) else {
                    return Err(Error::usage(format!(
                        "stream {stream:#x} waits for an event of a graph capture that has ended"
                    )));
                };
                capture.join(stream, nodes);
                state.queue(stream)?.capture = Some(*number);
            }
        }
        Ok(())
    }

    pub(super) fn launch(&self, stream: u64, graph: &Executable) -> Result<()> {
        let mut last = graph.last.lock();
        match self.state.lock().target(stream)? {
            Ok((_, capture)) => {
                capture.broken = true;
                Err(Error::usage("graphs of the host device cannot be captured"))
            }
            Err(queue) => {
                let end: Arc<Moment> = Arc::default();
                if let Some(before) = last.replace(Arc::clone(&end)) {
                    self.put(queue, Entry::Wait(before));
                }
                self.put(queue, Entry::Replay(Replay::new(Arc::clone(&graph.nodes), end)));
                Ok(())
            }
        }
    }

    pub(super) fn begin_capture(&self, stream: u64) -> Result<()> {
        /// No capture of the process has the number of another.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut state = self.state.lock();
        let queue = state.queue(stream)?;
        if queue.capture.is_some() {
            return Err(Error::usage(format!(
                "stream {stream:#x} is in a graph capture already"
            )));
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        queue.capture = Some(number);
        state.captures.insert(number, Capture::begin(stream));
        Ok(())
    }

    /// The capture is over, also where it gives no graph.
    pub(super) fn end_capture(&self, stream: u64) -> Result<Graph> {
        let mut state = self.state.lock();
        let number = state.queue(stream)?.capture;
        let capture = number.and_then(|number| state.captures.remove(&number));
        let Some(capture) = capture else {
            return Err(Error::usage(format!("stream {stream:#x} is in no graph capture")));
        };
        for member in capture.streams() {
            if let Some(queue) = state.queues.get_mut(&member) {
                queue.capture = None;
            }
        }
        drop(state);
        capture.end(stream)
    }

    pub(super) fn keep(&self, stream: u64, kept: Kept) -> Result<()> {
        match self.state.lock().target(stream)? {
            Ok((_, capture)) => capture.keep(kept),
            Err(_) => {
                return Err(Error::usage(format!(
                    "the graph capture of stream {stream:#x} has ended during the call"
                )))
            }
        }
        Ok(())
    }

    pub(super) fn is_done(&self, stream: u64) -> Result<bool> {
        let mut state = self.state.lock();
        match state.queue(stream)?.capture {
            None => Ok(state.queue(stream)?.entries.is_empty()),
            Some(capture) => Err(state.break_capture(capture, &format!("captured stream {stream:#x} is waited for"))),
        }
    }

    /// `held` tasks run, and no other can until an event is passed.
    fn is_settled(&self, held: usize) -> Result<bool> {
        let state = self.state.lock();
        match &state.failed {
            Some(failed) => Err(failed.clone()),
            None => Ok(state.running == held && state.candidates().is_empty()),
        }
    }

    pub(super) fn describe(&self) -> String {
        let state = self.state.lock();
        let mut text = format!("{} tasks run", state.running);
        for (stream, queue) in state.queues.iter().filter(|(_, queue)| !queue.entries.is_empty()) {
            let first = match queue.entries.front() {
                Some(Entry::Wait(_)) => "an event that is awaited",
                Some(Entry::Record(_)) => "an event to be recorded",
                Some(Entry::Replay(_)) => "a graph",
                Some(Entry::Task(task)) if matches!(**task, Task::Kernel { .. }) => "a kernel",
                _ => "a call",
            };
            text += &format!(
                "; stream {stream:#x} has {} entries, first {first}",
                queue.entries.len()
            );
        }
        text
    }

    /// A task is over; of a replay, its node.
    fn ended(&self, stream: u64, node: Option<usize>, runner: usize, outcome: Result<()>) {
        let mut state = self.state.lock();
        state.running -= 1;
        state.idle.push(runner);
        if let Err(error) = outcome {
            state.fail(error);
        }
        let first = state
            .queues
            .get_mut(&stream)
            .and_then(|queue| queue.entries.front_mut());
        let over = match (node, first) {
            (Some(node), Some(Entry::Replay(replay))) => {
                replay.node_ended(node);
                replay.ended().then(|| state.pop(stream))
            }
            _ => Some(state.pop(stream)),
        };
        self.changed.notify_one();
        drop(state);
        drop(over);
    }
}

/// Streams and the threads that run them. Dropping it waits for what runs; what is queued then does not run any more.
pub struct Scheduler {
    shared: Arc<Shared>,
    dispatcher: Option<Thread>,
}

impl Scheduler {
    pub fn new(seed: u64) -> Result<Scheduler> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                random: seed,
                queues: BTreeMap::new(),
                captures: BTreeMap::new(),
                runners: Vec::new(),
                idle: Vec::new(),
                running: 0,
                failed: None,
                ending: false,
            }),
            changed: Condvar::default(),
        });
        let dispatched = Arc::clone(&shared);
        let dispatcher = thread::spawn(c"ossicle-streams", move || dispatch(&dispatched))
            .map_err(|error| Error::system(format!("cannot start a thread for streams: {error}")))?;
        Ok(Scheduler {
            shared,
            dispatcher: Some(dispatcher),
        })
    }

    pub fn stream(&self) -> Stream {
        Stream::new(Arc::clone(&self.shared))
    }

    /// Waits until all that can run has run, but for `held` calls that the caller holds up.
    pub fn settle(&self, held: usize) -> Result<()> {
        patiently(&self.shared, "streams do not come to rest", || {
            self.shared.is_settled(held)
        })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.ending = true;
        state.fail(Error::usage("the stream's scheduler was dropped"));
        self.shared.changed.notify_one();
        drop(state);
        // Its body does not panic: it moves entries and starts threads.
        if let Some(dispatcher) = self.dispatcher.take() {
            dispatcher.join();
        }
        let ended = || Ok(self.shared.state.lock().running == 0);
        let ended = patiently(&self.shared, "a dropped scheduler's streams still run", ended);
        let runners = std::mem::take(&mut self.shared.state.lock().runners);
        match ended {
            Ok(()) => drop(runners),
            Err(error) => {
                warning!("{error}: their threads are kept");
                std::mem::forget(runners);
            }
        }
        let queues = std::mem::take(&mut self.shared.state.lock().queues);
        drop(queues);
    }
}

fn dispatch(shared: &Arc<Shared>) {
    let mut state = shared.state.lock();
    while !state.ending {
        let candidates = state.candidates();
        if candidates.is_empty() {
            match state.waits() {
                true => shared.changed.wait_until(&mut state, Instant::now() + POLL),
                false => shared.changed.wait(&mut state),
            }
            continue;
        }
        let drawn = candidates[state.draw() as usize % candidates.len()];
        if let Some(over) = state.advance(shared, drawn) {
            MutexGuard::unlocked(&mut state, || drop(over));
        }
        match state.draw() % 4 {
            0 => shared.changed.wait_until(&mut state, Instant::now() + PAUSE),
            1 => {
                let yields = state.draw() % YIELDS;
                MutexGuard::unlocked(&mut state, || (0..yields).for_each(|_| std::thread::yield_now()));
            }
            _ => {}
        }
    }
}
