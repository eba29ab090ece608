//! The CUDA device against the stand-in driver of `sys::fake`.

use super::*;
use crate::device::Kernel;
use crate::error::Code;
use crate::request::{DataType, ReduceOp};
use crate::sys::fake::{Fake, FakeRange};

const IMAGE: Image = Image {
    bytes: b"fatbin",
    release: "13.0",
    targets: "sm_90",
};

fn fake_device(test: &str) -> (Fake, Arc<CudaDevice>) {
    fake_device_with(test, &[])
}

fn fake_device_with(test: &str, defines: &[&str]) -> (Fake, Arc<CudaDevice>) {
    let fake = Fake::build(test, defines);
    let device = CudaDevice::open(fake.driver(), 0, IMAGE).expect("GPU 0");
    (fake, Arc::new(device))
}

#[track_caller]
fn assert_refused<T>(result: Result<T>, code: Code, parts: &[&str]) {
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
        kernel: Kernel {
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
    launch.kernel.op = ReduceOp::Prod;
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
    device.check_pointer("sendbuff", pointer as *const c_void, bytes, false)
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
        assert_eq!(key(0), key(1));
        let keys = [key(0), key(2), key(0x600), key(0x601), key(0x506)].map(|key| key.expect("a stream"));
        for (i, one) in keys.iter().enumerate() {
            assert!(!keys[i + 1..].contains(one), "{keys:?}");
        }
        assert_refused(
            key(0x50C),
            Code::InvalidUsage,
            &["0x50c is under CUDA graph capture, which is not built yet"],
        );
        assert_refused(key(0x50E), Code::InvalidUsage, &["under CUDA graph capture"]);
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
fn streams_are_ordered_by_one_event_that_is_used_again() {
    let (fake, device) = fake_device("order");
    for (last, next) in [(0x600, 0x601), (0x601, 0x602)] {
        device
            .order_streams(last as *mut c_void, next as *mut c_void)
            .expect("ordered");
        assert_eq!(fake.get::<usize>(c"fake_recorded"), last);
        assert_eq!(fake.get::<usize>(c"fake_waiting"), next);
    }
    assert_eq!(fake.count(c"cuEventCreate"), 1);
}

#[test]
fn waiting_for_a_stream_ends_with_its_work_or_when_given_up() {
    let (fake, device) = fake_device("synchronize");
    let stream = 0x600 as *mut c_void;
    fake.set(c"fake_not_ready", 100i32);
    device.synchronize_stream(stream, &|| None).expect("done");
    assert_eq!(fake.count(c"cuStreamQuery"), 101);
    fake.set(c"fake_not_ready", 1000i32);
    let polls = std::cell::Cell::new(0);
    let give_up = || {
        polls.set(polls.get() + 1);
        (polls.get() == 5).then(|| Error::remote("rank 1 was lost"))
    };
    assert_refused(
        device.synchronize_stream(stream, &give_up),
        Code::RemoteError,
        &["rank 1 was lost"],
    );
    assert_eq!(fake.count(c"cuStreamQuery"), 106);
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
