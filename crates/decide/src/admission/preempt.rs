//! Which pods make room for a critical one: as few and as cheap as possible, BestEffort before Burstable before Guaranteed.

use model::pod::PodUid;

use super::{Entry, Ledger, uids};
use crate::resources::QosClass;

/// What is still needed, by resource.
type Needs = Vec<(String, i64)>;
type Candidate<'a> = (&'a PodUid, &'a Entry);

impl Ledger {
    /// The pods to end so that `needed` becomes free.
    ///
    /// # Errors
    /// Go's words when not even all of them would do.
    pub(super) fn victims(&self, preemptor: &Entry, needed: &[(String, i64)]) -> Result<Vec<PodUid>, String> {
        let needed: Needs = needed.to_vec();
        let class = |qos: QosClass| -> Vec<Candidate<'_>> {
            self.pods.iter().filter(|(_, e)| e.qos == qos && preemptable(preemptor, e)).collect()
        };
        let best_effort = class(QosClass::BestEffort);
        let burstable = class(QosClass::Burstable);
        let guaranteed = class(QosClass::Guaranteed);
        let all = [best_effort.clone(), burstable.clone(), guaranteed.clone()].concat();
        let missing = remaining(&needed, &all);
        if !missing.is_empty() {
            let e = cannot(&missing);
            return Err(format!("preemption: error finding a set of pods to preempt: {e}"));
        }
        // The dearer class only for what the cheaper ones cannot give; then the cheaper ones only for what is still missing.
        let cheap = [best_effort.clone(), burstable.clone()].concat();
        let from_guaranteed = nearest(guaranteed, remaining(&needed, &cheap));
        let from_burstable =
            nearest(burstable, remaining(&needed, &[best_effort.clone(), from_guaranteed.clone()].concat()));
        let from_best_effort =
            nearest(best_effort, remaining(&needed, &[from_burstable.clone(), from_guaranteed.clone()].concat()));
        Ok(uids([from_best_effort, from_burstable, from_guaranteed].concat().into_iter().map(|(uid, _)| uid)))
    }
}

/// A critical pod displaces one that is not; otherwise the higher priority does.
fn preemptable(preemptor: &Entry, other: &Entry) -> bool {
    (preemptor.critical && !other.critical)
        || matches!((preemptor.priority, other.priority), (Some(a), Some(b)) if a > b)
}

fn cannot(missing: &Needs) -> String {
    let list: String = missing.iter().map(|(name, n)| format!("(res: {name}, q: {n}), ")).collect();
    format!("no set of running pods found to reclaim resources: [{list}]")
}

fn freed(entry: &Entry, resource: &str) -> i64 {
    if resource == "pods" { 1 } else { entry.requests.get(resource) }
}

/// What is still needed when these pods are gone.
fn remaining(needed: &Needs, gone: &[Candidate<'_>]) -> Needs {
    needed
        .iter()
        .filter_map(|(name, n)| {
            let left = gone.iter().fold(*n, |left, (_, e)| left.saturating_sub(freed(e, name)));
            (left > 0).then(|| (name.clone(), left))
        })
        .collect()
}

/// Takes the pod nearest to the need, again and again; of two equally near the one that asks for less memory, then less CPU.
fn nearest<'a>(mut pods: Vec<Candidate<'a>>, mut needed: Needs) -> Vec<Candidate<'a>> {
    let mut taken = Vec::new();
    while !needed.is_empty() {
        let better = |a: &Candidate<'_>, b: &Candidate<'_>| {
            distance(a.1, &needed)
                .total_cmp(&distance(b.1, &needed))
                .then_with(|| freed(a.1, "memory").cmp(&freed(b.1, "memory")))
                .then_with(|| freed(a.1, "cpu").cmp(&freed(b.1, "cpu")))
        };
        let Some(best) = (0..pods.len()).min_by(|&a, &b| better(&pods[a], &pods[b])) else { break };
        let pod = pods.remove(best);
        needed = remaining(&needed, &[pod]);
        taken.push(pod);
    }
    taken
}

/// How far a pod is from giving all that is needed: the squared share of each resource that it does not give.
fn distance(entry: &Entry, needed: &Needs) -> f64 {
    needed
        .iter()
        .map(|(name, n)| {
            let missing = n.saturating_sub(freed(entry, name)).max(0);
            #[allow(clippy::cast_precision_loss)]
            let share = missing as f64 / *n as f64;
            share * share
        })
        .sum()
}
