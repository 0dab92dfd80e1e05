//! Control groups as names and values, independent of version and driver.

use std::collections::BTreeMap;

/// A control group's logical name: path components below the cgroup root, as `["kubepods", "burstable", "pod<uid>"]`.
/// How it looks on disk is the driver's business.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CgroupName(pub Vec<String>);

impl CgroupName {
    /// This name with one more component.
    #[must_use]
    pub fn child(&self, part: impl Into<String>) -> Self {
        let mut parts = self.0.clone();
        parts.push(part.into());
        Self(parts)
    }
}

/// What the kubelet writes into a control group. None: left alone.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CgroupResources {
    /// CPU shares (v1); converted to a weight on v2 (contract §4).
    pub cpu_shares: Option<u64>,
    /// CFS quota in µs per period; -1: none.
    pub cpu_quota: Option<i64>,
    /// CFS period in µs.
    pub cpu_period: Option<u64>,
    /// Memory limit in bytes; -1: none.
    pub memory_limit: Option<i64>,
    /// Highest number of processes; -1: none.
    pub pids_limit: Option<i64>,
    /// Huge page limits in bytes by page size as the kernel spells it (`2MB`, `1GB`).
    pub hugepage_limits: BTreeMap<String, u64>,
    /// Files written as they are, v2 only (`memory.high`, …).
    pub unified: BTreeMap<String, String>,
}
