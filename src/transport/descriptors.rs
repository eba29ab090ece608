//! File descriptors from rank to rank, across processes.
//!
//! Every rank listens at a random abstract name and tells all ranks that name and a random token. It then connects to
//! each peer, whose descriptor it asks for, and gives its own to each peer that asks. There is no listener thread and
//! nothing on disk.
//!
//! ```text
//! request   the token of the rank that listens (16 bytes), the number of the one that asks (4 bytes)
//! answer    the token of the rank that asks, the number of the one that answers, one descriptor (SCM_RIGHTS)
//! ```
//!
//! Names of abstract sockets are public on the host, and whoever likes may take that of a rank that has died. So both
//! ends ask the kernel whose process made the connection (SO_PEERCRED) and go on with this process's user alone; and a
//! descriptor goes only into a connection on which the token came, and is taken only with one. Strangers can keep ranks
//! waiting until the deadline, which names the rank, and nothing else.
//!
//! Nothing blocks; a peer that ended, a deadline and an abort end the exchange. Connections stay until the exchange has
//! ended, so that the end of one says that its owner will not come any more.

use crate::bootstrap::{Cancel, Descriptor};
use crate::error::{Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

const TOKEN_BYTES: usize = 16;
const MESSAGE_BYTES: usize = TOKEN_BYTES + 4;
/// So many connections are taken before the clock and the peers have their turn again: strangers may never stop.
const MOST_AT_ONCE: usize = 64;
/// Connections that the kernel queues.
const BACKLOG: i32 = 128;
/// How soon what did not go is tried again, and how often clock and cancel are looked at.
const RETRY: Duration = Duration::from_millis(1);
const LOOK: Duration = Duration::from_millis(50);

/// When an exchange that does not end is given up.
pub struct Limit<'a> {
    pub timeout: Duration,
    pub cancel: &'a Cancel,
}

/// Where a rank gives its descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    name: [u8; 16],
    token: [u8; TOKEN_BYTES],
}

/// A rank's socket for one exchange.
pub struct Exchange {
    socket: Descriptor,
    address: Address,
    /// Whose processes may take part.
    user: u32,
}

/// A peer that connected.
enum Caller {
    Silent(Descriptor),
    Asks(Descriptor, usize),
}

/// This rank's way to a peer's descriptor.
struct Fetch {
    peer: usize,
    connection: Option<Descriptor>,
    asked: bool,
    /// What came.
    fd: Option<Descriptor>,
}

/// What an exchange has come to.
struct Progress {
    callers: Vec<Caller>,
    served: Vec<Descriptor>,
    /// Ranks without this one's descriptor.
    ungiven: Vec<usize>,
    fetches: Vec<Fetch>,
    /// Something did not go, and nothing will say when it may.
    retry: bool,
}

impl Progress {
    fn new(peers: &[Option<&Address>]) -> Progress {
        let addressed: Vec<usize> = (0..peers.len()).filter(|peer| peers[*peer].is_some()).collect();
        let fetch = |peer: &usize| Fetch {
            peer: *peer,
            connection: None,
            asked: false,
            fd: None,
        };
        Progress {
            callers: Vec::new(),
            served: Vec::new(),
            fetches: addressed.iter().map(fetch).collect(),
            ungiven: addressed,
            retry: false,
        }
    }

    fn awaited(&self) -> Vec<usize> {
        let late = self.fetches.iter().filter(|fetch| fetch.fd.is_none());
        late.map(|fetch| fetch.peer).collect()
    }

    /// Where something may come.
    fn listened(&self) -> impl Iterator<Item = &Descriptor> {
        let callers = self.callers.iter().filter_map(|caller| match caller {
            Caller::Silent(connection) => Some(connection),
            Caller::Asks(..) => None,
        });
        callers.chain(self.fetches.iter().filter_map(|fetch| fetch.connection.as_ref()))
    }
}

/// What a connection has.
enum Incoming {
    Nothing,
    /// Nor will anything come.
    End,
    Message {
        token: [u8; TOKEN_BYTES],
        rank: usize,
        fd: Option<Descriptor>,
    },
    /// What no rank sends.
    Noise,
}

fn socket() -> std::result::Result<Descriptor, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).and_then(Descriptor::new)
}

fn place(address: &Address) -> std::result::Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(&[b"ossicle-".as_slice(), &address.name].concat())
}

fn listed(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

/// The user of the process at the other end, as the kernel saw it when that connected or began to listen.
fn user_of(connection: &Descriptor) -> std::result::Result<u32, Errno> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = connection.as_fd().as_raw_fd();
    // SAFETY: an open socket; the option is one ucred, and `bytes` says that there is room for one.
    match unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut bytes,
        )
    } {
        0 => Ok(peer.uid),
        _ => Err(Errno::from_raw_os_error(
            std::io::Error::last_os_error().raw_os_error().unwrap_or_default(),
        )),
    }
}

/// False: not now.
fn send(
    connection: &Descriptor,
    token: &[u8; TOKEN_BYTES],
    rank: usize,
    fd: Option<BorrowedFd>,
) -> std::result::Result<bool, Errno> {
    let mut message = [0; MESSAGE_BYTES];
    message[..TOKEN_BYTES].copy_from_slice(token);
    message[TOKEN_BYTES..].copy_from_slice(&(rank as u32).to_le_bytes());
    let fds = fd.map(|fd| [fd]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match net::sendmsg(connection, &[IoSlice::new(&message)], &mut control, flags) {
        Ok(_) => Ok(true),
        // The last two: too many descriptors, or bytes, are under way.
        Err(Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS | Errno::NOBUFS) => Ok(false),
        Err(error) => Err(error),
    }
}

fn receive(connection: &Descriptor) -> Incoming {
    let mut message = [0; MESSAGE_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut parts = [IoSliceMut::new(&mut message)];
    let bytes = match net::recvmsg(connection, &mut parts, &mut control, flags) {
        Ok(received) => received.bytes,
        Err(Errno::AGAIN | Errno::INTR) => return Incoming::Nothing,
        Err(_) => return Incoming::End,
    };
    // All are taken out, so that those that are not wanted are closed.
    let mut fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    match bytes {
        0 => return Incoming::End,
        MESSAGE_BYTES => {}
        _ => return Incoming::Noise,
    }
    let (mut token, mut rank) = ([0; TOKEN_BYTES], [0; 4]);
    token.copy_from_slice(&message[..TOKEN_BYTES]);
    rank.copy_from_slice(&message[TOKEN_BYTES..MESSAGE_BYTES]);
    let fd = if fds.len() == 1 { fds.pop() } else { None };
    Incoming::Message {
        token,
        rank: u32::from_le_bytes(rank) as usize,
        fd: fd.and_then(|fd| Descriptor::new(fd).ok()),
    }
}

impl Exchange {
    pub fn open() -> Result<Exchange> {
        let mut random = [[0; 16]; 2];
        for part in &mut random {
            getrandom::fill(part).map_err(|error| Error::system(format!("no random numbers: {error}")))?;
        }
        let [name, token] = random;
        let address = Address { name, token };
        let listen = |socket: Descriptor| {
            net::bind(&socket, &place(&address)?)?;
            net::listen(&socket, BACKLOG).map(|()| socket)
        };
        let socket = socket().and_then(listen).map_err(no_socket)?;
        Ok(Exchange {
            socket,
            address,
            user: rustix::process::geteuid().as_raw(),
        })
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Gives `fd` to every rank that has an address and takes one from each; `rank` is this one's own number. What
    /// came, by rank.
    pub fn run(
        &self,
        rank: usize,
        peers: &[Option<&Address>],
        fd: BorrowedFd,
        limit: &Limit,
    ) -> Result<Vec<Option<Descriptor>>> {
        let begun = Instant::now();
        let mut progress = Progress::new(peers);
        loop {
            progress.retry = false;
            self.give(rank, peers, fd, &mut progress)?;
            self.fetch(rank, peers, &mut progress)?;
            let awaited = progress.awaited();
            if progress.ungiven.is_empty() && awaited.is_empty() {
                let mut received: Vec<Option<Descriptor>> = peers.iter().map(|_| None).collect();
                for fetch in progress.fetches {
                    received[fetch.peer] = fetch.fd;
                }
                return Ok(received);
            }
            if limit.cancel.is_set() {
                return Err(Error::usage("the call was ended by ncclCommAbort"));
            }
            if begun.elapsed() >= limit.timeout {
                let (what, late) = match awaited.is_empty() {
                    true => ("take", &progress.ungiven),
                    false => ("send", &awaited),
                };
                return Err(Error::system(format!(
                    "{} did not {what} the descriptor of shared memory within {} ms",
                    listed(late),
                    limit.timeout.as_millis()
                )));
            }
            self.pause(&progress);
        }
    }

    /// Takes connections and requests, and answers those, as far as it goes without waiting.
    fn give(&self, rank: usize, peers: &[Option<&Address>], fd: BorrowedFd, progress: &mut Progress) -> Result<()> {
        self.accept(progress)?;
        for caller in std::mem::take(&mut progress.callers) {
            let (connection, peer) = match caller {
                Caller::Silent(connection) => match self.request(&connection, &progress.ungiven) {
                    Some(Some(peer)) => (connection, peer),
                    Some(None) => continue,
                    None => {
                        progress.callers.push(Caller::Silent(connection));
                        continue;
                    }
                },
                Caller::Asks(connection, peer) => (connection, peer),
            };
            // A rank asks once.
            let Some(address) = peers[peer].filter(|_| progress.ungiven.contains(&peer)) else {
                continue;
            };
            let sent = send(&connection, &address.token, rank, Some(fd));
            if sent.map_err(|error| unreachable_peer(peer, &error.to_string()))? {
                progress.ungiven.retain(|ungiven| *ungiven != peer);
                progress.served.push(connection);
            } else {
                progress.retry = true;
                progress.callers.push(Caller::Asks(connection, peer));
            }
        }
        Ok(())
    }

    fn accept(&self, progress: &mut Progress) -> Result<()> {
        for _ in 0..MOST_AT_ONCE {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match net::accept_with(&self.socket, flags).and_then(Descriptor::new) {
                Ok(connection) => {
                    if user_of(&connection) == Ok(self.user) {
                        progress.callers.push(Caller::Silent(connection));
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(no_socket(error)),
            }
        }
        progress.retry = true;
        Ok(())
    }

    /// None: nothing came. Otherwise the rank among `ungiven` that asks, or none where a stranger does.
    fn request(&self, connection: &Descriptor, ungiven: &[usize]) -> Option<Option<usize>> {
        match receive(connection) {
            Incoming::Nothing => None,
            Incoming::Message { token, rank, .. } => {
                Some(Some(rank).filter(|rank| token == self.address.token && ungiven.contains(rank)))
            }
            Incoming::End | Incoming::Noise => Some(None),
        }
    }

    /// Connects, asks and takes, as far as it goes without waiting.
    fn fetch(&self, rank: usize, peers: &[Option<&Address>], progress: &mut Progress) -> Result<()> {
        for fetch in &mut progress.fetches {
            let peer = fetch.peer;
            let Some(address) = peers[peer] else { continue };
            if fetch.fd.is_some() && !progress.ungiven.contains(&peer) {
                fetch.connection = None;
                continue;
            }
            if fetch.connection.is_none() {
                fetch.connection = self.connect(peer, address)?;
            }
            let Some(connection) = &fetch.connection else {
                progress.retry = true;
                continue;
            };
            if !fetch.asked {
                let asked = send(connection, &address.token, rank, None);
                fetch.asked = asked.map_err(|error| unreachable_peer(peer, &error.to_string()))?;
                progress.retry |= !fetch.asked;
            }
            match receive(connection) {
                Incoming::Nothing => {}
                Incoming::Message { token, rank, fd } if token == self.address.token && rank == peer => {
                    fetch.fd = Some(fd.ok_or_else(|| {
                        Error::system(format!(
                            "the descriptor of rank {peer}'s shared memory was not delivered: raise the limit of open files \
                             (ulimit -n)"
                        ))
                    })?);
                }
                // It has not asked for this rank's, and will not.
                Incoming::End => return Err(unreachable_peer(peer, "its end of the connection was closed")),
                Incoming::Message { .. } | Incoming::Noise => {
                    return Err(unreachable_peer(peer, "another program listens at its name"))
                }
            }
        }
        Ok(())
    }

    /// None: its queue is full.
    fn connect(&self, peer: usize, address: &Address) -> Result<Option<Descriptor>> {
        let connection = socket().map_err(no_socket)?;
        match place(address).and_then(|place| net::connect(&connection, &place)) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(unreachable_peer(peer, &error.to_string())),
        }
        match user_of(&connection) {
            Ok(user) if user == self.user => Ok(Some(connection)),
            Ok(user) => {
                let why = format!(
                    "a process of user {user} listens at its name, and this is one of user {}",
                    self.user
                );
                Err(unreachable_peer(peer, &why))
            }
            Err(error) => Err(unreachable_peer(peer, &error.to_string())),
        }
    }

    fn pause(&self, progress: &Progress) {
        let listened = std::iter::once(&self.socket).chain(progress.listened());
        let mut asked: Vec<PollFd> = listened.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let limit = if progress.retry { RETRY } else { LOOK };
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: limit.as_nanos() as _,
        };
        // However it ends, everything is tried again.
        let _ = poll(&mut asked, Some(&timeout));
    }
}

fn no_socket(error: Errno) -> Error {
    Error::system(format!(
        "no UNIX socket for passing descriptors between processes: {error}; if it is the limit of open files, raise it \
         (ulimit -n)"
    ))
}

fn unreachable_peer(peer: usize, why: &str) -> Error {
    Error::remote(format!(
        "cannot exchange descriptors of shared memory with rank {peer}: {why}; it ended or gave up, or it runs as another \
         user or in another network namespace: ranks of one host must share both, or have different NCCL_HOSTID"
    ))
}
