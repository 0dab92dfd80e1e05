//! Pods from their beginning to their end, as the API server sees them.

use std::time::{Duration, Instant};

use e2e::cluster::Cluster;
use e2e::{NODE, Share, container, pod, seconds, share, status, wait_until, with};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{SLEEP, assert_fixture, nothing_left};

pub(crate) fn one_of_the_api_runs_and_its_status_is_complete(cluster: &mut Cluster) {
    let probe = json!({"readinessProbe": {"exec": {"command": ["test", "-e", "/data/mark"]}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}, "limits": {"memory": "32Mi"}}});
    let data = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let mut manifest = pod("whole", [with(with(container("c", SLEEP), probe), data.clone()), container("d", SLEEP)]);
    manifest["spec"]["initContainers"] = json!([with(container("i", "echo > /data/mark"), data)]);
    manifest["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    manifest["spec"]["automountServiceAccountToken"] = json!(true);
    let made = cluster.run(&manifest);
    let running = cluster.wait_running("whole");
    assert_eq!(running["metadata"]["uid"], made["metadata"]["uid"]);
    let ready = cluster.wait("all conditions are True", "whole", |pod| {
        let all = pod["status"]["conditions"].as_array();
        all.is_some_and(|all| all.len() == 5 && all.iter().all(|c| c["status"] == "True"))
    });
    assert!(ready["status"]["podIP"].as_str().unwrap().starts_with("10.199."));
    assert_fixture("pod-running", &ready["status"]);
}

pub(crate) fn one_is_scheduled_and_its_events_are_told(cluster: &mut Cluster) {
    let mut manifest = pod("told", [container("c", SLEEP)]);
    manifest["spec"]["automountServiceAccountToken"] = json!(false);
    cluster.create("pods", &manifest);
    cluster.wait_running("told");
    cluster.delete("told");
    cluster.wait_gone("told", seconds(20));
    let events = wait_until("the end is told", seconds(10), || {
        Some(cluster.events("told")).filter(|all| all.iter().any(|(reason, _)| reason == "Killing"))
    });
    let listed: Vec<Value> = events.iter().map(|(reason, message)| json!([reason, message])).collect();
    assert_fixture("events", &json!(listed));
}

pub(crate) fn a_crash_loop_is_told(cluster: &mut Cluster) {
    cluster.run(&pod("crash", [container("c", "exit 3")]));
    let crashed = cluster.wait("it waits in a back-off", "crash", |p| status::waiting(p, "c") == "CrashLoopBackOff");
    let last = &status::of(&crashed, "c")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&json!(3), &json!("Error")));
    assert_eq!(status::phase(&crashed), "Running");
    let uid = status::uid(&crashed);
    let message = status::of(&crashed, "c")["state"]["waiting"]["message"].as_str().unwrap();
    assert!(message.starts_with("back-off "), "{message}");
    assert!(message.ends_with(&format!(" restarting failed container=c pod=crash_default({uid})")), "{message}");
    let told = format!("Back-off restarting failed container c in pod crash_default({uid})");
    wait_until("the back-off is told", seconds(20), || {
        cluster.events("crash").contains(&("BackOff".to_owned(), told.clone())).then_some(())
    });
}

pub(crate) fn a_deleted_one_ends_within_its_grace(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let mut slow = share.mounted(pod("slow", [container("c", &share::noting("slow", "", 2.0))]));
    slow["spec"]["terminationGracePeriodSeconds"] = json!(20);
    // Its shell does not heed SIGTERM.
    let mut stubborn = pod("stubborn", [container("c", "exec sleep 1000000")]);
    stubborn["spec"]["terminationGracePeriodSeconds"] = json!(3);
    stubborn["metadata"]["finalizers"] = json!(["rubelet.test/look"]);
    cluster.run(&slow);
    cluster.run(&stubborn);
    cluster.wait_running("slow");
    let uid = status::uid(&cluster.wait_running("stubborn"));
    wait_until("the script runs", seconds(10), || (share.lines("slow").len() == 1).then_some(()));

    let start = Instant::now();
    cluster.delete("slow");
    cluster.delete("stubborn");
    wait_until("SIGTERM arrives", seconds(5), || (share.lines("slow").len() == 2).then_some(()));
    let ending = cluster.pod("slow").unwrap();
    assert_eq!(ending["metadata"]["deletionGracePeriodSeconds"], 20);
    assert!(status::runs(&ending, "c"), "an ending pod keeps its status");
    // The finalizer keeps the object for a last look.
    let killed = cluster.wait("it has ended", "stubborn", |p| p["metadata"]["deletionGracePeriodSeconds"] == 0);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(2900), "killed after {took:?}, before its grace of 3 s was over");
    assert!(took < seconds(15), "told only after {took:?}");
    assert_eq!(status::phase(&killed), "Failed");
    assert_eq!(status::of(&killed, "c")["state"]["terminated"]["exitCode"], 137);
    let released = json!({"metadata": {"finalizers": null}});
    cluster.api().merge("/api/v1/namespaces/default/pods/stubborn", &released).unwrap();
    cluster.wait_gone("stubborn", seconds(5));
    cluster.wait_gone("slow", seconds(20));
    assert!(share.lines("slow")[2].starts_with("stop "), "the object was gone before the container had ended");
    nothing_left(cluster, &uid);
}

pub(crate) fn a_static_one_has_a_mirror(cluster: &mut Cluster) {
    let name = format!("still-{NODE}");
    cluster.node.write("still.yaml", &pod("still", [container("c", SLEEP)]));
    let mirror = cluster.wait_running(&name);
    let annotations = &mirror["metadata"]["annotations"];
    assert_eq!(annotations["kubernetes.io/config.source"], "file");
    assert_eq!(annotations["kubernetes.io/config.mirror"], annotations["kubernetes.io/config.hash"]);
    let owner = &mirror["metadata"]["ownerReferences"][0];
    let node = cluster.get_node();
    let expected =
        json!({"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node["metadata"]["uid"], "controller": true});
    assert_eq!(*owner, expected);
    assert_ne!(
        mirror["metadata"]["uid"], annotations["kubernetes.io/config.hash"],
        "the mirror's UID is the API server's"
    );

    cluster.delete(&name);
    let again = cluster.wait("the mirror is made again", &name, |p| {
        p["metadata"]["uid"] != mirror["metadata"]["uid"] && status::runs(p, "c")
    });
    assert_eq!(status::id(&again, "c"), status::id(&mirror, "c"), "the container ran on");
    assert_eq!(status::restarts(&again, "c"), 0);

    cluster.node.remove("still.yaml");
    cluster.wait_gone(&name, seconds(30));
    nothing_left(cluster, annotations["kubernetes.io/config.hash"].as_str().unwrap());
}

pub(crate) fn those_that_end_have_a_final_status(cluster: &mut Cluster) {
    let never = |name: &str, containers: [Value; 2]| {
        let mut manifest = pod(name, containers);
        manifest["spec"]["restartPolicy"] = json!("Never");
        manifest
    };
    cluster.run(&never("well", [container("a", "exit 0"), container("b", "sleep 1")]));
    cluster.run(&never("badly", [container("a", "echo why > /dev/termination-log; exit 7"), container("b", "exit 0")]));
    let mut retry = pod("retry", [container("a", "[ -e /data/again ] || { touch /data/again; exit 1; }")]);
    retry["spec"]["restartPolicy"] = json!("OnFailure");
    retry["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    retry["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    cluster.run(&retry);
    let ended = |name: &str, phase: &str| {
        let mut pod = cluster.wait(&format!("it is {phase} and its sandbox has ended"), name, |p| {
            status::phase(p) == phase && status::condition(p, "PodReadyToStartContainers") == "False"
        });
        // On cgroup v1 the Go kubelet gives an ended pod without limits the limit that means none there.
        pod["status"].as_object_mut().unwrap().remove("resources");
        pod["status"].take()
    };
    assert_fixture("pod-succeeded", &ended("well", "Succeeded"));
    assert_fixture("pod-failed", &ended("badly", "Failed"));
    let retried = cluster.wait("it succeeded after all", "retry", |p| status::phase(p) == "Succeeded");
    assert_eq!(status::restarts(&retried, "a"), 1);
    // A pod that has ended is deleted without waiting for anything.
    let start = Instant::now();
    cluster.delete("badly");
    cluster.wait_gone("badly", seconds(10));
    assert!(start.elapsed() < seconds(5), "{:?}", start.elapsed());
}

pub(crate) fn kubectl_logs_and_exec(cluster: &mut Cluster) {
    cluster.run(&pod("talk", [container("c", &format!("echo out; echo err >&2; {SLEEP}"))]));
    cluster.wait_running("talk");
    let kubectl = |arguments: &[&str]| {
        let out = cluster.kubectl(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (out.status.code().unwrap_or(-1), text(&out.stdout), text(&out.stderr))
    };
    wait_until("the log has both lines", seconds(10), || {
        let (code, out, _) = kubectl(&["logs", "talk"]);
        let mut lines: Vec<&str> = out.lines().collect();
        lines.sort_unstable();
        (code == 0 && lines == ["err", "out"]).then_some(())
    });
    let (code, out, _) = kubectl(&["logs", "talk", "--tail=1", "--timestamps"]);
    assert!(code == 0 && out.lines().count() == 1, "{out}");
    assert!(out.split(' ').next().unwrap().parse::<Timestamp>().is_ok(), "{out}");
    let (code, out, err) = kubectl(&["exec", "talk", "--", "sh", "-c", "echo one; echo two >&2; exit 5"]);
    assert_eq!((code, out.as_str()), (5, "one\n"), "{err}");
    assert!(err.starts_with("two\n"), "{err}");
}

pub(crate) fn a_deadline_is_told_after_the_end(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let mut manifest = share.mounted(pod("deadline", [container("c", &share::noting("deadline", "", 2.0))]));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(20);
    manifest["spec"]["activeDeadlineSeconds"] = json!(3);
    cluster.run(&manifest);
    let failed = cluster.wait("its time is over", "deadline", |p| status::phase(p) == "Failed");
    assert_eq!(failed["status"]["reason"], "DeadlineExceeded");
    assert_eq!(failed["status"]["message"], "Pod was active on the node longer than the specified deadline");
    let lines = share.lines("deadline");
    assert!(lines.len() == 3 && lines[2].starts_with("stop "), "told before the container had ended: {lines:?}");
    assert_eq!(status::of(&failed, "c")["state"]["terminated"]["exitCode"], 0);
}

pub(crate) fn those_that_do_not_fit_are_rejected(cluster: &mut Cluster) {
    let mut port =
        pod("port-1", [with(container("c", SLEEP), json!({"ports": [{"containerPort": 80, "hostPort": 18080}]}))]);
    cluster.run(&port);
    cluster.wait_running("port-1");
    port["metadata"]["name"] = json!("port-2");
    cluster.run(&port);
    let rejected = cluster.wait("its port is taken", "port-2", |p| status::phase(p) == "Failed");
    assert_fixture("pod-rejected-port", &rejected["status"]);
    let big = json!({"resources": {"requests": {"memory": "900Gi"}}});
    cluster.run(&pod("big", [with(container("c", SLEEP), big)]));
    let rejected = cluster.wait("it is too big", "big", |p| status::phase(p) == "Failed");
    assert_eq!(rejected["status"]["reason"], "OutOfmemory");
    let message = rejected["status"]["message"].as_str().unwrap();
    let head = "Pod was rejected: Node didn't have enough resource: memory, requested: 966367641600, used: ";
    assert!(message.starts_with(head), "{message}");
    let told = message.strip_prefix("Pod was rejected: ").unwrap().to_owned();
    wait_until("the rejection is told", seconds(10), || {
        cluster.events("big").contains(&("OutOfmemory".to_owned(), told.clone())).then_some(())
    });
    let mut elsewhere = pod("elsewhere", [container("c", SLEEP)]);
    elsewhere["spec"]["nodeSelector"] = json!({"no": "such"});
    cluster.run(&elsewhere);
    let rejected = cluster.wait("it does not belong here", "elsewhere", |p| status::phase(p) == "Failed");
    assert_fixture("pod-rejected-affinity", &rejected["status"]);
}
