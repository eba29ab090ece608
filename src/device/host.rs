//! The host device: ranks whose memory is host memory and whose kernels are host code.
//!
//! It runs the kernels of `cuda/`, compiled by the host C++ compiler, a block being a thread. So a machine without a
//! GPU runs the library as it is: the first run, the tests, the sanitizers. In the default stream, the only one of a C
//! caller, a launch returns when it is done, as MPI's calls do. Every communicator has a device object with threads of
//! its own, which exist only once a launch needs more than the caller's thread. Rust callers of this crate, its tests
//! above all, can make streams that are queues as on a GPU, with events and graphs (`Scheduler`).

mod capture;
mod graph;
mod scheduler;
mod stream;

pub use graph::{Executable, Graph};
pub use scheduler::Scheduler;
pub use stream::{Event, Stream};

use super::{Device, DeviceKind, Devices, Kernel, Launch, Mark, Memory, Placement, StreamKey, CALLERS_THREAD_KEY};
use crate::error::{Error, Result};
use crate::sys::condvar::Condvar;
use crate::sys::thread::{self, Thread};
use once_cell::sync::Lazy;
use parking_lot::{Mutex, MutexGuard};
use scheduler::Task;
use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use stream::Moment;

/// Ordinals that `ncclCommInitAll` may name on the host device.
pub const DEVICES: i32 = 64;

/// A host kernel: its work, the block's index, the number of blocks.
type HostKernel = unsafe extern "C" fn(*const c_void, u32, u32);

extern "C" {
    /// The kernels of `cuda/kernels.cu` in the order of `Kernel::all`.
    static ossicle_host_kernels: [HostKernel; Kernel::COUNT];
}

/// A closure of a launching call, handed to a worker.
#[derive(Clone, Copy)]
struct Job {
    call: unsafe fn(*const c_void),
    closure: *const c_void,
    /// Jobs of the call that are not done; the call waits for 0.
    pending: *const Pending,
}

// SAFETY: the pointers refer to the stack of `together`, which does not return before `pending` is 0, and the closure
// is Sync.
unsafe impl Send for Job {}

struct Pending {
    jobs: Mutex<usize>,
    done: Condvar,
}

impl Job {
    fn of<F: Fn() + Sync>(closure: &F, pending: &Pending) -> Job {
        /// Calls the closure behind its address.
        unsafe fn call<F: Fn()>(closure: *const c_void) {
            // SAFETY: the address is of a live F, by the contract of `Job`.
            unsafe { (*closure.cast::<F>())() }
        }
        Job {
            call: call::<F>,
            closure: std::ptr::from_ref(closure).cast(),
            pending,
        }
    }

    fn run(self) {
        // SAFETY: `call` belongs to `closure`, which lives until `pending` is 0.
        unsafe { (self.call)(self.closure) };
    }
}

/// Runs all closures at once: the first on this thread, each other on a worker of its own.
fn together<'a, F: Fn() + Sync>(workers: impl Iterator<Item = &'a Worker>, closures: &[F]) {
    let Some((first, others)) = closures.split_first() else {
        return;
    };
    let pending = Pending {
        jobs: Mutex::new(others.len()),
        done: Condvar::default(),
    };
    for (worker, closure) in workers.zip(others) {
        worker.order(Order::Run(Job::of(closure, &pending)));
    }
    first();
    let mut jobs = pending.jobs.lock();
    while *jobs > 0 {
        pending.done.wait(&mut jobs);
    }
}

enum Order {
    Idle,
    Run(Job),
    /// Work that nobody waits for here.
    Own(Box<dyn FnOnce() + Send>),
    Exit,
}

struct Mailbox {
    order: Mutex<Order>,
    changed: Condvar,
}

struct Worker {
    mailbox: Arc<Mailbox>,
    thread: Option<Thread>,
}

impl Worker {
    fn start() -> Result<Worker> {
        let mailbox = Arc::new(Mailbox {
            order: Mutex::new(Order::Idle),
            changed: Condvar::default(),
        });
        let shared = mailbox.clone();
        let thread = thread::spawn(c"ossicle-block", move || work(&shared))
            .map_err(|error| Error::system(format!("cannot start a thread for a host block: {error}")))?;
        Ok(Worker {
            mailbox,
            thread: Some(thread),
        })
    }

    /// Only for a worker that is idle, or at the end of its own last work.
    fn run(&self, work: impl FnOnce() + Send + 'static) {
        self.order(Order::Own(Box::new(work)));
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
            thread.join();
        }
    }
}

fn work(mailbox: &Mailbox) {
    loop {
        let job = {
            let mut order = mailbox.order.lock();
            loop {
                match std::mem::replace(&mut *order, Order::Idle) {
                    Order::Run(job) => break job,
                    Order::Own(work) => MutexGuard::unlocked(&mut order, work),
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
    /// Marks that are lent, by their numbers.
    marks: Mutex<HashMap<usize, Arc<Moment>>>,
    /// Side streams that are lent, by their handles.
    sides: Mutex<HashMap<usize, Stream>>,
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
        marks: Mutex::default(),
        sides: Mutex::default(),
    })
}

/// Runs the launches of several communicators, of each in order. A communicator waits for nothing but its own launches:
/// in what order its peers come is not for this process to say.
pub fn launch(sequences: &[Vec<Launch>]) -> Result<()> {
    let mut crews = Vec::with_capacity(sequences.len());
    let mut steps = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        let Some(launch) = sequence.first() else { continue };
        let host = (&**launch.device as &dyn Any).downcast_ref::<HostDevice>();
        let host = host.ok_or_else(|| Error::internal("a host launch on a device that is not the host"))?;
        let mut crew = host.workers.lock();
        // All workers exist before the first block runs: a block must never wait for one that cannot start. The caller's
        // thread conducts the first communicator, a worker each other one; the conductor runs a block itself.
        let blocks = sequence.iter().map(|launch| launch.blocks as usize).max().unwrap_or(1);
        let conductor = usize::from(!crews.is_empty());
        while crew.len() < conductor + blocks - 1 {
            crew.push(Worker::start()?);
        }
        let kernels: Vec<HostKernel> = sequence
            .iter()
            .map(|launch| kernel(launch.kernel))
            .collect::<Result<_>>()?;
        steps.push((sequence, kernels));
        crews.push(crew);
    }
    let conducts: Vec<_> = steps
        .iter()
        .zip(&crews)
        .enumerate()
        .map(|(index, ((sequence, kernels), crew))| {
            let blocks: &[Worker] = &crew[usize::from(index > 0)..];
            let launches = sequence.iter().zip(kernels);
            move || {
                launches
                    .clone()
                    .for_each(|(launch, kernel)| run_blocks(blocks, launch.arguments.as_ptr(), launch.blocks, *kernel))
            }
        })
        .collect();
    together(crews.iter().skip(1).filter_map(|crew| crew.first()), &conducts);
    Ok(())
}

/// One launch of one communicator of one block: the usual case of a rank with a thread of its own, which needs nothing
/// but that thread.
pub fn launch_alone(launch: &Launch) -> Result<()> {
    run_blocks(&[], launch.arguments.as_ptr(), launch.blocks, kernel(launch.kernel)?);
    Ok(())
}

/// A work struct for all blocks of a launch, which read it.
#[derive(Clone, Copy)]
struct Arguments(*const u8);

// SAFETY: nobody writes to what lies there while the launch runs.
unsafe impl Sync for Arguments {}

impl Arguments {
    fn address(self) -> *const c_void {
        self.0.cast()
    }
}

/// All blocks of a launch at once. `workers` has one for each block but the first; `arguments` is the kernel's work
/// struct (Launch's contract) and stands until this returns.
fn run_blocks(workers: &[Worker], arguments: *const u8, blocks: u32, kernel: HostKernel) {
    let arguments = Arguments(arguments);
    let block = |index: u32| {
        // SAFETY: by the contract above.
        move || unsafe { kernel(arguments.address(), index, blocks) }
    };
    match blocks {
        1 => block(0)(),
        _ => together(workers.iter(), &(0..blocks).map(block).collect::<Vec<_>>()),
    }
}

fn kernel(kernel: Kernel) -> Result<HostKernel> {
    let index = kernel
        .index()
        .ok_or_else(|| Error::internal(format!("there is no host kernel {}", kernel.symbol())))?;
    // SAFETY: the table is a constant of the host build with one entry for each kernel.
    Ok(unsafe { ossicle_host_kernels[index] })
}

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

impl HostDevice {
    fn moment(&self, mark: Mark) -> Result<Arc<Moment>> {
        let found = self.marks.lock().get(&mark.0).cloned();
        found.ok_or_else(|| Error::internal(format!("the host device did not give {mark:?}")))
    }
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

    fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<()> {
        super::check_write(memory, bytes)?;
        // SAFETY: within memory that its owner lends, and that no kernel uses yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.address, bytes.len()) };
        Ok(())
    }

    fn register(&self, address: *mut u8, _bytes: usize) -> Result<*mut u8> {
        Ok(address)
    }

    fn unregister(&self, _address: *mut u8) {}

    fn check_pointer(&self, _name: &str, _pointer: *const c_void, _bytes: usize, _always: bool) -> Result<Devices> {
        Ok(Devices::ALL)
    }

    fn check_stream(&self, stream: *mut c_void) -> Result<StreamKey> {
        if stream::is_default(stream) {
            return Ok(StreamKey {
                stream: CALLERS_THREAD_KEY,
                capture: None,
            });
        }
        let (scheduler, number) = stream::find(stream)?;
        scheduler.key(number)
    }

    fn enqueue(&self, launch: &Launch) -> Result<()> {
        let (scheduler, number) = stream::find(launch.stream)?;
        let task = Task::kernel(kernel(launch.kernel)?, launch.blocks, launch.arguments);
        scheduler.enqueue(number, task)
    }

    fn order_streams(&self, last: *mut c_void, next: *mut c_void) -> Result<()> {
        let (scheduler, number) = stream::find(last)?;
        let moment = scheduler.record(number)?;
        let (scheduler, number) = stream::find(next)?;
        scheduler.wait(number, &moment)
    }

    fn mark(&self, mark: Option<Mark>, stream: *mut c_void) -> Result<Mark> {
        /// Marks of all devices, so that one is not taken for another's.
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let (scheduler, number) = stream::find(stream)?;
        let moment = scheduler.record(number)?;
        let mark = mark.unwrap_or_else(|| Mark(NEXT.fetch_add(1, Ordering::Relaxed)));
        self.marks.lock().insert(mark.0, moment);
        Ok(mark)
    }

    fn reached(&self, mark: Mark) -> Result<bool> {
        self.moment(mark)?.is_reached()
    }

    fn wait_for_mark(&self, mark: Mark, next: *mut c_void) -> Result<()> {
        let (scheduler, number) = stream::find(next)?;
        scheduler.wait(number, &self.moment(mark)?)
    }

    fn unmark(&self, mark: Mark) {
        self.marks.lock().remove(&mark.0);
    }

    /// Of the same scheduler, as it must be for both to be in one capture.
    fn side_stream(&self, beside: *mut c_void) -> Result<*mut c_void> {
        let (scheduler, _) = stream::find(beside)?;
        let side = Stream::new(scheduler);
        let handle = side.handle();
        self.sides.lock().insert(handle as usize, side);
        Ok(handle)
    }

    fn give_side_stream_back(&self, stream: *mut c_void) {
        let side = self.sides.lock().remove(&(stream as usize));
        drop(side);
    }

    fn keep_for_graph(&self, stream: *mut c_void, kept: Arc<dyn Any + Send + Sync>) -> Result<()> {
        let (scheduler, number) = stream::find(stream)?;
        scheduler.keep(number, kept)
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

#[cfg(test)]
mod tests;
