//! The structs of `cuda/layout.h`, written here and read by kernels. Sizes and offsets are asserted on both sides.

use crate::initiated::NetQueue;
use crate::transport::net::SlotNote;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

pub const MAX_RANKS: usize = 16;
pub const MAX_CHANNELS: usize = 128;
pub const MAX_LINKS: usize = 16;
pub const MAX_STEPS: usize = 32;
/// The root of what has none.
pub const NO_ROOT: u32 = u32::MAX;
/// Flags of different channels lie this many words apart.
pub const FLAG_STRIDE: usize = 16;
pub const LINE_BYTES: usize = 16;

/// What a report says of a peer whose started word is out of reach, on another host.
pub const STARTED_UNKNOWN: u64 = u64::MAX;

/// `FaultRecord::cause` of a failed work request.
pub const FAULT_COMPLETION: u32 = 2;

/// What a wait reports: that it passed its clock bound, or that it found a failed work request. `sequence` is written last.
#[repr(C)]
pub struct FaultRecord {
    pub sequence: AtomicU64,
    pub ordinal: AtomicU64,
    pub waited_ns: AtomicU64,
    pub peer_started: AtomicU64,
    pub cause: AtomicU32,
    pub peer: AtomicU32,
    pub channel: AtomicU32,
    pub step: AtomicU32,
    pub vendor: AtomicU32,
    pub pad: u32,
}

/// One rank's word to its kernels and their word back; pinned host memory. Zero bytes are a valid value.
#[repr(C, align(128))]
pub struct Control {
    pub stop: AtomicU64,
    pub report_after_ns: AtomicU64,
    pub left: AtomicU64,
    pub fault: FaultRecord,
    pub started: [AtomicPtr<u64>; MAX_RANKS],
    pub borrowing: AtomicU64,
    pub out: AtomicU64,
    pub park_after_report: AtomicU32,
    pub failure: FaultRecord,
}

/// One rank's counters between launches; device memory, which the CPU never reads.
#[repr(C)]
pub struct State {
    pub ordinal: u64,
    pub ll_epoch: u64,
    pub fault_claim: u64,
    pub arrivals: u32,
    pub stopped: u32,
    pub cleared: u64,
    pub failed: u32,
    pub pad: u32,
    pub sent: [[u64; MAX_CHANNELS]; MAX_LINKS],
    pub received: [[u64; MAX_CHANNELS]; MAX_LINKS],
    pub rounds: [u64; MAX_CHANNELS],
}

/// What a link's other end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LinkKind {
    /// The peer's kernel.
    Memory = 0,
    /// The CPU proxy.
    Proxy = 1,
    /// An HCA, to which the kernel posts.
    Hca = 2,
}

/// What a link has besides slots and counters, by its kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Beside {
    pub notes: *mut SlotNote,
    pub queues: *mut NetQueue,
}

/// One direction of a link to one peer, channel 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Link {
    pub slots: *mut u8,
    pub tail: *mut u64,
    pub head: *mut u64,
    pub beside: Beside,
    pub peer: u32,
    pub kind: LinkKind,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Step {
    pub flags: u8,
    pub send: u8,
    pub recv: u8,
    pub chunk: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProgramWork {
    pub input: *const u8,
    pub output: *mut u8,
    pub count: u64,
    pub state: *mut State,
    pub control: *mut Control,
    pub started: *mut u64,
    pub slot_bytes: u64,
    pub stride: u64,
    pub slots: u32,
    pub channels: u32,
    pub ranks: u32,
    pub chunks: u32,
    pub steps: u32,
    /// Links to an HCA, a bit each: send links first.
    pub posting: u32,
    pub send: [Link; MAX_LINKS],
    pub recv: [Link; MAX_LINKS],
    pub step: [Step; MAX_STEPS],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct OneShotWork {
    pub input: *const u8,
    pub output: *mut u8,
    pub count: u64,
    pub state: *mut State,
    pub control: *mut Control,
    pub started: *mut u64,
    pub rank: u32,
    pub ranks: u32,
    pub lines: u32,
    pub root: u32,
    pub area: [*mut u8; MAX_RANKS],
}

/// Bits of `Control::stop`, and above them the first operation that a lost peer leaves unfinished.
pub const STOP_ABORT: u64 = 1;
pub const STOP_PEER_LOST: u64 = 2;
pub const STOP_FROM_SHIFT: u32 = 2;

/// Bits of `TwoShotWork::lends`.
pub const LENDS_INPUT: u32 = 1;
pub const LENDS_OUTPUT: u32 = 2;

/// Where peers' kernels see a buffer: `offset` behind the address that each rank has in `bases`; with null, where its own
/// rank does.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LentAddress {
    pub bases: *const u64,
    pub offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TwoShotWork {
    pub input: *const u8,
    pub output: *mut u8,
    pub count: u64,
    pub state: *mut State,
    pub control: *mut Control,
    pub started: *mut u64,
    pub slot_bytes: u64,
    pub rank: u32,
    pub ranks: u32,
    pub most_blocks: u32,
    pub root: u32,
    pub zero_copy: u32,
    pub lends: u32,
    pub lent_input: LentAddress,
    pub lent_output: LentAddress,
    pub slots: [*mut u8; MAX_RANKS],
    pub counters: [*mut u64; MAX_RANKS],
}

// SAFETY: addresses for kernels, plain data to the CPU.
unsafe impl Send for ProgramWork {}
// SAFETY: as above.
unsafe impl Sync for ProgramWork {}
// SAFETY: as above.
unsafe impl Send for OneShotWork {}
// SAFETY: as above.
unsafe impl Sync for OneShotWork {}
// SAFETY: as above.
unsafe impl Send for TwoShotWork {}
// SAFETY: as above.
unsafe impl Sync for TwoShotWork {}

const _: () = {
    assert!(size_of::<FaultRecord>() == 56 && size_of::<Control>() == 384);
    assert!(offset_of!(Control, fault) == 24 && offset_of!(Control, started) == 80);
    assert!(offset_of!(Control, failure) == 232);
    assert!(size_of::<State>() == 48 + (2 * MAX_LINKS + 1) * MAX_CHANNELS * 8);
    assert!(size_of::<Link>() == 40 && size_of::<SlotNote>() == 16 && size_of::<Step>() == 4);
    assert!(offset_of!(Link, beside) == 24 && offset_of!(Link, kind) == 36);
    assert!(size_of::<ProgramWork>() == 88 + 2 * MAX_LINKS * 40 + MAX_STEPS * 4);
    assert!(offset_of!(ProgramWork, stride) == 56);
    assert!(size_of::<OneShotWork>() == 64 + MAX_RANKS * 8);
    assert!(size_of::<TwoShotWork>() == 112 + 2 * MAX_RANKS * 8);
};

/// Fingerprint of these layouts and of the inbox: ranks with another one cannot share memory.
pub const FINGERPRINT: u64 = 5 << 32 | (size_of::<ProgramWork>() as u64) << 16 | size_of::<State>() as u64;
