//! The one set of pods that should run, and who looks after each.
//!
//! ```text
//!   sources ──sets──▶ ┌────────────┐ ──intent──▶ worker of pod A
//!   runtime pods ───▶ │ dispatcher │ ──intent──▶ worker of pod B
//!   workers ──done──▶ └────────────┘ ──batch───▶ admission
//! ```
//!
//! The dispatcher merges the sources' sets, starts one worker per UID, and tells it the newest intent. It never touches the runtime.
//! - A pod that left its source is ended. The same UID that comes back meanwhile starts again when the old worker is done, in its newest form.
//! - A static pod waits while another UID of its full name still runs, in a worker or only in the runtime.
//! - Runtime pods that no source wants are ended once every source has spoken and the runtime was listed.
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. Queues: sets (16), pods that the node ends (64) and finished workers (256), all drained here without waiting for a
//! worker. Admission is the only thing waited for; it answers within one disk write.

mod housekeeping;
mod resize;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use decide::admission::{Admitted, Refusal};
use decide::resources::{self, QosClass, QosDemand, qos_class};
use decide::status::{self, Rejection};
use model::allocation::{PodAllocation, ResizeState};
use model::cgroup::{CgroupName, CgroupResources};
use model::pod::{DesiredPod, PodSource, PodUid};
use model::timeline::{StepKind, StepResult};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::admit::{Admission, AdmitHandle, Candidate, Verdict};
use crate::ends::{self, Disruption, EndPod, Failing, PREEMPTING, PodEnds};
use crate::pleg::{RuntimePod, RuntimePods};
use crate::ports::{Tasks, sleep_until};
use crate::registry::{PodEntry, WorkerState};
use crate::source::{SourceSet, SourceUpdate};
use crate::status::Mirrors;
use crate::worker::{self, EndReason, Ending, Intent, PodDeps};

/// How often leftover directories and cgroups are looked for.
const HOUSEKEEPING: Duration = Duration::from_secs(60);

/// The cgroups above pods are rewritten this long after a pod came or went: a burst costs one write.
const QOS_DELAY: Duration = Duration::from_millis(100);
/// The QoS levels are written this often in any case: pods also end by themselves.
const QOS_PERIOD: Duration = Duration::from_secs(60);

/// Message of the status and the event of a pod that makes room for a critical one.
const PREEMPTED: &str = "Preempted in order to admit critical pod";

/// A worker and how to reach it.
struct Held {
    intent: watch::Sender<Intent>,
    full_name: String,
    /// The worker was told to end for good; a pod of the same UID starts anew.
    leaving: bool,
    /// What the pod was given; None: it was not admitted.
    allocation: Option<Arc<PodAllocation>>,
    /// How its wish for other resources stands.
    resize: ResizeState,
}

impl Held {
    /// The form in which a pod runs.
    fn form(&self, pod: &DesiredPod) -> DesiredPod {
        match &self.allocation {
            Some(given) => pod.given(given, self.resize.clone()),
            None => pod.clone(),
        }
    }
}

/// A verdict that waited for a plugin, with its pod and the number of the question.
type Answered = (PodUid, u64, Result<Admission, Refusal>);

/// The dispatcher's state.
pub struct Dispatcher {
    deps: Arc<PodDeps>,
    admit: AdmitHandle,
    /// Told which static pods have a worker, so that each has its mirror pod.
    mirrors: Mirrors,
    tasks: Tasks,
    expected: HashSet<PodSource>,
    seen: HashSet<PodSource>,
    /// What each source holds, by UID.
    sets: BTreeMap<PodSource, BTreeMap<PodUid, DesiredPod>>,
    workers: HashMap<PodUid, Held>,
    /// Full names of pods that have a worker.
    names: HashMap<String, HashSet<PodUid>>,
    /// Pods whose worker is done, and the number of the newest pass then: what that pass and the one after it still show of them is old.
    ended: HashMap<PodUid, u64>,
    /// Pods that wait for a full name to become free.
    queued: HashMap<String, Vec<PodUid>>,
    /// Pods whose verdict of admission waits for a plugin: the number of the question, and the pod's full name.
    admitting: HashMap<PodUid, (u64, String)>,
    admissions: u64,
    admitted_tx: mpsc::Sender<Answered>,
    admitted: mpsc::Receiver<Answered>,
    runtime: watch::Receiver<RuntimePods>,
    ends_tx: PodEnds,
    /// Pods that the node ends.
    ends: mpsc::Receiver<EndPod>,
    done_tx: mpsc::Sender<PodUid>,
    done: mpsc::Receiver<PodUid>,
    /// True from the moment at which all sources have spoken.
    all_seen: watch::Sender<bool>,
    /// When the QoS cgroups are to be rewritten.
    qos_due: Option<Instant>,
    /// When wishes for other resources are to be looked at again.
    wishes_due: Option<Instant>,
}

impl Dispatcher {
    /// A dispatcher that expects these sources.
    pub fn new(
        deps: Arc<PodDeps>,
        admit: AdmitHandle,
        mirrors: Mirrors,
        tasks: Tasks,
        expected: impl IntoIterator<Item = PodSource>,
        runtime: watch::Receiver<RuntimePods>,
    ) -> Self {
        let (done_tx, done) = mpsc::channel(256);
        let (ends_tx, ends) = ends::channel();
        let (admitted_tx, admitted) = mpsc::channel(256);
        Self {
            deps,
            admit,
            mirrors,
            tasks,
            expected: expected.into_iter().collect(),
            seen: HashSet::new(),
            sets: BTreeMap::new(),
            workers: HashMap::new(),
            names: HashMap::new(),
            ended: HashMap::new(),
            queued: HashMap::new(),
            admitting: HashMap::new(),
            admissions: 0,
            admitted_tx,
            admitted,
            runtime,
            ends_tx,
            ends,
            done_tx,
            done,
            all_seen: watch::Sender::new(false),
            qos_due: None,
            wishes_due: None,
        }
    }

    /// Whether every source has spoken.
    pub fn all_seen(&self) -> watch::Receiver<bool> {
        self.all_seen.subscribe()
    }

    /// The way to end pods for the node's sake.
    pub fn ends(&self) -> PodEnds {
        self.ends_tx.clone()
    }

    /// Runs until stopped.
    pub async fn run(mut self, mut updates: mpsc::Receiver<SourceUpdate>) {
        let stop = self.tasks.stop().clone();
        // Nothing is decided before the runtime was listed once: what is observed comes before what is done.
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            listed = self.runtime.wait_for(|r| r.pass > 0) => if listed.is_err() { return },
        }
        self.check_all_seen().await;
        self.make_levels().await;
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.deps.registry.beat();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(uid) = self.done.recv() => self.worker_done(&uid).await,
                Some((uid, question, verdict)) = self.admitted.recv() => self.admitted_later(&uid, question, verdict).await,
                Some(update) = updates.recv() => {
                    let mut waiting = VecDeque::from([update]);
                    while let Ok(update) = updates.try_recv() {
                        waiting.push_back(update);
                    }
                    while let Some(update) = waiting.pop_front() {
                        self.take(update, &mut waiting).await;
                    }
                }
                Some(end) = self.ends.recv() => self.end_for_the_node(end),
                Ok(()) = self.runtime.changed() => self.end_orphans(),
                () = sleep_until(self.qos_due) => self.update_qos().await,
                () = self.admit.freed() => self.retry_wishes("pods_removed").await,
                () = sleep_until(self.wishes_due) => self.retry_wishes("periodic_retry").await,
                _ = housekeeping.tick() => {
                    self.housekeeping().await;
                    self.update_qos().await;
                }
            }
        }
    }

    fn desired(&self, uid: &PodUid) -> Option<&DesiredPod> {
        self.sets.values().find_map(|set| set.get(uid))
    }

    /// Takes what a source says. Of sets that piled up while the runtime could not be listed, only the newest of each source counts.
    async fn take(&mut self, update: SourceUpdate, later: &mut VecDeque<SourceUpdate>) {
        let is_set = |u: &SourceUpdate, source: PodSource| matches!(u, SourceUpdate::Set(s) if s.source == source);
        let source = match &update {
            SourceUpdate::Set(set) => set.source,
            SourceUpdate::Upsert(pod) => pod.source(),
            SourceUpdate::Remove(source, _) => *source,
        };
        if let Some(SourceUpdate::Set(newer)) = later.iter_mut().find(|u| is_set(u, source)) {
            if let SourceUpdate::Set(set) = update {
                newer.again.extend(set.again);
            }
            return;
        }
        match update {
            SourceUpdate::Set(set) => self.take_set(set).await,
            SourceUpdate::Upsert(pod) => self.take_one(pod).await,
            SourceUpdate::Remove(source, uid) => {
                if let Some(pod) = self.sets.get_mut(&source).and_then(|set| set.remove(&uid)) {
                    info!(pod = pod.full_name(), uid = %uid, source = source.as_str(), "SyncLoop REMOVE");
                    self.end(&uid, EndReason::Removed).await;
                }
            }
        }
    }

    /// Takes one pod that came or changed.
    async fn take_one(&mut self, pod: DesiredPod) {
        let (source, uid) = (pod.source(), pod.uid().clone());
        if self.sets.iter().any(|(s, held)| *s != source && held.contains_key(&uid)) {
            warn!(pod = pod.full_name(), uid = %uid, "Pod UID is already in use, pod ignored");
            return;
        }
        let set = self.sets.entry(source).or_default();
        let starting = match set.get(&uid) {
            Some(before) if before.same_intent(&pod) => {
                let pod = pod.sharing(before);
                set.insert(uid, pod.clone());
                self.note(&pod);
                None
            }
            _ => {
                let old = set.insert(uid.clone(), pod);
                self.offer(&uid, old.as_ref()).await
            }
        };
        self.admit_and_start(starting.into_iter().collect()).await;
    }

    /// The API tells the same intent with another status, mostly our own words: the worker need not look for that, unless it waits for a
    /// condition that others set.
    fn note(&self, pod: &DesiredPod) {
        let (Some(held), Some(entry)) = (self.workers.get(pod.uid()), self.deps.registry.get(pod.uid())) else {
            return;
        };
        let before = entry.view().desired.replace(pod.clone());
        held.intent.send_if_modified(|intent| {
            intent.update(held.form(pod));
            false
        });
        let gates = pod.spec().readiness_gates.iter().flatten();
        let told = |pod: &DesiredPod, kind: &str| {
            let status = pod.stored_status()?;
            status.conditions.iter().flatten().find(|c| c.type_ == kind).map(|c| c.status.clone())
        };
        let news = |kind: &str| before.as_ref().and_then(|b| told(b, kind)) != told(pod, kind);
        if gates.into_iter().any(|g| news(&g.condition_type)) {
            entry.wake();
        }
        self.deps.status.changed(pod);
    }

    /// Takes a source's new set: ends what left it, updates what changed, starts what came.
    async fn take_set(&mut self, set: SourceSet) {
        let source = set.source;
        let mut fresh: BTreeMap<PodUid, DesiredPod> = BTreeMap::new();
        let mut names = HashSet::with_capacity(set.pods.len());
        let mut order = Vec::with_capacity(set.pods.len());
        for pod in set.pods {
            if !names.insert(pod.full_name()) {
                let text = format!(
                    "Error validating pod {} from {} due to duplicate pod name \"{}\", ignoring",
                    decide::config::pod_text(&pod),
                    source.as_str(),
                    pod.name()
                );
                warn!(reason = "FailedValidation", "{text}");
                self.deps.events.pod_warning(&pod, "FailedValidation", &text);
                continue;
            }
            let taken = self.sets.iter().any(|(s, held)| *s != source && held.contains_key(pod.uid()));
            if taken || fresh.contains_key(pod.uid()) {
                warn!(pod = pod.full_name(), uid = %pod.uid(), "Pod UID is already in use, pod ignored");
                continue;
            }
            order.push(pod.uid().clone());
            let known = self.sets.get(&source).and_then(|set| set.get(pod.uid()));
            let pod = match known.filter(|known| known.same_intent(&pod)) {
                Some(known) => pod.sharing(known),
                None => pod,
            };
            fresh.insert(pod.uid().clone(), pod);
        }
        let old = self.sets.insert(source, fresh).unwrap_or_default();
        for (uid, pod) in &old {
            if !self.sets[&source].contains_key(uid) {
                info!(pod = pod.full_name(), uid = %uid, source = source.as_str(), "SyncLoop REMOVE");
                self.end(uid, EndReason::Removed).await;
            }
        }
        let first = self.seen.insert(source);
        if first {
            self.check_all_seen().await;
            // What already runs is admitted before what is new: a newcomer must not take its room.
            let alive: HashSet<PodUid> =
                self.runtime.borrow().pods.iter().filter(|p| p.alive).map(|p| p.uid.clone()).collect();
            order.sort_by_key(|uid| !alive.contains(uid));
        }
        let mut starting = Vec::new();
        for uid in order {
            if set.again.contains(&uid) {
                info!(uid = %uid, source = source.as_str(), "SyncLoop REMOVE, and back again");
                self.end(&uid, EndReason::Removed).await;
                starting.extend(self.offer(&uid, None).await);
                continue;
            }
            match old.get(&uid) {
                Some(before) if before.same_intent(&self.sets[&source][&uid]) => {
                    if source == PodSource::Api {
                        self.note(&self.sets[&source][&uid]);
                    }
                }
                before => starting.extend(self.offer(&uid, before).await),
            }
        }
        self.admit_and_start(starting).await;
    }

    /// Brings one desired pod to its worker: an update, a start (returned, to be admitted), or a place in the queue of its name. `before`: its form
    /// until now.
    async fn offer(&mut self, uid: &PodUid, before: Option<&DesiredPod>) -> Option<DesiredPod> {
        let pod = self.desired(uid)?.clone();
        if self.admitting.contains_key(uid) {
            // Its newest form is started when the verdict comes.
            self.deps.registry.renew_waiting(&pod);
            return None;
        }
        self.follow_wish(&pod, before).await;
        if let Some(held) = self.workers.get_mut(uid) {
            if !held.leaving {
                info!(pod = pod.full_name(), uid = %uid, "SyncLoop UPDATE");
                if let Some(entry) = self.deps.registry.get(uid) {
                    entry.view().desired = Some(pod.clone());
                }
                self.deps.status.changed(&pod);
                let form = held.form(&pod);
                held.intent.send_modify(|intent| intent.update(form));
            } else {
                // It reports when it is done, and the newest form is offered again. What the next worker goes on from stays.
                held.intent.send_modify(Intent::again);
            }
            return None;
        }
        if pod.is_static() {
            let name = pod.full_name();
            self.end_runtime_namesakes(&pod);
            if self.names.get(&name).is_some_and(|holders| !holders.is_empty()) {
                let queue = self.queued.entry(name).or_default();
                if !queue.contains(uid) {
                    info!(pod = pod.full_name(), uid = %uid, "Pod waits for an earlier one of its name to end");
                    queue.push(uid.clone());
                }
                return None;
            }
            // Its name is taken at once, so that two pods of one batch cannot both start.
            self.names.entry(name).or_default().insert(uid.clone());
        }
        Some(pod)
    }

    /// Ends pods of the same full name that only the runtime knows: earlier forms of this static pod.
    fn end_runtime_namesakes(&mut self, pod: &DesiredPod) {
        let runtime = self.runtime.borrow().pods.clone();
        for other in runtime.iter() {
            let same_name = other.name == pod.name() && other.namespace == pod.namespace();
            if same_name && other.uid != *pod.uid() && other.alive && self.is_orphan(other) {
                self.start_orphan(other);
            }
        }
    }

    fn is_orphan(&self, pod: &RuntimePod) -> bool {
        !self.workers.contains_key(&pod.uid) && self.desired(&pod.uid).is_none() && !self.ended.contains_key(&pod.uid)
    }

    /// Admits pods in order and starts a worker for each; a refused one gets a worker that ends what is left of it.
    async fn admit_and_start(&mut self, pods: Vec<DesiredPod>) {
        if pods.is_empty() {
            return;
        }
        // What has run to its end takes no room and is not asked about; what is being deleted may still take some, whatever the answer.
        let (over, pods): (Vec<_>, Vec<_>) = pods.into_iter().partition(has_ended);
        for pod in over {
            self.admit.ended(pod.uid()).await;
            self.begin(pod, Ok(None));
        }
        let alive: HashSet<PodUid> =
            self.runtime.borrow().pods.iter().filter(|p| p.alive).map(|p| p.uid.clone()).collect();
        let candidates = pods.iter().map(|pod| Candidate { pod: pod.clone(), alive: alive.contains(pod.uid()) });
        let verdicts = self.admit.admit(candidates.collect()).await;
        let mut wishes = false;
        for (pod, verdict) in pods.into_iter().zip(verdicts) {
            match verdict {
                Verdict::Now(Err(_)) | Verdict::Later(_) if pod.is_deleting() => self.begin(pod, Ok(None)),
                Verdict::Now(verdict) => {
                    wishes |= verdict.as_ref().is_ok_and(|admission| admission.wishes);
                    self.begin(pod, verdict.map(Some));
                }
                Verdict::Later(verdict) => {
                    self.admissions += 1;
                    let (uid, question) = (pod.uid().clone(), self.admissions);
                    self.admitting.insert(uid.clone(), (question, pod.full_name()));
                    self.show_waiting(&pod);
                    let out = self.admitted_tx.clone();
                    self.tasks.spawn_until_stop(async move {
                        if let Ok(verdict) = verdict.await {
                            let _ = out.send((uid, question, verdict)).await;
                        }
                    });
                }
            }
        }
        // Not before all of them are booked: what one wants more must not take another's room.
        if wishes {
            self.retry_wishes("pods_added").await;
        }
    }

    /// Ends pods that have to make room for a critical one, whose room theirs is already; nobody waits for them.
    fn preempt(&mut self, pod: &DesiredPod, room: &Admitted) {
        for uid in &room.preempt {
            let Some(victim) = self.desired(uid).cloned() else { continue };
            info!(pod = victim.full_name(), uid = %uid, critical = pod.full_name(), "Preempting pod to free up resources");
            self.deps.events.pod_warning(&victim, PREEMPTING, PREEMPTED);
            self.deps.metrics.preempted(&room.lacked);
            let failing = Failing {
                reason: PREEMPTING.to_owned(),
                message: PREEMPTED.to_owned(),
                disruption: Some(Disruption {
                    reason: decide::eviction::TERMINATION_BY_KUBELET.to_owned(),
                    message: "Pod was preempted by Kubelet to accommodate a critical pod.".to_owned(),
                }),
            };
            self.end_for_the_node(EndPod { uid: uid.clone(), failing, grace: None });
        }
    }

    /// A pod that a plugin holds up is no secret.
    fn show_waiting(&self, pod: &DesiredPod) {
        let entry = self.new_entry(pod);
        {
            let mut view = entry.view();
            view.status = pod.stored_status().cloned().unwrap_or_default();
            view.status.phase.get_or_insert_with(|| "Pending".to_owned());
            view.waits_for = vec!["a plugin has not said yet whether the pod gets what it asks for".to_owned()];
        }
        self.deps.registry.wait_for_admission(entry);
    }

    /// The entry of a pod that is to be admitted.
    fn new_entry(&self, pod: &DesiredPod) -> Arc<PodEntry> {
        let now = self.deps.clock.now();
        let entry = Arc::new(PodEntry::new(pod.uid().clone(), pod.namespace(), pod.name(), Some(pod.clone()), now));
        entry.mark(StepKind::Queued, pod.source().as_str(), StepResult::Done, now);
        entry.begin(StepKind::Admit, "", now);
        entry
    }

    /// The verdict that waited for a plugin is there.
    async fn admitted_later(&mut self, uid: &PodUid, question: u64, verdict: Result<Admission, Refusal>) {
        if self.admitting.get(uid).is_none_or(|(asked, _)| *asked != question) {
            return;
        }
        self.admitting.remove(uid);
        let Some(pod) = self.desired(uid).cloned() else { return };
        let wishes = verdict.as_ref().is_ok_and(|admission| admission.wishes);
        self.begin(pod, verdict.map(Some));
        if wishes {
            self.retry_wishes("pods_added").await;
        }
    }

    /// Starts the worker of a pod about which admission has spoken; None: it was not asked, or what it said does not count.
    fn begin(&mut self, pod: DesiredPod, verdict: Result<Option<Admission>, Refusal>) {
        let now = self.deps.clock.now();
        let entry = match self.deps.registry.end_wait(pod.uid()) {
            Some(entry) => {
                let mut view = entry.view();
                view.desired = Some(pod.clone());
                view.waits_for.clear();
                drop(view);
                entry
            }
            None => self.new_entry(&pod),
        };
        let mut admission = None;
        let intent = match verdict {
            Ok(admitted) => {
                if let Some(admitted) = &admitted {
                    self.preempt(&pod, &admitted.room);
                }
                info!(pod = pod.full_name(), uid = %pod.uid(), source = pod.source().as_str(), "SyncLoop ADD");
                entry.end(StepKind::Admit, "", StepResult::Done, now);
                let form = admitted.as_ref().map(|a| pod.given(&a.allocation, a.resize.clone()));
                admission = admitted;
                Intent::first(form.unwrap_or_else(|| pod.clone()))
            }
            Err(refusal) => {
                warn!(pod = pod.full_name(), reason = refusal.reason, err = refusal.message, "Pod was rejected");
                self.deps.metrics.admission_rejected(&refusal.reason);
                self.deps.events.pod_warning(&pod, &refusal.reason, &refusal.message);
                entry.end(
                    StepKind::Admit,
                    "",
                    StepResult::Failed(format!("{}: {}", refusal.reason, refusal.message)),
                    now,
                );
                let shown = Rejection {
                    reason: &refusal.reason,
                    message: &refusal.message,
                    qos_class: qos_class(&pod, true).as_str(),
                };
                entry.view().status = status::rejected(&pod, &shown, now);
                Intent::End(Ending {
                    pod: Some(pod.clone()),
                    why: EndReason::Refused { reason: refusal.reason, message: refusal.message },
                    grace: None,
                    gone: false,
                    again: false,
                })
            }
        };
        self.start_worker(entry, pod.full_name(), intent, admission);
        if pod.is_static() {
            self.mirrors.own(&pod);
        }
        self.deps.status.changed(&pod);
    }

    fn start_worker(&mut self, entry: Arc<PodEntry>, full_name: String, intent: Intent, admission: Option<Admission>) {
        self.qos_soon();
        let uid = entry.uid.clone();
        let leaving = matches!(&intent, Intent::End(e) if e.gone);
        let (tx, rx) = watch::channel(intent);
        self.deps.registry.insert(entry.clone());
        self.names.entry(full_name.clone()).or_default().insert(uid.clone());
        let (allocation, resize, actuated) = match admission {
            Some(a) => (Some(a.allocation), a.resize, a.actuated),
            None => Default::default(),
        };
        self.workers.insert(uid, Held { intent: tx, full_name, leaving, allocation, resize });
        worker::spawn(self.deps.clone(), entry, rx, actuated, self.done_tx.clone(), &self.tasks);
    }

    /// The QoS levels are written again in a moment, with whatever else changes until then.
    fn qos_soon(&mut self) {
        let soon = Instant::now() + QOS_DELAY;
        self.qos_due = Some(self.qos_due.map_or(soon, |due| due.min(soon)));
    }

    /// Tells a worker to end its pod for good.
    async fn end(&mut self, uid: &PodUid, why: EndReason) {
        if let Some(held) = self.workers.get_mut(uid) {
            held.leaving = true;
            held.intent.send_modify(|intent| intent.end(why));
            return;
        }
        if let Some((_, full_name)) = self.admitting.remove(uid) {
            self.deps.registry.end_wait(uid);
            // Never started, so nothing of it is left but what it was given.
            self.admit.release(uid.clone()).await;
            let starting = self.free_name(&full_name, uid).await;
            return self.admit_and_start(starting).await;
        }
        // It waited for its name and never ran.
        for queue in self.queued.values_mut() {
            queue.retain(|u| u != uid);
        }
    }

    /// Tells a worker that the node ends its pod.
    fn end_for_the_node(&mut self, end: EndPod) {
        if let Some(held) = self.workers.get(&end.uid) {
            held.intent.send_modify(|intent| intent.fail(end.failing, end.grace));
        }
    }

    /// A worker is done: its pod starts again if it is wanted again, and so do pods that waited for its name.
    async fn worker_done(&mut self, uid: &PodUid) {
        let Some(held) = self.workers.remove(uid) else {
            return;
        };
        self.deps.registry.remove(uid);
        self.mirrors.disown(&held.full_name, uid);
        self.deps.status.gone(uid);
        self.ended.insert(uid.clone(), self.runtime.borrow().pass);
        self.qos_soon();
        self.admit.release(uid.clone()).await;
        if let Some(again) = self.desired(uid) {
            let is_static = again.is_static();
            self.deps.metrics.pod_restarted(is_static);
        }
        let starting = self.free_name(&held.full_name, uid).await;
        self.admit_and_start(starting).await;
    }

    /// A pod of this name is no more. Gives those that may start now: the same one, when it is wanted again, and what waited for the name.
    async fn free_name(&mut self, full_name: &str, uid: &PodUid) -> Vec<DesiredPod> {
        if let Some(holders) = self.names.get_mut(full_name) {
            holders.remove(uid);
            if holders.is_empty() {
                self.names.remove(full_name);
            }
        }
        let mut starting = Vec::new();
        if self.desired(uid).is_some() {
            starting.extend(self.offer(uid, None).await);
        }
        for waiting in self.queued.remove(full_name).unwrap_or_default() {
            starting.extend(self.offer(&waiting, None).await);
        }
        starting
    }

    async fn check_all_seen(&mut self) {
        let complete = self.expected.iter().all(|s| self.seen.contains(s));
        if complete && !*self.all_seen.borrow() {
            self.all_seen.send_replace(true);
            self.end_orphans();
            self.housekeeping().await;
            if self.wishes_due.is_some() {
                self.retry_wishes("pods_added").await;
            }
        } else if !complete {
            self.end_orphans();
        }
    }

    /// Ends runtime pods that no source wants.
    fn end_orphans(&mut self) {
        let (pass, runtime) = {
            let newest = self.runtime.borrow_and_update();
            (newest.pass, newest.pods.clone())
        };
        // A pass that was under way when the worker finished may still show what the worker removed; the next one does not.
        self.ended.retain(|_, at| pass < *at + 2);
        // Whether somebody wants a static pod is known when the static sources have spoken: one that was removed ends also while the API
        // server cannot be reached. All others wait for every source.
        let all_seen = *self.all_seen.borrow();
        let statics_seen = self.expected.iter().all(|s| *s == PodSource::Api || self.seen.contains(s));
        for pod in runtime.iter() {
            if (all_seen || pod.is_static && statics_seen) && self.is_orphan(pod) {
                self.start_orphan(pod);
            }
        }
    }

    fn start_orphan(&mut self, pod: &RuntimePod) {
        if pod.alive {
            info!(pod = format!("{}_{}", pod.name, pod.namespace), uid = %pod.uid, "Ending a pod that no source wants");
            self.deps.metrics.orphaned_runtime_pods.inc();
        }
        let now = self.deps.clock.now();
        let entry = Arc::new(PodEntry::new(pod.uid.clone(), &pod.namespace, &pod.name, None, now));
        entry.mark(StepKind::Queued, "runtime", StepResult::Done, now);
        let intent = Intent::End(Ending { pod: None, why: EndReason::Orphan, grace: None, gone: true, again: false });
        self.start_worker(entry, format!("{}_{}", pod.name, pod.namespace), intent, None);
    }

    /// The cgroups that pods stand in directly, for pods that ask for this together.
    fn levels(&self, demand: &QosDemand) -> Vec<(CgroupName, CgroupResources)> {
        let settings = &self.deps.settings;
        let level = |class| {
            let node = &settings.node;
            let mut values = resources::qos_cgroup_resources(class, demand, &node.hugepage_sizes, node.memory_qos);
            values.memory_limit = settings.memory_reserve.and_then(|r| r.limit(class, demand));
            (resources::qos_cgroup_name(&settings.kubepods, class), values)
        };
        [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort].map(level).into()
    }

    /// Makes the QoS levels that are not there, before a pod is made below one: under systemd a slice that comes into being by its child has none of the
    /// properties. Those that are there keep what they have until the pods in them are known.
    async fn make_levels(&self) {
        if !self.deps.settings.cgroups_per_qos {
            return;
        }
        for (name, values) in self.levels(&QosDemand::of(&[], true)) {
            if let Err(e) = self.deps.host.ensure_cgroup(&name, &values).await {
                warn!(err = e.chain(), "Failed to create a QoS cgroup");
            }
        }
    }

    /// Gives the QoS levels the shares that their pods ask for together.
    async fn update_qos(&mut self) {
        self.qos_due = Some(Instant::now() + QOS_PERIOD);
        let settings = &self.deps.settings;
        if !settings.cgroups_per_qos {
            return;
        }
        let form = |pod: DesiredPod| self.workers.get(pod.uid()).map_or(pod.clone(), |held| held.form(&pod));
        let pods: Vec<DesiredPod> = self.deps.registry.all().iter().filter_map(|e| active(e)).map(form).collect();
        let (fixed, moving): (Vec<_>, Vec<_>) = pods.iter().partition(|p| p.is_static());
        self.deps.metrics.desired_pods(fixed.len(), moving.len());
        self.deps.metrics.active_pods(fixed.len(), moving.len());
        let demand = QosDemand::of(&pods, true);
        if let Some(qos) = settings.node.memory_qos {
            let protected = |bytes: i64| if qos.tiered_reservation { bytes } else { 0 };
            let (guaranteed, burstable) = (demand.guaranteed_memory, demand.burstable_memory);
            self.deps.metrics.memory_protected(protected(guaranteed), protected(burstable));
        }
        let reserve = settings.memory_reserve;
        let mut levels = self.levels(&demand);
        let mut written = self.deps.host.update_cgroups(&levels).await;
        if written.is_err() && reserve.is_some() {
            // More is used than the limit would be: then at least it does not grow.
            for (name, values) in &mut levels {
                let used =
                    self.deps.host.cgroup_memory(name).await.ok().flatten().and_then(|used| i64::try_from(used).ok());
                values.memory_limit = values.memory_limit.map(|limit| limit.max(used.unwrap_or(limit)));
            }
            written = self.deps.host.update_cgroups(&levels).await;
        }
        if let Err(e) = written {
            warn!(err = e.chain(), "Failed to update QoS cgroup configuration");
        }
    }
}

/// The API holds a final phase of it.
pub(crate) fn has_ended(pod: &DesiredPod) -> bool {
    pod.stored_status().and_then(|s| s.phase.as_deref()).is_some_and(status::is_terminal)
}

/// The desired pod of an entry that still may use resources.
fn active(entry: &PodEntry) -> Option<DesiredPod> {
    let view = entry.view();
    let over = view.status.phase.as_deref().is_some_and(status::is_terminal);
    view.desired.clone().filter(|_| view.state != WorkerState::Terminated && !over)
}
