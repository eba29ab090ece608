//! The blocks of a GPU that a communicator's kernels may have: agreed by its ranks, and kept on the GPU's page.
//!
//! Each rank takes from its GPU's page what it would like and what is there, the ranks tell each other, and all keep the
//! least that anyone has. So nobody ever holds what is not there, also where communicators form at the same time; who
//! gets nothing that way gives everything back and tries again, a few times, with less. `plan::budget` says how much to
//! like.

mod page;
#[cfg(test)]
mod tests;

pub(super) use page::{Page, Reservation};

use crate::bootstrap::Cancel;
use crate::error::{Error, Result};
use crate::plan::budget::grant;
use crate::warning;
use page::Entry;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Tries beside communicators that form at the same time.
const TRIES: u32 = 6;
/// How soon a rank that waits sees that it is aborted.
const LOOK: Duration = Duration::from_millis(20);
/// Processes that a refusal names.
const NAMED: usize = 8;

/// Tells all ranks what this one has, and this one what they have (`Session::all_gather`).
pub(super) type Exchange<'a> = &'a dyn Fn(Result<Vec<u8>>) -> Result<Vec<Vec<u8>>>;

/// A rank that asks for blocks of its GPU.
pub(super) struct Claim<'a> {
    pub(super) page: Page,
    /// The GPU's name.
    pub(super) device: String,
    /// What all communicators may have there.
    pub(super) capacity: u32,
    /// Equal for the ranks of one communicator, and for no others.
    pub(super) communicator: u64,
    pub(super) rank: u32,
    /// Ranks of the communicator on this GPU.
    pub(super) sharing: u32,
    /// Whether to start although nothing is free.
    pub(super) overcommit: bool,
    pub(super) cancel: &'a Cancel,
}

impl Claim<'_> {
    /// The blocks of each rank, the same on all of them, and this rank's hold on them. Collective. `used` are the blocks
    /// that a rank uses of those that it may have.
    pub(super) fn agree(&self, used: &dyn Fn(u32) -> u32, exchange: Exchange) -> Result<(u32, Reservation)> {
        let most = used(u32::MAX);
        for number in 0..TRIES - 1 {
            let taken = self.take(most, number);
            if let Some(agreed) = self.settle(taken.map(|(taken, _)| taken), used, exchange)? {
                return Ok(agreed);
            }
            // Everyone has given back before anyone tries again.
            exchange(Ok(Vec::new()))?;
            self.sleep(self.pause(number));
        }
        let taken = self.take(most, TRIES - 1).and_then(|(taken, others)| match taken {
            None => Err(self.refusal(&others)),
            some => Ok(some),
        });
        self.settle(taken, used, exchange)?
            .ok_or_else(|| Error::internal("a rank without blocks of its GPU did not say so"))
    }

    /// What this rank may have now, and who else has blocks of the GPU. The `number` of the try is from 0.
    fn take(&self, most: u32, number: u32) -> Result<(Option<Reservation>, Vec<Entry>)> {
        let seen = RefCell::new(Vec::new());
        let holder = Entry {
            communicator: self.communicator,
            pid: std::process::id(),
            rank: self.rank,
            blocks: 0,
        };
        let decide = |entries: &[Entry]| {
            *seen.borrow_mut() = entries.to_vec();
            self.blocks(entries, most, number)
        };
        let taken = self.page.reserve(holder, &decide, self.cancel)?;
        let mut others = seen.into_inner();
        let held = sum(&others) + taken.as_ref().map_or(0, |taken| u64::from(taken.blocks()));
        if taken.is_some() && held > u64::from(self.capacity) {
            warning!(
                "{}: rank {} starts although {held} blocks of the kernels of communicators are held there now and {} fit \
                 (OSSICLE_GPU_OVERCOMMIT=1): kernels that wait for each other may hang",
                self.device,
                self.rank,
                self.capacity
            );
        }
        others.retain(|entry| entry.communicator != self.communicator);
        Ok((taken, others))
    }

    /// The ranks of one communicator decide alike, whoever of them comes first.
    fn blocks(&self, entries: &[Entry], most: u32, number: u32) -> u32 {
        let others: Vec<Entry> = entries
            .iter()
            .filter(|entry| entry.communicator != self.communicator)
            .copied()
            .collect();
        let free = |held: &[Entry]| u64::from(self.capacity).saturating_sub(sum(held)) as u32;
        let wanted = match grant(free(&others), self.sharing) {
            0 => 0,
            granted => (granted.min(most) >> number).max(1),
        };
        wanted.min(free(entries)).max(u32::from(self.overcommit))
    }

    /// Keeps of what was taken what every rank has; None where some rank has none.
    fn settle(
        &self,
        taken: Result<Option<Reservation>>,
        used: &dyn Fn(u32) -> u32,
        exchange: Exchange,
    ) -> Result<Option<(u32, Reservation)>> {
        let (offer, taken) = match taken {
            Ok(taken) => (Ok(taken.as_ref().map_or(0, Reservation::blocks)), taken),
            Err(error) => (Err(error), None),
        };
        let offers = exchange(offer.map(|blocks| blocks.to_ne_bytes().to_vec()))?;
        let blocks = parse(&offers)?.into_iter().min().unwrap_or(0);
        Ok(taken.filter(|_| blocks > 0).map(|mut reservation| {
            reservation.shrink(used(blocks), self.cancel);
            (blocks, reservation)
        }))
    }

    /// Communicators that got into each other's way wait for different times, since their numbers are random.
    fn pause(&self, number: u32) -> Duration {
        Duration::from_millis(self.communicator.rotate_right(8 * number) % (32 << number))
    }

    /// Ended early by an abort, which the exchange that follows finds.
    fn sleep(&self, pause: Duration) {
        let begun = Instant::now();
        while !self.cancel.is_set() {
            let left = pause.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    fn refusal(&self, others: &[Entry]) -> Error {
        let held = sum(others);
        Error::usage(format!(
            "{} has room for {} blocks of the kernels of communicators, of which {held} are held ({}): not each of the {} \
             ranks of the new communicator there can have one, and kernels that wait for each other without running would \
             hang; destroy communicators that are not needed, lower NCCL_MAX_NCHANNELS or maxCTAs of the others, or set \
             OSSICLE_GPU_OVERCOMMIT=1 to go on at that risk",
            self.device,
            self.capacity,
            holders(others),
            self.sharing
        ))
    }
}

fn sum(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| u64::from(entry.blocks)).sum()
}

/// Says which processes hold what.
fn holders(entries: &[Entry]) -> String {
    let mut processes: BTreeMap<u32, (u64, BTreeSet<u64>)> = BTreeMap::new();
    for entry in entries {
        let (blocks, communicators) = processes.entry(entry.pid).or_default();
        *blocks += u64::from(entry.blocks);
        communicators.insert(entry.communicator);
    }
    let mut texts: Vec<String> = processes
        .iter()
        .take(NAMED)
        .map(|(pid, (blocks, communicators))| {
            format!("process {pid}: {blocks} for {} communicators", communicators.len())
        })
        .collect();
    if processes.len() > NAMED {
        texts.push(format!("and {} more processes", processes.len() - NAMED));
    }
    texts.join(", ")
}

fn parse(offers: &[Vec<u8>]) -> Result<Vec<u32>> {
    let one = |offer: &Vec<u8>| offer.as_slice().try_into().map(u32::from_ne_bytes);
    let blocks: std::result::Result<Vec<u32>, _> = offers.iter().map(one).collect();
    blocks.map_err(|_| Error::internal("a rank's offer of blocks is no number"))
}
