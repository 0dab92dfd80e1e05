//! What `rubelet pods` and `rubelet explain` say, as plain values; the local endpoint serves them as JSON.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::timeline::StepRecord;

/// One pod, as a person wants to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// Pod UID.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// `file`, `http` or `api`.
    pub source: String,
    /// Phase of the status: Pending, Running, Succeeded, Failed.
    pub phase: String,
    /// True when every container is ready.
    pub ready: bool,
    /// Pod addresses.
    pub ips: Vec<String>,
    /// `syncing`, `terminating` or `terminated`.
    pub state: String,
    /// The step it is at now, or the last one.
    pub step: Option<StepRecord>,
    /// The newest failure that a later success has not answered yet.
    pub last_error: Option<StepRecord>,
    /// What it waits for, in words (`back-off of container "web" until …`).
    pub waits_for: Vec<String>,
    /// Its containers in the order of the spec.
    pub containers: Vec<ContainerReport>,
    /// Steps from the first to the newest; old ones are folded away.
    pub timeline: Vec<StepRecord>,
}

/// One container of a [`PodReport`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerReport {
    /// Name.
    pub name: String,
    /// `init`, `sidecar`, `app` or `ephemeral`.
    pub kind: String,
    /// Image of the spec.
    pub image: String,
    /// `waiting: REASON`, `running`, `terminated: REASON`.
    pub state: String,
    /// The message that goes with it.
    pub message: String,
    /// Since when.
    pub since: Option<Timestamp>,
    /// Ready.
    pub ready: bool,
    /// restartCount.
    pub restarts: u32,
    /// Why and how it last stopped.
    pub last_stop: Option<StopReport>,
}

/// How a container last stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StopReport {
    /// `exit`, `oom`, `liveness probe`, `startup probe`, `eviction`, `hook`, `definition changed`, `pod deleted`, …
    pub why: String,
    /// Exit code.
    pub exit_code: i32,
    /// The runtime's reason.
    pub reason: String,
    /// When.
    pub at: Option<Timestamp>,
    /// Termination message.
    pub message: String,
}

/// How much a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Works, but will surprise somebody.
    Warning,
    /// The node will not work.
    Error,
}

/// One finding of `rubelet check` or `rubelet explain node`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// What was looked at (`runtime socket`, `swap`, …).
    pub topic: String,
    /// How much it weighs.
    pub severity: Severity,
    /// What was found, with values.
    pub message: String,
    /// What to do; empty when nothing.
    pub fix: String,
}

/// The node, as a person wants to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Node name.
    pub name: String,
    /// Would the Ready condition be True?
    pub ready: bool,
    /// The Ready condition's message, as Go writes it.
    pub message: String,
    /// Each part that readiness hangs on.
    pub findings: Vec<Finding>,
    /// Pods held.
    pub pods: usize,
    /// Pods whose containers all run.
    pub pods_running: usize,
}
