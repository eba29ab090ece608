//! The progress checker: runs all ranks' programs with a given number of slots a link, without data.
//!
//! It proves for a plan that no rank waits for ever, that nothing is left in a slot at the end, and that every chunk
//! of every rank's output holds each rank's contribution exactly once and is finished exactly once. Kernels move a
//! step as a whole (all its slots at once), and so does this.

use super::{Program, StepFlags};
use std::collections::{HashMap, VecDeque};

/// A value on its way: how often each rank's input went in, and how often it was finished.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    contributions: Vec<u32>,
    finished: u32,
}

struct Walk<'a> {
    programs: &'a [Program],
    slots: usize,
    /// (from, to) -> slots in flight, with the chunk that each carries.
    links: HashMap<(usize, usize), VecDeque<(u8, Value)>>,
    /// Rank -> output chunks.
    outputs: Vec<HashMap<u8, Value>>,
}

/// Checks the programs of all ranks over `iterations` with `slots` slots a link.
pub fn check(programs: &[Program], slots: u32, iterations: usize) -> Result<(), String> {
    let ranks = programs.len();
    let mut walk = Walk {
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

    fn check_outputs(&mut self, rank: usize) -> Result<(), String> {
        let outputs = std::mem::take(&mut self.outputs[rank]);
        let expected = Value {
            contributions: vec![1; self.programs.len()],
            finished: 1,
        };
        for chunk in 0..self.programs[rank].chunks as u8 {
            match outputs.get(&chunk) {
                Some(value) if *value == expected => {}
                other => return Err(format!("rank {rank} ends with chunk {chunk} as {other:?}")),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring_all_reduce;
    use super::*;

    fn ring(ranks: u32) -> Vec<Program> {
        (0..ranks).map(|rank| ring_all_reduce(ranks, rank)).collect()
    }

    #[test]
    fn every_program_makes_progress_with_the_slots_it_needs_and_not_with_fewer() {
        for ranks in 1..=16 {
            let programs = ring(ranks);
            let needed = programs[0].slots_needed;
            for slots in needed..needed + 3 {
                check(&programs, slots, 3).unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
            }
            if needed > 0 {
                let stuck = check(&programs, needed - 1, 3).unwrap_err();
                assert!(stuck.contains("is stuck at step"), "{stuck}");
            }
        }
    }

    #[test]
    fn the_checker_sees_a_missing_step_a_double_contribution_and_a_wrong_chunk() {
        let check = |programs: &[Program]| check(programs, 4, 1);
        let mut programs = ring(4);
        programs[2].steps.pop();
        assert!(check(&programs).is_err());
        let mut programs = ring(4);
        programs[1].steps[5].flags = programs[1].steps[5].flags | StepFlags::LOAD;
        assert!(check(&programs).is_err());
        let mut programs = ring(4);
        programs[1].steps[2].chunk ^= 1;
        assert!(check(&programs).unwrap_err().contains("expects chunk"));
    }
}
