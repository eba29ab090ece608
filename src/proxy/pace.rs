//! How the proxy's thread passes the time between two looks at its rings, while there is something to look for. Pure.
//!
//! | since the last slot moved, or the last call | between two looks |
//! |---|---|
//! | less than 100 us | the processor is offered to other threads (sched_yield) |
//! | longer | a nap of an eighth of that time, from 20 us to 1 ms |
//!
//! So a slot is noticed later by an eighth of how long it has been waited for, and never by more than 1 ms, and a wait of
//! seconds costs a thousand looks a second. A call ends a nap. An offer costs a short system call, as a
//! look at a socket does; where kernels' threads and proxies outnumbered the cores (2 of each on 2 cores), 20 us of looks
//! without an offer doubled the time of a message over loopback.

use std::time::{Duration, Instant};

const YIELD: Duration = Duration::from_micros(100);
const NAP_LEAST: Duration = Duration::from_micros(20);
const NAP_MOST: Duration = Duration::from_millis(1);
const PART: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
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
        if idle < YIELD {
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
        assert_eq!(pace.handle_look(true, begun), Rest::Yield);
        for (after_us, rest) in [
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
        assert_eq!(pace.handle_look(true, later), Rest::Yield);
        assert_eq!(pace.handle_look(false, later + Duration::from_micros(5)), Rest::Yield);
    }
}
