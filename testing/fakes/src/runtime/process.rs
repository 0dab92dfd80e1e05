//! What the processes in containers do, as scripts.

use std::sync::Arc;
use std::time::Duration;

use cri::ExecOutput;
use tokio::time::Instant;

/// Which containers a script is for. The narrowest one wins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum For {
    /// Containers of this image, as their config names it.
    Image(String),
    /// Containers of this name, in any pod.
    Container(String),
    /// The container of this name in the pod of this name.
    PodContainer(String, String),
}

/// What a process does on its stop signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnTerm {
    /// Dies of it: exit code 143.
    Die,
    /// Nothing: only SIGKILL ends it.
    Ignore,
    /// Ends by itself some time later.
    Exit {
        /// The time it takes.
        after: Duration,
        /// Exit code.
        code: i32,
    },
}

/// The life of a container's first process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// When it ends without being told to; None: never.
    pub runs_for: Option<Duration>,
    /// With which exit code.
    pub exit_code: i32,
    /// The runtime's reason for that end; None: `Completed` or `Error` after the exit code.
    pub reason: Option<String>,
    /// What it does on its stop signal.
    pub on_term: OnTerm,
    /// False: not even SIGKILL ends it, as with a process stuck in the kernel.
    pub killable: bool,
    /// It cannot be started at all: the runtime's message.
    pub start_error: Option<String>,
}

impl Process {
    /// Runs until its stop signal.
    pub fn forever() -> Self {
        Self { runs_for: None, exit_code: 0, reason: None, on_term: OnTerm::Die, killable: true, start_error: None }
    }

    /// Ends by itself with this code after this time.
    pub fn exits(code: i32, after: Duration) -> Self {
        Self { runs_for: Some(after), exit_code: code, ..Self::forever() }
    }

    /// Is killed for its memory after this time.
    pub fn out_of_memory(after: Duration) -> Self {
        Self { reason: Some("OOMKilled".into()), ..Self::exits(137, after) }
    }

    /// Cannot be started; the runtime says this.
    pub fn broken(message: impl Into<String>) -> Self {
        Self { start_error: Some(message.into()), ..Self::forever() }
    }

    /// The same, deaf to its stop signal.
    #[must_use]
    pub fn ignoring_term(self) -> Self {
        Self { on_term: OnTerm::Ignore, ..self }
    }

    /// The same, ending with this code this long after its stop signal.
    #[must_use]
    pub fn trapping_term(self, code: i32, after: Duration) -> Self {
        Self { on_term: OnTerm::Exit { after, code }, ..self }
    }

    /// The same, but SIGKILL does not end it either.
    #[must_use]
    pub fn unkillable(self) -> Self {
        Self { killable: false, ..self.ignoring_term() }
    }
}

/// A started process: its script, and when it will end.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) script: Process,
    pub(crate) ends_at: Option<Instant>,
    pub(crate) code: i32,
    pub(crate) reason: Option<String>,
}

impl Running {
    pub(crate) fn start(script: Process, now: Instant) -> Self {
        let ends_at = script.runs_for.map(|time| now + time);
        Self { code: script.exit_code, reason: script.reason.clone(), ends_at, script }
    }

    /// The stop signal arrives. An end that was to come sooner anyway stays.
    pub(crate) fn term(&mut self, now: Instant) {
        let (at, code) = match self.script.on_term {
            OnTerm::Ignore => return,
            OnTerm::Die => (now, 143),
            OnTerm::Exit { after, code } => (now + after, code),
        };
        if self.ends_at.is_none_or(|end| at < end) {
            (self.ends_at, self.code, self.reason) = (Some(at), code, None);
        }
    }
}

/// What a command run by ExecSync does.
#[derive(Clone, Debug, Default)]
pub struct Exec {
    /// Its output and exit code.
    pub output: ExecOutput,
    /// How long it runs.
    pub takes: Duration,
}

/// Answers a command.
pub(crate) type ExecScript = Arc<dyn Fn(&[String]) -> Exec + Send + Sync>;
