//! The proxy's thread: what it serves, the commands that change that, and its loop.
//!
//! The connections are the thread's own, so that moving data takes no lock. Commands go through a queue that is looked at
//! only when its flag is up.

use super::connection::Driven;
use super::pace::{Pace, Rest};
use super::wake::Wake;
use super::{Client, Fault, LINGER};
use crate::bootstrap::Reply;
use crate::error::{Error, Result};
use crate::sys::thread::{self, Thread};
use parking_lot::Mutex;
use std::num::NonZeroU64;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Instant;

pub(super) enum Command {
    Add(Box<Served>),
    /// What is removed goes to who asked, so that it is dropped there.
    Remove {
        id: u64,
        reply: Option<Reply<Served>>,
    },
    Drain {
        id: u64,
        reply: Reply<Result<()>>,
    },
    End,
}

/// What others have of a proxy's thread.
pub(super) struct Shared {
    pub(super) wake: Wake,
    commands: Mutex<Vec<Command>>,
    /// There are commands.
    posted: AtomicBool,
    /// Changed under the lock of the commands, so that none is left in the queue.
    dead: AtomicBool,
    thread: AtomicI32,
}

impl Shared {
    pub(super) fn start() -> Result<(Arc<Shared>, Thread)> {
        let shared = Arc::new(Shared {
            wake: Wake::default(),
            commands: Mutex::default(),
            posted: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            thread: AtomicI32::new(0),
        });
        let body = shared.clone();
        let thread = thread::spawn(c"ossicle-proxy", move || run(&body))
            .map_err(|error| Error::system(format!("cannot start the proxy's thread: {error}")))?;
        Ok((shared, thread))
    }

    /// Gives the command back if there is no thread any more.
    pub(super) fn post(&self, command: Command) -> std::result::Result<(), Command> {
        let mut commands = self.commands.lock();
        if self.is_dead() {
            return Err(command);
        }
        commands.push(command);
        self.posted.store(true, Ordering::Release);
        drop(commands);
        self.wake.wake();
        Ok(())
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn is_this_thread(&self) -> bool {
        self.thread.load(Ordering::Acquire) == rustix::thread::gettid().as_raw_nonzero().get()
    }

    /// The thread's number, once it runs.
    #[cfg(test)]
    pub(super) fn thread_id(&self) -> Option<i32> {
        Some(self.thread.load(Ordering::Acquire)).filter(|id| *id != 0)
    }

    fn take(&self) -> Vec<Command> {
        if !self.posted.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut commands = self.commands.lock();
        self.posted.store(false, Ordering::Release);
        std::mem::take(&mut *commands)
    }

    fn die(&self) {
        let mut commands = self.commands.lock();
        self.dead.store(true, Ordering::Release);
        // Whoever waits for an answer sees that there will be none.
        drop(std::mem::take(&mut *commands));
    }
}

/// What a hold and its guards tell the thread.
#[derive(Default)]
pub(super) struct Needs {
    called: AtomicBool,
    /// Guards that live.
    pub(super) awake: AtomicU32,
}

impl Needs {
    pub(super) fn call(&self) {
        self.called.store(true, Ordering::Release);
    }

    fn was_called(&self) -> bool {
        self.called.load(Ordering::Acquire) && self.called.swap(false, Ordering::AcqRel)
    }
}

/// One hold's connections.
pub(super) struct Served {
    id: u64,
    connections: Vec<Driven>,
    client: Client,
    needs: Arc<Needs>,
    /// When the hold last had to be looked at for itself, or was first found not to need it.
    needed: Option<Instant>,
    /// It had to be at the last look.
    was_needed: bool,
    /// Something that a kernel filled is not sent.
    sending: bool,
    drain: Option<Reply<Result<()>>>,
    /// The first one.
    fault: Option<Error>,
}

impl Served {
    pub(super) fn new(id: u64, connections: Vec<Driven>, client: Client, needs: Arc<Needs>) -> Served {
        Served {
            id,
            connections,
            client,
            needs,
            needed: None,
            was_needed: false,
            sending: false,
            drain: None,
            fault: None,
        }
    }

    /// Looks at the connections if there is a reason; whether something happened, None without a reason.
    fn look(&mut self, now: Instant) -> Option<bool> {
        let called = self.needs.was_called();
        // Before the rings: a kernel that has left by now has published all that it filled, see the module's header.
        let need = called || self.needs.awake.load(Ordering::Acquire) > 0 || (self.client.outstanding)();
        // However long this thread was kept from running meanwhile: what was filled before the need ended is seen now.
        if need || self.was_needed {
            self.needed = Some(now);
        }
        self.was_needed = need;
        let needed = self.needed.is_some_and(|at| now.saturating_duration_since(at) < LINGER);
        if !(needed || self.sending || self.drain.is_some()) {
            return None;
        }
        let (mut moved, mut live) = (called, false);
        self.sending = false;
        for connection in &mut self.connections {
            match connection.advance() {
                Ok(more) => moved |= more,
                Err(fault) => tell(&self.client, &mut self.fault, fault),
            }
            live |= connection.is_live();
            self.sending |= connection.is_sending();
        }
        if self.drain.is_some() && (!needed || !live) && !self.sending {
            self.finish();
        }
        live.then_some(moved)
    }

    /// Says farewell to all receivers, and answers once they are told.
    fn finish(&mut self) {
        let mut told = true;
        for connection in &mut self.connections {
            match connection.say_farewell() {
                Ok(done) => told &= done,
                Err(fault) => tell(&self.client, &mut self.fault, fault),
            }
        }
        if let Some(reply) = self.drain.take_if(|_| told) {
            // Whoever asked may have given up.
            let _ = reply.send(self.fault.clone().map_or(Ok(()), Err));
        }
    }

    /// The thread ends by a defect.
    fn fail(&mut self) {
        let cause = Error::internal("the proxy's thread has ended by a defect, see the log");
        for connection in self.connections.iter_mut().filter(|connection| connection.is_live()) {
            let fault = connection.end(cause.clone());
            tell(&self.client, &mut self.fault, fault);
        }
    }
}

fn tell(client: &Client, first: &mut Option<Error>, fault: Fault) {
    first.get_or_insert_with(|| fault.error());
    (client.fault)(fault);
}

fn run(shared: &Shared) {
    let id = rustix::thread::gettid().as_raw_nonzero().get();
    shared.thread.store(id, Ordering::Release);
    // Naps are shorter than the 50 us that the kernel may add to them. A kernel that refuses makes them longer.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let mut served: Vec<Served> = Vec::new();
    if catch_unwind(AssertUnwindSafe(|| serve(shared, &mut served))).is_err() {
        shared.die();
        for served in &mut served {
            // A second panic would be the client's.
            let _ = catch_unwind(AssertUnwindSafe(|| served.fail()));
        }
    }
}

fn serve(shared: &Shared, served: &mut Vec<Served>) {
    let mut pace = Pace::default();
    loop {
        // Before anything is looked at: what comes later ends the sleep.
        let seen = shared.wake.seen();
        for command in shared.take() {
            match command {
                Command::Add(more) => served.push(*more),
                Command::Remove { id, reply } => remove(served, id, reply),
                Command::Drain { id, reply } => {
                    if let Some(found) = served.iter_mut().find(|served| served.id == id) {
                        found.drain = Some(reply);
                    }
                }
                Command::End => return,
            }
        }
        let now = Instant::now();
        let (mut moved, mut looked) = (false, false);
        for served in served.iter_mut() {
            if let Some(more) = served.look(now) {
                looked = true;
                moved |= more;
            }
        }
        if !looked {
            shared.wake.sleep(seen, None);
            continue;
        }
        match pace.handle_look(moved, now) {
            Rest::Yield => std::thread::yield_now(),
            Rest::Nap(limit) => shared.wake.sleep(seen, Some(limit)),
        }
    }
}

fn remove(served: &mut Vec<Served>, id: u64, reply: Option<Reply<Served>>) {
    let Some(found) = served.iter().position(|served| served.id == id) else {
        return;
    };
    let removed = served.swap_remove(found);
    if let Some(reply) = reply {
        // It is dropped here only if nobody waits.
        let _ = reply.send(removed);
    }
}
