//! A rank's inbox: all memory that its peers write.
//!
//! ```text
//! [ one-shot area: parity, source rank, lines ] [ slots: receive link, channel, slot ]
//! [ tails: receive link, channel ] [ heads: send link, channel ] [ started ]
//! ```
//!
//! The started word is the owner's own, which its peers read: how many operations its kernels have started.
//!
//! All ranks have the same geometry, so a peer's addresses follow from its inbox's base.

use super::shared::{Segment, SegmentName};
use super::Path;
use crate::device::{Device, Memory, Placement};
use crate::error::{Error, Result};
use crate::launch::layout::{FLAG_STRIDE, LINE_BYTES};
use crate::sys::process_local::ProcessLocal;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
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

    fn started_at(&self) -> usize {
        self.area_bytes() + self.links * self.link_bytes() + 2 * self.flags_bytes()
    }

    fn bytes(&self) -> usize {
        self.started_at() + FLAG_STRIDE * 8
    }
}

enum Storage {
    Device(Memory),
    Shared(Segment),
}

/// An inbox as its owner or one of its peers holds it; addresses are those of the holder's kernels.
pub struct PeerInbox {
    storage: Storage,
    geometry: Geometry,
}

impl PeerInbox {
    fn base(&self) -> *mut u8 {
        match &self.storage {
            Storage::Device(memory) => memory.address,
            Storage::Shared(segment) => segment.kernel_address(),
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

    /// How many operations the owner's kernels have started.
    pub fn started(&self) -> *mut u64 {
        self.base().wrapping_add(self.geometry.started_at()).cast()
    }

    fn flags(&self, table: usize, link: usize) -> *mut u64 {
        let tables = self.geometry.area_bytes() + self.geometry.links * self.geometry.link_bytes();
        let link_bytes = self.geometry.channels * FLAG_STRIDE * 8;
        self.base()
            .wrapping_add(tables + table * self.geometry.flags_bytes() + link * link_bytes)
            .cast()
    }
}

/// How a peer finds an inbox.
#[derive(Serialize, Deserialize)]
enum Name {
    /// Key in this process's table.
    Process(u64),
    Shared(SegmentName),
}

/// This rank's own inbox while its peers connect.
pub struct Inbox {
    inbox: Arc<PeerInbox>,
    name: Name,
    /// Keeps /proc/<pid>/fd/<fd> alive until the peers have opened it.
    _fd: Option<OwnedFd>,
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
        match path {
            Path::P2p => {
                let memory = device.clone().allocate(bytes, Placement::Device)?;
                let key = memory.address as u64;
                let inbox = Arc::new(PeerInbox {
                    storage: Storage::Device(memory),
                    geometry,
                });
                OFFERED.get().lock().insert(key, inbox.clone());
                Ok(Inbox {
                    inbox,
                    name: Name::Process(key),
                    _fd: None,
                })
            }
            Path::Shm => {
                let (segment, fd, name) = Segment::create(device.clone(), bytes)?;
                let inbox = Arc::new(PeerInbox {
                    storage: Storage::Shared(segment),
                    geometry,
                });
                Ok(Inbox {
                    inbox,
                    name: Name::Shared(name),
                    _fd: Some(fd),
                })
            }
        }
    }

    /// What peers need to open it.
    pub fn name(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&self.name).map_err(|error| Error::internal(format!("inbox name: {error}")))
    }

    pub fn own(&self) -> Arc<PeerInbox> {
        self.inbox.clone()
    }

    /// Opens a peer's inbox by what its `name` gave.
    pub fn open(device: &Arc<dyn Device>, name: &[u8], geometry: Geometry) -> Result<Arc<PeerInbox>> {
        let name = serde_json::from_slice(name).map_err(|error| Error::internal(format!("inbox name: {error}")))?;
        match name {
            Name::Process(key) => OFFERED
                .get()
                .lock()
                .get(&key)
                .cloned()
                .ok_or_else(|| Error::internal("a rank of this process withdrew its inbox while peers connect")),
            Name::Shared(segment) => {
                let segment = Segment::open(device.clone(), &segment, geometry.bytes())?;
                Ok(Arc::new(PeerInbox {
                    storage: Storage::Shared(segment),
                    geometry,
                }))
            }
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if let Name::Process(key) = self.name {
            OFFERED.get().lock().remove(&key);
        }
    }
}
