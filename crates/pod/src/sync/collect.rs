//! Removing what is dead and not kept: by the policy once a minute while the pod lives, once when it has ended, and whenever somebody asks (eviction, the
//! limit for the whole node).
//!
//! What a container ended with was read by the observation that names it, so nothing is lost; what cannot be removed is tried again later.

use std::collections::BTreeMap;
use std::time::Duration;

use decide::gc::{self, Removal};
use model::observed::{ContainerState, ObservedPod};
use tokio::time::Instant;

use crate::registry::{Collect, WorkerState};
use crate::worker::Worker;

/// How often a pod's dead containers are collected.
const COLLECT: Duration = Duration::from_secs(60);

impl Worker {
    /// Removes dead containers and sandboxes that are not kept, at most once a [`COLLECT`] unless somebody asks. None when it was not done; whether
    /// something was removed.
    pub(super) async fn collect(&mut self, observed: &ObservedPod) -> Option<bool> {
        let asked = self.entry.take_collect();
        if self.collected.elapsed() < COLLECT && asked.is_empty() {
            return None;
        }
        self.collected = Instant::now();
        Some(self.remove_dead(observed, asked).await)
    }

    /// The same for a pod of which nothing runs any more, while its source still holds it. `due`: whether or not somebody asks.
    pub(crate) async fn collect_ended(&mut self, due: bool) {
        let asked = self.entry.take_collect();
        if !due && asked.is_empty() {
            return;
        }
        match self.observe().await {
            Ok(observed) => {
                self.remove_dead(&observed, asked).await;
            }
            Err(e) => self.note_failure("collect", &e.to_string()),
        }
    }

    async fn remove_dead(&mut self, observed: &ObservedPod, asked: Vec<Collect>) -> bool {
        let (mut these, mut all) = (Vec::new(), false);
        // Dropped, and so answered, at the end.
        let mut answers = Vec::new();
        for what in asked {
            match what {
                Collect::These(ids) => these.extend(ids),
                Collect::Unused(answer) => {
                    all = true;
                    answers.push(answer);
                }
            }
        }
        // By what is left of a static pod the next agent knows that it has run to its end.
        let is_static = self.intent.borrow().pod().is_some_and(|p| p.is_static());
        let ended = self.entry.view().state == WorkerState::Terminated && !is_static;
        let pods = BTreeMap::from([(self.entry.uid.clone(), observed.clone())]);
        let mut removals = gc::container_gc(&gc::ContainerGc {
            pods: &pods,
            gone: &|_| all && ended,
            held: &|_| false,
            sources_ready: true,
            policy: self.deps.settings.container_gc,
            now: self.deps.clock.now(),
        });
        for c in observed.containers.iter().filter(|c| c.state == ContainerState::Exited && these.contains(&c.id)) {
            let known = |r: &Removal| matches!(r, Removal::Container { id, .. } if *id == c.id);
            if !removals.iter().any(known) {
                removals.push(Removal::Container {
                    uid: self.entry.uid.clone(),
                    id: c.id.clone(),
                    name: c.name.clone(),
                    stop_first: false,
                });
            }
        }
        let mut any = false;
        for removal in removals {
            let id = match &removal {
                Removal::Container { id, .. } | Removal::Sandbox { id, .. } => id.clone(),
            };
            let removed = match removal {
                Removal::Container { id, name, stop_first, .. } => {
                    let log = observed.containers.iter().find(|c| c.id == id).map_or("", |c| c.log_path.as_str());
                    let stopped = if stop_first {
                        let grace = Duration::from_secs(decide::terminate::MINIMUM_STOP.unsigned_abs());
                        self.deps.mutator.stop_container(&id, grace).await.map_err(|e| e.to_string())
                    } else {
                        Ok(())
                    };
                    match stopped {
                        Ok(()) => self.remove_container(&id, &name, log).await,
                        failed => failed,
                    }
                }
                Removal::Sandbox { id, .. } => self.remove_sandbox(&id).await,
            };
            any |= removed.is_ok();
            match removed {
                Ok(()) => self.observer.changed(&[id], &[]),
                Err(reason) => {
                    self.observer.doubt();
                    self.note_failure("collect", &reason);
                }
            }
        }
        any
    }
}
