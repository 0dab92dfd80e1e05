//! All steps from a manifest to pods of this node.

use model::Timestamp;
use model::api::{Pod, PodStatus, Toleration};
use model::pod::{CONFIG_HASH, CONFIG_SEEN, CONFIG_SOURCE, DesiredPod, PodSource};

use crate::defaults::{self, PodLevel};
use crate::references::{api_reference, unknown_source};
use crate::{Gates, ManifestError, Origin, decode, dump, resources, validate_pod};

/// The pods of a manifest, ready to run on `node_name`.
///
/// The outer error is about the manifest as a whole; an inner one about one pod (a URL can give several), and leaves the others alone.
/// `seen` becomes the annotation [`CONFIG_SEEN`].
///
/// # Errors
/// [`ManifestError`]: not to be decoded, no name, against the API's rules, or with references to API objects.
pub fn load(
    bytes: &[u8],
    origin: &Origin,
    node_name: &str,
    seen: Timestamp,
    gates: &Gates,
) -> Result<Vec<Result<DesiredPod, ManifestError>>, ManifestError> {
    let pods = decode(bytes, origin)?;
    Ok(pods.into_iter().map(|pod| one(pod?, origin, node_name, seen, gates)).collect())
}

/// The name under which a static pod stands on its node.
pub fn standing_name(name: &str, node_name: &str) -> String {
    format!("{name}-{}", node_name.to_lowercase())
}

fn one(
    mut pod: Pod,
    origin: &Origin,
    node_name: &str,
    seen: Timestamp,
    gates: &Gates,
) -> Result<DesiredPod, ManifestError> {
    if pod.metadata.name.as_deref().unwrap_or("").is_empty() {
        return Err(ManifestError::NoName);
    }
    let pod_level = defaults::apply(&mut pod);
    settle(&mut pod, &pod_level, origin, node_name);
    let errors = validate_pod(&pod, gates);
    if !errors.is_empty() {
        return Err(ManifestError::Invalid(errors));
    }
    refuse_references(&pod, gates)?;
    let source = match origin {
        Origin::File(_) => PodSource::File,
        Origin::Url(_) => PodSource::Http,
    };
    if let Some(spec) = &mut pod.spec {
        resources::canonicalize(spec);
    }
    let notes = pod.metadata.annotations.get_or_insert_default();
    notes.insert(CONFIG_SOURCE.into(), source.as_str().into());
    notes.insert(CONFIG_SEEN.into(), seen.to_string());
    DesiredPod::new(pod, source).map_err(ManifestError::Name)
}

/// UID and the changes that tie the pod to this node.
fn settle(pod: &mut Pod, pod_level: &PodLevel, origin: &Origin, node_name: &str) {
    let uid = dump::uid(pod, pod_level, node_name, origin);
    let meta = &mut pod.metadata;
    meta.name = Some(standing_name(meta.name.as_deref().unwrap_or(""), node_name));
    if meta.namespace.as_deref().unwrap_or("").is_empty() {
        meta.namespace = Some("default".into());
    }
    meta.annotations.get_or_insert_default().insert(CONFIG_HASH.into(), uid.clone());
    meta.uid = Some(uid);
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(node_name.into());
    if matches!(origin, Origin::File(_)) {
        tolerate(spec.tolerations.get_or_insert_default());
    }
    pod.status = Some(PodStatus { phase: Some("Pending".into()), ..pod.status.take().unwrap_or_default() });
}

/// Static pods stay when their node has problems. An equal toleration with a time limit loses the limit.
fn tolerate(tolerations: &mut Vec<Toleration>) {
    let empty = |s: &Option<String>| s.as_deref().unwrap_or("").is_empty();
    let mut found = false;
    for t in tolerations.iter_mut() {
        let all = t.operator.as_deref() == Some("Exists") && t.effect.as_deref() == Some("NoExecute");
        if all && empty(&t.key) && empty(&t.value) {
            t.toleration_seconds = None;
            found = true;
        }
    }
    if !found {
        tolerations.push(Toleration {
            operator: Some("Exists".into()),
            effect: Some("NoExecute".into()),
            ..Toleration::default()
        });
    }
}

fn refuse_references(pod: &Pod, gates: &Gates) -> Result<(), ManifestError> {
    if gates.prevent_static_pod_api_references {
        if let Some(what) = api_reference(pod) {
            return Err(ManifestError::Reference(what));
        }
        return match unknown_source(pod) {
            Some(volume) => Err(ManifestError::UnknownSource(volume.into())),
            None => Ok(()),
        };
    }
    let Some(spec) = &pod.spec else { return Ok(()) };
    let mut sources =
        spec.volumes.iter().flatten().flat_map(|v| v.projected.iter()).flat_map(|p| p.sources.iter().flatten());
    if sources.any(|s| s.cluster_trust_bundle.is_some()) {
        return Err(ManifestError::Forbidden("ClusterTrustBundle projected volume sources"));
    }
    if spec.resource_claims.as_ref().is_some_and(|c| !c.is_empty()) {
        return Err(ManifestError::Forbidden("ResourceClaims"));
    }
    Ok(())
}
