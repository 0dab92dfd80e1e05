//! Resource arithmetic: what a pod asks for, its QoS class, and what follows from both for cgroups, OOM scores and volumes.
//!
//! Pods are taken as they are given: for in-place resize the caller passes the pod with its allocated resources.

mod aggregate;
pub mod cpu;
mod empty_dir;
pub mod hugepages;
mod node;
mod oom;
mod pod_cgroup;
mod qos;

pub(crate) use aggregate::pod_level_limits;
pub use aggregate::{
    PodSum, container_limits, container_requests, has_pod_level_limits, has_pod_level_requests,
    has_pod_level_resources, pod_limits, pod_requests,
};
pub use empty_dir::memory_volume_size;
pub use node::{
    EvictionReserve, Reservations, Reserve, ReservedGroup, allocatable, enforced_reservation, kubepods_resources,
    reserved_groups, reserved_list, validate_reservations,
};
pub use oom::oom_score_adj;
pub use pod_cgroup::{
    MemoryQos, MemoryReserve, PodCgroupOptions, QosDemand, kubepods_name, pod_cgroup_name, pod_cgroup_resources,
    qos_cgroup_name, qos_cgroup_resources,
};
pub use qos::{QosClass, compute_qos_class, is_critical, is_node_critical, qos_class};

use std::collections::BTreeMap;

use model::api;
use model::quantity::{Format, Quantity};

/// Amounts by resource name.
pub type ResourceList = BTreeMap<String, Quantity>;

/// Resource name of CPU.
pub const CPU: &str = "cpu";
/// Resource name of memory.
pub const MEMORY: &str = "memory";
/// Resource name of node-local storage.
pub const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// Internal resource name of process ids.
pub const PIDS: &str = "pid";

/// A list of the API as numbers. What is not a quantity counts as absent; validation refused it long before.
pub fn resource_list(list: &BTreeMap<String, api::Quantity>) -> ResourceList {
    list.iter().filter_map(|(name, q)| Some((name.clone(), Quantity::of(q).ok()?))).collect()
}

/// [`resource_list`] of a field that may be absent.
pub(crate) fn optional_list(list: Option<&BTreeMap<String, api::Quantity>>) -> ResourceList {
    list.map(resource_list).unwrap_or_default()
}

/// Thousandths of a CPU, rounded up; 0 when absent.
pub fn cpu_milli(list: &ResourceList) -> i64 {
    list.get(CPU).map_or(0, Quantity::milli_value)
}

/// Whole units (bytes), rounded up; 0 when absent.
pub fn value(list: &ResourceList, name: &str) -> i64 {
    list.get(name).map_or(0, Quantity::value)
}

/// Nothing, in binary format.
pub(crate) fn zero() -> Quantity {
    Quantity::from_value(0, Format::BinarySI)
}

#[cfg(test)]
mod real;
#[cfg(test)]
pub(crate) mod testing;
