//! The pod-resources socket (KEP-606): tells monitoring agents and others of the node which devices, CPUs and memory containers have.
//!
//! Task: one server, ends with the agent. Queue: none; what is asked is answered from what is known, at most [`QPS`] times a second with [`BURST`] more at
//! once; what is over that is refused, so that one caller that asks for ever costs others nothing.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{error, info};

use crate::callers::connections;
use crate::wire::podresources_v1::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use crate::wire::podresources_v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use crate::wire::podresources_v1alpha1 as alpha;
use crate::wire::podresources_v1alpha1::pod_resources_lister_server::{
    PodResourcesLister as AlphaLister, PodResourcesListerServer as AlphaListerServer,
};

/// Requests a second. Go's number.
const QPS: f64 = 100.0;
/// Requests at once beyond that. Go's number.
const BURST: f64 = 10.0;

/// A call, for those who count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// List.
    List,
    /// Get.
    Get,
    /// GetAllocatableResources.
    GetAllocatable,
}

/// What the socket tells of.
pub trait Source: Send + Sync {
    /// Pods that may run something, with their sidecars and app containers.
    fn active(&self) -> Vec<PodResources>;
    /// Every pod, also those that have ended, with their app containers.
    fn all(&self) -> Vec<PodResources>;
    /// One pod; None: there is none of that name.
    fn pod(&self, namespace: &str, name: &str) -> Option<PodResources>;
    /// What could be given to containers.
    fn allocatable(&self) -> AllocatableResourcesResponse;
    /// A call was answered; `version`: `v1` or `v1alpha1`.
    fn called(&self, version: &'static str, call: Call, failed: bool);
}

/// Serves on this socket until the agent stops.
///
/// # Errors
/// The socket cannot be opened.
pub fn serve(socket: &Path, source: Arc<dyn Source>, stop: CancellationToken) -> std::io::Result<()> {
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    info!(endpoint = %socket.display(), "Starting to serve the podresources API");
    let service = Service { source, bucket: Arc::new(Mutex::new(Bucket::full(Instant::now()))) };
    tokio::spawn(async move {
        let served = Server::builder()
            .add_service(AlphaListerServer::new(service.clone()))
            .add_service(PodResourcesListerServer::new(service))
            .serve_with_incoming_shutdown(connections(listener), stop.cancelled())
            .await;
        if let Err(e) = served {
            error!(err = &e as &dyn std::error::Error, "The pod-resources socket is no longer served");
        }
    });
    Ok(())
}

/// Tokens that come back with time.
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn full(at: Instant) -> Self {
        Self { tokens: BURST, at }
    }

    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * QPS).min(BURST);
        self.at = now;
        let may = self.tokens >= 1.0;
        if may {
            self.tokens -= 1.0;
        }
        may
    }
}

#[derive(Clone)]
struct Service {
    source: Arc<dyn Source>,
    bucket: Arc<Mutex<Bucket>>,
}

impl Service {
    fn admit(&self) -> Result<(), Status> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if bucket.take(Instant::now()) { Ok(()) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.admit()?;
        self.source.called("v1", Call::List, false);
        Ok(Response::new(ListPodResourcesResponse { pod_resources: self.source.active() }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.admit()?;
        self.source.called("v1", Call::GetAllocatable, false);
        Ok(Response::new(self.source.allocatable()))
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.admit()?;
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let found = self.source.pod(&pod_namespace, &pod_name);
        self.source.called("v1", Call::Get, found.is_none());
        match found {
            Some(pod) => Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(pod) })),
            None => Err(Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found"))),
        }
    }
}

#[tonic::async_trait]
impl AlphaLister for Service {
    async fn list(
        &self,
        _: Request<alpha::ListPodResourcesRequest>,
    ) -> Result<Response<alpha::ListPodResourcesResponse>, Status> {
        self.admit()?;
        self.source.called("v1alpha1", Call::List, false);
        let pods = self.source.all().into_iter().map(|pod| alpha::PodResources {
            name: pod.name,
            namespace: pod.namespace,
            containers: pod
                .containers
                .into_iter()
                .map(|c| alpha::ContainerResources {
                    name: c.name,
                    devices: c
                        .devices
                        .into_iter()
                        .map(|d| alpha::ContainerDevices { resource_name: d.resource_name, device_ids: d.device_ids })
                        .collect(),
                })
                .collect(),
        });
        Ok(Response::new(alpha::ListPodResourcesResponse { pod_resources: pods.collect() }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_caller_that_asks_for_ever_is_held_back() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let burst = (0..30).filter(|_| bucket.take(start)).count();
        assert_eq!(burst, 10);
        let later = start + Duration::from_millis(50);
        assert_eq!((0..30).filter(|_| bucket.take(later)).count(), 5);
        assert_eq!((0..30).filter(|_| bucket.take(later + Duration::from_secs(60))).count(), 10);
    }
}
