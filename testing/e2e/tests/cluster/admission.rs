//! Which pods the node takes.

use std::time::{Duration, Instant};

use e2e::cluster::Cluster;
use e2e::{NODE, container, pod, seconds, status, wait_until, with};
use model::quantity::Quantity;
use serde_json::{Value, json};

use crate::{SLEEP, is_rubelet};

/// Gives the node a label and waits until its kubelet has seen it.
pub(crate) fn label(cluster: &Cluster, value: &str) {
    let label = json!({"metadata": {"labels": {"place": value}}});
    cluster.api().merge(&format!("/api/v1/nodes/{NODE}"), &label).unwrap();
    wait_until("the kubelet has seen the label", seconds(30), || {
        // A pod that came too early would be rejected for good: another one is made.
        cluster.api().delete("/api/v1/namespaces/default/pods/asks", &json!({"gracePeriodSeconds": 0})).unwrap();
        let mut asks = pod("asks", [container("c", SLEEP)]);
        asks["spec"]["nodeSelector"] = json!({"place": value});
        cluster.run(&asks);
        let settled = cluster
            .wait("it is admitted or not", "asks", |p| status::phase(p) == "Failed" || status::phase(p) == "Running");
        (status::phase(&settled) == "Running").then_some(())
    });
}

pub(crate) fn unlabel(cluster: &Cluster) {
    let label = json!({"metadata": {"labels": {"place": null}}});
    cluster.api().merge(&format!("/api/v1/nodes/{NODE}"), &label).unwrap();
}

fn allocatable_millis(cluster: &Cluster) -> i64 {
    let text = cluster.get_node()["status"]["allocatable"]["cpu"].as_str().unwrap().to_owned();
    Quantity::parse(&text).unwrap().milli_value()
}

/// kubernetes/kubernetes#129463, #134445, #72502, #100467, #109663; the label: #76322, #99708, #124586, #127374.
pub(crate) fn waits_for_the_node_and_then_judges_by_its_labels(cluster: &mut Cluster) {
    label(cluster, "here");
    let here = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "place", "operator": "In", "values": ["here"]}]}]}}});
    let choosy = |name: &str| {
        let mut manifest = pod(name, [container("c", SLEEP)]);
        if name != "affine" {
            manifest["spec"]["nodeSelector"] = json!({"place": "here"});
        }
        if name != "selecting" {
            manifest["spec"]["affinity"] = here.clone();
        }
        cluster.run(&manifest);
    };
    let names = ["selecting", "affine", "choosy"];
    names.iter().for_each(|name| choosy(name));
    let ids = names.map(|name| status::id(&cluster.wait_running(name), "c").to_owned());
    let unharmed = |cluster: &Cluster| {
        for (name, id) in names.iter().zip(&ids) {
            let pod = cluster.pod(name).unwrap();
            assert_eq!((status::phase(&pod), status::id(&pod, "c")), ("Running", id.as_str()), "{:#}", pod["status"]);
            assert_eq!(status::restarts(&pod, "c"), 0);
        }
    };
    cluster.node.restart();
    cluster.wait_ready();
    unharmed(cluster);

    // The pods are told at once, the node is not.
    cluster.node.kill();
    let gate = cluster.plane.gate(NODE).unwrap();
    gate.hold(Some("/api/v1/nodes"));
    let usual = cluster.node.flags().to_vec();
    let by_gate = cluster.plane.node_kubeconfig_by(NODE, gate.address()).unwrap();
    let mut flags: Vec<String> = usual.iter().filter(|f| !f.starts_with("--kubeconfig=")).cloned().collect();
    flags.push(format!("--kubeconfig={}", by_gate.display()));
    cluster.node.set_flags(flags);
    cluster.node.run();
    wait_until("the kubelet asks for its node", seconds(20), || (gate.held() > 0).then_some(()));
    let mut late = pod("late", [container("c", SLEEP)]);
    late["spec"]["nodeSelector"] = json!({"place": "here"});
    cluster.run(&late);
    std::thread::sleep(seconds(6));
    unharmed(cluster);
    assert_eq!(status::phase(&cluster.pod("late").unwrap()), "Pending", "judged without the node");
    gate.hold(None);
    cluster.wait_running("late");
    unharmed(cluster);

    // What runs stays while the kubelet does; the next one judges anew.
    unlabel(cluster);
    std::thread::sleep(seconds(3));
    unharmed(cluster);
    cluster.node.kill();
    cluster.node.set_flags(usual);
    cluster.node.run();
    for name in names {
        let ended = |p: &Value| ["Failed", "Succeeded"].contains(&status::phase(p));
        let ended = cluster.wait("it does not belong here any more", name, ended);
        // The Go kubelet may take the end of the containers that it kills for the pod's own.
        if is_rubelet(cluster) || status::phase(&ended) == "Failed" {
            assert_eq!(ended["status"]["reason"], "NodeAffinity", "{:#}", ended["status"]);
        }
    }
}

/// kubernetes/kubernetes#104560, #106884, #108366, #104817.
pub(crate) fn counts_nothing_that_has_ended(cluster: &mut Cluster) {
    let request = json!({"resources": {"requests": {"cpu": format!("{}m", allocatable_millis(cluster) * 7 / 10)}}});
    for round in 0..8 {
        let name = format!("quick-{round}");
        let script = if round % 2 == 0 { "sleep .2" } else { "sleep .2; exit 1" };
        let mut manifest = pod(&name, [with(container("c", script), request.clone())]);
        manifest["spec"]["restartPolicy"] = json!("Never");
        cluster.run(&manifest);
        let start = Instant::now();
        // The very moment at which the API says so counts.
        let ended = loop {
            let pod = cluster.pod(&name).unwrap();
            if ["Succeeded", "Failed"].contains(&status::phase(&pod)) {
                break pod;
            }
            assert!(start.elapsed() < seconds(60), "{:#}", pod["status"]);
        };
        assert_eq!(ended["status"]["reason"], Value::Null, "round {round}: {:#}", ended["status"]);
    }

    let mut manifest = pod("ended", [container("c", "true")]);
    manifest["spec"]["restartPolicy"] = json!("Never");
    cluster.node.kill();
    cluster.node.configure("maxPods", json!(4));
    cluster.node.run();
    for n in 0..4 {
        manifest["metadata"]["name"] = json!(format!("ended-{n}"));
        cluster.run(&manifest);
        cluster.wait("it has ended", &format!("ended-{n}"), |p| status::phase(p) == "Succeeded");
    }
    for n in 0..4 {
        cluster.run(&pod(&format!("runs-{n}"), [container("c", SLEEP)]));
    }
    for n in 0..4 {
        cluster.wait_running(&format!("runs-{n}"));
    }
    cluster.run(&pod("one-too-many", [container("c", SLEEP)]));
    let rejected = cluster.wait("there is no room", "one-too-many", |p| status::phase(p) == "Failed");
    assert_eq!(rejected["status"]["reason"], "OutOfpods");
    cluster.node.kill();
    cluster.node.configure("maxPods", json!(110));
    cluster.node.run();
}

/// kubernetes/kubernetes#104560; host ports: #4623, #60726.
pub(crate) fn gives_what_is_refused_to_the_next(cluster: &mut Cluster) {
    let cpu = |millis: i64| json!({"resources": {"requests": {"cpu": format!("{millis}m")}}});
    let all = allocatable_millis(cluster);
    cluster.run(&pod("too-big", [with(container("c", SLEEP), cpu(all + 1000))]));
    cluster.run(&pod("just-fits", [with(container("c", SLEEP), cpu(all * 9 / 10))]));
    let port = |name: &str, fields: Value| {
        let port = with(json!({"containerPort": 80, "hostPort": 18082}), fields);
        cluster.run(&pod(name, [with(container("c", SLEEP), json!({"ports": [port]}))]));
    };
    port("port-first", json!({"hostIP": "127.0.0.1"}));
    cluster.wait_running("port-first");
    port("port-same", json!({"hostIP": "127.0.0.1"}));
    port("port-any", json!({}));
    port("port-udp", json!({"protocol": "UDP"}));
    port("port-elsewhere", json!({"hostIP": "127.0.0.2"}));
    let rejected = cluster.wait("it does not fit", "too-big", |p| status::phase(p) == "Failed");
    assert_eq!(rejected["status"]["reason"], "OutOfcpu");
    cluster.wait_running("just-fits");
    for name in ["port-same", "port-any"] {
        let rejected = cluster.wait("its port is taken", name, |p| status::phase(p) == "Failed");
        assert_eq!(rejected["status"]["reason"], "NodePorts");
        let message = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
        let told = ("NodePorts".to_owned(), message.to_owned());
        wait_until("the rejection is told", seconds(10), || cluster.events(name).contains(&told).then_some(()));
        let uid = status::uid(&rejected);
        assert!(cluster.node.sandboxes().iter().all(|s| s.metadata.as_ref().is_none_or(|m| m.uid != uid)));
    }
    cluster.wait_running("port-udp");
    cluster.wait_running("port-elsewhere");
    cluster.delete("port-first");
    cluster.wait_gone("port-first", seconds(20));
    port("port-next", json!({"hostIP": "127.0.0.1"}));
    cluster.wait_running("port-next");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(status::phase(&cluster.pod("port-same").unwrap()), "Failed", "a rejection is final");
}
