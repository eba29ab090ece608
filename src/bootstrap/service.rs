//! How other threads reach the library's bootstrap thread: commands, its start and its end.
//!
//! The thread is started by the first command and ends by itself, descriptors closed, when nothing needs it. Whether
//! it ends is decided under the lock that a command is posted under, so that no command is lost. After a fork the
//! child has no such thread: it lets go of all that the parent's thread had, and its first command starts one of its
//! own.

use super::answer::Reply;
use super::descriptor::{self, Descriptor};
use super::driver::Driver;
use super::handshake::Secret;
use super::link::{describe, with_descriptors};
use super::member::Farewell;
use super::rendezvous::{already_used, Outcome};
use super::unique_id::Root;
use super::{Introduction, Watch};
use crate::error::{Error, Result};
use crate::sys::thread::{self, Thread};
use parking_lot::Mutex;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// How many ids that are used up are remembered, so that a second use gets a sentence instead of silence.
const REMEMBERED_IDS: usize = 1024;

pub(super) type SeatId = u64;
pub(super) type Gathered = Result<Vec<Vec<u8>>>;

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
        watch: Watch,
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
    /// None once the thread decided to end.
    wake: Option<Arc<Descriptor>>,
    thread: Option<Thread>,
}

#[derive(Default)]
struct Shared {
    running: Option<Running>,
    commands: Vec<Command>,
    used: VecDeque<(u64, Secret, Outcome)>,
}

/// Made at its first use and never freed. Null again in a forked child, which must neither take the parent's lock,
/// since a thread that is gone may hold it, nor drop what is behind it, since its descriptors' numbers are closed.
static SHARED: AtomicPtr<Mutex<Shared>> = AtomicPtr::new(null_mut());

fn shared() -> &'static Mutex<Shared> {
    let mut current = SHARED.load(Ordering::Acquire);
    if current.is_null() {
        let made = Box::into_raw(Box::default());
        match SHARED.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = made,
            Err(first) => {
                // SAFETY: `made` came from a box just now, and nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                current = first;
            }
        }
    }
    // SAFETY: what SHARED ever points to came from a box and is never freed.
    unsafe { &*current }
}

/// Runs in every forked child. Async-signal-safe: it closes descriptors and stores atomics.
unsafe extern "C" fn start_afresh() {
    descriptor::close_in_child();
    SHARED.store(null_mut(), Ordering::Release);
}

/// Before the first descriptor. Two threads at once, or a fork in the middle of it, may register the handler once more;
/// running it twice does no harm.
pub(super) fn register_for_forks() -> std::result::Result<(), Errno> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the handler is a function of this library, which libc strikes off its list should the library be
    // unloaded, and keeps to what a handler of a fork may do.
    match unsafe { libc::pthread_atfork(None, None, Some(start_afresh)) } {
        0 => REGISTERED.store(true, Ordering::Relaxed),
        code => return Err(Errno::from_raw_os_error(code)),
    }
    Ok(())
}

pub(super) fn new_seat() -> SeatId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Hands a command to the thread, which is started if there is none.
pub(super) fn post(command: Command) -> Result<()> {
    let mut shared = shared().lock();
    let wake = match shared.running.as_ref() {
        Some(Running { wake: Some(wake), .. }) => wake.clone(),
        _ => start(&mut shared)?,
    };
    shared.commands.push(command);
    drop(shared);
    signal(&wake)
}

fn signal(wake: &Descriptor) -> Result<()> {
    match rustix::io::write(wake, &1u64.to_ne_bytes()) {
        // A full counter wakes as well.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(Error::system(format!(
            "cannot wake the bootstrap thread: {}",
            std::io::Error::from(errno)
        ))),
    }
}

fn start(shared: &mut Shared) -> Result<Arc<Descriptor>> {
    if let Some(running) = shared.running.take() {
        join(running);
    }
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let wake = with_descriptors(|| eventfd(0, flags))
        .and_then(Descriptor::new)
        .map_err(|errno| Error::system(format!("cannot make an eventfd: {}", describe(errno))))?;
    let wake = Arc::new(wake);
    let driver = Driver::new(wake.clone());
    let thread = thread::spawn(c"ossicle-boot", move || serve(driver))
        .map_err(|error| Error::system(format!("cannot start the bootstrap thread: {error}")))?;
    shared.running = Some(Running {
        wake: Some(wake.clone()),
        thread: Some(thread),
    });
    Ok(wake)
}

/// The body of the thread. A panic in it is a defect; the callers that wait see their channels close.
fn serve(mut driver: Driver) {
    let run = std::panic::AssertUnwindSafe(|| driver.run());
    if std::panic::catch_unwind(run).is_err() {
        let mut shared = shared().lock();
        shared.commands.clear();
        end(&mut shared);
    }
}

pub(super) fn take_commands() -> Vec<Command> {
    std::mem::take(&mut shared().lock().commands)
}

/// Called by the idle thread: whether it may end. After true the next command starts another.
pub(super) fn may_end() -> bool {
    let mut shared = shared().lock();
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
    let ending = |running: &mut Running| running.wake.is_none() && running.thread.is_some();
    let ended = shared().lock().running.take_if(ending);
    if let Some(running) = ended {
        join(running);
    }
}

fn join(mut running: Running) {
    if let Some(thread) = running.thread.take() {
        // The body has its own panic boundary, and what it takes from here to its end is closing descriptors.
        thread.join();
    }
}

pub(super) fn remember(uid: u64, secret: Secret, outcome: Outcome) {
    let mut shared = shared().lock();
    if shared.used.len() == REMEMBERED_IDS {
        shared.used.pop_front();
    }
    shared.used.push_back((uid, secret, outcome));
}

/// What a rank is told that comes with an id that this process served; None if it never did or forgot.
pub(super) fn used(uid: u64) -> Option<(Secret, Error)> {
    let shared = shared().lock();
    let (_, secret, outcome) = shared.used.iter().find(|(used, ..)| *used == uid)?;
    Some((*secret, already_used(outcome)))
}
