//! The conditions that the kubelet owns, in Go's order, and the others carried along.

use jiff::Timestamp;
use model::api::{ContainerStatus, PodCondition, PodStatus};
use model::pod::ContainerKind;

use super::{StatusInput, find, is_terminal, restarting_all, whole_seconds};
use crate::plan::SandboxVerdict;
use crate::restart;
use crate::text::go_list;

/// Conditions that nobody else may set.
pub(super) const OWNED: [&str; 8] = [
    "PodScheduled",
    "Ready",
    "Initialized",
    "ContainersReady",
    "PodResizeInProgress",
    "PodResizePending",
    "PodReadyToStartContainers",
    "AllContainersRestarting",
];

/// One condition without its times.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Verdict {
    holds: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    const TRUE: Self = Self { holds: true, reason: "", message: String::new() };

    fn no(reason: &'static str, message: impl Into<String>) -> Self {
        Self { holds: false, reason, message: message.into() }
    }

    fn condition(self, kind: &str, generation: Option<i64>) -> PodCondition {
        let filled = |s: String| Some(s).filter(|s| !s.is_empty());
        PodCondition {
            type_: kind.to_owned(),
            status: if self.holds { "True" } else { "False" }.to_owned(),
            reason: filled(self.reason.to_owned()),
            message: filled(self.message),
            observed_generation: generation,
            last_probe_time: None,
            last_transition_time: None,
        }
    }
}

/// All conditions, with their times of transition.
pub(super) fn conditions(
    input: &StatusInput<'_>,
    phase: &str,
    init: &[ContainerStatus],
    apps: &[ContainerStatus],
) -> Vec<PodCondition> {
    let pod = input.pod;
    let generation = pod.meta().generation;
    let previous = input.previous.or(pod.stored_status());
    let mut list: Vec<PodCondition> = pod
        .stored_status()
        .or(input.previous)
        .and_then(|s| s.conditions.clone())
        .unwrap_or_default()
        .into_iter()
        .filter(|c| !OWNED.contains(&c.type_.as_str()))
        .collect();
    // DisruptionTarget comes once, from an event; it is carried along in the last status.
    let disruption = previous.and_then(|s| s.conditions.iter().flatten().find(|c| c.type_ == "DisruptionTarget"));
    let resize = |c: &&PodCondition| !(is_terminal(phase) && c.type_.starts_with("PodResize"));
    for extra in disruption.into_iter().chain(input.extra_conditions.iter().filter(resize)) {
        list.retain(|c| c.type_ != extra.type_);
        list.push(extra.clone());
    }

    let serves = matches!(crate::plan::sandbox_verdict(pod, input.observed), SandboxVerdict::Keep { .. });
    let sandbox = Verdict { holds: serves, ..Verdict::TRUE };
    let initialised = initialised(input, phase, init, apps, previous);
    let containers_ready = containers_ready(input, phase, init, apps);
    let ready = ready(input, &list, &containers_ready);
    list.push(sandbox.condition("PodReadyToStartContainers", generation));
    list.push(initialised.condition("Initialized", generation));
    list.push(ready.condition("Ready", generation));
    list.push(containers_ready.condition("ContainersReady", generation));
    list.push(Verdict::TRUE.condition("PodScheduled", generation));
    if input.gates.restart_all_containers && restart::could_restart_all(pod) {
        list.push(restarting(input, phase).condition("AllContainersRestarting", None));
    }
    for c in &mut list {
        stamp(c, previous, input.now);
    }
    list
}

/// The time of transition stays while the status does.
fn stamp(condition: &mut PodCondition, previous: Option<&PodStatus>, now: Timestamp) {
    let before = previous.and_then(|s| s.conditions.iter().flatten().find(|c| c.type_ == condition.type_));
    let kept = before.filter(|c| c.status == condition.status).and_then(|c| c.last_transition_time.clone());
    if condition.type_.starts_with("PodResize") {
        // Their own times: they change with the reason.
    } else if kept.is_some() {
        condition.last_transition_time = kept;
    } else if OWNED.contains(&condition.type_.as_str()) || condition.last_transition_time.is_none() {
        condition.last_transition_time = Some(whole_seconds(now));
    }
}

/// `containers with unknown status: [a], containers with WHAT status: [b]`.
fn lists(unknown: &[&str], others: &[&str], what: &str) -> String {
    let mut parts = Vec::new();
    if !unknown.is_empty() {
        parts.push(format!("containers with unknown status: {}", go_list(unknown)));
    }
    if !others.is_empty() {
        parts.push(format!("containers with {what} status: {}", go_list(others)));
    }
    parts.join(", ")
}

fn initialised(
    input: &StatusInput<'_>,
    phase: &str,
    init: &[ContainerStatus],
    apps: &[ContainerStatus],
    previous: Option<&PodStatus>,
) -> Verdict {
    let (mut unknown, mut incomplete) = (Vec::new(), Vec::new());
    for e in input.pod.init_containers() {
        let name = e.spec.name.as_str();
        match find(init, name) {
            None => unknown.push(name),
            Some(s) => {
                let complete = if e.kind == ContainerKind::Sidecar { s.started == Some(true) } else { s.ready };
                if !complete {
                    incomplete.push(name);
                }
            }
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Verdict { reason: "PodCompleted", ..Verdict::TRUE };
    }
    // An app that runs or ran proves it, even while sidecars restart.
    let app_ran = apps.iter().filter_map(|s| s.state.as_ref()).any(|s| s.running.is_some() || s.terminated.is_some());
    if app_ran {
        return Verdict::TRUE;
    }
    let message = lists(&unknown, &incomplete, "incomplete");
    if message.is_empty() {
        return Verdict::TRUE;
    }
    // While all containers start anew in the same sandbox, the pod stays initialised.
    let was =
        previous.is_some_and(|s| s.conditions.iter().flatten().any(|c| c.type_ == "Initialized" && c.status == "True"));
    if was && input.gates.restart_all_containers && restart::could_restart_all(input.pod) {
        return Verdict::TRUE;
    }
    Verdict::no("ContainersNotInitialized", message)
}

fn containers_ready(
    input: &StatusInput<'_>,
    phase: &str,
    init: &[ContainerStatus],
    apps: &[ContainerStatus],
) -> Verdict {
    let (mut unknown, mut unready) = (Vec::new(), Vec::new());
    let sidecars = input.pod.init_containers().filter(|e| e.kind == ContainerKind::Sidecar);
    for (e, statuses) in sidecars.map(|e| (e, init)).chain(input.pod.app_containers().map(|e| (e, apps))) {
        match find(statuses, &e.spec.name) {
            None => unknown.push(e.spec.name.as_str()),
            Some(s) if !s.ready => unready.push(e.spec.name.as_str()),
            Some(_) => {}
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Verdict::no("PodCompleted", "");
    }
    if phase == "Failed" {
        return Verdict::no("PodFailed", "");
    }
    match lists(&unknown, &unready, "unready") {
        message if message.is_empty() => Verdict::TRUE,
        message => Verdict::no("ContainersNotReady", message),
    }
}

/// Ready: the containers are, and every readiness gate holds.
fn ready(input: &StatusInput<'_>, conditions: &[PodCondition], containers: &Verdict) -> Verdict {
    if !containers.holds {
        return containers.clone();
    }
    let mut missing = Vec::new();
    for gate in input.pod.spec().readiness_gates.iter().flatten() {
        let kind = &gate.condition_type;
        match conditions.iter().find(|c| c.type_ == *kind) {
            None => missing.push(format!("corresponding condition of pod readiness gate {kind:?} does not exist.")),
            Some(c) if c.status != "True" => {
                missing.push(format!("the status of pod readiness gate {kind:?} is not \"True\", but {}", c.status));
            }
            Some(_) => {}
        }
    }
    if missing.is_empty() { Verdict::TRUE } else { Verdict::no("ReadinessGatesNotReady", missing.join(", ")) }
}

fn restarting(input: &StatusInput<'_>, phase: &str) -> Verdict {
    match phase {
        "Succeeded" => return Verdict::no("PodCompleted", ""),
        "Failed" => return Verdict::no("PodFailed", ""),
        _ => {}
    }
    let mut members = input.pod.init_containers().chain(input.pod.app_containers());
    let any_left = members.any(|e| input.observed.newest(&e.spec.name).is_some());
    if any_left && restarting_all(input) {
        return Verdict {
            holds: true,
            reason: "RestartAllContainersStarted",
            message: "container exited with restart policy rule".into(),
        };
    }
    Verdict::no("", "")
}
