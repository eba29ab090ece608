//! What is to be done with the slots of one connection in one direction. Nothing here does I/O.
//!
//! Three positions count up for ever, and the kernel's makes a fourth; where a slot stands between them is its state:
//!
//! | state | of a send | of a receive | which positions | goes on by |
//! |---|---|---|---|---|
//! | Kernel | being filled | being drained | from `limit` on | `handle_kernel` |
//! | Ready | filled | free | `posted..limit` | `poll_post` |
//! | Posted | under way | under way | `moved..posted` | `handle_completion` |
//! | Moved | transmitted | received | `told..moved` | `poll_tell` |
//! | Done | free for the kernel | filled for the kernel | below `told` | |
//!
//! `limit` is what the kernel published: the tail of a send ring; the head of a receive ring and all its slots. A receive
//! is posted as soon as a slot is free, a send as soon as one is filled: slots describe themselves, so nobody needs to
//! know which operation moves. Whatever does not fit into the table is a `Breach`, and the end of the connection.

use crate::transport::net::SlotNote;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The kernel fills slots.
    Send,
    /// The kernel drains slots.
    Receive,
}

/// What a kernel, or the other side, may not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// The kernel's counter went back, or beyond what the ring holds.
    Counter { found: u64, least: u64, most: u64 },
    /// A completion for another slot than the one that is due.
    Completion { found: usize, due: Option<usize> },
    /// A note says more bytes than a slot has.
    Bytes { found: u32, most: u32 },
    /// A note of an operation before the last one.
    Ordinal { found: u64, last: u64 },
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Breach::Counter { found, least, most } => {
                write!(f, "the kernel's counter is {found}, and may be {least} to {most}")
            }
            Breach::Completion { found, due: Some(due) } => write!(f, "slot {found} is done where slot {due} is due"),
            Breach::Completion { found, due: None } => write!(f, "slot {found} is done and was not posted"),
            Breach::Bytes { found, most } => write!(f, "a slot says that it has {found} bytes, and holds {most}"),
            Breach::Ordinal { found, last } => write!(f, "a slot of operation {found} follows one of operation {last}"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Machine {
    direction: Direction,
    slots: u64,
    slot_bytes: u32,
    limit: u64,
    posted: u64,
    moved: u64,
    told: u64,
    /// Of the last note.
    last: SlotNote,
}

impl Machine {
    /// Over a ring of which no slot was used so far.
    pub fn new(direction: Direction, slots: usize, slot_bytes: usize) -> Machine {
        let slots = slots as u64;
        Machine {
            direction,
            slots,
            slot_bytes: slot_bytes.try_into().unwrap_or(u32::MAX),
            limit: match direction {
                Direction::Send => 0,
                Direction::Receive => slots,
            },
            posted: 0,
            moved: 0,
            told: 0,
            last: SlotNote::default(),
        }
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    fn index(&self, position: u64) -> usize {
        (position % self.slots) as usize
    }

    /// The kernel published `position`.
    pub fn handle_kernel(&mut self, position: u64) -> Result<(), Breach> {
        let (least, most) = match self.direction {
            Direction::Send => (self.limit, self.told + self.slots),
            Direction::Receive => (self.limit - self.slots, self.told),
        };
        if position < least || position > most {
            let found = position;
            return Err(Breach::Counter { found, least, most });
        }
        self.limit = match self.direction {
            Direction::Send => position,
            Direction::Receive => position + self.slots,
        };
        Ok(())
    }

    /// The next slot to be posted, if there is one. A send's note is then given to `handle_note`.
    pub fn poll_post(&mut self) -> Option<usize> {
        if self.posted == self.limit {
            return None;
        }
        let index = self.index(self.posted);
        self.posted += 1;
        Some(index)
    }

    /// What a slot says of itself that is to be sent, or was received.
    pub fn handle_note(&mut self, note: SlotNote) -> Result<(), Breach> {
        if note.bytes > self.slot_bytes {
            return Err(Breach::Bytes {
                found: note.bytes,
                most: self.slot_bytes,
            });
        }
        if note.ordinal < self.last.ordinal {
            return Err(Breach::Ordinal {
                found: note.ordinal,
                last: self.last.ordinal,
            });
        }
        self.last = note;
        Ok(())
    }

    /// A slot is sent or received.
    pub fn handle_completion(&mut self, index: usize) -> Result<(), Breach> {
        let due = (self.moved < self.posted).then(|| self.index(self.moved));
        if due != Some(index) {
            return Err(Breach::Completion { found: index, due });
        }
        self.moved += 1;
        Ok(())
    }

    /// What the kernel is to be told, if it does not know it.
    pub fn poll_tell(&mut self) -> Option<u64> {
        if self.told == self.moved {
            return None;
        }
        self.told = self.moved;
        Some(self.told)
    }

    /// Something that the kernel filled is not sent. Receives are of no account: the kernel that needs them asks.
    pub fn is_sending(&self) -> bool {
        self.direction == Direction::Send && self.told < self.limit
    }

    /// The note that came last, for messages.
    pub fn last_note(&self) -> SlotNote {
        self.last
    }

    #[cfg(test)]
    pub(super) fn state(&self, position: u64) -> State {
        match position {
            p if p < self.told => State::Done,
            p if p < self.moved => State::Moved,
            p if p < self.posted => State::Posted,
            p if p < self.limit => State::Ready,
            _ => State::Kernel,
        }
    }

    /// As after `positions` slots went through.
    #[cfg(test)]
    pub(super) fn at(mut self, positions: u64) -> Machine {
        self.limit += positions;
        (self.posted, self.moved, self.told) = (positions, positions, positions);
        self
    }
}

#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Kernel,
    Ready,
    Posted,
    Moved,
    Done,
}
