//! Where pods come from. Each source is a task that sends the whole set it holds whenever that set changes, and the API source also single changes of it; the
//! dispatcher in [`crate::desired`] merges them.
//!
//! Every configured source sends at least one set, an empty one where there is nothing to read: until all have, nothing is removed.

pub mod api;
pub mod file;
pub mod url;

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use model::pod::{DesiredPod, PodSource, PodUid};

/// A source's whole set, newest state.
#[derive(Clone, Debug)]
pub struct SourceSet {
    /// Which source.
    pub source: PodSource,
    /// Its pods, in the order in which the source gives them; an earlier pod wins over a later one of the same name.
    pub pods: Vec<DesiredPod>,
    /// Pods of it that were taken away and put back since the last set: each ends and starts again.
    pub again: HashSet<PodUid>,
}

impl SourceSet {
    /// A set without pods that were away in between.
    pub fn new(source: PodSource, pods: Vec<DesiredPod>) -> Self {
        Self { source, pods, again: HashSet::new() }
    }
}

/// What a source has to say. Updates of one source count in the order in which they are sent.
#[derive(Clone, Debug)]
pub enum SourceUpdate {
    /// Its whole set: what is not in it is gone.
    Set(SourceSet),
    /// One pod came or changed; its source is the pod's.
    Upsert(DesiredPod),
    /// One pod is gone.
    Remove(PodSource, PodUid),
}

impl From<SourceSet> for SourceUpdate {
    fn from(set: SourceSet) -> Self {
        Self::Set(set)
    }
}

/// Remembers when each pod was first seen, so that reading a file again does not change the pod's `kubernetes.io/config.seen`.
#[derive(Debug, Default)]
struct FirstSeen(HashMap<PodUid, DesiredPod>);

impl FirstSeen {
    /// Replaces pods whose intent is unchanged by the objects of before, and forgets the rest.
    fn settle(&mut self, fresh: Vec<DesiredPod>) -> Vec<DesiredPod> {
        let pods: Vec<DesiredPod> = fresh
            .into_iter()
            .map(|pod| match self.0.get(pod.uid()) {
                Some(old) if old.same_intent(&pod) => old.clone(),
                _ => pod,
            })
            .collect();
        self.0 = pods.iter().map(|p| (p.uid().clone(), p.clone())).collect();
        pods
    }
}

/// True when both hold the same pods in the same order, by identity of the held object.
fn same_set(a: &[DesiredPod], b: &[DesiredPod]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.same_intent(y))
}

/// What a static source needs to turn bytes into pods.
#[derive(Clone, Debug)]
pub struct StaticContext {
    /// The node's name; part of static pods' names and UIDs.
    pub node_name: String,
    /// Gates that decide what is accepted.
    pub gates: manifest::Gates,
}

impl StaticContext {
    fn load(
        &self,
        bytes: &[u8],
        origin: &manifest::Origin,
        seen: Timestamp,
    ) -> Result<Vec<Result<DesiredPod, manifest::ManifestError>>, manifest::ManifestError> {
        manifest::load(bytes, origin, &self.node_name, seen, &self.gates)
    }
}
