//! Limits of local storage that a pod sets itself (`emptyDir.sizeLimit`, `ephemeral-storage`): its worker measures, and ends the pod when it is over
//! one ([`decide::eviction::LocalLimits`]).
//!
//! Only pods with such limits are measured, each by its own worker: a disk that hangs holds that pod only.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cri_api::v1;
use decide::config::names::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use decide::eviction::{LocalLimits, LocalUsage, OverLimit};
use model::pod::DesiredPod;
use tokio::time::Instant;
use tracing::warn;

use crate::ends::Failing;
use crate::ports::LocalStorage;
use crate::worker::{EndReason, Next, Worker};

/// How often a pod with limits is measured.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
/// Grace of a pod that is over a limit, in seconds, as the Go kubelet's.
const GRACE: i64 = 1;

impl Worker {
    /// The pod has limits that are looked after.
    pub(super) fn is_limited(&self, pod: &DesiredPod) -> bool {
        self.deps.settings.local_storage_isolation && !LocalLimits::of(pod).is_empty()
    }

    /// What of the pod is over its limit.
    pub(super) async fn over_limit(&mut self, pod: &DesiredPod) -> Option<OverLimit> {
        let due = self.measured.is_none_or(|at| at.elapsed() >= PERIOD);
        // Before its volumes stand there is nothing to measure.
        if !due || self.prepared.is_none() || !self.deps.settings.local_storage_isolation {
            return None;
        }
        self.measured = Some(Instant::now());
        let limits = LocalLimits::of(pod);
        if limits.is_empty() {
            return None;
        }
        let usage = self.measure(pod, &limits).await?;
        limits.exceeded(pod, &usage)
    }

    async fn measure(&self, pod: &DesiredPod, limits: &LocalLimits) -> Option<LocalUsage> {
        let (mut layers, mut layers_at) = (BTreeMap::new(), None);
        if limits.needs_all() {
            let filter = v1::ContainerStatsFilter {
                label_selector: [(POD_UID_LABEL.to_owned(), pod.uid().to_string())].into(),
                ..v1::ContainerStatsFilter::default()
            };
            match self.deps.reader.list_container_stats(Some(filter)).await {
                Ok(stats) => {
                    for stats in stats {
                        let Some((attributes, layer)) = stats.attributes.zip(stats.writable_layer) else { continue };
                        let Some(name) = attributes.labels.get(CONTAINER_NAME_LABEL) else { continue };
                        layers.insert(name.clone(), layer.used_bytes.map(|v| v.value).unwrap_or_default());
                        layers_at = layer.fs_id.map(|fs| PathBuf::from(fs.mountpoint)).or(layers_at);
                    }
                }
                Err(e) => {
                    warn!(pod = pod.full_name(), err = %e, "The pod's containers cannot be measured");
                    return None;
                }
            }
        }
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let wanted = LocalStorage {
            volumes: owned(limits.volumes_to_measure(pod)),
            containers: owned(limits.containers_to_measure(pod)),
            layers_at,
        };
        match self.deps.host.local_storage(pod, wanted).await {
            Ok(usage) => Some(LocalUsage { layers, ..usage }),
            Err(e) => {
                warn!(pod = pod.full_name(), err = e.chain(), "The pod's volumes cannot be measured");
                None
            }
        }
    }

    /// Ends the pod for being over a limit.
    pub(super) fn evict(&mut self, pod: &DesiredPod, over: OverLimit) -> Next {
        let OverLimit { message, signal } = over;
        let reason = decide::eviction::REASON;
        warn!(pod = pod.full_name(), uid = %pod.uid(), reason, "{message}");
        self.deps.events.pod_warning(pod, reason, &message);
        self.deps.metrics.evicted(signal);
        self.grace = Some(self.grace.map_or(GRACE, |grace| grace.min(GRACE)));
        self.ending = Some(EndReason::Failed(Failing { reason: reason.to_owned(), message, disruption: None }));
        Next::Ended
    }
}
