//! Mounts below one's own directory, and directories removed only when no mount is left in them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::mount::{UnmountFlags, unmount};

/// Mount points at or below `dir`, in the order they were made.
pub fn below(dir: &Path) -> Vec<PathBuf> {
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    info.lines().filter_map(|l| l.split(' ').nth(4)).map(unescape).filter(|m| m.starts_with(dir)).collect()
}

/// mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        match rest.get(at + 1..at + 4).and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &rest[at + 4..];
            }
            None => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    out.into()
}

/// Detaches every mount at or below `dir`, the newest first.
///
/// # Errors
/// Names the mount that the kernel does not let go.
pub fn detach(dir: &Path) -> Result<()> {
    // One mount point may carry several mounts, and a shared parent removes its children with it.
    for _ in 0..16 {
        let mounts = below(dir);
        if mounts.is_empty() {
            return Ok(());
        }
        for mount in mounts.iter().rev() {
            match unmount(mount, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
                Err(e) => {
                    return Err(e).with_context(|| format!("cannot unmount {}", mount.display()));
                }
            }
        }
    }
    bail!("mounts keep coming back below {}", dir.display())
}

/// Removes a directory tree, but never through a mount.
///
/// # Errors
/// When a mount is left in it or a file cannot be removed.
pub fn remove_tree(dir: &Path) -> Result<()> {
    if let Some(mount) = below(dir).first() {
        bail!("{} is still mounted: {} is left as it is", mount.display(), dir.display());
    }
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_escaped_mount_points() {
        assert_eq!(unescape(r"/a\040b\134c"), PathBuf::from(r"/a b\c"));
        assert_eq!(unescape(r"/a\9"), PathBuf::from(r"/a\9"));
        assert!(below(Path::new("/proc")).contains(&PathBuf::from("/proc")));
    }
}
