//! Ranks on several faked hosts: rings of which some links go through the proxy, in streams, graphs and by threads.

use super::moves::{check_broadcast, check_gather};
use super::oracle::{Order, Patterns};
use super::rig::{seeds, submit, Ranks, Sum};
use super::*;
use crate::bootstrap::Cancel;
use crate::device::host::{Event, Executable, Scheduler, Stream};
use crate::launch::connect::net_geometry;
use crate::launch::net_links::{Crossings, NetLinks};
use crate::topology::host::HostIdentity;
use crate::topology::Hosts;
use crate::transport::net::Listener;
use crate::transport::Limit;

/// By rank, its host.
const SHAPES: [&[usize]; 7] = [
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 1, 2],
    &[0, 0, 1],
    &[0, 0, 1, 1, 2, 2, 3, 3],
    &[0, 1, 2, 3, 3, 2, 1, 0],
];

/// Of so many ranks on so many hosts, with rings that wrap within a few chunks.
fn profile(hosts: &[usize], channels: u32) -> Profile {
    let several = hosts.iter().max().map_or(0, |last| *last as u32 + 1);
    Profile {
        hosts: several,
        lines: 0,
        ..super::profile(hosts.len() as u32, Algorithm::Ring, channels)
    }
}

fn order(hosts: &'static [usize], channels: usize) -> Order {
    Order::Ring {
        channels,
        slot_bytes: 256,
        hosts: Some(hosts),
    }
}

/// All ranks of a communicator over several hosts, connected without a bootstrap. What the network reports goes to the
/// list.
fn engines(hosts: &[usize], channels: u32) -> (Vec<Engine>, Arc<Mutex<Vec<Error>>>) {
    let profile = profile(hosts, channels);
    let identities: Vec<HostIdentity> = hosts
        .iter()
        .map(|host| HostIdentity {
            digest: [*host as u8; 32],
            name: format!("host{host}"),
        })
        .collect();
    let hosts = Hosts::group(&identities);
    let ring = Ring::new(hosts.ring());
    let devices: Vec<_> = (0..profile.ranks).map(|rank| host::open(rank as i32)).collect();
    let listeners: Vec<_> = devices.iter().map(|_| Listener::open([7; 32]).unwrap()).collect();
    let names: Vec<_> = listeners.iter().map(|(_, name)| Some(name.clone())).collect();
    let connecting: Vec<_> = (0..profile.ranks)
        .zip(listeners)
        .map(|(rank, (listener, _))| {
            let crossings = Crossings::of(rank, &ring.all_reduce[rank as usize], &hosts);
            let (device, names, geometry) = (devices[rank as usize].clone(), names.clone(), net_geometry(&profile));
            std::thread::spawn(move || {
                let cancel = Cancel::default();
                let limit = Limit {
                    timeout: Duration::from_secs(60),
                    cancel: &cancel,
                };
                let crosses = !crossings.is_empty();
                crosses.then(|| NetLinks::establish(&device, crossings, geometry, listener, &names, &limit).unwrap())
            })
        })
        .collect();
    let nets: Vec<Option<NetLinks>> = connecting.into_iter().map(|thread| thread.join().unwrap()).collect();
    let inboxes: Vec<Inbox> = (0..profile.ranks)
        .map(|rank| {
            let geometry = geometry(&profile, &ring, hosts.neighbours(rank));
            Inbox::create(&devices[rank as usize], Path::P2p, geometry).unwrap()
        })
        .collect();
    let (clique, faults): (Arc<Clique>, Arc<Mutex<Vec<Error>>>) = Default::default();
    let engines = nets.into_iter().zip(0..).map(|(net, rank): (_, u32)| {
        let faults = faults.clone();
        assemble(Parts {
            device: devices[rank as usize].clone(),
            rank,
            places: vec![String::from("test"); inboxes.len()],
            profile: profile.clone(),
            ring: &ring,
            inboxes: (0..profile.ranks)
                .map(|peer| hosts.together(rank, peer).then(|| inboxes[peer as usize].own()))
                .collect(),
            clique: clique.clone(),
            net: net.map(|links| (links, Box::new(move |fault| faults.lock().push(fault)) as _)),
        })
        .unwrap()
    });
    (engines.collect(), faults)
}

fn drain(engines: &[Engine]) {
    for engine in engines {
        engine.drain(&Cancel::default(), &|| None).unwrap();
    }
}

#[test]
fn sums_over_hosts_are_exact_for_every_type_operation_and_shape() {
    for (index, hosts) in SHAPES.into_iter().enumerate() {
        let channels = 1 + index % 3;
        let (engines, faults) = engines(hosts, channels as u32);
        check_all_types(&engines, order(hosts, channels), &[1, 2, 5, 16, 17, 255, 1000, 5003]);
        drain(&engines);
        assert_eq!(*faults.lock(), []);
    }
}

#[test]
fn sums_of_any_size_over_hosts_are_exact() {
    for seed in seeds(6) {
        let mut patterns = Patterns(seed);
        let hosts = SHAPES[patterns.next() as usize % SHAPES.len()];
        let channels = 1 + patterns.next() as usize % 3;
        let (engines, faults) = engines(hosts, channels as u32);
        let counts: Vec<usize> = (0..10).map(|_| 1 + patterns.next() as usize % 6000).collect();
        check::<f32>(&engines, order(hosts, channels), seed, &counts);
        drain(&engines);
        assert_eq!(*faults.lock(), [], "seed {seed}");
    }
}

#[test]
fn moves_over_hosts_move_every_byte() {
    let mut patterns = Patterns(23);
    for (index, hosts) in SHAPES.into_iter().enumerate() {
        let (engines, faults) = engines(hosts, 1 + index as u32 % 3);
        for (turn, count) in [1, 2, 15, 16, 17, 255, 256, 1000, 3000, 5000].into_iter().enumerate() {
            let inputs: Vec<Vec<u8>> = hosts.iter().map(|_| patterns.elements::<u8>(count)).collect();
            let (shift, in_place) = ([0, 1, 4, 16][turn % 4], turn % 2 == 1);
            check_gather(&engines, &inputs, shift, in_place);
            for root in 0..hosts.len() {
                check_broadcast(&engines, root, &inputs, shift, in_place ^ (root % 2 == 1));
            }
        }
        drain(&engines);
        assert_eq!(*faults.lock(), []);
    }
}

/// Longer than the proxy looks at rings that it has no reason to look at.
const PROXY_SLEEPS_AFTER: Duration = Duration::from_millis(30);

const MIXED: &[usize] = &[0, 1, 1, 0];

fn mixed() -> (Ranks, Arc<Mutex<Vec<Error>>>) {
    let (engines, faults) = engines(MIXED, 2);
    let order = order(MIXED, 2);
    (Ranks { engines, order }, faults)
}

fn streams(scheduler: &Scheduler, ranks: &Ranks) -> Vec<Stream> {
    ranks.engines.iter().map(|_| scheduler.stream()).collect()
}

fn finish(streams: &[Stream]) {
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}

/// The proxy is woken by the call, and the kernel comes much later.
#[test]
fn kernels_in_streams_that_are_held_up_find_the_proxy_awake() {
    for seed in seeds(3) {
        let (scheduler, (ranks, faults)) = (Scheduler::new(seed).unwrap(), mixed());
        let streams = streams(&scheduler, &ranks);
        let (first, second) = (Sum::new(&ranks, 3000, seed), Sum::new(&ranks, 70, seed + 1));
        let gate = Event::of_caller();
        streams.iter().for_each(|stream| stream.wait(&gate).unwrap());
        first.call(&ranks, &streams);
        std::thread::sleep(PROXY_SLEEPS_AFTER);
        assert!(first.is_untouched());
        gate.pass();
        finish(&streams);
        std::thread::sleep(PROXY_SLEEPS_AFTER);
        second.call(&ranks, &streams);
        finish(&streams);
        first.check(&format!("seed {seed}, first"));
        second.check(&format!("seed {seed}, second"));
        drain(&ranks.engines);
        assert_eq!(*faults.lock(), [], "seed {seed}");
    }
}

fn capture(ranks: &Ranks, streams: &[Stream], sums: &[Sum]) -> Vec<Executable> {
    let one = |(rank, stream): (usize, &Stream)| {
        stream.begin_capture().unwrap();
        for sum in sums {
            submit(&[(&ranks.engines[rank], sum.request(rank, stream))]).unwrap();
        }
        stream.end_capture().unwrap().instantiate()
    };
    streams.iter().enumerate().map(one).collect()
}

fn replay(streams: &[Stream], graphs: &[Executable]) {
    for (stream, graph) in streams.iter().zip(graphs) {
        stream.launch(graph).unwrap();
    }
}

#[test]
fn graphs_are_replayed_over_the_network_with_eager_operations_between() {
    for seed in seeds(3) {
        let (scheduler, (ranks, faults)) = (Scheduler::new(seed).unwrap(), mixed());
        let streams = streams(&scheduler, &ranks);
        let sums = [900, 2000].map(|count| Sum::new(&ranks, count, seed + count as u64));
        let between = Sum::new(&ranks, 333, seed);
        between.call(&ranks, &streams);
        finish(&streams);
        let graphs = capture(&ranks, &streams, &sums);
        for round in 0..4 {
            std::thread::sleep(PROXY_SLEEPS_AFTER);
            replay(&streams, &graphs);
            between.forget();
            between.call(&ranks, &streams);
            replay(&streams, &graphs);
            finish(&streams);
            sums.iter().chain([&between]).for_each(|sum| {
                sum.check(&format!("seed {seed}, round {round}"));
                sum.forget();
            });
        }
        // Without the graphs, and more replays counted as left than operations were launched.
        drop(graphs);
        std::thread::sleep(PROXY_SLEEPS_AFTER);
        between.call(&ranks, &streams);
        finish(&streams);
        between.check(&format!("seed {seed}, after the graphs"));
        drain(&ranks.engines);
        assert_eq!(*faults.lock(), [], "seed {seed}");
    }
}

/// A graph outlives its communicator, whose proxy is gone: its kernels leave.
#[test]
fn a_replay_after_the_communicator_ended_leaves() {
    let (scheduler, (ranks, faults)) = (Scheduler::new(3).unwrap(), mixed());
    let streams = streams(&scheduler, &ranks);
    let sums = [Sum::new(&ranks, 3000, 3)];
    let graphs = capture(&ranks, &streams, &sums);
    replay(&streams, &graphs);
    finish(&streams);
    sums[0].check("before");
    drain(&ranks.engines);
    assert_eq!(*faults.lock(), []);
    drop(ranks);
    for _ in 0..3 {
        replay(&streams, &graphs);
        finish(&streams);
    }
}

/// One rank does not come: who waits says for whom, over the network too, and an abort ends it while the others learn of
/// it by the end of their connections.
#[test]
fn an_operation_without_a_peer_is_reported_and_aborted() {
    for absent in 0..3 {
        let (engines, faults) = engines(&[0, 1, 2], 1);
        let input = [1.0f32; 700];
        let running: Vec<_> = engines
            .into_iter()
            .filter(|engine| engine.rank != absent)
            .map(|engine| {
                engine.control().report_after_ns.store(20_000_000, Ordering::Relaxed);
                let engine = Arc::new(engine);
                let waiting = engine.clone();
                let mut output = [0.0f32; 700];
                let thread = std::thread::spawn(move || {
                    let request = Request {
                        collective: Collective::AllReduce,
                        send: input.as_ptr().cast(),
                        recv: output.as_mut_ptr().cast(),
                        count: 700,
                        datatype: DataType::Float32,
                        op: ReduceOp::Sum,
                        stream: std::ptr::null_mut(),
                    };
                    let work = waiting.prepare(&request)?.unwrap();
                    admit(&[(&*waiting, &[work])])?.launch()
                });
                (engine, thread)
            })
            .collect();
        for (engine, _) in &running {
            let report = loop {
                match engine.take_fault() {
                    Some(report) => break report,
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            let peer = (engine.rank + 2) % 3;
            let words = format!("rank {} waits for rank {peer} (test) in operation 0", engine.rank);
            assert!(report.text.contains(&words), "{report}");
            assert!(report.text.contains("is on another host"), "{report}");
        }
        assert_eq!(running.iter().filter(|(_, thread)| thread.is_finished()).count(), 0);
        for (engine, thread) in running {
            engine.stop(Stop::Abort);
            let error = thread.join().unwrap().unwrap_err();
            assert_eq!(error.code, crate::error::Code::RemoteError);
        }
        for fault in faults.lock().iter() {
            assert_eq!(fault.code, crate::error::Code::RemoteError, "{fault}");
        }
    }
}
