//! The program that runs under the sanitizers: 8 ranks as threads, every algorithm and path, on the callers' threads and
//! on streams, with graphs that outlive their communicators and aborts in mid-operation; and the proxy over loopback.
//!
//! It has no test harness, whose locks the sanitizers do not see, and counts for itself.

#[path = "sanitize/hca.rs"]
mod hca;
#[path = "sanitize/proxy.rs"]
mod proxy;

use nccl::abi::config::Config;
use nccl::abi::exports as api;
use nccl::abi::types::{ncclComm_t, ncclUniqueId};
use nccl::device::host::{Executable, Scheduler, Stream};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::thread;

const RANKS: usize = 8;
const FLOAT: i32 = 7;
const SUM: i32 = 0;

fn unique_id() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: id is a writable ncclUniqueId.
    assert_eq!(unsafe { api::ncclGetUniqueId(&mut id) }, 0);
    id
}

/// Joins a communicator whose ranks are on so many hosts in turns, as they say.
fn join(id: ncclUniqueId, ranks: usize, rank: usize, hosts: usize) -> ncclComm_t {
    let config = Config {
        host_id: Some((rank % hosts).to_string()),
        ..Config::default()
    };
    let mut comm = null_mut();
    let bytes = id.internal.map(|byte| byte as u8);
    let made = nccl::comm::init_rank(&mut comm, ranks as i32, vec![bytes], rank as i32, config);
    made.expect("a communicator");
    comm.cast()
}

/// All ranks reduce every count once; the number of wrong elements of all ranks.
fn reduce(counts: &'static [usize], hosts: usize) -> usize {
    let id = unique_id();
    let rank = move |rank: usize| {
        let comm = join(id, RANKS, rank, hosts);
        let mut wrong = 0;
        for count in counts {
            let mut data: Vec<f32> = (0..*count).map(|i| ((i * 7 + rank * 13) % 101) as f32).collect();
            let buffer = data.as_mut_ptr().cast::<c_void>();
            // SAFETY: the buffer has `count` floats and nobody else uses it.
            let result = unsafe { api::ncclAllReduce(buffer, buffer, *count, FLOAT, SUM, comm, null_mut()) };
            assert_eq!(result, 0);
            let expected = |i: usize| (0..RANKS).map(|r| ((i * 7 + r * 13) % 101) as f32).sum::<f32>();
            wrong += (0..*count).filter(|i| data[*i] != expected(*i)).count();
        }
        // SAFETY: a live handle.
        assert_eq!(unsafe { api::ncclCommDestroy(comm) }, 0);
        wrong
    };
    let threads: Vec<_> = (0..RANKS).map(|number| thread::spawn(move || rank(number))).collect();
    threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank's thread"))
        .sum()
}

/// Two ranks in threads, with their communicators.
fn pair<R: Send + 'static>(body: fn(usize, ncclComm_t, Stream) -> R, scheduler: &Scheduler, hosts: usize) -> Vec<R> {
    let id = unique_id();
    let rank = move |rank: usize, stream: Stream| body(rank, join(id, 2, rank, hosts), stream);
    let threads: Vec<_> = (0..2)
        .map(|number| (number, scheduler.stream()))
        .map(|(number, stream)| thread::spawn(move || rank(number, stream)))
        .collect();
    let ended = threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank's thread"));
    ended.collect()
}

/// In place on a stream; whether the call was taken.
fn add_up(data: &mut [f32], comm: ncclComm_t, stream: &Stream) -> bool {
    let buffer = data.as_mut_ptr().cast::<c_void>();
    // SAFETY: the caller keeps the data and leaves it alone until the stream is done.
    unsafe { api::ncclAllReduce(buffer, buffer, data.len(), FLOAT, SUM, comm, stream.handle().cast()) == 0 }
}

/// Eager operations and replays of a graph, which is replayed once more when its communicator is gone.
fn graphs(seed: u64, hosts: usize) -> bool {
    let scheduler = Scheduler::new(seed).expect("a scheduler");
    let captured = |_: usize, comm: ncclComm_t, stream: Stream| -> (bool, Stream, Executable, Vec<f32>) {
        let mut data = vec![1.0f32; 3000];
        stream.begin_capture().expect("a capture");
        let mut taken = add_up(&mut data, comm, &stream) && add_up(&mut data, comm, &stream);
        let graph = stream.end_capture().expect("a graph").instantiate();
        for _ in 0..2 {
            taken &= add_up(&mut data, comm, &stream);
            stream.launch(&graph).expect("launched");
        }
        stream.synchronize().expect("done");
        let right = data.iter().all(|element| *element == 64.0);
        // SAFETY: a live handle.
        let ended = unsafe { api::ncclCommDestroy(comm) } == 0;
        (taken && right && ended, stream, graph, data)
    };
    let ranks = pair(captured, &scheduler, hosts);
    for (_, stream, graph, _) in &ranks {
        stream.launch(graph).expect("launched");
    }
    ranks
        .iter()
        .all(|(right, stream, ..)| *right && stream.synchronize().is_ok())
}

/// Rank 0 is aborted by another thread while its stream runs an operation and holds more.
fn abort(seed: u64, hosts: usize) -> bool {
    let scheduler = Scheduler::new(seed).expect("a scheduler");
    let aborted = |rank: usize, comm: ncclComm_t, stream: Stream| {
        let mut data = vec![1.0f32; 3000];
        let handle = comm.addr();
        // The peer may come too late to be taken.
        let taken = add_up(&mut data, comm, &stream);
        if rank == 0 {
            assert!(taken && add_up(&mut data, comm, &stream) && add_up(&mut data, comm, &stream));
            let other = move || {
                // SAFETY: a live handle.
                unsafe { api::ncclCommAbort(std::ptr::without_provenance_mut(handle)) }
            };
            assert_eq!(thread::spawn(other).join().expect("the other thread"), 0);
        }
        stream.synchronize().expect("done");
        // SAFETY: a live handle.
        rank == 0 || unsafe { api::ncclCommDestroy(comm) } == 0
    };
    pair(aborted, &scheduler, hosts).into_iter().all(|ended| ended)
}

/// Ends a communicator from another thread, after so many turns of the scheduler's.
fn abort_elsewhere(comm: ncclComm_t, turns: usize) -> thread::JoinHandle<bool> {
    let handle = comm.addr();
    thread::spawn(move || {
        (0..turns).for_each(|_| thread::yield_now());
        // SAFETY: a live handle; a call of another thread is in an operation, or will be refused.
        unsafe { api::ncclCommAbort(std::ptr::without_provenance_mut(handle)) == 0 }
    })
}

/// Eight ranks lend each other their buffers. Rank 0, and in every other round rank 1, is aborted in mid-operation by
/// another thread; the others are told, or do not get in. Each rank's buffer goes as soon as its user may free it: when
/// the abort has returned, or the call with an error.
fn abort_of_a_lender(round: usize) -> bool {
    let id = unique_id();
    let rank = move |rank: usize| {
        let mut comm = null_mut();
        // SAFETY: comm is a writable handle.
        let made = unsafe { api::ncclCommInitRank(&mut comm, RANKS as i32, id, rank as i32) };
        assert_eq!(made, 0);
        let mut data = vec![1.0f32; 50_000];
        if rank == 0 {
            // On a stream: the call returns, and the operation goes on.
            let scheduler = Scheduler::new(round as u64).expect("a scheduler");
            let stream = scheduler.stream();
            // Another rank may have been aborted by now.
            let taken = (0..3).all(|_| add_up(&mut data, comm, &stream));
            assert!(taken || round % 2 == 1);
            let ended = abort_elsewhere(comm, round * 40).join().expect("the other thread");
            data.fill(-1.0);
            drop(data);
            stream.synchronize().expect("done");
            return ended;
        }
        let other = (rank == 1 && round % 2 == 1).then(|| abort_elsewhere(comm, round * 40));
        let buffer = data.as_mut_ptr().cast::<c_void>();
        // SAFETY: the buffer has so many floats and nobody else uses it.
        while unsafe { api::ncclAllReduce(buffer, buffer, data.len(), FLOAT, SUM, comm, null_mut()) } == 0 {}
        data.fill(-1.0);
        drop(data);
        match other {
            Some(other) => other.join().expect("the other thread"),
            // SAFETY: a live handle.
            None => unsafe { api::ncclCommAbort(comm) == 0 },
        }
    };
    let threads: Vec<_> = (0..RANKS).map(|number| thread::spawn(move || rank(number))).collect();
    let ended = threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank's thread"));
    let ended: Vec<bool> = ended.collect();
    ended.into_iter().all(|ended| ended)
}

/// Rank 0 is aborted while both ranks replay a graph; its buffer goes when its own replays are done.
fn abort_of_replays(seed: u64) -> bool {
    let scheduler = Scheduler::new(seed).expect("a scheduler");
    let aborted = |rank: usize, comm: ncclComm_t, stream: Stream| {
        let mut data = vec![1.0f32; 30_000];
        stream.begin_capture().expect("a capture");
        // Rank 1 may come too late to be taken.
        let taken = add_up(&mut data, comm, &stream) && add_up(&mut data, comm, &stream) || rank == 1;
        let graph = stream.end_capture().expect("a graph").instantiate();
        for _ in 0..3 {
            stream.launch(&graph).expect("launched");
        }
        let ended = rank == 1 || abort_elsewhere(comm, 100).join().expect("the other thread");
        stream.synchronize().expect("done");
        if rank == 0 {
            data.fill(-1.0);
            drop(data);
            return taken && ended;
        }
        // SAFETY: a live handle.
        taken && unsafe { api::ncclCommAbort(comm) == 0 }
    };
    pair(aborted, &scheduler, 1).into_iter().all(|ended| ended)
}

/// A communicator on a GPU, asked of a library that was built without device code.
fn says_host_only() -> bool {
    let (mut comm, id) = (null_mut(), unique_id());
    // SAFETY: comm is a writable handle.
    let refused = unsafe { api::ncclCommInitRank(&mut comm, 1, id, 0) } != 0 && comm.is_null();
    refused && nccl::observe::last_error::get().contains("feature host-only")
}

/// Two software HCAs write to each other while this thread and another post and read; the number of wrong words.
fn hca() -> usize {
    let (a, b) = hca::pair();
    let (to_b, to_a) = (b.remote(), a.remote());
    let other = thread::spawn(move || b.exchange(to_a));
    a.exchange(to_b) + other.join().unwrap_or(1)
}

fn main() {
    let mut passed = 0;
    let mut failed = 0;
    let mut check = |what: &str, ok: bool| {
        if ok {
            passed += 1;
        } else {
            failed += 1;
            println!("failed: {what}");
        }
    };
    std::env::set_var("OSSICLE_DEVICE", "host");
    check(
        "one-shot and two-shot",
        reduce(&[1, 100, 1000, 5000, 65536, 1, 200_000, 3], 1) == 0,
    );
    std::env::set_var("NCCL_ALGO", "Ring");
    check("ring alone", reduce(&[1, 10, 1000, 20_000], 1) == 0);
    std::env::set_var("NCCL_ALGO", "TwoShot");
    check("two-shot alone", reduce(&[1, 10, 1000, 20_000], 1) == 0);
    std::env::set_var("NCCL_ALGO", "OneShot");
    check("one-shot alone", reduce(&[1, 10, 1000, 16_000], 1) == 0);
    std::env::remove_var("NCCL_ALGO");
    check("a ring over two hosts", reduce(&[1, 10, 1000, 300_000], 2) == 0);
    for hosts in [1, 2] {
        check(
            "graphs that outlive a communicator",
            (0..4).all(|seed| graphs(seed, hosts)),
        );
        check("aborts in mid-operation", (0..4).all(|seed| abort(seed, hosts)));
    }
    check("aborts of a lender", (0..12).all(abort_of_a_lender));
    check("aborts in mid-replay", (0..8).all(abort_of_replays));
    std::env::set_var("OSSICLE_ZERO_COPY", "0");
    std::env::set_var("NCCL_ALGO", "TwoShot");
    check(
        "two-shot, all staged",
        reduce(&[1, 10, 1000, 20_000, 65_536, 3], 1) == 0,
    );
    check("aborts, all staged", (4..8).all(|seed| abort(seed, 1)));
    std::env::remove_var("NCCL_ALGO");
    std::env::remove_var("OSSICLE_ZERO_COPY");
    check("the proxy between two ranks", (0..4).all(proxy::exchange));
    check("software HCAs", (0..4).map(|_| hca()).sum::<usize>() == 0);
    if cfg!(feature = "host-only") {
        std::env::set_var("OSSICLE_DEVICE", "cuda");
        check("a library without device code says so", says_host_only());
    }
    println!("{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0));
}
