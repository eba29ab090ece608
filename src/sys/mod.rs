//! Shared libraries that are opened at run time, and the one macro for tables of their functions.
//!
//! The library links to none of them: each may be absent, and an absent one is a normal case with a sentence. A table
//! is resolved once, is plain data from then on and is read without a lock. Results stay integers: a newer library may
//! answer with a code that no enum of today has.

pub(crate) mod condvar;
pub mod cuda;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod process_local;
pub(crate) mod thread;
pub mod verbs;

use rustix::io::Errno;
use std::ffi::{c_void, CStr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

/// A descriptor of 3 or more: in a process that closed 0 to 2 a log line would be written into what it is of.
pub(crate) fn above_standard(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    match fd.as_raw_fd() {
        0..=2 => rustix::io::fcntl_dupfd_cloexec(&fd, 3),
        _ => Ok(fd),
    }
}

/// An open shared library. It is never closed: its threads and exit handlers may outlive any user of it.
pub(crate) struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: the handle is only passed to dlsym, which may be called from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens by name as the dynamic linker finds it; the linker's own sentence where it does not.
    pub(crate) fn open(name: &CStr) -> Result<Library, String> {
        // SAFETY: `name` is a C string. Opening runs the library's constructors, which is what the caller asks for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(|handle| Library { handle }).ok_or_else(|| {
            // SAFETY: dlerror gives NULL or a C string that stands until this thread's next dl call.
            let text = unsafe { libc::dlerror() };
            if text.is_null() {
                return format!("{} cannot be opened", name.to_string_lossy());
            }
            // SAFETY: not NULL, so it is such a string, and it is copied before any other dl call.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        })
    }

    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from dlopen and is never closed; `name` is a C string.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }
}

/// Declares a table of C functions that answer with an integer status.
///
/// Each entry is `SINCE fn name(argument: type, ...);`, SINCE being the version of the interface that the signature is
/// of. Required functions become methods, optional ones methods that answer None where the library has no such
/// function. `resolve` asks `find(name, since)` for each and stops at the first required one that is missing. A status
/// goes through the table's own `check(name, status)`.
macro_rules! function_table {
    (
        $(#[$meta:meta])*
        pub struct $Table:ident fails with $Failure:ty;
        required { $( $since:literal fn $name:ident($($arg:ident: $type:ty),* $(,)?); )* }
        optional { $( $opt_since:literal fn $opt_name:ident($($opt_arg:ident: $opt_type:ty),* $(,)?); )* }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub struct $Table {
            $( $name: unsafe extern "C" fn($($type),*) -> std::ffi::c_int, )*
            $( $opt_name: Option<unsafe extern "C" fn($($opt_type),*) -> std::ffi::c_int>, )*
        }

        // The C names stay as they are, so that a search for them finds every use.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::missing_safety_doc, clippy::missing_transmute_annotations)]
        impl $Table {
            /// Fills the table; the name and version of the first required function that `find` does not have.
            fn resolve(
                mut find: impl FnMut(&'static std::ffi::CStr, std::ffi::c_int) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> std::result::Result<$Table, (&'static str, std::ffi::c_int)> {
                let c_name = |text: &'static str| std::ffi::CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or(c"");
                Ok($Table {
                    $( $name: match find(c_name(concat!(stringify!($name), "\0")), $since) {
                        // SAFETY: the address is of the function of this name and version, whose C signature the
                        // table declares.
                        Some(address) => unsafe { std::mem::transmute(address.as_ptr()) },
                        None => return Err((stringify!($name), $since)),
                    }, )*
                    $( $opt_name: find(c_name(concat!(stringify!($opt_name), "\0")), $opt_since)
                        // SAFETY: as above.
                        .map(|address| unsafe { std::mem::transmute(address.as_ptr()) }), )*
                })
            }

            $( pub unsafe fn $name(&self, $($arg: $type),*) -> std::result::Result<(), $Failure> {
                // SAFETY: the function was resolved by name and version; its arguments are the caller's duty.
                self.check(stringify!($name), unsafe { (self.$name)($($arg),*) })
            } )*
            $( pub unsafe fn $opt_name(&self, $($opt_arg: $opt_type),*) -> Option<std::result::Result<(), $Failure>> {
                let function = self.$opt_name?;
                // SAFETY: as above.
                Some(self.check(stringify!($opt_name), unsafe { function($($opt_arg),*) }))
            } )*
        }
    };
}
pub(crate) use function_table;
