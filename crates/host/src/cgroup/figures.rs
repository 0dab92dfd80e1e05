//! What a group uses and may use, in the detail that statistics show. Files are opened relative to the group's directory, which costs the
//! kernel one walk of the path a controller.

use std::os::fd::OwnedFd;
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::CgroupVersion;
use super::layout::{CgroupLayout, below};
use super::values::shares_from_weight;
use crate::error::{Attempt, Failed, Result};
use crate::small_files::SmallFiles;

/// A v1 group without a limit shows the largest multiple of the page size; anything near it is none.
const V1_NO_LIMIT: u64 = 1 << 62;

/// The processes of a group itself, in every hierarchy.
const PROCESSES: &str = "cgroup.procs";

/// How much of a group is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Detail {
    /// CPU, memory and pressure.
    Usage,
    /// Everything.
    Full,
}

/// What a group uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupFigures {
    /// When the group was made.
    pub created: Option<Timestamp>,
    /// CPU time; None without the controller.
    pub cpu_ns: Option<u64>,
    /// Memory; None without the controller.
    pub memory: Option<MemoryFigures>,
    /// Time that its tasks waited (KEP-4205); None where the kernel does not count it, as on v1.
    pub pressure: GroupPressure,
    /// What [`Detail::Full`] adds.
    pub detail: Option<GroupDetail>,
}

/// Memory of a group with all below it, in bytes unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFigures {
    /// Everything charged, page cache included.
    pub usage: u64,
    /// Usage less inactive file pages.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Page cache.
    pub cache: u64,
    /// Mapped files.
    pub mapped_file: u64,
    /// File pages on the active list.
    pub active_file: u64,
    /// File pages on the inactive list.
    pub inactive_file: u64,
    /// Swapped out.
    pub swap: u64,
    /// Page faults; on v1 of the group itself.
    pub page_faults: u64,
    /// Page faults that waited for a disk; on v1 of the group itself.
    pub major_page_faults: u64,
    /// Limit; None: none.
    pub limit: Option<u64>,
    /// Limit of memory and swap together on v1, of swap on v2; None: none, or not accounted.
    pub swap_limit: Option<u64>,
    /// True when swap is accounted.
    pub swap_counted: bool,
}

/// What is shown beside the usage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupDetail {
    /// CPU time in user mode, ns.
    pub user_ns: u64,
    /// CPU time in the kernel, ns.
    pub system_ns: u64,
    /// Periods, and those in which the quota ran out.
    pub throttling: Throttling,
    /// CPU shares in the terms of v1.
    pub shares: u64,
    /// CFS period, µs.
    pub period: u64,
    /// CFS quota, µs in each period; None: none.
    pub quota: Option<u64>,
    /// Highest usage of memory so far, bytes.
    pub max_usage: u64,
    /// How often the memory limit was hit; v1 only.
    pub fail_count: u64,
    /// Kernel memory, bytes.
    pub kernel: u64,
    /// Soft limit on v1, protected memory (`memory.min`) on v2, bytes; None: none.
    pub reservation: Option<u64>,
    /// Processes that the OOM killer ended here.
    pub oom_kills: u64,
    /// Processes and threads, here and below; None without the controller, as at the root.
    pub tasks: Option<u64>,
    /// Limit of them; None: none.
    pub tasks_max: Option<u64>,
    /// The processes of the group itself.
    pub processes: Vec<u32>,
}

/// What the CPU controller's bandwidth control did (`cpu.stat`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Elapsed periods.
    pub periods: u64,
    /// Those in which the group was throttled.
    pub throttled: u64,
    /// For how long, ns.
    pub throttled_ns: u64,
    /// Periods in which it burst.
    pub bursts: u64,
    /// For how long, ns.
    pub burst_ns: u64,
}

/// Pressure of the three resources.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupPressure {
    /// CPU.
    pub cpu: Option<Pressure>,
    /// Memory.
    pub memory: Option<Pressure>,
    /// Disks.
    pub io: Option<Pressure>,
}

/// One resource's pressure: some tasks waited, all of them waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: PressureLine,
    /// All tasks waited.
    pub full: PressureLine,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PressureLine {
    /// µs altogether.
    pub total: u64,
    /// Per cent of the last 10 s.
    pub avg10: f64,
    /// Per cent of the last minute.
    pub avg60: f64,
    /// Per cent of the last five minutes.
    pub avg300: f64,
}

impl Pressure {
    /// Parses a pressure file (Documentation/accounting/psi.rst).
    pub fn parse(text: &str) -> Option<Self> {
        let mut pressure = Self::default();
        let mut any = false;
        for line in text.lines() {
            let (line, rest) = match line.split_once(' ')? {
                ("some", rest) => (&mut pressure.some, rest),
                ("full", rest) => (&mut pressure.full, rest),
                _ => continue,
            };
            any = true;
            for (key, value) in rest.split_whitespace().filter_map(|f| f.split_once('=')) {
                match key {
                    "avg10" => line.avg10 = value.parse().unwrap_or_default(),
                    "avg60" => line.avg60 = value.parse().unwrap_or_default(),
                    "avg300" => line.avg300 = value.parse().unwrap_or_default(),
                    "total" => line.total = value.parse().unwrap_or_default(),
                    _ => {}
                }
            }
        }
        any.then_some(pressure)
    }
}

/// A controller's directory of a group.
struct Dir(OwnedFd);

impl Dir {
    /// None: there is no such group.
    fn open(path: &Path) -> Result<Option<Self>> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(e).on("open", path),
        }
    }

    /// A file's text; None when it is not there or the controller does not answer: a figure more or less is no failure.
    fn text<'f>(&self, files: &'f mut SmallFiles, name: &str) -> Option<&'f str> {
        files.text(&self.0, name)
    }

    fn number(&self, files: &mut SmallFiles, name: &str) -> Option<u64> {
        files.number(&self.0, name)
    }

    /// The earlier time of the directory and of a file in it that nobody writes: a directory is touched by each group made in it.
    fn created(&self, file: &str) -> Option<Timestamp> {
        let time = |stat: rustix::fs::Stat| {
            Timestamp::new(stat.st_mtime, i32::try_from(stat.st_mtime_nsec).unwrap_or_default()).ok()
        };
        let dir = rustix::fs::fstat(&self.0).ok().and_then(time);
        let file = rustix::fs::statat(&self.0, file, AtFlags::empty()).ok().and_then(time);
        dir.into_iter().chain(file).min()
    }

    fn processes(&self, files: &mut SmallFiles) -> Vec<u32> {
        files.table(&self.0, PROCESSES).map(ids).unwrap_or_default()
    }
}

fn ids(list: &str) -> Vec<u32> {
    list.lines().filter_map(|l| l.parse().ok()).collect()
}

/// The numbers of a file of `key value` lines, in the order of `keys`.
fn keyed<const N: usize>(text: &str, keys: [&str; N]) -> [Option<u64>; N] {
    let mut values = [None; N];
    for (key, value) in text.lines().filter_map(|l| l.split_once(' ')) {
        if let Some(at) = keys.iter().position(|k| *k == key) {
            values[at] = value.trim().parse().ok();
        }
    }
    values
}

impl CgroupLayout {
    /// Reads a group by its path below the cgroup root (`/`: the whole node). None when there is no such group. Blocks on pseudo files.
    ///
    /// # Errors
    /// The group's directory cannot be opened.
    pub fn figures(
        &self,
        path: &str,
        proc: &Path,
        detail: Detail,
        files: &mut SmallFiles,
    ) -> Result<Option<GroupFigures>> {
        match self.version {
            CgroupVersion::V1 => self.figures_v1(path, proc, detail, files),
            CgroupVersion::V2 => self.figures_v2(path, proc, detail, files),
        }
    }

    /// The CPU time of a group alone, ns.
    pub fn cpu_time(&self, path: &str, files: &mut SmallFiles) -> Option<u64> {
        match self.version {
            CgroupVersion::V1 => files.number(CWD, self.dir("cpuacct", path)?.join("cpuacct.usage")),
            CgroupVersion::V2 => usage_usec(files.text(CWD, below(&self.root, path).join("cpu.stat"))?),
        }
    }

    /// The processes of a group itself; none when it is not there.
    pub fn processes(&self, path: &str, files: &mut SmallFiles) -> Vec<u32> {
        let dir = match self.version {
            CgroupVersion::V2 => Some(below(&self.root, path)),
            CgroupVersion::V1 => self.dir("cpu", path),
        };
        dir.and_then(|dir| files.table(CWD, dir.join(PROCESSES)).map(ids)).unwrap_or_default()
    }

    /// The paths of the groups directly below this one; none when it is not there. On v1 as one controller has them: that of processes, whose
    /// directories have the fewest files.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn groups_in(&self, path: &str) -> Result<Vec<String>> {
        let dir = match self.version {
            CgroupVersion::V2 => below(&self.root, path),
            CgroupVersion::V1 => match ["pids", "memory", "cpu"].iter().find_map(|c| self.dir(c, path)) {
                Some(dir) => dir,
                None => return Ok(Vec::new()),
            },
        };
        // A directory has a link for each one in it. Reading one without any would give some sixty files for nothing.
        match rustix::fs::stat(&dir) {
            Ok(stat) if stat.st_nlink == 2 => return Ok(Vec::new()),
            Err(rustix::io::Errno::NOENT) => return Ok(Vec::new()),
            _ => {}
        }
        let mut groups = Vec::new();
        for entry in std::fs::read_dir(&dir).on("read", &dir)? {
            let Ok(entry) = entry else { break };
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let name = entry.file_name();
                groups.push(format!("{}/{}", path.trim_end_matches('/'), name.to_string_lossy()));
            }
        }
        groups.sort();
        Ok(groups)
    }

    /// The group that a process is in, when all controllers that count for the kubelet agree on it (`/proc/PID/cgroup`).
    ///
    /// # Errors
    /// The file cannot be read, or CPU and memory are counted in different groups.
    pub fn group_of(&self, proc: &Path, pid: u32) -> Result<String> {
        let file = proc.join(pid.to_string()).join("cgroup");
        let text = crate::proc::read(&file)?;
        let group = |controller: &str| {
            text.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let controllers = parts.next()?;
                controllers.split(',').any(|c| c == controller).then(|| parts.next()).flatten()
            })
        };
        let attempt = || format!("find the cgroup of process {pid}");
        match self.version {
            CgroupVersion::V2 => group("").ok_or_else(|| Failed::other(attempt(), "it is in none")).map(str::to_owned),
            CgroupVersion::V1 => match (group("cpu"), group("memory")) {
                (Some(cpu), Some(memory)) if cpu == memory => Ok(cpu.to_owned()),
                _ => Err(Failed::other(attempt(), "cpu and memory cgroup hierarchy not unified")),
            },
        }
    }

    fn figures_v1(
        &self,
        path: &str,
        proc: &Path,
        detail: Detail,
        files: &mut SmallFiles,
    ) -> Result<Option<GroupFigures>> {
        let open = |controller: &str| self.dir(controller, path).map_or(Ok(None), |dir| Dir::open(&dir));
        let (accounting, memory) = (open("cpuacct")?, open("memory")?);
        let Some(any) = accounting.as_ref().or(memory.as_ref()) else { return Ok(None) };
        let mut figures = GroupFigures { created: any.created("cgroup.clone_children"), ..GroupFigures::default() };
        figures.cpu_ns = accounting.as_ref().and_then(|d| d.number(files, "cpuacct.usage"));
        figures.memory = memory.as_ref().and_then(|d| memory_v1(d, files));
        if path == "/" {
            figures.pressure = node_pressure(proc);
        }
        if detail == Detail::Full {
            let mut more = GroupDetail::default();
            if let Some(text) = accounting.as_ref().and_then(|d| d.text(files, "cpuacct.stat")) {
                let [user, system] = keyed(text, ["user", "system"]);
                let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second();
                (more.user_ns, more.system_ns) = (user.unwrap_or_default() * tick, system.unwrap_or_default() * tick);
            }
            if let Some(cpu) = open("cpu")? {
                more.shares = cpu.number(files, "cpu.shares").unwrap_or_default();
                more.period = cpu.number(files, "cpu.cfs_period_us").unwrap_or_default();
                more.quota = cpu.number(files, "cpu.cfs_quota_us");
                // Counted only while there is a quota.
                if more.quota.is_some()
                    && let Some(text) = cpu.text(files, "cpu.stat")
                {
                    let [periods, throttled, time, bursts, burst] =
                        keyed(text, ["nr_periods", "nr_throttled", "throttled_time", "nr_bursts", "burst_time"])
                            .map(Option::unwrap_or_default);
                    more.throttling = Throttling { periods, throttled, throttled_ns: time, bursts, burst_ns: burst };
                }
                more.processes = cpu.processes(files);
            }
            if let Some(memory) = memory.as_ref() {
                more.max_usage = memory.number(files, "memory.max_usage_in_bytes").unwrap_or_default();
                more.fail_count = memory.number(files, "memory.failcnt").unwrap_or_default();
                more.kernel = memory.number(files, "memory.kmem.usage_in_bytes").unwrap_or_default();
                more.reservation = memory.number(files, "memory.soft_limit_in_bytes").filter(|l| *l < V1_NO_LIMIT);
                let [kills] = memory.text(files, "memory.oom_control").map_or([None], |t| keyed(t, ["oom_kill"]));
                more.oom_kills = kills.unwrap_or_default();
            }
            if let Some(pids) = open("pids")? {
                (more.tasks, more.tasks_max) = (pids.number(files, "pids.current"), pids.number(files, "pids.max"));
            }
            figures.detail = Some(more);
        }
        Ok(Some(figures))
    }

    fn figures_v2(
        &self,
        path: &str,
        proc: &Path,
        detail: Detail,
        files: &mut SmallFiles,
    ) -> Result<Option<GroupFigures>> {
        let Some(dir) = Dir::open(&below(&self.root, path))? else { return Ok(None) };
        let root = path == "/";
        let mut figures = GroupFigures { created: dir.created("cgroup.events"), ..GroupFigures::default() };
        let mut more = GroupDetail::default();
        if let Some(text) = dir.text(files, "cpu.stat") {
            const KEYS: [&str; 8] = [
                "usage_usec",
                "user_usec",
                "system_usec",
                "nr_periods",
                "nr_throttled",
                "throttled_usec",
                "nr_bursts",
                "burst_usec",
            ];
            let values = keyed(text, KEYS);
            figures.cpu_ns = values[0].map(|us| us * 1000);
            let [_, user, system, periods, throttled, time, bursts, burst] = values.map(Option::unwrap_or_default);
            (more.user_ns, more.system_ns) = (user * 1000, system * 1000);
            more.throttling =
                Throttling { periods, throttled, throttled_ns: time * 1000, bursts, burst_ns: burst * 1000 };
        }
        figures.memory = memory_v2(&dir, files, root.then_some(proc), &mut more)?;
        figures.pressure = if root {
            node_pressure(proc)
        } else {
            let mut read = |file: &str| dir.text(files, file).and_then(Pressure::parse);
            GroupPressure { cpu: read("cpu.pressure"), memory: read("memory.pressure"), io: read("io.pressure") }
        };
        if detail == Detail::Full {
            more.shares = dir.number(files, "cpu.weight").map_or(0, shares_from_weight);
            if let Some((quota, period)) = dir.text(files, "cpu.max").and_then(|t| t.split_once(' ')) {
                (more.quota, more.period) = (quota.parse().ok(), period.parse().unwrap_or_default());
            }
            more.max_usage = dir.number(files, "memory.peak").unwrap_or_default();
            more.reservation = dir.number(files, "memory.min");
            let [kills] = dir.text(files, "memory.events").map_or([None], |t| keyed(t, ["oom_kill"]));
            more.oom_kills = kills.unwrap_or_default();
            (more.tasks, more.tasks_max) = (dir.number(files, "pids.current"), dir.number(files, "pids.max"));
            more.processes = dir.processes(files);
            figures.detail = Some(more);
        }
        Ok(Some(figures))
    }
}

fn usage_usec(text: &str) -> Option<u64> {
    let [usage] = keyed(text, ["usage_usec"]);
    usage.map(|us| us * 1000)
}

fn memory_v1(dir: &Dir, files: &mut SmallFiles) -> Option<MemoryFigures> {
    let usage = dir.number(files, "memory.usage_in_bytes")?;
    const KEYS: [&str; 8] = [
        "total_cache",
        "total_rss",
        "total_mapped_file",
        "total_active_file",
        "total_inactive_file",
        "total_swap",
        "pgfault",
        "pgmajfault",
    ];
    let values = keyed(dir.text(files, "memory.stat")?, KEYS);
    let swap_counted = values[5].is_some();
    let [cache, rss, mapped_file, active_file, inactive_file, swap, page_faults, major_page_faults] =
        values.map(Option::unwrap_or_default);
    Some(MemoryFigures {
        usage,
        working_set: usage.saturating_sub(inactive_file),
        rss,
        cache,
        mapped_file,
        active_file,
        inactive_file,
        swap,
        page_faults,
        major_page_faults,
        limit: dir.number(files, "memory.limit_in_bytes").filter(|l| *l < V1_NO_LIMIT),
        swap_limit: dir.number(files, "memory.memsw.limit_in_bytes").filter(|l| *l < V1_NO_LIMIT),
        swap_counted,
    })
}

/// `proc`: given for the root group, which counts no usage of its own; the node's figures stand in.
fn memory_v2(
    dir: &Dir,
    files: &mut SmallFiles,
    proc: Option<&Path>,
    more: &mut GroupDetail,
) -> Result<Option<MemoryFigures>> {
    let (usage, swap) = match (dir.number(files, "memory.current"), proc) {
        (Some(usage), _) => (usage, dir.number(files, "memory.swap.current")),
        (None, Some(proc)) => {
            let node = crate::proc::memory(proc)?;
            (node.total.saturating_sub(node.free), Some(node.swap_total.saturating_sub(node.swap_free)))
        }
        (None, None) => return Ok(None),
    };
    const KEYS: [&str; 8] =
        ["anon", "file", "kernel", "file_mapped", "active_file", "inactive_file", "pgfault", "pgmajfault"];
    let values = keyed(dir.text(files, "memory.stat").unwrap_or_default(), KEYS);
    let [rss, cache, kernel, mapped_file, active_file, inactive_file, page_faults, major_page_faults] =
        values.map(Option::unwrap_or_default);
    more.kernel = kernel;
    Ok(Some(MemoryFigures {
        usage,
        working_set: usage.saturating_sub(inactive_file),
        rss,
        cache,
        mapped_file,
        active_file,
        inactive_file,
        swap: swap.unwrap_or_default(),
        page_faults,
        major_page_faults,
        limit: dir.number(files, "memory.max"),
        swap_limit: dir.number(files, "memory.swap.max"),
        swap_counted: swap.is_some(),
    }))
}

/// The pressure of the whole node.
fn node_pressure(proc: &Path) -> GroupPressure {
    let read = |what: &str| {
        let text = std::fs::read_to_string(proc.join("pressure").join(what)).ok()?;
        Pressure::parse(&text)
    };
    GroupPressure { cpu: read("cpu"), memory: read("memory"), io: read("io") }
}

#[cfg(test)]
#[path = "figures_tests.rs"]
mod tests;
