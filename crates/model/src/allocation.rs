//! What a pod was given of the node, apart from what it asks for: in-place resize (KEP-1287; of pod-level resources KEP-5419).

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::api::{self, ResourceRequirements};
use crate::quantity::Quantity;

/// What one pod was given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodAllocation {
    /// By container name; init containers too, ephemeral ones not.
    pub containers: BTreeMap<String, ResourceRequirements>,
    /// `spec.resources`, when the pod has them.
    pub pod_level: Option<ResourceRequirements>,
}

/// Why a pod does not get the resources that it asks for (reason of the condition `PodResizePending`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingReason {
    /// There is no room now; tried again.
    Deferred,
    /// This node cannot do it; tried again only when the pod asks for something else.
    Infeasible,
}

impl PendingReason {
    /// The condition's reason.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deferred => "Deferred",
            Self::Infeasible => "Infeasible",
        }
    }
}

/// Resources that were asked for and not given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingResize {
    /// Why not.
    pub reason: PendingReason,
    /// In Go's words.
    pub message: String,
    /// `metadata.generation` of the spec that asks for them.
    pub generation: i64,
    /// Since when it waits for this reason.
    pub since: Timestamp,
}

/// How the pod's newest wish for resources stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResizeState {
    /// It was not granted.
    pub pending: Option<PendingResize>,
    /// When this agent last gave the pod other resources than it had.
    pub grant: Option<Grant>,
    /// Containers that were stopped to be started with other resources: they start again however they ended.
    pub restarting: BTreeSet<String>,
}

/// One time at which a pod was given other resources than it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Counts the pod's grants.
    pub number: u64,
    /// `metadata.generation` of the spec that asked for it; 0 when it has none.
    pub generation: i64,
}

/// True when both ask for the same, however they write it.
pub fn same_requirements(a: &ResourceRequirements, b: &ResourceRequirements) -> bool {
    let claims = |r: &ResourceRequirements| r.claims.clone().unwrap_or_default();
    same_list(a.limits.as_ref(), b.limits.as_ref())
        && same_list(a.requests.as_ref(), b.requests.as_ref())
        && claims(a) == claims(b)
}

fn same_list(a: Option<&BTreeMap<String, api::Quantity>>, b: Option<&BTreeMap<String, api::Quantity>>) -> bool {
    let empty = BTreeMap::new();
    let (a, b) = (a.unwrap_or(&empty), b.unwrap_or(&empty));
    let same = |x: &api::Quantity, y: &api::Quantity| {
        x == y || matches!((Quantity::of(x), Quantity::of(y)), (Ok(x), Ok(y)) if x == y)
    };
    a.len() == b.len() && a.iter().all(|(name, x)| b.get(name).is_some_and(|y| same(x, y)))
}
