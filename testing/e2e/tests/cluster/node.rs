//! The node's object and lease.

use std::fs;

use e2e::cluster::Cluster;
use e2e::{NODE, container, pod, seconds, status, wait_until};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{SLEEP, assert_fixture, is_rubelet};

pub(crate) fn the_object_is_as_the_go_kubelets(cluster: &mut Cluster) {
    let mut node = wait_until("the controller manager has noted its hint on the node", seconds(30), || {
        Some(cluster.get_node()).filter(|n| n["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"] == "0")
    });
    let meta = node["metadata"].as_object_mut().unwrap();
    for field in ["creationTimestamp", "managedFields", "resourceVersion", "uid"] {
        meta.remove(field);
    }
    // What the machine and the stage have is not what is compared: that it is there is.
    for list in ["capacity", "allocatable"] {
        for (name, amount) in node["status"][list].as_object_mut().unwrap() {
            assert!(amount.as_str().is_some_and(|a| a != "0" || name.starts_with("hugepages-")), "{name}: {amount}");
            *amount = json!("AMOUNT");
        }
    }
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].take();
    assert_eq!(port, cluster.node.port("port"));
    for field in ["kernelVersion", "osImage", "containerRuntimeVersion"] {
        let value = node["status"]["nodeInfo"][field].take();
        assert!(value.as_str().is_some_and(|v| !v.is_empty()), "{field}: {value}");
    }
    for image in node["status"]["images"].as_array_mut().unwrap() {
        assert!(image["sizeBytes"].take().as_u64().is_some_and(|s| s > 100_000));
    }
    node["status"]["images"].as_array_mut().unwrap().sort_by_key(|i| i["names"][0].as_str().map(str::to_owned));
    // The scheduler may count on what is declared, so a kubelet declares what it has of the Go kubelet's, and nothing else.
    let declared = node["status"].as_object_mut().unwrap().remove("declaredFeatures").unwrap_or_default();
    let known = [
        "ExtendWebSocketsToKubelet",
        "InPlacePodLevelResourcesVerticalScaling",
        "InPlacePodVerticalScalingInitContainers",
        "RestartAllContainersOnContainerExits",
    ];
    assert!(declared.as_array().into_iter().flatten().all(|f| known.iter().any(|k| f == k)), "{declared}");
    assert_fixture("node", &node);
}

pub(crate) fn the_lease_is_renewed(cluster: &mut Cluster) {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}");
    let lease = wait_until("the lease is there", seconds(10), || cluster.api().find(&path).unwrap());
    assert_eq!(lease["spec"]["holderIdentity"], NODE);
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 8);
    let owner = &lease["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Node"), &cluster.get_node()["metadata"]["uid"]));
    let time = |lease: &Value| lease["spec"]["renewTime"].as_str().unwrap().parse::<Timestamp>().unwrap();
    // A quarter of its duration, give or take.
    let mut renewals = vec![time(&lease)];
    while renewals.len() < 3 {
        renewals.push(wait_until("a renewal", seconds(5), || {
            Some(time(&cluster.api().get(&path).unwrap())).filter(|t| *t > renewals[renewals.len() - 1])
        }));
    }
    let apart = renewals[2].duration_since(renewals[1]).as_secs_f64();
    assert!((1.0..4.5).contains(&apart), "renewed after {apart} s");
}

pub(crate) fn a_restart_keeps_what_others_set(cluster: &mut Cluster) {
    let path = format!("/api/v1/nodes/{NODE}");
    let set = json!({"metadata": {"labels": {"mine": "yes"}, "annotations": {"note": "kept"}}, "spec": {"unschedulable": true}});
    cluster.api().merge(&path, &set).unwrap();
    let before = cluster.get_node();
    cluster.node.restart();
    wait_until("the node's status is written anew", seconds(60), || {
        let beat = |node: &Value| node["status"]["conditions"][0]["lastHeartbeatTime"].as_str().unwrap().to_owned();
        (beat(&cluster.get_node()) > beat(&before)).then_some(())
    });
    let after = cluster.get_node();
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["spec"]["unschedulable"], true);
    assert_eq!(
        (&after["metadata"]["labels"]["mine"], &after["metadata"]["annotations"]["note"]),
        (&json!("yes"), &json!("kept"))
    );
    let back =
        json!({"metadata": {"labels": {"mine": null}, "annotations": {"note": null}}, "spec": {"unschedulable": null}});
    cluster.api().merge(&path, &back).unwrap();
}

pub(crate) fn a_deleted_object_is_made_again(cluster: &mut Cluster) {
    cluster.run(&pod("before", [container("c", SLEEP)]));
    cluster.wait_running("before");
    let before = cluster.get_node();
    cluster.api().delete(&format!("/api/v1/nodes/{NODE}"), &Value::Null).unwrap();
    if !is_rubelet(cluster) {
        // The Go kubelet registers only at its start.
        cluster.node.restart();
    }
    wait_until("the node is registered again", seconds(30), || {
        let node = cluster.api().find(&format!("/api/v1/nodes/{NODE}")).unwrap()?;
        (node["metadata"]["uid"] != before["metadata"]["uid"]).then_some(())
    });
    cluster.wait_ready();
    let after = cluster.get_node();
    assert_eq!(after["metadata"]["labels"], before["metadata"]["labels"]);
    cluster.run(&pod("anew", [container("c", SLEEP)]));
    cluster.wait_running("anew");
    let still = cluster.wait_running("before");
    assert_eq!(status::restarts(&still, "c"), 0);
}

pub(crate) fn a_bootstrap_token_is_enough_to_join(cluster: &mut Cluster) {
    let made = cluster.node.dir().join("bootstrapped.yaml");
    let usual = cluster.node.flags().to_vec();
    cluster.node.kill();
    let mut flags: Vec<String> = usual.iter().filter(|f| !f.starts_with("--kubeconfig=")).cloned().collect();
    flags.push(format!("--kubeconfig={}", made.display()));
    flags.push(format!("--bootstrap-kubeconfig={}", cluster.plane.bootstrap_kubeconfig().display()));
    cluster.node.set_flags(flags);
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}");
    // There is none for a while after the node's object was deleted; that it went is no renewal.
    let renewed = |cluster: &Cluster| {
        let lease = cluster.api().find(&path).unwrap().unwrap_or_default();
        lease["spec"]["renewTime"].as_str().map(str::to_owned)
    };
    let anew = |cluster: &Cluster, before: &Option<String>| renewed(cluster).filter(|now| Some(now) != before.as_ref());
    let before = renewed(cluster);
    cluster.node.run();
    wait_until("the lease is renewed with the new certificate", seconds(60), || {
        made.exists().then(|| anew(cluster, &before)).flatten()
    });
    let text = fs::read_to_string(&made).unwrap();
    assert!(text.contains("kubelet-client-current.pem") && !text.contains("token"), "{text}");
    let requests = cluster.api().list("/apis/certificates.k8s.io/v1/certificatesigningrequests").unwrap();
    let request =
        &requests.iter().find(|r| r["spec"]["signerName"] == "kubernetes.io/kube-apiserver-client-kubelet").unwrap();
    assert_eq!(request["spec"]["username"], "system:bootstrap:abcdef");
    assert_eq!(request["spec"]["usages"], json!(["digital signature", "client auth"]));
    // And a second start needs no token.
    let without = cluster.node.flags().iter().filter(|f| !f.starts_with("--bootstrap-kubeconfig=")).cloned().collect();
    cluster.node.set_flags(without);
    cluster.node.restart();
    let before = renewed(cluster);
    wait_until("the lease is renewed after the restart", seconds(60), || anew(cluster, &before));
    cluster.node.kill();
    cluster.node.set_flags(usual);
    cluster.node.run();
}
