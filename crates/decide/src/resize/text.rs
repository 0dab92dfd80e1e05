//! How a resize is told: the events' messages, and what was asked for in the words of the metrics.

use std::collections::BTreeMap;

use model::api::{Quantity as ApiQuantity, ResourceRequirements};
use model::pod::{ContainerKind, DesiredPod};
use model::quantity::Quantity;
use serde::Serialize;

use super::resizable;
use crate::resources::{CPU, MEMORY, ResourceList, optional_list};

/// `Pod resize started: {"containers":[{"name":"c","resources":{…}}],"generation":2}`; `error` is what failed or is missing.
pub fn message(what: &str, pod: &DesiredPod, generation: i64, error: &str) -> String {
    let list = |init: bool| -> Vec<Container> {
        pod.containers()
            .filter(|c| c.kind != ContainerKind::Ephemeral && (c.kind != ContainerKind::App) == init)
            .map(|c| Container { name: c.spec.name.clone(), resources: resources(c.spec.resources.as_ref()) })
            .collect()
    };
    let summary = Summary { init_containers: list(true), containers: list(false), generation, error };
    match serde_json::to_string(&summary) {
        // These characters occur inside strings only.
        Ok(json) => {
            let json = json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
            format!("Pod resize {what}: {json}")
        }
        Err(_) => format!("Pod resize {what}"),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<Container>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    containers: Vec<Container>,
    generation: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

#[derive(Serialize)]
struct Container {
    name: String,
    resources: Resources,
}

#[derive(Serialize)]
struct Resources {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    limits: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    requests: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    claims: Vec<Claim>,
}

#[derive(Serialize)]
struct Claim {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<String>,
}

fn resources(r: Option<&ResourceRequirements>) -> Resources {
    let list = |list: Option<&BTreeMap<String, ApiQuantity>>| {
        let text = |q: &ApiQuantity| Quantity::of(q).map_or_else(|_| q.0.clone(), |q| q.to_string());
        list.into_iter().flatten().map(|(name, q)| (name.clone(), text(q))).collect()
    };
    let claims = r.and_then(|r| r.claims.as_ref()).into_iter().flatten();
    Resources {
        limits: list(r.and_then(|r| r.limits.as_ref())),
        requests: list(r.and_then(|r| r.requests.as_ref())),
        claims: claims.map(|c| Claim { name: c.name.clone(), request: c.request.clone() }).collect(),
    }
}

/// One change that a new spec asks for, as labels of `kubelet_container_requested_resizes_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// `cpu`, `memory`.
    pub resource: &'static str,
    /// `requests`, `limits`.
    pub requirement: &'static str,
    /// `add`, `remove`, `increase`, `decrease`.
    pub operation: &'static str,
}

/// What the newer form of a pod asks for that the one before did not, container by container.
pub fn operations(before: &DesiredPod, now: &DesiredPod, init_containers: bool) -> Vec<Operation> {
    let mut out = Vec::new();
    for old in before.containers().filter(|c| resizable(c.kind, init_containers)) {
        let Some(new) = now.container(&old.spec.name).filter(|c| c.kind == old.kind) else { continue };
        let lists = |r: Option<&ResourceRequirements>| -> [ResourceList; 2] {
            [optional_list(r.and_then(|r| r.requests.as_ref())), optional_list(r.and_then(|r| r.limits.as_ref()))]
        };
        let (old, new) = (lists(old.spec.resources.as_ref()), lists(new.spec.resources.as_ref()));
        for (i, requirement) in ["requests", "limits"].into_iter().enumerate() {
            for resource in [CPU, MEMORY] {
                let amount = |list: &ResourceList| list.get(resource).filter(|q| !q.is_zero()).cloned();
                let operation = match (amount(&old[i]), amount(&new[i])) {
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (Some(old), Some(new)) if new > old => "increase",
                    (Some(old), Some(new)) if new < old => "decrease",
                    _ => continue,
                };
                out.push(Operation { resource, requirement, operation });
            }
        }
    }
    out
}
