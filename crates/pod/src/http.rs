//! One HTTP/1.1 GET, as probes, hooks and the manifest URL need it: a connection of its own, a bounded body. Probes and hooks follow redirects
//! that stay on the same host; no other host is ever contacted. Errors have the words of Go's client, since events show them.
//!
//! No deadline here: callers set one around it. Dropping the future closes the connection.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cluster::tls::AnyServer;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

/// Whether and how the connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Plain HTTP.
    Off,
    /// HTTPS whose certificate proves nothing (probes and hooks, as the API documents).
    Unverified,
    /// HTTPS against the host's trusted roots.
    Verified,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Get<'a> {
    /// Host name or address, without brackets.
    pub host: &'a str,
    /// Port.
    pub port: u16,
    /// Encryption.
    pub tls: Tls,
    /// Path and query; a leading slash is added.
    pub path: &'a str,
    /// User-Agent, unless a header says otherwise.
    pub agent: &'a str,
    /// More headers. `Host`, `User-Agent` and `Accept` replace the defaults; an empty value of those takes the default away.
    pub headers: Vec<(&'a str, &'a str)>,
    /// How much of the body is read, bytes; what is longer is cut.
    pub body_max: usize,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct GetAnswer {
    /// Status code.
    pub status: u16,
    /// Header `Location`.
    pub location: Option<String>,
    /// The body's beginning.
    pub body: Bytes,
    /// The body was longer.
    pub cut: bool,
}

impl GetAnswer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub enum GetError {
    /// The request itself cannot be sent (a header or path that HTTP does not allow).
    Invalid(String),
    /// Nobody answered.
    Failed(String),
    /// HTTPS was asked for, and the server spoke plain HTTP.
    NotTls(String),
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Invalid(text) | Self::Failed(text) | Self::NotTls(text)) = self;
        f.write_str(text)
    }
}

/// How many requests a row of redirects may take.
const REQUESTS: usize = 10;

/// Where a redirect leads, when it stays on the host.
struct Next {
    tls: bool,
    port: u16,
    path: String,
    absolute: bool,
}

impl Get<'_> {
    /// `HOST:PORT`.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn path(&self) -> String {
        if self.path.starts_with('/') { self.path.to_owned() } else { format!("/{}", self.path) }
    }

    /// The request's URL, for messages.
    pub fn url(&self) -> String {
        let scheme = if self.tls == Tls::Off { "http" } else { "https" };
        format!("{scheme}://{}{}", self.authority(), self.path())
    }

    /// Sends it, and follows redirects to whatever scheme, port and path of the same host name. One that leads to another host is the answer.
    /// With a limit, everything together must be done in it.
    ///
    /// # Errors
    /// As [`Self::send`]; also when there are too many redirects, or when the time is over.
    pub async fn follow(&self, limit: Option<Duration>) -> Result<GetAnswer, GetError> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut path = self.path.to_owned();
        let mut shown = String::new();
        let mut step = Get { path: "", headers: self.headers.clone(), ..*self };
        for _ in 0..REQUESTS {
            let request = Get { path: &path, headers: step.headers.clone(), ..step };
            let answer = match deadline {
                None => request.send().await?,
                Some(at) => tokio::time::timeout_at(at, request.send()).await.unwrap_or_else(|_| {
                    Err(request.failed(&"context deadline exceeded (Client.Timeout exceeded while awaiting headers)"))
                })?,
            };
            let redirect = matches!(answer.status, 301 | 302 | 303 | 307 | 308);
            let Some(location) = answer.location.as_deref().filter(|l| redirect && !l.is_empty()) else {
                return Ok(answer);
            };
            let Some(next) = request.resolve(location)? else { return Ok(answer) };
            step.tls = if next.tls { Tls::Unverified } else { Tls::Off };
            step.port = next.port;
            if next.absolute {
                step.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("host"));
            }
            path = next.path;
            shown = location.to_owned();
        }
        Err(GetError::Failed(format!("Get \"{shown}\": stopped after {REQUESTS} redirects")))
    }

    /// A `Location` seen from this request (RFC 3986, 5.2); None: another host.
    fn resolve(&self, location: &str) -> Result<Option<Next>, GetError> {
        let location = location.split('#').next().unwrap_or_default();
        let tls = self.tls != Tls::Off;
        let (scheme, rest) = match location.split_once("://") {
            Some((scheme, rest)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                (Some(scheme.to_ascii_lowercase()), Some(rest))
            }
            _ => (None, location.strip_prefix("//")),
        };
        let tls = match scheme.as_deref() {
            None => tls,
            Some("http") => false,
            Some("https") => true,
            Some(other) => return Err(self.failed(&format!("unsupported protocol scheme {other:?}"))),
        };
        if let Some(rest) = rest {
            let end = rest.find(['/', '?']).unwrap_or(rest.len());
            let (authority, path) = rest.split_at(end);
            let uri: http::uri::Authority = authority
                .parse()
                .map_err(|e| self.failed(&format!("failed to parse Location header {location:?}: {e}")))?;
            let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
            let same = uri.host().trim_matches(['[', ']']).eq_ignore_ascii_case(self.host);
            let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
            return Ok(same.then_some(Next { tls, port, path, absolute: true }));
        }
        if let Some((scheme, _)) = location.split(['/', '?']).next().unwrap_or_default().split_once(':') {
            // No path of this host: what stands before a colon is a scheme, or nothing that can be read (RFC 3986, 4.2).
            let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
            return Err(self.failed(&match is_scheme {
                true => format!("unsupported protocol scheme {:?}", scheme.to_ascii_lowercase()),
                false => format!(
                    "failed to parse Location header {location:?}: parse {location:?}: first path segment in URL cannot contain colon"
                ),
            }));
        }
        let own = self.path();
        let own = own.split('?').next().unwrap_or_default();
        let path = if location.starts_with('/') {
            location.to_owned()
        } else if location.starts_with('?') {
            format!("{own}{location}")
        } else {
            let dir = own.rfind('/').map_or("/", |at| &own[..=at]);
            without_dots(&format!("{dir}{location}"))
        };
        Ok(Some(Next { tls, port: self.port, path, absolute: false }))
    }

    /// Sends it.
    ///
    /// # Errors
    /// Tells a request that cannot be sent from one that nobody answered.
    pub async fn send(&self) -> Result<GetAnswer, GetError> {
        let request = self.request()?;
        let stream = tokio::net::TcpStream::connect((self.host, self.port))
            .await
            .map_err(|e| self.failed(&dial_error(&self.authority(), &e)))?;
        let config = match self.tls {
            Tls::Off => return self.exchange(stream, request).await,
            Tls::Unverified => unverified(),
            Tls::Verified => verified().map_err(|e| self.failed(&e))?,
        };
        let name = ServerName::try_from(self.host.to_owned()).map_err(|e| self.failed(&e))?;
        let stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await.map_err(|e| {
            let tls = e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
            if matches!(tls, Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType))) {
                let text = format!("Get \"{}\": http: server gave HTTP response to HTTPS client", self.url());
                return GetError::NotTls(text);
            }
            self.failed(&e)
        })?;
        self.exchange(stream, request).await
    }

    /// As [`Self::send`], over a connection that stands.
    pub(crate) async fn over(&self, stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<GetAnswer, GetError> {
        self.exchange(stream, self.request()?).await
    }

    /// Whether a `Location` seen from this request stays on its host.
    pub(crate) fn stays(&self, location: &str) -> bool {
        matches!(self.resolve(location), Ok(Some(_)))
    }

    fn request(&self) -> Result<http::Request<Empty<Bytes>>, GetError> {
        let authority = self.authority();
        let mut builder = http::Request::get(self.path());
        for (name, value) in [("Host", authority.as_str()), ("User-Agent", self.agent), ("Accept", "*/*")] {
            if !self.headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name)) {
                builder = builder.header(name, value);
            }
        }
        for (name, value) in self.headers.iter().filter(|(_, value)| !value.is_empty()) {
            builder = builder.header(*name, *value);
        }
        builder
            .header("Connection", "close")
            .body(Empty::<Bytes>::new())
            .map_err(|e| GetError::Invalid(format!("request for {} is invalid: {e}", self.url())))
    }

    fn failed(&self, why: &dyn fmt::Display) -> GetError {
        GetError::Failed(format!("Get \"{}\": {why}", self.url()))
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        request: http::Request<Empty<Bytes>>,
    ) -> Result<GetAnswer, GetError> {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.failed(&e))?;
        let exchange = async {
            let answer = sender.send_request(request).await.map_err(|e| self.failed(&broken(&e)))?;
            let status = answer.status().as_u16();
            let location =
                answer.headers().get(http::header::LOCATION).and_then(|l| l.to_str().ok()).map(ToOwned::to_owned);
            let (body, cut) = read_at_most(answer.into_body(), self.body_max).await;
            Ok(GetAnswer { status, location, body, cut })
        };
        // The connection is driven beside the request, in this one future.
        tokio::pin!(connection, exchange);
        tokio::select! {
            done = &mut exchange => done,
            closed = &mut connection => match closed {
                Ok(()) => exchange.await,
                Err(e) => Err(self.failed(&broken(&e))),
            },
        }
    }
}

/// A path without its `.` and `..` parts; the query stays.
fn without_dots(path: &str) -> String {
    let (path, query) = path.split_at(path.find('?').unwrap_or(path.len()));
    let mut parts: Vec<&str> = Vec::new();
    let all: Vec<&str> = path.split('/').skip(1).collect();
    for (i, part) in all.iter().enumerate() {
        match *part {
            "." | ".." => {
                if *part == ".." {
                    parts.pop();
                }
                if i + 1 == all.len() {
                    parts.push("");
                }
            }
            part => parts.push(part),
        }
    }
    format!("/{}{query}", parts.join("/"))
}

/// Go's words for a connection that could not be made.
pub(crate) fn dial_error(address: &str, error: &std::io::Error) -> String {
    use std::io::ErrorKind as Kind;
    let why = match error.kind() {
        Kind::ConnectionRefused => "connection refused",
        Kind::ConnectionReset => "connection reset by peer",
        Kind::HostUnreachable => "no route to host",
        Kind::NetworkUnreachable => "network is unreachable",
        Kind::TimedOut => "connection timed out",
        _ => return format!("dial tcp {address}: {error}"),
    };
    format!("dial tcp {address}: connect: {why}")
}

/// Go's words for an answer that broke off.
fn broken(error: &hyper::Error) -> String {
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset) {
            return "read: connection reset by peer".to_owned();
        }
        source = e.source();
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        "EOF".to_owned()
    } else {
        error.to_string()
    }
}

/// The beginning of a body, and whether there was more. A body that breaks off counts as far as it came.
async fn read_at_most(body: hyper::body::Incoming, max: usize) -> (Bytes, bool) {
    let mut body = Limited::new(body, max);
    let mut read = Vec::new();
    loop {
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    read.extend_from_slice(&data);
                }
            }
            Some(Err(_)) => return (Bytes::from(read), true),
            None => return (Bytes::from(read), false),
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(ring::default_provider())).clone()
}

fn unverified() -> Arc<ClientConfig> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    CONFIG
        .get_or_init(|| {
            let provider = provider();
            let verifier = AnyServer::new(provider.clone());
            let versions = [&rustls::version::TLS12, &rustls::version::TLS13];
            let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&versions);
            // ring offers suites for both versions, so this cannot fail; safe defaults are the same set.
            let builder = builder.unwrap_or_else(|_| ClientConfig::builder());
            Arc::new(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
        })
        .clone()
}

/// Trusted roots are read at each use: manifest URLs are polled seldom, and a replaced bundle counts at once.
fn verified() -> Result<Arc<ClientConfig>, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        return Err("no trusted certificates are installed on this host (package ca-certificates)".to_owned());
    }
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations() {
        let at =
            |tls, path| Get { host: "10.1.2.3", port: 8080, tls, path, agent: "", headers: Vec::new(), body_max: 0 };
        let go = |path, location: &str| match at(Tls::Off, path).resolve(location) {
            Ok(Some(n)) => format!("{}:{}{}", if n.tls { "s" } else { "p" }, n.port, n.path),
            Ok(None) => "elsewhere".to_owned(),
            Err(e) => e.to_string(),
        };
        for (path, location, expected) in [
            ("/a", "/b?c=d#e", "p:8080/b?c=d"),
            ("a", "b", "p:8080/b"),
            ("/a/b?q", "c", "p:8080/a/c"),
            ("/a/b/c", "../d", "p:8080/a/d"),
            ("/a/b/c", "../../..", "p:8080/"),
            ("/a/b", "./", "p:8080/a/"),
            ("/a?x", "?y", "p:8080/a?y"),
            ("/a", "http://10.1.2.3:8080/x", "p:8080/x"),
            ("/a", "http://10.1.2.3/x", "p:80/x"),
            ("/a", "https://10.1.2.3", "s:443/"),
            ("/a", "https://10.1.2.3:1?q", "s:1/?q"),
            ("/a", "//10.1.2.3:9/x", "p:9/x"),
            ("/a", "http://example.com/x", "elsewhere"),
            ("/a", "./b:c", "p:8080/b:c"),
            ("/a", "b?c:d", "p:8080/b?c:d"),
            (
                "/a",
                "http~://example.com/x",
                "Get \"http://10.1.2.3:8080/a\": failed to parse Location header \"http~://example.com/x\": parse \"http~://example.com/x\": first path segment in URL cannot contain colon",
            ),
            ("/a", "mailto:x", "Get \"http://10.1.2.3:8080/a\": unsupported protocol scheme \"mailto\""),
            ("/a", "ftp://10.1.2.3/x", "Get \"http://10.1.2.3:8080/a\": unsupported protocol scheme \"ftp\""),
        ] {
            assert_eq!(go(path, location), expected, "{path} {location}");
        }
    }
}
