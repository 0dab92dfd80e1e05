//! `dra_manager_state`: resource claims that pods of this node use, and what their drivers made of them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::object;
use crate::checkpoint::CheckpointError;
use crate::hash::go_json_string;

/// File name under the root directory.
pub const CLAIMS: &str = "dra_manager_state";

const KIND: &str = "DRACheckpoint";
const API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ClaimDevice {
    /// Pool.
    pub pool_name: String,
    /// Name.
    pub device_name: String,
    /// Share.
    #[serde(rename = "ShareID")]
    pub share_id: Option<String>,
    /// Requests that it is for.
    pub request_names: Option<Vec<String>>,
    /// CDI names.
    #[serde(rename = "CDIDeviceIDs")]
    pub cdi_device_ids: Option<Vec<String>>,
}

/// What a driver made of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ClaimDriver {
    /// Its devices; None: it did not answer yet.
    pub devices: Option<Vec<ClaimDevice>>,
}

/// A claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ClaimEntry {
    /// UID.
    #[serde(rename = "ClaimUID")]
    pub claim_uid: String,
    /// Name.
    pub claim_name: String,
    /// Namespace.
    pub namespace: String,
    /// UIDs of the pods that use it.
    #[serde(rename = "PodUIDs")]
    pub pods: Option<BTreeMap<String, serde_json::Value>>,
    /// By driver.
    pub driver_state: Option<BTreeMap<String, ClaimDriver>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: String,
    #[serde(rename = "Checksum")]
    checksum: u64,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "ClaimInfoStateList", default)]
    claims: Option<Vec<ClaimEntry>>,
}

fn list<T>(items: Option<&Vec<T>>, one: impl Fn(&T) -> String) -> String {
    items.map_or("null".into(), |all| format!("[{}]", all.iter().map(one).collect::<Vec<_>>().join(",")))
}

fn texts(items: Option<&Vec<String>>) -> String {
    list(items, |text| go_json_string(text))
}

fn device(d: &ClaimDevice) -> String {
    format!(
        "{{\"PoolName\":{},\"DeviceName\":{},\"ShareID\":{},\"RequestNames\":{},\"CDIDeviceIDs\":{}}}",
        go_json_string(&d.pool_name),
        go_json_string(&d.device_name),
        d.share_id.as_ref().map_or("null".into(), |id| go_json_string(id)),
        texts(d.request_names.as_ref()),
        texts(d.cdi_device_ids.as_ref())
    )
}

fn entry(e: &ClaimEntry) -> String {
    let pods = e
        .pods
        .as_ref()
        .map_or("null".into(), |pods| object(pods.keys().map(|uid| format!("{}:{{}}", go_json_string(uid)))));
    let drivers =
        e.driver_state.as_ref().map_or("null".into(), |drivers| {
            object(drivers.iter().map(|(name, d)| {
                format!("{}:{{\"Devices\":{}}}", go_json_string(name), list(d.devices.as_ref(), device))
            }))
        });
    format!(
        "{{\"ClaimUID\":{},\"ClaimName\":{},\"Namespace\":{},\"PodUIDs\":{pods},\"DriverState\":{drivers}}}",
        go_json_string(&e.claim_uid),
        go_json_string(&e.claim_name),
        go_json_string(&e.namespace)
    )
}

/// The file's content.
pub fn encode_claims(claims: &[ClaimEntry]) -> Vec<u8> {
    let claims: Vec<String> = claims.iter().map(entry).collect();
    let data = format!(
        "{{\"kind\":\"{KIND}\",\"apiVersion\":\"{API_VERSION}\",\"ClaimInfoStateList\":[{}]}}",
        claims.join(",")
    );
    format!("{{\"Data\":{},\"Checksum\":{}}}", go_json_string(&data), crc32fast::hash(data.as_bytes())).into_bytes()
}

/// Reads a file's content.
///
/// # Errors
/// [`CheckpointError`]: it is not JSON of this form, or was changed since it was written.
pub fn decode_claims(bytes: &[u8]) -> Result<Vec<ClaimEntry>, CheckpointError> {
    let File { data, checksum: found } = serde_json::from_slice(bytes).map_err(CheckpointError::Syntax)?;
    CheckpointError::check(found, crc32fast::hash(data.as_bytes()))?;
    let data: Data = serde_json::from_str(&data).map_err(CheckpointError::Syntax)?;
    Ok(data.claims.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[]}","Checksum":2361995144}"#;
    const ONE: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"cu\",\"ClaimName\":\"x\",\"Namespace\":\"ns\",\"PodUIDs\":{\"p1\":{},\"p2\":{}},\"DriverState\":{\"a.example.com\":{\"Devices\":[{\"PoolName\":\"n\",\"DeviceName\":\"d\",\"ShareID\":null,\"RequestNames\":[\"r\"],\"CDIDeviceIDs\":[\"v/c=\\u003c1\\u003e\"]},{\"PoolName\":\"n\",\"DeviceName\":\"e\",\"ShareID\":\"s1\",\"RequestNames\":null,\"CDIDeviceIDs\":null}]},\"b.example.com\":{\"Devices\":null}}}]}","Checksum":2295169311}"#;

    #[test]
    fn as_go_writes_them() {
        for text in [NONE, ONE] {
            let read = decode_claims(text.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(encode_claims(&read)).unwrap(), text);
        }
        let one = &decode_claims(ONE.as_bytes()).unwrap()[0];
        assert_eq!(one.driver_state.as_ref().unwrap()["a.example.com"].devices.as_ref().unwrap().len(), 2);
        assert!(decode_claims(ONE.replace("p1", "p3").as_bytes()).is_err());
    }
}
