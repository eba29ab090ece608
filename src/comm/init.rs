//! Making communicators: from ids and ranks to a handle that is ready.
//!
//! Every communicator is made by a thread of its own, for which a blocking call waits and a non-blocking one does not.
//! So the caller's stack may be small, several ranks of one thread are made side by side, and a panic stays in there.
//!
//! ```text
//! introduction -> join -> connect -> gather (all connected, or whose error) -> watch -> Ready
//! ```
//!
//! A rank that fails hands its error to the gather, so that every rank fails and says which one was the cause. Nobody
//! passes the gather before all ranks are set up: a kernel may wait for a peer's memory from the first launch on.

use super::communicator::{Communicator, Phase};
use super::{life, registry, Progress, RawComm};
use crate::abi::config::Config;
use crate::abi::entry::panic_text;
use crate::bootstrap::{self, Introduction, Session, UniqueId};
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::launch::{self, Engine};
use crate::observe::log::{self, Level};
use crate::{environment, group, info};
use parking_lot::Once;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// What `ncclGetVersion` reports; ranks of another version are refused.
const VERSION: u32 = 22809;
const VERSION_LINE: &str = "NCCL version 2.28.9+cuda13.0";
/// Communicators of more ranks are not built yet.
const MAX_RANKS: i32 = 16;
const DEFAULT_TIMEOUT_MS: u64 = 30_000;
/// How long a rank that failed waits for the others to take its error, which they do at once unless they failed too.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(5);

/// What a communicator's configuration says to its engine.
struct Wishes {
    /// minCTAs and maxCTAs.
    ctas: (Option<u32>, Option<u32>),
    host_id: Option<String>,
}

/// A communicator that was asked for, its values checked.
pub(crate) struct Init {
    /// Where the caller wants the handle; NULL was written there already.
    slot: *mut RawComm,
    communicator: Arc<Communicator>,
    ids: Vec<UniqueId>,
    wishes: Wishes,
    timeout: Duration,
}

impl Init {
    pub(crate) fn blocking(&self) -> bool {
        self.communicator.blocking
    }
}

/// `ncclGetUniqueId`.
pub fn create_unique_id() -> Result<[u8; 128]> {
    bootstrap::create_unique_id().map(|id| id.0)
}

/// `ncclCommInitRank` and its kin. `slot` must be NULL or writable until the outermost group ends; it is NULL after an
/// error. The device is the calling thread's current one.
pub fn init_rank(slot: *mut RawComm, ranks: i32, ids: Vec<[u8; 128]>, rank: i32, config: Config) -> Result<Progress> {
    clear(slot, 1)
        .and_then(|()| check_shape(ranks, ids.len(), rank))
        .and_then(|()| {
            let ids = ids.into_iter().map(UniqueId).collect();
            let init = ask(slot, ranks, ids, rank, device::open(None)?, config)?;
            group::init(vec![init])
        })
        .map_err(group::noted)
}

/// `ncclCommInitAll`: all ranks of a communicator in this process, `slots` an array of `devices` handles. All or none.
pub fn init_all(slots: *mut RawComm, devices: i32, list: Option<&[i32]>) -> Result<()> {
    let all = || {
        let count = usize::try_from(devices).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| Error::argument(format!("ndev is {devices}; it must be at least 1")))?;
        // A mistaken ndev must not become a write far beyond what any caller has.
        clear(slots, count.min(MAX_RANKS as usize))?;
        check_ranks(devices)?;
        let named: Vec<i32> = list.map_or_else(|| (0..devices).collect(), <[i32]>::to_vec);
        let shared = environment::switch("NCCL_MULTI_RANK_GPU_ENABLE", false);
        check_devices(&named, devices, device::count()?, shared)?;
        let ids = vec![bootstrap::create_unique_id()?];
        let config = Config::from_environment();
        let inits = named.iter().zip(0..).map(|(ordinal, rank)| {
            let slot = slots.wrapping_add(rank as usize);
            let device = device::open(Some(*ordinal))?;
            ask(slot, devices, ids.clone(), rank, device, config.clone())
        });
        group::init(inits.collect::<Result<_>>()?).map(drop)
    };
    all().map_err(group::noted)
}

/// Writes NULL to `count` handles.
fn clear(slots: *mut RawComm, count: usize) -> Result<()> {
    if slots.is_null() {
        return Err(Error::argument(
            "comm is NULL; it must point to where the communicator is to be written",
        ));
    }
    for i in 0..count {
        // SAFETY: the caller vouches for `count` handles at `slots`, aligned or not.
        unsafe { slots.wrapping_add(i).write_unaligned(null_mut()) };
    }
    Ok(())
}

fn check_shape(ranks: i32, ids: usize, rank: i32) -> Result<()> {
    if ranks < 1 {
        return Err(Error::argument(format!("nranks is {ranks}; it must be at least 1")));
    }
    if !(0..ranks).contains(&rank) {
        return Err(Error::argument(format!(
            "rank is {rank}; with nranks {ranks} it must be 0 to {}",
            ranks - 1
        )));
    }
    if ids < 1 || ids > ranks as usize {
        return Err(Error::argument(format!(
            "nId is {ids}; with nranks {ranks} it must be 1 to {ranks}"
        )));
    }
    check_ranks(ranks)
}

fn check_ranks(ranks: i32) -> Result<()> {
    if ranks > MAX_RANKS {
        return Err(Error::usage(format!(
            "nranks is {ranks}; this version supports at most {MAX_RANKS} ranks"
        )));
    }
    Ok(())
}

/// Whether `named` are `devices` different devices out of `available`; the same one twice only with `shared`.
fn check_devices(named: &[i32], devices: i32, available: i32, shared: bool) -> Result<()> {
    if named.len() != devices as usize {
        return Err(Error::argument(format!(
            "devlist has {} entries, but ndev is {devices}",
            named.len()
        )));
    }
    for (i, device) in named.iter().enumerate() {
        if !(0..available).contains(device) {
            return Err(Error::argument(format!(
                "devlist[{i}] is device {device}; this process has {available}, numbered from 0"
            )));
        }
        if let Some(first) = named[..i].iter().position(|other| other == device).filter(|_| !shared) {
            return Err(Error::usage(format!(
                "devlist[{first}] and devlist[{i}] are both device {device}; set NCCL_MULTI_RANK_GPU_ENABLE=1 to let ranks share one"
            )));
        }
    }
    Ok(())
}

fn ask(
    slot: *mut RawComm,
    ranks: i32,
    ids: Vec<UniqueId>,
    rank: i32,
    device: Arc<dyn Device>,
    config: Config,
) -> Result<Init> {
    let timeout_ms = environment::number("OSSICLE_INIT_TIMEOUT_MS", DEFAULT_TIMEOUT_MS)?;
    if timeout_ms == 0 {
        return Err(Error::usage(
            "OSSICLE_INIT_TIMEOUT_MS is 0; it takes milliseconds from 1",
        ));
    }
    let wishes = Wishes {
        ctas: (config.min_ctas, config.max_ctas),
        host_id: config.host_id,
    };
    // Both are checked to be small and not negative.
    let communicator = Communicator::new(rank as u32, ranks as u32, device, config.blocking, config.comm_name);
    Ok(Init {
        slot,
        communicator: Arc::new(communicator),
        ids,
        wishes,
        timeout: Duration::from_millis(timeout_ms),
    })
}

/// Makes the communicators of one group, all blocking or all not. All or none: after an error every handle is NULL.
pub(crate) fn run(inits: Vec<Init>) -> Result<Progress> {
    let blocking = inits.iter().all(Init::blocking);
    let mut begun = Vec::with_capacity(inits.len());
    let mut outcome = Ok(Progress::Done);
    for init in inits {
        match begin(init) {
            Ok(member) => begun.push(member),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    if outcome.is_ok() {
        outcome = if blocking {
            await_all(&begun)
        } else {
            Ok(Progress::InProgress)
        };
    }
    for (slot, handle, _) in begun {
        match &outcome {
            // SAFETY: the caller vouches for `slot` until the outermost group has ended, which is now.
            Ok(_) => unsafe { slot.write_unaligned(handle) },
            // Those that were made go too; the error that counts is the one that is returned.
            Err(_) => drop(life::discard(handle)),
        }
    }
    outcome
}

type Begun = (*mut RawComm, RawComm, Arc<Communicator>);

fn begin(init: Init) -> Result<Begun> {
    let Init {
        slot,
        communicator,
        ids,
        wishes,
        timeout,
    } = init;
    let handle = registry()?.insert(Arc::clone(&communicator))?;
    let address = handle.addr();
    let body = move |communicator: &Communicator| make(communicator, address, &ids, &wishes, timeout);
    if let Err(error) = communicator.initialise(body) {
        drop(communicator);
        life::discard(handle)?;
        return Err(error);
    }
    Ok((slot, handle, communicator))
}

fn await_all(begun: &[Begun]) -> Result<Progress> {
    for (_, _, communicator) in begun {
        communicator.join_initialiser();
    }
    let failed = begun
        .iter()
        .find(|(_, _, communicator)| communicator.phase() != Phase::Ready);
    failed.map_or(Ok(Progress::Done), |(_, _, communicator)| {
        let cause = communicator.alarm.sticky().cloned();
        Err(cause.unwrap_or_else(|| Error::internal(format!("{communicator} was not made, and nothing says why"))))
    })
}

/// The body of the thread that makes a communicator.
fn make(communicator: &Communicator, address: usize, ids: &[UniqueId], wishes: &Wishes, timeout: Duration) {
    say_version(communicator.rank);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        establish(communicator, address, ids, wishes, timeout)
    }));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic_text(panic.as_ref());
        Err(Error::internal(format!(
            "a defect stopped the making of {communicator}: {text}"
        )))
    });
    let Err(error) = outcome else { return };
    if communicator.blocking {
        // The call that waits returns it.
        communicator.alarm.fail(error);
    } else {
        communicator.alarm.announce(error);
    }
    communicator.become_failed();
}

fn establish(
    communicator: &Communicator,
    address: usize,
    ids: &[UniqueId],
    wishes: &Wishes,
    timeout: Duration,
) -> Result<()> {
    let cancel = &communicator.alarm.cancel;
    let introduction = Introduction {
        rank: communicator.rank,
        ranks: communicator.ranks,
        version: VERSION,
        layout: layout(),
        place: format!("{}:{}", crate::topology::host::short_name(), std::process::id()),
        payload: launch::introduction(&communicator.device, wishes.ctas, wishes.host_id.as_deref()),
    };
    let (session, introductions) = Session::join(ids, introduction, timeout, cancel)?;
    let payloads: Vec<Vec<u8>> = introductions
        .into_iter()
        .map(|introduction| introduction.payload)
        .collect();
    let device = Arc::clone(&communicator.device);
    let alarm = Arc::downgrade(&communicator.alarm);
    let on_fault = Box::new(move |fault| {
        if let Some(alarm) = alarm.upgrade() {
            alarm.network_fault(fault);
        }
    });
    let connected = Engine::connect(
        device,
        &session,
        communicator.rank,
        &payloads,
        timeout,
        cancel,
        on_fault,
    );
    let limit = if connected.is_ok() {
        timeout
    } else {
        timeout.min(HAND_OVER_TIMEOUT)
    };
    let own = connected.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    let gathered = session.all_gather(own, limit, cancel);
    let engine = match (connected, gathered) {
        (Ok(engine), Ok(_)) => engine,
        (Err(error), _) | (Ok(_), Err(error)) => {
            session.abort();
            return Err(error);
        }
    };
    communicator.become_ready(engine, session);
    say_complete(communicator, address, ids);
    Ok(())
}

/// Fingerprint of this build's wire and memory layouts: builds of different versions do not mix.
fn layout() -> u64 {
    digest(concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).as_bytes()) ^ launch::layout::FINGERPRINT
}

fn digest(bytes: &[u8]) -> u64 {
    use sha2::Digest;
    sha2::Sha256::digest(bytes)
        .iter()
        .take(8)
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The lines that scripts look for: from rank 0 at VERSION and WARN, from any rank from INFO on; once a process.
fn say_version(rank: u32) {
    static SAID: Once = Once::new();
    if log::enabled(Level::Info, None) || rank == 0 && log::enabled(Level::Version, None) {
        SAID.call_once(|| {
            log::write(Level::Version, format_args!("{VERSION_LINE}"));
            log::write(Level::Version, format_args!("Ossicle {}", env!("CARGO_PKG_VERSION")));
        });
    }
}

/// The commId is a digest, since the id itself carries the secret.
fn say_complete(communicator: &Communicator, address: usize, ids: &[UniqueId]) {
    let Communicator {
        rank,
        ranks,
        device,
        name,
        ..
    } = communicator;
    info!(
        Init,
        "ncclCommInitRank comm {address:#x} rank {rank} nranks {ranks} cudaDev {} busId {} commId {:#018x} name {} - Init COMPLETE",
        device.ordinal(),
        device.describe(),
        ids.first().map_or(0, |id| digest(&id.0)),
        name.as_deref().unwrap_or("none"),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn code(result: Result<()>) -> Option<Code> {
        result.err().map(|error| error.code)
    }

    #[test]
    fn shapes_that_no_communicator_has() {
        use Code::{InvalidArgument, InvalidUsage};
        for (ranks, ids, rank, expected) in [
            (1, 1, 0, None),
            (16, 16, 15, None),
            (0, 1, 0, Some(InvalidArgument)),
            (-5, 1, 0, Some(InvalidArgument)),
            (2, 1, -1, Some(InvalidArgument)),
            (2, 1, 2, Some(InvalidArgument)),
            (2, 0, 0, Some(InvalidArgument)),
            (2, 3, 0, Some(InvalidArgument)),
            (17, 1, 0, Some(InvalidUsage)),
            (i32::MAX, 1, 0, Some(InvalidUsage)),
        ] {
            assert_eq!(code(check_shape(ranks, ids, rank)), expected, "{ranks} {ids} {rank}");
        }
    }

    #[test]
    fn devices_of_init_all() {
        use Code::{InvalidArgument, InvalidUsage};
        assert_eq!(check_devices(&[0, 1], 2, 2, false), Ok(()));
        assert_eq!(check_devices(&[1, 1], 2, 2, true), Ok(()));
        assert_eq!(code(check_devices(&[0], 2, 2, false)), Some(InvalidArgument));
        for missing in [-1, 2, 99] {
            let error = check_devices(&[0, missing], 2, 2, true).unwrap_err();
            assert_eq!(error.code, InvalidArgument);
            assert!(
                error.text.contains(&format!("devlist[1] is device {missing}")),
                "{error}"
            );
        }
        let error = check_devices(&[3, 0, 3], 3, 4, false).unwrap_err();
        assert_eq!(error.code, InvalidUsage);
        assert!(
            error.text.contains("devlist[0] and devlist[2] are both device 3"),
            "{error}"
        );
    }

    #[test]
    fn a_refused_call_leaves_null() {
        let mut comm: RawComm = std::ptr::without_provenance_mut(1);
        let error = init_rank(&mut comm, 2, vec![[0; 128]], 2, Config::default()).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(comm.is_null());
        let none = init_rank(null_mut(), 1, vec![[0; 128]], 0, Config::default()).unwrap_err();
        assert!(none.text.contains("comm is NULL"), "{none}");
        assert_eq!(init_all(null_mut(), 1, None).unwrap_err().code, Code::InvalidArgument);
        assert_eq!(init_all(&mut comm, 0, None).unwrap_err().code, Code::InvalidArgument);
    }
}
