//! Eviction: when the node is short of something, what is done about it, and which pod goes.
//!
//! ```text
//!   configuration ─▶ thresholds ─┐
//!   the node's figures ──────────┼─▶ State::look ─▶ pressures (conditions, admission)
//!                                │       └────────▶ what to win back ─▶ images and containers first
//!   pods and their figures ──────┴────────────────────────────────────▶ rank ─▶ one pod, its grace and its words
//! ```
//!
//! After <https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/>. Times are those of a clock that never jumps, counted
//! from an arbitrary moment.

mod limits;
mod message;
mod rank;
mod signal;
mod state;
mod threshold;

#[cfg(test)]
mod tests;

pub use limits::{LocalLimits, LocalUsage, OverLimit};
pub use message::{Words, reclaiming, words};
pub use rank::{ContainerUsage, PodUsage, Ranked, Usage, grace, rank};
pub use signal::{Disks, Reclaim, Resource, Signal};
pub use state::{Look, Observation, Observations, Shortage, State, relieved};
pub use threshold::{Settings, Threshold, ThresholdError, Value, thresholds};

/// Reason of an evicted pod's status and event.
pub const REASON: &str = "Evicted";
/// Reason of the condition DisruptionTarget of a pod that the node ended.
pub const TERMINATION_BY_KUBELET: &str = "TerminationByKubelet";
