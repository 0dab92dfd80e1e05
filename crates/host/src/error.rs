//! The plain failure: what was attempted, and the system's answer as the source.

use std::io;
use std::path::Path;

/// A system operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Failed {
    /// What was attempted, with the path or value.
    pub what: String,
    /// The system's answer.
    pub source: io::Error,
}

/// The result of a system operation.
pub type Result<T> = std::result::Result<T, Failed>;

impl Failed {
    /// A failure of `what` because of `source`.
    pub fn new(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { what: what.into(), source: source.into() }
    }

    /// A failure that the system call itself did not report.
    pub fn other(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(what, io::Error::other(why.into()))
    }

    /// The kind of the system's answer.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// True when the thing was not there.
    pub fn is_not_found(&self) -> bool {
        self.kind() == io::ErrorKind::NotFound
    }

    /// True when the kernel refused for want of rights (EPERM, EACCES, EROFS): the caller may warn and go on.
    pub fn is_refused(&self) -> bool {
        matches!(self.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
    }

    /// What was attempted and why it failed, in one line.
    pub fn full(&self) -> String {
        format!("{}: {}", self.what, self.source)
    }
}

/// Says what was attempted.
pub trait Attempt<T> {
    /// Turns the error into a [`Failed`] with this text.
    fn attempt(self, what: impl FnOnce() -> String) -> Result<T>;

    /// As [`Attempt::attempt`], the text being `verb PATH`.
    fn on(self, verb: &str, path: &Path) -> Result<T>
    where
        Self: Sized,
    {
        self.attempt(|| format!("{verb} {}", path.display()))
    }
}

impl<T, E: Into<io::Error>> Attempt<T> for std::result::Result<T, E> {
    fn attempt(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Failed::new(what(), source))
    }
}

/// Turns "not there" into None.
pub(crate) fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
