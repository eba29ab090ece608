//! A caller's streams: checked, put in order, waited for.
//!
//! A handle may be one of three special values: NULL and 1 are the legacy stream, 2 is the calling thread's own. The
//! driver takes them as they are. A stream that its owner destroyed must not be passed again, nor be destroyed while it
//! is the last that a communicator used and work is still to be ordered behind it: the driver keeps no record of dead
//! handles, and NCCL asks the same of its users. The per-thread stream means another stream in every thread, so a
//! communicator that uses it should be called from one thread: a later call cannot order itself behind it elsewhere.

use super::context::{self, Handle, RelaxedCapture, Scope};
use super::CudaDevice;
use crate::error::{Error, Result};
use crate::sys::cuda::{CallResult, Failure};
use cudarc::driver::sys::{CUctx_st, CUevent_flags, CUevent_st, CUresult, CUstream_st};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

/// The key of the legacy stream; the driver counts ids up from small numbers.
const LEGACY_KEY: u64 = u64::MAX;

const LONGEST_PAUSE: Duration = Duration::from_micros(50);
/// Yields before the first sleep: a collective is mostly done by then.
const YIELDS: u32 = 64;

/// Events at rest, one for each thread that ever ordered two streams at the same moment.
#[derive(Default)]
pub(super) struct Events {
    idle: Mutex<Vec<Handle<CUevent_st>>>,
}

fn is_legacy(stream: *mut c_void) -> bool {
    matches!(stream as usize, 0 | 1)
}

fn is_special(stream: *mut c_void) -> bool {
    matches!(stream as usize, 0..=2)
}

/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: among them what the legacy stream
/// answers while another stream of the context is under capture.
fn concerns_capture(failure: &Failure) -> bool {
    let (first, last) = (
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as c_int,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as c_int,
    );
    (first..=last).contains(&failure.status)
}

fn under_capture(stream: *mut c_void) -> Error {
    Error::usage(format!(
        "stream {stream:p} is under CUDA graph capture, which is not built yet: call the collective outside of capture"
    ))
}

impl CudaDevice {
    /// Three driver calls for an ordinary stream. Nothing is cached: handles are reused, and capture begins any time.
    pub(super) fn stream_key(&self, stream: *mut c_void) -> Result<u64> {
        let _scope = self.scope()?;
        let handle = stream.cast::<CUstream_st>();
        let refused = |failure: Failure| match concerns_capture(&failure) {
            true => under_capture(stream),
            false => Error::argument(format!("stream {stream:p} is not a stream of {}: {failure}", self.gpu)),
        };
        let mut capturing = 0;
        // SAFETY: the caller's handle; writes one int.
        unsafe { self.driver.call.cuStreamIsCapturing(handle, &mut capturing) }.map_err(refused)?;
        if capturing != 0 {
            return Err(under_capture(stream));
        }
        if is_legacy(stream) {
            return Ok(LEGACY_KEY);
        }
        if !is_special(stream) {
            self.check_stream_device(stream)?;
        }
        let mut id = 0;
        // SAFETY: as above; the context that the per-thread stream belongs to is current.
        unsafe { self.driver.call.cuStreamGetId(handle, &mut id) }.map_err(refused)?;
        Ok(id)
    }

    /// A stream of this GPU but of another context than the primary one passes: a green context's stream takes the
    /// primary context's kernels, and any other the driver refuses at launch.
    fn check_stream_device(&self, stream: *mut c_void) -> Result<()> {
        let refused =
            |failure: Failure| Error::argument(format!("stream {stream:p} is not a stream of {}: {failure}", self.gpu));
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's handle, which the driver accepted before; writes one handle.
        unsafe { self.driver.call.cuStreamGetCtx(stream.cast(), &mut context) }.map_err(refused)?;
        if context == self.context.0 {
            return Ok(());
        }
        let ordinal = self.ordinal_of(stream, Handle(context)).map_err(refused)?;
        match ordinal == self.ordinal {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "stream {stream:p} belongs to GPU {ordinal}, but the communicator's device is {}",
                self.gpu
            ))),
        }
    }

    /// The GPU of a stream and of its context.
    fn ordinal_of(&self, stream: *mut c_void, context: Handle<CUctx_st>) -> CallResult<i32> {
        let mut ordinal = 0;
        // SAFETY: as above; writes one int.
        match unsafe { self.driver.call.cuStreamGetDevice(stream.cast(), &mut ordinal) } {
            Some(told) => told.map(|()| ordinal),
            None => {
                let _scope = Scope::enter(self.driver, context)?;
                context::current_ordinal(self.driver)
            }
        }
    }

    /// The wait takes the event's state of now, so the event is free for the next use when the call returns.
    pub(super) fn order(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
        let _scope = self.scope()?;
        let idle = self.events.idle.lock().pop();
        let event = match idle {
            Some(event) => event,
            None => self.create_event()?,
        };
        // SAFETY: an event of this context; both streams were accepted by `stream_key`.
        let ordered = unsafe { self.driver.call.cuEventRecord(event.0, last.cast()) }
            // SAFETY: as above.
            .and_then(|()| unsafe { self.driver.call.cuStreamWaitEvent(next.cast(), event.0, 0) });
        self.events.idle.lock().push(event);
        ordered.map_err(|failure| {
            Error::from(failure).within(format!("stream {next:p} cannot be ordered behind stream {last:p}"))
        })
    }

    fn create_event(&self) -> Result<Handle<CUevent_st>> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        unsafe {
            self.driver
                .call
                .cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)
        }?;
        Ok(Handle(event))
    }

    /// Polls: a blocking wait could not be given up.
    pub(super) fn synchronize(&self, stream: *mut c_void, give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        let _scope = self.scope()?;
        let _relaxed = RelaxedCapture::enter(self.driver)?;
        let mut polls = 0u32;
        loop {
            // SAFETY: the caller's handle, accepted by `stream_key`.
            match unsafe { self.driver.call.cuStreamQuery(stream.cast()) } {
                Ok(()) => return Ok(()),
                Err(failure) if failure.is(CUresult::CUDA_ERROR_NOT_READY) => {}
                Err(failure) if concerns_capture(&failure) => return Err(under_capture(stream)),
                Err(failure) => return Err(Error::from(failure).within(format!("waiting for stream {stream:p}"))),
            }
            if let Some(error) = give_up() {
                return Err(error);
            }
            polls = polls.saturating_add(1);
            if polls <= YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(LONGEST_PAUSE);
            }
        }
    }
}
