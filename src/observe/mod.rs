//! What the library says of itself: the log (`NCCL_DEBUG`) and the last error (`ncclGetLastError`).

pub mod last_error;
pub mod log;
