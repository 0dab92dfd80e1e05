//! Container log files: rotation, removal, the links for log agents, and reading them ([`read`]); the system's logs ([`tree`]). Everything here blocks, but for
//! [`follow`].
//!
//! A container's log is `DIR/N.log`, N its restart count. Rotation renames it to `N.log.YYYYMMDD-hhmmss`; the next rotation gzips
//! that (by way of `.tmp`), so that a log agent has one period to finish reading it.

pub mod follow;
pub mod read;
pub mod tree;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use jiff::civil::DateTime;
use rustix::fs::{CWD, Mode, OFlags};

use crate::error::{Attempt, Result, found};
use crate::safe_path::open_held;

const GZIP: &str = ".gz";
const TEMPORARY: &str = ".tmp";

/// Everything in the log's directory whose name is the log's name followed by `separator`, sorted: oldest first.
fn siblings(log: &Path, separator: &str) -> Result<Vec<PathBuf>> {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(Vec::new());
    };
    let prefix = format!("{name}{separator}");
    let Some(entries) = found(std::fs::read_dir(dir)).on("list", dir)? else { return Ok(Vec::new()) };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.on("list", dir)?;
        if entry.file_name().to_str().is_some_and(|n| n.starts_with(&prefix)) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn ends_with(path: &Path, suffix: &str) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(suffix.as_bytes())
}

fn remove(path: &Path) -> Result<()> {
    found(std::fs::remove_file(path)).on("remove", path).map(drop)
}

/// First half of a rotation: clears what an interrupted one left, removes the oldest so that no more than `max_files` will be there
/// with the new and the latest log (`containerLogMaxFiles`, at least 2), and gzips what is not yet.
///
/// # Errors
/// A system call fails.
pub fn prepare_rotation(log: &Path, max_files: usize) -> Result<()> {
    let all = siblings(log, ".")?;
    // A link is none of a runtime's logs: what it leads to must not get into a file that others read.
    let is_link = |p: &PathBuf| std::fs::symlink_metadata(p).is_ok_and(|m| !m.is_file());
    let unused = |p: &PathBuf| {
        ends_with(p, TEMPORARY) || is_link(p) || (!ends_with(p, GZIP) && all.contains(&with_suffix(p, GZIP)))
    };
    let (unused, mut kept): (Vec<_>, Vec<_>) = all.iter().cloned().partition(unused);
    unused.iter().try_for_each(|p| remove(p))?;
    let excess = kept.len().saturating_sub(max_files.saturating_sub(2));
    kept.drain(..excess).try_for_each(|p| remove(&p))?;
    kept.iter().filter(|p| !ends_with(p, GZIP)).try_for_each(|p| compress(p))
}

/// Replaces a rotated log by its gzip, of the same mode.
fn compress(log: &Path) -> Result<()> {
    let mut source = open_regular(log).on("open", log)?;
    let mode = source.metadata().on("stat", log)?.permissions().mode();
    let temporary = with_suffix(log, TEMPORARY);
    let written = (|| {
        let target = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        target.set_permissions(std::fs::Permissions::from_mode(mode))?;
        let mut gzip = flate2::write::GzEncoder::new(target, flate2::Compression::default());
        io::copy(&mut source, &mut gzip)?;
        gzip.finish()?;
        std::fs::rename(&temporary, with_suffix(log, GZIP))
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.on("compress", log)?;
    remove(log)
}

/// Second half: renames the log, and answers its new name. The caller then has the runtime reopen the log (ReopenContainerLog), and
/// calls [`undo_rotation`] if that fails. `now` is local time, as in the Go kubelet's names.
///
/// # Errors
/// The rename fails.
pub fn rotate_latest(log: &Path, now: DateTime) -> Result<PathBuf> {
    let rotated = with_suffix(log, &format!(".{}", now.strftime("%Y%m%d-%H%M%S")));
    std::fs::rename(log, &rotated).attempt(|| format!("failed to rotate log {log:?} to {rotated:?}"))?;
    Ok(rotated)
}

/// Gives the log its name back, so that the next round can rotate it.
///
/// # Errors
/// The rename fails.
pub fn undo_rotation(rotated: &Path, log: &Path) -> Result<()> {
    std::fs::rename(rotated, log).attempt(|| format!("failed to rename rotated log {rotated:?} to {log:?}"))
}

/// The log's size in bytes; None when it is not there.
///
/// # Errors
/// It cannot be looked at.
pub fn log_size(log: &Path) -> Result<Option<u64>> {
    Ok(found(std::fs::metadata(log)).on("stat", log)?.map(|m| m.len()))
}

/// Removes a container's log and everything rotated from it (`N.log*`).
///
/// # Errors
/// A system call fails.
pub fn remove_logs(log: &Path) -> Result<()> {
    siblings(log, "")?.iter().try_for_each(|p| remove(p))
}

/// The highest N among `N.log` and `N.log.*` in a container's log directory; None when there is no such file.
///
/// # Errors
/// The directory is there but cannot be read.
pub fn highest_restart_count(log_dir: &Path) -> Result<Option<u32>> {
    let Some(entries) = found(std::fs::read_dir(log_dir)).on("list", log_dir)? else { return Ok(None) };
    let mut highest = None;
    for entry in entries {
        let name = entry.on("list", log_dir)?.file_name();
        let count = name.to_str().and_then(|name| {
            let (count, rest) = name.split_once(".log")?;
            let plain = count.bytes().all(|b| b.is_ascii_digit()) && (rest.is_empty() || rest.starts_with('.'));
            count.parse().ok().filter(|_| plain)
        });
        highest = highest.max(count);
    }
    Ok(highest)
}

/// Where log agents find a container's log: `DIR/POD_NAMESPACE_CONTAINER-ID.log`, the part before `.log` cut to 251 bytes.
pub fn agent_link(dir: &Path, pod: &str, namespace: &str, container: &str, id: &str) -> PathBuf {
    // These are DNS labels and hexadecimal: every byte is a character.
    let mut base = format!("{pod}_{namespace}_{container}-{id}");
    let mut end = base.len().min(251);
    while !base.is_char_boundary(end) {
        end -= 1;
    }
    base.truncate(end);
    dir.join(base + ".log")
}

/// Links the container's log for log agents, if the runtime has made the log; a link that is there is replaced. Answers whether the log
/// was there.
///
/// # Errors
/// A system call fails.
pub fn link_for_agents(log: &Path, link: &Path) -> Result<bool> {
    if log_size(log)?.is_none() {
        return Ok(false);
    }
    if found(std::fs::read_link(link)).ok().flatten().as_deref() == Some(log) {
        return Ok(true);
    }
    remove(link)?;
    std::os::unix::fs::symlink(log, link).attempt(|| format!("link {} to {}", link.display(), log.display()))?;
    Ok(true)
}

/// A link for log agents whose log is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLink {
    /// The link.
    pub link: PathBuf,
    /// The container that it was for, if its name tells (it may be cut short).
    pub container_id: Option<String>,
}

/// Links in this directory that lead nowhere and never will. While a container's log is being rotated its link is dead for a moment; then the rotated
/// log is there.
///
/// # Errors
/// The directory is there but cannot be read.
pub fn dead_links(dir: &Path) -> Result<Vec<DeadLink>> {
    let Some(entries) = found(std::fs::read_dir(dir)).on("list", dir)? else { return Ok(Vec::new()) };
    let mut dead = Vec::new();
    for entry in entries {
        let entry = entry.on("list", dir)?;
        let link = entry.path();
        let is_log = link.extension().is_some_and(|e| e == "log");
        let leads_nowhere = || std::fs::metadata(&link).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        let rotated = || {
            let target = std::fs::read_link(&link).ok();
            target.is_some_and(|log| siblings(&log, ".").is_ok_and(|others| !others.is_empty()))
        };
        if is_log && entry.file_type().is_ok_and(|t| t.is_symlink()) && leads_nowhere() && !rotated() {
            let stem = link.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
            let id = stem.rsplit_once('-').map(|(_, id)| id.to_owned()).filter(|id| !id.is_empty());
            dead.push(DeadLink { link, container_id: id });
        }
    }
    dead.sort_by(|a, b| a.link.cmp(&b.link));
    Ok(dead)
}

/// Where the last `lines` lines of a file begin. A last line without an end counts.
///
/// # Errors
/// Reading fails.
pub fn tail_offset(file: &mut (impl Read + Seek), lines: u64) -> io::Result<u64> {
    const BLOCK: u64 = 64 << 10;
    let end = file.seek(SeekFrom::End(0))?;
    let (mut at, mut left) = (end, lines);
    if left == 0 {
        return Ok(end);
    }
    let mut block = Vec::new();
    while at > 0 {
        let start = at.saturating_sub(BLOCK);
        block.resize(usize::try_from(at - start).unwrap_or_default(), 0);
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block)?;
        for (i, byte) in block.iter().enumerate().rev() {
            let position = start + i as u64;
            // The newline that ends the last line starts none.
            if *byte == b'\n' && position + 1 != end {
                left -= 1;
                if left == 0 {
                    return Ok(position + 1);
                }
            }
        }
        at = start;
    }
    Ok(0)
}

/// Opens a regular file to read it.
fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    open_held(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

/// The last `bytes` bytes of a regular file; None when it is not there. A pod may have put anything in its place: a pipe or a device, which
/// would hold the reader up, and a link, which would show a file of the host, are refused.
///
/// # Errors
/// It is no regular file, or cannot be read.
pub fn tail_bytes(path: &Path, bytes: u64) -> Result<Option<Vec<u8>>> {
    let Some(mut file) = found(open_regular(path)).on("open", path)? else { return Ok(None) };
    let read = || -> io::Result<Vec<u8>> {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut tail = Vec::new();
        file.take(bytes).read_to_end(&mut tail)?;
        Ok(tail)
    };
    read().on("read", path).map(Some)
}

/// The directories of pods below the pod log directory (`NAMESPACE_NAME_UID`), with the UID of each; others are left out.
///
/// # Errors
/// The directory is there but cannot be read.
pub fn pod_log_dirs(pod_logs: &Path) -> Result<Vec<(PathBuf, String)>> {
    let Some(entries) = found(std::fs::read_dir(pod_logs)).on("list", pod_logs)? else { return Ok(Vec::new()) };
    let mut dirs = Vec::new();
    for entry in entries {
        let entry = entry.on("list", pod_logs)?;
        let name = entry.file_name();
        if let [_, _, uid] = name.to_string_lossy().split('_').collect::<Vec<_>>().as_slice()
            && !uid.is_empty()
            && entry.file_type().is_ok_and(|t| t.is_dir())
        {
            dirs.push((entry.path(), (*uid).to_owned()));
        }
    }
    Ok(dirs)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::{get, put};

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn gunzip(path: &Path) -> String {
        let mut text = String::new();
        flate2::read::GzDecoder::new(File::open(path).unwrap()).read_to_string(&mut text).unwrap();
        text
    }

    /// Whoever can write among the logs cannot have a host's file packed for them, nor written over.
    #[test]
    fn a_rotation_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let secret = put(dir.path(), "secret", "host");
        let log = put(dir.path(), "c/0.log", "x");
        let old = put(dir.path(), "c/0.log.20260101-000001", "old");
        for name in ["0.log.20260101-000000", "0.log.20260101-000001.tmp"] {
            std::os::unix::fs::symlink(&secret, dir.path().join("c").join(name)).unwrap();
        }
        prepare_rotation(&log, 5).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(dir.path().join("c"))
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        assert_eq!(names, ["0.log", "0.log.20260101-000001.gz"]);
        assert!(!old.exists());
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "host");
    }

    #[test]
    fn a_rotation_in_two_halves() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let log = put(d, "0.log", "latest");
        std::fs::set_permissions(put(d, "0.log.20260103-000000", "third"), std::fs::Permissions::from_mode(0o640))
            .unwrap();
        put(d, "0.log.20260101-000000.gz", "first");
        put(d, "0.log.20260102-000000", "already compressed");
        put(d, "0.log.20260102-000000.gz", "second");
        put(d, "0.log.20260102-120000.tmp", "half");
        put(d, "10.log.20260101-000000", "another container's");

        prepare_rotation(&log, 4).unwrap();
        assert_eq!(
            names(d),
            ["0.log", "0.log.20260102-000000.gz", "0.log.20260103-000000.gz", "10.log.20260101-000000"]
        );
        let compressed = d.join("0.log.20260103-000000.gz");
        assert_eq!(gunzip(&compressed), "third");
        assert_eq!(compressed.metadata().unwrap().permissions().mode() & 0o777, 0o640);

        let rotated = rotate_latest(&log, "2026-11-29T01:02:03".parse().unwrap()).unwrap();
        assert_eq!(rotated, d.join("0.log.20261129-010203"));
        assert!(!log.exists());
        undo_rotation(&rotated, &log).unwrap();
        assert_eq!(get(&log), "latest");
        assert!(rotate_latest(&d.join("7.log"), "2026-11-29T01:02:03".parse().unwrap()).is_err());
    }

    #[test]
    fn the_number_of_files_is_kept() {
        for (max, left) in [(5, 3), (3, 1), (2, 0), (1, 0)] {
            let dir = tempfile::tempdir().unwrap();
            let log = put(dir.path(), "1.log", "");
            for day in 1..=6 {
                put(dir.path(), &format!("1.log.2026010{day}-000000"), "");
            }
            prepare_rotation(&log, max).unwrap();
            let names = names(dir.path());
            assert_eq!(names.len(), left + 1, "{max}: {names:?}");
            assert!(left == 0 || names.last().unwrap().starts_with("1.log.20260106"), "the newest stay");
        }
    }

    #[test]
    fn logs_are_removed_with_what_was_rotated() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["1.log", "1.log.20260101-000000", "1.log.20260101-000000.gz", "11.log", "2.log"] {
            put(dir.path(), name, "");
        }
        remove_logs(&dir.path().join("1.log")).unwrap();
        assert_eq!(names(dir.path()), ["11.log", "2.log"]);
        remove_logs(&dir.path().join("missing/1.log")).unwrap();
    }

    #[test]
    fn restart_counts() {
        let dir = tempfile::tempdir().unwrap();
        let count = |names: &[&str]| {
            let d = dir.path().join(names.len().to_string());
            std::fs::create_dir_all(&d).unwrap();
            names.iter().for_each(|n| drop(put(&d, n, "")));
            highest_restart_count(&d).unwrap()
        };
        assert_eq!(count(&[]), None);
        assert_eq!(count(&["x.log"]), None);
        assert_eq!(count(&["2.log", "10.log.20260101-000000.gz"]), Some(10));
        assert_eq!(count(&["0.log", "+3.log", "4.logs", "5log", "99999999999.log"]), Some(0));
        assert_eq!(highest_restart_count(&dir.path().join("missing")).unwrap(), None);
    }

    #[test]
    fn links_for_agents() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let link = agent_link(d, "web", "default", "app", "abc123");
        assert_eq!(link, d.join("web_default_app-abc123.log"));
        let long = agent_link(d, &"p".repeat(250), "default", "app", "abc123");
        assert_eq!(long.file_name().unwrap().len(), 255);

        let log = d.join("0.log");
        assert!(!link_for_agents(&log, &link).unwrap());
        put(d, "0.log", "");
        assert!(link_for_agents(&log, &link).unwrap());
        assert!(link_for_agents(&log, &link).unwrap());
        assert!(dead_links(d).unwrap().is_empty());
        std::fs::rename(&log, d.join("0.log.20260101-000000")).unwrap();
        assert!(dead_links(d).unwrap().is_empty(), "it is being rotated");
        std::fs::remove_file(d.join("0.log.20260101-000000")).unwrap();
        assert_eq!(dead_links(d).unwrap(), [DeadLink { link: link.clone(), container_id: Some("abc123".into()) }]);
        let next = put(d, "1.log", "next");
        assert!(link_for_agents(&next, &link).unwrap());
        assert_eq!(get(link), "next");
    }

    #[test]
    fn pod_directories() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "default_web-1_0d9f1c2e-aaaa/app/0.log", "");
        put(dir.path(), "other/x", "");
        put(dir.path(), "a_b_c", "a file");
        let dirs = pod_log_dirs(dir.path()).unwrap();
        assert_eq!(dirs, [(dir.path().join("default_web-1_0d9f1c2e-aaaa"), "0d9f1c2e-aaaa".to_owned())]);
    }

    #[test]
    fn the_end_of_a_file_and_of_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let log = put(dir.path(), "0.log", "one\nthree\n");
        assert_eq!(tail_bytes(&log, 4).unwrap().unwrap(), b"ree\n");
        assert_eq!(tail_bytes(&log, 4096).unwrap().unwrap().len(), get(&log).len());
        assert_eq!(tail_bytes(&dir.path().join("1.log"), 80).unwrap(), None);
        let secret = put(dir.path(), "secret", "host");
        let at = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink(&secret, at("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("device")).unwrap();
        // Nobody writes into it: a reader that opens it waits for ever.
        rustix::fs::mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::from(0o666), 0).unwrap();
        std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        for other in ["link", "device", "pipe", "socket", "directory"] {
            let e = tail_bytes(&at(other), 4096).unwrap_err();
            assert!(format!("{e:?}").contains("not a regular file"), "{other}: {e:?}");
        }
    }

    proptest! {
        #[test]
        fn the_tail_is_what_a_plain_reading_gives(text in "[ab\n]{0,300}", lines in 0_u64..20) {
            let offset = usize::try_from(tail_offset(&mut Cursor::new(text.as_bytes()), lines).unwrap()).unwrap();
            let all: Vec<&str> = text.split_inclusive('\n').collect();
            let wanted = all[all.len().saturating_sub(usize::try_from(lines).unwrap())..].concat();
            prop_assert_eq!(&text[offset..], wanted);
        }
    }

    #[test]
    fn the_tail_spans_blocks() {
        let text = format!("{}\n{}\nend\n", "x".repeat(100_000), "y".repeat(200_000));
        let mut file = Cursor::new(text.as_bytes());
        assert_eq!(tail_offset(&mut file, 2).unwrap(), 100_001);
        assert_eq!(tail_offset(&mut file, 9).unwrap(), 0);
    }
}
