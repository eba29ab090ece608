//! A communicator: one rank's membership, its engine, and the state that decides which calls it takes.
//!
//! ```text
//! Initialising --> Ready --> Finalized
//!       \--> Failed            (destroy or abort ends any of them)
//! ```
//!
//! Calls on one communicator run one after another under its own `launching` lock, which no other communicator shares.
//! Nobody who ends a communicator takes that lock: its holder may be waiting for peers.

use super::alarm::Alarm;
use super::registry::Pace;
use crate::bootstrap::{Session, Watch};
use crate::device::Device;
use crate::error::{Code, Error, Result};
use crate::launch::{self, Engine};
use crate::request::Request;
use crate::sys::thread::{self, Thread};
use once_cell::sync::OnceCell;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    Initialising,
    Ready,
    /// Could not be made; the alarm has the error.
    Failed,
    Finalized,
}

pub(crate) struct Communicator {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) blocking: bool,
    /// `ncclConfig_t::commName`, for the log.
    pub(crate) name: Option<String>,
    pub(crate) alarm: Arc<Alarm>,
    phase: AtomicU8,
    engine: OnceCell<Arc<Engine>>,
    pub(super) session: Mutex<Option<Session>>,
    /// Held while work is prepared and launched, which on the host device is until the work is done.
    launching: Mutex<()>,
    /// The thread that makes the communicator; joined before its memory goes.
    initialiser: Mutex<Option<Thread>>,
}

impl Communicator {
    pub(crate) fn new(
        rank: u32,
        ranks: u32,
        device: Arc<dyn Device>,
        blocking: bool,
        name: Option<String>,
    ) -> Communicator {
        Communicator {
            rank,
            ranks,
            device,
            blocking,
            name,
            alarm: Arc::default(),
            phase: AtomicU8::new(Phase::Initialising as u8),
            engine: OnceCell::new(),
            session: Mutex::new(None),
            launching: Mutex::new(()),
            initialiser: Mutex::new(None),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            raw if raw == Phase::Initialising as u8 => Phase::Initialising,
            raw if raw == Phase::Ready as u8 => Phase::Ready,
            raw if raw == Phase::Failed as u8 => Phase::Failed,
            _ => Phase::Finalized,
        }
    }

    fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    /// The communicator is made: `engine` and `session` are its own from here on.
    pub(crate) fn become_ready(&self, engine: Engine, session: Session) {
        let engine = Arc::new(engine);
        self.alarm.arm(Arc::clone(&engine));
        let (reporter, beater) = (Arc::clone(&self.alarm), Arc::clone(&self.alarm));
        session.watch(Watch {
            report: Box::new(move |event| reporter.report(&event)),
            beat: Box::new(move || {
                beater.take_fault();
                launch::beat();
            }),
        });
        // Only the one thread that makes the communicator comes here, so that the cell is empty.
        let _ = self.engine.set(engine);
        *self.session.lock() = Some(session);
        self.set_phase(Phase::Ready);
    }

    pub(crate) fn become_failed(&self) {
        self.set_phase(Phase::Failed);
    }

    /// Starts the thread that makes the communicator.
    pub(crate) fn initialise(self: &Arc<Self>, body: impl FnOnce(&Communicator) + Send + 'static) -> Result<()> {
        let communicator = Arc::clone(self);
        let thread = thread::spawn(c"ossicle-init", move || body(&communicator));
        let thread = thread.map_err(|error| Error::system(format!("cannot start a thread to make {self}: {error}")))?;
        *self.initialiser.lock() = Some(thread);
        Ok(())
    }

    /// Waits for the thread of `initialise`, whose steps have deadlines of their own.
    pub(crate) fn join_initialiser(&self) {
        // Its body catches panics, so that there is no outcome to read here.
        if let Some(thread) = self.initialiser.lock().take() {
            thread.join();
        }
    }

    /// As `join_initialiser`, of a thread that was told to stop; false if it still runs after `limit`.
    pub(crate) fn join_stopped_initialiser(&self, limit: Duration) -> bool {
        let finished = || self.initialiser.lock().as_ref().is_none_or(Thread::is_finished);
        let stopped = Pace::until(limit, finished);
        if stopped {
            self.join_initialiser();
        }
        stopped
    }

    /// Its values may be asked for: it is made, whatever happened to it later.
    pub(crate) fn known(&self) -> Result<()> {
        match self.phase() {
            Phase::Initialising => Err(self.still_initialising()),
            Phase::Failed => self.alarm.check(),
            Phase::Ready | Phase::Finalized => Ok(()),
        }
    }

    /// It takes operations.
    pub(crate) fn usable(&self) -> Result<()> {
        match self.phase() {
            Phase::Initialising => Err(self.still_initialising()),
            Phase::Finalized => Err(Error::argument(format!(
                "{self} was finalized and takes no further calls"
            ))),
            Phase::Ready | Phase::Failed => self.alarm.check(),
        }
    }

    fn still_initialising(&self) -> Error {
        Error::argument(format!(
            "{self} is still being made; wait until ncclCommGetAsyncError no longer gives ncclInProgress"
        ))
    }

    fn engine(&self) -> Result<&Engine> {
        self.engine
            .get()
            .map(Arc::as_ref)
            .ok_or_else(|| Error::internal(format!("{self} is ready without an engine")))
    }

    /// One operation outside any group. Takes no memory of its own.
    pub(crate) fn submit(&self, request: &Request) -> Result<()> {
        request.check(self.ranks, self.rank)?;
        let turn = self.enter()?;
        match turn.engine.prepare(request)? {
            Some(work) => {
                let batch = [(turn.engine, std::slice::from_ref(&work))];
                let admitted = launch::admit(&batch)?;
                admitted.launch().map_err(|error| self.blame(error))
            }
            None => Ok(()),
        }
    }

    /// Waits for its turn on this communicator, and checks once more that it takes operations.
    pub(crate) fn enter(&self) -> Result<Turn<'_>> {
        self.usable()?;
        let guard = self.launching.lock();
        self.usable()?;
        Ok(Turn {
            engine: self.engine()?,
            _guard: guard,
        })
    }

    /// What a failed launch means for this communicator. Being stopped has a cause that the alarm knows; anything else
    /// left the operation half-started here and not on the peers, so that the communicator cannot go on.
    pub(crate) fn blame(&self, error: Error) -> Error {
        if let Err(cause) = self.alarm.check() {
            return cause;
        }
        if error.code != Code::RemoteError {
            self.alarm.fail(error.clone());
        }
        error
    }

    /// Waits until this rank's own work is done; `give_up` adds reasons to stop waiting.
    pub(crate) fn synchronize(&self, give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        let give_up = || {
            self.alarm.take_fault();
            self.alarm.check().err().or_else(give_up)
        };
        let engine = self.engine()?;
        engine.synchronize(&give_up)?;
        engine.drain(&self.alarm.cancel, &give_up)
    }

    /// Ends the taking of operations, after the work of this rank is done.
    pub(crate) fn finalize(&self) -> Result<()> {
        let turn = self.enter()?;
        self.synchronize(&|| None)?;
        self.alarm.check()?;
        self.set_phase(Phase::Finalized);
        drop(turn);
        Ok(())
    }
}

impl fmt::Display for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "the communicator of rank {} of {}", self.rank, self.ranks)?;
        self.name.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

/// The right to launch on a communicator, held by one thread at a time.
pub(crate) struct Turn<'a> {
    pub(crate) engine: &'a Engine,
    _guard: MutexGuard<'a, ()>,
}
