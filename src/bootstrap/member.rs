//! One rank's side: meets the others at the root, attaches to the star, takes part in rounds, watches. No I/O.
//!
//! ```text
//! Opening --the root's port is bound (rank 0 with NCCL_COMM_ID only)--> Meeting --roster--> Attaching
//! Attaching --every rank is attached--> Live --farewell or abort--> Leaving --the star hung up--> Done
//! ```
//!
//! Every phase but Live has a deadline; any failure before Live goes to the root as `Withdraw`, so that the other ranks
//! hear of it at once, and ends in Done.

use super::handshake::{derive, DoorKey, Refusal, Role, Secret};
use super::unique_id::{Host, Root};
use super::wire::{Fate, HubAddress, Message};
use super::{named, Introduction, PeerEvent, GRACE};
use crate::error::{Code, Error};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long a listener that should be there may be absent: it is being opened, or its backlog is full.
const PATIENCE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long a rank that leaves waits for the star to hang up.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The two connections of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Root,
    Star,
}

/// What a rank asks of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Bind the root's address and serve the rendezvous there; answered by `handle_door`.
    OpenDoor,
    Connect {
        side: Side,
        address: SocketAddr,
        key: DoorKey,
        secret: Secret,
    },
    Send(Side, Vec<u8>),
    /// When everything before it is sent.
    Close(Side),
    Joined(Vec<Introduction>),
    Failed(Error),
    Round(Result<Vec<Vec<u8>>, Error>),
    Report(PeerEvent),
    /// Nothing more will come.
    Done,
}

/// What went wrong with a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It could not be made, or it ended; in words.
    Broken(String),
    /// The handshake ended without agreement.
    Refused(Refusal),
}

/// Why the root's address could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DoorTrouble {
    /// The rendezvous of the previous communicator with this `NCCL_COMM_ID` is not over.
    PreviousInit,
    InUse(Error),
    Other(Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Farewell {
    Leave,
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    Meeting,
    Attaching,
    Live,
    Leaving,
    Done,
}

pub(super) struct Member {
    root: Root,
    introduction: Introduction,
    timeout: Duration,
    /// The star: rank 0 offers it, the others learn it from the roster.
    hub: Option<HubAddress>,
    phase: Phase,
    deadline: Instant,
    /// Whether the connection of this phase passed the handshake, and this rank's first message is sent.
    root_ready: bool,
    star_ready: bool,
    failing_since: Option<Instant>,
    pause: Duration,
    retry_at: Option<Instant>,
    trouble: Option<Error>,
    roster: Vec<Introduction>,
    rank0_place: String,
    rank0_left: bool,
    reported: BTreeSet<u32>,
    round: u64,
    parts: Vec<Vec<u8>>,
    gathering: bool,
    /// Why no further round can succeed.
    broken: Option<Error>,
}

impl Member {
    /// `hub` is what rank 0 offers.
    pub(super) fn new(
        root: Root,
        introduction: Introduction,
        hub: Option<HubAddress>,
        timeout: Duration,
        now: Instant,
    ) -> Member {
        let opens = root.host == Host::RankZero && introduction.rank == 0;
        Member {
            root,
            introduction,
            timeout,
            hub,
            phase: if opens { Phase::Opening } else { Phase::Meeting },
            deadline: now + timeout + GRACE,
            root_ready: false,
            star_ready: false,
            failing_since: None,
            pause: FIRST_PAUSE,
            retry_at: None,
            trouble: None,
            roster: Vec::new(),
            rank0_place: String::new(),
            rank0_left: false,
            reported: BTreeSet::new(),
            round: 0,
            parts: Vec::new(),
            gathering: false,
            broken: None,
        }
    }

    /// When `handle_time` has something to do.
    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Live | Phase::Done => None,
            _ => Some(self.retry_at.map_or(self.deadline, |at| at.min(self.deadline))),
        }
    }

    /// What the current phase does first, also when it is tried again.
    pub(super) fn begin(&self) -> Vec<Action> {
        match (self.phase, &self.hub) {
            (Phase::Opening, _) => vec![Action::OpenDoor],
            (Phase::Meeting, _) => vec![Action::Connect {
                side: Side::Root,
                address: self.root.address,
                key: DoorKey {
                    role: Role::Rendezvous,
                    number: self.root.uid,
                },
                secret: self.root.secret,
            }],
            (Phase::Attaching, Some(hub)) => vec![Action::Connect {
                side: Side::Star,
                address: hub.address,
                key: DoorKey {
                    role: Role::Star,
                    number: hub.session,
                },
                secret: star_secret(&self.root.secret, hub),
            }],
            _ => Vec::new(),
        }
    }

    pub(super) fn handle_time(&mut self, now: Instant) -> Vec<Action> {
        if self.poll_deadline().is_some_and(|_| now >= self.deadline) {
            return match self.phase {
                Phase::Leaving => self.done(),
                _ => self.handle_deadline(),
            };
        }
        match self.retry_at {
            Some(at) if now >= at => {
                self.retry_at = None;
                self.begin()
            }
            _ => Vec::new(),
        }
    }

    fn handle_deadline(&mut self) -> Vec<Action> {
        let timeout_ms = self.timeout.as_millis();
        let error = self.trouble.take().unwrap_or_else(|| match self.phase {
            Phase::Attaching => Error::remote(format!(
                "{} did not let this rank attach within {timeout_ms} ms",
                self.rank0()
            )),
            _ => Error::system(format!(
                "the root at {} did not answer within {timeout_ms} ms",
                self.root.address
            )),
        });
        self.fail(error)
    }

    pub(super) fn handle_door(&mut self, result: Result<(), DoorTrouble>, now: Instant) -> Vec<Action> {
        if self.phase != Phase::Opening {
            return Vec::new();
        }
        match result {
            Ok(()) => {
                self.phase = Phase::Meeting;
                self.forget_trouble();
                self.begin()
            }
            Err(DoorTrouble::PreviousInit) => self.retry(
                Error::usage("the previous communicator with this NCCL_COMM_ID is still being made"),
                None,
                now,
            ),
            Err(DoorTrouble::InUse(error)) => self.retry(error, Some(PATIENCE), now),
            Err(DoorTrouble::Other(error)) => self.fail(error),
        }
    }

    /// The handshake of a connection succeeded.
    pub(super) fn handle_ready(&mut self, side: Side) -> Vec<Action> {
        self.forget_trouble();
        let timeout_ms = self.timeout.as_millis() as u64;
        let message = match side {
            Side::Root => {
                self.root_ready = true;
                let introduction = self.introduction.clone();
                Message::Join {
                    timeout_ms,
                    hub: self.hub.clone(),
                    introduction,
                }
            }
            Side::Star => {
                self.star_ready = true;
                let Introduction { rank, place, .. } = &self.introduction;
                Message::Attach {
                    rank: *rank,
                    timeout_ms,
                    place: place.clone(),
                }
            }
        };
        vec![Action::Send(side, message.to_bytes())]
    }

    pub(super) fn handle_message(&mut self, side: Side, message: Message, now: Instant) -> Vec<Action> {
        match (side, message) {
            (Side::Root, Message::Roster { ranks, hub })
                if self.phase == Phase::Meeting && ranks == self.introduction.ranks =>
            {
                self.hub = hub;
                Vec::new()
            }
            (Side::Root, Message::Member { introduction })
                if self.phase == Phase::Meeting && introduction.rank as usize == self.roster.len() =>
            {
                if introduction.rank == 0 {
                    self.rank0_place.clone_from(&introduction.place);
                }
                self.roster.push(introduction);
                self.end_meeting(now)
            }
            (Side::Root, Message::Refused { error }) => match self.phase {
                Phase::Meeting if error.code == Code::InProgress => {
                    self.root_ready = false;
                    let mut actions = vec![Action::Close(Side::Root)];
                    actions.extend(self.retry(error, None, now));
                    actions
                }
                Phase::Meeting | Phase::Attaching => {
                    self.root_ready = false;
                    self.fail(error)
                }
                _ => Vec::new(),
            },
            (Side::Star, Message::Refused { error }) if self.phase == Phase::Attaching => self.fail(error),
            (Side::Star, Message::Complete) if self.phase == Phase::Attaching => self.join(),
            (Side::Star, Message::Part { round, payload }) if self.gathering && round == self.round => {
                self.parts.push(payload);
                if self.parts.len() < self.introduction.ranks as usize {
                    return Vec::new();
                }
                let parts = std::mem::take(&mut self.parts);
                self.end_round(Ok(parts))
            }
            (Side::Star, Message::RoundFailed { round, error }) if self.gathering && round == self.round => {
                self.end_round(Err(error))
            }
            (Side::Star, Message::Event { rank, fate, place }) => self.handle_event(rank, fate, place),
            _ => {
                let mut actions = vec![Action::Close(side)];
                actions.extend(self.handle_trouble(
                    side,
                    Trouble::Broken("it sent what does not belong here".into()),
                    now,
                ));
                actions
            }
        }
    }

    fn end_meeting(&mut self, now: Instant) -> Vec<Action> {
        if self.roster.len() < self.introduction.ranks as usize {
            return Vec::new();
        }
        if self.introduction.ranks == 1 {
            return self.join();
        }
        if self.hub.is_none() {
            return self.fail(Error::internal("the root's roster names no star"));
        }
        self.phase = Phase::Attaching;
        self.deadline = now + self.timeout + GRACE;
        self.begin()
    }

    fn join(&mut self) -> Vec<Action> {
        self.phase = Phase::Live;
        let roster = std::mem::take(&mut self.roster);
        let mut actions = Vec::new();
        if self.root_ready {
            actions.push(Action::Send(Side::Root, Message::Settled.to_bytes()));
        }
        actions.extend([Action::Close(Side::Root), Action::Joined(roster)]);
        actions
    }

    fn handle_event(&mut self, rank: u32, fate: Fate, place: String) -> Vec<Action> {
        let event = match fate {
            Fate::Left => {
                self.rank0_left |= rank == 0;
                return Vec::new();
            }
            Fate::Lost => PeerEvent::Lost { rank, place },
            Fate::Aborted => PeerEvent::Aborted { rank, place },
        };
        // Rank 0's star can end later without being news of rank 0.
        let news = rank != self.introduction.rank && self.reported.insert(rank);
        news.then_some(Action::Report(event)).into_iter().collect()
    }

    pub(super) fn handle_trouble(&mut self, side: Side, trouble: Trouble, now: Instant) -> Vec<Action> {
        match (side, self.phase) {
            (Side::Root, Phase::Meeting) => self.handle_root_trouble(trouble, now),
            (Side::Root, _) => {
                // The roster is here; from now on the star tells who lives.
                self.root_ready = false;
                Vec::new()
            }
            (Side::Star, Phase::Attaching) => self.handle_attach_trouble(trouble, now),
            (Side::Star, Phase::Live) => self.handle_star_lost(),
            (Side::Star, Phase::Leaving) => self.done(),
            (Side::Star, _) => Vec::new(),
        }
    }

    fn handle_root_trouble(&mut self, trouble: Trouble, now: Instant) -> Vec<Action> {
        let address = self.root.address;
        if self.root_ready {
            self.root_ready = false;
            let text =
                format!("the process at {address}, where the ranks of this id meet, ended while they were joining");
            return self.fail(Error::remote(text));
        }
        let fixed = self.root.host == Host::RankZero;
        let (error, patience) = match trouble {
            Trouble::Refused(Refusal::Denied) => {
                let text = format!(
                    "the root at {address} has another secret: OSSICLE_SECRET (or the file OSSICLE_SECRET_FILE) must be the same on all ranks"
                );
                return self.fail(Error::usage(text));
            }
            Trouble::Refused(Refusal::UnknownKey) if !fixed => {
                let text = format!(
                    "the process at {address} does not serve this id (any more), it was already used: call ncclGetUniqueId once for each communicator"
                );
                return self.fail(Error::usage(text));
            }
            Trouble::Refused(Refusal::UnknownKey) => ("it serves another NCCL_COMM_ID".to_owned(), None),
            Trouble::Refused(Refusal::Foreign) => ("it speaks another protocol".to_owned(), Some(PATIENCE)),
            Trouble::Broken(text) => (text, (!fixed).then_some(PATIENCE)),
        };
        let reason = match fixed {
            true => "rank 0 has not opened the NCCL_COMM_ID address",
            false => "the process that called ncclGetUniqueId ended, or the id was already used",
        };
        self.retry(
            Error::system(format!("cannot join at {address}: {error} ({reason})")),
            patience,
            now,
        )
    }

    fn handle_attach_trouble(&mut self, trouble: Trouble, now: Instant) -> Vec<Action> {
        let rank0 = self.rank0();
        if self.star_ready {
            self.star_ready = false;
            return self.fail(Error::remote(format!("{rank0} died while the ranks were joining")));
        }
        let text = match trouble {
            Trouble::Broken(text) => text,
            Trouble::Refused(_) => "it does not know this session".to_owned(),
        };
        let address = self.hub.as_ref().map_or(self.root.address, |hub| hub.address);
        self.retry(
            Error::remote(format!("{rank0} cannot be reached at {address}: {text}")),
            Some(PATIENCE),
            now,
        )
    }

    fn handle_star_lost(&mut self) -> Vec<Action> {
        self.star_ready = false;
        let rank0 = self.rank0();
        let mut actions = Vec::new();
        let what = if self.rank0_left {
            "destroyed the communicator, and its process ended"
        } else {
            "died"
        };
        let error = Error::remote(format!("{rank0} {what}"));
        if !self.rank0_left && self.introduction.rank != 0 && self.reported.insert(0) {
            let place = self.rank0_place.clone();
            actions.push(Action::Report(PeerEvent::Lost { rank: 0, place }));
        }
        self.broken = Some(error.clone());
        if self.gathering {
            actions.extend(self.end_round(Err(error)));
        }
        actions
    }

    /// This rank's part of the next round; answered by `Action::Round`.
    pub(super) fn handle_contribution(&mut self, payload: Result<Vec<u8>, Error>, timeout: Duration) -> Vec<Action> {
        if let Some(error) = &self.broken {
            return vec![Action::Round(Err(error.clone()))];
        }
        if self.phase != Phase::Live || self.gathering {
            return vec![Action::Round(Err(Error::internal(
                "an exchange began while the session had another",
            )))];
        }
        self.gathering = true;
        let message = Message::Contribution {
            round: self.round,
            timeout_ms: timeout.as_millis() as u64,
            payload,
        };
        vec![Action::Send(Side::Star, message.to_bytes())]
    }

    fn end_round(&mut self, result: Result<Vec<Vec<u8>>, Error>) -> Vec<Action> {
        self.gathering = false;
        self.round += 1;
        self.parts.clear();
        vec![Action::Round(result)]
    }

    /// The rank goes: from a live session with a farewell or an abort, from a join that waits by withdrawing.
    pub(super) fn handle_end(&mut self, farewell: Farewell, now: Instant) -> Vec<Action> {
        match self.phase {
            Phase::Live if self.star_ready => {
                self.phase = Phase::Leaving;
                self.deadline = now + LEAVE_TIMEOUT;
                let message = match farewell {
                    Farewell::Leave => Message::Farewell,
                    Farewell::Abort => Message::Aborting,
                };
                vec![Action::Send(Side::Star, message.to_bytes())]
            }
            Phase::Live => self.done(),
            Phase::Leaving | Phase::Done => Vec::new(),
            _ => self.fail(Error::remote("aborted the communicator while the ranks were joining")),
        }
    }

    fn retry(&mut self, error: Error, patience: Option<Duration>, now: Instant) -> Vec<Action> {
        let since = *self.failing_since.get_or_insert(now);
        if now >= self.deadline || patience.is_some_and(|patience| now - since >= patience) {
            return self.fail(error);
        }
        self.trouble = Some(error);
        self.retry_at = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Vec::new()
    }

    fn forget_trouble(&mut self) {
        self.failing_since = None;
        self.pause = FIRST_PAUSE;
        self.trouble = None;
    }

    fn fail(&mut self, error: Error) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.root_ready {
            actions.push(Action::Send(
                Side::Root,
                Message::Withdraw { error: error.clone() }.to_bytes(),
            ));
        }
        actions.push(Action::Failed(error));
        actions.extend(self.done());
        actions
    }

    fn done(&mut self) -> Vec<Action> {
        self.phase = Phase::Done;
        vec![Action::Close(Side::Root), Action::Close(Side::Star), Action::Done]
    }

    fn rank0(&self) -> String {
        named(0, &self.rank0_place)
    }
}

/// The star's secret: both the id's secret and the token that rank 0 drew are needed.
pub(super) fn star_secret(root: &Secret, hub: &HubAddress) -> Secret {
    derive(root, "star", &hub.token)
}
