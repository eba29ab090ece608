//! A rank's links to other hosts, and the CPU proxy's hold on them.
//!
//! ```text
//! kernel --> ring of slots and notes --> proxy --> connection --> proxy --> ring --> kernel
//!            (pinned, of this rank)                                (of the peer)
//! ```
//!
//! A link has one region of pinned memory for each direction, with a ring for each channel, and each ring a connection
//! of its own (`transport::net`). Kernels see such a link as one more link of slots. The proxy has to be awake when a
//! kernel fills its first slot: so a launch is counted before it is made, and then the proxy is woken, which looks at the
//! rings for as long as the count says that a kernel may run.
//!
//! Replays of graphs are not counted. From a communicator's first capture to its end the proxy does not sleep.

use super::{Engine, KernelMemory};
use crate::bootstrap::Cancel;
use crate::device::{Device, Memory, Placement};
use crate::error::{Error, Result};
use crate::launch::layout::FLAG_STRIDE;
use crate::plan::Program;
use crate::proxy::{self, Awake, Client, Connection, Direction, Hold, Names, Ring, RingGeometry};
use crate::topology::Hosts;
use crate::transport::net::{self, Listener, Purpose, SlotNote};
use crate::transport::Limit;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a fault of the network does to the communicator. On the proxy's thread: it must neither wait nor call the driver.
pub type OnFault = Box<dyn Fn(Error) + Send>;

/// Regions of memory begin at multiples of this.
const REGION_ALIGNMENT: usize = 4096;

/// The ranks of other hosts that a rank's program sends to and receives from.
pub(super) struct Crossings {
    rank: u32,
    sends: Vec<u32>,
    recvs: Vec<u32>,
}

impl Crossings {
    pub(super) fn of(rank: u32, program: &Program, hosts: &Hosts) -> Crossings {
        let elsewhere = |peers: &[u32]| {
            peers
                .iter()
                .copied()
                .filter(|peer| !hosts.together(rank, *peer))
                .collect()
        };
        Crossings {
            rank,
            sends: elsewhere(&program.sends),
            recvs: elsewhere(&program.recvs),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    /// Of region `index`: sends come first.
    fn region(&self, direction: Direction, peer: u32) -> Option<usize> {
        let place = |peers: &[u32]| peers.iter().position(|other| *other == peer);
        match direction {
            Direction::Send => place(&self.sends),
            Direction::Receive => place(&self.recvs).map(|place| self.sends.len() + place),
        }
    }
}

/// Connected links to other hosts.
pub(super) struct NetLinks {
    crossings: Crossings,
    geometry: RingGeometry,
    memory: Arc<Memory>,
    connections: Vec<Connection>,
}

/// One direction of a link as kernels see it: channel 0's addresses.
pub(super) struct Addresses {
    pub(super) slots: *mut u8,
    pub(super) tail: *mut u64,
    pub(super) head: *mut u64,
    pub(super) notes: *mut SlotNote,
}

impl NetLinks {
    /// Connects with all peers, which do the same meanwhile. `names` are the ranks' listeners.
    pub(super) fn establish(
        device: &Arc<dyn Device>,
        crossings: Crossings,
        geometry: RingGeometry,
        listener: Listener,
        names: &[Option<net::Name>],
        limit: &Limit,
    ) -> Result<NetLinks> {
        let channels = 0..geometry.channels as u32;
        let rank = crossings.rank;
        let mut connects = Vec::new();
        for (peer, channel) in pairs(&crossings.sends, &channels) {
            let name = names[peer as usize].clone();
            let name = name.ok_or_else(|| Error::internal(format!("rank {peer} takes no connections")))?;
            let (sender, receiver) = (rank, peer);
            connects.push((
                name,
                Purpose {
                    sender,
                    receiver,
                    channel,
                },
            ));
        }
        let expect = |(peer, channel)| Purpose {
            sender: peer,
            receiver: rank,
            channel,
        };
        let expects: Vec<Purpose> = pairs(&crossings.recvs, &channels).map(expect).collect();
        let regions = crossings.sends.len() + crossings.recvs.len();
        let memory = device
            .clone()
            .allocate(regions * region_bytes(geometry), Placement::Pinned)?;
        let mut links = NetLinks {
            crossings,
            geometry,
            memory: Arc::new(memory),
            connections: Vec::new(),
        };
        let established = listener.establish(&connects, &expects, limit)?;
        for ((_, purpose), socket) in connects.iter().zip(established.connected) {
            links.add(Direction::Send, purpose.receiver, purpose.channel, socket)?;
        }
        for (purpose, socket) in expects.iter().zip(established.accepted) {
            links.add(Direction::Receive, purpose.sender, purpose.channel, socket)?;
        }
        Ok(links)
    }

    fn add(&mut self, direction: Direction, peer: u32, channel: u32, socket: net::Socket) -> Result<()> {
        let region = self.crossings.region(direction, peer).unwrap_or_default();
        let offset = region * region_bytes(self.geometry);
        self.connections.push(Connection {
            direction,
            ring: Ring::new(&self.memory, offset, self.geometry, channel as usize)?,
            transfer: Box::new(socket),
            names: Names {
                rank: self.crossings.rank,
                peer,
                channel,
            },
        });
        Ok(())
    }

    /// None where the peer is on this host.
    pub(super) fn addresses(&self, direction: Direction, peer: u32) -> Option<Addresses> {
        let region = self.crossings.region(direction, peer)?;
        let base = self.memory.address.wrapping_add(region * region_bytes(self.geometry));
        Some(Addresses {
            slots: base.wrapping_add(self.geometry.slots_at()),
            tail: base.wrapping_add(self.geometry.tails()).cast(),
            head: base.wrapping_add(self.geometry.heads()).cast(),
            notes: base.wrapping_add(self.geometry.notes()).cast(),
        })
    }

    pub(super) fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory)
    }
}

/// Tails and heads of a region's channels lie as far apart as those of an inbox.
const _: () = assert!(FLAG_STRIDE * 8 == 128);

fn region_bytes(geometry: RingGeometry) -> usize {
    geometry.bytes().next_multiple_of(REGION_ALIGNMENT)
}

fn pairs<'a>(peers: &'a [u32], channels: &'a std::ops::Range<u32>) -> impl Iterator<Item = (u32, u32)> + 'a {
    peers
        .iter()
        .flat_map(|peer| channels.clone().map(move |channel| (*peer, channel)))
}

/// The proxy's service to one rank.
pub(super) struct Network {
    hold: Hold,
    /// From the first capture on.
    awake: Mutex<Option<Awake>>,
}

impl Network {
    pub(super) fn begin(
        device: &Arc<dyn Device>,
        links: NetLinks,
        memory: &Arc<KernelMemory>,
        launched: &Arc<AtomicU64>,
        on_fault: OnFault,
    ) -> Result<Network> {
        let (memory, launched) = (Arc::clone(memory), Arc::clone(launched));
        let outstanding = move || launched.load(Ordering::Acquire) > memory.control().left.load(Ordering::Acquire);
        let client = Client {
            outstanding: Box::new(outstanding),
            fault: Box::new(move |fault| on_fault(fault.error())),
        };
        Ok(Network {
            hold: proxy::serve(device, links.connections, client)?,
            awake: Mutex::default(),
        })
    }
}

impl Engine {
    /// Before `launches` kernels are put into streams that are not under capture.
    pub(super) fn count_launches(&self, launches: u64) {
        self.launched.fetch_add(launches, Ordering::Release);
        if let Some(network) = &self.network {
            network.hold.wake();
        }
    }

    /// They were not put there after all.
    pub(super) fn uncount_launches(&self, launches: u64) {
        self.launched.fetch_sub(launches, Ordering::Release);
    }

    /// The communicator is captured.
    pub(super) fn stay_awake(&self) {
        if let Some(network) = &self.network {
            network.awake.lock().get_or_insert_with(|| network.hold.keep_awake());
        }
    }

    /// After this rank's kernels have left, and before peers may find it gone: waits until what they sent is on its way.
    pub fn drain(&self, cancel: &Cancel, give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        /// How often `give_up` is asked.
        const INTERVAL: Duration = Duration::from_millis(100);
        let Some(network) = &self.network else { return Ok(()) };
        // No replay may be under way any more.
        drop(network.awake.lock().take());
        loop {
            let deadline = Instant::now() + INTERVAL;
            match network.hold.drain(deadline, cancel) {
                Err(_) if Instant::now() >= deadline && !cancel.is_set() => {}
                outcome => return outcome,
            }
            if let Some(error) = give_up() {
                return Err(error);
            }
        }
    }
}
