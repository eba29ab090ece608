//! The one way in: panic boundary, result code, last error, log line, and the group's memory of failed calls.
//!
//! Unwinding out of an `extern "C"` function aborts the client's process, so every entry, and every thread or callback
//! that the library starts, runs inside `contain`. What the default panic hook would print to stderr becomes part of
//! the error instead; panics outside the boundary reach whatever hook the process had.

use crate::comm::Progress;
use crate::error::{Code, Error, Result};
use crate::observe::last_error;
use crate::{group, warning};
use once_cell::sync::Lazy;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::panic::{catch_unwind, set_hook, take_hook, AssertUnwindSafe, PanicHookInfo};

const SUCCESS: c_int = 0;

/// What a call may answer: its number as `ncclResult_t`.
pub(super) trait Outcome {
    fn code(self) -> c_int;
}

impl Outcome for () {
    fn code(self) -> c_int {
        SUCCESS
    }
}

impl Outcome for Progress {
    fn code(self) -> c_int {
        match self {
            Progress::Done => SUCCESS,
            Progress::InProgress => Code::InProgress as c_int,
        }
    }
}

/// Runs the body of an export that returns an `ncclResult_t`.
pub(super) fn result<T: Outcome>(call: &str, body: impl FnOnce() -> Result<T>) -> c_int {
    contain(|| body().map(T::code)).unwrap_or_else(|error| fail(call, error))
}

/// Runs the body of an export that returns something else; a panic gives the type's own empty value.
pub(super) fn value<T: Empty>(call: &str, body: impl FnOnce() -> T) -> T {
    contain(|| Ok(body())).unwrap_or_else(|error| {
        fail(call, error);
        T::EMPTY
    })
}

/// What an export without a result code returns when it cannot answer.
pub(super) trait Empty {
    const EMPTY: Self;
}

impl Empty for () {
    const EMPTY: () = ();
}

impl Empty for *const std::ffi::c_char {
    /// Never NULL: clients print it.
    const EMPTY: Self = c"".as_ptr();
}

/// The whole body of an export that is not built.
pub(super) fn refuse(call: &str) -> c_int {
    fail(call, not_built(call))
}

pub(super) fn not_built(call: &str) -> Error {
    Error::usage(format!(
        "{call} is not built yet in this version of Ossicle; see docs/support.md"
    ))
}

/// Keeps and logs the sentence, with the name of the call in front, and tells an open group of it: the outermost
/// ncclGroupEnd must not report success for a group that lacks this call.
fn fail(call: &str, error: Error) -> c_int {
    let code = error.code;
    let report = || {
        let error = if error.text.starts_with(call) {
            error
        } else {
            error.within(call)
        };
        last_error::set(&error.text);
        warning!("{}", error.text);
        group::remember(&error);
        Ok(())
    };
    // A panic while reporting leaves the code, which is what the caller needs most.
    let _ = contain(report);
    code as c_int
}

thread_local! {
    /// How many boundaries this thread is inside of.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The panic that is unwinding towards the boundary: message and place.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Installed once a process, at the first call; asks the hook that was there for panics outside the boundary.
static HOOK: Lazy<()> = Lazy::new(|| {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        if DEPTH.try_with(Cell::get).unwrap_or(0) > 0 {
            record(panic);
        } else {
            before(panic);
        }
    }));
});

fn record(panic: &PanicHookInfo) {
    let message = panic.payload_as_str().unwrap_or("no message");
    let text = match panic.location() {
        Some(place) => format!("{message} ({}:{})", place.file(), place.line()),
        None => message.to_string(),
    };
    // While the thread's locals are torn down the text is lost, the error is not.
    let _ = PANIC.try_with(|slot| slot.replace(text));
}

/// What a panic said that was caught where no call of a client is.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Runs `body`; a panic becomes `ncclInternalError` with the panic's message and place.
pub fn contain<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // The hook cannot be changed by a thread that is unwinding; then the one that is there speaks.
    if !std::thread::panicking() {
        Lazy::force(&HOOK);
    }
    let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
    // What a panic leaves half done behind AssertUnwindSafe is seen by no caller as success: the call fails, and state
    // shared between calls lives behind parking_lot locks whose owners keep it whole between statements.
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let _ = DEPTH.try_with(|depth| depth.set(depth.get() - 1));
    outcome.unwrap_or_else(|_| {
        let text = PANIC.try_with(RefCell::take).unwrap_or_default();
        Err(Error::internal(format!("defect in Ossicle, please report it: {text}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_internal_error_with_message_and_place() {
        let code = result("ncclPlanted", || -> Result<()> { panic!("planted {}", 42) });
        assert_eq!(code, 3);
        let error = contain(|| -> Result<()> { panic!("planted {}", 43) }).unwrap_err();
        assert_eq!(error.code, Code::InternalError);
        assert!(
            error.text.contains("planted 43 (") && error.text.contains("entry.rs:"),
            "{}",
            error.text
        );
    }

    #[test]
    fn a_panic_in_a_value_gives_the_empty_value_and_inner_boundaries_nest() {
        let text = value("ncclPlanted", || -> *const std::ffi::c_char { panic!("planted") });
        // SAFETY: EMPTY is a static C string.
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"");
        let outer = contain(|| {
            assert!(contain(|| -> Result<()> { panic!("inner") }).is_err());
            panic!("outer")
        });
        let outer: Result<()> = outer;
        assert!(outer.unwrap_err().text.contains("outer ("));
        assert_eq!(DEPTH.get(), 0);
    }

    #[test]
    fn a_caught_panic_has_its_text() {
        assert_eq!(panic_text(&"planted"), "planted");
        assert_eq!(panic_text(&String::from("planted 42")), "planted 42");
        assert_eq!(panic_text(&42), "no message");
    }

    #[test]
    fn panics_outside_the_boundary_reach_the_hook_of_the_process() {
        use std::sync::atomic::{AtomicU32, Ordering};
        static SEEN: AtomicU32 = AtomicU32::new(0);
        assert_eq!(contain(|| Ok(7)), Ok(7));
        let ours = take_hook();
        set_hook(Box::new(move |panic| {
            if panic.payload_as_str() == Some("outside") {
                SEEN.fetch_add(1, Ordering::Relaxed);
            } else {
                ours(panic);
            }
        }));
        assert!(std::thread::spawn(|| panic!("outside")).join().is_err());
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
        // The boundary still works below another hook that passes panics on.
        assert!(contain(|| -> Result<()> { panic!("inside") })
            .unwrap_err()
            .text
            .contains("inside ("));
    }

    #[test]
    fn answers_and_errors_have_their_numbers() {
        assert_eq!(result("ncclX", || Ok(())), 0);
        assert_eq!(result("ncclX", || Ok(Progress::Done)), 0);
        assert_eq!(result("ncclX", || Ok(Progress::InProgress)), 7);
        assert_eq!(result("ncclX", || -> Result<()> { Err(Error::remote("gone")) }), 6);
        assert_eq!(refuse("ncclX"), 5);
        assert_eq!(
            not_built("ncclSend").text,
            "ncclSend is not built yet in this version of Ossicle; see docs/support.md"
        );
    }
}
