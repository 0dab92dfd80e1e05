//! Sessions (`exec`, `attach`, `port-forward`): the client's connection and one to the runtime's streaming server become one, byte for byte.
//!
//! ```text
//!   client ══TLS══▶ this server ──TCP──▶ runtime's streaming server      SPDY/3.1 or WebSocket, neither looked at
//! ```
//!
//! (WebSockets that runtimes do not speak are translated: [`websocket`](super::websocket).)
//!
//! A session runs on its connection's task. Each direction has one buffer, and is read only when what was read before is written: a slow side
//! slows the other. The end of one direction is passed on, the other goes on. A session without a byte for `streamingConnectionIdleTimeout` ends.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HOST, HeaderName, HeaderValue, UPGRADE};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version, response};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::reply::{ReplyBody, error};

/// For the runtime's streaming server to take the connection and answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Of an answer that refuses.
const REFUSAL_BYTES: usize = 64 << 10;
/// Bytes in flight in each direction.
const BUFFER: usize = 16 << 10;
/// For a client to end after the runtime has.
const LINGER: Duration = Duration::from_secs(5);

/// A session that waits for its connection to be handed over.
#[derive(Clone, Default)]
pub(crate) struct SessionSlot(Arc<Mutex<Option<Session>>>);

/// A session's work.
pub(crate) type Session = Pin<Box<dyn Future<Output = ()> + Send>>;

impl SessionSlot {
    pub(crate) fn put(&self, session: Session) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(session);
    }

    /// Keeps a value until the session is over.
    pub(crate) fn hold(&self, value: impl Send + 'static) {
        if let Some(session) = self.take() {
            self.put(Box::pin(async move {
                session.await;
                drop(value);
            }));
        }
    }

    /// The session, if the connection's last request began one.
    pub(crate) fn take(&self) -> Option<Session> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Whether the client asks for another protocol.
pub(crate) fn is_upgrade(headers: &HeaderMap) -> bool {
    let asks = |value: &HeaderValue| value.to_str().is_ok_and(|v| v.to_ascii_lowercase().contains("upgrade"));
    headers.get_all(CONNECTION).iter().any(asks) && headers.contains_key(UPGRADE)
}

/// Passes the request on to the runtime's streaming server at `url`, and its answer back; when it is 101, the session goes into `slot`.
pub(crate) async fn proxy(
    mut request: Request<Incoming>,
    url: &str,
    idle: Duration,
    slot: &SessionSlot,
) -> Response<ReplyBody> {
    let client = hyper::upgrade::on(&mut request);
    let (mut head, runtime) = match open(request.method().clone(), request.headers().clone(), url).await {
        Ok(opened) => opened,
        Err(refusal) => return *refusal,
    };
    slot.put(Box::pin(async move {
        match tokio::try_join!(client, runtime) {
            Ok((client, runtime)) => relay(TokioIo::new(client), TokioIo::new(runtime), idle).await,
            Err(e) => tracing::debug!(err = %e, "A session ended before it began"),
        }
    }));
    head.extensions = http::Extensions::new();
    Response::from_parts(head, ReplyBody::new(Bytes::new()))
}

/// A SPDY connection to the runtime's streaming server at `url`, for streams of this protocol.
///
/// # Errors
/// The answer to give instead.
pub(crate) async fn open_spdy(url: &str, protocol: &'static str) -> Result<OnUpgrade, Box<Response<ReplyBody>>> {
    let headers = HeaderMap::from_iter([
        (CONNECTION, HeaderValue::from_static("Upgrade")),
        (UPGRADE, HeaderValue::from_static("SPDY/3.1")),
        (HeaderName::from_static("x-stream-protocol-version"), HeaderValue::from_static(protocol)),
    ]);
    open(Method::POST, headers, url).await.map(|(_, runtime)| runtime)
}

/// Has the runtime's streaming server switch to another protocol.
async fn open(
    method: Method,
    headers: HeaderMap,
    url: &str,
) -> Result<(response::Parts, OnUpgrade), Box<Response<ReplyBody>>> {
    let answer = match tokio::time::timeout(ANSWER, ask(method, headers, url)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(e)) => return Err(Box::new(failed(&e))),
        Err(_) => return Err(Box::new(failed(&format!("error dialing backend: no answer in {} s", ANSWER.as_secs())))),
    };
    let (mut head, body) = answer.into_parts();
    head.version = Version::HTTP_11;
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        let runtime = hyper::upgrade::on(Response::<Incoming>::from_parts(head.clone(), body));
        return Ok((head, runtime));
    }
    let body = match tokio::time::timeout(ANSWER, Limited::new(body, REFUSAL_BYTES).collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        _ => Bytes::new(),
    };
    for name in [http::header::CONTENT_LENGTH, http::header::TRANSFER_ENCODING, CONNECTION] {
        head.headers.remove(name);
    }
    Err(Box::new(Response::from_parts(head, ReplyBody::new(body))))
}

fn failed(message: &str) -> Response<ReplyBody> {
    tracing::error!(err = message, "Error while proxying request");
    error(StatusCode::INTERNAL_SERVER_ERROR, message)
}

/// Sends the request's head to the runtime.
async fn ask(method: Method, mut headers: HeaderMap, url: &str) -> Result<Response<Incoming>, String> {
    let url: Uri = url.parse().map_err(|e| format!("the runtime's URL {url:?} cannot be read: {e}"))?;
    let (Some("http"), Some(authority)) = (url.scheme_str(), url.authority()) else {
        return Err(format!("the runtime's streaming server is not spoken to by plain HTTP: {url}"));
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80)))
        .await
        .map_err(|e| format!("error dialing backend: {e}"))?;
    // Keystrokes are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| format!("error dialing backend: {e}"))?;
    // Ends when the connection is handed over, or the answer taken.
    tokio::spawn(connection.with_upgrades());
    // Who the caller is, is none of the runtime's business.
    headers.remove(http::header::AUTHORIZATION);
    super::websocket::without_token(&mut headers);
    if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
        headers.insert(HOST, host);
    }
    let mut passed = Request::new(Empty::<Bytes>::new());
    *passed.method_mut() = method;
    *passed.uri_mut() = url.path_and_query().map_or_else(Uri::default, |p| Uri::from(p.clone()));
    *passed.headers_mut() = headers;
    sender.send_request(passed).await.map_err(|e| format!("error dialing backend: {e}"))
}

/// Copies both ways until both have ended, or nothing moved for `idle` (zero: however long).
pub(crate) async fn relay(
    client: impl AsyncRead + AsyncWrite + Send,
    runtime: impl AsyncRead + AsyncWrite + Send,
    idle: Duration,
) {
    let activity = Activity::default();
    let (from_client, to_client) = tokio::io::split(client);
    let (from_runtime, to_runtime) = tokio::io::split(runtime);
    let up = pump(from_client, to_runtime, &activity);
    let down = pump(from_runtime, to_client, &activity);
    tokio::pin!(up, down);
    let copied = async {
        tokio::select! {
            // Without the client there is nobody to write to. Its plain end is passed on, and the runtime answers it by ending.
            sent = &mut up => if sent.is_ok() { let _ = down.await; },
            _ = &mut down => { let _ = tokio::time::timeout(LINGER, up).await; }
        }
    };
    tokio::select! {
        () = copied => {}
        () = activity.ceased(idle) => tracing::debug!("A session without traffic was ended"),
    }
}

/// When a byte last moved.
pub(crate) struct Activity {
    began: Instant,
    /// Milliseconds after `began`.
    last: AtomicU64,
}

impl Default for Activity {
    fn default() -> Self {
        Self { began: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl Activity {
    pub(crate) fn note(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    pub(crate) async fn ceased(&self, idle: Duration) {
        if idle.is_zero() {
            return std::future::pending().await;
        }
        loop {
            let end = self.began + Duration::from_millis(self.last.load(Ordering::Relaxed)) + idle;
            if end <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(end).await;
        }
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    activity: &Activity,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = from.read(&mut buffer).await?;
        activity.note();
        if n == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..n]).await?;
        to.flush().await?;
        activity.note();
    }
}
