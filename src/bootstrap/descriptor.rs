//! Descriptors that the library keeps, and what becomes of them in a forked child.
//!
//! A child that is forked without exec (a data loader's worker) has copies of every socket. While it keeps them, the
//! peers of a parent that was killed see no end of its connections and wait for ever. So every descriptor that the
//! library keeps open is a `Descriptor`, whose number is recorded for as long as it is open, and `close_in_child` closes
//! the recorded numbers.
//!
//! A fork by another thread just before a new descriptor is recorded, or just after one that is about to be closed
//! was struck off, leaves that one copy in the child; so do numbers of `RECORDED` and more, which are not recorded.

use super::service::register_for_forks;
use crate::sys::above_standard;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers from here on are not recorded. The kernel hands out the lowest that is free.
const RECORDED: usize = 64 << 10;

/// One bit a number that is open.
static OPEN: [AtomicU64; RECORDED / 64] = [const { AtomicU64::new(0) }; RECORDED / 64];

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((OPEN.get(number / 64)?, 1 << (number % 64)))
}

/// A descriptor that no forked child keeps.
pub struct Descriptor(OwnedFd);

impl Descriptor {
    /// Records `fd`, whose number becomes one of 3 or more.
    pub(crate) fn new(fd: OwnedFd) -> Result<Descriptor, Errno> {
        register_for_forks()?;
        let fd = above_standard(fd)?;
        if let Some((word, bit)) = place(fd.as_raw_fd()) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
        Ok(Descriptor(fd))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // Before it is closed: afterwards the number may be anybody's.
        if let Some((word, bit)) = place(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Closes the copies of the parent's descriptors. For the handler of a fork in the child alone, where nothing that is
/// not async-signal-safe may be called, and where every `Descriptor` of the parent is out of reach: those of the
/// thread went with the thread, and those that statics hold are forgotten by the handler.
pub(super) fn close_in_child() {
    for (index, word) in OPEN.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let fd = (64 * index) as RawFd + bits.trailing_zeros() as RawFd;
            // SAFETY: a recorded number is open and belongs to a Descriptor of the parent, which nobody in this child
            // can reach; only the child's copy is closed.
            unsafe { libc::close(fd) };
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_recorded(fd: RawFd) -> bool {
        place(fd).is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
    }

    #[test]
    fn a_number_is_recorded_while_it_is_open() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // A number that no other test of this process takes in between.
        let fd = rustix::io::fcntl_dupfd_cloexec(&file, 900).unwrap();
        let number = fd.as_raw_fd();
        assert!(!is_recorded(number));
        let descriptor = Descriptor::new(fd).unwrap();
        assert_eq!(descriptor.as_fd().as_raw_fd(), number);
        assert!(is_recorded(number) && !is_recorded(number + 1));
        drop(descriptor);
        assert!(!is_recorded(number));
    }

    #[test]
    fn numbers_beyond_the_record_are_passed_over() {
        assert!(place(-1).is_none() && place(RECORDED as RawFd).is_none());
        assert!(place(RECORDED as RawFd - 1).is_some_and(|(_, bit)| bit == 1 << 63));
    }
}
