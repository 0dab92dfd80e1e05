//! Affinity, topology spread, tolerations. A static pod is not scheduled, but it is refused when these are malformed.

use std::collections::BTreeSet;

use model::api::{
    Affinity, NodeSelectorTerm, PodAffinityTerm, Toleration, TopologySpreadConstraint, WeightedPodAffinityTerm,
};
use model::k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::field::{Errors, Path};
use super::{meta, names};
use crate::Gates;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

pub(crate) fn affinity(e: &mut Errors, affinity: &Affinity, path: &Path) {
    if let Some(node) = &affinity.node_affinity {
        let path = path.child("nodeAffinity");
        if let Some(selector) = &node.required_during_scheduling_ignored_during_execution {
            let path = path.child(REQUIRED).child("nodeSelectorTerms");
            if selector.node_selector_terms.is_empty() {
                e.required(&path, "must have at least one node selector term");
            }
            for (i, term) in selector.node_selector_terms.iter().enumerate() {
                node_selector_term(e, term, true, &path.index(i));
            }
        }
        for (i, term) in node.preferred_during_scheduling_ignored_during_execution.iter().flatten().enumerate() {
            let path = path.child(PREFERRED).index(i);
            weight(e, term.weight, &path);
            node_selector_term(e, &term.preference, false, &path.child("preference"));
        }
    }
    if let Some(pods) = &affinity.pod_affinity {
        let required = pods.required_during_scheduling_ignored_during_execution.as_deref();
        let preferred = pods.preferred_during_scheduling_ignored_during_execution.as_deref();
        pod_terms(e, required, preferred, &path.child("podAffinity"));
    }
    if let Some(pods) = &affinity.pod_anti_affinity {
        let required = pods.required_during_scheduling_ignored_during_execution.as_deref();
        let preferred = pods.preferred_during_scheduling_ignored_during_execution.as_deref();
        pod_terms(e, required, preferred, &path.child("podAntiAffinity"));
    }
}

fn weight(e: &mut Errors, weight: i32, path: &Path) {
    if !(1..=100).contains(&weight) {
        e.invalid(&path.child("weight"), weight, "must be in the range 1-100");
    }
}

/// `strict`: values must be label values too.
fn node_selector_term(e: &mut Errors, term: &NodeSelectorTerm, strict: bool, path: &Path) {
    for (i, r) in term.match_expressions.iter().flatten().enumerate() {
        let path = path.child("matchExpressions").index(i);
        let (at, values) = (path.child("values"), r.values.as_deref().unwrap_or_default());
        match r.operator.as_str() {
            "In" | "NotIn" if values.is_empty() => {
                e.required(&at, "must be specified when `operator` is 'In' or 'NotIn'")
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                e.forbidden(&at, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
            }
            "Gt" | "Lt" if values.len() != 1 => {
                e.required(&at, "must be specified single value when `operator` is 'Lt' or 'Gt'")
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            other => e.invalid(&path.child("operator"), other, "not a valid selector operator"),
        }
        e.invalid_each(&path.child("key"), &r.key, names::label_key(&r.key));
        for (j, value) in values.iter().enumerate().filter(|_| strict) {
            e.invalid_each(&at.index(j), value, names::label_value(value));
        }
    }
    for (i, r) in term.match_fields.iter().flatten().enumerate() {
        let path = path.child("matchFields").index(i);
        let (at, values) = (path.child("values"), r.values.as_deref().unwrap_or_default());
        match r.operator.as_str() {
            "In" | "NotIn" if values.len() != 1 => {
                e.required(&at, "must be only one value when `operator` is 'In' or 'NotIn' for node field selector");
            }
            "In" | "NotIn" => {}
            other => e.invalid(&path.child("operator"), other, "not a valid selector operator"),
        }
        if r.key == "metadata.name" {
            for (j, value) in values.iter().enumerate() {
                e.invalid_each(&at.index(j), value, names::dns_subdomain(value));
            }
        } else {
            e.invalid(&path.child("key"), &r.key, "not a valid field selector key");
        }
    }
}

fn pod_terms(
    e: &mut Errors,
    required: Option<&[PodAffinityTerm]>,
    preferred: Option<&[WeightedPodAffinityTerm]>,
    path: &Path,
) {
    for (i, term) in required.unwrap_or_default().iter().enumerate() {
        pod_term(e, term, &path.child(REQUIRED).index(i));
    }
    for (i, term) in preferred.unwrap_or_default().iter().enumerate() {
        let path = path.child(PREFERRED).index(i);
        weight(e, term.weight, &path);
        pod_term(e, &term.pod_affinity_term, &path.child("podAffinityTerm"));
    }
}

fn pod_term(e: &mut Errors, term: &PodAffinityTerm, path: &Path) {
    meta::label_selector(e, term.label_selector.as_ref(), &path.child("labelSelector"));
    meta::label_selector(e, term.namespace_selector.as_ref(), &path.child("namespaceSelector"));
    for name in term.namespaces.iter().flatten() {
        e.invalid_each(&path.child("namespace"), name, names::dns_label(name));
    }
    let (matched, mismatched) = (term.match_label_keys.as_deref(), term.mismatch_label_keys.as_deref());
    label_keys(e, matched.unwrap_or_default(), mismatched.unwrap_or_default(), term.label_selector.as_ref(), path);
    if term.topology_key.is_empty() {
        e.required(&path.child("topologyKey"), "can not be empty");
    }
    e.invalid_each(&path.child("topologyKey"), &term.topology_key, names::label_key(&term.topology_key));
}

/// `matchLabelKeys` and `mismatchLabelKeys` (KEP-3633): names, with a selector, not twice.
fn label_keys(
    e: &mut Errors,
    matched: &[String],
    mismatched: &[String],
    selector: Option<&LabelSelector>,
    path: &Path,
) {
    for (field, keys) in [("matchLabelKeys", matched), ("mismatchLabelKeys", mismatched)] {
        let path = path.child(field);
        if !keys.is_empty() && selector.is_none() {
            e.forbidden(&path, "must not be specified when labelSelector is not set");
            continue;
        }
        for (i, key) in keys.iter().enumerate() {
            e.invalid_each(&path.index(i), key, names::label_key(key));
        }
    }
    if let Some(selector) = selector {
        // An expression repeats a key once the selector was merged from these keys.
        let mut seen: BTreeSet<&str> = selector.match_labels.iter().flatten().map(|(k, _)| k.as_str()).collect();
        for expression in selector.match_expressions.iter().flatten() {
            let key = expression.key.as_str();
            if let Some(i) = matched.iter().rposition(|k| k == key).filter(|_| seen.contains(key)) {
                e.invalid(&path.index(i), key, "exists in both matchLabelKeys and labelSelector");
            }
            seen.insert(key);
        }
    }
    for (i, key) in matched.iter().enumerate().filter(|(_, k)| mismatched.contains(k)) {
        e.invalid(&path.child("matchLabelKeys").index(i), key, "exists in both matchLabelKeys and mismatchLabelKeys");
    }
}

pub(crate) fn topology_spread(e: &mut Errors, constraints: &[TopologySpreadConstraint], path: &Path) {
    for (i, c) in constraints.iter().enumerate() {
        let path = path.index(i);
        if c.max_skew <= 0 {
            e.invalid(&path.child("maxSkew"), c.max_skew, "must be greater than zero");
        }
        if c.topology_key.is_empty() {
            e.required(&path.child("topologyKey"), "can not be empty");
        }
        e.one_of(&path.child("whenUnsatisfiable"), &c.when_unsatisfiable, &["DoNotSchedule", "ScheduleAnyway"]);
        let same = |o: &TopologySpreadConstraint| {
            o.topology_key == c.topology_key && o.when_unsatisfiable == c.when_unsatisfiable
        };
        if constraints[i + 1..].iter().any(same) {
            let pair = format!("{{{}, {}}}", c.topology_key, c.when_unsatisfiable);
            e.duplicate(&path.child("{topologyKey, whenUnsatisfiable}"), &pair);
        }
        if let Some(domains) = c.min_domains {
            let path = path.child("minDomains");
            if domains <= 0 {
                e.invalid(&path, domains, "must be greater than zero");
            }
            if c.when_unsatisfiable != "DoNotSchedule" {
                let detail =
                    format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {}", c.when_unsatisfiable);
                e.invalid(&path, domains, &detail);
            }
        }
        for (field, policy) in
            [("nodeAffinityPolicy", &c.node_affinity_policy), ("nodeTaintsPolicy", &c.node_taints_policy)]
        {
            if let Some(policy) = policy {
                e.one_of(&path.child(field), policy, &["Honor", "Ignore"]);
            }
        }
        label_keys(e, c.match_label_keys.as_deref().unwrap_or_default(), &[], c.label_selector.as_ref(), &path);
        meta::label_selector(e, c.label_selector.as_ref(), &path.child("labelSelector"));
    }
}

pub(crate) fn tolerations(e: &mut Errors, tolerations: &[Toleration], gates: &Gates, path: &Path) {
    for (i, t) in tolerations.iter().enumerate() {
        let path = path.index(i);
        let text = |s: &Option<String>| s.clone().unwrap_or_default();
        let (key, operator, value, effect) = (text(&t.key), text(&t.operator), text(&t.value), text(&t.effect));
        if !key.is_empty() {
            e.invalid_each(&path.child("key"), &key, names::label_key(&key));
        }
        let at = path.child("operator");
        if key.is_empty() && operator != "Exists" {
            e.invalid(
                &at,
                &operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
        if t.toleration_seconds.is_some() && effect != "NoExecute" {
            e.invalid(&path.child("effect"), &effect, "effect must be 'NoExecute' when `tolerationSeconds` is set");
        }
        match operator.as_str() {
            "" | "Equal" => {
                let messages = names::label_value(&value);
                if !messages.is_empty() {
                    e.invalid(&at, &value, &messages.join(";"));
                }
            }
            "Exists" if !value.is_empty() => e.invalid(&at, &value, "value must be empty when `operator` is 'Exists'"),
            "Exists" => {}
            "Lt" | "Gt" if !gates.taint_toleration_comparison_operators => {
                e.not_supported(&at, &operator, &["Equal", "Exists", "Lt", "Gt"]);
            }
            "Lt" | "Gt" => {
                // Only the plain decimal form: no sign but a minus, no leading zeros.
                if value.parse::<i64>().map(|n| n.to_string()).ok().as_ref() != Some(&value) {
                    e.invalid(&path.child("value"), &value, "must be a valid decimal integer in canonical form");
                }
            }
            _ => e.not_supported(&at, &operator, &["Equal", "Exists"]),
        }
        if !effect.is_empty() {
            e.one_of(&path.child("effect"), &effect, &["NoSchedule", "PreferNoSchedule", "NoExecute"]);
        }
    }
}
