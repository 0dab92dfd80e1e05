//! `memory_manager_state`, version 1: who has memory of which NUMA nodes.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{dumped_map, object};
use crate::checkpoint::CheckpointError;
use crate::hash::{fnv1a_32, go_json_string};

/// File name under the root directory.
pub const MEMORY: &str = "memory_manager_state";

/// Bytes of one kind of memory of a NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryTable {
    /// All.
    pub total: u64,
    /// The system's.
    pub system_reserved: u64,
    /// What containers may have.
    pub allocatable: u64,
    /// What they have.
    pub reserved: u64,
    /// What they do not have.
    pub free: u64,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryNode {
    /// Blocks on it.
    pub number_of_assignments: usize,
    /// By kind of memory.
    pub memory_map: BTreeMap<String, MemoryTable>,
    /// The group of nodes that it is in.
    pub cells: Vec<i64>,
}

/// Memory of one kind that a container has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryBlock {
    /// NUMA nodes that it comes from.
    pub numa_affinity: Vec<i64>,
    /// Kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// Bytes.
    pub size: u64,
}

/// What is known of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryCheckpoint {
    /// `memoryManagerPolicy` of who wrote it.
    pub policy_name: String,
    /// By NUMA node.
    pub machine_state: BTreeMap<i64, MemoryNode>,
    /// By pod UID and container name.
    pub entries: BTreeMap<String, BTreeMap<String, Vec<MemoryBlock>>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "policyName", default)]
    policy_name: String,
    #[serde(rename = "machineState", default)]
    machine_state: BTreeMap<i64, MemoryNode>,
    #[serde(default)]
    entries: BTreeMap<String, BTreeMap<String, Vec<MemoryBlock>>>,
    checksum: u64,
}

fn numbers(list: &[i64], between: &str) -> String {
    list.iter().map(i64::to_string).collect::<Vec<_>>().join(between)
}

fn checksum(c: &MemoryCheckpoint) -> u32 {
    let table = |(kind, t): (&String, &MemoryTable)| {
        format!(
            "{kind}:<*>{{TotalMemSize:(uint64){} SystemReserved:(uint64){} Allocatable:(uint64){} Reserved:(uint64){} Free:(uint64){}}}",
            t.total, t.system_reserved, t.allocatable, t.reserved, t.free
        )
    };
    let machine = dumped_map(c.machine_state.iter().map(|(id, node)| {
        format!(
            "{id}:<*>{{NumberOfAssignments:(int){} MemoryMap:(map[v1.ResourceName]*state.MemoryTable){} Cells:([]int)[{}]}}",
            node.number_of_assignments,
            dumped_map(node.memory_map.iter().map(table)),
            numbers(&node.cells, " ")
        )
    }));
    let block = |b: &MemoryBlock| {
        let affinity = numbers(&b.numa_affinity, " ");
        format!("{{NUMAAffinity:([]int)[{affinity}] Type:(v1.ResourceName){} Size:(uint64){}}}", b.kind, b.size)
    };
    let entries = dumped_map(c.entries.iter().map(|(pod, containers)| {
        let containers = containers
            .iter()
            .map(|(name, blocks)| format!("{name}:[{}]", blocks.iter().map(block).collect::<Vec<_>>().join(" ")));
        format!("{pod}:{}", dumped_map(containers))
    }));
    fnv1a_32(format!(
        "(*state.MemoryManagerCheckpoint){{PolicyName:(string){} MachineState:(state.NUMANodeMap){machine} \
         Entries:(state.ContainerMemoryAssignments){entries} Checksum:(checksum.Checksum)0}}",
        c.policy_name
    ))
}

/// The file's content.
pub fn encode_memory(c: &MemoryCheckpoint) -> Vec<u8> {
    let table = |(kind, t): (&String, &MemoryTable)| {
        format!(
            "{}:{{\"total\":{},\"systemReserved\":{},\"allocatable\":{},\"reserved\":{},\"free\":{}}}",
            go_json_string(kind),
            t.total,
            t.system_reserved,
            t.allocatable,
            t.reserved,
            t.free
        )
    };
    // Keys of JSON objects are text, and sorted as such.
    let by_text: BTreeMap<String, &MemoryNode> = c.machine_state.iter().map(|(id, n)| (id.to_string(), n)).collect();
    let machine = object(by_text.iter().map(|(id, node)| {
        format!(
            "\"{id}\":{{\"numberOfAssignments\":{},\"memoryMap\":{},\"cells\":[{}]}}",
            node.number_of_assignments,
            object(node.memory_map.iter().map(table)),
            numbers(&node.cells, ",")
        )
    }));
    let block = |b: &MemoryBlock| {
        let affinity = numbers(&b.numa_affinity, ",");
        format!("{{\"numaAffinity\":[{affinity}],\"type\":{},\"size\":{}}}", go_json_string(&b.kind), b.size)
    };
    let mut members =
        vec![format!("\"policyName\":{}", go_json_string(&c.policy_name)), format!("\"machineState\":{machine}")];
    if !c.entries.is_empty() {
        let entries = object(c.entries.iter().map(|(pod, containers)| {
            let containers = containers.iter().map(|(name, blocks)| {
                let blocks: Vec<String> = blocks.iter().map(block).collect();
                format!("{}:[{}]", go_json_string(name), blocks.join(","))
            });
            format!("{}:{}", go_json_string(pod), object(containers))
        }));
        members.push(format!("\"entries\":{entries}"));
    }
    members.push(format!("\"checksum\":{}", checksum(c)));
    object(members.into_iter()).into_bytes()
}

/// Reads a file's content.
///
/// # Errors
/// [`CheckpointError`]: it is not JSON of this form, or was changed since it was written.
pub fn decode_memory(bytes: &[u8]) -> Result<MemoryCheckpoint, CheckpointError> {
    let file: File = serde_json::from_slice(bytes).map_err(CheckpointError::Syntax)?;
    let (found, policy_name) = (file.checksum, file.policy_name);
    let content = MemoryCheckpoint { policy_name, machine_state: file.machine_state, entries: file.entries };
    CheckpointError::check(found, checksum(&content))?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_go_writes_them() {
        let none = r#"{"policyName":"None","machineState":{},"checksum":4236770233}"#;
        let table = MemoryTable { total: 8, system_reserved: 1, allocatable: 7, reserved: 2, free: 5 };
        let node = MemoryNode {
            number_of_assignments: 1,
            memory_map: BTreeMap::from([("memory".into(), table)]),
            cells: vec![0],
        };
        let block = MemoryBlock { numa_affinity: vec![0], kind: "memory".into(), size: 2 };
        let some = MemoryCheckpoint {
            policy_name: "Static".into(),
            machine_state: BTreeMap::from([(0, node)]),
            entries: BTreeMap::from([("pod1".into(), BTreeMap::from([("c1".into(), vec![block])]))]),
        };
        for (checkpoint, text) in [
            (MemoryCheckpoint { policy_name: "None".into(), ..MemoryCheckpoint::default() }, none),
            (
                some,
                r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":1,"memoryMap":{"memory":{"total":8,"systemReserved":1,"allocatable":7,"reserved":2,"free":5}},"cells":[0]}},"entries":{"pod1":{"c1":[{"numaAffinity":[0],"type":"memory","size":2}]}},"checksum":3543818546}"#,
            ),
        ] {
            assert_eq!(String::from_utf8(encode_memory(&checkpoint)).unwrap(), text);
            assert_eq!(decode_memory(text.as_bytes()).unwrap(), checkpoint);
        }
        assert!(decode_memory(none.replace("None", "Static").as_bytes()).is_err());
    }
}
