//! The process-wide last error sentence behind `ncclGetLastError`.
//!
//! NCCL hands out a pointer to one static buffer that later errors overwrite. Here the sentences rotate through a
//! fixed set of static buffers, so that a caller who still reads the previous sentence while another thread fails is
//! not reading bytes in motion. Nothing is allocated and nothing is ever freed.

use parking_lot::Mutex;
use std::cell::UnsafeCell;
use std::ffi::c_char;
use std::sync::atomic::{AtomicUsize, Ordering};

/// NCCL's own buffer has 1024 bytes; clients copy it with that bound.
const BUFFER_BYTES: usize = 1024;
const BUFFERS: usize = 64;

struct Buffers([UnsafeCell<[u8; BUFFER_BYTES]>; BUFFERS]);

// SAFETY: a buffer is written only under WRITER and only when it is the one furthest in the past; readers receive the
// address of the newest one, which stays untouched until BUFFERS - 1 further errors were written.
unsafe impl Sync for Buffers {}

static BUFFER: Buffers = Buffers([const { UnsafeCell::new([0; BUFFER_BYTES]) }; BUFFERS]);
static NEWEST: AtomicUsize = AtomicUsize::new(0);
static WRITER: Mutex<()> = Mutex::new(());

/// Keeps `sentence` as the last error; what does not fit is cut at a character boundary.
pub fn set(sentence: &str) {
    let mut end = sentence.len().min(BUFFER_BYTES - 1);
    while !sentence.is_char_boundary(end) {
        end -= 1;
    }
    let _writer = WRITER.lock();
    let next = (NEWEST.load(Ordering::Relaxed) + 1) % BUFFERS;
    let cell = BUFFER.0[next].get().cast::<u8>();
    // SAFETY: WRITER is held, `next` is not the buffer that readers are given, and end + 1 <= BUFFER_BYTES.
    unsafe {
        for (i, byte) in sentence.as_bytes()[..end].iter().enumerate() {
            // An embedded NUL would cut the sentence for C readers.
            cell.add(i).write(if *byte == 0 { b' ' } else { *byte });
        }
        cell.add(end).write(0);
    }
    NEWEST.store(next, Ordering::Release);
}

/// The newest sentence, NUL-terminated, valid for the life of the process; empty if nothing failed yet.
pub fn as_c_str() -> *const c_char {
    BUFFER.0[NEWEST.load(Ordering::Acquire)].get().cast::<c_char>()
}

/// The newest sentence as text.
pub fn get() -> String {
    // SAFETY: every buffer is NUL-terminated within its bounds, by its initial zeroes and by `set`.
    unsafe { std::ffi::CStr::from_ptr(as_c_str()) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_cut_at_a_character_and_nul_never_ends_them_early() {
        set("one\0two");
        assert_eq!(get(), "one two");
        set(&"é".repeat(BUFFER_BYTES));
        assert_eq!(get(), "é".repeat((BUFFER_BYTES - 1) / 2));
        set("");
        assert_eq!(get(), "");
    }
}
