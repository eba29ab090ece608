//! Ranks on several faked hosts over the software HCA, to which their kernels or the CPU proxy post, in streams, graphs and
//! by threads.

use super::oracle::Order;
use super::rig::{seeds, submit, Ranks, Sum};
use super::*;
use crate::bootstrap::Cancel;
use crate::device::host::{Executable, Scheduler, Stream};
use crate::error::Code;
use crate::initiated::{self, Name, Opened, Poster};
use crate::launch::connect::net_geometry;
use crate::launch::net_links::{Crossings, NetLinks};
use crate::proxy::Direction;
use crate::topology::host::HostIdentity;
use crate::topology::Hosts;
use crate::transport::hca::Fault;
use crate::transport::Limit;
use crate::wire::mlx5::syndrome;

/// By rank, its host.
const SHAPES: [&[usize]; 5] = [&[0, 1], &[0, 0, 1, 1], &[0, 1, 2, 3], &[0, 1, 0, 1], &[0, 0, 1]];

/// Of so many ranks on so many hosts, with rings that wrap within a few chunks.
fn profile(hosts: &[usize], channels: u32) -> Profile {
    Profile {
        hosts: hosts.iter().max().map_or(0, |last| *last as u32 + 1),
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

const POSTERS: [Poster; 2] = [Poster::Kernel, Poster::Cpu];

/// All ranks of a communicator over several hosts.
struct Connected {
    engines: Vec<Engine>,
    /// Of ranks that have any.
    links: Vec<Option<Arc<initiated::Links>>>,
    /// What the proxy reports.
    faults: Arc<Mutex<Vec<Error>>>,
}

/// Connected without a bootstrap.
fn connect(hosts: &[usize], channels: u32, poster: Poster) -> Connected {
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
    let open = |rank: u32| {
        let crossings = Crossings::of(rank, &ring.all_reduce[rank as usize], &hosts);
        let device = &devices[rank as usize];
        (!crossings.is_empty()).then(|| NetLinks::open_hca(device, &crossings, net_geometry(&profile), poster).unwrap())
    };
    let opened: Vec<Option<Opened>> = (0..profile.ranks).map(open).collect();
    let names: Vec<Option<Name>> = opened
        .iter()
        .map(|opened| opened.as_ref().map(|o| o.name().clone()))
        .collect();
    let cancel = Cancel::default();
    let limit = Limit {
        timeout: Duration::from_secs(60),
        cancel: &cancel,
    };
    let connect = |(opened, device): (Option<Opened>, &Arc<dyn Device>)| {
        opened.map(|opened| Arc::new(opened.connect(device.as_ref(), &names, &limit).unwrap()))
    };
    let links: Vec<_> = opened.into_iter().zip(&devices).map(connect).collect();
    let inboxes: Vec<Inbox> = (0..profile.ranks)
        .map(|rank| {
            let geometry = geometry(&profile, &ring, hosts.neighbours(rank));
            Inbox::create(&devices[rank as usize], Path::P2p, geometry).unwrap()
        })
        .collect();
    let (clique, faults): (Arc<Clique>, Arc<Mutex<Vec<Error>>>) = Default::default();
    let engine = |(links, rank): (Option<_>, u32)| {
        let faults = faults.clone();
        let net = links.map(|links| NetLinks::over_hca(links, net_geometry(&profile), poster).unwrap());
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
            lending: Lending::new(
                devices[rank as usize].as_ref(),
                (Path::P2p, profile.hosts),
                &[[0; 16]; 2],
                true,
            ),
            net: net.map(|net| (net, Box::new(move |fault| faults.lock().push(fault)) as _)),
        })
        .unwrap()
    };
    Connected {
        engines: links.iter().cloned().zip(0..).map(engine).collect(),
        links,
        faults,
    }
}

fn engines(hosts: &[usize], channels: u32) -> Vec<Engine> {
    connect(hosts, channels, Poster::Kernel).engines
}

/// What was posted is done, without an error.
fn drain(engines: &[Engine]) {
    for engine in engines {
        engine.drain(&Cancel::default(), &|| None).unwrap();
        assert_eq!(engine.take_fault(), None);
    }
}

#[test]
fn sums_are_exact_for_every_type_operation_and_shape() {
    for poster in POSTERS {
        for (index, hosts) in SHAPES.into_iter().enumerate() {
            let channels = 1 + index % 3;
            let Connected { engines, faults, .. } = connect(hosts, channels as u32, poster);
            check_all_types(&engines, order(hosts, channels), &[1, 2, 5, 16, 17, 255, 1000, 5003]);
            drain(&engines);
            assert_eq!(*faults.lock(), []);
        }
    }
}

/// 32768 slots and their tails take so many blocks.
#[test]
fn work_requests_go_on_past_the_sixteen_bits_of_their_index() {
    for poster in POSTERS {
        let engines = connect(&[0, 1], 1, poster).engines;
        let engines: Vec<Arc<Engine>> = engines.into_iter().map(Arc::new).collect();
        for thread in begin(&engines, 2_200_000) {
            assert_eq!(thread.join().unwrap(), Ok(2.0));
        }
    }
}

const MIXED: &[usize] = &[0, 1, 1, 0];

fn mixed(poster: Poster) -> Ranks {
    Ranks {
        engines: connect(MIXED, 2, poster).engines,
        order: order(MIXED, 2),
    }
}

fn finish(streams: &[Stream]) {
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}

fn replay(streams: &[Stream], graphs: &[Executable]) {
    for (stream, graph) in streams.iter().zip(graphs) {
        stream.launch(graph).unwrap();
    }
}

#[test]
fn graphs_are_replayed_with_eager_operations_between_and_after_the_communicator() {
    /// Longer than the HCA's thread looks at queues that nobody needs.
    const SLEEPS_AFTER: Duration = Duration::from_millis(30);
    for (seed, poster) in seeds(3).flat_map(|seed| POSTERS.map(|poster| (seed, poster))) {
        let (scheduler, ranks) = (Scheduler::new(seed).unwrap(), mixed(poster));
        let streams: Vec<Stream> = ranks.engines.iter().map(|_| scheduler.stream()).collect();
        let sums = [900, 2000].map(|count| Sum::new(&ranks, count, seed + count as u64));
        let between = Sum::new(&ranks, 333, seed);
        let capture = |(rank, stream): (usize, &Stream)| {
            stream.begin_capture().unwrap();
            for sum in &sums {
                submit(&[(&ranks.engines[rank], sum.request(rank, stream))]).unwrap();
            }
            stream.end_capture().unwrap().instantiate()
        };
        let graphs: Vec<Executable> = streams.iter().enumerate().map(capture).collect();
        for round in 0..4 {
            std::thread::sleep(SLEEPS_AFTER);
            replay(&streams, &graphs);
            between.forget();
            between.call(&ranks, &streams);
            replay(&streams, &graphs);
            finish(&streams);
            sums.iter().chain([&between]).for_each(|sum| {
                sum.check(&format!("seed {seed}, {poster:?}, round {round}"));
                sum.forget();
            });
        }
        drain(&ranks.engines);
        drop(ranks);
        replay(&streams, &graphs);
        finish(&streams);
    }
}

/// Each rank's all-reduce on a thread of its own.
fn begin(engines: &[Arc<Engine>], count: usize) -> Vec<std::thread::JoinHandle<Result<f32>>> {
    let run = |engine: &Arc<Engine>| {
        let engine = engine.clone();
        std::thread::spawn(move || {
            let (input, mut output) = (vec![1.0f32; count], vec![0.0f32; count]);
            let request = Request {
                collective: Collective::AllReduce,
                send: input.as_ptr().cast(),
                recv: output.as_mut_ptr().cast(),
                count,
                datatype: DataType::Float32,
                op: ReduceOp::Sum,
                stream: std::ptr::null_mut(),
            };
            let work = engine.prepare(&request)?.unwrap();
            admit(&[(&*engine, &[work])])?.launch()?;
            assert!(output.iter().all(|sum| *sum == output[0]));
            Ok(output[0])
        })
    };
    engines.iter().map(run).collect()
}

#[test]
fn a_failed_work_request_is_reported_with_all_that_is_known_and_ends_the_operation() {
    // Of slots and of heads; one that the failing rank's own kernel waits for, and the last one, for which peers wait.
    for (direction, nth) in [(Direction::Send, 2), (Direction::Receive, 1), (Direction::Send, 0)] {
        let engines: Vec<Arc<Engine>> = engines(&[0, 1], 1).into_iter().map(Arc::new).collect();
        let links = engines[1].initiated().unwrap();
        let qp = links.queue_pair(direction, 0).unwrap().number();
        let fault = Fault::Syndrome {
            syndrome: syndrome::REMOTE_ACCESS,
            vendor: 0x45,
        };
        links.hca().inject(qp, nth, fault).unwrap();
        let running = begin(&engines, 4000);
        let error = loop {
            match engines[1].take_fault() {
                Some(error) => break error,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(error.code, Code::RemoteError);
        let words = [
            "rank 1: a work request to rank 0 (test) failed on channel 0",
            "syndrome 0x13, vendor syndrome 0x45: remote access error",
        ];
        words
            .iter()
            .for_each(|part| assert!(error.text.contains(part), "{error}"));
        assert_eq!(engines[1].take_fault(), None, "it is said once");
        assert_eq!(
            running.iter().filter(|thread| thread.is_finished()).count(),
            0,
            "kernels park"
        );
        engines[1].stop(Stop::PeerLost);
        engines[0].stop(Stop::Abort);
        for thread in running {
            assert_eq!(thread.join().unwrap().unwrap_err().code, Code::RemoteError);
        }
        drop(engines);
        let again: Vec<Arc<Engine>> = super::initiated::engines(&[0, 1], 1)
            .into_iter()
            .map(Arc::new)
            .collect();
        for thread in begin(&again, 4000) {
            assert_eq!(thread.join().unwrap(), Ok(2.0));
        }
    }
}

/// The proxy sees the completion, and its report is the communicator's.
#[test]
fn a_request_of_the_proxy_that_failed_is_reported_with_all_that_is_known() {
    // A slot's payload, a slot's counter, and the first word that lends.
    for (direction, nth) in [(Direction::Send, 3), (Direction::Send, 2), (Direction::Receive, 0)] {
        let Connected { engines, links, faults } = connect(&[0, 1], 1, Poster::Cpu);
        let engines: Vec<Arc<Engine>> = engines.into_iter().map(Arc::new).collect();
        let links = links[1].as_ref().unwrap();
        let qp = links.queue_pair(direction, 0).unwrap().number();
        let fault = Fault::Syndrome {
            syndrome: syndrome::REMOTE_ACCESS,
            vendor: 0x45,
        };
        links.hca().inject(qp, nth, fault).unwrap();
        let running = begin(&engines, 40_000);
        let error = loop {
            match faults.lock().first() {
                Some(error) => break error.clone(),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(error.code, Code::RemoteError);
        let what = match direction {
            Direction::Send => "rank 1, sending to rank 0 on channel 0",
            Direction::Receive => "rank 1, receiving from rank 0 on channel 0",
        };
        for part in [what, "syndrome 0x13, vendor syndrome 0x45: remote access error"] {
            assert!(error.text.contains(part), "{error}");
        }
        assert_eq!(running.iter().filter(|thread| thread.is_finished()).count(), 0);
        engines.iter().for_each(|engine| engine.stop(Stop::PeerLost));
        for thread in running {
            assert_eq!(thread.join().unwrap().unwrap_err().code, Code::RemoteError);
        }
    }
}
