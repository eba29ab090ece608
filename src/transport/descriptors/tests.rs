//! The exchange between ranks that are threads, and strangers of every kind.

use super::*;
use crate::error::Code;
use std::io::{PipeReader, Read, Write};

const LONG: Duration = Duration::from_secs(60);

fn limit<'a>(timeout: Duration, cancel: &'a Cancel) -> Limit<'a> {
    Limit { timeout, cancel }
}

/// A descriptor to pass, and what tells whether copies of it are left.
fn payload() -> (PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, writer.into())
}

fn readable(fd: impl AsFd) -> PollFlags {
    let mut asked = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut asked, Some(&timeout)), Ok(1), "nothing comes");
    asked[0].revents()
}

/// Waits for the end that comes when the last copy is closed; a child that another test forks may have one a while.
fn assert_closed(reader: &PipeReader) {
    assert!(readable(reader).contains(PollFlags::HUP), "a copy is left open");
}

/// What comes next.
fn await_message(connection: &Descriptor) -> Incoming {
    readable(connection);
    receive(connection)
}

fn connected(to: &Address) -> Descriptor {
    let connection = socket().unwrap();
    net::connect(&connection, &place(to).unwrap()).unwrap();
    connection
}

/// A connection with any message, with any descriptors; none where the queue is full.
fn send_raw(to: &Exchange, message: &[u8], fds: &[BorrowedFd]) -> Option<Descriptor> {
    let connection = socket().unwrap();
    match net::connect(&connection, &place(&to.address).unwrap()) {
        Err(Errno::AGAIN) => return None,
        outcome => outcome.unwrap(),
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let parts = [IoSlice::new(message)];
    net::sendmsg(&connection, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
    Some(connection)
}

fn message(to: &Exchange, rank: u32) -> Vec<u8> {
    [to.address.token.as_slice(), &rank.to_le_bytes()].concat()
}

/// What rank 0 comes to with `peer` as rank 1.
fn run(own: &Exchange, peer: &Address, timeout: Duration) -> Result<Vec<Option<Descriptor>>> {
    let (_reader, fd) = payload();
    own.run(0, &[None, Some(peer)], fd.as_fd(), &limit(timeout, &Cancel::default()))
}

#[track_caller]
fn assert_unreachable(outcome: Result<Vec<Option<Descriptor>>>, why: &str) {
    let error = outcome.map(|_| ()).unwrap_err();
    assert_eq!(error.code, Code::RemoteError);
    for part in ["with rank 1", "NCCL_HOSTID", why] {
        assert!(error.text.contains(part), "no {part}: {error}");
    }
}

/// Rank 1's side of rank 0's request: the connection once it came.
fn await_request(peer: &Exchange) -> Descriptor {
    readable(&peer.socket);
    let accepted = net::accept_with(&peer.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).unwrap();
    let connection = Descriptor::new(accepted).unwrap();
    match await_message(&connection) {
        Incoming::Message { token, rank, fd } => {
            assert_eq!((token, rank, fd.is_some()), (peer.address.token, 0, false))
        }
        _ => panic!("no request"),
    }
    connection
}

/// All pairs of `ranks` ranks exchange at once, rank 0's socket having strangers' connections at first.
fn all_get_theirs(ranks: usize, strangers: &dyn Fn(&Exchange) -> Vec<Descriptor>) {
    let exchanges: Vec<Exchange> = (0..ranks).map(|_| Exchange::open().unwrap()).collect();
    let _strangers = strangers(&exchanges[0]);
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
                // Its socket stays until all have ended, as an inbox's does.
                (reader, (received, exchange))
            })
        })
        .collect();
    let (readers, received): (Vec<_>, Vec<_>) = threads.into_iter().map(|thread| thread.join().unwrap()).unzip();
    for (taker, (received, _)) in received.into_iter().enumerate() {
        for (giver, fd) in received.into_iter().enumerate() {
            assert_eq!(fd.is_some(), giver != taker, "from {giver} to {taker}");
            if let Some(fd) = fd {
                let fd = fd.as_fd().try_clone_to_owned().unwrap();
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
        all_get_theirs(ranks, &|_| vec![]);
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
        let mut connections: Vec<Descriptor> = [wrong.as_slice(), &itself, &nobody, short, &long, &[]]
            .map(|stranger| send_raw(exchange, stranger, &[fd.as_fd()]).unwrap())
            .into();
        connections.extend(send_raw(exchange, &wrong, &[fd.as_fd(), fd.as_fd()]));
        connections.push(connected(&exchange.address));
        // The queue is full when the ranks begin.
        while let Some(connection) = send_raw(exchange, &wrong, &[fd.as_fd()]) {
            connections.push(connection);
        }
        connections
    });
    drop(fd);
    assert_closed(&reader);
}

#[test]
fn a_peer_that_does_not_come_is_named_at_the_deadline() {
    let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
    let short = Duration::from_millis(120);
    let error = run(&own, &peer.address, short).map(|_| ()).unwrap_err();
    let text = "rank 1 did not send the descriptor of shared memory within 120 ms";
    assert_eq!(error, Error::system(text));
    let cancel = Cancel::default();
    cancel.0.store(true, std::sync::atomic::Ordering::Release);
    let (_reader, fd) = payload();
    let peers = [None, Some(&peer.address)];
    let ended = own.run(0, &peers, fd.as_fd(), &limit(LONG, &cancel)).map(|_| ());
    assert_eq!(ended.unwrap_err().code, Code::InvalidUsage);
    // It gives and does not ask.
    let peer = Exchange::open().unwrap();
    let address = peer.address.clone();
    let token = own.address.token;
    let giver = std::thread::spawn(move || {
        let connection = await_request(&peer);
        let (_reader, fd) = payload();
        assert_eq!(send(&connection, &token, 1, Some(fd.as_fd())), Ok(true));
        (peer, connection)
    });
    let error = run(&own, &address, Duration::from_secs(2)).map(|_| ()).unwrap_err();
    assert!(error.text.starts_with("rank 1 did not take the descriptor"), "{error}");
    drop(giver.join().unwrap());
}

#[test]
fn a_peer_that_is_gone_is_named_at_once() {
    let own = Exchange::open().unwrap();
    let gone = Exchange::open().unwrap().address.clone();
    assert_unreachable(run(&own, &gone, LONG), "refused");
    // Before it gives, and before it asks.
    for gives in [false, true] {
        let peer = Exchange::open().unwrap();
        let (address, token) = (peer.address.clone(), own.address.token);
        let leaver = std::thread::spawn(move || {
            let connection = await_request(&peer);
            let (_reader, fd) = payload();
            if gives {
                assert_eq!(send(&connection, &token, 1, Some(fd.as_fd())), Ok(true));
            }
        });
        assert_unreachable(run(&own, &address, LONG), "was closed");
        leaver.join().unwrap();
    }
}

#[test]
fn a_peer_that_has_all_and_goes_is_no_loss() {
    let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
    let (own_address, peer_address) = (own.address.clone(), peer.address.clone());
    let (reader, fd) = payload();
    let theirs = fd.try_clone().unwrap();
    let leaver = std::thread::spawn(move || {
        let asks = connected(&own_address);
        assert_eq!(send(&asks, &own_address.token, 1, None), Ok(true));
        let came = await_message(&asks);
        assert!(matches!(came, Incoming::Message { token, rank: 0, fd: Some(_) } if token == peer.address.token));
        let gives = await_request(&peer);
        assert_eq!(send(&gives, &own_address.token, 1, Some(theirs.as_fd())), Ok(true));
    });
    let received = run(&own, &peer_address, LONG).unwrap();
    assert!(received[0].is_none() && received[1].is_some());
    leaver.join().unwrap();
    drop((received, fd));
    assert_closed(&reader);
}

#[test]
fn an_answer_without_its_descriptor_is_told() {
    let (own, peer) = (Exchange::open().unwrap(), Exchange::open().unwrap());
    let (address, token) = (peer.address.clone(), own.address.token);
    let giver = std::thread::spawn(move || {
        let connection = await_request(&peer);
        assert_eq!(send(&connection, &token, 1, None), Ok(true));
        (peer, connection)
    });
    let error = run(&own, &address, LONG).map(|_| ()).unwrap_err();
    assert!(
        error.text.contains("rank 1") && error.text.contains("ulimit -n"),
        "{error}"
    );
    drop(giver.join().unwrap());
}

/// Who takes the name of a rank that died learns its token and can ask as that rank; it gets nothing, also where it
/// uses that token on those that live.
#[test]
fn who_takes_a_dead_ranks_name_gets_nothing() {
    let own = Exchange::open().unwrap();
    let dead = Exchange::open().unwrap().address.clone();
    let taken = socket().unwrap();
    net::bind(&taken, &place(&dead).unwrap()).unwrap();
    net::listen(&taken, 1).unwrap();
    let stranger = Exchange {
        socket: taken,
        address: dead.clone(),
        user: own.user,
    };
    let own_address = own.address.clone();
    let thief = std::thread::spawn(move || {
        let asked = await_request(&stranger);
        let learnt = stranger.address.token;
        let asks = connected(&own_address);
        assert_eq!(send(&asks, &learnt, 1, None), Ok(true));
        // Dropped at once.
        assert!(matches!(await_message(&asks), Incoming::End));
        let (_reader, bait) = payload();
        assert_eq!(send(&asked, &learnt, 1, Some(bait.as_fd())), Ok(true));
        assert!(matches!(await_message(&asked), Incoming::End));
    });
    let (reader, fd) = payload();
    let outcome = own.run(0, &[None, Some(&dead)], fd.as_fd(), &limit(LONG, &Cancel::default()));
    assert_unreachable(outcome, "another program listens at its name");
    thief.join().unwrap();
    drop(fd);
    assert_closed(&reader);
}

/// This process's user stands for another one's.
#[test]
fn processes_of_other_users_are_strangers_whatever_they_know() {
    let peer = Exchange::open().unwrap();
    let own = Exchange {
        user: peer.user + 1,
        ..Exchange::open().unwrap()
    };
    assert_unreachable(
        run(&own, &peer.address, LONG),
        &format!("a process of user {}", peer.user),
    );
    let asks = send_raw(&own, &message(&own, 1), &[]).unwrap();
    let mut progress = Progress::new(&[None, Some(&peer.address)]);
    let (_reader, fd) = payload();
    let peers = [None, Some(&peer.address)];
    assert_eq!(own.give(0, &peers, fd.as_fd(), &mut progress), Ok(()));
    assert!(progress.callers.is_empty() && progress.ungiven == [1]);
    assert!(matches!(await_message(&asks), Incoming::End));
}
