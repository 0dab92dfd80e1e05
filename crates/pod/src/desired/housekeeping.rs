//! What belongs to nobody: looked for once a minute, and when every source has spoken.
//!
//! Dead containers and sandboxes of pods that are there are their workers' business ([`crate::sync`]).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use decide::text::aggregate;
use model::pod::PodUid;
use tracing::{info, warn};

use super::Dispatcher;
use crate::pleg::RuntimePod;

impl Dispatcher {
    /// Removes pod directories, pod cgroups, log directories and allocations that belong to nobody. The unknown ones are looked at, not the known.
    pub(super) async fn housekeeping(&mut self) {
        // What the runtime cannot list cannot be collected.
        let mut failed: Vec<String> = self.deps.health.borrow().error.clone().into_iter().collect();
        if *self.all_seen.borrow() {
            failed.extend(self.collect_unowned().await);
        }
        if let Some(text) = aggregate(&failed) {
            warn!(err = text, "Container garbage collection failed");
            self.deps.events.node_warning(&self.deps.settings.node_name, "ContainerGCFailed", &text);
        }
    }

    /// What is there is collected; why some of it could not be.
    async fn collect_unowned(&mut self) -> Option<String> {
        let host = self.deps.host.clone();
        let mut found: BTreeSet<PodUid> = BTreeSet::new();
        match host.list_pod_dirs().await {
            Ok(dirs) => found.extend(dirs),
            Err(e) => warn!(err = e.chain(), "Pod directories cannot be listed"),
        }
        match host.list_pod_cgroups().await {
            Ok(groups) => found.extend(groups),
            Err(e) => warn!(err = e.chain(), "Pod cgroups cannot be listed"),
        }
        // A worker of its own takes each away: a volume that hangs must hold up nobody else.
        for uid in found {
            let pod =
                RuntimePod { name: uid.to_string(), namespace: String::new(), uid, alive: false, is_static: false };
            let listed = self.runtime.borrow().pods.iter().any(|p| p.uid == pod.uid);
            if !listed && self.is_orphan(&pod) {
                info!(uid = %pod.uid, "Orphaned pod found, cleaning up its directory and cgroup");
                self.start_orphan(&pod);
            }
        }
        self.admit
            .retain(self.workers.keys().chain(self.sets.values().flat_map(BTreeMap::keys)).cloned().collect())
            .await;
        let known: HashSet<PodUid> =
            self.workers.keys().cloned().chain(self.runtime.borrow().pods.iter().map(|p| p.uid.clone())).collect();
        host.prune_logs(&known).await.err().map(|e| e.chain())
    }
}
