//! The ranks of this process: their commands, and what their machines ask for.

use super::super::answer::Reply;
use super::super::handshake::{Caller, DoorKey, Role, Secret};
use super::super::link::{describe, Link};
use super::super::member::{star_secret, Action, Member, Side, Trouble};
use super::super::service::{Command, Gathered, Join, SeatId};
use super::super::session::random;
use super::super::unique_id::{Host, Root};
use super::super::wire::HubAddress;
use super::super::{Introduction, PeerEvent, PeerId, Watch};
use super::{Driver, Owner, STRANGER_TIMEOUT};
use crate::error::Result;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How often a watched session beats.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);

pub(super) struct Seat {
    pub(super) member: Member,
    root: Root,
    /// Rank 0's star.
    star: Option<DoorKey>,
    root_line: Option<PeerId>,
    star_line: Option<PeerId>,
    joined: Option<Reply<Result<Vec<Introduction>>>>,
    gathered: Option<Reply<Gathered>>,
    watch: Option<Watch>,
    /// What happened before `watch`.
    unreported: Vec<PeerEvent>,
    leaving: Vec<Reply<()>>,
}

impl Seat {
    pub(super) fn line(&mut self, side: Side) -> &mut Option<PeerId> {
        match side {
            Side::Root => &mut self.root_line,
            Side::Star => &mut self.star_line,
        }
    }
}

impl Driver {
    /// All ranks of this process beat at once, so that the thread wakes no oftener for more of them; None while none
    /// is watched.
    pub(super) fn beat_deadline(&self) -> Option<Instant> {
        let watched = self.seats.values().any(|seat| seat.watch.is_some());
        watched.then_some(self.next_beat)
    }

    pub(super) fn beat(&mut self, now: Instant) {
        self.next_beat = now + BEAT_INTERVAL;
        for watch in self.seats.values().filter_map(|seat| seat.watch.as_ref()) {
            contain(|| (watch.beat)());
        }
    }

    pub(super) fn handle_command(&mut self, command: Command) {
        match command {
            Command::OpenRendezvous {
                uid,
                secret,
                bind,
                reply,
            } => {
                let opened = self.open_rendezvous(uid, secret, bind);
                let is_open = opened.is_ok();
                // A caller that gave up will never tell anyone of this id.
                if reply.send(opened).is_err() && is_open {
                    self.doors.remove(&DoorKey {
                        role: Role::Rendezvous,
                        number: uid,
                    });
                }
            }
            Command::Join { seat, join, reply } => self.handle_join(seat, join, reply),
            Command::Contribute {
                seat,
                payload,
                timeout,
                reply,
            } => {
                if let Some(record) = self.seats.get_mut(&seat) {
                    record.gathered = Some(reply);
                    self.with_member(seat, |member| member.handle_contribution(payload, timeout));
                }
            }
            Command::Watch { seat, watch } => {
                if let Some(record) = self.seats.get_mut(&seat) {
                    for event in record.unreported.drain(..) {
                        contain(|| (watch.report)(event));
                    }
                    record.watch = Some(watch);
                }
            }
            Command::End { seat, farewell, done } => match self.seats.get_mut(&seat) {
                Some(record) => {
                    record.leaving.push(done);
                    self.with_member(seat, |member| member.handle_end(farewell, Instant::now()));
                }
                None => self.released.push(done),
            },
        }
    }

    fn handle_join(&mut self, seat: SeatId, join: Join, reply: Reply<Result<Vec<Introduction>>>) {
        let Join {
            root,
            spent,
            introduction,
            timeout,
            bind,
        } = join;
        spent
            .into_iter()
            .filter(|other| other.host == Host::Maker)
            .for_each(|other| self.send_messenger(&other));
        if introduction.ranks == 1 && self.join_alone(root.uid) {
            let _ = reply.send(Ok(vec![introduction]));
            return;
        }
        let hub = match bind
            .map(|bind| self.offer_star(&root, bind, introduction.ranks))
            .transpose()
        {
            Ok(hub) => hub,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        let star = hub.as_ref().map(|hub| DoorKey {
            role: Role::Star,
            number: hub.session,
        });
        let record = Seat {
            member: Member::new(root, introduction, hub, timeout, Instant::now()),
            root,
            star,
            root_line: None,
            star_line: None,
            joined: Some(reply),
            gathered: None,
            watch: None,
            unreported: Vec::new(),
            leaving: Vec::new(),
        };
        self.seats.insert(seat, record);
        self.with_member(seat, |member| member.begin());
    }

    fn offer_star(&mut self, root: &Root, bind: SocketAddr, ranks: u32) -> Result<HubAddress> {
        let session = u64::from_ne_bytes(random()?);
        let hub = HubAddress {
            address: self.listen(bind)?,
            session,
            token: random()?,
        };
        self.open_star(session, star_secret(&root.secret, &hub), ranks);
        Ok(hub)
    }

    /// The id is lost to its maker whether or not the message arrives; it only lets the maker's thread end.
    fn send_messenger(&mut self, other: &Root) {
        let key = DoorKey {
            role: Role::Rendezvous,
            number: other.uid,
        };
        if let (Ok(mut link), Ok(nonce)) = (Link::connect(other.address), random()) {
            let caller = Caller::new(key, other.secret, nonce);
            link.push(caller.hello().into());
            self.add_line(
                link,
                Owner::Messenger { caller },
                Some(Instant::now() + STRANGER_TIMEOUT),
            );
        }
    }

    /// Lets a rank's machine act and does what it asks, until it asks for nothing more.
    pub(super) fn with_member(&mut self, id: SeatId, act: impl FnOnce(&mut Member) -> Vec<Action>) {
        let Some(seat) = self.seats.get_mut(&id) else { return };
        let mut actions = std::collections::VecDeque::from(act(&mut seat.member));
        while let Some(action) = actions.pop_front() {
            actions.extend(self.perform(id, action));
        }
    }

    /// Does one thing; what the machine says to a failure comes back.
    fn perform(&mut self, id: SeatId, action: Action) -> Vec<Action> {
        let Some(seat) = self.seats.get_mut(&id) else {
            return Vec::new();
        };
        match action {
            Action::OpenDoor => {
                let root = seat.root;
                let opened = self.open_fixed(&root);
                let member = self.seats.get_mut(&id).map(|seat| &mut seat.member);
                return member.map_or_else(Vec::new, |member| member.handle_door(opened, Instant::now()));
            }
            Action::Connect {
                side,
                address,
                key,
                secret,
            } => return self.connect(id, side, address, key, secret),
            Action::Send(side, bytes) => {
                if let Some(line) = seat.line(side).and_then(|line| self.lines.get_mut(&line)) {
                    line.link.push(bytes.into());
                }
            }
            Action::Close(side) => {
                if let Some(line) = seat.line(side).take() {
                    self.close(line);
                }
            }
            // Whoever waited for these may have given up.
            Action::Joined(roster) => drop(seat.joined.take().map(|reply| reply.send(Ok(roster)))),
            Action::Failed(error) => drop(seat.joined.take().map(|reply| reply.send(Err(error)))),
            Action::Round(result) => drop(seat.gathered.take().map(|reply| reply.send(result))),
            Action::Report(event) => match &seat.watch {
                Some(watch) => contain(|| (watch.report)(event)),
                None => seat.unreported.push(event),
            },
            Action::Done => {
                let (star, root) = (seat.star, seat.root);
                let seat = self.seats.remove(&id);
                self.released.extend(seat.into_iter().flat_map(|seat| seat.leaving));
                if let Some(star) = star {
                    self.drop_unfinished_star(star);
                    self.drop_untouched_root(&root);
                }
            }
        }
        Vec::new()
    }

    fn connect(&mut self, id: SeatId, side: Side, address: SocketAddr, key: DoorKey, secret: Secret) -> Vec<Action> {
        let connected = random()
            .map_err(|error| error.text)
            .and_then(|nonce| Ok((nonce, Link::connect(address).map_err(describe)?)));
        let Some(seat) = self.seats.get_mut(&id) else {
            return Vec::new();
        };
        match connected {
            Ok((nonce, mut link)) => {
                let caller = Caller::new(key, secret, nonce);
                link.push(caller.hello().into());
                let line = self.add_line(
                    link,
                    Owner::Rank {
                        seat: id,
                        side,
                        caller: Some(caller),
                    },
                    None,
                );
                if let Some(seat) = self.seats.get_mut(&id) {
                    *seat.line(side) = Some(line);
                }
                Vec::new()
            }
            Err(text) => seat.member.handle_trouble(side, Trouble::Broken(text), Instant::now()),
        }
    }
}

/// Part of a watch that panics must not take the thread with it.
fn contain(part: impl FnOnce()) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(part));
}
