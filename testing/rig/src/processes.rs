//! Finding and ending the processes that work in one's own directory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

/// A process, safe against reuse of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start: u64,
}

impl Identity {
    /// The calling process.
    pub fn own() -> Self {
        let pid = std::process::id().cast_signed();
        Self { pid, start: start_time(pid).unwrap_or_default() }
    }

    /// True while it runs.
    pub fn alive(&self) -> bool {
        start_time(self.pid) == Some(self.start)
    }
}

fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // A zombie has ended: only its parent has not asked yet.
    if matches!(fields.first(), Some(&"Z" | &"X")) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// Sends a signal; a process that is gone is fine.
pub fn kill(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid).filter(|_| pid > 1) {
        let _ = kill_process(pid, signal);
    }
}

/// The programs that a stage starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// rubelet, or another kubelet.
    Kubelet,
    /// containerd.
    Containerd,
    /// containerd's shim, one a pod.
    Shim,
    /// The registry that serves image archives.
    Registry,
    /// etcd, the API server, the scheduler or the controller manager.
    ControlPlane,
}

fn program(argv: &[&[u8]]) -> Option<Program> {
    let name = |arg: &[u8]| arg.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
    match name(argv.first()?).as_slice() {
        b"containerd" => Some(Program::Containerd),
        b"containerd-shim-runc-v2" => Some(Program::Shim),
        b"etcd" | b"kube-apiserver" | b"kube-scheduler" | b"kube-controller-manager" => Some(Program::ControlPlane),
        n if n.starts_with(b"python") && name(argv.get(1)?) == b"registry.py" => Some(Program::Registry),
        // Whatever its name (`RUBELET_BIN`): it is told apart by the flag that every kubelet here gets.
        _ if argv.iter().any(|a| *a == b"--root-dir" || a.starts_with(b"--root-dir=")) => Some(Program::Kubelet),
        _ => None,
    }
}

/// Processes of these programs that were given a path below `dir` on their command line.
///
/// The directory is unique to its stage, so this finds exactly what the stage started, also when nobody kept the process ids.
pub fn working_in(dir: &Path) -> Vec<(i32, Program)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let argv: Vec<&[u8]> = line.split(|b| *b == 0).collect();
            let found = program(&argv)?;
            argv.iter().any(|arg| names(arg, dir)).then_some((pid, found))
        })
        .collect()
}

/// True when the argument is a path below `dir`, alone, after `=` or after `unix://`.
fn names(arg: &[u8], dir: &Path) -> bool {
    let dir = dir.as_os_str().as_bytes();
    let at = |start: usize| arg[start..].starts_with(dir) && matches!(arg.get(start + dir.len()), None | Some(b'/'));
    at(0) || (1..arg.len()).any(|i| matches!(arg[i - 1], b'=' | b'/') && arg[i] == b'/' && at(i))
}

/// The children of a process, of all its threads.
pub fn children(pid: i32) -> BTreeSet<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    lists.flat_map(|l| l.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<i32>>()).collect()
}

/// Ends the processes of one program below `dir`: `SIGTERM`, after `grace` `SIGKILL`. False when one is still there 5 s later.
pub fn end(dir: &Path, which: Program, grace: Duration) -> bool {
    let running = || -> Vec<i32> {
        working_in(dir)
            .into_iter()
            .filter(|(pid, p)| *p == which && start_time(*pid).is_some())
            .map(|(pid, _)| pid)
            .collect()
    };
    if grace > Duration::ZERO {
        for pid in running() {
            kill(pid, Signal::TERM);
        }
        if crate::poll(grace, || running().is_empty()) {
            return true;
        }
    }
    crate::poll(Duration::from_secs(5), || {
        for pid in running() {
            // What a shim started goes first: once it is orphaned, nothing leads to it any more.
            for child in children(pid).into_iter().filter(|_| which == Program::Shim) {
                kill(child, Signal::KILL);
            }
            kill(pid, Signal::KILL);
        }
        running().is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_itself_and_not_another_life() {
        let own = Identity::own();
        assert!(own.alive());
        assert!(!Identity { start: own.start + 1, ..own }.alive());
    }

    #[test]
    fn tells_programs_apart() {
        let of = |line: &str| program(&line.split(' ').map(str::as_bytes).collect::<Vec<_>>());
        assert_eq!(of("/usr/bin/containerd -c /x"), Some(Program::Containerd));
        assert_eq!(of("/usr/bin/containerd-shim-runc-v2 -address /x"), Some(Program::Shim));
        assert_eq!(of("target/release/rubelet --root-dir /x"), Some(Program::Kubelet));
        assert_eq!(of("/tmp/other --v=2 --root-dir=/x"), Some(Program::Kubelet));
        assert_eq!(of("python3 /w/lab/registry.py --port 1"), Some(Program::Registry));
        assert_eq!(of("/c/bin/etcd --data-dir=/x"), Some(Program::ControlPlane));
        assert_eq!(of("/c/bin/kube-apiserver --cert-dir=/x"), Some(Program::ControlPlane));
        assert_eq!(of("python3 /w/other.py"), None);
        assert_eq!(of("tail -f /x/containerd"), None);
    }

    #[test]
    fn matches_only_paths_below() {
        let dir = Path::new("/var/tmp/rubelet-e2e-1");
        for yes in [
            "/var/tmp/rubelet-e2e-1",
            "/var/tmp/rubelet-e2e-1/a",
            "--root-dir=/var/tmp/rubelet-e2e-1/n",
            "unix:///var/tmp/rubelet-e2e-1/c.sock",
        ] {
            assert!(names(yes.as_bytes(), dir), "{yes}");
        }
        for no in ["/var/tmp/rubelet-e2e-10/a", "/home/var/tmp/rubelet-e2e-1/a", "x", ""] {
            assert!(!names(no.as_bytes(), dir), "{no}");
        }
    }
}
