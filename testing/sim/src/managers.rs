//! Managers of resources that give nobody anything, and of which a test can make one pod wait, as for a device plugin that hangs.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use decide::admission::Refusal;
use model::api::ResourceStatus;
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use pod::ports::{Grant, NoManagers, ResourceManagers};
use tokio::sync::watch;

/// UIDs of the pods that wait. Clones are the same.
#[derive(Clone, Debug)]
pub struct Waiting(watch::Sender<BTreeSet<String>>);

impl Default for Waiting {
    fn default() -> Self {
        Self(watch::Sender::new(BTreeSet::new()))
    }
}

impl Waiting {
    /// From now on a pod of this UID waits for its admission.
    pub fn hold(&self, uid: &str) {
        self.0.send_modify(|held| {
            held.insert(uid.to_owned());
        });
    }

    /// Nobody waits any more.
    pub fn release(&self) {
        self.0.send_modify(BTreeSet::clear);
    }

    /// The managers.
    pub(crate) fn managers(&self) -> Arc<dyn ResourceManagers> {
        Arc::new(Managers(self.clone()))
    }

    fn holds(&self, uid: &PodUid) -> bool {
        self.0.borrow().contains(uid.as_str())
    }
}

struct Managers(Waiting);

#[async_trait]
impl ResourceManagers for Managers {
    fn counts(&self, resource: &str) -> bool {
        NoManagers.counts(resource)
    }

    fn may_wait(&self, pod: &DesiredPod) -> bool {
        self.0.holds(pod.uid())
    }

    async fn allocate(&self, pod: &DesiredPod, _: bool) -> Result<(), Refusal> {
        let mut held = self.0.0.subscribe();
        let _ = held.wait_for(|held| !held.contains(pod.uid().as_str())).await;
        Ok(())
    }

    async fn container(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Result<Grant, String> {
        NoManagers.container(pod, container).await
    }

    fn exclusive_cpus(&self, uid: &PodUid) -> bool {
        NoManagers.exclusive_cpus(uid)
    }

    fn own_cpus(&self, uid: &PodUid, container: &str) -> bool {
        NoManagers.own_cpus(uid, container)
    }

    fn health(&self, pod: &DesiredPod, container: &str) -> Vec<ResourceStatus> {
        NoManagers.health(pod, container)
    }

    async fn prepare(&self, pod: &DesiredPod) -> Result<(), String> {
        NoManagers.prepare(pod).await
    }

    fn has_claims(&self, uid: &PodUid) -> bool {
        NoManagers.has_claims(uid)
    }

    async fn unprepare(&self, uid: &PodUid) -> Result<(), String> {
        NoManagers.unprepare(uid).await
    }

    fn ended(&self, uid: &PodUid) {
        NoManagers.ended(uid);
    }

    fn release(&self, uid: &PodUid) {
        NoManagers.release(uid);
    }

    fn retain(&self, known: &BTreeSet<PodUid>) {
        NoManagers.retain(known);
    }
}
