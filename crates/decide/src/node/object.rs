//! The Node object itself: what it is registered as, and what is put right in one that is there already.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use model::api::{self, Node, NodeSpec, NodeStatus, ObjectMeta, Taint};

use super::address::{PROVIDED_NODE_IP, provided_node_ip};
use super::status::put;
use crate::resources::resource_list;

/// The attach-detach controller attaches this node's volumes.
const CONTROLLER_ATTACHES: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
/// Taint until an external cloud controller has completed the node.
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// How long a node may go on with the configMaps and secrets that it has, whole seconds: set by the controller manager, longer the more
/// nodes there are.
const TTL: &str = "node.alpha.kubernetes.io/ttl";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// The age up to which configMaps and secrets need not be read again, as the node's object says it
/// (`configMapAndSecretChangeDetectionStrategy: Cache`); None: it does not say, or not in whole seconds.
pub fn object_ttl(node: &Node) -> Option<Duration> {
    let seconds: i64 = node.metadata.annotations.as_ref()?.get(TTL)?.parse().ok()?;
    Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// The address ranges of the node's pods, as the runtime is told them (CRI NetworkConfig.pod_cidr: a list with commas); empty when nobody
/// gave the node any.
pub fn pod_cidr(node: &Node) -> String {
    node.spec.as_ref().and_then(|s| s.pod_cidrs.as_ref()).map(|all| all.join(",")).unwrap_or_default()
}

/// Labels of an existing node that are brought to what this agent would register; others of `--node-labels` only count for new nodes.
const DEFAULT_LABELS: [&str; 11] = [
    HOSTNAME,
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];

/// Who the node is and how it registers, from flags and configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    /// The object's name.
    pub name: String,
    /// `--node-labels`.
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints`.
    pub taints: Vec<Taint>,
    /// `providerID`; may be empty.
    pub provider_id: String,
    /// `--cloud-provider=external`.
    pub external_cloud: bool,
    /// `--node-ip`, also `0.0.0.0` and `::`, which only choose a family.
    pub node_ips: Vec<IpAddr>,
    /// The host's name, for the label and the address of that kind.
    pub hostname: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v1.36.1`.
    pub kubelet_version: String,
    /// Port of the agent's server.
    pub port: u16,
    /// `enableControllerAttachDetach`.
    pub controller_attaches: bool,
    /// Extended resources that a node of this name has are those of a machine that is no more (there is no device checkpoint): set to 0.
    pub reset_extended_resources: bool,
}

impl Identity {
    /// The addresses of `--node-ip` that are addresses.
    pub fn given_ips(&self) -> Vec<IpAddr> {
        self.node_ips.iter().copied().filter(|ip| !ip.is_unspecified()).collect()
    }

    fn all_labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.labels.clone();
        for (key, value) in [
            (HOSTNAME, self.hostname.as_str()),
            ("kubernetes.io/os", "linux"),
            ("kubernetes.io/arch", &self.architecture),
            ("beta.kubernetes.io/os", "linux"),
            ("beta.kubernetes.io/arch", &self.architecture),
        ] {
            labels.insert(key.to_owned(), value.to_owned());
        }
        labels
    }

    fn all_taints(&self) -> Vec<Taint> {
        let mut taints = self.taints.clone();
        if self.external_cloud && !taints.iter().any(|t| t.key == UNINITIALIZED) {
            taints.push(Taint {
                key: UNINITIALIZED.to_owned(),
                value: Some("true".to_owned()),
                effect: "NoSchedule".to_owned(),
                time_added: None,
            });
        }
        taints
    }
}

/// The object that a node registers as.
pub fn initial(identity: &Identity, status: NodeStatus) -> Node {
    let mut annotations = BTreeMap::new();
    if identity.controller_attaches {
        annotations.insert(CONTROLLER_ATTACHES.to_owned(), "true".to_owned());
    }
    annotate_ip(&mut annotations, identity);
    let taints = identity.all_taints();
    Node {
        metadata: ObjectMeta {
            name: Some(identity.name.clone()),
            labels: Some(identity.all_labels()),
            annotations: (!annotations.is_empty()).then_some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: Some(identity.provider_id.clone()).filter(|id| !id.is_empty()),
            taints: (!taints.is_empty()).then_some(taints),
            ..NodeSpec::default()
        }),
        status: Some(status),
    }
}

fn annotate_ip(annotations: &mut BTreeMap<String, String>, identity: &Identity) {
    match provided_node_ip(&identity.given_ips()).filter(|_| identity.external_cloud) {
        Some(ips) => drop(annotations.insert(PROVIDED_NODE_IP.to_owned(), ips)),
        None => drop(annotations.remove(PROVIDED_NODE_IP)),
    }
}

/// An existing object with what belongs to this agent put right: default labels, annotations, huge pages, and extended resources of a
/// machine that was replaced. Cordon, taints and everything of others stay.
pub fn reconcile(existing: &Node, wanted: &Node, identity: &Identity) -> Node {
    let mut node = existing.clone();
    let wanted_labels = wanted.metadata.labels.clone().unwrap_or_default();
    let labels = node.metadata.labels.get_or_insert_default();
    for key in DEFAULT_LABELS {
        if let Some(value) = wanted_labels.get(key) {
            match value.as_str() {
                "" => drop(labels.remove(key)),
                value => drop(labels.insert(key.to_owned(), value.to_owned())),
            }
        }
    }
    metadata_of_status(&mut node, identity);
    let annotations = node.metadata.annotations.get_or_insert_default();
    if identity.controller_attaches {
        annotations.insert(CONTROLLER_ATTACHES.to_owned(), "true".to_owned());
    } else {
        annotations.remove(CONTROLLER_ATTACHES);
    }
    if existing.metadata.annotations.is_none() && annotations.is_empty() {
        node.metadata.annotations = None;
    }
    let (Some(status), Some(fresh)) = (&mut node.status, &wanted.status) else { return node };
    for (list, fresh) in [(&mut status.capacity, &fresh.capacity), (&mut status.allocatable, &fresh.allocatable)] {
        let fresh = fresh.clone().unwrap_or_default();
        let list = list.get_or_insert_default();
        list.retain(|name, _| !is_huge_pages(name) || fresh.contains_key(name));
        put(list, &resource_list(&fresh));
        if identity.reset_extended_resources {
            for (_, amount) in list.iter_mut().filter(|(name, _)| is_extended(name) && !fresh.contains_key(*name)) {
                *amount = api::Quantity("0".to_owned());
            }
        }
    }
    node
}

/// What belongs to the addresses in the status but stands among the annotations.
pub fn metadata_of_status(node: &mut Node, identity: &Identity) {
    let had = node.metadata.annotations.is_some();
    let annotations = node.metadata.annotations.get_or_insert_default();
    annotate_ip(annotations, identity);
    if !had && annotations.is_empty() {
        node.metadata.annotations = None;
    }
}

fn is_huge_pages(resource: &str) -> bool {
    resource.starts_with("hugepages-")
}

/// Resources of a domain that is not Kubernetes' own.
fn is_extended(resource: &str) -> bool {
    resource.contains('/') && !resource.contains("kubernetes.io/") && !resource.starts_with("requests.")
}
