//! The client: one request in, one answer or one clear error out.
//!
//! Each call waits for the rate limit, carries the credentials of the moment, has a deadline that covers everything, waits as long as
//! `Retry-After` says and tries again (as client-go: at most 10 times), and tries once more after a 401 when the credentials changed.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use jiff::SignedDuration;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::connect::{self, ConnectError, Connector, rustls_error};
use crate::credentials::{Credentials, Snapshot};
use crate::error::{ClusterError, ClusterResult, ErrorKind, chain};
use crate::kubeconfig::ClusterConfig;
use crate::limit::TokenBucket;
use crate::trouble::Trouble;
use crate::wire::{Lines, Object, Page, Slim, WatchEvent, decode_event, decode_page, encode, without_managed_fields};
use crate::{Wall, tls};

/// Tries after answers that carry Retry-After.
const RETRIES: u32 = 10;
/// Tries of a call that the server gives back unread, since it closes the connection (as net/http).
const GIVEN_BACK: u32 = 6;
/// The largest answer, bytes.
const MAX_BODY: usize = 512 << 20;
/// A difference between clocks that is worth a word.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// Sees every request; feeds `rest_client_requests_total` and its latency.
pub trait RequestObserver: Send + Sync {
    /// `code` is 0 without an answer; `took` runs from the first byte sent to the answer's head; `bytes` are the request's body's. `host`
    /// carries the port.
    fn observed(&self, method: &Method, host: &str, code: u16, took: Duration, bytes: usize);

    /// The body of an answer has so many bytes.
    fn answered(&self, _method: &Method, _host: &str, _bytes: usize) {}

    /// A request waited so long for the rate limit.
    fn held(&self, _method: &Method, _host: &str, _waited: Duration) {}
}

/// How a client behaves.
#[derive(Clone)]
pub struct ClientOptions {
    /// `User-Agent`; what stands before the first slash becomes the field manager, so it starts with `kubelet/`.
    pub user_agent: String,
    /// Requests per second; 0 or below: no limit (`kubeAPIQPS`).
    pub qps: f64,
    /// Requests at once (`kubeAPIBurst`).
    pub burst: u32,
    /// Deadline of a call; of a watch: until its head.
    pub deadline: Duration,
    /// Silence on a connection before it is pinged.
    pub ping_idle: Duration,
    /// Silence after a ping before it is given up.
    pub ping_timeout: Duration,
    /// Told about every request.
    pub observer: Option<Arc<dyn RequestObserver>>,
    /// The clock.
    pub wall: Wall,
}

impl ClientOptions {
    /// The kubelet's figures: 50 per second, 100 at once; client-go's pings: after 30 s, for 15 s.
    pub fn new(version: &str) -> Self {
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self {
            user_agent: format!("kubelet/v1.36.1 (linux/{arch}) rubelet/{version}"),
            qps: 50.0,
            burst: 100,
            deadline: Duration::from_secs(30),
            ping_idle: Duration::from_secs(30),
            ping_timeout: Duration::from_secs(15),
            observer: None,
            wall: crate::system_wall(),
        }
    }
}

impl std::fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientOptions")
            .field("user_agent", &self.user_agent)
            .field("qps", &self.qps)
            .finish_non_exhaustive()
    }
}

/// How a body changes an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchType {
    /// `application/strategic-merge-patch+json`.
    Strategic,
    /// `application/merge-patch+json`.
    Merge,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it is for, in messages: `list pods`.
    pub action: String,
    /// Method.
    pub method: Method,
    /// Path below the server's URL, segments already encoded.
    pub path: String,
    /// Query.
    pub query: Vec<(&'static str, String)>,
    /// Body.
    pub body: Bytes,
    /// Its type.
    pub content_type: &'static str,
}

impl Call {
    /// A GET.
    pub fn get(action: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            action: action.into(),
            method: Method::GET,
            path: path.into(),
            query: Vec::new(),
            body: Bytes::new(),
            content_type: "application/json",
        }
    }

    /// Another method with a JSON body.
    pub fn with_body(mut self, method: Method, body: &impl Serialize) -> ClusterResult<Self> {
        self.method = method;
        self.body = serde_json::to_vec(body)
            .map_err(|e| ClusterError::new(self.action.clone(), ErrorKind::Invalid, format!("encode: {e}")))?
            .into();
        Ok(self)
    }

    fn uri(&self, base: &http::Uri) -> ClusterResult<http::Uri> {
        let prefix = base.path().trim_end_matches('/');
        let query: Vec<String> = self.query.iter().map(|(k, v)| format!("{k}={}", encode(v))).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        let text = format!("{prefix}{}{mark}{}", self.path, query.join("&"));
        let mut parts = base.clone().into_parts();
        let bad = |e: String| ClusterError::new(self.action.clone(), ErrorKind::Invalid, format!("URL {text}: {e}"));
        parts.path_and_query = Some(text.parse().map_err(|e: http::uri::InvalidUri| bad(e.to_string()))?);
        http::Uri::from_parts(parts).map_err(|e| bad(e.to_string()))
    }
}

/// The path of a collection or, with a name, of an object.
pub fn path_of<K: Object>(namespace: Option<&str>, name: Option<&str>, subresource: Option<&str>) -> String {
    let mut path = match K::GROUP {
        "" => format!("/api/{}", K::VERSION),
        group => format!("/apis/{group}/{}", K::VERSION),
    };
    if let Some(namespace) = namespace.filter(|n| !n.is_empty()) {
        path.push_str("/namespaces/");
        path.push_str(&encode(namespace));
    }
    path.push('/');
    path.push_str(K::URL_PATH_SEGMENT);
    for part in [name, subresource].into_iter().flatten() {
        path.push('/');
        path.push_str(&encode(part));
    }
    path
}

/// What an object is called in messages: `pods "a" in "ns"`.
fn target<K: Object>(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|n| !n.is_empty()) {
        Some(namespace) => format!("{} {namespace}/{name}", K::KIND.to_lowercase()),
        None => format!("{} {name}", K::KIND.to_lowercase()),
    }
}

struct Pool {
    generation: u64,
    http: legacy::Client<Connector, Full<Bytes>>,
    cut: CancellationToken,
}

struct Inner {
    config: ClusterConfig,
    credentials: Credentials,
    options: ClientOptions,
    agent: HeaderValue,
    proxy: Arc<Matcher>,
    pool: Mutex<Option<Arc<Pool>>>,
    skew_ms: AtomicI64,
    trouble: Trouble,
}

/// Host and port, as metrics name a server.
fn host(uri: &http::Uri) -> &str {
    uri.authority().map_or("", |a| a.as_str())
}

/// A client of one API server; clones share connections, credentials and rate limit.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    limit: Option<Arc<TokenBucket>>,
    deadline: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Client {
    /// A client; connects with the first call.
    ///
    /// # Errors
    /// Other: the user agent is not a header value.
    pub fn new(config: ClusterConfig, options: ClientOptions) -> ClusterResult<Self> {
        let agent = HeaderValue::from_str(&options.user_agent)
            .map_err(|e| ClusterError::new("make a client", ErrorKind::Other, format!("user agent: {e}")))?;
        let proxy = match &config.proxy {
            Some(proxy) => Matcher::builder().all(proxy.to_string()).build(),
            None => Matcher::from_env(),
        };
        Ok(Self {
            limit: TokenBucket::new(options.qps, options.burst).map(Arc::new),
            deadline: options.deadline,
            inner: Arc::new(Inner {
                credentials: Credentials::new(config.clone(), options.wall.clone()),
                config,
                options,
                agent,
                proxy: Arc::new(proxy),
                pool: Mutex::new(None),
                skew_ms: AtomicI64::new(0),
                trouble: Trouble::default(),
            }),
        })
    }

    /// The same connections with another deadline.
    #[must_use]
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { deadline, ..self.clone() }
    }

    /// The same connections with a rate limit of its own (events); `qps` 0 or below: none (lease and node status).
    #[must_use]
    pub fn with_limit(&self, qps: f64, burst: u32) -> Self {
        Self { limit: TokenBucket::new(qps, burst).map(Arc::new), ..self.clone() }
    }

    /// Where it connects to.
    pub fn config(&self) -> &ClusterConfig {
        &self.inner.config
    }

    /// The credentials in use.
    pub fn credentials(&self) -> &Credentials {
        &self.inner.credentials
    }

    /// How far the API server's clock is ahead of ours, by its last answer (to a second).
    pub fn clock_skew(&self) -> SignedDuration {
        SignedDuration::from_millis(self.inner.skew_ms.load(Ordering::Relaxed))
    }

    /// Why no call can succeed, as far as the last ones tell; None while the server answers.
    pub fn trouble(&self) -> Option<ClusterError> {
        self.inner.trouble.newest()
    }

    /// Cuts every connection, also those of running watches; the next call connects anew. For the lease, when its calls time out.
    pub fn close_connections(&self) {
        if let Some(pool) = self.inner.pool.lock().unwrap_or_else(PoisonError::into_inner).take() {
            pool.cut.cancel();
        }
    }

    /// The connections for these credentials. Older ones end by themselves when their last request does.
    fn pool(&self, now: &Snapshot) -> ClusterResult<Arc<Pool>> {
        let inner = &self.inner;
        let mut slot = inner.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = slot.as_ref().filter(|p| p.generation >= now.generation) {
            return Ok(pool.clone());
        }
        let https = inner.config.server.scheme_str() == Some("https");
        let cut = CancellationToken::new();
        let connector = Connector {
            tls: if https { Some(tls::client_config(&inner.config, now)?) } else { None },
            tls_server_name: inner.config.tls_server_name.clone(),
            proxy: inner.proxy.clone(),
            cut: cut.clone(),
        };
        let http = legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_keep_alive_interval(inner.options.ping_idle)
            .http2_keep_alive_timeout(inner.options.ping_timeout)
            .http2_keep_alive_while_idle(true)
            .build(connector);
        let pool = Arc::new(Pool { generation: now.generation, http, cut });
        *slot = Some(pool.clone());
        Ok(pool)
    }

    /// Sends a call and waits for the head of a good answer; notes what concerns every call.
    async fn head(&self, call: &Call) -> ClusterResult<Response<Incoming>> {
        let answer = self.try_head(call).await;
        if let Err(error) = &answer {
            self.inner.trouble.failed(&self.inner.config.server, error);
        }
        answer
    }

    /// What the server asks us to wait is waited only if that ends before the deadline: else the caller is told at once.
    async fn try_head(&self, call: &Call) -> ClusterResult<Response<Incoming>> {
        let until = Instant::now() + self.deadline;
        let uri = call.uri(&self.inner.config.server)?;
        let mut renewed = false;
        let mut tries = 0;
        loop {
            if let Some(limit) = &self.limit {
                let began = Instant::now();
                limit.acquire().await;
                if let Some(observer) = &self.inner.options.observer {
                    observer.held(&call.method, host(&uri), began.elapsed());
                }
            }
            let now = self.inner.credentials.current().await.map_err(|mut e| {
                e.action = format!("{}: {}", call.action, e.action);
                e
            })?;
            let response = self.once(call, &uri, &now).await?;
            let code = response.status().as_u16();
            if code != 401 {
                self.inner.trouble.over(&self.inner.config.server);
            }
            if response.status().is_success() {
                return Ok(response);
            }
            let retry_after = retry_after(response.headers());
            let body =
                Limited::new(response.into_body(), 1 << 20).collect().await.map(|b| b.to_bytes()).unwrap_or_default();
            if code == 401 && !renewed && self.inner.credentials.rejected(&now).await {
                renewed = true;
                continue;
            }
            if let Some(wait) = retry_after
                && (code == 429 || code >= 500)
                && tries < RETRIES
                && Instant::now() + wait < until
            {
                tries += 1;
                tokio::time::sleep(wait).await;
                continue;
            }
            let mut error = ClusterError::from_answer(call.action.clone(), code, retry_after, &body);
            let skew = self.clock_skew();
            if error.kind == ErrorKind::Unauthorized && skew.abs() <= SKEW {
                error.advice = self.inner.credentials.advice(&now);
            } else if error.kind == ErrorKind::Unauthorized {
                let side = if skew.is_positive() { "behind" } else { "ahead of" };
                error.advice = format!(
                    "this host's clock is {} s {side} the API server's: set it, then look at the credentials",
                    skew.abs().as_secs()
                );
            }
            return Err(error);
        }
    }

    async fn once(&self, call: &Call, uri: &http::Uri, now: &Snapshot) -> ClusterResult<Response<Incoming>> {
        let inner = &self.inner;
        let mut given_back = 0;
        let answer = loop {
            let mut request = Request::builder()
                .method(call.method.clone())
                .uri(uri.clone())
                .header(header::USER_AGENT, inner.agent.clone())
                .header(header::ACCEPT, "application/json");
            if !call.body.is_empty() {
                request = request.header(header::CONTENT_TYPE, call.content_type);
            }
            if let Some(bearer) = &now.bearer {
                request = request.header(header::AUTHORIZATION, bearer.clone());
            }
            let request = request
                .body(Full::new(call.body.clone()))
                .map_err(|e| ClusterError::new(call.action.clone(), ErrorKind::Invalid, e.to_string()))?;
            let start = Instant::now();
            let answer = self.pool(now)?.http.request(request).await;
            if let Some(observer) = &inner.options.observer {
                let code = answer.as_ref().map_or(0, |a| a.status().as_u16());
                observer.observed(&call.method, host(uri), code, start.elapsed(), call.body.len());
            }
            match answer {
                Err(e) if given_back < GIVEN_BACK && connect::is_given_back(&e) => given_back += 1,
                answer => break answer,
            }
        };
        let answer = answer.map_err(|e| self.transport_error(&call.action, &e, e.is_connect()))?;
        self.note_date(answer.headers());
        Ok(answer)
    }

    fn note_date(&self, headers: &HeaderMap) {
        let Some(date) = headers.get(header::DATE).and_then(|d| d.to_str().ok()) else { return };
        // HTTP says GMT where RFC 2822 says an offset.
        let Ok(zoned) = jiff::fmt::rfc2822::parse(&date.replace("GMT", "+0000")) else { return };
        let skew = zoned.timestamp().duration_since((self.inner.options.wall)());
        self.inner.skew_ms.store(i64::try_from(skew.as_millis()).unwrap_or(0), Ordering::Relaxed);
    }

    fn transport_error(
        &self,
        action: &str,
        error: &(dyn std::error::Error + 'static),
        connecting: bool,
    ) -> ClusterError {
        let server = self.inner.config.server.authority().map(ToString::to_string).unwrap_or_default();
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(e) = next {
            if let Some(e) = e.downcast_ref::<ConnectError>() {
                let advice = match e.kind {
                    ErrorKind::Unreachable => format!("is the API server at {server} up and reachable from here?"),
                    _ => e.advice.to_owned(),
                };
                return ClusterError::new(action, e.kind, e.message.clone()).advise(advice);
            }
            // The server may refuse a client certificate only after the handshake (TLS 1.3).
            if let Some(tls) = e.downcast_ref::<std::io::Error>().and_then(rustls_error) {
                let (message, advice) = tls::explain(tls);
                return ClusterError::new(action, ErrorKind::Tls, message).advise(advice);
            }
            next = e.source();
        }
        let kind = if connecting { ErrorKind::Unreachable } else { ErrorKind::Timeout };
        ClusterError::new(action, kind, format!("connection to {server} lost: {}", chain(error)))
    }

    async fn within<T>(
        &self,
        action: &str,
        deadline: Duration,
        work: impl Future<Output = ClusterResult<T>>,
    ) -> ClusterResult<T> {
        tokio::time::timeout(deadline, work).await.unwrap_or_else(|_| {
            Err(ClusterError::new(
                action,
                ErrorKind::Timeout,
                format!(
                    "no answer from {} within {:?}",
                    self.inner.config.server.authority().map_or("", |a| a.as_str()),
                    deadline
                ),
            ))
        })
    }

    /// Sends a call and gives the body of a good answer.
    ///
    /// # Errors
    /// Any kind.
    pub async fn send(&self, call: Call) -> ClusterResult<Bytes> {
        self.within(&call.action, self.deadline, async {
            let response = self.head(&call).await?;
            let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
            let body = body.map(|b| b.to_bytes()).map_err(|e| self.transport_error(&call.action, &*e, false))?;
            if let Some(observer) = &self.inner.options.observer {
                observer.answered(&call.method, host(&self.inner.config.server), body.len());
            }
            Ok(body)
        })
        .await
    }

    /// Sends a call and decodes the answer.
    ///
    /// # Errors
    /// Any kind; Other when the answer is something else.
    pub async fn json<T: DeserializeOwned>(&self, call: Call) -> ClusterResult<T> {
        let action = call.action.clone();
        let body = self.send(call).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClusterError::new(action, ErrorKind::Other, format!("unreadable answer: {e}")))
    }

    /// GETs an object. `from_cache`: any version the server has at hand (`resourceVersion=0`).
    ///
    /// # Errors
    /// Any kind.
    pub async fn get<K: Object>(&self, namespace: Option<&str>, name: &str, from_cache: bool) -> ClusterResult<K> {
        let mut call =
            Call::get(format!("get {}", target::<K>(namespace, name)), path_of::<K>(namespace, Some(name), None));
        if from_cache {
            call.query.push(("resourceVersion", "0".to_owned()));
        }
        self.slim(call).await
    }

    /// POSTs an object to its collection.
    ///
    /// # Errors
    /// Any kind.
    pub async fn create<K: Object + Serialize>(&self, object: &K) -> ClusterResult<K> {
        self.slim(Self::create_call(object)?).await
    }

    /// The same, of whose answer only some of the fields are read.
    ///
    /// # Errors
    /// As [`Client::create`].
    pub(crate) async fn create_for<K: Object + Serialize, A: DeserializeOwned>(&self, object: &K) -> ClusterResult<A> {
        self.json(Self::create_call(object)?).await
    }

    fn create_call<K: Object + Serialize>(object: &K) -> ClusterResult<Call> {
        let meta = object.metadata();
        let namespace = meta.namespace.as_deref();
        let name = meta.name.as_deref().or(meta.generate_name.as_deref()).unwrap_or_default();
        let call = Call::get(format!("create {}", target::<K>(namespace, name)), path_of::<K>(namespace, None, None));
        call.with_body(Method::POST, object)
    }

    /// POSTs to a subresource, whose type may be another.
    ///
    /// # Errors
    /// Any kind.
    pub async fn create_subresource<K: Object, B: Serialize, A: DeserializeOwned>(
        &self,
        namespace: Option<&str>,
        name: &str,
        subresource: &str,
        body: &B,
    ) -> ClusterResult<A> {
        let call = Call::get(
            format!("create {subresource} of {}", target::<K>(namespace, name)),
            path_of::<K>(namespace, Some(name), Some(subresource)),
        );
        self.json(call.with_body(Method::POST, body)?).await
    }

    /// PUTs an object.
    ///
    /// # Errors
    /// Any kind; Conflict when its resource version is no longer the current one.
    pub async fn update<K: Object + Serialize>(&self, object: &K) -> ClusterResult<K> {
        let meta = object.metadata();
        let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref().unwrap_or_default());
        let call =
            Call::get(format!("update {}", target::<K>(namespace, name)), path_of::<K>(namespace, Some(name), None));
        self.slim(call.with_body(Method::PUT, object)?).await
    }

    /// PATCHes an object or its subresource.
    ///
    /// # Errors
    /// Any kind; Conflict when the patch carries another uid or resource version.
    pub async fn patch<K: Object>(
        &self,
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        kind: PatchType,
        patch: &serde_json::Value,
    ) -> ClusterResult<K> {
        self.slim(Self::patch_call::<K>(namespace, name, subresource, kind, patch)?).await
    }

    /// The same, of whose answer only some of the fields are read: most of it would be decoded to be thrown away.
    ///
    /// # Errors
    /// As [`Client::patch`].
    pub(crate) async fn patch_for<K: Object, A: DeserializeOwned>(
        &self,
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        kind: PatchType,
        patch: &serde_json::Value,
    ) -> ClusterResult<A> {
        self.json(Self::patch_call::<K>(namespace, name, subresource, kind, patch)?).await
    }

    fn patch_call<K: Object>(
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        kind: PatchType,
        patch: &serde_json::Value,
    ) -> ClusterResult<Call> {
        let of = subresource.map(|s| format!("{s} of ")).unwrap_or_default();
        let call = Call::get(
            format!("patch {of}{}", target::<K>(namespace, name)),
            path_of::<K>(namespace, Some(name), subresource),
        );
        let mut call = call.with_body(Method::PATCH, patch)?;
        call.content_type = match kind {
            PatchType::Strategic => "application/strategic-merge-patch+json",
            PatchType::Merge => "application/merge-patch+json",
        };
        Ok(call)
    }

    /// DELETEs an object.
    ///
    /// # Errors
    /// Any kind; Conflict when the object has another uid.
    pub async fn delete<K: Object>(
        &self,
        namespace: Option<&str>,
        name: &str,
        grace_seconds: Option<i64>,
        uid: Option<&str>,
    ) -> ClusterResult<()> {
        let mut options = serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1"});
        if let Some(grace) = grace_seconds {
            options["gracePeriodSeconds"] = grace.into();
        }
        if let Some(uid) = uid {
            options["preconditions"] = serde_json::json!({"uid": uid});
        }
        let call =
            Call::get(format!("delete {}", target::<K>(namespace, name)), path_of::<K>(namespace, Some(name), None));
        self.send(call.with_body(Method::DELETE, &options)?).await.map(drop)
    }

    async fn slim<K: Object>(&self, call: Call) -> ClusterResult<K> {
        let action = call.action.clone();
        let body = self.send(call).await?;
        let slim: Slim<K> = serde_json::from_slice(&without_managed_fields(&body))
            .map_err(|e| ClusterError::new(action, ErrorKind::Other, format!("unreadable answer: {e}")))?;
        Ok(slim.0)
    }

    /// One page of a collection.
    ///
    /// # Errors
    /// Any kind.
    pub async fn list_page<K: Object>(
        &self,
        namespace: Option<&str>,
        query: Vec<(&'static str, String)>,
    ) -> ClusterResult<Page<K>> {
        let mut call = Call::get(format!("list {}", K::URL_PATH_SEGMENT), path_of::<K>(namespace, None, None));
        call.query = query;
        let action = call.action.clone();
        let body = self.send(call).await?;
        decode_page(&body).map_err(|e| ClusterError::new(action, ErrorKind::Other, format!("unreadable answer: {e}")))
    }

    /// A watch. The stream ends when the server closes it; a broken connection is an error. `silence` is how long nothing may come.
    ///
    /// # Errors
    /// Any kind; those of the open watch come through the stream.
    pub async fn watch<K: Object>(
        &self,
        namespace: Option<&str>,
        mut query: Vec<(&'static str, String)>,
        silence: Duration,
    ) -> ClusterResult<BoxStream<'static, ClusterResult<WatchEvent<K>>>> {
        let mut call = Call::get(format!("watch {}", K::URL_PATH_SEGMENT), path_of::<K>(namespace, None, None));
        query.push(("watch", "true".to_owned()));
        call.query = query;
        let body = self.within(&call.action, self.deadline, self.head(&call)).await?.into_body();
        let reading =
            Reading { client: self.clone(), action: call.action, body, lines: Lines::default(), silence, over: false };
        Ok(futures::stream::unfold(reading, |mut reading| async move {
            let item = reading.next().await?;
            reading.over |= item.is_err();
            Some((item, reading))
        })
        .boxed())
    }
}

/// An open watch.
struct Reading {
    client: Client,
    action: String,
    body: Incoming,
    lines: Lines,
    silence: Duration,
    over: bool,
}

impl Reading {
    async fn next<K: Object>(&mut self) -> Option<ClusterResult<WatchEvent<K>>> {
        if self.over {
            return None;
        }
        loop {
            if let Some(line) = self.lines.next() {
                return Some(decode_event(&line));
            }
            let frame = match tokio::time::timeout(self.silence, self.body.frame()).await {
                Ok(frame) => frame,
                Err(_) => {
                    let text = format!("nothing came for {:?}", self.silence);
                    return Some(Err(ClusterError::new(self.action.clone(), ErrorKind::Timeout, text)));
                }
            };
            match frame {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if let Err(text) = self.lines.push(&data) {
                        return Some(Err(ClusterError::new(self.action.clone(), ErrorKind::Other, text)));
                    }
                }
                Some(Err(error)) => return Some(Err(self.client.transport_error(&self.action, &error, false))),
                None if self.lines.is_torn() => {
                    let text = "the watch ended in the middle of an event";
                    return Some(Err(ClusterError::new(self.action.clone(), ErrorKind::Timeout, text)));
                }
                None => return None,
            }
        }
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}
