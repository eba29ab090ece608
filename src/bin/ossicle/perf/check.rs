//! Fills a rank's buffers, and finds every byte of a result that is not as it must be.
//!
//! A message lies between two margins of one fill byte that also poisons the receive buffer, so that data which was
//! never written and data written outside both show. Buffers are filled and read in blocks of whole periods of the
//! data (see `oracle`), so that every block starts alike and is compared as memory.

use super::oracle::PERIOD_ELEMS;
use crate::nccl_calls::DeviceMemory;
use crate::rank_device::RankDevice;
use nccl::error::Result;

/// Bytes before and after every message that nobody may write to; keeps the message as aligned as its memory.
pub(crate) const MARGIN_BYTES: usize = 64;
const FILL: u8 = 0xa5;
const BLOCK_BYTES: usize = 1 << 20;

/// The elements that were wrong, and the first of them in words.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    pub(crate) wrong: u64,
    pub(crate) complaint: Option<String>,
}

impl Findings {
    fn add(&mut self, wrong: u64, complaint: impl FnOnce() -> String) {
        self.wrong += wrong;
        self.complaint.get_or_insert_with(complaint);
    }
}

/// One rank's view of one message in one of its buffers.
pub(crate) struct Message<'a> {
    pub(crate) device: &'a RankDevice,
    pub(crate) memory: &'a DeviceMemory,
    /// What to call the buffer in a complaint.
    pub(crate) name: &'static str,
    pub(crate) count: usize,
    pub(crate) element_bytes: usize,
}

impl Message<'_> {
    fn bytes(&self) -> usize {
        self.count * self.element_bytes
    }

    /// Poison everywhere, the margins included.
    pub(crate) fn poison(&self) -> Result<()> {
        let total = self.bytes() + 2 * MARGIN_BYTES;
        self.write(0, total, &vec![FILL; total.min(BLOCK_BYTES)])
    }

    /// Data that repeats `period`.
    pub(crate) fn fill(&self, period: &[u8]) -> Result<()> {
        self.write(MARGIN_BYTES, self.bytes(), &self.block(period))
    }

    fn write(&self, start: usize, bytes: usize, block: &[u8]) -> Result<()> {
        for offset in (0..bytes).step_by(block.len().max(1)) {
            let part = &block[..block.len().min(bytes - offset)];
            self.device.upload(self.memory, start + offset, part)?;
        }
        Ok(())
    }

    /// Whole periods: enough for the message, or as many as make a block.
    fn block(&self, period: &[u8]) -> Vec<u8> {
        debug_assert_eq!(period.len(), PERIOD_ELEMS * self.element_bytes);
        let periods = self.bytes().min(BLOCK_BYTES).div_ceil(period.len());
        period.repeat(periods)
    }

    /// Compares with data that repeats `period`.
    pub(crate) fn compare(&self, period: &[u8], findings: &mut Findings) -> Result<()> {
        let block = self.block(period);
        let mut found = vec![0; block.len()];
        for offset in (0..self.bytes()).step_by(block.len().max(1)) {
            let part_bytes = block.len().min(self.bytes() - offset);
            let (found, expected) = (&mut found[..part_bytes], &block[..part_bytes]);
            self.device.download(self.memory, MARGIN_BYTES + offset, found)?;
            if found != expected {
                self.compare_elements(offset / self.element_bytes, found, expected, findings);
            }
        }
        Ok(())
    }

    fn compare_elements(&self, first: usize, found: &[u8], expected: &[u8], findings: &mut Findings) {
        let pairs = found
            .chunks(self.element_bytes)
            .zip(expected.chunks(self.element_bytes))
            .enumerate();
        for (index, (found, expected)) in pairs.filter(|(_, (found, expected))| found != expected) {
            findings.add(1, || {
                let (name, index) = (self.name, first + index);
                format!("{name}: element {index} is {}, expected {}", hex(found), hex(expected))
            });
        }
    }

    /// Both margins must be as `poison` left them.
    pub(crate) fn check_margins(&self, findings: &mut Findings) -> Result<()> {
        for (start, side) in [(0, "before"), (MARGIN_BYTES + self.bytes(), "after")] {
            let mut margin = [0; MARGIN_BYTES];
            self.device.download(self.memory, start, &mut margin)?;
            let wrong = margin.iter().filter(|byte| **byte != FILL).count() as u64;
            if wrong > 0 {
                findings.add(wrong, || {
                    format!("{}: {wrong} of the {MARGIN_BYTES} bytes {side} it changed", self.name)
                });
            }
        }
        Ok(())
    }
}

/// The element as a number in hexadecimal: its bytes from the highest down.
fn hex(element: &[u8]) -> String {
    element
        .iter()
        .rev()
        .fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_shown_as_numbers() {
        assert_eq!(hex(&1.0f32.to_le_bytes()), "0x3f800000");
        assert_eq!(hex(&[7]), "0x07");
    }
}
