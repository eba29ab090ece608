//! Links between ranks: where the memory lies that a sender writes and a receiver reads.
//!
//! Every rank owns an inbox: its one-shot area, the slots of its receive links and the flags that peers write. A path
//! decides how peers reach it. One path serves a whole communicator:
//! - `P2p`: all ranks are threads of one process; an inbox is device memory and peers use its address.
//! - `Shm`: an inbox is host memory shared between processes (a memfd), which a GPU sees as pinned memory.

mod inbox;
mod shared;

pub use inbox::{Geometry, Inbox, PeerInbox, TwoShotGeometry};

use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    P2p,
    Shm,
}

impl Path {
    pub fn name(self) -> &'static str {
        match self {
            Path::P2p => "P2P",
            Path::Shm => "SHM",
        }
    }
}

/// What a rank says about how it can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// Equal for ranks of one process.
    pub process: u128,
    /// The rank's device, and those whose memory its kernels can address too.
    pub device: [u8; 16],
    pub peers: Vec<[u8; 16]>,
    pub p2p: bool,
    pub shm: bool,
}

impl Reach {
    /// This process's and device's, with what the environment allows.
    pub fn of_this_process(device: &dyn Device, p2p: bool, shm: bool) -> Reach {
        // Host memory is within every thread's reach: all host devices count as one.
        let uuid = if device.kind() == DeviceKind::Host {
            [0; 16]
        } else {
            device.uuid()
        };
        Reach {
            process: inbox::process_token(),
            device: uuid,
            peers: device.peers(),
            p2p,
            shm,
        }
    }
}

/// The path that all ranks of a communicator can use, with the reason, or the sentence why there is none. Pure: every
/// rank comes to the same answer.
pub fn choose(reach: &[Reach]) -> Result<(Path, &'static str)> {
    let one_process = reach.iter().all(|r| r.process == reach[0].process);
    let addresses = |r: &Reach| {
        reach
            .iter()
            .all(|other| other.device == r.device || r.peers.contains(&other.device))
    };
    let in_reach = reach.iter().all(addresses);
    if one_process && in_reach && reach.iter().all(|r| r.p2p) {
        return Ok((Path::P2p, "all ranks are in one process"));
    }
    let obstacle = match (one_process, in_reach) {
        (false, _) => "ranks are in several processes",
        (true, false) => "the GPUs cannot address each other's memory",
        (true, true) => "P2P is disabled by NCCL_P2P_DISABLE",
    };
    match reach.iter().position(|r| !r.shm) {
        None => Ok((Path::Shm, obstacle)),
        Some(rank) => Err(Error::usage(format!(
            "no path between the ranks: {obstacle}, and shared memory is disabled by NCCL_SHM_DISABLE on rank {rank}; the \
             network path on one host is not built yet, so unset one of the two"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_is_p2p_in_one_process_and_shm_else() {
        let rank = |process, p2p, shm| Reach {
            process,
            device: [0; 16],
            peers: vec![],
            p2p,
            shm,
        };
        let path = |reach: &[Reach]| choose(reach).map(|(path, _)| path);
        assert_eq!(path(&[rank(1, true, true), rank(1, true, false)]), Ok(Path::P2p));
        assert_eq!(path(&[rank(1, true, true), rank(1, false, true)]), Ok(Path::Shm));
        assert_eq!(path(&[rank(1, true, true), rank(2, true, true)]), Ok(Path::Shm));
        let far = Reach {
            device: [1; 16],
            ..rank(1, true, true)
        };
        assert_eq!(path(&[rank(1, true, true), far.clone()]), Ok(Path::Shm));
        let near = |reach: Reach, peer| Reach {
            peers: vec![[peer; 16]],
            ..reach
        };
        assert_eq!(path(&[near(rank(1, true, true), 1), near(far, 0)]), Ok(Path::P2p));
        let none = path(&[rank(1, true, true), rank(2, true, false)]).unwrap_err();
        assert!(
            none.text.contains("rank 1") && none.text.contains("NCCL_SHM_DISABLE"),
            "{none}"
        );
    }
}
