//! `/checkpoint`: has the runtime write a running container's state into an archive (gate ContainerCheckpoint, KEP-2008).

use std::path::Path;
use std::time::Duration;

use http::StatusCode;
use jiff::Timestamp;
use serde_json::json;

use super::Secure;
use super::route::{Target, first};
use crate::reply::{JSON, Reply, reply, service_error};

impl Secure {
    /// Answers `POST /checkpoint/NAMESPACE/POD/CONTAINER?timeout=SECONDS` with the archive's path.
    pub(super) async fn checkpoint(&self, target: &Target, parameters: &[(String, String)]) -> Reply {
        let Target { namespace, pod: name, container } = target;
        let Some(pod) = self.pods.pod(namespace, name) else {
            return service_error(StatusCode::NOT_FOUND, "pod does not exist");
        };
        if !pod.containers.iter().any(|(c, _)| c == container) {
            return service_error(StatusCode::NOT_FOUND, format!("container {container} does not exist"));
        }
        let seconds = match first(parameters, "timeout").map(str::parse::<i64>) {
            None => 0,
            Some(Ok(seconds)) => seconds,
            Some(Err(_)) => return service_error(StatusCode::NOT_FOUND, "cannot parse value of timeout parameter"),
        };
        let failed = |why: String| {
            let text = format!("checkpointing of {namespace}/{name}/{container} failed ({why})");
            service_error(StatusCode::INTERNAL_SERVER_ERROR, text)
        };
        let Ok(seconds) = u64::try_from(seconds) else {
            return failed("CheckpointContainer requires the timeout value to be > 0".to_owned());
        };
        let id = match self.containers.running_container(&pod.uid, container).await {
            Ok(Some(id)) => id,
            Ok(None) => return failed(format!("container {container} not found")),
            Err(e) => return failed(e.rpc_text()),
        };
        let location = match location(&self.checkpoints, &format!("{name}_{namespace}"), container, Timestamp::now()) {
            Ok(location) => location,
            Err(e) => return failed(format!("make {}: {e}", self.checkpoints.display())),
        };
        match self.containers.checkpoint(&id, &location, Duration::from_secs(seconds)).await {
            Ok(()) => reply(StatusCode::OK, JSON, json!({"items": [location]}).to_string()),
            Err(e) => failed(e.rpc_text()),
        }
    }
}

/// Where the archive goes; the directory, for root alone, is made. Its name is that of the Go kubelet.
fn location(directory: &Path, pod: &str, container: &str, now: Timestamp) -> std::io::Result<String> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let file = format!("checkpoint-{pod}-{container}-{}.tar", now.strftime("%Y-%m-%dT%H:%M:%SZ"));
    Ok(directory.join(file).display().to_string())
}
