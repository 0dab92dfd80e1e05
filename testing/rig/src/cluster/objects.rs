//! The objects that a new cluster needs before a node can join, as kubeadm makes them.

use anyhow::Result;
use serde_json::{Value, json};

use super::api::{Api, Refused};

/// The user that the API server is to a kubelet.
pub(super) const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";
/// `ID.SECRET`, for this private cluster only.
pub(super) const BOOTSTRAP_TOKEN: &str = "abcdef.0123456789abcdef";

/// Makes them; what is there already stays.
///
/// # Errors
/// When the API server refuses.
pub(super) fn create(api: &Api) -> Result<()> {
    let (id, secret) = BOOTSTRAP_TOKEN.split_once('.').unwrap_or_default();
    let token = json!({
        "metadata": {"name": format!("bootstrap-token-{id}")}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": id, "token-secret": secret, "usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "false",
        },
    });
    add(api, "/api/v1/namespaces/kube-system/secrets", &token)?;
    let group = |name: &str| json!({"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": name});
    let user = |name: &str| json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": name});
    let approve = "system:certificates.k8s.io:certificatesigningrequests";
    for (role, subject) in [
        ("system:kubelet-api-admin", user(KUBELET_CLIENT)),
        ("system:node-bootstrapper", group("system:bootstrappers")),
        (&format!("{approve}:nodeclient"), group("system:bootstrappers")),
        (&format!("{approve}:selfnodeclient"), group("system:nodes")),
    ] {
        let binding = json!({
            "metadata": {"name": format!("rubelet:{}", role.rsplit(':').next().unwrap_or_default())},
            "roleRef": {"kind": "ClusterRole", "apiGroup": "rbac.authorization.k8s.io", "name": role},
            "subjects": [subject],
        });
        add(api, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding)?;
    }
    Ok(())
}

/// What the controller manager would make in a new namespace: the default service account and the certificate of the API server.
///
/// # Errors
/// When the API server refuses.
pub(super) fn fill_namespace(api: &Api, namespace: &str, certificate: &str) -> Result<()> {
    let collection = |kind: &str| format!("/api/v1/namespaces/{namespace}/{kind}");
    add(api, &collection("serviceaccounts"), &json!({"metadata": {"name": "default"}}))?;
    let root = json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": certificate}});
    add(api, &collection("configmaps"), &root)
}

fn add(api: &Api, collection: &str, object: &Value) -> Result<()> {
    match api.create(collection, object) {
        Err(e) if e.downcast_ref::<Refused>().is_some_and(|r| r.reason == "AlreadyExists") => Ok(()),
        other => other.map(drop),
    }
}
