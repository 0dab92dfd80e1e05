//! What each method does, request to response; the port and the wire both call these.

use std::time::Duration;

use cri_api::v1;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::images::{Remote, full_name};
use super::process::Exec;
use super::state::{
    DEADLINE_EXCEEDED, Done, INVALID_ARGUMENT, NOT_FOUND, Refusal, State, UNIMPLEMENTED, UNKNOWN, refuse,
};
use super::{Answer, FakeRuntime};

pub(super) const RUNTIME_SERVICE: &str = "runtime.v1.RuntimeService";

/// What Go's gRPC servers answer to methods that they do not have.
pub(super) fn unimplemented<T>(method: &str, service: &str) -> Done<T> {
    Err(Refusal(UNIMPLEMENTED, format!("unknown method {method} for service {service}")))
}

/// Gives new values to what an update names; 0 and empty mean no change.
fn update(current: &mut v1::LinuxContainerResources, new: &v1::LinuxContainerResources) {
    let numbers = [
        (&mut current.cpu_period, new.cpu_period),
        (&mut current.cpu_quota, new.cpu_quota),
        (&mut current.cpu_shares, new.cpu_shares),
        (&mut current.memory_limit_in_bytes, new.memory_limit_in_bytes),
        (&mut current.memory_swap_limit_in_bytes, new.memory_swap_limit_in_bytes),
        (&mut current.oom_score_adj, new.oom_score_adj),
    ];
    for (current, new) in numbers {
        if new != 0 {
            *current = new;
        }
    }
    for (current, new) in [(&mut current.cpuset_cpus, &new.cpuset_cpus), (&mut current.cpuset_mems, &new.cpuset_mems)] {
        if !new.is_empty() {
            current.clone_from(new);
        }
    }
    current.unified.extend(new.unified.clone());
    if !new.hugepage_limits.is_empty() {
        current.hugepage_limits.clone_from(&new.hugepage_limits);
    }
}

impl FakeRuntime {
    /// A call that does its work at once.
    pub(super) async fn at_once<T: super::faults::Pad>(
        &self,
        call: &'static str,
        subject: &str,
        id: &str,
        work: impl FnOnce(&mut State) -> Done<T> + Send,
    ) -> Answer<T> {
        self.take(call, subject, id, async { self.with(work) }).await
    }

    // ---- The runtime itself

    pub(crate) async fn rpc_version(&self) -> Answer<v1::VersionResponse> {
        self.at_once("Version", "", "", |state| Ok(state.settings.version.clone())).await
    }

    pub(crate) async fn rpc_status(&self, request: v1::StatusRequest) -> Answer<v1::StatusResponse> {
        self.at_once("Status", "", "", |state| {
            let mut answer = state.settings.status.clone();
            if !request.verbose {
                answer.info.clear();
            }
            Ok(answer)
        })
        .await
    }

    pub(crate) async fn rpc_runtime_config(&self) -> Answer<v1::RuntimeConfigResponse> {
        self.at_once("RuntimeConfig", "", "", |state| match state.settings.cgroup_driver {
            Some(driver) => Ok(v1::RuntimeConfigResponse {
                linux: Some(v1::LinuxRuntimeConfiguration { cgroup_driver: driver.into() }),
            }),
            None => unimplemented("RuntimeConfig", RUNTIME_SERVICE),
        })
        .await
    }

    pub(crate) async fn rpc_update_runtime_config(
        &self,
        request: v1::UpdateRuntimeConfigRequest,
    ) -> Answer<v1::UpdateRuntimeConfigResponse> {
        self.at_once("UpdateRuntimeConfig", "", "", |state| {
            if let Some(network) = request.runtime_config.and_then(|config| config.network_config) {
                state.pod_cidr = network.pod_cidr;
            }
            Ok(v1::UpdateRuntimeConfigResponse {})
        })
        .await
    }

    // ---- Sandboxes

    pub(crate) async fn rpc_run_pod_sandbox(
        &self,
        request: v1::RunPodSandboxRequest,
    ) -> Answer<v1::RunPodSandboxResponse> {
        let config = request.config.unwrap_or_default();
        let subject = config.metadata.as_ref().map(|m| format!("{}/{}", m.namespace, m.name)).unwrap_or_default();
        self.at_once("RunPodSandbox", &subject, "", |state| {
            let pod_sandbox_id = state.run_sandbox(config, &request.runtime_handler)?;
            Ok(v1::RunPodSandboxResponse { pod_sandbox_id })
        })
        .await
    }

    pub(crate) async fn rpc_stop_pod_sandbox(
        &self,
        request: v1::StopPodSandboxRequest,
    ) -> Answer<v1::StopPodSandboxResponse> {
        let id = request.pod_sandbox_id;
        let work = async {
            for container in self.with(|state| state.containers_of(&id)) {
                self.stop(&container, Duration::ZERO).await;
            }
            self.with(|state| state.end_sandbox(&id));
            Ok(v1::StopPodSandboxResponse {})
        };
        self.take("StopPodSandbox", "", &id, work).await
    }

    pub(crate) async fn rpc_remove_pod_sandbox(
        &self,
        request: v1::RemovePodSandboxRequest,
    ) -> Answer<v1::RemovePodSandboxResponse> {
        let id = request.pod_sandbox_id;
        self.at_once("RemovePodSandbox", "", &id, |state| {
            if state.sandboxes.contains_key(&id) {
                state.remove_sandbox(&id);
            }
            Ok(v1::RemovePodSandboxResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_pod_sandbox_status(
        &self,
        request: v1::PodSandboxStatusRequest,
    ) -> Answer<v1::PodSandboxStatusResponse> {
        let id = request.pod_sandbox_id;
        self.at_once("PodSandboxStatus", "", &id, |state| {
            let status = state.sandbox(&id)?.status();
            let (containers_statuses, timestamp) = match state.settings.events {
                true => (state.statuses_of(&id), state.nanos(state.now)),
                false => (vec![], 0),
            };
            Ok(v1::PodSandboxStatusResponse {
                status: Some(status),
                info: Default::default(),
                containers_statuses,
                timestamp,
            })
        })
        .await
    }

    pub(crate) async fn rpc_list_pod_sandbox(
        &self,
        request: v1::ListPodSandboxRequest,
    ) -> Answer<v1::ListPodSandboxResponse> {
        self.at_once("ListPodSandbox", "", "", |state| {
            Ok(v1::ListPodSandboxResponse { items: state.list_sandboxes(request.filter.as_ref()) })
        })
        .await
    }

    pub(crate) async fn rpc_update_pod_sandbox_resources(
        &self,
        request: v1::UpdatePodSandboxResourcesRequest,
    ) -> Answer<v1::UpdatePodSandboxResourcesResponse> {
        let id = request.pod_sandbox_id;
        self.at_once("UpdatePodSandboxResources", "", &id, |state| {
            state.sandbox(&id)?;
            if let Some(linux) = state.sandboxes.get_mut(&id).and_then(|s| s.config.linux.as_mut()) {
                (linux.overhead, linux.resources) = (request.overhead, request.resources);
            }
            Ok(v1::UpdatePodSandboxResourcesResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_port_forward(&self, request: v1::PortForwardRequest) -> Answer<v1::PortForwardResponse> {
        let id = request.pod_sandbox_id;
        self.at_once("PortForward", "", &id, |state| {
            if !state.sandbox(&id)?.ready {
                return refuse(format!("sandbox container {id:?} is not running"));
            }
            Ok(v1::PortForwardResponse { url: format!("{}/portforward/{id}", state.settings.streaming_base) })
        })
        .await
    }

    // ---- Containers

    pub(crate) async fn rpc_create_container(
        &self,
        request: v1::CreateContainerRequest,
    ) -> Answer<v1::CreateContainerResponse> {
        let config = request.config.unwrap_or_default();
        let name = config.metadata.as_ref().map(|m| m.name.as_str()).unwrap_or_default();
        let subject = self.with(|state| format!("{}/{name}", state.subject(&request.pod_sandbox_id)));
        self.at_once("CreateContainer", &subject, "", |state| {
            let container_id = state.create_container(&request.pod_sandbox_id, config)?;
            Ok(v1::CreateContainerResponse { container_id })
        })
        .await
    }

    pub(crate) async fn rpc_start_container(
        &self,
        request: v1::StartContainerRequest,
    ) -> Answer<v1::StartContainerResponse> {
        self.at_once("StartContainer", "", &request.container_id, |state| {
            state.start_container(&request.container_id).map(|()| v1::StartContainerResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_stop_container(
        &self,
        request: v1::StopContainerRequest,
    ) -> Answer<v1::StopContainerResponse> {
        let id = request.container_id;
        let grace = Duration::from_secs(request.timeout.max(0).unsigned_abs());
        let work = async {
            self.with(|state| state.container(&id).map(drop))?;
            self.stop(&id, grace).await;
            Ok(v1::StopContainerResponse {})
        };
        self.take("StopContainer", "", &id, work).await
    }

    /// Stop signal, grace, SIGKILL. When it is dropped in between, SIGKILL is not sent.
    async fn stop(&self, id: &str, grace: Duration) {
        let deadline = Instant::now() + grace;
        if !grace.is_zero() {
            self.with(|state| state.term(id));
        }
        loop {
            let mut changed = self.changes_seen();
            let (live, killed) = self.with(|state| {
                let live = state.containers.get(id).is_some_and(|container| container.live());
                (live, live && state.now >= deadline && state.kill(id))
            });
            if !live || killed {
                return;
            }
            let over = Instant::now() >= deadline;
            tokio::select! {
                _ = changed.changed() => {}
                () = tokio::time::sleep_until(deadline), if !over => {}
            }
        }
    }

    pub(crate) async fn rpc_remove_container(
        &self,
        request: v1::RemoveContainerRequest,
    ) -> Answer<v1::RemoveContainerResponse> {
        let id = request.container_id;
        self.at_once("RemoveContainer", "", &id, |state| {
            if !state.kill(&id) {
                return refuse(format!("failed to forcibly stop container {id:?}: it does not die"));
            }
            state.remove_container(&id);
            Ok(v1::RemoveContainerResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_list_containers(
        &self,
        request: v1::ListContainersRequest,
    ) -> Answer<v1::ListContainersResponse> {
        self.at_once("ListContainers", "", "", |state| {
            Ok(v1::ListContainersResponse { containers: state.list_containers(request.filter.as_ref()) })
        })
        .await
    }

    pub(crate) async fn rpc_container_status(
        &self,
        request: v1::ContainerStatusRequest,
    ) -> Answer<v1::ContainerStatusResponse> {
        let id = request.container_id;
        self.at_once("ContainerStatus", "", &id, |state| {
            let status = Some(state.container_status(state.container(&id)?));
            Ok(v1::ContainerStatusResponse { status, info: Default::default() })
        })
        .await
    }

    pub(crate) async fn rpc_update_container_resources(
        &self,
        request: v1::UpdateContainerResourcesRequest,
    ) -> Answer<v1::UpdateContainerResourcesResponse> {
        let id = request.container_id;
        self.at_once("UpdateContainerResources", "", &id, |state| {
            let found = state.container(&id)?.state;
            if !matches!(found, v1::ContainerState::ContainerCreated | v1::ContainerState::ContainerRunning) {
                return refuse(format!("failed to update resources: container is in {} state", found.as_str_name()));
            }
            if let (Some(container), Some(new)) = (state.containers.get_mut(&id), &request.linux) {
                let linux = container.config.linux.get_or_insert_default();
                update(linux.resources.get_or_insert_default(), new);
                state.changed = true;
            }
            Ok(v1::UpdateContainerResourcesResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_reopen_container_log(
        &self,
        request: v1::ReopenContainerLogRequest,
    ) -> Answer<v1::ReopenContainerLogResponse> {
        let id = request.container_id;
        self.at_once("ReopenContainerLog", "", &id, |state| {
            state.container(&id)?;
            state.running(&id, "container is not running").map(|_| v1::ReopenContainerLogResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_checkpoint_container(
        &self,
        request: v1::CheckpointContainerRequest,
    ) -> Answer<v1::CheckpointContainerResponse> {
        let id = request.container_id;
        self.at_once("CheckpointContainer", "", &id, |state| {
            state.running(&id, "failed to checkpoint container").map(|_| v1::CheckpointContainerResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_exec_sync(&self, request: v1::ExecSyncRequest) -> Answer<v1::ExecSyncResponse> {
        let v1::ExecSyncRequest { container_id: id, cmd, timeout } = request;
        let work = async {
            let script = self.with(|state| {
                let name = state.running(&id, "failed to exec in container")?.metadata().name;
                Ok(state.exec_scripts.get(&name).cloned())
            })?;
            let Exec { output, takes } = script.map(|script| script(&cmd)).unwrap_or_default();
            let limit = Duration::from_secs(timeout.max(0).unsigned_abs());
            if !limit.is_zero() && takes > limit {
                tokio::time::sleep(limit).await;
                let text =
                    format!("failed to exec in container: timeout {limit:?} exceeded: context deadline exceeded");
                return Err(Refusal(DEADLINE_EXCEEDED, text));
            }
            tokio::time::sleep(takes).await;
            let cri::ExecOutput { stdout, stderr, exit_code } = output;
            Ok(v1::ExecSyncResponse { stdout, stderr, exit_code })
        };
        self.take("ExecSync", "", &id, work).await
    }

    pub(crate) async fn rpc_exec(&self, request: v1::ExecRequest) -> Answer<v1::ExecResponse> {
        let id = request.container_id;
        self.at_once("Exec", "", &id, |state| {
            if request.cmd.is_empty() {
                return Err(Refusal(INVALID_ARGUMENT, "command must not be empty".into()));
            }
            state.running(&id, "failed to exec in container")?;
            Ok(v1::ExecResponse { url: format!("{}/exec/{id}", state.settings.streaming_base) })
        })
        .await
    }

    pub(crate) async fn rpc_attach(&self, request: v1::AttachRequest) -> Answer<v1::AttachResponse> {
        let id = request.container_id;
        self.at_once("Attach", "", &id, |state| {
            state.running(&id, "failed to attach to container")?;
            Ok(v1::AttachResponse { url: format!("{}/attach/{id}", state.settings.streaming_base) })
        })
        .await
    }

    /// The events from now on, until the connections break.
    pub(crate) fn events(&self) -> Done<BoxStream<'static, v1::ContainerEventResponse>> {
        let subscribed = self.with(|state| match state.settings.events {
            true => Ok(state.events.subscribe()),
            false => unimplemented("GetContainerEvents", RUNTIME_SERVICE),
        })?;
        let events = stream::unfold(subscribed, |mut events| async move {
            loop {
                match events.recv().await {
                    Ok(event) => return Some((event, events)),
                    // A slow listener misses some, as with the real one.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return None,
                }
            }
        });
        let connection = self.connections().borrow().clone();
        Ok(events.take_until(connection.cancelled_owned()).boxed())
    }

    // ---- Usage figures

    pub(crate) async fn rpc_container_stats(
        &self,
        request: v1::ContainerStatsRequest,
    ) -> Answer<v1::ContainerStatsResponse> {
        let id = request.container_id;
        self.at_once("ContainerStats", "", &id, |state| {
            Ok(v1::ContainerStatsResponse { stats: Some(state.container_stats(state.container(&id)?)) })
        })
        .await
    }

    pub(crate) async fn rpc_list_container_stats(
        &self,
        request: v1::ListContainerStatsRequest,
    ) -> Answer<v1::ListContainerStatsResponse> {
        self.at_once("ListContainerStats", "", "", |state| {
            Ok(v1::ListContainerStatsResponse { stats: state.list_container_stats(request.filter.as_ref()) })
        })
        .await
    }

    pub(crate) async fn rpc_pod_sandbox_stats(
        &self,
        request: v1::PodSandboxStatsRequest,
    ) -> Answer<v1::PodSandboxStatsResponse> {
        let id = request.pod_sandbox_id;
        self.at_once("PodSandboxStats", "", &id, |state| {
            Ok(v1::PodSandboxStatsResponse { stats: Some(state.sandbox_stats(state.sandbox(&id)?)) })
        })
        .await
    }

    pub(crate) async fn rpc_list_pod_sandbox_stats(
        &self,
        request: v1::ListPodSandboxStatsRequest,
    ) -> Answer<v1::ListPodSandboxStatsResponse> {
        self.at_once("ListPodSandboxStats", "", "", |state| {
            Ok(v1::ListPodSandboxStatsResponse { stats: state.list_sandbox_stats(request.filter.as_ref()) })
        })
        .await
    }

    pub(crate) async fn rpc_list_metric_descriptors(&self) -> Answer<v1::ListMetricDescriptorsResponse> {
        self.at_once("ListMetricDescriptors", "", "", |_| {
            let descriptor = v1::MetricDescriptor {
                name: "container_last_seen".into(),
                help: "Last time a container was seen by the runtime.".into(),
                label_keys: vec![],
            };
            Ok(v1::ListMetricDescriptorsResponse { descriptors: vec![descriptor] })
        })
        .await
    }

    pub(crate) async fn rpc_list_pod_sandbox_metrics(&self) -> Answer<v1::ListPodSandboxMetricsResponse> {
        self.at_once("ListPodSandboxMetrics", "", "", |state| {
            let pod_metrics = state
                .sandboxes
                .keys()
                .map(|id| v1::PodSandboxMetrics { pod_sandbox_id: id.clone(), ..Default::default() });
            Ok(v1::ListPodSandboxMetricsResponse { pod_metrics: pod_metrics.collect() })
        })
        .await
    }

    // ---- Images

    pub(crate) async fn rpc_list_images(&self, request: v1::ListImagesRequest) -> Answer<v1::ListImagesResponse> {
        self.at_once("ListImages", "", "", |state| {
            Ok(v1::ListImagesResponse { images: state.list_images(request.filter.as_ref()) })
        })
        .await
    }

    pub(crate) async fn rpc_image_status(&self, request: v1::ImageStatusRequest) -> Answer<v1::ImageStatusResponse> {
        let name = request.image.unwrap_or_default().image;
        self.at_once("ImageStatus", &name, "", |state| {
            Ok(v1::ImageStatusResponse { image: state.images.find(&name).cloned(), info: Default::default() })
        })
        .await
    }

    pub(crate) async fn rpc_pull_image(&self, request: v1::PullImageRequest) -> Answer<v1::PullImageResponse> {
        let name = request.image.unwrap_or_default().image;
        let full = full_name(&name);
        let work = async {
            let remote = self.with(|state| match state.images.remote.get(&full) {
                None if state.settings.open_registry => Some(Remote::default()),
                remote => remote.cloned(),
            });
            let context = format!("failed to pull and unpack image {full:?}: failed to resolve reference {full:?}");
            let Some(remote) = remote else {
                return Err(Refusal(NOT_FOUND, format!("{context}: {full}: not found")));
            };
            let auth = request.auth.unwrap_or_default();
            if remote.login.is_some_and(|login| login != (auth.username, auth.password)) {
                let why = "pull access denied, repository does not exist or may require authorization: \
                           server message: insufficient_scope: authorization failed";
                return Err(Refusal(UNKNOWN, format!("{context}: {why}")));
            }
            tokio::time::sleep(remote.takes).await;
            Ok(v1::PullImageResponse { image_ref: self.with(|state| state.images.add(&full)) })
        };
        self.take("PullImage", &name, "", work).await
    }

    pub(crate) async fn rpc_remove_image(&self, request: v1::RemoveImageRequest) -> Answer<v1::RemoveImageResponse> {
        let name = request.image.unwrap_or_default().image;
        self.at_once("RemoveImage", &name, "", |state| {
            if let Some(id) = state.images.find(&name).map(|image| image.id.clone()) {
                state.images.local.remove(&id);
            }
            Ok(v1::RemoveImageResponse {})
        })
        .await
    }

    pub(crate) async fn rpc_image_fs_info(&self) -> Answer<v1::ImageFsInfoResponse> {
        self.at_once("ImageFsInfo", "", "", |state| {
            let images = state.images.local.values().map(|image| image.size).sum();
            let layers = state.containers.len() as u64 * (24 << 10);
            Ok(v1::ImageFsInfoResponse {
                image_filesystems: vec![state.filesystem(images)],
                container_filesystems: vec![state.filesystem(layers)],
            })
        })
        .await
    }
}
