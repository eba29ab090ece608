//! Environment variables: NCCL's integer rules, and our own choices.
//!
//! NCCL's integer variables are read once a process, in C notation (decimal, 0x, 0), and a malformed value counts as
//! unset and is said at INFO. A variable whose value is a choice (`NCCL_ALGO`, `NCCL_PROTO`, `NCCL_NET`,
//! `NCCL_GPU_INITIATED`, every `OSSICLE_*`) is an error when malformed: silently taking another path is what users
//! cannot find. Every variable that the library reads stands in docs/environment.md (the tidy test compares).

use crate::error::{Error, Result};
use crate::info;
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use std::collections::HashMap;

/// The value as text; None when unset. Bytes that are not UTF-8 are replaced, so that messages can show the value.
pub fn text(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// One of NCCL's integers, read once a process; None when unset or malformed (said at INFO).
pub fn integer(name: &'static str) -> Option<i64> {
    static SEEN: ProcessLocal<Mutex<HashMap<&'static str, Option<i64>>>> = ProcessLocal::new();
    *SEEN.get().lock().entry(name).or_insert_with(|| {
        let value = text(name)?;
        let parsed = parse_integer(&value);
        match parsed {
            Some(_) => info!(Env, "{name} set by environment to {value}"),
            None => info!(
                Env,
                "{name} is \"{value}\", which is not an integer: the default is used"
            ),
        }
        parsed
    })
}

/// One of NCCL's integers as a switch: unset and malformed give `default`, 0 is off.
pub fn switch(name: &'static str, default: bool) -> bool {
    integer(name).map_or(default, |value| value != 0)
}

/// A non-negative number of our own; unset gives `default`, malformed is an error.
pub fn number(name: &'static str, default: u64) -> Result<u64> {
    match text(name) {
        None => Ok(default),
        Some(value) => parse_integer(&value)
            .and_then(|number| u64::try_from(number).ok())
            .ok_or_else(|| {
                Error::usage(format!(
                    "{name} is \"{value}\"; it takes a whole number from 0 (default {default})"
                ))
            }),
    }
}

/// A choice by name, compared without case; unset and empty give None, anything else not in `choices` is an error.
pub fn choice<T: Copy>(name: &'static str, choices: &[(&str, T)]) -> Result<Option<T>> {
    let Some(value) = text(name).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    match choices.iter().find(|(choice, _)| choice.eq_ignore_ascii_case(&value)) {
        Some((_, chosen)) => Ok(Some(*chosen)),
        None => {
            let names: Vec<&str> = choices.iter().map(|(choice, _)| *choice).collect();
            Err(Error::usage(format!(
                "{name} is \"{value}\"; it takes one of: {}",
                names.join(", ")
            )))
        }
    }
}

/// `strtoll` with base 0, the whole text, as NCCL reads its parameters.
fn parse_integer(text: &str) -> Option<i64> {
    let trimmed = text.trim();
    let (negative, digits) = match trimmed.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, trimmed.strip_prefix('+').unwrap_or(trimmed)),
    };
    let (radix, digits) = if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        (16, hex)
    } else if digits.len() > 1 && digits.starts_with('0') {
        (8, &digits[1..])
    } else {
        (10, digits)
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let magnitude = i128::from_str_radix(digits, radix).ok()?;
    i64::try_from(if negative { -magnitude } else { magnitude }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_in_c_notation() {
        for (text, value) in [
            ("12", Some(12)),
            ("0x10", Some(16)),
            ("010", Some(8)),
            ("-3", Some(-3)),
            ("0", Some(0)),
        ] {
            assert_eq!(parse_integer(text), value, "{text}");
        }
        for text in ["", "x", "1k", "0x", "--1", "99999999999999999999"] {
            assert_eq!(parse_integer(text), None, "{text}");
        }
    }
}
