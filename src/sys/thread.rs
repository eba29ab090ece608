//! Threads of the library: they take no signals of the program, and start and end without a lock of the process.
//!
//! Signals of the program are not for them: a handler that expects one of the program's own threads, or little stack,
//! would run on whichever thread the kernel picks.
//!
//! They are not `std::thread`s: each of those takes a lock of std's as it ends, and in a Rust program as it starts, to
//! keep the list of guard pages. A fork while another thread holds it leaves it locked in the child for ever, where
//! then no such thread starts or ends. libc's own locks are whole in a child.

use std::ffi::{c_void, CStr};
use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// What std gives its threads.
const STACK_BYTES: usize = 2 << 20;

/// A thread that was started. Dropped, it goes on by itself.
pub(crate) struct Thread {
    /// There until it is joined or let go.
    id: Option<libc::pthread_t>,
    finished: Arc<AtomicBool>,
}

impl Thread {
    /// Waits until it has ended. A panic of its body ended it like a return.
    pub(crate) fn join(mut self) {
        if let Some(id) = self.id.take() {
            // SAFETY: the thread was neither joined nor detached, for either takes the id.
            unsafe { libc::pthread_join(id, null_mut()) };
        }
    }

    /// Whether its body is over, so that `join` returns at once.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            // SAFETY: as in `join`.
            unsafe { libc::pthread_detach(id) };
        }
    }
}

struct Start {
    name: &'static CStr,
    body: Box<dyn FnOnce() + Send>,
    finished: Arc<AtomicBool>,
}

/// Starts a thread that takes no signal but those that its own faults raise. The name has at most 15
/// bytes.
pub(crate) fn spawn(name: &'static CStr, body: impl FnOnce() + Send + 'static) -> Result<Thread> {
    let finished = Arc::new(AtomicBool::new(false));
    let start = Box::new(Start {
        name,
        body: Box::new(body),
        finished: finished.clone(),
    });
    let mut before = MaybeUninit::uninit();
    // A thread inherits the mask of the one that starts it.
    // SAFETY: both sets are written before they are read: the first by sigfillset, the second by pthread_sigmask.
    unsafe {
        let mut blocked = MaybeUninit::uninit();
        libc::sigfillset(blocked.as_mut_ptr());
        for fault in [
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGFPE,
            libc::SIGILL,
            libc::SIGTRAP,
            libc::SIGABRT,
        ] {
            libc::sigdelset(blocked.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let id = create(start);
    // SAFETY: `before` is the mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    let id = Some(id?);
    Ok(Thread { id, finished })
}

fn create(start: Box<Start>) -> Result<libc::pthread_t> {
    let start = Box::into_raw(start);
    let (mut id, mut attributes) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the attributes are initialised before they are used and destroyed after; `run` takes the box over, whose
    // parts may go to another thread, and the id is written where the thread was made.
    unsafe {
        let mut code = libc::pthread_attr_init(attributes.as_mut_ptr());
        if code == 0 {
            code = libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
            if code == 0 {
                code = libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), run, start.cast());
            }
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        match code {
            0 => Ok(id.assume_init()),
            code => {
                drop(Box::from_raw(start));
                Err(Error::from_raw_os_error(code))
            }
        }
    }
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: `create` gives this thread, and nobody else, a box of this type.
    let Start { name, body, finished } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    // SAFETY: of this thread, and a C string. It fails for longer names only.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        // It was said by the panic hook. What it carries may panic when dropped.
        std::mem::forget(panic);
    }
    finished.store(true, Ordering::Release);
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(signal: i32) -> bool {
        let mut mask = MaybeUninit::uninit();
        // SAFETY: the set is written by pthread_sigmask before it is read.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            libc::sigismember(mask.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn a_thread_blocks_the_programs_signals_and_its_starter_does_not() {
        let (sender, seen) = std::sync::mpsc::channel();
        let look = move || {
            let signals = [libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGSEGV];
            sender.send(signals.map(blocks)).unwrap();
        };
        spawn(c"signals", look).unwrap().join();
        assert_eq!(seen.recv(), Ok([true, true, true, false]));
        assert!(!blocks(libc::SIGUSR1));
    }

    #[test]
    fn a_thread_has_its_name_and_is_finished_once_its_body_is_over() {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let (sender, named) = std::sync::mpsc::channel();
        let thread = spawn(c"ossicle-test", move || {
            sender
                .send(std::fs::read_to_string("/proc/thread-self/comm").unwrap())
                .unwrap();
            let _ = wait.recv();
        })
        .unwrap();
        assert_eq!(named.recv().unwrap().trim(), "ossicle-test");
        assert!(!thread.is_finished());
        drop(go);
        while !thread.is_finished() {
            std::thread::yield_now();
        }
        thread.join();
    }

    #[test]
    fn a_panic_ends_the_thread_alone_and_drops_what_its_body_held() {
        let held = Arc::new(());
        let dropped = Arc::downgrade(&held);
        let thread = spawn(c"ossicle-test", move || {
            let _held = held;
            panic!("as a test wants it");
        });
        thread.unwrap().join();
        assert!(dropped.upgrade().is_none());
    }
}
