//! The embedded device code, and its kernels loaded into one GPU's primary context.
//!
//! Every kernel is loaded before the first may run. Under CUDA's lazy loading (the default from CUDA 12.2) the first
//! launch of a kernel loads it, and loading waits for kernels that are running: a rank's first launch would wait for a
//! peer's kernel that spins until this very launch comes.

use super::context::Handle;
use crate::device::Kernel;
use crate::error::{Error, Result};
use crate::sys::cuda::Driver;
use cudarc::driver::sys::{CUfunc_st, CUfunction_attribute};
use std::ffi::{c_int, CString};

/// Alignment that the driver's loader reads a fatbin with.
#[cfg(not(feature = "host-only"))]
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

#[cfg(not(feature = "host-only"))]
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));

/// The device code that this library was built with; None with feature `host-only`.
pub(super) fn embedded() -> Option<Image> {
    #[cfg(not(feature = "host-only"))]
    return Some(Image {
        bytes: &FATBIN.0,
        release: env!("OSSICLE_CUDA_RELEASE"),
        targets: env!("OSSICLE_CUDA_TARGETS"),
    });
    #[cfg(feature = "host-only")]
    return None;
}

/// A fatbin.
#[derive(Clone, Copy)]
pub(super) struct Image {
    pub(super) bytes: &'static [u8],
    /// The CUDA release that built it, "13.0".
    pub(super) release: &'static str,
    /// The chips that it has code for, "sm_90 compute_90".
    pub(super) targets: &'static str,
}

pub(super) struct LoadedKernel {
    pub(super) function: Handle<CUfunc_st>,
    /// Size of its single parameter; None where the driver does not tell (before CUDA 12.4).
    pub(super) parameter_bytes: Option<usize>,
}

/// Every kernel of `Kernel::all`, loaded.
pub(super) struct Kernels {
    by_index: Vec<LoadedKernel>,
    /// The largest local memory a thread of any kernel needs. Past the context's stack limit (1 KiB by default) the
    /// first launch would make the driver grow the context's local memory, which waits for running kernels.
    pub(super) local_bytes: c_int,
}

impl Kernels {
    /// Into the current context. The module is never unloaded, and `image` stands for the whole process.
    pub(super) fn load(driver: &Driver, image: Image, gpu: &str) -> Result<Kernels> {
        let mut module = std::ptr::null_mut();
        // SAFETY: a whole fatbin that lives for the process's life; writes one handle.
        unsafe { driver.call.cuModuleLoadData(&mut module, image.bytes.as_ptr().cast()) }.map_err(|failure| {
            Error::cuda(format!(
                "{gpu} cannot load this library's device code: {failure}; the driver supports CUDA {}, the code was built \
                 by CUDA {} for {}: install a driver of CUDA {} or newer, or set OSSICLE_DEVICE=host",
                driver.version, image.release, image.targets, image.release
            ))
        })?;
        let mut kernels = Kernels {
            by_index: Vec::new(),
            local_bytes: 0,
        };
        for kernel in Kernel::all() {
            let symbol = kernel.symbol();
            let name = CString::new(symbol.as_str()).map_err(|_| Error::internal("a kernel's name holds a NUL"))?;
            let mut function = std::ptr::null_mut();
            // SAFETY: a module that was just loaded and a C string; writes one handle.
            unsafe { driver.call.cuModuleGetFunction(&mut function, module, name.as_ptr()) }
                .map_err(|failure| Error::internal(format!("the device code lacks kernel {symbol}: {failure}")))?;
            let (loaded, local_bytes) =
                load_fully(driver, Handle(function)).map_err(|error| error.within(format!("kernel {symbol}")))?;
            kernels.by_index.push(loaded);
            kernels.local_bytes = kernels.local_bytes.max(local_bytes);
        }
        Ok(kernels)
    }

    pub(super) fn get(&self, kernel: Kernel) -> Result<&LoadedKernel> {
        kernel
            .index()
            .and_then(|index| self.by_index.get(index))
            .ok_or_else(|| Error::internal(format!("there is no kernel {}", kernel.symbol())))
    }
}

/// Makes the driver finish loading now; the kernel and its local memory a thread.
fn load_fully(driver: &Driver, function: Handle<CUfunc_st>) -> Result<(LoadedKernel, c_int)> {
    // SAFETY: a function of a loaded module. Before CUDA 12.4 cuModuleGetFunction itself loads, and the attribute below
    // can only be had of a loaded function.
    unsafe { driver.call.cuFuncLoad(function.0) }.transpose()?;
    let mut local_bytes = 0;
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as c_int;
    // SAFETY: writes one int.
    unsafe { driver.call.cuFuncGetAttribute(&mut local_bytes, attribute, function.0) }?;
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: writes two sizes; parameter 0 exists, as every kernel has exactly one.
    let told = unsafe { driver.call.cuFuncGetParamInfo(function.0, 0, &mut offset, &mut bytes) }.transpose()?;
    Ok((
        LoadedKernel {
            function,
            parameter_bytes: told.map(|()| bytes),
        },
        local_bytes,
    ))
}
