//! Random programs of operations over streams, events, groups and graphs, against a model that runs them one by one.
//!
//! All ranks run one program, each in streams of its own, or all in the same ones. A program orders what shares a buffer by events of the
//! user's, and replays with all else of their communicators, as the library asks; the order of a communicator's eager
//! operations, and of those in one graph, is the library's to keep.

use super::oracle::{self, Element, Order, Patterns};
use super::rig::{ranks, seeds, submit, Buffer, Ranks};
use super::*;
use crate::device::host::{Event, Executable, Scheduler, Stream};
use std::ops::Range;

const BUFFERS: usize = 5;
const STREAMS: usize = 3;
const COMMUNICATORS: usize = 2;

#[derive(Clone, Copy, Debug)]
enum Action {
    Reduce {
        comm: usize,
        op: ReduceOp,
        from: usize,
        to: usize,
    },
    Gather {
        comm: usize,
        from: usize,
        to: usize,
    },
    Broadcast {
        comm: usize,
        root: usize,
        from: usize,
        to: usize,
    },
    /// Work of the user's in the stream: adds one element to all.
    Add {
        buffer: usize,
        bits: u64,
    },
}

impl Action {
    fn comm(self) -> Option<usize> {
        match self {
            Action::Reduce { comm, .. } | Action::Gather { comm, .. } | Action::Broadcast { comm, .. } => Some(comm),
            Action::Add { .. } => None,
        }
    }

    /// The buffers that it reads and writes.
    fn buffers(self) -> (usize, usize) {
        match self {
            Action::Reduce { from, to, .. } | Action::Gather { from, to, .. } | Action::Broadcast { from, to, .. } => {
                (from, to)
            }
            Action::Add { buffer, .. } => (buffer, buffer),
        }
    }
}

/// An action and the stream that each rank puts it into.
#[derive(Clone, Debug)]
struct Step {
    action: Action,
    stream: Vec<usize>,
}

/// Steps that are launched together.
type Group = Vec<Step>;

#[derive(Clone, Debug)]
enum Item {
    Eager(Group),
    Capture(Vec<Group>),
    /// One of the graphs captured so far, and the stream of each rank.
    Replay(usize, Vec<usize>),
}

struct Program {
    ranks: usize,
    count: usize,
    items: Vec<Item>,
}

fn below(patterns: &mut Patterns, limit: usize) -> usize {
    (patterns.next() >> 8) as usize % limit
}

impl Program {
    fn draw(patterns: &mut Patterns) -> Program {
        let ranks = 2 + below(patterns, 3);
        let mut program = Program {
            ranks,
            count: ranks * (1 + below(patterns, 120)),
            items: Vec::new(),
        };
        let mut graphs = 0;
        for _ in 0..12 + below(patterns, 12) {
            let item = match below(patterns, 8) {
                0 => {
                    graphs += 1;
                    Item::Capture((0..1 + below(patterns, 3)).map(|_| program.group(patterns)).collect())
                }
                1..=3 if graphs > 0 => Item::Replay(below(patterns, graphs), program.streams(patterns)),
                _ => Item::Eager(program.group(patterns)),
            };
            program.items.push(item);
        }
        program
    }

    fn streams(&self, patterns: &mut Patterns) -> Vec<usize> {
        (0..self.ranks).map(|_| below(patterns, STREAMS)).collect()
    }

    /// Up to three steps, none of which touches a buffer that another one writes.
    fn group(&self, patterns: &mut Patterns) -> Group {
        let mut group: Group = Vec::new();
        for _ in 0..1 + below(patterns, 3) {
            let action = self.action(patterns);
            let (from, to) = action.buffers();
            let free = |step: &Step| {
                let (reads, writes) = step.action.buffers();
                ![from, to].contains(&writes) && reads != to
            };
            if group.iter().all(free) {
                let stream = self.streams(patterns);
                group.push(Step { action, stream });
            }
        }
        group
    }

    fn action(&self, patterns: &mut Patterns) -> Action {
        let (comm, from) = (below(patterns, COMMUNICATORS), below(patterns, BUFFERS));
        let to = below(patterns, BUFFERS);
        let apart = (from + 1 + below(patterns, BUFFERS - 1)) % BUFFERS;
        match below(patterns, 8) {
            0 => Action::Gather { comm, from, to: apart },
            1 => Action::Broadcast {
                comm,
                root: below(patterns, self.ranks),
                from,
                to,
            },
            2 | 3 => Action::Add {
                buffer: to,
                bits: patterns.next(),
            },
            kind => Action::Reduce {
                comm,
                op: [ReduceOp::Max, ReduceOp::Avg][kind % 2],
                from,
                to,
            },
        }
    }

    /// What every buffer of every rank has in the end.
    fn model<T: Element>(&self, data: &mut [Vec<Vec<T>>], orders: &[Order]) {
        let mut graphs: Vec<&[Group]> = Vec::new();
        let mut run = |groups: &[Group]| {
            groups
                .iter()
                .flatten()
                .for_each(|step| self.apply(step.action, data, orders))
        };
        for item in &self.items {
            match item {
                Item::Eager(group) => run(std::slice::from_ref(group)),
                Item::Capture(groups) => graphs.push(groups),
                Item::Replay(graph, _) => run(graphs[*graph]),
            }
        }
    }

    fn apply<T: Element>(&self, action: Action, data: &mut [Vec<Vec<T>>], orders: &[Order]) {
        let (from, to) = action.buffers();
        let inputs: Vec<Vec<T>> = data.iter().map(|rank| rank[from].clone()).collect();
        let result = match action {
            Action::Reduce { comm, op, .. } => oracle::all_reduce(&inputs, op, orders[comm]),
            Action::Gather { .. } => {
                let part = self.count / self.ranks;
                inputs.iter().flat_map(|input| input[..part].to_vec()).collect()
            }
            Action::Broadcast { root, .. } => inputs[root].clone(),
            Action::Add { bits, .. } => {
                for rank in data.iter_mut() {
                    add(&mut rank[to], bits);
                }
                return;
            }
        };
        data.iter_mut().for_each(|rank| rank[to].clone_from(&result));
    }
}

fn add<T: Element>(elements: &mut [T], bits: u64) {
    for element in elements {
        *element = T::narrow(T::add(element.widen(), T::from_bits(bits).widen()));
    }
}

/// What a stream has done to a buffer or with a communicator: the last that others must come behind, and those since.
#[derive(Clone, Default)]
struct Uses {
    exclusive: Option<(usize, Event)>,
    shared: Vec<(usize, Event)>,
}

impl Uses {
    fn wait(&self, stream: &Stream, exclusive: bool) {
        let shared = self.shared.iter().filter(|_| exclusive);
        for (_, event) in self
            .exclusive
            .iter()
            .chain(shared)
            .filter(|(by, _)| *by != stream.handle() as usize)
        {
            stream.wait(event).unwrap();
        }
    }

    fn note(&mut self, stream: &Stream, event: &Event, exclusive: bool) {
        let by = (stream.handle() as usize, event.clone());
        match exclusive {
            true => {
                *self = Uses {
                    exclusive: Some(by),
                    shared: Vec::new(),
                }
            }
            false => self.shared.push(by),
        }
    }
}

/// Of every buffer, then of every communicator: an operation shares it, a replay has it alone.
type Table = Vec<Uses>;

fn table() -> Table {
    vec![Uses::default(); BUFFERS + COMMUNICATORS]
}

/// One rank's part of a run.
struct Driver<'a, T> {
    rank: usize,
    count: usize,
    comms: &'a [Ranks],
    streams: Vec<Arc<Stream>>,
    buffers: Vec<Arc<Buffer<T>>>,
    uses: Table,
}

impl<T: Element + Send + 'static> Driver<'_, T> {
    fn request(&self, action: Action, stream: &Stream) -> Request {
        let (from, to) = action.buffers();
        let whole = rig::sum_request(&self.buffers[from], &self.buffers[to], stream);
        let request = |collective, count, op| Request {
            collective,
            count,
            op,
            ..whole
        };
        match action {
            Action::Gather { .. } => request(
                Collective::AllGather,
                self.count / self.comms[0].engines.len(),
                ReduceOp::Sum,
            ),
            Action::Broadcast { root, .. } => {
                request(Collective::Broadcast { root: root as i32 }, self.count, ReduceOp::Sum)
            }
            Action::Reduce { op, .. } => request(Collective::AllReduce, self.count, op),
            Action::Add { .. } => request(Collective::AllReduce, 0, ReduceOp::Sum),
        }
    }

    /// Waits for what a group's steps come behind, does the user's own work, and gives the operations of the rest.
    fn begin(&self, group: &Group) -> Vec<(&Engine, Request)> {
        let mut calls = Vec::new();
        for Step { action, stream } in group {
            let stream = &self.streams[stream[self.rank]];
            let (from, to) = action.buffers();
            self.uses[from].wait(stream, false);
            self.uses[to].wait(stream, true);
            if let Some(comm) = action.comm() {
                self.uses[BUFFERS + comm].wait(stream, false);
                calls.push((&self.comms[comm].engines[self.rank], self.request(*action, stream)));
            }
            if let Action::Add { buffer, bits } = *action {
                let buffer = Arc::clone(&self.buffers[buffer]);
                let work = move || {
                    let mut elements = buffer.read();
                    add(&mut elements, bits);
                    buffer.write(&elements);
                };
                stream.call(work).unwrap();
            }
        }
        calls
    }

    /// After the group was launched.
    fn end(&mut self, group: &Group) {
        for Step { action, stream } in group {
            let stream = &self.streams[stream[self.rank]];
            let event = stream.record().unwrap();
            let (from, to) = action.buffers();
            self.uses[from].note(stream, &event, false);
            self.uses[to].note(stream, &event, true);
            if let Some(comm) = action.comm() {
                self.uses[BUFFERS + comm].note(stream, &event, false);
            }
        }
    }
}

/// Ranks that one thread drives, and what they captured: one graph for all of them, or one each.
struct Drivers<'a, T> {
    ranks: Vec<Driver<'a, T>>,
    one_graph: bool,
    graphs: Vec<Vec<Executable>>,
}

impl<T: Element + Send + 'static> Drivers<'_, T> {
    fn group(&mut self, group: &Group) {
        // Rank by rank within each step, or all steps of a rank at once: a batch takes both.
        let calls: Vec<_> = self.ranks.iter().flat_map(|driver| driver.begin(group)).collect();
        submit(&calls).unwrap();
        self.ranks.iter_mut().for_each(|driver| driver.end(group));
    }

    /// The ranks that begin a capture, each for all ranks up to the next.
    fn heads(&self) -> Vec<Range<usize>> {
        let number = self.ranks.len();
        let each = if self.one_graph { number } else { 1 };
        (0..number).step_by(each).map(|rank| rank..rank + each).collect()
    }

    fn capture(&mut self, groups: &[Group]) {
        let outside: Vec<Table> = self
            .ranks
            .iter_mut()
            .map(|driver| std::mem::replace(&mut driver.uses, table()))
            .collect();
        for head in self.heads() {
            let origin = &self.ranks[head.start].streams[0];
            origin.begin_capture().unwrap();
            let begin = origin.record().unwrap();
            let others = self.ranks[head].iter().flat_map(|driver| &driver.streams).skip(1);
            others.for_each(|stream| stream.wait(&begin).unwrap());
        }
        groups.iter().for_each(|group| self.group(group));
        let end = |head: Range<usize>| {
            let origin = &self.ranks[head.start].streams[0];
            let others = self.ranks[head.clone()]
                .iter()
                .flat_map(|driver| &driver.streams)
                .skip(1);
            others.for_each(|stream| origin.wait(&stream.record().unwrap()).unwrap());
            origin.end_capture().unwrap().instantiate()
        };
        let graphs = self.heads().into_iter().map(end).collect();
        self.graphs.push(graphs);
        self.ranks
            .iter_mut()
            .zip(outside)
            .for_each(|(driver, outside)| driver.uses = outside);
    }

    fn replay(&mut self, graph: usize, stream: &[usize]) {
        for (head, graph) in self.heads().into_iter().zip(&self.graphs[graph]) {
            let first = &self.ranks[head.start];
            let stream = &first.streams[stream[first.rank]];
            let uses = self.ranks[head.clone()].iter().flat_map(|driver| &driver.uses);
            uses.for_each(|uses| uses.wait(stream, true));
            stream.launch(graph).unwrap();
            let (handle, event) = (stream.handle() as usize, stream.record().unwrap());
            for uses in self.ranks[head].iter_mut().flat_map(|driver| &mut driver.uses) {
                *uses = Uses {
                    exclusive: Some((handle, event.clone())),
                    shared: Vec::new(),
                };
            }
        }
    }

    fn run(&mut self, program: &Program) {
        for item in &program.items {
            match item {
                Item::Eager(group) => self.group(group),
                Item::Capture(groups) => self.capture(groups),
                Item::Replay(graph, stream) => self.replay(*graph, stream),
            }
        }
        for stream in self.ranks.iter().flat_map(|driver| &driver.streams) {
            stream.synchronize().unwrap();
        }
    }
}

/// Runs one program with elements of one type, and compares every buffer of every rank.
fn check<T: Element + Send + 'static>(seed: u64, elements: fn(&mut Patterns, usize) -> Vec<T>) {
    let mut patterns = Patterns(seed);
    let program = Program::draw(&mut patterns);
    let mut coin = || below(&mut patterns, 2) == 0;
    let shared = coin();
    // Ranks that share a stream come in one group, so that one thread drives them.
    let (threads, one_graph) = (coin() && !shared, coin() || shared);
    let scheduler = Scheduler::new(patterns.next()).unwrap();
    let number = program.ranks as u32;
    let comms = [
        ranks(number, Algorithm::Ring, 1 + number % 2),
        ranks(number, Algorithm::OneShot, 1 + (number + 1) % 2),
    ];
    let mut data: Vec<Vec<Vec<T>>> = (0..number)
        .map(|_| (0..BUFFERS).map(|_| elements(&mut patterns, program.count)).collect())
        .collect();
    let buffers: Vec<Vec<Arc<Buffer<T>>>> = data
        .iter()
        .map(|rank| rank.iter().map(|elements| Buffer::new(elements)).collect())
        .collect();
    let streams = || (0..STREAMS).map(|_| Arc::new(scheduler.stream())).collect();
    let same: Vec<Arc<Stream>> = streams();
    let driver = |rank: usize| Driver {
        rank,
        count: program.count,
        comms: &comms,
        streams: if shared { same.clone() } else { streams() },
        buffers: buffers[rank].clone(),
        uses: table(),
    };
    let drive = |ranks: Range<usize>| {
        Drivers {
            ranks: ranks.map(driver).collect(),
            one_graph,
            graphs: Vec::new(),
        }
        .run(&program);
    };
    match threads {
        false => drive(0..program.ranks),
        true => std::thread::scope(|scope| {
            for rank in 0..program.ranks {
                let drive = &drive;
                scope.spawn(move || drive(rank..rank + 1));
            }
        }),
    }
    program.model(&mut data, &comms.each_ref().map(|comm| comm.order));
    for (rank, (buffers, data)) in buffers.iter().zip(&data).enumerate() {
        for (number, (buffer, expected)) in buffers.iter().zip(data).enumerate() {
            buffer.check(
                expected,
                &format!("seed {seed}, rank {rank}, buffer {number}: {:?}", program.items),
            );
        }
    }
}

#[test]
fn random_programs_give_what_a_sequential_run_gives() {
    for seed in seeds(40) {
        match seed % 2 {
            0 => check::<i32>(seed, Patterns::elements),
            // Any bit pattern: what an element becomes depends on the order of every rounding.
            _ => check::<f32>(seed, Patterns::elements),
        }
    }
}
