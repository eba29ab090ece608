//! Tests of `ncclConfig_t` parsing: sizes, versions, ranges, texts, environment.

use super::*;
use crate::error::Code;

/// A caller's struct of `size` bytes at an exact-size allocation (a read past it is seen by ASan).
struct Bytes(Vec<u8>);

impl Bytes {
    fn new(size: usize, version: c_uint) -> Bytes {
        let mut longest = Longest {
            of_2_28: ncclConfig_t {
                size,
                magic: MAGIC,
                version,
                blocking: UNSET,
                cgaClusterSize: UNSET,
                minCTAs: UNSET,
                maxCTAs: UNSET,
                netName: std::ptr::null(),
                splitShare: UNSET,
                trafficClass: UNSET,
                commName: std::ptr::null(),
                collnetEnable: UNSET,
                CTAPolicy: UNSET,
                shrinkShare: UNSET,
                nvlsCTAs: UNSET,
                nChannelsPerNetPeer: UNSET,
                nvlinkCentricSched: UNSET,
            },
            graphUsageMode: UNSET,
            numRmaCtx: UNSET,
            maxP2pPeers: UNSET,
            graphStreamOrdering: UNSET,
            launchOrderImplicit: UNSET,
            numRmaSig: UNSET,
            rmaEagerInit: UNSET,
            hostCftMode: UNSET,
            nvlsHostMode: UNSET,
        };
        // SAFETY: Longest is plain data; its padding was zero-initialised or is never looked at.
        let all = unsafe { std::slice::from_raw_parts((&raw mut longest).cast::<u8>(), size_of::<Longest>()) };
        // The size itself is always there.
        let mut bytes = all[..size.clamp(8, all.len())].to_vec();
        bytes.resize(size.max(8), 0xa5);
        Bytes(bytes)
    }

    fn with(mut self, offset: usize, value: &[u8]) -> Bytes {
        self.0[offset..offset + value.len()].copy_from_slice(value);
        self
    }

    fn int(self, field: &Field, value: c_int) -> Bytes {
        self.with(field.offset, &value.to_ne_bytes())
    }

    fn read(&self) -> Result<Config> {
        // SAFETY: the bytes are a struct of the size that they state, or shorter than 12 bytes.
        unsafe { Config::from_struct(self.0.as_ptr().cast()) }
    }

    fn refused(&self, naming: &str) {
        let error = self.read().unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains(naming), "{} does not name {naming}", error.text);
    }
}

/// Size and version of every release that changed the struct.
const RELEASES: [(usize, c_uint); 9] = [
    (24, 21403),
    (40, 21701),
    (48, 21805),
    (48, 22602),
    (72, 22703),
    (80, 22809),
    (88, 22902),
    (96, 23007),
    (120, 23203),
];

fn every_field() -> impl Iterator<Item = &'static Field> {
    [&BLOCKING, &MIN_CTAS, &MAX_CTAS]
        .into_iter()
        .chain(WITHOUT_EFFECT.iter())
}

#[test]
fn every_release_and_anything_longer_is_accepted() {
    for (size, version) in RELEASES {
        assert_eq!(Bytes::new(size, version).read(), Ok(Config::default()), "{version}");
        let non_blocking = Bytes::new(size, version).int(&BLOCKING, 0).read().unwrap();
        assert_eq!(
            non_blocking,
            Config {
                blocking: false,
                ..Config::default()
            },
            "{version}"
        );
    }
    for size in 24..=120 {
        assert!(Bytes::new(size, 22809).read().is_ok(), "{size}");
    }
    assert_eq!(Bytes::new(120 + 512, 99999).read(), Ok(Config::default()));
}

#[test]
fn sizes_without_a_magic_number_and_wrong_magic_are_refused() {
    for size in 0..12 {
        Bytes::new(size, 22809).refused("config.size");
    }
    for magic in [0u32, 0xcafe_beee, u32::MAX] {
        Bytes::new(80, 22809)
            .with(8, &magic.to_ne_bytes())
            .refused("config.magic");
    }
    // NCCL copies what there is: magic alone, and a blocking that the size cuts, leave all unset.
    for size in 12..20 {
        assert_eq!(Bytes::new(size, 22809).read(), Ok(Config::default()), "{size}");
    }
}

#[test]
fn fields_outside_their_range_are_refused_and_named() {
    for field in every_field() {
        let low = i64::from(*field.range.start()) - 1;
        let high = i64::from(*field.range.end()) + 1;
        for value in [low, high]
            .into_iter()
            .filter_map(|value| c_int::try_from(value).ok())
            .filter(|v| *v != UNSET)
        {
            Bytes::new(120, 23203)
                .int(field, value)
                .refused(&format!("config.{} is {value}", field.name));
        }
        assert!(
            Bytes::new(120, 23203).int(field, UNSET).read().is_ok(),
            "{}",
            field.name
        );
    }
    Bytes::new(80, 22809).int(&BLOCKING, 2).refused("config.blocking is 2");
    Bytes::new(80, 22809)
        .int(&WITHOUT_EFFECT[0], -1)
        .refused("cgaClusterSize is -1; it may be 0 or more");
    Bytes::new(80, 22809).int(&MIN_CTAS, 0).refused("config.minCTAs is 0");
}

#[test]
fn fields_newer_than_the_version_or_past_the_size_are_not_believed() {
    for field in every_field().filter(|field| field.since > 0) {
        let older = Bytes::new(120, field.since - 1).int(field, -7);
        assert_eq!(older.read(), Ok(Config::default()), "{}", field.name);
        if field.range != ANY {
            Bytes::new(120, field.since).int(field, -7).refused(field.name);
        }
        // The struct ends within the field.
        let cut = Bytes::new(120, 23203).int(field, -7);
        let cut = Bytes(cut.0[..field.offset + 3].to_vec()).with(0, &(field.offset + 3).to_ne_bytes());
        assert_eq!(cut.read(), Ok(Config::default()), "{}", field.name);
    }
    // 2.18 to 2.25 had padding where trafficClass is.
    assert!(Bytes::new(48, 21805).with(44, &[0xff; 4]).read().is_ok());
}

#[test]
fn channel_bounds_follow_nccl() {
    let read = |min, max| Bytes::new(80, 22809).int(&MIN_CTAS, min).int(&MAX_CTAS, max).read();
    let config = |min, max| {
        Ok(Config {
            min_ctas: min,
            max_ctas: max,
            ..Config::default()
        })
    };
    assert_eq!(read(2, 8), config(Some(2), Some(8)));
    assert_eq!(read(8, 8), config(Some(8), Some(8)));
    assert_eq!(read(UNSET, 8), config(None, Some(8)));
    assert_eq!(read(100, c_int::MAX), config(Some(64), Some(64)));
    assert!(read(9, 8).unwrap_err().text.contains("minCTAs is 9 and maxCTAs is 8"));
    assert!(read(2, UNSET)
        .unwrap_err()
        .text
        .contains("minCTAs is 2 and maxCTAs is unset"));
}

#[test]
fn names_are_copied_within_bounds() {
    let name = |offset, version, text: *const c_char| {
        Bytes::new(80, version)
            .with(offset, &(text as usize).to_ne_bytes())
            .read()
    };
    let config = name(32, 22809, c"Socket".as_ptr()).unwrap();
    assert_eq!(config.net_name.as_deref(), Some("Socket"));
    assert_eq!(
        name(48, 22809, c"world".as_ptr()).unwrap().comm_name.as_deref(),
        Some("world")
    );
    assert_eq!(name(32, 21600, std::ptr::dangling()), Ok(Config::default()));
    let endless = [1 as c_char; 4096];
    assert!(name(32, 22809, endless.as_ptr())
        .unwrap_err()
        .text
        .contains("config.netName has no end"));
}

#[test]
fn the_environment_wins_where_it_makes_sense() {
    let asked = Config {
        blocking: false,
        min_ctas: Some(4),
        max_ctas: Some(8),
        ..Config::default()
    };
    let with = |blocking, min_ctas, max_ctas| {
        asked.clone().overridden(Overrides {
            blocking,
            min_ctas,
            max_ctas,
        })
    };
    assert_eq!(with(None, None, None), asked);
    assert!(with(Some(1), None, None).blocking);
    assert!(!with(Some(2), None, None).blocking);
    assert_eq!(with(None, Some(0), Some(-3)), asked);
    assert_eq!(with(None, Some(6), None).min_ctas, Some(6));
    let cut = with(None, Some(1), Some(1 << 40));
    assert_eq!((cut.min_ctas, cut.max_ctas), (Some(1), Some(64)));
    let contradiction = with(None, Some(32), None);
    assert_eq!((contradiction.min_ctas, contradiction.max_ctas), (Some(8), Some(8)));
}
