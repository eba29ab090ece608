//! Other GPUs of the process whose memory this one's kernels can address.
//!
//! Access is opened between primary contexts, once for the life of both, and covers what `cuMemAlloc` gave and will
//! give: the memory of the pools. What `ncclMemAlloc` maps has access of its own (`user_memory`).

use super::context::RelaxedCapture;
use super::pointers::bit;
use super::{can_access, device_count, device_handle, uuid, CudaDevice};
use crate::device::Devices;
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdevice, CallResult};
use cudarc::driver::sys::CUresult;

impl CudaDevice {
    /// A GPU of which the driver does not tell counts as one that cannot be addressed.
    pub(super) fn unreachable_peers(&self) -> Vec<[u8; 16]> {
        self.others()
            .filter(|peer| !can_access(self.driver, self.ordinal, *peer).unwrap_or(false))
            .filter_map(|peer| uuid(self.driver, device_handle(self.driver, peer).ok()?).ok())
            .collect()
    }

    fn others(&self) -> impl Iterator<Item = i32> + '_ {
        (0..device_count(self.driver).unwrap_or(0)).filter(|peer| *peer != self.ordinal)
    }

    /// A bit each, by ordinal. A GPU that this process does not see has none; no communicator lends across such.
    pub(super) fn devices_of(&self, uuids: &[[u8; 16]]) -> Devices {
        let is_meant = |ordinal: &i32| {
            let found = device_handle(self.driver, *ordinal).and_then(|device| uuid(self.driver, device));
            found.is_ok_and(|uuid| uuids.contains(&uuid))
        };
        let meant = (0..device_count(self.driver).unwrap_or(0)).filter(is_meant);
        Devices(meant.fold(0, |bits, ordinal| bits | bit(ordinal)))
    }

    pub(super) fn enable_peer(&self, wanted: [u8; 16]) -> Result<()> {
        let peer = self.others().find_map(|peer| {
            let device = device_handle(self.driver, peer).ok()?;
            (uuid(self.driver, device).ok()? == wanted).then_some((peer, device))
        });
        let Some((peer, device)) = peer else {
            return Err(Error::internal(format!(
                "{} is to address the memory of the GPU with UUID {:032x}, which is no other GPU of this process",
                self.gpu,
                u128::from_be_bytes(wanted)
            )));
        };
        match self.enable(device) {
            Err(failure) if !failure.is(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => Err(Error::cuda(format!(
                "{} cannot address the memory of GPU {peer}: {failure}; set NCCL_P2P_DISABLE=1 to go through host \
                     memory",
                self.gpu
            ))),
            _ => Ok(()),
        }
    }

    fn enable(&self, peer: CUdevice) -> CallResult<()> {
        let _guards = (self.scope()?, RelaxedCapture::enter(self.driver)?);
        let mut context = std::ptr::null_mut();
        // SAFETY: a device that exists; writes one handle. Never released, as the device's own is not.
        unsafe { self.driver.call.cuDevicePrimaryCtxRetain(&mut context, peer) }?;
        // SAFETY: a live context of another GPU, opened for the current one; 0 is the only value of the flags.
        unsafe { self.driver.call.cuCtxEnablePeerAccess(context, 0) }
    }
}
