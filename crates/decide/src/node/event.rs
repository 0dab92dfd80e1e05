//! Events about the node. Their texts are what people search for.

/// Whether an event tells of the course of things or of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// `Normal`.
    Normal,
    /// `Warning`.
    Warning,
}

impl EventKind {
    /// As the API has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// An event about the node, still to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// Its type.
    pub kind: EventKind,
    /// Machine-readable reason.
    pub reason: &'static str,
    /// Text.
    pub message: String,
}

impl NodeEvent {
    /// The agent has started.
    pub fn starting() -> Self {
        Self::normal("Starting", "Starting kubelet.".to_owned())
    }

    /// The cgroup above all pods has its limits.
    pub fn allocatable_enforced() -> Self {
        Self::normal("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods".to_owned())
    }

    /// The limits of a reserved cgroup are written, as `message` says.
    pub fn enforced(message: String) -> Self {
        Self::normal("NodeAllocatableEnforced", message)
    }

    /// The limits of the cgroup above all pods, or of a reserved one, cannot be written; `cgroup` as configured, `error` why.
    pub fn allocatable_not_enforced(cgroup: &str, error: &str) -> Self {
        Self {
            kind: EventKind::Warning,
            reason: "FailedNodeAllocatableEnforcement",
            message: format!("Failed to update Node Allocatable Limits {cgroup:?}: {error}"),
        }
    }

    /// The node's state is now that of `reason` (`NodeReady`, `NodeHasDiskPressure`, `NodeNotSchedulable`, …).
    pub fn status_is(node: &str, reason: &'static str) -> Self {
        Self::normal(reason, format!("Node {node} status is now: {reason}"))
    }

    /// Something runs short, and is about to be won back.
    pub fn eviction_threshold_met(message: String) -> Self {
        Self { kind: EventKind::Warning, reason: "EvictionThresholdMet", message }
    }

    /// The kernel killed a process because the node had no memory left.
    pub fn system_oom(process: &str, pid: Option<u32>) -> Self {
        let mut message = "System OOM encountered".to_owned();
        if let Some(pid) = pid.filter(|pid| *pid != 0 && !process.is_empty()) {
            message += &format!(", victim process: {process}, pid: {pid}");
        }
        Self { kind: EventKind::Warning, reason: "SystemOOM", message }
    }

    /// The machine was started anew since the last status.
    pub fn rebooted(node: &str, boot_id: &str) -> Self {
        Self {
            kind: EventKind::Warning,
            reason: "Rebooted",
            message: format!("Node {node} has been rebooted, boot id: {boot_id}"),
        }
    }

    /// The machine shuts down, or does not any more, as `message` says.
    pub fn shutdown(message: &str) -> Self {
        Self::normal("Shutdown", message.to_owned())
    }

    /// Trouble with one of the node's resources, in the words of the part that met it.
    pub fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind: EventKind::Warning, reason, message: message.into() }
    }

    fn normal(reason: &'static str, message: String) -> Self {
        Self { kind: EventKind::Normal, reason, message }
    }
}
