//! The CUDA device against the stand-in driver of `sys::fake`.

use super::*;
use crate::device::{Kernel, LEGACY_STREAM_KEY};
use crate::error::Code;
use crate::request::{DataType, ReduceOp};
use crate::sys::fake::{Fake, FakeRange};

pub(super) const IMAGE: Image = Image {
    bytes: b"fatbin",
    release: "13.0",
    targets: "sm_90",
};

pub(super) fn fake_device(test: &str) -> (Fake, Arc<CudaDevice>) {
    fake_device_with(test, &[])
}

fn fake_device_with(test: &str, defines: &[&str]) -> (Fake, Arc<CudaDevice>) {
    let fake = Fake::build(test, defines);
    let device = CudaDevice::open(fake.driver(), 0, IMAGE).expect("GPU 0");
    (fake, Arc::new(device))
}

#[track_caller]
pub(super) fn assert_refused<T>(result: Result<T>, code: Code, parts: &[&str]) {
    let error = result.err().expect("refused");
    assert_eq!(error.code, code, "{error}");
    for part in parts {
        assert!(error.text.contains(part), "\"{part}\" is not in \"{error}\"");
    }
}

#[test]
fn a_device_says_what_it_is_and_loads_every_kernel() {
    let (fake, device) = fake_device("open");
    assert_eq!(device.describe(), "GPU 0 (Fake, 0000:01:00.0)");
    assert_eq!(
        (device.ordinal(), device.multiprocessors(), device.uuid()),
        (0, 132, [0x40; 16])
    );
    assert_eq!(fake.count(c"cuModuleLoadData"), 1);
    assert_eq!(fake.count(c"cuFuncLoad"), Kernel::all().count() as i32);
    assert_eq!(
        (fake.ask(c"fake_depth"), fake.ask(c"fake_mode")),
        (0, 0),
        "context and capture mode are put back"
    );
}

#[test]
fn a_missing_kernel_and_a_refused_image_are_named() {
    let fake = Fake::build("missing_kernel", &[]);
    fake.set(c"fake_missing_kernel", c"ossicle_program_half_max".as_ptr());
    assert_refused(
        CudaDevice::open(fake.driver(), 0, IMAGE).map(|_| ()),
        Code::InternalError,
        &["lacks kernel ossicle_program_half_max"],
    );
    let image = Image {
        bytes: b"other!",
        release: "13.0",
        targets: "sm_90",
    };
    assert_refused(
        CudaDevice::open(fake.driver(), 1, image).map(|_| ()),
        Code::UnhandledCudaError,
        &[
            "GPU 1 (Fake, 0000:02:00.0)",
            "cuModuleLoadData failed: 209",
            "supports CUDA 13.0",
            "built by CUDA 13.0 for sm_90",
        ],
    );
}

#[test]
fn the_callers_context_is_left_as_it_was() {
    let (fake, device) = fake_device("context");
    let mut other = std::ptr::null_mut();
    // SAFETY: the stand-in's device 1; writes one handle, which is then made current.
    unsafe {
        device
            .driver
            .call
            .cuDevicePrimaryCtxRetain(&mut other, 1)
            .expect("a context");
        device.driver.call.cuCtxPushCurrent(other).expect("current");
    }
    assert_eq!(context::current_ordinal(device.driver), Ok(1));
    device.check_stream(0x600 as *mut c_void).expect("a stream of GPU 0");
    device.clone().allocate(1, Placement::Device).expect("memory");
    assert_eq!(fake.ask(c"fake_depth"), 1);
    assert_eq!(context::current_ordinal(device.driver), Ok(1));
    let pushes = fake.count(c"cuCtxPushCurrent");
    // SAFETY: the device's own context, made current.
    unsafe { device.driver.call.cuCtxPushCurrent(device.context.0) }.expect("current");
    device.check_stream(0x600 as *mut c_void).expect("a stream of GPU 0");
    assert_eq!(
        fake.count(c"cuCtxPushCurrent"),
        pushes + 1,
        "not pushed where it is current already"
    );
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FakeLaunch {
    kernel: *const c_char,
    blocks: u32,
    threads: u32,
    stream: *mut c_void,
    context: *mut c_void,
    bytes: [u8; 64],
}

#[test]
fn a_launch_passes_its_arguments_and_checks_their_size() {
    let (fake, device) = fake_device("launch");
    let arguments: Vec<u8> = (0..64).collect();
    let as_trait: Arc<dyn Device> = device.clone();
    let mut launch = Launch {
        device: &as_trait,
        kernel: Kernel::Reduction {
            family: crate::device::KernelFamily::OneShot,
            datatype: DataType::Bfloat16,
            op: ReduceOp::Avg,
        },
        blocks: 3,
        threads: 512,
        arguments: &arguments,
        stream: 0x600 as *mut c_void,
    };
    device.launch(&launch).expect("launched");
    let seen: FakeLaunch = fake.get(c"fake_launch");
    // SAFETY: the stand-in keeps the name that the kernel was asked for by.
    let kernel = unsafe { CStr::from_ptr(seen.kernel) };
    assert_eq!(kernel, c"ossicle_one_shot_bfloat16_avg");
    assert_eq!((seen.blocks, seen.threads, seen.stream), (3, 512, 0x600 as *mut c_void));
    assert_eq!(seen.context, device.context.0.cast());
    assert_eq!(seen.bytes[..], arguments[..]);
    launch.arguments = &arguments[..63];
    assert_refused(device.launch(&launch), Code::InternalError, &["63 bytes", "64"]);
    launch.kernel = Kernel::Reduction {
        family: crate::device::KernelFamily::OneShot,
        datatype: DataType::Bfloat16,
        op: ReduceOp::Prod,
    };
    assert_refused(
        device.launch(&launch),
        Code::InternalError,
        &["no kernel ossicle_one_shot_bfloat16_prod"],
    );
}

#[test]
fn memory_is_zeroed_kept_and_never_freed() {
    let (fake, device) = fake_device("memory");
    for (placement, call) in [
        (Placement::Device, c"cuMemAlloc"),
        (Placement::Pinned, c"cuMemHostAlloc"),
    ] {
        let before = fake.count(call);
        let memory = device.clone().allocate(300 << 10, placement).expect("memory");
        assert_eq!((memory.bytes, memory.placement), (300 << 10, placement));
        // SAFETY: the stand-in's memory is host memory of that size.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address, memory.bytes) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);
        let address = memory.address;
        drop(memory);
        let again = device.clone().allocate(300 << 10, placement).expect("memory");
        assert_eq!(again.address, address);
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(again.address, again.bytes) }
            .iter()
            .all(|byte| *byte == 0));
        assert_eq!(fake.count(call), before + 1);
    }
    assert_eq!(fake.count(c"cuMemFree"), 0);
}

#[test]
fn memory_that_cannot_be_had_is_named_and_a_failed_block_returns() {
    let (fake, device) = fake_device("no_memory");
    let refused = device.clone().allocate(4 << 30, Placement::Device).map(|_| ());
    assert_refused(
        refused,
        Code::UnhandledCudaError,
        &["4294967296 bytes of Device memory", "OUT_OF_MEMORY"],
    );
    let refused = device.clone().allocate(usize::MAX, Placement::Pinned).map(|_| ());
    assert_refused(refused, Code::UnhandledCudaError, &["more than the address space has"]);
    fake.set(c"fake_fail_memset", 1i32);
    let before = fake.count(c"cuMemAlloc");
    for _ in 0..3 {
        let refused = device.clone().allocate(200 << 10, Placement::Device).map(|_| ());
        assert_refused(refused, Code::UnhandledCudaError, &["cuMemsetD8Async failed: 999"]);
    }
    assert_eq!(fake.count(c"cuMemAlloc"), before + 1, "the block went back to the pool");
}

const RANGE: FakeRange = FakeRange {
    start: 0x10_0000_0000,
    bytes: 0x1000,
    memory_type: 2,
    ordinal: 0,
    managed: false,
    whole: true,
    seen_as: 0x10_0000_0000,
};

fn check(device: &CudaDevice, pointer: u64, bytes: usize) -> Result<()> {
    let reached = device.check_pointer("sendbuff", pointer as *const c_void, bytes, false);
    reached.map(drop)
}

#[test]
fn pointers_of_this_gpu_are_taken_and_looked_up_once() {
    let (fake, device) = fake_device("pointers");
    fake.range(&RANGE);
    fake.range(&FakeRange {
        start: 0x20_0000_0000,
        ordinal: 1,
        managed: true,
        ..RANGE
    });
    fake.range(&FakeRange {
        start: 0x30_0000_0000,
        ordinal: 1,
        memory_type: 1,
        seen_as: 0x30_0000_0000,
        ..RANGE
    });
    for pointer in [RANGE.start, 0x20_0000_0000, 0x30_0000_0000] {
        check(&device, pointer, 0x1000).expect("reachable");
        let lookups = fake.count(c"cuPointerGetAttributes");
        check(&device, pointer, 0x800).expect("known");
        assert_eq!(fake.count(c"cuPointerGetAttributes"), lookups);
        device
            .check_pointer("recvbuff", pointer as *const c_void, 8, true)
            .expect("looked up again");
        assert_eq!(fake.count(c"cuPointerGetAttributes"), lookups + 1);
    }
    check(&device, 0xdead_0000, 0).expect("no byte is touched");
}

#[test]
fn pointers_elsewhere_are_refused_by_name() {
    let (fake, device) = fake_device("bad_pointers");
    fake.range(&RANGE);
    fake.range(&FakeRange {
        start: 0x20_0000_0000,
        ordinal: 1,
        ..RANGE
    });
    fake.range(&FakeRange {
        start: 0x30_0000_0000,
        memory_type: 1,
        seen_as: 0x40_0000_0000,
        ..RANGE
    });
    for (pointer, bytes, parts) in [
        (
            0xdead_0000,
            8,
            &[
                "sendbuff (0xdead0000) is host memory",
                "cudaMalloc, ncclMemAlloc or cudaHostAlloc",
            ][..],
        ),
        (
            0x20_0000_0000,
            8,
            &["sendbuff (0x2000000000) is memory of GPU 1", "device is GPU 0"][..],
        ),
        (0x30_0000_0000, 8, &["at another address (0x4000000000)"][..]),
        (
            RANGE.start + 0xff0,
            17,
            &["0x1000000ff0 with 17 bytes", "ends after 16 bytes, at 0x1000001000"][..],
        ),
        (u64::MAX - 3, 8, &["run past the end of the address space"][..]),
    ] {
        assert_refused(check(&device, pointer, bytes), Code::InvalidArgument, parts);
    }
}

#[test]
fn a_buffer_may_span_mappings_but_not_allocations() {
    let (fake, device) = fake_device("spans");
    // Expandable segments: three mappings side by side, then one of another GPU.
    for (piece, ordinal) in [0, 0, 0, 1].into_iter().enumerate() {
        let start = 0x50_0000_0000 + piece as u64 * 0x20_0000;
        fake.range(&FakeRange {
            start,
            seen_as: start,
            bytes: 0x20_0000,
            ordinal,
            whole: false,
            ..RANGE
        });
    }
    check(&device, 0x50_0000_0010, 0x60_0000 - 0x10).expect("three pieces");
    let lookups = fake.count(c"cuPointerGetAttributes");
    check(&device, 0x50_0000_0010, 0x60_0000 - 0x10).expect("known as one range");
    assert_eq!(fake.count(c"cuPointerGetAttributes"), lookups);
    assert_refused(
        check(&device, 0x50_0000_0000, 0x60_0001),
        Code::InvalidArgument,
        &["is memory of GPU 1"],
    );
    // Two cudaMallocs side by side are two buffers.
    fake.range(&RANGE);
    fake.range(&FakeRange {
        start: RANGE.start + 0x1000,
        ..RANGE
    });
    fake.range(&FakeRange {
        start: RANGE.start + 0x2000,
        whole: false,
        ..RANGE
    });
    assert_refused(
        check(&device, RANGE.start + 0x1000, 0x1001),
        Code::InvalidArgument,
        &["ends after 4096 bytes"],
    );
    assert_refused(
        check(&device, RANGE.start, 0x1001),
        Code::InvalidArgument,
        &["ends after 4096 bytes"],
    );
}

#[test]
fn streams_are_told_apart_and_bad_ones_refused() {
    for (test, version) in [
        ("streams", "FAKE_VERSION=13000"),
        ("streams_before_12_4", "FAKE_VERSION=12000"),
    ] {
        let (fake, device) = fake_device_with(test, &[version]);
        let key = |handle: usize| device.check_stream(handle as *mut c_void);
        let legacy = StreamKey {
            stream: LEGACY_STREAM_KEY,
            capture: None,
        };
        assert_eq!((key(0), key(1)), (Ok(legacy), Ok(legacy)));
        let keys = [key(0), key(2), key(0x600), key(0x601), key(0x506)].map(|key| key.expect("a stream"));
        for (i, one) in keys.iter().enumerate() {
            assert!(!keys[i + 1..].contains(one), "{keys:?}");
        }
        let captured = [key(0x50C), key(0x50D)].map(|key| key.expect("a stream under capture"));
        assert_eq!(captured.map(|key| key.capture), [Some(7), Some(7)]);
        assert_ne!(captured[0].stream, captured[1].stream);
        assert_refused(
            key(0x50E),
            Code::InvalidUsage,
            &[
                "0x50e cannot be used while a stream",
                "cuStreamGetCaptureInfo failed: 906",
            ],
        );
        assert_refused(
            key(0x50F),
            Code::InvalidUsage,
            &["capture of stream 0x50f was made invalid"],
        );
        assert_refused(
            key(0x50B),
            Code::InvalidArgument,
            &["0x50b is not a stream of GPU 0", "400"],
        );
        assert_refused(
            key(0x501),
            Code::InvalidArgument,
            &["0x501 belongs to GPU 1", "device is GPU 0"],
        );
        assert_eq!(fake.ask(c"fake_depth"), 0);
    }
}

#[test]
fn keys_tell_blocking_streams_and_ids_what_is_known() {
    let (fake, device) = fake_device("blocking_streams");
    let key = |handle: usize| device.check_stream(handle as *mut c_void).expect("a stream").stream;
    let asked = || {
        [
            c"cuStreamGetCaptureInfo",
            c"cuStreamGetId",
            c"cuStreamGetCtx",
            c"cuStreamGetFlags",
        ]
        .map(|call| fake.count(call))
    };
    assert_eq!((key(2), asked()), (2 << 1 | 1, [1, 1, 0, 0]), "the per-thread stream");
    assert_eq!((key(0x600), asked()), (0x600 << 1, [2, 2, 1, 1]));
    assert_eq!((key(0x600), asked()), (0x600 << 1, [3, 3, 1, 1]), "known");
    // The stream was destroyed and its handle given to a blocking one.
    fake.set(c"fake_generation", 1i32);
    fake.set(c"fake_stream_flags", 0i32);
    assert_eq!((key(0x600), asked()), (0x10600 << 1 | 1, [4, 4, 2, 2]));
    fake.set(c"fake_generation", 0i32);
    assert_eq!(key(0x640), 0x640 << 1 | 1, "takes the place of the first");
    assert_eq!(key(0x640), 0x640 << 1 | 1);
    let before = fake.count(c"cuStreamGetFlags");
    key(0x600);
    assert_eq!(fake.count(c"cuStreamGetFlags"), before + 1, "forgotten, so asked again");
}

#[test]
fn a_gpu_that_does_not_answer_is_told_with_its_cause() {
    let (fake, device) = fake_device("health");
    assert_eq!(device.health(), Ok(()));
    fake.set(c"fake_not_ready", 1i32);
    assert_eq!(device.health(), Ok(()), "busy is healthy");
    assert_eq!(fake.get::<i32>(c"fake_not_ready"), 0, "it was asked");
    for (status, parts) in [
        (
            700,
            [
                "GPU 0 (Fake, 0000:01:00.0)",
                "cuStreamQuery failed: 700 (CUDA_ERROR_ILLEGAL_ADDRESS): a kernel of this process faulted",
            ],
        ),
        (
            999,
            [
                "cuStreamQuery failed: 999: the GPU or its driver failed",
                "restart the process",
            ],
        ),
    ] {
        fake.set(c"fake_stream_status", status);
        assert_refused(device.health(), Code::UnhandledCudaError, &parts);
    }
    assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
}

#[test]
fn zeroing_is_polled_up_to_its_deadline() {
    let (fake, device) = fake_device("zeroing");
    let queries = fake.count(c"cuStreamQuery");
    fake.set(c"fake_not_ready", 100i32);
    device.clone().allocate(1, Placement::Device).expect("zeroed");
    assert_eq!(fake.count(c"cuStreamQuery"), queries + 101);
    fake.set(c"fake_not_ready", i32::MAX);
    let _guards = (device.scope(), RelaxedCapture::enter(device.driver));
    assert_refused(
        device.wait_for_zeroing(512, std::time::Duration::ZERO),
        Code::UnhandledCudaError,
        &["GPU 0 did not zero 512 bytes within 0 s: kernels that wait for ranks fill it"],
    );
}

#[test]
fn other_gpus_are_out_of_reach_unless_the_driver_grants_access() {
    let (fake, device) = fake_device("out_of_reach");
    assert!(device.out_of_reach().is_empty());
    for trouble in [c"fake_no_access", c"fake_fail_access"] {
        fake.set(trouble, 1i32);
        assert_eq!(device.out_of_reach(), [[0x41; 16]], "{trouble:?}");
        fake.set(trouble, 0i32);
    }
}

#[test]
fn a_peer_is_opened_from_the_devices_own_context_and_may_be_again() {
    let (fake, device) = fake_device("open_peer");
    fake.set(c"fake_no_access", 1i32);
    assert_refused(
        device.open_peer([0x41; 16]),
        Code::UnhandledCudaError,
        &[
            "cannot address the memory of GPU 1: cuCtxEnablePeerAccess failed: 217",
            "NCCL_P2P_DISABLE=1",
        ],
    );
    fake.set(c"fake_no_access", 0i32);
    for _ in 0..2 {
        assert_eq!(device.open_peer([0x41; 16]), Ok(()));
    }
    assert_eq!(fake.count(c"cuCtxEnablePeerAccess"), 3);
    assert_eq!(fake.get::<*mut CUctx_st>(c"fake_peer_opener"), device.context.0);
    let peer = CudaDevice::open(fake.driver(), 1, IMAGE).expect("GPU 1");
    assert_eq!(fake.get::<*mut CUctx_st>(c"fake_opened_peer"), peer.context.0);
    for unknown in [[0x42; 16], [0x40; 16]] {
        assert_refused(
            device.open_peer(unknown),
            Code::InternalError,
            &[
                &format!("UUID {:032x}", u128::from_be_bytes(unknown)),
                "no other GPU of this process",
            ],
        );
    }
    assert_eq!((fake.ask(c"fake_depth"), fake.ask(c"fake_mode")), (0, 0));
}

#[test]
fn freed_user_memory_is_trusted_by_no_device() {
    let (fake, device) = fake_device("freed");
    // No test opens so many GPUs: the slot stands for any other device of the process.
    let other =
        OPENED[MOST_DEVICES - 1].get_or_init(|| Arc::new(CudaDevice::open(fake.driver(), 1, IMAGE).expect("GPU 1")));
    let pointer = device.allocate_user(3 << 20).expect("memory");
    let start = pointer as usize;
    for known in [&device, other] {
        let ranges = &known.known_ranges;
        ranges.remember(start, start..start + (4 << 20), Devices::ALL);
        ranges.remember(0x1000, 0x1000..0x2000, Devices::ALL);
        assert!(ranges.find(start, 3 << 20).is_some());
    }
    device.free_user(pointer).expect("freed");
    for known in [&device, other] {
        let ranges = &known.known_ranges;
        assert!(ranges.find(start, 1).is_none());
        assert!(ranges.find(0x1000, 1).is_some(), "of others nothing is forgotten");
    }
    assert_refused(
        device.check_pointer("sendbuff", pointer, 1, false).map(drop),
        Code::InvalidArgument,
        &["sendbuff", "is host memory that the GPU cannot reach"],
    );
}

#[test]
fn user_memory_is_mapped_for_every_gpu_and_freed_once() {
    let (fake, device) = fake_device("user_memory");
    let pointer = device.allocate_user(3 << 20).expect("memory");
    assert_eq!(fake.get::<i32>(c"fake_mapped_bytes"), 4 << 20);
    assert_eq!(fake.get::<i32>(c"fake_access_count"), 2);
    assert_eq!(fake.count(c"cuMemRelease"), 1, "the mapping keeps the memory");
    device.free_user(pointer).expect("freed");
    assert_eq!(fake.get::<i32>(c"fake_mapped_bytes"), 0);
    let named = format!("{pointer:p}");
    assert_refused(
        device.free_user(pointer),
        Code::InvalidArgument,
        &[&named, "ncclMemAlloc did not give"],
    );
    assert_refused(
        device.allocate_user(2 << 30),
        Code::UnhandledCudaError,
        &["2147483648 bytes", "OUT_OF_MEMORY"],
    );
    assert_refused(
        device.allocate_user(usize::MAX),
        Code::UnhandledCudaError,
        &["cuMemCreate failed: 1"],
    );
    fake.set(c"fake_fail_set_access", 1i32);
    assert_refused(
        device.allocate_user(1),
        Code::UnhandledCudaError,
        &["cuMemSetAccess failed: 999"],
    );
    assert_eq!(fake.get::<i32>(c"fake_mapped_bytes"), 0, "nothing stays mapped");
    assert_eq!(fake.count(c"cuMemAddressReserve"), fake.count(c"cuMemAddressFree"));
    assert_eq!(
        fake.count(c"cuMemCreate"),
        fake.count(c"cuMemRelease") + 2,
        "the two refused ones made none"
    );
}

#[test]
fn host_memory_is_registered_under_its_own_address() {
    let (fake, device) = fake_device("register");
    let mut page = [0u8; 4096];
    let address = page.as_mut_ptr();
    assert_eq!(device.register(address, page.len()), Ok(address));
    device.unregister(address);
    assert_eq!(
        (fake.count(c"cuMemHostRegister"), fake.count(c"cuMemHostUnregister")),
        (1, 1)
    );
}

#[test]
fn this_machine_is_told_rightly() {
    let gpus = driver().ok().map_or(0, |driver| device_count(driver).unwrap_or(0));
    assert_eq!(available(), gpus > 0 && module::embedded().is_some());
    if gpus == 0 {
        assert_refused(
            count(),
            Code::SystemError,
            &["there is no GPU to use: ", "set OSSICLE_DEVICE=host"],
        );
    }
    let parts: &[&str] = match module::embedded() {
        None => &["built with feature host-only: rebuild without it, or set OSSICLE_DEVICE=host"],
        Some(_) if gpus == 0 => &["there is no GPU to use: "],
        Some(_) => &["device is 64", &format!("this process sees {gpus} GPUs")],
    };
    let error = open(Some(64)).map(|_| ()).expect_err("no such GPU");
    for part in parts {
        assert!(error.text.contains(part), "\"{part}\" is not in \"{error}\"");
    }
}
