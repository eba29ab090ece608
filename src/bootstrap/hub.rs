//! The star of one session, at rank 0's process: rounds of all_gather, and who is alive. No I/O.
//!
//! Every rank, rank 0 too, has one connection here. Until all are attached any loss refuses the session to everyone;
//! afterwards a loss, an abort or a farewell is told to the others. The star stays until every rank has gone, also
//! when rank 0's communicator was destroyed first, as long as the process lives.

use super::rendezvous::refuse;
use super::wire::{Fate, Message};
use super::{listed, named, Effect, PeerId};
use crate::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Hub {
    slots: Vec<Slot>,
    attached: u32,
    /// Whether every rank has been attached at once.
    complete: bool,
    attach_deadline: Option<(Instant, Duration)>,
    round: u64,
    round_deadline: Option<(Instant, Duration)>,
    /// Why no further round can succeed.
    broken: Option<Error>,
    over: bool,
}

#[derive(Default)]
struct Slot {
    peer: Option<PeerId>,
    place: String,
    fate: Option<Fate>,
    contribution: Option<Result<Vec<u8>, Error>>,
}

impl Hub {
    pub(super) fn new(ranks: u32) -> Hub {
        Hub {
            slots: (0..ranks).map(|_| Slot::default()).collect(),
            attached: 0,
            complete: false,
            attach_deadline: None,
            round: 0,
            round_deadline: None,
            broken: None,
            over: false,
        }
    }

    /// Whether nobody needs the star any more.
    pub(super) fn is_over(&self) -> bool {
        self.over || (self.complete && self.attached == 0)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// When `handle_time` has something to do.
    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        let deadline = if self.complete {
            self.round_deadline
        } else {
            self.attach_deadline
        };
        deadline.map(|(deadline, _)| deadline)
    }

    pub(super) fn handle_message(&mut self, peer: PeerId, message: Message, now: Instant) -> Vec<Effect> {
        if let Message::Attach {
            rank,
            timeout_ms,
            place,
        } = message
        {
            return self.handle_attach(peer, rank, Duration::from_millis(timeout_ms), place, now);
        }
        let Some(rank) = self.rank_of(peer) else {
            return vec![Effect::Close(peer)];
        };
        match message {
            Message::Contribution {
                round,
                timeout_ms,
                payload,
            } => self.handle_contribution(rank, peer, round, Duration::from_millis(timeout_ms), payload, now),
            Message::Farewell => self.part_with(rank, peer, Fate::Left),
            Message::Aborting => self.part_with(rank, peer, Fate::Aborted),
            _ => self.part_with(rank, peer, Fate::Lost),
        }
    }

    /// The connection broke.
    pub(super) fn handle_lost(&mut self, peer: PeerId) -> Vec<Effect> {
        self.rank_of(peer)
            .map_or_else(Vec::new, |rank| self.part_with(rank, peer, Fate::Lost))
    }

    pub(super) fn handle_time(&mut self, now: Instant) -> Vec<Effect> {
        let due =
            |deadline: Option<(Instant, Duration)>| deadline.filter(|(at, _)| now >= *at).map(|(_, timeout)| timeout);
        if !self.complete {
            let Some(timeout) = due(self.attach_deadline) else {
                return Vec::new();
            };
            let missing = self.ranks_where(|slot| slot.peer.is_none());
            let text = format!(
                "{} joined but did not reach rank 0 within {} ms",
                listed(&missing),
                timeout.as_millis()
            );
            return self.refuse_all(&Error::system(text));
        }
        let Some(timeout) = due(self.round_deadline) else {
            return Vec::new();
        };
        let missing = self.ranks_where(|slot| slot.contribution.is_none());
        let text = format!(
            "{} did not take part in an exchange within {} ms",
            listed(&missing),
            timeout.as_millis()
        );
        self.break_rounds(Error::system(text))
    }

    fn handle_attach(
        &mut self,
        peer: PeerId,
        rank: u32,
        timeout: Duration,
        place: String,
        now: Instant,
    ) -> Vec<Effect> {
        match self.slots.get_mut(rank as usize) {
            Some(slot) if slot.peer.is_none() && slot.fate.is_none() && !self.over => {
                slot.peer = Some(peer);
                slot.place = place;
            }
            _ => {
                return refuse(
                    peer,
                    &Error::usage(format!("rank {rank} has no free place in this session")),
                )
            }
        }
        self.attached += 1;
        self.attach_deadline.get_or_insert((now + timeout, timeout));
        if self.attached as usize == self.slots.len() {
            self.complete = true;
            return self.broadcast(Message::Complete.to_bytes());
        }
        Vec::new()
    }

    fn handle_contribution(
        &mut self,
        rank: u32,
        peer: PeerId,
        round: u64,
        timeout: Duration,
        payload: Result<Vec<u8>, Error>,
        now: Instant,
    ) -> Vec<Effect> {
        if let Some(error) = self.broken.clone() {
            return vec![Effect::Send(
                peer,
                Message::RoundFailed { round, error }.to_bytes().into(),
            )];
        }
        let slot = &mut self.slots[rank as usize];
        if round != self.round || slot.contribution.is_some() || !self.complete {
            // A rank that is out of step has lost count; its connection is worth nothing.
            return self.part_with(rank, peer, Fate::Lost);
        }
        slot.contribution = Some(payload);
        self.round_deadline.get_or_insert((now + timeout, timeout));
        self.end_round_if_full()
    }

    fn end_round_if_full(&mut self) -> Vec<Effect> {
        if self.slots.iter().any(|slot| slot.contribution.is_none()) {
            return match self.gone_before_contributing() {
                Some(error) if self.round_deadline.is_some() => self.break_rounds(error),
                _ => Vec::new(),
            };
        }
        let round = self.round;
        let mut bytes = Vec::new();
        let mut failure = None;
        for (rank, slot) in self.slots.iter_mut().enumerate() {
            match slot.contribution.take() {
                Some(Ok(payload)) => Message::Part { round, payload }.emit(&mut bytes),
                Some(Err(error)) if failure.is_none() => failure = Some(error.within(named(rank as u32, &slot.place))),
                _ => {}
            }
        }
        if let Some(error) = failure {
            bytes = Message::RoundFailed { round, error }.to_bytes();
        }
        self.round += 1;
        self.round_deadline = None;
        self.broadcast(bytes)
    }

    /// The error of a round that some rank will never take part in.
    fn gone_before_contributing(&self) -> Option<Error> {
        let gone = |slot: &Slot| slot.contribution.is_none() && slot.fate.is_some();
        let (rank, slot) = self.slots.iter().enumerate().find(|(_, slot)| gone(slot))?;
        let what = match slot.fate? {
            Fate::Lost => "died or lost its connection",
            Fate::Aborted => "aborted the communicator",
            Fate::Left => "destroyed the communicator",
        };
        Some(Error::remote(format!("{} {what}", named(rank as u32, &slot.place))))
    }

    /// Ends the round of those that contributed, and every later one, with this error.
    fn break_rounds(&mut self, error: Error) -> Vec<Effect> {
        let round = self.round;
        self.broken = Some(error.clone());
        self.round_deadline = None;
        let bytes: Arc<[u8]> = Message::RoundFailed { round, error }.to_bytes().into();
        let waiting = self
            .slots
            .iter()
            .filter(|slot| slot.contribution.is_some())
            .filter_map(|slot| slot.peer);
        waiting.map(|peer| Effect::Send(peer, bytes.clone())).collect()
    }

    fn part_with(&mut self, rank: u32, peer: PeerId, fate: Fate) -> Vec<Effect> {
        let slot = &mut self.slots[rank as usize];
        slot.peer = None;
        slot.fate = Some(fate);
        let place = slot.place.clone();
        self.attached -= 1;
        let mut effects = vec![Effect::Close(peer)];
        if !self.complete {
            let who = named(rank, &place);
            effects.extend(self.refuse_all(&Error::remote(format!(
                "{who} died or gave up while the ranks were joining"
            ))));
            return effects;
        }
        effects.extend(self.broadcast(Message::Event { rank, fate, place }.to_bytes()));
        if self.broken.is_none() {
            effects.extend(self.end_round_if_full());
        }
        effects
    }

    fn refuse_all(&mut self, error: &Error) -> Vec<Effect> {
        self.over = true;
        self.slots
            .iter_mut()
            .filter_map(|slot| slot.peer.take())
            .flat_map(|peer| refuse(peer, error))
            .collect()
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Vec<Effect> {
        let bytes: Arc<[u8]> = bytes.into();
        self.slots
            .iter()
            .filter_map(|slot| slot.peer)
            .map(|peer| Effect::Send(peer, bytes.clone()))
            .collect()
    }

    fn rank_of(&self, peer: PeerId) -> Option<u32> {
        self.slots
            .iter()
            .position(|slot| slot.peer == Some(peer))
            .map(|rank| rank as u32)
    }

    fn ranks_where(&self, holds: impl Fn(&Slot) -> bool) -> Vec<u32> {
        (0..)
            .zip(&self.slots)
            .filter(|(_, slot)| holds(slot))
            .map(|(rank, _)| rank)
            .collect()
    }
}
