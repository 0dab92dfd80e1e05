//! Files and directories as the kubelet keeps them: written whole or not at all, with exact modes, removed without crossing mounts.
//! Everything here blocks.

mod atomic_writer;
mod hostpath;
mod ownership;
mod remove;
mod usage;
mod walk;

use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

pub use atomic_writer::{FileProjection, write_atomic_volume};
pub use hostpath::{HostPathError, hostpath_check};
pub use ownership::set_fs_group;
pub use remove::{OrphanError, remove_pod_dir, remove_tree, remove_volume_dir};
pub use usage::{DiskUsage, FilesystemFigures, NodeFilesystem, disk_usage, files_usage, filesystem, node_filesystems};

use crate::error::{Attempt, Failed, Result, found};

/// Replaces a file's content as one step: a reader, or a crash, meets the old or the new content. The file gets exactly this mode.
///
/// # Errors
/// A system call fails; the old file is then untouched.
pub fn write_file_atomic(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let (Some(dir), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(Failed::other(format!("write {}", path.display()), "not a file's path"));
    };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let temporary = dir.join(format!(".{}", rand::random::<u64>()));
    let written = (|| {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        // Without it the rename may reach the disk before the content does.
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.on("write", path)?;
    std::fs::File::open(dir).and_then(|d| d.sync_all()).on("sync", dir)
}

/// Has a file hold this, and leaves it alone when it does. It is written in place, for those who have this very file mounted; what they wrote into it,
/// and be it as long as the disk, is not read. A file that is made gets exactly this mode.
///
/// # Errors
/// A system call fails.
pub fn write_in_place(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    if atomic_writer::holds(path, content) {
        return Ok(());
    }
    ensure_file(path, mode)?;
    std::fs::write(path, content).on("write", path)
}

/// Makes a directory with exactly this mode, whatever the umask; one that is there gets the mode. Its parent must be there.
///
/// # Errors
/// A system call fails, or something else is there.
pub fn ensure_dir(path: &Path, mode: u32) -> Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.on("make directory", path)?,
    }
    let meta = std::fs::metadata(path).on("stat", path)?;
    if !meta.is_dir() {
        return Err(Failed::new(
            format!("make directory {}", path.display()),
            io::Error::from(io::ErrorKind::NotADirectory),
        ));
    }
    set_mode(path, meta.mode(), mode)
}

/// Makes a directory and those above it that are missing, each new one with exactly this mode. Those that are there are kept.
///
/// # Errors
/// A system call fails, or something else is in the way.
pub fn ensure_dirs(path: &Path, mode: u32) -> Result<()> {
    let missing = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.is_dir());
    let missing: Vec<_> = missing.collect();
    missing.into_iter().rev().try_for_each(|dir| ensure_dir(dir, mode))
}

/// Makes an empty file with exactly this mode, if it is missing.
///
/// # Errors
/// A system call fails.
pub fn ensure_file(path: &Path, mode: u32) -> Result<()> {
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path) {
        Ok(file) => file.set_permissions(std::fs::Permissions::from_mode(mode)).on("set the mode of", path),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(Failed::new(format!("make file {}", path.display()), e)),
    }
}

fn set_mode(path: &Path, now: u32, mode: u32) -> Result<()> {
    if now & 0o7777 == mode & 0o7777 {
        return Ok(());
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).on("set the mode of", path)
}

/// Reads a file; None when it is not there.
///
/// # Errors
/// It is there but cannot be read.
pub fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    found(std::fs::read(path)).on("read", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{get, put};

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = put(dir.path(), "state", "old");
        write_file_atomic(&path, b"new", 0o600).unwrap();
        assert_eq!((get(&path), mode(&path)), ("new".into(), 0o600));
        write_file_atomic(&path, b"", 0o666).unwrap();
        assert_eq!((get(&path), mode(&path)), (String::new(), 0o666));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_a_container_wrote_into_its_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("etc-hosts");
        write_in_place(&file, b"127.0.0.1 localhost\n", 0o644).unwrap();
        let inode = std::fs::metadata(&file).unwrap().ino();
        let peak = || {
            let status = get("/proc/self/status");
            let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let before = peak();
        // 1 GiB of nothing.
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(1 << 30).unwrap();
        write_in_place(&file, b"127.0.0.1 localhost\n", 0o644).unwrap();
        assert!(peak() < before + (512 << 10), "it was read: {} KiB more", peak() - before);
        assert_eq!((get(&file).as_str(), mode(&file)), ("127.0.0.1 localhost\n", 0o644));
        assert_eq!(std::fs::metadata(&file).unwrap().ino(), inode, "in place");
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("taken")).unwrap();
        assert!(write_file_atomic(&dir.path().join("taken"), b"x", 0o600).is_err());
        assert!(write_file_atomic(&dir.path().join("no/where"), b"x", 0o600).unwrap_err().is_not_found());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn directories_have_the_exact_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        ensure_dir(&path, 0o777).unwrap();
        assert_eq!(mode(&path), 0o777);
        ensure_dir(&path, 0o750).unwrap();
        assert_eq!(mode(&path), 0o750);
        ensure_dirs(&path.join("b/c"), 0o707).unwrap();
        assert_eq!((mode(&path), mode(&path.join("b")), mode(&path.join("b/c"))), (0o750, 0o707, 0o707));
        let file = put(dir.path(), "file", "");
        assert!(ensure_dir(&file, 0o755).is_err());
        ensure_file(&dir.path().join("log"), 0o666).unwrap();
        assert_eq!(mode(&dir.path().join("log")), 0o666);
        ensure_file(&file, 0o600).unwrap();
        assert_ne!(mode(&file), 0o600, "kept as it is");
    }

    #[test]
    fn reading_what_may_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_if_there(&dir.path().join("x")).unwrap(), None);
        let path = put(dir.path(), "y", "z");
        assert_eq!(read_if_there(&path).unwrap().as_deref(), Some(b"z".as_slice()));
    }
}
