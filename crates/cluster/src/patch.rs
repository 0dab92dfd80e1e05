//! Strategic merge patches from two versions of an object: only what changed is sent, so that fields of others, and fields that this
//! build does not know, survive.
//!
//! Lists that the API merges by key (conditions by `type`, podIPs by `ip`, …) are patched entry by entry, with `$patch: delete` for gone
//! ones and `$setElementOrder` for the order; all others are replaced as a whole. Pure.

use k8s_openapi::api::core::v1::{Node, NodeStatus, PodStatus};
use serde_json::{Map, Value, json};

/// The merge key of a list field, by the path that leads to it (struct tags `patchMergeKey` of the API types).
fn merge_key(path: &[&str]) -> Option<&'static str> {
    match path {
        ["status", "conditions" | "addresses"] => Some("type"),
        ["status", "podIPs" | "hostIPs"] => Some("ip"),
        ["status", "resourceClaimStatuses"] => Some("name"),
        ["metadata", "ownerReferences"] => Some("uid"),
        _ => None,
    }
}

/// The patch that makes `new` of `old`; None when they are equal.
pub fn strategic(old: &Value, new: &Value) -> Option<Value> {
    diff(&mut Vec::new(), old, new)
}

/// The part below this field of the patch of an object, of which nothing else changes. (`json!` would copy both values once more.)
fn below(field: &str, old: &Value, new: &Value) -> Option<Value> {
    diff(&mut vec![field], old, new)
}

fn diff<'a>(path: &mut Vec<&'a str>, old: &'a Value, new: &'a Value) -> Option<Value> {
    match (old, new) {
        _ if old == new => None,
        (Value::Object(old), Value::Object(new)) => diff_maps(path, old, new),
        _ => Some(new.clone()),
    }
}

fn diff_maps<'a>(path: &mut Vec<&'a str>, old: &'a Map<String, Value>, new: &'a Map<String, Value>) -> Option<Value> {
    let mut patch = Map::new();
    for (key, before) in old {
        path.push(key);
        match new.get(key) {
            None => drop(patch.insert(key.clone(), Value::Null)),
            Some(after) => match (merge_key(path), before, after) {
                (Some(by), Value::Array(before), Value::Array(after)) => {
                    if let Some((entries, order)) = diff_keyed(by, before, after) {
                        if let Some(order) = order {
                            patch.insert(format!("$setElementOrder/{key}"), order);
                        }
                        if !entries.is_empty() {
                            patch.insert(key.clone(), entries.into());
                        }
                    }
                }
                _ => {
                    if let Some(changed) = diff(path, before, after) {
                        patch.insert(key.clone(), changed);
                    }
                }
            },
        }
        path.pop();
    }
    for (key, after) in new.iter().filter(|(key, _)| !old.contains_key(*key)) {
        patch.insert(key.clone(), after.clone());
    }
    if patch.is_empty() { None } else { Some(patch.into()) }
}

/// Entries to send and, when there is an order to keep, the order; None when the lists are equal.
fn diff_keyed(by: &str, old: &[Value], new: &[Value]) -> Option<(Vec<Value>, Option<Value>)> {
    if old == new {
        return None;
    }
    let mut entries = Vec::new();
    for entry in new {
        match old.iter().find(|o| o.get(by) == entry.get(by)) {
            None => entries.push(entry.clone()),
            Some(before) => {
                if let Some(Value::Object(mut changed)) = diff(&mut Vec::new(), before, entry) {
                    changed.insert(by.to_owned(), entry.get(by).cloned().unwrap_or_default());
                    entries.push(changed.into());
                }
            }
        }
    }
    for gone in old.iter().filter(|o| !new.iter().any(|n| n.get(by) == o.get(by))) {
        entries.push(json!({"$patch": "delete", by: gone.get(by)}));
    }
    let order: Vec<Value> = new.iter().map(|n| json!({by: n.get(by)})).collect();
    Some((entries, (!order.is_empty()).then(|| order.into())))
}

fn encoded(value: &impl serde::Serialize) -> Value {
    // API types always encode; an impossible failure would only mean no patch.
    serde_json::to_value(value).unwrap_or_default()
}

/// The patch of a pod's `/status`, carrying its uid, so that a pod of the same name made meanwhile is not touched; None when nothing
/// changed.
pub fn pod_status(uid: &str, old: &PodStatus, new: &PodStatus) -> Option<Value> {
    // At every second look: the watch tells of each patch again.
    if old == new {
        return None;
    }
    let status = below("status", &encoded(old), &encoded(new))?;
    Some(Value::Object(Map::from_iter([("status".to_owned(), status), ("metadata".to_owned(), json!({"uid": uid}))])))
}

/// The patch of a node's `/status`; None when nothing changed. Addresses are replaced as a whole when they change: two of one type are
/// allowed, although the API merges them by type.
pub fn node_status(old: &NodeStatus, new: &NodeStatus) -> Option<Value> {
    let mut status = below("status", &encoded(old), &encoded(new))?;
    if old.addresses != new.addresses
        && let Some(status) = status.as_object_mut()
    {
        status.remove("$setElementOrder/addresses");
        let mut addresses = vec![json!({"$patch": "replace"})];
        addresses.extend(new.addresses.iter().flatten().map(encoded));
        status.insert("addresses".to_owned(), addresses.into());
    }
    Some(Value::Object(Map::from_iter([("status".to_owned(), status)])))
}

/// The patch of a node's labels, annotations and spec; None when nothing changed.
pub fn node(old: &Node, new: &Node) -> Option<Value> {
    let part = |n: &Node| {
        json!({
            "metadata": {"labels": n.metadata.labels, "annotations": n.metadata.annotations},
            "spec": n.spec.as_ref().map(encoded).unwrap_or(json!({})),
        })
    };
    let strip = |mut v: Value| {
        if let Some(meta) = v["metadata"].as_object_mut() {
            meta.retain(|_, v| !v.is_null());
        }
        v
    };
    strategic(&strip(part(old)), &strip(part(new)))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeAddress, PodCondition, PodIP};

    use super::*;

    fn condition(kind: &str, status: &str) -> PodCondition {
        PodCondition { type_: kind.into(), status: status.into(), ..PodCondition::default() }
    }

    #[test]
    fn nothing_changed_is_no_patch() {
        let status = PodStatus { conditions: Some(vec![condition("Ready", "True")]), ..PodStatus::default() };
        assert_eq!(pod_status("u", &status, &status), None);
    }

    #[test]
    fn only_the_changed_condition_goes_and_foreign_ones_stay() {
        let old = PodStatus {
            phase: Some("Pending".into()),
            reason: Some("Why".into()),
            conditions: Some(vec![condition("example.com/gate", "True"), condition("Ready", "False")]),
            ..PodStatus::default()
        };
        let mut new = old.clone();
        new.phase = Some("Running".into());
        new.reason = None;
        new.conditions.as_mut().unwrap()[1].status = "True".into();
        assert_eq!(
            pod_status("u1", &old, &new).unwrap(),
            json!({
                "metadata": {"uid": "u1"},
                "status": {
                    "phase": "Running",
                    "reason": null,
                    "$setElementOrder/conditions": [{"type": "example.com/gate"}, {"type": "Ready"}],
                    "conditions": [{"status": "True", "type": "Ready"}],
                }
            })
        );
    }

    #[test]
    fn an_address_that_goes_is_deleted_by_its_key() {
        let ips = |list: &[&str]| PodStatus {
            pod_ips: Some(list.iter().map(|ip| PodIP { ip: (*ip).to_owned() }).collect()),
            ..PodStatus::default()
        };
        assert_eq!(
            pod_status("u", &ips(&["10.0.0.1"]), &ips(&["10.0.0.2"])).unwrap()["status"],
            json!({
                "$setElementOrder/podIPs": [{"ip": "10.0.0.2"}],
                "podIPs": [{"ip": "10.0.0.2"}, {"$patch": "delete", "ip": "10.0.0.1"}],
            })
        );
    }

    #[test]
    fn lists_without_a_key_are_replaced() {
        let old = json!({"status": {"containerStatuses": [{"name": "a", "x": 1}, {"name": "b"}]}});
        let new = json!({"status": {"containerStatuses": [{"name": "a", "x": 2}]}});
        assert_eq!(strategic(&old, &new).unwrap(), json!({"status": {"containerStatuses": [{"name": "a", "x": 2}]}}));
    }

    #[test]
    fn two_node_addresses_of_one_type_survive() {
        let address = |kind: &str, a: &str| NodeAddress { type_: kind.into(), address: a.into() };
        let old = NodeStatus { addresses: Some(vec![address("InternalIP", "10.0.0.1")]), ..NodeStatus::default() };
        let new = NodeStatus {
            addresses: Some(vec![address("InternalIP", "10.0.0.1"), address("InternalIP", "fd00::1")]),
            ..NodeStatus::default()
        };
        assert_eq!(
            node_status(&old, &new).unwrap(),
            json!({"status": {"addresses": [
                {"$patch": "replace"},
                {"type": "InternalIP", "address": "10.0.0.1"},
                {"type": "InternalIP", "address": "fd00::1"},
            ]}})
        );
    }

    #[test]
    fn node_labels_are_patched_one_by_one() {
        let node_of = |labels: &[(&str, &str)]| {
            let mut node = Node::default();
            node.metadata.labels = Some(labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect());
            node
        };
        assert_eq!(
            node(&node_of(&[("a", "1"), ("b", "2")]), &node_of(&[("b", "3"), ("c", "4")])).unwrap(),
            json!({"metadata": {"labels": {"a": null, "b": "3", "c": "4"}}})
        );
        assert_eq!(node(&node_of(&[]), &node_of(&[])), None);
    }
}
