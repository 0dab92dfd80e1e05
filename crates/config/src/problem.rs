//! What is wrong with a configuration, as values that a caller can list.

use std::fmt;
use std::path::PathBuf;

use model::report::Severity;

/// One thing to say about a field, before it is known which file it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) severity: Severity,
    pub(crate) path: String,
    pub(crate) message: String,
}

impl Problem {
    pub(crate) fn error(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, path: path.into(), message: message.into() }
    }

    pub(crate) fn warning(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, path: path.into(), message: message.into() }
    }

    pub(crate) fn found_in(self, file: Option<PathBuf>) -> ConfigFinding {
        ConfigFinding { severity: self.severity, file, path: self.path, message: self.message }
    }
}

/// One finding about the configuration of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFinding {
    /// `Error`: the node must not start so. `Warning`: it starts, and this should be said.
    pub severity: Severity,
    /// The file it stands in; none for flags and for what the whole configuration breaks.
    pub file: Option<PathBuf>,
    /// Field path as in the file (`authentication.webhook.cacheTTL`), or `--flag`; empty for the whole file.
    pub path: String,
    /// What is wrong, with the value and what is allowed. Kubernetes' own wording where it has one.
    pub message: String,
}

impl fmt::Display for ConfigFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}: ", file.display())?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}
