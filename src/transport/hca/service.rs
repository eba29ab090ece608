//! The thread beside the CPU that runs engines: one a process and device, for all HCAs on it.
//!
//! It polls while something may be posted: while an `Awake` lives, what is watched says so, a work request waits for its
//! peer, or work was found a moment ago. It spins, then yields, then naps for 20 microseconds to 1 millisecond. Otherwise
//! it sleeps on a futex word until `wake`. Set-up changes tables while every engine of the process pauses, since the
//! engine of an HCA also looks at its peers'.

use super::tables::{Engine, InjectedFault, View};
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use crate::sys::thread::{self, Thread};
use parking_lot::{Mutex, MutexGuard};
use rustix::thread::futex::{self, Flags};
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

extern "C" {
    /// `cuda/hca/host.cpp`; the answer is of `WORKED` and `WAITING`.
    fn ossicle_hca_step(engine: *const Engine) -> u32;
}

/// Something was done; a work request has to wait, so that further steps are needed.
const WORKED: u32 = 1;
const WAITING: u32 = 2;

/// Steps between two looks at whether set-up waits.
const STEPS_A_TURN: u32 = 64;
const SPINS: u32 = 64;
const YIELDS_FOR: Duration = Duration::from_micros(200);
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// After work the thread polls on for so long by itself.
const LINGERS: Duration = Duration::from_millis(10);

/// What one HCA's engine is given. Changed in a pause alone.
pub(super) struct Tables {
    pub views: Vec<View>,
    pub faults: Vec<InjectedFault>,
    /// What the views point into.
    pub kept: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the pointers are into memory that `kept` keeps, which every thread may use as the engine does.
unsafe impl Send for Tables {}

impl Tables {
    fn step(&mut self) -> u32 {
        let engine = Engine {
            view: self.views.as_mut_ptr(),
            fault: self.faults.as_mut_ptr(),
            views: self.views.len() as u32,
            faults: self.faults.len() as u32,
        };
        // SAFETY: views and faults are live; `kept` keeps what they point into, and the lock that the caller holds keeps
        // set-up away from the tables in the segments.
        unsafe { ossicle_hca_step(&engine) }
    }
}

type Watched = Box<dyn Fn() -> bool + Send>;

#[derive(Default)]
struct Engines {
    tables: HashMap<u64, Tables>,
    watched: HashMap<u64, Watched>,
    next: u64,
}

#[derive(Default)]
struct Shared {
    engines: Mutex<Engines>,
    /// Who wants to change tables.
    waiting: AtomicU32,
    /// Counts calls of `wake`.
    pulse: AtomicU32,
    /// It sleeps on `pulse`, for a nap or until it is woken; `asleep` tells the latter.
    sleeping: AtomicBool,
    asleep: AtomicBool,
    awake: AtomicUsize,
    ended: AtomicBool,
}

pub(super) struct Service {
    shared: Arc<Shared>,
    thread: Option<Thread>,
    process: u32,
}

/// The services of this process, by the device's uuid.
static SERVICES: ProcessLocal<Mutex<HashMap<[u8; 16], Weak<Service>>>> = ProcessLocal::new();

impl Service {
    /// The device's service, whose thread starts with the first HCA and ends with the last.
    pub(super) fn of(device: [u8; 16]) -> Result<Arc<Service>> {
        let mut services = SERVICES.get().lock();
        if let Some(service) = services.get(&device).and_then(Weak::upgrade) {
            return Ok(service);
        }
        let shared = Arc::new(Shared::default());
        let body = Arc::clone(&shared);
        let thread = thread::spawn(c"ossicle-hca", move || body.run())
            .map_err(|error| Error::system(format!("cannot start a thread for the software HCA: {error}")))?;
        let service = Arc::new(Service {
            shared,
            thread: Some(thread),
            process: std::process::id(),
        });
        services.retain(|_, service| service.strong_count() > 0);
        services.insert(device, Arc::downgrade(&service));
        Ok(service)
    }

    pub(super) fn add(&self, tables: Tables) -> u64 {
        self.shared.paused(|engines| {
            engines.next += 1;
            engines.tables.insert(engines.next, tables);
            engines.next
        })
    }

    pub(super) fn remove(&self, number: u64) {
        if self.is_of_parent() {
            return;
        }
        // What it kept goes after the pause.
        let _tables = self.shared.paused(|engines| engines.tables.remove(&number));
    }

    /// Changes the tables of one engine while none of the process runs.
    /// None in a forked child, which has no such thread.
    pub(super) fn change<R>(&self, number: u64, change: impl FnOnce(&mut Tables) -> R) -> Option<R> {
        let services = SERVICES.get().lock();
        let live: Vec<Arc<Service>> = services.values().filter_map(Weak::upgrade).collect();
        for service in &live {
            service.shared.waiting.fetch_add(1, Ordering::SeqCst);
        }
        let mut engines: Vec<MutexGuard<Engines>> = live.iter().map(|service| service.shared.engines.lock()).collect();
        let mine = live.iter().position(|service| std::ptr::eq(&**service, self));
        let tables = mine.and_then(|mine| engines[mine].tables.get_mut(&number));
        let result = tables.map(change);
        drop(engines);
        for service in &live {
            service.shared.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        // Before `live`, whose holds may be the last ones: the end of a service joins its thread.
        drop(services);
        result
    }

    /// In a forked child: there is no such thread, and its lock may be held for ever.
    pub(super) fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    /// The thread looks at the queues soon, and for a while.
    pub(super) fn wake(&self) {
        self.shared.wake();
    }

    /// Whether nobody polls: the thread sleeps until it is woken.
    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.shared.asleep.load(Ordering::SeqCst)
    }

    pub(super) fn keep_awake(self: &Arc<Service>) -> Awake {
        self.shared.awake.fetch_add(1, Ordering::SeqCst);
        self.shared.wake();
        Awake {
            service: Arc::clone(self),
        }
    }

    /// While `outstanding` says so the thread polls; it is asked often, and must neither wait nor allocate.
    pub(super) fn watch(self: &Arc<Service>, outstanding: impl Fn() -> bool + Send + 'static) -> Watch {
        let number = self.shared.paused(|engines| {
            engines.next += 1;
            engines.watched.insert(engines.next, Box::new(outstanding));
            engines.next
        });
        self.shared.wake();
        Watch {
            service: Arc::clone(self),
            number,
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.shared.wake();
        let Some(thread) = self.thread.take() else { return };
        match self.is_of_parent() {
            false => thread.join(),
            // Its id may be another's in the child.
            true => std::mem::forget(thread),
        }
    }
}

/// The thread polls while one lives.
pub struct Awake {
    service: Arc<Service>,
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.service.shared.awake.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What the thread watches while it lives.
pub struct Watch {
    service: Arc<Service>,
    number: u64,
}

impl Watch {
    /// After what is watched began to be outstanding.
    pub fn wake(&self) {
        self.service.wake();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.service.is_of_parent() {
            return;
        }
        let _watched = self
            .service
            .shared
            .paused(|engines| engines.watched.remove(&self.number));
    }
}

impl Shared {
    fn paused<R>(&self, change: impl FnOnce(&mut Engines) -> R) -> R {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let result = change(&mut self.engines.lock());
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn wake(&self) {
        self.pulse.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) {
            // It fails for a bad address only.
            let _ = futex::wake(&self.pulse, Flags::PRIVATE, 1);
        }
    }

    fn run(&self) {
        let mut seen = self.pulse.load(Ordering::SeqCst);
        let mut last_work = Instant::now();
        // A GPU tells the end of a kernel without a release, so its last doorbell may come a little after it.
        let mut last_need = last_work;
        let (mut idle_turns, mut nap) = (0u32, SHORTEST_NAP);
        while !self.ended.load(Ordering::SeqCst) {
            // Set-up is let in before the next turn; the lock alone would go to this thread again.
            while self.waiting.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            let (worked, outstanding) = self.turn();
            let pulse = self.pulse.load(Ordering::SeqCst);
            let now = Instant::now();
            if outstanding {
                last_need = now;
            }
            if worked || pulse != seen {
                seen = pulse;
                (idle_turns, nap) = (0, SHORTEST_NAP);
                (last_work, last_need) = (now, now);
                continue;
            }
            idle_turns += 1;
            if idle_turns < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let idle = last_work.elapsed();
            if idle < YIELDS_FOR {
                std::thread::yield_now();
                continue;
            }
            let may_sleep = last_need.elapsed() > LINGERS && self.awake.load(Ordering::SeqCst) == 0;
            self.nap(seen, if may_sleep { None } else { Some(nap) });
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }

    /// Sleeps until `wake` was called since `seen`, or for so long.
    fn nap(&self, seen: u32, limit: Option<Duration>) {
        self.sleeping.store(true, Ordering::SeqCst);
        self.asleep.store(limit.is_none(), Ordering::SeqCst);
        if !self.ended.load(Ordering::SeqCst) {
            let limit = limit.and_then(|limit| limit.try_into().ok());
            // Every way of returning is a wake-up: woken, no longer `seen`, a signal, late.
            let _ = futex::wait(&self.pulse, Flags::PRIVATE, seen, limit.as_ref());
        }
        self.asleep.store(false, Ordering::SeqCst);
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// A few steps of every engine; whether one had work, and whether more may come.
    fn turn(&self) -> (bool, bool) {
        let mut engines = self.engines.lock();
        // Before the doorbells: who is not outstanding any more has rung all that it will.
        let watched = engines.watched.values().any(|outstanding| outstanding());
        let mut all = 0;
        for _ in 0..STEPS_A_TURN {
            let found = engines
                .tables
                .values_mut()
                .fold(0, |found, tables| found | tables.step());
            all |= found;
            if found & WORKED == 0 || self.waiting.load(Ordering::Relaxed) > 0 {
                break;
            }
        }
        (all & WORKED != 0, watched || all & WAITING != 0)
    }
}
