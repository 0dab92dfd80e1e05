//! Patches for objects as the Go kubelet found them, against the patches that it sent (testdata/README.md of `decide::node`).

use std::net::IpAddr;

use decide::node::{
    Identity, MachineFacts, NodeAddresses, NodeRuntime, Pressures, StatusFacts, compose, initial, metadata_of_status,
    reconcile,
};
use decide::resources::resource_list;
use model::api::{Node, NodeStatus};
use model::machine::Machine;
use serde_json::{Value, json};

use super::whole_patch;

macro_rules! recorded {
    ($name:literal) => {
        serde_json::from_str::<Value>(include_str!(concat!("../../decide/src/node/testdata/", $name))).unwrap()
    };
}

fn node(value: Value) -> Node {
    serde_json::from_value(value).unwrap()
}

/// The recorded host.
struct Host {
    identity: Identity,
    machine: MachineFacts,
    runtime: NodeRuntime,
    addresses: NodeAddresses,
    not_ready: Option<&'static str>,
}

impl Host {
    /// As the Go kubelet described it when it made the node.
    fn new() -> Self {
        let status = node(recorded!("create.json")).status.unwrap();
        let info = status.node_info.unwrap();
        let ips: Vec<IpAddr> = vec!["192.0.2.2".parse().unwrap()];
        Self {
            identity: Identity {
                name: "nodea".into(),
                hostname: "nodea".into(),
                architecture: info.architecture,
                kubelet_version: info.kubelet_version,
                port: 23250,
                controller_attaches: true,
                labels: [("node.kubernetes.io/instance-type".to_owned(), "m2".to_owned())].into(),
                ..Identity::default()
            },
            machine: MachineFacts {
                capacity: resource_list(&status.capacity.unwrap()),
                allocatable: resource_list(&status.allocatable.unwrap()),
                host: Machine {
                    machine_id: info.machine_id,
                    system_uuid: info.system_uuid,
                    boot_id: info.boot_id,
                    kernel_version: info.kernel_version,
                    os_image: info.os_image,
                    swap: 0,
                },
            },
            runtime: NodeRuntime {
                version: info.container_runtime_version,
                images: status.images,
                ..NodeRuntime::default()
            },
            addresses: NodeAddresses { ips, hostname: "nodea".into() },
            not_ready: None,
        }
    }

    fn status(&self, old: &NodeStatus, now: &str) -> NodeStatus {
        let features: Vec<String> = recorded!("create.json")["status"]["declaredFeatures"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f.as_str().unwrap().to_owned())
            .collect();
        let facts = StatusFacts {
            identity: &self.identity,
            machine: &self.machine,
            runtime: &self.runtime,
            addresses: Some(&self.addresses),
            pressures: Pressures::default(),
            not_ready: self.not_ready,
            volumes_in_use: &[],
            declared_features: &features,
        };
        compose(&facts, old, now.parse().unwrap()).status
    }

    /// The patch of one update.
    fn update(&self, node: &Node, now: &str) -> Value {
        let status = self.status(node.status.as_ref().unwrap(), now);
        let mut fresh = Node { status: Some(status), ..node.clone() };
        metadata_of_status(&mut fresh, &self.identity);
        whole_patch(node, &fresh).unwrap()
    }

    /// The object that this host made a moment before.
    fn made(&self, now: &str) -> Node {
        initial(&self.identity, self.status(&NodeStatus::default(), now))
    }
}

#[test]
fn a_restart() {
    let go = recorded!("restart-patches.json");
    let host = Host::new();
    let existing = node(recorded!("restart-before.json"));
    let fixed = reconcile(&existing, &host.made("2026-11-29T23:06:05Z"), &host.identity);
    assert_eq!(whole_patch(&existing, &fixed).unwrap(), go[0]);
    assert_eq!(host.update(&fixed, "2026-11-29T23:06:05.06Z"), go[1]);
}

#[test]
fn another_boot() {
    let mut host = Host::new();
    let existing = host.made("2026-11-29T23:16:00Z");
    host.machine.host.boot_id = "11111111-2222-3333-4444-555555555555".into();
    host.machine.host.machine_id = host.machine.host.boot_id.clone();
    assert_eq!(host.update(&existing, "2026-11-29T23:16:35Z"), recorded!("rebooted-patch.json"));
}

#[test]
fn a_runtime_that_is_down_and_back() {
    let go = recorded!("runtime-down-patches.json");
    let mut host = Host::new();
    let mut node = host.made("2026-11-29T23:21:00Z");
    // go[0] is the runtime's version, unknown: this agent leaves the last one. The version comes back in go[2].
    for (reason, now, mut expected) in [
        (Some("container runtime is down"), "2026-11-29T23:21:40Z", go[1].clone()),
        (None, "2026-11-29T23:22:20Z", go[2].clone()),
    ] {
        expected["status"].as_object_mut().unwrap().remove("nodeInfo");
        host.not_ready = reason;
        assert_eq!(host.update(&node, now), expected);
        node.status = Some(host.status(node.status.as_ref().unwrap(), now));
    }
}

#[test]
fn a_given_address_that_is_no_longer_given() {
    let mut host = Host::new();
    host.identity.external_cloud = true;
    host.identity.node_ips = host.addresses.ips.clone();
    let existing = host.made("2026-11-29T23:17:34Z");
    host.identity.node_ips.clear();
    let mut patch = host.update(&existing, "2026-11-29T23:18:00Z");
    let go = recorded!("external-gone-patch.json");
    assert_eq!(patch["metadata"].take(), json!({"annotations": {"alpha.kubernetes.io/provided-node-ip": null}}));
    assert_eq!(patch["status"], go["status"]);
}
