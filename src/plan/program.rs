//! A program: what one rank's channels do, as data that kernels interpret (`cuda/collective/program.h`).
//!
//! A program is a list of steps over links, walked once for each iteration over a channel's part of the data. A step
//! takes a chunk from a receive link, from the input or from both (then reduced), and puts it into a send link, the
//! output or both.

use std::ops::BitOr;

/// What a step does; bits as in `cuda/layout.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StepFlags(pub u8);

impl StepFlags {
    pub const RECV: StepFlags = StepFlags(1);
    pub const LOAD: StepFlags = StepFlags(2);
    pub const SEND: StepFlags = StepFlags(4);
    pub const STORE: StepFlags = StepFlags(8);
    /// The reduction is complete: its final operation applies here.
    pub const FINISH: StepFlags = StepFlags(16);

    pub fn has(self, other: StepFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for StepFlags {
    type Output = StepFlags;
    fn bitor(self, other: StepFlags) -> StepFlags {
        StepFlags(self.0 | other.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub flags: StepFlags,
    /// Index into `Program::sends`, where flags have SEND.
    pub send: u8,
    /// Index into `Program::recvs`, where flags have RECV.
    pub recv: u8,
    /// Which chunk of the iteration.
    pub chunk: u8,
}

/// One rank's program; every channel runs it over its own links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Chunks that one iteration cuts its data into.
    pub chunks: u32,
    /// Peers that this rank sends to; a step names the index.
    pub sends: Vec<u32>,
    /// Peers that this rank receives from.
    pub recvs: Vec<u32>,
    pub steps: Vec<Step>,
    /// Slots that a link must have at least for the program to make progress (shown by `progress::check`).
    pub slots_needed: u32,
}
