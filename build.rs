//! What a build makes before the crate: the C entry points and their header, the kernels for the host and for GPUs.

#[path = "build/abi.rs"]
mod abi;
#[path = "build/kernels.rs"]
mod kernels;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    abi::build();
    kernels::build_for_host();
    kernels::build_for_gpus();
}
