//! Tests that run in processes of their own: what counts descriptors and threads, needs its own environment, or kills a
//! rank. Such a process is this program again, with the role's name in `OSSICLE_TEST_ROLE`.

use crate::forks;
use crate::hosts;
use crate::ranks::{
    check_all, code, contribution, init, join, make, new_id, outcome, pause, start, still_works, sum, threads, Id,
    Running, LIMIT, POISON,
};
use crate::waits;
use nccl::comm::{self, Progress};
use nccl::error::Code;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "OSSICLE_TEST_ROLE";

#[test]
fn a_missing_rank_is_named_after_the_timeout() {
    run_role("missing", &[("OSSICLE_INIT_TIMEOUT_MS", "500")]);
}

#[test]
fn an_init_that_waits_is_aborted_and_leaves_nothing() {
    run_role("non_blocking", &[("OSSICLE_INIT_TIMEOUT_MS", "4000")]);
}

#[test]
fn communicators_leave_nothing_behind() {
    run_role("cycles", &[]);
}

#[test]
fn want_of_descriptors_is_not_taken_for_another_host() {
    run_role("poor", &[]);
}

#[test]
fn a_process_may_exit_without_destroying() {
    run_role("exit", &[]);
}

#[test]
fn survivors_of_a_killed_rank_hear_of_it_and_go_on() {
    let folder = std::env::temp_dir().join(format!("ossicle-communicator-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mark = folder.join("rank 2 is under way");
    let (first, second) = (hex(&new_id()), hex(&new_id()));
    let role = |rank: &str| {
        let path = mark.to_str().unwrap();
        Role::start(
            "killed",
            &[
                ("TEST_RANK", rank),
                ("TEST_IDS", &format!("{first} {second}")),
                ("TEST_MARK", path),
            ],
        )
    };
    let (mut survivors, victim) = (vec![role("0"), role("1")], role("2"));
    let start = Instant::now();
    while !mark.exists() && start.elapsed() < LIMIT {
        pause();
    }
    let was_under_way = mark.exists();
    victim.kill();
    let outputs: Vec<Output> = survivors.drain(..).map(Role::finish).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    outputs.iter().for_each(check_success);
    assert!(was_under_way, "rank 2 never got under way");
}

/// The entry of a process that was started for a role; passes over in the test run itself.
#[test]
fn role() {
    match std::env::var(ROLE).as_deref() {
        Ok("missing") => missing(),
        Ok("non_blocking") => non_blocking(),
        Ok("cycles") => cycles(cycle),
        Ok("fork") => forks::fork(),
        Ok("fork_beside_idle_threads") => forks::fork_beside_idle_threads(),
        Ok("fork_beside_inits") => forks::fork_beside_inits(),
        Ok("forked_and_killed") => forks::forked_and_killed(),
        Ok("waits") => waits::waits(),
        Ok("waits_in_turn") => waits::waits_in_turn(),
        Ok("waits_fail") => waits::waits_fail(),
        Ok("poor") => poor(),
        Ok("exit") => drop(make(2)),
        Ok("killed") => killed(),
        Ok("forced_over_hosts") => hosts::forced(),
        Ok("any_driver") => hosts::any_driver(),
        Ok("cycles_over_hosts") => cycles(hosts::cycle),
        Ok("fork_over_hosts") => hosts::fork(),
        Ok("killed_over_hosts") => hosts::killed(),
        Ok(unknown) => panic!("no role {unknown}"),
        Err(_) => {}
    }
}

fn missing() {
    let id = new_id();
    for error in threads(&[0, 1], move |rank| join(id, 3, rank).unwrap_err()) {
        assert_eq!(error.code, Code::SystemError, "{error}");
        assert!(error.text.contains('2'), "rank 2 is not named: {error}");
    }
    still_works();
}

fn non_blocking() {
    still_works();
    let before = Holdings::settled();
    let (comm, progress) = init(new_id(), 2, 0, false).unwrap();
    assert_eq!(progress, Progress::InProgress);
    assert_eq!(comm::async_error(comm.raw()), Ok(Ok(Progress::InProgress)));
    assert_eq!(code(comm.submit(&[1], &mut [0])), Some(Code::InvalidArgument));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(comm::async_error(comm.raw()), Ok(Ok(Progress::InProgress)));
    comm.abort().unwrap();
    assert_eq!(code(comm::async_error(comm.raw())), Some(Code::InvalidArgument));
    before.check_back();
    let (comm, _) = init(new_id(), 2, 0, false).unwrap();
    let error = comm.failure();
    assert_eq!(error.code, Code::SystemError, "{error}");
    assert_eq!(code(comm.submit(&[1], &mut [0])), Some(Code::SystemError));
    comm.destroy().unwrap();
    before.check_back();
    still_works();
}

fn cycle(number: u32) {
    let comms = make(2);
    check_all(&comms, 1);
    for comm in comms {
        if number.is_multiple_of(3) {
            comm.abort()
        } else {
            comm.destroy()
        }
        .unwrap();
    }
}

fn cycles(cycle: fn(u32)) {
    (0..100).for_each(cycle);
    let before = Holdings::settled();
    let maps = lines("/proc/self/maps");
    (0..200).for_each(cycle);
    before.check_back();
    assert!(
        lines("/proc/self/maps") <= maps + 8,
        "{maps} mappings became {}",
        lines("/proc/self/maps")
    );
}

fn poor() {
    let id = new_id();
    let limit = libc::rlimit {
        rlim_cur: 40,
        rlim_max: 40,
    };
    // SAFETY: reads the local that it is given.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let errors = threads(&[0, 1], move |rank| join(id, 2, rank).unwrap_err());
    drop(taken);
    for error in errors {
        assert_eq!(error.code, Code::SystemError, "{error}");
        assert!(error.text.contains("open files"), "{error}");
    }
    still_works();
}

fn killed() {
    let rank: i32 = text("TEST_RANK").parse().unwrap();
    let ids: Vec<Id> = text("TEST_IDS").split(' ').map(unhex).collect();
    let comm = join(ids[0], 3, rank).unwrap();
    let mut rounds = 0;
    let error = loop {
        let mut recv = vec![POISON; 20_000];
        match comm.submit(&contribution(rank, 20_000), &mut recv) {
            Ok(()) => assert_eq!(recv, sum(3, 20_000)),
            Err(error) => break error,
        }
        rounds += 1;
        if rank == 2 && rounds == 20 {
            std::fs::write(Path::new(&text("TEST_MARK")), "").unwrap();
        }
    };
    assert_eq!(error.code, Code::RemoteError, "{error}");
    let told = comm.failure();
    assert_eq!(told.code, Code::RemoteError);
    assert!(told.text.contains("rank 2"), "{told}");
    comm.abort().unwrap();
    let next = join(ids[1], 2, rank).unwrap();
    next.check_sum(1000);
    next.destroy().unwrap();
}

/// Descriptors and threads of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    threads: usize,
}

impl Holdings {
    fn now() -> Holdings {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        Holdings {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
        }
    }

    /// After what ended just now is gone: threads that were joined may still stand in /proc for a moment.
    fn settled() -> Holdings {
        std::thread::sleep(Duration::from_secs(1));
        Holdings::now()
    }

    fn check_back(self) {
        let start = Instant::now();
        while Holdings::now() != self {
            assert!(start.elapsed() < LIMIT / 2, "{self:?} became {:?}", Holdings::now());
            pause();
        }
    }
}

/// A value that the test gave the role.
pub(crate) fn text(name: &str) -> String {
    std::env::var(name).unwrap()
}

fn lines(path: &str) -> usize {
    std::fs::read_to_string(path).unwrap().lines().count()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Id {
    std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
}

/// This program again, in a role.
pub(crate) struct Role {
    pid: i32,
    output: Running<Output>,
}

impl Role {
    pub(crate) fn start(name: &str, variables: &[(&str, &str)]) -> Role {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["processes::role", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, name)
            .env("OSSICLE_DEVICE", "host")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Role {
            pid: child.id() as i32,
            output: start(move || child.wait_with_output().unwrap()),
        }
    }

    pub(crate) fn kill(self) {
        // SAFETY: the process is this one's child and was not waited for by anyone who would let its number go, since
        // its output is read until it ends.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        outcome(self.output);
    }

    pub(crate) fn finish(self) -> Output {
        match self.output.1.recv_timeout(2 * LIMIT) {
            Ok(output) => output,
            Err(_) => {
                // SAFETY: as in `kill`: the child has not ended.
                unsafe { libc::kill(self.pid, libc::SIGKILL) };
                outcome(self.output)
            }
        }
    }
}

pub(crate) fn check_success(output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
}

pub(crate) fn run_role(name: &str, variables: &[(&str, &str)]) {
    check_success(&Role::start(name, variables).finish());
}
