//! The ranks of each host open each other's inboxes.
//!
//! ```text
//! choose          the paths to try, from what the host's ranks said of themselves
//! for each path   create the own inbox; gather: its name, or why there is none
//!                 pass descriptors, open the neighbours' inboxes; gather: done, or why not
//! ```
//!
//! Every host has a path of its own. Every rank sees the outcome of all, so the ranks of a host go on with the same path
//! or try the next one together; those of a host that is done only take part in the gathers.

use super::{choose, net, Geometry, Inbox, Limit, Path, PeerInbox, Reach};
use crate::bootstrap::Descriptor;
use crate::device::{self, Device, DeviceKind, Sharing};
use crate::error::{Code, Error, Result};
use crate::topology::Hosts;
use crate::{info, warning};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;

/// The inboxes of the ranks of one host, as one of them holds them.
pub struct Links {
    /// By rank; None on other hosts.
    pub inboxes: Vec<Option<Arc<PeerInbox>>>,
    pub path: Path,
    pub reason: String,
    /// By rank: where it takes connections from other hosts, if it does.
    pub net: Vec<Option<net::Name>>,
}

/// Gives one rank's bytes to all ranks and all ranks' bytes to each, in rank order. An error ends the communicator.
pub type Gather<'a> = dyn Fn(Vec<u8>) -> Result<Vec<Vec<u8>>> + 'a;

/// A value, or code and sentence of the error instead of it, as ranks tell each other.
type Told<T> = std::result::Result<T, (i32, String)>;

pub(super) fn tell<T: Serialize>(outcome: &Result<T>) -> Result<Vec<u8>> {
    let told: Told<&T> = outcome
        .as_ref()
        .map_err(|error| (error.code as i32, error.text.clone()));
    serde_json::to_vec(&told).map_err(|error| Error::internal(format!("links between ranks: {error}")))
}

/// What `ranks` said, or the error of one: the first whose failure is no other rank's.
pub(super) fn hear<T: DeserializeOwned>(ranks: &[u32], told: &[Vec<u8>]) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(ranks.len());
    let mut failure: Option<Error> = None;
    for rank in ranks {
        let error = match serde_json::from_slice::<Told<T>>(&told[*rank as usize]) {
            Ok(Ok(value)) => {
                values.push(value);
                continue;
            }
            Ok(Err((code, text))) => Error::new(Code::from_raw(code).unwrap_or(Code::InternalError), text),
            Err(error) => Error::internal(format!("what it says of its links does not parse: {error}")),
        };
        if failure
            .as_ref()
            .is_none_or(|known| known.code == Code::RemoteError && error.code != Code::RemoteError)
        {
            failure = Some(error.within(format!("rank {rank}")));
        }
    }
    failure.map_or(Ok(values), Err)
}

/// What a rank says of itself at the beginning of an attempt.
#[derive(Serialize, Deserialize)]
struct Greeting {
    /// None where its host is done.
    inbox: Option<super::inbox::Name>,
    net: Option<net::Name>,
}

/// How far the ranks of a host have come; every rank knows it of every host.
struct Host<'a> {
    ranks: &'a [u32],
    /// The one that is tried, and those that come after it.
    paths: VecDeque<(Path, String)>,
    failed: Option<Error>,
    linked: bool,
}

impl Host<'_> {
    /// The path of the coming attempt.
    fn trying(&self) -> Option<Path> {
        self.paths.front().filter(|_| !self.linked).map(|(path, _)| *path)
    }

    /// Takes the outcome of an attempt, as `rank` learns of it.
    fn take(&mut self, rank: u32, outcome: Result<()>) {
        let Err(error) = outcome else {
            self.linked = true;
            return;
        };
        let before = self.paths.pop_front();
        if let (Some((before, _)), Some((path, reason))) = (before, self.paths.front_mut()) {
            *reason = format!("{} failed: {error}", before.name());
            // One line a host, and whoever asks for more has it from every rank there.
            match self.ranks.iter().position(|other| *other == rank) {
                Some(0) => warning!("links between the ranks: {reason}; {} is tried next", path.name()),
                Some(_) => info!(Init, "rank {rank}: {reason}; {} is tried next", path.name()),
                None => {}
            }
        }
        self.failed = Some(error);
    }
}

/// One rank's part in the making of links.
pub struct Linking<'a> {
    pub device: &'a Arc<dyn Device>,
    /// This one's place in `reach`, which has all ranks'.
    pub rank: u32,
    pub reach: &'a [Reach],
    pub hosts: &'a Hosts,
    pub geometry: Geometry,
    /// Where this rank takes connections from other hosts, if it does.
    pub net: Option<net::Name>,
    pub limit: &'a Limit<'a>,
    pub gather: &'a Gather<'a>,
}

impl Linking<'_> {
    /// Collective over `gather`.
    pub fn link(self) -> Result<Links> {
        let begin = |ranks| {
            let paths = choose(ranks, self.reach)?.into_iter();
            Ok(Host {
                ranks,
                paths: paths.map(|(path, reason)| (path, reason.to_owned())).collect(),
                failed: None,
                linked: false,
            })
        };
        let mut hosts: Vec<Host> = self.hosts.all().map(begin).collect::<Result<_>>()?;
        let own = self.hosts.host_of(self.rank);
        let mut net: Vec<Option<net::Name>> = vec![None; self.reach.len()];
        let mut inboxes: Vec<Option<Arc<PeerInbox>>> = vec![None; self.reach.len()];
        while hosts.iter().any(|host| !host.linked) {
            if let Some(lost) = hosts.iter_mut().find(|host| host.paths.is_empty()) {
                let untried = || Error::internal("no path between the ranks was tried");
                return Err(lost.failed.take().unwrap_or_else(untried));
            }
            let opened = self.attempt(&mut hosts, own, &mut net)?;
            for (peer, inbox) in hosts[own].ranks.iter().zip(opened) {
                inboxes[*peer as usize] = Some(inbox);
            }
        }
        let (path, reason) = hosts[own].paths.pop_front().unwrap_or((Path::P2p, String::new()));
        Ok(Links {
            inboxes,
            path,
            reason,
            net,
        })
    }

    /// One path of every host that is not linked yet. The inboxes of this rank's host, if that is linked now.
    fn attempt(&self, hosts: &mut [Host], own: usize, net: &mut [Option<net::Name>]) -> Result<Vec<Arc<PeerInbox>>> {
        let path = hosts[own].trying();
        let create = |path| {
            self.open_peers(path)?;
            Inbox::create(self.device, path, self.geometry)
        };
        let inbox = path.map(create).transpose();
        let mut held = Held::new(self.device.as_ref(), inbox.as_ref().ok().and_then(Option::as_ref));
        let greeting = inbox.as_ref().map_err(Error::clone).map(|inbox| Greeting {
            inbox: inbox.as_ref().map(|inbox| inbox.name().clone()),
            net: self.net.clone(),
        });
        let told = (self.gather)(tell(&greeting)?)?;
        let trying: Vec<usize> = (0..hosts.len()).filter(|host| !hosts[*host].linked).collect();
        let mut outcomes = Vec::with_capacity(trying.len());
        let mut neighbours = Vec::new();
        for host in &trying {
            let ranks = hosts[*host].ranks;
            outcomes.push(hear::<Greeting>(ranks, &told).map(|greetings| {
                for (rank, greeting) in ranks.iter().zip(&greetings) {
                    net[*rank as usize].clone_from(&greeting.net);
                }
                if *host == own {
                    neighbours = greetings.into_iter().filter_map(|greeting| greeting.inbox).collect();
                }
            }));
        }
        let mut opened = Vec::new();
        if outcomes.iter().any(Result::is_ok) {
            let mut outcome = Ok(());
            if let (Some(path), Ok(Some(inbox)), false) = (path, &inbox, neighbours.is_empty()) {
                (opened, outcome) = self.open(path, inbox, &neighbours);
            }
            held.inboxes.extend(opened.iter().cloned());
            // Everyone has opened everything before an inbox is withdrawn.
            let told = (self.gather)(tell(&outcome)?)?;
            for (host, outcome) in trying.iter().zip(&mut outcomes) {
                if outcome.is_ok() {
                    *outcome = hear::<()>(hosts[*host].ranks, &told).map(drop);
                }
            }
        }
        for (host, outcome) in trying.into_iter().zip(outcomes) {
            hosts[host].take(self.rank, outcome);
        }
        if path.is_none() || !hosts[own].linked {
            return Ok(Vec::new());
        }
        held.inboxes.clear();
        Ok(opened)
    }

    fn in_this_process(&self, peer: u32) -> bool {
        self.reach[peer as usize].process == self.reach[self.rank as usize].process
    }

    /// Lets this rank's kernels use addresses of its process's other GPUs. What is mapped by VMM has access of its own.
    fn open_peers(&self, path: Path) -> Result<()> {
        if !matches!(path, Path::P2p | Path::P2pShared(Sharing::Ipc)) {
            return Ok(());
        }
        let device_of = |rank: u32| self.reach[rank as usize].device;
        let own = device_of(self.rank);
        let neighbours = self.hosts.neighbours(self.rank).iter();
        neighbours
            .filter(|peer| self.in_this_process(**peer) && device_of(**peer) != own)
            .try_for_each(|peer| self.device.open_peer(device_of(*peer)))
    }

    /// What could be opened, and whether that is all. `names` are those of the ranks of this host.
    fn open(&self, path: Path, inbox: &Inbox, names: &[super::inbox::Name]) -> (Vec<Arc<PeerInbox>>, Result<()>) {
        // Host memory is mapped once for every rank: a mapping is registered with one rank's device.
        let by_address = |peer: u32| path != Path::Shm && self.in_this_process(peer);
        let neighbours = self.hosts.neighbours(self.rank);
        let mut descriptors: Vec<Option<Descriptor>> = self.reach.iter().map(|_| None).collect();
        if let (Some(exchange), Some(fd)) = (inbox.exchange(), inbox.descriptor()) {
            let mut addresses = vec![None; self.reach.len()];
            for (peer, name) in neighbours.iter().zip(names) {
                if *peer != self.rank && !by_address(*peer) {
                    addresses[*peer as usize] = name.address.as_ref();
                }
            }
            match exchange.run(self.rank as usize, &addresses, fd, self.limit) {
                Ok(received) => descriptors = received,
                Err(error) => return (Vec::new(), Err(error)),
            }
        }
        let mut opened = Vec::with_capacity(names.len());
        for (peer, name) in neighbours.iter().zip(names) {
            let fd = descriptors[*peer as usize].take();
            let inbox = match *peer == self.rank {
                true => Ok(inbox.own()),
                false => Inbox::open(self.device, path, name, fd, self.geometry),
            };
            match inbox {
                Ok(inbox) => opened.push(inbox),
                Err(error) => return (opened, Err(error)),
            }
        }
        (opened, Ok(()))
    }
}

/// The inboxes of an attempt. Should it fail they are put down, since unmapping may wait for a kernel of another
/// communicator; who asked for the links lets go.
struct Held<'a> {
    device: &'a dyn Device,
    inboxes: Vec<Arc<PeerInbox>>,
}

impl Held<'_> {
    fn new<'a>(device: &'a dyn Device, own: Option<&Inbox>) -> Held<'a> {
        Held {
            device,
            inboxes: own.map(Inbox::own).into_iter().collect(),
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.device.kind() == DeviceKind::Cuda && !self.inboxes.is_empty() {
            device::cuda::put_down(Arc::new(std::mem::take(&mut self.inboxes)));
        }
    }
}
