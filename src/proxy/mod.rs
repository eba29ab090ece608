//! The CPU proxy: one thread moves slots between net rings and the network, for every communicator of a device.
//!
//! ```text
//! kernel --slots, tail--> ring --> Machine --> Transfer ~~~ network ~~~ Transfer --> Machine --> ring --slots, tail--> kernel
//!        <------head-----                     (this thread)                                           <-----head-----
//! ```
//!
//! - `ring`: the memory that a kernel and this thread share. `machine`: what is to be done next with its slots, without I/O.
//!   `connection` joins the two with a `Transfer`. `thread` looks at all connections in turn; `pace` says how often, `wake`
//!   is where it sleeps.
//! - One thread a process and device (all host devices count as one), "ossicle-proxy", started by the first `serve` and
//!   ended with the last `Hold`. A forked child has neither, and starts its own at need.
//! - It makes no CUDA call: rings lie in pinned memory, which host and device see under one address.
//!
//! When it looks and when it sleeps. A hold's rings are looked at while
//!
//! 1. the client says that a kernel is outstanding: launched, and not counted by `Control::left`, or
//! 2. an `Awake` lives: graphs with the rank's kernels may be replayed without a call, or
//! 3. something that a kernel filled is not sent, or `drain` was asked for, or
//! 4. one of the first two held, or `wake` was called, within the last `LINGER`.
//!
//! How often is in `pace`: again and again at first, then every 20 us, at most 1 ms apart. While nothing of this holds for any hold, the
//! thread sleeps on a futex without a limit, and costs nothing. Why no kernel then waits for it for ever:
//!
//! - A launch raises the client's count and then calls `wake`. Whatever that finds the thread at, it looks at the client
//!   once more before it sleeps (`wake.rs` has the argument), sees 1, and stays until the kernel has left. If the kernel
//!   has left already, 4 makes it look at the rings.
//! - A kernel that leaves may leave filled slots behind, which peers wait for. Its count and its tails are different
//!   words, and a GPU tells the count without a release (`tell_host` in `cuda/core/memory.h`); so for `LINGER`, which is
//!   a thousand times what a store needs to land, the tails are looked at again (4), and then until all is sent (3).
//! - What peers send while no kernel of this rank is outstanding stays in the sockets' buffers, or with the peer: the
//!   kernel that waits for it comes with a launch (1) or in a replay (2).

mod connection;
mod fault;
mod machine;
mod pace;
mod ring;
#[cfg(test)]
mod tests;
mod thread;
mod wake;

pub use connection::Connection;
pub use fault::Fault;
pub use machine::{Breach, Direction, Machine};
pub use ring::{Ring, RingGeometry};

use crate::bootstrap::{answer_pair, Cancel, NoAnswer};
use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use crate::sys::thread::Thread;
use connection::Driven;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thread::{Command, Needs, Served, Shared};

/// For how long a hold's rings are looked at after it needs it no more.
const LINGER: Duration = Duration::from_millis(2);
/// How often a caller that drains looks at its `Cancel`.
const LOOK: Duration = Duration::from_millis(50);

/// Whose connection it is, by ranks of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    pub rank: u32,
    pub peer: u32,
    pub channel: u32,
}

/// The rank that the connections belong to, as the thread asks and tells it.
pub struct Client {
    /// Whether a kernel of this rank may be running or waiting in a stream. Called at every look: it only reads atomics.
    pub outstanding: Box<dyn Fn() -> bool + Send>,
    /// At most once a connection, which is then left alone. It neither waits nor calls the driver.
    pub fault: Box<dyn Fn(Fault) + Send>,
}

/// A proxy's thread, as long as somebody holds it.
struct Running {
    key: (DeviceKind, [u8; 16]),
    shared: Arc<Shared>,
    thread: Thread,
    holds: usize,
}

static RUNNING: ProcessLocal<Mutex<Vec<Running>>> = ProcessLocal::new();

/// Lets the device's proxy, which is started if there is none, move the slots of these connections.
pub fn serve(device: &Arc<dyn Device>, connections: Vec<Connection>, client: Client) -> Result<Hold> {
    let key = match device.kind() {
        DeviceKind::Host => (DeviceKind::Host, [0; 16]),
        kind => (kind, device.uuid()),
    };
    serve_on(key, connections, client)
}

fn serve_on(key: (DeviceKind, [u8; 16]), connections: Vec<Connection>, client: Client) -> Result<Hold> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let driven: Result<Vec<Driven>> = connections.into_iter().map(Driven::new).collect();
    let needs = Arc::new(Needs::default());
    let served = Box::new(Served::new(id, driven?, client, needs.clone()));
    let mut running = RUNNING.get().lock();
    running.retain(|running| !running.shared.is_dead());
    let found = match running.iter().position(|running| running.key == key) {
        Some(found) => found,
        None => {
            let (shared, thread) = Shared::start()?;
            running.push(Running {
                key,
                shared,
                thread,
                holds: 0,
            });
            running.len() - 1
        }
    };
    let proxy = &mut running[found];
    if proxy.shared.post(Command::Add(served)).is_err() {
        return Err(Error::internal("the proxy's thread has ended by a defect, see the log"));
    }
    proxy.holds += 1;
    Ok(Hold {
        id,
        process: std::process::id(),
        shared: proxy.shared.clone(),
        needs,
    })
}

/// Connections in the proxy's care. Dropped, it returns when the thread touches none of their memory any more; so it must
/// not be dropped under a lock that `Client::fault` takes.
pub struct Hold {
    id: u64,
    process: u32,
    shared: Arc<Shared>,
    needs: Arc<Needs>,
}

impl Hold {
    /// A kernel was, or is about to be, put into a stream: `Client::outstanding` says so already. Costs an atomic addition,
    /// and a system call only if the thread sleeps.
    pub fn wake(&self) {
        self.needs.call();
        self.shared.wake.wake();
    }

    /// Makes the thread look until the guard is dropped, which calls nothing: it may stand in what a graph keeps.
    pub fn keep_awake(&self) -> Awake {
        self.needs.awake.fetch_add(1, Ordering::Release);
        self.wake();
        Awake(self.needs.clone())
    }

    /// Waits until no kernel is outstanding and everything that kernels filled is on its way, and tells the peers that
    /// nothing follows: they take the end of the connections for no failure. After it the hold can only be dropped.
    pub fn drain(&self, deadline: Instant, cancel: &Cancel) -> Result<()> {
        let (reply, answer) = answer_pair();
        // Should the thread have ended, so has the reply.
        let _ = self.shared.post(Command::Drain { id: self.id, reply });
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match answer.wait(left.min(LOOK)) {
                Ok(outcome) => return outcome,
                Err(NoAnswer::Gone) => {
                    return Err(Error::internal("the proxy's thread has ended by a defect, see the log"));
                }
                Err(NoAnswer::Late) if cancel.is_set() => {
                    return Err(Error::usage("the call was ended by ncclCommAbort"));
                }
                Err(NoAnswer::Late) if left.is_zero() => {
                    return Err(Error::remote(
                        "what this rank had to send was not taken in time: a peer has not made the calls that this rank has",
                    ));
                }
                Err(NoAnswer::Late) => {}
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a forked child there is no thread, and what it had is out of reach.
        if self.process != std::process::id() {
            return;
        }
        let id = self.id;
        if self.shared.is_this_thread() {
            // Whoever owned the hold ended in `Client::fault`: the thread, which would wait for itself, lets go when it can.
            let _ = self.shared.post(Command::Remove { id, reply: None });
        } else {
            let (reply, answer) = answer_pair();
            let _ = self.shared.post(Command::Remove { id, reply: Some(reply) });
            // The thread waits for nobody, and answers as soon as it has gone once over its connections. What it gives back
            // is dropped here, or with the thread.
            while let Err(NoAnswer::Late) = answer.wait(Duration::from_secs(1)) {}
        }
        let mut running = RUNNING.get().lock();
        let Some(found) = running
            .iter()
            .position(|running| Arc::ptr_eq(&running.shared, &self.shared))
        else {
            return;
        };
        running[found].holds -= 1;
        if running[found].holds > 0 {
            return;
        }
        let last = running.swap_remove(found);
        drop(running);
        let _ = last.shared.post(Command::End);
        if !last.shared.is_this_thread() {
            last.thread.join();
        }
    }
}

/// Keeps the thread looking at a hold's rings. It may outlive the hold, without effect then.
pub struct Awake(Arc<Needs>);

impl Drop for Awake {
    fn drop(&mut self) {
        self.0.awake.fetch_sub(1, Ordering::Release);
    }
}
