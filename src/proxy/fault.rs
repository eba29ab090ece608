//! The end of a connection, as a value.

use super::machine::Direction;
use super::Names;
use crate::error::Error;
use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub direction: Direction,
    pub names: Names,
    /// Of the last slot that was posted to send, or was received.
    pub ordinal: u64,
    pub step: u32,
    pub cause: Error,
}

impl Fault {
    /// One sentence, with the cause's code.
    pub fn error(&self) -> Error {
        self.cause.clone().within(self)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Names { rank, peer, channel } = self.names;
        let (what, came) = match self.direction {
            Direction::Send => ("sending to", "the last slot"),
            Direction::Receive => ("receiving from", "the last slot that came"),
        };
        let (ordinal, step) = (self.ordinal, self.step);
        write!(
            f,
            "rank {rank}, {what} rank {peer} on channel {channel} ({came} was of operation {ordinal}, step {step})"
        )
    }
}
