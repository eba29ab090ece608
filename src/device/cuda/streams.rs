//! A caller's streams: checked and put in order.
//!
//! A handle may be one of three special values: NULL and 1 are the legacy stream, 2 is the calling thread's own. The
//! driver takes them as they are. A stream that its owner destroyed must not be passed again, nor be destroyed while it
//! is the last that a communicator used and work is still to be ordered behind it: the driver keeps no record of dead
//! handles, and NCCL asks the same of its users. The per-thread stream means another stream in every thread, so a
//! communicator that uses it should be called from one thread: a later call cannot order itself behind it elsewhere.

use super::context::{self, Handle, Scope};
use super::CudaDevice;
use crate::device::LEGACY_STREAM_KEY;
use crate::error::{Error, Result};
use crate::sys::cuda::{CallResult, Failure};
use cudarc::driver::sys::{CUctx_st, CUevent_flags, CUevent_st, CUresult, CUstream_flags, CUstream_st};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

const KNOWN_STREAMS: usize = 64;

/// Events at rest, one for each thread that ever ordered two streams at the same moment.
#[derive(Default)]
pub(super) struct Events {
    idle: Mutex<Vec<Handle<CUevent_st>>>,
}

/// Keys of streams that were found to be this GPU's, by their ids: a direct-mapped table, read and written without a
/// lock. An id names one stream for the life of the process, unlike a handle, so an entry stays true.
pub(super) struct KnownStreams {
    keys: [AtomicU64; KNOWN_STREAMS],
}

impl Default for KnownStreams {
    fn default() -> KnownStreams {
        KnownStreams {
            // No id is as large as the legacy stream's key says, so that it stands for an empty entry.
            keys: [const { AtomicU64::new(LEGACY_STREAM_KEY) }; KNOWN_STREAMS],
        }
    }
}

impl KnownStreams {
    fn key(&self, id: u64) -> Option<u64> {
        let key = self.entry(id).load(Ordering::Relaxed);
        (key >> 1 == id).then_some(key)
    }

    fn remember(&self, id: u64, blocking: bool) -> u64 {
        let key = id << 1 | u64::from(blocking);
        self.entry(id).store(key, Ordering::Relaxed);
        key
    }

    fn entry(&self, id: u64) -> &AtomicU64 {
        &self.keys[id as usize % KNOWN_STREAMS]
    }
}

fn is_legacy(stream: *mut c_void) -> bool {
    matches!(stream as usize, 0 | 1)
}

fn is_per_thread(stream: *mut c_void) -> bool {
    stream as usize == 2
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
    /// Two driver calls for a stream that is known by its id, two more at first. Handles are used again for other
    /// streams, and capture begins at any time: so these two questions are asked at every call.
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
            return Ok(LEGACY_STREAM_KEY);
        }
        let mut id = 0;
        // SAFETY: as above; the context that the per-thread stream belongs to is current.
        unsafe { self.driver.call.cuStreamGetId(handle, &mut id) }.map_err(refused)?;
        if let Some(key) = self.known_streams.key(id) {
            return Ok(key);
        }
        if is_per_thread(stream) {
            return Ok(self.known_streams.remember(id, true));
        }
        self.check_stream_device(stream)?;
        let mut flags = 0;
        // SAFETY: as above; writes one int.
        unsafe { self.driver.call.cuStreamGetFlags(handle, &mut flags) }.map_err(refused)?;
        let blocking = flags & CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint == 0;
        Ok(self.known_streams.remember(id, blocking))
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
}
