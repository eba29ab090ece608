//! One rank of a run, on a thread of its own: joins, times and checks every step, leaves.

use super::check::{Findings, Message as Buffer, MARGIN_BYTES};
use super::message::{Measured, Message};
use super::options::{Measurement, Options};
use super::oracle::Oracle;
use crate::nccl_calls::{Communicator, DeviceMemory};
use crate::rank_device::RankDevice;
use nccl::device::DeviceKind;
use nccl::error::Result;
use nccl::request::{DataType, ReduceOp};
use std::time::{Duration, Instant};

/// What all ranks of a process share.
pub(crate) struct Run<'a> {
    pub(crate) options: &'a Options,
    pub(crate) measurements: &'a [Measurement],
    pub(crate) device: DeviceKind,
    pub(crate) devices: i32,
    pub(crate) id: [u8; 128],
}

/// Whether the result replaces the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    OutOfPlace,
    InPlace,
}

impl Placement {
    /// In the order of a row's two halves.
    pub(crate) const BOTH: [Placement; 2] = [Placement::OutOfPlace, Placement::InPlace];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Placement::OutOfPlace => "out of place",
            Placement::InPlace => "in place",
        }
    }
}

struct Rank<'a> {
    run: &'a Run<'a>,
    rank: u32,
    device: RankDevice,
    comm: Communicator,
    send: DeviceMemory,
    recv: DeviceMemory,
    /// One element for barriers.
    signal: DeviceMemory,
}

impl Run<'_> {
    /// The whole life of one rank. `report` takes its news.
    pub(crate) fn rank(&self, rank: u32, report: &dyn Fn(Message)) -> Result<()> {
        let ordinal = rank as i32 % self.devices.max(1);
        let device = RankDevice::enter(self.device, ordinal)?;
        let bytes = self.measurements.iter().map(Measurement::bytes).max().unwrap_or(0) + 2 * MARGIN_BYTES;
        // Before any collective: an allocation may wait for kernels on the device, and those could wait for this rank.
        let (send, recv) = (DeviceMemory::allocate(bytes)?, DeviceMemory::allocate(bytes)?);
        let signal = DeviceMemory::allocate(1)?;
        let comm = Communicator::join(&self.id, rank, self.options.ranks)?;
        let place = device.describe(comm.device()?)?;
        report(Message::Joined {
            rank,
            pid: std::process::id(),
            device: place,
        });
        let this = Rank {
            run: self,
            rank,
            device,
            comm,
            send,
            recv,
            signal,
        };
        for (row, measurement) in self.measurements.iter().enumerate() {
            for placement in Placement::BOTH {
                let step = row * Placement::BOTH.len() + placement as usize;
                let (time, cpu) = this.time(measurement, placement)?;
                let findings = this.check(measurement, placement)?;
                let wrong = findings.as_ref().map(|findings| findings.wrong);
                let complaint = findings.and_then(|findings| findings.complaint);
                report(Message::Measured(Measured {
                    rank,
                    step,
                    time_us: time.as_secs_f64() * 1e6,
                    cpu_us: cpu.as_secs_f64() * 1e6,
                    wrong,
                    complaint,
                }));
            }
        }
        this.leave()?;
        report(Message::Left { rank });
        Ok(())
    }
}

/// Of all threads of this process, in user and system mode.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Rank<'_> {
    fn leave(self) -> Result<()> {
        self.comm.destroy()?;
        for memory in [self.send, self.recv, self.signal] {
            memory.free()?;
        }
        Ok(())
    }

    fn start(&self, measurement: &Measurement, placement: Placement) -> Result<()> {
        let recv = self.recv.at(MARGIN_BYTES);
        let send = if placement == Placement::InPlace {
            recv
        } else {
            self.send.at(MARGIN_BYTES)
        };
        let Measurement { datatype, op, count } = *measurement;
        // SAFETY: both buffers hold the largest measurement and live until `leave`; every path waits for the stream
        // before that, or ends the process with its threads.
        unsafe {
            self.comm
                .all_reduce(send, recv, count, datatype, op, self.device.stream())
        }
    }

    /// No rank leaves before every rank has come.
    fn barrier(&self) -> Result<()> {
        let signal = self.signal.at(0);
        // SAFETY: one element of one byte, alive until `leave`; waited for below.
        unsafe {
            self.comm
                .all_reduce(signal, signal, 1, DataType::Uint8, ReduceOp::Sum, self.device.stream())?;
        }
        self.device.wait(&self.comm)
    }

    /// The mean time of one operation on this rank, and the process's mean processor time.
    fn time(&self, measurement: &Measurement, placement: Placement) -> Result<(Duration, Duration)> {
        let options = self.run.options;
        if let Some(oracle) = self.oracle(measurement) {
            self.fill_inputs(measurement, placement, &oracle.input(self.rank, 0))?;
        }
        for _ in 0..options.warmup_iterations {
            self.start(measurement, placement)?;
        }
        self.device.wait(&self.comm)?;
        self.barrier()?;
        let (started, cpu_started) = (Instant::now(), cpu_time());
        let mut untimed = Duration::ZERO;
        for _ in 0..options.iterations {
            self.start(measurement, placement)?;
            if options.blocking > 0 {
                self.device.wait(&self.comm)?;
            }
            if options.blocking == 1 || options.blocking == 3 {
                let done = Instant::now();
                self.barrier()?;
                untimed += if options.blocking == 3 {
                    done.elapsed()
                } else {
                    Duration::ZERO
                };
            }
        }
        self.device.wait(&self.comm)?;
        let cpu = cpu_time().saturating_sub(cpu_started);
        Ok((
            (started.elapsed() - untimed) / options.iterations,
            cpu / options.iterations,
        ))
    }

    fn oracle(&self, measurement: &Measurement) -> Option<Oracle> {
        Oracle::new(measurement.datatype, measurement.op, self.run.options.ranks)
    }

    fn buffer<'a>(&'a self, memory: &'a DeviceMemory, name: &'static str, measurement: &Measurement) -> Buffer<'a> {
        let element_bytes = measurement.datatype.bytes();
        Buffer {
            device: &self.device,
            memory,
            name,
            count: measurement.count,
            element_bytes,
        }
    }

    /// Poisons the receive buffer and puts the input where the operation reads it.
    fn fill_inputs(&self, measurement: &Measurement, placement: Placement, input: &[u8]) -> Result<()> {
        let recv = self.buffer(&self.recv, "the result", measurement);
        recv.poison()?;
        match placement {
            Placement::InPlace => recv.fill(input),
            Placement::OutOfPlace => {
                let send = self.buffer(&self.send, "the input", measurement);
                send.poison()?;
                send.fill(input)
            }
        }
    }

    /// Runs checked operations, each with fresh data; None where none was asked for.
    fn check(&self, measurement: &Measurement, placement: Placement) -> Result<Option<Findings>> {
        let oracle = self.oracle(measurement).filter(|_| self.run.options.checks > 0);
        let Some(oracle) = oracle else { return Ok(None) };
        let mut findings = Findings::default();
        for round in 1..=self.run.options.checks {
            let input = oracle.input(self.rank, round);
            self.fill_inputs(measurement, placement, &input)?;
            self.start(measurement, placement)?;
            self.device.wait(&self.comm)?;
            let recv = self.buffer(&self.recv, "the result", measurement);
            recv.compare(&oracle.expected(round), &mut findings)?;
            recv.check_margins(&mut findings)?;
            if placement == Placement::OutOfPlace {
                let send = self.buffer(&self.send, "the input", measurement);
                send.compare(&input, &mut findings)?;
                send.check_margins(&mut findings)?;
            }
        }
        Ok(Some(findings))
    }
}
