//! A node in a cluster: what arrives from the API server runs, and what is seen on the node arrives there.
//!
//! The fixtures are what the Go kubelet 1.36.1 gave: `RUBELET_BIN=~/.cache/rubelet-lab/bin/kubelet RUBELET_E2E_RECORD=1` writes them anew.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cri_api::v1::ContainerState;
use e2e::cluster::{Cluster, Test, main as harness, shape};
use e2e::{NODE, Share, container, pod, seconds, share, status, wait_until, with};
use jiff::Timestamp;
use serde_json::{Value, json};

fn main() -> ExitCode {
    const TESTS: &[Test] = &[
        ("the_node_object_is_as_the_go_kubelets", the_node_object_is_as_the_go_kubelets),
        ("the_lease_is_renewed", the_lease_is_renewed),
        ("a_pod_of_the_api_runs_and_its_status_is_complete", a_pod_of_the_api_runs_and_its_status_is_complete),
        ("a_pod_is_scheduled_and_its_events_are_told", a_pod_is_scheduled_and_its_events_are_told),
        ("a_crash_loop_is_told", a_crash_loop_is_told),
        ("a_deleted_pod_ends_within_its_grace", a_deleted_pod_ends_within_its_grace),
        ("a_static_pod_has_a_mirror", a_static_pod_has_a_mirror),
        ("config_maps_and_secrets_arrive_and_their_changes", config_maps_and_secrets_arrive_and_their_changes),
        ("a_pod_waits_for_what_it_names", a_pod_waits_for_what_it_names),
        ("a_pod_has_a_token_of_its_service_account", a_pod_has_a_token_of_its_service_account),
        ("services_are_in_the_environment", services_are_in_the_environment),
        ("a_pod_learns_about_itself", a_pod_learns_about_itself),
        ("pods_that_end_have_a_final_status", pods_that_end_have_a_final_status),
        ("kubectl_logs_and_exec", kubectl_logs_and_exec),
        ("an_outage_of_the_api_server_harms_no_pod", an_outage_of_the_api_server_harms_no_pod),
        ("what_happens_while_the_kubelet_is_down_is_caught_up", what_happens_while_the_kubelet_is_down_is_caught_up),
        ("a_restart_keeps_what_others_set_on_the_node", a_restart_keeps_what_others_set_on_the_node),
        ("a_deleted_node_is_registered_again", a_deleted_node_is_registered_again),
    ];
    harness(TESTS)
}

/// Long enough that no test sees its end.
const SLEEP: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// Compares with what the Go kubelet gave.
#[track_caller]
fn assert_fixture(name: &str, value: &Value) {
    let file =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/cluster")).join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&shape(value)).unwrap() + "\n";
    if std::env::var_os("RUBELET_E2E_RECORD").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        return;
    }
    let expected: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let given: Value = serde_json::from_str(&text).unwrap();
    let mut differences = Vec::new();
    compare("", &expected, &given, &mut differences);
    assert!(differences.is_empty(), "not as in {}:\n{}", file.display(), differences.join("\n"));
}

/// Where two values differ, one line a place.
fn compare(at: &str, expected: &Value, given: &Value, out: &mut Vec<String>) {
    match (expected, given) {
        (Value::Object(e), Value::Object(g)) => {
            for key in e.keys().chain(g.keys().filter(|k| !e.contains_key(*k))) {
                compare(&format!("{at}.{key}"), &expected[key], &given[key], out);
            }
        }
        (Value::Array(e), Value::Array(g)) if e.len() == g.len() => {
            for (index, (e, g)) in e.iter().zip(g).enumerate() {
                compare(&format!("{at}[{index}]"), e, g, out);
            }
        }
        _ if expected != given => out.push(format!("{at}: expected {expected}, is {given}")),
        _ => {}
    }
}

fn the_node_object_is_as_the_go_kubelets(cluster: &mut Cluster) {
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

fn the_lease_is_renewed(cluster: &mut Cluster) {
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

fn a_pod_of_the_api_runs_and_its_status_is_complete(cluster: &mut Cluster) {
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

fn a_pod_is_scheduled_and_its_events_are_told(cluster: &mut Cluster) {
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

fn a_crash_loop_is_told(cluster: &mut Cluster) {
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

fn a_deleted_pod_ends_within_its_grace(cluster: &mut Cluster) {
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

/// Waits until nothing of the pod runs or holds anything. The Go kubelet removes ended containers, sandboxes and logs once a minute only.
#[track_caller]
fn nothing_left(cluster: &Cluster, uid: &str) {
    let running = |id: &str| {
        let all = cluster.node.containers();
        all.iter().any(|c| c.id == id && c.state() == ContainerState::ContainerRunning)
    };
    let left = || -> Vec<String> {
        let counts = |l: &String| match l.split_once(' ') {
            Some(("container", id)) => running(id),
            Some((what, _)) => what != "sandbox" && what != "logs",
            None => true,
        };
        cluster.node.leftovers(uid).into_iter().filter(counts).collect()
    };
    assert!(rig::poll(seconds(30), || left().is_empty()), "left of the pod {uid}: {:#?}", left());
}

fn a_static_pod_has_a_mirror(cluster: &mut Cluster) {
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

fn config_maps_and_secrets_arrive_and_their_changes(cluster: &mut Cluster) {
    cluster.create(
        "configmaps",
        &json!({"metadata": {"name": "conf"}, "data": {"color": "red", "size": "7"}, "binaryData": {"raw": "AAEC"}}),
    );
    cluster.create(
        "secrets",
        &json!({"metadata": {"name": "hidden"}, "stringData": {"password": "s3cret", "user": "me"}}),
    );
    let main = with(
        container("c", SLEEP),
        json!({
            "env": [
                {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "color"}}},
                {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "password"}}},
                {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "nowhere", "key": "x", "optional": true}}},
                {"name": "BOTH", "value": "$(COLOR)-$(PASSWORD)"},
            ],
            "envFrom": [{"configMapRef": {"name": "conf"}}, {"prefix": "H_", "secretRef": {"name": "hidden"}}],
            "volumeMounts": [
                {"name": "conf", "mountPath": "/conf"}, {"name": "hidden", "mountPath": "/hidden"},
                {"name": "conf", "mountPath": "/one", "subPath": "color"}, {"name": "all", "mountPath": "/all"},
            ],
        }),
    );
    let mut manifest = pod("fed", [main]);
    manifest["spec"]["volumes"] = json!([
        {"name": "conf", "configMap": {"name": "conf"}},
        {"name": "hidden", "secret": {"secretName": "hidden", "defaultMode": 0o440,
                                      "items": [{"key": "password", "path": "a/b", "mode": 0o400}, {"key": "user", "path": "user"}]}},
        {"name": "all", "projected": {"sources": [
            {"configMap": {"name": "conf", "items": [{"key": "size", "path": "size"}]}},
            {"secret": {"name": "hidden"}},
            {"configMap": {"name": "nowhere", "optional": true}},
        ]}},
    ]);
    cluster.run(&manifest);
    let fed = cluster.wait_running("fed");
    let sh = |script: &str| cluster.exec(&fed, "c", &["sh", "-c", script]);
    assert_eq!(sh("echo $COLOR $PASSWORD ${NONE-none} $BOTH $size $H_user"), "red s3cret none red-s3cret 7 me\n");
    assert_eq!(sh("cd /conf; ls; cat color; cat raw | od -An -tx1"), "color\nraw\nsize\nred 00 01 02\n");
    assert_eq!(sh("cat /hidden/a/b /hidden/user /one /all/size /all/password"), "s3cretmered7s3cret");
    assert_eq!(sh("stat -L -c %a /hidden/a/b /hidden/user /conf/color"), "400\n440\n644\n");
    assert_eq!(sh("stat -f -c %T /hidden"), "tmpfs\n");
    assert_eq!(sh("echo > /conf/color 2>/dev/null || echo refused"), "refused\n");

    let merge = |path: &str, fields: Value| {
        cluster.api().merge(&format!("/api/v1/namespaces/default/{path}"), &fields).unwrap()
    };
    merge("configmaps/conf", json!({"data": {"color": "blue", "new": "x"}, "binaryData": null}));
    merge("secrets/hidden", json!({"stringData": {"password": "other"}}));
    wait_until("the changes arrive", seconds(60), || {
        std::thread::sleep(Duration::from_millis(200));
        (sh("cd /conf; ls; cat color new /hidden/a/b /all/password") == "color\nnew\nsize\nbluexotherother")
            .then_some(())
    });
    assert_eq!(sh("cat /one; echo $COLOR"), "redred\n", "a subPath and the environment stay");
}

fn a_pod_waits_for_what_it_names(cluster: &mut Cluster) {
    let mut manifest =
        pod("early", [with(container("c", SLEEP), json!({"envFrom": [{"configMapRef": {"name": "later"}}]}))]);
    cluster.run(&manifest);
    manifest["metadata"]["name"] = json!("early-volume");
    manifest["spec"]["containers"][0]["envFrom"] = Value::Null;
    manifest["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "later"}}]);
    manifest["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    cluster.run(&manifest);
    let waits =
        cluster.wait("it waits for a configMap", "early", |p| status::waiting(p, "c") == "CreateContainerConfigError");
    assert_eq!(status::of(&waits, "c")["state"]["waiting"]["message"], "configmap \"later\" not found");
    let told =
        ("FailedMount".to_owned(), "MountVolume.SetUp failed for volume \"v\" : secret \"later\" not found".to_owned());
    wait_until("the missing secret is told", seconds(30), || {
        cluster.events("early-volume").contains(&told).then_some(())
    });
    let waits = cluster.pod("early-volume").unwrap();
    assert_eq!((status::phase(&waits), status::waiting(&waits, "c")), ("Pending", "ContainerCreating"));
    cluster.create("configmaps", &json!({"metadata": {"name": "later"}, "data": {"A": "b"}}));
    cluster.create("secrets", &json!({"metadata": {"name": "later"}, "stringData": {"a": "c"}}));
    let early = cluster.wait_running("early");
    assert_eq!(cluster.exec(&early, "c", &["sh", "-c", "echo $A"]), "b\n");
    let early = cluster.wait_running("early-volume");
    assert_eq!(cluster.exec(&early, "c", &["cat", "/v/a"]), "c");
}

fn a_pod_has_a_token_of_its_service_account(cluster: &mut Cluster) {
    let mut manifest = pod("tokened", [container("c", SLEEP)]);
    manifest["spec"]["automountServiceAccountToken"] = json!(true);
    cluster.run(&manifest);
    let tokened = cluster.wait_running("tokened");
    let read = |file: &str| {
        cluster.exec(&tokened, "c", &["cat", &format!("/var/run/secrets/kubernetes.io/serviceaccount/{file}")])
    };
    assert_eq!(read("namespace"), "default");
    assert_eq!(read("ca.crt"), fs::read_to_string(cluster.plane.authority()).unwrap());
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": read("token")}});
    let review = cluster.api().create("/apis/authentication.k8s.io/v1/tokenreviews", &review).unwrap();
    let status = &review["status"];
    assert_eq!(status["authenticated"], true, "{status:#}");
    assert_eq!(status["user"]["username"], "system:serviceaccount:default:default");
    let extra = &status["user"]["extra"];
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], json!(["tokened"]));
    assert_eq!(extra["authentication.kubernetes.io/pod-uid"], json!([tokened["metadata"]["uid"]]));
    assert_eq!(extra["authentication.kubernetes.io/node-name"], json!([NODE]));
}

fn services_are_in_the_environment(cluster: &mut Cluster) {
    let service = json!({"metadata": {"name": "my-db"}, "spec": {"clusterIP": "10.96.77.7", "selector": {"app": "db"},
        "ports": [{"name": "sql", "port": 5432}, {"name": "admin", "port": 80, "protocol": "TCP"}]}});
    cluster.create("services", &service);
    let script = format!("env | grep -E '^(MY_DB|KUBERNETES)_' | sort; {SLEEP}");
    let mut manifest = pod("linked", [container("c", &script)]);
    cluster.run(&manifest);
    manifest["metadata"]["name"] = json!("unlinked");
    manifest["spec"]["enableServiceLinks"] = json!(false);
    cluster.run(&manifest);
    let log = |name: &str| {
        let pod = cluster.wait_running(name);
        wait_until("the log has its last line", seconds(10), || {
            let lines = e2e::lines(&cluster.node.container_log(&pod, "c"));
            lines.iter().any(|l| l.starts_with("KUBERNETES_SERVICE_PORT_HTTPS=")).then(|| lines.join("\n"))
        })
    };
    let kubernetes = "KUBERNETES_PORT=tcp://10.96.0.1:443
KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443
KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1
KUBERNETES_PORT_443_TCP_PORT=443
KUBERNETES_PORT_443_TCP_PROTO=tcp
KUBERNETES_SERVICE_HOST=10.96.0.1
KUBERNETES_SERVICE_PORT=443
KUBERNETES_SERVICE_PORT_HTTPS=443";
    let ours = "MY_DB_PORT=tcp://10.96.77.7:5432
MY_DB_PORT_5432_TCP=tcp://10.96.77.7:5432
MY_DB_PORT_5432_TCP_ADDR=10.96.77.7
MY_DB_PORT_5432_TCP_PORT=5432
MY_DB_PORT_5432_TCP_PROTO=tcp
MY_DB_PORT_80_TCP=tcp://10.96.77.7:80
MY_DB_PORT_80_TCP_ADDR=10.96.77.7
MY_DB_PORT_80_TCP_PORT=80
MY_DB_PORT_80_TCP_PROTO=tcp
MY_DB_SERVICE_HOST=10.96.77.7
MY_DB_SERVICE_PORT=5432
MY_DB_SERVICE_PORT_ADMIN=80
MY_DB_SERVICE_PORT_SQL=5432";
    assert_eq!(log("linked"), format!("{kubernetes}\n{ours}"));
    assert_eq!(log("unlinked"), kubernetes);
}

fn a_pod_learns_about_itself(cluster: &mut Cluster) {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let main = with(
        container("c", SLEEP),
        json!({
            "env": [
                field("NAME", "metadata.name"), field("UID_", "metadata.uid"), field("NODE", "spec.nodeName"), field("HOST", "status.hostIP"),
                field("POD_IP", "status.podIP"), field("ACCOUNT", "spec.serviceAccountName"), field("LABEL", "metadata.labels['app']"),
                {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
            ],
            "resources": {"limits": {"memory": "32Mi"}},
            "volumeMounts": [{"name": "info", "mountPath": "/info"}],
        }),
    );
    let mut manifest = pod("itself", [main]);
    manifest["metadata"]["labels"] = json!({"app": "a", "b": "c"});
    manifest["spec"]["volumes"] = json!([{"name": "info", "downwardAPI": {"items": [
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}, {"path": "notes", "fieldRef": {"fieldPath": "metadata.annotations"}},
    ]}}]);
    cluster.run(&manifest);
    let running = cluster.wait_running("itself");
    let sh = |script: &str| cluster.exec(&running, "c", &["sh", "-c", script]);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let expected = [
        "itself".to_owned(),
        status::uid(&running),
        NODE.to_owned(),
        text(&running["status"]["hostIP"]),
        text(&running["status"]["podIP"]),
        "default a 32\n".to_owned(),
    ];
    assert_eq!(sh("echo $NAME $UID_ $NODE $HOST $POD_IP $ACCOUNT $LABEL $MEMORY"), expected.join(" "));
    assert_eq!(sh("cat /info/labels"), "app=\"a\"\nb=\"c\"");
    let change = json!({"metadata": {"labels": {"app": "z"}, "annotations": {"note": "new"}}});
    cluster.api().merge("/api/v1/namespaces/default/pods/itself", &change).unwrap();
    wait_until("the new label and annotation arrive", seconds(60), || {
        std::thread::sleep(Duration::from_millis(200));
        let labels = sh("cat /info/labels");
        (labels == "app=\"z\"\nb=\"c\"" && sh("cat /info/notes").contains("note=\"new\"")).then_some(())
    });
    assert_eq!(sh("echo $LABEL"), "a\n");
}

fn pods_that_end_have_a_final_status(cluster: &mut Cluster) {
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

fn kubectl_logs_and_exec(cluster: &mut Cluster) {
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

fn an_outage_of_the_api_server_harms_no_pod(cluster: &mut Cluster) {
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

fn what_happens_while_the_kubelet_is_down_is_caught_up(cluster: &mut Cluster) {
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

fn a_restart_keeps_what_others_set_on_the_node(cluster: &mut Cluster) {
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

fn a_deleted_node_is_registered_again(cluster: &mut Cluster) {
    cluster.run(&pod("before", [container("c", SLEEP)]));
    cluster.wait_running("before");
    let before = cluster.get_node();
    cluster.api().delete(&format!("/api/v1/nodes/{NODE}"), &Value::Null).unwrap();
    if !cluster.node.root().join("rubelet").exists() {
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
