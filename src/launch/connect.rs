//! Making an engine: what ranks tell each other, the checks on it, inboxes, links, templates.

use super::budget::{Claim, Page, Reservation};
use super::clique::Clique;
use super::layout::{Control, State};
use super::lending::{self, Lending};
use super::net_links::{Crossings, NetLinks, Network, OnFault};
use super::network::{self, Driver, Net};
use super::settings::{self, Settings};
use super::templates::{Own, Reached, Ring};
use super::{running, Engine, KernelMemory};
use crate::bootstrap::{Cancel, Session};
use crate::device::{Device, DeviceKind, Memory, Placement};
use crate::environment::switch;
use crate::error::{Code, Error, Result};
use crate::info;
use crate::initiated::{self, Opened, Poster};
use crate::plan::{self, Profile};
use crate::proxy::RingGeometry;
use crate::topology::host::{self, HostIdentity};
use crate::topology::Hosts;
use crate::transport::net::{self, Listener};
use crate::transport::{Geometry, Limit, Linking, Links, PeerInbox, Reach, TwoShotGeometry};
use crate::warning;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    net: Option<Net>,
    /// The software HCA joins hosts that are faked on one.
    machine: [u8; 32],
    /// Random; rank 0's names the communicator.
    token: u64,
    /// It may lend its buffers.
    zero_copy: bool,
}

/// What a rank sends: itself, or why it cannot take part (code and sentence), so that every rank says the same.
type Introduced = std::result::Result<RankInfo, (i32, String)>;

/// This rank's share of `Introduction::payload`. `host` fakes the host that it is on.
pub fn introduction(device: &Arc<dyn Device>, ctas: (Option<u32>, Option<u32>), host: Option<&str>) -> Vec<u8> {
    let introduced: Introduced = describe(device, ctas, host).map_err(|error| (error.code as i32, error.text));
    // Plain data of strings and numbers always has a JSON form.
    serde_json::to_vec(&introduced).unwrap_or_default()
}

fn describe(device: &Arc<dyn Device>, ctas: (Option<u32>, Option<u32>), host: Option<&str>) -> Result<RankInfo> {
    settings::wait_bound()?;
    let net = Net::read()?;
    let (p2p, shm) = settings::paths();
    let host = HostIdentity::of_rank(host)?;
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
        net,
        machine: host::machine()?,
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
    hosts: &Hosts,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<(Profile, Option<Reservation>)> {
    let (own, settings) = (&ranks[rank as usize], &ranks[0].settings);
    let profile = |blocks| settings.profile(ranks.len() as u32, hosts.count() as u32, blocks);
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

/// Who drives the network and what goes over it, said once a communicator where the switch asks for something else.
fn choose_driver(rank: u32, ranks: &[RankInfo], hosts: &Hosts) -> Result<(Driver, Net)> {
    if hosts.count() == 1 {
        return Ok((Driver::Proxy, Net::Socket));
    }
    let asked: Vec<Option<Net>> = ranks.iter().map(|info| info.net).collect();
    let initiated = ranks[0].settings.initiated;
    let one_machine = ranks.iter().all(|info| info.machine == ranks[0].machine);
    let net = network::agree(&asked, initiated, one_machine)?;
    let driven = network::driver(initiated, net);
    let (hosts, driver, reason) = (hosts.count(), driven.driver.name(), driven.reason);
    match (rank, driven.fallen_back) {
        (0, true) => warning!("{hosts} hosts over {}: {driver} ({reason})", net.name()),
        _ => info!(
            Init,
            "rank {rank}: {hosts} hosts over {}: {driver} ({reason})",
            net.name()
        ),
    }
    Ok((driven.driver, net))
}

fn say_links(rank: u32, hosts: &Hosts, links: &Links, profile: &Profile) {
    info!(
        Init,
        "rank {rank}: links to {} peers of this host via {}: {}; {profile:?}",
        hosts.neighbours(rank).len() - 1,
        links.path.name(),
        links.reason
    );
}

/// One rank's part in the making of links to other hosts.
struct Crossing<'a> {
    device: &'a Arc<dyn Device>,
    session: &'a Session,
    crossings: Crossings,
    geometry: RingGeometry,
    timeout: Duration,
    limit: &'a Limit<'a>,
}

impl Crossing<'_> {
    /// Collective where there are several hosts: whoever waits in vain for a rank that failed learns the cause in a gather.
    fn cross(
        self,
        hosts: &Hosts,
        over: (Driver, Net),
        listener: Option<Listener>,
        names: &[Option<net::Name>],
    ) -> Result<Option<NetLinks>> {
        match over {
            _ if hosts.count() == 1 => Ok(None),
            (Driver::Kernel, _) => self.over_hca(Poster::Kernel),
            (Driver::Proxy, Net::Hca) => self.over_hca(Poster::Cpu),
            (Driver::Proxy, _) => self.over_sockets(listener, names),
        }
    }

    fn gather(&self, payload: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        self.session.all_gather(payload, self.timeout, self.limit.cancel)
    }

    fn over_sockets(mut self, listener: Option<Listener>, names: &[Option<net::Name>]) -> Result<Option<NetLinks>> {
        let crossings = std::mem::take(&mut self.crossings);
        let establish =
            |listener| NetLinks::establish(self.device, crossings, self.geometry, listener, names, self.limit);
        let links = listener.map(establish).transpose();
        self.gather(links.as_ref().map(|_| Vec::new()).map_err(Error::clone))?;
        links
    }

    /// Ranks without any such link take part in the gathers.
    fn over_hca(self, poster: Poster) -> Result<Option<NetLinks>> {
        let gather = |payload| self.gather(payload);
        let open = || NetLinks::open_hca(self.device, &self.crossings, self.geometry, poster);
        let opened = (!self.crossings.is_empty()).then(open).transpose();
        let name = opened
            .as_ref()
            .map(|opened| opened.as_ref().map(|opened| opened.name()));
        // Plain data of strings and numbers always has a JSON form.
        let told = gather(
            name.map(|name| serde_json::to_vec(&name).unwrap_or_default())
                .map_err(Error::clone),
        )?;
        let heard = told.iter().zip(0..).map(|(bytes, rank): (_, u32)| {
            serde_json::from_slice(bytes)
                .map_err(|error| Error::internal(format!("the queues that rank {rank} tells of do not parse: {error}")))
        });
        let names: Result<Vec<Option<initiated::Name>>> = heard.collect();
        let connect = |opened: Option<Opened>| {
            let names = names?;
            let links = opened.map(|opened| opened.connect(self.device.as_ref(), &names, self.limit));
            links.transpose()
        };
        let connected = opened.and_then(connect);
        // Nobody posts before all can take it.
        gather(connected.as_ref().map(|_| Vec::new()).map_err(Error::clone))?;
        let over = |links| NetLinks::over_hca(Arc::new(links), self.geometry, poster);
        connected.and_then(|links| links.map(over).transpose())
    }
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
        on_fault: OnFault,
    ) -> Result<Engine> {
        running::let_go();
        let ranks = parse(payloads)?;
        check(&ranks)?;
        let hosts = Hosts::group(ranks.iter().map(|info| &info.host));
        let over = choose_driver(rank, &ranks, &hosts)?;
        let (profile, reservation) = budget(session, rank, &ranks, &hosts, timeout, cancel)?;
        let reach: Vec<Reach> = ranks.iter().map(|info| info.reach.clone()).collect();
        let ring = Ring::new(hosts.ring());
        let crossings = Crossings::of(rank, &ring.all_reduce[rank as usize], &hosts);
        let (listener, net) = match over {
            _ if crossings.is_empty() => (None, None),
            (Driver::Kernel, _) | (_, Net::Hca) => (None, None),
            _ => Listener::open(session.derive("net")).map(|(listener, name)| (Some(listener), Some(name)))?,
        };
        let limit = Limit {
            // Shorter than a gather's, so that a rank that waits in vain can still say so in the gather that follows.
            timeout: timeout / 2,
            cancel,
        };
        let linking = Linking {
            device: &device,
            rank,
            reach: &reach,
            hosts: &hosts,
            geometry: geometry(&profile, &ring, hosts.neighbours(rank)),
            net,
            limit: &limit,
            gather: &|payload| session.all_gather(Ok(payload), timeout, cancel),
        };
        let links = linking.link();
        // What an attempt that failed has opened.
        running::let_go();
        let links = links?;
        say_links(rank, &hosts, &links, &profile);
        let zero_copy = ranks.iter().all(|info| info.zero_copy);
        let devices: Vec<[u8; 16]> = ranks.iter().map(|info| info.uuid).collect();
        let lending = Lending::new(device.as_ref(), (links.path, profile.hosts), &devices, zero_copy);
        info!(Init, "rank {rank}: {lending}");
        let inboxes: Vec<Arc<PeerInbox>> = links.inboxes.iter().flatten().cloned().collect();
        let crossing = Crossing {
            device: &device,
            session,
            crossings,
            geometry: net_geometry(&profile),
            timeout,
            limit: &limit,
        };
        let net = crossing.cross(&hosts, over, listener, &links.net);
        let tokens: Vec<u8> = ranks.iter().flat_map(|info| info.token.to_ne_bytes()).collect();
        let assembled = net.and_then(|net| {
            assemble(Parts {
                device: device.clone(),
                rank,
                places: ranks.into_iter().map(|info| info.place).collect(),
                profile,
                ring: &ring,
                inboxes: links.inboxes,
                clique: Clique::of(tokens),
                lending,
                net: net.map(|links| (links, on_fault)),
            })
        });
        let mut engine = assembled.inspect_err(|_| running::put_down(device.as_ref(), inboxes))?;
        engine.reservation = reservation;
        Ok(engine)
    }
}

/// What an engine is made of.
pub(super) struct Parts<'a> {
    pub(super) device: Arc<dyn Device>,
    pub(super) rank: u32,
    pub(super) places: Vec<String>,
    pub(super) profile: Profile,
    pub(super) ring: &'a Ring,
    /// Opened, by rank; None on other hosts.
    pub(super) inboxes: Vec<Option<Arc<PeerInbox>>>,
    pub(super) clique: Arc<Clique>,
    pub(super) lending: Lending,
    pub(super) net: Option<(NetLinks, OnFault)>,
}

pub(super) fn assemble(parts: Parts) -> Result<Engine> {
    let Parts {
        device,
        rank,
        places,
        profile,
        ring,
        inboxes,
        clique,
        lending,
        net,
    } = parts;
    let state = device.clone().allocate(size_of::<State>(), Placement::Device)?;
    let control = device.clone().allocate(size_of::<Control>(), Placement::Pinned)?;
    let fail_when_late = set_up(&control, &inboxes)?;
    let reached = Reached {
        inboxes: &inboxes,
        net: net.as_ref().map(|(links, _)| links),
    };
    let own = Own {
        rank,
        state: state.address.cast(),
        control: control.address.cast(),
        started: reached.inbox(rank)?.started(),
        zero_copy: lending.is_on(),
    };
    let programs = Box::new(own.programs(&profile, ring, &reached)?);
    let within_host = profile.hosts == 1;
    let one_shot = (within_host && profile.ranks > 1).then(|| Box::new(own.one_shot_work(&profile, &inboxes)));
    let two_shot = within_host.then(|| Box::new(own.two_shot_work(&profile, &inboxes)));
    let memory = Arc::new(KernelMemory {
        control,
        _state: state,
        inboxes,
        _net: net.as_ref().map(|(links, _)| links.memory()),
        gone: lending::Gone::default(),
    });
    let launched = Arc::default();
    let begin = |(links, on_fault)| Network::begin(&device, links, &memory, &launched, on_fault);
    let network = net.map(begin).transpose()?;
    let engine = Engine {
        rank,
        places,
        device,
        check_pointers: switch("NCCL_CHECK_POINTERS", false),
        fail_when_late,
        profile,
        programs,
        one_shot,
        two_shot,
        memory,
        network,
        clique,
        lending,
        order: Arc::default(),
        launched,
        faults_seen: AtomicU64::new(0),
        failure_taken: AtomicBool::new(false),
        reservation: None,
    };
    running::enter(&engine);
    engine.clique.members.lock().enter(&engine);
    Ok(engine)
}

/// Fills a rank's control block; whether a late wait fails the communicator.
fn set_up(control: &Memory, inboxes: &[Option<Arc<PeerInbox>>]) -> Result<bool> {
    let (report_after_ns, fail_when_late) = settings::wait_bound()?;
    // SAFETY: fresh, zeroed, aligned (the device hands out pages) and not yet known to any kernel.
    let control = unsafe { &*control.address.cast::<Control>() };
    control.report_after_ns.store(report_after_ns, Ordering::Relaxed);
    control
        .park_after_report
        .store(u32::from(fail_when_late), Ordering::Relaxed);
    for (started, inbox) in control.started.iter().zip(inboxes) {
        let word = inbox.as_ref().map_or(null_mut(), |inbox| inbox.started());
        started.store(word, Ordering::Relaxed);
    }
    Ok(fail_when_late)
}

/// The inbox of a rank on a host with `neighbours`. A rank that is alone there has nobody who writes to it, and between
/// hosts nothing but rings are used.
pub(super) fn geometry(profile: &Profile, ring: &Ring, neighbours: &[u32]) -> Geometry {
    let programs = &ring.all_reduce;
    debug_assert!(programs.iter().all(|program| program.slots_needed <= profile.slots));
    let most = programs
        .iter()
        .map(|program| program.sends.len().max(program.recvs.len()))
        .max();
    Geometry {
        ranks: profile.ranks as usize,
        lines: profile.lines as usize,
        channels: profile.blocks as usize,
        slots: profile.slots as usize,
        slot_bytes: profile.slot_bytes as usize,
        links: most.filter(|_| neighbours.len() > 1).unwrap_or(0),
        two_shot: TwoShotGeometry {
            blocks: if profile.hosts > 1 { 0 } else { profile.blocks as usize },
            slot_bytes: profile.two_shot_slot_bytes as usize,
        },
    }
}

pub(super) fn net_geometry(profile: &Profile) -> RingGeometry {
    RingGeometry {
        channels: profile.blocks as usize,
        slots: profile.slots as usize,
        slot_bytes: profile.slot_bytes as usize,
    }
}
