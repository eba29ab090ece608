//! `ncclConfig_t` of every NCCL release, and the environment variables that override it.
//!
//! The struct grew from 24 bytes (2.14) to 120 (2.32); a caller states its size and its version. As in NCCL, what lies
//! beyond the caller's size is not read, a field that is newer than the caller's version counts as unset (it may be
//! padding there), and what lies beyond the fields known here is passed over. INT_MIN or NULL is unset everywhere.
//!
//! A range is checked for every field of the release that `ncclGetVersion` reports; later fields are noted in the log
//! and have no effect, since 2.28.9 does not read them either. One quirk is kept: `minCTAs` set while `maxCTAs` is
//! unset is `ncclInvalidArgument`, since NCCL compares the raw values and unset is INT_MIN.

use super::pointers;
use super::types::ncclConfig_t;
use crate::environment;
use crate::error::{Error, Result};
use crate::info;
use std::ffi::{c_char, c_int, c_uint};
use std::mem::{offset_of, size_of};
use std::ops::RangeInclusive;

const MAGIC: c_uint = 0xcafe_beef;
const UNSET: c_int = c_int::MIN;
/// Most channels of a communicator; more is cut to this, as NCCL does.
const CTA_LIMIT: u32 = 64;

/// What the library uses of a caller's settings and of the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// False: calls that would wait return `ncclInProgress`.
    pub blocking: bool,
    /// Fewest channels, 1 to 64.
    pub min_ctas: Option<u32>,
    /// Most channels, 1 to 64, at least `min_ctas`.
    pub max_ctas: Option<u32>,
    /// The network the caller asks for, by name.
    pub net_name: Option<String>,
    /// A name for the log.
    pub comm_name: Option<String>,
    /// Fakes the rank's host as `NCCL_HOSTID` does. For callers in Rust whose ranks are threads: the struct has no such
    /// field.
    pub host_id: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            blocking: true,
            min_ctas: None,
            max_ctas: None,
            net_name: None,
            comm_name: None,
            host_id: None,
        }
    }
}

/// The struct of NCCL 2.32, the longest one.
#[repr(C)]
#[allow(non_snake_case)]
struct Longest {
    of_2_28: ncclConfig_t,
    graphUsageMode: c_int,
    numRmaCtx: c_int,
    maxP2pPeers: c_int,
    graphStreamOrdering: c_int,
    launchOrderImplicit: c_int,
    numRmaSig: c_int,
    rmaEagerInit: c_int,
    hostCftMode: c_int,
    nvlsHostMode: c_int,
}
const _: () = assert!(size_of::<Longest>() == 120 && offset_of!(Longest, nvlsHostMode) == 112);

/// One integer of the struct: where, since which version it is believed, and what it may be.
struct Field {
    name: &'static str,
    offset: usize,
    since: c_uint,
    range: RangeInclusive<c_int>,
}

const fn field(name: &'static str, offset: usize, since: c_uint, range: RangeInclusive<c_int>) -> Field {
    Field {
        name,
        offset,
        since,
        range,
    }
}

const BLOCKING: Field = field("blocking", offset_of!(ncclConfig_t, blocking), 21400, 0..=1);
const MIN_CTAS: Field = field("minCTAs", offset_of!(ncclConfig_t, minCTAs), 21700, 1..=c_int::MAX);
const MAX_CTAS: Field = field("maxCTAs", offset_of!(ncclConfig_t, maxCTAs), 21700, 1..=c_int::MAX);

const ANY: RangeInclusive<c_int> = c_int::MIN..=c_int::MAX;
/// Checked, then without effect. splitShare has no version of its own in NCCL: the size guards it.
const WITHOUT_EFFECT: [Field; 18] = [
    field(
        "cgaClusterSize",
        offset_of!(ncclConfig_t, cgaClusterSize),
        21700,
        0..=c_int::MAX,
    ),
    field("splitShare", offset_of!(ncclConfig_t, splitShare), 0, 0..=1),
    field("trafficClass", offset_of!(ncclConfig_t, trafficClass), 22500, ANY),
    field("collnetEnable", offset_of!(ncclConfig_t, collnetEnable), 22700, 0..=1),
    field("CTAPolicy", offset_of!(ncclConfig_t, CTAPolicy), 22700, 0..=2),
    field("shrinkShare", offset_of!(ncclConfig_t, shrinkShare), 22700, 0..=1),
    field("nvlsCTAs", offset_of!(ncclConfig_t, nvlsCTAs), 22700, 1..=c_int::MAX),
    field(
        "nChannelsPerNetPeer",
        offset_of!(ncclConfig_t, nChannelsPerNetPeer),
        22800,
        1..=64,
    ),
    field(
        "nvlinkCentricSched",
        offset_of!(ncclConfig_t, nvlinkCentricSched),
        22800,
        0..=1,
    ),
    field("graphUsageMode", offset_of!(Longest, graphUsageMode), 22900, ANY),
    field("numRmaCtx", offset_of!(Longest, numRmaCtx), 22900, ANY),
    field("maxP2pPeers", offset_of!(Longest, maxP2pPeers), 23000, ANY),
    field(
        "graphStreamOrdering",
        offset_of!(Longest, graphStreamOrdering),
        23005,
        ANY,
    ),
    field(
        "launchOrderImplicit",
        offset_of!(Longest, launchOrderImplicit),
        23100,
        ANY,
    ),
    field("numRmaSig", offset_of!(Longest, numRmaSig), 23100, ANY),
    field("rmaEagerInit", offset_of!(Longest, rmaEagerInit), 23100, ANY),
    field("hostCftMode", offset_of!(Longest, hostCftMode), 23100, ANY),
    field("nvlsHostMode", offset_of!(Longest, nvlsHostMode), 23200, ANY),
];

/// The caller's bytes, as far as they reach, and its version.
struct Caller {
    bytes: Vec<u8>,
    version: c_uint,
}

impl Caller {
    /// # Safety
    /// `config` points to a size_t and, if that is 12 or more, to as many readable bytes (no more than Longest).
    unsafe fn copy(config: *const ncclConfig_t) -> Result<Caller> {
        // SAFETY: the size is there by contract.
        let size = unsafe { config.cast::<usize>().read_unaligned() };
        let magic_end = offset_of!(ncclConfig_t, version);
        if size < magic_end {
            return Err(Error::argument(format!(
                "config.size is {size}, too small for any ncclConfig_t; start from NCCL_CONFIG_INITIALIZER"
            )));
        }
        // SAFETY: the caller states `size` readable bytes; no more are read.
        let bytes = unsafe { std::slice::from_raw_parts(config.cast::<u8>(), size.min(size_of::<Longest>())) }.to_vec();
        let mut caller = Caller { bytes, version: 0 };
        let magic = caller
            .word(offset_of!(ncclConfig_t, magic))
            .map_or(0, |word| word as c_uint);
        if magic != MAGIC {
            return Err(Error::argument(format!(
                "config.magic is {magic:#x}, not {MAGIC:#x}; start from NCCL_CONFIG_INITIALIZER"
            )));
        }
        caller.version = caller
            .word(offset_of!(ncclConfig_t, version))
            .map_or(0, |word| word as c_uint);
        Ok(caller)
    }

    /// The 4 bytes at `offset`, if the caller's struct reaches so far.
    fn word(&self, offset: usize) -> Option<c_int> {
        Some(c_int::from_ne_bytes(*self.bytes.get(offset..)?.first_chunk()?))
    }

    /// The value of a field that the caller has and that is not unset.
    fn get(&self, field: &Field) -> Result<Option<c_int>> {
        let value = self
            .word(field.offset)
            .filter(|value| *value != UNSET && self.version >= field.since);
        match value {
            Some(value) if !field.range.contains(&value) => {
                let (low, high) = (field.range.start(), field.range.end());
                let range = if *high == c_int::MAX {
                    format!("{low} or more")
                } else {
                    format!("{low} to {high}")
                };
                Err(Error::argument(format!(
                    "config.{} is {value}; it may be {range}, or unset",
                    field.name
                )))
            }
            value => Ok(value),
        }
    }

    /// # Safety
    /// The pointer at `offset`, if the caller has one, is NULL or a C string.
    unsafe fn text(&self, name: &str, offset: usize, since: c_uint) -> Result<Option<String>> {
        let pointer = self
            .bytes
            .get(offset..)
            .and_then(|rest| rest.first_chunk())
            .filter(|_| self.version >= since);
        let address = pointer.map_or(0, |bytes| usize::from_ne_bytes(*bytes));
        // SAFETY: as promised by the caller.
        unsafe { pointers::text(name, address as *const c_char) }
    }
}

/// The variables that override a caller's struct.
#[derive(Clone, Copy, Default)]
struct Overrides {
    blocking: Option<i64>,
    min_ctas: Option<i64>,
    max_ctas: Option<i64>,
}

impl Overrides {
    fn from_environment() -> Overrides {
        Overrides {
            blocking: environment::integer("NCCL_COMM_BLOCKING"),
            min_ctas: environment::integer("NCCL_MIN_CTAS"),
            max_ctas: environment::integer("NCCL_MAX_CTAS"),
        }
    }
}

impl Config {
    /// The settings of a communicator whose caller passed none (`ncclCommInitAll`).
    pub fn from_environment() -> Config {
        Config::default().overridden(Overrides::from_environment())
    }

    /// Reads a caller's struct; NULL is as if all were unset.
    ///
    /// # Safety
    /// `config` is NULL or points to a size_t and, if that is 12 or more, to a struct of so many bytes whose netName and
    /// commName are NULL or C strings.
    pub unsafe fn read(config: *const ncclConfig_t) -> Result<Config> {
        if config.is_null() {
            return Ok(Config::from_environment());
        }
        // SAFETY: promised by the caller.
        let config = unsafe { Config::from_struct(config) }?;
        Ok(config.overridden(Overrides::from_environment()))
    }

    /// # Safety
    /// As for `read`, without NULL.
    unsafe fn from_struct(config: *const ncclConfig_t) -> Result<Config> {
        // SAFETY: promised by the caller.
        let caller = unsafe { Caller::copy(config) }?;
        let blocking = caller.get(&BLOCKING)?.is_none_or(|blocking| blocking == 1);
        let (min, max) = (caller.get(&MIN_CTAS)?, caller.get(&MAX_CTAS)?);
        if min.unwrap_or(UNSET) > max.unwrap_or(UNSET) {
            let max = max.map_or("unset".to_string(), |max| max.to_string());
            return Err(Error::argument(format!(
                "config.minCTAs is {} and maxCTAs is {max}; a minimum needs a maximum that is no smaller",
                min.unwrap_or(UNSET)
            )));
        }
        for field in &WITHOUT_EFFECT {
            if let Some(value) = caller.get(field)? {
                info!(
                    Init,
                    "config.{} is {value}, which has no effect in this version of Ossicle", field.name
                );
            }
        }
        // SAFETY: promised by the caller. commName has no version of its own in NCCL: the size guards it.
        let (net_name, comm_name) = unsafe {
            (
                caller.text("config.netName", offset_of!(ncclConfig_t, netName), 21700)?,
                caller.text("config.commName", offset_of!(ncclConfig_t, commName), 0)?,
            )
        };
        Ok(Config {
            blocking,
            min_ctas: channels(min),
            max_ctas: channels(max),
            net_name,
            comm_name,
            host_id: None,
        })
    }

    /// The environment wins; a value of it that makes no sense is said and passed over, as NCCL does.
    fn overridden(mut self, overrides: Overrides) -> Config {
        match overrides.blocking {
            Some(value @ 0..=1) => self.blocking = value == 1,
            Some(value) => info!(Env, "NCCL_COMM_BLOCKING is {value}, neither 0 nor 1: it has no effect"),
            None => {}
        }
        for (name, value, channels) in [
            ("NCCL_MIN_CTAS", overrides.min_ctas, &mut self.min_ctas),
            ("NCCL_MAX_CTAS", overrides.max_ctas, &mut self.max_ctas),
        ] {
            match value {
                Some(value) if value > 0 => {
                    *channels = Some(u32::try_from(value).map_or(CTA_LIMIT, |value| value.min(CTA_LIMIT)));
                }
                Some(value) => info!(Env, "{name} is {value}, not above 0: it has no effect"),
                None => {}
            }
        }
        if let (Some(min), Some(max)) = (self.min_ctas, self.max_ctas) {
            if min > max {
                info!(
                    Env,
                    "at least {min} channels and at most {max} were asked for: {max} are used"
                );
                self.min_ctas = self.max_ctas;
            }
        }
        self
    }
}

/// A positive number of channels, cut to what there can be.
fn channels(value: Option<c_int>) -> Option<u32> {
    value
        .and_then(|value| u32::try_from(value).ok())
        .map(|value| value.min(CTA_LIMIT))
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
