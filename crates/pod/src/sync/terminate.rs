//! Ending a pod: hooks, stops in order, sandboxes last; and removing what is left of it in the runtime.
//!
//! A round may be cut off by a newer intent (a shorter grace) at any wait: dropping a StopContainer call does not take back the signal that it
//! sent, and the next round asks again with what is left of the grace. Nothing here is decided: [`decide::terminate`] gives plan and budget.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use decide::terminate::{Budget, StopContainer, TerminationPlan, pod_grace};
use futures::future::join_all;
use model::api::LifecycleHandler;
use model::observed::ObservedPod;
use model::plan::{Kill, KillReason};
use model::pod::DesiredPod;
use model::timeline::StepKind;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::hooks::{self, HookContext};
use super::observe::Observer;
use crate::worker::{EndReason, Ending, Intent, StepError, Worker};

/// A burst of exits is looked at once.
const SHOWN_AGAIN: Duration = Duration::from_millis(100);

impl Worker {
    /// One try to end everything. True when nothing can run any more; None when the agent stops.
    pub(crate) async fn terminate_round(&mut self) -> Option<bool> {
        let intent = self.newest();
        let pod = intent.pod().cloned();
        let observed = match self.observe().await {
            Ok(observed) => observed,
            Err(e) => {
                self.note_failure("observe", &e.to_string());
                return Some(false);
            }
        };
        if !observed.anything_alive() && !self.claims_are_back().await {
            return Some(false);
        }
        self.show_end(pod.as_ref(), &observed).await;
        if !observed.anything_alive() {
            return Some(true);
        }
        let grace = self.decide_grace(pod.as_ref(), &intent);
        self.ending_since.get_or_insert_with(Instant::now);
        let plan = decide::terminate::plan(pod.as_ref(), &observed, grace);
        let stop = self.stop.clone();
        let mut newer = self.intent.clone();
        let finished = tokio::select! {
            biased;
            () = stop.cancelled() => return None,
            // A later, shorter grace: plan again with it. Other news changes nothing about an end.
            () = shorter_grace(&mut newer, grace) => false,
            () = self.keep_showing(pod.as_ref()) => false,
            result = self.stop_all(pod.as_ref(), &observed, &plan) => match result {
                Ok(()) => true,
                Err(reason) => {
                    if let Some(pod) = &pod {
                        self.deps.events.pod_warning(pod, "FailedKillPod", &format!("error killing pod: {reason}"));
                    }
                    self.note_failure("stop", &reason);
                    false
                }
            },
        };
        if !finished {
            return Some(false);
        }
        // Stopped is what the runtime shows, not what the calls answered.
        match self.observe().await {
            Ok(observed) => {
                let back = observed.anything_alive() || self.claims_are_back().await;
                if back {
                    self.show_end(pod.as_ref(), &observed).await;
                }
                Some(back && !observed.anything_alive())
            }
            Err(e) => {
                self.note_failure("observe", &e.to_string());
                Some(false)
            }
        }
    }

    /// Has the drivers of its resource claims take them back: before anybody can read that it has ended, and so give the devices to another one.
    async fn claims_are_back(&self) -> bool {
        if !self.deps.managers.has_claims(&self.entry.uid) {
            return true;
        }
        let done = self.deps.managers.unprepare(&self.entry.uid).await;
        if let Err(why) = &done {
            self.note_failure("claims", why);
        }
        done.is_ok()
    }

    /// Publishes how far the end has come. The room of a pod of which nothing runs is free before anybody can read that it has ended: who then sends
    /// the next one counts on it (A06).
    async fn show_end(&self, pod: Option<&DesiredPod>, observed: &ObservedPod) {
        if !observed.anything_alive() {
            self.deps.admit.ended(&self.entry.uid).await;
        }
        if let Some(pod) = pod {
            self.publish(pod, observed);
        }
    }

    /// Shows what changes while the end takes its time: a readiness probe that fails, a container that has ended (A12). Never returns.
    async fn keep_showing(&self, pod: Option<&DesiredPod>) {
        let Some(pod) = pod else { return std::future::pending().await };
        let mut observer = Observer::new(self.deps.reader.clone(), self.deps.host.clone());
        loop {
            self.entry.woken().await;
            // What cannot be seen now is seen when the stop is done.
            if let Ok(observed) = observer.observe(&self.entry.uid, pod.namespace(), pod.name()).await
                && (observed.anything_alive() || !self.deps.managers.has_claims(&self.entry.uid))
            {
                self.show_end(Some(pod), &observed).await;
            }
            tokio::time::sleep(SHOWN_AGAIN).await;
        }
    }

    /// The pod's grace in seconds: decided when the end begins, afterwards only ever shortened.
    fn decide_grace(&mut self, pod: Option<&DesiredPod>, intent: &Intent) -> i64 {
        let asked = match intent {
            Intent::End(ending) => ending.grace,
            Intent::Run(_) => None,
        };
        let orphan = pod.is_none().then_some(decide::terminate::ORPHAN_GRACE);
        let deletion = pod.and_then(|p| p.meta().deletion_grace_period_seconds);
        let spec = pod.and_then(|p| p.spec().termination_grace_period_seconds);
        let grace = pod_grace(self.grace, deletion, asked.or(orphan), spec);
        self.grace = Some(grace);
        grace
    }

    /// Stops every container in its turn, then every sandbox.
    async fn stop_all(
        &self,
        pod: Option<&DesiredPod>,
        observed: &ObservedPod,
        plan: &TerminationPlan,
    ) -> Result<(), String> {
        let reason = match (&self.ending, pod) {
            (Some(EndReason::Orphan), _) | (_, None) => "nothing wants it",
            _ => "pod ends",
        };
        if !plan.containers.is_empty() {
            info!(pod = self.name(), containers = plan.containers.len(), reason, "Killing containers of the pod");
        }
        for stop in &plan.containers {
            if let Some(pod) = pod {
                self.deps.events.normal(pod, &stop.name, "Killing", &format!("Stopping container {}", stop.name));
            }
        }
        self.stop_containers(pod, observed, &plan.containers).await?;
        let sandboxes = plan.sandboxes.iter().map(|id| {
            self.step(StepKind::StopSandbox, id, async move {
                self.deps.mutator.stop_pod_sandbox(id).await.map_err(|e| StepError::call(&e))
            })
        });
        join_all(sandboxes).await.into_iter().collect()
    }

    /// Stops containers side by side, each after those that it waits for.
    async fn stop_containers(
        &self,
        pod: Option<&DesiredPod>,
        observed: &ObservedPod,
        stops: &[StopContainer],
    ) -> Result<(), String> {
        let ended: BTreeMap<&str, watch::Sender<bool>> =
            stops.iter().map(|s| (s.id.as_str(), watch::Sender::new(false))).collect();
        let ended = &ended;
        let all = stops.iter().map(|stop| async move {
            let turns: Vec<_> =
                stop.after.iter().filter_map(|id| ended.get(id.as_str())).map(watch::Sender::subscribe).collect();
            let result = self.stop_container(pod, observed, stop, turns).await;
            if let Some(sender) = ended.get(stop.id.as_str()) {
                sender.send_replace(true);
            }
            result
        });
        join_all(all).await.into_iter().collect()
    }

    /// Hook, turn, stop: all within the container's grace.
    async fn stop_container(
        &self,
        pod: Option<&DesiredPod>,
        observed: &ObservedPod,
        stop: &StopContainer,
        turns: Vec<watch::Receiver<bool>>,
    ) -> Result<(), String> {
        self.step(StepKind::Stop, &stop.name, async {
            let mut budget = Budget::new(stop.grace);
            if let Some(since) = self.ending_since {
                budget.shorten(stop.grace, since.elapsed());
            }
            let hook = stop.pre_stop.as_ref().filter(|_| budget.left().is_some() && self.first_hook(&stop.id));
            let hook = async {
                if let Some(hook) = hook {
                    self.pre_stop(pod, observed, stop, hook).await;
                }
            };
            tokio::pin!(hook);
            let mut over = false;
            if let Some(left) = budget.left() {
                let begin = Instant::now();
                over = tokio::time::timeout(left, &mut hook).await.is_ok();
                if !over {
                    info!(pod = self.name(), container = stop.name, "PreStop hook not completed in grace period");
                }
                budget.spend(begin.elapsed());
            }
            if let Some(left) = budget.left() {
                let begin = Instant::now();
                let wait = join_all(turns.into_iter().map(|mut turn| async move {
                    // A turn whose sender is gone has ended as well.
                    let _ = turn.wait_for(|ended| *ended).await;
                }));
                let _ = tokio::time::timeout(left, wait).await;
                budget.spend(begin.elapsed());
            }
            let stopped = self.deps.mutator.stop_container(&stop.id, budget.stop());
            tokio::pin!(stopped);
            // A hook that took all of the grace goes on until its container ends.
            let stopped = tokio::select! {
                biased;
                stopped = &mut stopped => stopped,
                () = &mut hook, if !over => stopped.await,
            };
            stopped.map_err(|e| StepError::call(&e))
        })
        .await
    }

    /// True once for each container: a hook that was begun is not begun again when the end is planned anew.
    fn first_hook(&self, id: &str) -> bool {
        self.hooked.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(id.to_owned())
    }

    /// Runs the preStop hook. A failed hook is reported and changes nothing else.
    async fn pre_stop(&self, pod: Option<&DesiredPod>, observed: &ObservedPod, stop: &StopContainer, hook: &str) {
        let spec = pod.and_then(|p| p.container(&stop.name)).map(|e| e.spec);
        let ip = observed.sandboxes.first().and_then(|s| s.ips.first().cloned());
        let outcome = match serde_json::from_str::<LifecycleHandler>(hook) {
            Ok(handler) => {
                let named = pod.map_or_else(|| self.name(), decide::config::pod_text);
                let context = HookContext {
                    runtime: &*self.deps.mutator,
                    metrics: &self.deps.metrics,
                    container_id: &stop.id,
                    place: hooks::place(&stop.name, &named),
                    spec,
                    pod_ip: ip.as_deref(),
                    fell_back: &|message| {
                        if let Some(pod) = pod {
                            self.http_fallback(pod, message);
                        }
                    },
                };
                hooks::run(&handler, &context).await
            }
            Err(e) => Err(format!("the hook noted in the container is not readable: {e}")),
        };
        if let Err(reason) = outcome {
            warn!(pod = self.name(), container = stop.name, err = reason, "FailedPreStopHook: PreStopHook failed");
            if let Some(pod) = pod {
                self.deps.events.warning(pod, &stop.name, "FailedPreStopHook", "PreStopHook failed");
            }
        }
    }

    /// A hook asked for HTTPS and its server speaks plain HTTP.
    pub(crate) fn http_fallback(&self, pod: &DesiredPod, message: &str) {
        self.deps.metrics.lifecycle_http_fallbacks.inc();
        self.deps.events.pod_warning(pod, "LifecycleHTTPFallback", message);
    }

    /// Kills containers that the plan wants killed while their pod lives on.
    pub(crate) async fn kill(
        &mut self,
        pod: &DesiredPod,
        observed: &ObservedPod,
        kills: &[Kill],
    ) -> Result<(), String> {
        let deletion = pod.meta().deletion_grace_period_seconds;
        let spec = pod.spec().termination_grace_period_seconds;
        let stops: Vec<StopContainer> = kills
            .iter()
            .map(|k| {
                info!(pod = self.name(), container = k.name, reason = ?k.reason, "Killing: {}", k.message);
                self.deps.events.normal(pod, &k.name, "Killing", &k.message);
                self.entry.view().last_kill.insert(k.id.clone(), why(k.reason));
                let grace = decide::terminate::container_grace(deletion, k.grace, spec);
                let container = observed.containers.iter().find(|c| c.id == k.id);
                StopContainer {
                    id: k.id.clone(),
                    name: k.name.clone(),
                    kind: k.kind,
                    after: Vec::new(),
                    grace,
                    pre_stop: container.filter(|_| grace > 0).and_then(|c| decide::terminate::pre_stop(Some(pod), c)),
                }
            })
            .collect();
        self.stop_containers(Some(pod), observed, &stops).await
    }

    /// Stops everything of a pod that goes on living: its sandbox is to be replaced, or nothing is left to run in it.
    pub(crate) async fn kill_pod(&mut self, pod: &DesiredPod, observed: &ObservedPod) -> Result<(), String> {
        let grace = pod_grace(
            None,
            pod.meta().deletion_grace_period_seconds,
            None,
            pod.spec().termination_grace_period_seconds,
        );
        for c in observed.live_containers() {
            self.entry.view().last_kill.insert(c.id.clone(), why(KillReason::SandboxChanged));
        }
        let plan = decide::terminate::plan(Some(pod), observed, grace);
        self.stop_all(Some(pod), observed, &plan).await
    }

    /// Removes the pod's containers and sandboxes, and the containers' log files and links. Goes on after a failure, and gives the first one; a sandbox
    /// stays for as long as one of its containers does, since the runtime would refuse it for the same reason.
    pub(crate) async fn remove_from_runtime(&mut self) -> Result<(), String> {
        let observed = self.observe().await.map_err(|e| e.to_string())?;
        let mut first = None;
        let mut held = BTreeSet::new();
        for c in &observed.containers {
            if let Err(reason) = self.remove_container(&c.id, &c.name, &c.log_path).await {
                first.get_or_insert(reason);
                held.insert(c.sandbox_id.as_str());
            }
        }
        for s in observed.sandboxes.iter().filter(|s| !held.contains(s.id.as_str())) {
            if let Err(reason) = self.remove_sandbox(&s.id).await {
                first.get_or_insert(reason);
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Removes one sandbox. Stopping it once more frees what an unfinished stop may have left (network, mounts).
    pub(crate) async fn remove_sandbox(&self, id: &str) -> Result<(), String> {
        self.deps.mutator.stop_pod_sandbox(id).await.map_err(|e| e.to_string())?;
        self.deps.mutator.remove_pod_sandbox(id).await.map_err(|e| e.to_string())
    }

    /// Removes one dead container, its log files and the link to them.
    pub(crate) async fn remove_container(&self, id: &str, name: &str, log_path: &str) -> Result<(), String> {
        let (namespace, pod) = {
            let view = self.entry.view();
            (view.namespace.clone(), view.name.clone())
        };
        self.deps.host.remove_container_log(log_path, &pod, &namespace, name, id).await.map_err(|e| e.chain())?;
        self.deps.mutator.remove_container(id).await.map_err(|e| e.to_string())
    }
}

/// Returns when the intent sets a grace below `grace`; never, when its sender is gone.
async fn shorter_grace(intent: &mut watch::Receiver<Intent>, grace: i64) {
    let shorter = |intent: &Intent| {
        let asked = match intent {
            Intent::End(Ending { grace, .. }) => *grace,
            Intent::Run(_) => None,
        };
        let deletion = intent.pod().and_then(|p| p.meta().deletion_grace_period_seconds);
        asked.into_iter().chain(deletion).any(|g| g.max(1) < grace)
    };
    if intent.wait_for(|i| shorter(i)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The word for a kill in reports.
fn why(reason: KillReason) -> &'static str {
    match reason {
        KillReason::DefinitionChanged => "definition changed",
        KillReason::LivenessProbe => "liveness probe",
        KillReason::StartupProbe => "startup probe",
        KillReason::SandboxChanged => "sandbox changed",
        KillReason::UnknownState => "unknown state",
        KillReason::NotInSpec => "not in the spec",
        KillReason::PostStartHook => "postStart hook",
        KillReason::RestartAllContainers => "restart of all containers",
        KillReason::Resize => "resize",
        KillReason::PodEnding => "pod ends",
    }
}
