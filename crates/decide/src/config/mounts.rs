//! Mounts and block devices of a container.

use std::collections::BTreeSet;

use cri_api::v1;
use model::api::VolumeMount;
use model::pod::{ContainerEntry, DesiredPod};

use super::env::{self, Variables};
use super::error::{ConfigError, Reason};
use super::expand::expand;
use super::facts::{ContainerFacts, VolumeSource};
use super::go_text::quote;

const HOSTS: &str = "/etc/hosts";

/// True when a container mounts the volume or uses it as a block device. Go leaves all others alone, whatever they name.
pub fn volume_is_used(pod: &DesiredPod, volume: &str) -> bool {
    pod.containers().any(|c| {
        c.spec.volume_mounts.iter().flatten().any(|m| m.name == volume)
            || c.spec.volume_devices.iter().flatten().any(|d| d.name == volume)
    })
}

/// A subPath that must be made ready before the container: opened (or made, with the volume's mode) without following links out of the
/// volume, and bound to `pods/UID/volume-subpaths/VOLUME/CONTAINER/INDEX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubPath {
    /// Index in `volumeMounts`.
    pub index: usize,
    /// Name in `spec.volumes`.
    pub volume: String,
    /// Host path of the volume.
    pub root: String,
    /// Relative path below it, with its variables expanded.
    pub path: String,
}

/// The message when a subPath cannot be made ready; details stay in the log, since they tell of the host's files. `step`: "create" for
/// a directory that could not be made, else "prepare".
pub fn sub_path_error(step: &str, volume_mount: &str, container: &str) -> String {
    let what = if step == "create" { "subPath directory" } else { "subPath" };
    format!("failed to {step} {what} for volumeMount {} of container {}", quote(volume_mount), quote(container))
}

/// The container's subPaths on volumes of the host. What is made of them goes into [`ContainerFacts::sub_path_targets`].
///
/// # Errors
/// As [`super::container_config`], for the variables and mounts that a subPath involves.
pub fn sub_paths(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
) -> Result<Vec<SubPath>, ConfigError> {
    let mounts = container.spec.volume_mounts.as_deref().unwrap_or_default();
    let wanted = |m: &VolumeMount| {
        !m.sub_path.as_deref().unwrap_or_default().is_empty()
            || !m.sub_path_expr.as_deref().unwrap_or_default().is_empty()
    };
    if !mounts.iter().any(wanted) {
        return Ok(Vec::new());
    }
    let vars = env::variables(pod, container, facts)?;
    let mut out = Vec::new();
    for (index, mount) in mounts.iter().enumerate() {
        let path = sub_path(mount, &vars, facts)?;
        let volume = volume(mount, container, facts)?;
        if let (false, VolumeSource::HostPath(root)) = (path.is_empty(), &volume.source) {
            out.push(SubPath { index, volume: mount.name.clone(), root: root.clone(), path });
        }
    }
    Ok(out)
}

/// The expanded subPath; empty when there is none.
fn sub_path(mount: &VolumeMount, vars: &Variables, facts: &ContainerFacts<'_>) -> Result<String, ConfigError> {
    let mut path = mount.sub_path.clone().unwrap_or_default();
    if let Some(expr) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        let mut missing = BTreeSet::new();
        path = expand(expr, |name| {
            let plugin = facts.devices.envs.iter().rev().find(|(n, _)| n == name).map(|(_, v)| v);
            let value = vars.get(name).or(plugin).cloned().unwrap_or_default();
            if value.is_empty() {
                missing.insert(name.to_string());
            }
            Some(value)
        });
        if !missing.is_empty() {
            let names: Vec<_> = missing.into_iter().collect();
            return Err(ConfigError::container(format!("missing value for {}", names.join(", "))));
        }
    }
    if path.starts_with('/') {
        return Err(ConfigError::container(format!("error SubPath `{path}` must not be an absolute path")));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(ConfigError::container(format!("unable to provision SubPath `{path}`: must not contain '..'")));
    }
    Ok(path)
}

fn volume<'a>(
    mount: &VolumeMount,
    container: ContainerEntry<'_>,
    facts: &'a ContainerFacts<'_>,
) -> Result<&'a super::VolumeFact, ConfigError> {
    facts.volumes.get(&mount.name).ok_or_else(|| {
        ConfigError::container(format!(
            "cannot find volume {} to mount into container {}",
            quote(&mount.name),
            quote(&container.spec.name)
        ))
    })
}

/// True when the container gets the pod's hosts file: the pod has an address or uses the host's network, and no volume is mounted there.
pub fn needs_hosts_file(pod: &DesiredPod, container: ContainerEntry<'_>, pod_ips: &[String]) -> bool {
    (!pod_ips.is_empty() || pod.host_network())
        && !container.spec.volume_mounts.iter().flatten().any(|m| m.mount_path == HOSTS)
}

/// Mounts: of device plugins, `volumeMounts` in order, hosts file, termination message file.
pub(super) fn mounts(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
    vars: &Variables,
) -> Result<Vec<v1::Mount>, ConfigError> {
    let mut out = facts.devices.mounts.clone();
    for (index, mount) in container.spec.volume_mounts.iter().flatten().enumerate() {
        out.push(volume_mount(container, facts, vars, index, mount)?);
    }
    if needs_hosts_file(pod, container, &facts.pod_ips) {
        let Some(file) = &facts.hosts_file else {
            return Err(ConfigError::missing(Reason::CreateContainerConfig, "hosts file"));
        };
        out.push(agent_file(HOSTS, file, facts));
    }
    let message_path = container.spec.termination_message_path.as_deref().unwrap_or_default();
    if let (false, Some(file)) = (message_path.is_empty(), &facts.termination_log) {
        out.push(agent_file(message_path, file, facts));
    }
    Ok(out)
}

/// A file of the agent's own.
fn agent_file(path: &str, file: &str, facts: &ContainerFacts<'_>) -> v1::Mount {
    v1::Mount {
        container_path: absolute(path),
        host_path: file.into(),
        selinux_relabel: facts.node.selinux.is_some(),
        ..Default::default()
    }
}

fn volume_mount(
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
    vars: &Variables,
    index: usize,
    mount: &VolumeMount,
) -> Result<v1::Mount, ConfigError> {
    let volume = volume(mount, container, facts)?;
    let sub_path = sub_path(mount, vars, facts)?;
    let mut out = v1::Mount {
        container_path: absolute(&mount.mount_path),
        readonly: mount.read_only == Some(true) || volume.read_only,
        selinux_relabel: volume.selinux_relabel && facts.node.selinux.is_some(),
        propagation: propagation(mount)? as i32,
        recursive_read_only: recursive_read_only(mount, facts.recursive_read_only)
            .map_err(|e| ConfigError::container(format!("failed to resolve recursive read-only mode: {e}")))?,
        ..Default::default()
    };
    match &volume.source {
        VolumeSource::Image(image) => {
            out.image = Some(image.clone());
            out.image_sub_path = sub_path;
        }
        VolumeSource::HostPath(path) if sub_path.is_empty() => out.host_path.clone_from(path),
        VolumeSource::HostPath(_) => {
            let Some(target) = facts.sub_path_targets.get(&index) else {
                let fact = format!("subPath target of volumeMount \"{}\"", mount.name);
                return Err(ConfigError::missing(Reason::CreateContainerConfig, fact));
            };
            out.host_path.clone_from(target);
        }
    }
    Ok(out)
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.into() } else { format!("/{path}") }
}

fn propagation(mount: &VolumeMount) -> Result<v1::MountPropagation, ConfigError> {
    match mount.mount_propagation.as_deref() {
        None | Some("None") => Ok(v1::MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(v1::MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(v1::MountPropagation::PropagationBidirectional),
        Some(other) => Err(ConfigError::container(format!("invalid MountPropagation mode: {}", quote(other)))),
    }
}

/// KEP-3857.
fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, String> {
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    let requested = format!("volume {} requested recursive read-only mode, but it is not", quote(&mount.name));
    if mount.read_only != Some(true) {
        return Err(format!("{requested} read-only"));
    }
    if let Some(p) = mount.mount_propagation.as_deref().filter(|p| *p != "None") {
        return Err(format!("{requested} compatible with propagation {}", quote(p)));
    }
    match (mode, supported) {
        ("IfPossible", _) => Ok(supported),
        ("Enabled", true) => Ok(true),
        ("Enabled", false) => Err(format!("{requested} supported by the runtime")),
        _ => Err(format!("unknown recursive read-only mode {}", quote(mode))),
    }
}

/// Devices: of device plugins, then block volumes.
pub(super) fn devices(
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
) -> Result<Vec<v1::Device>, ConfigError> {
    let mut out = facts.devices.devices.clone();
    for device in container.spec.volume_devices.iter().flatten() {
        if !device.device_path.starts_with('/') {
            return Err(ConfigError::container(format!(
                "error DevicePath `{}` must be an absolute path",
                device.device_path
            )));
        }
        let Some(volume) = facts.block_devices.get(&device.name) else {
            return Err(ConfigError::container(format!(
                "cannot find volume {} to pass into container {}",
                quote(&device.name),
                quote(&container.spec.name)
            )));
        };
        if let Some(path) = &volume.host_path {
            out.push(v1::Device {
                container_path: device.device_path.clone(),
                host_path: path.clone(),
                permissions: if volume.read_only { "r" } else { "mrw" }.into(),
            });
        }
    }
    Ok(out)
}
