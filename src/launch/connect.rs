//! Making an engine: what ranks tell each other, the checks on it, inboxes, links, templates.

use super::budget::{Claim, Page, Reservation};
use super::clique::Clique;
use super::layout::{Control, State};
use super::lending::Lending;
use super::settings::{self, Settings};
use super::templates::Own;
use super::{running, Engine, KernelMemory};
use crate::bootstrap::{Cancel, Session};
use crate::device::{Device, DeviceKind, Placement};
use crate::environment::switch;
use crate::error::{Code, Error, Result};
use crate::info;
use crate::plan::{self, Profile, Program};
use crate::topology::host::HostIdentity;
use crate::transport::{self, Geometry, Limit, PeerInbox, Reach, TwoShotGeometry};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// What every rank must know of every other before links are made.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RankInfo {
    place: String,
    host: HostIdentity,
    cuda: bool,
    uuid: [u8; 16],
    multiprocessors: u32,
    device: String,
    /// Whether this rank allows several ranks on its GPU.
    shares_gpu: bool,
    reach: Reach,
    settings: Settings,
    /// Random; rank 0's names the communicator.
    token: u64,
    /// It may lend its buffers.
    zero_copy: bool,
}

/// What a rank sends: itself, or why it cannot take part (code and sentence), so that every rank says the same.
type Introduced = std::result::Result<RankInfo, (i32, String)>;

/// This rank's share of `Introduction::payload`.
pub fn introduction(device: &Arc<dyn Device>, ctas: (Option<u32>, Option<u32>)) -> Vec<u8> {
    let introduced: Introduced = describe(device, ctas).map_err(|error| (error.code as i32, error.text));
    // Plain data of strings and numbers always has a JSON form.
    serde_json::to_vec(&introduced).unwrap_or_default()
}

fn describe(device: &Arc<dyn Device>, ctas: (Option<u32>, Option<u32>)) -> Result<RankInfo> {
    settings::check_choices()?;
    settings::wait_bound()?;
    let (p2p, shm) = settings::paths();
    let host = HostIdentity::of_this_process()?;
    let mut token = [0; 8];
    getrandom::fill(&mut token).map_err(|error| Error::system(format!("no random numbers: {error}")))?;
    Ok(RankInfo {
        place: format!("{}:{}", host.name, std::process::id()),
        host,
        cuda: device.kind() == DeviceKind::Cuda,
        uuid: device.uuid(),
        multiprocessors: device.multiprocessors(),
        device: device.describe(),
        shares_gpu: switch("NCCL_MULTI_RANK_GPU_ENABLE", false),
        reach: Reach::of_this_process(device.as_ref(), p2p, shm),
        settings: Settings::read(device.as_ref(), ctas)?,
        token: u64::from_ne_bytes(token),
        zero_copy: settings::zero_copy()?,
    })
}

/// The introductions of all ranks, or the error of the first that cannot take part.
fn parse(payloads: &[Vec<u8>]) -> Result<Vec<RankInfo>> {
    let one = |(rank, payload): (usize, &Vec<u8>)| match serde_json::from_slice::<Introduced>(payload) {
        Ok(Ok(info)) => Ok(info),
        Ok(Err((code, text))) => {
            let code = Code::from_raw(code).unwrap_or(Code::InternalError);
            Err(Error::new(code, text).within(format!("rank {rank}")))
        }
        Err(error) => Err(Error::internal(format!(
            "the introduction of rank {rank} does not parse: {error}"
        ))),
    };
    payloads.iter().enumerate().map(one).collect()
}

/// Contradictions between ranks; every rank sees the same table and comes to the same answer.
fn check(ranks: &[RankInfo]) -> Result<()> {
    let first = &ranks[0];
    for (rank, info) in ranks.iter().enumerate() {
        if info.host.digest != first.host.digest {
            return Err(Error::usage(format!(
                "rank 0 is on host {} and rank {rank} on host {}: the network between hosts is not built yet in this version \
                 of Ossicle",
                first.host, info.host
            )));
        }
        if info.cuda != first.cuda {
            return Err(Error::usage(format!(
                "rank 0 ({}) uses {} and rank {rank} ({}) uses {}: set OSSICLE_DEVICE alike on all ranks",
                first.place, first.device, info.place, info.device
            )));
        }
        let same = (0..rank).find(|other| info.cuda && ranks[*other].uuid == info.uuid);
        if let Some(other) = same.filter(|other| !info.shares_gpu || !ranks[*other].shares_gpu) {
            return Err(Error::usage(format!(
                "ranks {other} ({}) and {rank} ({}) both use {}: give each rank a GPU of its own, or set \
                 NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks",
                ranks[other].place, info.place, info.device
            )));
        }
    }
    Ok(())
}

/// What all ranks plan with, and the hold on the blocks that this rank's kernels may have of its GPU: where ranks share
/// one. Ranks that each have their own get the same always, whichever communicators came before.
fn budget(
    session: &Session,
    rank: u32,
    ranks: &[RankInfo],
    timeout: Duration,
    cancel: &Cancel,
) -> Result<(Profile, Option<Reservation>)> {
    let (own, settings) = (&ranks[rank as usize], &ranks[0].settings);
    let profile = |blocks| settings.profile(ranks.len() as u32, blocks);
    let capacity = plan::budget::capacity(own.multiprocessors);
    let gpus: HashSet<[u8; 16]> = ranks.iter().map(|info| info.uuid).collect();
    if gpus.len() == ranks.len() {
        let blocks = |info: &RankInfo| match ranks.len() {
            // A rank without peers waits for nobody and only copies.
            1 => capacity,
            _ => plan::budget::alone(info.multiprocessors),
        };
        let least = ranks.iter().map(blocks).min();
        return Ok((profile(least.unwrap_or(1)), None));
    }
    let claim = Claim {
        page: Page::of_this_user(own.uuid),
        device: own.device.clone(),
        capacity,
        communicator: ranks[0].token,
        rank,
        sharing: ranks.iter().filter(|info| info.uuid == own.uuid).count() as u32,
        overcommit: settings.overcommit,
        cancel,
    };
    let used = |blocks| profile(blocks).blocks;
    let exchange = |offer| session.all_gather(offer, timeout, cancel);
    let (blocks, reservation) = claim.agree(&used, &exchange)?;
    Ok((profile(blocks), Some(reservation)))
}

impl Engine {
    /// Collective over the session: allocates this rank's inbox, exchanges it, links to all peers. `payloads` are what
    /// `introduction` gave on each rank, in rank order.
    pub fn connect(
        device: Arc<dyn Device>,
        session: &Session,
        rank: u32,
        payloads: &[Vec<u8>],
        timeout: Duration,
        cancel: &Cancel,
    ) -> Result<Engine> {
        running::let_go();
        let ranks = parse(payloads)?;
        check(&ranks)?;
        let (profile, reservation) = budget(session, rank, &ranks, timeout, cancel)?;
        let reach: Vec<Reach> = ranks.iter().map(|info| info.reach.clone()).collect();
        let programs: Vec<Program> = (0..profile.ranks)
            .map(|peer| plan::ring_all_reduce(profile.ranks, peer))
            .collect();
        let limit = Limit {
            // Shorter than a gather's, so that a rank that waits in vain can still say so in the gather that follows.
            timeout: timeout / 2,
            cancel,
        };
        let links = transport::link(
            &device,
            rank as usize,
            &reach,
            geometry(&profile, &programs),
            &limit,
            &|payload| session.all_gather(Ok(payload), timeout, cancel),
        );
        // What an attempt that failed has opened.
        running::let_go();
        let links = links?;
        info!(
            Init,
            "rank {rank}: links to {} peers via {}: {}; {profile:?}",
            ranks.len() - 1,
            links.path.name(),
            links.reason
        );
        let zero_copy = ranks.iter().all(|info| info.zero_copy);
        let devices: Vec<[u8; 16]> = ranks.iter().map(|info| info.uuid).collect();
        let lending = Lending::new(device.as_ref(), links.path, &devices, zero_copy);
        info!(Init, "rank {rank}: {lending}");
        let places = ranks.into_iter().map(|info| info.place).collect();
        let inboxes = links.inboxes.clone();
        let mut engine = assemble(
            device.clone(),
            rank,
            places,
            profile,
            &programs,
            links.inboxes,
            Clique::of(links.communicator),
            lending,
        )
        .inspect_err(|_| running::put_down(device.as_ref(), inboxes))?;
        engine.reservation = reservation;
        Ok(engine)
    }
}

/// The engine of `rank` over opened inboxes, one a rank.
#[allow(clippy::too_many_arguments)]
pub(super) fn assemble(
    device: Arc<dyn Device>,
    rank: u32,
    places: Vec<String>,
    profile: Profile,
    programs: &[Program],
    inboxes: Vec<Arc<PeerInbox>>,
    clique: Arc<Clique>,
    lending: Lending,
) -> Result<Engine> {
    let state = device.clone().allocate(size_of::<State>(), Placement::Device)?;
    let control = device.clone().allocate(size_of::<Control>(), Placement::Pinned)?;
    let (state_address, control_address) = (state.address.cast::<State>(), control.address.cast::<Control>());
    let (report_after_ns, fail_when_late) = settings::wait_bound()?;
    // SAFETY: fresh, zeroed, aligned (the device hands out pages) and not yet known to any kernel.
    let settings = unsafe { &*control_address };
    settings.report_after_ns.store(report_after_ns, Ordering::Relaxed);
    settings
        .park_after_report
        .store(u32::from(fail_when_late), Ordering::Relaxed);
    for (started, inbox) in settings.started.iter().zip(&inboxes) {
        started.store(inbox.started(), Ordering::Relaxed);
    }
    let own = Own {
        rank,
        state: state_address,
        control: control_address,
        started: inboxes[rank as usize].started(),
        zero_copy: lending.is_on(),
    };
    let program = Box::new(own.program_work(&profile, programs, &inboxes));
    let one_shot = (profile.ranks > 1).then(|| Box::new(own.one_shot_work(&profile, &inboxes)));
    let two_shot = Box::new(own.two_shot_work(&profile, &inboxes));
    let engine = Engine {
        rank,
        places,
        device,
        check_pointers: switch("NCCL_CHECK_POINTERS", false),
        fail_when_late,
        profile,
        program,
        one_shot,
        two_shot,
        memory: Arc::new(KernelMemory {
            control,
            _state: state,
            inboxes,
        }),
        clique,
        lending,
        order: Arc::default(),
        launched: Arc::default(),
        faults_seen: AtomicU64::new(0),
        reservation: None,
    };
    running::enter(&engine);
    engine.clique.members.lock().enter(&engine);
    Ok(engine)
}

pub(super) fn geometry(profile: &Profile, programs: &[Program]) -> Geometry {
    debug_assert!(programs.iter().all(|program| program.slots_needed <= profile.slots));
    Geometry {
        ranks: profile.ranks as usize,
        lines: profile.lines as usize,
        channels: profile.blocks as usize,
        slots: profile.slots as usize,
        slot_bytes: profile.slot_bytes as usize,
        links: programs
            .iter()
            .map(|program| program.sends.len().max(program.recvs.len()))
            .max()
            .unwrap_or(0),
        two_shot: TwoShotGeometry {
            blocks: profile.blocks as usize,
            slot_bytes: profile.two_shot_slot_bytes as usize,
        },
    }
}
