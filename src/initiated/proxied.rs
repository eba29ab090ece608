//! The same queue pairs under the CPU proxy: rings in the HCA's memory, and a transfer for each channel.

use super::{Direction, End, Links, Poster, QUEUE_BLOCKS};
use crate::error::{Error, Result};
use crate::proxy::{Connection, Names, Ring};
use crate::transport::mlx5::{Completions, SendQueue};
use crate::transport::net::hca::{Hca, Place, Queue};
use std::any::Any;
use std::sync::Arc;

impl Links {
    /// What the proxy is to drive. Once: each queue has one poster.
    pub fn connections(self: &Arc<Links>) -> Result<Vec<Connection>> {
        if self.geometry.poster != Poster::Cpu {
            return Err(Error::internal("the proxy was to post where kernels do"));
        }
        let channels = self.geometry.ring.channels;
        let all = self.ends.iter().enumerate().flat_map(|(index, end)| {
            (0..channels).map(move |channel| self.connection(end, channel, index * channels + channel))
        });
        all.collect()
    }

    fn connection(self: &Arc<Links>, end: &End, channel: usize, index: usize) -> Result<Connection> {
        let kept: Arc<dyn Any + Send + Sync> = self.clone();
        let (base, bytes) = (self.memory.address(), self.memory.bytes());
        // SAFETY: zeroed memory of so many bytes, which the links keep.
        let ring = unsafe { Ring::over(base, bytes, &kept, end.offset, self.geometry.ring, channel) }?;
        let (qp, cq) = &end.queues[channel];
        let targets = &self.targets[index];
        let landing = end.offset + self.geometry.words_at() + channel * self.geometry.word_bytes();
        let queue = Queue {
            // SAFETY: the links keep the queue pair, which nobody else posts to.
            sends: unsafe { SendQueue::new(qp.place()) },
            blocks: QUEUE_BLOCKS,
            // SAFETY: likewise, and nobody else reads its completions.
            completions: unsafe { Completions::new(cq.place()) },
            local: Place {
                slots: targets.local_slots.address,
                landing: base as u64 + landing as u64,
                key: targets.local_slots.key,
            },
            remote: Place {
                slots: targets.remote_slots.address,
                landing: targets.counter.address,
                key: targets.counter.key,
            },
            card: self.hca.clone(),
            _kept: kept,
        };
        Ok(Connection {
            direction: end.direction,
            ring,
            transfer: Box::new(Hca::new(queue)),
            names: Names {
                rank: self.rank,
                peer: end.peer,
                channel: channel as u32,
            },
        })
    }

    /// Where kernels see the ring of channel 0; None where no link leads there.
    pub fn ring(&self, direction: Direction, peer: u32) -> Option<*mut u8> {
        let mut ends = self.ends.iter();
        let end = ends.find(|end| end.direction == direction && end.peer == peer)?;
        Some(self.memory.kernel_address().wrapping_add(end.offset))
    }
}
