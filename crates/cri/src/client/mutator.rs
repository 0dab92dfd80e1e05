//! [`RuntimeMutator`] over gRPC.

use std::time::Duration;

use async_trait::async_trait;
use cri_api::v1;

use super::{CriClient, rpc, seconds};
use crate::port::{CriError, CriResult, ExecOutput, RuntimeMutator};

/// What is to be gone is gone when the runtime does not know it.
fn gone(answer: CriResult<()>) -> CriResult<()> {
    match answer {
        Err(error) if error.is_not_found() => Ok(()),
        answer => answer,
    }
}

#[async_trait]
impl RuntimeMutator for CriClient {
    async fn run_pod_sandbox(&self, config: v1::PodSandboxConfig, runtime_handler: &str) -> CriResult<String> {
        let pod = config.metadata.as_ref().map(|m| format!("{}/{}", m.namespace, m.name)).unwrap_or_default();
        // Networks are set up in it, and plugins for that may be slow: twice the time.
        let deadline = Some(self.timeout * 2);
        let request = v1::RunPodSandboxRequest { config: Some(config), runtime_handler: runtime_handler.into() };
        let answer = rpc!(self.runtime.run_pod_sandbox, "RunPodSandbox", &pod, deadline, request)?;
        if answer.pod_sandbox_id.is_empty() {
            let text = format!("PodSandboxId is not set for sandbox {pod:?}");
            return Err(CriError::malformed("RunPodSandbox", &pod, text));
        }
        Ok(answer.pod_sandbox_id)
    }

    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = v1::StopPodSandboxRequest { pod_sandbox_id: id.into() };
        let answer = rpc!(self.runtime.stop_pod_sandbox, "StopPodSandbox", id, Some(self.timeout), request);
        gone(answer.map(drop))
    }

    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = v1::RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        let answer = rpc!(self.runtime.remove_pod_sandbox, "RemovePodSandbox", id, Some(self.timeout), request);
        gone(answer.map(drop))
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
        let answer = rpc!(self.runtime.create_container, "CreateContainer", &name, Some(self.timeout), request)?;
        if answer.container_id.is_empty() {
            let text = format!("ContainerId is not set for container {name:?}");
            return Err(CriError::malformed("CreateContainer", &name, text));
        }
        Ok(answer.container_id)
    }

    async fn start_container(&self, id: &str) -> CriResult<()> {
        let request = v1::StartContainerRequest { container_id: id.into() };
        rpc!(self.runtime.start_container, "StartContainer", id, Some(self.timeout), request).map(drop)
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        let deadline = Some(self.timeout.saturating_add(grace));
        let request = v1::StopContainerRequest { container_id: id.into(), timeout: seconds(grace) };
        gone(rpc!(self.runtime.stop_container, "StopContainer", id, deadline, request).map(drop))
    }

    async fn remove_container(&self, id: &str) -> CriResult<()> {
        let request = v1::RemoveContainerRequest { container_id: id.into() };
        gone(rpc!(self.runtime.remove_container, "RemoveContainer", id, Some(self.timeout), request).map(drop))
    }

    async fn update_container_resources(&self, id: &str, linux: v1::LinuxContainerResources) -> CriResult<()> {
        let request =
            v1::UpdateContainerResourcesRequest { container_id: id.into(), linux: Some(linux), ..Default::default() };
        let deadline = Some(self.timeout);
        rpc!(self.runtime.update_container_resources, "UpdateContainerResources", id, deadline, request).map(drop)
    }

    async fn update_pod_sandbox_resources(&self, request: v1::UpdatePodSandboxResourcesRequest) -> CriResult<()> {
        let id = request.pod_sandbox_id.clone();
        let deadline = Some(self.timeout);
        rpc!(self.runtime.update_pod_sandbox_resources, "UpdatePodSandboxResources", &id, deadline, request).map(drop)
    }

    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        let deadline = Some(self.timeout.max(timeout));
        let request = v1::CheckpointContainerRequest {
            container_id: id.into(),
            location: location.into(),
            timeout: seconds(timeout),
        };
        rpc!(self.runtime.checkpoint_container, "CheckpointContainer", id, deadline, request).map(drop)
    }

    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        let request = v1::ReopenContainerLogRequest { container_id: id.into() };
        rpc!(self.runtime.reopen_container_log, "ReopenContainerLog", id, Some(self.timeout), request).map(drop)
    }

    async fn exec_sync(&self, id: &str, command: Vec<String>, timeout: Option<Duration>) -> CriResult<ExecOutput> {
        let timeout = timeout.filter(|timeout| !timeout.is_zero());
        let deadline = timeout.map(|timeout| self.timeout.saturating_add(timeout));
        let request =
            v1::ExecSyncRequest { container_id: id.into(), cmd: command, timeout: timeout.map_or(0, seconds) };
        let answer = rpc!(self.runtime.exec_sync, "ExecSync", id, deadline, request)?;
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
        let answer = rpc!(self.image.pull_image, "PullImage", &name, None, request)?;
        if answer.image_ref.is_empty() {
            return Err(CriError::malformed("PullImage", &name, format!("imageRef of image {name:?} is not set")));
        }
        Ok(answer.image_ref)
    }

    async fn remove_image(&self, image: v1::ImageSpec) -> CriResult<()> {
        let name = image.image.clone();
        let request = v1::RemoveImageRequest { image: Some(image) };
        rpc!(self.image.remove_image, "RemoveImage", &name, Some(self.timeout), request).map(drop)
    }

    async fn update_runtime_config(&self, config: v1::RuntimeConfig) -> CriResult<()> {
        let request = v1::UpdateRuntimeConfigRequest { runtime_config: Some(config) };
        rpc!(self.runtime.update_runtime_config, "UpdateRuntimeConfig", "", Some(self.timeout), request).map(drop)
    }
}
