//! The record of a pod's steps: what `rubelet explain`, `rubelet pods` and the time line show.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One kind of step on a pod's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepKind {
    /// A source showed the pod.
    Queued,
    /// Admission.
    Admit,
    /// Waiting for the runtime's network.
    Network,
    /// Pod cgroup.
    Cgroup,
    /// Data directories.
    Directories,
    /// Volumes attached and mounted.
    Volumes,
    /// A sandbox is created.
    Sandbox,
    /// An image is pulled or found present.
    Pull,
    /// A container is created.
    Create,
    /// A container is started.
    Start,
    /// A postStart hook.
    PostStart,
    /// Running containers, or the pod, get other resources.
    Resize,
    /// A container is stopped.
    Stop,
    /// A sandbox is stopped.
    StopSandbox,
    /// A container waits for its crash back-off.
    BackOff,
    /// The pod became ready.
    Ready,
    /// Volumes unmounted and directories removed.
    Cleanup,
    /// The pod's cgroup is removed.
    RemoveCgroup,
    /// Everything of it is gone.
    Gone,
}

/// How a step went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "result", content = "detail")]
pub enum StepResult {
    /// Still at it.
    Running,
    /// Done.
    Done,
    /// Failed, with the error chain.
    Failed(String),
    /// The call's outcome is not known; it is observed again before it is repeated.
    Unknown(String),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// What.
    pub kind: StepKind,
    /// Container name, image or volume that it is about; empty for the pod as a whole.
    pub subject: String,
    /// When it began.
    pub started: Timestamp,
    /// When it ended; None while it runs.
    pub ended: Option<Timestamp>,
    /// How it went.
    pub result: StepResult,
    /// How many times in a row this same step ended in this same way (1 = once).
    pub count: u32,
}
