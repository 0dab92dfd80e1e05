//! A small API server on the real wire: TLS, HTTP/2, lists, watches, patches, faults by script; and a proxy that can swallow packets.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertificateParams, CertificateSigningRequestParams, DnType, Issuer, KeyPair};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A certificate authority and what it signs.
pub struct Ca {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test-ca");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Certificate and key in one PEM; alternative names; years of its life.
    pub fn issue(&self, cn: &str, names: &[&str], years: (i32, i32)) -> String {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, cn);
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        params.signed_by(&key, &self.issuer).unwrap().pem() + &key.serialize_pem()
    }

    fn sign(&self, csr: &str) -> String {
        CertificateSigningRequestParams::from_pem(csr).unwrap().signed_by(&self.issuer).unwrap().pem()
    }
}

/// What the next request whose path and query contain `on` gets instead of an answer.
#[derive(Clone)]
pub struct Fault {
    pub on: &'static str,
    pub what: What,
}

#[derive(Clone)]
pub enum What {
    /// This status, these headers, this body.
    Answer(u16, Vec<(&'static str, String)>, String),
    /// No answer at all.
    Hang,
    /// A watch that sends these lines and breaks in the middle of the next.
    Torn(Vec<String>),
    /// A watch that sends these lines and is closed.
    Lines(Vec<String>),
}

/// One request as the server saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub agent: String,
    pub content_type: String,
    pub bearer: String,
    pub peer: String,
    pub connection: usize,
    pub http2: bool,
    pub body: Value,
}

#[derive(Default)]
struct Store {
    version: u64,
    compacted: u64,
    objects: BTreeMap<String, Value>,
    log: Vec<(u64, String, &'static str, Value)>,
}

pub struct Server {
    pub address: SocketAddr,
    pub ca: Arc<Ca>,
    pub token: Mutex<Option<String>>,
    pub streams_lists: AtomicBool,
    pub date: Mutex<Option<String>>,
    pub connections: AtomicUsize,
    faults: Mutex<VecDeque<Fault>>,
    seen: Mutex<Vec<Seen>>,
    store: Mutex<Store>,
    changed: watch::Sender<u64>,
}

type Body = BoxBody<Bytes, std::io::Error>;

impl Server {
    pub async fn start() -> Arc<Self> {
        let ca = Arc::new(Ca::new());
        let pem = ca.issue("server", &["127.0.0.1", "api.test"], (2020, 2100));
        Self::start_with(ca, &pem, true).await
    }

    pub async fn start_with(ca: Arc<Ca>, pem: &str, http2: bool) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let this = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            ca,
            token: Mutex::new(None),
            streams_lists: true.into(),
            date: Mutex::default(),
            connections: AtomicUsize::new(0),
            faults: Mutex::default(),
            seen: Mutex::default(),
            store: Mutex::new(Store { version: 10, ..Store::default() }),
            changed: watch::Sender::new(10),
        });
        let identity = cluster::pki::Identity::from_pem(pem.as_bytes(), pem.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(cluster::pki::cert::certificates(this.ca.pem.as_bytes()).unwrap());
        let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()
            .unwrap();
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(clients)
            .with_single_cert(identity.chain, identity.key)
            .unwrap();
        if http2 {
            tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        }
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let server = this.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (server, acceptor) = (server.clone(), acceptor.clone());
                tokio::spawn(async move {
                    let Ok(tls) = acceptor.accept(tcp).await else { return };
                    let connection = server.connections.fetch_add(1, Ordering::SeqCst) + 1;
                    let session = tls.get_ref().1;
                    let http2 = session.alpn_protocol() == Some(b"h2");
                    let peer = session.peer_certificates().and_then(|c| c.first()).map(common_name).unwrap_or_default();
                    let service = service_fn(move |request| {
                        let (server, peer) = (server.clone(), peer.clone());
                        async move {
                            Ok::<_, std::convert::Infallible>(server.answer(request, connection, http2, peer).await)
                        }
                    });
                    let io = TokioIo::new(tls);
                    if http2 {
                        drop(
                            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                                .serve_connection(io, service)
                                .await,
                        );
                    } else {
                        drop(hyper::server::conn::http1::Builder::new().serve_connection(io, service).await);
                    }
                });
            }
        });
        this
    }

    pub fn fault(&self, on: &'static str, what: What) {
        self.faults.lock().unwrap().push_back(Fault { on, what });
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Puts an object at its path (`/api/v1/namespaces/ns/pods/a`); gives its version.
    pub fn put(&self, path: &str, mut object: Value) -> u64 {
        let mut store = self.store.lock().unwrap();
        store.version += 1;
        let version = store.version;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let kind = if store.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        store.objects.insert(path.to_owned(), object.clone());
        store.log.push((version, path.to_owned(), kind, object));
        drop(store);
        self.changed.send_replace(version);
        version
    }

    pub fn remove(&self, path: &str) {
        let mut store = self.store.lock().unwrap();
        store.version += 1;
        let version = store.version;
        let mut object = store.objects.remove(path).unwrap();
        object["metadata"]["resourceVersion"] = version.to_string().into();
        store.log.push((version, path.to_owned(), "DELETED", object));
        drop(store);
        self.changed.send_replace(version);
    }

    pub fn object(&self, path: &str) -> Option<Value> {
        self.store.lock().unwrap().objects.get(path).cloned()
    }

    /// Forgets the history: watches from before now are too old.
    pub fn compact(&self) {
        let mut store = self.store.lock().unwrap();
        store.version += 1;
        store.compacted = store.version;
    }

    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: usize,
        http2: bool,
        peer: String,
    ) -> Response<Body> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(|b| b.to_bytes()).unwrap_or_default();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let text = |name: &str| head.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        let path = head.uri.path_and_query().unwrap().to_string();
        let bearer = text("authorization");
        self.seen.lock().unwrap().push(Seen {
            method: head.method.to_string(),
            path: path.clone(),
            agent: text("user-agent"),
            content_type: text("content-type"),
            bearer: bearer.clone(),
            peer,
            connection,
            http2,
            body: body.clone(),
        });
        let fault = {
            let mut faults = self.faults.lock().unwrap();
            let at = faults.iter().position(|f| path.contains(f.on));
            at.and_then(|at| faults.remove(at))
        };
        let mut response = match fault.map(|f| f.what) {
            Some(What::Hang) => std::future::pending().await,
            Some(What::Answer(code, headers, text)) => {
                let mut response = plain(code, text);
                for (name, value) in headers {
                    response.headers_mut().insert(name, value.parse().unwrap());
                }
                response
            }
            Some(What::Torn(lines)) => lines_then(lines, true),
            Some(What::Lines(lines)) => lines_then(lines, false),
            None if self.token.lock().unwrap().as_ref().is_some_and(|t| bearer != format!("Bearer {t}")) => {
                status(401, "Unauthorized", "Unauthorized")
            }
            None => {
                self.clone().serve(head.method.as_str(), head.uri.path(), query(head.uri.query().unwrap_or("")), body)
            }
        };
        if let Some(date) = self.date.lock().unwrap().as_ref() {
            response.headers_mut().insert("date", date.parse().unwrap());
        }
        response
    }

    fn serve(self: Arc<Self>, method: &str, path: &str, query: HashMap<String, String>, body: Value) -> Response<Body> {
        let get = |k: &str| query.get(k).map(String::as_str).unwrap_or_default().to_owned();
        if method == "GET" && get("watch") == "true" {
            return self.watch(path, &get("resourceVersion"), get("sendInitialEvents") == "true");
        }
        let target = path.strip_suffix("/status").unwrap_or(path).to_owned();
        let found = self.object(&target);
        match (method, found) {
            ("GET", Some(object)) => plain(200, object.to_string()),
            ("GET", None) if is_collection(path) => {
                self.list(path, &get("limit"), &get("continue"), &get("resourceVersion"))
            }
            ("POST", _) => {
                let mut object = body;
                if object["metadata"]["name"].is_null() {
                    let name = format!("{}x1", object["metadata"]["generateName"].as_str().unwrap_or("x"));
                    object["metadata"]["name"] = name.into();
                }
                let at = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
                if self.object(&at).is_some() {
                    return status(409, "AlreadyExists", &format!("{at} already exists"));
                }
                object["metadata"]["uid"] = "uid-of-it".into();
                if path.ends_with("/certificatesigningrequests") {
                    use base64::Engine;
                    let base64 = base64::engine::general_purpose::STANDARD;
                    let csr = base64.decode(object["spec"]["request"].as_str().unwrap()).unwrap();
                    let signed = self.ca.sign(&String::from_utf8(csr).unwrap());
                    let mut later = object.clone();
                    later["status"] = json!({
                        "certificate": base64.encode(signed),
                        "conditions": [{"type": "Approved", "status": "True", "reason": "AutoApproved", "message": ""}],
                    });
                    let (server, at) = (self.clone(), at.clone());
                    tokio::spawn(async move {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        server.put(&at, later);
                    });
                }
                self.put(&at, object);
                plain(201, self.object(&at).unwrap().to_string())
            }
            ("PATCH" | "PUT", Some(mut object)) => {
                let uid = body["metadata"]["uid"].clone();
                if !uid.is_null() && uid != object["metadata"]["uid"] {
                    let text = format!("Pod \"a\" is invalid: metadata.uid: Invalid value: {uid}: field is immutable");
                    return status(422, "Invalid", &text);
                }
                if method == "PUT" {
                    object = body
                } else {
                    merge(&mut object, &body)
                }
                self.put(&target, object);
                plain(200, self.object(&target).unwrap().to_string())
            }
            ("DELETE", Some(object)) => {
                let uid = &body["preconditions"]["uid"];
                if !uid.is_null() && *uid != object["metadata"]["uid"] {
                    return status(
                        409,
                        "Conflict",
                        "Precondition failed: UID in precondition: other, UID in object meta: u-a",
                    );
                }
                self.remove(&target);
                plain(200, json!({"kind": "Status", "status": "Success"}).to_string())
            }
            _ => status(404, "NotFound", &format!("{path} not found")),
        }
    }

    fn list(&self, path: &str, limit: &str, next: &str, version: &str) -> Response<Body> {
        let store = self.store.lock().unwrap();
        if version.parse().is_ok_and(|v: u64| v > 0 && v < store.compacted) {
            return status(410, "Expired", "too old resource version");
        }
        let items: Vec<&Value> = store.objects.iter().filter(|(at, _)| below(at, path)).map(|(_, o)| o).collect();
        let from: usize = next.parse().unwrap_or(0);
        let count: usize = limit.parse().unwrap_or(usize::MAX);
        let page: Vec<&&Value> = items.iter().skip(from).take(count.min(2)).collect();
        let more = if limit.is_empty() { items.len() } else { from + page.len() };
        let page: Vec<&Value> = if limit.is_empty() { items.clone() } else { page.into_iter().copied().collect() };
        let next = if more < items.len() { more.to_string() } else { String::new() };
        plain(
            200,
            json!({"kind": "List", "metadata": {"resourceVersion": store.version.to_string(), "continue": next}, "items": page})
                .to_string(),
        )
    }

    fn watch(self: Arc<Self>, path: &str, version: &str, initial: bool) -> Response<Body> {
        if initial && !self.streams_lists.load(Ordering::SeqCst) {
            let text = "ListOptions.meta.k8s.io \"\" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
            return status(422, "Invalid", text);
        }
        let (mut lines, mut from) = {
            let store = self.store.lock().unwrap();
            let from: u64 = version.parse().unwrap_or(0);
            if !initial && from < store.compacted {
                let gone = json!({"type": "ERROR", "object": {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired",
                    "message": format!("too old resource version: {from} ({})", store.compacted)}});
                return lines_then(vec![gone.to_string()], false);
            }
            let mut lines = Vec::new();
            if initial {
                for object in store.objects.iter().filter(|(at, _)| below(at, path)).map(|(_, o)| o) {
                    lines.push(json!({"type": "ADDED", "object": object}).to_string());
                }
                lines.push(
                    json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": store.version.to_string(),
                        "annotations": {"k8s.io/initial-events-end": "true"}}}})
                    .to_string(),
                );
            }
            (lines, if initial { store.version } else { from })
        };
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(16);
        let path = path.to_owned();
        tokio::spawn(async move {
            let mut changed = self.changed.subscribe();
            loop {
                for line in lines.drain(..) {
                    if sender.send(Ok(Frame::data(format!("{line}\n").into()))).await.is_err() {
                        return;
                    }
                }
                {
                    let store = self.store.lock().unwrap();
                    let since = from;
                    for (version, at, kind, object) in store.log.iter().filter(|(v, ..)| *v > since) {
                        from = *version;
                        if below(at, &path) {
                            lines.push(json!({"type": kind, "object": object}).to_string());
                        }
                    }
                }
                if lines.is_empty() {
                    tokio::select! {
                        _ = changed.changed() => {}
                        () = sender.closed() => return,
                    }
                }
            }
        });
        Response::new(BodyExt::boxed(StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }
}

fn common_name(der: &CertificateDer<'_>) -> String {
    cluster::pki::CertInfo::of(der).unwrap().common_name
}

fn is_collection(path: &str) -> bool {
    ["pods", "services", "configmaps"].iter().any(|k| path.ends_with(&format!("/{k}")))
}

/// `/api/v1/namespaces/ns/pods/a` belongs to `/api/v1/pods` and to `/api/v1/namespaces/ns/pods`.
fn below(at: &str, collection: &str) -> bool {
    let (parent, _) = at.rsplit_once('/').unwrap();
    if parent == collection {
        return true;
    }
    let Some((head, rest)) = parent.split_once("/namespaces/") else { return false };
    rest.split_once('/').is_some_and(|(_, kind)| format!("{head}/{kind}") == collection)
}

fn query(text: &str) -> HashMap<String, String> {
    text.split('&').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.to_owned(), v.replace("%3D", "="))).collect()
}

fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (k, v) in patch {
                merge(into.entry(k.clone()).or_insert(Value::Null), v);
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

fn plain(code: u16, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|e| match e {}).boxed();
    Response::builder().status(code).body(body).unwrap()
}

pub fn status_text(code: u16, reason: &str, message: &str) -> String {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason, "message": message})
        .to_string()
}

fn status(code: u16, reason: &str, message: &str) -> Response<Body> {
    plain(code, status_text(code, reason, message))
}

fn lines_then(lines: Vec<String>, torn: bool) -> Response<Body> {
    let mut frames: Vec<Result<Frame<Bytes>, std::io::Error>> =
        lines.into_iter().map(|l| Ok(Frame::data(format!("{l}\n").into()))).collect();
    if torn {
        frames.push(Ok(Frame::data("{\"type\":\"ADD".into())));
    }
    let end = futures::stream::once(async move {
        // A reset overtakes what was sent just before it.
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(std::io::Error::other("torn"))
    });
    let end = futures::stream::StreamExt::take(end, usize::from(torn));
    let frames = futures::stream::StreamExt::chain(futures::stream::iter(frames), end);
    Response::new(BodyExt::boxed(StreamBody::new(frames)))
}

/// Forwards to a server; while frozen, every byte in either direction is swallowed and nothing is closed.
pub struct BlackHole {
    pub address: SocketAddr,
    frozen: Arc<watch::Sender<bool>>,
}

impl BlackHole {
    pub async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let frozen = Arc::new(watch::Sender::new(false));
        let state = frozen.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(to).await.unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                tokio::spawn(pump(near_read, far_write, state.subscribe()));
                tokio::spawn(pump(far_read, near_write, state.subscribe()));
            }
        });
        Self { address, frozen }
    }

    pub fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    frozen: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 16 << 10];
    let mut lost = false;
    while let Ok(count) = from.read(&mut buffer).await {
        lost |= *frozen.borrow();
        if lost && count > 0 {
            // A stream with a hole in it never works again: TCP would retransmit, this does not.
            continue;
        }
        if count == 0 && lost {
            std::future::pending::<()>().await;
        }
        if count == 0 || to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
}

/// A port on which something speaks that is not TLS.
pub async fn plain_http() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let _ = tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    address
}
