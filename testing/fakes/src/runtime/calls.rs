//! The log of calls, for tests to look at.

use jiff::Timestamp;

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With an answer.
    Answered,
    /// With this gRPC code and message.
    Failed(i32, String),
    /// The connection was lost before the answer; it may have been done.
    Lost,
    /// It never arrived: the runtime was down.
    Unreachable,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The CRI method.
    pub call: &'static str,
    /// What it was about, readably: `namespace/pod`, `namespace/pod/container`, an image; empty for lists and the like.
    pub subject: String,
    /// The id in the request, if there is one.
    pub id: String,
    /// When it came.
    pub at: Timestamp,
    /// How it ended; None: not yet, or its caller gave up.
    pub ended: Option<Ended>,
}

impl Call {
    /// True for calls that change something.
    pub fn changes(&self) -> bool {
        const CHANGING: [&str; 15] = [
            "RunPodSandbox",
            "StopPodSandbox",
            "RemovePodSandbox",
            "UpdatePodSandboxResources",
            "CreateContainer",
            "StartContainer",
            "StopContainer",
            "RemoveContainer",
            "UpdateContainerResources",
            "CheckpointContainer",
            "ReopenContainerLog",
            "ExecSync",
            "PullImage",
            "RemoveImage",
            "UpdateRuntimeConfig",
        ];
        CHANGING.contains(&self.call)
    }
}
