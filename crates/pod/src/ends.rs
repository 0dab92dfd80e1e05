//! The way to end a pod for the node's sake: eviction, preemption, shutdown. Who wants it asks here; the pod's worker does it.
//!
//! The request goes through the dispatcher to the worker as an intent, so that it comes after nothing and waits for nobody. A pod that is ended in this
//! way fails for good: its reason is written below its directory before anything is stopped, and a later agent goes on with it, though nobody has
//! told the API server yet.

use model::pod::PodUid;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// The reason of a pod that makes room for a critical one.
pub(crate) const PREEMPTING: &str = "Preempting";

/// Requests that may wait for the dispatcher.
const QUEUE: usize = 64;

/// How a pod fails that the node ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failing {
    /// `status.reason`: `Evicted`, `Preempting`, `Terminated`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// The condition DisruptionTarget (KEP-3329); None: the pod has itself to blame.
    pub disruption: Option<Disruption>,
}

/// Why a pod has to go that is not to blame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disruption {
    /// The condition's reason, `TerminationByKubelet`.
    pub reason: String,
    /// Its message.
    pub message: String,
}

/// A pod that is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndPod {
    /// Which.
    pub uid: PodUid,
    /// What its status says.
    pub failing: Failing,
    /// Grace in seconds; None: its own.
    pub grace: Option<i64>,
}

/// See the module. Clones share one queue.
#[derive(Clone, Debug)]
pub struct PodEnds(mpsc::Sender<EndPod>);

impl PodEnds {
    /// Asks for a pod's end; returns when the request is in the queue. That the pod has ended shows in the table of pods. A pod that nobody looks
    /// after has nothing to end. When the agent stops, nothing happens: the next one decides anew.
    pub async fn end(&self, end: EndPod) {
        let _ = self.0.send(end).await;
    }
}

/// The queue and its two ends.
pub fn channel() -> (PodEnds, mpsc::Receiver<EndPod>) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (PodEnds(sender), receiver)
}
