//! `cpu_manager_state`, version 2: who has CPUs of his own.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{dumped_map, object};
use crate::checkpoint::CheckpointError;
use crate::hash::{fnv1a_32, go_json_string};

/// File name under the root directory.
pub const CPUS: &str = "cpu_manager_state";

/// What is known of CPUs. Sets of CPUs are in the kernel's list form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuCheckpoint {
    /// `cpuManagerPolicy` of who wrote it.
    #[serde(default)]
    pub policy_name: String,
    /// The shared pool.
    #[serde(default)]
    pub default_cpu_set: String,
    /// By pod UID and container name.
    #[serde(default)]
    pub entries: BTreeMap<String, BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(flatten)]
    content: CpuCheckpoint,
    checksum: u64,
}

fn checksum(c: &CpuCheckpoint) -> u32 {
    let entries = dumped_map(c.entries.iter().map(|(pod, containers)| {
        format!("{pod}:{}", dumped_map(containers.iter().map(|(name, cpus)| format!("{name}:{cpus}"))))
    }));
    fnv1a_32(format!(
        "(*state.CPUManagerCheckpoint){{PolicyName:(string){} DefaultCPUSet:(string){} \
         Entries:(map[string]map[string]string){entries} Checksum:(checksum.Checksum)0}}",
        c.policy_name, c.default_cpu_set
    ))
}

/// The file's content.
pub fn encode_cpus(c: &CpuCheckpoint) -> Vec<u8> {
    let mut members = vec![
        format!("\"policyName\":{}", go_json_string(&c.policy_name)),
        format!("\"defaultCpuSet\":{}", go_json_string(&c.default_cpu_set)),
    ];
    if !c.entries.is_empty() {
        let entries = object(c.entries.iter().map(|(pod, containers)| {
            let containers =
                containers.iter().map(|(n, cpus)| format!("{}:{}", go_json_string(n), go_json_string(cpus)));
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
pub fn decode_cpus(bytes: &[u8]) -> Result<CpuCheckpoint, CheckpointError> {
    let File { content, checksum: found } = serde_json::from_slice(bytes).map_err(CheckpointError::Syntax)?;
    CheckpointError::check(found, checksum(&content))?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_go_writes_them() {
        let none = CpuCheckpoint { policy_name: "none".into(), ..CpuCheckpoint::default() };
        let entries = BTreeMap::from([("pod1".to_owned(), BTreeMap::from([("c1".to_owned(), "1".to_owned())]))]);
        let some = CpuCheckpoint { policy_name: "static".into(), default_cpu_set: "0,2-3".into(), entries };
        for (checkpoint, text) in [
            (none, r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#),
            (
                some,
                r#"{"policyName":"static","defaultCpuSet":"0,2-3","entries":{"pod1":{"c1":"1"}},"checksum":594981003}"#,
            ),
        ] {
            assert_eq!(String::from_utf8(encode_cpus(&checkpoint)).unwrap(), text);
            assert_eq!(decode_cpus(text.as_bytes()).unwrap(), checkpoint);
        }
        assert!(decode_cpus(br#"{"policyName":"static","defaultCpuSet":"","checksum":1353318690}"#).is_err());
    }
}
