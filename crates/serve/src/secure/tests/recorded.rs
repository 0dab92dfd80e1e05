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
    let none = Running::start(pods(), |_, parts| parts.debugging = false).await;
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
    assert_eq!(answer.body, "2026-11-29T01:02:03.500000000Z out 0");
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
        r#"kubelet_http_requests_total{long_running="false",method="GET",path="containerLogs",server_type="readwrite"} 3"#,
        r#"kubelet_http_inflight_requests{long_running="false",method="GET",path="containerLogs",server_type="readwrite"} 0"#,
    ] {
        assert!(page.contains(series), "{series}");
    }
}
