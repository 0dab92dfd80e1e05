//! What does run: [`ObservedPod`], put together from the runtime's answers only.

use jiff::Timestamp;

use crate::pod::PodUid;

/// A sandbox as the runtime shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedSandbox {
    /// CRI id.
    pub id: String,
    /// CRI metadata attempt.
    pub attempt: u32,
    /// SANDBOX_READY.
    pub ready: bool,
    /// When it was created.
    pub created_at: Timestamp,
    /// True when its network namespace is the node's. Known only after PodSandboxStatus.
    pub host_network: bool,
    /// Its addresses: primary first, then additional ones. Empty for host network, or before status was asked.
    pub ips: Vec<String>,
    /// CRI runtime handler; empty for the default one.
    pub runtime_handler: String,
}

/// CRI container state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerState {
    /// Created, never started.
    Created,
    /// Running.
    Running,
    /// Exited.
    Exited,
    /// The runtime lost it.
    Unknown,
}

/// A container as the runtime shows it; what the kubelet wrote into labels and annotations at creation included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedContainer {
    /// CRI id.
    pub id: String,
    /// Label `io.kubernetes.container.name`.
    pub name: String,
    /// The sandbox that it was created in.
    pub sandbox_id: String,
    /// State.
    pub state: ContainerState,
    /// Annotation `io.kubernetes.container.restartCount`, else the CRI attempt.
    pub restart_count: u32,
    /// Annotation `io.kubernetes.container.hash` as a number, if it parses.
    pub hash: Option<u32>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was started, if it was.
    pub started_at: Option<Timestamp>,
    /// When it ended, if it did.
    pub finished_at: Option<Timestamp>,
    /// Exit code; meaningful when exited.
    pub exit_code: i32,
    /// The runtime's reason (`Completed`, `Error`, `OOMKilled`, …).
    pub reason: String,
    /// The runtime's message, the termination message joined to it where one was read.
    pub message: String,
    /// Image name as the runtime resolves it (status.image of the API).
    pub image: String,
    /// Image ref or id as the runtime reports it (status.imageID of the API).
    pub image_id: String,
    /// Annotation `io.kubernetes.container.terminationMessagePath`.
    pub termination_message_path: String,
    /// Annotation `io.kubernetes.container.terminationMessagePolicy`.
    pub termination_message_policy: String,
    /// Host path of the termination message file, found among its mounts.
    pub termination_message_host_path: Option<String>,
    /// Annotation `io.kubernetes.container.preStopHandler`, JSON of a LifecycleHandler.
    pub pre_stop: Option<String>,
    /// Annotation `io.kubernetes.pod.terminationGracePeriod`, seconds.
    pub termination_grace: Option<i64>,
    /// Annotation `io.kubernetes.pod.deletionGracePeriod`, seconds.
    pub deletion_grace: Option<i64>,
    /// CRI log path, absolute.
    pub log_path: String,
    /// Resources as the runtime has them (ContainerStatus.resources), when it says so.
    pub resources: Option<ObservedResources>,
    /// The user that the first process runs as, when the runtime says so: uid, gid, supplemental groups.
    pub user: Option<(i64, i64, Vec<i64>)>,
}

/// Linux resources that a running container has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedResources {
    /// CPU shares.
    pub cpu_shares: i64,
    /// CFS quota in µs a period; -1 or 0: none.
    pub cpu_quota: i64,
    /// CFS period in µs.
    pub cpu_period: i64,
    /// Memory limit in bytes; 0: none.
    pub memory_limit: i64,
}

/// Everything of one pod that the runtime knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedPod {
    /// Pod UID from the labels and sandbox metadata.
    pub uid: PodUid,
    /// Pod name from the same place.
    pub name: String,
    /// Pod namespace from the same place.
    pub namespace: String,
    /// Newest first: attempt descending, then createdAt descending, then id ascending.
    pub sandboxes: Vec<ObservedSandbox>,
    /// Newest first: restart count descending, then createdAt descending, then id ascending. Times alone do not tell: a clock may be set back.
    pub containers: Vec<ObservedContainer>,
}

impl ObservedPod {
    /// A pod of which the runtime has nothing.
    pub fn empty(uid: PodUid, name: &str, namespace: &str) -> Self {
        Self { uid, name: name.into(), namespace: namespace.into(), sandboxes: Vec::new(), containers: Vec::new() }
    }

    /// The newest container of this name, in any sandbox.
    pub fn newest(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// The newest container of this name in this sandbox.
    pub fn newest_in(&self, name: &str, sandbox_id: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.name == name && c.sandbox_id == sandbox_id)
    }

    /// True while something can still run: a running or unknown container, or a ready sandbox.
    pub fn anything_alive(&self) -> bool {
        self.sandboxes.iter().any(|s| s.ready)
            || self.containers.iter().any(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
    }

    /// Containers that run or may run.
    pub fn live_containers(&self) -> impl Iterator<Item = &ObservedContainer> {
        self.containers.iter().filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
    }

    /// Puts sandboxes and containers into the documented order.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by(|a, b| (b.attempt, b.created_at).cmp(&(a.attempt, a.created_at)).then_with(|| a.id.cmp(&b.id)));
        self.containers.sort_by(|a, b| {
            (b.restart_count, b.created_at).cmp(&(a.restart_count, a.created_at)).then_with(|| a.id.cmp(&b.id))
        });
    }
}
