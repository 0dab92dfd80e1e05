//! What a pod's status says, taken out of the JSON of `/pods`.

use serde_json::Value;

/// A container's entry in the status, app or init container; null when there is none.
pub fn of<'a>(pod: &'a Value, container: &str) -> &'a Value {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let mut all = lists.iter().flat_map(|l| pod["status"][*l].as_array().into_iter().flatten());
    all.find(|c| c["name"] == container).unwrap_or(&Value::Null)
}

/// True when the container runs.
pub fn runs(pod: &Value, container: &str) -> bool {
    of(pod, container)["state"]["running"].is_object()
}

/// Why the container waits; empty when it does not.
pub fn waiting<'a>(pod: &'a Value, container: &str) -> &'a str {
    of(pod, container)["state"]["waiting"]["reason"].as_str().unwrap_or_default()
}

/// `restartCount`, 0 without a status.
pub fn restarts(pod: &Value, container: &str) -> u64 {
    of(pod, container)["restartCount"].as_u64().unwrap_or_default()
}

/// The runtime's id of the container, without `containerd://`.
pub fn id<'a>(pod: &'a Value, container: &str) -> &'a str {
    of(pod, container)["containerID"].as_str().and_then(|id| id.split("://").nth(1)).unwrap_or_default()
}

/// The status of a condition: `True`, `False`, `Unknown`; empty when it is not there.
pub fn condition<'a>(pod: &'a Value, kind: &str) -> &'a str {
    let conditions = pod["status"]["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|c| c["type"] == kind);
    found.and_then(|c| c["status"].as_str()).unwrap_or_default()
}

/// The pod's phase.
pub fn phase(pod: &Value) -> &str {
    pod["status"]["phase"].as_str().unwrap_or_default()
}

/// The pod's UID.
pub fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}
