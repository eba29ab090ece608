//! Formats that others define. Each has two faces: raw views over bytes, which judge nothing, and meanings, which are
//! parsed from bytes and emitted to them. Nothing here does I/O.

pub mod mlx5;
