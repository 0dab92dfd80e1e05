//! A device plugin on its real socket, whose devices and answers a test decides.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugins::wire::deviceplugin_v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use plugins::wire::deviceplugin_v1beta1::registration_client::RegistrationClient;
use plugins::wire::deviceplugin_v1beta1::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, DeviceSpec, Empty, ListAndWatchResponse, Mount, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, TopologyInfo,
};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// What Allocate does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocate {
    /// Grants what is asked for.
    Grant,
    /// Fails with this message.
    Refuse(String),
    /// Never answers.
    Hang,
}

#[derive(Debug)]
struct State {
    allocate: Allocate,
    /// Devices that GetPreferredAllocation names; None: it names the last ones.
    prefers: Option<Vec<String>>,
    calls: Vec<String>,
}

struct Inner {
    resource: String,
    options: DevicePluginOptions,
    devices: watch::Sender<Vec<Device>>,
    state: Mutex<State>,
    stop: CancellationToken,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module. Dropped, it is gone as a plugin that died is.
pub struct FakeDevicePlugin {
    inner: Arc<Inner>,
    dir: PathBuf,
    endpoint: String,
}

/// A device: id, whether it is healthy, its NUMA node (-1: none).
fn device((id, healthy, node): &(&str, bool, i64)) -> Device {
    let topology = (*node >= 0).then(|| TopologyInfo { nodes: vec![NumaNode { id: *node }] });
    Device { id: (*id).to_owned(), health: if *healthy { "Healthy" } else { "Unhealthy" }.to_owned(), topology }
}

impl FakeDevicePlugin {
    /// A plugin for this resource beside the kubelet's socket in `dir`. It serves, and does not register.
    ///
    /// # Panics
    /// When its socket cannot be made.
    #[allow(clippy::expect_used, reason = "a test cannot go on without it")]
    pub fn start(dir: &Path, resource: &str, devices: &[(&str, bool, i64)], preferred: bool, pre_start: bool) -> Self {
        let endpoint = format!("{}.sock", resource.replace('/', "_"));
        let path = dir.join(&endpoint);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("the plugin's socket");
        let inner = Arc::new(Inner {
            resource: resource.to_owned(),
            options: DevicePluginOptions {
                pre_start_required: pre_start,
                get_preferred_allocation_available: preferred,
            },
            devices: watch::Sender::new(devices.iter().map(device).collect()),
            state: Mutex::new(State { allocate: Allocate::Grant, prefers: None, calls: Vec::new() }),
            stop: CancellationToken::new(),
        });
        let (service, stop) = (Service(inner.clone()), inner.stop.clone());
        tokio::spawn(async move {
            let serving = Server::builder()
                .add_service(DevicePluginServer::new(service))
                .serve_with_incoming(UnixListenerStream::new(listener));
            tokio::select! { () = stop.cancelled() => {}, _ = serving => {} }
        });
        Self { inner, dir: dir.to_owned(), endpoint }
    }

    /// Registers at the kubelet's socket.
    ///
    /// # Errors
    /// The kubelet's refusal, or that it cannot be reached.
    pub async fn register(&self) -> Result<(), String> {
        self.register_as("v1beta1", &self.inner.resource).await
    }

    /// Registers with another version or name.
    ///
    /// # Errors
    /// As [`FakeDevicePlugin::register`].
    pub async fn register_as(&self, version: &str, resource: &str) -> Result<(), String> {
        let socket = self.dir.join("kubelet.sock");
        let channel = plugins::wire::channel(socket);
        let request = RegisterRequest {
            version: version.to_owned(),
            endpoint: self.endpoint.clone(),
            resource_name: resource.to_owned(),
            options: Some(self.inner.options),
        };
        RegistrationClient::new(channel).register(request).await.map(|_| ()).map_err(|s| s.message().to_owned())
    }

    /// Its devices from now on.
    pub fn set(&self, devices: &[(&str, bool, i64)]) {
        self.inner.devices.send_replace(devices.iter().map(device).collect());
    }

    /// What Allocate does from now on.
    pub fn allocate(&self, what: Allocate) {
        self.inner.state().allocate = what;
    }

    /// What GetPreferredAllocation answers from now on.
    pub fn prefer(&self, ids: &[&str]) {
        self.inner.state().prefers = Some(ids.iter().map(ToString::to_string).collect());
    }

    /// The calls so far: name and device ids.
    pub fn calls(&self) -> Vec<String> {
        self.inner.state().calls.clone()
    }
}

impl Drop for FakeDevicePlugin {
    fn drop(&mut self) {
        self.inner.stop.cancel();
        let _ = std::fs::remove_file(self.dir.join(&self.endpoint));
    }
}

struct Service(Arc<Inner>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.0.options))
    }

    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (tx, rx) = mpsc::channel(1);
        let (mut devices, stop) = (self.0.devices.subscribe(), self.0.stop.clone());
        devices.mark_changed();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tx.closed() => return,
                    changed = devices.changed() => if changed.is_err() { return },
                }
                let devices = devices.borrow_and_update().clone();
                if tx.send(Ok(ListAndWatchResponse { devices })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(rx)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let one = request.into_inner().container_requests.into_iter().next().unwrap_or_default();
        let mut state = self.0.state();
        state.calls.push(format!("prefer {} of {}", one.allocation_size, one.available_device_ids.join(",")));
        let size = usize::try_from(one.allocation_size).unwrap_or(0);
        let last = || one.available_device_ids.iter().rev().take(size).cloned().collect();
        let device_ids = state.prefers.clone().unwrap_or_else(last);
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_ids }],
        }))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let one = request.into_inner().container_requests.into_iter().next().unwrap_or_default();
        let what = {
            let mut state = self.0.state();
            state.calls.push(format!("allocate {}", one.device_ids.join(",")));
            state.allocate.clone()
        };
        match what {
            Allocate::Grant => {}
            Allocate::Refuse(why) => return Err(Status::unknown(why)),
            Allocate::Hang => std::future::pending::<()>().await,
        }
        let ids = one.device_ids;
        let name = self.0.resource.replace(['/', '.', '-'], "_").to_uppercase();
        let container = ContainerAllocateResponse {
            envs: BTreeMap::from([(name, ids.join(","))]),
            mounts: vec![Mount { container_path: "/fake-mount".into(), host_path: "/tmp".into(), read_only: true }],
            devices: vec![DeviceSpec {
                container_path: "/dev/fake-null".into(),
                host_path: "/dev/null".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([("fake.example.com/devices".into(), ids.join("_"))]),
            cdi_devices: Vec::<CdiDevice>::new(),
        };
        Ok(Response::new(AllocateResponse { container_responses: vec![container] }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().device_ids;
        self.0.state().calls.push(format!("prepare {}", ids.join(",")));
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
