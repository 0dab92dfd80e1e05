//! The files `allocated_pods_state` and `actuated_pods_state`: which resources each container was given.
//!
//! Both kubelets read and write them, so the bytes are the same: the data is a string of JSON within JSON, with a checksum over it.

use std::collections::BTreeMap;

pub use model::allocation::PodAllocation;
use model::api::{self, ResourceRequirements};
use model::quantity::Quantity;
use serde::{Deserialize, Serialize};

use crate::hash::{go_json_string, string_checksum};

/// Allocations by pod UID.
pub type Allocations = BTreeMap<String, PodAllocation>;

/// A checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It is not the JSON that it should be.
    #[error("read checkpoint")]
    Syntax(#[source] serde_json::Error),
    /// Its checksum does not fit its data.
    #[error("checkpoint is corrupted: checksum {found}, data has {wanted}")]
    Corrupt {
        /// In the file.
        found: u64,
        /// Of the data in the file.
        wanted: u32,
    },
}

impl CheckpointError {
    /// Compares a file's checksum with that of its data.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupt`]: it was changed since it was written.
    pub(crate) fn check(found: u64, wanted: u32) -> Result<(), Self> {
        if found == u64::from(wanted) { Ok(()) } else { Err(Self::Corrupt { found, wanted }) }
    }
}

#[derive(Deserialize)]
struct File {
    data: String,
    checksum: u64,
}

#[derive(Deserialize)]
struct Data {
    #[serde(default)]
    entries: Option<BTreeMap<String, Entry>>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(default)]
    container_resources: Option<BTreeMap<String, ResourceRequirements>>,
    #[serde(default)]
    pod_level_resources: Option<ResourceRequirements>,
}

/// The file's content.
pub fn encode_allocations(allocations: &Allocations) -> Vec<u8> {
    let data = data_text(allocations);
    format!("{{\"data\":{},\"checksum\":{}}}", go_json_string(&data), string_checksum(&data)).into_bytes()
}

/// Reads a file's content.
///
/// # Errors
/// [`CheckpointError`]: it is not JSON of this form, or was changed since it was written.
pub fn decode_allocations(bytes: &[u8]) -> Result<Allocations, CheckpointError> {
    let File { data, checksum } = serde_json::from_slice(bytes).map_err(CheckpointError::Syntax)?;
    CheckpointError::check(checksum, string_checksum(&data))?;
    let data: Data = serde_json::from_str(&data).map_err(CheckpointError::Syntax)?;
    let pod = |e: Entry| PodAllocation {
        containers: e.container_resources.unwrap_or_default(),
        pod_level: e.pod_level_resources,
    };
    Ok(data.entries.unwrap_or_default().into_iter().map(|(uid, entry)| (uid, pod(entry))).collect())
}

fn data_text(allocations: &Allocations) -> String {
    if allocations.is_empty() {
        return "{}".into();
    }
    let pods = allocations.iter().map(|(uid, pod)| {
        let containers = pod.containers.iter().map(|(name, r)| format!("{}:{}", go_json_string(name), requirements(r)));
        let pod_level = pod.pod_level.as_ref().map_or("null".into(), requirements);
        format!(
            "{}:{{\"ContainerResources\":{},\"PodLevelResources\":{pod_level}}}",
            go_json_string(uid),
            object(containers)
        )
    });
    format!("{{\"entries\":{}}}", object(pods))
}

fn object(members: impl Iterator<Item = String>) -> String {
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

/// Go's JSON of resources: limits, requests, claims; what is empty is left out.
pub fn requirements(r: &ResourceRequirements) -> String {
    let list = |list: &BTreeMap<String, api::Quantity>| {
        object(list.iter().map(|(name, q)| {
            let text = Quantity::of(q).map_or_else(|_| q.0.clone(), |q| q.to_string());
            format!("{}:{}", go_json_string(name), go_json_string(&text))
        }))
    };
    let mut members = Vec::new();
    if let Some(limits) = r.limits.as_ref().filter(|l| !l.is_empty()) {
        members.push(format!("\"limits\":{}", list(limits)));
    }
    if let Some(requests) = r.requests.as_ref().filter(|l| !l.is_empty()) {
        members.push(format!("\"requests\":{}", list(requests)));
    }
    if let Some(claims) = r.claims.as_ref().filter(|c| !c.is_empty()) {
        let claims: Vec<String> = claims
            .iter()
            .map(|c| match c.request.as_deref().filter(|r| !r.is_empty()) {
                Some(request) => {
                    format!("{{\"name\":{},\"request\":{}}}", go_json_string(&c.name), go_json_string(request))
                }
                None => format!("{{\"name\":{}}}", go_json_string(&c.name)),
            })
            .collect();
        members.push(format!("\"claims\":[{}]", claims.join(",")));
    }
    object(members.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"{"data":"{\"entries\":{\"u1\":{\"ContainerResources\":{\"c\":{\"requests\":{\"cpu\":\"100m\"}}},\"PodLevelResources\":null}}}","checksum":1138078487}"#;
    const NONE: &str = r#"{"data":"{}","checksum":694314937}"#;

    fn one() -> Allocations {
        let requests = BTreeMap::from([("cpu".to_string(), api::Quantity("0.1".into()))]);
        let resources = ResourceRequirements { requests: Some(requests), ..ResourceRequirements::default() };
        let pod = PodAllocation { containers: BTreeMap::from([("c".into(), resources)]), pod_level: None };
        BTreeMap::from([("u1".into(), pod)])
    }

    #[test]
    fn writes_what_go_writes() {
        assert_eq!(String::from_utf8(encode_allocations(&one())).unwrap(), ONE);
        assert_eq!(String::from_utf8(encode_allocations(&Allocations::new())).unwrap(), NONE);
    }

    #[test]
    fn reads_what_go_writes() {
        let got = decode_allocations(ONE.as_bytes()).unwrap();
        assert_eq!(got["u1"].containers["c"].requests.as_ref().unwrap()["cpu"].0, "100m");
        assert_eq!(got["u1"].pod_level, None);
        assert!(decode_allocations(NONE.as_bytes()).unwrap().is_empty());
        let back = decode_allocations(&encode_allocations(&got)).unwrap();
        assert_eq!(back, got);
    }

    #[test]
    fn notices_changes() {
        let changed = ONE.replace("100m", "200m");
        assert!(matches!(
            decode_allocations(changed.as_bytes()),
            Err(CheckpointError::Corrupt { found: 1_138_078_487, .. })
        ));
        assert!(matches!(decode_allocations(b"{"), Err(CheckpointError::Syntax(_))));
    }
}
