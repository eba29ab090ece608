//! Build steps, each in a file of its own under build/.

#[path = "build/abi.rs"]
mod abi;

fn main() {
    abi::build();
}
