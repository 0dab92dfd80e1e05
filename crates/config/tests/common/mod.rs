//! Files in memory, and helpers that the tests share.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use config::load::DirEntry;
use config::{Files, Host, Loaded, load, parse_flags};

/// Files by absolute path.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory(pub(crate) BTreeMap<PathBuf, Vec<u8>>);

impl Memory {
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let files = files.iter();
        Self(files.map(|(p, t)| (PathBuf::from(p), t.as_bytes().to_vec())).collect())
    }
}

impl Files for Memory {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0.get(path).cloned().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut found = BTreeMap::new();
        for file in self.0.keys() {
            if let Ok(below) = file.strip_prefix(path) {
                let mut parts = below.iter();
                if let Some(first) = parts.next() {
                    let name = first.to_string_lossy().into_owned();
                    found.insert(name, parts.next().is_some());
                }
            }
        }
        if found.is_empty() {
            return Err(io::Error::from(io::ErrorKind::NotFound));
        }
        // Not in order: sorting is the loader's work.
        let entries = found.into_iter().rev();
        Ok(entries.map(|(name, is_dir)| DirEntry { name, is_dir }).collect())
    }
}

/// Loads on a host with cgroup v2 (or v1) that works in `/w`.
pub(crate) fn load_with(files: &Memory, args: &[&str], cgroup_v2: bool) -> Loaded {
    let args: Vec<_> = args.iter().map(|a| (*a).to_owned()).collect();
    let flags = parse_flags(&args).unwrap();
    let host = Host { cgroup_v2, working_dir: PathBuf::from("/w") };
    load(&flags, files, &host)
}
