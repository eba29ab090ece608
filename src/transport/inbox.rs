//! A rank's inbox: all memory that its peers write.
//!
//! ```text
//! [ one-shot area: parity, source rank, lines ] [ slots: receive link, channel, slot ]
//! [ tails: receive link, channel ] [ heads: send link, channel ]
//! [ two-shot slots: phase, source, block, parity ] [ two-shot counters: phase, source, block ] [ started ]
//! ```
//!
//! The started word is the owner's own, which its peers read: how many operations its kernels have started.
//!
//! All ranks have the same geometry, so a peer's addresses follow from its inbox's base.

use super::descriptors::{Address, Exchange};
use super::shared::Segment;
use super::Path;
use crate::bootstrap::Descriptor;
use crate::device::{Device, Mapping, Memory, Placement, Ticket};
use crate::error::{Error, Result};
use crate::launch::layout::{FLAG_STRIDE, LINE_BYTES};
use crate::sys::process_local::ProcessLocal;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Sizes of an inbox; equal on all ranks of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub ranks: usize,
    /// Lines of one region of the one-shot area.
    pub lines: usize,
    pub channels: usize,
    pub slots: usize,
    pub slot_bytes: usize,
    /// Receive links and send links of a rank, at most.
    pub links: usize,
    pub two_shot: TwoShotGeometry,
}

/// The part of the inbox that the two-shot kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoShotGeometry {
    pub blocks: usize,
    pub slot_bytes: usize,
}

impl Geometry {
    fn area_bytes(&self) -> usize {
        2 * self.ranks * self.lines * LINE_BYTES
    }

    fn link_bytes(&self) -> usize {
        self.channels * self.slots * self.slot_bytes
    }

    fn flags_bytes(&self) -> usize {
        self.links * self.channels * FLAG_STRIDE * 8
    }

    /// Of two-shot's phases, sources and blocks.
    fn two_shot_places(&self) -> usize {
        2 * (self.ranks - 1) * self.two_shot.blocks
    }

    fn two_shot_offset(&self) -> usize {
        self.area_bytes() + self.links * self.link_bytes() + 2 * self.flags_bytes()
    }

    fn two_shot_slots_bytes(&self) -> usize {
        self.two_shot_places() * 2 * self.two_shot.slot_bytes
    }

    fn started_offset(&self) -> usize {
        let counters = self.two_shot_places() * FLAG_STRIDE * 8;
        self.two_shot_offset() + self.two_shot_slots_bytes() + counters
    }

    fn bytes(&self) -> usize {
        self.started_offset() + FLAG_STRIDE * 8
    }
}

enum Storage {
    /// Memory of this process that stays in it.
    Device(Memory),
    /// Device memory that processes share: this rank's, or a peer's as it is mapped here.
    Mapped(Box<dyn Mapping>),
    Host(Segment),
}

/// An inbox as its owner or one of its peers holds it; addresses are those of the holder's kernels.
pub struct PeerInbox {
    storage: Storage,
    geometry: Geometry,
}

impl PeerInbox {
    pub fn bytes(&self) -> usize {
        self.geometry.bytes()
    }

    fn base(&self) -> *mut u8 {
        match &self.storage {
            Storage::Device(memory) => memory.address,
            Storage::Mapped(mapping) => mapping.address(),
            Storage::Host(segment) => segment.kernel_address(),
        }
    }

    /// The one-shot area.
    pub fn area(&self) -> *mut u8 {
        self.base()
    }

    /// Channel 0's slots of a receive link of the inbox's owner.
    pub fn slots(&self, recv_link: usize) -> *mut u8 {
        self.base()
            .wrapping_add(self.geometry.area_bytes() + recv_link * self.geometry.link_bytes())
    }

    /// Channel 0's tail of a receive link of the owner.
    pub fn tail(&self, recv_link: usize) -> *mut u64 {
        self.flags(0, recv_link)
    }

    /// Channel 0's head of a send link of the owner.
    pub fn head(&self, send_link: usize) -> *mut u64 {
        self.flags(1, send_link)
    }

    pub fn two_shot_slots(&self) -> *mut u8 {
        self.base().wrapping_add(self.geometry.two_shot_offset())
    }

    pub fn two_shot_counters(&self) -> *mut u64 {
        let slots = self.geometry.two_shot_slots_bytes();
        self.two_shot_slots().wrapping_add(slots).cast()
    }

    /// How many operations the owner's kernels have started.
    pub fn started(&self) -> *mut u64 {
        self.base().wrapping_add(self.geometry.started_offset()).cast()
    }

    fn flags(&self, table: usize, link: usize) -> *mut u64 {
        let tables = self.geometry.area_bytes() + self.geometry.links * self.geometry.link_bytes();
        let link_bytes = self.geometry.channels * FLAG_STRIDE * 8;
        self.base()
            .wrapping_add(tables + table * self.geometry.flags_bytes() + link * link_bytes)
            .cast()
    }
}

/// How a peer finds an inbox. The names of all ranks together name their communicator as nothing else does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Name {
    /// For peers in this process, which use its address: its key in the process's table.
    key: u64,
    /// Device memory, for peers in other processes.
    ticket: Option<Ticket>,
    /// Where this rank takes descriptors.
    pub(super) address: Option<Address>,
}

/// This rank's own inbox while its peers connect.
pub struct Inbox {
    inbox: Arc<PeerInbox>,
    name: Name,
    /// What peers open that cannot use the address, and the socket that it goes through. Open until they have it.
    passed: Option<(Descriptor, Exchange)>,
}

/// Inboxes of this process that peers in it may still want, by key.
static OFFERED: ProcessLocal<Mutex<HashMap<u64, Arc<PeerInbox>>>> = ProcessLocal::new();

/// Random and equal within one process, a forked child excepted: it shares the random half, not the process id.
pub(super) fn process_token() -> u128 {
    static RANDOM: Lazy<[u8; 8]> = Lazy::new(|| {
        let mut random = [0; 8];
        // Without random numbers the process id alone tells processes of one host apart.
        let _ = getrandom::fill(&mut random);
        random
    });
    u128::from(u64::from_ne_bytes(*RANDOM)) << 64 | u128::from(std::process::id())
}

impl Inbox {
    pub fn create(device: &Arc<dyn Device>, path: Path, geometry: Geometry) -> Result<Inbox> {
        let bytes = geometry.bytes();
        // First: what follows is not to be dropped while another communicator's kernel runs.
        let exchange = match path {
            Path::P2p => None,
            Path::P2pShared(_) | Path::Shm => Some(Exchange::open()?),
        };
        let (storage, ticket, fd) = match path {
            Path::P2p => (
                Storage::Device(device.clone().allocate(bytes, Placement::Device)?),
                None,
                None,
            ),
            Path::P2pShared(sharing) => {
                let export = device.clone().export(bytes, sharing)?;
                (Storage::Mapped(export.mapping), Some(export.ticket), Some(export.fd))
            }
            Path::Shm => {
                let (segment, fd) = Segment::create(device.clone(), bytes)?;
                (Storage::Host(segment), None, Some(fd))
            }
        };
        let inbox = Arc::new(PeerInbox { storage, geometry });
        let passed = fd.zip(exchange);
        let name = Name {
            // An address is nobody else's while the inbox is there.
            key: inbox.base() as u64,
            ticket,
            address: passed.as_ref().map(|(_, exchange)| exchange.address().clone()),
        };
        OFFERED.get().lock().insert(name.key, inbox.clone());
        Ok(Inbox { inbox, name, passed })
    }

    /// What peers need to open it.
    pub fn name(&self) -> &Name {
        &self.name
    }

    pub fn own(&self) -> Arc<PeerInbox> {
        self.inbox.clone()
    }

    /// What peers need besides the name where they cannot use the address.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.passed.as_ref().map(|(fd, _)| fd.as_fd())
    }

    pub(super) fn exchange(&self) -> Option<&Exchange> {
        self.passed.as_ref().map(|(_, exchange)| exchange)
    }

    /// Opens a peer's inbox: by its descriptor, or by its address where none was passed, since the peer is a thread of
    /// this process.
    pub fn open(
        device: &Arc<dyn Device>,
        path: Path,
        name: &Name,
        descriptor: Option<Descriptor>,
        geometry: Geometry,
    ) -> Result<Arc<PeerInbox>> {
        let bytes = geometry.bytes();
        let storage = match (path, descriptor, &name.ticket) {
            (_, None, _) => {
                let offered = OFFERED.get().lock().get(&name.key).cloned();
                return offered
                    .ok_or_else(|| Error::internal("a rank of this process withdrew its inbox while peers connect"));
            }
            // Kernels would write beyond the end of a smaller one.
            (Path::P2pShared(_), _, Some(Ticket::Handle { bytes: shared })) if *shared < bytes => {
                return Err(Error::internal(format!(
                    "a peer's shared memory has {shared} bytes instead of {bytes}"
                )))
            }
            (Path::P2pShared(sharing), Some(fd), Some(ticket)) if ticket.sharing() == sharing => {
                Storage::Mapped(device.clone().import(ticket, fd)?)
            }
            (Path::Shm, Some(fd), None) => Storage::Host(Segment::open(device.clone(), fd.as_fd(), bytes)?),
            _ => {
                return Err(Error::internal(format!(
                    "what a peer says of its shared memory is not of {}",
                    path.name()
                )))
            }
        };
        Ok(Arc::new(PeerInbox { storage, geometry }))
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        OFFERED.get().lock().remove(&self.name.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::sharing_tests::fake_gpus;
    use crate::device::Sharing;
    use crate::transport::TwoShotGeometry;

    fn geometry(lines: usize) -> Geometry {
        Geometry {
            ranks: 2,
            lines,
            channels: 1,
            slots: 2,
            slot_bytes: 256,
            links: 1,
            two_shot: TwoShotGeometry {
                blocks: 1,
                slot_bytes: 256,
            },
        }
    }

    #[test]
    fn memory_that_is_too_small_or_of_another_kind_is_not_mapped() {
        let (fake, [device, _]) = fake_gpus("tickets");
        let ways = [
            Path::P2pShared(Sharing::Handles),
            Path::P2pShared(Sharing::Ipc),
            Path::Shm,
        ];
        let small = geometry(64);
        let inboxes = ways.map(|path| Inbox::create(&device, path, small).unwrap());
        let open = |of: usize, as_if: usize, geometry: Geometry| {
            let fd = inboxes[of].descriptor().unwrap().try_clone_to_owned().unwrap();
            let fd = Some(Descriptor::new(fd).unwrap());
            Inbox::open(&device, ways[as_if], inboxes[of].name(), fd, geometry).map(drop)
        };
        for of in 0..ways.len() {
            for as_if in 0..ways.len() {
                let opened = open(of, as_if, small);
                match of == as_if {
                    true => opened.unwrap(),
                    false => assert!(opened.unwrap_err().text.contains("is not of")),
                }
            }
        }
        let imports = fake.count(c"cuMemImportFromShareableHandle");
        // More than what the driver rounds up to.
        for of in [0, 2] {
            let refused = open(of, of, geometry(1 << 20)).unwrap_err();
            assert!(refused.text.contains("bytes instead of"), "{refused}");
        }
        assert_eq!(fake.count(c"cuMemImportFromShareableHandle"), imports);
    }
}
