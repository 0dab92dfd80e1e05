//! Writes the managers' checkpoints.
//!
//! Task: owned by [`crate::Managers`], ends with the agent after a last write. Queue: 64 who wait for a write, and a flag for those who do not; one
//! write serves all that came before it. Disk slow: those who wait do so. Disk full: it is logged, the old content stays, and the next change
//! writes again; the book in memory is what counts until then.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pod::ports::Tasks;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::warn;

use crate::{Inner, claims, devices, restore};

/// Changes that nobody waits for are written together, this long after the first.
const TOGETHER: Duration = Duration::from_millis(200);

/// The way to the task.
pub(crate) struct Writer {
    waiting: mpsc::Sender<oneshot::Sender<()>>,
    soon: Arc<Notify>,
}

impl Writer {
    pub(crate) fn start(of: Weak<Inner>, tasks: &Tasks) -> Self {
        let (waiting, queue) = mpsc::channel(64);
        let soon = Arc::new(Notify::new());
        let task = run(of, queue, soon.clone(), tasks.stop().clone());
        tasks.spawn(task);
        Self { waiting, soon }
    }

    /// Returns when the book as it is now was written, or could not be.
    pub(crate) async fn written(&self) {
        let (done, written) = oneshot::channel();
        if self.waiting.send(done).await.is_ok() {
            let _ = written.await;
        }
    }

    /// The book has changed.
    pub(crate) fn soon(&self) {
        self.soon.notify_one();
    }
}

async fn run(
    of: Weak<Inner>,
    mut queue: mpsc::Receiver<oneshot::Sender<()>>,
    soon: Arc<Notify>,
    stop: tokio_util::sync::CancellationToken,
) {
    let mut written: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    loop {
        let mut waiting = Vec::new();
        let stopping = tokio::select! {
            biased;
            () = stop.cancelled() => true,
            Some(done) = queue.recv() => {
                waiting.push(done);
                false
            }
            () = soon.notified() => {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep(TOGETHER) => {}
                    Some(done) = queue.recv() => waiting.push(done),
                }
                false
            }
        };
        while let Ok(done) = queue.try_recv() {
            waiting.push(done);
        }
        let Some(inner) = of.upgrade() else { return };
        let files = inner.files();
        drop(inner);
        let (kept, all) = (std::mem::take(&mut written), files);
        let result = tokio::task::spawn_blocking(move || write(kept, all)).await;
        written = result.unwrap_or_default();
        for done in waiting {
            let _ = done.send(());
        }
        if stopping {
            return;
        }
    }
}

/// Writes those files whose content is another now. Gives what is on disk.
fn write(written: Vec<(PathBuf, Vec<u8>)>, files: Vec<(PathBuf, Vec<u8>)>) -> Vec<(PathBuf, Vec<u8>)> {
    let mut now = Vec::new();
    for (path, content) in files {
        if written.iter().any(|(p, c)| *p == path && *c == content) {
            now.push((path, content));
            continue;
        }
        match host::fsx::write_file_atomic(&path, &content, 0o600) {
            Ok(()) => now.push((path, content)),
            Err(e) => {
                warn!(checkpoint = %path.display(), err = e.full(), "Checkpoint cannot be written, the next change tries again");
            }
        }
    }
    now
}

impl Inner {
    /// Every checkpoint with its content.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let book = self.book();
        let devices = self.config.device_plugins.join(manifest::managers::DEVICES);
        let mut files = vec![
            (self.config.root.join(manifest::managers::CPUS), restore::encode_cpus(book.cpus.as_ref())),
            (self.config.root.join(manifest::managers::MEMORY), restore::encode_memory(book.memory.as_ref())),
            (self.config.root.join(manifest::managers::CLAIMS), claims::encode(&book.claims)),
        ];
        // Without a plugin and without a pod that has devices nothing is known: an empty file would say that this is the node of before.
        if book.devices.is_known() {
            files.push((devices, devices::encode(&book.devices)));
        }
        files
    }
}
