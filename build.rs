//! What a build makes before the crate: the kernels of cuda/ for the host and for GPUs.

#[path = "build/kernels.rs"]
mod kernels;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    kernels::build_for_host();
    kernels::build_for_gpus();
    // The name that programs built against NVIDIA's library ask for, and no unloading: the library's threads, its
    // primary contexts and its exit handlers outlive a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
