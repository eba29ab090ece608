//! Zero copy: which of its buffers a rank lends its peers, and how it takes them back at its end.
//!
//! Ranks of one process address each other's memory. Where every peer's device reaches a buffer, its rank lends it: the
//! peers' kernels read the input and write the output themselves (`cuda/collective/two_shot_direct.h`). Where it is on,
//! for all ranks of a communicator alike, each decides for its own buffers, and its kernel tells the peers' kernels.
//!
//! A user may free the buffers of a rank that was aborted, and its stream goes on, while peers' kernels would still use
//! them. So the rank first tells every peer, by its stop word, that operations from its first unfinished one on stay
//! unfinished, and waits for the kernels that may be using what it lent in those; then it stops its own.
//!   - A kernel says that it may be using it, and then reads its stop word: one that has not said so yet never will.
//!   - One that has gives up at its next wait and says that it is out. It needs nobody for that, so that ranks which end
//!     at once do not wait for each other, and one thread may end several.
//!   - Operations that this rank has finished go on: there nothing of it is used any more.
//!
//! Kernels count operations and say all this themselves, so that replays of graphs are no different from launches.

use super::layout::{Control, LENDS_INPUT, LENDS_OUTPUT, STOP_ABORT, STOP_FROM_SHIFT, STOP_PEER_LOST};
use super::{Engine, KernelMemory};
use crate::device::{self, Device, DeviceKind, Devices};
use crate::error::Result;
use crate::info;
use crate::plan::Call;
use crate::request::Request;
use crate::transport::Path;
use crate::warning;
use std::fmt;
use std::sync::atomic::{fence, AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A kernel that is using what was lent is out within a pass over its data. Only one whose blocks find no room on their
/// GPU, which `plan/budget.rs` precludes, or that a debugger holds takes longer.
const TAKE_BACK_TIMEOUT: Duration = Duration::from_secs(10);

/// What a rank may lend.
#[derive(Clone, Copy)]
pub(super) struct Lending {
    /// The devices of all ranks.
    devices: Devices,
    /// Those are several.
    crosses: bool,
    /// Why nothing is lent.
    refusal: Option<&'static str>,
    /// Whether each is lent at all where it can be; a test may want only one.
    pub(super) input: bool,
    pub(super) output: bool,
}

/// Whose kernels reach an operation's buffers.
#[derive(Clone, Copy)]
pub(super) struct Reached {
    pub(super) input: Devices,
    pub(super) output: Devices,
}

/// What is lent in one operation.
#[derive(Clone, Copy)]
pub(super) struct Lent {
    pub(super) input: bool,
    pub(super) output: bool,
    reason: &'static str,
}

impl Lending {
    pub(super) fn new(device: &dyn Device, (path, hosts): (Path, u32), devices: &[[u8; 16]], enabled: bool) -> Lending {
        let one_process = path == Path::P2p && hosts == 1 && devices.len() > 1;
        let refusal = match (one_process, enabled) {
            (false, _) => Some("the ranks are not all in one process on one host, or there is no P2P"),
            (true, false) => Some("OSSICLE_ZERO_COPY is 0 on a rank"),
            (true, true) => None,
        };
        Lending {
            devices: device.devices(devices),
            crosses: device.kind() == DeviceKind::Cuda && devices.iter().any(|uuid| *uuid != devices[0]),
            refusal,
            input: true,
            output: true,
        }
    }

    /// The same on all ranks. Where it is off nothing of this room has a part in an operation or an abort.
    pub(super) fn is_on(&self) -> bool {
        self.refusal.is_none()
    }

    /// Memory that was freed and mapped anew at the same address need not be reached by other GPUs any more.
    fn trusts_no_known_range(&self) -> bool {
        self.is_on() && self.crosses
    }

    pub(super) fn of(&self, reached: Reached) -> Lent {
        if let Some(reason) = self.refusal {
            let (input, output) = (false, false);
            return Lent { input, output, reason };
        }
        let input = self.input && reached.input.contains(self.devices);
        let output = self.output && reached.output.contains(self.devices);
        let reason = if input && output {
            "all ranks are in one process"
        } else {
            "not all ranks' devices are known to reach the memory"
        };
        Lent { input, output, reason }
    }
}

impl fmt::Display for Lending {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.refusal {
            None => write!(f, "zero copy: all ranks are in one process"),
            Some(reason) => write!(f, "no zero copy: {reason}"),
        }
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

/// The ranks of a communicator in this process.
#[derive(Default)]
pub(super) struct Members {
    all: Vec<Member>,
    /// The first operation that one which has ended left unfinished; who comes later is told too.
    unfinished: Option<u64>,
}

/// One rank's kernels, as its peers see them: for as long as anything can run one, a graph too.
struct Member {
    rank: u32,
    device: Arc<dyn Device>,
    memory: Weak<KernelMemory>,
    gone: Arc<AtomicBool>,
}

/// Says at its drop, which is that of a rank's `KernelMemory`, that nothing can run the rank's kernels any more. That a
/// `Weak` leads nowhere is not enough for who frees what they used: it orders nothing that came before.
#[derive(Default)]
pub(super) struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Member {
    /// None: nothing can run its kernels any more, and what they did has happened.
    fn borrower(&self) -> Option<Borrower> {
        let Some(memory) = self.memory.upgrade() else {
            // Another thread is in the middle of that drop.
            while !self.gone.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            return None;
        };
        Some(Borrower {
            rank: self.rank,
            device: self.device.clone(),
            memory,
        })
    }
}

impl Members {
    pub(super) fn enter(&mut self, engine: &Engine) {
        if let Some(from) = self.unfinished {
            engine.control().lose_peer(from);
        }
        self.all.push(Member {
            rank: engine.rank,
            device: engine.device.clone(),
            memory: Arc::downgrade(&engine.memory),
            gone: engine.memory.gone.0.clone(),
        });
    }

    /// The others, when a rank leaves operations from `from` on unfinished.
    fn leave(&mut self, rank: u32, from: u64) -> Vec<Borrower> {
        self.unfinished = Some(self.unfinished.map_or(from, |known| known.min(from)));
        let others = self.all.iter().filter(|member| member.rank != rank);
        others.filter_map(Member::borrower).collect()
    }
}

struct Borrower {
    rank: u32,
    device: Arc<dyn Device>,
    memory: Arc<KernelMemory>,
}

impl Borrower {
    /// Whether a kernel may be using what a rank lent that left operations from `from` on unfinished, and said so.
    fn may_use(&self, from: u64) -> bool {
        let control = self.memory.control();
        let borrowing = control.borrowing.load(Ordering::SeqCst);
        let over = |word: u64| word >= borrowing;
        borrowing > from
            && !over(control.out.load(Ordering::Acquire))
            && !over(control.left.load(Ordering::Acquire))
            // A device that failed runs nothing.
            && self.device.health().is_ok()
    }

    fn until_out(&self, from: u64, deadline: Instant) -> bool {
        let begun = Instant::now();
        while self.may_use(from) {
            match Instant::now() {
                now if now > deadline => return false,
                now if now - begun < Duration::from_millis(1) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        true
    }
}

impl Control {
    /// The first operation that a lost peer leaves unfinished.
    fn lost_from(&self) -> Option<u64> {
        let stop = self.stop.load(Ordering::SeqCst);
        (stop & STOP_PEER_LOST != 0).then_some(stop >> STOP_FROM_SHIFT)
    }

    /// The first operation that this rank has not finished.
    fn unfinished(&self) -> u64 {
        let left = self.left.load(Ordering::Acquire);
        self.lost_from().map_or(left, |from| from.min(left))
    }

    /// A peer leaves operations from this one on unfinished.
    fn lose_peer(&self, from: u64) {
        let told = self.stop.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |stop| {
            let known = if stop & STOP_PEER_LOST != 0 {
                stop >> STOP_FROM_SHIFT
            } else {
                from
            };
            Some(known.min(from) << STOP_FROM_SHIFT | stop & STOP_ABORT | STOP_PEER_LOST)
        });
        debug_assert!(told.is_ok());
    }

    pub(super) fn abort(&self) {
        self.stop.fetch_or(STOP_ABORT, Ordering::SeqCst);
    }

    /// A peer is lost, and this rank's kernels do not go on without it.
    pub(super) fn give_up(&self) {
        self.lose_peer(self.unfinished());
    }

    /// Whether an operation that has left was told to stop.
    pub(super) fn was_stopped(&self) -> bool {
        let left = self.left.load(Ordering::Acquire);
        self.stop.load(Ordering::SeqCst) & STOP_ABORT != 0 || self.lost_from().is_some_and(|from| left > from)
    }
}

impl Engine {
    /// What an all-reduce lends (bits of `TwoShotWork::lends`).
    pub(super) fn lends(&self, request: &Request, call: &Call, reached: Reached) -> Result<u32> {
        let reached = match self.lending.trusts_no_known_range() {
            true => self.check_buffers(request, call, true)?,
            false => reached,
        };
        let lent = self.lending.of(reached);
        if self.lending.is_on() {
            info!(Coll, "rank {}: {lent}", self.rank);
        }
        Ok(lent.bits())
    }

    /// Before this rank's kernels stop, or where they have: when this returns no peer's kernel uses what it lent, now or
    /// later. Any thread.
    pub(super) fn take_back(&self) {
        if !self.lending.is_on() {
            return;
        }
        let from = self.control().unfinished();
        let peers = self.clique.members.lock().leave(self.rank, from);
        for peer in &peers {
            peer.memory.control().lose_peer(from);
        }
        fence(Ordering::SeqCst);
        let deadline = Instant::now() + TAKE_BACK_TIMEOUT;
        for late in peers.iter().filter(|peer| !peer.until_out(from, deadline)) {
            warning!(
                "rank {} ends, and a kernel of rank {} still may read and write the buffers of its operation {from} after {} \
                 s: free them only when rank {} was aborted too and its stream is done",
                self.rank,
                late.rank,
                TAKE_BACK_TIMEOUT.as_secs(),
                late.rank
            );
        }
        for peer in peers {
            // The last reference, if this is it, may not go while kernels run.
            if peer.device.kind() == DeviceKind::Cuda {
                device::cuda::put_down(peer.memory);
            }
        }
    }
}
