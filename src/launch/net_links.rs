//! A rank's links to other hosts, and who drives them.
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
//!
//! Over an HCA (`initiated`) the rings lie in its memory, and a connection is a queue pair that the proxy posts to; each
//! post wakes the HCA's thread. Where kernels drive the network nothing of this stands between them and the HCA. The software HCA's
//! thread is woken and kept awake in the same way.

use super::{Engine, KernelMemory};
use crate::bootstrap::Cancel;
use crate::device::{Device, Memory, Placement};
use crate::error::{Error, Result};
use crate::initiated::{self, Links, Opened, Poster};
use crate::launch::layout::{Beside, Link, LinkKind, FLAG_STRIDE};
use crate::plan::Program;
use crate::proxy::{self, Awake, Client, Connection, Direction, Hold, Names, Ring, RingGeometry};
use crate::topology::Hosts;
use crate::transport::hca;
use crate::transport::net::{self, Listener, Purpose};
use crate::transport::Limit;
use crate::wire::mlx5::{syndrome, syndrome_text};
use parking_lot::Mutex;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a fault of the network does to the communicator. On the proxy's thread: it must neither wait nor call the driver.
pub type OnFault = Box<dyn Fn(Error) + Send>;

/// Regions of memory begin at multiples of this.
const REGION_ALIGNMENT: usize = 4096;

/// The ranks of other hosts that a rank's program sends to and receives from.
#[derive(Default)]
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
pub(super) enum NetLinks {
    Proxied(ProxyLinks),
    Initiated(Arc<Links>),
}

impl NetLinks {
    /// None where the peer is on this host.
    pub(super) fn link(&self, direction: Direction, peer: u32) -> Option<Link> {
        match self {
            NetLinks::Proxied(links) => links.link(direction, peer),
            NetLinks::Initiated(links) => links.addresses(direction, peer).map(|addresses| Link {
                slots: addresses.slots,
                tail: addresses.tail,
                head: addresses.head,
                beside: Beside {
                    queues: addresses.queues,
                },
                peer,
                kind: LinkKind::Hca,
            }),
        }
    }

    /// What the links' addresses point into.
    pub(super) fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        match self {
            NetLinks::Proxied(links) => match &links.memory {
                RingMemory::Pinned { memory, .. } => memory.clone(),
                RingMemory::Hca(links) => links.clone(),
            },
            NetLinks::Initiated(links) => links.clone(),
        }
    }

    /// Links that the CPU proxy drives: connects with all peers, which do the same meanwhile. `names` are the ranks'
    /// listeners.
    pub(super) fn establish(
        device: &Arc<dyn Device>,
        crossings: Crossings,
        geometry: RingGeometry,
        listener: Listener,
        names: &[Option<net::Name>],
        limit: &Limit,
    ) -> Result<NetLinks> {
        ProxyLinks::establish(device, crossings, geometry, listener, names, limit).map(NetLinks::Proxied)
    }

    /// Links over an HCA that were connected, for whoever posts there.
    pub(super) fn over_hca(links: Arc<Links>, geometry: RingGeometry, poster: Poster) -> Result<NetLinks> {
        Ok(match poster {
            Poster::Kernel => NetLinks::Initiated(links),
            Poster::Cpu => NetLinks::Proxied(ProxyLinks {
                geometry,
                connections: links.connections()?,
                memory: RingMemory::Hca(links),
            }),
        })
    }

    /// Links over an HCA, before they are connected.
    pub(super) fn open_hca(
        device: &Arc<dyn Device>,
        crossings: &Crossings,
        ring: RingGeometry,
        poster: Poster,
    ) -> Result<Opened> {
        let geometry = initiated::Geometry { ring, poster };
        Opened::open(device, crossings.rank, &crossings.sends, &crossings.recvs, geometry)
    }
}

/// Links that the CPU proxy drives.
pub(super) struct ProxyLinks {
    geometry: RingGeometry,
    memory: RingMemory,
    connections: Vec<Connection>,
}

/// Where the rings of all links lie.
enum RingMemory {
    /// A region for each direction of a link.
    Pinned { memory: Arc<Memory>, crossings: Crossings },
    /// The HCA's, which it reads and writes itself.
    Hca(Arc<Links>),
}

impl RingMemory {
    /// As kernels see it; None where no link leads there.
    fn region(&self, direction: Direction, peer: u32, geometry: RingGeometry) -> Option<*mut u8> {
        match self {
            RingMemory::Pinned { memory, crossings } => {
                let region = crossings.region(direction, peer)?;
                Some(memory.address.wrapping_add(region * region_bytes(geometry)))
            }
            RingMemory::Hca(links) => links.ring(direction, peer),
        }
    }
}

impl ProxyLinks {
    fn establish(
        device: &Arc<dyn Device>,
        crossings: Crossings,
        geometry: RingGeometry,
        listener: Listener,
        names: &[Option<net::Name>],
        limit: &Limit,
    ) -> Result<ProxyLinks> {
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
        let memory = Arc::new(memory);
        let connection = |direction, peer, channel, socket: net::Socket| -> Result<Connection> {
            let region = crossings.region(direction, peer).unwrap_or_default();
            let offset = region * region_bytes(geometry);
            Ok(Connection {
                direction,
                ring: Ring::new(&memory, offset, geometry, channel as usize)?,
                transfer: Box::new(socket),
                names: Names { rank, peer, channel },
            })
        };
        let mut connections = Vec::new();
        let established = listener.establish(&connects, &expects, limit)?;
        for ((_, purpose), socket) in connects.iter().zip(established.connected) {
            connections.push(connection(Direction::Send, purpose.receiver, purpose.channel, socket)?);
        }
        for (purpose, socket) in expects.iter().zip(established.accepted) {
            connections.push(connection(Direction::Receive, purpose.sender, purpose.channel, socket)?);
        }
        Ok(ProxyLinks {
            geometry,
            memory: RingMemory::Pinned { memory, crossings },
            connections,
        })
    }

    fn link(&self, direction: Direction, peer: u32) -> Option<Link> {
        let base = self.memory.region(direction, peer, self.geometry)?;
        Some(Link {
            slots: base.wrapping_add(self.geometry.slots_at()),
            tail: base.wrapping_add(self.geometry.tails()).cast(),
            head: base.wrapping_add(self.geometry.heads()).cast(),
            beside: Beside {
                notes: base.wrapping_add(self.geometry.notes()).cast(),
            },
            peer,
            kind: LinkKind::Proxy,
        })
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

/// Who serves one rank's links to other hosts.
pub(super) enum Network {
    Proxy {
        hold: Hold,
        /// From the first capture on.
        awake: Mutex<Option<Awake>>,
    },
    Hca {
        watch: hca::Watch,
        awake: Mutex<Option<hca::Awake>>,
        links: Arc<Links>,
    },
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
        Ok(match links {
            NetLinks::Proxied(links) => {
                let client = Client {
                    outstanding: Box::new(outstanding),
                    fault: Box::new(move |fault| on_fault(fault.error())),
                };
                Network::Proxy {
                    hold: proxy::serve(device, links.connections, client)?,
                    awake: Mutex::default(),
                }
            }
            // Whose faults kernels find, and `Engine::take_fault`.
            NetLinks::Initiated(links) => Network::Hca {
                watch: links.watch(outstanding),
                awake: Mutex::default(),
                links,
            },
        })
    }

    fn wake(&self) {
        match self {
            Network::Proxy { hold, .. } => hold.wake(),
            Network::Hca { watch, .. } => watch.wake(),
        }
    }

    fn stay_awake(&self) {
        match self {
            Network::Proxy { hold, awake } => {
                awake.lock().get_or_insert_with(|| hold.keep_awake());
            }
            Network::Hca { links, awake, .. } => {
                awake.lock().get_or_insert_with(|| links.keep_awake());
            }
        }
    }

    fn let_sleep(&self) {
        match self {
            Network::Proxy { awake, .. } => drop(awake.lock().take()),
            Network::Hca { awake, .. } => drop(awake.lock().take()),
        }
    }

    /// Whether what was sent is on its way; looks for so long.
    fn drain(&self, interval: Duration, cancel: &Cancel) -> Result<bool> {
        let deadline = Instant::now() + interval;
        match self {
            Network::Proxy { hold, .. } => match hold.drain(deadline, cancel) {
                Err(_) if Instant::now() >= deadline && !cancel.is_set() => Ok(false),
                outcome => outcome.map(|()| true),
            },
            Network::Hca { links, .. } => {
                links.wake();
                while !links.is_drained() {
                    if cancel.is_set() {
                        return Err(Error::usage("the call was ended by ncclCommAbort"));
                    }
                    if Instant::now() >= deadline {
                        return Ok(false);
                    }
                    std::thread::sleep(Duration::from_micros(50));
                }
                Ok(true)
            }
        }
    }
}

/// What failed of this rank's requests, as kernels find it or the CPU.
struct FailedRequest {
    peer: u32,
    channel: u32,
    syndrome: u8,
    vendor: u8,
    /// Operation and step, where a kernel waited.
    seen: Option<(u64, u32)>,
}

impl FailedRequest {
    fn error(&self, rank: u32, place: &str) -> Error {
        let FailedRequest {
            peer,
            channel,
            syndrome,
            vendor,
            ..
        } = self;
        let seen = match self.seen {
            Some((operation, step)) => format!(", seen in operation {operation}, step {step}"),
            None => String::new(),
        };
        let text = format!(
            "rank {rank}: a work request to rank {peer} ({place}) failed on channel {channel}{seen}: syndrome {syndrome:#04x}, \
             vendor syndrome {vendor:#04x}: {}",
            syndrome_text(*syndrome)
        );
        match *syndrome {
            syndrome::LOCAL_LENGTH | syndrome::LOCAL_QP_OP | syndrome::LOCAL_PROTECTION | 0x11 => Error::system(text),
            _ => Error::remote(text),
        }
    }
}

impl Engine {
    /// Before `launches` kernels are put into streams that are not under capture.
    pub(super) fn count_launches(&self, launches: u64) {
        self.launched.fetch_add(launches, Ordering::Release);
        if let Some(network) = &self.network {
            network.wake();
        }
    }

    /// They were not put there after all.
    pub(super) fn uncount_launches(&self, launches: u64) {
        self.launched.fetch_sub(launches, Ordering::Release);
    }

    /// The communicator is captured.
    pub(super) fn stay_awake(&self) {
        if let Some(network) = &self.network {
            network.stay_awake();
        }
    }

    /// After this rank's kernels have left, and before peers may find it gone: waits until what they sent is on its way.
    pub fn drain(&self, cancel: &Cancel, give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        /// How often `give_up` is asked.
        const INTERVAL: Duration = Duration::from_millis(100);
        let Some(network) = &self.network else { return Ok(()) };
        // No replay may be under way any more.
        network.let_sleep();
        while !network.drain(INTERVAL, cancel)? {
            if let Some(error) = self.failed_request() {
                return Err(error);
            }
            if let Some(error) = give_up() {
                return Err(error);
            }
        }
        Ok(())
    }

    /// A work request that failed: kernels record it where one waits, and the CPU sees it in the queues where none does.
    pub(super) fn failed_request(&self) -> Option<Error> {
        let Some(Network::Hca { links, .. }) = &self.network else {
            return None;
        };
        let record = &self.control().failure;
        let failed = match record.sequence.load(Ordering::Acquire) {
            0 => links.failure().map(|failed| FailedRequest {
                peer: failed.peer,
                channel: failed.channel,
                syndrome: failed.syndrome,
                vendor: failed.vendor,
                seen: None,
            })?,
            sequence => {
                let vendor = record.vendor.load(Ordering::Relaxed);
                FailedRequest {
                    peer: record.peer.load(Ordering::Relaxed),
                    channel: record.channel.load(Ordering::Relaxed),
                    syndrome: vendor as u8,
                    vendor: (vendor >> 8) as u8,
                    seen: Some((sequence - 1, record.step.load(Ordering::Relaxed))),
                }
            }
        };
        let place = self.places.get(failed.peer as usize).map_or("?", String::as_str);
        Some(failed.error(self.rank, place))
    }

    #[cfg(test)]
    pub(super) fn initiated(&self) -> Option<&Arc<Links>> {
        match &self.network {
            Some(Network::Hca { links, .. }) => Some(links),
            _ => None,
        }
    }
}
