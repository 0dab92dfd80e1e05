//! Volumes by the plugins that Go has for them.

use model::api::Volume;

/// The name of the plugin that a volume of a pod belongs to, as metrics show it; empty for kinds that no kubelet has any more. A claim is taken for
/// one of a local volume: which kind is behind it only its PersistentVolume tells.
pub fn plugin_name(volume: &Volume) -> &'static str {
    let claim = volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some();
    [
        (volume.config_map.is_some(), "kubernetes.io/configmap"),
        (volume.csi.is_some() || is_migrated(volume), "kubernetes.io/csi"),
        (volume.downward_api.is_some(), "kubernetes.io/downward-api"),
        (volume.empty_dir.is_some(), "kubernetes.io/empty-dir"),
        (volume.fc.is_some(), "kubernetes.io/fc"),
        (volume.host_path.is_some(), "kubernetes.io/host-path"),
        (volume.image.is_some(), "kubernetes.io/image"),
        (volume.iscsi.is_some(), "kubernetes.io/iscsi"),
        (volume.nfs.is_some(), "kubernetes.io/nfs"),
        (volume.projected.is_some(), "kubernetes.io/projected"),
        (volume.secret.is_some(), "kubernetes.io/secret"),
        (claim, "kubernetes.io/local-volume"),
    ]
    .into_iter()
    .find_map(|(is, name)| is.then_some(name))
    .unwrap_or_default()
}

/// A driver does the work of the plugin that it is written for.
fn is_migrated(v: &Volume) -> bool {
    let disks = v.aws_elastic_block_store.is_some() || v.gce_persistent_disk.is_some() || v.cinder.is_some();
    let azure = v.azure_disk.is_some() || v.azure_file.is_some();
    disks || azure || v.vsphere_volume.is_some() || v.portworx_volume.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins() {
        for (volume, name) in [
            (r#"{"name": "v", "emptyDir": {}}"#, "kubernetes.io/empty-dir"),
            (r#"{"name": "v", "hostPath": {"path": "/tmp"}}"#, "kubernetes.io/host-path"),
            (r#"{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}"#, "kubernetes.io/local-volume"),
            (r#"{"name": "v", "cinder": {"volumeID": "c"}}"#, "kubernetes.io/csi"),
            (r#"{"name": "v"}"#, ""),
        ] {
            let volume: Volume = serde_json::from_str(volume).unwrap();
            assert_eq!(plugin_name(&volume), name);
        }
    }
}
