//! Which algorithm, how many channels.

use super::{Algorithm, Call, Choice, Profile};
use crate::error::{Error, Result};

/// Elements of one line times its bytes: what one thread of the one-shot kernel moves at a time.
pub const LINE_PAYLOAD_BYTES: u64 = 8;

/// The plan of an all-reduce. An error means that the environment allows no algorithm that fits.
pub fn choose(profile: &Profile, call: &Call) -> Result<Choice> {
    let bytes = call.bytes();
    let fits_one_shot = profile.ranks > 1 && bytes.div_ceil(LINE_PAYLOAD_BYTES) <= u64::from(profile.lines);
    let allows = |algorithm| profile.allowed.contains(&algorithm);
    if allows(Algorithm::OneShot) && fits_one_shot {
        if bytes <= profile.one_shot_bytes {
            return Ok(one_shot(profile, bytes, "small message: one hop"));
        }
        if !allows(Algorithm::Ring) && !allows(Algorithm::TwoShot) {
            return Ok(one_shot(profile, bytes, "forced by the environment"));
        }
    }
    if allows(Algorithm::TwoShot) && profile.ranks > 1 {
        return Ok(Choice {
            algorithm: Algorithm::TwoShot,
            blocks: bytes
                .div_ceil(profile.two_shot_block_bytes)
                .clamp(1, u64::from(profile.two_shot_blocks)) as u32,
            threads: profile.threads,
            reason: match profile.allowed[..] {
                [Algorithm::TwoShot] => "forced by the environment",
                _ => "large message: two hops",
            },
        });
    }
    if !allows(Algorithm::Ring) && profile.ranks > 1 {
        return Err(Error::usage(format!(
            "NCCL_ALGO or NCCL_PROTO allows only OneShot (LL), which takes at most {} bytes; this all-reduce has {bytes}: \
             allow TwoShot or Ring (Simple) too",
            u64::from(profile.lines) * LINE_PAYLOAD_BYTES
        )));
    }
    let reason = match (profile.ranks, allows(Algorithm::OneShot)) {
        (1, _) => "one rank: a copy",
        (_, false) => "forced by the environment",
        _ => "large message: bandwidth",
    };
    Ok(Choice {
        algorithm: Algorithm::Ring,
        blocks: channels(profile, bytes),
        threads: profile.threads,
        reason,
    })
}

/// The plan of a collective that moves data without reducing it: a ring. `bytes` is what one rank sends.
pub fn choose_move(profile: &Profile, bytes: u64) -> Choice {
    Choice {
        algorithm: Algorithm::Ring,
        blocks: channels(profile, bytes),
        threads: profile.threads,
        reason: if profile.ranks == 1 {
            "one rank: a copy"
        } else {
            "the only algorithm for it"
        },
    }
}

fn channels(profile: &Profile, bytes: u64) -> u32 {
    bytes
        .div_ceil(profile.channel_bytes)
        .clamp(1, u64::from(profile.channels)) as u32
}

fn one_shot(profile: &Profile, bytes: u64, reason: &'static str) -> Choice {
    let lines = bytes.div_ceil(LINE_PAYLOAD_BYTES);
    // A warp is the least that runs; a block gets one line a thread until there are no more blocks.
    let threads = (lines.next_multiple_of(32)).clamp(32, u64::from(profile.threads)) as u32;
    let blocks = lines
        .div_ceil(u64::from(threads))
        .clamp(1, u64::from(profile.one_shot_blocks)) as u32;
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
    use crate::request::{DataType, ReduceOp};

    fn profile() -> Profile {
        Profile {
            ranks: 4,
            allowed: Algorithm::ALL.to_vec(),
            channels: 8,
            channel_bytes: 65536,
            slot_bytes: 131072,
            slots: 4,
            lines: 8192,
            one_shot_bytes: 32768,
            one_shot_blocks: 8,
            two_shot_blocks: 16,
            two_shot_block_bytes: 16384,
            two_shot_slot_bytes: 16384,
            threads: 512,
        }
    }

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
        assert_eq!(chosen(1 << 24), (Algorithm::TwoShot, 16, 512));
    }

    #[test]
    fn a_forced_algorithm_is_taken_or_refused_by_name() {
        let ring = Profile {
            allowed: vec![Algorithm::Ring],
            ..profile()
        };
        assert_eq!(choose(&ring, &call(1)).unwrap().algorithm, Algorithm::Ring);
        let one_shot = Profile {
            allowed: vec![Algorithm::OneShot],
            ..profile()
        };
        assert_eq!(choose(&one_shot, &call(16384)).unwrap().algorithm, Algorithm::OneShot);
        let refused = choose(&one_shot, &call(16385)).unwrap_err();
        assert!(
            refused.text.contains("65540") && refused.text.contains("65536"),
            "{refused}"
        );
    }

    #[test]
    fn one_rank_copies_whatever_is_allowed() {
        let alone = Profile {
            ranks: 1,
            allowed: vec![Algorithm::OneShot],
            ..profile()
        };
        assert_eq!(choose(&alone, &call(1)).unwrap().algorithm, Algorithm::Ring);
    }
}
