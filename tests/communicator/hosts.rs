//! Ranks that are, or say that they are, on several hosts: rings over the network.

use crate::ranks::{
    check_all, code, contribution, init_on, make_on, new_id, outcome, start, sum, threads, Comm, LIMIT, POISON,
};
use nccl::comm;
use nccl::error::Code;

fn destroy(comms: Vec<Comm>) {
    threads(&(0..comms.len() as i32).collect::<Vec<_>>(), move |rank| {
        comms[rank as usize].destroy().unwrap();
    });
}

#[test]
fn sums_over_hosts_are_exact() {
    for hosts in ["ab", "aabb", "abab", "abc", "aabbccdd", "abcdabcd", "aab"] {
        let comms = make_on(hosts);
        for count in [0, 1, 2, 1000, 70_001, 300_000] {
            check_all(&comms, count);
        }
        destroy(comms);
    }
}
