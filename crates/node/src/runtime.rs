//! What the runtime is and has, for the node's status; and the machine's addresses, which are looked up the same way.
//!
//! Tasks: two, owned by [`start`], end with [`Tasks::stop`]. Inputs: the runtime's health, a count of image changes, time. No queue: the
//! outputs are watch channels. Deadline: [`ANSWER`] for each call. Runtime gone: the last facts stand; it is asked again when its health
//! is back.

use std::sync::Arc;
use std::time::Duration;

use cri::port::{CriResult, RuntimeReader};
use decide::node::{NodeAddresses, NodeRuntime, container_images, runtime_version};
use pod::pleg::Health;
use pod::ports::Tasks;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::FindAddresses;

/// How long the runtime may think about one question.
const ANSWER: Duration = Duration::from_secs(30);
/// How often the runtime is asked when nothing seems to have changed.
const PERIOD: Duration = Duration::from_secs(300);
/// Images are listed at most this often.
const IMAGES: Duration = Duration::from_secs(30);
/// Pause after an answer that failed.
const AGAIN: Duration = Duration::from_secs(10);
/// How often the addresses are looked up.
const ADDRESSES: Duration = Duration::from_secs(60);

/// What the tasks find out.
#[derive(Clone)]
pub(crate) struct Found {
    /// The runtime.
    pub(crate) runtime: watch::Receiver<Arc<NodeRuntime>>,
    /// The addresses; None: not known (any more).
    pub(crate) addresses: watch::Receiver<Option<NodeAddresses>>,
}

/// Starts both tasks.
pub(crate) fn start(
    reader: Arc<dyn RuntimeReader>,
    max_images: i32,
    health: watch::Receiver<Health>,
    images_changed: watch::Receiver<u64>,
    find: FindAddresses,
    tasks: &Tasks,
) -> Found {
    let (runtime_out, runtime) = watch::channel(Arc::new(NodeRuntime::default()));
    let (addresses_out, addresses) = watch::channel(None);
    tasks.spawn_until_stop(follow_runtime(reader, max_images, health, images_changed, runtime_out));
    tasks.spawn_until_stop(follow_addresses(find, addresses_out));
    Found { runtime, addresses }
}

async fn follow_runtime(
    reader: Arc<dyn RuntimeReader>,
    max_images: i32,
    mut health: watch::Receiver<Health>,
    mut images_changed: watch::Receiver<u64>,
    out: watch::Sender<Arc<NodeRuntime>>,
) {
    let mut images_at = Instant::now();
    let mut asked;
    loop {
        images_changed.mark_unchanged();
        health.mark_unchanged();
        let answers = well(&health.borrow());
        let mut fresh = NodeRuntime::clone(&out.borrow());
        let mut next = Instant::now() + PERIOD;
        match look(&*reader, max_images).await {
            Ok(found) => {
                fresh = found;
                images_at = Instant::now();
            }
            Err(e) => {
                tracing::debug!(error = e, "Failed to ask the runtime for what the node's status tells of it");
                next = Instant::now() + AGAIN;
            }
        }
        out.send_if_modified(|known| {
            let changed = **known != fresh;
            if changed {
                *known = Arc::new(fresh);
            }
            changed
        });
        asked = answers;
        // Until the period is over, the runtime is back, or its images are others.
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => break,
                Ok(()) = images_changed.changed() => next = next.min((images_at + IMAGES).max(Instant::now())),
                Ok(()) = health.changed() => {
                    let answers = well(&health.borrow_and_update());
                    if answers && !asked {
                        break;
                    }
                    asked = answers;
                }
            }
        }
    }
}

/// The runtime answers, as far as the generator of pod events knows.
fn well(health: &Health) -> bool {
    health.error.is_none() && health.last_pass.is_some()
}

async fn look(reader: &dyn RuntimeReader, max_images: i32) -> Result<NodeRuntime, String> {
    let version = answer(reader.version()).await?;
    let status = answer(reader.status(false)).await?;
    let images = answer(reader.list_images(None)).await?;
    Ok(NodeRuntime {
        version: runtime_version(&version.runtime_name, &version.runtime_version),
        handlers: status.runtime_handlers,
        features: status.features,
        images: Some(container_images(images, max_images)),
    })
}

async fn answer<T>(call: impl Future<Output = CriResult<T>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER, call).await {
        Ok(answer) => answer.map_err(|e| e.to_string()),
        Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs())),
    }
}

async fn follow_addresses(find: FindAddresses, out: watch::Sender<Option<NodeAddresses>>) {
    let mut failing = None;
    loop {
        let find = find.clone();
        let found = tokio::task::spawn_blocking(move || find()).await.unwrap_or_else(|e| Err(e.to_string()));
        let pause = if found.is_ok() { ADDRESSES } else { AGAIN };
        let error = found.as_ref().err().cloned();
        if let Some(error) = error.as_ref().filter(|e| failing.as_ref() != Some(*e)) {
            tracing::error!(err = error, "Failed to find the node's addresses, its status keeps the last ones");
        }
        failing = error;
        let found = found.ok();
        out.send_if_modified(|known| {
            let changed = *known != found;
            *known = found;
            changed
        });
        tokio::time::sleep(pause).await;
    }
}
