//! Paths below a directory that someone else may change at the same time: no symbolic link is ever followed.
//!
//! openat2(2) with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS` does it in one call; where the kernel (before 5.6) or a seccomp filter does not
//! allow it, the same is done component by component.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Attempt, Result};

/// The plain parts of a relative path. `..`, an absolute path and the like are refused; `.` is dropped.
///
/// # Errors
/// InvalidInput.
fn parts(relative: &Path) -> io::Result<Vec<&std::ffi::OsStr>> {
    let mut parts = Vec::new();
    for component in relative.components() {
        match component {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain relative path")),
        }
    }
    Ok(parts)
}

/// Opens a directory that is under the agent's control, as the root for the functions here. It must not be a symbolic link itself.
///
/// # Errors
/// It is not there, or no directory.
pub fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, root, flags, Mode::empty())?)
}

/// Opens (`O_PATH`) what this relative path names below root. Mount points on the way are crossed. Blocks.
///
/// # Errors
/// A part is missing, or is a symbolic link (`ELOOP`).
pub fn open_beneath(root: impl AsFd, relative: &Path) -> io::Result<OwnedFd> {
    let parts = parts(relative)?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    if parts.is_empty() {
        return Ok(rustix::fs::openat(root, ".", flags, Mode::empty())?);
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(&root, relative, flags, Mode::empty(), resolve) {
        Err(Errno::NOSYS | Errno::PERM) => open_by_parts(root, &parts),
        other => Ok(other?),
    }
}

/// Opens for reading what a descriptor without bytes (`O_PATH`) holds: the very same file, whatever its name is by now. Anything but a regular file is
/// refused: a pipe or a device would hold the reader up.
///
/// # Errors
/// InvalidInput: it is no regular file; or a system call fails.
pub(crate) fn open_held(held: impl AsFd) -> io::Result<File> {
    let held = held.as_fd();
    if !FileType::from_raw_mode(rustix::fs::fstat(held)?.st_mode).is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(format!("/proc/self/fd/{}", held.as_raw_fd()))
}

/// Reads a regular file below a directory that is under the agent's control, its first `max` bytes at the most; None when it is not there. Blocks.
///
/// # Errors
/// A part is a symbolic link, or a system call fails.
pub fn read_beneath(root: &Path, relative: &Path, max: u64) -> Result<Option<Vec<u8>>> {
    let path = root.join(relative);
    let opened = open_root(root).and_then(|root| open_beneath(&root, relative));
    let Some(fd) = crate::error::found(opened).on("open", &path)? else { return Ok(None) };
    let file = open_held(fd).on("read", &path)?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, max), &mut bytes).on("read", &path)?;
    Ok(Some(bytes))
}

fn open_by_parts(root: impl AsFd, parts: &[&std::ffi::OsStr]) -> io::Result<OwnedFd> {
    let mut at = root.as_fd().try_clone_to_owned()?;
    for part in parts {
        at = rustix::fs::openat(&at, *part, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&at)?.st_mode).is_symlink() {
            return Err(Errno::LOOP.into());
        }
    }
    Ok(at)
}

/// Makes the directories of this relative path below `at`, each new one with exactly this mode whatever the umask is, and opens
/// (`O_PATH`) the last. Directories that are there are kept as they are. Blocks.
///
/// # Errors
/// A part is there and no directory (a symbolic link included), or cannot be made.
pub fn make_dirs_at(at: impl AsFd, relative: &Path, mode: u32) -> io::Result<OwnedFd> {
    let mut at = at.as_fd().try_clone_to_owned()?;
    let mode = Mode::from_raw_mode(mode & 0o7777);
    let base = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for part in parts(relative)? {
        match rustix::fs::mkdirat(&at, part, mode) {
            Ok(()) => {
                let made = rustix::fs::openat(&at, part, OFlags::RDONLY | base, Mode::empty())?;
                // mkdir(2) obeys the umask and drops setgid.
                rustix::fs::fchmod(&made, mode)?;
                at = made;
            }
            Err(Errno::EXIST) => at = rustix::fs::openat(&at, part, OFlags::PATH | base, Mode::empty())?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(at)
}

/// As [`make_dirs_at`], below a root given by its path.
///
/// # Errors
/// As [`make_dirs_at`]; also when the root is missing or a symbolic link.
pub fn make_dirs_beneath(root: &Path, relative: &Path, mode: u32) -> Result<OwnedFd> {
    open_root(root)
        .and_then(|at| make_dirs_at(at, relative, mode))
        .attempt(|| format!("make directory {} in {}", relative.display(), root.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::testing::put;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "outside/secret", "s");
        put(dir.path(), "root/a/b/file", "f");
        symlink("../outside", dir.path().join("root/up")).unwrap();
        symlink("/etc", dir.path().join("root/abs")).unwrap();
        symlink("a", dir.path().join("root/inner")).unwrap();
        dir
    }

    #[test]
    fn only_plain_parts_are_followed() {
        let dir = tree();
        let root = open_root(&dir.path().join("root")).unwrap();
        for (by_parts, name) in [(false, "openat2"), (true, "by parts")] {
            let open = |path: &str| match by_parts {
                false => open_beneath(&root, Path::new(path)),
                true => open_by_parts(&root, &parts(Path::new(path))?),
            };
            let same = rustix::fs::fstat(open("a/b/file").unwrap()).unwrap().st_ino;
            assert_eq!(same, std::fs::metadata(dir.path().join("root/a/b/file")).unwrap().ino(), "{name}");
            for link in ["up/secret", "up", "abs/passwd", "inner/b", "inner"] {
                assert_eq!(open(link).unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()), "{name} {link}");
            }
            assert_eq!(open("a/missing").unwrap_err().kind(), io::ErrorKind::NotFound, "{name}");
            for bad in ["../outside", "/etc", "a/../../outside"] {
                assert_eq!(open(bad).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name} {bad}");
            }
        }
    }

    #[test]
    fn new_directories_have_the_mode_and_links_are_refused() {
        let dir = tree();
        let root = dir.path().join("root");
        make_dirs_beneath(&root, Path::new("a/x/y"), 0o2777).unwrap();
        for new in ["a/x", "a/x/y"] {
            assert_eq!(std::fs::metadata(root.join(new)).unwrap().mode() & 0o7777, 0o2777, "{new}");
        }
        let before = std::fs::metadata(root.join("a")).unwrap().mode();
        make_dirs_beneath(&root, Path::new("a/x"), 0o700).unwrap();
        assert_eq!(std::fs::metadata(root.join("a")).unwrap().mode(), before);
        assert!(make_dirs_beneath(&root, Path::new("up/x"), 0o755).is_err());
        assert!(make_dirs_beneath(&root, Path::new("a/b/file/x"), 0o755).is_err());
        assert!(!dir.path().join("outside/x").exists());
        assert!(make_dirs_beneath(&root.join("inner"), Path::new("x"), 0o755).is_err(), "the root itself is a link");
    }
}
