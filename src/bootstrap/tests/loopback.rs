//! Ranks as threads of this process, over loopback.

use super::super::session::create_unique_id_with;
use super::super::settings::{read_secret, Settings};
use super::super::{Cancel, Introduction, PeerEvent, Session, UniqueId};
use super::*;
use crate::error::{Code, Error};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::sync::Arc;

fn gather(session: &Session, payload: &str) -> Result<Vec<String>> {
    let all = session.all_gather(Ok(payload.into()), TIMEOUT, &Cancel::default())?;
    Ok(all.into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect())
}

/// The events that a session reports from now on.
fn events(session: &Session) -> Receiver<PeerEvent> {
    let (sender, receiver) = mpsc::channel();
    session.watch(reporting(move |event| sender.send(event).unwrap_or_default()));
    receiver
}

/// All ranks must fail with this code and sentence.
fn assert_all(results: Vec<Result<(Session, Vec<Introduction>)>>, code: Code, sentence: &str) {
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.map(|_| ()).unwrap_err();
        assert!(
            error.code == code && error.text.contains(sentence),
            "rank {rank}: {error:?}"
        );
    }
}

#[test]
fn ranks_get_the_roster_and_gather_in_rank_order() {
    let _alone = alone();
    for count in [1, 2, 8, 16] {
        let id = new_id();
        let expected: Vec<Introduction> = (0..count).map(|rank| introduction(rank, count)).collect();
        ranks(count, move |rank| {
            let (session, roster) = join(&id, introduction(rank, count), TIMEOUT).unwrap();
            assert_eq!(roster, expected);
            for round in 0..3 {
                let expected: Vec<String> = (0..count).map(|rank| format!("{round} of {rank}")).collect();
                assert_eq!(gather(&session, &format!("{round} of {rank}")).unwrap(), expected);
            }
            session.leave();
        });
    }
}

#[test]
fn a_gather_carries_a_mebibyte_a_rank() {
    let _alone = alone();
    let sessions: Arc<Vec<Session>> = Arc::new(communicator(3));
    let gathered = ranks(3, move |rank| {
        sessions[rank as usize].all_gather(Ok(vec![rank as u8; 1 << 20]), TIMEOUT, &Cancel::default())
    });
    for all in gathered {
        let all = all.unwrap();
        assert!(all
            .iter()
            .zip(0..)
            .all(|(payload, rank)| *payload == vec![rank; 1 << 20]));
    }
}

#[test]
fn a_derived_secret_is_equal_on_all_ranks_and_no_other_communicators() {
    let _alone = alone();
    let secrets = |purpose: &str| -> Vec<[u8; 32]> { communicator(2).iter().map(|one| one.derive(purpose)).collect() };
    let (net, again) = (secrets("net"), secrets("net"));
    assert!(net[0] == net[1] && again[0] == again[1] && net[0] != again[0]);
    let sessions = communicator(2);
    assert_ne!(sessions[0].derive("net"), sessions[0].derive("other"));
}

#[test]
fn an_error_contribution_is_everyones_and_the_session_goes_on() {
    let _alone = alone();
    let sessions = Arc::new(communicator(3));
    ranks(3, move |rank| {
        let session = &sessions[rank as usize];
        let payload = if rank == 1 {
            Err(Error::system("no memory for the inbox"))
        } else {
            Ok(vec![1])
        };
        let error = session.all_gather(payload, TIMEOUT, &Cancel::default()).unwrap_err();
        assert_eq!(error, Error::system("rank 1 (host:101): no memory for the inbox"));
        let error = session
            .all_gather(Ok(vec![0; (1 << 20) + 1]), TIMEOUT, &Cancel::default())
            .unwrap_err();
        assert!(
            error.text.starts_with("rank 0 (host:100)") && error.text.contains("1 MiB"),
            "{error}"
        );
        assert_eq!(gather(session, "x").unwrap(), ["x", "x", "x"]);
    });
}

#[test]
fn contradictions_reach_every_rank_with_both_sides_named() {
    if !in_its_own_process("loopback::contradictions_reach_every_rank_with_both_sides_named") {
        return;
    }
    type Change = fn(&mut Introduction);
    let cases: [(Change, &str); 4] = [
        (
            |i| i.rank = if i.rank == 2 { 1 } else { i.rank },
            "rank 1 joined twice: host:10",
        ),
        (|i| i.ranks = if i.rank == 2 { 4 } else { 3 }, "ranks, but rank"),
        (|i| i.version += i.rank / 2, "version"),
        (|i| i.layout += u64::from(i.rank / 2), "layout"),
    ];
    for (change, sentence) in cases {
        let id = new_id();
        let results = ranks(3, move |rank| {
            let mut introduction = introduction(rank, 3);
            change(&mut introduction);
            join(&id, introduction, Duration::from_secs(2))
        });
        assert_all(results, Code::InvalidUsage, sentence);
    }
    // At the latest with the deadline: until then a fourth rank might come, if the first said that there are four.
    eventually("the service ends", || threads_of_the_service() == 0);
}

#[test]
fn a_missing_rank_is_named_to_those_that_came() {
    let _alone = alone();
    let id = new_id();
    let timeout = Duration::from_millis(300);
    let results = ranks(3, move |rank| {
        join(&id, introduction([0, 1, 4][rank as usize], 5), timeout)
    });
    assert_all(results, Code::SystemError, "ranks 2, 3 of 5 did not join within 300 ms");
    let late = join(&id, introduction(2, 5), timeout).map(|_| ()).unwrap_err();
    assert!(
        late.code == Code::SystemError && late.text.contains("failed before (ranks 2, 3 of 5"),
        "{late}"
    );
}

#[test]
fn one_rank_with_default_settings_needs_no_interface() {
    if !in_its_own_process("loopback::one_rank_with_default_settings_needs_no_interface") {
        return;
    }
    let settings = Settings::default();
    let id = create_unique_id_with(&settings).unwrap();
    let joined = Session::join_with(&settings, &[id], introduction(0, 1), TIMEOUT, &Cancel::default()).unwrap();
    assert_eq!(joined.1, [introduction(0, 1)]);
    assert_eq!(gather(&joined.0, "x").unwrap(), ["x"]);
    joined.0.abort();
    eventually("the service ends", || threads_of_the_service() == 0);
}

#[test]
fn an_id_serves_once() {
    let _alone = alone();
    for count in [1, 2] {
        let id = new_id();
        ranks(count, move |rank| {
            join(&id, introduction(rank, count), TIMEOUT).unwrap().0.leave()
        });
        let results = ranks(count, move |rank| join(&id, introduction(rank, count), TIMEOUT));
        assert_all(results, Code::InvalidUsage, "already used");
    }
}

#[test]
fn ids_of_nobody_fail_soon() {
    let _alone = alone();
    for bytes in [[0; 128], [0x5a; 128]] {
        let error = join(&UniqueId(bytes), introduction(0, 2), TIMEOUT)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let root = super::super::unique_id::Root {
        host: super::super::unique_id::Host::Maker,
        address: closed,
        uid: 1,
        secret: [2; 32],
    };
    let id = root.emit();
    let error = join(&id, introduction(1, 2), TIMEOUT).map(|_| ()).unwrap_err();
    assert!(
        error.code == Code::SystemError && error.text.contains(&closed.to_string()),
        "{error}"
    );
    let none = Session::join_with(&on_loopback(), &[], introduction(0, 1), TIMEOUT, &Cancel::default());
    assert_eq!(none.map(|_| ()).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn impossible_introductions_are_refused_at_once() {
    let _alone = alone();
    let id = new_id();
    for (rank, ranks) in [(3, 3), (0, 0), (0, u32::MAX)] {
        let error = join(&id, introduction(rank, ranks), TIMEOUT).map(|_| ()).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{rank} of {ranks}");
    }
    join(&id, introduction(0, 1), TIMEOUT).unwrap().0.leave();
}

#[test]
fn cancel_ends_a_join_and_the_others_hear_of_it() {
    if !in_its_own_process("loopback::cancel_ends_a_join_and_the_others_hear_of_it") {
        return;
    }
    let id = new_id();
    let cancel = Cancel::default();
    let flag = cancel.0.clone();
    let results = ranks(3, move |rank| match rank {
        0 => Session::join_with(&on_loopback(), &[id], introduction(0, 4), TIMEOUT, &cancel).map(|_| ()),
        1 => join(&id, introduction(1, 4), TIMEOUT).map(|_| ()),
        _ => {
            std::thread::sleep(Duration::from_millis(30));
            flag.store(true, Ordering::Release);
            Ok(())
        }
    });
    assert_eq!(results[0], Err(Error::usage("the call was ended by ncclCommAbort")));
    let told = results[1].clone().unwrap_err();
    assert!(
        told.code == Code::RemoteError && told.text.contains("rank 0 (host:100)"),
        "{told}"
    );
    eventually("the service ends", || threads_of_the_service() == 0);
}

#[test]
fn a_gather_ends_by_deadline_by_cancel_and_by_death() {
    let _alone = alone();
    let sessions = communicator(3);
    let short = Duration::from_millis(200);
    let error = sessions[0]
        .all_gather(Ok(vec![]), short, &Cancel::default())
        .unwrap_err();
    assert_eq!(
        error,
        Error::system("ranks 1, 2 did not take part in an exchange within 200 ms")
    );
    let late = sessions[1]
        .all_gather(Ok(vec![]), TIMEOUT, &Cancel::default())
        .unwrap_err();
    assert_eq!(late, error);

    let sessions = communicator(2);
    let cancel = Cancel::default();
    cancel.0.store(true, Ordering::Release);
    let error = sessions[0].all_gather(Ok(vec![]), TIMEOUT, &cancel).unwrap_err();
    assert!(error.text.contains("ncclCommAbort"), "{error}");
    let error = gather(&sessions[0], "again").unwrap_err();
    assert_eq!(error.code, Code::InvalidUsage);

    let mut sessions = communicator(3);
    let dead = sessions.remove(1);
    let waiting = std::thread::spawn(move || gather(&sessions[0], "x"));
    std::thread::sleep(Duration::from_millis(20));
    drop(dead);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(
        error.code == Code::RemoteError && error.text.contains("rank 1 (host:101)"),
        "{error}"
    );
}

#[test]
fn an_abort_is_reported_once_to_each_other_rank_and_a_farewell_never() {
    if !in_its_own_process("loopback::an_abort_is_reported_once_to_each_other_rank_and_a_farewell_never") {
        return;
    }
    let mut sessions = communicator(4);
    // Before the watch began.
    sessions.remove(3).abort();
    let heard: Vec<_> = sessions.iter().map(events).collect();
    sessions.remove(2).leave();
    drop(sessions.remove(1));
    let aborted = |rank: u32| PeerEvent::Aborted {
        rank,
        place: format!("host:{}", 100 + rank),
    };
    assert_eq!(heard[0].recv_timeout(TIMEOUT), Ok(aborted(3)));
    assert_eq!(heard[0].recv_timeout(TIMEOUT), Ok(aborted(1)));
    sessions.remove(0).leave();
    assert_eq!(heard[0].try_iter().count(), 0);
    assert_eq!(heard[2].iter().collect::<Vec<_>>(), [aborted(3)]);
    eventually("the service ends", || threads_of_the_service() == 0);
}

#[test]
fn leaving_in_any_order_is_silent() {
    let _alone = alone();
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut sessions: Vec<Option<Session>> = communicator(3).into_iter().map(Some).collect();
        let heard: Vec<_> = sessions.iter().flatten().map(events).collect();
        order
            .iter()
            .for_each(|rank: &usize| sessions[*rank].take().unwrap().leave());
        // The channels end with their sessions, so this sees all that was ever reported.
        assert!(heard.iter().all(|heard| heard.iter().next().is_none()), "{order:?}");
    }
}

#[test]
fn several_sessions_live_side_by_side() {
    let _alone = alone();
    let both = ranks(2, |_| communicator(3));
    let [first, second] = <[Vec<Session>; 2]>::try_from(both).ok().unwrap();
    let heard = events(&second[0]);
    first.into_iter().for_each(Session::abort);
    let second = Arc::new(second);
    ranks(3, move |rank| {
        assert_eq!(gather(&second[rank as usize], "x").unwrap(), ["x"; 3])
    });
    assert_eq!(
        heard
            .iter()
            .filter(|event| matches!(event, PeerEvent::Lost { .. }))
            .count(),
        0
    );
}

#[test]
fn a_scalable_init_meets_at_the_first_id_and_uses_up_the_others() {
    if !in_its_own_process("loopback::a_scalable_init_meets_at_the_first_id_and_uses_up_the_others") {
        return;
    }
    let ids = [new_id(), new_id(), new_id()];
    ranks(4, move |rank| {
        let introduction = introduction(rank, 4);
        Session::join_with(&on_loopback(), &ids, introduction, TIMEOUT, &Cancel::default())
            .unwrap()
            .0
            .leave();
    });
    // Nothing stays registered, so the thread ends.
    eventually("the service ends", || threads_of_the_service() == 0);
    let error = join(&ids[2], introduction(0, 2), TIMEOUT).map(|_| ()).unwrap_err();
    assert!(
        error.code == Code::InvalidUsage && error.text.contains("scalable"),
        "{error}"
    );
}

#[test]
fn a_watched_session_beats_until_it_ends_whatever_a_beat_does() {
    let _alone = alone();
    let mut sessions = communicator(3);
    let beating: Vec<_> = sessions
        .iter()
        .take(2)
        .map(|session| {
            let (sender, beats) = mpsc::channel();
            session.watch(Watch {
                report: Box::new(|_| {}),
                beat: Box::new(move || {
                    sender.send(()).unwrap();
                    panic!("as a defect would");
                }),
            });
            beats
        })
        .collect();
    for beats in &beating {
        (0..3).for_each(|_| beats.recv_timeout(TIMEOUT).unwrap());
    }
    sessions.remove(0).leave();
    // Its watch is dropped with it, and the other one goes on.
    while beating[0].recv_timeout(TIMEOUT).is_ok() {}
    assert_eq!(
        beating[0].recv_timeout(TIMEOUT),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
    beating[1].try_iter().for_each(drop);
    beating[1].recv_timeout(TIMEOUT).unwrap();
    sessions.into_iter().for_each(Session::leave);
}

/// A port that was free a moment ago.
fn free_port(ip: &str) -> Option<std::net::SocketAddr> {
    std::net::TcpListener::bind((ip, 0))
        .and_then(|listener| listener.local_addr())
        .ok()
}

#[test]
fn nccl_comm_id_serves_communicator_after_communicator() {
    if !in_its_own_process("loopback::nccl_comm_id_serves_communicator_after_communicator") {
        return;
    }
    for (ip, secret) in [("127.0.0.1", None), ("127.0.0.1", Some("swordfish")), ("::1", None)] {
        let Some(address) = free_port(ip) else { continue };
        let secret = read_secret(secret.map(str::to_owned), None).unwrap();
        let settings = Settings {
            comm_id: Some(address.to_string()),
            secret,
            ..on_loopback()
        };
        ranks(3, move |rank| {
            for _ in 0..5 {
                let id = create_unique_id_with(&settings).unwrap();
                // Rank 0 opens the root, and may be the last to come.
                std::thread::sleep(Duration::from_millis(if rank == 0 { 20 } else { 0 }));
                let joined =
                    Session::join_with(&settings, &[id], introduction(rank, 3), TIMEOUT, &Cancel::default()).unwrap();
                assert_eq!(joined.1.len(), 3);
                joined.0.leave();
            }
        });
    }
    eventually("the service ends", || threads_of_the_service() == 0);
}

#[test]
fn nccl_comm_id_with_two_secrets_or_a_foreign_address_fails() {
    let _alone = alone();
    let address = free_port("127.0.0.1").unwrap();
    let settings = move |secret: &str| Settings {
        comm_id: Some(address.to_string()),
        secret: read_secret(Some(secret.into()), None).unwrap(),
        ..on_loopback()
    };
    let results = ranks(2, move |rank| {
        let settings = settings(["swordfish", "marlin"][rank as usize]);
        let id = create_unique_id_with(&settings).unwrap();
        let timeout = Duration::from_millis(500);
        Session::join_with(&settings, &[id], introduction(rank, 2), timeout, &Cancel::default()).map(|_| ())
    });
    assert!(
        results[0]
            .as_ref()
            .unwrap_err()
            .text
            .contains("rank 1 of 2 did not join"),
        "{results:?}"
    );
    assert!(
        results[1].as_ref().unwrap_err().text.contains("OSSICLE_SECRET"),
        "{results:?}"
    );

    let settings = Settings {
        comm_id: Some("192.0.2.7:41999".into()),
        ..on_loopback()
    };
    let id = create_unique_id_with(&settings).unwrap();
    let error = Session::join_with(&settings, &[id], introduction(0, 2), TIMEOUT, &Cancel::default());
    let error = error.map(|_| ()).unwrap_err();
    assert!(
        error.code == Code::SystemError && error.text.contains("192.0.2.7:41999"),
        "{error}"
    );
}

#[test]
fn three_hundred_cycles_leave_nothing_behind() {
    if !in_its_own_process("loopback::three_hundred_cycles_leave_nothing_behind") {
        return;
    }
    eventually("the service ends", || threads_of_the_service() == 0);
    let before = descriptors();
    for cycle in 0..300 {
        let id = new_id();
        ranks(2, move |rank| {
            let (session, _) = join(&id, introduction(rank, 2), TIMEOUT).unwrap();
            assert_eq!(gather(&session, "x").unwrap(), ["x", "x"]);
            match cycle % 3 {
                0 => session.abort(),
                1 => drop(session),
                _ => session.leave(),
            }
        });
        // A thread that was joined can stay in /proc for a moment.
        eventually("a cycle leaves nothing", || threads_of_the_service() == 0);
        assert_eq!(descriptors(), before, "cycle {cycle}");
    }
}
