//! The tasks together, on a paused clock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cluster::error::ErrorKind;
use decide::node::Pressures;
use fakes::{Fault, Rule};
use model::api::{NodeSpec, NodeStatus};
use serde_json::{Value, json};

use crate::testing::{Rig, error, node};

const AT_ONCE: Duration = Duration::ZERO;

fn count(requests: &[String], what: &str) -> usize {
    requests.iter().filter(|r| r.as_str() == what).count()
}

#[tokio::test(start_paused = true)]
async fn a_new_node_costs_few_requests_and_little_when_idle() {
    let rig = Rig::new();
    let mut handles = rig.start();
    let known = handles.node.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert_eq!(known.metadata.name.as_deref(), Some("n1"));
    rig.pass(60).await;
    let requests = rig.api.take();
    // The Go kubelet needs 18: a watch, 6 GETs of the node, POST, 2 PATCHes; 2 GETs, POST and 5 PUTs of the lease
    // (testdata/requests-first-minute.txt of decide::node).
    assert_eq!(&requests[..4], ["watch node", "get lease", "create node", "create lease"], "{requests:?}");
    assert!(requests[4..].iter().all(|r| r == "update lease"), "{requests:?}");
    assert!((5..=6).contains(&count(&requests, "update lease")), "{requests:?}");
    assert_eq!(
        rig.told.take(),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]
    );
    assert_eq!(rig.conditions(), ["MemoryPressure=False", "DiskPressure=False", "PIDPressure=False", "Ready=True"]);

    // Heartbeats go into the status once in about 5 minutes.
    rig.pass(3600).await;
    let requests = rig.api.take();
    let patches = count(&requests, "patch status");
    assert!((11..=13).contains(&patches), "{patches}");
    let renewals = count(&requests, "update lease");
    assert!((346..=360).contains(&renewals), "{renewals}");
    assert_eq!(requests.len(), patches + renewals);
    assert!(rig.told.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_runtime_is_waited_for_a_little_before_the_node_is_called_not_ready() {
    let rig = Rig::new();
    let good = rig.health.send_replace(Default::default());
    rig.start();
    rig.pass(3).await;
    assert!(rig.api.node().is_none());
    rig.health.send_replace(good);
    rig.pass(1).await;
    assert!(rig.conditions().contains(&"Ready=True".to_owned()));

    // But not for long.
    let rig = Rig::new();
    let mut bad = rig.health.borrow().clone();
    bad.last_status = None;
    bad.conditions = None;
    bad.error = Some("no".into());
    rig.health.send_replace(bad);
    rig.start();
    rig.pass(6).await;
    let (message, _) = rig.condition("Ready");
    assert_eq!(message, "[container runtime status check may not have completed yet, network state unknown]");
}

#[tokio::test(start_paused = true)]
async fn registration_goes_on_until_it_succeeds() {
    let rig = Rig::new();
    rig.api.fail(6, "create node", &error(ErrorKind::Unreachable, 0, ""), AT_ONCE);
    rig.start();
    // 200 + 400 + 800 + 1600 + 3200 + 6400 ms.
    rig.pass(12).await;
    assert_eq!(count(&rig.api.take(), "create node"), 6);
    rig.pass(1).await;
    assert_eq!(count(&rig.api.take(), "create node"), 1);
    assert!(rig.api.node().is_some());
    let told = rig.told.take();
    assert_eq!(told.iter().filter(|r| **r == "NodeHasSufficientMemory").count(), 1, "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn an_existing_node_is_put_right_with_one_patch_each() {
    let rig = Rig::new();
    let mut theirs = node("n1", "", "");
    theirs.metadata.labels = Some([("kubernetes.io/os".to_owned(), "foo".to_owned())].into());
    theirs.spec = Some(NodeSpec { unschedulable: Some(true), ..NodeSpec::default() });
    rig.api.make(theirs);
    rig.start();
    rig.pass(5).await;
    let patches: Vec<Value> =
        rig.api.take_full().into_iter().filter(|(r, _)| r == "patch status").map(|(_, body)| body).collect();
    assert_eq!(patches.len(), 2, "{patches:#?}");
    assert_eq!(patches[0]["metadata"]["labels"]["kubernetes.io/os"], "linux");
    assert_eq!(patches[0]["metadata"]["annotations"].as_object().unwrap().len(), 1);
    assert!(patches[1].get("metadata").is_none(), "{}", patches[1]);
    assert_eq!(rig.api.node().unwrap().spec.unwrap().unschedulable, Some(true));
    let told = rig.told.take();
    assert!(told.contains(&"NodeNotSchedulable"), "{told:?}");

    rig.api.edit(|n| n.spec.as_mut().unwrap().unschedulable = None);
    rig.pass(1).await;
    assert_eq!(rig.told.take(), ["NodeSchedulable"]);
    assert_eq!(count(&rig.api.take(), "patch status"), 0);
}

#[tokio::test(start_paused = true)]
async fn without_a_watch_the_object_is_found_by_asking() {
    let rig = Rig::new();
    rig.api.make(node("n1", "", ""));
    rig.api.fail(99, "watch node", &error(ErrorKind::Forbidden, 403, "Forbidden"), AT_ONCE);
    let handles = rig.start();
    rig.pass(5).await;
    assert!(rig.conditions().contains(&"Ready=True".to_owned()));
    assert!(handles.node.borrow().is_some());
    let requests = rig.api.take();
    assert_eq!((count(&requests, "create node"), count(&requests, "get node")), (1, 1), "{requests:?}");
    // Its end is found out by the next write, here because of a change.
    rig.api.delete_node();
    rig.pressures.send_modify(|p| p.pid = true);
    rig.pass(5).await;
    assert!(rig.conditions().contains(&"PIDPressure=True".to_owned()));
    assert!(handles.node.borrow().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_deleted_node_comes_back_and_its_lease_gets_the_new_owner() {
    let rig = Rig::new();
    let handles = rig.start();
    rig.pass(5).await;
    let first = rig.api.node().unwrap().metadata.uid;
    rig.api.take();
    rig.api.delete_node();
    rig.pass(2).await;
    let second = rig.api.node().unwrap().metadata.uid;
    assert_ne!(first, second);
    assert_eq!(handles.node.borrow().as_ref().unwrap().metadata.uid, second);
    let requests = rig.api.take();
    assert_eq!((count(&requests, "create node"), count(&requests, "patch status")), (1, 0), "{requests:?}");
    rig.pass(11).await;
    assert_eq!(Some(rig.api.lease().unwrap().metadata.owner_references.unwrap()[0].uid.clone()), second);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_somebody_else_makes_is_waited_for_without_requests() {
    let mut rig = Rig::new();
    rig.config.register = false;
    let handles = rig.start();
    rig.pass(60).await;
    assert_eq!(rig.api.take(), ["watch node", "get lease"]);
    assert!(handles.node.borrow().is_none());
    rig.api.make(node("n1", "", ""));
    rig.pass(2).await;
    let requests = rig.api.take();
    assert_eq!(requests, ["create lease", "patch status"], "{requests:?}");
    let node = rig.api.node().unwrap();
    assert!(node.metadata.labels.is_none(), "labels are the maker's");
    assert!(rig.conditions().contains(&"Ready=True".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn readiness_is_told_at_once_and_other_reasons_with_the_next_tick() {
    let rig = Rig::new();
    rig.start();
    rig.pass(20).await;
    rig.api.take();
    rig.told.take();
    rig.health.send_modify(|h| {
        h.error = Some("gone".into());
        let network = &mut h.conditions.as_mut().unwrap()[1];
        (network.status, network.reason) = (false, "NetworkPluginNotReady".into());
    });
    rig.pass(1).await;
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
    assert_eq!(rig.told.take(), ["NodeNotReady"]);
    let network = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:";
    assert_eq!(rig.condition("Ready").0, network);
    // Time alone makes the runtime count as down; PLEG has 3 minutes.
    rig.pass(45).await;
    assert_eq!(rig.condition("Ready").0, format!("[container runtime is down, {network}]"));
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
    rig.health.send_modify(|h| {
        h.error = None;
        h.conditions.as_mut().unwrap()[1].status = true;
        (h.last_pass, h.last_status) = (Some(rig.clock.now()), Some(rig.clock.now()));
    });
    rig.pass(1).await;
    assert_eq!(rig.told.take(), ["NodeReady"]);
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
}

#[tokio::test(start_paused = true)]
async fn changes_that_come_together_are_one_patch() {
    let rig = Rig::new();
    let mut handles = rig.start();
    rig.pass(15).await;
    rig.api.take();
    rig.told.take();
    rig.pressures.send_replace(Pressures { disk: true, ..Pressures::default() });
    rig.not_ready.send_replace(vec!["node is shutting down".into()]);
    let volumes = Arc::new(vec!["kubernetes.io/csi/d^1".to_owned()]);
    rig.volumes.send_replace(volumes.clone());
    let reported = handles.volumes_reported.wait_for(|v| !v.is_empty()).await.unwrap().clone();
    assert_eq!(reported, volumes);
    rig.pass(15).await;
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
    assert_eq!(rig.told.take(), ["NodeHasDiskPressure", "NodeNotReady"]);
    assert_eq!(rig.condition("Ready").0, "node is shutting down");

    rig.machine.send_modify(|m| {
        let mut machine = (**m).clone();
        machine.host.boot_id = "boot-2".into();
        *m = Arc::new(machine);
    });
    rig.pass(1).await;
    assert_eq!(rig.told.take(), ["Rebooted"]);
}

#[tokio::test(start_paused = true)]
async fn images_are_listed_when_they_change() {
    let rig = Rig::new();
    rig.start();
    rig.pass(60).await;
    rig.api.take();
    let listed = |rig: &Rig| rig.runtime.calls_of("ListImages").len();
    assert_eq!(listed(&rig), 1);
    rig.runtime.add_image("registry.test/app:1");
    rig.images_changed.send_replace(1);
    rig.images_changed.send_replace(2);
    rig.pass(11).await;
    assert_eq!(listed(&rig), 2);
    let images = rig.api.node().unwrap().status.unwrap().images.unwrap();
    assert!(images.iter().any(|i| i.names.iter().flatten().any(|n| n == "registry.test/app:1")), "{images:?}");
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
    // Not more often than twice a minute.
    rig.images_changed.send_replace(3);
    rig.pass(5).await;
    assert_eq!(listed(&rig), 2);
    rig.pass(30).await;
    assert_eq!(listed(&rig), 3);
    // Nothing else changed, so nothing is written.
    assert_eq!(count(&rig.api.take(), "patch status"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_is_back_is_asked_what_it_is_now() {
    let rig = Rig::new();
    rig.runtime.inject(Rule::new("Version", Fault::Fail(14, "away".into())));
    rig.start();
    rig.pass(6).await;
    let info = |rig: &Rig| rig.api.node().unwrap().status.unwrap().node_info.unwrap();
    assert_eq!(info(&rig).container_runtime_version, "");
    rig.runtime.heal();
    rig.health.send_modify(|h| h.error = Some("down".into()));
    rig.pass(1).await;
    rig.health.send_modify(|h| h.error = None);
    rig.pass(11).await;
    assert!(info(&rig).container_runtime_version.contains("://"), "{:?}", info(&rig));

    let asked = |rig: &Rig| rig.runtime.calls_of("Version").len();
    let before = asked(&rig);
    rig.pass(60).await;
    assert_eq!(asked(&rig), before, "once in five minutes, otherwise");
    rig.health.send_modify(|h| h.error = Some("down".into()));
    rig.pass(1).await;
    rig.health.send_modify(|h| h.error = None);
    rig.pass(1).await;
    assert_eq!(asked(&rig), before + 1);
}

#[tokio::test(start_paused = true)]
async fn lost_addresses_stay_in_the_status() {
    let rig = Rig::new();
    rig.start();
    rig.pass(5).await;
    let addresses = |rig: &Rig| rig.api.node().unwrap().status.unwrap().addresses.unwrap().len();
    assert_eq!(addresses(&rig), 2);
    *rig.addresses.lock().unwrap() = Err("no default routes".into());
    rig.pass(120).await;
    assert_eq!(addresses(&rig), 2);
    *rig.addresses.lock().unwrap() = Ok(decide::node::NodeAddresses {
        ips: vec!["192.0.2.3".parse().unwrap(), "fd00::3".parse().unwrap()],
        hostname: "n1".into(),
    });
    rig.pass(30).await;
    assert_eq!(addresses(&rig), 3);
}

#[tokio::test(start_paused = true)]
async fn a_status_that_cannot_be_written_is_tried_again_with_the_newest_object() {
    let rig = Rig::new();
    rig.start();
    rig.pass(15).await;
    rig.api.take();
    rig.told.take();
    // A server that hiccups: at once.
    rig.api.fail(2, "patch status", &error(ErrorKind::Server, 500, "InternalError"), AT_ONCE);
    rig.pressures.send_replace(Pressures { pid: true, ..Pressures::default() });
    rig.pass(2).await;
    let requests: Vec<String> = rig.api.take().into_iter().filter(|r| r != "update lease").collect();
    assert_eq!(requests, ["patch status", "get node", "patch status", "get node", "patch status"]);
    assert_eq!(rig.told.take(), ["NodeHasInsufficientPID"], "told once, when it is written");

    // One that is not there: once a tick.
    rig.api.fail(99, "patch status", &error(ErrorKind::Unreachable, 0, ""), AT_ONCE);
    rig.pressures.send_replace(Pressures::default());
    rig.pass(40).await;
    let tries = count(&rig.api.take(), "patch status");
    assert!((3..=5).contains(&tries), "{tries}");
    assert!(rig.told.take().is_empty());
    assert_eq!(rig.api.cuts.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_dead_path_is_cut() {
    let rig = Rig::new();
    rig.start();
    rig.pass(15).await;
    rig.api.take();
    let silence = error(ErrorKind::Timeout, 0, "");
    rig.api.fail(2, "update lease", &silence, Duration::from_secs(10));
    let before = rig.api.lease().unwrap().spec.unwrap().renew_time.unwrap();
    rig.pass(31).await;
    assert_eq!(rig.api.cuts.load(Ordering::Relaxed), 1, "after the second silence");
    let after = rig.api.lease().unwrap().spec.unwrap().renew_time.unwrap();
    // Renewed in time all the same.
    let gap = after.0.duration_since(before.0).as_secs();
    assert!((20..40).contains(&gap), "{gap}");
    let requests = rig.api.take();
    assert_eq!(count(&requests, "get lease"), 0, "{requests:?}");

    for (silences, cuts) in [(1, 0), (2, 1)] {
        rig.api.cuts.store(0, Ordering::Relaxed);
        rig.api.fail(silences, "patch status", &silence, Duration::from_secs(10));
        rig.pressures.send_modify(|p| p.disk = !p.disk);
        rig.pass(25).await;
        assert_eq!(rig.api.cuts.load(Ordering::Relaxed), cuts);
        assert!(rig.conditions().contains(&format!("DiskPressure={}", if silences == 1 { "True" } else { "False" })));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_others_touch_or_remove() {
    let rig = Rig::new();
    rig.start();
    rig.pass(5).await;
    let lease = rig.api.lease().unwrap();
    let spec = lease.spec.clone().unwrap();
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_duration_seconds), (Some("n1"), Some(40)));
    let owner = &lease.metadata.owner_references.unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.name.as_str(), owner.controller), ("Node", "n1", None));
    rig.api.take();

    rig.api.edit_lease(|l| l.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into()));
    rig.pass(11).await;
    let requests = rig.api.take();
    assert_eq!(requests, ["update lease", "get lease", "update lease"]);
    assert_eq!(rig.api.lease().unwrap().metadata.labels.unwrap()["a"], "b");

    rig.api.delete_lease();
    rig.pass(11).await;
    let requests = rig.api.take();
    assert_eq!(requests, ["update lease", "get lease", "get lease", "create lease"]);

    // A server that is away: backed off to 7 s.
    let away = error(ErrorKind::Unreachable, 0, "");
    rig.api.fail(1000, "lease", &away, AT_ONCE);
    rig.pass(600).await;
    let requests = rig.api.take();
    assert!(requests.len() < 100, "{}", requests.len());
}

#[tokio::test(start_paused = true)]
async fn patches_are_what_go_sends() {
    let rig = Rig::new();
    rig.start();
    rig.pass(15).await;
    rig.api.take();
    let reason = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady \
                  message:Network plugin returns error: cni plugin not initialized";
    rig.health.send_modify(|h| {
        let network = &mut h.conditions.as_mut().unwrap()[1];
        (network.status, network.reason) = (false, "NetworkPluginNotReady".into());
        network.message = "Network plugin returns error: cni plugin not initialized".into();
    });
    rig.pass(1).await;
    let mut go: Value =
        serde_json::from_str(include_str!("../../decide/src/node/testdata/netdown-patch.json")).unwrap();
    let (_, mut ours) = rig.api.take_full().into_iter().find(|(r, _)| r == "patch status").unwrap();
    assert_eq!(ours["status"]["conditions"][3]["message"], reason);
    for patch in [&mut go, &mut ours] {
        for c in patch["status"]["conditions"].as_array_mut().unwrap() {
            for time in ["lastHeartbeatTime", "lastTransitionTime"] {
                if let Some(value) = c.get_mut(time) {
                    *value = json!("T");
                }
            }
        }
        // The Go kubelet's node had a condition of somebody else.
        let order = patch["status"]["$setElementOrder/conditions"].as_array_mut().unwrap();
        order.retain(|c| c["type"] != "Foreign");
    }
    assert_eq!(ours, go);
}

#[tokio::test(start_paused = true)]
async fn a_node_emptied_by_somebody_is_filled_again() {
    let rig = Rig::new();
    rig.start();
    rig.pass(15).await;
    rig.api.take();
    rig.api.edit(|n| n.status = Some(NodeStatus::default()));
    rig.pass(12).await;
    assert!(rig.conditions().contains(&"Ready=True".to_owned()));
    assert_eq!(count(&rig.api.take(), "patch status"), 1);
}
