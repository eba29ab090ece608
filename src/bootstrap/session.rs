//! The blocking face of the bootstrap: what the communicator calls.
//!
//! Callers wait on a channel that the bootstrap thread answers, with a deadline, and look at their `Cancel` every 50 ms.

use super::answer::{self, Answer, NoAnswer};
use super::handshake::{self, Secret};
use super::interfaces;
use super::member::Farewell;
use super::service::{self, Command, Join, SeatId};
use super::settings::Settings;
use super::unique_id::{Host, Root, UniqueId};
use super::wire::{cut, MAX_CONTRIBUTION_BYTES, MAX_INTRODUCTION_BYTES, MAX_PLACE_BYTES, MAX_RANKS, MAX_TIMEOUT_MS};
use super::{named, Cancel, Introduction, Watch, GRACE};
use crate::error::{Error, Result};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a caller that waits looks at its `Cancel`.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// The bootstrap thread answers in time by itself; this bounds the wait should it not.
const BACKSTOP: Duration = Duration::from_secs(10);

/// Makes an id whose rendezvous this process serves (`ncclGetUniqueId`), or with `NCCL_COMM_ID` the id of that address.
pub fn create_unique_id() -> Result<UniqueId> {
    create_unique_id_with(&Settings::from_environment()?)
}

pub(super) fn create_unique_id_with(settings: &Settings) -> Result<UniqueId> {
    if let Some(root) = settings.fixed_root()? {
        return Ok(root.emit());
    }
    let bind = listening_address(settings, None)?;
    let uid = u64::from_ne_bytes(random()?);
    let secret = random()?;
    let (reply, answer) = answer::pair();
    service::post(Command::OpenRendezvous {
        uid,
        secret,
        bind,
        reply,
    })?;
    let address = wait(&answer, BACKSTOP, None)??;
    Ok(Root {
        host: Host::Maker,
        address,
        uid,
        secret,
    }
    .emit())
}

fn listening_address(settings: &Settings, near: Option<IpAddr>) -> Result<SocketAddr> {
    interfaces::choose(
        &interfaces::list()?,
        settings.interface_names.as_deref(),
        settings.family,
        near,
    )
}

/// Where this process listens for the data of links.
pub(crate) fn network_address() -> Result<SocketAddr> {
    let settings = Settings::from_environment()?;
    let near = settings.fixed_root()?.map(|root| root.address.ip());
    listening_address(&settings, near)
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::system(format!("the system gives no random bytes: {error}")))?;
    Ok(bytes)
}

/// One rank's membership in a communicator. Dropping it is an abort.
pub struct Session {
    /// None for a communicator of one rank, which needs no connection.
    seat: Option<SeatId>,
    rank: u32,
    place: String,
    /// The unique id's.
    secret: Secret,
    /// An exchange was given up on this side; the rounds are out of step.
    broken: AtomicBool,
}

impl Session {
    /// Joins and returns the introductions of all ranks, in rank order. Every rank gets an error if any rank is
    /// missing after `timeout` (naming the missing ones) or if the ranks contradict each other.
    ///
    /// With several ids all ranks meet at the first; rank 0 tells the makers of the others that they are used up.
    pub fn join(
        ids: &[UniqueId],
        introduction: Introduction,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Result<(Session, Vec<Introduction>)> {
        Session::join_with(&Settings::from_environment()?, ids, introduction, timeout, cancel)
    }

    pub(super) fn join_with(
        settings: &Settings,
        ids: &[UniqueId],
        mut introduction: Introduction,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Result<(Session, Vec<Introduction>)> {
        check(&introduction)?;
        introduction.place = cut(&introduction.place, MAX_PLACE_BYTES).to_owned();
        let roots = ids.iter().map(Root::parse).collect::<Result<Vec<Root>>>()?;
        let Some((root, others)) = roots.split_first() else {
            return Err(Error::argument(
                "the list of ncclUniqueIds is empty: at least one is needed",
            ));
        };
        if let Some((_, error)) = service::used(root.uid) {
            return Err(error);
        }
        let timeout = bounded(timeout);
        let (rank, ranks, place) = (introduction.rank, introduction.ranks, introduction.place.clone());
        let mut session = Session {
            seat: None,
            rank,
            place,
            secret: root.secret,
            broken: AtomicBool::new(false),
        };
        if ranks == 1 && root.host == Host::RankZero {
            return Ok((session, vec![introduction]));
        }
        let bind = match rank {
            0 if ranks > 1 => Some(listening_address(settings, Some(root.address.ip()))?),
            _ => None,
        };
        let spent = if rank == 0 { others.to_vec() } else { Vec::new() };
        let seat = service::new_seat();
        let (reply, answer) = answer::pair();
        service::post(Command::Join {
            seat,
            join: Join {
                root: *root,
                spent,
                introduction,
                timeout,
                bind,
            },
            reply,
        })?;
        // From here on dropping the session withdraws the rank.
        session.seat = Some(seat);
        let roster = wait(&answer, 2 * (timeout + GRACE) + BACKSTOP, Some(cancel))??;
        if ranks == 1 {
            session.end(Farewell::Leave);
        }
        Ok((session, roster))
    }

    /// Every rank contributes a payload (at most 1 MiB) and gets all of them in rank order. A rank that fails may
    /// contribute an error instead, which every rank then returns, naming it.
    pub fn all_gather(&self, payload: Result<Vec<u8>>, timeout: Duration, cancel: &Cancel) -> Result<Vec<Vec<u8>>> {
        // A rank that returned here without contributing would leave the others waiting for it.
        let payload = payload.and_then(|payload| match payload.len() {
            0..=MAX_CONTRIBUTION_BYTES => Ok(payload),
            bytes => Err(Error::internal(format!(
                "an exchange of {bytes} bytes a rank; the most is 1 MiB"
            ))),
        });
        let Some(seat) = self.seat else {
            return payload
                .map(|payload| vec![payload])
                .map_err(|error| error.within(named(self.rank, &self.place)));
        };
        if self.broken.load(Ordering::Acquire) {
            return Err(Error::usage(
                "an earlier exchange of this communicator was given up: it can only be aborted",
            ));
        }
        let timeout = bounded(timeout);
        let (reply, answer) = answer::pair();
        service::post(Command::Contribute {
            seat,
            payload,
            timeout,
            reply,
        })?;
        wait(&answer, timeout + GRACE, Some(cancel)).unwrap_or_else(|error| {
            self.broken.store(true, Ordering::Release);
            Err(error)
        })
    }

    /// A secret for another purpose, equal on all ranks.
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        handshake::derive(&self.secret, purpose, b"session")
    }

    /// Calls both parts of `watch` from a library thread until the session ends. What happened before is reported at
    /// once. A communicator of one rank has no peer to watch, and nothing is called.
    pub fn watch(&self, watch: Watch) {
        if let Some(seat) = self.seat {
            // Without a thread the session has ended already, and so have the reports.
            let _ = service::post(Command::Watch { seat, watch });
        }
    }

    /// Says farewell and closes: peers see no error.
    pub fn leave(mut self) {
        self.end(Farewell::Leave);
    }

    /// Tells the peers that this rank aborts, and closes.
    pub fn abort(mut self) {
        self.end(Farewell::Abort);
    }

    /// Returns when the star knows, or after a second: the process may exit right afterwards.
    fn end(&mut self, farewell: Farewell) {
        let Some(seat) = self.seat.take() else { return };
        let (done, answer) = answer::pair();
        if service::post(Command::End { seat, farewell, done }).is_ok() {
            // The answer is that the sender is dropped.
            let _ = answer.wait(GRACE);
        }
        service::reap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end(Farewell::Abort);
    }
}

fn bounded(timeout: Duration) -> Duration {
    timeout.min(Duration::from_millis(MAX_TIMEOUT_MS))
}

fn check(introduction: &Introduction) -> Result<()> {
    let Introduction {
        rank, ranks, payload, ..
    } = introduction;
    if *ranks == 0 || *ranks > MAX_RANKS {
        return Err(Error::argument(format!(
            "a communicator of {ranks} ranks; it takes 1 to {MAX_RANKS}"
        )));
    }
    if rank >= ranks {
        return Err(Error::argument(format!(
            "rank {rank} of {ranks}; ranks count from 0 to {}",
            ranks - 1
        )));
    }
    if payload.len() > MAX_INTRODUCTION_BYTES {
        let bytes = payload.len();
        return Err(Error::internal(format!(
            "an introduction of {bytes} bytes; the most is {MAX_INTRODUCTION_BYTES}"
        )));
    }
    Ok(())
}

/// The thread's answer; an error when it is cancelled, late, or the thread ended.
fn wait<T>(answer: &Answer<T>, timeout: Duration, cancel: Option<&Cancel>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match answer.wait(left.min(CANCEL_INTERVAL)) {
            Ok(value) => return Ok(value),
            Err(NoAnswer::Gone) => {
                return Err(Error::internal("the bootstrap thread ended with an answer outstanding"));
            }
            Err(NoAnswer::Late) => {}
        }
        if cancel.is_some_and(Cancel::is_set) {
            return Err(Error::usage("the call was ended by ncclCommAbort"));
        }
        if left.is_zero() {
            let waited_ms = timeout.as_millis();
            return Err(Error::system(format!(
                "rank 0's process did not answer within {waited_ms} ms"
            )));
        }
    }
}
