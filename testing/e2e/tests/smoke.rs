//! The main job, from a manifest to running containers and away again.
#![allow(clippy::unwrap_used)]

use e2e::{Node, container, lines, pod, seconds, sidecar, wait_until, with};
use serde_json::json;

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_manifest_becomes_a_running_pod_and_goes_without_a_trace() {
    let node = Node::start();
    let data = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let main = with(container("c", "echo hello; exec sleep 1000000"), data.clone());
    let mut manifest = pod("web", [main, container("d", "exec sleep 1000000")]);
    manifest["spec"]["initContainers"] =
        json!([with(container("prepare", "echo ready > /data/mark"), data), sidecar("side", "exec sleep 1000000"),]);
    manifest["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {"medium": "Memory"}}]);
    node.write("web.yaml", &manifest);

    let web = node.wait_running("web");
    assert_eq!(web["metadata"]["name"], "web-e2e");
    assert_eq!(web["spec"]["nodeName"], "e2e");
    let uid = web["metadata"]["uid"].as_str().unwrap().to_owned();
    assert_eq!(web["metadata"]["annotations"]["kubernetes.io/config.hash"], uid.as_str());
    assert!(web["status"]["podIP"].as_str().unwrap().starts_with("10."));
    assert_eq!(node.exec("web", "c", &["cat", "/data/mark"]).stdout, b"ready\n");
    let log = wait_until("the log has its line", seconds(5), || {
        Some(node.container_log(&web, "c")).filter(|l| l.contains("hello"))
    });
    assert_eq!(lines(&log), ["hello"]);

    assert!(!node.leftovers(&uid).is_empty());
    node.remove("web.yaml");
    node.wait_gone(&uid, seconds(90));
    wait_until("/pods is empty", seconds(10), || node.pods().is_empty().then_some(()));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_changed_image_replaces_that_container_alone() {
    let node = Node::start();
    let tagged = |tag: &str| {
        let changed =
            with(container("changed", "exec sleep 1000000"), json!({"image": format!("lab.test/busybox:{tag}")}));
        let mut manifest = pod("edit", [changed, container("kept", "exec sleep 1000000")]);
        // Without its own UID, a static pod with other content is another pod.
        manifest["metadata"]["uid"] = json!("0e6a3ed0-6f0c-4b7e-9f5a-2f4a3a1b9c11");
        manifest
    };
    node.write("edit.yaml", &tagged("1"));
    node.wait_running("edit");
    let sandboxes: Vec<String> = node.sandboxes().into_iter().map(|s| s.id).collect();
    let (changed, kept) = (node.container("edit", "changed"), node.container("edit", "kept"));

    node.write("edit.yaml", &tagged("2"));
    let after = node.wait_pod("the container runs with the new image", "edit", |pod| {
        let of =
            |name: &str| pod["status"]["containerStatuses"].as_array()?.iter().find(|c| c["name"] == name).cloned();
        of("changed").is_some_and(|c| c["state"]["running"].is_object() && c["restartCount"] == 1)
    });
    assert_eq!(after["spec"]["containers"][0]["image"], "lab.test/busybox:2");
    assert_ne!(node.container("edit", "changed").id, changed.id);
    assert_eq!(node.container("edit", "kept").id, kept.id);
    assert_eq!(node.sandboxes().into_iter().map(|s| s.id).collect::<Vec<_>>(), sandboxes);
}
