//! Which network interface the bootstrap and links listen on: `NCCL_SOCKET_IFNAME`, `NCCL_SOCKET_FAMILY`, NCCL's order.
//!
//! Choosing is pure; the one unsafe leaf is `list`, around getifaddrs.

use super::link::{describe, with_descriptors};
use super::wire::cut;
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) fn holds(self, ip: IpAddr) -> bool {
        ip.is_ipv4() == (self == Family::V4)
    }
}

/// One address of one interface that is up; the port is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) prefix_bits: u32,
}

/// `[^][=]name[,name...]`: what a user's list admits.
struct Filter<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    /// None for text without a name ("", "^", "=", ","), which NCCL passes over.
    fn parse(text: &'a str) -> Option<Filter<'a>> {
        let (exclude, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let names: Vec<&str> = rest.split(',').filter(|name| !name.is_empty()).collect();
        (!names.is_empty()).then_some(Filter { exclude, exact, names })
    }

    fn admits(&self, interface: &str) -> bool {
        let named = |name: &&str| {
            if self.exact {
                interface == *name
            } else {
                interface.starts_with(*name)
            }
        };
        self.names.iter().any(named) != self.exclude
    }
}

/// The address to listen on. `near` is the address in `NCCL_COMM_ID`: its subnet comes before the others.
///
/// A host without any interface gets the loopback address, so that communicators of one rank work there.
pub(super) fn choose(
    interfaces: &[Interface],
    names: Option<&str>,
    family: Option<Family>,
    near: Option<IpAddr>,
) -> Result<SocketAddr> {
    let filter = names.and_then(Filter::parse);
    if interfaces.is_empty() && filter.is_none() && family != Some(Family::V6) {
        return Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
    }
    let admitted = |interface: &&Interface| {
        filter.as_ref().is_none_or(|filter| filter.admits(&interface.name))
            && family.is_none_or(|family| family.holds(interface.address.ip()))
    };
    let order = |interface: &&Interface| (class(interface, near), is_link_local(interface.address.ip()));
    // min_by_key keeps the first of equals, which is the kernel's order.
    interfaces
        .iter()
        .filter(admitted)
        .min_by_key(order)
        .map(|interface| interface.address)
        .ok_or_else(|| {
            let found: Vec<String> = interfaces
                .iter()
                .map(|i| format!("{} ({})", i.name, i.address.ip()))
                .collect();
            let wanted = match (names.filter(|_| filter.is_some()), family) {
                (Some(names), None) => format!("NCCL_SOCKET_IFNAME is \"{}\"", cut(names, 200)),
                (None, Some(family)) => format!("NCCL_SOCKET_FAMILY is {}", family_name(family)),
                (Some(names), Some(family)) => {
                    format!(
                        "NCCL_SOCKET_IFNAME is \"{}\" and NCCL_SOCKET_FAMILY {}",
                        cut(names, 200),
                        family_name(family)
                    )
                }
                (None, None) => "no interface has an address".to_owned(),
            };
            Error::usage(format!(
                "{wanted}, which no interface that is up matches; found: {}",
                cut(&found.join(", "), 600)
            ))
        })
}

fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "AF_INET",
        Family::V6 => "AF_INET6",
    }
}

/// NCCL's order of preference: the lower, the sooner.
fn class(interface: &Interface, near: Option<IpAddr>) -> u32 {
    let name = interface.name.as_str();
    if name.starts_with("ib") {
        0
    } else if name.starts_with("docker") {
        3
    } else if name.starts_with("lo") {
        4
    } else if name.starts_with("virbr") {
        5
    } else if near.is_some_and(|near| same_subnet(interface, near)) {
        1
    } else {
        2
    }
}

fn same_subnet(interface: &Interface, other: IpAddr) -> bool {
    let equal_bits = match (interface.address.ip(), other) {
        (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => return false,
    };
    equal_bits >= interface.prefix_bits
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The addresses of all interfaces that are up, in the kernel's order.
pub(super) fn list() -> Result<Vec<Interface>> {
    let mut head = std::ptr::null_mut();
    with_descriptors(|| {
        // SAFETY: `head` is a valid place for the list's address; it is read only if the call succeeds.
        match unsafe { libc::getifaddrs(&mut head) } {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    })
    .map_err(|errno| {
        Error::system(format!(
            "cannot list the network interfaces (getifaddrs): {}",
            describe(errno)
        ))
    })?;
    let mut found = Vec::new();
    let mut next = head;
    while !next.is_null() {
        // SAFETY: `next` is a node of the list that getifaddrs made, which lives until freeifaddrs below.
        let node = unsafe { &*next };
        let up = libc::IFF_UP as u32 | libc::IFF_RUNNING as u32;
        if node.ifa_flags & up == up {
            // SAFETY: the node's address and mask are null or sockaddrs of the size that their family says, and its
            // name is a NUL-terminated string; all live as long as the list.
            let entry = unsafe { (socket_address(node.ifa_addr), socket_address(node.ifa_netmask)) };
            if let (Some(address), mask) = entry {
                // SAFETY: as above.
                let name = unsafe { std::ffi::CStr::from_ptr(node.ifa_name) }
                    .to_string_lossy()
                    .into_owned();
                found.push(Interface {
                    name,
                    address,
                    prefix_bits: mask.map_or(128, |mask| ones(mask.ip())),
                });
            }
        }
        next = node.ifa_next;
    }
    // SAFETY: `head` came from getifaddrs, is freed once, and no reference into the list is left.
    unsafe { libc::freeifaddrs(head) };
    Ok(found)
}

fn ones(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().count_ones(),
        IpAddr::V6(mask) => mask.to_bits().count_ones(),
    }
}

/// The IP address in a sockaddr; None for null and for other families.
///
/// # Safety
/// `address` is null or points to a sockaddr that is as large as its family says.
unsafe fn socket_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; every sockaddr begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an AF_INET sockaddr is a sockaddr_in; read_unaligned asks nothing of its alignment.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(SocketAddr::new(
                Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into(),
                0,
            ))
        }
        libc::AF_INET6 => {
            // SAFETY: an AF_INET6 sockaddr is a sockaddr_in6; read_unaligned asks nothing of its alignment.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(SocketAddrV6::new(address.sin6_addr.s6_addr.into(), 0, 0, address.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn host(entries: &[(&str, &str, u32)]) -> Vec<Interface> {
        let interface = |(name, ip, prefix_bits): &(&str, &str, u32)| Interface {
            name: (*name).to_owned(),
            address: SocketAddr::new(ip.parse().unwrap(), 0),
            prefix_bits: *prefix_bits,
        };
        entries.iter().map(interface).collect()
    }

    fn usual() -> Vec<Interface> {
        host(&[
            ("lo", "127.0.0.1", 8),
            ("virbr0", "192.168.122.1", 24),
            ("docker0", "172.17.0.1", 16),
            ("eth0", "10.9.0.1", 24),
            ("eth01", "10.8.0.1", 24),
            ("lo", "::1", 128),
            ("v6only", "fe80::2", 64),
            ("v6only", "fd00::1", 64),
        ])
    }

    #[test]
    fn names_select_as_in_nccl() {
        for (names, expected) in [
            ("=eth0", "10.9.0.1"),
            ("eth", "10.9.0.1"),
            ("eth01", "10.8.0.1"),
            ("^docker,lo", "10.9.0.1"),
            ("^=eth0", "10.8.0.1"),
            ("^eth,v6", "172.17.0.1"),
            ("^", "10.9.0.1"),
            ("=", "10.9.0.1"),
            ("", "10.9.0.1"),
            (",", "10.9.0.1"),
            ("eth0,", "10.9.0.1"),
            ("=v6only", "fd00::1"),
            ("lo", "127.0.0.1"),
            ("nosuch,docker0", "172.17.0.1"),
        ] {
            let chosen = choose(&usual(), Some(names), None, None).unwrap();
            assert_eq!(chosen.ip().to_string(), expected, "{names}");
        }
    }

    #[test]
    fn no_match_names_the_value_and_what_was_found() {
        let long = "x".repeat(300);
        for names in ["nosuch", "=eth", "eth0:1", "eth0 ", "^eth,lo,docker,virbr,v6", &long] {
            let error = choose(&usual(), Some(names), None, None).unwrap_err();
            assert_eq!(error.code, Code::InvalidUsage, "{names}");
            assert!(
                error.text.contains(cut(names, 200)) && error.text.contains("docker0 (172.17.0.1)"),
                "{error}"
            );
        }
        let error = choose(&usual(), Some("=eth0"), Some(Family::V6), None).unwrap_err();
        assert!(
            error.text.contains("=eth0") && error.text.contains("AF_INET6"),
            "{error}"
        );
    }

    #[test]
    fn the_default_order_is_ncclss() {
        let mut interfaces = usual();
        let choice = |interfaces: &[Interface], near: Option<&str>| {
            choose(interfaces, None, None, near.map(|near| near.parse().unwrap()))
                .unwrap()
                .ip()
                .to_string()
        };
        assert_eq!(choice(&interfaces, None), "10.9.0.1");
        assert_eq!(choice(&interfaces, Some("10.8.0.77")), "10.8.0.1");
        assert_eq!(choice(&interfaces, Some("fd00::9")), "fd00::1");
        assert_eq!(choice(&interfaces, Some("172.17.0.9")), "10.9.0.1");
        interfaces.extend(host(&[("ib0", "10.1.0.1", 24)]));
        assert_eq!(choice(&interfaces, Some("10.8.0.77")), "10.1.0.1");
        assert_eq!(choice(&host(&[("lo", "127.0.0.1", 8)]), None), "127.0.0.1");
        assert_eq!(
            choice(&host(&[("lo", "::1", 128), ("ll", "fe80::1", 64)]), None),
            "fe80::1"
        );
        assert_eq!(
            choice(&host(&[("virbr0", "1.1.1.1", 8), ("lo", "127.0.0.1", 8)]), None),
            "127.0.0.1"
        );
        assert_eq!(choice(&[], None), "127.0.0.1");
    }

    #[test]
    fn the_family_is_obeyed() {
        assert_eq!(
            choose(&usual(), None, Some(Family::V6), None).unwrap().ip().to_string(),
            "fd00::1"
        );
        assert_eq!(
            choose(&usual(), None, Some(Family::V4), None).unwrap().ip().to_string(),
            "10.9.0.1"
        );
        let error = choose(&host(&[("lo", "127.0.0.1", 8)]), None, Some(Family::V6), None).unwrap_err();
        assert!(
            error.code == Code::InvalidUsage && error.text.contains("AF_INET6"),
            "{error}"
        );
    }

    #[test]
    fn a_link_local_address_keeps_its_scope() {
        let address = SocketAddrV6::new("fe80::1".parse().unwrap(), 0, 0, 4).into();
        let only = [Interface {
            name: "ll".into(),
            address,
            prefix_bits: 64,
        }];
        assert_eq!(choose(&only, None, None, None), Ok(address));
    }

    #[test]
    fn this_host_has_a_loopback_interface() {
        let found = list().unwrap();
        assert!(
            found.iter().any(|interface| interface.address.ip().is_loopback()),
            "{found:?}"
        );
    }
}
