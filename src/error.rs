//! The one error type inside the library: an NCCL result code and the sentence that `ncclGetLastError` will show.
//!
//! A sentence names the value that was wrong and what to do about it. Errors are made with the constructor of their
//! code (`Error::argument(format!(...))`), travel with `?`, and become an `ncclResult_t` at the C boundary only.

use std::fmt;

/// `ncclResult_t` without success and without `ncclTimeout`, which a library that reports 22809 may not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
}

impl Code {
    /// The code behind an `ncclResult_t` number that came from a peer or from shared memory.
    pub fn from_raw(raw: i32) -> Option<Code> {
        use Code::*;
        [
            UnhandledCudaError,
            SystemError,
            InternalError,
            InvalidArgument,
            InvalidUsage,
            RemoteError,
            InProgress,
        ]
        .into_iter()
        .find(|code| *code as i32 == raw)
    }
}

/// A failed call: its code and one sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    pub code: Code,
    pub text: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(code: Code, text: impl fmt::Display) -> Error {
        Error {
            code,
            text: text.to_string(),
        }
    }
    /// A value of the call itself is wrong (`ncclInvalidArgument`).
    pub fn argument(text: impl fmt::Display) -> Error {
        Error::new(Code::InvalidArgument, text)
    }
    /// The call cannot be made here or now, or ranks contradict each other (`ncclInvalidUsage`).
    pub fn usage(text: impl fmt::Display) -> Error {
        Error::new(Code::InvalidUsage, text)
    }
    /// The operating system or the network refused (`ncclSystemError`).
    pub fn system(text: impl fmt::Display) -> Error {
        Error::new(Code::SystemError, text)
    }
    /// A defect of this library (`ncclInternalError`).
    pub fn internal(text: impl fmt::Display) -> Error {
        Error::new(Code::InternalError, text)
    }
    /// Another rank failed, aborted or vanished (`ncclRemoteError`).
    pub fn remote(text: impl fmt::Display) -> Error {
        Error::new(Code::RemoteError, text)
    }
    /// The CUDA driver refused (`ncclUnhandledCudaError`).
    pub fn cuda(text: impl fmt::Display) -> Error {
        Error::new(Code::UnhandledCudaError, text)
    }
    /// The same error with a sentence of context in front.
    #[must_use]
    pub fn within(self, context: impl fmt::Display) -> Error {
        Error {
            code: self.code,
            text: format!("{context}: {}", self.text),
        }
    }
}
