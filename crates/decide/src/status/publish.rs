//! What of a status may be shown: a terminal phase only once nothing can run any more, a rejection at once.

use jiff::Timestamp;
use model::api::{ContainerStateTerminated, ContainerStatus, PodCondition, PodStatus};
use model::pod::{ContainerKind, DesiredPod};

use super::conditions::OWNED;
use super::containers::{STATUS_UNKNOWN, UNKNOWN_EXIT, terminated};
use super::{is_terminal, whole_seconds};

/// A pod that admission refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection<'a> {
    /// The refusal's reason.
    pub reason: &'a str,
    /// The refusal's message, without prefix.
    pub message: &'a str,
    /// QoS class.
    pub qos_class: &'a str,
}

/// The status of a pod that admission refused: Failed, without containers and conditions.
pub fn rejected(pod: &DesiredPod, refusal: &Rejection<'_>, now: Timestamp) -> PodStatus {
    let stored = pod.stored_status();
    PodStatus {
        phase: Some("Failed".into()),
        reason: Some(refusal.reason.into()),
        message: Some(format!("Pod was rejected: {}", refusal.message)),
        qos_class: Some(refusal.qos_class.into()),
        observed_generation: pod.meta().generation,
        start_time: stored.and_then(|s| s.start_time.clone()).or_else(|| Some(whole_seconds(now))),
        ..Default::default()
    }
}

/// What may be shown of `next` after `shown`. While containers may still run (`may_run`), a pod keeps its phase, reason and message
/// instead of becoming terminal, and DisruptionTarget waits too; a scheduler that saw it terminal would give its resources away.
/// A terminal pod is never ready.
pub fn publishable(shown: Option<&PodStatus>, mut next: PodStatus, may_run: bool) -> PodStatus {
    let phase_of = |s: &PodStatus| s.phase.clone().unwrap_or_default();
    let was_terminal = shown.is_some_and(|s| is_terminal(&phase_of(s)));
    let becoming = !was_terminal && is_terminal(&phase_of(&next));
    if becoming && may_run {
        next.phase = shown.and_then(|s| s.phase.clone()).or_else(|| Some("Pending".into()));
        next.reason = shown.and_then(|s| s.reason.clone());
        next.message = shown.and_then(|s| s.message.clone());
    }
    let showing = shown.is_some_and(|s| s.conditions.iter().flatten().any(|c| c.type_ == "DisruptionTarget"));
    if let Some(conditions) = &mut next.conditions {
        let due = showing || (becoming && !may_run);
        if !due {
            conditions.retain(|c| c.type_ != "DisruptionTarget");
        }
        if let Some(phase) = next.phase.as_deref().filter(|p| is_terminal(p)) {
            let reason = if phase == "Failed" { "PodFailed" } else { "PodCompleted" };
            for c in conditions.iter_mut().filter(|c| matches!(&*c.type_, "Ready" | "ContainersReady")) {
                if c.status == "True" {
                    c.status = "False".into();
                    c.reason = Some(reason.into());
                    c.message = None;
                }
            }
        }
    }
    next
}

/// What the API is to hold instead of `held` when the node says `ours`: conditions of other writers stay as they are held, ours follow them.
pub fn merged(held: &PodStatus, mut ours: PodStatus) -> PodStatus {
    let own = |c: &PodCondition| OWNED.contains(&c.type_.as_str());
    let shared = |c: &PodCondition| c.type_ == "DisruptionTarget";
    let told: Vec<PodCondition> = ours.conditions.take().unwrap_or_default();
    let has_told = told.iter().any(shared);
    let foreign = held.conditions.iter().flatten().filter(|c| !(own(c) || has_told && shared(c))).cloned();
    let conditions: Vec<PodCondition> = foreign
        .chain(told.iter().filter(|c| shared(c)).cloned())
        .chain(told.iter().filter(|c| own(c)).cloned())
        .collect();
    ours.conditions = Some(conditions).filter(|c| !c.is_empty());
    // Written by others: the scheduler, the resource claim controller.
    ours.nominated_node_name = held.nominated_node_name.clone();
    ours.resource_claim_statuses = held.resource_claim_statuses.clone();
    ours
}

/// The last status of a pod of which nothing is left: containers whose end nobody saw ended with a failure, and a pod from the API is in a
/// terminal phase. Init containers that never began stay waiting.
pub fn finished(pod: &DesiredPod, mut status: PodStatus) -> PodStatus {
    if initialised(pod, &status) {
        status.container_statuses.iter_mut().flatten().for_each(end);
    }
    let began = |s: &ContainerStatus| {
        s.state.as_ref().is_none_or(|s| s.waiting.is_none())
            || s.last_state.as_ref().is_some_and(|s| s.terminated.is_some())
    };
    if let Some(init) = &mut status.init_container_statuses {
        // At least the first was about to start.
        let begun = init.iter().rposition(began).map_or(1, |i| i + 1);
        init.iter_mut().take(begun).for_each(end);
    }
    if !pod.is_static() && !status.phase.as_deref().is_some_and(is_terminal) {
        status.phase = Some("Failed".into());
    }
    status
}

fn end(status: &mut ContainerStatus) {
    if status.state.as_ref().is_none_or(|s| s.terminated.is_none()) {
        status.state = Some(terminated(ContainerStateTerminated {
            reason: Some(STATUS_UNKNOWN.into()),
            message: Some("The container could not be located when the pod was terminated".into()),
            exit_code: UNKNOWN_EXIT,
            ..Default::default()
        }));
    }
}

/// True when there is evidence that app containers could start.
fn initialised(pod: &DesiredPod, status: &PodStatus) -> bool {
    let Some(last) = pod.init_containers().last() else { return true };
    let app = status.container_statuses.iter().flatten().any(|s| {
        s.last_state.as_ref().is_some_and(|s| s.terminated.is_some())
            || s.state.as_ref().is_none_or(|s| s.waiting.is_none())
    });
    let complete =
        status.init_container_statuses.iter().flatten().find(|s| s.name == last.spec.name).is_some_and(|s| {
            if last.kind == ContainerKind::Sidecar {
                s.started == Some(true) && s.state.as_ref().is_some_and(|s| s.running.is_some())
            } else {
                [&s.state, &s.last_state]
                    .into_iter()
                    .filter_map(|s| s.as_ref()?.terminated.as_ref())
                    .any(|t| t.exit_code == 0)
            }
        });
    app || complete
}
