//! What a person gives the program and gets from it: flags, configuration, commands, endpoints.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use e2e::status::{id, restarts, uid};
use e2e::{Node, Options, container, pod, program, seconds, sidecar, wait_until};
use rig::http;
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";

/// Exit code, standard output and standard error of the program with these arguments; ended after 20 s.
fn run(arguments: &[&str]) -> (i32, String, String) {
    run_as(&program(), arguments)
}

fn run_as(program: &Path, arguments: &[&str]) -> (i32, String, String) {
    let out = Command::new("timeout").arg("20").arg(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    // Lines of the log quote what they say.
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let plain = |bytes: Vec<u8>| text(bytes).replace("\\\"", "\"");
    (out.status.code().unwrap_or(-1), text(out.stdout), plain(out.stderr))
}

/// A configuration that fits this node but for these fields, as a file.
fn configuration(node: &Node, name: &str, fields: &Value) -> String {
    let mut config = node.config().clone();
    for (key, value) in fields.as_object().unwrap() {
        config[key] = value.clone();
    }
    let file = node.dir().join(name);
    fs::write(&file, config.to_string()).unwrap();
    file.display().to_string()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn help_version_and_the_name_kubelet() {
    let (code, help, _) = run(&["--help"]);
    assert_eq!(code, 0);
    for flag in ["--config", "--root-dir", "--kubeconfig", "--pod-manifest-path"] {
        assert!(help.contains(flag), "no {flag} in --help");
    }
    let (code, version, _) = run(&["--version"]);
    assert_eq!((code, version.as_str()), (0, "Kubernetes v1.36.1\n"));
    let (code, version, _) = run(&["version"]);
    assert_eq!(code, 0);
    assert!(version.starts_with("rubelet ") && version.contains("v1.36.1"), "{version}");

    let dir = std::env::temp_dir().join(format!("rubelet-e2e-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let kubelet = dir.join("kubelet");
    symlink(program(), &kubelet).unwrap();
    let (code, version, _) = run_as(&kubelet, &["--version"]);
    let (refused, _, why) = run_as(&kubelet, &["pods"]);
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!((code, version.as_str()), (0, "Kubernetes v1.36.1\n"));
    assert!(refused == 1 && why.contains("unknown command pods"), "{refused} {why}");

    let (code, _, why) = run(&["podz"]);
    assert_eq!(code, 2);
    assert!(why.contains("did you mean pods?"), "{why}");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn flags_that_are_wrong_are_refused_by_name() {
    for (flags, wanted) in [
        (vec!["--nonsense"], "unknown flag: --nonsense"),
        (vec!["--network-plugin=cni"], "unknown flag: --network-plugin: removed in 1.24"),
        (vec!["--max-pods=many"], "invalid argument \"many\" for \"--max-pods\" flag"),
        (vec!["--max-pods"], "flag needs an argument: --max-pods"),
        (vec!["--fail-swap-on=perhaps"], "invalid argument \"perhaps\" for \"--fail-swap-on\" flag"),
        (vec!["--v=loud"], "invalid argument \"loud\""),
        (vec!["--", "stray"], "unknown command stray"),
    ] {
        let (code, out, why) = run(&flags);
        assert_eq!(code, 1, "{flags:?}: {out}{why}");
        assert!(why.contains(wanted), "{flags:?}: {why}");
        assert!(why.lines().count() <= 3, "{flags:?}: buried in {why}");
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn configuration_that_is_wrong_is_refused_by_field() {
    let mut node = Node::prepare(Options::default());
    let root = node.dir().join("other-root").display().to_string();
    let start = |file: &str| run(&["--config", file, "--root-dir", &root, "--hostname-override=e2e"]);
    for (fields, wanted) in [
        (json!({"maxPods": "many"}), vec!["maxPods", "\"many\"", "a whole number"]),
        (
            json!({"syncFrequency": "1 minute"}),
            vec!["syncFrequency", "\"1 minute\"", "a duration is a number with a unit"],
        ),
        (json!({"failSwapOn": "no"}), vec!["failSwapOn", "\"no\""]),
        (json!({"healthzPort": 99999}), vec!["healthzPort", "99999", "between 1 and 65535"]),
        (json!({"clusterDNS": "10.0.0.1"}), vec!["clusterDNS", "\"10.0.0.1\""]),
        (json!({"cgroupDriver": "sistemd"}), vec!["cgroupDriver", "sistemd"]),
        (json!({"featureGates": {"NoSuchGate": true}}), vec!["featureGates", "NoSuchGate"]),
        (json!({"evictionHard": {"memory.available": "lots"}}), vec!["evictionHard.memory.available", "\"lots\""]),
        (json!({"kind": "Pod"}), vec!["\"Pod\"", "KubeletConfiguration"]),
    ] {
        let (code, out, why) = start(&configuration(&node, "wrong.json", &fields));
        assert_eq!(code, 1, "{fields}: {out}{why}");
        for text in wanted {
            assert!(why.contains(text), "{fields}: no {text:?} in {why}");
        }
    }
    let (code, _, why) = start("/nowhere/kubelet.yaml");
    assert!(
        code == 1 && why.contains("/nowhere/kubelet.yaml") && why.contains("No such file or directory"),
        "{code} {why}"
    );
    let broken = node.dir().join("broken.yaml").display().to_string();
    fs::write(&broken, "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: [1\n").unwrap();
    let (code, _, why) = start(&broken);
    assert!(code == 1 && why.contains(&broken), "{code} {why}");
    // `check` says the same and starts nothing.
    let wrong = configuration(&node, "wrong.json", &json!({"maxPods": "many"}));
    let (code, out, _) = run(&["check", "--json", "--config", &wrong, "--root-dir", &root]);
    let findings: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 1);
    assert!(finding(&findings, "error", "maxPods").contains("\"many\""), "{findings:#}");
    assert!(!Path::new(&root).join("pods").exists(), "a refused start made directories");

    let (code, _, why) =
        start(&configuration(&node, "wrong.json", &json!({"containerRuntimeEndpoint": "unix:///nowhere.sock"})));
    assert!(code == 1 && why.contains("unix:///nowhere.sock"), "{code} {why}");

    // Unknown fields and duplicate keys are told of, and the rest counts.
    node.configure("noSuchField", json!(1));
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    node.run();
    node.wait_running("p");
    let log = node.log();
    assert!(log.lines().any(|l| l.starts_with('W') && l.contains("config.json") && l.contains("noSuchField")), "{log}");
}

/// The message of the first finding of this weight that names `text`; empty when there is none.
fn finding(findings: &Value, severity: &str, text: &str) -> String {
    let all = findings.as_array().or_else(|| findings["findings"].as_array());
    let mut messages =
        all.into_iter().flatten().filter(|f| f["severity"] == severity).filter_map(|f| f["message"].as_str());
    messages.find(|m| m.contains(text)).unwrap_or_default().to_owned()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_second_agent_and_a_taken_port_are_refused() {
    let node = Node::start();
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    let before = node.wait_running("p");
    let other = node.dir().join("other-root").display().to_string();
    let [port, healthz, read_only] = rig::free_ports().unwrap();
    let free = json!({"port": port, "healthzPort": healthz, "readOnlyPort": read_only});
    let taken = |key: &str| {
        let mut fields = free.clone();
        fields[key] = json!(node.port(key));
        configuration(&node, "second.json", &fields)
    };
    for key in ["healthzPort", "readOnlyPort"] {
        let (code, _, why) = run(&["--config", &taken(key), "--root-dir", &other, "--hostname-override=e2e"]);
        assert_eq!(code, 1, "{key}: {why}");
        let named = format!(":{}", node.port(key));
        assert!(
            why.lines().any(|l| l.starts_with('E') && l.contains(&named) && l.to_lowercase().contains("in use")),
            "{key}: {why}"
        );
    }
    let own = configuration(&node, "second.json", &free);
    let root = node.root().display().to_string();
    let (code, _, why) = run(&["--config", &own, "--root-dir", &root, "--hostname-override=e2e"]);
    assert_eq!(code, 1, "a second agent on the same directory went on: {why}");
    assert!(why.contains("rubelet.sock"), "{why}");

    // The first one noticed nothing.
    let after = node.pod("p").unwrap();
    assert_eq!((id(&after, "c"), restarts(&after, "c"), uid(&after)), (id(&before, "c"), 0, uid(&before)));
    assert_eq!(node.reports().len(), 1, "its local socket was taken away");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn endpoints_and_commands_of_a_running_agent() {
    let mut node = Node::start();
    let mut web = pod("web", [container("c", HOLD), container("d", HOLD)]);
    web["spec"]["initContainers"] = json!([container("prepare", "true"), sidecar("side", HOLD)]);
    web["metadata"]["labels"] = json!({"app": "web"});
    node.write("web.yaml", &web);
    node.write("loops.yaml", &pod("loops", [container("c", "exit 3")]));
    let mut missing = pod("missing", [container("c", HOLD)]);
    missing["spec"]["containers"][0]["image"] = json!("lab.test/nosuch:1");
    missing["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
    node.write("missing.yaml", &missing);
    let shown = node.wait_running("web");
    node.wait_pod("it waits", "loops", |p| e2e::status::waiting(p, "c") == "CrashLoopBackOff");
    node.wait_pod("no image", "missing", |p| e2e::status::waiting(p, "c") == "ErrImageNeverPull");

    // Health.
    let healthz = http::get_tcp(node.port("healthzPort"), "/healthz").unwrap();
    assert_eq!(healthz, (200, b"ok".to_vec()));
    assert_eq!(http::get_tcp(node.port("healthzPort"), "/nothing").unwrap().0, 404);
    assert_eq!(node.get("/healthz").unwrap(), (200, "ok".to_owned()));
    assert_eq!(node.get("/nothing").unwrap().0, 404);

    // /pods.
    let (code, body) = node.get("/pods").unwrap();
    let list: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((code, &list["kind"], &list["apiVersion"]), (200, &json!("PodList"), &json!("v1")));
    assert_eq!(list["items"].as_array().unwrap().len(), 3);
    assert_eq!(shown["metadata"]["labels"]["app"], "web");
    let annotations = &shown["metadata"]["annotations"];
    assert_eq!(annotations["kubernetes.io/config.source"], "file");
    assert!(annotations["kubernetes.io/config.seen"].is_string());
    let status = &shown["status"];
    for field in [
        "phase",
        "conditions",
        "podIP",
        "podIPs",
        "startTime",
        "qosClass",
        "containerStatuses",
        "initContainerStatuses",
    ] {
        assert!(!status[field].is_null(), "no status.{field}: {status:#}");
    }
    let mut conditions: Vec<&str> =
        status["conditions"].as_array().unwrap().iter().map(|c| c["type"].as_str().unwrap()).collect();
    conditions.sort_unstable();
    assert_eq!(conditions, ["ContainersReady", "Initialized", "PodReadyToStartContainers", "PodScheduled", "Ready"]);
    let c = e2e::status::of(&shown, "c");
    for field in ["containerID", "image", "imageID", "lastState", "name", "ready", "restartCount", "started", "state"] {
        assert!(!c[field].is_null(), "no {field} in the status of a container: {c:#}");
    }
    assert!(c["containerID"].as_str().unwrap().starts_with("containerd://"));

    // /metrics.
    let (code, metrics) = node.get("/metrics").unwrap();
    assert_eq!(code, 200);
    for name in [
        "kubelet_node_name",
        "kubelet_runtime_operations_total",
        "kubelet_runtime_operations_duration_seconds",
        "kubelet_pleg_relist_duration_seconds",
        "kubelet_pleg_relist_interval_seconds",
        "kubelet_pleg_last_seen_seconds",
        "kubelet_pod_worker_duration_seconds",
        "kubelet_pod_start_duration_seconds",
        "kubelet_running_pods",
        "kubelet_running_containers",
        "kubelet_started_pods_total",
        "kubelet_started_containers_total",
        "kubelet_desired_pods",
        "kubelet_active_pods",
        "kubelet_run_podsandbox_duration_seconds",
        "kubelet_cgroup_manager_duration_seconds",
        "kubernetes_build_info",
        "kubernetes_feature_enabled",
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_start_time_seconds",
    ] {
        assert!(metrics.lines().any(|l| l.starts_with(&format!("# TYPE {name} "))), "no metric {name}");
    }
    let value = |line: &str| -> f64 {
        metrics
            .lines()
            .find_map(|l| l.strip_prefix(line)?.trim().parse().ok())
            .unwrap_or_else(|| panic!("no line {line}"))
    };
    assert_eq!(value("kubelet_node_name{node=\"e2e\"}"), 1.0);
    assert!(value("kubelet_runtime_operations_total{operation_type=\"create_container\"}") >= 4.0);
    assert!(value("kubelet_started_pods_total") >= 3.0);
    assert!(
        metrics
            .lines()
            .filter(|l| !l.starts_with('#'))
            .all(|l| l.rsplit(' ').next().is_some_and(|v| v.parse::<f64>().is_ok()))
    );

    // The local socket.
    let socket = node.root().join("rubelet/rubelet.sock");
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let reports = node.reports();
    assert_eq!(reports.len(), 3);
    let web = reports.iter().find(|r| r.name == "web-e2e").unwrap();
    assert_eq!(
        (web.namespace.as_str(), web.phase.as_str(), web.ready, web.state.as_str(), web.source.as_str()),
        ("default", "Running", true, "syncing", "file")
    );
    let kinds: Vec<(&str, &str)> = web.containers.iter().map(|c| (c.name.as_str(), c.kind.as_str())).collect();
    assert_eq!(kinds, [("prepare", "init"), ("side", "sidecar"), ("c", "app"), ("d", "app")]);
    assert!(web.timeline.len() > 5 && web.timeline.iter().all(|s| s.ended.is_some()), "{:#?}", web.timeline);

    // The commands.
    let root = node.root().display().to_string();
    let at = |arguments: &[&str]| run(&[arguments, &["--root-dir", &root]].concat());
    let table = wait_until("the table says what loops waits for", seconds(30), || {
        let (code, table, _) = at(&["pods"]);
        assert_eq!(code, 0);
        table.contains("CrashLoopBackOff; next try in").then_some(table)
    });
    let row = |name: &str| table.lines().find(|l| l.contains(name)).unwrap_or_else(|| panic!("no {name} in\n{table}"));
    assert!(table.lines().next().unwrap().starts_with("NAMESPACE"), "{table}");
    assert!(row("web-e2e").contains("3/3") && row("web-e2e").contains("Running"), "{table}");
    assert!(
        row("loops-e2e").contains("0/1")
            && row("loops-e2e").contains("CrashLoopBackOff")
            && row("loops-e2e").contains("container \"c\""),
        "{table}"
    );
    assert!(row("missing-e2e").contains("ErrImageNeverPull"), "{table}");
    assert!(!table.contains('\u{1b}'), "colour without a terminal");
    let (_, colours, _) = at(&["pods", "--color", "always"]);
    assert!(colours.contains('\u{1b}'), "no colour though asked for");
    let (code, out, _) = at(&["pods", "--json", "-n", "default"]);
    let pods: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, pods.as_array().unwrap().len()), (0, 3));
    let (_, out, _) = at(&["pods", "--json", "-n", "elsewhere"]);
    assert_eq!(out.trim(), "[]");

    let (code, text, _) = at(&["explain", "pod", "web"]);
    assert_eq!(code, 0, "{text}");
    assert!(["web-e2e", "side", "prepare"].iter().all(|t| text.contains(t)), "{text}");
    let (code, text, _) = at(&["explain", "pod", "loops-e2e", "-n", "default"]);
    assert!(code == 0 && text.contains("exit code 3"), "{text}");
    let (code, text, _) = at(&["explain", "pod", "missing"]);
    assert!(code == 0 && text.contains("ErrImageNeverPull") && text.contains("lab.test/nosuch:1"), "{text}");
    let (code, out, _) = at(&["explain", "pod", "web", "--json"]);
    assert_eq!((code, &serde_json::from_str::<Value>(&out).unwrap()["name"]), (0, &json!("web-e2e")));
    let (code, _, why) = at(&["explain", "pod", "nosuch"]);
    assert!(code == 1 && why.contains("nosuch"), "{code} {why}");
    let (code, text, _) = at(&["explain", "node"]);
    assert!(code == 0 && text.contains("e2e"), "{code} {text}");
    let (code, out, _) = at(&["explain", "node", "--json"]);
    let told: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &told["ready"], &told["pods"]), (0, &json!(true), &json!(3)), "{told:#}");

    // `check` with the agent's own flags, while it runs.
    let config = node.dir().join("config.json").display().to_string();
    let (_, out, _) = run(&["check", "--json", "--config", &config, "--root-dir", &root]);
    let findings: Value = serde_json::from_str(&out).unwrap();
    assert!(finding(&findings, "ok", "containerd").contains(&node.runtime_version()), "{findings:#}");

    // SIGTERM: the end of the agent alone.
    let status = node.stop();
    assert_eq!(status.code(), Some(0));
    assert_eq!(node.status(id(&shown, "c")).state, cri_api::v1::ContainerState::ContainerRunning as i32);
    assert!(!socket.exists() || http::get_unix(&socket, "/v1/pods").is_err());
    let (code, _, why) = at(&["pods"]);
    assert!(code == 1 && why.contains(&socket.display().to_string()), "{code} {why}");
    node.run();
    let after = node.wait_running("web");
    assert_eq!((id(&after, "c"), restarts(&after, "c"), uid(&after)), (id(&shown, "c"), 0, uid(&shown)));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn log_lines_as_json() {
    let node = Node::with(Options::default().flag("--logging-format=json"));
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    node.wait_running("p");
    node.write_bytes("bad.yaml", b"a: [b");
    wait_until("the bad file is told of", seconds(20), || node.log().contains("bad.yaml").then_some(()));
    let log = node.log();
    let lines: Vec<Value> =
        log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    assert!(lines.len() > 5);
    for line in &lines {
        assert!(line["ts"].is_number() && line["msg"].is_string(), "{line}");
    }
    assert!(lines.iter().any(|l| l["pod"] == "p-e2e_default" || l["pod"]["name"] == "p-e2e"), "no line about the pod");
}
