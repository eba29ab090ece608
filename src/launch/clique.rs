//! Ranks of one communicator in one process, so that two of them are not queued on one stream.
//!
//! Each rank's kernel waits for the others'. Behind each other on one stream the second would never start; until ranks
//! on one stream are fused into one launch, such a call is refused with both ranks named.

use super::running::Running;
use crate::device::{streams_conflict, Device, DeviceKind, CALLERS_THREAD_KEY};
use crate::error::{Error, Result};
use crate::launch::layout::MAX_RANKS;
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// So many of a rank's latest launches are remembered; a rank that is further ahead of another is not checked.
const REMEMBERED: usize = 16;

/// What each rank launched: how many operations, and the stream of the latest ones by their number.
#[derive(Default)]
pub(super) struct Clique {
    launches: [AtomicU64; MAX_RANKS],
    streams: [[AtomicU64; REMEMBERED]; MAX_RANKS],
    /// Whether any launch went to a queue. Until then nothing is noted of those on callers' threads.
    queued: AtomicBool,
    /// The ranks' kernels, for an abort.
    pub(super) members: Mutex<Vec<Arc<Running>>>,
}

/// A stream is remembered as its key with its device's ordinal below.
const ORDINAL_BITS: u32 = 8;
const ORDINAL_MASK: u64 = (1 << ORDINAL_BITS) - 1;

/// Streams of different devices never queue behind each other, and keys are unique within a device only.
fn conflict(a: u64, b: u64) -> bool {
    a & ORDINAL_MASK == b & ORDINAL_MASK && streams_conflict(a >> ORDINAL_BITS, b >> ORDINAL_BITS)
}

/// Whose streams a device's are: every GPU has its own, host devices share those of the process.
pub(super) fn streams_of(device: &dyn Device) -> i32 {
    match device.kind() {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => device.ordinal(),
    }
}

pub(super) fn one_stream(first: u32, second: u32) -> Error {
    Error::usage(format!(
        "ranks {first} and {second} of one communicator use one stream: the second kernel would wait behind the first, which \
         waits for it; give each rank a stream of its own"
    ))
}

/// Cliques of this process by what names their communicator.
static CLIQUES: ProcessLocal<Mutex<HashMap<Vec<u8>, Weak<Clique>>>> = ProcessLocal::new();

impl Clique {
    pub(super) fn of(communicator: Vec<u8>) -> Arc<Clique> {
        let mut cliques = CLIQUES.get().lock();
        cliques.retain(|_, clique| clique.strong_count() > 0);
        let clique = cliques.get(&communicator).and_then(Weak::upgrade).unwrap_or_default();
        cliques.insert(communicator, Arc::downgrade(&clique));
        clique
    }

    /// Notes that `rank` launches its operation `number` on the stream `key`. Refused if another rank has queued the
    /// same or a later one there: that waits for this, which would wait behind it. One of two that come at once sees
    /// the other.
    pub(super) fn enter(&self, rank: u32, device: &dyn Device, key: u64, number: u64) -> Result<()> {
        let here = key == CALLERS_THREAD_KEY;
        if here && !self.queued.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mine = rank as usize;
        let stream = key << ORDINAL_BITS | (streams_of(device) as u64 & ORDINAL_MASK);
        self.streams[mine][number as usize % REMEMBERED].store(stream, Ordering::SeqCst);
        self.launches[mine].store(number + 1, Ordering::SeqCst);
        if here {
            return Ok(());
        }
        self.queued.store(true, Ordering::Relaxed);
        for other in (0..MAX_RANKS).filter(|other| *other != mine) {
            let ahead = self.launches[other].load(Ordering::SeqCst);
            let remembered = ahead.saturating_sub(REMEMBERED as u64).max(number)..ahead;
            let queued = |number: u64| self.streams[other][number as usize % REMEMBERED].load(Ordering::SeqCst);
            if remembered.into_iter().any(|number| conflict(queued(number), stream)) {
                return Err(one_stream(other as u32, rank));
            }
        }
        Ok(())
    }

    /// `rank` has launched `launched` operations, whatever it entered beyond.
    pub(super) fn leave(&self, rank: u32, launched: u64) {
        self.launches[rank as usize].store(launched, Ordering::SeqCst);
    }
}
