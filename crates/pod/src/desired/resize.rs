//! Wishes of pods for other resources: handed to admission, and what comes of them handed to the workers.
//!
//! Nothing is polled while nobody waits: a wish that was put off is looked at again when room became free, and after [`AGAIN`] in any case.

use std::time::Duration;

use decide::resize::{message, operations};
use model::allocation::{Grant, PendingReason, ResizeState, same_requirements};
use model::pod::DesiredPod;
use tokio::time::Instant;
use tracing::info;

use super::Dispatcher;
use crate::admit::{Outcome, Resized};
use crate::worker::Intent;

/// Between two looks at wishes that were put off, as Go's.
const AGAIN: Duration = Duration::from_secs(180);
/// The same until every source has spoken: nothing is granted before.
const AGAIN_EARLY: Duration = Duration::from_secs(30);

impl Dispatcher {
    /// A pod with a worker has a newer form: when it asks for other resources than it was given, that is a wish. `before`: its form until now.
    pub(super) async fn follow_wish(&mut self, pod: &DesiredPod, before: Option<&DesiredPod>) {
        let seen = *self.all_seen.borrow();
        let Some(held) = self.workers.get_mut(pod.uid()).filter(|held| !held.leaving) else { return };
        let Some(allocation) = held.allocation.clone() else { return };
        if pod.is_deleting() || !matches!(&*held.intent.borrow(), Intent::Run(_)) {
            return;
        }
        if !pod.asks_other_than(&allocation) {
            if held.resize.pending.take().is_some() {
                self.admit.drop_wish(pod.uid()).await;
                self.count_pending();
            }
            return;
        }
        let level = |pod: &DesiredPod| pod.spec().resources.clone().unwrap_or_default();
        let changed = before.is_none_or(|before| {
            let operations = operations(before, pod, true);
            for o in &operations {
                self.deps.metrics.resizes.requested(o.resource, o.requirement, o.operation);
            }
            !operations.is_empty() || !same_requirements(&level(before), &level(pod))
        });
        match (changed, seen) {
            (false, _) => self.admit.renew_wish(pod.clone()).await,
            (true, true) => {
                let resized = self.admit.wish(pod.clone(), self.deps.clock.now()).await;
                self.tell(resized);
            }
            (true, false) => {
                self.admit.add_wish(pod.clone()).await;
                self.wishes_due = Some(Instant::now() + AGAIN_EARLY);
            }
        }
    }

    /// Looks at all wishes again.
    pub(super) async fn retry_wishes(&mut self, trigger: &'static str) {
        if !*self.all_seen.borrow() {
            self.wishes_due = Some(Instant::now() + AGAIN_EARLY);
            return;
        }
        let resized = self.admit.retry(self.deps.clock.now(), trigger).await;
        self.tell(resized);
    }

    /// Tells workers and owners what came of wishes.
    fn tell(&mut self, resized: Resized) {
        self.wishes_due = resized.deferred.then(|| Instant::now() + AGAIN);
        let news = !resized.changes.is_empty();
        for change in resized.changes {
            let uid = change.pod.uid().clone();
            let pod = self.desired(&uid).cloned().unwrap_or(change.pod);
            let generation = pod.meta().generation.unwrap_or(0);
            let deps = self.deps.clone();
            if let Outcome::Given { room, .. } = &change.outcome {
                self.preempt(&pod, room);
            }
            let Some(held) = self.workers.get_mut(&uid) else { continue };
            match change.outcome {
                Outcome::Given { allocation, was_deferred, trigger, .. } => {
                    info!(pod = pod.full_name(), uid = %uid, generation, "Resize is granted");
                    deps.events.pod_normal(&pod, "ResizeStarted", &message("started", &pod, generation, ""));
                    if was_deferred {
                        deps.metrics.resizes.deferred_accepted(trigger);
                    }
                    held.allocation = Some(allocation);
                    let number = held.resize.grant.map_or(1, |grant| grant.number + 1);
                    held.resize = ResizeState { grant: Some(Grant { number, generation }), ..ResizeState::default() };
                    self.qos_soon();
                }
                Outcome::Pending { pending, word, news, detail } => {
                    if let Some(detail) = detail {
                        deps.metrics.resizes.infeasible(detail);
                    }
                    if news {
                        let reason = match pending.reason {
                            PendingReason::Deferred => "ResizeDeferred",
                            PendingReason::Infeasible => "ResizeInfeasible",
                        };
                        let text = message(&word, &pod, pending.generation, &pending.message);
                        deps.events.pod_warning(&pod, reason, &text);
                    }
                    held.resize.pending = Some(pending);
                }
                Outcome::Void => held.resize.pending = None,
            }
            if let Some(held) = self.workers.get(&uid) {
                let form = held.form(&pod);
                held.intent.send_modify(|intent| intent.update(form));
            }
        }
        if news {
            self.count_pending();
        }
    }

    fn count_pending(&self) {
        let of = |reason| {
            let pending = self.workers.values().filter_map(|held| held.resize.pending.as_ref());
            pending.filter(|p| p.reason == reason).count()
        };
        self.deps.metrics.resizes.pending(of(PendingReason::Deferred), of(PendingReason::Infeasible));
    }
}
