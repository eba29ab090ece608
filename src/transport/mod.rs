//! Links between ranks: where the memory lies that a sender writes and a receiver reads.
//!
//! Every rank owns an inbox: its one-shot area, the slots of its receive links and the flags that peers write. A path
//! decides how peers on its host reach it. One path serves all ranks of a host:
//! - `P2p`: all of them are threads of one process; an inbox is device memory and peers use its address.
//! - `P2pShared`: ranks are in several processes; an inbox is device memory that peers elsewhere import.
//! - `Shm`: an inbox is host memory shared between processes (a memfd), which a GPU sees as pinned memory.

mod descriptors;
pub mod hca;
mod inbox;
mod links;
#[cfg(test)]
mod links_tests;
pub mod mlx5;
pub mod net;
mod shared;

pub use descriptors::{Address, Exchange, Limit};
pub use inbox::{Geometry, Inbox, PeerInbox, TwoShotGeometry};
pub use links::{Linking, Links};

use crate::device::{Device, DeviceKind, Sharing};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    P2p,
    P2pShared(Sharing),
    Shm,
}

impl Path {
    pub fn name(self) -> String {
        match self {
            Path::P2p => String::from("P2P"),
            Path::P2pShared(sharing) => format!("P2P ({})", sharing.name()),
            Path::Shm => String::from("SHM"),
        }
    }
}

/// What a rank says about how it can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// Equal for ranks of one process.
    pub process: u128,
    /// The rank's device, and those of its process whose memory its kernels cannot address. Of a GPU that the process does
    /// not see (CUDA_VISIBLE_DEVICES) only the attempt can tell.
    pub device: [u8; 16],
    pub out_of_reach: Vec<[u8; 16]>,
    /// How the device's memory reaches other processes.
    pub sharing: Vec<Sharing>,
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
            out_of_reach: device.out_of_reach(),
            sharing: device.sharing(),
            p2p,
            shm,
        }
    }
}

/// The paths that all `ranks` of a host can use, the one to try first in front, each with the reason; or the sentence why
/// there is none. `reach` has every rank of the communicator. Pure: every rank comes to the same answer.
pub fn choose(ranks: &[u32], reach: &[Reach]) -> Result<Vec<(Path, &'static str)>> {
    if let [_] = ranks {
        return Ok(vec![(Path::P2p, "the rank is alone on its host")]);
    }
    let reach: Vec<&Reach> = ranks.iter().map(|rank| &reach[*rank as usize]).collect();
    let one_process = reach.iter().all(|r| r.process == reach[0].process);
    let addresses = |r: &&Reach| reach.iter().all(|other| !r.out_of_reach.contains(&other.device));
    let in_reach = reach.iter().all(addresses);
    let p2p = reach.iter().all(|r| r.p2p);
    if one_process && in_reach && p2p {
        return Ok(vec![(Path::P2p, "all ranks are in one process")]);
    }
    let mut paths = Vec::new();
    let obstacle = match (p2p, in_reach) {
        (false, _) => "P2P is disabled by NCCL_P2P_DISABLE or NCCL_P2P_LEVEL",
        (true, false) => "the GPUs cannot address each other's memory",
        (true, true) => {
            let ways = [Sharing::Handles, Sharing::Ipc].into_iter();
            let common = ways.filter(|way| reach.iter().all(|r| r.sharing.contains(way)));
            paths.extend(common.map(|way| (Path::P2pShared(way), "no GPU is known to be out of reach")));
            "ranks are in several processes, whose devices share host memory only"
        }
    };
    match reach.iter().position(|r| !r.shm) {
        None => paths.push((Path::Shm, obstacle)),
        Some(place) if paths.is_empty() => {
            let rank = ranks[place];
            return Err(Error::usage(format!(
                "no path between the ranks: {obstacle}, and shared memory is disabled by NCCL_SHM_DISABLE on rank {rank}; \
                 the network path on one host is not built yet, so unset one of the two"
            )));
        }
        Some(_) => {}
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(process: u128, p2p: bool, shm: bool) -> Reach {
        Reach {
            process,
            device: [0; 16],
            out_of_reach: vec![],
            sharing: vec![],
            p2p,
            shm,
        }
    }

    fn paths(reach: &[Reach]) -> Result<Vec<Path>> {
        let ranks: Vec<u32> = (0..reach.len() as u32).collect();
        choose(&ranks, reach).map(|paths| paths.into_iter().map(|(path, _)| path).collect())
    }

    #[test]
    fn the_path_is_p2p_in_one_process_and_shm_where_devices_share_nothing() {
        assert_eq!(paths(&[rank(1, true, true), rank(1, true, false)]), Ok(vec![Path::P2p]));
        assert_eq!(paths(&[rank(1, true, true), rank(1, false, true)]), Ok(vec![Path::Shm]));
        assert_eq!(paths(&[rank(1, true, true), rank(2, true, true)]), Ok(vec![Path::Shm]));
        let far = Reach {
            device: [1; 16],
            ..rank(1, true, true)
        };
        assert_eq!(paths(&[rank(1, true, true), far.clone()]), Ok(vec![Path::P2p]));
        let blind = Reach {
            out_of_reach: vec![[1; 16]],
            ..rank(1, true, true)
        };
        assert_eq!(paths(&[blind, far]), Ok(vec![Path::Shm]));
        let none = paths(&[rank(1, true, true), rank(2, true, false)]).unwrap_err();
        assert!(
            none.text.contains("rank 1") && none.text.contains("NCCL_SHM_DISABLE"),
            "{none}"
        );
    }

    #[test]
    fn processes_share_device_memory_in_the_best_way_that_all_have() {
        let shares = |process, device: u8, ways: &[Sharing]| Reach {
            device: [device; 16],
            sharing: ways.to_vec(),
            ..rank(process, true, true)
        };
        let both = [Sharing::Handles, Sharing::Ipc];
        let (handles, ipc) = (Path::P2pShared(Sharing::Handles), Path::P2pShared(Sharing::Ipc));
        let modern = [shares(1, 0, &both), shares(1, 0, &both), shares(2, 1, &both)];
        assert_eq!(paths(&modern), Ok(vec![handles, ipc, Path::Shm]));
        let mixed = [shares(1, 0, &both), shares(2, 0, &[Sharing::Ipc])];
        assert_eq!(paths(&mixed), Ok(vec![ipc, Path::Shm]));
        let changed = |change: fn(&mut Reach)| {
            let mut reach = modern.clone();
            change(&mut reach[2]);
            paths(&reach)
        };
        assert_eq!(changed(|r| r.p2p = false), Ok(vec![Path::Shm]));
        assert_eq!(changed(|r| r.out_of_reach = vec![[0; 16]]), Ok(vec![Path::Shm]));
        assert_eq!(changed(|r| r.sharing.clear()), Ok(vec![Path::Shm]));
        assert_eq!(changed(|r| r.shm = false), Ok(vec![handles, ipc]));
    }
}
