//! Whether a pod asks for this node: node selector, required node affinity, taints.

use std::collections::BTreeMap;

use model::api::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration};
use model::pod::DesiredPod;

use super::NodeFacts;

/// True when the node matches `nodeSelector` and the required node affinity.
pub(super) fn selected(pod: &DesiredPod, node: &NodeFacts) -> bool {
    let spec = pod.spec();
    if !spec.node_selector.iter().flatten().all(|(k, v)| node.labels.get(k) == Some(v)) {
        return false;
    }
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|selector| matches_selector(selector, &node.labels, &node.name))
}

/// True when a node with these labels matches one of the selector's terms.
pub fn matches_selector(selector: &NodeSelector, labels: &BTreeMap<String, String>, name: &str) -> bool {
    selector.node_selector_terms.iter().any(|term| matches(term, labels, name))
}

/// All of a term's requirements; a term without any matches nothing.
fn matches(term: &NodeSelectorTerm, node_labels: &BTreeMap<String, String>, name: &str) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if labels.is_empty() && fields.is_empty() {
        return false;
    }
    let names = BTreeMap::from([("metadata.name".to_owned(), name.to_owned())]);
    let field = |r: &NodeSelectorRequirement| {
        // Fields know In and NotIn only, with exactly one value; anything else makes the term match nothing.
        let single = r.values.as_ref().is_some_and(|v| v.len() == 1);
        single && matches!(r.operator.as_str(), "In" | "NotIn") && holds(r, &names)
    };
    labels.iter().all(|r| holds(r, node_labels)) && fields.iter().all(field)
}

/// One requirement on a set of labels.
fn holds(r: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let values = r.values.as_deref().unwrap_or_default();
    let label = labels.get(&r.key);
    let compare = |wanted: fn(i64, i64) -> bool| {
        let [bound] = values else { return false };
        match (label.and_then(|v| v.parse().ok()), bound.parse().ok()) {
            (Some(v), Some(b)) => wanted(v, b),
            _ => false,
        }
    };
    match r.operator.as_str() {
        "In" => !values.is_empty() && label.is_some_and(|v| values.contains(v)),
        "NotIn" => !values.is_empty() && label.is_none_or(|v| !values.contains(v)),
        "Exists" => values.is_empty() && label.is_some(),
        "DoesNotExist" => values.is_empty() && label.is_none(),
        "Gt" => compare(|v, b| v > b),
        "Lt" => compare(|v, b| v < b),
        _ => false,
    }
}

/// True when the pod tolerates every taint that would drive it away; on the node only NoExecute counts.
pub(super) fn tolerated(pod: &DesiredPod, taints: &[Taint], comparison: bool) -> bool {
    taints.iter().filter(|t| t.effect == "NoExecute").all(|t| tolerates(pod, t, comparison))
}

/// True when some toleration of the pod covers this taint.
pub(super) fn tolerates(pod: &DesiredPod, taint: &Taint, comparison: bool) -> bool {
    pod.spec().tolerations.iter().flatten().any(|t| covers(t, taint, comparison))
}

fn covers(t: &Toleration, taint: &Taint, comparison: bool) -> bool {
    let unset_or = |field: &Option<String>, value: &str| field.as_deref().is_none_or(|f| f.is_empty() || f == value);
    if !unset_or(&t.effect, &taint.effect) || !unset_or(&t.key, &taint.key) {
        return false;
    }
    let (asked, has) = (t.value.as_deref().unwrap_or_default(), taint.value.as_deref().unwrap_or_default());
    let numbers = || Some((has.parse::<i64>().ok()?, asked.parse::<i64>().ok()?));
    match t.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => asked == has,
        "Exists" => true,
        "Lt" if comparison => numbers().is_some_and(|(has, asked)| has < asked),
        "Gt" if comparison => numbers().is_some_and(|(has, asked)| has > asked),
        _ => false,
    }
}
