//! The structs of `cuda/net/queue.h`: what kernels are told of a queue pair. Sizes and offsets are asserted on both sides.

use crate::transport::mlx5::{CompletionPlace, SendPlace};
use crate::wire::mlx5::{opcode, INLINE_BIT};
use std::mem::{offset_of, size_of};

const REQUEST_UNITS: u32 = 3;
const COMPLETE_ON_ERROR: u8 = 0 << 2;
const COMPLETE_ALWAYS: u8 = 2 << 2;

/// Numbers in the card's byte order, which is big-endian.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Control {
    opcode: u32,
    qpn_units: u32,
    signature: u8,
    stream_channel: [u8; 2],
    flags: u8,
    immediate: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Remote {
    address: u64,
    rkey: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    bytes: u32,
    lkey: u32,
    address: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct InlineWord {
    header: u32,
    low: u32,
    high: u32,
    pad: u32,
}

/// Where the kernels of all launches have come to; theirs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Cursor {
    posted: u32,
    done: u32,
    asked: u32,
    read: u32,
}

/// One channel's queue pair, as kernels of its device reach it.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub struct NetQueue {
    ring: *mut u8,
    completions: *const u8,
    record: *mut u8,
    doorbell: *mut u8,
    local_slots: u64,
    remote_slots: u64,
    log_blocks: u32,
    log_completions: u32,
    doorbell_qpn: u32,
    pad: u32,
    put_control: Control,
    put_remote: Remote,
    put_data: Data,
    flag_control: Control,
    flag_remote: Remote,
    flag_word: InlineWord,
    cursor: Cursor,
    pad1: [u32; 20],
}

/// Memory that work requests name.
#[derive(Clone, Copy, Default)]
pub(super) struct Named {
    pub(super) address: u64,
    pub(super) key: u32,
}

/// What the requests of a queue are about: a channel's slots here and at the peer, and the peer's counter.
#[derive(Clone, Copy, Default)]
pub(super) struct Targets {
    pub(super) local_slots: Named,
    pub(super) remote_slots: Named,
    pub(super) counter: Named,
}

impl NetQueue {
    pub(super) fn new(send: SendPlace, completion: CompletionPlace, targets: Targets) -> NetQueue {
        let control = |flags| Control {
            opcode: u32::from(opcode::RDMA_WRITE).to_be(),
            qpn_units: (send.qpn << 8 | REQUEST_UNITS).to_be(),
            flags,
            ..Control::default()
        };
        let remote = |named: Named| Remote {
            address: named.address.to_be(),
            rkey: named.key.to_be(),
            reserved: 0,
        };
        NetQueue {
            ring: send.ring,
            completions: completion.ring,
            record: send.record,
            doorbell: send.doorbell,
            local_slots: targets.local_slots.address,
            remote_slots: targets.remote_slots.address,
            log_blocks: send.blocks.trailing_zeros(),
            log_completions: completion.entries.trailing_zeros(),
            doorbell_qpn: (send.qpn << 8).to_be(),
            pad: 0,
            put_control: control(COMPLETE_ON_ERROR),
            put_remote: remote(targets.remote_slots),
            put_data: Data {
                lkey: targets.local_slots.key.to_be(),
                ..Data::default()
            },
            flag_control: control(COMPLETE_ALWAYS),
            flag_remote: remote(targets.counter),
            flag_word: InlineWord {
                header: (INLINE_BIT | size_of::<u64>() as u32).to_be(),
                ..InlineWord::default()
            },
            cursor: Cursor::default(),
            pad1: [0; 20],
        }
    }

    pub(super) fn bytes(queues: &[NetQueue]) -> &[u8] {
        // SAFETY: plain data without padding, whose pads are fields.
        unsafe { std::slice::from_raw_parts(queues.as_ptr().cast(), size_of_val(queues)) }
    }
}

const _: () = {
    assert!(size_of::<Control>() == 16 && size_of::<Remote>() == 16 && size_of::<Data>() == 16);
    assert!(size_of::<InlineWord>() == 16 && size_of::<Cursor>() == 16 && size_of::<NetQueue>() == 256);
    assert!(offset_of!(NetQueue, local_slots) == 32 && offset_of!(NetQueue, log_blocks) == 48);
    assert!(offset_of!(NetQueue, put_control) == 64 && offset_of!(NetQueue, flag_control) == 112);
    assert!(offset_of!(NetQueue, cursor) == 160);
};
