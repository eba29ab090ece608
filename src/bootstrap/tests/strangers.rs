//! Port scanners at the bootstrap port, before and while the ranks join.

use super::super::handshake::{Caller, CallerStep, DoorKey, Role};
use super::super::unique_id::Root;
use super::super::wire::{Inbox, Message};
use super::*;
use crate::error::Code;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap()
}

/// Bytes that are not random, so that a failure can be repeated.
fn noise(count: usize) -> Vec<u8> {
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(7), next)
        .map(|state| (state >> 24) as u8)
        .take(count)
        .collect()
}

/// The abuse list; the connections that stay open.
fn abuse(address: SocketAddr) -> Vec<TcpStream> {
    let mut open = Vec::new();
    for _ in 0..100 {
        drop(connect(address));
    }
    open.extend((0..8).map(|_| connect(address)));
    let hello = |role: Role| Caller::new(DoorKey { role, number: 77 }, [0; 32], [1; 32]).hello();
    let mut wrong_role = hello(Role::Star);
    wrong_role[8] = 9;
    let garbage = noise(1 << 20);
    let texts: [&[u8]; 8] = [
        b"O",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &garbage,
        &hello(Role::Rendezvous)[..55],
        &wrong_role,
        &hello(Role::Star),
        &hello(Role::Rendezvous),
    ];
    for text in texts {
        let mut stream = connect(address);
        // The other side hangs up in the middle of the mebibyte.
        let _ = stream.write_all(text);
        open.push(stream);
    }
    let half = connect(address);
    half.shutdown(Shutdown::Write).unwrap();
    open.push(half);
    for _ in 0..10 {
        let reset = connect(address);
        rustix::net::sockopt::set_socket_linger(&reset, Some(Duration::ZERO)).unwrap();
    }
    open
}

/// The other side closed the connection, or does so at its deadline.
fn assert_hung_up(mut stream: TcpStream) {
    stream.set_read_timeout(Some(Duration::from_secs(9))).unwrap();
    loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => return assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn scanners_neither_stall_nor_spoil_a_join() {
    if !in_its_own_process("strangers::scanners_neither_stall_nor_spoil_a_join") {
        return;
    }
    eventually("the service ends", || threads_of_the_service() == 0);
    let before = descriptors();
    let id = new_id();
    let address = Root::parse(&id).unwrap().address;
    let early = abuse(address);
    let during = std::thread::spawn(move || abuse(address));
    let began = Instant::now();
    let sessions = ranks(4, move |rank| join(&id, introduction(rank, 4), TIMEOUT).unwrap().0);
    // Well before the strangers' own deadline: nobody waited for them.
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    let during = during.join().unwrap();
    early.into_iter().chain(during).for_each(assert_hung_up);
    sessions.into_iter().for_each(Session::leave);
    eventually("no descriptor is left", || descriptors() == before);
}

#[test]
fn a_crowd_of_silent_strangers_is_bounded_and_lets_ranks_in() {
    let _alone = alone();
    let id = new_id();
    let address = Root::parse(&id).unwrap().address;
    let crowd: Vec<TcpStream> = (0..300).map(|_| connect(address)).collect();
    ranks(2, move |rank| {
        join(&id, introduction(rank, 2), TIMEOUT).unwrap().0.leave()
    });
    drop(crowd);
}

/// A connection to the root that passed the handshake.
fn proved(root: &Root) -> TcpStream {
    let mut stream = connect(root.address);
    let key = DoorKey {
        role: Role::Rendezvous,
        number: root.uid,
    };
    let mut caller = Caller::new(key, root.secret, [3; 32]);
    let mut inbox = Inbox::default();
    stream.write_all(&caller.hello()).unwrap();
    loop {
        let mut answer = [0; 33];
        stream.read_exact(&mut answer).unwrap();
        inbox.push(&answer);
        match caller.handle(&mut inbox) {
            CallerStep::Send(proof) => stream.write_all(&proof).unwrap(),
            step => {
                assert_eq!(step, CallerStep::Ready);
                return stream;
            }
        }
    }
}

#[test]
fn a_rank_that_dies_while_joining_is_named_to_the_others() {
    let _alone = alone();
    let id = new_id();
    let mut dying = proved(&Root::parse(&id).unwrap());
    let join_message = Message::Join {
        timeout_ms: 30_000,
        hub: None,
        introduction: introduction(2, 4),
    };
    dying.write_all(&join_message.to_bytes()).unwrap();
    let waiting = std::thread::spawn(move || join(&id, introduction(1, 4), TIMEOUT).map(|_| ()));
    drop(dying);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.text.contains("rank 2 (host:102) died"), "{error}");
    let late = join(&id, introduction(0, 4), TIMEOUT).map(|_| ()).unwrap_err();
    assert!(
        late.code == Code::RemoteError && late.text.contains("rank 2 (host:102) died"),
        "{late}"
    );
}

#[test]
fn what_a_proved_rank_sends_out_of_order_costs_only_itself() {
    let _alone = alone();
    let id = new_id();
    let root = Root::parse(&id).unwrap();
    for rubbish in [
        &[0xff; 64][..],
        &[4, 0, 0, 0, 13, 0, 0, 0, 1, 2, 3, 4],
        &[0, 0, 0, 0, 9, 0, 0, 0],
        &[0, 0, 0, 0, 5, 0, 0, 0],
    ] {
        let mut stream = proved(&root);
        stream.write_all(rubbish).unwrap();
        assert_hung_up(stream);
    }
    ranks(2, move |rank| {
        join(&id, introduction(rank, 2), TIMEOUT).unwrap().0.leave()
    });
}
