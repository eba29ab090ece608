//! A call that waits for a rank that does not come, while nobody asks for the asynchronous error.

use crate::processes::run_role;
use crate::ranks::{
    check_all, code, contribution, make, outcome, pause, start, still_works, sum, Comm, Running, LIMIT, POISON,
};
use nccl::error::{Code, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

const SENTENCE: &str = "rank 0 waits for rank 1";

#[test]
fn a_wait_is_said_though_nobody_asks() {
    run_role("waits", &[("OSSICLE_WAIT_REPORT_MS", "300"), ("NCCL_DEBUG", "WARN")]);
}

#[test]
fn a_wait_for_a_rank_that_waits_itself_is_told_from_one_for_a_rank_that_does_not_call() {
    run_role(
        "waits_in_turn",
        &[
            ("OSSICLE_WAIT_REPORT_MS", "300"),
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_ALGO", "Ring"),
        ],
    );
}

/// The bound is longer here, since what works afterwards must stay below it on a busy machine.
#[test]
fn a_wait_that_must_fail_ends_the_call() {
    run_role(
        "waits_fail",
        &[("OSSICLE_WAIT_REPORT_MS", "3000"), ("OSSICLE_WAIT_FAIL", "1")],
    );
}

/// What goes to standard error, until this is dropped.
struct Captured {
    path: PathBuf,
    own: OwnedFd,
}

impl Captured {
    fn new() -> Captured {
        let path = std::env::temp_dir().join(format!("ossicle-waits-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        let own = std::io::stderr().as_fd().try_clone_to_owned().unwrap();
        redirect(file.as_fd());
        Captured { path, own }
    }

    /// The WARN line with this sentence about this operation, once it is there. Those before it may be late on a busy
    /// machine.
    fn await_line(&self, sentence: &str, operation: u32) -> String {
        let operation = format!("in operation {operation},");
        let begin = Instant::now();
        loop {
            let said = std::fs::read_to_string(&self.path).unwrap();
            if let Some(line) = said
                .lines()
                .find(|line| line.contains(sentence) && line.contains(&operation))
            {
                assert!(line.contains("NCCL WARN"), "{line}");
                return line.to_owned();
            }
            assert!(begin.elapsed() < LIMIT, "no \"{sentence}\": {said}");
            pause();
        }
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        redirect(self.own.as_fd());
        std::fs::remove_file(&self.path).unwrap();
    }
}

fn redirect(to: BorrowedFd) {
    // SAFETY: `to` is open, and 2 goes on being an open descriptor that nobody owns.
    assert_eq!(unsafe { libc::dup2(to.as_raw_fd(), 2) }, 2);
}

/// The sum of 100 elements on a thread of its own.
fn begin_sum(comm: Comm, rank: i32) -> Running<Result<Vec<i32>>> {
    start(move || {
        let mut recv = vec![POISON; 100];
        comm.submit(&contribution(rank, 100), &mut recv).map(|()| recv)
    })
}

/// Rank 1 calls only after the line has come.
pub(crate) fn waits() {
    let said = Captured::new();
    let comms = make(2);
    let blocked = begin_sum(comms[0], 0);
    let line = said.await_line(SENTENCE, 0);
    drop(said);
    let sentence = "the kernel of rank 1 has not started operation 0, nor any before it";
    assert!(line.contains(sentence), "{line}");
    comms[1].check_sum(100);
    assert_eq!(outcome(blocked), Ok(sum(2, 100)));
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

/// In a ring of three, rank 0 waits for rank 2, which does not call, and rank 1 for rank 0, which has called.
pub(crate) fn waits_in_turn() {
    let said = Captured::new();
    let comms = make(3);
    check_all(&comms, 100);
    let first = begin_sum(comms[0], 0);
    let idle = said.await_line("rank 0 waits for rank 2", 1);
    let second = begin_sum(comms[1], 1);
    let stuck = said.await_line("rank 1 waits for rank 0", 1);
    drop(said);
    let sentence = "the kernel of rank 2 has not started operation 1; its last is 0";
    assert!(idle.contains(sentence), "{idle}");
    let sentence = "the kernel of rank 0 has started operation 1 and waits or is stuck in it itself";
    assert!(stuck.contains(sentence), "{stuck}");
    comms[2].check_sum(100);
    assert_eq!(outcome(first), Ok(sum(3, 100)));
    assert_eq!(outcome(second), Ok(sum(3, 100)));
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

pub(crate) fn waits_fail() {
    for end in [Comm::destroy, Comm::abort] {
        let comms = make(2);
        let waiting = comms[0];
        let submit = move || waiting.submit(&contribution(0, 100), &mut [POISON; 100]);
        let error = outcome(start(submit)).expect_err("an operation without its peer succeeded");
        assert_eq!(error.code, Code::SystemError, "{error}");
        assert!(error.text.contains(SENTENCE), "{error}");
        assert_eq!(submit(), Err(error.clone()));
        assert_eq!(waiting.failure(), error);
        end(waiting).unwrap();
        assert_eq!(comms[1].failure().code, Code::RemoteError);
        assert_eq!(code(comms[1].submit(&[1], &mut [0])), Some(Code::RemoteError));
        end(comms[1]).unwrap();
        still_works();
    }
}
