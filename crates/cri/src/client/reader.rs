//! [`RuntimeReader`] over gRPC.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use cri_api::v1;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::time::Instant;
use tonic::{Request, Streaming};

use super::{API_VERSION, CriClient, IMAGE_FS, list, rpc};
use crate::port::{CriError, CriResult, Outcome, RuntimeReader};
use crate::verify;

/// How often RuntimeConfig is tried, and the pause between: the kubelet needs it once, while it starts.
const RUNTIME_CONFIG_TRIES: u32 = 3;
const RUNTIME_CONFIG_PAUSE: Duration = Duration::from_secs(2);

#[async_trait]
impl RuntimeReader for CriClient {
    async fn version(&self) -> CriResult<v1::VersionResponse> {
        let request = v1::VersionRequest { version: API_VERSION.into() };
        rpc!(self.runtime.version, "Version", "", Some(self.timeout), request)
    }

    async fn status(&self, verbose: bool) -> CriResult<v1::StatusResponse> {
        let answer = rpc!(self.runtime.status, "Status", "", Some(self.timeout), v1::StatusRequest { verbose })?;
        verify::runtime_status(&answer).map_err(|text| CriError::malformed("Status", "", text))?;
        Ok(answer)
    }

    async fn runtime_config(&self) -> CriResult<v1::RuntimeConfigResponse> {
        let mut tries = 1;
        loop {
            let deadline = Some(self.timeout);
            let answer = rpc!(self.runtime.runtime_config, "RuntimeConfig", "", deadline, v1::RuntimeConfigRequest {});
            match answer {
                Err(error) if error.outcome != Outcome::Unimplemented && tries < RUNTIME_CONFIG_TRIES => {
                    tracing::warn!(%error, tries, "The runtime did not tell its configuration; trying again");
                }
                answer => return answer,
            }
            tries += 1;
            tokio::time::sleep(RUNTIME_CONFIG_PAUSE).await;
        }
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> CriResult<Vec<v1::PodSandbox>> {
        list!(self.runtime, stream_runtime_lists, filter,
            stream_pod_sandboxes "StreamPodSandboxes" |filter| v1::StreamPodSandboxesRequest { filter } => pod_sandboxes,
            list_pod_sandbox "ListPodSandbox" |filter| v1::ListPodSandboxRequest { filter } => items)
    }

    async fn pod_sandbox_status(&self, id: &str, verbose: bool) -> CriResult<v1::PodSandboxStatusResponse> {
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose };
        let answer = rpc!(self.runtime.pod_sandbox_status, "PodSandboxStatus", id, Some(self.timeout), request)?;
        verify::sandbox_status(answer.status.as_ref())
            .map_err(|text| CriError::malformed("PodSandboxStatus", id, text))?;
        Ok(answer)
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> CriResult<Vec<v1::Container>> {
        list!(self.runtime, stream_runtime_lists, filter,
            stream_containers "StreamContainers" |filter| v1::StreamContainersRequest { filter } => containers,
            list_containers "ListContainers" |filter| v1::ListContainersRequest { filter } => containers)
    }

    async fn container_status(&self, id: &str, verbose: bool) -> CriResult<v1::ContainerStatusResponse> {
        let request = v1::ContainerStatusRequest { container_id: id.into(), verbose };
        let answer = rpc!(self.runtime.container_status, "ContainerStatus", id, Some(self.timeout), request)?;
        verify::container_status(answer.status.as_ref())
            .map_err(|text| CriError::malformed("ContainerStatus", id, text))?;
        Ok(answer)
    }

    async fn container_stats(&self, id: &str) -> CriResult<v1::ContainerStats> {
        let request = v1::ContainerStatsRequest { container_id: id.into() };
        let answer = rpc!(self.runtime.container_stats, "ContainerStats", id, Some(self.timeout), request)?;
        answer.stats.ok_or_else(|| CriError::malformed("ContainerStats", id, "stats is not set"))
    }

    async fn list_container_stats(
        &self,
        filter: Option<v1::ContainerStatsFilter>,
    ) -> CriResult<Vec<v1::ContainerStats>> {
        list!(self.runtime, stream_runtime_lists, filter,
            stream_container_stats "StreamContainerStats"
                |filter| v1::StreamContainerStatsRequest { filter } => container_stats,
            list_container_stats "ListContainerStats" |filter| v1::ListContainerStatsRequest { filter } => stats)
    }

    async fn pod_sandbox_stats(&self, id: &str) -> CriResult<v1::PodSandboxStats> {
        let request = v1::PodSandboxStatsRequest { pod_sandbox_id: id.into() };
        let answer = rpc!(self.runtime.pod_sandbox_stats, "PodSandboxStats", id, Some(self.timeout), request)?;
        answer.stats.ok_or_else(|| CriError::malformed("PodSandboxStats", id, "stats is not set"))
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<v1::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<v1::PodSandboxStats>> {
        list!(self.runtime, stream_runtime_lists, filter,
            stream_pod_sandbox_stats "StreamPodSandboxStats"
                |filter| v1::StreamPodSandboxStatsRequest { filter } => pod_sandbox_stats,
            list_pod_sandbox_stats "ListPodSandboxStats" |filter| v1::ListPodSandboxStatsRequest { filter } => stats)
    }

    async fn list_metric_descriptors(&self) -> CriResult<Vec<v1::MetricDescriptor>> {
        let (deadline, request) = (Some(self.timeout), v1::ListMetricDescriptorsRequest {});
        rpc!(self.runtime.list_metric_descriptors, "ListMetricDescriptors", "", deadline, request)
            .map(|answer| answer.descriptors)
    }

    async fn list_pod_sandbox_metrics(&self) -> CriResult<Vec<v1::PodSandboxMetrics>> {
        list!(self.runtime, stream_runtime_lists, (),
            stream_pod_sandbox_metrics "StreamPodSandboxMetrics"
                |()| v1::StreamPodSandboxMetricsRequest {} => pod_sandbox_metrics,
            list_pod_sandbox_metrics "ListPodSandboxMetrics" |()| v1::ListPodSandboxMetricsRequest {} => pod_metrics)
    }

    async fn list_images(&self, filter: Option<v1::ImageFilter>) -> CriResult<Vec<v1::Image>> {
        list!(self.image, stream_image_lists, filter,
            stream_images "StreamImages" |filter| v1::StreamImagesRequest { filter } => images,
            list_images "ListImages" |filter| v1::ListImagesRequest { filter } => images)
    }

    async fn image_status(&self, image: v1::ImageSpec) -> CriResult<Option<v1::Image>> {
        let name = image.image.clone();
        let request = v1::ImageStatusRequest { image: Some(image), verbose: false };
        let answer = rpc!(self.image.image_status, "ImageStatus", &name, Some(self.timeout), request)?;
        match answer.image {
            Some(image) if image.id.is_empty() || image.size == 0 => {
                Err(CriError::malformed("ImageStatus", &name, format!("Id or size of image {name:?} is not set")))
            }
            image => Ok(image),
        }
    }

    async fn image_fs_info(&self) -> CriResult<v1::ImageFsInfoResponse> {
        // Who asks meanwhile waits for this answer; who goes away leaves the question to the next one.
        let mut newest = self.image_fs.lock().await;
        if let Some((_, answer)) = newest.as_ref().filter(|(at, _)| at.elapsed() < IMAGE_FS) {
            return Ok(answer.clone());
        }
        let deadline = Some(self.timeout);
        let answer = rpc!(self.image.image_fs_info, "ImageFsInfo", "", deadline, v1::ImageFsInfoRequest {})?;
        *newest = Some((Instant::now(), answer.clone()));
        Ok(answer)
    }

    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<v1::ContainerEventResponse>>> {
        const CALL: &str = "GetContainerEvents";
        enum State {
            Asking,
            Open(Box<Streaming<v1::ContainerEventResponse>>),
            Over,
        }
        let client = self.clone();
        let start = Instant::now();
        let step = move |state: State| {
            let client = client.clone();
            async move {
                let opened = match state {
                    State::Over => return None,
                    State::Open(events) => Ok(events),
                    State::Asking => {
                        let request = Request::new(v1::GetEventsRequest {});
                        client
                            .runtime
                            .clone()
                            .get_container_events(request)
                            .await
                            .map(|answer| Box::new(answer.into_inner()))
                    }
                };
                let event = match opened {
                    Ok(mut events) => match events.message().await {
                        Ok(Some(event)) => return Some((Ok(event), State::Open(events))),
                        Ok(None) => Err(CriError::lost(CALL, "", "EOF")),
                        Err(status) => Err(CriError::from_status(CALL, "", &status)),
                    },
                    Err(status) => Err(CriError::from_status(CALL, "", &status)),
                };
                client.observe(CALL, start, event.as_ref().err());
                Some((event, State::Over))
            }
        };
        Ok(stream::unfold(State::Asking, step).boxed())
    }
}
