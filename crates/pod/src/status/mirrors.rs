//! Mirror pods as the API server shows them: one for each static pod, so that the cluster sees what this node runs by itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cluster::reflect::version_of;
use model::api::{Pod, PodStatus};
use model::pod::{CONFIG_MIRROR, DesiredPod, PodUid};

use super::StatusQueue;

/// One mirror pod: what the writer needs of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Mirror {
    /// The API object's own UID.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Hash of the static pod that it was made for.
    pub hash: String,
    /// Somebody asked for its deletion.
    pub deleting: bool,
    /// The status that is stored.
    pub status: PodStatus,
    /// The version of the object, for telling which of two copies is newer.
    pub version: Option<u128>,
}

impl Mirror {
    /// What is needed of an API pod; None when it is not a mirror pod.
    pub fn of(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let hash = meta.annotations.as_ref()?.get(CONFIG_MIRROR)?.clone();
        Some(Self {
            uid: PodUid::new(meta.uid.clone()?),
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            hash,
            deleting: meta.deletion_timestamp.is_some(),
            status: pod.status.clone().unwrap_or_default(),
            version: version_of(meta),
        })
    }

    /// `NAME_NAMESPACE`.
    pub fn full_name(&self) -> String {
        format!("{}_{}", self.name, self.namespace)
    }
}

/// Mirror pods and the static pods that they stand for, by full name. The API source writes the one side, the dispatcher the other; the
/// status writer reads both.
#[derive(Clone, Debug, Default)]
pub struct Mirrors(Arc<Mutex<Table>>, StatusQueue);

#[derive(Debug, Default)]
struct Table {
    mirrors: HashMap<String, Arc<Mirror>>,
    names: HashMap<PodUid, String>,
    /// Static pods that have a worker.
    owners: HashMap<String, PodUid>,
    /// True from the first list of the API on.
    listed: bool,
}

impl Mirrors {
    /// An empty table that tells `queue` of changes.
    pub fn new(queue: StatusQueue) -> Self {
        Self(Arc::default(), queue)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The API's whole set.
    pub fn replace(&self, all: Vec<Mirror>) {
        let mut table = self.table();
        let mut names: Vec<String> = table.mirrors.drain().map(|(name, _)| name).collect();
        table.names.clear();
        table.listed = true;
        for mirror in all {
            names.push(mirror.full_name());
            table.insert(mirror);
        }
        // Also those that have none yet: from now on it is known that they have none.
        names.extend(table.owners.keys().cloned());
        drop(table);
        for name in names {
            self.1.mirror_changed(&name);
        }
    }

    /// A mirror pod came or changed.
    pub fn upsert(&self, mirror: Mirror) {
        let name = mirror.full_name();
        self.table().insert(mirror);
        self.1.mirror_changed(&name);
    }

    /// What a write of ours was answered. It counts only while the watch shows the object: the answer may come after its deletion.
    pub(super) fn answered(&self, mirror: Mirror) {
        let mut table = self.table();
        if let Some(held) = table.mirrors.get_mut(&mirror.full_name())
            && held.uid == mirror.uid
            && held.version < mirror.version
        {
            *held = Arc::new(mirror);
        }
    }

    /// The object of this UID is gone; true when it was a mirror pod.
    pub fn remove(&self, uid: &PodUid) -> bool {
        let mut table = self.table();
        let Some(name) = table.names.remove(uid) else { return false };
        if table.mirrors.get(&name).is_some_and(|m| m.uid == *uid) {
            table.mirrors.remove(&name);
        }
        drop(table);
        self.1.mirror_changed(&name);
        true
    }

    /// This static pod has a worker.
    pub fn own(&self, pod: &DesiredPod) {
        let name = pod.full_name();
        self.table().owners.insert(name.clone(), pod.uid().clone());
        self.1.mirror_changed(&name);
    }

    /// The static pod's worker is done.
    pub fn disown(&self, full_name: &str, uid: &PodUid) {
        let mut table = self.table();
        if table.owners.get(full_name) == Some(uid) {
            table.owners.remove(full_name);
            drop(table);
            self.1.mirror_changed(full_name);
        }
    }

    /// The static pod and the mirror pod of a full name; None before the API was listed.
    pub(super) fn get(&self, full_name: &str) -> Option<(Option<PodUid>, Option<Arc<Mirror>>)> {
        let table = self.table();
        let both = (table.owners.get(full_name).cloned(), table.mirrors.get(full_name).cloned());
        table.listed.then_some(both)
    }
}

impl Table {
    fn insert(&mut self, mirror: Mirror) {
        let name = mirror.full_name();
        // The answer to a write of ours may be newer than what the watch shows.
        if self.mirrors.get(&name).is_some_and(|held| held.uid == mirror.uid && held.version > mirror.version) {
            return;
        }
        let uid = mirror.uid.clone();
        self.names.insert(uid.clone(), name.clone());
        if let Some(old) = self.mirrors.insert(name, Arc::new(mirror)).filter(|old| old.uid != uid) {
            self.names.remove(&old.uid);
        }
    }
}
