//! Making connections: both ways at once, among strangers, and in vain.

use super::*;
use crate::error::Code;
use crate::transport::net::Transfer;
use crate::transport::net::{Completion, SlotNote};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Instant;

fn purpose(sender: u32, receiver: u32, channel: u32) -> Purpose {
    Purpose {
        sender,
        receiver,
        channel,
    }
}

/// Sends one byte from `sender` and asserts that it comes out of `receiver`.
fn assert_joined(sender: &mut Socket, receiver: &mut Socket, value: u8) {
    let ((from, from_slots), (to, to_slots)) = (slots(1, 16), slots(1, 16));
    sender.register(from_slots).unwrap();
    receiver.register(to_slots).unwrap();
    let note = SlotNote {
        bytes: 1,
        ..SlotNote::default()
    };
    // SAFETY: the slot is not posted.
    unsafe { from.address.write(value) };
    sender.post_send(0, note).unwrap();
    receiver.post_receive(0).unwrap();
    assert_eq!(sender.poll(), Ok(Some(Completion::Sent(0))));
    let begun = Instant::now();
    loop {
        match receiver.poll().unwrap() {
            Some(completion) => break assert_eq!(completion, Completion::Received(0, note)),
            None => assert!(begun.elapsed() < TIMEOUT),
        }
    }
    // SAFETY: the slot is completed.
    assert_eq!(unsafe { to.address.read() }, value);
}

#[test]
fn all_ranks_connect_to_all_at_once_and_every_channel_finds_its_own() {
    const RANKS: u32 = 4;
    const CHANNELS: u32 = 5;
    let (listeners, names): (Vec<Listener>, Vec<Name>) = (0..RANKS).map(|_| listen(SECRET)).unzip();
    let threads: Vec<_> = (0..RANKS)
        .zip(listeners)
        .map(|(rank, listener)| {
            let names = names.clone();
            thread::spawn(move || {
                let others = || (0..RANKS).filter(|other| *other != rank);
                let connects: Vec<_> = others()
                    .flat_map(|other| (0..CHANNELS).map(move |channel| (other, channel)))
                    .map(|(other, channel)| (names[other as usize].clone(), purpose(rank, other, channel)))
                    .collect();
                let expects: Vec<_> = others()
                    .flat_map(|other| (0..CHANNELS).map(move |channel| purpose(other, rank, channel)))
                    .collect();
                let made = establish(listener, &connects, &expects, TIMEOUT).unwrap();
                let connects = connects.into_iter().map(|(_, purpose)| purpose);
                let sends: Vec<_> = connects.zip(made.connected).collect();
                let receives: Vec<_> = expects.into_iter().zip(made.accepted).collect();
                (sends, receives)
            })
        })
        .collect();
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for thread in threads {
        let made = thread.join().unwrap();
        sends.extend(made.0);
        receives.extend(made.1);
    }
    assert_eq!(sends.len(), (RANKS * (RANKS - 1) * CHANNELS) as usize);
    for (value, (purpose, mut sender)) in sends.into_iter().enumerate() {
        let place = receives.iter().position(|(other, _)| *other == purpose).unwrap();
        assert_joined(&mut sender, &mut receives.swap_remove(place).1, value as u8);
    }
    assert!(receives.is_empty());
}

/// Silent ones, ones that speak something else, ones with another secret, ones that hang up, more than are kept.
#[test]
fn strangers_get_nothing_and_hold_nobody_up() {
    let ((sender, _), (receiver, name)) = (listen(SECRET), listen(SECRET));
    let address = name.address;
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut foreign = TcpStream::connect(address).unwrap();
    foreign.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(TcpStream::connect(address).unwrap());
    let wanted = purpose(0, 1, 3);
    let (impostor, _) = listen([8; 32]);
    let called = name.clone();
    let impostor = thread::spawn(move || establish(impostor, &[(called, wanted)], &[], TIMEOUT));
    let peer = thread::spawn(move || {
        // The impostor was told before the peer comes.
        let refused = impostor.join().unwrap().err().unwrap();
        let made = establish(sender, &[(name, wanted)], &[], TIMEOUT).unwrap();
        (refused, made)
    });
    let mut accepted = establish(receiver, &[], &[wanted], TIMEOUT).unwrap().accepted;
    let (refused, mut made) = peer.join().unwrap();
    assert_eq!(refused.code, Code::RemoteError);
    assert!(
        refused.text.contains("another secret") && refused.text.contains("rank 1"),
        "{refused}"
    );
    assert_joined(&mut made.connected[0], &mut accepted[0], 9);
    let mut byte = [0];
    assert!(matches!(foreign.read(&mut byte), Ok(0) | Err(_)));
    drop(silent);
}

#[test]
fn a_rank_that_does_not_expect_a_connection_says_so() {
    let ((sender, _), (receiver, name)) = (listen(SECRET), listen(SECRET));
    let other = thread::spawn(move || establish(sender, &[(name, purpose(0, 1, 1))], &[], TIMEOUT));
    let waiting = thread::spawn(move || establish(receiver, &[], &[purpose(0, 1, 0)], Duration::from_secs(2)));
    let refused = other.join().unwrap().err().unwrap();
    assert!(
        refused.text.contains("does not expect") && refused.text.contains("channel 1"),
        "{refused}"
    );
    let late = waiting.join().unwrap().err().unwrap();
    assert_eq!(late.code, Code::SystemError);
    assert!(late.text.contains("from rank 0, channel 0"), "{late}");
}

#[test]
fn who_is_missing_is_named_and_a_cancel_ends_the_wait() {
    let ((own, _), (_open, name)) = (listen(SECRET), listen(SECRET));
    // The peer listens, and never takes the connection.
    let late = establish(own, &[(name, purpose(2, 5, 0))], &[], Duration::from_millis(50));
    let late = late.err().unwrap();
    assert!(
        late.text.contains("to rank 5 at 127.0.0.1") && late.text.contains("50 ms"),
        "{late}"
    );
    // Nobody listens there.
    let ((own, _), (closed, name)) = (listen(SECRET), listen(SECRET));
    drop(closed);
    let refused = establish(own, &[(name, purpose(2, 5, 0))], &[], TIMEOUT).err().unwrap();
    assert!(
        refused.text.contains("errno 111") && refused.text.contains("NCCL_SOCKET_IFNAME"),
        "{refused}"
    );
    let cancel = Cancel::default();
    cancel.0.store(true, std::sync::atomic::Ordering::Release);
    let limit = Limit {
        timeout: TIMEOUT,
        cancel: &cancel,
    };
    let ended = listen(SECRET).0.establish(&[], &[purpose(0, 1, 0)], &limit);
    assert!(ended.err().unwrap().text.contains("ncclCommAbort"));
}

#[test]
fn what_no_door_can_name_is_refused() {
    for wrong in [
        purpose(Purpose::MAX_RANK + 1, 0, 0),
        purpose(0, 1, Purpose::MAX_CHANNEL + 1),
    ] {
        assert!(establish(listen(SECRET).0, &[], &[wrong], TIMEOUT).is_err());
    }
}

#[test]
fn the_environment_chooses_the_interface() {
    let (listener, name) = Listener::open(SECRET).unwrap();
    assert_ne!(name.address.port(), 0);
    let text = serde_json::to_string(&name).unwrap();
    assert_eq!(serde_json::from_str::<Name>(&text).unwrap(), name);
    drop(listener);
}
