//! Typed calls behind small traits: rooms take `Arc<dyn PodApi>` and the like; [`crate::Client`] is all of them, fakes are some.
//!
//! Deadlines: each call has the client's ([`crate::Client::with_deadline`]); the lease and the node's status get a client with a shorter one and
//! no rate limit.

mod imp;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use serde_json::Value;

use crate::error::ClusterResult;
use crate::events::StoredEvent;

/// Pods and mirror pods.
#[async_trait]
pub trait PodApi: Send + Sync {
    /// GET; the newest.
    async fn get_pod(&self, namespace: &str, name: &str) -> ClusterResult<Pod>;
    /// POST (mirror pods). [`crate::ClusterError::is_already_exists`] when there is one of that name.
    async fn create_pod(&self, pod: &Pod) -> ClusterResult<Pod>;
    /// Strategic merge PATCH of `/status`, made by [`crate::patch::pod_status`];
    /// [`crate::ClusterError::is_other_uid`] when the pod has another uid. The answer is what of the pod a status' writer needs: who it is, its
    /// annotations, whether it is being deleted, its status.
    async fn patch_pod_status(&self, namespace: &str, name: &str, patch: &Value) -> ClusterResult<Pod>;
    /// DELETE with this grace (seconds), only if the pod has this uid ([`crate::ClusterError::is_other_uid`] otherwise).
    async fn delete_pod(&self, namespace: &str, name: &str, grace_seconds: i64, uid: Option<&str>)
    -> ClusterResult<()>;
}

/// The node's own object.
#[async_trait]
pub trait NodeApi: Send + Sync {
    /// GET; `from_cache`: any version the server has at hand.
    async fn get_node(&self, name: &str, from_cache: bool) -> ClusterResult<Node>;
    /// POST.
    async fn create_node(&self, node: &Node) -> ClusterResult<Node>;
    /// Strategic merge PATCH of the object (labels, annotations, taints).
    async fn patch_node(&self, name: &str, patch: &Value) -> ClusterResult<Node>;
    /// Strategic merge PATCH of `/status`, made by [`crate::patch::node_status`].
    async fn patch_node_status(&self, name: &str, patch: &Value) -> ClusterResult<Node>;
    /// GET of the CSINode.
    async fn get_csi_node(&self, name: &str) -> ClusterResult<CSINode>;
    /// POST of the CSINode.
    async fn create_csi_node(&self, node: &CSINode) -> ClusterResult<CSINode>;
    /// PUT of the CSINode.
    async fn update_csi_node(&self, node: &CSINode) -> ClusterResult<CSINode>;
}

/// The node's lease.
#[async_trait]
pub trait LeaseApi: Send + Sync {
    /// GET.
    async fn get_lease(&self, namespace: &str, name: &str) -> ClusterResult<Lease>;
    /// POST.
    async fn create_lease(&self, lease: &Lease) -> ClusterResult<Lease>;
    /// PUT; Conflict when it changed meanwhile.
    async fn update_lease(&self, lease: &Lease) -> ClusterResult<Lease>;
}

/// Events.
#[async_trait]
pub trait EventApi: Send + Sync {
    /// POST.
    async fn create_event(&self, event: &Event) -> ClusterResult<StoredEvent>;
    /// Strategic merge PATCH (count, last timestamp).
    async fn patch_event(&self, namespace: &str, name: &str, patch: &Value) -> ClusterResult<StoredEvent>;
}

/// Who may do what: tokens for pods, and the server's questions about its callers.
#[async_trait]
pub trait AuthApi: Send + Sync {
    /// POST to `serviceaccounts/NAME/token`.
    async fn request_token(
        &self,
        namespace: &str,
        account: &str,
        request: &TokenRequest,
    ) -> ClusterResult<TokenRequest>;
    /// POST of a TokenReview; the answer is in its status.
    async fn review_token(&self, review: &TokenReview) -> ClusterResult<TokenReview>;
    /// POST of a SubjectAccessReview; the answer is in its status.
    async fn review_access(&self, review: &SubjectAccessReview) -> ClusterResult<SubjectAccessReview>;
}

/// Certificate requests.
#[async_trait]
pub trait CertificateApi: Send + Sync {
    /// POST; the server names it when it carries `generateName`.
    async fn create_csr(&self, csr: &CertificateSigningRequest) -> ClusterResult<CertificateSigningRequest>;
    /// GET.
    async fn get_csr(&self, name: &str) -> ClusterResult<CertificateSigningRequest>;
}

/// What volumes are made of.
#[async_trait]
pub trait StorageApi: Send + Sync {
    /// GET of a claim.
    async fn get_claim(&self, namespace: &str, name: &str) -> ClusterResult<PersistentVolumeClaim>;
    /// GET of a volume.
    async fn get_volume(&self, name: &str) -> ClusterResult<PersistentVolume>;
    /// Strategic merge PATCH of a claim's status (expansion).
    async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> ClusterResult<PersistentVolumeClaim>;
    /// GET of an attachment.
    async fn get_attachment(&self, name: &str) -> ClusterResult<VolumeAttachment>;
    /// GET of a driver.
    async fn get_csi_driver(&self, name: &str) -> ClusterResult<CSIDriver>;
}
