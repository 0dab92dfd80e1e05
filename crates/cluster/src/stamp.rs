//! Tells whether a file is still the one that was read.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What identifies a version of a file, through symlinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(u64, u64, i64, i64, u64);

impl Stamp {
    /// The file's stamp now; None when it cannot be looked at.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let m = std::fs::metadata(path).ok()?;
        Some(Self(m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.size()))
    }
}
