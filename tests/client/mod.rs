//! C and C++ clients of the library under test: finding headers and the library, compiling, running.

// Every test that includes this module uses a part of it.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A client that hangs is killed after this, and its test fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// The cdylib that cargo built beside this test.
pub(crate) fn library() -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join("libnccl.so");
    assert!(
        path.exists(),
        "{} is missing; cargo test builds it beside its tests",
        path.display()
    );
    path
}

/// An empty folder of this test.
pub(crate) fn scratch(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Where a client finds nccl.h.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Header {
    /// include/nccl.h of this repository, without CUDA's headers.
    Ours,
    /// The same beside CUDA's headers.
    OursWithCuda,
    /// NVIDIA's of 2.28.9.
    Nvidia,
}

impl Header {
    fn flags(self) -> Vec<String> {
        let system = |path: PathBuf| ["-isystem".to_string(), path.display().to_string()];
        let ours = format!("-I{}", root().join("include").display());
        match self {
            Header::Ours => vec![ours],
            Header::OursWithCuda => [vec![ours], system(cuda_include()).to_vec()].concat(),
            Header::Nvidia => [system(nvidia_include()), system(cuda_include())].concat(),
        }
    }
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder with NVIDIA's nccl.h 2.28.9.
pub(crate) fn nvidia_include() -> PathBuf {
    let installed = root().join(".tools/nccl-2.28.9/nvidia/nccl/include");
    found("OSSICLE_NVIDIA_INCLUDE", "nccl.h", vec![installed])
}

/// The folder with cuda_runtime.h.
pub(crate) fn cuda_include() -> PathBuf {
    let pythons = fs::read_dir(root().join(".tools/cuda/lib"))
        .into_iter()
        .flatten()
        .flatten();
    let installed = pythons
        .map(|python| python.path().join("site-packages/nvidia/cu13/include"))
        .collect();
    found("OSSICLE_CUDA_INCLUDE", "cuda_runtime.h", installed)
}

fn found(variable: &str, file: &str, installed: Vec<PathBuf>) -> PathBuf {
    let places = std::env::var_os(variable).map_or(installed, |path| vec![PathBuf::from(path)]);
    let place = places.iter().find(|place| place.join(file).exists()).cloned();
    place.unwrap_or_else(|| panic!("no {file} in {places:?}: run ci/setup, or set {variable}"))
}

/// Compiles `source` as C99 or C++ into an object or a program linked with the library under the name libnccl.so.2.
pub(crate) fn compile(compiler: &str, header: Header, source: &Path, folder: &Path) -> PathBuf {
    let link = folder.join("libnccl.so.2");
    if !link.exists() {
        std::os::unix::fs::symlink(library(), &link).unwrap();
    }
    let program = folder.join(format!("{compiler}-{}", source.file_stem().unwrap().to_str().unwrap()));
    let language: &[&str] = match compiler {
        "gcc" => &["-std=c99", "-pedantic"],
        "g++" => &["-x", "c++"],
        _ => panic!("{compiler}?"),
    };
    let mut command = Command::new(compiler);
    command
        .args(["-g", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"])
        .args(language)
        .args(header.flags())
        .arg(source);
    // "none" ends the effect of -x, which would read the library as source.
    command.args(["-x", "none", "-l:libnccl.so.2", "-ldl", "-pthread"]);
    command
        .arg(format!("-L{}", folder.display()))
        .arg(format!("-Wl,-rpath,{}", folder.display()));
    succeed(command.arg("-o").arg(&program));
    program
}

/// A client on the host device, free of the caller's own NCCL settings.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("NCCL_") || text.starts_with("OSSICLE_") {
            command.env_remove(&name);
        }
    }
    command.env("OSSICLE_DEVICE", "host");
    command
}

/// Starts a client whose output is kept.
pub(crate) fn spawn(command: &mut Command) -> Child {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    child.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Waits for a client that prints little; one that outlasts PATIENCE is killed, which fails its test.
pub(crate) fn finish(mut child: Child) -> Output {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Has no effect on one that has ended.
    let _ = child.kill();
    child.wait_with_output().unwrap()
}

/// Runs a client; its output must say that all was well.
pub(crate) fn run(program: &Path, arguments: &[&str]) -> String {
    let mut command = command(program);
    let output = finish(spawn(command.args(arguments)));
    String::from_utf8(checked(&command, output).stdout).unwrap()
}

/// Runs a tool of the system and returns what it prints.
pub(crate) fn tool<S: AsRef<OsStr>>(name: &str, arguments: &[S]) -> String {
    String::from_utf8(succeed(Command::new(name).args(arguments)).stdout).unwrap()
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    checked(command, output)
}

/// The output of a command that must have succeeded.
pub(crate) fn checked(command: &Command, output: Output) -> Output {
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
