//! What a run found: the values behind the table and behind `--json`.

use serde::Serialize;

/// One half of a row: out of place or in place.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Timing {
    /// One operation, averaged over the iterations and over the ranks.
    pub(crate) time_us: f64,
    /// Processor time of all processes for one operation, kernels' on the host device and barriers between included.
    pub(crate) cpu_us: f64,
    /// Bytes of the message per time.
    pub(crate) algbw_gbs: f64,
    /// The same, times 2 (n - 1) / n: what each link carries, comparable for every number of ranks n.
    pub(crate) busbw_gbs: f64,
    /// Wrong elements of all ranks; None where nothing was checked.
    pub(crate) wrong: Option<u64>,
}

impl Timing {
    pub(crate) fn new(size_bytes: u64, ranks: u32, times_us: &[f64], cpu_us: f64, wrong: Option<u64>) -> Timing {
        let time_us = times_us.iter().sum::<f64>() / times_us.len().max(1) as f64;
        let algbw_gbs = if time_us > 0.0 {
            size_bytes as f64 / time_us / 1e3
        } else {
            0.0
        };
        let busbw_gbs = algbw_gbs * 2.0 * (f64::from(ranks) - 1.0) / f64::from(ranks);
        Timing {
            time_us,
            cpu_us,
            algbw_gbs,
            busbw_gbs,
            wrong,
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) size_bytes: u64,
    /// Elements.
    pub(crate) count: u64,
    #[serde(rename = "type")]
    pub(crate) datatype: &'static str,
    pub(crate) redop: &'static str,
    pub(crate) out_of_place: Timing,
    pub(crate) in_place: Timing,
}

/// Where a rank ran.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankPlace {
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    pub(crate) device: String,
}

/// A whole run, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) program: String,
    /// `ncclGetVersion` of the library that answered.
    pub(crate) nccl_version: i32,
    pub(crate) collective: &'static str,
    pub(crate) device: &'static str,
    pub(crate) processes: u32,
    /// More than one are faked: processes of this machine that say so.
    pub(crate) hosts: u32,
    /// What goes between hosts, and who drives it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<String>,
    pub(crate) iterations: u32,
    pub(crate) warmup_iterations: u32,
    pub(crate) checks: u32,
    pub(crate) blocking: u8,
    /// Variables that this program set because the user had not.
    pub(crate) environment: Vec<String>,
    pub(crate) ranks: Vec<RankPlace>,
    pub(crate) rows: Vec<Row>,
    /// Halves of rows in which at least one element was wrong.
    pub(crate) wrong: u64,
    pub(crate) average_busbw_gbs: f64,
    /// Why the run ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl Report {
    pub(crate) fn add(&mut self, row: Row) {
        let halves = [&row.out_of_place, &row.in_place];
        self.wrong += halves
            .iter()
            .filter(|half| half.wrong.is_some_and(|wrong| wrong > 0))
            .count() as u64;
        let busbw_gbs = halves.iter().map(|half| half.busbw_gbs).sum::<f64>() / halves.len() as f64;
        self.rows.push(row);
        self.average_busbw_gbs += (busbw_gbs - self.average_busbw_gbs) / self.rows.len() as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_follow_the_mean_time_of_the_ranks() {
        let timing = Timing::new(8000, 4, &[1.0, 3.0], 0.0, Some(0));
        assert_eq!((timing.time_us, timing.algbw_gbs, timing.busbw_gbs), (2.0, 4.0, 6.0));
        let alone = Timing::new(8000, 1, &[2.0], 0.0, None);
        assert_eq!((alone.algbw_gbs, alone.busbw_gbs), (4.0, 0.0));
        assert_eq!(Timing::new(0, 2, &[0.0], 0.0, None).algbw_gbs, 0.0);
    }
}
