//! Limits of local storage that a pod sets itself (`emptyDir.sizeLimit`): its worker measures, and ends the pod when it is over one.
//!
//! Only pods with such limits are measured, each by its own worker: a disk that hangs holds that pod only. A limit of a memory-backed volume is the size
//! of its file system.

use std::time::Duration;

use model::pod::DesiredPod;
use model::quantity::Quantity;
use tokio::time::Instant;
use tracing::warn;

use crate::worker::{EndReason, Next, Worker};

/// How often a pod with limits is measured.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
/// Grace of a pod that is over a limit, in seconds, as the Go kubelet's.
const GRACE: i64 = 1;

/// The emptyDirs on disk that have a limit: name and limit.
pub(super) fn limited(pod: &DesiredPod) -> impl Iterator<Item = (&str, Quantity)> {
    pod.spec().volumes.iter().flatten().filter_map(|volume| {
        let dir = volume.empty_dir.as_ref().filter(|dir| dir.medium.as_deref().unwrap_or_default().is_empty())?;
        let limit = Quantity::of(dir.size_limit.as_ref()?).ok().filter(|limit| limit.value() > 0)?;
        Some((volume.name.as_str(), limit))
    })
}

impl Worker {
    /// What of the pod is over its limit, in Go's words.
    pub(super) async fn over_limit(&mut self, pod: &DesiredPod) -> Option<String> {
        let due = self.measured.is_none_or(|at| at.elapsed() >= PERIOD);
        // Before its volumes stand there is nothing to measure.
        if !due || self.prepared.is_none() || !self.deps.settings.local_storage_isolation {
            return None;
        }
        self.measured = Some(Instant::now());
        for (name, limit) in limited(pod) {
            let bytes = u64::try_from(limit.value()).unwrap_or(u64::MAX);
            match self.deps.host.empty_dir_usage(pod.uid(), name).await {
                Ok(used) if used > bytes => {
                    return Some(format!("Usage of EmptyDir volume {name:?} exceeds the limit \"{limit}\". "));
                }
                Ok(_) => {}
                Err(e) => warn!(pod = pod.full_name(), volume = name, err = e.chain(), "Volume cannot be measured"),
            }
        }
        None
    }

    /// Ends the pod for being over a limit.
    pub(super) fn evict(&mut self, pod: &DesiredPod, message: String) -> Next {
        warn!(pod = pod.full_name(), uid = %pod.uid(), reason = "Evicted", "{message}");
        self.deps.events.pod_warning(pod, "Evicted", &message);
        self.grace = Some(self.grace.map_or(GRACE, |grace| grace.min(GRACE)));
        self.ending = Some(EndReason::Evicted { message });
        Next::Ended
    }
}
