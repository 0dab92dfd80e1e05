//! What probes found, kept over a restart of the agent.
//!
//! A pod of the API server has it in its status. A static pod's status is nowhere while there is no API server, or none that answers, so it is written
//! below the pod's directory whenever a verdict changes. It counts for the very containers that it names only.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::pod::DesiredPod;

use crate::prober::{Found, has_probes};
use crate::worker::Worker;

/// Name of the file below `pods/UID`.
const FILE: &str = "rubelet-probes";

impl Worker {
    fn probes_file(&self) -> PathBuf {
        self.deps.settings.root_dir.join("pods").join(self.entry.uid.as_str()).join(FILE)
    }

    /// Reads what an earlier agent left, once.
    pub(super) async fn recall_probes(&mut self, pod: &DesiredPod) {
        if self.kept_probes.is_some() {
            return;
        }
        let mut kept = BTreeMap::new();
        if pod.is_static() && pod.containers().any(|c| has_probes(c.spec)) {
            match self.deps.host.read_file(&self.probes_file()).await {
                // A file that cannot be read is as good as none: the probes will tell.
                Ok(content) => kept = serde_json::from_slice(&content.unwrap_or_default()).unwrap_or_default(),
                Err(e) => self.note_failure("probes", &e.chain()),
            }
        }
        self.kept_probes = Some(kept);
    }

    /// Writes it down when it has changed.
    pub(super) async fn keep_probes(&mut self, pod: &DesiredPod) {
        if !pod.is_static() {
            return;
        }
        let found: BTreeMap<String, Found> = self.deps.prober.found(pod.uid());
        if self.kept_probes.as_ref() == Some(&found) {
            return;
        }
        // Ids and flags cannot fail to be written.
        let content = serde_json::to_vec(&found).unwrap_or_default();
        match self.deps.host.write_atomic(&self.probes_file(), content, 0o600).await {
            Ok(()) => self.kept_probes = Some(found),
            Err(e) => self.note_failure("probes", &e.chain()),
        }
    }
}
