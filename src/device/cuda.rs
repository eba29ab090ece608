//! The CUDA device (under construction).

use super::{Device, Launch};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Whether the driver is there and has at least one GPU.
pub fn available() -> bool {
    false
}

pub fn count() -> Result<i32> {
    Err(Error::internal("under construction"))
}

pub fn open(_ordinal: Option<i32>) -> Result<Arc<dyn Device>> {
    Err(Error::internal("under construction"))
}

pub fn launch(_launch: &Launch) -> Result<()> {
    Err(Error::internal("under construction"))
}
