//! Which engines of this process may have a kernel on a GPU.
//!
//! Unmapping memory that was imported, and unregistering host memory, may wait for everything that runs on the GPU. A
//! kernel of another communicator there may spin until the very thread that unmaps goes on: one thread that aborts two
//! communicators would hang in the first abort. So what an engine's kernels used is put down at its end, and let go of
//! when no engine has a kernel under way: at once as a rule, else at the next end or beginning of an engine, or about
//! half a second later where a communicator is watched (`beat`).
//!
//! Replays of graphs are not seen, so an engine that was ever captured counts as one with a kernel for as long as it
//! lives. To wait for replays of its own graphs before a communicator ends is the caller's duty.

use super::order::StreamOrder;
use super::{Engine, KernelMemory};
use crate::abi::entry::contain;
use crate::device::{self, Device, DeviceKind};
use crate::sys::process_local::ProcessLocal;
use crate::sys::thread;
use crate::transport::PeerInbox;
use crate::warning;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// So much that waits is said, once.
const MUCH: usize = 1 << 30;

struct Running {
    memory: Weak<KernelMemory>,
    launched: Arc<std::sync::atomic::AtomicU64>,
    order: Arc<Mutex<StreamOrder>>,
}

static ENGINES: ProcessLocal<Mutex<Vec<Running>>> = ProcessLocal::new();

/// What waits to be let go of.
#[derive(Default)]
struct Waiting {
    /// Inboxes of engines that ended. Graphs that keep them longer are not known here.
    bytes: AtomicUsize,
    said: AtomicBool,
    /// A thread of `beat` is letting go.
    going: AtomicBool,
}

static WAITING: ProcessLocal<Waiting> = ProcessLocal::new();

impl Running {
    fn may_run(&self) -> bool {
        let Some(memory) = self.memory.upgrade() else {
            return false;
        };
        match self.order.try_lock().map(|order| order.was_captured()) {
            // It is being launched from, or has graphs.
            None | Some(true) => true,
            Some(false) => memory.control().left.load(Ordering::Acquire) < self.launched.load(Ordering::Acquire),
        }
    }
}

pub(super) fn enter(engine: &Engine) {
    if engine.device.kind() == DeviceKind::Cuda {
        ENGINES.get().lock().push(Running {
            memory: Arc::downgrade(&engine.memory),
            launched: engine.launched.clone(),
            order: engine.order.clone(),
        });
    }
}

/// At the end of an engine; `done`: its kernels have left.
pub(super) fn leave(engine: &Engine, done: bool) {
    if engine.device.kind() != DeviceKind::Cuda {
        return;
    }
    // Before it is off the list, so that there is no moment at which it could go while others run.
    device::cuda::put_down(engine.memory.clone());
    let own = engine.memory.inboxes[engine.rank as usize].as_ref();
    let bytes = own.map_or(0, |inbox| inbox.bytes());
    WAITING.get().bytes.fetch_add(bytes, Ordering::Relaxed);
    if done {
        let mine = Arc::as_ptr(&engine.memory);
        ENGINES.get().lock().retain(|running| running.memory.as_ptr() != mine);
    }
    let_go();
}

/// For inboxes of an engine that is not made after all.
pub(super) fn put_down(device: &dyn Device, inboxes: Vec<Arc<PeerInbox>>) {
    if device.kind() == DeviceKind::Cuda {
        device::cuda::put_down(Arc::new(inboxes));
    }
    let_go();
}

/// Lets go of what engines and graphs that ended have put down, unless a kernel may run.
pub(super) fn let_go() {
    if may_go() {
        go();
    }
}

fn may_go() -> bool {
    // A process without a GPU has nothing here, ever.
    if !device::cuda::has_released() {
        return false;
    }
    let busy = ENGINES.get().lock().iter().any(Running::may_run);
    let waiting = WAITING.get();
    let bytes = waiting.bytes.load(Ordering::Relaxed);
    if busy && bytes > MUCH && !waiting.said.swap(true, Ordering::Relaxed) {
        warning!(
            "{} MiB of communicators that have ended are kept until no kernel of another communicator can be running: one that \
             was captured into a CUDA graph keeps them until it is destroyed",
            bytes >> 20
        );
    }
    !busy
}

fn go() {
    WAITING.get().bytes.store(0, Ordering::Relaxed);
    device::cuda::drop_released();
}

/// About twice a second, from the bootstrap thread: for a process whose communicators neither begin nor end. What may
/// wait for a GPU does so on a thread of its own, since peers wait for this one.
pub fn beat() {
    if !may_go() || WAITING.get().going.swap(true, Ordering::AcqRel) {
        return;
    }
    let release = || {
        // A panic is a defect; the memory has gone or stays.
        let _ = contain(|| {
            let_go();
            Ok(())
        });
        WAITING.get().going.store(false, Ordering::Release);
    };
    if thread::spawn(c"ossicle-release", release).is_err() {
        // The next beat tries again.
        WAITING.get().going.store(false, Ordering::Release);
    }
}
