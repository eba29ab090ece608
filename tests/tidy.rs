//! House rules that a program can check: headers, SAFETY texts, lengths, who may import what, and that the page of
//! environment variables lists exactly those that the code reads.

#[path = "tidy/source.rs"]
mod source;

use source::{calls_macro, Source};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 600;
/// "About 70": a few lines of grace, so that a list of arguments may stay readable.
const FUNCTION_LINES_MAX: usize = 75;
/// How far above an unsafe block its SAFETY text may begin: the text and the statement around the block.
const SAFETY_LINES: usize = 12;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under `folder` with one of the endings, in order.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.map(|entry| entry.expect("a readable folder").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if endings
                .iter()
                .any(|ending| path.extension().is_some_and(|found| found == *ending))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn sources(folders: &[&str]) -> Vec<Source> {
    let paths = folders.iter().flat_map(|folder| files(folder, &["rs"]));
    paths.map(|path| Source::read(root(), &path)).collect()
}

/// Fails with all complaints at once.
fn none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn every_module_says_what_it_is_for() {
    let sources = sources(&["src", "tests", "build"]);
    assert!(sources.len() > 20, "only {} sources found", sources.len());
    none(
        sources
            .iter()
            .filter(|source| !source.text.starts_with("//! "))
            .map(|source| source.path.clone())
            .collect(),
    );
}

#[test]
fn every_unsafe_block_argues() {
    let mut complaints = Vec::new();
    for source in sources(&["src"]) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (number, code) in source.code.lines().enumerate() {
            let begins = ["unsafe {", "unsafe impl", "unsafe extern"]
                .iter()
                .any(|form| code.contains(form));
            // A function type is no block.
            if !begins || code.contains("unsafe extern \"") && code.contains("fn(") {
                continue;
            }
            let near = &lines[number.saturating_sub(SAFETY_LINES)..=number];
            if !near.iter().any(|line| line.contains("SAFETY:")) {
                complaints.push(format!("{}:{}: unsafe without a SAFETY text", source.path, number + 1));
            }
        }
    }
    none(complaints);
}

#[test]
fn files_and_functions_are_short() {
    let mut complaints = Vec::new();
    let device_code = files("cuda", &["h", "cu"])
        .into_iter()
        .chain(files("tests/order", &["h", "cpp"]));
    for path in device_code.chain(files("src", &["c"])) {
        let lines = fs::read_to_string(&path).expect("a text").lines().count();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{}: {lines} lines", path.display()));
        }
    }
    for source in sources(&["src", "tests", "build"]) {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{}: {lines} lines", source.path));
        }
        for function in source.functions() {
            if function.lines > FUNCTION_LINES_MAX {
                let (path, line, name, lines) = (&source.path, function.line, function.name, function.lines);
                complaints.push(format!("{path}:{line}: fn {name} has {lines} lines"));
            }
        }
    }
    none(complaints);
}

/// Modules that only compute: all of plan/, every wire format, and whatever says in its header that it does no I/O.
/// Addresses of std::net are data; sockets are not.
#[test]
fn what_is_pure_imports_no_system() {
    const SYSTEM: [&str; 16] = [
        "TcpListener",
        "TcpStream",
        "UdpSocket",
        "UnixStream",
        "std::thread",
        "std::fs",
        "std::process",
        "std::env",
        "libc::",
        "rustix::",
        "socket2::",
        "crate::sys",
        "crate::device::cuda",
        "crate::environment",
        "Instant::now",
        "SystemTime::now",
    ];
    let mut complaints = Vec::new();
    let mut planners = 0;
    for source in sources(&["src"]) {
        let header: String = source.text.lines().take_while(|line| line.starts_with("//!")).collect();
        let planner = source.path.starts_with("src/plan/");
        let pure = planner
            || source.path.ends_with("/wire.rs")
            || header.contains("No I/O")
            || header.contains("Nothing here does I/O");
        planners += usize::from(planner);
        for word in SYSTEM.iter().filter(|word| pure && source.production().contains(*word)) {
            complaints.push(format!("{}: says that it does no I/O, yet names {word}", source.path));
        }
    }
    assert!(planners > 0, "src/plan/ is gone");
    none(complaints);
}

#[test]
fn nothing_is_left_open_or_printed() {
    let open = ["todo!", "unimplemented!", "dbg!"];
    let printed = ["println!", "eprintln!", "print!", "eprint!"];
    let mut complaints = Vec::new();
    for source in sources(&["src", "tests", "build"]) {
        let marked = ["TODO", "FIXME", "XXX", "HACK"]
            .iter()
            .filter(|mark| source.has_comment_word(mark));
        let left = open.iter().filter(|name| calls_macro(&source.code, name));
        // The program prints, and so do tests; the library logs.
        let library = source.path.starts_with("src/") && !source.path.starts_with("src/bin/");
        let printing = printed
            .iter()
            .filter(|name| library && calls_macro(source.production(), name));
        let called = left.chain(printing);
        complaints.extend(marked.chain(called).map(|word| format!("{}: {word}", source.path)));
    }
    none(complaints);
}

/// What may be absent is opened at run time; naming it to the linker would make it a condition for loading.
#[test]
fn no_library_of_the_hardware_is_linked() {
    let mut complaints = Vec::new();
    for source in sources(&["src", "build"])
        .into_iter()
        .chain([Source::read(root(), &root().join("build.rs"))])
    {
        let linked =
            source.code.contains("#[link(") || source.literals.iter().any(|(_, text)| text.contains("link-lib"));
        if linked {
            complaints.push(format!("{}: links a library", source.path));
        }
    }
    none(complaints);
}

/// A whole literal of this form is the name of a variable.
fn is_variable(text: &str) -> bool {
    let named = ["NCCL_", "OSSICLE_"]
        .iter()
        .any(|prefix| text.len() > prefix.len() && text.starts_with(prefix));
    named
        && text
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

/// The names in the first column of the page's tables, without those under "without effect".
fn documented() -> BTreeSet<String> {
    let page = fs::read_to_string(root().join("docs/environment.md")).expect("docs/environment.md");
    let mut names = BTreeSet::new();
    let mut counts = true;
    for line in page.lines() {
        if line.starts_with('#') {
            counts = !line.contains("without effect");
        }
        let cell = line
            .strip_prefix("| `")
            .filter(|_| counts)
            .and_then(|rest| rest.split('`').next());
        names.extend(cell.filter(|name| is_variable(name)).map(str::to_owned));
    }
    names
}

#[test]
fn the_page_of_variables_lists_those_that_are_read() {
    let mut read = BTreeSet::new();
    for source in sources(&["src", "build"]) {
        // What the build tells the crate (env!) is no variable of the user's.
        let literals = source
            .production_literals()
            .filter(|(before, text)| !before.ends_with("env!(") && is_variable(text));
        // In the build, NCCL_ names are macros of the header.
        let library = source.path.starts_with("src/");
        read.extend(
            literals
                .map(|(_, text)| text)
                .filter(|text| library || text.starts_with("OSSICLE_")),
        );
    }
    let documented = documented();
    let missing = read
        .difference(&documented)
        .map(|name| format!("{name} is read and not in docs/environment.md"));
    let stale = documented
        .difference(&read)
        .map(|name| format!("{name} is in docs/environment.md and not read"));
    none(missing.chain(stale).collect());
}
