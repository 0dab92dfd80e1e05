//! Volumes whose content changes as one step: configMap, secret, projected, downwardAPI.
//!
//! ```text
//! key           -> ..data/key
//! ..data        -> ..2026_11_29_12_00_00.123456789
//! ..2026_11_29_12_00_00.123456789/key
//! ```
//!
//! A new version is written beside the old one; renaming the link `..data_tmp` over `..data` swaps them. A reader that went through
//! `..data` before has the old version to the end of its file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};

use jiff::Timestamp;

use crate::error::{Attempt, Failed, Result, found};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// One file of such a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileProjection {
    /// Content.
    pub data: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Owner, when it is not root's (service account tokens of a pod with one runAsUser).
    pub uid: Option<u32>,
}

/// Makes the volume hold exactly these files (relative paths to content). Nothing is written if all content is there already. `prepare`
/// gets the new version's directory before anyone can see it, to set its group. Answers whether a new version was written. Blocks.
///
/// # Errors
/// A path is not acceptable, `prepare` fails, or a system call does; the old version is then still whole.
pub fn write_atomic_volume(
    dir: &Path,
    files: &BTreeMap<String, FileProjection>,
    now: Timestamp,
    prepare: impl FnOnce(&Path) -> Result<()>,
) -> Result<bool> {
    let files = checked(files)?;
    let link = dir.join(DATA);
    let old = found(std::fs::read_link(&link)).on("read link", &link)?.map(|target| dir.join(target));
    let vanished = match &old {
        Some(old) => vanished(old, &files)?,
        None => BTreeSet::new(),
    };
    let same = old
        .as_deref()
        .is_some_and(|old| vanished.is_empty() && files.iter().all(|(p, f)| holds(&old.join(p), &f.data)));
    if !same {
        let new = new_version(dir, now)?;
        let published = write_version(&new, &files).and_then(|()| prepare(&new)).and_then(|()| publish(dir, &new));
        if let Err(error) = published {
            let _ = std::fs::remove_dir_all(&new);
            return Err(error);
        }
    }
    show(dir, &files)?;
    for name in &vanished {
        // Only top names are visible; a vanished file below one went with its version.
        if name.components().count() == 1 {
            let path = dir.join(name);
            found(std::fs::remove_file(&path)).on("remove", &path)?;
        }
    }
    if !same {
        remove_old_versions(dir)?;
    }
    Ok(!same)
}

/// The files by their plain paths.
fn checked(files: &BTreeMap<String, FileProjection>) -> Result<BTreeMap<PathBuf, &FileProjection>> {
    let plain = |path: &str| -> std::result::Result<PathBuf, String> {
        if path.is_empty() {
            return Err("invalid path: must not be empty: \"\"".into());
        }
        if path.starts_with('/') {
            return Err(format!("invalid path: must be relative path: {path}"));
        }
        if path.len() > 4096 {
            return Err("invalid path: must be less than or equal to 4096 characters".into());
        }
        for part in path.split('/') {
            if part == ".." {
                return Err(format!("invalid path: must not contain '..': {path}"));
            }
            if part.len() > 255 {
                return Err("invalid path: filenames must be less than or equal to 255 characters".into());
            }
        }
        // Such names are this module's own.
        if path.starts_with("..") {
            return Err(format!("invalid path: must not start with '..': {path}"));
        }
        Ok(Path::new(path).components().filter(|c| matches!(c, Component::Normal(_))).collect())
    };
    let check = |(path, file)| match plain(path) {
        Ok(plain) => Ok((plain, file)),
        Err(why) => Err(Failed::other(format!("write volume file {path:?}"), why)),
    };
    files.iter().map(|(path, file)| check((path.as_str(), file))).collect()
}

/// What the old version has and the new one does not.
fn vanished(old: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<BTreeSet<PathBuf>> {
    let kept: BTreeSet<&Path> = files.keys().flat_map(|p| p.ancestors()).collect();
    let mut vanished = BTreeSet::new();
    let mut open = vec![old.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in found(std::fs::read_dir(&dir)).on("list", &dir)?.into_iter().flatten() {
            let entry = entry.on("list", &dir)?;
            let path = entry.path();
            if let Some(relative) = path.strip_prefix(old).ok().filter(|r| !kept.contains(r)) {
                vanished.insert(relative.to_owned());
            }
            if entry.file_type().on("stat", &path)?.is_dir() {
                open.push(path);
            }
        }
    }
    Ok(vanished)
}

/// Whether this is a regular file that holds just this. No more of it is read than that is long.
pub(super) fn holds(path: &Path, data: &[u8]) -> bool {
    // A length first: most changes change it, and a volume may be a megabyte.
    let length = std::fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() == data.len() as u64);
    length && std::fs::read(path).is_ok_and(|now| now == data)
}

fn new_version(dir: &Path, now: Timestamp) -> Result<PathBuf> {
    let stamp = now.strftime("..%Y_%m_%d_%H_%M_%S.");
    for _ in 0..100 {
        let path = dir.join(format!("{stamp}{}", rand::random::<u32>()));
        match std::fs::create_dir(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => {
                other.on("make directory", &path)?;
                set_mode(&path, 0o755)?;
                return Ok(path);
            }
        }
    }
    Err(Failed::other(format!("make a new version in {}", dir.display()), "every name is taken"))
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).on("set the mode of", path)
}

fn write_version(version: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<()> {
    for (relative, file) in files {
        let path = version.join(relative);
        if let Some(parent) = path.parent() {
            super::ensure_dirs(parent, 0o755)?;
        }
        let mut open = std::fs::OpenOptions::new();
        let open = open.write(true).create(true).truncate(true).mode(0o600);
        open.open(&path).and_then(|mut f| f.write_all(&file.data)).on("write", &path)?;
        set_mode(&path, file.mode)?;
        if file.uid.is_some() {
            lchown(&path, file.uid, None).on("set the owner of", &path)?;
        }
    }
    Ok(())
}

fn publish(dir: &Path, version: &Path) -> Result<()> {
    let (new, data) = (dir.join(NEW_DATA), dir.join(DATA));
    // Left by an agent that was killed between the two calls.
    found(std::fs::remove_file(&new)).on("remove", &new)?;
    let name = version.file_name().unwrap_or_default();
    symlink(name, &new).on("link", &new)?;
    std::fs::rename(&new, &data).attempt(|| format!("rename {} to {}", new.display(), data.display()))
}

/// The visible links, one for each first part.
fn show(dir: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<()> {
    for (relative, file) in files {
        let Some(Component::Normal(top)) = relative.components().next() else { continue };
        let path = dir.join(top);
        match symlink(Path::new(DATA).join(top), &path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            other => other.on("link", &path)?,
        }
        if file.uid.is_some() {
            lchown(&path, file.uid, None).on("set the owner of", &path)?;
        }
    }
    Ok(())
}

/// Every version but the current one; also those of agents that were killed while they wrote.
fn remove_old_versions(dir: &Path) -> Result<()> {
    let link = dir.join(DATA);
    let current = std::fs::read_link(&link).on("read link", &link)?;
    for entry in std::fs::read_dir(dir).on("list", dir)? {
        let entry = entry.on("list", dir)?;
        let name = entry.file_name();
        let version =
            name.to_str().is_some_and(|n| n.starts_with("..") && n.as_bytes().get(2).is_some_and(u8::is_ascii_digit));
        if version && name != current && entry.file_type().is_ok_and(|t| t.is_dir()) {
            std::fs::remove_dir_all(entry.path()).on("remove", &entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::testing::{get, put};

    fn files(list: &[(&str, &str)]) -> BTreeMap<String, FileProjection> {
        let file = |data: &str| FileProjection { data: data.into(), mode: 0o644, uid: None };
        list.iter().map(|(path, data)| ((*path).to_owned(), file(data))).collect()
    }

    fn write(dir: &Path, list: &[(&str, &str)]) -> bool {
        let now = "2026-11-29T12:34:56Z".parse().unwrap();
        write_atomic_volume(dir, &files(list), now, |_| Ok(())).unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_shape_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        assert!(write(d, &[("key", "1"), ("sub/inner/deep", "2"), ("sub/other", "3")]));
        let version = std::fs::read_link(d.join("..data")).unwrap().into_os_string().into_string().unwrap();
        assert!(version.starts_with("..2026_11_29_12_34_56."), "{version}");
        assert!(version.rsplit_once('.').unwrap().1.parse::<u32>().is_ok(), "{version}");
        assert_eq!(names(d), [version.as_str(), "..data", "key", "sub"]);
        assert_eq!(std::fs::read_link(d.join("key")).unwrap(), Path::new("..data/key"));
        assert_eq!(std::fs::read_link(d.join("sub")).unwrap(), Path::new("..data/sub"));
        assert_eq!(get(d.join("sub/inner/deep")), "2");
        assert_eq!(std::fs::metadata(d.join(version)).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(std::fs::metadata(d.join("key")).unwrap().mode() & 0o7777, 0o644);
    }

    #[test]
    fn equal_content_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        assert!(write(d, &[("a", "1"), ("b", "2")]));
        let before = names(d);
        assert!(!write(d, &[("a", "1"), ("b", "2")]));
        assert_eq!(names(d), before);
        // A link that somebody removed comes back.
        std::fs::remove_file(d.join("a")).unwrap();
        assert!(!write(d, &[("a", "1"), ("b", "2")]));
        assert_eq!(names(d), before);
    }

    #[test]
    fn changes_additions_and_removals() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        write(d, &[("a", "1"), ("gone", "x"), ("sub/x", "1"), ("sub/y", "1")]);
        let old = std::fs::read_link(d.join("..data")).unwrap();
        let open = std::fs::File::open(d.join("a")).unwrap();
        assert!(write(d, &[("a", "2"), ("new", "n"), ("sub/x", "1")]));
        assert_eq!((get(d.join("a")), get(d.join("new"))), ("2".into(), "n".into()));
        assert!(!d.join("gone").exists() && !d.join(old).exists());
        assert!(d.join("sub/x").exists() && !d.join("sub/y").exists());
        assert_eq!(names(d).len(), 5);
        assert_eq!(std::io::read_to_string(open).unwrap(), "1", "an open file keeps the old content");
        // A removal alone is a change too.
        assert!(write(d, &[("a", "2"), ("new", "n")]));
        assert_eq!(names(d).len(), 4);
        assert!(write(d, &[]));
        assert_eq!(names(d).len(), 2);
    }

    #[test]
    fn what_a_killed_agent_left_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        write(d, &[("a", "1")]);
        put(d, "..2020_01_01_00_00_00.1/a", "half");
        symlink("..2020_01_01_00_00_00.1", d.join("..data_tmp")).unwrap();
        assert!(write(d, &[("a", "2")]));
        assert_eq!(get(d.join("a")), "2");
        assert_eq!(names(d).len(), 3, "{:?}", names(d));
    }

    #[test]
    fn a_failed_preparation_keeps_the_old_version() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        write(d, &[("a", "1")]);
        let before = names(d);
        let mut seen = None;
        let result = write_atomic_volume(d, &files(&[("a", "2")]), Timestamp::UNIX_EPOCH, |version| {
            seen = Some(get(version.join("a")));
            Err(Failed::other("set the group", "no"))
        });
        assert!(result.is_err());
        assert_eq!(seen.as_deref(), Some("2"));
        assert_eq!((names(d), get(d.join("a"))), (before, "1".into()));
    }

    #[test]
    fn modes_and_owners() {
        let dir = tempfile::tempdir().unwrap();
        let root = rustix::process::geteuid().is_root();
        let uid = root.then_some(1000);
        let file = FileProjection { data: b"t".to_vec(), mode: 0o400, uid };
        let files = [("token".to_owned(), file)].into();
        write_atomic_volume(dir.path(), &files, Timestamp::UNIX_EPOCH, |_| Ok(())).unwrap();
        let meta = std::fs::metadata(dir.path().join("token")).unwrap();
        assert_eq!(meta.mode() & 0o7777, 0o400);
        if root {
            assert_eq!(meta.uid(), 1000);
            assert_eq!(std::fs::symlink_metadata(dir.path().join("token")).unwrap().uid(), 1000);
        }
    }

    #[test]
    fn bad_paths_are_refused_with_their_text() {
        let dir = tempfile::tempdir().unwrap();
        let long = "x".repeat(256);
        for (path, text) in [
            ("", "invalid path: must not be empty: \"\""),
            ("/a", "invalid path: must be relative path: /a"),
            ("a/../b", "invalid path: must not contain '..': a/../b"),
            ("..", "invalid path: must not contain '..': .."),
            ("..data", "invalid path: must not start with '..': ..data"),
            (long.as_str(), "invalid path: filenames must be less than or equal to 255 characters"),
        ] {
            let error = write_atomic_volume(dir.path(), &files(&[(path, "")]), Timestamp::UNIX_EPOCH, |_| Ok(()));
            assert_eq!(error.unwrap_err().source.to_string(), text);
        }
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn readers_never_meet_a_mix() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        write(d, &[("a", "0"), ("b", "0")]);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut rounds = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    // Both by one version, as a reader does that wants consistency.
                    let version = d.join(std::fs::read_link(d.join("..data")).expect("there is always a version"));
                    let (a, b) =
                        (std::fs::read_to_string(version.join("a")), std::fs::read_to_string(version.join("b")));
                    if let (Ok(a), Ok(b)) = (a, b) {
                        assert_eq!(a, b);
                        rounds += 1;
                    }
                }
                rounds
            });
            for i in 1..200 {
                let n = i.to_string();
                assert!(write(d, &[("a", &n), ("b", &n)]));
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(reader.join().unwrap() > 0);
        });
    }
}
