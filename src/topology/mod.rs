//! Where a rank is: its host identity and its device.

pub mod host;
