//! `ncclMemAlloc` and `ncclMemFree` on a GPU.
//!
//! Memory comes from the driver's virtual memory interface, since only that can be exported to other processes and to
//! a network card by handle; where it is not there, or with `NCCL_CUMEM_ENABLE=0`, from `cuMemAlloc`. Freeing may wait
//! for the device, as `cudaFree` does, and the buffer must not be in use by work that is still running.

use super::{can_access, CudaDevice};
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CallResult, Driver};
use cudarc::driver::sys as types;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};

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

/// How this device's `ncclMemAlloc` memory is made.
pub(super) struct UserMemory {
    /// None: the virtual memory interface is not there, or switched off.
    properties: Option<CUmemAllocationProp>,
    access: Vec<CUmemAccessDesc>,
}

// SAFETY: properties and access descriptions are plain data; their one pointer is for another system and NULL.
unsafe impl Send for UserMemory {}
// SAFETY: as above.
unsafe impl Sync for UserMemory {}

impl UserMemory {
    pub(super) fn of_device(driver: &Driver, ordinal: i32, device_count: i32) -> CallResult<UserMemory> {
        use types::CUdevice_attribute as Attribute;
        let has = |attribute: Attribute| super::attribute(driver, ordinal, attribute).map(|value| value != 0);
        let enabled = crate::environment::switch("NCCL_CUMEM_ENABLE", true)
            && has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?
            && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        if !enabled {
            return Ok(UserMemory {
                properties: None,
                access: Vec::new(),
            });
        }
        let rdma = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let mut access = Vec::new();
        for peer in 0..device_count {
            if peer == ordinal || can_access(driver, peer, ordinal)? {
                access.push(CUmemAccessDesc {
                    location: location(peer),
                    flags: types::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                });
            }
        }
        Ok(UserMemory {
            properties: Some(properties(ordinal, rdma)),
            access,
        })
    }
}

fn location(ordinal: i32) -> types::CUmemLocation {
    types::CUmemLocation {
        type_: types::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal,
    }
}

fn properties(ordinal: i32, rdma: bool) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: types::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: types::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: types::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

impl CudaDevice {
    pub(super) fn allocate_for_user(&self, bytes: usize) -> Result<*mut c_void> {
        let (address, buffer) = match &self.user_memory.properties {
            Some(properties) => self.map_new(properties, bytes),
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
    fn map_new(&self, properties: &CUmemAllocationProp, bytes: usize) -> CallResult<(CUdeviceptr, Buffer)> {
        let _guards = (self.scope()?, super::context::RelaxedCapture::enter(self.driver)?);
        let call = &self.driver.call;
        let mut granularity = 0;
        let option = types::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_int;
        // SAFETY: complete properties; writes one size.
        unsafe { call.cuMemGetAllocationGranularity(&mut granularity, properties, option) }?;
        // A size past the address space stays as it is: the driver refuses it.
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(granularity.max(1))
            .unwrap_or(bytes);
        let mut handle = 0;
        // SAFETY: complete properties; writes one handle.
        unsafe { call.cuMemCreate(&mut handle, bytes, properties, 0) }?;
        let mut address = 0;
        // SAFETY: writes one address; alignment 0 is the granularity's.
        let mapped = unsafe { call.cuMemAddressReserve(&mut address, bytes, granularity, 0, 0) }.and_then(|()| {
            // SAFETY: a range that was just reserved and memory of its size.
            let mapped = unsafe { call.cuMemMap(address, bytes, 0, handle, 0) }.and_then(|()| {
                // SAFETY: the range is mapped; `access` holds as many descriptions as it says.
                unsafe {
                    call.cuMemSetAccess(
                        address,
                        bytes,
                        self.user_memory.access.as_ptr(),
                        self.user_memory.access.len(),
                    )
                }
                .inspect_err(|_| {
                    // SAFETY: mapped above and known to nobody yet.
                    let _ = unsafe { call.cuMemUnmap(address, bytes) };
                })
            });
            mapped.inspect_err(|_| {
                // SAFETY: reserved above, with nothing mapped in it.
                let _ = unsafe { call.cuMemAddressFree(address, bytes) };
            })
        });
        // The mapping keeps the memory: without the handle it goes when it is unmapped.
        // SAFETY: the handle that cuMemCreate gave, used for the last time.
        unsafe { call.cuMemRelease(handle) }?;
        mapped.map(|()| (address, Buffer { bytes, mapped: true }))
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
        let _guards = (self.scope()?, super::context::RelaxedCapture::enter(self.driver)?);
        let call = &self.driver.call;
        match buffer.mapped {
            // SAFETY: an allocation of this library that was not freed before.
            false => unsafe { call.cuMemFree(address) },
            // SAFETY: a whole mapping of this library, then its range, which nothing is mapped in any more.
            true => unsafe {
                call.cuMemUnmap(address, buffer.bytes)
                    .and_then(|()| call.cuMemAddressFree(address, buffer.bytes))
            },
        }
    }
}
