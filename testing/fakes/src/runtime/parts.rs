//! Lists in parts (KEP-5825).

use cri_api::v1;

use super::rpc::{RUNTIME_SERVICE, unimplemented};
use super::{Answer, FakeRuntime};

const IMAGE_SERVICE: &str = "runtime.v1.ImageService";

/// The items in parts.
fn parts<T, M>(mut items: Vec<T>, size: usize, part: impl Fn(Vec<T>) -> M) -> Vec<M> {
    let mut all = Vec::new();
    while !items.is_empty() {
        let rest = items.split_off(items.len().min(size.max(1)));
        all.push(part(std::mem::replace(&mut items, rest)));
    }
    all
}

/// Lists in parts: the whole list is made as by the other method, then cut.
macro_rules! streamed {
    ($($method:ident $call:literal $service:ident: $request:ident => $response:ident |$state:ident, $asked:ident| $items:expr, $part:ident;)*) => {
        impl FakeRuntime {$(
            pub(crate) async fn $method(&self, $asked: v1::$request) -> Answer<Vec<v1::$response>> {
                // Faults befall the call as a whole, so that padding has one part to grow.
                let mut made = Vec::new();
                let first = self.at_once($call, "", "", |$state| {
                    let Some(size) = $state.settings.list_streaming else { return unimplemented($call, $service) };
                    made = parts($items, size, |$part| v1::$response { $part });
                    Ok(if made.is_empty() { v1::$response::default() } else { made.remove(0) })
                }).await?;
                made.insert(0, first);
                Ok(made)
            }
        )*}
    };
}
streamed! {
    rpc_stream_pod_sandboxes "StreamPodSandboxes" RUNTIME_SERVICE: StreamPodSandboxesRequest => StreamPodSandboxesResponse
        |state, request| state.list_sandboxes(request.filter.as_ref()), pod_sandboxes;
    rpc_stream_containers "StreamContainers" RUNTIME_SERVICE: StreamContainersRequest => StreamContainersResponse
        |state, request| state.list_containers(request.filter.as_ref()), containers;
    rpc_stream_container_stats "StreamContainerStats" RUNTIME_SERVICE: StreamContainerStatsRequest => StreamContainerStatsResponse
        |state, request| state.list_container_stats(request.filter.as_ref()), container_stats;
    rpc_stream_pod_sandbox_stats "StreamPodSandboxStats" RUNTIME_SERVICE: StreamPodSandboxStatsRequest => StreamPodSandboxStatsResponse
        |state, request| state.list_sandbox_stats(request.filter.as_ref()), pod_sandbox_stats;
    rpc_stream_pod_sandbox_metrics "StreamPodSandboxMetrics" RUNTIME_SERVICE: StreamPodSandboxMetricsRequest => StreamPodSandboxMetricsResponse
        |state, _request| state.sandboxes.keys().map(|id| v1::PodSandboxMetrics { pod_sandbox_id: id.clone(), ..Default::default() }).collect(), pod_sandbox_metrics;
    rpc_stream_images "StreamImages" IMAGE_SERVICE: StreamImagesRequest => StreamImagesResponse
        |state, request| state.list_images(request.filter.as_ref()), images;
}
