//! From a plan to kernels on streams.
//!
//! An `Engine` is one rank's machinery: its inbox and its peers', the work templates with every address resolved, the
//! control block. It is made once, when the communicator becomes ready; an operation then costs a plan, a copy of a
//! template and a launch: no allocation, no lock that another communicator takes, no look-up.

mod budget;
mod clique;
mod connect;
mod fork;
pub mod layout;
mod lending;
mod net_links;
mod network;
mod order;
mod running;
mod settings;
mod templates;
#[cfg(test)]
mod tests;

pub use connect::introduction;
pub use net_links::OnFault;
pub use network::between_hosts;
pub use running::beat;

use crate::device::{
    self, Device, DeviceKind, Devices, Kernel, KernelFamily, Launch, Memory, StreamKey, CALLERS_THREAD_KEY,
};
use crate::error::{Error, Result};
use crate::info;
use crate::plan::{self, Algorithm, Call, Choice, Profile};
use crate::request::{Collective, DataType, ReduceOp, Request};
use crate::transport::PeerInbox;
use clique::Clique;
use layout::{Control, FaultRecord, OneShotWork, ProgramWork, TwoShotWork, NO_ROOT, STARTED_UNKNOWN};
use lending::{Lending, Reached};
use net_links::Network;
use order::{StreamOrder, Target};
use parking_lot::Mutex;
use std::any::Any;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use templates::Programs;

/// Why a kernel of this rank must stop waiting; written to the control block, read by every device wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A peer was lost: only the host device leaves its kernel for this; a GPU kernel waits on until abort, so that no
    /// stream runs past an unfinished collective. (What that one lent is another matter: `lending`.)
    PeerLost,
    /// ncclCommAbort on this rank.
    Abort,
}

/// One rank's machinery.
pub struct Engine {
    rank: u32,
    places: Vec<String>,
    device: Arc<dyn Device>,
    profile: Profile,
    check_pointers: bool,
    fail_when_late: bool,
    programs: Box<Programs>,
    /// Of ranks that are all on one host, as two_shot is.
    one_shot: Option<Box<OneShotWork>>,
    two_shot: Option<Box<TwoShotWork>>,
    memory: Arc<KernelMemory>,
    /// Where a neighbour in the ring is on another host.
    network: Option<Network>,
    clique: Arc<Clique>,
    lending: Lending,
    order: Arc<Mutex<StreamOrder>>,
    /// Eager launches.
    launched: Arc<AtomicU64>,
    faults_seen: AtomicU64,
    failure_taken: AtomicBool,
    /// The hold on blocks of the GPU. It ends with the engine: replays of graphs that come later leave at once.
    reservation: Option<budget::Reservation>,
}

/// What the addresses in the templates point into. Every graph that has a kernel of the engine holds a reference.
struct KernelMemory {
    /// Dropped first, before what may take time.
    gone: lending::Gone,
    control: Memory,
    _state: Memory,
    /// By rank; None on other hosts.
    inboxes: Vec<Option<Arc<PeerInbox>>>,
    _net: Option<Arc<dyn Any + Send + Sync>>,
}

/// What walks a program that moves bytes and reduces none.
const BYTES_PROGRAM: Kernel = Kernel::Reduction {
    family: KernelFamily::Program,
    datatype: DataType::Uint8,
    op: ReduceOp::Sum,
};

/// One planned operation of one rank, ready to launch.
pub struct Work {
    kernel: Kernel,
    choice: Choice,
    arguments: Arguments,
    stream: *mut c_void,
    stream_key: StreamKey,
}

/// The kernel's parameter; large, and copied once on purpose: it is what cuLaunchKernel reads.
#[allow(clippy::large_enum_variant)]
enum Arguments {
    Program(ProgramWork),
    OneShot(OneShotWork),
    TwoShot(TwoShotWork),
}

// SAFETY: the stream handle and the addresses are values for the device, not read by the CPU.
unsafe impl Send for Work {}

impl Work {
    fn on_callers_thread(&self) -> bool {
        self.stream_key.stream == CALLERS_THREAD_KEY
    }

    /// Where it goes if it goes where its caller says.
    fn target(&self) -> Target {
        Target {
            stream: self.stream,
            key: self.stream_key,
        }
    }

    fn arguments(&self) -> &[u8] {
        let (address, bytes) = match &self.arguments {
            Arguments::Program(work) => (std::ptr::from_ref(work).cast::<u8>(), size_of::<ProgramWork>()),
            Arguments::OneShot(work) => (std::ptr::from_ref(work).cast::<u8>(), size_of::<OneShotWork>()),
            Arguments::TwoShot(work) => (std::ptr::from_ref(work).cast::<u8>(), size_of::<TwoShotWork>()),
        };
        // SAFETY: the struct is plain data of that size without padding (its pads are fields), and lives with self.
        unsafe { std::slice::from_raw_parts(address, bytes) }
    }
}

impl KernelMemory {
    fn control(&self) -> &Control {
        // SAFETY: `control` is a live, zero-initialised Control of pinned memory, made of atomics.
        unsafe { &*self.control.address.cast::<Control>() }
    }
}

impl Engine {
    fn control(&self) -> &Control {
        self.memory.control()
    }

    /// Checks pointers and stream, plans. None: nothing to do (no elements, or one rank in place).
    pub fn prepare(&self, request: &Request) -> Result<Option<Work>> {
        let stream_key = self.device.check_stream(request.stream)?;
        if request.count == 0 {
            return Ok(None);
        }
        let call = Call {
            count: request.count,
            datatype: request.datatype,
            op: request.op,
        };
        let reached = self.check_buffers(request, &call, self.check_pointers)?;
        let in_place = request.send == request.recv.cast_const();
        let reduces = request.collective == Collective::AllReduce;
        if self.profile.ranks == 1 && in_place && !(reduces && request.op == ReduceOp::Avg) {
            return Ok(None);
        }
        let (kernel, choice, arguments) = match request.collective {
            Collective::AllReduce => self.all_reduce(request, &call, reached)?,
            Collective::AllGather | Collective::Broadcast { .. } => self.move_data(request, call.bytes())?,
        };
        self.tell(request, &choice);
        Ok(Some(Work {
            kernel,
            choice,
            arguments,
            stream: request.stream,
            stream_key,
        }))
    }

    fn all_reduce(&self, request: &Request, call: &Call, reached: Reached) -> Result<(Kernel, Choice, Arguments)> {
        let kernel = |family| Kernel::Reduction {
            family,
            datatype: call.datatype,
            op: call.op,
        };
        if kernel(KernelFamily::Program).index().is_none() {
            return Err(Error::usage(format!(
                "all-reduce of {} with {} is not built yet in this version of Ossicle (built: float, bfloat16, half, \
                 int32, uint8, double with sum, max, avg); see docs/support.md",
                call.datatype.name(),
                call.op.name()
            )));
        }
        let choice = plan::choose(&self.profile, call)?;
        let (input, output, count) = (request.send.cast(), request.recv.cast(), request.count as u64);
        Ok(match (choice.algorithm, &self.one_shot, &self.two_shot) {
            (Algorithm::OneShot, Some(template), _) => {
                let work = OneShotWork {
                    input,
                    output,
                    count,
                    ..**template
                };
                (kernel(KernelFamily::OneShot), choice, Arguments::OneShot(work))
            }
            (Algorithm::TwoShot, _, Some(template)) => {
                let work = TwoShotWork {
                    input,
                    output,
                    count,
                    lends: self.lends(request, call, reached)?,
                    ..**template
                };
                (kernel(KernelFamily::TwoShot), choice, Arguments::TwoShot(work))
            }
            _ => {
                let work = ProgramWork {
                    input,
                    output,
                    count,
                    channels: choice.blocks,
                    ..self.programs.all_reduce
                };
                (kernel(KernelFamily::Program), choice, Arguments::Program(work))
            }
        })
    }

    /// A collective that moves bytes, whatever their type. How wide a rank's loads are follows from its own buffers; the
    /// data is cut at the same bytes on all ranks.
    fn move_data(&self, request: &Request, count: u64) -> Result<(Kernel, Choice, Arguments)> {
        let choice = plan::choose_move(&self.profile, request.collective, count)?;
        let (input, output) = (request.send.cast(), request.recv.cast());
        let (root, template) = match request.collective {
            Collective::Broadcast { root } => (root as u32, &self.programs.broadcast),
            _ => (NO_ROOT, &self.programs.all_gather),
        };
        Ok(match (choice.algorithm, &self.one_shot, &self.two_shot) {
            (Algorithm::OneShot, Some(template), _) => {
                let work = OneShotWork {
                    input,
                    output,
                    count,
                    root,
                    ..**template
                };
                (Kernel::OneShotMove, choice, Arguments::OneShot(work))
            }
            (Algorithm::TwoShot, _, Some(template)) => {
                let work = TwoShotWork {
                    input,
                    output,
                    count,
                    root,
                    ..**template
                };
                (Kernel::TwoShotMove, choice, Arguments::TwoShot(work))
            }
            _ => {
                let mut work = ProgramWork {
                    input,
                    output,
                    count,
                    channels: choice.blocks,
                    ..*template
                };
                match self.programs.broadcast_steps.get(root as usize) {
                    Some(step) => work.step[0] = *step,
                    None => work.stride = count,
                }
                (BYTES_PROGRAM, choice, Arguments::Program(work))
            }
        })
    }

    fn tell(&self, request: &Request, choice: &Choice) {
        info!(
            Coll,
            "{}: rank {} count {} datatype {} op {} -> {} ({}), {} blocks of {} threads: {}",
            request.collective.name(),
            self.rank,
            request.count,
            request.datatype.name(),
            request.op.name(),
            choice.algorithm.name(),
            choice.algorithm.protocol(),
            choice.blocks,
            choice.threads,
            choice.reason
        );
    }

    /// `look_up`: at this call, not only once an allocation.
    fn check_buffers(&self, request: &Request, call: &Call, look_up: bool) -> Result<Reached> {
        let bytes = call.bytes() as usize;
        let (mut sends, mut received) = (true, bytes);
        match request.collective {
            Collective::AllReduce => {}
            // The product was checked against the address space when the call was made (Request::check).
            Collective::AllGather => received = bytes * self.profile.ranks as usize,
            Collective::Broadcast { root } => sends = root == self.rank as i32,
        }
        let input = match sends {
            true => self.check_buffer("sendbuff", request.send, bytes, call.datatype, look_up)?,
            false => Devices::NONE,
        };
        let output = self.check_buffer("recvbuff", request.recv, received, call.datatype, look_up)?;
        Ok(Reached { input, output })
    }

    fn check_buffer(
        &self,
        name: &str,
        pointer: *const c_void,
        bytes: usize,
        datatype: DataType,
        look_up: bool,
    ) -> Result<Devices> {
        if !(pointer as usize).is_multiple_of(datatype.bytes()) {
            return Err(Error::argument(format!(
                "{name} is {pointer:p}, which is not aligned to the {} bytes of a {}",
                datatype.bytes(),
                datatype.name()
            )));
        }
        self.device.check_pointer(name, pointer, bytes, look_up)
    }

    /// Makes every wait of this rank's kernels end. Any thread. An abort waits for peers' kernels that use what this rank
    /// lent (`lending`); the loss of a peer waits for nothing.
    pub fn stop(&self, reason: Stop) {
        match reason {
            Stop::Abort => {
                self.take_back();
                self.control().abort();
            }
            Stop::PeerLost if self.device.kind() == DeviceKind::Host => self.control().give_up(),
            Stop::PeerLost => {}
        }
    }

    /// That the device failed, a work request did, or what a kernel reported since the last call: a wait past the clock
    /// bound. The code of that is ncclInProgress when it is a report only, ncclSystemError when OSSICLE_WAIT_FAIL made the kernel park.
    pub fn take_fault(&self) -> Option<Error> {
        if let Err(error) = self.device.health() {
            return Some(error);
        }
        if !self.failure_taken.load(Ordering::Relaxed) {
            if let Some(error) = self.failed_request() {
                return (!self.failure_taken.swap(true, Ordering::Relaxed)).then_some(error);
            }
        }
        let fault = &self.control().fault;
        let sequence = fault.sequence.load(Ordering::Acquire);
        if sequence == self.faults_seen.swap(sequence, Ordering::Relaxed) {
            return None;
        }
        let text = self.lateness(fault);
        Some(if self.fail_when_late {
            Error::system(text)
        } else {
            Error::new(crate::error::Code::InProgress, text)
        })
    }

    fn lateness(&self, fault: &FaultRecord) -> String {
        let peer = fault.peer.load(Ordering::Relaxed);
        let place = self.places.get(peer as usize).map_or("?", String::as_str);
        let ordinal = fault.ordinal.load(Ordering::Relaxed);
        let there = match fault.peer_started.load(Ordering::Relaxed) {
            0 => format!("has not started operation {ordinal}, nor any before it"),
            STARTED_UNKNOWN => String::from("is on another host, which does not say what it has started"),
            started if started <= ordinal => {
                format!("has not started operation {ordinal}; its last is {}", started - 1)
            }
            started if started == ordinal + 1 => {
                format!("has started operation {ordinal} and waits or is stuck in it itself")
            }
            started => format!("has gone on to operation {}", started - 1),
        };
        format!(
            "rank {} waits for rank {peer} ({place}) in operation {ordinal}, channel {}, step {}, since {} ms: the kernel of \
             rank {peer} {there}",
            self.rank,
            fault.channel.load(Ordering::Relaxed),
            fault.step.load(Ordering::Relaxed),
            fault.waited_ns.load(Ordering::Relaxed) / 1_000_000,
        )
    }

    /// Waits until no eager kernel of this rank touches memory any more, or until `give_up` answers. Kernels of a
    /// device that failed will not say that they left. Replays of graphs are the caller's to wait for.
    pub fn synchronize(&self, give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        let begun = Instant::now();
        while !self.idle()? {
            if let Some(error) = give_up() {
                return Err(error);
            }
            match begun.elapsed() {
                waited if waited < Duration::from_millis(1) => std::thread::yield_now(),
                _ => {
                    self.device.health()?;
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
        Ok(())
    }

    fn launch_of<'a>(&'a self, work: &'a Work, stream: *mut c_void) -> Launch<'a> {
        Launch {
            device: &self.device,
            kernel: work.kernel,
            blocks: work.choice.blocks,
            threads: work.choice.threads,
            arguments: work.arguments(),
            stream,
        }
    }

    /// After a launch on the caller's thread: whether the operation was stopped.
    fn outcome(&self) -> Result<()> {
        if self.control().was_stopped() {
            // The caller may free its buffers now.
            self.take_back();
            return Err(Error::remote(format!(
                "rank {}: the operation was stopped before it was complete, by ncclCommAbort or by the loss of a rank",
                self.rank
            )));
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Memory that kernels still use must not go back to the pool; the communicator waited before, so this is the
        // case of a GPU kernel that does not see its stop word.
        let deadline = Instant::now() + Duration::from_secs(10);
        let late =
            || (Instant::now() > deadline).then(|| Error::system("kernels of a destroyed communicator still run"));
        // A graph may bring back what else is over.
        if self.order.lock().was_captured() || !matches!(self.idle(), Ok(true)) {
            self.take_back();
        }
        self.control().abort();
        let done = self.synchronize(&late);
        if let Err(error) = &done {
            crate::warning!("{}: its memory and its blocks of the GPU are kept", error.text);
            std::mem::forget(self.memory.clone());
            std::mem::forget(self.reservation.take());
        }
        // Its rings go with it, so that no kernel waits for them any more.
        drop(self.network.take());
        running::leave(self, done.is_ok());
        // A kernel that still runs has the event, and its side streams.
        if done.is_ok() {
            self.give_mark_back();
            self.give_sides_back();
        }
    }
}

/// One rank's part of a batch: its engine and its works in order.
pub type Part<'a> = (&'a Engine, &'a [Work]);

/// A batch that was checked, with all that its launch needs.
pub struct Admitted<'a> {
    batch: &'a [Part<'a>],
    sides: fork::Sides,
}

/// Checks a batch against what the ranks of this process have launched. The parts belong to different communicators or
/// ranks. After a refusal nothing has changed.
pub fn admit<'a>(batch: &'a [Part<'a>]) -> Result<Admitted<'a>> {
    order::check_streams(batch)?;
    order::check_captures(batch)?;
    batch.iter().try_for_each(|(engine, works)| engine.check_order(works))?;
    let sides = fork::sides(batch)?;
    clique::enter(batch)?;
    Ok(Admitted { batch, sides })
}

impl Admitted<'_> {
    /// What goes to streams that are queues is put there, and the call returns. On the host device's default stream the
    /// call returns when all are done, with an error if a rank was stopped before its operation was complete.
    pub fn launch(self) -> Result<()> {
        let here = || self.batch.iter().filter(|part| on_callers_thread(part));
        here().for_each(|(engine, works)| engine.count_launches(works.len() as u64));
        let launched = self.launch_all();
        if launched.is_err() {
            here().for_each(|(engine, works)| engine.uncount_launches(works.len() as u64));
        }
        launched?;
        // All take back what they lent.
        here().map(|(engine, _)| engine.outcome()).fold(Ok(()), Result::and)
    }

    /// An error means that nothing of what runs on the caller's thread has run.
    fn launch_all(&self) -> Result<()> {
        match self.batch {
            // A rank with a thread of its own.
            [(engine, [work])] if work.on_callers_thread() && work.choice.blocks == 1 => {
                device::host::launch_alone(&engine.launch_of(work, work.stream))
            }
            batch => {
                fork::enqueue(batch, &self.sides)?;
                let here = batch.iter().filter(|part| on_callers_thread(part));
                let sequences: Vec<Vec<Launch>> = here.map(launches_of).collect();
                if sequences.is_empty() {
                    return Ok(());
                }
                device::host::launch(&sequences)
            }
        }
    }
}

/// Works of one part are all on the caller's thread or all in streams that are queues (`order::check_streams`).
fn on_callers_thread((_, works): &Part) -> bool {
    works.first().is_some_and(Work::on_callers_thread)
}

fn launches_of<'a>((engine, works): &Part<'a>) -> Vec<Launch<'a>> {
    works.iter().map(|work| engine.launch_of(work, work.stream)).collect()
}
