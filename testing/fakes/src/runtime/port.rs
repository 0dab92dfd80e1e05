//! The port's traits, straight: with the real client's deadlines and outcomes, but without a socket.

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use cri::client::MAX_ANSWER;
use cri::{CriError, CriResult, ExecOutput, RuntimeMutator, RuntimeReader, RuntimeStreaming};
use cri_api::v1;
use futures::stream::{self, BoxStream, StreamExt};
use prost::Message;

use super::state::Refusal;
use super::{Answer, Ending, FakeRuntime};

/// What the dial of a socket without listener says.
const REFUSED: &str = "connection error: desc = \"transport: Error while dialing: dial unix /run/fake.sock: \
                       connect: connection refused\"";

fn error(call: &'static str, target: &str, ending: Ending) -> CriError {
    match ending {
        Ending::Refused(Refusal(code, message)) => CriError::answered(call, target, code, message),
        Ending::Lost => CriError::lost(call, target, "EOF"),
        Ending::Unreachable => CriError::unreachable(call, target, REFUSED),
    }
}

fn gone(answer: CriResult<()>) -> CriResult<()> {
    match answer {
        Err(error) if error.is_not_found() => Ok(()),
        answer => answer,
    }
}

/// Whole seconds, never fewer than asked for.
fn seconds(time: Duration) -> i64 {
    time.as_secs() as i64 + i64::from(time.subsec_nanos() > 0)
}

impl FakeRuntime {
    fn timeout(&self) -> Duration {
        self.with(|state| state.settings.request_timeout)
    }

    async fn direct<T: Message>(
        &self,
        call: &'static str,
        target: &str,
        deadline: Option<Duration>,
        work: impl Future<Output = Answer<T>> + Send,
    ) -> CriResult<T> {
        let answer = match deadline {
            Some(deadline) => match tokio::time::timeout(deadline, work).await {
                Ok(answer) => answer,
                Err(_) => return Err(CriError::timed_out(call, target)),
            },
            None => work.await,
        };
        let answer = answer.map_err(|ending| error(call, target, ending))?;
        match answer.encoded_len() {
            size if size > MAX_ANSWER => Err(CriError::too_large(call, target, &size.to_string(), MAX_ANSWER)),
            _ => Ok(answer),
        }
    }

    /// A call with the ordinary deadline.
    async fn plain<T: Message>(
        &self,
        call: &'static str,
        target: &str,
        work: impl Future<Output = Answer<T>> + Send,
    ) -> CriResult<T> {
        self.direct(call, target, Some(self.timeout()), work).await
    }
}

#[async_trait]
impl RuntimeReader for FakeRuntime {
    async fn version(&self) -> CriResult<v1::VersionResponse> {
        self.plain("Version", "", self.rpc_version()).await
    }

    async fn status(&self, verbose: bool) -> CriResult<v1::StatusResponse> {
        self.plain("Status", "", self.rpc_status(v1::StatusRequest { verbose })).await
    }

    async fn runtime_config(&self) -> CriResult<v1::RuntimeConfigResponse> {
        self.plain("RuntimeConfig", "", self.rpc_runtime_config()).await
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> CriResult<Vec<v1::PodSandbox>> {
        let request = v1::ListPodSandboxRequest { filter };
        Ok(self.plain("ListPodSandbox", "", self.rpc_list_pod_sandbox(request)).await?.items)
    }

    async fn pod_sandbox_status(&self, id: &str, verbose: bool) -> CriResult<v1::PodSandboxStatusResponse> {
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose };
        self.plain("PodSandboxStatus", id, self.rpc_pod_sandbox_status(request)).await
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> CriResult<Vec<v1::Container>> {
        let request = v1::ListContainersRequest { filter };
        Ok(self.plain("ListContainers", "", self.rpc_list_containers(request)).await?.containers)
    }

    async fn container_status(&self, id: &str, verbose: bool) -> CriResult<v1::ContainerStatusResponse> {
        let request = v1::ContainerStatusRequest { container_id: id.into(), verbose };
        self.plain("ContainerStatus", id, self.rpc_container_status(request)).await
    }

    async fn container_stats(&self, id: &str) -> CriResult<v1::ContainerStats> {
        let request = v1::ContainerStatsRequest { container_id: id.into() };
        let answer = self.plain("ContainerStats", id, self.rpc_container_stats(request)).await?;
        Ok(answer.stats.unwrap_or_default())
    }

    async fn list_container_stats(
        &self,
        filter: Option<v1::ContainerStatsFilter>,
    ) -> CriResult<Vec<v1::ContainerStats>> {
        let request = v1::ListContainerStatsRequest { filter };
        Ok(self.plain("ListContainerStats", "", self.rpc_list_container_stats(request)).await?.stats)
    }

    async fn pod_sandbox_stats(&self, id: &str) -> CriResult<v1::PodSandboxStats> {
        let request = v1::PodSandboxStatsRequest { pod_sandbox_id: id.into() };
        let answer = self.plain("PodSandboxStats", id, self.rpc_pod_sandbox_stats(request)).await?;
        Ok(answer.stats.unwrap_or_default())
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<v1::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<v1::PodSandboxStats>> {
        let request = v1::ListPodSandboxStatsRequest { filter };
        Ok(self.plain("ListPodSandboxStats", "", self.rpc_list_pod_sandbox_stats(request)).await?.stats)
    }

    async fn list_metric_descriptors(&self) -> CriResult<Vec<v1::MetricDescriptor>> {
        Ok(self.plain("ListMetricDescriptors", "", self.rpc_list_metric_descriptors()).await?.descriptors)
    }

    async fn list_pod_sandbox_metrics(&self) -> CriResult<Vec<v1::PodSandboxMetrics>> {
        Ok(self.plain("ListPodSandboxMetrics", "", self.rpc_list_pod_sandbox_metrics()).await?.pod_metrics)
    }

    async fn list_images(&self, filter: Option<v1::ImageFilter>) -> CriResult<Vec<v1::Image>> {
        Ok(self.plain("ListImages", "", self.rpc_list_images(v1::ListImagesRequest { filter })).await?.images)
    }

    async fn image_status(&self, image: v1::ImageSpec) -> CriResult<Option<v1::Image>> {
        let name = image.image.clone();
        let request = v1::ImageStatusRequest { image: Some(image), verbose: false };
        Ok(self.plain("ImageStatus", &name, self.rpc_image_status(request)).await?.image)
    }

    async fn image_fs_info(&self) -> CriResult<v1::ImageFsInfoResponse> {
        self.plain("ImageFsInfo", "", self.rpc_image_fs_info()).await
    }

    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<v1::ContainerEventResponse>>> {
        const CALL: &str = "GetContainerEvents";
        let events = match self.with(|state| state.up) {
            true => self.events().map_err(Ending::Refused),
            false => Err(Ending::Unreachable),
        };
        Ok(match events {
            Ok(events) => {
                let end = stream::once(async { Err(error(CALL, "", Ending::Lost)) });
                events.map(Ok).chain(end).boxed()
            }
            Err(ending) => stream::once(async { Err(error(CALL, "", ending)) }).boxed(),
        })
    }
}

#[async_trait]
impl RuntimeMutator for FakeRuntime {
    async fn run_pod_sandbox(&self, config: v1::PodSandboxConfig, runtime_handler: &str) -> CriResult<String> {
        let pod = config.metadata.as_ref().map(|m| format!("{}/{}", m.namespace, m.name)).unwrap_or_default();
        let request = v1::RunPodSandboxRequest { config: Some(config), runtime_handler: runtime_handler.into() };
        let deadline = Some(self.timeout() * 2);
        let answer = self.direct("RunPodSandbox", &pod, deadline, self.rpc_run_pod_sandbox(request)).await?;
        Ok(answer.pod_sandbox_id)
    }

    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = v1::StopPodSandboxRequest { pod_sandbox_id: id.into() };
        gone(self.plain("StopPodSandbox", id, self.rpc_stop_pod_sandbox(request)).await.map(drop))
    }

    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = v1::RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        gone(self.plain("RemovePodSandbox", id, self.rpc_remove_pod_sandbox(request)).await.map(drop))
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: v1::ContainerConfig,
        sandbox: v1::PodSandboxConfig,
    ) -> CriResult<String> {
        let name = config.metadata.as_ref().map(|m| m.name.clone()).unwrap_or_default();
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.into(),
            config: Some(config),
            sandbox_config: Some(sandbox),
        };
        Ok(self.plain("CreateContainer", &name, self.rpc_create_container(request)).await?.container_id)
    }

    async fn start_container(&self, id: &str) -> CriResult<()> {
        let request = v1::StartContainerRequest { container_id: id.into() };
        self.plain("StartContainer", id, self.rpc_start_container(request)).await.map(drop)
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        let deadline = Some(self.timeout() + grace);
        let request = v1::StopContainerRequest { container_id: id.into(), timeout: seconds(grace) };
        gone(self.direct("StopContainer", id, deadline, self.rpc_stop_container(request)).await.map(drop))
    }

    async fn remove_container(&self, id: &str) -> CriResult<()> {
        let request = v1::RemoveContainerRequest { container_id: id.into() };
        gone(self.plain("RemoveContainer", id, self.rpc_remove_container(request)).await.map(drop))
    }

    async fn update_container_resources(&self, id: &str, linux: v1::LinuxContainerResources) -> CriResult<()> {
        let request =
            v1::UpdateContainerResourcesRequest { container_id: id.into(), linux: Some(linux), ..Default::default() };
        self.plain("UpdateContainerResources", id, self.rpc_update_container_resources(request)).await.map(drop)
    }

    async fn update_pod_sandbox_resources(&self, request: v1::UpdatePodSandboxResourcesRequest) -> CriResult<()> {
        let id = request.pod_sandbox_id.clone();
        self.plain("UpdatePodSandboxResources", &id, self.rpc_update_pod_sandbox_resources(request)).await.map(drop)
    }

    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        let deadline = Some(self.timeout().max(timeout));
        let request = v1::CheckpointContainerRequest {
            container_id: id.into(),
            location: location.into(),
            timeout: seconds(timeout),
        };
        self.direct("CheckpointContainer", id, deadline, self.rpc_checkpoint_container(request)).await.map(drop)
    }

    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        let request = v1::ReopenContainerLogRequest { container_id: id.into() };
        self.plain("ReopenContainerLog", id, self.rpc_reopen_container_log(request)).await.map(drop)
    }

    async fn exec_sync(&self, id: &str, command: Vec<String>, timeout: Option<Duration>) -> CriResult<ExecOutput> {
        let timeout = timeout.filter(|timeout| !timeout.is_zero());
        let deadline = timeout.map(|timeout| self.timeout() + timeout);
        let request =
            v1::ExecSyncRequest { container_id: id.into(), cmd: command, timeout: timeout.map_or(0, seconds) };
        let answer = self.direct("ExecSync", id, deadline, self.rpc_exec_sync(request)).await?;
        Ok(ExecOutput { stdout: answer.stdout, stderr: answer.stderr, exit_code: answer.exit_code })
    }

    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> CriResult<String> {
        let name = image.image.clone();
        let request = v1::PullImageRequest { image: Some(image), auth, sandbox_config: sandbox };
        Ok(self.direct("PullImage", &name, None, self.rpc_pull_image(request)).await?.image_ref)
    }

    async fn remove_image(&self, image: v1::ImageSpec) -> CriResult<()> {
        let name = image.image.clone();
        let request = v1::RemoveImageRequest { image: Some(image) };
        self.plain("RemoveImage", &name, self.rpc_remove_image(request)).await.map(drop)
    }

    async fn update_runtime_config(&self, config: v1::RuntimeConfig) -> CriResult<()> {
        let request = v1::UpdateRuntimeConfigRequest { runtime_config: Some(config) };
        self.plain("UpdateRuntimeConfig", "", self.rpc_update_runtime_config(request)).await.map(drop)
    }
}

#[async_trait]
impl RuntimeStreaming for FakeRuntime {
    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String> {
        let id = request.container_id.clone();
        Ok(self.plain("Exec", &id, self.rpc_exec(request)).await?.url)
    }

    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String> {
        let id = request.container_id.clone();
        Ok(self.plain("Attach", &id, self.rpc_attach(request)).await?.url)
    }

    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String> {
        let id = request.pod_sandbox_id.clone();
        Ok(self.plain("PortForward", &id, self.rpc_port_forward(request)).await?.url)
    }
}
