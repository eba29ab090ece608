//! The tables of the software HCA, as `cuda/hca/tables.h` has them; sizes and offsets are asserted on both sides.

use std::mem::{offset_of, size_of};

pub(super) const MAGIC: u32 = 0x6f73_6863;
pub(super) const VERSION: u32 = 1;
pub(super) const QP_PLACE_BITS: u32 = 12;
pub(super) const KEY_PLACE_SHIFT: u32 = 8;
/// Of a region that does not lie in the segment.
pub(super) const OUTSIDE: u64 = u64::MAX;
pub const FOR_EVER: u64 = u64::MAX;

/// `ibv_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    Reset = 0,
    Init = 1,
    ReadyToReceive = 2,
    ReadyToSend = 3,
    Error = 6,
}

impl State {
    pub(super) fn from_raw(raw: u32) -> State {
        match raw {
            1 => State::Init,
            2 => State::ReadyToReceive,
            3 => State::ReadyToSend,
            6 => State::Error,
            _ => State::Reset,
        }
    }
}

/// `ibv_access_flags`.
pub mod access {
    pub const LOCAL_WRITE: u32 = 1;
    pub const REMOTE_WRITE: u32 = 2;
    pub const REMOTE_READ: u32 = 4;
    pub const REMOTE_ATOMIC: u32 = 8;
    pub const ALL: u32 = 15;
}

pub(super) const QP_RECORD_FIRST: u32 = 1;
pub(super) const CQ_IGNORE_OVERRUN: u32 = 1;
pub(super) const CQ_OVERRUN: u32 = 1;

/// Which check of the engine failed: the vendor's syndrome of an error CQE.
pub mod check {
    pub const DOORBELL_QP: u8 = 1;
    pub const DOORBELL_RANGE: u8 = 2;
    pub const RECORD_BEHIND: u8 = 3;
    pub const WQE_INDEX: u8 = 4;
    pub const WQE_QP: u8 = 5;
    pub const WQE_UNITS: u8 = 6;
    pub const WQE_OPCODE: u8 = 7;
    pub const WQE_FLAGS: u8 = 8;
    pub const WQE_SEGMENTS: u8 = 9;
    pub const INLINE: u8 = 10;
    pub const MESSAGE_LENGTH: u8 = 11;
    pub const LOCAL_KEY: u8 = 12;
    pub const LOCAL_DOMAIN: u8 = 13;
    pub const LOCAL_RANGE: u8 = 14;
    pub const LOCAL_ACCESS: u8 = 15;
    pub const REMOTE_KEY: u8 = 16;
    pub const REMOTE_DOMAIN: u8 = 17;
    pub const REMOTE_RANGE: u8 = 18;
    pub const REMOTE_ACCESS: u8 = 19;
    pub const PEER_ACCESS: u8 = 20;
    pub const ATOMIC_ALIGNMENT: u8 = 21;
    pub const PEER_SILENT: u8 = 22;
    pub const NO_RECEIVE: u8 = 23;
    pub const PEER_CQ: u8 = 24;
    pub const FLUSHED: u8 = 25;
    pub const NOT_BUILT: u8 = 26;
    pub const UNMAPPED: u8 = 27;
}

#[repr(C, align(128))]
pub(super) struct Header {
    pub magic: u32,
    pub version: u32,
    pub qps: u32,
    pub cqs: u32,
    pub regions: u32,
    pub pad: u32,
    pub qp_table: u64,
    pub cq_table: u64,
    pub region_table: u64,
    pub bytes: u64,
}

#[repr(C, align(128))]
pub(super) struct Qp {
    pub number: u32,
    pub domain: u32,
    pub send_ring: u64,
    pub receive_ring: u64,
    pub record: u64,
    pub doorbell: u64,
    pub send_log_blocks: u32,
    pub receives: u32,
    pub send_cq: u32,
    pub receive_cq: u32,
    pub access: u32,
    pub flags: u32,
    pub peer: u32,
    pub peer_number: u32,
    pub timeout_ns: u64,
    pub rnr_timeout_ns: u64,
    pub pad0: [u64; 5],
    pub seen_doorbell: u64,
    pub executed: u64,
    pub waiting_since_ns: u64,
    pub consumed: u32,
    pub published: u32,
    pub pad1: [u64; 12],
    pub state: u32,
    pub received: u32,
    pub pad2: [u64; 15],
}

#[repr(C, align(128))]
pub(super) struct Cq {
    pub entries: u64,
    pub record: u64,
    pub log_entries: u32,
    pub flags: u32,
    pub pad: [u64; 13],
    pub produced: u32,
    pub state: u32,
    pub pad1: [u64; 15],
}

#[repr(C)]
pub(super) struct Region {
    pub address: u64,
    pub bytes: u64,
    pub offset: u64,
    pub key: u32,
    pub access: u32,
    pub domain: u32,
    pub pad: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct View {
    pub segment: *mut u8,
    pub outside: *const *mut u8,
}

/// What shall go wrong with a WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not carried out and fails so.
    Syndrome { syndrome: u8, vendor: u8 },
    /// It is carried out and never reported.
    DropCqe,
    /// It waits for so many steps of the engine.
    Delay { steps: u64 },
}

#[repr(C)]
pub(super) struct InjectedFault {
    pub nth: u64,
    pub qp: u32,
    pub kind: u32,
    pub syndrome: u32,
    pub vendor_syndrome: u32,
    pub steps: u64,
}

#[repr(C)]
pub(super) struct Engine {
    pub view: *mut View,
    pub fault: *mut InjectedFault,
    pub views: u32,
    pub faults: u32,
}

const _: () = {
    assert!(size_of::<Header>() == 128 && offset_of!(Header, qp_table) == 24 && offset_of!(Header, bytes) == 48);
    assert!(size_of::<Qp>() == 384 && offset_of!(Qp, send_ring) == 8 && offset_of!(Qp, send_log_blocks) == 40);
    assert!(offset_of!(Qp, timeout_ns) == 72 && offset_of!(Qp, seen_doorbell) == 128 && offset_of!(Qp, state) == 256);
    assert!(size_of::<Cq>() == 256 && offset_of!(Cq, log_entries) == 16 && offset_of!(Cq, produced) == 128);
    assert!(size_of::<Region>() == 40 && offset_of!(Region, key) == 24);
    assert!(size_of::<View>() == 16 && size_of::<InjectedFault>() == 32 && size_of::<Engine>() == 24);
};
