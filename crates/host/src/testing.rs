//! Helpers of this crate's tests.

use std::path::{Path, PathBuf};

/// Writes a fixture file, its directories included.
pub(crate) fn put(root: &Path, path: &str, text: &str) -> PathBuf {
    let full = root.join(path);
    std::fs::create_dir_all(full.parent().unwrap()).unwrap();
    std::fs::write(&full, text).unwrap();
    full
}

/// Reads a file as text.
pub(crate) fn get(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

/// True when mounts may be made; says so when not.
pub(crate) fn may_mount() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// A temporary directory whose mounts are undone when it goes, also when the test fails.
pub(crate) struct MountDir(pub(crate) tempfile::TempDir);

impl MountDir {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for MountDir {
    fn drop(&mut self) {
        let _ = crate::mount::unmount_below(Path::new("/proc"), self.0.path());
    }
}
