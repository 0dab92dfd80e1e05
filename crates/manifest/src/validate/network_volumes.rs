//! Sources of network storage: what must be given. Most have no driver any more, and then fail at the mount.

use model::api::{ISCSIVolumeSource, QuobyteVolumeSource, Volume};

use super::field::{Errors, Json, Path};
use super::names;

pub(crate) fn source(e: &mut Errors, v: &Volume, field: &str, volume: &Path) {
    let path = volume.child(match field {
        "gcePersistentDisk" => "persistentDisk",
        "cephFS" => "cephfs",
        other => other,
    });
    let mut needed: Vec<(&str, &str)> = Vec::new();
    if let Some(s) = &v.gce_persistent_disk {
        needed.push(("pdName", &s.pd_name));
        partition(e, s.partition, &path);
    } else if let Some(s) = &v.aws_elastic_block_store {
        needed.push(("volumeID", &s.volume_id));
        partition(e, s.partition, &path);
    } else if let Some(s) = &v.nfs {
        needed.extend([("server", s.server.as_str()), ("path", &s.path)]);
        if !s.path.starts_with('/') {
            e.invalid(&path.child("path"), &s.path, "must be an absolute path");
        }
    } else if let Some(s) = &v.iscsi {
        iscsi(e, s, &path);
        if s.initiator_name.is_some() && v.name.len() + 1 + s.target_portal.len() > 64 {
            let detail = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.";
            e.invalid(&volume.child("name"), &v.name, detail);
        }
    } else if let Some(s) = &v.glusterfs {
        needed.extend([("endpoints", s.endpoints.as_str()), ("path", &s.path)]);
    } else if let Some(s) = &v.flocker {
        let (name, uuid) = (s.dataset_name.as_deref().unwrap_or(""), s.dataset_uuid.as_deref().unwrap_or(""));
        match (name.is_empty(), uuid.is_empty()) {
            (true, true) => e.required(&path, "one of datasetName and datasetUUID is required"),
            (false, false) => {
                e.invalid(&path, "resource", "datasetName and datasetUUID can not be specified simultaneously")
            }
            _ => {}
        }
        if name.contains('/') {
            e.invalid(&path.child("datasetName"), name, "must not contain '/'");
        }
    } else if let Some(s) = &v.rbd {
        if s.monitors.is_empty() {
            e.required(&path.child("monitors"), "");
        }
        needed.push(("image", &s.image));
    } else if let Some(s) = &v.cinder {
        needed.push(("volumeID", &s.volume_id));
        secret_name(e, s.secret_ref.as_ref().map(|r| r.name.as_str()), &path);
    } else if let Some(s) = &v.cephfs {
        if s.monitors.is_empty() {
            e.required(&path.child("monitors"), "");
        }
    } else if let Some(s) = &v.quobyte {
        quobyte(e, s, &path);
    } else if let Some(s) = &v.fc {
        fibre_channel(
            e,
            s.target_wwns.as_deref().unwrap_or_default(),
            s.wwids.as_deref().unwrap_or_default(),
            s.lun,
            &path,
        );
    } else if let Some(s) = &v.flex_volume {
        needed.push(("driver", &s.driver));
        for key in s.options.iter().flat_map(|o| o.keys()) {
            let domain = format!(".{}", key.split('/').next().unwrap_or("").to_lowercase());
            if domain.ends_with(".kubernetes.io") || domain.ends_with(".k8s.io") {
                e.invalid(&path.child("options").key(key), key, "kubernetes.io and k8s.io namespaces are reserved");
            }
        }
    } else if let Some(s) = &v.azure_file {
        needed.extend([("secretName", s.secret_name.as_str()), ("shareName", &s.share_name)]);
    } else if let Some(s) = &v.vsphere_volume {
        needed.push(("volumePath", &s.volume_path));
    } else if let Some(s) = &v.photon_persistent_disk {
        needed.push(("pdID", &s.pd_id));
    } else if let Some(s) = &v.portworx_volume {
        needed.push(("volumeID", &s.volume_id));
    } else if let Some(s) = &v.azure_disk {
        needed.extend([("diskName", s.disk_name.as_str()), ("diskURI", &s.disk_uri)]);
        azure_disk(e, s, &path);
    } else if let Some(s) = &v.storageos {
        let name = s.volume_name.as_deref().unwrap_or("");
        needed.push(("volumeName", name));
        if !name.is_empty() {
            e.invalid_each(&path.child("volumeName"), name, names::dns_label(name));
        }
        if let Some(namespace) = s.volume_namespace.as_deref().filter(|n| !n.is_empty()) {
            e.invalid_each(&path.child("volumeNamespace"), namespace, names::dns_label(namespace));
        }
        secret_name(e, s.secret_ref.as_ref().map(|r| r.name.as_str()), &path);
    } else if let Some(s) = &v.scale_io {
        let name = s.volume_name.as_deref().unwrap_or("");
        needed.extend([("gateway", s.gateway.as_str()), ("system", &s.system), ("volumeName", name)]);
    }
    for (field, value) in needed {
        e.non_empty(&path.child(field), value);
    }
}

fn partition(e: &mut Errors, partition: Option<i32>, path: &Path) {
    if let Some(number) = partition.filter(|p| !(0..=255).contains(p)) {
        e.invalid(&path.child("partition"), number, &names::range_error(1, 255));
    }
}

fn secret_name(e: &mut Errors, name: Option<&str>, path: &Path) {
    if name == Some("") {
        e.required(&path.child("secretRef").child("name"), "");
    }
}

fn iscsi(e: &mut Errors, s: &ISCSIVolumeSource, path: &Path) {
    const START: &str = "must be valid format starting with iqn, eui, or naa";
    e.non_empty(&path.child("targetPortal"), &s.target_portal);
    if s.iqn.is_empty() {
        e.required(&path.child("iqn"), "");
    }
    for (field, name) in [("iqn", Some(&s.iqn)), ("initiatorname", s.initiator_name.as_ref())] {
        let Some(name) = name.filter(|n| field != "iqn" || !n.is_empty()) else { continue };
        match initiator(name) {
            None => e.invalid(&path.child(field), name, START),
            Some(false) => e.invalid(&path.child(field), name, "must be valid format"),
            Some(true) => {}
        }
    }
    if !(0..=255).contains(&s.lun) {
        e.invalid(&path.child("lun"), s.lun, &names::range_error(0, 255));
    }
    if (s.chap_auth_discovery == Some(true) || s.chap_auth_session == Some(true)) && s.secret_ref.is_none() {
        e.required(&path.child("secretRef"), "");
    }
}

/// Whether an iSCSI name is well formed; None when it is of no known kind.
fn initiator(name: &str) -> Option<bool> {
    let tail = |n: usize| name.len() == 4 + n && name.bytes().skip(4).all(|b| b.is_ascii_alphanumeric());
    match name.get(..3)? {
        "eui" => Some(tail(16)),
        "naa" => Some(tail(32)),
        "iqn" => Some(iqn(name)),
        _ => None,
    }
}

/// `iqn.YYYY-MM.AUTHORITY:NAME`, at the end of the text.
fn iqn(name: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    name.match_indices("iqn.").any(|(i, _)| {
        let rest = &name[i + 4..];
        let (Some(year), Some(month), Some(more)) = (rest.get(..4), rest.get(5..7), rest.get(8..)) else {
            return false;
        };
        let dated = digits(year) && digits(month) && rest.get(4..5) == Some("-") && rest.get(7..8) == Some(".");
        dated
            && more.split_once(':').is_some_and(|(authority, unit)| {
                !authority.is_empty()
                    && authority.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
                    && !unit.is_empty()
                    && !unit.contains(|c: char| ",;*&$|".contains(c) || c.is_ascii_whitespace())
            })
    })
}

fn quobyte(e: &mut Errors, s: &QuobyteVolumeSource, path: &Path) {
    const REGISTRY: &str = "must be a host:port pair or multiple pairs separated by commas";
    if s.registry.is_empty() {
        e.required(&path.child("registry"), REGISTRY);
    } else if s.tenant.as_deref().unwrap_or("").len() >= 65 {
        e.required(&path.child("tenant"), "must be a UUID and may not exceed a length of 64 characters");
    } else {
        for _ in s.registry.split(',').filter(|pair| !pair.contains(':')) {
            e.invalid(&path.child("registry"), &s.registry, REGISTRY);
        }
    }
    e.non_empty(&path.child("volume"), &s.volume);
}

fn fibre_channel(e: &mut Errors, targets: &[String], wwids: &[String], lun: Option<i32>, path: &Path) {
    let field = path.child("targetWWNs");
    match (targets.is_empty(), wwids.is_empty()) {
        (true, true) => e.required(&field, "must specify either targetWWNs or wwids, but not both"),
        (false, false) => e.invalid(&field, Json(&targets), "targetWWNs and wwids can not be specified simultaneously"),
        _ => {}
    }
    if !targets.is_empty() {
        match lun {
            None => e.required(&path.child("lun"), "lun is required if targetWWNs is specified"),
            Some(lun) if !(0..=255).contains(&lun) => e.invalid(&path.child("lun"), lun, &names::range_error(0, 255)),
            Some(_) => {}
        }
    }
}

fn azure_disk(e: &mut Errors, s: &model::api::AzureDiskVolumeSource, path: &Path) {
    if let Some(mode) = &s.caching_mode {
        e.one_of(&path.child("cachingMode"), mode, &["None", "ReadOnly", "ReadWrite"]);
    }
    let Some(kind) = &s.kind else { return };
    e.one_of(&path.child("kind"), kind, &["Dedicated", "Managed", "Shared"]);
    let (start, form) = if kind == "Managed" {
        (
            "/subscriptions/",
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}",
        )
    } else {
        ("https://", "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd")
    };
    if !s.disk_uri.starts_with(start) {
        e.not_supported(&path.child("diskURI"), &s.disk_uri, &[form]);
    }
}
