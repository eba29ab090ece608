//! The page of a GPU: which communicators hold how many of its blocks, for all processes of a user.
//!
//! ```text
//! /dev/shm/ossicle-<user>-<UUID of the GPU>-v1   [ header: 64 bytes ][ entry 0 ][ entry 1 ] ... [ entry 511 ]
//! ```
//!
//! Locks of open file descriptions (`F_OFD_SETLK`) say who is there. Every reservation opens the file for itself and
//! holds the lock of its entry's first byte for as long as it lives: an entry counts while that byte is locked, whatever
//! became of its process, and in whichever PID namespace that was. Who reads or writes entries holds the lock of the
//! header's first byte, and clears those that nobody holds any more. Both locks die with their process, so that nothing
//! must be repaired: content is believed only of an entry whose lock is held, and its holder wrote it before it let go
//! of the header's. The file is never deleted. A forked child closes its copies (`Descriptor`).
//!
//! /dev/shm is everybody's, so another user may have put anything there under the page's name, a second name of a private
//! file of this user included. So only a file with one name is written, and only one that is empty or begins as a page
//! does is reset, while nobody holds an entry. Another version has a page of its own.
//!
//! Where the file cannot be used, a table of this process stands in for it, and a line at WARN says so once a process.

use crate::bootstrap::{Cancel, Descriptor};
use crate::error::{Error, Result};
use crate::sys::process_local::ProcessLocal;
use crate::{info, warning};
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What every page begins with. A file that begins otherwise is no page.
const MAGIC: &[u8] = b"ossicle: blocks held";
/// Of the header and the entries; part of the file's name.
const VERSION: u32 = 1;
/// A page that begins otherwise is spoiled.
const HEADER: [u8; HEADER_BYTES] =
    *b"ossicle: blocks held on a GPU, version 1\n\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 32;
/// Where an entry has its blocks.
const BLOCKS_AT: usize = 16;
/// More than the blocks of any GPU, of which each entry has one.
pub(super) const ENTRIES: usize = 512;

/// Whoever has the page has it for some system calls: a longer wait is for a process that was stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Who holds how many blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Equal for the ranks of one communicator, and for no others.
    pub(super) communicator: u64,
    /// For messages: the process's number in its own namespace.
    pub(super) pid: u32,
    pub(super) rank: u32,
    pub(super) blocks: u32,
}

impl Entry {
    fn emit(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.communicator.to_ne_bytes());
        for (at, word) in [(8, self.pid), (12, self.rank), (BLOCKS_AT, self.blocks)] {
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8; ENTRY_BYTES]) -> Entry {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut communicator = [0; 8];
        communicator.copy_from_slice(&bytes[..8]);
        Entry {
            communicator: u64::from_ne_bytes(communicator),
            pid: word(8),
            rank: word(12),
            blocks: word(BLOCKS_AT),
        }
    }
}

/// Why a page gives no answer.
#[derive(Debug)]
enum Trouble {
    /// The file is of no use here; this process's table is.
    Unusable(String),
    Failed(Error),
}

type Answer<T> = std::result::Result<T, Trouble>;

impl Trouble {
    fn of(what: &str, errno: Errno) -> Trouble {
        let why = std::io::Error::from(errno);
        match errno {
            Errno::MFILE | Errno::NFILE => Trouble::Failed(Error::system(format!(
                "cannot {what} the page of a GPU: {why}; raise the limit of open files (ulimit -n)"
            ))),
            _ => Trouble::Unusable(format!("cannot {what} it: {why}")),
        }
    }
}

/// Which page: a GPU's, of a user, in a folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::launch) struct Page {
    pub(super) folder: PathBuf,
    pub(super) user: u32,
    pub(super) gpu: [u8; 16],
}

/// Blocks that are held until this is dropped.
pub(in crate::launch) struct Reservation {
    held: Option<Held>,
    blocks: u32,
    process: u32,
}

enum Held {
    File { file: File, index: usize },
    Table { page: Page, ticket: u64 },
}

/// The entries of pages whose file cannot be used, each with a number of its own.
#[derive(Default)]
struct Tables {
    next: u64,
    entries: HashMap<Page, Vec<(u64, Entry)>>,
}

static TABLES: ProcessLocal<Mutex<Tables>> = ProcessLocal::new();

impl Page {
    pub(in crate::launch) fn of_this_user(gpu: [u8; 16]) -> Page {
        Page {
            folder: PathBuf::from("/dev/shm"),
            user: rustix::process::geteuid().as_raw(),
            gpu,
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        let gpu: String = self.gpu.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(format!("ossicle-{}-{gpu}-v{VERSION}", self.user))
    }

    /// Asks `decide` how many blocks to take while the entries that it sees are all there are, and holds them. No
    /// reservation where it says 0.
    pub(super) fn reserve(
        &self,
        holder: Entry,
        decide: &dyn Fn(&[Entry]) -> u32,
        cancel: &Cancel,
    ) -> Result<Option<Reservation>> {
        let taken = match File::open(self).and_then(|file| file.reserve(holder, decide, cancel)) {
            Ok(taken) => taken,
            Err(Trouble::Failed(error)) => return Err(error),
            Err(Trouble::Unusable(why)) => {
                self.say_unusable(&why);
                self.reserve_here(holder, decide)
            }
        };
        Ok(taken.map(|(held, blocks)| Reservation {
            held: Some(held),
            blocks,
            process: std::process::id(),
        }))
    }

    fn say_unusable(&self, why: &str) {
        static SAID: ProcessLocal<AtomicBool> = ProcessLocal::new();
        let text = format!(
            "{} is not used, so that other processes on the GPU are not counted: {why}",
            self.path().display()
        );
        match SAID.get().swap(true, Ordering::Relaxed) {
            false => warning!("{text}"),
            true => info!(Init, "{text}"),
        }
    }

    fn reserve_here(&self, holder: Entry, decide: &dyn Fn(&[Entry]) -> u32) -> Option<(Held, u32)> {
        let mut tables = TABLES.get().lock();
        tables.next += 1;
        let ticket = tables.next;
        let entries = tables.entries.entry(self.clone()).or_default();
        let others: Vec<Entry> = entries.iter().map(|(_, entry)| *entry).collect();
        let blocks = decide(&others);
        (blocks > 0).then(|| {
            entries.push((ticket, Entry { blocks, ..holder }));
            let page = self.clone();
            (Held::Table { page, ticket }, blocks)
        })
    }
}

impl Reservation {
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Gives back all but `blocks`.
    pub(super) fn shrink(&mut self, blocks: u32, cancel: &Cancel) {
        self.blocks = blocks.min(self.blocks);
        match &self.held {
            // A page that cannot be written keeps the larger number, which is safe.
            Some(Held::File { file, index }) => drop(file.shrink(*index, self.blocks, cancel)),
            Some(Held::Table { page, ticket }) => {
                let mut tables = TABLES.get().lock();
                let mut entries = tables.entries.get_mut(page).into_iter().flatten();
                if let Some((_, entry)) = entries.find(|(number, _)| number == ticket) {
                    entry.blocks = self.blocks;
                }
            }
            None => {}
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The lock is the parent's, and a forked child has closed its copy of the descriptor, whose number may be
            // anybody's by now.
            std::mem::forget(self.held.take());
        } else if let Some(Held::Table { page, ticket }) = &self.held {
            let mut tables = TABLES.get().lock();
            if let Some(entries) = tables.entries.get_mut(page) {
                entries.retain(|(number, _)| number != ticket);
            }
        }
    }
}

/// The page's file, opened by one reservation.
struct File {
    descriptor: Descriptor,
    path: PathBuf,
}

/// The right to read and write entries.
struct Turn<'a>(&'a File);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Should it fail, closing the file lets go of the lock.
        let _ = self.0.fcntl(libc::F_OFD_SETLK, libc::F_UNLCK, 0, 1);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // At once, also where a child that was just forked still has a copy of the descriptor. Closing does the rest.
        let _ = self.fcntl(libc::F_OFD_SETLK, libc::F_UNLCK, 0, TO_THE_END);
    }
}

/// The length of a lock on everything from its first byte on.
const TO_THE_END: libc::off_t = 0;

const fn place(index: usize) -> usize {
    HEADER_BYTES + index * ENTRY_BYTES
}

impl File {
    /// Only a plain file that this user alone may read or write: another one's in its place would lie.
    fn open(page: &Page) -> Answer<File> {
        let path = page.path();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
        let opened = opened.map_err(|errno| Trouble::of("open", errno))?;
        let stat = rustix::fs::fstat(&opened).map_err(|errno| Trouble::of("examine", errno))?;
        let others = Mode::from_raw_mode(stat.st_mode) & (Mode::RWXG | Mode::RWXO);
        let plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !plain || stat.st_uid != page.user || !others.is_empty() || stat.st_nlink != 1 {
            return Err(Trouble::Unusable(format!(
                "it belongs to user {} with mode {:o} and {} names; it must be a file of user {} with one name that nobody \
                 else may open",
                stat.st_uid, stat.st_mode, stat.st_nlink, page.user
            )));
        }
        let descriptor = Descriptor::new(opened).map_err(|errno| Trouble::of("open", errno))?;
        Ok(File { descriptor, path })
    }

    fn reserve(self, holder: Entry, decide: &dyn Fn(&[Entry]) -> u32, cancel: &Cancel) -> Answer<Option<(Held, u32)>> {
        let turn = self.lock(cancel)?;
        let entries = self.entries()?;
        let others: Vec<Entry> = entries.iter().map(|(_, entry)| *entry).collect();
        let blocks = decide(&others);
        if blocks == 0 {
            return Ok(None);
        }
        let entry = Entry { blocks, ..holder };
        let free = (0..ENTRIES).filter(|index| entries.iter().all(|(taken, _)| taken != index));
        for index in free {
            // The byte of an entry without content may be locked all the same: someone overwrote it.
            match self.fcntl(libc::F_OFD_SETLK, libc::F_WRLCK, place(index), 1) {
                Ok(_) => {
                    self.write(index, &entry)?;
                    drop(turn);
                    return Ok(Some((Held::File { file: self, index }, blocks)));
                }
                Err(Errno::AGAIN | Errno::ACCESS) => {}
                Err(errno) => return Err(Trouble::of("lock", errno)),
            }
        }
        Err(Trouble::Failed(Error::usage(format!(
            "{}: all of its {ENTRIES} entries are held: destroy communicators that are not needed",
            self.path.display()
        ))))
    }

    /// Under the lock: the entries that someone holds. Clears the others, and a page that is spoiled.
    fn entries(&self) -> Answer<Vec<(usize, Entry)>> {
        let mut bytes = vec![0; place(ENTRIES)];
        let mut read = 0;
        while read < bytes.len() {
            match rustix::io::pread(&self.descriptor, &mut bytes[read..], read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(errno) => return Err(Trouble::of("read", errno)),
            }
        }
        if bytes[..HEADER_BYTES] != HEADER {
            self.check_reset(&bytes[..read])?;
            bytes.fill(0);
            bytes[..HEADER_BYTES].copy_from_slice(&HEADER);
            self.write_at(0, &bytes)?;
        }
        let mut held = Vec::new();
        for (index, entry) in bytes[HEADER_BYTES..].as_chunks::<ENTRY_BYTES>().0.iter().enumerate() {
            if entry.iter().all(|byte| *byte == 0) {
                continue;
            }
            match self.fcntl(libc::F_OFD_GETLK, libc::F_WRLCK, place(index), 1) {
                Ok(libc::F_UNLCK) => self.write_at(place(index), &[0; ENTRY_BYTES])?,
                Ok(_) => held.push((index, Entry::parse(entry))),
                Err(errno) => return Err(Trouble::of("lock", errno)),
            }
        }
        Ok(held)
    }

    /// Whether a file with this content may be reset.
    fn check_reset(&self, bytes: &[u8]) -> Answer<()> {
        if !bytes.is_empty() && !bytes.starts_with(MAGIC) {
            return Err(Trouble::Unusable(String::from(
                "it is not empty and no page of Ossicle's: remove it, unless it is something of yours",
            )));
        }
        match self.fcntl(libc::F_OFD_GETLK, libc::F_WRLCK, HEADER_BYTES, TO_THE_END) {
            Ok(libc::F_UNLCK) => {}
            Ok(_) => {
                return Err(Trouble::Unusable(String::from(
                    "something overwrote it while communicators hold blocks: it begins anew when they have ended",
                )))
            }
            Err(errno) => return Err(Trouble::of("lock", errno)),
        }
        if !bytes.is_empty() {
            info!(Init, "{} is spoiled: it is reset", self.path.display());
        }
        Ok(())
    }

    fn shrink(&self, index: usize, blocks: u32, cancel: &Cancel) -> Answer<()> {
        let _turn = self.lock(cancel)?;
        self.write_at(place(index) + BLOCKS_AT, &blocks.to_ne_bytes())
    }

    fn write(&self, index: usize, entry: &Entry) -> Answer<()> {
        self.write_at(place(index), &entry.emit())
    }

    fn write_at(&self, at: usize, bytes: &[u8]) -> Answer<()> {
        match rustix::io::pwrite(&self.descriptor, bytes, at as u64) {
            Ok(written) if written == bytes.len() => Ok(()),
            Ok(_) => Err(Trouble::Unusable(String::from("cannot write it: it takes only a part"))),
            Err(errno) => Err(Trouble::of("write", errno)),
        }
    }

    /// Waits for its turn on the page.
    fn lock(&self, cancel: &Cancel) -> Answer<Turn<'_>> {
        let begun = Instant::now();
        loop {
            match self.fcntl(libc::F_OFD_SETLK, libc::F_WRLCK, 0, 1) {
                Ok(_) => return Ok(Turn(self)),
                Err(Errno::AGAIN | Errno::ACCESS) if cancel.is_set() => {
                    return Err(Trouble::Failed(Error::usage("the call was ended by ncclCommAbort")))
                }
                Err(Errno::AGAIN | Errno::ACCESS) if begun.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(Errno::AGAIN | Errno::ACCESS) => {
                    return Err(Trouble::Failed(Error::system(format!(
                        "{} was locked for {} s: a process that was stopped holds it (lslocks names it); continue or end it",
                        self.path.display(),
                        LOCK_TIMEOUT.as_secs()
                    ))))
                }
                Err(errno) => return Err(Trouble::of("lock", errno)),
            }
        }
    }

    /// A lock operation on `bytes` from `start` on; the kind of the lock that the kernel answers with.
    fn fcntl(&self, operation: i32, kind: i32, start: usize, bytes: libc::off_t) -> std::result::Result<i32, Errno> {
        let mut lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: start as libc::off_t,
            l_len: bytes,
            l_pid: 0,
        };
        // SAFETY: the descriptor is open, and the three operations that are used here take a flock.
        match unsafe { libc::fcntl(self.descriptor.as_fd().as_raw_fd(), operation, &mut lock) } {
            -1 => Err(Errno::from_raw_os_error(
                std::io::Error::last_os_error().raw_os_error().unwrap_or_default(),
            )),
            _ => Ok(i32::from(lock.l_type)),
        }
    }
}
