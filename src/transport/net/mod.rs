//! Between hosts: whole slots go from one rank's memory into another's, two-sided.
//!
//! A `Transfer` is one channel of one direction of a link. Both ends register the slots of their ring once; then the
//! sender posts filled slots, the receiver posts free ones, and each polls for completions, which come in the order of
//! the posts. Nothing waits. Whoever drives it (`proxy/`) knows no network, and a transfer knows no kernel.
//!
//! - `socket`: TCP, one connection a transfer; `listener` makes them, with proof of the communicator's secret.
//! - `wire`: what stands in front of each slot's bytes there.
//! - `hca`: one queue pair of an HCA a transfer, which a CPU thread posts to.

pub(crate) mod hca;
mod listener;
mod socket;
#[cfg(test)]
pub(crate) mod tests;
mod wire;

pub use listener::{Established, Listener, Name};
pub use socket::Socket;

use crate::error::Result;
use std::any::Any;
use std::sync::Arc;

/// What a slot says of itself; the same struct as in `cuda/layout.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotNote {
    /// Of payload, from the slot's beginning; 0 is allowed.
    pub bytes: u32,
    /// The step of the plan that filled it, for messages.
    pub step: u32,
    /// The operation's number, which never goes down on a link.
    pub ordinal: u64,
}

const _: () = assert!(size_of::<SlotNote>() == 16 && align_of::<SlotNote>() == 8);

/// Which connection of a communicator: one channel of the link from one rank to another. Ranks and channel are bounded
/// by `Purpose::MAX_RANK` and `Purpose::MAX_CHANNEL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purpose {
    pub sender: u32,
    pub receiver: u32,
    pub channel: u32,
}

impl Purpose {
    pub const MAX_RANK: u32 = (1 << 24) - 1;
    pub const MAX_CHANNEL: u32 = (1 << 16) - 1;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The slot may be filled again.
    Sent(usize),
    /// The slot has `note.bytes` of payload.
    Received(usize, SlotNote),
}

/// Moves slots in one direction. Every error is final: the transfer is of no use any more.
pub trait Transfer: Send {
    /// Once, before anything is posted.
    fn register(&mut self, slots: Slots) -> Result<()>;
    /// Sends a slot's first `note.bytes`. The slot belongs to the transfer until it completes.
    fn post_send(&mut self, index: usize, note: SlotNote) -> Result<()>;
    /// Lends a free slot to what comes next, likewise.
    fn post_receive(&mut self, index: usize) -> Result<()>;
    /// Moves what can be moved now, and returns the next completion.
    fn poll(&mut self) -> Result<Option<Completion>>;
    /// Tells the receiver that nothing will follow, so that it takes the end of the connection for no failure. Only with
    /// nothing posted; false: not all of it could be sent yet.
    fn say_farewell(&mut self) -> Result<bool>;
}

/// A ring's slots, in memory that lives as long as this does.
pub struct Slots {
    address: *mut u8,
    slot_bytes: usize,
    count: usize,
    _memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the address is plain data; who may touch a slot is decided by posts and completions.
unsafe impl Send for Slots {}

impl Slots {
    /// # Safety
    /// `count * slot_bytes` bytes from `address` on lie in `memory`.
    pub(crate) unsafe fn new(
        address: *mut u8,
        slot_bytes: usize,
        count: usize,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Slots {
        Slots {
            address,
            slot_bytes,
            count,
            _memory: memory,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Where the bytes from `from` on lie; None where they reach beyond the slot.
    fn range(&self, index: usize, from: usize, to: usize) -> Option<*mut u8> {
        let inside = index < self.count && from <= to && to <= self.slot_bytes;
        // SAFETY: inside the slot, which is inside the memory.
        inside.then(|| unsafe { self.address.add(index * self.slot_bytes + from) })
    }

    /// # Safety
    /// Nobody writes these bytes meanwhile: the slot is posted for sending, and not completed.
    pub(crate) unsafe fn read(&self, index: usize, from: usize, to: usize) -> &[u8] {
        match self.range(index, from, to) {
            // SAFETY: initialised memory (it was zeroed) of this length, which the caller says nobody writes.
            Some(address) => unsafe { std::slice::from_raw_parts(address, to - from) },
            None => &[],
        }
    }

    /// # Safety
    /// Nobody else touches these bytes meanwhile: the slot is posted for receiving, and not completed.
    pub(crate) unsafe fn write(&mut self, index: usize, from: usize, to: usize) -> &mut [u8] {
        match self.range(index, from, to) {
            // SAFETY: initialised memory of this length, which the caller says nobody else touches.
            Some(address) => unsafe { std::slice::from_raw_parts_mut(address, to - from) },
            None => &mut [],
        }
    }
}
