//! The listening side: listeners, the roots and stars behind them, and strangers who knock.

use super::super::handshake::{DoorKey, Doorman, Role, Secret};
use super::super::hub::Hub;
use super::super::link::{describe, Link, Listener};
use super::super::member::DoorTrouble;
use super::super::rendezvous::{already_used, refuse, Outcome, Rendezvous};
use super::super::service;
use super::super::unique_id::{Host, Root};
use super::super::wire::Message;
use super::super::{Effect, PeerId};
use super::{Driver, Line, ListenerId, Owner, STRANGER_TIMEOUT};
use crate::error::{Code, Error, Result};
use crate::warning;
use rustix::io::Errno;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// More strangers at once than this on one listener, and the oldest goes.
const MAX_STRANGERS: usize = 128;
/// Connections taken in one turn of the loop, so that a flood leaves time for the others.
const ACCEPTS_A_TURN: usize = 64;
/// How long a listener rests when no descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

pub(super) struct Listening {
    pub(super) listener: Listener,
    address: SocketAddr,
    /// Opened for one `NCCL_COMM_ID` and closed with its rendezvous.
    fixed: bool,
    pub(super) paused_until: Option<Instant>,
}

/// What a proved connection leads to.
pub(super) struct Door {
    secret: Secret,
    pub(super) machine: Machine,
    /// The listener that goes with it.
    listener: Option<ListenerId>,
}

pub(super) enum Machine {
    Root(Rendezvous),
    Star(Hub),
}

impl Machine {
    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        match self {
            Machine::Root(rendezvous) => rendezvous.poll_deadline(),
            Machine::Star(hub) => hub.poll_deadline(),
        }
    }
    pub(super) fn handle_time(&mut self, now: Instant) -> Vec<Effect> {
        match self {
            Machine::Root(rendezvous) => rendezvous.handle_time(now),
            Machine::Star(hub) => hub.handle_time(now),
        }
    }
    pub(super) fn handle_message(&mut self, peer: PeerId, message: Message, now: Instant) -> Vec<Effect> {
        match self {
            Machine::Root(rendezvous) => rendezvous.handle_message(peer, message, now),
            Machine::Star(hub) => hub.handle_message(peer, message, now),
        }
    }
    pub(super) fn handle_lost(&mut self, peer: PeerId, now: Instant) -> Vec<Effect> {
        match self {
            Machine::Root(rendezvous) => rendezvous.handle_lost(peer, now),
            Machine::Star(hub) => hub.handle_lost(peer),
        }
    }
}

/// Counts who knocked and was not of ours, and says it now and then.
#[derive(Default)]
pub(super) struct Strangers {
    unsaid: u64,
    said_at: Option<Instant>,
}

impl Strangers {
    pub(super) fn note(&mut self, why: &str) {
        self.unsaid += 1;
        let now = Instant::now();
        if self.said_at.is_none_or(|at| now - at >= WARNING_INTERVAL) {
            warning!(
                "{} connection(s) to the bootstrap port were not from ranks of this job and were closed (the last: {why})",
                self.unsaid
            );
            self.unsaid = 0;
            self.said_at = Some(now);
        }
    }
}

impl Driver {
    pub(super) fn open_rendezvous(&mut self, uid: u64, secret: Secret, bind: SocketAddr) -> Result<SocketAddr> {
        let address = self.listen(bind)?;
        let machine = Machine::Root(Rendezvous::new(false));
        self.doors.insert(
            DoorKey {
                role: Role::Rendezvous,
                number: uid,
            },
            Door {
                secret,
                machine,
                listener: None,
            },
        );
        Ok(address)
    }

    /// Rank 0 opens the root at the address that `NCCL_COMM_ID` names.
    pub(super) fn open_fixed(&mut self, root: &Root) -> std::result::Result<(), DoorTrouble> {
        let key = DoorKey {
            role: Role::Rendezvous,
            number: root.uid,
        };
        if let Some(door) = self.doors.get(&key) {
            // Two ranks 0 in one process meet at one root, which names them both.
            return match &door.machine {
                Machine::Root(rendezvous) if rendezvous.is_collecting() => Ok(()),
                _ => Err(DoorTrouble::PreviousInit),
            };
        }
        let refused = |errno| {
            let (address, why) = (root.address, describe(errno));
            Error::system(format!(
                "rank 0 cannot listen at {address}, which NCCL_COMM_ID names: {why}"
            ))
        };
        let (listener, address) = Listener::open(root.address).map_err(|errno| match errno {
            Errno::ADDRINUSE => DoorTrouble::InUse(refused(errno)),
            _ => DoorTrouble::Other(refused(errno)),
        })?;
        let id = self.new_id();
        self.listeners.insert(
            id,
            Listening {
                listener,
                address,
                fixed: true,
                paused_until: None,
            },
        );
        let machine = Machine::Root(Rendezvous::new(true));
        self.doors.insert(
            key,
            Door {
                secret: root.secret,
                machine,
                listener: Some(id),
            },
        );
        Ok(())
    }

    pub(super) fn open_star(&mut self, session: u64, secret: Secret, ranks: u32) {
        let key = DoorKey {
            role: Role::Star,
            number: session,
        };
        self.doors.insert(
            key,
            Door {
                secret,
                machine: Machine::Star(Hub::new(ranks)),
                listener: None,
            },
        );
    }

    /// The address of this process's one listener at `bind`'s address, opened at its first use.
    pub(super) fn listen(&mut self, bind: SocketAddr) -> Result<SocketAddr> {
        let mut open = self.listeners.values();
        if let Some(listening) = open.find(|listening| !listening.fixed && listening.address.ip() == bind.ip()) {
            return Ok(listening.address);
        }
        let opened = match Listener::open(bind) {
            // Without any interface not even loopback can be named; a communicator of one rank does not mind.
            Err(Errno::ADDRNOTAVAIL) if bind.ip().is_loopback() => {
                Listener::open(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))
                    .map(|(listener, bound)| (listener, SocketAddr::new(bind.ip(), bound.port())))
            }
            opened => opened,
        };
        let (listener, address) = opened
            .map_err(|errno| Error::system(format!("cannot listen for ranks at {}: {}", bind.ip(), describe(errno))))?;
        let id = self.new_id();
        self.listeners.insert(
            id,
            Listening {
                listener,
                address,
                fixed: false,
                paused_until: None,
            },
        );
        Ok(address)
    }

    /// A communicator of one rank whose id is served here: true if that settled it.
    pub(super) fn join_alone(&mut self, uid: u64) -> bool {
        let key = DoorKey {
            role: Role::Rendezvous,
            number: uid,
        };
        let mut untouched = false;
        self.with_door(key, |machine| {
            if let Machine::Root(rendezvous) = machine {
                untouched = rendezvous.is_untouched();
                if untouched {
                    rendezvous.handle_alone();
                }
            }
            Vec::new()
        });
        untouched
    }

    /// Rank 0's join failed: nobody will use its star.
    pub(super) fn drop_unfinished_star(&mut self, key: DoorKey) {
        let unfinished = |door: &Door| matches!(&door.machine, Machine::Star(hub) if !hub.is_complete());
        if self.doors.get(&key).is_some_and(unfinished) {
            self.doors.remove(&key);
            self.close_guests(key);
        }
    }

    /// Rank 0 opened the `NCCL_COMM_ID` address and gave up before anyone came: nothing would ever end that root.
    pub(super) fn drop_untouched_root(&mut self, root: &Root) {
        let key = DoorKey {
            role: Role::Rendezvous,
            number: root.uid,
        };
        let untouched = |door: &Door| matches!(&door.machine, Machine::Root(machine) if machine.is_untouched());
        if root.host == Host::RankZero && self.doors.get(&key).is_some_and(untouched) {
            self.remove_door(key);
        }
    }

    /// Lets a machine act, does what it asks, and removes it when it is over.
    pub(super) fn with_door(&mut self, key: DoorKey, act: impl FnOnce(&mut Machine) -> Vec<Effect>) {
        let Some(door) = self.doors.get_mut(&key) else { return };
        let effects = act(&mut door.machine);
        let over = match &door.machine {
            Machine::Root(rendezvous) => rendezvous.outcome().is_some(),
            Machine::Star(hub) => hub.is_over(),
        };
        self.apply(effects);
        if over {
            self.remove_door(key);
        }
    }

    pub(super) fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(peer, bytes) => {
                    if let Some(line) = self.lines.get_mut(&peer) {
                        line.link.push(bytes);
                    }
                }
                Effect::Close(peer) => self.close(peer),
            }
        }
    }

    fn remove_door(&mut self, key: DoorKey) {
        let Some(door) = self.doors.remove(&key) else { return };
        match door.machine {
            Machine::Star(_) => self.close_guests(key),
            Machine::Root(rendezvous) => {
                if let (None, Some(outcome)) = (door.listener, rendezvous.outcome()) {
                    service::remember(key.number, door.secret, outcome.clone());
                }
            }
        }
        if let Some(id) = door.listener {
            self.listeners.remove(&id);
            self.lines
                .retain(|_, line| !matches!(line.owner, Owner::Stranger { listener, .. } if listener == id));
        }
    }

    fn close_guests(&mut self, key: DoorKey) {
        let guests = self
            .lines
            .iter()
            .filter(|(_, l)| matches!(l.owner, Owner::Guest { door } if door == key));
        for peer in guests.map(|(peer, _)| *peer).collect::<Vec<_>>() {
            self.close(peer);
        }
    }

    /// A proved connection says what it wants of a door that is open, or was.
    pub(super) fn handle_guest(&mut self, peer: PeerId, key: DoorKey, message: Message) {
        if let Some(line) = self.lines.get_mut(&peer) {
            line.deadline = None;
        }
        if self.doors.contains_key(&key) {
            let now = Instant::now();
            return self.with_door(key, |machine| machine.handle_message(peer, message, now));
        }
        let effects = match (key.role, message) {
            (Role::Rendezvous, Message::Join { .. }) => match service::used(key.number) {
                Some((_, error)) => refuse(peer, &error),
                None => refuse(
                    peer,
                    &Error::new(Code::InProgress, "the root is between two communicators"),
                ),
            },
            (Role::Star, _) => refuse(peer, &already_used(&Outcome::Spent)),
            _ => vec![Effect::Close(peer)],
        };
        self.apply(effects);
    }

    pub(super) fn secret_of(&self, key: DoorKey) -> Option<Secret> {
        match self.doors.get(&key) {
            Some(door) => Some(door.secret),
            None if key.role == Role::Rendezvous => service::used(key.number).map(|(secret, _)| secret),
            None => None,
        }
    }

    pub(super) fn accept(&mut self, id: ListenerId) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some(listening) = self.listeners.get_mut(&id) else {
                return;
            };
            match listening.listener.accept() {
                Ok(Some(link)) => self.admit_stranger(link, id),
                Ok(None) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) if self.drop_oldest_stranger(id) => {}
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    warning!("cannot accept a bootstrap connection: {}", describe(errno));
                    if let Some(listening) = self.listeners.get_mut(&id) {
                        listening.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    }
                    return;
                }
                // The connection was gone before it was taken.
                Err(_) => {}
            }
        }
    }

    fn admit_stranger(&mut self, link: Link, listener: ListenerId) {
        let from = |line: &&Line| matches!(line.owner, Owner::Stranger { listener: id, .. } if id == listener);
        if self.lines.values().filter(from).count() >= MAX_STRANGERS {
            self.drop_oldest_stranger(listener);
        }
        let owner = Owner::Stranger {
            doorman: Doorman::default(),
            listener,
        };
        self.add_line(link, owner, Some(Instant::now() + STRANGER_TIMEOUT));
    }

    /// Ids rise with time, so the first is the oldest; false if there is none.
    fn drop_oldest_stranger(&mut self, listener: ListenerId) -> bool {
        let from = |line: &Line| matches!(line.owner, Owner::Stranger { listener: id, .. } if id == listener);
        let Some(oldest) = self.lines.iter().find(|(_, line)| from(line)).map(|(id, _)| *id) else {
            return false;
        };
        self.lines.remove(&oldest);
        self.strangers
            .note("too many had not proved themselves, the oldest went");
        true
    }
}
