//! Communicators: handles, creation, life, errors, abort.
//!
//! ```text
//! init        ids and ranks -> a communicator      registry   a handle of the caller -> a communicator
//! life        finalize, destroy, abort             alarm      what ends waits, and the asynchronous error
//! ```

mod alarm;
mod communicator;
mod init;
mod life;
mod registry;

pub use init::{create_unique_id, init_all, init_rank};
pub use life::{abort, destroy, finalize};

pub(crate) use communicator::{Communicator, Turn};
pub(crate) use init::{run, Init};
pub(crate) use life::{destroy_now, finalize_now};
pub(crate) use registry::CommRef;

use crate::error::Result;
use communicator::Phase;
use once_cell::sync::OnceCell;
use registry::Registry;
use std::ffi::c_void;

/// `ncclComm_t`: a value that only the registry understands.
pub type RawComm = *mut c_void;

/// What a call that succeeds leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// `ncclInProgress`: a thread of the library goes on with it.
    InProgress,
}

/// Communicators that a process may have at once: 1 MiB of address space.
const HANDLES: usize = 16 * 1024;

/// The handles of this process.
pub(crate) fn registry() -> Result<&'static Registry<Communicator>> {
    static REGISTRY: OnceCell<Registry<Communicator>> = OnceCell::new();
    REGISTRY.get_or_try_init(|| Registry::new(HANDLES))
}

/// `ncclCommCount`.
pub fn rank_count(comm: RawComm) -> Result<i32> {
    known(comm).map(|communicator| communicator.ranks as i32)
}

/// `ncclCommUserRank`.
pub fn user_rank(comm: RawComm) -> Result<i32> {
    known(comm).map(|communicator| communicator.rank as i32)
}

/// `ncclCommCuDevice`.
pub fn cuda_device(comm: RawComm) -> Result<i32> {
    known(comm).map(|communicator| communicator.device.ordinal())
}

fn known(comm: RawComm) -> Result<CommRef<Communicator>> {
    let communicator = registry()?.acquire(comm)?;
    communicator.known()?;
    Ok(communicator)
}

/// `ncclCommGetAsyncError`: outside, whether the handle is one; inside, the communicator's state or its first error.
pub fn async_error(comm: RawComm) -> Result<Result<Progress>> {
    let communicator = registry()?.acquire(comm)?;
    if communicator.phase() == Phase::Initialising {
        return Ok(Ok(Progress::InProgress));
    }
    communicator.alarm.take_fault();
    Ok(communicator
        .alarm
        .sticky()
        .map_or(Ok(Progress::Done), |error| Err(error.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use std::ptr::{null_mut, without_provenance_mut};

    #[test]
    fn no_call_takes_a_handle_that_is_none() {
        let stack = [0u64; 4];
        let garbage: [RawComm; 4] = [
            without_provenance_mut(usize::MAX),
            std::ptr::from_ref(&stack).cast_mut().cast(),
            without_provenance_mut(64),
            null_mut(),
        ];
        for comm in garbage {
            let refusals = [
                rank_count(comm).err(),
                user_rank(comm).err(),
                cuda_device(comm).err(),
                async_error(comm).err(),
            ];
            for refusal in refusals {
                assert_eq!(refusal.map(|error| error.code), Some(Code::InvalidArgument), "{comm:?}");
            }
            let ends = [finalize(comm).map(drop), destroy(comm), abort(comm)];
            for end in ends {
                assert_eq!(end.is_ok(), comm.is_null(), "{comm:?}: {end:?}");
            }
        }
    }
}
