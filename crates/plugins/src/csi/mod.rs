//! Drivers of the Container Storage Interface: which there are, and the calls to one.

pub mod limits;
mod requests;
mod table;

pub use requests::{Context, expand_request, publish_request, stage_request};
pub use table::{Driver, Drivers};

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::transport::Channel;

use crate::wire::RpcError;
use crate::wire::csi_v1::node_client::NodeClient;
use crate::wire::csi_v1::node_service_capability::{Type, rpc};
use crate::wire::csi_v1::{
    NodeExpandVolumeRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest, NodeGetInfoResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};

/// How long a driver may take for one call. The Go kubelet's number.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// What a driver's node service can do (CSI `NodeServiceCapability`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// STAGE_UNSTAGE_VOLUME.
    pub stage: bool,
    /// GET_VOLUME_STATS.
    pub stats: bool,
    /// EXPAND_VOLUME.
    pub expand: bool,
    /// VOLUME_CONDITION.
    pub condition: bool,
    /// SINGLE_NODE_MULTI_WRITER: it knows the finer access modes.
    pub single_node: bool,
    /// VOLUME_MOUNT_GROUP: it takes the pod's group.
    pub group: bool,
}

/// The result of a call.
pub type RpcResult<T> = Result<T, RpcError>;

/// Looks on at calls: for metrics.
pub trait CallObserver: Send + Sync {
    /// A call has ended. `method`: as gRPC names it, `/csi.v1.Node/NodeGetInfo`; `code`: `OK`, `Internal`, …
    fn called(&self, driver: &str, method: &'static str, code: &'static str, took: Duration);
}

/// The calls to one driver's node service. Clones share the connection, which is made anew when it was lost.
#[derive(Clone)]
pub struct Calls {
    client: NodeClient<Channel>,
    driver: Arc<str>,
    observer: Option<Arc<dyn CallObserver>>,
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl Calls {
    pub(crate) fn new(driver: &str, channel: Channel, observer: Option<Arc<dyn CallObserver>>) -> Self {
        Self { client: NodeClient::new(channel), driver: driver.into(), observer }
    }

    fn client(&self) -> NodeClient<Channel> {
        self.client.clone()
    }

    /// Waits for an answer, no longer than [`DEADLINE`].
    async fn answer<T>(
        &self,
        method: &'static str,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> RpcResult<T> {
        let begun = Instant::now();
        let answer = match tokio::time::timeout(DEADLINE, call).await {
            Ok(answer) => answer.map(tonic::Response::into_inner).map_err(RpcError::from),
            Err(_) => Err(RpcError::timed_out()),
        };
        if let Some(observer) = &self.observer {
            let code = answer.as_ref().err().map_or("OK", RpcError::code_name);
            observer.called(&self.driver, method, code, begun.elapsed());
        }
        answer
    }

    /// NodeGetInfo.
    ///
    /// # Errors
    /// The driver's, or that it does not answer; the same for every call.
    pub async fn info(&self) -> RpcResult<NodeGetInfoResponse> {
        self.answer("/csi.v1.Node/NodeGetInfo", self.client().node_get_info(NodeGetInfoRequest {})).await
    }

    /// NodeGetCapabilities.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn capabilities(&self) -> RpcResult<Capabilities> {
        let told = self
            .answer(
                "/csi.v1.Node/NodeGetCapabilities",
                self.client().node_get_capabilities(NodeGetCapabilitiesRequest {}),
            )
            .await?;
        let mut all = Capabilities::default();
        for Type::Rpc(one) in told.capabilities.iter().filter_map(|c| c.r#type.as_ref()) {
            match one.r#type() {
                rpc::Type::StageUnstageVolume => all.stage = true,
                rpc::Type::GetVolumeStats => all.stats = true,
                rpc::Type::ExpandVolume => all.expand = true,
                rpc::Type::VolumeCondition => all.condition = true,
                rpc::Type::SingleNodeMultiWriter => all.single_node = true,
                rpc::Type::VolumeMountGroup => all.group = true,
                rpc::Type::Unknown => {}
            }
        }
        Ok(all)
    }

    /// NodeStageVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn stage(&self, request: NodeStageVolumeRequest) -> RpcResult<()> {
        self.answer("/csi.v1.Node/NodeStageVolume", self.client().node_stage_volume(request)).await.map(|_| ())
    }

    /// NodeUnstageVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn unstage(&self, request: NodeUnstageVolumeRequest) -> RpcResult<()> {
        self.answer("/csi.v1.Node/NodeUnstageVolume", self.client().node_unstage_volume(request)).await.map(|_| ())
    }

    /// NodePublishVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn publish(&self, request: NodePublishVolumeRequest) -> RpcResult<()> {
        self.answer("/csi.v1.Node/NodePublishVolume", self.client().node_publish_volume(request)).await.map(|_| ())
    }

    /// NodeUnpublishVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn unpublish(&self, request: NodeUnpublishVolumeRequest) -> RpcResult<()> {
        self.answer("/csi.v1.Node/NodeUnpublishVolume", self.client().node_unpublish_volume(request)).await.map(|_| ())
    }

    /// NodeExpandVolume; the size in bytes that the volume has then, 0 when the driver does not say.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn expand(&self, request: NodeExpandVolumeRequest) -> RpcResult<i64> {
        self.answer("/csi.v1.Node/NodeExpandVolume", self.client().node_expand_volume(request))
            .await
            .map(|a| a.capacity_bytes)
    }

    /// NodeGetVolumeStats.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn stats(&self, request: NodeGetVolumeStatsRequest) -> RpcResult<NodeGetVolumeStatsResponse> {
        self.answer("/csi.v1.Node/NodeGetVolumeStats", self.client().node_get_volume_stats(request)).await
    }
}
