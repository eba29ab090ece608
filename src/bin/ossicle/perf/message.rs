//! What ranks tell the coordinator, over a channel from threads and as lines of JSON from processes.

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The rank has joined the communicator.
    Joined { rank: u32, pid: u32, device: String },
    /// The rank has finished a step: half a row of the table.
    Measured(Measured),
    /// The rank has left the communicator in good order.
    Left { rank: u32 },
    /// The process has ended; sent by who read its news.
    Ended { process: u32 },
    /// The run is over: something failed.
    Failed { text: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) rank: u32,
    pub(crate) step: usize,
    pub(crate) time_us: f64,
    /// Processor time of the whole process for one operation.
    pub(crate) cpu_us: f64,
    /// Elements of this rank that were wrong; None where nothing was checked.
    pub(crate) wrong: Option<u64>,
    /// What was wrong first.
    pub(crate) complaint: Option<String>,
}
