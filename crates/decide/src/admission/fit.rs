//! Whether a pod fits beside the others: amounts of resources and host ports.

use std::collections::BTreeMap;

use model::pod::DesiredPod;

use super::{Refusal, lasting};
use crate::resources::{self, CPU, PodSum, ResourceList};

/// Amounts of resources as whole numbers, as the scheduler counts: CPU in thousandths, bytes, pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts(BTreeMap<String, i64>);

impl Amounts {
    /// What a pod asks for, overhead included.
    pub fn of_pod(pod: &DesiredPod, pod_level: bool) -> Self {
        Self::of_list(&resources::pod_requests(pod, PodSum { overhead: true, pod_level }))
    }

    /// A list of quantities.
    pub fn of_list(list: &ResourceList) -> Self {
        let whole = |name: &String| {
            if name == CPU { resources::cpu_milli(list) } else { resources::value(list, name) }
        };
        Self(list.keys().map(|name| (name.clone(), whole(name))).collect())
    }

    /// One amount; 0 when absent.
    pub fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// True when the resource is listed at all.
    fn lists(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (name, n) in &other.0 {
            let total = self.0.entry(name.clone()).or_default();
            *total = total.saturating_add(*n);
        }
    }

    /// Raises every amount to at least that of `floor`.
    pub(super) fn raise(&mut self, floor: &Self) {
        for (name, n) in &floor.0 {
            let own = self.0.entry(name.clone()).or_default();
            *own = (*own).max(*n);
        }
    }

    pub(super) fn sub(&mut self, other: &Self) {
        for (name, n) in &other.0 {
            if let Some(total) = self.0.get_mut(name) {
                *total = total.saturating_sub(*n);
            }
        }
        self.0.retain(|_, n| *n != 0);
    }

    /// Names and amounts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.0.iter().map(|(name, n)| (name.as_str(), *n))
    }
}

/// A resource of which there is not enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shortage {
    pub(super) resource: String,
    pub(super) requested: i64,
    pub(super) used: i64,
    pub(super) capacity: i64,
}

impl Shortage {
    pub(super) fn refusal(&self) -> Refusal {
        let Self { resource, requested, used, capacity } = self;
        Refusal {
            reason: format!("OutOf{resource}"),
            message: format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            ),
        }
    }
}

/// Everything there is too little of, in the order in which it is looked at: pods, cpu, memory, ephemeral-storage, others by name.
pub(super) fn shortages(requests: &Amounts, used: &Amounts, capacity: &Amounts, pods: usize) -> Vec<Shortage> {
    let mut list = Vec::new();
    let pods = i64::try_from(pods).unwrap_or(i64::MAX);
    if pods >= capacity.get("pods") {
        list.push(Shortage { resource: "pods".into(), requested: 1, used: pods, capacity: capacity.get("pods") });
    }
    let first = ["cpu", "memory", "ephemeral-storage"];
    let others = requests.0.keys().map(String::as_str).filter(|n| !first.contains(n));
    for name in first.into_iter().chain(others) {
        // An extended resource that the node does not know is somebody else's business (DRA, cluster-wide resources).
        if is_extended(name) && !capacity.lists(name) {
            continue;
        }
        let (requested, in_use, all) = (requests.get(name), used.get(name), capacity.get(name));
        if requested > 0 && requested > all.saturating_sub(in_use) {
            list.push(Shortage { resource: name.into(), requested, used: in_use, capacity: all });
        }
    }
    list
}

/// A resource outside the `kubernetes.io/` namespace, as device plugins announce them.
fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// A port on the node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// Address; `0.0.0.0` for all.
    pub ip: String,
    /// TCP, UDP or SCTP.
    pub protocol: String,
    /// Port.
    pub port: i32,
}

const ALL: &str = "0.0.0.0";

/// Host ports of the containers that run as long as the pod does.
pub(super) fn host_ports(pod: &DesiredPod) -> Vec<HostPort> {
    let or = |s: &Option<String>, default: &str| s.as_deref().filter(|s| !s.is_empty()).unwrap_or(default).to_owned();
    pod.containers()
        .filter(|e| lasting(e.kind))
        .flat_map(|e| e.spec.ports.iter().flatten())
        .filter_map(|p| {
            let port = p.host_port.filter(|n| *n > 0)?;
            Some(HostPort { ip: or(&p.host_ip, ALL), protocol: or(&p.protocol, "TCP"), port })
        })
        .collect()
}

/// Two ports collide when protocol and number are the same and the addresses are, or either is all of them.
pub(super) fn ports_conflict(a: &[HostPort], b: &[HostPort]) -> bool {
    a.iter().any(|a| {
        b.iter().any(|b| a.port == b.port && a.protocol == b.protocol && (a.ip == b.ip || a.ip == ALL || b.ip == ALL))
    })
}
