//! Drivers of the Container Storage Interface: which there are, and the calls to one.

pub mod limits;
mod requests;
mod table;

pub use requests::{Context, expand_request, publish_request, stage_request};
pub use table::{Driver, Drivers};

use std::time::Duration;

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

/// Waits for an answer, no longer than [`DEADLINE`].
async fn answer<T>(call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>) -> RpcResult<T> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(RpcError::timed_out()),
    }
}

/// The calls to one driver's node service. Clones share the connection, which is made anew when it was lost.
#[derive(Clone, Debug)]
pub struct Calls(NodeClient<Channel>);

impl Calls {
    pub(crate) fn new(channel: Channel) -> Self {
        Self(NodeClient::new(channel))
    }

    /// NodeGetInfo.
    ///
    /// # Errors
    /// The driver's, or that it does not answer; the same for every call.
    pub async fn info(&self) -> RpcResult<NodeGetInfoResponse> {
        answer(self.0.clone().node_get_info(NodeGetInfoRequest {})).await
    }

    /// NodeGetCapabilities.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn capabilities(&self) -> RpcResult<Capabilities> {
        let told = answer(self.0.clone().node_get_capabilities(NodeGetCapabilitiesRequest {})).await?;
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
        answer(self.0.clone().node_stage_volume(request)).await.map(|_| ())
    }

    /// NodeUnstageVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn unstage(&self, request: NodeUnstageVolumeRequest) -> RpcResult<()> {
        answer(self.0.clone().node_unstage_volume(request)).await.map(|_| ())
    }

    /// NodePublishVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn publish(&self, request: NodePublishVolumeRequest) -> RpcResult<()> {
        answer(self.0.clone().node_publish_volume(request)).await.map(|_| ())
    }

    /// NodeUnpublishVolume.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn unpublish(&self, request: NodeUnpublishVolumeRequest) -> RpcResult<()> {
        answer(self.0.clone().node_unpublish_volume(request)).await.map(|_| ())
    }

    /// NodeExpandVolume; the size in bytes that the volume has then, 0 when the driver does not say.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn expand(&self, request: NodeExpandVolumeRequest) -> RpcResult<i64> {
        answer(self.0.clone().node_expand_volume(request)).await.map(|a| a.capacity_bytes)
    }

    /// NodeGetVolumeStats.
    ///
    /// # Errors
    /// As [`Calls::info`].
    pub async fn stats(&self, request: NodeGetVolumeStatsRequest) -> RpcResult<NodeGetVolumeStatsResponse> {
        answer(self.0.clone().node_get_volume_stats(request)).await
    }
}
