//! Host identity: which ranks may share memory.
//!
//! Two ranks are on one host when their identities are equal. An identity is `NCCL_HOSTID` where it is set (fakes
//! several hosts on one machine, or joins containers), else the host name with the kernel's boot id.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What makes a host one host: equal bytes, same host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostIdentity {
    /// 256-bit digest of the identity text.
    pub digest: [u8; 32],
    /// Host name, for messages only.
    pub name: String,
}

impl HostIdentity {
    /// A rank's host: the one that its caller says it is on, else this process's.
    pub fn of_rank(faked: Option<&str>) -> Result<HostIdentity> {
        let name = full_name();
        let said = faked
            .map(str::to_owned)
            .or_else(|| crate::environment::text("NCCL_HOSTID"));
        let text = match said {
            Some(id) if !id.is_empty() => format!("NCCL_HOSTID {id}"),
            _ => format!("{name} {}", boot_id()?),
        };
        Ok(HostIdentity {
            digest: digest(text.as_bytes()),
            name,
        })
    }
}

/// A digest of this process's machine, whatever host its rank is said to be on.
pub fn machine() -> Result<[u8; 32]> {
    Ok(digest(format!("{} {}", full_name(), boot_id()?).as_bytes()))
}

impl fmt::Display for HostIdentity {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [a, b, c, d, ..] = self.digest;
        write!(f, "{} (host id {a:02x}{b:02x}{c:02x}{d:02x})", self.name)
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).into()
}

fn full_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The host name up to its first dot, as NCCL's log lines have it.
pub fn short_name() -> String {
    let name = full_name();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// Empty where the system has none to show. Any other failure may be this rank's alone, which would then seem to be on
/// a host of its own.
fn boot_id() -> Result<String> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    match std::fs::read_to_string(PATH) {
        Ok(id) => Ok(id.trim().to_owned()),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(String::new()),
        Err(error) => Err(Error::system(format!(
            "cannot read {PATH}, which tells hosts apart: {error}; set NCCL_HOSTID instead, or raise the limit of open \
             files (ulimit -n) if that is the cause"
        ))),
    }
}
