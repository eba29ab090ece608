//! The machine alone: its table, what it refuses, and pairs of machines over a wire under seeded interleavings.

use crate::proxy::machine::{Breach, Direction, Machine, State};
use crate::transport::net::SlotNote;
use proptest::prelude::*;
use std::collections::VecDeque;

const SLOT_BYTES: usize = 256;

fn note(bytes: u32, ordinal: u64) -> SlotNote {
    SlotNote {
        bytes,
        step: 0,
        ordinal,
    }
}

fn states(machine: &Machine, positions: std::ops::Range<u64>) -> Vec<State> {
    positions.map(|position| machine.state(position)).collect()
}

#[test]
fn a_send_walks_through_the_table() {
    use State::*;
    let mut machine = Machine::new(Direction::Send, 2, SLOT_BYTES).at(7);
    let mut seen = vec![states(&machine, 6..10)];
    let mut step = |machine: &Machine| seen.push(states(machine, 6..10));
    machine.handle_kernel(9).unwrap();
    step(&machine);
    assert_eq!(machine.poll_post(), Some(1));
    machine.handle_note(note(4, 1)).unwrap();
    step(&machine);
    machine.handle_completion(1).unwrap();
    step(&machine);
    assert!(machine.is_sending());
    assert_eq!(machine.poll_tell(), Some(8));
    step(&machine);
    assert_eq!(
        (machine.poll_post(), machine.poll_post(), machine.poll_tell()),
        (Some(0), None, None)
    );
    machine.handle_completion(0).unwrap();
    assert_eq!(machine.poll_tell(), Some(9));
    step(&machine);
    assert!(!machine.is_sending());
    let expected = [
        [Done, Kernel, Kernel, Kernel],
        [Done, Ready, Ready, Kernel],
        [Done, Posted, Ready, Kernel],
        [Done, Moved, Ready, Kernel],
        [Done, Done, Ready, Kernel],
        [Done, Done, Done, Kernel],
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_receive_walks_through_the_table() {
    use State::*;
    let mut machine = Machine::new(Direction::Receive, 2, SLOT_BYTES).at(7);
    let mut seen = vec![states(&machine, 6..10)];
    let mut step = |machine: &Machine| seen.push(states(machine, 6..10));
    assert_eq!(
        (machine.poll_post(), machine.poll_post(), machine.poll_post()),
        (Some(1), Some(0), None)
    );
    step(&machine);
    machine.handle_note(note(4, 1)).unwrap();
    machine.handle_completion(1).unwrap();
    step(&machine);
    assert_eq!(machine.poll_tell(), Some(8));
    step(&machine);
    machine.handle_kernel(8).unwrap();
    step(&machine);
    let expected = [
        [Done, Ready, Ready, Kernel],
        [Done, Posted, Posted, Kernel],
        [Done, Moved, Posted, Kernel],
        [Done, Done, Posted, Kernel],
        [Done, Done, Posted, Ready],
    ];
    assert_eq!(seen, expected);
    assert!(!machine.is_sending());
}

#[test]
fn what_is_not_in_the_table_is_a_breach() {
    let send = || Machine::new(Direction::Send, 2, SLOT_BYTES).at(10);
    let receive = || Machine::new(Direction::Receive, 2, SLOT_BYTES).at(10);
    let counter = |found, least, most| Err(Breach::Counter { found, least, most });
    assert_eq!(send().handle_kernel(13), counter(13, 10, 12));
    assert_eq!(send().handle_kernel(9), counter(9, 10, 12));
    assert_eq!(receive().handle_kernel(11), counter(11, 10, 10));
    assert_eq!(receive().handle_kernel(9), counter(9, 10, 10));
    assert_eq!(
        send().handle_completion(0),
        Err(Breach::Completion { found: 0, due: None })
    );
    let mut posted = receive();
    assert!(posted.poll_post().is_some() && posted.poll_post().is_some());
    let due = Some(0);
    assert_eq!(posted.handle_completion(1), Err(Breach::Completion { found: 1, due }));
    let long = note(SLOT_BYTES as u32 + 1, 1);
    let most = SLOT_BYTES as u32;
    assert_eq!(
        send().handle_note(long),
        Err(Breach::Bytes {
            found: long.bytes,
            most
        })
    );
    let mut later = send();
    later.handle_note(note(0, 5)).unwrap();
    later.handle_note(note(0, 5)).unwrap();
    assert_eq!(
        later.handle_note(note(0, 4)),
        Err(Breach::Ordinal { found: 4, last: 5 })
    );
}

/// One side's ring as a model: what each slot holds, with notes, and the two counters.
struct Model {
    machine: Machine,
    slots: Vec<Option<(u64, SlotNote)>>,
    kernel: u64,
    proxy: u64,
}

/// Two ranks and a wire that loses nothing. Chunks are numbered.
struct Pair {
    from: Model,
    to: Model,
    posted: VecDeque<usize>,
    wire: VecDeque<(u64, SlotNote)>,
    free: VecDeque<usize>,
    filled: u64,
    drained: u64,
}

fn chunk(number: u64) -> SlotNote {
    note((number * 37 % (SLOT_BYTES as u64 + 1)) as u32, 3 + number / 4)
}

impl Pair {
    fn new(slots: (usize, usize), begin: u64) -> Pair {
        let model = |direction, slots| Model {
            machine: Machine::new(direction, slots, SLOT_BYTES).at(begin),
            slots: vec![None; slots],
            kernel: begin,
            proxy: begin,
        };
        Pair {
            from: model(Direction::Send, slots.0),
            to: model(Direction::Receive, slots.1),
            posted: VecDeque::new(),
            wire: VecDeque::new(),
            free: VecDeque::new(),
            filled: 0,
            drained: 0,
        }
    }

    /// One thing that may happen next; whether it could.
    fn act(&mut self, what: u8) -> bool {
        let (from, to) = (&mut self.from, &mut self.to);
        match what {
            // The sending kernel fills a slot.
            0 if from.proxy + from.slots.len() as u64 > from.kernel => {
                let index = (from.kernel % from.slots.len() as u64) as usize;
                assert_eq!(from.slots[index], None, "a slot is filled that was not sent");
                from.slots[index] = Some((self.filled, chunk(self.filled)));
                self.filled += 1;
                from.kernel += 1;
                true
            }
            // The receiving kernel drains a slot.
            1 if to.kernel < to.proxy => {
                let index = (to.kernel % to.slots.len() as u64) as usize;
                let drained = to.slots[index].take();
                assert_eq!(drained, Some((self.drained, chunk(self.drained))));
                self.drained += 1;
                to.kernel += 1;
                true
            }
            // A proxy sees how far its kernel is.
            2 => from.machine.handle_kernel(from.kernel).is_err() || to.machine.handle_kernel(to.kernel).is_err(),
            // A proxy posts a slot.
            3 => from.machine.poll_post().is_some_and(|index| {
                let (_, note) = from.slots[index].unwrap();
                from.machine.handle_note(note).unwrap();
                self.posted.push_back(index);
                true
            }),
            4 => to.machine.poll_post().is_some_and(|index| {
                assert_eq!(to.slots[index], None, "a slot is posted that was not drained");
                self.free.push_back(index);
                true
            }),
            // The network takes a slot; not before this moment may it be filled anew.
            5 => self.posted.pop_front().is_some_and(|index| {
                self.wire.push_back(from.slots[index].take().unwrap());
                from.machine.handle_completion(index).unwrap();
                true
            }),
            // The network fills a slot.
            6 if !self.wire.is_empty() => self.free.pop_front().is_some_and(|index| {
                let (number, note) = self.wire.pop_front().unwrap();
                to.machine.handle_note(note).unwrap();
                assert_eq!(
                    to.slots[index].replace((number, note)),
                    None,
                    "a slot is overwritten that was not drained"
                );
                to.machine.handle_completion(index).unwrap();
                true
            }),
            // A proxy tells its kernel.
            7 => from.machine.poll_tell().map(|position| from.proxy = position).is_some(),
            8 => to.machine.poll_tell().map(|position| to.proxy = position).is_some(),
            _ => false,
        }
    }
}

const ACTIONS: u8 = 9;

proptest! {
    /// Whatever the order, no slot is overrun, and every chunk arrives once and in order; when nothing more is filled, what
    /// was filled arrives. Positions pass 2^32, rings have other sizes than their peers'.
    #[test]
    fn no_order_loses_or_overruns_a_chunk(
        slots in (1..6usize, 1..6usize),
        begin in prop_oneof![Just(0), (u64::from(u32::MAX) - 20)..(u64::from(u32::MAX) + 20), 0..1000u64],
        actions in prop::collection::vec(0..ACTIONS, 0..600),
    ) {
        let mut pair = Pair::new(slots, begin);
        for action in actions {
            prop_assert!(action != 2 || !pair.act(2), "a true counter is a breach");
            pair.act(action);
        }
        // From here on all but filling.
        loop {
            prop_assert!(!pair.act(2));
            if !(1..ACTIONS).any(|action| pair.act(action)) {
                break;
            }
        }
        prop_assert_eq!(pair.drained, pair.filled);
        prop_assert!(!pair.from.machine.is_sending());
        // All slots of both rings can be used again.
        for _ in 0..slots.0 {
            prop_assert!(pair.act(0));
        }
        pair.act(2);
        for _ in 0..slots.1 {
            prop_assert!(pair.free.len() == slots.1 || pair.act(4));
        }
    }
}
