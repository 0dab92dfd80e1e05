//! The downward API.

use super::super::downward::{field, map_lines, resource_for_env, volume_files};
use super::*;

fn field_of(path: &str) -> Result<String, String> {
    let p = pod_with(
        r#"{"labels": {"app": "web", "a.io/b": "x"}, "annotations": {"two": "l1\nl2 \"q\" é", "Up/Per": "u"}}"#,
        &one_spec("", r#""nodeName": "node-a", "serviceAccountName": "sa""#),
    );
    let selector =
        serde_json::from_value(serde_json::json!({"apiVersion": "v1", "fieldPath": path})).expect("selector");
    field(&p, &selector, Some(&strings(&["192.0.2.1", "2001:db8::1"])), &strings(&["10.1.2.3", "fd00::3"]))
        .map_err(|e| e.message)
}

#[test]
fn fields() {
    for (path, want) in [
        ("metadata.name", "web"),
        ("metadata.namespace", "ns"),
        ("metadata.uid", "uid-1"),
        ("metadata.labels['app']", "web"),
        ("metadata.labels['a.io/b']", "x"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['two']", "l1\nl2 \"q\" é"),
        ("metadata.annotations['Up/Per']", "u"),
        ("metadata.annotations", "Up/Per=\"u\"\ntwo=\"l1\\nl2 \\\"q\\\" é\""),
        ("spec.nodeName", "node-a"),
        ("spec.host", "node-a"),
        ("spec.serviceAccountName", "sa"),
        ("status.hostIP", "192.0.2.1"),
        ("status.hostIPs", "192.0.2.1,2001:db8::1"),
        ("status.podIP", "10.1.2.3"),
        ("status.podIPs", "10.1.2.3,fd00::3"),
    ] {
        assert_eq!(field_of(path).as_deref(), Ok(want), "{path}");
    }
    let name = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric \
                character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
                '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
    for (path, want) in [
        ("status.phase", "unsupported fieldPath: status.phase".to_string()),
        ("spec.x", "field label not supported: spec.x".into()),
        ("metadata.x", "field label not supported: metadata.x".into()),
        ("spec.x['y']", "field label does not support subscript: spec.x['y']".into()),
        (
            "metadata.labels['']",
            format!("invalid key subscript in metadata.labels['']: name part must be non-empty;{name}"),
        ),
        ("metadata.labels['-']", format!("invalid key subscript in metadata.labels['-']: {name}")),
    ] {
        assert_eq!(field_of(path), Err(want), "{path}");
    }
    let selector = serde_json::from_value(serde_json::json!({"fieldPath": "status.hostIP"})).expect("selector");
    assert_eq!(
        field(&one("", ""), &selector, None, &[]).expect_err("missing").missing.as_deref(),
        Some("node address")
    );
}

#[test]
fn whole_maps() {
    assert_eq!(map_lines(Some(&map(&[("b", "2"), ("a", "\t")]))), "a=\"\\t\"\nb=\"2\"");
    assert_eq!(map_lines(None), "");
}

fn resource(containers: &str, name: &str, selector: &str, node: &NodeFacts) -> Result<String, String> {
    let p = pod(&format!(r#"{{{containers}}}"#));
    let selector = serde_json::from_str(selector).expect("selector");
    resource_for_env(&p, p.container(name).expect("container"), &selector, node).map_err(|e| e.message)
}

#[test]
fn resources_are_divided_and_rounded_up() {
    let node = node();
    let limits = |cpu: &str, memory: &str| {
        format!(
            r#""containers": [{{"name": "a", "resources": {{"limits": {{"cpu": "{cpu}", "memory": "{memory}", "hugepages-2Mi": "4Mi"}}, "requests": {{"cpu": "250m"}}}}}}]"#
        )
    };
    for (cpu, memory, what, divisor, want) in [
        ("500m", "1Gi", "limits.cpu", "0", "1"),
        ("500m", "1Gi", "limits.cpu", "1", "1"),
        ("500m", "1Gi", "limits.cpu", "1m", "500"),
        ("1500m", "1Gi", "limits.cpu", "1", "2"),
        ("1500m", "1Gi", "requests.cpu", "1m", "250"),
        ("1", "1073741825", "limits.memory", "1", "1073741825"),
        ("1", "1073741825", "limits.memory", "1Ki", "1048577"),
        ("1", "1073741825", "limits.memory", "1Mi", "1025"),
        ("1", "1Gi", "limits.memory", "1Mi", "1024"),
        ("1", "1Gi", "requests.memory", "1", "0"),
        ("1", "1Gi", "limits.hugepages-2Mi", "1Mi", "4"),
        ("0", "1Gi", "limits.cpu", "1m", "3900"),
        ("1", "1Gi", "limits.ephemeral-storage", "1Gi", "50"),
        ("1", "1Gi", "requests.ephemeral-storage", "1Gi", "0"),
    ] {
        let selector = format!(r#"{{"resource": "{what}", "divisor": "{divisor}"}}"#);
        assert_eq!(
            resource(&limits(cpu, memory), "a", &selector, &node).as_deref(),
            Ok(want),
            "{cpu} {what} {divisor}"
        );
    }
    for what in ["limits.x", "cpu", "x.cpu"] {
        let selector = format!(r#"{{"resource": "{what}"}}"#);
        assert_eq!(
            resource(&limits("1", "1"), "a", &selector, &node),
            Err(format!("unsupported container resource : {what}"))
        );
    }
}

#[test]
fn absent_limits() {
    let mut node = node();
    let spec = r#""initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]"#;
    let level = format!(r#"{spec}, "resources": {{"limits": {{"memory": "2Gi"}}}}"#);
    let memory =
        |from: &str| format!(r#"{{"resource": "limits.memory", "divisor": "1Mi", "containerName": "{from}"}}"#);
    assert_eq!(resource(spec, "a", &memory(""), &node).as_deref(), Ok("7168"));
    assert_eq!(resource(spec, "i", &memory(""), &node).as_deref(), Ok("7168"));
    assert_eq!(resource(spec, "a", &memory("b"), &node).as_deref(), Ok("7168"));
    assert_eq!(resource(spec, "a", &memory("i"), &node).as_deref(), Ok("0"));
    assert_eq!(resource(spec, "a", &memory("x"), &node), Err("container x not found".into()));
    assert_eq!(resource(&level, "a", &memory(""), &node).as_deref(), Ok("2048"));
    node.gates.pod_level_resources = false;
    assert_eq!(resource(&level, "a", &memory(""), &node).as_deref(), Ok("7168"));
    node.allocatable = None;
    assert_eq!(resource(spec, "a", &memory(""), &node), Err("node allocatable is not known yet".into()));
}

#[test]
fn files() {
    let p = pod_with(
        r#"{"labels": {"a": "1"}}"#,
        &one_spec(
            r#""resources": {"limits": {"cpu": "1500m"}}"#,
            r#""volumes": [{"name": "d", "downwardAPI": {"defaultMode": 256, "items": [
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                {"path": "./d//cpu", "mode": 292, "resourceFieldRef": {"containerName": "a", "resource": "limits.cpu"}},
                {"path": "memory", "resourceFieldRef": {"containerName": "a", "resource": "limits.memory"}}]}},
              {"name": "bad", "downwardAPI": {"items": [
                {"path": "x", "fieldRef": {"fieldPath": "status.podIP"}},
                {"path": "y", "resourceFieldRef": {"containerName": "z", "resource": "limits.memory"}}]}},
              {"name": "e", "emptyDir": {}}]"#,
        ),
    );
    let node = node();
    let volumes = p.spec().volumes.as_deref().expect("volumes");
    let get = |i: usize| volume_files(&p, &volumes[i], node.allocatable.as_ref());
    let file = |text: &str, mode| (text.as_bytes().to_vec(), mode);
    assert_eq!(
        get(0),
        Ok(Some(BTreeMap::from([
            ("labels".to_string(), file("a=\"1\"", 0o400)),
            ("d/cpu".to_string(), file("2", 0o444)),
            ("memory".to_string(), file(&(7i64 << 30).to_string(), 0o400)),
        ])))
    );
    assert_eq!(get(1), Err("[unsupported fieldPath: status.podIP, container z not found]".into()));
    assert_eq!(get(2), Ok(None));
}
