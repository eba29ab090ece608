//! The C interface: exported names, ELF facts, generated files, layouts and prototypes against NVIDIA's header, and C
//! clients that pass NULL and junk to everything.

mod client;

use client::{compile, library, root, run, scratch, tool, Header};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One row of src/abi/exports.table.
struct Export {
    name: &'static str,
    result: &'static str,
    /// Types of the parameters.
    parameters: Vec<&'static str>,
    refused: bool,
}

fn table() -> Vec<Export> {
    let rows = include_str!("../src/abi/exports.table")
        .lines()
        .filter(|line| line.starts_with("nccl"));
    rows.map(|row| {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let parameters = columns[3]
            .split(", ")
            .filter_map(|parameter| Some(parameter.split_once(": ")?.1));
        Export {
            name: columns[0],
            result: columns[2],
            parameters: parameters.collect(),
            refused: columns[4].starts_with("refused"),
        }
    })
    .collect()
}

/// The names that NCCL 2.32.3 exports.
fn expected_names() -> BTreeSet<String> {
    let lines = include_str!("data/nccl-symbols.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split('\t').next().unwrap().to_string()).collect()
}

#[test]
fn the_table_lists_ncclx_and_pncclx_of_every_name() {
    let mut names = BTreeSet::new();
    for export in table() {
        assert!(names.insert(export.name.to_string()));
        if export.name != "ncclResetDebugInitInternal" {
            names.insert(format!("p{}", export.name));
        }
    }
    assert_eq!(names, expected_names());
    assert_eq!(names.len(), 193);
}

#[test]
fn the_library_exports_these_names_strongly_and_nothing_else() {
    let listing = tool("nm", &["-D", "--defined-only", library().to_str().unwrap()]);
    let mut names = BTreeSet::new();
    for line in listing.lines() {
        let columns: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(columns[1], "T", "{line}");
        names.insert(columns[2].to_string());
    }
    assert_eq!(names, expected_names());
}

/// A profiler that puts its own ncclX in front calls pncclX: were that to come back through ncclX, it would never end.
#[test]
fn the_library_does_not_call_itself_through_names_that_can_be_interposed() {
    let listing = tool("readelf", &["-rW", library().to_str().unwrap()]);
    assert!(listing.contains("dl_iterate_phdr"), "no relocations in {listing}");
    let own = listing
        .lines()
        .filter(|line| line.split_whitespace().any(|word| expected_names().contains(word)));
    assert_eq!(own.collect::<Vec<&str>>(), Vec::<&str>::new());
}

#[test]
fn the_library_has_nccls_soname_and_needs_only_the_system() {
    let listing = tool("readelf", &["-dW", library().to_str().unwrap()]);
    assert!(listing.contains("Library soname: [libnccl.so.2]"), "{listing}");
    assert!(
        listing
            .lines()
            .any(|line| line.contains("FLAGS_1") && line.contains("NODELETE")),
        "{listing}"
    );
    let needed = listing.lines().filter(|line| line.contains("(NEEDED)"));
    for line in needed {
        let name = line.split(['[', ']']).nth(1).unwrap();
        let system = ["libc.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux-x86-64.so.2"];
        assert!(system.contains(&name), "the library needs {name}");
    }
    // A large static TLS block makes a late dlopen fail.
    let segments = tool("readelf", &["-lW", library().to_str().unwrap()]);
    let tls = segments
        .lines()
        .find(|line| line.trim_start().starts_with("TLS"))
        .expect("std has thread locals");
    let bytes = u64::from_str_radix(tls.split_whitespace().nth(5).unwrap().trim_start_matches("0x"), 16).unwrap();
    assert!(bytes <= 512, "{bytes} bytes of thread-local storage");
}

/// Compares a checked-in file with what the build made; OSSICLE_BLESS=1 rewrites it.
fn is_current(file: &str, generated: &str) {
    let (path, wanted) = (root().join(file), std::fs::read_to_string(generated).unwrap());
    if std::env::var_os("OSSICLE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{file} is out of date; OSSICLE_BLESS=1 cargo test --test abi refreshes it"
    );
}

#[test]
fn the_checked_in_header_is_current() {
    is_current("include/nccl.h", env!("GENERATED_HEADER"));
}

#[test]
fn the_support_matrix_is_current() {
    is_current("docs/support.md", env!("GENERATED_SUPPORT"));
}

fn source(name: &str) -> PathBuf {
    root().join("tests/c").join(name)
}

#[test]
fn layouts_and_values_equal_those_of_nvidias_header() {
    let folder = scratch("abi-layouts");
    let text = |compiler, header| run(&compile(compiler, header, &source("layouts.c"), &folder), &[]);
    let nvidia = text("gcc", Header::Nvidia);
    for compiler in ["gcc", "g++"] {
        for header in [Header::Ours, Header::OursWithCuda, Header::Nvidia] {
            assert_eq!(text(compiler, header), nvidia, "{compiler}");
        }
    }
    let value = |name: &str| -> i32 {
        let line = nvidia
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
    };
    numbers_of_the_library_equal(value);
}

/// What Rust calls these values has the header's numbers.
fn numbers_of_the_library_equal(value: impl Fn(&str) -> i32) {
    use nccl::error::Code;
    use nccl::request::{DataType, ReduceOp};
    for code in 1..value("ncclNumResults") {
        let code = Code::from_raw(code).unwrap();
        assert_eq!(value(&format!("nccl{code:?}")), code as i32);
    }
    for datatype in DataType::ALL {
        assert_eq!(value(&format!("nccl{datatype:?}")), datatype as i32);
    }
    for op in ReduceOp::ALL {
        assert_eq!(value(&format!("nccl{op:?}")), op as i32);
    }
    assert_eq!(DataType::ALL.len() as i32, value("ncclNumTypes"));
    assert_eq!(ReduceOp::ALL.len() as i32, value("ncclNumOps"));
}

/// Redeclares NVIDIA's functions as our header declares them: a C compiler accepts only the same types twice.
#[test]
fn prototypes_equal_those_of_nvidias_header() {
    let nvidia = std::fs::read_to_string(client::nvidia_include().join("nccl.h")).unwrap();
    let ours = std::fs::read_to_string(env!("GENERATED_HEADER")).unwrap();
    let mut text = String::from("#include <nccl.h>\n");
    let mut names = Vec::new();
    for export in table() {
        for name in [export.name.to_string(), format!("p{}", export.name)] {
            let call = format!("{name}(");
            if let Some(at) = find_word(&ours, &call).filter(|_| find_word(&nvidia, &call).is_some()) {
                let start = ours[..at].rfind(['\n']).unwrap();
                let end = at + ours[at..].find(';').unwrap();
                // NVIDIA's id is a struct without a tag.
                text += &ours[start..=end].replace("struct ncclUniqueId", "ncclUniqueId");
                names.push(name);
            }
        }
    }
    // nccl.h 2.28.9 declares 41 functions and their twins.
    assert_eq!(names.len(), 2 * 41, "{names:?}");
    text += "\nint main(void) { return 0; }\n";
    let folder = scratch("abi-prototypes");
    let file = folder.join("prototypes.c");
    std::fs::write(&file, text).unwrap();
    compile("gcc", Header::Nvidia, &file, &folder);
}

/// Where `word` stands without a letter in front.
fn find_word(text: &str, word: &str) -> Option<usize> {
    text.match_indices(word)
        .map(|(at, _)| at)
        .find(|at| !text[..*at].ends_with(char::is_alphanumeric))
}

#[test]
fn null_and_junk_in_every_argument_of_what_is_built() {
    let file = source("null_arguments.c");
    let text = std::fs::read_to_string(&file).unwrap();
    for export in table().iter().filter(|export| !export.refused) {
        let covered = find_word(&text, export.name).is_some() || export.name == "ncclResetDebugInitInternal";
        assert!(
            covered,
            "{} is built, but tests/c/null_arguments.c does not call it",
            export.name
        );
    }
    let folder = scratch("abi-null");
    run(&compile("gcc", Header::Nvidia, &file, &folder), &[]);
    run(&compile("g++", Header::Ours, &file, &folder), &[]);
}

/// A client that calls every refused function with zeros, with ones, and with ones in one argument at a time.
fn refused_client(exports: &[&Export]) -> String {
    let mut text = String::from(
        "#include <nccl.h>\n#include <stdio.h>\n#include <string.h>\nstatic int failures;\n\
         static void check(const char *name, int right) {\n  char sentence[256];\n  \
         sprintf(sentence, \"%s is not built yet in this version of Ossicle; see docs/support.md\", name);\n  \
         if (right && strcmp(ncclGetLastError(NULL), sentence) == 0) return;\n  \
         printf(\"%s: last error %s\\n\", name, ncclGetLastError(NULL));\n  failures++;\n}\nint main(void) {\n",
    );
    for export in exports {
        let count = export.parameters.len();
        let ones_at = |index: usize| (0..count).map(|i| i == index).collect::<Vec<bool>>();
        let patterns = [vec![false; count], vec![true; count]]
            .into_iter()
            .chain((0..count).map(ones_at));
        for pattern in patterns {
            let arguments: Vec<String> = export
                .parameters
                .iter()
                .zip(pattern)
                .map(|(t, ones)| argument(t, ones))
                .collect();
            for twin in ["", "p"] {
                text += &refused_call(export, &format!("{twin}{}({})", export.name, arguments.join(", ")));
            }
        }
    }
    text + "  printf(\"%d failures\\n\", failures);\n  return failures != 0;\n}\n"
}

fn argument(kind: &str, ones: bool) -> String {
    let bits = if ones { "-1" } else { "0" };
    match kind {
        "ncclTeam_t" => format!("(ncclTeam_t){{{bits}, {bits}, {bits}}}"),
        "ncclMultimemHandle_t" => format!("(ncclMultimemHandle_t){{(void *){bits}L}}"),
        "ncclDataType_t" | "ncclRedOp_t" | "ncclScalarResidence_t" | "ncclCommMemStat_t" => format!("({kind}){bits}"),
        "c_int" | "c_uint" | "usize" => bits.to_string(),
        pointer if pointer.starts_with('*') || pointer.ends_with("_t") => format!("(void *){bits}L"),
        other => panic!("how is a {other} made?"),
    }
}

fn refused_call(export: &Export, call: &str) -> String {
    let name = export.name;
    match export.result {
        "ncclResult_t" => format!("  check(\"{name}\", {call} == ncclInvalidUsage);\n"),
        "c_int" if name == "ncclLLA2ACalcSlots" => format!("  check(\"{name}\", {call} == 0);\n"),
        "c_int" => format!("  check(\"{name}\", {call} == -1);\n"),
        "ncclTeam_t" => format!(
            "  {{ ncclTeam_t team = {call}; check(\"{name}\", !team.nRanks && !team.rank && !team.stride); }}\n"
        ),
        "()" => format!("  {call};\n  check(\"{name}\", 1);\n"),
        other => panic!("what does a refused function that returns {other} give?"),
    }
}

#[test]
fn null_and_junk_in_every_argument_of_what_is_refused() {
    let nvidia = std::fs::read_to_string(client::nvidia_include().join("nccl.h")).unwrap();
    let table = table();
    let refused = table.iter().filter(|export| export.refused);
    let (known, later): (Vec<&Export>, Vec<&Export>) =
        refused.partition(|export| find_word(&nvidia, &format!("{}(", export.name)).is_some());
    let folder = scratch("abi-refused");
    for (name, exports, header) in [("known.c", known, Header::Nvidia), ("later.c", later, Header::Ours)] {
        assert!(exports.len() >= 10, "{name}: {}", exports.len());
        let file = folder.join(name);
        std::fs::write(&file, refused_client(&exports)).unwrap();
        assert_eq!(run(&compile("gcc", header, &file, &folder), &[]), "0 failures\n");
    }
}

#[test]
fn a_communicator_of_one_rank_from_an_id_at_an_odd_address() {
    let folder = scratch("abi-one-rank");
    for (compiler, header) in [("gcc", Header::Nvidia), ("g++", Header::Ours)] {
        let program = compile(compiler, header, &source("one_rank.c"), &folder);
        assert_eq!(run(&program, &[]), "one rank: all right\n", "{compiler}");
    }
}

#[test]
fn loading_and_unloading_a_hundred_times() {
    let folder = scratch("abi-loader");
    let program = compile("gcc", Header::Ours, &source("loader.c"), Path::new(&folder));
    assert_eq!(
        run(&program, &[folder.join("libnccl.so.2").to_str().unwrap()]),
        "100 rounds\n"
    );
}
