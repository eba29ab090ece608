//! Which engines of this process may have a kernel on a GPU.
//!
//! Unmapping memory that was imported, and unregistering host memory, may wait for everything that runs on the GPU. A
//! kernel of another communicator there may spin until the very thread that unmaps goes on: one thread that aborts two
//! communicators would hang in the first abort. So what an engine's kernels used is put down at its end, and let go of
//! when no engine has a kernel under way: at once as a rule, else at the next end or beginning of an engine. Replays of
//! graphs are not seen; to wait for them before a communicator ends is the caller's duty.

use super::order::StreamOrder;
use super::{Engine, KernelMemory};
use crate::device::{self, Device, DeviceKind};
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

struct Running {
    device: Arc<dyn Device>,
    memory: Weak<KernelMemory>,
    launched: Arc<AtomicU64>,
    order: Arc<Mutex<StreamOrder>>,
}

static ENGINES: ProcessLocal<Mutex<Vec<Running>>> = ProcessLocal::new();

impl Running {
    fn may_run(&self) -> bool {
        let Some(memory) = self.memory.upgrade() else {
            return false;
        };
        match self.order.try_lock().map(|order| order.mark()) {
            // It is being launched from.
            None => true,
            // A device that fails has no kernel that anything could wait for.
            Some(Some(mark)) => !self.device.reached(mark).unwrap_or(true),
            Some(None) => memory.control().left.load(Ordering::Acquire) < self.launched.load(Ordering::Acquire),
        }
    }
}

pub(super) fn enter(engine: &Engine) {
    if engine.device.kind() == DeviceKind::Cuda {
        ENGINES.get().lock().push(Running {
            device: engine.device.clone(),
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
    if done {
        let mine = Arc::as_ptr(&engine.memory);
        ENGINES.get().lock().retain(|running| running.memory.as_ptr() != mine);
    }
    let_go();
}

/// Lets go of what engines and graphs that ended have put down, unless a kernel may run.
pub(super) fn let_go() {
    let busy = ENGINES.get().lock().iter().any(Running::may_run);
    if !busy {
        device::cuda::drop_released();
    }
}
