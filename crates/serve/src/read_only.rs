//! The read-only port (`address`, `readOnlyPort`, off by default, usually 10255): no TLS and no authentication.
//!
//! | path | |
//! |---|---|
//! | `/healthz[/ping\|/log\|/syncloop]` | any method |
//! | `/metrics`, `/metrics/slis` | any method; text format 0.0.4 |
//! | `/stats/summary`, `/metrics/cadvisor`, … | see [`figures`](crate::figures) |
//! | `/pods`, `/pods/` | GET; a v1 PodList |
//! | `/run/…`, `/exec/…`, `/attach/…`, `/portForward/…`, `/containerLogs/…`, `/runningpods/`, `/debug/pprof/`, `/logs/` | 405 `Debug endpoints are disabled.` |
//!
//! Wrong paths and methods are answered as by Go's libraries, whose two 404 forms differ: net/http's below no known root,
//! go-restful's below one.

use std::sync::Arc;

use http::header::ACCEPT;
use http::{HeaderMap, Method, StatusCode, Uri};
use model::api::{ObjectMeta, Pod, PodSpec, PodStatus};
use serde::Serialize;
use serde::ser::SerializeSeq;
use serde_json::Value;
use telemetry::metrics::{HttpRequest, Metrics};

use crate::NodeView;
use crate::figures::{self, Figures};
use crate::health::{Checks, Health};
use crate::reply::{Answer, Reply, allow_get, error, json, not_found, redirect, reply, service_error};
use crate::server::Handler;

/// Subtrees of the authenticated port; this port knows them only to refuse them.
const DISABLED: [&str; 8] =
    ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/runningpods/", "/debug/pprof/", "/logs/"];

/// First parts of a path that have a label of their own in the HTTP metrics.
const PATH_LABELS: [&str; 19] = [
    "configz",
    "healthz",
    "pods",
    "stats",
    "metrics",
    "metrics/cadvisor",
    "metrics/probes",
    "metrics/resource",
    "run",
    "exec",
    "attach",
    "portForward",
    "containerLogs",
    "runningpods",
    "debug",
    "logs",
    "checkpoint",
    "flagz",
    "statusz",
];
const METHOD_LABELS: [&str; 8] = ["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];

pub(crate) struct ReadOnly {
    pub(crate) view: Arc<dyn NodeView>,
    pub(crate) figures: Arc<dyn Figures>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) health: Health,
}

impl Handler for ReadOnly {
    fn handle(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Answer {
        if let Some(reply) = self.health.answer(uri, Checks::All) {
            return Answer::Now(reply);
        }
        if let Some(answer) = figures::answer(&self.figures, &self.metrics, method, uri, headers) {
            return answer;
        }
        let path = uri.path();
        match path {
            "/metrics/slis" => self.text_page(Metrics::encode_slis),
            "/pods" | "/pods/" if *method != Method::GET => {
                Answer::Now(allow_get(service_error(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed")))
            }
            "/pods" | "/pods/" if !accepts_json(headers) => Answer::Now(service_error(
                StatusCode::NOT_ACCEPTABLE,
                "406: Not Acceptable\n\nAvailable representations: application/json",
            )),
            "/pods" | "/pods/" => {
                let view = self.view.clone();
                Answer::Later(Box::new(move || json(StatusCode::OK, &PodList::new(&complete(view.pods())))))
            }
            _ => Answer::Now(unknown(method, path)),
        }
    }

    fn observe(&self, method: &Method, uri: &Uri) -> Option<HttpRequest> {
        Some(observed(&self.metrics, method, uri, "readonly"))
    }
}

/// Counts a request to one of the two servers until the returned value is dropped.
pub(crate) fn observed(metrics: &Metrics, method: &Method, uri: &Uri, server: &'static str) -> HttpRequest {
    let method = METHOD_LABELS.iter().find(|label| **label == method.as_str()).unwrap_or(&"other");
    let root = root(uri.path());
    let path = PATH_LABELS.iter().find(|label| **label == root).unwrap_or(&"other");
    // Go names the third of them otherwise than it looks for it.
    let long_running = ["exec", "attach", "debug"].contains(path);
    metrics.http_request(method, path, server, long_running)
}

impl ReadOnly {
    fn text_page(&self, encode: fn(&Metrics) -> Result<String, telemetry::metrics::MetricsError>) -> Answer {
        let metrics = self.metrics.clone();
        Answer::Later(Box::new(move || match encode(&metrics) {
            Ok(page) => reply(StatusCode::OK, Metrics::CONTENT_TYPE, page),
            Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &cause.to_string()),
        }))
    }
}

/// The first part of a path; two parts below `/metrics`.
fn root(path: &str) -> &str {
    let path = path.strip_prefix('/').unwrap_or(path);
    let parts = if path.starts_with("metrics/") { 2 } else { 1 };
    match path.match_indices('/').nth(parts - 1) {
        Some((end, _)) => &path[..end],
        None => path,
    }
}

fn unknown(method: &Method, path: &str) -> Reply {
    for subtree in DISABLED {
        if path.starts_with(subtree) {
            return error(StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.");
        }
        if subtree.strip_suffix('/') == Some(path) {
            return redirect(method, subtree);
        }
    }
    match root(path) {
        "pods" | "stats" => service_error(StatusCode::NOT_FOUND, "404: Page Not Found"),
        _ => not_found(),
    }
}

/// go-restful's rule: without the header anything goes, else one of the ranges must be `*/*` or the type itself.
pub(crate) fn accepts_json(headers: &HeaderMap) -> bool {
    let Some(accept) = headers.get(ACCEPT).and_then(|value| value.to_str().ok()) else {
        return true;
    };
    accept.is_empty()
        || accept
            .split(',')
            .map(|range| range.split(';').next().unwrap_or_default().trim())
            .any(|range| matches!(range, "*/*" | "application/json"))
}

/// A v1 PodList over borrowed pods, with the fields of Go's encoding: items carry no kind of their own, and none at all is null.
#[derive(Serialize)]
struct PodList<'a> {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: Empty,
    items: Option<Items<'a>>,
}

#[derive(Serialize)]
struct Empty {}

struct Items<'a>(&'a [Pod]);

#[derive(Serialize)]
struct Item<'a> {
    metadata: &'a ObjectMeta,
    spec: &'a PodSpec,
    status: Status<'a>,
}

/// A status whose conditions have all the fields of Go's encoding: a time that is not set is null there.
struct Status<'a>(&'a PodStatus);

impl Serialize for Status<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = serde_json::to_value(self.0).map_err(serde::ser::Error::custom)?;
        let conditions = value.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten();
        for condition in conditions.filter_map(Value::as_object_mut) {
            for time in ["lastProbeTime", "lastTransitionTime"] {
                condition.entry(time).or_insert(Value::Null);
            }
        }
        value.serialize(serializer)
    }
}

/// Go's encoding shows a container's resources also when there are none.
fn complete(mut pods: Vec<Pod>) -> Vec<Pod> {
    for spec in pods.iter_mut().filter_map(|pod| pod.spec.as_mut()) {
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            container.resources.get_or_insert_default();
        }
        for container in spec.ephemeral_containers.iter_mut().flatten() {
            container.resources.get_or_insert_default();
        }
    }
    pods
}

impl<'a> PodList<'a> {
    fn new(pods: &'a [Pod]) -> Self {
        let items = (!pods.is_empty()).then_some(Items(pods));
        Self { kind: "PodList", api_version: "v1", metadata: Empty {}, items }
    }
}

impl Serialize for Items<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (no_spec, no_status) = (PodSpec::default(), PodStatus::default());
        let mut items = serializer.serialize_seq(Some(self.0.len()))?;
        for pod in self.0 {
            items.serialize_element(&Item {
                metadata: &pod.metadata,
                spec: pod.spec.as_ref().unwrap_or(&no_spec),
                status: Status(pod.status.as_ref().unwrap_or(&no_status)),
            })?;
        }
        items.end()
    }
}

#[cfg(test)]
mod tests {
    use model::api::{Container, PodCondition};

    use super::*;

    #[test]
    fn roots() {
        for (path, expected) in [
            ("/pods", "pods"),
            ("/pods/x/y", "pods"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/metrics/cadvisor/x", "metrics/cadvisor"),
            ("/", ""),
        ] {
            assert_eq!(root(path), expected, "{path}");
        }
    }

    #[test]
    fn accept() {
        for (value, yes) in [
            ("application/json", true),
            ("text/plain, */*;q=0.8", true),
            ("text/html, application/json; q=0.9", true),
            ("text/plain", false),
            ("application/vnd.kubernetes.protobuf", false),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, value.parse().unwrap())]);
            assert_eq!(accepts_json(&headers), yes, "{value}");
        }
        assert!(accepts_json(&HeaderMap::new()));
    }

    #[test]
    fn pod_list_is_encoded_as_by_go() {
        assert_eq!(
            serde_json::to_string(&PodList::new(&[])).unwrap(),
            r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}"#
        );
        let mut pod =
            Pod { metadata: ObjectMeta { name: Some("web".into()), ..ObjectMeta::default() }, ..Pod::default() };
        assert_eq!(
            serde_json::to_string(&PodList::new(&complete(vec![pod.clone()]))).unwrap(),
            concat!(
                r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#,
                r#"{"metadata":{"name":"web"},"spec":{"containers":[]},"status":{}}]}"#
            )
        );
        let container = Container { name: "c".into(), ..Container::default() };
        pod.spec = Some(PodSpec { containers: vec![container], ..PodSpec::default() });
        let ready = PodCondition { type_: "Ready".into(), status: "True".into(), ..PodCondition::default() };
        pod.status = Some(PodStatus { conditions: Some(vec![ready]), ..PodStatus::default() });
        let item = &serde_json::to_value(PodList::new(&complete(vec![pod]))).unwrap()["items"][0];
        assert_eq!(item["spec"]["containers"][0], serde_json::json!({"name": "c", "resources": {}}));
        let condition =
            serde_json::json!({"type": "Ready", "status": "True", "lastProbeTime": null, "lastTransitionTime": null});
        assert_eq!(item["status"]["conditions"][0], condition);
    }
}
