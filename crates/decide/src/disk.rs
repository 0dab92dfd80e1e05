//! Disks that the host makes available without a driver: local disks, iSCSI, Fibre Channel. What the objects say of one, and its names.
//!
//! They go the way of a driver's volumes ([`CsiVolume`]): once on the node, then for each pod. The plugin takes the driver's place.

use std::collections::BTreeSet;

use model::api::{ISCSIPersistentVolumeSource, PersistentVolume, Volume};
use model::pod::DesiredPod;

use crate::csi::{CsiVolume, Lifecycle, SecretName};

/// The plugin of local disks and directories.
pub const LOCAL: &str = "kubernetes.io/local-volume";
/// The plugin of iSCSI.
pub const ISCSI: &str = "kubernetes.io/iscsi";
/// The plugin of Fibre Channel.
pub const FC: &str = "kubernetes.io/fc";

/// Port of a portal that names none.
const PORT: &str = ":3260";

/// A disk of the host, or one that it can attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A directory or block device of the node.
    Local {
        /// Its path.
        path: String,
    },
    /// A logical unit of an iSCSI target.
    Iscsi(Iscsi),
    /// A logical unit on a Fibre Channel.
    Fc(Fc),
}

/// See [`Disk::Iscsi`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Iscsi {
    /// `targetPortal` as it is written.
    pub portal: String,
    /// All portals, the target's first, with their ports.
    pub portals: Vec<String>,
    /// Qualified name of the target.
    pub iqn: String,
    /// Logical unit.
    pub lun: i32,
    /// `iscsiInterface`: the interface that iscsiadm(8) has.
    pub interface: String,
    /// `initiatorName`: an interface of the volume's own is made for it.
    pub initiator: Option<String>,
    /// `chapAuthDiscovery`.
    pub chap_discovery: bool,
    /// `chapAuthSession`.
    pub chap_session: bool,
}

/// See [`Disk::Fc`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fc {
    /// `targetWWNs`; with them goes `lun`.
    pub wwns: Vec<String>,
    /// Logical unit.
    pub lun: i32,
    /// `wwids`, when there are no target names; blanks are underscores, as udev writes them.
    pub wwids: Vec<String>,
}

impl Iscsi {
    /// Name of the interface that sessions go over. `volume`: the volume's name.
    pub fn own_interface(&self, volume: &str) -> String {
        match (&self.initiator, self.portals.first()) {
            (Some(_), Some(portal)) => format!("{portal}:{volume}"),
            _ => self.interface.clone(),
        }
    }
}

impl Disk {
    /// The plugin's name.
    pub fn plugin(&self) -> &'static str {
        match self {
            Self::Local { .. } => LOCAL,
            Self::Iscsi(_) => ISCSI,
            Self::Fc(_) => FC,
        }
    }

    /// Its name among the plugin's: in `volumesInUse` and `volumesAttached`. `volume`: the volume's name.
    fn handle(&self, volume: &str) -> String {
        match self {
            Self::Local { .. } => volume.to_owned(),
            Self::Iscsi(i) => format!("{}:{}:{}", i.portal, i.iqn, i.lun),
            Self::Fc(f) if f.wwns.is_empty() => format!("[{}]", f.wwids.join(" ")),
            Self::Fc(f) => format!("[{}]:{}", f.wwns.join(" "), f.lun),
        }
    }

    /// Its directory below the plugin's. `volume`: the volume's name.
    pub fn dir(&self, volume: &str) -> String {
        match self {
            Self::Local { .. } => volume.to_owned(),
            Self::Iscsi(i) => {
                let portal = i.portals.first().map_or(i.portal.as_str(), String::as_str);
                format!("iface-{}/{portal}-{}-lun-{}", i.own_interface(volume), i.iqn, i.lun)
            }
            Self::Fc(f) if f.wwns.is_empty() => f.wwids.join("-"),
            Self::Fc(f) => format!("{}-lun-{}", f.wwns.join("-"), f.lun),
        }
    }

    /// A controller counts it as attached before the node may use it: two nodes must not mount it.
    pub fn is_attached(plugin: &str) -> bool {
        plugin == ISCSI || plugin == FC
    }
}

/// True for the plugins of this module.
pub fn is_plugin(name: &str) -> bool {
    [LOCAL, ISCSI, FC].contains(&name)
}

/// The same name for a disk whether its portal names its port or not.
pub fn normal(plugin: &str, handle: &str) -> String {
    let target = [":iqn.", ":eui.", ":naa."].iter().find_map(|kind| handle.find(kind));
    match target.filter(|_| plugin == ISCSI).map(|at| handle.split_at(at)) {
        Some((portal, rest)) if !portal.contains(':') => format!("{portal}{PORT}{rest}"),
        _ => handle.to_owned(),
    }
}

/// The handle of a disk whose directory was found ([`Disk::dir`]); None: it is none of the plugin's.
pub fn found(plugin: &str, dir: &str) -> Option<String> {
    match plugin {
        LOCAL => Some(dir.to_owned()),
        ISCSI => {
            let (_, name) = dir.strip_prefix("iface-")?.split_once('/')?;
            let (target, lun) = name.rsplit_once("-lun-")?;
            let at = ["-iqn.", "-eui.", "-naa."].iter().find_map(|kind| target.find(kind))?;
            let (portal, iqn) = target.split_at(at);
            lun.parse::<u32>().ok()?;
            Some(format!("{portal}:{}:{lun}", &iqn[1..]))
        }
        FC => match dir.rsplit_once("-lun-") {
            Some((wwns, lun)) => {
                lun.parse::<u32>().ok()?;
                Some(format!("[{}]:{lun}", wwns.replace('-', " ")))
            }
            None => Some(format!("[{}]", dir.replace('-', " "))),
        },
        _ => None,
    }
}

fn with_port(portal: &str) -> String {
    if portal.contains(':') { portal.to_owned() } else { format!("{portal}{PORT}") }
}

fn iscsi(source: &ISCSIPersistentVolumeSource) -> Disk {
    let more = source.portals.iter().flatten();
    let mut portals: Vec<String> = Vec::new();
    for portal in std::iter::once(&source.target_portal).chain(more).map(|p| with_port(p)) {
        if !portals.contains(&portal) {
            portals.push(portal);
        }
    }
    Disk::Iscsi(Iscsi {
        portal: source.target_portal.clone(),
        portals,
        iqn: source.iqn.clone(),
        lun: source.lun,
        interface: source.iscsi_interface.clone().filter(|i| !i.is_empty()).unwrap_or_else(|| "default".to_owned()),
        initiator: source.initiator_name.clone().filter(|i| !i.is_empty()),
        chap_discovery: source.chap_auth_discovery == Some(true),
        chap_session: source.chap_auth_session == Some(true),
    })
}

fn fc(wwns: Option<&Vec<String>>, lun: Option<i32>, wwids: Option<&Vec<String>>) -> Result<Disk, String> {
    let (wwns, wwids) = (wwns.cloned().unwrap_or_default(), wwids.cloned().unwrap_or_default());
    match lun {
        Some(lun) if !wwns.is_empty() => Ok(Disk::Fc(Fc { wwns, lun, wwids: Vec::new() })),
        _ if !wwids.is_empty() => {
            let wwids = wwids.iter().map(|id| id.replace(' ', "_")).collect();
            Ok(Disk::Fc(Fc { wwns: Vec::new(), lun: 0, wwids }))
        }
        _ => Err("fc: no fc disk information found. failed to make a new mounter".to_owned()),
    }
}

/// A disk in the form of a driver's volume.
fn volume(disk: Disk, name: &str, fs_type: Option<&String>, read_only: bool) -> CsiVolume {
    CsiVolume {
        driver: disk.plugin().to_owned(),
        handle: disk.handle(name),
        spec_name: name.to_owned(),
        lifecycle: Lifecycle::Persistent,
        fs_type: fs_type.cloned().unwrap_or_default(),
        access_modes: Vec::new(),
        mount_options: Vec::new(),
        read_only,
        attributes: Default::default(),
        stage_secret: None,
        publish_secret: None,
        expand_secret: None,
        block: false,
        affinity: None,
        growth: None,
        labels: BTreeSet::new(),
        may_have_label: false,
        disk: Some(disk),
    }
}

/// The disk behind a claim; None: it is of another kind. `namespace`: the claim's.
///
/// # Errors
/// What the object says makes no disk.
pub fn claimed(bound: &PersistentVolume, namespace: &str, read_only: bool) -> Result<Option<CsiVolume>, String> {
    let Some(spec) = &bound.spec else { return Ok(None) };
    let name = bound.metadata.name.as_deref().unwrap_or_default();
    let mut made = if let Some(s) = &spec.local {
        volume(Disk::Local { path: s.path.clone() }, name, s.fs_type.as_ref(), read_only)
    } else if let Some(s) = &spec.iscsi {
        let mut made = volume(iscsi(s), name, s.fs_type.as_ref(), read_only);
        made.stage_secret = s.secret_ref.as_ref().and_then(|r| {
            let of_its_own = r.namespace.clone().filter(|n| !n.is_empty());
            Some(SecretName { namespace: of_its_own.unwrap_or_else(|| namespace.to_owned()), name: r.name.clone()? })
        });
        made
    } else if let Some(s) = &spec.fc {
        let disk = fc(s.target_wwns.as_ref(), s.lun, s.wwids.as_ref())?;
        volume(disk, name, s.fs_type.as_ref(), read_only)
    } else {
        return Ok(None);
    };
    made.access_modes = spec.access_modes.clone().unwrap_or_default();
    made.mount_options = spec.mount_options.clone().unwrap_or_default();
    made.block = spec.volume_mode.as_deref() == Some("Block");
    made.affinity = spec.node_affinity.as_ref().and_then(|a| a.required.clone());
    Ok(Some(made))
}

/// A disk that is written in the pod; None: the volume is of another kind.
///
/// # Errors
/// What is written makes no disk.
pub fn inline(pod: &DesiredPod, of: &Volume) -> Result<Option<CsiVolume>, String> {
    if let Some(s) = &of.iscsi {
        let source = ISCSIPersistentVolumeSource {
            chap_auth_discovery: s.chap_auth_discovery,
            chap_auth_session: s.chap_auth_session,
            fs_type: s.fs_type.clone(),
            initiator_name: s.initiator_name.clone(),
            iqn: s.iqn.clone(),
            iscsi_interface: s.iscsi_interface.clone(),
            lun: s.lun,
            portals: s.portals.clone(),
            read_only: s.read_only,
            secret_ref: None,
            target_portal: s.target_portal.clone(),
        };
        let mut made = volume(iscsi(&source), &of.name, s.fs_type.as_ref(), s.read_only == Some(true));
        let secret = s.secret_ref.as_ref();
        made.stage_secret = secret.map(|r| SecretName { namespace: pod.namespace().to_owned(), name: r.name.clone() });
        return Ok(Some(made));
    }
    let Some(s) = &of.fc else { return Ok(None) };
    let disk = fc(s.target_wwns.as_ref(), s.lun, s.wwids.as_ref())?;
    Ok(Some(volume(disk, &of.name, s.fs_type.as_ref(), s.read_only == Some(true))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pod;

    fn of(spec: &str) -> CsiVolume {
        let bound = serde_json::from_str(&format!(r#"{{"metadata":{{"name":"pv"}},"spec":{spec}}}"#)).unwrap();
        claimed(&bound, "ns", false).unwrap().unwrap()
    }

    /// Names and directories are those of the Go kubelet's plugins.
    #[test]
    fn names() {
        for (spec, handle, dir) in [
            (r#"{"local":{"path":"/dev/sdb"},"volumeMode":"Block"}"#, "pv", "pv"),
            (
                r#"{"iscsi":{"targetPortal":"10.0.0.1","iqn":"iqn.2001-04.com.example:a-b","lun":3}}"#,
                "10.0.0.1:iqn.2001-04.com.example:a-b:3",
                "iface-default/10.0.0.1:3260-iqn.2001-04.com.example:a-b-lun-3",
            ),
            (
                r#"{"iscsi":{"targetPortal":"10.0.0.1:99","iqn":"eui.1","lun":0,"initiatorName":"iqn.me","iscsiInterface":"x"}}"#,
                "10.0.0.1:99:eui.1:0",
                "iface-10.0.0.1:99:pv/10.0.0.1:99-eui.1-lun-0",
            ),
            (r#"{"fc":{"targetWWNs":["5006","5007"],"lun":2}}"#, "[5006 5007]:2", "5006-5007-lun-2"),
            (r#"{"fc":{"wwids":["3600 5","36006"]}}"#, "[3600_5 36006]", "3600_5-36006"),
        ] {
            let volume = of(spec);
            let disk = volume.disk.clone().unwrap();
            assert_eq!((volume.handle.as_str(), disk.dir("pv").as_str()), (handle, dir));
            let again = found(disk.plugin(), dir).unwrap();
            assert_eq!(again, normal(disk.plugin(), handle), "what is found on disk has the name that it is wanted by");
        }
        for (plugin, dir) in
            [(ISCSI, "volumeDevices/x"), (ISCSI, "iface-default/nonsense"), (FC, "a-lun-x"), ("x", "y")]
        {
            assert_eq!(found(plugin, dir), None, "{plugin} {dir}");
        }
    }

    #[test]
    fn what_is_written() {
        let volume = of(
            r#"{"iscsi":{"targetPortal":"a","portals":["b:1","a:3260"],"iqn":"iqn.x","lun":1,"fsType":"xfs",
            "chapAuthSession":true,"secretRef":{"name":"s"}},"accessModes":["ReadWriteOnce"],"mountOptions":["noatime"]}"#,
        );
        let Some(Disk::Iscsi(disk)) = &volume.disk else { panic!("{volume:?}") };
        assert_eq!(disk.portals, ["a:3260", "b:1"]);
        assert!(disk.chap_session && !disk.chap_discovery && !volume.block);
        assert_eq!(volume.stage_secret, Some(SecretName { namespace: "ns".into(), name: "s".into() }));
        assert_eq!((volume.fs_type.as_str(), volume.access_modes.len(), volume.mount_options.len()), ("xfs", 1, 1));
        let web = pod(
            r#"{"containers":[{"name":"a"}],"volumes":[{"name":"i","iscsi":{"targetPortal":"a","iqn":"iqn.x","lun":0,"readOnly":true}},
            {"name":"f","fc":{"wwids":["1"]}},{"name":"bad","fc":{"targetWWNs":["1"]}},{"name":"e","emptyDir":{}}]}"#,
        );
        let all = web.spec().volumes.clone().unwrap();
        let made = inline(&web, &all[0]).unwrap().unwrap();
        assert_eq!((made.spec_name.as_str(), made.read_only, made.driver.as_str()), ("i", true, ISCSI));
        assert_eq!(inline(&web, &all[1]).unwrap().unwrap().handle, "[1]");
        assert!(inline(&web, &all[2]).is_err());
        assert_eq!(inline(&web, &all[3]), Ok(None));
        assert!(Disk::is_attached(ISCSI) && Disk::is_attached(FC) && !Disk::is_attached(LOCAL));
        let nfs = serde_json::from_str(r#"{"spec":{"nfs":{"path":"/","server":"s"}}}"#).unwrap();
        assert_eq!(claimed(&nfs, "ns", false), Ok(None));
    }
}
