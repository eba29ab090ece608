//! State of this process that a forked child does not inherit.
//!
//! A child has one thread: a lock that another thread of its parent held stays locked there for ever, and what it guards
//! may be half changed. So a child begins anew, and lets its parent's state lie.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(crate) struct ProcessLocal<T: 'static> {
    current: AtomicPtr<Owned<T>>,
}

struct Owned<T> {
    process: u32,
    value: T,
}

impl<T: Default + Sync> ProcessLocal<T> {
    pub(crate) const fn new() -> ProcessLocal<T> {
        ProcessLocal {
            current: AtomicPtr::new(null_mut()),
        }
    }

    /// This process's value, made at first use and never freed. Costs a system call: not for hot paths.
    pub(crate) fn get(&'static self) -> &'static T {
        let process = std::process::id();
        let found = self.current.load(Ordering::Acquire);
        // SAFETY: what was once put here is never freed.
        if let Some(owned) = unsafe { found.as_ref() }.filter(|owned| owned.process == process) {
            return &owned.value;
        }
        let made = Box::into_raw(Box::new(Owned {
            process,
            value: T::default(),
        }));
        match self
            .current
            .compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: as above.
            Ok(_) => unsafe { &(*made).value },
            Err(others) => {
                // SAFETY: nobody else has seen what was made here; the other thread's is of this process, and stays.
                unsafe {
                    drop(Box::from_raw(made));
                    &(*others).value
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    #[test]
    fn a_forked_child_begins_anew_although_its_parent_holds_the_lock() {
        static NUMBER: ProcessLocal<Mutex<u32>> = ProcessLocal::new();
        *NUMBER.get().lock() = 7;
        let held = NUMBER.get().lock();
        // SAFETY: the child takes one lock, allocates once, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fresh = NUMBER.get().try_lock().is_some_and(|number| *number == 0);
            // SAFETY: ends the child without running anything of its parent's.
            unsafe { libc::_exit(i32::from(!fresh)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above and writes its status to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(held);
        assert_eq!(*NUMBER.get().lock(), 7);
    }
}
