//! The node as the API server is to know it: gathers what [`node::start`] works with.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cluster::Client;
use cluster::events::Recorder;
use config::{Flags, Gate, Gates, KubeletConfiguration};
use cri::RuntimeReader;
use decide::devices::Amount;
use decide::node::csi::Drivers;
use decide::node::{Identity, MachineFacts, NodeAddresses, NodeEvent, Pressures};
use model::api::ObjectReference;
use model::quantity::{Format, Quantity};
use node::{NoEvents, NodeConfig, NodeEvents, NodeHandles, NodePorts};
use pod::pleg::Health;
use pod::ports::{Clock, Random, Tasks};
use tokio::sync::watch;
use tracing::warn;

use crate::join::Cluster;
use crate::node::{self as facts, Resources};
use crate::version;

/// Tells events about the node to the API server. Go refers to a node by its name also where the UID stands.
struct Events {
    recorder: Recorder,
    about: ObjectReference,
}

impl NodeEvents for Events {
    fn event(&self, event: &NodeEvent) {
        self.recorder.event(&self.about, event.kind.as_str(), event.reason, &event.message);
    }
}

/// Where events about the node go.
pub(crate) fn events(cluster: Option<&Cluster>, name: &str) -> Arc<dyn NodeEvents> {
    let Some(cluster) = cluster else { return Arc::new(NoEvents) };
    let about = ObjectReference {
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    };
    Arc::new(Events { recorder: cluster.recorder.clone(), about })
}

/// Parts of the agent that the node's tasks look at.
pub(crate) struct Parts {
    pub(crate) runtime: Arc<dyn RuntimeReader>,
    pub(crate) health: watch::Receiver<Health>,
    pub(crate) images_changed: watch::Receiver<u64>,
    pub(crate) declared_features: Vec<String>,
    pub(crate) volumes_in_use: watch::Receiver<Arc<Vec<String>>>,
    pub(crate) drivers: watch::Receiver<Arc<Drivers>>,
    pub(crate) pressures: watch::Receiver<Pressures>,
    pub(crate) not_ready: watch::Receiver<Vec<String>>,
    pub(crate) events: Arc<dyn NodeEvents>,
    /// Devices of plugins, by resource.
    pub(crate) devices: watch::Receiver<Arc<BTreeMap<String, Amount>>>,
    /// Nothing was written down about devices by an earlier agent.
    pub(crate) new_machine: bool,
    pub(crate) clock: Clock,
    pub(crate) random: Random,
}

/// Starts the tasks of the node's object, status and lease.
pub(crate) fn start(
    cluster: &Cluster,
    flags: &Flags,
    config: &KubeletConfiguration,
    name: &str,
    resources: &Resources,
    parts: Parts,
    tasks: &Tasks,
) -> NodeHandles {
    let settings = NodeConfig {
        identity: identity(flags, config, name, parts.new_machine),
        register: config.register_node,
        update_period: config.node_status_update_frequency,
        report_period: config.node_status_report_frequency,
        max_images: config.node_status_max_images,
        lease_duration: Duration::from_secs(u64::try_from(config.node_lease_duration_seconds).unwrap_or(40)),
        local_storage: config.local_storage_capacity_isolation,
        declared_features: parts.declared_features,
    };
    let client = cluster.client.clone();
    // A heartbeat must not stand behind other requests in the queue.
    let heartbeat = Arc::new(client.with_deadline(settings.heartbeat_deadline()).with_limit(0.0, 0));
    let events = parts.events;
    let ports = NodePorts {
        nodes: Arc::new(client.clone()),
        heartbeat: heartbeat.clone(),
        leases: heartbeat,
        collection: Arc::new(client.clone()),
        cut_connections: cut(client),
        runtime: parts.runtime,
        health: parts.health,
        images_changed: parts.images_changed,
        // Read once: Go, too, reports the machine that it started on, until its devices change.
        machine: with_devices(machine(resources), parts.devices, tasks),
        addresses: addresses(flags, name),
        pressures: parts.pressures,
        not_ready: parts.not_ready,
        drivers: Some(parts.drivers),
        volumes_in_use: parts.volumes_in_use,
        events,
        clock: parts.clock,
        random: parts.random,
    };
    node::start(settings, ports, tasks)
}

/// The features that others ask nodes for, of those that are there (KEP-5328).
pub(crate) fn declared_features(gates: &Gates) -> Vec<String> {
    let features = [
        (Gate::ExtendWebSocketsToKubelet, "ExtendWebSocketsToKubelet"),
        (Gate::InPlacePodLevelResourcesVerticalScaling, "InPlacePodLevelResourcesVerticalScaling"),
        (Gate::InPlacePodVerticalScalingInitContainers, "InPlacePodVerticalScalingInitContainers"),
        (Gate::RestartAllContainersOnContainerExits, "RestartAllContainersOnContainerExits"),
    ];
    let declared = features.into_iter().filter(|(gate, _)| gates.enabled(*gate)).map(|(_, name)| name.to_owned());
    if gates.enabled(Gate::NodeDeclaredFeatures) { declared.collect() } else { Vec::new() }
}

fn cut(client: Client) -> Arc<dyn Fn() + Send + Sync> {
    Arc::new(move || client.close_connections())
}

/// The host's name as the API shows it: `--hostname-override`, else the kernel's.
fn hostname(flags: &Flags, name: &str) -> String {
    match flags.hostname_override() {
        Some(_) => name.to_owned(),
        None => host::proc::hostname().unwrap_or_else(|_| name.to_owned()),
    }
}

fn identity(flags: &Flags, config: &KubeletConfiguration, name: &str, reset_extended_resources: bool) -> Identity {
    Identity {
        name: name.to_owned(),
        labels: flags.node_labels(),
        taints: config.register_with_taints.clone(),
        provider_id: config.provider_id.clone(),
        external_cloud: flags.cloud_provider() == "external",
        node_ips: flags.node_ips(),
        hostname: hostname(flags, name),
        architecture: facts::architecture().to_owned(),
        kubelet_version: version::KUBERNETES.to_owned(),
        port: config::port_number(config.port),
        controller_attaches: config.enable_controller_attach_detach,
        reset_extended_resources,
    }
}

fn machine(resources: &Resources) -> MachineFacts {
    let (host, failed) = host::proc::machine(Path::new("/"), Path::new(facts::PROC), Path::new(facts::SYS));
    for e in failed {
        warn!(err = e.full(), "A fact for the node's status is not known");
    }
    MachineFacts { capacity: resources.capacity.clone(), allocatable: resources.allocatable.clone(), host }
}

/// The machine with the devices that plugins have.
fn with_devices(
    bare: MachineFacts,
    mut devices: watch::Receiver<Arc<BTreeMap<String, Amount>>>,
    tasks: &Tasks,
) -> watch::Receiver<Arc<MachineFacts>> {
    let whole = move |devices: &BTreeMap<String, Amount>| {
        let mut machine = bare.clone();
        let pieces = |n: usize| Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), Format::DecimalSI);
        for (name, amount) in devices {
            machine.capacity.insert(name.clone(), pieces(amount.capacity));
            machine.allocatable.insert(name.clone(), pieces(amount.allocatable));
        }
        Arc::new(machine)
    };
    let (out, machine) = watch::channel(whole(&devices.borrow_and_update()));
    tasks.spawn_until_stop(async move {
        while devices.changed().await.is_ok() {
            out.send_replace(whole(&devices.borrow_and_update()));
        }
    });
    machine
}

/// Finds the addresses anew at each call: a lease may run out, a network come late.
fn addresses(flags: &Flags, name: &str) -> node::FindAddresses {
    let (given, name, hostname) = (flags.node_ips(), name.to_owned(), hostname(flags, name));
    Arc::new(move || {
        let found = host::proc::node_addresses(Path::new(facts::PROC), Path::new(facts::SYS), &name, &given);
        Ok(NodeAddresses { ips: found.map_err(|e| e.full())?, hostname: hostname.clone() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the Go kubelet registers its node.
    #[test]
    fn features_are_gos() {
        let recorded = include_str!("../../decide/src/node/testdata/create.json");
        let recorded: model::api::Node = serde_json::from_str(recorded).unwrap();
        assert_eq!(Some(declared_features(&Gates::default())), recorded.status.unwrap().declared_features);
    }
}
