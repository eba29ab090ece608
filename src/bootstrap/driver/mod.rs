//! The bootstrap thread: one poll loop over all sockets of this process, thin around the state machines.
//!
//! `doors` is the listening side (listeners, roots, stars), `seats` the ranks of this process and their commands,
//! `traffic` what comes in on a connection. Nothing here blocks but `poll`, whose timeout is the nearest deadline.

mod doors;
mod seats;
mod traffic;

use super::answer::Reply;
use super::descriptor::Descriptor;
use super::handshake::{Caller, DoorKey, Doorman};
use super::link::Link;
use super::member::Side;
use super::service::{self, SeatId};
use super::PeerId;
use doors::{Door, Listening, Strangers};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use seats::Seat;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stranger has this long to prove itself, and then this long to say what it wants.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection that is done has this long to take its last bytes and to hang up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Whose connection it is.
enum Owner {
    /// Accepted, not proved.
    Stranger { doorman: Doorman, listener: ListenerId },
    /// Accepted and proved.
    Guest { door: DoorKey },
    /// A rank of this process connected; `caller` until the handshake is done.
    Rank {
        seat: SeatId,
        side: Side,
        caller: Option<Caller>,
    },
    /// Tells a further root of a scalable init that its id is used up.
    Messenger { caller: Caller },
    /// Only to send what is left.
    Closing,
}

struct Line {
    link: Link,
    owner: Owner,
    /// When it is dropped.
    deadline: Option<Instant>,
}

type ListenerId = u64;

pub(super) struct Driver {
    wake: Arc<Descriptor>,
    next: u64,
    listeners: BTreeMap<ListenerId, Listening>,
    lines: BTreeMap<PeerId, Line>,
    doors: HashMap<DoorKey, Door>,
    seats: BTreeMap<SeatId, Seat>,
    strangers: Strangers,
    next_beat: Instant,
    /// Answers to ranks that left, held until it is known whether the thread ends with them.
    released: Vec<Reply<()>>,
}

enum Ready {
    Listener(ListenerId),
    Line(PeerId, PollFlags),
}

impl Driver {
    pub(super) fn new(wake: Arc<Descriptor>) -> Driver {
        Driver {
            wake,
            next: 0,
            listeners: BTreeMap::new(),
            lines: BTreeMap::new(),
            doors: HashMap::new(),
            seats: BTreeMap::new(),
            strangers: Strangers::default(),
            next_beat: Instant::now(),
            released: Vec::new(),
        }
    }

    pub(super) fn run(&mut self) {
        loop {
            for command in service::take_commands() {
                self.handle_command(command);
            }
            self.handle_time(Instant::now());
            self.flush();
            if self.is_idle() && service::may_end() {
                return;
            }
            // A rank that left last is to find the thread gone; what is closing here still needs it for a moment.
            if !self.lines.values().any(|line| matches!(line.owner, Owner::Closing)) {
                self.released.clear();
            }
            for ready in self.wait() {
                match ready {
                    Ready::Listener(id) => self.accept(id),
                    Ready::Line(id, flags) => self.handle_ready(id, flags),
                }
            }
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Strangers keep nothing alive.
    fn is_idle(&self) -> bool {
        let stranger = |line: &Line| matches!(line.owner, Owner::Stranger { .. });
        self.doors.is_empty() && self.seats.is_empty() && self.lines.values().all(stranger)
    }

    /// Sends what can be sent; what is closing and has sent all says so.
    fn flush(&mut self) {
        let mut broken = Vec::new();
        for (id, line) in &mut self.lines {
            if !line.link.is_flushed() {
                if let Err(errno) = line.link.flush() {
                    broken.push((*id, errno));
                    continue;
                }
            }
            if matches!(line.owner, Owner::Closing) && line.link.is_flushed() {
                line.link.shut();
            }
        }
        for (id, errno) in broken {
            self.handle_broken(id, &super::link::describe(errno));
        }
    }

    fn wait(&self) -> Vec<Ready> {
        let now = Instant::now();
        let timeout = self
            .poll_deadline()
            .map(|deadline| deadline.saturating_duration_since(now));
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        let listeners: Vec<_> = self
            .listeners
            .iter()
            .filter(|(_, l)| l.paused_until.is_none_or(|at| at <= now))
            .collect();
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        fds.extend(
            listeners
                .iter()
                .map(|(_, listening)| PollFd::new(&listening.listener, PollFlags::IN)),
        );
        fds.extend(
            self.lines
                .values()
                .map(|line| PollFd::new(&line.link, line.link.interest())),
        );
        // EINTR and ENOMEM alike: nothing is ready, deadlines are looked at, and it is tried again.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return Vec::new();
        }
        let mut flags = fds.iter().map(PollFd::revents);
        if flags.next().is_some_and(|flags| !flags.is_empty()) {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        let listeners = listeners.iter().map(|(id, _)| Ready::Listener(**id));
        let mut ready: Vec<Ready> = listeners
            .zip(&mut flags)
            .filter(|(_, f)| !f.is_empty())
            .map(|(r, _)| r)
            .collect();
        let lines = self.lines.keys().zip(flags).filter(|(_, flags)| !flags.is_empty());
        ready.extend(lines.map(|(id, flags)| Ready::Line(*id, flags)));
        ready
    }

    fn poll_deadline(&self) -> Option<Instant> {
        let lines = self.lines.values().filter_map(|line| line.deadline);
        let doors = self.doors.values().filter_map(|door| door.machine.poll_deadline());
        let seats = self.seats.values().filter_map(|seat| seat.member.poll_deadline());
        let pauses = self.listeners.values().filter_map(|listening| listening.paused_until);
        let waits = lines.chain(doors).chain(seats).chain(pauses);
        waits.chain(self.beat_deadline()).min()
    }

    fn handle_time(&mut self, now: Instant) {
        let due = |deadline: Option<Instant>| deadline.is_some_and(|at| now >= at);
        let lines: Vec<PeerId> = self
            .lines
            .iter()
            .filter(|(_, line)| due(line.deadline))
            .map(|(id, _)| *id)
            .collect();
        for id in lines {
            if let Some(Line {
                owner: Owner::Stranger { .. },
                ..
            }) = self.lines.remove(&id)
            {
                self.strangers.note("it did not prove itself in time");
            }
        }
        let doors = self.doors.iter().filter(|(_, door)| due(door.machine.poll_deadline()));
        for key in doors.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.with_door(key, |machine| machine.handle_time(now));
        }
        let seats = self.seats.iter().filter(|(_, seat)| due(seat.member.poll_deadline()));
        for id in seats.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.with_member(id, |member| member.handle_time(now));
        }
        for listening in self
            .listeners
            .values_mut()
            .filter(|listening| due(listening.paused_until))
        {
            listening.paused_until = None;
        }
        if due(self.beat_deadline()) {
            self.beat(now);
        }
    }

    fn add_line(&mut self, link: Link, owner: Owner, deadline: Option<Instant>) -> PeerId {
        let id = self.new_id();
        self.lines.insert(id, Line { link, owner, deadline });
        id
    }

    /// Closes a connection once all is sent.
    fn close(&mut self, id: PeerId) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        if line.link.is_connecting() {
            self.lines.remove(&id);
        } else {
            line.owner = Owner::Closing;
            line.deadline = Some(Instant::now() + CLOSE_TIMEOUT);
        }
    }
}
