//! What a kubelet on a stage is configured with, whichever program it is.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

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

/// A script in `dir` that starts the Go kubelet with the runtime's socket where its cAdvisor looks for it, in a mount namespace of its own.
/// Without, cAdvisor's series have no names of pods and containers, and it does not look at their networks.
///
/// # Errors
/// When the script cannot be written.
pub fn with_named_figures(program: &Path, socket: &Path, dir: &Path) -> io::Result<PathBuf> {
    let script = dir.join("kubelet");
    let text = format!(
        "#!/bin/sh\nexec unshare -m --propagation slave sh -c 'mount -t tmpfs t /run/containerd && touch /run/containerd/containerd.sock && \
         mount --bind {} /run/containerd/containerd.sock && exec {} \"$@\"' kubelet \"$@\"\n",
        socket.display(),
        program.display()
    );
    std::fs::write(&script, text)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    Ok(script)
}
