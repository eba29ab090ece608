//! C programs that were built against NVIDIA's header run on this library: ranks as threads and as processes, on every
//! path and with every algorithm.

mod programs;

use programs::{compile, run, scratch, Program};
use std::process::{Child, Command};

/// Asserts that a client ran to its end and that nothing failed.
fn passed(output: std::process::Output, what: &str) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains(" 0 failed"),
        "{what}: {}\n{text}{errors}",
        output.status
    );
}

fn in_threads(program: &Program, ranks: usize, settings: &[(&str, &str)]) {
    let output = run(program
        .command()
        .args(["threads", &ranks.to_string()])
        .envs(settings.iter().copied()));
    passed(output, &format!("{ranks} threads {settings:?}"));
}

fn in_processes(program: &Program, ranks: usize, settings: &[(&str, &str)]) {
    let id = scratch("unique-id");
    let start = |rank: usize| -> Child {
        let mut command: Command = program.command();
        command
            .args(["process", &ranks.to_string(), &rank.to_string()])
            .arg(&id);
        programs::spawn(command.envs(settings.iter().copied()))
    };
    let ranks: Vec<Child> = (0..ranks).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        passed(programs::finish(child), &format!("process of rank {rank} {settings:?}"));
    }
}

#[test]
fn a_c_client_reduces_exactly_with_8_threads() {
    in_threads(&compile("all_reduce"), 8, &[]);
}

#[test]
fn a_c_client_reduces_exactly_with_8_processes() {
    in_processes(&compile("all_reduce"), 8, &[]);
}

#[test]
fn every_path_and_algorithm_can_be_forced() {
    let program = compile("all_reduce");
    in_threads(&program, 4, &[("NCCL_P2P_DISABLE", "1")]);
    in_threads(
        &program,
        4,
        &[
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_ALGO", "Ring"),
            ("NCCL_MAX_NCHANNELS", "3"),
            ("NCCL_MIN_NCHANNELS", "3"),
        ],
    );
    in_processes(&program, 2, &[("NCCL_ALGO", "allreduce:ring")]);
    in_threads(&program, 16, &[]);
    in_threads(&program, 1, &[]);
}
