//! Static pods and the mirror pods that stand for them.

use std::time::Duration;

use e2e::cluster::Cluster;
use e2e::{NODE, Share, container, pod, seconds, share, status, wait_until, with};
use serde_json::{Value, json};

use crate::{SLEEP, is_rubelet};

fn mirror(name: &str) -> String {
    format!("{name}-{NODE}")
}

/// kubernetes/kubernetes#22625, #79147, #116483.
pub(crate) fn that_are_deleted_come_back_and_no_container_is_touched(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    cluster.node.write("mirrored.yaml", &pod("mirrored", [container("c", SLEEP)]));
    let mut done = share.mounted(pod("done", [container("c", "echo run >> /share/done")]));
    done["spec"]["restartPolicy"] = json!("Never");
    cluster.node.write("done.yaml", &done);
    let (name, ended) = (mirror("mirrored"), mirror("done"));
    let first = cluster.wait_running(&name);
    cluster.wait("it is done", &ended, |p| {
        status::phase(p) == "Succeeded" && status::condition(p, "PodReadyToStartContainers") == "False"
    });
    let path = |name: &str| format!("/api/v1/namespaces/default/pods/{name}");
    cluster.api().delete(&path(&ended), &json!({"gracePeriodSeconds": 0})).unwrap();

    let mut last = first.clone();
    for round in 0..10 {
        // With its own grace, or without any.
        let options = if round % 2 == 0 { json!({"gracePeriodSeconds": 0}) } else { Value::Null };
        cluster.api().delete(&path(&name), &options).unwrap();
        last = cluster.wait("the mirror is made again", &name, |p| p["metadata"]["uid"] != last["metadata"]["uid"]);
    }
    let last = cluster.wait_running(&name);
    for key in ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"] {
        assert_eq!(last["metadata"]["annotations"][key], first["metadata"]["annotations"][key]);
    }
    assert_eq!((status::id(&last, "c"), status::restarts(&last, "c")), (status::id(&first, "c"), 0));
    std::thread::sleep(seconds(3));
    let still = cluster.pod(&name).unwrap();
    assert_eq!(still["metadata"]["uid"], last["metadata"]["uid"], "made anew without a reason");
    // What has ended is not run again. Its mirror stays away when all of it was put away before the deletion, as with the Go kubelet.
    assert_eq!(share.lines("done"), ["run"]);
    if let Some(shown) = cluster.pod(&ended) {
        assert_eq!(status::phase(&shown), "Succeeded");
    }
}

/// kubernetes/kubernetes#112814, #116880, #105543, #88402.
pub(crate) fn of_what_was_changed_while_the_api_server_was_away(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    // A port of the host each, which only one instance can have.
    let of = |cluster: &Cluster, name: &str, version: &str, port: u16| {
        let script = share.alone(name) + &share::noting(name, version, 0.5);
        let port = json!({"ports": [{"containerPort": port}]});
        let mut manifest = share.mounted(pod(name, [with(container("c", &script), port)]));
        manifest["spec"]["hostNetwork"] = json!(true);
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(10);
        if name == "named" {
            manifest["metadata"]["uid"] = json!("11111111-2222-3333-4444-555555555555");
        }
        cluster.node.write(&format!("{name}.yaml"), &manifest);
    };
    let names = ["edited", "taken", "named"];
    for (name, port) in names.iter().zip(18090..) {
        of(cluster, name, "v1", port);
    }
    cluster.run(&pod("of-the-api", [container("c", SLEEP)]));
    let before = cluster.wait_running("of-the-api");
    let mirrors = names.map(|name| {
        wait_until("it heeds SIGTERM", seconds(30), || (share.lines(name).len() == 1).then_some(()));
        cluster.wait_running(&mirror(name))
    });
    let hash = |pod: &Value| pod["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().unwrap().to_owned();

    cluster.node.kill();
    cluster.plane.stop_api_server();
    cluster.node.run();
    of(cluster, "edited", "v2", 18090);
    cluster.node.remove("taken.yaml");
    cluster.node.remove("named.yaml");
    let is_at =
        |name: &str, text: &str| share.lines(name).last().is_some_and(|l| l.ends_with(text) || l.starts_with(text));
    if is_rubelet(cluster) {
        // Nobody has to wait for the API server.
        for (name, end) in [("edited", "v2"), ("taken", "stop"), ("named", "stop")] {
            wait_until(&format!("{name} comes to {end:?}"), seconds(30), || is_at(name, end).then_some(()));
        }
    }
    cluster.plane.start_api_server().unwrap();
    of(cluster, "taken", "v2", 18091);
    of(cluster, "named", "v2", 18092);
    for (name, old) in names.iter().zip(&mirrors) {
        wait_until(&format!("{name} runs anew"), seconds(60), || is_at(name, "v2").then_some(()));
        assert_eq!(share::most_at_once(&share.lines(name)), 1, "{:?}", share.lines(name));
        let new = cluster.wait("there is a mirror of the new one", &mirror(name), |p| {
            p["metadata"]["uid"] != old["metadata"]["uid"]
                && status::runs(p, "c")
                && p["metadata"]["deletionTimestamp"].is_null()
        });
        assert_eq!(hash(&new) == hash(old), *name == "named", "{name}");
        assert_eq!(new["metadata"]["annotations"]["kubernetes.io/config.mirror"], hash(&new));
        let script = &new["spec"]["containers"][0]["command"][2];
        assert!(script.as_str().unwrap().contains("v2"), "the mirror shows the old one: {script}");
    }
    assert_eq!(share.read("twice"), "");
    std::thread::sleep(Duration::from_secs(1));
    let after = cluster.wait_running("of-the-api");
    assert_eq!((status::id(&after, "c"), status::restarts(&after, "c")), (status::id(&before, "c"), 0));
}
