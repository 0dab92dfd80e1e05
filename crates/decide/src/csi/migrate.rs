//! Volumes of plugins that were part of Kubernetes, of PersistentVolumes or written in a pod: the driver that does their work now, and its name
//! of the volume.
//!
//! The names are those that the controllers use too (k8s.io/csi-translation-lib), for the attachment and the node's lists are named by them.
//! These seven plugins have no other way any more; all other plugins that were part of Kubernetes are gone.

use std::collections::BTreeMap;

use model::api::{
    AzureFilePersistentVolumeSource, CSIPersistentVolumeSource, CinderPersistentVolumeSource, NodeSelector,
    PersistentVolume, PersistentVolumeSpec, SecretReference, Volume,
};

/// Labels that a zone was told with, and the region's: since 1.17, and before.
const ZONES: [&str; 2] = ["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"];
const REGIONS: [&str; 2] = ["topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"];
/// Between the zones of a regional disk.
const BETWEEN: &str = "__";
/// Which group of resources a share of Azure Files is in.
const AZURE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
const PORTWORX_SECRET: [&str; 2] = ["openstorage.io/auth-secret-name", "openstorage.io/auth-secret-namespace"];

const AWS: &str = "ebs.csi.aws.com";
const CINDER: &str = "cinder.csi.openstack.org";
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const GOOGLE: &str = "pd.csi.storage.gke.io";
const VSPHERE: &str = "csi.vsphere.vmware.com";
const PORTWORX: &str = "pxd.portworx.com";

/// The volume as its driver knows it; None: it is none of these.
///
/// # Errors
/// What the object says makes no volume of the driver.
pub(super) fn migrated(bound: &PersistentVolume) -> Result<Option<CSIPersistentVolumeSource>, String> {
    let Some(spec) = bound.spec.as_ref() else { return Ok(None) };
    let of = |driver: &str, handle: String, fs_type: Option<&String>| CSIPersistentVolumeSource {
        driver: driver.to_owned(),
        volume_handle: handle,
        fs_type: fs_type.cloned(),
        ..CSIPersistentVolumeSource::default()
    };
    let attributes = |pairs: &[(&str, String)]| -> Option<BTreeMap<String, String>> {
        Some(pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect())
    };
    let failed = |reason: String| format!("failed to translate in-tree pv to CSI: {reason}");
    if let Some(s) = &spec.aws_elastic_block_store {
        let id = aws_volume(&s.volume_id)
            .ok_or_else(|| failed(format!("failed to translate Kubernetes ID to EBS Volume ID {}", s.volume_id)))?;
        let partition = s.partition.unwrap_or(0).to_string();
        let volume_attributes = attributes(&[("partition", partition)]);
        return Ok(Some(CSIPersistentVolumeSource { volume_attributes, ..of(AWS, id, s.fs_type.as_ref()) }));
    }
    if let Some(s) = &spec.cinder {
        return Ok(Some(of(CINDER, s.volume_id.clone(), s.fs_type.as_ref())));
    }
    if let Some(s) = &spec.azure_disk {
        if let Some(kind) = s.kind.as_ref().filter(|kind| !kind.eq_ignore_ascii_case("Managed")) {
            return Err(failed(format!("kind({kind}) is not supported in csi migration")));
        }
        let mut told = vec![("kind", "Managed".to_owned())];
        told.extend(s.caching_mode.iter().map(|mode| ("cachingMode", mode.clone())));
        told.extend(s.fs_type.iter().map(|fs| ("fsType", fs.clone())));
        let volume_attributes = attributes(&told);
        let disk = of(AZURE_DISK, s.disk_uri.clone(), s.fs_type.as_ref());
        return Ok(Some(CSIPersistentVolumeSource { volume_attributes, ..disk }));
    }
    if let Some(s) = &spec.azure_file {
        let of_claim = || spec.claim_ref.as_ref()?.namespace.clone();
        let namespace = s.secret_namespace.clone().or_else(of_claim).filter(|n| !n.is_empty()).ok_or_else(|| {
            failed("could not find a secret namespace in PersistentVolumeSource or ClaimRef".to_owned())
        })?;
        let group = bound.metadata.annotations.as_ref().and_then(|a| a.get(AZURE_GROUP)).cloned().unwrap_or_default();
        let name = bound.metadata.name.as_deref().unwrap_or_default();
        let handle = format!("{group}#{}#{}#{name}#{namespace}", azure_account(&s.secret_name), s.share_name);
        return Ok(Some(CSIPersistentVolumeSource {
            node_stage_secret_ref: Some(SecretReference {
                name: Some(s.secret_name.clone()),
                namespace: Some(namespace),
            }),
            volume_attributes: attributes(&[("sharename", s.share_name.clone())]),
            ..of(AZURE_FILE, handle, None)
        }));
    }
    if let Some(s) = &spec.gce_persistent_disk {
        let partition = s.partition.filter(|p| *p != 0).map(|p| p.to_string()).unwrap_or_default();
        let volume_attributes = attributes(&[("partition", partition)]);
        let handle = google_disk(bound, &s.pd_name)
            .ok_or_else(|| failed("failed to get region from zones: a zone names no region".to_owned()))?;
        let disk = of(GOOGLE, handle, s.fs_type.as_ref());
        return Ok(Some(CSIPersistentVolumeSource { volume_attributes, ..disk }));
    }
    if let Some(s) = &spec.vsphere_volume {
        let policy = s.storage_policy_name.iter().filter(|p| !p.is_empty());
        let told: Vec<_> = policy.map(|policy| ("storagepolicyname", policy.clone())).collect();
        let volume_attributes = attributes(&told);
        let disk = of(VSPHERE, s.volume_path.clone(), s.fs_type.as_ref());
        return Ok(Some(CSIPersistentVolumeSource { volume_attributes, ..disk }));
    }
    let Some(s) = spec.portworx_volume.as_ref() else { return Ok(None) };
    let annotation = |key: &str| bound.metadata.annotations.as_ref()?.get(key).cloned();
    let [name, namespace] = PORTWORX_SECRET.map(annotation);
    let secret =
        name.zip(namespace).map(|(name, namespace)| SecretReference { name: Some(name), namespace: Some(namespace) });
    Ok(Some(CSIPersistentVolumeSource {
        node_stage_secret_ref: secret.clone(),
        node_publish_secret_ref: secret.clone(),
        node_expand_secret_ref: secret,
        ..of(PORTWORX, s.volume_id.clone(), s.fs_type.as_ref())
    }))
}

/// A volume that is written in a pod of this namespace, as a PersistentVolume that says the same, and whether it is used read-only; None: it
/// is none of these. Its name goes into paths, and so is one for each disk.
pub(super) fn inline(namespace: &str, volume: &Volume) -> Option<(PersistentVolume, bool)> {
    let mut spec = PersistentVolumeSpec::default();
    let named = |driver: &str, id: &str| format!("{driver}-{id}");
    let (name, mode, read_only) = if let Some(s) = &volume.aws_elastic_block_store {
        spec.aws_elastic_block_store = Some(s.clone());
        let id = aws_volume(&s.volume_id).unwrap_or_else(|| s.volume_id.clone());
        (named(AWS, &id), "ReadWriteOnce", s.read_only)
    } else if let Some(s) = &volume.cinder {
        spec.cinder = Some(CinderPersistentVolumeSource {
            fs_type: s.fs_type.clone(),
            read_only: s.read_only,
            secret_ref: None,
            volume_id: s.volume_id.clone(),
        });
        (named(CINDER, &s.volume_id), "ReadWriteOnce", s.read_only)
    } else if let Some(s) = &volume.azure_disk {
        let mut disk = s.clone();
        disk.caching_mode = disk.caching_mode.filter(|mode| !mode.is_empty());
        spec.azure_disk = Some(disk);
        (s.disk_uri.clone(), "ReadWriteOnce", s.read_only)
    } else if let Some(s) = &volume.azure_file {
        spec.azure_file = Some(AzureFilePersistentVolumeSource {
            read_only: s.read_only,
            secret_name: s.secret_name.clone(),
            secret_namespace: Some(if namespace.is_empty() { "default" } else { namespace }.to_owned()),
            share_name: s.share_name.clone(),
        });
        (volume.name.clone(), "ReadWriteMany", s.read_only)
    } else if let Some(s) = &volume.gce_persistent_disk {
        spec.gce_persistent_disk = Some(s.clone());
        let mode = if s.read_only == Some(true) { "ReadOnlyMany" } else { "ReadWriteOnce" };
        (named(GOOGLE, &s.pd_name), mode, s.read_only)
    } else if let Some(s) = &volume.vsphere_volume {
        spec.vsphere_volume = Some(s.clone());
        (named(VSPHERE, &s.volume_path), "ReadWriteOnce", None)
    } else {
        let s = volume.portworx_volume.as_ref()?;
        spec.portworx_volume = Some(s.clone());
        let mode = if s.read_only == Some(true) { "ReadOnlyMany" } else { "ReadWriteOnce" };
        (named(PORTWORX, &s.volume_id), mode, s.read_only)
    };
    spec.access_modes = Some(vec![mode.to_owned()]);
    let mut made = PersistentVolume { spec: Some(spec), ..PersistentVolume::default() };
    made.metadata.name = Some(name);
    Some((made, read_only == Some(true)))
}

/// Access modes as the driver has them: the plugin of Google's disks took `ReadWriteMany` and never meant it.
pub(super) fn access_modes(driver: &str, modes: &[String]) -> Vec<String> {
    let once = |mode: &String| match mode.as_str() {
        "ReadWriteMany" if driver == GOOGLE => "ReadWriteOnce".to_owned(),
        _ => mode.clone(),
    };
    modes.iter().map(once).collect()
}

/// Where the volume may be used, with the labels that its driver gives nodes in place of those that the cloud gave them.
pub(super) fn affinity(driver: &str, mut wanted: NodeSelector) -> NodeSelector {
    let (zone, region) = match driver {
        AWS => ("topology.ebs.csi.aws.com/zone", REGIONS[0]),
        CINDER => ("topology.cinder.csi.openstack.org/zone", REGIONS[0]),
        GOOGLE => ("topology.gke.io/zone", REGIONS[0]),
        VSPHERE => ("topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
        _ => return wanted,
    };
    let wants = wanted.node_selector_terms.iter_mut().flat_map(|term| term.match_expressions.iter_mut().flatten());
    for want in wants {
        if ZONES.contains(&want.key.as_str()) {
            want.key = zone.to_owned();
        } else if REGIONS.contains(&want.key.as_str()) {
            want.key = region.to_owned();
        }
    }
    wanted
}

/// `vol-1` of `aws://ZONE/vol-1`, an older form; any other name is one already.
fn aws_volume(id: &str) -> Option<String> {
    let Some(rest) = id.strip_prefix("aws://") else { return Some(id.to_owned()) };
    let (_, path) = rest.split_once('/')?;
    let id = path.trim_matches('/');
    (id.starts_with("vol-") && !id.contains('/')).then(|| id.to_owned())
}

/// The account that a secret named `azure-storage-account-ACCOUNT-secret` is for; of other secrets, their name.
fn azure_account(secret: &str) -> &str {
    let account = secret.strip_prefix("azure-storage-account-").and_then(|rest| rest.strip_suffix("-secret"));
    account.filter(|a| !a.is_empty()).unwrap_or(secret)
}

/// `projects/UNSPECIFIED/zones/ZONE/disks/NAME`, or with its region when it is in several zones.
fn google_disk(bound: &PersistentVolume, name: &str) -> Option<String> {
    let label = |key: &&str| bound.metadata.labels.as_ref()?.get(*key).filter(|z| !z.is_empty()).cloned();
    // The older label first.
    let zones = ZONES.iter().rev().find_map(label).unwrap_or_else(|| "UNSPECIFIED".to_owned());
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
    use crate::csi::{CsiVolume, Lifecycle};

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
            let got = migrated(&serde_json::from_str(json).unwrap()).unwrap().unwrap();
            assert_eq!((got.driver.as_str(), got.volume_handle.as_str()), (driver, handle), "{json}");
        }
        let other = r#"{"spec":{"nfs":{"path":"/","server":"s"}}}"#;
        assert_eq!(migrated(&serde_json::from_str(other).unwrap()), Ok(None));
        for json in [
            r#"{"spec":{"awsElasticBlockStore":{"volumeID":"aws://us-east-1a/snap-1"}}}"#,
            r#"{"spec":{"azureDisk":{"diskName":"d","diskURI":"/d","kind":"Dedicated"}}}"#,
            r#"{"spec":{"azureFile":{"secretName":"mine","shareName":"sh"}}}"#,
        ] {
            let refused = migrated(&serde_json::from_str(json).unwrap()).unwrap_err();
            assert!(refused.starts_with("failed to translate in-tree pv to CSI: "), "{refused}");
        }
    }

    /// Names, modes and attributes are those of k8s.io/csi-translation-lib 0.36.
    #[test]
    fn written_in_a_pod() {
        for (json, name, handle, mode, read_only) in [
            (
                r#"{"awsElasticBlockStore":{"volumeID":"aws://z/vol-1","readOnly":true}}"#,
                "ebs.csi.aws.com-vol-1",
                "vol-1",
                "ReadWriteOnce",
                true,
            ),
            (r#"{"cinder":{"volumeID":"c-1"}}"#, "cinder.csi.openstack.org-c-1", "c-1", "ReadWriteOnce", false),
            (
                r#"{"azureDisk":{"diskName":"d","diskURI":"/subscriptions/d","kind":"managed","cachingMode":""}}"#,
                "/subscriptions/d",
                "/subscriptions/d",
                "ReadWriteOnce",
                false,
            ),
            (
                r#"{"azureFile":{"secretName":"azure-storage-account-acc-secret","shareName":"sh"}}"#,
                "#acc#sh#v#ns",
                "#acc#sh#v#ns",
                "ReadWriteMany",
                false,
            ),
            (
                r#"{"gcePersistentDisk":{"pdName":"p","readOnly":true}}"#,
                "pd.csi.storage.gke.io-p",
                "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/p",
                "ReadOnlyMany",
                true,
            ),
            (
                r#"{"vsphereVolume":{"volumePath":"[ds] a/b"}}"#,
                "csi.vsphere.vmware.com-[ds] a/b",
                "[ds] a/b",
                "ReadWriteOnce",
                false,
            ),
            (r#"{"portworxVolume":{"volumeID":"px"}}"#, "pxd.portworx.com-px", "px", "ReadWriteOnce", false),
        ] {
            let written = format!(r#"{{"name":"v",{}"#, &json[1..]);
            let volume: Volume = serde_json::from_str(&written).unwrap();
            let made = CsiVolume::migrated_inline("ns", &volume).unwrap().unwrap();
            let got = (made.spec_name.as_str(), made.handle.as_str(), made.access_modes.join(","), made.read_only);
            assert_eq!(got, (name, handle, mode.to_owned(), read_only), "{json}");
            assert!(made.lifecycle == Lifecycle::Persistent && !made.block && made.growth.is_none());
            assert!(!made.attributes.contains_key("cachingMode"), "an empty mode is none");
        }
        let volume = |json| serde_json::from_str::<Volume>(json).unwrap();
        assert_eq!(CsiVolume::migrated_inline("ns", &volume(r#"{"name":"v","emptyDir":{}}"#)), Ok(None));
        let bad = volume(r#"{"name":"v","azureDisk":{"diskName":"d","diskURI":"/d","kind":"Shared"}}"#);
        assert_eq!(
            CsiVolume::migrated_inline("ns", &bad).unwrap_err(),
            "failed to translate in-tree pv to CSI: kind(Shared) is not supported in csi migration"
        );
    }

    #[test]
    fn modes_and_places() {
        let all = ["ReadWriteMany".to_owned(), "ReadOnlyMany".to_owned()];
        assert_eq!(access_modes(GOOGLE, &all), ["ReadWriteOnce", "ReadOnlyMany"]);
        assert_eq!(access_modes(AZURE_FILE, &all), all);
        let wanted = |key: &str| -> NodeSelector {
            let text =
                format!(r#"{{"nodeSelectorTerms":[{{"matchExpressions":[{{"key":"{key}","operator":"In"}}]}}]}}"#);
            serde_json::from_str(&text).unwrap()
        };
        for (driver, key, want) in [
            (GOOGLE, "failure-domain.beta.kubernetes.io/zone", "topology.gke.io/zone"),
            (AWS, "topology.kubernetes.io/zone", "topology.ebs.csi.aws.com/zone"),
            (AWS, "failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
            (VSPHERE, "topology.kubernetes.io/region", "topology.csi.vmware.com/region"),
            (CINDER, "disk", "disk"),
            (AZURE_DISK, "topology.kubernetes.io/zone", "topology.kubernetes.io/zone"),
        ] {
            assert_eq!(affinity(driver, wanted(key)), wanted(want), "{driver} {key}");
        }
    }
}
