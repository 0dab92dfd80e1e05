//! The node's status from facts and from what the API server last had, and whether the difference is worth a request.

use std::collections::BTreeMap;

use cri_api::v1;
use jiff::Timestamp;
use model::api::{
    self, ContainerImage, DaemonEndpoint, NodeDaemonEndpoints, NodeFeatures, NodeRuntimeHandler,
    NodeRuntimeHandlerFeatures, NodeStatus, NodeSwapStatus, NodeSystemInfo,
};
use model::machine::Machine;
use model::quantity::Quantity;

use super::address::{self, NodeAddresses};
use super::condition::{self, Pressures};
use super::event::NodeEvent;
use super::object::Identity;
use crate::resources::{CPU, EPHEMERAL_STORAGE, MEMORY, ResourceList};

/// What the machine is and has. Read at start; resources change when device plugins come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// All of the machine, by resource name.
    pub capacity: ResourceList,
    /// What of it is for pods, by resource name.
    pub allocatable: ResourceList,
    /// What it is.
    pub host: Machine,
}

/// What the container runtime is and has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeRuntime {
    /// `NAME://VERSION`; empty while it is not known.
    pub version: String,
    /// Its handlers, as its Status names them.
    pub handlers: Vec<v1::RuntimeHandler>,
    /// Its features; None: it does not say.
    pub features: Option<v1::RuntimeFeatures>,
    /// Images for the status, as [`super::container_images`] cut them; None while they are not known.
    pub images: Option<Vec<ContainerImage>>,
}

/// Everything that a status is made of.
#[derive(Clone, Copy, Debug)]
pub struct StatusFacts<'a> {
    /// Who the node is.
    pub identity: &'a Identity,
    /// What the machine is.
    pub machine: &'a MachineFacts,
    /// What the runtime is.
    pub runtime: &'a NodeRuntime,
    /// Addresses; None: they cannot be told now, and those of before stand.
    pub addresses: Option<&'a NodeAddresses>,
    /// Shortages.
    pub pressures: Pressures,
    /// Why the node is not ready, as [`crate::pleg::ready_message`] words it; None: it is.
    pub not_ready: Option<&'a str>,
    /// Volumes that are mounted or about to be, by unique name, sorted.
    pub volumes_in_use: &'a [String],
    /// Features that the node says it has, sorted (gate NodeDeclaredFeatures).
    pub declared_features: &'a [String],
}

/// A status and what its change means.
#[derive(Clone, Debug, PartialEq)]
pub struct Composed {
    /// The new status.
    pub status: NodeStatus,
    /// What is to be told once it is written.
    pub events: Vec<NodeEvent>,
}

/// The status that follows from the facts and the `old` one. `now` is cut to seconds, which is all that the API keeps.
pub fn compose(facts: &StatusFacts<'_>, old: &NodeStatus, now: Timestamp) -> Composed {
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let mut events = Vec::new();
    let (capacity, allocatable) = resources(facts.machine, old);
    let runtime = facts.runtime;
    let mut status = NodeStatus {
        addresses: address::compose(
            old.addresses.as_ref(),
            facts.addresses,
            &facts.identity.hostname,
            facts.identity.external_cloud,
            !facts.identity.given_ips().is_empty(),
        ),
        capacity: Some(capacity),
        allocatable: Some(allocatable),
        node_info: Some(system_info(facts, old.node_info.as_ref(), &mut events)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(facts.identity.port) }),
        }),
        images: runtime.images.clone().or_else(|| old.images.clone()).filter(|i| !i.is_empty()),
        declared_features: none_if_empty(facts.declared_features),
        volumes_in_use: none_if_empty(facts.volumes_in_use),
        conditions: old.conditions.clone(),
        // What this agent does not write.
        config: old.config.clone(),
        phase: old.phase.clone(),
        volumes_attached: old.volumes_attached.clone(),
        runtime_handlers: old.runtime_handlers.clone(),
        features: old.features.clone(),
    };
    // An answer of the runtime came, so that what it does not name is not there.
    if !runtime.version.is_empty() {
        status.runtime_handlers = handlers(&runtime.handlers);
        status.features =
            runtime.features.map(|f| NodeFeatures { supplemental_groups_policy: Some(f.supplemental_groups_policy) });
    }
    let conditions = status.conditions.get_or_insert_default();
    let node = &facts.identity.name;
    condition::update(conditions, node, facts.pressures, facts.not_ready, now, &mut events);
    Composed { status, events }
}

fn none_if_empty(list: &[String]) -> Option<Vec<String>> {
    (!list.is_empty()).then(|| list.to_vec())
}

fn handlers(list: &[v1::RuntimeHandler]) -> Option<Vec<NodeRuntimeHandler>> {
    let one = |h: &v1::RuntimeHandler| NodeRuntimeHandler {
        name: Some(h.name.clone()),
        features: h.features.map(|f| NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(f.recursive_read_only_mounts),
            user_namespaces: Some(f.user_namespaces),
        }),
    };
    (!list.is_empty()).then(|| list.iter().map(one).collect())
}

fn system_info(facts: &StatusFacts<'_>, old: Option<&NodeSystemInfo>, events: &mut Vec<NodeEvent>) -> NodeSystemInfo {
    let machine = facts.machine;
    if let Some(old) = old
        && !old.boot_id.is_empty()
        && old.boot_id != machine.host.boot_id
    {
        events.push(NodeEvent::rebooted(&facts.identity.name, &machine.host.boot_id));
    }
    let version = match (facts.runtime.version.as_str(), old) {
        ("", Some(old)) => old.container_runtime_version.clone(),
        (version, _) => version.to_owned(),
    };
    NodeSystemInfo {
        machine_id: machine.host.machine_id.clone(),
        system_uuid: machine.host.system_uuid.clone(),
        boot_id: machine.host.boot_id.clone(),
        kernel_version: machine.host.kernel_version.clone(),
        os_image: machine.host.os_image.clone(),
        container_runtime_version: version,
        kubelet_version: facts.identity.kubelet_version.clone(),
        kube_proxy_version: String::new(),
        operating_system: "linux".to_owned(),
        architecture: facts.identity.architecture.clone(),
        swap: i64::try_from(machine.host.swap)
            .ok()
            .filter(|n| *n > 0)
            .map(|capacity| NodeSwapStatus { capacity: Some(capacity) }),
    }
}

type ApiList = BTreeMap<String, api::Quantity>;

/// Capacity and allocatable. Resources of others (`example.com/dongle`) stay; all of such a resource is for pods.
fn resources(machine: &MachineFacts, old: &NodeStatus) -> (ApiList, ApiList) {
    let mut capacity = old.capacity.clone().unwrap_or_default();
    put(&mut capacity, &machine.capacity);
    let mut allocatable = old.allocatable.clone().unwrap_or_default();
    allocatable.retain(|name, _| capacity.contains_key(name));
    for (name, amount) in capacity.iter().filter(|(name, _)| !machine.capacity.contains_key(*name)) {
        allocatable.insert(name.clone(), amount.clone());
    }
    put(&mut allocatable, &machine.allocatable);
    (capacity, allocatable)
}

/// Sets these amounts. Equal ones keep their text, which others may have written in another form.
pub(super) fn put(list: &mut ApiList, amounts: &ResourceList) {
    for (name, amount) in amounts {
        let same = list.get(name).and_then(|q| Quantity::of(q).ok()).is_some_and(|q| q == *amount);
        if !same {
            list.insert(name.clone(), amount.to_api());
        }
    }
}

/// Resources that a ready node must have and this one has not, as a reason against readiness.
pub fn missing_capacity(machine: &MachineFacts, local_storage: bool) -> Option<String> {
    let wanted = [CPU, MEMORY, "pods"].into_iter().chain(local_storage.then_some(EPHEMERAL_STORAGE));
    let missing: Vec<&str> = wanted.filter(|name| !machine.capacity.contains_key(*name)).collect();
    (!missing.is_empty()).then(|| format!("missing node capacity for resources: {}", missing.join(", ")))
}

/// Whether a new status tells anything new: heartbeats and the order of conditions do not count.
pub fn changed(old: &NodeStatus, new: &NodeStatus) -> bool {
    let bare = |status: &NodeStatus| {
        let mut conditions = status.conditions.clone().unwrap_or_default();
        conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
        conditions.iter_mut().for_each(|c| c.last_heartbeat_time = None);
        conditions
    };
    if bare(old) != bare(new) {
        return true;
    }
    // Conditions are compared; the rest is compared without copying it.
    let NodeStatus {
        addresses,
        allocatable,
        capacity,
        conditions: _,
        config,
        daemon_endpoints,
        declared_features,
        features,
        images,
        node_info,
        phase,
        runtime_handlers,
        volumes_attached,
        volumes_in_use,
    } = new;
    *addresses != old.addresses
        || *allocatable != old.allocatable
        || *capacity != old.capacity
        || *config != old.config
        || *daemon_endpoints != old.daemon_endpoints
        || *declared_features != old.declared_features
        || *features != old.features
        || *images != old.images
        || *node_info != old.node_info
        || *phase != old.phase
        || *runtime_handlers != old.runtime_handlers
        || *volumes_attached != old.volumes_attached
        || *volumes_in_use != old.volumes_in_use
}
