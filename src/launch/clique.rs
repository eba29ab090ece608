//! Ranks of one communicator in one process, so that no kernel is queued behind one that waits for it.
//!
//! Each rank's kernel waits for the others'. Of ranks that share a stream in one group each is given a way past the
//! others (`fork`); in different groups the second would be queued behind the first, and is refused with both ranks
//! named. Under capture likewise, for each graph by itself.

use super::layout::MAX_RANKS;
use super::lending::Members;
use super::order::CAPTURES_AT_ONCE;
use super::{Engine, Part, Work};
use crate::device::{streams_conflict, Device, DeviceKind};
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// So many of a rank's latest launches are remembered; a rank that is further ahead of another is not checked.
const REMEMBERED: usize = 16;

/// How many operations one rank has entered, and the streams of the latest ones by their number.
#[derive(Default)]
struct Launches {
    number: AtomicU64,
    streams: [AtomicU64; REMEMBERED],
}

impl Launches {
    fn note(&self, number: u64, stream: u64) {
        self.streams[number as usize % REMEMBERED].store(stream, Ordering::SeqCst);
        self.number.store(number + 1, Ordering::SeqCst);
    }

    /// Whether one of those from `first` on, but before `end`, was queued on a stream that takes turns with this one.
    fn queued(&self, first: u64, end: u64, stream: u64) -> bool {
        let number = self.number.load(Ordering::SeqCst);
        (number.saturating_sub(REMEMBERED as u64).max(first)..number.min(end)).any(|number| {
            conflict(
                self.streams[number as usize % REMEMBERED].load(Ordering::SeqCst),
                stream,
            )
        })
    }
}

/// What one rank has entered in one capture.
struct Captured {
    capture: u64,
    launches: Launches,
}

/// The latest captures of each rank, oldest first: the end of one is not seen, and one that is forgotten while it goes
/// on is taken for a new one.
type Captures = [VecDeque<Captured>; MAX_RANKS];

#[derive(Default)]
pub(super) struct Clique {
    eager: [Launches; MAX_RANKS],
    captures: Mutex<Captures>,
    /// For the end of one that lends.
    pub(super) members: Mutex<Members>,
}

/// A stream is remembered as its key with its device's ordinal below.
const ORDINAL_BITS: u32 = 8;
const ORDINAL_MASK: u64 = (1 << ORDINAL_BITS) - 1;

/// Streams of different devices never queue behind each other, and keys are unique within a device only.
fn conflict(a: u64, b: u64) -> bool {
    a & ORDINAL_MASK == b & ORDINAL_MASK && streams_conflict(a >> ORDINAL_BITS, b >> ORDINAL_BITS)
}

/// Whose streams a device's are: every GPU has its own, host devices share those of the process.
pub(super) fn streams_of(device: &dyn Device) -> i32 {
    match device.kind() {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => device.ordinal(),
    }
}

fn remembered(engine: &Engine, work: &Work) -> u64 {
    work.stream_key.stream << ORDINAL_BITS | (streams_of(engine.device.as_ref()) as u64 & ORDINAL_MASK)
}

fn one_stream(first: u32, second: u32) -> Error {
    Error::usage(format!(
        "ranks {first} and {second} of one communicator use one stream, or streams that take turns, in different groups: \
         the second kernel would wait behind the first, which waits for it; call both within one ncclGroupStart and \
         ncclGroupEnd, or give each rank a stream of its own"
    ))
}

/// Cliques of this process by what names their communicator.
static CLIQUES: ProcessLocal<Mutex<HashMap<Vec<u8>, Weak<Clique>>>> = ProcessLocal::new();

impl Clique {
    pub(super) fn of(communicator: Vec<u8>) -> Arc<Clique> {
        let mut cliques = CLIQUES.get().lock();
        cliques.retain(|_, clique| clique.strong_count() > 0);
        let clique = cliques.get(&communicator).and_then(Weak::upgrade).unwrap_or_default();
        cliques.insert(communicator, Arc::downgrade(&clique));
        clique
    }

    #[cfg(test)]
    pub(super) fn remembered_captures(&self, rank: usize) -> usize {
        self.captures.lock()[rank].len()
    }
}

/// Enters a batch. Refused if one of its operations would be queued behind the same or a later one of another rank:
/// that waits for this, which would wait behind it. Ranks of one batch are launched side by side whatever their streams
/// (`fork`), so only what came before counts. Of two batches that come at once one sees the other. After a refusal
/// nothing has changed.
pub(super) fn enter(batch: &[Part]) -> Result<()> {
    batch.iter().for_each(note);
    let entered = batch.iter().try_for_each(|part| check(part, batch));
    if entered.is_err() {
        batch.iter().for_each(leave);
    }
    entered
}

/// The capture of all of a part's works (`order::check_captures`). None: it has none to enter. On a caller's own thread
/// an operation is done on all ranks before this one launches another, so that none is queued before it.
fn capture_of(works: &[Work]) -> Option<Option<u64>> {
    let first = works.first().filter(|work| !work.on_callers_thread())?;
    Some(first.stream_key.capture)
}

fn find(captures: &Captures, rank: u32, capture: u64) -> Option<&Launches> {
    let found = captures[rank as usize]
        .iter()
        .find(|captured| captured.capture == capture)?;
    Some(&found.launches)
}

fn note((engine, works): &Part) {
    let note = |launches: &Launches, first: u64| {
        let streams = works.iter().map(|work| remembered(engine, work));
        streams
            .zip(first..)
            .for_each(|(stream, number)| launches.note(number, stream));
    };
    let rank = engine.rank as usize;
    match capture_of(works) {
        // On a caller's own thread too, so that no older stream speaks for the number.
        None | Some(None) => note(&engine.clique.eager[rank], engine.launched.load(Ordering::Relaxed)),
        Some(Some(capture)) => {
            let mut captures = engine.clique.captures.lock();
            if find(&captures, engine.rank, capture).is_none() {
                let latest = &mut captures[rank];
                if latest.len() == CAPTURES_AT_ONCE {
                    latest.pop_front();
                }
                let launches = Launches::default();
                latest.push_back(Captured { capture, launches });
            }
            if let Some(launches) = find(&captures, engine.rank, capture) {
                note(launches, launches.number.load(Ordering::Relaxed));
            }
        }
    }
}

/// How many operations a part's rank had entered before the batch, in what this part is captured into.
fn before((engine, works): &Part, entered: &Launches) -> u64 {
    match capture_of(works) {
        Some(Some(_)) => entered.number.load(Ordering::Relaxed) - works.len() as u64,
        _ => engine.launched.load(Ordering::Relaxed),
    }
}

fn check(part: &Part, batch: &[Part]) -> Result<()> {
    let (engine, works) = part;
    let clique = &engine.clique;
    let Some(capture) = capture_of(works) else {
        return Ok(());
    };
    let captures = capture.map(|capture| (capture, clique.captures.lock()));
    let launches = |rank: u32| match &captures {
        None => Some(&clique.eager[rank as usize]),
        Some((capture, captures)) => find(captures, rank, *capture),
    };
    let Some(mine) = launches(engine.rank) else {
        return Ok(());
    };
    for (work, number) in works.iter().zip(before(part, mine)..) {
        let stream = remembered(engine, work);
        for other in (0..MAX_RANKS as u32).filter(|other| *other != engine.rank) {
            let Some(theirs) = launches(other) else { continue };
            if !theirs.queued(number, u64::MAX, stream) {
                continue;
            }
            let beside = |(peer, works): &&Part| {
                peer.rank == other && Arc::ptr_eq(&peer.clique, clique) && capture_of(works) == Some(capture)
            };
            let end = batch.iter().find(beside).map_or(u64::MAX, |part| before(part, theirs));
            if theirs.queued(number, end, stream) {
                return Err(one_stream(other, engine.rank));
            }
        }
    }
    Ok(())
}

/// Takes back what a part has entered and not launched.
pub(super) fn leave(part: &Part) {
    let (engine, works) = part;
    match capture_of(works) {
        None | Some(None) => engine.clique.eager[engine.rank as usize]
            .number
            .store(engine.launched.load(Ordering::Relaxed), Ordering::SeqCst),
        Some(Some(capture)) => {
            if let Some(mine) = find(&engine.clique.captures.lock(), engine.rank, capture) {
                mine.number.store(before(part, mine), Ordering::SeqCst);
            }
        }
    }
}
