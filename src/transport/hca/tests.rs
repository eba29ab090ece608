//! The engine through its queues: each operation, each check with its syndrome, wrap-around, flush, faults, processes.

mod checks;
mod operations;
mod processes;
mod queue_ends;

use super::*;
use crate::device::host;
use crate::transport::mlx5::{Completions, SendQueue};
use crate::wire::mlx5::{self as wire, Completion, Data, Fence, List, Memory, Operation, Outcome, Remote, Report};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const MEMORY: usize = 64 << 10;

fn limits() -> Limits {
    Limits {
        qps: 8,
        cqs: 8,
        regions: 8,
        memory_bytes: 1 << 20,
    }
}

struct Shape {
    send_blocks: usize,
    entries: usize,
    receives: usize,
    record_first: bool,
    ignore_overrun: bool,
    access: u32,
    timeouts: Timeouts,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            send_blocks: 64,
            entries: 64,
            receives: 16,
            record_first: true,
            ignore_overrun: false,
            access: access::ALL,
            timeouts: Timeouts {
                silence_ns: 0,
                no_receive_ns: 0,
            },
        }
    }
}

/// One end: an HCA with a QP, a CQ for what it sends and one for what it receives, and memory that all may use.
struct Side {
    // Before what they point into.
    queue: SendQueue,
    sent: Completions,
    received: Completions,
    qp: QueuePair,
    send_cq: Arc<CompletionQueue>,
    registration: Registration,
    memory: Arc<Piece>,
    domain: Domain,
    hca: Arc<Hca>,
}

impl Side {
    fn new(shape: &Shape) -> Side {
        let device: Arc<dyn Device> = host::open(0);
        let hca = Hca::open(&device, limits()).unwrap();
        let domain = hca.domain();
        let memory = hca.allocate(MEMORY).unwrap();
        let registration = hca.register(domain, &memory, access::ALL).unwrap();
        let send_cq = CompletionQueue::create(&hca, shape.entries, shape.ignore_overrun).unwrap();
        let receive_cq = CompletionQueue::create(&hca, shape.entries, shape.ignore_overrun).unwrap();
        let options = QueueOptions {
            domain,
            send_blocks: shape.send_blocks,
            receives: shape.receives,
            record_first: shape.record_first,
        };
        let qp = QueuePair::create(&hca, options, &send_cq, &receive_cq).unwrap();
        qp.init(shape.access).unwrap();
        // SAFETY: the queue pair and its CQs live as long as the side, whose fields are the only users.
        let (queue, sent, received) = unsafe {
            (
                SendQueue::new(qp.place()),
                Completions::new(send_cq.place()),
                Completions::new(receive_cq.place()),
            )
        };
        Side {
            queue,
            sent,
            received,
            qp,
            send_cq,
            registration,
            memory,
            domain,
            hca,
        }
    }

    fn connect(&self, peer: Peer, number: u32, timeouts: Timeouts) {
        self.qp.connect(peer, number).unwrap();
        self.qp.start(timeouts).unwrap();
    }

    fn address(&self, at: usize) -> u64 {
        self.memory.address() as u64 + at as u64
    }

    fn remote(&self, at: usize) -> Remote {
        Remote {
            address: self.address(at),
            rkey: self.registration.key(),
        }
    }

    fn local(&self, at: usize, bytes: usize) -> Memory {
        Memory {
            address: self.address(at),
            lkey: self.registration.key(),
            bytes: bytes as u32,
        }
    }

    /// The memory's bytes, while no request that uses it is under way.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the piece lives as long as the side, and the caller's completions say that the engine is done.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address(), MEMORY) }
    }

    fn post(&mut self, operation: Operation) -> u16 {
        self.queue.post(operation, Report::Always, Fence::None).unwrap()
    }

    fn ring(&mut self) {
        self.queue.ring();
        self.hca.wake();
    }

    /// The next completion of what was sent.
    fn await_sent(&mut self) -> Completion {
        let completion = awaited("a completion", || self.sent.poll());
        assert_eq!(completion.qpn, self.qp.number());
        self.queue.completed(completion.index);
        completion
    }

    fn await_good(&mut self, index: u16) {
        let completion = self.await_sent();
        assert!(matches!(completion.outcome, Outcome::Sent { .. }), "{completion:?}");
        assert_eq!(completion.index, index);
    }

    /// The next completion is of this failure.
    fn await_failure(&mut self, syndrome: u8, vendor: u8) {
        let got = self.await_sent().outcome;
        let Outcome::Failed {
            receive: false,
            syndrome: got_syndrome,
            vendor: got_vendor,
            ..
        } = got
        else {
            panic!("{got:?} instead of syndrome {syndrome:#x}, check {vendor}");
        };
        assert_eq!((got_syndrome, got_vendor), (syndrome, vendor));
    }

    fn write(&self, from: usize, to: Remote, bytes: usize) -> Operation<'static> {
        write_of(to, vec![Data::Memory(self.local(from, bytes))])
    }
}

fn write_of(remote: Remote, data: Vec<Data<'_>>) -> Operation<'_> {
    Operation::Write {
        remote,
        immediate: None,
        data: List::Owned(data),
    }
}

fn awaited<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(begun.elapsed() < LONG, "{what} does not come");
        std::thread::yield_now();
    }
}

/// Two HCAs of this process whose queue pairs are connected.
fn pair(shape: &Shape) -> (Side, Side) {
    let (a, b) = (Side::new(shape), Side::new(shape));
    let to_b = a.hca.attach(&b.hca.ticket(), None).unwrap();
    let to_a = b.hca.attach(&a.hca.ticket(), None).unwrap();
    a.connect(to_b, b.qp.number(), shape.timeouts);
    b.connect(to_a, a.qp.number(), shape.timeouts);
    (a, b)
}
