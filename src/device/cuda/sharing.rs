//! Device memory that ranks in several processes reach: inboxes, as their owner exports and as peers import them.
//!
//! ```text
//! VMM handles   owner: create, export as a descriptor, map    peer: import the descriptor, map
//! legacy IPC    owner: a block of the pool, its 64 bytes      peer: open the 64 bytes
//! ```
//!
//! Physical memory of VMM stays until its last mapping in any process goes, so each side unmaps when its own kernels
//! have left. Memory of legacy IPC must not be freed, nor lent again, before every importer closed it. So each importer
//! holds the write end of a pipe until then, and the owner parks the block with the read end until that says that no
//! writer is left. The end of a process closes its ends too, and so does a forked child (`Descriptor`). What came back is
//! lent again by the pool.

use super::context::RelaxedCapture;
use super::virtual_memory::{access_of, Physical};
use super::CudaDevice;
use crate::bootstrap::Descriptor;
use crate::device::{Device, Export, Mapping, Memory, Placement, Sharing, Ticket};
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdeviceptr, CUipcMemHandle, CallResult, Failure};
use crate::sys::process_local::ProcessLocal;
use crate::warning;
use cudarc::driver::sys::CUipcMem_flags;
use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::ffi::{c_char, c_uint};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// An exported block is the driver's only one in its 2 MiB page: the whole page is what a peer can reach.
const SMALLEST_IPC_BYTES: usize = 2 << 20;

/// Memory of legacy IPC whose importers have not all left.
struct Parked {
    _memory: Memory,
    importers: Descriptor,
}

static PARKED: ProcessLocal<Mutex<Vec<Parked>>> = ProcessLocal::new();

/// Gives back what no importer holds any more.
fn drop_parked() {
    PARKED.get().lock().retain(|parked| {
        let mut asked = [PollFd::new(&parked.importers, PollFlags::empty())];
        let answered = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok();
        !(answered && asked[0].revents().contains(PollFlags::HUP))
    });
}

/// A range that VMM mapped.
struct Mapped {
    device: Arc<CudaDevice>,
    address: CUdeviceptr,
    bytes: usize,
}

impl Mapping for Mapped {
    fn address(&self) -> *mut u8 {
        self.address as usize as *mut u8
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let undone = self.device.unmap(self.address, self.bytes);
        self.device.say_if_kept(self.address, undone);
    }
}

/// The owner's side of legacy IPC; None only while it is dropped.
struct Lent(Option<Parked>, *mut u8);

// SAFETY: the address is plain data.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Mapping for Lent {
    fn address(&self) -> *mut u8 {
        self.1
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        PARKED.get().lock().extend(self.0.take());
        drop_parked();
    }
}

/// An importer's side of legacy IPC.
struct Opened {
    device: Arc<CudaDevice>,
    address: CUdeviceptr,
    /// Closed after the memory is.
    _present: Descriptor,
}

impl Mapping for Opened {
    fn address(&self) -> *mut u8 {
        self.address as usize as *mut u8
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let undone = self.device.close_ipc(self.address);
        self.device.say_if_kept(self.address, undone);
    }
}

fn plain(failure: Failure) -> String {
    failure.to_string()
}

impl CudaDevice {
    pub(super) fn ways_to_share(&self) -> Vec<Sharing> {
        let handles = self.virtual_memory.as_ref().map(|_| Sharing::Handles);
        handles.into_iter().chain([Sharing::Ipc]).collect()
    }

    pub(super) fn export_memory(self: Arc<Self>, bytes: usize, sharing: Sharing) -> Result<Export> {
        let exported = match sharing {
            Sharing::Handles => self.export_by_handle(bytes),
            Sharing::Ipc => self.export_by_ipc(bytes),
        };
        exported.map_err(|why| {
            Error::cuda(format!(
                "{} cannot share {bytes} bytes with other processes by {}: {why}; set NCCL_P2P_DISABLE=1 to go through host \
                 memory",
                self.gpu,
                sharing.name()
            ))
        })
    }

    pub(super) fn import_memory(self: Arc<Self>, ticket: &Ticket, fd: Descriptor) -> Result<Box<dyn Mapping>> {
        let imported = match ticket {
            Ticket::Handle { bytes } => self.import_by_handle(&fd, *bytes).map_err(plain),
            Ticket::Ipc { handle } => self.import_by_ipc(handle, fd),
        };
        imported.map_err(|why| {
            Error::cuda(format!(
                "{} cannot address the memory of another process by {}: {why}; set NCCL_P2P_DISABLE=1 to go through host \
                 memory",
                self.gpu,
                ticket.sharing().name()
            ))
        })
    }

    fn export_by_handle(self: &Arc<Self>, bytes: usize) -> std::result::Result<Export, String> {
        let memory = self.virtual_memory.as_ref();
        let memory = memory.ok_or("it has none, or NCCL_CUMEM_ENABLE is 0")?;
        let map = || -> CallResult<(Mapped, OwnedFd)> {
            let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
            let physical = Physical::create(self.driver, memory, bytes)?;
            let fd = physical.export()?;
            Ok((self.mapped(physical.map(&memory.access)?, physical.bytes), fd))
        };
        let (mapping, fd) = map().map_err(plain)?;
        let fd = Descriptor::new(fd).map_err(|errno| format!("no descriptor: {errno}"))?;
        self.zero(mapping.address, bytes).map_err(|error| error.text)?;
        let ticket = Ticket::Handle { bytes: mapping.bytes };
        Ok(Export {
            mapping: Box::new(mapping),
            ticket,
            fd,
        })
    }

    fn import_by_handle(self: &Arc<Self>, fd: &Descriptor, bytes: usize) -> CallResult<Box<dyn Mapping>> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let physical = Physical::import(self.driver, fd, bytes)?;
        Ok(Box::new(self.mapped(physical.map(&[access_of(self.ordinal)])?, bytes)))
    }

    fn mapped(self: &Arc<Self>, address: CUdeviceptr, bytes: usize) -> Mapped {
        Mapped {
            device: Arc::clone(self),
            address,
            bytes,
        }
    }

    fn export_by_ipc(self: &Arc<Self>, bytes: usize) -> std::result::Result<Export, String> {
        drop_parked();
        let memory = Arc::clone(self).allocate(bytes.max(SMALLEST_IPC_BYTES), Placement::Device);
        let memory = memory.map_err(|error| error.text)?;
        let address = memory.address;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        {
            let _guards = (
                self.scope().map_err(plain)?,
                RelaxedCapture::enter(self.driver).map_err(plain)?,
            );
            // SAFETY: the base of a block that the driver gave; writes one handle.
            unsafe { self.driver.call.cuIpcGetMemHandle(&mut handle, address as CUdeviceptr) }.map_err(plain)?;
        }
        let (importers, present) = std::io::pipe().map_err(|error| format!("no pipe: {error}"))?;
        let descriptor = |end: OwnedFd| Descriptor::new(end).map_err(|errno| format!("no pipe: {errno}"));
        let (importers, present) = (descriptor(importers.into())?, descriptor(present.into())?);
        let parked = Parked {
            _memory: memory,
            importers,
        };
        Ok(Export {
            mapping: Box::new(Lent(Some(parked), address)),
            ticket: Ticket::Ipc {
                handle: handle.reserved.map(|byte| byte as u8).to_vec(),
            },
            fd: present,
        })
    }

    fn import_by_ipc(
        self: &Arc<Self>,
        handle: &[u8],
        present: Descriptor,
    ) -> std::result::Result<Box<dyn Mapping>, String> {
        let handle: [u8; 64] = handle.try_into().map_err(|_| "its handle has not 64 bytes")?;
        let handle = CUipcMemHandle {
            reserved: handle.map(|byte| byte as c_char),
        };
        let _guards = (
            self.scope().map_err(plain)?,
            RelaxedCapture::enter(self.driver).map_err(plain)?,
        );
        let mut address = 0;
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        // SAFETY: the bytes that the owner's driver gave; writes one address.
        unsafe { self.driver.call.cuIpcOpenMemHandle(&mut address, handle, flags) }.map_err(plain)?;
        Ok(Box::new(Opened {
            device: Arc::clone(self),
            address,
            _present: present,
        }))
    }

    fn close_ipc(&self, address: CUdeviceptr) -> CallResult<()> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        // SAFETY: opened by `import_by_ipc`, and no kernel uses it any more.
        unsafe { self.driver.call.cuIpcCloseMemHandle(address) }
    }

    fn say_if_kept(&self, address: CUdeviceptr, undone: CallResult<()>) {
        match undone {
            Err(failure) if !failure.is_shutdown() => {
                warning!("shared memory at {address:#x} stays mapped on {}: {failure}", self.gpu)
            }
            _ => {}
        }
    }
}
