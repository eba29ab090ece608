//! Programs around a ring: every rank sends to the next and receives from the one before.
//!
//! `order` names the ranks by their positions in the ring (`topology::Hosts::ring`: host after host, so that each
//! network link is crossed once). The rank at position p sends to that at p + 1.
//!
//! All-reduce is a reduce-scatter, then an all-gather. Position p first sends its own part of chunk p to p + 1;
//! in step s it takes chunk p - s from p - 1 and adds its own part. After ranks - 1 steps chunk c is complete at position
//! c - 1, which stores it and passes it on; the other ranks store and forward. So every chunk is reduced in one fixed
//! order, by one rank, and all ranks end with the same bits.
//!
//! In an all-gather every rank sends its own block, and passes on what it receives until it has been around; a step's
//! chunk is the number of the rank whose block it is. In a broadcast the root sends, and the last before the root passes
//! nothing on: pieces follow each other along the ring.
//!
//! A step that receives and sends holds the received slot until a slot for sending is free. With one slot a link all
//! ranks would hold what their neighbour waits for; two are enough, and `progress::check` shows both. A broadcast's links
//! are no circle, and one is enough.

use super::{Program, Step, StepFlags};

const RECV: StepFlags = StepFlags::RECV;
const LOAD: StepFlags = StepFlags::LOAD;
const SEND: StepFlags = StepFlags::SEND;
const STORE: StepFlags = StepFlags::STORE;
const FINISH: StepFlags = StepFlags::FINISH;

/// The all-reduce of `rank` around `order`.
pub fn all_reduce(order: &[u32], rank: u32) -> Program {
    let ranks = order.len() as u32;
    if ranks == 1 {
        return program(order, rank, 1, 0, vec![step_of(LOAD | STORE | FINISH, 0)]);
    }
    let position = position(order, rank);
    let steps = (0..2 * ranks - 1).map(|step| {
        let flags = match step {
            0 => LOAD | SEND,
            s if s < ranks - 1 => RECV | LOAD | SEND,
            s if s == ranks - 1 => RECV | LOAD | SEND | STORE | FINISH,
            s if s < 2 * ranks - 2 => RECV | SEND | STORE,
            _ => RECV | STORE,
        };
        step_of(flags, (position + 2 * ranks - step) % ranks)
    });
    program(order, rank, ranks, 2, steps.collect())
}

/// The all-gather of `rank` around `order`.
pub fn all_gather(order: &[u32], rank: u32) -> Program {
    let ranks = order.len() as u32;
    if ranks == 1 {
        return program(order, rank, 1, 0, vec![step_of(LOAD | STORE, 0)]);
    }
    let position = position(order, rank);
    let steps = (0..ranks).map(|step| {
        let flags = match step {
            0 => LOAD | SEND | STORE,
            s if s < ranks - 1 => RECV | SEND | STORE,
            _ => RECV | STORE,
        };
        step_of(flags, order[((position + ranks - step) % ranks) as usize])
    });
    // Of two ranks none passes anything on.
    program(order, rank, 1, ranks.min(3) - 1, steps.collect())
}

/// The broadcast of `rank` around `order` from `root`.
pub fn broadcast(order: &[u32], rank: u32, root: u32) -> Program {
    let ranks = order.len() as u32;
    let flags = match (position(order, rank) + ranks - position(order, root)) % ranks {
        0 if ranks == 1 => LOAD | STORE,
        0 => LOAD | SEND | STORE,
        distance if distance < ranks - 1 => RECV | SEND | STORE,
        _ => RECV | STORE,
    };
    program(order, rank, 1, ranks.min(2) - 1, vec![step_of(flags, 0)])
}

fn step_of(flags: StepFlags, chunk: u32) -> Step {
    Step {
        flags,
        send: 0,
        recv: 0,
        chunk: chunk as u8,
    }
}

fn position(order: &[u32], rank: u32) -> u32 {
    // Every rank is in the order.
    order.iter().position(|other| *other == rank).unwrap_or_default() as u32
}

fn program(order: &[u32], rank: u32, chunks: u32, slots_needed: u32, steps: Vec<Step>) -> Program {
    let (ranks, position) = (order.len(), position(order, rank) as usize);
    let link = |at: usize| if ranks > 1 { vec![order[at % ranks]] } else { vec![] };
    Program {
        chunks,
        sends: link(position + 1),
        recvs: link(position + ranks - 1),
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
             # peer that is received from, steps as flags:chunk. A broadcast's are from rank 0, which others stand for.\n",
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
            let order: Vec<u32> = (0..ranks).collect();
            for rank in 0..ranks {
                row("all_reduce", ranks, rank, &all_reduce(&order, rank));
                row("ring_gather", ranks, rank, &all_gather(&order, rank));
                row("ring_broadcast", ranks, rank, &broadcast(&order, rank, 0));
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

    #[test]
    fn a_ring_over_hosts_goes_from_rank_to_rank_in_its_order() {
        let order = [0, 2, 1, 3];
        let neighbours = |rank| {
            let program = all_reduce(&order, rank);
            (program.recvs[0], program.sends[0])
        };
        assert_eq!([0, 1, 2, 3].map(neighbours), [(3, 2), (2, 3), (0, 1), (1, 0)]);
        // Position 1 begins with chunk 1, and with its own block of an all-gather.
        assert_eq!(all_reduce(&order, 2).steps[0].chunk, 1);
        assert_eq!(all_gather(&order, 2).steps[0].chunk, 2);
    }
}
