//! Every check of a work request, with the syndrome that it gives; what follows is flushed.

use super::*;
use crate::wire::mlx5::{Request, BLOCK_BYTES, MAX_WQE_BYTES, UNIT_BYTES};

/// A good WRITE of 64 bytes as it goes into the ring at index 0, for a check to spoil.
fn good_write(a: &Side, b: &Side) -> Vec<u8> {
    bytes_of(a, a.write(0, b.remote(0), 64))
}

fn bytes_of(a: &Side, operation: Operation) -> Vec<u8> {
    let request = Request {
        index: 0,
        qpn: a.qp.number(),
        report: Report::Always,
        fence: Fence::None,
        solicited: false,
        operation,
    };
    let mut bytes = [0; MAX_WQE_BYTES];
    let units = request.emit(&mut bytes).unwrap();
    bytes[..units * UNIT_BYTES].to_vec()
}

/// Posts the bytes and a NOP behind them: the first fails so, the second is flushed, and neither has moved a byte.
fn fails(name: &str, make: impl Fn(&Side, &Side) -> Vec<u8>, syndrome: u8, vendor: u8) {
    let (mut a, mut b) = pair(&Shape::default());
    a.bytes().fill(1);
    let bytes = make(&a, &b);
    a.queue.post_bytes(&bytes).unwrap();
    let next = (bytes.len().div_ceil(BLOCK_BYTES)) as u16;
    let nop = a.queue.post(Operation::Nop, Report::OnError, Fence::None).unwrap();
    assert_eq!(nop, next);
    a.ring();
    println!("{name}");
    a.await_failure(syndrome, vendor);
    if bytes[7] & 0x3f != 0 {
        a.await_failure(wire::syndrome::WR_FLUSH, check::FLUSHED);
    }
    assert_eq!(a.qp.state(), State::Error);
    let refused_by_peer = [wire::syndrome::REMOTE_ACCESS, wire::syndrome::REMOTE_INVALID_REQUEST].contains(&syndrome);
    let state = if refused_by_peer {
        State::Error
    } else {
        State::ReadyToSend
    };
    assert_eq!(b.qp.state(), state, "{name}");
    assert!(b.bytes().iter().all(|byte| *byte == 0), "{name}");
    assert!(a.bytes().iter().all(|byte| *byte == 1), "{name}");
}

fn spoiled(at: usize, value: u8) -> impl Fn(&Side, &Side) -> Vec<u8> {
    move |a, b| {
        let mut bytes = good_write(a, b);
        bytes[at] = value;
        bytes
    }
}

#[test]
fn a_malformed_control_segment_is_refused() {
    let bad = wire::syndrome::LOCAL_QP_OP;
    fails("index", spoiled(2, 1), bad, check::WQE_INDEX);
    fails("QP", spoiled(5, 0xff), bad, check::WQE_QP);
    fails("no units", spoiled(7, 0), bad, check::WQE_UNITS);
    fails("more units than published", spoiled(7, 40), bad, check::WQE_UNITS);
    fails("opcode", spoiled(3, 0x3e), bad, check::WQE_OPCODE);
    fails("modifier", spoiled(0, 1), bad, check::WQE_OPCODE);
    fails("SEND", spoiled(3, wire::opcode::SEND), bad, check::NOT_BUILT);
    fails(
        "compare-and-swap",
        spoiled(3, wire::opcode::ATOMIC_CS),
        bad,
        check::NOT_BUILT,
    );
    fails("reserved bit", spoiled(11, 0x18), bad, check::WQE_FLAGS);
    fails("fence mode", spoiled(11, 0xa8), bad, check::WQE_FLAGS);
}

#[test]
fn segments_that_do_not_fit_are_refused() {
    let bad = wire::syndrome::LOCAL_QP_OP;
    fails("a WRITE without an address", spoiled(7, 1), bad, check::WQE_SEGMENTS);
    let five = |a: &Side, b: &Side| {
        let (remote, sink) = (b.remote(0), a.local(0, 8));
        let mut bytes = bytes_of(a, Operation::FetchAdd { remote, add: 1, sink });
        bytes.extend_from_slice(&[0; 16]);
        bytes[7] = 5;
        bytes
    };
    fails("an atomic of five units", five, bad, check::WQE_SEGMENTS);
    let longer = |a: &Side, b: &Side| {
        let mut bytes = bytes_of(a, write_of(b.remote(0), vec![Data::Inline(&[2; 12])]));
        bytes[35] = 29;
        bytes
    };
    fails("inline payload beyond the request", longer, bad, check::INLINE);
    let inline_read = |a: &Side, b: &Side| {
        let sink = List::Owned(vec![Data::Inline(&[2; 8])]);
        bytes_of(
            a,
            Operation::Read {
                remote: b.remote(0),
                sink,
            },
        )
    };
    fails("a READ into the request", inline_read, bad, check::INLINE);
    let length = wire::syndrome::LOCAL_LENGTH;
    let write = |bytes: usize| move |a: &Side, b: &Side| bytes_of(a, a.write(0, b.remote(0), bytes));
    fails("a segment of nothing", write(0), length, check::MESSAGE_LENGTH);
    fails(
        "more than a message",
        write((1 << 30) + 1),
        length,
        check::MESSAGE_LENGTH,
    );
    let sink4 = |a: &Side, b: &Side| {
        let (remote, sink) = (b.remote(0), a.local(0, 4));
        bytes_of(a, Operation::FetchAdd { remote, add: 1, sink })
    };
    fails("an atomic's sink of 4 bytes", sink4, length, check::MESSAGE_LENGTH);
}

#[test]
fn local_memory_is_checked() {
    let bad = wire::syndrome::LOCAL_PROTECTION;
    let with = |change: fn(&mut Memory)| {
        move |a: &Side, b: &Side| {
            let mut memory = a.local(0, 64);
            change(&mut memory);
            bytes_of(a, write_of(b.remote(0), vec![Data::Memory(memory)]))
        }
    };
    fails("no lkey", with(|m| m.lkey = 0), bad, check::LOCAL_KEY);
    fails("an old lkey", with(|m| m.lkey ^= 1), bad, check::LOCAL_KEY);
    fails(
        "an lkey beyond the table",
        with(|m| m.lkey = 0xffff_ff01),
        bad,
        check::LOCAL_KEY,
    );
    fails("before the region", with(|m| m.address -= 1), bad, check::LOCAL_RANGE);
    fails(
        "a byte too long",
        with(|m| m.bytes = MEMORY as u32 + 1),
        bad,
        check::LOCAL_RANGE,
    );
    fails(
        "around the address space",
        with(|m| m.address = u64::MAX - 3),
        bad,
        check::LOCAL_RANGE,
    );
}

#[test]
fn remote_memory_is_checked() {
    let bad = wire::syndrome::REMOTE_ACCESS;
    let with = |change: fn(&mut Remote)| {
        move |a: &Side, b: &Side| {
            let mut remote = b.remote(0);
            change(&mut remote);
            bytes_of(a, a.write(0, remote, 64))
        }
    };
    fails("no rkey", with(|r| r.rkey = 0), bad, check::REMOTE_KEY);
    fails("an old rkey", with(|r| r.rkey ^= 1), bad, check::REMOTE_KEY);
    fails(
        "an rkey beyond the table",
        with(|r| r.rkey = 0xffff_ff01),
        bad,
        check::REMOTE_KEY,
    );
    fails("before the region", with(|r| r.address -= 1), bad, check::REMOTE_RANGE);
    fails(
        "over the end",
        with(|r| r.address += MEMORY as u64 - 63),
        bad,
        check::REMOTE_RANGE,
    );
    let add = |a: &Side, b: &Side| {
        let (remote, sink) = (b.remote(4), a.local(0, 8));
        bytes_of(a, Operation::FetchAdd { remote, add: 1, sink })
    };
    let invalid = wire::syndrome::REMOTE_INVALID_REQUEST;
    fails("a misaligned atomic", add, invalid, check::ATOMIC_ALIGNMENT);
}

/// One request on a fresh pair after `prepare` changed something; it fails so.
fn fails_on(shape: &Shape, post: impl Fn(&mut Side, &Side), syndrome: u8, vendor: u8) {
    let (mut a, b) = pair(shape);
    post(&mut a, &b);
    a.ring();
    a.await_failure(syndrome, vendor);
}

#[test]
fn rights_of_regions_and_queues_are_checked() {
    let shape = Shape::default();
    let other_domain = |a: &mut Side, b: &Side| {
        let foreign = a.hca.register(a.hca.domain(), &a.memory, access::ALL).unwrap();
        let memory = Memory {
            lkey: foreign.key(),
            ..a.local(0, 8)
        };
        a.post(write_of(b.remote(0), vec![Data::Memory(memory)]));
        std::mem::forget(foreign);
    };
    fails_on(
        &shape,
        other_domain,
        wire::syndrome::LOCAL_PROTECTION,
        check::LOCAL_DOMAIN,
    );
    let read_only = |a: &mut Side, b: &Side| {
        let fixed = a.hca.register(a.domain, &a.memory, 0).unwrap();
        let sink = List::Owned(vec![Data::Memory(Memory {
            lkey: fixed.key(),
            ..a.local(0, 8)
        })]);
        a.post(Operation::Read {
            remote: b.remote(0),
            sink,
        });
        std::mem::forget(fixed);
    };
    fails_on(&shape, read_only, wire::syndrome::LOCAL_PROTECTION, check::LOCAL_ACCESS);
    let others = |a: &mut Side, b: &Side| {
        let foreign = b.hca.register(b.hca.domain(), &b.memory, access::ALL).unwrap();
        let remote = Remote {
            rkey: foreign.key(),
            ..b.remote(0)
        };
        a.post(a.write(0, remote, 8));
        std::mem::forget(foreign);
    };
    fails_on(&shape, others, wire::syndrome::REMOTE_ACCESS, check::REMOTE_DOMAIN);
    let readable = |a: &mut Side, b: &Side| {
        let fixed = b.hca.register(b.domain, &b.memory, access::REMOTE_READ).unwrap();
        let remote = Remote {
            rkey: fixed.key(),
            ..b.remote(0)
        };
        a.post(a.write(0, remote, 8));
        std::mem::forget(fixed);
    };
    fails_on(&shape, readable, wire::syndrome::REMOTE_ACCESS, check::REMOTE_ACCESS);
    let writes_only = Shape {
        access: access::REMOTE_WRITE,
        ..Shape::default()
    };
    let read = |a: &mut Side, b: &Side| {
        let sink = List::Owned(vec![Data::Memory(a.local(0, 8))]);
        a.post(Operation::Read {
            remote: b.remote(0),
            sink,
        });
    };
    fails_on(
        &writes_only,
        read,
        wire::syndrome::REMOTE_INVALID_REQUEST,
        check::PEER_ACCESS,
    );
}

#[test]
fn a_peer_that_does_not_receive_is_given_up() {
    let silent = |a: &mut Side, b: &Side| {
        b.qp.fail().unwrap();
        a.post(a.write(0, b.remote(0), 8));
    };
    let retries = wire::syndrome::TRANSPORT_RETRY_EXCEEDED;
    fails_on(&Shape::default(), silent, retries, check::PEER_SILENT);
    // One whose set-up comes late is waited for, and one that is gone is not found.
    let timeouts = Timeouts {
        silence_ns: FOR_EVER,
        no_receive_ns: 0,
    };
    let (mut a, b) = (Side::new(&Shape::default()), Side::new(&Shape::default()));
    let to_b = a.hca.attach(&b.hca.ticket(), None).unwrap();
    a.connect(to_b, b.qp.number(), timeouts);
    let index = a.post(a.write(0, b.remote(0), 8));
    a.ring();
    assert!(a.sent.poll().is_none());
    let to_a = b.hca.attach(&a.hca.ticket(), None).unwrap();
    b.connect(to_a, a.qp.number(), timeouts);
    a.hca.wake();
    a.await_good(index);
    let ticket = b.hca.ticket();
    drop(b);
    assert!(a.hca.attach(&ticket, None).is_err());
}
