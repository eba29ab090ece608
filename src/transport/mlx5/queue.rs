//! The CPU's way of posting to mlx5 queues: work requests into the send ring, record, doorbell, completions out of the CQ.
//!
//! Order (facts of the card): WQE, then the doorbell record, then the doorbell, each visible before the next; a completion
//! is read after its owner byte. One poster a queue, no allocation, no lock.

use crate::error::{Error, Result};
use crate::wire::mlx5::{
    doorbell, Completion, Cqe, Fence, Operation, Report, Request, BLOCK_BYTES, MAX_WQE_BYTES, UNIT_BYTES,
};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::FromBytes;

const CQE_BYTES: usize = std::mem::size_of::<Cqe>();

/// Where a QP's send queue lies: plain addresses, as one processor sees them.
#[derive(Clone, Copy, Debug)]
pub struct SendPlace {
    pub qpn: u32,
    pub ring: *mut u8,
    /// A power of two.
    pub blocks: usize,
    /// Two words; the first counts receives, the second is the next free block.
    pub record: *mut u8,
    pub doorbell: *mut u8,
}

/// Where a CQ lies.
#[derive(Clone, Copy, Debug)]
pub struct CompletionPlace {
    pub ring: *mut u8,
    /// A power of two.
    pub entries: usize,
    pub record: *mut u8,
}

/// A send queue and its only poster.
pub struct SendQueue {
    place: SendPlace,
    /// Blocks posted, and blocks whose requests are known to be done; free-running.
    next: u32,
    done: u32,
    receives: u32,
}

// SAFETY: the addresses are plain data; one owner uses them, from any thread.
unsafe impl Send for SendQueue {}

impl SendQueue {
    /// # Safety
    /// The addresses are those of a live queue, of so many blocks, for as long as this lives, and nobody else posts to it.
    pub unsafe fn new(place: SendPlace) -> SendQueue {
        SendQueue {
            place,
            next: 0,
            done: 0,
            receives: 0,
        }
    }

    /// Writes a work request and gives its index; it is not sent before `ring`.
    pub fn post(&mut self, operation: Operation, report: Report, fence: Fence) -> Result<u16> {
        let index = self.next as u16;
        let request = Request {
            index,
            qpn: self.place.qpn,
            report,
            fence,
            solicited: false,
            operation,
        };
        let mut bytes = [0; MAX_WQE_BYTES];
        let units = request
            .emit(&mut bytes)
            .map_err(|error| Error::internal(format!("a work request that no queue takes: {error:?}")))?;
        self.post_bytes(&bytes[..units * UNIT_BYTES])
    }

    /// The same for a request whose bytes are made.
    pub(crate) fn post_bytes(&mut self, bytes: &[u8]) -> Result<u16> {
        let index = self.next as u16;
        let blocks = bytes.len().div_ceil(BLOCK_BYTES);
        let used = self.next.wrapping_sub(self.done) as usize;
        if used + blocks > self.place.blocks {
            return Err(Error::internal(format!(
                "the send queue's {} blocks are full: completions have to be read first",
                self.place.blocks
            )));
        }
        for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let at = (self.next as usize + number) % self.place.blocks * BLOCK_BYTES;
            // SAFETY: within the ring; the block's last request is done, so nobody reads it.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), self.place.ring.add(at), block.len()) };
        }
        self.next = self.next.wrapping_add(blocks as u32);
        Ok(index)
    }

    /// Publishes everything that was posted.
    pub fn ring(&mut self) {
        self.record(1).store((self.next & 0xffff).to_be(), Ordering::Release);
        self.ring_with(u64::from_ne_bytes(doorbell(self.next, self.place.qpn)));
    }

    pub(crate) fn ring_with(&mut self, value: u64) {
        // SAFETY: the queue's doorbell, 8 bytes on a multiple of 8, for as long as this lives.
        let doorbell = unsafe { AtomicU64::from_ptr(self.place.doorbell.cast()) };
        doorbell.store(value, Ordering::Release);
    }

    /// The requests up to and with that of this index are done.
    pub fn completed(&mut self, index: u16) {
        let ahead = index.wrapping_sub(self.done as u16);
        // A request's length is not remembered: its first block is known to be free, and what follows it soon is.
        self.done = self.done.wrapping_add(u32::from(ahead) + 1);
    }

    /// Posts so many receives without memory, for immediates.
    pub fn post_receives(&mut self, count: u32) {
        self.receives = self.receives.wrapping_add(count);
        self.record(0)
            .store((self.receives & 0xffff).to_be(), Ordering::Release);
    }

    pub(crate) fn record(&self, word: usize) -> &AtomicU32 {
        // SAFETY: the record has two words on a multiple of 8, for as long as this lives.
        unsafe { AtomicU32::from_ptr(self.place.record.cast::<u32>().add(word)) }
    }
}

/// A CQ and its only reader.
pub struct Completions {
    place: CompletionPlace,
    consumer: u32,
}

// SAFETY: as of SendQueue.
unsafe impl Send for Completions {}

impl Completions {
    /// # Safety
    /// The addresses are those of a live CQ, of so many entries, for as long as this lives, and nobody else reads it.
    pub unsafe fn new(place: CompletionPlace) -> Completions {
        Completions { place, consumer: 0 }
    }

    /// The next completion, if it is there. Its place is free again at once.
    pub fn poll(&mut self) -> Option<Completion> {
        let at = self.consumer as usize % self.place.entries * CQE_BYTES;
        // SAFETY: the last 8 bytes of an entry of the ring; who writes them does so with one store.
        let last =
            unsafe { AtomicU64::from_ptr(self.place.ring.add(at + CQE_BYTES - 8).cast()) }.load(Ordering::Acquire);
        let [.., op_own] = last.to_ne_bytes();
        if !Cqe::is_owned(op_own, self.consumer, self.place.entries as u32) {
            return None;
        }
        let mut bytes = [0; CQE_BYTES];
        // SAFETY: the entry is the software's until the record says that it was read.
        unsafe { std::ptr::copy_nonoverlapping(self.place.ring.add(at), bytes.as_mut_ptr(), CQE_BYTES - 8) };
        bytes[CQE_BYTES - 8..].copy_from_slice(&last.to_ne_bytes());
        self.consumer = self.consumer.wrapping_add(1);
        // SAFETY: the record's first word, on a multiple of 8.
        let record = unsafe { AtomicU32::from_ptr(self.place.record.cast()) };
        record.store((self.consumer & 0xff_ffff).to_be(), Ordering::Release);
        Cqe::ref_from_bytes(&bytes).ok().map(Cqe::completion)
    }
}
