//! What moves over one connection, in pieces of any size, and what ends it.

use super::*;
use crate::error::{Code, Error};
use crate::transport::net::wire::{Frame, HEADER_BYTES};
use crate::transport::net::{Completion, SlotNote, Transfer};
use proptest::prelude::*;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// A receiver of two slots of 10,000 bytes, and a plain stream in the place of its sender.
fn receiver() -> (TcpStream, Socket, Arc<Memory>) {
    let listener = TcpListener::bind(loopback()).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    let (accepted, peer) = listener.accept().unwrap();
    accepted.set_nonblocking(true).unwrap();
    let fd = crate::bootstrap::Descriptor::new(accepted.into()).unwrap();
    let mut socket = Socket::new(fd, peer);
    let (memory, slots) = slots(2, SLOT_BYTES);
    socket.register(slots).unwrap();
    (stream, socket, memory)
}

const SLOT_BYTES: usize = 10_000;

/// The next thing that happens.
fn outcome(socket: &mut Socket) -> Result<Completion> {
    let begun = Instant::now();
    loop {
        match socket.poll() {
            Ok(None) => assert!(begun.elapsed() < TIMEOUT),
            Ok(Some(completion)) => return Ok(completion),
            Err(error) => return Err(error),
        }
    }
}

fn note(bytes: usize, ordinal: u64) -> SlotNote {
    SlotNote {
        bytes: bytes as u32,
        step: 3,
        ordinal,
    }
}

fn payload(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + number * 7 + at / 251) as u8).collect()
}

fn read(memory: &Memory, index: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the slot is completed, so nobody writes it.
    unsafe { std::slice::from_raw_parts(memory.address.add(index * SLOT_BYTES), bytes) }.to_vec()
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 1..64usize, 4000..4200usize, Just(SLOT_BYTES), 0..=SLOT_BYTES]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The stream comes in pieces that know nothing of headers and slots.
    #[test]
    fn slots_come_whole_however_the_stream_is_cut(
        sizes in prop::collection::vec(size(), 1..8),
        cuts in prop::collection::vec(1..6000usize, 1..40),
    ) {
        let (mut stream, mut socket, memory) = receiver();
        let mut bytes = Vec::new();
        for (number, size) in sizes.iter().enumerate() {
            let frame = Frame::Slot { position: number as u32, note: note(*size, 5 + number as u64) };
            bytes.extend_from_slice(&frame.emit().0);
            bytes.extend_from_slice(&payload(number, *size));
        }
        socket.post_receive(0).unwrap();
        let (mut next, mut cuts) = (0, cuts.into_iter().cycle());
        let mut rest = &bytes[..];
        let begun = Instant::now();
        while next < sizes.len() {
            prop_assert!(begun.elapsed() < TIMEOUT);
            let (piece, more) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
            stream.write_all(piece).unwrap();
            rest = more;
            if let Some(completion) = socket.poll().unwrap() {
                prop_assert_eq!(completion, Completion::Received(next % 2, note(sizes[next], 5 + next as u64)));
                prop_assert_eq!(read(&memory, next % 2, sizes[next]), payload(next, sizes[next]));
                next += 1;
                socket.post_receive(next % 2).unwrap();
            }
        }
    }
}

/// Slots that the sockets' buffers cannot hold, so that writes and reads are cut short.
#[test]
fn large_slots_go_through_small_buffers() {
    const BYTES: usize = 16 << 20;
    let (mut sender, mut receiver) = pairs(1).pop().unwrap();
    let ((from, from_slots), (to, to_slots)) = (slots(2, BYTES), slots(2, BYTES));
    sender.register(from_slots).unwrap();
    receiver.register(to_slots).unwrap();
    let sent: Vec<Vec<u8>> = (0..2).map(|number| payload(number, BYTES - number)).collect();
    for (index, bytes) in sent.iter().enumerate() {
        // SAFETY: inside the memory; the slot is not posted yet.
        unsafe {
            from.address
                .add(index * BYTES)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
        sender.post_send(index, note(bytes.len(), 1)).unwrap();
        receiver.post_receive(index).unwrap();
    }
    let (mut done, mut blocked, begun) = ((0, 0), 0, Instant::now());
    while done != (2, 2) {
        assert!(begun.elapsed() < TIMEOUT);
        match sender.poll().unwrap() {
            Some(completion) => {
                assert_eq!(completion, Completion::Sent(done.0));
                done.0 += 1;
            }
            None => blocked += 1,
        }
        if let Some(completion) = receiver.poll().unwrap() {
            assert_eq!(completion, Completion::Received(done.1, note(sent[done.1].len(), 1)));
            done.1 += 1;
        }
    }
    assert!(blocked > 0, "all of it fitted into the buffers: the test shows nothing");
    for (index, bytes) in sent.iter().enumerate() {
        // SAFETY: completed.
        let came = unsafe { std::slice::from_raw_parts(to.address.add(index * BYTES), bytes.len()) };
        assert!(came == &bytes[..]);
    }
}

#[test]
fn nothing_is_read_before_a_slot_is_posted() {
    let (mut stream, mut socket, memory) = receiver();
    let frame = Frame::Slot {
        position: 0,
        note: note(4, 1),
    };
    stream.write_all(&frame.emit().0).unwrap();
    stream.write_all(b"abcd").unwrap();
    assert_eq!(socket.poll(), Ok(None));
    socket.post_receive(1).unwrap();
    assert_eq!(outcome(&mut socket), Ok(Completion::Received(1, note(4, 1))));
    assert_eq!(read(&memory, 1, 4), b"abcd");
}

/// What comes of these bytes, after which the sender hangs up.
fn after(bytes: &[u8]) -> Error {
    let (mut stream, mut socket, memory) = receiver();
    socket.post_receive(0).unwrap();
    stream.write_all(bytes).unwrap();
    drop(stream);
    let error = outcome(&mut socket).unwrap_err();
    assert!(
        error.code == Code::RemoteError && error.text.contains("127.0.0.1"),
        "{error}"
    );
    assert_eq!(
        read(&memory, 1, SLOT_BYTES),
        vec![0; SLOT_BYTES],
        "bytes beyond the posted slot"
    );
    error
}

#[test]
fn a_bad_header_or_an_end_without_farewell_is_an_error() {
    let slot = |position, bytes| {
        Frame::Slot {
            position,
            note: note(bytes, 1),
        }
        .emit()
        .0
    };
    for (bytes, expected) in [
        (slot(1, 4).to_vec(), "slot 1 where slot 0 is due"),
        (slot(0, SLOT_BYTES + 1).to_vec(), "10001 bytes, where slots have 10000"),
        (slot(0, u32::MAX as usize).to_vec(), "4294967295 bytes"),
        (b"HTTP/1.1 400 Bad Request".to_vec(), "no header of ours"),
        (Frame::Farewell { position: 2 }.emit().0.to_vec(), "slot 2 where slot 0"),
        (vec![], "without a farewell"),
        (slot(0, 4)[..HEADER_BYTES - 1].to_vec(), "in the middle of a slot"),
        (slot(0, 4).to_vec(), "in the middle of a slot"),
    ] {
        let error = after(&bytes);
        assert!(error.text.contains(expected), "{error}");
    }
}

#[test]
fn after_a_farewell_the_end_is_no_error() {
    let (mut sender, mut receiver) = pairs(1).pop().unwrap();
    let ((_from, from_slots), (_to, to_slots)) = (slots(1, 64), slots(2, 64));
    sender.register(from_slots).unwrap();
    receiver.register(to_slots).unwrap();
    sender.post_send(0, note(64, 1)).unwrap();
    assert_eq!(sender.say_farewell(), Ok(false));
    assert_eq!(outcome(&mut sender), Ok(Completion::Sent(0)));
    assert_eq!(sender.say_farewell(), Ok(true));
    drop(sender);
    receiver.post_receive(0).unwrap();
    receiver.post_receive(1).unwrap();
    assert_eq!(outcome(&mut receiver), Ok(Completion::Received(0, note(64, 1))));
    // The farewell came in the same read, and the end after it is not looked for.
    for _ in 0..100 {
        assert_eq!(receiver.poll(), Ok(None));
    }
}

#[test]
fn a_receiver_that_is_gone_is_an_error_that_names_it() {
    let (mut sender, receiver) = pairs(1).pop().unwrap();
    let (_memory, slots) = slots(1, 1 << 20);
    sender.register(slots).unwrap();
    drop(receiver);
    let begun = Instant::now();
    let error = loop {
        assert!(begun.elapsed() < TIMEOUT);
        sender.post_send(0, note(1 << 20, 1)).unwrap();
        match outcome(&mut sender) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(
        error.text.contains("errno") && error.text.contains("127.0.0.1") && error.text.contains("log"),
        "{error}"
    );
}

#[test]
fn posts_beyond_the_slots_are_refused() {
    let (_stream, mut socket, _memory) = receiver();
    assert!(socket.post_send(2, note(1, 1)).is_err());
    assert!(socket.post_send(0, note(SLOT_BYTES + 1, 1)).is_err());
    assert!(socket.post_receive(2).is_err());
    for index in 0..2 {
        socket.post_receive(index).unwrap();
        socket.post_send(index, note(1, 1)).unwrap();
    }
    assert!(socket.post_receive(0).is_err() && socket.post_send(0, note(1, 1)).is_err());
}
