//! The command line of `ossicle perf`, with nccl-tests' names, and the steps of a run that follow from it.

use super::oracle::Oracle;
use super::sizes;
use clap::Args;
use nccl::device::Kernel;
use nccl::request::{DataType, ReduceOp};
use std::ops::Range;

#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Smallest size in bytes, such as 8, 4K, 128M or 1G
    #[arg(short = 'b', long = "minbytes", default_value = "32M", value_name = "SIZE", value_parser = sizes::parse)]
    min_bytes: u64,
    /// Largest size in bytes [default: 32M, or the smallest size if that is larger]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = sizes::parse)]
    max_bytes: Option<u64>,
    /// Distance between sizes in bytes, where they are not multiplied
    #[arg(short = 'i', long = "stepbytes", default_value = "1M", value_name = "SIZE", value_parser = sizes::parse)]
    step_bytes: u64,
    /// Factor between sizes; 1 adds the distance instead
    #[arg(short = 'f', long = "stepfactor", default_value_t = 1, value_name = "FACTOR")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..), allow_negative_numbers = true)]
    step_factor: u64,
    /// Operations that are timed, for each size
    #[arg(short = 'n', long = "iters", default_value_t = 20, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub(crate) iterations: u32,
    /// Operations before the timed ones, for each size
    #[arg(
        short = 'w',
        long = "warmup_iters",
        default_value_t = 1,
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    pub(crate) warmup_iterations: u32,
    /// Operations after the timed ones whose every result is checked, for each size
    #[arg(
        short = 'c',
        long = "check",
        default_value_t = 1,
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    pub(crate) checks: u32,
    /// Element type, or `all` that there are kernels for
    #[arg(short = 'd', long, default_value = "float", value_name = "TYPE", value_parser = parse_datatypes)]
    datatype: Chosen<DataType>,
    /// Reduction, or `all` that there are kernels for
    #[arg(short = 'o', long, default_value = "sum", value_name = "OP", value_parser = parse_ops)]
    op: Chosen<ReduceOp>,
    /// 0: wait once after all operations; 1: wait and barrier after each; 2: wait after each; 3: as 1, and the barrier
    /// is not timed
    #[arg(short = 'z', long, default_value_t = 0, value_name = "MODE")]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=3), allow_negative_numbers = true)]
    pub(crate) blocking: u8,
    /// Seconds without news from a rank after which the run has failed; 0: never
    #[arg(
        short = 'T',
        long = "timeout",
        default_value_t = 0,
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    pub(crate) timeout_s: u64,
    /// Ranks in all
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    #[arg(allow_negative_numbers = true)]
    pub(crate) ranks: u32,
    /// Processes over which the ranks are spread evenly; with 1 they are threads of this one [default: one a host]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    #[arg(allow_negative_numbers = true)]
    processes: Option<u32>,
    /// Hosts that the processes say they are on (NCCL_HOSTID), spread evenly: what goes between them goes over the network
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    #[arg(allow_negative_numbers = true)]
    pub(crate) hosts: u32,
    /// Who drives the network between hosts [default: as NCCL_GPU_INITIATED says]
    #[arg(long, value_enum)]
    pub(crate) driver: Option<Driver>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// Set by this program when it starts itself: which of the processes this is
    #[arg(long, hide = true)]
    pub(crate) worker: Option<u32>,
}

/// Values of `--driver`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// A CPU thread
    Proxy,
    /// The kernels themselves
    Gpu,
    /// One after the other for each size, over the software HCA
    Both,
}

impl Driver {
    /// The switch's value that asks for it; None where runs for each do.
    pub(crate) fn switch(self) -> Option<&'static str> {
        match self {
            Driver::Proxy => Some("0"),
            Driver::Gpu => Some("1"),
            Driver::Both => None,
        }
    }
}

/// One or several values of `-d` or `-o`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen<T>(Vec<T>);

fn parse_datatypes(text: &str) -> Result<Chosen<DataType>, String> {
    choose(text, &DataType::ALL, DataType::name, &Kernel::DATATYPES)
}

fn parse_ops(text: &str) -> Result<Chosen<ReduceOp>, String> {
    choose(text, &ReduceOp::ALL, ReduceOp::name, &Kernel::OPS)
}

/// `all`, or the one of `known` with this name, if it is among those that are `built`.
fn choose<T: Copy + PartialEq>(
    text: &str,
    known: &[T],
    name: impl Fn(T) -> &'static str,
    built: &[T],
) -> Result<Chosen<T>, String> {
    if text == "all" {
        return Ok(Chosen(built.to_vec()));
    }
    let names = built.iter().map(|value| name(*value)).collect::<Vec<_>>().join(", ");
    match known.iter().find(|value| name(**value) == text) {
        Some(value) if built.contains(value) => Ok(Chosen(vec![*value])),
        Some(_) => Err(format!("\"{text}\" is not built yet; there are kernels for {names}")),
        None => Err(format!("\"{text}\" is unknown; it is one of {names}, or all")),
    }
}

/// One row of the table before it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measurement {
    pub(crate) datatype: DataType,
    pub(crate) op: ReduceOp,
    pub(crate) count: usize,
}

impl Measurement {
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.datatype.bytes()
    }
}

impl Options {
    /// Every row of the run, in order; the same on every process. An error is a sentence about the command line.
    pub(crate) fn measurements(&self) -> Result<Vec<Measurement>, String> {
        let (ranks, processes, hosts) = (self.ranks, self.processes(), self.hosts);
        if !ranks.is_multiple_of(processes) {
            return Err(format!(
                "{ranks} ranks cannot be spread evenly over {processes} processes"
            ));
        }
        if !processes.is_multiple_of(hosts) {
            return Err(format!(
                "{processes} processes cannot be spread evenly over {hosts} hosts"
            ));
        }
        if hosts == 1 && self.driver.is_some() {
            return Err(String::from(
                "--driver is about the network between hosts, and there is one host: add --hosts",
            ));
        }
        let max_bytes = self.max_bytes.unwrap_or(self.min_bytes.max(32 << 20));
        let sizes = sizes::sweep(self.min_bytes, max_bytes, self.step_factor, self.step_bytes)?;
        let mut rows = Vec::new();
        for &datatype in &self.datatype.0 {
            for &op in &self.op.0 {
                if self.checks > 0 && Oracle::new(datatype, op, self.ranks).is_none() {
                    let (datatype, op, ranks) = (datatype.name(), op.name(), self.ranks);
                    return Err(format!(
                        "no exact check of {datatype} {op} over {ranks} ranks; take -c 0 or fewer ranks"
                    ));
                }
                let count = |size: &u64| *size as usize / datatype.bytes();
                rows.extend(sizes.iter().map(|size| Measurement {
                    datatype,
                    op,
                    count: count(size),
                }));
            }
        }
        Ok(rows)
    }

    /// The command line of a run of one measurement by one driver, with its report as JSON.
    pub(crate) fn one(&self, measurement: &Measurement, driver: Driver) -> Vec<String> {
        let bytes = measurement.bytes().to_string();
        let driver = if driver == Driver::Gpu { "gpu" } else { "proxy" };
        let pairs = [
            ("-b", bytes.clone()),
            ("-e", bytes),
            ("-n", self.iterations.to_string()),
            ("-w", self.warmup_iterations.to_string()),
            ("-c", self.checks.to_string()),
            ("-d", measurement.datatype.name().to_owned()),
            ("-o", measurement.op.name().to_owned()),
            ("-z", self.blocking.to_string()),
            ("-T", self.timeout_s.to_string()),
            ("--ranks", self.ranks.to_string()),
            ("--processes", self.processes().to_string()),
            ("--hosts", self.hosts.to_string()),
            ("--driver", driver.to_owned()),
        ];
        let words = pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
        words.chain(std::iter::once("--json".to_owned())).collect()
    }

    pub(crate) fn processes(&self) -> u32 {
        self.processes.unwrap_or(self.hosts)
    }

    /// The host that a process says it is on; None: where it is.
    pub(crate) fn host_of(&self, process: u32) -> Option<String> {
        let share = self.processes() / self.hosts;
        (self.hosts > 1).then(|| format!("ossicle perf {}", process / share))
    }

    /// The share of one process.
    pub(crate) fn ranks_of(&self, process: u32) -> Range<u32> {
        let share = self.ranks / self.processes();
        process * share..(process + 1) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &str) -> Result<Options, String> {
        let words = std::iter::once("perf").chain(line.split_whitespace());
        Line::try_parse_from(words)
            .map(|line| line.options)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_flags_are_those_of_nccl_tests() {
        let options = parse("-b 8 -e 1K -f 2 -n 5 -w 2 -c 0 -d all -o max -z 1 --ranks 8 --processes 4").unwrap();
        let rows = options.measurements().unwrap();
        assert_eq!(rows.len(), 8 * Kernel::DATATYPES.len());
        assert_eq!(
            rows[0],
            Measurement {
                datatype: DataType::Float32,
                op: ReduceOp::Max,
                count: 2
            }
        );
        assert_eq!(
            (options.iterations, options.warmup_iterations, options.checks),
            (5, 2, 0)
        );
        assert_eq!((options.blocking, options.ranks_of(3)), (1, 6..8));
        assert_eq!((options.host_of(0), options.driver), (None, None));
        let spread = parse("--ranks 8 --processes 4 --hosts 2 --driver proxy").unwrap();
        assert_eq!(spread.driver, Some(Driver::Proxy));
        assert_eq!(spread.host_of(0), spread.host_of(1));
        assert_ne!(spread.host_of(1), spread.host_of(2));
        assert_eq!(parse("--ranks 6 --hosts 3").unwrap().ranks_of(1), 2..4);
        let long = "--minbytes 8 --maxbytes 8 --stepbytes 8 --stepfactor 2 --iters 1 --warmup_iters 1 --check 1";
        assert_eq!(parse(long).unwrap().measurements().unwrap().len(), 1);
        assert_eq!(parse("").unwrap().measurements().unwrap()[0].bytes(), 32 << 20);
        assert_eq!(parse("-b 64M").unwrap().measurements().unwrap()[0].bytes(), 64 << 20);
    }

    #[test]
    fn a_run_for_one_driver_and_size_has_all_other_flags() {
        let line =
            "-b 8 -e 1K -f 2 -n 5 -w 2 -c 3 -d half -o max -z 1 -T 7 --ranks 8 --processes 4 --hosts 2 --driver both";
        let options = parse(line).unwrap();
        let rows = options.measurements().unwrap();
        let one = parse(&options.one(&rows[3], Driver::Gpu).join(" ")).unwrap();
        assert_eq!(one.measurements().unwrap(), [rows[3]]);
        let flags = |options: &Options| {
            let Options {
                iterations,
                warmup_iterations,
                checks,
                blocking,
                timeout_s,
                ranks,
                hosts,
                ..
            } = *options;
            (
                iterations,
                warmup_iterations,
                checks,
                blocking,
                timeout_s,
                ranks,
                hosts,
                options.processes(),
            )
        };
        assert_eq!(flags(&one), flags(&options));
        assert_eq!((one.driver, one.json), (Some(Driver::Gpu), true));
    }

    #[test]
    fn bad_flags_are_named_with_their_value() {
        for (line, word) in [
            ("-b 4X", "4X"),
            ("-f 0", "0"),
            ("-n 0", "0"),
            ("-n -1", "-1"),
            ("-w -1", "-1"),
            ("-d int8", "not built yet"),
            ("-d floaty", "floaty"),
            ("-o prod", "not built yet"),
            ("-z 4", "4"),
            ("--ranks 0", "0"),
            ("--ranks -2", "-2"),
            ("--processes 0", "0"),
            ("--hosts 0", "0"),
            ("--hosts 2 --driver card", "card"),
        ] {
            let error = parse(line).err().unwrap_or_else(|| panic!("{line} is accepted"));
            assert!(error.contains(word), "{line}: {error}");
        }
        for line in [
            "-b 8 -e 4",
            "--ranks 3 --processes 2",
            "--ranks 3 --hosts 2",
            "--ranks 4 --processes 1 --hosts 2",
            "--driver proxy",
            "-b 0 -e 8 -f 2",
            "--ranks 300 -d bfloat16",
        ] {
            assert!(parse(line).unwrap().measurements().is_err(), "{line}");
        }
    }
}
