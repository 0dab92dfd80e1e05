//! The only writer of pods at the API server: statuses, the last deletion of a pod that has ended, and mirror pods.
//!
//! ```text
//!   workers ──changed──▶ ┌───────┐        PATCH /status, DELETE (grace 0)
//!   source  ──changed──▶ │ queue │ ─▶ writer ─────────────────────────────▶ API server
//!   dispatcher ─owners─▶ └───────┘        POST, DELETE of mirror pods
//! ```
//!
//! Level-triggered: a key in the queue says "look at this pod". The writer compares what the registry shows with what the API is known to hold, and
//! sends the difference, if there is one. So any number of changes while the API server is away ends in one patch per changed pod, and somebody
//! else's change of what is ours is put right.
//!
//! Task: owned by wire.rs, ends with [`crate::ports::Tasks::stop`]; what is not written then is written by the next start. Requests: at most [`PARALLEL`] at once, never two
//! for one pod; deadlines and rate are the client's. While no server answers, one request at a time is tried, with a growing pause of at
//! most 30 s; a refusal holds up its own pod only.

mod mirrors;
mod queue;
mod write;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::calls::PodApi;
use model::api::Node;
use telemetry::metrics::Metrics;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use mirrors::{Mirror, Mirrors};
pub use queue::StatusQueue;

use self::queue::Key;
use self::write::{Outcome, Shared};
use crate::ports::{Random, sleep_until};
use crate::registry::Registry;

/// Requests under way at once.
pub const PARALLEL: usize = 4;
/// First wait after a failure.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait while no server answers.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Longest wait for a pod whose request was refused.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The task.
pub struct StatusWriter {
    shared: Arc<Shared>,
    queue: StatusQueue,
    node: watch::Receiver<Option<Arc<Node>>>,
    random: Random,
    /// What is to be looked at.
    ready: BTreeSet<Key>,
    busy: HashSet<Key>,
    requests: JoinSet<(Key, Outcome)>,
    /// What is looked at again later; the number keeps two of one moment apart.
    later: BTreeMap<(Instant, u64), Key>,
    count: u64,
    refused: HashMap<Key, u32>,
    /// No server answers: when the next try may be, and how many were in vain.
    down: Option<(Instant, u32)>,
    /// Since when what is to be looked at waits; until it was.
    since: HashMap<Key, Instant>,
    metrics: Option<Arc<Metrics>>,
    /// Mirror pods that wait for the node's object, their owner.
    homeless: HashSet<Key>,
}

impl StatusWriter {
    /// A writer of what `registry` shows. Mirror pods are made once `node` shows the node's object.
    pub fn new(
        api: Arc<dyn PodApi>,
        registry: Arc<Registry>,
        mirrors: Mirrors,
        queue: StatusQueue,
        node: watch::Receiver<Option<Arc<Node>>>,
        random: Random,
    ) -> Self {
        Self {
            shared: Arc::new(Shared::new(api, registry, mirrors)),
            queue,
            node,
            random,
            ready: BTreeSet::new(),
            busy: HashSet::new(),
            requests: JoinSet::new(),
            later: BTreeMap::new(),
            count: 0,
            refused: HashMap::new(),
            down: None,
            homeless: HashSet::new(),
            since: HashMap::new(),
            metrics: None,
        }
    }

    /// Tells how long statuses take to arrive.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    fn take_all(&mut self) {
        for (key, at) in self.queue.take() {
            self.since.entry(key.clone()).or_insert(at);
            self.ready.insert(key);
        }
    }

    /// Runs until it is dropped.
    pub async fn run(mut self) {
        loop {
            self.begin();
            let wake = self.wake_at();
            tokio::select! {
                biased;
                Some(done) = self.requests.join_next() => {
                    // A request that panicked is a fault of ours; its pod is looked at with its next change.
                    if let Ok((key, outcome)) = done {
                        self.finish(key, outcome);
                    }
                }
                () = self.queue.filled() => self.take_all(),
                Ok(()) = self.node.changed() => self.ready.extend(self.homeless.drain()),
                () = sleep_until(wake) => self.due(),
            }
        }
    }

    /// Starts requests for what is ready.
    fn begin(&mut self) {
        let now = Instant::now();
        let most = match self.down {
            Some((at, _)) if at > now => 0,
            Some(_) => 1,
            None => PARALLEL,
        };
        while self.requests.len() < most {
            let Some(key) = self.ready.iter().find(|k| !self.busy.contains(*k)).cloned() else { return };
            self.ready.remove(&key);
            self.busy.insert(key.clone());
            let (shared, node) = (self.shared.clone(), self.node.borrow().clone());
            self.requests.spawn(async move {
                let outcome = shared.write(&key, node.as_deref()).await;
                (key, outcome)
            });
        }
    }

    fn finish(&mut self, key: Key, outcome: Outcome) {
        self.busy.remove(&key);
        match outcome {
            Outcome::Same => {
                self.since.remove(&key);
                self.refused.remove(&key);
            }
            Outcome::Written => {
                if let (Some(at), Some(metrics)) = (self.since.remove(&key), &self.metrics) {
                    metrics.beside.pod_status_sync_duration.observe(at.elapsed().as_secs_f64());
                }
                self.refused.remove(&key);
                self.down = None;
            }
            Outcome::NoNode => {
                self.homeless.insert(key);
            }
            Outcome::Refused => {
                self.down = None;
                let tries = self.refused.get(&key).map_or(1, |tries| tries + 1);
                self.refused.insert(key.clone(), tries);
                let wait = self.wait(tries, LONGEST_WAIT);
                self.count += 1;
                self.later.insert((Instant::now() + wait, self.count), key);
            }
            Outcome::Down => {
                let tries = self.down.map_or(0, |(_, tries)| tries) + 1;
                self.down = Some((Instant::now() + self.wait(tries, LONGEST_PAUSE), tries));
                self.ready.insert(key);
            }
        }
    }

    fn wait(&self, tries: u32, longest: Duration) -> Duration {
        let base = FIRST_WAIT.saturating_mul(1 << tries.saturating_sub(1).min(10)).min(longest);
        self.random.jitter(base.mul_f64(0.75), 0.5)
    }

    fn wake_at(&self) -> Option<Instant> {
        let pause = self.down.filter(|_| self.busy.is_empty() && !self.ready.is_empty()).map(|(at, _)| at);
        let later = self.later.keys().next().map(|(at, _)| *at);
        pause.into_iter().chain(later).min()
    }

    fn due(&mut self) {
        let now = Instant::now();
        while let Some(entry) = self.later.first_entry().filter(|e| e.key().0 <= now) {
            let key = entry.remove();
            self.ready.insert(key);
        }
    }
}
