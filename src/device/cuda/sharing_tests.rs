//! Shared memory against the stand-in driver of `sys::fake`. Two stand-ins are two processes.

use super::tests::{assert_refused, fake_device, IMAGE};
use super::CudaDevice;
use crate::bootstrap::Descriptor;
use crate::device::{Device, Export, Mapping, Sharing, Ticket};
use crate::error::Code;
use crate::sys::fake::Fake;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::Arc;

const BYTES: usize = 3 << 20;

/// A process with its two GPUs, which other stand-ins have too.
pub(crate) fn fake_gpus(test: &str) -> (Fake, [Arc<dyn Device>; 2]) {
    let fake = Fake::build(test, &[]);
    let open =
        |ordinal| -> Arc<dyn Device> { Arc::new(CudaDevice::open(fake.driver(), ordinal, IMAGE).expect("a GPU")) };
    let gpus = [open(0), open(1)];
    (fake, gpus)
}

fn set_failing(fake: &Fake, function: &'static std::ffi::CStr) {
    fake.set(c"fake_failing", function.as_ptr());
}

fn import(device: &Arc<CudaDevice>, export: &Export) -> crate::error::Result<Box<dyn Mapping>> {
    Arc::clone(device).import(&export.ticket, copy(export))
}

fn copy(export: &Export) -> Descriptor {
    let fd = export.fd.as_fd().try_clone_to_owned().expect("a copy");
    Descriptor::new(fd).expect("a descriptor")
}

fn byte(mapping: &dyn Mapping, at: usize) -> &AtomicU8 {
    assert!(at < BYTES);
    // SAFETY: the stand-in's memory is host memory of BYTES or more, mapped as long as the mapping.
    unsafe { AtomicU8::from_ptr(mapping.address().add(at)) }
}

fn read(mapping: &dyn Mapping, at: usize) -> u8 {
    byte(mapping, at).load(Ordering::Relaxed)
}

fn write(mapping: &dyn Mapping, at: usize, value: u8) {
    byte(mapping, at).store(value, Ordering::Relaxed)
}

/// What an owner wrote is seen by a peer, and the other way round.
fn assert_same_memory(owner: &dyn Mapping, peer: &dyn Mapping) {
    for at in [0, BYTES / 2, BYTES - 1] {
        write(owner, at, 17);
        assert_eq!(read(peer, at), 17);
        write(peer, at, 71);
        assert_eq!(read(owner, at), 71);
    }
}

fn undisturbed(fake: &Fake) {
    assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
}

#[test]
fn exported_memory_is_zeroed_rounded_and_lives_until_its_last_mapping_goes() {
    let (fake, device) = fake_device("export");
    let (peer_fake, peer) = fake_device("export_peer");
    let export = device.clone().export(BYTES, Sharing::Handles).expect("exported");
    assert_eq!(export.ticket, Ticket::Handle { bytes: 4 << 20 });
    assert!((0..BYTES).all(|at| read(export.mapping.as_ref(), at) == 0));
    assert_eq!(
        fake.get::<i32>(c"fake_access_count"),
        2,
        "its own GPU and the one that reaches it"
    );
    let imported = import(&peer, &export).expect("imported");
    let again = import(&peer, &export).expect("by a second rank of that process");
    assert_same_memory(export.mapping.as_ref(), imported.as_ref());
    assert_same_memory(again.as_ref(), imported.as_ref());
    assert_eq!(peer_fake.get::<i32>(c"fake_mapped_bytes"), 8 << 20);
    assert_eq!(peer_fake.get::<i32>(c"fake_access_count"), 1);
    for fake in [&fake, &peer_fake] {
        let taken = fake.count(c"cuMemCreate") + fake.count(c"cuMemImportFromShareableHandle");
        assert_eq!(fake.count(c"cuMemRelease"), taken, "mappings keep the memory");
    }
    drop((export, again));
    assert_eq!(fake.get::<i32>(c"fake_mapped_bytes"), 0);
    assert_eq!(read(imported.as_ref(), 0), 71, "the owner is gone, its memory is not");
    drop(imported);
    assert_eq!(peer_fake.get::<i32>(c"fake_mapped_bytes"), 0);
    for fake in [&fake, &peer_fake] {
        assert_eq!(fake.count(c"cuMemAddressReserve"), fake.count(c"cuMemAddressFree"));
        undisturbed(fake);
    }
}

#[test]
fn an_importer_maps_a_peer_gpus_memory_for_itself() {
    let (fake, device) = fake_device("import_peer_gpu");
    let export = device.clone().export(BYTES, Sharing::Handles).expect("exported");
    let peer = CudaDevice::open(fake.driver(), 1, IMAGE).expect("GPU 1");
    let imported = import(&Arc::new(peer), &export).expect("imported");
    assert_eq!(fake.get::<i32>(c"fake_access_ordinal"), 1);
    assert_same_memory(export.mapping.as_ref(), imported.as_ref());
}

#[test]
fn every_failing_call_is_named_with_the_remedy_and_leaves_nothing() {
    let (fake, device) = fake_device("sharing_fails");
    let good = device.clone().export(BYTES, Sharing::Handles).expect("exported");
    let good_ipc = device.clone().export(BYTES, Sharing::Ipc).expect("exported");
    let mapped = fake.get::<i32>(c"fake_mapped_bytes");
    let reserved = || fake.count(c"cuMemAddressReserve") - fake.count(c"cuMemAddressFree");
    let kept = reserved();
    let remedy = "set NCCL_P2P_DISABLE=1 to go through host memory";
    for (function, sharing) in [
        (c"cuMemGetAllocationGranularity", Sharing::Handles),
        (c"cuMemCreate", Sharing::Handles),
        (c"cuMemExportToShareableHandle", Sharing::Handles),
        (c"cuMemAddressReserve", Sharing::Handles),
        (c"cuMemMap", Sharing::Handles),
        (c"cuMemSetAccess", Sharing::Handles),
        (c"cuMemsetD8Async", Sharing::Handles),
        (c"cuMemAlloc", Sharing::Ipc),
        (c"cuIpcGetMemHandle", Sharing::Ipc),
    ] {
        set_failing(&fake, function);
        // More than the pool has.
        let bytes = if function == c"cuMemAlloc" { 64 << 20 } else { BYTES };
        let (text, way) = (function.to_str().expect("ASCII"), sharing.name());
        assert_refused(
            device.clone().export(bytes, sharing),
            Code::UnhandledCudaError,
            &[
                "GPU 0 (Fake",
                "cannot share",
                way,
                &format!("{text} failed: 999"),
                remedy,
            ],
        );
    }
    for (function, export) in [
        (c"cuMemImportFromShareableHandle", &good),
        (c"cuMemAddressReserve", &good),
        (c"cuMemMap", &good),
        (c"cuMemSetAccess", &good),
        (c"cuIpcOpenMemHandle", &good_ipc),
    ] {
        set_failing(&fake, function);
        let text = function.to_str().expect("ASCII");
        assert_refused(
            import(&device, export),
            Code::UnhandledCudaError,
            &[
                "cannot address the memory of another process",
                &format!("{text} failed: 999"),
                remedy,
            ],
        );
    }
    set_failing(&fake, c"");
    let short = Ticket::Ipc { handle: vec![0; 63] };
    assert_refused(
        device.clone().import(&short, copy(&good_ipc)),
        Code::UnhandledCudaError,
        &["its handle has not 64 bytes", remedy],
    );
    // Reserving did not take place where it failed, once in each list.
    assert_eq!(reserved() - 2, kept);
    assert_eq!(fake.get::<i32>(c"fake_mapped_bytes"), mapped);
    undisturbed(&fake);
}

#[test]
fn what_cannot_be_unmapped_is_left() {
    let (fake, device) = fake_device("unmap_fails");
    let export = device.clone().export(BYTES, Sharing::Handles).expect("exported");
    set_failing(&fake, c"cuMemUnmap");
    drop(export);
    assert_eq!(fake.count(c"cuMemAddressFree"), 0, "the range is not free");
    undisturbed(&fake);
}

#[test]
fn a_device_without_vmm_shares_by_legacy_ipc() {
    let fake = Fake::build("no_vmm", &[]);
    let open = || Arc::new(CudaDevice::open(fake.driver(), 0, IMAGE).expect("GPU 0"));
    assert_eq!(open().sharing(), [Sharing::Handles, Sharing::Ipc]);
    fake.set(c"fake_no_vmm", 1i32);
    let device = open();
    assert_eq!(device.sharing(), [Sharing::Ipc]);
    assert_refused(
        device.export(BYTES, Sharing::Handles),
        Code::UnhandledCudaError,
        &["by VMM handles: it has none, or NCCL_CUMEM_ENABLE is 0"],
    );
}

/// The block at `address` once the pool lends it again. A child that another test forks holds copies of a pipe for a
/// moment.
fn lent_again(device: &Arc<CudaDevice>, address: *mut u8) -> Export {
    let mut others = Vec::new();
    loop {
        let export = device.clone().export(1, Sharing::Ipc).expect("exported");
        if export.mapping.address() == address {
            return export;
        }
        others.push(export);
        assert!(others.len() < 500, "the block never came back");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// A data loader's worker that lives on while the communicators of its parent come and go.
#[test]
fn a_forked_child_keeps_no_block_of_legacy_ipc() {
    let (_fake, device) = fake_device("ipc_fork");
    let (_peer_fake, peer) = fake_device("ipc_fork_peer");
    let export = device.clone().export(1, Sharing::Ipc).expect("exported");
    let imported = import(&peer, &export).expect("imported");
    let address = export.mapping.address();
    // SAFETY: the child waits to be killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
    }
    drop((export, imported));
    drop(lent_again(&device, address));
    // SAFETY: kills and waits for the child made above; no status is asked for.
    let ended = unsafe {
        (
            libc::kill(child, libc::SIGKILL),
            libc::waitpid(child, std::ptr::null_mut(), 0),
        )
    };
    assert_eq!(ended, (0, child));
}

#[test]
fn memory_of_legacy_ipc_is_lent_again_only_when_every_importer_has_left() {
    let (fake, device) = fake_device("ipc");
    let (peer_fake, peer) = fake_device("ipc_peer");
    let export = device.clone().export(1, Sharing::Ipc).expect("exported");
    let address = export.mapping.address();
    // What the pool lent has a whole page, so that a peer sees nothing else.
    assert!(fake.count(c"cuMemAlloc") == 2 && address.addr().is_multiple_of(2 << 20));
    write(export.mapping.as_ref(), 0, 1);
    let first = import(&peer, &export).expect("imported");
    let second = import(&peer, &export).expect("imported");
    assert_eq!(first.address(), address, "the stand-in's processes are one");
    drop(export);
    let before = fake.count(c"cuMemAlloc");
    let other = device.clone().export(1, Sharing::Ipc).expect("exported");
    assert_ne!(other.mapping.address(), address, "importers still write there");
    assert_eq!(fake.count(c"cuMemAlloc"), before + 1);
    drop(first);
    let third = device.clone().export(1, Sharing::Ipc).expect("exported");
    assert_ne!(third.mapping.address(), address, "one importer still writes there");
    drop(second);
    assert_eq!(peer_fake.get::<i32>(c"fake_opened"), 0);
    let again = lent_again(&device, address);
    assert_eq!(read(again.mapping.as_ref(), 0), 0, "zeroed anew");
    assert_eq!((fake.count(c"cuMemFree"), peer_fake.count(c"cuMemFree")), (0, 0));
    undisturbed(&fake);
    undisturbed(&peer_fake);
}
