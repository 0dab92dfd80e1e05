//! What a round leaves behind for readers: the pod's status, why containers last stopped, what the pod waits for.

use std::collections::BTreeMap;

use decide::resources::qos_class;
use decide::status::{self, Failure, Rejection, StatusInput, WaitingReason};
use model::allocation::PodAllocation;
use model::api::{PodCondition, PodStatus};
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::plan::Plan;
use model::pod::DesiredPod;
use model::report::StopReport;
use model::timeline::{StepKind, StepResult};
use telemetry::metrics::{ContainerCounts, Metrics};

use super::start::container_type;
use crate::desired::has_ended;
use crate::ends::{Failing, PREEMPTING};
use crate::registry::{PodView, Running, WorkerState};
use crate::worker::{EndReason, Worker};

impl Worker {
    /// Composes and publishes the status; the phase that the containers alone give.
    pub(crate) fn publish(&self, pod: &DesiredPod, observed: &ObservedPod) -> String {
        let deps = self.deps.clone();
        let settings = &deps.settings;
        let waiting: BTreeMap<String, WaitingReason> = self
            .problems
            .iter()
            .map(|(name, (reason, message))| {
                (name.clone(), WaitingReason { reason: reason.clone(), message: message.clone() })
            })
            .collect();
        let failure = self.failure();
        let probes = |id: &str| deps.prober.results(id);
        let (previous, state) = {
            let view = self.entry.view();
            (view.status.clone(), view.state)
        };
        let previous = previous.phase.is_some().then_some(previous);
        let handler = observed.sandboxes.first().map_or("", |s| s.runtime_handler.as_str());
        let known = decide::resize::known(&self.has);
        let has = PodAllocation {
            pod_level: known.pod_level.clone().or_else(|| pod.spec().resources.clone()),
            ..(*known).clone()
        };
        let has = pod.given(&has, pod.resize().clone());
        let resources = status::pod_resources(pod, &has, settings.node.gates.pod_level_resources);
        let mut conditions = self.resize_conditions(pod);
        conditions.extend(self.disruption(pod));
        let input = StatusInput {
            pod,
            observed,
            previous: previous.as_ref(),
            waiting: &waiting,
            probes: &probes,
            runtime_name: &settings.runtime_name,
            host_ips: &settings.status_host_ips,
            qos_class: qos_class(pod, true).as_str(),
            actuated: Some(&known),
            pod_resources: Some(&resources),
            ended: state != WorkerState::Syncing && !observed.anything_alive(),
            failure: failure.as_ref(),
            extra_conditions: &conditions,
            recursive_read_only: self.handler_features(handler).is_some_and(|f| f.recursive_read_only_mounts),
            agent_started: settings.agent_started,
            forget_on_restart: settings.forget_on_restart,
            terminating: state != WorkerState::Syncing,
            gates: settings.restart_gates,
            now: deps.clock.now(),
        };
        let mut computed = match &self.ending {
            // Nothing of it was ever made: there is nothing but the refusal to show.
            Some(EndReason::Refused { reason, message }) if observed.containers.is_empty() => {
                let refusal = Rejection { reason, message, qos_class: input.qos_class };
                let mut refused = status::rejected(pod, &refusal, input.now);
                refused.start_time = previous.as_ref().and_then(|p| p.start_time.clone()).or(refused.start_time);
                refused
            }
            // It ended under an earlier agent, and nothing is left to tell more than what is stored.
            Some(EndReason::Completed) if has_ended(pod) && observed.containers.is_empty() => {
                pod.stored_status().cloned().unwrap_or_default()
            }
            _ => status::pod_status(&input),
        };
        for container in computed.container_statuses.iter_mut().flatten() {
            let health = deps.managers.health(pod, &container.name);
            if !health.is_empty() {
                container.allocated_resources_status = Some(health);
            }
        }
        let phase = computed.phase.clone().unwrap_or_default();
        // A pod of the node's own shows what is; only where a scheduler may look, the resources must not seem free too early.
        let shown = match pod.is_static() {
            true => computed,
            false => status::publishable(previous.as_ref(), computed, observed.anything_alive()),
        };
        let begun = previous.as_ref().and_then(|p| p.phase.as_deref()) == Some("Pending");
        if begun && phase == "Running" && state == WorkerState::Syncing {
            let took = deps.clock.now().duration_since(self.entry.view().seen);
            deps.metrics.pod_start_duration.observe(took.as_secs_f64());
            self.count_start(pod, &shown);
        }
        self.account(Some(observed));
        let stops = self.stops(pod, observed);
        let mut view = self.entry.view();
        let was_ready = is_ready(&view.status);
        let ready = is_ready(&shown);
        let news = view.status != shown;
        view.status = shown;
        note_stops(&mut view, pod, stops, &deps.metrics);
        drop(view);
        if news {
            deps.status.changed(pod);
        }
        if ready && !was_ready {
            self.entry.mark(StepKind::Ready, "", StepResult::Done, deps.clock.now());
        }
        phase
    }

    /// The status of a pod of which nothing can run any more: containers whose end nobody saw have one, and a pod of the API a terminal phase.
    pub(crate) fn publish_end(&self) {
        let Some(pod) = self.intent.borrow().pod().cloned() else { return };
        let mut view = self.entry.view();
        let refused = matches!(self.ending, Some(EndReason::Refused { .. }));
        if view.status.phase.is_some() && !refused && !has_ended(&pod) {
            view.status = status::finished(&pod, std::mem::take(&mut view.status));
        }
        drop(view);
        self.deps.status.changed(&pod);
    }

    /// Adds the pod to the totals of what runs; None: it is gone.
    pub(crate) fn account(&self, observed: Option<&ObservedPod>) {
        let running = observed.map(|pod| {
            let mut containers = ContainerCounts::default();
            for c in &pod.containers {
                *match c.state {
                    ContainerState::Created => &mut containers.created,
                    ContainerState::Running => &mut containers.running,
                    ContainerState::Exited => &mut containers.exited,
                    ContainerState::Unknown => &mut containers.unknown,
                } += 1;
            }
            Running { sandbox: pod.sandboxes.iter().any(|s| s.ready), containers }
        });
        if let Some((pods, containers)) = self.deps.registry.account(&self.entry.uid, running) {
            self.deps.metrics.running(pods, containers);
        }
    }

    /// What ends the pod as Failed.
    fn failure(&self) -> Option<Failure> {
        let (reason, message) = match self.ending.as_ref()? {
            EndReason::Refused { reason, message } => (reason.clone(), format!("Pod was rejected: {message}")),
            EndReason::DeadlineExceeded => {
                let message = "Pod was active on the node longer than the specified deadline";
                ("DeadlineExceeded".to_owned(), message.to_owned())
            }
            EndReason::Failed(failing) => (failing.reason.clone(), failing.message.clone()),
            EndReason::Removed | EndReason::Deleted | EndReason::Orphan | EndReason::Completed => return None,
        };
        let unless_well = reason == PREEMPTING;
        Some(Failure { reason, message, unless_well })
    }

    /// The condition of a pod that makes room for others or for the node (KEP-3329).
    fn disruption(&self, pod: &DesiredPod) -> Option<PodCondition> {
        let Some(EndReason::Failed(Failing { disruption: Some(disruption), .. })) = &self.ending else {
            return None;
        };
        Some(PodCondition {
            type_: "DisruptionTarget".to_owned(),
            status: "True".to_owned(),
            reason: Some(disruption.reason.clone()),
            message: Some(disruption.message.clone()),
            observed_generation: pod.meta().generation,
            ..PodCondition::default()
        })
    }

    /// The newest exit of each container.
    fn stops<'a>(&self, pod: &DesiredPod, observed: &'a ObservedPod) -> Vec<&'a ObservedContainer> {
        pod.containers()
            .filter_map(|entry| {
                observed.containers.iter().find(|c| c.name == entry.spec.name && c.state == ContainerState::Exited)
            })
            .collect()
    }

    /// How long a pod of the API took from its creation to running: all of it, and without what the node cannot help, the pulls of its images and
    /// the runs of its init containers (SIG Scalability's indicator of pod startup).
    fn count_start(&self, pod: &DesiredPod, shown: &PodStatus) {
        let Some(created) = pod.meta().creation_timestamp.as_ref().filter(|_| !pod.is_static()) else { return };
        let metrics = &self.deps.metrics;
        let total = self.deps.clock.now().duration_since(created.0);
        metrics.pod_start_total_duration.observe(total.as_secs_f64());
        let view = self.entry.view();
        let pulls = || view.timeline().iter().filter(|s| s.kind == StepKind::Pull);
        let begun = pulls().map(|s| s.started).min();
        let ended = pulls().filter_map(|s| s.ended).max();
        let pulled = begun.zip(ended).map(|(begun, ended)| ended.duration_since(begun)).unwrap_or_default();
        let run = shown.init_container_statuses.iter().flatten().filter_map(|c| {
            let ended = c.state.as_ref()?.terminated.as_ref()?;
            Some(ended.finished_at.as_ref()?.0.duration_since(ended.started_at.as_ref()?.0))
        });
        let without = run.fold(total - pulled, |left, took| left - took).as_secs_f64().max(0.0);
        metrics.pod_start_sli_duration.observe(without);
        let first = &metrics.beside.first_network_pod_start;
        if first.get() == 0.0 && !pod.host_network() {
            first.set(without);
        }
    }

    /// Notes what the plan waits for; true when something waits that did not.
    pub(crate) fn note_waits(&mut self, pod: &DesiredPod, plan: &Plan) -> bool {
        let mut news = false;
        let mut waits: Vec<String> = Vec::new();
        for w in &plan.waiting {
            let until = w.until.map_or_else(String::new, |t| format!(" until {t:.0}"));
            waits.push(format!("container \"{}\": {}{until}", w.name, w.reason));
            if w.reason == "CrashLoopBackOff" {
                let text =
                    format!("Back-off restarting failed container {} in pod {}", w.name, decide::config::pod_text(pod));
                self.deps.events.warning(pod, &w.name, "BackOff", &text);
            }
            if w.reason == "ImagePullBackOff"
                && let Some(pull) = self.pulls.get(&w.name)
            {
                let text = decide::config::image_name::back_off_message(&pull.image, "");
                let about = if pull.volume { "" } else { &w.name };
                self.deps.events.normal(pod, about, "BackOff", &text);
                self.deps.events.warning(pod, &w.name, "Failed", "Error: ImagePullBackOff");
            }
            let problem = (w.reason.to_owned(), w.message.clone());
            news |= self.problems.insert(w.name.clone(), problem.clone()) != Some(problem);
        }
        // A back-off that is over is no problem any more; the start that follows says what is.
        let waiting: Vec<&str> = plan.waiting.iter().map(|w| w.name.as_str()).collect();
        self.problems.retain(|name, (reason, _)| reason != "CrashLoopBackOff" || waiting.contains(&name.as_str()));
        self.entry.view().waits_for = waits;
        news
    }
}

fn note_stops(view: &mut PodView, pod: &DesiredPod, stops: Vec<&ObservedContainer>, metrics: &Metrics) {
    for c in stops {
        if view.last_stops.get(&c.name).is_some_and(|s| s.at == c.finished_at && s.exit_code == c.exit_code) {
            continue;
        }
        if let Some(entry) = pod.container(&c.name) {
            metrics.container_terminated(container_type(entry.kind), c.exit_code, &c.reason);
        }
        let killed = view.last_kill.remove(&c.id);
        let why = match (killed, c.reason.as_str()) {
            (_, "OOMKilled") => "out of memory",
            (Some(why), _) => why,
            (None, _) if view.state != WorkerState::Syncing => "pod ends",
            (None, _) => "exit",
        };
        view.last_stops.insert(
            c.name.clone(),
            StopReport {
                why: why.to_owned(),
                exit_code: c.exit_code,
                reason: c.reason.clone(),
                at: c.finished_at,
                message: c.message.clone(),
            },
        );
    }
}

/// The Ready condition of a status.
fn is_ready(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}
