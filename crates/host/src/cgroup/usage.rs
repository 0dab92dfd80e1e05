//! Figures and settings read back from a group.

use std::io;
use std::path::Path;

use model::cgroup::CgroupResources;

use super::layout::{CgroupLayout, below};
use super::{CgroupVersion, values};
use crate::error::{Attempt, Failed, Result, found};

/// What a group uses. A figure that the kernel does not give for this group is None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupUsage {
    /// CPU time since the group was made, ns.
    pub cpu_ns: Option<u64>,
    /// Memory charged, bytes, page cache included.
    pub memory: Option<u64>,
    /// Memory less inactive file pages, bytes: what the kubelet calls the working set.
    pub working_set: Option<u64>,
    /// Anonymous memory, bytes.
    pub rss: Option<u64>,
    /// Page faults.
    pub page_faults: Option<u64>,
    /// Page faults that waited for a disk.
    pub major_page_faults: Option<u64>,
    /// Memory limit, bytes; None: none.
    pub memory_limit: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
}

/// A v1 group without a limit shows the largest multiple of the page size; anything near it is none.
const V1_NO_LIMIT: u64 = 1 << 62;

fn text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        // ENODEV, EOPNOTSUPP: the controller is not enabled for this group.
        Err(e) if matches!(e.raw_os_error(), Some(19 | 95)) => Ok(None),
        other => found(other).on("read", path),
    }
}

fn number(path: &Path) -> Result<Option<u64>> {
    Ok(text(path)?.and_then(|t| t.trim().parse().ok()))
}

fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

pub(super) fn read(layout: &CgroupLayout, path: &str, proc: &Path) -> Result<CgroupUsage> {
    match layout.version {
        CgroupVersion::V2 => read_v2(&below(&layout.root, path), proc, path == "/"),
        CgroupVersion::V1 => read_v1(layout, path),
    }
}

fn read_v2(dir: &Path, proc: &Path, is_root: bool) -> Result<CgroupUsage> {
    present(dir)?;
    let cpu = text(&dir.join("cpu.stat"))?.unwrap_or_default();
    let stat = text(&dir.join("memory.stat"))?.unwrap_or_default();
    let mut memory = number(&dir.join("memory.current"))?;
    if memory.is_none() && is_root {
        // The root group counts nothing; the node's own figures stand in.
        let node = crate::proc::memory(proc)?;
        memory = Some(node.total.saturating_sub(node.free));
    }
    Ok(CgroupUsage {
        cpu_ns: keyed(&cpu, "usage_usec").map(|us| us * 1000),
        memory,
        working_set: memory.map(|m| m.saturating_sub(keyed(&stat, "inactive_file").unwrap_or_default())),
        rss: keyed(&stat, "anon"),
        page_faults: keyed(&stat, "pgfault"),
        major_page_faults: keyed(&stat, "pgmajfault"),
        memory_limit: number(&dir.join("memory.max"))?,
        pids: number(&dir.join("pids.current"))?,
    })
}

fn read_v1(layout: &CgroupLayout, path: &str) -> Result<CgroupUsage> {
    let file = |controller: &str, file: &str| layout.dir(controller, path).map(|d| d.join(file));
    let read = |controller: &str, name: &str| file(controller, name).map_or(Ok(None), |p| number(&p));
    if let Some(dir) = layout.dir("memory", path) {
        present(&dir)?;
    }
    let stat = file("memory", "memory.stat").map_or(Ok(None), |p| text(&p))?.unwrap_or_default();
    let memory = read("memory", "memory.usage_in_bytes")?;
    Ok(CgroupUsage {
        cpu_ns: read("cpuacct", "cpuacct.usage")?,
        memory,
        working_set: memory.map(|m| m.saturating_sub(keyed(&stat, "total_inactive_file").unwrap_or_default())),
        rss: keyed(&stat, "total_rss"),
        page_faults: keyed(&stat, "total_pgfault"),
        major_page_faults: keyed(&stat, "total_pgmajfault"),
        memory_limit: read("memory", "memory.limit_in_bytes")?.filter(|l| *l < V1_NO_LIMIT),
        pids: read("pids", "pids.current")?,
    })
}

fn present(dir: &Path) -> Result<()> {
    match dir.is_dir() {
        true => Ok(()),
        false => Err(Failed::new(format!("read cgroup {}", dir.display()), io::Error::from(io::ErrorKind::NotFound))),
    }
}

pub(super) fn limits(layout: &CgroupLayout, path: &str) -> Result<CgroupResources> {
    let mut limits = CgroupResources::default();
    match layout.version {
        CgroupVersion::V2 => {
            let dir = below(&layout.root, path);
            present(&dir)?;
            limits.cpu_shares = number(&dir.join("cpu.weight"))?.map(values::shares_from_weight);
            if let Some((quota, period)) = text(&dir.join("cpu.max"))?.as_deref().and_then(|t| t.trim().split_once(' '))
            {
                limits.cpu_quota = Some(quota.parse().unwrap_or(-1));
                limits.cpu_period = period.parse().ok();
            }
            let max = text(&dir.join("memory.max"))?;
            limits.memory_limit = max.map(|t| t.trim().parse().unwrap_or(-1));
        }
        CgroupVersion::V1 => {
            let file = |controller: &str, file: &str| layout.dir(controller, path).map(|d| d.join(file));
            let cpu = |name: &str| file("cpu", name).map_or(Ok(None), |p| text(&p));
            if let Some(dir) = layout.dir("cpu", path) {
                present(&dir)?;
            }
            limits.cpu_shares = cpu("cpu.shares")?.and_then(|t| t.trim().parse().ok());
            limits.cpu_quota = cpu("cpu.cfs_quota_us")?.and_then(|t| t.trim().parse().ok());
            limits.cpu_period = cpu("cpu.cfs_period_us")?.and_then(|t| t.trim().parse().ok());
            let limit = file("memory", "memory.limit_in_bytes").map_or(Ok(None), |p| number(&p))?;
            limits.memory_limit = limit.map(|l| if l < V1_NO_LIMIT { i64::try_from(l).unwrap_or(-1) } else { -1 });
        }
    }
    Ok(limits)
}
