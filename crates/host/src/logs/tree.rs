//! The system's log directory (`/var/log`) as people may look at it: directories, regular files, and links that stay within it or within the
//! pods' logs.
//!
//! Whoever can write there (a pod with a hostPath volume) could otherwise have the agent show any file of the host by a link.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{FileType, Mode, OFlags};

use crate::safe_path::{open_beneath, open_root};

/// Where links may lead.
#[derive(Clone, Debug)]
pub struct LogTree {
    root: PathBuf,
    beside: Vec<PathBuf>,
}

/// What a path leads to.
#[derive(Debug)]
pub enum LogEntry {
    /// A directory's entries in order of name, and whether each is a directory itself.
    Directory {
        /// The entries.
        entries: Vec<(String, bool)>,
        /// When it was last changed.
        modified: Option<SystemTime>,
    },
    /// A regular file.
    File {
        /// Open for reading.
        file: File,
        /// Its size in bytes.
        length: u64,
        /// When it was last changed.
        modified: Option<SystemTime>,
    },
}

/// The error of a path that leads out of the tree.
fn escapes() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "path escapes from parent")
}

impl LogTree {
    /// The tree below `root`, with links also into the trees `beside` it.
    #[must_use]
    pub fn new(root: PathBuf, beside: Vec<PathBuf>) -> Self {
        Self { root, beside }
    }

    /// What this path names, with its links followed. Blocks.
    ///
    /// # Errors
    /// `NotFound` (also for what is neither a file nor a directory), `PermissionDenied` for what lies elsewhere, or what the system says.
    pub fn open(&self, relative: &str) -> io::Result<LogEntry> {
        if relative.contains('\0') {
            return Err(io::ErrorKind::NotFound.into());
        }
        let relative = plain(relative).ok_or_else(escapes)?;
        let real = std::fs::canonicalize(self.root.join(relative))?;
        let below = |root: &PathBuf| {
            let root = std::fs::canonicalize(root).ok()?;
            let rest = real.strip_prefix(&root).ok()?.to_owned();
            Some((root, rest))
        };
        let (root, rest) = [&self.root].into_iter().chain(&self.beside).find_map(below).ok_or_else(escapes)?;
        // Without a link now: one that was put there since is refused.
        let held = open_beneath(open_root(&root)?, &rest)?;
        let found = rustix::fs::fstat(&held)?;
        let kind = FileType::from_raw_mode(found.st_mode);
        if !kind.is_file() && !kind.is_dir() {
            return Err(io::ErrorKind::NotFound.into());
        }
        // The descriptor gives no bytes; this opens the very same file.
        let file = File::from(rustix::fs::open(
            format!("/proc/self/fd/{}", held.as_raw_fd()),
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
            Mode::empty(),
        )?);
        let data = file.metadata()?;
        let modified = data.modified().ok();
        if kind.is_file() {
            return Ok(LogEntry::File { file, length: data.len(), modified });
        }
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::read_from(&file)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                entries.push((name, entry.file_type().is_dir()));
            }
        }
        entries.sort();
        Ok(LogEntry::Directory { entries, modified })
    }
}

/// The path without `.` and `..`; None when it leads above its beginning.
fn plain(relative: &str) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for component in Path::new(relative).components() {
        match component {
            Component::Normal(part) => clean.push(part),
            Component::CurDir => {}
            Component::ParentDir if clean.pop() => {}
            _ => return None,
        }
    }
    Some(clean)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(tree: &LogTree, path: &str) -> Result<String, io::ErrorKind> {
        match tree.open(path).map_err(|e| e.kind())? {
            LogEntry::File { mut file, length, .. } => {
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                assert_eq!(length, text.len() as u64);
                Ok(text)
            }
            LogEntry::Directory { entries, .. } => Ok(format!("{entries:?}")),
        }
    }

    #[test]
    fn nothing_outside_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let (root, pods) = (dir.path().join("log"), dir.path().join("pods"));
        for (path, text) in [("log/a.log", "a"), ("log/sub/b.log", "b"), ("pods/0.log", "pod"), ("secret", "s")] {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        symlink("../a.log", root.join("sub/near")).unwrap();
        symlink(pods.join("0.log"), root.join("pod.log")).unwrap();
        symlink(dir.path().join("secret"), root.join("out")).unwrap();
        symlink(dir.path(), root.join("up")).unwrap();
        symlink("/etc", root.join("etc")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, root.join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let tree = LogTree::new(root.clone(), vec![pods]);
        let (denied, absent) = (Err(io::ErrorKind::PermissionDenied), Err(io::ErrorKind::NotFound));
        let ok = |text: &str| Ok(text.to_owned());
        for (path, expected) in [
            ("a.log", ok("a")),
            ("./sub//../a.log", ok("a")),
            ("sub/near", ok("a")),
            ("pod.log", ok("pod")),
            ("sub", ok(r#"[("b.log", false), ("near", false)]"#)),
            ("../secret", denied.clone()),
            ("sub/../../secret", denied.clone()),
            ("/etc/passwd", denied.clone()),
            ("out", denied.clone()),
            ("up/secret", denied.clone()),
            ("etc/passwd", denied.clone()),
            ("etc", denied.clone()),
            ("none", absent.clone()),
            ("a.log\0", absent.clone()),
            ("fifo", absent.clone()),
        ] {
            assert_eq!(read(&tree, path), expected, "{path}");
        }
        assert!(read(&tree, "").unwrap().contains(r#"("sub", true)"#));
        assert!(read(&tree, "loop").is_err());
        assert!(read(&tree, "a.log/x").is_err());
    }
}
