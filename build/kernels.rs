//! cuda/kernels.cu, compiled twice: as C++17 for the host device, and by nvcc to the fatbin that the library embeds.
//!
//! The bits must be equal on both devices, so neither compiler may contract a multiplication and an addition.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

const SOURCE: &str = "cuda/kernels.cu";

/// The software HCA's engine, which has no kernel of its own.
const HCA: &str = "cuda/hca/host.cpp";

/// Compute capabilities that get machine code; later chips use the PTX of `PTX_ARCH`.
const ARCHS: &str = "80,90,100";
const PTX_ARCH: &str = "90";

/// The host build: a static library of the same symbols, hidden from the cdylib's exports and free of libstdc++.
pub(crate) fn build_for_host() {
    println!("cargo::rerun-if-changed=cuda");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .warnings(true)
        .flag("-x")
        .flag("c++")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fvisibility=hidden")
        .flag("-ffp-contract=off")
        // Slots are bytes that kernels read as elements.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unused-function")
        .cpp_link_stdlib(None)
        .include("cuda");
    let sanitizers = env::var("CARGO_CFG_SANITIZE").unwrap_or_default();
    for sanitizer in sanitizers.split(',').filter(|name| !name.is_empty()) {
        build.flag(format!("-fsanitize={sanitizer}"));
    }
    build.file(SOURCE).file(HCA).compile("ossicle_host_kernels");
}

/// The fatbin, at OUT_DIR/kernels.fatbin, and for messages what it is: OSSICLE_CUDA_RELEASE, OSSICLE_CUDA_TARGETS.
pub(crate) fn build_for_gpus() {
    for name in ["OSSICLE_NVCC", "OSSICLE_CUDA_ARCHS", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if env::var_os("CARGO_FEATURE_HOST_ONLY").is_some() {
        return;
    }
    let nvcc = find_nvcc();
    println!("cargo::rerun-if-changed={}", nvcc.display());
    println!("cargo::rustc-env=OSSICLE_CUDA_RELEASE={}", release_of(&nvcc));
    let fatbin = PathBuf::from(variable("OUT_DIR")).join("kernels.fatbin");
    let mut command = Command::new(&nvcc);
    command.args(["-std=c++17", "-O3", "-fmad=false", "-I", "cuda", "--threads", "0"]);
    command
        .args(["--compress-mode=size", "--fatbin", SOURCE, "-o"])
        .arg(&fatbin);
    let targets = targets();
    println!("cargo::rustc-env=OSSICLE_CUDA_TARGETS={}", targets.join(" "));
    command.args(targets.iter().map(|target| generate_code(target)));
    run(&mut command);
}

/// What the fatbin has code for. OSSICLE_CUDA_ARCHS ("90" or "80,90") limits a development build to these chips and
/// leaves the PTX out.
fn targets() -> Vec<String> {
    let chosen = env::var("OSSICLE_CUDA_ARCHS").ok().filter(|text| !text.is_empty());
    let archs = chosen.as_deref().unwrap_or(ARCHS).split(',').map(str::trim);
    let mut targets: Vec<String> = archs
        .map(|arch| {
            if arch.is_empty() || !arch.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                fail(&format!(
                    "OSSICLE_CUDA_ARCHS names \"{arch}\"; it takes compute capabilities such as {ARCHS}"
                ));
            }
            format!("sm_{arch}")
        })
        .collect();
    if chosen.is_none() {
        targets.push(format!("compute_{PTX_ARCH}"));
    }
    targets
}

/// "sm_90" becomes -gencode=arch=compute_90,code=sm_90.
fn generate_code(target: &str) -> String {
    let arch = target.split_once('_').map_or(target, |(_, arch)| arch);
    format!("-gencode=arch=compute_{arch},code={target}")
}

/// OSSICLE_NVCC, CUDA_HOME, PATH, then what ci/setup installed under .tools.
fn find_nvcc() -> PathBuf {
    if let Some(path) = env::var_os("OSSICLE_NVCC")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
    {
        if !path.is_file() {
            fail(&format!(
                "OSSICLE_NVCC is {}, which is no file; it takes the path of nvcc",
                path.display()
            ));
        }
        return path;
    }
    let home = env::var_os("CUDA_HOME")
        .filter(|path| !path.is_empty())
        .map(|home| PathBuf::from(home).join("bin"));
    let search = env::var_os("PATH").unwrap_or_default();
    let folders = home
        .into_iter()
        .chain(env::split_paths(&search))
        .chain(installed_by_setup());
    match folders.map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file()) {
        Some(nvcc) => nvcc,
        None => fail(
            "no nvcc in OSSICLE_NVCC, CUDA_HOME/bin, PATH or .tools/cuda: run ci/setup, which installs it, or build \
             with --features host-only, which leaves GPUs out",
        ),
    }
}

/// ci/setup makes a Python environment under .tools/cuda and installs the CUDA wheels there.
fn installed_by_setup() -> Vec<PathBuf> {
    let lib = Path::new(&variable("CARGO_MANIFEST_DIR")).join(".tools/cuda/lib");
    let Ok(entries) = std::fs::read_dir(lib) else {
        return Vec::new();
    };
    let pythons = entries.flatten().map(|entry| entry.path());
    pythons
        .map(|python| python.join("site-packages/nvidia/cu13/bin"))
        .collect()
}

/// "13.0" from nvcc's "Cuda compilation tools, release 13.0, V13.0.88"; messages about a driver that is too old use it.
fn release_of(nvcc: &Path) -> String {
    let text = run(Command::new(nvcc).arg("--version"));
    let release = text.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    match release {
        Some(release) => release.trim().to_owned(),
        None => fail(&format!(
            "{} --version names no release: {}",
            nvcc.display(),
            text.trim()
        )),
    }
}

/// Runs a command to its end and gives its output; a failure ends the build with what the command said.
fn run(command: &mut Command) -> String {
    match command.output() {
        Err(error) => fail(&format!(
            "{} does not start: {error}",
            command.get_program().to_string_lossy()
        )),
        Ok(output) if output.status.success() => {
            for line in String::from_utf8_lossy(&output.stderr)
                .lines()
                .filter(|line| !line.trim().is_empty())
            {
                println!("cargo::warning={line}");
            }
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
        Ok(output) => {
            let said = [&output.stdout[..], &output.stderr[..]].concat();
            fail(&format!(
                "{command:?} failed, {}:\n{}",
                output.status,
                String::from_utf8_lossy(&said)
            ))
        }
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set: this is a build script of cargo")))
}

fn fail(message: &str) -> ! {
    for line in message.lines() {
        println!("cargo::error={line}");
    }
    exit(1)
}
