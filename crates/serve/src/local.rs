//! The local socket, `ROOT/rubelet/rubelet.sock`: what `rubelet pods`, `rubelet explain` and `rubelet check` ask.
//!
//! HTTP/1.1 over a unix socket of mode 0600 in a directory of mode 0700, so root only. All answers are JSON. The version is
//! part of the path ([`API_VERSION`]): within a version fields are only added, so clients must ignore those they do not know.
//!
//! | GET | answer |
//! |---|---|
//! | `/v1/pods` | list of [`PodReport`] |
//! | `/v1/pods/NAMESPACE/NAME` | one [`PodReport`]; NAME is a name, a UID, or the beginning of one name |
//! | `/v1/pods/NAME` | the same over all namespaces |
//! | `/v1/node` | [`NodeReport`](model::report::NodeReport) |
//! | `/v1/configz` | the configuration in force |
//!
//! Errors are `{"error": "…"}`: 404 nothing by that name or path, 405 not GET, 409 several pods fit.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::{HeaderMap, Method, StatusCode, Uri};
use model::report::PodReport;
use serde::{Deserialize, Serialize};

use crate::NodeView;
use crate::reply::{Answer, Reply, allow_get, json};
use crate::server::Handler;

/// The version of the local API; the first part of every path.
pub const API_VERSION: &str = "v1";

/// Where the socket is below `--root-dir`.
pub fn socket_path(root_dir: &Path) -> PathBuf {
    root_dir.join("rubelet").join("rubelet.sock")
}

/// The body of an error.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorBody {
    pub(crate) error: String,
}

pub(crate) struct Local {
    pub(crate) view: Arc<dyn NodeView>,
}

impl Handler for Local {
    fn handle(&self, method: &Method, uri: &Uri, _: &HeaderMap) -> Answer {
        if *method != Method::GET {
            let message = format!("{method} is not served here, only GET");
            return Answer::Now(allow_get(failure(StatusCode::METHOD_NOT_ALLOWED, message)));
        }
        let view = self.view.clone();
        let path = uri.path().to_owned();
        Answer::Later(Box::new(move || answer(view.as_ref(), &path)))
    }
}

fn answer(view: &dyn NodeView, path: &str) -> Reply {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match parts.as_slice() {
        ["v1", "pods"] => json(StatusCode::OK, &view.pod_reports()),
        ["v1", "pods", name] => one_pod(&view.pod_reports(), None, name),
        ["v1", "pods", namespace, name] => one_pod(&view.pod_reports(), Some(namespace), name),
        ["v1", "node"] => json(StatusCode::OK, &view.node_report()),
        ["v1", "configz"] => json(StatusCode::OK, &view.configz()),
        _ => failure(StatusCode::NOT_FOUND, format!("{path} is not served by this version of rubelet")),
    }
}

fn one_pod(pods: &[PodReport], namespace: Option<&str>, name: &str) -> Reply {
    match find(pods, namespace, name).as_slice() {
        [pod] => json(StatusCode::OK, pod),
        [] => {
            let place = namespace.map_or("on this node".to_owned(), |namespace| format!("in namespace {namespace}"));
            failure(StatusCode::NOT_FOUND, format!("no pod {name:?} {place}"))
        }
        several => {
            let names: Vec<String> =
                several.iter().map(|pod| format!("{}/{} ({})", pod.namespace, pod.name, pod.uid)).collect();
            failure(StatusCode::CONFLICT, format!("{name:?} fits several pods: {}", names.join(", ")))
        }
    }
}

/// The pods meant by a name: those called so exactly, else the one with this UID, else those whose name begins so. Two pods of
/// one name are there while the old one terminates.
fn find<'a>(pods: &'a [PodReport], namespace: Option<&str>, name: &str) -> Vec<&'a PodReport> {
    let rules: [fn(&PodReport, &str) -> bool; 3] =
        [|pod, name| pod.name == name, |pod, name| pod.uid == name, |pod, name| pod.name.starts_with(name)];
    if name.is_empty() {
        return Vec::new();
    }
    rules
        .iter()
        .map(|fits| {
            let here = |pod: &&PodReport| namespace.is_none_or(|namespace| pod.namespace == namespace);
            pods.iter().filter(here).filter(|pod| fits(pod, name)).collect::<Vec<_>>()
        })
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

fn failure(status: StatusCode, error: String) -> Reply {
    json(status, &ErrorBody { error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::tests::pod_report;

    #[test]
    fn names_uids_and_prefixes() {
        let pods = [
            pod_report("default", "web-node-a", "0f7af893"),
            pod_report("default", "web-node-a2", "3fcf1f62"),
            pod_report("kube-system", "web-node-a", "436d763b"),
            pod_report("kube-system", "etcd-node-a", "2ce0916f"),
        ];
        for (namespace, name, uids) in [
            (Some("default"), "web-node-a", vec!["0f7af893"]),
            (None, "web-node-a", vec!["0f7af893", "436d763b"]),
            (None, "436d763b", vec!["436d763b"]),
            (Some("default"), "436d763b", vec![]),
            (None, "etcd", vec!["2ce0916f"]),
            (Some("default"), "web", vec!["0f7af893", "3fcf1f62"]),
            (Some("kube-system"), "web", vec!["436d763b"]),
            (None, "nothing", vec![]),
            (None, "", vec![]),
        ] {
            let found: Vec<&str> = find(&pods, namespace, name).iter().map(|pod| pod.uid.as_str()).collect();
            assert_eq!(found, uids, "{namespace:?} {name}");
        }
    }
}
