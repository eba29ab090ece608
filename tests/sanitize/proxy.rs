//! Two ranks that send to each other through the proxy, one thread a rank in the kernels' place.

use nccl::bootstrap::Cancel;
use nccl::device::{host, Device, Memory, Placement};
use nccl::proxy::{serve, Client, Connection, Direction, Hold, Names, Ring, RingGeometry};
use nccl::transport::net::{Listener, Name, Purpose, SlotNote};
use nccl::transport::Limit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const CHANNELS: u32 = 2;
const GEOMETRY: RingGeometry = RingGeometry {
    channels: CHANNELS as usize,
    slots: 2,
    slot_bytes: 4096,
};
const TIMEOUT: Duration = Duration::from_secs(60);

/// One direction of a rank's link: the kernel's view, of all channels.
struct Side(Arc<Memory>);

impl Side {
    fn new(device: &Arc<dyn Device>) -> Side {
        let memory = device.clone().allocate(GEOMETRY.bytes(), Placement::Pinned);
        Side(Arc::new(memory.expect("memory")))
    }

    fn word(&self, at: usize, channel: usize) -> &AtomicU64 {
        // SAFETY: a counter of the geometry, inside the memory.
        unsafe { &*self.0.address.add(at + channel * 128).cast() }
    }

    fn slot(&self, channel: usize, position: u64) -> *mut u8 {
        let slot = channel * GEOMETRY.slots + position as usize % GEOMETRY.slots;
        self.0
            .address
            .wrapping_add(GEOMETRY.slots_at() + slot * GEOMETRY.slot_bytes)
    }

    fn note(&self, channel: usize, position: u64) -> *mut SlotNote {
        let notes: *mut SlotNote = self.0.address.wrapping_add(GEOMETRY.notes()).cast();
        notes.wrapping_add(channel * GEOMETRY.note_stride() + position as usize % GEOMETRY.slots)
    }

    fn connections(
        &self,
        rank: u32,
        direction: Direction,
        sockets: Vec<nccl::transport::net::Socket>,
    ) -> Vec<Connection> {
        let connection = |(channel, socket)| Connection {
            direction,
            ring: Ring::new(&self.0, 0, GEOMETRY, channel).expect("a ring"),
            transfer: Box::new(socket),
            names: Names {
                rank,
                peer: 1 - rank,
                channel: channel as u32,
            },
        };
        sockets.into_iter().enumerate().map(connection).collect()
    }
}

struct Rank {
    send: Side,
    receive: Side,
    outstanding: Arc<AtomicBool>,
    faulted: Arc<AtomicBool>,
    hold: Hold,
}

fn join(rank: u32, listener: Listener, peer: Name) -> Rank {
    let purpose = |sender: u32, channel| Purpose {
        sender,
        receiver: 1 - sender,
        channel,
    };
    let connects: Vec<_> = (0..CHANNELS)
        .map(|channel| (peer.clone(), purpose(rank, channel)))
        .collect();
    let expects: Vec<_> = (0..CHANNELS).map(|channel| purpose(1 - rank, channel)).collect();
    let cancel = Cancel::default();
    let limit = Limit {
        timeout: TIMEOUT,
        cancel: &cancel,
    };
    let made = listener.establish(&connects, &expects, &limit).expect("connections");
    let device: Arc<dyn Device> = host::open(0);
    let (send, receive) = (Side::new(&device), Side::new(&device));
    let mut connections = send.connections(rank, Direction::Send, made.connected);
    connections.extend(receive.connections(rank, Direction::Receive, made.accepted));
    let (outstanding, faulted): (Arc<AtomicBool>, Arc<AtomicBool>) = Default::default();
    let (asked, told) = (outstanding.clone(), faulted.clone());
    let client = Client {
        outstanding: Box::new(move || asked.load(Ordering::Acquire)),
        fault: Box::new(move |fault| {
            println!("{}", fault.error());
            told.store(true, Ordering::Release);
        }),
    };
    let hold = serve(&device, connections, client).expect("a hold");
    Rank {
        send,
        receive,
        outstanding,
        faulted,
        hold,
    }
}

/// Sends and receives `count` chunks a channel; whether all were right.
fn operation(rank: &Rank, begin: u64, count: u64) -> bool {
    rank.outstanding.store(true, Ordering::Release);
    rank.hold.wake();
    let mut right = true;
    let (mut sent, mut came) = ([begin; CHANNELS as usize], [begin; CHANNELS as usize]);
    let begun = Instant::now();
    while came.iter().chain(&sent).any(|position| *position < begin + count) {
        for channel in 0..CHANNELS as usize {
            let (send, receive) = (&rank.send, &rank.receive);
            let position = sent[channel];
            let head = send.word(GEOMETRY.heads(), channel).load(Ordering::Acquire);
            if position < begin + count && head + GEOMETRY.slots as u64 > position {
                let note = SlotNote {
                    bytes: 8,
                    step: 0,
                    ordinal: begin,
                };
                // SAFETY: inside the memory; the proxy leaves a slot alone that the tail has not passed.
                unsafe {
                    send.slot(channel, position).cast::<u64>().write(position * 3);
                    send.note(channel, position).write(note);
                }
                sent[channel] += 1;
                send.word(GEOMETRY.tails(), channel)
                    .store(position + 1, Ordering::Release);
            }
            let position = came[channel];
            let tail = receive.word(GEOMETRY.tails(), channel).load(Ordering::Acquire);
            // The peer may be an operation ahead.
            if position < begin + count && tail > position {
                // SAFETY: inside the memory; the proxy leaves a slot alone that the tail has passed and the head has not.
                let (value, note) = unsafe {
                    let value = receive.slot(channel, position).cast::<u64>().read();
                    (value, receive.note(channel, position).read())
                };
                right &= value == position * 3 && note.bytes == 8 && note.ordinal == begin;
                came[channel] += 1;
                receive
                    .word(GEOMETRY.heads(), channel)
                    .store(position + 1, Ordering::Release);
            }
        }
        if begun.elapsed() > TIMEOUT || rank.faulted.load(Ordering::Acquire) {
            return false;
        }
        thread::yield_now();
    }
    rank.outstanding.store(false, Ordering::Release);
    right
}

/// A communicator from its making to its end.
pub fn exchange(seed: u64) -> bool {
    let secret = [seed as u8; 32];
    let (listeners, names): (Vec<_>, Vec<_>) = (0..2).map(|_| Listener::open(secret).expect("a listener")).unzip();
    let body = |(rank, listener): (usize, Listener)| {
        let peer = names[1 - rank].clone();
        thread::spawn(move || {
            let rank = join(rank as u32, listener, peer);
            let counts = [1, 50, 3, 200];
            let mut begin = 0;
            let mut right = true;
            for count in counts {
                right &= operation(&rank, begin, count + seed);
                begin += count + seed;
            }
            let drained = rank.hold.drain(Instant::now() + TIMEOUT, &Cancel::default());
            let faulted = rank.faulted.load(Ordering::Acquire);
            if !right || faulted || drained.is_err() {
                println!("right: {right}, faulted: {faulted}, drained: {drained:?}");
            }
            right && !faulted && drained.is_ok()
        })
    };
    let threads: Vec<_> = listeners.into_iter().enumerate().map(body).collect();
    threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank's thread"))
        .fold(true, |all, right| all & right)
}
