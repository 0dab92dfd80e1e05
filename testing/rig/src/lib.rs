//! A private containerd to run a kubelet on, and a private control plane for it to join: what `cargo xtask` and the end-to-end tests
//! stand on.
//!
//! A [`Stage`] is a directory below `/var/tmp` with a record of the names it took (bridge, network, cgroup root) before it made
//! anything; [`Stage::close`] removes all of it, and so does [`Remains::wipe`] later, from the record alone, when its owner was killed.
//! The same holds for a [`cluster::ControlPlane`]. Blocking and free of heavy dependencies, so that `cargo xtask` builds in seconds.

pub mod cgroup;
pub mod cluster;
pub mod containerd;
pub mod http;
pub mod iptables;
mod keeper;
pub mod kubelet;
pub mod mounts;
pub mod network;
pub mod processes;
mod record;
pub mod registry;
mod stage;

pub use keeper::{bound, spawn};
pub use record::{Record, Remains, Taken, remains};
pub use stage::{Stage, remove_log_links};

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where images and reference builds are kept: `RUBELET_LAB`, else `rubelet-lab` in the user's cache directory.
pub fn lab() -> PathBuf {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("RUBELET_LAB").unwrap_or_else(|| {
        var("XDG_CACHE_HOME")
            .unwrap_or_else(|| var("HOME").unwrap_or_else(|| "/root".into()).join(".cache"))
            .join("rubelet-lab")
    })
}

/// `N` TCP ports of the loopback address that are free now, all different.
///
/// # Errors
/// When the host gives no port.
pub fn free_ports<const N: usize>() -> std::io::Result<[u16; N]> {
    let held: Vec<TcpListener> = (0..N).map(|_| TcpListener::bind(("127.0.0.1", 0))).collect::<Result<_, _>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&held) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// Polls every 20 ms until `done` says true; false when `limit` has passed first.
pub fn poll(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if done() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The number of KiB that a line `NAME: NUMBER kB` of the kernel's tables gives.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// What /proc/meminfo says under this name, in KiB.
///
/// # Errors
/// It says nothing.
pub fn meminfo_kib(name: &str) -> std::io::Result<u64> {
    let nothing = || std::io::Error::other(format!("/proc/meminfo does not say {name} in kB"));
    kib(&std::fs::read_to_string("/proc/meminfo")?, name).ok_or_else(nothing)
}

/// The program `name` in `PATH` or in the system folders that a plain user's `PATH` lacks.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// The last `lines` lines of a file, or why it cannot be read.
pub fn tail(file: &Path, lines: usize) -> String {
    match std::fs::read(file) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
        Err(e) => format!("({}: {e})", file.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_differ() {
        let [a, b, c] = free_ports().unwrap();
        assert!(a != b && b != c && a != c && a != 0);
    }

    #[test]
    fn tail_gives_the_last_lines() {
        let file = std::env::temp_dir().join(format!("rig-tail-{}", std::process::id()));
        std::fs::write(&file, "a\nb\nc\n").unwrap();
        assert_eq!(tail(&file, 2), "b\nc");
        assert_eq!(tail(&file, 9), "a\nb\nc");
        std::fs::remove_file(&file).unwrap();
        assert!(tail(&file, 1).contains("No such file"));
    }
}
