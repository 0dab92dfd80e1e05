//! The downward API: what a pod may learn about itself, as variables and as files.

use std::collections::BTreeMap;

use model::api::{DownwardAPIVolumeFile, ObjectFieldSelector, ResourceFieldSelector, Volume};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};
use model::quantity::Quantity;

use super::error::{ConfigError, Reason};
use super::facts::NodeFacts;
use super::go_text::quote;
use super::validate::label_key;
use crate::resources::{CPU, EPHEMERAL_STORAGE, MEMORY, ResourceList, container_limits, container_requests, hugepages};

/// The value of a `fieldRef` in `env`. `host_ips` None: not known yet. `pod_ips`: the preferred family first.
///
/// # Errors
/// A field that does not exist, or that is not known yet.
pub fn field(
    pod: &DesiredPod,
    selector: &ObjectFieldSelector,
    host_ips: Option<&[String]>,
    pod_ips: &[String],
) -> Result<String, ConfigError> {
    let version = selector.api_version.as_deref().unwrap_or("v1");
    if version != "v1" {
        return Err(ConfigError::container(format!("unsupported pod version: {version}")));
    }
    let path = selector.field_path.as_str();
    if let Some((object, _)) = subscript(path)
        && !matches!(object, "metadata.annotations" | "metadata.labels")
    {
        return Err(ConfigError::container(format!("field label does not support subscript: {path}")));
    }
    let hosts = || {
        host_ips
            .filter(|ips| !ips.is_empty())
            .ok_or_else(|| ConfigError::missing(Reason::CreateContainerConfig, "node address"))
    };
    match path {
        "spec.nodeName" | "spec.host" => Ok(pod.spec().node_name.clone().unwrap_or_default()),
        "spec.serviceAccountName" => Ok(pod.spec().service_account_name.clone().unwrap_or_default()),
        "status.hostIP" => Ok(hosts()?[0].clone()),
        "status.hostIPs" => Ok(hosts()?.join(",")),
        "status.podIP" => Ok(pod_ips.first().cloned().unwrap_or_default()),
        "status.podIPs" => Ok(pod_ips.join(",")),
        "metadata.annotations"
        | "metadata.labels"
        | "metadata.name"
        | "metadata.namespace"
        | "metadata.uid"
        | "spec.restartPolicy"
        | "spec.schedulerName"
        | "status.phase" => metadata(pod, path).map_err(ConfigError::container),
        _ if subscript(path).is_some() => metadata(pod, path).map_err(ConfigError::container),
        _ => Err(ConfigError::container(format!("field label not supported: {path}"))),
    }
}

/// `PATH['KEY']` as path and key.
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(object, _)| !object.is_empty())
}

/// A field of the pod's metadata, as files (and variables) have it.
fn metadata(pod: &DesiredPod, path: &str) -> Result<String, String> {
    let meta = pod.meta();
    let value = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref().and_then(|m| m.get(key)).cloned().unwrap_or_default()
    };
    if let Some((object, key)) = subscript(path) {
        let checked = |faults: Vec<String>| match faults.is_empty() {
            true => Ok(()),
            false => Err(format!("invalid key subscript in {path}: {}", faults.join(";"))),
        };
        return match object {
            "metadata.annotations" => {
                checked(label_key(&key.to_lowercase()))?;
                Ok(value(&meta.annotations, key))
            }
            "metadata.labels" => {
                checked(label_key(key))?;
                Ok(value(&meta.labels, key))
            }
            _ => Err(format!("fieldPath {} does not support subscript", quote(path))),
        };
    }
    match path {
        "metadata.annotations" => Ok(map_lines(meta.annotations.as_ref())),
        "metadata.labels" => Ok(map_lines(meta.labels.as_ref())),
        "metadata.name" => Ok(pod.name().into()),
        "metadata.namespace" => Ok(pod.namespace().into()),
        "metadata.uid" => Ok(pod.uid().to_string()),
        _ => Err(format!("unsupported fieldPath: {path}")),
    }
}

/// `KEY="VALUE"` lines by key, values quoted as Go does; no newline at the end.
pub fn map_lines(map: Option<&BTreeMap<String, String>>) -> String {
    map.into_iter().flatten().map(|(k, v)| format!("{k}={}", quote(v))).collect::<Vec<_>>().join("\n")
}

/// The value of a `resourceFieldRef` in `env`. A limit that the container does not have is the pod's, else what the node can allocate; of
/// another container only app containers get that default.
///
/// # Errors
/// An unknown container or resource; allocatable not known yet.
pub fn resource_for_env(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    selector: &ResourceFieldSelector,
    node: &NodeFacts,
) -> Result<String, ConfigError> {
    let allocatable = node
        .allocatable
        .as_ref()
        .ok_or_else(|| ConfigError::missing(Reason::CreateContainerConfig, "node allocatable"))?;
    let defaults = default_limits(pod, allocatable, node.gates.pod_level_resources);
    let named = selector.container_name.as_deref().unwrap_or_default();
    let (source, with_defaults) = if named.is_empty() {
        (container, true)
    } else {
        let found = app_or_init(pod, named).map_err(ConfigError::container)?;
        (found, found.kind == ContainerKind::App)
    };
    let defaults = if with_defaults { defaults } else { ResourceList::new() };
    resource(source, selector, &defaults).map_err(ConfigError::container)
}

/// What stands for a limit that a container does not have.
fn default_limits(pod: &DesiredPod, allocatable: &ResourceList, pod_level: bool) -> ResourceList {
    let mut defaults = allocatable.clone();
    if pod_level {
        for (name, limit) in crate::resources::pod_level_limits(pod) {
            if [CPU, MEMORY].contains(&name.as_str()) && !limit.is_zero() && defaults.contains_key(&name) {
                defaults.insert(name, limit);
            }
        }
    }
    defaults
}

fn app_or_init<'a>(pod: &'a DesiredPod, name: &str) -> Result<ContainerEntry<'a>, String> {
    pod.app_containers()
        .chain(pod.init_containers())
        .find(|c| c.spec.name == name)
        .ok_or_else(|| format!("container {name} not found"))
}

/// `⌈amount / divisor⌉`.
fn resource(
    container: ContainerEntry<'_>,
    selector: &ResourceFieldSelector,
    defaults: &ResourceList,
) -> Result<String, String> {
    let unsupported = || format!("unsupported container resource : {}", selector.resource);
    let (kind, name) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    if ![CPU, MEMORY, EPHEMERAL_STORAGE].contains(&name) && !hugepages::is_resource(name) {
        return Err(unsupported());
    }
    let list = match kind {
        "limits" => {
            let mut limits = container_limits(container);
            for name in [CPU, MEMORY, EPHEMERAL_STORAGE] {
                if limits.get(name).is_none_or(Quantity::is_zero)
                    && let Some(default) = defaults.get(name)
                {
                    limits.insert(name.into(), default.clone());
                }
            }
            limits
        }
        "requests" => container_requests(container),
        _ => return Err(unsupported()),
    };
    let in_unit = |q: &Quantity| if name == CPU { q.milli_value() } else { q.value() };
    let divisor = match &selector.divisor {
        Some(divisor) => Quantity::of(divisor).map_err(|e| format!("invalid divisor {}: {e}", quote(&divisor.0)))?,
        None => crate::resources::zero(),
    };
    let divisor = if divisor.is_zero() { if name == CPU { 1000 } else { 1 } } else { in_unit(&divisor) };
    let amount = list.get(name).map_or(0, in_unit);
    // Rounded up; both are not negative in a valid pod.
    let (whole, rest) = (amount.div_euclid(divisor), amount.rem_euclid(divisor));
    Ok((whole + i64::from(rest > 0)).to_string())
}

/// Content and permission bits by path within the volume.
pub type Files = BTreeMap<String, (Vec<u8>, u32)>;

/// The files of a downwardAPI volume; None when it is of another type. `allocatable` None: not known yet.
///
/// # Errors
/// All faults of its items, joined.
pub fn volume_files(
    pod: &DesiredPod,
    volume: &Volume,
    allocatable: Option<&ResourceList>,
) -> Result<Option<Files>, String> {
    let Some(source) = &volume.downward_api else { return Ok(None) };
    let items = source.items.as_deref().unwrap_or_default();
    item_files(pod, items, source.default_mode.unwrap_or(0o644), allocatable).map(Some)
}

/// The files of the items of a downwardAPI volume or projection. A limit that a container does not have is what the node can allocate.
///
/// # Errors
/// All faults, joined.
pub fn item_files(
    pod: &DesiredPod,
    items: &[DownwardAPIVolumeFile],
    default_mode: i32,
    allocatable: Option<&ResourceList>,
) -> Result<Files, String> {
    let mut files = Files::new();
    let mut faults = Vec::new();
    for item in items {
        let content = if let Some(field) = &item.field_ref {
            metadata(pod, &field.field_path)
        } else if let Some(selector) = &item.resource_field_ref {
            let name = selector.container_name.as_deref().unwrap_or_default();
            allocatable
                .ok_or_else(|| "node allocatable is not known yet".to_string())
                .and_then(|defaults| resource(app_or_init(pod, name)?, selector, defaults))
        } else {
            Ok(String::new())
        };
        match content {
            Ok(content) => {
                let mode = item.mode.unwrap_or(default_mode) as u32;
                files.insert(clean(&item.path), (content.into_bytes(), mode));
            }
            Err(fault) => faults.push(fault),
        }
    }
    match crate::text::aggregate(&faults) {
        Some(faults) => Err(faults),
        None => Ok(files),
    }
}

/// A relative path without empty and `.` components. (`..` is refused by validation.)
fn clean(path: &str) -> String {
    path.split('/').filter(|p| !p.is_empty() && *p != ".").collect::<Vec<_>>().join("/")
}
