//! Why a request to the runtime cannot be built.

use model::pod::DesiredPod;

/// The API's reason for a [`ConfigError`]: `state.waiting.reason` of a container, or the result of a sandbox start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The sandbox's request cannot be built.
    CreatePodSandbox,
    /// The container's request cannot be built.
    CreateContainerConfig,
    /// The image name does not parse.
    InvalidImageName,
    /// The image is absent, or may not be used, and the policy is Never.
    ErrImageNeverPull,
}

impl Reason {
    /// The text that the API shows.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CreatePodSandbox => "CreatePodSandboxError",
            Self::CreateContainerConfig => "CreateContainerConfigError",
            Self::InvalidImageName => "InvalidImageName",
            Self::ErrImageNeverPull => "ErrImageNeverPull",
        }
    }
}

/// A request cannot be built. `message` is what the API and the event (`Error: …`) show.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    /// The API's reason.
    pub reason: Reason,
    /// The text.
    pub message: String,
    /// The fact that the caller did not give, when that is the cause: a fault of the caller or a matter of time, never of the pod.
    pub missing: Option<String>,
}

impl ConfigError {
    pub(crate) fn container(message: impl Into<String>) -> Self {
        Self { reason: Reason::CreateContainerConfig, message: message.into(), missing: None }
    }

    pub(crate) fn sandbox(message: impl Into<String>) -> Self {
        Self { reason: Reason::CreatePodSandbox, message: message.into(), missing: None }
    }

    pub(crate) fn missing(reason: Reason, fact: impl Into<String>) -> Self {
        let fact = fact.into();
        Self { reason, message: format!("{fact} is not known yet"), missing: Some(fact) }
    }

    /// The same fault, met while the sandbox's request is built.
    pub(crate) fn in_sandbox(mut self) -> Self {
        self.reason = Reason::CreatePodSandbox;
        self
    }
}

/// `NAME_NAMESPACE(UID)`, the form in which messages name a pod.
pub fn pod_text(pod: &DesiredPod) -> String {
    format!("{}({})", pod.full_name(), pod.uid())
}
