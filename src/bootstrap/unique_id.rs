//! The 128 bytes of an `ncclUniqueId`: where the root listens, which rendezvous is meant, and its secret.
//!
//! ```text
//! 0 magic 8 · 8 version 2 · 10 kind 2 · 12 family 2 · 14 port 2 · 16 address 16 · 32 scope 4 · 36 zero 4
//! 40 uid 8 · 48 secret 32 · 80 digest 8 · 88 zero 40
//! ```
//!
//! The digest catches the usual accident, an id that was copied as a C string and lost all behind its first zero.

use super::handshake::Secret;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The 128 bytes of `ncclUniqueId`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

const MAGIC: [u8; 8] = *b"OSSICLID";
const VERSION: u16 = 1;
const DIGEST_AT: usize = 80;

/// Who opens the rendezvous of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// The process that made the id; it listens already.
    Maker,
    /// Rank 0, when it joins, at the address that `NCCL_COMM_ID` names.
    RankZero,
}

/// The meaning of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root {
    pub(super) host: Host,
    pub(super) address: SocketAddr,
    pub(super) uid: u64,
    pub(super) secret: Secret,
}

impl Root {
    pub(super) fn emit(&self) -> UniqueId {
        let mut bytes = [0; 128];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = match self.host {
            Host::Maker => 1,
            Host::RankZero => 2,
        };
        match self.address {
            SocketAddr::V4(address) => {
                bytes[12] = 4;
                bytes[16..20].copy_from_slice(&address.ip().octets());
            }
            SocketAddr::V6(address) => {
                bytes[12] = 6;
                bytes[16..32].copy_from_slice(&address.ip().octets());
                bytes[32..36].copy_from_slice(&address.scope_id().to_le_bytes());
            }
        }
        bytes[14..16].copy_from_slice(&self.address.port().to_le_bytes());
        bytes[40..48].copy_from_slice(&self.uid.to_le_bytes());
        bytes[48..80].copy_from_slice(&self.secret);
        let digest = digest(&bytes);
        bytes[DIGEST_AT..DIGEST_AT + 8].copy_from_slice(&digest);
        UniqueId(bytes)
    }

    pub(super) fn parse(id: &UniqueId) -> Result<Root> {
        let bytes = &id.0;
        if *bytes == [0; 128] {
            return Err(Error::argument(
                "the ncclUniqueId is all zero: call ncclGetUniqueId on one rank and give its id to all ranks",
            ));
        }
        if bytes[0..8] != MAGIC {
            return Err(Error::argument(format!(
                "the ncclUniqueId begins with {:02x?} and was not made by this library's ncclGetUniqueId: all ranks must load the same library",
                &bytes[0..8]
            )));
        }
        if field::<2>(bytes, 8) != VERSION.to_le_bytes() {
            return Err(Error::argument(format!(
                "the ncclUniqueId has format {}, this library knows {VERSION}: all ranks must load the same library",
                u16::from_le_bytes(field(bytes, 8))
            )));
        }
        Root::parse_fields(bytes).ok_or_else(|| {
            Error::argument(
                "the ncclUniqueId is damaged: all 128 bytes must be copied, zeroes included (it is not a C string)",
            )
        })
    }

    fn parse_fields(bytes: &[u8; 128]) -> Option<Root> {
        let port = u16::from_le_bytes(field(bytes, 14));
        let address = match bytes[12] {
            4 => SocketAddr::new(IpAddr::V4(Ipv4Addr::from(field::<4>(bytes, 16))), port),
            6 => {
                let ip = Ipv6Addr::from(field::<16>(bytes, 16));
                SocketAddrV6::new(ip, port, 0, u32::from_le_bytes(field(bytes, 32))).into()
            }
            _ => return None,
        };
        let host = match bytes[10] {
            1 => Host::Maker,
            2 => Host::RankZero,
            _ => return None,
        };
        let root = Root {
            host,
            address,
            uid: u64::from_le_bytes(field(bytes, 40)),
            secret: field(bytes, 48),
        };
        // Emitting it again compares the digest and every byte that must be zero.
        (root.emit().0 == *bytes).then_some(root)
    }
}

fn field<const N: usize>(bytes: &[u8; 128], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

fn digest(bytes: &[u8; 128]) -> [u8; 8] {
    let whole: [u8; 32] = Sha256::digest(&bytes[..DIGEST_AT]).into();
    let [a, b, c, d, e, f, g, h, ..] = whole;
    [a, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn root(address: &str) -> Root {
        Root {
            host: Host::Maker,
            address: address.parse().unwrap(),
            uid: 0x1122,
            secret: [5; 32],
        }
    }

    #[test]
    fn an_id_says_again_what_it_was_made_of() {
        let mut scoped = root("[fe80::1]:7");
        scoped.address = SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, 3).into();
        for root in [
            root("127.0.0.1:41999"),
            root("[::1]:1"),
            scoped,
            Root {
                host: Host::RankZero,
                ..root("1.2.3.4:9")
            },
        ] {
            assert_eq!(Root::parse(&root.emit()), Ok(root));
        }
    }

    #[test]
    fn zeroes_strangers_and_every_single_damaged_byte_are_refused() {
        let good = root("127.0.0.1:41999").emit();
        for at in 0..128 {
            let mut bad = good;
            bad.0[at] ^= 0x40;
            assert_eq!(
                Root::parse(&bad).map_err(|error| error.code),
                Err(Code::InvalidArgument),
                "byte {at}"
            );
        }
        assert!(Root::parse(&UniqueId([0; 128])).unwrap_err().text.contains("all zero"));
        assert!(Root::parse(&UniqueId([0xa5; 128]))
            .unwrap_err()
            .text
            .contains("[a5, a5"));
        let mut cut = good;
        let first_zero = cut.0.iter().position(|byte| *byte == 0).unwrap();
        cut.0[first_zero..].fill(0);
        assert_eq!(Root::parse(&cut).unwrap_err().code, Code::InvalidArgument);
    }
}
