//! Links that are queue pairs of an HCA, resolved before any launch: kernels post to them (`NCCL_GPU_INITIATED=1`), or the
//! CPU proxy does (`proxied`).
//!
//! ```text
//! open      an HCA, memory for slots and counters, queue pairs  -> name, which all ranks are told
//! connect   peers attached, queue pairs connected, what kernels are told of them (`NetQueue`) written
//! ```
//!
//! A link has a queue pair for each channel at both ends. The sender's carries its slots and tails, the receiver's the
//! heads. `cuda/net/post.h` posts to them; nothing here runs between two launches but the HCA itself.
//!
//! The HCA is the software one. What it is asked for is what verbs and mlx5dv give for a card.

mod proxied;
mod queue;

pub use queue::NetQueue;

use crate::device::{Device, Memory, Placement};
use crate::error::{Error, Result};
use crate::proxy::{Direction, RingGeometry};
use crate::transport::hca::{access, CompletionQueue, Hca, Limits, QueueOptions, QueuePair, Registration};
use crate::transport::hca::{Awake, Piece, Ticket, Timeouts, Watch, FOR_EVER};
use crate::transport::net::hca::landing_bytes;
use crate::transport::{Address, Exchange, Limit};
use queue::{Named, Targets};
use serde::{Deserialize, Serialize};
use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A post takes one block or two; so many let a kernel run ahead of completions that nobody has read.
const QUEUE_BLOCKS: usize = 64;
/// As many as blocks, see `NetQueue` in `cuda/net/queue.h`.
const COMPLETIONS: usize = QUEUE_BLOCKS;
const BLOCK_BYTES: usize = 64;
const LINE: usize = 128;
const PAGE: usize = 4096;
/// How long a sender's queue pair lets a peer's that does not receive be silent: as long as a card with usual settings
/// retries. A receiver gives slots back to peers that need none any more, and may be gone: that is no failure. Of a peer
/// that was lost the session tells.
const SILENCE_NS: u64 = 10_000_000_000;

/// Who posts to the queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poster {
    Kernel,
    /// A CPU thread, between rings that kernels fill and drain.
    Cpu,
}

/// How large a link is in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub ring: RingGeometry,
    pub poster: Poster,
}

impl Geometry {
    /// Of one channel.
    fn channel_bytes(&self) -> usize {
        self.ring.slots * self.ring.slot_bytes
    }

    /// What the peer's requests write besides slots: a kernel's counters come first, a line each; the CPU's landing places
    /// stand behind the ring.
    fn words_at(&self) -> usize {
        match self.poster {
            Poster::Kernel => 0,
            Poster::Cpu => self.ring.bytes().next_multiple_of(PAGE),
        }
    }

    /// Of one channel.
    fn word_bytes(&self) -> usize {
        match self.poster {
            Poster::Kernel => LINE,
            Poster::Cpu => landing_bytes(self.ring.slots),
        }
    }

    fn slots_at(&self) -> usize {
        match self.poster {
            Poster::Kernel => (self.ring.channels * LINE).next_multiple_of(PAGE),
            Poster::Cpu => self.ring.slots_at(),
        }
    }

    fn bytes(&self) -> usize {
        let slots = self.slots_at() + self.ring.channels * self.channel_bytes();
        let words = self.words_at() + self.ring.channels * self.word_bytes();
        slots.max(words).next_multiple_of(PAGE)
    }
}

/// One direction of a link, as the peer is told: where its requests go.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct EndName {
    sends: bool,
    peer: u32,
    /// What the peer writes besides slots: heads if this end sends, else tails; or landing places.
    counters: u64,
    slots: u64,
    /// By channel.
    qps: Vec<u32>,
}

/// What a rank tells its peers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Name {
    ticket: Ticket,
    address: Address,
    key: u32,
    ends: Vec<EndName>,
}

/// One direction of a link.
struct End {
    direction: Direction,
    peer: u32,
    /// In `memory`.
    offset: usize,
    queues: Vec<(QueuePair, Arc<CompletionQueue>)>,
}

/// One direction of a link as kernels see it: channel 0's addresses.
pub struct Addresses {
    pub slots: *mut u8,
    /// Of what this rank receives.
    pub tail: *mut u64,
    /// Of what it sends.
    pub head: *mut u64,
    pub queues: *mut NetQueue,
}

/// A request that failed, before it is known what it was for.
pub struct FailedRequest {
    pub peer: u32,
    pub channel: u32,
    pub syndrome: u8,
    pub vendor: u8,
}

/// This rank's ends before they are connected.
pub struct Opened {
    links: Links,
    exchange: Exchange,
    name: Name,
}

/// This rank's ends of all links to other hosts.
pub struct Links {
    rank: u32,
    geometry: Geometry,
    // Queue pairs end before what their requests name.
    ends: Vec<End>,
    /// What requests are about, by end and channel.
    targets: Vec<Targets>,
    /// What kernels that post are told, likewise.
    queues: Option<Memory>,
    registration: Registration,
    memory: Arc<Piece>,
    hca: Arc<Hca>,
}

// SAFETY: the addresses in it are plain data; what lies there is read atomically.
unsafe impl Send for Links {}
// SAFETY: as above.
unsafe impl Sync for Links {}

impl Opened {
    /// `sends` and `recvs` are the peers on other hosts.
    pub fn open(
        device: &Arc<dyn Device>,
        rank: u32,
        sends: &[u32],
        recvs: &[u32],
        geometry: Geometry,
    ) -> Result<Opened> {
        let count = sends.len() + recvs.len();
        let queues = count * geometry.ring.channels;
        let queue_bytes = QUEUE_BLOCKS * BLOCK_BYTES + COMPLETIONS * BLOCK_BYTES + 3 * LINE;
        let hca = Hca::open(
            device,
            Limits {
                qps: queues,
                cqs: queues,
                regions: 2,
                memory_bytes: count * geometry.bytes() + queues * queue_bytes + PAGE,
            },
        )?;
        let domain = hca.domain();
        let memory = hca.allocate(count * geometry.bytes())?;
        let registration = hca.register(domain, &memory, access::LOCAL_WRITE | access::REMOTE_WRITE)?;
        let peers = sends.iter().map(|peer| (Direction::Send, *peer));
        let peers = peers.chain(recvs.iter().map(|peer| (Direction::Receive, *peer)));
        let options = QueueOptions {
            domain,
            send_blocks: QUEUE_BLOCKS,
            receives: 0,
            record_first: false,
        };
        let queue = |_| {
            let cq = CompletionQueue::create(&hca, COMPLETIONS, true)?;
            let qp = QueuePair::create(&hca, options, &cq, &cq)?;
            qp.init(access::REMOTE_WRITE)?;
            Ok((qp, cq))
        };
        let end = |(index, (direction, peer))| {
            Ok(End {
                direction,
                peer,
                offset: index * geometry.bytes(),
                queues: (0..geometry.ring.channels).map(queue).collect::<Result<_>>()?,
            })
        };
        let links = Links {
            rank,
            geometry,
            ends: peers.enumerate().map(end).collect::<Result<_>>()?,
            targets: Vec::new(),
            queues: match geometry.poster {
                Poster::Kernel => Some(
                    device
                        .clone()
                        .allocate(queues * size_of::<NetQueue>(), Placement::Device)?,
                ),
                Poster::Cpu => None,
            },
            registration,
            memory,
            hca,
        };
        let exchange = Exchange::open()?;
        let name = links.name(exchange.address().clone());
        Ok(Opened { links, exchange, name })
    }

    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Connects with all peers, which do the same meanwhile. `names` are those of all ranks.
    pub fn connect(self, device: &dyn Device, names: &[Option<Name>], limit: &Limit) -> Result<Links> {
        let Opened {
            mut links, exchange, ..
        } = self;
        let name_of = |peer: u32| {
            let name = names.get(peer as usize).and_then(Option::as_ref);
            name.ok_or_else(|| Error::internal(format!("rank {peer} has no HCA")))
        };
        let mut addresses = vec![None; names.len()];
        for end in &links.ends {
            let name = name_of(end.peer)?;
            if !name.ticket.is_of_this_process() {
                addresses[end.peer as usize] = Some(&name.address);
            }
        }
        let fds = exchange.run(links.rank as usize, &addresses, links.hca.descriptor(), limit)?;
        let (mut queues, mut all_targets) = (Vec::new(), Vec::new());
        for end in &links.ends {
            let name = name_of(end.peer)?;
            let sends = end.direction == Direction::Send;
            let found = name
                .ends
                .iter()
                .find(|other| other.peer == links.rank && other.sends != sends);
            let other = found.filter(|other| other.qps.len() == end.queues.len());
            let other = other.ok_or_else(|| Error::internal(format!("rank {} knows no such link", end.peer)))?;
            let fd = fds[end.peer as usize].as_ref().map(std::os::fd::AsFd::as_fd);
            let peer = links.hca.attach(&name.ticket, fd)?;
            for (channel, ((qp, cq), number)) in end.queues.iter().zip(&other.qps).enumerate() {
                qp.connect(peer, *number)?;
                let silence_ns = if sends { SILENCE_NS } else { FOR_EVER };
                qp.start(Timeouts {
                    silence_ns,
                    no_receive_ns: silence_ns,
                })?;
                let targets = links.targets(end, channel, other, name.key);
                queues.push(NetQueue::new(qp.kernel_place(), cq.kernel_place(), targets));
                all_targets.push(targets);
            }
        }
        links.targets = all_targets;
        if let Some(memory) = &links.queues {
            device.write(memory, NetQueue::bytes(&queues))?;
        }
        Ok(links)
    }
}

impl Links {
    fn name(&self, address: Address) -> Name {
        let end = |end: &End| {
            let base = self.memory.address() as u64 + end.offset as u64;
            EndName {
                sends: end.direction == Direction::Send,
                peer: end.peer,
                counters: base + self.geometry.words_at() as u64,
                slots: base + self.geometry.slots_at() as u64,
                qps: end.queues.iter().map(|(qp, _)| qp.number()).collect(),
            }
        };
        Name {
            ticket: self.hca.ticket(),
            address,
            key: self.registration.key(),
            ends: self.ends.iter().map(end).collect(),
        }
    }

    fn targets(&self, end: &End, channel: usize, other: &EndName, key: u32) -> Targets {
        let slots = (channel * self.geometry.channel_bytes()) as u64;
        let own = self.memory.address() as u64 + (end.offset + self.geometry.slots_at()) as u64;
        Targets {
            local_slots: Named {
                address: own + slots,
                key: self.registration.key(),
            },
            remote_slots: Named {
                address: other.slots + slots,
                key,
            },
            counter: Named {
                address: other.counters + (channel * self.geometry.word_bytes()) as u64,
                key,
            },
        }
    }

    /// Where kernels post; None where no link leads there.
    pub fn addresses(&self, direction: Direction, peer: u32) -> Option<Addresses> {
        let index = self
            .ends
            .iter()
            .position(|end| end.direction == direction && end.peer == peer)?;
        let base = self.memory.kernel_address().wrapping_add(self.ends[index].offset);
        let (counters, none) = (base.cast::<u64>(), std::ptr::null_mut());
        let (tail, head) = match direction {
            Direction::Send => (none, counters),
            Direction::Receive => (counters, none),
        };
        let queues = self.queues.as_ref()?.address.cast::<NetQueue>();
        Some(Addresses {
            slots: base.wrapping_add(self.geometry.slots_at()),
            tail,
            head,
            queues: queues.wrapping_add(index * self.geometry.ring.channels),
        })
    }

    /// The HCA works while `outstanding` says so, and for a while after it was woken.
    pub fn watch(&self, outstanding: impl Fn() -> bool + Send + 'static) -> Watch {
        self.hca.watch(outstanding)
    }

    pub fn keep_awake(&self) -> Awake {
        self.hca.keep_awake()
    }

    pub fn wake(&self) {
        self.hca.wake();
    }

    /// Whether everything that kernels have sent is with the peers. Not while kernels run.
    pub fn is_drained(&self) -> bool {
        let mut sends = self.ends.iter().filter(|end| end.direction == Direction::Send);
        sends.all(|end| end.queues.iter().all(|(qp, cq)| is_drained(qp, cq)))
    }

    /// The first error, if any request failed, whether or not a kernel waits for it.
    pub fn failure(&self) -> Option<FailedRequest> {
        self.each_queue().find_map(|(peer, channel, cq)| {
            let found = failures(cq).min_by_key(|(syndrome, _)| *syndrome == crate::wire::mlx5::syndrome::WR_FLUSH);
            found.map(|(syndrome, vendor)| FailedRequest {
                peer,
                channel,
                syndrome,
                vendor,
            })
        })
    }

    #[cfg(test)]
    pub(crate) fn queue_pair(&self, direction: Direction, channel: usize) -> Option<&QueuePair> {
        let end = self.ends.iter().find(|end| end.direction == direction)?;
        end.queues.get(channel).map(|(qp, _)| qp)
    }

    #[cfg(test)]
    pub(crate) fn hca(&self) -> &Hca {
        &self.hca
    }

    fn each_queue(&self) -> impl Iterator<Item = (u32, u32, &CompletionQueue)> {
        self.ends.iter().flat_map(|end| {
            let queues = end.queues.iter().zip(0..);
            queues.map(|((_, cq), channel)| (end.peer, channel, &**cq))
        })
    }
}

/// The words of a queue in the HCA's memory, which kernels and the HCA write.
fn word(address: *mut u8) -> u64 {
    // SAFETY: 8 bytes on a multiple of 8 within a queue of a live HCA.
    unsafe { AtomicU64::from_ptr(address.cast()) }.load(Ordering::Acquire)
}

/// The last words of all completions in the ring.
fn last_words(cq: &CompletionQueue) -> impl Iterator<Item = (*mut u8, u64)> {
    let place = cq.place();
    (0..place.entries).map(move |entry| {
        let completion = place.ring.wrapping_add(entry * BLOCK_BYTES);
        (completion, word(completion.wrapping_add(56)))
    })
}

/// A completion's kind: 13 and 14 are errors, 15 none yet.
fn kind(last: u64) -> u8 {
    (last >> 60) as u8
}

fn is_drained(qp: &QueuePair, cq: &CompletionQueue) -> bool {
    let place = qp.place();
    if word(place.doorbell) == 0 {
        return true;
    }
    let posted = u32::from_be((word(place.record) >> 32) as u32) as u16;
    // A post's last request asks for a completion, which has its index. The ring is too short to hold one of a lap before.
    last_words(cq).any(|(_, last)| kind(last) == 0 && u16::from_be((last >> 32) as u16) == posted.wrapping_sub(1))
}

/// Syndrome and vendor's syndrome of all errors in the ring.
fn failures(cq: &CompletionQueue) -> impl Iterator<Item = (u8, u8)> {
    last_words(cq)
        .filter(|(_, last)| matches!(kind(*last), 13 | 14))
        .map(|(completion, _)| {
            let syndromes = word(completion.wrapping_add(48));
            ((syndromes >> 56) as u8, (syndromes >> 48) as u8)
        })
}
