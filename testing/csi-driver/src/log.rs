//! The record of calls.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

/// Appends lines; clones share the file.
#[derive(Clone)]
pub(crate) struct Log(Arc<Mutex<File>>);

impl Log {
    pub(crate) fn open(data: &Path) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(data.join("calls.jsonl"))?;
        Ok(Self(Arc::new(Mutex::new(file))))
    }

    /// One call. What cannot be written is lost: the test that reads it fails.
    pub(crate) fn line(&self, method: &str, request: Value, answer: &str) {
        let line = format!("{}\n", json!({"method": method, "request": request, "answer": answer}));
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes());
    }
}
