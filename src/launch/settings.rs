//! What the environment says about planning and paths, read once a communicator, on every rank; rank 0's is used.

use super::network::Initiated;
use crate::device::{Device, DeviceKind};
use crate::environment::{choice, integer, number, switch, text};
use crate::error::{Error, Result};
use crate::launch::layout::{MAX_CHANNELS, MAX_RANKS};
use crate::plan::{Algorithm, Allowed, Profile, LINE_PAYLOAD_BYTES};
use serde::{Deserialize, Serialize};

/// Lines of one region of the one-shot area at least, for when nothing else is allowed: 256 KiB of payload.
const LEAST_LINES: u32 = 32768;

/// Connections of a link between hosts, which one CPU thread drives.
const NET_CHANNELS: u32 = 4;
/// Large enough that headers and system calls do not count, small enough that a message of a few hundred KiB is on the
/// wire while its first slots are reduced.
const NET_SLOT_BYTES: u64 = 131_072;
const NET_SLOTS: u32 = 8;

/// Names of `NCCL_ALGO` that NCCL knows and this version has no kernels for.
const UNBUILT_ALGORITHMS: [&str; 6] = ["Tree", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"];

/// The clock bound of a device wait, and whether a wait that passes it fails the communicator.
pub(super) fn wait_bound() -> Result<(u64, bool)> {
    let bound_ms = number("OSSICLE_WAIT_REPORT_MS", 10_000)?;
    let fail = choice("OSSICLE_WAIT_FAIL", &[("0", false), ("1", true)])?.unwrap_or(false);
    Ok((bound_ms.saturating_mul(1_000_000), fail))
}

/// A rank's planning inputs; travels in its introduction, and rank 0's become the profile of all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Settings {
    allowed: Allowed,
    cuda: bool,
    /// Whether ranks start although their GPU has no block left for them (`OSSICLE_GPU_OVERCOMMIT`).
    pub(super) overcommit: bool,
    least_channels: Option<u32>,
    most_channels: Option<u32>,
    pub(super) initiated: Initiated,
}

impl Settings {
    /// From the environment and the communicator's configuration (minCTAs, maxCTAs).
    pub(super) fn read(device: &dyn Device, ctas: (Option<u32>, Option<u32>)) -> Result<Settings> {
        let positive = |name| {
            integer(name)
                .and_then(|value| u32::try_from(value).ok())
                .filter(|value| *value > 0)
        };
        Ok(Settings {
            allowed: allowed(text("NCCL_ALGO").as_deref(), text("NCCL_PROTO").as_deref())?,
            cuda: device.kind() == DeviceKind::Cuda,
            overcommit: choice("OSSICLE_GPU_OVERCOMMIT", &[("0", false), ("1", true)])?.unwrap_or(false),
            least_channels: positive("NCCL_MIN_NCHANNELS").or(ctas.0),
            most_channels: positive("NCCL_MAX_NCHANNELS").or(ctas.1),
            initiated: Initiated::read()?,
        })
    }

    /// The profile of a communicator of `ranks` on `hosts`, whose kernels have at most `blocks` on a GPU.
    pub(super) fn profile(&self, ranks: u32, hosts: u32, blocks: u32) -> Profile {
        let budget = match (self.cuda, hosts) {
            (false, _) => 1,
            (true, 1) => blocks,
            (true, _) => blocks.min(NET_CHANNELS),
        };
        let limit = if self.cuda {
            blocks.clamp(1, MAX_CHANNELS as u32)
        } else {
            MAX_CHANNELS as u32
        };
        let least = self.least_channels.unwrap_or(1).min(limit);
        let most = self.most_channels.unwrap_or(budget.max(least)).clamp(1, limit);
        if hosts > 1 {
            return self.profile_between_hosts(ranks, hosts, most, least);
        }
        let one_shot_bytes = one_shot_bytes(self.cuda, ranks);
        Profile {
            ranks,
            hosts,
            allowed: self.allowed.clone(),
            blocks: most,
            // Channels that were asked for are used from the first byte on.
            channel_bytes: if least > 1 { 1 } else { 65536 },
            slot_bytes: if self.cuda { 32768 } else { 131072 },
            slots: 4,
            lines: one_shot_lines(one_shot_bytes, ranks),
            one_shot_bytes,
            one_shot_move_bytes: one_shot_move_bytes(self.cuda, ranks),
            two_shot_block_bytes: if least > 1 { 1 } else { 16384 },
            two_shot_slot_bytes: two_shot_slot_bytes(ranks, most),
            threads: 512,
        }
    }

    /// Rings only, so that nothing is spent on what the other algorithms need. All links have the network's slots.
    fn profile_between_hosts(&self, ranks: u32, hosts: u32, most: u32, least: u32) -> Profile {
        Profile {
            ranks,
            hosts,
            allowed: self.allowed.clone(),
            blocks: most,
            channel_bytes: if least > 1 { 1 } else { NET_SLOT_BYTES },
            slot_bytes: NET_SLOT_BYTES,
            slots: NET_SLOTS,
            lines: 0,
            one_shot_bytes: 0,
            one_shot_move_bytes: 0,
            two_shot_block_bytes: 1,
            two_shot_slot_bytes: 0,
            threads: 512,
        }
    }
}

/// Where one-shot stops winning: every rank moves (ranks - 1) times the data. Measured: docs/benchmarks.md.
fn one_shot_bytes(cuda: bool, ranks: u32) -> u64 {
    debug_assert!(ranks as usize <= MAX_RANKS);
    match (cuda, ranks) {
        (true, 0..=2) => 1 << 20,
        (true, 3..=4) => 1 << 18,
        (true, 5..=8) => 1 << 17,
        (true, _) => 1 << 15,
        (false, 0..=2) => 64,
        (false, 3..=4) => 256,
        (false, _) => 2048,
    }
}

/// The same for all-gather and broadcast, beside a two-shot that has fewer hops or reduces nothing. Through a CPU's caches
/// the flags of lines cost more than counters do from three ranks on.
fn one_shot_move_bytes(cuda: bool, ranks: u32) -> u64 {
    match (cuda, ranks) {
        (true, _) => one_shot_bytes(cuda, ranks) / 2,
        (false, 0..=2) => 64,
        (false, _) => 0,
    }
}

fn one_shot_lines(bytes: u64, ranks: u32) -> u32 {
    match ranks {
        1 => 0,
        _ => LEAST_LINES.max((bytes / LINE_PAYLOAD_BYTES) as u32),
    }
}

/// Slots of all ranks of one GPU should fit into its L2 cache, and few blocks need long rounds; with more ranks each has
/// slots for more sources.
fn two_shot_slot_bytes(ranks: u32, blocks: u32) -> u64 {
    match ranks {
        0..=2 if blocks <= 32 => 131_072,
        0..=8 => 65_536,
        _ => 32_768,
    }
}

/// The algorithms that `NCCL_ALGO` and `NCCL_PROTO` leave. A list that leaves a move nothing does not bind it.
fn allowed(algo: Option<&str>, proto: Option<&str>) -> Result<Allowed> {
    let left = |function: &str| -> Result<Vec<Algorithm>> {
        let names = Algorithm::ALL.map(Algorithm::name);
        let algorithms = list("NCCL_ALGO", algo, function, &names, &UNBUILT_ALGORITHMS)?;
        let protocols = list("NCCL_PROTO", proto, function, &["LL", "Simple"], &["LL128"])?;
        let allowed =
            |algorithm: &Algorithm| algorithms.contains(&algorithm.name()) && protocols.contains(&algorithm.protocol());
        Ok(Algorithm::ALL.into_iter().filter(allowed).collect())
    };
    let all_reduce = left("allreduce")?;
    if all_reduce.is_empty() {
        return Err(Error::usage(format!(
            "NCCL_ALGO \"{}\" with NCCL_PROTO \"{}\" leaves no all-reduce of this version: it has OneShot with LL, \
             TwoShot and Ring with Simple",
            algo.unwrap_or_default(),
            proto.unwrap_or_default()
        )));
    }
    let or_all = |left: Vec<Algorithm>| match left.is_empty() {
        true => Algorithm::ALL.to_vec(),
        false => left,
    };
    Ok(Allowed {
        all_reduce,
        all_gather: or_all(left("allgather")?),
        broadcast: or_all(left("broadcast")?),
    })
}

/// The built names that a variable in NCCL's notation allows a function: `name,name`, `^name`, or `function:names;...`, where the
/// first clause without a colon is the base list.
fn list(
    variable: &str,
    value: Option<&str>,
    function: &str,
    built: &[&'static str],
    unbuilt: &[&str],
) -> Result<Vec<&'static str>> {
    let Some(value) = value.filter(|value| !value.trim().is_empty()) else {
        return Ok(built.to_vec());
    };
    let mut chosen: Option<Vec<&'static str>> = None;
    for clause in value.split(';').map(str::trim).filter(|clause| !clause.is_empty()) {
        let (named_function, names) = match clause.split_once(':') {
            Some((named, names)) => (Some(named.trim()), names),
            None => (None, clause),
        };
        let (invert, names) = names.strip_prefix('^').map_or((false, names), |rest| (true, rest));
        let mut named = Vec::new();
        for name in names.split(',').map(str::trim) {
            match built.iter().find(|known| known.eq_ignore_ascii_case(name)) {
                Some(known) => named.push(*known),
                None if unbuilt.iter().any(|known| known.eq_ignore_ascii_case(name)) => {}
                None => {
                    return Err(Error::usage(format!(
                    "{variable} is \"{value}\", which names \"{name}\"; it takes {} ({} are NCCL's and not built yet)",
                    built.join(", "),
                    unbuilt.join(", ")
                )))
                }
            }
        }
        let allowed = built
            .iter()
            .copied()
            .filter(|name| named.contains(name) != invert)
            .collect();
        match named_function {
            Some(named) if !named.eq_ignore_ascii_case(function) => {}
            Some(_) => chosen = Some(allowed),
            None => chosen = chosen.or(Some(allowed)),
        }
    }
    Ok(chosen.unwrap_or_else(|| built.to_vec()))
}

/// Whether this rank lets pointers of its process be used directly, and host shared memory.
pub(super) fn paths() -> (bool, bool) {
    let p2p = !switch("NCCL_P2P_DISABLE", false)
        && !text("NCCL_P2P_LEVEL").is_some_and(|level| level.eq_ignore_ascii_case("LOC"));
    (p2p, !switch("NCCL_SHM_DISABLE", false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_hosts_a_profile_has_few_channels_and_nothing_of_other_algorithms() {
        let settings = |cuda, least, most| Settings {
            allowed: allowed(None, None).unwrap(),
            cuda,
            overcommit: false,
            least_channels: least,
            most_channels: most,
            initiated: Initiated::Auto,
        };
        for (cuda, least, most, channels) in [
            (true, None, None, NET_CHANNELS),
            (true, None, Some(2), 2),
            (true, Some(8), None, 8),
            (false, None, None, 1),
            (false, Some(3), None, 3),
        ] {
            let profile = settings(cuda, least, most).profile(4, 2, 32);
            assert_eq!(
                (profile.hosts, profile.blocks),
                (2, channels),
                "{cuda} {least:?} {most:?}"
            );
            assert_eq!((profile.lines, profile.two_shot_slot_bytes), (0, 0));
        }
        assert_eq!(
            settings(true, None, None).profile(4, 2, 1).blocks,
            1,
            "of a GPU that is nearly full"
        );
        assert!(settings(true, None, None).profile(4, 1, 32).lines > 0);
    }

    #[test]
    fn algorithm_lists_follow_nccls_notation() {
        use Algorithm::{OneShot, Ring, TwoShot};
        for (algo, proto, expected) in [
            (None, None, vec![OneShot, TwoShot, Ring]),
            (Some(""), Some(""), vec![OneShot, TwoShot, Ring]),
            (Some("ring"), None, vec![Ring]),
            (Some("Tree,Ring"), None, vec![Ring]),
            (Some("^ring"), None, vec![OneShot, TwoShot]),
            (Some("allreduce:oneshot;broadcast:ring"), None, vec![OneShot]),
            (Some("tree;allreduce:ring"), None, vec![Ring]),
            (Some("broadcast:tree"), None, vec![OneShot, TwoShot, Ring]),
            (None, Some("simple"), vec![TwoShot, Ring]),
            (None, Some("LL,LL128"), vec![OneShot]),
        ] {
            assert_eq!(allowed(algo, proto).unwrap().all_reduce, expected, "{algo:?} {proto:?}");
        }
        let all = Algorithm::ALL.to_vec();
        for (algo, proto, all_gather, broadcast) in [
            (None, None, all.clone(), all.clone()),
            (Some("ring"), None, vec![Ring], vec![Ring]),
            (Some("ring;allgather:oneshot"), None, vec![OneShot], vec![Ring]),
            (
                Some("allgather:^oneshot;broadcast:oneshot,tree"),
                None,
                vec![TwoShot, Ring],
                vec![OneShot],
            ),
            (
                Some("allreduce:ring"),
                Some("simple"),
                vec![TwoShot, Ring],
                vec![TwoShot, Ring],
            ),
            (None, Some("broadcast:LL"), all.clone(), vec![OneShot]),
            (Some("ring;broadcast:tree"), None, vec![Ring], all.clone()),
        ] {
            let allowed = allowed(algo, proto).unwrap();
            assert_eq!(allowed.all_gather, all_gather, "{algo:?} {proto:?}");
            assert_eq!(allowed.broadcast, broadcast, "{algo:?} {proto:?}");
        }
        for (algo, proto, word) in [
            (Some("rings"), None, "\"rings\""),
            (Some("tree"), None, "OneShot with LL"),
            (Some("ring"), Some("LL"), "TwoShot and Ring with Simple"),
            (None, Some("LL256"), "\"LL256\""),
        ] {
            let error = allowed(algo, proto).unwrap_err();
            assert!(error.text.contains(word), "{error}");
        }
    }
}
