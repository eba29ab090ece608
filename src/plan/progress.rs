//! The progress checker: runs all ranks' programs with a given number of slots a link, without data.
//!
//! It proves for a plan that no rank waits for ever, that nothing is left in a slot at the end, and that every chunk
//! of every rank's output holds what the collective puts there: of an all-reduce each rank's contribution exactly once,
//! finished exactly once; of a move the one rank's whose it is. Kernels move a step as a whole (all its slots at once),
//! and so does this.

use super::{Program, StepFlags};
use crate::request::Collective;
use std::collections::{HashMap, VecDeque};

/// A value on its way: how often each rank's input went in, and how often it was finished.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    contributions: Vec<u32>,
    finished: u32,
}

struct Walk<'a> {
    collective: Collective,
    programs: &'a [Program],
    slots: usize,
    /// (from, to) -> slots in flight, with the chunk that each carries.
    links: HashMap<(usize, usize), VecDeque<(u8, Value)>>,
    /// Rank -> output chunks.
    outputs: Vec<HashMap<u8, Value>>,
}

/// Checks the programs of all ranks for a collective over `iterations` with `slots` slots a link.
pub fn check(collective: Collective, programs: &[Program], slots: u32, iterations: usize) -> Result<(), String> {
    let ranks = programs.len();
    let mut walk = Walk {
        collective,
        programs,
        slots: slots as usize,
        links: HashMap::new(),
        outputs: vec![HashMap::new(); ranks],
    };
    let mut position = vec![0usize; ranks];
    loop {
        let mut moved = false;
        for (rank, at) in position.iter_mut().enumerate() {
            let length = programs[rank].steps.len();
            while *at < length * iterations && walk.step(rank, *at % length)? {
                *at += 1;
                moved = true;
                if *at % length == 0 {
                    walk.check_outputs(rank)?;
                }
            }
        }
        if !moved {
            break;
        }
    }
    if let Some(rank) = (0..ranks).find(|rank| position[*rank] < programs[*rank].steps.len() * iterations) {
        let step = programs[rank].steps[position[rank] % programs[rank].steps.len()];
        return Err(format!(
            "with {slots} slots a link rank {rank} is stuck at step {}: {step:?}",
            position[rank]
        ));
    }
    match walk.links.iter().find(|(_, queue)| !queue.is_empty()) {
        Some(((from, to), queue)) => Err(format!(
            "{} slots from rank {from} to rank {to} are never received",
            queue.len()
        )),
        None => Ok(()),
    }
}

impl Walk<'_> {
    /// Does one step of one rank if its slots are there; false if it must wait.
    fn step(&mut self, rank: usize, index: usize) -> Result<bool, String> {
        let program = &self.programs[rank];
        let step = program.steps[index];
        let send = step
            .flags
            .has(StepFlags::SEND)
            .then(|| (rank, program.sends[step.send as usize] as usize));
        let recv = step
            .flags
            .has(StepFlags::RECV)
            .then(|| (program.recvs[step.recv as usize] as usize, rank));
        if send.is_some_and(|link| self.links.get(&link).is_some_and(|queue| queue.len() >= self.slots)) {
            return Ok(false);
        }
        let mut value = Value {
            contributions: vec![0; self.programs.len()],
            finished: 0,
        };
        if let Some(link) = recv {
            let Some((chunk, received)) = self.links.get_mut(&link).and_then(VecDeque::pop_front) else {
                return Ok(false);
            };
            if chunk != step.chunk {
                return Err(format!(
                    "rank {rank} step {index} expects chunk {} and receives chunk {chunk}",
                    step.chunk
                ));
            }
            value = received;
        }
        if step.flags.has(StepFlags::LOAD) {
            value.contributions[rank] += 1;
        }
        if step.flags.has(StepFlags::FINISH) {
            value.finished += 1;
        }
        if step.flags.has(StepFlags::STORE) {
            self.outputs[rank].insert(step.chunk, value.clone());
        }
        if let Some(link) = send {
            self.links.entry(link).or_default().push_back((step.chunk, value));
        }
        Ok(true)
    }

    /// What the output's chunk must be.
    fn expected(&self, chunk: u32) -> Value {
        let ranks = 0..self.programs.len() as u32;
        let only = |from: u32| Value {
            contributions: ranks.clone().map(|rank| u32::from(rank == from)).collect(),
            finished: 0,
        };
        match self.collective {
            Collective::AllReduce => Value {
                contributions: vec![1; self.programs.len()],
                finished: 1,
            },
            Collective::AllGather => only(chunk),
            Collective::Broadcast { root } => only(root as u32),
        }
    }

    fn check_outputs(&mut self, rank: usize) -> Result<(), String> {
        let outputs = std::mem::take(&mut self.outputs[rank]);
        let chunks = match self.collective {
            // A block of every rank, of one chunk.
            Collective::AllGather => self.programs.len() as u32,
            _ => self.programs[rank].chunks,
        };
        for chunk in 0..chunks {
            match outputs.get(&(chunk as u8)) {
                Some(value) if *value == self.expected(chunk) => {}
                other => return Err(format!("rank {rank} ends with chunk {chunk} as {other:?}")),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ring_all_gather, ring_all_reduce, ring_broadcast};
    use super::*;

    /// Ranks in order, and host after host as they come when every other rank is elsewhere.
    fn orders(ranks: u32) -> [Vec<u32>; 2] {
        let of = |parity: u32| (0..ranks).filter(move |rank| rank % 2 == parity);
        [(0..ranks).collect(), of(0).chain(of(1)).collect()]
    }

    fn ring(collective: Collective, order: &[u32]) -> Vec<Program> {
        let program = |rank| match collective {
            Collective::AllReduce => ring_all_reduce(order, rank),
            Collective::AllGather => ring_all_gather(order, rank),
            Collective::Broadcast { root } => ring_broadcast(order, rank, root as u32),
        };
        (0..order.len() as u32).map(program).collect()
    }

    fn collectives(ranks: u32) -> impl Iterator<Item = Collective> {
        let broadcasts = (0..ranks as i32).map(|root| Collective::Broadcast { root });
        [Collective::AllReduce, Collective::AllGather]
            .into_iter()
            .chain(broadcasts)
    }

    #[test]
    fn every_program_makes_progress_with_the_slots_it_needs_and_not_with_fewer() {
        for (ranks, order) in (1..=16).flat_map(|ranks| orders(ranks).map(|order| (ranks, order))) {
            for collective in collectives(ranks) {
                let programs = ring(collective, &order);
                let needed = programs[0].slots_needed;
                for slots in needed..needed + 3 {
                    check(collective, &programs, slots, 3)
                        .unwrap_or_else(|error| panic!("{collective:?} of {ranks} ranks: {error}"));
                }
                if needed > 0 {
                    let stuck = check(collective, &programs, needed - 1, 3).unwrap_err();
                    assert!(stuck.contains("is stuck at step"), "{stuck}");
                }
            }
        }
    }

    #[test]
    fn the_checker_sees_a_missing_step_a_double_contribution_and_a_wrong_chunk() {
        let ring = |collective| ring(collective, &[0, 1, 2, 3]);
        let check = |programs: &[Program]| check(Collective::AllReduce, programs, 4, 1);
        let mut programs = ring(Collective::AllReduce);
        programs[2].steps.pop();
        assert!(check(&programs).is_err());
        let mut programs = ring(Collective::AllReduce);
        programs[1].steps[5].flags = programs[1].steps[5].flags | StepFlags::LOAD;
        assert!(check(&programs).is_err());
        let mut programs = ring(Collective::AllReduce);
        programs[1].steps[2].chunk ^= 1;
        assert!(check(&programs).unwrap_err().contains("expects chunk"));
    }

    #[test]
    fn the_checker_sees_a_move_that_reduces_or_leaves_a_block_out() {
        let ring = |collective| ring(collective, &[0, 1, 2]);
        let mut programs = ring(Collective::AllGather);
        programs[1].steps[1].flags = StepFlags::RECV | StepFlags::SEND;
        let error = super::check(Collective::AllGather, &programs, 4, 1).unwrap_err();
        assert!(error.contains("rank 1 ends with chunk 0 as None"), "{error}");
        let root = Collective::Broadcast { root: 1 };
        let mut programs = ring(root);
        programs[2].steps[0].flags = programs[2].steps[0].flags | StepFlags::LOAD;
        assert!(super::check(root, &programs, 4, 1).is_err());
    }
}
