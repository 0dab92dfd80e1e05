//! Devices of device plugins: which there are, who has which, and which ones a container gets.
//!
//! ```text
//!   registered ──▶ connected ──list──▶ healthy │ unhealthy ──plugin gone──▶ all unhealthy ──5 min──▶ no more
//!
//!   free ──choose, reserve──▶ reserved ──plugin's answer──▶ allocated ──pod ends──▶ free
//!                                 └────────plugin refuses────────────────────────▶ free
//! ```
//!
//! A device has one holder at most: what is chosen is reserved in the same step, before the plugin is asked. Only containers of one pod may hold
//! the same device, when the one ran to its end before the other starts (init containers).

mod choose;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use choose::{Choice, Want};

use crate::numa::{Hint, Hints, NumaMask};

/// Device ids.
pub type Ids = BTreeSet<String>;

/// The place in [`Allocation::devices`] of devices that belong to no NUMA node.
pub const NO_NODE: i64 = -1;

/// A device as its plugin lists it (device plugin API `Device`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// `health` is `Healthy`.
    pub healthy: bool,
    /// `topology.nodes`; empty: it belongs to none.
    pub nodes: Vec<i64>,
}

/// What a plugin wants to be asked (`DevicePluginOptions`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// PreStartContainer before each start of a container.
    pub pre_start: bool,
    /// GetPreferredAllocation before devices are chosen.
    pub preferred: bool,
}

/// The devices of one resource.
#[derive(Clone, Debug, Default)]
struct Resource {
    devices: BTreeMap<String, Device>,
    /// Not usable though listed as healthy: the plugin is gone.
    disconnected: bool,
    options: Options,
}

impl Resource {
    fn healthy(&self) -> Ids {
        let usable = |d: &&Device| d.healthy && !self.disconnected;
        self.devices.iter().filter(|(_, d)| usable(d)).map(|(id, _)| id.clone()).collect()
    }

    fn has_topology(&self) -> bool {
        self.devices.values().any(|d| !d.nodes.is_empty())
    }
}

/// Devices that a container has of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// Ids by NUMA node, [`NO_NODE`] among them; a device of two nodes is under both.
    pub devices: BTreeMap<i64, Vec<String>>,
    /// The plugin's `ContainerAllocateResponse` as it stood on the wire; None: it is being asked.
    pub response: Option<Arc<[u8]>>,
}

impl Allocation {
    /// The ids, each once.
    pub fn ids(&self) -> Ids {
        self.devices.values().flatten().cloned().collect()
    }
}

/// By resource name.
pub type OfContainer = BTreeMap<String, Allocation>;

#[derive(Clone, Debug, Default)]
struct OfPod {
    containers: BTreeMap<String, OfContainer>,
    /// It runs nothing any more: its devices are free, and remembered for its status.
    ended: bool,
}

/// How many devices of a resource there are, and how many of them pods may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// `status.capacity`.
    pub capacity: usize,
    /// `status.allocatable`.
    pub allocatable: usize,
}

/// A device that a container has, and how it is (`ContainerStatus.allocatedResourcesStatus`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Its id.
    pub id: String,
    /// A device that its plugin does not list any more counts as healthy, as in Go.
    pub healthy: bool,
}

/// The book of devices. One task at a time changes it; nothing here waits.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    resources: BTreeMap<String, Resource>,
    pods: BTreeMap<String, OfPod>,
    /// There ever was a plugin, or a pod with devices.
    known: bool,
}

impl Devices {
    /// Takes over what an earlier agent wrote down: its resources have no devices until their plugins are back.
    pub fn restore(
        allocations: impl IntoIterator<Item = (String, String, String, Allocation)>,
        resources: impl IntoIterator<Item = String>,
    ) -> Self {
        let mut all = Self { known: true, ..Self::default() };
        for (pod, container, resource, allocation) in allocations {
            all.container_mut(&pod, &container).insert(resource, allocation);
        }
        for name in resources {
            all.resources.insert(name, Resource { disconnected: true, ..Resource::default() });
        }
        all
    }

    fn container_mut(&mut self, pod: &str, container: &str) -> &mut OfContainer {
        let pod = self.pods.entry(pod.to_owned()).or_default();
        pod.containers.entry(container.to_owned()).or_default()
    }

    /// A plugin serves this resource. Its devices are as they were until it lists them.
    pub fn connected(&mut self, resource: &str, options: Options) {
        self.known = true;
        self.resources
            .entry(resource.to_owned())
            .or_insert_with(|| Resource { disconnected: true, ..Resource::default() })
            .options = options;
    }

    /// The plugin's newest list. Gives the pods that have a device whose health is another now.
    pub fn listed(&mut self, resource: &str, devices: BTreeMap<String, Device>) -> BTreeSet<String> {
        let known = self.resources.entry(resource.to_owned()).or_default();
        let was = std::mem::replace(&mut known.disconnected, false);
        let old = std::mem::replace(&mut known.devices, devices);
        let new = &self.resources[resource].devices;
        // A device that is new may have been here before, and still be somebody's.
        let changed: Ids = new
            .iter()
            .filter(|(id, d)| old.get(*id).is_none_or(|o| (o.healthy && !was) != d.healthy))
            .map(|(id, _)| id.clone())
            .collect();
        self.holders(resource, &changed)
    }

    /// The plugin is gone: nothing of it can be used, what is in use stays. Gives the pods that have such a device.
    pub fn disconnected(&mut self, resource: &str) -> BTreeSet<String> {
        let Some(known) = self.resources.get_mut(resource) else { return BTreeSet::new() };
        if std::mem::replace(&mut known.disconnected, true) {
            return BTreeSet::new();
        }
        let changed: Ids = known.devices.iter().filter(|(_, d)| d.healthy).map(|(id, _)| id.clone()).collect();
        self.holders(resource, &changed)
    }

    /// The plugin stayed away: the node does not have this resource any more.
    pub fn expired(&mut self, resource: &str) {
        self.resources.remove(resource);
    }

    fn holders(&self, resource: &str, ids: &Ids) -> BTreeSet<String> {
        let holds = |pod: &OfPod| {
            let mut all = pod.containers.values().filter_map(|c| c.get(resource));
            all.any(|a| a.devices.values().flatten().any(|id| ids.contains(id)))
        };
        self.pods.iter().filter(|(_, pod)| holds(pod)).map(|(uid, _)| uid.clone()).collect()
    }

    /// False as long as no plugin ever came and no pod has devices.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Amounts by resource name.
    pub fn amounts(&self) -> BTreeMap<String, Amount> {
        let amount = |r: &Resource| Amount { capacity: r.devices.len(), allocatable: r.healthy().len() };
        self.resources.iter().map(|(name, r)| (name.clone(), amount(r))).collect()
    }

    /// True when devices of this resource are given out here: a plugin serves it, or served it when a pod got some.
    pub fn serves(&self, resource: &str) -> bool {
        let of_pod = |p: &OfPod| !p.ended && p.containers.values().any(|c| c.contains_key(resource));
        self.resources.contains_key(resource) || self.pods.values().any(of_pod)
    }

    /// What the resource's plugin wants to be asked; None: no plugin serves it, or it did not say yet.
    pub fn options(&self, resource: &str) -> Option<Options> {
        self.resources.get(resource).map(|r| r.options)
    }

    /// What a container has.
    pub fn of_container(&self, pod: &str, container: &str) -> Option<&OfContainer> {
        self.pods.get(pod)?.containers.get(container)
    }

    /// What a container has of one resource.
    pub fn allocation(&self, pod: &str, container: &str, resource: &str) -> Option<&Allocation> {
        self.of_container(pod, container)?.get(resource)
    }

    /// Devices of a resource that pods hold, those being asked for among them.
    pub fn in_use(&self, resource: &str) -> Ids {
        let held = self.pods.values().filter(|p| !p.ended).flat_map(|p| p.containers.values());
        held.filter_map(|c| c.get(resource)).flat_map(|a| a.devices.values().flatten().cloned()).collect()
    }

    /// Everything that is written down: pod, container, resource, allocation. What a plugin is being asked for is not.
    pub fn allocations(&self) -> impl Iterator<Item = (&str, &str, &str, &Allocation)> {
        self.pods.iter().filter(|(_, p)| !p.ended).flat_map(|(uid, pod)| {
            pod.containers.iter().flat_map(move |(container, of)| {
                let answered = of.iter().filter(|(_, a)| a.response.is_some());
                answered.map(move |(resource, a)| (uid.as_str(), container.as_str(), resource.as_str(), a))
            })
        })
    }

    /// The resources with their healthy devices.
    pub fn registered(&self) -> BTreeMap<String, Ids> {
        self.resources.iter().map(|(name, r)| (name.clone(), r.healthy())).collect()
    }

    /// Every healthy device with its NUMA nodes, by resource.
    pub fn usable(&self) -> BTreeMap<&str, BTreeMap<&str, &[i64]>> {
        let of = |r: &'_ Resource| -> Ids { r.healthy() };
        self.resources
            .iter()
            .map(|(name, r)| {
                let healthy = of(r);
                let devices = r.devices.iter().filter(|(id, _)| healthy.contains(*id));
                (name.as_str(), devices.map(|(id, d)| (id.as_str(), d.nodes.as_slice())).collect())
            })
            .collect()
    }

    /// Holds devices for a container whose plugin is being asked.
    pub fn reserve(&mut self, pod: &str, container: &str, resource: &str, ids: &Ids) {
        let known = self.resources.get(resource);
        let mut devices: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            let nodes = known.and_then(|r| r.devices.get(id)).map_or(&[][..], |d| &d.nodes);
            let places = if nodes.is_empty() { &[NO_NODE][..] } else { nodes };
            for node in places {
                devices.entry(*node).or_default().push(id.clone());
            }
        }
        let of_pod = self.pods.entry(pod.to_owned()).or_default();
        if of_pod.ended {
            // What it had may be others' by now.
            *of_pod = OfPod::default();
        }
        self.container_mut(pod, container).insert(resource.to_owned(), Allocation { devices, response: None });
    }

    /// The plugin has answered: what was reserved is the container's. False when the pod was let go meanwhile.
    pub fn granted(&mut self, pod: &str, container: &str, resource: &str, response: Arc<[u8]>) -> bool {
        let of_container = self.pods.get_mut(pod).and_then(|p| p.containers.get_mut(container));
        match of_container.and_then(|c| c.get_mut(resource)) {
            Some(allocation) => {
                allocation.response = Some(response);
                true
            }
            None => false,
        }
    }

    /// Gives back what a plugin did not answer for.
    pub fn refused(&mut self, pod: &str, container: &str, resource: &str) {
        if let Some(of_container) = self.pods.get_mut(pod).and_then(|p| p.containers.get_mut(container))
            && of_container.get(resource).is_some_and(|a| a.response.is_none())
        {
            of_container.remove(resource);
        }
    }

    /// The pod runs nothing any more: its devices are free. True when it had some.
    pub fn ended(&mut self, pod: &str) -> bool {
        self.pods.get_mut(pod).is_some_and(|p| !std::mem::replace(&mut p.ended, true))
    }

    /// The pod is gone. True when it had devices.
    pub fn release(&mut self, pod: &str) -> bool {
        self.pods.remove(pod).is_some()
    }

    /// Forgets pods that are not among these. True when there were such.
    pub fn retain(&mut self, known: &dyn Fn(&str) -> bool) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| known(uid));
        self.pods.len() != before
    }

    /// How the devices of a container are, by resource.
    pub fn health(&self, pod: &str, container: &str) -> BTreeMap<String, Vec<DeviceHealth>> {
        let Some(of_container) = self.of_container(pod, container) else { return BTreeMap::new() };
        let health = |resource: &str, id: &String| {
            let known = self.resources.get(resource);
            let listed = known.and_then(|r| r.devices.get(id).map(|d| d.healthy && !r.disconnected));
            DeviceHealth { id: id.clone(), healthy: listed.unwrap_or(true) }
        };
        let of = |(resource, a): (&String, &Allocation)| {
            (resource.clone(), a.ids().iter().map(|id| health(resource, id)).collect())
        };
        of_container.iter().map(of).collect()
    }

    /// True when some pod has devices.
    pub fn holds_any(&self, pod: &str) -> bool {
        self.pods.get(pod).is_some_and(|p| !p.ended && p.containers.values().any(|c| !c.is_empty()))
    }

    /// Where `needed` devices of a resource for a container could come from. `nodes`: the machine's NUMA nodes.
    pub fn hints(&self, want: &Want<'_>, nodes: &[i64]) -> Hints {
        let known = self.resources.get(want.resource).filter(|r| r.has_topology())?;
        if let Some(has) = self.allocation(want.pod, want.container, want.resource).filter(|a| !a.devices.is_empty()) {
            let ids = has.ids();
            let same = ids.len() == want.needed;
            return Some(if same { Self::all_hints(known, &ids, &Ids::new(), want.needed, nodes) } else { Vec::new() });
        }
        let in_use = self.in_use(want.resource);
        let free: Ids = known.healthy().difference(&in_use).cloned().collect();
        if free.union(want.reusable).count() < want.needed {
            return Some(Vec::new());
        }
        Some(Self::all_hints(known, &free, want.reusable, want.needed, nodes))
    }

    /// Where the devices of all containers of a pod together could come from.
    pub fn pod_hints(&self, pod: &str, resource: &str, needed: usize, nodes: &[i64]) -> Hints {
        let known = self.resources.get(resource).filter(|r| r.has_topology())?;
        let of_pod = self.pods.get(pod).filter(|p| !p.ended).into_iter().flat_map(|p| p.containers.values());
        let has: Ids = of_pod.filter_map(|c| c.get(resource)).flat_map(Allocation::ids).collect();
        if !has.is_empty() {
            let same = has.len() == needed;
            return Some(if same { Self::all_hints(known, &has, &Ids::new(), needed, nodes) } else { Vec::new() });
        }
        let free: Ids = known.healthy().difference(&self.in_use(resource)).cloned().collect();
        Some(if free.len() < needed { Vec::new() } else { Self::all_hints(known, &free, &Ids::new(), needed, nodes) })
    }

    fn all_hints(known: &Resource, free: &Ids, reusable: &Ids, needed: usize, machine: &[i64]) -> Vec<Hint> {
        // Nodes without such devices never add anything to a set.
        let with: BTreeSet<i64> = known.devices.values().flat_map(|d| d.nodes.iter().copied()).collect();
        let mut nodes: Vec<i64> = with.into_iter().filter(|n| machine.contains(n)).collect();
        if nodes.is_empty() {
            nodes = machine.to_vec();
        }
        let mut narrowest = nodes.len();
        let mut found = Vec::new();
        for mask in NumaMask::subsets(&nodes) {
            let inside = |id: &String| known.devices.get(id).is_some_and(|d| mask.has_any(&d.nodes));
            if known.devices.keys().filter(|id| inside(id)).count() >= needed {
                narrowest = narrowest.min(mask.count());
            }
            let placed = |id: &&String| known.devices.get(*id).is_some_and(|d| !d.nodes.is_empty());
            if reusable.iter().filter(placed).any(|id| !inside(id)) {
                continue;
            }
            let again = reusable.iter().filter(placed).count();
            if again + free.iter().filter(|id| inside(id)).count() >= needed {
                found.push(mask);
            }
        }
        found.into_iter().map(|mask| Hint { affinity: Some(mask), preferred: mask.count() == narrowest }).collect()
    }
}

/// True for names of resources that plugins may serve: `DOMAIN/NAME`, not in `kubernetes.io`, and valid in quotas as `requests.DOMAIN/NAME`.
pub fn is_extended_resource(name: &str) -> bool {
    let Some((domain, short)) = name.split_once('/') else { return false };
    let plain = |c: char| c.is_ascii_alphanumeric();
    let label = |part: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty() && part.chars().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    let short_valid = short.len() <= 63
        && short.starts_with(plain)
        && short.ends_with(plain)
        && short.chars().all(|c| plain(c) || matches!(c, '-' | '_' | '.'));
    !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && "requests.".len() + domain.len() <= 253
        && domain.split('.').all(label)
        && short_valid
}
