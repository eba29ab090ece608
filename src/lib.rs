//! Ossicle: the NCCL C ABI, complete, in Rust, with one switch that decides who drives the network.
//!
//! A call runs through these modules from top to bottom; each owns one noun.
//!
//! ```text
//! abi        C arguments -> checked values          request   one operation, validated
//! group      when: nesting, batching, jobs          plan      how: algorithm, channels, steps (pure)
//! launch     where on the stream: kernel arguments  device    CUDA or host: memory, streams, launch
//! proxy      moves slots between hosts, on the CPU  initiated queues of an HCA and who posts there
//! transport  the links that a plan's steps use      comm      communicators: life, errors, abort
//! bootstrap  how ranks find and trust each other    topology  which host and device a rank is on
//! observe    log, last error                        sys       the only tables of dlopened functions
//! wire       formats that others define
//! ```

pub mod abi;
pub mod bootstrap;
pub mod comm;
pub mod device;
pub mod environment;
pub mod error;
pub mod group;
pub mod initiated;
pub mod launch;
pub mod observe;
pub mod plan;
pub mod proxy;
pub mod request;
pub mod sys;
pub mod topology;
pub mod transport;
pub mod wire;

// Unit tests share tests/oracle with the integration tests, which call this crate by its name.
#[cfg(test)]
extern crate self as nccl;
