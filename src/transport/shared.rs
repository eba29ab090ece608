//! Host memory shared between the processes of one host.
//!
//! A memfd has no name, so nothing is left behind whenever a process dies, and the size of /dev/shm does not matter.
//! Peers get its descriptor (`descriptors`).

use crate::bootstrap::Descriptor;
use crate::device::Device;
use crate::error::{Error, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A mapped segment that the device's kernels can reach.
pub(super) struct Segment {
    mapping: *mut u8,
    bytes: usize,
    /// Where kernels see it; NULL until it is registered.
    kernel_address: *mut u8,
    device: Arc<dyn Device>,
}

// SAFETY: Segment owns its mapping; the addresses are plain data.
unsafe impl Send for Segment {}
// SAFETY: as above; access through the address is unsafe and argued where it happens.
unsafe impl Sync for Segment {}

impl Segment {
    /// A zeroed segment of this rank, and the descriptor that peers open it by.
    pub(super) fn create(device: Arc<dyn Device>, bytes: usize) -> Result<(Segment, Descriptor)> {
        let failed = |what: &str, error: rustix::io::Errno| {
            Error::system(format!("cannot {what} {bytes} bytes of shared memory: {error}"))
        };
        let fd = rustix::fs::memfd_create("ossicle-inbox", MemfdFlags::CLOEXEC)
            .and_then(Descriptor::new)
            .map_err(|e| failed("create", e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| failed("size", e))?;
        Ok((Segment::map(device, fd.as_fd(), bytes)?, fd))
    }

    /// A peer's segment.
    pub(super) fn open(device: Arc<dyn Device>, fd: BorrowedFd, expected_bytes: usize) -> Result<Segment> {
        let size = rustix::fs::fstat(fd).map(|status| status.st_size);
        // Reading beyond the end of a shorter file would kill the process.
        match size {
            Ok(bytes) if bytes == expected_bytes as i64 => Segment::map(device, fd, expected_bytes),
            Ok(bytes) => Err(Error::internal(format!(
                "a peer's shared memory has {bytes} bytes instead of {expected_bytes}"
            ))),
            Err(error) => Err(Error::system(format!(
                "a peer's shared memory is out of reach: {error}"
            ))),
        }
    }

    fn map(device: Arc<dyn Device>, fd: BorrowedFd, bytes: usize) -> Result<Segment> {
        // SAFETY: a new mapping at an address of the kernel's choice; the file has so many bytes.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let mapping = mapped
            .map_err(|error| Error::system(format!("cannot map {bytes} bytes of shared memory: {error}")))?
            .cast::<u8>();
        let mut segment = Segment {
            mapping,
            bytes,
            kernel_address: std::ptr::null_mut(),
            device,
        };
        segment.kernel_address = segment.device.register(mapping, bytes)?;
        Ok(segment)
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Where this process sees it.
    pub(super) fn address(&self) -> *mut u8 {
        self.mapping
    }

    pub(super) fn kernel_address(&self) -> *mut u8 {
        self.kernel_address
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if !self.kernel_address.is_null() {
            self.device.unregister(self.mapping);
        }
        // SAFETY: this object's own mapping; the engine that drops it has no kernel running (Engine::drop).
        let _ = unsafe { rustix::mm::munmap(self.mapping.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_shared_by_its_descriptor_and_outlives_it() {
        let device = crate::device::host::open(0);
        let (mine, fd) = Segment::create(device.clone(), 8192).unwrap();
        let peer = Segment::open(device.clone(), fd.as_fd(), 8192).unwrap();
        for wrong in [4096, 16384] {
            let error = Segment::open(device.clone(), fd.as_fd(), wrong).err().unwrap();
            assert!(
                error.text.contains(&format!("8192 bytes instead of {wrong}")),
                "{error}"
            );
        }
        drop(fd);
        // SAFETY: both mappings have 8192 bytes and no one else uses them.
        unsafe {
            mine.kernel_address().add(8191).write(7);
            assert_eq!(peer.kernel_address().add(8191).read(), 7);
        }
        drop(mine);
        // SAFETY: as above.
        unsafe { assert_eq!(peer.kernel_address().add(8191).read(), 7) };
    }
}
