//! A condition variable that keeps nothing outside itself.
//!
//! parking_lot queues its sleepers in one table of the process. A forked child inherits that table with the sleepers
//! of its parent, whose stacks are reused there, and breaks on them as soon as it waits for anything itself. So what
//! may sleep for long (idle threads of the host device, callers of the bootstrap) sleeps here, on a futex word.

use parking_lot::MutexGuard;
use rustix::thread::futex::{self, Flags};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

#[derive(Default)]
pub(crate) struct Condvar {
    /// Counts the notifications: a waiter sleeps only while the count is what it was under the lock.
    notified: AtomicU32,
}

impl Condvar {
    /// Lets go of the lock and sleeps until notified. It may also wake without cause, as any condition variable.
    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<T>) {
        self.sleep(guard, None);
    }

    /// As `wait`, at most until `deadline`; whether that came is for the caller to look at.
    pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<T>, deadline: Instant) {
        self.sleep(guard, Some(deadline.saturating_duration_since(Instant::now())));
    }

    fn sleep<T>(&self, guard: &mut MutexGuard<T>, limit: Option<Duration>) {
        // The lock orders this load against the notifier's count, which is raised under the same lock.
        let seen = self.notified.load(Ordering::Relaxed);
        // A limit too long for the kernel is none.
        let limit = limit.and_then(|limit| limit.try_into().ok());
        MutexGuard::unlocked(guard, || {
            // Every way of returning is a wake-up: notified, no longer `seen`, a signal, late.
            let _ = futex::wait(&self.notified, Flags::PRIVATE, seen, limit.as_ref());
        });
    }

    /// Wakes one waiter. Called with the lock held, so that no waiter can be between its check and its sleep, and so
    /// that a waiter who then lets this variable go does not do so while it is in use here.
    pub(crate) fn notify_one(&self) {
        self.notified.fetch_add(1, Ordering::Relaxed);
        // It fails for a bad address only.
        let _ = futex::wake(&self.notified, Flags::PRIVATE, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    #[test]
    fn no_notification_is_lost_and_a_deadline_ends_a_wait() {
        const TURNS: u32 = 2000;
        let shared: Arc<(Mutex<u32>, Condvar, Condvar)> = Arc::default();
        let other = Arc::clone(&shared);
        // Two threads take turns, each waiting for the other's parity.
        let thread = std::thread::spawn(move || {
            let mut turn = other.0.lock();
            while *turn < TURNS {
                while turn.is_multiple_of(2) && *turn < TURNS {
                    other.1.wait(&mut turn);
                }
                *turn += 1;
                other.2.notify_one();
            }
        });
        let mut turn = shared.0.lock();
        while *turn < TURNS {
            *turn += 1;
            shared.1.notify_one();
            while !turn.is_multiple_of(2) && *turn < TURNS {
                shared.2.wait_until(&mut turn, Instant::now() + Duration::from_secs(60));
            }
        }
        drop(turn);
        thread.join().unwrap();
        let mut turn = shared.0.lock();
        let begun = Instant::now();
        let deadline = begun + Duration::from_millis(5);
        while Instant::now() < deadline {
            shared.1.wait_until(&mut turn, deadline);
        }
        assert!(*turn >= TURNS);
    }
}
