//! Figures for those who ask: the node's settings for [`stats`], and its answers in the server's terms.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use config::{Flags, KubeletConfiguration};
use cri::RuntimeReader;
use host::cgroup::CgroupLayout;
use host::fsx::FilesystemFigures;
use jiff::Timestamp;
use model::pod::PodUid;
use plugins::volumes::Volumes;
use pod::events::Events;
use pod::objects::PodObjects;
use pod::ports::error_chain;
use pod::registry::{Registry, WorkerState};
use stats::{ClaimedVolume, Claims, DriverFigures, GroupSettings, Settings, Stats, StatsError, StorageSettings};
use telemetry::metrics::{Metrics, WorkingPods};
use tracing::{info, warn};

use crate::node;
use crate::view::View;

/// Parts of the agent that figures are made of.
pub(crate) struct Parts {
    pub(crate) reader: Arc<dyn RuntimeReader>,
    pub(crate) objects: Arc<dyn PodObjects>,
    pub(crate) layout: CgroupLayout,
    /// Path of the group above all pods.
    pub(crate) kubepods: String,
    pub(crate) started: Timestamp,
    pub(crate) volumes: Volumes,
    pub(crate) events: Events,
    /// Gate CSIVolumeHealth: what drivers say of their volumes' health is shown.
    pub(crate) volume_health: bool,
}

/// Makes the source of figures; nothing is collected yet.
pub(crate) fn stats(
    config: &KubeletConfiguration,
    flags: &Flags,
    parts: Parts,
    node_name: &str,
    registry: &Arc<Registry>,
    metrics: &Arc<Metrics>,
) -> Arc<Stats> {
    let proc = PathBuf::from(node::PROC);
    let system = system_groups(config, flags, &parts.layout, &proc);
    let settings = Settings {
        node_name: node_name.to_owned(),
        groups: GroupSettings {
            layout: parts.layout,
            kubepods: parts.kubepods,
            proc,
            sys: PathBuf::from(node::SYS),
            system,
        },
        storage: StorageSettings { root: flags.root_dir().to_owned(), pod_logs: PathBuf::from(&config.pod_logs_dir) },
        // Not positive: volumes are not measured.
        volume_period: Duration::try_from(config.volume_stats_agg_period).ok().filter(|p| !p.is_zero()),
        node_root: PathBuf::from("/"),
        started: parts.started,
    };
    let claims = KnownClaims {
        registry: registry.clone(),
        objects: parts.objects,
        known: Mutex::default(),
        volumes: parts.volumes,
        events: parts.events,
        volume_health: parts.volume_health,
    };
    Arc::new(Stats::new(settings, parts.reader, Arc::new(claims), metrics.clone()))
}

/// The figures in the server's terms.
pub(crate) fn open(flags: &Flags, stats: Arc<Stats>, view: &View, metrics: &Arc<Metrics>) -> Arc<dyn serve::Figures> {
    let counts = Counts {
        registry: view.registry.clone(),
        root: flags.root_dir().to_owned(),
        joined: view.api.is_some(),
        metrics: metrics.clone(),
    };
    Arc::new(Shown { stats, counts: Arc::new(counts) })
}

/// The groups of the system, as the configuration names them; the kubelet's own is found when it does not.
fn system_groups(
    config: &KubeletConfiguration,
    flags: &Flags,
    layout: &CgroupLayout,
    proc: &Path,
) -> Vec<(&'static str, String)> {
    let named = |path: &str| (!path.is_empty()).then(|| path.to_owned());
    let own = named(&config.kubelet_cgroups).or_else(|| {
        layout
            .group_of(proc, std::process::id())
            .inspect_err(|e| info!(err = e.full(), "The kubelet's own cgroup is not known and not shown"))
            .ok()
    });
    let runtime = flags.runtime_cgroups().and_then(named);
    [("kubelet", own), ("runtime", runtime), ("misc", named(&config.system_cgroups))]
        .into_iter()
        .filter_map(|(name, path)| Some((name, path?)))
        .collect()
}

/// The claims of the pods that run here. Which volume a claim is bound to never changes while a pod uses it: it is asked for once.
struct KnownClaims {
    registry: Arc<Registry>,
    objects: Arc<dyn PodObjects>,
    known: Mutex<HashMap<String, Vec<ClaimedVolume>>>,
    volumes: Volumes,
    events: Events,
    volume_health: bool,
}

impl KnownClaims {
    /// Tells that a driver says that something is wrong with a volume.
    fn tell_health(&self, uid: &PodUid, spec_name: &str, message: &str) {
        let Some(pod) = self.registry.get(uid).and_then(|entry| entry.view().desired.clone()) else { return };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let claims = known.get(uid.as_str()).into_iter().flatten();
        let name = claims.into_iter().find(|c| c.persistent_volume == spec_name).map_or(spec_name, |c| &c.volume);
        self.events.pod_warning(&pod, "VolumeConditionAbnormal", &format!("Volume {name}: {message}"));
    }
}

#[async_trait]
impl Claims for KnownClaims {
    async fn claims(&self, pod_uid: &str) -> Vec<ClaimedVolume> {
        let uid = PodUid::new(pod_uid);
        let known = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|uid, _| self.registry.contains(&PodUid::new(uid.as_str())));
            known.get(pod_uid).cloned()
        };
        let Some(pod) = self.registry.get(&uid).and_then(|entry| entry.view().desired.clone()) else {
            return known.unwrap_or_default();
        };
        let mut found = known.unwrap_or_default();
        for volume in pod.spec().volumes.iter().flatten() {
            if found.iter().any(|c| c.volume == volume.name) {
                continue;
            }
            let Some(wanted) = decide::config::claims::claim_of(&pod, volume) else { continue };
            // One that is not bound yet, or whose server is away, is asked for the next time.
            let Ok(claim) = self.objects.claim(pod.namespace(), &wanted.name).await else { continue };
            if let Ok(bound) = decide::config::claims::bound_volume(&pod, &wanted, &claim) {
                found.push(ClaimedVolume {
                    volume: volume.name.clone(),
                    claim: wanted.name.clone(),
                    persistent_volume: bound,
                });
            }
        }
        if !found.is_empty() {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(pod_uid.to_owned(), found.clone());
        }
        found
    }

    async fn drivers(&self) -> HashMap<String, Vec<DriverFigures>> {
        let mut all = HashMap::new();
        for (uid, volumes) in self.volumes.figures().await {
            let mut of_pod = Vec::new();
            for told in volumes {
                let health = told.health.filter(|_| self.volume_health);
                if let Some(health) = health.as_ref().filter(|h| h.abnormal) {
                    self.tell_health(&uid, &told.spec_name, &health.message);
                }
                let fs = FilesystemFigures {
                    capacity: told.bytes.total,
                    available: told.bytes.available,
                    used: told.bytes.used,
                    inodes: told.inodes.total,
                    inodes_free: told.inodes.available,
                    inodes_used: told.inodes.used,
                };
                of_pod.push(DriverFigures {
                    volume: told.spec_name,
                    driver: told.driver,
                    at: told.at,
                    took: told.took,
                    fs,
                    abnormal: health.map(|h| h.abnormal),
                });
            }
            all.insert(uid.to_string(), of_pod);
        }
        all
    }
}

/// What of `/metrics` is counted when it is asked for: out of the table of pods and the root directory.
struct Counts {
    registry: Arc<Registry>,
    root: PathBuf,
    /// There is an API server.
    joined: bool,
    metrics: Arc<Metrics>,
}

impl Counts {
    /// Counts. Blocks on some directories.
    fn take(&self) {
        let mut working = WorkingPods::default();
        let (mut mirrored, mut ephemeral) = (0, 0);
        let mut volumes: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for entry in self.registry.all() {
            let view = entry.view();
            let counts = match &view.desired {
                Some(pod) if pod.is_static() => &mut working.desired_static,
                Some(_) => &mut working.desired,
                None => &mut working.runtime_only,
            };
            match view.state {
                WorkerState::Syncing => counts.sync += 1,
                WorkerState::Terminating => counts.terminating += 1,
                WorkerState::Terminated => counts.terminated += 1,
            }
            let Some(pod) = view.desired.clone() else { continue };
            let over = view.state == WorkerState::Terminated;
            drop(view);
            mirrored += usize::from(self.joined && pod.is_static());
            ephemeral += pod.ephemeral_containers().count();
            let dir = self.root.join("pods").join(entry.uid.as_str()).join("volumes");
            for volume in pod.spec().volumes.iter().flatten().filter(|_| !over) {
                let plugin = decide::volume_plugin::plugin_name(volume);
                let (wanted, there) = volumes.entry(plugin).or_default();
                *wanted += 1;
                // A claim's directory is named as its PersistentVolume, one of a replaced plugin as the disk, and hostPath has none.
                let made = match plugin {
                    "kubernetes.io/host-path" => true,
                    "kubernetes.io/local-volume" => dir.join("kubernetes.io~local-volume").is_dir(),
                    "kubernetes.io/csi" if volume.csi.is_none() => dir.join("kubernetes.io~csi").is_dir(),
                    _ => dir.join(plugin.replace('/', "~")).join(&volume.name).is_dir(),
                };
                *there += usize::from(made);
            }
        }
        let metrics = &self.metrics;
        metrics.working_pods(&working);
        metrics.mirror_pods.set(mirrored as f64);
        metrics.managed_ephemeral_containers.set(ephemeral as f64);
        metrics.beside.volumes(volumes.iter().map(|(plugin, (wanted, there))| (*plugin, *wanted, *there)));
        let files = |dir: &str| {
            let entries = std::fs::read_dir(self.root.join("image_manager").join(dir)).into_iter().flatten().flatten();
            entries.filter(|e| e.file_name().to_string_lossy().starts_with("sha256-")).count() as f64
        };
        metrics.beside.pulled_records.set(files("pulled"));
        metrics.beside.pull_intents.set(files("pulling"));
    }
}

/// [`Stats`] as the server wants it.
struct Shown {
    stats: Arc<Stats>,
    counts: Arc<Counts>,
}

fn why(e: &StatsError) -> String {
    let text = error_chain(e);
    warn!(err = text, "The figures of the node cannot be had");
    text
}

#[async_trait]
impl serve::Figures for Shown {
    async fn summary(&self, only_cpu_and_memory: bool) -> Result<Bytes, String> {
        self.stats.summary(only_cpu_and_memory).await.map(Bytes::from).map_err(|e| why(&e))
    }

    async fn cadvisor(&self) -> Result<Bytes, String> {
        self.stats.cadvisor().await.map_err(|e| why(&e))
    }

    async fn resource(&self) -> Bytes {
        Bytes::from(self.stats.resource().await)
    }

    async fn on_main_page(&self) -> String {
        let counts = self.counts.clone();
        if let Err(e) = tokio::task::spawn_blocking(move || counts.take()).await {
            warn!(err = %e, "Pods cannot be counted");
        }
        self.stats.logs_and_claims().await.unwrap_or_else(|e| {
            why(&e);
            String::new()
        })
    }
}
