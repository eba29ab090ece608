//! A futex word on which one thread sleeps, and on which nobody's wake-up is lost.
//!
//! ```text
//! the sleeper                                   whoever has something for it
//!   seen = count                                  makes it visible
//!   looks whether there is anything               count += 1
//!   asleep = true                                 if asleep: futex wake
//!   sleeps while count == seen (the kernel
//!   compares once more, under its own lock)
//! ```
//!
//! All four accesses are in one order (SeqCst). If the count was raised before the kernel's comparison, the sleeper does
//! not sleep. If it was raised after, `asleep` was set before, so that the other side sees it and wakes. What was made
//! visible before a count that the sleeper has seen, it finds when it looks. A wake-up costs one atomic addition while the
//! thread runs; there is no lock.

use rustix::thread::futex::{self, Flags};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Wake {
    count: AtomicU32,
    asleep: AtomicBool,
}

impl Wake {
    /// To be read before the sleeper looks for work.
    pub(super) fn seen(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    pub(super) fn wake(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            // It fails for a bad address only.
            let _ = futex::wake(&self.count, Flags::PRIVATE, 1);
        }
    }

    /// Returns once woken since `seen`, or after `limit`; it may also return without cause.
    pub(super) fn sleep(&self, seen: u32, limit: Option<Duration>) {
        self.asleep.store(true, Ordering::SeqCst);
        // Both are at most some milliseconds, which fit.
        let limit = limit.and_then(|limit| limit.try_into().ok());
        // Every way of returning is a wake-up: woken, no longer `seen`, a signal, late.
        let _ = futex::wait(&self.count, Flags::PRIVATE, seen, limit.as_ref());
        self.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::Arc;

    /// Two threads hand a number to each other, each asleep until the other's comes: one lost wake-up would hang them.
    #[test]
    fn no_wake_up_is_lost() {
        const TURNS: u64 = 20_000;
        let number = Arc::new(AtomicU64::new(0));
        let words: Arc<[Wake; 2]> = Arc::default();
        let player = |side: u64| {
            let (number, words) = (number.clone(), words.clone());
            move || loop {
                let seen = words[side as usize].seen();
                let now = number.load(Ordering::Acquire);
                if now >= TURNS {
                    return words[1 - side as usize].wake();
                }
                if now % 2 == side {
                    number.store(now + 1, Ordering::Release);
                    words[1 - side as usize].wake();
                } else {
                    words[side as usize].sleep(seen, None);
                }
            }
        };
        let other = std::thread::spawn(player(1));
        player(0)();
        other.join().unwrap();
        assert!(number.load(Ordering::Acquire) >= TURNS);
    }

    #[test]
    fn a_limit_ends_a_sleep() {
        let word = Wake::default();
        word.sleep(word.seen(), Some(Duration::from_millis(1)));
        word.sleep(word.seen().wrapping_sub(1), None);
    }
}
