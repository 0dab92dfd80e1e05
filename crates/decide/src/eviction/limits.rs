//! Limits that a pod sets to its own local storage: `emptyDir.sizeLimit`, and `ephemeral-storage` of its containers.

use std::collections::BTreeMap;

use model::pod::{ContainerKind, DesiredPod};
use model::quantity::{Format, Quantity};

use crate::resources::{EPHEMERAL_STORAGE, PodSum, container_limits, is_critical, pod_limits};

/// The limits of one pod. What has none is not measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalLimits {
    /// emptyDirs on disk with a size limit.
    pub volumes: Vec<(String, Quantity)>,
    /// All that the pod takes of the node's disk.
    pub pod: Option<Quantity>,
    /// App containers: their layers and logs.
    pub containers: Vec<(String, Quantity)>,
}

/// What was measured of a pod that has limits, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalUsage {
    /// Volumes on the node's disk that end with the pod, by name; those that could not be measured are left out.
    pub volumes: BTreeMap<String, u64>,
    /// Logs by container.
    pub logs: BTreeMap<String, u64>,
    /// Writable layers by container.
    pub layers: BTreeMap<String, u64>,
    /// The pod's hosts file.
    pub hosts: u64,
    /// The writable layers are on another file system than the node's: a container's limit is about its logs alone.
    pub layers_elsewhere: bool,
}

/// What of a pod is over its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// Message of its status and of the event.
    pub message: String,
    /// How it is counted (`kubelet_evictions`, label `eviction_signal`).
    pub signal: &'static str,
}

impl LocalLimits {
    /// The limits of a pod; none for critical pods, which are never evicted.
    pub fn of(pod: &DesiredPod) -> Self {
        if is_critical(pod) {
            return Self::default();
        }
        let volumes = pod.spec().volumes.iter().flatten().filter_map(|volume| {
            let dir = volume.empty_dir.as_ref()?;
            // One in memory is a file system of that size.
            dir.medium.as_deref().unwrap_or_default().is_empty().then_some(())?;
            let limit = Quantity::of(dir.size_limit.as_ref()?).ok().filter(|limit| limit.sign() > 0)?;
            Some((volume.name.clone(), limit))
        });
        let containers = pod.app_containers().filter_map(|c| {
            let limit = container_limits(c).remove(EPHEMERAL_STORAGE).filter(|limit| limit.value() != 0)?;
            Some((c.spec.name.clone(), limit))
        });
        Self {
            volumes: volumes.collect(),
            containers: containers.collect(),
            pod: pod_limits(pod, PodSum::default()).remove(EPHEMERAL_STORAGE),
        }
    }

    /// There is nothing to measure.
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.pod.is_none() && self.containers.is_empty()
    }

    /// Logs, layers and all volumes are to be measured, not only the volumes with a limit.
    pub fn needs_all(&self) -> bool {
        self.pod.is_some() || !self.containers.is_empty()
    }

    /// Which volumes are to be measured.
    pub fn volumes_to_measure<'a>(&'a self, pod: &'a DesiredPod) -> Vec<&'a str> {
        let limited = |name: &str| self.volumes.iter().any(|(limited, _)| limited == name);
        let volumes = pod.spec().volumes.iter().flatten();
        let wanted = volumes.filter(|v| limited(&v.name) || self.pod.is_some() && ends_with_the_pod(v));
        wanted.map(|v| v.name.as_str()).collect()
    }

    /// The first limit that is exceeded, in Go's order and words.
    pub fn exceeded(&self, pod: &DesiredPod, usage: &LocalUsage) -> Option<OverLimit> {
        let over = |used: u64, limit: &Quantity| bytes(used) > *limit;
        for (name, limit) in &self.volumes {
            if usage.volumes.get(name).is_some_and(|used| over(*used, limit)) {
                let message = format!("Usage of EmptyDir volume {name:?} exceeds the limit \"{limit}\". ");
                return Some(OverLimit { message, signal: "emptydirfs.limit" });
            }
        }
        if let Some(limit) = &self.pod {
            let ending = pod.spec().volumes.iter().flatten().filter(|v| ends_with_the_pod(v));
            let volumes = ending.filter_map(|v| usage.volumes.get(&v.name));
            let parts = volumes.chain(usage.logs.values()).chain(usage.layers.values()).chain([&usage.hosts]);
            if over(parts.fold(0, |sum: u64, n| sum.saturating_add(*n)), limit) {
                let message =
                    format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ");
                return Some(OverLimit { message, signal: "ephemeralpodfs.limit" });
            }
        }
        for (name, limit) in &self.containers {
            let of = |map: &BTreeMap<String, u64>| map.get(name).copied().unwrap_or_default();
            let layer = if usage.layers_elsewhere { 0 } else { of(&usage.layers) };
            if over(of(&usage.logs).saturating_add(layer), limit) {
                let message = format!("Container {name} exceeded its local ephemeral storage limit \"{limit}\". ");
                return Some(OverLimit { message, signal: "ephemeralcontainerfs.limit" });
            }
        }
        None
    }

    /// The containers whose logs and layers are measured.
    pub fn containers_to_measure<'a>(&self, pod: &'a DesiredPod) -> Vec<&'a str> {
        if !self.needs_all() {
            return Vec::new();
        }
        let all = pod.containers().filter(|c| self.pod.is_some() || c.kind == ContainerKind::App);
        all.map(|c| c.spec.name.as_str()).collect()
    }
}

fn bytes(n: u64) -> Quantity {
    Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), Format::BinarySI)
}

/// On the node's disk, and gone with the pod.
fn ends_with_the_pod(volume: &model::api::Volume) -> bool {
    let on_disk = |dir: &model::api::EmptyDirVolumeSource| dir.medium.as_deref().unwrap_or_default().is_empty();
    volume.empty_dir.as_ref().is_some_and(on_disk) || volume.config_map.is_some() || volume.git_repo.is_some()
}
