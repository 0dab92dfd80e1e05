//! Linux resources of containers and sandboxes, as the runtime gets them.

use std::collections::BTreeMap;

use cri_api::v1;
use model::api::ResourceRequirements;
use model::cgroup::CgroupResources;
use model::pod::{ContainerEntry, DesiredPod};

use super::facts::{CgroupVersion, NodeFacts, SwapBehavior};
use crate::resources::{
    CPU, MEMORY, MemoryQos, PodSum, QosClass, container_limits, container_requests, cpu, cpu_milli, hugepages,
    is_critical, oom_score_adj, optional_list, pod_level_limits, pod_limits, pod_requests, qos_class, value,
};

/// Resources of a container, for its creation and for updates of a running one. `exclusive_cpus`: it holds CPUs of its own.
pub fn container_resources(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    node: &NodeFacts,
    exclusive_cpus: bool,
) -> v1::LinuxContainerResources {
    let pod_level = node.gates.pod_level_resources;
    let requests = container_requests(container);
    let own = container_limits(container);
    // What the container leaves open, the pod's own limit closes.
    let mut limits = own.clone();
    let mut huge: BTreeMap<String, u64> = BTreeMap::new();
    if pod_level {
        let of_pod = pod_level_limits(pod);
        huge.extend(hugepages::amounts(&of_pod));
        for name in [CPU, MEMORY] {
            if value(&own, name) == 0
                && let Some(limit) = of_pod.get(name)
            {
                limits.insert(name.into(), limit.clone());
            }
        }
    }
    huge.extend(hugepages::amounts(&own));

    let request = requests.get(CPU).map(|q| q.milli_value());
    let mut out = base(node, request, cpu_milli(&limits), value(&limits, MEMORY), exclusive_cpus);
    out.oom_score_adj = oom_score_adj(pod, container, node.memory_capacity, pod_level);
    out.hugepage_limits = node
        .hugepage_sizes
        .iter()
        .map(|size| v1::HugepageLimit { page_size: size.clone(), limit: huge.get(size).copied().unwrap_or(0) })
        .collect();
    let memory = (value(&requests, MEMORY), value(&own, MEMORY));
    let class = qos_class(pod, pod_level);
    set_swap(&mut out, pod, class, memory, node);
    if let Some(qos) = node.memory_qos.filter(|_| node.cgroup == CgroupVersion::V2) {
        out.unified.extend(memory_qos(qos, class, memory, node));
    }
    out
}

/// Resources that a container is created with, for the actuated checkpoint: CPU and memory limits that it leaves open are the pod's own.
pub fn created_resources(pod: &DesiredPod, container: ContainerEntry<'_>, node: &NodeFacts) -> ResourceRequirements {
    let mut resources = container.spec.resources.clone().unwrap_or_default();
    let of_pod =
        pod.spec().resources.as_ref().and_then(|r| r.limits.as_ref()).filter(|_| node.gates.pod_level_resources);
    let own = container_limits(container);
    for name in [CPU, MEMORY] {
        if value(&own, name) == 0
            && let Some(limit) = of_pod.and_then(|limits| limits.get(name))
        {
            resources.limits.get_or_insert_default().insert(name.into(), limit.clone());
        }
    }
    resources
}

/// What UpdatePodSandboxResources says of a pod whose cgroup has these settings: its overhead, and the settings without it. No limit stays none.
pub fn sandbox_update(
    pod: &DesiredPod,
    cgroup: &CgroupResources,
    node: &NodeFacts,
) -> (v1::LinuxContainerResources, v1::LinuxContainerResources) {
    let list = optional_list(pod.spec().overhead.as_ref());
    let (milli, bytes) = (cpu_milli(&list), value(&list, MEMORY));
    let period = cgroup.cpu_period.and_then(|p| i64::try_from(p).ok()).unwrap_or(0);
    let shares = cgroup.cpu_shares.and_then(|s| i64::try_from(s).ok());
    let resources = v1::LinuxContainerResources {
        cpu_period: period,
        cpu_quota: match cgroup.cpu_quota {
            Some(quota) if quota > 0 && milli > 0 => quota - cpu::quota(milli, period),
            quota => quota.unwrap_or(0),
        },
        cpu_shares: match shares {
            Some(shares) if milli > 0 => cpu::shares(cpu::milli_of_shares(shares) - milli) as i64,
            shares => shares.unwrap_or(0),
        },
        memory_limit_in_bytes: match cgroup.memory_limit {
            Some(limit) if limit > 0 => limit - bytes,
            limit => limit.unwrap_or(0),
        },
        ..Default::default()
    };
    (overhead_resources(pod, node), resources)
}

/// CPU in thousandths, memory in bytes; zero limits are none. Without request the limit stands for it.
fn base(
    node: &NodeFacts,
    request: Option<i64>,
    cpu_limit: i64,
    memory_limit: i64,
    unlimited_cpu: bool,
) -> v1::LinuxContainerResources {
    let mut out = v1::LinuxContainerResources {
        cpu_shares: cpu::shares(request.unwrap_or(cpu_limit)) as i64,
        memory_limit_in_bytes: memory_limit,
        ..Default::default()
    };
    if node.cpu_cfs_quota {
        out.cpu_period = node.cpu_cfs_period;
        out.cpu_quota = if unlimited_cpu { -1 } else { cpu::quota(cpu_limit, node.cpu_cfs_period) };
    }
    if node.cgroup == CgroupVersion::V2 && !node.single_process_oom_kill {
        // The kernel then kills all of a container's processes at once, not one of them.
        out.unified.insert("memory.oom.group".into(), "1".into());
    }
    out
}

/// `linux.resources` of a sandbox: the pod's sums without overhead.
pub(super) fn sandbox_resources(
    pod: &DesiredPod,
    node: &NodeFacts,
    exclusive_cpus: bool,
) -> v1::LinuxContainerResources {
    let what = PodSum { overhead: false, pod_level: node.gates.pod_level_resources };
    let (requests, limits) = (pod_requests(pod, what), pod_limits(pod, what));
    let request = requests.get(CPU).map(|q| q.milli_value());
    base(node, request, cpu_milli(&limits), value(&limits, MEMORY), exclusive_cpus)
}

/// `linux.overhead` of a sandbox: request and limit alike.
pub(super) fn overhead_resources(pod: &DesiredPod, node: &NodeFacts) -> v1::LinuxContainerResources {
    match pod.spec().overhead.as_ref() {
        None => v1::LinuxContainerResources::default(),
        Some(overhead) => {
            let list = optional_list(Some(overhead));
            base(node, Some(cpu_milli(&list)), cpu_milli(&list), value(&list, MEMORY), false)
        }
    }
}

/// Swap (KEP-2400). `memory`: the container's own request and limit in bytes.
fn set_swap(
    out: &mut v1::LinuxContainerResources,
    pod: &DesiredPod,
    class: QosClass,
    (request, limit): (i64, i64),
    node: &NodeFacts,
) {
    if !node.swap_controller {
        return;
    }
    if node.cgroup == CgroupVersion::V1 {
        // The file counts memory and swap together.
        out.memory_swap_limit_in_bytes = out.memory_limit_in_bytes;
        return;
    }
    let limited = node.swap_behavior == SwapBehavior::LimitedSwap
        && class == QosClass::Burstable
        && !is_critical(pod)
        && request != limit
        && request <= node.memory_capacity
        && node.memory_capacity > 0;
    let swap =
        if limited { (request as f64 / node.memory_capacity as f64 * node.swap_capacity as f64) as i64 } else { 0 };
    out.unified.insert("memory.swap.max".into(), swap.to_string());
}

/// Memory protection and throttling (KEP-2570).
fn memory_qos(
    qos: MemoryQos,
    class: QosClass,
    (request, limit): (i64, i64),
    node: &NodeFacts,
) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut set = |file: &str, bytes: i64| files.push((file.to_string(), bytes.to_string()));
    if request != 0 && qos.tiered_reservation {
        set(if class == QosClass::Guaranteed { "memory.min" } else { "memory.low" }, request);
    } else {
        set("memory.min", 0);
        set("memory.low", 0);
    }
    let top = if limit != 0 { limit } else { node.allocatable.as_ref().map_or(0, |a| value(a, MEMORY)) };
    if request != limit && top > 0 {
        let high = (request as f64 + (top as f64 - request as f64) * qos.throttling_factor).floor();
        let page = qos.page_size.max(1);
        let high = (high / page as f64) as i64 * page;
        if high > request {
            set("memory.high", high);
        }
    }
    files
}
