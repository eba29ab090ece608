//! The order of one rank's launches in different streams, eager and captured, and when the eager ones are done.
//!
//! Kernels of one rank must run one after another. Of eager launches the library sees to it with an event where the
//! stream changes, and of captured ones with an edge within their graph. Between replays, which the library does not
//! see, and everything else of the communicator the order is the caller's duty.
//!
//! Until a communicator is captured its kernels are counted: as many left as were launched. Every replay counts up
//! `Control::left` too, so that from the first capture on each eager launch is followed by an event instead, and the
//! count stands for the launches before only: those are done before a replay begins, by the caller's duty.

use super::{Engine, Part, Work};
use crate::device::{Mark, StreamKey};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// A communicator may be captured into so many graphs at once. The end of a capture is not seen; one that is forgotten
/// while it goes on is taken for a new one, and its next launch has no edge from the one before.
pub(super) const CAPTURES_AT_ONCE: usize = 16;

/// A stream that a launch goes to: its handle, and what the device tells of it.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) stream: *mut c_void,
    pub(super) key: StreamKey,
}

#[derive(Default)]
pub(super) struct StreamOrder {
    /// The caller's stream of the last eager launch: its key and handle.
    eager: Option<(u64, usize)>,
    /// Behind the last eager launch, if that came after the first captured one.
    mark: Option<Mark>,
    captured: bool,
    /// The latest captures, oldest first.
    captures: VecDeque<CaptureTail>,
    sides: SideStreams,
}

/// The library's own streams for launches beside a caller's stream (`fork`). One that a capture has drawn in stays in it
/// to its end, so that eager launches have one to themselves, and captures that are open at once one each.
#[derive(Default)]
struct SideStreams {
    /// Its handle and key.
    eager: Option<(usize, u64)>,
    captured: Vec<usize>,
}

impl StreamOrder {
    pub(super) fn was_captured(&self) -> bool {
        self.captured
    }
}

/// The stream of the last launch in a capture.
struct CaptureTail {
    capture: u64,
    stream: u64,
    handle: usize,
}

impl Engine {
    /// Whether all eager launches have left.
    pub(super) fn idle(&self) -> Result<bool> {
        self.is_idle(&self.order.lock())
    }

    fn is_idle(&self, order: &StreamOrder) -> Result<bool> {
        match order.mark {
            Some(mark) => self.device.reached(mark),
            None => Ok(self.control().left.load(Ordering::Acquire) >= self.launched.load(Ordering::Acquire)),
        }
    }

    /// Refuses eager work that could not be ordered behind this rank's last: nothing can wait for a stream that has
    /// come under capture since, and the caller's own thread waits for no stream.
    pub(super) fn check_order(&self, works: &[Work]) -> Result<()> {
        let order = self.order.lock();
        let (Some(first), Some((stream, handle))) = (works.first(), order.eager) else {
            return Ok(());
        };
        // A stream can wait for the mark whatever has become of the one that it was put into.
        if order.mark.is_some() && !first.on_callers_thread() {
            return Ok(());
        }
        let StreamKey { stream: next, capture } = first.stream_key;
        if capture.is_some() || next == stream || self.is_idle(&order)? {
            return Ok(());
        }
        let last = handle as *mut c_void;
        if first.on_callers_thread() {
            return Err(Error::usage(format!(
                "rank {}: the operation before this one still runs in stream {last:p}: synchronise that before an operation \
                 on the default stream",
                self.rank
            )));
        }
        match self.device.check_stream(last)?.capture {
            None => Ok(()),
            Some(_) => Err(Error::usage(format!(
                "rank {}: the operation before this one still runs in stream {last:p}, which is under CUDA graph capture \
                 now: synchronise a stream before capturing it",
                self.rank
            ))),
        }
    }

    /// Orders a launch behind this rank's work in another stream, and says which stream comes last. Where that work
    /// has left, the other stream is not asked: its owner may have destroyed it.
    pub(super) fn before_launch(&self, target: Target) -> Result<()> {
        let mut order = self.order.lock();
        let (key, handle) = (target.key.stream, target.stream as usize);
        let Some(capture) = target.key.capture else {
            if let Some((_, last)) = order.eager.filter(|(stream, _)| *stream != key) {
                match order.mark {
                    _ if self.is_idle(&order)? => {}
                    Some(mark) => self.device.wait_for_mark(mark, target.stream)?,
                    None => self.device.order_streams(last as *mut c_void, target.stream)?,
                }
            }
            order.eager = Some((key, handle));
            return Ok(());
        };
        match order.captures.iter_mut().find(|tail| tail.capture == capture) {
            Some(tail) => {
                if tail.stream != key {
                    self.device.order_streams(tail.handle as *mut c_void, target.stream)?;
                }
                (tail.stream, tail.handle) = (key, handle);
            }
            None => {
                self.device
                    .keep_for_graph(target.stream, Arc::clone(&self.memory) as _)?;
                order.captured = true;
                self.stay_awake();
                if order.captures.len() == CAPTURES_AT_ONCE {
                    order.captures.pop_front();
                }
                order.captures.push_back(CaptureTail {
                    capture,
                    stream: key,
                    handle,
                });
            }
        }
        Ok(())
    }

    /// Puts one kernel into its stream, after `before_launch`. It is counted before it can run.
    pub(super) fn enqueue(&self, work: &Work, target: Target) -> Result<()> {
        let launch = self.launch_of(work, target.stream);
        if target.key.capture.is_some() {
            return self.device.enqueue(&launch);
        }
        self.count_launches(1);
        self.device.enqueue(&launch).inspect_err(|_| self.uncount_launches(1))?;
        let mut order = self.order.lock();
        if order.captured {
            order.mark = Some(self.device.mark(order.mark, target.stream)?);
        }
        Ok(())
    }

    /// At the end of the engine.
    pub(super) fn give_mark_back(&self) {
        if let Some(mark) = self.order.lock().mark.take() {
            self.device.unmark(mark);
        }
    }

    /// A stream of this rank's own for a launch that must not queue up in the caller's.
    pub(super) fn side(&self, beside: &Work) -> Result<Target> {
        let mut order = self.order.lock();
        let sides = &mut order.sides;
        let handle = |stream: usize| stream as *mut c_void;
        let Some(capture) = beside.stream_key.capture else {
            let (stream, key) = match sides.eager {
                Some(side) => side,
                None => {
                    let stream = self.device.side_stream(beside.stream)?;
                    let key = self.device.check_stream(stream).inspect_err(|_| {
                        self.device.give_side_stream_back(stream);
                    })?;
                    *sides.eager.insert((stream as usize, key.stream))
                }
            };
            let capture = None;
            return Ok(Target {
                stream: handle(stream),
                key: StreamKey { stream: key, capture },
            });
        };
        // Of a broken capture the device tells an error.
        let fits = |stream: &usize| {
            let key = self.device.check_stream(handle(*stream));
            key.is_ok_and(|key| key.capture.is_none_or(|other| other == capture))
        };
        let found = sides.captured.iter().copied().find(fits);
        let stream = match found {
            Some(stream) => stream,
            None => {
                let stream = self.device.side_stream(beside.stream)? as usize;
                sides.captured.push(stream);
                stream
            }
        };
        Ok(Target {
            stream: handle(stream),
            // As of every stream under capture, once it is in it.
            key: StreamKey {
                stream: (stream as u64) << 1,
                capture: Some(capture),
            },
        })
    }

    /// At the end of the engine, when no kernel of it is in a stream any more.
    pub(super) fn give_sides_back(&self) {
        let SideStreams { eager, captured } = std::mem::take(&mut self.order.lock().sides);
        let streams = eager.map(|(stream, _)| stream).into_iter().chain(captured);
        streams.for_each(|stream| self.device.give_side_stream_back(stream as *mut c_void));
    }
}

/// Works of one rank in one group run on the caller's thread or go to streams, which run beside it.
pub(super) fn check_streams(batch: &[Part]) -> Result<()> {
    for (engine, works) in batch {
        let Some((first, others)) = works.split_first() else {
            continue;
        };
        if others
            .iter()
            .any(|work| work.on_callers_thread() != first.on_callers_thread())
        {
            return Err(Error::usage(format!(
                "rank {}: some operations of one group are on the default stream of the host device and some are not: give all \
                 of them streams, or none",
                engine.rank
            )));
        }
    }
    Ok(())
}

/// What one group may capture: all works of a rank into one graph or none, and all ranks of a communicator or none.
pub(super) fn check_captures(batch: &[Part]) -> Result<()> {
    for (index, (engine, works)) in batch.iter().enumerate() {
        let Some(first) = works.first() else { continue };
        let capture = first.stream_key.capture;
        if works.iter().any(|work| work.stream_key.capture != capture) {
            return Err(Error::usage(format!(
                "rank {}: the operations of one group are captured into different CUDA graphs, or some are and some are \
                 not: give them streams of one capture, or of none",
                engine.rank
            )));
        }
        let peers = batch[..index]
            .iter()
            .filter(|(other, works)| Arc::ptr_eq(&other.clique, &engine.clique) && !works.is_empty());
        for (other, theirs) in peers {
            if theirs[0].stream_key.capture.is_some() != capture.is_some() {
                return Err(Error::usage(format!(
                    "ranks {} and {} of one communicator: one is under CUDA graph capture in this group and the other is not: \
                     capture all ranks or none",
                    other.rank, engine.rank
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
