//! Communicators end to end on the host device: creation, sums, errors, every way to end one.
//!
//! Ranks are threads of this process; what cannot share a process with other tests is in `processes`, `forks` and
//! `waits`.

mod forks;
mod hosts;
mod processes;
mod ranks;
mod streams;
mod waits;

use nccl::abi::config::Config;
use nccl::comm::{self, Progress};
use nccl::error::Code;
use nccl::group;
use ranks::{
    check_all, code, contribution, init, join, make, new_id, outcome, start, still_works, sum, threads, Comm, POISON,
};
use std::ptr::{null_mut, without_provenance_mut};
use std::time::Duration;

#[test]
fn sums_are_exact() {
    for ranks in [1, 2, 8] {
        let comms = make(ranks);
        for (comm, rank) in comms.iter().zip(0..) {
            assert_eq!(comm::rank_count(comm.raw()), Ok(ranks));
            assert_eq!(comm::user_rank(comm.raw()), Ok(rank));
            assert!(comm::cuda_device(comm.raw()).is_ok());
            assert_eq!(comm::async_error(comm.raw()), Ok(Ok(Progress::Done)));
        }
        for count in [0, 1, 1000, 70_001] {
            check_all(&comms, count);
        }
        comms.into_iter().for_each(|comm| comm.destroy().unwrap());
    }
}

#[test]
fn arguments_are_checked_at_the_call() {
    let id = new_id();
    for (ranks, rank) in [(0, 0), (-5, 0), (3, -1), (3, 3)] {
        assert_eq!(
            code(join(id, ranks, rank)),
            Some(Code::InvalidArgument),
            "{ranks} {rank}"
        );
    }
    let many = join(id, 17, 0).unwrap_err();
    assert_eq!(many.code, Code::InvalidUsage);
    assert!(many.text.contains("16"), "{many}");
    let mut raw = null_mut();
    for ids in [vec![], vec![id; 3]] {
        assert_eq!(
            code(comm::init_rank(&mut raw, 2, ids, 0, Config::default())),
            Some(Code::InvalidArgument)
        );
    }
    assert_eq!(
        code(comm::init_rank(null_mut(), 1, vec![id], 0, Config::default())),
        Some(Code::InvalidArgument)
    );
}

#[test]
fn a_duplicate_rank_fails_every_rank() {
    let id = new_id();
    for error in threads(&[0, 1, 1], move |rank| join(id, 3, rank).unwrap_err()) {
        assert_eq!(error.code, Code::InvalidUsage, "{error}");
        assert!(error.text.contains("rank 1"), "{error}");
    }
    still_works();
}

#[test]
fn ranks_that_disagree_on_their_number_all_fail() {
    let id = new_id();
    for error in threads(&[0, 1, 2], move |rank| {
        join(id, if rank == 2 { 4 } else { 3 }, rank).unwrap_err()
    }) {
        assert_eq!(error.code, Code::InvalidUsage, "{error}");
    }
}

#[test]
fn init_all_makes_every_rank_or_none() {
    new_id();
    let mut raw = [null_mut(); 4];
    comm::init_all(raw.as_mut_ptr(), 4, None).unwrap();
    let comms: Vec<Comm> = raw.iter().map(|raw| Comm(raw.addr())).collect();
    let devices: Vec<i32> = raw.iter().map(|raw| comm::cuda_device(*raw).unwrap()).collect();
    assert_eq!(devices, [0, 1, 2, 3]);
    check_all(&comms, 1000);
    comms.into_iter().for_each(|comm| comm.destroy().unwrap());
    for (list, expected, said) in [
        ([0, 99], Code::InvalidArgument, "99"),
        ([-1, 0], Code::InvalidArgument, "-1"),
        ([5, 5], Code::InvalidUsage, "device 5"),
    ] {
        let mut raw = [without_provenance_mut(1); 2];
        let error = comm::init_all(raw.as_mut_ptr(), 2, Some(&list)).unwrap_err();
        assert_eq!(error.code, expected, "{error}");
        assert!(error.text.contains(said), "{error}");
        assert_eq!(raw, [null_mut(); 2]);
    }
    assert_eq!(
        code(comm::init_all(raw.as_mut_ptr(), -1, None)),
        Some(Code::InvalidArgument)
    );
}

#[test]
fn one_thread_makes_and_drives_several_ranks_in_groups() {
    const RANKS: usize = 4;
    let id = new_id();
    let mut raw = [null_mut(); RANKS];
    group::start().unwrap();
    for (rank, slot) in raw.iter_mut().enumerate() {
        comm::init_rank(slot, RANKS as i32, vec![id], rank as i32, Config::default()).unwrap();
        assert!(slot.is_null(), "the handle is there before the group ended");
    }
    assert_eq!(group::end(), Ok(Progress::Done));
    let comms: Vec<Comm> = raw.iter().map(|raw| Comm(raw.addr())).collect();
    let send: Vec<Vec<i32>> = (0..RANKS as i32).map(|rank| contribution(rank, 500)).collect();
    let mut recv = vec![vec![POISON; 500]; 2 * RANKS];
    group::start().unwrap();
    for (rank, comm) in comms.iter().enumerate() {
        let (once, twice) = recv[2 * rank..2 * rank + 2].split_at_mut(1);
        comm.submit(&send[rank], &mut once[0]).unwrap();
        group::start().unwrap();
        comm.submit(&send[rank], &mut twice[0]).unwrap();
        assert_eq!(group::end(), Ok(Progress::Done));
        assert_eq!(once[0], vec![POISON; 500], "work ran before the group ended");
    }
    assert_eq!(group::end(), Ok(Progress::Done));
    assert_eq!(recv, vec![sum(RANKS as i32, 500); 2 * RANKS]);
    group::start().unwrap();
    comms.iter().for_each(|comm| comm.destroy().unwrap());
    assert!(
        comm::rank_count(comms[0].raw()).is_ok(),
        "destroy ran before the group ended"
    );
    assert_eq!(group::end(), Ok(Progress::Done));
    assert!(comms
        .iter()
        .all(|comm| code(comm::rank_count(comm.raw())) == Some(Code::InvalidArgument)));
}

/// A group runs each communicator's operations in order and waits for nothing else: a peer that calls the same
/// operations one by one, in whatever order of communicators it likes, gets along with it.
#[test]
fn a_group_does_not_order_communicators_against_each_other() {
    let (first, second) = (make(2), make(2));
    let (a, b) = (first.clone(), second.clone());
    let grouped = start(move || {
        let (send, mut recv) = (contribution(0, 5000), vec![vec![POISON; 5000]; 5]);
        group::start().unwrap();
        for (i, recv) in recv.iter_mut().enumerate() {
            let comm = if i % 2 == 0 { a[0] } else { b[0] };
            comm.submit(&send, recv).unwrap();
        }
        assert_eq!(group::end(), Ok(Progress::Done));
        assert_eq!(recv, vec![sum(2, 5000); 5]);
    });
    let (a, b) = (first.clone(), second.clone());
    let one_by_one = start(move || {
        for comm in [b[1], b[1], a[1], a[1], a[1]] {
            comm.check_sum(5000);
        }
    });
    outcome(grouped);
    outcome(one_by_one);
    first.into_iter().chain(second).for_each(|comm| comm.destroy().unwrap());
}

#[test]
fn an_error_in_a_group_discards_all_of_it() {
    let comms = make(1);
    let (send, mut recv) = ([1, 2, 3], [POISON; 3]);
    group::start().unwrap();
    comms[0].submit(&send, &mut recv).unwrap();
    let error = Comm(0x1000).submit(&send, &mut [0; 3]).unwrap_err();
    comms[0].submit(&send, &mut recv).unwrap();
    let mut raw = without_provenance_mut(1);
    comm::init_rank(&mut raw, 1, vec![new_id()], 0, Config::default()).unwrap();
    assert_eq!(group::end(), Err(error));
    assert_eq!((recv, raw), ([POISON; 3], null_mut()));
    comms[0].check_sum(3);
    comms[0].destroy().unwrap();
}

#[test]
fn non_blocking_communicators_become_ready_by_themselves() {
    let id = new_id();
    let comms: Vec<Comm> = (0..2)
        .map(|rank| {
            let (comm, progress) = init(id, 2, rank, false).unwrap();
            assert_eq!(progress, Progress::InProgress);
            comm
        })
        .collect();
    comms.iter().for_each(|comm| comm.await_ready());
    check_all(&comms, 100);
    let other = make(1);
    let (send, mut recv) = ([1; 4], [POISON; 4]);
    group::start().unwrap();
    comms[0].submit(&send, &mut recv).unwrap();
    assert_eq!(code(other[0].submit(&send, &mut [0; 4])), Some(Code::InvalidArgument));
    assert_eq!(code(group::end()), Some(Code::InvalidArgument));
    assert_eq!(recv, [POISON; 4]);
    for comm in comms.into_iter().chain(other) {
        comm.destroy().unwrap();
    }
}

#[test]
fn ranks_destroy_in_any_order() {
    let sets: Vec<Vec<Comm>> = (0..3).map(|_| make(4)).collect();
    sets.iter().for_each(|comms| check_all(comms, 10));
    threads(&[0, 1, 2, 3], move |rank| {
        for i in 0..sets.len() {
            sets[(i + rank as usize) % sets.len()][rank as usize].destroy().unwrap();
        }
    });
}

#[test]
fn an_ended_handle_is_refused() {
    let comms = make(2);
    assert_eq!(comm::finalize(comms[0].raw()), Ok(Progress::Done));
    assert_eq!(code(comm::finalize(comms[0].raw())), Some(Code::InvalidArgument));
    assert_eq!(code(comms[0].submit(&[1], &mut [0])), Some(Code::InvalidArgument));
    comms.iter().for_each(|comm| comm.destroy().unwrap());
    let raw = comms[0].raw();
    let refusals = [
        comm::destroy(raw).err(),
        comm::abort(raw).err(),
        comm::finalize(raw).err(),
        comms[0].submit(&[1], &mut [0]).err(),
        comm::rank_count(raw).err(),
        comm::async_error(raw).err(),
    ];
    for refusal in refusals {
        let error = refusal.expect("a destroyed handle was taken");
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains("already destroyed"), "{error}");
    }
}

#[test]
fn an_abort_ends_a_call_that_waits_for_a_peer() {
    for _ in 0..10 {
        let comms = make(2);
        let waiting = comms[0];
        let blocked = start(move || waiting.submit(&[1; 100], &mut [POISON; 100]));
        std::thread::sleep(Duration::from_millis(5));
        let aborts: Vec<_> = (0..2).map(|_| start(move || waiting.abort())).collect();
        let aborts: Vec<_> = aborts.into_iter().map(outcome).collect();
        assert!(aborts.contains(&Ok(())), "{aborts:?}");
        assert!(aborts
            .iter()
            .all(|abort| matches!(code(abort.clone()), None | Some(Code::InvalidArgument))));
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

#[test]
fn an_abort_ends_a_destroy_that_waits_for_a_call() {
    let comms = make(2);
    let waiting = comms[0];
    let blocked = start(move || waiting.submit(&[1; 100], &mut [POISON; 100]));
    std::thread::sleep(Duration::from_millis(20));
    let destroying = start(move || waiting.destroy());
    std::thread::sleep(Duration::from_millis(20));
    let aborted = waiting.abort();
    assert!(matches!(code(aborted), None | Some(Code::InvalidArgument)));
    assert!(outcome(blocked).is_err());
    let _ = outcome(destroying);
    assert_eq!(code(waiting.destroy()), Some(Code::InvalidArgument));
    comms[1].abort().unwrap();
}

#[test]
fn aborts_of_many_communicators_need_no_order() {
    let sets: Vec<Vec<Comm>> = (0..8).map(|_| make(2)).collect();
    threads(&[0, 1], move |rank| {
        for i in 0..sets.len() {
            let set = if rank == 0 { sets.len() - 1 - i } else { i };
            sets[set][rank as usize].abort().unwrap();
        }
    });
}
