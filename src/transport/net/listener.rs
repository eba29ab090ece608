//! Makes the connections of a communicator's rank: to every rank that it sends to, from every rank that sends to it.
//!
//! Each rank listens and tells all ranks where (`Name`, through the bootstrap). The sender of a channel connects, and both
//! ends prove the communicator's secret with the bootstrap's handshake, which also says which channel the connection is
//! for: it is the key of the door. One call makes all connections of a rank, both ways at once, so that no two ranks can
//! wait for each other's turn.
//!
//! Anyone may connect. Who has not proved the secret within `STRANGER_TIMEOUT` is dropped, and so is the oldest of too
//! many, which may be a peer: a connection that breaks before it is proved is therefore made again until the deadline.

use super::{Purpose, Socket};
use crate::bootstrap::{self, describe, Caller, CallerStep, DoorKey, DoorStep, Doorman, Link, Refusal, Role, Secret};
use crate::error::{Error, Result};
use crate::transport::Limit;
use crate::warning;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const STRANGER_TIMEOUT: Duration = Duration::from_secs(5);
/// Besides as many as are expected.
const MORE_STRANGERS: usize = 64;
/// Connections taken in one turn, so that a flood leaves time for the others.
const ACCEPTS_A_TURN: usize = 64;
/// How soon a connection that broke is made again.
const RETRY: Duration = Duration::from_millis(10);
/// How often the clock and the cancel are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// What a caller reads at once: the door's answer, and no byte beyond.
const ANSWER_BYTES: usize = 33;

/// Where a rank listens, as it tells the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    pub(super) address: SocketAddr,
    /// Random, so that the doors of two communicators of one unique id have different secrets.
    token: [u8; 32],
}

pub struct Listener {
    listener: bootstrap::Listener,
    secret: Secret,
    door: Secret,
}

/// In the order in which they were asked for.
pub struct Established {
    pub connected: Vec<Socket>,
    pub accepted: Vec<Socket>,
}

fn door_secret(secret: &Secret, name: &Name) -> Secret {
    bootstrap::derive(secret, "net", &name.token)
}

fn door_key(purpose: &Purpose) -> Result<DoorKey> {
    let Purpose {
        sender,
        receiver,
        channel,
    } = *purpose;
    if sender.max(receiver) > Purpose::MAX_RANK || channel > Purpose::MAX_CHANNEL {
        return Err(Error::internal(format!("no connection can be named {purpose:?}")));
    }
    Ok(DoorKey {
        role: Role::Net,
        number: u64::from(sender) << 40 | u64::from(receiver) << 16 | u64::from(channel),
    })
}

impl Listener {
    /// Listens at the interface that `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY` choose. `secret` is the communicator's.
    pub fn open(secret: [u8; 32]) -> Result<(Listener, Name)> {
        Listener::open_at(bootstrap::network_address()?, secret)
    }

    pub(super) fn open_at(address: SocketAddr, secret: Secret) -> Result<(Listener, Name)> {
        let (listener, address) = bootstrap::Listener::open(address).map_err(|errno| {
            Error::system(format!(
                "cannot listen for other hosts at {address}: {} (errno {}); NCCL_SOCKET_IFNAME chooses another interface",
                describe(errno),
                errno.raw_os_error()
            ))
        })?;
        let token = bootstrap::random()?;
        let name = Name { address, token };
        let door = door_secret(&secret, &name);
        Ok((Listener { listener, secret, door }, name))
    }

    /// Connects for every purpose in `connects`, to the rank of that name, and waits for those in `expects`.
    pub fn establish(self, connects: &[(Name, Purpose)], expects: &[Purpose], limit: &Limit) -> Result<Established> {
        let deadline = Instant::now() + limit.timeout;
        let mut calls = Vec::with_capacity(connects.len());
        for (name, purpose) in connects {
            calls.push(Call {
                purpose: *purpose,
                key: door_key(purpose)?,
                address: name.address,
                secret: door_secret(&self.secret, name),
                state: CallState::Pause(Instant::now()),
                last: None,
            });
        }
        let mut door = Door {
            expected: Vec::with_capacity(expects.len()),
            secret: self.door,
            guests: Vec::new(),
            strangers_closed: 0,
        };
        for purpose in expects {
            door.expected.push((door_key(purpose)?, *purpose, None));
        }
        while !(calls.iter().all(Call::is_done) && door.is_done()) {
            let now = Instant::now();
            if limit.cancel.is_set() {
                return Err(Error::usage("the call was ended by ncclCommAbort"));
            }
            if now >= deadline {
                return Err(late(&calls, &door, limit.timeout));
            }
            wait(&self.listener, &calls, &door, deadline)?;
            for call in &mut calls {
                call.advance(Instant::now())?;
            }
            door.accept(&self.listener)?;
            door.advance(Instant::now());
        }
        if door.strangers_closed > 0 {
            let count = door.strangers_closed;
            warning!("{count} connection(s) to a port for data were not from ranks of this job and were closed");
        }
        let connected = calls.into_iter().filter_map(Call::into_socket).collect();
        let accepted = door.expected.into_iter().filter_map(|(_, _, socket)| socket).collect();
        Ok(Established { connected, accepted })
    }
}

/// Who is missing, and what the last trouble with it was.
fn late(calls: &[Call], door: &Door, timeout: Duration) -> Error {
    let mut missing = Vec::new();
    for call in calls.iter().filter(|call| !call.is_done()) {
        let trouble = call.last.as_deref().unwrap_or("no answer");
        let (receiver, channel, address) = (call.purpose.receiver, call.purpose.channel, call.address);
        missing.push(format!(
            "to rank {receiver} at {address}, channel {channel} ({trouble})"
        ));
    }
    for (_, purpose, _) in door.expected.iter().filter(|(_, _, socket)| socket.is_none()) {
        missing.push(format!("from rank {}, channel {}", purpose.sender, purpose.channel));
    }
    let more = missing.len().saturating_sub(8);
    missing.truncate(8);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    Error::system(format!(
        "connections were not made within {} ms: {}{more}; the hosts must reach each other at these addresses \
         (NCCL_SOCKET_IFNAME chooses the interface), on every port",
        timeout.as_millis(),
        missing.join(", ")
    ))
}

/// Until something can be done, or the clock must be looked at.
fn wait(listener: &bootstrap::Listener, calls: &[Call], door: &Door, deadline: Instant) -> Result<()> {
    let now = Instant::now();
    let mut limit = LOOK.min(deadline.saturating_duration_since(now));
    let mut watched = vec![PollFd::new(listener, PollFlags::IN)];
    for call in calls {
        match &call.state {
            CallState::Talk(link, _) => watched.push(PollFd::from_borrowed_fd(link.as_fd(), link.interest())),
            CallState::Pause(until) => limit = limit.min(until.saturating_duration_since(now)),
            CallState::Done(_) => {}
        }
    }
    let guests = door.guests.iter().map(|guest| &guest.link);
    watched.extend(guests.map(|link| PollFd::from_borrowed_fd(link.as_fd(), link.interest())));
    let limit = Timespec {
        tv_sec: 0,
        // Below a second, see LOOK.
        tv_nsec: limit.subsec_nanos().into(),
    };
    match poll(&mut watched, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::system(format!(
            "cannot wait for connections: {}",
            describe(errno)
        ))),
    }
}

/// A connection that this rank makes.
struct Call {
    purpose: Purpose,
    key: DoorKey,
    address: SocketAddr,
    secret: Secret,
    state: CallState,
    /// The last trouble.
    last: Option<String>,
}

enum CallState {
    /// Made (again) from then on.
    Pause(Instant),
    Talk(Link, Caller),
    Done(Socket),
}

impl Call {
    fn is_done(&self) -> bool {
        matches!(self.state, CallState::Done(_))
    }

    fn into_socket(self) -> Option<Socket> {
        match self.state {
            CallState::Done(socket) => Some(socket),
            _ => None,
        }
    }

    fn advance(&mut self, now: Instant) -> Result<()> {
        let state = std::mem::replace(&mut self.state, CallState::Pause(now + RETRY));
        let (link, caller) = match state {
            CallState::Pause(until) if until <= now => match Link::connect(self.address) {
                Ok(mut link) => {
                    let caller = Caller::new(self.key, self.secret, bootstrap::random()?);
                    link.push(caller.hello().into());
                    (link, caller)
                }
                Err(errno) => return self.trouble(errno),
            },
            CallState::Talk(link, caller) => (link, caller),
            state => {
                self.state = state;
                return Ok(());
            }
        };
        self.talk(link, caller)
    }

    fn talk(&mut self, mut link: Link, mut caller: Caller) -> Result<()> {
        let transfer = |link: &mut Link| {
            if link.is_connecting() && !is_writable(link)? {
                return Ok(());
            }
            if link.is_connecting() {
                link.finish_connect()?;
            }
            link.flush()?;
            link.receive(ANSWER_BYTES - link.inbox.unread().len()).map(|_| ())
        };
        if let Err(errno) = transfer(&mut link) {
            return self.trouble(errno);
        }
        match caller.handle(&mut link.inbox) {
            CallerStep::Wait => self.state = CallState::Talk(link, caller),
            CallerStep::Send(bytes) => {
                link.push(bytes.into());
                return self.talk(link, caller);
            }
            CallerStep::Ready => match link.into_descriptor() {
                Some(fd) => self.state = CallState::Done(Socket::new(fd, self.address)),
                None => return Err(Error::internal("a handshake ended with bytes left over")),
            },
            CallerStep::Refused(refusal) => return Err(self.refused(refusal)),
        }
        Ok(())
    }

    /// Whoever listened is gone, or never was; anything else may pass.
    fn trouble(&mut self, errno: Errno) -> Result<()> {
        let text = format!("{} (errno {})", describe(errno), errno.raw_os_error());
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::INTR | Errno::AGAIN => {
                self.last = Some(text);
                Ok(())
            }
            _ => Err(Error::remote(format!(
                "cannot connect to rank {} at {}: {text}; the hosts must reach each other at this address \
                 (NCCL_SOCKET_IFNAME chooses the interface), on every port",
                self.purpose.receiver, self.address
            ))),
        }
    }

    fn refused(&self, refusal: Refusal) -> Error {
        let why = match refusal {
            Refusal::UnknownKey => "it does not expect this connection",
            Refusal::Denied => "it has another secret",
            Refusal::Foreign => "what listens there is no rank of this library",
        };
        let Purpose {
            sender,
            receiver,
            channel,
        } = self.purpose;
        Error::remote(format!(
            "rank {receiver} at {} refused rank {sender}'s connection for channel {channel}: {why}; all ranks must load the \
             same build of the library, with equal settings",
            self.address
        ))
    }
}

fn is_writable(link: &Link) -> std::result::Result<bool, Errno> {
    let mut watched = [PollFd::from_borrowed_fd(link.as_fd(), PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut watched, Some(&now))? > 0)
}

/// Who connected and has not proved itself, or has not got all of the verdict.
struct Guest {
    link: Link,
    doorman: Doorman,
    since: Instant,
    /// What it proved.
    admitted: Option<DoorKey>,
}

enum GuestState {
    Waits,
    Done,
    Goes,
}

struct Door {
    expected: Vec<(DoorKey, Purpose, Option<Socket>)>,
    secret: Secret,
    guests: Vec<Guest>,
    strangers_closed: usize,
}

impl Door {
    fn is_done(&self) -> bool {
        self.expected.iter().all(|(_, _, socket)| socket.is_some())
    }

    fn accept(&mut self, listener: &bootstrap::Listener) -> Result<()> {
        for _ in 0..ACCEPTS_A_TURN {
            match listener.accept() {
                Ok(Some(link)) => {
                    if self.guests.len() >= self.expected.len() + MORE_STRANGERS {
                        self.guests.remove(0);
                        self.strangers_closed += 1;
                    }
                    self.guests.push(Guest {
                        link,
                        doorman: Doorman::default(),
                        since: Instant::now(),
                        admitted: None,
                    });
                }
                Ok(None) => break,
                Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
                    return Err(Error::system(format!("cannot take connections: {}", describe(errno))));
                }
                // The connection was gone before it was taken, or memory is short for the moment.
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn advance(&mut self, now: Instant) {
        for mut guest in std::mem::take(&mut self.guests) {
            match guest.advance(&self.expected, self.secret, now) {
                GuestState::Waits => self.guests.push(guest),
                GuestState::Goes => self.strangers_closed += 1,
                GuestState::Done => self.seat(guest),
            }
        }
    }

    fn seat(&mut self, guest: Guest) {
        let place = |(key, _, socket): &&mut (DoorKey, Purpose, Option<Socket>)| {
            Some(*key) == guest.admitted && socket.is_none()
        };
        let Some((_, _, socket)) = self.expected.iter_mut().find(place) else {
            return;
        };
        let peer = guest.link.peer();
        *socket = guest.link.into_descriptor().map(|fd| Socket::new(fd, peer));
    }
}

impl Guest {
    fn advance(&mut self, expected: &[(DoorKey, Purpose, Option<Socket>)], secret: Secret, now: Instant) -> GuestState {
        loop {
            if self.admitted.is_some() {
                return match self.link.flush() {
                    Ok(()) if self.link.is_flushed() => GuestState::Done,
                    Ok(()) if now - self.since < STRANGER_TIMEOUT => GuestState::Waits,
                    _ => GuestState::Goes,
                };
            }
            let room = Doorman::READ_BYTES - self.link.inbox.unread().len();
            let transfer = |link: &mut Link| {
                link.flush()?;
                link.receive(room)
            };
            if transfer(&mut self.link).is_err() {
                return GuestState::Goes;
            }
            let Ok(nonce) = bootstrap::random() else {
                return GuestState::Goes;
            };
            let free = |key: DoorKey| {
                expected
                    .iter()
                    .any(|(door, _, socket)| *door == key && socket.is_none())
            };
            let step = self
                .doorman
                .handle(&mut self.link.inbox, nonce, |key| free(key).then_some(secret));
            match step {
                DoorStep::Wait if now - self.since < STRANGER_TIMEOUT => return GuestState::Waits,
                DoorStep::Wait => return GuestState::Goes,
                DoorStep::Send(bytes) => self.link.push(bytes.into()),
                DoorStep::Admit(key, bytes) => {
                    self.link.push(bytes.into());
                    self.admitted = Some(key);
                }
                DoorStep::Reject(_, bytes) => {
                    self.link.push(bytes.into());
                    // It is told why if the kernel takes the few bytes at once, as it does.
                    let _ = self.link.flush();
                    return GuestState::Goes;
                }
            }
        }
    }
}
