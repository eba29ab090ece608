//! Whether a user's buffer can be reached by a GPU's kernels, and those of which others, and the cache of ranges that can.
//!
//! What `cuMemAlloc` gave is reached by every GPU that this one's memory was opened for (`peers`), what was mapped by
//! those that access was set for. Of pinned and managed memory, and of pools, only the GPU's own kernels are known to.
//! A range is looked up once and then trusted, until `ncclMemFree` frees it. Memory that its owner frees otherwise stays
//! trusted until its entry is overwritten: `NCCL_CHECK_POINTERS=1` looks every pointer up.

use super::device_count;
use super::virtual_memory::has_access;
use crate::device::Devices;
use crate::error::{Error, Result};
use crate::sys::cuda::Driver;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute, CUresult};
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Pieces that a buffer may consist of: 1 TiB in the driver's smallest pages of 2 MiB.
const MOST_PIECES: usize = 1 << 19;

/// What the driver knows of one address.
struct Attributes {
    memory_type: u32,
    /// The address that kernels use for it; 0 where they cannot.
    device_pointer: usize,
    managed: bool,
    ordinal: i32,
    range: Range<usize>,
    /// Made by `cuMemAlloc`, so that it ends where its range ends. Memory that was mapped piece by piece
    /// (`cuMemMap`: `ncclMemAlloc`, expandable segments) is not.
    whole: bool,
}

impl Attributes {
    /// None where the driver does not know the address: plain host memory, or nothing.
    fn of(driver: &Driver, pointer: usize) -> Result<Option<Attributes>> {
        use CUpointer_attribute::*;
        const COUNT: usize = 7;
        let mut names = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_int,
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER as c_int,
            CU_POINTER_ATTRIBUTE_IS_MANAGED as c_int,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_int,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as c_int,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE as c_int,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_int,
        ];
        // Some are written as 1 or 4 bytes, some as 8: zeroed words take them all (x86-64 and arm64 are little-endian).
        let mut words = [0u64; COUNT];
        let mut values = words.each_mut().map(|word| std::ptr::from_mut(word).cast::<c_void>());
        // SAFETY: COUNT names and COUNT places of 8 bytes; the pointer is looked up, never read through.
        let looked_up = unsafe {
            driver
                .call
                .cuPointerGetAttributes(COUNT as c_uint, names.as_mut_ptr(), values.as_mut_ptr(), pointer as u64)
        };
        match looked_up {
            Ok(()) => {}
            Err(failure)
                if failure.is(CUresult::CUDA_ERROR_INVALID_VALUE)
                    || failure.is(CUresult::CUDA_ERROR_INVALID_CONTEXT) =>
            {
                return Ok(None)
            }
            Err(failure) => return Err(failure.into()),
        }
        let [memory_type, device_pointer, managed, ordinal, start, bytes, whole] = words;
        let (start, bytes) = (start as usize, bytes as usize);
        Ok((memory_type as u32 != 0).then_some(Attributes {
            memory_type: memory_type as u32,
            device_pointer: device_pointer as usize,
            managed: managed as u8 != 0,
            ordinal: ordinal as i32,
            range: start..start.saturating_add(bytes),
            whole: whole as u8 != 0,
        }))
    }
}

/// The bit of a GPU in `Devices`.
pub(super) fn bit(ordinal: i32) -> u64 {
    1u64.checked_shl(ordinal as u32).unwrap_or(0)
}

/// GPUs whose kernels reach a piece of memory that GPU `ordinal` reaches.
fn reached_by(driver: &Driver, ordinal: i32, found: &Attributes) -> u64 {
    let on_device = found.memory_type == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 && !found.managed;
    match (on_device, found.whole) {
        (true, true) => Devices::ALL.0,
        (true, false) => (0..device_count(driver).unwrap_or(0))
            .filter(|peer| *peer != ordinal && has_access(driver, *peer, found.range.start))
            .fold(bit(ordinal), |bits, peer| bits | bit(peer)),
        (false, _) => bit(ordinal),
    }
}

/// Looks `bytes` at `pointer` up; the range around them that kernels of GPU `ordinal` reach, and all GPUs whose do. A
/// context of that GPU must be current.
pub(super) fn look_up(
    driver: &Driver,
    ordinal: i32,
    name: &str,
    pointer: usize,
    bytes: usize,
) -> Result<(Range<usize>, Devices)> {
    let end = pointer.checked_add(bytes).ok_or_else(|| {
        Error::argument(format!(
            "{name} is {pointer:#x} with {bytes} bytes, which run past the end of the address space"
        ))
    })?;
    let first = Attributes::of(driver, pointer)?.ok_or_else(|| plain_host_memory(name, pointer))?;
    check_place(&first, ordinal, name, pointer)?;
    let mut devices = reached_by(driver, ordinal, &first);
    let mut reached = first.range.clone();
    if !reached.contains(&pointer) {
        // The driver does not tell the range (some kinds of managed and registered memory): trust what was asked for.
        return Ok((pointer..end, Devices(bit(ordinal))));
    }
    let mut pieces = 1;
    while reached.end < end {
        let next = if first.whole || pieces == MOST_PIECES {
            None
        } else {
            Attributes::of(driver, reached.end)?
        };
        match next.filter(|next| !next.whole && next.range.start == reached.end && next.range.end > reached.end) {
            Some(next) => {
                check_place(&next, ordinal, name, reached.end)?;
                devices &= reached_by(driver, ordinal, &next);
                reached.end = next.range.end;
                pieces += 1;
            }
            None => {
                return Err(Error::argument(format!(
                    "{name} is {pointer:#x} with {bytes} bytes, but its allocation ends after {} bytes, at {:#x}",
                    reached.end - pointer,
                    reached.end
                )))
            }
        }
    }
    Ok((reached, Devices(devices)))
}

fn check_place(found: &Attributes, ordinal: i32, name: &str, pointer: usize) -> Result<()> {
    if found.managed {
        return Ok(());
    }
    if found.memory_type == CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
        return match found.device_pointer == pointer {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{name} ({pointer:#x}) is pinned host memory that the GPU sees at another address ({:#x}); allocate it \
                 with cudaHostAlloc, or pass the address of cudaHostGetDevicePointer",
                found.device_pointer
            ))),
        };
    }
    if found.ordinal != ordinal {
        return Err(Error::argument(format!(
            "{name} ({pointer:#x}) is memory of GPU {}, but the communicator's device is GPU {ordinal}",
            found.ordinal
        )));
    }
    Ok(())
}

fn plain_host_memory(name: &str, pointer: usize) -> Error {
    Error::argument(format!(
        "{name} ({pointer:#x}) is host memory that the GPU cannot reach; allocate it with cudaMalloc, ncclMemAlloc or \
         cudaHostAlloc"
    ))
}

const ENTRIES: usize = 256;
/// Ranges from here on are found by the 2 MiB page of a pointer, smaller ones by its line of 512 bytes, the alignment
/// of small allocations: so two small buffers side by side do not drive each other out.
const LARGE_BYTES: usize = 2 << 20;
const LARGE_SHIFT: u32 = 21;
const SMALL_SHIFT: u32 = 9;

/// A range behind a sequence number, which is odd while the range is being written.
#[derive(Default)]
struct Entry {
    sequence: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    devices: AtomicU64,
}

/// Ranges that were looked up: a direct-mapped table, read and written without a lock.
pub(super) struct KnownRanges {
    entries: [Entry; ENTRIES],
}

impl Default for KnownRanges {
    fn default() -> KnownRanges {
        KnownRanges {
            entries: std::array::from_fn(|_| Entry::default()),
        }
    }
}

impl KnownRanges {
    /// Who reaches all of a buffer, if that is known.
    pub(super) fn find(&self, pointer: usize, bytes: usize) -> Option<Devices> {
        let end = pointer.checked_add(bytes)?;
        [LARGE_SHIFT, SMALL_SHIFT].into_iter().find_map(|shift| {
            let (range, devices) = self.entry(pointer, shift).read()?;
            (range.start <= pointer && end <= range.end).then_some(devices)
        })
    }

    /// `range` was looked up for `pointer`; kernels of `devices` reach it.
    pub(super) fn remember(&self, pointer: usize, range: Range<usize>, devices: Devices) {
        let shift = if range.len() >= LARGE_BYTES {
            LARGE_SHIFT
        } else {
            SMALL_SHIFT
        };
        self.entry(pointer, shift).write(range, devices);
    }

    /// Memory in `freed` is gone: no range that touches it covers anything any more. An entry that another thread is
    /// writing is left alone: what it held goes without that, and nobody may look up what is being freed.
    pub(super) fn forget(&self, freed: &Range<usize>) {
        for entry in &self.entries {
            let known = entry.read();
            if known.is_some_and(|(range, _)| range.start < freed.end && freed.start < range.end) {
                entry.write(0..0, Devices::NONE);
            }
        }
    }

    fn entry(&self, pointer: usize, shift: u32) -> &Entry {
        // Fibonacci hashing: the top bits of the product depend on all bits of the key.
        let hash = ((pointer >> shift) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.entries[(hash >> (u64::BITS - ENTRIES.trailing_zeros())) as usize]
    }
}

impl Entry {
    fn read(&self) -> Option<(Range<usize>, Devices)> {
        let before = self.sequence.load(Ordering::Acquire);
        let range = self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed);
        let devices = Devices(self.devices.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before).then_some((range, devices))
    }

    /// Leaves the entry alone while another thread writes it: then it is known to that one, and looked up again.
    fn write(&self, range: Range<usize>, devices: Devices) {
        let before = self.sequence.load(Ordering::Relaxed);
        if !before.is_multiple_of(2)
            || self
                .sequence
                .compare_exchange(before, before.wrapping_add(1), Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.devices.store(devices.0, Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    impl KnownRanges {
        fn covers(&self, pointer: usize, bytes: usize) -> bool {
            self.find(pointer, bytes).is_some()
        }
    }

    #[test]
    fn a_known_range_covers_what_lies_in_it() {
        let known = KnownRanges::default();
        assert!(!known.covers(0x7000_0000, 1));
        known.remember(0x7000_0000, 0x7000_0000..0x7400_0000, Devices(1));
        assert!(known.covers(0x7000_0000, 0x400_0000));
        assert!(known.covers(0x7000_0010, 16), "same 2 MiB page");
        assert!(!known.covers(0x7000_0000, 0x400_0001));
        assert!(!known.covers(usize::MAX, 2));
        known.remember(0x1200, 0x1200..0x1300, Devices(1));
        known.remember(0x1400, 0x1400..0x1500, Devices(1));
        assert!(
            known.covers(0x1200, 0x100) && known.covers(0x1400, 0x100),
            "small neighbours are both known"
        );
    }

    #[test]
    fn what_touches_freed_memory_is_forgotten_and_nothing_else() {
        let known = KnownRanges::default();
        let ranges = [
            (0x7000_0000, 0x40_0000),
            (0x7040_0000, 0x20_0000),
            (0x1200, 0x100),
            (0x1400, 0x100),
        ];
        for (start, bytes) in ranges {
            known.remember(start, start..start + bytes, Devices(1));
        }
        // Two pages of one buffer: its range has an entry for each.
        known.remember(0x7020_0000, 0x7000_0000..0x7040_0000, Devices(1));
        let covered = || ranges.map(|(start, bytes)| known.covers(start, bytes));
        known.forget(&(0x1300..0x1400));
        assert_eq!(covered(), [true; 4], "beside the small ones");
        known.forget(&(0x7000_0000..0x7040_0000));
        assert_eq!(covered(), [false, true, true, true]);
        assert!(!known.covers(0x7020_0000, 1));
        known.forget(&(0x14ff..0x1500));
        assert_eq!(covered(), [false, true, true, false], "a part is enough");
    }

    #[test]
    fn readers_never_see_half_a_range() {
        let entry = Arc::new(Entry::default());
        let writers: Vec<_> = (0..2usize)
            .map(|thread| {
                let entry = entry.clone();
                std::thread::spawn(move || {
                    for i in 0..20_000usize {
                        let start = (i * 2 + thread) << 20;
                        entry.write(start..start + 7, Devices(start as u64));
                    }
                })
            })
            .collect();
        for _ in 0..20_000 {
            if let Some((range, devices)) = entry.read() {
                assert!(range == (0..0) || range.len() == 7, "{range:?}");
                assert_eq!(devices, Devices(range.start as u64));
            }
        }
        for writer in writers {
            writer.join().expect("no panic");
        }
        assert_eq!(entry.read().map(|(range, _)| range.len()), Some(7));
    }
}
