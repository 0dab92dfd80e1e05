//! Steps, waits and stops of a pod in words.

use jiff::{SignedDuration, Timestamp};
use model::report::{ContainerReport, PodReport, StopReport};
use model::timeline::{StepKind, StepRecord, StepResult};

use crate::table::{age, clean, span};

/// The step in a word or two, for tables.
pub(crate) fn step(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Queued => "queued",
        StepKind::Admit => "admission",
        StepKind::Network => "network",
        StepKind::Cgroup => "cgroup",
        StepKind::Directories => "directories",
        StepKind::Volumes => "volumes",
        StepKind::Sandbox => "sandbox",
        StepKind::Pull => "image pull",
        StepKind::Create => "create",
        StepKind::Start => "start",
        StepKind::PostStart => "postStart",
        StepKind::Resize => "resize",
        StepKind::Stop => "stop",
        StepKind::StopSandbox => "stop sandbox",
        StepKind::BackOff => "back-off",
        StepKind::Ready => "ready",
        StepKind::Cleanup => "clean-up",
        StepKind::RemoveCgroup => "remove cgroup",
        StepKind::Gone => "gone",
    }
}

/// The step as a noun in a sentence: `image pull fails`.
fn noun(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Network => "the runtime's network",
        StepKind::Cgroup => "pod cgroup",
        StepKind::Directories => "pod directories",
        StepKind::Sandbox => "sandbox creation",
        StepKind::Create => "container creation",
        StepKind::Start => "container start",
        StepKind::PostStart => "postStart hook",
        StepKind::Stop => "container stop",
        StepKind::StopSandbox => "sandbox stop",
        StepKind::BackOff => "crash back-off",
        StepKind::RemoveCgroup => "cgroup removal",
        StepKind::Queued
        | StepKind::Admit
        | StepKind::Resize
        | StepKind::Volumes
        | StepKind::Pull
        | StepKind::Ready
        | StepKind::Cleanup
        | StepKind::Gone => step(kind),
    }
}

/// The step as something that is being done.
fn doing(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Queued => "waiting for its turn",
        StepKind::Admit => "being admitted",
        StepKind::Network => "waiting for the runtime's network",
        StepKind::Cgroup => "making the pod cgroup",
        StepKind::Directories => "making the pod directories",
        StepKind::Volumes => "mounting volumes",
        StepKind::Sandbox => "creating the sandbox",
        StepKind::Pull => "pulling the image",
        StepKind::Create => "creating the container",
        StepKind::Start => "starting the container",
        StepKind::PostStart => "running the postStart hook",
        StepKind::Resize => "changing the resources",
        StepKind::Stop => "stopping the container",
        StepKind::StopSandbox => "stopping the sandbox",
        StepKind::BackOff => "waiting out the crash back-off",
        StepKind::Ready => "becoming ready",
        StepKind::Cleanup => "cleaning up",
        StepKind::RemoveCgroup => "removing the cgroup",
        StepKind::Gone => "leaving",
    }
}

/// `container "app": ` when the step is about one, `"data": ` for another subject, else nothing.
fn about(pod: &PodReport, record: &StepRecord) -> String {
    let subject = &record.subject;
    match pod.containers.iter().find(|c| c.name == *subject) {
        Some(c) => format!("{}: ", title(c)),
        // An id, or where the pod came from, says nothing to a person.
        None if subject.is_empty() || matches!(record.kind, StepKind::Queued | StepKind::StopSandbox) => String::new(),
        None => format!("{subject:?}: "),
    }
}

/// `container "app"`, `init container "migrate"`.
pub(crate) fn title(container: &ContainerReport) -> String {
    let kind = match container.kind.as_str() {
        "app" => "container".to_owned(),
        kind => format!("{kind} container"),
    };
    format!("{kind} {:?}", container.name)
}

/// What went wrong: `container "app": image pull fails: no such host`.
pub(crate) fn failure(pod: &PodReport, record: &StepRecord) -> String {
    let (verb, detail) = match &record.result {
        StepResult::Unknown(detail) => ("has no known outcome", detail.as_str()),
        StepResult::Failed(detail) => ("fails", detail.as_str()),
        StepResult::Running | StepResult::Done => ("fails", ""),
    };
    let verb = if record.kind == StepKind::Admit { "is refused" } else { verb };
    let detail = clean(detail);
    let colon = if detail.is_empty() { "" } else { ": " };
    format!("{}{} {verb}{colon}{detail}", about(pod, record), noun(record.kind))
}

/// What is being done: `container "app": pulling the image, for 34s`.
pub(crate) fn activity(pod: &PodReport, record: &StepRecord, now: Timestamp) -> String {
    format!("{}{}, for {}", about(pod, record), doing(record.kind), age(record.started, now))
}

/// ` 12× the same way, last 8s ago`; empty for a failure that came once.
pub(crate) fn repeated(record: &StepRecord, now: Timestamp) -> String {
    if record.count < 2 {
        return String::new();
    }
    let last = record.ended.unwrap_or(record.started);
    format!("{}× the same way, last {} ago", record.count, age(last, now))
}

/// What a pod waits for, with the moment as a span: `container "app": CrashLoopBackOff; next try in 12s`.
pub(crate) fn wait(text: &str, now: Timestamp) -> String {
    match split_wait(text) {
        (what, Some(until)) => format!("{}; {}", clean(what), next_try(until, now)),
        (what, None) => clean(what),
    }
}

/// A wait's text and the moment at its end (`… until 2026-05-20T10:00:00Z`).
pub(crate) fn split_wait(text: &str) -> (&str, Option<Timestamp>) {
    match text.rsplit_once(" until ").map(|(what, until)| (what, until.trim().parse())) {
        Some((what, Ok(until))) => (what, Some(until)),
        _ => (text, None),
    }
}

/// `next try in 12s`.
pub(crate) fn next_try(at: Timestamp, now: Timestamp) -> String {
    let left = at.duration_since(now);
    if left < SignedDuration::from_secs(1) { "next try now".to_owned() } else { format!("next try in {}", span(left)) }
}

/// How a container last stopped: `liveness probe, exit code 137 (Error): the message`.
pub(crate) fn stop(stop: &StopReport) -> String {
    let mut text = String::new();
    if !stop.why.is_empty() && stop.why != "exit" {
        text = format!("{}, ", clean(&stop.why));
    }
    text.push_str(&format!("exit code {}", stop.exit_code));
    if !stop.reason.is_empty() {
        text.push_str(&format!(" ({})", clean(&stop.reason)));
    }
    let message = clean(&stop.message);
    if !message.is_empty() {
        text.push_str(&format!(": {message}"));
    }
    text
}

/// The reason of a `waiting: REASON` or `terminated: REASON` state.
pub(crate) fn reason<'a>(container: &'a ContainerReport, state: &str) -> Option<&'a str> {
    container.state.strip_prefix(state).map(|r| r.trim_start_matches(':').trim())
}

/// Waiting for something that goes wrong, not just for its turn: the reason.
pub(crate) fn trouble(container: &ContainerReport) -> Option<&str> {
    reason(container, "waiting").filter(|r| !matches!(*r, "" | "PodInitializing" | "ContainerCreating"))
}

/// `Init` and `ephemeral` containers do not count for readiness.
pub(crate) fn counts(container: &ContainerReport) -> bool {
    matches!(container.kind.as_str(), "app" | "sidecar")
}
