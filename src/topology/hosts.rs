//! Which ranks are on one host, and in which order a ring visits them.

use super::host::HostIdentity;

/// The ranks of a communicator by host: hosts in the order in which ranks first name them, ranks in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// By host, its ranks.
    ranks: Vec<Vec<u32>>,
    /// By rank, its host.
    host: Vec<usize>,
}

impl Hosts {
    /// `identities` are the ranks' own, in rank order.
    pub fn group<'a>(identities: impl IntoIterator<Item = &'a HostIdentity>) -> Hosts {
        let mut known: Vec<&HostIdentity> = Vec::new();
        let mut hosts = Hosts {
            ranks: Vec::new(),
            host: Vec::new(),
        };
        for (identity, rank) in identities.into_iter().zip(0..) {
            let host = known.iter().position(|other| other.digest == identity.digest);
            let host = host.unwrap_or_else(|| {
                known.push(identity);
                hosts.ranks.push(Vec::new());
                known.len() - 1
            });
            hosts.ranks[host].push(rank);
            hosts.host.push(host);
        }
        hosts
    }

    /// All of `ranks` ranks on one host.
    pub fn one(ranks: u32) -> Hosts {
        Hosts {
            ranks: vec![(0..ranks).collect()],
            host: vec![0; ranks as usize],
        }
    }

    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The ranks of each host.
    pub fn all(&self) -> impl Iterator<Item = &[u32]> {
        self.ranks.iter().map(Vec::as_slice)
    }

    pub fn host_of(&self, rank: u32) -> usize {
        self.host[rank as usize]
    }

    /// All ranks of the host that `rank` is on.
    pub fn neighbours(&self, rank: u32) -> &[u32] {
        &self.ranks[self.host[rank as usize]]
    }

    pub fn together(&self, one: u32, other: u32) -> bool {
        self.host[one as usize] == self.host[other as usize]
    }

    /// All ranks, host after host: each host is entered and left once around a ring.
    pub fn ring(&self) -> Vec<u32> {
        self.ranks.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(ids: &[u8]) -> Hosts {
        let identities: Vec<HostIdentity> = ids
            .iter()
            .map(|id| HostIdentity {
                digest: [*id; 32],
                name: String::from("node"),
            })
            .collect();
        Hosts::group(&identities)
    }

    #[test]
    fn hosts_come_in_the_order_of_their_first_rank_and_a_ring_visits_each_once() {
        let mixed = hosts(&[7, 3, 7, 9, 3, 7]);
        assert_eq!(mixed.count(), 3);
        assert_eq!(mixed.ring(), [0, 2, 5, 1, 4, 3]);
        assert_eq!(mixed.neighbours(4), [1, 4]);
        assert_eq!(mixed.neighbours(3), [3]);
        assert!(mixed.together(0, 5) && !mixed.together(0, 1));
        assert_eq!(hosts(&[1, 1, 1]), Hosts::one(3));
        assert_eq!(Hosts::one(3).ring(), [0, 1, 2]);
    }

    /// Names are for messages: two machines of one name are two hosts, and one machine may answer to two names.
    #[test]
    fn only_the_digest_tells_hosts_apart() {
        let named = |digest: u8, name: &str| HostIdentity {
            digest: [digest; 32],
            name: String::from(name),
        };
        assert_eq!(Hosts::group(&[named(1, "a"), named(2, "a")]).count(), 2);
        assert_eq!(Hosts::group(&[named(1, "a"), named(1, "b")]).count(), 1);
    }
}
