//! What a run writes: the table or one JSON object on stdout; on stderr a bar, where somebody looks at a long run.

use super::options::Options;
use super::report::{Report, Row};
use super::table;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::Write;
use std::time::{Duration, Instant};

/// A shorter run needs no bar.
const BAR_AFTER: Duration = Duration::from_secs(2);

pub(crate) struct Output {
    json: bool,
    started: Instant,
    bar: ProgressBar,
}

impl Output {
    pub(crate) fn new(options: &Options, steps: usize) -> Output {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            bar.set_style(style);
        }
        Output {
            json: options.json,
            started: Instant::now(),
            bar,
        }
    }

    /// The comment lines above the table; all ranks have joined.
    pub(crate) fn head(&self, report: &Report, options: &Options, sizes: (usize, usize)) {
        if self.json {
            return;
        }
        let mut lines = vec![
            format!("# {} with its own library, which answers ncclGetVersion with {}", report.program, report.nccl_version),
            format!(
                "# {} on the {} device: {} rank(s) in {} process(es), {} to {} bytes, {} warm-up and {} timed iterations, \
                 {} checked, blocking {}",
                report.collective,
                report.device,
                options.ranks,
                report.processes,
                sizes.0,
                sizes.1,
                report.warmup_iterations,
                report.iterations,
                report.checks,
                report.blocking
            ),
        ];
        let hosts = report.hosts;
        lines.extend(
            report
                .network
                .iter()
                .map(|network| format!("# {hosts} faked hosts over {network}")),
        );
        lines.extend(
            report
                .environment
                .iter()
                .map(|variable| format!("# set for this run: {variable}")),
        );
        lines.push("#\n# Using devices".to_owned());
        for place in &report.ranks {
            lines.push(format!(
                "#  Rank {:2} Pid {:6} on {}",
                place.rank, place.pid, place.device
            ));
        }
        lines.push("#".to_owned());
        self.print(&format!("{}\n{}", lines.join("\n"), table::header()));
    }

    pub(crate) fn row(&self, row: &Row) {
        if !self.json {
            self.print(&format!("{}\n", table::row(row)));
        }
    }

    /// A wrong value, or a wait that grows long: not part of the data.
    pub(crate) fn notice(&self, text: &str) {
        self.bar.suspend(|| eprintln!("ossicle: {text}"));
    }

    pub(crate) fn progress(&self, step: usize, now: String) {
        if self.bar.is_hidden() && self.started.elapsed() > BAR_AFTER {
            // Stays hidden where stderr is no terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(step as u64);
        self.bar.set_message(now);
    }

    pub(crate) fn close(&self, report: &Report) {
        self.bar.finish_and_clear();
        if self.json {
            // The report holds no map and no number that JSON cannot write.
            self.print(&format!("{}\n", serde_json::to_string(report).unwrap_or_default()));
        } else if !report.rows.is_empty() {
            self.print(&table::footer(report.wrong, report.average_busbw_gbs));
        }
        if let Some(error) = &report.error {
            self.notice(error);
        }
    }

    /// Whole lines at once. A reader that went away ends nothing: the exit code still tells.
    fn print(&self, text: &str) {
        self.bar.suspend(|| {
            let mut stdout = std::io::stdout().lock();
            let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        });
    }
}
