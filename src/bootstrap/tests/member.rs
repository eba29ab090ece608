//! One rank's machine alone: what happens to its connections in, actions out.

use super::super::handshake::Refusal;
use super::super::member::{Action, DoorTrouble, Farewell, Member, Side, Trouble};
use super::super::unique_id::{Host, Root};
use super::super::wire::{Fate, HubAddress, Message};
use super::super::{PeerEvent, GRACE};
use super::{introduction, TIMEOUT};
use crate::error::{Code, Error};
use std::time::{Duration, Instant};

fn root(host: Host) -> Root {
    Root {
        host,
        address: "10.9.0.1:77".parse().unwrap(),
        uid: 5,
        secret: [6; 32],
    }
}

fn hub() -> Option<HubAddress> {
    Some(HubAddress {
        address: "10.9.0.2:88".parse().unwrap(),
        session: 9,
        token: [1; 32],
    })
}

fn member(host: Host, rank: u32, now: Instant) -> Member {
    Member::new(
        root(host),
        introduction(rank, 3),
        if rank == 0 { hub() } else { None },
        TIMEOUT,
        now,
    )
}

fn connects(actions: &[Action]) -> Option<Side> {
    match actions {
        [Action::Connect { side, .. }] => Some(*side),
        _ => None,
    }
}

fn failure(actions: &[Action]) -> Error {
    assert_eq!(actions.last(), Some(&Action::Done), "{actions:?}");
    let failed = |action: &Action| match action {
        Action::Failed(error) => Some(error.clone()),
        _ => None,
    };
    actions.iter().find_map(failed).unwrap()
}

/// Rank 1, introduced at the root.
fn introduced(now: Instant) -> Member {
    let mut member = member(Host::Maker, 1, now);
    assert_eq!(connects(&member.begin()), Some(Side::Root));
    assert_eq!(member.handle_ready(Side::Root).len(), 1);
    member
}

/// Rank 1 with the roster, on its way to the star.
fn attaching(now: Instant) -> Member {
    let mut member = introduced(now);
    assert_eq!(
        member.handle_message(Side::Root, Message::Roster { ranks: 3, hub: hub() }, now),
        []
    );
    for rank in 0..3 {
        let actions = member.handle_message(
            Side::Root,
            Message::Member {
                introduction: introduction(rank, 3),
            },
            now,
        );
        assert_eq!(connects(&actions), (rank == 2).then_some(Side::Star));
    }
    member
}

/// Rank 1 of a session.
fn live(now: Instant) -> Member {
    let mut member = attaching(now);
    member.handle_ready(Side::Star);
    let actions = member.handle_message(Side::Star, Message::Complete, now);
    let roster = (0..3).map(|rank| introduction(rank, 3)).collect();
    let settled = Action::Send(Side::Root, Message::Settled.to_bytes());
    assert_eq!(actions, [settled, Action::Close(Side::Root), Action::Joined(roster)]);
    assert_eq!(member.poll_deadline(), None);
    member
}

fn broken() -> Trouble {
    Trouble::Broken("refused".into())
}

/// Lets every attempt to connect fail; how long the rank tried, and its error.
fn exhaust(member: &mut Member, side: Side, trouble: &Trouble, start: Instant) -> (Duration, Error) {
    let mut now = start;
    loop {
        let actions = member.handle_trouble(side, trouble.clone(), now);
        if !actions.is_empty() {
            return (now - start, failure(&actions));
        }
        now = member.poll_deadline().unwrap();
        let actions = member.handle_time(now);
        if actions.last() == Some(&Action::Done) {
            return (now - start, failure(&actions));
        }
        assert_eq!(connects(&actions), Some(side));
    }
}

#[test]
fn an_absent_root_is_tried_for_as_long_as_it_may_still_come() {
    let now = Instant::now();
    let (tried, error) = exhaust(&mut member(Host::Maker, 1, now), Side::Root, &broken(), now);
    assert!(
        tried >= Duration::from_secs(2) && tried < Duration::from_secs(3),
        "{tried:?}"
    );
    assert!(
        error.code == Code::SystemError && error.text.contains("10.9.0.1:77"),
        "{error}"
    );
    for trouble in [broken(), Trouble::Refused(Refusal::UnknownKey)] {
        let (tried, error) = exhaust(&mut member(Host::RankZero, 1, now), Side::Root, &trouble, now);
        assert_eq!(tried, TIMEOUT + GRACE);
        assert!(
            error.code == Code::SystemError && error.text.contains("NCCL_COMM_ID"),
            "{error}"
        );
    }
}

#[test]
fn a_root_that_says_no_ends_it_at_once() {
    let now = Instant::now();
    for (host, refusal, sentence) in [
        (Host::Maker, Refusal::UnknownKey, "already used"),
        (Host::Maker, Refusal::Denied, "OSSICLE_SECRET"),
        (Host::RankZero, Refusal::Denied, "OSSICLE_SECRET"),
    ] {
        let mut member = member(host, 1, now);
        let error = failure(&member.handle_trouble(Side::Root, Trouble::Refused(refusal), now));
        assert!(
            error.code == Code::InvalidUsage && error.text.contains(sentence),
            "{error}"
        );
    }
    let refused = Error::usage("rank 1 joined twice: a and b");
    let actions = introduced(now).handle_message(Side::Root, Message::Refused { error: refused.clone() }, now);
    assert_eq!(failure(&actions), refused);
    // The root knows; it is not told again.
    assert!(!actions.iter().any(|action| matches!(action, Action::Send(..))));
}

#[test]
fn a_root_between_two_communicators_is_asked_again() {
    let now = Instant::now();
    let mut member = introduced(now);
    let again = Message::Refused {
        error: Error::new(Code::InProgress, "again"),
    };
    assert_eq!(
        member.handle_message(Side::Root, again, now),
        [Action::Close(Side::Root)]
    );
    let at = member.poll_deadline().unwrap();
    assert!(at < now + Duration::from_secs(1));
    assert_eq!(connects(&member.handle_time(at)), Some(Side::Root));
}

#[test]
fn rank_zero_opens_the_fixed_address_first() {
    let now = Instant::now();
    let mut member = member(Host::RankZero, 0, now);
    assert_eq!(member.begin(), [Action::OpenDoor]);
    assert_eq!(member.handle_door(Err(DoorTrouble::PreviousInit), now), []);
    let at = member.poll_deadline().unwrap();
    assert_eq!(member.handle_time(at), [Action::OpenDoor]);
    assert_eq!(
        member.handle_door(Err(DoorTrouble::InUse(Error::system("in use"))), at),
        []
    );
    let later = at + Duration::from_secs(3);
    assert_eq!(
        failure(&member.handle_door(Err(DoorTrouble::InUse(Error::system("in use"))), later)).text,
        "in use"
    );
    let mut member = self::member(Host::RankZero, 0, now);
    assert_eq!(connects(&member.handle_door(Ok(()), now)), Some(Side::Root));
}

#[test]
fn a_root_that_dies_or_falls_silent_is_an_error_with_a_deadline() {
    let now = Instant::now();
    let error = failure(&introduced(now).handle_trouble(Side::Root, broken(), now));
    assert!(
        error.code == Code::RemoteError && error.text.contains("10.9.0.1:77"),
        "{error}"
    );
    let mut silent = introduced(now);
    assert_eq!(silent.poll_deadline(), Some(now + TIMEOUT + GRACE));
    let actions = silent.handle_time(now + TIMEOUT + GRACE);
    assert_eq!(failure(&actions).code, Code::SystemError);
    assert!(matches!(actions[0], Action::Send(Side::Root, _)), "the root is told");
}

#[test]
fn a_star_out_of_reach_is_rank_zeros_fault_and_the_root_is_told() {
    let now = Instant::now();
    let mut unreachable = attaching(now);
    let (tried, error) = exhaust(&mut unreachable, Side::Star, &broken(), now);
    assert!(tried < Duration::from_secs(3), "{tried:?}");
    assert!(
        error.code == Code::RemoteError && error.text.contains("rank 0 (host:100)"),
        "{error}"
    );
    let mut dying = attaching(now);
    dying.handle_ready(Side::Star);
    // The root may end as soon as it gave the roster.
    assert_eq!(dying.handle_trouble(Side::Root, broken(), now), []);
    let error = failure(&dying.handle_trouble(Side::Star, broken(), now));
    assert!(
        error.code == Code::RemoteError && error.text.contains("rank 0 (host:100) died"),
        "{error}"
    );
}

#[test]
fn events_are_reported_once_a_rank_and_never_for_oneself() {
    let now = Instant::now();
    let mut member = live(now);
    let event = |rank, fate| Message::Event {
        rank,
        fate,
        place: "p".into(),
    };
    let lost = Action::Report(PeerEvent::Lost {
        rank: 2,
        place: "p".into(),
    });
    assert_eq!(member.handle_message(Side::Star, event(2, Fate::Lost), now), [lost]);
    assert_eq!(member.handle_message(Side::Star, event(2, Fate::Aborted), now), []);
    assert_eq!(member.handle_message(Side::Star, event(1, Fate::Aborted), now), []);
    assert_eq!(member.handle_message(Side::Star, event(0, Fate::Left), now), []);
    // After rank 0's farewell the end of its process is no news.
    assert_eq!(member.handle_trouble(Side::Star, broken(), now), []);
    let actions = member.handle_contribution(Ok(vec![]), TIMEOUT);
    let [Action::Round(Err(error))] = actions.as_slice() else {
        panic!("{actions:?}")
    };
    assert!(
        error.code == Code::RemoteError && error.text.contains("destroyed"),
        "{error}"
    );
    assert_eq!(member.handle_end(Farewell::Leave, now).last(), Some(&Action::Done));
}

#[test]
fn the_end_of_the_star_without_a_farewell_is_the_loss_of_rank_zero() {
    let now = Instant::now();
    let mut member = live(now);
    assert_eq!(member.handle_contribution(Ok(vec![1]), TIMEOUT).len(), 1);
    let actions = member.handle_trouble(Side::Star, broken(), now);
    let lost = Action::Report(PeerEvent::Lost {
        rank: 0,
        place: "host:100".into(),
    });
    assert_eq!(
        actions,
        [lost, Action::Round(Err(Error::remote("rank 0 (host:100) died")))]
    );
}

#[test]
fn rounds_are_counted_and_late_parts_of_others_are_not_taken() {
    let now = Instant::now();
    let mut member = live(now);
    for round in 0..2 {
        let contribution = Message::Contribution {
            round,
            timeout_ms: 30_000,
            payload: Ok(vec![7]),
        };
        let sent = [Action::Send(Side::Star, contribution.to_bytes())];
        assert_eq!(member.handle_contribution(Ok(vec![7]), TIMEOUT), sent);
        let second = member.handle_contribution(Ok(vec![8]), TIMEOUT);
        assert!(matches!(second.as_slice(), [Action::Round(Err(_))]));
        for rank in 0..3 {
            let actions = member.handle_message(
                Side::Star,
                Message::Part {
                    round,
                    payload: vec![rank],
                },
                now,
            );
            let all = vec![Action::Round(Ok(vec![vec![0], vec![1], vec![2]]))];
            assert_eq!(actions, if rank == 2 { all } else { vec![] });
        }
    }
    let stray = member.handle_message(
        Side::Star,
        Message::Part {
            round: 0,
            payload: vec![],
        },
        now,
    );
    assert_eq!(stray[0], Action::Close(Side::Star));
}

#[test]
fn leaving_waits_for_the_star_to_hang_up_but_not_for_ever() {
    let now = Instant::now();
    for (farewell, message) in [
        (Farewell::Leave, Message::Farewell),
        (Farewell::Abort, Message::Aborting),
    ] {
        let mut member = live(now);
        assert_eq!(
            member.handle_end(farewell, now),
            [Action::Send(Side::Star, message.to_bytes())]
        );
        assert_eq!(
            member.handle_trouble(Side::Star, broken(), now).last(),
            Some(&Action::Done)
        );
        let mut member = live(now);
        member.handle_end(farewell, now);
        let at = member.poll_deadline().unwrap();
        assert_eq!(
            (at - now, member.handle_time(at).last()),
            (Duration::from_secs(1), Some(&Action::Done))
        );
    }
    let actions = introduced(now).handle_end(Farewell::Abort, now);
    assert!(
        matches!(actions[0], Action::Send(Side::Root, _)),
        "a join that is given up is withdrawn"
    );
    assert_eq!(actions.last(), Some(&Action::Done));
}
