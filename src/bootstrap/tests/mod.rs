//! Tests of the bootstrap: the machines alone, then ranks as threads over loopback.

mod hub;
mod loopback;
mod member;
mod processes;
mod rendezvous;
mod strangers;
mod wire;

use super::session::create_unique_id_with;
use super::settings::Settings;
use super::{Cancel, Introduction, PeerEvent, Session, UniqueId, Watch};
use crate::error::Result;
use parking_lot::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);

/// One at a time: deadlines of a few hundred milliseconds are part of these tests.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock()
}

/// For a test that counts threads or descriptors, which are one set a process: false after it ran in a process of its
/// own, true in that process (and where a person asked for exactly this test).
fn in_its_own_process(test: &str) -> bool {
    if std::env::args().any(|argument| argument == "--exact") {
        return true;
    }
    let _alone = alone();
    let name = format!("bootstrap::tests::{test}");
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

fn introduction(rank: u32, ranks: u32) -> Introduction {
    Introduction {
        rank,
        ranks,
        version: 22809,
        layout: 7,
        place: format!("host:{}", 100 + rank),
        payload: vec![rank as u8; 3],
    }
}

fn on_loopback() -> Settings {
    Settings {
        interface_names: Some("lo".into()),
        ..Settings::default()
    }
}

fn new_id() -> UniqueId {
    create_unique_id_with(&on_loopback()).unwrap()
}

fn join(id: &UniqueId, introduction: Introduction, timeout: Duration) -> Result<(Session, Vec<Introduction>)> {
    Session::join_with(&on_loopback(), &[*id], introduction, timeout, &Cancel::default())
}

/// A watch that only reports.
fn reporting(report: impl Fn(PeerEvent) + Send + 'static) -> Watch {
    Watch {
        report: Box::new(report),
        beat: Box::new(|| {}),
    }
}

/// Runs `body` once a rank, each on its own thread; what each gave.
fn ranks<T: Send + 'static>(count: u32, body: impl Fn(u32) -> T + Clone + Send + 'static) -> Vec<T> {
    let threads: Vec<_> = (0..count)
        .map(|rank| {
            let body = body.clone();
            std::thread::spawn(move || body(rank))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Sessions of all ranks of one new communicator.
fn communicator(count: u32) -> Vec<Session> {
    let id = new_id();
    ranks(count, move |rank| {
        join(&id, introduction(rank, count), TIMEOUT).unwrap().0
    })
}

fn threads_of_the_service() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |path: std::path::PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
    tasks
        .filter(|task| name(task.as_ref().unwrap().path()).trim() == "ossicle-boot")
        .count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until `holds`, at most ten seconds.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(2));
    }
}
