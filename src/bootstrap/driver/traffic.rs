//! What comes in on a connection: read, taken apart, handed to whom it concerns.

use super::super::handshake::{CallerStep, DoorKey, DoorStep, Doorman};
use super::super::link::describe;
use super::super::member::{Side, Trouble};
use super::super::service::SeatId;
use super::super::session::random;
use super::super::wire::{Malformed, Message};
use super::super::PeerId;
use super::{Driver, Owner, STRANGER_TIMEOUT};
use rustix::event::PollFlags;
use rustix::io::Errno;
use std::time::Instant;

/// Reads of one connection in one turn of the loop, so that a busy one leaves time for the others.
const READS_A_TURN: usize = 64;

/// One thing that a connection brought.
enum Arrival {
    Nothing,
    Stranger(DoorStep),
    Guest(DoorKey, Message),
    Handshake(CallerStep),
    Rank(SeatId, Side, Message),
    Malformed,
}

impl Driver {
    pub(super) fn handle_ready(&mut self, id: PeerId, flags: PollFlags) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        if line.link.is_connecting() {
            if let Err(errno) = line.link.finish_connect() {
                self.handle_broken(id, &describe(errno));
            }
            return;
        }
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return;
        }
        for _ in 0..READS_A_TURN {
            let Some(line) = self.lines.get_mut(&id) else { return };
            let limit = match &line.owner {
                // A stranger may make this side hold one message of the handshake.
                Owner::Stranger { .. } => Doorman::READ_BYTES.saturating_sub(line.link.inbox.unread().len()),
                _ => usize::MAX,
            };
            match line.link.receive(limit) {
                Ok(more) => {
                    self.handle_bytes(id);
                    if !more {
                        return;
                    }
                }
                Err(errno) => return self.handle_broken(id, &ended(errno)),
            }
        }
    }

    /// Takes everything that is complete.
    fn handle_bytes(&mut self, id: PeerId) {
        loop {
            match self.next_arrival(id) {
                Arrival::Nothing => return,
                Arrival::Stranger(step) => self.handle_stranger(id, step),
                Arrival::Guest(key, message) => self.handle_guest(id, key, message),
                Arrival::Handshake(step) => self.handle_handshake(id, step),
                Arrival::Rank(seat, side, message) => {
                    self.with_member(seat, |member| member.handle_message(side, message, Instant::now()));
                }
                Arrival::Malformed => {
                    self.handle_broken(id, "it sent what this library does not understand");
                    return;
                }
            }
        }
    }

    fn next_arrival(&mut self, id: PeerId) -> Arrival {
        // Out of the map while the doors are asked for secrets.
        let Some(mut line) = self.lines.remove(&id) else {
            return Arrival::Nothing;
        };
        let inbox = &mut line.link.inbox;
        let message = |taken: Result<Option<Message>, Malformed>, arrival: &dyn Fn(Message) -> Arrival| match taken {
            Ok(Some(message)) => arrival(message),
            Ok(None) => Arrival::Nothing,
            Err(Malformed) => Arrival::Malformed,
        };
        let arrival = match &mut line.owner {
            Owner::Stranger { doorman, .. } => match random() {
                Ok(nonce) => match doorman.handle(inbox, nonce, |key| self.secret_of(key)) {
                    DoorStep::Wait => Arrival::Nothing,
                    step => Arrival::Stranger(step),
                },
                Err(_) => Arrival::Stranger(DoorStep::Reject("no random bytes", Vec::new())),
            },
            Owner::Guest { door } => message(inbox.take_message(), &|message| Arrival::Guest(*door, message)),
            Owner::Rank {
                caller: Some(caller), ..
            }
            | Owner::Messenger { caller } => match caller.handle(inbox) {
                CallerStep::Wait => Arrival::Nothing,
                step => Arrival::Handshake(step),
            },
            Owner::Rank {
                seat,
                side,
                caller: None,
            } => message(inbox.take_message(), &|message| Arrival::Rank(*seat, *side, message)),
            Owner::Closing => {
                *inbox = Default::default();
                Arrival::Nothing
            }
        };
        self.lines.insert(id, line);
        arrival
    }

    fn handle_stranger(&mut self, id: PeerId, step: DoorStep) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        match step {
            DoorStep::Wait => {}
            DoorStep::Send(bytes) => line.link.push(bytes.into()),
            DoorStep::Admit(key, bytes) => {
                line.link.push(bytes.into());
                line.owner = Owner::Guest { door: key };
                line.deadline = Some(Instant::now() + STRANGER_TIMEOUT);
            }
            DoorStep::Reject(why, bytes) => {
                self.strangers.note(why);
                if bytes.is_empty() {
                    self.lines.remove(&id);
                } else {
                    line.link.push(bytes.into());
                    self.close(id);
                }
            }
        }
    }

    /// A connection that this process made, before its handshake is done.
    fn handle_handshake(&mut self, id: PeerId, step: CallerStep) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        match (step, &mut line.owner) {
            (CallerStep::Send(bytes), _) => line.link.push(bytes.into()),
            (CallerStep::Ready, Owner::Messenger { .. }) => {
                line.link.push(Message::Spent.to_bytes().into());
                self.close(id);
            }
            (CallerStep::Ready, Owner::Rank { seat, side, caller }) => {
                *caller = None;
                let (seat, side) = (*seat, *side);
                self.with_member(seat, |member| member.handle_ready(side));
            }
            (CallerStep::Refused(refusal), Owner::Rank { seat, side, .. }) => {
                let (seat, side) = (*seat, *side);
                self.lines.remove(&id);
                self.handle_trouble(seat, side, Trouble::Refused(refusal));
            }
            _ => {
                self.lines.remove(&id);
            }
        }
    }

    /// A connection could not be made, or ended.
    pub(super) fn handle_broken(&mut self, id: PeerId, why: &str) {
        let Some(line) = self.lines.remove(&id) else { return };
        match line.owner {
            Owner::Stranger { .. } => self.strangers.note(why),
            Owner::Guest { door } => self.with_door(door, |machine| machine.handle_lost(id, Instant::now())),
            Owner::Rank { seat, side, .. } => self.handle_trouble(seat, side, Trouble::Broken(why.to_owned())),
            Owner::Messenger { .. } | Owner::Closing => {}
        }
    }

    fn handle_trouble(&mut self, seat: SeatId, side: Side, trouble: Trouble) {
        if let Some(seat) = self.seats.get_mut(&seat) {
            *seat.line(side) = None;
        }
        self.with_member(seat, |member| member.handle_trouble(side, trouble, Instant::now()));
    }
}

fn ended(errno: Errno) -> String {
    match errno {
        Errno::PIPE => "it closed the connection".to_owned(),
        errno => describe(errno),
    }
}
