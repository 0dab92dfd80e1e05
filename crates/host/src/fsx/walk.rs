//! One walk over a directory tree that neither follows symbolic links nor leaves the filesystem, by descriptors, so that whoever owns
//! the tree cannot lead it elsewhere.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Each level holds a descriptor; deeper than this no program can reach by a path (4096 bytes).
const MAX_DEPTH: usize = 2048;

/// One file of the tree.
pub(super) struct Visit<'a> {
    /// The directory that it is in.
    pub parent: BorrowedFd<'a>,
    /// Its name there.
    pub name: &'a CStr,
    /// Its status, of itself and not what it links to.
    pub stat: &'a Stat,
    /// For a directory: open on it.
    pub opened: Option<BorrowedFd<'a>>,
}

struct Level {
    dir: Dir,
    name: CString,
    stat: Stat,
}

/// Visits everything in the tree, a directory after what is in it, the root last. What vanishes meanwhile is left out.
///
/// # Errors
/// A directory cannot be read, the tree is too deep, or the visitor fails.
pub(super) fn walk(root: &Path, visit: &mut dyn FnMut(Visit<'_>) -> io::Result<()>) -> io::Result<()> {
    let name = CString::new(root.as_os_str().as_encoded_bytes())?;
    // A root that is a symbolic link is the caller's choice.
    let stat = rustix::fs::statat(CWD, root, AtFlags::empty())?;
    if !FileType::from_raw_mode(stat.st_mode).is_dir() {
        return visit(Visit { parent: CWD, name: &name, stat: &stat, opened: None });
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let device = stat.st_dev;
    let mut levels = vec![Level { dir: Dir::new(rustix::fs::openat(CWD, root, flags, Mode::empty())?)?, name, stat }];
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.dir.read() else {
            let Some(done) = levels.pop() else { break };
            let parent = match levels.last() {
                Some(parent) => parent.dir.fd()?,
                None => CWD,
            };
            let opened = done.dir.fd()?;
            visit(Visit { parent: parent.as_fd(), name: &done.name, stat: &done.stat, opened: Some(opened) })?;
            continue;
        };
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let parent = level.dir.fd()?;
        let stat = match rustix::fs::statat(parent, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => continue,
            other => other?,
        };
        if stat.st_dev != device {
            continue;
        }
        if !FileType::from_raw_mode(stat.st_mode).is_dir() {
            visit(Visit { parent, name: entry.file_name(), stat: &stat, opened: None })?;
            continue;
        }
        let child = match rustix::fs::openat(parent, entry.file_name(), flags | OFlags::NOFOLLOW, Mode::empty()) {
            // Gone, or swapped for something else.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            other => other?,
        };
        let name = entry.file_name().to_owned();
        if levels.len() >= MAX_DEPTH {
            return Err(io::Error::other("directories are nested too deep"));
        }
        levels.push(Level { dir: Dir::new(child)?, name, stat });
    }
    Ok(())
}
