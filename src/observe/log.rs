//! The log: `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE`.
//!
//! A line is `host:pid:tid [device] NCCL LEVEL text`, as scripts expect it of NCCL, written with one `write` call so
//! that lines of several processes in one file stay whole. The sink is stderr (a program whose stdout is data must not
//! be spoiled); `NCCL_DEBUG_FILE` names another. A sink that fails is dropped after one line on stderr: logging never
//! changes a result and never blocks a collective, so a FIFO that nobody reads is opened non-blocking, and SIGPIPE of
//! one whose reader has gone does not reach the program. Every write appends, for several processes may share a file.

use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// `NCCL_DEBUG` levels in rising verbosity; ABORT is NCCL's name for a level between INFO and TRACE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    None,
    Version,
    Warn,
    Info,
    Abort,
    Trace,
}

/// `NCCL_DEBUG_SUBSYS` names, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Subsystem {
    Init = 1,
    Coll = 2,
    P2p = 4,
    Shm = 8,
    Net = 16,
    Graph = 32,
    Tuning = 64,
    Env = 128,
    Alloc = 256,
    Call = 512,
    Proxy = 1024,
    Nvls = 2048,
    Bootstrap = 4096,
    Reg = 8192,
    Profile = 16384,
    Ras = 32768,
}

const SUBSYSTEMS: [(&str, Subsystem); 16] = [
    ("INIT", Subsystem::Init),
    ("COLL", Subsystem::Coll),
    ("P2P", Subsystem::P2p),
    ("SHM", Subsystem::Shm),
    ("NET", Subsystem::Net),
    ("GRAPH", Subsystem::Graph),
    ("TUNING", Subsystem::Tuning),
    ("ENV", Subsystem::Env),
    ("ALLOC", Subsystem::Alloc),
    ("CALL", Subsystem::Call),
    ("PROXY", Subsystem::Proxy),
    ("NVLS", Subsystem::Nvls),
    ("BOOTSTRAP", Subsystem::Bootstrap),
    ("REG", Subsystem::Reg),
    ("PROFILE", Subsystem::Profile),
    ("RAS", Subsystem::Ras),
];
const DEFAULT_SUBSYSTEMS: u32 = Subsystem::Init as u32 | Subsystem::Bootstrap as u32 | Subsystem::Env as u32;

struct Settings {
    level: Level,
    subsystems: u32,
    sink: Mutex<Option<File>>,
    host: String,
}

static SETTINGS: Lazy<Settings> = Lazy::new(Settings::from_environment);

impl Settings {
    fn from_environment() -> Settings {
        let text = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let level = parse_level(&text("NCCL_DEBUG").unwrap_or_default());
        let host = crate::topology::host::short_name();
        let path = text("NCCL_DEBUG_FILE").filter(|path| level > Level::Version && !path.is_empty());
        Settings {
            level,
            subsystems: parse_subsystems(text("NCCL_DEBUG_SUBSYS").as_deref()),
            sink: Mutex::new(path.and_then(|path| open_sink(&expand(&path, &host, std::process::id())))),
            host,
        }
    }
}

fn parse_level(text: &str) -> Level {
    match text.to_ascii_uppercase().as_str() {
        "VERSION" => Level::Version,
        "WARN" => Level::Warn,
        "INFO" => Level::Info,
        "ABORT" => Level::Abort,
        "TRACE" => Level::Trace,
        _ => Level::None,
    }
}

/// A comma list of names or `ALL`; a leading `^` inverts the whole list; unknown names are passed over, as NCCL does.
fn parse_subsystems(text: Option<&str>) -> u32 {
    let Some(text) = text else { return DEFAULT_SUBSYSTEMS };
    let (invert, list) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let mask = list
        .split(',')
        .fold(0, |mask, name| match name.trim().to_ascii_uppercase().as_str() {
            "ALL" => u32::MAX,
            name => {
                mask | SUBSYSTEMS
                    .iter()
                    .find(|(known, _)| *known == name)
                    .map_or(0, |(_, bit)| *bit as u32)
            }
        });
    if invert {
        !mask
    } else {
        mask
    }
}

/// `%h` is the host, `%p` the process id, `%%` a per cent sign; any other `%` stands for itself.
fn expand(path: &str, host: &str, pid: u32) -> String {
    let mut out = String::with_capacity(path.len());
    let mut chars = path.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, chars.peek()) {
            ('%', Some('h')) => out.push_str(host),
            ('%', Some('p')) => out.push_str(&pid.to_string()),
            ('%', Some('%')) => out.push('%'),
            _ => {
                out.push(c);
                continue;
            }
        }
        chars.next();
    }
    out
}

fn open_sink(path: &str) -> Option<File> {
    let opened = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        // /dev/stdout may be a file that the program is writing.
        .truncate(!path.starts_with("/dev/"))
        .custom_flags(libc::O_APPEND | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .and_then(above_standard);
    if let Err(error) = &opened {
        let line = format!("NCCL_DEBUG_FILE: cannot open {path}: {error}; logging to stderr\n");
        write_stderr(&line);
    }
    opened.ok()
}

/// A program that was started without standard streams must not find the log where it expects those.
fn above_standard(file: File) -> std::io::Result<File> {
    match file.as_raw_fd() {
        0..=2 => Ok(rustix::io::fcntl_dupfd_cloexec(&file, 3)?.into()),
        _ => Ok(file),
    }
}

/// Whether a line of this level and subsystem would be written.
pub fn enabled(level: Level, subsystem: Option<Subsystem>) -> bool {
    let settings = &*SETTINGS;
    level <= settings.level && subsystem.is_none_or(|subsystem| settings.subsystems & subsystem as u32 != 0)
}

/// Runs `write` so that a pipe without a reader is its error and no signal to the program.
fn without_sigpipe<R>(write: impl FnOnce() -> R) -> R {
    use std::mem::MaybeUninit;
    let (mut pipe, mut before, mut pending) = (
        MaybeUninit::<libc::sigset_t>::uninit(),
        MaybeUninit::uninit(),
        MaybeUninit::uninit(),
    );
    let (pipe, before, pending) = (pipe.as_mut_ptr(), before.as_mut_ptr(), pending.as_mut_ptr());
    // SAFETY: sigemptyset, pthread_sigmask and sigpending fill the sets that they are given before any is read, and
    // cannot fail for these arguments.
    let was_pending = unsafe {
        libc::sigemptyset(pipe);
        libc::sigaddset(pipe, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, pipe, before);
        libc::sigpending(pending);
        libc::sigismember(pending, libc::SIGPIPE) == 1
    };
    let outcome = write();
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the sets were filled above. The signal of a write goes to the thread that writes, so what is taken here,
    // if anything, is the write's own unless one was pending before.
    unsafe {
        if !was_pending {
            libc::sigtimedwait(pipe, std::ptr::null_mut(), &at_once);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut());
    }
    outcome
}

fn write_stderr(line: &str) {
    // Nobody is left to be told of a failure.
    let _ = without_sigpipe(|| std::io::stderr().write_all(line.as_bytes()));
}

fn write_line(line: &str) {
    let mut sink = SETTINGS.sink.lock();
    if let Some(file) = sink.as_mut() {
        match without_sigpipe(|| file.write(line.as_bytes())) {
            Ok(_) => return,
            // A full pipe drops the line and keeps the sink.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(error) => {
                write_stderr(&format!("NCCL_DEBUG_FILE: {error}; logging to stderr\n"));
                *sink = None;
            }
        }
    }
    write_stderr(line);
}

/// Writes one line; use the macros `info!`, `warning!` and `trace!`, which ask `enabled` first.
pub fn write(level: Level, text: fmt::Arguments) {
    let settings = &*SETTINGS;
    let tid = rustix::thread::gettid().as_raw_nonzero();
    let name = match level {
        Level::Version => return write_line(&format!("{text}\n")),
        Level::Warn => "WARN",
        Level::Trace => "TRACE",
        _ => "INFO",
    };
    write_line(&format!(
        "{}:{}:{} NCCL {name} {text}\n",
        settings.host,
        std::process::id(),
        tid
    ));
}

/// One INFO line of a subsystem.
#[macro_export]
macro_rules! info {
    ($subsystem:ident, $($text:tt)*) => {
        if $crate::observe::log::enabled($crate::observe::log::Level::Info, Some($crate::observe::log::Subsystem::$subsystem)) {
            $crate::observe::log::write($crate::observe::log::Level::Info, format_args!($($text)*));
        }
    };
}

/// One WARN line.
#[macro_export]
macro_rules! warning {
    ($($text:tt)*) => {
        if $crate::observe::log::enabled($crate::observe::log::Level::Warn, None) {
            $crate::observe::log::write($crate::observe::log::Level::Warn, format_args!($($text)*));
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_subsystems_and_file_patterns() {
        assert_eq!(parse_level("info"), Level::Info);
        for text in ["", "bogus", "3"] {
            assert_eq!(parse_level(text), Level::None, "{text}");
        }
        assert_eq!(parse_subsystems(None), DEFAULT_SUBSYSTEMS);
        assert_eq!(
            parse_subsystems(Some("INIT,net")),
            Subsystem::Init as u32 | Subsystem::Net as u32
        );
        assert_eq!(parse_subsystems(Some("^ALL")), 0);
        assert_eq!(parse_subsystems(Some("junk")), 0);
        assert_eq!(expand("/tmp/x.%h.%p", "node", 7), "/tmp/x.node.7");
        assert_eq!(expand("%%q%q%", "node", 7), "%q%q%");
    }

    #[test]
    fn lines_of_two_writers_of_one_file_all_stand_there() {
        let path = std::env::temp_dir().join(format!("ossicle-log-{}", std::process::id()));
        let mut sinks = [0, 1].map(|_| open_sink(path.to_str().unwrap()).unwrap());
        for line in ["a\n", "b\n", "c\n"] {
            sinks
                .iter_mut()
                .for_each(|sink| sink.write_all(line.as_bytes()).unwrap());
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, "a\na\nb\nb\nc\nc\n");
    }
}
