//! Giving a running pod other resources: its cgroup and its containers, memory first, then CPU.
//!
//! ```text
//!   may memory be taken away? ─▶ of memory, then of CPU:  pod's cgroup up ─▶ containers (less before more) ─▶ pod's cgroup down
//! ```
//!
//! Every step can be done twice, and what is done is written down ([`decide::resize`]'s record, the cgroup itself), so a resize that is cut off or
//! fails goes on from there. A failure has a time of its own for the next try and keeps nothing else of the pod waiting.

use cri::port::{CriError, Outcome};
use cri_api::v1;
use decide::config::{self, container_resources, created_resources};
use decide::resize::{
    CgroupSteps, Kind, Progress, cgroup_differs, in_progress, is_stopped, is_unknown, less, memory_faults, merge,
    message, record, sizes, stopped, taken_over,
};
use decide::resources;
use model::allocation::{Grant, ResizeState};
use model::api::PodCondition;
use model::cgroup::{CgroupName, CgroupResources};
use model::observed::{ContainerState, ObservedPod};
use model::plan::{Kill, KillReason, Resize, Sizes, Update};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};
use model::timeline::StepKind;
use tokio::time::Instant;
use tracing::{debug, info};

use super::{ERROR_RETRY, SPREAD};
use crate::worker::Worker;

/// What some runtimes say of a call that they do not have, with another code than the one for that.
const NOT_IMPLEMENTED: &str = "not implemented";

/// Where a pod's resize stands, as its worker knows it.
#[derive(Debug, Default)]
pub(crate) struct ResizeWork {
    /// Granted and not done.
    pub(crate) progress: Option<Progress>,
    /// The newest grant that was seen.
    granted: Option<Grant>,
    /// The ledger was told that the pod has what it was given.
    settled: bool,
    /// After a failure: when the next try is due.
    pub(crate) retry_at: Option<Instant>,
    /// CPU and memory settings of the pod's cgroup; None: not known yet.
    pub(crate) cgroup: Option<CgroupResources>,
}

impl ResizeWork {
    /// As the last status shows it.
    pub(crate) fn stored(pod: Option<&DesiredPod>) -> Self {
        Self { progress: pod.and_then(DesiredPod::stored_status).and_then(Progress::stored), ..Self::default() }
    }
}

impl Worker {
    /// The pod's cgroup, and what it is to have.
    pub(super) fn cgroup_values(&self, pod: &DesiredPod) -> (CgroupName, CgroupResources) {
        let settings = &self.deps.settings;
        let options = resources::PodCgroupOptions {
            cpu_quota: settings.node.cpu_cfs_quota && !self.deps.managers.exclusive_cpus(pod.uid()),
            cpu_period: settings.node.cpu_cfs_period,
            pids_limit: settings.pod_pids_limit,
            hugepage_sizes: settings.node.hugepage_sizes.clone(),
            memory_qos: settings.node.memory_qos,
            pod_level: true,
        };
        let name = resources::pod_cgroup_name(&settings.kubepods, pod, true);
        (name, resources::pod_cgroup_resources(pod, &options))
    }

    /// The pod's cgroup stands. When it was made a moment ago it has what it is to have, else that is looked up once.
    pub(super) async fn cgroup_stands(
        &mut self,
        pod: &DesiredPod,
        name: &CgroupName,
        values: CgroupResources,
        made: bool,
    ) -> Result<(), String> {
        if made {
            self.resize.cgroup = Some(values);
            let level = pod.spec().resources.clone().filter(|r| r.requests.is_some() || r.limits.is_some());
            if level.is_some() && self.has.pod_level != level {
                self.has.pod_level = level;
                self.deps.admit.actuated(pod.uid(), self.has.clone()).await;
            }
        } else if self.resize.cgroup.is_none() {
            let found = self.deps.host.cgroup_settings(name).await.map_err(|e| e.chain())?;
            self.resize.cgroup = Some(found);
        }
        Ok(())
    }

    /// The pod's cgroup is known to have other settings than it should.
    pub(super) fn cgroup_differs(&self, pod: &DesiredPod) -> bool {
        let v2 = self.deps.settings.node.cgroup == config::CgroupVersion::V2;
        let due = || self.cgroup_values(pod).1;
        self.deps.settings.cgroups_per_qos
            && self.resize.cgroup.as_ref().is_some_and(|has| cgroup_differs(has, &due(), v2))
    }

    /// Brings what is shown of the resize up to what was seen. Running containers without a record get one.
    pub(super) async fn follow_resize(&mut self, pod: &DesiredPod, observed: &ObservedPod) {
        self.take_over(pod, observed).await;
        let now = self.deps.clock.now();
        let grant = pod.resize().grant;
        if let Some(Grant { generation, .. }) = grant.filter(|_| grant != self.resize.granted) {
            self.resize.granted = grant;
            self.resize.settled = false;
            self.resize.retry_at = None;
            self.show_progress(Some(Progress::new(generation, now)));
        }
        let rules = &self.deps.settings.resize;
        let waits = in_progress(pod, observed, &self.has, rules)
            || (self.resize.progress.is_some() && self.cgroup_differs(pod));
        if waits {
            if self.resize.progress.is_none() {
                self.show_progress(Some(Progress::new(pod.meta().generation.unwrap_or(0), now)));
            }
            return;
        }
        if let Some(done) = self.show_progress(None) {
            info!(pod = pod.full_name(), uid = %pod.uid(), generation = done.generation, "Resize is done");
            let text = message("completed", pod, done.generation, "");
            self.deps.events.pod_normal(pod, "ResizeCompleted", &text);
        }
        if !self.resize.settled {
            self.resize.settled = true;
            self.deps.admit.settled(pod.clone()).await;
        }
    }

    /// Sets where the resize stands, and counts it; what was there before.
    pub(crate) fn show_progress(&mut self, progress: Option<Progress>) -> Option<Progress> {
        let gauge = &self.deps.metrics.resizes.in_progress;
        let before = std::mem::replace(&mut self.resize.progress, progress);
        match (&before, &self.resize.progress) {
            (None, Some(_)) => gauge.inc(),
            (Some(_), None) => gauge.dec(),
            _ => {}
        }
        before
    }

    /// The pod's conditions of its resize.
    pub(super) fn resize_conditions(&self, pod: &DesiredPod) -> Vec<PodCondition> {
        decide::resize::conditions(pod.resize().pending.as_ref(), self.resize.progress.as_ref())
    }

    /// Records what runs without a record: the agent that created it was cut off before the record was on the disk.
    async fn take_over(&mut self, pod: &DesiredPod, observed: &ObservedPod) {
        let mut news = false;
        for entry in pod.containers().filter(|c| c.kind != ContainerKind::Ephemeral) {
            let name = &entry.spec.name;
            let running = observed.newest(name).filter(|c| c.state == ContainerState::Running);
            if let Some(seen) = running.filter(|seen| is_unknown(seen, self.has.containers.get(name))) {
                let found = taken_over(pod, entry, seen, &self.deps.settings.node);
                self.has.containers.insert(name.clone(), found);
                news = true;
            }
        }
        if news {
            self.deps.admit.actuated(pod.uid(), self.has.clone()).await;
        }
    }

    /// The form of the pod in which this round sees it: containers that this agent, or one before it, stopped for their new resources start again however
    /// they ended.
    pub(super) fn resized_form(&self, pod: &DesiredPod) -> DesiredPod {
        let restarting = pod
            .containers()
            .filter(|c| is_stopped(c.spec, self.has.containers.get(&c.spec.name)))
            .map(|c| c.spec.name.clone())
            .collect();
        pod.resizing(ResizeState { restarting, ..pod.resize().clone() })
    }

    /// These containers are about to be stopped for their new resources: on the disk first, so that an agent that is cut off before the stop is followed by
    /// one that stops them, and one that is cut off between the stop and the start by one that starts them.
    pub(super) async fn note_stopped(&mut self, pod: &DesiredPod, observed: &ObservedPod, kills: &[Kill]) {
        let mut news = false;
        for kill in kills.iter().filter(|k| k.reason == KillReason::Resize) {
            let count = observed.containers.iter().find(|c| c.id == kill.id).map_or(0, |c| c.restart_count);
            news |= self.has.containers.insert(kill.name.clone(), stopped(count)) != Some(stopped(count));
        }
        if news {
            self.deps.admit.actuated_for_good(pod.uid(), self.has.clone()).await;
        }
    }

    /// Notes what a container is made with. Of one that may be restarted for its resources it is on the disk before anything else is done: a new agent
    /// must not take one that has ended for one that was stopped. Ephemeral containers have no resources of their own.
    pub(super) async fn note_given(&mut self, pod: &DesiredPod, entry: &ContainerEntry<'_>) {
        if entry.kind == ContainerKind::Ephemeral {
            return;
        }
        let created = created_resources(pod, *entry, &self.deps.settings.node);
        let before = self.has.containers.insert(entry.spec.name.clone(), created.clone());
        match before {
            Some(before) if before == created => {}
            _ if decide::resize::may_restart(entry.spec) => {
                self.deps.admit.actuated_for_good(pod.uid(), self.has.clone()).await;
            }
            _ => self.deps.admit.actuated(pod.uid(), self.has.clone()).await,
        }
    }

    /// Carries out a resize. A failure is shown, told when it is news, and tried again after a while.
    pub(super) async fn resize(&mut self, pod: &DesiredPod, sandbox_id: &str, plan: &Resize) {
        let begin = Instant::now();
        let done = self.change_resources(pod, sandbox_id, plan).await;
        self.deps.metrics.resizes.actuated(begin.elapsed(), done.is_ok());
        // What the runtime shows of these containers is another thing now.
        for update in plan.memory.iter().chain(&plan.cpu) {
            self.observer.forget(&update.id);
        }
        let Err(reason) = done else {
            self.resize.retry_at = None;
            return;
        };
        self.note_failure("resize", &reason);
        self.resize.retry_at = Some(Instant::now() + self.deps.random.jitter(ERROR_RETRY, SPREAD));
        let now = self.deps.clock.now();
        if self.resize.progress.is_none() {
            self.show_progress(Some(Progress::new(pod.meta().generation.unwrap_or(0), now)));
        }
        if let Some(progress) = &mut self.resize.progress
            && progress.fail(&reason, now)
        {
            let text = message("error", pod, progress.generation, &reason);
            self.deps.events.pod_warning(pod, "ResizeError", &text);
        }
    }

    async fn change_resources(&mut self, pod: &DesiredPod, sandbox_id: &str, plan: &Resize) -> Result<(), String> {
        let (name, due) = self.cgroup_values(pod);
        let mut current = CgroupResources::default();
        let per_pod = self.deps.settings.cgroups_per_qos;
        if per_pod {
            let found = self.deps.host.cgroup_settings(&name).await.map_err(|e| e.chain())?;
            // Before anything is changed, what would leave a part of it undone is looked for.
            self.check_memory(&name, &found, &due, plan).await?;
            current = found;
        }
        for (kind, updates) in [(Kind::Memory, &plan.memory), (Kind::Cpu, &plan.cpu)] {
            let steps = if per_pod { CgroupSteps::new(kind, &current, &due) } else { CgroupSteps::default() };
            for step in steps.before {
                self.change_cgroup(pod, sandbox_id, (kind, &name), &mut current, step).await?;
            }
            for update in updates {
                self.update_container(pod, kind, update).await?;
            }
            for step in steps.after {
                self.change_cgroup(pod, sandbox_id, (kind, &name), &mut current, step).await?;
            }
            self.note_pod_level(pod, kind).await;
        }
        // Whatever rounding the kernel shows, it was written as it is to be.
        if per_pod {
            self.resize.cgroup = Some(due);
        }
        Ok(())
    }

    /// Memory is not taken away while it is in use: the kernel would end processes for it.
    async fn check_memory(
        &self,
        name: &CgroupName,
        current: &CgroupResources,
        due: &CgroupResources,
        plan: &Resize,
    ) -> Result<(), String> {
        let pod_limit = due.memory_limit.filter(|d| *d > 0 && less(*d, current.memory_limit));
        let lowered = |u: &&Update| u.to.memory_limit > 0 && less(u.to.memory_limit, Some(u.from.memory_limit));
        let lowered: Vec<&Update> = plan.memory.iter().filter(lowered).collect();
        if pod_limit.is_none() && lowered.is_empty() {
            return Ok(());
        }
        let pod = match pod_limit {
            Some(limit) => {
                let used = self.deps.host.cgroup_memory(name).await;
                Some((limit, used.map_err(|e| e.chain())?))
            }
            None => None,
        };
        let mut containers = Vec::new();
        for update in lowered {
            let stats = self.deps.reader.container_stats(&update.id).await.map_err(|e| e.to_string())?;
            let used = stats.memory.and_then(|m| m.usage_bytes).map(|bytes| bytes.value);
            containers.push((update.name.clone(), update.to.memory_limit, used));
        }
        memory_faults(pod, &containers).map_or(Ok(()), Err)
    }

    /// One setting of the pod's cgroup: the runtime hears of it first and may refuse.
    async fn change_cgroup(
        &mut self,
        pod: &DesiredPod,
        sandbox_id: &str,
        (kind, name): (Kind, &CgroupName),
        current: &mut CgroupResources,
        change: CgroupResources,
    ) -> Result<(), String> {
        let merged = merge(current, &change);
        self.tell_runtime(pod, sandbox_id, &merged).await.map_err(|e| {
            let kind = kind.as_str();
            format!("failed to notify runtime for UpdatePodSandboxResources (resource={kind}); resize rejected: {e}")
        })?;
        let deps = self.deps.clone();
        let begin = Instant::now();
        let written = self
            .step(StepKind::Resize, "", async { deps.host.update_cgroup(name, &change).await.map_err(|e| e.chain()) })
            .await;
        deps.metrics.cgroup_operation("update", begin.elapsed());
        if let Err(e) = written {
            if let Err(again) = self.tell_runtime(pod, sandbox_id, current).await {
                self.note_failure(
                    "resize",
                    &format!("the runtime does not take back UpdatePodSandboxResources: {again}"),
                );
            }
            return Err(e);
        }
        if let Some(known) = &mut self.resize.cgroup {
            *known = merge(known, &change);
        }
        *current = merged;
        Ok(())
    }

    /// Tells the runtime what the pod's cgroup will have. Most runtimes need not know and have no such call.
    async fn tell_runtime(&self, pod: &DesiredPod, sandbox_id: &str, cgroup: &CgroupResources) -> Result<(), String> {
        let (overhead, resources) = config::sandbox_update(pod, cgroup, &self.deps.settings.node);
        let request = v1::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            overhead: Some(overhead),
            resources: Some(resources),
        };
        match self.deps.mutator.update_pod_sandbox_resources(request).await {
            Err(e) if !unimplemented(&e) => Err(e.to_string()),
            Err(e) => {
                debug!(pod = pod.full_name(), err = e.message, "The runtime does not know UpdatePodSandboxResources");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Gives one container its new memory or its new CPU, and leaves the other as it is.
    async fn update_container(&mut self, pod: &DesiredPod, kind: Kind, update: &Update) -> Result<(), String> {
        let Some(entry) = pod.container(&update.name) else { return Ok(()) };
        let given = entry.spec.resources.clone().unwrap_or_default();
        let has = self.has.containers.get(&update.name).map(|r| sizes(None, r)).unwrap_or(update.from);
        let to = match kind {
            Kind::Memory => {
                Sizes { memory_request: update.to.memory_request, memory_limit: update.to.memory_limit, ..has }
            }
            Kind::Cpu => Sizes { cpu_request: update.to.cpu_request, cpu_limit: update.to.cpu_limit, ..has },
        };
        let mut spec = entry.spec.clone();
        spec.resources = Some(record(&given, &to));
        let own_cpus = self.deps.managers.own_cpus(pod.uid(), &update.name);
        let request =
            container_resources(pod, ContainerEntry { spec: &spec, ..entry }, &self.deps.settings.node, own_cpus);
        let deps = self.deps.clone();
        self.step(StepKind::Resize, &update.name, deps.mutator.update_container_resources(&update.id, request)).await?;
        // In the words of what was given, once all of it is there.
        let created = created_resources(pod, entry, &deps.settings.node);
        let now = if sizes(None, &created) == to { created } else { record(&given, &to) };
        self.has.containers.insert(update.name.clone(), now);
        deps.admit.actuated(pod.uid(), self.has.clone()).await;
        Ok(())
    }

    /// Records that the pod's own memory or CPU is what it was given.
    async fn note_pod_level(&mut self, pod: &DesiredPod, kind: Kind) {
        let Some(given) = &pod.spec().resources else { return };
        let mut has = self.has.pod_level.clone().unwrap_or_default();
        for (has, given) in [(&mut has.requests, &given.requests), (&mut has.limits, &given.limits)] {
            if let Some(amount) = given.as_ref().and_then(|g| g.get(kind.as_str())) {
                has.get_or_insert_default().insert(kind.as_str().to_owned(), amount.clone());
            }
        }
        if self.has.pod_level.as_ref() != Some(&has) {
            self.has.pod_level = Some(has);
            self.deps.admit.actuated(pod.uid(), self.has.clone()).await;
        }
    }
}

fn unimplemented(e: &CriError) -> bool {
    /// gRPC Unknown.
    const UNKNOWN: i32 = 2;
    e.outcome == Outcome::Unimplemented || (e.code == UNKNOWN && e.message.contains(NOT_IMPLEMENTED))
}
