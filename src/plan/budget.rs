//! How many blocks a communicator may have on a GPU, from what others have there.
//!
//! Kernels that wait for each other must all run at once, or they wait for ever: so the blocks of communicators with
//! several ranks on a GPU stay together at or below what fits on it. None takes all that is left, since nobody knows how
//! many will come. Where each rank has a GPU for itself nothing is counted.

/// Streaming multiprocessors that the communicators of a GPU together leave to the program's own kernels, where it has
/// twice as many; else half of them.
const SPARE_MULTIPROCESSORS: u32 = 16;

/// Blocks of 512 threads that surely run on one multiprocessor at once, whichever kernels they are of.
const BLOCKS_A_MULTIPROCESSOR: u32 = 1;

/// What a communicator leaves to others, where there is so much; else it leaves half.
const LEFT_TO_OTHERS: u32 = 16;

/// The most for a rank that has its GPU to itself, so that most of the GPU is left to what is computed meanwhile.
const MOST_ALONE: u32 = 32;

/// The blocks of a GPU that communicators may have together.
pub fn capacity(multiprocessors: u32) -> u32 {
    let spare = SPARE_MULTIPROCESSORS.min(multiprocessors / 2);
    (multiprocessors - spare) * BLOCKS_A_MULTIPROCESSOR
}

/// The blocks of a rank whose communicator has no other on its GPU.
pub fn alone(multiprocessors: u32) -> u32 {
    capacity(multiprocessors).clamp(1, MOST_ALONE)
}

/// The blocks of each of a new communicator's `sharing` ranks on a GPU where `free` are not held by others; 0 where
/// not each of them can have one. The first gets most of what there is, and what it leaves is shared out by halves.
pub fn grant(free: u32, sharing: u32) -> u32 {
    if free < sharing {
        return 0;
    }
    let left = (free / 8).max((free / 2).min(LEFT_TO_OTHERS));
    ((free - left) / sharing).max(1)
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
                    free -= blocks * sharing;
                    communicators += 1;
                }
                assert!(free < sharing, "{free} were free for {sharing} and refused");
                assert!(
                    capacity < 8 * sharing || communicators >= 2,
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
        assert_eq!(series(2), [50, 4, 2, 1, 1]);
        assert_eq!(series(4), [25, 2, 1, 1]);
        assert_eq!(series(8), [12, 1, 1]);
        assert_eq!((alone(132), alone(40), alone(1)), (32, 24, 1));
    }
}
