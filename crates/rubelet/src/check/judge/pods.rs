//! maxPods against what the host has.

use std::net::IpAddr;

use config::KubeletConfiguration;

use super::super::facts::HostFacts;
use super::{Finding, ok, size, unknown, warn};
use crate::table::count;

/// What a pod takes before its containers do anything: a shim process of the runtime and the sandbox.
const POD_MEMORY: u64 = 16 << 20;
/// Threads of the shim, the sandbox and a first process.
const POD_PIDS: u64 = 16;
/// Pods that one CPU can keep probing and relisting.
const PODS_PER_CPU: u64 = 64;
/// Addresses of a range that pods cannot have: network, gateway, broadcast.
const NOT_FOR_PODS: u64 = 3;

/// The pods that may run, after podsPerCore.
fn pods(config: &KubeletConfiguration, cpus: Option<usize>) -> u64 {
    let max = u64::try_from(config.max_pods).unwrap_or_default();
    let per_core = u64::try_from(config.pods_per_core).unwrap_or_default();
    match cpus {
        Some(cpus) if per_core > 0 => max.min(per_core.saturating_mul(cpus as u64)),
        _ => max,
    }
}

/// Is there room for as many pods as are allowed?
pub(super) fn judge(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "pods";
    let pods = pods(config, facts.cpus.as_ref().ok().copied());
    let mut out = Vec::new();
    let mut room = Vec::new();
    let mut compare = |thing: String, fits: u64| {
        if fits < pods {
            let message = format!("{pods} pods are allowed, but {thing} is enough for about {fits}");
            out.push(warn(topic, message, format!("set maxPods to {} or less", fits.max(1))));
        } else {
            room.push(thing);
        }
    };
    let mut unseen = Vec::new();
    match &facts.cpus {
        Ok(cpus) => compare(count(*cpus, "CPU"), *cpus as u64 * PODS_PER_CPU),
        Err(why) => unseen.push(unknown(topic, why)),
    }
    match &facts.memory {
        Ok(memory) => compare(format!("{} of memory", size(memory.total)), memory.total / POD_MEMORY),
        Err(why) => unseen.push(unknown(topic, why)),
    }
    match &facts.pids {
        Ok((max, used)) => {
            // The node's own processes count too.
            compare(format!("a limit of {max} processes ({used} in use)"), max.saturating_sub(*used) / POD_PIDS);
        }
        Err(why) => unseen.push(unknown(topic, why)),
    }
    for range in config.pod_cidr.split(',').map(str::trim).filter(|r| !r.is_empty()) {
        if let Some(addresses) = addresses(range) {
            compare(format!("podCIDR {range}"), addresses.saturating_sub(NOT_FOR_PODS));
        }
    }
    if out.is_empty() && unseen.is_empty() {
        out.push(ok(topic, format!("{pods} allowed; {} will do", room.join(", "))));
    }
    out.extend(unseen);
    out
}

/// How many addresses a range has; None when it is none (a finding of the configuration).
fn addresses(range: &str) -> Option<u64> {
    let (ip, length) = range.split_once('/')?;
    let bits = if ip.parse::<IpAddr>().ok()?.is_ipv4() { 32 } else { 128 };
    let host = u32::checked_sub(bits, length.parse().ok()?)?;
    Some(1u64.checked_shl(host).unwrap_or(u64::MAX))
}
