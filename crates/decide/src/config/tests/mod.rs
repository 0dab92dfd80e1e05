//! Whole requests from pods and facts.

mod container;
mod downward;
mod env;
mod sandbox;
mod security;

use std::collections::BTreeMap;

use model::pod::DesiredPod;
use model::quantity::Quantity;

use super::env::{EnvSources, Source};
use super::*;
use crate::resources::ResourceList;
use crate::resources::testing::{pod, pod_from, pod_with};

/// A list from `name=quantity` pairs.
pub(super) fn list(items: &[(&str, &str)]) -> ResourceList {
    items.iter().map(|(name, q)| (name.to_string(), Quantity::parse(q).expect("quantity"))).collect()
}

/// A node with cgroup v2, 8 GiB, 4 CPUs.
pub(crate) fn node() -> NodeFacts {
    NodeFacts {
        pod_logs_dir: "/var/log/pods".into(),
        host_ips: Some(vec!["192.0.2.1".into(), "2001:db8::1".into()]),
        allocatable: Some(list(&[("cpu", "3900m"), ("memory", "7Gi"), ("ephemeral-storage", "50Gi")])),
        memory_capacity: 8 << 30,
        swap_capacity: 2 << 30,
        hugepage_sizes: vec!["2MB".into(), "1GB".into()],
        cgroup: CgroupVersion::V2,
        swap_controller: true,
        swap_behavior: SwapBehavior::NoSwap,
        cpu_cfs_quota: true,
        cpu_cfs_period: 100_000,
        single_process_oom_kill: false,
        memory_qos: None,
        seccomp_default: false,
        seccomp_dir: "/var/lib/kubelet/seccomp".into(),
        selinux: None,
        thermal_throttle_paths: vec!["/sys/devices/system/cpu/cpu0/thermal_throttle".into()],
        gates: Gates::default(),
    }
}

/// Facts as after a first, ordinary start.
pub(super) fn facts(node: &NodeFacts) -> ContainerFacts<'_> {
    ContainerFacts {
        node,
        hash: 0xe22_0f96,
        restart_count: 0,
        image: Some(ResolvedImage { reference: "sha256:abc".into(), user: ImageUser::Uid(0) }),
        pod_ips: vec!["10.1.2.3".into(), "fd00::3".into()],
        volumes: BTreeMap::new(),
        block_devices: BTreeMap::new(),
        sub_path_targets: BTreeMap::new(),
        env: EnvSources { services: Some(BTreeMap::new()), ..EnvSources::default() },
        hosts_file: Some("/pods/uid-1/etc-hosts".into()),
        termination_log: Some("/pods/uid-1/containers/a/0123abcd".into()),
        devices: DeviceFacts::default(),
        user_namespace: UserNamespaceFacts::default(),
        volume_gids: Vec::new(),
        recursive_read_only: true,
        exclusive_cpus: false,
        target_id: None,
    }
}

/// A pod with one container `a`, given the inside of the container and the rest of the spec.
pub(super) fn one(container: &str, rest: &str) -> DesiredPod {
    pod(&one_spec(container, rest))
}

pub(super) fn one_spec(container: &str, rest: &str) -> String {
    let comma = |s: &str| if s.is_empty() { String::new() } else { format!(", {s}") };
    format!(
        r#"{{"enableServiceLinks": true, "containers": [{{"name": "a", "image": "busybox"{}}}]{}}}"#,
        comma(container),
        comma(rest)
    )
}

/// The request for container `a`.
pub(super) fn request(
    pod: &DesiredPod,
    facts: &ContainerFacts<'_>,
) -> Result<cri_api::v1::ContainerConfig, ConfigError> {
    container_config(pod, pod.container("a").expect("container a"), facts)
}

/// The message of what must fail.
pub(super) fn fault<T: std::fmt::Debug>(result: Result<T, ConfigError>) -> String {
    result.expect_err("must fail").message
}

pub(super) fn found<T>(value: T) -> Source<T> {
    Source::Found(value)
}

pub(super) fn strings(items: &[&str]) -> Vec<String> {
    items.iter().map(|s| s.to_string()).collect()
}

pub(super) fn map(items: &[(&str, &str)]) -> BTreeMap<String, String> {
    items.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}
