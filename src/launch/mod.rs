//! From a plan to kernels on streams (under construction).

use crate::bootstrap::{Cancel, Session};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::request::Request;
use std::sync::Arc;
use std::time::Duration;

/// What every rank must know of every other before links are made; travels as Introduction::payload.
#[derive(Clone, Debug)]
pub struct RankInfo {
    pub place: String,
}

/// One rank's engine: links to its peers, control block, device state; made when the communicator becomes ready.
pub struct Engine {
    _private: (),
}

/// Why a kernel of this rank must stop waiting; written to the control block, read by every device wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Stop {
    /// ncclCommAbort on this rank.
    Abort = 1,
    /// A peer was lost: only the host device leaves its kernel for this; a GPU kernel parks until abort.
    PeerLost = 2,
}

/// One planned operation of one rank, ready to launch.
pub struct Work {
    _private: (),
}

impl Engine {
    /// Collective over the session: allocates this rank's inbox, exchanges it, links to all peers. `payload` is what
    /// `Engine::introduction` gave on each rank, in rank order.
    pub fn connect(
        _device: Arc<dyn Device>,
        _session: &Session,
        _rank: u32,
        _payloads: &[Vec<u8>],
        _timeout: Duration,
        _cancel: &Cancel,
    ) -> Result<Engine> {
        Err(Error::internal("under construction"))
    }

    /// This rank's share of Introduction::payload: host identity, process, device, settings.
    pub fn introduction(_device: &Arc<dyn Device>) -> Result<Vec<u8>> {
        Err(Error::internal("under construction"))
    }

    /// Checks pointers and stream, plans. None: nothing to do (count 0, or one rank in place).
    pub fn prepare(&self, _request: &Request) -> Result<Option<Work>> {
        Err(Error::internal("under construction"))
    }

    /// Makes every wait of this rank's kernels end. Any thread.
    pub fn stop(&self, _reason: Stop) {}

    /// The sentence of a fault that a kernel reported since the last call (a wait past the clock bound, say).
    pub fn take_fault(&self) -> Option<Error> {
        None
    }

    /// Waits until this rank's launched work is done or `give_up` answers.
    pub fn synchronize(&self, _give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        Ok(())
    }
}

/// Launches the works of one batch, each with its rank's engine; the host device returns when all are done, and with
/// the error of the first rank that was stopped.
pub fn launch(_batch: &[(&Engine, Work)]) -> Result<()> {
    Err(Error::internal("under construction"))
}
