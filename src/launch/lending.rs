//! Zero copy: which of its buffers a rank lends its peers, and how an abort takes them back.
//!
//! Ranks of one process address each other's memory. Where every peer's device reaches a buffer, its rank lends it: the
//! peers' kernels read the input and write the output themselves (`cuda/collective/two_shot_direct.h`). Where it is on,
//! for all ranks of a communicator alike, each decides for its own buffers, and its kernel tells the peers' kernels.
//!
//! A user may free the buffers of a rank that was aborted, while peers' kernels would still use them. So an abort in
//! mid-operation raises the stop word of every peer too, and waits until none of their kernels can touch what was lent:
//!   - one that starts later reads its stop word before it touches anything lent;
//!   - one that runs gives up at its next wait. On a GPU it parks then, so that its stream does not run past the
//!     unfinished operation before that rank is aborted itself; on the host device the call returns the error.
//!
//! Replays of graphs are not seen here: to wait for them before an abort is the caller's duty, on all ranks.

use super::layout::{LENDS_INPUT, LENDS_OUTPUT};
use super::running::Running;
use super::{Engine, Stop};
use crate::device::{Device, Devices};
use crate::transport::Path;
use crate::warning;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an abort waits for peers' kernels, which may be queued behind other work.
const TAKE_BACK_TIMEOUT: Duration = Duration::from_secs(10);

/// What a rank may lend.
#[derive(Clone, Copy)]
pub(super) struct Lending {
    /// The devices of all ranks.
    devices: Devices,
    /// Why nothing is lent.
    refusal: Option<&'static str>,
    /// Whether each is lent at all where it can be; a test may want only one.
    pub(super) input: bool,
    pub(super) output: bool,
}

/// What is lent in one operation.
#[derive(Clone, Copy)]
pub(super) struct Lent {
    pub(super) input: bool,
    pub(super) output: bool,
    reason: &'static str,
}

impl Lending {
    pub(super) fn new(device: &dyn Device, path: Path, devices: &[[u8; 16]], enabled: bool) -> Lending {
        let one_process = path == Path::P2p && devices.len() > 1;
        let refusal = match (one_process, enabled) {
            (false, _) => Some("the ranks are not all in one process, or there is no P2P"),
            (true, false) => Some("OSSICLE_ZERO_COPY is not 1 on all ranks"),
            (true, true) => None,
        };
        Lending {
            devices: device.devices(devices),
            refusal,
            input: true,
            output: true,
        }
    }

    /// The same on all ranks. Where it is off nothing of this room has a part in an operation or an abort.
    pub(super) fn is_on(&self) -> bool {
        self.refusal.is_none()
    }

    /// For buffers that kernels of these devices reach.
    pub(super) fn of(&self, input: Devices, output: Devices) -> Lent {
        if let Some(reason) = self.refusal {
            let (input, output) = (false, false);
            return Lent { input, output, reason };
        }
        let input = self.input && input.contains(self.devices);
        let output = self.output && output.contains(self.devices);
        let reason = if input && output {
            "all ranks are in one process"
        } else {
            "not all ranks' devices are known to reach the memory"
        };
        Lent { input, output, reason }
    }
}

impl Lent {
    pub(super) fn bits(self) -> u32 {
        let bit = |lent, bit| if lent { bit } else { 0 };
        bit(self.input, LENDS_INPUT) | bit(self.output, LENDS_OUTPUT)
    }
}

impl fmt::Display for Lent {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let way = |lent| if lent { "direct" } else { "staged" };
        let Lent { input, output, reason } = *self;
        write!(f, "input {}, output {}: {reason}", way(input), way(output))
    }
}

impl Engine {
    /// For an abort. If an operation was under way, peers may be using what this rank lent them.
    pub(super) fn stop_and_take_back(&self) {
        if !self.lending.is_on() {
            return self.raise(Stop::Abort);
        }
        let launched = self.launched.load(Ordering::SeqCst);
        let was_idle = matches!(self.idle(), Ok(true));
        self.raise(Stop::Abort);
        let complete = was_idle && self.launched.load(Ordering::SeqCst) == launched && matches!(self.idle(), Ok(true));
        if complete {
            return;
        }
        self.took_back.store(true, Ordering::SeqCst);
        for peer in self.peers() {
            peer.raise(Stop::PeerLost);
        }
    }

    /// Waits for the kernels of peers that were stopped above.
    pub(super) fn wait_for_borrowers(&self) {
        if !self.took_back.load(Ordering::SeqCst) {
            return;
        }
        let deadline = Instant::now() + TAKE_BACK_TIMEOUT;
        for peer in self.peers() {
            while peer.may_borrow() {
                if Instant::now() > deadline {
                    warning!(
                        "rank {} was aborted, and a kernel of rank {} still may use its buffers after {} s: abort that rank \
                         too before they are freed",
                        self.rank,
                        peer.rank,
                        TAKE_BACK_TIMEOUT.as_secs()
                    );
                    return;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    pub(super) fn peers(&self) -> Vec<Arc<Running>> {
        let members = self.clique.members.lock();
        members
            .iter()
            .filter(|member| member.rank != self.rank)
            .cloned()
            .collect()
    }
}
