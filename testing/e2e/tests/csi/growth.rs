//! Volumes that grow while they are used, and what claims and pods are told of it; figures of volumes and their health.

use std::fs;

use e2e::cluster::Cluster;
use e2e::{NODE, seconds, wait_until};
use serde_json::{Value, json};

use crate::driver::{Driver, claim};
use crate::faults::one;
use crate::volumes::assert_nothing_left;

fn claim_path(name: &str) -> String {
    format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}")
}

/// Does what a resizer does: the volume has a new size, and the node is to do its part.
pub(crate) fn grow(cluster: &Cluster, name: &str, size: &str) {
    let api = cluster.api();
    let volume = format!("/api/v1/persistentvolumes/pv-{name}");
    api.merge(&volume, &json!({"spec": {"capacity": {"storage": size}}})).unwrap();
    let pending = json!({"status": {"allocatedResources": {"storage": size}, "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        "conditions": [{"type": "FileSystemResizePending", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    api.merge(&format!("{}/status", claim_path(name)), &pending).unwrap();
}

pub(crate) fn claim_status(cluster: &Cluster, name: &str) -> Value {
    cluster.api().get(&claim_path(name)).unwrap()["status"].clone()
}

pub(crate) fn wait_grown(cluster: &Cluster, name: &str, size: &str) {
    wait_until(&format!("{name} has grown"), seconds(60), || {
        let status = claim_status(cluster, name);
        (status["capacity"]["storage"] == size && status["allocatedResourceStatuses"].is_null()).then_some(())
    });
}

pub(crate) fn growth_that_fails(cluster: &mut Cluster) {
    let driver = Driver::start(cluster, "grows.csi.test", &json!({"attachRequired": false}), &[]);
    driver.wait_registered(cluster);
    claim(cluster, "grows.csi.test", "grows", &json!({}));
    claim(cluster, "grows.csi.test", "fixed", &json!({"accessModes": ["ReadOnlyMany"]}));
    cluster.run(&one("grows", "grows"));
    let mut fixed = one("fixed", "fixed");
    fixed["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = json!(true);
    cluster.run(&fixed);
    cluster.wait_running("grows");
    cluster.wait_running("fixed");
    let told = |name: &str, reason: &str, message: &str| {
        wait_until(&format!("{name} is told: {message}"), seconds(30), || {
            cluster.events(name).iter().any(|(r, m)| r == reason && m == message).then_some(())
        });
    };
    // A failure is told, and tried again.
    driver.faults(&json!({"NodeExpandVolume": {"handle": "grows", "code": 13, "message": "no room"}}));
    grow(cluster, "grows", "2Gi");
    let error = "Expander.NodeExpand failed to expand the volume : rpc error: code = Internal desc = no room";
    told(
        "grows",
        "VolumeResizeFailed",
        &format!("NodeExpandVolume.NodeExpandVolume failed for volume \"pv-grows\" : {error}"),
    );
    let condition = |status: &Value| {
        let all = status["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|c| c["type"] == "NodeResizeError").map(|c| c["message"].clone())
    };
    wait_until("the claim is told", seconds(20), || {
        let status = claim_status(cluster, "grows");
        let in_progress = status["allocatedResourceStatuses"]["storage"] == "NodeResizeInProgress";
        (in_progress && condition(&status) == Some(json!(format!("failed to expand pvc with {error}")))).then_some(())
    });
    driver.faults(&json!({}));
    wait_grown(cluster, "grows", "2Gi");
    assert_eq!(condition(&claim_status(cluster, "grows")), None);
    // What can never be done is the controller's again, which may then ask for less.
    driver.faults(&json!({"NodeExpandVolume": {"handle": "grows", "code": 11, "message": "too much"}}));
    grow(cluster, "grows", "9Gi");
    wait_until("it is given back", seconds(30), || {
        let status = claim_status(cluster, "grows");
        (status["allocatedResourceStatuses"]["storage"] == "NodeResizeInfeasible").then_some(())
    });
    driver.faults(&json!({}));
    grow(cluster, "grows", "3Gi");
    wait_grown(cluster, "grows", "3Gi");
    assert_eq!(fs::read_to_string(driver.data.join("volumes/grows-handle.size")).unwrap(), (3u64 << 30).to_string());
    // What is used read-only is left as it is.
    grow(cluster, "fixed", "2Gi");
    let text = "MountVolume.NodeExpandVolume failed for volume \"pv-fixed\" requested read-only file system";
    told("fixed", "FileSystemResizeFailed", text);
    assert!(driver.answered("NodeExpandVolume", "fixed-handle").is_empty());
    for name in ["grows", "fixed"] {
        cluster.delete(name);
        cluster.wait_gone(name, seconds(60));
    }
    assert_nothing_left(cluster);
}

pub(crate) fn figures_and_health(cluster: &mut Cluster) {
    cluster.node.configure("featureGates", json!({"CSIVolumeHealth": true}));
    cluster.node.configure("volumeStatsAggPeriod", json!("1s"));
    cluster.node.restart();
    let plain = json!({"attachRequired": false, "volumeLifecycleModes": ["Persistent", "Ephemeral"]});
    let tells = Driver::start(cluster, "tells.csi.test", &plain, &["--capabilities", "stage,stats,condition"]);
    let silent = Driver::start(cluster, "silent.csi.test", &plain, &["--capabilities", "stage"]);
    let hung = Driver::start(cluster, "hung.csi.test", &plain, &[]);
    for driver in [&tells, &silent, &hung] {
        driver.wait_registered(cluster);
    }
    hung.faults(&json!({"NodeGetVolumeStats": {"hang": true}}));
    for (name, driver) in [("told", "tells.csi.test"), ("silent", "silent.csi.test"), ("hung", "hung.csi.test")] {
        claim(cluster, driver, name, &json!({}));
    }
    let mut p = one("measured", "told");
    let claimed = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    p["spec"]["volumes"] = json!([claimed("told"), claimed("silent"), claimed("hung"),
        {"name": "inline", "csi": {"driver": "tells.csi.test"}}]);
    let mount = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    p["spec"]["containers"][0]["volumeMounts"] = json!(["told", "silent", "hung", "inline"].map(mount));
    cluster.run(&p);
    cluster.wait_running("measured");
    let page = |path: &str| {
        let out = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{NODE}/proxy{path}")]);
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let volumes = || -> Vec<Value> {
        let summary: Value = serde_json::from_str(&page("/stats/summary")).unwrap_or_default();
        let pods = summary["pods"].as_array().cloned().unwrap_or_default();
        let pod = pods.into_iter().find(|p| p["podRef"]["name"] == "measured").unwrap_or_default();
        pod["volume"].as_array().cloned().unwrap_or_default()
    };
    let of = |name: &str| volumes().into_iter().find(|v| v["name"] == name);
    let mut told = wait_until("the driver's figures are shown", seconds(30), || of("told"));
    assert!(told["time"].is_string());
    told["time"] = Value::Null;
    assert_eq!(
        told,
        json!({"time": null, "name": "told", "pvcRef": {"name": "told", "namespace": "default"}, "volumeHealthStats": {"abnormal": false},
            "capacityBytes": 1 << 30, "availableBytes": (1 << 30) - (1 << 20), "usedBytes": 1 << 20,
            "inodes": 1000, "inodesFree": 993, "inodesUsed": 7})
    );
    let inline = of("inline").unwrap();
    assert!(inline["pvcRef"].is_null() && inline["usedBytes"] == 1 << 20, "{inline}");
    // One that says that it cannot, and one that does not answer, are left out, and hold up nobody.
    assert!(of("silent").is_none() && of("hung").is_none());
    let asked = hung.calls().iter().filter(|c| c["method"] == "NodeGetVolumeStats>").count();
    assert_eq!(asked, 1, "one question at a time");

    // Something is wrong with it.
    fs::write(tells.data.join("health"), "disk is torn").unwrap();
    let metric = "kubelet_volume_stats_health_status_abnormal{namespace=\"default\",persistentvolumeclaim=\"told\"} ";
    wait_until("it is told", seconds(30), || {
        page("/metrics").lines().any(|l| l.strip_prefix(metric) == Some("1")).then_some(())
    });
    assert_eq!(of("told").unwrap()["volumeHealthStats"], json!({"abnormal": true}));
    wait_until("the pod is told", seconds(20), || {
        let events = cluster.events("measured");
        events.contains(&("VolumeConditionAbnormal".to_owned(), "Volume told: disk is torn".to_owned())).then_some(())
    });
    let used = "kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"told\"} 1048576";
    assert!(page("/metrics").lines().any(|l| l == used));
    let calls = "csi_operations_seconds_count{driver_name=\"tells.csi.test\",grpc_status_code=\"OK\",\
        method_name=\"/csi.v1.Node/NodePublishVolume\",migrated=\"false\"} ";
    assert!(page("/metrics").lines().any(|l| l.starts_with(calls)));

    hung.faults(&json!({}));
    cluster.delete("measured");
    cluster.wait_gone("measured", seconds(60));
    assert_nothing_left(cluster);
    cluster.node.configure("featureGates", json!({}));
    cluster.node.configure("volumeStatsAggPeriod", json!("1m"));
    cluster.node.restart();
}
