//! The proof that both ends of a connection know the secret, before either trusts a byte of the other.
//!
//! ```text
//! caller -> door    Hello    magic, role, key, caller's nonce      56 bytes
//! door -> caller    Answer   challenge and the door's nonce, or "unknown key"
//! caller -> door    Proof    HMAC-SHA256(secret, "caller", role, key, both nonces)
//! door -> caller    Verdict  HMAC-SHA256(secret, "door", role, key, both nonces), or "denied"
//! ```
//!
//! All sizes are fixed, so a stranger never makes this side hold more than one of these messages. The caller proves
//! itself first: a stranger who connects learns nothing but whether a key is known. Nothing here does I/O.

use super::wire::Inbox;
use hmac::digest::KeyInit;
use hmac::{Hmac, Mac};
use sha2::Sha256;

pub(crate) type Secret = [u8; 32];
pub(crate) type Nonce = [u8; 32];

/// Version of everything that follows on the connection stands in the last byte.
const MAGIC: [u8; 8] = *b"OSSICLE\x01";
const HELLO_BYTES: usize = 56;
const ANSWER_BYTES: usize = 33;
const PROOF_BYTES: usize = 32;
const YES: u8 = 1;
const NO: u8 = 2;

/// What a caller asks for; it is part of the proof, so that a connection to one is no connection to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Role {
    Rendezvous = 1,
    Star = 2,
    /// A connection that carries the data of a link (`transport::net`).
    Net = 3,
}

/// Which secret a connection is about: an id's rendezvous, a session's star, one channel of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DoorKey {
    pub(crate) role: Role,
    pub(crate) number: u64,
}

/// A secret for another purpose, derived from one that was agreed.
pub(crate) fn derive(secret: &Secret, purpose: &str, salt: &[u8]) -> Secret {
    mac(secret, &[purpose.as_bytes(), &[0], salt])
        .finalize()
        .into_bytes()
        .into()
}

fn mac(secret: &Secret, parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC fills a shorter key with zeroes to the block of its hash.
    let mut block = [0; 64];
    block[..secret.len()].copy_from_slice(secret);
    let mut mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// Everything that both proofs cover, but for the secret and the prover's label.
struct Transcript {
    key: DoorKey,
    caller: Nonce,
    door: Nonce,
}

impl Transcript {
    fn proof(&self, secret: &Secret, label: &str) -> Hmac<Sha256> {
        let role = [self.key.role as u8];
        let number = self.key.number.to_le_bytes();
        mac(
            secret,
            &[&MAGIC, label.as_bytes(), &role, &number, &self.caller, &self.door],
        )
    }
    fn prove(&self, secret: &Secret, label: &str) -> [u8; 32] {
        self.proof(secret, label).finalize().into_bytes().into()
    }
    /// In constant time.
    fn holds(&self, secret: &Secret, label: &str, proof: &[u8]) -> bool {
        self.proof(secret, label).verify_slice(proof).is_ok()
    }
}

/// Why a caller did not get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The other side is a bootstrap of this library and does not know the key.
    UnknownKey,
    /// The secrets differ.
    Denied,
    /// The other side speaks something else.
    Foreign,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallerStep {
    Wait,
    Send(Vec<u8>),
    Ready,
    Refused(Refusal),
}

/// The side that connected.
pub(crate) struct Caller {
    key: DoorKey,
    secret: Secret,
    nonce: Nonce,
    transcript: Option<Transcript>,
}

impl Caller {
    pub(crate) fn new(key: DoorKey, secret: Secret, nonce: Nonce) -> Caller {
        Caller {
            key,
            secret,
            nonce,
            transcript: None,
        }
    }

    pub(crate) fn hello(&self) -> Vec<u8> {
        let mut hello = Vec::with_capacity(HELLO_BYTES);
        hello.extend_from_slice(&MAGIC);
        hello.extend_from_slice(&[self.key.role as u8, 0, 0, 0, 0, 0, 0, 0]);
        hello.extend_from_slice(&self.key.number.to_le_bytes());
        hello.extend_from_slice(&self.nonce);
        hello
    }

    pub(crate) fn handle(&mut self, inbox: &mut Inbox) -> CallerStep {
        let refusal = if self.transcript.is_some() {
            Refusal::Denied
        } else {
            Refusal::UnknownKey
        };
        match inbox.unread().first() {
            None | Some(&YES) => {}
            Some(&NO) => return CallerStep::Refused(refusal),
            Some(_) => return CallerStep::Refused(Refusal::Foreign),
        }
        let Some([_, rest @ ..]) = inbox.take::<ANSWER_BYTES>() else {
            return CallerStep::Wait;
        };
        match &self.transcript {
            None => {
                let transcript = Transcript {
                    key: self.key,
                    caller: self.nonce,
                    door: rest,
                };
                let proof = transcript.prove(&self.secret, "caller");
                self.transcript = Some(transcript);
                CallerStep::Send(proof.to_vec())
            }
            Some(transcript) if transcript.holds(&self.secret, "door", &rest) => CallerStep::Ready,
            Some(_) => CallerStep::Refused(Refusal::Denied),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DoorStep {
    Wait,
    Send(Vec<u8>),
    /// Proved; the verdict is to be sent.
    Admit(DoorKey, Vec<u8>),
    /// Not one of ours; an answer, if any, is to be sent before the connection is closed.
    Reject(&'static str, Vec<u8>),
}

/// The side that accepted the connection.
#[derive(Default)]
pub(crate) struct Doorman {
    admitted: Option<(Transcript, Secret)>,
}

impl Doorman {
    /// The most bytes that are worth reading from a stranger at once.
    pub(crate) const READ_BYTES: usize = HELLO_BYTES;

    /// `secret_of` knows the doors; `nonce` must be fresh for every connection.
    pub(crate) fn handle(
        &mut self,
        inbox: &mut Inbox,
        nonce: Nonce,
        secret_of: impl Fn(DoorKey) -> Option<Secret>,
    ) -> DoorStep {
        match self.admitted.take() {
            None => self.handle_hello(inbox, nonce, secret_of),
            Some((transcript, secret)) => match inbox.take::<PROOF_BYTES>() {
                None => {
                    self.admitted = Some((transcript, secret));
                    DoorStep::Wait
                }
                Some(proof) if transcript.holds(&secret, "caller", &proof) => {
                    DoorStep::Admit(transcript.key, answer(YES, transcript.prove(&secret, "door")))
                }
                Some(_) => DoorStep::Reject("its secret is another one", answer(NO, [0; 32])),
            },
        }
    }

    fn handle_hello(
        &mut self,
        inbox: &mut Inbox,
        nonce: Nonce,
        secret_of: impl Fn(DoorKey) -> Option<Secret>,
    ) -> DoorStep {
        let seen = inbox.unread().len().min(MAGIC.len());
        if inbox.unread()[..seen] != MAGIC[..seen] {
            return DoorStep::Reject("it speaks another protocol", Vec::new());
        }
        let Some(hello) = inbox.take::<HELLO_BYTES>() else {
            return DoorStep::Wait;
        };
        let role = match hello[8..16] {
            [1, 0, 0, 0, 0, 0, 0, 0] => Role::Rendezvous,
            [2, 0, 0, 0, 0, 0, 0, 0] => Role::Star,
            [3, 0, 0, 0, 0, 0, 0, 0] => Role::Net,
            _ => return DoorStep::Reject("it asks for an unknown role", Vec::new()),
        };
        let mut number = [0; 8];
        number.copy_from_slice(&hello[16..24]);
        let mut caller = [0; 32];
        caller.copy_from_slice(&hello[24..]);
        let key = DoorKey {
            role,
            number: u64::from_le_bytes(number),
        };
        let Some(secret) = secret_of(key) else {
            return DoorStep::Reject("it asks for an id that is not served here", answer(NO, [0; 32]));
        };
        self.admitted = Some((
            Transcript {
                key,
                caller,
                door: nonce,
            },
            secret,
        ));
        DoorStep::Send(answer(YES, nonce))
    }
}

fn answer(tag: u8, rest: [u8; 32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ANSWER_BYTES);
    bytes.push(tag);
    bytes.extend_from_slice(&rest);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: DoorKey = DoorKey {
        role: Role::Rendezvous,
        number: 7,
    };

    fn inbox(bytes: &[u8]) -> Inbox {
        let mut inbox = Inbox::default();
        inbox.push(bytes);
        inbox
    }

    /// Runs both sides; what the caller and the door ended with.
    fn meet(caller_secret: Secret, door_key: DoorKey, door_secret: Secret) -> (CallerStep, DoorStep) {
        let mut caller = Caller::new(KEY, caller_secret, [1; 32]);
        let mut doorman = Doorman::default();
        let secret_of = |key| (key == door_key).then_some(door_secret);
        let mut to_door = inbox(&caller.hello());
        loop {
            let at_door = doorman.handle(&mut to_door, [2; 32], secret_of);
            let (DoorStep::Send(bytes) | DoorStep::Admit(_, bytes) | DoorStep::Reject(_, bytes)) = &at_door else {
                panic!("the door waits for more than was sent");
            };
            match caller.handle(&mut inbox(bytes)) {
                CallerStep::Send(bytes) => to_door.push(&bytes),
                at_caller => return (at_caller, at_door),
            }
        }
    }

    #[test]
    fn only_equal_secrets_meet() {
        let (caller, door) = meet([9; 32], KEY, [9; 32]);
        assert_eq!(caller, CallerStep::Ready);
        assert!(matches!(door, DoorStep::Admit(KEY, _)));
        let (caller, door) = meet([9; 32], KEY, [8; 32]);
        assert_eq!(caller, CallerStep::Refused(Refusal::Denied));
        assert!(matches!(door, DoorStep::Reject(..)));
        for other in [
            DoorKey { number: 8, ..KEY },
            DoorKey {
                role: Role::Star,
                ..KEY
            },
        ] {
            assert_eq!(
                meet([9; 32], other, [9; 32]).0,
                CallerStep::Refused(Refusal::UnknownKey)
            );
        }
    }

    #[test]
    fn a_door_that_cannot_prove_itself_is_refused() {
        let mut caller = Caller::new(KEY, [9; 32], [1; 32]);
        assert!(matches!(
            caller.handle(&mut inbox(&answer(YES, [2; 32]))),
            CallerStep::Send(_)
        ));
        assert_eq!(
            caller.handle(&mut inbox(&answer(YES, [0; 32]))),
            CallerStep::Refused(Refusal::Denied)
        );
        let mut caller = Caller::new(KEY, [9; 32], [1; 32]);
        assert_eq!(
            caller.handle(&mut inbox(b"HTTP/1.1 400")),
            CallerStep::Refused(Refusal::Foreign)
        );
    }

    #[test]
    fn a_recorded_proof_is_worth_nothing_with_another_nonce() {
        let caller = Caller::new(KEY, [9; 32], [1; 32]);
        let old = Transcript {
            key: KEY,
            caller: [1; 32],
            door: [2; 32],
        }
        .prove(&[9; 32], "caller");
        let mut doorman = Doorman::default();
        let secret_of = |_| Some([9; 32]);
        assert!(matches!(
            doorman.handle(&mut inbox(&caller.hello()), [3; 32], secret_of),
            DoorStep::Send(_)
        ));
        assert!(matches!(
            doorman.handle(&mut inbox(&old), [3; 32], secret_of),
            DoorStep::Reject(..)
        ));
    }

    #[test]
    fn strangers_are_told_apart_by_their_first_bytes() {
        let hello = Caller::new(KEY, [9; 32], [1; 32]).hello();
        let mut wrong_role = hello.clone();
        wrong_role[8] = 4;
        for (bytes, waits) in [
            (&b""[..], true),
            (b"O", true),
            (&hello[..55], true),
            (b"G", false),
            (b"\x16\x03\x01", false),
            (&wrong_role, false),
        ] {
            let step = Doorman::default().handle(&mut inbox(bytes), [2; 32], |_| Some([9; 32]));
            assert_eq!(step == DoorStep::Wait, waits, "{bytes:?} gave {step:?}");
        }
    }

    #[test]
    fn the_mac_is_hmac_sha256() {
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let mac: [u8; 32] = mac(&key, &[b"what do ya want ", b"for nothing?"])
            .finalize()
            .into_bytes()
            .into();
        // RFC 4231, test case 2; HMAC's own padding makes the zeroes part of the same key.
        assert_eq!(mac[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
    }

    #[test]
    fn derived_secrets_differ_by_purpose_and_salt() {
        let secrets = [
            derive(&[1; 32], "a", b"x"),
            derive(&[1; 32], "a", b"y"),
            derive(&[1; 32], "b", b"x"),
        ];
        assert!(secrets[0] != secrets[1] && secrets[1] != secrets[2] && secrets[0] != secrets[2]);
        assert_eq!(secrets[0], derive(&[1; 32], "a", b"x"));
    }
}
