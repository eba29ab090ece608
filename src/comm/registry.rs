//! Handles: how an `ncclComm_t` from a caller becomes a communicator, whatever its value.
//!
//! A handle is the address of a slot in one region of virtual memory that is reserved once and never unmapped. So a
//! handle that was destroyed, a NULL, `0xFF..`, or a stack address is told from a live one by a range check, an
//! alignment check and one atomic word: nothing is ever read through a pointer that the caller made up. The word holds
//! all of a slot's state:
//!
//! ```text
//! bit 63    LIVE      a communicator is there
//! bit 62    CLOSING   destroy or abort has claimed it (alone, without LIVE: being filled or emptied)
//! 61..32    how often the slot was filled: 0 means that its address never was a handle
//! 31..0     calls that are inside the communicator now
//! ```
//!
//! A call enters by adding itself to the count while the slot is LIVE and not CLOSING, and leaves by subtracting.
//! Who closes sets CLOSING first, so that no new call gets in, and frees only at a count of zero. Slots are filled in
//! rotation, so that an address is not a handle again before every other slot has been one.

use super::RawComm;
use crate::error::{Error, Result};
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

const LIVE: u64 = 1 << 63;
const CLOSING: u64 = 1 << 62;
const FLAGS: u64 = LIVE | CLOSING;
const FILL: u64 = 1 << 32;
const FILLS: u64 = CLOSING - FILL;
const USERS: u64 = FILL - 1;

/// A cache line of its own, since every call of a rank writes its slot's word.
#[repr(C, align(64))]
struct Slot<T> {
    word: AtomicU64,
    value: AtomicPtr<T>,
}

/// All handles of one kind; `T` is what stands behind them.
pub(crate) struct Registry<T: Send + Sync + 'static> {
    slots: &'static [Slot<T>],
    cursor: AtomicUsize,
    /// The process that made the registry: a forked child sees every slot as never filled.
    process_id: u32,
}

impl<T: Send + Sync> Registry<T> {
    /// Reserves the region for `slots` handles; pages are taken when a slot is first filled.
    pub(crate) fn new(slots: usize) -> Result<Registry<T>> {
        use rustix::mm::{madvise, mmap_anonymous, Advice, MapFlags, ProtFlags};
        let bytes = slots * size_of::<Slot<T>>();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|errno| Error::system(format!("cannot map {bytes} bytes for communicator handles: {errno}")))?;
        // A forked child has none of the library's threads, so the communicators of its parent must not answer there.
        // Where the kernel refuses the advice (before Linux 4.14) a child merely fails less clearly.
        // SAFETY: the range is the mapping made above.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxWipeOnFork) };
        // SAFETY: the mapping is page-aligned, `bytes` long, never unmapped, and zero bytes are a valid Slot (a word of
        // zero and a null pointer); all later access is through the slots' atomics.
        let slots = unsafe { std::slice::from_raw_parts(base.cast::<Slot<T>>(), slots) };
        Ok(Registry {
            slots,
            cursor: AtomicUsize::new(0),
            process_id: std::process::id(),
        })
    }

    /// Makes `value` reachable and returns its handle.
    pub(crate) fn insert(&self, value: Arc<T>) -> Result<RawComm> {
        for _ in 0..self.slots.len() {
            let slot = &self.slots[self.cursor.fetch_add(1, Ordering::Relaxed) % self.slots.len()];
            let word = slot.word.load(Ordering::Relaxed);
            if word & FLAGS != 0 {
                continue;
            }
            let fills = ((word & FILLS) + FILL) & FILLS;
            // A slot that was ever filled must not look as if it never was, even when the count wraps.
            let fills = fills.max(FILL);
            if slot
                .word
                .compare_exchange(word, CLOSING | fills, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                slot.value.store(Arc::into_raw(value).cast_mut(), Ordering::Relaxed);
                slot.word.store(LIVE | fills, Ordering::Release);
                return Ok(std::ptr::from_ref(slot).cast_mut().cast());
            }
        }
        Err(Error::system(format!(
            "this process has {} communicators, and no more are supported",
            self.slots.len()
        )))
    }

    fn slot(&self, handle: RawComm) -> Option<&'static Slot<T>> {
        let offset = handle.addr().wrapping_sub(self.slots.as_ptr().addr());
        let size = size_of::<Slot<T>>();
        offset
            .is_multiple_of(size)
            .then(|| self.slots.get(offset / size))
            .flatten()
    }

    /// Adds a call to the slot while its flags are `flags`; the word is returned when they are not.
    fn enter(slot: &Slot<T>, flags: u64) -> std::result::Result<u64, u64> {
        let mut word = slot.word.load(Ordering::Relaxed);
        while word & FLAGS == flags {
            match slot
                .word
                .compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Ok(word & FILLS),
                Err(now) => word = now,
            }
        }
        Err(word)
    }

    /// The communicator behind a handle, kept alive while the answer is.
    pub(crate) fn acquire(&self, handle: RawComm) -> Result<CommRef<T>> {
        let slot = self.slot(handle).ok_or_else(|| refusal(handle))?;
        match Self::enter(slot, LIVE) {
            Ok(fill) => Ok(CommRef { slot, fill }),
            Err(word) => Err(self.not_live(handle, word)),
        }
    }

    /// As `acquire`, for a communicator that another thread is destroying or aborting; None if nobody is.
    pub(crate) fn acquire_closing(&self, handle: RawComm) -> Option<CommRef<T>> {
        let slot = self.slot(handle)?;
        Self::enter(slot, FLAGS).ok().map(|fill| CommRef { slot, fill })
    }

    /// Claims the end of a communicator: from here on the handle is refused, and only one caller gets this far.
    pub(crate) fn close(&self, handle: RawComm) -> Result<Closing<T>> {
        let slot = self.slot(handle).ok_or_else(|| refusal(handle))?;
        let mut word = slot.word.load(Ordering::Relaxed);
        while word & FLAGS == LIVE {
            match slot
                .word
                .compare_exchange_weak(word, word | CLOSING, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Ok(Closing { slot }),
                Err(now) => word = now,
            }
        }
        Err(self.not_live(handle, word))
    }

    fn not_live(&self, handle: RawComm, word: u64) -> Error {
        if word & FILLS != 0 {
            return Error::argument(format!("communicator {handle:?} was already destroyed or aborted"));
        }
        if self.process_id != std::process::id() {
            return Error::usage(format!(
                "communicator {handle:?} belongs to process {}, which forked this one; a child must make its own",
                self.process_id
            ));
        }
        refusal(handle)
    }
}

fn refusal(handle: RawComm) -> Error {
    if handle.is_null() {
        return Error::argument("communicator is NULL");
    }
    Error::argument(format!("communicator {handle:?} is not one that this library made"))
}

/// A call inside a communicator.
pub(crate) struct CommRef<T: Send + Sync + 'static> {
    slot: &'static Slot<T>,
    fill: u64,
}

impl<T: Send + Sync> CommRef<T> {
    /// Leaves a communicator that another thread is closing and waits until it is gone; false after `limit`.
    pub(crate) fn leave_and_wait(self, limit: Duration) -> bool {
        let (slot, fill) = (self.slot, self.fill);
        drop(self);
        let gone = || {
            let word = slot.word.load(Ordering::Acquire);
            word & FLAGS == 0 || word & FILLS != fill
        };
        Pace::until(limit, gone)
    }
}

impl<T: Send + Sync> Deref for CommRef<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the slot was LIVE when this call was counted in, so `value` is the pointer of an Arc that `Closing`
        // keeps until the count is zero again.
        unsafe { &*self.slot.value.load(Ordering::Relaxed) }
    }
}

impl<T: Send + Sync> Drop for CommRef<T> {
    fn drop(&mut self) {
        self.slot.word.fetch_sub(1, Ordering::Release);
    }
}

/// The sole right to end a communicator. Dropped without `finish`, the slot and what is behind it stay for ever, which
/// is what must happen when a call never comes back from inside it.
pub(crate) struct Closing<T: Send + Sync + 'static> {
    slot: &'static Slot<T>,
}

impl<T: Send + Sync> Closing<T> {
    /// Calls that are inside the communicator now.
    pub(crate) fn users(&self) -> u64 {
        self.slot.word.load(Ordering::Acquire) & USERS
    }

    /// Drops the communicator and frees the slot once the last call has left; false (and nothing freed) after `limit`.
    pub(crate) fn finish(self, limit: Duration) -> bool {
        let empty = || {
            let word = self.slot.word.load(Ordering::Relaxed);
            // A second abort may enter at any time, so that the count is checked and the door shut in one step.
            let shut = self.slot.word.compare_exchange(
                word & !USERS,
                word & !USERS & !LIVE,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            shut.is_ok()
        };
        if !Pace::until(limit, empty) {
            return false;
        }
        let value = self.slot.value.swap(null_mut(), Ordering::Relaxed);
        // SAFETY: `value` is what `insert` took out of an Arc; the slot is no longer LIVE and has no users, so this is
        // the only place that can hold it, and it is given back once.
        drop(unsafe { Arc::from_raw(value) });
        self.slot.word.fetch_and(FILLS, Ordering::Release);
        true
    }
}

impl<T: Send + Sync> Deref for Closing<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only `finish`, which consumes self, gives the Arc behind `value` back.
        unsafe { &*self.slot.value.load(Ordering::Relaxed) }
    }
}

/// The pace of rare waits that no event announces: yields first, then naps of 200 us.
pub(crate) struct Pace {
    polls: u32,
}

impl Pace {
    const YIELDS: u32 = 64;
    const NAP: Duration = Duration::from_micros(200);

    pub(crate) fn new() -> Pace {
        Pace { polls: 0 }
    }

    pub(crate) fn pause(&mut self) {
        self.polls = self.polls.saturating_add(1);
        if self.polls <= Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Self::NAP);
        }
    }

    /// Polls `done` until it holds; false if it does not after `limit`.
    pub(crate) fn until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
        let start = std::time::Instant::now();
        let mut pace = Pace::new();
        while !done() {
            if start.elapsed() > limit {
                return false;
            }
            pace.pause();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use std::sync::atomic::AtomicBool;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Says when it is dropped, so that a use after free is seen as a wrong value.
    struct Probe {
        number: AtomicU64,
        drops: Arc<AtomicUsize>,
    }

    impl Drop for Probe {
        fn drop(&mut self) {
            self.number.store(u64::MAX, Ordering::Relaxed);
            self.drops.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn probe(number: u64, drops: &Arc<AtomicUsize>) -> Arc<Probe> {
        Arc::new(Probe {
            number: AtomicU64::new(number),
            drops: Arc::clone(drops),
        })
    }

    fn handle(address: usize) -> RawComm {
        std::ptr::without_provenance_mut(address)
    }

    #[test]
    fn garbage_is_refused_and_named() {
        let registry = Registry::<Probe>::new(16).unwrap();
        let drops = Arc::default();
        let live = registry.insert(probe(7, &drops)).unwrap();
        assert_eq!(registry.acquire(live).unwrap().number.load(Ordering::Relaxed), 7);
        let stack = 0u64;
        let base = registry.slots.as_ptr().addr();
        let garbage = [
            0,
            1,
            usize::MAX,
            usize::MAX - 63,
            std::ptr::from_ref(&stack).addr(),
            live.addr() + 1,
            live.addr() + 8,
            live.addr() + 64,
            base - 64,
            base + 16 * 64,
        ];
        for address in garbage {
            let refusals = [
                registry.acquire(handle(address)).err(),
                registry.close(handle(address)).err(),
            ];
            for error in refusals {
                let error = error.unwrap_or_else(|| panic!("{address:#x} passed for a communicator"));
                assert_eq!(error.code, Code::InvalidArgument, "{error}");
                let names = if address == 0 {
                    "NULL".into()
                } else {
                    format!("{address:#x}")
                };
                assert!(error.text.contains(&names), "{error}");
            }
            assert!(registry.acquire_closing(handle(address)).is_none());
        }
    }

    #[test]
    fn a_closed_handle_is_refused_at_once_and_freed_when_its_calls_left() {
        let registry = Registry::<Probe>::new(4).unwrap();
        let drops = Arc::default();
        let raw = registry.insert(probe(1, &drops)).unwrap();
        let user = registry.acquire(raw).unwrap();
        let closing = registry.close(raw).unwrap();
        assert_eq!(closing.users(), 1);
        assert!(registry.acquire(raw).err().unwrap().text.contains("already destroyed"));
        assert!(registry.close(raw).err().unwrap().text.contains("already destroyed"));
        assert!(registry.acquire_closing(raw).is_some());
        assert_eq!(user.number.load(Ordering::Relaxed), 1);
        drop(user);
        assert!(closing.finish(LIMIT));
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert!(registry.acquire(raw).err().unwrap().text.contains("already destroyed"));
        assert!(registry.acquire_closing(raw).is_none());
    }

    #[test]
    fn a_call_that_never_leaves_keeps_the_memory() {
        let registry = Registry::<Probe>::new(1).unwrap();
        let drops = Arc::default();
        let raw = registry.insert(probe(1, &drops)).unwrap();
        let user = registry.acquire(raw).unwrap();
        assert!(!registry.close(raw).unwrap().finish(Duration::ZERO));
        assert_eq!(user.number.load(Ordering::Relaxed), 1);
        drop(user);
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        assert_eq!(registry.insert(probe(2, &drops)).unwrap_err().code, Code::SystemError);
    }

    #[test]
    fn slots_come_back_in_rotation() {
        const SLOTS: usize = 8;
        let registry = Registry::<Probe>::new(SLOTS).unwrap();
        let drops: Arc<AtomicUsize> = Arc::default();
        let mut seen = Vec::new();
        for number in 0..SLOTS {
            let raw = registry.insert(probe(number as u64, &drops)).unwrap();
            assert!(
                !seen.contains(&raw.addr()),
                "{raw:?} was handed out again after {number} handles"
            );
            seen.push(raw.addr());
            assert!(registry.close(raw).unwrap().finish(LIMIT));
        }
        let again: Vec<usize> = (0..SLOTS)
            .map(|_| registry.insert(probe(0, &drops)).unwrap().addr())
            .collect();
        assert_eq!(again, seen);
        assert!(registry
            .insert(probe(0, &drops))
            .unwrap_err()
            .text
            .contains("8 communicators"));
    }

    #[test]
    fn calls_race_with_the_end_and_never_see_freed_memory() {
        const ROUNDS: u64 = 300;
        let registry = Arc::new(Registry::<Probe>::new(32).unwrap());
        let drops: Arc<AtomicUsize> = Arc::default();
        let current = Arc::new(AtomicUsize::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..3)
            .map(|_| {
                let (registry, current, stop) = (Arc::clone(&registry), Arc::clone(&current), Arc::clone(&stop));
                std::thread::spawn(move || {
                    let mut entered = 0;
                    while !stop.load(Ordering::Relaxed) {
                        if let Ok(user) = registry.acquire(handle(current.load(Ordering::Relaxed))) {
                            let number = user.number.load(Ordering::Relaxed);
                            std::thread::yield_now();
                            assert_eq!(user.number.load(Ordering::Relaxed), number);
                            assert!(number < ROUNDS);
                            entered += 1;
                        }
                    }
                    entered
                })
            })
            .collect();
        for number in 0..ROUNDS {
            let raw = registry.insert(probe(number, &drops)).unwrap();
            current.store(raw.addr(), Ordering::Relaxed);
            for _ in 0..8 {
                std::thread::yield_now();
            }
            let claims: Vec<_> = (0..2)
                .map(|_| {
                    let (registry, address) = (Arc::clone(&registry), raw.addr());
                    std::thread::spawn(move || match registry.close(handle(address)) {
                        Ok(closing) => closing.finish(LIMIT),
                        Err(_) => registry.acquire_closing(handle(address)).is_some_and(|user| {
                            assert!(user.leave_and_wait(LIMIT));
                            false
                        }),
                    })
                })
                .collect();
            let ended = claims
                .into_iter()
                .map(|claim| claim.join().unwrap())
                .filter(|ended| *ended)
                .count();
            assert_eq!(ended, 1);
        }
        stop.store(true, Ordering::Relaxed);
        let entered: u64 = callers.into_iter().map(|caller| caller.join().unwrap()).sum();
        assert_eq!(drops.load(Ordering::Relaxed) as u64, ROUNDS);
        assert!(entered > 0);
    }
}
