//! The root alone: messages and times in, effects out.

use super::super::rendezvous::{Outcome, Rendezvous};
use super::super::wire::{Inbox, Message};
use super::super::{Effect, PeerId};
use super::{introduction, TIMEOUT};
use crate::error::{Code, Error};
use std::time::{Duration, Instant};

/// What each connection was sent and whether it was closed, in order.
fn told(effects: &[Effect]) -> Vec<(PeerId, Vec<Message>)> {
    let messages = |bytes: &[u8]| {
        let mut inbox = Inbox::default();
        inbox.push(bytes);
        std::iter::from_fn(|| inbox.take_message().unwrap()).collect()
    };
    let sent = |effect: &Effect| match effect {
        Effect::Send(peer, bytes) => Some((*peer, messages(bytes))),
        Effect::Close(_) => None,
    };
    effects.iter().filter_map(sent).collect()
}

fn closed(effects: &[Effect]) -> Vec<PeerId> {
    let peer = |effect: &Effect| match effect {
        Effect::Close(peer) => Some(*peer),
        Effect::Send(..) => None,
    };
    effects.iter().filter_map(peer).collect()
}

fn refusals(effects: &[Effect]) -> Vec<(PeerId, Code, String)> {
    let refusal = |(peer, messages): (PeerId, Vec<Message>)| match messages.as_slice() {
        [Message::Refused { error }] => (peer, error.code, error.text.clone()),
        other => panic!("{other:?} is not a refusal"),
    };
    told(effects).into_iter().map(refusal).collect()
}

fn join(rank: u32, ranks: u32) -> Message {
    let timeout_ms = TIMEOUT.as_millis() as u64;
    Message::Join {
        timeout_ms,
        hub: None,
        introduction: introduction(rank, ranks),
    }
}

/// A root of `ranks` ranks at which those in `here` have joined; rank r's connection is 10 + r.
fn root(reusable: bool, ranks: u32, here: &[u32], now: Instant) -> (Rendezvous, Vec<Effect>) {
    let mut root = Rendezvous::new(reusable);
    let mut effects = Vec::new();
    for rank in here {
        effects = root.handle_message(10 + u64::from(*rank), join(*rank, ranks), now);
    }
    (root, effects)
}

#[test]
fn the_roster_goes_to_all_in_rank_order_and_ends_with_the_last_settled() {
    let now = Instant::now();
    let (mut root, effects) = root(false, 3, &[2, 0, 1], now);
    let member = |rank| Message::Member {
        introduction: introduction(rank, 3),
    };
    let roster = vec![Message::Roster { ranks: 3, hub: None }, member(0), member(1), member(2)];
    assert_eq!(
        told(&effects),
        [(10, roster.clone()), (11, roster.clone()), (12, roster)]
    );
    for peer in [11, 10] {
        assert_eq!(closed(&root.handle_message(peer, Message::Settled, now)), [peer]);
        // A rank that settled may hang up.
        assert_eq!(root.handle_lost(peer, now), []);
    }
    assert_eq!(root.outcome(), None);
    root.handle_message(12, Message::Settled, now);
    assert_eq!(root.outcome(), Some(&Outcome::Made(3)));
}

#[test]
fn a_contradiction_goes_to_those_here_and_to_those_who_come_later() {
    let now = Instant::now();
    let (mut root, _) = root(false, 3, &[0, 1], now);
    let effects = root.handle_message(20, join(1, 3), now);
    let text = "rank 1 joined twice: host:101 and host:101";
    let refusal = |peer| (peer, Code::InvalidUsage, text.to_owned());
    assert_eq!(refusals(&effects), [refusal(10), refusal(11), refusal(20)]);
    assert_eq!(closed(&effects), [10, 11, 20]);
    // Three of three were told, so nobody is waited for.
    assert!(matches!(root.outcome(), Some(Outcome::Failed(_))));

    let (mut root, _) = self::root(false, 3, &[0], now);
    root.handle_message(20, join(1, 2), now);
    assert_eq!(root.outcome(), None);
    let text = "rank 0 (host:100) was started as one of 3 ranks, but rank 1 (host:101) as one of 2";
    assert_eq!(
        refusals(&root.handle_message(30, join(2, 3), now)),
        [(30, Code::InvalidUsage, text.to_owned())]
    );
    assert!(root.outcome().is_some());
}

#[test]
fn after_a_contradiction_nobody_is_awaited_beyond_the_deadline() {
    let now = Instant::now();
    let (mut root, _) = root(false, 9, &[0], now);
    root.handle_message(20, join(0, 9), now);
    assert_eq!(root.poll_deadline(), Some(now + TIMEOUT));
    root.handle_time(now + TIMEOUT);
    assert!(matches!(root.outcome(), Some(Outcome::Failed(_))));
}

#[test]
fn missing_ranks_are_named_at_the_deadline_of_the_first() {
    let now = Instant::now();
    let (mut root, _) = root(false, 8, &[0, 1, 2, 4, 6, 7], now);
    assert_eq!(root.poll_deadline(), Some(now + TIMEOUT));
    assert_eq!(root.handle_time(now + TIMEOUT - Duration::from_millis(1)), []);
    let refused = refusals(&root.handle_time(now + TIMEOUT));
    assert_eq!(refused.len(), 6);
    assert!(refused.iter().all(|(_, code, text)| {
        *code == Code::SystemError && text == "ranks 3, 5 of 8 did not join within 30000 ms"
    }));
    assert!(matches!(root.outcome(), Some(Outcome::Failed(_))));
}

#[test]
fn a_death_a_withdrawal_and_nonsense_reach_the_others_before_and_after_the_roster() {
    let now = Instant::now();
    let withdraw = || Message::Withdraw {
        error: Error::system("no descriptor"),
    };
    for here in [&[0, 1][..], &[0, 1, 2]] {
        let (mut dead, _) = root(false, 3, here, now);
        let text = "rank 1 (host:101) died or lost its connection while the ranks were joining";
        assert_eq!(
            refusals(&dead.handle_lost(11, now))[0],
            (10, Code::RemoteError, text.to_owned())
        );
        let (mut gone, _) = root(false, 3, here, now);
        let effects = gone.handle_message(11, withdraw(), now);
        let text = "rank 1 (host:101): no descriptor";
        assert_eq!(refusals(&effects)[0], (10, Code::SystemError, text.to_owned()));
        assert!(closed(&effects).contains(&11));
        let (mut confused, _) = root(false, 3, here, now);
        let effects = confused.handle_message(11, Message::Complete, now);
        assert_eq!(refusals(&effects)[0].1, Code::RemoteError);
        assert!(closed(&effects).contains(&11));
        for root in [dead, gone, confused] {
            assert!(matches!(root.outcome(), Some(Outcome::Failed(_))));
        }
    }
}

#[test]
fn who_comes_too_late_is_told_so_and_at_a_fixed_address_comes_again() {
    let now = Instant::now();
    for (reusable, code) in [(false, Code::InvalidUsage), (true, Code::InProgress)] {
        let (mut root, _) = root(reusable, 2, &[0, 1], now);
        let late = refusals(&root.handle_message(20, join(1, 2), now));
        assert_eq!((late[0].0, late[0].1), (20, code));
        // The ranks that have the roster are not disturbed.
        assert_eq!(late.len(), 1);
        assert_eq!(root.outcome(), None);
    }
}

#[test]
fn a_further_id_of_a_scalable_init_is_used_up_unless_ranks_meet_there() {
    let now = Instant::now();
    let (mut untouched, _) = root(false, 2, &[], now);
    assert_eq!(untouched.poll_deadline(), None);
    assert_eq!(untouched.handle_message(9, Message::Spent, now), [Effect::Close(9)]);
    assert_eq!(untouched.outcome(), Some(&Outcome::Spent));
    let (mut meeting, _) = root(false, 2, &[1], now);
    let effects = meeting.handle_message(9, Message::Spent, now);
    assert_eq!(refusals(&effects)[0].1, Code::InvalidUsage);
}

#[test]
fn a_rank_that_never_settles_holds_nothing_for_ever() {
    let now = Instant::now();
    let (mut root, _) = root(false, 2, &[0, 1], now);
    assert_eq!(closed(&root.handle_time(now + TIMEOUT)), [10, 11]);
    assert_eq!(root.outcome(), Some(&Outcome::Made(2)));
}
