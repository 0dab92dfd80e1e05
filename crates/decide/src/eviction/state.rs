//! From one look at the node to the next: which thresholds are met, for how long, and which pressures hold.

use std::collections::BTreeMap;
use std::time::Duration;

use model::quantity::Quantity;

use super::signal::{Resource, Signal};
use super::threshold::Threshold;
use crate::node::Pressures;

/// What was measured of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// What is left: bytes, inodes or processes.
    pub available: i64,
    /// The whole.
    pub capacity: i64,
}

/// What was measured, by signal. A signal that could not be measured is left out: its thresholds are not met.
pub type Observations = BTreeMap<Signal, Observation>;

/// What is to be won back now.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortage {
    /// The threshold that is dealt with first.
    pub threshold: Threshold,
    /// All that are met and have been for their time.
    pub met: Vec<Threshold>,
}

/// What follows from a look.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    /// What the node is short of, in the eyes of the cluster.
    pub pressures: Pressures,
    /// What is to be done something about; None: nothing.
    pub shortage: Option<Shortage>,
}

/// What has to be remembered between looks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// By threshold: since when it is met without a break.
    since: Vec<Option<Duration>>,
    /// By threshold: it was met for its time at the last look, so that it holds until its minimum is won back.
    held: Vec<bool>,
    /// When a pressure (memory, disk, processes) was last seen.
    seen: [Option<Duration>; 3],
    /// The whole of each signal, as last seen.
    capacity: BTreeMap<Signal, i64>,
}

/// Too little is left.
fn is_met(threshold: &Threshold, observations: &Observations, with_minimum: bool) -> bool {
    let Some(seen) = observations.get(&threshold.signal) else { return false };
    let mut least = threshold.value.of(seen.capacity);
    if let Some(minimum) = threshold.min_reclaim.as_ref().filter(|_| with_minimum) {
        least.add(&minimum.of(seen.capacity));
    }
    least > Quantity::from_value(seen.available, threshold.signal.format())
}

/// Everything is enough, with the minimum on top that was to be won back.
pub fn relieved(thresholds: &[Threshold], observations: &Observations) -> bool {
    !thresholds.iter().any(|t| is_met(t, observations, true))
}

/// The pressure that a shortage of this resource is.
fn pressure(resource: Resource) -> usize {
    match resource {
        Resource::Memory => 0,
        Resource::EphemeralStorage | Resource::Inodes => 1,
        Resource::Pids => 2,
    }
}

impl State {
    /// The whole of a signal as last seen.
    pub fn capacity(&self, signal: Signal) -> Option<i64> {
        self.capacity.get(&signal).copied()
    }

    /// Takes in a look at the node at `now`. `transition` (`evictionPressureTransitionPeriod`): how long a pressure is shown after it was last seen.
    /// `thresholds` are the same at every call.
    pub fn look(
        &mut self,
        thresholds: &[Threshold],
        observations: &Observations,
        transition: Duration,
        now: Duration,
    ) -> Look {
        self.capacity.extend(observations.iter().map(|(signal, seen)| (*signal, seen.capacity)));
        self.since.resize(thresholds.len(), None);
        self.held.resize(thresholds.len(), false);
        let mut met = Vec::new();
        for (at, threshold) in thresholds.iter().enumerate() {
            let short = is_met(threshold, observations, self.held[at]);
            if !short {
                self.since[at] = None;
                self.held[at] = false;
                continue;
            }
            self.seen[pressure(threshold.signal.resource())] = Some(now);
            let since = *self.since[at].get_or_insert(now);
            self.held[at] = now.saturating_sub(since) >= threshold.grace;
            if self.held[at] {
                met.push(threshold.clone());
            }
        }
        let shown = |at: Option<Duration>| at.is_some_and(|at| at == now || now.saturating_sub(at) < transition);
        let [memory, disk, pid] = self.seen.map(shown);
        let shortage = met.first().cloned().map(|threshold| Shortage { threshold, met });
        Look { pressures: Pressures { memory, disk, pid }, shortage }
    }
}
