//! One-way latency of a message over the software HCA with a CPU poster: payload and a flag behind it, one doorbell, until
//! the peer's thread sees the flag. One thread plays both ends in turn, the HCAs' thread needs a core of its own.

use nccl::device::{host, Device};
use nccl::transport::hca::{
    access, CompletionQueue, Domain, Hca, Limits, Peer, Piece, QueueOptions, QueuePair, Registration,
};
use nccl::transport::hca::{Timeouts, FOR_EVER};
use nccl::transport::mlx5::{Completions, SendQueue};
use nccl::wire::mlx5::{Data, Fence, List, Memory, Operation, Remote, Report};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

const MEMORY: usize = 1 << 20;
/// Where the flag lies.
const FLAG: usize = MEMORY - 64;
const ROUNDS: usize = 4000;

struct Side {
    queue: SendQueue,
    completions: Completions,
    qp: QueuePair,
    registration: Registration,
    memory: Arc<Piece>,
    hca: Arc<Hca>,
}

impl Side {
    fn new(device: &Arc<dyn Device>) -> Side {
        let limits = Limits {
            qps: 1,
            cqs: 1,
            regions: 2,
            memory_bytes: MEMORY + (64 << 10),
        };
        let hca = Hca::open(device, limits).expect("an HCA");
        let domain: Domain = hca.domain();
        let memory = hca.allocate(MEMORY).expect("memory");
        let registration = hca.register(domain, &memory, access::ALL).expect("a region");
        let cq = CompletionQueue::create(&hca, 128, false).expect("a CQ");
        let options = QueueOptions {
            domain,
            send_blocks: 128,
            receives: 0,
            record_first: true,
        };
        let qp = QueuePair::create(&hca, options, &cq, &cq).expect("a QP");
        qp.init(access::ALL).expect("INIT");
        // SAFETY: both live as long as the side, whose fields are the only users.
        let (queue, completions) = unsafe { (SendQueue::new(qp.place()), Completions::new(cq.place())) };
        Side {
            queue,
            completions,
            qp,
            registration,
            memory,
            hca,
        }
    }

    fn connect(&self, other: &Side) {
        let peer: Peer = self.hca.attach(&other.hca.ticket(), None).expect("a peer");
        self.qp.connect(peer, other.qp.number()).expect("RTR");
        let timeouts = Timeouts {
            silence_ns: FOR_EVER,
            no_receive_ns: FOR_EVER,
        };
        self.qp.start(timeouts).expect("RTS");
    }

    fn send(&mut self, other: &Side, bytes: usize, round: u64) {
        let remote = |at: usize| Remote {
            address: other.memory.address() as u64 + at as u64,
            rkey: other.registration.key(),
        };
        let source = [Data::Memory(Memory {
            address: self.memory.address() as u64,
            lkey: self.registration.key(),
            bytes: bytes as u32,
        })];
        let flag = round.to_ne_bytes();
        let flag = [Data::Inline(&flag)];
        for (at, data, report) in [(0, &source, Report::OnError), (FLAG, &flag, Report::Always)] {
            let operation = Operation::Write {
                remote: remote(at),
                immediate: None,
                data: List::Borrowed(data),
            };
            self.queue.post(operation, report, Fence::None).expect("room");
        }
        self.queue.ring();
    }

    fn await_flag(&self, round: u64) {
        // SAFETY: a word of this side's memory that all change atomically.
        let flag = unsafe { AtomicU64::from_ptr(self.memory.address().add(FLAG).cast()) };
        while flag.load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
    }

    fn reap(&mut self) {
        while let Some(completion) = self.completions.poll() {
            self.queue.completed(completion.index);
        }
    }
}

fn main() {
    let device: Arc<dyn Device> = host::open(0);
    let (mut a, mut b) = (Side::new(&device), Side::new(&device));
    a.connect(&b);
    b.connect(&a);
    let _awake = a.hca.keep_awake();
    println!(
        "{:>10} {:>12} {:>12} {:>12}",
        "bytes", "least us", "median us", "p99 us"
    );
    let mut round = 0;
    for bytes in [8, 64, 1024, 4096, 65536, 524288] {
        let mut times: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                round += 1;
                let begun = Instant::now();
                a.send(&b, bytes, round);
                b.await_flag(round);
                b.send(&a, bytes, round);
                a.await_flag(round);
                let took = begun.elapsed().as_secs_f64() * 1e6 / 2.0;
                a.reap();
                b.reap();
                took
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{bytes:>10} {:>12.2} {:>12.2} {:>12.2}",
            times[0],
            times[ROUNDS / 2],
            times[ROUNDS * 99 / 100]
        );
    }
}
