//! The outside as values: clock, randomness, tasks and the host. Rooms take these, so that the simulated node can put its own in.
//!
//! The runtime's ports are [`cri::port::RuntimeReader`] and [`cri::port::RuntimeMutator`].

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use decide::admission::Refusal;
use decide::config::DeviceFacts;
use decide::config::claims::ClaimedVolume;
use decide::config::objects::VolumeFiles;
use decide::csi::CsiVolume;
use decide::eviction::LocalUsage;
use jiff::{SignedDuration, Timestamp};
use model::api::ResourceStatus;
use model::cgroup::{CgroupName, CgroupResources};
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::registry::PodEntry;

/// Wall time. Waiting always goes through `tokio::time`, so that a paused tokio clock moves both.
#[derive(Clone, Debug)]
pub struct Clock(ClockKind);

#[derive(Clone, Debug)]
enum ClockKind {
    System,
    Virtual { base: Arc<Mutex<Timestamp>>, start: tokio::time::Instant },
}

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self(ClockKind::System)
    }

    /// A clock that shows `base` now and moves with tokio's clock only.
    pub fn virtual_from(base: Timestamp) -> Self {
        Self(ClockKind::Virtual { base: Arc::new(Mutex::new(base)), start: tokio::time::Instant::now() })
    }

    /// What time it is.
    pub fn now(&self) -> Timestamp {
        match &self.0 {
            ClockKind::System => Timestamp::now(),
            ClockKind::Virtual { base, start } => {
                let passed = SignedDuration::try_from(start.elapsed()).unwrap_or(SignedDuration::ZERO);
                let base = *base.lock().unwrap_or_else(PoisonError::into_inner);
                base.saturating_add(passed).unwrap_or(base)
            }
        }
    }

    /// Sets a virtual clock forward or back, as an administrator or NTP does; tokio's clock goes on as it was. Clones are the same clock.
    pub fn jump(&self, by: SignedDuration) {
        if let ClockKind::Virtual { base, .. } = &self.0 {
            let mut base = base.lock().unwrap_or_else(PoisonError::into_inner);
            *base = base.saturating_add(by).unwrap_or(*base);
        }
    }

    /// How long from now until `at`; zero when it is past.
    pub fn until(&self, at: Timestamp) -> Duration {
        Duration::try_from(at.duration_since(self.now())).unwrap_or(Duration::ZERO)
    }
}

/// Randomness from one seed.
#[derive(Clone, Debug)]
pub struct Random(Arc<Mutex<SmallRng>>);

impl Random {
    /// Seeded by the operating system.
    pub fn from_os() -> Self {
        Self(Arc::new(Mutex::new(SmallRng::from_os_rng())))
    }

    /// Seeded; the same seed gives the same numbers.
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(SmallRng::seed_from_u64(seed))))
    }

    /// `base` times a factor between 1 and `1 + spread`.
    pub fn jitter(&self, base: Duration, spread: f64) -> Duration {
        base.mul_f64(1.0 + self.unit() * spread)
    }

    /// A number in 0..1.
    pub fn unit(&self) -> f64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).random()
    }

    /// Eight random hex digits (termination log names).
    pub fn hex8(&self) -> String {
        let n: u32 = self.0.lock().unwrap_or_else(PoisonError::into_inner).random();
        format!("{n:08x}")
    }
}

/// Where tasks are started: all of them end when `stop` is cancelled, and a drain can wait for them.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    /// Starts a task.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(task);
    }

    /// Starts a task that is dropped where it waits when the signal comes.
    pub fn spawn_until_stop(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.spawn(async move {
            tokio::select! { biased; () = stop.cancelled() => {}, () = task => {} }
        });
    }

    /// How many tasks run.
    pub fn count(&self) -> usize {
        self.tracker.len()
    }

    /// The signal that ends every task.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Signals all tasks and waits for them until the deadline; false when some were still running then.
    pub async fn drain(&self, deadline: Duration) -> bool {
        self.stop.cancel();
        self.tracker.close();
        tokio::time::timeout(deadline, self.tracker.wait()).await.is_ok()
    }
}

/// Waits for the moment; for ever when there is none.
pub(crate) async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Something on the host could not be done.
#[derive(Debug, thiserror::Error)]
#[error("{action}")]
pub struct HostError {
    /// What was attempted, with names and paths.
    pub action: String,
    /// Why it failed.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl HostError {
    /// An error with its cause.
    pub fn new(action: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { action: action.into(), source: source.into() }
    }

    /// What was attempted and the chain of reasons, in one line.
    pub fn chain(&self) -> String {
        error_chain(self)
    }
}

/// An error and its sources joined by `: `.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        let more = e.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = e.source();
    }
    text
}

/// The result of a host call.
pub type HostResult<T> = Result<T, HostError>;

/// A volume that stands ready for containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedVolume {
    /// Path on the host.
    pub host_path: PathBuf,
    /// True when every mount of it must be read-only (configMap, secret, projected, downwardAPI, a claim used read-only).
    pub read_only: bool,
    /// Group that containers need to use it.
    pub gid: Option<i64>,
    /// It is a block device: `host_path` is a link to it.
    pub device: bool,
    /// Name of the PersistentVolume behind a claim, or of the volume as its driver has it: paths on the node that Go names by it must be found
    /// by it.
    pub spec_name: Option<String>,
    /// Its files are the pod's, and want the SELinux label of its containers.
    pub relabel: bool,
}

impl MountedVolume {
    /// Its name in paths; `name`: that in the pod.
    pub fn dir_name(&self, name: &str) -> String {
        self.spec_name.as_deref().unwrap_or(name).replace('/', "~")
    }

    /// A volume at this path that everybody may use.
    pub fn at(host_path: PathBuf) -> Self {
        Self { host_path, read_only: false, gid: None, device: false, spec_name: None, relabel: false }
    }
}

/// The volumes of one pod by volume name.
pub type MountedVolumes = BTreeMap<String, MountedVolume>;

/// What was decided about a pod's volumes before they are made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VolumePayloads {
    /// What volumes of files (configMap, secret, projected, downwardAPI) show to containers, by volume name.
    pub files: BTreeMap<String, VolumeFiles>,
    /// Sizes of memory-backed volumes in bytes, by volume name; without one the kernel's default holds.
    pub memory_sizes: BTreeMap<String, u64>,
    /// What is behind claims, by volume name.
    pub claimed: BTreeMap<String, ClaimedVolume>,
    /// Volumes that are left out: what they show could not be had. One that stands from before stays as it is.
    pub left_out: BTreeSet<String>,
}

/// How the making of a pod's volumes went: each volume on its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeResults {
    /// Those that stand ready.
    pub mounted: MountedVolumes,
    /// Messages of those that do not, by volume name: `MountVolume.SetUp failed for volume "v" : …`.
    pub failed: BTreeMap<String, String>,
}

/// How a volume of a plugin stands for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PluginVolume {
    /// It stands ready.
    Ready {
        /// Where; of a block volume, this is a link to the device.
        path: PathBuf,
        /// See [`MountedVolume::relabel`].
        relabel: bool,
    },
    /// It waits for something; the pod's worker is woken ([`PodEntry::objects_changed`]) when that comes.
    Waits(String),
    /// The last try failed, and another one will be made; the worker is woken then.
    Failed {
        /// Reason of the event.
        reason: &'static str,
        /// Its message.
        message: String,
        /// The pod was not told of this try yet.
        fresh: bool,
    },
    /// The node can take no more volumes of its driver: the pod cannot stay here.
    Exhausted,
}

/// Volumes of plugins. No call waits for a plugin longer than some seconds: what takes longer goes on behind it, and the worker is woken.
#[async_trait]
pub trait PluginVolumes: Send + Sync {
    /// Asks for a volume. `again`: it stood ready before; the plugin is asked only for what changes.
    async fn mount(&self, pod: &DesiredPod, entry: &Arc<PodEntry>, volume: &CsiVolume, again: bool) -> PluginVolume;
    /// Takes back everything that the pod has of plugins. An error is "not done yet": to be asked again.
    async fn unmount(&self, uid: &PodUid) -> HostResult<()>;
}

/// A node without plugins.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPlugins;

#[async_trait]
impl PluginVolumes for NoPlugins {
    async fn mount(&self, _: &DesiredPod, _: &Arc<PodEntry>, volume: &CsiVolume, _: bool) -> PluginVolume {
        let (name, driver) = (&volume.spec_name, &volume.driver);
        let message = format!(
            "MountVolume.SetUp failed for volume \"{name}\" : driver name {driver} not found in the list of registered CSI drivers"
        );
        PluginVolume::Failed { reason: "FailedMount", message, fresh: true }
    }

    async fn unmount(&self, _: &PodUid) -> HostResult<()> {
        Ok(())
    }
}

/// What the managers of devices, CPUs and memory gave a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grant {
    /// What plugins add to its request.
    pub devices: DeviceFacts,
    /// CPUs that it may run on (`cpuset_cpus`); empty: all.
    pub cpus: String,
    /// NUMA nodes that its memory may come from (`cpuset_mems`); empty: all.
    pub memory_nodes: String,
    /// Its CPUs are its own.
    pub exclusive_cpus: bool,
}

/// The managers of devices, CPUs and memory: their part of admission, and what a container gets of it. Calls that are not async never wait.
#[async_trait]
pub trait ResourceManagers: Send + Sync {
    /// True when the managers, and not the Node's figures, say how much of this resource there is.
    fn counts(&self, resource: &str) -> bool;
    /// True when [`ResourceManagers::allocate`] may have to wait for others.
    fn may_wait(&self, pod: &DesiredPod) -> bool;
    /// Gives the pod's containers what they ask for, and writes it down. `alive`: the pod runs since before this agent. What was given to a pod that is
    /// refused in the end is to be taken back with [`ResourceManagers::ended`].
    async fn allocate(&self, pod: &DesiredPod, alive: bool) -> Result<(), Refusal>;
    /// What the container has, just before it is created. The error is the waiting message.
    async fn container(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Result<Grant, String>;
    /// True when some container of the pod has CPUs of its own.
    fn exclusive_cpus(&self, uid: &PodUid) -> bool;
    /// True when this container has CPUs of its own.
    fn own_cpus(&self, uid: &PodUid, container: &str) -> bool;
    /// Health of a container's devices, for its status.
    fn health(&self, pod: &DesiredPod, container: &str) -> Vec<ResourceStatus>;
    /// Has the drivers of the pod's resource claims prepare them, before its sandbox is made. The error is an event's text.
    async fn prepare(&self, pod: &DesiredPod) -> Result<(), String>;
    /// True when the pod has claims that are to be taken back before it may be said to have ended.
    fn has_claims(&self, uid: &PodUid) -> bool;
    /// Has them taken back; nothing of the pod runs. An error is "not done yet": to be asked again.
    async fn unprepare(&self, uid: &PodUid) -> Result<(), String>;
    /// The pod runs nothing any more.
    fn ended(&self, uid: &PodUid);
    /// The pod is gone.
    fn release(&self, uid: &PodUid);
    /// Pods that are not among these are gone.
    fn retain(&self, known: &BTreeSet<PodUid>);
}

/// A node that gives nobody anything in particular.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoManagers;

#[async_trait]
impl ResourceManagers for NoManagers {
    fn counts(&self, _: &str) -> bool {
        false
    }

    fn may_wait(&self, _: &DesiredPod) -> bool {
        false
    }

    async fn allocate(&self, _: &DesiredPod, _: bool) -> Result<(), Refusal> {
        Ok(())
    }

    async fn container(&self, _: &DesiredPod, _: &ContainerEntry<'_>) -> Result<Grant, String> {
        Ok(Grant::default())
    }

    fn exclusive_cpus(&self, _: &PodUid) -> bool {
        false
    }

    fn own_cpus(&self, _: &PodUid, _: &str) -> bool {
        false
    }

    fn health(&self, _: &DesiredPod, _: &str) -> Vec<ResourceStatus> {
        Vec::new()
    }

    async fn prepare(&self, _: &DesiredPod) -> Result<(), String> {
        Ok(())
    }

    fn has_claims(&self, _: &PodUid) -> bool {
        false
    }

    async fn unprepare(&self, _: &PodUid) -> Result<(), String> {
        Ok(())
    }

    fn ended(&self, _: &PodUid) {}

    fn release(&self, _: &PodUid) {}

    fn retain(&self, _: &BTreeSet<PodUid>) {}
}

/// What one container needs on disk before it is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerPaths {
    /// The termination message file, made empty and writable.
    pub termination_log: Option<PathBuf>,
    /// The pod's hosts file.
    pub hosts_file: Option<PathBuf>,
    /// Bind targets of subPath mounts by index in `volumeMounts`.
    pub sub_paths: BTreeMap<usize, PathBuf>,
}

/// What [`PodHost::prepare_container`] is to make.
#[derive(Clone, Debug)]
pub struct ContainerFiles {
    /// A fresh name for the termination message file.
    pub termination_log_name: String,
    /// Content of the pod's hosts file; None: the container brings its own or has no address.
    pub hosts: Option<Vec<u8>>,
    /// Expanded subPath by index in `volumeMounts`, and the volume that it is in.
    pub sub_paths: BTreeMap<usize, (String, String)>,
}

/// What of a pod is to be measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalStorage {
    /// Volumes: emptyDirs on disk, and volumes of files.
    pub volumes: Vec<String>,
    /// Containers whose logs are to be measured; with any of them the hosts file too.
    pub containers: Vec<String>,
    /// Where the runtime keeps writable layers: whether that is on the node's file system.
    pub layers_at: Option<PathBuf>,
}

/// The host as one pod sees it: cgroups, directories, volumes, logs. Every call may block for as long as the disk does; callers
/// treat an error as "not done" and repeat, so each call is idempotent.
#[async_trait]
pub trait PodHost: Send + Sync {
    /// Makes the pod's cgroup unless it exists; an existing one is not rewritten. True when it was made.
    async fn ensure_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<bool>;
    /// The CPU and memory settings of a pod's cgroup that are in force.
    async fn cgroup_settings(&self, name: &CgroupName) -> HostResult<CgroupResources>;
    /// Writes settings of a pod's cgroup that stands.
    async fn update_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<()>;
    /// Memory that a cgroup uses, in bytes, as its limit counts it; None: not known.
    async fn cgroup_memory(&self, name: &CgroupName) -> HostResult<Option<u64>>;
    /// Kills what is left in the pod's cgroup, at whatever QoS level it stands, and removes it. Absent is done.
    async fn remove_pod_cgroup(&self, uid: &PodUid) -> HostResult<()>;
    /// UIDs of the pod cgroups that exist. With the systemd driver their dashes are back in place.
    async fn list_pod_cgroups(&self) -> HostResult<Vec<PodUid>>;
    /// The cgroup as the runtime wants to be told of it (CRI `cgroup_parent`).
    fn cgroup_parent(&self, name: &CgroupName) -> String;
    /// Writes the cgroups above pods (kubepods and the QoS levels), making those that are missing.
    async fn update_cgroups(&self, groups: &[(CgroupName, CgroupResources)]) -> HostResult<()>;
    /// Makes `pods/UID` and what belongs below it.
    async fn make_pod_dirs(&self, uid: &PodUid) -> HostResult<()>;
    /// Makes every volume ready; those that are, are only checked, and their files written anew where they differ.
    async fn mount_volumes(&self, pod: &DesiredPod, payloads: VolumePayloads) -> HostResult<VolumeResults>;
    /// Unmounts everything of the pod and removes its directory, never through a mount. Absent is done.
    async fn remove_pod_dir(&self, uid: &PodUid) -> HostResult<()>;
    /// Unmounts the volumes of a pod that has ended but is still wanted by its source.
    async fn unmount_volumes(&self, uid: &PodUid) -> HostResult<()>;
    /// What the pod takes of the node's disk; the layers are the runtime's to tell.
    async fn local_storage(&self, pod: &DesiredPod, wanted: LocalStorage) -> HostResult<LocalUsage>;
    /// Pod directories that exist.
    async fn list_pod_dirs(&self) -> HostResult<Vec<PodUid>>;
    /// Makes the files that a container gets mounted.
    async fn prepare_container(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        volumes: &MountedVolumes,
        files: &ContainerFiles,
    ) -> HostResult<ContainerPaths>;
    /// Makes the container's log directory and tells the highest restart count that its logs show.
    async fn log_dir(&self, pod: &DesiredPod, container: &str) -> HostResult<Option<u32>>;
    /// Links `/var/log/containers/…` to the log file, if there is one.
    async fn link_log(&self, pod: &DesiredPod, container: &str, id: &str, restart_count: u32) -> HostResult<()>;
    /// Removes the log files and the link of one dead container.
    async fn remove_container_log(
        &self,
        log_path: &str,
        pod: &str,
        namespace: &str,
        container: &str,
        id: &str,
    ) -> HostResult<()>;
    /// Removes the log directory of a pod that is gone.
    async fn remove_pod_logs(&self, namespace: &str, name: &str, uid: &PodUid) -> HostResult<()>;
    /// Removes log directories of pods that are not among `known`, and links whose target is gone.
    async fn prune_logs(&self, known: &HashSet<PodUid>) -> HostResult<()>;
    /// The last `limit` bytes of a file; None when it is absent or not a regular file.
    async fn read_tail(&self, path: &str, limit: u64) -> HostResult<Option<Vec<u8>>>;
    /// Size of each file; None for one that is absent.
    async fn file_sizes(&self, paths: &[String]) -> Vec<HostResult<Option<u64>>>;
    /// First half of a log rotation: moves the log away and thins out old ones. After it the runtime reopens the log.
    async fn rotate_log(&self, path: &str, now: Timestamp, max_files: u32) -> HostResult<()>;
    /// Writes a file as a whole or not at all, synced (checkpoints).
    async fn write_atomic(&self, path: &std::path::Path, content: Vec<u8>, mode: u32) -> HostResult<()>;
    /// The node's own hosts file and resolv.conf, read at each use; None when absent.
    async fn read_file(&self, path: &std::path::Path) -> HostResult<Option<Vec<u8>>>;
    /// Names and contents of the regular files in a directory; nothing when it is absent.
    async fn list_files(&self, dir: &std::path::Path) -> HostResult<Vec<(String, Vec<u8>)>>;
    /// Removes a file. Absent is done.
    async fn remove_file(&self, path: &std::path::Path) -> HostResult<()>;
    /// A file of a volume, opened without leaving the volume or following a link; None when absent.
    async fn read_in_volume(&self, volume: &std::path::Path, path: &str) -> HostResult<Option<Vec<u8>>>;
    /// The node's addresses, main one first.
    fn host_ips(&self) -> Vec<String>;
}
