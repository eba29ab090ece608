//! One connection in one direction: a machine between a ring and a transfer.

use super::machine::{Direction, Machine};
use super::{Fault, Names, Ring};
use crate::error::{Error, Result};
use crate::transport::net::{Completion, Transfer};

pub struct Connection {
    pub direction: Direction,
    pub ring: Ring,
    pub transfer: Box<dyn Transfer>,
    pub names: Names,
}

/// A connection that the thread drives.
pub(super) struct Driven {
    ring: Ring,
    transfer: Box<dyn Transfer>,
    names: Names,
    machine: Machine,
    ended: Option<Ended>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Fault,
    Farewell,
}

impl Driven {
    /// The ring is one that no slot went through so far.
    pub(super) fn new(connection: Connection) -> Result<Driven> {
        let Connection {
            direction,
            ring,
            mut transfer,
            names,
        } = connection;
        transfer.register(ring.slots())?;
        Ok(Driven {
            machine: Machine::new(direction, ring.count(), ring.slot_bytes()),
            ring,
            transfer,
            names,
            ended: None,
        })
    }

    pub(super) fn is_live(&self) -> bool {
        self.ended.is_none()
    }

    /// Something that the kernel filled is not sent.
    pub(super) fn is_sending(&self) -> bool {
        self.is_live() && self.machine.is_sending()
    }

    /// Moves what can be moved now; whether a slot did. A fault is its end.
    pub(super) fn advance(&mut self) -> std::result::Result<bool, Fault> {
        if !self.is_live() {
            return Ok(false);
        }
        self.step().map_err(|cause| self.end(cause))
    }

    /// Tells the receiver that nothing follows; whether it is told.
    pub(super) fn say_farewell(&mut self) -> std::result::Result<bool, Fault> {
        if !self.is_live() || self.machine.direction() == Direction::Receive {
            return Ok(true);
        }
        match self.transfer.say_farewell() {
            Ok(true) => self.ended = Some(Ended::Farewell),
            Ok(false) => {}
            Err(cause) => return Err(self.end(cause)),
        }
        Ok(!self.is_live())
    }

    pub(super) fn end(&mut self, cause: Error) -> Fault {
        self.ended = Some(Ended::Fault);
        let note = self.machine.last_note();
        Fault {
            direction: self.machine.direction(),
            names: self.names,
            ordinal: note.ordinal,
            step: note.step,
            cause,
        }
    }

    fn step(&mut self) -> Result<bool> {
        let own = |breach| Error::internal(format!("{breach}: a defect, or the library's memory was overwritten"));
        let peers = |breach| Error::remote(format!("{breach}: all ranks must load the same build of the library"));
        let direction = self.machine.direction();
        let position = self.ring.kernel_position(direction);
        self.machine.handle_kernel(position).map_err(own)?;
        while let Some(index) = self.machine.poll_post() {
            match direction {
                Direction::Send => {
                    let note = self.ring.note(index);
                    self.machine.handle_note(note).map_err(own)?;
                    self.transfer.post_send(index, note)?;
                }
                Direction::Receive => self.transfer.post_receive(index)?,
            }
        }
        let mut moved = false;
        // At most the ring once, so that a busy connection leaves time for the others.
        for _ in 0..self.ring.count() {
            let index = match self.transfer.poll()? {
                None => break,
                Some(Completion::Sent(index)) => index,
                Some(Completion::Received(index, note)) => {
                    self.machine.handle_note(note).map_err(peers)?;
                    self.ring.set_note(index, note);
                    index
                }
            };
            self.machine.handle_completion(index).map_err(own)?;
            // One by one: the kernel goes on with the first slot while the second is under way.
            if let Some(position) = self.machine.poll_tell() {
                self.ring.publish(direction, position);
            }
            moved = true;
        }
        Ok(moved)
    }
}
