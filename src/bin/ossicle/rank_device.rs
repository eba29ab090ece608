//! One rank's device as this program sees it: its stream, and how bytes get to its memory and back.
//!
//! On CUDA each rank has a non-blocking stream of its own, so that ranks on one GPU never wait for each other through
//! the legacy stream, and copies go through that stream. The host device has one stream, NULL, on which a call returns
//! when its work is done, and its memory is ordinary memory.

use crate::nccl_calls::{Communicator, DeviceMemory};
use cudarc::driver::sys::{CUresult, CUstream_flags};
use nccl::device::DeviceKind;
use nccl::error::{Error, Result};
use nccl::sys::cuda::{driver, CUstream, Driver, Failure, Unusable};
use std::ffi::c_void;

pub(crate) enum RankDevice {
    Host,
    Cuda(Stream),
}

/// A stream of the device whose context is current on this thread.
pub(crate) struct Stream {
    driver: &'static Driver,
    stream: CUstream,
}

impl RankDevice {
    /// Makes the device with this ordinal the calling thread's current one.
    pub(crate) fn enter(kind: DeviceKind, ordinal: i32) -> Result<RankDevice> {
        match kind {
            DeviceKind::Host => Ok(RankDevice::Host),
            DeviceKind::Cuda => Stream::create(ordinal).map(RankDevice::Cuda),
        }
    }

    /// The device with this ordinal in words.
    pub(crate) fn describe(&self, ordinal: i32) -> Result<String> {
        match self {
            RankDevice::Host => Ok(format!("host device {ordinal}")),
            RankDevice::Cuda(_) => Ok(format!(
                "device {ordinal} {}",
                nccl::device::open(Some(ordinal))?.describe()
            )),
        }
    }

    /// The `cudaStream_t` for this rank's operations.
    pub(crate) fn stream(&self) -> *mut c_void {
        match self {
            RankDevice::Host => std::ptr::null_mut(),
            RankDevice::Cuda(stream) => stream.stream.cast(),
        }
    }

    /// Copies `bytes` to `offset` of the memory; done on return.
    pub(crate) fn upload(&self, memory: &DeviceMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = range(memory, offset, bytes.len());
        match self {
            // SAFETY: `range` checked the bounds; the caller's slice cannot overlap the library's allocation.
            RankDevice::Host => unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) },
            RankDevice::Cuda(stream) => {
                let from = bytes.as_ptr().cast();
                // SAFETY: as above, with device memory as the target; the slice outlives the copy, which `copied` ends.
                let begun = unsafe {
                    let call = &stream.driver.call;
                    call.cuMemcpyHtoDAsync(to as u64, from, bytes.len(), stream.stream)
                };
                stream.copied(begun)?;
            }
        }
        Ok(())
    }

    /// Copies from `offset` of the memory until `bytes` is full; done on return.
    pub(crate) fn download(&self, memory: &DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = range(memory, offset, bytes.len());
        match self {
            // SAFETY: `range` checked the bounds; the caller's slice cannot overlap the library's allocation.
            RankDevice::Host => unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) },
            RankDevice::Cuda(stream) => {
                let to = bytes.as_mut_ptr().cast();
                // SAFETY: as above, with device memory as the source; the slice outlives the copy, which `copied` ends.
                let begun = unsafe {
                    let call = &stream.driver.call;
                    call.cuMemcpyDtoHAsync(to, from as u64, bytes.len(), stream.stream)
                };
                stream.copied(begun)?;
            }
        }
        Ok(())
    }

    /// Waits until the rank's operations are done, or the communicator reports an error.
    pub(crate) fn wait(&self, comm: &Communicator) -> Result<()> {
        match self {
            RankDevice::Host => comm.asynchronous_error(),
            RankDevice::Cuda(stream) => stream.wait(|| comm.asynchronous_error()),
        }
    }
}

/// The address at `offset`; the end of the range must lie within the memory.
fn range(memory: &DeviceMemory, offset: usize, bytes: usize) -> *mut u8 {
    assert!(
        offset + bytes <= memory.bytes(),
        "{bytes} bytes at {offset} of {}",
        memory.bytes()
    );
    memory.at(offset)
}

impl Stream {
    fn create(ordinal: i32) -> Result<Stream> {
        let driver = driver().map_err(|reason| match reason {
            Unusable::Absent(text) => Error::cuda(text),
            Unusable::Refused(error) => error.clone(),
        })?;
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: every pointer is to a live local; the primary context, once retained, stays for the process's life.
        unsafe {
            driver.call.cuDeviceGet(&mut device, ordinal)?;
            driver.call.cuDevicePrimaryCtxRetain(&mut context, device)?;
            driver.call.cuCtxPushCurrent(context)?;
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            driver.call.cuStreamCreateWithPriority(&mut stream, flags, 0)?;
        }
        Ok(Stream { driver, stream })
    }

    /// Waits for a copy that was begun; None where the driver has no such function.
    fn copied(&self, begun: Option<std::result::Result<(), Failure>>) -> Result<()> {
        begun.ok_or_else(|| Error::cuda("the CUDA driver has no cuMemcpyHtoDAsync or cuMemcpyDtoHAsync"))??;
        self.wait(|| Ok(()))
    }

    /// Polls, since a kernel that waits for a lost peer never ends: `healthy` is asked between polls.
    fn wait(&self, healthy: impl Fn() -> Result<()>) -> Result<()> {
        loop {
            // SAFETY: the stream is alive as long as self.
            match unsafe { self.driver.call.cuStreamQuery(self.stream) } {
                Ok(()) => return Ok(()),
                Err(failure) if failure.is(CUresult::CUDA_ERROR_NOT_READY) => healthy()?,
                Err(failure) => return Err(failure.into()),
            }
            std::thread::yield_now();
        }
    }
}
