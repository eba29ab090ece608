//! What any thread may do to a communicator at any time: end its waits, and say why.
//!
//! The alarm outlives the communicator's other parts, since the session's thread holds it to report lost peers and to
//! look for faults. It
//! keeps the asynchronous error that `ncclCommGetAsyncError` answers: the first one stays, later ones are its echo.

use crate::bootstrap::{Cancel, PeerEvent};
use crate::error::{Error, Result};
use crate::launch::{Engine, Stop};
use crate::observe::last_error;
use crate::warning;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::atomic::Ordering;
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct Alarm {
    /// Raised by abort; ends a join, a gather and every wait of this library's threads.
    pub(crate) cancel: Cancel,
    sticky: OnceCell<Error>,
    /// There while the communicator may have kernels that wait.
    engine: Mutex<Option<Arc<Engine>>>,
    /// Held while an abort has the engine, which may wait for peers' kernels; so not by the session's thread.
    aborting: Mutex<()>,
}

impl Alarm {
    /// Keeps `error` as the asynchronous error, unless there is one already.
    pub(crate) fn fail(&self, error: Error) {
        // The first error is the cause and the rest follow from it.
        let _ = self.sticky.set(error);
    }

    /// As `fail`, for an error that no call returns: the log and the last error say it.
    pub(crate) fn announce(&self, error: Error) {
        if self.sticky.set(error.clone()).is_ok() {
            warning!("{error}");
            last_error::set(&error.text);
        }
    }

    pub(crate) fn sticky(&self) -> Option<&Error> {
        self.sticky.get()
    }

    pub(crate) fn aborted(&self) -> bool {
        self.cancel.0.load(Ordering::Acquire)
    }

    /// Why nothing may wait or start any more; None while all is well.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(error) = self.sticky() {
            return Err(error.clone());
        }
        if self.aborted() {
            return Err(Error::remote(
                "the communicator was aborted by another thread of this process",
            ));
        }
        Ok(())
    }

    /// Lets `stop` reach the engine; an abort that came before is passed on.
    pub(crate) fn arm(&self, engine: Arc<Engine>) {
        *self.engine.lock() = Some(engine);
        if self.aborted() {
            self.abort_engine();
        }
    }

    /// From here on nothing reaches the engine.
    pub(crate) fn disarm(&self) {
        let _aborting = self.aborting.lock();
        let engine = self.engine.lock().take();
        // Outside the lock: its end waits for the proxy's thread, which may be about to report a fault.
        drop(engine);
    }

    fn lose_peer(&self) {
        if let Some(engine) = &*self.engine.lock() {
            engine.stop(Stop::PeerLost);
        }
    }

    fn abort_engine(&self) {
        let _aborting = self.aborting.lock();
        let engine = self.engine.lock().clone();
        if let Some(engine) = engine {
            engine.stop(Stop::Abort);
        }
    }

    /// Ends every wait of this rank for good.
    pub(crate) fn abort(&self) {
        self.cancel.0.store(true, Ordering::Release);
        self.abort_engine();
    }

    /// A fault that a kernel reported: one that only names a long wait is said; every other one stays, and ends the
    /// waits that a host kernel's caller is in. The session's thread calls this too, since every other caller may be
    /// inside a kernel; so it takes no lock but the engine's place, which is never held while anything waits.
    pub(crate) fn take_fault(&self) {
        let fault = self.engine.lock().as_ref().and_then(|engine| engine.take_fault());
        match fault {
            Some(report) if report.code == crate::error::Code::InProgress => warning!("{report}"),
            Some(fault) => {
                self.announce(fault);
                self.lose_peer();
            }
            None => {}
        }
    }

    /// A connection to another host failed. On the proxy's thread.
    pub(crate) fn network_fault(&self, fault: Error) {
        if self.aborted() {
            return;
        }
        self.announce(fault);
        self.lose_peer();
    }

    /// What the session says of a peer: the error comes before the stop, so that who is stopped finds it.
    pub(crate) fn report(&self, event: &PeerEvent) {
        self.announce(match event {
            PeerEvent::Lost { rank, place } => Error::remote(format!(
                "rank {rank} ({place}) exited or lost its connection without destroying the communicator"
            )),
            PeerEvent::Aborted { rank, place } => {
                Error::remote(format!("rank {rank} ({place}) aborted the communicator"))
            }
        });
        self.lose_peer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn the_first_error_stays_and_names_rank_and_place() {
        let alarm = Alarm::default();
        assert_eq!(alarm.check(), Ok(()));
        alarm.report(&PeerEvent::Lost {
            rank: 2,
            place: "node:123".into(),
        });
        alarm.report(&PeerEvent::Aborted {
            rank: 1,
            place: "node:124".into(),
        });
        alarm.fail(Error::internal("later"));
        let error = alarm.check().unwrap_err();
        assert_eq!(error.code, Code::RemoteError);
        assert!(error.text.contains("rank 2 (node:123)"), "{error}");
    }

    #[test]
    fn an_abort_ends_waits_without_becoming_an_asynchronous_error() {
        let alarm = Alarm::default();
        alarm.abort();
        assert!(alarm.aborted());
        assert_eq!(alarm.check().unwrap_err().code, Code::RemoteError);
        assert_eq!(alarm.sticky(), None);
    }
}
