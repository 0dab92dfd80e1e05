//! What comes after what: init containers before the apps, again in a new sandbox and only then (A14); apps before sidecars at the end (A13).
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use cri::RuntimeMutator;
use cri_api::v1::ContainerState;
use e2e::status::{condition, id, phase, restarts, runs, uid};
use e2e::{Node, Share, container, pod, seconds, sidecar, wait_until, with};
use serde_json::{Value, json};

const HOLD: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// Notes when SIGTERM comes, and takes so long to end.
fn noting(name: &str, takes: &str) -> String {
    format!(
        "trap 'echo term {name} >> /share/end; sleep {takes}; echo gone {name} >> /share/end; exit 7' TERM; echo up {name} >> /share/begin; sleep 1000000 & wait"
    )
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn init_containers_run_again_with_a_new_sandbox_only() {
    let mut node = Node::start();
    let share = Share::new(&node);
    let noted = |name: &str| {
        container(name, &format!("echo {name} begins >> /share/seen; sleep 1; echo {name} ends >> /share/seen"))
    };
    let mut manifest = pod("ordered", [container("c", &format!("echo app >> /share/seen; {HOLD}"))]);
    manifest["spec"]["initContainers"] = json!([noted("i1"), sidecar("s", HOLD), noted("i2")]);
    node.write("ordered.yaml", &share.mounted(manifest));
    let first = node.wait_running("ordered");
    let once = ["i1 begins", "i1 ends", "i2 begins", "i2 ends", "app"];
    wait_until("the app has begun", seconds(20), || (share.lines("seen").len() >= once.len()).then_some(()));
    assert_eq!(share.lines("seen"), once);

    // The ended ones are taken away in the runtime: nothing runs again, also under a new agent.
    let removed: Vec<_> = node
        .containers()
        .into_iter()
        .filter(|c| c.state() == ContainerState::ContainerExited)
        .filter(|c| c.labels.get("io.kubernetes.pod.uid").is_some_and(|u| *u == uid(&first)))
        .collect();
    assert_eq!(removed.len(), 2, "both init containers are there, ended");
    for c in &removed {
        node.ask(node.cri().remove_container(&c.id));
    }
    node.restart();
    std::thread::sleep(seconds(4));
    let still = node.wait_running("ordered");
    assert_eq!((id(&still, "c"), restarts(&still, "c")), (id(&first, "c"), 0));
    assert_eq!((phase(&still), condition(&still, "Initialized")), ("Running", "True"));
    assert_eq!(share.lines("seen"), once);

    // The sandbox is stopped: all of them once more, in order, and the app only then.
    let sandbox =
        node.sandboxes().into_iter().find(|s| s.metadata.as_ref().is_some_and(|m| m.uid == uid(&first))).unwrap();
    node.ask(node.cri().stop_pod_sandbox(&sandbox.id));
    let meanwhile = node.wait_pod("it begins anew", "ordered", |p| phase(p) == "Pending");
    assert_eq!(condition(&meanwhile, "Initialized"), "False");
    let again = node.wait_pod("it runs anew", "ordered", |p| runs(p, "c") && id(p, "c") != id(&first, "c"));
    assert_ne!(again["status"]["podIP"], Value::Null);
    assert!(restarts(&again, "c") >= 1);
    // The runtime ends containers before it calls their sandbox stopped: the app may have begun once more in between.
    let anew = || {
        let seen = share.lines("seen").split_off(once.len());
        let early = usize::from(seen.first().is_some_and(|line| line == "app"));
        seen[early..].to_vec()
    };
    wait_until("the app has begun again", seconds(20), || (anew().len() >= once.len()).then_some(()));
    assert_eq!(anew(), once);
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn sidecars_end_after_the_apps_the_last_one_first() {
    let node = Node::start();
    let share = Share::new(&node);
    let hook = json!({"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo hook s1 >> /share/end"]}}}});
    let mut manifest = pod("sides", [container("a", &noting("a", "2")), container("b", &noting("b", "1"))]);
    manifest["spec"]["initContainers"] =
        json!([with(sidecar("s1", &noting("s1", ".5")), hook), sidecar("s2", &noting("s2", ".5"))]);
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(30);
    node.write("sides.yaml", &share.mounted(manifest));

    // Out of time: the app is deaf, the sidecars too.
    let deaf = "trap '' TERM; while :; do sleep 1; done";
    let mut late = pod("late", [container("c", deaf)]);
    late["spec"]["initContainers"] = json!([sidecar("s1", deaf), sidecar("s2", deaf)]);
    late["spec"]["terminationGracePeriodSeconds"] = json!(5);
    node.write("late.yaml", &late);

    // Not yet begun: its sidecar fails its startup probe for ever, and ends gracefully.
    let probe = json!({"startupProbe": {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1000}});
    let mut early = pod("early", [container("c", HOLD)]);
    early["spec"]["initContainers"] =
        json!([with(sidecar("s", &noting("early", ".5").replace("/share/end", "/share/early")), probe)]);
    early["spec"]["terminationGracePeriodSeconds"] = json!(30);
    node.write("early.yaml", &share.mounted(early));

    let uids = ["sides", "late"].map(|name| uid(&node.wait_running(name)));
    wait_until("all scripts have begun", seconds(20), || (share.lines("begin").len() == 5).then_some(()));
    let waits = uid(&node.pod("early").unwrap());
    let began = Instant::now();
    for name in ["sides", "late", "early"] {
        node.remove(&format!("{name}.yaml"));
    }
    node.wait_gone(&uids[1], seconds(20));
    // Its grace, and the least that each of the others is given.
    assert!(began.elapsed() < seconds(5 + 10), "{:?}", began.elapsed());
    node.wait_gone(&uids[0], seconds(30));
    node.wait_gone(&waits, seconds(30));
    let end = share.lines("end");
    let at = |line: &str| end.iter().position(|l| l == line).unwrap_or_else(|| panic!("no {line:?} in {end:#?}"));
    let apps = [at("gone a"), at("gone b")].into_iter().max().unwrap();
    assert!(at("term a").max(at("term b")) < at("gone a").min(at("gone b")), "both at once: {end:#?}");
    assert!(at("hook s1") < apps, "the hook begins with the end of the pod: {end:#?}");
    assert!(apps < at("term s2") && at("gone s2") < at("term s1") && at("term s1") < at("gone s1"), "{end:#?}");
    assert_eq!(share.lines("early"), ["term early", "gone early"]);
}
