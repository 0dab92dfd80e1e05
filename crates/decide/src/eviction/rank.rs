//! Which pod goes first.

use std::cmp::Reverse;
use std::collections::HashMap;

use model::pod::{DesiredPod, PodUid};
use model::quantity::{Format, Quantity};

use super::signal::{Disks, Resource, Signal};
use super::threshold::Threshold;
use crate::resources::{EPHEMERAL_STORAGE, MEMORY, PodSum, has_pod_level_resources, is_critical, pod_requests};

/// Grace of a pod that must go at once, s.
pub(super) const AT_ONCE: i64 = 1;

/// A share of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

impl Usage {
    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), inodes: self.inodes.saturating_add(other.inodes) }
    }
}

/// What a container uses. None: not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerUsage {
    /// Its name.
    pub name: String,
    /// Working set, bytes.
    pub memory: Option<u64>,
    /// Its writable layer.
    pub layer: Option<Usage>,
    /// Its logs.
    pub logs: Option<Usage>,
}

/// What a pod uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// Working set, bytes; None: not known.
    pub memory: Option<u64>,
    /// Its processes.
    pub processes: u64,
    /// Its containers that run.
    pub containers: Vec<ContainerUsage>,
    /// Its volumes, by name.
    pub volumes: Vec<(String, Usage)>,
}

/// A pod in its turn.
#[derive(Clone, Debug)]
pub struct Ranked<'a> {
    /// The pod.
    pub pod: &'a DesiredPod,
    /// What it uses; None: nothing of it runs.
    pub usage: Option<&'a PodUsage>,
}

/// Puts the pods that may be evicted for the sake of `signal` in the order in which they go: those that use more than they asked for, then those of
/// lower priority, then by how much more they use. Inodes and processes are not asked for: there it is the priority, then the number. Critical pods are
/// left out. `pod_level`: gate PodLevelResources.
pub fn rank<'a>(
    pods: &'a [DesiredPod],
    usage: &'a HashMap<PodUid, PodUsage>,
    signal: Signal,
    disks: Disks,
    pod_level: bool,
) -> Vec<Ranked<'a>> {
    let candidates = pods.iter().filter(|pod| !is_critical(pod));
    let mut ranked: Vec<_> = candidates
        .map(|pod| {
            let usage = usage.get(pod.uid());
            let used = usage.map_or(0, |usage| used(pod, usage, signal, disks));
            let mut over = amount(used);
            over.sub(&request(pod, signal.resource(), pod_level));
            let priority = pod.spec().priority.unwrap_or(0);
            let key = (over.sign() <= 0, priority, Reverse(over), pod.uid().clone());
            (key, Ranked { pod, usage })
        })
        .collect();
    let asked_for = matches!(signal.resource(), Resource::Memory | Resource::EphemeralStorage);
    if !asked_for {
        ranked.iter_mut().for_each(|(key, _)| key.0 = false);
    }
    ranked.sort_by(|(a, _), (b, _)| a.cmp(b));
    ranked.into_iter().map(|(_, pod)| pod).collect()
}

fn amount(n: u64) -> Quantity {
    Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), Format::BinarySI)
}

/// What of the resource behind the signal the pod uses.
fn used(pod: &DesiredPod, usage: &PodUsage, signal: Signal, disks: Disks) -> u64 {
    let disk = || {
        let parts = disks.parts(signal);
        let mut sum = Usage::default();
        for container in &usage.containers {
            let layer = container.layer.filter(|_| parts.layers);
            let logs = container.logs.filter(|_| parts.node);
            sum = layer.into_iter().chain(logs).fold(sum, Usage::plus);
        }
        if parts.node {
            let local = pod.spec().volumes.iter().flatten().filter(|v| is_local(v));
            let measured = local.filter_map(|v| usage.volumes.iter().find(|(name, _)| *name == v.name));
            sum = measured.map(|(_, used)| *used).fold(sum, Usage::plus);
        }
        sum
    };
    match signal.resource() {
        Resource::Memory => usage.memory.unwrap_or_default(),
        Resource::Pids => usage.processes,
        Resource::EphemeralStorage => disk().bytes,
        Resource::Inodes => disk().inodes,
    }
}

/// The volume is on the node's own disk.
fn is_local(volume: &model::api::Volume) -> bool {
    let on_disk = |dir: &model::api::EmptyDirVolumeSource| dir.medium.as_deref().unwrap_or_default().is_empty();
    volume.host_path.is_some()
        || volume.git_repo.is_some()
        || volume.config_map.is_some()
        || volume.empty_dir.as_ref().is_some_and(on_disk)
}

/// What the pod asked for. Overhead counts where the pod asks for something itself.
fn request(pod: &DesiredPod, resource: Resource, pod_level: bool) -> Quantity {
    let name = match resource {
        Resource::Memory => MEMORY,
        Resource::EphemeralStorage => EPHEMERAL_STORAGE,
        Resource::Inodes | Resource::Pids => return amount(0),
    };
    let own = if pod_level && has_pod_level_resources(pod) {
        // What the pod as a whole asks for stands for all; a resource that it does not name is not asked for.
        let list = pod.spec().resources.as_ref().and_then(|r| r.requests.as_ref());
        list.and_then(|list| Quantity::of(list.get(name)?).ok())
    } else {
        pod_requests(pod, PodSum { overhead: false, pod_level: false }).remove(name)
    };
    let mut sum = amount(0);
    if let Some(own) = own.filter(|own| !own.is_zero()) {
        sum.add(&own);
        let overhead = pod.spec().overhead.as_ref().and_then(|list| Quantity::of(list.get(name)?).ok());
        if let Some(overhead) = overhead {
            sum.add(&overhead);
        }
    }
    sum
}

/// How long the pod gets to end, s. `max`: `evictionMaxPodGracePeriod`; negative: what the pod asks for.
pub fn grace(threshold: &Threshold, pod: &DesiredPod, max: i32) -> i64 {
    if threshold.is_hard() {
        return AT_ONCE;
    }
    let own = pod.spec().termination_grace_period_seconds;
    match u32::try_from(max) {
        Ok(max) => own.map_or(i64::from(max), |own| own.min(i64::from(max))),
        Err(_) => own.unwrap_or(AT_ONCE),
    }
}
