//! What eviction goes by on this host: the node's memory, disks and processes, and the kernel's word about memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use config::{Flags, Gate, Gates, KubeletConfiguration};
use cri::RuntimeReader;
use decide::eviction::{Disks, Observation, Observations, PodUsage, Resource, Signal};
use futures::future::select_all;
use host::cgroup::{CgroupLayout, Detail, MemoryFigures};
use host::fsx::FilesystemFigures;
use host::small_files::SmallFiles;
use model::pod::PodUid;
use node::eviction::{EvictionConfig, Figures, NodeReclaim};
use node::images::ImageGc;
use pod::ports::error_chain;
use pod::registry::Registry;
use stats::Stats;
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

/// How long the workers have to remove dead containers.
const CONTAINERS: Duration = Duration::from_secs(30);

/// What is configured.
pub(crate) fn config(config: &KubeletConfiguration, flags: &Flags, gates: &Gates) -> EvictionConfig {
    let graces = config.eviction_soft_grace_period.iter();
    EvictionConfig {
        hard: config.eviction_hard.clone(),
        soft: config.eviction_soft.clone(),
        // Validated before.
        soft_grace: graces.filter_map(|(k, v)| Some((k.clone(), config::duration::parse(v).ok()?))).collect(),
        minimum_reclaim: config.eviction_minimum_reclaim.clone(),
        allocatable_enforced: crate::node::enforces_pods(config) && !flags.allocatable_ignores_eviction(),
        transition: config.eviction_pressure_transition_period,
        max_pod_grace: config.eviction_max_pod_grace_period,
        kernel_notification: config.kernel_memcg_notification,
        pod_level: gates.enabled(Gate::PodLevelResources),
    }
}

/// Where things stand on this host.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// `--root-dir`.
    pub(crate) root: PathBuf,
    /// procfs.
    pub(crate) proc: PathBuf,
    /// The control groups.
    pub(crate) layout: CgroupLayout,
    /// Path of the group above all pods; None: there is none of the pods' own.
    pub(crate) kubepods: Option<String>,
    /// Gate KubeletSeparateDiskGC: writable layers may be on another disk than the images.
    pub(crate) split_disks: bool,
}

/// Where the runtime keeps its files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RuntimeDisks {
    images: PathBuf,
    layers: PathBuf,
}

/// See the module.
pub(crate) struct NodeFigures {
    places: Places,
    reader: Arc<dyn RuntimeReader>,
    stats: Arc<Stats>,
    /// None: not known yet.
    runtime: Mutex<Option<RuntimeDisks>>,
    /// A reading that was given up by who asked and still waits for its disk: there is never more than one.
    reading: tokio::sync::Mutex<Option<JoinHandle<Observations>>>,
    /// It was said that the kernel gives no notice.
    no_notice: AtomicBool,
}

impl NodeFigures {
    pub(crate) fn new(places: Places, reader: Arc<dyn RuntimeReader>, stats: Arc<Stats>) -> Self {
        Self {
            places,
            reader,
            stats,
            runtime: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            no_notice: AtomicBool::new(false),
        }
    }

    fn runtime(&self) -> Option<RuntimeDisks> {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn refused(&self, e: &host::Failed) {
        if !self.no_notice.swap(true, Ordering::Relaxed) {
            info!(err = e.full(), "Eviction manager: failed to create memory threshold notifier");
        }
    }
}

#[async_trait]
impl Figures for NodeFigures {
    async fn disks(&self) -> Result<Disks, String> {
        let info = self.reader.image_fs_info().await.map_err(|e| error_chain(&e))?;
        let first = |all: &[cri_api::v1::FilesystemUsage]| {
            all.first().and_then(|fs| fs.fs_id.as_ref()).map(|id| PathBuf::from(&id.mountpoint))
        };
        let images = first(&info.image_filesystems).ok_or("the runtime names no file system of images")?;
        // A runtime that says nothing of its layers keeps them with the images.
        let layers = first(&info.container_filesystems).unwrap_or_else(|| images.clone());
        let split_layers = layers != images;
        if split_layers && !self.places.split_disks {
            return Err("KubeletSeparateDiskGC is turned off but we still have a split filesystem".to_owned());
        }
        let (root, of_images) = (self.places.root.clone(), images.clone());
        let dedicated =
            tokio::task::spawn_blocking(move || -> host::Result<bool> { Ok(device(&root)? != device(&of_images)?) });
        let dedicated_images = dedicated.await.map_err(|e| error_chain(&e))?.map_err(|e| e.full())?;
        *self.runtime.lock().unwrap_or_else(PoisonError::into_inner) = Some(RuntimeDisks { images, layers });
        Ok(Disks { dedicated_images, split_layers })
    }

    async fn node(&self, signals: &BTreeSet<Signal>) -> Observations {
        let mut slot = self.reading.lock().await;
        if let Some(earlier) = slot.as_mut() {
            // What it found is too old, but while it waits another one would wait too.
            let _ = earlier.await;
        }
        let (places, runtime, signals) = (self.places.clone(), self.runtime(), signals.clone());
        let reading = slot.insert(tokio::task::spawn_blocking(move || read(&places, runtime.as_ref(), &signals)));
        let found = reading.await;
        *slot = None;
        found.inspect_err(|e| warn!(err = %e, "The node's figures cannot be read")).unwrap_or_default()
    }

    async fn pods(&self, resource: Resource) -> Result<HashMap<PodUid, PodUsage>, String> {
        let disks = matches!(resource, Resource::EphemeralStorage | Resource::Inodes);
        let pods = self.stats.pods(disks).await.map_err(|e| error_chain(&e))?;
        Ok(pods.into_iter().map(|(uid, usage)| (PodUid::new(uid), usage)).collect())
    }

    async fn memory_notice(&self, left: &[(Signal, i64)]) {
        let (places, left) = (self.places.clone(), left.to_vec());
        let marks = tokio::task::spawn_blocking(move || marks(&places, &left)).await.unwrap_or_default();
        let notices = marks.into_iter().filter_map(|(path, usage)| {
            let notice = self.places.layout.memory_notice(&path, usage, &self.places.proc);
            notice.inspect_err(|e| self.refused(e)).ok()
        });
        let notices: Vec<_> = notices.collect();
        if notices.is_empty() {
            return std::future::pending().await;
        }
        let waits = notices.iter().map(|notice| Box::pin(notice.next()));
        if let Err(e) = select_all(waits).await.0 {
            self.refused(&e);
            std::future::pending::<()>().await;
        }
    }
}

/// What nobody uses: dead containers, by the workers of their pods, and images.
pub(crate) struct Unused {
    pub(crate) registry: Arc<Registry>,
    pub(crate) images: ImageGc,
}

#[async_trait]
impl NodeReclaim for Unused {
    async fn reclaim_containers(&self) {
        let late = self.registry.remove_unused(CONTAINERS).await;
        if late > 0 {
            warn!(pods = late, "Eviction manager: dead containers are not removed in time");
        }
    }

    async fn reclaim_images(&self) {
        match self.images.remove_unused().await {
            Ok(bytes) => info!(bytes, "Removed images that nobody uses"),
            Err(reason) => {
                info!(err = reason, "Eviction manager: unexpected error when attempting to reduce resource pressure");
            }
        }
    }
}

fn device(path: &Path) -> host::Result<u64> {
    let found = std::fs::metadata(path);
    found.map(|m| m.dev()).map_err(|e| host::Failed::new(format!("look at {}", path.display()), e))
}

/// Reads what is left. Blocks as long as a statfs does.
fn read(places: &Places, runtime: Option<&RuntimeDisks>, signals: &BTreeSet<Signal>) -> Observations {
    let mut found = Observations::new();
    let mut disks: BTreeMap<PathBuf, Option<FilesystemFigures>> = BTreeMap::new();
    let mut disk = |path: &Path| {
        let asked = || host::fsx::filesystem(path).inspect_err(|e| warn!(err = e.full(), "A disk cannot be measured"));
        *disks.entry(path.to_owned()).or_insert_with(|| asked().ok())
    };
    for signal in signals {
        let seen = match signal {
            Signal::MemoryAvailable => node_memory(places).map(|(total, m)| left(total, m.working_set)),
            Signal::AllocatableMemoryAvailable => pods_memory(places).map(|(total, m)| left(total, m.working_set)),
            Signal::NodeFsAvailable => disk(&places.root).map(bytes),
            Signal::NodeFsInodesFree => disk(&places.root).and_then(inodes),
            Signal::ImageFsAvailable => runtime.and_then(|r| disk(&r.images)).map(bytes),
            Signal::ImageFsInodesFree => runtime.and_then(|r| disk(&r.images)).and_then(inodes),
            Signal::ContainerFsAvailable => runtime.and_then(|r| disk(&r.layers)).map(bytes),
            Signal::ContainerFsInodesFree => runtime.and_then(|r| disk(&r.layers)).and_then(inodes),
            Signal::PidAvailable => {
                let read = || Ok((host::proc::max_pids(&places.proc)?, host::proc::used_pids(&places.proc)?));
                let told = |e: &host::Failed| warn!(err = e.full(), "The node's processes cannot be counted");
                read().inspect_err(told).ok().map(|(max, used)| left(max, used))
            }
        };
        found.extend(seen.map(|seen| (*signal, seen)));
    }
    debug!(?found, "Eviction manager: observations");
    found
}

fn whole(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn left(of: u64, used: u64) -> Observation {
    Observation { available: whole(of.saturating_sub(used)), capacity: whole(of) }
}

fn bytes(fs: FilesystemFigures) -> Observation {
    Observation { available: whole(fs.available), capacity: whole(fs.capacity) }
}

/// None: the file system does not count them.
fn inodes(fs: FilesystemFigures) -> Option<Observation> {
    (fs.inodes > 0).then(|| Observation { available: whole(fs.inodes_free), capacity: whole(fs.inodes) })
}

fn group(places: &Places, path: &str) -> Option<MemoryFigures> {
    let read = places.layout.figures(path, &places.proc, Detail::Usage, &mut SmallFiles::default());
    read.inspect_err(|e| warn!(err = e.full(), group = path, "A control group cannot be read")).ok()??.memory
}

/// The node's memory, and what of it is in use.
fn node_memory(places: &Places) -> Option<(u64, MemoryFigures)> {
    let total = host::proc::memory(&places.proc);
    let total = total.inspect_err(|e| warn!(err = e.full(), "The node's memory cannot be read")).ok()?.total;
    Some((total, group(places, "/")?))
}

/// The limit of all pods together, and what of it is in use.
fn pods_memory(places: &Places) -> Option<(u64, MemoryFigures)> {
    let memory = group(places, places.kubepods.as_deref()?)?;
    Some((memory.limit?, memory))
}

/// The group and its usage, page cache included, at which so much is left.
fn marks(places: &Places, left: &[(Signal, i64)]) -> Vec<(String, u64)> {
    let mark = |(signal, left): &(Signal, i64)| {
        let (path, (total, memory)) = match signal {
            Signal::MemoryAvailable => ("/".to_owned(), node_memory(places)?),
            Signal::AllocatableMemoryAvailable => (places.kubepods.clone()?, pods_memory(places)?),
            _ => return None,
        };
        let idle = memory.usage.saturating_sub(memory.working_set);
        Some((path, total.saturating_sub(u64::try_from(*left).ok()?).saturating_add(idle)))
    };
    left.iter().filter_map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Option<Places> {
        let proc = PathBuf::from("/proc");
        let layout = CgroupLayout::detect(Path::new("/sys/fs/cgroup"), &proc).ok()?;
        Some(Places { root: "/".into(), proc, layout, kubepods: None, split_disks: true })
    }

    #[test]
    fn this_host_has_some_left_of_everything() {
        let Some(places) = places() else { return };
        let runtime = RuntimeDisks { images: "/proc/self".into(), layers: "/".into() };
        let found = read(&places, Some(&runtime), &Signal::ALL.into_iter().collect());
        let signals: Vec<_> = found.keys().map(|s| s.as_str()).collect();
        for wanted in
            ["memory.available", "nodefs.available", "containerfs.available", "pid.available", "imagefs.available"]
        {
            assert!(signals.contains(&wanted), "{signals:?}");
        }
        // There is no group of pods here; a file system without inodes is not short of them.
        assert!(
            !signals.contains(&"allocatableMemory.available") && !signals.contains(&"imagefs.inodesFree"),
            "{signals:?}"
        );
        for (signal, seen) in found.iter().filter(|(s, _)| s.resource() != Resource::EphemeralStorage) {
            assert!(seen.available > 0 && seen.available <= seen.capacity, "{signal:?} {seen:?}");
        }
        let read_again = read(&places, None, &Signal::ALL.into_iter().collect());
        assert!(!read_again.contains_key(&Signal::ImageFsAvailable));
    }

    #[test]
    fn the_mark_is_where_the_threshold_is_crossed() {
        let Some(places) = places() else { return };
        let Some((total, _)) = node_memory(&places) else { return };
        let found = marks(&places, &[(Signal::MemoryAvailable, 100 << 20), (Signal::AllocatableMemoryAvailable, 1)]);
        assert_eq!(found.len(), 1);
        assert!(found[0].0 == "/" && found[0].1 >= total - (100 << 20), "{found:?} {total}");
    }
}
