//! A transfer over one TCP connection.
//!
//! The sender gives the kernel header and payload in one call, straight from the slot; a slot is sent when the kernel has
//! all of it. The receiver reads headers through a small stage: one read brings the header and the payload's beginning,
//! which is copied, or all of a small slot, or several; the rest of a large payload goes straight into the slot, and the
//! same read takes what follows it into the stage.
//!
//! The receiver reads only while a slot is posted, so what comes early waits in the sockets' buffers, and TCP holds the
//! sender back.

use super::wire::{Frame, Header, HEADER_BYTES};
use super::{Completion, SlotNote, Slots, Transfer};
use crate::bootstrap::{describe, Descriptor};
use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::net::{self, SendAncillaryBuffer, SendFlags};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;

/// So much of a large payload is copied once more at most. One page holds 170 headers.
const STAGE_BYTES: usize = 4096;

pub struct Socket {
    fd: Descriptor,
    peer: SocketAddr,
    slots: Option<Slots>,
    /// Completed in this direction.
    position: u32,
    sends: VecDeque<(usize, SlotNote)>,
    receives: VecDeque<usize>,
    /// Bytes of the first send, or of the farewell, that are gone, header included.
    sent: usize,
    stage: Stage,
    /// What the first receive expects, once its header came.
    expected: Option<SlotNote>,
    /// Bytes of its payload that came.
    received: usize,
    /// The peer said that nothing follows.
    ended: bool,
}

/// Bytes that were read and not taken.
struct Stage {
    bytes: Box<[u8; STAGE_BYTES]>,
    from: usize,
    to: usize,
}

impl Stage {
    fn unread(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.to - self.from);
        into[..count].copy_from_slice(&self.bytes[self.from..self.from + count]);
        self.from += count;
        count
    }

    /// Where the next bytes go, behind what is unread, which moves to the front.
    fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.from..self.to, 0);
        self.to -= self.from;
        self.from = 0;
        &mut self.bytes[self.to..]
    }
}

impl Socket {
    /// `fd` is connected, non-blocking and carries nothing but this transfer from here on.
    pub(super) fn new(fd: Descriptor, peer: SocketAddr) -> Socket {
        Socket {
            fd,
            peer,
            slots: None,
            position: 0,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            sent: 0,
            stage: Stage {
                bytes: Box::new([0; STAGE_BYTES]),
                from: 0,
                to: 0,
            },
            expected: None,
            received: 0,
            ended: false,
        }
    }

    fn broken(&self, errno: Errno) -> Error {
        Error::remote(format!(
            "the connection to {} broke: {} (errno {}); the process there ended, or the network between the hosts failed: \
             look at that rank's log",
            self.peer,
            describe(errno),
            errno.raw_os_error()
        ))
    }

    fn misread(&self, what: impl std::fmt::Display) -> Error {
        Error::remote(format!(
            "the connection from {} carries {what}: all ranks must load the same build of the library, and nothing between \
             the hosts may alter the data",
            self.peer
        ))
    }

    fn slots(&self) -> Result<&Slots> {
        let none = || Error::internal("a transfer was used before its slots were registered");
        self.slots.as_ref().ok_or_else(none)
    }

    /// Sends what the kernel takes of `header` and payload, behind what is sent; whether that is all.
    fn send(&mut self, header: &Header, payload: Option<(usize, usize)>) -> Result<bool> {
        let slots = self.slots()?;
        let (index, bytes) = payload.unwrap_or((0, 0));
        let total = HEADER_BYTES + bytes;
        let mut sent = self.sent;
        while sent < total {
            // SAFETY: the slot is posted for sending until this send completes, so that its filler leaves it alone.
            let payload = unsafe { slots.read(index, sent.saturating_sub(HEADER_BYTES), bytes) };
            let parts = [IoSlice::new(&header.0[sent.min(HEADER_BYTES)..]), IoSlice::new(payload)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match net::sendmsg(&self.fd, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(self.broken(errno)),
            }
        }
        self.sent = sent % total;
        Ok(sent == total)
    }

    fn poll_send(&mut self) -> Result<Option<Completion>> {
        let Some((index, note)) = self.sends.front().copied() else {
            return Ok(None);
        };
        let position = self.position;
        if !self.send(
            &Frame::Slot { position, note }.emit(),
            Some((index, note.bytes as usize)),
        )? {
            return Ok(None);
        }
        self.sends.pop_front();
        self.position = position.wrapping_add(1);
        Ok(Some(Completion::Sent(index)))
    }

    /// Takes the next header off the stage and judges it; false while it is incomplete.
    fn take_header(&mut self) -> Result<bool> {
        if self.stage.unread().len() < HEADER_BYTES {
            return Ok(false);
        }
        let mut header = Header([0; HEADER_BYTES]);
        self.stage.take(&mut header.0);
        let (position, expected) = (self.position, self.slots()?.slot_bytes());
        match Frame::parse(&header) {
            Some(Frame::Slot { position: found, .. } | Frame::Farewell { position: found }) if found != position => {
                Err(self.misread(format_args!("slot {found} where slot {position} is due")))
            }
            Some(Frame::Slot { note, .. }) if note.bytes as usize > expected => {
                let bytes = note.bytes;
                Err(self.misread(format_args!("a slot of {bytes} bytes, where slots have {expected}")))
            }
            Some(Frame::Slot { note, .. }) => {
                (self.expected, self.received) = (Some(note), 0);
                Ok(true)
            }
            Some(Frame::Farewell { .. }) => {
                self.ended = true;
                Ok(false)
            }
            None => {
                let kind = header.kind();
                Err(self.misread(format_args!("no header of ours (it begins with {kind:#x})")))
            }
        }
    }

    fn poll_receive(&mut self) -> Result<Option<Completion>> {
        let Some(index) = self.receives.front().copied().filter(|_| !self.ended) else {
            return Ok(None);
        };
        loop {
            if self.expected.is_none() && !self.take_header()? && self.ended {
                return Ok(None);
            }
            let Some(slots) = self.slots.as_mut() else {
                return Ok(None);
            };
            let rest = match self.expected {
                None => &mut [],
                // SAFETY: the slot is posted for receiving until this receive completes, so that its reader leaves it alone.
                Some(note) => unsafe { slots.write(index, self.received, note.bytes as usize) },
            };
            let staged = self.stage.take(rest);
            self.received += staged;
            let rest = &mut rest[staged..];
            if let Some(note) = self.expected.filter(|_| rest.is_empty()) {
                self.expected = None;
                self.receives.pop_front();
                self.position = self.position.wrapping_add(1);
                return Ok(Some(Completion::Received(index, note)));
            }
            let direct = rest.len();
            let mut parts = [IoSliceMut::new(rest), IoSliceMut::new(self.stage.room())];
            match rustix::io::readv(&self.fd, &mut parts) {
                Ok(0) => return Err(self.closed()),
                Ok(count) => {
                    self.received += count.min(direct);
                    self.stage.to += count.saturating_sub(direct);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(self.broken(errno)),
            }
        }
    }

    /// The connection ended without a farewell.
    fn closed(&self) -> Error {
        let where_it_was = match self.expected.is_some() || !self.stage.unread().is_empty() {
            true => "in the middle of a slot",
            false => "without a farewell",
        };
        Error::remote(format!(
            "the connection from {} was closed {where_it_was}: the process there ended or its rank was aborted; look at that \
             rank's log",
            self.peer
        ))
    }
}

impl Transfer for Socket {
    fn register(&mut self, slots: Slots) -> Result<()> {
        if self.slots.is_some() {
            return Err(Error::internal("the slots of a transfer were registered twice"));
        }
        // Nothing is allocated once slots move.
        self.sends.reserve(slots.count());
        self.receives.reserve(slots.count());
        self.slots = Some(slots);
        Ok(())
    }

    fn post_send(&mut self, index: usize, note: SlotNote) -> Result<()> {
        let slots = self.slots()?;
        if index >= slots.count() || note.bytes as usize > slots.slot_bytes() || self.sends.len() == slots.count() {
            return Err(Error::internal(format!(
                "slot {index} of {} with {note:?} was posted, where slots have {} bytes",
                slots.count(),
                slots.slot_bytes()
            )));
        }
        self.sends.push_back((index, note));
        Ok(())
    }

    fn post_receive(&mut self, index: usize) -> Result<()> {
        let count = self.slots()?.count();
        if index >= count || self.receives.len() == count {
            return Err(Error::internal(format!("slot {index} of {count} was posted once more")));
        }
        self.receives.push_back(index);
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Completion>> {
        match self.poll_send()? {
            None => self.poll_receive(),
            sent => Ok(sent),
        }
    }

    fn say_farewell(&mut self) -> Result<bool> {
        if self.ended {
            return Ok(true);
        }
        if !self.sends.is_empty() {
            return Ok(false);
        }
        let position = self.position;
        self.ended = self.send(&Frame::Farewell { position }.emit(), None)?;
        Ok(self.ended)
    }
}
