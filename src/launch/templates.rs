//! Templates of the kernels' parameters: all that an operation does not change, with every address resolved.

use super::layout::{
    Control, LentAddress, Link, OneShotWork, ProgramWork, State, Step, TwoShotWork, MAX_LINKS, MAX_RANKS, MAX_STEPS,
    NO_ROOT,
};
use crate::plan::{Profile, Program};
use crate::transport::PeerInbox;
use std::ptr::{null, null_mut};
use std::sync::Arc;

const NO_STEP: Step = Step {
    flags: 0,
    send: 0,
    recv: 0,
    chunk: 0,
};

/// What is lent in one process is seen by all where its own rank does.
const SEEN_ALIKE: LentAddress = LentAddress {
    bases: null(),
    offset: 0,
};

/// What every kernel of a rank is told of the rank itself.
pub(super) struct Own {
    pub(super) rank: u32,
    pub(super) state: *mut State,
    pub(super) control: *mut Control,
    pub(super) started: *mut u64,
    pub(super) zero_copy: bool,
}

impl Own {
    /// This rank's program with its links resolved to addresses.
    pub(super) fn program_work(
        &self,
        profile: &Profile,
        programs: &[Program],
        inboxes: &[Arc<PeerInbox>],
    ) -> ProgramWork {
        let rank = self.rank;
        let own = &programs[rank as usize];
        debug_assert!(own.sends.len() <= MAX_LINKS && own.recvs.len() <= MAX_LINKS && own.steps.len() <= MAX_STEPS);
        let none = Link {
            slots: null_mut(),
            tail: null_mut(),
            head: null_mut(),
            peer: 0,
            pad: 0,
        };
        let (mut send, mut recv) = ([none; MAX_LINKS], [none; MAX_LINKS]);
        let index = |links: &[u32]| links.iter().position(|peer| *peer == rank).unwrap_or_default();
        let mine = &inboxes[rank as usize];
        for (link, peer) in own.sends.iter().enumerate() {
            // The peer knows this link by its place among the peer's receive links.
            let at_peer = index(&programs[*peer as usize].recvs);
            let inbox = &inboxes[*peer as usize];
            send[link] = Link {
                slots: inbox.slots(at_peer),
                tail: inbox.tail(at_peer),
                head: mine.head(link),
                peer: *peer,
                pad: 0,
            };
        }
        for (link, peer) in own.recvs.iter().enumerate() {
            let at_peer = index(&programs[*peer as usize].sends);
            let inbox = &inboxes[*peer as usize];
            recv[link] = Link {
                slots: mine.slots(link),
                tail: mine.tail(link),
                head: inbox.head(at_peer),
                peer: *peer,
                pad: 0,
            };
        }
        let mut step = [NO_STEP; MAX_STEPS];
        for (step, planned) in step.iter_mut().zip(&own.steps) {
            *step = Step {
                flags: planned.flags.0,
                send: planned.send,
                recv: planned.recv,
                chunk: planned.chunk,
            };
        }
        ProgramWork {
            input: null_mut(),
            output: null_mut(),
            count: 0,
            state: self.state,
            control: self.control,
            started: self.started,
            slot_bytes: profile.slot_bytes,
            slots: profile.slots,
            channels: 1,
            ranks: profile.ranks,
            chunks: own.chunks,
            steps: own.steps.len() as u32,
            pad: 0,
            send,
            recv,
            step,
        }
    }

    pub(super) fn one_shot_work(&self, profile: &Profile, inboxes: &[Arc<PeerInbox>]) -> OneShotWork {
        let mut area = [null_mut(); MAX_RANKS];
        for (area, inbox) in area.iter_mut().zip(inboxes) {
            *area = inbox.area();
        }
        OneShotWork {
            input: null_mut(),
            output: null_mut(),
            count: 0,
            state: self.state,
            control: self.control,
            started: self.started,
            rank: self.rank,
            ranks: profile.ranks,
            lines: profile.lines,
            root: NO_ROOT,
            area,
        }
    }

    pub(super) fn two_shot_work(&self, profile: &Profile, inboxes: &[Arc<PeerInbox>]) -> TwoShotWork {
        let (mut slots, mut counters) = ([null_mut(); MAX_RANKS], [null_mut(); MAX_RANKS]);
        for (peer, inbox) in inboxes.iter().enumerate() {
            (slots[peer], counters[peer]) = (inbox.two_shot_slots(), inbox.two_shot_counters());
        }
        TwoShotWork {
            input: null_mut(),
            output: null_mut(),
            count: 0,
            state: self.state,
            control: self.control,
            started: self.started,
            slot_bytes: profile.two_shot_slot_bytes,
            rank: self.rank,
            ranks: profile.ranks,
            most_blocks: profile.blocks,
            root: NO_ROOT,
            zero_copy: u32::from(self.zero_copy),
            lends: 0,
            lent_input: SEEN_ALIKE,
            lent_output: SEEN_ALIKE,
            slots,
            counters,
        }
    }
}
