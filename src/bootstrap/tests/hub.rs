//! The star alone: messages and times in, effects out.

use super::super::hub::Hub;
use super::super::wire::{Fate, Inbox, Message};
use super::super::{Effect, PeerId};
use super::TIMEOUT;
use crate::error::{Code, Error};
use std::time::Instant;

const TIMEOUT_MS: u64 = 30_000;

fn attach(rank: u32) -> Message {
    Message::Attach {
        rank,
        timeout_ms: TIMEOUT_MS,
        place: format!("h:{rank}"),
    }
}

fn contribution(round: u64, payload: &[u8]) -> Message {
    Message::Contribution {
        round,
        timeout_ms: TIMEOUT_MS,
        payload: Ok(payload.to_vec()),
    }
}

fn part(round: u64, payload: &[u8]) -> Message {
    Message::Part {
        round,
        payload: payload.to_vec(),
    }
}

/// Who was sent what, in order.
fn sent(effects: Vec<Effect>) -> Vec<(PeerId, Vec<Message>)> {
    let sent = |effect| match effect {
        Effect::Send(peer, bytes) => {
            let mut inbox = Inbox::default();
            inbox.push(&bytes);
            Some((peer, std::iter::from_fn(|| inbox.take_message().unwrap()).collect()))
        }
        Effect::Close(_) => None,
    };
    effects.into_iter().filter_map(sent).collect()
}

/// A star of `ranks` ranks, all attached; rank r's connection is 10 + r.
fn star(ranks: u32, now: Instant) -> Hub {
    let mut hub = Hub::new(ranks);
    for rank in 0..ranks {
        let effects = hub.handle_message(10 + u64::from(rank), attach(rank), now);
        assert_eq!(sent(effects).len() as u32, if rank + 1 == ranks { ranks } else { 0 });
    }
    assert!(hub.is_complete());
    hub
}

#[test]
fn rounds_run_in_lock_step_and_in_rank_order() {
    let now = Instant::now();
    let mut hub = star(3, now);
    for round in 0..3 {
        assert_eq!(hub.handle_message(12, contribution(round, b"c"), now), []);
        assert_eq!(hub.handle_message(10, contribution(round, b"a"), now), []);
        let all = vec![part(round, b"a"), part(round, b"b"), part(round, b"c")];
        let effects = hub.handle_message(11, contribution(round, b"b"), now);
        assert_eq!(sent(effects), [(10, all.clone()), (11, all.clone()), (12, all)]);
        assert_eq!(hub.poll_deadline(), None);
    }
}

#[test]
fn the_first_error_of_a_round_is_everyones() {
    let now = Instant::now();
    let mut hub = star(3, now);
    let failing = |text: &str| Message::Contribution {
        round: 0,
        timeout_ms: 1,
        payload: Err(Error::cuda(text)),
    };
    hub.handle_message(12, failing("late"), now);
    hub.handle_message(10, contribution(0, b"a"), now);
    let effects = hub.handle_message(11, failing("early"), now);
    let error = Error::cuda("rank 1 (h:1): early");
    let failed = vec![Message::RoundFailed { round: 0, error }];
    assert_eq!(
        sent(effects),
        [(10, failed.clone()), (11, failed.clone()), (12, failed)]
    );
    for peer in [10, 11] {
        assert_eq!(hub.handle_message(peer, contribution(1, b"x"), now), []);
    }
    assert_eq!(sent(hub.handle_message(12, contribution(1, b"x"), now)).len(), 3);
}

#[test]
fn a_round_that_cannot_end_fails_for_those_in_it_and_those_to_come() {
    let now = Instant::now();
    let mut hub = star(4, now);
    hub.handle_message(10, contribution(0, b"a"), now);
    assert_eq!(hub.poll_deadline(), Some(now + TIMEOUT));
    let error = Error::system("ranks 1, 2, 3 did not take part in an exchange within 30000 ms");
    let failed = vec![Message::RoundFailed { round: 0, error }];
    assert_eq!(sent(hub.handle_time(now + TIMEOUT)), [(10, failed.clone())]);
    assert_eq!(sent(hub.handle_message(13, contribution(0, b"d"), now)), [(13, failed)]);

    for (fate, what) in [
        (Message::Farewell, "destroyed"),
        (Message::Aborting, "aborted"),
        (Message::Complete, "died"),
    ] {
        // Before the round began, and while it waits.
        for early in [true, false] {
            let mut hub = star(2, now);
            let mut effects = Vec::new();
            if early {
                hub.handle_message(11, fate.clone(), now);
                effects.extend(hub.handle_message(10, contribution(0, b"a"), now));
            } else {
                hub.handle_message(10, contribution(0, b"a"), now);
                effects.extend(hub.handle_message(11, fate.clone(), now));
            }
            let (peer, messages) = sent(effects).pop().unwrap();
            let [Message::RoundFailed { round: 0, error }] = messages.as_slice() else {
                panic!("{messages:?}")
            };
            assert!(
                peer == 10 && error.code == Code::RemoteError && error.text.contains("rank 1 (h:1)"),
                "{error}"
            );
            assert!(error.text.contains(what), "{error}");
        }
    }
}

#[test]
fn a_rank_that_goes_after_contributing_spoils_nothing() {
    let now = Instant::now();
    let mut hub = star(2, now);
    hub.handle_message(11, contribution(0, b"b"), now);
    hub.handle_message(11, Message::Farewell, now);
    let effects = hub.handle_message(10, contribution(0, b"a"), now);
    assert_eq!(sent(effects), [(10, vec![part(0, b"a"), part(0, b"b")])]);
}

#[test]
fn fates_are_told_to_the_others_and_the_star_ends_with_the_last() {
    let now = Instant::now();
    let mut hub = star(4, now);
    let event = |rank: u32, fate| {
        vec![Message::Event {
            rank,
            fate,
            place: format!("h:{rank}"),
        }]
    };
    let left = event(0, Fate::Left);
    let effects = hub.handle_message(10, Message::Farewell, now);
    assert!(effects.contains(&Effect::Close(10)));
    assert_eq!(sent(effects), [(11, left.clone()), (12, left.clone()), (13, left)]);
    let lost = event(3, Fate::Lost);
    assert_eq!(sent(hub.handle_lost(13)), [(11, lost.clone()), (12, lost)]);
    assert_eq!(hub.handle_lost(13), []);
    assert_eq!(
        sent(hub.handle_message(11, Message::Aborting, now)),
        [(12, event(1, Fate::Aborted))]
    );
    assert!(!hub.is_over());
    hub.handle_lost(12);
    assert!(hub.is_over());
}

#[test]
fn until_all_are_attached_any_loss_or_the_deadline_ends_it_for_all() {
    let now = Instant::now();
    let mut hub = Hub::new(3);
    hub.handle_message(10, attach(0), now);
    hub.handle_message(12, attach(2), now);
    assert_eq!(hub.poll_deadline(), Some(now + TIMEOUT));
    let error = Error::system("rank 1 joined but did not reach rank 0 within 30000 ms");
    let refused = vec![Message::Refused { error }];
    assert_eq!(
        sent(hub.handle_time(now + TIMEOUT)),
        [(10, refused.clone()), (12, refused)]
    );
    assert!(hub.is_over());

    let mut hub = Hub::new(3);
    hub.handle_message(10, attach(0), now);
    hub.handle_message(11, attach(1), now);
    let (peer, messages) = sent(hub.handle_lost(11)).pop().unwrap();
    let [Message::Refused { error }] = messages.as_slice() else {
        panic!("{messages:?}")
    };
    assert!(
        peer == 10 && error.code == Code::RemoteError && error.text.contains("rank 1 (h:1)"),
        "{error}"
    );
    assert!(hub.is_over());
}

#[test]
fn nobody_sits_on_a_taken_place_or_outside_or_out_of_step() {
    let now = Instant::now();
    let mut hub = Hub::new(2);
    hub.handle_message(10, attach(0), now);
    for rank in [0, 2, u32::MAX] {
        let effects = hub.handle_message(20, attach(rank), now);
        assert!(matches!(sent(effects)[0].1[0], Message::Refused { .. }));
    }
    assert_eq!(hub.handle_message(21, contribution(0, b"x"), now), [Effect::Close(21)]);
    hub.handle_message(11, attach(1), now);
    let effects = hub.handle_message(11, contribution(5, b"x"), now);
    assert!(effects.contains(&Effect::Close(11)));
    assert_eq!(
        sent(effects),
        [(
            10,
            vec![Message::Event {
                rank: 1,
                fate: Fate::Lost,
                place: "h:1".into()
            }]
        )]
    );
}
