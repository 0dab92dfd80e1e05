//! Who may do what: a request becomes attributes of the Node object's subresources, and the API server says whether the caller has them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::calls::AuthApi;
use cluster::{ClusterError, ClusterResult, ErrorKind};
use http::Method;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use telemetry::metrics::Metrics;

use super::authn::User;
use super::cache::TtlCache;

/// Answers kept.
const ANSWERS: usize = 4096;
/// For an answer; then the request is refused.
const DEADLINE: Duration = Duration::from_secs(10);
/// Tries of a question to the API server, with waits of half a second growing by half (client-go's webhooks).
const TRIES: u32 = 5;

/// What a request needs: one verb on any of these subresources of the node, tried in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) verb: &'static str,
    pub(crate) subresources: &'static [&'static str],
}

/// The attributes of a request by its method and decoded path (KEP-2862 for the fine-grained ones).
pub(crate) fn attributes(method: &Method, path: &str, fine_grained: bool) -> Attributes {
    let verb = match *method {
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    };
    let below = |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let subresources: &[&str] = if below("/stats") {
        &["stats"]
    } else if below("/metrics") {
        &["metrics"]
    } else if below("/logs") {
        &["log"]
    } else if below("/checkpoint") {
        &["checkpoint"]
    } else if below("/statusz") {
        &["statusz"]
    } else if below("/flagz") {
        &["configz"]
    } else if !fine_grained {
        &["proxy"]
    } else if below("/pods") || below("/runningpods") || below("/debug/pods") {
        &["pods", "proxy"]
    } else if below("/healthz") {
        &["healthz", "proxy"]
    } else if below("/configz") {
        &["configz", "proxy"]
    } else {
        &["proxy"]
    };
    Attributes { verb, subresources }
}

/// Who may do what (`authorization`).
#[derive(Clone)]
pub enum Authorization {
    /// `AlwaysAllow`: everybody who is somebody.
    AlwaysAllow,
    /// `Webhook`: as the API server says.
    Webhook {
        /// The API server.
        api: Arc<dyn AuthApi>,
        /// `cacheAuthorizedTTL`.
        keep_allowed: Duration,
        /// `cacheUnauthorizedTTL`.
        keep_denied: Duration,
    },
}

/// A question: who, verb, subresource.
type Question = (Arc<User>, &'static str, &'static str);

pub(crate) struct Authorizer {
    mode: Authorization,
    node_name: String,
    fine_grained: bool,
    metrics: Arc<Metrics>,
    answers: TtlCache<Question, bool>,
}

/// Why a request is not let through.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// 403, with the text.
    Forbidden(String),
    /// 500, with the text: nobody could be asked.
    Unknown(String),
}

impl Authorizer {
    pub(crate) fn new(mode: Authorization, node_name: String, fine_grained: bool, metrics: Arc<Metrics>) -> Self {
        Self { mode, node_name, fine_grained, metrics, answers: TtlCache::new(ANSWERS) }
    }

    /// Lets the request through or not.
    pub(crate) async fn check(&self, user: &Arc<User>, method: &Method, path: &str) -> Result<(), Refusal> {
        let Authorization::Webhook { api, keep_allowed, keep_denied } = &self.mode else { return Ok(()) };
        let Attributes { verb, subresources } = attributes(method, path, self.fine_grained);
        for subresource in subresources {
            let answer = self
                .answers
                .get((user.clone(), verb, subresource), async {
                    let allowed = in_time(self.review(&**api, user, verb, subresource)).await?;
                    Ok((allowed, if allowed { *keep_allowed } else { *keep_denied }))
                })
                .await;
            match answer {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(e) => {
                    let e: ClusterError = e;
                    tracing::error!(
                        err = &e as &dyn std::error::Error,
                        user = user.name,
                        verb,
                        subresource,
                        "Authorization error"
                    );
                    return Err(Refusal::Unknown(format!(
                        "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource})",
                        user.name
                    )));
                }
            }
        }
        tracing::info!(v = 2, user = user.name, verb, resource = "nodes", subresources = ?subresources, "Forbidden");
        Err(Refusal::Forbidden(format!(
            "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
            user.name,
            subresources.join(" ")
        )))
    }

    async fn review(&self, api: &dyn AuthApi, user: &User, verb: &str, subresource: &str) -> ClusterResult<bool> {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let spec = SubjectAccessReviewSpec {
            user: some(&user.name),
            uid: some(&user.uid),
            groups: (!user.groups.is_empty()).then(|| user.groups.clone()),
            extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                verb: some(verb),
                version: some("v1"),
                resource: some("nodes"),
                subresource: some(subresource),
                name: some(&self.node_name),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let began = Instant::now();
        let answer = retried(|| api.review_access(&review)).await;
        self.metrics.beside.delegated_authz(answer.is_ok(), began.elapsed());
        let answer = answer?;
        // A denial and no opinion are the same here.
        Ok(answer.status.is_some_and(|s| s.allowed && s.denied != Some(true)))
    }
}

/// Gives up on an API server that does not answer.
pub(crate) async fn in_time<T>(call: impl Future<Output = ClusterResult<T>>) -> ClusterResult<T> {
    let late = || ClusterError::new("ask the API server about a caller", ErrorKind::Timeout, "it takes too long");
    tokio::time::timeout(DEADLINE, call).await.unwrap_or_else(|_| Err(late()))
}

/// Asks again while the answer is a passing failure.
pub(crate) async fn retried<T, F>(call: impl Fn() -> F) -> ClusterResult<T>
where
    F: Future<Output = ClusterResult<T>>,
{
    let mut wait = Duration::from_millis(500);
    for _ in 1..TRIES {
        match call().await {
            Err(e) if e.kind.is_transient() => tokio::time::sleep(wait).await,
            answer => return answer,
        }
        wait = wait * 3 / 2;
    }
    call().await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn attributes_of_paths() {
        for (path, fine, coarse) in [
            ("/pods", "pods proxy", "proxy"),
            ("/pods/", "pods proxy", "proxy"),
            ("/podsx", "proxy", "proxy"),
            ("/runningpods/", "pods proxy", "proxy"),
            ("/healthz", "healthz proxy", "proxy"),
            ("/healthz/syncloop", "healthz proxy", "proxy"),
            ("/configz", "configz proxy", "proxy"),
            ("/flagz", "configz", "configz"),
            ("/statusz", "statusz", "statusz"),
            ("/stats", "stats", "stats"),
            ("/stats/summary", "stats", "stats"),
            ("/metrics", "metrics", "metrics"),
            ("/metrics/cadvisor", "metrics", "metrics"),
            ("/logs", "log", "log"),
            ("/logs/containers/x", "log", "log"),
            ("/checkpoint/ns/pod/c", "checkpoint", "checkpoint"),
            ("/containerLogs/ns/pod/c", "proxy", "proxy"),
            ("/exec/ns/pod/c", "proxy", "proxy"),
            ("/run/ns/pod/c", "proxy", "proxy"),
            ("/attach/ns/pod/c", "proxy", "proxy"),
            ("/portForward/ns/pod", "proxy", "proxy"),
            ("/debug/pprof/heap", "proxy", "proxy"),
            ("/debug/flags/v", "proxy", "proxy"),
            ("/debug/pods", "pods proxy", "proxy"),
            ("/debug/podsx", "proxy", "proxy"),
            ("/", "proxy", "proxy"),
            ("", "proxy", "proxy"),
        ] {
            assert_eq!(attributes(&Method::GET, path, true).subresources.join(" "), fine, "{path}");
            assert_eq!(attributes(&Method::GET, path, false).subresources.join(" "), coarse, "{path}");
        }
        for (method, verb) in [
            ("GET", "get"),
            ("POST", "create"),
            ("PUT", "update"),
            ("PATCH", "patch"),
            ("DELETE", "delete"),
            ("HEAD", ""),
            ("OPTIONS", ""),
            ("get", ""),
        ] {
            assert_eq!(attributes(&method.parse().unwrap(), "/pods", true).verb, verb, "{method}");
        }
    }

    proptest! {
        /// A way into a container is never let through by a weaker right, however its path is written.
        #[test]
        fn containers_need_proxy(path in "(/|%2[fF]|\\.\\.?/|%2e|pods|exec|metrics|stats|logs|x|run|containerLogs|attach|%65xec|checkpoint|debug|flags/v|pprof){0,9}") {
            use crate::secure::route::{Known, Route, decode, route};
            for method in [Method::GET, Method::POST] {
                let known = match route(&method, &path, None, &crate::secure::tests::ALL) {
                    Route::Known(known) => known,
                    _ => continue,
                };
                let needs = attributes(&method, &decode(&path), true).subresources;
                match known {
                    Known::SystemLogs(_) => prop_assert_eq!(needs, ["log"], "{}", path),
                    Known::Checkpoint(_) => prop_assert_eq!(needs, ["checkpoint"], "{}", path),
                    Known::Profile(_) | Known::Verbosity => prop_assert_eq!(needs, ["proxy"], "{}", path),
                    Known::Logs(_) | Known::Run(_) | Known::Exec(_) | Known::Attach(_) | Known::PortForward(_) => {
                        prop_assert_eq!(needs, ["proxy"], "{}", path);
                    }
                    _ => {}
                }
            }
        }

        /// No path or query makes routing fail.
        #[test]
        fn any_path_and_query(path in "\\PC{0,60}", query in "\\PC{0,60}", debugging: bool) {
            use crate::secure::route::{parameters, route};
            let on = crate::secure::route::Handlers { debugging, ..crate::secure::tests::ALL };
            route(&Method::GET, &path, Some(&query), &on);
            parameters(Some(&query));
        }
    }
}
