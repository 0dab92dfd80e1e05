//! Facts in, findings out. Pure: no clock, no files.

mod cluster;
mod configuration;
pub(super) mod host;
mod places;
mod pods;
pub(super) mod ports;
mod runtime;

use config::{FlagProblem, Flags, Loaded};
use model::report::{Finding, Severity};

use super::facts::{ClusterFacts, HostFacts, RuntimeFacts};
use super::{error, ok, unknown, warn};

/// Every judgement, in the order in which a person would look.
pub(super) fn all(
    flags: &Flags,
    problems: &[FlagProblem],
    loaded: &Loaded,
    host_facts: &HostFacts,
    runtime_facts: &RuntimeFacts,
    cluster_facts: Option<&ClusterFacts>,
) -> Vec<Finding> {
    let config = &loaded.config;
    [
        configuration::judge(flags, problems, loaded),
        host::judge_agent(host_facts),
        host::judge_rights(host_facts, config),
        host::judge_name(host_facts),
        runtime::judge(runtime_facts),
        runtime::judge_driver(runtime_facts, host_facts, config),
        cluster::judge(cluster_facts, config.rotate_certificates, host_facts.clock.now),
        host::judge_cgroups(host_facts, config),
        host::judge_swap(host_facts, config),
        host::judge_kernel(host_facts, config),
        host::judge_network_settings(host_facts),
        ports::judge(host_facts, config),
        places::judge(host_facts, config),
        pods::judge(host_facts, config),
        host::judge_resolver(host_facts, config),
        host::judge_clock(host_facts),
        host::judge_programs(host_facts, config),
    ]
    .concat()
}

/// `1.5 GiB`, `512 MiB`, `17 KiB`.
fn size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) if bytes / unit < 10 => format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit),
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests;
