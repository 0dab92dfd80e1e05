//! Ends that something comes in between: a deletion, a deadline, a kubelet that is away.

use std::fs;
use std::time::Duration;

use e2e::cluster::Cluster;
use e2e::{Share, container, pod, seconds, share, status, wait_until, with};
use jiff::Timestamp;
use serde_json::json;

use crate::{SLEEP, admission, is_rubelet, nothing_left};

const NOW: &str = "gracePeriodSeconds";

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

/// kubernetes/kubernetes#88613, #108366.
pub(crate) fn by_a_deadline_are_told_when_nothing_runs_any_more(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let limited = |name: &str, deadline: u64, script: &str| {
        let mut manifest = share.mounted(pod(name, [container("c", script)]));
        manifest["spec"]["activeDeadlineSeconds"] = json!(deadline);
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(6);
        // It keeps the object for a last look.
        manifest["metadata"]["finalizers"] = json!(["rubelet.test/look"]);
        manifest
    };
    let deaf = "trap 'echo term >> /share/deaf' TERM; echo start >> /share/deaf; while true; do sleep .1; done";
    cluster.run(&limited("deaf", 3, deaf));
    let mut begins = limited("begins", 3, "echo app >> /share/begins");
    begins["spec"]["initContainers"] =
        json!([with(container("i", SLEEP), json!({"volumeMounts": begins["spec"]["containers"][0]["volumeMounts"]}))]);
    cluster.run(&begins);
    cluster.run(&limited("outlasts", 10, &format!("echo start >> /share/outlasts; {SLEEP}")));
    let uids = ["deaf", "outlasts"].map(|name| {
        wait_until("its container runs", seconds(60), || (!share.lines(name).is_empty()).then_some(()));
        status::uid(&cluster.pod(name).unwrap())
    });
    wait_until("its time is over", seconds(20), || (share.lines("deaf").len() == 2).then_some(()));
    cluster.delete("deaf");
    let runs = |cluster: &Cluster, uid: &str| {
        let all = cluster.node.containers();
        all.iter().any(|c| {
            c.labels["io.kubernetes.pod.uid"] == uid && c.state == cri_api::v1::ContainerState::ContainerRunning as i32
        })
    };
    assert!(runs(cluster, &uids[0]));
    let over = cluster.wait("it is over", "deaf", |p| {
        ["Failed", "Succeeded"].contains(&status::phase(p)) || p["metadata"]["deletionGracePeriodSeconds"] == 0
    });
    assert!(!runs(cluster, &uids[0]), "told too early: {:#}", over["status"]);
    let deaf = cluster.wait("its end is told", "deaf", |p| p["metadata"]["deletionGracePeriodSeconds"] == 0);
    assert_eq!((status::phase(&deaf), &deaf["status"]["reason"]), ("Failed", &json!("DeadlineExceeded")));
    assert_eq!(status::of(&deaf, "c")["state"]["terminated"]["exitCode"], 137);
    let begins = cluster.wait("its time is over", "begins", |p| status::phase(p) == "Failed");
    assert_eq!(begins["status"]["reason"], "DeadlineExceeded");
    assert_eq!(share.read("begins"), "");

    // The clock runs on while nobody looks.
    cluster.node.kill();
    let outlasts = cluster.pod("outlasts").unwrap();
    assert_eq!(status::phase(&outlasts), "Running", "{:#}", outlasts["status"]);
    let began: Timestamp = outlasts["status"]["startTime"].as_str().unwrap().parse().unwrap();
    let left = 11.0 - Timestamp::now().duration_since(began).as_secs_f64();
    std::thread::sleep(Duration::from_secs_f64(left.max(0.0)));
    cluster.node.run();
    let outlasts = cluster.wait("its time is over", "outlasts", |p| status::phase(p) == "Failed");
    assert_eq!(outlasts["status"]["reason"], "DeadlineExceeded");
    assert_eq!(outlasts["status"]["startTime"].as_str().unwrap().parse::<Timestamp>().unwrap(), began);
    assert_eq!(share.lines("outlasts").len(), 1);
    for name in ["deaf", "begins", "outlasts"] {
        cluster.api().merge(&path(name), &json!({"metadata": {"finalizers": null}})).unwrap();
        cluster.delete(name);
    }
    for uid in &uids {
        nothing_left(cluster, uid);
    }
}

/// kubernetes/kubernetes#117019, #116954, #118497. What happens to a kubelet that is killed is in `outages`.
pub(crate) fn that_a_restart_comes_into_are_not_cut_short(cluster: &mut Cluster) {
    admission::label(cluster, "here");
    let share = Share::new(&cluster.node);
    for (name, grace, shutdown) in
        [("begun", 40, 4.0), ("overdue", 3, 1.0), ("unwelcome", 20, 2.0), ("forced", 20, 0.5)]
    {
        let mut manifest = share.mounted(pod(name, [container("c", &share::noting(name, "", shutdown))]));
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        if name == "unwelcome" {
            manifest["spec"]["nodeSelector"] = json!({"place": "here"});
        }
        cluster.run(&manifest);
    }
    let names = ["begun", "overdue", "unwelcome", "forced"];
    let uids = names.map(|name| status::uid(&cluster.wait_running(name)));
    for name in names {
        // Running it is before its shell has set the trap.
        wait_until("its script has begun", seconds(20), || (share.lines(name).len() == 1).then_some(()));
    }
    cluster.delete("begun");
    wait_until("SIGTERM arrives", seconds(10), || (share.lines("begun").len() == 2).then_some(()));
    cluster.node.stop();
    cluster.delete("overdue");
    cluster.delete("unwelcome");
    cluster.api().delete(&path("forced"), &json!({NOW: 0})).unwrap();
    admission::unlabel(cluster);
    // Longer than its grace.
    std::thread::sleep(seconds(5));
    cluster.node.run();
    for (name, uid) in names.iter().zip(&uids) {
        cluster.wait_gone(name, seconds(60));
        nothing_left(cluster, uid);
        let lines = share.lines(name);
        // The Go kubelet kills a pod that it would not take any more.
        let may_be_killed = *name == "forced" || *name == "unwelcome" && !is_rubelet(cluster);
        assert!(may_be_killed || lines.last().is_some_and(|l| l.starts_with("stop ")), "{name} was killed: {lines:?}");
    }
}

/// kubernetes/kubernetes#60987, #38498, #60645, #113987, #117412. Files and mounts of others are in `volumes.rs`.
pub(crate) fn of_pods_that_are_gone_leave_nothing(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    share.put("hosts-own", "kept");
    cluster.create("configmaps", &json!({"metadata": {"name": "there"}, "data": {"a": "1"}}));
    let mounts = json!({"volumeMounts": [
        {"name": "e", "mountPath": "/e"}, {"name": "m", "mountPath": "/m"}, {"name": "c", "mountPath": "/c"},
        {"name": "p", "mountPath": "/p"}, {"name": "e", "mountPath": "/sub", "subPath": "deep/er"},
        {"name": "c", "mountPath": "/file", "subPath": "a"},
    ]});
    let full = |name: &str| {
        let mut manifest =
            pod(name, [with(container("c", &format!("echo x > /e/f; echo x > /m/f; {SLEEP}")), mounts.clone())]);
        manifest["spec"]["volumes"] = json!([
            {"name": "e", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "c", "configMap": {"name": "there"}},
            {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "there"}}]}},
        ]);
        cluster.run(&share.mounted(manifest));
    };
    let names = ["killed", "unmounted"];
    names.iter().for_each(|name| full(name));
    let mut waits =
        pod("waits", [with(container("c", SLEEP), json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}))]);
    waits["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "nowhere"}}, {"name": "e", "emptyDir": {}}]);
    cluster.run(&waits);
    let uids = names.map(|name| status::uid(&cluster.wait_running(name)));
    let told =
        |(reason, message): &(String, String)| reason == "FailedMount" && message.contains("\"nowhere\" not found");
    wait_until("the missing configMap is told", seconds(30), || cluster.events("waits").iter().any(told).then_some(()));
    let waiting = status::uid(&cluster.pod("waits").unwrap());
    cluster.delete("waits");
    cluster.wait_gone("waits", seconds(10));
    nothing_left(cluster, &waiting);

    cluster.node.kill();
    for (name, uid) in names.iter().zip(&uids) {
        cluster.api().delete(&path(name), &json!({NOW: 0})).unwrap();
        cluster.node.remove_from_runtime(uid);
    }
    // As after a reboot: nothing is mounted, the folders are there.
    let pods = cluster.node.root().join("pods");
    rig::mounts::detach(&pods.join(&uids[1])).unwrap();
    cluster.node.run();
    for uid in &uids {
        wait_until("the folder is gone", seconds(60), || (!pods.join(uid).exists()).then_some(()));
        nothing_left(cluster, uid);
    }
    assert_eq!(fs::read_to_string(share.dir().join("hosts-own")).unwrap(), "kept");
}
