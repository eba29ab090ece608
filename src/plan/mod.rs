//! How an operation is done: pure functions from the call, the profile and the rank to a plan.
//!
//! No I/O, no clock, no device: every rank computes the same plan from the same inputs, and every run the same bits.
//! The inputs are the call and one `Profile`, which rank 0 distributes at init; never local timing, pointer alignment
//! or registration state.

pub mod budget;
mod choose;
mod program;
pub mod progress;
mod ring;

pub use choose::choose;
pub use choose::{choose_move, LINE_PAYLOAD_BYTES};
pub use program::{Program, Step, StepFlags};
pub use ring::{all_gather as ring_all_gather, all_reduce as ring_all_reduce, broadcast as ring_broadcast};

use crate::request::{DataType, ReduceOp};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    /// Everyone sends all that it has to everyone as lines, and reduces in rank order or copies.
    OneShot,
    /// Everyone reduces one part in rank order, or has it, and gives it to everyone through staging.
    TwoShot,
    /// Around a ring, through slots; the only one between hosts.
    Ring,
}

impl Algorithm {
    pub const ALL: [Algorithm; 3] = [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Ring];

    /// The name in `NCCL_ALGO`.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::OneShot => "OneShot",
            Algorithm::TwoShot => "TwoShot",
            Algorithm::Ring => "Ring",
        }
    }

    /// The name in `NCCL_PROTO` of the protocol that the algorithm runs on.
    pub fn protocol(self) -> &'static str {
        match self {
            Algorithm::OneShot => "LL",
            Algorithm::TwoShot | Algorithm::Ring => "Simple",
        }
    }
}

/// Algorithms by collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowed {
    pub all_reduce: Vec<Algorithm>,
    pub all_gather: Vec<Algorithm>,
    pub broadcast: Vec<Algorithm>,
}

/// What the planner knows besides the call; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    pub ranks: u32,
    /// Between hosts there are rings only.
    pub hosts: u32,
    /// Algorithms that `NCCL_ALGO` and `NCCL_PROTO` allow, by collective.
    pub allowed: Allowed,
    /// Blocks of any kernel at most; of a ring each is a channel, which has network links of its own between hosts.
    pub blocks: u32,
    /// A channel is worth having from this many bytes.
    pub channel_bytes: u64,
    /// Of a ring's links, those between hosts too: chunks are cut to it.
    pub slot_bytes: u64,
    pub slots: u32,
    /// Lines of one region of the one-shot area; a line carries 8 bytes.
    pub lines: u32,
    /// Largest message that one-shot wins, as an all-reduce and as a move; in an all-gather of one rank.
    pub one_shot_bytes: u64,
    pub one_shot_move_bytes: u64,
    /// A block of a two-shot kernel is worth having from this many bytes.
    pub two_shot_block_bytes: u64,
    pub two_shot_slot_bytes: u64,
    /// Threads of a block at most.
    pub threads: u32,
}

/// What the planner knows of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub count: usize,
    pub datatype: DataType,
    pub op: ReduceOp,
}

impl Call {
    pub fn bytes(&self) -> u64 {
        self.count as u64 * self.datatype.bytes() as u64
    }
}

/// The planner's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub algorithm: Algorithm,
    /// Blocks of the kernel; for a ring its channels.
    pub blocks: u32,
    pub threads: u32,
    /// Why, for `NCCL_DEBUG=INFO`.
    pub reason: &'static str,
}
