//! The end of a communicator: finalize, destroy, abort.
//!
//! Destroy waits for this rank's own work, never for a peer's call: ranks may destroy in any order, also one thread for
//! several ranks. Abort waits for nothing but the calls of this process that are inside the communicator, after ending
//! what they wait for. Both claim the handle first, so that a second end finds it gone; an abort that comes while
//! another thread is destroying ends that thread's wait.

use super::communicator::{Communicator, Phase};
use super::registry::{Closing, Pace};
use super::{registry, Progress, RawComm};
use crate::bootstrap::Session;
use crate::error::{Code, Error, Result};
use crate::group::{self, Ending};
use crate::{info, warning};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long destroy lets own work run: teardown has a hard deadline, since its peers may never launch their part.
const DESTROY_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a wait of destroy is said in the log.
const SAID_EVERY: Duration = Duration::from_secs(10);
/// How long calls that were told to stop may take to leave, before the memory they use is given up instead.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits for this rank's work and ends the taking of operations (`ncclCommFinalize`). NULL is none, as in NCCL.
pub fn finalize(comm: RawComm) -> Result<Progress> {
    end(comm, Ending::Finalize(comm))
}

/// Ends a communicator, after its own work is done (`ncclCommDestroy`). NULL is none, as in NCCL.
pub fn destroy(comm: RawComm) -> Result<()> {
    end(comm, Ending::Destroy(comm)).map(drop)
}

fn end(comm: RawComm, ending: Ending) -> Result<Progress> {
    if comm.is_null() {
        return Ok(Progress::Done);
    }
    if !group::is_open() {
        return ending.run().map(|()| Progress::Done);
    }
    registry()
        .and_then(|registry| registry.acquire(comm))
        .map_err(group::noted)?;
    group::queue_ending(ending);
    Ok(Progress::Done)
}

pub(crate) fn finalize_now(comm: RawComm) -> Result<()> {
    registry()?.acquire(comm)?.finalize()
}

pub(crate) fn destroy_now(comm: RawComm) -> Result<()> {
    let closing = registry()?.close(comm)?;
    let phase = closing.phase();
    let drained = match phase {
        Phase::Ready | Phase::Finalized => drain(&closing),
        Phase::Initialising | Phase::Failed => Err(Error::remote(format!("{} was not made yet", *closing))),
    };
    // Every rank hears of a lost peer from its own session, so that this rank may leave quietly then. Of a fault that
    // is this rank's own, or of its giving up, the peers hear only if it says so.
    let sticky = closing.alarm.sticky().cloned();
    let quiet = drained.is_ok() || sticky.as_ref().is_some_and(|error| error.code == Code::RemoteError);
    let excused = sticky.is_some() || phase == Phase::Initialising;
    if drained.is_err() {
        closing.alarm.abort();
    }
    info!(
        Init,
        "ncclCommDestroy comm {comm:?} rank {} nranks {}", closing.rank, closing.ranks
    );
    release(closing, if quiet { Session::leave } else { Session::abort })?;
    if excused {
        return Ok(());
    }
    drained
}

/// Waits until no call is inside and this rank's work is done.
fn drain(closing: &Closing<Communicator>) -> Result<()> {
    let start = Instant::now();
    let said = Cell::new(SAID_EVERY);
    let give_up = || {
        let waited = start.elapsed();
        if waited >= DESTROY_TIMEOUT {
            let limit = DESTROY_TIMEOUT.as_secs();
            return Some(Error::system(format!(
                "the work of {} did not end within {limit} s of its destroy",
                **closing
            )));
        }
        if waited >= said.get() {
            said.set(said.get() + SAID_EVERY);
            warning!(
                "destroy of {} waits for its own work, {} s now",
                **closing,
                waited.as_secs()
            );
        }
        None
    };
    let mut pace = Pace::new();
    while closing.users() > 0 {
        closing.alarm.check()?;
        give_up().map_or(Ok(()), Err)?;
        pace.pause();
    }
    closing.alarm.check()?;
    closing.synchronize(&give_up)
}

/// Ends a communicator now and leaves its peers an asynchronous error (`ncclCommAbort`). Any thread, at any time.
pub fn abort(comm: RawComm) -> Result<()> {
    if comm.is_null() {
        return Ok(());
    }
    info!(Init, "ncclCommAbort comm {comm:?}");
    discard(comm)
}

/// `abort` without a word: also for what was made for a call that then failed.
pub(super) fn discard(comm: RawComm) -> Result<()> {
    let registry = registry()?;
    match registry.close(comm) {
        Ok(closing) => {
            closing.alarm.abort();
            release(closing, Session::abort)
        }
        Err(refused) => {
            let other = registry.acquire_closing(comm).ok_or(refused)?;
            other.alarm.abort();
            say_farewell(&other, Session::abort);
            let stuck = stuck(&other);
            other.leave_and_wait(RELEASE_TIMEOUT).then_some(()).ok_or(stuck)
        }
    }
}

fn say_farewell(communicator: &Communicator, farewell: fn(Session)) {
    let session = communicator.session.lock().take();
    if let Some(session) = session {
        farewell(session);
    }
}

/// Gives everything back. The calls that are still inside have been told to stop.
fn release(closing: Closing<Communicator>, farewell: fn(Session)) -> Result<()> {
    say_farewell(&closing, farewell);
    let stuck = stuck(&closing);
    if !closing.join_stopped_initialiser(RELEASE_TIMEOUT) {
        return Err(stuck);
    }
    // The thread that made the communicator may have finished with success just before it was told to stop.
    say_farewell(&closing, farewell);
    closing.alarm.disarm();
    closing.finish(RELEASE_TIMEOUT).then_some(()).ok_or(stuck)
}

fn stuck(communicator: &Communicator) -> Error {
    let limit = RELEASE_TIMEOUT.as_secs();
    Error::system(format!(
        "a call on {communicator} did not return within {limit} s of being stopped; its memory is kept"
    ))
}
