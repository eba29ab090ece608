//! A caller's streams: checked and put in order.
//!
//! A handle may be one of three special values: NULL and 1 are the legacy stream, 2 is the calling thread's own. The
//! driver takes them as they are. A stream that its owner destroyed must not be passed again, nor be destroyed while it
//! is the last that a communicator used and work is still to be ordered behind it: the driver keeps no record of dead
//! handles, and NCCL asks the same of its users. The per-thread stream means another stream in every thread, so a
//! communicator that uses it should be called from one thread: a later call cannot order itself behind it elsewhere.
//!
//! A stream may be under capture. What is asked here of it or done to it then waits for nothing, and an event's record
//! and wait become an edge of the graph.

use super::context::{self, Handle, RelaxedCapture, Scope};
use super::{own_stream, CudaDevice};
use crate::device::{Mark, StreamKey, LEGACY_STREAM_KEY};
use crate::error::{Error, Result};
use crate::sys::cuda::{CallResult, Failure};
use cudarc::driver::sys::{
    CUctx_st, CUevent, CUevent_flags, CUgraph, CUresult, CUstreamCaptureStatus, CUstream_flags, CUstream_st,
};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

const KNOWN_STREAMS: usize = 64;

/// Events at rest: as many as threads ever ordered two streams at the same moment, and one for each communicator that
/// was captured and is gone.
#[derive(Default)]
pub(super) struct Events {
    idle: Mutex<Vec<Mark>>,
}

impl Events {
    pub(super) fn give_back(&self, mark: Mark) {
        self.idle.lock().push(mark);
    }
}

/// Streams of the library's own at rest. Kept and never destroyed: that waits for nothing, and one may be in a capture to
/// the capture's end, which nobody tells.
#[derive(Default)]
pub(super) struct SideStreams {
    idle: Mutex<Vec<Handle<CUstream_st>>>,
}

impl SideStreams {
    pub(super) fn give_back(&self, stream: *mut c_void) {
        self.idle.lock().push(Handle(stream.cast()));
    }
}

/// As of a stream that was created without one.
const USUAL_PRIORITY: c_int = 0;

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

/// A capture under way: the driver's id of it, and the graph that it fills.
pub(super) struct Capture {
    id: u64,
    pub(super) graph: CUgraph,
}

impl CudaDevice {
    /// The capture that the stream is in. The legacy stream is in none, and answers with an error while a stream that
    /// waits for it is captured.
    pub(super) fn capture(&self, stream: *mut c_void) -> Result<Option<Capture>> {
        let (mut status, mut capture) = (
            0,
            Capture {
                id: 0,
                graph: null_mut(),
            },
        );
        // SAFETY: the caller's handle; writes two numbers and a handle, and nothing where NULL is given.
        unsafe {
            self.driver.call.cuStreamGetCaptureInfo(
                stream.cast(),
                &mut status,
                &mut capture.id,
                &mut capture.graph,
                null_mut(),
                null_mut(),
            )
        }
        .map_err(|failure| self.no_stream(stream, failure))?;
        match status {
            none if none == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int => Ok(None),
            active if active == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_int => Ok(Some(capture)),
            _ => Err(Error::usage(format!(
                "the CUDA graph capture of stream {stream:p} was made invalid by an earlier call: end it and capture again"
            ))),
        }
    }

    fn no_stream(&self, stream: *mut c_void, failure: Failure) -> Error {
        match concerns_capture(&failure) {
            true => Error::usage(format!(
                "stream {stream:p} cannot be used while a stream that takes turns with it is under CUDA graph capture: \
                 {failure}"
            )),
            false => Error::argument(format!("stream {stream:p} is not a stream of {}: {failure}", self.gpu)),
        }
    }

    /// Two driver calls for a stream that is known by its id, two more at first. Handles are used again for other
    /// streams, and capture begins at any time: so these two questions are asked at every call. Under capture the
    /// driver tells nothing of a stream but its capture, in which no handle can come to mean another stream.
    pub(super) fn stream_key(&self, stream: *mut c_void) -> Result<StreamKey> {
        let _scope = self.scope()?;
        let capture = self.capture(stream)?.map(|capture| capture.id);
        let stream = match capture {
            Some(_) => (stream as u64) << 1,
            None => self.number(stream)?,
        };
        Ok(StreamKey { stream, capture })
    }

    fn number(&self, stream: *mut c_void) -> Result<u64> {
        let handle = stream.cast::<CUstream_st>();
        let refused = |failure: Failure| self.no_stream(stream, failure);
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
        let refused = |failure: Failure| self.no_stream(stream, failure);
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

    /// The wait takes the event's state of now, so the event is free for the next use when the call returns. In a
    /// capture the two are no nodes but an edge of the graph.
    pub(super) fn order(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
        let mark = self.record(None, last)?;
        let ordered = self.wait(mark, next);
        self.events.give_back(mark);
        ordered.map_err(|error| error.within(format!("stream {next:p} cannot be ordered behind stream {last:p}")))
    }

    pub(super) fn record(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark> {
        let _scope = self.scope()?;
        let idle = || self.events.idle.lock().pop();
        let recorded = match mark.or_else(idle) {
            Some(mark) => mark,
            None => self.create_event()?,
        };
        // SAFETY: an event of this context; the stream was accepted by `stream_key`.
        if let Err(failure) = unsafe { self.driver.call.cuEventRecord(event(recorded), stream.cast()) } {
            if mark.is_none() {
                self.events.give_back(recorded);
            }
            return Err(failure.into());
        }
        Ok(recorded)
    }

    pub(super) fn wait(&self, mark: Mark, next: *mut c_void) -> Result<()> {
        let _scope = self.scope()?;
        // SAFETY: as in `record`.
        unsafe { self.driver.call.cuStreamWaitEvent(next.cast(), event(mark), 0) }?;
        Ok(())
    }

    pub(super) fn is_reached(&self, mark: Mark) -> Result<bool> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        // SAFETY: an event of this context.
        match unsafe { self.driver.call.cuEventQuery(event(mark)) } {
            Err(failure) if failure.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            answered => Ok(answered.map(|()| true)?),
        }
    }

    /// Non-blocking, so that a kernel that waits in the legacy stream does not hold it up.
    pub(super) fn side(&self) -> Result<*mut c_void> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let mut idle = self.side_streams.idle.lock();
        let free = |stream: &Handle<CUstream_st>| matches!(self.capture(stream.0.cast()), Ok(None));
        if let Some(place) = idle.iter().position(free) {
            return Ok(idle.swap_remove(place).0.cast());
        }
        let stream = own_stream::non_blocking(self.driver, USUAL_PRIORITY)
            .map_err(|failure| Error::from(failure).within(format!("a stream of the library's own on {}", self.gpu)))?;
        Ok(stream.0.cast())
    }

    fn create_event(&self) -> Result<Mark> {
        let _relaxed = RelaxedCapture::enter(self.driver)?;
        let mut event: CUevent = null_mut();
        // SAFETY: writes one handle; a context is current.
        unsafe {
            self.driver
                .call
                .cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)
        }?;
        Ok(Mark(event as usize))
    }
}

fn event(mark: Mark) -> CUevent {
    mark.0 as CUevent
}

#[cfg(test)]
mod tests {
    use crate::device::cuda::tests::{assert_refused, fake_device};
    use crate::device::Device;
    use crate::error::Code;
    use std::ffi::c_void;

    #[test]
    fn a_mark_is_asked_in_relaxed_mode_waited_for_and_used_again() {
        let (fake, device) = fake_device("marks");
        let mark = device.mark(None, 0x600 as *mut c_void).expect("a mark");
        assert_eq!(fake.get::<usize>(c"fake_recorded"), 0x600);
        assert_eq!(device.reached(mark), Ok(true));
        fake.set(c"fake_event_status", 600i32);
        assert_eq!(device.reached(mark), Ok(false));
        fake.set(c"fake_event_status", 700i32);
        assert_refused(
            device.reached(mark),
            Code::UnhandledCudaError,
            &["cuEventQuery failed: 700"],
        );
        device
            .wait_for_mark(mark, 0x601 as *mut c_void)
            .expect("the stream waits");
        assert_eq!(fake.get::<usize>(c"fake_waiting"), 0x601);
        assert_eq!(device.mark(Some(mark), 0x602 as *mut c_void), Ok(mark));
        device.unmark(mark);
        device
            .order_streams(0x600 as *mut c_void, 0x601 as *mut c_void)
            .expect("ordered");
        assert_eq!(fake.count(c"cuEventCreate"), 1);
        assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
    }
    #[test]
    fn side_streams_are_made_in_relaxed_mode_and_used_again_out_of_capture() {
        let (fake, device) = fake_device("sides");
        let beside = std::ptr::null_mut();
        let made = fake.count(c"cuStreamCreateWithPriority");
        let side = device.side_stream(beside).expect("a stream");
        device.give_side_stream_back(side);
        assert_eq!(device.side_stream(beside), Ok(side));
        assert_eq!(fake.count(c"cuStreamCreateWithPriority"), made + 1);
        device.give_side_stream_back(side);
        fake.set(c"fake_captured", side);
        let other = device.side_stream(beside).expect("another stream");
        assert_ne!(other, side, "one that is in a capture is left alone");
        fake.set(c"fake_captured", 0usize);
        assert_eq!(device.side_stream(beside), Ok(side), "the capture has ended");
        fake.set(c"fake_failing", c"cuStreamCreateWithPriority".as_ptr());
        assert_refused(
            device.side_stream(beside),
            Code::UnhandledCudaError,
            &[
                "a stream of the library's own on GPU 0",
                "cuStreamCreateWithPriority failed: 999",
            ],
        );
        assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
    }

    #[test]
    fn streams_are_ordered_by_one_event_that_is_used_again() {
        let (fake, device) = fake_device("order");
        for (last, next) in [(0x600, 0x601), (0x601, 0x602)] {
            device
                .order_streams(last as *mut c_void, next as *mut c_void)
                .expect("ordered");
            assert_eq!(fake.get::<usize>(c"fake_recorded"), last);
            assert_eq!(fake.get::<usize>(c"fake_waiting"), next);
        }
        assert_eq!(fake.count(c"cuEventCreate"), 1);
    }
}
