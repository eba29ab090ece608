//! All ranks of a communicator open each other's inboxes.
//!
//! ```text
//! choose          the paths to try, from what the ranks said of themselves
//! for each path   create the own inbox; gather: its name, or why there is none
//!                 pass descriptors, open the peers' inboxes; gather: done, or why not
//! ```
//!
//! Every rank sees the outcome of all, so all of them go on with the same path or try the next one together.

use super::{choose, Geometry, Inbox, Limit, Path, PeerInbox, Reach};
use crate::bootstrap::Descriptor;
use crate::device::{self, Device, DeviceKind, Sharing};
use crate::error::{Code, Error, Result};
use crate::{info, warning};
use serde::de::DeserializeOwned;
use serde::Serialize;
use std::sync::Arc;

/// Every rank's inbox as this one holds it.
pub struct Links {
    /// By rank.
    pub inboxes: Vec<Arc<PeerInbox>>,
    pub path: Path,
    pub reason: String,
    /// Equal on all ranks, and no other communicator's.
    pub communicator: Vec<u8>,
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

/// What all ranks said, or the error of one: the first whose failure is no other rank's.
pub(super) fn hear<T: DeserializeOwned>(told: &[Vec<u8>]) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(told.len());
    let mut failure: Option<Error> = None;
    for (rank, bytes) in told.iter().enumerate() {
        let error = match serde_json::from_slice::<Told<T>>(bytes) {
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

/// Collective over `gather`. `rank` is this one's place in `reach`, which has all ranks'.
pub fn link(
    device: &Arc<dyn Device>,
    rank: usize,
    reach: &[Reach],
    geometry: Geometry,
    limit: &Limit,
    gather: &Gather,
) -> Result<Links> {
    let attempt = Attempt {
        device,
        rank,
        reach,
        geometry,
        limit,
        gather,
    };
    let mut failed: Option<(Path, Error)> = None;
    for (path, reason) in choose(reach)? {
        let reason = match &failed {
            None => reason.to_owned(),
            Some((before, error)) => {
                let reason = format!("{} failed: {error}", before.name());
                // One line a communicator, and whoever asks for more has it from every rank.
                match rank {
                    0 => warning!("links between the ranks: {reason}; {} is tried next", path.name()),
                    _ => info!(Init, "rank {rank}: {reason}; {} is tried next", path.name()),
                }
                reason
            }
        };
        match attempt.via(path)? {
            Ok((inboxes, communicator)) => {
                return Ok(Links {
                    inboxes,
                    path,
                    reason,
                    communicator,
                });
            }
            Err(error) => failed = Some((path, error)),
        }
    }
    Err(failed.map_or_else(
        || Error::internal("no path between the ranks was tried"),
        |(_, error)| error,
    ))
}

type Opened = (Vec<Arc<PeerInbox>>, Vec<u8>);

struct Attempt<'a> {
    device: &'a Arc<dyn Device>,
    rank: usize,
    reach: &'a [Reach],
    geometry: Geometry,
    limit: &'a Limit<'a>,
    gather: &'a Gather<'a>,
}

impl Attempt<'_> {
    /// An error inside means that some rank cannot go this way, which all ranks know.
    fn via(&self, path: Path) -> Result<Result<Opened>> {
        let inbox = self
            .open_peers(path)
            .and_then(|()| Inbox::create(self.device, path, self.geometry));
        let mut held = Held::new(self.device.as_ref(), inbox.as_ref().ok());
        let told = (self.gather)(tell(&inbox.as_ref().map(Inbox::name).map_err(Error::clone))?)?;
        let (inbox, names) = match (inbox, hear(&told)) {
            (Ok(inbox), Ok(names)) => (inbox, names),
            (Err(error), Ok::<Vec<_>, _>(_)) | (_, Err(error)) => return Ok(Err(error)),
        };
        let (opened, outcome) = self.open(path, &inbox, &names);
        held.inboxes.extend(opened.iter().cloned());
        // Everyone has opened everything before an inbox is withdrawn.
        let outcomes = (self.gather)(tell(&outcome)?)?;
        Ok(hear::<()>(&outcomes).and(outcome).map(|()| {
            held.inboxes.clear();
            (opened, told.concat())
        }))
    }

    fn in_this_process(&self, peer: usize) -> bool {
        self.reach[peer].process == self.reach[self.rank].process
    }

    /// Lets this rank's kernels use addresses of its process's other GPUs. What is mapped by VMM has access of its own.
    fn open_peers(&self, path: Path) -> Result<()> {
        if !matches!(path, Path::P2p | Path::P2pShared(Sharing::Ipc)) {
            return Ok(());
        }
        let own = self.reach[self.rank].device;
        (0..self.reach.len())
            .filter(|peer| self.in_this_process(*peer) && self.reach[*peer].device != own)
            .try_for_each(|peer| self.device.open_peer(self.reach[peer].device))
    }

    /// What could be opened, and whether that is all.
    fn open(&self, path: Path, inbox: &Inbox, names: &[super::inbox::Name]) -> (Vec<Arc<PeerInbox>>, Result<()>) {
        // Host memory is mapped once for every rank: a mapping is registered with one rank's device.
        let by_address = |peer: usize| path != Path::Shm && self.in_this_process(peer);
        let mut descriptors: Vec<Option<Descriptor>> = names.iter().map(|_| None).collect();
        if let (Some(exchange), Some(fd)) = (inbox.exchange(), inbox.descriptor()) {
            let addresses: Vec<_> = names
                .iter()
                .enumerate()
                .map(|(peer, name)| name.address.as_ref().filter(|_| peer != self.rank && !by_address(peer)))
                .collect();
            match exchange.run(self.rank, &addresses, fd, self.limit) {
                Ok(received) => descriptors = received,
                Err(error) => return (Vec::new(), Err(error)),
            }
        }
        let mut opened = Vec::with_capacity(names.len());
        for (peer, fd) in descriptors.into_iter().enumerate() {
            let inbox = match peer == self.rank {
                true => Ok(inbox.own()),
                false => Inbox::open(self.device, path, &names[peer], fd, self.geometry),
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
