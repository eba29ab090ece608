//! Blocks of one kind of memory that the library lends to itself and never gives back to the driver.
//!
//! `cuMemFree` and `cuMemFreeHost` wait for the device's running kernels, and a kernel of another rank may be spinning
//! until the very thread that frees goes on. So a block that comes back is kept for the next communicator. What a pool
//! holds is bounded by the most that was lent at once in each size class, and it lasts until the process exits.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};

/// The smallest block: what a control block or a small inbox needs, and a multiple of the host's page.
const SMALLEST_BYTES: usize = 64 << 10;
/// From here on blocks are multiples of the driver's 2 MiB page, not powers of two.
const PAGE_BYTES: usize = 2 << 20;

#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Addresses by the size of their block.
    free: BTreeMap<usize, Vec<usize>>,
    /// Size of each lent block by address.
    lent: HashMap<usize, usize>,
}

/// The size of the block that serves `bytes`; None past the address space.
pub(super) fn block_bytes(bytes: usize) -> Option<usize> {
    if bytes <= PAGE_BYTES {
        return Some(bytes.max(SMALLEST_BYTES).next_power_of_two());
    }
    bytes
        .checked_next_multiple_of(PAGE_BYTES)
        .filter(|bytes| *bytes <= isize::MAX as usize)
}

impl Pool {
    /// A free block of at least `block_bytes` and at most twice that.
    pub(super) fn take(&self, block_bytes: usize) -> Option<usize> {
        let mut state = self.state.lock();
        let (&bytes, addresses) = state
            .free
            .range_mut(block_bytes..=block_bytes * 2)
            .find(|(_, addresses)| !addresses.is_empty())?;
        let address = addresses.pop()?;
        state.lent.insert(address, bytes);
        Some(address)
    }

    /// A block that the driver just gave; it is lent from now on.
    pub(super) fn lend_new(&self, address: usize, block_bytes: usize) {
        self.state.lock().lent.insert(address, block_bytes);
    }

    /// Whether the block was one of the pool's.
    pub(super) fn give_back(&self, address: usize) -> bool {
        let mut state = self.state.lock();
        let Some(bytes) = state.lent.remove(&address) else {
            return false;
        };
        state.free.entry(bytes).or_default().push(address);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_powers_of_two_then_pages() {
        for (bytes, block) in [
            (0, 64 << 10),
            (1, 64 << 10),
            (64 << 10, 64 << 10),
            ((64 << 10) + 1, 128 << 10),
            (2 << 20, 2 << 20),
            ((2 << 20) + 1, 4 << 20),
            (5 << 20, 6 << 20),
        ] {
            assert_eq!(block_bytes(bytes), Some(block), "{bytes}");
        }
        assert_eq!(block_bytes(usize::MAX), None);
        assert_eq!(block_bytes(isize::MAX as usize), None);
    }

    #[test]
    fn a_block_comes_back_to_its_class_and_is_lent_once() {
        let pool = Pool::default();
        assert_eq!(pool.take(64 << 10), None);
        pool.lend_new(0x1000, 256 << 10);
        assert_eq!(pool.take(256 << 10), None, "lent, not free");
        assert!(pool.give_back(0x1000));
        assert!(!pool.give_back(0x1000), "a second return is not the pool's");
        assert_eq!(pool.take(64 << 10), None, "more than twice too large");
        assert_eq!(pool.take(512 << 10), None, "too small");
        assert_eq!(pool.take(128 << 10), Some(0x1000));
        assert!(pool.give_back(0x1000));
        assert_eq!(pool.take(256 << 10), Some(0x1000), "its size is still the block's");
    }

    #[test]
    fn the_smallest_block_that_serves_is_taken() {
        let pool = Pool::default();
        for (address, bytes) in [(1, 128 << 10), (2, 64 << 10)] {
            pool.lend_new(address, bytes);
            assert!(pool.give_back(address));
        }
        assert_eq!(pool.take(64 << 10), Some(2));
        assert_eq!(pool.take(64 << 10), Some(1));
        assert_eq!(pool.take(64 << 10), None);
    }
}
