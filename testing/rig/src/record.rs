//! What was taken from the host, written down before anything is made, so that it can be given back also by another process.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::processes::{Identity, Program, end};
use crate::{mounts, stage};

/// `/var/tmp`: on a disk (unlike `/tmp` and `/run`, which may be small), and with short names, since socket paths end at 107 bytes.
const BASE: &str = "/var/tmp";
/// How the names of all directories begin.
const PREFIX: &str = "rubelet-";
const RECORD: &str = "record.json";

/// Who made a directory, and what it stands for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Whose: `demo`, `e2e`, …
    pub kind: String,
    /// The process that looks after it.
    pub owner: Identity,
    /// What a [`crate::Stage`] took of the host; a [`crate::cluster::ControlPlane`] takes nothing but its directory.
    #[serde(flatten)]
    pub host: Option<Taken>,
}

impl Record {
    /// Reads the record of a directory.
    ///
    /// # Errors
    /// When there is none, or it is not one.
    pub fn read(dir: &Path) -> Result<Self> {
        let file = dir.join(RECORD);
        let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is not a record", file.display()))
    }
}

/// What a stage took of the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Taken {
    /// Network bridge.
    pub bridge: String,
    /// Name of the CNI network.
    pub network: String,
    /// As `10.199.3.0/24`.
    pub subnet: String,
    /// cgroup root, as `/rubelet-stage-3`.
    pub cgroup: String,
    /// `net.ipv4.ip_forward` before.
    pub forwarding: String,
    /// True when the portmap plugin had no chains before.
    pub no_host_port_chains: bool,
    /// Shared folders that were not there before.
    pub missing_folders: Vec<PathBuf>,
}

impl Taken {
    /// The bridge's address, the first of the subnet, as CNI's host-local gives it.
    pub fn gateway(&self) -> String {
        let network = self.subnet.split('/').next().unwrap_or_default();
        format!("{}1", network.strip_suffix('0').unwrap_or(network))
    }
}

/// Makes the directory `name` with its record; None when the name is taken.
///
/// # Errors
/// When the directory or the record cannot be written.
pub(crate) fn claim(name: &str, kind: &str, taken: Option<&Taken>) -> Result<Option<PathBuf>> {
    let dir = Path::new(BASE).join(name);
    match fs::create_dir(&dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        other => other.with_context(|| format!("cannot make {}", dir.display()))?,
    }
    let record = Record { kind: kind.to_owned(), owner: Identity::own(), host: taken.cloned() };
    let text = serde_json::to_vec_pretty(&record)?;
    fs::write(dir.join(RECORD), text).with_context(|| format!("cannot write to {}", dir.display()))?;
    Ok(Some(dir))
}

/// What an earlier run left because it was killed.
#[derive(Debug)]
pub struct Remains {
    /// Its directory.
    pub dir: PathBuf,
    /// What it took.
    pub record: Record,
}

impl Remains {
    /// Removes everything of it.
    ///
    /// # Errors
    /// With every part that could not be removed.
    pub fn wipe(&self) -> Result<()> {
        match &self.record.host {
            Some(taken) => stage::wipe(&self.dir, taken),
            None => wipe_control_plane(&self.dir),
        }
    }
}

/// Ends what works in the directory of a control plane, and removes it.
///
/// # Errors
/// When a process does not end or a file cannot be removed.
pub(crate) fn wipe_control_plane(dir: &Path) -> Result<()> {
    if !end(dir, Program::ControlPlane, Duration::ZERO) {
        bail!("a part of the control plane does not end");
    }
    mounts::remove_tree(dir)
}

/// The directories whose owner is no more. Only one's own count: anybody may write to `/var/tmp`.
pub fn remains() -> Vec<Remains> {
    let user = rustix::process::geteuid().as_raw();
    let own =
        |dir: &Path| fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir() && m.uid() == user && m.mode() & 0o022 == 0);
    let entries = fs::read_dir(BASE).into_iter().flatten().flatten().map(|e| e.path());
    let mut found: Vec<Remains> = entries
        .filter(|dir| dir.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(PREFIX)) && own(dir))
        .filter_map(|dir| {
            let record = Record::read(&dir).ok()?;
            (!record.owner.alive()).then_some(Remains { dir, record })
        })
        .collect();
    found.sort_by(|a, b| a.dir.cmp(&b.dir));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_both_kinds() {
        let plane = r#"{"kind": "e2e", "owner": {"pid": 1, "start": 2}}"#;
        assert!(serde_json::from_str::<Record>(plane).unwrap().host.is_none());
        let stage = r#"{"kind": "demo", "owner": {"pid": 1, "start": 2}, "bridge": "rubelet3", "network": "n",
            "subnet": "10.199.3.0/24", "cgroup": "/c", "forwarding": "0", "no_host_port_chains": true, "missing_folders": []}"#;
        let record: Record = serde_json::from_str(stage).unwrap();
        assert_eq!(record.host.as_ref().unwrap().gateway(), "10.199.3.1");
        let again: Record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(again.host.unwrap().bridge, "rubelet3");
    }
}
