//! Non-blocking TCP: a listener, and a connection with what it received and what it still has to send.
//!
//! All descriptors are CLOEXEC. Sends carry MSG_NOSIGNAL: the host program may not ignore SIGPIPE.

use super::descriptor::Descriptor;
use super::wire::Inbox;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{self, sockopt, AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The kernel cuts this to net.core.somaxconn; all ranks of a big job connect at once.
const BACKLOG: i32 = 4096;
const READ_BYTES: usize = 16 << 10;

/// What the error is, with the limit behind it where one is known.
pub(crate) fn describe(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    match errno {
        Errno::MFILE => match getrlimit(Resource::Nofile).current {
            Some(limit) => format!("{text}; the limit of open files (ulimit -n) is {limit}"),
            None => text,
        },
        Errno::ADDRNOTAVAIL => format!("{text}; the address is not one of this host, or no local port is free"),
        _ => text,
    }
}

/// Does what needs a descriptor; at the limit of open files the soft limit is raised to the hard one once. (NCCL's
/// root raises it always.)
pub(crate) fn with_descriptors<T>(mut make: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    match make() {
        Err(Errno::MFILE) if raise_file_limit() => make(),
        made => made,
    }
}

fn raise_file_limit() -> bool {
    let limit = getrlimit(Resource::Nofile);
    limit.current != limit.maximum
        && setrlimit(
            Resource::Nofile,
            Rlimit {
                current: limit.maximum,
                maximum: limit.maximum,
            },
        )
        .is_ok()
}

fn socket(address: SocketAddr) -> Result<Descriptor, Errno> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Descriptor::new(with_descriptors(|| {
        net::socket_with(family, SocketType::STREAM, flags, None)
    })?)
}

pub(crate) struct Listener(Descriptor);

impl Listener {
    /// Listens at `address`, whose port may be 0; also the address with its port.
    pub(crate) fn open(address: SocketAddr) -> Result<(Listener, SocketAddr), Errno> {
        let fd = socket(address)?;
        // Connections of a previous init at the same NCCL_COMM_ID may linger in TIME_WAIT.
        sockopt::set_socket_reuseaddr(&fd, true)?;
        net::bind(&fd, &address)?;
        net::listen(&fd, BACKLOG)?;
        let bound = SocketAddr::try_from(net::getsockname(&fd)?).map_err(|_| Errno::AFNOSUPPORT)?;
        Ok((Listener(fd), bound))
    }

    /// None when nobody waits.
    pub(crate) fn accept(&self) -> Result<Option<Link>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match with_descriptors(|| net::accept_with(&self.0, flags)) {
            Ok(fd) => Ok(Some(Link::new(Descriptor::new(fd)?, false))),
            Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(crate) struct Link {
    fd: Descriptor,
    connecting: bool,
    pub(crate) inbox: Inbox,
    outbox: VecDeque<Arc<[u8]>>,
    /// Bytes of the front of the outbox that are sent.
    sent: usize,
    /// The write side is shut down.
    shut: bool,
}

impl Link {
    fn new(fd: Descriptor, connecting: bool) -> Link {
        // Small messages both ways, and a host that lost power must be noticed without traffic. A socket that is dead
        // already refuses these; the next read says why.
        let _ = sockopt::set_tcp_nodelay(&fd, true);
        let _ = sockopt::set_socket_keepalive(&fd, true);
        let _ = sockopt::set_tcp_keepidle(&fd, Duration::from_secs(20));
        let _ = sockopt::set_tcp_keepintvl(&fd, Duration::from_secs(5));
        let _ = sockopt::set_tcp_keepcnt(&fd, 4);
        Link {
            fd,
            connecting,
            inbox: Inbox::default(),
            outbox: VecDeque::new(),
            sent: 0,
            shut: false,
        }
    }

    /// Begins to connect.
    pub(crate) fn connect(address: SocketAddr) -> Result<Link, Errno> {
        let fd = socket(address)?;
        match net::connect(&fd, &address) {
            Ok(()) => Ok(Link::new(fd, false)),
            Err(Errno::INPROGRESS) => Ok(Link::new(fd, true)),
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn is_connecting(&self) -> bool {
        self.connecting
    }

    /// To be called when poll reports anything while the connection is being made.
    pub(crate) fn finish_connect(&mut self) -> Result<(), Errno> {
        sockopt::socket_error(&self.fd)??;
        self.connecting = false;
        Ok(())
    }

    /// What poll is to look for.
    pub(crate) fn interest(&self) -> PollFlags {
        match (self.connecting, self.outbox.is_empty()) {
            (true, _) => PollFlags::OUT,
            (false, true) => PollFlags::IN,
            (false, false) => PollFlags::IN | PollFlags::OUT,
        }
    }

    pub(crate) fn push(&mut self, bytes: Arc<[u8]>) {
        self.outbox.push_back(bytes);
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Sends what the kernel takes.
    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        while let Some(front) = self.outbox.front().filter(|_| !self.connecting) {
            match net::send(&self.fd, &front[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
            if self.sent == front.len() {
                self.outbox.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }

    /// Reads at most `limit` bytes into the inbox; false when there is nothing (more) now.
    pub(crate) fn receive(&mut self, limit: usize) -> Result<bool, Errno> {
        let mut chunk = [0; READ_BYTES];
        let room = limit.min(READ_BYTES);
        match net::recv(&self.fd, &mut chunk[..room], RecvFlags::empty()) {
            Ok((0, _)) => Err(Errno::PIPE),
            Ok((count, _)) => {
                self.inbox.push(&chunk[..count]);
                Ok(count == room)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The address at the other end, or this host's unspecified one for a connection that is dead already.
    pub(crate) fn peer(&self) -> SocketAddr {
        let unknown = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0);
        let found = net::getpeername(&self.fd).ok().flatten();
        found.and_then(|address| address.try_into().ok()).unwrap_or(unknown)
    }

    /// The socket alone, for who moves the bytes from here on; None if some that came are not taken, or some not sent.
    pub(crate) fn into_descriptor(self) -> Option<Descriptor> {
        (self.inbox.unread().is_empty() && self.is_flushed()).then_some(self.fd)
    }

    /// Says that nothing more will be sent; the peer sees the end after the last byte.
    pub(crate) fn shut(&mut self) {
        if !self.shut {
            self.shut = true;
            // The connection may be gone already, which is as good.
            let _ = net::shutdown(&self.fd, Shutdown::Write);
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
