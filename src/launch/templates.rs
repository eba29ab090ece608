//! Templates of the kernels' parameters: all that an operation does not change, with every address resolved.

use super::layout::{
    Beside, Control, LentAddress, Link, LinkKind, OneShotWork, ProgramWork, State, Step, TwoShotWork, MAX_LINKS,
    MAX_RANKS, MAX_STEPS, NO_ROOT,
};
use super::net_links::NetLinks;
use crate::error::{Error, Result};
use crate::plan::{self, Profile, Program};
use crate::proxy::Direction;
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

/// Every rank's program around a ring, and the ring. All programs of a rank have the same links.
pub(super) struct Ring {
    pub(super) order: Vec<u32>,
    pub(super) all_reduce: Vec<Program>,
}

impl Ring {
    pub(super) fn new(order: Vec<u32>) -> Ring {
        let ranks = 0..order.len() as u32;
        Ring {
            all_reduce: ranks.map(|rank| plan::ring_all_reduce(&order, rank)).collect(),
            order,
        }
    }
}

/// The parameters of a rank's programs.
pub(super) struct Programs {
    pub(super) all_reduce: ProgramWork,
    pub(super) all_gather: ProgramWork,
    /// Its one step is by root.
    pub(super) broadcast: ProgramWork,
    pub(super) broadcast_steps: [Step; MAX_RANKS],
}

/// Where a rank's links lead.
pub(super) struct Reached<'a> {
    /// By rank; None on other hosts.
    pub(super) inboxes: &'a [Option<Arc<PeerInbox>>],
    pub(super) net: Option<&'a NetLinks>,
}

impl Reached<'_> {
    pub(super) fn inbox(&self, peer: u32) -> Result<&PeerInbox> {
        let inbox = self.inboxes[peer as usize].as_deref();
        inbox.ok_or_else(|| Error::internal(format!("rank {peer} is on another host and has no network link")))
    }

    fn net(&self, direction: Direction, peer: u32) -> Option<Link> {
        self.net?.link(direction, peer)
    }
}

/// What every kernel of a rank is told of the rank itself.
pub(super) struct Own {
    pub(super) rank: u32,
    pub(super) state: *mut State,
    pub(super) control: *mut Control,
    pub(super) started: *mut u64,
    pub(super) zero_copy: bool,
}

impl Own {
    /// This rank's programs with their links resolved to addresses.
    pub(super) fn programs(&self, profile: &Profile, ring: &Ring, reached: &Reached) -> Result<Programs> {
        let all_reduce = self.program_work(profile, &ring.all_reduce, reached)?;
        let broadcast = |root: u32| plan::ring_broadcast(&ring.order, self.rank, root);
        let mut broadcast_steps = [NO_STEP; MAX_RANKS];
        for (step, root) in broadcast_steps.iter_mut().zip(0..profile.ranks) {
            *step = steps(&broadcast(root))[0];
        }
        Ok(Programs {
            all_gather: with_program(all_reduce, &plan::ring_all_gather(&ring.order, self.rank)),
            broadcast: with_program(all_reduce, &broadcast(0)),
            broadcast_steps,
            all_reduce,
        })
    }

    fn program_work(&self, profile: &Profile, programs: &[Program], reached: &Reached) -> Result<ProgramWork> {
        let rank = self.rank;
        let own = &programs[rank as usize];
        debug_assert!(own.sends.len() <= MAX_LINKS && own.recvs.len() <= MAX_LINKS && own.steps.len() <= MAX_STEPS);
        let none = Link {
            slots: null_mut(),
            tail: null_mut(),
            head: null_mut(),
            beside: Beside { notes: null_mut() },
            peer: 0,
            kind: LinkKind::Memory,
        };
        let (mut send, mut recv) = ([none; MAX_LINKS], [none; MAX_LINKS]);
        let index = |links: &[u32]| links.iter().position(|peer| *peer == rank).unwrap_or_default();
        let mine = reached.inbox(rank)?;
        for (link, peer) in own.sends.iter().enumerate() {
            if let Some(net) = reached.net(Direction::Send, *peer) {
                send[link] = net;
                continue;
            }
            // The peer knows this link by its place among the peer's receive links.
            let at_peer = index(&programs[*peer as usize].recvs);
            let inbox = reached.inbox(*peer)?;
            send[link] = Link {
                slots: inbox.slots(at_peer),
                tail: inbox.tail(at_peer),
                head: mine.head(link),
                peer: *peer,
                ..none
            };
        }
        for (link, peer) in own.recvs.iter().enumerate() {
            if let Some(net) = reached.net(Direction::Receive, *peer) {
                recv[link] = net;
                continue;
            }
            let at_peer = index(&programs[*peer as usize].sends);
            recv[link] = Link {
                slots: mine.slots(link),
                tail: mine.tail(link),
                head: reached.inbox(*peer)?.head(at_peer),
                peer: *peer,
                ..none
            };
        }
        Ok(ProgramWork {
            input: null_mut(),
            output: null_mut(),
            count: 0,
            state: self.state,
            control: self.control,
            started: self.started,
            slot_bytes: profile.slot_bytes,
            stride: 0,
            slots: profile.slots,
            channels: 1,
            ranks: profile.ranks,
            chunks: own.chunks,
            steps: own.steps.len() as u32,
            posting: posting(&send) | posting(&recv) << MAX_LINKS,
            send,
            recv,
            step: steps(own),
        })
    }

    /// Of ranks that are all on one host.
    pub(super) fn one_shot_work(&self, profile: &Profile, inboxes: &[Option<Arc<PeerInbox>>]) -> OneShotWork {
        let mut area = [null_mut(); MAX_RANKS];
        for (area, inbox) in area.iter_mut().zip(inboxes.iter().flatten()) {
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

    /// Likewise.
    pub(super) fn two_shot_work(&self, profile: &Profile, inboxes: &[Option<Arc<PeerInbox>>]) -> TwoShotWork {
        let (mut slots, mut counters) = ([null_mut(); MAX_RANKS], [null_mut(); MAX_RANKS]);
        for (peer, inbox) in inboxes.iter().flatten().enumerate() {
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

/// A bit for each link to an HCA.
fn posting(links: &[Link; MAX_LINKS]) -> u32 {
    let bits = links
        .iter()
        .zip(0..)
        .map(|(link, bit)| u32::from(link.kind == LinkKind::Hca) << bit);
    bits.fold(0, |all, bit| all | bit)
}

/// The same links under another program.
fn with_program(mut work: ProgramWork, program: &Program) -> ProgramWork {
    debug_assert!(program.steps.len() <= MAX_STEPS);
    work.chunks = program.chunks;
    work.steps = program.steps.len() as u32;
    work.step = steps(program);
    work
}

fn steps(program: &Program) -> [Step; MAX_STEPS] {
    let mut step = [NO_STEP; MAX_STEPS];
    for (step, planned) in step.iter_mut().zip(&program.steps) {
        *step = Step {
            flags: planned.flags.0,
            send: planned.send,
            recv: planned.recv,
            chunk: planned.chunk,
        };
    }
    step
}
