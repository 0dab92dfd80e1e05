//! What processes hold open, and what went through the network of one.

use std::path::Path;

use rustix::fs::CWD;

use crate::error::Result;
use crate::small_files::SmallFiles;

/// Counters of one network interface since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceTraffic {
    /// Its name.
    pub name: String,
    /// Received.
    pub received: Traffic,
    /// Sent.
    pub sent: Traffic,
}

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets with errors.
    pub errors: u64,
    /// Packets dropped.
    pub dropped: u64,
}

/// The interfaces in the network namespace of a process (`/proc/PID/net/dev`), in the kernel's order, without loopbacks and the host's
/// ends of containers' links (names that begin with `lo`, `veth`, `docker`, `nerdctl`: those that cAdvisor leaves out). None: there is no
/// such process.
pub fn interface_traffic(proc: &Path, pid: u32, files: &mut SmallFiles) -> Option<Vec<InterfaceTraffic>> {
    files.table(CWD, proc.join(format!("{pid}/net/dev"))).map(parse)
}

fn parse(text: &str) -> Vec<InterfaceTraffic> {
    let interface = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let name = name.trim();
        if ["lo", "veth", "docker", "nerdctl"].iter().any(|p| name.starts_with(p)) {
            return None;
        }
        let mut counters = counters.split_ascii_whitespace().map_while(|n| n.parse().ok());
        let mut direction = |skipped: usize| {
            let mut next = || counters.next();
            (0..skipped).try_for_each(|_| next().map(drop))?;
            Some(Traffic { bytes: next()?, packets: next()?, errors: next()?, dropped: next()? })
        };
        Some(InterfaceTraffic { name: name.to_owned(), received: direction(0)?, sent: direction(4)? })
    };
    text.lines().filter_map(interface).collect()
}

/// What a process has open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFiles {
    /// File descriptors.
    pub descriptors: u64,
    /// Those that are sockets.
    pub sockets: u64,
}

/// What the targets of sockets' descriptors begin with.
const SOCKET: &[u8; 7] = b"socket:";

/// Counts the file descriptors of a process; zero when it is gone.
pub fn open_files(proc: &Path, pid: u32) -> OpenFiles {
    let mut open = OpenFiles::default();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let path = proc.join(format!("{pid}/fd"));
    let Ok(fd) = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()) else { return open };
    let Ok(dir) = rustix::fs::Dir::read_from(&fd) else { return open };
    for entry in dir.flatten().filter(|e| !e.file_name().to_bytes().starts_with(b".")) {
        open.descriptors += 1;
        // As much of the target as tells what it is.
        let mut target = [0_u8; SOCKET.len()];
        let read = rustix::fs::readlinkat_raw(&fd, entry.file_name(), &mut target[..]);
        open.sockets += u64::from(read.is_ok() && &target == SOCKET);
    }
    open
}

/// The soft limit of open files of a process (`/proc/PID/limits`); None when it is gone, -1: unlimited.
pub fn open_files_limit(proc: &Path, pid: u32, files: &mut SmallFiles) -> Option<i64> {
    let text = files.text(CWD, proc.join(format!("{pid}/limits")))?;
    let soft = text.lines().find_map(|l| l.strip_prefix("Max open files")?.split_ascii_whitespace().next())?;
    if soft == "unlimited" { Some(-1) } else { soft.parse().ok() }
}

/// What was read from and written to a block device since the start of the system (Documentation/admin-guide/iostats.rst).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTraffic {
    /// Reads completed.
    pub reads: u64,
    /// Reads merged with others.
    pub reads_merged: u64,
    /// Sectors read.
    pub sectors_read: u64,
    /// ms spent reading.
    pub read_ms: u64,
    /// Writes completed.
    pub writes: u64,
    /// Writes merged with others.
    pub writes_merged: u64,
    /// Sectors written.
    pub sectors_written: u64,
    /// ms spent writing.
    pub write_ms: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// ms with any in flight.
    pub busy_ms: u64,
    /// ms, weighted by their number.
    pub weighted_ms: u64,
}

/// Every block device by major and minor number (`/proc/diskstats`).
///
/// # Errors
/// The file cannot be read.
pub fn disk_traffic(proc: &Path) -> Result<std::collections::HashMap<(u32, u32), DiskTraffic>> {
    let text = super::read(&proc.join("diskstats"))?;
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let device = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        fields.next()?;
        let numbers: Vec<u64> = fields.take(11).map_while(|f| f.parse().ok()).collect();
        let [
            reads,
            reads_merged,
            sectors_read,
            read_ms,
            writes,
            writes_merged,
            sectors_written,
            write_ms,
            in_flight,
            busy_ms,
            weighted_ms,
        ] = numbers.try_into().ok()?;
        let traffic = DiskTraffic {
            reads,
            reads_merged,
            sectors_read,
            read_ms,
            writes,
            writes_merged,
            sectors_written,
            write_ms,
            in_flight,
            busy_ms,
            weighted_ms,
        };
        Some((device, traffic))
    };
    Ok(text.lines().filter_map(line).collect())
}

/// How the CPUs are put together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTopology {
    /// Logical CPUs that are online.
    pub cores: u64,
    /// Physical cores.
    pub physical_cores: u64,
    /// Sockets.
    pub sockets: u64,
    /// Books and drawers, which only mainframes have.
    pub books: u64,
    /// See `books`.
    pub drawers: u64,
}

/// Reads the topology of the online CPUs (`/sys/devices/system/cpu/cpuN/topology`).
///
/// # Errors
/// The list of CPUs cannot be read.
pub fn cpu_topology(sys: &Path) -> Result<CpuTopology> {
    use std::collections::HashSet;
    let cpus = super::online_cpus(sys)?;
    let (mut cores, mut sockets, mut books, mut drawers) =
        (HashSet::new(), HashSet::new(), HashSet::new(), HashSet::new());
    for cpu in &cpus {
        let id = |file: &str| -> Option<i64> {
            let path = sys.join(format!("devices/system/cpu/cpu{cpu}/topology/{file}"));
            std::fs::read_to_string(path).ok()?.trim().parse().ok().filter(|n: &i64| *n >= 0)
        };
        let socket = id("physical_package_id");
        // Without a topology each CPU is a core of its own, on one socket.
        cores.insert((socket, id("core_id").unwrap_or(i64::try_from(*cpu).unwrap_or_default())));
        sockets.insert(socket);
        books.extend(id("book_id"));
        drawers.extend(id("drawer_id"));
    }
    let count = |n: usize| n as u64;
    Ok(CpuTopology {
        cores: count(cpus.len()),
        physical_cores: count(cores.len()),
        sockets: count(sockets.len()),
        books: count(books.len()),
        drawers: count(drawers.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    const DEV: &str = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0: 1314367502   74088    1    2    0     0          0         0  4699950   57912    3    4    0     0       0          0
veth1a:       5       1    0    0    0     0          0         0        5       1    0    0    0     0       0          0
";

    #[test]
    fn interfaces() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "9/net/dev", DEV);
        let mut files = SmallFiles::default();
        let found = interface_traffic(dir.path(), 9, &mut files).unwrap();
        let received = Traffic { bytes: 1_314_367_502, packets: 74_088, errors: 1, dropped: 2 };
        let sent = Traffic { bytes: 4_699_950, packets: 57_912, errors: 3, dropped: 4 };
        assert_eq!(found, [InterfaceTraffic { name: "eth0".into(), received, sent }]);
        assert_eq!(interface_traffic(dir.path(), 8, &mut files), None);
    }

    #[test]
    fn this_process() {
        let proc = Path::new("/proc");
        let before = open_files(proc, std::process::id());
        let _held = std::os::unix::net::UnixStream::pair().unwrap();
        let now = open_files(proc, std::process::id());
        // Other tests open and close files meanwhile.
        assert!(before.descriptors > 0 && now.sockets >= 2, "{before:?} {now:?}");
        let mut files = SmallFiles::default();
        assert!(open_files_limit(proc, std::process::id(), &mut files).is_some());
        assert_eq!(open_files_limit(proc, u32::MAX, &mut files), None);
        assert_eq!(open_files(proc, u32::MAX), OpenFiles::default());
    }

    #[test]
    fn disks() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "diskstats", " 254 0 vda 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n   7 0 loop0 0 0\n");
        let found = disk_traffic(dir.path()).unwrap();
        let vda = found[&(254, 0)];
        assert_eq!((vda.reads, vda.read_ms, vda.writes, vda.write_ms), (1, 4, 5, 8));
        assert_eq!((vda.in_flight, vda.busy_ms, vda.weighted_ms, found.len()), (9, 10, 11, 1));
    }

    #[test]
    fn topology() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "devices/system/cpu/online", "0-3\n");
        for (cpu, core, socket) in [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)] {
            put(dir.path(), &format!("devices/system/cpu/cpu{cpu}/topology/core_id"), &format!("{core}\n"));
            put(
                dir.path(),
                &format!("devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
                &format!("{socket}\n"),
            );
        }
        let found = cpu_topology(dir.path()).unwrap();
        assert_eq!(found, CpuTopology { cores: 4, physical_cores: 2, sockets: 1, books: 0, drawers: 0 });
    }
}
