//! Pods in a few words, as JSON values that a test changes as it likes: `p["spec"]["hostNetwork"] = json!(true)`.

use rig::containerd::BUSYBOX;
use serde_json::{Value, json};

/// A container of this name that runs a shell script in busybox.
pub fn container(name: &str, script: &str) -> Value {
    json!({"name": name, "image": BUSYBOX, "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script]})
}

/// As [`container`], to be put among the init containers: it stays, and the next ones start beside it.
pub fn sidecar(name: &str, script: &str) -> Value {
    let mut value = container(name, script);
    value["restartPolicy"] = json!("Always");
    value
}

/// The value with these fields set: `with(container("c", "…"), json!({"image": "…"}))`.
pub fn with(mut value: Value, fields: Value) -> Value {
    for (key, field) in fields.as_object().into_iter().flatten() {
        value[key] = field.clone();
    }
    value
}

/// A pod in namespace `default` with grace 1.
pub fn pod(name: &str, containers: impl IntoIterator<Item = Value>) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": containers.into_iter().collect::<Vec<_>>()},
    })
}

/// The text of a log in CRI's format (`TIME STREAM P|F TEXT`), without the head of each line; parts of one line are joined.
pub fn lines(log: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut partial = String::new();
    for line in log.lines() {
        let mut fields = line.splitn(4, ' ');
        let tag = fields.nth(2).unwrap_or_default();
        partial.push_str(fields.next().unwrap_or_default());
        if tag != "P" {
            lines.push(std::mem::take(&mut partial));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_logs() {
        let log =
            "2026-01-01T00:00:00Z stdout F a b\n2026-01-01T00:00:00Z stdout P c\n2026-01-01T00:00:00Z stdout F d\n";
        assert_eq!(lines(log), ["a b", "cd"]);
    }

    #[test]
    fn fields_are_set() {
        let p = pod("a", [container("c", "true"), with(container("d", "true"), json!({"image": "x:1"}))]);
        assert_eq!(p["spec"]["containers"][1]["image"], "x:1");
        assert_eq!(p["spec"]["containers"][1]["name"], "d");
    }
}
