//! Where a rank is: its host identity and its device; which ranks are on one host.

pub mod host;
pub mod hosts;

pub use hosts::Hosts;
