//! Templates of the kernels' parameters: all that an operation does not change, with every address resolved.

use super::layout::{
    Control, Link, OneShotWork, ProgramWork, State, Step, TwoShotWork, MAX_LINKS, MAX_RANKS, MAX_STEPS,
};
use crate::plan::{self, Profile, Program};
use crate::transport::PeerInbox;
use std::ptr::{null, null_mut};
use std::sync::Arc;

const NO_STEP: Step = Step {
    flags: 0,
    send: 0,
    recv: 0,
    chunk: 0,
};

/// The steps of one program as a kernel reads them.
pub(super) struct Steps {
    pub(super) chunks: u32,
    pub(super) steps: u32,
    pub(super) step: [Step; MAX_STEPS],
}

impl Steps {
    fn of(program: &Program) -> Steps {
        debug_assert!(program.steps.len() <= MAX_STEPS);
        let mut step = [NO_STEP; MAX_STEPS];
        for (step, planned) in step.iter_mut().zip(&program.steps) {
            *step = Step {
                flags: planned.flags.0,
                send: planned.send,
                recv: planned.recv,
                chunk: planned.chunk,
            };
        }
        Steps {
            chunks: program.chunks,
            steps: program.steps.len() as u32,
            step,
        }
    }
}

/// The programs of one rank.
pub(super) struct Programs {
    pub(super) all_reduce: Steps,
    pub(super) all_gather: Steps,
    /// By root.
    pub(super) broadcast: Vec<Steps>,
}

impl Programs {
    pub(super) fn of(ranks: u32, rank: u32) -> Programs {
        Programs {
            all_reduce: Steps::of(&plan::ring_all_reduce(ranks, rank)),
            all_gather: Steps::of(&plan::ring_all_gather(ranks, rank)),
            broadcast: (0..ranks)
                .map(|root| Steps::of(&plan::ring_broadcast(ranks, rank, root)))
                .collect(),
        }
    }
}

/// What every kernel of a rank is told of the rank itself.
pub(super) struct Own {
    pub(super) rank: u32,
    pub(super) state: *mut State,
    pub(super) control: *mut Control,
    pub(super) started: *mut u64,
}

impl Own {
    /// The links of this rank, which all programs share, resolved to addresses; a work without steps yet.
    pub(super) fn program_work(
        &self,
        profile: &Profile,
        programs: &[Program],
        inboxes: &[Arc<PeerInbox>],
    ) -> ProgramWork {
        let rank = self.rank;
        let own = &programs[rank as usize];
        debug_assert!(own.sends.len() <= MAX_LINKS && own.recvs.len() <= MAX_LINKS);
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
            chunks: 0,
            steps: 0,
            pad: 0,
            output_stride: 0,
            send,
            recv,
            step: [NO_STEP; MAX_STEPS],
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
            pad: 0,
            area,
        }
    }

    pub(super) fn two_shot_work(&self, profile: &Profile, inboxes: &[Arc<PeerInbox>], may_lend: bool) -> TwoShotWork {
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
            most_blocks: profile.two_shot_blocks,
            may_lend: u32::from(may_lend),
            slots,
            counters,
            lent_input: [null(); MAX_RANKS],
            lent_output: [null_mut(); MAX_RANKS],
        }
    }
}
