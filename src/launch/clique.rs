//! Ranks of one communicator in one process, so that two of them are not queued on one stream.
//!
//! Each rank's kernel waits for the others'. Behind each other on one stream the second would never start; until ranks
//! on one stream are fused into one launch, such a call is refused with both ranks named.

use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::launch::layout::MAX_RANKS;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What each rank launched last: its stream, and how many launches it has made with that one.
#[derive(Default)]
pub(super) struct Clique {
    stream: [AtomicU64; MAX_RANKS],
    launches: [AtomicU64; MAX_RANKS],
}

/// Cliques of this process by what names their communicator.
static CLIQUES: Lazy<Mutex<HashMap<Vec<u8>, Weak<Clique>>>> = Lazy::new(Default::default);

impl Clique {
    pub(super) fn of(communicator: Vec<u8>) -> Arc<Clique> {
        let mut cliques = CLIQUES.lock();
        cliques.retain(|_, clique| clique.strong_count() > 0);
        let clique = cliques.get(&communicator).and_then(Weak::upgrade).unwrap_or_default();
        cliques.insert(communicator, Arc::downgrade(&clique));
        clique
    }

    /// Notes that `rank`, which has made `launched` launches, goes on with the stream `key`; refuses if another rank
    /// has queued the same or a later operation there. One of two that come at once sees the other.
    pub(super) fn enter(&self, rank: u32, device: &dyn Device, key: u64, launched: u64) -> Result<()> {
        if device.kind() == DeviceKind::Host {
            return Ok(());
        }
        let mine = rank as usize;
        // Streams of different devices never queue behind each other; keys are unique within a device only.
        let stream = key << 8 | (device.ordinal() as u64 & 0xff);
        self.stream[mine].store(stream, Ordering::SeqCst);
        self.launches[mine].store(launched + 1, Ordering::SeqCst);
        for other in (0..MAX_RANKS).filter(|other| *other != mine) {
            let ahead = self.launches[other].load(Ordering::SeqCst) > launched;
            if ahead && self.stream[other].load(Ordering::SeqCst) == stream {
                return Err(Error::usage(format!(
                    "ranks {other} and {rank} of one communicator use one stream: the second kernel would wait behind the \
                     first, which waits for it; give each rank a stream of its own"
                )));
            }
        }
        Ok(())
    }
}
