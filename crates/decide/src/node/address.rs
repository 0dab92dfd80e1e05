//! The addresses that the node's status lists.

use std::net::IpAddr;

use model::api::NodeAddress;

/// Annotation by which an external cloud controller learns of `--node-ip`.
pub const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

/// The node's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// Internal addresses, main one first: those of `--node-ip`, else the one that was found.
    pub ips: Vec<IpAddr>,
    /// The host's name (`--hostname-override` or the kernel's).
    pub hostname: String,
}

impl NodeAddresses {
    fn list(&self) -> Vec<NodeAddress> {
        let entry = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
        let ips = self.ips.iter().map(|ip| entry("InternalIP", ip.to_string()));
        ips.chain([entry("Hostname", self.hostname.clone())]).collect()
    }
}

/// The value of [`PROVIDED_NODE_IP`] for the addresses given by `--node-ip`: joined by commas; None without any.
pub fn provided_node_ip(given: &[IpAddr]) -> Option<String> {
    (!given.is_empty()).then(|| given.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
}

/// The new list. With an external cloud provider (`external`) the cloud's list stands once there is one; before it, only the name and
/// addresses that were `given` may be told. `addresses` is None while they cannot be told.
pub(super) fn compose(
    old: Option<&Vec<NodeAddress>>,
    addresses: Option<&NodeAddresses>,
    hostname: &str,
    external: bool,
    given: bool,
) -> Option<Vec<NodeAddress>> {
    if external && old.is_some_and(|list| !list.is_empty()) {
        return old.cloned();
    }
    if external && !given {
        return Some(NodeAddresses { ips: Vec::new(), hostname: hostname.to_owned() }.list());
    }
    match addresses {
        Some(addresses) if !addresses.ips.is_empty() => Some(addresses.list()),
        _ => old.cloned(),
    }
}
