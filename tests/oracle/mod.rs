//! The exact oracle of all-reduce: what every byte of the result must be, computed apart from the kernels.
//!
//! Inputs are arbitrary bit patterns of a type. One-shot and two-shot reduce in rank order in the wide type and round
//! once; a ring reduces each chunk in ring order and rounds at every hop. Half-precision arithmetic comes from the crate `half`.

use half::{bf16, f16};
use nccl::request::{DataType, ReduceOp};

/// In which order, and with how many roundings, a reduction happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In rank order, rounded once at the end: one-shot and two-shot.
    Ranks,
    /// With the kernel's cut of the data: channels and bytes of a slot. `hosts` says of each rank on which host it is; the
    /// ring goes from host to host. None: all on one.
    Ring {
        channels: usize,
        slot_bytes: usize,
        hosts: Option<&'static [usize]>,
    },
}

/// The ranks by their positions in a ring over hosts, which come in the order of their first rank.
fn ring(ranks: usize, hosts: Option<&[usize]>) -> Vec<usize> {
    let host = |rank: usize| hosts.map_or(0, |hosts| hosts[rank]);
    let first = |rank: usize| (0..ranks).find(|other| host(*other) == host(rank));
    let mut order: Vec<usize> = (0..ranks).collect();
    order.sort_by_key(|rank| (first(*rank), *rank));
    order
}

/// An element type with its arithmetic.
pub trait Element: Copy + PartialEq + std::fmt::Debug {
    type Wide: Copy;
    const DATATYPE: DataType;
    fn from_bits(bits: u64) -> Self;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// A rank's contribution to an average, and the end of it.
    fn avg_load(self, ranks: usize) -> Self::Wide;
    fn avg_finish(sum: Self::Wide, ranks: usize) -> Self::Wide;
    /// Equal bits, or both NaN: which NaN is not promised.
    fn same(self, other: Self) -> bool;
}

macro_rules! floating {
    ($type:ty, $wide:ty, $datatype:expr, $from:expr, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Wide = $wide;
            const DATATYPE: DataType = $datatype;
            fn from_bits(bits: u64) -> Self {
                #[allow(clippy::redundant_closure_call)]
                ($from)(bits)
            }
            fn widen(self) -> $wide {
                #[allow(clippy::redundant_closure_call)]
                ($widen)(self)
            }
            fn narrow(wide: $wide) -> Self {
                #[allow(clippy::redundant_closure_call)]
                ($narrow)(wide)
            }
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            fn max(a: $wide, b: $wide) -> $wide {
                if a.is_nan() {
                    b
                } else if b > a {
                    b
                } else {
                    a
                }
            }
            fn avg_load(self, ranks: usize) -> $wide {
                let factor = Self::narrow(1.0 / ranks as $wide).widen();
                Self::narrow(self.widen() * factor).widen()
            }
            fn avg_finish(sum: $wide, _ranks: usize) -> $wide {
                sum
            }
            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
        }
    };
}

floating!(
    f32,
    f32,
    DataType::Float32,
    |bits| f32::from_bits(bits as u32),
    |x| x,
    |x| x
);
floating!(f64, f64, DataType::Float64, f64::from_bits, |x| x, |x| x);
floating!(
    f16,
    f32,
    DataType::Float16,
    |bits| f16::from_bits(bits as u16),
    f16::to_f32,
    f16::from_f32
);
floating!(
    bf16,
    f32,
    DataType::Bfloat16,
    |bits| bf16::from_bits(bits as u16),
    bf16::to_f32,
    bf16::from_f32
);

macro_rules! integer {
    ($type:ty, $datatype:expr) => {
        impl Element for $type {
            type Wide = $type;
            const DATATYPE: DataType = $datatype;
            fn from_bits(bits: u64) -> Self {
                bits as $type
            }
            fn widen(self) -> $type {
                self
            }
            fn narrow(wide: $type) -> Self {
                wide
            }
            fn add(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            fn max(a: $type, b: $type) -> $type {
                std::cmp::Ord::max(a, b)
            }
            fn avg_load(self, _ranks: usize) -> $type {
                self
            }
            fn avg_finish(sum: $type, ranks: usize) -> $type {
                sum / ranks as $type
            }
            fn same(self, other: Self) -> bool {
                self == other
            }
        }
    };
}

integer!(i32, DataType::Int32);
integer!(u8, DataType::Uint8);

/// The result for all elements from every rank's input.
pub fn all_reduce<T: Element>(inputs: &[Vec<T>], op: ReduceOp, order: Order) -> Vec<T> {
    let ranks = inputs.len();
    let count = inputs[0].len();
    let load = |rank: usize, i: usize| match op {
        ReduceOp::Avg => inputs[rank][i].avg_load(ranks),
        _ => inputs[rank][i].widen(),
    };
    let reduce = |a, b| match op {
        ReduceOp::Max => T::max(a, b),
        _ => T::add(a, b),
    };
    let finish = |sum| match op {
        ReduceOp::Avg => T::avg_finish(sum, ranks),
        _ => sum,
    };
    let positions = match order {
        Order::Ring { hosts, .. } => ring(ranks, hosts),
        Order::Ranks => Vec::new(),
    };
    (0..count)
        .map(|i| match order {
            Order::Ranks => T::narrow(finish(
                (1..ranks).fold(load(0, i), |sum, rank| reduce(sum, load(rank, i))),
            )),
            Order::Ring {
                channels, slot_bytes, ..
            } => {
                let first = chunk_of(i, count, ranks, size_of::<T>(), channels, slot_bytes);
                let at = |hop: usize| load(positions[(first + hop) % ranks], i);
                let mut carried = T::narrow(at(0));
                for hop in 1..ranks {
                    let sum = reduce(carried.widen(), at(hop));
                    carried = T::narrow(if hop == ranks - 1 { finish(sum) } else { sum });
                }
                carried
            }
        })
        .collect()
}

/// The chunk that an element lies in: every channel has one contiguous part, cut into iterations of one chunk a rank.
fn chunk_of(i: usize, count: usize, ranks: usize, bytes: usize, channels: usize, slot_bytes: usize) -> usize {
    let pack = 16 / bytes;
    let part = count.div_ceil(channels).next_multiple_of(pack);
    let end = (i / part * part + part).min(count);
    let mut at = i / part * part;
    loop {
        let chunk = (slot_bytes / bytes).min((end - at).div_ceil(ranks).next_multiple_of(pack));
        if i < at + chunk * ranks {
            return (i - at) / chunk;
        }
        at += chunk * ranks;
    }
}

/// Repeatable bit patterns: a small multiplicative generator.
pub struct Patterns(pub u64);

impl Patterns {
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let x = self.0 ^ self.0 >> 29;
        x.wrapping_mul(0xbf58476d1ce4e5b9) ^ x >> 32
    }

    /// Any bit pattern: every NaN, infinity and subnormal too.
    pub fn elements<T: Element>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| T::from_bits(self.next())).collect()
    }
}
