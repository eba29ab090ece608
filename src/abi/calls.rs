//! The bodies of the exports that are built: parse the arguments, call one room, convert. No logic lives here.
//!
//! Every function is `unsafe` for one reason, the contract of C: a pointer is NULL or points to what its type says.
//! Handles are exempt: `comm` looks them up before anything is read through them.

#![allow(non_snake_case)]

use super::config::Config;
use super::entry::{not_built, Outcome};
use super::pointers::{self, Slot};
use super::types::*;
use crate::comm::{self, Progress};
use crate::error::{Code, Error, Result};
use crate::observe::last_error;
use crate::request::{Collective, DataType, ReduceOp, Request};
use crate::{device, group};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

/// NCCL 2.28.9. Clients choose code paths by this number: it must not promise a later release's behaviour.
const VERSION: c_int = 22809;

pub(super) unsafe fn ncclGetVersion(version: *mut c_int) -> Result<()> {
    // SAFETY: C contract.
    unsafe { Slot::new("version", version) }?.set(VERSION);
    Ok(())
}

/// NCCL's own texts: scripts match them.
pub(super) unsafe fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    let text = match (result, Code::from_raw(result)) {
        (0, _) => c"no error",
        (_, Some(Code::UnhandledCudaError)) => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        (_, Some(Code::SystemError)) => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        (_, Some(Code::InternalError)) => c"internal error - please report this issue to the NCCL developers",
        (_, Some(Code::InvalidArgument)) => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        (_, Some(Code::InvalidUsage)) => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        (_, Some(Code::RemoteError)) => c"remote process exited or there was a network error",
        (_, Some(Code::InProgress)) => c"NCCL operation in progress",
        (_, None) => c"unknown result code",
    };
    text.as_ptr()
}

pub(super) unsafe fn ncclGetLastError(_comm: ncclComm_t) -> *const c_char {
    last_error::as_c_str()
}

pub(super) unsafe fn ncclResetDebugInit() {}

pub(super) unsafe fn ncclResetDebugInitInternal() {}

pub(super) unsafe fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("uniqueId", uniqueId) }?;
    slot.set(ncclUniqueId {
        internal: comm::create_unique_id()?.map(|byte| byte as c_char),
    });
    Ok(())
}

pub(super) unsafe fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> Result<Progress> {
    // SAFETY: C contract; a NULL config asks for nothing.
    unsafe { ncclCommInitRankConfig(comm, nranks, commId, rank, null_mut()) }
}

pub(super) unsafe fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> Result<Progress> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("comm", comm) }?;
    slot.set(null_mut());
    // SAFETY: C contract.
    let config = unsafe { Config::read(config) }?;
    comm::init_rank(
        slot.address().cast(),
        nranks,
        vec![commId.internal.map(|byte| byte as u8)],
        rank,
        config,
    )
}

pub(super) unsafe fn ncclCommInitRankScalable(
    newcomm: *mut ncclComm_t,
    nranks: c_int,
    myrank: c_int,
    nId: c_int,
    commIds: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> Result<Progress> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("newcomm", newcomm) }?;
    slot.set(null_mut());
    if nId < 1 || nId > nranks {
        return Err(Error::argument(format!(
            "nId is {nId}; it may be from 1 to nranks, which is {nranks}"
        )));
    }
    // SAFETY: C contract.
    let (ids, config) = unsafe { (pointers::list("commIds", commIds, nId)?, Config::read(config)?) };
    let ids = ids.into_iter().map(|id| id.internal.map(|byte| byte as u8)).collect();
    comm::init_rank(slot.address().cast(), nranks, ids, myrank, config)
}

pub(super) unsafe fn ncclCommInitAll(comm: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> Result<()> {
    // SAFETY: C contract.
    let slots = unsafe { Slot::new("comm", comm) }?;
    let list = match devlist.is_null() {
        true => None,
        // SAFETY: C contract.
        false => Some(unsafe { pointers::list("devlist", devlist, ndev) }?),
    };
    comm::init_all(slots.address().cast(), ndev, list.as_deref())
}

pub(super) unsafe fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("count", count) }?;
    slot.set(comm::rank_count(pointers::handle(comm)?)?);
    Ok(())
}

pub(super) unsafe fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("rank", rank) }?;
    slot.set(comm::user_rank(pointers::handle(comm)?)?);
    Ok(())
}

pub(super) unsafe fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("device", device) }?;
    slot.set(comm::cuda_device(pointers::handle(comm)?)?);
    Ok(())
}

pub(super) unsafe fn ncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("asyncError", asyncError) }?;
    slot.set(match comm::async_error(pointers::handle(comm)?)? {
        Ok(progress) => progress.code(),
        Err(error) => {
            // It happened on another thread; who learns of it here asks for the sentence next.
            last_error::set(&error.text);
            error.code as c_int
        }
    });
    Ok(())
}

pub(super) unsafe fn ncclCommFinalize(comm: ncclComm_t) -> Result<Progress> {
    match comm.is_null() {
        true => Ok(Progress::Done),
        false => comm::finalize(comm.cast()),
    }
}

pub(super) unsafe fn ncclCommDestroy(comm: ncclComm_t) -> Result<()> {
    match comm.is_null() {
        true => Ok(()),
        false => comm::destroy(comm.cast()),
    }
}

pub(super) unsafe fn ncclCommAbort(comm: ncclComm_t) -> Result<()> {
    match comm.is_null() {
        true => Ok(()),
        false => comm::abort(comm.cast()),
    }
}

pub(super) unsafe fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> Result<()> {
    // SAFETY: C contract.
    let slot = unsafe { Slot::new("ptr", ptr) }?;
    slot.set(match size {
        // cudaMalloc's answer, to which NCCL leaves this case.
        0 => null_mut(),
        _ => device::allocate_user(size)?,
    });
    Ok(())
}

pub(super) unsafe fn ncclMemFree(ptr: *mut c_void) -> Result<()> {
    match ptr.is_null() {
        true => Ok(()),
        false => device::free_user(ptr),
    }
}

pub(super) unsafe fn ncclGroupStart() -> Result<()> {
    group::start()
}

pub(super) unsafe fn ncclGroupEnd() -> Result<Progress> {
    group::end()
}

pub(super) unsafe fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<Progress> {
    let comm = pointers::handle(comm)?;
    let (datatype, op) = (DataType::from_raw(datatype)?, ReduceOp::from_raw(op)?);
    pointers::extent(count, datatype)?;
    pointers::buffer("sendbuff", sendbuff, count)?;
    pointers::buffer("recvbuff", recvbuff, count)?;
    let collective = Collective::AllReduce;
    group::submit(
        comm,
        Request {
            collective,
            send: sendbuff,
            recv: recvbuff,
            count,
            datatype,
            op,
            stream,
        },
    )
}

pub(super) unsafe fn ncclAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<Progress> {
    pointers::buffer("sendbuff", sendbuff, sendcount)?;
    moved(
        Collective::AllGather,
        sendbuff,
        recvbuff,
        sendcount,
        datatype,
        comm,
        stream,
    )
}

pub(super) unsafe fn ncclBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<Progress> {
    moved(
        Collective::Broadcast { root },
        sendbuff,
        recvbuff,
        count,
        datatype,
        comm,
        stream,
    )
}

pub(super) unsafe fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<Progress> {
    moved(
        Collective::Broadcast { root },
        buff,
        buff,
        count,
        datatype,
        comm,
        stream,
    )
}

/// A collective that moves data without reducing it.
fn moved(
    collective: Collective,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<Progress> {
    let comm = pointers::handle(comm)?;
    let datatype = DataType::from_raw(datatype)?;
    pointers::extent(count, datatype)?;
    pointers::buffer("recvbuff", recv, count)?;
    let op = ReduceOp::Sum;
    group::submit(
        comm,
        Request {
            collective,
            send,
            recv,
            count,
            datatype,
            op,
            stream,
        },
    )
}

pub(super) unsafe fn ncclRedOpDestroy(op: ncclRedOp_t, _comm: ncclComm_t) -> Result<()> {
    Err(Error::argument(match ReduceOp::from_raw(op) {
        Ok(op) => format!(
            "op is {} ({}), which is built in and cannot be destroyed",
            op as c_int,
            op.name()
        ),
        Err(_) => format!("op is {op}, which was never created"),
    }))
}

pub(super) unsafe fn ncclCommDeregister(_comm: ncclComm_t, handle: *mut c_void) -> Result<()> {
    match handle.is_null() {
        true => Ok(()),
        false => Err(not_built("ncclCommDeregister")),
    }
}

pub(super) unsafe fn ncclCommWindowDeregister(_comm: ncclComm_t, win: ncclWindow_t) -> Result<()> {
    match win.is_null() {
        true => Ok(()),
        false => Err(not_built("ncclCommWindowDeregister")),
    }
}
