//! Slots from ring to ring, the thread's sleep, faults, and the end of a hold.

use super::rig::*;
use crate::bootstrap::Cancel;
use crate::error::{Code, Error};
use crate::proxy::{serve_on, Client, Connection, Direction, Names, Ring, RingGeometry};
use crate::transport::net::{Completion, SlotNote, Slots, Transfer};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + crate::transport::net::tests::TIMEOUT
}

fn payload(channel: usize, number: u64, most: usize) -> Vec<u8> {
    let bytes = (number as usize * 613 + channel * 17) % (most + 1);
    (0..bytes)
        .map(|at| (at * 7 + number as usize + channel) as u8)
        .collect()
}

/// Moves `count` chunks on every channel, some of them before the receiver's launch.
fn operation(from: &mut End, to: &mut End, ordinal: u64, count: u64) {
    from.launch();
    let mut late = ordinal % 2 == 1;
    if !late {
        to.launch();
    }
    let channels = from.kernels.len();
    let (mut sent, mut came) = (vec![0; channels], vec![0; channels]);
    until("all chunks are there", || {
        for channel in 0..channels {
            let kernel = &mut from.kernels[channel];
            if sent[channel] < count && kernel.may_send() {
                kernel.fill(&payload(channel, sent[channel], 4096), ordinal);
                sent[channel] += 1;
            }
            let kernel = &mut to.kernels[channel];
            if kernel.may_receive() {
                let (note, bytes) = kernel.drain();
                assert_eq!(note.ordinal, ordinal);
                assert!(
                    bytes == payload(channel, came[channel], 4096),
                    "chunk {} of channel {channel}",
                    came[channel]
                );
                came[channel] += 1;
            }
        }
        // The sender's slots are all under way.
        if late && sent.iter().all(|sent| *sent >= count.min(4)) {
            to.launch();
            late = false;
        }
        came.iter().all(|came| *came == count)
    });
    from.leave();
    to.leave();
}

#[test]
fn chunks_of_all_channels_arrive_in_operation_after_operation() {
    let geometry = RingGeometry {
        channels: 3,
        ..GEOMETRY
    };
    let (mut from, mut to) = link((fresh_key(), fresh_key()), geometry);
    for (ordinal, count) in [(1, 1), (2, 50), (3, 200), (7, 3), (8, 4)] {
        operation(&mut from, &mut to, ordinal, count);
        from.no_faults();
        to.no_faults();
    }
}

#[test]
fn an_idle_thread_uses_no_cpu_and_wakes() {
    let geometry = RingGeometry {
        channels: 8,
        ..GEOMETRY
    };
    let (mut from, mut to) = link((fresh_key(), fresh_key()), geometry);
    for ordinal in 1..4 {
        operation(&mut from, &mut to, ordinal, 5);
        from.wait_for_sleep();
        to.wait_for_sleep();
        // Peers' data does not wake it either.
        let before = cpu_ns(&to.hold().shared);
        from.hold().wake();
        from.kernels[0].send(b"early", ordinal);
        until("it is sent", || from.kernels[0].position == from.kernels[0].sent());
        assert_eq!(before, cpu_ns(&to.hold().shared));
        to.launch();
        assert_eq!(to.kernels[0].receive().1, b"early");
        to.leave();
    }
}

/// A kernel may have left before the thread looks for it.
#[test]
fn what_a_kernel_left_behind_is_sent() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    to.launch();
    for number in 0..20u8 {
        from.wait_for_sleep();
        from.kernels[0].fill(&[number], 1);
        from.hold().wake();
        assert_eq!(to.kernels[0].receive().1, [number]);
    }
}

#[test]
fn replays_need_no_call_while_a_guard_lives() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    let guards = (
        from.hold().keep_awake(),
        from.hold().keep_awake(),
        to.hold().keep_awake(),
    );
    for number in 0..10u8 {
        std::thread::sleep(Duration::from_millis(5));
        from.kernels[0].send(&[number], 1);
        assert_eq!(to.kernels[0].receive().1, [number]);
    }
    drop(guards.0);
    from.kernels[0].send(&[11], 1);
    assert_eq!(to.kernels[0].receive().1, [11]);
    drop((guards.1, guards.2));
    from.wait_for_sleep();
    to.wait_for_sleep();
    let guard = from.hold().keep_awake();
    drop(from.hold.take());
    drop(guard);
}

#[test]
fn one_thread_serves_many_holds() {
    let key = fresh_key();
    let geometry = RingGeometry {
        channels: 4,
        slots: 2,
        slot_bytes: 4096,
    };
    let mut links: Vec<(End, End)> = (0..25).map(|_| link((key, key), geometry)).collect();
    let thread = links[0].0.thread_id();
    for (number, (from, to)) in links.iter_mut().enumerate() {
        assert_eq!((from.thread_id(), to.thread_id()), (thread, thread));
        operation(from, to, 1 + number as u64, 5);
    }
    // All at once.
    for (from, to) in &links {
        from.launch();
        to.launch();
    }
    for number in 0..10u64 {
        for (from, _) in &mut links {
            from.kernels
                .iter_mut()
                .for_each(|kernel| kernel.send(&number.to_le_bytes(), 100));
        }
        for (_, to) in &mut links {
            for kernel in &mut to.kernels {
                assert_eq!(kernel.receive().1, number.to_le_bytes());
            }
        }
    }
    // Those that stay go on while others end.
    let mut last = links.pop().unwrap();
    drop(links);
    operation(&mut last.0, &mut last.1, 200, 5);
    let path = format!("/proc/self/task/{thread}");
    assert!(std::path::Path::new(&path).exists());
    drop(last);
    until("the thread is gone", || !std::path::Path::new(&path).exists());
}

#[test]
fn a_dropped_hold_touches_nothing_any_more() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    operation(&mut from, &mut to, 1, 3);
    to.launch();
    drop((from.hold.take(), to.hold.take()));
    for mut end in [from, to] {
        end.kernels.clear();
        assert_eq!(Arc::strong_count(&end.memory), 1);
    }
}

#[test]
fn a_peer_that_ends_without_farewell_is_a_fault_that_names_it() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    operation(&mut from, &mut to, 5, 3);
    to.launch();
    drop(from.hold.take());
    let fault = to.first_fault();
    let names = Names {
        rank: 1,
        peer: 0,
        channel: 0,
    };
    assert_eq!(
        (fault.direction, fault.names, fault.ordinal, fault.step),
        (Direction::Receive, names, 5, 2)
    );
    let error = fault.error();
    assert_eq!(error.code, Code::RemoteError);
    let expected = "rank 1, receiving from rank 0 on channel 0 (the last slot that came was of operation 5, step 2): ";
    assert!(
        error.text.starts_with(expected) && error.text.contains("127.0.0.1"),
        "{error}"
    );
    // With nothing left to drive the thread sleeps although a kernel waits for its end, and a drain says what happened.
    to.wait_for_sleep();
    assert_eq!(to.faults.lock().len(), 1);
    assert_eq!(to.hold().drain(soon(), &Cancel::default()), Err(error));
}

#[test]
fn a_receiver_that_is_gone_is_a_fault_of_the_sender() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    operation(&mut from, &mut to, 5, 3);
    drop(to.hold.take());
    from.launch();
    until("the sender notices", || {
        if from.kernels[0].may_send() {
            from.kernels[0].fill(&[1; 4096], 6);
        }
        !from.faults.lock().is_empty()
    });
    let text = from.first_fault().error().text;
    assert!(
        text.contains("rank 0, sending to rank 1") && text.contains("operation 6"),
        "{text}"
    );
}

#[test]
fn what_a_kernel_may_not_write_is_a_fault_of_its_connection_alone() {
    let bad_note = |bytes, ordinal| SlotNote {
        bytes,
        step: 0,
        ordinal,
    };
    type Damage = Box<dyn Fn(&mut Kernel)>;
    let damages: [(Damage, &str); 3] = [
        (
            Box::new(move |kernel| kernel.fill_with_note(bad_note(4097, 9))),
            "4097 bytes, and holds 4096",
        ),
        (
            Box::new(move |kernel| kernel.fill_with_note(bad_note(1, 4))),
            "operation 4 follows one of operation 5",
        ),
        (Box::new(|kernel| kernel.set_tail(kernel.position + 5)), "counter is 8"),
    ];
    for (damage, expected) in damages {
        let geometry = RingGeometry {
            channels: 2,
            ..GEOMETRY
        };
        let (mut from, mut to) = link((fresh_key(), fresh_key()), geometry);
        operation(&mut from, &mut to, 5, 3);
        from.launch();
        to.launch();
        damage(&mut from.kernels[1]);
        let fault = from.first_fault();
        assert_eq!((fault.names.channel, fault.cause.code), (1, Code::InternalError));
        assert!(fault.cause.text.contains(expected), "{}", fault.cause);
        from.kernels[0].send(b"whole", 6);
        assert_eq!(to.kernels[0].receive().1, b"whole");
        to.no_faults();
    }
}

#[test]
fn a_drain_waits_for_the_peer_and_says_farewell() {
    let geometry = RingGeometry {
        slots: 4,
        // More than the sockets' buffers hold.
        slot_bytes: 16 << 20,
        ..GEOMETRY
    };
    let (mut from, mut to) = link((fresh_key(), fresh_key()), geometry);
    let bytes = vec![3; geometry.slot_bytes];
    from.launch();
    for _ in 0..4 {
        from.kernels[0].send(&bytes, 1);
    }
    let late = from
        .hold()
        .drain(Instant::now() + Duration::from_millis(20), &Cancel::default());
    assert_eq!(late.unwrap_err().code, Code::RemoteError);
    from.leave();
    let cancel = Cancel::default();
    cancel.0.store(true, Ordering::Release);
    assert!(from
        .hold()
        .drain(soon(), &cancel)
        .unwrap_err()
        .text
        .contains("ncclCommAbort"));
    to.launch();
    let hold = from.hold.take().unwrap();
    let drain = std::thread::spawn(move || {
        let outcome = hold.drain(soon(), &Cancel::default());
        drop(hold);
        outcome
    });
    for _ in 0..4 {
        assert!(to.kernels[0].receive().1 == bytes);
    }
    assert_eq!(drain.join().unwrap(), Ok(()));
    // The receiver still waits, and takes the end of the connection for what it is.
    std::thread::sleep(Duration::from_millis(20));
    to.no_faults();
    from.no_faults();
    to.leave();
    assert_eq!(to.hold().drain(soon(), &Cancel::default()), Ok(()));
}

/// It has all that was sent, so that the farewell that comes late is no fault.
#[test]
fn a_receiver_may_end_before_its_sender() {
    let (mut from, mut to) = link((fresh_key(), fresh_key()), GEOMETRY);
    operation(&mut from, &mut to, 1, 9);
    assert_eq!(to.hold().drain(soon(), &Cancel::default()), Ok(()));
    drop(to.hold.take());
    assert_eq!(from.hold().drain(soon(), &Cancel::default()), Ok(()));
    from.no_faults();
    to.no_faults();
}

/// Does what a test wants.
struct Scripted<F>(F);

impl<F: FnMut() -> Result<Option<Completion>, Error> + Send> Transfer for Scripted<F> {
    fn register(&mut self, _: Slots) -> Result<(), Error> {
        Ok(())
    }
    fn post_send(&mut self, _: usize, _: SlotNote) -> Result<(), Error> {
        Ok(())
    }
    fn post_receive(&mut self, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        (self.0)()
    }
    fn say_farewell(&mut self) -> Result<bool, Error> {
        Ok(true)
    }
}

fn scripted(
    memory: &Arc<crate::device::Memory>,
    poll: impl FnMut() -> Result<Option<Completion>, Error> + Send + 'static,
) -> Vec<Connection> {
    vec![Connection {
        direction: Direction::Receive,
        ring: Ring::new(memory, 0, GEOMETRY, 0).unwrap(),
        transfer: Box::new(Scripted(poll)),
        names: Names {
            rank: 0,
            peer: 1,
            channel: 0,
        },
    }]
}

fn memory() -> Arc<crate::device::Memory> {
    use crate::device::{host, Device, Placement};
    let device: Arc<dyn Device> = host::open(0);
    Arc::new(device.allocate(GEOMETRY.bytes(), Placement::Pinned).unwrap())
}

/// An owner of a hold that ends in a fault's report ends on the proxy's own thread.
#[test]
fn a_hold_may_be_dropped_by_the_report_of_a_fault() {
    let memory = memory();
    let own: Arc<parking_lot::Mutex<Option<crate::proxy::Hold>>> = Arc::default();
    let dropped = own.clone();
    let client = Client {
        outstanding: Box::new(|| false),
        fault: Box::new(move |_| drop(dropped.lock().take())),
    };
    let connections = scripted(&memory, || Err(Error::remote("as a test wants it")));
    let hold = serve_on(fresh_key(), connections, client).unwrap();
    let shared = Arc::downgrade(&hold.shared);
    // The hold is in its place before the thread has a reason to look.
    let mut place = own.lock();
    hold.wake();
    *place = Some(hold);
    drop(place);
    until("the memory is let go of", || Arc::strong_count(&memory) == 1);
    until("the thread is gone", || shared.strong_count() == 0);
}

#[test]
fn a_panic_on_the_thread_is_a_fault_and_hangs_nobody() {
    let (memory, faults) = (memory(), Arc::new(AtomicU32::new(0)));
    let key = fresh_key();
    let told = faults.clone();
    let client = || {
        let told = told.clone();
        Client {
            outstanding: Box::new(|| true),
            fault: Box::new(move |_| {
                told.fetch_add(1, Ordering::AcqRel);
            }),
        }
    };
    let hold = serve_on(key, scripted(&memory, || panic!("as a test wants it")), client()).unwrap();
    until("the fault is told", || faults.load(Ordering::Acquire) == 1);
    until("the thread has ended", || hold.shared.is_dead());
    assert_eq!(
        hold.drain(soon(), &Cancel::default()).unwrap_err().code,
        Code::InternalError
    );
    // Another thread takes its place.
    let next = serve_on(key, scripted(&memory, || Ok(None)), client()).unwrap();
    assert!(!next.shared.is_dead() && !Arc::ptr_eq(&next.shared, &hold.shared));
    drop(hold);
    drop(next);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn a_forked_child_has_no_proxy_and_waits_for_none() {
    let memory = memory();
    let client = Client {
        outstanding: Box::new(|| false),
        fault: Box::new(|_| {}),
    };
    let hold = serve_on(fresh_key(), scripted(&memory, || Ok(None)), client).unwrap();
    // SAFETY: the child takes no lock of its parent's, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fresh = crate::proxy::RUNNING.get().lock().is_empty();
        drop(hold);
        // SAFETY: ends the child without running anything of its parent's.
        unsafe { libc::_exit(i32::from(!fresh)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above and writes its status to a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    drop(hold);
}
