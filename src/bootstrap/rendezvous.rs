//! The root: collects the introductions of one id, compares them, and hands the roster to every rank. No I/O.
//!
//! ```text
//! Collecting --all here, all agree--> Delivered --every rank settled--> over
//!     |                                   |
//!     +--contradiction, deadline, death---+--> Failed --nobody else to tell--> over
//! ```
//!
//! After the roster went out the root stays until each rank said that it is attached to the star, so that a death in
//! between is told to the others. After a contradiction it stays until as many ranks as were expected have been told,
//! or until the deadline, so that a rank that comes late gets the same sentence.

use super::wire::{HubAddress, Message};
use super::{listed, named, Effect, Introduction, PeerId};
use crate::error::{Code, Error};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Rendezvous {
    /// With `NCCL_COMM_ID` one id serves communicator after communicator: who comes while the previous rendezvous is
    /// not over is sent away to come again.
    reusable: bool,
    phase: Phase,
    guests: BTreeMap<PeerId, Guest>,
    /// What the first guest said: the measure for the others, and the deadline for all.
    first: Option<First>,
    told: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Collecting,
    Delivered,
    Failed(Error),
    Over(Outcome),
}

/// How a rendezvous ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The communicator of so many ranks was made.
    Made(u32),
    Failed(Error),
    /// A scalable init met at another of its ids.
    Spent,
}

struct Guest {
    introduction: Introduction,
    hub: Option<HubAddress>,
}

struct First {
    introduction: Introduction,
    timeout: Duration,
    deadline: Instant,
}

impl Rendezvous {
    pub(super) fn new(reusable: bool) -> Rendezvous {
        Rendezvous {
            reusable,
            phase: Phase::Collecting,
            guests: BTreeMap::new(),
            first: None,
            told: 0,
        }
    }

    /// Whether nobody came so far.
    pub(super) fn is_untouched(&self) -> bool {
        self.phase == Phase::Collecting && self.first.is_none()
    }

    /// Whether a rank that comes now may join.
    pub(super) fn is_collecting(&self) -> bool {
        self.phase == Phase::Collecting
    }

    /// How it ended, once it did.
    pub(super) fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When `handle_time` has something to do.
    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        self.first
            .as_ref()
            .filter(|_| self.outcome().is_none())
            .map(|first| first.deadline)
    }

    /// A communicator of one rank, whose rank is in this process, needs no connection.
    pub(super) fn handle_alone(&mut self) {
        self.phase = Phase::Over(Outcome::Made(1));
    }

    pub(super) fn handle_message(&mut self, peer: PeerId, message: Message, now: Instant) -> Vec<Effect> {
        match message {
            Message::Join {
                timeout_ms,
                hub,
                introduction,
            } => self.handle_join(peer, Duration::from_millis(timeout_ms), hub, introduction, now),
            Message::Settled if self.phase == Phase::Delivered => {
                self.guests.remove(&peer);
                self.end_if_nobody_is_left();
                vec![Effect::Close(peer)]
            }
            Message::Withdraw { error } => {
                let Some(guest) = self.guests.remove(&peer) else {
                    return vec![Effect::Close(peer)];
                };
                self.told += 1;
                let Introduction { rank, place, .. } = guest.introduction;
                let mut effects = self.fail(error.within(named(rank, &place)), now);
                effects.push(Effect::Close(peer));
                effects
            }
            Message::Spent => {
                let mut effects = Vec::new();
                if self.is_untouched() {
                    self.phase = Phase::Over(Outcome::Spent);
                } else if self.is_collecting() {
                    let text = "this id is one of several of a scalable init, and a rank joined with it alone";
                    effects = self.fail(Error::usage(text), now);
                }
                effects.push(Effect::Close(peer));
                effects
            }
            _ => self
                .handle_lost(peer, now)
                .into_iter()
                .chain([Effect::Close(peer)])
                .collect(),
        }
    }

    /// The connection broke.
    pub(super) fn handle_lost(&mut self, peer: PeerId, now: Instant) -> Vec<Effect> {
        let Some(guest) = self.guests.remove(&peer) else {
            return Vec::new();
        };
        self.told += 1;
        let who = named(guest.introduction.rank, &guest.introduction.place);
        self.fail(
            Error::remote(format!(
                "{who} died or lost its connection while the ranks were joining"
            )),
            now,
        )
    }

    pub(super) fn handle_time(&mut self, now: Instant) -> Vec<Effect> {
        let Some(first) = self.first.as_ref().filter(|first| now >= first.deadline) else {
            return Vec::new();
        };
        match self.phase.clone() {
            Phase::Collecting => {
                let (ranks, timeout_ms) = (first.introduction.ranks, first.timeout.as_millis());
                let missing = self.missing();
                let text = format!("{} of {ranks} did not join within {timeout_ms} ms", listed(&missing));
                self.fail(Error::system(text), now)
            }
            // The ranks have deadlines of their own; one that neither settles nor breaks is beyond reach.
            Phase::Delivered => {
                self.phase = Phase::Over(Outcome::Made(first.introduction.ranks));
                std::mem::take(&mut self.guests)
                    .into_keys()
                    .map(Effect::Close)
                    .collect()
            }
            Phase::Failed(error) => {
                self.phase = Phase::Over(Outcome::Failed(error));
                Vec::new()
            }
            Phase::Over(_) => Vec::new(),
        }
    }

    fn handle_join(
        &mut self,
        peer: PeerId,
        timeout: Duration,
        hub: Option<HubAddress>,
        introduction: Introduction,
        now: Instant,
    ) -> Vec<Effect> {
        match &self.phase {
            Phase::Collecting => {}
            Phase::Failed(error) => {
                let effects = refuse(peer, &error.clone());
                self.told += 1;
                self.end_if_all_were_told();
                return effects;
            }
            Phase::Delivered | Phase::Over(_) if self.reusable => {
                return refuse(
                    peer,
                    &Error::new(Code::InProgress, "the previous communicator is still being made"),
                );
            }
            Phase::Delivered | Phase::Over(_) => {
                return refuse(peer, &already_used(&Outcome::Made(introduction.ranks)))
            }
        }
        let first = self.first.get_or_insert_with(|| First {
            introduction: Introduction {
                payload: Vec::new(),
                ..introduction.clone()
            },
            timeout,
            deadline: now + timeout,
        });
        let contradiction = contradiction(&first.introduction, &introduction).or_else(|| {
            let twin = self
                .guests
                .values()
                .find(|guest| guest.introduction.rank == introduction.rank)?;
            let (rank, place) = (introduction.rank, &introduction.place);
            Some(format!(
                "rank {rank} joined twice: {} and {place}",
                twin.introduction.place
            ))
        });
        let ranks = first.introduction.ranks;
        self.guests.insert(peer, Guest { introduction, hub });
        if let Some(text) = contradiction {
            return self.fail(Error::usage(text), now);
        }
        if self.guests.len() == ranks as usize {
            return self.deliver(now);
        }
        Vec::new()
    }

    fn deliver(&mut self, now: Instant) -> Vec<Effect> {
        let mut guests: Vec<&Guest> = self.guests.values().collect();
        guests.sort_by_key(|guest| guest.introduction.rank);
        let hub = guests.first().and_then(|guest| guest.hub.clone());
        let mut bytes = Message::Roster {
            ranks: guests.len() as u32,
            hub,
        }
        .to_bytes();
        for guest in guests {
            Message::Member {
                introduction: guest.introduction.clone(),
            }
            .emit(&mut bytes);
        }
        let bytes: Arc<[u8]> = bytes.into();
        self.phase = Phase::Delivered;
        if let Some(first) = &mut self.first {
            first.deadline = now + first.timeout;
        }
        self.guests
            .keys()
            .map(|peer| Effect::Send(*peer, bytes.clone()))
            .collect()
    }

    /// Tells every guest and forgets them.
    fn fail(&mut self, error: Error, now: Instant) -> Vec<Effect> {
        if matches!(self.phase, Phase::Failed(_) | Phase::Over(_)) {
            return Vec::new();
        }
        let guests = std::mem::take(&mut self.guests);
        self.told += guests.len() as u32;
        let effects = guests.into_keys().flat_map(|peer| refuse(peer, &error)).collect();
        let late = self.first.as_ref().is_none_or(|first| now >= first.deadline);
        // Ranks still to come must hear of a contradiction. A death or an abort ends the id at once: they find it used.
        self.phase = match error.code {
            Code::InvalidUsage if !late => Phase::Failed(error),
            _ => Phase::Over(Outcome::Failed(error)),
        };
        self.end_if_all_were_told();
        effects
    }

    fn end_if_all_were_told(&mut self) {
        let expected = self.first.as_ref().map_or(0, |first| first.introduction.ranks);
        if let Phase::Failed(error) = &self.phase {
            if self.told >= expected {
                self.phase = Phase::Over(Outcome::Failed(error.clone()));
            }
        }
    }

    fn end_if_nobody_is_left(&mut self) {
        if self.guests.is_empty() {
            let ranks = self.first.as_ref().map_or(0, |first| first.introduction.ranks);
            self.phase = Phase::Over(Outcome::Made(ranks));
        }
    }

    fn missing(&self) -> Vec<u32> {
        let ranks = self.first.as_ref().map_or(0, |first| first.introduction.ranks);
        let here: std::collections::BTreeSet<u32> = self.guests.values().map(|guest| guest.introduction.rank).collect();
        (0..ranks).filter(|rank| !here.contains(rank)).collect()
    }
}

/// What a rank is told that comes with an id whose rendezvous is over.
pub(super) fn already_used(outcome: &Outcome) -> Error {
    let remedy = "call ncclGetUniqueId once for each communicator";
    match outcome {
        Outcome::Made(ranks) => Error::usage(format!(
            "this id was already used for a communicator of {ranks} ranks: {remedy}"
        )),
        Outcome::Spent => Error::usage(format!(
            "this id was already used, by a scalable init with several ids: {remedy}"
        )),
        // The rank may be one of those that the init waited for.
        Outcome::Failed(error) => Error::new(
            error.code,
            format!("the init with this id failed before ({}): {remedy}", error.text),
        ),
    }
}

/// The messages that refuse a rank and close its connection.
pub(super) fn refuse(peer: PeerId, error: &Error) -> Vec<Effect> {
    let bytes = Message::Refused { error: error.clone() }.to_bytes();
    vec![Effect::Send(peer, bytes.into()), Effect::Close(peer)]
}

/// Where two ranks contradict each other, in words.
fn contradiction(first: &Introduction, other: &Introduction) -> Option<String> {
    let (a, b) = (named(first.rank, &first.place), named(other.rank, &other.place));
    if first.ranks != other.ranks {
        return Some(format!(
            "{a} was started as one of {} ranks, but {b} as one of {}",
            first.ranks, other.ranks
        ));
    }
    if first.version != other.version {
        let (first, other) = (first.version, other.version);
        return Some(format!(
            "{a} runs version {first}, but {b} version {other}: all ranks must load the same library"
        ));
    }
    (first.layout != other.layout).then(|| {
        let (first, other) = (first.layout, other.layout);
        format!("{a} runs a build with layout {first:016x}, but {b} {other:016x}: all ranks must load the same library")
    })
}
