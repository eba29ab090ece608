//! Completion queues and queue pairs of the software HCA: making them, and a QP's way from RESET to READY_TO_SEND.

use super::tables::{self, State, CQ_IGNORE_OVERRUN, CQ_OVERRUN, QP_PLACE_BITS, QP_RECORD_FIRST};
use super::{full, Domain, Hca, Peer, Piece};
use crate::error::{Error, Result};
use crate::transport::mlx5::{CompletionPlace, SendPlace};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

const CQE_BYTES: usize = 64;
/// More would make the 16-bit counter of a completion ambiguous.
const MAX_BLOCKS: usize = 32768;
/// Records and doorbells of different queues stand in different lines.
const LINE: usize = 128;

pub struct CompletionQueue {
    hca: Arc<Hca>,
    place: usize,
    entries: usize,
    ring: Piece,
    record: Piece,
}

#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    pub domain: Domain,
    /// Blocks of the send queue, a power of two.
    pub send_blocks: usize,
    /// Receives that may be posted, 0 or a power of two.
    pub receives: usize,
    /// The record must be at least as far as a doorbell that is seen; else the doorbell may come first.
    pub record_first: bool,
}

/// How long a QP waits before it fails; `FOR_EVER` is allowed.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a peer whose QP does not receive.
    pub silence_ns: u64,
    /// For a peer that has no receive posted.
    pub no_receive_ns: u64,
}

pub struct QueuePair {
    hca: Arc<Hca>,
    place: usize,
    number: u32,
    options: QueueOptions,
    ring: Piece,
    record: Piece,
    doorbell: Piece,
    send_cq: Arc<CompletionQueue>,
    receive_cq: Arc<CompletionQueue>,
}

impl CompletionQueue {
    /// `entries` is a power of two. Completions that were not read are overwritten if `ignore_overrun`, else the CQ
    /// breaks when it is full.
    pub fn create(hca: &Arc<Hca>, entries: usize, ignore_overrun: bool) -> Result<Arc<CompletionQueue>> {
        if !entries.is_power_of_two() || entries > 1 << 22 {
            return Err(Error::internal(format!(
                "{entries} completions; it takes a power of two up to 4194304"
            )));
        }
        let ring = hca.card.allocate(entries * CQE_BYTES, LINE)?;
        let record = hca.card.allocate(LINE, LINE)?;
        let mut generations = hca.card.generations.lock();
        let free = generations.cqs.iter().position(|taken| !taken);
        let place = free.ok_or_else(|| full("CQs", hca.card.limits.cqs))?;
        // SAFETY: the ring is this object's own, and so is the place from here on; engines of this process pause.
        hca.change(|_| unsafe {
            ring.address().write_bytes(0xff, ring.bytes);
            hca.card.cq(place).write(tables::Cq {
                entries: ring.offset as u64,
                record: record.offset as u64,
                log_entries: entries.trailing_zeros(),
                flags: if ignore_overrun { CQ_IGNORE_OVERRUN } else { 0 },
                pad: [0; 13],
                produced: 0,
                state: 0,
                pad1: [0; 15],
            });
        })?;
        generations.cqs[place] = true;
        drop(generations);
        Ok(Arc::new(CompletionQueue {
            hca: hca.clone(),
            place,
            entries,
            ring,
            record,
        }))
    }

    /// Where this process polls.
    pub fn place(&self) -> CompletionPlace {
        self.placed(Piece::address)
    }

    /// Where kernels of the HCA's device poll.
    pub fn kernel_place(&self) -> CompletionPlace {
        self.placed(Piece::kernel_address)
    }

    fn placed(&self, of: fn(&Piece) -> *mut u8) -> CompletionPlace {
        CompletionPlace {
            ring: of(&self.ring),
            entries: self.entries,
            record: of(&self.record),
        }
    }

    /// It was full when a completion came: nothing comes any more.
    pub fn overran(&self) -> bool {
        // SAFETY: a word of this card's table that all change atomically.
        let state = unsafe { AtomicU32::from_ptr(&raw mut (*self.hca.card.cq(self.place)).state) };
        state.load(Ordering::Acquire) == CQ_OVERRUN
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // Queue pairs hold their CQs, so none of this process completes here any more.
        self.hca.card.generations.lock().cqs[self.place] = false;
    }
}

impl QueuePair {
    pub fn create(
        hca: &Arc<Hca>,
        options: QueueOptions,
        send_cq: &Arc<CompletionQueue>,
        receive_cq: &Arc<CompletionQueue>,
    ) -> Result<QueuePair> {
        let QueueOptions {
            send_blocks, receives, ..
        } = options;
        let powers = send_blocks.is_power_of_two() && (receives == 0 || receives.is_power_of_two());
        if !powers || send_blocks > MAX_BLOCKS || receives > MAX_BLOCKS {
            return Err(Error::internal(format!(
                "a QP of {send_blocks} blocks and {receives} receives; both take powers of two up to {MAX_BLOCKS}"
            )));
        }
        let ring = hca.card.allocate(send_blocks * 64, LINE)?;
        let record = hca.card.allocate(LINE, LINE)?;
        let doorbell = hca.card.allocate(LINE, LINE)?;
        let mut generations = hca.card.generations.lock();
        let free = generations.taken_qps.iter().position(|taken| !taken);
        let place = free.ok_or_else(|| full("QPs", hca.card.limits.qps))?;
        // 24 bits, of which the generation has 12 and is never 0.
        let generation = generations.qps[place] % ((1 << (24 - QP_PLACE_BITS)) - 1) + 1;
        generations.qps[place] = generation;
        generations.taken_qps[place] = true;
        drop(generations);
        let qp = QueuePair {
            hca: hca.clone(),
            place,
            number: generation << QP_PLACE_BITS | place as u32,
            options,
            ring,
            record,
            doorbell,
            send_cq: send_cq.clone(),
            receive_cq: receive_cq.clone(),
        };
        qp.change(|entry| qp.write_afresh(entry))?;
        Ok(qp)
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where this process posts.
    pub fn place(&self) -> SendPlace {
        self.placed(Piece::address)
    }

    /// Where kernels of the HCA's device post.
    pub fn kernel_place(&self) -> SendPlace {
        self.placed(Piece::kernel_address)
    }

    fn placed(&self, of: fn(&Piece) -> *mut u8) -> SendPlace {
        SendPlace {
            qpn: self.number,
            ring: of(&self.ring),
            blocks: self.options.send_blocks,
            record: of(&self.record),
            doorbell: of(&self.doorbell),
        }
    }

    pub fn state(&self) -> State {
        State::from_raw(self.state_word().load(Ordering::Acquire))
    }

    /// RESET to INIT: what peers may do here.
    pub fn init(&self, access: u32) -> Result<()> {
        self.advance(State::Reset, State::Init, |qp| qp.access = access)
    }

    /// INIT to READY_TO_RECEIVE: who the peer is. The peer's QP must name this one too.
    pub fn connect(&self, peer: Peer, number: u32) -> Result<()> {
        self.advance(State::Init, State::ReadyToReceive, |qp| {
            qp.peer = peer.0;
            qp.peer_number = number;
        })
    }

    /// READY_TO_RECEIVE to READY_TO_SEND.
    pub fn start(&self, timeouts: Timeouts) -> Result<()> {
        self.advance(State::ReadyToReceive, State::ReadyToSend, |qp| {
            qp.timeout_ns = timeouts.silence_ns;
            qp.rnr_timeout_ns = timeouts.no_receive_ns;
        })
    }

    /// Any state to ERROR: what is posted is flushed.
    pub fn fail(&self) -> Result<()> {
        self.change(|_| self.state_word().store(State::Error as u32, Ordering::Release))?;
        self.hca.wake();
        Ok(())
    }

    fn advance(&self, from: State, to: State, set: impl FnOnce(&mut tables::Qp)) -> Result<()> {
        self.change(|qp| {
            let now = self.state();
            if now != from {
                return Err(Error::internal(format!(
                    "QP {:#x} is {now:?} and cannot become {to:?}",
                    self.number
                )));
            }
            // SAFETY: engines of this process pause, and those of others read these fields once the state, which
            // is written last, allows it.
            set(unsafe { &mut *qp });
            self.state_word().store(to as u32, Ordering::Release);
            Ok(())
        })?
    }

    fn change<R>(&self, change: impl FnOnce(*mut tables::Qp) -> R) -> Result<R> {
        self.hca.change(|_| change(self.hca.card.qp(self.place)))
    }

    fn state_word(&self) -> &AtomicU32 {
        // SAFETY: a word of this card's table that all change atomically.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.hca.card.qp(self.place)).state) }
    }

    fn write_afresh(&self, entry: *mut tables::Qp) {
        let fresh = tables::Qp {
            number: 0,
            domain: self.options.domain.0,
            send_ring: self.ring.offset as u64,
            receive_ring: 0,
            record: self.record.offset as u64,
            doorbell: self.doorbell.offset as u64,
            send_log_blocks: self.options.send_blocks.trailing_zeros(),
            receives: self.options.receives as u32,
            send_cq: self.send_cq.place as u32,
            receive_cq: self.receive_cq.place as u32,
            access: 0,
            flags: if self.options.record_first { QP_RECORD_FIRST } else { 0 },
            peer: 0,
            peer_number: 0,
            timeout_ns: 0,
            rnr_timeout_ns: 0,
            pad0: [0; 5],
            seen_doorbell: 0,
            executed: 0,
            waiting_since_ns: 0,
            consumed: 0,
            published: 0,
            pad1: [0; 12],
            state: State::Reset as u32,
            received: 0,
            pad2: [0; 15],
        };
        // SAFETY: the place is this object's own; engines of this process pause, and those of others look for a number
        // that comes last and was never given out before.
        unsafe {
            entry.write(fresh);
            AtomicU32::from_ptr(&raw mut (*entry).number).store(self.number, Ordering::Release);
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let _ = self.change(|entry| {
            self.state_word().store(State::Reset as u32, Ordering::Release);
            // SAFETY: a word of this card's table that all change atomically.
            unsafe { AtomicU32::from_ptr(&raw mut (*entry).number) }.store(0, Ordering::Release);
        });
        self.hca.card.generations.lock().taken_qps[self.place] = false;
    }
}
