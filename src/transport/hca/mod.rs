//! The software HCA: a network card of the mlx5 kind that is made of software.
//!
//! Queues, doorbells and tables of an HCA lie in one segment of shared memory (a memfd), and so does memory that is to be
//! reached from other processes. Whoever posts, a kernel or a CPU thread, writes work requests and doorbells there as
//! for a card; the engine (`cuda/hca/engine.h`) carries them out, here on a thread of this process (`service`). It does
//! the whole transfer, in the peer's memory too: a peer in this process directly, in another one through the peer's
//! segment, which it maps. Everything in this folder but the thread is set-up.
//!
//! ```text
//! segment   tables | rings, doorbell records, doorbells | memory to register
//! ```

mod queues;
mod service;
mod space;
mod tables;
#[cfg(test)]
mod tests;

pub use queues::{CompletionQueue, QueueOptions, QueuePair, Timeouts};
pub use service::{Awake, Watch};
pub use tables::{access, check, Fault, State, FOR_EVER};

use super::shared::Segment;
use crate::bootstrap::Descriptor;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use service::{Service, Tables};
use space::Space;
use std::collections::HashMap;
use std::mem::{size_of, ManuallyDrop};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use tables::{Header, Region, View, KEY_PLACE_SHIFT, MAGIC, OUTSIDE, VERSION};

/// Memory that regions and queues begin at multiples of.
const PAGE: usize = 4096;
const MAX_QPS: usize = 1 << tables::QP_PLACE_BITS;

/// How much an HCA can hold; its segment is so large from the beginning.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At most 4096.
    pub qps: usize,
    pub cqs: usize,
    pub regions: usize,
    /// For rings (64 bytes a block or completion), and for memory that other processes reach.
    pub memory_bytes: usize,
}

/// What a peer is told, besides the descriptor of the segment if it is in another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    id: u128,
    process: u128,
    bytes: usize,
}

impl Ticket {
    /// Whether the HCA is this process's, and needs no descriptor.
    pub fn is_of_this_process(&self) -> bool {
        self.process == super::inbox::process_token()
    }
}

/// Which of an HCA's peers; 0 is itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(u32);

impl Peer {
    pub const SELF: Peer = Peer(0);
}

/// An HCA's memory, which its peers in this process hold too.
struct Card {
    id: u128,
    segment: Segment,
    bytes: usize,
    limits: Limits,
    space: Mutex<Space>,
    /// By a region's place: where memory outside the segment lies.
    outside: Box<[AtomicPtr<u8>]>,
    /// By place: how often it was given out, so that a number of before is known for an old one.
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    qps: Vec<u32>,
    cqs: Vec<bool>,
    regions: Vec<u32>,
    taken_qps: Vec<bool>,
    taken_regions: Vec<bool>,
}

/// The cards of this process, which HCAs in it attach to directly.
static CARDS: ProcessLocal<Mutex<HashMap<u128, Weak<Card>>>> = ProcessLocal::new();

/// A peer's segment in another process.
struct Foreign {
    _segment: Segment,
}

pub struct Hca {
    card: Arc<Card>,
    /// Closed by the fork in a child already.
    fd: ManuallyDrop<Descriptor>,
    service: Arc<Service>,
    engine: u64,
    domains: AtomicU32,
}

/// A part of the segment, given back on drop.
pub struct Piece {
    card: Arc<Card>,
    offset: usize,
    bytes: usize,
}

/// Registered memory; on drop its key is none any more.
pub struct Registration {
    hca: Arc<Hca>,
    place: usize,
    key: u32,
    /// Of memory in the segment.
    _piece: Option<Arc<Piece>>,
}

/// A protection domain: queues reach regions of their own alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain(u32);

fn table_offsets(limits: &Limits) -> (usize, usize, usize, usize) {
    let qps = size_of::<Header>();
    let cqs = qps + limits.qps * size_of::<tables::Qp>();
    let regions = cqs + limits.cqs * size_of::<tables::Cq>();
    let end = regions + limits.regions * size_of::<Region>();
    (qps, cqs, regions, end.next_multiple_of(PAGE))
}

impl Hca {
    /// An HCA on this device, whose kernels can post to it.
    pub fn open(device: &Arc<dyn Device>, limits: Limits) -> Result<Arc<Hca>> {
        if limits.qps > MAX_QPS || limits.regions >= 1 << (32 - KEY_PLACE_SHIFT) {
            return Err(Error::internal(format!(
                "a software HCA has at most {MAX_QPS} QPs: {limits:?}"
            )));
        }
        let (qps, cqs, regions, begin) = table_offsets(&limits);
        let bytes = begin + limits.memory_bytes.next_multiple_of(PAGE);
        let (segment, fd) = Segment::create(device.clone(), bytes)?;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            qps: limits.qps as u32,
            cqs: limits.cqs as u32,
            regions: limits.regions as u32,
            pad: 0,
            qp_table: qps as u64,
            cq_table: cqs as u64,
            region_table: regions as u64,
            bytes: bytes as u64,
        };
        // SAFETY: the segment is new, page-aligned, and longer than a header.
        unsafe { segment.address().cast::<Header>().write(header) };
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| Error::system(format!("no random numbers: {error}")))?;
        let card = Arc::new(Card {
            id: u128::from_ne_bytes(id),
            segment,
            bytes,
            limits,
            space: Mutex::new(Space::new(begin, bytes - begin)),
            outside: (0..limits.regions).map(|_| AtomicPtr::default()).collect(),
            generations: Mutex::new(Generations {
                qps: vec![0; limits.qps],
                cqs: vec![false; limits.cqs],
                // Place 0 has no key: 0 means none.
                regions: vec![0; limits.regions],
                taken_qps: vec![false; limits.qps],
                taken_regions: vec![false; limits.regions],
            }),
        });
        let mut cards = CARDS.get().lock();
        cards.retain(|_, card| card.strong_count() > 0);
        cards.insert(card.id, Arc::downgrade(&card));
        drop(cards);
        let service = Service::of(device.uuid())?;
        let engine = service.add(Tables {
            views: vec![card.view()],
            faults: Vec::new(),
            kept: vec![card.clone()],
        });
        Ok(Arc::new(Hca {
            card,
            fd: ManuallyDrop::new(fd),
            service,
            engine,
            domains: AtomicU32::new(1),
        }))
    }

    pub fn ticket(&self) -> Ticket {
        Ticket {
            id: self.card.id,
            process: super::inbox::process_token(),
            bytes: self.card.bytes,
        }
    }

    /// What peers in other processes need besides the ticket.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Makes a peer reachable. One in another process needs its segment's descriptor.
    pub fn attach(&self, ticket: &Ticket, fd: Option<BorrowedFd>) -> Result<Peer> {
        if ticket.id == self.card.id {
            return Ok(Peer::SELF);
        }
        if ticket.process == super::inbox::process_token() {
            let found = CARDS.get().lock().get(&ticket.id).and_then(Weak::upgrade);
            let card = found.ok_or_else(|| Error::remote("a software HCA of this process was closed"))?;
            return self.add_view(card.view(), card);
        }
        let fd = fd.ok_or_else(|| Error::internal("a software HCA of another process came without a descriptor"))?;
        let segment = Segment::open(self.card.segment.device().clone(), fd, ticket.bytes)?;
        // SAFETY: the segment is mapped, page-aligned and a page long or more; its tables are written before its ticket is
        // given out.
        let header = unsafe { &*segment.address().cast::<Header>() };
        check_header(header, ticket.bytes)?;
        let view = View {
            segment: segment.address(),
            outside: std::ptr::null(),
        };
        self.add_view(view, Arc::new(Foreign { _segment: segment }))
    }

    fn add_view(&self, view: View, kept: Arc<impl std::any::Any + Send + Sync>) -> Result<Peer> {
        self.change(|tables| {
            tables.views.push(view);
            tables.kept.push(kept);
            Peer(tables.views.len() as u32 - 1)
        })
    }

    fn change<R>(&self, change: impl FnOnce(&mut Tables) -> R) -> Result<R> {
        let gone = || Error::usage("the software HCA was opened before this process was forked: open one here");
        self.service.change(self.engine, change).ok_or_else(gone)
    }

    pub fn domain(&self) -> Domain {
        Domain(self.domains.fetch_add(1, Ordering::Relaxed))
    }

    /// Zeroed memory in the segment, which peers in every process reach once it is registered.
    pub fn allocate(&self, bytes: usize) -> Result<Arc<Piece>> {
        self.card.allocate(bytes, PAGE).map(Arc::new)
    }

    /// Registers a piece of this HCA's segment.
    pub fn register(self: &Arc<Hca>, domain: Domain, piece: &Arc<Piece>, access: u32) -> Result<Registration> {
        if !Arc::ptr_eq(&piece.card, &self.card) {
            return Err(Error::internal(
                "memory of one software HCA was registered with another",
            ));
        }
        let (address, offset) = (piece.address(), piece.offset as u64);
        self.register_at(domain, address, offset, piece.bytes, access, Some(piece.clone()))
    }

    /// Registers any memory of this process, which only peers in this process reach.
    ///
    /// # Safety
    /// The memory stays, and may be read and written as `access` says, until the registration is dropped.
    pub unsafe fn register_outside(
        self: &Arc<Hca>,
        domain: Domain,
        address: *mut u8,
        bytes: usize,
        access: u32,
    ) -> Result<Registration> {
        self.register_at(domain, address, OUTSIDE, bytes, access, None)
    }

    fn register_at(
        self: &Arc<Hca>,
        domain: Domain,
        address: *mut u8,
        offset: u64,
        bytes: usize,
        access: u32,
        piece: Option<Arc<Piece>>,
    ) -> Result<Registration> {
        let mut generations = self.card.generations.lock();
        let free = (1..self.card.limits.regions).find(|place| !generations.taken_regions[*place]);
        let place = free.ok_or_else(|| full("regions", self.card.limits.regions))?;
        generations.regions[place] = generations.regions[place].wrapping_add(1);
        let key = (place as u32) << KEY_PLACE_SHIFT | (generations.regions[place] & 0xff);
        self.card.outside[place].store(address, Ordering::Release);
        self.change(|_| {
            let region = self.card.region(place);
            // SAFETY: a place of this card's table; engines of this process pause, and those of others look at the key
            // first, which is written last.
            unsafe {
                (*region).address = address as u64;
                (*region).bytes = bytes as u64;
                (*region).offset = offset;
                (*region).access = access;
                (*region).domain = domain.0;
                AtomicU32::from_ptr(&raw mut (*region).key).store(key, Ordering::Release);
            }
        })?;
        generations.taken_regions[place] = true;
        Ok(Registration {
            hca: self.clone(),
            place,
            key,
            _piece: piece,
        })
    }

    /// Makes something go wrong with the nth work request (from 0) of a QP.
    pub fn inject(&self, qp: u32, nth: u64, fault: Fault) -> Result<()> {
        let (kind, syndrome, vendor_syndrome, steps) = match fault {
            Fault::Syndrome { syndrome, vendor } => (1, u32::from(syndrome), u32::from(vendor), 0),
            Fault::DropCqe => (2, 0, 0, 0),
            Fault::Delay { steps } => (3, 0, 0, steps),
        };
        let fault = tables::InjectedFault {
            nth,
            qp,
            kind,
            syndrome,
            vendor_syndrome,
            steps,
        };
        self.change(|tables| tables.faults.push(fault))
    }

    /// The thread polls while the guard lives: for graphs, whose launches nobody announces.
    pub fn keep_awake(&self) -> Awake {
        self.service.keep_awake()
    }

    /// The thread polls while `outstanding` says so. It is asked often, and must neither wait nor allocate.
    pub fn watch(&self, outstanding: impl Fn() -> bool + Send + 'static) -> Watch {
        self.service.watch(outstanding)
    }

    /// The thread looks at all queues soon, and for a while after: for a CPU that has rung a doorbell.
    pub fn wake(&self) {
        self.service.wake();
    }
}

impl Drop for Hca {
    fn drop(&mut self) {
        if self.service.is_of_parent() {
            return;
        }
        // SAFETY: it is neither used nor dropped again.
        unsafe { ManuallyDrop::drop(&mut self.fd) };
        CARDS.get().lock().remove(&self.card.id);
        // Queues and registrations hold the HCA, so none is left.
        self.service.remove(self.engine);
    }
}

impl Registration {
    /// lkey and rkey.
    pub fn key(&self) -> u32 {
        self.key
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let hca = &self.hca;
        // SAFETY: a place of this card's table, whose key only this object writes until the place is free again.
        let key = unsafe { AtomicU32::from_ptr(&raw mut (*hca.card.region(self.place)).key) };
        // Once every engine of this process has paused none uses the memory any more. Those of other processes
        // reach memory in the segment alone, which they map themselves.
        let _ = hca.change(|_| key.store(0, Ordering::Release));
        hca.card.generations.lock().taken_regions[self.place] = false;
    }
}

impl Piece {
    /// Where this process sees it.
    pub fn address(&self) -> *mut u8 {
        self.card.address(self.offset)
    }

    /// Where kernels of the HCA's device see it.
    pub fn kernel_address(&self) -> *mut u8 {
        self.card.kernel_address(self.offset)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.card.space.lock().give_back(self.offset, self.bytes);
    }
}

impl Card {
    fn view(&self) -> View {
        View {
            segment: self.segment.address(),
            outside: self.outside.as_ptr().cast(),
        }
    }

    fn address(&self, offset: usize) -> *mut u8 {
        // SAFETY: offsets come from tables and space of this segment.
        unsafe { self.segment.address().add(offset) }
    }

    fn kernel_address(&self, offset: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.segment.kernel_address().add(offset) }
    }

    fn region(&self, place: usize) -> *mut Region {
        let (_, _, regions, _) = table_offsets(&self.limits);
        self.address(regions + place * size_of::<Region>()).cast()
    }

    fn qp(&self, place: usize) -> *mut tables::Qp {
        let (qps, ..) = table_offsets(&self.limits);
        self.address(qps + place * size_of::<tables::Qp>()).cast()
    }

    fn cq(&self, place: usize) -> *mut tables::Cq {
        let (_, cqs, ..) = table_offsets(&self.limits);
        self.address(cqs + place * size_of::<tables::Cq>()).cast()
    }

    fn allocate(self: &Arc<Card>, bytes: usize, align: usize) -> Result<Piece> {
        let bytes = bytes.next_multiple_of(align);
        let offset = self.space.lock().take(bytes, align).ok_or_else(|| {
            Error::internal(format!(
                "the software HCA's {} bytes of memory have no {bytes} left",
                self.limits.memory_bytes
            ))
        })?;
        let piece = Piece {
            card: self.clone(),
            offset,
            bytes,
        };
        // SAFETY: the piece is this object's own; whoever had it before has given it back.
        unsafe { piece.address().write_bytes(0, bytes) };
        Ok(piece)
    }
}

/// Whether the tables of another process's HCA are where they can be read.
fn check_header(header: &Header, bytes: usize) -> Result<()> {
    if (header.magic, header.version) != (MAGIC, VERSION) {
        return Err(Error::usage(format!(
            "a peer's software HCA has tables of version {} and this library of {VERSION}: use one library on all ranks",
            header.version
        )));
    }
    let limits = Limits {
        qps: header.qps as usize,
        cqs: header.cqs as usize,
        regions: header.regions as usize,
        memory_bytes: 0,
    };
    let (qps, cqs, regions, end) = table_offsets(&limits);
    let said = (header.qp_table, header.cq_table, header.region_table, header.bytes);
    if said != (qps as u64, cqs as u64, regions as u64, bytes as u64) || end > bytes {
        return Err(Error::internal(format!(
            "a peer's software HCA has tables that do not fit into its {bytes} bytes"
        )));
    }
    Ok(())
}

fn full(what: &str, limit: usize) -> Error {
    Error::internal(format!("all {limit} {what} of the software HCA are taken"))
}
