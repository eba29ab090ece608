//! Ring all-reduce: reduce-scatter, then all-gather, around the ranks in order.
//!
//! Rank r first sends its own part of chunk r to r + 1;
//! in step s it takes chunk r - s from r - 1 and adds its own part. After ranks - 1 steps chunk c is complete at rank
//! c - 1, which stores it and passes it on; the other ranks store and forward. So every chunk is reduced in one fixed
//! order, by one rank, and all ranks end with the same bits.
//!
//! A step that receives and sends holds the received slot until a slot for sending is free. With one slot a link all
//! ranks would hold what their neighbour waits for; two are enough, and `progress::check` shows both.

use super::{Program, Step, StepFlags};

/// The program of `rank` among `ranks`.
pub fn all_reduce(ranks: u32, rank: u32) -> Program {
    const RECV: StepFlags = StepFlags::RECV;
    const LOAD: StepFlags = StepFlags::LOAD;
    const SEND: StepFlags = StepFlags::SEND;
    const STORE: StepFlags = StepFlags::STORE;
    const FINISH: StepFlags = StepFlags::FINISH;
    if ranks == 1 {
        let copy = Step {
            flags: LOAD | STORE | FINISH,
            send: 0,
            recv: 0,
            chunk: 0,
        };
        return Program {
            chunks: 1,
            sends: vec![],
            recvs: vec![],
            steps: vec![copy],
            slots_needed: 0,
        };
    }
    let steps = (0..2 * ranks - 1).map(|step| {
        let flags = match step {
            0 => LOAD | SEND,
            s if s < ranks - 1 => RECV | LOAD | SEND,
            s if s == ranks - 1 => RECV | LOAD | SEND | STORE | FINISH,
            s if s < 2 * ranks - 2 => RECV | SEND | STORE,
            _ => RECV | STORE,
        };
        let chunk = (rank + 2 * ranks - step) % ranks;
        Step {
            flags,
            send: 0,
            recv: 0,
            chunk: chunk as u8,
        }
    });
    Program {
        chunks: ranks,
        sends: vec![(rank + 1) % ranks],
        recvs: vec![(rank + ranks - 1) % ranks],
        steps: steps.collect(),
        slots_needed: 2,
    }
}
