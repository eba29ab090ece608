//! Builds and opens the stand-in for `libcuda.so.1` (`fake_cuda.c`) that unit tests run the CUDA code against.

use super::cuda::{Driver, Unusable};
use super::Library;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::Path;
use std::process::Command;

/// One stand-in with state of its own.
pub(crate) struct Fake {
    library: Library,
    path: CString,
}

impl Fake {
    /// `test` names the file, so that no two tests share one; `defines` are `FAKE_...=value`.
    pub(crate) fn build(test: &str, defines: &[&str]) -> Fake {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sys/fake_cuda.c");
        let output = Path::new(env!("OUT_DIR")).join(format!("fake_cuda_{test}_{}.so", std::process::id()));
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O0", "-Wall", "-Wextra", "-Werror"])
            .args(defines.iter().map(|define| format!("-D{define}")))
            .arg(source)
            .arg("-o")
            .arg(&output)
            .status();
        assert!(compiled.expect("cc starts").success());
        let path = CString::new(output.to_str().expect("UTF-8")).expect("no NUL");
        let library = Library::open(&path).expect("the stand-in opens");
        std::fs::remove_file(&output).expect("the stand-in's file");
        Fake { library, path }
    }

    /// Its driver, as the library would open it.
    pub(crate) fn open(&self) -> Result<Driver, Unusable> {
        // The file is gone; the linker knows an open library by its name.
        Driver::open(&self.path)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        Box::leak(Box::new(self.open().expect("a usable driver")))
    }

    fn address(&self, name: &CStr) -> *mut c_void {
        self.library.symbol(name).expect("a name of the stand-in").as_ptr()
    }

    /// How often a function was called.
    pub(crate) fn count(&self, function: &CStr) -> i32 {
        // SAFETY: the stand-in's function of this name and signature.
        let count: extern "C" fn(*const c_char) -> c_int = unsafe { std::mem::transmute(self.address(c"fake_count")) };
        count(function.as_ptr())
    }

    /// Calls a `int f(void)` of the stand-in.
    pub(crate) fn ask(&self, function: &CStr) -> i32 {
        // SAFETY: the stand-in's functions that tests name have this signature.
        let ask: extern "C" fn() -> c_int = unsafe { std::mem::transmute(self.address(function)) };
        ask()
    }

    /// Reads a variable of the stand-in.
    pub(crate) fn get<T: Copy>(&self, variable: &CStr) -> T {
        // SAFETY: the stand-in's variable of this name and type; a test's own, used by one thread.
        unsafe { *self.address(variable).cast() }
    }

    pub(crate) fn set<T: Copy>(&self, variable: &CStr, value: T) {
        // SAFETY: as above.
        unsafe { *self.address(variable).cast() = value }
    }

    /// Makes the stand-in know a range of memory.
    pub(crate) fn range(&self, range: &FakeRange) {
        type Declare = extern "C" fn(u64, u64, c_int, c_int, c_int, c_int, u64);
        // SAFETY: the stand-in's function of this name and signature.
        let declare: Declare = unsafe { std::mem::transmute(self.address(c"fake_range")) };
        let FakeRange {
            start,
            bytes,
            memory_type,
            ordinal,
            managed,
            whole,
            seen_as,
        } = *range;
        declare(
            start,
            bytes,
            memory_type,
            ordinal,
            managed.into(),
            whole.into(),
            seen_as,
        );
    }
}

#[derive(Clone, Copy)]
pub(crate) struct FakeRange {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// 1 host, 2 device.
    pub(crate) memory_type: c_int,
    pub(crate) ordinal: c_int,
    pub(crate) managed: bool,
    pub(crate) whole: bool,
    pub(crate) seen_as: u64,
}
