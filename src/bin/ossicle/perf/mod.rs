//! `ossicle perf`: starts the ranks, gathers their news and makes the table of them.

mod both;
mod check;
mod message;
pub(crate) mod options;
mod oracle;
mod output;
mod rank;
mod report;
mod sizes;
mod start;
mod table;

use crate::nccl_calls;
use message::{Measured, Message};
use nccl::device::DeviceKind;
use nccl::error::{Error, Result};
use options::{Driver, Measurement, Options};
use output::Output;
use rank::{Placement, Run};
use report::{RankPlace, Report, Row, Timing};
use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a silence may last before it is told which ranks are waited for.
const NOTICE_AFTER: Duration = Duration::from_secs(30);
const USAGE: u8 = 2;

/// 0: all right. 1: a wrong value, or something failed. 2: the command line makes no sense.
pub(crate) fn run(options: &Options) -> ExitCode {
    let measurements = match options.measurements() {
        Ok(measurements) => measurements,
        Err(text) => {
            eprintln!("ossicle: {text}");
            return ExitCode::from(USAGE);
        }
    };
    let good = match options.worker {
        Some(index) => work(options, &measurements, index),
        None if options.driver == Some(Driver::Both) => both::run(options, &measurements),
        None => coordinate(options, &measurements),
    };
    match good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ossicle: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One of several processes: runs its share of the ranks and writes their news.
fn work(options: &Options, measurements: &[Measurement], index: u32) -> Result<bool> {
    let id = start::receive_id(index, options.processes())?;
    let run = Run {
        options,
        measurements,
        device: nccl::device::kind()?,
        devices: nccl::device::count()?,
        id,
    };
    let (sender, news) = channel();
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || start::write_news(&news));
        start::run_ranks(&run, options.ranks_of(index), &sender);
        drop(sender);
        Ok(writer.join().unwrap_or(false))
    })
}

fn coordinate(options: &Options, measurements: &[Measurement]) -> Result<bool> {
    let (device, devices) = (nccl::device::kind()?, nccl::device::count()?);
    check_memory(device, options, measurements)?;
    let mut environment = share_devices(device, devices, options.ranks);
    environment.extend(options.driver.and_then(Driver::switch).map(choose_driver));
    let version = nccl_calls::version()?;
    let id = nccl_calls::unique_id()?;
    let (sender, news) = channel();
    let mut gathering = Gathering {
        options,
        measurements,
        news: &news,
        arrived: BTreeMap::new(),
        places: BTreeMap::new(),
        left: BTreeSet::new(),
        output: Output::new(options, measurements.len() * Placement::BOTH.len()),
        report: empty_report(options, device, version, environment)?,
    };
    if options.processes() > 1 {
        let processes = start::start_processes(options, &id, &sender)?;
        let good = gathering.all();
        drop(processes);
        return Ok(good);
    }
    // The threads of a run that failed may hang in the library: they are left to the end of the process, and hence own
    // what they use.
    let (options, measurements) = (options.clone(), measurements.to_vec());
    std::thread::spawn(move || {
        let run = Run {
            options: &options,
            measurements: &measurements,
            device,
            devices,
            id,
        };
        start::run_ranks(&run, 0..options.ranks, &sender);
    });
    Ok(gathering.all())
}

/// Host memory that does not exist would be granted, and the process killed later.
fn check_memory(device: DeviceKind, options: &Options, measurements: &[Measurement]) -> Result<()> {
    let largest_bytes = measurements.iter().map(Measurement::bytes).max().unwrap_or(0) as u64;
    let needed_bytes = 2 * u64::from(options.ranks) * largest_bytes;
    let info = rustix::system::sysinfo();
    let installed_bytes = info.totalram as u64 * u64::from(info.mem_unit.max(1));
    if device == DeviceKind::Host && needed_bytes > installed_bytes / 4 * 3 {
        let (needed_mib, installed_mib) = (needed_bytes >> 20, installed_bytes >> 20);
        return Err(Error::usage(format!(
            "{} ranks with two buffers of {largest_bytes} bytes each need {needed_mib} MiB and this machine has \
             {installed_mib} MiB; lower -e or --ranks",
            options.ranks
        )));
    }
    Ok(())
}

/// Ranks that share a GPU must be allowed to; a user who has said something about it keeps the last word.
fn share_devices(device: DeviceKind, devices: i32, ranks: u32) -> Vec<String> {
    const SHARE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
    if device != DeviceKind::Cuda || devices as u32 >= ranks || std::env::var_os(SHARE).is_some() {
        return Vec::new();
    }
    std::env::set_var(SHARE, "1");
    vec![format!("{SHARE}=1, since {ranks} ranks share {devices} GPU(s)")]
}

/// Before any thread or process is started.
fn choose_driver(value: &str) -> String {
    const SWITCH: &str = "OSSICLE_GPU_INITIATED";
    std::env::set_var(SWITCH, value);
    format!("{SWITCH}={value}, for --driver")
}

fn empty_report(options: &Options, device: DeviceKind, nccl_version: i32, environment: Vec<String>) -> Result<Report> {
    let between_hosts = || nccl::launch::between_hosts();
    Ok(Report {
        program: format!("ossicle {}", env!("CARGO_PKG_VERSION")),
        nccl_version,
        collective: "all_reduce",
        device: match device {
            DeviceKind::Host => "host",
            DeviceKind::Cuda => "cuda",
        },
        processes: options.processes(),
        hosts: options.hosts,
        network: (options.hosts > 1).then(between_hosts).transpose()?,
        iterations: options.iterations,
        warmup_iterations: options.warmup_iterations,
        checks: options.checks,
        blocking: options.blocking,
        environment,
        ranks: Vec::new(),
        rows: Vec::new(),
        wrong: 0,
        average_busbw_gbs: 0.0,
        error: None,
    })
}

/// The coordinator's side of a run: news in, table out.
struct Gathering<'a> {
    options: &'a Options,
    measurements: &'a [Measurement],
    news: &'a Receiver<Message>,
    /// What ranks have measured, by step; ranks may be a step apart.
    arrived: BTreeMap<usize, Vec<Measured>>,
    places: BTreeMap<u32, RankPlace>,
    left: BTreeSet<u32>,
    output: Output,
    report: Report,
}

impl Gathering<'_> {
    /// Whether every rank did everything and every value was right.
    fn all(&mut self) -> bool {
        self.report.error = self.rows().err();
        self.output.close(&self.report);
        self.report.error.is_none() && self.report.wrong == 0
    }

    fn rows(&mut self) -> std::result::Result<(), String> {
        let ranks = self.options.ranks;
        self.wait("join", |this| {
            (0..ranks).filter(|rank| !this.places.contains_key(rank)).collect()
        })?;
        self.report.ranks = self.places.values().cloned().collect();
        let bytes = || self.measurements.iter().map(Measurement::bytes);
        let sizes = (bytes().min().unwrap_or(0), bytes().max().unwrap_or(0));
        self.output.head(&self.report, self.options, sizes);
        for (row, measurement) in self.measurements.iter().enumerate() {
            let out_of_place = self.step(row, measurement, Placement::OutOfPlace)?;
            let in_place = self.step(row, measurement, Placement::InPlace)?;
            let row = Row {
                size_bytes: measurement.bytes() as u64,
                count: measurement.count as u64,
                datatype: measurement.datatype.name(),
                redop: measurement.op.name(),
                out_of_place,
                in_place,
            };
            self.output.row(&row);
            self.report.add(row);
        }
        self.wait("leave", |this| {
            (0..ranks).filter(|rank| !this.left.contains(rank)).collect()
        })
    }

    fn step(
        &mut self,
        row: usize,
        measurement: &Measurement,
        placement: Placement,
    ) -> std::result::Result<Timing, String> {
        let (step, ranks) = (row * Placement::BOTH.len() + placement as usize, self.options.ranks);
        let bytes = measurement.bytes();
        let what = format!(
            "{} {} of {bytes} bytes",
            measurement.datatype.name(),
            measurement.op.name()
        );
        self.output.progress(step, what.clone());
        self.wait(&what, |this| {
            let arrived = this.arrived.get(&step).map_or(&[][..], Vec::as_slice);
            (0..ranks)
                .filter(|rank| arrived.iter().all(|measured| measured.rank != *rank))
                .collect()
        })?;
        let measured = self.arrived.remove(&step).unwrap_or_default();
        for (rank, text) in measured
            .iter()
            .filter_map(|one| Some((one.rank, one.complaint.as_ref()?)))
        {
            self.output
                .notice(&format!("{what}, {}, rank {rank}: {text}", placement.name()));
        }
        let times_us: Vec<f64> = measured.iter().map(|one| one.time_us).collect();
        let wrong = measured.iter().map(|one| one.wrong).sum();
        let of_process = |process| {
            let ranks = self.options.ranks_of(process);
            let of_ranks = measured.iter().filter(|one| ranks.contains(&one.rank));
            // Each has measured the whole process.
            of_ranks.map(|one| one.cpu_us).fold(0.0, f64::max)
        };
        let cpu_us = (0..self.options.processes()).map(of_process).sum();
        Ok(Timing::new(bytes as u64, ranks, &times_us, cpu_us, wrong))
    }

    /// Takes news until `missing` names no rank. Silence is told after a while, and ends the run after `-T`.
    fn wait(&mut self, what: &str, missing: impl Fn(&Self) -> Vec<u32>) -> std::result::Result<(), String> {
        let mut since = Instant::now();
        loop {
            let ranks = missing(self);
            if ranks.is_empty() {
                return Ok(());
            }
            let limit = Some(Duration::from_secs(self.options.timeout_s)).filter(|limit| !limit.is_zero());
            let patience = limit.map_or(NOTICE_AFTER, |limit| {
                NOTICE_AFTER.min(limit.saturating_sub(since.elapsed()))
            });
            match self.news.recv_timeout(patience) {
                Ok(message) => {
                    self.take(message)?;
                    since = Instant::now();
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("{what}: rank(s) {ranks:?} ended without a word"))
                }
                Err(RecvTimeoutError::Timeout) => {
                    let waited = since.elapsed();
                    let text = format!("{what}: no news from rank(s) {ranks:?} for {} s", waited.as_secs());
                    if limit.is_some_and(|limit| waited >= limit) {
                        return Err(text);
                    }
                    self.output.notice(&text);
                }
            }
        }
    }

    fn take(&mut self, message: Message) -> std::result::Result<(), String> {
        match message {
            Message::Joined { rank, pid, device } => drop(self.places.insert(rank, RankPlace { rank, pid, device })),
            Message::Measured(measured) => self.arrived.entry(measured.step).or_default().push(measured),
            Message::Left { rank } => drop(self.left.insert(rank)),
            Message::Ended { process } => {
                let ranks = self.options.ranks_of(process);
                if !ranks.clone().all(|rank| self.left.contains(&rank)) {
                    return Err(format!(
                        "process {process}, with the ranks {ranks:?}, ended before they were done"
                    ));
                }
            }
            Message::Failed { text } => return Err(text),
        }
        Ok(())
    }
}
