//! A cgroup root of one's own, on cgroup v1 (every hierarchy) and v2.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

const MOUNT: &str = "/sys/fs/cgroup";

/// True on a pure v2 host.
pub fn unified() -> bool {
    Path::new(MOUNT).join("cgroup.controllers").exists()
}

/// The mount points of all hierarchies: one on v2, one a controller on v1.
fn hierarchies() -> Vec<PathBuf> {
    if unified() {
        return vec![MOUNT.into()];
    }
    let entries = fs::read_dir(MOUNT).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

/// The directories of the cgroup `name` (as `/rubelet-demo-3`) that exist.
pub fn directories(name: &str) -> Vec<PathBuf> {
    hierarchies().iter().map(|h| h.join(name.trim_start_matches('/'))).filter(|d| d.is_dir()).collect()
}

/// Makes the cgroup in every hierarchy, with the controllers that are there handed down to it.
///
/// # Errors
/// When this process may not make cgroups, or the memory, cpu or pids controller is missing.
pub fn create(name: &str) -> Result<()> {
    let name = name.trim_start_matches('/');
    if unified() {
        let controllers = fs::read_to_string(format!("{MOUNT}/cgroup.controllers"))?;
        for need in ["cpu", "memory", "pids"] {
            if !controllers.split_whitespace().any(|c| c == need) {
                bail!("cgroup v2 without the {need} controller (has: {})", controllers.trim());
            }
        }
        let mut dir = PathBuf::from(MOUNT);
        for part in name.split('/') {
            for controller in controllers.split_whitespace() {
                // Some controllers (cpu with real-time processes) refuse; the kubelet says so when it needs that one.
                let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
            }
            dir.push(part);
            make(&dir)?;
        }
        return Ok(());
    }
    for hierarchy in hierarchies() {
        let mut dir = hierarchy.clone();
        for part in name.split('/') {
            let parent = dir.clone();
            dir.push(part);
            // A hierarchy that is mounted read-only or is no cgroup at all is not ours to use.
            if make(&dir).is_err() && !["cpu", "memory", "pids"].iter().any(|c| hierarchy.ends_with(c)) {
                break;
            }
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read_to_string(parent.join(file)) {
                    let _ = fs::write(dir.join(file), value.trim());
                }
            }
        }
    }
    for need in ["cpu", "memory", "pids"] {
        let dir = Path::new(MOUNT).join(need).join(name);
        if !dir.is_dir() {
            bail!("cannot make the cgroup {}: is the {need} controller mounted and writable?", dir.display());
        }
    }
    Ok(())
}

fn make(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("cannot make the cgroup {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Every directory of the cgroup and below it, the deepest first.
pub fn tree(name: &str) -> Vec<PathBuf> {
    fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                walk(&entry.path(), out);
            }
        }
        out.push(dir.to_owned());
    }
    let mut out = Vec::new();
    for dir in directories(name) {
        walk(&dir, &mut out);
    }
    out
}

/// The processes in the cgroup and below it.
pub fn processes(name: &str) -> BTreeSet<i32> {
    let files = tree(name).into_iter().filter_map(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok());
    files.flat_map(|f| f.lines().filter_map(|l| l.parse().ok()).collect::<Vec<i32>>()).filter(|p| *p > 0).collect()
}

/// Kills what runs in the cgroup and removes it.
///
/// # Errors
/// When something of it is still there after 10 s.
pub fn remove(name: &str) -> Result<()> {
    if name.trim_matches('/').is_empty() {
        bail!("refusing to remove the root cgroup");
    }
    let gone = crate::poll(Duration::from_secs(10), || {
        for pid in processes(name) {
            crate::processes::kill(pid, rustix::process::Signal::KILL);
        }
        for dir in tree(name) {
            let _ = fs::remove_dir(dir);
        }
        directories(name).is_empty()
    });
    if !gone {
        bail!("the cgroup {name} is still there: processes {:?}", processes(name));
    }
    Ok(())
}
