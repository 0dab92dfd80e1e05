//! How the machine's CPUs stand to each other.

use std::collections::{BTreeMap, BTreeSet};

use super::CpuSet;
use crate::numa::NumaMask;

/// Where a logical CPU is. Ids tell places of one kind apart on the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Physical core: the lowest number of its CPUs.
    pub core: u32,
    /// Socket (`physical_package_id`).
    pub socket: u32,
    /// NUMA node.
    pub numa: u32,
    /// Cache below the cores that several of them share (last level); the socket's number where the kernel tells of none.
    pub uncore: u32,
}

/// The machine's CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology(pub BTreeMap<u32, Place>);

/// A kind of place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Core,
    Socket,
    Numa,
    Uncore,
}

impl Place {
    pub(super) fn of(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Core => self.core,
            Kind::Socket => self.socket,
            Kind::Numa => self.numa,
            Kind::Uncore => self.uncore,
        }
    }
}

impl Topology {
    /// Every CPU.
    pub fn all(&self) -> CpuSet {
        self.0.keys().copied().collect()
    }

    /// Ids of the places of one kind that these CPUs are in.
    pub(super) fn places(&self, cpus: &CpuSet, kind: Kind) -> BTreeSet<u32> {
        cpus.iter().filter_map(|cpu| self.0.get(&cpu)).map(|place| place.of(kind)).collect()
    }

    /// Those of these CPUs that are in this place.
    pub(super) fn within(&self, cpus: &CpuSet, kind: Kind, id: u32) -> CpuSet {
        cpus.iter().filter(|cpu| self.0.get(cpu).is_some_and(|place| place.of(kind) == id)).collect()
    }

    /// Every CPU of a place.
    pub(super) fn whole(&self, kind: Kind, id: u32) -> CpuSet {
        self.0.iter().filter(|(_, place)| place.of(kind) == id).map(|(cpu, _)| *cpu).collect()
    }

    fn count(&self, kind: Kind) -> usize {
        self.0.values().map(|p| p.of(kind)).collect::<BTreeSet<_>>().len()
    }

    /// Number of sockets.
    pub fn sockets(&self) -> usize {
        self.count(Kind::Socket)
    }

    /// Numbers of the NUMA nodes that have CPUs.
    pub fn numa_nodes(&self) -> Vec<i64> {
        let nodes: BTreeSet<i64> = self.0.values().map(|p| i64::from(p.numa)).collect();
        nodes.into_iter().collect()
    }

    /// CPUs of a physical core; on machines with cores of several kinds the average, rounded down.
    pub fn per_core(&self) -> usize {
        self.0.len().checked_div(self.count(Kind::Core)).unwrap_or(0).max(1)
    }

    pub(super) fn per_uncore(&self) -> usize {
        self.0.len().checked_div(self.count(Kind::Uncore)).unwrap_or(0)
    }

    /// Those of these CPUs that are on these NUMA nodes.
    pub fn on(&self, cpus: &CpuSet, nodes: NumaMask) -> CpuSet {
        cpus.iter().filter(|cpu| self.0.get(cpu).is_some_and(|p| nodes.has(i64::from(p.numa)))).collect()
    }

    /// How many of these CPUs each NUMA node has.
    pub fn per_numa(&self, cpus: &CpuSet) -> BTreeMap<i64, usize> {
        let mut counts: BTreeMap<i64, usize> = self.numa_nodes().into_iter().map(|n| (n, 0)).collect();
        for place in cpus.iter().filter_map(|cpu| self.0.get(&cpu)) {
            *counts.entry(i64::from(place.numa)).or_default() += 1;
        }
        counts
    }

    /// Every CPU of the physical cores that these are on.
    pub fn whole_cores(&self, cpus: &CpuSet) -> CpuSet {
        let cores = self.places(cpus, Kind::Core);
        self.0.iter().filter(|(_, p)| cores.contains(&p.core)).map(|(cpu, _)| *cpu).collect()
    }

    /// True when these share one last-level cache.
    pub fn share_cache(&self, cpus: &CpuSet) -> bool {
        self.places(cpus, Kind::Uncore).len() == 1
    }
}
