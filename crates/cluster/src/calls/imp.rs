//! The client as every API.

use std::collections::BTreeMap;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    Event, Node, PersistentVolume, PersistentVolumeClaim, Pod, PodStatus, ServiceAccount,
};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;
use serde_json::Value;

use super::{AuthApi, CertificateApi, EventApi, LeaseApi, NodeApi, PodApi, StorageApi};
use crate::client::{Client, PatchType};
use crate::error::ClusterResult;
use crate::events::StoredEvent;

/// What is read of a pod whose status was patched: its spec and its managedFields, which are most of it, are passed over.
#[derive(Deserialize)]
struct PodAnswer {
    #[serde(default)]
    metadata: AnswerMeta,
    status: Option<PodStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AnswerMeta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    deletion_timestamp: Option<Time>,
    annotations: Option<BTreeMap<String, String>>,
}

impl From<PodAnswer> for Pod {
    fn from(PodAnswer { metadata, status }: PodAnswer) -> Self {
        let AnswerMeta { name, namespace, uid, resource_version, deletion_timestamp, annotations } = metadata;
        let metadata = ObjectMeta {
            name,
            namespace,
            uid,
            resource_version,
            deletion_timestamp,
            annotations,
            ..ObjectMeta::default()
        };
        Self { metadata, spec: None, status }
    }
}

#[async_trait]
impl PodApi for Client {
    async fn get_pod(&self, namespace: &str, name: &str) -> ClusterResult<Pod> {
        self.get(Some(namespace), name, false).await
    }

    async fn create_pod(&self, pod: &Pod) -> ClusterResult<Pod> {
        self.create(pod).await
    }

    async fn patch_pod_status(&self, namespace: &str, name: &str, patch: &Value) -> ClusterResult<Pod> {
        let answer: PodAnswer =
            self.patch_for::<Pod, _>(Some(namespace), name, Some("status"), PatchType::Strategic, patch).await?;
        Ok(answer.into())
    }

    async fn delete_pod(
        &self,
        namespace: &str,
        name: &str,
        grace_seconds: i64,
        uid: Option<&str>,
    ) -> ClusterResult<()> {
        self.delete::<Pod>(Some(namespace), name, Some(grace_seconds), uid).await
    }
}

#[async_trait]
impl NodeApi for Client {
    async fn get_node(&self, name: &str, from_cache: bool) -> ClusterResult<Node> {
        self.get(None, name, from_cache).await
    }

    async fn create_node(&self, node: &Node) -> ClusterResult<Node> {
        self.create(node).await
    }

    async fn patch_node(&self, name: &str, patch: &Value) -> ClusterResult<Node> {
        self.patch(None, name, None, PatchType::Strategic, patch).await
    }

    async fn patch_node_status(&self, name: &str, patch: &Value) -> ClusterResult<Node> {
        self.patch(None, name, Some("status"), PatchType::Strategic, patch).await
    }

    async fn get_csi_node(&self, name: &str) -> ClusterResult<CSINode> {
        self.get(None, name, false).await
    }

    async fn create_csi_node(&self, node: &CSINode) -> ClusterResult<CSINode> {
        self.create(node).await
    }

    async fn update_csi_node(&self, node: &CSINode) -> ClusterResult<CSINode> {
        self.update(node).await
    }
}

#[async_trait]
impl LeaseApi for Client {
    async fn get_lease(&self, namespace: &str, name: &str) -> ClusterResult<Lease> {
        self.get(Some(namespace), name, false).await
    }

    async fn create_lease(&self, lease: &Lease) -> ClusterResult<Lease> {
        self.create(lease).await
    }

    async fn update_lease(&self, lease: &Lease) -> ClusterResult<Lease> {
        self.update(lease).await
    }
}

#[async_trait]
impl EventApi for Client {
    async fn create_event(&self, event: &Event) -> ClusterResult<StoredEvent> {
        self.create_for(event).await
    }

    async fn patch_event(&self, namespace: &str, name: &str, patch: &Value) -> ClusterResult<StoredEvent> {
        self.patch_for::<Event, _>(Some(namespace), name, None, PatchType::Strategic, patch).await
    }
}

#[async_trait]
impl AuthApi for Client {
    async fn request_token(
        &self,
        namespace: &str,
        account: &str,
        request: &TokenRequest,
    ) -> ClusterResult<TokenRequest> {
        self.create_subresource::<ServiceAccount, _, _>(Some(namespace), account, "token", request).await
    }

    async fn review_token(&self, review: &TokenReview) -> ClusterResult<TokenReview> {
        self.create(review).await
    }

    async fn review_access(&self, review: &SubjectAccessReview) -> ClusterResult<SubjectAccessReview> {
        self.create(review).await
    }
}

#[async_trait]
impl CertificateApi for Client {
    async fn create_csr(&self, csr: &CertificateSigningRequest) -> ClusterResult<CertificateSigningRequest> {
        self.create(csr).await
    }

    async fn get_csr(&self, name: &str) -> ClusterResult<CertificateSigningRequest> {
        self.get(None, name, false).await
    }
}

#[async_trait]
impl StorageApi for Client {
    async fn get_claim(&self, namespace: &str, name: &str) -> ClusterResult<PersistentVolumeClaim> {
        self.get(Some(namespace), name, false).await
    }

    async fn get_volume(&self, name: &str) -> ClusterResult<PersistentVolume> {
        self.get(None, name, false).await
    }

    async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> ClusterResult<PersistentVolumeClaim> {
        self.patch(Some(namespace), name, Some("status"), PatchType::Strategic, patch).await
    }

    async fn get_attachment(&self, name: &str) -> ClusterResult<VolumeAttachment> {
        self.get(None, name, false).await
    }

    async fn get_csi_driver(&self, name: &str) -> ClusterResult<CSIDriver> {
        self.get(None, name, false).await
    }
}
