//! A small client of the API server: blocking, one connection a request, objects as JSON values.
//!
//! A request after an outage thus finds the server at once, and nothing has to be kept alive or given up. The price is a TLS handshake
//! each time, about 2 ms.

use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

use super::pki::Pair;

type Stream = StreamOwned<ClientConnection, TcpStream>;

const LIMIT: Duration = Duration::from_secs(30);

/// What the API server answered instead of what was asked for.
#[derive(Debug)]
pub struct Refused {
    /// What was asked, as `GET /api/v1/nodes/a`.
    pub request: String,
    /// HTTP status code.
    pub code: u16,
    /// `reason` of the Status, as `NotFound`.
    pub reason: String,
    /// `message` of the Status, or the answer as it is.
    pub message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}: {}", self.request, self.code, self.reason, self.message)
    }
}

impl std::error::Error for Refused {}

/// The API server, as one user.
#[derive(Clone, Debug)]
pub struct Api {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
}

impl Api {
    /// The server at `address` (of the loopback network), whose certificate `authority` signed, as the user of `pair`.
    ///
    /// # Errors
    /// When a file cannot be read or is not what it should be.
    pub fn new(address: SocketAddr, authority: &Path, pair: &Pair) -> Result<Self> {
        let read = |file: &Path| fs::read(file).with_context(|| format!("cannot read {}", file.display()));
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&read(authority)?).context("the authority's certificate")?)?;
        let certificate =
            CertificateDer::from_pem_slice(&read(&pair.certificate)?).context("the client's certificate")?;
        let key = PrivateKeyDer::from_pem_slice(&read(&pair.key)?).context("the client's key")?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        Ok(Self { address, tls: Arc::new(tls) })
    }

    /// Status code and body of one request. `content_type` counts only with a body.
    ///
    /// # Errors
    /// When the server does not answer within 30 s, or not with HTTP.
    pub fn request(&self, method: &str, path: &str, content_type: &str, body: Option<&[u8]>) -> Result<(u16, Vec<u8>)> {
        let what = || format!("{method} {path}");
        let mut stream = self.open(method, path, content_type, body)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).with_context(what)?;
        crate::http::parse(&answer).with_context(|| format!("{}: not an HTTP answer", what()))
    }

    /// Sends a request; what is read next is its answer.
    fn open(&self, method: &str, path: &str, content_type: &str, body: Option<&[u8]>) -> Result<Stream> {
        let what = || format!("{method} {path}");
        let socket = TcpStream::connect_timeout(&self.address, LIMIT).with_context(what)?;
        socket.set_read_timeout(Some(LIMIT)).and_then(|()| socket.set_nodelay(true)).with_context(what)?;
        let name = ServerName::IpAddress(self.address.ip().into());
        let session = ClientConnection::new(Arc::clone(&self.tls), name).with_context(what)?;
        let mut stream = StreamOwned::new(session, socket);
        // HTTP/1.0: the server sends no chunks and closes at the end.
        let mut head = format!("{method} {path} HTTP/1.0\r\nHost: {}\r\nAccept: application/json\r\n", self.address);
        if let Some(body) = body {
            head.push_str(&format!("Content-Type: {content_type}\r\nContent-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut message = head.into_bytes();
        message.extend(body.unwrap_or_default());
        stream.write_all(&message).with_context(what)?;
        Ok(stream)
    }

    /// Follows the events of a watch, as `/api/v1/pods?watch=1`, until `told` says false or the server ends it.
    ///
    /// # Errors
    /// When the server does not answer, refuses, or says nothing for 30 s.
    pub fn watch(&self, path: &str, mut told: impl FnMut(Value) -> bool) -> Result<()> {
        let mut lines = BufReader::new(self.open("GET", path, "", None)?);
        let mut line = String::new();
        // HTTP/1.0: after the head, one line an event until the end.
        while lines.read_line(&mut line).with_context(|| format!("GET {path}"))? > 0 {
            if line.starts_with('{')
                && let Ok(event) = serde_json::from_str(&line)
                && !told(event)
            {
                break;
            }
            line.clear();
        }
        Ok(())
    }

    fn call(&self, method: &str, path: &str, content_type: &str, body: Option<&Value>) -> Result<Value> {
        let bytes = body.map(|b| b.to_string().into_bytes());
        let (code, answer) = self.request(method, path, content_type, bytes.as_deref())?;
        let value: Option<Value> = serde_json::from_slice(&answer).ok();
        if (200..300).contains(&code) {
            return value.with_context(|| format!("{method} {path}: the answer is not JSON"));
        }
        let status = value.unwrap_or_default();
        let text = |key: &str| status[key].as_str().map(str::to_owned);
        Err(Refused {
            request: format!("{method} {path}"),
            code,
            reason: text("reason").unwrap_or_default(),
            message: text("message").unwrap_or_else(|| String::from_utf8_lossy(&answer).trim().to_owned()),
        }
        .into())
    }

    /// The object or list at a path, as `/api/v1/nodes/a`.
    ///
    /// # Errors
    /// [`Refused`], or why there was no answer.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.call("GET", path, "", None)
    }

    /// As [`Api::get`]; None when there is no such object.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        absent(self.get(path))
    }

    /// The items of a list.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        let mut list = self.get(path)?;
        Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Adds an object to the collection at a path.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.call("POST", path, "application/json", Some(object))
    }

    /// Replaces the object at a path.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn replace(&self, path: &str, object: &Value) -> Result<Value> {
        self.call("PUT", path, "application/json", Some(object))
    }

    /// Merges fields into the object at a path (a JSON merge patch).
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn merge(&self, path: &str, fields: &Value) -> Result<Value> {
        self.call("PATCH", path, "application/merge-patch+json", Some(fields))
    }

    /// Deletes the object at a path, with DeleteOptions (as `{"gracePeriodSeconds": 0}`, or null); fine when it is not there.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn delete(&self, path: &str, options: &Value) -> Result<()> {
        let options = (!options.is_null()).then_some(options);
        absent(self.call("DELETE", path, "application/json", options)).map(drop)
    }
}

/// Turns "there is none" into None.
fn absent(result: Result<Value>) -> Result<Option<Value>> {
    match result {
        Ok(object) => Ok(Some(object)),
        Err(e) if e.downcast_ref::<Refused>().is_some_and(|r| r.code == 404) => Ok(None),
        Err(e) => Err(e),
    }
}
