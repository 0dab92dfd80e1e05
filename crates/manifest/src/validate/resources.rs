//! Requests, limits and claims.

use std::collections::{BTreeMap, BTreeSet};

use model::api::{self, PodSpec, ResourceRequirements};
use model::quantity::{Format, Quantity};

use super::field::{Errors, Path};
use super::names;
use crate::resources::{self, HUGEPAGES, is_hugepages, is_native, is_overcommit_allowed, is_pod_level};

/// Whose resources.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Container,
    Pod,
}

/// Resources counted in whole numbers, besides extended ones.
const COUNTED: [&str; 9] = [
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "services.nodeports",
    "services.loadbalancers",
];

pub(crate) fn requirements(
    e: &mut Errors,
    r: &ResourceRequirements,
    owner: Owner,
    claims: &BTreeSet<&str>,
    path: &Path,
) {
    let (limits, requests) = (resources::amounts(r.limits.as_ref()), resources::amounts(r.requests.as_ref()));
    let (limit_path, request_path) = (path.child("limits"), path.child("requests"));
    for (name, amount) in &limits {
        amount_of(e, name, amount, owner, &limit_path.key(name));
    }
    for (name, amount) in &requests {
        let own = request_path.key(name);
        resource_name(e, name, owner, &own);
        value(e, name, amount, &own);
        match limits.get(name) {
            Some(limit) if amount != limit && !is_overcommit_allowed(name) => {
                e.invalid(&request_path, &amount.to_string(), &format!("must be equal to {name} limit of {limit}"));
            }
            Some(limit) if amount > limit => {
                e.invalid(
                    &request_path,
                    &amount.to_string(),
                    &format!("must be less than or equal to {name} limit of {limit}"),
                );
            }
            None if !is_overcommit_allowed(name) => {
                e.required(&limit_path, "Limit must be set for non overcommitable resources")
            }
            _ => {}
        }
        huge_page_value(e, name, amount, &own);
    }
    let names_ = || limits.keys().chain(requests.keys());
    if names_().any(|n| is_hugepages(n)) && !names_().any(|n| matches!(n.as_str(), "cpu" | "memory")) {
        e.forbidden(path, "HugePages require cpu or memory");
    }
    claim_names(e, r, claims, &path.child("claims"));
}

/// `spec.overhead`.
pub(crate) fn overhead(e: &mut Errors, list: &BTreeMap<String, api::Quantity>, path: &Path) {
    let r = ResourceRequirements { limits: Some(list.clone()), ..ResourceRequirements::default() };
    requirements(e, &r, Owner::Container, &BTreeSet::new(), path);
}

fn amount_of(e: &mut Errors, name: &str, amount: &Quantity, owner: Owner, path: &Path) {
    resource_name(e, name, owner, path);
    value(e, name, amount, path);
    huge_page_value(e, name, amount, path);
}

/// Not negative, and whole where only whole ones exist.
pub(crate) fn value(e: &mut Errors, name: &str, amount: &Quantity, path: &Path) {
    if amount.sign() < 0 {
        e.invalid(path, &amount.to_string(), "must be greater than or equal to 0");
    }
    if (COUNTED.contains(&name) || is_extended(name)) && amount.milli_value() % 1000 != 0 {
        e.invalid(path, &amount.to_string(), "must be an integer");
    }
}

fn huge_page_value(e: &mut Errors, name: &str, amount: &Quantity, path: &Path) {
    let Some(size) = name.strip_prefix(HUGEPAGES) else { return };
    let fits = Quantity::parse(size).ok().is_some_and(|size| {
        size.sign() > 0 && size.milli_value() % 1000 == 0 && amount.value().checked_rem(size.value()) == Some(0)
    });
    if !fits {
        e.invalid(path, &amount.to_string(), &format!("{amount} is not positive integer multiple of {name}"));
    }
}

fn resource_name(e: &mut Errors, name: &str, owner: Owner, path: &Path) {
    const STANDARD: [&str; 11] = [
        "cpu",
        "memory",
        "ephemeral-storage",
        "requests.cpu",
        "requests.memory",
        "requests.ephemeral-storage",
        "limits.cpu",
        "limits.memory",
        "limits.ephemeral-storage",
        "storage",
        "requests.storage",
    ];
    let messages = names::label_key(name);
    let malformed = !messages.is_empty();
    e.invalid_each(path, name, messages);
    let plain = !name.contains('/');
    let standard = STANDARD.contains(&name)
        || COUNTED.contains(&name)
        || is_hugepages(name)
        || name.starts_with("requests.hugepages-");
    let mut refused = malformed;
    if !malformed && plain && !standard {
        e.invalid(path, name, "must be a standard resource type or fully qualified");
        refused = true;
    }
    match owner {
        Owner::Pod if !refused && !is_pod_level(name) => e.not_supported(path, name, &["cpu", HUGEPAGES, "memory"]),
        Owner::Pod => {}
        Owner::Container if plain => {
            if !matches!(name, "cpu" | "memory" | "ephemeral-storage") && !is_hugepages(name) {
                e.invalid(path, name, "must be a standard resource for containers");
            }
        }
        Owner::Container => {
            if !is_native(name) && !is_extended(name) {
                e.invalid(path, name, "doesn't follow extended resource name standard");
            }
        }
    }
}

/// A resource with a domain that is not Kubernetes' own.
fn is_extended(name: &str) -> bool {
    !is_native(name) && !name.starts_with("requests.") && names::label_key(&format!("requests.{name}")).is_empty()
}

fn claim_names(e: &mut Errors, r: &ResourceRequirements, pod_claims: &BTreeSet<&str>, path: &Path) {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for (i, claim) in r.claims.iter().flatten().enumerate() {
        let (path, name) = (path.index(i), claim.name.as_str());
        if name.is_empty() {
            e.required(&path, "");
            continue;
        }
        let request = claim.request.as_deref().unwrap_or("");
        if seen.contains(name) {
            e.duplicate(&path, name);
        } else {
            let mut key = name.to_string();
            if !request.is_empty() {
                e.invalid_each(&path.child("request"), request, names::dns_label(request));
                key = format!("{name}/{request}");
            }
            if seen.contains(&key) {
                e.duplicate(&path, &key);
            } else if request.is_empty() {
                for _ in seen.iter().filter(|k| k.split_once('/').is_some_and(|(n, _)| n == name)) {
                    e.duplicate(&path, name);
                }
            }
            seen.insert(key);
        }
        if !pod_claims.contains(name) {
            let have = if pod_claims.is_empty() {
                " which is empty".to_string()
            } else {
                format!(": {}", pod_claims.iter().copied().collect::<Vec<_>>().join(", "))
            };
            e.not_found(&path, name, &format!("must be one of the names in pod.spec.resourceClaims{have}"));
        }
    }
}

/// `spec.resources` (KEP-2837): their own rules, and that the containers fit in.
pub(crate) fn pod_level(e: &mut Errors, spec: &PodSpec, claims: &BTreeSet<&str>, spec_path: &Path) {
    let Some(r) = &spec.resources else { return };
    let path = spec_path.child("resources");
    if spec.os.as_ref().is_some_and(|os| os.name == "windows") {
        return e.forbidden(&path, "may not be set for a windows pod");
    }
    if r.claims.is_some() {
        e.forbidden(&path.child("claims"), "claims may not be set for Resources at pod-level");
    }
    requirements(e, r, Owner::Pod, claims, &path);
    let (limits, requests) = (resources::amounts(r.limits.as_ref()), resources::amounts(r.requests.as_ref()));
    for (name, sum) in resources::container_requests(spec) {
        if let Some(own) = requests.get(&name).filter(|own| sum > **own) {
            let detail = format!("must be greater than or equal to aggregate container requests of {sum}");
            e.invalid(&path.child("requests").key(&name), &own.to_string(), &detail);
        }
    }
    for (name, sum) in resources::container_limits(spec).into_iter().filter(|(n, _)| is_hugepages(n)) {
        if let Some(own) = limits.get(&name).filter(|own| sum > **own) {
            let detail = format!("must be greater than or equal to aggregate container limits of {sum}");
            e.invalid(&path.child("limits").key(&name), &own.to_string(), &detail);
        }
    }
    for (i, c) in spec.containers.iter().enumerate() {
        for (name, limit) in resources::amounts(c.resources.as_ref().and_then(|r| r.limits.as_ref())) {
            if let Some(own) = limits.get(&name).filter(|own| limit > **own) {
                let path = path.child("containers").index(i).key(&name).child("limits");
                e.invalid(&path, &limit.to_string(), &format!("must be less than or equal to pod limits of {own}"));
            }
        }
    }
}

/// A divisor of a resource in the downward API.
pub(crate) fn divisor(e: &mut Errors, resource: &str, divisor: Option<&api::Quantity>, path: &Path) {
    let zero = Quantity::from_value(0, Format::DecimalSI);
    let Some(divisor) = divisor.and_then(|d| Quantity::of(d).ok()).filter(|d| *d != zero) else { return };
    let kind = resource.strip_prefix("limits.").or_else(|| resource.strip_prefix("requests.")).unwrap_or("");
    let (allowed, what): (&str, &str) = match kind {
        "cpu" => ("1m and 1", "cpu resource"),
        "memory" => ("", "memory resource"),
        "ephemeral-storage" => ("", "local ephemeral storage resource"),
        k if is_hugepages(k) => ("", "hugepages resource"),
        _ => return,
    };
    const BYTES: &str = "1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei";
    let text = divisor.to_string();
    let fits = if kind == "cpu" { matches!(text.as_str(), "1m" | "1") } else { BYTES.split(", ").any(|b| b == text) };
    if !fits {
        let allowed = if allowed.is_empty() { BYTES } else { allowed };
        e.invalid(
            &path.child("divisor"),
            resource,
            &format!("only divisor's values {allowed} are supported with the {what}"),
        );
    }
}
