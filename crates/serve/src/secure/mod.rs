//! The kubelet's own port (`port`, 10250): TLS, HTTP/1.1 and HTTP/2, and nothing for those who may not.
//!
//! ```text
//!   accept ─▶ handshake ─▶ route (pure) ─▶ who? (authn) ─▶ may they? (authz) ─▶ page | log | session | command
//! ```
//!
//! | path | |
//! |---|---|
//! | `/healthz…`, `/metrics…`, `/stats/summary`, `/pods` | as on the read-only port |
//! | `/runningpods/`, `/configz` | what the runtime runs; the configuration in force |
//! | `/containerLogs/NS/POD/C` | [`logs`] |
//! | `/exec`, `/attach`, `/portForward` | [`upgrade`]: handed to the runtime's streaming server |
//! | `/run/NS/POD/C` | a command, until it ends |
//! | `/checkpoint/NS/POD/C` | [`checkpoint`] |
//! | `/logs/…` | [`system_logs`], [`log_query`] |
//! | `/flagz`, `/statusz` | [`zpages`] |
//! | `/debug/flags/v`, `/debug/pprof/…` | [`debug`] |
//! | `/debug/pods` | [`pods_page`] |
//!
//! Paths that are not served are answered before anybody is asked who they are, as in Go; everything else is refused unless it is allowed,
//! also when the API server cannot be asked. Tasks: one for each connection, in the server's own set (`server.rs`); it owns everything that
//! belongs to the connection, so a client that goes takes all of it along. Nothing runs while nobody is connected.

mod authn;
mod authz;
mod cache;
mod checkpoint;
mod debug;
mod files;
pub(crate) mod fuzz;
mod log_options;
mod log_query;
mod logs;
mod pods_page;
mod port;
mod route;
mod sessions;
mod spdy;
mod system_logs;
#[cfg(test)]
mod tests;
mod tls;
mod upgrade;
mod websocket;
mod zpages;

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use host::logs::follow::LogWatch;
use host::logs::tree::LogTree;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use jiff::Timestamp;
use model::api::PodStatus;
use rustls::pki_types::CertificateDer;
use serde_json::json;
use telemetry::metrics::{HttpRequest, Metrics};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use authn::Authentication;
pub use authz::Authorization;
pub use port::{ContainerLog, ContainerPort, CriContainers, RunningPod};
pub use route::Handlers;
pub use tls::{ServingCertificate, TlsError, TlsSettings};

use crate::NodeView;
use crate::figures::Figures;
use crate::health::Health;
use crate::read_only::{ReadOnly, accepts_json, observed};
use crate::reply::{
    Answer, Reply, ReplyBody, error, json as json_reply, nosniff, not_found, redirect_to, service_error,
};
use crate::server::{Handler, LargeAnswers, Limits, until_done};
use crate::stall::{Patience, StallGuard};
use authn::Authenticator;
use authz::{Authorizer, Refusal};
use log_options::{LogQuery, Wrong};
pub(crate) use route::parameters;
use route::{Known, Route, Target, first};
use upgrade::SessionSlot;

/// For a client to end the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Requests at once on one HTTP/2 connection, and what each may have in flight.
const STREAMS: u32 = 100;
const WINDOW: u32 = 64 << 10;

/// A pod as the server needs it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodFacts {
    /// Its UID in the runtime.
    pub uid: String,
    /// Names of its containers of every kind, and whether each has a terminal.
    pub containers: Vec<(String, bool)>,
    /// Its newest status.
    pub status: PodStatus,
}

/// Finds pods by name; answers from memory.
pub trait PodLookup: Send + Sync {
    /// The pod of this name that the node is to run.
    fn pod(&self, namespace: &str, name: &str) -> Option<PodFacts>;
}

/// What the kubelet's port is made of.
pub struct SecureParts {
    /// Versions, suites and the serving certificate.
    pub tls: TlsSettings,
    /// Who somebody is.
    pub authentication: Authentication,
    /// What they may do.
    pub authorization: Authorization,
    /// The Node object's name.
    pub node_name: String,
    /// Gate KubeletFineGrainedAuthz.
    pub fine_grained: bool,
    /// Which handlers are on.
    pub handlers: Handlers,
    /// Gate ExtendWebSocketsToKubelet.
    pub translate: bool,
    /// Gate PodLogsQuerySplitStreams.
    pub split_streams: bool,
    /// `streamingConnectionIdleTimeout`; zero: none.
    pub streaming_idle: Duration,
    /// What the pages show.
    pub view: Arc<dyn NodeView>,
    /// Which pods there are.
    pub pods: Arc<dyn PodLookup>,
    /// The container runtime.
    pub containers: Arc<dyn ContainerPort>,
    /// Figures that are collected when somebody asks.
    pub figures: Arc<dyn Figures>,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// What `/healthz` tells; also leads to the log whose verbosity can be set.
    pub health: Health,
    /// What `/logs/` shows.
    pub system_logs: LogTree,
    /// `podLogsDir`; links in the path of a container's log must not lead out of it.
    pub pod_logs: PathBuf,
    /// Where checkpoints of containers go.
    pub checkpoints: PathBuf,
    /// Kubernetes' version, as `1.36.1`.
    pub version: &'static str,
}

/// The server behind the kubelet's port.
pub(crate) struct Secure {
    acceptor: TlsAcceptor,
    authenticator: Authenticator,
    authorizer: Authorizer,
    handlers: Handlers,
    translate: bool,
    split_streams: bool,
    streaming_idle: Duration,
    health: Health,
    system_logs: Arc<LogTree>,
    pod_logs: PathBuf,
    checkpoints: PathBuf,
    version: &'static str,
    started: Timestamp,
    view: Arc<dyn NodeView>,
    pods: Arc<dyn PodLookup>,
    containers: Arc<dyn ContainerPort>,
    metrics: Arc<Metrics>,
    pages: ReadOnly,
    watch: LogWatch,
}

/// One connection, as its requests see it.
struct Connection {
    /// The client's certificates, leaf first; proven to be the client's, and nothing more.
    chain: Vec<CertificateDer<'static>>,
    /// Set once the client may take its time.
    patience: Patience,
    session: SessionSlot,
    stop: CancellationToken,
}

/// A body in one piece, or one made while it is taken.
pub(crate) enum SecureBody {
    Whole(ReplyBody),
    Pieces { pieces: Pin<Box<dyn Stream<Item = Bytes> + Send>>, _counted: Option<HttpRequest> },
}

impl Body for SecureBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(context),
            Self::Pieces { pieces, .. } => pieces.as_mut().poll_next(context).map(|p| p.map(|p| Ok(Frame::data(p)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(body) if body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Pieces { .. } => SizeHint::default(),
        }
    }
}

/// How a request is answered.
enum Outgoing {
    Reply(Reply),
    Pieces(Response<Pin<Box<dyn Stream<Item = Bytes> + Send>>>),
}

impl From<Reply> for Outgoing {
    fn from(reply: Reply) -> Self {
        Self::Reply(reply)
    }
}

impl Secure {
    /// # Errors
    /// Certificates, keys or CAs cannot be used.
    pub(crate) fn open(parts: SecureParts) -> Result<Self, TlsError> {
        let authenticator = Authenticator::open(parts.authentication, parts.metrics.clone())?;
        let config = tls::server_config(&parts.tls, authenticator.asks_certificates())?;
        Ok(Self {
            acceptor: TlsAcceptor::from(config),
            authenticator,
            authorizer: Authorizer::new(
                parts.authorization,
                parts.node_name,
                parts.fine_grained,
                parts.metrics.clone(),
            ),
            handlers: parts.handlers,
            translate: parts.translate,
            system_logs: Arc::new(parts.system_logs),
            pod_logs: parts.pod_logs,
            checkpoints: parts.checkpoints,
            version: parts.version,
            started: Timestamp::now(),
            health: parts.health.clone(),
            split_streams: parts.split_streams,
            streaming_idle: parts.streaming_idle,
            pages: ReadOnly {
                view: parts.view.clone(),
                figures: parts.figures,
                metrics: parts.metrics.clone(),
                health: parts.health,
            },
            view: parts.view,
            pods: parts.pods,
            containers: parts.containers,
            metrics: parts.metrics,
            watch: LogWatch::default(),
        })
    }

    /// Serves one connection until it ends; its session too.
    pub(crate) async fn connection(
        self: Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        limits: Limits,
        large: Arc<LargeAnswers>,
        stop: CancellationToken,
    ) {
        let patience: Patience = Arc::new(AtomicBool::new(false));
        let stream = StallGuard::new(stream, limits.stall).with_patience(patience.clone());
        // What goes wrong in a handshake is the client's doing, and it was told.
        let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await else { return };
        let tls = stream.get_ref().1;
        let http2 = tls.alpn_protocol() == Some(b"h2");
        let chain = tls.peer_certificates().unwrap_or_default().iter().map(|c| c.clone().into_owned()).collect();
        let session = SessionSlot::default();
        let of = Arc::new(Connection { chain, patience, session: session.clone(), stop: stop.clone() });
        let service = service_fn(move |request| {
            let (this, of, large) = (self.clone(), of.clone(), large.clone());
            async move { Ok::<_, Infallible>(this.answer(request, &of, &large).await) }
        });
        let stream = TokioIo::new(stream);
        if http2 {
            let connection = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW)
                .max_send_buf_size(WINDOW as usize)
                .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
                .keep_alive_interval(limits.head)
                .keep_alive_timeout(limits.head)
                .serve_connection(stream, service);
            return until_done(connection, |c| c.graceful_shutdown(), &stop).await;
        }
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head)
            .max_buf_size(limits.head_bytes)
            .serve_connection(stream, service)
            .with_upgrades();
        until_done(connection, |c| c.graceful_shutdown(), &stop).await;
        if let Some(session) = session.take() {
            tokio::select! { () = session => {}, () = stop.cancelled() => {} }
        }
    }

    async fn answer(&self, request: Request<Incoming>, of: &Connection, large: &LargeAnswers) -> Response<SecureBody> {
        let route = route::route(request.method(), request.uri().path(), request.uri().query(), &self.handlers);
        let counted = observed(&self.metrics, request.method(), request.uri(), "readwrite");
        let known = match route {
            Route::Redirect(to) => return redirect_to(request.method(), &to).map(SecureBody::Whole),
            Route::Unknown => return not_found().map(SecureBody::Whole),
            Route::Known(known) => known,
        };
        if let Err(refused) = self.let_through(request.method(), request.uri().path(), request.headers(), of).await {
            return refused.map(SecureBody::Whole);
        }
        match self.dispatch(known, request, of, large).await {
            Outgoing::Reply(reply) => {
                if reply.status() == StatusCode::SWITCHING_PROTOCOLS {
                    of.session.hold(counted);
                }
                reply.map(SecureBody::Whole)
            }
            // Counted until the last piece is taken.
            Outgoing::Pieces(pieces) => pieces.map(|pieces| SecureBody::Pieces { pieces, _counted: Some(counted) }),
        }
    }

    /// Who asks, and whether they may.
    async fn let_through(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        of: &Connection,
    ) -> Result<(), Box<Reply>> {
        let Some(user) = self.authenticator.user(&of.chain, headers).await else {
            return Err(Box::new(service_error(StatusCode::UNAUTHORIZED, "Unauthorized")));
        };
        self.authorizer.check(&user, method, &route::decode(path)).await.map_err(|refusal| {
            Box::new(match refusal {
                Refusal::Forbidden(why) => service_error(StatusCode::FORBIDDEN, why),
                Refusal::Unknown(why) => service_error(StatusCode::INTERNAL_SERVER_ERROR, why),
            })
        })
    }

    async fn dispatch(
        &self,
        known: Known,
        request: Request<Incoming>,
        of: &Connection,
        large: &LargeAnswers,
    ) -> Outgoing {
        let parameters = parameters(request.uri().query());
        match known {
            Known::Page => {
                let uri = plain(request.uri());
                let answer = self.pages.handle(request.method(), &uri, request.headers());
                large.give(answer, request.uri().path()).await.into()
            }
            Known::Configz => {
                let view = self.view.clone();
                let work = move || nosniff(json_reply(StatusCode::OK, &json!({"kubeletconfig": view.configz()})));
                large.give(Answer::Later(Box::new(work)), "/configz").await.into()
            }
            Known::Flagz => {
                let (view, headers) = (self.view.clone(), request.headers().clone());
                large
                    .give(Answer::Later(Box::new(move || zpages::flags(&headers, &view.flags()))), "/flagz")
                    .await
                    .into()
            }
            Known::Statusz => {
                let paths = ["/configz", "/debug", "/flagz", "/healthz", "/metrics"];
                let paths: Vec<&str> = paths.into_iter().filter(|p| self.handlers.flagz || *p != "/flagz").collect();
                zpages::status(request.headers(), self.version, &paths, self.started, Timestamp::now()).into()
            }
            Known::PodsPage => {
                let (view, namespace) = (self.view.clone(), first(&parameters, "namespace").map(str::to_owned));
                let work = move || {
                    let (node, pods) = (view.node_report(), view.pod_reports());
                    system_logs::html(pods_page::page(&node, pods, namespace.as_deref(), Timestamp::now()))
                };
                large.give(Answer::Later(Box::new(work)), "/debug/pods").await.into()
            }
            Known::SystemLogs(path) => {
                of.patience.store(true, Ordering::Relaxed);
                let (query, headers) = (request.uri().query(), request.headers());
                system_logs::answer(&self.system_logs, self.handlers.log_query, &path, query, &parameters, headers)
                    .await
            }
            Known::Profile(name) => debug::profile(&name, &parameters, &of.stop).await.into(),
            Known::Verbosity => {
                let (head, body) = request.into_parts();
                debug::verbosity(&head.method, body, self.health.log()).await.into()
            }
            Known::Checkpoint(target) => self.checkpoint(&target, &parameters).await.into(),
            Known::RunningPods => self.running_pods(request.headers()).await.into(),
            Known::Logs(target) => self.logs(&target, &parameters, of).await,
            Known::Run(target) => self.run(&target, &parameters).await.into(),
            Known::Exec(target) => self.exec(&target, &parameters, request, of).await.into(),
            Known::Attach(target) => self.attach(&target, &parameters, request, of).await.into(),
            Known::PortForward(target) => self.port_forward(&target, &parameters, request, of).await.into(),
            Known::NoPage => service_error(StatusCode::NOT_FOUND, "404: Page Not Found").into(),
            Known::Method(allowed) => {
                let mut reply = service_error(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
                reply.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
                reply.into()
            }
            Known::Disabled(why) => error(StatusCode::METHOD_NOT_ALLOWED, why).into(),
        }
    }

    async fn running_pods(&self, headers: &HeaderMap) -> Reply {
        if !accepts_json(headers) {
            let text = "406: Not Acceptable\n\nAvailable representations: application/json";
            return service_error(StatusCode::NOT_ACCEPTABLE, text);
        }
        let pods = match self.containers.running_pods().await {
            Ok(pods) => pods,
            Err(e) => return service_error(StatusCode::INTERNAL_SERVER_ERROR, e.rpc_text()),
        };
        let items: Vec<_> = pods
            .into_iter()
            .map(|pod| {
                let container =
                    |(name, image): &(String, String)| json!({"name": name, "image": image, "resources": {}});
                let containers: Vec<_> = pod.containers.iter().map(container).collect();
                let containers = if containers.is_empty() { json!(null) } else { json!(containers) };
                json!({"metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
                       "spec": {"containers": containers}, "status": {}})
            })
            .collect();
        let items = if items.is_empty() { json!(null) } else { json!(items) };
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items});
        json_reply(StatusCode::OK, &list)
    }

    async fn logs(&self, target: &Target, parameters: &[(String, String)], of: &Connection) -> Outgoing {
        let wrong = |wrong: Wrong| match wrong {
            Wrong::Undecodable => service_error(StatusCode::BAD_REQUEST, r#"{"message": "Unable to decode query."}"#),
            Wrong::Invalid => service_error(StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#),
            Wrong::SplitStreams(name) => service_error(
                StatusCode::BAD_REQUEST,
                format!(
                    "unable to return the given log stream: {name:?}. Please enable PodLogsQuerySplitStreams feature gate in kubelet"
                ),
            ),
        };
        let query = match LogQuery::parse(parameters, Timestamp::now()) {
            Ok(query) => query,
            Err(e) => return wrong(e).into(),
        };
        let Target { namespace, pod: name, container } = target;
        let Some(pod) = self.pods.pod(namespace, name) else {
            return service_error(StatusCode::NOT_FOUND, format!("pod {name:?} does not exist")).into();
        };
        if !pod.containers.iter().any(|(c, _)| c == container) {
            let text = format!("container {container:?} not found in pod {name:?}");
            return service_error(StatusCode::NOT_FOUND, text).into();
        }
        if let Err(e) = query.allow_streams(self.split_streams) {
            return wrong(e).into();
        }
        let full_id = match log_options::container_id(name, &pod.status, container, query.previous) {
            Ok(id) => id,
            Err(why) => {
                let mut reply = service_error(StatusCode::BAD_REQUEST, why);
                reply.headers_mut().remove(CONTENT_TYPE);
                return reply.into();
            }
        };
        // From here on the answer has begun, in Go: failures are its text.
        let id = full_id.split_once("://").map_or(full_id.as_str(), |(_, id)| id).to_owned();
        let text = |text: String| Outgoing::Pieces(Response::new(Box::pin(futures::stream::iter([Bytes::from(text)]))));
        let log = match self.containers.log(&id).await {
            Ok(log) => log,
            Err(e) => {
                tracing::warn!(err = %e, container = full_id, "Failed to find a container's log");
                return text(format!("unable to retrieve container logs for {full_id}"));
            }
        };
        let reader = match logs::open(&log.path, &self.pod_logs, query.read).await {
            Ok(reader) => reader,
            Err(why) => return text(why),
        };
        of.patience.store(true, Ordering::Relaxed);
        let follow = query.follow.then(|| logs::Follow {
            watch: self.watch.clone(),
            containers: self.containers.clone(),
            id,
            stop: of.stop.clone(),
        });
        Outgoing::Pieces(Response::new(Box::pin(logs::stream(reader, follow))))
    }
}

/// The URI with its path as it is meant.
fn plain(uri: &Uri) -> Uri {
    let path = route::decode(uri.path());
    if path == uri.path() {
        return uri.clone();
    }
    let text = uri.query().map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
    text.parse().unwrap_or_else(|_| uri.clone())
}
