//! The program that runs under the sanitizers: 8 ranks as threads, every algorithm and path, aborts in between.
//!
//! It has no test harness, whose locks the sanitizers do not see, and counts for itself.

use nccl::abi::exports as api;
use nccl::abi::types::ncclUniqueId;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::thread;

const RANKS: usize = 8;
const FLOAT: i32 = 7;
const SUM: i32 = 0;

fn unique_id() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: id is a writable ncclUniqueId.
    assert_eq!(unsafe { api::ncclGetUniqueId(&mut id) }, 0);
    id
}

/// All ranks reduce every count once; the number of wrong elements of all ranks.
fn reduce(counts: &'static [usize]) -> usize {
    let id = unique_id();
    let rank = move |rank: usize| {
        let mut comm = null_mut();
        // SAFETY: comm is a writable handle.
        let made = unsafe { api::ncclCommInitRank(&mut comm, RANKS as i32, id, rank as i32) };
        assert_eq!(made, 0);
        let mut wrong = 0;
        for count in counts {
            let mut data: Vec<f32> = (0..*count).map(|i| ((i * 7 + rank * 13) % 101) as f32).collect();
            let buffer = data.as_mut_ptr().cast::<c_void>();
            // SAFETY: the buffer has `count` floats and nobody else uses it.
            let result = unsafe { api::ncclAllReduce(buffer, buffer, *count, FLOAT, SUM, comm, null_mut()) };
            assert_eq!(result, 0);
            let expected = |i: usize| (0..RANKS).map(|r| ((i * 7 + r * 13) % 101) as f32).sum::<f32>();
            wrong += (0..*count).filter(|i| data[*i] != expected(*i)).count();
        }
        // SAFETY: a live handle.
        assert_eq!(unsafe { api::ncclCommDestroy(comm) }, 0);
        wrong
    };
    let threads: Vec<_> = (0..RANKS).map(|number| thread::spawn(move || rank(number))).collect();
    threads
        .into_iter()
        .map(|thread| thread.join().expect("a rank's thread"))
        .sum()
}

/// A communicator on a GPU, asked of a library that was built without device code.
fn says_host_only() -> bool {
    let (mut comm, id) = (null_mut(), unique_id());
    // SAFETY: comm is a writable handle.
    let refused = unsafe { api::ncclCommInitRank(&mut comm, 1, id, 0) } != 0 && comm.is_null();
    refused && nccl::observe::last_error::get().contains("feature host-only")
}

fn main() {
    let mut passed = 0;
    let mut failed = 0;
    let mut check = |what: &str, ok: bool| {
        if ok {
            passed += 1;
        } else {
            failed += 1;
            println!("failed: {what}");
        }
    };
    std::env::set_var("OSSICLE_DEVICE", "host");
    check(
        "one-shot and two-shot",
        reduce(&[1, 100, 1000, 5000, 65536, 1, 200_000, 3]) == 0,
    );
    std::env::set_var("NCCL_ALGO", "Ring");
    check("ring alone", reduce(&[1, 10, 1000, 20_000]) == 0);
    std::env::set_var("NCCL_ALGO", "TwoShot");
    check("two-shot alone", reduce(&[1, 10, 1000, 20_000]) == 0);
    std::env::set_var("NCCL_ALGO", "OneShot");
    check("one-shot alone", reduce(&[1, 10, 1000, 16_000]) == 0);
    if cfg!(feature = "host-only") {
        std::env::set_var("OSSICLE_DEVICE", "cuda");
        check("a library without device code says so", says_host_only());
    }
    println!("{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0));
}
