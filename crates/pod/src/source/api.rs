//! Pods that the API server bound to this node, as a reflector tells of them; mirror pods among them go to their table.
//!
//! Task: owned by wire.rs, ends with [`crate::ports::Tasks::stop`]. Input: the reflector's deltas. Output: the bounded channel of updates; a busy
//! dispatcher holds the source, and so the reflector, back. It holds no pods itself: while the API server is away, what was last told stays.

use std::collections::HashMap;

use cluster::Delta;
use model::api::Pod;
use model::pod::{CONFIG_SEEN, CONFIG_SOURCE, DesiredPod, PodSource, PodUid};
use tokio::sync::mpsc;
use tracing::warn;

use super::{SourceSet, SourceUpdate};
use crate::ports::Clock;
use crate::status::{Mirror, Mirrors};

struct ApiSource {
    mirrors: Mirrors,
    clock: Clock,
    /// When each pod was first told of, as it stands in its annotations.
    seen: HashMap<PodUid, String>,
}

/// Runs the source until its input or its receiver is gone.
pub async fn run(
    mut deltas: mpsc::Receiver<Delta<Pod>>,
    mirrors: Mirrors,
    clock: Clock,
    out: mpsc::Sender<SourceUpdate>,
) {
    let mut source = ApiSource { mirrors, clock, seen: HashMap::new() };
    while let Some(delta) = deltas.recv().await {
        if let Some(update) = source.take(delta)
            && out.send(update).await.is_err()
        {
            return;
        }
    }
}

impl ApiSource {
    fn take(&mut self, delta: Delta<Pod>) -> Option<SourceUpdate> {
        match delta {
            Delta::Snapshot(all) => {
                let (mut mirrors, mut pods) = (Vec::new(), Vec::with_capacity(all.len()));
                for pod in all {
                    match Mirror::of(&pod) {
                        Some(mirror) => mirrors.push(mirror),
                        None => pods.extend(self.desired(pod)),
                    }
                }
                let now: HashMap<PodUid, String> =
                    pods.iter().filter_map(|p| self.seen.remove_entry(p.uid())).collect();
                self.seen = now;
                self.mirrors.replace(mirrors);
                Some(SourceSet::new(PodSource::Api, pods).into())
            }
            Delta::Upsert(pod) => match Mirror::of(&pod) {
                Some(mirror) => {
                    self.mirrors.upsert(mirror);
                    None
                }
                None => self.desired(pod).map(SourceUpdate::Upsert),
            },
            Delta::Remove(key) => {
                let uid = PodUid::new(key.uid);
                if self.mirrors.remove(&uid) {
                    return None;
                }
                self.seen.remove(&uid);
                Some(SourceUpdate::Remove(PodSource::Api, uid))
            }
        }
    }

    /// The pod with the annotations that the kubelet itself adds; containers see them through the downward API.
    fn desired(&mut self, mut pod: Pod) -> Option<DesiredPod> {
        if let Some(uid) = &pod.metadata.uid {
            let clock = &self.clock;
            let seen = self.seen.entry(PodUid::new(uid.as_str())).or_insert_with(|| clock.now().to_string()).clone();
            let notes = pod.metadata.annotations.get_or_insert_default();
            notes.insert(CONFIG_SOURCE.to_owned(), PodSource::Api.as_str().to_owned());
            notes.insert(CONFIG_SEEN.to_owned(), seen);
        }
        let name = pod.metadata.name.clone();
        DesiredPod::new(pod, PodSource::Api)
            .inspect_err(|e| warn!(pod = name, err = %e, "Pod from the API server cannot be used, the others go on"))
            .ok()
    }
}
