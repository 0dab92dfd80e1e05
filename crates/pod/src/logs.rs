//! Container logs kept to their size and number (`containerLogMaxSize`, `containerLogMaxFiles`).
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. Every `containerLogMonitorInterval` it looks at the size of each running container's log and
//! rotates the large ones: move away, let the runtime reopen, at most `containerLogMaxWorkers` at once. It holds only the right to reopen a log. A
//! reopen that fails puts nothing right by guessing: the runtime goes on writing to the moved file, and the next interval tries again.

use std::sync::Arc;
use std::time::Duration;

use cri::port::{RuntimeMutator, RuntimeReader};
use cri_api::v1;
use decide::config::names;
use futures::StreamExt;
use tracing::warn;

use crate::ports::{Clock, HostResult, PodHost, Tasks};

/// How logs are kept.
#[derive(Clone, Debug)]
pub struct LogLimits {
    /// `podLogsDir`.
    pub pod_logs_dir: String,
    /// Rotate above this size, bytes; negative: never.
    pub max_size: i64,
    /// Files kept for each container, the live one among them.
    pub max_files: u32,
    /// Rotations at once.
    pub workers: usize,
    /// How often sizes are looked at.
    pub interval: Duration,
}

/// The right to have a log reopened, and nothing else.
#[derive(Clone)]
pub struct LogReopener(Arc<dyn RuntimeMutator>);

impl LogReopener {
    /// Narrows the runtime's port.
    pub fn new(runtime: Arc<dyn RuntimeMutator>) -> Self {
        Self(runtime)
    }
}

/// Starts the task.
pub fn start(
    limits: LogLimits,
    reader: Arc<dyn RuntimeReader>,
    reopener: LogReopener,
    host: Arc<dyn PodHost>,
    clock: Clock,
    tasks: &Tasks,
) {
    if limits.max_size < 0 {
        return;
    }
    let stop = tasks.stop().clone();
    tasks.spawn(async move {
        let mut tick = tokio::time::interval(limits.interval);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! { biased; () = stop.cancelled() => return, _ = tick.tick() => {} }
            check(&limits, &*reader, &reopener, &*host, &clock).await;
        }
    });
}

/// Looks at every running container's log once.
async fn check(
    limits: &LogLimits,
    reader: &dyn RuntimeReader,
    reopener: &LogReopener,
    host: &dyn PodHost,
    clock: &Clock,
) {
    let running = v1::ContainerStateValue { state: v1::ContainerState::ContainerRunning as i32 };
    let filter = v1::ContainerFilter { state: Some(running), ..Default::default() };
    let containers = match reader.list_containers(Some(filter)).await {
        Ok(containers) => containers,
        Err(e) => {
            warn!(err = %e, "Failed to list containers for log rotation");
            return;
        }
    };
    // Ids and paths; the rest of the list goes before anything is waited for.
    let (ids, paths): (Vec<String>, Vec<String>) =
        containers.into_iter().filter_map(|c| log_path(&limits.pod_logs_dir, &c).map(|path| (c.id, path))).unzip();
    let sizes = host.file_sizes(&paths).await;
    let to_do = ids.iter().zip(&paths).zip(sizes).filter(|(_, size)| match size {
        Ok(Some(size)) => i64::try_from(*size).unwrap_or(i64::MAX) >= limits.max_size,
        Ok(None) | Err(_) => true,
    });
    futures::stream::iter(to_do)
        .for_each_concurrent(limits.workers.max(1), |((id, path), size)| async move {
            if let Err(reason) = rotate(limits, reopener, host, clock, id, path, size).await {
                warn!(container = id, err = reason, "Failed to rotate log");
            }
        })
        .await;
}

/// Rotates a log that is too large, or has the runtime make one that is not there.
async fn rotate(
    limits: &LogLimits,
    reopener: &LogReopener,
    host: &dyn PodHost,
    clock: &Clock,
    id: &str,
    path: &str,
    size: HostResult<Option<u64>>,
) -> Result<(), String> {
    // A log that vanished (somebody removed it, or a rotation was cut off before the reopen): the runtime makes a new one.
    if size.map_err(|e| e.chain())?.is_some() {
        host.rotate_log(path, clock.now(), limits.max_files).await.map_err(|e| e.chain())?;
    }
    reopener.0.reopen_container_log(id).await.map_err(|e| e.to_string())
}

/// Where a container's log is, by what the kubelet wrote into its labels: a list answer is enough, no status is asked for.
fn log_path(pod_logs_dir: &str, container: &v1::Container) -> Option<String> {
    let label = |key: &str| container.labels.get(key);
    let (namespace, pod, uid) =
        (label(names::POD_NAMESPACE_LABEL)?, label(names::POD_NAME_LABEL)?, label(names::POD_UID_LABEL)?);
    let name = label(names::CONTAINER_NAME_LABEL)?;
    let restarts = container.annotations.get(names::RESTART_COUNT)?.parse().ok()?;
    let file = names::container_log_path(name, restarts);
    Some(format!("{pod_logs_dir}/{namespace}_{pod}_{uid}/{file}"))
}
