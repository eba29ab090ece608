//! One operation that a caller asked for, its values validated: the first noun of the pipeline.

use crate::error::{Error, Result};
use std::ffi::{c_int, c_void};

/// `ncclDataType_t`, by NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    Int8 = 0,
    Uint8 = 1,
    Int32 = 2,
    Uint32 = 3,
    Int64 = 4,
    Uint64 = 5,
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
    Float8e4m3 = 10,
    Float8e5m2 = 11,
}

impl DataType {
    pub const ALL: [DataType; 12] = {
        use DataType::*;
        [
            Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16, Float8e4m3, Float8e5m2,
        ]
    };

    pub fn from_raw(raw: c_int) -> Result<DataType> {
        usize::try_from(raw)
            .ok()
            .and_then(|index| Self::ALL.get(index).copied())
            .ok_or_else(|| {
                Error::argument(format!(
                    "datatype is {raw}; valid are 0 (ncclInt8) to 11 (ncclFloat8e5m2)"
                ))
            })
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        use DataType::*;
        match self {
            Int8 | Uint8 | Float8e4m3 | Float8e5m2 => 1,
            Float16 | Bfloat16 => 2,
            Int32 | Uint32 | Float32 => 4,
            Int64 | Uint64 | Float64 => 8,
        }
    }

    /// The name of nccl-tests' `-d`, which the table of `ossicle perf` prints.
    pub fn name(self) -> &'static str {
        use DataType::*;
        match self {
            Int8 => "int8",
            Uint8 => "uint8",
            Int32 => "int32",
            Uint32 => "uint32",
            Int64 => "int64",
            Uint64 => "uint64",
            Float16 => "half",
            Float32 => "float",
            Float64 => "double",
            Bfloat16 => "bfloat16",
            Float8e4m3 => "f8e4m3",
            Float8e5m2 => "f8e5m2",
        }
    }
}

/// `ncclRedOp_t`, the built-in ones by NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
    Avg = 4,
}

impl ReduceOp {
    pub const ALL: [ReduceOp; 5] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Avg,
    ];

    pub fn from_raw(raw: c_int) -> Result<ReduceOp> {
        usize::try_from(raw)
            .ok()
            .and_then(|index| Self::ALL.get(index).copied())
            .ok_or_else(|| {
                Error::argument(format!(
                    "op is {raw}; valid are 0 (ncclSum) to 4 (ncclAvg) and operations that were created"
                ))
            })
    }

    /// The name of nccl-tests' `-o`.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
        }
    }
}

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    AllReduce,
    AllGather,
    /// `root` is as the caller gave it; the communicator knows whether it is a rank.
    Broadcast {
        root: c_int,
    },
}

impl Collective {
    /// NCCL's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "AllReduce",
            Collective::AllGather => "AllGather",
            Collective::Broadcast { .. } => "Broadcast",
        }
    }
}

/// One validated operation of one rank. `send` and `recv` are addresses on the communicator's device.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub collective: Collective,
    pub send: *const c_void,
    pub recv: *mut c_void,
    /// Elements; of an all-gather those of one rank.
    pub count: usize,
    pub datatype: DataType,
    /// Of a collective that reduces.
    pub op: ReduceOp,
    /// The caller's `cudaStream_t`.
    pub stream: *mut c_void,
}

// SAFETY: the addresses are values that are handed to a device; nothing in Request reads through them.
unsafe impl Send for Request {}

impl Request {
    /// What can be told only with the number of ranks and the own one: the root, the buffers that it decides on, and
    /// whether all ranks' data fit an address space.
    pub fn check(&self, ranks: u32, rank: u32) -> Result<()> {
        match self.collective {
            Collective::AllReduce => Ok(()),
            Collective::AllGather => match self.count.checked_mul(self.datatype.bytes() * ranks as usize) {
                Some(bytes) if bytes <= ADDRESS_SPACE_BYTES => Ok(()),
                _ => Err(Error::argument(format!(
                    "sendcount is {}: so many elements of {} bytes from each of {ranks} ranks do not fit an address space",
                    self.count,
                    self.datatype.bytes()
                ))),
            },
            Collective::Broadcast { root } if !(0..ranks as c_int).contains(&root) => {
                Err(Error::argument(format!("root is {root}; with {ranks} ranks it must be 0 to {}", ranks - 1)))
            }
            Collective::Broadcast { root } if root == rank as c_int && self.send.is_null() && self.count > 0 => {
                Err(Error::argument(format!("sendbuff is NULL on the root with count {}", self.count)))
            }
            Collective::Broadcast { .. } => Ok(()),
        }
    }
}

/// A program's half of the largest address space that x86-64 has.
pub const ADDRESS_SPACE_BYTES: usize = 1 << 56;
