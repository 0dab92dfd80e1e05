//! fsGroup: the group that owns a volume.

use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags};

use super::walk::{Visit, walk};
use crate::error::{Attempt, Result};

/// Gives a volume to a group: everything in it gets the group and `rw` for it (`r` for a read-only volume), directories also `x` and
/// setgid, so that new files belong to the group too. The root comes last, so that an interrupted run is seen as unfinished. With
/// `on_root_mismatch` (fsGroupChangePolicy OnRootMismatch) nothing is done when the root fits already. Answers how many files were
/// visited. A file that cannot be changed (read-only filesystem, `root_squash`) is logged and left, as the Go kubelet does. Blocks.
///
/// # Errors
/// The tree cannot be read.
pub fn set_fs_group(dir: &Path, gid: u32, read_only: bool, on_root_mismatch: bool) -> Result<u64> {
    let rw = if read_only { 0o440 } else { 0o660 };
    if on_root_mismatch {
        let stat = rustix::fs::stat(dir).on("stat", dir)?;
        let wanted = rw | 0o2110;
        let directory = FileType::from_raw_mode(stat.st_mode).is_dir();
        if directory && stat.st_gid == gid && stat.st_mode & wanted == wanted {
            return Ok(0);
        }
    }
    let mut visited = 0;
    let mut refused = 0_u64;
    walk(dir, &mut |file| {
        visited += 1;
        if let Err(error) = give(&file, gid, rw) {
            if refused == 0 {
                tracing::error!(volume = %dir.display(), file = ?file.name, %error, "setting volume ownership failed");
            }
            refused += 1;
        }
        Ok(())
    })
    .on("set the group of", dir)?;
    if refused > 1 {
        tracing::error!(volume = %dir.display(), refused, "setting volume ownership failed for several files");
    }
    Ok(visited)
}

fn give(file: &Visit<'_>, gid: u32, rw: u32) -> rustix::io::Result<()> {
    let kind = FileType::from_raw_mode(file.stat.st_mode);
    let now = file.stat.st_mode & 0o7777;
    let wanted = now | rw | if kind.is_dir() { 0o2110 } else { 0 };
    // chown(2) takes setuid and setgid from programs, so their mode is set again in any case.
    let chown = file.stat.st_gid != gid;
    let chowned = match chown {
        true => rustix::fs::chownat(file.parent, file.name, None, Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW),
        false => Ok(()),
    };
    // A link has no mode of its own; chmod would change what it points to.
    if kind.is_symlink() || (!chown && wanted == now) {
        return chowned;
    }
    let mode = Mode::from_raw_mode(wanted);
    let chmoded = match file.opened {
        Some(dir) => rustix::fs::fchmod(dir, mode),
        None => {
            // By a descriptor that cannot be a link: the name may have become one.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(file.parent, file.name, flags, Mode::empty())?;
            if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode).is_symlink() {
                return chowned;
            }
            rustix::fs::chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), mode)
        }
    };
    chowned.and(chmoded)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::testing::{may_mount, put};

    fn look(path: &Path) -> (u32, u32) {
        let meta = std::fs::symlink_metadata(path).unwrap();
        (meta.gid(), meta.mode() & 0o7777)
    }

    fn volume() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (file, mode) in [("vol/d/file", 0o600), ("vol/tool", 0o4755), ("outside", 0o600)] {
            let path = put(dir.path(), file, "");
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        for d in ["vol", "vol/d"] {
            std::fs::set_permissions(dir.path().join(d), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        symlink("../outside", dir.path().join("vol/link")).unwrap();
        dir
    }

    #[test]
    fn everything_is_given_to_the_group() {
        if !may_mount() {
            return;
        }
        let dir = volume();
        let vol = dir.path().join("vol");
        assert_eq!(set_fs_group(&vol, 10_000, false, false).unwrap(), 5);
        assert_eq!(look(&vol), (10_000, 0o2775));
        assert_eq!(look(&vol.join("d")), (10_000, 0o2775));
        assert_eq!(look(&vol.join("d/file")), (10_000, 0o660));
        assert_eq!(look(&vol.join("tool")), (10_000, 0o4775), "setuid survives");
        assert_eq!(look(&vol.join("link")).0, 10_000);
        assert_eq!(look(&dir.path().join("outside")), (std::fs::metadata(dir.path()).unwrap().gid(), 0o600));
    }

    #[test]
    fn read_only_and_root_mismatch() {
        if !may_mount() {
            return;
        }
        let dir = volume();
        let vol = dir.path().join("vol");
        set_fs_group(&vol, 10_000, true, true).unwrap();
        assert_eq!(look(&vol.join("d/file")), (10_000, 0o640));
        assert_eq!(look(&vol), (10_000, 0o2755));
        // The root fits: what is below is left alone.
        put(&vol, "new", "");
        std::os::unix::fs::chown(vol.join("new"), None, Some(1)).unwrap();
        assert_eq!(set_fs_group(&vol, 10_000, true, true).unwrap(), 0);
        assert_eq!(look(&vol.join("new")).0, 1);
        // Writable asks for more than the root has.
        assert!(set_fs_group(&vol, 10_000, false, true).unwrap() > 0);
        assert_eq!(look(&vol.join("new")).0, 10_000);
    }
}
