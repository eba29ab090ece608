//! All-gather and broadcast on the host device: every byte, and none besides.

use super::oracle::{Order, Patterns};
use super::{check, cluster, profile};
use crate::launch::*;
use crate::plan::{Algorithm, Allowed};
use crate::transport::Path;

/// One collective that moves bytes, from and to buffers that begin `shift` bytes off; what every rank ends with. In
/// place, a rank's input lies where it belongs in its output.
fn move_bytes(
    engines: &[Engine],
    collective: Collective,
    inputs: &[Vec<u8>],
    shift: usize,
    in_place: bool,
) -> Vec<Vec<u8>> {
    let count = inputs[0].len();
    let blocks = if collective == Collective::AllGather {
        inputs.len()
    } else {
        1
    };
    let own = |rank: usize| if blocks > 1 { rank * count } else { 0 };
    let mut outputs = vec![vec![0xa5u8; shift + blocks * count + 64]; inputs.len()];
    let shifted: Vec<Vec<u8>> = inputs
        .iter()
        .map(|input| [vec![0; shift], input.clone()].concat())
        .collect();
    let works: Vec<(&Engine, Work)> = engines
        .iter()
        .enumerate()
        .filter_map(|(rank, engine)| {
            let output = &mut outputs[rank];
            let mut send = shifted[rank][shift..].as_ptr();
            if in_place {
                let place = shift + own(rank);
                output[place..place + count].copy_from_slice(&inputs[rank]);
                send = output[place..].as_ptr();
            }
            let request = Request {
                collective,
                send: send.cast(),
                recv: output[shift..].as_mut_ptr().cast(),
                count,
                datatype: DataType::Uint8,
                op: ReduceOp::Sum,
                stream: std::ptr::null_mut(),
            };
            engine.prepare(&request).unwrap().map(|work| (engine, work))
        })
        .collect();
    let parts: Vec<Part> = works
        .iter()
        .map(|(engine, work)| (*engine, std::slice::from_ref(work)))
        .collect();
    admit(&parts).and_then(Admitted::launch).unwrap();
    for output in &outputs {
        let guard = output[..shift].iter().chain(&output[shift + blocks * count..]);
        assert!(guard.into_iter().all(|byte| *byte == 0xa5), "guard written");
    }
    outputs
        .into_iter()
        .map(|output| output[shift..shift + blocks * count].to_vec())
        .collect()
}

pub(super) fn check_gather(engines: &[Engine], inputs: &[Vec<u8>], shift: usize, in_place: bool) {
    let gathered = move_bytes(engines, Collective::AllGather, inputs, shift, in_place);
    let (ranks, count) = (engines.len(), inputs[0].len());
    assert!(
        gathered.iter().all(|output| *output == inputs.concat()),
        "{ranks} ranks, count {count}"
    );
}

pub(super) fn check_broadcast(engines: &[Engine], root: usize, inputs: &[Vec<u8>], shift: usize, in_place: bool) {
    let collective = Collective::Broadcast { root: root as i32 };
    let sent = move_bytes(engines, collective, inputs, shift, in_place);
    let (ranks, count) = (engines.len(), inputs[0].len());
    assert!(
        sent.iter().all(|output| *output == inputs[root]),
        "{ranks} ranks, root {root}, count {count}"
    );
}

fn random_inputs(patterns: &mut Patterns, ranks: u32, count: usize) -> Vec<Vec<u8>> {
    (0..ranks).map(|_| patterns.elements::<u8>(count)).collect()
}

#[test]
fn all_gather_and_broadcast_move_every_byte_between_any_buffers() {
    for algorithm in Algorithm::ALL {
        for ranks in [1, 2, 3, 4, 5, 8, 16] {
            let path = if ranks == 3 { Path::Shm } else { Path::P2p };
            let engines = cluster(&profile(ranks, algorithm, 1 + ranks % 3), path);
            let mut patterns = Patterns(u64::from(ranks));
            for (index, count) in [1, 2, 3, 4, 16, 17, 255, 256, 1000, 3000, 4096].into_iter().enumerate() {
                let inputs = random_inputs(&mut patterns, ranks, count);
                let (shift, in_place) = ([0, 1, 4, 16][index % 4], index % 2 == 1);
                check_gather(&engines, &inputs, shift, in_place);
                check_gather(&engines, &inputs, shift, !in_place);
                for root in 0..ranks as usize {
                    check_broadcast(&engines, root, &inputs, shift, in_place ^ (root % 2 == 1));
                }
            }
        }
    }
}

/// Counts, roots and kinds that change from call to call, on the same areas, staging and counters as all-reduces.
#[test]
fn moves_and_sums_follow_each_other_in_any_order() {
    let mut patterns = Patterns(17);
    for ranks in [2, 3, 5] {
        for algorithm in Algorithm::ALL {
            // Sums of any size in lines, or none; moves as lines and through staging, or around the ring.
            let all = profile(ranks, algorithm, 3);
            let moves = match algorithm {
                Algorithm::Ring => vec![Algorithm::Ring],
                _ => Algorithm::ALL.to_vec(),
            };
            let engines = cluster(
                &Profile {
                    allowed: Allowed {
                        all_gather: moves.clone(),
                        broadcast: moves,
                        ..all.allowed
                    },
                    two_shot_block_bytes: 512,
                    ..all
                },
                Path::P2p,
            );
            let order = match algorithm {
                Algorithm::Ring => Order::Ring {
                    channels: 3,
                    slot_bytes: 256,
                    hosts: None,
                },
                _ => Order::Ranks,
            };
            for _ in 0..60 {
                let draw = patterns.next() as usize;
                let count = 1 + (draw >> 8) % [40, 3000][draw >> 4 & 1];
                let inputs = random_inputs(&mut patterns, ranks, count);
                match draw % 3 {
                    0 => check_gather(&engines, &inputs, draw >> 5 & 3, draw >> 7 & 1 == 1),
                    1 => check_broadcast(
                        &engines,
                        (draw >> 16) % ranks as usize,
                        &inputs,
                        draw >> 5 & 3,
                        draw >> 7 & 1 == 1,
                    ),
                    _ => check::<i32>(&engines, order, draw as u64, &[count % 700 + 1]),
                }
            }
        }
    }
}

/// Ranks whose buffers are aligned differently move units of different sizes, and still cut the data alike.
#[test]
fn ranks_need_not_agree_on_alignment() {
    for algorithm in Algorithm::ALL {
        let engines = cluster(&profile(3, algorithm, 2), Path::P2p);
        for count in [240, 4000] {
            let inputs = random_inputs(&mut Patterns(count as u64), 3, count);
            let mut outputs = vec![vec![0u8; 3 * count + 8]; 3];
            let works: Vec<Work> = engines
                .iter()
                .zip(&mut outputs)
                .enumerate()
                .map(|(rank, (engine, output))| {
                    let request = Request {
                        collective: Collective::AllGather,
                        send: inputs[rank].as_ptr().cast(),
                        recv: output[[0, 1, 4][rank]..].as_mut_ptr().cast(),
                        count,
                        datatype: DataType::Uint8,
                        op: ReduceOp::Sum,
                        stream: std::ptr::null_mut(),
                    };
                    engine.prepare(&request).unwrap().unwrap()
                })
                .collect();
            let parts: Vec<Part> = engines.iter().zip(works.iter().map(std::slice::from_ref)).collect();
            admit(&parts).and_then(Admitted::launch).unwrap();
            for (rank, output) in outputs.iter().enumerate() {
                let found = &output[[0, 1, 4][rank]..][..3 * count];
                assert_eq!(*found, inputs.concat()[..], "rank {rank}");
            }
        }
    }
}

/// Epochs around the clearing of the area and the wrap of the flags.
#[test]
fn moves_as_lines_survive_the_wrap_of_flags() {
    let mut patterns = Patterns(3);
    for epoch in [u64::from(u32::MAX) - 3, (1 << 30) - 4, (1 << 32) - 4] {
        let engines = cluster(&profile(3, Algorithm::OneShot, 2), Path::P2p);
        for engine in &engines {
            // SAFETY: no kernel runs; the state is host memory of this device.
            unsafe { (*engine.programs.all_reduce.state).ll_epoch = epoch };
        }
        for step in 0..12 {
            let inputs = random_inputs(&mut patterns, 3, [900, 3][step % 2]);
            match step % 3 {
                0 => check_gather(&engines, &inputs, 0, false),
                _ => check_broadcast(&engines, step % 3, &inputs, 0, false),
            }
        }
    }
}

#[test]
fn a_late_peer_is_reported_by_name_and_a_stop_ends_the_wait() {
    let moves = [
        Collective::AllGather,
        Collective::Broadcast { root: 0 },
        Collective::Broadcast { root: 1 },
    ];
    let of_moves = moves
        .into_iter()
        .flat_map(|collective| Algorithm::ALL.map(|algorithm| (collective, algorithm)))
        // The root of a ring waits for nobody while there are free slots.
        .filter(|pair| *pair != (Collective::Broadcast { root: 0 }, Algorithm::Ring));
    let of_sums = Algorithm::ALL.map(|algorithm| (Collective::AllReduce, algorithm));
    for (collective, algorithm) in of_moves.chain(of_sums) {
        let engines = cluster(&profile(2, algorithm, 1), Path::P2p);
        engines[0]
            .control()
            .report_after_ns
            .store(20_000_000, Ordering::Relaxed);
        let input = [1.0f32; 4];
        let mut output = [0.0f32; 8];
        let request = Request {
            collective,
            send: input.as_ptr().cast(),
            recv: output.as_mut_ptr().cast(),
            count: 4,
            datatype: DataType::Float32,
            op: ReduceOp::Sum,
            stream: std::ptr::null_mut(),
        };
        let work = engines[0].prepare(&request).unwrap().unwrap();
        let mut engines = engines.into_iter();
        let late = Arc::new(engines.next().unwrap());
        let waiting = late.clone();
        let thread = std::thread::spawn(move || admit(&[(&*waiting, &[work])]).and_then(Admitted::launch));
        let fault = loop {
            match late.take_fault() {
                Some(fault) => break fault,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(fault.code, crate::error::Code::InProgress);
        assert!(
            fault.text.contains("rank 0 waits for rank 1 (test) in operation 0")
                && fault.text.contains("rank 1 has not started operation 0"),
            "{fault}"
        );
        late.stop(Stop::Abort);
        assert_eq!(
            thread.join().unwrap().unwrap_err().code,
            crate::error::Code::RemoteError
        );
        assert!(late.take_fault().is_none());
    }
}
