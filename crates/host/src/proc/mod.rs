//! Facts of the node from `/proc`, `/sys` and `/etc`. Everything here blocks (on pseudo files: briefly).
//!
//! `proc` is where procfs stands (`/proc`), `sys` where sysfs stands (`/sys`), `root` the node's root directory (`/`).

mod memory;
mod net;
mod node;
mod numa;
mod process;
mod traffic;

use std::path::Path;
use std::time::Duration;

pub use memory::{HugePages, MemoryInfo, huge_page_name, huge_pages, memory, swap_devices};
pub use model::machine::Machine;
pub use net::{
    DefaultRoute, InterfaceAddress, choose_host_ip, default_routes, detect_node_ip, interface_addresses,
    listening_ports, validate_node_ip,
};
pub use node::{machine, node_addresses};
pub use numa::{CpuPlace, NumaNode, NumaTopology, numa_topology};
pub use process::{ProcessInfo, pids, process, write_oom_score_adj};
pub use traffic::{
    CpuTopology, DiskTraffic, InterfaceTraffic, OpenFiles, Traffic, cpu_topology, disk_traffic, interface_traffic,
    open_files, open_files_limit,
};

use crate::error::{Attempt, Failed, Result, found};

pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).on("read", path)
}

fn read_number<T: std::str::FromStr>(path: &Path) -> Result<T> {
    read(path)?.trim().parse().map_err(|_| Failed::other(format!("read {}", path.display()), "not a number"))
}

/// The kernel's boot id; changes with every boot (Node status `bootID`).
///
/// # Errors
/// The file cannot be read.
pub fn boot_id(proc: &Path) -> Result<String> {
    Ok(read(&proc.join("sys/kernel/random/boot_id"))?.trim().to_owned())
}

/// The machine id (Node status `machineID`): `etc/machine-id`, else `var/lib/dbus/machine-id`; empty when neither is there.
///
/// # Errors
/// A file is there but cannot be read.
pub fn machine_id(root: &Path) -> Result<String> {
    first_of(&[root.join("etc/machine-id"), root.join("var/lib/dbus/machine-id")])
}

/// The machine's UUID (Node status `systemUUID`): from DMI, else the device tree, else the machine id; empty when unknown.
///
/// # Errors
/// A file is there but cannot be read.
pub fn system_uuid(sys: &Path, proc: &Path, root: &Path) -> Result<String> {
    first_of(&[
        sys.join("class/dmi/id/product_uuid"),
        proc.join("device-tree/system-id"),
        proc.join("device-tree/vm,uuid"),
        root.join("etc/machine-id"),
    ])
}

fn first_of(places: &[std::path::PathBuf]) -> Result<String> {
    for place in places {
        if let Some(text) = found(std::fs::read_to_string(place)).on("read", place)? {
            return Ok(text.trim_end_matches('\0').trim().to_owned());
        }
    }
    Ok(String::new())
}

/// The running kernel's release (Node status `kernelVersion`).
pub fn kernel_version() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// PRETTY_NAME of os-release (Node status `osImage`); `Linux` when it has none.
///
/// # Errors
/// Neither `etc/os-release` nor `usr/lib/os-release` can be read.
pub fn os_image(root: &Path) -> Result<String> {
    let path = root.join("etc/os-release");
    let text = match found(std::fs::read_to_string(&path)).on("read", &path)? {
        Some(text) => text,
        None => read(&root.join("usr/lib/os-release"))?,
    };
    let name = text.lines().find_map(|l| l.trim().strip_prefix("PRETTY_NAME="));
    Ok(name.map_or("Linux", |n| n.trim_matches(['"', '\''])).to_owned())
}

/// The node's host name as a node name: lower case, without surrounding space.
///
/// # Errors
/// The host name is empty.
pub fn hostname() -> Result<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase();
    match name.is_empty() {
        true => Err(Failed::other("read the host name", "empty hostname is invalid")),
        false => Ok(name),
    }
}

/// The number of CPUs that are online, whatever this process may use of them.
///
/// # Errors
/// `sys/devices/system/cpu/online` cannot be read or parsed.
pub fn cpu_count(sys: &Path) -> Result<usize> {
    Ok(online_cpus(sys)?.len())
}

/// The ids of the CPUs that are online, ascending.
///
/// # Errors
/// As [`cpu_count`].
pub fn online_cpus(sys: &Path) -> Result<Vec<usize>> {
    let path = sys.join("devices/system/cpu/online");
    parse_cpu_list(&read(&path)?)
        .filter(|cpus| !cpus.is_empty())
        .ok_or_else(|| Failed::other(format!("read {}", path.display()), "not a list of CPUs"))
}

/// A kernel CPU list as `0-3,7`.
pub(crate) fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

/// Existing `cpuN/thermal_throttle` directories as containers see them, to be masked.
///
/// # Errors
/// As [`cpu_count`].
pub fn thermal_throttle_paths(sys: &Path) -> Result<Vec<String>> {
    let paths = online_cpus(sys)?.into_iter().map(|cpu| format!("devices/system/cpu/cpu{cpu}/thermal_throttle"));
    Ok(paths.filter(|p| sys.join(p).exists()).map(|p| format!("/sys/{p}")).collect())
}

/// How many processes and threads the node can have: the smaller of `kernel.pid_max` and `kernel.threads-max`.
///
/// # Errors
/// A file cannot be read.
pub fn max_pids(proc: &Path) -> Result<u64> {
    let pid_max = read_number::<u64>(&proc.join("sys/kernel/pid_max"))?;
    let threads_max = read_number::<u64>(&proc.join("sys/kernel/threads-max"))?;
    Ok(pid_max.min(threads_max))
}

/// How many processes and threads there are now: the second number of `loadavg`'s `running/existing`.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn used_pids(proc: &Path) -> Result<u64> {
    let path = proc.join("loadavg");
    let text = read(&path)?;
    let field = text.split_whitespace().nth(3).and_then(|f| f.split_once('/'));
    field
        .and_then(|(_, n)| n.parse().ok())
        .ok_or_else(|| Failed::other(format!("read {}", path.display()), "no count of processes"))
}

/// How long the node is up.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn uptime(proc: &Path) -> Result<Duration> {
    let path = proc.join("uptime");
    let text = read(&path)?;
    text.split_whitespace()
        .next()
        .and_then(|s| s.parse::<f64>().ok())
        .and_then(|s| Duration::try_from_secs_f64(s).ok())
        .ok_or_else(|| Failed::other(format!("read {}", path.display()), "not a number of seconds"))
}

/// The path of a sysctl below `proc/sys`. The first separator decides the form: `net.ipv4.conf.eth0/1.forwarding` and
/// `net/ipv4/conf/eth0.1/forwarding` are the same (sysctl(8)).
fn sysctl_path(proc: &Path, name: &str) -> Option<std::path::PathBuf> {
    let dotted = name.find(['.', '/']).is_some_and(|i| name.as_bytes()[i] == b'.');
    let swap = |c| match c {
        '.' => '/',
        '/' => '.',
        c => c,
    };
    let relative: String = if dotted { name.chars().map(swap).collect() } else { name.to_owned() };
    let plain = relative.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    plain.then(|| proc.join("sys").join(relative))
}

fn sysctl(proc: &Path, name: &str) -> Result<std::path::PathBuf> {
    sysctl_path(proc, name).ok_or_else(|| Failed::other(format!("find sysctl {name}"), "not a sysctl name"))
}

/// Reads a sysctl, without surrounding space.
///
/// # Errors
/// There is none of this name, or it cannot be read.
pub fn read_sysctl(proc: &Path, name: &str) -> Result<String> {
    Ok(read(&sysctl(proc, name)?)?.trim().to_owned())
}

/// Writes a sysctl.
///
/// # Errors
/// There is none of this name, or the kernel refuses the value or the writer.
pub fn write_sysctl(proc: &Path, name: &str, value: &str) -> Result<()> {
    let path = sysctl(proc, name)?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut f| std::io::Write::write_all(&mut f, value.as_bytes()))
        .attempt(|| format!("write {value:?} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{get, put};

    fn node() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        put(d, "proc/sys/kernel/random/boot_id", "0e2b9d1e-1111-2222-3333-444455556666\n");
        put(d, "proc/sys/kernel/pid_max", "4194304\n");
        put(d, "proc/sys/kernel/threads-max", "192000\n");
        put(d, "proc/sys/vm/overcommit_memory", "0\n");
        put(d, "proc/sys/net/ipv4/conf/eth0.1/forwarding", "1\n");
        put(d, "proc/uptime", "3661.52 7000.00\n");
        put(d, "proc/loadavg", "0.20 0.18 0.12 1/80 11206\n");
        put(d, "etc/machine-id", "3d1219c7c4c5404aaa1f6d2a48adfda4\n");
        put(
            d,
            "etc/os-release",
            "NAME=\"Debian GNU/Linux\"\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\n",
        );
        put(d, "sys/devices/system/cpu/online", "0-2,5\n");
        std::fs::create_dir_all(d.join("sys/devices/system/cpu/cpu5/thermal_throttle")).unwrap();
        dir
    }

    #[test]
    fn identity() {
        let dir = node();
        let (d, proc, sys) = (dir.path(), dir.path().join("proc"), dir.path().join("sys"));
        assert_eq!(boot_id(&proc).unwrap(), "0e2b9d1e-1111-2222-3333-444455556666");
        assert_eq!(machine_id(d).unwrap(), "3d1219c7c4c5404aaa1f6d2a48adfda4");
        assert_eq!(os_image(d).unwrap(), "Debian GNU/Linux 12 (bookworm)");
        assert_eq!(system_uuid(&sys, &proc, d).unwrap(), "3d1219c7c4c5404aaa1f6d2a48adfda4");
        put(d, "proc/device-tree/vm,uuid", "abcd\0");
        assert_eq!(system_uuid(&sys, &proc, d).unwrap(), "abcd");
        put(d, "sys/class/dmi/id/product_uuid", "EC2A\n");
        assert_eq!(system_uuid(&sys, &proc, d).unwrap(), "EC2A");
    }

    #[test]
    fn os_image_without_the_etc_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(os_image(dir.path()).is_err());
        put(dir.path(), "usr/lib/os-release", "ID=x\n");
        assert_eq!(os_image(dir.path()).unwrap(), "Linux");
    }

    #[test]
    fn figures() {
        let dir = node();
        let (proc, sys) = (dir.path().join("proc"), dir.path().join("sys"));
        assert_eq!(online_cpus(&sys).unwrap(), [0, 1, 2, 5]);
        assert_eq!(cpu_count(&sys).unwrap(), 4);
        assert_eq!(thermal_throttle_paths(&sys).unwrap(), ["/sys/devices/system/cpu/cpu5/thermal_throttle"]);
        assert_eq!(max_pids(&proc).unwrap(), 192_000);
        assert_eq!(used_pids(&proc).unwrap(), 80);
        assert_eq!(uptime(&proc).unwrap(), Duration::from_millis(3_661_520));
    }

    #[test]
    fn sysctls() {
        let dir = node();
        let proc = dir.path().join("proc");
        assert_eq!(read_sysctl(&proc, "vm.overcommit_memory").unwrap(), "0");
        assert_eq!(read_sysctl(&proc, "net.ipv4.conf.eth0/1.forwarding").unwrap(), "1");
        assert_eq!(read_sysctl(&proc, "net/ipv4/conf/eth0.1/forwarding").unwrap(), "1");
        write_sysctl(&proc, "vm.overcommit_memory", "1").unwrap();
        assert!(get(proc.join("sys/vm/overcommit_memory")).starts_with('1'));
        assert!(write_sysctl(&proc, "vm.nothing", "1").unwrap_err().is_not_found());
        assert!(read_sysctl(&proc, "../../etc/machine-id").is_err());
        assert!(read_sysctl(&proc, "vm..overcommit_memory").is_err());
    }

    #[test]
    fn this_machine() {
        let (proc, sys, root) = (Path::new("/proc"), Path::new("/sys"), Path::new("/"));
        assert!(!boot_id(proc).unwrap().is_empty());
        assert!(cpu_count(sys).unwrap() >= 1);
        assert!(max_pids(proc).unwrap() > 100);
        assert!(used_pids(proc).unwrap() > 0);
        assert!(!kernel_version().is_empty());
        assert!(!hostname().unwrap().is_empty());
        let _ = os_image(root);
    }
}
