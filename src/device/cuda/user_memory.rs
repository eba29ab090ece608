//! `ncclMemAlloc` and `ncclMemFree` on a GPU.
//!
//! Memory comes from the driver's virtual memory interface, since only that can be exported to other processes and to
//! a network card by handle; where it is not there, or with `NCCL_CUMEM_ENABLE=0`, from `cuMemAlloc`. Freeing may wait
//! for the device, as `cudaFree` does, and the buffer must not be in use by work that is still running.

use super::context::RelaxedCapture;
use super::virtual_memory::{Physical, VirtualMemory};
use super::CudaDevice;
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdeviceptr, CallResult};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;

/// How one buffer is given back.
#[derive(Clone, Copy)]
struct Buffer {
    bytes: usize,
    /// At its address by `cuMemMap`, of one physical allocation whose handle was released after mapping; else made by
    /// `cuMemAlloc`.
    mapped: bool,
}

/// What `ncclMemAlloc` gave and `ncclMemFree` has not taken back, in the whole process: any device's call may free it.
static BUFFERS: Lazy<Mutex<HashMap<usize, Buffer>>> = Lazy::new(|| Mutex::new(HashMap::new()));

impl CudaDevice {
    pub(super) fn allocate_for_user(&self, bytes: usize) -> Result<*mut c_void> {
        let (address, buffer) = match &self.virtual_memory {
            Some(memory) => self.map_new(memory, bytes),
            None => {
                let bytes = bytes.max(1);
                self.device_memory(bytes)
                    .map(|address| (address, Buffer { bytes, mapped: false }))
            }
        }
        .map_err(|failure| Error::cuda(format!("ncclMemAlloc of {bytes} bytes on {}: {failure}", self.gpu)))?;
        BUFFERS.lock().insert(address as usize, buffer);
        Ok(address as usize as *mut c_void)
    }

    /// One physical allocation, mapped for this device and for every peer that can reach it.
    fn map_new(&self, memory: &VirtualMemory, bytes: usize) -> CallResult<(CUdeviceptr, Buffer)> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let physical = Physical::create(self.driver, memory, bytes)?;
        let address = physical.map(&memory.access)?;
        let bytes = physical.bytes;
        Ok((address, Buffer { bytes, mapped: true }))
    }

    pub(super) fn free_for_user(&self, pointer: *mut c_void) -> Result<()> {
        // Taken out first, so that of two calls with one pointer the second is refused.
        let Some(buffer) = BUFFERS.lock().remove(&(pointer as usize)) else {
            return Err(Error::argument(format!(
                "ncclMemFree of {pointer:p}, which ncclMemAlloc did not give or was freed"
            )));
        };
        // Before the driver may give the address to anyone else.
        let freed = pointer as usize..(pointer as usize).saturating_add(buffer.bytes);
        self.known_ranges.forget(&freed);
        super::opened().for_each(|device| device.known_ranges.forget(&freed));
        match self.release(pointer as CUdeviceptr, buffer) {
            Err(failure) if !failure.is_shutdown() => Err(Error::cuda(format!(
                "ncclMemFree of {pointer:p} on {}: {failure}",
                self.gpu
            ))),
            _ => Ok(()),
        }
    }

    fn release(&self, address: CUdeviceptr, buffer: Buffer) -> CallResult<()> {
        if buffer.mapped {
            return self.unmap(address, buffer.bytes);
        }
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        // SAFETY: an allocation of this library that was not freed before.
        unsafe { self.driver.call.cuMemFree(address) }
    }
}
