//! A driver of resource claims on its real socket, whose answers a test decides.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugins::wire::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use plugins::wire::dra_v1::{
    Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use plugins::wire::podresources_v1alpha1::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use plugins::wire::podresources_v1alpha1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use plugins::wire::registration_v1::registration_server::{Registration, RegistrationServer};
use plugins::wire::registration_v1::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

#[derive(Debug, Default)]
struct State {
    /// What every call fails with.
    fails: Option<String>,
    calls: Vec<String>,
}

struct Inner {
    name: String,
    socket: PathBuf,
    state: Mutex<State>,
    health: watch::Sender<Option<(bool, String)>>,
    stop: CancellationToken,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn info(&self) -> PluginInfo {
        PluginInfo {
            r#type: "DRAPlugin".into(),
            name: self.name.clone(),
            endpoint: self.socket.display().to_string(),
            supported_versions: vec!["v1.DRAPlugin".into(), "v1beta1.DRAPlugin".into()],
        }
    }
}

/// See the module. Of each claim it prepares one device: pool `pool`, name the claim's, CDI name `fake.example.com/dev=CLAIM`.
pub struct FakeClaimDriver(Arc<Inner>);

impl FakeClaimDriver {
    /// A driver of this name, with its socket in `dir`; in the kubelet's `plugins_registry`, it is registered at once.
    ///
    /// # Panics
    /// When its socket cannot be made.
    #[allow(clippy::expect_used, reason = "a test cannot go on without it")]
    pub fn start(dir: &Path, name: &str) -> Self {
        let socket = dir.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("the driver's socket");
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            socket,
            state: Mutex::default(),
            health: watch::Sender::new(None),
            stop: CancellationToken::new(),
        });
        let (service, stop) = (Service(inner.clone()), inner.stop.clone());
        tokio::spawn(async move {
            let serving = Server::builder()
                .add_service(RegistrationServer::new(service.clone()))
                .add_service(DraPluginServer::new(service.clone()))
                .add_service(DraResourceHealthServer::new(service))
                .serve_with_incoming(UnixListenerStream::new(listener));
            tokio::select! { () = stop.cancelled() => {}, _ = serving => {} }
        });
        Self(inner)
    }

    /// What it says when it is asked who it is.
    pub fn info(&self) -> PluginInfo {
        self.0.info()
    }

    /// From now on its calls fail with this, or succeed.
    pub fn fail(&self, why: Option<&str>) {
        self.0.state().fails = why.map(str::to_owned);
    }

    /// From now on its devices are so, and why.
    pub fn health(&self, healthy: bool, why: &str) {
        self.0.health.send_replace(Some((healthy, why.to_owned())));
    }

    /// The calls so far: `prepare NAME…`, `unprepare NAME…`.
    pub fn calls(&self) -> Vec<String> {
        self.0.state().calls.clone()
    }
}

impl Drop for FakeClaimDriver {
    fn drop(&mut self) {
        self.0.stop.cancel();
        let _ = std::fs::remove_file(&self.0.socket);
    }
}

#[derive(Clone)]
struct Service(Arc<Inner>);

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.0.info()))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let mut state = self.0.state();
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        state.calls.push(format!("prepare {}", names.join(",")));
        let error = state.fails.clone().unwrap_or_default();
        let prepared = claims.into_iter().map(|claim| {
            let device = Device {
                request_names: Vec::new(),
                pool_name: "pool".into(),
                cdi_device_ids: vec![format!("fake.example.com/dev={}", claim.name)],
                device_name: claim.name,
                share_id: None,
            };
            let devices = if error.is_empty() { vec![device] } else { Vec::new() };
            (claim.uid, NodePrepareResourceResponse { devices, error: error.clone() })
        });
        let claims: BTreeMap<_, _> = prepared.collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let mut state = self.0.state();
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        state.calls.push(format!("unprepare {}", names.join(",")));
        let error = state.fails.clone().unwrap_or_default();
        let answers = claims.into_iter().map(|c| (c.uid, NodeUnprepareResourceResponse { error: error.clone() }));
        Ok(Response::new(NodeUnprepareResourcesResponse { claims: answers.collect() }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Service {
    type NodeWatchResourcesStream = ReceiverStream<Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (tx, rx) = mpsc::channel(1);
        let inner = self.0.clone();
        let mut health = inner.health.subscribe();
        health.mark_changed();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = inner.stop.cancelled() => return,
                    () = tx.closed() => return,
                    changed = health.changed() => if changed.is_err() { return },
                }
                let Some((healthy, message)) = health.borrow_and_update().clone() else { continue };
                let prepared: Vec<String> =
                    inner.state().calls.iter().filter_map(|c| c.strip_prefix("prepare ")).map(str::to_owned).collect();
                let devices = prepared.iter().flat_map(|names| names.split(',')).map(|name| DeviceHealth {
                    device: Some(DeviceIdentifier { pool_name: "pool".into(), device_name: name.to_owned() }),
                    health: if healthy { HealthStatus::Healthy } else { HealthStatus::Unhealthy } as i32,
                    message: message.clone(),
                    health_check_timeout_seconds: 3600,
                    ..Default::default()
                });
                let report = NodeWatchResourcesResponse { devices: devices.collect() };
                if tx.send(Ok(report)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(rx)))
    }
}
