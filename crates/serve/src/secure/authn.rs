//! Who asks: a client certificate, a bearer token that the API server knows (in its header field, or among the subprotocols of a WebSocket), or
//! nobody in particular.
//!
//! Every way is tried; one that fails is remembered, and refuses the request if no other way succeeds: bad credentials do not make one
//! anonymous.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cluster::ClusterResult;
use cluster::calls::AuthApi;
use cluster::pki::CertInfo;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use telemetry::LogLimiter;
use telemetry::metrics::Metrics;

use super::cache::TtlCache;
use super::tls::{ClientCa, TlsError};
use super::websocket::{self, BEARER};

/// Failures of one sort are logged once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Tokens whose answers are kept.
const TOKENS: usize = 1024;

/// Somebody who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) groups: Vec<String>,
    pub(crate) extra: BTreeMap<String, Vec<String>>,
}

/// How callers prove who they are (`authentication`).
#[derive(Clone)]
pub struct Authentication {
    /// `x509.clientCAFile`; None: client certificates are not asked for.
    pub client_ca_file: Option<PathBuf>,
    /// `webhook`: bearer tokens are reviewed by the API server, and answers kept for `cacheTTL`.
    pub tokens: Option<(Arc<dyn AuthApi>, Duration)>,
    /// `anonymous`: callers without credentials are `system:anonymous`.
    pub anonymous: bool,
}

pub(crate) struct Authenticator {
    client_ca: Option<ClientCa>,
    tokens: Option<Tokens>,
    anonymous: bool,
    metrics: Arc<Metrics>,
    limiter: LogLimiter,
}

struct Tokens {
    api: Arc<dyn AuthApi>,
    keep: Duration,
    /// By the token's digest: tokens themselves are not kept.
    answers: TtlCache<[u8; 32], Option<Arc<User>>>,
}

impl Authenticator {
    /// # Errors
    /// The client CAs cannot be read.
    pub(crate) fn open(settings: Authentication, metrics: Arc<Metrics>) -> Result<Self, TlsError> {
        Ok(Self {
            client_ca: settings.client_ca_file.map(ClientCa::open).transpose()?,
            tokens: settings.tokens.map(|(api, keep)| Tokens { api, keep, answers: TtlCache::new(TOKENS) }),
            anonymous: settings.anonymous,
            limiter: LogLimiter::new(LOG_INTERVAL),
            metrics,
        })
    }

    /// True when certificates of clients are looked at.
    pub(crate) fn asks_certificates(&self) -> bool {
        self.client_ca.is_some()
    }

    /// Who asks; None: 401.
    pub(crate) async fn user(&self, chain: &[CertificateDer<'_>], headers: &HeaderMap) -> Option<Arc<User>> {
        let mut refused = false;
        if let (Some(ca), Some(leaf)) = (&self.client_ca, chain.first()) {
            match ca.verify(chain).and_then(|()| certificate_user(leaf)) {
                Ok(Some((user, left))) => {
                    self.metrics.beside.client_certificate(left);
                    return Some(Arc::new(authenticated(user)));
                }
                // A certificate without a name says nothing about its holder.
                Ok(None) => {}
                Err(e) => {
                    self.failed("certificate", &e);
                    refused = true;
                }
            }
        }
        if let Some(tokens) = &self.tokens {
            let in_protocol = protocol_token(headers).unwrap_or_else(|why| {
                self.failed("token", &why);
                refused = true;
                None
            });
            for token in bearer(headers).map(str::to_owned).into_iter().chain(in_protocol) {
                match tokens.user(&token).await {
                    Ok(Some(user)) => return Some(user),
                    Ok(None) => self.failed("token", &"invalid bearer token"),
                    Err(e) => self.failed("review", &e),
                }
                refused = true;
            }
        }
        (self.anonymous && !refused).then(|| {
            let groups = vec!["system:unauthenticated".to_owned()];
            Arc::new(User { name: "system:anonymous".to_owned(), groups, ..User::default() })
        })
    }
}

impl Authenticator {
    /// Anybody can make a request fail, so only some of it is logged.
    fn failed(&self, what: &str, why: &dyn fmt::Display) {
        if let Some(suppressed) = self.limiter.allow(what, Instant::now()) {
            tracing::error!(err = %why, suppressed, "Unable to authenticate the request due to an error");
        }
    }
}

impl Tokens {
    async fn user(&self, token: &str) -> ClusterResult<Option<Arc<User>>> {
        let digest = Sha256::digest(token.as_bytes()).into();
        self.answers.get(digest, async { Ok((super::authz::in_time(self.review(token)).await?, self.keep)) }).await
    }

    async fn review(&self, token: &str) -> ClusterResult<Option<Arc<User>>> {
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer = super::authz::retried(|| self.api.review_token(&review)).await?;
        let status = answer.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(None);
        }
        let user = status.user.unwrap_or_default();
        Ok(Some(Arc::new(authenticated(User {
            name: user.username.unwrap_or_default(),
            uid: user.uid.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))))
    }
}

/// Adds the group of all who are somebody.
fn authenticated(mut user: User) -> User {
    let group = "system:authenticated";
    if !user.groups.iter().any(|g| g == group) {
        user.groups.push(group.to_owned());
    }
    user
}

/// Subject CN is the name, O the groups; the certificate's digest goes along, as the API server does it.
fn certificate_user(leaf: &CertificateDer<'_>) -> Result<Option<(User, f64)>, String> {
    let info = CertInfo::of(leaf)?;
    if info.common_name.is_empty() {
        return Ok(None);
    }
    let digest: String = Sha256::digest(leaf).iter().map(|b| format!("{b:02x}")).collect();
    let id = ("authentication.kubernetes.io/credential-id".to_owned(), vec![format!("X509SHA256={digest}")]);
    let left = info.not_after.duration_since(jiff::Timestamp::now()).as_secs_f64();
    let user =
        User { name: info.common_name, uid: String::new(), groups: info.organizations, extra: BTreeMap::from([id]) };
    Ok(Some((user, left)))
}

/// The token of `Authorization: Bearer TOKEN`.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut parts = headers.get(AUTHORIZATION)?.to_str().ok()?.trim().splitn(3, ' ');
    let (scheme, token) = (parts.next()?, parts.next()?);
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The token among the subprotocols of a WebSocket, where browsers have to put it: base64url without padding.
///
/// # Errors
/// What is wrong with it. A subprotocol beside it is needed, for the server to answer with.
fn protocol_token(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    if !websocket::asked_for(headers) {
        return Ok(None);
    }
    let mut tokens = websocket::protocols(headers).filter_map(|p| p.strip_prefix(BEARER));
    let Some(encoded) = tokens.next() else { return Ok(None) };
    if tokens.next().is_some() {
        return Err("multiple base64.bearer.authorization tokens specified");
    }
    let decoded = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| "invalid base64.bearer.authorization token encoding")?;
    let token = String::from_utf8(decoded).map_err(|_| "invalid base64.bearer.authorization token")?;
    if token.is_empty() {
        return Ok(None);
    }
    if websocket::protocols(headers).all(|p| p.starts_with(BEARER)) {
        return Err("missing additional subprotocol");
    }
    Ok(Some(token))
}
