//! Devices: what a rank's memory lies on and what its kernels run on.
//!
//! A communicator chooses its device when it is made: CUDA where the driver and a GPU are there, else host;
//! `OSSICLE_DEVICE=host|cuda` forces it. Both devices run the same kernels of `cuda/`, compiled twice.

pub mod cuda;
pub mod host;

use crate::bootstrap::Descriptor;
use crate::error::{Error, Result};
use crate::request::{DataType, ReduceOp};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeviceKind {
    Host = 0,
    Cuda = 1,
}

/// Where an allocation lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The device's own memory.
    Device,
    /// Host memory that both the CPU and the device's kernels read and write under the same address.
    Pinned,
}

/// Memory of the library itself (never the user's), zeroed when handed out, given back to the device's pool on drop.
pub struct Memory {
    pub address: *mut u8,
    pub bytes: usize,
    pub placement: Placement,
    pub device: Arc<dyn Device>,
}

// SAFETY: Memory owns its allocation as a Box would; the address is plain data.
unsafe impl Send for Memory {}
// SAFETY: as above; access through the address is unsafe and argued where it happens.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.free(self.address, self.bytes, self.placement);
    }
}

/// How memory of a device reaches the kernels of another process. Ranks tell each other which they can, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// Handles of the driver's virtual memory interface (VMM), as file descriptors.
    Handles,
    /// The driver's legacy IPC.
    Ipc,
}

impl Sharing {
    pub fn name(self) -> &'static str {
        match self {
            Sharing::Handles => "VMM handles",
            Sharing::Ipc => "legacy IPC",
        }
    }
}

/// What an importer is told of shared memory, besides the descriptor that is passed to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ticket {
    /// The descriptor is the memory, of so many bytes.
    Handle { bytes: usize },
    /// The driver's 64 bytes. The descriptor is the write end of a pipe: whoever holds it may still use the memory.
    Ipc { handle: Vec<u8> },
}

impl Ticket {
    pub fn sharing(&self) -> Sharing {
        match self {
            Ticket::Handle { .. } => Sharing::Handles,
            Ticket::Ipc { .. } => Sharing::Ipc,
        }
    }
}

/// A range that this process's kernels address until it is dropped.
pub trait Mapping: Send + Sync {
    fn address(&self) -> *mut u8;
}

/// Zeroed memory of this process that other processes may import.
pub struct Export {
    pub mapping: Box<dyn Mapping>,
    pub ticket: Ticket,
    /// To be passed to every importer, and closed when all of them have it.
    pub fd: Descriptor,
}

/// Which kernel of `cuda/kernels.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// One of a family, for one element type and operation.
    Reduction {
        family: KernelFamily,
        datatype: DataType,
        op: ReduceOp,
    },
    /// All-gather and broadcast of bytes as LL lines (`cuda/collective/one_shot_move.h`).
    OneShotMove,
    /// All-gather and broadcast of bytes through staging (`cuda/collective/two_shot_move.h`).
    TwoShotMove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelFamily {
    /// Walks a plan's steps over links (`cuda/collective/program.h`).
    Program,
    /// Every rank sends all of its data to every other as LL lines (`cuda/collective/one_shot.h`).
    OneShot,
    /// Every rank reduces one part and gives the result to all (`cuda/collective/two_shot.h`).
    TwoShot,
}

impl Kernel {
    /// The element types and operations that reductions exist for.
    pub const DATATYPES: [DataType; 6] = [
        DataType::Float32,
        DataType::Bfloat16,
        DataType::Float16,
        DataType::Int32,
        DataType::Uint8,
        DataType::Float64,
    ];
    pub const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg];
    pub const FAMILIES: [KernelFamily; 3] = [KernelFamily::Program, KernelFamily::OneShot, KernelFamily::TwoShot];
    pub const MOVES: [Kernel; 2] = [Kernel::OneShotMove, Kernel::TwoShotMove];
    const REDUCTIONS: usize = Self::FAMILIES.len() * Self::DATATYPES.len() * Self::OPS.len();
    pub const COUNT: usize = Self::REDUCTIONS + Self::MOVES.len();

    /// Every kernel there is, in the order of `index`.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let of_type = |family, datatype| {
            Self::OPS
                .into_iter()
                .map(move |op| Kernel::Reduction { family, datatype, op })
        };
        Self::FAMILIES
            .into_iter()
            .flat_map(move |family| {
                Self::DATATYPES
                    .into_iter()
                    .flat_map(move |datatype| of_type(family, datatype))
            })
            .chain(Self::MOVES)
    }

    /// Position in `all()`; None where no such kernel exists.
    pub fn index(self) -> Option<usize> {
        let Kernel::Reduction { family, datatype, op } = self else {
            let place = Self::MOVES.iter().position(|known| *known == self)?;
            return Some(Self::REDUCTIONS + place);
        };
        let datatype = Self::DATATYPES.iter().position(|known| *known == datatype)?;
        let op = Self::OPS.iter().position(|known| *known == op)?;
        let family = Self::FAMILIES.iter().position(|known| *known == family)?;
        Some((family * Self::DATATYPES.len() + datatype) * Self::OPS.len() + op)
    }

    /// The symbol in the fatbin, e.g. `ossicle_program_float_sum`.
    pub fn symbol(self) -> String {
        let (family, datatype, op) = match self {
            Kernel::Reduction { family, datatype, op } => (family, datatype, op),
            Kernel::OneShotMove => return String::from("ossicle_one_shot_move"),
            Kernel::TwoShotMove => return String::from("ossicle_two_shot_move"),
        };
        let family = match family {
            KernelFamily::Program => "program",
            KernelFamily::OneShot => "one_shot",
            KernelFamily::TwoShot => "two_shot",
        };
        format!("ossicle_{family}_{}_{}", datatype.name(), op.name())
    }
}

/// One kernel launch of one rank. `arguments` is the kernel's single by-value parameter, see `cuda/layout.h`.
pub struct Launch<'a> {
    pub device: &'a Arc<dyn Device>,
    pub kernel: Kernel,
    /// Blocks of the grid, at least 1.
    pub blocks: u32,
    /// Threads a block on the GPU; a host block is one thread.
    pub threads: u32,
    pub arguments: &'a [u8],
    /// The caller's `cudaStream_t`, already accepted by `Device::check_stream`.
    pub stream: *mut c_void,
}

// SAFETY: the stream handle is a value for the driver; nothing reads through it here.
unsafe impl Sync for Launch<'_> {}

/// What `Device::check_stream` tells of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamKey {
    /// For `streams_conflict`: two handles of the legacy stream give one.
    pub stream: u64,
    /// The capture that the stream is in, by the driver's id, which no other capture of the process ever has.
    pub capture: Option<u64>,
}

/// A place in a stream's work (`Device::mark`): the device's event. Its owner gives it back with `Device::unmark`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub usize);

/// Some of a process's devices; which bit is whose is the device implementation's to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices(pub u64);

impl Devices {
    pub const NONE: Devices = Devices(0);
    pub const ALL: Devices = Devices(u64::MAX);

    pub fn contains(self, others: Devices) -> bool {
        self.0 & others.0 == others.0
    }
}

/// `StreamKey::stream` of the legacy default stream.
///
/// Every other stream's key is `id << 1 | blocking`, with the driver's id of the stream and `blocking` 1 where its work
/// waits for work in the legacy stream and the other way round: in every stream that was not created as non-blocking,
/// the per-thread default streams among them. Ids are counted up from small numbers, so the upper 8 bits of a key are
/// 0, this one's too.
pub const LEGACY_STREAM_KEY: u64 = u64::MAX >> 8;

/// `StreamKey::stream` of the host device's default stream: work there runs on the calling thread and is done when the
/// call returns, so that nothing waits behind it. It is no queue, and none of what works on queues takes it: `enqueue`,
/// `order_streams`, marks.
pub const CALLERS_THREAD_KEY: u64 = LEGACY_STREAM_KEY - 1;

/// Whether work in one of two streams of one device waits for work that was put into the other before.
pub fn streams_conflict(a: u64, b: u64) -> bool {
    let waits_for_legacy = |key: u64| key & 1 == 1;
    a == b || (a == LEGACY_STREAM_KEY && waits_for_legacy(b)) || (b == LEGACY_STREAM_KEY && waits_for_legacy(a))
}

pub trait Device: Any + Send + Sync {
    fn kind(&self) -> DeviceKind;
    /// What `ncclCommCuDevice` answers.
    fn ordinal(&self) -> i32;
    /// Unique for a GPU (its UUID); for the host device unique for a communicator's rank.
    fn uuid(&self) -> [u8; 16];
    /// For messages: bus id and name of the GPU, or "host device N".
    fn describe(&self) -> String;
    /// UUIDs of the devices of this process whose memory this one's kernels cannot address.
    fn out_of_reach(&self) -> Vec<[u8; 16]> {
        Vec::new()
    }
    /// Lets this device's kernels address the memory of another device of this process.
    fn open_peer(&self, _uuid: [u8; 16]) -> Result<()> {
        Ok(())
    }
    /// How this device's memory can reach other processes, best first.
    fn sharing(&self) -> Vec<Sharing> {
        Vec::new()
    }
    /// Memory that other processes may import by `sharing`. The driver may wait for running kernels as it is mapped, and
    /// as a mapping is dropped.
    fn export(self: Arc<Self>, _bytes: usize, sharing: Sharing) -> Result<Export> {
        Err(cannot_share(sharing))
    }
    /// Another process's memory, which may be a peer GPU's.
    fn import(self: Arc<Self>, ticket: &Ticket, _fd: Descriptor) -> Result<Box<dyn Mapping>> {
        Err(cannot_share(ticket.sharing()))
    }
    /// Streaming multiprocessors; on the host device the number of usable cores.
    fn multiprocessors(&self) -> u32;
    /// Zeroed memory for the library. Never synchronises with kernels that are running.
    fn allocate(self: Arc<Self>, bytes: usize, placement: Placement) -> Result<Memory>;
    /// Called by `Memory`'s drop only.
    fn free(&self, address: *mut u8, bytes: usize, placement: Placement);
    /// Writes to the beginning of memory of the device that no kernel uses yet.
    fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<()>;
    /// Lets kernels see `bytes` of shared host memory at `address`; returns the address that kernels use.
    fn register(&self, address: *mut u8, bytes: usize) -> Result<*mut u8>;
    fn unregister(&self, address: *mut u8);
    /// Devices of this process by their UUIDs, all of which `open_peer` has opened this one's memory for.
    fn devices(&self, _uuids: &[[u8; 16]]) -> Devices {
        Devices::NONE
    }
    /// A user's buffer must be reachable by this device's kernels; `ncclInvalidArgument` otherwise. Tells whose kernels
    /// reach it too. `always` looks it up at every call (`NCCL_CHECK_POINTERS=1`), else once an allocation.
    fn check_pointer(&self, name: &str, pointer: *const c_void, bytes: usize, always: bool) -> Result<Devices>;
    /// Refuses a handle that is not a stream of this device, and one whose capture is broken.
    fn check_stream(&self, stream: *mut c_void) -> Result<StreamKey>;
    /// Puts a kernel behind the work of its stream.
    fn enqueue(&self, launch: &Launch) -> Result<()>;
    /// Makes `next` wait for all work that is now in `last`. Both were accepted by `check_stream`, and both are in one
    /// capture or in none: a wait for captured work would draw the stream that waits into the capture.
    fn order_streams(&self, last: *mut c_void, next: *mut c_void) -> Result<()>;
    /// Puts a mark behind all work that is now in `stream`: `mark` anew, or else a fresh one. Of captured work only
    /// streams of the same capture may wait, and nobody asks whether it is done.
    fn mark(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark>;
    /// Whether the work before the mark is done.
    fn reached(&self, mark: Mark) -> Result<bool>;
    /// Makes `next` wait for the mark. The marked stream need not exist any more.
    fn wait_for_mark(&self, mark: Mark, next: *mut c_void) -> Result<()>;
    fn unmark(&self, mark: Mark);
    /// A stream of the library's own, in no capture and empty, whose work runs beside that in `beside` and in every
    /// other stream. It is given back with `give_side_stream_back`.
    fn side_stream(&self, beside: *mut c_void) -> Result<*mut c_void>;
    /// Waits for nothing: also not for the end of a capture that the stream may still be in.
    fn give_side_stream_back(&self, stream: *mut c_void);
    /// Keeps `kept` for as long as the graph that `stream` is captured into, or anything made of it, can run.
    fn keep_for_graph(&self, stream: *mut c_void, kept: Arc<dyn Any + Send + Sync>) -> Result<()>;
    /// The device still answers: an error that a kernel or the driver left makes every later call fail.
    fn health(&self) -> Result<()> {
        Ok(())
    }
    /// Memory for the user (`ncclMemAlloc`).
    fn allocate_user(&self, bytes: usize) -> Result<*mut c_void>;
    /// Frees what `allocate_user` gave; an error that names the pointer for anything else.
    fn free_user(&self, pointer: *mut c_void) -> Result<()>;
}

fn check_write(memory: &Memory, bytes: &[u8]) -> Result<()> {
    match bytes.len() <= memory.bytes {
        true => Ok(()),
        false => Err(Error::internal(format!(
            "{} bytes do not fit into {}",
            bytes.len(),
            memory.bytes
        ))),
    }
}

fn cannot_share(sharing: Sharing) -> Error {
    Error::internal(format!("this device does not share memory by {}", sharing.name()))
}

/// The device of a new communicator: `ordinal` None means the calling thread's current CUDA device (0 on the host
/// device). One CUDA device object serves the whole process; every host communicator has an object of its own.
pub fn open(ordinal: Option<i32>) -> Result<Arc<dyn Device>> {
    match kind()? {
        DeviceKind::Host => Ok(host::open(ordinal.unwrap_or(0))),
        DeviceKind::Cuda => cuda::open(ordinal),
    }
}

/// How many devices `ncclCommInitAll` may name.
pub fn count() -> Result<i32> {
    match kind()? {
        DeviceKind::Host => Ok(host::DEVICES),
        DeviceKind::Cuda => cuda::count(),
    }
}

/// Which kind of device this process uses for new communicators and for `ncclMemAlloc`.
pub fn kind() -> Result<DeviceKind> {
    match crate::environment::choice(
        "OSSICLE_DEVICE",
        &[("host", DeviceKind::Host), ("cuda", DeviceKind::Cuda)],
    )? {
        Some(kind) => Ok(kind),
        None => Ok(if cuda::available() {
            DeviceKind::Cuda
        } else {
            DeviceKind::Host
        }),
    }
}

/// Memory for the user on the device that a new communicator of this thread would have (`ncclMemAlloc`).
pub fn allocate_user(bytes: usize) -> Result<*mut c_void> {
    open(None)?.allocate_user(bytes)
}

/// Frees what `allocate_user` gave (`ncclMemFree`).
pub fn free_user(pointer: *mut c_void) -> Result<()> {
    open(None)?.free_user(pointer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_kernel_has_its_own_place_and_symbol() {
        let symbols: HashSet<String> = Kernel::all().map(Kernel::symbol).collect();
        assert_eq!(symbols.len(), Kernel::COUNT);
        for (place, kernel) in Kernel::all().enumerate() {
            assert_eq!(kernel.index(), Some(place), "{kernel:?}");
        }
    }

    #[test]
    fn streams_conflict_with_themselves_and_blocking_ones_with_the_legacy_stream() {
        let (non_blocking, blocking) = (7 << 1, 8 << 1 | 1);
        for (a, b, conflict) in [
            (non_blocking, non_blocking, true),
            (blocking, blocking, true),
            (LEGACY_STREAM_KEY, LEGACY_STREAM_KEY, true),
            (LEGACY_STREAM_KEY, blocking, true),
            (LEGACY_STREAM_KEY, non_blocking, false),
            (blocking, non_blocking, false),
            (blocking, 9 << 1 | 1, false),
            (non_blocking, 7 << 1 | 1, false),
        ] {
            assert_eq!(streams_conflict(a, b), conflict, "{a:#x} and {b:#x}");
            assert_eq!(streams_conflict(b, a), conflict, "{b:#x} and {a:#x}");
        }
    }
}
