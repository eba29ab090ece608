//! Pointers from C become values once, here: NULL and absurd sizes are an error that names the argument.
//!
//! Everything is read and written unaligned, since C callers pass members of packed structs and byte buffers.

use crate::comm::RawComm;
use crate::error::{Error, Result};
use crate::request::{DataType, ADDRESS_SPACE_BYTES};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

/// Longest list (devices, ids) that a call may pass: far above any number of ranks in one process, far below what
/// would be read by mistake for a wild count.
const LIST_LIMIT: c_int = 4096;
/// Longest text that is looked through for its NUL.
const TEXT_LIMIT_BYTES: usize = 4096;

/// Where a call puts an answer.
#[derive(Clone, Copy)]
pub(super) struct Slot<T>(NonNull<T>);

impl<T> Slot<T> {
    /// # Safety
    /// `pointer` is NULL or may be written as a T for as long as the Slot is used.
    pub(super) unsafe fn new(name: &str, pointer: *mut T) -> Result<Slot<T>> {
        NonNull::new(pointer)
            .map(Slot)
            .ok_or_else(|| Error::argument(format!("{name} is NULL")))
    }

    pub(super) fn set(self, value: T) {
        // SAFETY: `new` was promised that this may be written.
        unsafe { self.0.as_ptr().write_unaligned(value) }
    }

    pub(super) fn address(self) -> *mut T {
        self.0.as_ptr()
    }
}

/// A communicator's handle that is not NULL; whether it is alive is for `comm` to say.
pub(super) fn handle<T>(comm: *mut T) -> Result<RawComm> {
    match comm.is_null() {
        true => Err(Error::argument("comm is NULL")),
        false => Ok(comm.cast()),
    }
}

/// A user's buffer may be NULL only when nothing is read from it.
pub(super) fn buffer(name: &str, pointer: *const c_void, count: usize) -> Result<()> {
    match pointer.is_null() && count > 0 {
        true => Err(Error::argument(format!("{name} is NULL with count {count}"))),
        false => Ok(()),
    }
}

/// `count` elements must fit an address space; a product that wraps would pass for a small buffer.
pub(super) fn extent(count: usize, datatype: DataType) -> Result<()> {
    match count.checked_mul(datatype.bytes()) {
        Some(bytes) if bytes <= ADDRESS_SPACE_BYTES => Ok(()),
        _ => Err(Error::argument(format!(
            "count is {count}: so many elements of {} bytes do not fit an address space",
            datatype.bytes()
        ))),
    }
}

/// Copies a list of `count` values.
///
/// # Safety
/// `first` is NULL or points to `count` readable values, if `count` is from 0 to LIST_LIMIT.
pub(super) unsafe fn list<T: Copy>(name: &str, first: *const T, count: c_int) -> Result<Vec<T>> {
    if !(0..=LIST_LIMIT).contains(&count) {
        return Err(Error::argument(format!(
            "{name} with {count} entries; 0 to {LIST_LIMIT} are possible"
        )));
    }
    if first.is_null() {
        return Err(Error::argument(format!("{name} is NULL")));
    }
    // SAFETY: the range was checked, and the caller promised `count` readable values.
    Ok((0..count as usize)
        .map(|index| unsafe { first.add(index).read_unaligned() })
        .collect())
}

/// Copies a NUL-terminated text; NULL is None. Bytes that are not UTF-8 are replaced.
///
/// # Safety
/// `pointer` is NULL or readable up to its NUL or for TEXT_LIMIT_BYTES, whichever comes first.
pub(super) unsafe fn text(name: &str, pointer: *const c_char) -> Result<Option<String>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    for index in 0..TEXT_LIMIT_BYTES {
        // SAFETY: no NUL stood before `index`, so the caller's promise covers it.
        match unsafe { pointer.cast::<u8>().add(index).read() } {
            0 => return Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            byte => bytes.push(byte),
        }
    }
    Err(Error::argument(format!(
        "{name} has no end within {TEXT_LIMIT_BYTES} bytes"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_wrap_are_refused_and_the_largest_that_fits_is_not() {
        assert!(extent(0, DataType::Float64).is_ok());
        assert!(extent(ADDRESS_SPACE_BYTES, DataType::Int8).is_ok());
        assert!(extent(ADDRESS_SPACE_BYTES / 4, DataType::Float32).is_ok());
        for (count, datatype) in [
            (usize::MAX / 2, DataType::Float32),
            (usize::MAX / 4 + 1, DataType::Float32),
            (ADDRESS_SPACE_BYTES / 4 + 1, DataType::Float32),
            (ADDRESS_SPACE_BYTES + 1, DataType::Uint8),
            (usize::MAX / 2, DataType::Uint8),
            (usize::MAX, DataType::Float64),
        ] {
            assert!(extent(count, datatype).is_err(), "{count} {datatype:?}");
        }
    }

    #[test]
    fn buffers_may_be_null_only_for_nothing() {
        let byte = 0u8;
        assert!(buffer("sendbuff", std::ptr::null(), 0).is_ok());
        assert!(buffer("sendbuff", (&raw const byte).cast(), 5).is_ok());
        let error = buffer("recvbuff", std::ptr::null(), 5).unwrap_err();
        assert_eq!(error, Error::argument("recvbuff is NULL with count 5"));
    }

    #[test]
    fn lists_are_bounded_and_read_from_odd_addresses() {
        let mut bytes = [0u8; 13];
        bytes[1..5].copy_from_slice(&7i32.to_ne_bytes());
        bytes[5..9].copy_from_slice(&(-8i32).to_ne_bytes());
        let odd = bytes[1..].as_ptr().cast::<c_int>();
        // SAFETY: three values lie behind `odd`; the wild counts are refused before anything is read.
        unsafe {
            assert_eq!(list("devlist", odd, 2), Ok(vec![7, -8]));
            assert_eq!(list("devlist", odd, 0), Ok(vec![]));
            for count in [-1, c_int::MIN, c_int::MAX, LIST_LIMIT + 1] {
                assert!(list("devlist", odd, count).is_err(), "{count}");
            }
            assert!(list::<c_int>("devlist", std::ptr::null(), 1).is_err());
        }
    }

    #[test]
    fn texts_end_at_nul_or_are_refused() {
        let long = [b'x' as c_char; TEXT_LIMIT_BYTES];
        // SAFETY: C strings, NULL, and one array of exactly the limit without a NUL.
        unsafe {
            assert_eq!(text("netName", c"socket".as_ptr()), Ok(Some("socket".into())));
            assert_eq!(text("netName", c"".as_ptr()), Ok(Some(String::new())));
            assert_eq!(text("netName", c"a\xff".as_ptr()), Ok(Some("a\u{fffd}".into())));
            assert_eq!(text("netName", std::ptr::null()), Ok(None));
            assert!(text("netName", long.as_ptr()).is_err());
        }
    }
}
