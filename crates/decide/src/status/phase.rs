//! The phase, from container statuses.

use model::api::{ContainerStateTerminated, ContainerStatus};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

use super::find;
use crate::restart::{self, RESTARTING_ALL_CONTAINERS, RestartGates};

/// Succeeded or Failed.
pub fn is_terminal(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

/// What a status says in one word.
enum Now<'a> {
    Running,
    /// Ended, or waiting to run again after it ended.
    Ended(&'a ContainerStateTerminated),
    /// Waiting, and never ran.
    Waiting,
    Unknown,
}

fn now(status: Option<&ContainerStatus>) -> Now<'_> {
    let Some(status) = status else { return Now::Unknown };
    let Some(state) = &status.state else { return Now::Unknown };
    if state.running.is_some() {
        return Now::Running;
    }
    if let Some(t) = &state.terminated {
        return Now::Ended(t);
    }
    if state.waiting.is_some() {
        return match status.last_state.as_ref().and_then(|s| s.terminated.as_ref()) {
            Some(t) => Now::Ended(t),
            None => Now::Waiting,
        };
    }
    Now::Unknown
}

/// The phase that the containers give the pod.
///
/// `ended`: everything was stopped for good. `initialised`: an app was started in the newest sandbox, so a sidecar that restarts does not
/// make the pod Pending again. Static pods get no terminal phase from being stopped: they run again as soon as their file is back.
pub(super) fn phase(
    pod: &DesiredPod,
    init: &[ContainerStatus],
    apps: &[ContainerStatus],
    ended: bool,
    initialised: bool,
    gates: RestartGates,
) -> &'static str {
    let again = |e: &ContainerEntry<'_>, t: &ContainerStateTerminated| {
        restart::restarts_after_exit(pod, e.spec, t.exit_code, gates)
            || (gates.restart_all_containers && t.reason.as_deref() == Some(RESTARTING_ALL_CONTAINERS))
    };
    let (mut running, mut unknown, mut waiting, mut init_pending, mut sidecars_pending) = (0, 0, 0, 0, 0);
    for e in pod.init_containers() {
        let status = find(init, &e.spec.name);
        let is_sidecar = e.kind == ContainerKind::Sidecar;
        match now(status) {
            Now::Ended(t) if !is_sidecar => {
                let present = status.and_then(|s| s.state.as_ref()).is_some_and(|s| s.terminated.is_some());
                let anew = gates.restart_all_containers && t.reason.as_deref() == Some(RESTARTING_ALL_CONTAINERS);
                if t.exit_code != 0 && !again(&e, t) {
                    return "Failed";
                }
                // Complete only with a success of its present run. While all containers start anew the pod stays Running.
                let complete = present && t.exit_code == 0;
                if !(anew || complete) {
                    init_pending += 1;
                }
            }
            _ if !is_sidecar => init_pending += 1,
            Now::Running => {
                running += 1;
                if status.and_then(|s| s.started) != Some(true) {
                    sidecars_pending += 1;
                }
            }
            // How a sidecar ended never colours the phase.
            Now::Ended(_) => {}
            Now::Waiting => {
                sidecars_pending += 1;
                waiting += 1;
            }
            Now::Unknown => {
                unknown += 1;
                if status.is_some() {
                    sidecars_pending += 1;
                }
            }
        }
    }
    let (mut stopped, mut for_good, mut succeeded) = (0, 0, 0);
    for e in pod.app_containers() {
        let status = find(apps, &e.spec.name);
        match now(status) {
            Now::Running => running += 1,
            Now::Ended(t) => {
                stopped += 1;
                if !again(&e, t) {
                    for_good += 1;
                }
                // A success counts only while it is the container's present state.
                let present = status.and_then(|s| s.state.as_ref()).is_some_and(|s| s.terminated.is_some());
                if present && t.exit_code == 0 {
                    succeeded += 1;
                }
            }
            Now::Waiting => waiting += 1,
            Now::Unknown => unknown += 1,
        }
    }
    // Once every app has ended for good nothing of the pod starts any more: an init container that would have to run again in a new sandbox, or a
    // sidecar whose record is lost, must not keep it Pending for ever.
    let over = stopped > 0 && for_good == pod.app_containers().count();
    let pending = init_pending > 0 || (sidecars_pending > 0 && !initialised) || waiting > 0 || unknown > 0;
    if pending && !over {
        return "Pending";
    }
    if running > 0 {
        return "Running";
    }
    if stopped == 0 {
        return "Pending";
    }
    if (ended && !pod.is_static()) || stopped == for_good {
        return if stopped == succeeded { "Succeeded" } else { "Failed" };
    }
    "Running"
}
