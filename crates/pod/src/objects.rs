//! What pods take from the API server, as a port: ConfigMaps, Secrets, tokens, trust anchors, claims and services.
//!
//! Without an API server ([`Standalone`]) every question has Go's answer for that case. A pod's worker says which pod it works for
//! ([`PodObjects::follow`]) and when it is gone ([`PodObjects::forget`]): watches live only between the two. When an object that a followed
//! pod uses changes, [`PodEntry::objects_changed`] wakes its worker.
//!
//! No call waits longer than the API client's deadline; one that fails is repeated by the worker's own retries.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use model::api::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret, ServiceAccount};
use model::k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use model::pod::{DesiredPod, PodUid};

use crate::registry::PodEntry;

/// Why an object could not be had. The texts are Go's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The API server says that it is not there: `configmap "x" not found`.
    #[error("{0}")]
    NotFound(String),
    /// It could not be asked for, or may not be read.
    #[error("{0}")]
    Failed(String),
}

impl ObjectError {
    /// True when the API server says that it is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound(_))
    }
}

/// The result of a question.
pub type ObjectResult<T> = Result<T, ObjectError>;

/// A service account token for one pod.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The token.
    pub token: String,
    /// When another one should be asked for; it is good for some time after that.
    pub renew_at: Timestamp,
    /// When it ends.
    pub ends: Timestamp,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").field("renew_at", &self.renew_at).finish_non_exhaustive()
    }
}

/// Which ClusterTrustBundles.
#[derive(Clone, Debug, PartialEq)]
pub enum TrustBundles {
    /// The one of this name.
    Named(String),
    /// All of a signer that the selector matches; no selector matches none.
    Signer {
        /// `spec.signerName`.
        name: String,
        /// Labels.
        selector: Option<LabelSelector>,
    },
}

/// Objects of the API server that pods use. Namespaces are the pod's own.
#[async_trait]
pub trait PodObjects: Send + Sync {
    /// True when there is no API server.
    fn standalone(&self) -> bool {
        false
    }

    /// A worker works for this form of its pod; what the pod names is kept at hand from now on. A newer form replaces the older one.
    fn follow(&self, pod: &DesiredPod, entry: &Arc<PodEntry>);

    /// The pod needs nothing any more.
    fn forget(&self, uid: &PodUid);

    /// A ConfigMap of a followed pod.
    async fn config_map(&self, namespace: &str, name: &str) -> ObjectResult<Arc<ConfigMap>>;

    /// A Secret of a followed pod.
    async fn secret(&self, namespace: &str, name: &str) -> ObjectResult<Arc<Secret>>;

    /// A token of the pod's service account, bound to the pod. `audience` empty: the API server's own. `seconds`: how long it is to live.
    /// One that is due for renewal and cannot be renewed is kept until it ends.
    async fn token(&self, pod: &DesiredPod, audience: &str, seconds: Option<i64>) -> ObjectResult<Token>;

    /// The pod's service account.
    async fn service_account(&self, namespace: &str, name: &str) -> ObjectResult<ServiceAccount>;

    /// Trust anchors as PEM, each once. `optional`: nothing there is an empty file.
    async fn trust_anchors(&self, bundles: &TrustBundles, optional: bool) -> ObjectResult<Vec<u8>>;

    /// A claim.
    async fn claim(&self, namespace: &str, name: &str) -> ObjectResult<PersistentVolumeClaim>;

    /// A volume.
    async fn volume(&self, name: &str) -> ObjectResult<PersistentVolume>;

    /// The runtime's handler that a RuntimeClass names.
    async fn runtime_handler(&self, class: &str) -> ObjectResult<String>;

    /// The variables that tell a pod of services, as [`decide::config::env::service_variables`] forms them; None: services have not been
    /// listed yet, with `wait` not even after a few seconds.
    async fn service_variables(&self, namespace: &str, links: bool, wait: bool) -> Option<BTreeMap<String, String>>;
}

/// No API server: only static pods, which name no objects of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standalone;

fn no_client<T>(what: &str) -> ObjectResult<T> {
    Err(ObjectError::Failed(what.to_owned()))
}

#[async_trait]
impl PodObjects for Standalone {
    fn standalone(&self) -> bool {
        true
    }

    fn follow(&self, _pod: &DesiredPod, _entry: &Arc<PodEntry>) {}

    fn forget(&self, _uid: &PodUid) {}

    async fn config_map(&self, namespace: &str, name: &str) -> ObjectResult<Arc<ConfigMap>> {
        no_client(&format!("couldn't get configMap {namespace}/{name}, no kubeClient defined"))
    }

    async fn secret(&self, namespace: &str, name: &str) -> ObjectResult<Arc<Secret>> {
        no_client(&format!("couldn't get secret {namespace}/{name}, no kubeClient defined"))
    }

    async fn token(&self, _pod: &DesiredPod, _audience: &str, _seconds: Option<i64>) -> ObjectResult<Token> {
        no_client("cannot use TokenManager when kubelet is in standalone mode")
    }

    async fn service_account(&self, _namespace: &str, _name: &str) -> ObjectResult<ServiceAccount> {
        no_client("not supported due to running kubelet in standalone mode")
    }

    async fn trust_anchors(&self, _bundles: &TrustBundles, _optional: bool) -> ObjectResult<Vec<u8>> {
        no_client("ClusterTrustBundle projection is not supported in static kubelet mode")
    }

    async fn claim(&self, _namespace: &str, _name: &str) -> ObjectResult<PersistentVolumeClaim> {
        no_client("not supported due to running kubelet in standalone mode")
    }

    async fn volume(&self, _name: &str) -> ObjectResult<PersistentVolume> {
        no_client("not supported due to running kubelet in standalone mode")
    }

    async fn runtime_handler(&self, _class: &str) -> ObjectResult<String> {
        // Nobody says what a class is: the default handler runs it.
        Ok(String::new())
    }

    async fn service_variables(&self, _: &str, _: bool, _: bool) -> Option<BTreeMap<String, String>> {
        Some(BTreeMap::new())
    }
}
