//! What the pod-resources socket tells: the table of pods, and the book.

use std::path::Path;
use std::sync::Arc;

use decide::memory::Block;
use model::pod::{ContainerKind, DesiredPod};
use plugins::pod_resources::{Call, Source};
use plugins::wire::podresources_v1::{
    AllocatableResourcesResponse, CdiDevice, ClaimResource, ContainerDevices, ContainerMemory, ContainerResources,
    DynamicResource, NumaNode, PodResources, TopologyInfo,
};
use pod::ports::Tasks;
use pod::registry::{PodEntry, Registry, WorkerState};
use telemetry::metrics::PodResourcesCall;

use crate::Managers;

/// File name of the socket in `ROOT/pod-resources`.
const SOCKET: &str = "kubelet.sock";

/// Opens the socket in this directory. `only_active`: List leaves out pods that have ended (gate KubeletPodResourcesListUseActivePods).
///
/// # Errors
/// It cannot be opened.
pub fn serve(
    dir: &Path,
    managers: &Managers,
    registry: Arc<Registry>,
    only_active: bool,
    tasks: &Tasks,
) -> Result<(), String> {
    let socket = dir.join(SOCKET);
    let teller = Teller { managers: managers.clone(), registry, only_active };
    plugins::pod_resources::serve(&socket, Arc::new(teller), tasks.stop().clone())
        .map_err(|e| format!("open the pod-resources socket {}: {e}", socket.display()))
}

struct Teller {
    managers: Managers,
    registry: Arc<Registry>,
    only_active: bool,
}

fn on(node: i64) -> TopologyInfo {
    TopologyInfo { nodes: vec![NumaNode { id: node }] }
}

fn device(resource: &str, id: &str, node: Option<i64>) -> ContainerDevices {
    ContainerDevices { resource_name: resource.to_owned(), device_ids: vec![id.to_owned()], topology: node.map(on) }
}

fn memory(block: &Block) -> ContainerMemory {
    let nodes = block.nodes.iter().map(|id| NumaNode { id: *id }).collect();
    ContainerMemory { memory_type: block.kind.clone(), size: block.size, topology: Some(TopologyInfo { nodes }) }
}

/// The claims of a container.
fn claimed(claims: &decide::claims::Claims, pod: &DesiredPod, container: &str) -> Vec<DynamicResource> {
    let Some(entry) = pod.container(container) else { return Vec::new() };
    let objects = decide::claims::Claims::uses(pod, &entry).unwrap_or_default();
    let known = objects.keys().filter_map(|object| claims.get(pod.namespace(), object));
    let resources = |claim: &decide::claims::Claim| {
        let devices = claim.drivers.iter().flat_map(|(driver, all)| all.iter().map(move |d| (driver, d)));
        devices
            .map(|(driver, d)| ClaimResource {
                cdi_devices: d.cdi.iter().map(|name| CdiDevice { name: name.clone() }).collect(),
                driver_name: driver.clone(),
                pool_name: d.pool.clone(),
                device_name: d.name.clone(),
            })
            .collect()
    };
    known
        .map(|claim| DynamicResource {
            claim_name: claim.name.clone(),
            claim_namespace: claim.namespace.clone(),
            claim_resources: resources(claim),
        })
        .collect()
}

fn ids(cpus: &decide::cpus::CpuSet) -> Vec<i64> {
    cpus.iter().map(i64::from).collect()
}

/// It may run something.
fn is_active(entry: &PodEntry) -> bool {
    let view = entry.view();
    let over = view.status.phase.as_deref().is_some_and(decide::status::is_terminal);
    view.state != WorkerState::Terminated && !over
}

impl Teller {
    fn tell(&self, pod: &DesiredPod, sidecars: bool) -> PodResources {
        let book = self.managers.0.book();
        let uid = pod.uid().as_str();
        let container = |name: &str| {
            let mut devices = Vec::new();
            for (resource, allocation) in book.devices.of_container(uid, name).into_iter().flatten() {
                for (node, ids) in &allocation.devices {
                    let node = Some(*node).filter(|n| *n != decide::devices::NO_NODE);
                    devices.extend(ids.iter().map(|id| device(resource, id, node)));
                }
            }
            ContainerResources {
                name: name.to_owned(),
                devices,
                cpu_ids: book.cpus.as_ref().and_then(|c| c.own(uid, name)).map(ids).unwrap_or_default(),
                memory: book.memory.as_ref().and_then(|m| m.of(uid, name)).into_iter().flatten().map(memory).collect(),
                dynamic_resources: claimed(&book.claims, pod, name),
            }
        };
        let beside = pod.init_containers().filter(|c| sidecars && c.kind == ContainerKind::Sidecar);
        let lasting = beside.chain(pod.app_containers());
        PodResources {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            containers: lasting.map(|c| container(&c.spec.name)).collect(),
        }
    }

    fn pods(&self, only_active: bool, sidecars: bool) -> Vec<PodResources> {
        let entries = self.registry.all();
        let entries = entries.iter().filter(|e| !only_active || is_active(e));
        entries.filter_map(|e| e.view().desired.clone()).map(|pod| self.tell(&pod, sidecars)).collect()
    }
}

impl Source for Teller {
    fn active(&self) -> Vec<PodResources> {
        self.pods(self.only_active, true)
    }

    fn all(&self) -> Vec<PodResources> {
        self.pods(false, false)
    }

    fn pod(&self, namespace: &str, name: &str) -> Option<PodResources> {
        let found = self.registry.all().into_iter().filter_map(|e| e.view().desired.clone());
        let mut found = found.filter(|p| p.name() == name && p.namespace() == namespace);
        found.next().map(|pod| self.tell(&pod, true))
    }

    fn allocatable(&self) -> AllocatableResourcesResponse {
        let book = self.managers.0.book();
        let mut devices = Vec::new();
        for (resource, of) in book.devices.usable() {
            for (id, nodes) in of {
                if nodes.is_empty() {
                    devices.push(device(resource, id, None));
                }
                devices.extend(nodes.iter().map(|node| device(resource, id, Some(*node))));
            }
        }
        AllocatableResourcesResponse {
            devices,
            cpu_ids: book.cpus.as_ref().map(|c| ids(&c.allocatable())).unwrap_or_default(),
            memory: book.memory.as_ref().map(|m| m.allocatable().iter().map(memory).collect()).unwrap_or_default(),
        }
    }

    fn called(&self, version: &'static str, call: Call, failed: bool) {
        let call = match call {
            Call::List => PodResourcesCall::List,
            Call::Get => PodResourcesCall::Get,
            Call::GetAllocatable => PodResourcesCall::GetAllocatable,
        };
        self.managers.0.metrics.managers.pod_resources_call(version, call, failed);
    }
}
