//! `kubelet_internal_checkpoint`: who has which devices.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::object;
use crate::checkpoint::CheckpointError;
use crate::hash::{fnv1a_32, go_json_string};

/// File name of the devices' checkpoint, in the directory of the device plugins' sockets.
pub const DEVICES: &str = "kubelet_internal_checkpoint";

/// Devices that one container has of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct DeviceEntry {
    /// UID of the pod.
    #[serde(rename = "PodUID", default)]
    pub pod: String,
    /// Name of the container.
    #[serde(rename = "ContainerName", default)]
    pub container: String,
    /// Name of the resource.
    #[serde(rename = "ResourceName", default)]
    pub resource: String,
    /// Ids by NUMA node; -1: no node.
    #[serde(rename = "DeviceIDs", default)]
    pub devices: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's ContainerAllocateResponse, base64.
    #[serde(rename = "AllocResp", default)]
    response: Option<String>,
}

impl DeviceEntry {
    /// An entry; `response` as it stood on the wire.
    pub fn new(
        pod: &str,
        container: &str,
        resource: &str,
        devices: &BTreeMap<i64, Vec<String>>,
        response: &[u8],
    ) -> Self {
        Self {
            pod: pod.to_owned(),
            container: container.to_owned(),
            resource: resource.to_owned(),
            devices: Some(devices.iter().map(|(node, ids)| (*node, Some(ids.clone()))).collect()),
            response: Some(STANDARD.encode(response)),
        }
    }

    /// The plugin's answer as it stood on the wire; None: it is not base64.
    pub fn response(&self) -> Option<Vec<u8>> {
        STANDARD.decode(self.response.as_deref().unwrap_or_default()).ok()
    }

    /// Ids by NUMA node.
    pub fn ids(&self) -> BTreeMap<i64, Vec<String>> {
        let all = self.devices.iter().flatten();
        all.map(|(node, ids)| (*node, ids.clone().unwrap_or_default())).collect()
    }

    fn json(&self) -> String {
        // Keys of JSON objects are text, and sorted as such.
        let by_text: Option<BTreeMap<String, &Option<Vec<String>>>> =
            self.devices.as_ref().map(|all| all.iter().map(|(node, ids)| (node.to_string(), ids)).collect());
        let devices = by_text.map_or("null".into(), |all| {
            object(all.iter().map(|(node, ids)| format!("{}:{}", go_json_string(node), list(ids.as_deref()))))
        });
        format!(
            "{{\"PodUID\":{},\"ContainerName\":{},\"ResourceName\":{},\"DeviceIDs\":{devices},\"AllocResp\":{}}}",
            go_json_string(&self.pod),
            go_json_string(&self.container),
            go_json_string(&self.resource),
            self.response.as_ref().map_or("null".into(), |text| go_json_string(text)),
        )
    }

    fn dump(&self) -> String {
        let devices = self.devices.as_ref().map_or("<nil>".into(), |all| {
            let all: Vec<String> = all.iter().map(|(node, ids)| format!("{node}:{}", dumped(ids.as_deref()))).collect();
            format!("map[{}]", all.join(" "))
        });
        let bytes = self.response.as_ref().map_or("<nil>".into(), |_| {
            let bytes = self.response().unwrap_or_default();
            format!("[{}]", bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" "))
        });
        format!(
            "{{PodUID:(string){} ContainerName:(string){} ResourceName:(string){} DeviceIDs:(checkpoint.DevicesPerNUMA){devices} \
             AllocResp:([]uint8){bytes}}}",
            self.pod, self.container, self.resource
        )
    }
}

/// What is known of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCheckpoint {
    /// Who has which.
    pub entries: Vec<DeviceEntry>,
    /// Healthy devices by resource.
    pub registered: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct DeviceFile {
    #[serde(rename = "Data")]
    data: DeviceData,
    #[serde(rename = "Checksum")]
    checksum: u64,
}

#[derive(Deserialize)]
struct DeviceData {
    #[serde(rename = "PodDeviceEntries", default)]
    entries: Option<Vec<DeviceEntry>>,
    #[serde(rename = "RegisteredDevices", default)]
    registered: Option<BTreeMap<String, Option<Vec<String>>>>,
}

impl DeviceData {
    fn json(&self) -> String {
        let entries = self.entries.as_ref().map_or("null".into(), |all| {
            format!("[{}]", all.iter().map(DeviceEntry::json).collect::<Vec<_>>().join(","))
        });
        let registered = self.registered.as_ref().map_or("null".into(), |all| {
            object(all.iter().map(|(name, ids)| format!("{}:{}", go_json_string(name), list(ids.as_deref()))))
        });
        format!("{{\"PodDeviceEntries\":{entries},\"RegisteredDevices\":{registered}}}")
    }

    fn checksum(&self) -> u32 {
        let entries = self.entries.as_ref().map_or("<nil>".into(), |all| {
            format!("[{}]", all.iter().map(DeviceEntry::dump).collect::<Vec<_>>().join(" "))
        });
        let registered = self.registered.as_ref().map_or("<nil>".into(), |all| {
            let all: Vec<String> = all.iter().map(|(name, ids)| format!("{name}:{}", dumped(ids.as_deref()))).collect();
            format!("map[{}]", all.join(" "))
        });
        fnv1a_32(format!(
            "(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries} \
             RegisteredDevices:(map[string][]string){registered}}}"
        ))
    }
}

/// The file's content.
pub fn encode_devices(checkpoint: &DeviceCheckpoint) -> Vec<u8> {
    let data = DeviceData {
        entries: Some(checkpoint.entries.clone()).filter(|all| !all.is_empty()),
        registered: Some(checkpoint.registered.iter().map(|(name, ids)| (name.clone(), Some(ids.clone()))).collect()),
    };
    format!("{{\"Data\":{},\"Checksum\":{}}}", data.json(), data.checksum()).into_bytes()
}

/// Reads a file's content.
///
/// # Errors
/// [`CheckpointError`]: it is not JSON of this form, or was changed since it was written.
pub fn decode_devices(bytes: &[u8]) -> Result<DeviceCheckpoint, CheckpointError> {
    let DeviceFile { data, checksum } = serde_json::from_slice(bytes).map_err(CheckpointError::Syntax)?;
    CheckpointError::check(checksum, data.checksum())?;
    let registered = data.registered.unwrap_or_default();
    Ok(DeviceCheckpoint {
        entries: data.entries.unwrap_or_default(),
        registered: registered.into_iter().map(|(name, ids)| (name, ids.unwrap_or_default())).collect(),
    })
}

fn list(ids: Option<&[String]>) -> String {
    ids.map_or("null".into(), |ids| {
        format!("[{}]", ids.iter().map(|id| go_json_string(id)).collect::<Vec<_>>().join(","))
    })
}

fn dumped(ids: Option<&[String]>) -> String {
    ids.map_or("<nil>".into(), |ids| format!("[{}]", ids.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c1","ResourceName":"example.com/gpu","DeviceIDs":{"0":["d0"]},"AllocResp":"AQI="}],"RegisteredDevices":{"example.com/gpu":["d0"]}},"Checksum":2734589959}"#;

    #[test]
    fn devices_as_go_writes_them() {
        let devices = BTreeMap::from([(0, vec!["d0".to_owned()])]);
        let checkpoint = DeviceCheckpoint {
            entries: vec![DeviceEntry::new("u1", "c1", "example.com/gpu", &devices, &[1, 2])],
            registered: BTreeMap::from([("example.com/gpu".into(), vec!["d0".into()])]),
        };
        assert_eq!(String::from_utf8(encode_devices(&checkpoint)).unwrap(), ONE);
        let read = decode_devices(ONE.as_bytes()).unwrap();
        assert_eq!(read, checkpoint);
        assert_eq!(read.entries[0].response().unwrap(), [1, 2]);
        assert_eq!(read.entries[0].ids(), devices);
    }

    /// What Go's package writes for nothing, for resources without devices, and for empty and absent lists.
    const MORE: [&str; 4] = [
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}"#,
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"a.b/c":[],"a.b/d":["x","y"]}},"Checksum":3119557749}"#,
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c1","ResourceName":"a.b/d","DeviceIDs":{"-1":["x"],"10":["y"],"2":["y"]},"AllocResp":""},{"PodUID":"u1","ContainerName":"c2","ResourceName":"a.b/d","DeviceIDs":{},"AllocResp":null}],"RegisteredDevices":null},"Checksum":1548868960}"#,
        r#"{"Data":{"PodDeviceEntries":[],"RegisteredDevices":null},"Checksum":3252601439}"#,
    ];

    #[test]
    fn devices_as_go_has_them() {
        for text in MORE {
            let file: DeviceFile = serde_json::from_str(text).unwrap();
            let again = format!("{{\"Data\":{},\"Checksum\":{}}}", file.data.json(), file.data.checksum());
            assert_eq!(again, text);
        }
        for text in &MORE[..2] {
            let again = encode_devices(&decode_devices(text.as_bytes()).unwrap());
            assert_eq!(String::from_utf8(again).unwrap(), *text);
        }
    }

    #[test]
    fn a_changed_one_is_noticed() {
        let changed = ONE.replace("d0", "d1");
        assert!(matches!(decode_devices(changed.as_bytes()), Err(CheckpointError::Corrupt { .. })));
        assert!(matches!(decode_devices(b"{}"), Err(CheckpointError::Syntax(_))));
    }
}
