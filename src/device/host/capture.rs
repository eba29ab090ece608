//! Captures under way: streams whose work becomes the nodes of a graph instead of running.
//!
//! As in CUDA: a stream that waits for an event of the capture joins it, every stream must have been joined again to the
//! one where the capture began when it ends there, and what a capture cannot express breaks it.

use super::graph::{Graph, Kept, Node, Nodes};
use super::scheduler::Task;
use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) struct Capture {
    origin: u64,
    nodes: Vec<Node>,
    kept: Vec<Kept>,
    /// The nodes that the next one in each stream comes after.
    tails: BTreeMap<u64, BTreeSet<usize>>,
    pub(super) broken: bool,
}

impl Capture {
    pub(super) fn begin(origin: u64) -> Capture {
        Capture {
            origin,
            nodes: Vec::new(),
            kept: Vec::new(),
            tails: BTreeMap::from([(origin, BTreeSet::new())]),
            broken: false,
        }
    }

    pub(super) fn add(&mut self, stream: u64, task: Arc<Task>) {
        let after = self.tail(stream);
        self.tails.insert(stream, BTreeSet::from([self.nodes.len()]));
        self.nodes.push(Node { task, after });
    }

    pub(super) fn keep(&mut self, kept: Kept) {
        self.kept.push(kept);
    }

    /// What a record in the stream stands for.
    pub(super) fn tail(&self, stream: u64) -> BTreeSet<usize> {
        self.tails.get(&stream).cloned().unwrap_or_default()
    }

    /// The stream waits for `nodes`, and is in the capture from here on.
    pub(super) fn join(&mut self, stream: u64, nodes: &BTreeSet<usize>) {
        self.tails.entry(stream).or_default().extend(nodes);
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = u64> + '_ {
        self.tails.keys().copied()
    }

    /// The graph, if the capture ends where it began with every stream joined and was never broken.
    pub(super) fn end(self, stream: u64) -> Result<Graph> {
        let refused = |why: &str| Err(Error::usage(format!("the graph capture of stream {stream:#x} {why}")));
        if self.broken {
            return refused("was made invalid by an earlier call");
        }
        if stream != self.origin {
            return refused(&format!("began in stream {:#x}, where it must end", self.origin));
        }
        let mut joined = self.tail(stream);
        for number in (0..self.nodes.len()).rev() {
            if joined.contains(&number) {
                joined.extend(&self.nodes[number].after);
            }
        }
        match self.tails.iter().find(|(_, tail)| !tail.is_subset(&joined)) {
            Some((other, _)) => refused(&format!("lacks a wait for stream {other:#x}, which joined it")),
            None => Ok(Graph(Arc::new(Nodes {
                nodes: self.nodes,
                _kept: self.kept,
            }))),
        }
    }
}
