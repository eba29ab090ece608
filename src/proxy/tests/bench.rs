//! Speed over loopback: `cargo test --release --lib proxy::tests::bench -- --ignored --nocapture`.

use super::rig::*;
use crate::proxy::{Direction, RingGeometry};
use crate::transport::net::tests::pairs;
use std::time::Instant;

const ROUNDS: usize = 2000;

/// Half of a round trip of one slot, median; two kernels' threads and two proxies', on as many cores as there are.
#[test]
#[ignore = "a measurement"]
fn latency() {
    for bytes in [8, 4096, 65536, 1 << 20] {
        let geometry = RingGeometry {
            channels: 1,
            slots: 4,
            slot_bytes: bytes.max(4096),
        };
        let keys = [fresh_key(), fresh_key()];
        let end = |rank: u32, direction, socket| End::new(keys[rank as usize], rank, direction, geometry, vec![socket]);
        let mut sockets = pairs(2).into_iter();
        let ((s0, r0), (s1, r1)) = (sockets.next().unwrap(), sockets.next().unwrap());
        let (mut to, mut from) = (end(0, Direction::Send, s0), end(0, Direction::Receive, r1));
        let (mut back, mut there) = (end(1, Direction::Send, s1), end(1, Direction::Receive, r0));
        for end in [&to, &from, &back, &there] {
            end.launch();
        }
        let echo = std::thread::spawn(move || {
            for _ in 0..ROUNDS {
                let (_, bytes) = there.kernels[0].receive();
                back.kernels[0].send(&bytes, 1);
            }
            (there, back)
        });
        let payload = vec![1; bytes];
        let mut halves_us: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let begun = Instant::now();
                to.kernels[0].send(&payload, 1);
                from.kernels[0].receive();
                begun.elapsed().as_secs_f64() * 5e5
            })
            .collect();
        drop(echo.join());
        halves_us.sort_by(f64::total_cmp);
        let at = |part: usize| halves_us[ROUNDS * part / 100];
        println!(
            "{bytes:8} B one way: median {:.1} us, 10 % {:.1}, 90 % {:.1}",
            at(50),
            at(10),
            at(90)
        );
    }
}

/// One direction, slot after slot.
#[test]
#[ignore = "a measurement"]
fn throughput() {
    for (channels, slot_bytes) in [(1, 131_072), (1, 1 << 20), (2, 1 << 20)] {
        let geometry = RingGeometry {
            channels,
            slots: 4,
            slot_bytes,
        };
        let (mut from, mut to) = link((fresh_key(), fresh_key()), geometry);
        let total = (1usize << 30) / slot_bytes / channels;
        from.launch();
        to.launch();
        let begun = Instant::now();
        let sender = std::thread::spawn(move || {
            let note = crate::transport::net::SlotNote {
                bytes: slot_bytes as u32,
                step: 0,
                ordinal: 1,
            };
            for _ in 0..total {
                for kernel in &mut from.kernels {
                    until("a slot is free", || kernel.may_send());
                    kernel.fill_with_note(note);
                }
            }
            from
        });
        for _ in 0..total {
            for kernel in &mut to.kernels {
                until("a slot is filled", || kernel.may_receive());
                kernel.pass();
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        drop(sender.join());
        let rate = (total * channels * slot_bytes) as f64 / seconds / 1e9;
        println!("{channels} channel(s), slots of {slot_bytes} bytes: {rate:.2} GB/s");
    }
}
