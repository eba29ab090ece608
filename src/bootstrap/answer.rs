//! One answer from one thread to another that waits with a deadline.
//!
//! `std::sync::mpsc` would do, but ThreadSanitizer does not see through the queue of waiters of an uninstrumented std
//! and reports races there that are none.

use crate::sys::condvar::Condvar;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Waiting,
    Sent(T),
    /// One side is gone; nothing more will come, or nobody wants it.
    Gone,
}

/// The side that answers; dropping it without an answer tells the other side that there will be none.
pub(crate) struct Reply<T>(Arc<Shared<T>>);

/// The side that waits.
pub(crate) struct Answer<T>(Arc<Shared<T>>);

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    Late,
    Gone,
}

pub(crate) fn pair<T>() -> (Reply<T>, Answer<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State::Waiting),
        changed: Condvar::default(),
    });
    (Reply(shared.clone()), Answer(shared))
}

impl<T> Reply<T> {
    /// Gives the value back if nobody waits for it any more.
    pub(crate) fn send(self, value: T) -> Result<(), T> {
        let mut state = self.0.state.lock();
        if matches!(*state, State::Gone) {
            return Err(value);
        }
        *state = State::Sent(value);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if matches!(*state, State::Waiting) {
            *state = State::Gone;
            self.0.changed.notify_one();
        }
    }
}

impl<T> Answer<T> {
    pub(crate) fn wait(&self, timeout: Duration) -> Result<T, NoAnswer> {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.state.lock();
        loop {
            match std::mem::replace(&mut *state, State::Gone) {
                State::Sent(value) => return Ok(value),
                State::Gone => return Err(NoAnswer::Gone),
                State::Waiting => *state = State::Waiting,
            }
            if Instant::now() >= deadline {
                return Err(NoAnswer::Late);
            }
            self.0.changed.wait_until(&mut state, deadline);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        *self.0.state.lock() = State::Gone;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_once_late_or_never() {
        let (reply, answer) = pair();
        assert_eq!(answer.wait(Duration::from_millis(1)), Err::<i32, _>(NoAnswer::Late));
        let other = std::thread::spawn(move || reply.send(7));
        assert_eq!(answer.wait(Duration::from_secs(60)), Ok(7));
        assert_eq!(other.join().unwrap(), Ok(()));
        assert_eq!(answer.wait(Duration::from_secs(60)), Err(NoAnswer::Gone));
        let (reply, answer) = pair::<i32>();
        drop(reply);
        assert_eq!(answer.wait(Duration::from_secs(60)), Err(NoAnswer::Gone));
        let (reply, answer) = pair();
        drop(answer);
        assert_eq!(reply.send(7), Err(7));
    }
}
