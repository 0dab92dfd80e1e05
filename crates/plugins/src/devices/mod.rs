//! Device plugins (API v1beta1): their registration, the devices that they list, and the calls to one.
//!
//! ```text
//!  Register(kubelet.sock) ──┐
//!                           ├──▶ GetDevicePluginOptions ──▶ ListAndWatch ──▶ listed, listed, …
//!  plugins_registry/*.sock ─┘         │ failed: told              │ ended, or its socket is gone
//!                                     ▼                           ▼
//!                                 not registered             disconnected ──5 min──▶ expired
//! ```
//!
//! Tasks: one server for registrations; one for each registered plugin, which follows its list and ends 5 min after it went, or when the plugin
//! registers anew. All end with the agent. Queue: none, each list is a whole value and is handed on at once. A plugin that hangs keeps only its
//! own list from changing; every other call to it has a deadline.

pub(crate) mod register;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use decide::config::DeviceFacts;
use decide::devices::{Device, Ids, Options};
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tracing::{error, info, warn};

use crate::registration::Handler;
use crate::wire::deviceplugin_v1beta1::device_plugin_client::DevicePluginClient;
use crate::wire::deviceplugin_v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse, ContainerPreferredAllocationRequest, Empty,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use crate::wire::registration_v1::PluginInfo;
use crate::wire::{RpcError, channel};

/// The version of the API.
pub const VERSION: &str = "v1beta1";
/// The kubelet's socket in the directory of the plugins' sockets.
pub const SOCKET: &str = "kubelet.sock";
/// How long a plugin may take to be reached, and to tell its options. Go's number.
const CONNECT: Duration = Duration::from_secs(10);
/// How long it may take to allocate and to tell its preference. Go waits for ever, and holds up every pod meanwhile.
const ALLOCATE: Duration = Duration::from_secs(120);
/// How long it may take to prepare devices for a container's start. Go's number.
const PRE_START: Duration = Duration::from_secs(30);
/// How long a plugin that is gone may come back before its resource is no more. Go's number.
pub const STOP_GRACE: Duration = Duration::from_secs(300);

/// Who is told what plugins do. No call may wait.
pub trait Listener: Send + Sync {
    /// A plugin asks to be registered.
    fn registering(&self, resource: &str);
    /// It is.
    fn connected(&self, resource: &str, options: Options);
    /// Its newest list of devices.
    fn listed(&self, resource: &str, devices: BTreeMap<String, Device>);
    /// It is gone.
    fn disconnected(&self, resource: &str);
    /// It stayed away.
    fn expired(&self, resource: &str);
}

/// A registered plugin.
struct Plugin {
    /// Tells it from an earlier one of its resource.
    generation: u64,
    /// None: it is gone.
    client: Option<DevicePluginClient<Channel>>,
    /// Ends the task that follows it.
    stop: CancellationToken,
}

struct Inner {
    dir: PathBuf,
    listener: Arc<dyn Listener>,
    plugins: Mutex<BTreeMap<String, Plugin>>,
    next: AtomicU64,
    stop: CancellationToken,
    /// Why no plugin can register; None: they can.
    broken: Mutex<Option<String>>,
}

/// The device plugins of this node. Clones share it.
#[derive(Clone)]
pub struct DevicePlugins(Arc<Inner>);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DevicePlugins {
    /// Plugins whose sockets are in `dir`. `known`: resources that an earlier agent had plugins for; they get the time to come back.
    pub fn new(
        dir: &Path,
        listener: Arc<dyn Listener>,
        known: impl IntoIterator<Item = String>,
        stop: CancellationToken,
    ) -> Self {
        let all = Self(Arc::new(Inner {
            dir: dir.to_owned(),
            listener,
            plugins: Mutex::default(),
            next: AtomicU64::new(1),
            stop,
            broken: Mutex::default(),
        }));
        for resource in known {
            let (generation, stop) = all.place(&resource, None);
            tokio::spawn(all.clone().absent(resource, generation, stop));
        }
        all
    }

    /// Why no plugin can register (check `device-plugin` of `/healthz`); None: they can.
    pub fn problem(&self) -> Option<String> {
        lock(&self.0.broken).clone()
    }

    /// Puts a plugin in its place; the task that followed an earlier one ends.
    fn place(&self, resource: &str, client: Option<DevicePluginClient<Channel>>) -> (u64, CancellationToken) {
        let generation = self.0.next.fetch_add(1, Ordering::Relaxed);
        let stop = self.0.stop.child_token();
        let plugin = Plugin { generation, client, stop: stop.clone() };
        if let Some(before) = lock(&self.0.plugins).insert(resource.to_owned(), plugin) {
            before.stop.cancel();
        }
        (generation, stop)
    }

    /// Runs `act` when this generation is still the resource's plugin. The table stays locked meanwhile, so that nobody takes its place.
    fn if_current(&self, resource: &str, generation: u64, act: impl FnOnce(&mut Plugin, &dyn Listener)) {
        if let Some(plugin) = lock(&self.0.plugins).get_mut(resource).filter(|p| p.generation == generation) {
            act(plugin, &*self.0.listener);
        }
    }

    /// Makes the acquaintance of a plugin and begins to follow it.
    async fn connect(&self, resource: &str, socket: &Path) -> Result<(), String> {
        let mut client = DevicePluginClient::new(channel(socket.to_owned()));
        let asked = tokio::time::timeout(CONNECT, client.get_device_plugin_options(Empty {})).await;
        let told = asked
            .map_or_else(|_| Err(RpcError::timed_out()), |answer| answer.map_err(RpcError::from))
            .map_err(|e| format!("failed to get device plugin options: {e}"))?
            .into_inner();
        let options =
            Options { pre_start: told.pre_start_required, preferred: told.get_preferred_allocation_available };
        let (generation, stop) = self.place(resource, Some(client.clone()));
        self.if_current(resource, generation, |_, listener| listener.connected(resource, options));
        info!(resource, socket = %socket.display(), "Device plugin connected");
        tokio::spawn(self.clone().follow(resource.to_owned(), client, generation, stop));
        Ok(())
    }

    /// A plugin's task.
    async fn follow(
        self,
        resource: String,
        mut client: DevicePluginClient<Channel>,
        generation: u64,
        stop: CancellationToken,
    ) {
        let following = async {
            let mut list = client.list_and_watch(Empty {}).await.map_err(RpcError::from)?.into_inner();
            while let Some(answer) = list.message().await.map_err(RpcError::from)? {
                let devices: BTreeMap<String, Device> = answer
                    .devices
                    .into_iter()
                    .map(|d| {
                        let nodes = d.topology.map(|t| t.nodes.iter().map(|n| n.id).collect()).unwrap_or_default();
                        (d.id, Device { healthy: d.health == "Healthy", nodes })
                    })
                    .collect();
                let healthy = devices.values().filter(|d| d.healthy).count();
                info!(resource, devices = devices.len(), healthy, "Processed device updates for resource");
                self.if_current(&resource, generation, |_, listener| listener.listed(&resource, devices));
            }
            Ok::<_, RpcError>(())
        };
        let ended = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            ended = following => Some(ended),
        };
        match ended {
            Some(Ok(())) => warn!(resource, "Device plugin ended its list of devices"),
            Some(Err(e)) => warn!(resource, err = &e as &dyn std::error::Error, "Device plugin cannot be followed"),
            None => {}
        }
        if self.0.stop.is_cancelled() {
            return;
        }
        let mut gone = None;
        self.if_current(&resource, generation, |plugin, listener| {
            plugin.client = None;
            // Its socket going away cancelled the token that stood; a new plugin cancels this one.
            plugin.stop = self.0.stop.child_token();
            gone = Some(plugin.stop.clone());
            listener.disconnected(&resource);
        });
        if let Some(stop) = gone {
            info!(resource, "Device plugin is gone, its devices are unhealthy");
            self.absent(resource, generation, stop).await;
        }
    }

    /// Waits for a plugin to come back.
    async fn absent(self, resource: String, generation: u64, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(STOP_GRACE) => {}
        }
        let mut plugins = lock(&self.0.plugins);
        if plugins.get(&resource).is_some_and(|p| p.generation == generation) {
            plugins.remove(&resource);
            self.0.listener.expired(&resource);
            info!(resource, "Device plugin stayed away, its resource is no more");
        }
    }

    fn client(&self, resource: &str) -> Result<DevicePluginClient<Channel>, String> {
        match lock(&self.0.plugins).get(resource) {
            None => Err(format!("unknown Device Plugin {resource}")),
            Some(plugin) => plugin.client.clone().ok_or_else(|| format!("endpoint {resource} has been stopped")),
        }
    }

    /// Allocate for one container: the plugin's answer as it stands on the wire.
    ///
    /// # Errors
    /// In Go's words; it becomes the message of the pod's rejection.
    pub async fn allocate(&self, resource: &str, ids: &Ids) -> Result<Arc<[u8]>, String> {
        let mut client = self.client(resource)?;
        let one = ContainerAllocateRequest { device_ids: ids.iter().cloned().collect() };
        let call = client.allocate(AllocateRequest { container_requests: vec![one] });
        let answer = within(ALLOCATE, call).await.map_err(|e| e.to_string())?;
        let one = answer.container_responses.into_iter().next();
        let one = one.ok_or("no containers return in allocation response &AllocateResponse{ContainerResponses:[]*ContainerAllocateResponse{},}")?;
        Ok(one.encode_to_vec().into())
    }

    /// GetPreferredAllocation for one container.
    ///
    /// # Errors
    /// As [`DevicePlugins::allocate`].
    pub async fn preferred(
        &self,
        resource: &str,
        available: &Ids,
        must_include: &Ids,
        size: usize,
    ) -> Result<Ids, String> {
        let failed = |e: String| format!("device plugin GetPreferredAllocation rpc failed with err: {e}");
        let mut client = self.client(resource).map_err(failed)?;
        let one = ContainerPreferredAllocationRequest {
            available_device_ids: available.iter().cloned().collect(),
            must_include_device_ids: must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
        };
        let call = client.get_preferred_allocation(PreferredAllocationRequest { container_requests: vec![one] });
        let answer = within(ALLOCATE, call).await.map_err(|e| failed(e.to_string()))?;
        Ok(answer
            .container_responses
            .into_iter()
            .next()
            .map(|r| r.device_ids.into_iter().collect())
            .unwrap_or_default())
    }

    /// PreStartContainer.
    ///
    /// # Errors
    /// In Go's words; it becomes the container's waiting message.
    pub async fn pre_start(&self, resource: &str, ids: &Ids) -> Result<(), String> {
        let failed = |e: String| format!("device plugin PreStartContainer rpc failed with err: {e}");
        let mut client = self.client(resource).map_err(failed)?;
        let call = client.pre_start_container(PreStartContainerRequest { device_ids: ids.iter().cloned().collect() });
        within(PRE_START, call).await.map(|_| ()).map_err(|e| failed(e.to_string()))
    }
}

async fn within<T>(
    deadline: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, RpcError> {
    match tokio::time::timeout(deadline, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(RpcError::timed_out()),
    }
}

/// Plugins that register through `ROOT/plugins_registry`.
#[async_trait]
impl Handler for DevicePlugins {
    fn kind(&self) -> &'static str {
        "DevicePlugin"
    }

    async fn register(&self, info: &PluginInfo) -> Result<(), String> {
        let (name, versions) = (&info.name, &info.supported_versions);
        if !versions.iter().any(|v| v == VERSION) {
            return Err(format!(
                "manager version, {VERSION}, is not among plugin supported versions [{}]",
                versions.join(" ")
            ));
        }
        if !decide::devices::is_extended_resource(name) {
            return Err(format!("invalid name of device plugin socket: the ResourceName {name:?} is invalid"));
        }
        self.connect(name, Path::new(&info.endpoint)).await
    }

    fn gone(&self, name: &str, _: &str) {
        if let Some(plugin) = lock(&self.0.plugins).get(name) {
            plugin.stop.cancel();
        }
    }
}

/// What the answers of a container's plugins add to its request. Of two that say different things of one path or name, the first counts.
pub fn facts<'a>(answers: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> DeviceFacts {
    let mut all = DeviceFacts::default();
    let mut names: BTreeSet<String> = BTreeSet::new();
    for (resource, bytes) in answers {
        let answer = match ContainerAllocateResponse::decode(bytes) {
            Ok(answer) => answer,
            Err(e) => {
                error!(resource, err = &e as &dyn std::error::Error, "A device plugin's answer cannot be read");
                continue;
            }
        };
        let conflict = |what: &str, name: &str| {
            warn!(resource, name, "Device plugins disagree on {what}, the first one's is used")
        };
        for (name, value) in answer.envs {
            match all.envs.iter().find(|(n, _)| *n == name) {
                Some((_, old)) if *old != value => conflict("a variable", &name),
                Some(_) => {}
                None => all.envs.push((name, value)),
            }
        }
        for d in answer.devices {
            match all.devices.iter().find(|o| o.container_path == d.container_path) {
                Some(old) if old.host_path != d.host_path => conflict("a device", &d.container_path),
                Some(_) => {}
                None => all.devices.push(cri_api::v1::Device {
                    container_path: d.container_path,
                    host_path: d.host_path,
                    permissions: d.permissions,
                }),
            }
        }
        for m in answer.mounts {
            match all.mounts.iter().find(|o| o.container_path == m.container_path) {
                Some(old) if old.host_path != m.host_path => conflict("a mount", &m.container_path),
                Some(_) => {}
                None => all.mounts.push(cri_api::v1::Mount {
                    container_path: m.container_path,
                    host_path: m.host_path,
                    readonly: m.read_only,
                    ..Default::default()
                }),
            }
        }
        for (name, value) in answer.annotations {
            match all.annotations.get(&name) {
                Some(old) if *old != value => conflict("an annotation", &name),
                Some(_) => {}
                None => {
                    all.annotations.insert(name, value);
                }
            }
        }
        for device in answer.cdi_devices {
            if names.insert(device.name.clone()) {
                all.cdi_devices.push(device.name);
            }
        }
    }
    all
}
