//! One look at one pod: what the API is to hold, what it holds, and the one request that brings them together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster::calls::PodApi;
use cluster::reflect::version_of;
use cluster::{ClusterError, ErrorKind};
use decide::status;
use model::api::{Node, OwnerReference, Pod, PodStatus};
use model::pod::{CONFIG_HASH, CONFIG_MIRROR, DesiredPod, PodUid};
use telemetry::LogLimiter;
use tracing::{debug, info, warn};

use super::mirrors::{Mirror, Mirrors};
use super::queue::Key;
use crate::ports::error_chain;
use crate::registry::Registry;

/// How often the same refusal is told.
const TOLD: Duration = Duration::from_secs(60);

/// How a look ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing was to be sent.
    Same,
    /// The server took it, or the object is gone.
    Written,
    /// The server said no: this pod is tried again later.
    Refused,
    /// No server answered, or what it did is unknown.
    Down,
    /// A mirror pod needs the node's object first.
    NoNode,
}

/// A status as the server last answered it, until the watch shows the same or a newer one.
struct Answer {
    version: Option<u128>,
    status: PodStatus,
}

/// What requests share.
pub(super) struct Shared {
    api: Arc<dyn PodApi>,
    registry: Arc<Registry>,
    mirrors: Mirrors,
    answers: Mutex<HashMap<PodUid, Answer>>,
    limiter: LogLimiter,
}

impl Shared {
    pub(super) fn new(api: Arc<dyn PodApi>, registry: Arc<Registry>, mirrors: Mirrors) -> Self {
        Self { api, registry, mirrors, answers: Mutex::default(), limiter: LogLimiter::new(TOLD) }
    }

    pub(super) async fn write(&self, key: &Key, node: Option<&Node>) -> Outcome {
        match key {
            Key::Pod(uid) => self.write_pod(uid).await,
            Key::Mirror(name) => self.write_mirror(name, node).await,
        }
    }

    fn answers(&self) -> MutexGuard<'_, HashMap<PodUid, Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the registry shows of a pod of this kind: its newest form, its status, and whether it has ended.
    fn shown(&self, uid: &PodUid, kind: fn(&DesiredPod) -> bool) -> Option<(DesiredPod, PodStatus, bool)> {
        let entry = self.registry.get(uid)?;
        let view = entry.view();
        Some((view.desired.clone().filter(kind)?, view.status.clone(), view.finished))
    }

    /// A pod of the API: its status, and once it has ended and was to be deleted, its deletion.
    async fn write_pod(&self, uid: &PodUid) -> Outcome {
        let Some((desired, status, finished)) = self.shown(uid, |d| !d.is_static()) else {
            self.answers().remove(uid);
            return Outcome::Same;
        };
        let held = self.held(&desired);
        let mut outcome = match status.phase {
            Some(_) => self.patch(desired.namespace(), desired.name(), uid, &held, status).await,
            None => Outcome::Same,
        };
        // First how it ended, then that it is over: nobody may see it vanish while it is shown as running.
        if finished && desired.is_deleting() && matches!(outcome, Outcome::Same | Outcome::Written) {
            outcome = self.delete(desired.namespace(), desired.name(), uid).await;
            if outcome == Outcome::Written {
                info!(pod = desired.full_name(), uid = %uid, "Pod fully terminated and removed from etcd");
            }
        }
        outcome
    }

    /// The status that the API holds as far as is known here: the newer of the watch's copy and the answer to the last write.
    fn held(&self, desired: &DesiredPod) -> PodStatus {
        let mut answers = self.answers();
        match answers.get(desired.uid()) {
            Some(answer) if answer.version > version_of(desired.meta()) => answer.status.clone(),
            _ => {
                answers.remove(desired.uid());
                desired.stored_status().cloned().unwrap_or_default()
            }
        }
    }

    async fn patch(&self, namespace: &str, name: &str, uid: &PodUid, held: &PodStatus, status: PodStatus) -> Outcome {
        let Some(patch) = cluster::patch::pod_status(uid.as_str(), held, &status::merged(held, status)) else {
            return Outcome::Same;
        };
        match self.api.patch_pod_status(namespace, name, &patch).await {
            Ok(pod) => {
                self.answered(uid, pod);
                Outcome::Written
            }
            // A pod of the same name has taken its place: the source will say so.
            Err(e) if e.is_other_uid() => Outcome::Written,
            // Only the watch knows that it is gone: a server that says so may have nothing yet, or be none at all.
            Err(e) if e.kind == ErrorKind::NotFound => {
                debug!(pod = format!("{name}_{namespace}"), "Pod does not exist at the API server");
                Outcome::Refused
            }
            Err(e) => self.failed("patch the status of", namespace, name, &e),
        }
    }

    fn answered(&self, uid: &PodUid, pod: Pod) {
        if let Some(mirror) = Mirror::of(&pod) {
            self.mirrors.answered(mirror);
            return;
        }
        let version = version_of(&pod.metadata);
        if let (Some(status), true) = (pod.status, self.registry.get(uid).is_some()) {
            self.answers().insert(uid.clone(), Answer { version, status });
        }
    }

    async fn delete(&self, namespace: &str, name: &str, uid: &PodUid) -> Outcome {
        match self.api.delete_pod(namespace, name, 0, Some(uid.as_str())).await {
            Ok(()) => Outcome::Written,
            // The name is another's now, so this one is gone.
            Err(e) if e.is_other_uid() => Outcome::Written,
            // Shortly after its start a server says so too of pods that are there: its NodeRestriction plugin asks a cache that has not
            // seen them yet. Only the watch knows; this is tried again until it has told.
            Err(e) if e.kind == ErrorKind::NotFound => Outcome::Refused,
            Err(e) => self.failed("delete", namespace, name, &e),
        }
    }

    /// The mirror pod of a static pod: there while the static pod has a worker, of the same hash, with the same status.
    async fn write_mirror(&self, full_name: &str, node: Option<&Node>) -> Outcome {
        let Some((owner, mirror)) = self.mirrors.get(full_name) else {
            // Looked at again when the API was listed.
            return Outcome::Same;
        };
        let Some((desired, status, finished)) = owner.and_then(|uid| self.shown(&uid, DesiredPod::is_static)) else {
            return match mirror {
                Some(mirror) => self.delete_mirror(&mirror, "its static pod is gone").await,
                None => Outcome::Same,
            };
        };
        let hash = desired.annotation(CONFIG_HASH).unwrap_or_else(|| desired.uid().as_str());
        match mirror {
            Some(mirror) if mirror.deleting => self.delete_mirror(&mirror, "its deletion was asked for").await,
            Some(mirror) if mirror.hash != hash => self.delete_mirror(&mirror, "it is of another static pod").await,
            Some(mirror) if status.phase.is_some() => {
                self.patch(&mirror.namespace, &mirror.name, &mirror.uid, &mirror.status, status).await
            }
            Some(_) => Outcome::Same,
            None if finished => Outcome::Same,
            None => match node {
                None => Outcome::NoNode,
                Some(node) => self.create_mirror(&desired, hash, node).await,
            },
        }
    }

    async fn create_mirror(&self, desired: &DesiredPod, hash: &str, node: &Node) -> Outcome {
        info!(pod = desired.full_name(), uid = %desired.uid(), "Creating a mirror pod for static pod");
        match self.api.create_pod(&mirror_of(desired, hash, node)).await {
            // The watch brings it: only the watch knows whether it still is there.
            Ok(_) => Outcome::Written,
            Err(e) if e.is_already_exists() => Outcome::Refused,
            Err(e) => self.failed("create the mirror pod", desired.namespace(), desired.name(), &e),
        }
    }

    async fn delete_mirror(&self, mirror: &Mirror, why: &str) -> Outcome {
        info!(pod = mirror.full_name(), uid = %mirror.uid, why, "Deleting a mirror pod");
        let outcome = self.delete(&mirror.namespace, &mirror.name, &mirror.uid).await;
        if outcome == Outcome::Written {
            self.mirrors.remove(&mirror.uid);
        }
        outcome
    }

    fn failed(&self, what: &str, namespace: &str, name: &str, error: &ClusterError) -> Outcome {
        let text = error_chain(error);
        // What concerns every call is told by the client.
        if error.kind.concerns_every_call() {
            debug!(err = text, "Failed to {what} pod {name}_{namespace}");
        } else if let Some(suppressed) =
            self.limiter.allow(&format!("{what} {namespace}/{name} {text}"), Instant::now())
        {
            warn!(err = text, suppressed, "Failed to {what} pod {name}_{namespace}");
        }
        match error.kind {
            ErrorKind::Timeout => Outcome::Down,
            kind if kind.concerns_every_call() => Outcome::Down,
            _ => Outcome::Refused,
        }
    }
}

/// The API object that stands for a static pod. Its owner is the node, as the NodeRestriction admission plugin asks.
fn mirror_of(desired: &DesiredPod, hash: &str, node: &Node) -> Pod {
    let mut pod = desired.to_pod();
    pod.status = None;
    let meta = &mut pod.metadata;
    meta.uid = None;
    meta.resource_version = None;
    meta.annotations.get_or_insert_default().insert(CONFIG_MIRROR.to_owned(), hash.to_owned());
    meta.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    pod
}
