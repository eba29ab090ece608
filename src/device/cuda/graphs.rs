//! What a captured graph needs is kept for as long as the graph can run.
//!
//! A user object of the driver holds a reference for the graph, for every clone and for every executable one, also while
//! one that was destroyed still runs. Its destructor comes on a thread of the driver in which no driver call is allowed,
//! and what is kept may make some when it goes (shared memory is unmapped and unregistered). So the destructor only puts
//! it down, as an engine that ends does, and it goes when no kernel can be running (`launch::running`).

use super::context::RelaxedCapture;
use super::CudaDevice;
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use cudarc::driver::sys::{CUuserObject, CUuserObjectRetain_flags, CUuserObject_flags};
use parking_lot::Mutex;
use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::panic::catch_unwind;
use std::sync::Arc;

type Kept = Arc<dyn Any + Send + Sync>;

/// What graphs that are gone have kept, and engines. What a parent put down is not its forked child's to drop.
static RELEASED: ProcessLocal<Mutex<Vec<Kept>>> = ProcessLocal::new();

/// For `drop_released`.
pub fn put_down(kept: Kept) {
    RELEASED.get().lock().push(kept);
}

/// Whether anything was put down that is still there.
pub fn has_released() -> bool {
    !RELEASED.get().lock().is_empty()
}

/// Drops what was put down. The lock is free by then: dropping calls the driver, whose own lock the
/// caller of `release` may hold.
pub fn drop_released() {
    let released = std::mem::take(&mut *RELEASED.get().lock());
    drop(released);
}

// SAFETY: the driver calls it, once, with what `keep` gave to it.
unsafe extern "C" fn release(kept: *mut c_void) {
    // No panic may reach the driver.
    let _ = catch_unwind(|| {
        // SAFETY: as above: a box that nobody else owns any more.
        let kept = unsafe { Box::from_raw(kept.cast::<Kept>()) };
        put_down(*kept);
    });
}

impl CudaDevice {
    pub(super) fn keep(&self, stream: *mut c_void, kept: Kept) -> Result<()> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let graph = self
            .capture(stream)?
            .ok_or_else(|| {
                Error::usage(format!(
                    "the CUDA graph capture of stream {stream:p} has ended during the call"
                ))
            })?
            .graph;
        let call = &self.driver.call;
        let kept = Box::into_raw(Box::new(kept)).cast::<c_void>();
        let mut object: CUuserObject = std::ptr::null_mut();
        let flags = CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: writes one handle; `release` takes what `kept` is.
        if let Err(failure) = unsafe { call.cuUserObjectCreate(&mut object, kept, Some(release), 1, flags) } {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(kept.cast::<Kept>()) });
            return Err(failure.into());
        }
        let moved = CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: the graph of a capture under way, and the object with its one reference.
        unsafe { call.cuGraphRetainUserObject(graph, object, 1, moved) }.map_err(|failure| {
            // SAFETY: the reference is still this call's; the destructor runs.
            let _ = unsafe { call.cuUserObjectRelease(object, 1) };
            failure.into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{drop_released, put_down};
    use crate::device::cuda::tests::{assert_refused, fake_device};
    use crate::device::Device;
    use crate::error::Code;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;

    #[test]
    fn a_forked_child_drops_nothing_of_its_parents() {
        struct Unmaps;
        impl Drop for Unmaps {
            fn drop(&mut self) {
                DROPPED.store(true, Ordering::SeqCst);
            }
        }
        static DROPPED: AtomicBool = AtomicBool::new(false);
        put_down(Arc::new(Unmaps));
        // Another test may have it dropped at any moment, also before the fork: then the child has nothing to drop.
        // SAFETY: the child drops what was put down, which is nothing, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let earlier = DROPPED.load(Ordering::SeqCst);
            drop_released();
            let dropped = DROPPED.load(Ordering::SeqCst) && !earlier;
            // SAFETY: ends the child without running anything of its parent's.
            unsafe { libc::_exit(i32::from(dropped)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above and writes its status to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn what_a_graph_keeps_is_put_down_when_it_goes_and_dropped_later() {
        let (fake, device) = fake_device("graphs");
        let kept: Arc<()> = Arc::default();
        let keep = |stream: usize| device.keep_for_graph(stream as *mut c_void, kept.clone() as _);
        assert_refused(keep(0x600), Code::InvalidUsage, &["0x600 has ended"]);
        fake.set(c"fake_fail_create", 1i32);
        assert_refused(
            keep(0x50C),
            Code::UnhandledCudaError,
            &["cuUserObjectCreate failed: 999"],
        );
        assert_eq!(Arc::strong_count(&kept), 1, "a refused object keeps nothing");
        fake.set(c"fake_fail_create", 0i32);
        keep(0x50C).expect("kept");
        assert_eq!(Arc::strong_count(&kept), 2);
        fake.ask(c"fake_end_graph");
        // Not at once: what engines of other tests put down must stay while those say so.
        for _ in 0..10_000 {
            crate::launch::beat();
            if Arc::strong_count(&kept) == 1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(Arc::strong_count(&kept), 1);
        fake.set(c"fake_fail_retain", 1i32);
        assert_refused(
            keep(0x50C),
            Code::UnhandledCudaError,
            &["cuGraphRetainUserObject failed: 999"],
        );
        assert_eq!(
            fake.count(c"cuUserObjectRelease"),
            1,
            "the object goes, with what it keeps"
        );
        assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
    }
}
