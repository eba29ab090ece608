//! A call that waits for a rank that does not come, while nobody asks for the asynchronous error.

use crate::processes::run_role;
use crate::ranks::{code, contribution, make, outcome, pause, start, still_works, sum, Comm, LIMIT, POISON};
use nccl::error::Code;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

const SENTENCE: &str = "rank 0 waits for rank 1";

#[test]
fn a_wait_is_said_though_nobody_asks() {
    run_role("waits", &[("OSSICLE_WAIT_REPORT_MS", "300"), ("NCCL_DEBUG", "WARN")]);
}

/// The bound is longer here, since what works afterwards must stay below it on a busy machine.
#[test]
fn a_wait_that_must_fail_ends_the_call() {
    run_role(
        "waits_fail",
        &[("OSSICLE_WAIT_REPORT_MS", "3000"), ("OSSICLE_WAIT_FAIL", "1")],
    );
}

/// Rank 1 calls only after the line has come.
pub(crate) fn waits() {
    let path = std::env::temp_dir().join(format!("ossicle-waits-{}", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    let own = std::io::stderr().as_fd().try_clone_to_owned().unwrap();
    let redirect = |to: i32| {
        // SAFETY: `to` is open, and 2 goes on being an open descriptor that nobody owns.
        assert_eq!(unsafe { libc::dup2(to, 2) }, 2);
    };
    redirect(file.as_raw_fd());
    let comms = make(2);
    let waiting = comms[0];
    let blocked = start(move || {
        let mut recv = vec![POISON; 100];
        waiting.submit(&contribution(0, 100), &mut recv).map(|()| recv)
    });
    let begin = Instant::now();
    let mut said = String::new();
    while !said.contains(SENTENCE) && begin.elapsed() < LIMIT {
        pause();
        said = std::fs::read_to_string(&path).unwrap();
    }
    redirect(own.as_raw_fd());
    std::fs::remove_file(&path).unwrap();
    let line = said.lines().find(|line| line.contains(SENTENCE));
    assert!(line.is_some_and(|line| line.contains("NCCL WARN")), "stderr: {said}");
    comms[1].check_sum(100);
    assert_eq!(outcome(blocked), Ok(sum(2, 100)));
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
