//! Looks at the host. Nothing here judges, and nothing hangs: each look has a thread and a deadline of its own.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use config::{Flags, KubeletConfiguration};
use host::cgroup::{CgroupLayout, CgroupVersion};
use jiff::Timestamp;
use serve::client::ClientError;

use super::facts::{Cgroups, Clock, HostFacts, Listener, Place, PlaceState, Resolver, Role, Seen};
use crate::node::{self, CGROUPS, PROC, SYS};

use super::judge::{host::SYSCTLS, ports::wanted_ports};

/// How long one look may take.
const DEADLINE: Duration = Duration::from_secs(3);
/// How long a hung agent is waited for; the client gives up after 10 s by itself.
const AGENT_DEADLINE: Duration = Duration::from_secs(11);

/// A look that is under way.
pub(super) struct Look<T> {
    answer: mpsc::Receiver<Seen<T>>,
    until: Instant,
    limit: Duration,
}

/// Starts a look on a thread of its own. A thread that hangs (a dead network filesystem) is left behind.
pub(super) fn look<T: Send + 'static>(limit: Duration, f: impl FnOnce() -> Seen<T> + Send + 'static) -> Look<T> {
    let (send, answer) = mpsc::channel();
    // Nobody may wait for the answer any more.
    std::thread::spawn(move || drop(send.send(f())));
    Look { answer, until: Instant::now() + limit, limit }
}

impl<T> Look<T> {
    /// Its result.
    pub(super) fn end(self) -> Seen<T> {
        match self.answer.recv_timeout(self.until.saturating_duration_since(Instant::now())) {
            Ok(seen) => seen,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("no answer within {} s", self.limit.as_secs())),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err("the look itself failed".to_owned()),
        }
    }
}

/// The text of a failure of crate `host`.
fn full<T>(result: host::Result<T>) -> Seen<T> {
    result.map_err(|e| e.full())
}

fn io_text<T>(what: &str, path: &Path, result: io::Result<T>) -> Seen<T> {
    result.map_err(|e| format!("{what} {}: {e}", path.display()))
}

/// The cgroup filesystem at its usual place.
pub(super) fn cgroups() -> Seen<Cgroups> {
    let layout = full(CgroupLayout::detect(Path::new(CGROUPS), Path::new(PROC)))?;
    let v2 = layout.version == CgroupVersion::V2;
    let controllers = if v2 { layout.offered } else { layout.mounts.into_keys().collect() };
    Ok(Cgroups { v2, controllers })
}

/// Looks at everything but the runtime. `image_place` is where the runtime keeps its images.
pub(super) fn host(
    flags: &Flags,
    config: &KubeletConfiguration,
    cgroups: Seen<Cgroups>,
    image_place: Option<PathBuf>,
) -> HostFacts {
    let proc = || PathBuf::from(PROC);
    let mut places = vec![(Role::Root, flags.root_dir().to_owned()), (Role::Logs, PathBuf::from(&config.pod_logs_dir))];
    if !config.static_pod_path.is_empty() {
        places.push((Role::Manifests, PathBuf::from(&config.static_pod_path)));
    }
    places.extend(image_place.map(|p| (Role::Images, p)));
    let places: Vec<_> = places
        .into_iter()
        .map(|(role, path)| {
            let there = path.clone();
            (role, path, look(DEADLINE, move || place(role, &there)))
        })
        .collect();

    let root_dir = flags.root_dir().to_owned();
    let agent = look(AGENT_DEADLINE, move || match crate::cli::ask(&root_dir, "/v1/node") {
        Ok(node) => Ok(Some(node)),
        Err(ClientError::NotRunning { .. }) => Ok(None),
        Err(other) => Err(crate::table::chain(&other)),
    });
    let ports: Vec<u16> = wanted_ports(config).iter().map(|w| w.address.port()).collect();
    let listeners = look(DEADLINE, move || listeners(Path::new(PROC), &ports));
    let memory = look(DEADLINE, move || full(host::proc::memory(&proc())));
    let resolv_conf = PathBuf::from(&config.resolv_conf);
    let resolver = look(DEADLINE, move || {
        if resolv_conf.as_os_str().is_empty() {
            return Ok(Resolver::default());
        }
        let text = io_text("read", &resolv_conf, fs::read(&resolv_conf))?;
        let behind_stub = Path::new("/run/systemd/resolve/resolv.conf").exists();
        Ok(Resolver { text: String::from_utf8_lossy(&text).into_owned(), behind_stub })
    });
    let clock = look(DEADLINE, || Ok(clock()));

    let now_clock = || Clock { now: Timestamp::now(), hardware: None, keeper: None };
    HostFacts {
        euid: rustix::process::geteuid().as_raw(),
        init: fs::read_to_string("/proc/1/comm").map(|s| s.trim().to_owned()).map_err(|e| e.to_string()),
        node_name: node::name(flags).map_err(|e| e.to_string()),
        cgroups,
        memory: memory.end(),
        swap: full(host::proc::swap_devices(&proc())),
        sysctls: SYSCTLS.iter().map(|&name| (name, host::proc::read_sysctl(&proc(), name).ok())).collect(),
        cpus: full(host::proc::cpu_count(Path::new(SYS))),
        pids: full(host::proc::max_pids(&proc()).and_then(|max| Ok((max, host::proc::used_pids(&proc())?)))),
        listeners: listeners.end(),
        oom_score: oom_score(&proc(), config.oom_score_adj),
        resolver: resolver.end(),
        clock: clock.end().unwrap_or_else(|_| now_clock()),
        places: places.into_iter().map(|(role, path, look)| Place { role, path, state: look.end() }).collect(),
        iptables: in_path("iptables"),
        agent: agent.end(),
    }
}

/// Takes the agent's score for a moment: lowering it needs the same right that the agent needs.
fn oom_score(proc: &Path, score: i32) -> Seen<()> {
    let path = proc.join("self/oom_score_adj");
    let before = io_text("read", &path, fs::read_to_string(&path))?;
    let tried = full(host::proc::write_oom_score_adj(proc, None, score));
    if let Ok(before) = before.trim().parse() {
        // Raising it again is always allowed; and this process is about to end.
        let _ = host::proc::write_oom_score_adj(proc, None, before);
    }
    tried
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn place(role: Role, path: &Path) -> Seen<PlaceState> {
    let directory = match fs::metadata(path) {
        Ok(meta) => Some(meta.is_dir()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(format!("look at {}: {e}", path.display())),
    };
    let there = path.ancestors().find(|p| p.is_dir()).unwrap_or(Path::new("/"));
    let writable = match role {
        Role::Root | Role::Logs => writable(there),
        Role::Manifests => io_text("list", there, fs::read_dir(there)).map(drop),
        Role::Images => Ok(()),
    };
    let device = fs::metadata(there).ok().map(|meta| meta.dev());
    Ok(PlaceState { directory, writable, filesystem: full(host::fsx::filesystem(there)), device })
}

/// Makes a file and removes it: rights, read-only mounts and quotas all show.
fn writable(dir: &Path) -> Seen<()> {
    let probe = dir.join(format!(".rubelet-check-{}", std::process::id()));
    io_text("make a file in", dir, fs::OpenOptions::new().write(true).create_new(true).open(&probe))?;
    io_text("remove", &probe, fs::remove_file(&probe))
}

fn clock() -> Clock {
    let hardware = fs::read_to_string("/sys/class/rtc/rtc0/since_epoch").ok();
    Clock {
        now: Timestamp::now(),
        hardware: hardware.and_then(|t| t.trim().parse().ok()),
        keeper: keeper(Path::new(PROC)),
    }
}

/// Programs that keep the clock, as the kernel cuts their names.
const KEEPERS: [&str; 8] =
    ["chronyd", "systemd-timesyn", "ntpd", "ntpd-rs", "ntp-daemon", "openntpd", "ptp4l", "phc2sys"];

fn keeper(proc: &Path) -> Option<String> {
    if Path::new("/run/systemd/timesync/synchronized").exists() {
        return Some("systemd-timesyncd, synchronized".to_owned());
    }
    let pids = host::proc::pids(proc).ok()?;
    let mut names = pids.iter().filter_map(|pid| fs::read_to_string(proc.join(format!("{pid}/comm"))).ok());
    names.find(|n| KEEPERS.contains(&n.trim())).map(|n| n.trim().to_owned())
}

/// Who listens on these ports.
fn listeners(proc: &Path, ports: &[u16]) -> Seen<Vec<Listener>> {
    let mut sockets = Vec::new();
    for name in ["net/tcp", "net/tcp6"] {
        let path = proc.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => sockets.extend(listening(&text)),
            // A kernel without IPv6.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(format!("read {}: {e}", path.display())),
        }
    }
    sockets.retain(|(address, _)| ports.contains(&address.port()));
    let owners = if sockets.is_empty() { HashMap::new() } else { owners(proc, &sockets) };
    let listener = |(address, inode)| Listener { address, process: owners.get(&inode).cloned() };
    Ok(sockets.into_iter().map(listener).collect())
}

/// Local address and inode of each listening socket in `/proc/net/tcp` or `tcp6`.
fn listening(table: &str) -> Vec<(SocketAddr, u64)> {
    const LISTEN: &str = "0A";
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (address, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
            if *state != LISTEN {
                return None;
            }
            let (ip, port) = address.split_once(':')?;
            Some((SocketAddr::new(kernel_ip(ip)?, u16::from_str_radix(port, 16).ok()?), inode.parse().ok()?))
        })
        .collect()
}

/// Words of 32 bits in the machine's byte order, in hexadecimal.
fn kernel_ip(hex: &str) -> Option<IpAddr> {
    let words: Option<Vec<u32>> =
        (0..hex.len() / 8).map(|i| u32::from_str_radix(hex.get(i * 8..i * 8 + 8)?, 16).ok()).collect();
    let bytes: Vec<u8> = words?.into_iter().flat_map(u32::to_ne_bytes).collect();
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(|b| Ipv4Addr::from(b).into()),
        16 => <[u8; 16]>::try_from(bytes).ok().map(|b| Ipv6Addr::from(b).into()),
        _ => None,
    }
}

/// Id and name of the process that holds each of these sockets; those of others can only be seen by root.
fn owners(proc: &Path, sockets: &[(SocketAddr, u64)]) -> HashMap<u64, (u32, String)> {
    let wanted: HashMap<String, u64> = sockets.iter().map(|(_, inode)| (format!("socket:[{inode}]"), *inode)).collect();
    let mut found = HashMap::new();
    for pid in host::proc::pids(proc).unwrap_or_default() {
        let Ok(files) = fs::read_dir(proc.join(format!("{pid}/fd"))) else { continue };
        for file in files.flatten() {
            let target = fs::read_link(file.path()).unwrap_or_default();
            if let Some(inode) = wanted.get(target.to_string_lossy().as_ref()) {
                let name = fs::read_to_string(proc.join(format!("{pid}/comm"))).unwrap_or_default();
                found.insert(*inode, (pid, name.trim().to_owned()));
            }
        }
        if found.len() == wanted.len() {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_hangs_ends() {
        let hung = look(Duration::from_millis(1), loop_forever);
        assert_eq!(hung.end(), Err("no answer within 0 s".to_owned()));
        assert_eq!(look(DEADLINE, || Ok(7)).end(), Ok(7));
    }

    fn loop_forever() -> Seen<()> {
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn the_kernels_table_of_sockets() {
        let v4 = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:2808 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n\
            1: 0100007F:2808 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1\n";
        assert_eq!(listening(v4), [("127.0.0.1:10248".parse().unwrap(), 4711)]);
        let v6 = "  sl  local_address                         remote_address                        st\n\
            0: 00000000000000000000000000000000:280A 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 99 1\n\
            1: 00000000000000000000000001000000:280F 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 98 1\n";
        assert_eq!(listening(v6), [("[::]:10250".parse().unwrap(), 99), ("[::1]:10255".parse().unwrap(), 98)]);
    }

    #[test]
    fn this_process_is_found_by_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = listeners(Path::new("/proc"), &[address.port()]).unwrap();
        let found = found.iter().find(|l| l.address == address).unwrap();
        assert_eq!(found.process.as_ref().map(|p| p.0), Some(std::process::id()));
    }

    #[test]
    fn places() {
        let dir = tempfile::tempdir().unwrap();
        let missing = place(Role::Root, &dir.path().join("a/b")).unwrap();
        assert_eq!((missing.directory, missing.writable), (None, Ok(())));
        assert_eq!(place(Role::Root, dir.path()).unwrap().directory, Some(true));
        fs::write(dir.path().join("f"), "").unwrap();
        assert_eq!(place(Role::Logs, &dir.path().join("f")).unwrap().directory, Some(false));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the probe is gone");
        let denied = writable(Path::new("/proc")).unwrap_err();
        assert!(denied.starts_with("make a file in /proc: "), "{denied}");
    }
}
