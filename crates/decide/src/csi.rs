//! Volumes of CSI drivers: what the objects say of one, and what a driver is to be told of it. The rules are those of the API's fields
//! (`PersistentVolume.spec.csi`, `Pod.spec.volumes[].csi`, `CSIDriver.spec`); the texts are the Go kubelet's.

mod growth;
mod migrate;

pub use growth::{Growth, ResizeNews};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::storage::v1::CSIDriverSpec;
use model::api::{CSIVolumeSource, NodeSelector, PersistentVolume, PersistentVolumeClaim, SecretReference, Volume};
use model::pod::DesiredPod;
use sha2::{Digest, Sha256};

use crate::config::go_text::quote;
use crate::disk::{self, Disk};
use crate::selinux::Wanted;

/// The plugin's name in paths and unique volume names.
pub const PLUGIN: &str = "kubernetes.io/csi";

/// Whose volume it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifecycle {
    /// A PersistentVolume: it is there before the pod and after it.
    Persistent,
    /// Written in the pod; it begins and ends with it.
    Ephemeral,
}

impl Lifecycle {
    /// As `CSIDriver.spec.volumeLifecycleModes` and `vol_data.json` write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// A secret that a driver needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// One volume of a driver, as pods ask for it.
#[derive(Clone, Debug, PartialEq)]
pub struct CsiVolume {
    /// Name of the driver.
    pub driver: String,
    /// The driver's name of the volume.
    pub handle: String,
    /// Name of the PersistentVolume; of an inline volume, its name in the pod. Messages and paths carry it.
    pub spec_name: String,
    /// Whose volume it is.
    pub lifecycle: Lifecycle,
    /// `fsType`, maybe empty.
    pub fs_type: String,
    /// `accessModes`; of an inline volume none.
    pub access_modes: Vec<String>,
    /// `mountOptions`.
    pub mount_options: Vec<String>,
    /// Published read-only.
    pub read_only: bool,
    /// `volumeAttributes`.
    pub attributes: BTreeMap<String, String>,
    /// `nodeStageSecretRef`.
    pub stage_secret: Option<SecretName>,
    /// `nodePublishSecretRef`.
    pub publish_secret: Option<SecretName>,
    /// `nodeExpandSecretRef`.
    pub expand_secret: Option<SecretName>,
    /// `volumeMode: Block`.
    pub block: bool,
    /// `nodeAffinity.required`.
    pub affinity: Option<NodeSelector>,
    /// Of a claim's volume: it may have to grow.
    pub growth: Option<Growth>,
    /// SELinux labels that the pod wants its files to have. See [`crate::selinux`].
    pub labels: BTreeSet<String>,
    /// It may be mounted with one: its access modes allow it.
    pub may_have_label: bool,
    /// It is a disk of the host, and `driver` the name of its plugin. Nothing else knows it.
    pub disk: Option<Disk>,
}

fn hex(text: &str) -> String {
    Sha256::digest(text).iter().map(|b| format!("{b:02x}")).collect()
}

/// Name of the VolumeAttachment of a volume to a node.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", hex(&format!("{handle}{driver}{node}")))
}

/// Name of the directory that a volume is staged in, below its driver's.
pub fn staging_name(handle: &str) -> String {
    hex(handle)
}

/// Name of the volume in the node's `volumesInUse` and `volumesAttached`.
pub fn unique_name(driver: &str, handle: &str) -> String {
    if disk::is_plugin(driver) {
        return format!("{driver}/{handle}");
    }
    format!("{PLUGIN}/{driver}^{handle}")
}

fn secret(of: Option<&SecretReference>) -> Option<SecretName> {
    let of = of?;
    Some(SecretName { namespace: of.namespace.clone()?, name: of.name.clone()? })
}

impl CsiVolume {
    /// A volume that is written in the pod.
    pub fn inline(pod: &DesiredPod, name: &str, source: &CSIVolumeSource) -> Self {
        let handle = format!("csi-{}", hex(&format!("{}{name}", pod.uid())));
        Self {
            driver: source.driver.clone(),
            handle,
            spec_name: name.to_owned(),
            lifecycle: Lifecycle::Ephemeral,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            access_modes: Vec::new(),
            mount_options: Vec::new(),
            read_only: source.read_only == Some(true),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            stage_secret: None,
            publish_secret: source
                .node_publish_secret_ref
                .as_ref()
                .map(|s| SecretName { namespace: pod.namespace().to_owned(), name: s.name.clone() }),
            expand_secret: None,
            block: false,
            affinity: None,
            growth: None,
            labels: BTreeSet::new(),
            may_have_label: false,
            disk: None,
        }
    }

    /// The volume behind a claim; None: it is of another kind.
    ///
    /// # Errors
    /// It is one of a plugin that a driver has replaced, and cannot be one of that driver's.
    pub fn claimed(
        bound: &PersistentVolume,
        claim: &PersistentVolumeClaim,
        read_only: bool,
    ) -> Result<Option<Self>, String> {
        let growth = growth::growth(bound, claim);
        Ok(Self::of_object(bound, read_only)?.map(|volume| Self { growth, ..volume }))
    }

    /// A volume that is written in a pod of this namespace, of a plugin that a driver has replaced; None: it is of another kind.
    ///
    /// # Errors
    /// It cannot be one of the driver's.
    pub fn migrated_inline(namespace: &str, volume: &Volume) -> Result<Option<Self>, String> {
        match migrate::inline(namespace, volume) {
            None => Ok(None),
            Some((object, read_only)) => {
                let Some(mut made) = Self::of_object(&object, read_only)? else { return Ok(None) };
                if volume.azure_file.is_some() {
                    // The handle of such a share is its name too.
                    made.spec_name.clone_from(&made.handle);
                }
                if [".", ".."].contains(&made.spec_name.as_str()) {
                    return Err(format!("{} is no name of a disk", quote(&made.spec_name)));
                }
                Ok(Some(made))
            }
        }
    }

    fn of_object(object: &PersistentVolume, read_only: bool) -> Result<Option<Self>, String> {
        let Some(spec) = object.spec.as_ref() else { return Ok(None) };
        let of_before = if spec.csi.is_some() { None } else { migrate::migrated(object)? };
        let Some(source) = spec.csi.as_ref().or(of_before.as_ref()) else { return Ok(None) };
        let mut affinity = spec.node_affinity.as_ref().and_then(|a| a.required.clone());
        let mut access_modes = spec.access_modes.clone().unwrap_or_default();
        if of_before.is_some() {
            affinity = affinity.map(|wanted| migrate::affinity(&source.driver, wanted));
            access_modes = migrate::access_modes(&source.driver, &access_modes);
        }
        Ok(Some(Self {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            spec_name: object.metadata.name.clone().unwrap_or_default(),
            lifecycle: Lifecycle::Persistent,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            access_modes,
            mount_options: spec.mount_options.clone().unwrap_or_default(),
            read_only,
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            stage_secret: secret(source.node_stage_secret_ref.as_ref()),
            publish_secret: secret(source.node_publish_secret_ref.as_ref()),
            expand_secret: secret(source.node_expand_secret_ref.as_ref()),
            block: spec.volume_mode.as_deref() == Some("Block"),
            affinity,
            growth: None,
            labels: BTreeSet::new(),
            may_have_label: false,
            disk: None,
        }))
    }

    /// See [`unique_name`].
    pub fn unique_name(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    /// Only one pod may use it at a time.
    pub fn one_pod(&self) -> bool {
        self.access_modes == ["ReadWriteOncePod"]
    }
}

/// What `CSIDriver.spec` asks of a kubelet. None there: the driver has no such object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DriverRules(pub Option<CSIDriverSpec>);

/// What is done about the pod's `fsGroup`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsGroup {
    /// Nothing.
    Leave,
    /// The kubelet changes the files.
    Change(i64),
    /// The driver is told.
    Delegate(i64),
}

impl DriverRules {
    /// A controller attaches the volume before the node may use it.
    pub fn attach_required(&self) -> bool {
        self.0.as_ref().is_none_or(|s| s.attach_required != Some(false))
    }

    /// How often the driver is asked how many volumes it can take here; None: once, and a failed attachment says nothing of that.
    pub fn limit_period(&self) -> Option<Duration> {
        let seconds = self.0.as_ref()?.node_allocatable_update_period_seconds?;
        u64::try_from(seconds).ok().filter(|s| *s > 0).map(Duration::from_secs)
    }

    /// The label to mount a volume with. Only drivers that say so take it.
    ///
    /// # Errors
    /// The pod's containers want different ones.
    pub fn label<'a>(&self, volume: &'a CsiVolume) -> Result<Option<&'a str>, String> {
        match self.wanted_label(volume) {
            _ if !volume.may_have_label => Ok(None),
            Wanted::Untaken => Ok(None),
            Wanted::One(label) => Ok(label),
            Wanted::Several => {
                let all: Vec<&str> = volume.labels.iter().map(String::as_str).collect();
                Err(format!("multiple SELinux labels found: {}", all.join(",")))
            }
        }
    }

    /// The label that the volume would be mounted with, were its access modes no matter.
    pub fn wanted_label<'a>(&self, volume: &'a CsiVolume) -> Wanted<&'a str> {
        let takes = match &volume.disk {
            Some(disk) => !matches!(disk, Disk::Local { .. }),
            None => self.0.as_ref().is_some_and(|s| s.se_linux_mount == Some(true)),
        };
        if !takes || volume.block {
            return Wanted::Untaken;
        }
        let mut labels = volume.labels.iter().map(String::as_str);
        match (labels.next(), labels.next()) {
            (first, None) => Wanted::One(first),
            _ => Wanted::Several,
        }
    }

    /// The driver is told of the pod.
    pub fn pod_info(&self) -> bool {
        self.0.as_ref().is_some_and(|s| s.pod_info_on_mount == Some(true))
    }

    /// Volumes are published again and again.
    pub fn republish(&self) -> bool {
        self.0.as_ref().is_some_and(|s| s.requires_republish == Some(true))
    }

    /// Audiences and lives (seconds) of the tokens that the driver gets.
    pub fn tokens(&self) -> impl Iterator<Item = (&str, Option<i64>)> {
        let requests = self.0.iter().flat_map(|s| s.token_requests.iter().flatten());
        requests.map(|r| (r.audience.as_str(), r.expiration_seconds))
    }

    /// Tokens travel among the secrets instead of the attributes.
    pub fn tokens_in_secrets(&self) -> bool {
        self.0.as_ref().is_some_and(|s| s.service_account_token_in_secrets == Some(true))
    }

    /// Whether the driver takes volumes of this life.
    ///
    /// # Errors
    /// It does not, with the reason.
    pub fn check_lifecycle(&self, driver: &str, lifecycle: Lifecycle) -> Result<(), String> {
        let mode = lifecycle.as_str();
        let Some(spec) = &self.0 else {
            if lifecycle == Lifecycle::Persistent {
                return Ok(());
            }
            return Err(format!("volume mode {} not supported by driver {driver} (no CSIDriver object)", quote(mode)));
        };
        let modes = spec.volume_lifecycle_modes.clone().unwrap_or_else(|| vec!["Persistent".to_owned()]);
        if modes.iter().any(|m| m == mode) {
            return Ok(());
        }
        let quoted: Vec<String> = modes.iter().map(|m| quote(m)).collect();
        Err(format!(
            "volume mode {} not supported by driver {driver} (only supports [{}])",
            quote(mode),
            quoted.join(" ")
        ))
    }

    /// What is done about the group. `delegates`: the driver has the capability VOLUME_MOUNT_GROUP.
    pub fn fs_group(&self, volume: &CsiVolume, group: Option<i64>, delegates: bool) -> FsGroup {
        let Some(group) = group else { return FsGroup::Leave };
        if delegates {
            return FsGroup::Delegate(group);
        }
        if volume.block || volume.read_only {
            return FsGroup::Leave;
        }
        let policy = self.0.as_ref().and_then(|s| s.fs_group_policy.as_deref());
        let change = match policy {
            Some("None") => false,
            Some("File") => true,
            // ReadWriteOnceWithFSType.
            _ => {
                let once = |m: &String| m == "ReadWriteOnce" || m == "ReadWriteOncePod";
                let inline = volume.lifecycle == Lifecycle::Ephemeral;
                !volume.fs_type.is_empty() && (inline || volume.access_modes.iter().any(once))
            }
        };
        if change { FsGroup::Change(group) } else { FsGroup::Leave }
    }

    /// What the driver is told of the pod, beside the volume's attributes.
    pub fn pod_attributes(&self, pod: &DesiredPod, lifecycle: Lifecycle) -> BTreeMap<String, String> {
        if !self.pod_info() {
            return BTreeMap::new();
        }
        let account = pod.spec().service_account_name.clone().unwrap_or_default();
        let ephemeral = lifecycle == Lifecycle::Ephemeral;
        [
            ("pod.name", pod.name().to_owned()),
            ("pod.namespace", pod.namespace().to_owned()),
            ("pod.uid", pod.uid().to_string()),
            ("serviceAccount.name", account),
            ("ephemeral", ephemeral.to_string()),
        ]
        .map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value))
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pod;

    fn volume(json: &str) -> PersistentVolume {
        serde_json::from_str(json).unwrap()
    }

    fn claim(json: &str) -> PersistentVolumeClaim {
        serde_json::from_str(json).unwrap()
    }

    fn rules(json: &str) -> DriverRules {
        DriverRules(Some(serde_json::from_str(json).unwrap()))
    }

    const CSI: &str = r#"{"metadata":{"name":"pv-a"},"spec":{"capacity":{"storage":"2Gi"},"accessModes":["ReadWriteOnce"],
        "csi":{"driver":"d","volumeHandle":"h","fsType":"ext4","nodeStageSecretRef":{"namespace":"n","name":"s"}}}}"#;

    #[test]
    fn names() {
        // From the Go kubelet's files and objects.
        assert_eq!(unique_name("d", "h"), "kubernetes.io/csi/d^h");
        assert_eq!(unique_name(disk::FC, "[1]:0"), "kubernetes.io/fc/[1]:0");
        assert_eq!(attachment_name("h", "d", "n"), format!("csi-{}", hex("hdn")));
        let web = pod(r#"{"containers":[{"name":"a"}]}"#);
        let inline = CsiVolume::inline(&web, "v", &CSIVolumeSource { driver: "d".into(), ..Default::default() });
        assert_eq!(inline.handle, format!("csi-{}", hex("uid-1v")));
        assert_eq!(staging_name("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn a_claims_volume() {
        let v = CsiVolume::claimed(&volume(CSI), &claim("{}"), true).unwrap().unwrap();
        assert_eq!((v.driver.as_str(), v.handle.as_str(), v.spec_name.as_str(), v.read_only), ("d", "h", "pv-a", true));
        assert_eq!(v.stage_secret, Some(SecretName { namespace: "n".into(), name: "s".into() }));
        assert_eq!(v.growth, None, "the claim says nothing of its size");
        let nfs = volume(r#"{"spec":{"nfs":{"path":"/","server":"s"}}}"#);
        assert_eq!(CsiVolume::claimed(&nfs, &claim("{}"), false), Ok(None));
    }

    #[test]
    fn lifecycles() {
        let none = DriverRules::default();
        assert_eq!(none.check_lifecycle("d", Lifecycle::Persistent), Ok(()));
        assert_eq!(
            none.check_lifecycle("d", Lifecycle::Ephemeral).unwrap_err(),
            "volume mode \"Ephemeral\" not supported by driver d (no CSIDriver object)"
        );
        assert_eq!(
            rules("{}").check_lifecycle("d", Lifecycle::Ephemeral).unwrap_err(),
            "volume mode \"Ephemeral\" not supported by driver d (only supports [\"Persistent\"])"
        );
        assert!(rules(r#"{"volumeLifecycleModes":["Ephemeral"]}"#).check_lifecycle("d", Lifecycle::Ephemeral).is_ok());
    }

    #[test]
    fn groups() {
        let of = |json: &str| CsiVolume::claimed(&volume(json), &claim("{}"), false).unwrap().unwrap();
        let once = of(CSI);
        let many = CsiVolume { access_modes: vec!["ReadWriteMany".into()], ..once.clone() };
        let bare = CsiVolume { fs_type: String::new(), ..once.clone() };
        let read_only = CsiVolume { read_only: true, ..once.clone() };
        let (file, none) = (rules(r#"{"fsGroupPolicy":"File"}"#), rules(r#"{"fsGroupPolicy":"None"}"#));
        let default = rules(r#"{"fsGroupPolicy":"ReadWriteOnceWithFSType"}"#);
        for (rules, volume, group, delegates, want) in [
            (&default, &once, Some(7), false, FsGroup::Change(7)),
            (&default, &once, None, false, FsGroup::Leave),
            (&default, &many, Some(7), false, FsGroup::Leave),
            (&default, &bare, Some(7), false, FsGroup::Leave),
            (&default, &read_only, Some(7), false, FsGroup::Leave),
            (&file, &many, Some(7), false, FsGroup::Change(7)),
            (&file, &read_only, Some(7), false, FsGroup::Leave),
            (&none, &once, Some(7), false, FsGroup::Leave),
            (&none, &once, Some(7), true, FsGroup::Delegate(7)),
        ] {
            assert_eq!(rules.fs_group(volume, group, delegates), want, "{rules:?} {volume:?}");
        }
    }

    #[test]
    fn labels() {
        let plain = CsiVolume::claimed(&volume(CSI), &claim("{}"), false).unwrap().unwrap();
        let with = |list: &[&str]| CsiVolume {
            labels: list.iter().map(ToString::to_string).collect(),
            may_have_label: true,
            ..plain.clone()
        };
        let takes = rules(r#"{"seLinuxMount":true}"#);
        for (rules, volume, want) in [
            (&takes, with(&[]), Ok(None)),
            (&takes, with(&["a"]), Ok(Some("a"))),
            (&takes, CsiVolume { block: true, ..with(&["a"]) }, Ok(None)),
            (&takes, with(&["a", "b"]), Err("multiple SELinux labels found: a,b".to_owned())),
            (&takes, CsiVolume { may_have_label: false, ..with(&["a"]) }, Ok(None)),
            (&takes, CsiVolume { may_have_label: false, ..with(&["a", "b"]) }, Ok(None)),
            (&rules("{}"), with(&["a", "b"]), Ok(None)),
            (&DriverRules::default(), with(&["a"]), Ok(None)),
        ] {
            assert_eq!(rules.label(&volume), want, "{rules:?}");
        }
    }

    #[test]
    fn what_a_driver_is_told_of_the_pod() {
        let web = pod(r#"{"serviceAccountName":"sa","containers":[{"name":"a"}]}"#);
        assert!(rules("{}").pod_attributes(&web, Lifecycle::Persistent).is_empty());
        let told = rules(r#"{"podInfoOnMount":true}"#).pod_attributes(&web, Lifecycle::Ephemeral);
        assert_eq!(
            serde_json::to_string(&told).unwrap(),
            r#"{"csi.storage.k8s.io/ephemeral":"true","csi.storage.k8s.io/pod.name":"web","csi.storage.k8s.io/pod.namespace":"ns","csi.storage.k8s.io/pod.uid":"uid-1","csi.storage.k8s.io/serviceAccount.name":"sa"}"#
        );
        assert!(rules("{}").attach_required() && DriverRules::default().attach_required());
        assert!(!rules(r#"{"attachRequired":false}"#).attach_required());
        let period = |json| rules(json).limit_period();
        assert_eq!(period(r#"{"nodeAllocatableUpdatePeriodSeconds":10}"#), Some(Duration::from_secs(10)));
        assert_eq!((period("{}"), DriverRules::default().limit_period()), (None, None));
    }
}
