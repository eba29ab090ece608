//! How the ranks of a communicator find and trust each other.
//!
//! ```text
//! ncclGetUniqueId      the process opens a rendezvous: the root          unique_id, settings, interfaces
//! ncclCommInitRank     every rank connects to the root, introduces       handshake, wire, member
//!                      itself, and gets the roster of all                rendezvous
//! then                 every rank connects to the star at rank 0's       hub, member
//!                      process: rounds of all_gather, and liveness
//! ```
//!
//! One thread a process ("ossicle-boot") owns every socket: the listener, the roots and stars that live here, and the
//! connections of the ranks that live here. It starts at the first need and ends, with every descriptor closed, when
//! nothing needs it. `rendezvous` (root), `hub` (star) and `member` (one rank) are state machines without I/O: events
//! and the time go in, effects come out. `driver` moves bytes between them and `link`; `service` is how other threads
//! reach it; `session` is the blocking face for the communicator. A forked child has neither the thread nor the
//! descriptors (`descriptor`), and starts afresh.
//!
//! Ordering rules: a connection carries nothing but the handshake until both ends proved the secret. The roster goes
//! out once, after every check. A rank returns from `join` only when all ranks are attached to the star, so whoever
//! dies later is noticed. Rounds of the star run in lock-step: a rank sends its next contribution after the previous
//! round ended for it.

mod answer;
mod descriptor;
mod driver;
mod handshake;
mod hub;
mod interfaces;
mod link;
mod member;
mod rendezvous;
mod service;
mod session;
mod settings;
#[cfg(test)]
mod tests;
mod unique_id;
mod wire;

pub(crate) use answer::{pair as answer_pair, NoAnswer, Reply};
pub use descriptor::Descriptor;
pub(crate) use handshake::{derive, Caller, CallerStep, DoorKey, DoorStep, Doorman, Refusal, Role, Secret};
pub(crate) use link::{describe, Link, Listener};
pub use session::{create_unique_id, Session};
pub(crate) use session::{network_address, random};
pub use unique_id::UniqueId;

use std::sync::Arc;
use std::time::Duration;

/// How much longer a rank waits than the root or the star does, so that their sentence, which names the missing
/// ranks, arrives before the rank's own.
const GRACE: Duration = Duration::from_secs(2);

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

/// What a session calls from the library's thread once it is watched. Neither may wait for a lock that a caller holds
/// while it waits for peers, and neither may end the session or own it.
pub struct Watch {
    /// At most once a rank, when another rank is lost or aborts.
    pub report: Box<dyn Fn(PeerEvent) + Send>,
    /// About twice a second, for what must be looked at while every caller is inside a kernel.
    pub beat: Box<dyn Fn() + Send>,
}

/// Lets another thread end a join or a gather that waits.
#[derive(Clone, Default)]
pub struct Cancel(pub Arc<std::sync::atomic::AtomicBool>);

impl Cancel {
    pub fn is_set(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Acquire)
    }
}

/// A connection, as the machines on the listening side name it.
type PeerId = u64;

/// What a machine on the listening side (root, star) asks of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Effect {
    Send(PeerId, Arc<[u8]>),
    /// Closes when everything before it is sent.
    Close(PeerId),
}

/// "rank 3 (host:77)".
fn named(rank: u32, place: &str) -> String {
    if place.is_empty() {
        format!("rank {rank}")
    } else {
        format!("rank {rank} ({place})")
    }
}

/// "rank 3" or "ranks 3, 5 and 2 more": at most 16 by number.
fn listed(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(16).map(u32::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    match ranks.len() - shown.len() {
        0 => format!("{noun} {}", shown.join(", ")),
        more => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}
