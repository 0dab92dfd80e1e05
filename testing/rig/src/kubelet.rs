//! What a kubelet on a stage is configured with, whichever program it is.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

/// The KubeletConfiguration of a kubelet that works in `dir` (with `manifests`, `logs`), has the cgroup root `cgroup`, three free ports
/// of its own, and writes nothing to fixed places of the host. Anybody on this host may ask it anything;
/// [`crate::cluster::kubelet_config`] has the fields that change this.
///
/// # Errors
/// When the host gives no port.
pub fn config(socket: &Path, dir: &Path, cgroup: &str) -> io::Result<Value> {
    let [port, read_only, healthz] = crate::free_ports()?;
    Ok(json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "staticPodPath": dir.join("manifests"), "fileCheckFrequency": "1s", "podLogsDir": dir.join("logs"),
        "cgroupRoot": cgroup, "cgroupDriver": "cgroupfs", "failCgroupV1": false, "failSwapOn": false,
        "port": port, "readOnlyPort": read_only, "healthzPort": healthz,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"}, "imageGCHighThresholdPercent": 100, "makeIPTablesUtilChains": false,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
    }))
}
