//! Ranks of one communicator that share a stream: forked in one batch and joined again.
//!
//! Kernels of ranks that one thread drives may come on one stream, or on streams that take turns, and would queue up
//! behind each other while they wait for each other. So in one batch the first rank there keeps the caller's stream, and
//! each other one goes to a side stream of its own, which waits for what was in the caller's before the batch; after the
//! batch the caller's stream waits for the side streams. Under capture the same calls give parallel branches of the graph.
//!
//! ```text
//! caller's stream   before --+-- rank 0 ------+-- what the caller queues next
//! side streams               +-- rank 1 --+   |
//!                            +-- rank 2 --+---+
//! ```
//!
//! A rank that goes aside does so with all of its works, and each of them comes behind and before what it would be behind
//! and before in its own caller's stream, and nothing else: a wait too many can be one for a kernel that waits for this.

use super::clique::streams_of;
use super::order::Target;
use super::{on_callers_thread, Engine, Part, Work};
use crate::device::{streams_conflict, Mark};
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

/// The side streams of a batch's parts, by their places; empty where all keep to the callers' streams.
pub(super) type Sides = Vec<Option<Target>>;

/// Finds a side stream for each part that shares a stream with a rank before it.
pub(super) fn sides(batch: &[Part]) -> Result<Sides> {
    let mut sides = Sides::new();
    for (place, part) in batch.iter().enumerate() {
        let stays = |other: &usize| sides.get(*other).is_none_or(Option::is_none);
        if (0..place).filter(stays).any(|other| share(&batch[other], part)) {
            sides.resize(batch.len(), None);
            let (engine, works) = part;
            sides[place] = works.first().map(|work| engine.side(work)).transpose()?;
        }
    }
    Ok(sides)
}

/// Whether two ranks of one communicator would queue up behind each other.
fn share(first: &Part, second: &Part) -> bool {
    let devices = [first, second].map(|(engine, _)| streams_of(engine.device.as_ref()));
    Arc::ptr_eq(&first.0.clique, &second.0.clique)
        && devices[0] == devices[1]
        && ![first, second].into_iter().any(on_callers_thread)
        && streams(first).any(|one| streams(second).any(|two| streams_conflict(one, two)))
}

/// A part's streams, those that follow each other once.
fn streams<'a>((_, works): &Part<'a>) -> impl Iterator<Item = u64> + 'a {
    let runs = works.chunk_by(|one, two| one.stream_key == two.stream_key);
    runs.map(|run| run[0].stream_key.stream)
}

/// One caller's stream that a part goes around.
struct Crossing {
    stream: *mut c_void,
    key: u64,
    /// First of what was in the caller's stream before the batch, then of the part's work.
    mark: Mark,
    /// The side stream waits for the caller's.
    entered: bool,
    /// The mark is behind the part's last work of this stream.
    left: bool,
}

/// A part's way aside.
struct Fork<'a> {
    engine: &'a Engine,
    works: &'a [Work],
    side: Target,
    crossings: Vec<Crossing>,
}

impl<'a> Fork<'a> {
    fn new((engine, works): Part<'a>, side: Target) -> Result<Fork<'a>> {
        let mut fork = Fork {
            engine,
            works,
            side,
            crossings: Vec::new(),
        };
        for work in works {
            let key = work.stream_key.stream;
            if fork.crossings.iter().all(|crossing| crossing.key != key) {
                fork.crossings.push(Crossing {
                    stream: work.stream,
                    key,
                    mark: engine.device.mark(None, work.stream)?,
                    entered: false,
                    left: false,
                });
            }
        }
        Ok(fork)
    }

    /// Before the part's work of number `round`, which goes where it says.
    fn enter(&mut self, round: usize) -> Result<Target> {
        let key = self.works[round].stream_key.stream;
        for crossing in self.crossings.iter_mut().filter(|crossing| crossing.key == key) {
            if !crossing.entered {
                self.engine.device.wait_for_mark(crossing.mark, self.side.stream)?;
                crossing.entered = true;
            }
        }
        Ok(self.side)
    }

    /// After it.
    fn leave(&mut self, round: usize) -> Result<()> {
        let key = self.works[round].stream_key.stream;
        let mut later = self.works[round + 1..].iter();
        if later.any(|work| work.stream_key.stream == key) {
            return Ok(());
        }
        for crossing in self.crossings.iter_mut().filter(|crossing| crossing.key == key) {
            self.engine.device.mark(Some(crossing.mark), self.side.stream)?;
            crossing.left = true;
        }
        Ok(())
    }

    /// After the batch, also one that failed half-way: a capture with a branch that does not come back is broken.
    fn join(&self) -> Result<()> {
        let device = &self.engine.device;
        let joined = self
            .crossings
            .iter()
            .filter(|crossing| crossing.entered)
            .map(|crossing| {
                if !crossing.left {
                    device.mark(Some(crossing.mark), self.side.stream)?;
                }
                device.wait_for_mark(crossing.mark, crossing.stream)
            });
        first_failure(joined)
    }
}

impl Drop for Fork<'_> {
    fn drop(&mut self) {
        let marks = self.crossings.iter().map(|crossing| crossing.mark);
        marks.for_each(|mark| self.engine.device.unmark(mark));
    }
}

/// All of them are done, whichever fails.
fn first_failure(outcomes: impl Iterator<Item = Result<()>>) -> Result<()> {
    outcomes.fold(Ok(()), Result::and)
}

/// Puts the works of a batch into their streams, communicator by communicator.
pub(super) fn enqueue(batch: &[Part], sides: &Sides) -> Result<()> {
    for (index, first) in batch.iter().enumerate() {
        let of_first = |part: &Part| Arc::ptr_eq(&part.0.clique, &first.0.clique);
        if batch[..index].iter().any(of_first) {
            continue;
        }
        let of_first = |place: &usize| of_first(&batch[*place]) && !on_callers_thread(&batch[*place]);
        let mut forks = Vec::new();
        for place in (0..sides.len()).filter(of_first) {
            if let Some(side) = sides[place] {
                forks.push((place, Fork::new(batch[place], side)?));
            }
        }
        let launched = side_by_side(batch, (0..batch.len()).filter(of_first), &mut forks);
        launched.and(first_failure(forks.iter().map(|(_, fork)| fork.join())))?;
    }
    Ok(())
}

/// The ranks of one communicator are launched operation by operation, since their kernels wait for each other. None is
/// launched before all are ordered behind their earlier work: that may be in a stream which another rank uses now.
fn side_by_side<'a>(
    batch: &[Part<'a>],
    places: impl Iterator<Item = usize> + Clone,
    forks: &mut [(usize, Fork<'a>)],
) -> Result<()> {
    let most = places.clone().map(|place| batch[place].1.len()).max().unwrap_or(0);
    for round in 0..most {
        let here = places.clone().filter(|place| round < batch[*place].1.len());
        for place in here.clone() {
            let (engine, works) = batch[place];
            let target = match fork_of(forks, place) {
                Some(fork) => fork.enter(round)?,
                None => works[round].target(),
            };
            engine.before_launch(target)?;
        }
        for place in here {
            let (engine, works) = batch[place];
            let mut fork = fork_of(forks, place);
            let target = fork.as_ref().map_or_else(|| works[round].target(), |fork| fork.side);
            engine.enqueue(&works[round], target)?;
            fork.iter_mut().try_for_each(|fork| fork.leave(round))?;
        }
    }
    Ok(())
}

fn fork_of<'f, 'a>(forks: &'f mut [(usize, Fork<'a>)], place: usize) -> Option<&'f mut Fork<'a>> {
    let found = forks.iter_mut().find(|(of, _)| *of == place);
    found.map(|(_, fork)| fork)
}
