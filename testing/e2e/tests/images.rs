//! The collection of images by the room that is left, on a containerd of the test's own.
#![allow(clippy::unwrap_used)]

use e2e::{Node, Options, container, pod, seconds, wait_until};
use rig::Stage;
use serde_json::json;

const HOLD: &str = "exec sleep 1000000";

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn what_is_not_used_goes_when_the_disk_is_fuller_than_it_may_be() {
    if std::env::var_os("RUBELET_E2E_FULL").is_none() {
        e2e::skip!("takes six minutes: RUBELET_E2E_FULL=1 runs it");
    }
    let Some(runtime) = e2e::another_runtime() else {
        e2e::skip!("no containerd of this version to start one of its own");
    };
    let images = ["pause", "busybox", "nonroot"].map(|n| rig::lab().join(format!("images/small/{n}.tar")));
    let mut stage = Stage::create("e2e").unwrap();
    stage.start_containerd(&runtime, &images, false).unwrap();
    // First with thresholds that are not reached.
    let high = json!({"imageGCHighThresholdPercent": 99, "imageGCLowThresholdPercent": 98, "imageMinimumGCAge": "1s"});
    let mut node = Node::with(Options::default().config(high).on(&stage));
    let names = |node: &Node| -> Vec<String> {
        let images = node.ask(cri::RuntimeReader::list_images(node.cri(), None));
        images.into_iter().flat_map(|image| image.repo_tags).collect()
    };
    let has = |node: &Node, name: &str| names(node).iter().any(|tag| tag.contains(name));
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    node.wait_running("p");
    let id = node.container("p", "c").id;
    assert!(["pause", "busybox", "nonroot"].iter().all(|name| has(&node, name)), "{:?}", names(&node));
    assert!(!node.log().contains("over the high threshold"));
    node.stop();

    // Any disk is fuller than this. The first pass learns of the images, the second one, 5 minutes later, takes what is old enough.
    node.configure("imageGCHighThresholdPercent", json!(1));
    node.configure("imageGCLowThresholdPercent", json!(0));
    node.run();
    wait_until("the image that nobody uses is gone", seconds(400), || (!has(&node, "nonroot")).then_some(()));
    assert!(has(&node, "busybox") && has(&node, "pause"), "what is used, or pinned, stays: {:?}", names(&node));
    assert_eq!(node.container("p", "c").id, id, "the pod has seen nothing of it");
    assert!(node.log().contains("Disk usage on image filesystem is over the high threshold"), "{}", node.log());
    let (_, metrics) = node.get("/metrics").unwrap();
    let collected = "kubelet_image_garbage_collected_total{reason=\"space\"}";
    let line = metrics.lines().find(|l| l.starts_with(collected)).expect("the metric");
    assert_ne!(line.rsplit(' ').next(), Some("0"), "{line}");
    drop(node);
    stage.close().unwrap();
}
