//! Ranks of the tests: handles that threads may pass on, and threads that are waited for with a limit.

use nccl::abi::config::Config;
use nccl::comm::{self, Progress, RawComm};
use nccl::error::{Code, Error, Result};
use nccl::group;
use nccl::request::{Collective, DataType, ReduceOp, Request};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A wait that takes longer has failed; no test is decided by less.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const POISON: i32 = 0x5a5a_5a5a;

pub(crate) type Id = [u8; 128];

/// A handle that threads may pass on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Comm(pub(crate) usize);

impl Comm {
    pub(crate) fn raw(self) -> RawComm {
        without_provenance_mut(self.0)
    }
    pub(crate) fn destroy(self) -> Result<()> {
        comm::destroy(self.raw())
    }
    pub(crate) fn abort(self) -> Result<()> {
        comm::abort(self.raw())
    }
    pub(crate) fn submit(self, send: &[i32], recv: &mut [i32]) -> Result<()> {
        assert_eq!(send.len(), recv.len());
        let request = Request {
            collective: Collective::AllReduce,
            send: send.as_ptr().cast(),
            recv: recv.as_mut_ptr().cast(),
            count: send.len(),
            datatype: DataType::Int32,
            op: ReduceOp::Sum,
            stream: null_mut(),
        };
        group::submit(self.raw(), request).map(drop)
    }
    /// The sum of `count` elements, of which rank r gives r * 1000 + i.
    pub(crate) fn check_sum(self, count: usize) {
        let (rank, ranks) = (
            comm::user_rank(self.raw()).unwrap(),
            comm::rank_count(self.raw()).unwrap(),
        );
        let mut recv = vec![POISON; count];
        self.submit(&contribution(rank, count), &mut recv).unwrap();
        assert_eq!(recv, sum(ranks, count), "rank {rank} of {ranks}");
    }
    /// The asynchronous error, once there is one.
    pub(crate) fn failure(self) -> Error {
        let start = Instant::now();
        loop {
            match comm::async_error(self.raw()).expect("a live handle") {
                Err(error) => return error,
                Ok(_) => assert!(start.elapsed() < LIMIT, "no asynchronous error came"),
            }
            pause();
        }
    }
    pub(crate) fn await_ready(self) {
        let start = Instant::now();
        while comm::async_error(self.raw())
            .expect("a live handle")
            .expect("a good communicator")
            != Progress::Done
        {
            assert!(start.elapsed() < LIMIT, "still in progress");
            pause();
        }
    }
}

pub(crate) fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}

pub(crate) fn contribution(rank: i32, count: usize) -> Vec<i32> {
    (0..count as i32).map(|i| rank * 1000 + i).collect()
}

pub(crate) fn sum(ranks: i32, count: usize) -> Vec<i32> {
    (0..count as i32)
        .map(|i| ranks * (ranks - 1) / 2 * 1000 + ranks * i)
        .collect()
}

pub(crate) fn new_id() -> Id {
    static HOST: std::sync::Once = std::sync::Once::new();
    HOST.call_once(|| std::env::set_var("OSSICLE_DEVICE", "host"));
    comm::create_unique_id().unwrap()
}

pub(crate) fn init(id: Id, ranks: i32, rank: i32, blocking: bool) -> Result<(Comm, Progress)> {
    let config = Config {
        blocking,
        ..Config::default()
    };
    init_with(id, ranks, rank, config)
}

/// A rank of this process that says it is on another host.
pub(crate) fn init_on(id: Id, ranks: i32, rank: i32, host: &str) -> Result<Comm> {
    let config = Config {
        host_id: Some(host.to_owned()),
        ..Config::default()
    };
    init_with(id, ranks, rank, config).map(|(comm, _)| comm)
}

fn init_with(id: Id, ranks: i32, rank: i32, config: Config) -> Result<(Comm, Progress)> {
    let mut raw: RawComm = without_provenance_mut(1);
    match comm::init_rank(&mut raw, ranks, vec![id], rank, config) {
        Ok(progress) => Ok((Comm(raw.addr()), progress)),
        Err(error) => {
            assert!(raw.is_null(), "a handle was left behind: {error}");
            Err(error)
        }
    }
}

pub(crate) fn join(id: Id, ranks: i32, rank: i32) -> Result<Comm> {
    init(id, ranks, rank, true).map(|(comm, progress)| {
        assert_eq!(progress, Progress::Done);
        comm
    })
}

/// Runs `body` in a thread for each rank that is named, and returns what each gave.
pub(crate) fn threads<R: Send + 'static>(ranks: &[i32], body: impl Fn(i32) -> R + Clone + Send + 'static) -> Vec<R> {
    let running: Vec<_> = ranks
        .iter()
        .map(|rank| {
            let (rank, body) = (*rank, body.clone());
            start(move || body(rank))
        })
        .collect();
    running.into_iter().map(outcome).collect()
}

pub(crate) type Running<R> = (JoinHandle<()>, mpsc::Receiver<R>);

pub(crate) fn start<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> Running<R> {
    let (sender, receiver) = mpsc::channel();
    (std::thread::spawn(move || drop(sender.send(body()))), receiver)
}

pub(crate) fn outcome<R>((thread, receiver): Running<R>) -> R {
    match receiver.recv_timeout(LIMIT) {
        Ok(value) => {
            thread.join().unwrap();
            value
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a thread hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

/// A communicator whose ranks are made by threads; all handles, in rank order.
pub(crate) fn make(ranks: i32) -> Vec<Comm> {
    let id = new_id();
    threads(&(0..ranks).collect::<Vec<_>>(), move |rank| {
        join(id, ranks, rank).unwrap()
    })
}

/// As `make`, with a letter for each rank's host.
pub(crate) fn make_on(hosts: &'static str) -> Vec<Comm> {
    let (id, ranks) = (new_id(), hosts.len() as i32);
    threads(&(0..ranks).collect::<Vec<_>>(), move |rank| {
        init_on(id, ranks, rank, &hosts[rank as usize..][..1]).unwrap()
    })
}

/// One operation of every rank, each in a thread of its own.
pub(crate) fn check_all(comms: &[Comm], count: usize) {
    let comms = comms.to_vec();
    threads(&(0..comms.len() as i32).collect::<Vec<_>>(), move |rank| {
        comms[rank as usize].check_sum(count)
    });
}

pub(crate) fn still_works() {
    let comms = make(2);
    check_all(&comms, 1000);
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

/// The sum of two ranks that this thread drives side by side.
pub(crate) fn check_pair(comms: &[Comm]) {
    let mut recv = [[POISON]; 2];
    group::start().unwrap();
    for (comm, recv) in comms.iter().zip(&mut recv) {
        comm.submit(&[1], recv).unwrap();
    }
    group::end().unwrap();
    assert_eq!(recv, [[2]; 2]);
}

/// As `still_works`, without a thread of the test's own.
pub(crate) fn still_works_in_one_thread() {
    let id = new_id();
    let comms = [0, 1].map(|rank| init(id, 2, rank, false).unwrap().0);
    comms.iter().for_each(|comm| comm.await_ready());
    check_pair(&comms);
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

pub(crate) fn code<T>(result: Result<T>) -> Option<Code> {
    result.err().map(|error| error.code)
}
