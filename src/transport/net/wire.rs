//! What stands in front of each slot's bytes on a TCP connection.
//!
//! ```text
//! 0 kind 4 · 4 position 4 · 8 bytes 4 · 12 step 4 · 16 ordinal 8          little-endian
//! ```
//!
//! `Header` is the raw view that judges nothing; `Frame` is the meaning. The position counts the connection's slots and
//! wraps at 32 bits: bytes that were lost, doubled or altered on the way do not go unnoticed as a shifted stream would.
//! Nothing here does I/O.

use super::SlotNote;

pub(super) const HEADER_BYTES: usize = 24;
/// "OSNT" and the kind.
const SLOT: u32 = 0x4f53_4e01;
const FAREWELL: u32 = 0x4f53_4e02;

/// A header as it lies in memory.
pub(super) struct Header(pub(super) [u8; HEADER_BYTES]);

impl Header {
    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }
    pub(super) fn kind(&self) -> u32 {
        self.word(0)
    }
    pub(super) fn position(&self) -> u32 {
        self.word(4)
    }
    fn bytes(&self) -> u32 {
        self.word(8)
    }
    fn step(&self) -> u32 {
        self.word(12)
    }
    fn ordinal(&self) -> u64 {
        u64::from(self.word(16)) | u64::from(self.word(20)) << 32
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// `note.bytes` of payload follow.
    Slot { position: u32, note: SlotNote },
    /// Nothing follows.
    Farewell { position: u32 },
}

impl Frame {
    /// None for what no version of this library sends.
    pub(super) fn parse(header: &Header) -> Option<Frame> {
        let (position, note) = (
            header.position(),
            SlotNote {
                bytes: header.bytes(),
                step: header.step(),
                ordinal: header.ordinal(),
            },
        );
        match header.kind() {
            SLOT => Some(Frame::Slot { position, note }),
            FAREWELL if note == SlotNote::default() => Some(Frame::Farewell { position }),
            _ => None,
        }
    }

    pub(super) fn emit(&self) -> Header {
        let (kind, position, note) = match *self {
            Frame::Slot { position, note } => (SLOT, position, note),
            Frame::Farewell { position } => (FAREWELL, position, SlotNote::default()),
        };
        let mut bytes = [0; HEADER_BYTES];
        for (at, word) in [kind, position, note.bytes, note.step].into_iter().enumerate() {
            bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[16..].copy_from_slice(&note.ordinal.to_le_bytes());
        Header(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_frame_comes_back_as_it_was(position: u32, bytes: u32, step: u32, ordinal: u64, farewell: bool) {
            let frame = match farewell {
                true => Frame::Farewell { position },
                false => Frame::Slot { position, note: SlotNote { bytes, step, ordinal } },
            };
            prop_assert_eq!(Frame::parse(&frame.emit()), Some(frame));
        }

        #[test]
        fn what_parses_is_what_was_emitted(bytes: [u8; HEADER_BYTES], kind in 0x4f53_4e00u32..0x4f53_4e04) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            if let Some(frame) = Frame::parse(&Header(bytes)) {
                prop_assert_eq!(frame.emit().0, bytes);
            }
        }
    }

    #[test]
    fn the_offsets_are_those_of_the_picture() {
        let note = SlotNote {
            bytes: 0x0504_0302,
            step: 7,
            ordinal: 0x0102_0304_0506_0708,
        };
        let header = Frame::Slot { position: 9, note }.emit().0;
        assert_eq!(header[..8], [1, 0x4e, 0x53, 0x4f, 9, 0, 0, 0]);
        assert_eq!(header[8..16], [2, 3, 4, 5, 7, 0, 0, 0]);
        assert_eq!(header[16..], [8, 7, 6, 5, 4, 3, 2, 1]);
    }
}
