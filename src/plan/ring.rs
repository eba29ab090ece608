//! The program around a ring of the ranks in order: rank r sends to r + 1 and receives from r - 1.
//!
//! All-reduce is a reduce-scatter, then an all-gather. Rank r first sends its own part of chunk r to r + 1;
//! in step s it takes chunk r - s from r - 1 and adds its own part. After ranks - 1 steps chunk c is complete at rank
//! c - 1, which stores it and passes it on; the other ranks store and forward. So every chunk is reduced in one fixed
//! order, by one rank, and all ranks end with the same bits.
//!
//! A step that receives and sends holds the received slot until a slot for sending is free. With one slot a link all
//! ranks would hold what their neighbour waits for; two are enough, and `progress::check` shows both.

use super::{Program, Step, StepFlags};

const RECV: StepFlags = StepFlags::RECV;
const LOAD: StepFlags = StepFlags::LOAD;
const SEND: StepFlags = StepFlags::SEND;
const STORE: StepFlags = StepFlags::STORE;
const FINISH: StepFlags = StepFlags::FINISH;

/// The all-reduce of `rank` among `ranks`.
pub fn all_reduce(ranks: u32, rank: u32) -> Program {
    if ranks == 1 {
        return program(1, 0, 1, 0, vec![step_of(LOAD | STORE | FINISH, 0)]);
    }
    let steps = (0..2 * ranks - 1).map(|step| {
        let flags = match step {
            0 => LOAD | SEND,
            s if s < ranks - 1 => RECV | LOAD | SEND,
            s if s == ranks - 1 => RECV | LOAD | SEND | STORE | FINISH,
            s if s < 2 * ranks - 2 => RECV | SEND | STORE,
            _ => RECV | STORE,
        };
        step_of(flags, (rank + 2 * ranks - step) % ranks)
    });
    program(ranks, rank, ranks, 2, steps.collect())
}

fn step_of(flags: StepFlags, chunk: u32) -> Step {
    Step {
        flags,
        send: 0,
        recv: 0,
        chunk: chunk as u8,
    }
}

fn program(ranks: u32, rank: u32, chunks: u32, slots_needed: u32, steps: Vec<Step>) -> Program {
    let link = |peer| if ranks > 1 { vec![peer % ranks] } else { vec![] };
    Program {
        chunks,
        sends: link(rank + 1),
        recvs: link(rank + ranks - 1),
        steps,
        slots_needed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    /// The rows that the proof of order reads: ci/mutate has no Rust in it.
    fn table() -> String {
        let mut text = String::from(
            "# What src/plan/ring.rs makes; its test compares. Name, ranks, rank, chunks, slots needed, peer that is sent to,\n\
             # peer that is received from, steps as flags:chunk.\n",
        );
        let mut row = |name: &str, ranks: u32, rank: u32, program: &Program| {
            let (chunks, slots, send, recv) =
                (program.chunks, program.slots_needed, program.sends[0], program.recvs[0]);
            let _ = write!(text, "{name} {ranks} {rank} {chunks} {slots} {send} {recv} ");
            let steps: Vec<String> = program
                .steps
                .iter()
                .map(|step| format!("{}:{}", step.flags.0, step.chunk))
                .collect();
            text.push_str(&steps.join(" "));
            text.push('\n');
        };
        for ranks in 2..=4 {
            for rank in 0..ranks {
                row("all_reduce", ranks, rank, &all_reduce(ranks, rank));
            }
        }
        text
    }

    #[test]
    fn the_proof_of_order_runs_these_programs() {
        let expected = table();
        assert!(
            include_str!("../../tests/order/programs.txt") == expected,
            "tests/order/programs.txt should read:\n{expected}"
        );
    }
}
