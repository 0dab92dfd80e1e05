//! In-place resize (KEP-1287; of pod-level resources KEP-5419): what a pod asks for, what it was given, and what it has.
//!
//! ```text
//!   asked (spec) ──feasible, room──▶ given (allocated checkpoint) ──plan, worker──▶ has (actuated checkpoint, runtime, cgroup)
//!        └─ Infeasible, Deferred                └─ in progress, Error
//! ```

mod has;
mod pod;
mod text;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;

use jiff::Timestamp;
use model::allocation::{PendingReason, PendingResize, PodAllocation};
use model::api::{PodCondition, PodStatus, Time};
use model::pod::{ContainerKind, DesiredPod};

use crate::resources::{CPU, MEMORY, PodSum, QosClass, cpu_milli, pod_requests, qos_class, value};

pub use has::{in_progress, is_stopped, is_unknown, known, record, sizes, spec_sizes, stopped, taken_over};
pub use pod::{CgroupSteps, Kind, cgroup_differs, less, memory_faults, merge};
pub use text::{Operation, message, operations};

/// Type of the condition of a resize that is not granted.
pub const PENDING: &str = "PodResizePending";
/// Type of the condition of a resize that is granted and not done.
pub const IN_PROGRESS: &str = "PodResizeInProgress";

/// What this node can resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeRules {
    /// Gate InPlacePodVerticalScalingInitContainers: plain init containers too.
    pub init_containers: bool,
    /// Gate InPlacePodLevelResourcesVerticalScaling.
    pub pod_level: bool,
    /// The CPU manager gives Guaranteed pods CPUs of their own (policy `static`), and gate InPlacePodVerticalScalingExclusiveCPUs is off.
    pub exclusive_cpus: bool,
    /// The memory manager gives Guaranteed pods memory of their own (policy `Static`), and gate InPlacePodVerticalScalingExclusiveMemory is off.
    pub exclusive_memory: bool,
    /// Containers may swap (`memorySwap.swapBehavior: LimitedSwap`, cgroup v2, and the host has the controller).
    pub swap: bool,
}

impl Default for ResizeRules {
    /// As without any configuration.
    fn default() -> Self {
        Self { init_containers: true, pod_level: true, exclusive_cpus: false, exclusive_memory: false, swap: false }
    }
}

/// A resize that this node can never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Infeasible {
    /// Message of the condition.
    pub message: &'static str,
    /// Label `reason_detail` of `kubelet_pod_infeasible_resizes_total`.
    pub detail: &'static str,
}

/// What a pod is given when it gets all that it asks for.
pub fn allocation_of(pod: &DesiredPod, init_containers: bool) -> PodAllocation {
    let containers = pod
        .containers()
        .filter(|c| resizable(c.kind, init_containers))
        .map(|c| (c.spec.name.clone(), c.spec.resources.clone().unwrap_or_default()))
        .collect();
    PodAllocation { containers, pod_level: pod.spec().resources.clone() }
}

/// Containers of this kind can get other resources.
pub(crate) fn resizable(kind: ContainerKind, init_containers: bool) -> bool {
    match kind {
        ContainerKind::App | ContainerKind::Sidecar => true,
        ContainerKind::Init => init_containers,
        ContainerKind::Ephemeral => false,
    }
}

/// Why this node cannot give `asked` in place of `given`; both are forms of the same pod. None: it is a matter of room.
pub fn infeasible(asked: &DesiredPod, given: &DesiredPod, rules: &ResizeRules) -> Option<Infeasible> {
    if rules.swap && swaps(asked, given) {
        return Some(Infeasible {
            message: "In-place resize of containers with swap is not supported.",
            detail: "swap_limitation",
        });
    }
    let level = |pod: &DesiredPod| pod.spec().resources.clone().unwrap_or_default();
    if !rules.pod_level && !model::allocation::same_requirements(&level(asked), &level(given)) {
        return Some(Infeasible {
            message: "InPlacePodLevelResourcesVerticalScaling is disabled",
            detail: "plr_feature_gate_off",
        });
    }
    if qos_class(asked, true) != QosClass::Guaranteed {
        return None;
    }
    let changes = |of: fn(&DesiredPod, &str) -> i64| {
        asked
            .containers()
            .filter(|c| resizable(c.kind, rules.init_containers))
            .any(|c| of(asked, &c.spec.name) != of(given, &c.spec.name))
    };
    if rules.exclusive_cpus && changes(|pod, name| of_container(pod, name).cpu_request) {
        return Some(Infeasible {
            message: "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"",
            detail: "guaranteed_pod_cpu_manager_static_policy",
        });
    }
    if rules.exclusive_memory && changes(|pod, name| of_container(pod, name).memory_request) {
        return Some(Infeasible {
            message: "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"",
            detail: "guaranteed_pod_memory_manager_static_policy",
        });
    }
    None
}

fn of_container(pod: &DesiredPod, name: &str) -> model::plan::Sizes {
    pod.container(name).and_then(|c| c.spec.resources.as_ref()).map(|r| sizes(None, r)).unwrap_or_default()
}

/// A container that may swap, before or after, gets another memory request while it runs: its share of the swap would change with it.
fn swaps(asked: &DesiredPod, given: &DesiredPod) -> bool {
    let may = |pod: &DesiredPod, name: &str| {
        let own = of_container(pod, name);
        qos_class(pod, true) == QosClass::Burstable
            && !crate::resources::is_critical(pod)
            && own.memory_request != own.memory_limit
    };
    asked.containers().filter(|c| c.kind != ContainerKind::Ephemeral).any(|c| {
        let name = c.spec.name.as_str();
        let Some(before) = given.container(name) else { return false };
        let restarts = policy(before.spec, MEMORY);
        of_container(asked, name).memory_request != of_container(given, name).memory_request
            && !restarts
            && (may(asked, name) || may(given, name))
    })
}

/// The container is restarted for some of its resources.
pub fn may_restart(container: &model::api::Container) -> bool {
    [CPU, MEMORY].iter().any(|resource| policy(container, resource))
}

/// The container is to be restarted when this resource changes (`resizePolicy`); without policy it is not.
pub(crate) fn policy(container: &model::api::Container, resource: &str) -> bool {
    let policies = container.resize_policy.iter().flatten();
    policies.into_iter().find(|p| p.resource_name == resource).is_some_and(|p| p.restart_policy == "RestartContainer")
}

/// Where a resize stands in the order in which pending ones are looked at: those that ask for no more, then by priority, then Guaranteed before
/// others, then those that have waited longest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn(bool, Reverse<i32>, bool, Option<Timestamp>);

/// See [`Turn`]. `since`: when it was first put off; None: never, then it comes after those that were.
pub fn turn(asked: &DesiredPod, given: &DesiredPod, since: Option<Timestamp>, pod_level_resources: bool) -> Turn {
    let what = PodSum { overhead: true, pod_level: pod_level_resources };
    let (wants, has) = (pod_requests(asked, what), pod_requests(given, what));
    let more = value(&wants, MEMORY) > value(&has, MEMORY) || cpu_milli(&wants) > cpu_milli(&has);
    let priority = Reverse(asked.spec().priority.unwrap_or(0));
    let guaranteed = qos_class(asked, true) == QosClass::Guaranteed;
    Turn(more, priority, !guaranteed, Some(since.unwrap_or(Timestamp::MAX)))
}

/// A resize that was granted and is not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The last try failed, and why; None: under way.
    pub error: Option<String>,
    /// `metadata.generation` for which it was granted.
    pub generation: i64,
    /// Since when it is under way, or fails.
    pub since: Timestamp,
}

impl Progress {
    /// One that begins now.
    pub fn new(generation: i64, now: Timestamp) -> Self {
        Self { error: None, generation, since: now }
    }

    /// The one that the last status shows.
    pub fn stored(status: &PodStatus) -> Option<Self> {
        let c = find(status, IN_PROGRESS)?;
        Some(Self {
            error: c.reason.as_deref().filter(|r| *r == "Error").map(|_| c.message.clone().unwrap_or_default()),
            generation: c.observed_generation.unwrap_or(0),
            since: c.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0),
        })
    }

    /// A try failed; true when that is news.
    pub fn fail(&mut self, message: &str, now: Timestamp) -> bool {
        if self.error.as_deref() == Some(message) {
            return false;
        }
        if self.error.is_none() {
            self.since = now;
        }
        self.error = Some(message.to_owned());
        true
    }
}

/// What the last status says of a resize that was not granted.
pub fn stored_pending(status: &PodStatus) -> Option<PendingResize> {
    let c = find(status, PENDING)?;
    let infeasible = c.reason.as_deref() == Some(PendingReason::Infeasible.as_str());
    Some(PendingResize {
        reason: if infeasible { PendingReason::Infeasible } else { PendingReason::Deferred },
        message: c.message.clone().unwrap_or_default(),
        generation: c.observed_generation.unwrap_or(0),
        since: c.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0),
    })
}

fn find<'a>(status: &'a PodStatus, kind: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == kind && c.status == "True")
}

/// The conditions of a pod's resize.
pub fn conditions(pending: Option<&PendingResize>, progress: Option<&Progress>) -> Vec<PodCondition> {
    let filled = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
    let condition = |kind: &str, reason: &str, message: &str, generation: i64, since: Timestamp| PodCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: filled(reason),
        message: filled(message),
        observed_generation: Some(generation).filter(|g| *g != 0),
        last_probe_time: Some(time(since)),
        last_transition_time: Some(time(since)),
    };
    let pending = pending.map(|p| condition(PENDING, p.reason.as_str(), &p.message, p.generation, p.since));
    let progress = progress.map(|p| {
        let reason = if p.error.is_some() { "Error" } else { "" };
        condition(IN_PROGRESS, reason, p.error.as_deref().unwrap_or_default(), p.generation, p.since)
    });
    pending.into_iter().chain(progress).collect()
}

fn time(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}
