//! libibverbs, opened at run time: which RDMA devices there are. The functions of the network path join it with that
//! path.

use super::Library;
use crate::error::{Error, Result};
use rdma_sys::ibv_device;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::NonNull;

type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
type GetDeviceName = unsafe extern "C" fn(*mut ibv_device) -> *const c_char;
type FreeDeviceList = unsafe extern "C" fn(*mut *mut ibv_device);

/// The names of the RDMA devices of this machine; an error says why there can be none.
pub fn device_names() -> Result<Vec<String>> {
    let library = Library::open(c"libibverbs.so.1").map_err(Error::system)?;
    let symbol = |name: &'static CStr| -> Result<NonNull<c_void>> {
        let missing = || Error::system(format!("libibverbs.so.1 has no {}", name.to_string_lossy()));
        library.symbol(name).ok_or_else(missing)
    };
    let (list, name, free) = (
        symbol(c"ibv_get_device_list")?,
        symbol(c"ibv_get_device_name")?,
        symbol(c"ibv_free_device_list")?,
    );
    // SAFETY: these are the functions of these names, whose C signatures verbs.h declares so.
    let (list, name, free) = unsafe {
        (
            std::mem::transmute::<*mut c_void, GetDeviceList>(list.as_ptr()),
            std::mem::transmute::<*mut c_void, GetDeviceName>(name.as_ptr()),
            std::mem::transmute::<*mut c_void, FreeDeviceList>(free.as_ptr()),
        )
    };
    let mut count = 0;
    // SAFETY: `count` may be written.
    let devices = unsafe { list(&mut count) };
    if devices.is_null() {
        return Err(Error::system(format!(
            "ibv_get_device_list: {}",
            std::io::Error::last_os_error()
        )));
    }
    let names = (0..usize::try_from(count).unwrap_or(0)).map(|i| {
        // SAFETY: the list has `count` live devices until it is freed, and a device's name stands as long; it is copied.
        unsafe { CStr::from_ptr(name(*devices.add(i))) }
            .to_string_lossy()
            .into_owned()
    });
    let names = names.collect();
    // SAFETY: the list came from ibv_get_device_list and is not used any more.
    unsafe { free(devices) };
    Ok(names)
}
