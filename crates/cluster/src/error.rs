//! One error for everything that can go wrong with the API server: what was attempted, how it ended, what to do about it.

use std::fmt;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;

/// How a call ended; callers branch on this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// 401, or credentials that could not be had or have expired.
    Unauthorized,
    /// 403: known, but not allowed to.
    Forbidden,
    /// 404.
    NotFound,
    /// 409: changed or made by someone else meanwhile, or a precondition (uid) that does not hold.
    Conflict,
    /// 410: the resource version is too old, list again.
    Gone,
    /// 429; `retry_after` as the server asked, when it did.
    Throttled {
        /// Wait this long before the next try.
        retry_after: Option<Duration>,
    },
    /// Nothing was sent: no route, refused, name not resolved.
    Unreachable,
    /// The TLS handshake failed: wrong CA, wrong name, certificate outside its time.
    Tls,
    /// Sent, but no answer: deadline passed or connection lost. The server may or may not have done it.
    Timeout,
    /// 400 or 422: the server will never accept this.
    Invalid,
    /// 5xx.
    Server,
    /// Everything else: a bad kubeconfig, an answer that cannot be read.
    Other,
}

impl ErrorKind {
    /// True when the same call may succeed later without anybody changing anything.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Throttled { .. } | Self::Unreachable | Self::Timeout | Self::Server)
    }

    /// True when every other call fails too, until somebody mends it: no way to the server, or credentials that it does not take. The
    /// client has a line in the log for it, so that its callers need none.
    pub fn concerns_every_call(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Unreachable | Self::Tls)
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterError {
    /// What was attempted: `list pods`, `patch status of node n1`.
    pub action: String,
    /// How it ended.
    pub kind: ErrorKind,
    /// HTTP status; 0 without an answer.
    pub code: u16,
    /// The API's machine-readable reason (`AlreadyExists`, `NotFound`, `Expired`); may be empty.
    pub reason: String,
    /// The API's or the transport's words, in one line.
    pub message: String,
    /// What an operator can do; may be empty.
    pub advice: String,
}

/// The result of a call.
pub type ClusterResult<T> = Result<T, ClusterError>;

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.action, self.message)?;
        if !self.advice.is_empty() {
            write!(f, " ({})", self.advice)?;
        }
        Ok(())
    }
}

impl std::error::Error for ClusterError {}

impl ClusterError {
    /// An error without an HTTP answer.
    pub fn new(action: impl Into<String>, kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = one_line(&message.into());
        Self { action: action.into(), kind, code: 0, reason: String::new(), message, advice: String::new() }
    }

    /// The same with what to do about it.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }

    /// The error of an answer that is not a success: a `Status` object when the API server spoke, else the bare body (a proxy's).
    pub fn from_answer(action: impl Into<String>, code: u16, retry_after: Option<Duration>, body: &[u8]) -> Self {
        let status = serde_json::from_slice::<Status>(body).ok().filter(|s| s.status.is_some() || s.reason.is_some());
        match status {
            Some(status) => Self::from_status(action, code, retry_after, &status),
            None => {
                let text: String = String::from_utf8_lossy(body).chars().take(512).collect();
                let text = text.trim();
                let message = if text.is_empty() { format!("HTTP {code}") } else { format!("HTTP {code}: {text}") };
                Self::classified(action.into(), code, String::new(), message, retry_after)
            }
        }
    }

    /// The error that a `Status` object says (also inside a watch).
    pub fn from_status(action: impl Into<String>, http: u16, retry_after: Option<Duration>, status: &Status) -> Self {
        let code = status.code.and_then(|c| u16::try_from(c).ok()).filter(|c| *c != 0).unwrap_or(http);
        let reason = status.reason.clone().unwrap_or_default();
        let message =
            status.message.clone().filter(|m| !m.is_empty()).unwrap_or_else(|| format!("HTTP {code} {reason}"));
        let seconds = status.details.as_ref().and_then(|d| d.retry_after_seconds).filter(|s| *s > 0);
        let retry_after = retry_after.or(seconds.map(|s| Duration::from_secs(u64::from(s.unsigned_abs()))));
        Self::classified(action.into(), code, reason, message, retry_after)
    }

    fn classified(action: String, code: u16, reason: String, message: String, retry_after: Option<Duration>) -> Self {
        let kind = match code {
            401 => ErrorKind::Unauthorized,
            403 => ErrorKind::Forbidden,
            404 => ErrorKind::NotFound,
            409 => ErrorKind::Conflict,
            410 => ErrorKind::Gone,
            429 => ErrorKind::Throttled { retry_after },
            400 | 405 | 406 | 413 | 415 | 422 => ErrorKind::Invalid,
            504 => ErrorKind::Timeout,
            500..=599 => ErrorKind::Server,
            _ => ErrorKind::Other,
        };
        let advice = match kind {
            ErrorKind::Unauthorized => {
                "the API server does not know these credentials: renew the token or client certificate in the kubeconfig, and check this host's clock"
            }
            ErrorKind::Forbidden
                if ["is not allowed to modify node", "can only access", "only its own"]
                    .iter()
                    .any(|t| message.contains(t)) =>
            {
                "the credentials belong to another node: the kubeconfig and --hostname-override must name the same node"
            }
            // The node authorizer's "no" to an object that no pod here uses, and admission's refusals, speak for themselves.
            ErrorKind::Forbidden if message.contains("no relationship found") || !message.contains(" cannot ") => "",
            ErrorKind::Forbidden => {
                "RBAC or the node authorizer refuses it: the client needs user system:node:NAME in group system:nodes, and the API server --authorization-mode=Node,RBAC"
            }
            _ => "",
        };
        Self { action, kind, code, reason, message: one_line(&message), advice: advice.to_owned() }
    }

    /// True for 404.
    pub fn is_not_found(&self) -> bool {
        self.kind == ErrorKind::NotFound
    }

    /// True when an object of that name is there already (a 409 that is not a lost race).
    pub fn is_already_exists(&self) -> bool {
        self.kind == ErrorKind::Conflict && self.reason == "AlreadyExists"
    }

    /// True when the object has another uid than the call named: it was deleted and one of the same name made. (A patch gets 422
    /// `metadata.uid: … field is immutable`, a delete 409.)
    pub fn is_other_uid(&self) -> bool {
        match self.kind {
            ErrorKind::Invalid => self.message.contains("metadata.uid: Invalid value"),
            ErrorKind::Conflict => {
                self.message.contains("UID in the precondition") || self.message.contains("UID in precondition")
            }
            _ => false,
        }
    }

    /// True when the server may have done it all the same: look before repeating.
    pub fn outcome_unknown(&self) -> bool {
        self.kind == ErrorKind::Timeout
    }

    /// True when a list or watch must start over without a resource version.
    pub fn is_expired(&self) -> bool {
        self.kind == ErrorKind::Gone
            || matches!(self.reason.as_str(), "Expired" | "Gone")
            || self.is_too_large_version()
    }

    /// The server's state is older than what we have seen (an etcd restored from backup); also told as a 504 by its message.
    fn is_too_large_version(&self) -> bool {
        self.message.contains("Too large resource version")
    }

    /// How long the server asked us to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        match self.kind {
            ErrorKind::Throttled { retry_after } => retry_after,
            _ => None,
        }
    }
}

/// The words of an error and all its causes, without repetition.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        let more = e.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = e.source();
    }
    text
}

fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, body: &str) -> ClusterError {
        ClusterError::from_answer("get pod a", code, None, body.as_bytes())
    }

    #[test]
    fn kinds_follow_the_answer() {
        let cases = [
            (401, ErrorKind::Unauthorized),
            (403, ErrorKind::Forbidden),
            (404, ErrorKind::NotFound),
            (409, ErrorKind::Conflict),
            (410, ErrorKind::Gone),
            (422, ErrorKind::Invalid),
            (429, ErrorKind::Throttled { retry_after: None }),
            (500, ErrorKind::Server),
            (503, ErrorKind::Server),
            (504, ErrorKind::Timeout),
            (302, ErrorKind::Other),
        ];
        for (code, kind) in cases {
            assert_eq!(answer(code, "").kind, kind, "{code}");
        }
    }

    #[test]
    fn a_status_object_speaks_for_itself() {
        let e = answer(
            409,
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"nodes \"n1\" already exists","reason":"AlreadyExists","details":{"name":"n1","kind":"nodes"},"code":409}"#,
        );
        assert!(e.is_already_exists());
        assert_eq!(e.to_string(), "get pod a: nodes \"n1\" already exists");
        let e = answer(
            429,
            r#"{"kind":"Status","status":"Failure","message":"too many requests","reason":"TooManyRequests","details":{"retryAfterSeconds":7},"code":429}"#,
        );
        assert_eq!(e.retry_after(), Some(Duration::from_secs(7)));
    }

    #[test]
    fn a_proxy_page_is_cut_and_kept_in_one_line() {
        let e = answer(502, &format!("<html>\n<h1>Bad</h1>\n{}", "x".repeat(9000)));
        assert!(e.message.starts_with("HTTP 502: <html>; <h1>Bad</h1>; xxx"), "{}", e.message);
        assert!(e.message.len() < 600);
    }

    #[test]
    fn expiry_is_known_in_all_its_forms() {
        assert!(answer(410, "").is_expired());
        assert!(
            answer(504, r#"{"status":"Failure","message":"Timeout: Too large resource version: 9, current: 3","reason":"Timeout","code":504}"#)
                .is_expired()
        );
        assert!(!answer(500, "").is_expired());
    }

    #[test]
    fn the_wrong_node_is_told_from_missing_rbac() {
        let wrong = answer(
            403,
            r#"{"status":"Failure","reason":"Forbidden","code":403,"message":"nodes \"b\" is forbidden: node \"a\" is not allowed to modify node \"b\""}"#,
        );
        assert!(wrong.advice.contains("another node"), "{wrong}");
        let wrong = answer(
            403,
            r#"{"status":"Failure","reason":"Forbidden","code":403,"message":"nodes \"b\" is forbidden: User \"system:node:a\" cannot get resource \"nodes\" in API group \"\" at the cluster scope: node 'a' cannot read 'b', only its own Node object"}"#,
        );
        assert!(wrong.advice.contains("another node"), "{wrong}");
        let rbac = answer(
            403,
            r#"{"status":"Failure","reason":"Forbidden","code":403,"message":"pods is forbidden: User \"x\" cannot list resource"}"#,
        );
        assert!(rbac.advice.contains("system:node:NAME"), "{rbac}");
    }
}
