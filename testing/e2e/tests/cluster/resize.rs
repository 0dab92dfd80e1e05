//! Pods that get other resources while they run: what the API, the runtime and the kernel then show, also over restarts of the kubelet.

use e2e::cluster::Cluster;
use e2e::status::{condition, id, of, restarts};
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::SLEEP;

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

/// Asks for these resources of container `c`.
#[track_caller]
fn resize(cluster: &Cluster, name: &str, resources: &Value) {
    let path = format!("/api/v1/namespaces/default/pods/{name}");
    wait_until("the API server takes the resize", seconds(20), || {
        let mut pod = cluster.pod(name)?;
        pod["spec"]["containers"][0]["resources"] = resources.clone();
        cluster.api().replace(&format!("{path}/resize"), &pod).ok()
    });
}

/// Waits until the pod has what it asks for, as its status shows it.
#[track_caller]
fn wait_resized(cluster: &Cluster, name: &str) -> Value {
    cluster.wait("the pod has what it asks for", name, |p| {
        let asked = &p["spec"]["containers"][0]["resources"];
        p["status"]["observedGeneration"] == p["metadata"]["generation"]
            && of(p, "c")["resources"] == *asked
            && of(p, "c")["allocatedResources"] == asked["requests"]
            && of(p, "c")["state"]["running"].is_object()
            && condition(p, "PodResizePending").is_empty()
            && condition(p, "PodResizeInProgress").is_empty()
    })
}

/// CFS quota in µs and memory limit in bytes, as the kernel has them for the container.
fn kernel(cluster: &Cluster, pod: &Value) -> Vec<String> {
    let read = "cd /sys/fs/cgroup; if [ -e cpu.max ]; then cut -d' ' -f1 cpu.max; cat memory.max; \
                else cat cpu/cpu.cfs_quota_us memory/memory.limit_in_bytes; fi";
    cluster.exec(pod, "c", &["sh", "-c", read]).lines().map(str::to_owned).collect()
}

/// The same of the pod's own cgroup; the host's files are read.
fn kernel_of_pod(pod: &Value) -> Vec<String> {
    let group = format!("pod{}", pod["metadata"]["uid"].as_str().unwrap());
    let find = |root: &str, file: &str| {
        let dirs = std::process::Command::new("find").args([root, "-type", "d", "-name", &group]).output().unwrap();
        let dir = String::from_utf8(dirs.stdout).unwrap().lines().next().map(str::to_owned);
        let text = std::fs::read_to_string(format!("{}/{file}", dir.unwrap_or_default())).unwrap_or_default();
        text.split_whitespace().next().unwrap_or_default().to_owned()
    };
    match std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        true => vec![find("/sys/fs/cgroup", "cpu.max"), find("/sys/fs/cgroup", "memory.max")],
        false => {
            vec![find("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), find("/sys/fs/cgroup/memory", "memory.limit_in_bytes")]
        }
    }
}

fn condition_of<'a>(pod: &'a Value, kind: &str) -> &'a Value {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().find(|c| c["type"] == kind).unwrap_or(&Value::Null)
}

/// Up, down, and both at once, without a restart of the container.
pub(crate) fn up_and_down_while_the_container_runs(cluster: &mut Cluster) {
    let spec = with(container("c", SLEEP), json!({"resources": resources("100m", "64Mi")}));
    cluster.run(&pod("resized", [spec]));
    let begun = cluster.wait_running("resized");
    assert_eq!(kernel(cluster, &begun), ["10000", "67108864"]);
    for (cpu, memory, expected) in [
        ("200m", "128Mi", ["20000", "134217728"]),
        ("50m", "32Mi", ["5000", "33554432"]),
        ("100m", "16Mi", ["10000", "16777216"]),
        ("50m", "64Mi", ["5000", "67108864"]),
    ] {
        resize(cluster, "resized", &resources(cpu, memory));
        let shown = wait_resized(cluster, "resized");
        assert_eq!((id(&shown, "c"), restarts(&shown, "c")), (id(&begun, "c"), 0), "the container runs on");
        assert_eq!(kernel(cluster, &shown), expected, "the container, {cpu} {memory}");
        assert_eq!(kernel_of_pod(&shown), expected, "the pod, {cpu} {memory}");
        assert_eq!(shown["status"]["resources"]["limits"], json!({"cpu": cpu, "memory": memory}));
        assert_eq!(shown["status"]["allocatedResources"], json!({"cpu": cpu, "memory": memory}));
    }
    let text = |what: &str, generation: u32, cpu: &str, memory: &str| {
        let list = format!(r#"{{"cpu":"{cpu}","memory":"{memory}"}}"#);
        format!(
            r#"Pod resize {what}: {{"containers":[{{"name":"c","resources":{{"limits":{list},"requests":{list}}}}}],"generation":{generation}}}"#
        )
    };
    let told = wait_until("the resizes are told", seconds(20), || {
        Some(cluster.events("resized")).filter(|all| all.iter().filter(|e| e.0 == "ResizeCompleted").count() == 4)
    });
    for (generation, cpu, memory) in [(2, "200m", "128Mi"), (5, "50m", "64Mi")] {
        for (reason, what) in [("ResizeStarted", "started"), ("ResizeCompleted", "completed")] {
            assert!(told.contains(&(reason.into(), text(what, generation, cpu, memory))), "{told:#?}");
        }
    }
}

/// A container whose policy asks for it is restarted once for each resize; a kubelet that is killed in the middle of it changes nothing of that.
pub(crate) fn with_a_restart_where_the_policy_asks_for_one(cluster: &mut Cluster) {
    let policy = json!([{"resourceName": "cpu", "restartPolicy": "NotRequired"}, {"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let spec = with(container("c", SLEEP), json!({"resources": resources("100m", "64Mi"), "resizePolicy": policy}));
    cluster.run(&pod("restarted", [spec]));
    cluster.wait_running("restarted");
    resize(cluster, "restarted", &resources("150m", "64Mi"));
    assert_eq!(restarts(&wait_resized(cluster, "restarted"), "c"), 0);
    resize(cluster, "restarted", &resources("150m", "128Mi"));
    let shown = wait_resized(cluster, "restarted");
    assert_eq!((restarts(&shown, "c"), kernel(cluster, &shown)), (1, vec!["15000".into(), "134217728".into()]));
    let told = ("Killing".to_owned(), "Container c resize requires restart".to_owned());
    assert!(cluster.events("restarted").contains(&told));
    for (n, pause) in [0, 300, 600].into_iter().enumerate() {
        let (cpu, memory) = (format!("{}m", 160 + n), format!("{}Mi", 130 + n));
        resize(cluster, "restarted", &resources(&cpu, &memory));
        std::thread::sleep(std::time::Duration::from_millis(pause));
        cluster.node.kill();
        cluster.node.run();
        let shown = wait_resized(cluster, "restarted");
        assert_eq!(restarts(&shown, "c"), 2 + n as u64, "killed after {pause} ms");
        let settled = cluster.wait("the kubelet is at it", "restarted", |p| condition(p, "Ready") == "True");
        assert_eq!(restarts(&settled, "c"), 2 + n as u64);
    }
}

/// What does not fit now is put off, over a restart of the kubelet too, and done as soon as there is room.
pub(crate) fn when_there_is_room(cluster: &mut Cluster) {
    let node = cluster.get_node();
    let cpu = node["status"]["allocatable"]["cpu"].as_str().unwrap();
    let milli: u64 = cpu.strip_suffix('m').map_or_else(|| cpu.parse::<u64>().unwrap() * 1000, |m| m.parse().unwrap());
    let (most, little) = (format!("{}m", milli - 400), format!("{}m", milli - 300));
    let asks = |name: &str, cpu: &str| {
        let resources = json!({"requests": {"cpu": cpu, "memory": "16Mi"}});
        pod(name, [with(container("c", SLEEP), json!({"resources": resources}))])
    };
    cluster.run(&asks("large", &most));
    cluster.run(&asks("grows", "100m"));
    cluster.wait_running("large");
    let begun = cluster.wait_running("grows");
    resize(cluster, "grows", &json!({"requests": {"cpu": little, "memory": "16Mi"}}));
    let deferred = |p: &Value| condition_of(p, "PodResizePending")["reason"] == "Deferred";
    let shown = cluster.wait("it is put off", "grows", deferred);
    let pending = condition_of(&shown, "PodResizePending").clone();
    assert_eq!(
        pending["message"],
        format!(
            "Node didn't have enough resource: cpu, requested: {}, used: {}, capacity: {milli}",
            milli - 300,
            milli - 400
        )
    );
    assert_eq!(pending["observedGeneration"], 2);
    assert_eq!(of(&shown, "c")["allocatedResources"]["cpu"], "100m");
    cluster.node.restart();
    cluster.wait_ready();
    let again =
        cluster.wait("it runs with what it was given", "grows", |p| deferred(p) && condition(p, "Ready") == "True");
    assert_eq!(
        (id(&again, "c"), of(&again, "c")["allocatedResources"]["cpu"].as_str()),
        (id(&begun, "c"), Some("100m"))
    );
    assert_eq!(condition_of(&again, "PodResizePending")["lastTransitionTime"], pending["lastTransitionTime"]);
    let told = |reason: &str| cluster.events("grows").iter().filter(|e| e.0 == reason).count();
    assert_eq!(told("ResizeDeferred"), 1, "a new kubelet does not tell it again");
    cluster.delete("large");
    let done = wait_resized(cluster, "grows");
    assert_eq!((id(&done, "c"), restarts(&done, "c")), (id(&begun, "c"), 0));
    wait_until("the end is told", seconds(20), || (told("ResizeCompleted") == 1).then_some(()));
}

/// Memory that is in use is not taken away: that is told, and what is asked for next is done.
pub(crate) fn that_would_take_memory_in_use_fail(cluster: &mut Cluster) {
    let spec = with(container("c", SLEEP), json!({"resources": resources("100m", "64Mi")}));
    cluster.run(&pod("uses", [spec]));
    let begun = cluster.wait_running("uses");
    resize(cluster, "uses", &resources("100m", "64Ki"));
    let shown =
        cluster.wait("the failure is told", "uses", |p| condition_of(p, "PodResizeInProgress")["reason"] == "Error");
    let message = condition_of(&shown, "PodResizeInProgress")["message"].as_str().unwrap().to_owned();
    assert!(message.contains("memory limit (65536) below current usage ("), "{message}");
    assert_eq!(of(&shown, "c")["resources"]["limits"]["memory"], "64Mi", "nothing was changed");
    assert_eq!(kernel(cluster, &shown)[1], "67108864");
    resize(cluster, "uses", &resources("100m", "48Mi"));
    let done = wait_resized(cluster, "uses");
    assert_eq!((id(&done, "c"), kernel(cluster, &done)[1].as_str()), (id(&begun, "c"), "50331648"));
}

/// Resources of the pod as a whole.
pub(crate) fn of_the_pod_as_a_whole(cluster: &mut Cluster) {
    let mut whole = pod("whole", [container("c", SLEEP)]);
    whole["spec"]["resources"] = resources("100m", "64Mi");
    cluster.run(&whole);
    let begun = cluster.wait_running("whole");
    assert_eq!(kernel_of_pod(&begun), ["10000", "67108864"]);
    for (cpu, memory, expected) in [("200m", "128Mi", ["20000", "134217728"]), ("100m", "32Mi", ["10000", "33554432"])]
    {
        let path = "/api/v1/namespaces/default/pods/whole/resize";
        wait_until("the API server takes the resize", seconds(20), || {
            let mut pod = cluster.pod("whole")?;
            pod["spec"]["resources"] = resources(cpu, memory);
            cluster.api().replace(path, &pod).ok()
        });
        let shown = cluster.wait("the pod has what it asks for", "whole", |p| {
            p["status"]["observedGeneration"] == p["metadata"]["generation"]
                && p["status"]["resources"] == p["spec"]["resources"]
                && p["status"]["allocatedResources"] == p["spec"]["resources"]["requests"]
                && condition(p, "PodResizeInProgress").is_empty()
        });
        assert_eq!((id(&shown, "c"), restarts(&shown, "c")), (id(&begun, "c"), 0));
        assert_eq!(kernel_of_pod(&shown), expected, "the pod, {cpu} {memory}");
        assert_eq!(kernel(cluster, &shown), expected, "a container without limits of its own, {cpu} {memory}");
    }
}
