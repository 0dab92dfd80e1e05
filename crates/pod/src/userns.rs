//! User namespaces: which range of host ids each pod with `hostUsers: false` has, and the file below `pods/UID` that keeps it over a restart.
//!
//! No task: workers ask in their rounds, one at a time for each pod. The book stands in memory; a range is written down before it is used, and is
//! free again only when nothing of its pod runs any more.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cri_api::v1;
use decide::userns::{self, Ranges};
use model::pod::PodUid;
use tracing::warn;

use crate::ports::PodHost;

/// Mode of the file.
const MODE: u32 = 0o600;

/// The node's ranges.
pub struct UserNamespaces {
    ranges: Mutex<Ranges>,
    host: Arc<dyn PodHost>,
    pods: PathBuf,
}

impl UserNamespaces {
    /// Takes over what an earlier agent gave out.
    ///
    /// # Errors
    /// A pod's file cannot be read, or names a range that these settings do not allow: its containers may run with ids that would then be given to
    /// another pod too.
    pub async fn restore(mut ranges: Ranges, host: Arc<dyn PodHost>, root_dir: &Path) -> Result<Self, String> {
        let pods = root_dir.join("pods");
        for uid in host.list_pod_dirs().await.map_err(|e| e.chain())? {
            let file = pods.join(uid.as_str()).join(userns::FILE);
            if let Some(content) = host.read_file(&file).await.map_err(|e| e.chain())? {
                let failed = |e| format!("record pod mappings for existing pod \"{uid}\" from {}: {e}", file.display());
                ranges.record(&uid, &content).map_err(failed)?;
            }
        }
        Ok(Self { ranges: Mutex::new(ranges), host, pods })
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, uid: &PodUid) -> PathBuf {
        self.pods.join(uid.as_str()).join(userns::FILE)
    }

    /// The pod's range; the first call writes it down.
    ///
    /// # Errors
    /// No range is free, or its file cannot be written.
    pub async fn of(&self, uid: &PodUid) -> Result<Vec<v1::IdMapping>, String> {
        let (known, given) = {
            let mut ranges = self.ranges();
            (ranges.holds(uid), ranges.allocate(uid))
        };
        let given = given.map_err(|e| format!("create user namespace: {e}"))?;
        if !known && let Err(e) = self.host.write_atomic(&self.file(uid), userns::file(&given), MODE).await {
            self.ranges().release(uid);
            return Err(format!("create user namespace: {}", e.chain()));
        }
        Ok(given)
    }

    /// Nothing of the pod runs any more.
    pub async fn release(&self, uid: &PodUid) {
        if !self.ranges().holds(uid) {
            return;
        }
        // The file first: a range that a file names is never another pod's.
        if let Err(e) = self.host.remove_file(&self.file(uid)).await {
            warn!(uid = %uid, err = e.chain(), "The pod's id range cannot be given back yet");
            return;
        }
        self.ranges().release(uid);
    }
}
