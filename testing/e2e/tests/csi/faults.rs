//! What pods are told when a volume cannot be had, and that others do not feel it.

use std::time::{Duration, Instant};

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::driver::{Driver, attach, claim};
use crate::volumes::{SLEEP, assert_nothing_left};

/// A pod with one claim.
pub(crate) fn one(name: &str, claim: &str) -> Value {
    let main = with(container("c", SLEEP), json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}));
    let mut p = pod(name, [main]);
    p["spec"]["terminationGracePeriodSeconds"] = json!(1);
    p["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]);
    p
}

pub(crate) fn faults_are_told(cluster: &mut Cluster) {
    let persistent = json!({"attachRequired": false});
    let driver = Driver::start(cluster, "faulty.csi.test", &persistent, &[]);
    let mut late = Driver::start(cluster, "late.csi.test", &persistent, &[]);
    driver.wait_registered(cluster);
    late.wait_registered(cluster);
    late.uninstall();
    let told = |name: &str, message: &str| {
        wait_until(&format!("{name} is told: {message}"), seconds(30), || {
            let events = cluster.events(name);
            events.iter().any(|(r, m)| r == "FailedMount" && m == message).then_some(())
        });
    };
    for name in ["publish", "stage", "late", "twice", "far", "lost"] {
        let from = if name == "late" { "late.csi.test" } else { "faulty.csi.test" };
        let more = match name {
            "twice" => json!({"accessModes": ["ReadWriteOncePod"]}),
            "far" => json!({"nodeAffinity": {"required": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["x"]}]}]}}}),
            _ => json!({}),
        };
        claim(cluster, from, name, &more);
    }
    driver.faults(&json!({"NodePublishVolume": {"handle": "publish", "code": 13, "message": "boom"},
        "NodeStageVolume": {"handle": "stage", "code": 13, "message": "bang"}}));
    for name in ["publish", "stage", "late", "far", "twice"] {
        cluster.run(&one(name, name));
    }
    let mut inline = one("inline", "");
    inline["spec"]["volumes"] = json!([{"name": "v", "csi": {"driver": "faulty.csi.test"}}]);
    cluster.run(&inline);
    told("publish", "MountVolume.SetUp failed for volume \"pv-publish\" : rpc error: code = Internal desc = boom");
    told("stage", "MountVolume.MountDevice failed for volume \"pv-stage\" : rpc error: code = Internal desc = bang");
    told(
        "late",
        "MountVolume.MountDevice failed for volume \"pv-late\" : kubernetes.io/csi: attacher.MountDevice failed to create \
         newCsiDriverClient: driver name late.csi.test not found in the list of registered CSI drivers",
    );
    told("far", "MountVolume.NodeAffinity check failed for volume \"pv-far\" : no matching NodeSelectorTerms");
    told(
        "inline",
        "MountVolume.SetUp failed for volume \"v\" : kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: \
         volume mode \"Ephemeral\" not supported by driver faulty.csi.test (only supports [\"Persistent\"])",
    );
    cluster.wait_running("twice");
    cluster.run(&one("second", "twice"));
    told(
        "second",
        "MountVolume.SetUp failed for volume \"pv-twice\" : volume uses the ReadWriteOncePod access mode and is already in use by \
         another pod",
    );
    // What held them up ends, and they start: the driver does its work, comes, and the first pod goes.
    driver.faults(&json!({"NodePublishVolume": {"handle": "lost", "lose": 14, "message": "gone"}}));
    late.run();
    cluster.delete("twice");
    for name in ["publish", "stage", "late", "second"] {
        cluster.wait_running(name);
    }
    // An answer that was lost: it was done all the same, and is done again.
    cluster.run(&one("lost", "lost"));
    told("lost", "MountVolume.SetUp failed for volume \"pv-lost\" : rpc error: code = Unavailable desc = gone");
    driver.faults(&json!({}));
    cluster.wait_running("lost");
    for name in ["publish", "stage", "late", "far", "inline", "second", "lost"] {
        cluster.delete(name);
    }
    for name in ["publish", "stage", "late", "far", "inline", "second", "lost", "twice"] {
        cluster.wait_gone(name, seconds(60));
    }
    assert_nothing_left(cluster);
}

/// How long pods take from their making to running, one after the other; the median.
fn median(cluster: &Cluster, prefix: &str, count: usize) -> Duration {
    let mut all: Vec<Duration> = (0..count)
        .map(|n| {
            let name = format!("{prefix}-{n}");
            let mut p = pod(&name, [container("c", SLEEP)]);
            p["spec"]["terminationGracePeriodSeconds"] = json!(1);
            let begun = Instant::now();
            cluster.run(&p);
            cluster.wait_running(&name);
            let took = begun.elapsed();
            cluster.delete(&name);
            took
        })
        .collect();
    all.sort();
    all[count / 2]
}

pub(crate) fn a_driver_that_hangs(cluster: &mut Cluster) {
    let driver = Driver::start(cluster, "hung.csi.test", &json!({"attachRequired": false}), &[]);
    driver.wait_registered(cluster);
    let without = median(cluster, "before", 20);
    driver.faults(&json!({"NodePublishVolume": {"hang": true}}));
    for n in 0..5 {
        claim(cluster, "hung.csi.test", &format!("hung-{n}"), &json!({}));
        cluster.run(&one(&format!("hung-{n}"), &format!("hung-{n}")));
    }
    wait_until("the driver is asked", seconds(30), || {
        let asked = driver.calls().iter().filter(|c| c["method"] == "NodePublishVolume>").count();
        (asked >= 5).then_some(())
    });
    let with = median(cluster, "beside", 20);
    println!(
        "median start of 20 pods: {} ms without, {} ms beside a driver that hangs",
        without.as_millis(),
        with.as_millis()
    );
    assert!(with < without * 3 / 2 + Duration::from_millis(300), "{with:?} instead of {without:?}");
    // The pod's time line says what it waits for (rubelet explain).
    let reports = cluster.node.reports();
    if !reports.is_empty() {
        let text = serde_json::to_string(&reports).unwrap();
        assert!(text.contains("driver hung.csi.test has not answered NodePublishVolume yet"), "{text}");
    }
    // A pod that is deleted meanwhile ends as soon as the driver answers.
    for n in 0..5 {
        cluster.delete(&format!("hung-{n}"));
    }
    let mut driver = driver;
    driver.faults(&json!({}));
    driver.run();
    for n in 0..5 {
        cluster.wait_gone(&format!("hung-{n}"), seconds(90));
    }
    assert_nothing_left(cluster);
    attach(cluster);
}
