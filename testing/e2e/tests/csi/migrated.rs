//! Disks of plugins that a driver has replaced, written in a pod: the driver is ours under the name of the one that has replaced the plugin.

use std::fs;

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::json;

use crate::driver::{Driver, run_attached};
use crate::volumes::{SLEEP, assert_nothing_left};

pub(crate) fn disks_of_replaced_plugins(cluster: &mut Cluster) {
    const HANDLE: &str = "/subscriptions/s/resourcegroups/g/providers/microsoft.compute/disks/d";
    let driver = Driver::start(cluster, "disk.csi.azure.com", &json!({"attachRequired": true}), &[]);
    driver.wait_registered(cluster);
    let mounts =
        json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/s", "subPath": "sub"}]});
    let mut p = pod("old", [with(container("c", SLEEP), mounts)]);
    p["spec"]["terminationGracePeriodSeconds"] = json!(1);
    p["spec"]["volumes"] = json!([{"name": "v", "azureDisk": {
        "diskName": "d", "diskURI": HANDLE, "kind": "Managed", "fsType": "ext4", "cachingMode": "None"}}]);
    cluster.run(&p);
    let running = run_attached(cluster, "old");
    let staged = driver.answered("NodeStageVolume", HANDLE);
    assert_eq!(staged[0]["request"]["volume_context"]["kind"], "Managed", "{staged:?}");
    let uid = running["metadata"]["uid"].as_str().unwrap();
    let volumes = cluster.node.root().join("pods").join(uid).join("volumes/kubernetes.io~csi");
    // As the Go kubelet names it.
    let name = HANDLE.replace('/', "~");
    assert!(volumes.join(&name).join("mount").is_dir(), "{volumes:?}");
    cluster.exec(&running, "c", &["sh", "-c", "echo x > /s/f && test -e /v/sub/f"]);
    assert!(fs::read_to_string(volumes.join(&name).join("mount/sub/f")).is_ok_and(|text| text == "x\n"));
    // The next agent finds it as it stands, and takes it down with the pod.
    cluster.node.restart();
    wait_until("the next agent asks for it again", seconds(30), || {
        (driver.answered("NodePublishVolume", HANDLE).len() > 1).then_some(())
    });
    cluster.delete("old");
    cluster.wait_gone("old", seconds(60));
    assert!(!driver.answered("NodeUnstageVolume", HANDLE).is_empty());
    assert_nothing_left(cluster);
}
