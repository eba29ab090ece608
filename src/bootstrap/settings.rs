//! What the environment says about the bootstrap, read in one place, so that everything else takes it as a value.

use super::handshake::Secret;
use super::interfaces::Family;
use super::unique_id::{Host, Root};
use super::wire::cut;
use crate::environment;
use crate::error::{Error, Result};
use crate::info;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A resolver that hangs costs this much and no more.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(8);
const MAX_SECRET_FILE_BYTES: u64 = 64 << 10;

#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    /// `NCCL_COMM_ID`.
    pub(super) comm_id: Option<String>,
    /// `NCCL_SOCKET_IFNAME`.
    pub(super) interface_names: Option<String>,
    /// `NCCL_SOCKET_FAMILY`.
    pub(super) family: Option<Family>,
    /// Digest of `OSSICLE_SECRET` or of the file `OSSICLE_SECRET_FILE`; matters with `NCCL_COMM_ID` only.
    pub(super) secret: Option<Secret>,
}

impl Settings {
    pub(super) fn from_environment() -> Result<Settings> {
        let families = [("AF_INET", Family::V4), ("AF_INET6", Family::V6)];
        let comm_id = environment::text("NCCL_COMM_ID").filter(|text| !text.is_empty());
        let secret = match &comm_id {
            Some(_) => read_secret(
                environment::text("OSSICLE_SECRET"),
                environment::text("OSSICLE_SECRET_FILE"),
            )?,
            None => None,
        };
        Ok(Settings {
            comm_id,
            interface_names: environment::text("NCCL_SOCKET_IFNAME"),
            family: environment::choice("NCCL_SOCKET_FAMILY", &families)?,
            secret,
        })
    }

    /// The root that `NCCL_COMM_ID` names; None where it is unset.
    pub(super) fn fixed_root(&self) -> Result<Option<Root>> {
        let Some(text) = &self.comm_id else { return Ok(None) };
        let (host, port) = split_host_and_port(text)?;
        let address = match host.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, port),
            // A scoped address, "fe80::1%eth0", is for the resolver too.
            Err(_) => resolve(host, port, self.family)?,
        };
        let digest: Secret = Sha256::digest(format!("ossicle NCCL_COMM_ID {text}")).into();
        let uid = digest.iter().take(8).fold(0, |uid, byte| uid << 8 | u64::from(*byte));
        let secret = self.secret.unwrap_or_else(|| {
            say_unauthenticated();
            digest
        });
        Ok(Some(Root {
            host: Host::RankZero,
            address,
            uid,
            secret,
        }))
    }
}

/// One line a process: the id is public, so whoever reaches the port may take part.
fn say_unauthenticated() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        info!(
            Bootstrap,
            "NCCL_COMM_ID is set without OSSICLE_SECRET or OSSICLE_SECRET_FILE: bootstrap connections are not authenticated"
        );
    }
}

/// The secret that the user gave, hashed; the text wins over the file.
pub(super) fn read_secret(text: Option<String>, file: Option<String>) -> Result<Option<Secret>> {
    let bytes = match (text, file.filter(|path| !path.is_empty())) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(path)) => read_secret_file(&path)
            .map_err(|error| Error::usage(format!("OSSICLE_SECRET_FILE: cannot read {path}: {error}")))?,
        (None, None) => return Ok(None),
    };
    // An editor ends the file with a newline on one host and not on another.
    let secret = bytes.trim_ascii_end();
    if secret.is_empty() {
        return Err(Error::usage(
            "OSSICLE_SECRET (or the file OSSICLE_SECRET_FILE) is empty: unset it or give a secret",
        ));
    }
    let mut hash = Sha256::new();
    hash.update(b"ossicle secret\0");
    hash.update(secret);
    Ok(Some(hash.finalize().into()))
}

fn read_secret_file(path: &str) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_SECRET_FILE_BYTES)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// "ip:port", "[ipv6]:port" or "host:port"; anything else is refused with these forms named.
pub(super) fn split_host_and_port(text: &str) -> Result<(&str, u16)> {
    let split = || {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => rest.split_once("]:")?,
            // A bare IPv6 address has colons of its own and cannot be told from its port.
            None => text.split_once(':').filter(|(_, port)| !port.contains(':'))?,
        };
        let port = Some(port)
            .filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()))?
            .parse::<u16>()
            .ok()?;
        let plain = !host.is_empty() && host.len() <= 255 && !host.contains(|c: char| c.is_whitespace() || c == '\0');
        (plain && port != 0).then_some((host, port))
    };
    split().ok_or_else(|| {
        Error::argument(format!(
            "NCCL_COMM_ID is \"{}\"; it takes ip:port, [ipv6]:port or host:port, with a port from 1 to 65535",
            cut(text, 200)
        ))
    })
}

/// The first address of `host` that has the wanted family. The system's resolver knows no deadline, so it runs beside.
fn resolve(host: &str, port: u16, family: Option<Family>) -> Result<SocketAddr> {
    let (reply, answer) = super::answer::pair();
    let question = (host.to_owned(), port);
    let look_up = move || {
        let found = question.to_socket_addrs().map(|found| found.collect::<Vec<_>>());
        // Nobody waits any more if the resolver was slower than the deadline.
        let _ = reply.send(found);
    };
    crate::sys::thread::spawn(c"ossicle-name", look_up)
        .map_err(|error| Error::system(format!("cannot start a thread to resolve \"{host}\": {error}")))?;
    let failed = |why: &str| Error::system(format!("NCCL_COMM_ID: cannot resolve the host name \"{host}\": {why}"));
    match answer.wait(RESOLVE_TIMEOUT) {
        Err(_) => Err(failed(&format!("no answer within {} s", RESOLVE_TIMEOUT.as_secs()))),
        Ok(Err(error)) => Err(failed(&error.to_string())),
        Ok(Ok(found)) => found
            .into_iter()
            .find(|address| family.is_none_or(|family| family.holds(address.ip())))
            .ok_or_else(|| failed("it has no address of the family that NCCL_SOCKET_FAMILY asks for")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn fixed(text: &str) -> Result<Root> {
        let settings = Settings {
            comm_id: Some(text.to_owned()),
            ..Settings::default()
        };
        settings.fixed_root().map(|root| root.unwrap())
    }

    #[test]
    fn the_three_forms_are_read() {
        for (text, address) in [
            ("127.0.0.1:41999", "127.0.0.1:41999"),
            ("[::1]:41999", "[::1]:41999"),
            ("[fd00::1]:1", "[fd00::1]:1"),
        ] {
            let root = fixed(text).unwrap();
            assert_eq!((root.address, root.host), (address.parse().unwrap(), Host::RankZero));
        }
        let named = fixed("localhost:41999").unwrap();
        assert!(named.address.ip().is_loopback() && named.address.port() == 41999);
    }

    #[test]
    fn everything_else_is_an_argument_error_that_names_the_text_and_the_forms() {
        let long = "a".repeat(4096);
        for text in [
            "noport", ":1", "1.2.3.4:", "h:99999", "h:-1", "h:+1", "h:0", "[::1", "[::1]", "[]:1", "::1:5", "h:1:2",
            "a b:1", &long,
        ] {
            let error = fixed(text).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{text}");
            assert!(
                error.text.contains(cut(text, 200)) && error.text.contains("[ipv6]:port"),
                "{error}"
            );
            assert!(error.text.len() < 400, "{error}");
        }
    }

    #[test]
    fn a_name_without_an_address_is_a_system_error() {
        let error = fixed("name.invalid:5000").unwrap_err();
        assert_eq!(error.code, Code::SystemError);
        assert!(error.text.contains("name.invalid"), "{error}");
    }

    #[test]
    fn a_fixed_id_depends_on_text_and_secret_alone() {
        let text = Some("127.0.0.1:41999".to_owned());
        let plain = Settings {
            comm_id: text.clone(),
            ..Settings::default()
        };
        let secret = read_secret(Some("swordfish\n".into()), None).unwrap();
        let guarded = Settings {
            comm_id: text,
            secret,
            ..Settings::default()
        };
        let emit = |settings: &Settings| settings.fixed_root().unwrap().unwrap().emit();
        assert!(emit(&plain) == emit(&plain) && emit(&guarded) == emit(&guarded) && emit(&plain) != emit(&guarded));
        assert_eq!(
            secret,
            read_secret(Some("swordfish".into()), Some("/nonexistent".into())).unwrap()
        );
        assert_ne!(secret, read_secret(Some("Swordfish".into()), None).unwrap());
    }

    #[test]
    fn a_secret_that_cannot_be_had_is_an_error() {
        assert_eq!(read_secret(None, None), Ok(None));
        assert!(read_secret(Some(" \n".into()), None)
            .unwrap_err()
            .text
            .contains("empty"));
        let error = read_secret(None, Some("/nonexistent/secret".into())).unwrap_err();
        assert!(
            error.code == Code::InvalidUsage && error.text.contains("/nonexistent/secret"),
            "{error}"
        );
    }
}
