//! `/containerLogs`: a container's log as a body that is made while it is taken.
//!
//! There is no task and no queue: the body's future reads the next piece when the client has taken the one before, so a slow client costs the
//! disk nothing and holds at most one piece; a client that goes drops everything at once. A follower sleeps until inotify tells of a write or a
//! close. The container's end is seen by the runtime closing the log; then, and every [`LOOK`], the runtime is asked.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use host::logs::follow::{Follower, LogWatch};
use host::logs::read::{LogReader, Progress, ReadOptions, resolve};
use tokio_util::sync::CancellationToken;

use super::port::ContainerPort;

/// How often a quiet container is asked whether it still runs; Go asks every second.
const LOOK: Duration = Duration::from_secs(10);
/// The first wait after the log was closed: the runtime knows of the end a little later.
const SOON: Duration = Duration::from_millis(50);
/// How long the runtime may take to finish the old log after it has made the new one.
const SWITCH: Duration = Duration::from_millis(500);
/// How often a log is looked at when it cannot be watched.
const UNWATCHED: Duration = Duration::from_secs(1);

/// Opens a log; symlinks are resolved, as in Go, but only those that stay below `root` (`podLogsDir`): a pod that can write there must not
/// have its log stand for any file of the host.
///
/// # Errors
/// Go's words.
pub(crate) async fn open(path: &Path, root: &Path, options: ReadOptions) -> Result<LogReader, String> {
    let (path, root) = (path.to_owned(), root.to_owned());
    let open = move || {
        let real = resolve(&path, &root).map_err(|e| {
            format!("failed to try resolving symlinks in path {path:?}: lstat {}: {}", path.display(), go_text(&e))
        })?;
        let Some(real) = real else {
            return Err(format!("failed to open log file {path:?}: a link leads out of {}", root.display()));
        };
        LogReader::open(&real, &root, options)
            .map_err(|e| format!("failed to open log file {real:?}: open {}: {}", real.display(), go_text(&e)))
    };
    tokio::task::spawn_blocking(open).await.unwrap_or_else(|e| Err(format!("failed to open log file: {e}")))
}

/// The system's words as Go prints them.
fn go_text(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => e.to_string(),
    }
}

/// What is needed to follow.
pub(crate) struct Follow {
    pub(crate) watch: LogWatch,
    pub(crate) containers: Arc<dyn ContainerPort>,
    /// The container's id in the runtime.
    pub(crate) id: String,
    pub(crate) stop: CancellationToken,
}

/// The log as pieces of a body.
pub(crate) fn stream(reader: LogReader, follow: Option<Follow>) -> impl Stream<Item = Bytes> + Send {
    let following = follow.map(|f| Following {
        follow: f,
        watched: Watched::NotYet,
        closed: false,
        switching: false,
        last_look: false,
        look_now: true,
        delay: LOOK,
    });
    let log = Log { reader: Some(reader), following };
    futures::stream::unfold(log, |mut log| async move { log.next().await.map(|piece| (piece, log)) })
}

struct Log {
    /// None: over.
    reader: Option<LogReader>,
    following: Option<Following>,
}

enum Watched {
    NotYet,
    By(Follower),
    Not,
}

struct Following {
    follow: Follow,
    watched: Watched,
    /// A writer closed the log, and why is not known yet.
    closed: bool,
    /// The log was rotated, and what is left in the old file is being read.
    switching: bool,
    /// The container has ended: what is there by now is the rest.
    last_look: bool,
    /// The runtime is to be asked.
    look_now: bool,
    /// Until it is asked again.
    delay: Duration,
}

impl Log {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let mut reader = self.reader.take()?;
            let read = move || {
                let mut piece = Vec::new();
                let progress = reader.read(&mut piece);
                (reader, piece, progress)
            };
            let (mut reader, piece, progress) = tokio::task::spawn_blocking(read).await.ok()?;
            let progress = match progress {
                Ok(progress) => progress,
                Err(e) => {
                    tracing::warn!(err = %e, "Failed to read a container's log");
                    return Some(Bytes::from(format!("failed to read log file: {}", go_text(&e))));
                }
            };
            let Some(following) = self.following.as_mut().filter(|_| progress != Progress::Done) else {
                if progress == Progress::More {
                    self.reader = Some(reader);
                }
                if piece.is_empty() && self.reader.is_some() {
                    continue;
                }
                return (!piece.is_empty()).then(|| piece.into());
            };
            if progress == Progress::CaughtUp && piece.is_empty() && !following.wait(&mut reader).await {
                return None;
            }
            self.reader = Some(reader);
            if !piece.is_empty() {
                return Some(piece.into());
            }
        }
    }
}

impl Following {
    /// Waits until there may be more; false: there will be none.
    async fn wait(&mut self, reader: &mut LogReader) -> bool {
        if let Watched::NotYet = self.watched {
            self.watched = match self.follow.watch.follow(reader.path()) {
                Ok(follower) => Watched::By(follower),
                Err(e) => {
                    tracing::warn!(err = e.full(), "A followed log cannot be watched, it is looked at every second");
                    Watched::Not
                }
            };
            // What was written before the watch.
            return true;
        }
        if reader.replaced() {
            return self.switch(reader).await;
        }
        if self.last_look {
            return false;
        }
        if std::mem::take(&mut self.look_now) {
            match self.follow.containers.log(&self.follow.id).await {
                Ok(log) if log.running => {}
                Err(e) if !e.is_not_found() => {
                    tracing::debug!(err = %e, id = self.follow.id, "The runtime does not say whether a followed container runs");
                }
                _ => {
                    self.last_look = true;
                    return true;
                }
            }
        }
        let delay = if let Watched::Not = self.watched { UNWATCHED } else { self.delay };
        tokio::select! {
            () = self.follow.stop.cancelled() => return false,
            changes = changed(&self.watched) => {
                self.last_look = changes.gone();
                if changes.closed() {
                    self.closed = true;
                    self.delay = SOON;
                }
            }
            () = tokio::time::sleep(delay) => {
                self.look_now = true;
                self.delay = (self.delay * 2).min(LOOK);
            }
        }
        true
    }

    /// Goes from a rotated log to the new one. The runtime writes to the old one until shortly after it has made the new one; that it is done is
    /// seen by its closing it.
    async fn switch(&mut self, reader: &mut LogReader) -> bool {
        if !self.switching {
            self.switching = true;
            if !self.closed {
                let closed = async { while !changed(&self.watched).await.closed() {} };
                let _ = tokio::time::timeout(SWITCH, closed).await;
            }
            // The rest of the old one.
            return true;
        }
        // The new one may be closed already, which was not told apart from the old one's end.
        (self.switching, self.delay) = (false, SOON);
        match reader.reopen() {
            // Of a file that others have come after, there is no end to wait for.
            Ok(complete) => self.closed = complete,
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.closed = false,
            Err(e) => {
                tracing::warn!(err = %e, "Failed to open a followed container's new log");
                return false;
            }
        }
        true
    }
}

async fn changed(watched: &Watched) -> host::logs::follow::Changes {
    match watched {
        Watched::By(follower) => follower.changed().await,
        _ => std::future::pending().await,
    }
}
