//! The CUDA device: one GPU's primary context, which the library shares with the CUDA runtime.
//!
//! The context is retained at first use and never released, the device code is loaded once, and both serve every
//! communicator on that GPU. Every entry makes the context current and puts back what the caller had.
//!
//! What must never happen is a driver call that waits for running kernels, since a kernel of one rank spins until
//! another rank's thread has launched. So kernels are loaded before the first runs (`module`), memory is kept
//! (`pool`), zeroing has a stream of its own that no kernel runs in (`own_stream`), and no legacy default stream is touched that is
//! not the caller's. Shared memory cannot do without such calls (`sharing`, `unregister`): it goes when no kernel can be
//! running (`launch::running`).

mod context;
mod graphs;
mod module;
mod own_stream;
mod peers;
mod pointers;
mod pool;
mod sharing;
#[cfg(test)]
pub(crate) mod sharing_tests;
mod streams;
#[cfg(test)]
mod tests;
mod user_memory;
mod virtual_memory;

use super::{
    Device, DeviceKind, Devices, Export, Launch, Mapping, Mark, Memory, Placement, Sharing, StreamKey, Ticket,
};
use crate::bootstrap::Descriptor;
use crate::error::{Error, Result};
use crate::sys::cuda::{driver, CUdevice, CUdeviceptr, CallResult, Driver, Failure, Unusable};
use crate::{info, warning};
use context::{Handle, RelaxedCapture, Scope};
use cudarc::driver::sys::{self as types, CUctx_st, CUdevice_attribute, CUstream_st};
pub use graphs::{drop_released, has_released, put_down};
use module::{Image, Kernels};
use once_cell::sync::{Lazy, OnceCell};
use std::any::Any;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::Arc;

/// GPUs that one process can use.
const MOST_DEVICES: usize = 64;

/// CUDA's limit on a kernel's parameters.
const MOST_ARGUMENT_BYTES: usize = 4096;

/// The devices that were opened, by ordinal; read without a lock at every launch.
static OPENED: [OnceCell<Arc<CudaDevice>>; MOST_DEVICES] = [const { OnceCell::new() }; MOST_DEVICES];

const HOST_ONLY: &str = "this libnccl was built with feature host-only: rebuild without it, or set OSSICLE_DEVICE=host";

/// Whether communicators go to a GPU when `OSSICLE_DEVICE` does not say: a driver and at least one GPU are there, and
/// the library has code for them. A driver that is there but too old counts, so that `open` can refuse it by version:
/// its process may hold GPU memory, which the host device must not be given.
pub fn available() -> bool {
    static AVAILABLE: Lazy<bool> = Lazy::new(|| {
        let found = match driver() {
            Ok(driver) => match device_count(driver) {
                Ok(0) => Err("the CUDA driver sees no GPU".to_owned()),
                Ok(_) => Ok(()),
                Err(failure) => Err(failure.to_string()),
            },
            Err(Unusable::Absent(text)) => Err(text.clone()),
            Err(Unusable::Refused(_)) => Ok(()),
        };
        match found {
            Err(text) => info!(Init, "no GPU to use ({text}): the host device is used"),
            Ok(()) if module::embedded().is_none() => {
                info!(Init, "a GPU is there, but the host device is used: {HOST_ONLY}")
            }
            Ok(()) => return true,
        }
        false
    });
    *AVAILABLE
}

pub fn count() -> Result<i32> {
    module::embedded().ok_or_else(|| Error::usage(HOST_ONLY))?;
    Ok(device_count(usable_driver()?)?)
}

pub fn open(ordinal: Option<i32>) -> Result<Arc<dyn Device>> {
    let image = module::embedded().ok_or_else(|| Error::usage(HOST_ONLY))?;
    let driver = usable_driver()?;
    let ordinal = match ordinal {
        Some(ordinal) => ordinal,
        None => context::current_ordinal(driver)?,
    };
    let count = device_count(driver)?;
    if !(0..count).contains(&ordinal) {
        return Err(Error::argument(format!(
            "device is {ordinal}; this process sees {count} GPUs, counted from 0"
        )));
    }
    let slot = OPENED.get(ordinal as usize).ok_or_else(|| {
        Error::argument(format!(
            "device is {ordinal}; one process can use the GPUs 0 to {}",
            MOST_DEVICES - 1
        ))
    })?;
    let device = slot.get_or_try_init(|| CudaDevice::open(driver, ordinal, image).map(Arc::new))?;
    Ok(device.clone())
}

fn opened() -> impl Iterator<Item = &'static CudaDevice> {
    OPENED.iter().filter_map(|slot| Some(slot.get()?.as_ref()))
}

fn usable_driver() -> Result<&'static Driver> {
    driver().map_err(|unusable| match unusable {
        Unusable::Absent(text) => Error::system(format!(
            "there is no GPU to use: {text}; unset OSSICLE_DEVICE, or set OSSICLE_DEVICE=host"
        )),
        Unusable::Refused(error) => error.clone(),
    })
}

fn device_count(driver: &Driver) -> CallResult<i32> {
    let mut count = 0;
    // SAFETY: writes one int.
    unsafe { driver.call.cuDeviceGetCount(&mut count) }?;
    Ok(count)
}

fn device_handle(driver: &Driver, ordinal: i32) -> CallResult<CUdevice> {
    let mut device = 0;
    // SAFETY: writes one int.
    unsafe { driver.call.cuDeviceGet(&mut device, ordinal) }?;
    Ok(device)
}

fn uuid(driver: &Driver, device: CUdevice) -> CallResult<[u8; 16]> {
    let mut uuid = [0; 16];
    // SAFETY: writes 16 bytes.
    unsafe { driver.call.cuDeviceGetUuid(&mut uuid, device) }?;
    Ok(uuid)
}

/// Whether kernels of GPU `from` can address memory of GPU `to`.
fn can_access(driver: &Driver, from: i32, to: i32) -> CallResult<bool> {
    let (from, to) = (device_handle(driver, from)?, device_handle(driver, to)?);
    let mut can = 0;
    // SAFETY: two devices that exist; writes one int.
    unsafe { driver.call.cuDeviceCanAccessPeer(&mut can, from, to) }?;
    Ok(can != 0)
}

fn attribute(driver: &Driver, ordinal: i32, attribute: CUdevice_attribute) -> CallResult<c_int> {
    let device = device_handle(driver, ordinal)?;
    let mut value = 0;
    // SAFETY: writes one int.
    unsafe { driver.call.cuDeviceGetAttribute(&mut value, attribute as c_int, device) }?;
    Ok(value)
}

/// A text that the driver writes into a buffer of a given size.
fn text(write: impl FnOnce(*mut c_char, c_int) -> CallResult<()>) -> CallResult<String> {
    let mut buffer = [0u8; 256];
    write(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    Ok(CStr::from_bytes_until_nul(&buffer)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default())
}

/// One GPU, for all communicators of the process.
struct CudaDevice {
    driver: &'static Driver,
    ordinal: i32,
    /// "GPU 0 (NVIDIA H200, 0000:1b:00.0)", for messages.
    gpu: String,
    uuid: [u8; 16],
    multiprocessors: u32,
    /// The primary context.
    context: Handle<CUctx_st>,
    kernels: Kernels,
    /// Zeroes memory: non-blocking, and no kernel of the library runs in it.
    zeroing: Handle<CUstream_st>,
    device_pool: pool::Pool,
    pinned_pool: pool::Pool,
    known_ranges: pointers::KnownRanges,
    known_streams: streams::KnownStreams,
    events: streams::Events,
    side_streams: streams::SideStreams,
    /// None where the interface is not there, or switched off.
    virtual_memory: Option<virtual_memory::VirtualMemory>,
}

impl CudaDevice {
    fn open(driver: &'static Driver, ordinal: i32, image: Image) -> Result<CudaDevice> {
        let device = device_handle(driver, ordinal)?;
        let call = &driver.call;
        // SAFETY: a device that exists; each writes at most the given number of bytes.
        let name = text(|buffer, bytes| unsafe { call.cuDeviceGetName(buffer, bytes, device) })?;
        // SAFETY: as above.
        let bus_id = text(|buffer, bytes| unsafe { call.cuDeviceGetPCIBusId(buffer, bytes, device) })?;
        let gpu = format!("GPU {ordinal} ({name}, {bus_id})");
        let uuid = uuid(driver, device)?;
        if attribute(
            driver,
            ordinal,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        )? == 0
        {
            return Err(Error::cuda(format!(
                "{gpu} has no unified addressing, which pinned memory is shared through"
            )));
        }
        let multiprocessors = attribute(
            driver,
            ordinal,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle. Never released: the runtime and the user share it.
        unsafe { call.cuDevicePrimaryCtxRetain(&mut context, device) }
            .map_err(|failure| Error::from(failure).within(&gpu))?;
        let context = Handle(context);
        let _guards = (Scope::enter(driver, context)?, RelaxedCapture::enter(driver)?);
        let kernels = Kernels::load(driver, image, &gpu)?;
        info!(
            Init,
            "{gpu}: {multiprocessors} multiprocessors, driver of CUDA {}, device code of CUDA {}, {} bytes of local \
             memory a thread",
            driver.version,
            image.release,
            kernels.local_bytes
        );
        let device = CudaDevice {
            driver,
            ordinal,
            gpu,
            uuid,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(0).max(1),
            context,
            kernels,
            zeroing: own_stream::create(driver)?,
            device_pool: pool::Pool::default(),
            pinned_pool: pool::Pool::default(),
            known_ranges: pointers::KnownRanges::default(),
            known_streams: streams::KnownStreams::default(),
            events: streams::Events::default(),
            side_streams: streams::SideStreams::default(),
            virtual_memory: virtual_memory::VirtualMemory::of_device(driver, ordinal, device_count(driver)?)?,
        };
        // The driver's own kernel for zeroing is loaded like any other at its first use: now, while none spins.
        let warm_up = device.block(1, Placement::Device)?;
        device.device_pool.give_back(warm_up as usize);
        Ok(device)
    }

    fn scope(&self) -> CallResult<Scope<'_>> {
        Scope::enter(self.driver, self.context)
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        let kernel = self.kernels.get(launch.kernel)?;
        let bytes = launch.arguments.len();
        if bytes > MOST_ARGUMENT_BYTES || kernel.parameter_bytes.is_some_and(|expected| expected != bytes) {
            return Err(Error::internal(format!(
                "{} was given {bytes} bytes of arguments; it takes {:?}, at most {MOST_ARGUMENT_BYTES}",
                launch.kernel.symbol(),
                kernel.parameter_bytes
            )));
        }
        let _scope = self.scope()?;
        let mut parameters = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: a loaded kernel of this context, whose single parameter is copied out of `arguments` (of its size)
        // before the call returns; the stream was accepted by `check_stream`.
        unsafe {
            self.driver.call.cuLaunchKernel(
                kernel.function.0,
                launch.blocks,
                1,
                1,
                launch.threads,
                1,
                1,
                0,
                launch.stream.cast(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|failure| {
            Error::from(failure).within(format!(
                "launching {} with {} blocks of {} threads on {}",
                launch.kernel.symbol(),
                launch.blocks,
                launch.threads,
                self.gpu
            ))
        })
    }

    fn pool(&self, placement: Placement) -> &pool::Pool {
        match placement {
            Placement::Device => &self.device_pool,
            Placement::Pinned => &self.pinned_pool,
        }
    }

    /// A zeroed block of at least `bytes`, from the pool or else from the driver.
    fn block(&self, bytes: usize, placement: Placement) -> Result<*mut u8> {
        let refused = |reason: &dyn std::fmt::Display| {
            Error::cuda(format!(
                "{bytes} bytes of {placement:?} memory for the library on {}: {reason}",
                self.gpu
            ))
        };
        let block_bytes = pool::block_bytes(bytes).ok_or_else(|| refused(&"more than the address space has"))?;
        let pool = self.pool(placement);
        let address = match pool.take(block_bytes) {
            Some(address) => address,
            None => {
                let address = match placement {
                    Placement::Device => self.device_memory(block_bytes).map(|address| address as usize),
                    Placement::Pinned => self.pinned_memory(block_bytes).map(|address| address as usize),
                }
                .map_err(|failure| refused(&failure))?;
                info!(
                    Alloc,
                    "{}: {block_bytes} bytes more of {placement:?} memory, at {address:#x}", self.gpu
                );
                pool.lend_new(address, block_bytes);
                address
            }
        };
        match placement {
            // Zeroing that is still under way does the block no harm: the next one that takes it queues behind that.
            Placement::Device => self.zero(address as CUdeviceptr, bytes).map_err(|error| {
                pool.give_back(address);
                refused(&error.text)
            })?,
            // SAFETY: a block of at least `bytes` that nobody else holds, and host memory.
            Placement::Pinned => unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) },
        }
        Ok(address as *mut u8)
    }

    fn device_memory(&self, bytes: usize) -> CallResult<CUdeviceptr> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { self.driver.call.cuMemAlloc(&mut address, bytes) }?;
        Ok(address)
    }

    /// Under unified addressing kernels use the address that the host has.
    fn pinned_memory(&self, bytes: usize) -> CallResult<*mut c_void> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let mut address = std::ptr::null_mut();
        let flags = types::CU_MEMHOSTALLOC_PORTABLE | types::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        unsafe { self.driver.call.cuMemHostAlloc(&mut address, bytes, flags) }?;
        Ok(address)
    }
}

impl Device for CudaDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn ordinal(&self) -> i32 {
        self.ordinal
    }

    fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    fn describe(&self) -> String {
        self.gpu.clone()
    }

    fn out_of_reach(&self) -> Vec<[u8; 16]> {
        self.unreachable_peers()
    }

    fn open_peer(&self, uuid: [u8; 16]) -> Result<()> {
        self.enable_peer(uuid)
    }

    fn sharing(&self) -> Vec<Sharing> {
        self.ways_to_share()
    }

    fn export(self: Arc<Self>, bytes: usize, sharing: Sharing) -> Result<Export> {
        self.export_memory(bytes, sharing)
    }

    fn import(self: Arc<Self>, ticket: &Ticket, fd: Descriptor) -> Result<Box<dyn Mapping>> {
        self.import_memory(ticket, fd)
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn allocate(self: Arc<Self>, bytes: usize, placement: Placement) -> Result<Memory> {
        let address = self.block(bytes, placement)?;
        Ok(Memory {
            address,
            bytes,
            placement,
            device: self,
        })
    }

    /// Makes no driver call: safe beside spinning kernels and in a process that is exiting.
    fn free(&self, address: *mut u8, bytes: usize, placement: Placement) {
        if !self.pool(placement).give_back(address as usize) {
            warning!(
                "{bytes} bytes at {address:p} came back to {}, which did not lend them",
                self.gpu
            );
        }
    }

    fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<()> {
        super::check_write(memory, bytes)?;
        self.copy_in(memory.address as CUdeviceptr, bytes)
    }

    fn register(&self, address: *mut u8, bytes: usize) -> Result<*mut u8> {
        let refused = |failure: Failure| {
            Error::cuda(format!(
                "registering {bytes} bytes of shared host memory at {address:p} with {}: {failure}",
                self.gpu
            ))
        };
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let flags = types::CU_MEMHOSTREGISTER_PORTABLE | types::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's mapping of that many bytes.
        unsafe { self.driver.call.cuMemHostRegister(address.cast(), bytes, flags) }.map_err(refused)?;
        let mut seen_by_device = 0;
        // SAFETY: registered above; writes one address.
        unsafe {
            self.driver
                .call
                .cuMemHostGetDevicePointer(&mut seen_by_device, address.cast(), 0)
        }
        .map_err(|failure| {
            self.unregister(address);
            refused(failure)
        })?;
        Ok(seen_by_device as usize as *mut u8)
    }

    /// The driver may wait for running kernels here, so none may be spinning (`launch::running`).
    fn unregister(&self, address: *mut u8) {
        let undone = self.scope().and_then(|_scope| {
            let _relaxed = RelaxedCapture::enter(self.driver)?;
            // SAFETY: the caller registered this mapping, and no kernel uses it any more.
            unsafe { self.driver.call.cuMemHostUnregister(address.cast()) }
        });
        match undone {
            Err(failure) if !failure.is_shutdown() => {
                warning!(
                    "shared host memory at {address:p} stays registered with {}: {failure}",
                    self.gpu
                )
            }
            _ => {}
        }
    }

    fn devices(&self, uuids: &[[u8; 16]]) -> Devices {
        self.devices_of(uuids)
    }

    fn check_pointer(&self, name: &str, pointer: *const c_void, bytes: usize, always: bool) -> Result<Devices> {
        let address = pointer as usize;
        if bytes == 0 {
            return Ok(Devices::ALL);
        }
        if let Some(known) = self.known_ranges.find(address, bytes).filter(|_| !always) {
            return Ok(known);
        }
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let (range, devices) = pointers::look_up(self.driver, self.ordinal, name, address, bytes)?;
        self.known_ranges.remember(address, range, devices);
        Ok(devices)
    }

    fn check_stream(&self, stream: *mut c_void) -> Result<StreamKey> {
        self.stream_key(stream)
    }

    fn enqueue(&self, launch: &Launch) -> Result<()> {
        self.launch(launch)
    }

    fn order_streams(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
        self.order(last, next)
    }

    fn mark(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark> {
        self.record(mark, stream)
    }

    fn reached(&self, mark: Mark) -> Result<bool> {
        self.is_reached(mark)
    }

    fn wait_for_mark(&self, mark: Mark, next: *mut c_void) -> Result<()> {
        self.wait(mark, next)
    }

    fn unmark(&self, mark: Mark) {
        self.events.give_back(mark);
    }

    fn side_stream(&self, _beside: *mut c_void) -> Result<*mut c_void> {
        self.side()
    }

    fn give_side_stream_back(&self, stream: *mut c_void) {
        self.side_streams.give_back(stream);
    }

    fn keep_for_graph(&self, stream: *mut c_void, kept: Arc<dyn Any + Send + Sync>) -> Result<()> {
        self.keep(stream, kept)
    }

    fn health(&self) -> Result<()> {
        self.answers()
    }

    fn allocate_user(&self, bytes: usize) -> Result<*mut c_void> {
        self.allocate_for_user(bytes)
    }

    fn free_user(&self, pointer: *mut c_void) -> Result<()> {
        self.free_for_user(pointer)
    }
}
