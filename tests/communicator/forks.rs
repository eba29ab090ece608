//! Children that are forked without exec, as a data loader makes them: what they keep, and what they can do.

use crate::processes::{check_success, hex, run_role, text, unhex, Role};
use crate::ranks::{
    check_all, check_pair, code, contribution, join, make, new_id, pause, still_works, still_works_in_one_thread,
    LIMIT, POISON,
};
use nccl::error::Code;
use std::fs::File;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// No test lasts so long; then what was forgotten ends by itself.
const SLEEP_S: u32 = 600;

#[test]
fn a_forked_child_makes_its_own() {
    run_role("fork", &[]);
}

#[test]
fn a_forked_child_makes_its_own_beside_idle_threads_of_its_parent() {
    run_role("fork_beside_idle_threads", &[]);
}

#[test]
fn a_forked_child_makes_its_own_whatever_other_threads_were_making() {
    run_role("fork_beside_inits", &[]);
}

/// Also of rank 0, whose process has the star that all others are connected to.
#[test]
fn a_forked_child_does_not_hide_that_its_parent_was_killed() {
    for victim in [1, 0] {
        let name = format!("ossicle-forks-{}-{victim}", std::process::id());
        let mark = std::env::temp_dir().join(name);
        // Of the test's own process: the root must outlive the victim.
        let id = hex(&new_id());
        let role = |rank: i32| {
            let variables = [
                ("TEST_RANK", &*rank.to_string()),
                ("TEST_VICTIM", &*victim.to_string()),
                ("TEST_IDS", &*id),
                ("TEST_MARK", mark.to_str().unwrap()),
            ];
            Role::start("forked_and_killed", &variables)
        };
        let (survivor, killed) = (role(1 - victim), role(victim));
        let start = Instant::now();
        let child = loop {
            let said = std::fs::read_to_string(&mark).unwrap_or_default();
            match said.strip_suffix('\n').map(|number| number.parse::<i32>().unwrap()) {
                Some(child) => break Some(child),
                None if start.elapsed() > LIMIT => break None,
                None => pause(),
            }
        };
        killed.kill();
        let output = survivor.finish();
        // SAFETY: signal 0 asks whether the process is there and does nothing; its number is no other's, since it
        // sleeps until it is killed here.
        let was_there = child.is_some_and(|child| unsafe { libc::kill(child, 0) } == 0);
        if let Some(child) = child {
            // SAFETY: as above.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        let _ = std::fs::remove_file(&mark);
        check_success(&output);
        assert!(was_there, "the child of the victim ended before the survivor did");
    }
}

/// A thread that drives two ranks needs further ones, which then idle. None of them exists in a child, and what they
/// wait in must not be in the way of the child's own communicators.
pub(crate) fn fork_beside_idle_threads() {
    let comms = make(2);
    check_pair(&comms);
    for _ in 0..20 {
        // SAFETY: no other thread of this process is inside an allocation or a call now; the child leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let made = (0..3).all(|_| std::panic::catch_unwind(still_works).is_ok());
            // SAFETY: ends the child without running anything of its parent's.
            unsafe { libc::_exit(if made { 0 } else { 3 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above and writes its status to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "a child could not make a communicator of its own");
    }
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

/// The fork may come while another thread holds any of the library's locks, or one that std has for its threads, which
/// `start_and_end` takes. So the child itself starts no thread of std's.
pub(crate) fn fork_beside_inits() {
    // What the tests themselves set up once is done before.
    still_works();
    let stop = Arc::new(AtomicBool::new(false));
    let others = [still_works, still_works, start_and_end, start_and_end].map(|act| {
        let stop = stop.clone();
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                act();
            }
        })
    });
    for _ in 0..60 {
        // SAFETY: the child makes communicators, as children of such processes do, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a child that hangs is ended by the signal, which its parent sees.
            unsafe { libc::alarm(30) };
            let made = catch_unwind(still_works_in_one_thread).is_ok();
            // SAFETY: ends the child without running anything of its parent's.
            unsafe { libc::_exit(if made { 0 } else { 3 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above and writes its status to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "a child could not make a communicator of its own");
    }
    stop.store(true, Ordering::Relaxed);
    others.into_iter().for_each(|other| other.join().unwrap());
}

fn start_and_end() {
    std::thread::spawn(|| {}).join().unwrap();
}

/// The victim forks a child that sleeps, writes its number down and waits to be killed.
pub(crate) fn forked_and_killed() {
    let rank: i32 = text("TEST_RANK").parse().unwrap();
    let comm = join(unhex(&text("TEST_IDS")), 2, rank).unwrap();
    if text("TEST_RANK") == text("TEST_VICTIM") {
        comm.check_sum(1000);
        // SAFETY: the child calls nothing but close, sleep and _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above. The test reads the victim's output to its end, which the child must not hold open.
            unsafe {
                libc::close(1);
                libc::close(2);
                libc::sleep(SLEEP_S);
                libc::_exit(0)
            };
        }
        std::fs::write(text("TEST_MARK"), format!("{child}\n")).unwrap();
        std::thread::sleep(2 * LIMIT);
    }
    // The victim takes part once; it may be killed before this rank has left even that operation.
    let error = loop {
        if let Err(error) = comm.submit(&contribution(rank, 1000), &mut [POISON; 1000]) {
            break error;
        }
    };
    assert_eq!(error.code, Code::RemoteError, "{error}");
    assert!(error.text.contains(&format!("rank {}", text("TEST_VICTIM"))), "{error}");
    comm.destroy().unwrap();
}

pub(crate) fn fork() {
    let (comms, alone) = (make(2), make(1));
    check_all(&comms, 10);
    // SAFETY: the child has the forking thread alone, makes calls of the library, which must answer there, and leaves
    // by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = catch_unwind(|| {
            for comm in comms.iter().chain(&alone) {
                assert_eq!(code(comm.submit(&[1], &mut [0])), Some(Code::InvalidUsage));
                assert_eq!(code(comm.destroy()), Some(Code::InvalidUsage));
            }
            start_afresh();
        });
        // SAFETY: ends the child without running anything of its parent's.
        unsafe { libc::_exit(if right.is_ok() { 0 } else { 3 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above and writes its status to a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
    check_all(&comms, 10);
    for comm in comms.into_iter().chain(alone) {
        comm.destroy().unwrap();
    }
    still_works();
}

/// In the child: the numbers of the parent's sockets are taken by files, which must stay open whatever is done.
fn start_afresh() {
    let files: Vec<File> = (0..64).map(|_| File::open("/dev/null").unwrap()).collect();
    let comm = make(1)[0];
    comm.check_sum(100);
    comm.destroy().unwrap();
    still_works();
    still_works();
    for file in &files {
        assert!(file.metadata().is_ok(), "{file:?} was closed by somebody else");
    }
}
