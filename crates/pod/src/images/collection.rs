//! What the collection of images needs of this room: the right to remove an image and no other, which images are just being used, and the records of
//! pulls.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cri::port::{CriResult, RuntimeMutator};
use cri_api::v1;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;

use super::Records;
use crate::ports::Clock;

/// How long an image that was found usable counts as used: in that time a container of it shows in the runtime, or its start has failed.
const TOUCH: Duration = Duration::from_secs(120);

/// Images that were found usable, by id, and when.
#[derive(Debug, Default)]
pub(super) struct Touched(Mutex<HashMap<String, Timestamp>>);

impl Touched {
    pub(super) fn note(&self, id: &str, now: Timestamp) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned(), now);
    }

    /// Those of the last [`TOUCH`]; older ones are forgotten.
    fn newest(&self, now: Timestamp) -> Vec<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = SignedDuration::try_from(TOUCH).unwrap_or(SignedDuration::MAX);
        all.retain(|_, at| now.duration_since(*at) < limit);
        all.keys().cloned().collect()
    }
}

/// See the module.
#[derive(Clone)]
pub struct ImageCollection {
    runtime: Arc<dyn RuntimeMutator>,
    changed: watch::Sender<u64>,
    touched: Arc<Touched>,
    records: Option<Arc<Records>>,
    clock: Clock,
}

impl ImageCollection {
    pub(super) fn new(
        runtime: Arc<dyn RuntimeMutator>,
        changed: watch::Sender<u64>,
        touched: Arc<Touched>,
        records: Option<Arc<Records>>,
        clock: Clock,
    ) -> Self {
        Self { runtime, changed, touched, records, clock }
    }

    /// Removes an image. One that is gone already counts as removed.
    ///
    /// # Errors
    /// The runtime's; the image may be gone all the same.
    pub async fn remove(&self, id: &str, runtime_handler: &str) -> CriResult<()> {
        let spec = v1::ImageSpec {
            image: id.to_owned(),
            runtime_handler: runtime_handler.to_owned(),
            ..v1::ImageSpec::default()
        };
        match self.runtime.remove_image(spec).await {
            Err(e) if !e.is_not_found() => return Err(e),
            _ => {}
        }
        self.changed.send_modify(|n| *n += 1);
        Ok(())
    }

    /// Ids of images that containers were about to be made of a short while ago.
    pub fn just_used(&self) -> Vec<String> {
        self.touched.newest(self.clock.now())
    }

    /// Forgets who pulled images that are not there any more. `present`: ids, digests and names as listed at `listed`.
    pub async fn prune_records(&self, present: &BTreeSet<String>, listed: Timestamp) {
        if let Some(records) = &self.records {
            records.prune(present, listed).await;
        }
    }
}
