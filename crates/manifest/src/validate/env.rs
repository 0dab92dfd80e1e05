//! Environment variables and the downward API.

use model::api::{Container, EnvFromSource, EnvVar, FileKeySelector, ObjectFieldSelector, ResourceFieldSelector};

use super::field::{Errors, Path};
use super::{names, paths, resources};
use crate::resources::HUGEPAGES;

/// Pod fields that an environment variable may have.
const ENV_FIELDS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

/// Pod fields that a downward API file may have.
pub(crate) const VOLUME_FIELDS: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// Everything that a field path can name at all.
const ALL_FIELDS: [&str; 14] = [
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.serviceAccountName",
    "spec.schedulerName",
    "status.phase",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

pub(crate) fn env(e: &mut Errors, c: &Container, path: &Path) {
    for (i, var) in c.env.iter().flatten().enumerate() {
        let path = path.child("env").index(i);
        if var.name.is_empty() {
            e.required(&path.child("name"), "");
        } else {
            e.invalid_each(&path.child("name"), &var.name, names::env_name(&var.name));
        }
        value_from(e, var, &path.child("valueFrom"));
    }
    let list = path.child("envFrom");
    for (i, from) in c.env_from.iter().flatten().enumerate() {
        env_from(e, from, &list, &list.index(i));
    }
}

fn value_from(e: &mut Errors, var: &EnvVar, path: &Path) {
    let Some(from) = &var.value_from else { return };
    let mut sources = 0;
    if let Some(field) = &from.field_ref {
        sources += 1;
        field_ref(e, field, &ENV_FIELDS, &path.child("fieldRef"));
    }
    if let Some(resource) = &from.resource_field_ref {
        sources += 1;
        resource_ref(e, resource, false, &path.child("resourceFieldRef"));
    }
    let config = from.config_map_key_ref.as_ref().map(|r| ("configMapKeyRef", &r.name, &r.key));
    let secret = from.secret_key_ref.as_ref().map(|r| ("secretKeyRef", &r.name, &r.key));
    for (field, name, key) in [config, secret].into_iter().flatten() {
        sources += 1;
        let path = path.child(field);
        e.invalid_each(&path.child("name"), name, names::dns_subdomain(name));
        if key.is_empty() {
            e.required(&path.child("key"), "");
        } else {
            e.invalid_each(&path.child("key"), key, names::config_key(key));
        }
    }
    if let Some(file) = &from.file_key_ref {
        sources += 1;
        file_ref(e, file, &path.child("fileKeyRef"));
    }
    if sources == 0 {
        e.invalid(
            path,
            "",
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
        );
    } else if !var.value.as_deref().unwrap_or("").is_empty() {
        e.invalid(path, "", "may not be specified when `value` is not empty");
    } else if sources > 1 {
        e.invalid(path, "", "may not have more than one field specified at a time");
    }
}

fn env_from(e: &mut Errors, from: &EnvFromSource, list: &Path, path: &Path) {
    let prefix = from.prefix.as_deref().unwrap_or("");
    if !prefix.is_empty() {
        e.invalid_each(&path.child("prefix"), prefix, names::env_name(prefix));
    }
    let config = from.config_map_ref.as_ref().map(|r| ("configMapRef", &r.name));
    let secret = from.secret_ref.as_ref().map(|r| ("secretRef", &r.name));
    let sources = [config, secret];
    for (field, name) in sources.into_iter().flatten() {
        let path = path.child(field).child("name");
        if name.is_empty() {
            e.required(&path, "");
        } else {
            // A name that is to be completed may end in a dash.
            let masked = name
                .strip_suffix('-')
                .filter(|r| !r.is_empty())
                .map(|r| format!("{}a", &r[..r.floor_char_boundary(r.len() - 1)]));
            e.invalid_each(&path, name, names::dns_subdomain(masked.as_deref().unwrap_or(name)));
        }
    }
    match sources.into_iter().flatten().count() {
        0 => e.invalid(list, "", "must specify one of: `configMapRef` or `secretRef`"),
        1 => {}
        _ => e.invalid(list, "", "may not have more than one field specified at a time"),
    }
}

fn file_ref(e: &mut Errors, file: &FileKeySelector, path: &Path) {
    if file.key.is_empty() {
        e.required(&path.child("key"), "");
    } else {
        e.invalid_each(&path.child("key"), &file.key, names::env_name(&file.key));
    }
    if file.volume_name.is_empty() {
        e.required(&path.child("volumeName"), "");
    } else {
        e.invalid_each(&path.child("volumeName"), &file.volume_name, names::dns_label(&file.volume_name));
    }
    if file.path.is_empty() {
        e.required(&path.child("path"), "");
    } else {
        paths::no_backsteps(e, &file.path, &path.child("path"));
    }
}

/// A field of the pod, one of `allowed`, or one label or annotation of it.
pub(crate) fn field_ref(e: &mut Errors, field: &ObjectFieldSelector, allowed: &[&str], path: &Path) {
    let version = field.api_version.as_deref().unwrap_or("");
    if version.is_empty() {
        return e.required(&path.child("apiVersion"), "");
    }
    let name = field.field_path.as_str();
    let at = path.child("fieldPath");
    if name.is_empty() {
        return e.required(&at, "");
    }
    let unusable = |e: &mut Errors, why: String| e.invalid(&at, name, &format!("error converting fieldPath: {why}"));
    if version != "v1" {
        return unusable(e, format!("unsupported pod version: {version}"));
    }
    if let Some((of, key)) = subscript(name) {
        return match of {
            "metadata.annotations" => e.invalid_each(path, &key.to_lowercase(), names::label_key(&key.to_lowercase())),
            "metadata.labels" => e.invalid_each(path, key, names::label_key(key)),
            _ => unusable(e, format!("field label does not support subscript: {name}")),
        };
    }
    // The name of a field of long ago.
    let name = if name == "spec.host" { "spec.nodeName" } else { name };
    if !ALL_FIELDS.contains(&name) {
        return unusable(e, format!("field label not supported: {name}"));
    }
    e.one_of(&at, name, allowed);
}

/// `metadata.labels['KEY']` as its two parts.
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(of, _)| !of.is_empty())
}

/// A resource of a container; in a volume the container must be named.
pub(crate) fn resource_ref(e: &mut Errors, r: &ResourceFieldSelector, volume: bool, path: &Path) {
    const RESOURCES: [&str; 6] = [
        "limits.cpu",
        "limits.ephemeral-storage",
        "limits.memory",
        "requests.cpu",
        "requests.ephemeral-storage",
        "requests.memory",
    ];
    let huge =
        ["requests.", "limits."].iter().any(|p| r.resource.strip_prefix(p).is_some_and(|n| n.starts_with(HUGEPAGES)));
    if volume && r.container_name.as_deref().unwrap_or("").is_empty() {
        e.required(&path.child("containerName"), "");
    } else if r.resource.is_empty() {
        e.required(&path.child("resource"), "");
    } else if !huge {
        e.one_of(&path.child("resource"), &r.resource, &RESOURCES);
    }
    resources::divisor(e, &r.resource, r.divisor.as_ref(), path);
}
