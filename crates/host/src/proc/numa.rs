//! NUMA nodes and how CPUs stand to each other, from sysfs.

use std::collections::BTreeMap;
use std::path::Path;

use super::{online_cpus, parse_cpu_list, read};
use crate::error::{Attempt, Failed, Result, found};

/// Where a logical CPU is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuPlace {
    /// Physical core: the lowest number of its CPUs.
    pub core: usize,
    /// `physical_package_id`.
    pub socket: usize,
    /// NUMA node.
    pub numa: usize,
    /// Last-level cache; None: the kernel tells of none.
    pub cache: Option<usize>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// `MemTotal` in bytes.
    pub memory: u64,
    /// Size of a huge page in bytes and how many of them there are, by size.
    pub huge_pages: Vec<(u64, u64)>,
    /// Distances to all nodes, in their order.
    pub distances: Vec<u32>,
}

/// The machine as the managers of CPUs, memory and devices see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaTopology {
    /// CPUs that are online.
    pub cpus: BTreeMap<usize, CpuPlace>,
    /// NUMA nodes; at least one.
    pub nodes: BTreeMap<usize, NumaNode>,
}

/// Reads it. A kernel that knows nothing of NUMA has one node, with `memory` bytes and all CPUs.
///
/// # Errors
/// A file cannot be read or understood.
pub fn numa_topology(sys: &Path, memory: u64) -> Result<NumaTopology> {
    let (nodes, numa_of) = nodes(sys, memory)?;
    let mut cpus = BTreeMap::new();
    for cpu in online_cpus(sys)? {
        let dir = sys.join(format!("devices/system/cpu/cpu{cpu}"));
        let siblings = list(&dir.join("topology/thread_siblings_list"))?;
        let socket = optional_number(&dir.join("topology/physical_package_id"))?;
        cpus.insert(
            cpu,
            CpuPlace {
                core: siblings.and_then(|s| s.into_iter().min()).unwrap_or(cpu),
                // Kernels of some machines say -1.
                socket: socket.and_then(|n| usize::try_from(n).ok()).unwrap_or(0),
                numa: numa_of.get(&cpu).copied().or_else(|| nodes.keys().next().copied()).unwrap_or(0),
                cache: last_cache(&dir.join("cache"))?,
            },
        );
    }
    Ok(NumaTopology { cpus, nodes })
}

/// The nodes, and the node of each CPU.
fn nodes(sys: &Path, memory: u64) -> Result<(BTreeMap<usize, NumaNode>, BTreeMap<usize, usize>)> {
    let dir = sys.join("devices/system/node");
    let (mut nodes, mut of) = (BTreeMap::new(), BTreeMap::new());
    for entry in found(std::fs::read_dir(&dir)).on("list", &dir)?.into_iter().flatten() {
        let entry = entry.on("list", &dir)?;
        let name = entry.file_name();
        let Some(id) = name.to_str().and_then(|n| n.strip_prefix("node")?.parse::<usize>().ok()) else { continue };
        let path = entry.path();
        for cpu in list(&path.join("cpulist"))?.unwrap_or_default() {
            of.insert(cpu, id);
        }
        let distances = optional(&path.join("distance"))?.unwrap_or_default();
        nodes.insert(
            id,
            NumaNode {
                memory: total(&path.join("meminfo"))?.unwrap_or(0),
                huge_pages: huge_pages(&path.join("hugepages"))?,
                distances: distances.split_ascii_whitespace().filter_map(|n| n.parse().ok()).collect(),
            },
        );
    }
    if nodes.is_empty() {
        let huge_pages = super::huge_pages(sys)?.into_iter().map(|p| (p.size, p.count)).collect();
        nodes.insert(0, NumaNode { memory, huge_pages, distances: vec![10] });
    }
    Ok((nodes, of))
}

fn optional(path: &Path) -> Result<Option<String>> {
    found(std::fs::read_to_string(path)).on("read", path)
}

fn list(path: &Path) -> Result<Option<Vec<usize>>> {
    let Some(text) = optional(path)? else { return Ok(None) };
    let cpus = parse_cpu_list(&text);
    cpus.map(Some).ok_or_else(|| Failed::other(format!("read {}", path.display()), "not a list of CPUs"))
}

fn optional_number(path: &Path) -> Result<Option<i64>> {
    Ok(optional(path)?.and_then(|text| text.trim().parse().ok()))
}

/// `Node 0 MemTotal:       16303412 kB`.
fn total(path: &Path) -> Result<Option<u64>> {
    let text = optional(path)?.unwrap_or_default();
    let line = text.lines().find_map(|l| l.split_once("MemTotal:"));
    Ok(line.and_then(|(_, rest)| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).map(|kib| kib << 10))
}

fn huge_pages(dir: &Path) -> Result<Vec<(u64, u64)>> {
    let mut pages = Vec::new();
    for entry in found(std::fs::read_dir(dir)).on("list", dir)?.into_iter().flatten() {
        let entry = entry.on("list", dir)?;
        let name = entry.file_name();
        let kib = name.to_str().and_then(|n| n.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok());
        let Some(size) = kib.map(|k| k << 10) else { continue };
        let path = entry.path().join("nr_hugepages");
        let count = read(&path)?.trim().parse();
        pages.push((size, count.map_err(|_| Failed::other(format!("read {}", path.display()), "not a number"))?));
    }
    pages.sort_unstable();
    Ok(pages)
}

/// The id of the highest cache beyond the second level.
fn last_cache(dir: &Path) -> Result<Option<usize>> {
    let mut best: Option<(u32, usize)> = None;
    for entry in found(std::fs::read_dir(dir)).on("list", dir)?.into_iter().flatten() {
        let entry = entry.on("list", dir)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b"index") {
            continue;
        }
        let path = entry.path();
        let level = optional_number(&path.join("level"))?.and_then(|n| u32::try_from(n).ok()).filter(|l| *l > 2);
        let id = optional_number(&path.join("id"))?.and_then(|n| usize::try_from(n).ok());
        if let (Some(level), Some(id)) = (level, id)
            && best.is_none_or(|(l, _)| level > l)
        {
            best = Some((level, id));
        }
    }
    Ok(best.map(|(_, id)| id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    #[test]
    fn two_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        put(sys, "devices/system/cpu/online", "0-3\n");
        for (cpu, siblings, socket) in [(0, "0,2", 0), (1, "1,3", 1), (2, "0,2", 0), (3, "1,3", 1)] {
            let at = format!("devices/system/cpu/cpu{cpu}");
            put(sys, &format!("{at}/topology/thread_siblings_list"), &format!("{siblings}\n"));
            put(sys, &format!("{at}/topology/physical_package_id"), &format!("{socket}\n"));
            put(sys, &format!("{at}/cache/uevent"), "");
            put(sys, &format!("{at}/cache/index0/level"), "1\n");
            put(sys, &format!("{at}/cache/index0/id"), &format!("{cpu}\n"));
            put(sys, &format!("{at}/cache/index3/level"), "3\n");
            put(sys, &format!("{at}/cache/index3/id"), &format!("{socket}\n"));
        }
        for (node, cpus, distance) in [(0, "0,2", "10 21"), (1, "1,3", "21 10")] {
            let at = format!("devices/system/node/node{node}");
            put(sys, &format!("{at}/cpulist"), &format!("{cpus}\n"));
            put(sys, &format!("{at}/distance"), &format!("{distance}\n"));
            put(
                sys,
                &format!("{at}/meminfo"),
                &format!("Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n"),
            );
            put(sys, &format!("{at}/hugepages/hugepages-2048kB/nr_hugepages"), "4\n");
        }
        put(sys, "devices/system/node/online", "0-1\n");
        let found = numa_topology(sys, 0).unwrap();
        let place = |core, numa| CpuPlace { core, socket: numa, numa, cache: Some(numa) };
        assert_eq!(
            found.cpus,
            BTreeMap::from([(0, place(0, 0)), (1, place(1, 1)), (2, place(0, 0)), (3, place(1, 1))])
        );
        let node = NumaNode { memory: 1 << 20, huge_pages: vec![(2 << 20, 4)], distances: vec![10, 21] };
        assert_eq!(found.nodes[&0], node);
        assert_eq!(found.nodes[&1].distances, [21, 10]);
    }

    #[test]
    fn a_kernel_without_numa() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "devices/system/cpu/online", "0-1\n");
        let found = numa_topology(dir.path(), 77).unwrap();
        assert_eq!(found.cpus[&1], CpuPlace { core: 1, socket: 0, numa: 0, cache: None });
        assert_eq!(
            found.nodes,
            BTreeMap::from([(0, NumaNode { memory: 77, huge_pages: vec![], distances: vec![10] })])
        );
    }

    #[test]
    fn this_machine() {
        let found = numa_topology(Path::new("/sys"), 1).unwrap();
        assert!(!found.cpus.is_empty() && !found.nodes.is_empty());
        assert!(found.cpus.values().all(|c| found.nodes.contains_key(&c.numa)));
    }
}
