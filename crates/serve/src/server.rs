//! Build, bind, run, drain: one server over TCP or a unix socket, bounded on every side.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, Method, Request, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use telemetry::LogLimiter;
use telemetry::metrics::{HttpRequest, Metrics};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::NodeView;
use crate::figures::Figures;
use crate::health::{Checks, Health};
use crate::healthz::Healthz;
use crate::local::Local;
use crate::read_only::ReadOnly;
use crate::reply::{Answer, Reply, error};
use crate::secure::{Secure, SecureParts, TlsError};
use crate::stall::StallGuard;

/// Answers requests of one server.
pub(crate) trait Handler: Send + Sync {
    /// Must not wait.
    fn handle(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Answer;

    /// Counts a request until the returned value is dropped.
    fn observe(&self, _method: &Method, _uri: &Uri) -> Option<HttpRequest> {
        None
    }
}

/// What a server grants its clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once; more wait in the kernel's queue.
    pub connections: usize,
    /// Large answers (`/pods`, `/metrics`, the local API) held at once; more wait for at most `answer_wait`, then get 503.
    pub large_answers: usize,
    /// See `large_answers`.
    pub answer_wait: Duration,
    /// For the head of a request, from the connection's opening or the answer before; also ends idle connections.
    pub head: Duration,
    /// Without a byte taken by the client while an answer is written.
    pub stall: Duration,
    /// Bytes of a request's head.
    pub head_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            large_answers: 16,
            answer_wait: Duration::from_secs(10),
            head: Duration::from_secs(30),
            stall: Duration::from_secs(10),
            head_bytes: 64 * 1024,
        }
    }
}

/// Why a server could not listen, with what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("listening on {address} for the {server}: {advice}")]
pub struct BindError {
    /// Address and port, or the socket's path.
    pub address: String,
    /// Which server.
    pub server: &'static str,
    /// What to do.
    pub advice: String,
    /// What the system said.
    #[source]
    pub source: io::Error,
}

/// A server that is built but holds no socket yet.
pub struct Server {
    name: &'static str,
    /// The settings that move it, for advice.
    settings: &'static str,
    speaks: Speaks,
    limits: Limits,
}

/// What a server does with its connections.
#[derive(Clone)]
enum Speaks {
    /// HTTP/1.1 without TLS, to anybody.
    Plain(Arc<dyn Handler>),
    /// HTTPS, to those who may.
    Secure(Arc<Secure>),
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("name", &self.name).field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Server {
    /// `/healthz` for `healthzBindAddress` and `healthzPort`. [`Checks::Ping`] is what the Go kubelet runs there.
    pub fn healthz(health: Health, checks: Checks) -> Self {
        Self {
            name: "healthz server",
            settings: "healthzBindAddress and healthzPort",
            speaks: Speaks::Plain(Arc::new(Healthz { health, checks })),
            limits: Limits::default(),
        }
    }

    /// `/pods`, `/metrics`, `/stats/summary`, `/healthz` for `address` and `readOnlyPort`.
    pub fn read_only(
        view: Arc<dyn NodeView>,
        figures: Arc<dyn Figures>,
        metrics: Arc<Metrics>,
        health: Health,
    ) -> Self {
        Self {
            name: "read-only server",
            settings: "address and readOnlyPort",
            speaks: Speaks::Plain(Arc::new(ReadOnly { view, figures, metrics, health })),
            limits: Limits::default(),
        }
    }

    /// The JSON API of the command line, for [`socket_path`](crate::socket_path).
    pub fn local(view: Arc<dyn NodeView>) -> Self {
        Self {
            name: "local socket",
            settings: "--root-dir",
            speaks: Speaks::Plain(Arc::new(Local { view })),
            limits: Limits::default(),
        }
    }

    /// The kubelet's own API for `address` and `port`: TLS, authentication, authorization.
    ///
    /// # Errors
    /// The serving certificate or the client CAs cannot be used.
    pub fn kubelet(parts: SecureParts) -> Result<Self, TlsError> {
        Ok(Self {
            name: "kubelet server",
            settings: "address and port",
            speaks: Speaks::Secure(Arc::new(Secure::open(parts)?)),
            // Sessions and followed logs are connections too; idle ones are kept as long as Go keeps them.
            limits: Limits { connections: 1024, head: Duration::from_secs(90), ..Limits::default() },
        })
    }

    /// Other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Opens a TCP port; port 0 takes any free one.
    ///
    /// # Errors
    /// The port is taken, the address is not this host's, or it is not allowed.
    pub async fn bind_tcp(self, address: SocketAddr) -> Result<Bound, BindError> {
        match TcpListener::bind(address).await {
            Ok(listener) => Ok(Bound { listener: Listener::Tcp(listener), server: self }),
            Err(source) => {
                let settings = self.settings;
                let port = address.port();
                let advice = match source.kind() {
                    io::ErrorKind::AddrInUse => format!(
                        "port {port} is taken, perhaps by another kubelet: stop what holds it \
                         (ss -ltnp 'sport = :{port}' names it) or change {settings}"
                    ),
                    io::ErrorKind::AddrNotAvailable => {
                        format!("no interface of this host has the address {}: change {settings}", address.ip())
                    }
                    io::ErrorKind::PermissionDenied => format!("run as root or change {settings}"),
                    _ => format!("check {settings}"),
                };
                Err(self.failed(address.to_string(), advice, source))
            }
        }
    }

    /// Opens a unix socket of mode 0600 in a directory made with mode 0700. A socket that nobody listens on any more is
    /// replaced. It is removed when the server stops.
    ///
    /// # Errors
    /// Another process listens there, something else than a socket is in its place, or the directory cannot be made.
    pub async fn bind_unix(self, path: &Path) -> Result<Bound, BindError> {
        match listen_unix(path).await {
            Ok((listener, file)) => Ok(Bound { listener: Listener::Unix { listener, _file: file }, server: self }),
            Err((advice, source)) => Err(self.failed(path.display().to_string(), advice, source)),
        }
    }

    fn failed(&self, address: String, advice: String, source: io::Error) -> BindError {
        BindError { address, server: self.name, advice, source }
    }
}

/// The socket's file; removed with the server, unless another has taken its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

async fn listen_unix(path: &Path) -> Result<(UnixListener, SocketFile), (String, io::Error)> {
    let check = |source| ("check --root-dir and its file system".to_owned(), source);
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(check)?;
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o700)).map_err(check)?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(("it is no socket: remove it".to_owned(), io::ErrorKind::AlreadyExists.into()));
        }
        // Only a socket nobody listens on is stale; taking a live one would leave its owner unreachable.
        Ok(_) => match tokio::net::UnixStream::connect(path).await {
            Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(check)?;
            }
            _ => {
                let advice = "another rubelet runs with this --root-dir: stop it first".to_owned();
                return Err((advice, io::ErrorKind::AddrInUse.into()));
            }
        },
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(check(source)),
    }
    let listener = UnixListener::bind(path).map_err(|source| match source.kind() {
        io::ErrorKind::InvalidInput => {
            ("a socket's path may have 107 bytes: choose a shorter --root-dir".to_owned(), source)
        }
        _ => check(source),
    })?;
    // Until here the directory's mode keeps others out.
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).map_err(check)?;
    let inode = std::fs::symlink_metadata(path).map_err(check)?.ino();
    Ok((listener, SocketFile { path: path.to_owned(), inode }))
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _file: SocketFile },
}

/// A server with its socket open; clients may already connect but wait until it runs.
#[derive(Debug)]
pub struct Bound {
    listener: Listener,
    server: Server,
}

impl Bound {
    /// The address in use, as when port 0 was asked for; `None` for a unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix { .. } => None,
        }
    }

    /// Answers until `stop` is cancelled, then closes the socket and tells every connection to end after its running request.
    /// Dropping the future cuts all connections off.
    pub async fn run(self, stop: CancellationToken) -> Draining {
        let Self { listener, server: Server { name, speaks, limits, .. } } = self;
        let large = Arc::new(LargeAnswers::new(&limits));
        let slots = Arc::new(Semaphore::new(limits.connections));
        let limiter = LogLimiter::new(Duration::from_secs(60));
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                accepted = async {
                    // The semaphore is never closed, so this waits for a free slot and nothing else.
                    let slot = slots.clone().acquire_owned().await;
                    match &listener {
                        Listener::Tcp(tcp) => tcp.accept().await.map(|(stream, _)| (slot, Stream::Tcp(stream))),
                        Listener::Unix { listener, .. } => {
                            listener.accept().await.map(|(stream, _)| (slot, Stream::Unix(stream)))
                        }
                    }
                } => accepted,
            };
            while connections.try_join_next().is_some() {}
            match accepted {
                Ok((slot, stream)) => {
                    let served = serve(speaks.clone(), stream, limits, large.clone(), stop.clone());
                    connections.spawn(async move {
                        served.await;
                        drop(slot);
                    });
                }
                Err(cause) => {
                    if let Some(suppressed) = limiter.allow(name, Instant::now()) {
                        tracing::warn!(server = name, err = %cause, suppressed, "Failed to accept a connection");
                    }
                    // Out of descriptors or memory: the next attempt would fail at once as well.
                    tokio::select! {
                        () = stop.cancelled() => break,
                        () = tokio::time::sleep(Duration::from_millis(100)) => {}
                    }
                }
            }
        }
        Draining { name, connections }
    }
}

enum Stream {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

async fn serve(speaks: Speaks, stream: Stream, limits: Limits, large: Arc<LargeAnswers>, stop: CancellationToken) {
    match speaks {
        Speaks::Plain(handler) => {
            let service = Arc::new(Service { handler, limits, large, stop });
            match stream {
                Stream::Tcp(stream) => service.connection(stream).await,
                Stream::Unix(stream) => service.connection(stream).await,
            }
        }
        Speaks::Secure(secure) => match stream {
            Stream::Tcp(stream) => {
                // Clients may be silent for hours; those that are gone without a word are noticed.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
                let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, Duration::from_secs(180));
                secure.connection(stream, limits, large, stop).await;
            }
            Stream::Unix(stream) => secure.connection(stream, limits, large, stop).await,
        },
    }
}

/// Makes large answers, only so many at a time.
pub(crate) struct LargeAnswers {
    slots: Arc<Semaphore>,
    wait: Duration,
}

impl LargeAnswers {
    fn new(limits: &Limits) -> Self {
        Self { slots: Arc::new(Semaphore::new(limits.large_answers)), wait: limits.answer_wait }
    }

    /// Does the work that an answer needs, if any.
    pub(crate) async fn give(&self, answer: Answer, path: &str) -> Reply {
        if let Answer::Now(reply) = answer {
            return reply;
        }
        let Ok(Ok(permit)) = tokio::time::timeout(self.wait, self.slots.clone().acquire_owned()).await else {
            return error(StatusCode::SERVICE_UNAVAILABLE, "too many answers are being taken at once; try again");
        };
        let made = match answer {
            Answer::Now(reply) => Ok(reply),
            Answer::Later(work) => tokio::task::spawn_blocking(work).await,
            Answer::Wait(work) => Ok(work.await),
        };
        match made {
            Ok(mut reply) => {
                reply.body_mut().hold(permit);
                reply
            }
            Err(cause) => {
                tracing::error!(path, err = %cause, "Failed to answer a request");
                error(StatusCode::INTERNAL_SERVER_ERROR, "internal server error")
            }
        }
    }
}

/// A server that accepts no more and has requests still running.
#[derive(Debug)]
pub struct Draining {
    name: &'static str,
    connections: JoinSet<()>,
}

impl Draining {
    /// Waits for the running requests, at most for `deadline`, then cuts the rest off; their number is returned.
    pub async fn drain(mut self, deadline: Duration) -> usize {
        let all = async { while self.connections.join_next().await.is_some() {} };
        if tokio::time::timeout(deadline, all).await.is_ok() {
            return 0;
        }
        let left = self.connections.len();
        tracing::info!(v = 2, server = self.name, connections = left, "Cut off connections at the end of the drain");
        self.connections.shutdown().await;
        left
    }
}

/// Drives a connection to its end. At `stop` it is shut down: what was begun is answered, nothing more is taken.
pub(crate) async fn until_done<C: Future>(connection: C, shut_down: fn(Pin<&mut C>), stop: &CancellationToken) {
    tokio::pin!(connection);
    // What goes wrong on a connection is its client's doing (gone, slow, not HTTP), and has been answered if it can be.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = stop.cancelled() => {
            shut_down(connection.as_mut());
            let _ = connection.await;
        }
    }
}

/// One server's rules for each of its connections.
struct Service {
    handler: Arc<dyn Handler>,
    limits: Limits,
    large: Arc<LargeAnswers>,
    stop: CancellationToken,
}

impl Service {
    async fn connection(self: Arc<Self>, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let stop = self.stop.clone();
        let limits = self.limits;
        let service = service_fn(move |request| {
            let this = self.clone();
            async move { Ok::<_, std::convert::Infallible>(this.answer(request).await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head)
            .max_buf_size(limits.head_bytes)
            .serve_connection(TokioIo::new(StallGuard::new(stream, limits.stall)), service);
        until_done(connection, |c| c.graceful_shutdown(), &stop).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Reply {
        let (method, uri) = (request.method(), request.uri());
        let _counted = self.handler.observe(method, uri);
        let answer = self.handler.handle(method, uri, request.headers());
        self.large.give(answer, uri.path()).await
    }
}

#[cfg(test)]
pub(crate) mod tests;
