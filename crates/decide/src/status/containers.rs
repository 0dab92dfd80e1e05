//! Container statuses: what the runtime shows of each, joined with what the last status remembers.

use std::collections::BTreeMap;

use jiff::Timestamp;
use model::api::{
    Container, ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, ContainerUser, LinuxContainerUser, PodStatus, Quantity as ApiQuantity, ResourceRequirements, Time,
    VolumeMountStatus,
};
use model::observed::{ContainerState, ObservedContainer, ObservedResources};
use model::pod::{ContainerEntry, ContainerKind};
use model::quantity::{Format, Quantity};

use super::{MAX_TERMINATION_MESSAGES, StatusInput, find, restarting_all, started_here, whole_seconds};
use crate::resize::sizes;
use crate::restart::{self, RESTARTING_ALL_CONTAINERS};

/// Exit code shown for a container whose end nobody saw.
pub(super) const UNKNOWN_EXIT: i32 = 137;
/// Reason shown for it.
pub(super) const STATUS_UNKNOWN: &str = "ContainerStatusUnknown";
/// Below these the kernel's value says nothing about what was asked for.
const MIN_SHARES: i64 = 2;
const MIN_LIMIT_MILLI: i64 = 10;

/// The statuses of one list of the spec: `Init` (sidecars included) in the order of the spec, `App` and `Ephemeral` by name.
pub(super) fn statuses(input: &StatusInput<'_>, kind: ContainerKind) -> Vec<ContainerStatus> {
    let pod = input.pod;
    let previous = input.previous.or(pod.stored_status());
    let list = |get: fn(&PodStatus) -> &Option<Vec<ContainerStatus>>| {
        previous.and_then(|s| get(s).as_deref()).unwrap_or_default()
    };
    let (entries, old): (Vec<ContainerEntry<'_>>, _) = match kind {
        ContainerKind::Init | ContainerKind::Sidecar => {
            (pod.init_containers().collect(), list(|s| &s.init_container_statuses))
        }
        ContainerKind::App => (pod.app_containers().collect(), list(|s| &s.container_statuses)),
        ContainerKind::Ephemeral => (pod.ephemeral_containers().collect(), list(|s| &s.ephemeral_container_statuses)),
    };
    let view = View::new(input);
    let mut statuses: Vec<ContainerStatus> = entries.iter().map(|e| view.status(e, find(old, &e.spec.name))).collect();
    if !matches!(kind, ContainerKind::Init | ContainerKind::Sidecar) {
        statuses.sort_by(|a, b| a.name.cmp(&b.name));
    }
    statuses
}

/// What all containers of the pod have in common.
struct View<'a> {
    input: &'a StatusInput<'a>,
    has_init: bool,
    restarting: bool,
    /// The sandbox that serves, when one does and the pod goes on in it.
    current: Option<&'a str>,
    /// The first init container that is not complete in [`Self::current`]; records of the ones from here on are of earlier sandboxes.
    pending_from: Option<usize>,
    message_limit: usize,
}

impl<'a> View<'a> {
    fn new(input: &'a StatusInput<'a>) -> Self {
        let pod = input.pod;
        let serves = crate::plan::sandbox_verdict(pod, input.observed);
        let current = match serves {
            crate::plan::SandboxVerdict::Keep { .. } if !input.ended => {
                input.observed.sandboxes.first().map(|s| s.id.as_str())
            }
            _ => None,
        };
        let pending_from = current.filter(|_| !started_here(pod, input.observed)).map(|id| {
            pod.init_containers()
                .rfind(|e| input.observed.newest_in(&e.spec.name, id).is_some())
                .map_or(0, |e| e.index + 1)
        });
        Self {
            input,
            has_init: pod.init_containers().next().is_some(),
            restarting: restarting_all(input),
            current,
            pending_from,
            message_limit: MAX_TERMINATION_MESSAGES / pod.containers().count().max(1),
        }
    }

    fn status(&self, e: &ContainerEntry<'_>, old: Option<&ContainerStatus>) -> ContainerStatus {
        let runs: Vec<&ObservedContainer> =
            self.input.observed.containers.iter().filter(|c| c.name == e.spec.name).collect();
        let mut status = match runs.first() {
            Some(run) => {
                let mut status = self.seen(e, run, old);
                if let Some(before) = runs.get(1) {
                    status.last_state = Some(self.seen(e, before, old).state.unwrap_or_default());
                }
                status
            }
            None => self.missing(e, old),
        };
        if !self.earlier_sandbox(e, &runs, &mut status) {
            self.infer_completed(e, &runs, &mut status);
        }
        self.overlay_waiting(e, runs.first().copied(), &mut status);
        self.probes(e, old, &mut status);
        status
    }

    /// A container that the runtime does not have: waiting at first, later what the last status remembers of it.
    fn missing(&self, e: &ContainerEntry<'_>, old: Option<&ContainerStatus>) -> ContainerStatus {
        let mut status = ContainerStatus {
            name: e.spec.name.clone(),
            image: e.spec.image.clone().unwrap_or_default(),
            state: Some(waiting(self.default_reason(), "")),
            last_state: Some(ApiState::default()),
            volume_mounts: self.volume_mounts(e.spec),
            ..Default::default()
        };
        let Some(old) = old else { return status };
        let old_state = old.state.clone().unwrap_or_default();
        if old_state.terminated.is_some() {
            status = old.clone();
        } else {
            status.restart_count = old.restart_count;
            status.last_state = Some(old.last_state.clone().unwrap_or_default());
        }
        if self.restarting && old_state.waiting.is_none() {
            let message = "The container is removed because RestartAllContainers in place";
            status.state = Some(waiting(RESTARTING_ALL_CONTAINERS, message));
            status.last_state = Some(terminated(ContainerStateTerminated {
                reason: Some(RESTARTING_ALL_CONTAINERS.into()),
                message: Some(message.into()),
                exit_code: UNKNOWN_EXIT,
                ..Default::default()
            }));
            status.restart_count = old.restart_count + 1;
            return status;
        }
        let ended_before = status.last_state.as_ref().is_some_and(|s| s.terminated.is_some());
        if old_state.running.is_some() && !ended_before {
            // It ran and is gone: it ended, though nobody saw how. Waiting alone would make the pod Pending again.
            status.last_state = Some(terminated(ContainerStateTerminated {
                reason: Some(STATUS_UNKNOWN.into()),
                message: Some(
                    "The container could not be located when the pod was deleted.  The container used to be Running"
                        .into(),
                ),
                exit_code: UNKNOWN_EXIT,
                ..Default::default()
            }));
            if !self.input.pod.is_deleting() {
                status.restart_count += 1;
            }
        }
        status
    }

    fn default_reason(&self) -> &'static str {
        if self.has_init { "PodInitializing" } else { "ContainerCreating" }
    }

    /// A container that the runtime has.
    fn seen(&self, e: &ContainerEntry<'_>, run: &ObservedContainer, old: Option<&ContainerStatus>) -> ContainerStatus {
        let id = format!("{}://{}", self.input.runtime_name, run.id);
        let mut status = ContainerStatus {
            name: e.spec.name.clone(),
            restart_count: i32::try_from(run.restart_count).unwrap_or(i32::MAX),
            image: run.image.clone(),
            image_id: run.image_id.clone(),
            container_id: Some(id.clone()),
            last_state: Some(ApiState::default()),
            allocated_resources: e.spec.resources.as_ref().and_then(|r| r.requests.clone()),
            resources: Some(self.resources(e.spec, run, old, &id)),
            user: run.user.as_ref().map(|(uid, gid, groups)| ContainerUser {
                linux: Some(LinuxContainerUser {
                    uid: *uid,
                    gid: *gid,
                    supplemental_groups: Some(groups.clone()).filter(|g| !g.is_empty()),
                }),
            }),
            volume_mounts: old.map_or_else(|| self.volume_mounts(e.spec), |o| o.volume_mounts.clone()),
            ..Default::default()
        };
        let old_state = old.and_then(|o| o.state.clone()).unwrap_or_default();
        if let Some(old) = old {
            // The count never falls, and the last end is remembered, whatever was removed from the runtime.
            status.restart_count = status.restart_count.max(old.restart_count);
            let last = match old_state.terminated.clone() {
                Some(t) if old.container_id.as_ref() != Some(&id) => Some(t),
                _ => old.last_state.as_ref().and_then(|s| s.terminated.clone()),
            };
            if let Some(t) = last {
                status.last_state = Some(terminated(t));
            }
        }
        status.state = Some(match run.state {
            ContainerState::Running => {
                let same = old.is_some_and(|o| o.container_id.as_ref() == Some(&id));
                if let (false, Some(old), true) = (same, old, old_state.terminated.is_some()) {
                    status.restart_count = status.restart_count.max(old.restart_count + 1);
                }
                if same {
                    // A new container starts with a clean slate: only this very one keeps what its startup probe found.
                    status.started = old.and_then(|o| o.started);
                }
                ApiState {
                    running: Some(ContainerStateRunning { started_at: Some(time(run.started_at)) }),
                    ..Default::default()
                }
            }
            ContainerState::Exited => terminated(ContainerStateTerminated {
                exit_code: run.exit_code,
                reason: filled(&run.reason),
                message: filled(&cut(&run.message, self.message_limit)),
                started_at: Some(time(run.started_at)),
                finished_at: Some(time(run.finished_at)),
                container_id: Some(id.clone()),
                signal: None,
            }),
            ContainerState::Unknown if old_state.running.is_some() => {
                status.restart_count = old.map_or(0, |o| o.restart_count) + 1;
                let reason = if self.restarting { RESTARTING_ALL_CONTAINERS } else { STATUS_UNKNOWN };
                terminated(ContainerStateTerminated {
                    reason: Some(reason.into()),
                    message: Some("The container could not be located when the pod was terminated".into()),
                    exit_code: UNKNOWN_EXIT,
                    ..Default::default()
                })
            }
            // Judged before: it stays, and is not counted again.
            ContainerState::Unknown
                if old_state.terminated.is_some() && old.is_some_and(|o| o.container_id.as_ref() == Some(&id)) =>
            {
                old_state.clone()
            }
            ContainerState::Created | ContainerState::Unknown => waiting("", ""),
        });
        status
    }

    /// While the newest sandbox is still being initialised, what ran in earlier sandboxes is history: shown as the last state of a
    /// container that waits. True when that was so.
    fn earlier_sandbox(
        &self,
        e: &ContainerEntry<'_>,
        runs: &[&ObservedContainer],
        status: &mut ContainerStatus,
    ) -> bool {
        let (Some(current), Some(from)) = (self.current, self.pending_from) else { return false };
        let pending = match e.kind {
            ContainerKind::Init | ContainerKind::Sidecar => e.index >= from,
            // An app that has ended for good in an earlier sandbox stays ended.
            ContainerKind::App => self.has_init && runs.first().is_none_or(|c| self.runs_again(e, c)),
            ContainerKind::Ephemeral => false,
        };
        let here = runs.first().is_some_and(|c| c.sandbox_id == current);
        if !pending || here || self.restarting {
            return false;
        }
        if let Some(t) = status.state.take().and_then(|s| s.terminated) {
            status.last_state = Some(terminated(t));
        }
        status.state = Some(waiting(self.default_reason(), ""));
        true
    }

    /// The record of a plain init container may vanish, and the last status with it; an app that was created proves its success.
    fn infer_completed(&self, e: &ContainerEntry<'_>, runs: &[&ObservedContainer], status: &mut ContainerStatus) {
        let waits = status.state.as_ref().is_some_and(|s| s.waiting.is_some());
        if e.kind != ContainerKind::Init || !runs.is_empty() || !waits || self.restarting {
            return;
        }
        let input = self.input;
        let app_made = input
            .pod
            .app_containers()
            .filter_map(|a| input.observed.newest(&a.spec.name))
            .any(|c| c.state != ContainerState::Unknown);
        if app_made {
            status.state = Some(terminated(ContainerStateTerminated {
                reason: Some("Completed".into()),
                message: Some(
                    "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally"
                        .into(),
                ),
                ..Default::default()
            }));
        }
    }

    fn runs_again(&self, e: &ContainerEntry<'_>, c: &ObservedContainer) -> bool {
        match c.state {
            ContainerState::Running => false,
            ContainerState::Created | ContainerState::Unknown => true,
            ContainerState::Exited => {
                restart::restarts_after_exit(self.input.pod, e.spec, c.exit_code, self.input.gates)
            }
        }
    }

    /// A container that should start and could not is waiting, for the reason why.
    fn overlay_waiting(&self, e: &ContainerEntry<'_>, run: Option<&ObservedContainer>, status: &mut ContainerStatus) {
        let Some(why) = self.input.waiting.get(&e.spec.name) else { return };
        let complete = e.kind == ContainerKind::Init
            && (status.state.as_ref().is_some_and(|s| s.terminated.as_ref().is_some_and(|t| t.exit_code == 0)));
        if complete || self.input.pod.is_deleting() || run.is_some_and(|c| !self.runs_again(e, c)) {
            return;
        }
        if let Some(t) = status.state.take().and_then(|s| s.terminated) {
            status.last_state = Some(terminated(t));
        }
        status.state = Some(waiting(&why.reason, &why.message));
    }

    /// `started` and `ready`.
    fn probes(&self, e: &ContainerEntry<'_>, old: Option<&ContainerStatus>, status: &mut ContainerStatus) {
        if e.kind == ContainerKind::Ephemeral {
            return;
        }
        let input = self.input;
        let running = status.state.as_ref().and_then(|s| s.running.clone());
        let id = status.container_id.as_deref().and_then(|id| id.split_once("://")).map_or("", |(_, id)| id);
        let results = if running.is_some() { (input.probes)(id) } else { Default::default() };
        let started = running.is_some()
            && match results.startup {
                Some(ok) => ok,
                None if !input.forget_on_restart && status.started == Some(true) => true,
                None => e.spec.startup_probe.is_none() || input.terminating || e.kind == ContainerKind::Init,
            };
        status.started = Some(started);
        status.ready = match e.kind {
            ContainerKind::Init => {
                status.state.as_ref().and_then(|s| s.terminated.as_ref()).is_some_and(|t| t.exit_code == 0)
            }
            _ if !started => false,
            _ => match results.ready {
                Some(ok) => ok || e.spec.readiness_probe.is_none(),
                None if e.spec.readiness_probe.is_none() => true,
                // No result of this agent's: what an earlier agent found of this very container holds until there is one (A16).
                None => {
                    let before_agent = running.and_then(|r| r.started_at).is_some_and(|t| t.0 <= input.agent_started);
                    let was = old.is_some_and(|o| o.ready && o.container_id == status.container_id);
                    !input.forget_on_restart && before_agent && was
                }
            },
        };
    }

    /// What the container has now: what the runtime says where the spec asks for anything, else what was allocated.
    fn resources(
        &self,
        spec: &Container,
        run: &ObservedContainer,
        old: Option<&ContainerStatus>,
        id: &str,
    ) -> ResourceRequirements {
        let mut resources = spec.resources.clone().unwrap_or_default();
        if run.state != ContainerState::Running {
            return resources;
        }
        let kept = old
            .filter(|o| o.container_id.as_deref() == Some(id) && o.state.as_ref().is_some_and(|s| s.running.is_some()))
            .and_then(|o| o.resources.as_ref());
        // What the runtime does not tell is as it was last given.
        let given = self.input.actuated.and_then(|a| a.containers.get(&spec.name));
        let has = Actual::new(run.resources.as_ref(), given);
        if let Some(limits) = &mut resources.limits {
            let kept = kept.and_then(|r| r.limits.as_ref());
            put(limits, kept, "cpu", has.cpu_limit, MIN_LIMIT_MILLI);
            put(limits, kept, "memory", has.memory_limit, 0);
        }
        if let Some(requests) = &mut resources.requests {
            let kept = kept.and_then(|r| r.requests.as_ref());
            put(requests, kept, "cpu", has.cpu_request, MIN_SHARES);
            put(requests, kept, "memory", has.memory_request, 0);
        }
        resources
    }

    fn volume_mounts(&self, spec: &Container) -> Option<Vec<VolumeMountStatus>> {
        let mounts = spec.volume_mounts.as_deref().filter(|m| !m.is_empty())?;
        let status = |m: &model::api::VolumeMount| {
            let read_only = m.read_only.unwrap_or(false);
            let asked = m.recursive_read_only.as_deref();
            let private = m.mount_propagation.as_deref().is_none_or(|p| p == "None");
            let recursive =
                matches!(asked, Some("IfPossible" | "Enabled")) && private && self.input.recursive_read_only;
            VolumeMountStatus {
                name: m.name.clone(),
                mount_path: m.mount_path.clone(),
                read_only: read_only.then_some(true),
                recursive_read_only: read_only.then(|| if recursive { "Enabled" } else { "Disabled" }.to_owned()),
                volume_status: None,
            }
        };
        Some(mounts.iter().map(status).collect())
    }
}

/// Resources of a running container as quantities, with their value in the unit that the floor is given in.
struct Actual {
    cpu_limit: Option<(Quantity, i64)>,
    cpu_request: Option<(Quantity, i64)>,
    memory_request: Option<(Quantity, i64)>,
    memory_limit: Option<(Quantity, i64)>,
}

impl Actual {
    fn new(r: Option<&ObservedResources>, given: Option<&ResourceRequirements>) -> Self {
        let milli = |m: i64| (m > 0).then(|| (Quantity::from_milli(m, Format::DecimalSI), m));
        let bytes = |b: i64| (b > 0).then(|| (Quantity::from_value(b, Format::BinarySI), b));
        // No runtime tells the memory request: it stays in the words in which it was given.
        let memory_request = given
            .and_then(|g| g.requests.as_ref()?.get("memory"))
            .and_then(|q| Quantity::of(q).ok())
            .filter(|q| q.value() > 0)
            .map(|q| (q.clone(), q.value()));
        if let (None, Some(given)) = (r, given.map(|g| sizes(None, g))) {
            return Self {
                memory_request,
                cpu_limit: milli(given.cpu_limit),
                cpu_request: milli(given.cpu_request),
                memory_limit: bytes(given.memory_limit),
            };
        }
        Self {
            memory_request,
            cpu_limit: r
                .filter(|r| r.cpu_period > 0 && r.cpu_quota > 0)
                .and_then(|r| milli(r.cpu_quota.saturating_mul(1000) / r.cpu_period)),
            cpu_request: r
                .filter(|r| r.cpu_shares > 0)
                .and_then(|r| milli((r.cpu_shares.saturating_mul(1000) + 1023) / 1024)),
            memory_limit: r.and_then(|r| bytes(r.memory_limit)),
        }
    }
}

/// Sets one resource to what the container has. At or below `floor` on both sides the kernel's value is only its minimum, and what was
/// allocated stays. Unknown: what the last status of the same run said.
fn put(
    list: &mut BTreeMap<String, ApiQuantity>,
    kept: Option<&BTreeMap<String, ApiQuantity>>,
    name: &str,
    actual: Option<(Quantity, i64)>,
    floor: i64,
) {
    match actual {
        Some((quantity, value)) => {
            let allocated = list.get(name).and_then(|q| Quantity::of(q).ok()).map_or(0, |q| q.milli_value());
            if value > floor || allocated > floor {
                list.insert(name.to_owned(), quantity.to_api());
            }
        }
        None => {
            if let Some(q) = kept.and_then(|k| k.get(name)) {
                list.insert(name.to_owned(), q.clone());
            }
        }
    }
}

fn waiting(reason: &str, message: &str) -> ApiState {
    let waiting = ContainerStateWaiting { reason: filled(reason), message: filled(message) };
    ApiState { waiting: Some(waiting), ..Default::default() }
}

pub(super) fn terminated(t: ContainerStateTerminated) -> ApiState {
    ApiState { terminated: Some(t), ..Default::default() }
}

fn filled(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Cuts a text to at most `max` bytes without splitting a character.
fn cut(text: &str, max: usize) -> String {
    text[..text.floor_char_boundary(max)].to_owned()
}

/// A time of the runtime; one that never came shows as 1970, as in Go.
fn time(t: Option<Timestamp>) -> Time {
    whole_seconds(t.unwrap_or(Timestamp::UNIX_EPOCH))
}
