//! Whose status is to be looked at again. Level-triggered: a key says only "look", so any number of changes cost one entry.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use model::pod::{DesiredPod, PodUid};
use tokio::sync::Notify;
use tokio::time::Instant;

/// What the writer looks at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Key {
    /// A pod of the API.
    Pod(PodUid),
    /// The mirror pod of this full name (`NAME_NAMESPACE`).
    Mirror(String),
}

/// The writer's input. Bounded by the number of pods, since a key is in it once.
#[derive(Clone, Debug, Default)]
pub struct StatusQueue(Option<Arc<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// With the time since when each waits.
    keys: Mutex<HashMap<Key, Instant>>,
    filled: Notify,
}

impl StatusQueue {
    /// A queue that a [`super::StatusWriter`] empties. The default one takes nothing: without an API server there is nobody to tell.
    pub fn watched() -> Self {
        Self(Some(Arc::default()))
    }

    /// Something of this pod's status, or of what is stored of it, has changed.
    pub fn changed(&self, pod: &DesiredPod) {
        if self.0.is_some() {
            self.push(if pod.is_static() { Key::Mirror(pod.full_name()) } else { Key::Pod(pod.uid().clone()) });
        }
    }

    /// The pod has no worker any more: what was remembered of it may go.
    pub fn gone(&self, uid: &PodUid) {
        self.push(Key::Pod(uid.clone()));
    }

    /// The mirror pod of this full name, or its static pod, came, went or changed.
    pub fn mirror_changed(&self, full_name: &str) {
        if self.0.is_some() {
            self.push(Key::Mirror(full_name.to_owned()));
        }
    }

    pub(super) fn push(&self, key: Key) {
        if let Some(inner) = &self.0
            && let Entry::Vacant(free) = inner.keys.lock().unwrap_or_else(PoisonError::into_inner).entry(key)
        {
            free.insert(Instant::now());
            inner.filled.notify_one();
        }
    }

    /// Everything that waits, and since when.
    pub(super) fn take(&self) -> HashMap<Key, Instant> {
        let Some(inner) = &self.0 else { return HashMap::new() };
        std::mem::take(&mut *inner.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when something may have come since the last [`StatusQueue::take`].
    pub(super) async fn filled(&self) {
        match &self.0 {
            Some(inner) => inner.filled.notified().await,
            None => std::future::pending().await,
        }
    }
}
