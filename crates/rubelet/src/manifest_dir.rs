//! The static pod directory on the real disk, watched by inotify.

use std::collections::HashMap;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use host::watch::{DirEvent, DirWatch};
use pod::ports::{HostError, HostResult};
use pod::source::file::{ManifestDir, ManifestFile, Stamp};
use tracing::warn;

/// Largest manifest, bytes. One byte more is read, so that a larger one is noticed.
const MAX: u64 = 10 * 1024 * 1024;

/// The directory; or one file, when the configured path names a file.
pub(crate) struct DiskManifests {
    path: PathBuf,
    watch: Option<DirWatch>,
    removed: Vec<PathBuf>,
}

impl DiskManifests {
    /// Begins to watch. Without inotify the periodic check is all there is.
    pub(crate) fn new(path: PathBuf) -> Self {
        let watch = DirWatch::new(&path)
            .map_err(|e| warn!(path = %path.display(), err = e.full(), "Changes of static pods cannot be watched, checking periodically"))
            .ok();
        Self { path, watch, removed: Vec::new() }
    }
}

impl DiskManifests {
    fn take(&mut self, event: host::Result<DirEvent>) {
        match event {
            Ok(DirEvent::Removed(name)) => self.removed.push(self.path.join(name)),
            Ok(DirEvent::Changed(_) | DirEvent::Rescan) => {}
            Err(e) => {
                warn!(err = e.full(), "Changes of static pods cannot be watched any more, checking periodically");
                self.watch = None;
            }
        }
    }
}

#[async_trait]
impl ManifestDir for DiskManifests {
    async fn list(&mut self, known: &HashMap<PathBuf, Stamp>) -> HostResult<Vec<ManifestFile>> {
        let (path, known) = (self.path.clone(), known.clone());
        let action = format!("read static pods from {}", path.display());
        match tokio::task::spawn_blocking(move || read_all(&path, &known)).await {
            Ok(Ok(files)) => Ok(files),
            Ok(Err(e)) => Err(HostError::new(action, e)),
            Err(e) => Err(HostError::new(action, e)),
        }
    }

    async fn changed(&mut self) {
        let Some(watch) = &mut self.watch else { return std::future::pending().await };
        let event = watch.next().await;
        self.take(event);
    }

    fn removed(&mut self) -> Vec<PathBuf> {
        // Everything that is known by now: what is read next is newer than all of it.
        while let Some(event) = self.watch.as_mut().and_then(ready) {
            self.take(event);
        }
        std::mem::take(&mut self.removed)
    }
}

/// The next event, if it is there.
fn ready(watch: &mut DirWatch) -> Option<host::Result<DirEvent>> {
    match std::pin::pin!(watch.next()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(event) => Some(event),
        Poll::Pending => None,
    }
}

fn read_all(path: &Path, known: &HashMap<PathBuf, Stamp>) -> std::io::Result<Vec<ManifestFile>> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    if !metadata.is_dir() {
        return Ok(read_one(path, known).into_iter().collect());
    }
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths.iter().filter_map(|p| read_one(p, known)).collect())
}

/// One file; None for what is no regular file (a link is followed) or vanished meanwhile.
fn read_one(path: &Path, known: &HashMap<PathBuf, Stamp>) -> Option<ManifestFile> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return None,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
        Err(e) => {
            return Some(ManifestFile { path: path.to_owned(), stamp: (0, 0, 0), content: Some(Err(e.to_string())) });
        }
    };
    let nanos = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    let stamp = (metadata.ino(), nanos, metadata.len());
    let content = (known.get(path) != Some(&stamp)).then(|| {
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|f| f.take(MAX + 1).read_to_end(&mut bytes))
            .map(|_| bytes)
            .map_err(|e| e.to_string())
    });
    Some(ManifestFile { path: path.to_owned(), stamp, content })
}
