//! Reading many of the kernel's small files one after the other: a few system calls for each, and one buffer for all.

use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};

/// As long as the longest of them usually are, such as `memory.stat`.
const USUAL: usize = 8 << 10;

/// The buffer. It grows with the longest file that was read.
#[derive(Debug)]
pub struct SmallFiles(Vec<u8>);

impl Default for SmallFiles {
    fn default() -> Self {
        Self(vec![0; USUAL])
    }
}

impl SmallFiles {
    /// The text of a file that the kernel makes in one piece, which is how nearly all of procfs and of a control group are made: one read
    /// that does not fill the buffer gave all of it. None when it is not there, cannot be read or is no text.
    pub fn text<P: rustix::path::Arg>(&mut self, dir: impl AsFd, path: P) -> Option<&str> {
        self.read(dir, path, false)
    }

    /// The text of a file that the kernel makes line by line, by the page: tables and lists. Else as [`SmallFiles::text`].
    pub fn table<P: rustix::path::Arg>(&mut self, dir: impl AsFd, path: P) -> Option<&str> {
        self.read(dir, path, true)
    }

    /// The number that is all of a file's text.
    pub fn number<P: rustix::path::Arg>(&mut self, dir: impl AsFd, path: P) -> Option<u64> {
        self.text(dir, path)?.parse().ok()
    }

    fn read<P: rustix::path::Arg>(&mut self, dir: impl AsFd, path: P, by_the_page: bool) -> Option<&str> {
        let fd = rustix::fs::openat(dir, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut filled = 0;
        loop {
            if filled == self.0.len() {
                self.0.resize(filled * 2, 0);
            }
            match rustix::io::read(&fd, &mut self.0[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return None,
            }
            if !by_the_page && filled < self.0.len() {
                break;
            }
        }
        std::str::from_utf8(&self.0[..filled]).ok().map(str::trim_end)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;
    use crate::testing::put;

    #[test]
    fn files_of_any_length_one_after_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = SmallFiles::default();
        for length in [0, 1, USUAL - 1, USUAL, USUAL + 1, 5 * USUAL, 3] {
            let text = "x".repeat(length);
            let path = put(dir.path(), "file", &text);
            assert_eq!(files.text(CWD, &path), Some(text.as_str()));
            assert_eq!(files.table(CWD, &path), Some(text.as_str()));
        }
        let path = put(dir.path(), "number", "17\n");
        assert_eq!(files.number(CWD, &path), Some(17));
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(files.text(CWD, &path), None);
        assert_eq!(files.text(CWD, dir.path()), None);
        assert_eq!(files.text(CWD, dir.path().join("none")), None);
    }

    #[test]
    fn tables_of_the_kernel() {
        // Longer than a page on any machine, and made line by line.
        let path = "/proc/kallsyms";
        let Ok(whole) = std::fs::read_to_string(path) else { return };
        assert!(SmallFiles::default().table(CWD, path) == Some(whole.trim_end()));
    }
}
