//! A transfer over one queue pair of an HCA, whose work requests a CPU thread posts.
//!
//! ```text
//! sender                               WRITE           receiver
//! slot i            --- payload ---------------------> slot i
//!                   --- note (inline) ---------------> landing: note i
//!                   --- slots sent (inline word) ----> landing: counter
//! landing: counter  <-- slots lent (inline word) ------
//! ```
//!
//! Both rings have as many slots, so slot i goes to slot i. The word comes last and becomes visible last; its completion
//! is the slot's. All slots are free at first: only what is lent again is told.
//!
//! The end of a peer's queue pair is no message, so that there is nothing to say farewell for. A sender's queue pair
//! fails when its peer is silent for too long, and of a peer that was lost the session tells.

use super::{Completion, SlotNote, Slots, Transfer};
use crate::error::{Error, Result};
use crate::transport::hca;
use crate::transport::mlx5::{Completions, SendQueue};
use crate::wire::mlx5::{self, syndrome, syndrome_text, Data, Fence, List, Operation, Outcome, Remote, Report};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A channel's landing places begin with the counter, in a line of its own.
const LINE: usize = 128;
/// Requests of a slot, of one block each.
const REQUESTS: usize = 3;

/// Landing places of a channel with so many slots: a counter and their notes.
pub(crate) fn landing_bytes(slots: usize) -> usize {
    LINE + (slots * size_of::<SlotNote>()).next_multiple_of(LINE)
}

/// Memory of one side that requests name.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) slots: u64,
    pub(crate) landing: u64,
    pub(crate) key: u32,
}

/// A connected queue pair, all of which lives as long as `kept`.
pub(crate) struct Queue {
    pub(crate) sends: SendQueue,
    pub(crate) blocks: usize,
    pub(crate) completions: Completions,
    pub(crate) local: Place,
    pub(crate) remote: Place,
    /// It may sleep when a doorbell is rung.
    pub(crate) card: Arc<hca::Hca>,
    pub(crate) _kept: Arc<dyn Any + Send + Sync>,
}

pub(crate) struct Hca {
    queue: Queue,
    slots: Option<Slots>,
    /// Sends that were not given to the queue.
    waiting: VecDeque<(usize, SlotNote)>,
    /// Those whose completion is due, and likewise words that lend.
    under_way: VecDeque<usize>,
    lending: usize,
    /// Slots given to the queue, and slots lent.
    sent: u64,
    lent: u64,
    /// What the peer was told of the latter.
    told: u64,
    received: u64,
}

impl Hca {
    pub(crate) fn new(queue: Queue) -> Hca {
        Hca {
            queue,
            slots: None,
            waiting: VecDeque::new(),
            under_way: VecDeque::new(),
            lending: 0,
            sent: 0,
            lent: 0,
            told: 0,
            received: 0,
        }
    }

    fn count(&self) -> Result<usize> {
        let none = || Error::internal("a transfer was used before its slots were registered");
        self.slots.as_ref().map(Slots::count).ok_or_else(none)
    }

    /// What the peer has told.
    fn counter(&self) -> u64 {
        // SAFETY: a word on a multiple of 8 in memory that the queue keeps; the HCA writes it with one store.
        unsafe { &*(self.queue.local.landing as *const AtomicU64) }.load(Ordering::Acquire)
    }

    fn landed(&self, index: usize) -> SlotNote {
        let notes = self.queue.local.landing as usize + LINE;
        // SAFETY: inside the landing places; the counter has passed the note, and the sender leaves it alone until the slot
        // is lent again.
        unsafe { (notes as *const SlotNote).add(index).read() }
    }

    fn write(&mut self, address: u64, data: Data, report: Report) -> Result<()> {
        let rkey = self.queue.remote.key;
        let operation = Operation::Write {
            remote: Remote { address, rkey },
            immediate: None,
            data: List::Borrowed(&[data]),
        };
        self.queue.sends.post(operation, report, Fence::None).map(drop)
    }

    fn write_counter(&mut self, value: u64) -> Result<()> {
        let landing = self.queue.remote.landing;
        self.write(landing, Data::Inline(&value.to_ne_bytes()), Report::Always)
    }

    fn write_slot(&mut self, index: usize, note: SlotNote) -> Result<()> {
        let (local, remote) = (self.queue.local, self.queue.remote);
        let offset = (index * self.slots.as_ref().map_or(0, Slots::slot_bytes)) as u64;
        if note.bytes > 0 {
            let payload = mlx5::Memory {
                address: local.slots + offset,
                lkey: local.key,
                bytes: note.bytes,
            };
            self.write(remote.slots + offset, Data::Memory(payload), Report::OnError)?;
        }
        let mut bytes = [0; size_of::<SlotNote>()];
        bytes[..4].copy_from_slice(&note.bytes.to_ne_bytes());
        bytes[4..8].copy_from_slice(&note.step.to_ne_bytes());
        bytes[8..].copy_from_slice(&note.ordinal.to_ne_bytes());
        let landing = remote.landing + (LINE + index * bytes.len()) as u64;
        self.write(landing, Data::Inline(&bytes), Report::OnError)?;
        self.write_counter(self.sent + 1)
    }

    /// Gives the queue what it and the peer can take, with one doorbell.
    fn post(&mut self) -> Result<()> {
        let count = self.count()? as u64;
        let mut posted = false;
        if self.lent > self.told.max(count) && self.lending < self.queue.blocks {
            self.write_counter(self.lent)?;
            self.told = self.lent;
            self.lending += 1;
            posted = true;
        }
        while let Some((index, note)) = self.waiting.front().copied() {
            let free = self.sent < self.counter().max(count);
            if !free || (self.under_way.len() + 1) * REQUESTS > self.queue.blocks {
                break;
            }
            self.write_slot(index, note)?;
            self.waiting.pop_front();
            self.under_way.push_back(index);
            self.sent += 1;
            posted = true;
        }
        if posted {
            self.queue.sends.ring();
            self.queue.card.wake();
        }
        Ok(())
    }

    /// The next slot that is sent.
    fn complete(&mut self) -> Result<Option<usize>> {
        while let Some(completion) = self.queue.completions.poll() {
            match completion.outcome {
                Outcome::Sent { .. } => self.queue.sends.completed(completion.index),
                Outcome::Failed { syndrome, vendor, .. } => return Err(failed(syndrome, vendor)),
                other => {
                    return Err(Error::internal(format!(
                        "a completion that nobody asked for: {other:?}"
                    )))
                }
            }
            match self.under_way.pop_front() {
                Some(index) => return Ok(Some(index)),
                None => self.lending = self.lending.saturating_sub(1),
            }
        }
        Ok(None)
    }

    fn check(&self, index: usize, position: u64) -> Result<()> {
        let count = self.count()? as u64;
        match index as u64 == position % count {
            true => Ok(()),
            false => Err(Error::internal(format!(
                "slot {index} of {count} was posted where slot {} is due",
                position % count
            ))),
        }
    }
}

fn failed(code: u8, vendor: u8) -> Error {
    let text = format!(
        "a work request failed: syndrome {code:#04x}, vendor syndrome {vendor:#04x}: {}",
        syndrome_text(code)
    );
    match code {
        syndrome::LOCAL_LENGTH | syndrome::LOCAL_QP_OP | syndrome::LOCAL_PROTECTION | 0x11 => Error::system(text),
        _ => Error::remote(text),
    }
}

impl Transfer for Hca {
    fn register(&mut self, slots: Slots) -> Result<()> {
        if self.slots.is_some() {
            return Err(Error::internal("the slots of a transfer were registered twice"));
        }
        // Nothing is allocated once slots move.
        self.waiting.reserve(slots.count());
        self.under_way.reserve(slots.count());
        self.slots = Some(slots);
        Ok(())
    }

    fn post_send(&mut self, index: usize, note: SlotNote) -> Result<()> {
        self.check(index, self.sent + self.waiting.len() as u64)?;
        self.waiting.push_back((index, note));
        Ok(())
    }

    fn post_receive(&mut self, index: usize) -> Result<()> {
        self.check(index, self.lent)?;
        self.lent += 1;
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Completion>> {
        self.post()?;
        if let Some(index) = self.complete()? {
            return Ok(Some(Completion::Sent(index)));
        }
        // A sender lends nothing: what its counter says is of no account here.
        if self.received == self.lent {
            return Ok(None);
        }
        let landed = self.counter();
        if landed < self.received || landed > self.lent {
            return Err(Error::remote(format!(
                "the peer says that {landed} slots were sent, where {} to {} are due: all ranks must load the same build of \
                 the library",
                self.received, self.lent
            )));
        }
        if landed == self.received {
            return Ok(None);
        }
        let index = (self.received % self.count()? as u64) as usize;
        self.received += 1;
        Ok(Some(Completion::Received(index, self.landed(index))))
    }

    fn say_farewell(&mut self) -> Result<bool> {
        Ok(self.waiting.is_empty() && self.under_way.is_empty())
    }
}
