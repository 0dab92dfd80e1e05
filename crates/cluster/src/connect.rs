//! One connection to the API server: TCP (through a proxy if there is one), then TLS.
//!
//! Each connection can be cut from outside (the connector holds the signal), so that a connection that silently drops packets is
//! left at once when the lease notices.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Uri};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::error::ErrorKind;
use crate::tls::explain;

/// How long a TCP connection may take (as client-go's dialer).
const DIAL: Duration = Duration::from_secs(30);
/// How long the TLS handshake or the proxy may take (as client-go's transport).
const HANDSHAKE: Duration = Duration::from_secs(10);
/// TCP keep-alive, for HTTP/1.1 which has no pings (as client-go's dialer).
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Why there is no connection.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ConnectError {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
    pub(crate) advice: &'static str,
}

impl ConnectError {
    fn unreachable(message: String) -> Self {
        Self { kind: ErrorKind::Unreachable, message, advice: "" }
    }
}

/// Makes connections to one server.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) tls: Option<Arc<ClientConfig>>,
    pub(crate) tls_server_name: Option<String>,
    pub(crate) proxy: Arc<Matcher>,
    pub(crate) cut: CancellationToken,
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Link>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.connect(&uri).await.map(TokioIo::new) })
    }
}

impl Connector {
    async fn connect(&self, uri: &Uri) -> Result<Link, ConnectError> {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let https = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        let tcp = match self.proxy.intercept(uri).filter(|_| https && !is_loopback(host)) {
            Some(proxy) => {
                let via = proxy.uri();
                if via.scheme_str() != Some("http") {
                    return Err(ConnectError::unreachable(format!(
                        "HTTPS_PROXY names {via}, but only http:// proxies are supported"
                    )));
                }
                let tcp = dial(via.host().unwrap_or_default(), via.port_u16().unwrap_or(80)).await?;
                tokio::time::timeout(HANDSHAKE, tunnel(tcp, host, port, proxy.basic_auth()))
                    .await
                    .unwrap_or_else(|_| Err("no answer".to_owned()))
                    .map_err(|e| ConnectError::unreachable(format!("proxy {}: {e}", via.host().unwrap_or_default())))?
            }
            None => dial(host, port).await?,
        };
        let closed = Box::pin(self.cut.clone().cancelled_owned());
        let Some(tls) = self.tls.clone().filter(|_| https) else {
            return Ok(Link { stream: Stream::Plain(tcp), closed });
        };
        let name = self.tls_server_name.clone().unwrap_or_else(|| host.to_owned());
        let name = ServerName::try_from(name.clone()).map_err(|e| ConnectError {
            kind: ErrorKind::Tls,
            message: format!("TLS: server name {name:?}: {e}"),
            advice: "",
        })?;
        match tokio::time::timeout(HANDSHAKE, TlsConnector::from(tls).connect(name, tcp)).await {
            Ok(Ok(stream)) => Ok(Link { stream: Stream::Tls(Box::new(stream)), closed }),
            Ok(Err(error)) => match rustls_error(&error) {
                Some(tls) => {
                    let (message, advice) = explain(tls);
                    Err(ConnectError { kind: ErrorKind::Tls, message, advice })
                }
                None => Err(ConnectError::unreachable(format!("TLS handshake with {host}:{port}: {error}"))),
            },
            Err(_) => Err(ConnectError::unreachable(format!(
                "TLS handshake with {host}:{port}: no answer within {} s",
                HANDSHAKE.as_secs()
            ))),
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The TLS error inside an I/O error.
pub(crate) fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref::<rustls::Error>()
}

/// True when the server has certainly not begun with the request: it said goodbye to the connection (GOAWAY) before it came to it, or
/// refused the stream. The API server does so to whoever else shares a connection with a request that it answers with 401.
pub(crate) fn is_given_back(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(e) = next {
        if let Some(e) = e.downcast_ref::<h2::Error>() {
            let goodbye = e.is_go_away() && e.is_remote() && e.reason() == Some(h2::Reason::NO_ERROR);
            return goodbye || e.reason() == Some(h2::Reason::REFUSED_STREAM);
        }
        next = e.source();
    }
    false
}

async fn dial(host: &str, port: u16) -> Result<TcpStream, ConnectError> {
    let tcp = tokio::time::timeout(DIAL, TcpStream::connect((host, port)))
        .await
        .map_err(|_| ConnectError::unreachable(format!("dial {host}:{port}: no answer within {} s", DIAL.as_secs())))?
        .map_err(|e| ConnectError::unreachable(format!("dial {host}:{port}: {e}")))?;
    // Options that cannot be set only cost speed or the notice of a dead peer on HTTP/1.1.
    let _ = tcp.set_nodelay(true);
    let _ = rustix::net::sockopt::set_socket_keepalive(&tcp, true);
    let _ = rustix::net::sockopt::set_tcp_keepidle(&tcp, KEEP_ALIVE);
    let _ = rustix::net::sockopt::set_tcp_keepintvl(&tcp, KEEP_ALIVE);
    Ok(tcp)
}

/// HTTP CONNECT through a proxy.
async fn tunnel(mut tcp: TcpStream, host: &str, port: u16, auth: Option<&HeaderValue>) -> Result<TcpStream, String> {
    let target = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let mut ask = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes();
    if let Some(auth) = auth {
        ask.extend_from_slice(b"Proxy-Authorization: ");
        ask.extend_from_slice(auth.as_bytes());
        ask.extend_from_slice(b"\r\n");
    }
    ask.extend_from_slice(b"\r\n");
    tcp.write_all(&ask).await.map_err(|e| e.to_string())?;
    // Byte by byte, since what follows the answer already belongs to the tunnel; it is a few hundred bytes, once.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() > 8192 {
            return Err("the answer to CONNECT is too long".to_owned());
        }
        answer.push(tcp.read_u8().await.map_err(|e| e.to_string())?);
    }
    let line = String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned();
    if line.split(' ').nth(1) == Some("200") { Ok(tcp) } else { Err(format!("refused CONNECT {target}: {line}")) }
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection that ends when it is cut.
pub(crate) struct Link {
    stream: Stream,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Link {
    fn is_cut(&mut self, cx: &mut Context<'_>) -> bool {
        self.closed.as_mut().poll(cx).is_ready()
    }
}

fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "connection was given up")
}

impl Connection for Link {
    fn connected(&self) -> Connected {
        match &self.stream {
            Stream::Tls(tls) if tls.get_ref().1.alpn_protocol() == Some(b"h2") => Connected::new().negotiated_h2(),
            _ => Connected::new(),
        }
    }
}

impl AsyncRead for Link {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_cut(cx) {
            return Poll::Ready(Err(cut()));
        }
        match &mut self.stream {
            Stream::Plain(s) => Pin::new(s).poll_read(cx, buf),
            Stream::Tls(s) => Pin::new(s).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_cut(cx) {
            return Poll::Ready(Err(cut()));
        }
        match &mut self.stream {
            Stream::Plain(s) => Pin::new(s).poll_write(cx, buf),
            Stream::Tls(s) => Pin::new(s).poll_write(cx, buf),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(s) => Pin::new(s).poll_flush(cx),
            Stream::Tls(s) => Pin::new(s).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(s) => Pin::new(s).poll_shutdown(cx),
            Stream::Tls(s) => Pin::new(s).poll_shutdown(cx),
        }
    }
}
