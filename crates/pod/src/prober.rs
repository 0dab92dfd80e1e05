//! Probes: one task for each probe of each running container that has one.
//!
//! Tasks: started and ended by the pod's worker through [`Prober::follow`]; they also end with [`Tasks::stop`]. Input: the container's id and
//! spec, fixed for the task's life. Output: the verdict in the prober's table, and a wake-up of the pod's worker when it changed. Deadline: the probe's
//! `timeoutSeconds` for each try. A slow container makes its own probes late and nothing else.
//!
//! Liveness and readiness hold back until the container's own startup probe succeeded. While the pod ends, readiness goes on and the other two do not.

mod attempt;
mod grpc;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cri::port::RuntimeMutator;
use decide::plan::{ProbeVerdicts, StartupVerdict};
use decide::probe::{ProbeKind, ProbeState, Thresholds};
use decide::status::ProbeResults;
use model::api::{Container, PodStatus, Probe};
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::pod::{ContainerKind, DesiredPod, PodUid};
use telemetry::metrics::{Metrics, ProbedContainer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::attempt::Target;
use crate::events::Events;
use crate::ports::{Clock, Random, Tasks};
use crate::registry::{PodEntry, WorkerState};

/// How often a try that could not be made is repeated at once.
const TRIES: usize = 3;

/// Probing, shared by all workers.
pub struct Prober {
    runtime: Arc<dyn RuntimeMutator>,
    tasks: Tasks,
    clock: Clock,
    random: Random,
    events: Events,
    metrics: Arc<Metrics>,
    began: tokio::time::Instant,
    table: Mutex<Table>,
}

/// Containers with probes, by id, and the ids of each pod: one pod's round costs that pod only.
#[derive(Default)]
struct Table {
    containers: HashMap<String, Probed>,
    pods: HashMap<PodUid, Vec<String>>,
}

impl Table {
    /// Ends the probes of the pod's containers that are not to be kept.
    fn retain(&mut self, uid: &PodUid, keep: impl Fn(&str) -> bool) {
        let Some(ids) = self.pods.get_mut(uid) else { return };
        ids.retain(|id| {
            let stays = keep(id);
            if let Some(probed) = (!stays).then(|| self.containers.remove(id)).flatten() {
                probed.stop.cancel();
            }
            stays
        });
        if ids.is_empty() {
            self.pods.remove(uid);
        }
    }
}

/// The probes of one container.
struct Probed {
    states: HashMap<ProbeKind, ProbeState>,
    started: watch::Sender<bool>,
    stop: CancellationToken,
}

impl Prober {
    /// A prober without containers.
    pub fn new(
        runtime: Arc<dyn RuntimeMutator>,
        tasks: Tasks,
        clock: Clock,
        random: Random,
        events: Events,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            tasks,
            clock,
            random,
            events,
            metrics,
            began: tokio::time::Instant::now(),
            table: Mutex::default(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the probes of containers that run, and ends those of containers that do not. `address` is where probes without a host go. What the last
    /// status or `kept` says of a container holds until a probe says otherwise; `kept` None: nothing holds (gate ChangeContainerStatusOnKubeletRestart).
    pub fn follow(
        self: &Arc<Self>,
        pod: &DesiredPod,
        observed: &ObservedPod,
        address: Option<String>,
        entry: &Arc<PodEntry>,
        kept: Option<&BTreeMap<String, Found>>,
    ) {
        let told = |id: &str| {
            let Some(kept) = kept else { return Found::default() };
            let view = entry.view();
            let known = if view.status.phase.is_some() { Some(&view.status) } else { pod.stored_status() };
            known.and_then(|status| Found::of(status, id)).or(kept.get(id).copied()).unwrap_or_default()
        };
        let running = |id: &str| observed.containers.iter().any(|c| c.id == id && c.state == ContainerState::Running);
        self.table().retain(pod.uid(), running);
        for container in pod.containers() {
            if !matches!(container.kind, ContainerKind::App | ContainerKind::Sidecar) || !has_probes(container.spec) {
                continue;
            }
            let Some(seen) = observed.newest(&container.spec.name).filter(|c| c.state == ContainerState::Running)
            else {
                continue;
            };
            if self.table().containers.contains_key(&seen.id) {
                continue;
            }
            let told = told(&seen.id);
            self.begin(pod, container.spec, told, seen, address.clone(), entry);
        }
    }

    fn begin(
        self: &Arc<Self>,
        pod: &DesiredPod,
        spec: &Container,
        told: Found,
        seen: &ObservedContainer,
        ip: Option<String>,
        entry: &Arc<PodEntry>,
    ) {
        let (id, started_at) = (seen.id.as_str(), seen.started_at);
        let mut probes = probes(spec);
        let has_startup = probes.iter().any(|(kind, _)| *kind == ProbeKind::Startup);
        let stop = self.tasks.stop().child_token();
        let probed = Probed {
            states: probes
                .iter()
                .map(|(kind, probe)| {
                    let mut state = ProbeState::new(*kind);
                    if told.holds(*kind) {
                        state.take(true, Thresholds { success: 1, ..Thresholds::of(probe) });
                    }
                    (*kind, state)
                })
                .collect(),
            started: watch::Sender::new(!has_startup || told.started),
            stop: stop.clone(),
        };
        let started = probed.started.subscribe();
        // An earlier agent saw it succeed: it never runs again for this container.
        probes.retain(|(kind, _)| !(told.started && *kind == ProbeKind::Startup));
        let mut table = self.table();
        table.containers.insert(id.to_owned(), probed);
        table.pods.entry(pod.uid().clone()).or_default().push(id.to_owned());
        drop(table);
        for (kind, probe) in probes {
            let task = ProbeTask {
                prober: self.clone(),
                entry: entry.clone(),
                kind,
                thresholds: Thresholds::of(probe),
                probe: probe.clone(),
                target: Target { container_id: id.to_owned(), spec: spec.clone(), pod_ip: ip.clone() },
                started_at,
                started: started.clone(),
            };
            let stop = stop.clone();
            self.tasks.spawn(async move {
                tokio::select! { () = stop.cancelled() => {}, () = task.run() => {} }
            });
        }
    }

    /// Ends all probes of a pod.
    pub fn forget(&self, uid: &PodUid) {
        self.table().retain(uid, |_| false);
        self.metrics.forget_probes(uid.as_str());
    }

    /// What was found of a pod's containers that have probes, by id.
    pub fn found(&self, uid: &PodUid) -> BTreeMap<String, Found> {
        let table = self.table();
        let ids = table.pods.get(uid).into_iter().flatten();
        let found = ids.filter_map(|id| {
            let probed = table.containers.get(id)?;
            let good = |kind| probed.states.get(&kind).is_some_and(|s| s.verdict() == Some(true));
            Some((id.clone(), Found { started: *probed.started.borrow(), ready: good(ProbeKind::Readiness) }))
        });
        found.collect()
    }

    fn verdict(&self, id: &str, kind: ProbeKind) -> Option<bool> {
        self.table().containers.get(id)?.states.get(&kind)?.verdict()
    }

    /// What the plan needs to know of a container.
    pub fn verdicts(&self, id: &str) -> ProbeVerdicts {
        ProbeVerdicts {
            liveness_failed: self.verdict(id, ProbeKind::Liveness) == Some(false),
            startup: match self.verdict(id, ProbeKind::Startup) {
                None => StartupVerdict::Unknown,
                Some(true) => StartupVerdict::Started,
                Some(false) => StartupVerdict::Failed,
            },
        }
    }

    /// What the status needs to know of a container.
    pub fn results(&self, id: &str) -> ProbeResults {
        ProbeResults { startup: self.verdict(id, ProbeKind::Startup), ready: self.verdict(id, ProbeKind::Readiness) }
    }

    /// Takes one result; true when the probe is settled for good.
    fn take(&self, task: &ProbeTask, success: bool) -> bool {
        let mut table = self.table();
        let Some(probed) = table.containers.get_mut(&task.target.container_id) else {
            return true;
        };
        let Some(state) = probed.states.get_mut(&task.kind) else {
            return true;
        };
        let changed = state.take(success, task.thresholds);
        let settled = state.settled();
        if changed && task.kind == ProbeKind::Startup && success {
            probed.started.send_replace(true);
        }
        drop(table);
        if changed {
            info!(
                container = task.target.spec.name,
                probe = task.kind.as_str(),
                healthy = success,
                "Probe verdict changed"
            );
            task.entry.verdict_changed();
        }
        settled
    }
}

fn probes(spec: &Container) -> Vec<(ProbeKind, &Probe)> {
    [
        (ProbeKind::Startup, &spec.startup_probe),
        (ProbeKind::Liveness, &spec.liveness_probe),
        (ProbeKind::Readiness, &spec.readiness_probe),
    ]
    .into_iter()
    .filter_map(|(kind, probe)| Some((kind, probe.as_ref()?)))
    .collect()
}

/// What probes found of a container: an earlier agent's verdicts hold until a probe says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Found {
    /// The startup probe succeeded.
    #[serde(default)]
    pub started: bool,
    /// The readiness probe's verdict.
    #[serde(default)]
    pub ready: bool,
}

impl Found {
    /// From a status; None: it does not name the container.
    fn of(status: &PodStatus, id: &str) -> Option<Self> {
        let lists = [&status.container_statuses, &status.init_container_statuses];
        let is_it = |full: &String| full.split_once("://").is_some_and(|(_, of)| of == id);
        let found = lists.into_iter().flatten().flatten().find(|c| c.container_id.as_ref().is_some_and(is_it));
        found.map(|c| Self { started: c.started == Some(true), ready: c.ready })
    }

    fn holds(self, kind: ProbeKind) -> bool {
        match kind {
            ProbeKind::Startup => self.started,
            ProbeKind::Readiness => self.ready,
            ProbeKind::Liveness => false,
        }
    }
}

pub(crate) fn has_probes(spec: &Container) -> bool {
    !probes(spec).is_empty()
}

struct ProbeTask {
    prober: Arc<Prober>,
    entry: Arc<PodEntry>,
    kind: ProbeKind,
    thresholds: Thresholds,
    probe: Probe,
    target: Target,
    started_at: Option<jiff::Timestamp>,
    started: watch::Receiver<bool>,
}

impl ProbeTask {
    async fn run(mut self) {
        let seconds =
            |n: Option<i32>, default: u64| n.and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0).unwrap_or(default);
        let period = Duration::from_secs(seconds(self.probe.period_seconds, 10));
        let timeout = Duration::from_secs(seconds(self.probe.timeout_seconds, 1));
        let delay = Duration::from_secs(seconds(self.probe.initial_delay_seconds, 0));
        if self.kind != ProbeKind::Startup && self.started.wait_for(|s| *s).await.is_err() {
            return;
        }
        // Containers that were found running share out their first probes over a period.
        if self.prober.began.elapsed() < period && self.found_running() {
            tokio::time::sleep(period.mul_f64(self.prober.random.unit())).await;
        }
        if let Some(at) = self.started_at.and_then(|t| t.saturating_add(delay).ok()) {
            tokio::time::sleep(self.prober.clock.until(at)).await;
        }
        let mut tick = tokio::time::interval(period);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let ending = self.entry.view().state != WorkerState::Syncing;
            if ending && self.kind != ProbeKind::Readiness {
                return;
            }
            let begun = tokio::time::Instant::now();
            let result = self.attempt(timeout).await;
            self.count(result, begun.elapsed());
            let Some(success) = result else {
                continue;
            };
            if self.prober.take(&self, success) {
                return;
            }
        }
    }

    /// True when the container ran before this agent began.
    fn found_running(&self) -> bool {
        let age = self.started_at.map(|t| self.prober.clock.now().duration_since(t));
        let agent = jiff::SignedDuration::try_from(self.prober.began.elapsed()).unwrap_or_default();
        age.is_some_and(|age| age > agent)
    }

    /// One probe. None when it could not be made at all: that is no verdict.
    async fn attempt(&self, timeout: Duration) -> Option<bool> {
        let mut error = String::new();
        for _ in 0..TRIES {
            match attempt::run(&self.probe, &self.target, &*self.prober.runtime, timeout).await {
                Ok(attempt::Answer::Success) => return Some(true),
                Ok(attempt::Answer::Warning(text)) => {
                    warn!(
                        container = self.target.spec.name,
                        "ProbeWarning: {} probe warning: {text}",
                        self.kind.as_str()
                    );
                    self.event("ProbeWarning", &format!("{} probe warning: {text}", self.kind.as_str()));
                    return Some(true);
                }
                Ok(attempt::Answer::Failure(text)) => {
                    warn!(container = self.target.spec.name, "Unhealthy: {} probe failed: {text}", self.kind.as_str());
                    self.event("Unhealthy", &format!("{} probe failed: {text}", self.kind.as_str()));
                    return Some(false);
                }
                Err(e) => error = e,
            }
        }
        warn!(
            container = self.target.spec.name,
            err = error,
            "{} probe errored and resulted in unknown state",
            self.kind.as_str()
        );
        self.event(
            "Unhealthy",
            &format!("{} probe errored and resulted in unknown state: {error}", self.kind.as_str()),
        );
        None
    }

    fn count(&self, result: Option<bool>, took: Duration) {
        let view = self.entry.view();
        let probed = ProbedContainer {
            probe_type: self.kind.as_str(),
            namespace: &view.namespace,
            pod: &view.name,
            uid: self.entry.uid.as_str(),
            container: &self.target.spec.name,
        };
        self.prober.metrics.probed(probed, result, took);
    }

    fn event(&self, reason: &str, message: &str) {
        let pod = self.entry.view().desired.clone();
        if let Some(pod) = pod {
            self.prober.events.warning(&pod, &self.target.spec.name, reason, message);
        }
    }
}
