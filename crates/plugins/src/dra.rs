//! Drivers of resource claims (dynamic resource allocation): their registration, and the calls to one.
//!
//! Task: one for each registered instance that follows the health of its devices, until its socket is gone; it tries again after [`HEALTH_AGAIN`].
//! A driver that hangs holds up the pods that need it: every call has a deadline.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use decide::claims::{Claim, ClaimedDevice};
use http::uri::PathAndQuery;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;
use tracing::{debug, info};

use crate::registration::Handler;
use crate::wire::dra_v1::{
    Claim as Asked, NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::wire::podresources_v1alpha1::dra_resource_health_client::DraResourceHealthClient;
use crate::wire::podresources_v1alpha1::{HealthStatus, NodeWatchResourcesRequest};
use crate::wire::registration_v1::PluginInfo;
use crate::wire::{RpcError, channel};

/// How long a driver may take for one call. Go's number.
const DEADLINE: Duration = Duration::from_secs(45);
/// Between two tries to follow the health of devices. Go's number.
const HEALTH_AGAIN: Duration = Duration::from_secs(5);
/// How long a health report holds that says nothing of it. Go's number.
pub const HEALTH_HOLDS: Duration = Duration::from_secs(30);

/// Which service an instance speaks, the newest first.
const SERVICES: [(&str, &str); 2] = [
    ("v1.DRAPlugin", "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"),
    ("v1beta1.DRAPlugin", "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"),
];

/// How a device is, as its driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Pool and name.
    pub device: (String, String),
    /// None: it does not know.
    pub healthy: Option<bool>,
    /// More about it.
    pub message: String,
    /// How long this holds without another report.
    pub holds: Duration,
}

/// Who is told of the drivers. No call may wait.
pub trait Listener: Send + Sync {
    /// What a driver newly says of its devices.
    fn reported(&self, driver: &str, devices: Vec<DeviceReport>);
    /// Nothing is known any more of this driver's devices.
    fn silent(&self, driver: &str);
    /// An instance of the driver came or went; `usable`: there is one now.
    fn changed(&self, driver: &str, usable: bool);
    /// A call was made; `code`: gRPC's name of its outcome.
    fn called(&self, driver: &str, method: &'static str, code: &str, took: Duration);
}

struct Instance {
    endpoint: String,
    channel: Channel,
    /// Path of its service.
    service: &'static str,
    stop: CancellationToken,
}

struct Inner {
    listener: Arc<dyn Listener>,
    /// Instances of each driver, the newest last: while a driver is replaced there are two.
    drivers: Mutex<BTreeMap<String, Vec<Instance>>>,
    stop: CancellationToken,
}

/// The registered drivers. Clones share them.
#[derive(Clone)]
pub struct ClaimDrivers(Arc<Inner>);

impl ClaimDrivers {
    /// No driver yet.
    pub fn new(listener: Arc<dyn Listener>, stop: CancellationToken) -> Self {
        Self(Arc::new(Inner { listener, drivers: Mutex::default(), stop }))
    }

    fn drivers(&self) -> MutexGuard<'_, BTreeMap<String, Vec<Instance>>> {
        self.0.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when an instance of this driver is registered.
    ///
    /// # Errors
    /// None is, in Go's words.
    pub fn find(&self, driver: &str) -> Result<(), String> {
        self.newest(driver).map(|_| ())
    }

    fn newest(&self, driver: &str) -> Result<(Channel, &'static str), String> {
        let drivers = self.drivers();
        let instance = drivers.get(driver).and_then(|all| all.last());
        let instance = instance.ok_or_else(|| format!("DRA driver {driver} is not registered"))?;
        Ok((instance.channel.clone(), instance.service))
    }

    async fn call<A, B>(&self, driver: &str, method: &'static str, request: A) -> Result<B, String>
    where
        A: prost::Message + 'static,
        B: prost::Message + Default + 'static,
    {
        let (channel, service) = self.newest(driver)?;
        let path = PathAndQuery::try_from(format!("{service}/{method}")).map_err(|e| e.to_string())?;
        let began = Instant::now();
        let call = async {
            let mut grpc = tonic::client::Grpc::new(channel);
            grpc.ready().await.map_err(|e| tonic::Status::unavailable(e.to_string()))?;
            grpc.unary(tonic::Request::new(request), path, ProstCodec::<A, B>::default()).await
        };
        let answer = match tokio::time::timeout(DEADLINE, call).await {
            Ok(answer) => answer.map(tonic::Response::into_inner).map_err(RpcError::from),
            Err(_) => Err(RpcError::timed_out()),
        };
        let code = answer.as_ref().map_or_else(RpcError::name, |_| "OK");
        self.0.listener.called(driver, method, code, began.elapsed());
        answer.map_err(|e| format!("{method}: {e}"))
    }

    /// NodePrepareResources: devices by UID of the claim.
    ///
    /// # Errors
    /// In Go's words: the driver's, or for one claim, or that it left one out.
    pub async fn prepare(
        &self,
        driver: &str,
        claims: &[Claim],
    ) -> Result<BTreeMap<String, Vec<ClaimedDevice>>, String> {
        let request = NodePrepareResourcesRequest { claims: claims.iter().map(asked).collect() };
        let answer: NodePrepareResourcesResponse = self.call(driver, "NodePrepareResources", request).await?;
        let errors = answer.claims.iter().map(|(uid, c)| (uid.as_str(), c.error.as_str()));
        all_answered("NodePrepareResources", claims, errors)?;
        let device = |d: crate::wire::dra_v1::Device| ClaimedDevice {
            pool: d.pool_name,
            name: d.device_name,
            share: d.share_id,
            requests: d.request_names,
            cdi: d.cdi_device_ids,
        };
        let of = |(uid, c): (String, crate::wire::dra_v1::NodePrepareResourceResponse)| {
            (uid, c.devices.into_iter().map(device).collect())
        };
        Ok(answer.claims.into_iter().map(of).collect())
    }

    /// NodeUnprepareResources.
    ///
    /// # Errors
    /// As [`ClaimDrivers::prepare`].
    pub async fn unprepare(&self, driver: &str, claims: &[Claim]) -> Result<(), String> {
        let request = NodeUnprepareResourcesRequest { claims: claims.iter().map(asked).collect() };
        let answer: NodeUnprepareResourcesResponse = self.call(driver, "NodeUnprepareResources", request).await?;
        let errors = answer.claims.iter().map(|(uid, c)| (uid.as_str(), c.error.as_str()));
        all_answered("NodeUnprepareResources", claims, errors)
    }

    /// Follows the health of an instance's devices.
    async fn follow(self, driver: String, channel: Channel, stop: CancellationToken) {
        let mut client = DraResourceHealthClient::new(channel);
        loop {
            let following = async {
                let mut stream = client.node_watch_resources(NodeWatchResourcesRequest {}).await?.into_inner();
                while let Some(report) = stream.message().await? {
                    let devices = report.devices.into_iter().map(|d| {
                        let healthy = match d.health() {
                            HealthStatus::Healthy => Some(true),
                            HealthStatus::Unhealthy => Some(false),
                            HealthStatus::Unknown => None,
                        };
                        let seconds = u64::try_from(d.health_check_timeout_seconds).ok().filter(|s| *s > 0);
                        let device = d.device.unwrap_or_default();
                        DeviceReport {
                            device: (device.pool_name, device.device_name),
                            healthy,
                            message: d.message,
                            holds: seconds.map_or(HEALTH_HOLDS, Duration::from_secs),
                        }
                    });
                    self.0.listener.reported(&driver, devices.collect());
                }
                Ok::<_, tonic::Status>(())
            };
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => None,
                ended = following => Some(ended),
            };
            self.0.listener.silent(&driver);
            match ended {
                None => return,
                // Most drivers do not offer it, and never will while they run.
                Some(Err(e)) if e.code() == tonic::Code::Unimplemented => return,
                Some(ended) => {
                    debug!(driver, ?ended, "Health of a driver's devices is not followed, it is tried again")
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(HEALTH_AGAIN) => {}
            }
        }
    }
}

fn asked(claim: &Claim) -> Asked {
    Asked { namespace: claim.namespace.clone(), uid: claim.uid.clone(), name: claim.name.clone() }
}

/// Every claim was answered, and without an error.
fn all_answered<'a>(
    method: &str,
    claims: &[Claim],
    answers: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<(), String> {
    let mut count = 0;
    for (uid, error) in answers {
        let Some(claim) = claims.iter().find(|c| c.uid == uid) else {
            return Err(format!("{method} returned result for unknown claim UID {uid}"));
        };
        if !error.is_empty() {
            return Err(format!("{method} failed for ResourceClaim {}: {error}", claim.name));
        }
        count += 1;
    }
    match claims.len() - count.min(claims.len()) {
        0 => Ok(()),
        left => Err(format!("{method} skipped {left} ResourceClaims")),
    }
}

#[async_trait]
impl Handler for ClaimDrivers {
    fn kind(&self) -> &'static str {
        "DRAPlugin"
    }

    async fn register(&self, info: &PluginInfo) -> Result<(), String> {
        let PluginInfo { name, endpoint, supported_versions, .. } = info;
        let failed = |why: String| {
            format!("invalid supported gRPC versions of DRA driver plugin {name} at endpoint {endpoint}: {why}")
        };
        if supported_versions.is_empty() {
            return Err(failed("empty list of supported gRPC services (aka supported versions)".into()));
        }
        let chosen = supported_versions.iter().find_map(|v| SERVICES.iter().find(|(service, _)| service == v));
        let (_, service) = chosen.ok_or_else(|| {
            let ours = SERVICES.map(|(service, _)| service);
            failed(format!(
                "none of services supported by the plugin ({supported_versions:?}) are supported by the kubelet ({ours:?})"
            ))
        })?;
        let (channel, stop) = (channel(endpoint.into()), self.0.stop.child_token());
        {
            let mut drivers = self.drivers();
            let all = drivers.entry(name.clone()).or_default();
            if all.iter().any(|i| i.endpoint == *endpoint) {
                return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {name}"));
            }
            all.push(Instance { endpoint: endpoint.clone(), channel: channel.clone(), service, stop: stop.clone() });
        }
        info!(driver = name, endpoint, service, "Registered DRA plugin");
        tokio::spawn(self.clone().follow(name.clone(), channel, stop));
        self.0.listener.changed(name, true);
        Ok(())
    }

    fn gone(&self, name: &str, endpoint: &str) {
        let usable = {
            let mut drivers = self.drivers();
            let Some(all) = drivers.get_mut(name) else { return };
            all.retain(|i| {
                let stays = i.endpoint != endpoint;
                if !stays {
                    i.stop.cancel();
                }
                stays
            });
            let usable = !all.is_empty();
            if !usable {
                drivers.remove(name);
            }
            usable
        };
        info!(driver = name, endpoint, "Unregistered DRA plugin");
        self.0.listener.changed(name, usable);
    }
}
