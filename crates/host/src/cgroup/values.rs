//! Resources to the files that carry them, per version. Pure.

use model::cgroup::CgroupResources;

use super::PropertyValue::{self, Cpus, Number};

/// CFS period when none is given, µs (KubeletConfiguration `cpuCFSQuotaPeriod`, the kernel's default too).
const DEFAULT_PERIOD: u64 = 100_000;

/// CPU shares (2 … 262144) to a v2 weight (1 … 10000), as the kubelet writes it into its own groups (KEP-2254). Runtimes use
/// another, newer formula for containers.
pub fn weight_from_shares(shares: u64) -> u64 {
    match shares {
        262_144.. => 10_000,
        shares => 1 + shares.saturating_sub(2) * 9_999 / 262_142,
    }
}

/// A v2 weight back to CPU shares (KEP-2254).
pub fn shares_from_weight(weight: u64) -> u64 {
    weight.saturating_sub(1) * 262_142 / 9_999 + 2
}

/// One value for one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// The controller that the file belongs to.
    pub controller: String,
    /// The file's name.
    pub file: String,
    /// What is written.
    pub value: String,
    /// A kernel without the file is fine.
    pub optional: bool,
}

fn write(file: impl Into<String>, value: impl ToString) -> Write {
    let file = file.into();
    let controller = file.split('.').next().unwrap_or_default().to_owned();
    Write { controller, file, value: value.to_string(), optional: false }
}

fn optional(file: impl Into<String>, value: impl ToString) -> Write {
    Write { optional: true, ..write(file, value) }
}

fn max_or(value: i64) -> String {
    if value < 0 { "max".into() } else { value.to_string() }
}

/// systemd has no TasksMax 0, and a group with one process of its own is as closed; so both drivers write 1.
fn pids(limit: i64) -> i64 {
    if limit == 0 { 1 } else { limit }
}

/// The writes for v1. A period is tried before its quota; when the kernel refuses it there (the old quota over the new period exceeds
/// the parent's), the caller's second round after the quota sets it.
pub(super) fn v1(resources: &CgroupResources) -> Vec<Write> {
    let mut writes = Vec::new();
    writes.extend(resources.cpu_shares.map(|s| write("cpu.shares", s)));
    writes.extend(resources.cpu_period.map(|p| write("cpu.cfs_period_us", p)));
    writes.extend(resources.cpu_quota.filter(|q| *q != 0).map(|q| write("cpu.cfs_quota_us", q)));
    if let Some(limit) = resources.memory_limit.filter(|l| *l != 0) {
        if limit < 0 {
            // The kernel refuses a memory limit above memory and swap; unlimited memory means unlimited both.
            writes.push(optional("memory.memsw.limit_in_bytes", -1));
        }
        writes.push(write("memory.limit_in_bytes", limit));
    }
    writes.extend(resources.pids_limit.map(|l| write("pids.max", max_or(pids(l)))));
    for (size, limit) in &resources.hugepage_limits {
        writes.push(write(format!("hugetlb.{size}.limit_in_bytes"), limit));
        writes.push(optional(format!("hugetlb.{size}.rsvd.limit_in_bytes"), limit));
    }
    writes
}

/// The writes for v2.
pub(super) fn v2(resources: &CgroupResources) -> Vec<Write> {
    let mut writes = Vec::new();
    writes.extend(resources.cpu_shares.map(|s| write("cpu.weight", weight_from_shares(s))));
    if resources.cpu_quota.is_some_and(|q| q != 0) || resources.cpu_period.is_some() {
        let quota = resources.cpu_quota.filter(|q| *q > 0).map_or("max".into(), |q| q.to_string());
        let period = resources.cpu_period.unwrap_or(DEFAULT_PERIOD);
        writes.push(write("cpu.max", format!("{quota} {period}")));
    }
    if let Some(limit) = resources.memory_limit.filter(|l| *l != 0) {
        if limit < 0 {
            writes.push(optional("memory.swap.max", "max"));
        }
        writes.push(write("memory.max", max_or(limit)));
    }
    writes.extend(resources.pids_limit.map(|l| write("pids.max", max_or(pids(l)))));
    for (size, limit) in &resources.hugepage_limits {
        writes.push(write(format!("hugetlb.{size}.max"), limit));
        writes.push(optional(format!("hugetlb.{size}.rsvd.max"), limit));
    }
    writes.extend(resources.unified.iter().map(|(file, value)| write(file, value)));
    writes
}

/// A kernel CPU list (`0-3,7`) as systemd's bit set.
fn cpu_mask(list: &str) -> Option<Vec<u8>> {
    let mut mask = Vec::new();
    for cpu in crate::proc::parse_cpu_list(list)? {
        if mask.len() <= cpu / 8 {
            mask.resize(cpu / 8 + 1, 0);
        }
        mask[cpu / 8] |= 1 << (cpu % 8);
    }
    Some(mask)
}

/// Systemd's properties for the same resources (systemd.resource-control(5)), and the resources with the quota that systemd will
/// keep: it counts whole percents of a CPU, so a quota is rounded up to 10 ms a second, and the file must get the same.
pub(super) fn systemd(
    v2: bool,
    version: u32,
    resources: &CgroupResources,
) -> (Vec<(&'static str, PropertyValue)>, CgroupResources) {
    let unlimited = |value: i64| Number(u64::try_from(value).unwrap_or(u64::MAX));
    let mut resources = resources.clone();
    let mut properties = Vec::new();
    if let Some(limit) = resources.memory_limit.filter(|l| *l != 0) {
        properties.push((if v2 { "MemoryMax" } else { "MemoryLimit" }, unlimited(limit)));
        if v2 && limit < 0 {
            properties.push(("MemorySwapMax", Number(u64::MAX)));
        }
    }
    if let Some(shares) = resources.cpu_shares {
        properties.push(if v2 {
            ("CPUWeight", Number(weight_from_shares(shares)))
        } else {
            ("CPUShares", Number(shares))
        });
    }
    if let Some(period) = resources.cpu_period.filter(|_| version >= 242) {
        properties.push(("CPUQuotaPeriodUSec", Number(period)));
    }
    let quota = resources.cpu_quota.unwrap_or_default();
    if quota > 0 {
        let period = resources.cpu_period.unwrap_or(DEFAULT_PERIOD).max(1);
        let per_second = quota.unsigned_abs().saturating_mul(1_000_000) / period;
        let rounded = per_second.div_ceil(10_000) * 10_000;
        if rounded != per_second {
            resources.cpu_quota = i64::try_from(u128::from(rounded) * u128::from(period) / 1_000_000).ok();
        }
        properties.push(("CPUQuotaPerSecUSec", Number(rounded)));
    } else if quota < 0 || resources.cpu_period.is_some() {
        properties.push(("CPUQuotaPerSecUSec", Number(u64::MAX)));
    }
    if let Some(limit) = resources.pids_limit {
        properties.push(("TasksMax", unlimited(pids(limit))));
    }
    for (file, property) in [("memory.high", "MemoryHigh"), ("memory.low", "MemoryLow"), ("memory.min", "MemoryMin")] {
        let value = resources.unified.get(file).map(|v| v.trim());
        let value = value.and_then(|v| if v == "max" { Some(u64::MAX) } else { v.parse().ok() });
        properties.extend(value.filter(|_| v2).map(|v| (property, Number(v))));
    }
    let cpus = resources.unified.get("cpuset.cpus").filter(|_| v2 && version >= 244);
    properties.extend(cpus.and_then(|list| Some(("AllowedCPUs", Cpus(cpu_mask(list)?)))));
    (properties, resources)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(writes: &[Write]) -> Vec<String> {
        writes.iter().map(|w| format!("{}={}{}", w.file, w.value, if w.optional { "?" } else { "" })).collect()
    }

    fn resources() -> CgroupResources {
        CgroupResources {
            cpu_shares: Some(1024),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            memory_limit: Some(64 << 20),
            pids_limit: Some(100),
            hugepage_limits: [("2MB".to_owned(), 0)].into(),
            unified: [("memory.high".to_owned(), "max".to_owned())].into(),
        }
    }

    #[test]
    fn weights_are_the_kubelets() {
        // milli CPU → shares → weight as measured on a Go kubelet: 10m, 100m, 500m, 1, 4 CPUs.
        for (shares, weight) in [(2, 1), (10, 1), (102, 4), (512, 20), (1024, 39), (4096, 157), (262_144, 10_000)] {
            assert_eq!(weight_from_shares(shares), weight, "{shares}");
        }
        assert_eq!(weight_from_shares(0), 1);
        assert_eq!(shares_from_weight(39), 998);
        assert_eq!(shares_from_weight(1), 2);
        assert_eq!(shares_from_weight(10_000), 262_144);
    }

    #[test]
    fn v1_files() {
        assert_eq!(
            lines(&v1(&resources())),
            [
                "cpu.shares=1024",
                "cpu.cfs_period_us=100000",
                "cpu.cfs_quota_us=50000",
                "memory.limit_in_bytes=67108864",
                "pids.max=100",
                "hugetlb.2MB.limit_in_bytes=0",
                "hugetlb.2MB.rsvd.limit_in_bytes=0?",
            ]
        );
        let unlimited = CgroupResources {
            cpu_quota: Some(-1),
            memory_limit: Some(-1),
            pids_limit: Some(-1),
            ..CgroupResources::default()
        };
        assert_eq!(
            lines(&v1(&unlimited)),
            ["cpu.cfs_quota_us=-1", "memory.memsw.limit_in_bytes=-1?", "memory.limit_in_bytes=-1", "pids.max=max"]
        );
        assert_eq!(v1(&CgroupResources::default()), []);
    }

    #[test]
    fn v2_files() {
        assert_eq!(
            lines(&v2(&resources())),
            [
                "cpu.weight=39",
                "cpu.max=50000 100000",
                "memory.max=67108864",
                "pids.max=100",
                "hugetlb.2MB.max=0",
                "hugetlb.2MB.rsvd.max=0?",
                "memory.high=max",
            ]
        );
        let unlimited = CgroupResources {
            cpu_quota: Some(-1),
            memory_limit: Some(-1),
            pids_limit: Some(0),
            ..CgroupResources::default()
        };
        assert_eq!(
            lines(&v2(&unlimited)),
            ["cpu.max=max 100000", "memory.swap.max=max?", "memory.max=max", "pids.max=1"]
        );
        let none = CgroupResources { cpu_quota: Some(0), memory_limit: Some(0), ..CgroupResources::default() };
        assert_eq!(v2(&none), []);
    }

    #[test]
    fn systemd_properties() {
        let (properties, same) = systemd(true, 252, &resources());
        assert_eq!(
            properties,
            [
                ("MemoryMax", Number(64 << 20)),
                ("CPUWeight", Number(39)),
                ("CPUQuotaPeriodUSec", Number(100_000)),
                ("CPUQuotaPerSecUSec", Number(500_000)),
                ("TasksMax", Number(100)),
                ("MemoryHigh", Number(u64::MAX)),
            ]
        );
        assert_eq!(same, resources());
        let (properties, _) = systemd(false, 239, &resources());
        assert_eq!(
            properties,
            [
                ("MemoryLimit", Number(64 << 20)),
                ("CPUShares", Number(1024)),
                ("CPUQuotaPerSecUSec", Number(500_000)),
                ("TasksMax", Number(100))
            ]
        );
        let cpus = CgroupResources {
            unified: [("cpuset.cpus".to_owned(), "0-1,9".to_owned())].into(),
            ..CgroupResources::default()
        };
        assert_eq!(systemd(true, 244, &cpus).0, [("AllowedCPUs", Cpus(vec![0b11, 0b10]))]);
        assert_eq!(systemd(true, 243, &cpus).0, []);
        assert_eq!(systemd(false, 252, &cpus).0, []);
        assert_eq!(lines(&v2(&cpus)), ["cpuset.cpus=0-1,9"]);
    }

    #[test]
    fn systemd_counts_whole_percents() {
        let odd = CgroupResources { cpu_quota: Some(1_500), cpu_period: Some(100_000), ..CgroupResources::default() };
        let (properties, written) = systemd(true, 252, &odd);
        assert!(properties.contains(&("CPUQuotaPerSecUSec", Number(20_000))));
        assert_eq!(written.cpu_quota, Some(2_000));
    }

    proptest! {
        #[test]
        fn systemd_never_lowers_a_quota(quota in 1_000_i64..10_000_000, period in 1_000_u64..1_000_000) {
            let asked = CgroupResources { cpu_quota: Some(quota), cpu_period: Some(period), ..CgroupResources::default() };
            let (_, written) = systemd(true, 252, &asked);
            prop_assert!(written.cpu_quota.unwrap() >= quota - 1);
        }
    }
}
