//! The runtime as a value: who may look at it ([`RuntimeReader`]) and who may change it ([`RuntimeMutator`]).
//!
//! The right to change is handed out once, in wire.rs (invariant 4). Fakes implement the same traits.

use std::time::Duration;

use async_trait::async_trait;
use cri_api::v1;
use futures::stream::BoxStream;

/// How a failed call ended. [`Outcome::Unknown`] means that the runtime may or may not have done it: observe again before repeating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// gRPC NotFound.
    NotFound,
    /// gRPC Unimplemented.
    Unimplemented,
    /// gRPC ResourceExhausted (also: answer larger than 16 MiB).
    ResourceExhausted,
    /// No answer in time, connection lost or refused in the middle.
    Unknown,
    /// The runtime could not be reached: the call was never sent.
    Unreachable,
    /// The runtime refused or failed.
    Failed,
}

/// A failed CRI call.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call}{}{target}: {message}", if target.is_empty() { "" } else { " " })]
pub struct CriError {
    /// The CRI method, as `RunPodSandbox`.
    pub call: &'static str,
    /// What it was about: an id, a pod, an image; may be empty.
    pub target: String,
    /// How it ended.
    pub outcome: Outcome,
    /// The gRPC status code's number (2 Unknown, 5 NotFound, …).
    pub code: i32,
    /// The runtime's words (the gRPC message alone, as Go puts it into events).
    pub message: String,
}

impl CriError {
    /// True for gRPC NotFound.
    pub fn is_not_found(&self) -> bool {
        self.outcome == Outcome::NotFound
    }

    /// True when the runtime may have done it all the same.
    pub fn outcome_unknown(&self) -> bool {
        self.outcome == Outcome::Unknown
    }
}

/// The result of a CRI call.
pub type CriResult<T> = Result<T, CriError>;

/// The output of a command run in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Exit code.
    pub exit_code: i32,
}

/// Everything that only looks.
#[async_trait]
pub trait RuntimeReader: Send + Sync {
    /// Version.
    async fn version(&self) -> CriResult<v1::VersionResponse>;
    /// Status; conditions, handlers and features.
    async fn status(&self, verbose: bool) -> CriResult<v1::StatusResponse>;
    /// RuntimeConfig; the cgroup driver. Tried 3 times, 2 s apart, but not when Unimplemented.
    async fn runtime_config(&self) -> CriResult<v1::RuntimeConfigResponse>;
    /// ListPodSandbox.
    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> CriResult<Vec<v1::PodSandbox>>;
    /// PodSandboxStatus.
    async fn pod_sandbox_status(&self, id: &str, verbose: bool) -> CriResult<v1::PodSandboxStatusResponse>;
    /// ListContainers.
    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> CriResult<Vec<v1::Container>>;
    /// ContainerStatus.
    async fn container_status(&self, id: &str, verbose: bool) -> CriResult<v1::ContainerStatusResponse>;
    /// ContainerStats.
    async fn container_stats(&self, id: &str) -> CriResult<v1::ContainerStats>;
    /// ListContainerStats.
    async fn list_container_stats(
        &self,
        filter: Option<v1::ContainerStatsFilter>,
    ) -> CriResult<Vec<v1::ContainerStats>>;
    /// PodSandboxStats.
    async fn pod_sandbox_stats(&self, id: &str) -> CriResult<v1::PodSandboxStats>;
    /// ListPodSandboxStats.
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<v1::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<v1::PodSandboxStats>>;
    /// ListMetricDescriptors.
    async fn list_metric_descriptors(&self) -> CriResult<Vec<v1::MetricDescriptor>>;
    /// ListPodSandboxMetrics.
    async fn list_pod_sandbox_metrics(&self) -> CriResult<Vec<v1::PodSandboxMetrics>>;
    /// ListImages.
    async fn list_images(&self, filter: Option<v1::ImageFilter>) -> CriResult<Vec<v1::Image>>;
    /// ImageStatus; None when absent.
    async fn image_status(&self, image: v1::ImageSpec) -> CriResult<Option<v1::Image>>;
    /// ImageFsInfo.
    async fn image_fs_info(&self) -> CriResult<v1::ImageFsInfoResponse>;
    /// GetContainerEvents. Returns before the runtime has answered, since Go runtimes answer with their first event only: a
    /// runtime without events shows as Unimplemented in the first item. The stream ends after an error.
    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<v1::ContainerEventResponse>>>;
}

/// Everything that changes the runtime. Only the pod workers, through `sync`, hold one.
#[async_trait]
pub trait RuntimeMutator: Send + Sync {
    /// RunPodSandbox; the sandbox's id.
    async fn run_pod_sandbox(&self, config: v1::PodSandboxConfig, runtime_handler: &str) -> CriResult<String>;
    /// StopPodSandbox. NotFound counts as done.
    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// RemovePodSandbox. NotFound counts as done.
    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// CreateContainer; the container's id.
    async fn create_container(
        &self,
        sandbox_id: &str,
        config: v1::ContainerConfig,
        sandbox: v1::PodSandboxConfig,
    ) -> CriResult<String>;
    /// StartContainer.
    async fn start_container(&self, id: &str) -> CriResult<()>;
    /// StopContainer with this grace; deadline runtimeRequestTimeout + grace. NotFound counts as done.
    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()>;
    /// RemoveContainer. NotFound counts as done.
    async fn remove_container(&self, id: &str) -> CriResult<()>;
    /// UpdateContainerResources.
    async fn update_container_resources(&self, id: &str, linux: v1::LinuxContainerResources) -> CriResult<()>;
    /// UpdatePodSandboxResources; Unimplemented is the caller's to ignore.
    async fn update_pod_sandbox_resources(&self, request: v1::UpdatePodSandboxResourcesRequest) -> CriResult<()>;
    /// CheckpointContainer into this archive; deadline the larger of runtimeRequestTimeout and `timeout`.
    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()>;
    /// ReopenContainerLog.
    async fn reopen_container_log(&self, id: &str) -> CriResult<()>;
    /// ExecSync; `timeout` None: no deadline at all.
    async fn exec_sync(&self, id: &str, command: Vec<String>, timeout: Option<Duration>) -> CriResult<ExecOutput>;
    /// PullImage without deadline; the image ref. Dropping the future cancels the call.
    async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox: Option<v1::PodSandboxConfig>,
    ) -> CriResult<String>;
    /// RemoveImage.
    async fn remove_image(&self, image: v1::ImageSpec) -> CriResult<()>;
    /// UpdateRuntimeConfig (pod CIDR).
    async fn update_runtime_config(&self, config: v1::RuntimeConfig) -> CriResult<()>;
}

/// Ways into containers: each answers with the URL of the runtime's streaming server.
#[async_trait]
pub trait RuntimeStreaming: Send + Sync {
    /// Exec.
    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String>;
    /// Attach.
    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String>;
    /// PortForward.
    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String>;
}

/// Sees every call of a client end; feeds the runtime operation metrics.
pub trait CallObserver: Send + Sync {
    /// `call` is the CRI method (`RunPodSandbox`), `took` the time until its answer or failure.
    fn observed(&self, call: &'static str, took: Duration, error: Option<&CriError>);
}
