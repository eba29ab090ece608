//! The C interface: the only `extern "C"` functions of the library, and what turns C's arguments into checked values.
//!
//! ```text
//! exports.table  every export: name, signature, whether it is built      (build/abi.rs generates from it:)
//! exports.rs     both names of each export, every body inside the panic boundary of entry.rs
//! calls.rs       the bodies: parse, call a room, convert; no logic
//! pointers.rs    pointers become values or an error, once
//! config.rs      ncclConfig_t of every NCCL release
//! types.rs       the types of nccl.h
//! ```

mod calls;
pub mod config;
pub mod entry;
mod pointers;
pub mod types;

/// The C entries.
///
/// # Safety
/// As in C: every pointer is NULL or points to what the parameter's type says, for as long as the call lasts; buffers,
/// for as long as the stream's work does. A communicator may be any value: it is looked up before it is believed.
#[allow(non_snake_case, clippy::missing_safety_doc)]
pub mod exports {
    use super::types::*;
    use super::{calls, entry};
    use std::ffi::{c_char, c_int, c_uint, c_void};

    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
