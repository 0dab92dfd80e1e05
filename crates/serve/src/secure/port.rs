//! What the server asks of the container runtime, and nothing else of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cri::port::{CriResult, ExecOutput, RuntimeMutator, RuntimeReader, RuntimeStreaming};
use cri_api::v1;

const POD_UID: &str = "io.kubernetes.pod.uid";
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Where a container's log is, and whether more may come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerLog {
    /// The log's file.
    pub path: PathBuf,
    /// The container runs.
    pub running: bool,
}

/// A pod that runs, as the runtime knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Names and images of the containers that run.
    pub containers: Vec<(String, String)>,
}

/// What the server asks of the container runtime.
#[async_trait]
pub trait ContainerPort: Send + Sync {
    /// The id of the container of this name that runs.
    async fn running_container(&self, pod_uid: &str, name: &str) -> CriResult<Option<String>>;
    /// The id of the pod's ready sandbox.
    async fn ready_sandbox(&self, pod_uid: &str) -> CriResult<Option<String>>;
    /// All pods that run.
    async fn running_pods(&self) -> CriResult<Vec<RunningPod>>;
    /// Where a container's log is.
    async fn log(&self, id: &str) -> CriResult<ContainerLog>;
    /// Runs a command in a container until it ends.
    async fn run(&self, id: &str, command: Vec<String>) -> CriResult<ExecOutput>;
    /// Writes the state of a running container into an archive; `timeout` zero: the runtime's own.
    async fn checkpoint(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()>;
    /// The URL at which the runtime waits for the client of an exec.
    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String>;
    /// The URL at which the runtime waits for the client of an attach.
    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String>;
    /// The URL at which the runtime waits for the client of a port-forward.
    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String>;
}

/// The runtime behind [`ContainerPort`]. Of the right to change the runtime it has the ones to run a command and to
/// write a checkpoint on a user's behalf.
pub struct CriContainers {
    reader: Arc<dyn RuntimeReader>,
    streaming: Arc<dyn RuntimeStreaming>,
    mutator: Arc<dyn RuntimeMutator>,
}

impl CriContainers {
    /// Narrows the runtime's ports.
    pub fn new(
        reader: Arc<dyn RuntimeReader>,
        streaming: Arc<dyn RuntimeStreaming>,
        mutator: Arc<dyn RuntimeMutator>,
    ) -> Self {
        Self { reader, streaming, mutator }
    }

    async fn running(&self, labels: &[(&str, &str)]) -> CriResult<Vec<v1::Container>> {
        let state = v1::ContainerStateValue { state: v1::ContainerState::ContainerRunning as i32 };
        let label_selector = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let filter = v1::ContainerFilter { state: Some(state), label_selector, ..Default::default() };
        self.reader.list_containers(Some(filter)).await
    }

    async fn ready(&self, labels: &[(&str, &str)]) -> CriResult<Vec<v1::PodSandbox>> {
        let state = v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady as i32 };
        let label_selector = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let filter = v1::PodSandboxFilter { state: Some(state), label_selector, ..Default::default() };
        self.reader.list_pod_sandbox(Some(filter)).await
    }
}

#[async_trait]
impl ContainerPort for CriContainers {
    async fn running_container(&self, pod_uid: &str, name: &str) -> CriResult<Option<String>> {
        let found = self.running(&[(POD_UID, pod_uid), (CONTAINER_NAME, name)]).await?;
        Ok(found.into_iter().max_by_key(|c| c.created_at).map(|c| c.id))
    }

    async fn ready_sandbox(&self, pod_uid: &str) -> CriResult<Option<String>> {
        let found = self.ready(&[(POD_UID, pod_uid)]).await?;
        Ok(found.into_iter().max_by_key(|s| s.created_at).map(|s| s.id))
    }

    async fn running_pods(&self) -> CriResult<Vec<RunningPod>> {
        let (sandboxes, containers) = (self.ready(&[]).await?, self.running(&[]).await?);
        let mut pods: std::collections::BTreeMap<String, RunningPod> = std::collections::BTreeMap::new();
        let all = sandboxes.iter().map(|s| &s.labels).chain(containers.iter().map(|c| &c.labels));
        for labels in all {
            let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
            let uid = label(POD_UID);
            // Without: not a pod of a kubelet.
            if !uid.is_empty() {
                pods.entry(uid.clone()).or_insert_with(|| RunningPod {
                    namespace: label(POD_NAMESPACE),
                    name: label(POD_NAME),
                    uid,
                    containers: Vec::new(),
                });
            }
        }
        for container in containers {
            let label = |key: &str| container.labels.get(key).cloned().unwrap_or_default();
            if let Some(pod) = pods.get_mut(&label(POD_UID)) {
                pod.containers.push((label(CONTAINER_NAME), container.image.unwrap_or_default().image));
            }
        }
        Ok(pods.into_values().collect())
    }

    async fn log(&self, id: &str) -> CriResult<ContainerLog> {
        let status = self.reader.container_status(id, false).await?.status.unwrap_or_default();
        let running = status.state == v1::ContainerState::ContainerRunning as i32;
        Ok(ContainerLog { path: status.log_path.into(), running })
    }

    async fn run(&self, id: &str, command: Vec<String>) -> CriResult<ExecOutput> {
        self.mutator.exec_sync(id, command, None).await
    }

    async fn checkpoint(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        self.mutator.checkpoint_container(id, location, timeout).await
    }

    async fn exec(&self, request: v1::ExecRequest) -> CriResult<String> {
        self.streaming.exec(request).await
    }

    async fn attach(&self, request: v1::AttachRequest) -> CriResult<String> {
        self.streaming.attach(request).await
    }

    async fn port_forward(&self, request: v1::PortForwardRequest) -> CriResult<String> {
        self.streaming.port_forward(request).await
    }
}
