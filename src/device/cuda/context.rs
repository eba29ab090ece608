//! What a thread has current while the library calls the driver: the device's primary context, and a relaxed capture
//! mode. Both are put back when the guard goes, so that a caller never sees a change.

use crate::sys::cuda::{CUcontext, CallResult, Driver};
use cudarc::driver::sys::{CUctx_st, CUstreamCaptureMode};
use std::ffi::c_int;
use std::marker::PhantomData;

/// A handle of the driver: an opaque name, valid in every thread.
pub(super) struct Handle<T>(pub(super) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Handle<T> {
        *self
    }
}
impl<T> Copy for Handle<T> {}

// SAFETY: nothing here reads through a handle; the driver's functions take it from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The calling thread's current device: of its current context, else 0 as the CUDA runtime has it.
pub(super) fn current_ordinal(driver: &Driver) -> CallResult<i32> {
    if current(driver)?.is_null() {
        return Ok(0);
    }
    let mut device = 0;
    // SAFETY: writes one int; a context is current.
    unsafe { driver.call.cuCtxGetDevice(&mut device) }?;
    Ok(device)
}

fn current(driver: &Driver) -> CallResult<CUcontext> {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle, NULL where none is current.
    unsafe { driver.call.cuCtxGetCurrent(&mut context) }?;
    Ok(context)
}

/// While it lives, `context` is current in this thread. One driver call where it was current already, as it is for
/// users of the CUDA runtime.
pub(super) struct Scope<'a> {
    driver: &'a Driver,
    pushed: bool,
    /// Bound to its thread: contexts are current in one.
    _thread: PhantomData<*mut ()>,
}

impl<'a> Scope<'a> {
    pub(super) fn enter(driver: &'a Driver, context: Handle<CUctx_st>) -> CallResult<Scope<'a>> {
        let pushed = current(driver)? != context.0;
        if pushed {
            // SAFETY: the context is a primary context that is never released, or one that owns a live stream.
            unsafe { driver.call.cuCtxPushCurrent(context.0) }?;
        }
        Ok(Scope {
            driver,
            pushed,
            _thread: PhantomData,
        })
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed in this thread. A failure means that the driver is shutting down.
            let _ = unsafe { self.driver.call.cuCtxPopCurrent(&mut popped) };
        }
    }
}

/// While it lives, this thread may allocate and query though another thread captures a graph: under CUDA's default
/// capture mode such a call would fail and invalidate that capture, with which it has nothing to do.
pub(super) struct RelaxedCapture<'a> {
    driver: &'a Driver,
    previous: c_int,
    _thread: PhantomData<*mut ()>,
}

impl<'a> RelaxedCapture<'a> {
    pub(super) fn enter(driver: &'a Driver) -> CallResult<RelaxedCapture<'a>> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: reads and writes one int, this thread's mode.
        unsafe { driver.call.cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(RelaxedCapture {
            driver,
            previous: mode,
            _thread: PhantomData,
        })
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        let mut mode = self.previous;
        // SAFETY: as in `enter`, with the mode that it found. A failure means that the driver is shutting down.
        let _ = unsafe { self.driver.call.cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
}
