//! The types of the C interface, by NCCL's names, sizes and offsets (x86-64), for the C entries and for nccl.h.
//!
//! C enums are plain integers on this side, since a C caller may pass any value; their enumerators stand in
//! cbindgen.toml for C, and in `request.rs` and `error.rs` for us. Structs that kernels share with NCCL's own device
//! headers are opaque: their layout belongs to each NCCL release.

#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{align_of, offset_of, size_of};

pub type ncclResult_t = c_int;
pub type ncclDataType_t = c_int;
pub type ncclRedOp_t = c_int;
pub type ncclScalarResidence_t = c_int;
pub type ncclCommMemStat_t = c_int;
pub type cudaStream_t = *mut c_void;

/// A communicator; an opaque handle.
pub struct ncclComm {
    _private: [u8; 0],
}
pub type ncclComm_t = *mut ncclComm;

/// A window of registered memory; on NCCL's side an address in device memory, never read on the host.
pub struct ncclWindow_vidmem {
    _private: [u8; 0],
}
pub type ncclWindow_t = *mut ncclWindow_vidmem;

/// A parameter of the library.
pub struct ncclParamHandle {
    _private: [u8; 0],
}
pub type ncclParamHandle_t = *mut ncclParamHandle;

/// Names a rendezvous; to be carried to the other ranks as 128 bytes, NULs included.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    pub internal: [c_char; 128],
}

/// Settings of a communicator, as NCCL 2.28 lays them out. Start from NCCL_CONFIG_INITIALIZER.
#[repr(C)]
pub struct ncclConfig_v22800 {
    /// Bytes of this struct; set by the initializer, as are magic and version.
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// 0: calls that wait return ncclInProgress.
    pub blocking: c_int,
    pub cgaClusterSize: c_int,
    /// Channels, 1 to 64. A minimum needs a maximum.
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub netName: *const c_char,
    pub splitShare: c_int,
    pub trafficClass: c_int,
    /// A name for the log.
    pub commName: *const c_char,
    pub collnetEnable: c_int,
    pub CTAPolicy: c_int,
    pub shrinkShare: c_int,
    pub nvlsCTAs: c_int,
    pub nChannelsPerNetPeer: c_int,
    pub nvlinkCentricSched: c_int,
}
pub type ncclConfig_t = ncclConfig_v22800;

/// Answer of ncclGroupSimulateEnd. Start from NCCL_SIM_INFO_INITIALIZER.
#[repr(C)]
pub struct ncclSimInfo_v22200 {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// Microseconds.
    pub estimatedTime: f32,
}
pub type ncclSimInfo_t = ncclSimInfo_v22200;

/// What ncclWaitSignal waits for (NCCL 2.29).
#[repr(C)]
pub struct ncclWaitSignalDesc_t {
    pub opCnt: c_int,
    pub peer: c_int,
    pub sigIdx: c_int,
    pub ctx: c_int,
}

/// Whose option a ncclConfigExt_t carries, and which.
#[repr(C)]
pub struct ncclConfigExtKey_t {
    pub vendorId: u32,
    pub optionId: u32,
}

/// A list of options of other vendors (NCCL 2.31).
#[repr(C)]
pub struct ncclConfigExt_t {
    pub next: *const ncclConfigExt_t,
    pub key: ncclConfigExtKey_t,
    pub value: *const c_void,
}

/// Settings of one collective call, as NCCL 2.32 lays them out.
#[repr(C)]
pub struct ncclCollConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub ext: *const ncclConfigExt_t,
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub nvlsCTAs: c_int,
    pub cgaClusterSize: c_int,
    pub algSelection: *const c_char,
    pub forceAlgSelection: c_int,
    pub CTAPolicy: c_int,
    pub userProfilerTag: u64,
    pub launchCompletionEvent: *mut c_void,
}

/// Encryption of links between processes (NCCL 2.32).
#[repr(C)]
pub struct ncclEncryptionConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// 0: none, 1: pre-shared key.
    pub mode: c_int,
    pub psk: *const c_char,
}

/// A set of ranks: every stride-th.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclTeam {
    pub nRanks: c_int,
    pub rank: c_int,
    pub stride: c_int,
}
pub type ncclTeam_t = ncclTeam;

/// A multicast address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclMultimemHandle {
    pub mcBasePtr: *mut c_void,
}
pub type ncclMultimemHandle_t = ncclMultimemHandle;

/// A communicator as kernels see it.
pub struct ncclDevComm {
    _private: [u8; 0],
}
pub type ncclDevComm_t = ncclDevComm;

/// What such a communicator shall hold.
pub struct ncclDevCommRequirements {
    _private: [u8; 0],
}
pub type ncclDevCommRequirements_t = ncclDevCommRequirements;

/// Memory and signals for one use.
pub struct ncclDevResourceRequirements {
    _private: [u8; 0],
}
pub type ncclDevResourceRequirements_t = ncclDevResourceRequirements;

/// What a communicator can do.
pub struct ncclCommProperties {
    _private: [u8; 0],
}
pub type ncclCommProperties_t = ncclCommProperties;

/// A barrier by load and store.
pub struct ncclLsaBarrierHandle {
    _private: [u8; 0],
}
pub type ncclLsaBarrierHandle_t = ncclLsaBarrierHandle;

/// A barrier over the network.
pub struct ncclGinBarrierHandle {
    _private: [u8; 0],
}
pub type ncclGinBarrierHandle_t = ncclGinBarrierHandle;

/// A low-latency all-to-all.
pub struct ncclLLA2AHandle {
    _private: [u8; 0],
}
pub type ncclLLA2AHandle_t = ncclLLA2AHandle;

/// An outbox.
pub struct ncclGinOutboxHandle {
    _private: [u8; 0],
}

/// An inbox.
pub struct ncclGinInboxA2AHandle {
    _private: [u8; 0],
}

/// Sizes and offsets on x86-64, as every NCCL release of that layout has them.
const _: () = {
    assert!(size_of::<ncclUniqueId>() == 128 && align_of::<ncclUniqueId>() == 1);
    assert!(size_of::<ncclConfig_t>() == 80);
    assert!(offset_of!(ncclConfig_t, netName) == 32 && offset_of!(ncclConfig_t, trafficClass) == 44);
    assert!(offset_of!(ncclConfig_t, commName) == 48 && offset_of!(ncclConfig_t, nvlinkCentricSched) == 76);
    assert!(size_of::<ncclSimInfo_t>() == 24 && offset_of!(ncclSimInfo_t, estimatedTime) == 16);
    assert!(size_of::<ncclWaitSignalDesc_t>() == 16 && offset_of!(ncclWaitSignalDesc_t, ctx) == 12);
    assert!(size_of::<ncclConfigExt_t>() == 24 && offset_of!(ncclConfigExt_t, value) == 16);
    assert!(size_of::<ncclCollConfig_t>() == 72);
    assert!(offset_of!(ncclCollConfig_t, ext) == 16 && offset_of!(ncclCollConfig_t, algSelection) == 40);
    assert!(offset_of!(ncclCollConfig_t, CTAPolicy) == 52 && offset_of!(ncclCollConfig_t, userProfilerTag) == 56);
    assert!(size_of::<ncclEncryptionConfig_t>() == 32 && offset_of!(ncclEncryptionConfig_t, psk) == 24);
    assert!(size_of::<ncclTeam_t>() == 12 && offset_of!(ncclTeam_t, stride) == 8);
    assert!(size_of::<ncclMultimemHandle_t>() == 8);
};
