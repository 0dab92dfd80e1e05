//! What an earlier agent wrote down of CPUs and memory.
//!
//! Unlike devices, which their plugins know too, CPUs and memory are nowhere else written down: a checkpoint that cannot be used, or that another
//! policy wrote, keeps the node from starting, as with Go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use decide::cpus::{CpuSet, Cpus};
use decide::memory::{self, Memory};
use manifest::checkpoint::CheckpointError;
use manifest::managers::{self as checkpoint, CpuCheckpoint, MemoryBlock, MemoryCheckpoint, MemoryNode, MemoryTable};
use model::quantity::{Format, Quantity};

use crate::config::Config;

pub(crate) async fn read<T: Send + 'static>(
    path: PathBuf,
    decode: fn(&[u8]) -> Result<T, CheckpointError>,
) -> Result<Option<T>, String> {
    let read = tokio::task::spawn_blocking(move || host::fsx::read_if_there(&path)).await;
    let Some(bytes) = read.map_err(|e| e.to_string())?.map_err(|e| e.full())? else { return Ok(None) };
    decode(&bytes).map(Some).map_err(|e| match e {
        CheckpointError::Corrupt { .. } => "checkpoint is corrupted".to_owned(),
        CheckpointError::Syntax(e) => e.to_string(),
    })
}

/// The way out.
fn drain(what: &str, path: &Path, why: &str) -> String {
    format!(
        "could not restore state from checkpoint: {why}, please drain this node and delete the {what} manager checkpoint file {:?} before restarting Kubelet",
        path.display().to_string()
    )
}

fn policy(configured: &str, written: &str) -> Result<(), String> {
    if configured == written {
        return Ok(());
    }
    Err(format!("configured policy {configured:?} differs from state checkpoint policy {written:?}"))
}

/// The book of CPUs; None: policy `none`.
pub(crate) async fn cpus(config: &Config) -> Result<Option<Cpus>, String> {
    let path = config.root.join(checkpoint::CPUS);
    let new = config.cpus.as_ref().map(|c| Cpus::new(config.cpu_topology(), c.options, &c.reserved, c.count));
    let new = new.transpose()?;
    let stands = |why: String| drain("CPU", &path, &why);
    let Some(found) = read(path.clone(), checkpoint::decode_cpus).await.map_err(stands)? else { return Ok(new) };
    policy(if new.is_some() { "static" } else { "none" }, &found.policy_name).map_err(stands)?;
    let Some(mut cpus) = new else { return Ok(None) };
    let shared = CpuSet::parse(&found.default_cpu_set)
        .map_err(|e| stands(format!("could not parse default cpu set {:?}: {e}", found.default_cpu_set)))?;
    let mut assignments = BTreeMap::new();
    for (pod, containers) in found.entries {
        let mut of_pod = BTreeMap::new();
        for (container, text) in containers {
            let set = CpuSet::parse(&text).map_err(|e| {
                stands(format!("could not parse cpuset {text:?} for container {container:?} in pod {pod:?}: {e}"))
            })?;
            of_pod.insert(container, set);
        }
        assignments.insert(pod, of_pod);
    }
    cpus.restore(shared, assignments)?;
    Ok(Some(cpus))
}

pub(crate) fn encode_cpus(cpus: Option<&Cpus>) -> Vec<u8> {
    let content = cpus.map_or_else(
        || CpuCheckpoint { policy_name: "none".into(), ..CpuCheckpoint::default() },
        |cpus| CpuCheckpoint {
            policy_name: "static".into(),
            default_cpu_set: cpus.shared().to_string(),
            entries: cpus
                .assignments()
                .iter()
                .map(|(pod, of)| (pod.clone(), of.iter().map(|(name, set)| (name.clone(), set.to_string())).collect()))
                .collect(),
        },
    );
    checkpoint::encode_cpus(&content)
}

/// The book of memory; None: policy `None`.
pub(crate) async fn memory(config: &Config) -> Result<Option<Memory>, String> {
    let path = config.root.join(checkpoint::MEMORY);
    let banks = config.banks();
    let new = match &config.memory {
        None => None,
        Some(c) => {
            let nodes: Vec<i64> = banks.keys().copied().collect();
            let show =
                |n: u64| Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), Format::BinarySI).to_string();
            memory::check_reserved(&nodes, &c.reserved, &c.whole, &show)?;
            Some(Memory::new(&banks, &c.reserved))
        }
    };
    let stands = |why: String| drain("memory", &path, &why);
    let Some(found) = read(path.clone(), checkpoint::decode_memory).await.map_err(stands)? else { return Ok(new) };
    policy(if new.is_some() { "Static" } else { "None" }, &found.policy_name).map_err(stands)?;
    let Some(mut memory) = new else { return Ok(None) };
    let table = |t: MemoryTable| memory::Table {
        total: t.total,
        system_reserved: t.system_reserved,
        allocatable: t.allocatable,
        reserved: t.reserved,
        free: t.free,
    };
    let node = |n: MemoryNode| memory::Node {
        assignments: n.number_of_assignments,
        tables: n.memory_map.into_iter().map(|(kind, t)| (kind, table(t))).collect(),
        group: n.cells,
    };
    let block = |b: MemoryBlock| memory::Block { nodes: b.numa_affinity, kind: b.kind, size: b.size };
    let of_pod = |of: BTreeMap<String, Vec<MemoryBlock>>| {
        of.into_iter().map(|(name, blocks)| (name, blocks.into_iter().map(block).collect())).collect()
    };
    memory.restore(
        found.machine_state.into_iter().map(|(id, n)| (id, node(n))).collect(),
        found.entries.into_iter().map(|(pod, of)| (pod, of_pod(of))).collect(),
    )?;
    Ok(Some(memory))
}

pub(crate) fn encode_memory(memory: Option<&Memory>) -> Vec<u8> {
    let Some(memory) = memory else {
        return checkpoint::encode_memory(&MemoryCheckpoint {
            policy_name: "None".into(),
            ..MemoryCheckpoint::default()
        });
    };
    let table = |t: &memory::Table| MemoryTable {
        total: t.total,
        system_reserved: t.system_reserved,
        allocatable: t.allocatable,
        reserved: t.reserved,
        free: t.free,
    };
    let node = |n: &memory::Node| MemoryNode {
        number_of_assignments: n.assignments,
        memory_map: n.tables.iter().map(|(kind, t)| (kind.clone(), table(t))).collect(),
        cells: n.group.clone(),
    };
    let block = |b: &memory::Block| MemoryBlock { numa_affinity: b.nodes.clone(), kind: b.kind.clone(), size: b.size };
    let of_pod = |of: &BTreeMap<String, Vec<memory::Block>>| {
        of.iter().map(|(name, blocks)| (name.clone(), blocks.iter().map(block).collect())).collect()
    };
    checkpoint::encode_memory(&MemoryCheckpoint {
        policy_name: "Static".into(),
        machine_state: memory.machine().iter().map(|(id, n)| (*id, node(n))).collect(),
        entries: memory.assignments().iter().map(|(pod, of)| (pod.clone(), of_pod(of))).collect(),
    })
}
