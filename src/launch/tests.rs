//! The kernels of the host device against the exact oracle: every type, operation, algorithm, count, alignment.

use super::clique::Clique;
use super::connect::{assemble, geometry, Parts};
use super::templates::Ring;
use super::*;
use crate::bootstrap::Descriptor;
use crate::device::host;
use crate::plan::Allowed;
use crate::request::{Collective, ReduceOp};
use crate::transport::{Inbox, Path};
use half::{bf16, f16};
use oracle::{Element, Order, Patterns};
use std::os::fd::BorrowedFd;

mod graphs;
mod hosts;
mod initiated;
mod lending;
mod moves;
#[path = "../../tests/oracle/mod.rs"]
mod oracle;
mod random;
mod rig;
mod streams;

/// Of what `algorithm` does.
pub(super) fn profile(ranks: u32, algorithm: Algorithm, channels: u32) -> Profile {
    Profile {
        ranks,
        hosts: 1,
        allowed: Allowed {
            all_reduce: vec![algorithm],
            all_gather: vec![algorithm],
            broadcast: vec![algorithm],
        },
        blocks: channels,
        channel_bytes: 1,
        slot_bytes: 256,
        slots: 2,
        lines: 512,
        one_shot_bytes: 1 << 20,
        one_shot_move_bytes: 256,
        two_shot_block_bytes: 1,
        two_shot_slot_bytes: 256,
        threads: 32,
    }
}

/// All ranks of a communicator, connected without a bootstrap.
pub(super) fn cluster(profile: &Profile, path: Path) -> Vec<Engine> {
    let devices: Vec<_> = (0..profile.ranks).map(|rank| host::open(rank as i32)).collect();
    cluster_on(&devices, profile, path)
}

pub(super) fn cluster_on(devices: &[Arc<dyn Device>], profile: &Profile, path: Path) -> Vec<Engine> {
    cluster_with(devices, profile, path, false)
}

fn cluster_with(devices: &[Arc<dyn Device>], profile: &Profile, path: Path, zero_copy: bool) -> Vec<Engine> {
    let ring = Ring::new((0..profile.ranks).collect());
    let geometry = geometry(profile, &ring, &ring.order);
    let inboxes: Vec<Inbox> = devices
        .iter()
        .map(|device| Inbox::create(device, path, geometry).unwrap())
        .collect();
    let clique: Arc<Clique> = Arc::default();
    let uuids: Vec<_> = devices.iter().map(|device| device.uuid()).collect();
    let engine = |rank: usize| {
        let open = |peer: usize| match peer == rank {
            true => inboxes[peer].own(),
            false => {
                let copy = |fd: BorrowedFd| Descriptor::new(fd.try_clone_to_owned().unwrap()).unwrap();
                let fd = inboxes[peer].descriptor().map(copy);
                Inbox::open(&devices[rank], path, inboxes[peer].name(), fd, geometry).unwrap()
            }
        };
        assemble(Parts {
            device: devices[rank].clone(),
            rank: rank as u32,
            places: vec![String::from("test"); inboxes.len()],
            profile: profile.clone(),
            ring: &ring,
            inboxes: (0..inboxes.len()).map(|peer| Some(open(peer))).collect(),
            clique: clique.clone(),
            lending: Lending::new(devices[rank].as_ref(), (path, 1), &uuids, zero_copy),
            net: None,
        })
        .unwrap()
    };
    (0..inboxes.len()).map(engine).collect()
}

/// One all-reduce of all ranks; `shift` elements of misalignment, guard elements on both sides of the result.
fn run<T: Element>(engines: &[Engine], inputs: &[Vec<T>], op: ReduceOp, shift: usize, in_place: bool) -> Vec<Vec<T>> {
    const GUARD: usize = 64;
    let count = inputs[0].len();
    let canary = T::from_bits(0xa5a5_a5a5_a5a5_a5a5);
    let mut buffers: Vec<Vec<T>> = inputs
        .iter()
        .map(|input| {
            let mut buffer = vec![canary; count + 2 * GUARD + shift];
            if in_place {
                buffer[GUARD + shift..GUARD + shift + count].copy_from_slice(input);
            }
            buffer
        })
        .collect();
    let shifted: Vec<Vec<T>> = inputs
        .iter()
        .map(|input| [vec![canary; shift], input.clone()].concat())
        .collect();
    let batch: Vec<(&Engine, Work)> = engines
        .iter()
        .zip(buffers.iter_mut().zip(&shifted))
        .filter_map(|(engine, (buffer, input))| {
            let recv = buffer[GUARD + shift..].as_mut_ptr().cast::<c_void>();
            let send = if in_place {
                recv.cast_const()
            } else {
                input[shift..].as_ptr().cast()
            };
            let (collective, datatype, stream) = (Collective::AllReduce, T::DATATYPE, std::ptr::null_mut());
            let request = Request {
                collective,
                send,
                recv,
                count,
                datatype,
                op,
                stream,
            };
            engine.prepare(&request).unwrap().map(|work| (engine, work))
        })
        .collect();
    let parts: Vec<Part> = batch
        .iter()
        .map(|(engine, work)| (*engine, std::slice::from_ref(work)))
        .collect();
    admit(&parts).and_then(Admitted::launch).unwrap();
    let untouched = |guard: &[T]| guard.iter().all(|element| element.same(canary));
    for buffer in &buffers {
        assert!(
            untouched(&buffer[..GUARD + shift]) && untouched(&buffer[GUARD + shift + count..]),
            "guard written"
        );
    }
    buffers
        .into_iter()
        .map(|buffer| buffer[GUARD + shift..GUARD + shift + count].to_vec())
        .collect()
}

pub(super) fn check<T: Element>(engines: &[Engine], order: Order, seed: u64, counts: &[usize]) {
    let mut patterns = Patterns(seed);
    for (index, count) in counts.iter().enumerate() {
        for (number, op) in Kernel::OPS.into_iter().enumerate() {
            let inputs: Vec<Vec<T>> = engines.iter().map(|_| patterns.elements(*count)).collect();
            let expected = oracle::all_reduce(&inputs, op, order);
            let (shift, in_place) = ((index + number) % 3, (index + number) % 2 == 1);
            for (rank, result) in run(engines, &inputs, op, shift, in_place).iter().enumerate() {
                for (i, (got, want)) in result.iter().zip(&expected).enumerate() {
                    assert!(
                        got.same(*want),
                        "{} {} ranks {} rank {rank} count {count} element {i}: {got:?}, not {want:?} ({order:?})",
                        T::DATATYPE.name(),
                        op.name(),
                        engines.len()
                    );
                }
            }
        }
    }
}

fn check_all_types(engines: &[Engine], order: Order, counts: &[usize]) {
    check::<f32>(engines, order, 1, counts);
    check::<f64>(engines, order, 2, counts);
    check::<f16>(engines, order, 3, counts);
    check::<bf16>(engines, order, 4, counts);
    check::<i32>(engines, order, 5, counts);
    check::<u8>(engines, order, 6, counts);
}

#[test]
fn one_shot_is_exact_for_every_type_operation_and_rank_count() {
    for ranks in [2, 3, 4, 7, 8, 16] {
        let channels = 1 + ranks % 3;
        let engines = cluster(&profile(ranks, Algorithm::OneShot, channels), Path::P2p);
        check_all_types(&engines, Order::Ranks, &[1, 2, 3, 7, 8, 9, 63, 64, 500]);
    }
}

#[test]
fn two_shot_is_exact_for_every_type_operation_and_rank_count() {
    for ranks in [2, 3, 4, 7, 8, 16] {
        let channels = 1 + ranks % 3;
        let engines = cluster(&profile(ranks, Algorithm::TwoShot, channels), Path::P2p);
        check_all_types(&engines, Order::Ranks, &[1, 2, 5, 16, 17, 255, 1000, 5003]);
    }
}

/// Counts of rounds and blocks that change from call to call, on the same staging.
#[test]
fn two_shot_keeps_its_staging_apart_over_many_operations() {
    let mut engines_of = Patterns(11);
    for ranks in [2, 3, 5] {
        let blocks = 3;
        let engines = cluster(
            &Profile {
                two_shot_block_bytes: 512,
                ..profile(ranks, Algorithm::TwoShot, blocks)
            },
            Path::P2p,
        );
        let counts: Vec<usize> = (0..40).map(|_| 1 + engines_of.next() as usize % 3000).collect();
        check::<i32>(&engines, Order::Ranks, u64::from(ranks), &counts);
    }
}

#[test]
fn ring_is_exact_for_every_type_operation_and_rank_count() {
    for ranks in [1, 2, 3, 4, 7, 8, 16] {
        let channels = 1 + ranks % 3;
        let engines = cluster(&profile(ranks, Algorithm::Ring, channels), Path::P2p);
        let order = Order::Ring {
            channels: channels as usize,
            slot_bytes: 256,
            hosts: None,
        };
        check_all_types(&engines, order, &[1, 2, 5, 16, 17, 255, 1000, 5003]);
    }
}

#[test]
fn shared_memory_links_give_the_same_bits() {
    for (algorithm, order) in [
        (Algorithm::OneShot, Order::Ranks),
        (Algorithm::TwoShot, Order::Ranks),
        (
            Algorithm::Ring,
            Order::Ring {
                channels: 2,
                slot_bytes: 256,
                hosts: None,
            },
        ),
    ] {
        let engines = cluster(&profile(3, algorithm, 2), Path::Shm);
        check::<f32>(&engines, order, 7, &[1, 100, 511]);
    }
}

#[test]
fn line_flags_survive_their_wrap_and_never_match_what_an_old_epoch_left() {
    for epoch in [u64::from(u32::MAX) - 3, (1 << 30) - 4, (1 << 32) - 4] {
        let engines = cluster(&profile(3, Algorithm::OneShot, 2), Path::P2p);
        for engine in &engines {
            // SAFETY: no kernel runs; the state is host memory of this device.
            unsafe { (*engine.programs.all_reduce.state).ll_epoch = epoch };
        }
        for _ in 0..8 {
            check::<i32>(&engines, Order::Ranks, epoch, &[900, 3]);
        }
    }
}

#[test]
fn lines_of_the_coming_epoch_are_cleared_once_a_period() {
    let engines = cluster(&profile(2, Algorithm::OneShot, 1), Path::P2p);
    check::<i32>(&engines, Order::Ranks, 1, &[1000]);
    let stale = |engine: &Engine| {
        let bytes = 2 * 2 * 512 * layout::LINE_BYTES;
        let area = engine.one_shot.as_ref().unwrap().area[engine.rank as usize];
        // SAFETY: the area has that many bytes and no kernel runs.
        unsafe { std::slice::from_raw_parts(area, bytes) }
            .iter()
            .filter(|byte| **byte != 0)
            .count()
    };
    assert!(engines.iter().all(|engine| stale(engine) > 1000));
    for engine in &engines {
        // SAFETY: no kernel runs; the state is host memory of this device.
        unsafe { (*engine.programs.all_reduce.state).ll_epoch = (1 << 30) - 2 };
    }
    check::<i32>(&engines, Order::Ranks, 2, &[1]);
    // Three operations of one element ran; two of them cleared, and only their lines are left.
    assert!(engines.iter().all(|engine| stale(engine) <= 2 * 2 * layout::LINE_BYTES));
}

/// Every kernel says at its start how many operations have started, and peers read it, over both paths.
#[test]
fn started_operations_are_counted_where_peers_read_them() {
    for (path, algorithm) in [(Path::P2p, Algorithm::OneShot), (Path::Shm, Algorithm::Ring)] {
        let engines = cluster(&profile(3, algorithm, 2), path);
        let seen = |engine: &Engine| {
            engine.control().started[..3]
                .iter()
                .map(|started| {
                    // SAFETY: the word lies in an inbox that the engine keeps, and no kernel runs.
                    unsafe { *started.load(Ordering::Relaxed) }
                })
                .collect::<Vec<u64>>()
        };
        for operations in 0..4 {
            assert!(engines.iter().all(|engine| seen(engine) == [operations; 3]));
            let inputs = vec![vec![1i32; 500]; 3];
            run(&engines, &inputs, ReduceOp::Sum, 0, false);
        }
    }
}

/// What a record says about the peer, for every state that it can be in.
#[test]
fn a_report_tells_where_the_peer_is() {
    let engines = cluster(&profile(2, Algorithm::Ring, 1), Path::P2p);
    let fault = &engines[0].control().fault;
    fault.ordinal.store(5, Ordering::Relaxed);
    fault.peer.store(1, Ordering::Relaxed);
    for (sequence, started, words) in [
        (1, 0, "has not started operation 5, nor any before it"),
        (2, 1, "has not started operation 5; its last is 0"),
        (3, 5, "has not started operation 5; its last is 4"),
        (4, 6, "has started operation 5 and waits"),
        (5, 9, "has gone on to operation 8"),
    ] {
        fault.peer_started.store(started, Ordering::Relaxed);
        fault.sequence.store(sequence, Ordering::Release);
        let text = engines[0].take_fault().unwrap().text;
        assert!(text.contains(&format!("the kernel of rank 1 {words}")), "{text}");
    }
}
