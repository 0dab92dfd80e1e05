//! The status of a pod as the API shows it, put together from what should run, what does run, the probes and the last status.
//!
//! Nothing is remembered here: the last status comes in, so that times of transition stay and a terminal phase is never left.

mod conditions;
mod containers;
mod phase;
mod publish;
mod resources;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use model::allocation::PodAllocation;
use model::api::{ContainerStatus, HostIP, PodCondition, PodIP, PodStatus, Time};
use model::observed::ObservedPod;
use model::pod::{ContainerKind, DesiredPod};

use crate::restart::{self, RestartGates};

pub use phase::is_terminal;
pub use publish::{Rejection, finished, merged, publishable, rejected};
pub use resources::{PodResources, pod_resources};

/// Go's `kubelet` shows this many bytes of termination messages for a whole pod; each container has an equal share.
pub const MAX_TERMINATION_MESSAGES: usize = 12 * 1024;

/// What the probes found for one container. None: no result (no probe, or it has not run).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeResults {
    /// Startup probe succeeded.
    pub startup: Option<bool>,
    /// Readiness probe succeeded.
    pub ready: Option<bool>,
}

/// Why a container waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingReason {
    /// `ErrImagePull`, `CrashLoopBackOff`, …
    pub reason: String,
    /// Go's message.
    pub message: String,
}

/// Something that ends a pod as Failed (`Evicted`, `DeadlineExceeded`, `Preempting`, …).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// Only when a container ends so: a pod that is preempted and ends well has succeeded, with no reason. Otherwise it is Failed whatever they do.
    pub unless_well: bool,
}

/// What a status is made from.
#[derive(Clone, Copy)]
pub struct StatusInput<'a> {
    /// What should run.
    pub pod: &'a DesiredPod,
    /// What does run, with container statuses.
    pub observed: &'a ObservedPod,
    /// The last status: the one made before, else the mirror pod's or the stored one.
    pub previous: Option<&'a PodStatus>,
    /// Why containers that should start did not, by name: the last failed start, pull or back-off.
    pub waiting: &'a BTreeMap<String, WaitingReason>,
    /// What the probes found, by container id.
    pub probes: &'a dyn Fn(&str) -> ProbeResults,
    /// The runtime's name, the scheme of container ids (`containerd`).
    pub runtime_name: &'a str,
    /// The node's addresses, primary first; empty while unknown, and in standalone mode, where Go shows none.
    pub host_ips: &'a [IpAddr],
    /// QoS class.
    pub qos_class: &'a str,
    /// What the pod's containers were last given, as far as that is recorded.
    pub actuated: Option<&'a PodAllocation>,
    /// Resources of the pod as a whole, when they are shown.
    pub pod_resources: Option<&'a PodResources>,
    /// True when everything was stopped for good: what ended counts as ended whatever the restart policy says.
    pub ended: bool,
    /// Something that ends the pod as Failed.
    pub failure: Option<&'a Failure>,
    /// Conditions that other parts set: PodResizePending, PodResizeInProgress, DisruptionTarget.
    pub extra_conditions: &'a [PodCondition],
    /// True when the runtime handler can do recursive read-only mounts.
    pub recursive_read_only: bool,
    /// When this agent started. Containers that are older keep `ready` and `started` until a probe says otherwise.
    pub agent_started: Timestamp,
    /// Gate `ChangeContainerStatusOnKubeletRestart`: they do not keep them.
    pub forget_on_restart: bool,
    /// True while the pod is being stopped: startup probes no longer run.
    pub terminating: bool,
    /// Feature gates.
    pub gates: RestartGates,
    /// Now.
    pub now: Timestamp,
}

/// The status of a pod. Its phase may be terminal while containers still run: [`publishable`] says what may be shown then.
pub fn pod_status(input: &StatusInput<'_>) -> PodStatus {
    let pod = input.pod;
    let app = containers::statuses(input, ContainerKind::App);
    let init = containers::statuses(input, ContainerKind::Init);
    let ephemeral = containers::statuses(input, ContainerKind::Ephemeral);

    let stored = pod.stored_status();
    let previous = input.previous.or(stored);
    let terminal = |s: Option<&PodStatus>| s.and_then(|s| s.phase.clone()).filter(|p| is_terminal(p));
    let pinned = terminal(stored).or_else(|| terminal(previous));

    let computed = phase::phase(pod, &init, &app, input.ended, started_here(pod, input.observed), input.gates);
    let mut status = PodStatus::default();
    let phase = match (&pinned, input.failure) {
        (Some(phase), _) => phase.clone(),
        // How it ends is not known before it has.
        (None, Some(failure)) if failure.unless_well && (!input.ended || computed == "Succeeded") => {
            computed.to_owned()
        }
        (None, Some(_)) => "Failed".to_owned(),
        (None, None) => computed.to_owned(),
    };
    let failure = input.failure.filter(|f| pinned.is_none() && (phase == "Failed" || !f.unless_well));
    // Reason and message go with the phase; a new phase starts without.
    if previous.and_then(|p| p.phase.as_deref()) == Some(&phase) {
        let field = |get: fn(&PodStatus) -> &Option<String>| {
            [previous, stored].into_iter().flatten().find_map(|s| get(s).clone().filter(|t| !t.is_empty()))
        };
        status.reason = field(|s| &s.reason);
        status.message = field(|s| &s.message);
    }
    if let Some(failure) = failure {
        status.reason = Some(failure.reason.clone());
        status.message = Some(failure.message.clone()).filter(|m| !m.is_empty());
    }
    addresses(input, &phase, &mut status);
    status.qos_class = Some(input.qos_class.to_owned());
    status.observed_generation =
        [pod.meta().generation, previous.and_then(|p| p.observed_generation)].into_iter().flatten().max();
    if let Some(r) = input.pod_resources {
        status.allocated_resources = Some(r.allocated.clone()).filter(|a| !a.is_empty());
        status.resources = Some(r.resources.clone());
    }
    status.start_time = previous.and_then(|p| p.start_time.clone()).or_else(|| Some(whole_seconds(input.now)));
    status.conditions = Some(conditions::conditions(input, &phase, &init, &app));
    status.phase = Some(phase);
    status.container_statuses = Some(app);
    status.init_container_statuses = Some(init).filter(|s| !s.is_empty());
    status.ephemeral_container_statuses = Some(ephemeral).filter(|s| !s.is_empty());
    status
}

/// API times have whole seconds.
pub(crate) fn whole_seconds(t: Timestamp) -> Time {
    Time(Timestamp::from_second(t.as_second()).unwrap_or(t))
}

/// True when an app container was started in the newest sandbox: initialisation is complete there.
fn started_here(pod: &DesiredPod, observed: &ObservedPod) -> bool {
    let Some(sandbox) = observed.sandboxes.first().filter(|s| s.ready) else { return false };
    pod.app_containers()
        .filter_map(|e| observed.newest_in(&e.spec.name, &sandbox.id))
        .any(|c| c.state != model::observed::ContainerState::Created)
}

/// True while all containers are being started anew: asked for by an exit, or still standing in the last status.
fn restarting_all(input: &StatusInput<'_>) -> bool {
    let stands = || {
        input.previous.or(input.pod.stored_status()).is_some_and(|s| {
            s.conditions.iter().flatten().any(|c| c.type_ == "AllContainersRestarting" && c.status == "True")
        })
    };
    input.gates.restart_all_containers && (restart::restart_all(input.pod, input.observed, input.gates) || stands())
}

/// podIPs: the first IPv4 and the first IPv6 address of the newest ready sandbox, the node's family first. A pod on the node's network has
/// the node's. A pod that ended keeps those it had.
fn addresses(input: &StatusInput<'_>, phase: &str, status: &mut PodStatus) {
    let sandbox = input.observed.sandboxes.first().filter(|s| s.ready);
    let mut ips = family_first(sandbox.map_or(&[][..], |s| &s.ips), input.host_ips);
    if let Some(primary) = input.host_ips.first() {
        status.host_ip = Some(primary.to_string());
        status.host_ips = Some(input.host_ips.iter().take(2).map(|ip| HostIP { ip: ip.to_string() }).collect());
        if input.pod.host_network() {
            if ips.is_empty() {
                ips.push(*primary);
            }
            if let (1, Some(second)) = (ips.len(), input.host_ips.get(1))
                && ips[0].is_ipv4() != second.is_ipv4()
            {
                ips.push(*second);
            }
        }
    }
    let mut ips: Vec<PodIP> = ips.into_iter().map(|ip| PodIP { ip: ip.to_string() }).collect();
    if ips.is_empty()
        && (input.ended || is_terminal(phase))
        && let Some(kept) = input.previous.and_then(|p| p.pod_ips.clone())
    {
        ips = kept;
    }
    status.pod_ip = ips.first().map(|p| p.ip.clone());
    status.pod_ips = Some(ips).filter(|i| !i.is_empty());
}

/// The first address of each family, that of the node's primary address first (IPv4 when that is unknown).
pub fn family_first(ips: &[String], host_ips: &[IpAddr]) -> Vec<IpAddr> {
    let parsed: Vec<IpAddr> = ips.iter().filter_map(|ip| ip.parse().ok()).collect();
    let v6_first = host_ips.first().is_some_and(IpAddr::is_ipv6);
    [v6_first, !v6_first].into_iter().filter_map(|v6| parsed.iter().find(|ip| ip.is_ipv6() == v6).copied()).collect()
}

/// The status of this name in a list.
fn find<'a>(statuses: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    statuses.iter().find(|s| s.name == name)
}
