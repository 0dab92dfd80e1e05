//! PersistentVolumes of plugins that were part of Kubernetes: the driver that does their work now, and its name of the volume.
//!
//! The names are those that the controllers use too (k8s.io/csi-translation-lib), for the attachment and the node's lists are named by them.

use std::collections::BTreeMap;

use model::api::{CSIPersistentVolumeSource, PersistentVolume, SecretReference};

const ZONES: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];
/// Between the zones of a regional disk.
const BETWEEN: &str = "__";
/// Which group of resources a share of Azure Files is in.
const AZURE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
const PORTWORX_SECRET: [&str; 2] = ["openstorage.io/auth-secret-name", "openstorage.io/auth-secret-namespace"];

/// The volume as its driver knows it; None: it is none of these.
pub(super) fn migrated(bound: &PersistentVolume) -> Option<CSIPersistentVolumeSource> {
    let spec = bound.spec.as_ref()?;
    let of = |driver: &str, handle: String, fs_type: Option<&String>| CSIPersistentVolumeSource {
        driver: driver.to_owned(),
        volume_handle: handle,
        fs_type: fs_type.cloned(),
        ..CSIPersistentVolumeSource::default()
    };
    let attributes = |pairs: &[(&str, String)]| -> Option<BTreeMap<String, String>> {
        Some(pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect())
    };
    if let Some(s) = &spec.aws_elastic_block_store {
        // `aws://ZONE/vol-1` is an older form of `vol-1`.
        let id = s.volume_id.rsplit('/').next().unwrap_or(&s.volume_id).to_owned();
        let partition = s.partition.unwrap_or(0).to_string();
        let volume_attributes = attributes(&[("partition", partition)]);
        return Some(CSIPersistentVolumeSource { volume_attributes, ..of("ebs.csi.aws.com", id, s.fs_type.as_ref()) });
    }
    if let Some(s) = &spec.cinder {
        return Some(of("cinder.csi.openstack.org", s.volume_id.clone(), s.fs_type.as_ref()));
    }
    if let Some(s) = &spec.azure_disk {
        let mut told = vec![("kind", "Managed".to_owned())];
        told.extend(s.caching_mode.iter().map(|mode| ("cachingMode", mode.clone())));
        told.extend(s.fs_type.iter().map(|fs| ("fsType", fs.clone())));
        let volume_attributes = attributes(&told);
        let disk = of("disk.csi.azure.com", s.disk_uri.clone(), s.fs_type.as_ref());
        return Some(CSIPersistentVolumeSource { volume_attributes, ..disk });
    }
    if let Some(s) = &spec.azure_file {
        let of_claim = || spec.claim_ref.as_ref()?.namespace.clone();
        let namespace = s.secret_namespace.clone().or_else(of_claim).filter(|n| !n.is_empty())?;
        let group = bound.metadata.annotations.as_ref().and_then(|a| a.get(AZURE_GROUP)).cloned().unwrap_or_default();
        let name = bound.metadata.name.as_deref().unwrap_or_default();
        let handle = format!("{group}#{}#{}#{name}#{namespace}", azure_account(&s.secret_name), s.share_name);
        return Some(CSIPersistentVolumeSource {
            node_stage_secret_ref: Some(SecretReference {
                name: Some(s.secret_name.clone()),
                namespace: Some(namespace),
            }),
            volume_attributes: attributes(&[("sharename", s.share_name.clone())]),
            ..of("file.csi.azure.com", handle, None)
        });
    }
    if let Some(s) = &spec.gce_persistent_disk {
        let partition = s.partition.filter(|p| *p != 0).map(|p| p.to_string()).unwrap_or_default();
        let volume_attributes = attributes(&[("partition", partition)]);
        let disk = of("pd.csi.storage.gke.io", google_disk(bound, &s.pd_name)?, s.fs_type.as_ref());
        return Some(CSIPersistentVolumeSource { volume_attributes, ..disk });
    }
    if let Some(s) = &spec.vsphere_volume {
        let policy = s.storage_policy_name.iter().filter(|p| !p.is_empty());
        let told: Vec<_> = policy.map(|policy| ("storagepolicyname", policy.clone())).collect();
        let volume_attributes = attributes(&told);
        let disk = of("csi.vsphere.vmware.com", s.volume_path.clone(), s.fs_type.as_ref());
        return Some(CSIPersistentVolumeSource { volume_attributes, ..disk });
    }
    let s = spec.portworx_volume.as_ref()?;
    let annotation = |key: &str| bound.metadata.annotations.as_ref()?.get(key).cloned();
    let [name, namespace] = PORTWORX_SECRET.map(annotation);
    let secret =
        name.zip(namespace).map(|(name, namespace)| SecretReference { name: Some(name), namespace: Some(namespace) });
    Some(CSIPersistentVolumeSource {
        node_stage_secret_ref: secret.clone(),
        node_publish_secret_ref: secret.clone(),
        node_expand_secret_ref: secret,
        ..of("pxd.portworx.com", s.volume_id.clone(), s.fs_type.as_ref())
    })
}

/// The account that a secret named `azure-storage-account-ACCOUNT-secret` is for; of other secrets, their name.
fn azure_account(secret: &str) -> &str {
    let account = secret.strip_prefix("azure-storage-account-").and_then(|rest| rest.strip_suffix("-secret"));
    account.filter(|a| !a.is_empty()).unwrap_or(secret)
}

/// `projects/UNSPECIFIED/zones/ZONE/disks/NAME`, or with its region when it is in several zones.
fn google_disk(bound: &PersistentVolume, name: &str) -> Option<String> {
    let label = |key: &&str| bound.metadata.labels.as_ref()?.get(*key).filter(|z| !z.is_empty()).cloned();
    let zones = ZONES.iter().find_map(label).unwrap_or_else(|| "UNSPECIFIED".to_owned());
    Some(match zones.split_once(BETWEEN) {
        None => format!("projects/UNSPECIFIED/zones/{zones}/disks/{name}"),
        Some((first, _)) => {
            // A zone is its region and one more part.
            let (region, _) = first.rsplit_once('-')?;
            format!("projects/UNSPECIFIED/regions/{region}/disks/{name}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (json, driver, handle) in [
            (r#"{"spec":{"awsElasticBlockStore":{"volumeID":"aws://us-east-1a/vol-1"}}}"#, "ebs.csi.aws.com", "vol-1"),
            (r#"{"spec":{"awsElasticBlockStore":{"volumeID":"vol-1"}}}"#, "ebs.csi.aws.com", "vol-1"),
            (r#"{"spec":{"cinder":{"volumeID":"c-1"}}}"#, "cinder.csi.openstack.org", "c-1"),
            (
                r#"{"spec":{"azureDisk":{"diskName":"d","diskURI":"/subscriptions/d"}}}"#,
                "disk.csi.azure.com",
                "/subscriptions/d",
            ),
            (
                r#"{"metadata":{"labels":{"topology.kubernetes.io/zone":"europe-west1-b"}},"spec":{"gcePersistentDisk":{"pdName":"p"}}}"#,
                "pd.csi.storage.gke.io",
                "projects/UNSPECIFIED/zones/europe-west1-b/disks/p",
            ),
            (
                r#"{"metadata":{"labels":{"topology.kubernetes.io/zone":"europe-west1-b__europe-west1-c"}},"spec":{"gcePersistentDisk":{"pdName":"p"}}}"#,
                "pd.csi.storage.gke.io",
                "projects/UNSPECIFIED/regions/europe-west1/disks/p",
            ),
            (
                r#"{"spec":{"gcePersistentDisk":{"pdName":"p"}}}"#,
                "pd.csi.storage.gke.io",
                "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/p",
            ),
            (
                r#"{"metadata":{"name":"pv","annotations":{"kubernetes.io/azure-file-resource-group":"g"}},"spec":{"azureFile":{"secretName":"azure-storage-account-acc-secret","shareName":"sh","secretNamespace":"ns"}}}"#,
                "file.csi.azure.com",
                "g#acc#sh#pv#ns",
            ),
            (
                r#"{"metadata":{"name":"pv"},"spec":{"claimRef":{"namespace":"c"},"azureFile":{"secretName":"mine","shareName":"sh"}}}"#,
                "file.csi.azure.com",
                "#mine#sh#pv#c",
            ),
            (r#"{"spec":{"vsphereVolume":{"volumePath":"[ds] v"}}}"#, "csi.vsphere.vmware.com", "[ds] v"),
            (r#"{"spec":{"portworxVolume":{"volumeID":"px"}}}"#, "pxd.portworx.com", "px"),
        ] {
            let got = migrated(&serde_json::from_str(json).unwrap()).unwrap();
            assert_eq!((got.driver.as_str(), got.volume_handle.as_str()), (driver, handle), "{json}");
        }
        assert!(migrated(&serde_json::from_str(r#"{"spec":{"nfs":{"path":"/","server":"s"}}}"#).unwrap()).is_none());
    }
}
