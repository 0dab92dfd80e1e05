//! The ordinary ways of a pod's life.

use std::time::Duration;

use sim::{Manifest, Node, run};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn one_pod_from_manifest_to_gone() {
    run(async {
        let mut node = Node::new(1).await;
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        assert!(node.until(SECOND, |n| n.phase(&uid) == "Running").await, "{:?}", node.world().asked(50));
        node.settle(10 * SECOND).await;
        node.remove("a.yaml");
        assert!(node.until(10 * SECOND, |n| n.is_gone(&uid)).await);
        node.settle(10 * SECOND).await;
    });
}
