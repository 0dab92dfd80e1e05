//! Faults on demand.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tonic::{Code, Status};

/// What goes wrong with one method.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Fault {
    /// Only with volumes whose handle begins so.
    handle: String,
    /// Milliseconds before anything is done.
    slow: u64,
    /// Never answers.
    hang: bool,
    /// Answers this code without doing anything.
    code: i32,
    /// Text of that answer.
    message: String,
    /// Ends the process before anything is done.
    crash: bool,
    /// Does the work, and then ends the process.
    crash_after: bool,
    /// Does the work, and then answers this code: the caller must ask again.
    lose: i32,
}

/// The fault of this call, if there is one.
fn of(data: &Path, method: &str, handle: &str) -> Option<Fault> {
    let text = std::fs::read(data.join("faults.json")).ok()?;
    let mut faults: std::collections::BTreeMap<String, Fault> = serde_json::from_slice(&text).ok()?;
    faults.remove(method).filter(|f| handle.starts_with(&f.handle))
}

/// What is to happen after the work.
pub(crate) struct After(Option<Fault>);

/// Lets happen what is to happen before the work.
pub(crate) async fn before(data: &Path, method: &str, handle: &str) -> Result<After, Status> {
    let Some(fault) = of(data, method, handle) else { return Ok(After(None)) };
    tokio::time::sleep(Duration::from_millis(fault.slow)).await;
    if fault.hang {
        std::future::pending::<()>().await;
    }
    if fault.crash {
        std::process::exit(3);
    }
    if fault.code != 0 {
        return Err(Status::new(Code::from_i32(fault.code), fault.message));
    }
    Ok(After(Some(fault)))
}

impl After {
    /// Lets happen what is to happen after the work.
    pub(crate) fn done<T>(self, result: Result<T, Status>) -> Result<T, Status> {
        let Some(fault) = self.0 else { return result };
        if fault.crash_after {
            std::process::exit(3);
        }
        match fault.lose {
            0 => result,
            code => result.and(Err(Status::new(Code::from_i32(code), fault.message))),
        }
    }
}
