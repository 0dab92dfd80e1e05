//! How full things are.

use std::collections::HashSet;
use std::path::Path;

use super::walk::walk;
use crate::error::{Attempt, Result};

/// What a directory tree takes on its own filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Allocated bytes.
    pub bytes: u64,
    /// Files and directories, the root included; a file with several names counts once.
    pub inodes: u64,
}

/// Adds up a directory tree without leaving its filesystem. Blocks as long as the walk takes.
///
/// # Errors
/// The tree cannot be read.
pub fn disk_usage(path: &Path) -> Result<DiskUsage> {
    let mut usage = DiskUsage::default();
    let mut linked = HashSet::new();
    walk(path, &mut |file| {
        let directory = file.opened.is_some();
        if directory || file.stat.st_nlink <= 1 || linked.insert(file.stat.st_ino) {
            usage.bytes += u64::try_from(file.stat.st_blocks).unwrap_or_default() * 512;
            usage.inodes += 1;
        }
        Ok(())
    })
    .on("measure", path)?;
    Ok(usage)
}

/// Figures of a filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilesystemFigures {
    /// Size in bytes.
    pub capacity: u64,
    /// Bytes that ordinary users can still write.
    pub available: u64,
    /// Bytes in use (those reserved for root are neither available nor used).
    pub used: u64,
    /// Inodes; 0 when the filesystem does not count them.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
    /// Inodes in use.
    pub inodes_used: u64,
}

/// Asks the filesystem that this path is on. Blocks; a network filesystem may not answer at all.
///
/// # Errors
/// The path is not there, or the filesystem does not answer.
pub fn filesystem(path: &Path) -> Result<FilesystemFigures> {
    let stat = rustix::fs::statvfs(path).on("statfs", path)?;
    Ok(FilesystemFigures {
        capacity: stat.f_blocks * stat.f_frsize,
        available: stat.f_bavail * stat.f_frsize,
        used: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize,
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::{self, Tmpfs};
    use crate::testing::{MountDir, may_mount, put};

    #[test]
    fn files_count_once_and_other_filesystems_not() {
        let dir = MountDir::new();
        let d = dir.path();
        put(d, "a/one", &"x".repeat(100_000));
        std::fs::hard_link(d.join("a/one"), d.join("a/again")).unwrap();
        std::os::unix::fs::symlink("/usr", d.join("a/link")).unwrap();
        let usage = disk_usage(&d.join("a")).unwrap();
        assert_eq!(usage.inodes, 3);
        assert!((100_000..300_000).contains(&usage.bytes), "{usage:?}");
        if may_mount() {
            std::fs::create_dir(d.join("a/mnt")).unwrap();
            let empty = disk_usage(&d.join("a")).unwrap();
            mount::mount_tmpfs(&d.join("a/mnt"), Tmpfs { size: None, mode: 0o755, noswap: false }).unwrap();
            put(d, "a/mnt/big", &"x".repeat(1_000_000));
            assert_eq!(disk_usage(&d.join("a")).unwrap().inodes, empty.inodes - 1);
        }
        assert!(disk_usage(&d.join("missing")).unwrap_err().is_not_found());
    }

    #[test]
    fn figures_add_up() {
        let f = filesystem(Path::new("/")).unwrap();
        assert!(f.capacity > 0 && f.available <= f.capacity && f.used <= f.capacity);
        assert_eq!(f.inodes_used + f.inodes_free, f.inodes);
    }
}
