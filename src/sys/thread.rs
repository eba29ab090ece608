//! Threads of the library. Signals of the program are not for them: a handler that expects one of the program's own
//! threads, or little stack, would run on whichever thread the kernel picks.

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::thread::{Builder, JoinHandle};

/// Starts a thread that takes no signal but those that its own faults raise.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    let mut blocked = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // A thread inherits the mask of the one that starts it.
    // SAFETY: both sets are written before they are read: the first by sigfillset, the second by pthread_sigmask.
    unsafe {
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
    let thread = Builder::new().name(name.to_owned()).spawn(body);
    // SAFETY: `before` is the mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    thread
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
        let seen = spawn("signals", || {
            [libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGSEGV].map(blocks)
        });
        assert_eq!(seen.unwrap().join().unwrap(), [true, true, true, false]);
        assert!(!blocks(libc::SIGUSR1));
    }
}
