//! What a pod has: the record of what its containers were last given, against what it was given now.

use std::borrow::Cow;
use std::collections::BTreeMap;

use model::allocation::PodAllocation;
use model::api::{Container, ResourceRequirements};
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::plan::Sizes;
use model::pod::{ContainerEntry, DesiredPod};
use model::quantity::{Format, Quantity};

use super::{ResizeRules, resizable};
use crate::config::{NodeFacts, container_resources, created_resources};
use crate::resources::{CPU, MEMORY, cpu, cpu_milli, optional_list, value};

/// CPU and memory of these resources; limits that they leave open are the pod's own.
pub fn sizes(pod_level: Option<&ResourceRequirements>, own: &ResourceRequirements) -> Sizes {
    let requests = optional_list(own.requests.as_ref());
    let limits = optional_list(own.limits.as_ref());
    let level = optional_list(pod_level.and_then(|r| r.limits.as_ref()));
    let or = |own: i64, level: i64| if own == 0 { level } else { own };
    Sizes {
        cpu_request: cpu_milli(&requests),
        cpu_limit: or(cpu_milli(&limits), cpu_milli(&level)),
        memory_request: value(&requests, MEMORY),
        memory_limit: or(value(&limits, MEMORY), value(&level, MEMORY)),
    }
}

/// CPU and memory that a container of this pod is to have.
pub fn spec_sizes(pod: &DesiredPod, entry: &ContainerEntry<'_>) -> Sizes {
    sizes(pod.spec().resources.as_ref(), &entry.spec.resources.clone().unwrap_or_default())
}

/// Resources with this CPU and memory in place of theirs.
pub fn record(resources: &ResourceRequirements, now: &Sizes) -> ResourceRequirements {
    let mut out = resources.clone();
    for (list, milli, bytes) in
        [(&mut out.requests, now.cpu_request, now.memory_request), (&mut out.limits, now.cpu_limit, now.memory_limit)]
    {
        let map = list.get_or_insert_default();
        for (name, amount, zero) in [
            (CPU, Quantity::from_milli(milli, Format::DecimalSI), milli == 0),
            (MEMORY, Quantity::from_value(bytes, Format::BinarySI), bytes == 0),
        ] {
            match zero {
                true => map.remove(name),
                false => map.insert(name.to_owned(), amount.to_api()),
            };
        }
        if map.is_empty() {
            *list = None;
        }
    }
    out
}

/// What only the record of a container asks for that is being stopped for its new resources: its restartCount and one.
const STOPPED: &str = "rubelet/stopped";

/// The record of a container that is being stopped for its new resources, and has not started since. Whoever finds it, a Go kubelet too, sees one
/// that has neither CPU nor memory: while it runs it is restarted as its policy says.
pub fn stopped(restart_count: u32) -> ResourceRequirements {
    let count = Quantity::from_value(i64::from(restart_count) + 1, Format::DecimalSI);
    let requests = BTreeMap::from([(STOPPED.to_owned(), count.to_api())]);
    ResourceRequirements { requests: Some(requests), ..ResourceRequirements::default() }
}

fn is_mark(record: &ResourceRequirements) -> bool {
    record.requests.as_ref().is_some_and(|requests| requests.contains_key(STOPPED))
}

/// This container runs without a record of its own: there is none, or one of the container before it, which was stopped.
pub fn is_unknown(seen: &ObservedContainer, has: Option<&ResourceRequirements>) -> bool {
    let stopped = |r: &ResourceRequirements| {
        let count = r.requests.as_ref().and_then(|requests| Quantity::of(requests.get(STOPPED)?).ok());
        count.is_some_and(|count| i64::from(seen.restart_count) >= count.value())
    };
    has.is_none_or(stopped)
}

/// The container was, or was to be, stopped for its new resources, and has not started since; or nothing is known of it.
pub fn is_stopped(container: &Container, has: Option<&ResourceRequirements>) -> bool {
    super::may_restart(container) && has.is_none_or(is_mark)
}

/// What is known of the pod's resources: without the records of containers that are being stopped.
pub fn known(has: &PodAllocation) -> Cow<'_, PodAllocation> {
    if !has.containers.values().any(is_mark) {
        return Cow::Borrowed(has);
    }
    let mut known = has.clone();
    known.containers.retain(|_, record| !is_mark(record));
    Cow::Owned(known)
}

/// The record of a running container that has none: the agent that created it ended before it wrote it down. When the runtime shows what the pod
/// was given, or shows nothing, that is what it has; else what the runtime shows.
pub fn taken_over(
    pod: &DesiredPod,
    entry: ContainerEntry<'_>,
    seen: &ObservedContainer,
    node: &NodeFacts,
) -> ResourceRequirements {
    let given = created_resources(pod, entry, node);
    let Some(has) = &seen.resources else { return given };
    let due = container_resources(pod, entry, node, false);
    let quota = |quota: i64| quota.max(0);
    let same = has.cpu_shares == due.cpu_shares
        && quota(has.cpu_quota) == quota(due.cpu_quota)
        && has.memory_limit.max(0) == due.memory_limit_in_bytes;
    if same {
        return given;
    }
    let now = Sizes {
        cpu_request: cpu::milli_of_shares(has.cpu_shares),
        cpu_limit: if has.cpu_quota > 0 { cpu::milli_of_quota(has.cpu_quota, has.cpu_period) } else { 0 },
        memory_request: spec_sizes(pod, &entry).memory_request,
        memory_limit: has.memory_limit.max(0),
    };
    record(&given, &now)
}

/// Something of the pod that runs has other resources than the pod was given. `pod` is the form in which it runs.
pub fn in_progress(pod: &DesiredPod, observed: &ObservedPod, has: &PodAllocation, rules: &ResizeRules) -> bool {
    let level = pod.spec().resources.as_ref();
    let waits = |entry: ContainerEntry<'_>| {
        let running = observed.newest(&entry.spec.name).is_some_and(|c| c.state == ContainerState::Running);
        let has = has.containers.get(&entry.spec.name).map(|r| sizes(None, r)).unwrap_or_default();
        running && resizable(entry.kind, rules.init_containers) && has != spec_sizes(pod, &entry)
    };
    let of_pod = || match (level, &has.pod_level) {
        (Some(level), Some(has)) => rules.pod_level && sizes(None, level) != sizes(None, has),
        _ => false,
    };
    pod.containers().any(waits) || of_pod()
}
