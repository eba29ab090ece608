//! The library as any C program meets it: its exported functions, declared as in NVIDIA's header, and one safe wrapper
//! for each that this program uses. Results become the library's own error type, with its last-error sentence.

use nccl::error::{Code, Error, Result};
use nccl::request::{DataType, ReduceOp};
use std::ffi::{c_char, c_int, c_void, CStr};

/// `ncclUniqueId`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawUniqueId {
    internal: [c_char; 128],
}

type RawComm = *mut c_void;

extern "C" {
    fn ncclGetVersion(version: *mut c_int) -> c_int;
    fn ncclGetUniqueId(id: *mut RawUniqueId) -> c_int;
    fn ncclGetLastError(comm: RawComm) -> *const c_char;
    fn ncclCommInitRank(comm: *mut RawComm, ranks: c_int, id: RawUniqueId, rank: c_int) -> c_int;
    fn ncclCommCuDevice(comm: RawComm, device: *mut c_int) -> c_int;
    fn ncclCommGetAsyncError(comm: RawComm, result: *mut c_int) -> c_int;
    fn ncclCommDestroy(comm: RawComm) -> c_int;
    fn ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> c_int;
    fn ncclMemFree(pointer: *mut c_void) -> c_int;
    fn ncclAllReduce(
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: c_int,
        op: c_int,
        comm: RawComm,
        stream: *mut c_void,
    ) -> c_int;
}

/// Success, or the error with the call's name and the sentence that the library keeps.
fn check(call: &str, result: c_int) -> Result<()> {
    if result == 0 {
        return Ok(());
    }
    // SAFETY: the library ignores the communicator and answers with a NUL-terminated string that it never frees.
    let sentence = unsafe { CStr::from_ptr(ncclGetLastError(std::ptr::null_mut())) }.to_string_lossy();
    let code = Code::from_raw(result).unwrap_or(Code::InternalError);
    Err(Error::new(code, format!("{sentence} ({code:?} from {call})")))
}

/// The number of `ncclGetVersion`, such as 22809.
pub(crate) fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the pointer is to a live local.
    check("ncclGetVersion", unsafe { ncclGetVersion(&mut version) })?;
    Ok(version)
}

/// A new id; this process serves its rendezvous and must live until all ranks have joined.
pub(crate) fn unique_id() -> Result<[u8; 128]> {
    let mut id = RawUniqueId { internal: [0; 128] };
    // SAFETY: the pointer is to a live local of the size that the header declares.
    check("ncclGetUniqueId", unsafe { ncclGetUniqueId(&mut id) })?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// One rank's communicator; destroyed by `destroy`, and left as it is on drop, since a rank that failed ends the run.
pub(crate) struct Communicator(RawComm);

impl Communicator {
    pub(crate) fn join(id: &[u8; 128], rank: u32, ranks: u32) -> Result<Communicator> {
        let id = RawUniqueId {
            internal: id.map(|byte| byte as c_char),
        };
        let mut comm: RawComm = std::ptr::null_mut();
        // SAFETY: `comm` is a live local; the id goes by value.
        let result = unsafe { ncclCommInitRank(&mut comm, ranks as c_int, id, rank as c_int) };
        check("ncclCommInitRank", result)?;
        Ok(Communicator(comm))
    }

    /// The ordinal of the rank's device.
    pub(crate) fn device(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: the communicator is alive as long as self; the pointer is to a live local.
        check("ncclCommCuDevice", unsafe { ncclCommCuDevice(self.0, &mut device) })?;
        Ok(device)
    }

    /// The error that this rank's communicator met outside of calls, if any.
    pub(crate) fn asynchronous_error(&self) -> Result<()> {
        let mut result = 0;
        // SAFETY: as in `device`.
        check("ncclCommGetAsyncError", unsafe {
            ncclCommGetAsyncError(self.0, &mut result)
        })?;
        check("a collective", result)
    }

    /// # Safety
    /// `send` and `recv` hold `count` elements of the type in memory of the rank's device and outlive the operation,
    /// which is done when `stream` has been waited for.
    pub(crate) unsafe fn all_reduce(
        &self,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        datatype: DataType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the buffers and the stream; the communicator is alive as long as self.
        let result = unsafe {
            ncclAllReduce(
                send.cast(),
                recv.cast(),
                count,
                datatype as c_int,
                op as c_int,
                self.0,
                stream,
            )
        };
        check("ncclAllReduce", result)
    }

    pub(crate) fn destroy(self) -> Result<()> {
        // SAFETY: the communicator is alive and self is consumed, so nothing uses it afterwards.
        check("ncclCommDestroy", unsafe { ncclCommDestroy(self.0) })
    }
}

/// Memory of the current device from `ncclMemAlloc`.
pub(crate) struct DeviceMemory {
    address: *mut u8,
    bytes: usize,
}

impl DeviceMemory {
    pub(crate) fn allocate(bytes: usize) -> Result<DeviceMemory> {
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        check("ncclMemAlloc", unsafe { ncclMemAlloc(&mut address, bytes) })?;
        Ok(DeviceMemory {
            address: address.cast(),
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address `offset` bytes into the memory, or one past its end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} of {} bytes", self.bytes);
        // SAFETY: within the allocation or one past its end, by the line above.
        unsafe { self.address.add(offset) }
    }

    pub(crate) fn free(self) -> Result<()> {
        // SAFETY: the memory came from ncclMemAlloc and self is consumed, so nothing uses it afterwards.
        check("ncclMemFree", unsafe { ncclMemFree(self.address.cast()) })
    }
}
