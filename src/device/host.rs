//! The host device: ranks whose memory is host memory and whose kernels are host code.
//!
//! It runs the kernels of `cuda/`, compiled by the host C++ compiler, a block being a thread. So a machine without a
//! GPU runs the library as it is: the first run, the tests, the sanitizers. There is one stream, the default one, and
//! a launch returns when it is done, as MPI's calls do. Every communicator has a device object with threads of its
//! own, which exist only once a launch needs more than the caller's thread.

use super::{Device, DeviceKind, Kernel, Launch, Memory, Placement};
use crate::error::{Error, Result};
use crate::sys::condvar::Condvar;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Ordinals that `ncclCommInitAll` may name on the host device.
pub const DEVICES: i32 = 64;

/// A host kernel: its work, the block's index, the number of blocks.
type HostKernel = unsafe extern "C" fn(*const c_void, u32, u32);

extern "C" {
    /// The kernels of `cuda/kernels.cu` in the order of `Kernel::all`.
    static ossicle_host_kernels: [HostKernel; Kernel::COUNT];
}

/// A kernel call for one block, handed to a worker.
#[derive(Clone, Copy)]
struct Job {
    kernel: HostKernel,
    arguments: *const c_void,
    block: u32,
    blocks: u32,
    /// Jobs of the launch that are not done; its caller waits for 0.
    pending: *const Pending,
}

// SAFETY: the pointers refer to the stack of `launch`, which does not return before `pending` is 0; the kernels
// synchronise what they share.
unsafe impl Send for Job {}

struct Pending {
    jobs: Mutex<usize>,
    done: Condvar,
}

impl Job {
    fn run(self) {
        // SAFETY: `arguments` is the work struct of this kernel (Launch's contract) and lives until `pending` is 0.
        unsafe { (self.kernel)(self.arguments, self.block, self.blocks) };
    }
}

enum Order {
    Idle,
    Run(Job),
    Exit,
}

struct Mailbox {
    order: Mutex<Order>,
    changed: Condvar,
}

struct Worker {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> Result<Worker> {
        let mailbox = Arc::new(Mailbox {
            order: Mutex::new(Order::Idle),
            changed: Condvar::default(),
        });
        let shared = mailbox.clone();
        let thread = std::thread::Builder::new()
            .name("ossicle-block".to_owned())
            .spawn(move || work(&shared))
            .map_err(|error| Error::system(format!("cannot start a thread for a host block: {error}")))?;
        Ok(Worker {
            mailbox,
            thread: Some(thread),
        })
    }

    fn order(&self, order: Order) {
        let mut current = self.mailbox.order.lock();
        *current = order;
        self.mailbox.changed.notify_one();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.order(Order::Exit);
        if let Some(thread) = self.thread.take() {
            // The body cannot panic: it calls C code and takes locks that do not poison.
            let _ = thread.join();
        }
    }
}

fn work(mailbox: &Mailbox) {
    loop {
        let job = {
            let mut order = mailbox.order.lock();
            loop {
                match *order {
                    Order::Run(job) => {
                        *order = Order::Idle;
                        break job;
                    }
                    Order::Exit => return,
                    Order::Idle => mailbox.changed.wait(&mut order),
                }
            }
        };
        job.run();
        // SAFETY: the launch waits for this count before it lets `pending` go; the notification happens under the
        // lock, so the waiter cannot leave while this thread still uses the condition variable.
        let pending = unsafe { &*job.pending };
        let mut jobs = pending.jobs.lock();
        *jobs -= 1;
        if *jobs == 0 {
            pending.done.notify_one();
        }
    }
}

pub struct HostDevice {
    ordinal: i32,
    uuid: [u8; 16],
    workers: Mutex<Vec<Worker>>,
}

pub fn open(ordinal: i32) -> Arc<dyn Device> {
    static OPENED: AtomicUsize = AtomicUsize::new(0);
    // Process and running number: unique among the ranks of one host.
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
    uuid[8..].copy_from_slice(&(OPENED.fetch_add(1, Ordering::Relaxed) as u64).to_le_bytes());
    Arc::new(HostDevice {
        ordinal,
        uuid,
        workers: Mutex::new(Vec::new()),
    })
}

/// Runs all blocks of all launches at once, the very last one on the calling thread, and returns when all are done.
/// The launches belong to different communicators.
pub fn launch(batch: &[&Launch]) -> Result<()> {
    match batch {
        [] => Ok(()),
        // One block, the usual case of a rank with a thread of its own, needs nothing but the caller's thread.
        [only] if only.blocks == 1 => {
            let call = kernel(only.kernel)?;
            // SAFETY: `arguments` is this kernel's work struct (Launch's contract).
            unsafe { call(only.arguments.as_ptr().cast(), 0, 1) };
            Ok(())
        }
        _ => launch_together(batch),
    }
}

fn launch_together(batch: &[&Launch]) -> Result<()> {
    let total: usize = batch.iter().map(|launch| launch.blocks as usize).sum();
    let pending = Pending {
        jobs: Mutex::new(total - 1),
        done: Condvar::default(),
    };
    let mut jobs = Vec::with_capacity(total);
    let mut crews = Vec::with_capacity(batch.len());
    for launch in batch {
        let host = (&**launch.device as &dyn Any).downcast_ref::<HostDevice>();
        let host = host.ok_or_else(|| Error::internal("a host launch on a device that is not the host"))?;
        let mut crew = host.workers.lock();
        // All workers exist before the first block runs: a block must never wait for one that cannot start.
        while crew.len() < launch.blocks as usize {
            crew.push(Worker::start()?);
        }
        let kernel = kernel(launch.kernel)?;
        let arguments = launch.arguments.as_ptr().cast();
        jobs.extend((0..launch.blocks).map(|block| Job {
            kernel,
            arguments,
            block,
            blocks: launch.blocks,
            pending: &pending,
        }));
        crews.push(crew);
    }
    let inline = jobs.pop();
    let workers = crews
        .iter()
        .zip(batch)
        .flat_map(|(crew, launch)| &crew[..launch.blocks as usize]);
    for (worker, job) in workers.zip(jobs) {
        worker.order(Order::Run(job));
    }
    if let Some(job) = inline {
        job.run();
    }
    let mut jobs = pending.jobs.lock();
    while *jobs > 0 {
        pending.done.wait(&mut jobs);
    }
    Ok(())
}

fn kernel(kernel: Kernel) -> Result<HostKernel> {
    let index = kernel
        .index()
        .ok_or_else(|| Error::internal(format!("there is no host kernel {}", kernel.symbol())))?;
    // SAFETY: the table is a constant of the host build with one entry for each kernel.
    Ok(unsafe { ossicle_host_kernels[index] })
}

/// The default stream's handles: NULL, cudaStreamLegacy, cudaStreamPerThread.
const LAST_DEFAULT_STREAM: usize = 2;

/// Mappings that `ncclMemAlloc` gave out: address and bytes.
static USER_MEMORY: Lazy<Mutex<HashMap<usize, usize>>> = Lazy::new(|| Mutex::new(HashMap::new()));

fn map(bytes: usize) -> Result<*mut u8> {
    use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
    // SAFETY: a fresh private mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    mapped
        .map(<*mut c_void>::cast)
        .map_err(|error| Error::system(format!("cannot map {bytes} bytes of memory: {error}")))
}

fn unmap(address: *mut u8, bytes: usize) {
    // SAFETY: only called with what `map` returned, once, when its owner gives it up. It cannot fail for such a range.
    let _ = unsafe { rustix::mm::munmap(address.cast(), bytes) };
}

impl Device for HostDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn ordinal(&self) -> i32 {
        self.ordinal
    }

    fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    fn describe(&self) -> String {
        format!("host device {}", self.ordinal)
    }

    fn multiprocessors(&self) -> u32 {
        std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32)
    }

    fn allocate(self: Arc<Self>, bytes: usize, placement: Placement) -> Result<Memory> {
        Ok(Memory {
            address: map(bytes)?,
            bytes,
            placement,
            device: self,
        })
    }

    fn free(&self, address: *mut u8, bytes: usize, _placement: Placement) {
        unmap(address, bytes);
    }

    fn register(&self, address: *mut u8, _bytes: usize) -> Result<*mut u8> {
        Ok(address)
    }

    fn unregister(&self, _address: *mut u8) {}

    fn check_pointer(&self, _name: &str, _pointer: *const c_void, _bytes: usize, _always: bool) -> Result<()> {
        Ok(())
    }

    fn check_stream(&self, stream: *mut c_void) -> Result<u64> {
        match stream as usize {
            handle @ 0..=LAST_DEFAULT_STREAM => Ok(handle as u64),
            _ => Err(Error::argument(format!(
                "stream is {stream:p}; the host device has the default stream only: pass NULL, or set OSSICLE_DEVICE=cuda"
            ))),
        }
    }

    fn order_streams(&self, _last: *mut c_void, _next: *mut c_void) -> Result<()> {
        Ok(())
    }

    fn synchronize_stream(&self, _stream: *mut c_void, _give_up: &dyn Fn() -> Option<Error>) -> Result<()> {
        Ok(())
    }

    fn allocate_user(&self, bytes: usize) -> Result<*mut c_void> {
        let address = map(bytes)?;
        USER_MEMORY.lock().insert(address as usize, bytes);
        Ok(address.cast())
    }

    fn free_user(&self, pointer: *mut c_void) -> Result<()> {
        match USER_MEMORY.lock().remove(&(pointer as usize)) {
            Some(bytes) => {
                unmap(pointer.cast(), bytes);
                Ok(())
            }
            None => Err(Error::argument(format!(
                "{pointer:p} was not given out by ncclMemAlloc, or is already freed"
            ))),
        }
    }
}
