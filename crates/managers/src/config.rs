//! What the managers go by.

use std::collections::BTreeMap;
use std::path::PathBuf;

use decide::cpus::{self, CpuSet, Place};
use decide::memory::{Amounts, Bank};
use decide::placement::{Machine, Placement, Policy, Scope};
use host::proc::NumaTopology;

/// `cpuManagerPolicy: static`.
#[derive(Clone, Debug)]
pub struct CpuConfig {
    /// `cpuManagerPolicyOptions`.
    pub options: cpus::Options,
    /// `reservedSystemCPUs`; empty: those that would be taken first.
    pub reserved: CpuSet,
    /// How many CPUs are reserved, rounded up.
    pub count: usize,
}

/// `memoryManagerPolicy: Static`.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// `reservedMemory` by NUMA node, in bytes.
    pub reserved: BTreeMap<i64, Amounts>,
    /// What is reserved of the whole node: `kubeReserved`, `systemReserved` and hard eviction, in bytes.
    pub whole: Amounts,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The root directory, with the checkpoints of CPUs and memory.
    pub root: PathBuf,
    /// Where device plugins' sockets are, and the devices' checkpoint.
    pub device_plugins: PathBuf,
    /// Gate `ResourceHealthStatus`: statuses show how devices are.
    pub health_status: bool,
    /// Gate `ResourceHealthStatusMessage`: they show why.
    pub health_message: bool,
    /// Gate `DisableCPUQuotaWithExclusiveCPUs`.
    pub no_quota: bool,
    /// None: policy `none`.
    pub cpus: Option<CpuConfig>,
    /// None: policy `None`.
    pub memory: Option<MemoryConfig>,
    /// `topologyManagerPolicy`.
    pub policy: Policy,
    /// `topologyManagerScope`.
    pub scope: Scope,
    /// `prefer-closest-numa-nodes`.
    pub prefer_closest: bool,
    /// `max-allowable-numa-nodes`.
    pub max_nodes: Option<usize>,
    /// The machine.
    pub topology: NumaTopology,
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn short(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl Config {
    pub(crate) fn placement(&self) -> Result<Placement, String> {
        let nodes: Vec<i64> = self.topology.nodes.keys().map(|n| signed(*n)).collect();
        let mut distances = BTreeMap::new();
        for (from, node) in &self.topology.nodes {
            for (to, distance) in nodes.iter().zip(&node.distances) {
                distances.insert((signed(*from), *to), *distance);
            }
        }
        let machine = Machine { nodes, distances };
        Placement::new(self.policy, self.scope, self.prefer_closest, self.max_nodes, machine)
    }

    pub(crate) fn cpu_topology(&self) -> cpus::Topology {
        let place = |p: &host::proc::CpuPlace| Place {
            core: short(p.core),
            socket: short(p.socket),
            numa: short(p.numa),
            uncore: short(p.cache.unwrap_or(p.socket)),
        };
        cpus::Topology(self.topology.cpus.iter().map(|(cpu, p)| (short(*cpu), place(p))).collect())
    }

    pub(crate) fn banks(&self) -> BTreeMap<i64, Bank> {
        let nodes = self.topology.nodes.iter();
        nodes.map(|(id, n)| (signed(*id), Bank { total: n.memory, huge_pages: n.huge_pages.clone() })).collect()
    }
}
