//! Whether the pod's sandbox serves, and what to do when it does not.

use model::observed::{ContainerState, ObservedPod};
use model::plan::SandboxStep;
use model::pod::{ContainerKind, DesiredPod, RestartPolicy};

use super::Round;
use crate::restart;

/// Whether the newest sandbox serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxVerdict {
    /// It does.
    Keep {
        /// CRI id.
        id: String,
    },
    /// There is none, or it does not.
    Replace {
        /// CRI metadata attempt of the next one.
        attempt: u32,
    },
}

/// A sandbox serves when it is the only ready one, is the newest, has the network mode of the spec, and has an address unless it
/// shares the node's network.
pub fn sandbox_verdict(pod: &DesiredPod, observed: &ObservedPod) -> SandboxVerdict {
    let Some(newest) = observed.sandboxes.first() else { return SandboxVerdict::Replace { attempt: 0 } };
    let ready = observed.sandboxes.iter().filter(|s| s.ready).count();
    let fits = newest.ready
        && ready == 1
        && newest.host_network == pod.host_network()
        && (pod.host_network() || !newest.ips.is_empty());
    if fits {
        SandboxVerdict::Keep { id: newest.id.clone() }
    } else {
        SandboxVerdict::Replace { attempt: newest.attempt.saturating_add(1) }
    }
}

impl Round<'_> {
    /// Everything is stopped; a new sandbox begins from the first init container, unless the pod has nothing left to run.
    pub(super) fn replace_sandbox(&mut self, attempt: u32) {
        let observed = self.input.observed;
        let pod = self.input.pod;
        if self.is_finished() {
            self.plan.kill_pod = observed.anything_alive();
            return;
        }
        self.plan.kill_pod = !observed.sandboxes.is_empty() || observed.anything_alive();
        self.plan.sandbox = SandboxStep::Create { attempt };
        if restart::restart_all(pod, observed, self.input.gates) {
            self.reset();
            self.plan.kill.clear();
            return;
        }
        for c in &observed.containers {
            let init =
                pod.container(&c.name).is_some_and(|e| matches!(e.kind, ContainerKind::Init | ContainerKind::Sidecar));
            if init || c.state == ContainerState::Created {
                self.prune(c);
            }
        }
        match pod.init_containers().next() {
            Some(first) => self.start(&first),
            None => {
                for entry in pod.app_containers() {
                    if self.runs_again(entry.spec) {
                        self.start(&entry);
                    }
                }
            }
        }
    }

    /// True when this app container has something to do in a new sandbox. One that was cut off counts as ended with a failure.
    fn runs_again(&self, spec: &model::api::Container) -> bool {
        let gates = self.input.gates;
        match self.input.observed.newest(&spec.name) {
            None => true,
            Some(c) => match c.state {
                ContainerState::Created => true,
                ContainerState::Exited => restart::restarts_after_exit(self.input.pod, spec, c.exit_code, gates),
                ContainerState::Running | ContainerState::Unknown => {
                    restart::restarts_after_kill(self.input.pod, spec, gates)
                }
            },
        }
    }

    /// True when a pod that lost its sandbox has nothing left to run, so that it gets no new one:
    /// its initialisation failed for good; or every app has ended for good; or, under restartPolicy Never, its run was cut off.
    fn is_finished(&self) -> bool {
        let (pod, observed, gates) = (self.input.pod, self.input.observed, self.input.gates);
        let Some(newest) = observed.sandboxes.first() else { return false };
        let ran = |name: &str| observed.newest(name).filter(|c| c.state != ContainerState::Created);
        let init_failed = pod.init_containers().filter(|e| e.kind == ContainerKind::Init).any(|e| {
            ran(&e.spec.name).filter(|c| c.sandbox_id == newest.id).is_some_and(|c| match c.state {
                ContainerState::Exited => {
                    c.exit_code != 0 && !restart::restarts_after_exit(pod, e.spec, c.exit_code, gates)
                }
                _ => !restart::restarts_after_kill(pod, e.spec, gates),
            })
        });
        if init_failed {
            return true;
        }
        let apps_ran = pod.app_containers().any(|e| ran(&e.spec.name).is_some());
        if !apps_ran {
            return false;
        }
        if pod.restart_policy() == RestartPolicy::Never {
            // What never ran in the old sandbox does not run in a new one either: the pod has had its run. Only containers with
            // a policy of their own go on.
            return !pod.app_containers().any(|e| ran(&e.spec.name).is_some() && self.runs_again(e.spec));
        }
        !pod.app_containers().any(|e| self.runs_again(e.spec))
    }
}
