//! Eviction: watches what the node runs short of, and when it does, wins it back: first from what belongs to nobody, then from pods, one after the other.
//!
//! ```text
//!   figures of the node ─▶ decide::eviction ─▶ pressures ─▶ conditions, admission
//!   kernel's notice ─▶ ▲          │
//!                      │          └─▶ dead containers, images ─▶ enough? ─▶ a pod's end, by its worker
//!                      └──────────────── 10 s, or when the pod has ended ◀──────────┘
//! ```
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`] wherever it waits: it only looks and asks. Inputs: the figures, time, the kernel's notice about
//! memory (no queue: each look reads everything anew). Deadlines: a look [`LOOK`], the figures of pods [`FIGURES`], what the node gives back
//! [`RECLAIM`], a pod's end [`END`]. A disk that does not answer: that look is left out and what was known stands. The dispatcher slow: the request for a
//! pod's end waits in its queue. While nothing is short, a look costs some reads of small files and a statfs for each file system that is watched; the
//! figures of pods are read only when one of them has to go.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use decide::eviction::{
    self, Disks, Look, Observations, PodUsage, Ranked, Reclaim, Resource, Settings, Shortage, Signal, State, Threshold,
    ThresholdError,
};
use decide::node::{NodeEvent, Pressures};
use model::pod::{DesiredPod, PodUid};
use pod::admit::AdmitHandle;
use pod::ends::{Disruption, EndPod, Failing, PodEnds};
use pod::events::Events;
use pod::registry::{Registry, WorkerState};
use telemetry::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::NodeEvents;

/// Between two looks while nothing happens.
const PERIOD: Duration = Duration::from_secs(10);
/// Looks that the kernel's notices ask for are at least this far apart.
const NOTICED: Duration = Duration::from_secs(1);
/// For a look at the node.
const LOOK: Duration = Duration::from_secs(8);
/// For the figures of all pods, their files included.
const FIGURES: Duration = Duration::from_secs(60);
/// For what the node can give back.
const RECLAIM: Duration = Duration::from_secs(120);
/// How long a pod's end is waited for before the node is looked at again.
const END: Duration = Duration::from_secs(30);
/// How often it is looked whether the pod has ended.
const END_LOOK: Duration = Duration::from_millis(250);

/// What is measured.
#[async_trait]
pub trait Figures: Send + Sync {
    /// How the disks are laid out.
    ///
    /// # Errors
    /// The runtime does not say where it keeps its files.
    async fn disks(&self) -> Result<Disks, String>;
    /// What is left of what these signals are about. What cannot be measured is left out.
    async fn node(&self, signals: &BTreeSet<Signal>) -> Observations;
    /// What each pod uses of a resource.
    ///
    /// # Errors
    /// Why it cannot be told.
    async fn pods(&self, resource: Resource) -> Result<HashMap<PodUid, PodUsage>, String>;
    /// Returns when the kernel says that there may be less memory left than one of these amounts (bytes, by signal); never, where it says no such
    /// thing.
    async fn memory_notice(&self, left: &[(Signal, i64)]);
}

/// What the node gives back before pods have to.
#[async_trait]
pub trait NodeReclaim: Send + Sync {
    /// Removes dead containers, those of pods that live on too.
    async fn reclaim_containers(&self);
    /// Removes every image that nobody uses, whatever its age.
    async fn reclaim_images(&self);
}

/// Who admits pods.
#[async_trait]
pub trait Admission: Send + Sync {
    /// From now on the node is under these pressures (`MemoryPressure`, …).
    async fn pressures(&self, pressures: Vec<String>);
}

#[async_trait]
impl Admission for AdmitHandle {
    async fn pressures(&self, pressures: Vec<String>) {
        Self::pressures(self, pressures).await;
    }
}

/// A node that gives nothing back.
#[derive(Clone, Copy, Debug, Default)]
pub struct NothingToReclaim;

#[async_trait]
impl NodeReclaim for NothingToReclaim {
    async fn reclaim_containers(&self) {}
    async fn reclaim_images(&self) {}
}

/// What is configured (KubeletConfiguration).
#[derive(Clone, Debug, Default)]
pub struct EvictionConfig {
    /// `evictionHard`.
    pub hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`.
    pub soft_grace: BTreeMap<String, Duration>,
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: BTreeMap<String, String>,
    /// `enforceNodeAllocatable` has `pods`.
    pub allocatable_enforced: bool,
    /// `evictionPressureTransitionPeriod`.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, s.
    pub max_pod_grace: i32,
    /// `kernelMemcgNotification`.
    pub kernel_notification: bool,
    /// Gate PodLevelResources.
    pub pod_level: bool,
}

impl EvictionConfig {
    fn thresholds(&self, disks: Disks) -> Result<Vec<Threshold>, ThresholdError> {
        let settings = Settings {
            hard: &self.hard,
            soft: &self.soft,
            soft_grace: &self.soft_grace,
            minimum_reclaim: &self.minimum_reclaim,
            allocatable_enforced: self.allocatable_enforced,
        };
        eviction::thresholds(&settings, disks)
    }
}

/// What the task works with.
pub struct EvictionPorts {
    /// What is measured.
    pub figures: Arc<dyn Figures>,
    /// What the node gives back.
    pub reclaim: Arc<dyn NodeReclaim>,
    /// Who is told of pressures.
    pub admit: Arc<dyn Admission>,
    /// The table of pods.
    pub registry: Arc<Registry>,
    /// Events about pods.
    pub events: Events,
    /// Figures about this process.
    pub metrics: Arc<Metrics>,
}

/// Events of a node that nobody listens to: without an API server.
struct Unheard;

impl NodeEvents for Unheard {
    fn event(&self, _: &NodeEvent) {}
}

/// See the module.
pub struct Eviction {
    config: EvictionConfig,
    ports: EvictionPorts,
    /// None: not known yet; only what does not depend on it is watched.
    disks: Option<Disks>,
    thresholds: Vec<Threshold>,
    state: State,
    began: Instant,
    pressures: watch::Sender<Pressures>,
    /// Pods that were asked to end.
    asked: HashMap<PodUid, Asked>,
    /// The disks cannot be told apart, for a reason that was logged.
    failing: Option<String>,
    node_events: Arc<dyn NodeEvents>,
}

/// A pod that was asked to end.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Until then it may take.
    until: Instant,
    /// It got no more than a moment.
    hard: bool,
}

/// What a look found.
struct Seen {
    observations: Observations,
    at: Instant,
    look: Look,
}

impl Eviction {
    /// Looks at the node for the first time, so that what its status first says is true. Takes no longer than [`LOOK`].
    ///
    /// # Errors
    /// A threshold that cannot be.
    pub async fn start(config: EvictionConfig, ports: EvictionPorts) -> Result<Self, ThresholdError> {
        let mut thresholds = config.thresholds(Disks::default())?;
        thresholds.retain(|t| !on_runtimes_disks(t.signal));
        let mut new = Self {
            config,
            ports,
            disks: None,
            thresholds,
            state: State::default(),
            began: Instant::now(),
            pressures: watch::Sender::default(),
            asked: HashMap::new(),
            failing: None,
            node_events: Arc::new(Unheard),
        };
        new.look().await;
        Ok(new)
    }

    /// What the node is short of, from now on.
    pub fn pressures(&self) -> watch::Receiver<Pressures> {
        self.pressures.subscribe()
    }

    /// Where events about the node go; without it nobody hears them.
    #[must_use]
    pub fn with_node_events(self, node_events: Arc<dyn NodeEvents>) -> Self {
        Self { node_events, ..self }
    }

    /// Watches until it is dropped. `ends`: who ends pods.
    pub async fn run(mut self, ends: PodEnds) {
        if self.config.hard.is_empty() && self.config.soft.is_empty() {
            info!("No eviction thresholds are set, pods are not evicted for want of resources");
            return;
        }
        loop {
            match self.look().await {
                Some(Seen { observations, at, look: Look { shortage: Some(shortage), .. } }) => {
                    match self.relieve(&shortage, &observations, at, &ends).await {
                        Some(uid) => self.wait_for_end(&uid).await,
                        // Nothing more can be done now, however often the kernel tells.
                        None => tokio::time::sleep(PERIOD).await,
                    }
                }
                _ => self.wait().await,
            }
        }
    }

    /// Waits for the next look.
    async fn wait(&self) {
        let began = Instant::now();
        let marks: Vec<(Signal, i64)> = match self.config.kernel_notification {
            true => self.marks(),
            false => Vec::new(),
        };
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = self.ports.figures.memory_notice(&marks), if !marks.is_empty() => {
                debug!("The kernel tells that memory may be short");
                tokio::time::sleep_until(began + NOTICED).await;
            }
        }
    }

    /// How much memory may be left before the kernel is to tell. A share of memory is of the capacity that the look read; here the amount is what counts.
    fn marks(&self) -> Vec<(Signal, i64)> {
        let of_memory = self.thresholds.iter().filter(|t| t.signal.resource() == Resource::Memory);
        let amount = |t: &Threshold| {
            let capacity = self.state.capacity(t.signal)?;
            Some((t.signal, t.value.of(capacity).value()))
        };
        of_memory.filter_map(amount).collect()
    }

    /// Looks at the node and tells its pressures. None: it could not be looked at.
    async fn look(&mut self) -> Option<Seen> {
        self.find_disks().await;
        let observations = self.observe().await?;
        let at = Instant::now();
        let now = at.duration_since(self.began);
        let look = self.state.look(&self.thresholds, &observations, self.config.transition, now);
        self.tell(look.pressures).await;
        Some(Seen { observations, at, look })
    }

    async fn observe(&self) -> Option<Observations> {
        let signals: BTreeSet<Signal> = self.thresholds.iter().map(|t| t.signal).collect();
        if signals.is_empty() {
            return Some(Observations::new());
        }
        let looked = timeout(LOOK, self.ports.figures.node(&signals)).await;
        looked.inspect_err(|_| warn!("Eviction manager: the node's figures take too long, and are left out")).ok()
    }

    /// Finds out what is on which disk; once, for it does not change under a running node.
    async fn find_disks(&mut self) {
        if self.disks.is_some() {
            return;
        }
        let found = timeout(LOOK, self.ports.figures.disks()).await;
        match found.unwrap_or_else(|_| Err("the runtime does not answer".to_owned())) {
            Ok(disks) => {
                debug!(dedicated = disks.dedicated_images, split = disks.split_layers, "FileSystem detection");
                // The same configuration was read before, with another layout.
                if let Ok(thresholds) = self.config.thresholds(disks) {
                    self.thresholds = thresholds;
                    self.state = State::default();
                }
                self.disks = Some(disks);
                self.failing = None;
            }
            Err(reason) => {
                if self.failing.as_ref() != Some(&reason) {
                    warn!(err = reason, "Eviction manager: failed to get HasDedicatedImageFs");
                }
                self.failing = Some(reason);
            }
        }
    }

    /// Tells a change of pressures: to admission first, so that no pod is admitted that the conditions would keep away.
    async fn tell(&self, pressures: Pressures) {
        let before = *self.pressures.borrow();
        if before == pressures {
            return;
        }
        let names =
            [("MemoryPressure", pressures.memory), ("DiskPressure", pressures.disk), ("PIDPressure", pressures.pid)];
        let names: Vec<String> = names.iter().filter(|(_, on)| *on).map(|(name, _)| (*name).to_owned()).collect();
        info!(pressures = ?names, "The node's pressures changed");
        self.ports.admit.pressures(names).await;
        self.pressures.send_replace(pressures);
    }

    /// Wins back what is short. The pod that was asked to end for it, if one was.
    async fn relieve(
        &mut self,
        shortage: &Shortage,
        observations: &Observations,
        at: Instant,
        ends: &PodEnds,
    ) -> Option<PodUid> {
        let signal = shortage.threshold.signal;
        let resource = signal.resource();
        let disks = self.disks.unwrap_or_default();
        // A pod that is on its way out already is waited for before another one must go.
        let hard = shortage.threshold.is_hard();
        if let Some(uid) = self.under_way(hard) {
            return Some(uid);
        }
        info!(resource = resource.as_str(), signal = signal.as_str(), "Eviction manager: attempting to reclaim");
        self.node_events.event(&NodeEvent::eviction_threshold_met(eviction::reclaiming(resource)));
        let reclaim = disks.reclaim(signal);
        if !reclaim.is_empty() && self.reclaim(reclaim).await {
            info!(
                resource = resource.as_str(),
                "Eviction manager: able to reduce resource pressure without evicting pods."
            );
            return None;
        }
        let pods = self.candidates();
        info!(resource = resource.as_str(), "Eviction manager: must evict pod(s) to reclaim");
        if pods.is_empty() {
            warn!("Eviction manager: eviction thresholds have been met, but no pods are active to evict");
            return None;
        }
        let usage = match timeout(FIGURES, self.ports.figures.pods(resource)).await {
            Ok(Ok(usage)) => usage,
            // By their priority and requests alone, rather than not at all.
            Ok(Err(reason)) => {
                warn!(err = reason, "Eviction manager: failed to get summary stats");
                HashMap::new()
            }
            Err(_) => {
                warn!("Eviction manager: the pods' figures take too long, and are left out");
                HashMap::new()
            }
        };
        let ranked = eviction::rank(&pods, &usage, signal, disks, self.config.pod_level);
        let names: Vec<String> = ranked.iter().map(|r| r.pod.full_name()).collect();
        info!(pods = ?names, "Eviction manager: pods ranked for eviction");
        for threshold in &shortage.met {
            self.ports.metrics.eviction_stats_age(threshold.signal.as_str(), at.elapsed());
        }
        let spent = |asked: &Asked| asked.hard || !hard;
        let Some(chosen) = ranked.into_iter().find(|r| !self.asked.get(r.pod.uid()).is_some_and(spent)) else {
            warn!("Eviction manager: unable to evict any pods from the node");
            return None;
        };
        Some(self.evict(&chosen, shortage, observations, ends).await)
    }

    /// The pod that was asked to end, as urgently as need be, and has time left for it. One that ended is forgotten, one that had its time is passed
    /// over from now on.
    fn under_way(&mut self, hard: bool) -> Option<PodUid> {
        let registry = &self.ports.registry;
        let gone = |uid: &PodUid| registry.get(uid).is_none_or(|entry| entry.view().finished);
        self.asked.retain(|uid, _| !gone(uid));
        let now = Instant::now();
        let waited_for = |asked: &Asked| asked.until > now && (asked.hard || !hard);
        self.asked.iter().find(|(_, asked)| waited_for(asked)).map(|(uid, _)| uid.clone())
    }

    /// Pods of which something may run.
    fn candidates(&self) -> Vec<DesiredPod> {
        let all = self.ports.registry.all();
        let active = all.iter().filter_map(|entry| {
            let view = entry.view();
            let over = view.status.phase.as_deref().is_some_and(decide::status::is_terminal);
            view.desired.clone().filter(|_| view.state != WorkerState::Terminated && !over)
        });
        active.collect()
    }

    /// Takes back what belongs to nobody; true when that was enough.
    async fn reclaim(&self, what: Reclaim) -> bool {
        let reclaimed = timeout(RECLAIM, async {
            if what.containers {
                self.ports.reclaim.reclaim_containers().await;
            }
            if what.images {
                self.ports.reclaim.reclaim_images().await;
            }
        });
        if reclaimed.await.is_err() {
            warn!("Eviction manager: what nobody uses is not removed in time");
        }
        match self.observe().await {
            Some(observations) => eviction::relieved(&self.thresholds, &observations),
            None => false,
        }
    }

    async fn evict(
        &mut self,
        chosen: &Ranked<'_>,
        shortage: &Shortage,
        observations: &Observations,
        ends: &PodEnds,
    ) -> PodUid {
        let pod = chosen.pod;
        let grace = eviction::grace(&shortage.threshold, pod, self.config.max_pod_grace);
        let words = eviction::words(chosen, shortage, observations, self.config.pod_level);
        let signal = shortage.threshold.signal.as_str();
        warn!(pod = pod.full_name(), uid = %pod.uid(), signal, grace, "Evicting pod: {}", words.message);
        self.ports.events.pod_annotated(pod, &words.annotations, eviction::REASON, &words.message);
        self.ports.metrics.evicted(signal);
        let failing = Failing {
            reason: eviction::REASON.to_owned(),
            message: words.message.clone(),
            disruption: Some(Disruption {
                reason: eviction::TERMINATION_BY_KUBELET.to_owned(),
                message: words.message,
            }),
        };
        ends.end(EndPod { uid: pod.uid().clone(), failing, grace: Some(grace) }).await;
        let time = Duration::from_secs(u64::try_from(grace).unwrap_or_default()) + END;
        let asked = Asked { until: Instant::now() + time, hard: shortage.threshold.is_hard() };
        self.asked.insert(pod.uid().clone(), asked);
        pod.uid().clone()
    }

    /// Waits until nothing of the pod stands any more, at most [`END`].
    async fn wait_for_end(&mut self, uid: &PodUid) {
        let ended = timeout(END, async {
            loop {
                let entry = self.ports.registry.get(uid);
                if entry.is_none_or(|entry| entry.view().finished) {
                    return;
                }
                tokio::time::sleep(END_LOOK).await;
            }
        });
        match ended.await {
            Ok(()) => {
                self.asked.remove(uid);
                info!(%uid, "Eviction manager: pods successfully cleaned up");
            }
            Err(_) => warn!(%uid, "Eviction manager: timed out waiting for pods to be cleaned up"),
        }
    }
}

/// Which disk this is about is the runtime's to say.
fn on_runtimes_disks(signal: Signal) -> bool {
    let of_runtime = [
        Signal::ImageFsAvailable,
        Signal::ImageFsInodesFree,
        Signal::ContainerFsAvailable,
        Signal::ContainerFsInodesFree,
    ];
    of_runtime.contains(&signal)
}

#[cfg(test)]
mod tests;
