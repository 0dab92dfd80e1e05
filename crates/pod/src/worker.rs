//! The pod worker: one task per pod UID, serial within the pod.
//!
//! ```text
//!            Run(newest)                    nothing alive
//!   Syncing ─────────────▶ … ─▶ Terminating ─────────────▶ Terminated ──▶ (source gone) ──▶ done
//!      │   pod completed, End, refused  ▲                      │
//!      └────────────────────────────────┘                      └─ waits while its source still holds it
//! ```
//!
//! Never back: a pod whose end began ends. Every round begins with a fresh observation and plans from nothing else (invariant 11), so a round
//! may be cut off at any point by `kill -9` and the next process goes on.
//!
//! Task: owned by the dispatcher through [`Intent`]; ends by itself when its pod is gone, or at once when [`Tasks::stop`] is cancelled and it is between
//! two calls. Inputs: the newest intent (watch), wake-ups of the pod's entry (coalesced), its own timer. Deadlines: each runtime call's. A hung
//! call holds this pod only.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cri::port::{CriError, RuntimeMutator, RuntimeReader};
use decide::backoff::Backoffs;
use jiff::Timestamp;
use model::allocation::PodAllocation;
use model::pod::{CONFIG_SEEN, DesiredPod, PodUid};
use model::timeline::{StepKind, StepResult};
use telemetry::LogLimiter;
use telemetry::metrics::Metrics;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::admit::AdmitHandle;
use crate::ends::{Failing, PREEMPTING};
use crate::events::Events;
use crate::images::Images;
use crate::objects::PodObjects;
use crate::pleg::Health;
use crate::ports::{Clock, MountedVolumes, PluginVolumes, PodHost, Random, ResourceManagers, Tasks, sleep_until};
use crate::prober::{Found, Prober};
use crate::registry::{PodEntry, Registry, WorkerState};
use crate::settings::Settings;
use crate::status::StatusQueue;
use crate::sync::observe::Observer;
use crate::sync::resize::ResizeWork;
use crate::sync::volumes::VolumeWork;
use crate::userns::UserNamespaces;

/// What the dispatcher wants of a pod. The newest value counts; those in between may be skipped.
#[derive(Clone, Debug)]
pub enum Intent {
    /// Keep it running, in this form.
    Run(DesiredPod),
    /// End it.
    End(Ending),
}

/// How and why a pod ends.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Its newest desired form; None for a pod that only the runtime knows.
    pub pod: Option<DesiredPod>,
    /// Why.
    pub why: EndReason,
    /// Grace in seconds that the reason sets; None: the pod's own.
    pub grace: Option<i64>,
    /// Its source has let it go: nothing of it stays.
    pub gone: bool,
    /// Its source has it again: it starts anew when it has ended, and its dead containers stay, for their restart counts go on.
    pub again: bool,
}

/// Why a pod ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Its source has it no more.
    Removed,
    /// The API asked for its deletion.
    Deleted,
    /// Only the runtime knows it.
    Orphan,
    /// Admission refused it.
    Refused {
        /// Reason of the status.
        reason: String,
        /// Message without the "Pod was rejected: " in front.
        message: String,
    },
    /// Everything in it has run to its end.
    Completed,
    /// `activeDeadlineSeconds` is over.
    DeadlineExceeded,
    /// The node ends it: it uses too much, or has to make room.
    Failed(Failing),
}

impl Intent {
    /// What to do with a pod that was admitted: one whose deletion was asked for, or that has run to its end, ends.
    pub fn first(pod: DesiredPod) -> Self {
        let over = crate::desired::has_ended(&pod);
        let why = match (pod.is_deleting(), over) {
            (true, _) => EndReason::Deleted,
            (false, true) => EndReason::Completed,
            (false, false) => return Self::Run(pod),
        };
        Self::End(Ending { pod: Some(pod), why, grace: None, gone: false, again: false })
    }

    /// The pod has a newer form.
    pub fn update(&mut self, pod: DesiredPod) {
        *self = match self {
            Self::Run(_) if pod.is_deleting() => {
                Self::End(Ending { grace: None, why: EndReason::Deleted, gone: false, again: false, pod: Some(pod) })
            }
            Self::Run(_) => Self::Run(pod),
            Self::End(ending) => Self::End(Ending { pod: Some(pod), ..ending.clone() }),
        };
    }

    /// The pod's source let it go.
    pub fn end(&mut self, why: EndReason) {
        *self = match self {
            Self::Run(pod) => Self::End(Ending { pod: Some(pod.clone()), why, grace: None, gone: true, again: false }),
            Self::End(ending) => Self::End(Ending { gone: true, again: false, ..ending.clone() }),
        };
    }

    /// The node ends it. One whose end began before only gets less time.
    pub fn fail(&mut self, failing: Failing, grace: Option<i64>) {
        *self = match self {
            Self::Run(pod) => Self::End(Ending {
                pod: Some(pod.clone()),
                why: EndReason::Failed(failing),
                grace,
                gone: false,
                again: false,
            }),
            Self::End(ending) => {
                let grace = [ending.grace, grace].into_iter().flatten().min();
                Self::End(Ending { grace, ..ending.clone() })
            }
        };
    }

    /// The pod that was let go is wanted again.
    pub fn again(&mut self) {
        if let Self::End(ending) = self {
            ending.again = true;
        }
    }

    /// The pod's newest desired form.
    pub fn pod(&self) -> Option<&DesiredPod> {
        match self {
            Self::Run(pod) => Some(pod),
            Self::End(ending) => ending.pod.as_ref(),
        }
    }
}

/// What every worker shares. Values and ports, no managers.
pub struct PodDeps {
    /// The runtime, to look at.
    pub reader: Arc<dyn RuntimeReader>,
    /// The runtime, to change. Only workers hold it.
    pub mutator: Arc<dyn RuntimeMutator>,
    /// The host.
    pub host: Arc<dyn PodHost>,
    /// Volumes of plugins.
    pub plugins: Arc<dyn PluginVolumes>,
    /// Devices, CPUs and memory of containers.
    pub managers: Arc<dyn ResourceManagers>,
    /// Images.
    pub images: Images,
    /// What pods take from the API server.
    pub objects: Arc<dyn PodObjects>,
    /// Probes.
    pub prober: Arc<Prober>,
    /// Ranges of host ids.
    pub user_namespaces: UserNamespaces,
    /// The way to the node's ledger.
    pub admit: AdmitHandle,
    /// Clock.
    pub clock: Clock,
    /// Randomness.
    pub random: Random,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// The table of pods.
    pub registry: Arc<Registry>,
    /// Who is told that a status is to be written.
    pub status: StatusQueue,
    /// Where events go.
    pub events: Events,
    /// The runtime's health.
    pub health: watch::Receiver<Health>,
    /// Keeps one message from flooding the log.
    pub limiter: LogLimiter,
    /// Settings and facts of the node.
    pub settings: Settings,
}

/// When a round wants to be followed by another one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// At this moment, if nothing wakes the worker before.
    At(Instant),
    /// The pod has run to its end.
    Ended,
}

/// How a step failed.
pub(crate) struct StepError {
    text: String,
    /// It may have been done all the same.
    unknown: bool,
}

impl StepError {
    /// A failed runtime call, with the call's name and target.
    pub(crate) fn call(e: &CriError) -> Self {
        Self { text: e.to_string(), unknown: e.outcome_unknown() }
    }
}

impl From<String> for StepError {
    fn from(text: String) -> Self {
        Self { text, unknown: false }
    }
}

/// A failed runtime call in the runtime's words alone, as the API shows them.
impl From<CriError> for StepError {
    fn from(e: CriError) -> Self {
        Self { unknown: e.outcome_unknown(), text: e.message }
    }
}

/// A pull that waits for its back-off.
#[derive(Clone, Debug)]
pub(crate) struct FailedPull {
    /// When it is worth another try.
    pub(crate) retry_at: Timestamp,
    /// What the container shows until then.
    pub(crate) message: String,
    /// The image.
    pub(crate) image: String,
    /// It is that of a volume.
    pub(crate) volume: bool,
}

/// Looks at a pod at rest that nothing woke, every `syncFrequency`: most of them go by what is known.
#[derive(Default)]
pub(crate) struct Resync {
    /// The wait that began last ends with nothing but the resync, and nothing is left for that one to collect.
    pub(crate) alone: bool,
    /// How many in a row went by what is known.
    pub(crate) short: u32,
    /// The next moment that changes the plan, as it was made last.
    pub(crate) plan_changes: Option<Timestamp>,
}

/// One pod's worker.
pub(crate) struct Worker {
    pub(crate) deps: Arc<PodDeps>,
    pub(crate) entry: Arc<PodEntry>,
    pub(crate) intent: watch::Receiver<Intent>,
    pub(crate) stop: CancellationToken,
    pub(crate) observer: Observer,
    pub(crate) backoffs: Backoffs,
    /// What the pod's containers, and the pod itself, were last given. The worker is its owner, the ledger keeps it on the disk.
    pub(crate) has: PodAllocation,
    /// How its resize stands.
    pub(crate) resize: ResizeWork,
    /// The form of the pod for which cgroup, directories and volumes stand ready, and the volumes.
    pub(crate) prepared: Option<(DesiredPod, MountedVolumes)>,
    /// The form of the pod whose objects are kept at hand.
    pub(crate) followed: Option<DesiredPod>,
    /// How its volumes stand.
    pub(crate) volumes: VolumeWork,
    /// Waiting reason and message of containers whose start failed, until one succeeds.
    pub(crate) problems: BTreeMap<String, (String, String)>,
    /// Containers whose image could not be pulled, until it can.
    pub(crate) pulls: BTreeMap<String, FailedPull>,
    /// Grace in seconds as decided when the end began; only ever shortened.
    pub(crate) grace: Option<i64>,
    /// Nothing was done to the pod since it was last looked at, and nothing was left to do.
    pub(crate) at_rest: bool,
    /// How it is looked at while it is at rest.
    pub(crate) resync: Resync,
    /// What probes found as it stands on disk; None: not read yet.
    pub(crate) kept_probes: Option<BTreeMap<String, Found>>,
    /// When its end began.
    pub(crate) ending_since: Option<Instant>,
    /// Containers that the round started, with their sandboxes.
    pub(crate) made: Vec<(String, String)>,
    /// Containers whose preStop hook was begun.
    pub(crate) hooked: Mutex<HashSet<String>>,
    /// Why the pod ends, once it does.
    pub(crate) ending: Option<EndReason>,
    /// After a failure, wake-ups wait for this moment.
    pub(crate) quiet_until: Option<Instant>,
    /// When its volumes were last measured against their limits.
    pub(crate) measured: Option<Instant>,
    /// When dead containers were last collected.
    pub(crate) collected: Instant,
    /// How many times in a row the runtime did not remove what is left of the pod.
    pub(crate) not_removed: u32,
    /// Metrics: the first round has been counted.
    pub(crate) started: bool,
}

/// How many tries to remove a pod from the runtime its end waits for. containerd 2 keeps a container forever whose start was cut off between two of its
/// steps ("cannot delete running task", containerd issue 11037), until it is restarted itself.
const REMOVALS: u32 = 5;
/// Between two tries to clean up after a pod.
const CLEAN_UP_AGAIN: Duration = Duration::from_secs(2);
/// The longest time between two tries: the Go kubelet's period of container garbage collection.
const CLEAN_UP_AGAIN_MAX: Duration = Duration::from_secs(60);

/// Starts a pod's worker. `has`: what an earlier agent's containers of this pod were last given.
pub fn spawn(
    deps: Arc<PodDeps>,
    entry: Arc<PodEntry>,
    intent: watch::Receiver<Intent>,
    has: PodAllocation,
    done: mpsc::Sender<PodUid>,
    tasks: &Tasks,
) {
    let stop = tasks.stop().clone();
    if let Some(pod) = intent.borrow().pod() {
        deps.metrics.containers_per_pod.observe(pod.app_containers().count() as f64);
        if let Some(seen) = pod.annotation(CONFIG_SEEN).and_then(|t| t.parse::<Timestamp>().ok()) {
            deps.metrics.pod_worker_start_duration.observe(deps.clock.now().duration_since(seen).as_secs_f64());
        }
    }
    let resize = ResizeWork::stored(intent.borrow().pod());
    let worker = Worker {
        observer: Observer::new(deps.reader.clone(), deps.host.clone()),
        backoffs: Backoffs::starting_at(deps.settings.first_restart_period, deps.settings.max_restart_period),
        deps,
        resize,
        intent,
        stop,
        has,
        prepared: None,
        followed: None,
        volumes: VolumeWork::default(),
        problems: BTreeMap::new(),
        pulls: BTreeMap::new(),
        grace: None,
        at_rest: false,
        resync: Resync::default(),
        kept_probes: None,
        ending_since: None,
        made: Vec::new(),
        hooked: Mutex::default(),
        ending: None,
        quiet_until: None,
        measured: None,
        collected: Instant::now(),
        not_removed: 0,
        started: false,
        entry: entry.clone(),
    };
    tasks.spawn(async move {
        if worker.run().await.is_some() {
            let _ = done.send(entry.uid.clone()).await;
        }
    });
}

impl Worker {
    /// The pod's whole life. None when the agent stops before the pod is gone.
    async fn run(mut self) -> Option<()> {
        if self.resize.progress.is_some() {
            self.deps.metrics.resizes.in_progress.inc();
        }
        if !self.recall_end().await {
            self.syncing().await?;
            self.keep_end().await;
        }
        // What ends is not resized any more.
        self.show_progress(None);
        self.entry.view().state = WorkerState::Terminating;
        self.terminating().await?;
        self.entry.view().state = WorkerState::Terminated;
        self.publish_end();
        self.terminated().await
    }

    /// The newest intent, marked as seen.
    pub(crate) fn newest(&mut self) -> Intent {
        self.intent.borrow_and_update().clone()
    }

    /// Rounds until the pod completes or is to end.
    async fn syncing(&mut self) -> Option<()> {
        let mut on_time = false;
        loop {
            let pod = match self.newest() {
                Intent::Run(pod) => pod,
                Intent::End(ending) => {
                    self.ending = Some(ending.why);
                    return Some(());
                }
            };
            // On the heap while it runs: a pod at rest, which most are, holds nothing of a round.
            let next = match on_time && self.may_rest_on() {
                true => Box::pin(self.rest_on(&pod)).await,
                false => Box::pin(self.sync_round(&pod, on_time && !self.looked_lately())).await,
            };
            match next {
                Next::Ended => {
                    self.ending = Some(self.ending.take().unwrap_or(EndReason::Completed));
                    return Some(());
                }
                Next::At(at) => on_time = self.wait(at).await?,
            }
        }
    }

    /// Rounds until nothing of the pod can run any more.
    async fn terminating(&mut self) -> Option<()> {
        while !Box::pin(self.terminate_round()).await? {
            let again = Instant::now() + self.deps.random.jitter(Duration::from_secs(1), 0.5);
            self.wait(again).await?;
        }
        Some(())
    }

    /// Cleans up; stays for as long as the source holds the pod.
    async fn terminated(&mut self) -> Option<()> {
        let mut unmounted = false;
        // What is left of a pod that has ended is collected once, when it is old enough.
        let mut collect_at = Some(Instant::now() + self.deps.settings.container_gc.min_age);
        loop {
            let (gone, again) = match self.newest() {
                Intent::End(ending) => (ending.gone, ending.again),
                Intent::Run(_) => (false, false),
            };
            if !unmounted || gone {
                match Box::pin(self.clean_up(gone && !again)).await {
                    Ok(()) if gone => return Some(()),
                    Ok(()) => {
                        unmounted = true;
                        self.entry.view().finished = true;
                        if let Some(pod) = self.intent.borrow().pod() {
                            self.deps.status.changed(pod);
                        }
                    }
                    Err(reason) => {
                        if self
                            .deps
                            .limiter
                            .allow(&format!("clean {}", self.entry.uid), std::time::Instant::now())
                            .is_some()
                        {
                            error!(pod = self.name(), uid = %self.entry.uid, err = reason, "Pod cannot be cleaned up yet");
                        }
                        let doubled = CLEAN_UP_AGAIN * 2u32.saturating_pow(self.not_removed.saturating_sub(REMOVALS));
                        let again = self.deps.random.jitter(doubled.min(CLEAN_UP_AGAIN_MAX), 0.5);
                        self.wait(Instant::now() + again).await?;
                        continue;
                    }
                }
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return None,
                changed = self.intent.changed() => if changed.is_err() { return None },
                () = self.entry.woken() => self.collect_ended(false).await,
                () = sleep_until(collect_at) => {
                    collect_at = None;
                    self.collect_ended(true).await;
                }
            }
        }
    }

    /// Waits for the moment, a wake-up or a new intent. True when it was the moment that came, None when the agent stops. Events that tell a worker at
    /// rest what it knows do not wake it.
    async fn wait(&mut self, at: Instant) -> Option<bool> {
        let quiet = self.quiet_until.take().unwrap_or_else(Instant::now);
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return None,
                changed = self.intent.changed() => return changed.ok().map(|()| false),
                () = async { self.entry.woken().await; tokio::time::sleep_until(quiet).await } => {}
                () = tokio::time::sleep_until(at) => return Some(true),
            }
            let known = self.at_rest && self.entry.told().is_some_and(|told| self.observer.knows(&told));
            if !known {
                return Some(false);
            }
        }
    }

    /// `NAME_NAMESPACE` for logs.
    pub(crate) fn name(&self) -> String {
        let view = self.entry.view();
        format!("{}_{}", view.name, view.namespace)
    }

    /// Runs one step under the pod's step record; the error's text.
    pub(crate) async fn step<T, E: Into<StepError>>(
        &self,
        kind: StepKind,
        subject: &str,
        step: impl Future<Output = Result<T, E>>,
    ) -> Result<T, String> {
        self.entry.begin(kind, subject, self.deps.clock.now());
        let result = step.await.map_err(Into::into);
        let outcome = match &result {
            Ok(_) => StepResult::Done,
            Err(StepError { text, unknown: false }) => StepResult::Failed(text.clone()),
            Err(StepError { text, unknown: true }) => StepResult::Unknown(text.clone()),
        };
        self.entry.end(kind, subject, outcome, self.deps.clock.now());
        result.map_err(|e| e.text)
    }

    /// The pod ended for the sake of others or of the node, under this agent or an earlier one.
    fn makes_room(&self) -> bool {
        let makes = |reason: &str| ["Evicted", PREEMPTING].contains(&reason);
        match &self.ending {
            Some(EndReason::Failed(failing)) => makes(&failing.reason),
            Some(EndReason::Completed) => self.intent.borrow().pod().is_some_and(|pod| {
                let status = pod.stored_status().filter(|s| s.phase.as_deref() == Some("Failed"));
                status.and_then(|s| s.reason.as_deref()).is_some_and(makes)
            }),
            _ => false,
        }
    }

    /// Unmounts, removes the pod's cgroup with whatever process is still in it, and with `gone` everything else that is left: containers, sandboxes, logs,
    /// directories. What the runtime cannot remove does not hold up the rest, and after [`REMOVALS`] tries not the pod either: the runtime still shows
    /// it, so it gets the worker of a pod that nobody wants, which goes on trying.
    async fn clean_up(&mut self, gone: bool) -> Result<(), String> {
        let uid = self.entry.uid.clone();
        let deps = self.deps.clone();
        let host = &deps.host;
        self.deps.prober.forget(&uid);
        self.deps.images.forget(&uid);
        self.deps.objects.forget(&uid);
        self.followed = None;
        // Of a pod that had to make room nothing stays that takes any, not even its logs.
        let makes_room = self.makes_room();
        let removed = if gone || makes_room { self.remove_from_runtime().await } else { Ok(()) };
        self.deps.user_namespaces.release(&uid).await;
        self.step(StepKind::Cleanup, "", async {
            // Before anything of the pod's directory is touched: what lies behind these is not the pod's.
            deps.plugins.unmount(&uid).await.map_err(|e| e.chain())?;
            let volumes = if gone { host.remove_pod_dir(&uid).await } else { host.unmount_volumes(&uid).await };
            volumes.map_err(|e| e.chain())
        })
        .await?;
        if self.deps.settings.cgroups_per_qos {
            self.step(StepKind::RemoveCgroup, "", async { host.remove_pod_cgroup(&uid).await.map_err(|e| e.chain()) })
                .await?;
        }
        if gone || makes_room {
            let (namespace, name) = {
                let view = self.entry.view();
                (view.namespace.clone(), view.name.clone())
            };
            host.remove_pod_logs(&namespace, &name, &uid).await.map_err(|e| e.chain())?;
        }
        if !gone && let Err(reason) = &removed {
            // It is tried again when the pod goes.
            self.note_failure("clean up", reason);
        }
        if gone {
            if let Err(reason) = removed {
                self.not_removed += 1;
                if self.ending == Some(EndReason::Orphan) || self.not_removed < REMOVALS {
                    return Err(reason);
                }
                warn!(pod = self.name(), uid = %uid, err = reason, "The runtime keeps what is left of the pod");
            }
            self.account(None);
            self.entry.mark(StepKind::Gone, "", StepResult::Done, self.deps.clock.now());
            info!(pod = self.name(), uid = %uid, "Pod is gone");
        }
        Ok(())
    }
}
