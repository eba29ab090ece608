//! How many blocks a communicator may have on a GPU, from what others have there.
//!
//! Kernels that wait for each other must all run at once, or they wait for ever: so the blocks of all communicators on
//! a GPU stay at or below what fits on it. None takes all that is left, since nobody knows how many will come.

/// Streaming multiprocessors that the communicators of a GPU together leave to the program's own kernels, where it has
/// twice as many; else half of them.
const SPARE_MULTIPROCESSORS: u32 = 16;

/// Blocks of 512 threads that surely run on one multiprocessor at once, whichever kernels they are of.
const BLOCKS_A_MULTIPROCESSOR: u32 = 1;

/// Down to so many free blocks a communicator may have half of what is free; below, a quarter.
const FLOOR: u32 = 32;

/// The most for a rank that has its GPU to itself.
const MOST_ALONE: u32 = 64;

/// The blocks of a GPU that communicators may have together.
pub fn capacity(multiprocessors: u32) -> u32 {
    let spare = SPARE_MULTIPROCESSORS.min(multiprocessors / 2);
    (multiprocessors - spare) * BLOCKS_A_MULTIPROCESSOR
}

/// The blocks of each of a new communicator's `sharing` ranks on a GPU where `free` are not held by others; 0 where
/// not each of them can have one.
pub fn grant(free: u32, sharing: u32) -> u32 {
    if free < sharing {
        return 0;
    }
    let half = if free > FLOOR { free / 2 } else { free / 4 };
    let all = if sharing == 1 {
        half.max(free.saturating_sub(FLOOR)).min(MOST_ALONE)
    } else {
        half
    };
    (all / sharing).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_leaves_room_for_others_until_there_is_none() {
        for multiprocessors in [1, 14, 17, 40, 108, 132, 148] {
            for sharing in 1..=16 {
                let capacity = capacity(multiprocessors);
                let mut free = capacity;
                let mut communicators = 0;
                loop {
                    let blocks = grant(free, sharing);
                    assert!(blocks * sharing <= free, "{free} {sharing}: {blocks}");
                    if blocks == 0 {
                        break;
                    }
                    assert!(sharing > 1 || blocks <= MOST_ALONE);
                    let after = free - blocks * sharing;
                    assert!(sharing == 1 || free <= FLOOR || after >= free / 2, "{free} {sharing}");
                    free = after;
                    communicators += 1;
                }
                assert!(free < sharing, "{free} were free for {sharing} and refused");
                assert!(
                    capacity < 8 * sharing || communicators >= 3,
                    "{communicators} of {sharing} ranks"
                );
            }
        }
    }

    #[test]
    fn what_an_h200_gives() {
        let series = |sharing: u32| {
            let mut free = capacity(132);
            let grants = std::iter::from_fn(|| {
                let blocks = grant(free, sharing);
                free -= blocks * sharing;
                (blocks > 0).then_some(blocks)
            });
            grants.collect::<Vec<u32>>()
        };
        assert_eq!(series(1), [64, 26, 6, 5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(series(2), [29, 14, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(series(8), [7, 3, 2, 1, 1]);
    }
}
