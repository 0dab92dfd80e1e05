//! What drivers of the Container Storage Interface add to the node: the CSINode object, an annotation and labels of the Node.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use model::api::{Node, ObjectMeta, OwnerReference};

/// A node is not ready before it has a CSINode: the scheduler would not know its limits.
pub const UNINITIALIZED: &str = "CSINode is not yet initialized";

/// Volume plugins of the tree whose work a driver does; the list is that of Kubernetes 1.36.
const MIGRATED: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
                        kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";
const MIGRATED_KEY: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// Names of the node to its drivers.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";

/// What a driver says of itself on this node (NodeGetInfo).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverNode {
    /// Its name for the node.
    pub node_id: String,
    /// Where the node is: labels.
    pub topology: BTreeMap<String, String>,
    /// Most volumes on the node; None: it sets no limit.
    pub limit: Option<i32>,
}

/// Drivers by name, with what they say of the node; None: it was registered, and is gone. Drivers that are not among them are left alone: those of
/// an agent before this one, which will register with this one too.
pub type Drivers = BTreeMap<String, Option<DriverNode>>;

/// The CSINode as it is to be; None: it is so already.
pub fn csi_node(existing: Option<&CSINode>, node: &Node, drivers: &Drivers) -> Option<CSINode> {
    let name = node.metadata.name.clone().unwrap_or_default();
    let empty = || CSINode {
        metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
        spec: CSINodeSpec::default(),
    };
    let mut wanted = existing.cloned().unwrap_or_else(empty);
    wanted.metadata.annotations.get_or_insert_default().insert(MIGRATED_KEY.to_owned(), MIGRATED.to_owned());
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name,
        uid: node.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    };
    // A CSINode whose owner is a Node of before would be collected with it.
    if !wanted.metadata.owner_references.iter().flatten().any(|o| o.uid == owner.uid) {
        wanted.metadata.owner_references = Some(vec![owner]);
    }
    let list = &mut wanted.spec.drivers;
    for (name, driver) in drivers {
        let new = driver.as_ref().map(|d| entry(name, d));
        match (list.iter().position(|d| d.name == *name), new) {
            (Some(at), Some(new)) => list[at] = new,
            (Some(at), None) => drop(list.remove(at)),
            (None, Some(new)) => list.push(new),
            (None, None) => {}
        }
    }
    (existing != Some(&wanted)).then_some(wanted)
}

fn entry(name: &str, driver: &DriverNode) -> CSINodeDriver {
    let keys: Vec<String> = driver.topology.keys().cloned().collect();
    CSINodeDriver {
        name: name.to_owned(),
        node_id: driver.node_id.clone(),
        topology_keys: (!keys.is_empty()).then_some(keys),
        allocatable: driver.limit.map(|count| VolumeNodeResources { count: Some(count) }),
    }
}

/// Puts what the drivers say into the Node. A label that is there with another value stays: two drivers, or an administrator, disagree with the
/// driver, and pods may have been placed by it. Labels of drivers that are gone stay too, for their volumes may.
pub fn mark_node(node: &mut Node, drivers: &Drivers) {
    if drivers.is_empty() {
        return;
    }
    let annotations = node.metadata.annotations.get_or_insert_default();
    let there = annotations.get(NODE_IDS).and_then(|text| serde_json::from_str(text).ok());
    let mut ids: BTreeMap<String, String> = there.unwrap_or_default();
    for (name, driver) in drivers {
        match driver {
            Some(driver) => ids.insert(name.clone(), driver.node_id.clone()),
            None => ids.remove(name),
        };
    }
    if ids.is_empty() {
        annotations.remove(NODE_IDS);
    } else {
        annotations.insert(NODE_IDS.to_owned(), serde_json::to_string(&ids).unwrap_or_default());
    }
    if annotations.is_empty() {
        node.metadata.annotations = None;
    }
    for (key, value) in drivers.values().flatten().flat_map(|d| &d.topology) {
        node.metadata.labels.get_or_insert_default().entry(key.clone()).or_insert_with(|| value.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        serde_json::from_str(r#"{"metadata":{"name":"e2e","uid":"u1"}}"#).unwrap()
    }

    fn drivers() -> Drivers {
        let plain = DriverNode {
            node_id: "csi-node".into(),
            topology: [("csi.test/zone".to_owned(), "z1".to_owned())].into(),
            limit: Some(7),
        };
        let bare = DriverNode { node_id: "csi-node".into(), ..DriverNode::default() };
        [("plain.csi.test".to_owned(), Some(plain)), ("att.csi.test".to_owned(), Some(bare))].into()
    }

    /// What a Go kubelet 1.36.1 wrote with the same drivers.
    const GO: &str = r#"{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"annotations":{"storage.alpha.kubernetes.io/migrated-plugins":"kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume"},"name":"e2e","ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"e2e","uid":"u1"}]},"spec":{"drivers":[{"name":"att.csi.test","nodeID":"csi-node"},{"allocatable":{"count":7},"name":"plain.csi.test","nodeID":"csi-node","topologyKeys":["csi.test/zone"]}]}}"#;

    #[test]
    fn the_object() {
        let made = csi_node(None, &node(), &drivers()).unwrap();
        let go: serde_json::Value = serde_json::from_str(GO).unwrap();
        assert_eq!(serde_json::to_value(&made).unwrap(), go);
        assert_eq!(csi_node(Some(&made), &node(), &drivers()), None);
        assert_eq!(csi_node(Some(&made), &node(), &Drivers::new()), None, "those of an agent before are left alone");
        let gone = [("plain.csi.test".to_owned(), None)].into();
        let left = csi_node(Some(&made), &node(), &gone).unwrap();
        assert_eq!(left.spec.drivers.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["att.csi.test"]);
        let other = serde_json::from_str(r#"{"metadata":{"name":"e2e","uid":"u2"}}"#).unwrap();
        let moved = csi_node(Some(&made), &other, &Drivers::new()).unwrap();
        assert_eq!(moved.metadata.owner_references.unwrap()[0].uid, "u2");
    }

    #[test]
    fn the_node() {
        let mut marked = node();
        mark_node(&mut marked, &Drivers::new());
        assert_eq!(marked, node());
        mark_node(&mut marked, &drivers());
        let annotations = marked.metadata.annotations.clone().unwrap();
        assert_eq!(annotations[NODE_IDS], r#"{"att.csi.test":"csi-node","plain.csi.test":"csi-node"}"#);
        assert_eq!(marked.metadata.labels.clone().unwrap()["csi.test/zone"], "z1");
        marked.metadata.labels.as_mut().unwrap().insert("csi.test/zone".into(), "other".into());
        mark_node(&mut marked, &drivers());
        assert_eq!(marked.metadata.labels.clone().unwrap()["csi.test/zone"], "other");
        let gone = [("plain.csi.test".to_owned(), None), ("att.csi.test".to_owned(), None)].into();
        mark_node(&mut marked, &gone);
        assert_eq!(marked.metadata.annotations, None);
    }
}
