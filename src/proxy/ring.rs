//! A net ring: the memory through which a kernel and the proxy hand slots to each other.
//!
//! One region for each link and direction, in host memory that the kernel's device addresses too; its channels stand next
//! to each other with fixed strides:
//!
//! ```text
//! tails   channels x one line of 128 bytes   slots filled so far, written by the producer
//! heads   channels x one line                slots drained so far, written by the consumer
//! notes   channels x note_stride notes       slot i's note is written before the tail passes it
//! slots   channels x slots x slot_bytes      the first one at a page's beginning
//! ```
//!
//! To send, the kernel is the producer and the proxy the consumer; to receive, the other way round. Positions count up for
//! ever, as in `cuda/protocol/slots.h`; slot i of position p is `p % slots`. What a side wrote, or read, before it published
//! its counter (release) the other may read, or overwrite, once it has seen the counter (acquire).

use super::machine::Direction;
use crate::device::{Memory, Placement};
use crate::error::{Error, Result};
use crate::transport::net::{SlotNote, Slots};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// No two counters share a line of a GPU's L2 or of a CPU's caches, prefetched neighbour included.
const LINE_BYTES: usize = 128;
const PAGE_BYTES: usize = 4096;

/// The shape of one link's rings in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingGeometry {
    pub channels: usize,
    /// A channel.
    pub slots: usize,
    pub slot_bytes: usize,
}

impl RingGeometry {
    pub fn bytes(&self) -> usize {
        self.slots_at() + self.channels * self.slots * self.slot_bytes
    }

    /// Byte offset of channel 0's tail; channels lie `LINE_BYTES` apart.
    pub fn tails(&self) -> usize {
        0
    }

    /// Of channel 0's head, likewise.
    pub fn heads(&self) -> usize {
        self.channels * LINE_BYTES
    }

    /// Of channel 0's first note; channels lie `note_stride` notes apart.
    pub fn notes(&self) -> usize {
        2 * self.channels * LINE_BYTES
    }

    /// Whole lines.
    pub fn note_stride(&self) -> usize {
        self.slots.next_multiple_of(LINE_BYTES / size_of::<SlotNote>())
    }

    /// Of channel 0's first slot; channels lie `slots * slot_bytes` apart.
    pub fn slots_at(&self) -> usize {
        let notes = self.channels * self.note_stride() * size_of::<SlotNote>();
        (self.notes() + notes).next_multiple_of(PAGE_BYTES)
    }
}

/// One channel of such a region, as the CPU sees it.
pub struct Ring {
    tail: *const AtomicU64,
    head: *const AtomicU64,
    notes: *mut SlotNote,
    slots: *mut u8,
    count: usize,
    slot_bytes: usize,
    memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: addresses in memory that the ring keeps; counters are atomics, and whose a note or slot is they decide.
unsafe impl Send for Ring {}

impl Ring {
    /// The ring of `channel` in the region at byte `offset` of `memory`.
    pub fn new(memory: &Arc<Memory>, offset: usize, geometry: RingGeometry, channel: usize) -> Result<Ring> {
        if memory.placement != Placement::Pinned {
            return Err(Error::internal(format!(
                "no ring: it was to be in {:?} memory",
                memory.placement
            )));
        }
        let kept: Arc<dyn Any + Send + Sync> = memory.clone();
        // SAFETY: the memory is as long as it says, and lives as long as it is held.
        unsafe { Ring::over(memory.address, memory.bytes, &kept, offset, geometry, channel) }
    }

    /// The same over `bytes` of other memory from `address` on, which the CPU sees there.
    ///
    /// # Safety
    /// The memory was zeroed, is shared with nobody but kernels and what moves slots, and lives as long as `kept`.
    pub(crate) unsafe fn over(
        address: *mut u8,
        bytes: usize,
        kept: &Arc<dyn Any + Send + Sync>,
        offset: usize,
        geometry: RingGeometry,
        channel: usize,
    ) -> Result<Ring> {
        let RingGeometry {
            channels,
            slots,
            slot_bytes,
        } = geometry;
        let sound = channel < channels
            && slots > 0
            && slot_bytes > 0
            && slot_bytes.is_multiple_of(size_of::<SlotNote>())
            && u32::try_from(slot_bytes).is_ok()
            && (address.addr() + offset).is_multiple_of(PAGE_BYTES)
            && offset + geometry.bytes() <= bytes;
        if !sound {
            return Err(Error::internal(format!(
                "no ring: channel {channel} of {geometry:?} at byte {offset} of {bytes} bytes of memory at {address:p}"
            )));
        }
        let place = |at: usize| {
            // SAFETY: inside the region, which is inside the memory.
            unsafe { address.add(offset + at) }
        };
        let note = channel * geometry.note_stride() * size_of::<SlotNote>();
        Ok(Ring {
            tail: place(geometry.tails() + channel * LINE_BYTES).cast(),
            head: place(geometry.heads() + channel * LINE_BYTES).cast(),
            notes: place(geometry.notes() + note).cast(),
            slots: place(geometry.slots_at() + channel * slots * slot_bytes),
            count: slots,
            slot_bytes,
            memory: kept.clone(),
        })
    }

    pub(super) fn slots(&self) -> Slots {
        // SAFETY: `new` placed them inside the memory.
        unsafe { Slots::new(self.slots, self.slot_bytes, self.count, self.memory.clone()) }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn tail(&self) -> &AtomicU64 {
        // SAFETY: aligned and inside the memory, which lives as long as the ring; both sides use atomic accesses.
        unsafe { &*self.tail }
    }

    fn head(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &*self.head }
    }

    /// How far the kernel is.
    pub(super) fn kernel_position(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Send => self.tail().load(Ordering::Acquire),
            Direction::Receive => self.head().load(Ordering::Acquire),
        }
    }

    /// Tells the kernel how far the proxy is.
    pub(super) fn publish(&self, direction: Direction, position: u64) {
        match direction {
            Direction::Send => self.head().store(position, Ordering::Release),
            Direction::Receive => self.tail().store(position, Ordering::Release),
        }
    }

    /// The note of a slot that the tail has passed and the head has not.
    pub(super) fn note(&self, index: usize) -> SlotNote {
        // SAFETY: `index % count` is inside. The producer wrote it before it published the tail, and leaves it alone until
        // it sees the head pass.
        unsafe { self.notes.add(index % self.count).read() }
    }

    /// Sets the note of a slot that the tail has not passed.
    pub(super) fn set_note(&self, index: usize, note: SlotNote) {
        // SAFETY: as above, by the producer.
        unsafe { self.notes.add(index % self.count).write(note) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{host, Device};

    #[test]
    fn channels_and_parts_do_not_overlap() {
        for (channels, slots, slot_bytes) in [(1, 1, 16), (4, 8, 4096), (3, 9, 48), (128, 2, 1 << 20)] {
            let geometry = RingGeometry {
                channels,
                slots,
                slot_bytes,
            };
            let mut parts = Vec::new();
            for channel in 0..channels {
                let note = geometry.note_stride() * size_of::<SlotNote>();
                parts.push((geometry.tails() + channel * 128, 8));
                parts.push((geometry.heads() + channel * 128, 8));
                parts.push((geometry.notes() + channel * note, slots * size_of::<SlotNote>()));
                parts.push((geometry.slots_at() + channel * slots * slot_bytes, slots * slot_bytes));
            }
            parts.sort();
            assert!(
                parts.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0),
                "{geometry:?}"
            );
            assert_eq!(parts.last().map(|(at, bytes)| at + bytes), Some(geometry.bytes()));
            assert!(geometry.slots_at().is_multiple_of(4096) && geometry.notes().is_multiple_of(128));
        }
    }

    #[test]
    fn a_ring_that_does_not_fit_is_refused() {
        let geometry = RingGeometry {
            channels: 2,
            slots: 2,
            slot_bytes: 64,
        };
        let allocate = |placement| {
            let device: Arc<dyn Device> = host::open(0);
            Arc::new(device.allocate(geometry.bytes(), placement).unwrap())
        };
        let memory = allocate(Placement::Pinned);
        assert!(Ring::new(&memory, 0, geometry, 1).is_ok());
        let uneven = RingGeometry {
            slot_bytes: 24,
            ..geometry
        };
        for (offset, geometry, channel) in [
            (0, geometry, 2),
            (4096, geometry, 0),
            (64, geometry, 0),
            (0, uneven, 0),
            (0, RingGeometry { slots: 0, ..geometry }, 0),
            (
                0,
                RingGeometry {
                    slots: 9999,
                    ..geometry
                },
                0,
            ),
        ] {
            let error = Ring::new(&memory, offset, geometry, channel).err().unwrap();
            assert!(error.text.contains("no ring"), "{error}");
        }
        assert!(Ring::new(&allocate(Placement::Device), 0, geometry, 0).is_err());
    }
}
