//! `--driver both`: each size by the CPU proxy and then by the kernels, over the software HCA, side by side.
//!
//! A size and driver is a run of its own, of this program started again with `--json`: the switch is read once a process.

use super::options::{Driver, Measurement, Options};
use nccl::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::process::{Command, Stdio};

const NETWORK: (&str, &str) = ("NCCL_NET", "HCA");
const DRIVERS: [Driver; 2] = [Driver::Proxy, Driver::Gpu];

/// What one run says of one size, as its JSON does.
#[derive(Serialize)]
struct Run {
    network: Value,
    device: Value,
    row: Value,
    #[serde(skip)]
    time_us: f64,
    #[serde(skip)]
    cpu_us: f64,
    #[serde(skip)]
    wrong: u64,
}

#[derive(Serialize)]
struct Pair {
    size_bytes: u64,
    proxy: Run,
    gpu: Run,
    /// The kernels' time over the proxy's, out of place.
    time_ratio: f64,
}

/// Whether every run succeeded and every value was right.
pub(super) fn run(options: &Options, measurements: &[Measurement]) -> Result<bool> {
    let (mut pairs, mut wrong) = (Vec::new(), 0);
    for measurement in measurements {
        let [Some(proxy), Some(gpu)] = [
            start(options, measurement, DRIVERS[0])?,
            start(options, measurement, DRIVERS[1])?,
        ] else {
            return Ok(false);
        };
        wrong += proxy.wrong + gpu.wrong;
        let time_ratio = if proxy.time_us > 0.0 {
            gpu.time_us / proxy.time_us
        } else {
            0.0
        };
        let pair = Pair {
            size_bytes: measurement.bytes() as u64,
            proxy,
            gpu,
            time_ratio,
        };
        if !options.json {
            if pairs.is_empty() {
                print(&head(options, &pair));
            }
            print(&line(measurement, &pair));
        }
        pairs.push(pair);
    }
    if options.json {
        let ranks = options.ranks;
        let report = serde_json::json!({
            "hca": "software", "hosts": options.hosts, "processes": options.processes(), "ranks": ranks,
            "iterations": options.iterations, "rows": pairs, "wrong": wrong,
        });
        print(&format!("{report}\n"));
    } else {
        let verdict = if wrong == 0 { "OK" } else { "FAILED" };
        print(&format!("# {:<20} : {wrong} {verdict}\n", "Out of bounds values"));
    }
    Ok(wrong == 0)
}

/// None where the run failed, which has said why.
fn start(options: &Options, measurement: &Measurement, driver: Driver) -> Result<Option<Run>> {
    let program = std::env::current_exe().map_err(|error| Error::system(format!("own path: {error}")))?;
    let output = Command::new(&program)
        .args(["perf", "all_reduce"])
        .args(options.one(measurement, driver))
        .env(NETWORK.0, NETWORK.1)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| Error::system(format!("cannot start {}: {error}", program.display())))?;
    let report: Value = match serde_json::from_slice(&output.stdout) {
        Ok(report) => report,
        Err(_) if !output.status.success() => return Ok(None),
        Err(error) => return Err(Error::internal(format!("a run's report does not parse: {error}"))),
    };
    if !report["error"].is_null() {
        return Ok(None);
    }
    let row = &report["rows"][0];
    let number = |key: &str| {
        let found = row["out_of_place"][key].as_f64();
        found.ok_or_else(|| Error::internal(format!("a run's report has no {key}")))
    };
    Ok(Some(Run {
        network: report["network"].clone(),
        device: report["device"].clone(),
        row: row.clone(),
        time_us: number("time_us")?,
        cpu_us: number("cpu_us")?,
        // A failure in any half; the exit status tells it too.
        wrong: report["wrong"].as_u64().unwrap_or(u64::from(!output.status.success())),
    }))
}

fn head(options: &Options, pair: &Pair) -> String {
    let said = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!(
        "# all_reduce on the {} device: {} rank(s) in {} process(es) on {} faked hosts, both drivers over an emulated HCA\n\
         # set for this run: {}={}\n\
         # proxy: {}\n# gpu: {}\n\
         # out of place, {} timed iterations; cpu: processor time of all processes for one operation (proxy, HCA's thread, on \
         the host device the kernels too)\n#\n\
         # {:>10}  {:>12}  {:>8}  {:>6}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}  {:>6}\n\
         # {:>10}  {:>12}  {:>8}  {:>6}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}\n",
        said(&pair.proxy.device),
        options.ranks,
        options.processes(),
        options.hosts,
        NETWORK.0,
        NETWORK.1,
        said(&pair.proxy.network),
        said(&pair.gpu.network),
        options.iterations,
        "size", "count", "type", "redop", "proxy", "gpu", "gpu/proxy", "proxy cpu", "gpu cpu", "#wrong",
        "(B)", "(elements)", "", "", "(us)", "(us)", "", "(us)", "(us)",
    )
}

fn line(measurement: &Measurement, pair: &Pair) -> String {
    let Pair { proxy, gpu, .. } = pair;
    format!(
        "{:>12}  {:>12}  {:>8}  {:>6}  {:>9.2}  {:>9.2}  {:>9.3}  {:>9.1}  {:>9.1}  {:>6}\n",
        pair.size_bytes,
        measurement.count,
        measurement.datatype.name(),
        measurement.op.name(),
        proxy.time_us,
        gpu.time_us,
        pair.time_ratio,
        proxy.cpu_us,
        gpu.cpu_us,
        proxy.wrong + gpu.wrong
    )
}

/// A reader that went away ends nothing: the exit code still tells.
fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}
