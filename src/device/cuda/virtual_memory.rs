//! The driver's virtual memory interface (VMM): physical memory by handle, mapped at addresses of this process.
//!
//! A handle is released as soon as its memory is mapped: the mapping keeps the memory, and so do descriptors of it and
//! mappings of other processes, until the last of them goes. Setting access and unmapping may wait for running kernels,
//! as the driver's documentation has it ("synchronous behavior for most use cases").

use super::{can_access, CudaDevice};
use crate::sys::cuda::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};
use crate::sys::cuda::{CallResult, Driver};
use cudarc::driver::sys as types;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// How memory of one device is made for other processes and for network cards.
pub(super) struct VirtualMemory {
    properties: CUmemAllocationProp,
    /// For this device and for every other one of the process that can reach it.
    pub(super) access: Vec<CUmemAccessDesc>,
}

// SAFETY: properties and access descriptions are plain data; their one pointer is for another system and NULL.
unsafe impl Send for VirtualMemory {}
// SAFETY: as above.
unsafe impl Sync for VirtualMemory {}

const POSIX_DESCRIPTOR: types::CUmemAllocationHandleType =
    types::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl VirtualMemory {
    /// None where the interface is not there, or switched off.
    pub(super) fn of_device(driver: &Driver, ordinal: i32, device_count: i32) -> CallResult<Option<VirtualMemory>> {
        use types::CUdevice_attribute as Attribute;
        let has = |attribute: Attribute| super::attribute(driver, ordinal, attribute).map(|value| value != 0);
        let enabled = crate::environment::switch("NCCL_CUMEM_ENABLE", true)
            && has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?
            && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        if !enabled {
            return Ok(None);
        }
        let rdma = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let mut access = Vec::new();
        for peer in 0..device_count {
            if peer == ordinal || can_access(driver, peer, ordinal)? {
                access.push(access_of(peer));
            }
        }
        Ok(Some(VirtualMemory {
            properties: properties(ordinal, rdma),
            access,
        }))
    }
}

/// Reading and writing by one device's kernels.
pub(super) fn access_of(ordinal: i32) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: location(ordinal),
        flags: types::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

/// Whether kernels of a device may read and write what is mapped at an address; false where that cannot be told.
pub(super) fn has_access(driver: &Driver, ordinal: i32, address: usize) -> bool {
    let (mut flags, location) = (0, location(ordinal));
    // SAFETY: a complete location; writes one word; the address is looked up, never read through.
    let told = unsafe {
        driver
            .call
            .cuMemGetAccess(&mut flags, &location, address as CUdeviceptr)
    };
    told.is_ok() && flags == types::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u64
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
        requestedHandleTypes: POSIX_DESCRIPTOR,
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

/// One handle to physical memory, which is not mapped by being there.
pub(super) struct Physical<'a> {
    driver: &'a Driver,
    handle: CUmemGenericAllocationHandle,
    pub(super) bytes: usize,
    /// Of its addresses; 0 leaves it to the driver.
    alignment: usize,
}

impl<'a> Physical<'a> {
    /// New memory of at least `bytes`.
    pub(super) fn create(driver: &'a Driver, memory: &VirtualMemory, bytes: usize) -> CallResult<Physical<'a>> {
        let call = &driver.call;
        let mut granularity = 0;
        let option = types::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_int;
        // SAFETY: complete properties; writes one size.
        unsafe { call.cuMemGetAllocationGranularity(&mut granularity, &memory.properties, option) }?;
        // A size past the address space stays as it is: the driver refuses it.
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(granularity.max(1))
            .unwrap_or(bytes);
        let mut handle = 0;
        // SAFETY: complete properties; writes one handle.
        unsafe { call.cuMemCreate(&mut handle, bytes, &memory.properties, 0) }?;
        Ok(Physical {
            driver,
            handle,
            bytes,
            alignment: granularity,
        })
    }

    /// Memory of `bytes` that a process exported as `fd`.
    pub(super) fn import(driver: &'a Driver, fd: &impl AsFd, bytes: usize) -> CallResult<Physical<'a>> {
        let mut handle = 0;
        let shareable = fd.as_fd().as_raw_fd() as usize as *mut c_void;
        // SAFETY: a descriptor travels as the pointer's value; writes one handle.
        unsafe {
            driver
                .call
                .cuMemImportFromShareableHandle(&mut handle, shareable, POSIX_DESCRIPTOR.0 as c_int)
        }?;
        Ok(Physical {
            driver,
            handle,
            bytes,
            alignment: 0,
        })
    }

    pub(super) fn export(&self) -> CallResult<OwnedFd> {
        let mut fd: c_int = -1;
        // SAFETY: a live handle whose properties ask for this type; writes one int.
        unsafe {
            self.driver.call.cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                self.handle,
                POSIX_DESCRIPTOR.0 as c_int,
                0,
            )
        }?;
        // SAFETY: a new descriptor, which nobody else has.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // It fails for no open descriptor; without it a child that is executed would keep the memory.
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        Ok(fd)
    }

    /// At an address of its own, for the devices that `access` names.
    pub(super) fn map(&self, access: &[CUmemAccessDesc]) -> CallResult<CUdeviceptr> {
        let (call, bytes) = (&self.driver.call, self.bytes);
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { call.cuMemAddressReserve(&mut address, bytes, self.alignment, 0, 0) }?;
        // SAFETY: a range that was just reserved and memory of its size.
        let mapped = unsafe { call.cuMemMap(address, bytes, 0, self.handle, 0) }.and_then(|()| {
            // SAFETY: the range is mapped; `access` holds as many descriptions as it says.
            unsafe { call.cuMemSetAccess(address, bytes, access.as_ptr(), access.len()) }.inspect_err(|_| {
                // SAFETY: mapped above and known to nobody yet.
                let _ = unsafe { call.cuMemUnmap(address, bytes) };
            })
        });
        mapped.map(|()| address).inspect_err(|_| {
            // SAFETY: reserved above, with nothing mapped in it.
            let _ = unsafe { call.cuMemAddressFree(address, bytes) };
        })
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        // SAFETY: this object's own handle, used for the last time. A failure means that the driver is shutting down.
        let _ = unsafe { self.driver.call.cuMemRelease(self.handle) };
    }
}

impl CudaDevice {
    /// Undoes `Physical::map` of that many bytes.
    pub(super) fn unmap(&self, address: CUdeviceptr, bytes: usize) -> CallResult<()> {
        let _guards = (self.scope()?, super::context::RelaxedCapture::enter(self.driver)?);
        let call = &self.driver.call;
        // SAFETY: a whole mapping of this library, then its range, which nothing is mapped in any more.
        unsafe {
            call.cuMemUnmap(address, bytes)
                .and_then(|()| call.cuMemAddressFree(address, bytes))
        }
    }
}
