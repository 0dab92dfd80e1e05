//! What pods take from the API server: configMaps, secrets, tokens, services, and facts about themselves.

use std::fs;
use std::time::Duration;

use cri::RuntimeMutator;
use e2e::cluster::Cluster;
use e2e::{NODE, Share, container, pod, seconds, status, wait_until, with};
use serde_json::{Value, json};

use crate::{SLEEP, assert_fixture};

pub(crate) fn config_maps_and_secrets_arrive_and_their_changes(cluster: &mut Cluster) {
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

pub(crate) fn a_pod_waits_for_what_it_names(cluster: &mut Cluster) {
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

pub(crate) fn a_token_of_the_service_account(cluster: &mut Cluster) {
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
    // By which it is seen that an account was deleted and made again: the token tells whose it is, and the node may ask who that is today.
    let account = cluster.api().get("/api/v1/namespaces/default/serviceaccounts/default").unwrap();
    assert_eq!(decide::config::objects::account_uid(&read("token")).as_deref(), account["metadata"]["uid"].as_str());
    let may = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
        "user": format!("system:node:{NODE}"), "groups": ["system:nodes"],
        "resourceAttributes": {"namespace": "default", "verb": "get", "resource": "serviceaccounts", "name": "default"}}});
    let may = cluster.api().create("/apis/authorization.k8s.io/v1/subjectaccessreviews", &may).unwrap();
    assert_eq!(may["status"]["allowed"], true, "{:#}", may["status"]);
}

pub(crate) fn services_are_in_the_environment(cluster: &mut Cluster) {
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

/// kubernetes/kubernetes#84539, #92615. What thousands of services come to in the end, a start that the kernel refuses, is brought about by
/// one variable here.
pub(crate) fn many_services_and_a_start_that_fails_for_its_variables(cluster: &mut Cluster) {
    let ports: Vec<Value> = (1..=25).map(|n| json!({"name": format!("p{n}"), "port": 1000 + n})).collect();
    let name = |n: usize| format!("crowd-{n}");
    for n in 0..20 {
        cluster.create("services", &json!({"metadata": {"name": name(n)}, "spec": {"ports": ports}}));
    }
    let elsewhere = json!({"metadata": {"name": "elsewhere"}, "spec": {"ports": [{"port": 1}]}});
    cluster.api().create("/api/v1/namespaces/kube-public/services", &elsewhere).unwrap();
    let count = |pod: &Value| {
        let out = cluster.exec(
            pod,
            "c",
            &["sh", "-c", "env | grep -c ^CROWD; env | grep -c ^ELSEWHERE; env | grep -c ^KUBERNETES_"],
        );
        out.lines().map(|n| n.parse::<usize>().unwrap()).collect::<Vec<_>>()
    };
    let mut manifest = pod("crowded", [container("c", SLEEP)]);
    // Host, port and PORT of a service; of each of its ports its number by name, and four more.
    wait_until("the kubelet has seen the services", seconds(60), || {
        cluster.api().delete("/api/v1/namespaces/default/pods/crowded", &json!({"gracePeriodSeconds": 0})).unwrap();
        cluster.run(&manifest);
        let crowded = cluster.wait_running("crowded");
        (count(&crowded) == [20 * (3 + 25 * 5), 0, 8]).then_some(())
    });
    manifest["metadata"]["name"] = json!("frugal");
    manifest["spec"]["enableServiceLinks"] = json!(false);
    cluster.run(&manifest);
    // Longer than a string may be that a program is started with.
    cluster.create("configmaps", &json!({"metadata": {"name": "long"}, "data": {"LONG": "x".repeat(200_000)}}));
    let from = json!({"envFrom": [{"configMapRef": {"name": "long"}}]});
    cluster.run(&pod("overlong", [with(container("c", SLEEP), from)]));
    let frugal = cluster.wait_running("frugal");
    assert_eq!(count(&frugal), [0, 0, 8]);
    // Some runtimes say so when they are to start it, others only in its log.
    let overlong = cluster.wait("it cannot be started", "overlong", |p| {
        let state = status::of(p, "c");
        [&state["state"], &state["lastState"]]
            .iter()
            .any(|s| s["terminated"]["exitCode"].as_i64().is_some_and(|c| c != 0))
    });
    wait_until("the reason is told", seconds(20), || {
        let told = cluster.node.container_log(&overlong, "c") + &overlong["status"].to_string();
        told.contains("rgument list too long").then_some(())
    });
    let short = json!({"data": {"LONG": "short"}});
    cluster.api().merge("/api/v1/namespaces/default/configmaps/long", &short).unwrap();
    // Some runtimes start it before it fails: the run that stays is the healed one.
    wait_until("it heals", seconds(90), || {
        let pod = cluster.wait_running("overlong");
        let id = status::id(&pod, "c");
        let echo = ["sh", "-c", "echo $LONG"].map(str::to_owned).to_vec();
        let said = cluster.node.ask(async { Ok(cluster.node.cri().exec_sync(id, echo, Some(seconds(20))).await) });
        said.is_ok_and(|out| out.stdout == b"short\n").then_some(())
    });
    assert_eq!(status::restarts(&cluster.pod("frugal").unwrap(), "c"), 0);
    for n in 0..20 {
        cluster.api().delete(&format!("/api/v1/namespaces/default/services/{}", name(n)), &Value::Null).unwrap();
    }
}

pub(crate) fn a_pod_learns_about_itself(cluster: &mut Cluster) {
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

pub(crate) fn keys_are_names_and_later_sources_win(cluster: &mut Cluster) {
    let map =
        |name: &str, data: Value| cluster.create("configmaps", &json!({"metadata": {"name": name}, "data": data}));
    map("first", json!({"1x": "a", "a-b": "b", "a.b": "c", "same": "first", "own": "first"}));
    map("second", json!({"same": "second", "MADE_UP_SERVICE_HOST": "mine"}));
    let service = json!({"metadata": {"name": "made-up"}, "spec": {"clusterIP": "10.96.77.8", "ports": [{"port": 1}]}});
    cluster.create("services", &service);
    let headless = json!({"metadata": {"name": "headless"}, "spec": {"clusterIP": "None", "ports": [{"port": 1}]}});
    cluster.create("services", &headless);
    let sources = json!({
        "envFrom": [{"configMapRef": {"name": "first"}}, {"configMapRef": {"name": "second"}},
                    {"prefix": "P_", "configMapRef": {"name": "second"}}, {"secretRef": {"name": "nowhere", "optional": true}}],
        "env": [{"name": "own", "value": "pod"}, {"name": "uses", "value": "$(same) $(MADE_UP_SERVICE_PORT) $(later) $$(own)"}],
    });
    cluster.run(&pod("keys", [with(container("c", SLEEP), sources)]));
    let keys = cluster.wait_running("keys");
    let env = cluster.exec(&keys, "c", &["env"]);
    let has = |line: &str| assert!(env.lines().any(|l| l == line), "no {line} in\n{env}");
    for line in [
        "1x=a",
        "a-b=b",
        "a.b=c",
        "same=second",
        "own=pod",
        "P_same=second",
        "uses=second 1 $(later) $(own)",
        "MADE_UP_SERVICE_HOST=mine",
        "MADE_UP_SERVICE_PORT=1",
    ] {
        has(line);
    }
    assert!(!env.contains("HEADLESS_"), "{env}");
}

pub(crate) fn files_have_the_right_owner_and_mode(cluster: &mut Cluster) {
    cluster.create("secrets", &json!({"metadata": {"name": "modes"}, "stringData": {"a": "1", "b": "2"}}));
    let contexts = [
        ("modes-root", json!({})),
        ("modes-user", json!({"runAsUser": 1000, "runAsGroup": 3000})),
        ("modes-group", json!({"runAsUser": 1000, "fsGroup": 2000})),
    ];
    let mut seen = serde_json::Map::new();
    for (name, context) in &contexts {
        let mounts = json!({"volumeMounts": [{"name": "s", "mountPath": "/s"}, {"name": "e", "mountPath": "/e"}, {"name": "p", "mountPath": "/p"}]});
        let mut manifest = pod(name, [with(container("c", SLEEP), mounts)]);
        manifest["spec"]["securityContext"] = context.clone();
        manifest["spec"]["volumes"] = json!([
            {"name": "s", "secret": {"secretName": "modes", "defaultMode": 0o440, "items": [{"key": "a", "path": "a"}, {"key": "b", "path": "d/b", "mode": 0o400}]}},
            {"name": "e", "emptyDir": {}},
            {"name": "p", "projected": {"defaultMode": 0o444, "sources": [
                {"serviceAccountToken": {"path": "token"}}, {"secret": {"name": "modes", "items": [{"key": "a", "path": "a"}]}}]}},
        ]);
        cluster.run(&manifest);
    }
    for (name, _) in &contexts {
        let pod = cluster.wait_running(name);
        let files = "/s /s/a /s/d /s/d/b /e /p /p/a /p/token";
        let modes =
            cluster.exec(&pod, "c", &["sh", "-c", &format!("stat -L -c '%n %a %u %g' {files}; id; cat /s/a 2>&1")]);
        seen.insert((*name).to_owned(), json!(modes.lines().collect::<Vec<_>>()));
    }
    assert_fixture("modes", &Value::Object(seen));
}

pub(crate) fn a_restarted_container_sees_the_new_file(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    cluster.create("configmaps", &json!({"metadata": {"name": "version"}, "data": {"v": "1"}}));
    let script = "echo $(cat /one) >> /share/seen; until [ -e /share/crash ]; do sleep .1; done; rm /share/crash; cat /one >> /share/last; exit 1";
    let one = json!({"volumeMounts": [{"name": "v", "mountPath": "/one", "subPath": "v"}]});
    let all = json!({"volumeMounts": [{"name": "v", "mountPath": "/all"}]});
    let mut manifest = pod("versions", [with(container("c", script), one), with(container("d", SLEEP), all)]);
    manifest["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "version"}}]);
    cluster.run(&share.mounted(manifest));
    let versions = cluster.wait_running("versions");
    cluster.api().merge("/api/v1/namespaces/default/configmaps/version", &json!({"data": {"v": "2"}})).unwrap();
    wait_until("the volume is up to date", seconds(60), || {
        std::thread::sleep(Duration::from_millis(200));
        (cluster.exec(&versions, "d", &["cat", "/all/v"]) == "2").then_some(())
    });
    share.put("crash", "");
    wait_until("the container is started again", seconds(30), || (share.lines("seen").len() == 2).then_some(()));
    assert_eq!(share.lines("seen"), ["1", "2"]);
    assert_eq!(share.read("last"), "1", "a running container keeps its file");
}
