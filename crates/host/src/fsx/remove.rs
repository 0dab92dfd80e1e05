//! Removal that never deletes through a mount.
//!
//! A pod's directory may hold mounts that the agent knows nothing of: of plugins, of an administrator, or made by a container with
//! Bidirectional propagation. So the mount table is asked first, and each directory that is entered must be on the same mount (device
//! and mount id, which differs for bind mounts of the same filesystem) as the tree's root.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::error::{Attempt, Failed, Result, found};
use crate::mount::{MountTable, real};

/// Why a pod's directory is still there.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// Something is mounted at or below it: nothing was removed.
    #[error("orphaned pod {uid:?} found, but volumes are not cleaned up: {}", list(mounts))]
    StillMounted {
        /// The directory's name.
        uid: String,
        /// Where, deepest first.
        mounts: Vec<PathBuf>,
    },
    /// A volume's directory is not empty though nothing is mounted there: its files may be somebody's data, and are left.
    #[error("orphaned pod {uid:?} found, but failed to rmdir() volume at path {}: {source}", path.display())]
    VolumeLeft {
        /// The directory's name.
        uid: String,
        /// The volume's directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Anything else in it could not be removed.
    #[error("orphaned pod {uid:?} found, but error occurred when trying to remove the pod directory: {}", source.full())]
    Failed {
        /// The directory's name.
        uid: String,
        /// What failed.
        source: Failed,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Removes the directory of a pod that is gone: nothing when anything is still mounted in it; each volume's directory by rmdir(2) only;
/// the rest recursively, on one mount. A missing directory counts as removed. Blocks.
///
/// # Errors
/// Everything that stayed; the pod's directory is then still there.
pub fn remove_pod_dir(proc_root: &Path, pod_dir: &Path) -> std::result::Result<(), Vec<OrphanError>> {
    let uid = pod_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let failed = |source: Failed| OrphanError::Failed { uid: uid.clone(), source };
    match mounts_below(proc_root, pod_dir) {
        Ok(mounts) if mounts.is_empty() => {}
        Ok(mounts) => return Err(vec![OrphanError::StillMounted { uid, mounts }]),
        Err(source) => return Err(vec![failed(source)]),
    }
    let mut errors = Vec::new();
    // PLUGIN/VOLUME, and VOLUME/CONTAINER/INDEX: what stands at this depth was a mount point and is empty by rights.
    // A subPath's may be a file, bound or not; a file among the volumes is a stray.
    for (top, depth, files) in [("volumes", 2, false), (crate::subpath::SUBPATHS_DIR, 3, true)] {
        remove_mount_points(&pod_dir.join(top), depth, files, &mut |path, left| {
            errors.push(match left {
                Ok(source) => OrphanError::VolumeLeft { uid: uid.clone(), path: path.to_owned(), source },
                Err(source) => failed(source),
            });
        });
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    remove_tree(proc_root, pod_dir).map_err(|e| vec![failed(e)])
}

/// Removes what stands `depth` levels below `dir`, empty directories (and `files`) only, and the levels above where that leaves them empty.
/// `report` is told of what could not be removed (Ok), and of any other failure (Err).
fn remove_mount_points(
    dir: &Path,
    depth: usize,
    files: bool,
    report: &mut dyn FnMut(&Path, std::result::Result<io::Error, Failed>),
) {
    if depth == 0 {
        let removed = match std::fs::remove_dir(dir) {
            Err(e) if files && e.kind() == io::ErrorKind::NotADirectory => std::fs::remove_file(dir),
            other => other,
        };
        if let Err(error) = found(removed) {
            report(dir, Ok(error));
        }
        return;
    }
    match entries(dir) {
        Ok(entries) => entries.iter().for_each(|entry| remove_mount_points(entry, depth - 1, files, report)),
        Err(error) => return report(dir, Err(error)),
    }
    match found(std::fs::remove_dir(dir)) {
        // Told of already.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {}
        Err(e) => report(dir, Err(Failed::new(format!("remove {}", dir.display()), e))),
        Ok(_) => {}
    }
}

/// Removes a volume's directory with all that is in it, as an emptyDir's end demands; refused while anything is mounted at or below
/// it. A missing one counts as removed. Blocks.
///
/// # Errors
/// Something is mounted there, or cannot be removed.
pub fn remove_volume_dir(proc_root: &Path, dir: &Path) -> Result<()> {
    remove_tree(proc_root, dir)
}

/// Removes a file or a directory tree that lies on one mount; refused, before anything is removed, while anything is mounted at or below
/// it. Symbolic links are removed, not followed. A missing one counts as removed. Blocks.
///
/// # Errors
/// Something is mounted there, or cannot be removed.
pub fn remove_tree(proc_root: &Path, path: &Path) -> Result<()> {
    let mounts = mounts_below(proc_root, path)?;
    if let Some(mount) = mounts.first() {
        let why = format!("cannot delete directory {}: it is a mount point", mount.display());
        return Err(Failed::other(format!("remove {}", path.display()), why));
    }
    remove_at(path).on("remove", path)
}

fn mounts_below(proc_root: &Path, path: &Path) -> Result<Vec<PathBuf>> {
    let table = MountTable::read(proc_root)?;
    Ok(table.at_or_below(&real(path)).into_iter().map(|m| m.mount_point.clone()).collect())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let Some(list) = found(std::fs::read_dir(dir)).on("list", dir)? else { return Ok(Vec::new()) };
    list.map(|entry| entry.map(|e| e.path()).on("list", dir)).collect()
}

/// What tells one mount from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MountKey {
    device: (u32, u32),
    /// None before kernel 5.8; the mount table was asked anyhow.
    id: Option<u64>,
}

fn mount_key(fd: BorrowedFd<'_>) -> rustix::io::Result<MountKey> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE | StatxFlags::MNT_ID)?;
    let known = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(MountKey { device: (stat.stx_dev_major, stat.stx_dev_minor), id: known.then_some(stat.stx_mnt_id) })
}

/// Deeper directories are moved up to the root of the removal first: descriptors and stack stay bounded, however deep a container nests.
const MAX_DEPTH: usize = 64;

struct Removal {
    root: OwnedFd,
    mount: MountKey,
    /// Directories moved up into the root.
    moved: Vec<CString>,
}

fn remove_at(path: &Path) -> io::Result<()> {
    match rustix::fs::unlinkat(CWD, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e.into()),
    }
    let root = open_dir(CWD, path)?;
    let mount = mount_key(root.as_fd())?;
    let mut removal = Removal { root, mount, moved: Vec::new() };
    let mut outcome = removal.empty(removal.root.try_clone()?, 0);
    while let Some(name) = removal.moved.pop() {
        let root = removal.root.try_clone()?;
        outcome = outcome.and(removal.directory(root.as_fd(), &name, 1));
    }
    outcome?;
    match rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn open_dir(at: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

impl Removal {
    /// Removes everything in this directory; goes on after a failure and answers the first.
    fn empty(&mut self, dir: OwnedFd, depth: usize) -> io::Result<()> {
        let mut first = Ok(());
        // Removing while reading may hide entries from the reader; a pass that finds nothing ends it.
        for _ in 0..8 {
            let mut seen = false;
            for entry in Dir::read_from(&dir)? {
                let entry = entry?;
                let name = entry.file_name();
                if matches!(name.to_bytes(), b"." | b"..") {
                    continue;
                }
                seen = true;
                let outcome = match entry.file_type() {
                    FileType::Directory => self.directory(dir.as_fd(), name, depth + 1),
                    FileType::Unknown => match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
                        Err(Errno::ISDIR | Errno::PERM) => self.directory(dir.as_fd(), name, depth + 1),
                        other => gone(other),
                    },
                    _ => gone(rustix::fs::unlinkat(&dir, name, AtFlags::empty())),
                };
                first = first.and(outcome);
            }
            if !seen || first.is_err() {
                break;
            }
        }
        first
    }

    fn directory(&mut self, parent: BorrowedFd<'_>, name: &CStr, depth: usize) -> io::Result<()> {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            other => return gone(other),
        }
        let dir = match open_dir(parent, name) {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        if mount_key(dir.as_fd())? != self.mount {
            return Err(io::Error::other(format!(
                "cannot delete directory {}: it is a mount point",
                name.to_string_lossy()
            )));
        }
        if depth >= MAX_DEPTH {
            let moved = CString::new(format!(".deleting~{}", rand::random::<u64>()))?;
            rustix::fs::renameat(parent, name, &self.root, moved.as_c_str())?;
            self.moved.push(moved);
            return Ok(());
        }
        self.empty(dir, depth)?;
        gone(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR))
    }
}

fn gone(outcome: rustix::io::Result<()>) -> io::Result<()> {
    match outcome {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
#[path = "remove_tests.rs"]
mod tests;
