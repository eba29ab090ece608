//! Which parts of an HCA's segment are free. First fit; set-up alone asks.

use std::collections::BTreeMap;

/// Free ranges by their offset; neighbours are always joined.
pub(super) struct Space {
    free: BTreeMap<usize, usize>,
}

impl Space {
    pub(super) fn new(offset: usize, bytes: usize) -> Space {
        Space {
            free: BTreeMap::from([(offset, bytes)]),
        }
    }

    /// The offset of `bytes`, a multiple of `align`; None where no range is long enough.
    pub(super) fn take(&mut self, bytes: usize, align: usize) -> Option<usize> {
        let fits = |(at, length): (&usize, &usize)| {
            let begin = at.checked_next_multiple_of(align)?;
            (begin.checked_add(bytes)? <= at + length).then_some((*at, *length, begin))
        };
        let (at, length, begin) = self.free.iter().find_map(fits)?;
        self.free.remove(&at);
        for (offset, rest) in [(at, begin - at), (begin + bytes, at + length - begin - bytes)] {
            if rest > 0 {
                self.free.insert(offset, rest);
            }
        }
        Some(begin)
    }

    pub(super) fn give_back(&mut self, mut offset: usize, mut bytes: usize) {
        if let Some((before, length)) = self.free.range(..offset).next_back().map(|(at, length)| (*at, *length)) {
            if before + length == offset {
                self.free.remove(&before);
                (offset, bytes) = (before, length + bytes);
            }
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(asked in prop::collection::vec((1usize..200, 0u32..8, any::<bool>()), 1..60)) {
            let mut space = Space::new(64, 4096);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (bytes, align, keep) in asked {
                if !keep && !taken.is_empty() {
                    let (at, length) = taken.swap_remove(bytes % taken.len());
                    space.give_back(at, length);
                } else if let Some(at) = space.take(bytes, 1 << align) {
                    prop_assert!(at % (1 << align) == 0 && at >= 64 && at + bytes <= 64 + 4096);
                    prop_assert!(taken.iter().all(|(other, length)| at + bytes <= *other || other + length <= at));
                    taken.push((at, bytes));
                }
            }
            for (at, length) in taken {
                space.give_back(at, length);
            }
            prop_assert_eq!(space.free, BTreeMap::from([(64, 4096)]));
        }
    }
}
