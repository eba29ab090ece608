//! The GPU's own stream: it zeroes memory, and tells whether the GPU still answers.
//!
//! Non-blocking, and no kernel of a rank runs in it, so it waits for none in order. It still needs a multiprocessor,
//! which spinning kernels may hold: so it is polled up to a deadline, never waited for inside the driver.

use super::context::{Handle, RelaxedCapture};
use super::CudaDevice;
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdeviceptr, CallResult, Driver, Failure};
use cudarc::driver::sys::{CUresult, CUstream_flags, CUstream_st};
use std::ffi::{c_int, c_uint};
use std::time::{Duration, Instant};

const ZEROING_TIMEOUT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_micros(50);
/// Yields before the first sleep: most zeroing is done by then.
const YIELDS: u32 = 64;

/// Of the highest priority: beside kernels that fill the GPU, the next free multiprocessor is its.
pub(super) fn create(driver: &Driver) -> CallResult<Handle<CUstream_st>> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: writes two ints.
    unsafe { driver.call.cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }?;
    non_blocking(driver, greatest)
}

/// A context is current.
pub(super) fn non_blocking(driver: &Driver, priority: c_int) -> CallResult<Handle<CUstream_st>> {
    let mut stream = std::ptr::null_mut();
    let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
    // SAFETY: writes one handle.
    unsafe { driver.call.cuStreamCreateWithPriority(&mut stream, flags, priority) }?;
    Ok(Handle(stream))
}

/// What makes every call of the process fail after `failure`, which a call without a fault of its own gave.
fn cause(failure: &Failure) -> &'static str {
    use CUresult::*;
    const OF_KERNELS: [CUresult; 9] = [
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_ASSERT,
        CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC,
        CUDA_ERROR_LAUNCH_FAILED,
    ];
    match OF_KERNELS.into_iter().any(|status| failure.is(status)) {
        true => "a kernel of this process faulted",
        false => "the GPU or its driver failed",
    }
}

impl CudaDevice {
    /// The stream is asked and not the context, since a query tells what earlier work left behind.
    pub(super) fn answers(&self) -> Result<()> {
        let asked = self.scope().and_then(|_scope| {
            let _relaxed = RelaxedCapture::enter(self.driver)?;
            self.zeroing_is_done()
        });
        asked.map(|_done| ()).map_err(|failure| {
            Error::cuda(format!(
                "the CUDA context of {} is broken: {failure}: {}, and every later CUDA call fails too; restart the process",
                self.gpu,
                cause(&failure)
            ))
        })
    }

    pub(super) fn zero(&self, address: CUdeviceptr, bytes: usize) -> Result<()> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        // Whole words, so that one kernel of the driver, loaded by `open`, does every size; a block is larger still.
        let bytes = bytes.max(1).next_multiple_of(256);
        // SAFETY: within a block that only the caller holds, since blocks are multiples of 64 KiB.
        unsafe { self.driver.call.cuMemsetD8Async(address, 0, bytes, self.zeroing.0) }?;
        self.wait_for_zeroing(bytes, ZEROING_TIMEOUT)
    }

    /// Into memory of the device that no kernel uses yet.
    pub(super) fn copy_in(&self, address: CUdeviceptr, bytes: &[u8]) -> Result<()> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        // SAFETY: the caller holds so many bytes there; `bytes` stays until the copy is done, or is staged by the driver.
        let copied = unsafe {
            let from = bytes.as_ptr().cast();
            self.driver
                .call
                .cuMemcpyHtoDAsync(address, from, bytes.len(), self.zeroing.0)
        };
        copied.ok_or_else(|| Error::cuda("the CUDA driver has no cuMemcpyHtoDAsync"))??;
        self.wait_for_zeroing(bytes.len(), ZEROING_TIMEOUT)
    }

    /// The scope is entered and capture relaxed.
    pub(super) fn wait_for_zeroing(&self, bytes: usize, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        let mut polls = 0;
        while !self.zeroing_is_done()? {
            if begun.elapsed() >= timeout {
                return Err(Error::cuda(format!(
                    "GPU {} did not zero {bytes} bytes within {} s: kernels that wait for ranks fill it; let them end \
                     before a communicator is made",
                    self.ordinal,
                    timeout.as_secs()
                )));
            }
            if polls < YIELDS {
                polls += 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn zeroing_is_done(&self) -> CallResult<bool> {
        // SAFETY: the device's own stream, in its context.
        match unsafe { self.driver.call.cuStreamQuery(self.zeroing.0) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}
