//! The API server or the kubelet is away for a while.

use e2e::cluster::Cluster;
use e2e::{NODE, Share, container, pod, seconds, share, status, wait_until};
use serde_json::json;

use crate::{SLEEP, is_rubelet, nothing_left};

pub(crate) fn of_the_api_server_harm_no_pod(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let script = "echo start >> /share/runs; while [ ! -e /share/crash ]; do sleep .1; done; rm /share/crash; exit 1";
    let mut manifest = share.mounted(pod("outlives", [container("c", script), container("d", SLEEP)]));
    manifest["spec"]["restartPolicy"] = json!("Always");
    cluster.run(&manifest);
    let before = cluster.wait_running("outlives");
    cluster.plane.stop_api_server();
    share.put("crash", "");
    wait_until("the container is restarted without the API server", seconds(30), || {
        (share.lines("runs").len() == 2).then_some(())
    });
    cluster.plane.start_api_server().unwrap();
    let after =
        cluster.wait("the restart arrives", "outlives", |p| status::restarts(p, "c") == 1 && status::runs(p, "c"));
    assert_eq!(status::of(&after, "c")["lastState"]["terminated"]["exitCode"], 1);
    assert_eq!(status::id(&after, "d"), status::id(&before, "d"));
    assert_eq!(after["status"]["podIP"], before["status"]["podIP"]);
    cluster.wait_ready();
    // And orders arrive again.
    cluster.run(&pod("afterwards", [container("c", SLEEP)]));
    cluster.wait_running("afterwards");
}

pub(crate) fn of_the_kubelet_are_caught_up(cluster: &mut Cluster) {
    let ends = json!({"spec": {"restartPolicy": "Never"}});
    for name in ["left", "forced", "kept"] {
        cluster.run(&pod(name, [container("c", SLEEP)]));
    }
    let share = Share::new(&cluster.node);
    let mut finishes =
        share.mounted(pod("finishes", [container("c", "until [ -e /share/end ]; do sleep .1; done; exit 4")]));
    finishes["spec"]["restartPolicy"] = ends["spec"]["restartPolicy"].clone();
    cluster.run(&finishes);
    let [left, forced, kept, _] = ["left", "forced", "kept", "finishes"].map(|n| cluster.wait_running(n));
    cluster.node.kill();
    cluster.delete("left");
    cluster.api().delete("/api/v1/namespaces/default/pods/forced", &json!({"gracePeriodSeconds": 0})).unwrap();
    share.put("end", "");
    cluster.run(&pod("made", [container("c", SLEEP)]));
    assert!(cluster.pod("left").is_some(), "the object waits for its kubelet");
    cluster.node.run();
    cluster.wait_gone("left", seconds(40));
    nothing_left(cluster, &status::uid(&left));
    nothing_left(cluster, &status::uid(&forced));
    let finished = cluster.wait("the end arrives", "finishes", |p| status::phase(p) == "Failed");
    assert_eq!(status::of(&finished, "c")["state"]["terminated"]["exitCode"], 4);
    cluster.wait_running("made");
    let still = cluster.wait_running("kept");
    assert_eq!(status::id(&still, "c"), status::id(&kept, "c"));
    assert_eq!(status::restarts(&still, "c"), 0);
}

pub(crate) fn of_the_kubelet_do_not_cut_a_grace_short(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    for name in ["begun", "unbegun"] {
        let mut manifest = share.mounted(pod(name, [container("c", &share::noting(name, "", 5.0))]));
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(40);
        cluster.run(&manifest);
    }
    let uids = ["begun", "unbegun"].map(|n| status::uid(&cluster.wait_running(n)));
    cluster.delete("begun");
    wait_until("SIGTERM arrives", seconds(10), || (share.lines("begun").len() == 2).then_some(()));
    cluster.node.kill();
    cluster.delete("unbegun");
    cluster.node.run();
    for (name, uid) in ["begun", "unbegun"].iter().zip(&uids) {
        cluster.wait_gone(name, seconds(40));
        nothing_left(cluster, uid);
        let lines = share.lines(name);
        assert!(
            lines.last().is_some_and(|l| l.starts_with("stop ")),
            "{name} was killed before it had ended: {lines:?}"
        );
    }
}

pub(crate) fn of_both_kill_nothing(cluster: &mut Cluster) {
    let path = format!("/api/v1/nodes/{NODE}");
    cluster.api().merge(&path, &json!({"metadata": {"labels": {"place": "here"}}})).unwrap();
    wait_until("the kubelet has seen the label", seconds(30), || {
        // A pod that came too early would be rejected for good: another one is made.
        cluster.api().delete("/api/v1/namespaces/default/pods/picky", &json!({"gracePeriodSeconds": 0})).unwrap();
        let mut picky = pod("picky", [container("c", SLEEP)]);
        picky["spec"]["nodeSelector"] = json!({"place": "here"});
        cluster.run(&picky);
        let settled = cluster
            .wait("it is admitted or not", "picky", |p| status::phase(p) == "Failed" || status::phase(p) == "Running");
        (status::phase(&settled) == "Running").then_some(())
    });
    cluster.node.write("fixed.yaml", &pod("fixed", [container("c", SLEEP)]));
    let names = ["picky".to_owned(), format!("fixed-{NODE}")];
    let before = names.clone().map(|n| cluster.wait_running(&n));
    cluster.node.kill();
    cluster.plane.stop_api_server();
    cluster.node.run();
    if is_rubelet(cluster) {
        // Nobody has to wait for the API server to get rid of a static pod.
        cluster.node.remove("fixed.yaml");
        let uid = before[1]["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().unwrap();
        nothing_left(cluster, uid);
    }
    cluster.plane.start_api_server().unwrap();
    cluster.wait_ready();
    // What is made now is seen after what was there.
    cluster.run(&pod("later", [container("c", SLEEP)]));
    cluster.wait_running("later");
    let after = cluster.wait_running("picky");
    assert_eq!((status::id(&after, "c"), status::restarts(&after, "c")), (status::id(&before[0], "c"), 0));
    if is_rubelet(cluster) {
        cluster.wait_gone(&names[1], seconds(20));
    } else {
        let after = cluster.wait_running(&names[1]);
        assert_eq!(status::id(&after, "c"), status::id(&before[1], "c"));
    }
    cluster.api().merge(&path, &json!({"metadata": {"labels": {"place": null}}})).unwrap();
}
