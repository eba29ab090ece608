//! Inputs and exact results: what every rank contributes, and the one right answer, bit for bit.
//!
//! The values are chosen so that every order of reduction gives the same bits, and no tolerance is needed:
//!
//! - sum, and avg where dividing by the number of ranks is exact (integers; floats when it is a power of two): integers
//!   so small that every partial sum is exact in the type (256 in bfloat16, 2048 in half).
//! - max: the same integers; at a third of the elements all ranks are negative, so that an implementation which starts
//!   from zero is caught.
//! - avg of floats for other numbers of ranks n: an implementation may divide the sum by n, or multiply each input by
//!   the rounded 1/n first, as NCCL does. At each element at most two ranks contribute, both the same power of two, and
//!   the rest zero. Scaling 1/n by a power of two and doubling it are exact, so that both ways give the same bits.
//!
//! A value depends on the rank and on the element's index modulo a prime. No chunk or slot size is a multiple of it,
//! so data that lands at a wrong place is wrong data; and one period serves a message of any size.

use nccl::request::{DataType, ReduceOp};

/// The period of all data, in elements: the largest prime below 4096.
pub(crate) const PERIOD_ELEMS: usize = 4093;

/// The data of one (type, operation, number of ranks).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Oracle {
    datatype: DataType,
    op: ReduceOp,
    ranks: u32,
    /// No input is further from zero than this.
    magnitude_max: i64,
}

impl Oracle {
    /// None: there is no check for this type, operation and number of ranks.
    pub(crate) fn new(datatype: DataType, op: ReduceOp, ranks: u32) -> Option<Oracle> {
        let checked = matches!(op, ReduceOp::Sum | ReduceOp::Max | ReduceOp::Avg);
        let magnitude_max = largest_exact(datatype)? / i64::from(ranks.max(1));
        (checked && magnitude_max > 0).then_some(Oracle {
            datatype,
            op,
            ranks,
            magnitude_max,
        })
    }

    /// One period of what `rank` contributes in round `round`, as bytes of the type.
    pub(crate) fn input(&self, rank: u32, round: u32) -> Vec<u8> {
        self.period(|index| self.value(rank, round, index) as f64)
    }

    /// One period of the result of round `round`, as bytes of the type.
    pub(crate) fn expected(&self, round: u32) -> Vec<u8> {
        self.period(|index| {
            let values = (0..self.ranks).map(|rank| self.value(rank, round, index));
            match self.op {
                ReduceOp::Max => values.max().unwrap_or(0) as f64,
                ReduceOp::Avg if is_integer(self.datatype) => (values.sum::<i64>() / i64::from(self.ranks)) as f64,
                ReduceOp::Avg => values.sum::<i64>() as f64 / f64::from(self.ranks),
                _ => values.sum::<i64>() as f64,
            }
        })
    }

    fn period(&self, value: impl Fn(u32) -> f64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PERIOD_ELEMS * self.datatype.bytes());
        for index in 0..PERIOD_ELEMS as u32 {
            append(&mut bytes, self.datatype, value(index));
        }
        bytes
    }

    fn value(&self, rank: u32, round: u32, index: u32) -> i64 {
        let sparse = self.op == ReduceOp::Avg && !is_integer(self.datatype) && !self.ranks.is_power_of_two();
        let shared = mix(u64::from(round) << 32 | u64::from(index));
        let own = mix(shared ^ (u64::from(rank) + 1));
        let magnitude = if sparse {
            // The pair moves with the index, so that any run of `ranks` elements hears of every rank.
            let offset = (rank + self.ranks - index % self.ranks) % self.ranks;
            let partner = 1 + (shared >> 8) as u32 % (self.ranks - 1);
            if offset == 0 || offset == partner {
                1 << (shared % 6).min(u64::from(self.magnitude_max.ilog2()))
            } else {
                0
            }
        } else {
            (own >> 8) as i64 % (self.magnitude_max + 1)
        };
        let negative = match index % 3 {
            _ if is_unsigned(self.datatype) => false,
            0 => false,
            1 => true,
            _ => !sparse && own & 1 == 1,
        };
        if negative {
            -magnitude
        } else {
            magnitude
        }
    }
}

/// The largest integer up to which every integer is exact in the type and in a double; None where there is no check.
fn largest_exact(datatype: DataType) -> Option<i64> {
    use DataType::*;
    Some(match datatype {
        Int8 => 127,
        Uint8 => 255,
        Bfloat16 => 1 << 8,
        Float16 => 1 << 11,
        Float32 => 1 << 24,
        Int32 => i64::from(i32::MAX),
        Uint32 => i64::from(u32::MAX),
        Int64 | Uint64 | Float64 => 1 << 53,
        Float8e4m3 | Float8e5m2 => return None,
    })
}

fn is_unsigned(datatype: DataType) -> bool {
    matches!(datatype, DataType::Uint8 | DataType::Uint32 | DataType::Uint64)
}

fn is_integer(datatype: DataType) -> bool {
    is_unsigned(datatype) || matches!(datatype, DataType::Int8 | DataType::Int32 | DataType::Int64)
}

fn append(bytes: &mut Vec<u8>, datatype: DataType, value: f64) {
    match datatype {
        DataType::Float16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
        DataType::Bfloat16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
        DataType::Float32 => bytes.extend((value as f32).to_le_bytes()),
        DataType::Float64 => bytes.extend(value.to_le_bytes()),
        // In two's complement the low bytes of a number are that number in every narrower width that holds it.
        integer => bytes.extend(&(value as i64).to_le_bytes()[..integer.bytes()]),
    }
}

/// splitmix64's mixing step: neighbouring inputs give unrelated outputs.
fn mix(seed: u64) -> u64 {
    let mut word = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use nccl::device::Kernel;

    /// Arithmetic of one type as an implementation does it: rounded to the type after every step.
    trait Element: Copy + PartialOrd {
        fn read(bytes: &[u8]) -> Self;
        fn write(self) -> Vec<u8>;
        fn add(self, other: Self) -> Self;
        fn divided(self, ranks: u32) -> Self;
        /// Each input times the rounded reciprocal; None where the type has none.
        fn scaled(self, ranks: u32) -> Option<Self>;
    }

    macro_rules! element {
        ($type:ty, $wide:ty, $add:expr, $from:expr, $reciprocal:expr) => {
            impl Element for $type {
                fn read(bytes: &[u8]) -> Self {
                    <$type>::from_le_bytes(bytes.try_into().unwrap())
                }
                fn write(self) -> Vec<u8> {
                    self.to_le_bytes().to_vec()
                }
                fn add(self, other: Self) -> Self {
                    $add(self, other)
                }
                fn divided(self, ranks: u32) -> Self {
                    $from(<$wide>::from(self) / ranks as $wide)
                }
                fn scaled(self, ranks: u32) -> Option<Self> {
                    let reciprocal: Option<$type> = $reciprocal(ranks);
                    reciprocal.map(|reciprocal| $from(<$wide>::from(self) * <$wide>::from(reciprocal)))
                }
            }
        };
    }
    element!(f32, f32, |a: f32, b: f32| a + b, |x: f32| x, |n| Some(1.0 / n as f32));
    element!(f64, f64, |a: f64, b: f64| a + b, |x: f64| x, |n| Some(
        1.0 / f64::from(n)
    ));
    element!(f16, f32, |a: f16, b: f16| a + b, f16::from_f32, |n| Some(
        f16::from_f32(1.0 / n as f32)
    ));
    element!(bf16, f32, |a: bf16, b: bf16| a + b, bf16::from_f32, |n| Some(
        bf16::from_f32(1.0 / n as f32)
    ));
    element!(i32, i32, i32::wrapping_add, |x: i32| x, |_| None);
    element!(u8, u32, u8::wrapping_add, |x: u32| x as u8, |_| None);

    fn reduce<T: Element>(op: ReduceOp, inputs: &[T], ranks: u32, scale_first: bool) -> Option<T> {
        let terms: Vec<T> = match (op, scale_first) {
            (ReduceOp::Avg, true) => inputs.iter().map(|input| input.scaled(ranks)).collect::<Option<_>>()?,
            _ => inputs.to_vec(),
        };
        let all = terms.into_iter().reduce(|a, b| match op {
            ReduceOp::Max if b > a => b,
            ReduceOp::Max => a,
            _ => a.add(b),
        })?;
        Some(if op == ReduceOp::Avg && !scale_first {
            all.divided(ranks)
        } else {
            all
        })
    }

    fn check<T: Element>(datatype: DataType, op: ReduceOp, ranks: u32) {
        let oracle = Oracle::new(datatype, op, ranks).unwrap();
        let inputs: Vec<Vec<u8>> = (0..ranks).map(|rank| oracle.input(rank, 7)).collect();
        let expected = oracle.expected(7);
        let width = datatype.bytes();
        for at in (0..expected.len()).step_by(width) {
            let mut values: Vec<T> = inputs.iter().map(|input| T::read(&input[at..at + width])).collect();
            for order in 0..4 {
                for scale_first in [false, true] {
                    if let Some(result) = reduce(op, &values, ranks, scale_first) {
                        let want = &expected[at..at + width];
                        assert_eq!(result.write(), want, "{datatype:?} {op:?} {ranks} ranks, {at}, {order}");
                    }
                }
                match order {
                    0 => values.reverse(),
                    1 => values.rotate_left(ranks as usize / 2),
                    _ => values.sort_by(|a, b| a.partial_cmp(b).unwrap()),
                }
            }
        }
    }

    #[test]
    fn every_order_and_both_ways_to_average_give_the_expected_bits() {
        for ranks in [1, 2, 3, 5, 8, 13, 16] {
            for op in Kernel::OPS {
                check::<f32>(DataType::Float32, op, ranks);
                check::<f64>(DataType::Float64, op, ranks);
                check::<f16>(DataType::Float16, op, ranks);
                check::<bf16>(DataType::Bfloat16, op, ranks);
                check::<i32>(DataType::Int32, op, ranks);
                check::<u8>(DataType::Uint8, op, ranks);
            }
        }
    }

    #[test]
    fn a_missing_rank_or_a_shifted_block_shows() {
        for datatype in Kernel::DATATYPES {
            for op in Kernel::OPS {
                let oracle = Oracle::new(datatype, op, 6).unwrap();
                let expected = oracle.expected(1);
                for rank in 0..6 {
                    let input = oracle.input(rank, 1);
                    assert!(
                        input.iter().any(|byte| *byte != 0),
                        "{datatype:?} {op:?}: rank {rank} contributes nothing"
                    );
                    assert_ne!(input, expected, "{datatype:?} {op:?}");
                    assert_ne!(input, oracle.input((rank + 1) % 6, 1), "{datatype:?} {op:?}");
                    assert_ne!(input, oracle.input(rank, 2), "{datatype:?} {op:?}");
                }
                let mut shifted = expected.clone();
                shifted.rotate_left(1024 * datatype.bytes() % expected.len());
                assert_ne!(shifted, expected, "{datatype:?} {op:?}");
            }
        }
    }

    #[test]
    fn some_elements_are_negative_on_every_rank() {
        let oracle = Oracle::new(DataType::Int32, ReduceOp::Max, 16).unwrap();
        let negatives = oracle
            .expected(0)
            .chunks(4)
            .filter(|bytes| i32::read(bytes) < 0)
            .count();
        assert!(negatives > PERIOD_ELEMS / 4, "{negatives}");
    }

    #[test]
    fn what_cannot_be_checked_exactly_has_no_oracle() {
        assert!(Oracle::new(DataType::Float8e4m3, ReduceOp::Sum, 2).is_none());
        assert!(Oracle::new(DataType::Float32, ReduceOp::Prod, 2).is_none());
        assert!(Oracle::new(DataType::Bfloat16, ReduceOp::Sum, 300).is_none());
    }
}
