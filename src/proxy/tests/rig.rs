//! Two ranks over loopback: rings, holds, and the part of the kernels, which a test's thread plays.

use crate::device::{host, Device, DeviceKind, Memory, Placement};
use crate::proxy::{serve_on, Client, Connection, Direction, Fault, Hold, Names, Ring, RingGeometry};
use crate::transport::net::tests::{pairs, TIMEOUT};
use crate::transport::net::{SlotNote, Socket};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicU8, Ordering};
use std::sync::Arc;
use std::time::Instant;

pub type Key = (DeviceKind, [u8; 16]);

/// A device of its own, hence a thread of its own.
pub fn fresh_key() -> Key {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    (DeviceKind::Cuda, [NEXT.fetch_add(1, Ordering::Relaxed); 16])
}

/// Waits for something that must happen.
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < TIMEOUT, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

/// A kernel's side of one ring.
pub struct Kernel {
    memory: Arc<Memory>,
    geometry: RingGeometry,
    channel: usize,
    pub position: u64,
}

impl Kernel {
    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the geometry's counters, which are aligned and inside the memory.
        unsafe { &*self.memory.address.add(at + self.channel * 128).cast() }
    }

    fn tail(&self) -> &AtomicU64 {
        self.word(self.geometry.tails())
    }

    fn head(&self) -> &AtomicU64 {
        self.word(self.geometry.heads())
    }

    fn index(&self) -> usize {
        (self.position % self.geometry.slots as u64) as usize
    }

    fn slot(&self) -> *mut u8 {
        let slot = self.channel * self.geometry.slots + self.index();
        // SAFETY: inside the memory.
        unsafe {
            self.memory
                .address
                .add(self.geometry.slots_at() + slot * self.geometry.slot_bytes)
        }
    }

    fn note(&self) -> *mut SlotNote {
        let notes = self.memory.address.wrapping_add(self.geometry.notes());
        let notes: *mut SlotNote = notes.cast();
        notes.wrapping_add(self.channel * self.geometry.note_stride() + self.index())
    }

    pub fn may_send(&self) -> bool {
        self.head().load(Ordering::Acquire) + self.geometry.slots as u64 > self.position
    }

    pub fn may_receive(&self) -> bool {
        self.tail().load(Ordering::Acquire) > self.position
    }

    /// Fills the next slot, which is free.
    pub fn fill(&mut self, bytes: &[u8], ordinal: u64) {
        let note = SlotNote {
            bytes: bytes.len() as u32,
            step: 2,
            ordinal,
        };
        // SAFETY: the proxy leaves a slot alone that the tail has not passed.
        unsafe { self.slot().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.fill_with_note(note);
    }

    pub fn fill_with_note(&mut self, note: SlotNote) {
        // SAFETY: as above.
        unsafe { self.note().write(note) };
        self.position += 1;
        self.tail().store(self.position, Ordering::Release);
    }

    /// Takes what is in the next slot, which is filled.
    pub fn drain(&mut self) -> (SlotNote, Vec<u8>) {
        // SAFETY: the proxy leaves a slot alone that the tail has passed and the head has not.
        let (note, bytes) = unsafe {
            let note = self.note().read();
            (
                note,
                std::slice::from_raw_parts(self.slot(), note.bytes as usize).to_vec(),
            )
        };
        self.position += 1;
        self.head().store(self.position, Ordering::Release);
        (note, bytes)
    }

    pub fn send(&mut self, bytes: &[u8], ordinal: u64) {
        until("a slot is free", || self.may_send());
        self.fill(bytes, ordinal);
    }

    pub fn receive(&mut self) -> (SlotNote, Vec<u8>) {
        until("a slot is filled", || self.may_receive());
        self.drain()
    }

    /// Gives the next slot back unread.
    pub fn pass(&mut self) {
        self.position += 1;
        self.head().store(self.position, Ordering::Release);
    }

    /// How far the proxy is with what this kernel filled.
    pub fn sent(&self) -> u64 {
        self.head().load(Ordering::Acquire)
    }

    /// What no kernel does.
    pub fn set_tail(&mut self, tail: u64) {
        self.tail().store(tail, Ordering::Release);
    }
}

/// One rank, with connections in one direction.
pub struct End {
    pub hold: Option<Hold>,
    pub kernels: Vec<Kernel>,
    pub memory: Arc<Memory>,
    outstanding: Arc<AtomicBool>,
    pub faults: Arc<Mutex<Vec<Fault>>>,
}

impl End {
    /// Connections of `rank` with the other of two ranks.
    pub fn new(key: Key, rank: u32, direction: Direction, geometry: RingGeometry, sockets: Vec<Socket>) -> End {
        let device: Arc<dyn Device> = host::open(0);
        let memory = Arc::new(device.allocate(geometry.bytes(), Placement::Pinned).unwrap());
        let connections = sockets.into_iter().enumerate().map(|(channel, socket)| Connection {
            direction,
            ring: Ring::new(&memory, 0, geometry, channel).unwrap(),
            transfer: Box::new(socket),
            names: Names {
                rank,
                peer: 1 - rank,
                channel: channel as u32,
            },
        });
        let outstanding = Arc::new(AtomicBool::new(false));
        let faults: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let (asked, told) = (outstanding.clone(), faults.clone());
        let client = Client {
            outstanding: Box::new(move || asked.load(Ordering::Acquire)),
            fault: Box::new(move |fault| told.lock().push(fault)),
        };
        let hold = serve_on(key, connections.collect(), client).unwrap();
        let kernel = |channel| Kernel {
            memory: memory.clone(),
            geometry,
            channel,
            position: 0,
        };
        End {
            hold: Some(hold),
            kernels: (0..geometry.channels).map(kernel).collect(),
            memory,
            outstanding,
            faults,
        }
    }

    pub fn hold(&self) -> &Hold {
        self.hold.as_ref().unwrap()
    }

    pub fn launch(&self) {
        self.outstanding.store(true, Ordering::Release);
        self.hold().wake();
    }

    pub fn leave(&self) {
        self.outstanding.store(false, Ordering::Release);
    }

    pub fn no_faults(&self) {
        assert_eq!(*self.faults.lock(), []);
    }

    pub fn first_fault(&self) -> Fault {
        until("there is a fault", || !self.faults.lock().is_empty());
        self.faults.lock()[0].clone()
    }

    /// Waits until the thread sleeps without a limit: it has used no CPU for a while, which naps would.
    pub fn wait_for_sleep(&self) {
        let shared = self.hold().shared.clone();
        until("the thread sleeps", || {
            let before = cpu_ns(&shared);
            std::thread::sleep(std::time::Duration::from_millis(50));
            before.is_some() && before == cpu_ns(&shared)
        });
    }

    pub fn thread_id(&self) -> i32 {
        until("the thread runs", || self.hold().shared.thread_id().is_some());
        self.hold().shared.thread_id().unwrap()
    }
}

/// What the thread has used so far; None before it runs.
pub fn cpu_ns(shared: &super::super::thread::Shared) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", shared.thread_id()?)).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// A sending rank 0 and a receiving rank 1, with one channel a ring of the geometry.
pub fn link(keys: (Key, Key), geometry: RingGeometry) -> (End, End) {
    let (senders, receivers) = pairs(geometry.channels as u32).into_iter().unzip();
    (
        End::new(keys.0, 0, Direction::Send, geometry, senders),
        End::new(keys.1, 1, Direction::Receive, geometry, receivers),
    )
}

pub const GEOMETRY: RingGeometry = RingGeometry {
    channels: 1,
    slots: 4,
    slot_bytes: 4096,
};
