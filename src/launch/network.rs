//! What goes between hosts, and who drives it: `NCCL_NET` and the switch `NCCL_GPU_INITIATED`.

use crate::environment::{choice, switch};
use crate::error::{Error, Result};
use crate::info;
use crate::sys::verbs;
use serde::{Deserialize, Serialize};

/// What `NCCL_NET` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Net {
    Ib,
    Socket,
    Hca,
}

impl Net {
    /// What this rank asks for, if anything. What is asked for by name must be there, although ranks of one host do not
    /// use it.
    pub(super) fn read() -> Result<Option<Net>> {
        let net = choice(
            "NCCL_NET",
            &[("IB", Net::Ib), ("Socket", Net::Socket), ("HCA", Net::Hca)],
        )?;
        match net {
            Some(Net::Ib) => check_ib()?,
            Some(Net::Socket | Net::Hca) | None => {}
        }
        Ok(net)
    }
}

impl Net {
    pub(super) fn name(self) -> &'static str {
        match self {
            Net::Ib => "RDMA",
            Net::Socket => "TCP sockets",
            Net::Hca => "the software HCA",
        }
    }
}

fn check_ib() -> Result<()> {
    let refused = |why: &str| {
        Err(Error::usage(format!(
            "NCCL_NET is IB, but {why}: unset NCCL_NET, or set it to Socket"
        )))
    };
    if switch("NCCL_IB_DISABLE", false) {
        return refused("NCCL_IB_DISABLE is 1");
    }
    match verbs::device_names() {
        Ok(names) if names.is_empty() => refused("there is no RDMA device"),
        Ok(names) => {
            info!(Net, "RDMA devices: {}", names.join(", "));
            Ok(())
        }
        Err(error) => refused(&error.text),
    }
}

/// The network between the hosts of a communicator, from what its ranks ask for; an error where it is not built. The
/// software HCA joins processes of one machine, whose hosts are faked.
pub(super) fn agree(asked: &[Option<Net>], initiated: Initiated, one_machine: bool) -> Result<Net> {
    let asks = |wanted: Net| asked.iter().position(|net| *net == Some(wanted));
    if let Some(rank) = asks(Net::Ib) {
        return Err(Error::usage(format!(
            "NCCL_NET is IB on rank {rank} and the ranks are on several hosts: RDMA between hosts is not built yet in this \
             version of Ossicle; unset NCCL_NET, or set it to Socket"
        )));
    }
    match (asks(Net::Hca), asks(Net::Socket)) {
        (Some(hca), Some(socket)) => Err(Error::usage(format!(
            "NCCL_NET is HCA on rank {hca} and Socket on rank {socket}: set it alike on all ranks"
        ))),
        (Some(rank), None) if !one_machine => Err(Error::usage(format!(
            "NCCL_NET is HCA on rank {rank} and the ranks are on several machines, which the software HCA does not join in \
             this version of Ossicle; unset NCCL_NET, or set it to Socket"
        ))),
        (Some(_), None) => Ok(Net::Hca),
        (None, None) if initiated == Initiated::Gpu && one_machine => Ok(Net::Hca),
        (None, _) => Ok(Net::Socket),
    }
}

/// The switch: who drives the network. Rank 0's counts for all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Initiated {
    /// `0`
    Cpu,
    /// `1`
    Gpu,
    Auto,
}

impl Initiated {
    pub(super) fn read() -> Result<Initiated> {
        let values = [("0", Initiated::Cpu), ("1", Initiated::Gpu), ("auto", Initiated::Auto)];
        // Both are checked, whichever counts.
        let nccl = choice("NCCL_GPU_INITIATED", &values)?;
        let own = choice("OSSICLE_GPU_INITIATED", &values)?;
        Ok(own.or(nccl).unwrap_or(Initiated::Auto))
    }
}

/// Who drives the links between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    /// The CPU proxy.
    Proxy,
    /// The kernels, which post work requests.
    Kernel,
}

impl Driver {
    pub(super) fn name(self) -> &'static str {
        match self {
            Driver::Proxy => "CPU proxy",
            Driver::Kernel => "kernels",
        }
    }
}

/// A driver and why it is that one. `fallen_back`: the switch asks for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Driven {
    pub(super) driver: Driver,
    pub(super) reason: &'static str,
    pub(super) fallen_back: bool,
}

/// The one place where the switch is decided. Pure: every rank comes to the same answer.
pub(super) fn driver(asked: Initiated, net: Net) -> Driven {
    let kernel = |reason| Driven {
        driver: Driver::Kernel,
        reason,
        fallen_back: false,
    };
    let (reason, fallen_back) = match (asked, net) {
        (Initiated::Gpu, Net::Hca) => return kernel("NCCL_GPU_INITIATED is 1"),
        (Initiated::Auto, Net::Hca) => return kernel("kernels can drive this network"),
        (Initiated::Cpu, _) => ("NCCL_GPU_INITIATED is 0", false),
        (Initiated::Gpu, Net::Socket) => (
            "NCCL_GPU_INITIATED is 1, but no kernel can post to a TCP socket: a CPU thread does, as with 0",
            true,
        ),
        (Initiated::Gpu, Net::Ib) => (
            "NCCL_GPU_INITIATED is 1, but kernels do not drive this network in this version of Ossicle: a CPU thread does, as \
             with 0",
            true,
        ),
        (Initiated::Auto, _) => ("no kernel can drive this network", false),
    };
    Driven {
        driver: Driver::Proxy,
        reason,
        fallen_back,
    }
}

/// What goes between hosts and who drives it, of a communicator whose ranks have this process's environment and machine.
pub fn between_hosts() -> Result<String> {
    let initiated = Initiated::read()?;
    let net = agree(&[Net::read()?], initiated, true)?;
    let Driven { driver, reason, .. } = driver(initiated, net);
    Ok(format!("{}, driven by the {} ({reason})", net.name(), driver.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_falls_back_with_a_reason_that_names_it() {
        for (asked, fallen_back) in [
            (Initiated::Cpu, false),
            (Initiated::Auto, false),
            (Initiated::Gpu, true),
        ] {
            let driven = driver(asked, Net::Socket);
            assert_eq!(
                (driven.driver, driven.fallen_back),
                (Driver::Proxy, fallen_back),
                "{asked:?}"
            );
            assert_eq!(
                driven.reason.contains("NCCL_GPU_INITIATED is 1"),
                fallen_back,
                "{asked:?}"
            );
        }
    }

    #[test]
    fn a_network_that_is_not_built_is_refused_with_the_rank_that_asks_for_it() {
        let between = |asked: &[Option<Net>]| agree(asked, Initiated::Auto, true);
        assert_eq!(between(&[None, Some(Net::Socket)]), Ok(Net::Socket));
        let error = between(&[None, Some(Net::Ib)]).unwrap_err();
        assert!(
            error.text.contains("IB on rank 1") && error.text.contains("Socket"),
            "{error}"
        );
    }

    #[test]
    fn the_hca_is_chosen_by_its_name_or_for_kernels_that_would_drive_and_within_a_machine() {
        use Initiated::{Auto, Cpu, Gpu};
        let hca = [None, Some(Net::Hca)];
        for initiated in [Auto, Gpu] {
            assert_eq!(agree(&hca, initiated, true), Ok(Net::Hca));
            assert_eq!(driver(initiated, Net::Hca).driver, Driver::Kernel);
        }
        assert_eq!(agree(&[None; 2], Gpu, true), Ok(Net::Hca));
        for (asked, initiated, one_machine) in [(None, Auto, true), (None, Gpu, false), (Some(Net::Socket), Gpu, true)]
        {
            assert_eq!(agree(&[None, asked], initiated, one_machine), Ok(Net::Socket));
        }
        assert_eq!(agree(&hca, Cpu, true), Ok(Net::Hca));
        let driven = driver(Cpu, Net::Hca);
        assert_eq!((driven.driver, driven.fallen_back), (Driver::Proxy, false));
        let refused = |asked: &[Option<Net>], initiated, one_machine, part: &str| {
            let error = agree(asked, initiated, one_machine).unwrap_err();
            assert!(error.text.contains(part), "{error}");
        };
        refused(&hca, Gpu, false, "HCA on rank 1 and the ranks are on several machines");
        refused(
            &[Some(Net::Socket), Some(Net::Hca)],
            Gpu,
            true,
            "HCA on rank 1 and Socket on rank 0",
        );
    }
}
