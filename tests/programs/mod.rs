//! Building and running C clients: compiled against NVIDIA's header, linked to this library under its proper name.

// Each test crate uses its own part of this module.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A client that hangs is killed after this, and its test fails.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A compiled client and the folder that holds libnccl.so.2.
pub struct Program {
    path: PathBuf,
    library_folder: PathBuf,
}

impl Program {
    /// Runs on the host device; no variable of the caller's NCCL set-up gets through.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("NCCL_") || name.starts_with("OSSICLE_") {
                command.env_remove(&*name);
            }
        }
        command
            .env("LD_LIBRARY_PATH", &self.library_folder)
            .env("OSSICLE_DEVICE", "host");
        command
    }
}

/// A file name in the test's own folder that nothing else uses.
pub fn scratch(name: &str) -> PathBuf {
    static USED: AtomicU32 = AtomicU32::new(0);
    let number = USED.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}-{name}", std::process::id()))
}

/// The cdylib that cargo left beside this test program, behind a link with the name that clients ask for.
pub fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test knows its own path");
    let library = test.parent().expect("a folder").join("libnccl.so");
    assert!(
        library.exists(),
        "{} is missing: cargo test builds it",
        library.display()
    );
    let folder = scratch("lib");
    std::fs::create_dir_all(&folder).expect("a folder for the link");
    std::os::unix::fs::symlink(&library, folder.join("libnccl.so.2")).expect("a link");
    folder
}

/// The include folders of NVIDIA's NCCL header and of the CUDA headers, which ci/setup installs.
pub fn nvidia_includes() -> Vec<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools");
    let cuda = std::env::var_os("OSSICLE_CUDA_INCLUDE").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("include"));
        let pythons = std::fs::read_dir(tools.join("cuda/lib"))
            .into_iter()
            .flatten()
            .flatten();
        let wheels = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/include"));
        home.into_iter()
            .chain(wheels)
            .find(|folder| folder.join("cuda_runtime.h").exists())
    });
    let nccl = std::env::var_os("OSSICLE_NVIDIA_INCLUDE")
        .map_or_else(|| tools.join("nccl-2.28.9/nvidia/nccl/include"), PathBuf::from);
    assert!(
        nccl.join("nccl.h").exists(),
        "no NVIDIA nccl.h in {}: run ci/setup",
        nccl.display()
    );
    vec![
        nccl,
        cuda.expect("no cuda_runtime.h in CUDA_HOME or .tools/cuda: run ci/setup"),
    ]
}

/// Compiles tests/c/<name>.c against NVIDIA's header.
pub fn compile(name: &str) -> Program {
    let library_folder = library_folder();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let path = scratch(name);
    let mut command = Command::new("gcc");
    command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    for folder in nvidia_includes() {
        command.arg("-isystem").arg(folder);
    }
    command
        .arg(&source)
        .arg("-o")
        .arg(&path)
        .arg(library_folder.join("libnccl.so.2"));
    let output = command.output().expect("gcc is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Program { path, library_folder }
}

/// Starts a client with its output captured.
pub fn spawn(command: &mut Command) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the client starts")
}

/// Waits for a client; one that outlasts PATIENCE is killed, which its caller sees as a failure.
pub fn finish(mut child: Child) -> Output {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE && child.try_wait().expect("the client can be waited for").is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    if child.try_wait().ok().flatten().is_none() {
        eprintln!("the client hangs: killed after {PATIENCE:?}");
        let _ = child.kill();
    }
    child.wait_with_output().expect("the client's output")
}

pub fn run(command: &mut Command) -> Output {
    finish(spawn(command))
}
