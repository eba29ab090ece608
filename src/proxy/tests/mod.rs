//! The proxy over loopback, with threads that play kernels.

mod bench;
mod machine;
mod rig;
mod serving;
