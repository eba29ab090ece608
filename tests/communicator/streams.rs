//! Communicators on streams of the host device: groups, graphs, and ends while work is queued.

use crate::ranks::{contribution, make, outcome, start, still_works, sum, threads, Comm, POISON};
use nccl::device::host::{Event, Executable, Scheduler, Stream};
use nccl::error::{Code, Result};
use nccl::group;
use nccl::request::{Collective, DataType, ReduceOp, Request};

/// One operation of one rank, whose buffers stay where they are.
struct Sum {
    send: Box<[i32]>,
    recv: Box<[i32]>,
}

impl Sum {
    fn new(rank: i32, count: usize) -> Sum {
        Sum {
            send: contribution(rank, count).into(),
            recv: vec![POISON; count].into(),
        }
    }

    fn submit(&mut self, comm: Comm, stream: &Stream) -> Result<()> {
        let request = Request {
            collective: Collective::AllReduce,
            send: self.send.as_ptr().cast(),
            recv: self.recv.as_mut_ptr().cast(),
            count: self.send.len(),
            datatype: DataType::Int32,
            op: ReduceOp::Sum,
            stream: stream.handle(),
        };
        group::submit(comm.raw(), request).map(drop)
    }

    #[track_caller]
    fn check(&mut self, ranks: i32) {
        let expected = sum(ranks, self.recv.len());
        let wrong = (0..expected.len()).find(|i| self.recv[*i] != expected[*i]);
        assert_eq!(
            wrong.map(|i| (i, self.recv[i], expected[i])),
            None,
            "place, got, expected"
        );
        self.recv.fill(POISON);
    }
}

fn streams(scheduler: &Scheduler, number: usize) -> Vec<Stream> {
    (0..number).map(|_| scheduler.stream()).collect()
}

#[test]
fn groups_put_operations_of_several_communicators_into_streams() {
    const RANKS: usize = 3;
    let scheduler = Scheduler::new(1).unwrap();
    let sets = [make(RANKS as i32), make(RANKS as i32)];
    let (streams, gate) = (streams(&scheduler, 2 * RANKS), Event::of_caller());
    streams.iter().for_each(|stream| stream.wait(&gate).unwrap());
    // All ranks of one operation have one length.
    let mut sums: Vec<Sum> = (0..4 * RANKS)
        .map(|i| Sum::new((i % RANKS) as i32, 500 + i / RANKS))
        .collect();
    group::start().unwrap();
    for (i, sum) in sums.iter_mut().enumerate() {
        let rank = i % RANKS;
        sum.submit(sets[i / RANKS % 2][rank], &streams[rank + RANKS * (i / RANKS / 2)])
            .unwrap();
    }
    group::end().unwrap();
    assert!(sums.iter().all(|sum| sum.recv.iter().all(|element| *element == POISON)));
    gate.pass();
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    sums.iter_mut().for_each(|sum| sum.check(RANKS as i32));
    // Destroy waits for what is queued.
    group::start().unwrap();
    for (rank, sum) in sums[..RANKS].iter_mut().enumerate() {
        sum.submit(sets[0][rank], &streams[rank]).unwrap();
    }
    group::end().unwrap();
    sets.into_iter().flatten().for_each(|comm| comm.destroy().unwrap());
    sums[..RANKS].iter_mut().for_each(|sum| sum.check(RANKS as i32));
}

#[test]
fn an_abort_ends_what_streams_run_and_hold() {
    for seed in 0..8 {
        let scheduler = Scheduler::new(seed).unwrap();
        let comms = make(2);
        let streams = streams(&scheduler, 2);
        let mut sums: Vec<Sum> = (0..4).map(|_| Sum::new(0, 3000)).collect();
        for (i, sum) in sums.iter_mut().enumerate() {
            sum.submit(comms[0], &streams[i % 2]).unwrap();
        }
        // The peer comes to the first one, or to none.
        let (peers, mut peer) = (scheduler.stream(), Sum::new(1, 3000));
        if seed % 2 == 0 {
            peer.submit(comms[1], &peers).unwrap();
            peers.synchronize().unwrap();
        }
        let aborted = comms[0];
        outcome(start(move || aborted.abort())).unwrap();
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        if seed % 2 == 0 {
            sums[0].check(2);
            peer.check(2);
        }
        let told = comms[1].failure();
        assert!(told.code == Code::RemoteError && told.text.contains("rank 0"), "{told}");
        comms[1].destroy().unwrap();
        still_works();
        let fresh = make(2);
        let mut sums: Vec<Sum> = (0..2).map(|rank| Sum::new(rank, 2000)).collect();
        for ((sum, comm), stream) in sums.iter_mut().zip(&fresh).zip(&streams) {
            sum.submit(*comm, stream).unwrap();
        }
        fresh.into_iter().for_each(|comm| comm.destroy().unwrap());
        sums.iter_mut().for_each(|sum| sum.check(2));
    }
}

#[test]
fn the_loss_of_a_peer_ends_what_streams_run_and_hold() {
    let scheduler = Scheduler::new(2).unwrap();
    let comms = make(2);
    let stream = scheduler.stream();
    let mut sums: Vec<Sum> = (0..3).map(|_| Sum::new(0, 3000)).collect();
    sums.iter_mut().for_each(|sum| sum.submit(comms[0], &stream).unwrap());
    comms[1].abort().unwrap();
    assert_eq!(comms[0].failure().code, Code::RemoteError);
    stream.synchronize().unwrap();
    comms[0].destroy().unwrap();
}

#[test]
fn graphs_outlive_their_communicator() {
    const RANKS: usize = 2;
    let scheduler = Scheduler::new(3).unwrap();
    let comms = make(RANKS as i32);
    let streams = streams(&scheduler, RANKS);
    let mut sums: Vec<Sum> = (0..RANKS as i32).map(|rank| Sum::new(rank, 4000)).collect();
    let graphs: Vec<Executable> = (0..RANKS)
        .map(|rank| {
            streams[rank].begin_capture().unwrap();
            (0..2).for_each(|_| sums[rank].submit(comms[rank], &streams[rank]).unwrap());
            streams[rank].end_capture().unwrap().instantiate()
        })
        .collect();
    for _ in 0..3 {
        for (stream, graph) in streams.iter().zip(&graphs) {
            stream.launch(graph).unwrap();
        }
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        sums.iter_mut().for_each(|sum| sum.check(RANKS as i32));
    }
    threads(&[0, 1], move |rank| match rank {
        0 => comms[0].destroy(),
        _ => comms[1].abort(),
    })
    .into_iter()
    .for_each(|ended| ended.unwrap());
    streams
        .iter()
        .zip(&graphs)
        .for_each(|(stream, graph)| stream.launch(graph).unwrap());
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    still_works();
}
