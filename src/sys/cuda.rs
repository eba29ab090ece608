//! The CUDA driver: `libcuda.so.1`, opened at first use, and the table of its functions.
//!
//! Nothing of CUDA is touched before `driver()` is called for the first time. Every function is asked of
//! `cuGetProcAddress` by the CUDA version whose signature the table declares, so that a newer driver gives that
//! variant (`cuMemAlloc` of CUDA 12 is the symbol `cuMemAlloc_v2`, for one).

use super::{function_table, Library};
use crate::error::Error;
use cudarc::driver::sys as types;
use once_cell::sync::Lazy;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void, CStr};
use std::fmt;
use std::ptr::NonNull;
pub use types::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};
pub use types::{CUgraph, CUgraphNode, CUhostFn, CUuserObject};
pub use types::{CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation};

/// The oldest driver that has all required functions (525.60).
const OLDEST_VERSION: c_int = 12000;

function_table! {
    /// The driver's functions. A method's safety is the driver API's own: live handles, and out-pointers that may be
    /// written.
    pub struct Functions fails with Failure;
    required {
        12000 fn cuGetErrorName(status: c_int, name: *mut *const c_char);
        12000 fn cuDeviceGetCount(count: *mut c_int);
        12000 fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        12000 fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
        12000 fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: CUdevice);
        12000 fn cuDeviceGetPCIBusId(text: *mut c_char, bytes: c_int, device: CUdevice);
        12000 fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
        12000 fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        12000 fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        12000 fn cuCtxGetCurrent(context: *mut CUcontext);
        12000 fn cuCtxGetDevice(device: *mut CUdevice);
        12000 fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
        12000 fn cuCtxPushCurrent(context: CUcontext);
        12000 fn cuCtxPopCurrent(context: *mut CUcontext);
        12000 fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
        12000 fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
        12000 fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        12000 fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        12000 fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction);
        12000 fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared_bytes: c_uint,
            stream: CUstream,
            parameters: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
        12000 fn cuMemAlloc(address: *mut CUdeviceptr, bytes: usize);
        12000 fn cuMemFree(address: CUdeviceptr);
        12000 fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        12000 fn cuMemHostRegister(address: *mut c_void, bytes: usize, flags: c_uint);
        12000 fn cuMemHostUnregister(address: *mut c_void);
        12000 fn cuMemHostGetDevicePointer(seen_by_device: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
        12000 fn cuMemsetD8Async(address: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
        12000 fn cuPointerGetAttributes(
            count: c_uint,
            attributes: *mut c_int,
            values: *mut *mut c_void,
            pointer: CUdeviceptr,
        );
        12000 fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
        12000 fn cuStreamQuery(stream: CUstream);
        12000 fn cuStreamGetCaptureInfo(
            stream: CUstream,
            status: *mut c_int,
            id: *mut c_ulonglong,
            graph: *mut CUgraph,
            dependencies: *mut *const CUgraphNode,
            count: *mut usize,
        );
        12000 fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong);
        12000 fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
        12000 fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        12000 fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        12000 fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        12000 fn cuEventRecord(event: CUevent, stream: CUstream);
        12000 fn cuEventQuery(event: CUevent);
        12000 fn cuUserObjectCreate(
            object: *mut CUuserObject,
            kept: *mut c_void,
            destroy: CUhostFn,
            references: c_uint,
            flags: c_uint,
        );
        12000 fn cuUserObjectRelease(object: CUuserObject, references: c_uint);
        12000 fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, references: c_uint, flags: c_uint);
        12000 fn cuMemGetAllocationGranularity(
            bytes: *mut usize,
            properties: *const CUmemAllocationProp,
            option: c_int,
        );
        12000 fn cuMemCreate(
            handle: *mut CUmemGenericAllocationHandle,
            bytes: usize,
            properties: *const CUmemAllocationProp,
            flags: c_ulonglong,
        );
        12000 fn cuMemRelease(handle: CUmemGenericAllocationHandle);
        12000 fn cuMemAddressReserve(
            address: *mut CUdeviceptr,
            bytes: usize,
            alignment: usize,
            wish: CUdeviceptr,
            flags: c_ulonglong,
        );
        12000 fn cuMemAddressFree(address: CUdeviceptr, bytes: usize);
        12000 fn cuMemMap(
            address: CUdeviceptr,
            bytes: usize,
            offset: usize,
            handle: CUmemGenericAllocationHandle,
            flags: c_ulonglong,
        );
        12000 fn cuMemUnmap(address: CUdeviceptr, bytes: usize);
        12000 fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
        12000 fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const CUmemLocation, address: CUdeviceptr);
        12000 fn cuMemExportToShareableHandle(
            shareable: *mut c_void,
            handle: CUmemGenericAllocationHandle,
            kind: c_int,
            flags: c_ulonglong,
        );
        12000 fn cuMemImportFromShareableHandle(
            handle: *mut CUmemGenericAllocationHandle,
            shareable: *mut c_void,
            kind: c_int,
        );
        12000 fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
        12000 fn cuIpcOpenMemHandle(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        12000 fn cuIpcCloseMemHandle(address: CUdeviceptr);
    }
    optional {
        12000 fn cuMemcpyHtoDAsync(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        12000 fn cuMemcpyDtoHAsync(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        12040 fn cuFuncLoad(function: CUfunction);
        12080 fn cuStreamGetDevice(stream: CUstream, device: *mut CUdevice);
        12040 fn cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    }
}

impl Functions {
    fn check(&self, function: &'static str, status: c_int) -> Result<(), Failure> {
        if status == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: resolved as the table says; it writes NULL or the address of a static string.
        let named = unsafe { (self.cuGetErrorName)(status, &mut name) } == 0 && !name.is_null();
        // SAFETY: not NULL, so it is such a string.
        let name = named.then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        Err(Failure { function, status, name })
    }
}

pub type CallResult<T> = Result<T, Failure>;

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    function: &'static str,
    /// A CUresult, as an integer.
    pub status: c_int,
    name: Option<String>,
}

impl Failure {
    pub fn is(&self, result: types::CUresult) -> bool {
        self.status == result as c_int
    }

    /// The driver is shut down: the process is exiting, and nothing that it held is left to give back.
    pub fn is_shutdown(&self) -> bool {
        self.is(types::CUresult::CUDA_ERROR_DEINITIALIZED)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} failed: {}", self.function, self.status)?;
        match &self.name {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::cuda(failure)
    }
}

/// CUDA's way to write a version as one integer: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A driver that was opened and initialised.
pub struct Driver {
    pub call: Functions,
    pub version: Version,
}

/// Why there is no driver to use.
#[derive(Debug)]
pub enum Unusable {
    /// No library, or it finds no GPU: nothing in this process can hold GPU memory. The normal case of a machine
    /// without one.
    Absent(String),
    /// A GPU is there, but this library cannot drive it: not to be passed over in silence.
    Refused(Error),
}

/// The process's driver, opened and initialised by the first call; the later ones cost a load.
pub fn driver() -> Result<&'static Driver, &'static Unusable> {
    static DRIVER: Lazy<Result<Driver, Unusable>> = Lazy::new(|| Driver::open(c"libcuda.so.1"));
    DRIVER.as_ref()
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type DriverGetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, types::cuuint64_t, *mut c_int) -> c_int;

impl Driver {
    /// Opens, asks for the version, resolves the table and initialises, in this order: the functions that start the
    /// others are as old as the API, so an old driver is recognised before anything that it lacks is asked for.
    pub fn open(name: &CStr) -> Result<Driver, Unusable> {
        let library = Library::open(name).map_err(Unusable::Absent)?;
        let version = version(&library, name)?;
        let initialised = init(&library, name)?;
        if initialised != 0 {
            // Named by number only: a stub library has no table to ask.
            return Err(Unusable::Absent(format!(
                "cuInit failed: {initialised}{}",
                init_hint(initialised)
            )));
        }
        let refuse = |text: String| {
            Unusable::Refused(Error::cuda(format!(
                "the CUDA driver is too old: {text}; install a driver of CUDA {} or newer, or set OSSICLE_DEVICE=host",
                Version(OLDEST_VERSION)
            )))
        };
        if version.0 < OLDEST_VERSION {
            return Err(refuse(format!("it supports CUDA {version}")));
        }
        let find = library
            .symbol(c"cuGetProcAddress_v2")
            .ok_or_else(|| refuse(format!("it supports CUDA {version}, yet has no cuGetProcAddress_v2")))?;
        // SAFETY: the symbol is the driver's function of this name, whose C signature the type declares.
        let find: GetProcAddress = unsafe { std::mem::transmute(find.as_ptr()) };
        let call = Functions::resolve(|name, since| proc_address(find, name, since)).map_err(|(name, since)| {
            refuse(format!(
                "it supports CUDA {version}, yet has no {name} of CUDA {}",
                Version(since)
            ))
        })?;
        Ok(Driver { call, version })
    }
}

fn entry(library: &Library, name: &CStr, function: &CStr) -> Result<NonNull<c_void>, Unusable> {
    library.symbol(function).ok_or_else(|| {
        let (name, function) = (name.to_string_lossy(), function.to_string_lossy());
        Unusable::Absent(format!("{name} has no {function}: it is no CUDA driver"))
    })
}

fn version(library: &Library, name: &CStr) -> Result<Version, Unusable> {
    let address = entry(library, name, c"cuDriverGetVersion")?;
    // SAFETY: the driver's function of this name, whose C signature the type declares.
    let function: DriverGetVersion = unsafe { std::mem::transmute(address.as_ptr()) };
    let mut version = 0;
    // SAFETY: it writes one int, and may be called before cuInit.
    match unsafe { function(&mut version) } {
        0 => Ok(Version(version)),
        status => Err(Unusable::Absent(format!(
            "cuDriverGetVersion failed: {status}{}",
            init_hint(status)
        ))),
    }
}

fn init(library: &Library, name: &CStr) -> Result<c_int, Unusable> {
    let address = entry(library, name, c"cuInit")?;
    // SAFETY: as in `version`.
    let function: Init = unsafe { std::mem::transmute(address.as_ptr()) };
    // SAFETY: 0 is the only value of its flags; it may be called any number of times.
    Ok(unsafe { function(0) })
}

/// What the usual failures of cuInit mean; the table's names are not to be had yet.
fn init_hint(status: c_int) -> &'static str {
    match status {
        34 => " (CUDA_ERROR_STUB_LIBRARY: this libcuda.so.1 is a toolkit's stub, not a driver)",
        100 => " (CUDA_ERROR_NO_DEVICE)",
        803 => " (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: libcuda.so.1 and the kernel driver are of different releases)",
        _ => "",
    }
}

fn proc_address(find: GetProcAddress, name: &CStr, since: c_int) -> Option<NonNull<c_void>> {
    let (mut address, mut found) = (std::ptr::null_mut(), 0);
    // SAFETY: a C string in, one address and one int out; flags 0 are the default (legacy stream) variants.
    let status = unsafe { find(name.as_ptr(), &mut address, since, 0, &mut found) };
    NonNull::new(address).filter(|_| status == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fake::Fake;

    fn refusal(fake: &Fake) -> String {
        match fake.open() {
            Err(Unusable::Refused(error)) => error.text,
            Err(Unusable::Absent(text)) => panic!("absent, not refused: {text}"),
            Ok(_) => panic!("opened"),
        }
    }

    fn absence(opened: Result<Driver, Unusable>) -> String {
        match opened {
            Err(Unusable::Absent(text)) => text,
            Err(Unusable::Refused(error)) => panic!("refused, not absent: {error}"),
            Ok(_) => panic!("opened"),
        }
    }

    #[test]
    fn a_missing_library_is_absent_and_named() {
        let text = absence(Driver::open(c"libossicle-no-such-driver.so.1"));
        assert!(text.contains("libossicle-no-such-driver.so.1"), "{text}");
    }

    #[test]
    fn a_library_that_is_no_driver_is_absent() {
        let text = absence(Driver::open(c"libc.so.6"));
        assert_eq!(text, "libc.so.6 has no cuDriverGetVersion: it is no CUDA driver");
    }

    #[test]
    fn a_driver_without_a_gpu_is_absent() {
        let text = absence(Fake::build("no_gpu", &["FAKE_INIT=100"]).open());
        assert_eq!(text, "cuInit failed: 100 (CUDA_ERROR_NO_DEVICE)");
        let text = absence(Fake::build("init_fails", &["FAKE_INIT=999"]).open());
        assert_eq!(text, "cuInit failed: 999");
    }

    #[test]
    fn an_old_driver_is_refused_by_both_versions() {
        let text = refusal(&Fake::build("old", &["FAKE_VERSION=11080"]));
        assert!(
            text.contains("it supports CUDA 11.8;") && text.contains("CUDA 12.0 or newer"),
            "{text}"
        );
    }

    #[test]
    fn a_missing_function_is_refused_by_name() {
        let text = refusal(&Fake::build("without", &["FAKE_WITHOUT=\"cuMemMap\""]));
        assert!(
            text.contains("supports CUDA 13.0, yet has no cuMemMap of CUDA 12.0"),
            "{text}"
        );
    }

    #[test]
    fn optional_functions_may_be_missing() {
        let fake = Fake::build("optional", &["FAKE_VERSION=12000"]);
        let driver = fake.driver();
        assert_eq!(driver.version, Version(12000));
        // SAFETY: the stand-in reads nothing through the handle.
        assert_eq!(unsafe { driver.call.cuFuncLoad(std::ptr::null_mut()) }, None);
        // SAFETY: as above.
        let newer = unsafe { Fake::build("newer", &[]).driver().call.cuFuncLoad(std::ptr::null_mut()) };
        assert_eq!(newer, Some(Ok(())));
    }

    #[test]
    fn failures_name_function_number_and_name() {
        let driver = Fake::build("failures", &[]).driver();
        let mut address = 0;
        // SAFETY: writes one address.
        let failure = unsafe { driver.call.cuMemAlloc(&mut address, 2 << 30) }.expect_err("too large for it");
        assert_eq!(failure.to_string(), "cuMemAlloc failed: 2 (CUDA_ERROR_OUT_OF_MEMORY)");
        assert_eq!(
            Error::from(failure),
            Error::cuda("cuMemAlloc failed: 2 (CUDA_ERROR_OUT_OF_MEMORY)")
        );
        let unnamed = driver
            .call
            .check("cuFoo", 12345)
            .expect_err("a code that no version knows");
        assert_eq!(unnamed.to_string(), "cuFoo failed: 12345");
    }
}
