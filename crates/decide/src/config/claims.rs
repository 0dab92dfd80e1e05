//! Claims: from a volume of the pod to the PersistentVolume behind it, and what that is on this node.

use model::api::{NFSVolumeSource, PersistentVolume, PersistentVolumeClaim, Volume};
use model::pod::DesiredPod;

use crate::csi::CsiVolume;
use crate::disk;

/// Keeps a claim while pods use it.
const PROTECTION: &str = "kubernetes.io/pvc-protection";
/// Group that containers must have to use a volume.
const GID: &str = "pv.beta.kubernetes.io/gid";

/// A claim that a volume names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    /// Name of the claim in the pod's namespace.
    pub name: String,
    /// `readOnly` of the volume.
    pub read_only: bool,
    /// The claim was made for this pod (`ephemeral`), and must be the pod's own.
    pub ephemeral: bool,
}

/// What a PersistentVolume is on this node.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// A path that is used as it is, after a check of its type.
    HostPath {
        /// The path.
        path: String,
        /// `type`.
        kind: String,
    },
    /// A directory of an NFS server, mounted for the pod.
    Nfs(NfsShare),
    /// A volume of a CSI driver, or a disk of the host.
    Csi(Box<CsiVolume>),
}

/// A directory of an NFS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsShare {
    /// `SERVER:PATH`, as mount(8) takes it.
    pub source: String,
    /// Options of the mount, `ro` among them when it is read-only.
    pub options: Vec<String>,
}

impl NfsShare {
    /// `options`: those of a PersistentVolume; `read_only`: it is used read-only.
    pub fn new(source: &NFSVolumeSource, options: &[String], read_only: bool) -> Self {
        // An IPv6 address is told from the path by brackets.
        let server = match source.server.parse::<std::net::Ipv6Addr>() {
            Ok(_) => format!("[{}]", source.server),
            Err(_) => source.server.clone(),
        };
        let ro = read_only || source.read_only == Some(true);
        let mut all: Vec<String> = ro.then(|| "ro".to_owned()).into_iter().collect();
        all.extend(options.iter().filter(|o| !(ro && *o == "ro")).cloned());
        Self { source: format!("{server}:{}", source.path), options: all }
    }
}

/// A claim followed to its volume.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimedVolume {
    /// Name of the PersistentVolume; messages name the volume by it.
    pub name: String,
    /// Where it is.
    pub place: Place,
    /// The claim is used read-only.
    pub read_only: bool,
    /// Group that containers get in addition.
    pub gid: Option<i64>,
}

/// The claim that a volume names, if it does.
pub fn claim_of(pod: &DesiredPod, volume: &Volume) -> Option<ClaimRef> {
    if let Some(source) = &volume.persistent_volume_claim {
        let read_only = source.read_only == Some(true);
        return Some(ClaimRef { name: source.claim_name.clone(), read_only, ephemeral: false });
    }
    volume.ephemeral.as_ref()?;
    Some(ClaimRef { name: format!("{}-{}", pod.name(), volume.name), read_only: false, ephemeral: true })
}

/// Name of the volume that a claim is bound to.
///
/// # Errors
/// Why the claim cannot be used.
pub fn bound_volume(pod: &DesiredPod, wanted: &ClaimRef, claim: &PersistentVolumeClaim) -> Result<String, String> {
    let meta = &claim.metadata;
    let protected = meta.finalizers.iter().flatten().any(|f| f == PROTECTION);
    if meta.deletion_timestamp.is_some() && !protected {
        return Err("PVC is being deleted".into());
    }
    if claim.status.as_ref().and_then(|s| s.phase.as_deref()) != Some("Bound") {
        return Err("PVC is not bound".into());
    }
    let volume = claim.spec.as_ref().and_then(|s| s.volume_name.clone()).filter(|v| !v.is_empty());
    let volume = volume.ok_or("PVC has empty pvc.Spec.VolumeName")?;
    let mut owners = meta.owner_references.iter().flatten();
    if wanted.ephemeral && !owners.any(|o| o.controller == Some(true) && o.uid == pod.uid().as_str()) {
        let namespace = pod.namespace();
        return Err(format!(
            "PVC {namespace}/{} was not created for pod {namespace}/{} (pod is not owner)",
            wanted.name,
            pod.name()
        ));
    }
    Ok(volume)
}

/// What the volume of a claim is on this node.
///
/// # Errors
/// It is bound to another claim, is a block device, or of a kind that is not supported.
pub fn claimed(
    pod: &DesiredPod,
    volume: &Volume,
    wanted: &ClaimRef,
    claim: &PersistentVolumeClaim,
    bound: &PersistentVolume,
) -> Result<ClaimedVolume, String> {
    let name = bound.metadata.name.clone().unwrap_or_default();
    let spec = bound.spec.as_ref();
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let Some(claim_ref) = spec.and_then(|s| s.claim_ref.as_ref()) else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    let points_to = claim_ref.uid.as_deref().unwrap_or_default();
    if points_to != uid {
        return Err(format!(
            "found PV object {name} but its pv.Spec.ClaimRef.UID {points_to} does not point to claim.UID {uid}"
        ));
    }
    let mode = spec.and_then(|s| s.volume_mode.as_deref()).unwrap_or("Filesystem");
    let mounted = pod.containers().any(|c| c.spec.volume_mounts.iter().flatten().any(|m| m.name == volume.name));
    let as_device = pod.containers().any(|c| c.spec.volume_devices.iter().flatten().any(|d| d.name == volume.name));
    if mounted && mode != "Filesystem" {
        return Err(format!("volume {} has volumeMode {mode}, but is specified in volumeMounts", volume.name));
    }
    if as_device && mode != "Block" {
        return Err(format!("volume {} has volumeMode {mode}, but is specified in volumeDevices", volume.name));
    }
    let place = if let Some(volume) = CsiVolume::claimed(bound, claim, wanted.read_only)? {
        Place::Csi(Box::new(volume))
    } else if let Some(volume) = disk::claimed(bound, pod.namespace(), wanted.read_only)? {
        Place::Csi(Box::new(volume))
    } else if mode != "Filesystem" {
        return Err("volumes of this type are no block devices".into());
    } else if let Some(source) = spec.and_then(|s| s.host_path.as_ref()) {
        Place::HostPath { path: source.path.clone(), kind: source.type_.clone().unwrap_or_default() }
    } else if let Some(source) = spec.and_then(|s| s.nfs.as_ref()) {
        let options = spec.and_then(|s| s.mount_options.as_deref()).unwrap_or_default();
        Place::Nfs(NfsShare::new(source, options, wanted.read_only))
    } else {
        return Err(
            "persistent volumes of this type are not supported; supported are csi, hostPath, local, nfs, iscsi and fc"
                .into(),
        );
    };
    let gid = bound.metadata.annotations.as_ref().and_then(|a| a.get(GID)?.parse().ok());
    Ok(ClaimedVolume { name, place, read_only: wanted.read_only, gid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pod;

    fn claim(json: &str) -> PersistentVolumeClaim {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_claim_must_be_bound() {
        let pod = pod(
            r#"{"containers":[{"name":"a"}],"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c","readOnly":true}},
            {"name":"e","ephemeral":{}},{"name":"x","emptyDir":{}}]}"#,
        );
        let volumes = pod.spec().volumes.clone().unwrap();
        let plain = claim_of(&pod, &volumes[0]).unwrap();
        assert_eq!(plain, ClaimRef { name: "c".into(), read_only: true, ephemeral: false });
        let own = claim_of(&pod, &volumes[1]).unwrap();
        assert_eq!(own, ClaimRef { name: "web-e".into(), read_only: false, ephemeral: true });
        assert_eq!(claim_of(&pod, &volumes[2]), None);
        let bound = r#""spec":{"volumeName":"pv"},"status":{"phase":"Bound"}"#;
        for (wanted, json, want) in [
            (&plain, format!("{{{bound}}}"), Ok("pv")),
            (&plain, r#"{"spec":{"volumeName":"pv"},"status":{"phase":"Pending"}}"#.into(), Err("PVC is not bound")),
            (&plain, r#"{"status":{"phase":"Bound"}}"#.into(), Err("PVC has empty pvc.Spec.VolumeName")),
            (
                &plain,
                format!(r#"{{"metadata":{{"deletionTimestamp":"2026-01-01T00:00:00Z"}},{bound}}}"#),
                Err("PVC is being deleted"),
            ),
            (
                &plain,
                format!(
                    r#"{{"metadata":{{"deletionTimestamp":"2026-01-01T00:00:00Z","finalizers":["{PROTECTION}"]}},{bound}}}"#
                ),
                Ok("pv"),
            ),
            (&own, format!("{{{bound}}}"), Err("PVC ns/web-e was not created for pod ns/web (pod is not owner)")),
            (
                &own,
                format!(
                    r#"{{"metadata":{{"ownerReferences":[{{"apiVersion":"v1","kind":"Pod","name":"web","uid":"uid-1","controller":true}}]}},{bound}}}"#
                ),
                Ok("pv"),
            ),
        ] {
            let got = bound_volume(&pod, wanted, &claim(&json));
            assert_eq!(got.as_deref().map_err(String::as_str), want, "{json}");
        }
    }

    #[test]
    fn shares() {
        let source = |server: &str, ro: bool| NFSVolumeSource {
            server: server.into(),
            path: "/export".into(),
            read_only: Some(ro),
        };
        let hard = ["hard".to_owned(), "ro".to_owned()];
        for (source, options, read_only, want) in [
            (source("s", false), &[][..], false, ("s:/export", vec![])),
            (source("fd00::1", true), &[], false, ("[fd00::1]:/export", vec!["ro"])),
            (source("10.0.0.1", false), &hard[..], true, ("10.0.0.1:/export", vec!["ro", "hard"])),
        ] {
            let got = NfsShare::new(&source, options, read_only);
            assert_eq!((got.source.as_str(), got.options.iter().map(String::as_str).collect::<Vec<_>>()), want);
        }
    }

    #[test]
    fn what_is_behind_a_claim() {
        let pod = pod(r#"{"containers":[{"name":"a","volumeMounts":[{"name":"v","mountPath":"/v"}]}],
            "volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c"}}]}"#);
        let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
        let wanted = claim_of(&pod, &volume).unwrap();
        let claim = claim(r#"{"metadata":{"uid":"u1"}}"#);
        let get = |json: &str| {
            let bound: PersistentVolume = serde_json::from_str(json).unwrap();
            claimed(&pod, &volume, &wanted, &claim, &bound)
        };
        let local = get(
            r#"{"metadata":{"name":"pv","annotations":{"pv.beta.kubernetes.io/gid":"55"}},"spec":{"claimRef":{"uid":"u1"},"local":{"path":"/d"}}}"#,
        );
        let local = local.unwrap();
        assert_eq!((local.name.as_str(), local.read_only, local.gid), ("pv", false, Some(55)));
        let Place::Csi(volume) = local.place else { panic!("a local volume is a disk of the host") };
        assert_eq!(volume.disk, Some(disk::Disk::Local { path: "/d".into() }));
        assert_eq!(
            get(r#"{"metadata":{"name":"pv"},"spec":{"claimRef":{"uid":"u1"},"hostPath":{"path":"/d","type":"Directory"}}}"#)
                .map(|c| c.place),
            Ok(Place::HostPath { path: "/d".into(), kind: "Directory".into() })
        );
        for (json, want) in [
            (
                r#"{"metadata":{"name":"pv"},"spec":{"claimRef":{"uid":"u2"}}}"#,
                "found PV object pv but its pv.Spec.ClaimRef.UID u2 does not point to claim.UID u1",
            ),
            (
                r#"{"metadata":{"name":"pv"},"spec":{}}"#,
                "found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim",
            ),
            (
                r#"{"metadata":{"name":"pv"},"spec":{"volumeMode":"Block","claimRef":{"uid":"u1"}}}"#,
                "volume v has volumeMode Block, but is specified in volumeMounts",
            ),
            (
                r#"{"metadata":{"name":"pv"},"spec":{"claimRef":{"uid":"u1"},"rbd":{"image":"i","monitors":[]}}}"#,
                "persistent volumes of this type are not supported; supported are csi, hostPath, local, nfs, iscsi and fc",
            ),
            (
                r#"{"metadata":{"name":"pv"},"spec":{"claimRef":{"uid":"u1"},"fc":{"targetWWNs":["1"]}}}"#,
                "fc: no fc disk information found. failed to make a new mounter",
            ),
        ] {
            assert_eq!(get(json), Err(want.into()), "{json}");
        }
    }
}
