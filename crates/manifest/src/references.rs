//! References from a pod to API objects. A static pod may have none: nothing would keep them and the pod together.

use model::api::{Container, Pod, PodSpec, Volume, VolumeProjection};

use crate::resources::as_container;

/// The first kind of API object that the pod refers to, in the API server's words; None when it refers to none.
pub fn api_reference(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    if filled(spec.service_account_name.as_deref()) {
        return Some("serviceaccounts");
    }
    let containers = containers(spec);
    if has_secret(spec, &containers) {
        return Some("secrets");
    }
    if has_config_map(spec, &containers) {
        return Some("configmaps");
    }
    if spec.resource_claims.as_ref().is_some_and(|c| !c.is_empty()) {
        return Some("resourceclaims");
    }
    spec.volumes.iter().flatten().find_map(volume)
}

fn filled(text: Option<&str>) -> bool {
    text.is_some_and(|t| !t.is_empty())
}

fn containers(spec: &PodSpec) -> Vec<Container> {
    let ephemeral = spec.ephemeral_containers.iter().flatten().filter_map(as_container);
    spec.init_containers.iter().flatten().chain(&spec.containers).cloned().chain(ephemeral).collect()
}

fn has_secret(spec: &PodSpec, containers: &[Container]) -> bool {
    let pull = spec.image_pull_secrets.iter().flatten().any(|s| !s.name.is_empty());
    let env_from = containers.iter().flat_map(|c| c.env_from.iter().flatten()).filter_map(|e| e.secret_ref.as_ref());
    let env = containers
        .iter()
        .flat_map(|c| c.env.iter().flatten())
        .filter_map(|e| e.value_from.as_ref()?.secret_key_ref.as_ref());
    pull || env_from.map(|s| &s.name).chain(env.map(|s| &s.name)).any(|n| !n.is_empty())
        || spec.volumes.iter().flatten().any(volume_secret)
}

/// Secrets that volumes name, of whatever source.
fn volume_secret(v: &Volume) -> bool {
    let refs = [
        v.cephfs.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.cinder.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.flex_volume.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.rbd.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.scale_io.as_ref().map(|s| &s.secret_ref),
        v.iscsi.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.storageos.as_ref().and_then(|s| s.secret_ref.as_ref()),
        v.csi.as_ref().and_then(|s| s.node_publish_secret_ref.as_ref()),
    ];
    refs.into_iter().flatten().any(|r| !r.name.is_empty())
        || v.azure_file.as_ref().is_some_and(|s| !s.secret_name.is_empty())
        || v.secret.as_ref().is_some_and(|s| filled(s.secret_name.as_deref()))
        || sources(v).any(|s| s.secret.as_ref().is_some_and(|s| !s.name.is_empty()))
}

fn has_config_map(spec: &PodSpec, containers: &[Container]) -> bool {
    let env_from =
        containers.iter().flat_map(|c| c.env_from.iter().flatten()).filter_map(|e| e.config_map_ref.as_ref());
    let env = containers
        .iter()
        .flat_map(|c| c.env.iter().flatten())
        .filter_map(|e| e.value_from.as_ref()?.config_map_key_ref.as_ref());
    env_from.map(|s| &s.name).chain(env.map(|s| &s.name)).any(|n| !n.is_empty())
        || spec.volumes.iter().flatten().any(|v| {
            v.config_map.as_ref().is_some_and(|m| !m.name.is_empty())
                || sources(v).any(|s| s.config_map.as_ref().is_some_and(|m| !m.name.is_empty()))
        })
}

fn sources(v: &Volume) -> impl Iterator<Item = &VolumeProjection> {
    v.projected.iter().flat_map(|p| p.sources.iter().flatten())
}

/// Volumes that need the API even when they name nothing.
fn volume(v: &Volume) -> Option<&'static str> {
    let whole = [
        (v.config_map.is_some(), "configmaps (via configmap volumes)"),
        (v.secret.is_some(), "secrets (via secret volumes)"),
        (v.csi.is_some(), "csidrivers (via CSI volumes)"),
        (v.glusterfs.is_some(), "endpoints (via glusterFS volumes)"),
        (v.persistent_volume_claim.is_some(), "persistentvolumeclaims"),
        (v.ephemeral.is_some(), "persistentvolumeclaims (via ephemeral volumes)"),
        (v.azure_file.is_some(), "secrets (via azureFile volumes)"),
    ];
    whole.into_iter().find_map(|(found, what)| found.then_some(what)).or_else(|| sources(v).find_map(projection))
}

fn projection(s: &VolumeProjection) -> Option<&'static str> {
    let kinds = [
        (s.config_map.is_some(), "configmaps (via projected volumes)"),
        (s.secret.is_some(), "secrets (via projected volumes)"),
        (s.service_account_token.is_some(), "serviceaccounts (via projected volumes)"),
        (s.cluster_trust_bundle.is_some(), "clustertrustbundles"),
        (s.pod_certificate.is_some(), "podcertificates"),
    ];
    kinds.into_iter().find_map(|(found, what)| found.then_some(what))
}

/// The name of a projected volume with a source that has nothing in it.
pub(crate) fn unknown_source(pod: &Pod) -> Option<&str> {
    let empty = |s: &VolumeProjection| *s == VolumeProjection::default();
    let mut volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    volumes.find(|v| sources(v).any(empty)).map(|v| v.name.as_str())
}
