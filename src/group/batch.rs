//! The operations of one group, launched together.
//!
//! Ranks of one communicator that one thread drives wait for each other inside their kernels, so that they must run side
//! by side, while operations of one communicator must run one after another. So a batch has, for each communicator, its
//! operations in order, and nothing in it waits for another communicator.

use crate::comm::{self, CommRef, Communicator, RawComm, Turn};
use crate::error::{Error, Result};
use crate::launch::{self, Part, Work};
use crate::request::Request;
use std::collections::BTreeMap;

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
    // Communicators in the order of their first operation, which ranks of other processes follow too.
    let mut order: Vec<RawComm> = Vec::with_capacity(turns.len());
    let mut works: BTreeMap<RawComm, Vec<Work>> = BTreeMap::new();
    for (comm, request) in requests {
        let list = works.entry(*comm).or_insert_with(|| {
            order.push(*comm);
            Vec::new()
        });
        list.extend(turns[comm].engine.prepare(request)?);
    }
    let batch: Vec<Part> = order
        .iter()
        .map(|comm| (turns[comm].engine, &works[comm][..]))
        .collect();
    let admitted = launch::admit(&batch)?;
    admitted.launch().map_err(|error| blame(members.values(), error))
}

/// Tells every communicator of a failed batch; the first that knows a cause gives the error of the group.
fn blame<'a>(members: impl Iterator<Item = &'a CommRef<Communicator>>, error: Error) -> Error {
    let blamed: Vec<Error> = members.map(|member| member.blame(error.clone())).collect();
    blamed.into_iter().find(|cause| *cause != error).unwrap_or(error)
}
