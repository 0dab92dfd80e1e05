//! From figures to the summary. Pure.

use std::collections::HashMap;

use cri_api::v1;
use host::cgroup::MemoryFigures;
use host::fsx::{DiskUsage, FilesystemFigures};
use jiff::Timestamp;

use super::{
    ContainerStats, Cpu, Fs, Interface, Io, Memory, Network, NodeStats, PodRef, PodStats, ProcessStats, PvcRef, Rlimit,
    RuntimeStats, Summary, Swap, VolumeHealth, VolumeStats,
};
use crate::groups::{Group, Groups};
use crate::names::{ContainerName, Names, Owner};
use crate::storage::{Storage, Usage, Volume};

/// The interface that a pod's network is told by.
const OWN_INTERFACE: &str = "eth0";

/// Figures of the node that are not a group's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    pub(crate) booted: Timestamp,
    /// Bytes.
    pub(crate) memory: u64,
    /// Bytes.
    pub(crate) swap: u64,
    /// Highest number of processes, and how many there are.
    pub(crate) processes: Option<(u64, u64)>,
}

/// Everything that a summary is made of.
pub(crate) struct Inputs<'a> {
    pub(crate) node_name: &'a str,
    /// Name and path of each system container, the pods' too.
    pub(crate) system: &'a [(&'a str, &'a str)],
    /// When this process started: the start of the system container `kubelet`.
    pub(crate) started: Timestamp,
    pub(crate) node: NodeFacts,
    pub(crate) names: &'a Names,
    pub(crate) groups: &'a Groups,
    /// What the runtime says of containers without a group here, by id.
    pub(crate) fallback: &'a HashMap<String, v1::ContainerStats>,
    /// None: CPU and memory only.
    pub(crate) storage: Option<&'a Storage>,
    /// By pod UID.
    pub(crate) volumes: Option<&'a HashMap<String, Vec<Volume>>>,
    pub(crate) now: Timestamp,
}

/// Makes the summary.
pub(crate) fn compose<'a>(inputs: &'a Inputs<'a>) -> Summary<'a> {
    let full = inputs.storage.is_some();
    let root = inputs.groups.at("/");
    let NodeFacts { booted, memory, swap, processes } = inputs.node;
    let system = inputs.system.iter().filter_map(|(name, path)| {
        let group = inputs.groups.at(path)?;
        let start = if *name == "kubelet" { Some(inputs.started) } else { group.figures.created };
        Some(ContainerStats {
            name,
            start_time: start.unwrap_or(booted),
            cpu: cpu(group),
            memory: memory_of(group, None),
            io: full.then(|| io(group)),
            rootfs: None,
            logs: None,
            swap: swap_of(group, None),
        })
    });
    let node = NodeStats {
        node_name: inputs.node_name,
        system_containers: system.collect(),
        start_time: booted,
        cpu: root.and_then(cpu),
        memory: root.and_then(|g| memory_of(g, Some(memory))),
        io: root.filter(|_| full).map(io),
        network: root.filter(|_| full).and_then(network),
        fs: inputs.storage.map(|s| whole(&s.root, s.at)),
        runtime: inputs.storage.map(|s| RuntimeStats {
            image_fs: s.images.as_ref().map(usage),
            container_fs: s.layers_fs.as_ref().or(s.images.as_ref()).map(usage),
        }),
        rlimit: processes.filter(|_| full).map(|(maxpid, curproc)| Rlimit { time: inputs.now, maxpid, curproc }),
        swap: root.and_then(|g| swap_of(g, Some(swap))),
    };
    Summary { node, pods: pods(inputs) }
}

fn pods<'a>(inputs: &'a Inputs<'a>) -> Vec<PodStats<'a>> {
    let names = inputs.names;
    let mut by_pod: HashMap<usize, Parts<'a>> = HashMap::new();
    for group in &inputs.groups.all {
        match group.owner {
            Owner::Pod(at) => by_pod.entry(at).or_default().own = Some(group),
            Owner::Sandbox(at) => by_pod.entry(at).or_default().sandbox = Some(group),
            Owner::Container(at) => {
                if let Some(container) = names.containers.get(at) {
                    by_pod.entry(container.pod).or_default().containers.push((container, Some(group)));
                }
            }
            Owner::Other => {}
        }
    }
    for container in names.containers.iter().filter(|c| inputs.fallback.contains_key(&c.id)) {
        by_pod.entry(container.pod).or_default().containers.push((container, None));
    }
    let mut pods: Vec<_> = by_pod.into_iter().filter(|(_, parts)| !parts.containers.is_empty()).collect();
    pods.sort_by_key(|(at, _)| *at);
    pods.into_iter().filter_map(|(at, parts)| Some(pod(inputs, names.pods.get(at)?, &parts))).collect()
}

/// The groups of a pod.
#[derive(Default)]
struct Parts<'a> {
    own: Option<&'a Group>,
    sandbox: Option<&'a Group>,
    containers: Vec<(&'a ContainerName, Option<&'a Group>)>,
}

fn pod<'a>(inputs: &'a Inputs<'a>, name: &'a crate::names::PodName, parts: &Parts<'a>) -> PodStats<'a> {
    let full = inputs.storage.is_some();
    let containers: Vec<_> =
        parts.containers.iter().map(|(container, group)| one(inputs, &name.uid, container, *group)).collect();
    let volumes: &[Volume] = inputs.volumes.and_then(|v| v.get(&name.uid)).map_or(&[], Vec::as_slice);
    let processes: Vec<u64> = parts.containers.iter().filter_map(|(_, group)| (*group)?.processes).collect();
    PodStats {
        pod_ref: PodRef { name: &name.name, namespace: &name.namespace, uid: &name.uid },
        start_time: moment(name.created).unwrap_or(inputs.now),
        cpu: parts.own.map_or_else(|| sum_cpu(&containers), cpu),
        memory: parts.own.map_or_else(|| sum_memory(&containers), |g| memory_of(g, None)),
        io: parts.own.filter(|_| full).map(io),
        network: parts.sandbox.filter(|_| full).and_then(network),
        volumes: volumes
            .iter()
            .map(|volume| VolumeStats {
                fs: usage(&volume.usage),
                name: &volume.name,
                pvc_ref: volume.claim.as_ref().map(|name_| PvcRef { name: name_, namespace: &name.namespace }),
                health: volume.abnormal.map(|abnormal| VolumeHealth { abnormal }),
            })
            .collect(),
        ephemeral_storage: inputs.storage.map(|s| ephemeral(inputs, s, &name.uid, &containers, volumes)),
        process_stats: (full && !processes.is_empty()).then(|| ProcessStats { process_count: processes.iter().sum() }),
        swap: parts.own.and_then(|g| swap_of(g, None)),
        containers,
    }
}

fn one<'a>(
    inputs: &'a Inputs<'a>,
    uid: &str,
    container: &'a ContainerName,
    group: Option<&'a Group>,
) -> ContainerStats<'a> {
    let full = inputs.storage.is_some();
    let told = inputs.fallback.get(&container.id);
    let (cpu, memory, swap) = match (group, told) {
        (Some(group), _) => (cpu(group), memory_of(group, None), swap_of(group, None)),
        (None, Some(told)) => (told_cpu(told), told_memory(told), told_swap(told)),
        (None, None) => (None, None, None),
    };
    let storage = inputs.storage;
    ContainerStats {
        name: &container.name,
        start_time: moment(container.created).unwrap_or(inputs.now),
        cpu,
        memory,
        io: group.filter(|_| full).map(io),
        rootfs: storage.and_then(|s| s.layers.get(&container.id)).map(usage),
        logs: storage.and_then(|s| {
            let used = s.logs.get(&(uid.to_owned(), container.name.clone()))?;
            Some(within(&s.root, s.at, *used))
        }),
        swap,
    }
}

/// What a pod takes of the node's disk: writable layers, logs, volumes that end with it and its hosts file.
fn ephemeral(
    inputs: &Inputs<'_>,
    storage: &Storage,
    uid: &str,
    containers: &[ContainerStats<'_>],
    volumes: &[Volume],
) -> Fs {
    let of_containers = containers.iter().flat_map(|c| [c.rootfs, c.logs]).flatten();
    let of_volumes = volumes.iter().filter(|v| v.ephemeral).map(|v| usage(&v.usage));
    let hosts = storage.hosts.get(uid).map(|used| within(&storage.root, inputs.now, *used));
    let mut used = DiskUsage::default();
    for part in of_containers.chain(of_volumes).chain(hosts) {
        used.bytes += part.used_bytes.unwrap_or_default();
        used.inodes += part.inodes_used.unwrap_or_default();
    }
    within(&storage.root, storage.at, used)
}

fn cpu(group: &Group) -> Option<Cpu> {
    Some(Cpu {
        time: group.at,
        usage_nano_cores: group.nano_cores,
        usage_core_nano_seconds: Some(group.figures.cpu_ns?),
        psi: group.figures.pressure.cpu.map(super::Psi::from),
    })
}

/// `whole`: the limit of the node's own group, which has none.
fn memory_of(group: &Group, whole: Option<u64>) -> Option<Memory> {
    let MemoryFigures { usage, working_set, rss, page_faults, major_page_faults, limit, .. } = group.figures.memory?;
    Some(Memory {
        time: group.at,
        available_bytes: whole.or(limit).map(|limit| limit.saturating_sub(working_set)),
        usage_bytes: Some(usage),
        working_set_bytes: Some(working_set),
        rss_bytes: Some(rss),
        page_faults: Some(page_faults),
        major_page_faults: Some(major_page_faults),
        psi: group.figures.pressure.memory.map(super::Psi::from),
    })
}

fn io(group: &Group) -> Io {
    Io { time: group.at, psi: group.figures.pressure.io.map(super::Psi::from) }
}

/// `whole`: the swap of the node, for its own group.
fn swap_of(group: &Group, whole: Option<u64>) -> Option<Swap> {
    let memory = group.figures.memory.filter(|m| m.swap_counted || whole.is_some())?;
    Some(Swap {
        time: group.at,
        swap_available_bytes: whole.or(memory.swap_limit).map(|limit| limit.saturating_sub(memory.swap)),
        swap_usage_bytes: memory.swap,
    })
}

fn network(group: &Group) -> Option<Network<'_>> {
    let interfaces: Vec<_> = group
        .interfaces
        .as_ref()?
        .iter()
        .map(|i| Interface {
            name: &i.name,
            rx_bytes: i.received.bytes,
            rx_errors: i.received.errors,
            tx_bytes: i.sent.bytes,
            tx_errors: i.sent.errors,
        })
        .collect();
    let own = interfaces.iter().find(|i| i.name == OWN_INTERFACE).copied();
    Some(Network { time: group.at, own, interfaces })
}

/// A file system as a whole.
fn whole(fs: &FilesystemFigures, at: Timestamp) -> Fs {
    within(fs, at, DiskUsage { bytes: fs.used, inodes: fs.inodes_used })
}

/// What something uses of a file system.
fn within(fs: &FilesystemFigures, at: Timestamp, used: DiskUsage) -> Fs {
    usage(&Usage { at, used: Some(used.bytes), inodes_used: Some(used.inodes), fs: Some(*fs) })
}

fn usage(usage: &Usage) -> Fs {
    let fs = usage.fs.as_ref();
    Fs {
        time: usage.at,
        available_bytes: fs.map(|f| f.available),
        capacity_bytes: fs.map(|f| f.capacity),
        used_bytes: usage.used,
        inodes_free: fs.map(|f| f.inodes_free),
        inodes: fs.map(|f| f.inodes),
        inodes_used: usage.inodes_used,
    }
}

fn moment(ns: i64) -> Option<Timestamp> {
    Timestamp::from_nanosecond(i128::from(ns)).ok().filter(|_| ns > 0)
}

fn told_cpu(told: &v1::ContainerStats) -> Option<Cpu> {
    let cpu = told.cpu.as_ref()?;
    Some(Cpu {
        time: moment(cpu.timestamp)?,
        usage_nano_cores: cpu.usage_nano_cores.map(|v| v.value),
        usage_core_nano_seconds: cpu.usage_core_nano_seconds.map(|v| v.value),
        psi: None,
    })
}

fn told_memory(told: &v1::ContainerStats) -> Option<Memory> {
    let memory = told.memory.as_ref()?;
    Some(Memory {
        time: moment(memory.timestamp)?,
        available_bytes: memory.available_bytes.map(|v| v.value),
        usage_bytes: memory.usage_bytes.map(|v| v.value),
        working_set_bytes: memory.working_set_bytes.map(|v| v.value),
        rss_bytes: memory.rss_bytes.map(|v| v.value),
        page_faults: memory.page_faults.map(|v| v.value),
        major_page_faults: memory.major_page_faults.map(|v| v.value),
        psi: None,
    })
}

fn told_swap(told: &v1::ContainerStats) -> Option<Swap> {
    let swap = told.swap.as_ref()?;
    Some(Swap {
        time: moment(swap.timestamp)?,
        swap_available_bytes: swap.swap_available_bytes.map(|v| v.value),
        swap_usage_bytes: swap.swap_usage_bytes?.value,
    })
}

/// Without a group of its own (`cgroupsPerQOS: false`) a pod uses what its containers use.
fn sum_cpu(containers: &[ContainerStats<'_>]) -> Option<Cpu> {
    containers.iter().filter_map(|c| c.cpu).reduce(|a, b| Cpu {
        time: a.time.min(b.time),
        usage_nano_cores: both(a.usage_nano_cores, b.usage_nano_cores),
        usage_core_nano_seconds: both(a.usage_core_nano_seconds, b.usage_core_nano_seconds),
        psi: None,
    })
}

fn sum_memory(containers: &[ContainerStats<'_>]) -> Option<Memory> {
    let sum = containers.iter().filter_map(|c| c.memory).reduce(|a, b| Memory {
        time: a.time.min(b.time),
        available_bytes: a.available_bytes.zip(b.available_bytes).map(|(a, b)| a + b),
        usage_bytes: both(a.usage_bytes, b.usage_bytes),
        working_set_bytes: both(a.working_set_bytes, b.working_set_bytes),
        rss_bytes: both(a.rss_bytes, b.rss_bytes),
        page_faults: both(a.page_faults, b.page_faults),
        major_page_faults: both(a.major_page_faults, b.major_page_faults),
        psi: None,
    })?;
    Some(Memory { psi: None, ..sum })
}

fn both(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.saturating_add(b)),
        (a, b) => a.or(b),
    }
}
