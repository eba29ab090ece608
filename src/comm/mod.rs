//! (under construction)

use crate::abi::config::Config;
use crate::error::{Error, Result};
use std::ffi::c_void;

/// The value of an `ncclComm_t`.
pub type RawComm = *mut c_void;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    InProgress,
}

pub fn create_unique_id() -> Result<[u8; 128]> {
    Err(Error::internal("under construction"))
}

pub fn init_rank(
    _slot: *mut RawComm,
    _ranks: i32,
    _ids: Vec<[u8; 128]>,
    _rank: i32,
    _config: Config,
) -> Result<Progress> {
    Err(Error::internal("under construction"))
}

pub fn init_all(_slots: *mut RawComm, _devices: i32, _list: Option<&[i32]>) -> Result<()> {
    Err(Error::internal("under construction"))
}

pub fn rank_count(_comm: RawComm) -> Result<i32> {
    Err(Error::internal("under construction"))
}

pub fn user_rank(_comm: RawComm) -> Result<i32> {
    Err(Error::internal("under construction"))
}

pub fn cuda_device(_comm: RawComm) -> Result<i32> {
    Err(Error::internal("under construction"))
}

pub fn async_error(_comm: RawComm) -> Result<Result<Progress>> {
    Err(Error::internal("under construction"))
}

pub fn finalize(_comm: RawComm) -> Result<Progress> {
    Err(Error::internal("under construction"))
}

pub fn destroy(_comm: RawComm) -> Result<()> {
    Err(Error::internal("under construction"))
}

pub fn abort(_comm: RawComm) -> Result<()> {
    Err(Error::internal("under construction"))
}
