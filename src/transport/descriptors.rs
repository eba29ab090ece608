//! File descriptors from rank to rank, across processes.
//!
//! Every rank binds a datagram socket of a random abstract name, tells all ranks its name and a random token, and then
//! sends its descriptor to each peer while it takes theirs. There is no listener thread and nothing on disk.
//!
//! ```text
//! message   the receiver's token (16 bytes), the sender's rank (4 bytes), one descriptor (SCM_RIGHTS)
//! ```
//!
//! The names of abstract sockets are public on the host, so anyone may send: what does not carry the token is dropped,
//! with its descriptors. The kernel queues about ten messages a socket (net.unix.max_dgram_qlen), so a rank takes while
//! it cannot send. Nothing blocks; a peer whose socket is gone before it sent, a deadline and an abort end the exchange.

use crate::bootstrap::Cancel;
use crate::error::{Error, Result};
use crate::sys::above_standard;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const TOKEN_BYTES: usize = 16;
const MESSAGE_BYTES: usize = TOKEN_BYTES + 4;
/// So many messages are taken before the clock and the senders have their turn again: strangers may never stop.
const MOST_AT_ONCE: usize = 64;
/// How soon a full queue of a peer is tried again, and how often peers, clock and cancel are looked at.
const RETRY: Duration = Duration::from_millis(1);
const LOOK: Duration = Duration::from_millis(50);

/// When an exchange that does not end is given up.
pub struct Limit<'a> {
    pub timeout: Duration,
    pub cancel: &'a Cancel,
}

/// Where a rank takes descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
    name: [u8; 16],
    token: [u8; TOKEN_BYTES],
}

/// A rank's socket for one exchange.
pub(super) struct Exchange {
    socket: OwnedFd,
    pub(super) address: Address,
}

/// What an exchange has come to.
struct Progress {
    unsent: Vec<usize>,
    /// By rank.
    received: Vec<Option<OwnedFd>>,
    awaited: Vec<usize>,
}

fn socket() -> std::result::Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).and_then(above_standard)
}

fn place(address: &Address) -> std::result::Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(&[b"ossicle-".as_slice(), &address.name].concat())
}

fn listed(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

impl Exchange {
    pub(super) fn open() -> Result<Exchange> {
        let mut random = [[0; 16]; 2];
        for part in &mut random {
            getrandom::fill(part).map_err(|error| Error::system(format!("no random numbers: {error}")))?;
        }
        let [name, token] = random;
        let address = Address { name, token };
        let opened = socket().and_then(|socket| net::bind(&socket, &place(&address)?).map(|()| socket));
        let socket = opened.map_err(|error| {
            Error::system(format!(
                "no UNIX socket for passing descriptors between processes: {error}; if it is the limit of open files, \
                 raise it (ulimit -n)"
            ))
        })?;
        Ok(Exchange { socket, address })
    }

    /// Sends `fd` to every rank that has an address and takes one from each; `rank` is this one's own number. What
    /// came, by rank.
    pub(super) fn run(
        &self,
        rank: usize,
        peers: &[Option<&Address>],
        fd: BorrowedFd,
        limit: &Limit,
    ) -> Result<Vec<Option<OwnedFd>>> {
        let begun = Instant::now();
        let addressed: Vec<usize> = (0..peers.len()).filter(|peer| peers[*peer].is_some()).collect();
        let mut progress = Progress {
            unsent: addressed.clone(),
            received: peers.iter().map(|_| None).collect(),
            awaited: addressed,
        };
        let mut looked = begun;
        loop {
            let more = self.advance(rank, peers, fd, &mut progress)?;
            let Progress { unsent, awaited, .. } = &progress;
            if unsent.is_empty() && awaited.is_empty() {
                return Ok(progress.received);
            }
            if limit.cancel.is_set() {
                return Err(Error::usage("the call was ended by ncclCommAbort"));
            }
            if begun.elapsed() >= limit.timeout {
                let (what, late) = match awaited.is_empty() {
                    true => ("take", unsent),
                    false => ("send", awaited),
                };
                return Err(Error::system(format!(
                    "{} did not {what} the descriptor of shared memory within {} ms",
                    listed(late),
                    limit.timeout.as_millis()
                )));
            }
            if looked.elapsed() >= LOOK {
                self.look(rank, peers, fd, &mut progress)?;
                looked = Instant::now();
            } else if !more {
                self.pause(if progress.unsent.is_empty() { LOOK } else { RETRY });
            }
        }
    }

    /// Sends and takes what goes without waiting; whether more may be there to take.
    fn advance(
        &self,
        rank: usize,
        peers: &[Option<&Address>],
        fd: BorrowedFd,
        progress: &mut Progress,
    ) -> Result<bool> {
        let mut unsent = Vec::with_capacity(progress.unsent.len());
        for peer in std::mem::take(&mut progress.unsent) {
            if let Some(address) = peers[peer] {
                if !self.send(rank, peer, address, fd)? {
                    unsent.push(peer);
                }
            }
        }
        progress.unsent = unsent;
        for _ in 0..MOST_AT_ONCE {
            let Some((peer, fd)) = self.receive()? else {
                return Ok(false);
            };
            // Also a message of no awaited rank is a stranger's, whatever it carries.
            let Some(at) = progress.awaited.iter().position(|awaited| Some(*awaited) == peer) else {
                continue;
            };
            let peer = progress.awaited.remove(at);
            if fd.is_none() {
                return Err(Error::system(format!(
                    "the descriptor of rank {peer}'s shared memory was not delivered: raise the limit of open files \
                     (ulimit -n)"
                )));
            }
            progress.received[peer] = fd;
        }
        Ok(true)
    }

    /// False: its queue is full.
    fn send(&self, rank: usize, peer: usize, address: &Address, fd: BorrowedFd) -> Result<bool> {
        let mut message = [0; MESSAGE_BYTES];
        message[..TOKEN_BYTES].copy_from_slice(&address.token);
        message[TOKEN_BYTES..].copy_from_slice(&(rank as u32).to_le_bytes());
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let sent = place(address).and_then(|place| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            net::sendmsg_addr(&self.socket, &place, &[IoSlice::new(&message)], &mut control, flags)
        });
        match sent {
            Ok(_) => Ok(true),
            // The last two: too many descriptors, or bytes, are under way.
            Err(Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS | Errno::NOBUFS) => Ok(false),
            Err(error) => Err(unreachable_peer(peer, error)),
        }
    }

    /// The next message: the rank that it names, where it has the token, and its descriptor, where that is one.
    fn receive(&self) -> Result<Option<(Option<usize>, Option<OwnedFd>)>> {
        let mut message = [0; MESSAGE_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut message)];
        let bytes = match net::recvmsg(&self.socket, &mut parts, &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => return Ok(Some((None, None))),
            Err(error) => {
                return Err(Error::system(format!(
                    "cannot take descriptors from other processes: {error}"
                )));
            }
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
        if bytes != MESSAGE_BYTES || message[..TOKEN_BYTES] != self.address.token {
            return Ok(Some((None, None)));
        }
        let mut rank = [0; 4];
        rank.copy_from_slice(&message[TOKEN_BYTES..MESSAGE_BYTES]);
        let fd = if fds.len() == 1 { fds.pop() } else { None };
        let fd = fd.and_then(|fd| above_standard(fd).ok());
        Ok(Some((Some(u32::from_le_bytes(rank) as usize), fd)))
    }

    /// Whether those who have not sent still can. A socket that is gone had its owner's message sent before, or never.
    fn look(&self, rank: usize, peers: &[Option<&Address>], fd: BorrowedFd, progress: &mut Progress) -> Result<()> {
        let gone: Vec<(usize, Errno)> = progress
            .awaited
            .iter()
            .filter_map(|peer| Some((*peer, refusal(peers[*peer]?)?)))
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        for _ in 0..MOST_AT_ONCE {
            if !self.advance(rank, peers, fd, progress)? {
                break;
            }
        }
        match gone.into_iter().find(|(peer, _)| progress.awaited.contains(peer)) {
            Some((peer, error)) => Err(unreachable_peer(peer, error)),
            None => Ok(()),
        }
    }

    fn pause(&self, limit: Duration) {
        let mut asked = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: limit.as_nanos() as _,
        };
        // However it ends, everything is tried again.
        let _ = poll(&mut asked, Some(&timeout));
    }
}

/// What connecting to an address says where nobody is there. Nothing is sent.
fn refusal(address: &Address) -> Option<Errno> {
    let probe = socket().ok()?;
    let connected = place(address).and_then(|place| net::connect(&probe, &place));
    connected.err().filter(|error| *error == Errno::CONNREFUSED)
}

fn unreachable_peer(peer: usize, error: Errno) -> Error {
    Error::remote(format!(
        "cannot exchange descriptors of shared memory with rank {peer}: {error}; it ended or gave up, or it is in another \
         network namespace: ranks of one host must share one, or have different NCCL_HOSTID"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    const LONG: Duration = Duration::from_secs(60);

    fn limit<'a>(timeout: Duration, cancel: &'a Cancel) -> Limit<'a> {
        Limit { timeout, cancel }
    }

    /// A descriptor to pass, and what tells whether copies of it are left.
    fn payload() -> (std::io::PipeReader, OwnedFd) {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader, writer.into())
    }

    /// Waits for the end that comes when the last copy is closed; a child that another test forks may have one a while.
    fn assert_closed(reader: &std::io::PipeReader) {
        let mut asked = [PollFd::new(reader, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut asked, Some(&timeout)), Ok(1), "a copy is left open");
        assert!(asked[0].revents().contains(PollFlags::HUP));
    }

    /// Any message, with any descriptors; false where the queue is full.
    fn send_raw(to: &Exchange, message: &[u8], fds: &[BorrowedFd]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let (place, parts) = (place(&to.address).unwrap(), [IoSlice::new(message)]);
        match net::sendmsg_addr(socket().unwrap(), &place, &parts, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => true,
            Err(Errno::AGAIN | Errno::TOOMANYREFS) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn message(to: &Exchange, rank: u32) -> Vec<u8> {
        [to.address.token.as_slice(), &rank.to_le_bytes()].concat()
    }

    fn fails(exchange: &Exchange, peer: &Exchange, timeout: Duration, cancel: &Cancel) -> Error {
        let (_reader, fd) = payload();
        let peers = [None, Some(&peer.address)];
        exchange
            .run(0, &peers, fd.as_fd(), &limit(timeout, cancel))
            .unwrap_err()
    }

    /// All pairs of `ranks` ranks exchange at once, `rank 0`'s socket being full of strangers' messages at first.
    fn all_get_theirs(ranks: usize, strangers: &dyn Fn(&Exchange)) {
        let exchanges: Vec<Exchange> = (0..ranks).map(|_| Exchange::open().unwrap()).collect();
        strangers(&exchanges[0]);
        let addresses: Vec<Address> = exchanges.iter().map(|exchange| exchange.address.clone()).collect();
        let threads: Vec<_> = exchanges
            .into_iter()
            .enumerate()
            .map(|(rank, exchange)| {
                let addresses = addresses.clone();
                std::thread::spawn(move || {
                    let peers: Vec<_> = (0..ranks)
                        .map(|peer| addresses.get(peer).filter(|_| peer != rank))
                        .collect();
                    let (reader, fd) = payload();
                    let cancel = Cancel::default();
                    let received = exchange.run(rank, &peers, fd.as_fd(), &limit(LONG, &cancel)).unwrap();
                    (reader, received)
                })
            })
            .collect();
        let (readers, received): (Vec<_>, Vec<_>) = threads.into_iter().map(|thread| thread.join().unwrap()).unzip();
        for (taker, received) in received.into_iter().enumerate() {
            for (giver, fd) in received.into_iter().enumerate() {
                assert_eq!(fd.is_some(), giver != taker, "from {giver} to {taker}");
                if let Some(fd) = fd {
                    std::fs::File::from(fd).write_all(&[taker as u8]).unwrap();
                }
            }
        }
        for (giver, mut reader) in readers.into_iter().enumerate() {
            // To the end of the file, which comes when no descriptor is left anywhere.
            let mut takers = Vec::new();
            reader.read_to_end(&mut takers).unwrap();
            let expected: Vec<u8> = (0..ranks as u8).filter(|taker| *taker as usize != giver).collect();
            assert_eq!(takers, expected, "who got the descriptor of {giver}");
        }
    }

    #[test]
    fn every_rank_gets_every_other_ranks_descriptor() {
        for ranks in [1, 2, 3, 16] {
            all_get_theirs(ranks, &|_| {});
        }
    }

    #[test]
    fn strangers_are_dropped_with_their_descriptors() {
        let (reader, fd) = payload();
        all_get_theirs(16, &|exchange| {
            let right = message(exchange, 1);
            let mut wrong = right.clone();
            wrong[7] ^= 1;
            let (itself, nobody) = (message(exchange, 0), message(exchange, u32::MAX));
            let short = &right[..MESSAGE_BYTES - 1];
            let long = [right.as_slice(), &[0]].concat();
            for stranger in [wrong.as_slice(), &itself, &nobody, short, &long, &[]] {
                assert!(send_raw(exchange, stranger, &[fd.as_fd()]));
            }
            assert!(send_raw(exchange, &wrong, &[fd.as_fd(), fd.as_fd()]));
            while send_raw(exchange, &wrong, &[fd.as_fd()]) {}
        });
        drop(fd);
        assert_closed(&reader);
    }

    #[test]
    fn a_peer_that_does_not_come_is_named_at_the_deadline() {
        let cancel = Cancel::default();
        let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
        let short = Duration::from_millis(120);
        let error = fails(&own, &peer, short, &cancel);
        assert_eq!(error.code, Code::SystemError);
        let text = "rank 1 did not send the descriptor of shared memory within 120 ms";
        assert_eq!(error.text, text);
        let (_reader, fd) = payload();
        while send_raw(&peer, b"full", &[]) {}
        assert!(send_raw(&own, &message(&own, 1), &[fd.as_fd()]));
        let error = fails(&own, &peer, short, &cancel);
        assert!(error.text.starts_with("rank 1 did not take the descriptor"), "{error}");
        cancel.0.store(true, std::sync::atomic::Ordering::Release);
        assert_eq!(fails(&own, &peer, LONG, &cancel).code, Code::InvalidUsage);
    }

    #[test]
    fn a_peer_that_is_gone_is_named_at_once() {
        let cancel = Cancel::default();
        let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
        let address = peer.address.clone();
        let (reader, fd) = payload();
        let peers = [None, Some(&address)];
        let mut progress = Progress {
            unsent: vec![1],
            received: vec![None, None],
            awaited: vec![1],
        };
        assert_eq!(own.advance(0, &peers, fd.as_fd(), &mut progress), Ok(false));
        assert_eq!((&progress.unsent[..], &progress.awaited[..]), (&[][..], &[1][..]));
        assert_eq!(own.look(0, &peers, fd.as_fd(), &mut progress), Ok(()));
        // It has what it needs, sends and goes: no loss.
        assert_eq!(peer.send(1, 0, &own.address, fd.as_fd()), Ok(true));
        drop(peer);
        assert_eq!(own.look(0, &peers, fd.as_fd(), &mut progress), Ok(()));
        assert!(progress.awaited.is_empty() && progress.received[1].is_some());
        // Gone before it sent, after it could be sent to or before.
        progress.awaited = vec![1];
        let late = own.look(0, &peers, fd.as_fd(), &mut progress).unwrap_err();
        let early = own.run(0, &peers, fd.as_fd(), &limit(LONG, &cancel)).unwrap_err();
        for error in [late, early] {
            assert_eq!(error.code, Code::RemoteError);
            assert!(
                error.text.contains("with rank 1") && error.text.contains("NCCL_HOSTID"),
                "{error}"
            );
        }
        drop((progress, fd));
        assert_closed(&reader);
    }

    #[test]
    fn a_message_without_its_descriptor_is_told() {
        let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
        assert!(send_raw(&own, &message(&own, 1), &[]));
        let error = fails(&own, &peer, LONG, &Cancel::default());
        assert!(
            error.text.contains("rank 1") && error.text.contains("ulimit -n"),
            "{error}"
        );
    }
}
