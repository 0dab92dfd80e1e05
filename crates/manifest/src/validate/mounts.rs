//! Volume mounts and block devices of a container.

use std::collections::BTreeSet;

use model::api::{Container, VolumeMount};

use super::field::{Errors, Path};
use super::paths;
use super::volumes::Volumes;

pub(crate) fn mounts(e: &mut Errors, c: &Container, volumes: &Volumes<'_>, list: &Path) {
    let devices = c.volume_devices.as_deref().unwrap_or_default();
    let mut seen = BTreeSet::new();
    for (i, m) in c.volume_mounts.iter().flatten().enumerate() {
        let path = list.index(i);
        let (name_path, mount_path) = (path.child("name"), path.child("mountPath"));
        e.non_empty(&name_path, &m.name);
        if !volumes.contains_key(m.name.as_str()) {
            e.not_found(&name_path, &m.name, "");
        }
        e.non_empty(&mount_path, &m.mount_path);
        if !seen.insert(m.mount_path.as_str()) {
            e.invalid(&mount_path, &m.mount_path, "must be unique");
        }
        if devices.iter().any(|d| d.name == m.name) {
            e.invalid(&name_path, &m.name, "must not already exist in volumeDevices");
        }
        if devices.iter().any(|d| d.device_path == m.mount_path) {
            e.invalid(&mount_path, &m.mount_path, "must not already exist as a path in volumeDevices");
        }
        let (sub_path, sub_path_expr) = (m.sub_path.as_deref().unwrap_or(""), m.sub_path_expr.as_deref().unwrap_or(""));
        paths::descending(e, sub_path, &list.child("subPath"));
        if !sub_path_expr.is_empty() {
            if !sub_path.is_empty() {
                e.invalid(&path.child("subPathExpr"), sub_path_expr, "subPathExpr and subPath are mutually exclusive");
            }
            paths::descending(e, sub_path_expr, &list.child("subPathExpr"));
        }
        propagation(e, c, m, &list.child("mountPropagation"));
        recursive_read_only(e, m, &list.child("recursiveReadOnly"));
    }
}

fn propagation(e: &mut Errors, c: &Container, m: &VolumeMount, path: &Path) {
    let Some(mode) = &m.mount_propagation else { return };
    e.one_of(path, mode, &["Bidirectional", "HostToContainer", "None"]);
    let privileged = c.security_context.as_ref().is_some_and(|s| s.privileged == Some(true));
    if mode == "Bidirectional" && !privileged {
        e.forbidden(path, "Bidirectional mount propagation is available only to privileged containers");
    }
}

/// KEP-3857.
fn recursive_read_only(e: &mut Errors, m: &VolumeMount, path: &Path) {
    match m.recursive_read_only.as_deref() {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if m.read_only != Some(true) {
                e.forbidden(path, "may only be specified when readOnly is true");
            }
            if m.mount_propagation.as_deref().is_some_and(|p| p != "None") {
                e.forbidden(path, "may only be specified when mountPropagation is None or not specified");
            }
        }
        Some(other) => e.not_supported(path, other, &["Disabled", "Enabled", "IfPossible"]),
    }
}

pub(crate) fn devices(e: &mut Errors, c: &Container, volumes: &Volumes<'_>, list: &Path) {
    let mounts = c.volume_mounts.as_deref().unwrap_or_default();
    let (mut names, mut device_paths) = (BTreeSet::new(), BTreeSet::new());
    for (i, d) in c.volume_devices.iter().flatten().enumerate() {
        let (name_path, device_path) = (list.index(i).child("name"), list.index(i).child("devicePath"));
        e.non_empty(&name_path, &d.name);
        if names.contains(d.name.as_str()) {
            e.invalid(&name_path, &d.name, "must be unique");
        }
        match volumes.get(d.name.as_str()) {
            Some(v) if v.persistent_volume_claim.is_none() && v.ephemeral.is_none() => {
                let detail = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                e.invalid(&name_path, &d.name, detail);
            }
            Some(_) => {}
            None => e.not_found(&name_path, &d.name, ""),
        }
        e.non_empty(&device_path, &d.device_path);
        if device_paths.contains(d.device_path.as_str()) {
            e.invalid(&device_path, &d.device_path, "must be unique");
        }
        if paths::has_backsteps(&d.device_path) {
            e.invalid(&device_path, &d.device_path, "can not contain backsteps ('..')");
        } else {
            device_paths.insert(d.device_path.as_str());
        }
        if mounts.iter().any(|m| m.name == d.name) {
            e.invalid(&name_path, &d.name, "must not already exist in volumeMounts");
        }
        if mounts.iter().any(|m| m.mount_path == d.device_path) {
            e.invalid(&device_path, &d.device_path, "must not already exist as a path in volumeMounts");
        }
        names.insert(d.name.as_str());
    }
}
