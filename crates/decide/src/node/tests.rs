//! Composition against what the Go kubelet wrote on a real host (testdata/README.md says how).

use std::net::IpAddr;

use cri_api::v1;
use jiff::Timestamp;
use model::api::{Node, NodeCondition, NodeStatus, Taint, Time};
use model::machine::Machine;
use model::quantity::Quantity;
use serde_json::{Value, json};

use super::*;
use crate::resources::ResourceList;

const CREATE: &str = include_str!("testdata/create.json");
const VARIANTS: &str = include_str!("testdata/create-variants.json");
const CONTAINERD2: &str = include_str!("testdata/create-containerd2.json");
const RESTART: &str = include_str!("testdata/restart-before.json");

fn go(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn node_of(value: Value) -> Node {
    serde_json::from_value(value).unwrap()
}

fn list(items: &[(&str, &str)]) -> ResourceList {
    items.iter().map(|(n, q)| ((*n).to_owned(), Quantity::parse(q).unwrap())).collect()
}

fn machine() -> MachineFacts {
    let huge = [("hugepages-1Gi", "0"), ("hugepages-2Mi", "0"), ("pods", "110")];
    let with = |items: &[(&str, &str)]| list(&[items, &huge].concat());
    MachineFacts {
        capacity: with(&[("cpu", "2"), ("ephemeral-storage", "264212084Ki"), ("memory", "24684092Ki")]),
        allocatable: with(&[("cpu", "1900m"), ("ephemeral-storage", "243497856212"), ("memory", "24479292Ki")]),
        host: Machine {
            machine_id: "3d1219c7c4c5404aaa1f6d2a48adfda4".into(),
            system_uuid: "3d1219c7c4c5404aaa1f6d2a48adfda4".into(),
            boot_id: "894922fa-81fb-4427-9bcc-a9f3f0908aec".into(),
            kernel_version: "6.18.44-fc-v657".into(),
            os_image: "Debian GNU/Linux 12 (bookworm)".into(),
            swap: 0,
        },
    }
}

fn image(id: &str, names: &[&str], size: u64) -> v1::Image {
    v1::Image {
        id: id.into(),
        repo_tags: names.iter().map(|n| (*n).to_owned()).collect(),
        size,
        ..v1::Image::default()
    }
}

fn runtime() -> NodeRuntime {
    let images = vec![
        image("sha256:cc", &["lab.test/busybox:2"], 2_935_482),
        image("sha256:a5", &["lab.test/pause:1"], 304_031),
        image("sha256:fa", &["lab.test/busybox:latest"], 2_935_487),
        image("sha256:e4", &["lab.test/busybox:1"], 2_935_482),
        image("sha256:94", &["lab.test/nonroot:1"], 2_935_498),
    ];
    NodeRuntime {
        version: "containerd://1.6.20".into(),
        images: Some(container_images(images, 50)),
        ..NodeRuntime::default()
    }
}

fn identity() -> Identity {
    Identity {
        name: "nodea".into(),
        hostname: "nodea".into(),
        architecture: "amd64".into(),
        kubelet_version: "v1.36.1".into(),
        port: 23250,
        controller_attaches: true,
        ..Identity::default()
    }
}

fn ips(text: &str) -> Vec<IpAddr> {
    text.split(',').filter(|t| !t.is_empty()).map(|ip| ip.parse().unwrap()).collect()
}

fn addresses(found: &str) -> NodeAddresses {
    NodeAddresses { ips: ips(found), hostname: "nodea".into() }
}

const FEATURES: [&str; 4] = [
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];

/// What is composed, from mostly the recorded host's facts.
struct Facts {
    identity: Identity,
    machine: MachineFacts,
    runtime: NodeRuntime,
    addresses: Option<NodeAddresses>,
    pressures: Pressures,
    not_ready: Option<&'static str>,
    volumes: Vec<String>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            identity: identity(),
            machine: machine(),
            runtime: runtime(),
            addresses: Some(addresses("192.0.2.2")),
            pressures: Pressures::default(),
            not_ready: None,
            volumes: Vec::new(),
        }
    }
}

impl Facts {
    fn compose(&self, old: &NodeStatus, now: Timestamp) -> Composed {
        let features: Vec<String> = FEATURES.iter().map(|f| (*f).to_owned()).collect();
        let facts = StatusFacts {
            identity: &self.identity,
            machine: &self.machine,
            runtime: &self.runtime,
            addresses: self.addresses.as_ref(),
            pressures: self.pressures,
            not_ready: self.not_ready,
            volumes_in_use: &self.volumes,
            declared_features: &features,
        };
        compose(&facts, old, now)
    }

    fn first(&self) -> Composed {
        self.compose(&NodeStatus::default(), at("2026-11-29T23:04:27.9Z"))
    }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn reasons(composed: &Composed) -> Vec<&str> {
    composed.events.iter().map(|e| e.reason).collect()
}

fn condition<'a>(status: &'a NodeStatus, kind: &str) -> &'a NodeCondition {
    status.conditions.as_ref().unwrap().iter().find(|c| c.type_ == kind).unwrap()
}

#[test]
fn a_new_node_is_what_go_creates() {
    let facts = Facts {
        identity: Identity {
            labels: [("example.com/zone", "z1"), ("node.kubernetes.io/instance-type", "m1")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            taints: vec![Taint {
                key: "example.com/t".into(),
                value: Some("v".into()),
                effect: "NoSchedule".into(),
                time_added: None,
            }],
            ..identity()
        },
        not_ready: Some("CSINode is not yet initialized"),
        ..Facts::default()
    };
    let composed = facts.first();
    assert_eq!(reasons(&composed), ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"]);
    assert_eq!(composed.events[0].message, "Node nodea status is now: NodeHasSufficientMemory");
    let node = initial(&facts.identity, composed.status);
    assert_eq!(serde_json::to_value(&node).unwrap(), go(CREATE));
}

#[test]
fn addresses_taints_and_provider_as_go_registers_them() {
    let all = go(VARIANTS);
    for (name, given, found, external) in [
        ("dual", "192.0.2.2,fd00::2", "192.0.2.2,fd00::2", false),
        ("dual-v6-first", "fd00::2,192.0.2.2", "fd00::2,192.0.2.2", false),
        ("v6-preferred", "::", "fd00::2", false),
        ("not-here", "10.1.2.3", "", false),
        ("external", "", "", true),
        ("external-given", "192.0.2.2", "192.0.2.2", true),
        ("provider", "0.0.0.0", "192.0.2.2", false),
    ] {
        let facts = Facts {
            identity: Identity {
                node_ips: ips(given),
                external_cloud: external,
                provider_id: if name == "provider" { "lab://1".into() } else { String::new() },
                ..identity()
            },
            addresses: (!found.is_empty()).then(|| addresses(found)),
            ..Facts::default()
        };
        let node = serde_json::to_value(initial(&facts.identity, facts.first().status)).unwrap();
        assert_eq!(
            json!({"metadata": node["metadata"], "spec": node["spec"], "addresses": node["status"]["addresses"]}),
            all[name],
            "{name}"
        );
    }
}

#[test]
fn handlers_and_features_of_a_newer_runtime() {
    let go = go(CONTAINERD2);
    let on = v1::RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: false };
    let facts = Facts {
        runtime: NodeRuntime {
            version: runtime_version("containerd", "v2.2.9"),
            handlers: ["", "runc"].map(|name| v1::RuntimeHandler { name: name.into(), features: Some(on) }).into(),
            features: Some(v1::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
            images: None,
        },
        ..Facts::default()
    };
    let status = serde_json::to_value(facts.first().status).unwrap();
    for key in ["runtimeHandlers", "features", "nodeInfo"] {
        assert_eq!(status[key], go[key], "{key}");
    }
}

#[test]
fn an_existing_node_is_put_right_and_others_things_stay() {
    let existing = node_of(go(RESTART));
    let mut facts = Facts {
        identity: Identity {
            labels: [("node.kubernetes.io/instance-type".to_owned(), "m2".to_owned())].into(),
            taints: vec![Taint { key: "example.com/t2".into(), effect: "NoSchedule".into(), ..Taint::default() }],
            ..identity()
        },
        ..Facts::default()
    };
    let wanted = initial(&facts.identity, facts.first().status);
    let fixed = serde_json::to_value(reconcile(&existing, &wanted, &facts.identity)).unwrap();
    let mut expected = go(RESTART);
    // As the Go kubelet's patch: {"metadata": {"labels": {…}}, "status": {"allocatable": {"hugepages-64Ki": null}, …}}.
    expected["metadata"]["labels"]["kubernetes.io/os"] = "linux".into();
    expected["metadata"]["labels"]["node.kubernetes.io/instance-type"] = "m2".into();
    for list in ["capacity", "allocatable"] {
        expected["status"][list].as_object_mut().unwrap().remove("hugepages-64Ki");
    }
    assert_eq!(fixed, expected);

    facts.identity.reset_extended_resources = true;
    facts.identity.controller_attaches = false;
    let fixed = reconcile(&existing, &wanted, &facts.identity);
    let status = fixed.status.unwrap();
    assert_eq!(status.capacity.unwrap()["example.com/foo"].0, "0");
    assert_eq!(status.allocatable.unwrap()["example.com/foo"].0, "0");
    assert_eq!(fixed.metadata.annotations.unwrap().keys().collect::<Vec<_>>(), ["foreign.io/x"]);
    assert_eq!(fixed.spec.unwrap().unschedulable, Some(true));
}

#[test]
fn what_is_as_it_should_be_stays_the_same() {
    let facts = Facts::default();
    let node = initial(&facts.identity, facts.first().status);
    assert_eq!(reconcile(&node, &node, &facts.identity), node);
    let later = facts.compose(node.status.as_ref().unwrap(), at("2026-11-29T23:05:00Z"));
    assert!(later.events.is_empty());
    assert!(!changed(node.status.as_ref().unwrap(), &later.status));
    assert_eq!(condition(&later.status, "Ready").last_heartbeat_time, Some(Time(at("2026-11-29T23:05:00Z"))));
    assert_eq!(condition(&later.status, "Ready").last_transition_time, Some(Time(at("2026-11-29T23:04:27Z"))));
}

#[test]
fn resources_of_others_and_their_way_of_writing_amounts_stay() {
    let mut old = Facts::default().first().status;
    for list in [old.capacity.as_mut().unwrap(), old.allocatable.as_mut().unwrap()] {
        list.insert("example.com/dongle".into(), model::api::Quantity("3".into()));
    }
    old.capacity.as_mut().unwrap().insert("cpu".into(), model::api::Quantity("2000m".into()));
    old.allocatable.as_mut().unwrap().insert("gone.example.com/x".into(), model::api::Quantity("1".into()));
    let new = Facts::default().compose(&old, at("2026-11-29T23:05:00Z")).status;
    let text = |list: &Option<std::collections::BTreeMap<String, model::api::Quantity>>, name: &str| {
        list.as_ref().unwrap().get(name).map(|q| q.0.clone())
    };
    assert_eq!(text(&new.capacity, "cpu").as_deref(), Some("2000m"));
    assert_eq!(text(&new.allocatable, "example.com/dongle").as_deref(), Some("3"));
    assert_eq!(text(&new.allocatable, "gone.example.com/x"), None);
}

#[test]
fn conditions_and_their_events() {
    let first = Facts::default().first().status;
    let bad = Facts {
        pressures: Pressures { memory: true, disk: true, pid: true },
        not_ready: Some("container runtime is down"),
        ..Facts::default()
    };
    let down = bad.compose(&first, at("2026-11-29T23:06:00Z"));
    assert_eq!(
        reasons(&down),
        ["NodeHasInsufficientMemory", "NodeHasDiskPressure", "NodeHasInsufficientPID", "NodeNotReady"]
    );
    assert!(changed(&first, &down.status));
    for (kind, status, reason, message) in [
        ("MemoryPressure", "True", "KubeletHasInsufficientMemory", "kubelet has insufficient memory available"),
        ("DiskPressure", "True", "KubeletHasDiskPressure", "kubelet has disk pressure"),
        ("PIDPressure", "True", "KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
        ("Ready", "False", "KubeletNotReady", "container runtime is down"),
    ] {
        let c = condition(&down.status, kind);
        assert_eq!(
            (c.status.as_str(), c.reason.as_deref(), c.message.as_deref()),
            (status, Some(reason), Some(message))
        );
        assert_eq!(c.last_transition_time, Some(Time(at("2026-11-29T23:06:00Z"))));
    }
    assert!(!is_ready(down.status.conditions.as_ref()));

    // Another reason is a change, but no transition.
    let other = Facts { not_ready: Some("network state unknown"), ..bad };
    let still = other.compose(&down.status, at("2026-11-29T23:07:00Z"));
    assert!(still.events.is_empty() && changed(&down.status, &still.status));
    assert_eq!(condition(&still.status, "Ready").last_transition_time, Some(Time(at("2026-11-29T23:06:00Z"))));

    // The node controller's word is overwritten, and told.
    let mut silent = first.clone();
    for c in silent.conditions.as_mut().unwrap() {
        c.status = "Unknown".into();
        c.reason = Some("NodeStatusUnknown".into());
    }
    let back = Facts::default().compose(&silent, at("2026-11-29T23:08:00Z"));
    assert_eq!(
        reasons(&back),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]
    );
    assert!(is_ready(back.status.conditions.as_ref()));
}

#[test]
fn conditions_of_others_keep_their_place() {
    let mut old = NodeStatus::default();
    let foreign = NodeCondition { type_: "Foreign".into(), status: "True".into(), ..NodeCondition::default() };
    old.conditions = Some(vec![foreign.clone()]);
    let new = Facts::default().compose(&old, at("2026-11-29T23:05:00Z")).status;
    let conditions = new.conditions.unwrap();
    assert_eq!(conditions[0], foreign);
    let order: Vec<&str> = conditions.iter().map(|c| c.type_.as_str()).collect();
    assert_eq!(order, ["Foreign", "MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]);
}

#[test]
fn heartbeats_and_order_are_no_change() {
    let old = Facts::default().first().status;
    let mut new = old.clone();
    let conditions = new.conditions.as_mut().unwrap();
    conditions.reverse();
    conditions.iter_mut().for_each(|c| c.last_heartbeat_time = None);
    assert!(!changed(&old, &new));
    new.conditions.as_mut().unwrap()[0].last_transition_time = None;
    assert!(changed(&old, &new));
    type Edit = fn(&mut NodeStatus);
    let edits: [(&str, Edit); 13] = [
        ("addresses", |s| s.addresses = None),
        ("allocatable", |s| s.allocatable = None),
        ("capacity", |s| s.capacity = None),
        ("config", |s| s.config = Some(Default::default())),
        ("daemonEndpoints", |s| s.daemon_endpoints = None),
        ("declaredFeatures", |s| s.declared_features = None),
        ("features", |s| s.features = Some(Default::default())),
        ("images", |s| s.images = None),
        ("nodeInfo", |s| s.node_info = None),
        ("phase", |s| s.phase = Some("Running".into())),
        ("runtimeHandlers", |s| s.runtime_handlers = Some(vec![])),
        ("volumesAttached", |s| s.volumes_attached = Some(vec![])),
        ("volumesInUse", |s| s.volumes_in_use = Some(vec!["v".into()])),
    ];
    for (name, edit) in edits {
        let mut new = old.clone();
        edit(&mut new);
        assert!(changed(&old, &new), "{name}");
    }
}

#[test]
fn a_reboot_is_told_once() {
    let old = Facts::default().first().status;
    let facts = Facts {
        machine: MachineFacts {
            host: Machine { boot_id: "11111111-2222-3333-4444-555555555555".into(), ..machine().host },
            ..machine()
        },
        ..Facts::default()
    };
    let new = facts.compose(&old, at("2026-11-29T23:05:00Z"));
    assert_eq!(
        new.events,
        [NodeEvent {
            kind: EventKind::Warning,
            reason: "Rebooted",
            message: "Node nodea has been rebooted, boot id: 11111111-2222-3333-4444-555555555555".into(),
        }]
    );
    assert!(facts.compose(&new.status, at("2026-11-29T23:05:10Z")).events.is_empty());
}

#[test]
fn a_cloud_that_knows_the_addresses_is_right() {
    let mut old = Facts::default().first().status;
    let theirs = vec![model::api::NodeAddress { type_: "ExternalIP".into(), address: "9.9.9.9".into() }];
    old.addresses = Some(theirs.clone());
    for given in ["", "192.0.2.2"] {
        let facts = Facts {
            identity: Identity { external_cloud: true, node_ips: ips(given), ..identity() },
            ..Facts::default()
        };
        assert_eq!(facts.compose(&old, at("2026-11-29T23:05:00Z")).status.addresses, Some(theirs.clone()));
    }
    // The annotation goes with the flag (external-gone-patch.json).
    let external = Identity { external_cloud: true, node_ips: ips("192.0.2.2"), ..identity() };
    let mut node = initial(&external, NodeStatus::default());
    assert_eq!(node.metadata.annotations.as_ref().unwrap()[PROVIDED_NODE_IP], "192.0.2.2");
    metadata_of_status(&mut node, &Identity { node_ips: vec![], ..external });
    assert!(!node.metadata.annotations.unwrap().contains_key(PROVIDED_NODE_IP));
}

#[test]
fn what_is_not_known_now_stays_as_it_was() {
    let old = Facts::default().first().status;
    let facts = Facts { runtime: NodeRuntime::default(), addresses: None, ..Facts::default() };
    let new = facts.compose(&old, at("2026-11-29T23:05:00Z")).status;
    assert!(!changed(&old, &new));
}

#[test]
fn swap_volumes_and_missing_capacity() {
    let facts = Facts {
        machine: MachineFacts { host: Machine { swap: 4096, ..machine().host }, ..machine() },
        volumes: vec!["kubernetes.io/csi/x^1".into()],
        ..Facts::default()
    };
    let status = serde_json::to_value(facts.first().status).unwrap();
    assert_eq!(status["nodeInfo"]["swap"], json!({"capacity": 4096}));
    assert_eq!(status["volumesInUse"], json!(["kubernetes.io/csi/x^1"]));
    assert_eq!(missing_capacity(&machine(), true), None);
    let poor = MachineFacts { capacity: list(&[("cpu", "1"), ("memory", "1Gi")]), ..machine() };
    assert_eq!(
        missing_capacity(&poor, true).as_deref(),
        Some("missing node capacity for resources: pods, ephemeral-storage")
    );
    assert_eq!(missing_capacity(&poor, false).as_deref(), Some("missing node capacity for resources: pods"));
}

#[test]
fn images_are_the_largest_with_few_names() {
    let many = v1::Image {
        id: "b".into(),
        repo_digests: vec!["r@sha256:1".into(), "r@sha256:2".into()],
        repo_tags: (1..=4).map(|n| format!("r:{n}")).collect(),
        size: 10,
        ..v1::Image::default()
    };
    let all = vec![image("a", &["a:1"], 5), many, image("c", &["c:1"], 10)];
    let names = |max| -> Vec<Vec<String>> {
        container_images(all.clone(), max).into_iter().map(|i| i.names.unwrap()).collect()
    };
    assert_eq!(names(2), [vec!["c:1"], vec!["r@sha256:1", "r@sha256:2", "r:1", "r:2", "r:3"]]);
    assert_eq!(names(-1).len(), 3);
    assert!(names(0).is_empty());
}

#[test]
fn what_others_say_about_objects_and_addresses() {
    let ttl = |text: Value| object_ttl(&node_of(json!({"metadata": {"annotations": text}})));
    let key = "node.alpha.kubernetes.io/ttl";
    for (text, seconds) in
        [("0", Some(0)), ("15", Some(15)), ("+300", Some(300)), ("-1", Some(0)), ("1m", None), ("", None)]
    {
        assert_eq!(ttl(json!({key: text})).map(|t| t.as_secs()), seconds, "{text:?}");
    }
    assert_eq!(ttl(Value::Null), None);
    let cidr = |spec: Value| pod_cidr(&node_of(json!({"spec": spec})));
    assert_eq!(
        cidr(json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]})),
        "10.1.0.0/24,fd00:1::/64"
    );
    assert_eq!(cidr(json!({})), "");
}
