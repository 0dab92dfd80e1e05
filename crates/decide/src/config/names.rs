//! Names that the agent writes into the runtime and under the log directories; another agent that takes the node over reads them.

use std::collections::BTreeMap;

use model::api::{ContainerPort, LifecycleHandler};
use model::pod::{ContainerEntry, DesiredPod};
use serde_json::{Map, Value};

use super::go_text;

/// Label: pod name.
pub const POD_NAME_LABEL: &str = "io.kubernetes.pod.name";
/// Label: pod namespace.
pub const POD_NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";
/// Label: pod UID.
pub const POD_UID_LABEL: &str = "io.kubernetes.pod.uid";
/// Label: container name.
pub const CONTAINER_NAME_LABEL: &str = "io.kubernetes.container.name";
/// Annotation: hash of the container's definition, lower-case hex.
pub const HASH: &str = "io.kubernetes.container.hash";
/// Annotation: restart count, decimal.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: `terminationMessagePath`.
pub const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `terminationMessagePolicy`.
pub const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: the preStop handler as JSON.
pub const PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: `ports` as a JSON array.
pub const CONTAINER_PORTS: &str = "io.kubernetes.container.ports";
/// Annotation: `metadata.deletionGracePeriodSeconds`.
pub const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation: `spec.terminationGracePeriodSeconds`.
pub const TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";

/// Where links to container logs are kept for log agents.
pub const CONTAINER_LOGS_DIR: &str = "/var/log/containers";

/// `PODLOGS/NAMESPACE_NAME_UID`.
pub fn pod_log_dir(pod_logs_dir: &str, pod: &DesiredPod) -> String {
    join(pod_logs_dir, &format!("{}_{}_{}", pod.namespace(), pod.name(), pod.uid()))
}

/// `PODLOGS/NAMESPACE_NAME_UID/CONTAINER`.
pub fn container_log_dir(pod_logs_dir: &str, pod: &DesiredPod, container: &str) -> String {
    format!("{}/{container}", pod_log_dir(pod_logs_dir, pod))
}

/// `CONTAINER/N.log`, relative to the sandbox's log directory.
pub fn container_log_path(container: &str, restart_count: u32) -> String {
    format!("{container}/{restart_count}.log")
}

/// The pod UID in the name of a directory under PODLOGS (`NAMESPACE_NAME_UID`, formerly `UID`).
pub fn uid_of_log_dir(name: &str) -> &str {
    name.rsplit_once('_').map_or(name, |(_, uid)| uid)
}

/// `/var/log/containers/NAME_NAMESPACE_CONTAINER-ID.log`; what stands before `.log` is cut to 251 bytes, as file systems take 255.
pub fn container_log_link(pod_name: &str, namespace: &str, container: &str, id: &str) -> String {
    let base = format!("{pod_name}_{namespace}_{container}-{id}");
    let mut end = base.len().min(251);
    while !base.is_char_boundary(end) {
        end -= 1;
    }
    format!("{CONTAINER_LOGS_DIR}/{}.log", &base[..end])
}

/// The container id in the name of a link made by [`container_log_link`]; None when there is none (a cut name).
pub fn id_of_log_link(name: &str) -> Option<&str> {
    let last = name.rsplit_once('-').map_or(name, |(_, last)| last);
    last.strip_suffix(".log").filter(|id| id.len() >= 6)
}

/// The restart count for a container of which the runtime knows nothing: one more than the highest N of the files `N.log*` in its log
/// directory, else 0. Some runtimes forget everything at a reboot, and the old logs must not be written over.
pub fn restart_count_from_logs<'a>(files: impl IntoIterator<Item = &'a str>) -> u32 {
    files
        .into_iter()
        .filter_map(|f| {
            let digits = f.len() - f.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            f[digits..].starts_with(".log").then(|| f[..digits].parse::<u32>().ok()).flatten()
        })
        .map(|n| n.saturating_add(1))
        .max()
        .unwrap_or(0)
}

/// The value of [`HASH`].
pub fn hash_text(hash: u32) -> String {
    format!("{hash:x}")
}

/// Labels of a sandbox: the pod's, and the agent's over them.
pub fn sandbox_labels(pod: &DesiredPod) -> BTreeMap<String, String> {
    let mut labels = pod.meta().labels.clone().unwrap_or_default();
    labels.extend(pod_labels(pod));
    labels
}

/// Labels of a container; the pod's own are not among them.
pub fn container_labels(pod: &DesiredPod, container: &str) -> BTreeMap<String, String> {
    let mut labels: BTreeMap<_, _> = pod_labels(pod).into();
    labels.insert(CONTAINER_NAME_LABEL.into(), container.into());
    labels
}

fn pod_labels(pod: &DesiredPod) -> [(String, String); 3] {
    [
        (POD_NAME_LABEL.into(), pod.name().into()),
        (POD_NAMESPACE_LABEL.into(), pod.namespace().into()),
        (POD_UID_LABEL.into(), pod.uid().to_string()),
    ]
}

/// Annotations of a container: those of device plugins, and the agent's over them.
pub fn container_annotations(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    hash: u32,
    restart_count: u32,
    devices: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let spec = container.spec;
    let mut notes = devices.clone();
    let mut set = |key: &str, value: String| notes.insert(key.to_string(), value);
    set(HASH, hash_text(hash));
    set(RESTART_COUNT, restart_count.to_string());
    set(TERMINATION_MESSAGE_PATH, spec.termination_message_path.clone().unwrap_or_default());
    set(TERMINATION_MESSAGE_POLICY, spec.termination_message_policy.clone().unwrap_or_default());
    if let Some(grace) = pod.meta().deletion_grace_period_seconds {
        set(DELETION_GRACE, grace.to_string());
    }
    if let Some(grace) = pod.spec().termination_grace_period_seconds {
        set(TERMINATION_GRACE, grace.to_string());
    }
    if let Some(handler) = spec.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) {
        set(PRE_STOP_HANDLER, go_text::json(&handler_json(handler)));
    }
    if let Some(ports) = spec.ports.as_deref().filter(|p| !p.is_empty()) {
        set(CONTAINER_PORTS, go_text::json(&ports.iter().map(port_json).collect()));
    }
    notes
}

/// Adds a key unless the value is Go's zero value (`omitempty`).
fn put(map: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    let value = value.into();
    let empty = match &value {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        Value::Number(n) => n.as_i64() == Some(0),
        Value::Array(a) => a.is_empty(),
        _ => false,
    };
    if !empty {
        map.insert(key.into(), value);
    }
}

fn port_json(port: &ContainerPort) -> Value {
    let mut map = Map::new();
    put(&mut map, "name", port.name.clone());
    put(&mut map, "hostPort", port.host_port);
    map.insert("containerPort".into(), port.container_port.into());
    put(&mut map, "protocol", port.protocol.clone());
    put(&mut map, "hostIP", port.host_ip.clone());
    Value::Object(map)
}

/// A LifecycleHandler with its keys in the order of the API's type.
fn handler_json(handler: &LifecycleHandler) -> Value {
    let mut map = Map::new();
    if let Some(exec) = &handler.exec {
        let mut inner = Map::new();
        put(&mut inner, "command", exec.command.clone());
        map.insert("exec".into(), inner.into());
    }
    if let Some(get) = &handler.http_get {
        let mut inner = Map::new();
        put(&mut inner, "path", get.path.clone());
        inner.insert("port".into(), int_or_string(&get.port));
        put(&mut inner, "host", get.host.clone());
        put(&mut inner, "scheme", get.scheme.clone());
        let headers = get.http_headers.iter().flatten();
        put(
            &mut inner,
            "httpHeaders",
            headers.map(|h| serde_json::json!({"name": h.name, "value": h.value})).collect::<Vec<_>>(),
        );
        map.insert("httpGet".into(), inner.into());
    }
    if let Some(tcp) = &handler.tcp_socket {
        let mut inner = Map::new();
        inner.insert("port".into(), int_or_string(&tcp.port));
        put(&mut inner, "host", tcp.host.clone());
        map.insert("tcpSocket".into(), inner.into());
    }
    if let Some(sleep) = &handler.sleep {
        map.insert("sleep".into(), serde_json::json!({"seconds": sleep.seconds}));
    }
    Value::Object(map)
}

fn int_or_string(value: &model::api::IntOrString) -> Value {
    match value {
        model::api::IntOrString::Int(n) => (*n).into(),
        model::api::IntOrString::String(s) => s.as_str().into(),
    }
}

/// One path below another, without doubled slashes.
pub(crate) fn join(dir: &str, name: &str) -> String {
    format!("{}/{}", dir.trim_end_matches('/'), name.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_count_is_one_above_the_highest_log() {
        let table: [(&[&str], u32); 6] = [
            (&[], 0),
            (&["0.log"], 1),
            (&["2.log", "10.log.20240101-000000.gz", "9.log"], 11),
            (&["x.log", "log", ".log", "-1.log"], 0),
            (&["3.logs"], 4),
            (&["99999999999.log", "1.log"], 2),
        ];
        for (files, expected) in table {
            assert_eq!(restart_count_from_logs(files.iter().copied()), expected, "{files:?}");
        }
    }

    #[test]
    fn log_link_is_cut_to_what_a_file_system_takes() {
        let id = "0123456789abcdef";
        assert_eq!(container_log_link("web", "ns", "c", id), "/var/log/containers/web_ns_c-0123456789abcdef.log");
        let long = container_log_link(&"p".repeat(253), "ns", "c", id);
        assert_eq!(long.len(), CONTAINER_LOGS_DIR.len() + 1 + 255);
        assert!(long.ends_with("p.log"));
        assert_eq!(id_of_log_link("web_ns_c-0123456789abcdef.log"), Some(id));
        assert_eq!(id_of_log_link("web_ns_c-0123.log"), None);
        assert_eq!(uid_of_log_dir("ns_web_1234"), "1234");
        assert_eq!(uid_of_log_dir("1234"), "1234");
    }

    #[test]
    fn hash_is_lower_hex_without_padding() {
        assert_eq!(hash_text(0x0e22_0f96), "e220f96");
    }
}
