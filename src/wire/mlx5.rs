//! mlx5 queues: work requests (WQEs), completions (CQEs), doorbell record and doorbell, as `cuda/net/mlx5.h` has them.
//! Nothing here does I/O.
//!
//! The raw face are the structs with big-endian fields; the meaning is `Request` and `Completion`.

use std::ops::Deref;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A WQE begins on a block (WQEBB) and consists of units, which its ds field counts.
pub const BLOCK_BYTES: usize = 64;
pub const UNIT_BYTES: usize = 16;
pub const MAX_UNITS: usize = 63;
/// The longest WQE, in whole blocks.
pub const MAX_WQE_BYTES: usize = (MAX_UNITS * UNIT_BYTES).next_multiple_of(BLOCK_BYTES);
pub const INLINE_BIT: u32 = 1 << 31;
const INLINE_MASK: u32 = 0x3ff;
const INLINE_HEADER: usize = 4;

pub mod opcode {
    pub const NOP: u8 = 0x00;
    pub const RDMA_WRITE: u8 = 0x08;
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    pub const SEND: u8 = 0x0a;
    pub const RDMA_READ: u8 = 0x10;
    pub const ATOMIC_CS: u8 = 0x11;
    pub const ATOMIC_FA: u8 = 0x12;
}

pub mod syndrome {
    pub const LOCAL_LENGTH: u8 = 0x01;
    pub const LOCAL_QP_OP: u8 = 0x02;
    pub const LOCAL_PROTECTION: u8 = 0x04;
    pub const WR_FLUSH: u8 = 0x05;
    pub const REMOTE_INVALID_REQUEST: u8 = 0x12;
    pub const REMOTE_ACCESS: u8 = 0x13;
    pub const REMOTE_OPERATION: u8 = 0x14;
    pub const TRANSPORT_RETRY_EXCEEDED: u8 = 0x15;
    pub const RNR_RETRY_EXCEEDED: u8 = 0x16;
}

/// What a syndrome means and what to look at.
pub fn syndrome_text(syndrome: u8) -> &'static str {
    match syndrome {
        syndrome::LOCAL_LENGTH => "local length error: the message is too long, or the receive too short",
        syndrome::LOCAL_QP_OP => "local QP operation error: a malformed work request",
        syndrome::LOCAL_PROTECTION => "local protection error: wrong lkey, or an address outside its region",
        syndrome::WR_FLUSH => "flushed: the QP was in the error state already, look for an earlier error",
        0x06 => "memory window bind error",
        0x10 => "bad response from the peer",
        0x11 => "local access error",
        syndrome::REMOTE_INVALID_REQUEST => {
            "remote invalid request: an operation that the peer's QP does not allow, or a misaligned atomic"
        }
        syndrome::REMOTE_ACCESS => {
            "remote access error: wrong rkey, access flags, or an address outside the peer's region"
        }
        syndrome::REMOTE_OPERATION => "remote operation error",
        syndrome::TRANSPORT_RETRY_EXCEEDED => {
            "retries exceeded: the peer is gone, or MTU, GID, route or loss on the way"
        }
        syndrome::RNR_RETRY_EXCEEDED => "receiver-not-ready retries exceeded: the peer posted no receive",
        0x22 => "remote aborted",
        _ => "unknown syndrome",
    }
}

/// Every WQE's first unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ControlSegment {
    /// opmod << 24 | index << 8 | opcode
    pub opmod_index_opcode: U32,
    /// QP number << 8 | units
    pub qpn_units: U32,
    pub signature: u8,
    pub stream_channel: U16,
    pub fm_ce_se: u8,
    pub immediate: U32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RemoteSegment {
    pub address: U64,
    pub rkey: U32,
    pub reserved: U32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataSegment {
    pub bytes: U32,
    pub lkey: U32,
    pub address: U64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AtomicSegment {
    pub swap_add: U64,
    pub compare: U64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Cqe {
    pub reserved0: [u8; 2],
    pub wqe_id: U16,
    pub reserved4: [u8; 13],
    pub ml_path: u8,
    pub reserved18: [u8; 4],
    pub slid: U16,
    pub flags_rqpn: U32,
    pub reserved28: [u8; 4],
    pub srqn: U32,
    pub immediate: U32,
    pub reserved40: [u8; 4],
    pub bytes: U32,
    /// In an error CQE its last two bytes are the vendor's syndrome and the syndrome.
    pub timestamp: U64,
    /// opcode << 24 | QP number
    pub opcode_qpn: U32,
    pub wqe_counter: U16,
    pub signature: u8,
    /// kind << 4 | owner
    pub op_own: u8,
}

/// Of a QP: blocks received, next free block to send. Of a CQ: consumer index, arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DoorbellRecord {
    pub word: [U32; 2],
}

/// The bytes of a doorbell; `next` is the next free block.
pub fn doorbell(next: u32, qpn: u32) -> [u8; 8] {
    let halves = [U32::new((next & 0xffff) << 8), U32::new(qpn << 8)];
    zerocopy::transmute!(halves)
}

/// Why bytes are no work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    TooShort,
    Units,
    Opcode(u8),
    Flags(u8),
    Segments,
}

/// When a WQE is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Report {
    OnError = 0,
    OnFirstError = 1 << 2,
    Always = 2 << 2,
    WithEvent = 3 << 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fence {
    None = 0,
    Small = 1 << 5,
    Fence = 2 << 5,
    Strong = 3 << 5,
    SmallAndFence = 4 << 5,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    pub address: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub address: u64,
    pub lkey: u32,
    pub bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    Memory(Memory),
    /// At most 1023 bytes.
    Inline(&'a [u8]),
}

/// A caller's list, or one that was parsed. (A `Cow` of these would tie its owner to one lifetime.)
#[derive(Clone, Debug)]
pub enum List<'a> {
    Borrowed(&'a [Data<'a>]),
    Owned(Vec<Data<'a>>),
}

impl<'a> Deref for List<'a> {
    type Target = [Data<'a>];
    fn deref(&self) -> &[Data<'a>] {
        match self {
            List::Borrowed(list) => list,
            List::Owned(list) => list,
        }
    }
}

impl PartialEq for List<'_> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for List<'_> {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    Nop,
    Write {
        remote: Remote,
        immediate: Option<u32>,
        data: List<'a>,
    },
    Read {
        remote: Remote,
        sink: List<'a>,
    },
    FetchAdd {
        remote: Remote,
        add: u64,
        /// 8 bytes, for what the word was.
        sink: Memory,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub index: u16,
    /// 24 bits.
    pub qpn: u32,
    pub report: Report,
    pub fence: Fence,
    pub solicited: bool,
    pub operation: Operation<'a>,
}

/// Writes units one after the other.
struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, segment: &(impl IntoBytes + Immutable)) -> Result<(), Malformed> {
        self.bytes(segment.as_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let place = self.bytes.get_mut(self.at..self.at + bytes.len());
        place.ok_or(Malformed::TooShort)?.copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }

    fn remote(&mut self, remote: Remote) -> Result<(), Malformed> {
        self.put(&RemoteSegment {
            address: remote.address.into(),
            rkey: remote.rkey.into(),
            reserved: 0.into(),
        })
    }

    fn data(&mut self, data: &Data) -> Result<(), Malformed> {
        match data {
            Data::Memory(memory) if memory.bytes & INLINE_BIT != 0 => Err(Malformed::Segments),
            Data::Memory(memory) => self.put(&DataSegment {
                bytes: memory.bytes.into(),
                lkey: memory.lkey.into(),
                address: memory.address.into(),
            }),
            Data::Inline(payload) if payload.len() > INLINE_MASK as usize => Err(Malformed::Segments),
            Data::Inline(payload) => {
                self.put(&U32::new(INLINE_BIT | payload.len() as u32))?;
                self.bytes(payload)?;
                let rest = self.at.next_multiple_of(UNIT_BYTES) - self.at;
                self.bytes(&[0; UNIT_BYTES][..rest])
            }
        }
    }
}

impl Request<'_> {
    fn opcode(&self) -> u8 {
        match &self.operation {
            Operation::Nop => opcode::NOP,
            Operation::Write { immediate: None, .. } => opcode::RDMA_WRITE,
            Operation::Write { immediate: Some(_), .. } => opcode::RDMA_WRITE_IMM,
            Operation::Read { .. } => opcode::RDMA_READ,
            Operation::FetchAdd { .. } => opcode::ATOMIC_FA,
        }
    }

    /// Writes the WQE, without a gap at a ring's end, and gives its units. A buffer of `MAX_WQE_BYTES` holds any.
    pub fn emit(&self, bytes: &mut [u8]) -> Result<usize, Malformed> {
        let mut writer = Writer { bytes, at: UNIT_BYTES };
        let mut immediate = 0;
        match &self.operation {
            Operation::Nop => {}
            Operation::Write {
                remote,
                immediate: value,
                data,
            } => {
                immediate = value.unwrap_or(0);
                writer.remote(*remote)?;
                data.iter().try_for_each(|data| writer.data(data))?;
            }
            Operation::Read { remote, sink } => {
                writer.remote(*remote)?;
                sink.iter().try_for_each(|data| writer.data(data))?;
            }
            Operation::FetchAdd { remote, add, sink } => {
                writer.remote(*remote)?;
                writer.put(&AtomicSegment {
                    swap_add: (*add).into(),
                    compare: 0.into(),
                })?;
                writer.data(&Data::Memory(*sink))?;
            }
        }
        let units = writer.at / UNIT_BYTES;
        if units > MAX_UNITS || self.qpn >> 24 != 0 {
            return Err(Malformed::Units);
        }
        writer.at = 0;
        writer.put(&ControlSegment {
            opmod_index_opcode: (u32::from(self.index) << 8 | u32::from(self.opcode())).into(),
            qpn_units: (self.qpn << 8 | units as u32).into(),
            signature: 0,
            stream_channel: 0.into(),
            fm_ce_se: self.fence as u8 | self.report as u8 | u8::from(self.solicited) << 1,
            immediate: immediate.into(),
        })?;
        Ok(units)
    }

    /// Reads a WQE that lies in one piece.
    pub fn parse(bytes: &[u8]) -> Result<Request<'_>, Malformed> {
        let (control, _) = ControlSegment::ref_from_prefix(bytes).map_err(|_| Malformed::TooShort)?;
        let (first, second) = (control.opmod_index_opcode.get(), control.qpn_units.get());
        let units = second as usize & MAX_UNITS;
        if units == 0 {
            return Err(Malformed::Units);
        }
        let body = bytes.get(UNIT_BYTES..units * UNIT_BYTES).ok_or(Malformed::TooShort)?;
        let (report, fence) = flags(control.fm_ce_se)?;
        let opcode = first as u8;
        let operation = match opcode {
            _ if first >> 24 != 0 => return Err(Malformed::Opcode(opcode)),
            opcode::NOP => Operation::Nop,
            opcode::RDMA_WRITE | opcode::RDMA_WRITE_IMM => {
                let (remote, rest) = remote(body)?;
                Operation::Write {
                    remote,
                    immediate: (opcode == opcode::RDMA_WRITE_IMM).then(|| control.immediate.get()),
                    data: List::Owned(data_list(rest)?),
                }
            }
            opcode::RDMA_READ => {
                let (remote, rest) = remote(body)?;
                Operation::Read {
                    remote,
                    sink: List::Owned(data_list(rest)?),
                }
            }
            opcode::ATOMIC_FA => {
                let (remote, rest) = remote(body)?;
                let (atomic, rest) = AtomicSegment::ref_from_prefix(rest).map_err(|_| Malformed::Segments)?;
                let [Data::Memory(sink)] = data_list(rest)?[..] else {
                    return Err(Malformed::Segments);
                };
                Operation::FetchAdd {
                    remote,
                    add: atomic.swap_add.get(),
                    sink,
                }
            }
            other => return Err(Malformed::Opcode(other)),
        };
        Ok(Request {
            index: (first >> 8) as u16,
            qpn: second >> 8,
            report,
            fence,
            solicited: control.fm_ce_se & 2 != 0,
            operation,
        })
    }
}

fn flags(fm_ce_se: u8) -> Result<(Report, Fence), Malformed> {
    let report = match fm_ce_se >> 2 & 3 {
        0 => Report::OnError,
        1 => Report::OnFirstError,
        2 => Report::Always,
        _ => Report::WithEvent,
    };
    let fence = match fm_ce_se >> 5 {
        0 => Fence::None,
        1 => Fence::Small,
        2 => Fence::Fence,
        3 => Fence::Strong,
        4 => Fence::SmallAndFence,
        _ => return Err(Malformed::Flags(fm_ce_se)),
    };
    match fm_ce_se & 0b0001_0001 {
        0 => Ok((report, fence)),
        _ => Err(Malformed::Flags(fm_ce_se)),
    }
}

fn remote(body: &[u8]) -> Result<(Remote, &[u8]), Malformed> {
    let (segment, rest) = RemoteSegment::ref_from_prefix(body).map_err(|_| Malformed::Segments)?;
    let remote = Remote {
        address: segment.address.get(),
        rkey: segment.rkey.get(),
    };
    Ok((remote, rest))
}

fn data_list(mut rest: &[u8]) -> Result<Vec<Data<'_>>, Malformed> {
    let mut list = Vec::new();
    while !rest.is_empty() {
        let (segment, after) = DataSegment::ref_from_prefix(rest).map_err(|_| Malformed::Segments)?;
        let bytes = segment.bytes.get();
        if bytes & INLINE_BIT == 0 {
            list.push(Data::Memory(Memory {
                address: segment.address.get(),
                lkey: segment.lkey.get(),
                bytes,
            }));
            rest = after;
            continue;
        }
        let end = INLINE_HEADER + (bytes & INLINE_MASK) as usize;
        list.push(Data::Inline(rest.get(INLINE_HEADER..end).ok_or(Malformed::Segments)?));
        rest = rest
            .get(end.next_multiple_of(UNIT_BYTES)..)
            .ok_or(Malformed::Segments)?;
    }
    Ok(list)
}

/// What a CQE that software owns tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub qpn: u32,
    /// Of the WQE's first block; of a receive its place in the receive queue.
    pub index: u16,
    pub outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A WQE of the send queue is done.
    Sent { opcode: u8, bytes: u32 },
    /// A WRITE with this immediate arrived.
    Received { immediate: u32, bytes: u32 },
    Failed {
        receive: bool,
        opcode: u8,
        syndrome: u8,
        vendor: u8,
    },
    /// A kind that this library asks for nowhere.
    Other(u8),
}

const KIND_REQ: u8 = 0;
const KIND_RESP_WRITE_IMM: u8 = 1;
const KIND_REQ_ERR: u8 = 13;
const KIND_RESP_ERR: u8 = 14;
pub const KIND_INVALID: u8 = 15;

impl Cqe {
    /// Whether it is the software's at this consumer index, in a CQ of `entries`, a power of two.
    pub fn is_owned(op_own: u8, consumer: u32, entries: u32) -> bool {
        op_own >> 4 != KIND_INVALID && (op_own & 1 != 0) == (consumer & entries != 0)
    }

    pub fn completion(&self) -> Completion {
        let [.., vendor, syndrome] = self.timestamp.to_bytes();
        let opcode = (self.opcode_qpn.get() >> 24) as u8;
        let bytes = self.bytes.get();
        Completion {
            qpn: self.opcode_qpn.get() & 0xff_ffff,
            index: self.wqe_counter.get(),
            outcome: match self.op_own >> 4 {
                KIND_REQ => Outcome::Sent { opcode, bytes },
                KIND_RESP_WRITE_IMM => Outcome::Received {
                    immediate: self.immediate.get(),
                    bytes,
                },
                kind @ (KIND_REQ_ERR | KIND_RESP_ERR) => Outcome::Failed {
                    receive: kind == KIND_RESP_ERR,
                    opcode,
                    syndrome,
                    vendor,
                },
                kind => Outcome::Other(kind),
            },
        }
    }
}

#[cfg(test)]
mod tests;
