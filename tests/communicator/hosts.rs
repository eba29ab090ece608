//! Ranks that say that they are on several hosts: communicators whose rings cross the network.

use crate::processes::{check_success, hex, run_role, text, unhex, Role};
use crate::ranks::{
    check_all, code, contribution, init_on, make_on, new_id, outcome, pause, start, sum, threads, Comm, Id, LIMIT,
    POISON,
};
use nccl::comm;
use nccl::error::Code;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Instant;

#[test]
fn sums_over_hosts_are_exact() {
    for hosts in ["ab", "aabb", "abab", "abc", "aab", "aabbccdd", "abcdabcd"] {
        let comms = make_on(hosts);
        for count in [0, 1, 2, 1000, 70_001, 300_000] {
            check_all(&comms, count);
        }
        // One thread, and in either order: nobody waits for a peer's end.
        let (even, odd): (Vec<Comm>, Vec<Comm>) = comms.into_iter().partition(|comm| comm.0 % 128 == 0);
        odd.into_iter().chain(even).for_each(|comm| comm.destroy().unwrap());
    }
}

/// Equal ids are one host, whose ranks need no network.
#[test]
fn an_algorithm_within_hosts_is_refused_by_name_between_them() {
    run_role("forced_over_hosts", &[("NCCL_ALGO", "OneShot,TwoShot")]);
}

pub(crate) fn forced() {
    let one = make_on("aa");
    check_all(&one, 1000);
    one.into_iter().for_each(|comm| comm.destroy().unwrap());
    let comms = make_on("ab");
    for comm in &comms {
        let error = comm.submit(&[1], &mut [0]).unwrap_err();
        assert_eq!(error.code, Code::InvalidUsage);
        for word in ["NCCL_ALGO", "OneShot and TwoShot", "2 hosts", "allow Ring"] {
            assert!(error.text.contains(word), "{word}: {error}");
        }
        assert!(
            comm::async_error(comm.raw()).unwrap().is_ok(),
            "a refused call is not a failure"
        );
    }
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

#[test]
fn an_abort_ends_a_call_that_waits_for_a_peer_on_another_host() {
    for round in 0..10 {
        let comms = make_on("ab");
        if round % 2 == 1 {
            check_all(&comms, 5000);
        }
        let waiting = comms[0];
        let blocked = start(move || waiting.submit(&[1; 100_000], &mut [POISON; 100_000]));
        std::thread::sleep(std::time::Duration::from_millis(5));
        waiting.abort().unwrap();
        let error = outcome(blocked).expect_err("an operation without its peer succeeded");
        assert!(
            matches!(error.code, Code::RemoteError | Code::InvalidArgument),
            "{error}"
        );
        let told = comms[1].failure();
        assert_eq!(told.code, Code::RemoteError);
        assert!(told.text.contains("rank 0"), "{told}");
        assert_eq!(code(comms[1].submit(&[1], &mut [0])), Some(Code::RemoteError));
        comms[1].destroy().unwrap();
    }
}

/// All ranks are in an operation when one of them is aborted.
#[test]
fn an_abort_in_mid_operation_ends_it_everywhere() {
    for hosts in ["ab", "aabb", "abc"] {
        let comms = make_on(hosts);
        let running: Vec<_> = comms
            .iter()
            .map(|comm| {
                let comm = *comm;
                start(move || {
                    let (send, mut recv) = (vec![1; 300_000], vec![POISON; 300_000]);
                    while comm.submit(&send, &mut recv).is_ok() {}
                })
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(50));
        comms[1].abort().unwrap();
        running.into_iter().for_each(outcome);
        for rank in (0..comms.len()).filter(|rank| *rank != 1) {
            assert_eq!(comms[rank].failure().code, Code::RemoteError);
            comms[rank].destroy().unwrap();
        }
    }
}

/// Every second end is an abort, so that connections end in either way; nothing is left of them.
pub(crate) fn cycle(number: u32) {
    let comms = make_on("ab");
    check_all(&comms, 1);
    for comm in comms {
        if number.is_multiple_of(2) {
            comm.abort()
        } else {
            comm.destroy()
        }
        .unwrap();
    }
}

#[test]
fn communicators_over_hosts_leave_nothing_behind() {
    run_role("cycles_over_hosts", &[]);
}

#[test]
fn a_forked_child_makes_its_own_over_hosts() {
    run_role("fork_over_hosts", &[]);
}

const BY_KERNELS: (&str, &str) = ("NCCL_GPU_INITIATED", "1");

/// Over the software HCA the same holds as over sockets.
#[test]
fn kernels_drive_the_network_as_the_proxy_does() {
    for role in ["any_driver", "cycles_over_hosts", "fork_over_hosts"] {
        run_role(role, &[BY_KERNELS]);
    }
    run_role("any_driver", &[("NCCL_NET", "HCA")]);
}

pub(crate) fn any_driver() {
    sums_over_hosts_are_exact();
    an_abort_ends_a_call_that_waits_for_a_peer_on_another_host();
    an_abort_in_mid_operation_ends_it_everywhere();
}

#[test]
fn the_proxy_drives_the_hca_as_sockets() {
    for role in ["any_driver", "cycles_over_hosts", "fork_over_hosts"] {
        run_role(role, &[("NCCL_NET", "HCA"), ("NCCL_GPU_INITIATED", "0")]);
    }
}

/// The child has its parent's sockets and proxy no more, and starts a proxy of its own.
pub(crate) fn fork() {
    let comms = make_on("ab");
    check_all(&comms, 1000);
    for _ in 0..5 {
        // SAFETY: no other thread of this process is inside an allocation or a call now; the child leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a child that hangs is ended by the signal, which its parent sees.
            unsafe { libc::alarm(30) };
            let made = std::panic::catch_unwind(|| (0..2).for_each(cycle)).is_ok();
            // SAFETY: ends the child without running anything of its parent's.
            unsafe { libc::_exit(if made { 0 } else { 3 }) };
        }
        check_all(&comms, 1000);
        let mut status = 0;
        // SAFETY: waits for the child made above and writes its status to a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "a child could not make a communicator of its own");
    }
    check_all(&comms, 1000);
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
}

const RANKS: i32 = 3;
const VICTIM: i32 = 2;

/// A file of a test that processes wait for.
struct Marks(PathBuf);

impl Marks {
    fn set(&self, name: &str) {
        std::fs::write(self.0.join(name), "").unwrap();
    }

    fn wait(&self, name: &str) {
        let start = Instant::now();
        while !self.0.join(name).exists() {
            assert!(start.elapsed() < LIMIT, "{name} never came");
            pause();
        }
    }
}

/// Of a rank on another host a survivor hears by its own connection to it, or by the session.
#[test]
fn survivors_of_a_rank_that_was_killed_on_another_host_hear_of_it() {
    kill_one("Socket");
}

#[test]
fn survivors_of_a_rank_that_was_killed_hear_of_it_where_the_proxy_posts_to_the_hca() {
    kill_one("HCA");
}

fn kill_one(net: &str) {
    let folder = std::env::temp_dir().join(format!("ossicle-hosts-{net}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let marks = Marks(folder);
    let ids = format!("{} {}", hex(&new_id()), hex(&new_id()));
    let role = |rank: i32| {
        let variables = [
            ("TEST_RANK", &*rank.to_string()),
            ("TEST_IDS", &*ids),
            ("TEST_MARK", marks.0.to_str().unwrap()),
            ("NCCL_HOSTID", &*format!("host {rank}")),
            ("NCCL_NET", net),
            ("NCCL_GPU_INITIATED", "0"),
        ];
        Role::start("killed_over_hosts", &variables)
    };
    let (survivors, victim) = ([role(0), role(1)], role(VICTIM));
    marks.wait("under way");
    victim.kill();
    let outputs: Vec<Output> = survivors.into_iter().map(Role::finish).collect();
    std::fs::remove_dir_all(&marks.0).unwrap();
    outputs.iter().for_each(check_success);
}

pub(crate) fn killed() {
    let rank: i32 = text("TEST_RANK").parse().unwrap();
    let ids: Vec<Id> = text("TEST_IDS").split(' ').map(unhex).collect();
    let marks = Marks(Path::new(&text("TEST_MARK")).to_owned());
    let host = text("NCCL_HOSTID");
    let comm = init_on(ids[0], RANKS, rank, &host).unwrap();
    let mut rounds = 0;
    let error = loop {
        let mut recv = vec![POISON; 20_000];
        match comm.submit(&contribution(rank, 20_000), &mut recv) {
            Ok(()) => assert_eq!(recv, sum(RANKS, 20_000)),
            Err(error) => break error,
        }
        rounds += 1;
        if rank == VICTIM && rounds == 20 {
            marks.set("under way");
        }
    };
    assert_eq!(error.code, Code::RemoteError, "{error}");
    let told = comm.failure();
    assert_eq!(told.code, Code::RemoteError);
    assert!(told.text.contains(&format!("rank {VICTIM}")), "{told}");
    // An abort before would be what the other survivor hears of first.
    marks.set(&format!("told {rank}"));
    marks.wait(&format!("told {}", 1 - rank));
    comm.abort().unwrap();
    let next = init_on(ids[1], 2, rank, &host).unwrap();
    next.check_sum(1000);
    next.destroy().unwrap();
}

/// Ranks whose calls come from threads of their own, in many communicators at once, all served by one proxy.
#[test]
fn many_communicators_share_a_proxy() {
    let sets: Vec<Vec<Comm>> = (0..4).map(|_| make_on("aab")).collect();
    let running: Vec<_> = sets
        .iter()
        .cloned()
        .map(|comms| start(move || (0..10).for_each(|turn| check_all(&comms, 1 + 3000 * turn))))
        .collect();
    running.into_iter().for_each(outcome);
    threads(&[0, 1, 2], move |rank| {
        sets.iter().for_each(|comms| comms[rank as usize].destroy().unwrap());
    });
}
