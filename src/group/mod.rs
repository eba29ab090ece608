//! Groups: when queued calls run.
//!
//! Depth, queue and first error belong to the calling thread. Inside a group nothing runs: a call is checked, queued and
//! answered at once. The outermost end runs the queue in this order: communicators are made, operations are launched,
//! communicators are finalized and destroyed. If any call of the group failed, its end returns the first error and
//! nothing runs at all, so that no part of a group that the caller believes lost is carried out.

mod batch;

use crate::comm::{self, Init, Progress, RawComm};
use crate::error::{Error, Result};
use crate::request::Request;
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;

/// A queued end of a communicator.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    Finalize(RawComm),
    Destroy(RawComm),
}

impl Ending {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Ending::Finalize(comm) => comm::finalize_now(comm),
            Ending::Destroy(comm) => comm::destroy_now(comm),
        }
    }
}

/// What one thread's open group has gathered.
struct Queue {
    first_error: Option<Error>,
    /// Whether the group's communicators are blocking ones; None before the first.
    blocking: Option<bool>,
    inits: Vec<Init>,
    requests: Vec<(RawComm, Request)>,
    endings: Vec<Ending>,
}

impl Queue {
    const fn new() -> Queue {
        Queue {
            first_error: None,
            blocking: None,
            inits: Vec::new(),
            requests: Vec::new(),
            endings: Vec::new(),
        }
    }

    /// Blocking and non-blocking communicators cannot share a group: its end can have one answer only.
    fn join(&mut self, blocking: bool) -> Result<()> {
        if *self.blocking.get_or_insert(blocking) != blocking {
            return Err(Error::argument(
                "a group cannot mix blocking and non-blocking communicators; use two groups",
            ));
        }
        Ok(())
    }

    fn run(self) -> Result<Progress> {
        if let Some(error) = self.first_error {
            return Err(error);
        }
        let progress = comm::run(self.inits)?;
        let launched = batch::launch(&self.requests);
        // Whatever became of the work, the caller has given these communicators up.
        let ended = self.endings.into_iter().map(Ending::run).fold(Ok(()), Result::and);
        launched.and(ended).map(|()| progress)
    }
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    // Never dropped: exit handlers and destructors of thread-specific data may open groups, and they run after Rust has
    // dropped a thread's values. All that can be lost is the queue of a group that its thread left open.
    static QUEUE: ManuallyDrop<RefCell<Queue>> = const { ManuallyDrop::new(RefCell::new(Queue::new())) };
}

fn with_queue<R>(with: impl FnOnce(&mut Queue) -> R) -> R {
    QUEUE.with(|queue| with(&mut queue.borrow_mut()))
}

/// Whether the calling thread has a group open.
pub fn is_open() -> bool {
    DEPTH.get() > 0
}

/// `ncclGroupStart`.
pub fn start() -> Result<()> {
    let deeper = DEPTH.get().checked_add(1);
    DEPTH.set(deeper.ok_or_else(|| Error::usage("ncclGroupStart is nested deeper than can be counted"))?);
    Ok(())
}

/// `ncclGroupEnd`.
pub fn end() -> Result<Progress> {
    let depth = DEPTH.get().checked_sub(1);
    let depth = depth.ok_or_else(|| Error::usage("ncclGroupEnd without an ncclGroupStart before it on this thread"))?;
    DEPTH.set(depth);
    if depth > 0 {
        return Ok(Progress::Done);
    }
    with_queue(|queue| std::mem::replace(queue, Queue::new())).run()
}

/// Takes note of a failed call: the outermost end of an open group returns the first one and runs nothing.
pub fn remember(error: &Error) {
    if is_open() {
        with_queue(|queue| {
            queue.first_error.get_or_insert_with(|| error.clone());
        });
    }
}

/// `remember`, in the middle of `map_err`.
pub(crate) fn noted(error: Error) -> Error {
    remember(&error);
    error
}

/// One operation: at once outside a group, queued inside. Takes no memory of its own outside a group.
pub fn submit(comm: RawComm, request: Request) -> Result<Progress> {
    if !is_open() {
        return comm::registry()?
            .acquire(comm)?
            .submit(&request)
            .map(|()| Progress::Done);
    }
    let queue = || {
        let communicator = comm::registry()?.acquire(comm)?;
        communicator.usable()?;
        request.check(communicator.ranks, communicator.rank)?;
        with_queue(|queue| {
            queue.join(communicator.blocking)?;
            queue.requests.push((comm, request));
            Ok(Progress::Done)
        })
    };
    queue().map_err(noted)
}

/// Makes communicators: at once outside a group, queued inside. `inits` are all blocking or all not.
pub(crate) fn init(inits: Vec<Init>) -> Result<Progress> {
    if !is_open() {
        return comm::run(inits);
    }
    with_queue(|queue| {
        for init in inits {
            queue.join(init.blocking())?;
            queue.inits.push(init);
        }
        Ok(Progress::Done)
    })
}

/// Queues the end of a communicator; only inside a group.
pub(crate) fn queue_ending(ending: Ending) {
    with_queue(|queue| queue.endings.push(ending));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::request::{Collective, DataType, ReduceOp};
    use std::ptr::{null, null_mut, without_provenance_mut};

    fn request() -> Request {
        let (send, recv, stream) = (null(), null_mut(), null_mut());
        let (collective, datatype, op) = (Collective::AllReduce, DataType::Int32, ReduceOp::Sum);
        Request {
            collective,
            send,
            recv,
            count: 0,
            datatype,
            op,
            stream,
        }
    }

    #[test]
    fn an_end_needs_a_start() {
        assert_eq!(end().unwrap_err().code, Code::InvalidUsage);
        start().unwrap();
        start().unwrap();
        assert!(is_open());
        assert_eq!(end(), Ok(Progress::Done));
        assert!(is_open());
        assert_eq!(end(), Ok(Progress::Done));
        assert!(!is_open());
        assert_eq!(end().unwrap_err().code, Code::InvalidUsage);
    }

    #[test]
    fn the_outermost_end_returns_the_first_error_and_forgets_it() {
        remember(&Error::system("no group is open"));
        start().unwrap();
        start().unwrap();
        remember(&Error::argument("first"));
        assert_eq!(end(), Ok(Progress::Done));
        remember(&Error::usage("second"));
        assert_eq!(end(), Err(Error::argument("first")));
        start().unwrap();
        assert_eq!(end(), Ok(Progress::Done));
    }

    #[test]
    fn a_bad_handle_fails_the_call_and_the_group() {
        let bad: RawComm = without_provenance_mut(0x1000);
        for call in [
            |bad| submit(bad, request()).map(drop),
            |bad| comm::destroy(bad),
            |bad| comm::finalize(bad).map(drop),
        ] {
            start().unwrap();
            let error = call(bad).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
            assert_eq!(end(), Err(error));
        }
    }

    #[test]
    fn an_abort_in_a_group_runs_at_once() {
        start().unwrap();
        assert_eq!(
            comm::abort(without_provenance_mut(0x1000)).unwrap_err().code,
            Code::InvalidArgument
        );
        assert_eq!(comm::abort(null_mut()), Ok(()));
        assert_eq!(end(), Ok(Progress::Done));
    }

    #[test]
    fn groups_of_other_threads_are_their_own() {
        start().unwrap();
        remember(&Error::argument("here"));
        let other = std::thread::spawn(|| (is_open(), end().map_err(|error| error.code)));
        assert_eq!(other.join().unwrap(), (false, Err(Code::InvalidUsage)));
        assert_eq!(end(), Err(Error::argument("here")));
    }

    #[test]
    fn a_group_works_while_its_thread_ends() {
        use std::sync::mpsc::{channel, Sender};
        struct LastWords(Sender<Result<Progress>>);
        impl Drop for LastWords {
            fn drop(&mut self) {
                start().unwrap();
                remember(&Error::argument("too late"));
                self.0.send(end()).unwrap();
            }
        }
        thread_local! {
            static LAST_WORDS: RefCell<Option<LastWords>> = const { RefCell::new(None) };
        }
        let (sender, receiver) = channel();
        let thread = std::thread::spawn(move || {
            // What a thread used first it drops last.
            LAST_WORDS.set(Some(LastWords(sender)));
            start().unwrap();
            end().unwrap();
        });
        thread.join().unwrap();
        assert_eq!(receiver.recv().unwrap(), Err(Error::argument("too late")));
    }

    #[test]
    fn blocking_and_non_blocking_do_not_mix() {
        let mut queue = Queue::new();
        assert_eq!(queue.join(true), Ok(()));
        assert_eq!(queue.join(true), Ok(()));
        assert_eq!(queue.join(false).unwrap_err().code, Code::InvalidArgument);
    }
}
