//! Init containers and sidecars: each plain one runs to completion before the next, each sidecar has to be started before the next.
//!
//! Records of completed init containers may vanish from the runtime, so the latest one that has begun tells how far initialisation is;
//! all before it are taken as done.

use model::api::Container;
use model::observed::{ContainerState, ObservedContainer};
use model::plan::KillReason;
use model::pod::{ContainerEntry, ContainerKind};

use super::{Round, StartupVerdict, kill_message};
use crate::restart;

/// How far initialisation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// An init container failed and may not run again.
    Failed,
    /// Not done.
    Pending,
    /// App containers may start.
    Done,
}

impl<'a> Round<'a> {
    /// Plans init containers and sidecars.
    pub(super) fn init(&mut self) -> Progress {
        let pod = self.input.pod;
        let entries: Vec<ContainerEntry<'a>> = pod.init_containers().collect();
        if entries.is_empty() {
            return Progress::Done;
        }
        // An app of this sandbox that was started proves that initialisation was complete, whatever is left of its records.
        let mut done =
            pod.app_containers().filter_map(|e| self.here(&e.spec.name)).any(|c| c.state != ContainerState::Created);
        // True once an init container after the one looked at has begun.
        let mut passed = done;
        let mut starts: Vec<usize> = Vec::new();
        for (i, entry) in entries.iter().enumerate().rev() {
            let sidecar = entry.kind == ContainerKind::Sidecar;
            let Some(c) = self.here(&entry.spec.name) else {
                if passed && sidecar {
                    starts.push(i);
                }
                continue;
            };
            if passed && !sidecar {
                continue;
            }
            let last = i + 1 == entries.len();
            let mut reached = |starts: &mut Vec<usize>| {
                if last {
                    done = true;
                } else if !passed {
                    starts.push(i + 1);
                }
            };
            match c.state {
                // Created but never started: absent, and still the one to begin with.
                ContainerState::Created => starts.push(i),
                ContainerState::Running if !sidecar => {
                    // It runs to its end whatever its policy says: validation allows none that asks for a restart.
                    self.resize_container(entry, c);
                }
                ContainerState::Running => {
                    let verdicts = (self.input.probes)(&c.id);
                    let startup = entry.spec.startup_probe.as_ref();
                    if startup.is_some() && verdicts.startup == StartupVerdict::Failed {
                        let message = kill_message(entry.kind, &entry.spec.name, "failed startup probe");
                        let grace = startup.and_then(|p| p.termination_grace_period_seconds);
                        self.kill(c, KillReason::StartupProbe, message, grace);
                        starts.push(i);
                    } else {
                        if startup.is_none() || verdicts.startup == StartupVerdict::Started {
                            reached(&mut starts);
                        }
                        if self.restart_running_sidecar(entry, c) {
                            starts.push(i);
                        }
                    }
                }
                ContainerState::Exited if sidecar => starts.push(i),
                ContainerState::Exited if c.exit_code == 0 => reached(&mut starts),
                ContainerState::Exited => {
                    if !restart::restarts_after_exit(pod, entry.spec, c.exit_code, self.input.gates) {
                        return Progress::Failed;
                    }
                    starts.push(i);
                }
                ContainerState::Unknown => {
                    let again = sidecar || restart::restarts_after_kill(pod, entry.spec, self.input.gates);
                    if !again {
                        return Progress::Failed;
                    }
                    let message = "Init container is in \"unknown\" state, try killing it before restart";
                    self.kill(c, KillReason::UnknownState, message.into(), None);
                    starts.push(i);
                }
            }
            passed = true;
        }
        if !passed {
            starts.push(0);
        }
        starts.sort_unstable();
        starts.dedup();
        for i in starts {
            if let Some(entry) = entries.get(i) {
                self.start(entry);
            }
        }
        if done { Progress::Done } else { Progress::Pending }
    }

    /// A sidecar that runs is killed when its image changed, its liveness probe failed or its new resources ask for it; it starts again in the same
    /// round.
    fn restart_running_sidecar(&mut self, entry: &ContainerEntry<'_>, c: &'a ObservedContainer) -> bool {
        let spec: &Container = entry.spec;
        if self.changed(entry, c) {
            let message = kill_message(entry.kind, &spec.name, "definition changed");
            self.kill(c, KillReason::DefinitionChanged, message, None);
            return true;
        }
        if spec.liveness_probe.is_some() && (self.input.probes)(&c.id).liveness_failed {
            let grace = spec.liveness_probe.as_ref().and_then(|p| p.termination_grace_period_seconds);
            let message = kill_message(entry.kind, &spec.name, "failed liveness probe");
            self.kill(c, KillReason::LivenessProbe, message, grace);
            return true;
        }
        self.resize_container(entry, c)
    }
}
