//! The agent's way to the outside: every call goes through here, is shown to the checker before it is done, and can be the agent's last.
//!
//! Cut off, the agent reaches nothing any more: calls under way are dropped, new ones never return. What it still does inside has no
//! effect, which is all that can be seen of a process that was killed.

use std::collections::HashSet;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use cluster::ClusterResult;
use cluster::calls::PodApi;
use cluster::reflect::{Collection, ListAsk, Page, Scope, WatchAsk, WatchEvent, WatchStream};
use cri::{CriResult, ExecOutput, RuntimeMutator, RuntimeReader};
use cri_api::v1;
use decide::config::names;
use decide::eviction::LocalUsage;
use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use model::api::Pod;
use model::cgroup::{CgroupName, CgroupResources};
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use pod::ports::{
    ContainerFiles, ContainerPaths, HostResult, LocalStorage, MountedVolumes, PodHost, VolumePayloads, VolumeResults,
};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::api::{FakeApi, uid_of};
use crate::bugs::{self, Bug};
use crate::check::Ask;
use crate::world::{Cut, World};

/// What is added to the attempt of a container that is made once more by a planted bug.
const AGAIN: u32 = 100;

/// One agent's ports.
#[derive(Clone)]
pub struct Ports {
    world: Arc<World>,
    cut: CancellationToken,
    /// Which agent it is; the first is 1.
    agent: u64,
}

/// How an answer reads in the story when it is bad.
trait Said {
    fn said(&self) -> Option<String>;
}

impl<T, E: std::fmt::Display> Said for Result<T, E> {
    fn said(&self) -> Option<String> {
        self.as_ref().err().map(ToString::to_string)
    }
}

impl Said for Vec<HostResult<Option<u64>>> {
    fn said(&self) -> Option<String> {
        self.iter().find_map(Said::said)
    }
}

impl Ports {
    /// Ports into this world.
    pub fn new(world: Arc<World>, agent: u64) -> Self {
        Self { world, cut: CancellationToken::new(), agent }
    }

    /// Cancelled when the agent is cut off; cancelling it cuts it off.
    pub fn cut(&self) -> &CancellationToken {
        &self.cut
    }

    /// Whether this bug is planted.
    fn has(&self, bug: Bug) -> bool {
        self.world.bug == Some(bug)
    }

    /// The answer, unless the agent is cut off before it comes.
    async fn answer<T: Send>(&self, call: impl Future<Output = T> + Send) -> T {
        if !self.world.call() {
            self.cut.cancel();
        }
        tokio::select! {
            biased;
            () = self.cut.cancelled() => std::future::pending().await,
            answer = call => answer,
        }
    }

    /// A call that only looks.
    async fn look<T: Send + Said>(&self, what: &str, call: impl Future<Output = T> + Send) -> T {
        self.world.looks(what);
        let answer = self.answer(call).await;
        if let Some(said) = answer.said() {
            self.world.tell(format!("  {what}: {said}"));
        }
        answer
    }

    /// A call that changes something.
    async fn change<T: Send + Said>(&self, what: String, ask: Option<Ask>, call: impl Future<Output = T> + Send) -> T {
        if self.cut.is_cancelled() {
            std::future::pending::<()>().await;
        }
        if let Some(ask) = ask {
            self.world.ask(ask);
        }
        let mut call = std::pin::pin!(call);
        match self.world.effect(&what) {
            Cut::No => {}
            cut => {
                // The agent's last call: not begun any more, or begun, and done if it takes no time.
                if cut == Cut::After {
                    std::future::poll_fn(|cx| {
                        let _ = call.as_mut().poll(cx);
                        Poll::Ready(())
                    })
                    .await;
                    self.world.look();
                }
                self.cut.cancel();
                std::future::pending::<()>().await;
            }
        }
        let answer = self.answer(call).await;
        if let Some(said) = answer.said() {
            self.world.tell(format!("  {what}: {said}"));
        }
        self.world.look();
        answer
    }
}

#[async_trait]
impl RuntimeReader for Ports {
    async fn version(&self) -> CriResult<v1::VersionResponse> {
        self.look("version", self.world.runtime.version()).await
    }
    async fn status(&self, verbose: bool) -> CriResult<v1::StatusResponse> {
        self.look("status", self.world.runtime.status(verbose)).await
    }
    async fn runtime_config(&self) -> CriResult<v1::RuntimeConfigResponse> {
        self.look("runtime_config", self.world.runtime.runtime_config()).await
    }
    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> CriResult<Vec<v1::PodSandbox>> {
        self.look("list_pod_sandbox", self.world.runtime.list_pod_sandbox(filter)).await
    }
    async fn pod_sandbox_status(&self, id: &str, verbose: bool) -> CriResult<v1::PodSandboxStatusResponse> {
        self.look("pod_sandbox_status", self.world.runtime.pod_sandbox_status(id, verbose)).await
    }
    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> CriResult<Vec<v1::Container>> {
        let mut answer = self.look("list_containers", self.world.runtime.list_containers(filter)).await;
        if let Ok(list) = &mut answer {
            list.iter_mut().for_each(|c| self.world.planted().show(c));
        }
        answer
    }
    async fn container_status(&self, id: &str, verbose: bool) -> CriResult<v1::ContainerStatusResponse> {
        let mut answer = self.look("container_status", self.world.runtime.container_status(id, verbose)).await;
        if let Some(status) = answer.as_mut().ok().and_then(|a| a.status.as_mut()) {
            self.world.planted().status(status, self.agent);
        }
        answer
    }
    async fn container_stats(&self, id: &str) -> CriResult<v1::ContainerStats> {
        self.look("container_stats", self.world.runtime.container_stats(id)).await
    }
    async fn list_container_stats(&self, f: Option<v1::ContainerStatsFilter>) -> CriResult<Vec<v1::ContainerStats>> {
        self.look("list_container_stats", self.world.runtime.list_container_stats(f)).await
    }
    async fn pod_sandbox_stats(&self, id: &str) -> CriResult<v1::PodSandboxStats> {
        self.look("pod_sandbox_stats", self.world.runtime.pod_sandbox_stats(id)).await
    }
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<v1::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<v1::PodSandboxStats>> {
        self.look("list_pod_sandbox_stats", self.world.runtime.list_pod_sandbox_stats(filter)).await
    }
    async fn list_metric_descriptors(&self) -> CriResult<Vec<v1::MetricDescriptor>> {
        self.look("list_metric_descriptors", self.world.runtime.list_metric_descriptors()).await
    }
    async fn list_pod_sandbox_metrics(&self) -> CriResult<Vec<v1::PodSandboxMetrics>> {
        self.look("list_pod_sandbox_metrics", self.world.runtime.list_pod_sandbox_metrics()).await
    }
    async fn list_images(&self, filter: Option<v1::ImageFilter>) -> CriResult<Vec<v1::Image>> {
        self.look("list_images", self.world.runtime.list_images(filter)).await
    }
    async fn image_status(&self, image: v1::ImageSpec) -> CriResult<Option<v1::Image>> {
        self.look("image_status", self.world.runtime.image_status(image)).await
    }
    async fn image_fs_info(&self) -> CriResult<v1::ImageFsInfoResponse> {
        self.look("image_fs_info", self.world.runtime.image_fs_info()).await
    }
    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<v1::ContainerEventResponse>>> {
        let events = self.look("container_events", self.world.runtime.container_events()).await?;
        let world = self.world.clone();
        let events = events.then(move |event| {
            let world = world.clone();
            async move {
                if let Ok(event) = &event {
                    world.planted().event(event);
                }
                tokio::time::sleep(world.events_late()).await;
                event
            }
        });
        Ok(events.take_until(self.cut.clone().cancelled_owned()).boxed())
    }
}

#[async_trait]
impl RuntimeMutator for Ports {
    async fn run_pod_sandbox(&self, config: v1::PodSandboxConfig, runtime_handler: &str) -> CriResult<String> {
        let uid = config.metadata.as_ref().map(|m| m.uid.clone()).unwrap_or_default();
        let call = self.world.runtime.run_pod_sandbox(config, runtime_handler);
        self.change(format!("RunPodSandbox {uid}"), Some(Ask::RunSandbox(uid)), call).await
    }
    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let ask = Ask::StopSandbox(id.to_owned());
        self.change(format!("StopPodSandbox {}", short(id)), Some(ask), self.world.runtime.stop_pod_sandbox(id)).await
    }
    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let ask = Ask::RemoveSandbox(id.to_owned());
        let call = self.world.runtime.remove_pod_sandbox(id);
        self.change(format!("RemovePodSandbox {}", short(id)), Some(ask), call).await
    }
    async fn create_container(
        &self,
        sandbox_id: &str,
        config: v1::ContainerConfig,
        sandbox: v1::PodSandboxConfig,
    ) -> CriResult<String> {
        let metadata = config.metadata.clone().unwrap_or_default();
        let what = format!("CreateContainer {}/{} in {}", metadata.name, metadata.attempt, short(sandbox_id));
        let call = self.world.runtime.create_container(sandbox_id, config, sandbox);
        self.change(what, Some(Ask::Create(sandbox_id.to_owned())), call).await
    }
    async fn start_container(&self, id: &str) -> CriResult<()> {
        let ask = Ask::Start(id.to_owned());
        self.change(format!("StartContainer {}", short(id)), Some(ask), self.world.runtime.start_container(id)).await
    }
    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        let what = format!("StopContainer {} {grace:?}", short(id));
        let call = self.world.runtime.stop_container(id, grace);
        let answer = self.change(what, Some(Ask::Stop(id.to_owned(), grace)), call).await;
        if self.has(Bug::StartAfterStop) {
            self.start_once_more(id).await;
        }
        answer
    }
    async fn remove_container(&self, id: &str) -> CriResult<()> {
        let ask = Ask::Remove(id.to_owned());
        self.change(format!("RemoveContainer {}", short(id)), Some(ask), self.world.runtime.remove_container(id)).await
    }
    async fn update_container_resources(&self, id: &str, linux: v1::LinuxContainerResources) -> CriResult<()> {
        let call = self.world.runtime.update_container_resources(id, linux);
        self.change(format!("UpdateContainerResources {}", short(id)), None, call).await
    }
    async fn update_pod_sandbox_resources(&self, request: v1::UpdatePodSandboxResourcesRequest) -> CriResult<()> {
        let call = self.world.runtime.update_pod_sandbox_resources(request);
        self.change("UpdatePodSandboxResources".to_owned(), None, call).await
    }
    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        let call = self.world.runtime.checkpoint_container(id, location, timeout);
        self.change(format!("CheckpointContainer {}", short(id)), None, call).await
    }
    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        let call = self.world.runtime.reopen_container_log(id);
        self.change(format!("ReopenContainerLog {}", short(id)), None, call).await
    }
    async fn exec_sync(&self, id: &str, command: Vec<String>, timeout: Option<Duration>) -> CriResult<ExecOutput> {
        // A probe that asks again and again is no step of a pod's way.
        self.look("exec_sync", self.world.runtime.exec_sync(id, command, timeout)).await
    }
    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> CriResult<String> {
        let what = format!("PullImage {}", image.image);
        self.change(what, None, self.world.runtime.pull_image(image, auth, sandbox)).await
    }
    async fn remove_image(&self, image: v1::ImageSpec) -> CriResult<()> {
        let what = format!("RemoveImage {}", image.image);
        self.change(what, None, self.world.runtime.remove_image(image)).await
    }
    async fn update_runtime_config(&self, config: v1::RuntimeConfig) -> CriResult<()> {
        let call = self.world.runtime.update_runtime_config(config);
        self.change("UpdateRuntimeConfig".to_owned(), None, call).await
    }
}

impl Ports {
    /// What a worker would do that overlooks the end of its pod: the container that was just stopped is made and started again.
    async fn start_once_more(&self, id: &str) {
        let runtime = &self.world.runtime;
        let (Some(mut config), Some(sandbox)) = (runtime.container_config(id), runtime.sandbox_of(id)) else { return };
        let Some(of_sandbox) = runtime.sandbox_config(&sandbox) else { return };
        match &mut config.metadata {
            // Once is enough.
            Some(metadata) if metadata.attempt < AGAIN => {
                metadata.attempt += AGAIN;
                config.annotations.insert(names::RESTART_COUNT.to_owned(), metadata.attempt.to_string());
            }
            _ => return,
        }
        if let Ok(again) = self.create_container(&sandbox, config, of_sandbox).await {
            let _ = self.start_container(&again).await;
        }
    }

    fn api(&self) -> ClusterResult<&FakeApi> {
        let none = || cluster::ClusterError::new("call", cluster::ErrorKind::Other, "a node without an API server");
        self.world.api.as_ref().ok_or_else(none)
    }
}

#[async_trait]
impl PodApi for Ports {
    async fn get_pod(&self, _: &str, name: &str) -> ClusterResult<Pod> {
        let missing = || cluster::ClusterError::from_answer("get pod", 404, None, b"");
        self.api()?.pods().into_iter().find(|p| p.metadata.name.as_deref() == Some(name)).ok_or_else(missing)
    }
    async fn create_pod(&self, pod: &Pod) -> ClusterResult<Pod> {
        let what = format!("POST pod {}", pod.metadata.name.as_deref().unwrap_or_default());
        self.change(what, None, self.api()?.create_pod(pod)).await
    }
    async fn patch_pod_status(&self, _: &str, name: &str, patch: &Value) -> ClusterResult<Pod> {
        let mut patch = patch.clone();
        if self.has(Bug::StaleCount) && bugs::stale_count(&mut patch) {
            // Its writer sees that it is wrong, and tries again without end.
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let phase = patch["status"]["phase"].as_str().unwrap_or_default();
        let what = format!("PATCH status of {name} {phase}").trim_end().to_owned();
        let accuse = |what| self.world.accuse(what);
        let answer = self.change(what, None, self.api()?.patch_pod_status(name, &patch, accuse)).await;
        self.world.phases();
        answer
    }
    async fn delete_pod(&self, _: &str, name: &str, _: i64, uid: Option<&str>) -> ClusterResult<()> {
        let ask = Ask::DeleteObject(uid.unwrap_or_default().to_owned());
        self.change(format!("DELETE pod {name}"), Some(ask), self.api()?.delete_pod(name, uid)).await
    }
}

#[async_trait]
impl Collection<Pod> for Ports {
    async fn list(&self, _: &Scope, ask: &ListAsk) -> ClusterResult<Page<Pod>> {
        let page = self.look("list pods", self.api()?.list(ask)).await?;
        self.world.listing(ask.next.is_none(), &page.items, page.next.is_none());
        Ok(page)
    }
    async fn watch(&self, _: &Scope, ask: &WatchAsk) -> ClusterResult<WatchStream<Pod>> {
        let stream = self.look("watch pods", self.api()?.watch(ask)).await?;
        let mut initial = ask.initial_events.then(Vec::new);
        let ports = self.clone();
        let stream = stream.inspect(move |event| match (event, &mut initial) {
            (Ok(WatchEvent::Upsert(pod)), Some(list)) => list.push(pod.clone()),
            (Ok(WatchEvent::Bookmark { initial_events_end: true, .. }), list) => {
                ports.world.listing(true, &list.take().unwrap_or_default(), true);
            }
            (Ok(WatchEvent::Upsert(pod)), None) => ports.world.told_of(pod, false),
            (Ok(WatchEvent::Delete(pod)), None) => ports.world.told_of(pod, true),
            _ => {}
        });
        if self.has(Bug::EarlyDelete) {
            let ports = self.clone();
            let eager = stream.then(move |event| {
                let ports = ports.clone();
                async move {
                    if let Ok(WatchEvent::Upsert(pod)) = &event
                        && pod.metadata.deletion_timestamp.is_some()
                    {
                        let name = pod.metadata.name.clone().unwrap_or_default();
                        let _ = ports.delete_pod("", &name, 0, Some(&uid_of(pod))).await;
                    }
                    event
                }
            });
            return Ok(eager.take_until(self.cut.clone().cancelled_owned()).boxed());
        }
        Ok(stream.take_until(self.cut.clone().cancelled_owned()).boxed())
    }
    async fn get(&self, _: Option<&str>, name: &str, _: bool) -> ClusterResult<Pod> {
        self.get_pod("", name).await
    }
}

#[async_trait]
impl PodHost for Ports {
    async fn ensure_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<bool> {
        let what = format!("ensure_cgroup {}", name.0.join("/"));
        self.change(what, None, self.world.host.ensure_cgroup(name, resources)).await
    }
    async fn cgroup_settings(&self, name: &CgroupName) -> HostResult<CgroupResources> {
        self.look("cgroup_settings", self.world.host.cgroup_settings(name)).await
    }
    async fn update_cgroup(&self, name: &CgroupName, resources: &CgroupResources) -> HostResult<()> {
        let what = format!("update_cgroup {}", name.0.join("/"));
        self.change(what, None, self.world.host.update_cgroup(name, resources)).await
    }
    async fn cgroup_memory(&self, name: &CgroupName) -> HostResult<Option<u64>> {
        self.look("cgroup_memory", self.world.host.cgroup_memory(name)).await
    }
    async fn remove_pod_cgroup(&self, uid: &PodUid) -> HostResult<()> {
        let ask = Ask::TakeAway(uid.to_string(), "removal of the cgroup");
        self.change(format!("remove_pod_cgroup {uid}"), Some(ask), self.world.host.remove_pod_cgroup(uid)).await
    }
    async fn list_pod_cgroups(&self) -> HostResult<Vec<PodUid>> {
        self.look("list_pod_cgroups", self.world.host.list_pod_cgroups()).await
    }
    fn cgroup_parent(&self, name: &CgroupName) -> String {
        self.world.host.cgroup_parent(name)
    }
    async fn update_cgroups(&self, groups: &[(CgroupName, CgroupResources)]) -> HostResult<()> {
        self.look("update_cgroups", self.world.host.update_cgroups(groups)).await
    }
    async fn make_pod_dirs(&self, uid: &PodUid) -> HostResult<()> {
        self.change(format!("make_pod_dirs {uid}"), None, self.world.host.make_pod_dirs(uid)).await
    }
    async fn mount_volumes(&self, pod: &DesiredPod, payloads: VolumePayloads) -> HostResult<VolumeResults> {
        let what = format!("mount_volumes {}", pod.uid());
        self.change(what, None, self.world.host.mount_volumes(pod, payloads)).await
    }
    async fn remove_pod_dir(&self, uid: &PodUid) -> HostResult<()> {
        let ask = Ask::TakeAway(uid.to_string(), "removal of the directory");
        self.change(format!("remove_pod_dir {uid}"), Some(ask), self.world.host.remove_pod_dir(uid)).await
    }
    async fn unmount_volumes(&self, uid: &PodUid) -> HostResult<()> {
        let ask = Ask::TakeAway(uid.to_string(), "unmounting the volumes");
        self.change(format!("unmount_volumes {uid}"), Some(ask), self.world.host.unmount_volumes(uid)).await
    }
    async fn local_storage(&self, pod: &DesiredPod, wanted: LocalStorage) -> HostResult<LocalUsage> {
        self.look("local_storage", self.world.host.local_storage(pod, wanted)).await
    }
    async fn list_pod_dirs(&self) -> HostResult<Vec<PodUid>> {
        self.look("list_pod_dirs", self.world.host.list_pod_dirs()).await
    }
    async fn prepare_container(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        volumes: &MountedVolumes,
        files: &ContainerFiles,
    ) -> HostResult<ContainerPaths> {
        let what = format!("prepare_container {} {}", pod.uid(), container.spec.name);
        self.change(what, None, self.world.host.prepare_container(pod, container, volumes, files)).await
    }
    async fn log_dir(&self, pod: &DesiredPod, container: &str) -> HostResult<Option<u32>> {
        self.change(format!("log_dir {} {container}", pod.uid()), None, self.world.host.log_dir(pod, container)).await
    }
    async fn link_log(&self, pod: &DesiredPod, container: &str, id: &str, restart_count: u32) -> HostResult<()> {
        let what = format!("link_log {}", short(id));
        self.change(what, None, self.world.host.link_log(pod, container, id, restart_count)).await
    }
    async fn remove_container_log(
        &self,
        log_path: &str,
        pod: &str,
        namespace: &str,
        container: &str,
        id: &str,
    ) -> HostResult<()> {
        let what = format!("remove_container_log {log_path}");
        self.change(what, None, self.world.host.remove_container_log(log_path, pod, namespace, container, id)).await
    }
    async fn remove_pod_logs(&self, namespace: &str, name: &str, uid: &PodUid) -> HostResult<()> {
        let ask = Ask::TakeAway(uid.to_string(), "removal of the logs");
        let call = self.world.host.remove_pod_logs(namespace, name, uid);
        self.change(format!("remove_pod_logs {uid}"), Some(ask), call).await
    }
    async fn prune_logs(&self, known: &HashSet<PodUid>) -> HostResult<()> {
        self.change("prune_logs".to_owned(), None, self.world.host.prune_logs(known)).await
    }
    async fn read_tail(&self, path: &str, limit: u64) -> HostResult<Option<Vec<u8>>> {
        self.look("read_tail", self.world.host.read_tail(path, limit)).await
    }
    async fn file_sizes(&self, paths: &[String]) -> Vec<HostResult<Option<u64>>> {
        self.look("file_sizes", self.world.host.file_sizes(paths)).await
    }
    async fn rotate_log(&self, path: &str, now: Timestamp, max_files: u32) -> HostResult<()> {
        self.change(format!("rotate_log {path}"), None, self.world.host.rotate_log(path, now, max_files)).await
    }
    async fn write_atomic(&self, path: &Path, content: Vec<u8>, mode: u32) -> HostResult<()> {
        let what = format!("write_atomic {}", path.display());
        self.change(what, None, self.world.host.write_atomic(path, content, mode)).await
    }
    async fn read_file(&self, path: &Path) -> HostResult<Option<Vec<u8>>> {
        self.look("read_file", self.world.host.read_file(path)).await
    }
    async fn list_files(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>> {
        self.look("list_files", self.world.host.list_files(dir)).await
    }
    async fn remove_file(&self, path: &Path) -> HostResult<()> {
        self.change(format!("remove_file {}", path.display()), None, self.world.host.remove_file(path)).await
    }
    async fn read_in_volume(&self, volume: &Path, path: &str) -> HostResult<Option<Vec<u8>>> {
        self.look("read_in_volume", self.world.host.read_in_volume(volume, path)).await
    }
    fn host_ips(&self) -> Vec<String> {
        self.world.host.host_ips()
    }
}

/// The end of an id: the fake counts upwards.
pub(crate) fn short(id: &str) -> String {
    let number = id.get(1..).unwrap_or_default().trim_start_matches('0');
    format!("{}{number}", id.get(..1).unwrap_or_default())
}
