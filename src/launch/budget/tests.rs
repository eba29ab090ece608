//! The page between threads, processes and users, and communicators that form at once.

use super::page::ENTRIES;
use super::*;
use crate::error::Code;
use parking_lot::Mutex;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{symlink, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};

/// A folder of one test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ossicle-page-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn page(&self) -> Page {
        Page {
            folder: self.0.clone(),
            ..Page::of_this_user([0xab; 16])
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn holder(communicator: u64) -> Entry {
    Entry {
        communicator,
        pid: std::process::id(),
        rank: 0,
        blocks: 0,
    }
}

fn take(page: &Page, communicator: u64, blocks: u32) -> Reservation {
    page.reserve(holder(communicator), &|_| blocks, &Cancel::default())
        .unwrap()
        .unwrap()
}

/// What is held now, in order.
fn held(page: &Page) -> Vec<u32> {
    let seen = RefCell::new(Vec::new());
    let look = |entries: &[Entry]| {
        *seen.borrow_mut() = entries.iter().map(|entry| entry.blocks).collect();
        0
    };
    let none = page.reserve(holder(0), &look, &Cancel::default());
    assert!(none.unwrap().is_none());
    let mut seen = seen.into_inner();
    seen.sort_unstable();
    seen
}

#[test]
fn a_reservation_counts_until_it_is_dropped() {
    let folder = Folder::new("counts");
    let page = folder.page();
    let (first, mut second) = (take(&page, 1, 7), take(&page, 2, 20));
    assert_eq!(held(&page), [7, 20]);
    second.shrink(3, &Cancel::default());
    assert_eq!((second.blocks(), held(&page)), (3, vec![3, 7]));
    second.shrink(9, &Cancel::default());
    assert_eq!(held(&page), [3, 7]);
    drop(first);
    assert_eq!(held(&page), [3]);
    let third = take(&page, 3, 5);
    drop(second);
    assert_eq!(held(&page), [5]);
    drop(third);
    assert_eq!(held(&page), [0u32; 0]);
    let mode = fs::metadata(page.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let other_gpu = Page {
        gpu: [1; 16],
        ..page.clone()
    };
    let _there = take(&other_gpu, 4, 50);
    assert_eq!(held(&page), [0u32; 0]);
}

/// A page whose header is not whole, or that has entries of nobody, begins anew; and afterwards it works.
#[test]
fn a_spoiled_page_is_reset() {
    let folder = Folder::new("spoiled");
    let page = folder.page();
    let good = {
        let _held = take(&page, 1, 7);
        fs::read(page.path()).unwrap()
    };
    let mut spoiled = good.clone();
    spoiled[39] = b'2';
    for content in [good[..40].to_vec(), spoiled.clone(), vec![]] {
        fs::write(page.path(), &content).unwrap();
        assert_eq!(held(&page), [0u32; 0]);
        let _held = take(&page, 2, 9);
        assert_eq!(held(&page), [9]);
    }
    // Entries of nobody are passed over, and cleared.
    let mut stale = good.clone();
    stale[64..].fill(0xff);
    fs::write(page.path(), &stale).unwrap();
    assert_eq!(held(&page), [0u32; 0]);
    assert!(fs::read(page.path()).unwrap()[64..].iter().all(|byte| *byte == 0));
    // Who still holds an entry would not be seen any more.
    let first = take(&page, 1, 7);
    for content in [spoiled, vec![]] {
        fs::write(page.path(), &content).unwrap();
        let here = take(&page, 2, 9);
        assert_eq!(held(&page), [9]);
        assert_eq!(fs::read(page.path()).unwrap(), content);
        drop(here);
    }
    drop(first);
    let _held = take(&page, 3, 5);
    assert_eq!(held(&page), [5]);
    assert_eq!(fs::read(page.path()).unwrap()[..64], good[..64]);
}

/// Another user may make the page's name a second one of any file, also of one that is private and not empty.
#[test]
fn a_file_that_is_no_page_is_not_written() {
    let folder = Folder::new("private");
    let private = folder.0.join("private");
    let page = folder.page();
    let content = |number: u8| match number {
        0 => b"a key of the user".to_vec(),
        1 => vec![0; 64],
        2 => vec![0xff; 100_000],
        _ => vec![],
    };
    for number in 0..4 {
        fs::write(&private, content(number)).unwrap();
        fs::set_permissions(&private, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&private, page.path()).unwrap();
        let first = take(&page, 1, 7);
        assert_eq!(held(&page), [7]);
        assert_eq!(fs::read(&private).unwrap(), content(number), "as a link");
        drop(first);
        if number < 3 {
            // Its first name may go at any moment.
            fs::remove_file(&private).unwrap();
            let _first = take(&page, 1, 7);
            assert_eq!(held(&page), [7]);
            assert_eq!(fs::read(page.path()).unwrap(), content(number), "as a file");
        }
        fs::remove_file(page.path()).unwrap();
    }
}

/// A process that was stopped has the page; who waits for it is aborted.
#[test]
fn who_waits_for_the_page_is_ended_by_an_abort() {
    let folder = Folder::new("abort");
    let page = folder.page();
    drop(take(&page, 1, 7));
    let file = fs::OpenOptions::new().read(true).write(true).open(page.path()).unwrap();
    let lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open and the operation takes a flock.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }, 0);
    let cancel = Cancel::default();
    cancel.0.store(true, std::sync::atomic::Ordering::Release);
    let refused = page.reserve(holder(2), &|_| 1, &cancel).map(|_| ());
    assert_eq!(refused, Err(Error::usage("the call was ended by ncclCommAbort")));
}

/// The table of this process stands in where the file is another user's, open to others, a link, or has no folder.
#[test]
fn a_file_that_is_not_this_users_own_is_left_alone() {
    let folder = Folder::new("strangers");
    let page = folder.page();
    let stranger = Page {
        user: page.user + 1,
        ..page.clone()
    };
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(stranger.path())
        .unwrap();
    let open = Page {
        gpu: [2; 16],
        ..page.clone()
    };
    fs::write(open.path(), "").unwrap();
    fs::set_permissions(open.path(), fs::Permissions::from_mode(0o640)).unwrap();
    let link = Page {
        gpu: [3; 16],
        ..page.clone()
    };
    let target = folder.0.join("target");
    fs::write(&target, "").unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&target, link.path()).unwrap();
    let nowhere = Page {
        folder: folder.0.join("nowhere"),
        ..page.clone()
    };
    for refused in [stranger, open, link, nowhere] {
        let mut first = take(&refused, 1, 7);
        let second = take(&refused, 2, 20);
        first.shrink(6, &Cancel::default());
        assert_eq!(held(&refused), [6, 20]);
        drop(second);
        assert_eq!(held(&refused), [6]);
        drop(first);
        assert_eq!(held(&refused), [0u32; 0]);
        assert!(fs::read(refused.path()).is_ok_and(|bytes| bytes.is_empty()) || !refused.path().exists());
    }
}

#[test]
fn a_full_page_is_said() {
    let folder = Folder::new("full");
    let page = folder.page();
    let first = take(&page, 1, 7);
    let file = fs::OpenOptions::new().read(true).write(true).open(page.path()).unwrap();
    let lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 64 + 32,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open and the operation takes a flock.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }, 0);
    let refused = page.reserve(holder(2), &|_| 1, &Cancel::default());
    let error = refused.map(|_| ()).unwrap_err();
    assert_eq!(error.code, Code::InvalidUsage);
    assert!(error.text.contains(&ENTRIES.to_string()), "{error}");
    drop(file);
    let _second = take(&page, 2, 9);
    assert_eq!(held(&page), [7, 9]);
    drop(first);
}

/// This program again, holding blocks of the page in `folder` until it is killed or told to end.
fn child(folder: &Folder, blocks: u32) -> Child {
    told(folder, &blocks.to_string()).0
}

/// As `child`, with its own answer. "7 forks": its own forked child lives on, whose number it says.
fn told(folder: &Folder, what: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "launch::budget::tests::child_process",
            "--ignored",
            "--nocapture",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(child.stdin.as_mut().unwrap(), "{} {what}", folder.0.display()).unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let answer = lines.find_map(|line| Some(line.ok()?.split_once("holds")?.1.trim().to_owned()));
    (child, answer.expect("the child ended early"))
}

#[test]
#[ignore = "the body of the child processes of the tests in this file"]
fn child_process() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let mut words = line.split_whitespace();
    let (Some(folder), Some(blocks)) = (words.next(), words.next()) else {
        return;
    };
    let page = Page {
        folder: PathBuf::from(folder),
        ..Page::of_this_user([0xab; 16])
    };
    let _held = take(&page, u64::from(std::process::id()), blocks.parse().unwrap());
    match words.next() {
        None => println!("holds"),
        Some(_) => {
            // SAFETY: the child only waits to be killed.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                loop {
                    // SAFETY: as above.
                    unsafe { libc::pause() };
                }
            }
            println!("holds {forked}");
        }
    }
    std::io::stdin().read_line(&mut line).unwrap();
}

/// The end of a parent that is killed gives back although its forked child, which had copies of its descriptors, lives.
#[test]
fn a_forked_child_keeps_nothing_of_a_parent_that_was_killed() {
    let folder = Folder::new("orphan");
    let page = folder.page();
    let (mut parent, forked) = told(&folder, "7 forks");
    let before = held(&page);
    parent.kill().unwrap();
    parent.wait().unwrap();
    // The handler of the fork runs in the child, whenever that has its turn.
    let begun = std::time::Instant::now();
    let mut after = held(&page);
    while !after.is_empty() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
        after = held(&page);
    }
    let forked: i32 = forked.parse().unwrap();
    // SAFETY: signals only; the child that was forked above does not end by itself, so the number is still its.
    let (lives, killed) = unsafe { (libc::kill(forked, 0), libc::kill(forked, libc::SIGKILL)) };
    assert_eq!((before, after), (vec![7], vec![]));
    assert_eq!((lives, killed), (0, 0));
}

#[test]
fn processes_see_each_other_and_the_killed_no_more() {
    let folder = Folder::new("processes");
    let page = folder.page();
    let mut children: Vec<Child> = [3, 5, 8].map(|blocks| child(&folder, blocks)).into();
    let _own = take(&page, 1, 13);
    assert_eq!(held(&page), [3, 5, 8, 13]);
    // One is killed, one is stopped, which changes nothing, and one ends by itself.
    children[0].kill().unwrap();
    children[0].wait().unwrap();
    assert_eq!(held(&page), [5, 8, 13]);
    // SAFETY: the process is this one's child and was not waited for.
    assert_eq!(unsafe { libc::kill(children[1].id() as i32, libc::SIGSTOP) }, 0);
    drop(children[2].stdin.take());
    children[2].wait().unwrap();
    assert_eq!(held(&page), [5, 13]);
    children[1].kill().unwrap();
    children[1].wait().unwrap();
    assert_eq!(held(&page), [13]);
    let mut last = child(&folder, 21);
    assert_eq!(held(&page), [13, 21]);
    last.kill().unwrap();
    last.wait().unwrap();
}

/// A forked child gives nothing back of what the parent holds, and keeps nothing of what the parent gives back.
#[test]
fn a_forked_child_neither_gives_back_nor_keeps() {
    let folder = Folder::new("fork");
    let page = folder.page();
    let reservation = take(&page, 1, 7);
    let (mut reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the child drops one value, which closes nothing there, writes, and waits to be killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(reservation);
        let _ = (&writer).write_all(b"dropped");
        loop {
            // SAFETY: only waits.
            unsafe { libc::pause() };
        }
    }
    let mut word = [0; 7];
    reader.read_exact(&mut word).unwrap();
    assert_eq!(held(&page), [7]);
    drop(reservation);
    let after = held(&page);
    // SAFETY: kills and waits for the child made above; no status is asked for.
    let ended = unsafe {
        (
            libc::kill(child, libc::SIGKILL),
            libc::waitpid(child, std::ptr::null_mut(), 0),
        )
    };
    assert_eq!(ended, (0, child));
    assert_eq!(after, [0u32; 0]);
}

/// The exchange of one communicator whose ranks are threads.
struct Round {
    offers: Mutex<Vec<Option<Result<Vec<u8>>>>>,
    barrier: Barrier,
}

impl Round {
    fn new(ranks: usize) -> Round {
        Round {
            offers: Mutex::new(vec![None; ranks]),
            barrier: Barrier::new(ranks),
        }
    }

    fn exchange(&self, rank: usize, offer: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        self.offers.lock()[rank] = Some(offer);
        self.barrier.wait();
        let offers = self.offers.lock().iter().map(|offer| offer.clone().unwrap()).collect();
        self.barrier.wait();
        offers
    }
}

/// What each rank of a communicator comes to that has `sharing` ranks on each of the `pages`.
fn form(
    pages: &[Page],
    communicator: u64,
    capacity: u32,
    sharing: u32,
    overcommit: bool,
) -> Vec<Result<(u32, Reservation)>> {
    let ranks = pages.len() as u32 * sharing;
    let round = Arc::new(Round::new(ranks as usize));
    let threads: Vec<_> = (0..ranks)
        .map(|rank| {
            let page = pages[(rank / sharing) as usize].clone();
            let round = Arc::clone(&round);
            std::thread::spawn(move || {
                let claim = Claim {
                    page,
                    device: format!("GPU {}", rank / sharing),
                    capacity,
                    communicator,
                    rank,
                    sharing,
                    overcommit,
                    cancel: &Cancel::default(),
                };
                let exchange = |offer| round.exchange(rank as usize, offer);
                claim.agree(&|blocks| blocks.min(16), &exchange)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn pages(folder: &Folder, count: u8) -> Vec<Page> {
    let page = |gpu| Page {
        gpu: [gpu; 16],
        ..folder.page()
    };
    (0..count).map(page).collect()
}

#[test]
fn ranks_agree_and_none_takes_all() {
    let folder = Folder::new("agree");
    let pages = pages(&folder, 2);
    let blocks = |formed: &[Result<(u32, Reservation)>]| -> Vec<u32> {
        formed.iter().map(|rank| rank.as_ref().unwrap().0).collect()
    };
    let first = form(&pages, 1, 116, 4, false);
    assert_eq!(blocks(&first), [16; 8]);
    assert_eq!(held(&pages[0]), [16; 4]);
    // Another communicator has more of one GPU: all ranks follow what is left there.
    let _lone = take(&pages[1], 2, 40);
    let second = form(&pages, 3, 116, 4, false);
    assert_eq!(blocks(&second), [1; 8]);
    assert_eq!(held(&pages[0]), [1, 1, 1, 1, 16, 16, 16, 16]);
    drop(first);
    assert_eq!(held(&pages[0]), [1; 4]);
}

#[test]
fn what_does_not_fit_is_refused_by_name_or_said() {
    let folder = Folder::new("refused");
    let pages = pages(&folder, 2);
    let others = [take(&pages[1], 7, 60), take(&pages[1], 8, 53)];
    for refused in form(&pages, 1, 116, 4, false) {
        let error = refused.map(|(blocks, _)| blocks).unwrap_err();
        assert_eq!(error.code, Code::InvalidUsage);
        let holders = format!("process {}: 113 for 2 communicators", std::process::id());
        for word in [
            "GPU 1",
            "116",
            &holders,
            "NCCL_MAX_NCHANNELS",
            "OSSICLE_GPU_OVERCOMMIT=1",
        ] {
            assert!(error.text.contains(word), "no {word}: {error}");
        }
    }
    assert_eq!(held(&pages[0]), [0u32; 0]);
    let formed = form(&pages, 2, 116, 4, true);
    assert!(formed
        .iter()
        .all(|rank| rank.as_ref().is_ok_and(|(blocks, _)| *blocks == 1)));
    assert_eq!(held(&pages[1]), [1, 1, 1, 1, 53, 60]);
    drop((formed, others));
    assert!(form(&pages, 3, 116, 4, false).iter().all(Result::is_ok));
}

/// Another communicator has everything while this one tries first, and has given it back when it tries again.
#[test]
fn who_gets_nothing_tries_again_with_less() {
    let folder = Folder::new("again");
    let page = folder.page();
    let others = RefCell::new(Some(take(&page, 7, 116)));
    let exchanges = RefCell::new(Vec::new());
    let exchange = |offer: Result<Vec<u8>>| {
        let offer = offer?;
        exchanges.borrow_mut().push(offer.clone());
        if offer.is_empty() {
            assert_eq!(held(&page), [116]);
            drop(others.take());
        }
        Ok(vec![offer])
    };
    let claim = Claim {
        page: page.clone(),
        device: String::from("GPU"),
        capacity: 116,
        communicator: 1,
        rank: 0,
        sharing: 1,
        overcommit: false,
        cancel: &Cancel::default(),
    };
    let (blocks, reservation) = claim.agree(&|blocks| blocks.min(16), &exchange).unwrap();
    assert_eq!((blocks, reservation.blocks(), held(&page)), (8, 8, vec![8]));
    let offers: Vec<Vec<u8>> = [0u32, 8].map(|blocks| blocks.to_ne_bytes().to_vec()).into();
    assert_eq!(*exchanges.borrow(), [offers[0].clone(), vec![], offers[1].clone()]);
}

/// Whatever the order in which ranks of several communicators come: those of one come to the same end, and what all
/// hold together fits.
#[test]
fn communicators_that_form_at_once_fit() {
    let folder = Folder::new("race");
    let pages = Arc::new(pages(&folder, 2));
    for round in 0u64..10 {
        let threads: Vec<_> = (0..6)
            .map(|number| {
                let pages = Arc::clone(&pages);
                let communicator = u64::wrapping_mul(1 + 6 * round + number, 0x9e37_79b9_7f4a_7c15);
                std::thread::spawn(move || form(&pages, communicator, 60, 2, false))
            })
            .collect();
        let formed: Vec<Vec<Result<(u32, Reservation)>>> =
            threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let mut expected = Vec::new();
        for ranks in &formed {
            let blocks = |rank: &Result<(u32, Reservation)>| rank.as_ref().ok().map(|(blocks, _)| *blocks);
            let first = blocks(&ranks[0]);
            assert!(ranks.iter().all(|rank| blocks(rank) == first && first != Some(0)));
            expected.extend(first.into_iter().flat_map(|blocks| [blocks; 2]));
        }
        expected.sort_unstable();
        assert!(
            !expected.is_empty() && expected.iter().sum::<u32>() <= 60,
            "{expected:?}"
        );
        for page in pages.iter() {
            assert_eq!(held(page), expected);
        }
    }
}
