//! What is kept of a pod over a restart of the agent: what probes found, and why the node ends it.
//!
//! **Probes.** A pod of the API server has it in its status. A static pod's status is nowhere while there is no API server, or none that answers, so it is written
//! below the pod's directory whenever a verdict changes. It counts for the very containers that it names only.
//!
//! **Ends.** The status of a pod that the node ends is told when nothing of it runs any more. An agent that comes between would find a pod that runs, or
//! whose containers have died, and start them again: so why and how it ends is written down before anything is stopped, and read before anything is
//! started. A static pod is started anew by every agent: it has nobody who would make another one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::pod::DesiredPod;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::ends::Failing;
use crate::prober::{Found, has_probes};
use crate::worker::{EndReason, Intent, Worker};

/// Name of the file below `pods/UID`.
const FILE: &str = "rubelet-probes";
/// Name of the file below `pods/UID` that tells why the pod ends.
const END_FILE: &str = "rubelet-end";

/// Why and how a pod ends.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptEnd {
    #[serde(flatten)]
    failing: Failing,
    /// s.
    grace: Option<i64>,
}

/// A file that was cut off is none: it is written as a whole.
pub(crate) fn read_end(content: &[u8]) -> Option<KeptEnd> {
    serde_json::from_slice(content).ok()
}

impl Worker {
    fn kept_file(&self, name: &str) -> PathBuf {
        self.deps.settings.root_dir.join("pods").join(self.entry.uid.as_str()).join(name)
    }

    /// True when an earlier agent began to end the pod: it goes on ending.
    pub(crate) async fn recall_end(&mut self) -> bool {
        let of_api = |intent: &Intent| matches!(intent, Intent::Run(pod) if !pod.is_static());
        if !of_api(&self.intent.borrow()) {
            return false;
        }
        let content = match self.deps.host.read_file(&self.kept_file(END_FILE)).await {
            Ok(content) => content.unwrap_or_default(),
            Err(e) => {
                self.note_failure("end", &e.chain());
                return false;
            }
        };
        let Some(KeptEnd { failing, grace }) = read_end(&content) else { return false };
        info!(pod = self.name(), reason = failing.reason, "An earlier agent began to end the pod");
        self.grace = grace;
        self.ending = Some(EndReason::Failed(failing));
        true
    }

    /// Writes down why the node ends the pod. A disk that is full is no reason to go on with a pod that fills it.
    pub(crate) async fn keep_end(&mut self) {
        let Some(EndReason::Failed(failing)) = &self.ending else { return };
        let (of_api, asked) = match &*self.intent.borrow() {
            Intent::Run(pod) => (!pod.is_static(), None),
            Intent::End(end) => (end.pod.as_ref().is_some_and(|pod| !pod.is_static()), end.grace),
        };
        if !of_api {
            return;
        }
        let kept = KeptEnd { failing: failing.clone(), grace: self.grace.or(asked) };
        // Texts and numbers cannot fail to be written.
        let content = serde_json::to_vec(&kept).unwrap_or_default();
        if let Err(e) = self.deps.host.write_atomic(&self.kept_file(END_FILE), content, 0o600).await {
            self.note_failure("end", &e.chain());
        }
    }

    /// Reads what an earlier agent left, once.
    pub(super) async fn recall_probes(&mut self, pod: &DesiredPod) {
        if self.kept_probes.is_some() {
            return;
        }
        let mut kept = BTreeMap::new();
        if pod.is_static() && pod.containers().any(|c| has_probes(c.spec)) {
            match self.deps.host.read_file(&self.kept_file(FILE)).await {
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
        match self.deps.host.write_atomic(&self.kept_file(FILE), content, 0o600).await {
            Ok(()) => self.kept_probes = Some(found),
            Err(e) => self.note_failure("probes", &e.chain()),
        }
    }
}
