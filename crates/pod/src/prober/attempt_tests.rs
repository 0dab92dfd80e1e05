//! Attempts against real sockets of this machine. The texts are what the Go kubelet's events say of the same servers.

use std::sync::{Arc, Mutex};

use model::api::Probe;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// A server that answers each path with fixed bytes, and what it was asked.
struct Raw {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Raw {
    async fn start(answer: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let (log, answer) = (asked.clone(), Arc::new(answer));
        tokio::spawn(async move {
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let (log, answer) = (log.clone(), answer.clone());
                tokio::spawn(async move {
                    let mut head = vec![0; 4096];
                    let n = stream.read(&mut head).await.unwrap_or(0);
                    let text = String::from_utf8_lossy(&head[..n]).into_owned();
                    let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                    log.lock().unwrap().push(text);
                    match answer(&path) {
                        Some(answer) => {
                            let _ = stream.write_all(answer.as_bytes()).await;
                        }
                        // Says nothing for a long time.
                        None => tokio::time::sleep(Duration::from_secs(60)).await,
                    }
                });
            }
        });
        Self { port, asked }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(status: u16, headers: &str, body: &str) -> Option<String> {
    Some(format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len()))
}

async fn attempt(probe: Value, container: Value) -> Result<Answer, String> {
    let probe: Probe = serde_json::from_value(probe).unwrap();
    let spec = serde_json::from_value(container).unwrap();
    let target = Target { container_id: "c1".into(), spec, pod_ip: Some("127.0.0.1".into()) };
    let runtime = fakes::FakeRuntime::new(1);
    run(&probe, &target, &runtime, Duration::from_secs(1)).await
}

async fn get(port: u16, path: &str) -> Answer {
    attempt(json!({"httpGet": {"port": port, "path": path}}), json!({"name": "c"})).await.unwrap()
}

fn failure(text: impl Into<String>) -> Answer {
    Answer::Failure(text.into())
}

#[tokio::test]
async fn http_by_status_and_redirect() {
    let own = Arc::new(Mutex::new(0));
    let port = own.clone();
    let server = Raw::start(move |path| {
        let port = *port.lock().unwrap();
        match path {
            "/ok" => answer(200, "", "fine"),
            "/big" => answer(200, "", &"x".repeat(50 << 10)),
            "/304" => answer(304, "", ""),
            "/302" => answer(302, "", "no location"),
            "/400" => answer(400, "", "secret"),
            "/same" => answer(302, "Location: /ok\r\n", ""),
            "/dir/relative" => answer(302, "Location: ../ok\r\n", ""),
            "/whole" => answer(301, &format!("Location: http://127.0.0.1:{port}/ok\r\n"), ""),
            "/bad" => answer(307, "Location: /400\r\n", ""),
            "/other" => answer(302, "Location: http://127.0.0.2/contacted\r\n", "gone there"),
            "/loop" => answer(302, "Location: /loop\r\n", ""),
            "/closes" => Some(String::new()),
            _ => None,
        }
    })
    .await;
    *own.lock().unwrap() = server.port;
    let port = server.port;
    let warning = |text: &str| Answer::Warning(format!("Probe terminated redirects, Response body: {text}"));
    for (path, expected) in [
        ("/ok", Answer::Success),
        ("ok", Answer::Success),
        ("/big", Answer::Success),
        ("/304", warning("")),
        ("/302", warning("no location")),
        ("/400", failure("HTTP probe failed with statuscode: 400")),
        ("/same", Answer::Success),
        ("/dir/relative", Answer::Success),
        ("/whole", Answer::Success),
        ("/bad", failure("HTTP probe failed with statuscode: 400")),
        ("/other", warning("gone there")),
        ("/loop", failure("Get \"/loop\": stopped after 10 redirects")),
        ("/closes", failure(format!("Get \"http://127.0.0.1:{port}/closes\": EOF"))),
        (
            "/hangs",
            failure(format!(
                "Get \"http://127.0.0.1:{port}/hangs\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
            )),
        ),
    ] {
        assert_eq!(get(port, path).await, expected, "{path}");
    }
    let loops = server.asked().iter().filter(|r| r.starts_with("GET /loop ")).count();
    assert_eq!(loops, 10);
}

#[tokio::test]
async fn headers_scheme_and_host() {
    let server = Raw::start(|_| answer(200, "", "")).await;
    let port = server.port;
    let with = |headers: Value| {
        attempt(
            json!({"httpGet": {"port": "web", "path": "/", "httpHeaders": headers}}),
            json!({"name": "c", "ports": [{"name": "web", "containerPort": port}]}),
        )
    };
    with(json!([])).await.unwrap();
    with(json!([{"name": "Host", "value": "example.com"}, {"name": "Accept", "value": ""}, {"name": "X-A", "value": "1"}])).await.unwrap();
    let asked: Vec<String> = server.asked().iter().map(|r| r.to_lowercase()).collect();
    assert!(asked[0].contains(&format!("host: 127.0.0.1:{port}\r\n")), "{}", asked[0]);
    assert!(
        asked[0].contains("user-agent: kube-probe/1.36\r\n") && asked[0].contains("accept: */*\r\n"),
        "{}",
        asked[0]
    );
    assert!(asked[1].contains("host: example.com\r\n") && asked[1].contains("x-a: 1\r\n"), "{}", asked[1]);
    assert!(!asked[1].contains("accept:"), "{}", asked[1]);
    let plain =
        attempt(json!({"httpGet": {"port": port, "path": "/x", "scheme": "HTTPS"}}), json!({"name": "c"})).await;
    assert_eq!(
        plain,
        Ok(failure(format!("Get \"https://127.0.0.1:{port}/x\": http: server gave HTTP response to HTTPS client")))
    );
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    assert_eq!(
        get(nobody, "/").await,
        failure(format!(
            "Get \"http://127.0.0.1:{nobody}/\": dial tcp 127.0.0.1:{nobody}: connect: connection refused"
        ))
    );
    let unknown = attempt(json!({"httpGet": {"port": "no"}}), json!({"name": "c"})).await;
    assert!(unknown.is_err(), "what cannot be asked is no verdict: {unknown:?}");
}

#[tokio::test]
async fn tcp_and_grpc() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let tcp = |port: u16| attempt(json!({"tcpSocket": {"port": port}}), json!({"name": "c"}));
    assert_eq!(tcp(port).await, Ok(Answer::Success));
    // It takes connections and says nothing.
    let grpc = |port: u16| attempt(json!({"grpc": {"port": port}}), json!({"name": "c"}));
    let silent = grpc(port).await.unwrap();
    assert!(matches!(&silent, Answer::Failure(t) if t.starts_with("timeout: ")), "{silent:?}");
    drop(listener);
    assert_eq!(tcp(port).await, Ok(failure(format!("dial tcp 127.0.0.1:{port}: connect: connection refused"))));
    assert_eq!(
        grpc(port).await,
        Ok(failure(format!(
            "timeout: failed to connect service \"127.0.0.1:{port}\" within 1s: context deadline exceeded"
        )))
    );
}

#[test]
fn variables_of_the_spec_stand_in_commands() {
    let exec: ExecAction = serde_json::from_value(json!({"command": ["$(A)", "$(B)$(C)", "$$(A)", "$(D)"]})).unwrap();
    let spec = serde_json::from_value(json!({"name": "c", "env": [
        {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}, {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}))
    .unwrap();
    assert_eq!(command(&exec, &spec), ["1", "$(A)", "$(A)", "$(D)"]);
}
