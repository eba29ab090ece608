//! (under construction)

pub mod config;
