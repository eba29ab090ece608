//! What travels on a bootstrap connection after the handshake: frames, and the messages inside them.
//!
//! A frame is `[u32 body bytes][u8 kind][3 zero bytes][body]`, little-endian. `Frame` is the raw view that judges
//! nothing; `Message` is the meaning, with `parse` and `emit`. Every length is compared with its bound before memory
//! is taken for it, and bytes left over at the end of a body make it malformed.

use super::Introduction;
use crate::error::{Code, Error};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

pub(super) const MAX_INTRODUCTION_BYTES: usize = 64 << 10;
pub(super) const MAX_CONTRIBUTION_BYTES: usize = 1 << 20;
pub(super) const MAX_PLACE_BYTES: usize = 1 << 10;
pub(super) const MAX_TEXT_BYTES: usize = 4 << 10;
/// A hub keeps a slot a rank; no launcher comes near this many.
pub(super) const MAX_RANKS: u32 = 1 << 20;
const HEADER_BYTES: usize = 8;
/// No wait is longer: a time from outside must not overflow the clock.
pub(super) const MAX_TIMEOUT_MS: u64 = 7 * 24 * 3600 * 1000;
/// The largest body is a contribution with its few fixed fields.
const MAX_BODY_BYTES: usize = MAX_CONTRIBUTION_BYTES + 64;

/// Bytes that are not a message; the connection that sent them is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Where the star of a session is, as rank 0 announces it when it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubAddress {
    pub(super) address: SocketAddr,
    pub(super) session: u64,
    pub(super) token: [u8; 32],
}

/// What became of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Lost = 0,
    Aborted = 1,
    Left = 2,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Rank to root: the rank is here.
    Join {
        timeout_ms: u64,
        hub: Option<HubAddress>,
        introduction: Introduction,
    },
    /// Root to rank: all are here; `ranks` times `Member` follows, in rank order.
    Roster {
        ranks: u32,
        hub: Option<HubAddress>,
    },
    Member {
        introduction: Introduction,
    },
    /// Root or hub to rank: there will be no communicator.
    Refused {
        error: Error,
    },
    /// Rank to root: the star is complete, the rendezvous is over for this rank.
    Settled,
    /// Rank to root: this rank gives up, and why.
    Withdraw {
        error: Error,
    },
    /// Rank 0 to the further roots of a scalable init: this id is used up.
    Spent,
    /// Rank to hub.
    Attach {
        rank: u32,
        timeout_ms: u64,
        place: String,
    },
    /// Hub to rank: every rank is attached.
    Complete,
    Contribution {
        round: u64,
        timeout_ms: u64,
        payload: Result<Vec<u8>, Error>,
    },
    /// Hub to rank: one rank's payload of a round; all of a round follow each other in rank order.
    Part {
        round: u64,
        payload: Vec<u8>,
    },
    RoundFailed {
        round: u64,
        error: Error,
    },
    /// Rank to hub.
    Farewell,
    /// Rank to hub.
    Aborting,
    /// Hub to rank: what became of another rank.
    Event {
        rank: u32,
        fate: Fate,
        place: String,
    },
}

/// A frame as it lies in memory.
pub(super) struct Frame<'a>(&'a [u8]);

impl<'a> Frame<'a> {
    /// None while the header is incomplete.
    pub(super) fn new(bytes: &'a [u8]) -> Option<Frame<'a>> {
        (bytes.len() >= HEADER_BYTES).then_some(Frame(bytes))
    }
    pub(super) fn body_bytes(&self) -> usize {
        let [a, b, c, d, ..] = *self.0 else { return 0 };
        u32::from_le_bytes([a, b, c, d]) as usize
    }
    pub(super) fn kind(&self) -> u8 {
        self.0[4]
    }
    pub(super) fn padding(&self) -> &'a [u8] {
        &self.0[5..HEADER_BYTES]
    }
    pub(super) fn total_bytes(&self) -> usize {
        HEADER_BYTES + self.body_bytes()
    }
    /// None while the body is incomplete.
    pub(super) fn body(&self) -> Option<&'a [u8]> {
        self.0.get(HEADER_BYTES..self.total_bytes())
    }
}

/// Received bytes that were not taken yet.
#[derive(Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    taken: usize,
}

impl Inbox {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }
    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }
    /// Takes exactly N bytes, or none while fewer are there.
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.unread().first_chunk::<N>()?;
        self.taken += N;
        Some(bytes)
    }
    /// Takes the next message; None while it is incomplete.
    pub(super) fn take_message(&mut self) -> Result<Option<Message>, Malformed> {
        let Some(frame) = Frame::new(self.unread()) else {
            return Ok(None);
        };
        if frame.body_bytes() > MAX_BODY_BYTES || frame.padding() != [0; 3] {
            return Err(Malformed);
        }
        let Some(body) = frame.body() else { return Ok(None) };
        let message = Message::parse(frame.kind(), body)?;
        self.taken += frame.total_bytes();
        // Without this a long session would keep every byte that it ever received.
        if self.taken > MAX_BODY_BYTES {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        Ok(Some(message))
    }
}

impl Message {
    pub(super) fn parse(kind: u8, body: &[u8]) -> Result<Message, Malformed> {
        let mut reader = Reader(body);
        let message = Message::read(kind, &mut reader).ok_or(Malformed)?;
        reader.0.is_empty().then_some(message).ok_or(Malformed)
    }

    fn read(kind: u8, reader: &mut Reader) -> Option<Message> {
        Some(match kind {
            1 => Message::Join {
                timeout_ms: reader.timeout_ms()?,
                hub: reader.hub()?,
                introduction: reader.introduction()?,
            },
            2 => Message::Roster {
                ranks: reader.ranks()?,
                hub: reader.hub()?,
            },
            3 => Message::Member {
                introduction: reader.introduction()?,
            },
            4 => Message::Refused { error: reader.error()? },
            5 => Message::Settled,
            6 => Message::Withdraw { error: reader.error()? },
            7 => Message::Spent,
            8 => Message::Attach {
                rank: reader.u32()?,
                timeout_ms: reader.timeout_ms()?,
                place: reader.place()?,
            },
            9 => Message::Complete,
            10 => Message::Contribution {
                round: reader.u64()?,
                timeout_ms: reader.timeout_ms()?,
                payload: match reader.u8()? {
                    0 => Ok(reader.bytes(MAX_CONTRIBUTION_BYTES)?.to_vec()),
                    1 => Err(reader.error()?),
                    _ => return None,
                },
            },
            11 => Message::Part {
                round: reader.u64()?,
                payload: reader.bytes(MAX_CONTRIBUTION_BYTES)?.to_vec(),
            },
            12 => Message::RoundFailed {
                round: reader.u64()?,
                error: reader.error()?,
            },
            13 => Message::Farewell,
            14 => Message::Aborting,
            15 => Message::Event {
                rank: reader.u32()?,
                fate: reader.fate()?,
                place: reader.place()?,
            },
            _ => return None,
        })
    }

    /// Appends the frame of this message.
    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_BYTES]);
        self.write_body(&mut Writer(out));
        let body_bytes = (out.len() - start - HEADER_BYTES) as u32;
        out[start..start + 4].copy_from_slice(&body_bytes.to_le_bytes());
        out[start + 4] = self.kind();
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.emit(&mut out);
        out
    }

    fn kind(&self) -> u8 {
        match self {
            Message::Join { .. } => 1,
            Message::Roster { .. } => 2,
            Message::Member { .. } => 3,
            Message::Refused { .. } => 4,
            Message::Settled => 5,
            Message::Withdraw { .. } => 6,
            Message::Spent => 7,
            Message::Attach { .. } => 8,
            Message::Complete => 9,
            Message::Contribution { .. } => 10,
            Message::Part { .. } => 11,
            Message::RoundFailed { .. } => 12,
            Message::Farewell => 13,
            Message::Aborting => 14,
            Message::Event { .. } => 15,
        }
    }

    fn write_body(&self, writer: &mut Writer) {
        match self {
            Message::Join {
                timeout_ms,
                hub,
                introduction,
            } => {
                writer.u64(*timeout_ms);
                writer.hub(hub.as_ref());
                writer.introduction(introduction);
            }
            Message::Roster { ranks, hub } => {
                writer.u32(*ranks);
                writer.hub(hub.as_ref());
            }
            Message::Member { introduction } => writer.introduction(introduction),
            Message::Refused { error } | Message::Withdraw { error } => writer.error(error),
            Message::Attach {
                rank,
                timeout_ms,
                place,
            } => {
                writer.u32(*rank);
                writer.u64(*timeout_ms);
                writer.text(place, MAX_PLACE_BYTES);
            }
            Message::Contribution {
                round,
                timeout_ms,
                payload,
            } => {
                writer.u64(*round);
                writer.u64(*timeout_ms);
                writer.u8(payload.is_err().into());
                match payload {
                    Ok(payload) => writer.bytes(payload),
                    Err(error) => writer.error(error),
                }
            }
            Message::Part { round, payload } => {
                writer.u64(*round);
                writer.bytes(payload);
            }
            Message::RoundFailed { round, error } => {
                writer.u64(*round);
                writer.error(error);
            }
            Message::Event { rank, fate, place } => {
                writer.u32(*rank);
                writer.u8(*fate as u8);
                writer.text(place, MAX_PLACE_BYTES);
            }
            Message::Settled | Message::Spent | Message::Complete | Message::Farewell | Message::Aborting => {}
        }
    }
}

/// The longest start of `text` that has at most `limit` bytes and ends at a character.
pub(super) fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }
    fn text(&mut self, text: &str, limit: usize) {
        self.bytes(cut(text, limit).as_bytes());
    }
    fn error(&mut self, error: &Error) {
        self.u8(error.code as i32 as u8);
        self.text(&error.text, MAX_TEXT_BYTES);
    }
    fn address(&mut self, address: SocketAddr) {
        let scope = match address {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(address) => address.scope_id(),
        };
        match address.ip() {
            IpAddr::V4(ip) => {
                self.u8(4);
                self.0.extend_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                self.u8(6);
                self.0.extend_from_slice(&ip.octets());
                self.u32(scope);
            }
        }
        self.u16(address.port());
    }
    fn hub(&mut self, hub: Option<&HubAddress>) {
        self.u8(hub.is_some().into());
        if let Some(hub) = hub {
            self.address(hub.address);
            self.u64(hub.session);
            self.0.extend_from_slice(&hub.token);
        }
    }
    fn introduction(&mut self, introduction: &Introduction) {
        self.u32(introduction.rank);
        self.u32(introduction.ranks);
        self.u32(introduction.version);
        self.u64(introduction.layout);
        self.text(&introduction.place, MAX_PLACE_BYTES);
        self.bytes(&introduction.payload);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }
    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn timeout_ms(&mut self) -> Option<u64> {
        self.u64().filter(|timeout_ms| *timeout_ms <= MAX_TIMEOUT_MS)
    }
    fn ranks(&mut self) -> Option<u32> {
        self.u32().filter(|ranks| (1..=MAX_RANKS).contains(ranks))
    }
    fn bytes(&mut self, limit: usize) -> Option<&'a [u8]> {
        let count = self.u32()? as usize;
        if count > limit {
            return None;
        }
        self.take(count)
    }
    fn text(&mut self, limit: usize) -> Option<String> {
        self.bytes(limit)
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
    fn place(&mut self) -> Option<String> {
        self.text(MAX_PLACE_BYTES)
    }
    fn error(&mut self) -> Option<Error> {
        let code = Code::from_raw(self.u8()?.into())?;
        Some(Error {
            code,
            text: self.text(MAX_TEXT_BYTES)?,
        })
    }
    fn fate(&mut self) -> Option<Fate> {
        [Fate::Lost, Fate::Aborted, Fate::Left]
            .get(self.u8()? as usize)
            .copied()
    }
    fn address(&mut self) -> Option<SocketAddr> {
        Some(match self.u8()? {
            4 => {
                let ip = Ipv4Addr::from(self.array::<4>()?);
                SocketAddr::new(ip.into(), self.u16()?)
            }
            6 => {
                let ip = Ipv6Addr::from(self.array::<16>()?);
                let scope = self.u32()?;
                SocketAddrV6::new(ip, self.u16()?, 0, scope).into()
            }
            _ => return None,
        })
    }
    fn hub(&mut self) -> Option<Option<HubAddress>> {
        match self.u8()? {
            0 => Some(None),
            1 => Some(Some(HubAddress {
                address: self.address()?,
                session: self.u64()?,
                token: self.array()?,
            })),
            _ => None,
        }
    }
    fn introduction(&mut self) -> Option<Introduction> {
        let (rank, ranks) = (self.u32()?, self.ranks()?);
        (rank < ranks).then_some(())?;
        Some(Introduction {
            rank,
            ranks,
            version: self.u32()?,
            layout: self.u64()?,
            place: self.place()?,
            payload: self.bytes(MAX_INTRODUCTION_BYTES)?.to_vec(),
        })
    }
}
