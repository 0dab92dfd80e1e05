//! Pods that take too much of the node: the right one goes, with the right words, and the node is itself again (A08).
//!
//! The shortages are small ones: the pods' group has 300 MiB, the root directory a file system of its own.

use std::ops::{Deref, DerefMut};
use std::process::Command;

use e2e::cluster::Cluster;
use e2e::{NODE, container, pod, seconds, status, wait_until, with};
use serde_json::{Value, json};

/// A node that is configured otherwise, until this is dropped.
struct Short<'a> {
    cluster: &'a mut Cluster,
    config: Value,
}

impl Deref for Short<'_> {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        self.cluster
    }
}

impl DerefMut for Short<'_> {
    fn deref_mut(&mut self) -> &mut Cluster {
        self.cluster
    }
}

impl<'a> Short<'a> {
    /// The node with these fields in its configuration; `disk`: options of a tmpfs that the root directory is on.
    fn new(cluster: &'a mut Cluster, fields: &Value, disk: Option<&str>) -> Self {
        let mut short = Self { config: cluster.node.config().clone(), cluster };
        short.node.kill();
        if let Some(options) = disk {
            let root = short.node.root();
            let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&root).status();
            assert!(mounted.unwrap().success());
        }
        short.set(fields);
        short.node.run();
        short.wait_ready();
        short
    }

    fn set(&mut self, fields: &Value) {
        for (key, value) in fields.as_object().into_iter().flatten() {
            self.node.configure(key, value.clone());
        }
    }

    /// Waits until the node has this condition in this state; its reason.
    fn wait_condition(&self, kind: &str, wanted: &str) -> String {
        wait_until(&format!("{kind} is {wanted}"), seconds(90), || {
            let node = self.get_node();
            let all = node["status"]["conditions"].as_array()?.iter();
            let condition = all.clone().find(|c| c["type"] == kind)?;
            (condition["status"] == wanted).then(|| condition["reason"].as_str().unwrap_or_default().to_owned())
        })
    }

    /// The evicted pod, when nothing of it runs any more.
    fn wait_evicted(&self, name: &str) -> Value {
        let over = self.wait(&format!("{name} is evicted"), name, |p| status::phase(p) == "Failed");
        assert_eq!(over["status"]["reason"], "Evicted", "{:#}", over["status"]);
        over
    }
}

impl Drop for Short<'_> {
    fn drop(&mut self) {
        // Its pods go first: what they have on the disk goes with it.
        for pod in self.api().list("/api/v1/namespaces/default/pods").unwrap_or_default() {
            let path =
                format!("/api/v1/namespaces/default/pods/{}", pod["metadata"]["name"].as_str().unwrap_or_default());
            let _ = self.api().delete(&path, &json!({"gracePeriodSeconds": 0}));
        }
        self.node.kill();
        let _ = rig::mounts::detach(&self.node.root());
        let config = self.config.clone();
        for (key, _) in self.node.config().clone().as_object().into_iter().flatten() {
            self.node.configure(key, config[key].clone());
        }
        self.node.spawn();
    }
}

/// Deaf to signals, with a grace of ten minutes.
fn deaf(name: &str, containers: Vec<Value>, volumes: Value) -> Value {
    let mut manifest = pod(name, containers);
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(600);
    manifest["spec"]["volumes"] = volumes;
    manifest
}

fn script(work: &str) -> String {
    format!("trap '' TERM; {work}; while true; do sleep 1; done")
}

fn on(volume: &str) -> Value {
    json!({"volumeMounts": [{"name": volume, "mountPath": "/v"}]})
}

fn limit(size: &str) -> Value {
    json!({"resources": {"limits": {"ephemeral-storage": size}}})
}

fn message(pod: &Value) -> &str {
    pod["status"]["message"].as_str().unwrap_or_default()
}

fn events_of(cluster: &Cluster, name: &str, reason: &str) -> Vec<Value> {
    let path =
        format!("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name},reason%3D{reason}");
    cluster.api().list(&path).unwrap()
}

/// kubernetes/kubernetes#115819, #124063.
pub(crate) fn limits_of_local_storage(cluster: &mut Cluster) {
    let big = script("dd if=/dev/zero of=/v/big bs=1M count=20");
    let layer = script("dd if=/dev/zero of=/big bs=1M count=20");
    let volume = |limit: Value| json!([{"name": "v", "emptyDir": limit}]);
    let cases = [
        (
            deaf("dir", vec![with(container("c", &big), on("v"))], volume(json!({"sizeLimit": "1Mi"}))),
            "Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". ",
        ),
        (
            deaf(
                "layer",
                vec![with(container("c", &layer), limit("2Mi")), with(container("d", &script("true")), limit("99Mi"))],
                json!([]),
            ),
            "Container c exceeded its local ephemeral storage limit \"2Mi\". ",
        ),
        (
            deaf(
                "whole",
                vec![with(container("c", &script("true")), limit("2Mi")), with(container("d", &big), on("v"))],
                volume(json!({})),
            ),
            "Pod ephemeral local storage usage exceeds the total limit of containers 2Mi. ",
        ),
    ];
    let within = deaf(
        "within",
        vec![with(with(container("c", &big), on("v")), limit("40Mi"))],
        volume(json!({"sizeLimit": "30Mi"})),
    );
    cluster.run(&within);
    for (manifest, _) in &cases {
        cluster.run(manifest);
    }
    let fine = status::id(&cluster.wait_running("within"), "c").to_owned();
    for (manifest, told) in &cases {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        let over = cluster.wait(&format!("{name} is evicted"), name, |p| status::phase(p) == "Failed");
        assert_eq!((&over["status"]["reason"], message(&over)), (&json!("Evicted"), *told), "{:#}", over["status"]);
        // It did not get its ten minutes, and it has itself to blame.
        assert_eq!(status::of(&over, "c")["state"]["terminated"]["exitCode"], 137, "{:#}", over["status"]);
        assert_eq!(status::condition(&over, "DisruptionTarget"), "");
        let events = events_of(cluster, name, "Evicted");
        assert!(events.iter().any(|e| e["message"] == *told && e["type"] == "Warning"), "{events:#?}");
        let uid = status::uid(&over);
        wait_until("nothing of it is left in the runtime", seconds(60), || {
            let all = cluster.node.containers();
            (!all.iter().any(|c| c.labels["io.kubernetes.pod.uid"] == uid)).then_some(())
        });
    }
    // What was evicted stays so.
    let before: Vec<Value> =
        cases.iter().map(|(m, _)| cluster.pod(m["metadata"]["name"].as_str().unwrap()).unwrap()).collect();
    cluster.node.restart();
    cluster.wait_ready();
    let within = cluster.wait_running("within");
    assert_eq!((status::id(&within, "c"), status::restarts(&within, "c")), (fine.as_str(), 0));
    for pod in before {
        let now = cluster.pod(pod["metadata"]["name"].as_str().unwrap()).unwrap();
        assert_eq!(now["status"], pod["status"]);
    }
}

/// The pods' group has 300 MiB, of which 100 are to be left.
pub(crate) fn memory_of_the_pods(cluster: &mut Cluster) {
    let total = e2e::meminfo_kib("MemTotal");
    let reserved = format!("{}Ki", total - (300 << 10));
    let node = Short::new(
        cluster,
        &json!({"kubeReserved": {"memory": reserved}, "evictionHard": {"memory.available": "100Mi"},
            "evictionPressureTransitionPeriod": "15s"}),
        None,
    );
    let guaranteed = json!({"resources": {"limits": {"memory": "30Mi", "cpu": "100m"}}});
    node.run(&pod("modest", [with(container("c", &script("true")), guaranteed)]));
    let modest = status::id(&node.wait_running("modest"), "c").to_owned();
    // Two of them: one has at most what pods can get, which is less by the machine's huge pages.
    let in_memory = |name| json!({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": "250Mi"}});
    let hog = script("dd if=/dev/zero of=/v/big bs=1M count=110; dd if=/dev/zero of=/w/big bs=1M count=110");
    let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]});
    node.run(&deaf("hog", vec![with(container("c", &hog), mounts)], json!([in_memory("v"), in_memory("w")])));
    assert_eq!(node.wait_condition("MemoryPressure", "True"), "KubeletHasInsufficientMemory");
    let over = node.wait_evicted("hog");
    let told = message(&over);
    assert!(told.starts_with("The node was low on resource: memory. Threshold quantity: 100Mi, available: "), "{told}");
    assert!(
        told.contains("Ki. Container c was using ")
            && told.ends_with(", request is 0, has larger consumption of memory. "),
        "{told}"
    );
    let target =
        over["status"]["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "DisruptionTarget").unwrap();
    assert_eq!(
        (&target["status"], &target["reason"], &target["message"]),
        (&json!("True"), &json!("TerminationByKubelet"), &json!(told))
    );
    let events = events_of(&node, "hog", "Evicted");
    let annotations = &events[0]["metadata"]["annotations"];
    assert_eq!(
        (&annotations["starved_resource"], &annotations["offending_containers"]),
        (&json!("memory"), &json!("c")),
        "{events:#?}"
    );

    // While there is pressure, only those come that ask for something.
    node.run(&pod("late", [container("c", &script("true"))]));
    let late = node.wait("it is refused", "late", |p| status::phase(p) == "Failed");
    assert_eq!(message(&late), "Pod was rejected: The node had condition: [MemoryPressure]. ");
    let asks = with(container("c", &script("true")), json!({"resources": {"requests": {"memory": "1Mi"}}}));
    node.run(&pod("asks", [asks]));
    node.wait_running("asks");
    assert_eq!(node.wait_condition("MemoryPressure", "False"), "KubeletHasSufficientMemory");
    let pod = node.pod("modest").unwrap();
    assert_eq!((status::id(&pod, "c"), status::restarts(&pod, "c")), (modest.as_str(), 0));
    let met = events_of(&node, NODE, "EvictionThresholdMet");
    assert!(met.iter().any(|e| e["message"] == "Attempting to reclaim memory"), "{met:#?}");
    // They came and went once.
    let told = wait_until("both changes are told", seconds(30), || {
        let of =
            |reason: &str| events_of(&node, NODE, reason).iter().map(|e| e["count"].as_u64().unwrap_or(1)).sum::<u64>();
        let (short, enough) = (of("NodeHasInsufficientMemory"), of("NodeHasSufficientMemory"));
        (short > 0 && enough > 0).then_some(short)
    });
    assert_eq!(told, 1);
}

/// The root directory has 96 MiB and 3000 inodes.
pub(crate) fn disk_and_inodes(cluster: &mut Cluster) {
    let mut node = Short::new(
        cluster,
        &json!({"evictionHard": {"nodefs.available": "30Mi", "nodefs.inodesFree": "40%"}, "evictionPressureTransitionPeriod": "5s"}),
        Some("size=96m,nr_inodes=3000"),
    );
    let dir = json!([{"name": "v", "emptyDir": {}}]);
    let takes = |name: &str, work: &str| deaf(name, vec![with(container("c", &script(work)), on("v"))], dir.clone());
    node.run(&takes("modest", "dd if=/dev/zero of=/v/some bs=1M count=8"));
    let modest = status::id(&node.wait_running("modest"), "c").to_owned();
    // It takes all that there is: what the agent itself wants to write finds no room.
    node.run(&takes("filler", "dd if=/dev/zero of=/v/big bs=1M count=200"));
    let over = node.wait_evicted("filler");
    let told = message(&over);
    assert!(
        told.starts_with("The node was low on resource: ephemeral-storage. Threshold quantity: 30Mi, available: "),
        "{told}"
    );
    assert_eq!(status::condition(&over, "DisruptionTarget"), "True");
    node.wait_condition("DiskPressure", "False");
    let pod = node.pod("modest").unwrap();
    assert_eq!((status::id(&pod, "c"), status::restarts(&pod, "c")), (modest.as_str(), 0));

    node.run(&takes("many", "mkdir /v/d; i=0; while [ $i -lt 2500 ]; do : > /v/d/$i; i=$((i+1)); done"));
    let over = node.wait_evicted("many");
    let told = message(&over);
    assert!(told.starts_with("The node was low on resource: inodes. Threshold quantity: 1200, available: "), "{told}");
    node.wait_condition("DiskPressure", "False");
    let pod = node.pod("modest").unwrap();
    assert_eq!((status::id(&pod, "c"), status::restarts(&pod, "c")), (modest.as_str(), 0));
    let of =
        |reason: &str| events_of(&node, NODE, reason).iter().map(|e| e["count"].as_u64().unwrap_or(1)).sum::<u64>();
    wait_until("all changes are told", seconds(30), || (of("NodeHasDiskPressure") == 2).then_some(()));

    // Killed while a pod takes its time to go, the next agent goes on with it, though nothing is short any more.
    node.node.kill();
    node.set(&json!({"evictionHard": {"memory.available": "1Mi"}, "evictionSoft": {"nodefs.available": "30Mi"},
        "evictionSoftGracePeriod": {"nodefs.available": "1s"}, "evictionMaxPodGracePeriod": 15}));
    node.node.run();
    node.wait_ready();
    node.run(&takes("soft", "dd if=/dev/zero of=/v/big bs=1M count=70"));
    wait_until("it is to go", seconds(60), || (!events_of(&node, "soft", "Evicted").is_empty()).then_some(()));
    assert_eq!(status::phase(&node.pod("soft").unwrap()), "Running");
    node.node.kill();
    node.set(&json!({"evictionSoft": null, "evictionSoftGracePeriod": null}));
    node.node.run();
    if crate::is_rubelet(&node) {
        let over = node.wait_evicted("soft");
        assert!(message(&over).starts_with("The node was low on resource: ephemeral-storage. "), "{over:#}");
        assert_eq!(status::of(&over, "c")["restartCount"], 0);
    }
}
