//! The operations of one group, launched round by round.
//!
//! Round k holds the k-th operation of every communicator. Ranks of one communicator that one thread drives wait for
//! each other inside their kernels, so that they must run side by side, while operations of one communicator must run
//! one after another: a round is the largest batch that keeps both.

use crate::comm::{self, CommRef, Communicator, RawComm, Turn};
use crate::error::{Error, Result};
use crate::launch::{self, Engine, Work};
use crate::request::Request;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Launches all of them or, where one cannot be prepared, none.
pub(super) fn launch(requests: &[(RawComm, Request)]) -> Result<()> {
    if requests.is_empty() {
        return Ok(());
    }
    let mut members: BTreeMap<RawComm, CommRef<Communicator>> = BTreeMap::new();
    for (comm, _) in requests {
        if !members.contains_key(comm) {
            members.insert(*comm, comm::registry()?.acquire(*comm)?);
        }
    }
    // By address, so that two threads whose groups share communicators cannot each hold what the other waits for.
    let turns: BTreeMap<RawComm, Turn> = members
        .iter()
        .map(|(comm, member)| Ok((*comm, member.enter()?)))
        .collect::<Result<_>>()?;
    let mut works: Vec<Option<Work>> = requests
        .iter()
        .map(|(comm, request)| turns[comm].engine.prepare(request))
        .collect::<Result<_>>()?;
    let comms: Vec<RawComm> = requests.iter().map(|(comm, _)| *comm).collect();
    for round in rounds(&comms) {
        let batch: Vec<(&Engine, Work)> = round
            .iter()
            .filter_map(|i| Some((turns[&comms[*i]].engine, works[*i].take()?)))
            .collect();
        if batch.is_empty() {
            continue;
        }
        launch::launch(&batch).map_err(|error| blame(round.iter().map(|i| &members[&comms[*i]]), error))?;
    }
    Ok(())
}

/// Tells every communicator of a failed round; the first that knows a cause gives the error of the group.
fn blame<'a>(members: impl Iterator<Item = &'a CommRef<Communicator>>, error: Error) -> Error {
    let blamed: Vec<Error> = members.map(|member| member.blame(error.clone())).collect();
    blamed.into_iter().find(|cause| *cause != error).unwrap_or(error)
}

/// Positions by round: the k-th occurrence of each key is in round k, in the order given.
fn rounds<K: Copy + Eq + Hash>(keys: &[K]) -> Vec<Vec<usize>> {
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    let mut seen: HashMap<K, usize> = HashMap::new();
    for (i, key) in keys.iter().enumerate() {
        let round = seen.entry(*key).or_default();
        if *round == rounds.len() {
            rounds.push(Vec::new());
        }
        rounds[*round].push(i);
        *round += 1;
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_holds_each_communicator_once_and_keeps_its_order() {
        assert_eq!(rounds::<u8>(&[]), Vec::<Vec<usize>>::new());
        assert_eq!(rounds(&['a', 'b', 'c']), [vec![0, 1, 2]]);
        assert_eq!(rounds(&['a', 'a', 'b']), [vec![0, 2], vec![1]]);
        assert_eq!(rounds(&['a', 'b', 'a', 'b', 'b']), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(rounds(&['b', 'b', 'b', 'a']), [vec![0, 3], vec![1], vec![2]]);
    }
}
