//! The whole server on real sockets with real TLS; only the runtime, the API server and the pods are fakes.

mod access;
mod follow;
mod handshake;
mod recorded;
mod sessions;
mod websockets;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use cluster::calls::AuthApi;
use cluster::tls::AnyServer;
use cluster::{ClusterError, ClusterResult, ErrorKind};
use cri::port::{CriError, CriResult, ExecOutput, Outcome};
use cri_api::v1;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview, TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{SubjectAccessReview, SubjectAccessReviewStatus};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::server::tests::{FakeNode, NoFigures};
use crate::server::{Bound, Server};

/// A certificate authority made for a test.
pub(super) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pub(super) pem: String,
}

/// A certificate with its key, PEM.
#[derive(Clone)]
pub(super) struct Pair {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl Ca {
    pub(super) fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate for this name (none when empty) and these groups, changed by `change`.
    pub(super) fn sign(&self, name: &str, groups: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        if !name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair { certificate, key: key.serialize_pem() }
    }
}

/// The runtime: containers by name, each with a log.
#[derive(Default)]
pub(super) struct FakeContainers {
    /// Ids of running containers by (uid, name).
    pub(super) running: Mutex<HashMap<(String, String), String>>,
    pub(super) logs: Mutex<HashMap<String, ContainerLog>>,
    /// Where sessions are to go.
    pub(super) url: Mutex<String>,
    pub(super) asked: Mutex<Vec<String>>,
}

impl FakeContainers {
    fn answer(&self, what: String) -> CriResult<String> {
        self.asked.lock().unwrap().push(what);
        let url = self.url.lock().unwrap().clone();
        if url.is_empty() { Err(not_found_error("Exec")) } else { Ok(url) }
    }
}

fn not_found_error(call: &'static str) -> CriError {
    CriError { call, target: String::new(), outcome: Outcome::NotFound, code: 5, message: "no such thing".into() }
}

#[async_trait]
impl ContainerPort for FakeContainers {
    async fn running_container(&self, pod_uid: &str, name: &str) -> CriResult<Option<String>> {
        Ok(self.running.lock().unwrap().get(&(pod_uid.to_owned(), name.to_owned())).cloned())
    }
    async fn ready_sandbox(&self, pod_uid: &str) -> CriResult<Option<String>> {
        Ok(self.running.lock().unwrap().keys().any(|(uid, _)| uid == pod_uid).then(|| format!("sandbox-{pod_uid}")))
    }
    async fn running_pods(&self) -> CriResult<Vec<RunningPod>> {
        let containers = vec![("app".to_owned(), "sha256:7f44".to_owned())];
        let pod = RunningPod { namespace: "default".into(), name: "web-node-a".into(), uid: "web".into(), containers };
        Ok(vec![pod, RunningPod { name: "bare".into(), ..RunningPod::default() }])
    }
    async fn log(&self, id: &str) -> CriResult<ContainerLog> {
        self.logs.lock().unwrap().get(id).cloned().ok_or_else(|| not_found_error("ContainerStatus"))
    }
    async fn run(&self, _: &str, command: Vec<String>) -> CriResult<ExecOutput> {
        let output = |stdout: &str, exit_code| ExecOutput { stdout: stdout.into(), exit_code, ..ExecOutput::default() };
        Ok(match command.first().map(String::as_str) {
            Some("echo") => output(&(command[1..].join(" ") + "\n"), 0),
            _ => output("", 1),
        })
    }
    async fn checkpoint(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        self.asked.lock().unwrap().push(format!("checkpoint {id} {location} {timeout:?}"));
        match self.url.lock().unwrap().is_empty() {
            true => Ok(()),
            false => Err(not_found_error("CheckpointContainer")),
        }
    }
    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String> {
        self.answer(format!("{request:?}"))
    }
    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String> {
        self.answer(format!("{request:?}"))
    }
    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String> {
        self.answer(format!("{request:?}"))
    }
}

/// The API server: tokens it knows, and what their holders may.
#[derive(Default)]
pub(super) struct FakeApi {
    pub(super) tokens: Mutex<BTreeMap<String, String>>,
    /// (user, verb, subresource)
    pub(super) allowed: Mutex<HashSet<(String, String, String)>>,
    pub(super) down: Mutex<Option<ErrorKind>>,
    pub(super) reviews: AtomicUsize,
    pub(super) asked: Mutex<Vec<SubjectAccessReview>>,
}

impl FakeApi {
    fn reachable(&self) -> ClusterResult<()> {
        self.reviews.fetch_add(1, Ordering::Relaxed);
        match *self.down.lock().unwrap() {
            Some(kind) => Err(ClusterError::new("create review", kind, "no")),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl AuthApi for FakeApi {
    async fn request_token(&self, _: &str, _: &str, _: &TokenRequest) -> ClusterResult<TokenRequest> {
        Err(ClusterError::new("request token", ErrorKind::Other, "not here"))
    }
    async fn review_token(&self, review: &TokenReview) -> ClusterResult<TokenReview> {
        self.reachable()?;
        let name = self.tokens.lock().unwrap().get(&review.spec.token).cloned();
        let user = name.as_ref().map(|name| UserInfo { username: Some(name.clone()), ..UserInfo::default() });
        let status = TokenReviewStatus { authenticated: Some(name.is_some()), user, ..TokenReviewStatus::default() };
        Ok(TokenReview { status: Some(status), ..review.clone() })
    }
    async fn review_access(&self, review: &SubjectAccessReview) -> ClusterResult<SubjectAccessReview> {
        self.reachable()?;
        self.asked.lock().unwrap().push(review.clone());
        let text = |t: &Option<String>| t.clone().unwrap_or_default();
        let of = review.spec.resource_attributes.clone().unwrap_or_default();
        let question = (text(&review.spec.user), text(&of.verb), text(&of.subresource));
        let allowed = self.allowed.lock().unwrap().contains(&question);
        let status = SubjectAccessReviewStatus { allowed, ..SubjectAccessReviewStatus::default() };
        Ok(SubjectAccessReview { status: Some(status), ..review.clone() })
    }
}

/// Pods by name in the namespace default.
#[derive(Default)]
pub(super) struct FakePods(pub(super) HashMap<&'static str, PodFacts>);

impl PodLookup for FakePods {
    fn pod(&self, namespace: &str, name: &str) -> Option<PodFacts> {
        self.0.get(name).filter(|_| namespace == "default").cloned()
    }
}

/// A pod whose containers have these statuses.
pub(super) fn pod(uid: &str, containers: &[(&str, bool)], statuses: serde_json::Value) -> PodFacts {
    PodFacts {
        uid: uid.to_owned(),
        containers: containers.iter().map(|(name, tty)| ((*name).to_owned(), *tty)).collect(),
        status: serde_json::from_value(statuses).unwrap(),
    }
}

pub(super) fn running(name: &str, id: &str) -> serde_json::Value {
    json!({"name": name, "image": "i", "imageID": "", "ready": true, "restartCount": 0, "containerID": format!("containerd://{id}"),
           "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})
}

/// A server that runs, and what stands around it.
pub(super) struct Running {
    pub(super) directory: TempDir,
    pub(super) containers: Arc<FakeContainers>,
    pub(super) address: SocketAddr,
    pub(super) metrics: Arc<Metrics>,
    pub(super) stop: CancellationToken,
    pub(super) task: tokio::task::JoinHandle<crate::Draining>,
}

/// Everything is served.
pub(super) const ALL: Handlers = Handlers {
    debugging: true,
    system_logs: true,
    log_query: true,
    profiling: true,
    debug_flags: true,
    checkpoint: true,
    flagz: true,
    statusz: true,
};

/// What tests may change of a server before it starts.
pub(super) fn parts(directory: &Path, containers: &Arc<FakeContainers>, pods: FakePods) -> SecureParts {
    let view = Arc::new(FakeNode::default());
    let metrics = Arc::new(Metrics::new().unwrap());
    SecureParts {
        tls: TlsSettings {
            certificate: ServingCertificate::SelfSigned { directory: directory.join("pki"), host: "node-a".into() },
            min_version: String::new(),
            cipher_suites: Vec::new(),
            curves: Vec::new(),
        },
        authentication: Authentication { client_ca_file: None, tokens: None, anonymous: true },
        authorization: Authorization::AlwaysAllow,
        node_name: "node-a".into(),
        fine_grained: true,
        handlers: ALL,
        translate: true,
        split_streams: false,
        streaming_idle: Duration::from_secs(3600),
        view: view.clone(),
        pods: Arc::new(pods),
        containers: containers.clone(),
        figures: Arc::new(NoFigures),
        health: Health::new(view, metrics.clone(), None),
        metrics,
        system_logs: LogTree::new(directory.join("var-log"), vec![directory.join("pod-logs")]),
        pod_logs: directory.join("pod-logs"),
        checkpoints: directory.join("checkpoints"),
        version: "1.36.1",
    }
}

impl Running {
    pub(super) async fn start(pods: FakePods, change: impl FnOnce(&Path, &mut SecureParts)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let containers = Arc::new(FakeContainers::default());
        let mut parts = parts(directory.path(), &containers, pods);
        change(directory.path(), &mut parts);
        let metrics = parts.metrics.clone();
        let bound: Bound = Server::kubelet(parts).unwrap().bind_tcp(([127, 0, 0, 1], 0).into()).await.unwrap();
        let (address, stop) = (bound.local_addr().unwrap(), CancellationToken::new());
        let task = tokio::spawn(bound.run(stop.clone()));
        Self { directory, containers, address, metrics, stop, task }
    }

    pub(super) async fn connect(&self, tls: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(Arc::new(tls)).connect(ServerName::try_from("localhost").unwrap(), stream).await
    }

    /// One request on a connection of its own.
    pub(super) async fn ask_as(&self, who: Option<&Pair>, request: &str, headers: &[(&str, &str)]) -> Reply1 {
        self.send(who, request, headers, "").await
    }

    /// The same with a body.
    pub(super) async fn send(&self, who: Option<&Pair>, request: &str, headers: &[(&str, &str)], body: &str) -> Reply1 {
        let mut stream = self.connect(client(who)).await.unwrap();
        let extra: String = headers.iter().map(|(k, v)| format!("{k}: {v}\r\n")).collect();
        let close = if headers.iter().any(|(k, _)| k.eq_ignore_ascii_case("connection")) {
            ""
        } else {
            "connection: close\r\n"
        };
        let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let head = format!("{request} HTTP/1.1\r\nhost: x\r\n{close}{length}{extra}\r\n{body}");
        stream.write_all(head.as_bytes()).await.unwrap();
        Reply1::read(&mut stream).await
    }

    pub(super) async fn ask(&self, request: &str) -> Reply1 {
        self.ask_as(None, request, &[]).await
    }
}

/// An answer in full.
#[derive(Debug)]
pub(super) struct Reply1 {
    pub(super) status: u16,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: String,
}

impl Reply1 {
    pub(super) async fn read(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Self {
        let mut text = String::new();
        let mut buffer = vec![0; 64 << 10];
        while !whole(&text) {
            let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut buffer)).await;
            match read.unwrap_or_else(|_| panic!("no more than {text:?} comes")) {
                // A peer that closes without TLS's good-bye has still said all.
                Ok(0) | Err(_) => break,
                Ok(n) => text += std::str::from_utf8(&buffer[..n]).unwrap(),
            }
        }
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|l| l.get(9..12)).and_then(|s| s.parse().ok()).unwrap_or(0);
        let headers: BTreeMap<String, String> = lines
            .filter_map(|l| l.split_once(": ").map(|(k, v)| (k.to_ascii_lowercase(), v.to_owned())))
            .filter(|(k, _)| !["date", "content-length", "connection"].contains(&k.as_str()))
            .collect();
        let mut body = body.to_owned();
        if headers.get("transfer-encoding").is_some_and(|e| e == "chunked") {
            let (mut rest, mut whole) = (body.as_str(), String::new());
            while let Some((size, after)) = rest.split_once("\r\n") {
                let size = usize::from_str_radix(size, 16).unwrap();
                whole += &after[..size];
                rest = after.get(size + 2..).unwrap_or_default();
            }
            body = whole;
        }
        Self { status, headers, body }
    }
}

/// Whether an answer has come in full.
fn whole(text: &str) -> bool {
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let head = head.to_ascii_lowercase();
    let field = |name: &str| head.split("\r\n").find_map(|l| l.strip_prefix(name)).map(str::trim);
    match field("content-length:") {
        Some(length) => body.len() >= length.parse::<usize>().unwrap(),
        None => field("transfer-encoding:").is_some() && body.ends_with("0\r\n\r\n"),
    }
}

/// A client that takes any server, with or without a certificate.
pub(super) fn client(who: Option<&Pair>) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(AnyServer::new(provider));
    match who {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).map(Result::unwrap).collect();
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap()).unwrap()
        }
    }
}

/// A log in CRI form.
pub(super) fn put_log(directory: &Path, name: &str, lines: &[(&str, String)]) -> PathBuf {
    let path = directory.join(name);
    // Of a moment ago: some requests ask for what is younger than a time.
    let at = jiff::Timestamp::now();
    let text: String = lines.iter().map(|(s, l)| format!("{at:.9} {s} F {l}\n")).collect();
    std::fs::write(&path, text).unwrap();
    path
}
