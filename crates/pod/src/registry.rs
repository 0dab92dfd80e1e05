//! What each pod is at, for everyone who asks: the table of pods with their newest desired state, status and step record.
//!
//! The worker of a pod is the only writer of its entry; readers copy what they need under a short lock. Nothing is decided from here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use decide::pleg::Told;
use futures::FutureExt;
use jiff::Timestamp;
use model::api::PodStatus;
use model::pod::{DesiredPod, PodUid};
use model::report::StopReport;
use model::timeline::{StepKind, StepRecord, StepResult};
use telemetry::metrics::ContainerCounts;
use tokio::sync::{Notify, oneshot};

/// How many step records a pod keeps; the first ones (its start) and the newest stay.
const TIMELINE_MAX: usize = 64;
/// How many of the first records are never folded away.
const TIMELINE_HEAD: usize = 24;

/// Of how many sandboxes and containers an entry keeps what was told; beyond that the worker looks at everything.
const TOLD_MAX: usize = 64;

/// Where the worker of a pod is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// Keeping it running.
    Syncing,
    /// Stopping everything.
    Terminating,
    /// Everything stopped; cleaning up or done.
    Terminated,
}

impl WorkerState {
    /// The word for reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Syncing => "syncing",
            Self::Terminating => "terminating",
            Self::Terminated => "terminated",
        }
    }
}

/// What is known of one pod.
#[derive(Debug)]
pub struct PodView {
    /// Newest desired state; None for a pod that only the runtime knows.
    pub desired: Option<DesiredPod>,
    /// Namespace and name, also for a pod that only the runtime knows.
    pub namespace: String,
    /// See `namespace`.
    pub name: String,
    /// Composed status.
    pub status: PodStatus,
    /// Where the worker is.
    pub state: WorkerState,
    /// Nothing of the pod can run any more, and its volumes and cgroup are taken down: its API object may go.
    pub finished: bool,
    /// When a source first showed it to this process.
    pub seen: Timestamp,
    /// Why each container last stopped.
    pub last_stops: HashMap<String, StopReport>,
    /// Why the agent killed a container, by container id, until its exit is noted in `last_stops`.
    pub last_kill: HashMap<String, &'static str>,
    /// What the pod waits for, in words.
    pub waits_for: Vec<String>,
    timeline: Vec<StepRecord>,
}

impl PodView {
    /// Steps, oldest first.
    pub fn timeline(&self) -> &[StepRecord] {
        &self.timeline
    }

    fn begin(&mut self, kind: StepKind, subject: &str, now: Timestamp) {
        self.timeline.push(StepRecord {
            kind,
            subject: subject.to_owned(),
            started: now,
            ended: None,
            result: StepResult::Running,
            count: 1,
        });
        if self.timeline.len() > TIMELINE_MAX {
            self.timeline.remove(TIMELINE_HEAD);
        }
    }

    fn end(&mut self, kind: StepKind, subject: &str, result: StepResult, now: Timestamp) {
        let Some(at) = self
            .timeline
            .iter()
            .rposition(|s| s.kind == kind && s.subject == subject && s.result == StepResult::Running)
        else {
            return;
        };
        self.timeline[at].ended = Some(now);
        self.timeline[at].result = result;
        // A step that fails again in the same way is one record with a count: a pod that cannot start for a day fits the page.
        let same = at.checked_sub(1).filter(|&before| {
            let (a, b) = (&self.timeline[before], &self.timeline[at]);
            a.kind == b.kind && a.subject == b.subject && a.result == b.result && a.result != StepResult::Done
        });
        if let Some(before) = same {
            let newest = self.timeline.remove(at);
            let kept = &mut self.timeline[before];
            kept.count = kept.count.saturating_add(1);
            kept.ended = newest.ended;
        }
    }
}

/// What is to be removed from the runtime of a pod's dead containers before its worker would do so by itself.
#[derive(Debug)]
pub enum Collect {
    /// What the policy keeps not; of a pod that has ended for good, everything. The sender is told when it is done, or could not be.
    Unused(oneshot::Sender<()>),
    /// These containers, where they are dead.
    These(Vec<String>),
}

/// One pod in the table.
#[derive(Debug)]
pub struct PodEntry {
    /// Its UID.
    pub uid: PodUid,
    view: Mutex<PodView>,
    wake: Notify,
    look: AtomicBool,
    told: Mutex<Told>,
    objects_changed: AtomicBool,
    verdict_changed: AtomicBool,
    collect: Mutex<Vec<Collect>>,
}

impl PodEntry {
    /// A fresh entry.
    pub fn new(uid: PodUid, namespace: &str, name: &str, desired: Option<DesiredPod>, seen: Timestamp) -> Self {
        Self {
            uid,
            view: Mutex::new(PodView {
                desired,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                status: PodStatus::default(),
                state: WorkerState::Syncing,
                finished: false,
                seen,
                last_stops: HashMap::new(),
                last_kill: HashMap::new(),
                waits_for: Vec::new(),
                timeline: Vec::new(),
            }),
            wake: Notify::new(),
            look: AtomicBool::new(false),
            told: Mutex::default(),
            objects_changed: AtomicBool::new(false),
            verdict_changed: AtomicBool::new(false),
            collect: Mutex::default(),
        }
    }

    /// The view, locked; never held across an await.
    pub fn view(&self) -> MutexGuard<'_, PodView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the pod's worker, to look at all of the pod. Wakes coalesce; one that comes during a round is kept for the next.
    pub fn wake(&self) {
        self.look.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// An event of the runtime told this of the pod: its worker looks when that is news.
    pub fn tell(&self, told: Told) {
        let full = {
            let mut all = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            all.join(told);
            all.len() > TOLD_MAX
        };
        if full {
            self.take_told();
            self.look.store(true, Ordering::Release);
        }
        self.wake.notify_one();
    }

    fn take_told(&self) -> Told {
        std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// An object of the API server that the pod uses changed: its volumes are written anew at once, and what waits for the object is tried again.
    pub fn objects_changed(&self) {
        self.objects_changed.store(true, Ordering::Release);
        self.wake();
    }

    /// True once after each [`PodEntry::objects_changed`].
    pub fn take_objects_changed(&self) -> bool {
        self.objects_changed.swap(false, Ordering::AcqRel)
    }

    /// A probe of the pod came to another verdict: shown and acted on at once, by what was seen last.
    pub fn verdict_changed(&self) {
        self.verdict_changed.store(true, Ordering::Release);
        self.wake();
    }

    /// True once after each [`PodEntry::verdict_changed`].
    pub fn take_verdict_changed(&self) -> bool {
        self.verdict_changed.swap(false, Ordering::AcqRel)
    }

    /// Asks the pod's worker to remove dead containers. It answers in its own time: when it is between two calls and has nothing else to do.
    pub fn collect(&self, what: Collect) {
        self.collect.lock().unwrap_or_else(PoisonError::into_inner).push(what);
        self.wake();
    }

    /// What was asked for since the last call.
    pub fn take_collect(&self) -> Vec<Collect> {
        std::mem::take(&mut *self.collect.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Why the worker was woken since the last call: what it was told, or None when it is to look at everything.
    pub fn settle(&self) -> Option<Told> {
        let _ = self.wake.notified().now_or_never();
        let told = self.take_told();
        (!self.look.swap(false, Ordering::AcqRel)).then_some(told)
    }

    /// Why the worker was woken, without forgetting it; None as in [`PodEntry::settle`].
    pub fn told(&self) -> Option<Told> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (!self.look.load(Ordering::Acquire)).then_some(told)
    }

    /// Waits for [`PodEntry::wake`].
    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Records that a step begins.
    pub fn begin(&self, kind: StepKind, subject: &str, now: Timestamp) {
        self.view().begin(kind, subject, now);
    }

    /// Records how the newest running step of this kind and subject ended.
    pub fn end(&self, kind: StepKind, subject: &str, result: StepResult, now: Timestamp) {
        self.view().end(kind, subject, result, now);
    }

    /// Records a step that took no time.
    pub fn mark(&self, kind: StepKind, subject: &str, result: StepResult, now: Timestamp) {
        let mut view = self.view();
        view.begin(kind, subject, now);
        view.end(kind, subject, result, now);
    }
}

/// What a pod has in the runtime, for the totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// It has a ready sandbox.
    pub sandbox: bool,
    /// Its containers by state.
    pub containers: ContainerCounts,
}

/// The table of pods. Shared by reference; one entry per worker.
#[derive(Debug)]
pub struct Registry {
    pods: Mutex<HashMap<PodUid, Arc<PodEntry>>>,
    /// Pods without a worker yet: a plugin is being asked whether they may run.
    admitting: Mutex<HashMap<PodUid, Arc<PodEntry>>>,
    beat: Mutex<tokio::time::Instant>,
    /// What each pod has in the runtime, and the sum of it: one pod's change costs that pod only.
    running: Mutex<(HashMap<PodUid, Running>, usize, ContainerCounts)>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            pods: Mutex::default(),
            admitting: Mutex::default(),
            beat: Mutex::new(tokio::time::Instant::now()),
            running: Mutex::default(),
        }
    }
}

impl Registry {
    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<PodEntry>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admitting(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<PodEntry>>> {
        self.admitting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a pod whose admission waits for a plugin; it has no worker yet, and so is in no other list than [`Registry::shown`].
    pub fn wait_for_admission(&self, entry: Arc<PodEntry>) {
        self.admitting().insert(entry.uid.clone(), entry);
    }

    /// The newest form of a pod whose admission waits.
    pub fn renew_waiting(&self, pod: &DesiredPod) {
        if let Some(entry) = self.admitting().get(pod.uid()) {
            entry.view().desired = Some(pod.clone());
        }
    }

    /// The pod's admission waits no more.
    pub fn end_wait(&self, uid: &PodUid) -> Option<Arc<PodEntry>> {
        self.admitting().remove(uid)
    }

    /// A sign of life of the dispatcher, the only writer of the table.
    pub fn beat(&self) {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = tokio::time::Instant::now();
    }

    /// How long ago the dispatcher last gave one.
    pub fn since_beat(&self) -> std::time::Duration {
        self.beat.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Notes what a pod has in the runtime; the new totals of pods and containers, when they changed. None: the pod is gone.
    pub fn account(&self, uid: &PodUid, now: Option<Running>) -> Option<(usize, ContainerCounts)> {
        let mut guard = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (pods, sandboxes, sum) = &mut *guard;
        let before = match now {
            Some(now) => pods.insert(uid.clone(), now),
            None => pods.remove(uid),
        };
        let (before, now) = (before.unwrap_or_default(), now.unwrap_or_default());
        if before == now {
            return None;
        }
        *sandboxes = *sandboxes + usize::from(now.sandbox) - usize::from(before.sandbox);
        for (total, new, old) in [
            (&mut sum.created, now.containers.created, before.containers.created),
            (&mut sum.running, now.containers.running, before.containers.running),
            (&mut sum.exited, now.containers.exited, before.containers.exited),
            (&mut sum.unknown, now.containers.unknown, before.containers.unknown),
        ] {
            *total = *total + new - old;
        }
        Some((*sandboxes, *sum))
    }

    /// The entry of this pod.
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodEntry>> {
        self.pods().get(uid).cloned()
    }

    /// True when a worker or a refused pod stands under this UID.
    pub fn contains(&self, uid: &PodUid) -> bool {
        self.pods().contains_key(uid)
    }

    /// Puts an entry in, replacing one of the same UID.
    pub fn insert(&self, entry: Arc<PodEntry>) {
        self.pods().insert(entry.uid.clone(), entry);
    }

    /// Takes an entry out.
    pub fn remove(&self, uid: &PodUid) {
        self.pods().remove(uid);
    }

    /// All entries, by namespace and name.
    pub fn all(&self) -> Vec<Arc<PodEntry>> {
        Self::sorted(self.pods().values().cloned().collect())
    }

    /// All entries and the pods whose admission waits, by namespace and name: for people.
    pub fn shown(&self) -> Vec<Arc<PodEntry>> {
        let mut all: HashMap<PodUid, Arc<PodEntry>> = self.admitting().clone();
        all.extend(self.pods().clone());
        Self::sorted(all.into_values().collect())
    }

    fn sorted(mut all: Vec<Arc<PodEntry>>) -> Vec<Arc<PodEntry>> {
        all.sort_by_cached_key(|e| {
            let v = e.view();
            (v.namespace.clone(), v.name.clone(), e.uid.clone())
        });
        all
    }

    /// The pod of this name; of several, one that `prefer` likes. Looks at all entries: for what people ask, not for a pod's way.
    pub fn find(&self, namespace: &str, name: &str, prefer: impl Fn(&PodView) -> bool) -> Option<Arc<PodEntry>> {
        let pods = self.pods();
        let named = pods.values().filter_map(|entry| {
            let view = entry.view();
            (view.namespace == namespace && view.name == name).then(|| (prefer(&view), view.seen, entry))
        });
        named.max_by_key(|(liked, seen, _)| (*liked, *seen)).map(|(_, _, entry)| entry.clone())
    }

    /// Has the dead containers and sandboxes removed that are not kept, and of pods that have ended everything, though their source still holds them. Waits
    /// for the workers, at most this long; how many did not answer.
    pub async fn remove_unused(&self, patience: Duration) -> usize {
        let deadline = tokio::time::Instant::now() + patience;
        let answers: Vec<_> = self
            .all()
            .iter()
            .map(|entry| {
                let (done, answer) = oneshot::channel();
                entry.collect(Collect::Unused(done));
                answer
            })
            .collect();
        let waits = answers.into_iter().map(|answer| tokio::time::timeout_at(deadline, answer));
        // A worker that ended has removed everything.
        futures::future::join_all(waits).await.iter().filter(|answer| answer.is_err()).count()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pods().len()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> PodEntry {
        PodEntry::new(PodUid::new("u"), "ns", "n", None, Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn repeated_failure_is_one_record_with_a_count() {
        let e = entry();
        for second in 0..5 {
            let t = Timestamp::from_second(second).unwrap();
            e.mark(StepKind::Pull, "web", StepResult::Failed("no such image".into()), t);
        }
        e.mark(StepKind::Pull, "web", StepResult::Done, Timestamp::from_second(9).unwrap());
        let view = e.view();
        let kept: Vec<_> = view.timeline().iter().map(|s| (s.count, s.started.as_second())).collect();
        assert_eq!(kept, [(5, 0), (1, 9)]);
    }

    #[test]
    fn found_by_name() {
        let registry = Registry::default();
        for (uid, name, second, state) in [
            ("old", "web", 1, WorkerState::Syncing),
            ("new", "web", 2, WorkerState::Syncing),
            ("ended", "web", 3, WorkerState::Terminated),
            ("other", "db", 4, WorkerState::Syncing),
        ] {
            let seen = Timestamp::from_second(second).unwrap();
            let entry = PodEntry::new(PodUid::new(uid), "ns", name, None, seen);
            entry.view().state = state;
            registry.insert(Arc::new(entry));
        }
        let find = |namespace, name| {
            let entry = registry.find(namespace, name, |v| v.state != WorkerState::Terminated);
            entry.map(|e| e.uid.as_str().to_owned())
        };
        assert_eq!(find("ns", "web").as_deref(), Some("new"));
        assert_eq!(find("ns", "db").as_deref(), Some("other"));
        assert_eq!(find("default", "db"), None);
    }

    #[test]
    fn the_beginning_and_the_newest_steps_are_kept() {
        let e = entry();
        for n in 0..200 {
            e.mark(StepKind::Start, &format!("c{n}"), StepResult::Done, Timestamp::UNIX_EPOCH);
        }
        let view = e.view();
        assert_eq!(view.timeline().len(), TIMELINE_MAX);
        assert_eq!(view.timeline()[0].subject, "c0");
        assert_eq!(view.timeline().last().map(|s| s.subject.as_str()), Some("c199"));
    }
}
