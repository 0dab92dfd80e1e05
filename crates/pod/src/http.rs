//! One HTTP/1.1 GET, as probes, hooks and the manifest URL need it: a connection of its own, no redirects followed, a bounded body.
//!
//! No deadline here: callers set one around it. Dropping the future closes the connection.

use std::fmt;
use std::sync::{Arc, OnceLock};

use cluster::tls::AnyServer;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};

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
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Invalid(text) | Self::Failed(text)) = self;
        f.write_str(text)
    }
}

impl Get<'_> {
    fn authority(&self) -> String {
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

    /// Sends it.
    ///
    /// # Errors
    /// Tells a request that cannot be sent from one that nobody answered.
    pub async fn send(&self) -> Result<GetAnswer, GetError> {
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
        let request = builder
            .header("Connection", "close")
            .body(Empty::<Bytes>::new())
            .map_err(|e| GetError::Invalid(format!("request for {} is invalid: {e}", self.url())))?;
        let stream = tokio::net::TcpStream::connect((self.host, self.port))
            .await
            .map_err(|e| self.failed(&format!("dial tcp {authority}: {e}")))?;
        let config = match self.tls {
            Tls::Off => return self.exchange(stream, request).await,
            Tls::Unverified => unverified(),
            Tls::Verified => verified().map_err(|e| self.failed(&e))?,
        };
        let name = ServerName::try_from(self.host.to_owned()).map_err(|e| self.failed(&e))?;
        let stream =
            tokio_rustls::TlsConnector::from(config).connect(name, stream).await.map_err(|e| self.failed(&e))?;
        self.exchange(stream, request).await
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
            let answer = sender.send_request(request).await.map_err(|e| self.failed(&e))?;
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
                Err(e) => Err(self.failed(&e)),
            },
        }
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
