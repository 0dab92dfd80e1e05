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

/// Adds up the files directly in a directory, without itself and without what is below; nothing when it is not there.
///
/// # Errors
/// The directory cannot be read.
pub fn files_usage(dir: &Path) -> Result<DiskUsage> {
    let mut usage = DiskUsage::default();
    let Some(entries) = crate::error::found(std::fs::read_dir(dir)).on("read", dir)? else { return Ok(usage) };
    for entry in entries.flatten() {
        // Of the file itself, not of what a link leads to; one that was removed meanwhile is none.
        if let Some(found) = entry.metadata().ok().filter(|m| !m.is_dir()) {
            usage.bytes += std::os::unix::fs::MetadataExt::blocks(&found) * 512;
            usage.inodes += 1;
        }
    }
    Ok(usage)
}

/// A file system with files of its own on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFilesystem {
    /// The block device, or for a tmpfs the place where it is mounted.
    pub device: String,
    /// Where it can be asked.
    pub mount_point: std::path::PathBuf,
    /// Major and minor number.
    pub number: (u32, u32),
}

/// The node's file systems, each once: those on disks and tmpfs; not those of the network, which may not answer, and not those that pods
/// bring with them: what is mounted below any of `except`, overlays, and sandboxes' `/dev/shm`.
pub fn node_filesystems(table: &crate::mount::MountTable, except: &[&Path]) -> Vec<NodeFilesystem> {
    const ON_DISK: [&str; 8] = ["btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs", "bcachefs"];
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for mount in &table.0 {
        let tmpfs = mount.fs_type == "tmpfs";
        let of_pods = except.iter().any(|dir| mount.mount_point.starts_with(dir))
            || (tmpfs
                && mount.mount_point.ends_with("shm")
                && mount.mount_point.components().any(|c| c.as_os_str() == "sandboxes"));
        if of_pods || !(tmpfs || ON_DISK.contains(&mount.fs_type.as_str())) || !seen.insert(mount.device) {
            continue;
        }
        let device = if tmpfs { mount.mount_point.display().to_string() } else { mount.source.clone() };
        found.push(NodeFilesystem { device, mount_point: mount.mount_point.clone(), number: mount.device });
    }
    found
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

    #[test]
    fn the_files_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "c/0.log", &"x".repeat(10_000));
        put(dir.path(), "c/below/1.log", &"x".repeat(10_000));
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("c/link")).unwrap();
        let usage = files_usage(&dir.path().join("c")).unwrap();
        assert!(usage.inodes == 2 && (10_000..20_000).contains(&usage.bytes), "{usage:?}");
        assert_eq!(files_usage(&dir.path().join("none")).unwrap(), DiskUsage::default());
    }

    #[test]
    fn file_systems_of_the_node() {
        let table = mount::MountTable::parse(
            b"1 0 254:0 / / rw - ext4 /dev/vda rw\n\
              2 1 0:5 / /dev/shm rw - tmpfs shm rw\n\
              3 1 254:0 /x /mnt/bound rw - ext4 /dev/vda rw\n\
              4 1 0:6 / /root/pods/u/volumes/m rw - tmpfs tmpfs rw\n\
              5 1 0:7 / /run/containerd/sandboxes/a/shm rw - tmpfs shm rw\n\
              6 1 0:8 / /run/containerd/rootfs rw - overlay overlay rw\n\
              7 1 0:9 / /nfs rw - nfs host:/x rw\n\
              8 1 8:1 / /data rw - xfs /dev/sda1 rw\n",
        );
        let found = node_filesystems(&table, &[Path::new("/root/pods")]);
        let devices: Vec<_> = found.iter().map(|f| f.device.as_str()).collect();
        assert_eq!(devices, ["/dev/vda", "/dev/shm", "/dev/sda1"]);
        assert_eq!((found[2].number, found[0].mount_point.as_path()), ((8, 1), Path::new("/")));
    }
}
