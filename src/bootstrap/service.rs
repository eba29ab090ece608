//! How other threads reach the library's bootstrap thread: commands, its start and its end.
//!
//! The thread is started by the first command and ends by itself, descriptors closed, when nothing needs it. Whether
//! it ends is decided under the lock that a command is posted under, so that no command is lost. After a fork the
//! child has no such thread; its first command starts one of its own.

use super::answer::Reply;
use super::driver::Driver;
use super::handshake::Secret;
use super::link::{above_standard, describe, with_descriptors};
use super::member::Farewell;
use super::rendezvous::{already_used, Outcome};
use super::unique_id::Root;
use super::{Introduction, PeerEvent};
use crate::error::{Error, Result};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use rustix::event::{eventfd, EventfdFlags};
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How many ids that are used up are remembered, so that a second use gets a sentence instead of silence.
const REMEMBERED_IDS: usize = 1024;

pub(super) type SeatId = u64;
pub(super) type Gathered = Result<Vec<Vec<u8>>>;
pub(super) type Report = Box<dyn Fn(PeerEvent) + Send>;

pub(super) enum Command {
    /// Serve a new id; the answer is where.
    OpenRendezvous {
        uid: u64,
        secret: Secret,
        bind: SocketAddr,
        reply: Reply<Result<SocketAddr>>,
    },
    Join {
        seat: SeatId,
        join: Join,
        reply: Reply<Result<Vec<Introduction>>>,
    },
    Contribute {
        seat: SeatId,
        payload: Result<Vec<u8>>,
        timeout: Duration,
        reply: Reply<Gathered>,
    },
    Watch {
        seat: SeatId,
        report: Report,
    },
    /// Dropping `done` is the answer.
    End {
        seat: SeatId,
        farewell: Farewell,
        done: Reply<()>,
    },
}

pub(super) struct Join {
    /// Where the ranks meet.
    pub(super) root: Root,
    /// Further roots of a scalable init, which rank 0 tells that their ids are used up.
    pub(super) spent: Vec<Root>,
    pub(super) introduction: Introduction,
    pub(super) timeout: Duration,
    /// Where rank 0 serves the star.
    pub(super) bind: Option<SocketAddr>,
}

struct Running {
    pid: u32,
    /// None once the thread decided to end.
    wake: Option<Arc<OwnedFd>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    running: Option<Running>,
    commands: Vec<Command>,
    used: VecDeque<(u64, Secret, Outcome)>,
}

static SHARED: Lazy<Mutex<Shared>> = Lazy::new(Mutex::default);

pub(super) fn new_seat() -> SeatId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Hands a command to the thread, which is started if there is none.
pub(super) fn post(command: Command) -> Result<()> {
    let mut shared = SHARED.lock();
    let wake = match shared
        .running
        .as_ref()
        .filter(|running| running.pid == std::process::id())
    {
        Some(Running { wake: Some(wake), .. }) => wake.clone(),
        _ => start(&mut shared)?,
    };
    shared.commands.push(command);
    drop(shared);
    signal(&wake)
}

fn signal(wake: &OwnedFd) -> Result<()> {
    match rustix::io::write(wake, &1u64.to_ne_bytes()) {
        // A full counter wakes as well.
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(errno) => Err(Error::system(format!(
            "cannot wake the bootstrap thread: {}",
            std::io::Error::from(errno)
        ))),
    }
}

fn start(shared: &mut Shared) -> Result<Arc<OwnedFd>> {
    if let Some(running) = shared.running.take() {
        if running.pid == std::process::id() {
            join(running);
        } else {
            // A forked child has neither the thread nor the callers behind the commands.
            std::mem::forget(running.thread);
            shared.commands.clear();
        }
    }
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let wake = with_descriptors(|| eventfd(0, flags))
        .and_then(above_standard)
        .map_err(|errno| Error::system(format!("cannot make an eventfd: {}", describe(errno))))?;
    let wake = Arc::new(wake);
    let driver = Driver::new(wake.clone());
    let thread = std::thread::Builder::new()
        .name("ossicle-boot".into())
        .spawn(move || serve(driver))
        .map_err(|error| Error::system(format!("cannot start the bootstrap thread: {error}")))?;
    shared.running = Some(Running {
        pid: std::process::id(),
        wake: Some(wake.clone()),
        thread: Some(thread),
    });
    Ok(wake)
}

/// The body of the thread. A panic in it is a defect; the callers that wait see their channels close.
fn serve(mut driver: Driver) {
    let run = std::panic::AssertUnwindSafe(|| driver.run());
    if std::panic::catch_unwind(run).is_err() {
        let mut shared = SHARED.lock();
        shared.commands.clear();
        end(&mut shared);
    }
}

pub(super) fn take_commands() -> Vec<Command> {
    std::mem::take(&mut SHARED.lock().commands)
}

/// Called by the idle thread: whether it may end. After true the next command starts another.
pub(super) fn may_end() -> bool {
    let mut shared = SHARED.lock();
    if !shared.commands.is_empty() {
        return false;
    }
    end(&mut shared);
    true
}

fn end(shared: &mut Shared) {
    if let Some(running) = &mut shared.running {
        running.wake = None;
    }
}

/// Waits for the thread if it decided to end, so that a caller who ended its last session finds no thread left.
pub(super) fn reap() {
    let ending =
        |running: &mut Running| running.wake.is_none() && running.pid == std::process::id() && running.thread.is_some();
    let ended = SHARED.lock().running.take_if(ending);
    if let Some(running) = ended {
        join(running);
    }
}

fn join(mut running: Running) {
    if let Some(thread) = running.thread.take() {
        // The body has its own panic boundary, and what it takes from here to its end is closing descriptors.
        let _ = thread.join();
    }
}

pub(super) fn remember(uid: u64, secret: Secret, outcome: Outcome) {
    let mut shared = SHARED.lock();
    if shared.used.len() == REMEMBERED_IDS {
        shared.used.pop_front();
    }
    shared.used.push_back((uid, secret, outcome));
}

/// What a rank is told that comes with an id that this process served; None if it never did or forgot.
pub(super) fn used(uid: u64) -> Option<(Secret, Error)> {
    let shared = SHARED.lock();
    let (_, secret, outcome) = shared.used.iter().find(|(used, ..)| *used == uid)?;
    Some((*secret, already_used(outcome)))
}
