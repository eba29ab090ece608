//! Which engines of this process may have a kernel on a GPU.
//!
//! Unmapping memory that was imported, and unregistering host memory, may wait for everything that runs on the GPU. A
//! kernel of another communicator there may spin until the very thread that unmaps goes on: one thread that aborts two
//! communicators would hang in the first abort. So what an engine's kernels used is put down at its end, and let go of
//! when no engine has a kernel under way: at once as a rule, else at the next end or beginning of an engine. Replays of
//! graphs are not seen; to wait for them before a communicator ends is the caller's duty.

use super::order::StreamOrder;
use super::{Engine, KernelMemory, Stop};
use crate::device::{self, Device, DeviceKind};
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// One rank's kernels, as the rest of the process sees them.
pub(super) struct Running {
    pub(super) rank: u32,
    device: Arc<dyn Device>,
    memory: Weak<KernelMemory>,
    launched: Arc<AtomicU64>,
    order: Arc<Mutex<StreamOrder>>,
}

static ENGINES: ProcessLocal<Mutex<Vec<Arc<Running>>>> = ProcessLocal::new();

impl Running {
    pub(super) fn of(engine: &Engine) -> Arc<Running> {
        Arc::new(Running {
            rank: engine.rank,
            device: engine.device.clone(),
            memory: Arc::downgrade(&engine.memory),
            launched: engine.launched.clone(),
            order: engine.order.clone(),
        })
    }

    pub(super) fn is_of(&self, engine: &Engine) -> bool {
        self.memory.as_ptr() == Arc::as_ptr(&engine.memory)
    }

    pub(super) fn raise(&self, stop: Stop) {
        if let Some(memory) = self.memory.upgrade() {
            memory.control().stop.fetch_max(stop as u32, Ordering::SeqCst);
        }
    }

    /// Whether an eager kernel that was told to stop may still use what a peer lent it.
    pub(super) fn may_borrow(&self) -> bool {
        let parked = |memory: Arc<KernelMemory>| memory.control().parked.load(Ordering::Acquire) != 0;
        !self.memory.upgrade().is_none_or(parked) && self.may_run()
    }

    fn may_run(&self) -> bool {
        let Some(memory) = self.memory.upgrade() else {
            return false;
        };
        let order = self.order.try_lock();
        let pending = order.as_ref().is_some_and(|order| order.is_launching());
        match order.map(|order| order.mark()) {
            // It is being launched from.
            None => true,
            Some(_) if pending => true,
            // A device that fails has no kernel that anything could wait for.
            Some(Some(mark)) => !self.device.reached(mark).unwrap_or(true),
            Some(None) => memory.control().left.load(Ordering::Acquire) < self.launched.load(Ordering::Acquire),
        }
    }
}

pub(super) fn enter(engine: &Engine) {
    let running = Running::of(engine);
    engine.clique.members.lock().push(running.clone());
    if engine.device.kind() == DeviceKind::Cuda {
        ENGINES.get().lock().push(running);
    }
}

/// At the end of an engine; `done`: its kernels have left.
pub(super) fn leave(engine: &Engine, done: bool) {
    engine.clique.members.lock().retain(|member| !member.is_of(engine));
    if engine.device.kind() != DeviceKind::Cuda {
        return;
    }
    // Before it is off the list, so that there is no moment at which it could go while others run.
    device::cuda::put_down(engine.memory.clone());
    if done {
        ENGINES.get().lock().retain(|running| !running.is_of(engine));
    }
    let_go();
}

/// Lets go of what engines and graphs that ended have put down, unless a kernel may run.
pub(super) fn let_go() {
    let busy = ENGINES.get().lock().iter().any(|running| running.may_run());
    if !busy {
        device::cuda::drop_released();
    }
}
