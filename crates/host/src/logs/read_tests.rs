//! Lines as containerd writes them; what is expected is what the Go kubelet gives for them.

use proptest::prelude::*;

use super::*;
use crate::testing::put;

const LOG: &str = "2026-11-29T01:02:03.1Z stdout F one\n\
    2026-11-29T01:02:03.25Z stderr P tw\n\
    2026-11-29T01:02:03.3Z stderr F o\n\
    2026-11-29T01:02:04Z stdout F  three\n\
    not a line\n\
    2026-11-29T01:02:05Z stdin F four\n\
    2026-11-29T01:02:06+02:00 stdout F:x \n\
    2026-11-29T01:02:07.123456789Z stderr F end\n";

fn read(text: &str, options: ReadOptions) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut reader = LogReader::open(&put(dir.path(), "0.log", text), dir.path(), options).unwrap();
    let mut out = Vec::new();
    while reader.read(&mut out).unwrap() == Progress::More {}
    String::from_utf8(out).unwrap()
}

#[test]
fn options() {
    let all = ReadOptions::default;
    let tail = |n| ReadOptions { tail: Some(n), stop_after_tail: true, ..all() };
    let since = |t: &str| ReadOptions { since: Some(t.parse().unwrap()), ..all() };
    let limit = |n| ReadOptions { limit_bytes: Some(n), ..all() };
    for (options, expected) in [
        (all(), "one\ntwo\n three\n\nend\n"),
        (tail(0), ""),
        (tail(1), "end\n"),
        (tail(2), "\nend\n"),
        // Lines that cannot be read count for where to begin, but not for where to stop.
        (tail(5), " three\n\nend\n"),
        // A part of a line is a line here.
        (tail(6), "o\n three\n\nend\n"),
        (tail(100), "one\ntwo\n three\n\nend\n"),
        (since("2026-11-29T01:02:03.3Z"), "o\n three\nend\n"),
        (since("2027-01-01T00:00:00Z"), ""),
        (limit(5), "one\nt"),
        (limit(1), "o"),
        (limit(1000), "one\ntwo\n three\n\nend\n"),
        (ReadOptions { stream: Some(Stream::Stderr), ..all() }, "two\nend\n"),
        (ReadOptions { stream: Some(Stream::Stdout), ..all() }, "one\n three\n\n"),
        (
            ReadOptions { timestamps: true, ..all() },
            "2026-11-29T01:02:03.100000000Z one\n2026-11-29T01:02:03.250000000Z two\n2026-11-29T01:02:04.000000000Z  three\n\
             2026-11-29T01:02:06.000000000+02:00 \n2026-11-29T01:02:07.123456789Z end\n",
        ),
        (ReadOptions { timestamps: true, limit_bytes: Some(33), ..all() }, "2026-11-29T01:02:03.100000000Z on"),
    ] {
        assert_eq!(read(LOG, options.clone()), expected, "{options:?}");
    }
}

#[test]
fn a_last_line_without_end_is_given() {
    assert_eq!(read("2026-11-29T01:02:03Z stdout F abc", ReadOptions::default()), "abc");
    assert_eq!(read("2026-11-29T01:02:03Z stdou", ReadOptions::default()), "");
    assert_eq!(read("", ReadOptions { tail: Some(3), ..ReadOptions::default() }), "");
}

#[test]
fn long_lines_and_long_rubbish() {
    let long = "x".repeat(1 << 20);
    assert_eq!(read(&format!("2026-11-29T01:02:03Z stdout F {long}\n"), ReadOptions::default()).len(), (1 << 20) + 1);
    let text = format!("{long}\n2026-11-29T01:02:03Z stdout F ok\n");
    assert_eq!(read(&text, ReadOptions::default()), "ok\n");
}

#[test]
fn over_a_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let log = put(dir.path(), "0.log", "2026-11-29T01:02:03Z stdout P on");
    let mut reader = LogReader::open(&log, dir.path(), ReadOptions::default()).unwrap();
    let mut out = Vec::new();
    assert_eq!(reader.read(&mut out).unwrap(), Progress::CaughtUp);
    assert!(!reader.replaced());
    std::fs::rename(&log, dir.path().join("0.log.1")).unwrap();
    assert!(!reader.replaced(), "there is no new file yet");
    std::fs::write(dir.path().join("0.log.1"), "2026-11-29T01:02:03Z stdout P one \n").unwrap();
    put(dir.path(), "0.log", "2026-11-29T01:02:04Z stdout F two\n");
    assert!(reader.replaced());
    assert_eq!(reader.read(&mut out).unwrap(), Progress::CaughtUp);
    assert_eq!(out, b"one ");
    assert!(!reader.reopen().unwrap());
    assert_eq!(reader.read(&mut out).unwrap(), Progress::CaughtUp);
    assert_eq!(out, b"one two\n");
}

#[test]
fn several_rotations_behind() {
    let dir = tempfile::tempdir().unwrap();
    let line = |text: &str| format!("2026-11-29T01:02:03Z stdout F {text}\n");
    let log = put(dir.path(), "0.log", &line("a"));
    let mut reader = LogReader::open(&log, dir.path(), ReadOptions::default()).unwrap();
    let mut out = Vec::new();
    reader.read(&mut out).unwrap();
    for (text, rotated) in
        [("b", "0.log.20260101-000001"), ("c", "0.log.20260101-000002"), ("d", "0.log.20260101-000003")]
    {
        std::fs::rename(&log, dir.path().join(rotated)).unwrap();
        put(dir.path(), "0.log", &line(text));
    }
    let older = put(dir.path(), "0.log.20251231-000000", &line("older"));
    std::fs::File::open(&older).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    put(dir.path(), "0.log.20260101-000001.gz", "no lines");
    for complete in [true, false, false] {
        assert!(reader.replaced());
        assert_eq!(reader.reopen().unwrap(), complete);
        assert_eq!(reader.read(&mut out).unwrap(), Progress::CaughtUp);
    }
    assert!(!reader.replaced());
    assert_eq!(out, b"a\nb\nc\nd\n");

    // The file that is read is gone.
    std::fs::rename(&log, dir.path().join("gone")).unwrap();
    std::fs::remove_file(dir.path().join("gone")).unwrap();
    put(dir.path(), "0.log", &line("e"));
    std::fs::File::open(&log)
        .unwrap()
        .set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(9))
        .unwrap();
    assert!(reader.replaced());
    assert!(!reader.reopen().unwrap());
    reader.read(&mut out).unwrap();
    assert_eq!(out, b"a\nb\nc\nd\ne\n");
}

/// What the log's name leads to is looked at each time.
#[test]
fn links_that_come_with_a_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path().canonicalize().unwrap();
    let logs = d.join("logs");
    let secret = put(&d, "secret", "2026-11-29T01:02:03Z stdout F secret\n");
    let log = put(&logs, "c/0.log", "2026-11-29T01:02:03Z stdout F a\n");
    let mut reader = LogReader::open(&log, &logs, ReadOptions::default()).unwrap();
    let mut out = Vec::new();
    reader.read(&mut out).unwrap();
    let rotated = logs.join("c/0.log.20260101-000001");
    std::fs::rename(&log, &rotated).unwrap();
    std::os::unix::fs::symlink(&secret, &log).unwrap();
    assert!(reader.replaced());
    assert_eq!(reader.reopen().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert!(LogReader::open(&log, &logs, ReadOptions::default()).is_err());
    // A rotated one that is such a link is passed over; one that stays among the logs is followed.
    std::fs::remove_file(&log).unwrap();
    std::os::unix::fs::symlink(&secret, logs.join("c/0.log.20260101-000002")).unwrap();
    let kept = put(&logs, "kept", "2026-11-29T01:02:04Z stdout F b\n");
    std::os::unix::fs::symlink(&kept, &log).unwrap();
    assert!(!reader.reopen().unwrap());
    reader.read(&mut out).unwrap();
    assert_eq!(out, b"a\nb\n");
    // A pipe holds nobody up.
    let pipe = logs.join("c/pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert_eq!(LogReader::open(&pipe, &logs, ReadOptions::default()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

proptest! {
    /// Whatever is in the file, and wherever reads cut it.
    #[test]
    fn pieces_make_no_difference(text in "(2026-11-29T01:02:03(\\.[0-9]{1,9})?Z (stdout|stderr|x) [FP] ?[ab ]{0,5}\n|[ab \n]{0,9})*", cut in 0_usize..200, timestamps: bool) {
        let dir = tempfile::tempdir().unwrap();
        let log = put(dir.path(), "0.log", "");
        let options = ReadOptions { timestamps, ..ReadOptions::default() };
        let (mut whole, mut pieces) = (Vec::new(), Vec::new());
        LogReader::open(&log, dir.path(), options.clone()).unwrap().take(text.as_bytes(), &mut whole);
        let mut reader = LogReader::open(&log, dir.path(), options).unwrap();
        let (a, b) = text.as_bytes().split_at(cut.min(text.len()));
        reader.take(a, &mut pieces);
        reader.take(b, &mut pieces);
        prop_assert_eq!(whole, pieces);
    }

    /// Nothing that a container or a broken disk leaves in the file makes the reader fail.
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let dir = tempfile::tempdir().unwrap();
        let log = put(dir.path(), "0.log", "");
        std::fs::write(&log, &bytes).unwrap();
        let mut reader = LogReader::open(&log, dir.path(), ReadOptions { tail: Some(3), timestamps: true, ..ReadOptions::default() }).unwrap();
        let mut out = Vec::new();
        while reader.read(&mut out).unwrap() == Progress::More {}
    }
}
