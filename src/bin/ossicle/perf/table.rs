//! The table on stdout: nccl-tests' columns, widths and closing lines, so that scripts that read those read these.

use super::report::{Row, Timing};

/// The two or three comment lines above the rows.
pub(crate) fn header() -> String {
    let columns = |size, count, datatype, redop, root, time, algbw, busbw, wrong| {
        format!(
            "# {size:>10}  {count:>12}  {datatype:>8}  {redop:>6}  {root:>6}  \
             {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}\n"
        )
    };
    let halves = format!("# {:>50}  {:^31}  {:^31}\n", "", "out-of-place", "in-place");
    let names = columns(
        "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
    );
    let units = columns("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "");
    let tidy = |line: String| format!("{}\n", line.trim_end());
    [halves, names, units].map(tidy).concat()
}

/// One row; its root is -1, since an all-reduce has none.
pub(crate) fn row(row: &Row) -> String {
    format!(
        "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}{}{}",
        row.size_bytes,
        row.count,
        row.datatype,
        row.redop,
        -1,
        timing(&row.out_of_place),
        timing(&row.in_place)
    )
}

fn timing(timing: &Timing) -> String {
    let wrong = timing.wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
    let (time, algbw, busbw) = (
        fit(timing.time_us, 7),
        fit(timing.algbw_gbs, 6),
        fit(timing.busbw_gbs, 6),
    );
    format!("  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}")
}

/// The closing lines that scripts look for.
pub(crate) fn footer(wrong_rows: u64, average_busbw_gbs: f64) -> String {
    let verdict = if wrong_rows == 0 { "OK" } else { "FAILED" };
    format!(
        "# {:<20} : {wrong_rows} {verdict}\n# {:<20} : {}\n#\n",
        "Out of bounds values",
        "Avg bus bandwidth",
        significant(average_busbw_gbs)
    )
}

/// A number in at most `width` characters, with as many decimals (two at most) as fit.
fn fit(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:.1e}"))
}

/// Six significant digits without trailing zeros.
fn significant(value: f64) -> String {
    let whole_digits = if value.abs() < 1.0 {
        1
    } else {
        value.abs().log10() as usize + 1
    };
    let text = format!("{value:.*}", 6usize.saturating_sub(whole_digits));
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lose_decimals_before_they_lose_the_column() {
        for (value, width, text) in [
            (9.876, 7, "9.88"),
            (1234.567, 7, "1234.57"),
            (12345.67, 7, "12345.7"),
            (1234567.8, 7, "1234568"),
            (123456789.0, 7, "1.2e8"),
            (0.0, 6, "0.00"),
        ] {
            assert_eq!(fit(value, width), text);
        }
        for (value, text) in [
            (0.0, "0"),
            (0.123456789, "0.12346"),
            (12.5, "12.5"),
            (346.0, "346"),
            (1234567.0, "1234567"),
        ] {
            assert_eq!(significant(value), text);
        }
    }

    #[test]
    fn rows_have_the_columns_that_scripts_split() {
        let timing = |wrong| Timing {
            time_us: 11.0,
            cpu_us: 0.0,
            algbw_gbs: 0.37,
            busbw_gbs: 0.37,
            wrong,
        };
        let text = row(&Row {
            size_bytes: 4096,
            count: 1024,
            datatype: "float",
            redop: "sum",
            out_of_place: timing(Some(0)),
            in_place: timing(None),
        });
        let fields: Vec<&str> = text.split_whitespace().collect();
        let expected = "4096 1024 float sum -1 11.00 0.37 0.37 0 11.00 0.37 0.37 N/A";
        assert_eq!(fields, expected.split(' ').collect::<Vec<_>>());
        let names = header();
        let names: Vec<&str> = names.lines().nth(1).unwrap().split_whitespace().skip(1).collect();
        assert_eq!(names.len(), fields.len());
        assert_eq!(names[8], "#wrong");
    }

    #[test]
    fn the_footer_says_ok_only_without_wrong_values() {
        assert!(footer(0, 1.0).contains("# Out of bounds values : 0 OK\n"));
        assert!(footer(3, 1.0).contains("# Out of bounds values : 3 FAILED\n"));
        assert!(footer(0, 12.5).contains("# Avg bus bandwidth    : 12.5\n"));
    }
}
