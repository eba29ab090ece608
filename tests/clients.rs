//! C programs that were built against NVIDIA's header run on this library: ranks as threads and as processes, on every
//! path and with every algorithm; what they see of the log; what bad settings get.

mod client;

use client::{checked, command, compile, finish, root, scratch, spawn, Header};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

type Settings<'a> = &'a [(&'a str, &'a str)];

fn all_reduce(test: &str) -> PathBuf {
    client("all_reduce", test)
}

/// A client, built in a folder of its test's.
fn client(name: &str, test: &str) -> PathBuf {
    compile(
        "gcc",
        Header::Nvidia,
        &root().join(format!("tests/c/{name}.c")),
        &scratch(test),
    )
}

fn in_threads(program: &Path, ranks: usize, settings: Settings) -> Command {
    let mut command = command(program);
    command
        .args(["threads", &ranks.to_string()])
        .envs(settings.iter().copied());
    command
}

fn run(mut command: Command) -> Output {
    finish(spawn(&mut command))
}

/// Asserts that a client ran to its end, and that all it checked was right.
fn passes(command: Command, output: Output) -> Output {
    let output = checked(&command, output);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains(" 0 failed") && !text.starts_with("0 passed"),
        "{command:?}: {text}"
    );
    output
}

fn passes_in_threads(program: &Path, ranks: usize, settings: Settings) {
    let mut command = in_threads(program, ranks, settings);
    let output = finish(spawn(&mut command));
    passes(command, output);
}

fn passes_in_processes(program: &Path, ranks: usize, settings: Settings) {
    in_processes(program, ranks, |command, _| {
        command.envs(settings.iter().copied());
    });
}

/// A process a rank, with a letter for the host that it says it is on. The outputs, in rank order.
fn passes_on_hosts(program: &Path, hosts: &str, settings: Settings) -> Vec<Output> {
    in_processes(program, hosts.len(), |command, rank| {
        let host = &hosts[rank..][..1];
        command.env("NCCL_HOSTID", host).envs(settings.iter().copied());
    })
}

fn in_processes(program: &Path, ranks: usize, set: impl Fn(&mut Command, usize)) -> Vec<Output> {
    let id = program.with_extension(format!("{ranks}.id"));
    let start = |rank: usize| -> (Command, Child) {
        let mut command = command(program);
        command
            .args(["process", &ranks.to_string(), &rank.to_string()])
            .arg(&id);
        set(&mut command, rank);
        let child = spawn(&mut command);
        (command, child)
    };
    let started: Vec<(Command, Child)> = (0..ranks).map(start).collect();
    let outputs = started
        .into_iter()
        .map(|(command, child)| passes(command, finish(child)))
        .collect();
    std::fs::remove_file(&id).unwrap();
    outputs
}

#[test]
fn a_c_client_reduces_exactly_with_8_threads_and_in_8_processes() {
    let program = all_reduce("eight");
    passes_in_threads(&program, 8, &[]);
    passes_in_processes(&program, 8, &[]);
}

#[test]
fn every_path_and_algorithm_can_be_forced() {
    let program = all_reduce("forced");
    passes_in_threads(&program, 4, &[("NCCL_P2P_DISABLE", "1")]);
    let three = [
        ("NCCL_MIN_NCHANNELS", "3"),
        ("NCCL_MAX_NCHANNELS", "3"),
        ("NCCL_ALGO", "Ring"),
    ];
    passes_in_threads(&program, 4, &[&three[..], &[("NCCL_SHM_DISABLE", "1")]].concat());
    passes_in_processes(&program, 2, &[("NCCL_ALGO", "allreduce:ring")]);
    passes_in_threads(&program, 16, &[]);
    passes_in_threads(&program, 1, &[]);
}

#[test]
fn all_gather_and_broadcast_move_exactly() {
    let program = client("moves", "moves");
    passes_in_threads(&program, 4, &[]);
    passes_in_threads(&program, 3, &[("NCCL_P2P_DISABLE", "1"), ("NCCL_MIN_NCHANNELS", "2")]);
    passes_in_threads(&program, 1, &[]);
    passes_in_processes(&program, 2, &[]);
}

#[test]
fn the_log_says_who_answers_which_path_and_which_plan() {
    let program = all_reduce("log");
    let quiet = run(in_threads(&program, 2, &[]));
    assert!(quiet.stderr.is_empty(), "{}", String::from_utf8_lossy(&quiet.stderr));
    let info = [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT,COLL,ENV"),
        ("NCCL_SHM_DISABLE", "no"),
    ];
    let file = program.with_extension("%p.log");
    let mut command = in_threads(&program, 2, &info);
    let child = spawn(command.env("NCCL_DEBUG_FILE", &file));
    let log = file.to_str().unwrap().replace("%p", &child.id().to_string());
    passes(command, finish(child));
    let text = std::fs::read_to_string(log).unwrap();
    for line in [
        "NCCL version 2.28.9+cuda13.0\n",
        "Ossicle 0.1.0\n",
        "Init COMPLETE",
        "via P2P: all ranks are in one process",
        "-> OneShot (LL), 1 blocks of",
        "-> TwoShot (Simple), 1 blocks of",
        "NCCL_SHM_DISABLE is \"no\", which is not an integer: the default is used",
    ] {
        assert!(text.contains(line), "no line has {line:?} in\n{text}");
    }
    let version = run(in_threads(&program, 2, &[("NCCL_DEBUG", "version")]));
    assert_eq!(
        String::from_utf8_lossy(&version.stderr),
        "NCCL version 2.28.9+cuda13.0\nOssicle 0.1.0\n"
    );
}

#[test]
fn a_log_whose_reader_leaves_does_not_end_the_program() {
    let program = all_reduce("reader");
    let fifo = program.with_extension("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut reader = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&fifo)
        .unwrap();
    let mut command = in_threads(&program, 2, &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "ALL")]);
    let mut child = spawn(command.env("NCCL_DEBUG_FILE", &fifo));
    // Its end without a line is told by the assertion below.
    while !matches!(reader.read(&mut [0]), Ok(1)) && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    drop(reader);
    let output = passes(command, finish(child));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.starts_with("NCCL_DEBUG_FILE: Broken pipe"), "{told}");
}

#[test]
fn bad_settings_are_refused_by_name() {
    let program = all_reduce("settings");
    for (settings, sentences) in [
        (
            &[("NCCL_ALGO", "rings")][..],
            &["NCCL_ALGO is \"rings\"", "OneShot, TwoShot, Ring"][..],
        ),
        (&[("NCCL_ALGO", "Tree")], &["NCCL_ALGO \"Tree\"", "Ring with Simple"]),
        (&[("NCCL_PROTO", "LL256")], &["NCCL_PROTO is \"LL256\"", "LL, Simple"]),
        (
            &[("NCCL_NET", "carrier pigeon")],
            &["NCCL_NET is \"carrier pigeon\"", "IB, Socket, HCA"],
        ),
        (
            &[("NCCL_NET", "IB"), ("NCCL_IB_DISABLE", "1")],
            &["NCCL_NET is IB", "NCCL_IB_DISABLE is 1"],
        ),
        (
            &[("NCCL_GPU_INITIATED", "2")],
            &["NCCL_GPU_INITIATED is \"2\"", "0, 1, auto"],
        ),
        (
            &[("OSSICLE_GPU_INITIATED", "yes")],
            &["OSSICLE_GPU_INITIATED is \"yes\"", "0, 1, auto"],
        ),
        (
            &[("OSSICLE_DEVICE", "tpu")],
            &["OSSICLE_DEVICE is \"tpu\"", "host, cuda"],
        ),
        (&[("OSSICLE_DEVICE", "cuda")], &["OSSICLE_DEVICE"]),
        (
            &[("OSSICLE_INIT_TIMEOUT_MS", "soon")],
            &["OSSICLE_INIT_TIMEOUT_MS is \"soon\""],
        ),
        (
            &[("OSSICLE_WAIT_REPORT_MS", "-1")],
            &["OSSICLE_WAIT_REPORT_MS is \"-1\""],
        ),
        (
            &[("OSSICLE_WAIT_FAIL", "maybe")],
            &["OSSICLE_WAIT_FAIL is \"maybe\"", "0, 1"],
        ),
        (
            &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")],
            &["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"],
        ),
        (&[("NCCL_SOCKET_IFNAME", "=nosuch0")], &["nosuch0", "lo"]),
        (&[("NCCL_COMM_ID", "nowhere")], &["nowhere"]),
    ] {
        let output = run(in_threads(&program, 2, &[settings, &[("NCCL_DEBUG", "WARN")]].concat()));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{settings:?} is accepted");
        for sentence in sentences {
            assert!(text.contains(sentence), "{settings:?}: no {sentence:?} in\n{text}");
        }
    }
}

#[test]
fn processes_on_several_hosts_reduce_exactly() {
    let program = all_reduce("hosts");
    passes_on_hosts(&program, "ab", &[]);
    passes_on_hosts(&program, "aabb", &[("NCCL_MIN_NCHANNELS", "3"), ("NCCL_NET", "Socket")]);
    passes_on_hosts(&program, "abcdabcd", &[("OSSICLE_GPU_INITIATED", "0")]);
}

#[test]
fn processes_on_several_hosts_gather_and_broadcast_exactly() {
    let program = client("moves", "moves_on_hosts");
    passes_on_hosts(&program, "ab", &[]);
    passes_on_hosts(
        &program,
        "aba",
        &[("NCCL_MAX_NCHANNELS", "2"), ("NCCL_MIN_NCHANNELS", "2")],
    );
}

/// Who drives the network is said by rank 0, once, and at WARN where the switch asks for something else.
#[test]
fn the_switch_is_answered_aloud() {
    let program = all_reduce("switch");
    let said = |settings: Settings| {
        let outputs = passes_on_hosts(&program, "ab", settings);
        outputs
            .iter()
            .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
            .collect::<Vec<String>>()
    };
    let warned = [
        ("NCCL_GPU_INITIATED", "1"),
        ("NCCL_NET", "Socket"),
        ("NCCL_DEBUG", "WARN"),
    ];
    let [first, second] = &said(&warned)[..] else {
        panic!("two ranks")
    };
    let line = "2 hosts over TCP sockets: CPU proxy (NCCL_GPU_INITIATED is 1, but no kernel can post to a TCP socket";
    assert_eq!(first.matches(line).count(), 1, "{first}");
    assert!(!second.contains("CPU proxy"), "{second}");
    // The project's own name wins.
    let quiet = said(&[&warned[..], &[("OSSICLE_GPU_INITIATED", "0")]].concat());
    assert!(quiet.iter().all(|text| !text.contains("CPU proxy")), "{quiet:?}");
    // No network is named: the kernels get one that they can drive.
    let driven = said(&[("NCCL_GPU_INITIATED", "1"), ("NCCL_DEBUG", "INFO")]);
    let line = "2 hosts over the software HCA: kernels (NCCL_GPU_INITIATED is 1)";
    assert!(driven.iter().all(|text| text.contains(line)), "{driven:?}");
}
