//! The sync plan: what the next round does to one pod, from what should run, what does run, the probes' verdicts, the back-off and
//! the moment.
//!
//! ```text
//!  sandbox unfit ──▶ nothing left to run ──▶ stop what is alive
//!       │      └───▶ stop all, new sandbox, first init container (or all apps)
//!       ▼
//!  init: newest to oldest, until one has begun ──▶ failed for good: stop all
//!       │ done
//!       ▼
//!  apps: each by itself: keep, kill, start, wait ──▶ none left: stop all
//! ```
//!
//! Only containers of the newest sandbox tell how far initialisation is; those of earlier sandboxes only tell which app has already
//! run to its end. A container that was created but never started counts as absent: it is removed and created anew.

mod apps;
mod init;
mod resize;
mod sandbox;

#[cfg(test)]
mod pairs;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod walk;

use std::collections::BTreeSet;

use jiff::Timestamp;
use model::allocation::PodAllocation;
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::plan::{Kill, KillReason, Plan, SandboxStep, Start, Waiting};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

use crate::backoff::Backoffs;
use crate::resize::ResizeRules;
use crate::restart::{self, RestartGates};
use crate::text::go_duration;

pub use resize::with_pod_resize;
pub use sandbox::{SandboxVerdict, sandbox_verdict};

/// What a startup probe says about a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartupVerdict {
    /// No result yet.
    #[default]
    Unknown,
    /// It succeeded, or it did before this agent started.
    Started,
    /// It failed for good.
    Failed,
}

/// What the probes say about a container. Both hold until the container is another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeVerdicts {
    /// The liveness probe failed for good.
    pub liveness_failed: bool,
    /// The startup probe's verdict; read only when the container has that probe.
    pub startup: StartupVerdict,
}

/// What the plan is made from.
#[derive(Clone, Copy)]
pub struct PlanInput<'a> {
    /// What should run.
    pub pod: &'a DesiredPod,
    /// What does run. Newest first, as [`ObservedPod::sort`] orders; the newest sandbox and all containers with their statuses.
    pub observed: &'a ObservedPod,
    /// The probes' verdicts by container id.
    pub probes: &'a dyn Fn(&str) -> ProbeVerdicts,
    /// Crash back-off.
    pub backoffs: &'a Backoffs,
    /// Now.
    pub now: Timestamp,
    /// Feature gates.
    pub gates: RestartGates,
    /// The hash of (image, name) that is written into containers.
    pub container_hash: &'a dyn Fn(&str, &str) -> u32,
    /// What the pod has; None: nothing is to be resized.
    pub has: Option<Has<'a>>,
}

/// The resources that a pod has.
#[derive(Clone, Copy, Debug)]
pub struct Has<'a> {
    /// What its containers were last given. Every running one is among them.
    pub actuated: &'a PodAllocation,
    /// Its cgroup has other settings than it should.
    pub cgroup_differs: bool,
    /// What this node can resize.
    pub rules: ResizeRules,
}

/// When the newest exited container of this name ended: the start of its back-off. A container without end time ended when it was
/// started or created.
pub fn last_exit(observed: &ObservedPod, name: &str) -> Option<Timestamp> {
    let c = observed.containers.iter().find(|c| c.name == name && c.state == ContainerState::Exited)?;
    Some(c.finished_at.or(c.started_at).unwrap_or(c.created_at))
}

/// The next round for one pod. Empty when nothing is to be done.
///
/// When [`restart::restart_all`] holds, the plan removes every container and starts none; the log files of what it prunes must then be
/// kept, since the next restartCount is found by them.
pub fn plan(input: &PlanInput<'_>) -> Plan {
    let mut round = Round::new(*input);
    if input.pod.is_deleting() {
        // Its end is `terminate`'s business; nothing starts any more.
        return round.plan;
    }
    match sandbox_verdict(input.pod, input.observed) {
        SandboxVerdict::Replace { attempt } => round.replace_sandbox(attempt),
        SandboxVerdict::Keep { id } => {
            round.current = Some(id.clone());
            round.plan.sandbox = SandboxStep::Keep(id);
            if restart::restart_all(input.pod, input.observed, input.gates) {
                round.reset();
            } else {
                round.keep_sandbox();
            }
        }
    }
    round.finish()
}

/// What is to become of one container of the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// It runs and stays.
    Keep,
    /// It should run and will, now or after its back-off or a kill.
    Start,
    /// It has ended for good.
    Done,
}

/// A plan in the making.
struct Round<'a> {
    input: PlanInput<'a>,
    /// The sandbox that is kept.
    current: Option<String>,
    plan: Plan,
    killed: BTreeSet<&'a str>,
    pruned: BTreeSet<&'a str>,
    /// Nothing of the pod is to run any more.
    ended: bool,
}

impl<'a> Round<'a> {
    fn new(input: PlanInput<'a>) -> Self {
        let plan = Plan {
            kill_pod: false,
            kill: Vec::new(),
            prune: Vec::new(),
            sandbox: SandboxStep::None,
            resize: None,
            start: Vec::new(),
            waiting: Vec::new(),
            wake_at: None,
        };
        Self { input, current: None, plan, killed: BTreeSet::new(), pruned: BTreeSet::new(), ended: false }
    }

    /// The newest container of this name in the sandbox that is kept.
    fn here(&self, name: &str) -> Option<&'a ObservedContainer> {
        self.input.observed.newest_in(name, self.current.as_deref()?)
    }

    fn kill(&mut self, c: &'a ObservedContainer, reason: KillReason, message: String, grace: Option<i64>) {
        if self.killed.insert(&c.id) {
            let kind = self.input.pod.container(&c.name).map(|e| e.kind);
            self.plan.kill.push(Kill { id: c.id.clone(), name: c.name.clone(), kind, reason, message, grace });
        }
    }

    fn prune(&mut self, c: &'a ObservedContainer) {
        if self.pruned.insert(&c.id) {
            self.plan.prune.push(c.id.clone());
        }
    }

    fn hash(&self, entry: &ContainerEntry<'_>) -> u32 {
        (self.input.container_hash)(entry.spec.image.as_deref().unwrap_or_default(), &entry.spec.name)
    }

    /// True when the image changed since this container was created.
    fn changed(&self, entry: &ContainerEntry<'_>, c: &ObservedContainer) -> bool {
        c.hash.is_some_and(|h| h != self.hash(entry))
    }

    /// Starts this container in this round, or puts it down as waiting for its back-off. Whatever was only created before is removed.
    fn start(&mut self, entry: &ContainerEntry<'_>) {
        let PlanInput { pod, observed, backoffs, now, .. } = self.input;
        let name = &entry.spec.name;
        if let Some(wait) =
            last_exit(observed, name).and_then(|exit| backoffs.waits(pod.uid(), name, self.hash(entry), exit, now))
        {
            self.plan.waiting.push(Waiting {
                name: name.clone(),
                reason: "CrashLoopBackOff",
                message: format!(
                    "back-off {} restarting failed container={name} pod={}({})",
                    go_duration(wait.delay),
                    pod.full_name(),
                    pod.uid()
                ),
                until: Some(wait.until),
            });
            return;
        }
        for c in observed.containers.iter().filter(|c| c.name == *name && c.state == ContainerState::Created) {
            self.prune(c);
        }
        self.plan.start.push(Start {
            kind: entry.kind,
            index: entry.index,
            name: name.clone(),
            restart_count: observed
                .containers
                .iter()
                .filter(|c| c.name == *name)
                .map(|c| c.restart_count)
                .max()
                .map(|n| n.saturating_add(1)),
        });
    }

    /// Stops everything that is alive and starts nothing: the pod has ended. Containers that must be killed for a reason of their own
    /// are killed first, in a round of their own, so that the reason and its grace are not lost.
    fn end_pod(&mut self) {
        self.plan.start.clear();
        self.plan.prune.clear();
        self.plan.waiting.clear();
        self.plan.resize = None;
        self.ended = true;
        if self.plan.kill.is_empty() {
            self.plan.kill_pod = self.input.observed.anything_alive();
            self.plan.sandbox = SandboxStep::None;
        }
    }

    /// The sandbox is fit: everything goes on in it.
    fn keep_sandbox(&mut self) {
        self.sweep();
        self.ephemeral();
        match self.init() {
            init::Progress::Failed => self.end_pod(),
            init::Progress::Pending => {}
            init::Progress::Done => self.apps(),
        }
        // The newest ended run of each init container is its record; the ones before it are not needed.
        let pod = self.input.pod;
        for entry in pod.init_containers() {
            let ended = self.input.observed.containers.iter().filter(|c| {
                c.name == entry.spec.name && c.state == ContainerState::Exited && !self.killed.contains(c.id.as_str())
            });
            for c in ended.skip(1).collect::<Vec<_>>() {
                self.prune(c);
            }
        }
    }

    /// Kills what may not live: containers that the spec does not have, that live in another sandbox, or beside a newer one of
    /// the same name.
    fn sweep(&mut self) {
        let observed = self.input.observed;
        let current = self.current.clone();
        let mut names = BTreeSet::new();
        for c in &observed.containers {
            let stop = || format!("Stopping container {}", c.name);
            let newest = current.as_deref() != Some(&c.sandbox_id) || names.insert(c.name.as_str());
            if !matches!(c.state, ContainerState::Running | ContainerState::Unknown) {
                continue;
            }
            if self.input.pod.container(&c.name).is_none() {
                self.kill(c, KillReason::NotInSpec, stop(), None);
            } else if current.as_deref() != Some(&c.sandbox_id) {
                self.kill(c, KillReason::SandboxChanged, stop(), None);
            } else if !newest {
                self.kill(c, KillReason::UnknownState, stop(), None);
            }
        }
    }

    /// Ephemeral containers start once and never again.
    fn ephemeral(&mut self) {
        let PlanInput { pod, observed, .. } = self.input;
        for entry in pod.ephemeral_containers() {
            let mut runs = observed.containers.iter().filter(|c| c.name == entry.spec.name);
            if runs.all(|c| c.state == ContainerState::Created) {
                self.start(&entry);
            }
        }
    }

    /// Removes every container of the pod but the ephemeral ones, so that the next round begins anew in the same sandbox. Those whose
    /// exit asked for it go last: while one is left, the reset is not complete.
    fn reset(&mut self) {
        let PlanInput { pod, observed, .. } = self.input;
        let mut sources = Vec::new();
        for entry in pod.app_containers().rev().chain(pod.init_containers().rev()) {
            for c in observed.containers.iter().filter(|c| c.name == entry.spec.name) {
                match c.state {
                    ContainerState::Exited if restart::triggers_restart_all(entry.spec, c.exit_code) => {
                        sources.push(c);
                        continue;
                    }
                    ContainerState::Running | ContainerState::Unknown => {
                        self.kill(c, KillReason::RestartAllContainers, "killing".into(), Some(0));
                    }
                    ContainerState::Created | ContainerState::Exited => {}
                }
                self.prune(c);
            }
        }
        for c in sources {
            self.prune(c);
        }
    }

    fn finish(mut self) -> Plan {
        self.resize_pod();
        self.plan.wake_at = self.plan.waiting.iter().filter_map(|w| w.until).min();
        self.plan
    }
}

/// `Container C failed liveness probe`, with `Init container` for sidecars.
fn kill_message(kind: ContainerKind, name: &str, what: &str) -> String {
    let head = if kind == ContainerKind::Sidecar { "Init container" } else { "Container" };
    format!("{head} {name} {what}")
}
