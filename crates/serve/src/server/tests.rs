//! Real sockets: every endpoint, wrong paths and methods, many connections, slow clients, drain. Expected answers are what
//! net/http, go-restful 3.13 and the Go kubelet's handlers give.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};

use model::api::{ObjectMeta, Pod};
use model::report::{NodeReport, PodReport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;

pub(crate) fn pod_report(namespace: &str, name: &str, uid: &str) -> PodReport {
    PodReport {
        uid: uid.into(),
        namespace: namespace.into(),
        name: name.into(),
        source: "file".into(),
        phase: "Running".into(),
        ready: true,
        ips: vec!["10.0.0.1".into()],
        state: "syncing".into(),
        step: None,
        last_error: None,
        waits_for: Vec::new(),
        containers: Vec::new(),
        timeline: Vec::new(),
    }
}

/// A node whose answers tests can change or hold back.
#[derive(Default)]
pub(crate) struct FakeNode {
    pods: usize,
    stuck: AtomicBool,
    /// While true, `pods` waits.
    gate: Mutex<bool>,
    opened: Condvar,
    entered: tokio::sync::Notify,
}

impl FakeNode {
    fn open(&self) {
        *self.gate.lock().unwrap() = false;
        self.opened.notify_all();
    }
}

/// Figures that nobody has.
pub(crate) struct NoFigures;

#[async_trait::async_trait]
impl Figures for NoFigures {
    async fn summary(&self, _only_cpu_and_memory: bool) -> Result<bytes::Bytes, String> {
        Ok(bytes::Bytes::from_static(b"{}"))
    }

    async fn cadvisor(&self) -> Result<bytes::Bytes, String> {
        Ok(bytes::Bytes::new())
    }

    async fn resource(&self) -> bytes::Bytes {
        bytes::Bytes::new()
    }

    async fn on_main_page(&self) -> String {
        String::new()
    }
}

impl NodeView for FakeNode {
    fn pods(&self) -> Vec<Pod> {
        self.entered.notify_one();
        let closed = self.gate.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
        (0..self.pods)
            .map(|i| Pod {
                metadata: ObjectMeta { name: Some(format!("pod-{i}")), ..ObjectMeta::default() },
                ..Pod::default()
            })
            .collect()
    }

    fn pod_reports(&self) -> Vec<PodReport> {
        vec![
            pod_report("default", "web-node-a", "0f7af893"),
            pod_report("default", "web-node-b", "3fcf1f62"),
            pod_report("kube-system", "etcd-node-a", "436d763b"),
        ]
    }

    fn node_report(&self) -> NodeReport {
        NodeReport {
            name: "node-a".into(),
            ready: true,
            message: "kubelet is posting ready status".into(),
            findings: Vec::new(),
            pods: 3,
            pods_running: 3,
        }
    }

    fn sync_loop_healthy(&self) -> Result<(), String> {
        match self.stuck.load(Ordering::Relaxed) {
            true => Err("sync Loop took longer than expected".into()),
            false => Ok(()),
        }
    }

    fn flags(&self) -> Vec<(String, String)> {
        vec![("address".into(), "0.0.0.0".into()), ("v".into(), "0".into())]
    }

    fn configz(&self) -> serde_json::Value {
        serde_json::json!({"kubeletconfig": {"staticPodPath": "/etc/kubernetes/manifests"}})
    }
}

struct Running {
    node: Arc<FakeNode>,
    metrics: Arc<Metrics>,
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<Draining>,
}

enum Kind {
    Healthz(Checks),
    ReadOnly,
}

async fn start(kind: Kind, node: FakeNode, limits: Limits) -> Running {
    let node = Arc::new(node);
    let metrics = Arc::new(Metrics::new().unwrap());
    let health = Health::new(node.clone(), metrics.clone(), None);
    let server = match kind {
        Kind::Healthz(checks) => Server::healthz(health, checks),
        Kind::ReadOnly => Server::read_only(node.clone(), Arc::new(NoFigures), metrics.clone(), health),
    };
    let bound = server.with_limits(limits).bind_tcp(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = bound.local_addr().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(bound.run(stop.clone()));
    Running { node, metrics, address, stop, task }
}

impl Running {
    /// One request on a connection of its own: the head without Date, and the body.
    async fn ask(&self, request: &str) -> (String, String) {
        let (method, rest) = request.split_once(' ').unwrap();
        let (path, extra) = rest.split_once(' ').unwrap_or((rest, ""));
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let extra = if extra.is_empty() { String::new() } else { format!("{extra}\r\n") };
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{extra}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let head: Vec<&str> =
            head.split("\r\n").filter(|line| !line.starts_with("date:") && *line != "connection: close").collect();
        (head.join("\n"), body.to_owned())
    }

    async fn body(&self, request: &str) -> (u16, String) {
        let (head, body) = self.ask(request).await;
        (head[9..12].parse().unwrap(), body)
    }
}

#[tokio::test]
async fn read_only_answers_as_go() {
    let running = start(Kind::ReadOnly, FakeNode { pods: 1, ..FakeNode::default() }, Limits::default()).await;
    let text = "content-type: text/plain; charset=utf-8";
    let nosniff = "x-content-type-options: nosniff";
    let pods = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[{"metadata":{"name":"pod-0"},"spec":{"containers":[]},"status":{}}]}"#;
    let html = "content-type: text/html; charset=utf-8";
    for (request, head, body) in [
        ("GET /pods", "200 OK\ncontent-type: application/json".to_owned(), pods),
        ("GET /pods/", "200 OK\ncontent-type: application/json".to_owned(), pods),
        ("GET /pods?x=1", "200 OK\ncontent-type: application/json".to_owned(), pods),
        ("GET /pods/x", format!("404 Not Found\n{text}"), "404: Page Not Found"),
        ("POST /pods/x", format!("404 Not Found\n{text}"), "404: Page Not Found"),
        ("POST /pods", format!("405 Method Not Allowed\n{text}\nallow: GET"), "405: Method Not Allowed"),
        ("OPTIONS /pods", format!("405 Method Not Allowed\n{text}\nallow: GET"), "405: Method Not Allowed"),
        ("DELETE /pods/", format!("405 Method Not Allowed\n{text}\nallow: GET"), "405: Method Not Allowed"),
        (
            "GET /pods accept: text/plain",
            format!("406 Not Acceptable\n{text}"),
            "406: Not Acceptable\n\nAvailable representations: application/json",
        ),
        ("GET /stats/summary", "200 OK\ncontent-type: application/json".to_owned(), "{}"),
        ("GET /stats/other", format!("404 Not Found\n{text}"), "404: Page Not Found"),
        ("GET /nope", format!("404 Not Found\n{text}\n{nosniff}"), "404 page not found\n"),
        ("POST /", format!("404 Not Found\n{text}\n{nosniff}"), "404 page not found\n"),
        ("GET /metrics/", format!("404 Not Found\n{text}\n{nosniff}"), "404 page not found\n"),
        ("POST /run/ns/pod/c", format!("405 Method Not Allowed\n{text}\n{nosniff}"), "Debug endpoints are disabled.\n"),
        ("GET /runningpods/", format!("405 Method Not Allowed\n{text}\n{nosniff}"), "Debug endpoints are disabled.\n"),
        (
            "GET /run",
            format!("307 Temporary Redirect\n{html}\nlocation: /run/"),
            "<a href=\"/run/\">Temporary Redirect</a>.\n\n",
        ),
        ("GET /healthz", format!("200 OK\n{text}\n{nosniff}"), "ok"),
        ("POST /healthz/ping", format!("200 OK\n{text}"), "ok"),
        ("GET /healthz/log", format!("200 OK\n{text}"), "ok"),
        ("GET /healthz/syncloop", format!("200 OK\n{text}"), "ok"),
        ("GET /healthz/nope", format!("404 Not Found\n{text}\n{nosniff}"), "404 page not found\n"),
    ] {
        let expected = format!("HTTP/1.1 {head}\ncontent-length: {}", body.len());
        assert_eq!(running.ask(request).await, (expected, body.to_owned()), "{request}");
    }
    let (head, body) = running.ask("HEAD /pods").await;
    assert_eq!(head, format!("HTTP/1.1 405 Method Not Allowed\n{text}\nallow: GET\ncontent-length: 23"));
    assert_eq!(body, "");
    assert_eq!(running.ask("HEAD /healthz/ping").await.1, "");
}

#[tokio::test]
async fn metrics_page_and_request_metrics() {
    let running = start(Kind::ReadOnly, FakeNode::default(), Limits::default()).await;
    running.metrics.set_node_name("node-a");
    running.ask("GET /pods/").await;
    running.ask("BREW /nope").await;
    let (head, page) = running.ask("GET /metrics").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\ncontent-type: text/plain; version=0.0.4; charset=utf-8\n"), "{head}");
    for line in [
        "kubelet_node_name{node=\"node-a\"} 1",
        "kubelet_http_requests_total{long_running=\"false\",method=\"GET\",path=\"pods\",server_type=\"readonly\"} 1",
        "kubelet_http_requests_total{long_running=\"false\",method=\"other\",path=\"other\",server_type=\"readonly\"} 1",
        "kubelet_http_inflight_requests{long_running=\"false\",method=\"GET\",path=\"metrics\",server_type=\"readonly\"} 1",
        "kubelet_http_requests_duration_seconds_count{long_running=\"false\",method=\"GET\",path=\"pods\",server_type=\"readonly\"} 1",
    ] {
        assert!(page.lines().any(|have| have == line), "{line}\n{page}");
    }
    running.ask("GET /healthz").await;
    let (_, page) = running.ask("GET /metrics/slis").await;
    assert!(page.contains("kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 1\n"), "{page}");
}

#[tokio::test]
async fn healthz_forms() {
    let running = start(Kind::Healthz(Checks::All), FakeNode::default(), Limits::default()).await;
    let passed = |lines: &str| (200, format!("{lines}healthz check passed\n"));
    let failed = |lines: &str| (500, format!("{lines}healthz check failed\n"));
    assert_eq!(running.body("GET /healthz").await, (200, "ok".into()));
    assert_eq!(
        running.body("GET /healthz?verbose").await,
        passed("[+]ping ok\n[+]log ok\n[+]syncloop ok\n[+]device-plugin ok\n")
    );
    assert_eq!(
        running.body("GET /healthz?verbose&exclude=log&exclude=nope").await,
        passed(concat!(
            "[+]ping ok\n[+]log excluded: ok\n[+]syncloop ok\n[+]device-plugin ok\n",
            "warn: some health checks cannot be excluded: no matches for \"nope\"\n"
        ))
    );
    assert_eq!(running.body("GET /pods").await, (404, "404 page not found\n".into()));

    running.node.stuck.store(true, Ordering::Relaxed);
    let lines = "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\n[+]device-plugin ok\n";
    assert_eq!(running.body("GET /healthz").await, failed(lines));
    assert_eq!(running.body("GET /healthz?exclude=syncloop").await, (200, "ok".into()));
    assert_eq!(
        running.body("GET /healthz/syncloop").await,
        (500, "internal server error: sync Loop took longer than expected\n".into())
    );
    assert_eq!(running.body("GET /healthz/ping").await, (200, "ok".into()));

    // Go's healthz port runs ping alone.
    let ping = FakeNode { stuck: AtomicBool::new(true), ..FakeNode::default() };
    let running = start(Kind::Healthz(Checks::Ping), ping, Limits::default()).await;
    assert_eq!(running.body("GET /healthz?verbose").await, passed("[+]ping ok\n"));
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let running = start(Kind::Healthz(Checks::Ping), FakeNode::default(), Limits::default()).await;
    let health = Health::new(running.node.clone(), running.metrics.clone(), None);
    let error = Server::healthz(health, Checks::Ping).bind_tcp(running.address).await.unwrap_err();
    let port = running.address.port();
    assert_eq!(
        error.to_string(),
        format!(
            "listening on 127.0.0.1:{port} for the healthz server: port {port} is taken, perhaps by another kubelet: stop what \
             holds it (ss -ltnp 'sport = :{port}' names it) or change healthzBindAddress and healthzPort"
        )
    );
    let foreign = Server::local(running.node.clone()).bind_tcp(([192, 0, 2, 1], 0).into()).await.unwrap_err();
    assert!(foreign.to_string().contains("no interface of this host has the address 192.0.2.1"), "{foreign}");
}

/// More clients than connections at once: all are served, one after the other.
#[tokio::test]
async fn many_connections() {
    let limits = Limits { connections: 8, large_answers: 2, ..Limits::default() };
    let running = Arc::new(start(Kind::ReadOnly, FakeNode { pods: 50, ..FakeNode::default() }, limits).await);
    let mut clients = JoinSet::new();
    for _ in 0..200 {
        let running = running.clone();
        clients.spawn(async move { running.body("GET /pods").await });
    }
    let mut served = 0;
    while let Some(answer) = clients.join_next().await {
        let (status, body) = answer.unwrap();
        assert_eq!(status, 200);
        assert_eq!(body.matches("pod-").count(), 50);
        served += 1;
    }
    assert_eq!(served, 200);
}

/// A client that never ends its head is dropped, and so is an idle one; each frees its slot.
#[tokio::test(start_paused = true)]
async fn slow_heads_and_idle_connections_are_dropped() {
    let limits = Limits { connections: 1, ..Limits::default() };
    let running = start(Kind::Healthz(Checks::Ping), FakeNode::default(), limits).await;
    for (sent, expected) in [("", ""), ("GET /healthz HT", ""), ("GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", "ok")] {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with(expected), "{sent:?}: {answer:?}");
        assert!(expected.is_empty() || answer.starts_with("HTTP/1.1 200"), "{sent:?}: {answer:?}");
    }
}

#[tokio::test]
async fn a_head_too_large_is_refused() {
    let running = start(Kind::Healthz(Checks::Ping), FakeNode::default(), Limits::default()).await;
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    let _ = stream.write_all(format!("GET /healthz HTTP/1.1\r\nx: {}", "y".repeat(70 * 1024)).as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
}

/// A client that asks for much and reads nothing is cut off.
#[tokio::test]
async fn a_client_that_takes_nothing_is_dropped() {
    let limits = Limits { stall: Duration::from_millis(50), connections: 1, ..Limits::default() };
    let node = FakeNode { pods: 300_000, ..FakeNode::default() };
    let running = start(Kind::ReadOnly, node, limits).await;
    let mut stalled = TcpStream::connect(running.address).await.unwrap();
    stalled.write_all(b"GET /pods HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    // The only slot becomes free once the stalled client is dropped.
    assert_eq!(running.body("GET /healthz").await, (200, "ok".into()));
    let mut rest = Vec::new();
    let _ = stalled.read_to_end(&mut rest).await;
    assert!(rest.len() < 16 << 20, "{}", rest.len());
}

/// Answers beyond the limit wait, then are refused; the port's health stays.
#[tokio::test]
async fn large_answers_are_limited() {
    let limits = Limits { large_answers: 1, answer_wait: Duration::from_millis(20), ..Limits::default() };
    let node = FakeNode { gate: Mutex::new(true), ..FakeNode::default() };
    let running = Arc::new(start(Kind::ReadOnly, node, limits).await);
    let first = tokio::spawn({
        let running = running.clone();
        async move { running.body("GET /pods").await }
    });
    running.node.entered.notified().await;
    assert_eq!(running.body("GET /metrics").await.0, 503);
    assert_eq!(running.body("GET /healthz").await.0, 200);
    running.node.open();
    assert_eq!(first.await.unwrap().0, 200);
    assert_eq!(running.body("GET /metrics").await.0, 200);
}

/// Stopping lets a running request end, closes idle connections and takes no new ones.
#[tokio::test]
async fn drain_lets_running_requests_end() {
    let node = FakeNode { gate: Mutex::new(true), ..FakeNode::default() };
    let running = start(Kind::ReadOnly, node, Limits::default()).await;
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    let mut busy = TcpStream::connect(running.address).await.unwrap();
    busy.write_all(b"GET /pods HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    running.node.entered.notified().await;

    running.stop.cancel();
    let draining = running.task.await.unwrap();
    assert!(TcpStream::connect(running.address).await.is_err());
    let mut nothing = Vec::new();
    idle.read_to_end(&mut nothing).await.unwrap();
    assert!(nothing.is_empty());

    let drain = tokio::spawn(draining.drain(Duration::from_secs(60)));
    running.node.open();
    let mut answer = String::new();
    busy.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("\"items\":null}"), "{answer}");
    assert_eq!(drain.await.unwrap(), 0);
}

#[tokio::test]
async fn drain_ends_at_its_deadline() {
    let node = FakeNode { gate: Mutex::new(true), ..FakeNode::default() };
    let running = start(Kind::ReadOnly, node, Limits::default()).await;
    let mut busy = TcpStream::connect(running.address).await.unwrap();
    busy.write_all(b"GET /pods HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    running.node.entered.notified().await;
    running.stop.cancel();
    assert_eq!(running.task.await.unwrap().drain(Duration::from_millis(10)).await, 1);
    running.node.open();
}
