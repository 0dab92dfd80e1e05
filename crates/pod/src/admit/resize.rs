//! Wishes of pods for other resources than they were given: in which order they are looked at, and what comes of each.
//!
//! A wish that was put off stays until it is granted, or the pod wants something else or ends. One that this node can never grant is looked at again
//! only when the pod asks for something else. What is granted is on the disk before the dispatcher hears of it.

use std::sync::Arc;

use decide::admission::Admitted;
use decide::resize::{infeasible, turn};
use jiff::Timestamp;
use model::allocation::{PendingReason, PendingResize, PodAllocation, ResizeState};
use model::pod::{DesiredPod, PodUid};
use tokio::sync::oneshot;
use tracing::info;

use super::Admitter;

/// A pod that asks for other resources than it was given.
pub(super) struct Wish {
    /// As its source gives it.
    pub(super) pod: DesiredPod,
    /// Why it was not granted, once it was looked at.
    pub(super) pending: Option<PendingResize>,
    /// This node cannot grant it.
    pub(super) parked: bool,
}

/// What came of looking at the wishes.
#[derive(Debug, Default)]
pub struct Resized {
    /// Wishes of which there is news.
    pub changes: Vec<Change>,
    /// Some were put off, and are worth another look after a while.
    pub deferred: bool,
}

/// News of one wish.
#[derive(Clone, Debug)]
pub struct Change {
    /// The pod, as its source gives it.
    pub pod: DesiredPod,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a wish.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Granted.
    Given {
        /// What the pod was given.
        allocation: Arc<PodAllocation>,
        /// It had been put off before.
        was_deferred: bool,
        /// Why it was looked at (label `retry_trigger`).
        trigger: &'static str,
        /// What of the node's room it is given: a critical pod's may be that of others, which must be ended.
        room: Admitted,
    },
    /// Not granted.
    Pending {
        /// Why.
        pending: PendingResize,
        /// The reason in a word: `Infeasible`, or that of the refusal.
        word: String,
        /// The pod's owner was not told this yet.
        news: bool,
        /// Label `reason_detail` of a wish that this node can never grant.
        detail: Option<&'static str>,
    },
    /// There is nothing to wish for any more.
    Void,
}

impl Admitter {
    /// The pod asks for this.
    pub(super) fn wish(&mut self, pod: DesiredPod) {
        let pending = self.wishes.remove(pod.uid()).and_then(|wish| wish.pending);
        self.wishes.insert(pod.uid().clone(), Wish { pod, pending, parked: false });
    }

    /// Room became free: whoever waits for some is told.
    pub(super) fn room_is_free(&mut self, why: &'static str) {
        if self.wishes.values().any(|wish| !wish.parked) {
            self.room = Some(why);
            self.freed.notify_one();
        }
    }

    /// Looks at every wish in its turn and answers.
    pub(super) async fn look_at_wishes(
        &mut self,
        now: Timestamp,
        trigger: &'static str,
        reply: oneshot::Sender<Resized>,
    ) {
        let mut turns: Vec<_> = self.wishes.iter().filter(|(_, wish)| !wish.parked).collect();
        let given = |wish: &Wish| match self.allocated.get(wish.pod.uid().as_str()) {
            Some(given) => wish.pod.given(given, ResizeState::default()),
            None => wish.pod.clone(),
        };
        turns.sort_by_cached_key(|(_, wish)| {
            let since = wish.pending.as_ref().map(|p| p.since);
            turn(&wish.pod, &given(wish), since, self.rules.pod_level_resources)
        });
        let turns: Vec<PodUid> = turns.into_iter().map(|(uid, _)| uid.clone()).collect();
        let mut resized = Resized::default();
        for uid in turns {
            let Some(wish) = self.wishes.remove(&uid) else { continue };
            if let Some((wish, change)) = self.look_at(wish, now, trigger, &mut resized.changes) {
                resized.changes.extend(change);
                resized.deferred |= !wish.parked;
                self.wishes.insert(uid, wish);
            }
        }
        // Written before the worker may act on it.
        self.save().await;
        let _ = reply.send(resized);
    }

    /// One wish: None when it is granted or void, which is told in `changes`; else what is left of it.
    fn look_at(
        &mut self,
        mut wish: Wish,
        now: Timestamp,
        trigger: &'static str,
        changes: &mut Vec<Change>,
    ) -> Option<(Wish, Option<Change>)> {
        let pod = wish.pod.clone();
        let uid = pod.uid();
        let given = self.allocated.get(uid.as_str()).cloned().unwrap_or_default();
        if !self.ledger.holds(uid) || !pod.asks_other_than(&given) {
            changes.push(Change { pod, outcome: Outcome::Void });
            return None;
        }
        let form = pod.given(&given, ResizeState::default());
        let (reason, word, message, detail) = match infeasible(&pod, &form, &self.rules.resize) {
            Some(fault) => {
                let reason = PendingReason::Infeasible;
                (reason, reason.as_str().to_owned(), fault.message.to_owned(), Some(fault.detail))
            }
            None => match self.ledger.resize(&pod, &self.node, &self.rules) {
                Ok(room) => {
                    let allocation = decide::resize::allocation_of(&pod, self.rules.resize.init_containers);
                    self.allocated.insert(uid.to_string(), allocation.clone());
                    self.allocated_dirty = true;
                    let was_deferred = wish.pending.is_some_and(|p| p.reason == PendingReason::Deferred);
                    let outcome = Outcome::Given { allocation: Arc::new(allocation), was_deferred, trigger, room };
                    changes.push(Change { pod, outcome });
                    return None;
                }
                Err(refusal) => (PendingReason::Deferred, refusal.reason, refusal.message, None),
            },
        };
        let generation = pod.meta().generation.unwrap_or(0);
        let before = wish.pending.take();
        let since = before.as_ref().filter(|b| b.reason == reason).map_or(now, |b| b.since);
        let pending = PendingResize { reason, message, generation, since };
        let news = before.as_ref().is_none_or(|b| (b.reason, b.generation) != (reason, generation));
        let change = (before.as_ref() != Some(&pending)).then(|| {
            if news {
                info!(pod = pod.full_name(), uid = %uid, reason = reason.as_str(), message = pending.message, "Resize is not granted");
            }
            Change { pod: pod.clone(), outcome: Outcome::Pending { pending: pending.clone(), word, news, detail } }
        });
        wish.parked = reason == PendingReason::Infeasible;
        wish.pending = Some(pending);
        Some((wish, change))
    }
}
