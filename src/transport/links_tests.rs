//! Ranks in threads that say they are in several processes: on host devices, and on GPUs of the stand-in driver, of which
//! each process has one.

use super::*;
use crate::bootstrap::Cancel;
use crate::device::cuda::sharing_tests::fake_gpus;
use crate::device::host;
use crate::sys::fake::Fake;
use crate::topology::host::HostIdentity;
use crate::topology::Hosts;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

const GEOMETRY: Geometry = Geometry {
    ranks: 4,
    lines: 4096,
    channels: 2,
    slots: 2,
    slot_bytes: 4096,
    links: 1,
    two_shot: TwoShotGeometry {
        blocks: 2,
        slot_bytes: 256,
    },
};

/// By rank, what it gave to one gather.
type Given = Vec<Option<Vec<u8>>>;

/// What the ranks gave to each gather, and whether one of them has vanished.
struct Rounds {
    ranks: usize,
    given: parking_lot::Mutex<(Vec<Given>, bool)>,
}

/// The rank that vanishes, and before or after which gather, from 0.
type Vanishing = Option<(usize, usize, bool)>;

impl Rounds {
    /// As a session's: an error where a rank vanished before it gave.
    fn gather(&self, rank: usize, number: usize, bytes: Vec<u8>, vanishing: Vanishing) -> Result<Vec<Vec<u8>>> {
        let vanish = || {
            self.given.lock().1 = true;
            Err(Error::remote("this rank has vanished"))
        };
        if vanishing == Some((rank, number, false)) {
            return vanish();
        }
        {
            let mut given = self.given.lock();
            while given.0.len() <= number {
                given.0.push(vec![None; self.ranks]);
            }
            given.0[number][rank] = Some(bytes);
        }
        let all = loop {
            let given = self.given.lock();
            if let Some(all) = given.0[number].iter().cloned().collect::<Option<Vec<_>>>() {
                break all;
            }
            if given.1 {
                return Err(Error::remote("a rank was lost"));
            }
            drop(given);
            std::thread::sleep(Duration::from_millis(1));
        };
        if vanishing == Some((rank, number, true)) {
            return vanish();
        }
        Ok(all)
    }
}

/// One rank each: its process and its device. `shm`: whether host memory may be used.
fn linked(ranks: &[(u128, &Arc<dyn Device>)], shm: bool) -> Vec<Result<Links>> {
    linked_until(ranks, &Hosts::one(ranks.len() as u32), shm, None)
}

fn linked_until(
    ranks: &[(u128, &Arc<dyn Device>)],
    hosts: &Hosts,
    shm: bool,
    vanishing: Vanishing,
) -> Vec<Result<Links>> {
    let reach: Vec<Reach> = ranks
        .iter()
        .map(|(process, device)| Reach {
            process: *process,
            ..Reach::of_this_process(device.as_ref(), true, shm)
        })
        .collect();
    let rounds = Arc::new(Rounds {
        ranks: ranks.len(),
        given: Default::default(),
    });
    let threads: Vec<_> = ranks
        .iter()
        .enumerate()
        .map(|(rank, (_, device))| {
            let (rounds, reach, device) = (rounds.clone(), reach.clone(), (*device).clone());
            let hosts = hosts.clone();
            std::thread::spawn(move || {
                let cancel = Cancel::default();
                let limit = Limit {
                    timeout: Duration::from_secs(60),
                    cancel: &cancel,
                };
                let number = Cell::new(0);
                let linking = Linking {
                    device: &device,
                    rank: rank as u32,
                    reach: &reach,
                    hosts: &hosts,
                    geometry: GEOMETRY,
                    net: None,
                    limit: &limit,
                    gather: &|bytes| rounds.gather(rank, number.replace(number.get() + 1), bytes, vanishing),
                };
                linking.link()
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Links of all ranks that went via `path` for `reason`, and that lead into each other's memory.
#[track_caller]
fn assert_linked(ranks: &[(u128, &Arc<dyn Device>)], path: Path, reason: &str) -> Vec<Links> {
    let links: Vec<Links> = linked(ranks, true).into_iter().map(Result::unwrap).collect();
    for link in &links {
        assert_eq!(link.path, path, "{}", link.reason);
        assert!(link.reason.contains(reason), "{}", link.reason);
    }
    for owner in 0..links.len() {
        // Its first and its last part.
        let places: [fn(&PeerInbox) -> *mut u8; 2] = [PeerInbox::area, |inbox| inbox.head(0).cast()];
        for (number, place) in places.into_iter().enumerate() {
            let value = (2 * owner + number) as u64 + 77;
            // SAFETY: the inbox is host memory in these tests, and its ranks' threads have ended.
            unsafe { place(inbox(&links[owner], owner)).cast::<u64>().write(value) };
            for link in &links {
                // SAFETY: as above.
                assert_eq!(unsafe { place(inbox(link, owner)).cast::<u64>().read() }, value);
            }
        }
    }
    links
}

/// On one's own host.
fn inbox(links: &Links, owner: usize) -> &PeerInbox {
    links.inboxes[owner].as_deref().unwrap()
}

fn bases(links: &[Links], owner: usize) -> Vec<*mut u8> {
    links.iter().map(|link| inbox(link, owner).area()).collect()
}

#[test]
fn host_devices_share_memory_between_processes_and_pointers_within_one() {
    let devices: Vec<_> = (0..4).map(host::open).collect();
    let [a, b, c, d] = &devices[..] else { unreachable!() };
    let reason = "ranks are in several processes";
    assert_linked(&[(1, a), (1, b), (2, c), (3, d)], Path::Shm, reason);
    let links = assert_linked(&[(1, a), (1, b)], Path::P2p, "all ranks are in one process");
    assert_eq!(bases(&links, 0), [inbox(&links[0], 0).area(); 2]);
}

/// Two processes with both GPUs each: ranks 0 and 1 in the first, on different GPUs, 2 in the second.
struct Pair {
    first: (Fake, [Arc<dyn Device>; 2]),
    second: (Fake, [Arc<dyn Device>; 2]),
}

impl Pair {
    fn start(test: &str) -> Pair {
        Pair {
            first: fake_gpus(&format!("{test}_first")),
            second: fake_gpus(&format!("{test}_second")),
        }
    }

    fn ranks(&self) -> [(u128, &Arc<dyn Device>); 3] {
        let (first, second) = (&self.first.1, &self.second.1);
        [(1, &first[0]), (1, &first[1]), (2, &second[0])]
    }

    fn fakes(&self) -> [&Fake; 2] {
        [&self.first.0, &self.second.0]
    }

    fn fail(&self, process: usize, function: &'static CStr) {
        self.fakes()[process].set(c"fake_failing", function.as_ptr());
    }

    fn mapped_and_opened(&self) -> [(i32, i32); 2] {
        let of = |fake: &Fake| (fake.get(c"fake_mapped_bytes"), fake.get(c"fake_opened"));
        self.fakes().map(of)
    }

    #[track_caller]
    fn assert_nothing_left(&self) {
        settle(|| self.mapped_and_opened() == [(0, 0); 2]);
        assert_eq!(self.mapped_and_opened(), [(0, 0); 2]);
        for fake in self.fakes() {
            assert_eq!(fake.count(c"cuMemAddressReserve"), fake.count(c"cuMemAddressFree"));
            assert_eq!(fake.count(c"cuMemHostRegister"), fake.count(c"cuMemHostUnregister"));
            assert_eq!(fake.count(c"cuMemFree"), 0, "the pool keeps its blocks");
        }
    }
}

/// Lets go of what attempts that failed have put down, until `done`: engines of other tests may be busy for a while.
fn settle(done: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if done() {
            return;
        }
        crate::launch::beat();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn gpus_of_several_processes_are_linked_by_handles() {
    let pair = Pair::start("handles");
    let path = Path::P2pShared(Sharing::Handles);
    let links = assert_linked(&pair.ranks(), path, "no GPU is known to be out of reach");
    assert_eq!(path.name(), "P2P (VMM handles)");
    let [own, neighbour, elsewhere] = bases(&links, 0)[..] else {
        unreachable!()
    };
    assert_eq!(own, neighbour, "a thread of the process uses the address");
    assert_ne!(own, elsewhere, "another process maps the memory");
    for fake in pair.fakes() {
        assert_eq!(fake.count(c"cuIpcOpenMemHandle"), 0);
        assert_eq!(fake.count(c"cuCtxEnablePeerAccess"), 0, "access is set for the mapping");
    }
    let (first, second) = (pair.fakes()[0], pair.fakes()[1]);
    let imports = c"cuMemImportFromShareableHandle";
    assert_eq!(
        (first.count(imports), second.count(imports)),
        (2, 2),
        "one for each pair of ranks"
    );
    drop(links);
    pair.assert_nothing_left();
}

#[test]
fn what_one_rank_cannot_do_makes_all_try_the_next_path() {
    let pair = Pair::start("next_path");
    let (ranks, ipc) = (pair.ranks(), Path::P2pShared(Sharing::Ipc));
    pair.fail(1, c"cuMemImportFromShareableHandle");
    let reason = "P2P (VMM handles) failed: rank 2: GPU 0 (Fake, 0000:01:00.0) cannot address the memory of another \
                  process by VMM handles: cuMemImportFromShareableHandle failed: 999";
    drop(assert_linked(&ranks, ipc, reason));
    pair.fail(1, c"cuMemExportToShareableHandle");
    drop(assert_linked(
        &ranks,
        ipc,
        "rank 2: GPU 0 (Fake, 0000:01:00.0) cannot share",
    ));
    // The neighbour's block is used by its address, from the other GPU.
    assert!(pair.fakes()[0].count(c"cuCtxEnablePeerAccess") > 0);
    pair.fail(0, c"cuIpcOpenMemHandle");
    let links = assert_linked(&ranks, Path::Shm, "P2P (legacy IPC) failed: rank 0: GPU 0");
    let opened = || pair.fakes()[1].get::<i32>(c"fake_opened");
    settle(|| opened() == 0);
    assert_eq!(opened(), 0, "what others opened is closed");
    drop(links);
    pair.assert_nothing_left();
}

/// Ranks 0 and 2 are on one host, in two processes; 1 and 3 on another, in one; 4 is alone.
#[test]
fn every_host_has_a_path_of_its_own_and_opens_nothing_of_others() {
    let devices: Vec<_> = (0..5).map(host::open).collect();
    let [a, b, c, d, e] = &devices[..] else { unreachable!() };
    let hosts = [7, 8, 7, 8, 9].map(|digest| HostIdentity {
        digest: [digest; 32],
        name: String::from("node"),
    });
    let hosts = Hosts::group(&hosts);
    let ranks = [(1, a), (2, b), (3, c), (2, d), (4, e)];
    let links: Vec<Links> = linked_until(&ranks, &hosts, true, None)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let paths: Vec<Path> = links.iter().map(|links| links.path).collect();
    assert_eq!(paths, [Path::Shm, Path::P2p, Path::Shm, Path::P2p, Path::P2p]);
    for (rank, links) in links.iter().enumerate() {
        for peer in 0..5 {
            let open = links.inboxes[peer].is_some();
            assert_eq!(open, hosts.together(rank as u32, peer as u32), "{rank} {peer}");
        }
    }
    assert_eq!(inbox(&links[1], 3).area(), inbox(&links[3], 3).area());
    // SAFETY: the inbox is host memory in these tests, and its ranks' threads have ended.
    unsafe { inbox(&links[0], 2).area().write(5) };
    // SAFETY: as above.
    assert_eq!(unsafe { inbox(&links[2], 2).area().read() }, 5);
}

/// A host that has to try again keeps its neighbours waiting, and changes nothing of their links.
#[test]
fn a_host_tries_its_next_path_while_another_is_done() {
    let pair = Pair::start("host_next_path");
    let (first, second) = (&pair.first.1, &pair.second.1);
    let alone = host::open(0);
    let ranks = [(3, &alone), (1, &first[0]), (2, &second[0])];
    let hosts = [1, 2, 2].map(|digest| HostIdentity {
        digest: [digest; 32],
        name: String::from("node"),
    });
    pair.fail(1, c"cuMemImportFromShareableHandle");
    let links: Vec<Links> = linked_until(&ranks, &Hosts::group(&hosts), true, None)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let paths: Vec<Path> = links.iter().map(|links| links.path).collect();
    let ipc = Path::P2pShared(Sharing::Ipc);
    assert_eq!(paths, [Path::P2p, ipc, ipc]);
    assert!(
        links[2].reason.contains("P2P (VMM handles) failed: rank 2"),
        "{}",
        links[2].reason
    );
    drop(links);
    pair.assert_nothing_left();
    // One that has none left ends all, and they say why.
    pair.fail(0, c"cuIpcGetMemHandle");
    for outcome in linked_until(&ranks, &Hosts::group(&hosts), false, None) {
        let error = outcome.err().unwrap();
        assert!(
            error.text.contains("rank 1") && error.text.contains("cuIpcGetMemHandle"),
            "{error}"
        );
    }
    pair.assert_nothing_left();
}

#[test]
fn where_no_path_is_left_all_ranks_say_why() {
    let pair = Pair::start("no_path");
    pair.fail(0, c"cuIpcGetMemHandle");
    pair.fail(1, c"cuMemMap");
    for outcome in linked(&pair.ranks(), false) {
        let error = outcome.err().unwrap();
        assert_eq!(error.code, crate::error::Code::UnhandledCudaError);
        for part in [
            "rank 0: GPU 0",
            "cuIpcGetMemHandle failed: 999",
            "set NCCL_P2P_DISABLE=1",
        ] {
            assert!(error.text.contains(part), "\"{part}\" is not in \"{error}\"");
        }
    }
    pair.assert_nothing_left();
}

#[test]
fn whenever_a_rank_vanishes_nothing_is_left() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "transport::links_tests::vanishing_ranks", "--ignored"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
#[ignore = "the body of a process of its own, since it counts descriptors"]
fn vanishing_ranks() {
    let hosts: Vec<_> = (0..3).map(host::open).collect();
    for path in ["VMM handles", "legacy IPC", "SHM", "SHM of hosts"] {
        let pair = Pair::start(&format!("vanishing_{}", path.len()));
        let ranks = match path {
            "SHM of hosts" => [(1, &hosts[0]), (1, &hosts[1]), (2, &hosts[2])],
            _ => pair.ranks(),
        };
        match path {
            "legacy IPC" => pair.fail(1, c"cuMemImportFromShareableHandle"),
            "SHM" => {
                pair.fail(1, c"cuMemExportToShareableHandle");
                pair.fail(0, c"cuIpcOpenMemHandle");
            }
            _ => {}
        }
        drop(linked(&ranks, true));
        pair.assert_nothing_left();
        unpark(&pair);
        let before = descriptors();
        let mut completed = 0;
        for number in 0..6 {
            for after in [false, true] {
                let outcomes = linked_until(&ranks, &Hosts::one(3), true, Some((number % 3, number, after)));
                completed += usize::from(outcomes.iter().all(Result::is_ok));
                drop(outcomes);
                if path == "VMM handles" && (number, after) == (1, false) {
                    // It is unmapped only when no kernel of another communicator can be running, not by who fails.
                    assert!(pair.mapped_and_opened().iter().all(|(mapped, _)| *mapped > 0));
                }
                pair.assert_nothing_left();
                unpark(&pair);
                assert_eq!(descriptors(), before, "{path}: gather {number}, after it: {after}");
            }
        }
        assert!(completed > 0 && completed < 12, "{path}: {completed}");
    }
}

/// Owners close their pipes of legacy IPC with their next export.
fn unpark(pair: &Pair) {
    let exported = pair.first.1[0].clone().export(1, Sharing::Ipc).unwrap();
    drop(exported.fd);
    drop(exported.mapping);
}

#[test]
fn a_rank_that_could_not_begin_is_the_cause_and_not_those_that_missed_it() {
    let told = [
        tell_error(Error::remote("rank 2 is gone")),
        serde_json::to_vec(&Ok::<(), (i32, String)>(())).unwrap(),
        tell_error(Error::system("no memory")),
        tell_error(Error::cuda("no GPU")),
    ];
    let error = links::hear::<()>(&[0, 1, 2, 3], &told).unwrap_err();
    assert_eq!(error, Error::system("rank 2: no memory"));
    assert_eq!(
        links::hear::<()>(&[0, 1], &told).unwrap_err(),
        Error::remote("rank 0: rank 2 is gone")
    );
    assert_eq!(links::hear::<()>(&[1], &told), Ok(vec![()]));
    let error = links::hear::<()>(&[0], &[b"?".to_vec()]).unwrap_err();
    assert!(error.text.starts_with("rank 0: what it says"), "{error}");
}

fn tell_error(error: Error) -> Vec<u8> {
    links::tell::<()>(&Err(error)).unwrap()
}
