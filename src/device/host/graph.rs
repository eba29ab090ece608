//! Graphs of the host device: what a capture gathered, and its replays.

use super::scheduler::Task;
use super::stream::Moment;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

pub(super) type Kept = Arc<dyn Any + Send + Sync>;

/// One task of a graph, and the nodes that come right before it; those have smaller numbers.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) task: Arc<Task>,
    pub(super) after: BTreeSet<usize>,
}

/// Nodes, and what they need for as long as they can run.
pub(super) struct Nodes {
    pub(super) nodes: Vec<Node>,
    pub(super) _kept: Vec<Kept>,
}

/// A captured graph.
pub struct Graph(pub(super) Arc<Nodes>);

impl Graph {
    /// A form that can be launched. It needs the graph no longer.
    pub fn instantiate(&self) -> Executable {
        Executable {
            nodes: Arc::clone(&self.0),
            last: Mutex::default(),
        }
    }
}

/// An executable graph. Its launches follow each other, whatever their streams.
pub struct Executable {
    pub(super) nodes: Arc<Nodes>,
    /// The end of the latest launch.
    pub(super) last: Mutex<Option<Arc<Moment>>>,
}

/// One launch of an executable graph, under way in a stream.
pub(super) struct Replay {
    nodes: Arc<Nodes>,
    /// Of each node, how many of those before it have not ended.
    pending: Vec<usize>,
    /// Nodes that may start.
    pub(super) ready: Vec<usize>,
    left: usize,
    end: Arc<Moment>,
}

impl Replay {
    pub(super) fn new(nodes: Arc<Nodes>, end: Arc<Moment>) -> Replay {
        let pending: Vec<usize> = nodes.nodes.iter().map(|node| node.after.len()).collect();
        let ready = (0..pending.len()).filter(|node| pending[*node] == 0).collect();
        Replay {
            left: pending.len(),
            pending,
            ready,
            nodes,
            end,
        }
    }

    /// Takes a ready node, by its place among them.
    pub(super) fn start(&mut self, place: usize) -> (usize, Arc<Task>) {
        let node = self.ready.swap_remove(place);
        (node, Arc::clone(&self.nodes.nodes[node].task))
    }

    pub(super) fn node_ended(&mut self, ended: usize) {
        self.left -= 1;
        for (number, node) in self.nodes.nodes.iter().enumerate().skip(ended + 1) {
            if node.after.contains(&ended) {
                self.pending[number] -= 1;
                if self.pending[number] == 0 {
                    self.ready.push(number);
                }
            }
        }
    }

    /// Whether all nodes have ended; says so to the next launch.
    pub(super) fn ended(&self) -> bool {
        if self.left == 0 {
            self.end.pass();
        }
        self.left == 0
    }
}
