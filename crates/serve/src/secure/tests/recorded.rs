//! The Go kubelet's answers to the same requests (`testdata/README.md`).

use super::*;

fn pods() -> FakePods {
    let status = |containers: serde_json::Value| json!({ "containerStatuses": containers });
    let plain = |state: serde_json::Value| json!({"name": "app", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state});
    let ended = json!({"terminated": {"exitCode": 0, "containerID": "containerd://done-app"}});
    let init = json!({"initContainerStatuses": [running("first", "init-first")],
                      "containerStatuses": [plain(json!({"waiting": {"reason": "PodInitializing"}}))]});
    FakePods(HashMap::from([
        (
            "web-node-a",
            pod(
                "web",
                &[("app", false), ("tty", true)],
                status(json!([running("app", "web-app"), running("tty", "web-tty")])),
            ),
        ),
        ("done-node-a", pod("done", &[("app", false)], status(json!([plain(ended)])))),
        (
            "nopull-node-a",
            pod(
                "nopull",
                &[("app", false)],
                status(json!([plain(json!({"waiting": {"reason": "ImagePullBackOff"}}))])),
            ),
        ),
        ("init-node-a", pod("init", &[("first", false), ("app", false)], init)),
    ]))
}

fn fill(running: &Running) {
    let directory = running.directory.path();
    let out = (0..20).map(|i| ("stdout", format!("out {i}")));
    let lines: Vec<_> = out.chain((0..20).map(|i| ("stderr", format!("err {i}")))).collect();
    let mut logs = running.containers.logs.lock().unwrap();
    for (id, lines) in [
        ("web-app", lines),
        ("init-first", vec![("stdout", "init".to_owned())]),
        ("done-app", vec![("stdout", "finished".to_owned())]),
    ] {
        let log = ContainerLog { path: put_log(directory, id, &lines), running: false };
        logs.insert(id.to_owned(), log);
    }
    let ids = [("web", "app"), ("web", "tty"), ("init", "first")];
    let ids = ids.map(|(uid, name)| ((uid.to_owned(), name.to_owned()), format!("{uid}-{name}")));
    running.containers.running.lock().unwrap().extend(ids);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_the_go_kubelet() {
    let handlers = Running::start(pods(), |_, _| {}).await;
    let none = Running::start(pods(), |_, parts| parts.handlers.debugging = false).await;
    fill(&handlers);
    let mut asked = 0;
    for line in include_str!("../testdata/go-kubelet.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| row[key].as_str().unwrap();
        let server = if text("server") == "handlers" { &handlers } else { &none };
        let map = |key: &str| -> BTreeMap<String, String> { serde_json::from_value(row[key].clone()).unwrap() };
        let sent = map("headers");
        let sent: Vec<(&str, &str)> = sent.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let mut answer = server.ask_as(None, &format!("{} {}", text("method"), text("path")), &sent).await;
        answer.headers.remove("transfer-encoding");
        let expected = (row["status"].as_u64().unwrap(), map("answer"), text("body").to_owned());
        assert_eq!((u64::from(answer.status), answer.headers, answer.body), expected, "{line}");
        asked += 1;
    }
    assert!(asked > 200);
}

/// The files that `/logs/` shows.
fn fill_system_logs(running: &Running) {
    let root = running.directory.path().join("var-log");
    for (path, text) in [
        ("h6b/a.log", "one\ntwo\nthree\n"),
        ("h6b/empty.log", ""),
        ("h6b/we ird&.log", "<b>"),
        ("h6b/q?x#y\"z.txt", "hi"),
        ("h6b/sub/x", "x\n"),
        ("h6svc/h6svc.log", "svc1\n"),
        ("h6top.log", "top\n"),
        ("h6bare", "bare\n"),
        ("h6bare.log", "barelog\n"),
        ("h6both/h6both.log", "inner\n"),
        ("h6both.log", "outer\n"),
    ] {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    for (link, to) in [("h6b/link.log", "/etc/passwd"), ("h6link.log", "/etc/hostname"), ("h6in.log", "h6top.log")] {
        std::os::unix::fs::symlink(to, root.join(link)).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debugging_handlers_as_the_go_kubelet() {
    let with = |change: fn(&mut Handlers)| Running::start(pods(), move |_, parts| change(&mut parts.handlers));
    let off: fn(&mut Handlers) = |h| {
        (h.system_logs, h.log_query, h.profiling, h.debug_flags) = (false, false, false, false);
        (h.checkpoint, h.statusz) = (false, false);
    };
    let servers = [
        ("handlers", with(|_| {}).await),
        ("off", with(off).await),
        ("nodebug", with(|h| h.debugging = false).await),
        ("noq", with(|h| (h.log_query, h.flagz) = (false, false)).await),
    ];
    servers.iter().for_each(|(_, server)| fill_system_logs(server));
    for line in include_str!("../testdata/go-kubelet-debug.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let server = &servers.iter().find(|(name, _)| *name == text("server")).unwrap().1;
        let map = |key: &str| -> BTreeMap<String, String> { serde_json::from_value(row[key].clone()).unwrap() };
        let (headers, body) = (map("headers"), text("sent"));
        let headers: Vec<(&str, &str)> = headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let mut answer = server.send(None, &format!("{} {}", text("method"), text("path")), &headers, body).await;
        for left_out in ["transfer-encoding", "last-modified"] {
            answer.headers.remove(left_out);
        }
        let expected = (row["status"].as_u64().unwrap(), map("answer"), text("body").to_owned());
        assert_eq!((u64::from(answer.status), answer.headers, answer.body), expected, "{line}");
    }
}

#[tokio::test]
async fn debugging_pages_that_the_record_leaves_out() {
    let running = Running::start(pods(), |_, _| {}).await;
    fill(&running);
    fill_system_logs(&running);
    let page = running.ask("GET /flagz").await;
    assert!(page.body.ends_with("debugging purposes only.\naddress=0.0.0.0\nv=0\n"), "{}", page.body);
    let accept = |kind: &str| format!("application/json;v=v1alpha1;g=config.k8s.io;as={kind}");
    let page = running.ask_as(None, "GET /flagz", &[("accept", &accept("Flagz"))]).await;
    assert_eq!(page.headers["content-type"], "application/json;g=config.k8s.io;v=v1alpha1;as=Flagz");
    assert!(page.headers["warning"].starts_with("299 - \"This version of the flagz endpoint is deprecated."));
    let flags = json!({"kind": "Flagz", "apiVersion": "config.k8s.io/v1alpha1", "metadata": {"name": "kubelet"},
                       "flags": {"address": "0.0.0.0", "v": "0"}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(&page.body).unwrap(), flags);
    let page = running.ask("GET /statusz").await.body;
    assert!(
        page.contains("\nUp: 0 hr 00 min 0") && page.contains("\nBinary version: 1.36.1\nEmulation version: 1.36\n")
    );
    let page = running.ask_as(None, "GET /statusz", &[("accept", &accept("Statusz"))]).await;
    let status: serde_json::Value = serde_json::from_str(&page.body).unwrap();
    assert_eq!(status["paths"], json!(["/configz", "/debug", "/flagz", "/healthz", "/metrics"]));
    for (name, wanted) in [
        ("cmdline", ""),
        ("symbol", "num_symbols: 0\n"),
        ("goroutine?debug=1", " alive, "),
        ("heap", "VmRSS"),
        ("profile?seconds=1", "processor time over 1 s"),
    ] {
        let page = running.ask(&format!("GET /debug/pprof/{name}")).await;
        assert!(page.status == 200 && page.body.contains(wanted), "{page:?}");
    }
    let page = running.ask("GET /debug/pods").await;
    assert!(
        page.headers["content-type"] == "text/html; charset=utf-8" && page.body.contains("<h1>Pods of "),
        "{page:?}"
    );
    assert_eq!(running.ask("POST /debug/pods").await.status, 405);
    // What leads out of the directory.
    for path in ["/logs/h6b/link.log", "/logs/..%2f..%2fetc%2fpasswd", "/logs/%2e%2e/etc/passwd", "/logs/h6link.log"] {
        let answer = running.ask(&format!("GET {path}")).await;
        assert_eq!((answer.status, answer.body.as_str()), (403, "403 Forbidden\n"), "{path}");
    }
    let modified = running.ask("GET /logs/h6b/a.log").await.headers["last-modified"].clone();
    let answer = running.ask_as(None, "GET /logs/h6b/a.log", &[("if-modified-since", &modified)]).await;
    assert_eq!((answer.status, answer.body.as_str()), (304, ""));
}

#[tokio::test]
async fn checkpoints() {
    let running = Running::start(pods(), |_, _| {}).await;
    fill(&running);
    let checkpoint = "POST /checkpoint/default/web-node-a/app?timeout=7";
    let answer = running.ask(checkpoint).await;
    let items: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    let path = items["items"][0].as_str().unwrap();
    let begin = running.directory.path().join("checkpoints/checkpoint-web-node-a_default-app-2").display().to_string();
    assert!(answer.status == 200 && path.starts_with(&begin) && path.ends_with("Z.tar"), "{answer:?}");
    assert_eq!(*running.containers.asked.lock().unwrap(), [format!("checkpoint web-app {path} 7s")]);
    let mode = std::fs::metadata(running.directory.path().join("checkpoints")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&mode) & 0o777, 0o700);
    *running.containers.url.lock().unwrap() = "fail".to_owned();
    let answer = running.ask(checkpoint).await;
    let text = "checkpointing of default/web-node-a/app failed (rpc error: code = NotFound desc = no such thing)";
    assert_eq!((answer.status, answer.body.as_str()), (500, text));
    let answer = running.ask("POST /checkpoint/default/done-node-a/app").await;
    let text = "checkpointing of default/done-node-a/app failed (container app not found)";
    assert_eq!((answer.status, answer.body.as_str()), (500, text));
}

#[tokio::test]
async fn pages_that_the_record_leaves_out() {
    let running = Running::start(pods(), |_, _| {}).await;
    fill(&running);
    let json = |answer: &Reply1| serde_json::from_str::<serde_json::Value>(&answer.body).unwrap();
    let answer = running.ask("GET /runningpods/").await;
    assert_eq!(answer.headers["content-type"], "application/json");
    let container = json!([{"name": "app", "image": "sha256:7f44", "resources": {}}]);
    assert_eq!(json(&answer)["items"][0]["spec"]["containers"], container);
    assert_eq!(json(&answer)["items"][1]["spec"], json!({"containers": null}));
    assert_eq!(running.ask_as(None, "GET /runningpods/", &[("accept", "text/plain")]).await.status, 406);
    assert_eq!(running.ask("GET /runningpods?x=1").await.headers["location"], "/runningpods/?x=1");
    assert!(json(&running.ask("GET /configz").await)["kubeletconfig"].is_object());
    assert_eq!(json(&running.ask("GET /%70ods").await)["kind"], "PodList");
    let answer = running.ask("GET /containerLogs/default/web-node-a/app?timestamps=true&limitBytes=36").await;
    let (stamp, line) = answer.body.split_once(' ').unwrap();
    assert!(stamp.len() == 30 && stamp.parse::<jiff::Timestamp>().is_ok(), "{stamp}");
    assert_eq!(line, "out 0");
    // A log that is a link to elsewhere, and one to a place among the logs.
    let (log, pod_logs) = (running.directory.path().join("done-app"), running.directory.path().join("pod-logs"));
    std::fs::create_dir(&pod_logs).unwrap();
    std::fs::rename(&log, pod_logs.join("0.log")).unwrap();
    std::os::unix::fs::symlink(pod_logs.join("0.log"), &log).unwrap();
    assert_eq!(running.ask("GET /containerLogs/default/done-node-a/app").await.body, "finished\n");
    std::fs::remove_file(&log).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &log).unwrap();
    let body = running.ask("GET /containerLogs/default/done-node-a/app").await.body;
    assert_eq!(body, format!("failed to open log file {log:?}: a link leads out of {}", pod_logs.display()));
    // The log is gone, or the container.
    std::fs::remove_file(running.directory.path().join("done-app")).unwrap();
    let path = running.directory.path().join("done-app").display().to_string();
    let gone = format!("failed to try resolving symlinks in path {path:?}: lstat {path}: no such file or directory");
    let answer = running.ask("GET /containerLogs/default/done-node-a/app").await;
    assert_eq!((answer.status, answer.body), (200, gone));
    running.containers.logs.lock().unwrap().clear();
    let answer = running.ask("GET /containerLogs/default/done-node-a/app").await;
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (200, "unable to retrieve container logs for containerd://done-app")
    );
    let page = running.metrics.encode().unwrap();
    for series in [
        r#"kubelet_http_requests_total{long_running="false",method="GET",path="containerLogs",server_type="readwrite"} 5"#,
        r#"kubelet_http_inflight_requests{long_running="false",method="GET",path="containerLogs",server_type="readwrite"} 0"#,
    ] {
        assert!(page.contains(series), "{series}");
    }
}
