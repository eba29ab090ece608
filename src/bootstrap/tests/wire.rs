//! Every message survives the wire; whatever else arrives is refused and never more than its bound.

use super::super::wire::*;
use super::super::Introduction;
use crate::error::{Code, Error};
use proptest::prelude::*;
use std::net::SocketAddr;

fn error() -> impl Strategy<Value = Error> {
    (prop::sample::select(vec![2, 3, 4, 5, 6, 7]), ".{0,40}").prop_map(|(code, text)| Error {
        code: Code::from_raw(code).unwrap(),
        text,
    })
}

fn introductions() -> impl Strategy<Value = Introduction> {
    (
        1..MAX_RANKS,
        any::<u32>(),
        any::<u32>(),
        any::<u64>(),
        ".{0,40}",
        prop::collection::vec(any::<u8>(), 0..99),
    )
        .prop_map(|(ranks, rank, version, layout, place, payload)| Introduction {
            rank: rank % ranks,
            ranks,
            version,
            layout,
            place,
            payload,
        })
}

fn hub() -> impl Strategy<Value = Option<HubAddress>> {
    let address = prop::sample::select(vec!["10.9.0.1:77", "[::1]:65535", "[fe80::1%3]:1"]);
    prop::option::of(
        (address, any::<u64>(), any::<[u8; 32]>()).prop_map(|(address, session, token)| HubAddress {
            address: address.parse::<SocketAddr>().unwrap(),
            session,
            token,
        }),
    )
}

fn message() -> impl Strategy<Value = Message> {
    let timeout_ms = 0..=MAX_TIMEOUT_MS;
    let payload = || prop::collection::vec(any::<u8>(), 0..200);
    let fate = prop::sample::select(vec![Fate::Lost, Fate::Aborted, Fate::Left]);
    let plain = vec![
        Message::Settled,
        Message::Spent,
        Message::Complete,
        Message::Farewell,
        Message::Aborting,
    ];
    prop_oneof![
        (timeout_ms.clone(), hub(), introductions()).prop_map(|(timeout_ms, hub, introduction)| Message::Join {
            timeout_ms,
            hub,
            introduction
        }),
        (1..=MAX_RANKS, hub()).prop_map(|(ranks, hub)| Message::Roster { ranks, hub }),
        introductions().prop_map(|introduction| Message::Member { introduction }),
        error().prop_map(|error| Message::Refused { error }),
        error().prop_map(|error| Message::Withdraw { error }),
        (any::<u32>(), timeout_ms.clone(), ".{0,40}").prop_map(|(rank, timeout_ms, place)| Message::Attach {
            rank,
            timeout_ms,
            place
        }),
        (any::<u64>(), timeout_ms, prop::result::maybe_ok(payload(), error())).prop_map(
            |(round, timeout_ms, payload)| Message::Contribution {
                round,
                timeout_ms,
                payload
            }
        ),
        (any::<u64>(), payload()).prop_map(|(round, payload)| Message::Part { round, payload }),
        (any::<u64>(), error()).prop_map(|(round, error)| Message::RoundFailed { round, error }),
        (any::<u32>(), fate, ".{0,40}").prop_map(|(rank, fate, place)| Message::Event { rank, fate, place }),
        prop::sample::select(plain),
    ]
}

fn take_all(inbox: &mut Inbox) -> Result<Vec<Message>, Malformed> {
    std::iter::from_fn(|| inbox.take_message().transpose()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn messages_survive_any_cut_of_the_stream(messages in prop::collection::vec(message(), 1..5), step in 1usize..300) {
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| message.emit(&mut bytes));
        let mut inbox = Inbox::default();
        let mut taken = Vec::new();
        for piece in bytes.chunks(step) {
            inbox.push(piece);
            taken.extend(take_all(&mut inbox).unwrap());
        }
        prop_assert_eq!(taken, messages);
        prop_assert!(inbox.unread().is_empty());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), kind in 0u8..20) {
        let _ = Message::parse(kind, &bytes);
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        let _ = take_all(&mut inbox);
    }

    #[test]
    fn a_damaged_message_is_read_as_something_or_refused(message in message(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = message.to_bytes();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        let _ = take_all(&mut inbox);
    }
}

#[test]
fn lengths_beyond_their_bounds_are_refused_before_the_bytes_arrive() {
    let header = |body_bytes: u32, kind: u8| [&body_bytes.to_le_bytes()[..], &[kind, 0, 0, 0]].concat();
    for (bytes, verdict) in [
        (header(MAX_CONTRIBUTION_BYTES as u32 + 64, 10), Ok(None)),
        (header(MAX_CONTRIBUTION_BYTES as u32 + 65, 10), Err(Malformed)),
        (header(u32::MAX, 10), Err(Malformed)),
        ([header(0, 5), vec![]].concat(), Ok(Some(Message::Settled))),
        (header(0, 99), Err(Malformed)),
        (vec![0, 0, 0, 0, 5, 0, 0, 1], Err(Malformed)),
        ([header(1, 5), vec![0]].concat(), Err(Malformed)),
    ] {
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        assert_eq!(inbox.take_message(), verdict, "{bytes:?}");
    }
    let part = |bytes: usize| {
        Message::Part {
            round: 0,
            payload: vec![0; bytes],
        }
        .to_bytes()
    };
    for (bytes, fits) in [(MAX_CONTRIBUTION_BYTES, true), (MAX_CONTRIBUTION_BYTES + 1, false)] {
        let mut inbox = Inbox::default();
        inbox.push(&part(bytes));
        assert_eq!(inbox.take_message().is_ok(), fits);
    }
}

#[test]
fn the_inbox_forgets_what_was_taken() {
    let mut inbox = Inbox::default();
    let message = Message::Part {
        round: 1,
        payload: vec![1; MAX_CONTRIBUTION_BYTES],
    };
    let mut bytes = message.to_bytes();
    Message::Complete.emit(&mut bytes);
    for _ in 0..3 {
        inbox.push(&bytes);
        assert_eq!(take_all(&mut inbox), Ok(vec![message.clone(), Message::Complete]));
    }
    assert!(inbox.unread().is_empty());
}

#[test]
fn texts_are_cut_at_a_character() {
    assert_eq!(cut("aé", 2), "a");
    let long = Error::system("é".repeat(MAX_TEXT_BYTES));
    let Ok(Message::Refused { error }) = Message::parse(4, &Message::Refused { error: long }.to_bytes()[8..]) else {
        panic!("the text did not fit its own bound");
    };
    assert_eq!(error.text.len(), MAX_TEXT_BYTES);
}
