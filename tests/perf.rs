//! `ossicle perf` from the outside, on the host device: what it prints, how it ends, and what it says of bad flags.

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn perf(flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ossicle"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("NCCL_") || name.to_string_lossy().starts_with("OSSICLE_") {
            command.env_remove(name);
        }
    }
    command.env("OSSICLE_DEVICE", "host").args(["perf", "all_reduce"]);
    // A run that hangs ends, and says who is missing.
    command.args(["-T", "60"]).args(flags.split_whitespace());
    command
}

fn run(flags: &str) -> Output {
    perf(flags).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The object of a run that must be good.
fn report(flags: &str) -> Value {
    let output = run(flags);
    assert!(
        output.status.success(),
        "{flags}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn every_type_and_operation_is_right_in_threads() {
    let report = report("-b 8 -e 64K -f 16 -n 1 -d all -o all --ranks 3 --json");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 6 * 3 * 4);
    for row in rows {
        assert_eq!(
            (&row["out_of_place"]["wrong"], &row["in_place"]["wrong"]),
            (&0.into(), &0.into()),
            "{row}"
        );
        assert!(
            row["out_of_place"]["time_us"]
                .as_f64()
                .is_some_and(|time_us| time_us > 0.0),
            "{row}"
        );
    }
    assert_eq!((&report["wrong"], &report["nccl_version"]), (&0.into(), &22809.into()));
    let pids = |report: &Value| -> Vec<Value> {
        report["ranks"]
            .as_array()
            .expect("ranks")
            .iter()
            .map(|rank| rank["pid"].clone())
            .collect()
    };
    assert_eq!(pids(&report).len(), 3);
    assert!(pids(&report).iter().all(|pid| *pid == pids(&report)[0]));
}

#[test]
fn ranks_are_spread_over_processes() {
    for blocking in ["0", "1", "2", "3"] {
        let report = report(&format!(
            "-b 4K -e 256K -f 8 -n 3 -z {blocking} -c 2 --ranks 4 --processes 2 --json"
        ));
        let ranks = report["ranks"].as_array().expect("ranks");
        let pids: Vec<&Value> = ranks.iter().map(|rank| &rank["pid"]).collect();
        assert!(
            pids[0] == pids[1] && pids[2] == pids[3] && pids[0] != pids[2],
            "{pids:?}"
        );
        assert_eq!(report["rows"].as_array().map(Vec::len), Some(3));
    }
}

/// Also what is said of it: such figures are none of a network.
#[test]
fn ranks_are_spread_over_faked_hosts() {
    let flags = "-b 4K -e 1M -f 16 -n 2 --ranks 4 --hosts 2 --driver proxy";
    let report = report(&format!("{flags} --json"));
    assert_eq!((&report["hosts"], &report["processes"]), (&2.into(), &2.into()));
    let network = "TCP sockets, driven by the CPU proxy";
    assert!(
        report["network"].as_str().is_some_and(|said| said.starts_with(network)),
        "{report}"
    );
    assert_eq!(report["wrong"], 0);
    let output = run(flags);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(table.contains(&format!("# 2 faked hosts over {network}")), "{table}");
    assert!(table.contains("OSSICLE_GPU_INITIATED=0, for --driver"), "{table}");
}

#[test]
fn both_drivers_stand_side_by_side_over_the_hca() {
    let flags = "-b 4K -e 64K -f 16 -n 2 --ranks 2 --hosts 2 --driver both";
    let report = report(&format!("{flags} --json"));
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), &report["wrong"]), (2, &0.into()));
    for row in rows {
        for (driver, network) in [
            ("proxy", "the software HCA, driven by the CPU proxy"),
            ("gpu", "the software HCA, driven by the kernels"),
        ] {
            let run = &row[driver];
            assert!(
                run["network"].as_str().is_some_and(|said| said.starts_with(network)),
                "{run}"
            );
            assert_eq!(run["row"]["size_bytes"], row["size_bytes"]);
            // Of so much work some time is measured.
            for time in ["time_us", "cpu_us"] {
                assert!(
                    run["row"]["out_of_place"][time].as_f64().is_some_and(|time| time > 0.0),
                    "{run}"
                );
            }
        }
        assert!(row["time_ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
    }
    let output = run(flags);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        table.contains("2 faked hosts, both drivers over an emulated HCA"),
        "{table}"
    );
    assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    assert_eq!(
        table.lines().filter(|line| !line.starts_with('#')).count(),
        2,
        "{table}"
    );
}

#[test]
fn the_table_ends_with_the_lines_that_scripts_look_for() {
    let output = run("-b 1K -e 1K -n 1 -c 0 --ranks 1");
    let table = text(&output.stdout);
    assert!(output.status.success());
    let row = table
        .lines()
        .find(|line| line.trim_start().starts_with("1024 "))
        .expect("a row");
    assert_eq!(
        row.split_whitespace().filter(|field| *field == "N/A").count(),
        2,
        "{row}"
    );
    assert!(
        table.contains("# Out of bounds values : 0 OK") && table.contains("# Avg bus bandwidth    : 0\n"),
        "{table}"
    );
}

#[test]
fn what_the_library_refuses_is_said_in_its_words() {
    for (flags, name, value, word) in [
        ("-b 8 -e 8", "NCCL_ALGO", "Rings", "Rings"),
        ("-b 8 -e 8 --ranks 2 --processes 2", "NCCL_PROTO", "LL256", "LL256"),
        ("-b 8 -e 8", "OSSICLE_DEVICE", "gpu", "gpu"),
    ] {
        let output = perf(flags).env(name, value).output().expect("the program starts");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(name) && said.contains(word), "{said}");
    }
}

#[test]
fn a_command_line_that_makes_no_sense_is_refused() {
    for flags in [
        "-b 4X",
        "-b 8 -e 4",
        "-n 0",
        "-d float16x",
        "--ranks 3 --processes 2",
        "--ranks 3 --hosts 2",
        "--rank 2",
        "-b 0 -e 8 -f 2",
    ] {
        let output = run(flags);
        assert_eq!(output.status.code(), Some(2), "{flags}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{flags}");
    }
}

#[test]
fn a_process_that_dies_ends_the_run_by_name() {
    let mut child = perf("-b 4K -e 4K -n 1000000000 --ranks 2 --processes 2")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let table = BufReader::new(child.stdout.take().expect("a pipe"));
    let rank_1 = table
        .lines()
        .map_while(Result::ok)
        .find(|line| line.contains("Rank  1 Pid"))
        .expect("its line");
    let pid = rank_1.split_whitespace().nth(4).expect("a pid").to_owned();
    assert!(Command::new("kill")
        .args(["-9", &pid])
        .status()
        .expect("kill starts")
        .success());
    let output = child.wait_with_output().expect("the program ends");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("process 1") || said.contains("rank 1"), "{said}");
}
