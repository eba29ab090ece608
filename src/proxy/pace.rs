//! How the proxy's thread passes the time between two looks at its rings, while there is something to look for. Pure.
//!
//! | since the last slot moved, or the last call | between two looks |
//! |---|---|
//! | 20 us | nothing but a pause of the processor |
//! | 100 us | the processor is offered to other threads (sched_yield) |
//! | longer | a nap of an eighth of that time, from 20 us to 1 ms |
//!
//! So a slot is noticed later by an eighth of how long it has been waited for, and never by more than 1 ms, and a wait of
//! seconds costs a thousand looks a second. A call ends a nap.

use std::time::{Duration, Instant};

const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(100);
const NAP_LEAST: Duration = Duration::from_micros(20);
const NAP_MOST: Duration = Duration::from_millis(1);
const PART: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Pause,
    Yield,
    Nap(Duration),
}

#[derive(Default)]
pub(super) struct Pace {
    /// When something happened last.
    last: Option<Instant>,
}

impl Pace {
    /// After a look; `moved`: a slot moved, or somebody called.
    pub(super) fn handle_look(&mut self, moved: bool, now: Instant) -> Rest {
        if moved {
            self.last = Some(now);
        }
        let idle = now.saturating_duration_since(*self.last.get_or_insert(now));
        if idle < SPIN {
            Rest::Pause
        } else if idle < YIELD {
            Rest::Yield
        } else {
            Rest::Nap((idle / PART).clamp(NAP_LEAST, NAP_MOST))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_is_that_of_the_table() {
        let begun = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.handle_look(true, begun), Rest::Pause);
        for (after_us, rest) in [
            (19, Rest::Pause),
            (20, Rest::Yield),
            (99, Rest::Yield),
            (100, Rest::Nap(NAP_LEAST)),
            (800, Rest::Nap(Duration::from_micros(100))),
            (8_000, Rest::Nap(NAP_MOST)),
            (60_000_000, Rest::Nap(NAP_MOST)),
        ] {
            let now = begun + Duration::from_micros(after_us);
            assert_eq!(pace.handle_look(false, now), rest, "after {after_us} us");
        }
        let later = begun + Duration::from_secs(61);
        assert_eq!(pace.handle_look(true, later), Rest::Pause);
        assert_eq!(pace.handle_look(false, later + Duration::from_micros(5)), Rest::Pause);
    }
}
