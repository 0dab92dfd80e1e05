//! The host port on the real host: pods' cgroups, directories, volumes and logs, by way of the blocking calls in `host`.
//!
//! Every call runs on tokio's blocking threads, so a disk that hangs holds one pod's step and no task of the runtime. Calls are
//! idempotent: what stands is kept, what is gone counts as removed.

mod measure;
mod volumes;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use decide::eviction::LocalUsage;
use decide::resources::{QosClass, qos_cgroup_name};
use host::cgroup::CgroupManager;
use host::fsx;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use model::cgroup::{CgroupName, CgroupResources};
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use pod::ports::{
    ContainerFiles, ContainerPaths, HostError, HostResult, LocalStorage, MountedVolumes, PodHost, VolumePayloads,
    VolumeResults, error_chain,
};
use tracing::warn;

use crate::machine::go_on_when_refused;

/// Where things stand on this host.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    /// `--root-dir`.
    pub(crate) root: PathBuf,
    /// `podLogsDir`.
    pub(crate) pod_logs: PathBuf,
    /// Where log agents look for links, `/var/log/containers`.
    pub(crate) container_logs: PathBuf,
    /// procfs.
    pub(crate) proc: PathBuf,
}

impl Paths {
    fn pod(&self, uid: &PodUid) -> PathBuf {
        self.root.join("pods").join(uid.as_str())
    }

    fn pod_log(&self, namespace: &str, name: &str, uid: &PodUid) -> PathBuf {
        self.pod_logs.join(format!("{namespace}_{name}_{uid}"))
    }
}

/// The most that is read of a file in a volume.
const VOLUME_FILE_MAX: u64 = 1 << 20;

/// The real host.
pub(crate) struct NodeHost {
    paths: Paths,
    cgroups: Arc<dyn CgroupManager>,
    kubepods: CgroupName,
    host_ips: Vec<String>,
}

/// Runs a blocking step elsewhere.
async fn blocking<T: Send + 'static>(
    action: impl Into<String>,
    step: impl FnOnce() -> Result<T, Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
) -> HostResult<T> {
    let action = action.into();
    match tokio::task::spawn_blocking(step).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(HostError { action, source }),
        Err(panic) => Err(HostError::new(action, panic)),
    }
}

impl NodeHost {
    /// The host with these paths and cgroups; pods' cgroups stand below `kubepods`.
    pub(crate) fn new(
        paths: Paths,
        cgroups: Arc<dyn CgroupManager>,
        kubepods: CgroupName,
        host_ips: Vec<String>,
    ) -> Self {
        Self { paths, cgroups, kubepods, host_ips }
    }

    /// The cgroups that pods stand in directly.
    fn levels(&self) -> [CgroupName; 3] {
        [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort]
            .map(|class| qos_cgroup_name(&self.kubepods, class))
    }
}

#[async_trait]
impl PodHost for NodeHost {
    async fn ensure_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<bool> {
        let (cgroups, name, resources) = (self.cgroups.clone(), name.clone(), resources.clone());
        blocking("make the pod's cgroup", move || {
            if cgroups.exists(&name) {
                return Ok(false);
            }
            go_on_when_refused(cgroups.create(&name, &resources))?;
            Ok(true)
        })
        .await
    }

    async fn cgroup_settings(&self, name: &CgroupName) -> HostResult<CgroupResources> {
        let (cgroups, name) = (self.cgroups.clone(), name.clone());
        blocking("read the settings of the pod's cgroup", move || Ok(cgroups.limits(&name)?)).await
    }

    async fn update_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<()> {
        let (cgroups, name, resources) = (self.cgroups.clone(), name.clone(), resources.clone());
        blocking("update the pod's cgroup", move || Ok(cgroups.update(&name, &resources)?)).await
    }

    async fn cgroup_memory(&self, name: &CgroupName) -> HostResult<Option<u64>> {
        let (cgroups, name) = (self.cgroups.clone(), name.clone());
        blocking("read the memory usage of a cgroup", move || Ok(cgroups.usage(&name)?.memory)).await
    }

    async fn remove_pod_cgroup(&self, uid: &PodUid) -> HostResult<()> {
        let names = self.levels().map(|level| level.child(format!("pod{uid}")));
        let cgroups = self.cgroups.clone();
        blocking(format!("remove the cgroup of pod {uid}"), move || {
            for name in names {
                cgroups.destroy(&name)?;
            }
            Ok(())
        })
        .await
    }

    async fn list_pod_cgroups(&self) -> HostResult<Vec<PodUid>> {
        let (cgroups, levels) = (self.cgroups.clone(), self.levels());
        blocking("list pod cgroups", move || {
            let mut uids = Vec::new();
            for level in levels {
                let names = cgroups.list_children(&level)?;
                uids.extend(names.iter().filter_map(|n| n.0.last()?.strip_prefix("pod").map(PodUid::new)));
            }
            Ok(uids)
        })
        .await
    }

    fn cgroup_parent(&self, name: &CgroupName) -> String {
        self.cgroups.cri_cgroup_parent(name)
    }

    async fn update_cgroups(&self, groups: &[(CgroupName, CgroupResources)]) -> HostResult<()> {
        let (cgroups, groups) = (self.cgroups.clone(), groups.to_vec());
        blocking("update the cgroups above pods", move || {
            for (name, resources) in groups {
                let written = if cgroups.exists(&name) {
                    cgroups.update(&name, &resources)
                } else {
                    cgroups.create(&name, &resources)
                };
                go_on_when_refused(written)?;
            }
            Ok(())
        })
        .await
    }

    async fn make_pod_dirs(&self, uid: &PodUid) -> HostResult<()> {
        let dir = self.paths.pod(uid);
        blocking(format!("make directories below {}", dir.display()), move || {
            for dir in [dir.clone(), dir.join("volumes"), dir.join("plugins")] {
                fsx::ensure_dir(&dir, 0o750)?;
            }
            Ok(())
        })
        .await
    }

    async fn mount_volumes(&self, pod: &DesiredPod, payloads: VolumePayloads) -> HostResult<VolumeResults> {
        let maker = volumes::Maker { paths: self.paths.clone(), pod: pod.clone(), payloads, now: Timestamp::now() };
        blocking("Unable to attach or mount volumes", move || Ok(maker.make_all())).await
    }

    async fn unmount_volumes(&self, uid: &PodUid) -> HostResult<()> {
        let (paths, uid) = (self.paths.clone(), uid.clone());
        blocking("unmount volumes", move || volumes::take_down(&paths, &uid)).await
    }

    async fn local_storage(&self, pod: &DesiredPod, wanted: LocalStorage) -> HostResult<LocalUsage> {
        let (paths, pod) = (self.paths.clone(), pod.clone());
        let action = format!("measure what pod {} takes of the disk", pod.uid());
        blocking(action, move || Ok(measure::local_storage(&paths, &pod, &wanted))).await
    }

    async fn remove_pod_dir(&self, uid: &PodUid) -> HostResult<()> {
        let (paths, uid) = (self.paths.clone(), uid.clone());
        blocking("remove the pod's directory", move || {
            volumes::take_down(&paths, &uid)?;
            fsx::remove_pod_dir(&paths.proc, &paths.pod(&uid))
                .map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ").into())
        })
        .await
    }

    async fn list_pod_dirs(&self) -> HostResult<Vec<PodUid>> {
        let dir = self.paths.root.join("pods");
        blocking(format!("list {}", dir.display()), move || {
            let mut uids = Vec::new();
            for entry in std::fs::read_dir(dir)? {
                let entry = entry?;
                if let (true, Some(name)) = (entry.file_type()?.is_dir(), entry.file_name().to_str()) {
                    uids.push(PodUid::new(name));
                }
            }
            Ok(uids)
        })
        .await
    }

    async fn prepare_container(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        mounted: &MountedVolumes,
        files: &ContainerFiles,
    ) -> HostResult<ContainerPaths> {
        let pod_dir = self.paths.pod(pod.uid());
        let name = container.spec.name.clone();
        let has_message = container.spec.termination_message_path.as_deref().is_some_and(|p| !p.is_empty());
        let (mounted, files, proc) = (mounted.clone(), files.clone(), self.paths.proc.clone());
        blocking(format!("make the files of container {name:?}"), move || {
            let mut paths = ContainerPaths::default();
            for (index, (volume, path)) in &files.sub_paths {
                let mounted = mounted.get(volume).ok_or_else(|| format!("volume {volume:?} is not mounted"))?;
                let bound = host::subpath::prepare_subpath(
                    &proc,
                    &host::subpath::Subpath {
                        volume_path: &mounted.host_path,
                        sub_path: path,
                        pod_dir: &pod_dir,
                        volume: &mounted.dir_name(volume),
                        container: &name,
                        index: *index,
                    },
                )
                .map_err(|e| {
                    // The error's own text is for the pod's owner; what lies behind it tells of the node's files.
                    warn!(pod = %pod_dir.display(), container = name, err = error_chain(&e), "subPath cannot be used");
                    e.to_string()
                })?;
                paths.sub_paths.insert(*index, bound);
            }
            if let Some(hosts) = &files.hosts {
                let file = pod_dir.join("etc-hosts");
                // Containers have this very file mounted: it is rewritten in place, not replaced.
                fsx::write_in_place(&file, hosts, 0o644)?;
                paths.hosts_file = Some(file);
            }
            // Last, since each try makes a new one.
            if has_message {
                let dir = pod_dir.join("containers").join(&name);
                fsx::ensure_dirs(&dir, 0o750)?;
                let file = dir.join(&files.termination_log_name);
                fsx::ensure_file(&file, 0o666)?;
                paths.termination_log = Some(file);
            }
            Ok(paths)
        })
        .await
    }

    async fn log_dir(&self, pod: &DesiredPod, container: &str) -> HostResult<Option<u32>> {
        let dir = self.paths.pod_log(pod.namespace(), pod.name(), pod.uid()).join(container);
        blocking(format!("make the log directory {}", dir.display()), move || {
            fsx::ensure_dirs(&dir, 0o755)?;
            Ok(host::logs::highest_restart_count(&dir)?)
        })
        .await
    }

    async fn link_log(&self, pod: &DesiredPod, container: &str, id: &str, restart_count: u32) -> HostResult<()> {
        let log = self
            .paths
            .pod_log(pod.namespace(), pod.name(), pod.uid())
            .join(decide::config::names::container_log_path(container, restart_count));
        let link = host::logs::agent_link(&self.paths.container_logs, pod.name(), pod.namespace(), container, id);
        blocking(format!("link {} to the log", link.display()), move || {
            host::logs::link_for_agents(&log, &link)?;
            Ok(())
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
        let log = PathBuf::from(log_path);
        let link = host::logs::agent_link(&self.paths.container_logs, pod, namespace, container, id);
        let ours = log.starts_with(&self.paths.pod_logs);
        blocking(format!("remove the log {}", log.display()), move || {
            // A path that is not below the log directory was not written by a kubelet with this configuration: it stays.
            if ours {
                host::logs::remove_logs(&log)?;
            }
            match std::fs::remove_file(&link) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
                _ => Ok(()),
            }
        })
        .await
    }

    async fn remove_pod_logs(&self, _namespace: &str, _name: &str, uid: &PodUid) -> HostResult<()> {
        // By the UID alone: of a pod that is found as a directory nobody knows the name.
        let (logs, proc, uid) = (self.paths.pod_logs.clone(), self.paths.proc.clone(), uid.clone());
        blocking(format!("remove the log directory of pod {uid}"), move || {
            for (dir, owner) in host::logs::pod_log_dirs(&logs)? {
                if owner == uid.as_str() {
                    fsx::remove_tree(&proc, &dir)?;
                }
            }
            Ok(())
        })
        .await
    }

    async fn prune_logs(&self, known: &HashSet<PodUid>) -> HostResult<()> {
        let logs = self.paths.pod_logs.clone();
        let dirs = blocking("list log directories", move || Ok(host::logs::pod_log_dirs(&logs)?)).await?;
        let gone: Vec<PathBuf> = dirs
            .into_iter()
            .filter(|(_, uid)| !known.contains(&PodUid::new(uid.as_str())))
            .map(|(dir, _)| dir)
            .collect();
        let (links, proc) = (self.paths.container_logs.clone(), self.paths.proc.clone());
        let logs = self.paths.pod_logs.clone();
        blocking("remove log directories of gone pods", move || {
            for dir in gone {
                fsx::remove_tree(&proc, &dir)?;
            }
            // Only links into our own log directory: another agent's are its own business.
            for dead in host::logs::dead_links(&links)? {
                if std::fs::read_link(&dead.link).is_ok_and(|target| target.starts_with(&logs)) {
                    std::fs::remove_file(&dead.link)?;
                }
            }
            Ok(())
        })
        .await
    }

    async fn read_tail(&self, path: &str, limit: u64) -> HostResult<Option<Vec<u8>>> {
        let file = PathBuf::from(path);
        blocking(format!("read the end of {path}"), move || Ok(host::logs::tail_bytes(&file, limit)?)).await
    }

    async fn file_sizes(&self, paths: &[String]) -> Vec<HostResult<Option<u64>>> {
        let mut sizes = Vec::with_capacity(paths.len());
        // Many at a time: to go to another thread and back costs more than a look.
        for some in paths.chunks(256) {
            let files = some.to_vec();
            let look = |file: String| {
                let size = host::logs::log_size(Path::new(&file));
                size.map_err(|source| HostError::new(format!("look at {file}"), source))
            };
            match blocking("look at logs", move || Ok(files.into_iter().map(look).collect::<Vec<_>>())).await {
                Ok(found) => sizes.extend(found),
                Err(e) => {
                    sizes.extend(some.iter().map(|file| Err(HostError::new(format!("look at {file}"), e.chain()))))
                }
            }
        }
        sizes
    }

    async fn rotate_log(&self, path: &str, now: Timestamp, max_files: u32) -> HostResult<()> {
        let log = PathBuf::from(path);
        blocking(format!("rotate {path}"), move || {
            host::logs::prepare_rotation(&log, max_files as usize)?;
            host::logs::rotate_latest(&log, now.to_zoned(TimeZone::system()).datetime())?;
            Ok(())
        })
        .await
    }

    async fn write_atomic(&self, path: &Path, content: Vec<u8>, mode: u32) -> HostResult<()> {
        let file = path.to_owned();
        blocking(format!("write {}", path.display()), move || Ok(fsx::write_file_atomic(&file, &content, mode)?)).await
    }

    async fn read_file(&self, path: &Path) -> HostResult<Option<Vec<u8>>> {
        let file = path.to_owned();
        blocking(format!("read {}", path.display()), move || Ok(fsx::read_if_there(&file)?)).await
    }

    async fn list_files(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>> {
        let dir = dir.to_owned();
        blocking(format!("read the files of {}", dir.display()), move || {
            let mut files = Vec::new();
            let entries = match std::fs::read_dir(&dir) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(files),
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                if let (true, Some(name)) = (entry.file_type()?.is_file(), entry.file_name().to_str()) {
                    files.extend(fsx::read_if_there(&entry.path())?.map(|content| (name.to_owned(), content)));
                }
            }
            Ok(files)
        })
        .await
    }

    async fn remove_file(&self, path: &Path) -> HostResult<()> {
        let file = path.to_owned();
        blocking(format!("remove {}", path.display()), move || match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
            _ => Ok(()),
        })
        .await
    }

    async fn read_in_volume(&self, volume: &Path, path: &str) -> HostResult<Option<Vec<u8>>> {
        let (root, relative) = (volume.to_owned(), PathBuf::from(path));
        blocking(format!("read {path} of {}", volume.display()), move || {
            Ok(host::safe_path::read_beneath(&root, &relative, VOLUME_FILE_MAX)?)
        })
        .await
    }

    fn host_ips(&self) -> Vec<String> {
        self.host_ips.clone()
    }
}
