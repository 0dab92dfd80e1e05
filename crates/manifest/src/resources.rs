//! Sums of containers' resources, and what the names of resources mean.

use std::collections::BTreeMap;

use model::api::{self, Container, EphemeralContainer, PodSpec, ResourceRequirements};
use model::quantity::{MILLI, Quantity};

/// Exact amounts by resource name.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// Prefix of huge page resources.
pub(crate) const HUGEPAGES: &str = "hugepages-";

/// `hugepages-2Mi` and the like.
pub(crate) fn is_hugepages(name: &str) -> bool {
    name.starts_with(HUGEPAGES)
}

/// Resources that `spec.resources` may have (KEP-2837).
pub(crate) fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || is_hugepages(name)
}

/// Names without a domain, or of Kubernetes' own.
pub(crate) fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// True when requests may be lower than limits.
pub(crate) fn is_overcommit_allowed(name: &str) -> bool {
    is_native(name) && !is_hugepages(name)
}

/// The list's amounts; what is no quantity is left out. One that was never set (`null`) is zero.
pub(crate) fn amounts(list: Option<&BTreeMap<String, api::Quantity>>) -> Amounts {
    let amount = |q: &api::Quantity| Quantity::parse(if q.0.is_empty() { "0" } else { q.0.trim() }).ok();
    list.into_iter().flatten().filter_map(|(k, v)| Some((k.clone(), amount(v)?))).collect()
}

/// The fields that an ephemeral container shares with an ordinary one.
pub(crate) fn as_container(e: &EphemeralContainer) -> Option<Container> {
    let mut value = serde_json::to_value(e).ok()?;
    value.as_object_mut()?.remove("targetContainerName");
    serde_json::from_value(value).ok()
}

/// What all containers together request at any moment (KEP-753): apps and sidecars, or an init container with the sidecars before it.
pub(crate) fn container_requests(spec: &PodSpec) -> Amounts {
    aggregate(spec, |r| amounts(r.requests.as_ref()))
}

/// As [`container_requests`], of limits.
pub(crate) fn container_limits(spec: &PodSpec) -> Amounts {
    aggregate(spec, |r| amounts(r.limits.as_ref()))
}

fn aggregate(spec: &PodSpec, of: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let of = |c: &Container| c.resources.as_ref().map(&of).unwrap_or_default();
    let mut total = Amounts::new();
    for c in &spec.containers {
        add(&mut total, &of(c));
    }
    let (mut sidecars, mut init) = (Amounts::new(), Amounts::new());
    for c in spec.init_containers.iter().flatten() {
        let mut own = of(c);
        if c.restart_policy.as_deref() == Some("Always") {
            add(&mut total, &own);
            add(&mut sidecars, &own);
            max(&mut init, &sidecars);
        } else {
            add(&mut own, &sidecars);
            max(&mut init, &own);
        }
    }
    max(&mut total, &init);
    total
}

fn add(list: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        match list.get_mut(name) {
            Some(sum) => sum.add(amount),
            None => {
                list.insert(name.clone(), amount.clone());
            }
        }
    }
}

fn max(list: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        if list.get(name).is_none_or(|have| amount > have) {
            list.insert(name.clone(), amount.clone());
        }
    }
}

/// Writes every quantity of the pod in its canonical text, those of resource lists rounded up to thousandths, as the API shows them.
pub(crate) fn canonicalize(spec: &mut PodSpec) {
    let mut lists: Vec<&mut BTreeMap<String, api::Quantity>> = Vec::new();
    lists.extend(spec.overhead.as_mut());
    let containers =
        spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()).map(|c| c.resources.as_mut());
    let ephemeral = spec.ephemeral_containers.iter_mut().flatten().map(|c| c.resources.as_mut());
    for r in containers.chain(ephemeral).chain([spec.resources.as_mut()]).flatten() {
        lists.extend(r.limits.as_mut());
        lists.extend(r.requests.as_mut());
    }
    for quantity in lists.into_iter().flat_map(BTreeMap::values_mut) {
        canonical(quantity, true);
    }
    let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    let env = containers
        .flat_map(|c| c.env.iter_mut().flatten())
        .filter_map(|e| e.value_from.as_mut()?.resource_field_ref.as_mut());
    for divisor in env.map(|r| r.divisor.get_or_insert_with(|| api::Quantity("0".into()))) {
        canonical(divisor, false);
    }
    for v in spec.volumes.iter_mut().flatten() {
        if let Some(limit) = v.empty_dir.as_mut().and_then(|e| e.size_limit.as_mut()) {
            canonical(limit, false);
        }
        let projected =
            v.projected.iter_mut().flat_map(|p| p.sources.iter_mut().flatten()).filter_map(|s| s.downward_api.as_mut());
        let items = projected.flat_map(|d| d.items.iter_mut().flatten());
        let items = items.chain(v.downward_api.iter_mut().flat_map(|d| d.items.iter_mut().flatten()));
        for divisor in items
            .filter_map(|i| i.resource_field_ref.as_mut())
            .map(|r| r.divisor.get_or_insert_with(|| api::Quantity("0".into())))
        {
            canonical(divisor, false);
        }
    }
}

fn canonical(quantity: &mut api::Quantity, round: bool) {
    if quantity.0.is_empty() {
        quantity.0 = "0".into();
    }
    if let Ok(mut q) = Quantity::of(quantity) {
        if round {
            q.round_up(MILLI);
        }
        *quantity = q.to_api();
    }
}
