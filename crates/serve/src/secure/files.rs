//! Values made from files, and made anew when the files change. Looked at when the value is used, so that nothing runs while nobody asks.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use telemetry::LogLimiter;

/// What tells one version of a file from another, through symlinks.
type Stamp = Option<(u64, u64, i64, i64, u64)>;

type Make<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync>;

/// A value made from some files.
pub(crate) struct FromFiles<T> {
    paths: Vec<PathBuf>,
    make: Make<T>,
    held: Mutex<(Vec<Stamp>, Arc<T>)>,
    limiter: LogLimiter,
}

impl<T> FromFiles<T> {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read, or `make` refuses what is in it.
    pub(crate) fn open(
        paths: Vec<PathBuf>,
        make: impl Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let make: Make<T> = Box::new(make);
        let stamps = stamps(&paths);
        let value = Arc::new(read(&paths, &make)?);
        Ok(Self { paths, make, held: Mutex::new((stamps, value)), limiter: LogLimiter::new(Duration::from_secs(60)) })
    }

    /// The value. Files that cannot be used leave the one before in force, and are tried again the next time.
    pub(crate) fn get(&self) -> Arc<T> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamps(&self.paths);
        if now != held.0 {
            match read(&self.paths, &self.make) {
                Ok(value) => {
                    tracing::info!(files = ?self.paths, "Read changed files anew");
                    *held = (now, Arc::new(value));
                }
                Err(e) => {
                    if let Some(suppressed) = self.limiter.allow("reload", Instant::now()) {
                        tracing::warn!(
                            err = e,
                            suppressed,
                            "Changed files cannot be used, what was read before stays in force"
                        );
                    }
                }
            }
        }
        held.1.clone()
    }
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let m = std::fs::metadata(path).ok()?;
        Some((m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.size()))
    };
    paths.iter().map(stamp).collect()
}

fn read<T>(paths: &[PathBuf], make: &Make<T>) -> Result<T, String> {
    let read = |path: &PathBuf| std::fs::read(path).map_err(|e| format!("read {}: {e}", path.display()));
    let contents: Vec<_> = paths.iter().map(read).collect::<Result<_, _>>()?;
    make(&contents).map_err(|e| format!("use {}: {e}", paths[0].display()))
}
