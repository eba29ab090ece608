//! Two software HCAs of one process, as a program with a thread at each end uses them.

use nccl::device::{host, Device};
use nccl::transport::hca::{
    access, CompletionQueue, Hca, Limits, Piece, QueueOptions, QueuePair, Registration, Timeouts, FOR_EVER,
};
use nccl::transport::mlx5::{Completions, SendQueue};
use nccl::wire::mlx5::{Data, Fence, List, Memory, Operation, Outcome, Remote, Report};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;

const MEMORY: usize = 64 << 10;
const PAYLOAD: usize = 4096;
const INBOX: usize = 16384;
const FLAG: usize = 32768;
const ROUNDS: u64 = 200;

pub struct End {
    queue: SendQueue,
    sent: Completions,
    received: Completions,
    qp: QueuePair,
    registration: Registration,
    memory: Arc<Piece>,
    hca: Arc<Hca>,
}

/// Two ends that are connected, each on a device of its own.
pub fn pair() -> (End, End) {
    let (a, b) = (End::new(0), End::new(1));
    for (from, to) in [(&a, &b), (&b, &a)] {
        let peer = from.hca.attach(&to.hca.ticket(), None).unwrap();
        from.qp.connect(peer, to.qp.number()).unwrap();
        let timeouts = Timeouts {
            silence_ns: FOR_EVER,
            no_receive_ns: FOR_EVER,
        };
        from.qp.start(timeouts).unwrap();
    }
    (a, b)
}

impl End {
    fn new(device: i32) -> End {
        let device: Arc<dyn Device> = host::open(device);
        let limits = Limits {
            qps: 1,
            cqs: 2,
            regions: 2,
            memory_bytes: 1 << 20,
        };
        let hca = Hca::open(&device, limits).unwrap();
        let domain = hca.domain();
        let memory = hca.allocate(MEMORY).unwrap();
        let registration = hca.register(domain, &memory, access::ALL).unwrap();
        let cqs = [(); 2].map(|()| CompletionQueue::create(&hca, 16, false).unwrap());
        let options = QueueOptions {
            domain,
            send_blocks: 16,
            receives: 4,
            record_first: true,
        };
        let qp = QueuePair::create(&hca, options, &cqs[0], &cqs[1]).unwrap();
        qp.init(access::ALL).unwrap();
        // SAFETY: all live as long as the end, whose fields are the only users.
        let (queue, sent, received) = unsafe {
            (
                SendQueue::new(qp.place()),
                Completions::new(cqs[0].place()),
                Completions::new(cqs[1].place()),
            )
        };
        End {
            queue,
            sent,
            received,
            qp,
            registration,
            memory,
            hca,
        }
    }

    pub fn remote(&self) -> Remote {
        Remote {
            address: self.memory.address() as u64,
            rkey: self.registration.key(),
        }
    }

    /// Sends payload, flag and immediate round after round while the other end does the same; how much was wrong.
    pub fn exchange(mut self, to: Remote) -> usize {
        let mut wrong = 0;
        let at = |offset: usize| Remote {
            address: to.address + offset as u64,
            ..to
        };
        self.queue.post_receives(2);
        for round in 1..=ROUNDS {
            // SAFETY: the first bytes of this end's memory; the last round's requests that read them are done.
            let source = unsafe { std::slice::from_raw_parts_mut(self.memory.address().cast::<u64>(), PAYLOAD / 8) };
            source.fill(round);
            let payload = [Data::Memory(Memory {
                address: self.memory.address() as u64,
                lkey: self.registration.key(),
                bytes: PAYLOAD as u32,
            })];
            let bytes = round.to_ne_bytes();
            let flag = [Data::Inline(&bytes)];
            self.queue
                .post(write(at(INBOX), None, &payload), Report::OnError, Fence::None)
                .unwrap();
            self.queue
                .post(write(at(FLAG), None, &flag), Report::OnError, Fence::None)
                .unwrap();
            self.queue.ring();
            self.hca.wake();
            // SAFETY: a word of this end's memory that all change atomically.
            let flag = unsafe { AtomicU64::from_ptr(self.memory.address().add(FLAG).cast()) };
            while flag.load(Ordering::Acquire) != round {
                thread::yield_now();
            }
            // SAFETY: the other end writes here again only when it was told that this was read.
            let inbox =
                unsafe { std::slice::from_raw_parts(self.memory.address().add(INBOX).cast::<u64>(), PAYLOAD / 8) };
            wrong += inbox.iter().filter(|word| **word != round).count();
            // The immediate says that what came was read.
            let told = self
                .queue
                .post(write(at(0), Some(round as u32), &[]), Report::Always, Fence::None)
                .unwrap();
            self.queue.ring();
            self.hca.wake();
            wrong += usize::from(!matches!(next(&mut self.sent), Outcome::Sent { .. }));
            self.queue.completed(told);
            let expected = Outcome::Received {
                immediate: round as u32,
                bytes: 0,
            };
            wrong += usize::from(next(&mut self.received) != expected);
            self.queue.post_receives(1);
        }
        // The other end may still need this one's queue.
        let done = self.queue.post(Operation::Nop, Report::Always, Fence::None).unwrap();
        self.queue.ring();
        self.hca.wake();
        next(&mut self.sent);
        self.queue.completed(done);
        wrong
    }
}

fn write<'a>(remote: Remote, immediate: Option<u32>, data: &'a [Data<'a>]) -> Operation<'a> {
    Operation::Write {
        remote,
        immediate,
        data: List::Borrowed(data),
    }
}

fn next(completions: &mut Completions) -> Outcome {
    loop {
        if let Some(completion) = completions.poll() {
            return completion.outcome;
        }
        thread::yield_now();
    }
}
