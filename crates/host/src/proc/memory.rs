//! Memory, swap and huge pages.

use std::path::Path;

use procfs::FromRead;

use crate::error::{Attempt, Failed, Result, found};

/// Memory figures of the node, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// MemTotal: the node's memory capacity.
    pub total: u64,
    /// MemFree.
    pub free: u64,
    /// MemAvailable.
    pub available: u64,
    /// SwapTotal.
    pub swap_total: u64,
    /// SwapFree.
    pub swap_free: u64,
}

/// Reads `proc/meminfo`.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn memory(proc: &Path) -> Result<MemoryInfo> {
    let path = proc.join("meminfo");
    let info = std::fs::File::open(&path)
        .map_err(procfs::ProcError::from)
        .and_then(procfs::Meminfo::from_read)
        .map_err(std::io::Error::other)
        .on("read", &path)?;
    Ok(MemoryInfo {
        total: info.mem_total,
        free: info.mem_free,
        // Always there since Linux 3.14.
        available: info.mem_available.unwrap_or(info.mem_free),
        swap_total: info.swap_total,
        swap_free: info.swap_free,
    })
}

/// The swap devices in use, as `proc/swaps` lists them; empty when the kernel has no swap at all.
///
/// # Errors
/// The file is there but cannot be read.
pub fn swap_devices(proc: &Path) -> Result<Vec<String>> {
    let path = proc.join("swaps");
    let text = found(std::fs::read_to_string(&path)).on("read", &path)?.unwrap_or_default();
    Ok(text.lines().skip(1).filter_map(|l| l.split_whitespace().next()).map(str::to_owned).collect())
}

/// One huge page size of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Size of a page in bytes.
    pub size: u64,
    /// As the kernel and the CRI spell it: `2MB`, `1GB`, `64KB`.
    pub name: String,
    /// How many there are.
    pub count: u64,
}

/// A huge page size in bytes as the hugetlb controller spells it: `64KB`, `2MB`, `1GB`.
pub fn huge_page_name(size: u64) -> String {
    match size {
        s if s >= 1 << 30 => format!("{}GB", s >> 30),
        s if s >= 1 << 20 => format!("{}MB", s >> 20),
        s => format!("{}KB", s >> 10),
    }
}

/// Every huge page size that the node has, by size (`sys/kernel/mm/hugepages`); empty when it has none.
///
/// # Errors
/// The directory is there but cannot be read.
pub fn huge_pages(sys: &Path) -> Result<Vec<HugePages>> {
    let dir = sys.join("kernel/mm/hugepages");
    let mut pages = Vec::new();
    let Some(entries) = found(std::fs::read_dir(&dir)).on("list", &dir)? else { return Ok(pages) };
    for entry in entries {
        let entry = entry.on("list", &dir)?;
        let name = entry.file_name();
        let kib = name.to_str().and_then(|n| n.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok());
        let Some(size) = kib.map(|k| k << 10) else { continue };
        let path = entry.path().join("nr_hugepages");
        let count = super::read(&path)?.trim().parse();
        let count = count.map_err(|_| Failed::other(format!("read {}", path.display()), "not a number"))?;
        pages.push(HugePages { size, name: huge_page_name(size), count });
    }
    pages.sort_by_key(|p| p.size);
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    #[test]
    fn meminfo() {
        let dir = tempfile::tempdir().unwrap();
        let real = std::fs::read_to_string("/proc/meminfo").unwrap();
        let lines = real.lines().map(|l| match l.split_once(':').unwrap().0 {
            "MemTotal" => "MemTotal:       24684092 kB",
            "MemAvailable" => "MemAvailable:   24084004 kB",
            "SwapTotal" => "SwapTotal:            16 kB",
            _ => l,
        });
        put(dir.path(), "meminfo", &(lines.collect::<Vec<_>>().join("\n") + "\n"));
        let memory = memory(dir.path()).unwrap();
        assert_eq!(memory.total, 24_684_092 << 10);
        assert_eq!(memory.available, 24_084_004 << 10);
        assert_eq!(memory.swap_total, 16 << 10);
    }

    #[test]
    fn swaps() {
        let dir = tempfile::tempdir().unwrap();
        assert!(swap_devices(dir.path()).unwrap().is_empty());
        put(dir.path(), "swaps", "Filename\t\t\t\tType\t\tSize\n/dev/sda2 partition 8388604 0 -2\n");
        assert_eq!(swap_devices(dir.path()).unwrap(), ["/dev/sda2"]);
    }

    #[test]
    fn huge_page_sizes() {
        let dir = tempfile::tempdir().unwrap();
        assert!(huge_pages(dir.path()).unwrap().is_empty());
        put(dir.path(), "kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n");
        put(dir.path(), "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "12\n");
        put(dir.path(), "kernel/mm/hugepages/hugepages-64kB/nr_hugepages", "3\n");
        let pages = huge_pages(dir.path()).unwrap();
        let names: Vec<_> = pages.iter().map(|p| (p.name.as_str(), p.size, p.count)).collect();
        assert_eq!(names, [("64KB", 65_536, 3), ("2MB", 2_097_152, 12), ("1GB", 1_073_741_824, 0)]);
    }
}
