//! A host in memory: pod cgroups, pod directories, mounts, logs, files. Calls can be made to fail, to be late, or to be done and then fail.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use decide::config::names;
use decide::eviction::LocalUsage;
use jiff::Timestamp;
use model::cgroup::{CgroupName, CgroupResources};
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use pod::ports::{
    ContainerFiles, ContainerPaths, HostError, HostResult, LocalStorage, MountedVolume, MountedVolumes, PodHost,
    VolumePayloads, VolumeResults,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Directory of pod logs.
pub const POD_LOGS: &str = "/var/log/pods";
/// Root directory of the agent.
pub const ROOT: &str = "/var/lib/kubelet";

/// How a host call goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFault {
    /// Not done.
    Fail,
    /// Done, and reported as failed.
    DoAndFail,
    /// Done after this time.
    Delay(Duration),
    /// Never answered, not done.
    Hang,
}

/// Which host calls a fault befalls. The first rule that fits is used.
#[derive(Clone, Debug)]
pub struct HostRule {
    call: &'static str,
    about: Option<String>,
    fault: HostFault,
    left: Option<u32>,
    chance: f64,
}

impl HostRule {
    /// Every call of this method of [`PodHost`]; `*`: any.
    pub fn new(call: &'static str, fault: HostFault) -> Self {
        Self { call, about: None, fault, left: None, chance: 1.0 }
    }

    /// Only so many times.
    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self { left: Some(times), ..self }
    }

    /// Only with this chance, from 0 to 1.
    #[must_use]
    pub fn chance(self, chance: f64) -> Self {
        Self { chance, ..self }
    }

    /// Only calls about this pod UID.
    #[must_use]
    pub fn about(self, uid: &str) -> Self {
        Self { about: Some(uid.to_owned()), ..self }
    }
}

/// What stands on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Pod cgroups by UID: the levels at which they stand.
    pub cgroups: BTreeMap<PodUid, BTreeSet<Vec<String>>>,
    /// QoS levels that were made, and not by a pod's cgroup below them.
    pub levels: BTreeSet<Vec<String>>,
    /// Pod cgroups that were made below a level that was not there yet.
    pub early: BTreeSet<Vec<String>>,
    /// Settings of the pod cgroups.
    pub settings: BTreeMap<PodUid, CgroupResources>,
    /// Memory that pod cgroups use, where a test sets it.
    pub memory: BTreeMap<PodUid, u64>,
    /// Pod directories.
    pub dirs: BTreeSet<PodUid>,
    /// Mounted volumes.
    pub mounts: BTreeSet<(PodUid, String)>,
    /// Log directories of pods.
    pub log_dirs: BTreeSet<String>,
    /// Log files.
    pub logs: BTreeSet<String>,
    /// Links to log files, and their targets.
    pub links: BTreeMap<String, String>,
    /// Other files.
    pub files: BTreeMap<PathBuf, Vec<u8>>,
}

#[derive(Debug)]
struct State {
    standing: Standing,
    rules: Vec<HostRule>,
    random: SmallRng,
    full: bool,
    faults: u64,
}

/// The host. Cheap to clone; clones are the same host.
#[derive(Clone, Debug)]
pub struct FakeHost(Arc<Mutex<State>>);

impl FakeHost {
    /// An empty host.
    pub fn new(seed: u64) -> Self {
        let random = SmallRng::seed_from_u64(seed);
        Self(Arc::new(Mutex::new(State {
            standing: Standing::default(),
            rules: Vec::new(),
            random,
            full: false,
            faults: 0,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What stands on it now.
    pub fn standing(&self) -> Standing {
        self.state().standing.clone()
    }

    /// Log directories of pods.
    pub(crate) fn log_dirs(&self) -> BTreeSet<String> {
        self.state().standing.log_dirs.clone()
    }

    /// Adds a rule by which calls go wrong.
    pub fn inject(&self, rule: HostRule) {
        self.state().rules.push(rule);
    }

    /// A pod's cgroup uses this much memory from now on.
    pub fn use_memory(&self, uid: &str, bytes: u64) {
        self.state().standing.memory.insert(PodUid::new(uid), bytes);
    }

    /// Drops all rules; the disk has room again.
    pub fn heal(&self) {
        let mut state = self.state();
        state.rules.clear();
        state.full = false;
    }

    /// From now on nothing can be written, or again it can.
    pub fn fill(&self, full: bool) {
        self.state().full = full;
    }

    /// A power failure leaves the newest content of a file half written.
    pub fn tear(&self, file: &Path) {
        if let Some(content) = self.state().standing.files.get_mut(file) {
            content.truncate(content.len() / 2);
        }
    }

    /// A file is taken away.
    pub fn drop_file(&self, file: &Path) {
        self.state().standing.files.remove(file);
    }

    /// How many calls went wrong so far.
    pub fn faults(&self) -> u64 {
        self.state().faults
    }

    /// The runtime began to write this log.
    pub(crate) fn log_appears(&self, path: &str) {
        if let Some((dir, _)) = path.strip_prefix(POD_LOGS).and_then(|p| p.trim_start_matches('/').split_once('/')) {
            let dir = format!("{POD_LOGS}/{dir}");
            let mut state = self.state();
            state.standing.log_dirs.insert(dir);
            state.standing.logs.insert(path.to_owned());
        }
    }

    /// One call through the rules.
    async fn call<T>(
        &self,
        call: &'static str,
        about: &str,
        work: impl FnOnce(&mut Standing) -> T + Send,
    ) -> HostResult<T> {
        let fault = self.pick(call, about);
        if self.state().is_full_for(call) {
            return Err(HostError::new(format!("{call} {about}"), "no space left on device"));
        }
        let broken = || HostError::new(format!("{call} {about}"), "input/output error");
        match fault {
            Some(HostFault::Fail) => return Err(broken()),
            Some(HostFault::Hang) => std::future::pending().await,
            Some(HostFault::Delay(time)) => tokio::time::sleep(time).await,
            _ => {}
        }
        let done = work(&mut self.state().standing);
        if fault == Some(HostFault::DoAndFail) { Err(broken()) } else { Ok(done) }
    }

    fn pick(&self, call: &str, about: &str) -> Option<HostFault> {
        let state = &mut *self.state();
        let random = &mut state.random;
        let rule = state.rules.iter_mut().find(|rule| {
            (rule.call == "*" || rule.call == call)
                && rule.left != Some(0)
                && rule.about.as_deref().is_none_or(|uid| uid == about)
                && (rule.chance >= 1.0 || random.random_bool(rule.chance))
        })?;
        rule.left = rule.left.map(|left| left - 1);
        state.faults += 1;
        Some(rule.fault)
    }
}

impl State {
    /// A full disk takes nothing new, and gives up what is on it.
    fn is_full_for(&mut self, call: &str) -> bool {
        const WRITES: [&str; 6] =
            ["make_pod_dirs", "mount_volumes", "prepare_container", "log_dir", "link_log", "write_atomic"];
        let full = self.full && WRITES.contains(&call);
        self.faults += u64::from(full);
        full
    }
}

fn pod_of(name: &CgroupName) -> PodUid {
    PodUid::new(name.0.last().and_then(|part| part.strip_prefix("pod")).unwrap_or_default())
}

fn log_dir(namespace: &str, name: &str, uid: &PodUid) -> String {
    format!("{POD_LOGS}/{namespace}_{name}_{uid}")
}

fn remove_log_dir(standing: &mut Standing, dir: &str) {
    let below = format!("{dir}/");
    standing.log_dirs.remove(dir);
    standing.logs.retain(|log| !log.starts_with(&below));
}

#[async_trait]
impl PodHost for FakeHost {
    async fn ensure_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<bool> {
        let uid = pod_of(name);
        if uid.as_str().is_empty() {
            return self.call("ensure_cgroup", "", |s| s.levels.insert(name.0.clone())).await;
        }
        let about = uid.to_string();
        self.call("ensure_cgroup", &about, |s| {
            if let [level @ .., _] = name.0.as_slice()
                && !s.levels.contains(level)
            {
                s.early.insert(name.0.clone());
            }
            s.settings.entry(uid.clone()).or_insert_with(|| resources.clone());
            s.cgroups.entry(uid).or_default().insert(name.0.clone())
        })
        .await
    }

    async fn cgroup_settings(&self, name: &CgroupName) -> HostResult<CgroupResources> {
        let uid = pod_of(name);
        self.call("cgroup_settings", uid.as_str(), |s| s.settings.get(&uid).cloned().unwrap_or_default()).await
    }

    async fn update_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<()> {
        let uid = pod_of(name);
        let about = uid.to_string();
        self.call("update_cgroup", &about, |s| {
            let has = s.settings.entry(uid).or_default();
            has.cpu_shares = resources.cpu_shares.or(has.cpu_shares);
            has.cpu_quota = resources.cpu_quota.or(has.cpu_quota);
            has.cpu_period = resources.cpu_period.or(has.cpu_period);
            has.memory_limit = resources.memory_limit.or(has.memory_limit);
        })
        .await
    }

    async fn cgroup_memory(&self, name: &CgroupName) -> HostResult<Option<u64>> {
        let uid = pod_of(name);
        self.call("cgroup_memory", uid.as_str(), |s| Some(s.memory.get(&uid).copied().unwrap_or(0))).await
    }

    async fn remove_pod_cgroup(&self, uid: &PodUid) -> HostResult<()> {
        self.call("remove_pod_cgroup", uid.as_str(), |s| {
            s.cgroups.remove(uid);
            s.settings.remove(uid);
            s.memory.remove(uid);
        })
        .await
    }

    async fn list_pod_cgroups(&self) -> HostResult<Vec<PodUid>> {
        self.call("list_pod_cgroups", "", |s| s.cgroups.keys().cloned().collect()).await
    }

    fn cgroup_parent(&self, name: &CgroupName) -> String {
        format!("/{}", name.0.join("/"))
    }

    async fn update_cgroups(&self, groups: &[(CgroupName, CgroupResources)]) -> HostResult<()> {
        self.call("update_cgroups", "", |s| s.levels.extend(groups.iter().map(|(name, _)| name.0.clone()))).await
    }

    async fn make_pod_dirs(&self, uid: &PodUid) -> HostResult<()> {
        self.call("make_pod_dirs", uid.as_str(), |s| {
            s.dirs.insert(uid.clone());
        })
        .await
    }

    async fn mount_volumes(&self, pod: &DesiredPod, _payloads: VolumePayloads) -> HostResult<VolumeResults> {
        let uid = pod.uid();
        self.call("mount_volumes", uid.as_str(), |s| {
            let mut mounted = MountedVolumes::new();
            for volume in pod.spec().volumes.iter().flatten() {
                s.mounts.insert((uid.clone(), volume.name.clone()));
                let host_path = PathBuf::from(format!("{ROOT}/pods/{uid}/volumes/{}", volume.name));
                mounted.insert(volume.name.clone(), MountedVolume::at(host_path));
            }
            VolumeResults { mounted, failed: BTreeMap::new() }
        })
        .await
    }

    async fn remove_pod_dir(&self, uid: &PodUid) -> HostResult<()> {
        self.call("remove_pod_dir", uid.as_str(), |s| {
            s.mounts.retain(|(owner, _)| owner != uid);
            s.dirs.remove(uid);
            let dir = Path::new(ROOT).join("pods").join(uid.as_str());
            s.files.retain(|file, _| !file.starts_with(&dir));
        })
        .await
    }

    async fn unmount_volumes(&self, uid: &PodUid) -> HostResult<()> {
        self.call("unmount_volumes", uid.as_str(), |s| s.mounts.retain(|(owner, _)| owner != uid)).await
    }

    async fn local_storage(&self, pod: &DesiredPod, _wanted: LocalStorage) -> HostResult<LocalUsage> {
        self.call("local_storage", pod.uid().as_str(), |_| LocalUsage::default()).await
    }

    async fn list_pod_dirs(&self) -> HostResult<Vec<PodUid>> {
        self.call("list_pod_dirs", "", |s| s.dirs.iter().cloned().collect()).await
    }

    async fn prepare_container(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        _volumes: &MountedVolumes,
        files: &ContainerFiles,
    ) -> HostResult<ContainerPaths> {
        let dir = PathBuf::from(format!("{ROOT}/pods/{}", pod.uid()));
        let name = &container.spec.name;
        self.call("prepare_container", pod.uid().as_str(), |_| ContainerPaths {
            termination_log: Some(dir.join("containers").join(name).join(&files.termination_log_name)),
            hosts_file: files.hosts.as_ref().map(|_| dir.join("etc-hosts")),
            sub_paths: BTreeMap::new(),
        })
        .await
    }

    async fn log_dir(&self, pod: &DesiredPod, container: &str) -> HostResult<Option<u32>> {
        let dir = log_dir(pod.namespace(), pod.name(), pod.uid());
        self.call("log_dir", pod.uid().as_str(), |s| {
            let of_container = format!("{dir}/{container}/");
            s.log_dirs.insert(dir);
            let logs = s.logs.iter().filter_map(|log| log.strip_prefix(&of_container));
            logs.filter_map(|file| file.split('.').next()?.parse().ok()).max()
        })
        .await
    }

    async fn link_log(&self, pod: &DesiredPod, container: &str, id: &str, restart_count: u32) -> HostResult<()> {
        let link = names::container_log_link(pod.name(), pod.namespace(), container, id);
        let dir = log_dir(pod.namespace(), pod.name(), pod.uid());
        let log = format!("{dir}/{}", names::container_log_path(container, restart_count));
        self.call("link_log", pod.uid().as_str(), |s| {
            if s.logs.contains(&log) {
                s.links.insert(link, log);
            }
        })
        .await
    }

    async fn remove_container_log(
        &self,
        log_path: &str,
        pod: &str,
        namespace: &str,
        container: &str,
        id: &str,
    ) -> HostResult<()> {
        let link = names::container_log_link(pod, namespace, container, id);
        self.call("remove_container_log", "", |s| {
            s.logs.remove(log_path);
            s.links.remove(&link);
        })
        .await
    }

    async fn remove_pod_logs(&self, namespace: &str, name: &str, uid: &PodUid) -> HostResult<()> {
        self.call("remove_pod_logs", uid.as_str(), |s| remove_log_dir(s, &log_dir(namespace, name, uid))).await
    }

    async fn prune_logs(&self, known: &HashSet<PodUid>) -> HostResult<()> {
        self.call("prune_logs", "", |s| {
            let gone = |dir: &String| !known.contains(&PodUid::new(names::uid_of_log_dir(dir)));
            for dir in s.log_dirs.clone().into_iter().filter(gone) {
                remove_log_dir(s, &dir);
            }
            s.links.retain(|_, log| s.logs.contains(log));
        })
        .await
    }

    async fn read_tail(&self, _path: &str, _limit: u64) -> HostResult<Option<Vec<u8>>> {
        self.call("read_tail", "", |_| None).await
    }

    async fn file_sizes(&self, paths: &[String]) -> Vec<HostResult<Option<u64>>> {
        let mut sizes = Vec::with_capacity(paths.len());
        for path in paths {
            sizes.push(self.call("file_sizes", "", |s| s.logs.contains(path).then_some(100)).await);
        }
        sizes
    }

    async fn rotate_log(&self, _path: &str, _now: Timestamp, _max_files: u32) -> HostResult<()> {
        self.call("rotate_log", "", |_| ()).await
    }

    async fn write_atomic(&self, path: &Path, content: Vec<u8>, _mode: u32) -> HostResult<()> {
        self.call("write_atomic", "", |s| {
            s.files.insert(path.to_owned(), content);
        })
        .await
    }

    async fn read_file(&self, path: &Path) -> HostResult<Option<Vec<u8>>> {
        self.call("read_file", "", |s| s.files.get(path).cloned()).await
    }

    async fn list_files(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>> {
        self.call("list_files", "", |s| {
            let inside = |(path, content): (&PathBuf, &Vec<u8>)| {
                let name = path.file_name().filter(|_| path.parent() == Some(dir))?;
                Some((name.to_string_lossy().into_owned(), content.clone()))
            };
            s.files.iter().filter_map(inside).collect()
        })
        .await
    }

    async fn remove_file(&self, path: &Path) -> HostResult<()> {
        self.call("remove_file", "", |s| {
            s.files.remove(path);
        })
        .await
    }

    async fn read_in_volume(&self, volume: &Path, path: &str) -> HostResult<Option<Vec<u8>>> {
        self.call("read_in_volume", "", |s| s.files.get(&volume.join(path)).cloned()).await
    }

    fn host_ips(&self) -> Vec<String> {
        vec!["192.0.2.1".to_owned()]
    }
}
