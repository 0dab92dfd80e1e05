//! The sync plan's vocabulary: what the next round does to one pod, in the order in which it is done.

use jiff::Timestamp;

use crate::pod::ContainerKind;

/// Why a container is killed; reaches events, metrics and `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// Its image or name changed in the spec.
    DefinitionChanged,
    /// Its liveness probe failed.
    LivenessProbe,
    /// Its startup probe failed.
    StartupProbe,
    /// The sandbox is gone or must be replaced.
    SandboxChanged,
    /// The runtime reports it as unknown; it is stopped before it may start again.
    UnknownState,
    /// It is no longer in the spec.
    NotInSpec,
    /// A postStart hook failed.
    PostStartHook,
    /// A restart rule restarts the whole pod.
    RestartAllContainers,
    /// It gets other resources, and its `resizePolicy` asks for a restart.
    Resize,
    /// The pod is ending.
    PodEnding,
}

/// Stop one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// CRI id.
    pub id: String,
    /// Container name.
    pub name: String,
    /// Its kind; None when the spec no longer has it.
    pub kind: Option<ContainerKind>,
    /// Why.
    pub reason: KillReason,
    /// The event's text, as Go writes it.
    pub message: String,
    /// Grace that this reason sets, seconds (a probe's terminationGracePeriodSeconds); None: the pod's.
    pub grace: Option<i64>,
}

/// Create and start one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Its kind.
    pub kind: ContainerKind,
    /// Index within its list of the spec.
    pub index: usize,
    /// Container name.
    pub name: String,
    /// CRI attempt and `restartCount` of the new container, when the runtime still shows an older one;
    /// None: there is none, and the log directory must be asked (contract §1).
    pub restart_count: Option<u32>,
}

/// What happens to the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxStep {
    /// Nothing: none is needed.
    None,
    /// Use this one.
    Keep(String),
    /// Make a new one with this attempt; whatever is alive of the pod was stopped before.
    Create {
        /// CRI metadata attempt.
        attempt: u32,
    },
}

/// A container that is not started in this round, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Container name.
    pub name: String,
    /// `CrashLoopBackOff`, `PodInitializing`, …
    pub reason: &'static str,
    /// Go's message.
    pub message: String,
    /// When it may be tried again; None: not a matter of time.
    pub until: Option<Timestamp>,
}

/// CPU (in thousandths) and memory (in bytes) of a container; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// `requests.cpu`.
    pub cpu_request: i64,
    /// `limits.cpu`.
    pub cpu_limit: i64,
    /// `requests.memory`.
    pub memory_request: i64,
    /// `limits.memory`.
    pub memory_limit: i64,
}

/// Give a running container other resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// CRI id.
    pub id: String,
    /// Container name.
    pub name: String,
    /// What it has.
    pub from: Sizes,
    /// What it is to have.
    pub to: Sizes,
}

/// Resources that change while the pod runs. First memory, then CPU; of each the pod's cgroup before its containers where it grows, after them where
/// it shrinks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Containers whose memory changes: those that get less come first.
    pub memory: Vec<Update>,
    /// Containers whose CPU changes: those that get less come first.
    pub cpu: Vec<Update>,
    /// The pod's own cgroup, or its own resources, change.
    pub pod: bool,
}

/// The next round for one pod. Stages run in the order of the fields; an error in one stage ends the round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Stop every container and every sandbox of the pod first (sandbox replaced, or nothing left to run).
    pub kill_pod: bool,
    /// Containers to stop, all at once. Empty when `kill_pod` is set.
    pub kill: Vec<Kill>,
    /// Dead init containers to remove (all but the newest of each name).
    pub prune: Vec<String>,
    /// What happens to the sandbox.
    pub sandbox: SandboxStep,
    /// Resources that change. A failure here does not keep containers from being started.
    pub resize: Option<Resize>,
    /// Containers to start, one after the other, in this order: ephemeral, the next init or sidecars, apps. A failed ephemeral or app
    /// start does not stop the ones after it; a failed init or sidecar start ends the round.
    pub start: Vec<Start>,
    /// Containers that wait, and why.
    pub waiting: Vec<Waiting>,
    /// Earliest moment at which time alone changes the plan (a back-off that ends).
    pub wake_at: Option<Timestamp>,
}

impl Plan {
    /// True when the round changes nothing in the runtime.
    pub fn is_empty(&self) -> bool {
        !self.kill_pod
            && self.kill.is_empty()
            && self.prune.is_empty()
            && self.resize.is_none()
            && self.start.is_empty()
            && !matches!(self.sandbox, SandboxStep::Create { .. })
    }
}
