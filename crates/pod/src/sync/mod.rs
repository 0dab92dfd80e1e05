//! One round of a pod: observe, publish, plan, prepare, execute; again until the plan is empty.
//!
//! Order within a round: network ready → pod cgroup → data directories → volumes → kill → prune → sandbox → ephemeral, init and app containers. An error ends the
//! round and the next one begins with a fresh look; nothing of the plan is kept.

mod collect;
pub mod hooks;
mod image;
pub(crate) mod kept;
mod limits;
pub mod observe;
mod report;
pub(crate) mod resize;
mod sandbox;
mod start;
mod terminate;
pub(crate) mod volumes;

use std::time::Duration;

use decide::plan::{Has, PlanInput, ProbeVerdicts, with_pod_resize};
use jiff::Timestamp;
use model::observed::{ContainerState, ObservedPod};
use model::plan::{Kill, KillReason, Plan, SandboxStep, Waiting};
use model::pod::{ContainerKind, DesiredPod};
use model::timeline::{StepKind, StepResult};
use telemetry::metrics::WorkerOperation;
use tokio::time::Instant;
use tracing::{debug, warn};

use self::image::ImageVolumes;
use self::start::Ground;
use crate::worker::{EndReason, Next, Resync, Worker};

/// Wait before another try while the network is not ready.
const NETWORK_RETRY: Duration = Duration::from_secs(1);
/// Wait before another try after an error.
const ERROR_RETRY: Duration = Duration::from_secs(10);
/// Wait before another try while the runtime still holds a name for a call that a killed agent began.
const RESERVED_RETRY: Duration = Duration::from_secs(1);
/// What containerd says then.
const RESERVED: &str = "is reserved for ";
/// Spread of every wait: the factor is between 1 and this much more.
const SPREAD: f64 = 0.5;
/// After a failed round, wake-ups count only when this much time has passed; new intents always do.
const QUIET: Duration = Duration::from_secs(1);
/// How many resyncs in a row may go by what is known.
const SHORT_RESYNCS: u32 = 9;
/// More rounds than any pod needs; one that goes on is stopped here and starts over with the next wake-up.
const ROUNDS_MAX: usize = 4096;

impl Worker {
    /// Rounds until there is nothing to do, or something must be waited for. `anew`: whatever is known, the first look is at all of the pod.
    pub(crate) async fn sync_round(&mut self, pod: &DesiredPod, anew: bool) -> Next {
        let begin = Instant::now();
        let next = self.rounds(pod, anew).await;
        let operation = if self.started { WorkerOperation::Sync } else { WorkerOperation::Create };
        self.deps.metrics.pod_worker(operation, begin.elapsed());
        self.started = true;
        next
    }

    async fn rounds(&mut self, pod: &DesiredPod, anew: bool) -> Next {
        self.follow_objects(pod);
        let form = self.resized_form(pod);
        if let Err(reason) = self.act_on_verdict(&form).await {
            return self.failed("sync", &reason);
        }
        for round in 0..ROUNDS_MAX {
            let pod = &self.resized_form(pod);
            self.hold_newest(pod);
            let observed = match self.look(anew && round == 0).await {
                Ok(observed) => observed,
                Err(e) => return self.failed("observe", &e.to_string()),
            };
            let address = self.probe_address(pod, &observed);
            self.recall_probes(pod).await;
            let kept = self.kept_probes.as_ref().filter(|_| !self.deps.settings.forget_on_restart);
            self.deps.prober.follow(pod, &observed, address, &self.entry, kept);
            self.follow_resize(pod, &observed).await;
            let phase = self.publish(pod, &observed);
            self.keep_probes(pod).await;
            if let Some(at) = self.deadline(pod, &observed)
                && self.deps.clock.now() >= at
            {
                let text = "Pod was active on the node longer than the specified deadline";
                self.deps.events.pod_normal(pod, "DeadlineExceeded", text);
                self.ending = Some(EndReason::DeadlineExceeded);
                return Next::Ended;
            }
            if matches!(phase.as_str(), "Succeeded" | "Failed") {
                return Next::Ended;
            }
            if let Some(over) = self.over_limit(pod).await {
                return self.evict(pod, over);
            }
            let mut plan = self.plan(pod, &observed);
            if self.note_waits(pod, &plan) {
                // Not only when the wait is over: what is waited for is shown from its beginning.
                self.publish(pod, &observed);
            }
            if plan.is_empty() && self.is_prepared(pod) {
                let collected = self.collect(&observed).await;
                self.refresh_volumes(pod).await;
                if collected.is_some_and(|removed| removed) {
                    self.publish(pod, &self.seen_last());
                }
                return self.rest(pod, &observed, &plan, collected.is_some());
            }
            let prepared = self.is_prepared(pod);
            if let Err(next) = self.prepare(pod, &plan).await {
                return next;
            }
            if !prepared && plan.sandbox != SandboxStep::None && !self.resize_rests() {
                // How the pod's cgroup stands is known now.
                plan.resize = with_pod_resize(plan.resize.take(), pod, &self.has_now(pod));
            }
            if plan.is_empty() {
                return self.rest(pod, &observed, &plan, false);
            }
            if round > 0 {
                debug!(pod = pod.full_name(), round, ?plan, "Another round");
            }
            self.at_rest = false;
            if let Err(reason) = self.execute(pod, observed, &plan).await {
                return self.failed("sync", &reason);
            }
            if self.is_outdated() || self.stop.is_cancelled() {
                return Next::At(Instant::now());
            }
        }
        warn!(pod = pod.full_name(), "The plan does not become empty");
        self.retry(ERROR_RETRY)
    }

    /// A probe's verdict is shown and carried out before anything else, by what the last look showed: the verdict is about one very container, and to
    /// stop it is right whatever happened to the others meanwhile. The fresh look that follows puts right what is shown.
    async fn act_on_verdict(&mut self, pod: &DesiredPod) -> Result<(), String> {
        if !self.entry.take_verdict_changed() || !std::mem::take(&mut self.at_rest) {
            return Ok(());
        }
        let seen = self.seen_last();
        self.publish(pod, &seen);
        let mut plan = self.plan(pod, &seen);
        plan.resize = None;
        let of_probes = |k: &Kill| matches!(k.reason, KillReason::LivenessProbe | KillReason::StartupProbe);
        let verdict_alone = !plan.kill.is_empty()
            && plan.kill.iter().all(of_probes)
            && plan.start.iter().all(|s| plan.kill.iter().any(|k| k.name == s.name))
            && plan.prune.is_empty()
            && matches!(plan.sandbox, SandboxStep::Keep(_));
        if verdict_alone && self.is_prepared(pod) { self.execute(pod, seen, &plan).await } else { Ok(()) }
    }

    /// The pod as it is now. While the stream of events is trusted, and nothing was done to the pod but what the observer was told, only what is news is
    /// asked for; else everything.
    async fn look(&mut self, anew: bool) -> cri::port::CriResult<ObservedPod> {
        // What woke the worker until now, its own calls among it, is part of what is seen next.
        let told = self.entry.settle();
        if let Some(told) = told.filter(|_| !anew && self.deps.health.borrow().evented)
            && self.observer.catch_up(&told).await?
        {
            return Ok(self.seen_last());
        }
        self.observe().await
    }

    /// A fresh look at the pod.
    pub(crate) async fn observe(&mut self) -> cri::port::CriResult<ObservedPod> {
        let (namespace, name) = {
            let view = self.entry.view();
            (view.namespace.clone(), view.name.clone())
        };
        let uid = self.entry.uid.clone();
        self.observer.observe(&uid, &namespace, &name).await
    }

    /// What the last look showed.
    fn seen_last(&self) -> ObservedPod {
        let view = self.entry.view();
        self.observer.last(&self.entry.uid, &view.namespace, &view.name)
    }

    /// The resources that the pod has, as far as is known.
    fn has_now(&self, pod: &DesiredPod) -> Has<'_> {
        let rules = self.deps.settings.resize;
        Has { actuated: &self.has, cgroup_differs: self.cgroup_differs(pod), rules }
    }

    /// A resize failed, and waits for its next try.
    fn resize_rests(&self) -> bool {
        self.resize.retry_at.is_some_and(|at| at > Instant::now())
    }

    fn plan(&self, pod: &DesiredPod, observed: &ObservedPod) -> Plan {
        let probes = |id: &str| -> ProbeVerdicts { self.deps.prober.verdicts(id) };
        let mut plan = decide::plan::plan(&PlanInput {
            pod,
            observed,
            probes: &probes,
            backoffs: &self.backoffs,
            now: self.deps.clock.now(),
            gates: self.deps.settings.restart_gates,
            container_hash: &manifest::container_hash,
            has: Some(self.has_now(pod)),
        });
        if self.resize_rests() {
            plan.resize = None;
        }
        // A start that failed a moment ago waits for its own retry time; the others go on.
        let now = self.deps.clock.now();
        plan.waiting.extend(plan.start.iter().filter_map(|s| {
            let pull = self.pulls.get(&s.name).filter(|p| p.retry_at > now)?;
            Some(Waiting {
                name: s.name.clone(),
                reason: "ImagePullBackOff",
                message: pull.message.clone(),
                until: Some(pull.retry_at),
            })
        }));
        let mut blocked = false;
        plan.start.retain(|s| {
            let waits = blocked || self.pulls.get(&s.name).is_some_and(|p| p.retry_at > now);
            blocked |= waits && s.kind == ContainerKind::Init;
            !waits
        });
        plan.wake_at = plan.waiting.iter().filter_map(|w| w.until).min();
        plan
    }

    /// There is a newer intent than the one of this round.
    fn is_outdated(&self) -> bool {
        self.intent.has_changed().unwrap_or(true)
    }

    /// Of the pod's forms that ask for the same, only the newest is held.
    fn hold_newest(&mut self, pod: &DesiredPod) {
        if let Some((form, _)) = self.prepared.as_mut().filter(|(form, _)| form.same_intent(pod)) {
            form.clone_from(pod);
        }
    }

    pub(crate) fn is_prepared(&self, pod: &DesiredPod) -> bool {
        self.prepared.as_ref().is_some_and(|(form, _)| form.same_intent(pod))
    }

    /// Nothing to do: wait for the earliest moment that changes the plan, at the latest for the resync. `collected`: no dead container waits for it.
    fn rest(&mut self, pod: &DesiredPod, observed: &ObservedPod, plan: &Plan, collected: bool) -> Next {
        self.at_rest = true;
        let settings = &self.deps.settings;
        let resync = self.deps.random.jitter(settings.sync_frequency, SPREAD);
        let mut wait = resync;
        if self.is_limited(pod) {
            wait = wait.min(limits::PERIOD);
        }
        if let Some(left) = self.resize.retry_at.and_then(|at| at.checked_duration_since(Instant::now())) {
            wait = wait.min(left);
        }
        let plan_changes = [plan.wake_at, self.deadline(pod, observed)].into_iter().flatten().min();
        let wait = self.until_change(plan_changes, wait);
        self.resync = Resync { alone: collected && wait == resync, short: 0, plan_changes };
        Next::At(Instant::now() + wait)
    }

    /// How long it is until the plan or the volumes change by themselves, at most this long.
    fn until_change(&self, plan_changes: Option<Timestamp>, most: Duration) -> Duration {
        let moments = [plan_changes, self.volumes.wake_at].into_iter().flatten();
        moments.fold(most, |wait, at| wait.min(self.deps.clock.until(at)))
    }

    /// Whether a resync may go by what is known. While the stream of events is trusted, whatever happens to the pod in the runtime wakes its worker, and
    /// what the stream lost is found by the relist: to ask the runtime once more for each pod would be all that a node at rest does. Dead
    /// containers that must reach an age before they go are found by looking.
    pub(crate) fn may_rest_on(&self) -> bool {
        self.at_rest
            && self.resync.alone
            && self.resync.short < SHORT_RESYNCS
            && self.deps.settings.container_gc.min_age.is_zero()
            && self.deps.health.borrow().evented
    }

    /// Whether a round that time alone began may go by what is known: its wait was one at rest, and all of the pod was looked at not long ago.
    pub(crate) fn looked_lately(&self) -> bool {
        let lately = self.deps.settings.sync_frequency * SHORT_RESYNCS;
        self.at_rest && self.observer.looked().is_some_and(|at| at.elapsed() < lately)
    }

    /// A resync that goes by what is known: volumes show what they are to show now, forms of the pod that are over are let go.
    pub(crate) async fn rest_on(&mut self, pod: &DesiredPod) -> Next {
        self.follow_objects(pod);
        let pod = &self.resized_form(pod);
        if !self.is_prepared(pod) {
            return Box::pin(self.sync_round(pod, true)).await;
        }
        self.hold_newest(pod);
        self.refresh_volumes(pod).await;
        let resync = self.deps.random.jitter(self.deps.settings.sync_frequency, SPREAD);
        let wait = self.until_change(self.resync.plan_changes, resync);
        self.resync.alone = wait == resync;
        self.resync.short += 1;
        Next::At(Instant::now() + wait)
    }

    fn retry(&self, base: Duration) -> Next {
        Next::At(Instant::now() + self.deps.random.jitter(base.min(self.deps.settings.sync_frequency), SPREAD))
    }

    /// The round failed: note it, and come back after a while.
    fn failed(&mut self, what: &str, reason: &str) -> Next {
        self.note_failure(what, reason);
        self.at_rest = false;
        // Events of the runtime that the failed try itself caused must not start the next one at once.
        self.quiet_until = Some(Instant::now() + QUIET);
        self.retry(if reason.contains(RESERVED) { RESERVED_RETRY } else { ERROR_RETRY })
    }

    /// Logs a failure of the pod's work, at most once a minute for each text.
    pub(crate) fn note_failure(&self, what: &str, reason: &str) {
        let key = format!("{what} {} {reason}", self.entry.uid);
        if self.deps.limiter.allow(&key, std::time::Instant::now()).is_some() {
            warn!(pod = self.name(), uid = %self.entry.uid, step = what, err = reason, "Error syncing pod, skipping");
        }
    }

    /// Cgroup, directories and volumes. On failure the next moment to try.
    async fn prepare(&mut self, pod: &DesiredPod, plan: &Plan) -> Result<(), Next> {
        // Only a new sandbox needs the network; what stands in one goes on without.
        let needs_network = !pod.host_network() && matches!(plan.sandbox, SandboxStep::Create { .. });
        let network = self.deps.health.borrow().network_error();
        if needs_network && let Some(why) = network {
            let text = format!("network is not ready: {why}");
            self.entry.mark(StepKind::Network, "", StepResult::Failed(text.clone()), self.deps.clock.now());
            self.deps.events.pod_warning(pod, "NetworkNotReady", &text);
            self.note_failure("network", &text);
            return Err(self.retry(NETWORK_RETRY));
        }
        if self.is_prepared(pod) {
            return Ok(());
        }
        if let Some(next) = self.volumes_rest() {
            return Err(next);
        }
        if let Err(reason) = self.prepare_host(pod).await {
            return Err(self.failed("prepare", &reason));
        }
        self.first_volumes(pod).await
    }

    async fn prepare_host(&mut self, pod: &DesiredPod) -> Result<(), String> {
        let deps = self.deps.clone();
        if deps.settings.cgroups_per_qos {
            let (name, values) = self.cgroup_values(pod);
            let begin = Instant::now();
            let made = self
                .step(StepKind::Cgroup, "", async {
                    deps.host.ensure_cgroup(&name, &values).await.map_err(|e| e.chain())
                })
                .await
                .inspect_err(|e| {
                    let text = format!("unable to ensure pod container exists: {e}");
                    deps.events.pod_warning(pod, "FailedCreatePodContainer", &text);
                })?;
            deps.metrics.cgroup_operation("create", begin.elapsed());
            self.cgroup_stands(pod, &name, values, made).await?;
        }
        self.step(StepKind::Directories, "", async {
            deps.host
                .make_pod_dirs(pod.uid())
                .await
                .map_err(|e| format!("error making pod data directories: {}", e.chain()))
        })
        .await
        .inspect_err(|e| deps.events.pod_warning(pod, "Failed", e))
    }

    /// The pod's cgroup as the runtime is told of it.
    pub(crate) fn cgroup_parent(&self, pod: &DesiredPod) -> String {
        let settings = &self.deps.settings;
        if !settings.cgroups_per_qos {
            return String::new();
        }
        self.deps.host.cgroup_parent(&decide::resources::pod_cgroup_name(&settings.kubepods, pod, true))
    }

    /// Carries out one plan. Of one that only removed and started containers, all with success, the observer is told what there is to ask; after
    /// anything else the next look is at all of the pod.
    async fn execute(&mut self, pod: &DesiredPod, observed: ObservedPod, plan: &Plan) -> Result<(), String> {
        let plain = !plan.kill_pod && plan.kill.is_empty() && plan.resize.is_none();
        self.made.clear();
        let done = self.carry_out(pod, observed, plan).await;
        if plain && done.is_ok() && self.made.len() == plan.start.len() {
            self.observer.changed(&plan.prune, &self.made);
        } else {
            self.observer.doubt();
        }
        done
    }

    /// Carries out one plan, stage by stage.
    async fn carry_out(&mut self, pod: &DesiredPod, mut observed: ObservedPod, plan: &Plan) -> Result<(), String> {
        if plan.kill_pod {
            if matches!(plan.sandbox, SandboxStep::Create { .. }) && !observed.sandboxes.is_empty() {
                let text = "Pod sandbox changed, it will be killed and re-created.";
                self.deps.events.pod_normal(pod, "SandboxChanged", text);
            }
            self.kill_pod(pod, &observed).await?;
            // What was alive is gone: what follows must look again.
            if !matches!(plan.sandbox, SandboxStep::Create { .. }) {
                return Ok(());
            }
        } else if !plan.kill.is_empty() {
            self.note_stopped(pod, &observed, &plan.kill).await;
            self.kill(pod, &observed, &plan.kill).await?;
        }
        // A kill may have taken the whole grace; what starts then must be of the newest form.
        if self.is_outdated() {
            return Ok(());
        }
        let mut not_removed = None;
        for id in &plan.prune {
            if let Some(c) = observed.containers.iter().find(|c| c.id == *id) {
                // When no later run of that name stays, its logs do: the next restartCount is found by them.
                let later = observed.containers.iter().any(|o| {
                    o.name == c.name
                        && o.restart_count > c.restart_count
                        && o.state != ContainerState::Created
                        && !plan.prune.contains(&o.id)
                });
                let log = if later { c.log_path.as_str() } else { "" };
                if let Err(reason) = self.remove_container(&c.id, &c.name, log).await {
                    // The runtime may be starting it for an agent that was killed: another one beside it would be a second.
                    if c.state == ContainerState::Created {
                        return Err(reason);
                    }
                    // What is dead and will not go holds up no start: the next run has a name of its own.
                    not_removed.get_or_insert(reason);
                }
            }
        }
        let pruned = not_removed.map_or(Ok(()), Err);
        let (sandbox_id, attempt, handler) = match &plan.sandbox {
            SandboxStep::None => return pruned,
            SandboxStep::Keep(id) => {
                let kept = observed.sandboxes.iter().find(|s| s.id == *id);
                let handler = kept.map_or_else(String::new, |s| s.runtime_handler.clone());
                (id.clone(), kept.map_or(0, |s| s.attempt), handler)
            }
            SandboxStep::Create { attempt } => {
                if self.is_outdated() {
                    return Ok(());
                }
                let (id, handler) = self.create_sandbox(pod, *attempt).await?;
                if plan.kill_pod {
                    // What was stopped has ended by now, and the starts that follow answer those exits.
                    observed = self.observe().await.map_err(|e| e.to_string())?;
                } else {
                    self.observer.add_sandbox(&mut observed, &id).await.map_err(|e| e.to_string())?;
                }
                (id, *attempt, handler)
            }
        };
        if let Some(resize) = &plan.resize {
            self.resize(pod, &sandbox_id, resize).await;
        }
        if plan.start.is_empty() {
            return pruned;
        }
        let request = self.sandbox_request(pod, attempt, &handler).await?;
        let volumes = self.prepared.as_ref().map(|(_, v)| v.clone()).unwrap_or_default();
        let ground = Ground {
            observed: &observed,
            sandbox_id: &sandbox_id,
            sandbox: &request,
            handler: &handler,
            volumes: &volumes,
        };
        let mut images = ImageVolumes::new();
        let mut first_failure = None;
        for start in &plan.start {
            if self.is_outdated() {
                break;
            }
            let started = self.start_container(pod, &ground, &mut images, start).await;
            let Err(failure) = started else { continue };
            if !failure.report {
                return Ok(());
            }
            let text = format!("container \"{}\": {}: {}", start.name, failure.reason, failure.message);
            first_failure.get_or_insert(text);
            // A sidecar that runs again later holds up none of those that follow: they were due without it.
            if start.kind == ContainerKind::Init {
                break;
            }
        }
        match first_failure {
            None => pruned,
            Some(text) => {
                // The status must show the waiting reason now, not at the next round.
                if let Ok(observed) = self.observe().await {
                    self.publish(pod, &observed);
                }
                Err(text)
            }
        }
    }
}

impl Worker {
    /// When `activeDeadlineSeconds` is over, counted from the status' start time; where none is known, from the first sandbox.
    fn deadline(&self, pod: &DesiredPod, observed: &ObservedPod) -> Option<Timestamp> {
        let seconds = pod.spec().active_deadline_seconds?;
        let shown = self.entry.view().status.start_time.as_ref().map(|t| t.0);
        let stored = || pod.stored_status().and_then(|s| s.start_time.as_ref()).map(|t| t.0);
        let first = || observed.sandboxes.iter().map(|s| s.created_at).min();
        let start = stored().or_else(|| [first(), shown].into_iter().flatten().min())?;
        start.saturating_add(jiff::SignedDuration::from_secs(seconds)).ok()
    }
}
