//! How the ranks of a communicator find and trust each other (under construction).

use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// The 128 bytes of `ncclUniqueId`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// Makes an id whose rendezvous this process serves (`ncclGetUniqueId`).
pub fn create_unique_id() -> Result<UniqueId> {
    Err(Error::internal("under construction"))
}

/// What a rank says of itself when it joins; the root compares them and hands all of them to everyone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    pub rank: u32,
    pub ranks: u32,
    /// `ncclGetVersion`'s number; all ranks must agree.
    pub version: u32,
    /// Fingerprint of the wire and memory layouts of this build; all ranks must agree.
    pub layout: u64,
    /// For messages: "host:pid".
    pub place: String,
    /// Opaque to the bootstrap; at most 64 KiB.
    pub payload: Vec<u8>,
}

/// What the liveness connection reports of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// The rank's process died or its connection broke without a farewell.
    Lost { rank: u32, place: String },
    /// The rank called ncclCommAbort.
    Aborted { rank: u32, place: String },
}

/// Lets another thread end a join or a gather that waits.
#[derive(Clone, Default)]
pub struct Cancel(pub Arc<std::sync::atomic::AtomicBool>);

/// One rank's membership in a communicator.
pub struct Session {
    _private: (),
}

impl Session {
    /// Joins and returns the introductions of all ranks, in rank order. Every rank gets an error if any rank is
    /// missing after `timeout` (naming the missing ones) or if the ranks contradict each other.
    pub fn join(
        _ids: &[UniqueId],
        _introduction: Introduction,
        _timeout: Duration,
        _cancel: &Cancel,
    ) -> Result<(Session, Vec<Introduction>)> {
        Err(Error::internal("under construction"))
    }

    /// Every rank contributes a payload (at most 1 MiB) and gets all of them in rank order. A rank that fails may
    /// contribute an error instead, which every rank then returns, naming it.
    pub fn all_gather(&self, _payload: Result<Vec<u8>>, _timeout: Duration, _cancel: &Cancel) -> Result<Vec<Vec<u8>>> {
        Err(Error::internal("under construction"))
    }

    /// Calls `report` from a library thread, at most once a rank, when another rank is lost or aborts.
    pub fn watch(&self, _report: Box<dyn Fn(PeerEvent) + Send>) {}

    /// Equal on all ranks of this communicator, and on no other's.
    pub fn identity(&self) -> u64 {
        0
    }

    /// Says farewell and closes: peers see no error.
    pub fn leave(self) {}

    /// Tells the peers that this rank aborts, and closes.
    pub fn abort(self) {}
}
