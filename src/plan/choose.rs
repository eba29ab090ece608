//! Which algorithm, how many channels.

use super::{Algorithm, Call, Choice, Profile};
use crate::error::{Error, Result};
use crate::request::Collective;

/// Elements of one line times its bytes: what one thread of the one-shot kernel moves at a time.
pub const LINE_PAYLOAD_BYTES: u64 = 8;

/// The plan of an all-reduce. An error means that the environment allows no algorithm that fits.
pub fn choose(profile: &Profile, call: &Call) -> Result<Choice> {
    let (bytes, allowed) = (call.bytes(), &profile.allowed.all_reduce[..]);
    if profile.hosts > 1 {
        return between_hosts(profile, "all-reduce", allowed, bytes);
    }
    let fits_one_shot = profile.ranks > 1 && bytes.div_ceil(LINE_PAYLOAD_BYTES) <= u64::from(profile.lines);
    let allows = |algorithm| allowed.contains(&algorithm);
    if allows(Algorithm::OneShot) && fits_one_shot {
        if bytes <= profile.one_shot_bytes {
            return Ok(one_shot(profile, bytes, 1, "small message: one hop"));
        }
        if !allows(Algorithm::Ring) && !allows(Algorithm::TwoShot) {
            return Ok(one_shot(profile, bytes, 1, "forced by the environment"));
        }
    }
    if allows(Algorithm::TwoShot) && profile.ranks > 1 {
        let reason = match allowed {
            [Algorithm::TwoShot] => "forced by the environment",
            _ => "large message: two hops",
        };
        return Ok(two_shot(profile, bytes, reason));
    }
    if !allows(Algorithm::Ring) && profile.ranks > 1 {
        return Err(Error::usage(format!(
            "NCCL_ALGO or NCCL_PROTO allows only OneShot (LL), which takes at most {} bytes; this all-reduce has {bytes}: \
             allow TwoShot or Ring (Simple) too",
            u64::from(profile.lines) * LINE_PAYLOAD_BYTES
        )));
    }
    Ok(ring(profile, bytes, large(profile, allows(Algorithm::OneShot))))
}

/// The plan of a collective that moves data without reducing it. `bytes` is what one rank has. A rank alone copies as
/// the two-shot kernel does.
pub fn choose_move(profile: &Profile, collective: Collective, bytes: u64) -> Result<Choice> {
    let (allowed, all_bytes) = match collective {
        Collective::AllGather => (&profile.allowed.all_gather[..], bytes * u64::from(profile.ranks)),
        _ => (&profile.allowed.broadcast[..], bytes),
    };
    if profile.hosts > 1 {
        return between_hosts(profile, collective.name(), allowed, bytes);
    }
    let allows = |algorithm| allowed.contains(&algorithm);
    let fits_one_shot = profile.ranks > 1 && bytes.div_ceil(LINE_PAYLOAD_BYTES) <= u64::from(profile.lines);
    if allows(Algorithm::OneShot) && fits_one_shot {
        let sources = match collective {
            Collective::AllGather => profile.ranks - 1,
            _ => 1,
        };
        if bytes <= profile.one_shot_move_bytes {
            return Ok(one_shot(profile, bytes, sources, "small message: one hop"));
        }
        if !allows(Algorithm::Ring) && !allows(Algorithm::TwoShot) {
            return Ok(one_shot(profile, bytes, sources, "forced by the environment"));
        }
    }
    let reason = large(profile, allows(Algorithm::OneShot));
    if allows(Algorithm::TwoShot) || profile.ranks == 1 {
        return Ok(two_shot(profile, all_bytes, reason));
    }
    if allows(Algorithm::Ring) {
        return Ok(ring(profile, bytes, reason));
    }
    Err(Error::usage(format!(
        "NCCL_ALGO or NCCL_PROTO allows only OneShot (LL), which takes at most {} bytes of a rank; this {} has {bytes}: \
         allow TwoShot or Ring (Simple) too",
        u64::from(profile.lines) * LINE_PAYLOAD_BYTES,
        collective.name()
    )))
}

fn large(profile: &Profile, allows_one_shot: bool) -> &'static str {
    match (profile.ranks, allows_one_shot) {
        (1, _) => "one rank: a copy",
        (_, false) => "forced by the environment",
        _ => "large message: bandwidth",
    }
}

/// The other algorithms need memory that all ranks reach.
fn between_hosts(profile: &Profile, what: &str, allowed: &[Algorithm], bytes: u64) -> Result<Choice> {
    if allowed.contains(&Algorithm::Ring) {
        return Ok(ring(
            profile,
            bytes,
            "several hosts: a ring crosses the network once a host",
        ));
    }
    let named: Vec<&str> = allowed.iter().map(|algorithm| algorithm.name()).collect();
    Err(Error::usage(format!(
        "NCCL_ALGO and NCCL_PROTO leave {what} {}, which works within one host, and the ranks are on {} hosts: allow Ring with \
         Simple, or unset them",
        named.join(" and "),
        profile.hosts
    )))
}

fn ring(profile: &Profile, bytes: u64, reason: &'static str) -> Choice {
    let channels = bytes
        .div_ceil(profile.channel_bytes)
        .clamp(1, u64::from(profile.blocks)) as u32;
    Choice {
        algorithm: Algorithm::Ring,
        blocks: channels,
        threads: profile.threads,
        reason,
    }
}

fn two_shot(profile: &Profile, bytes: u64, reason: &'static str) -> Choice {
    let blocks = bytes
        .div_ceil(profile.two_shot_block_bytes)
        .clamp(1, u64::from(profile.blocks)) as u32;
    Choice {
        algorithm: Algorithm::TwoShot,
        blocks,
        threads: profile.threads,
        reason,
    }
}

/// `sources`: ranks whose lines a thread may take to itself; the all-reduce's takes those of all.
fn one_shot(profile: &Profile, bytes: u64, sources: u32, reason: &'static str) -> Choice {
    let lines = bytes.div_ceil(LINE_PAYLOAD_BYTES);
    // A warp is the least that runs; a block gets one line a thread until there are no more blocks, and no block is
    // without one.
    let threads = (lines * u64::from(sources))
        .next_multiple_of(32)
        .clamp(32, u64::from(profile.threads)) as u32;
    let blocks = lines.div_ceil(u64::from(threads)).clamp(1, u64::from(profile.blocks)) as u32;
    Choice {
        algorithm: Algorithm::OneShot,
        blocks,
        threads,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Allowed;
    use crate::request::{DataType, ReduceOp};

    fn profile() -> Profile {
        Profile {
            ranks: 4,
            hosts: 1,
            allowed: Allowed {
                all_reduce: Algorithm::ALL.to_vec(),
                all_gather: Algorithm::ALL.to_vec(),
                broadcast: Algorithm::ALL.to_vec(),
            },
            blocks: 8,
            channel_bytes: 65536,
            slot_bytes: 131072,
            slots: 4,
            lines: 8192,
            one_shot_bytes: 32768,
            one_shot_move_bytes: 16384,
            two_shot_block_bytes: 16384,
            two_shot_slot_bytes: 16384,
            threads: 512,
        }
    }

    fn only(algorithm: Algorithm) -> Profile {
        Profile {
            allowed: Allowed {
                all_reduce: vec![algorithm],
                all_gather: vec![algorithm],
                broadcast: vec![algorithm],
            },
            ..profile()
        }
    }

    const MOVES: [Collective; 2] = [Collective::AllGather, Collective::Broadcast { root: 1 }];

    fn call(count: usize) -> Call {
        Call {
            count,
            datatype: DataType::Float32,
            op: ReduceOp::Sum,
        }
    }

    #[test]
    fn small_is_one_shot_and_large_is_two_shot() {
        let chosen = |count| {
            choose(&profile(), &call(count))
                .map(|c| (c.algorithm, c.blocks, c.threads))
                .unwrap()
        };
        assert_eq!(chosen(1), (Algorithm::OneShot, 1, 32));
        assert_eq!(chosen(1024), (Algorithm::OneShot, 1, 512));
        assert_eq!(chosen(8192), (Algorithm::OneShot, 8, 512));
        assert_eq!(chosen(8193), (Algorithm::TwoShot, 3, 512));
        assert_eq!(chosen(1 << 24), (Algorithm::TwoShot, 8, 512));
    }

    #[test]
    fn a_forced_algorithm_is_taken_or_refused_by_name() {
        let ring = only(Algorithm::Ring);
        assert_eq!(choose(&ring, &call(1)).unwrap().algorithm, Algorithm::Ring);
        let one_shot = only(Algorithm::OneShot);
        assert_eq!(choose(&one_shot, &call(16384)).unwrap().algorithm, Algorithm::OneShot);
        let refused = choose(&one_shot, &call(16385)).unwrap_err();
        assert!(
            refused.text.contains("65540") && refused.text.contains("65536"),
            "{refused}"
        );
    }

    #[test]
    fn moves_are_chosen_by_size_too() {
        let chosen = |collective, bytes| {
            choose_move(&profile(), collective, bytes)
                .map(|c| (c.algorithm, c.blocks, c.threads))
                .unwrap()
        };
        let [gather, broadcast] = MOVES;
        assert_eq!(chosen(broadcast, 1), (Algorithm::OneShot, 1, 32));
        assert_eq!(chosen(broadcast, 8 * 96), (Algorithm::OneShot, 1, 96));
        assert_eq!(chosen(broadcast, 16384), (Algorithm::OneShot, 4, 512));
        assert_eq!(chosen(broadcast, 16385), (Algorithm::TwoShot, 2, 512));
        // Lines of three ranks arrive.
        assert_eq!(chosen(gather, 8 * 32), (Algorithm::OneShot, 1, 96));
        assert_eq!(chosen(gather, 16384), (Algorithm::OneShot, 4, 512));
        assert_eq!(chosen(gather, 16385), (Algorithm::TwoShot, 5, 512));
        assert_eq!(chosen(gather, 1 << 24), (Algorithm::TwoShot, 8, 512));
    }

    /// A block that has no line of its own would not be waited for.
    #[test]
    fn no_block_of_one_shot_is_without_a_line() {
        for collective in MOVES {
            for bytes in 1..=16384 {
                let choice = choose_move(&profile(), collective, bytes).unwrap();
                let lines = bytes.div_ceil(LINE_PAYLOAD_BYTES);
                assert!(
                    u64::from((choice.blocks - 1) * choice.threads) < lines,
                    "{bytes} bytes: {choice:?}"
                );
            }
        }
    }

    #[test]
    fn a_forced_move_is_taken_or_refused_by_name() {
        for collective in MOVES {
            let chosen = |profile: &Profile, bytes| choose_move(profile, collective, bytes).map(|c| c.algorithm);
            assert_eq!(chosen(&only(Algorithm::TwoShot), 1).unwrap(), Algorithm::TwoShot);
            assert_eq!(chosen(&only(Algorithm::Ring), 1).unwrap(), Algorithm::Ring);
            assert_eq!(chosen(&only(Algorithm::OneShot), 65536).unwrap(), Algorithm::OneShot);
            let refused = chosen(&only(Algorithm::OneShot), 65537).unwrap_err();
            assert!(refused.text.contains(collective.name()), "{refused}");
            assert!(
                refused.text.contains("65537") && refused.text.contains("65536"),
                "{refused}"
            );
        }
    }

    #[test]
    fn between_hosts_there_are_rings_only() {
        let over_hosts = |profile: Profile| Profile { hosts: 2, ..profile };
        let all = over_hosts(profile());
        for count in [1, 1 << 20] {
            let choice = choose(&all, &call(count)).unwrap();
            assert_eq!(choice.algorithm, Algorithm::Ring);
            assert!(choice.reason.contains("several hosts"), "{choice:?}");
        }
        for collective in MOVES {
            assert_eq!(choose_move(&all, collective, 1).unwrap().algorithm, Algorithm::Ring);
        }
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            let forced = over_hosts(only(algorithm));
            let refusals = [
                choose(&forced, &call(1)).unwrap_err(),
                choose_move(&forced, MOVES[0], 1).unwrap_err(),
            ];
            for refused in refusals {
                assert!(refused.text.contains(algorithm.name()), "{refused}");
                assert!(
                    refused.text.contains("2 hosts") && refused.text.contains("allow Ring"),
                    "{refused}"
                );
            }
        }
    }

    #[test]
    fn one_rank_copies_whatever_is_allowed() {
        let alone = Profile {
            ranks: 1,
            ..only(Algorithm::OneShot)
        };
        assert_eq!(choose(&alone, &call(1)).unwrap().algorithm, Algorithm::Ring);
        for collective in MOVES {
            let choice = choose_move(&alone, collective, 1 << 20).unwrap();
            assert_eq!(choice.algorithm, Algorithm::TwoShot);
        }
    }
}
