//! What containers and others leave in log files, and what is asked for of `/var/log`.

// Without a place for its files a target cannot try anything, and says so as it says everything.
#![allow(clippy::expect_used)]

use std::cell::RefCell;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use host::logs::read::{LogReader, Progress, ReadOptions, Stream};
use host::logs::tree::{LogEntry, LogTree};
use tempfile::TempDir;

/// Options in the first byte, then the file.
pub const SEEDS: &[&[u8]] = &[
    b"\x002026-11-29T01:02:03.123456789Z stdout F one\n2026-11-29T01:02:03.3Z stderr P tw\n2026-11-29T01:02:04Z stderr F o\n",
    b"\x0b2026-11-29T01:02:03Z stdout F a\n2026-11-29T01:02:06+02:00 stdout F:x \nnot a line\n2026-11-29T01:02:07Z stdout P end",
    b"\xff2026-11-29T01:02:03Z stdin F a\n\n2026-11-29T01:02:03Z stdout\n2026-11-29T01:02:03Z stdout F\n",
];

thread_local! {
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Writes a file of a target's own directory, and the directories above it.
pub(crate) fn put(dir: &std::path::Path, path: &str, text: &[u8]) {
    let path = dir.join(path);
    fs::create_dir_all(path.parent().unwrap_or(dir)).expect("a directory");
    fs::write(path, text).expect("a file");
}

/// A directory with everything that is tried, made once for each thread.
struct Place {
    dir: TempDir,
    tree: LogTree,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory for temporary files");
        let d = dir.path();
        for (path, text) in
            [("log/a.log", "a"), ("log/sub/b.log", "b"), ("log/..c", "c"), ("pods/0.log", "pod"), ("secret", "s")]
        {
            put(d, path, text.as_bytes());
        }
        for (target, name) in [
            ("../a.log", "sub/near"),
            ("../pods/0.log", "pod.log"),
            ("../secret", "out"),
            ("..", "up"),
            ("/etc", "etc"),
            ("loop", "loop"),
        ] {
            symlink(target, d.join("log").join(name)).expect("a link");
        }
        let tree = LogTree::new(d.join("log"), vec![d.join("pods")]);
        Self { dir, tree }
    }
}

fn with_place<T>(work: impl FnOnce(&Place) -> T) -> T {
    PLACE.with_borrow_mut(|place| work(place.get_or_insert_with(Place::new)))
}

/// Reads a log: it ends, gives no more than is in the file (and stamps), keeps to its limits, and gives the same however it is cut.
pub fn read(bytes: &[u8]) {
    let Some((how, text)) = bytes.split_first() else { return };
    let on = |bit: u8| how & (1 << bit) != 0;
    let options = ReadOptions {
        timestamps: on(0),
        tail: on(1).then_some(u64::from(how >> 6)),
        stop_after_tail: on(2),
        limit_bytes: on(3).then_some(7),
        since: on(4).then(|| "2026-11-29T01:02:04Z".parse().unwrap_or_default()),
        stream: on(5).then_some(Stream::Stderr),
    };
    with_place(|place| {
        let log = place.dir.path().join("0.log");
        fs::write(&log, text).expect("a log");
        let whole = all(&log, &options);
        let stamps = if options.timestamps { 64 * text.iter().filter(|b| **b == b'\n').count() + 64 } else { 0 };
        assert!(whole.len() <= text.len() + stamps, "{} bytes out of {}", whole.len(), text.len());
        assert!(options.limit_bytes.is_none_or(|limit| whole.len() as u64 <= limit), "more than the limit");
        let limited = all(&log, &ReadOptions { limit_bytes: Some(5), ..options.clone() });
        assert_eq!(limited, whole[..whole.len().min(5)], "a limit cuts, and changes nothing else");
        let last = host::logs::tail_bytes(&log, 2048).expect("the log is there").unwrap_or_default();
        assert!(last.len() <= 2048 && text.ends_with(&last), "{}", last.len());

        // Followed: written in two pieces.
        if options.tail.is_none() {
            let (first, rest) = text.split_at(text.len() / 2);
            fs::write(&log, first).expect("a log");
            let mut reader = LogReader::open(&log, place.dir.path(), options.clone()).expect("the log is there");
            let mut pieces = Vec::new();
            while reader.read(&mut pieces).expect("the log can be read") == Progress::More {}
            let mut file = fs::OpenOptions::new().append(true).open(&log).expect("the log is there");
            std::io::Write::write_all(&mut file, rest).expect("the log can be written");
            while reader.read(&mut pieces).expect("the log can be read") == Progress::More {}
            assert_eq!(pieces, whole, "cut at {}", first.len());
        }
    });
}

fn all(log: &std::path::Path, options: &ReadOptions) -> Vec<u8> {
    let mut reader = LogReader::open(log, log.parent().unwrap_or(log), options.clone()).expect("the log is there");
    let mut out = Vec::new();
    while reader.read(&mut out).expect("the log can be read") == Progress::More {}
    out
}

/// Paths below `/var/log`.
pub const PATHS: &[&[u8]] = &[
    b"a.log",
    b"sub/near",
    b"./sub//../a.log",
    b"pod.log",
    b"out",
    b"up/secret",
    b"etc/passwd",
    b"../secret",
    b"..c",
    b"",
];

/// Opens a path of the system's logs: whatever it is, what is opened lies in the tree, or where pods' logs are.
pub fn system_log(bytes: &[u8]) {
    let path = String::from_utf8_lossy(bytes);
    with_place(|place| {
        let Ok(entry) = place.tree.open(&path) else { return };
        let LogEntry::File { file, .. } = entry else { return };
        let opened: PathBuf = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new())
            .map(into_path)
            .expect("its name");
        let root = place.dir.path().canonicalize().expect("the directory is there");
        let inside = ["log", "pods"].iter().any(|dir| opened.starts_with(root.join(dir)));
        assert!(inside, "{path:?} leads to {}", opened.display());
    });
}

fn into_path(name: std::ffi::CString) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    std::ffi::OsString::from_vec(name.into_bytes()).into()
}
