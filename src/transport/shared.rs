//! Host memory shared between the processes of one host.
//!
//! A memfd has no name, so nothing is left behind whenever a process dies, and the size of /dev/shm does not matter.
//! Peers open it through /proc/<pid>/fd; a random word at its start tells that they opened the right one.

use crate::device::Device;
use crate::error::{Error, Result};
use rustix::fs::{MemfdFlags, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The mapping's first page holds the proof; the shared bytes begin after it.
const HEADER_BYTES: usize = 4096;

/// How a peer finds a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SegmentName {
    pid: u32,
    fd: i32,
    bytes: usize,
    proof: u128,
}

/// A mapped segment that the device's kernels can reach.
pub(super) struct Segment {
    mapping: *mut u8,
    bytes: usize,
    /// Where kernels see the byte after the header.
    kernel_address: *mut u8,
    device: Arc<dyn Device>,
}

// SAFETY: Segment owns its mapping; the addresses are plain data.
unsafe impl Send for Segment {}
// SAFETY: as above; access through the address is unsafe and argued where it happens.
unsafe impl Sync for Segment {}

impl Segment {
    /// A zeroed segment of this rank. The file must stay open until the peers have mapped it.
    pub(super) fn create(device: Arc<dyn Device>, bytes: usize) -> Result<(Segment, OwnedFd, SegmentName)> {
        let total = HEADER_BYTES + bytes;
        let failed = |what: &str, error: rustix::io::Errno| {
            Error::system(format!("cannot {what} {total} bytes of shared memory: {error}"))
        };
        let fd = rustix::fs::memfd_create("ossicle-inbox", MemfdFlags::CLOEXEC).map_err(|e| failed("create", e))?;
        rustix::fs::ftruncate(&fd, total as u64).map_err(|e| failed("size", e))?;
        let segment = Segment::map(device, fd.as_fd(), bytes)?;
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| Error::system(format!("no random numbers: {error}")))?;
        let proof = u128::from_ne_bytes(random);
        // SAFETY: the header page is mapped, aligned and not yet known to anyone else.
        unsafe { segment.mapping.cast::<u128>().write(proof) };
        let name = SegmentName {
            pid: std::process::id(),
            fd: fd.as_raw_fd(),
            bytes,
            proof,
        };
        Ok((segment, fd, name))
    }

    /// A peer's segment.
    pub(super) fn open(device: Arc<dyn Device>, name: &SegmentName, expected_bytes: usize) -> Result<Segment> {
        let path = format!("/proc/{}/fd/{}", name.pid, name.fd);
        let unreachable = |why: String| {
            Error::system(format!(
                "cannot share memory with process {}: {path}: {why}; ranks of one host must see each other's processes \
                 (one PID namespace and one user), or set NCCL_HOSTID apart",
                name.pid
            ))
        };
        if name.bytes != expected_bytes {
            return Err(unreachable(format!(
                "it has {} bytes instead of {expected_bytes}",
                name.bytes
            )));
        }
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, rustix::fs::Mode::empty())
            .map_err(|error| unreachable(error.to_string()))?;
        let size = rustix::fs::fstat(&fd)
            .map_err(|error| unreachable(error.to_string()))?
            .st_size;
        if size != (HEADER_BYTES + expected_bytes) as i64 {
            return Err(unreachable("it is not the peer's segment".to_owned()));
        }
        let segment = Segment::map(device, fd.as_fd(), expected_bytes)?;
        // SAFETY: the header page is mapped and aligned; its owner wrote it before it told anyone the name.
        let proof = unsafe { segment.mapping.cast::<u128>().read() };
        if proof != name.proof {
            return Err(unreachable("it is not the peer's segment".to_owned()));
        }
        Ok(segment)
    }

    fn map(device: Arc<dyn Device>, fd: BorrowedFd, bytes: usize) -> Result<Segment> {
        let total = HEADER_BYTES + bytes;
        // SAFETY: a new mapping at an address of the kernel's choice; the file has `total` bytes.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                total,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let mapping = mapped
            .map_err(|error| Error::system(format!("cannot map {total} bytes of shared memory: {error}")))?
            .cast::<u8>();
        let mut segment = Segment {
            mapping,
            bytes,
            kernel_address: std::ptr::null_mut(),
            device,
        };
        // SAFETY: HEADER_BYTES is within the mapping of `total` bytes.
        let payload = unsafe { mapping.add(HEADER_BYTES) };
        segment.kernel_address = segment.device.register(payload, bytes)?;
        Ok(segment)
    }

    pub(super) fn kernel_address(&self) -> *mut u8 {
        self.kernel_address
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if !self.kernel_address.is_null() {
            // SAFETY: as in `map`.
            self.device.unregister(unsafe { self.mapping.add(HEADER_BYTES) });
        }
        // SAFETY: this object's own mapping; the engine that drops it has no kernel running (Engine::drop).
        let _ = unsafe { rustix::mm::munmap(self.mapping.cast(), HEADER_BYTES + self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_found_by_its_name_and_by_no_other() {
        let device = crate::device::host::open(0);
        let (mine, fd, name) = Segment::create(device.clone(), 8192).unwrap();
        let peer = Segment::open(device.clone(), &name, 8192).unwrap();
        // SAFETY: both mappings have 8192 bytes and no one else uses them.
        unsafe {
            mine.kernel_address().add(8191).write(7);
            assert_eq!(peer.kernel_address().add(8191).read(), 7);
        }
        let forged = SegmentName {
            proof: name.proof ^ 1,
            ..name.clone()
        };
        assert!(Segment::open(device.clone(), &forged, 8192).is_err());
        assert!(Segment::open(device.clone(), &name, 4096).is_err());
        drop(fd);
        assert!(Segment::open(device, &name, 8192).is_err());
        // SAFETY: the mappings live on without the file descriptor.
        unsafe { assert_eq!(peer.kernel_address().add(8191).read(), 7) };
    }
}
