//! Pods for tests, from JSON.

use model::api::{Pod, PodSpec};
use model::pod::{DesiredPod, PodSource};

use super::ResourceList;

/// An API pod `ns/web` (UID `uid-1`) with this spec.
pub(crate) fn pod(spec: &str) -> DesiredPod {
    pod_with("{}", spec)
}

/// The same, with more metadata.
pub(crate) fn pod_with(metadata: &str, spec: &str) -> DesiredPod {
    pod_from(PodSource::Api, metadata, spec)
}

/// The same, from this source.
pub(crate) fn pod_from(source: PodSource, metadata: &str, spec: &str) -> DesiredPod {
    let spec: PodSpec = serde_json::from_str(spec).expect("spec");
    let mut pod = Pod { spec: Some(spec), ..Default::default() };
    pod.metadata = serde_json::from_str(metadata).expect("metadata");
    pod.metadata.name.get_or_insert_with(|| "web".into());
    pod.metadata.namespace.get_or_insert_with(|| "ns".into());
    pod.metadata.uid.get_or_insert_with(|| "uid-1".into());
    DesiredPod::new(pod, source).expect("pod")
}

/// A list on one line.
pub(crate) fn show(list: &ResourceList) -> String {
    list.iter().map(|(name, amount)| format!("{name}={amount}")).collect::<Vec<_>>().join(" ")
}
