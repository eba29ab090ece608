//! What the tests of streams share: seeds, buffers, communicators over streams of one scheduler.

use super::oracle::{self, Element, Order, Patterns};
use super::{cluster, profile};
use crate::device::host::Stream;
use crate::error::Result;
use crate::launch::{admit, Algorithm, Engine, Part, Work};
use crate::request::{Collective, ReduceOp, Request};
use crate::transport::Path;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seeds for a test: `short` of them, times OSSICLE_TEST_REPEATS, from one that is printed; OSSICLE_TEST_SEED names the
/// only one.
pub(super) fn seeds(short: u64) -> std::ops::Range<u64> {
    let number = |name| {
        std::env::var(name)
            .ok()
            .and_then(|text: String| text.parse::<u64>().ok())
    };
    if let Some(seed) = number("OSSICLE_TEST_SEED") {
        return seed..seed + 1;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let first = u64::from(now.subsec_nanos());
    println!("seeds from {first}; OSSICLE_TEST_SEED repeats one");
    first..first + short * number("OSSICLE_TEST_REPEATS").unwrap_or(1)
}

/// Elements that kernels, calls in streams and the test use in turns, ordered by streams.
pub(super) struct Buffer<T>(Box<[UnsafeCell<T>]>);

// SAFETY: plain numbers; whoever uses them is ordered by streams, which is what these tests are about.
unsafe impl<T: Send> Sync for Buffer<T> {}

impl<T> Drop for Buffer<T> {
    /// When a test fails, kernels may still run; what they write to must not become another test's.
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(std::mem::take(&mut self.0));
        }
    }
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(elements: &[T]) -> Arc<Buffer<T>> {
        Arc::new(Buffer(elements.iter().copied().map(UnsafeCell::new).collect()))
    }

    pub(super) fn address(&self) -> *mut T {
        UnsafeCell::raw_get(self.0.as_ptr())
    }

    pub(super) fn read(&self) -> Vec<T> {
        // SAFETY: each is a live element; nobody writes to it now.
        self.0.iter().map(|element| unsafe { *element.get() }).collect()
    }

    pub(super) fn write(&self, elements: &[T]) {
        for (place, element) in self.0.iter().zip(elements) {
            // SAFETY: as above, and nobody reads.
            unsafe { *place.get() = *element };
        }
    }

    #[track_caller]
    pub(super) fn check(&self, expected: &[T], what: &str) {
        for (i, (got, want)) in self.read().iter().zip(expected).enumerate() {
            assert!(got.same(*want), "{what}, element {i}: {got:?}, not {want:?}");
        }
    }
}

/// The ranks of one communicator, and how its sums are rounded.
pub(super) struct Ranks {
    pub(super) engines: Vec<Engine>,
    pub(super) order: Order,
}

pub(super) fn ranks(ranks: u32, algorithm: Algorithm, channels: u32) -> Ranks {
    Ranks {
        engines: cluster(&profile(ranks, algorithm, channels), Path::P2p),
        order: match algorithm {
            Algorithm::OneShot | Algorithm::TwoShot => Order::Ranks,
            Algorithm::Ring => Order::Ring {
                channels: channels as usize,
                slot_bytes: 256,
                hosts: None,
            },
        },
    }
}

pub(super) fn sum_request<T: Element>(from: &Buffer<T>, to: &Buffer<T>, stream: &Stream) -> Request {
    Request {
        collective: Collective::AllReduce,
        send: from.address().cast_const().cast(),
        recv: to.address().cast(),
        count: from.0.len(),
        datatype: T::DATATYPE,
        op: ReduceOp::Sum,
        stream: stream.handle(),
    }
}

/// One group: requests of ranks in the order of the calls.
pub(super) fn submit(calls: &[(&Engine, Request)]) -> Result<()> {
    let mut works: Vec<(&Engine, Vec<Work>)> = Vec::new();
    for (engine, request) in calls {
        let place = works.iter().position(|(other, _)| std::ptr::eq(*other, *engine));
        let place = place.unwrap_or_else(|| {
            works.push((engine, Vec::new()));
            works.len() - 1
        });
        works[place].1.extend(engine.prepare(request)?);
    }
    let batch: Vec<Part> = works.iter().map(|(engine, works)| (*engine, &works[..])).collect();
    admit(&batch)?.launch()
}

/// Inputs and outputs of one sum of all ranks, with what it must give.
pub(super) struct Sum {
    pub(super) from: Vec<Arc<Buffer<f32>>>,
    pub(super) to: Vec<Arc<Buffer<f32>>>,
    expected: Vec<f32>,
}

const UNTOUCHED: f32 = -12345.0;

impl Sum {
    pub(super) fn new(ranks: &Ranks, count: usize, seed: u64) -> Sum {
        let mut patterns = Patterns(seed);
        let inputs: Vec<Vec<f32>> = ranks.engines.iter().map(|_| patterns.elements(count)).collect();
        let untouched = vec![UNTOUCHED; count];
        Sum {
            from: inputs.iter().map(|input| Buffer::new(input)).collect(),
            to: inputs.iter().map(|_| Buffer::new(&untouched)).collect(),
            expected: oracle::all_reduce(&inputs, ReduceOp::Sum, ranks.order),
        }
    }

    pub(super) fn request(&self, rank: usize, stream: &Stream) -> Request {
        sum_request(&self.from[rank], &self.to[rank], stream)
    }

    /// Of every rank on its own stream, one call after the other.
    pub(super) fn call(&self, ranks: &Ranks, streams: &[Stream]) {
        for (rank, (engine, stream)) in ranks.engines.iter().zip(streams).enumerate() {
            submit(&[(engine, self.request(rank, stream))]).unwrap();
        }
    }

    #[track_caller]
    pub(super) fn check(&self, what: &str) {
        for (rank, to) in self.to.iter().enumerate() {
            to.check(&self.expected, &format!("{what}, rank {rank}"));
        }
    }

    pub(super) fn forget(&self) {
        self.to
            .iter()
            .for_each(|to| to.write(&vec![UNTOUCHED; self.expected.len()]));
    }

    pub(super) fn is_untouched(&self) -> bool {
        let untouched = |to: &Arc<Buffer<f32>>| to.read().iter().all(|element| *element == UNTOUCHED);
        self.to.iter().all(untouched)
    }
}
