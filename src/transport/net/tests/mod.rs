//! Connections over loopback: their making, and what moves over one.

mod listener;
mod socket;

use super::{Established, Listener, Name, Purpose, Slots, Socket};
use crate::bootstrap::Cancel;
use crate::device::{host, Device, Memory, Placement};
use crate::error::Result;
use crate::transport::Limit;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const SECRET: [u8; 32] = [7; 32];
/// Long: it ends a test that would hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

fn loopback() -> SocketAddr {
    SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)
}

fn listen(secret: [u8; 32]) -> (Listener, Name) {
    Listener::open_at(loopback(), secret).unwrap()
}

fn establish(
    listener: Listener,
    connects: &[(Name, Purpose)],
    expects: &[Purpose],
    timeout: Duration,
) -> Result<Established> {
    let cancel = Cancel::default();
    let limit = Limit {
        timeout,
        cancel: &cancel,
    };
    listener.establish(connects, expects, &limit)
}

/// So many connections from rank 0 to rank 1: both ends of each.
pub(crate) fn pairs(count: u32) -> Vec<(Socket, Socket)> {
    let purposes: Vec<Purpose> = (0..count)
        .map(|channel| Purpose {
            sender: 0,
            receiver: 1,
            channel,
        })
        .collect();
    let ((sender, _), (receiver, name)) = (listen(SECRET), listen(SECRET));
    let connects: Vec<(Name, Purpose)> = purposes.iter().map(|purpose| (name.clone(), *purpose)).collect();
    let other = std::thread::spawn(move || establish(sender, &connects, &[], TIMEOUT).unwrap());
    let accepted = establish(receiver, &[], &purposes, TIMEOUT).unwrap().accepted;
    let connected = other.join().unwrap().connected;
    assert_eq!((connected.len(), accepted.len()), (count as usize, count as usize));
    connected.into_iter().zip(accepted).collect()
}

/// Memory of `count` slots, as the tests see it, and as a transfer does.
fn slots(count: usize, slot_bytes: usize) -> (Arc<Memory>, Slots) {
    let device: Arc<dyn Device> = host::open(0);
    let memory = Arc::new(device.allocate(count * slot_bytes, Placement::Pinned).unwrap());
    // SAFETY: just so many bytes.
    let slots = unsafe { Slots::new(memory.address, slot_bytes, count, memory.clone()) };
    (memory, slots)
}
