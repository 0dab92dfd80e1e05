//! Steps of disks that the host makes available itself (local, iSCSI, Fibre Channel), laid out as the Go kubelet does:
//!
//! ```text
//! ROOT/plugins/kubernetes.io/{local-volume/mounts/PV,iscsi/iface-I/PORTAL-IQN-lun-N,fc/WWNS-lun-N}     mounted on the node
//! ROOT/pods/UID/volumes/{kubernetes.io~local-volume,…}/NAME                                            bind-mounted for a pod
//! ROOT/plugins/{kubernetes.io~local-volume,kubernetes.io/iscsi,…}/volumeDevices/DIR/UID                block: held for a pod
//! ROOT/pods/UID/volumeDevices/{kubernetes.io~local-volume,…}/NAME                                      block: link to the device
//! ```
//!
//! A local directory is not made on the node, only for pods. The directory on the node is there before the disk is attached, so that what was
//! begun is known. Every program has a deadline.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use decide::csi::{CsiVolume, DriverRules};
use decide::disk::{self, Disk, Iscsi};
use decide::selinux;
use decide::volumes::{Stand, Step};
use host::disk::iscsi::{Chap, Target};
use host::disk::{Tools, fc};
use host::{mount, mount_tool};
use model::pod::PodUid;
use serde_json::json;

use super::layout::{Failure, Identity, Layout, remove_dir, remove_file};
use super::steps::{
    Failed, Job, Kind, Outcome, Words, fs_group, label, map_device, right_node, tell_mapped, unmap_device,
};
use super::{Shared, Wish, blocking, lock};

/// What iSCSI's logout needs to know, beside the disk's mount.
const RECORD: &str = "iscsi.json";

/// Carries out the step. Cancel safe: what was begun is on disk.
pub(super) async fn run(shared: &Shared, job: &Job) -> Result<Outcome, Failed> {
    match (&job.step, &job.uid, &job.wish) {
        (Step::AwaitAttachment, ..) => {
            // Without an API server no controller attaches anything.
            let required = Disk::is_attached(&job.of.driver) && shared.node.get().is_some();
            Ok(Outcome::Attach { required, attached: !required || shared.is_attached(&job.of.in_status()) })
        }
        (Step::Stage, _, Some(wish)) => stage(shared, job, wish).await,
        (Step::Publish(_), Some(uid), Some(wish)) => publish(shared, job, uid, wish).await,
        (Step::Unpublish(_), Some(uid), _) => unpublish(shared, job, uid).await,
        (Step::Unstage, ..) => unstage(shared, job).await,
        _ => Ok(Outcome::Plain),
    }
}

/// What is at a local path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Local {
    Directory,
    Device,
}

fn local(path: &str) -> Result<Local, String> {
    let kind = std::fs::metadata(path).map_err(|_| format!("path {path:?} does not exist"))?.file_type();
    match (kind.is_dir(), kind.is_block_device()) {
        (true, _) => Ok(Local::Directory),
        (_, true) => Ok(Local::Device),
        _ => Err("only directory and block device are supported".to_owned()),
    }
}

/// The session that a disk is reached over.
fn target(disk: &Iscsi, volume: &str) -> Target {
    Target {
        portals: disk.portals.clone(),
        iqn: disk.iqn.clone(),
        lun: disk.lun,
        interface: disk.own_interface(volume),
        made_from: disk.initiator.clone().map(|name| (disk.interface.clone(), name)),
    }
}

/// The volume's device.
fn attach(tools: &Tools, locks: &TargetLocks, volume: &CsiVolume, chap: &Chap) -> Result<PathBuf, Failure> {
    match &volume.disk {
        Some(Disk::Local { path }) => Ok(path.into()),
        Some(Disk::Iscsi(disk)) => {
            let one = locks.of(&disk.iqn);
            let _held = lock(&one);
            Ok(tools.attach_iscsi(&target(disk, &volume.spec_name), chap)?)
        }
        Some(Disk::Fc(disk)) if disk.wwns.is_empty() => Ok(tools.attach_fc(&fc::Names::Disk(disk.wwids.clone()))?),
        Some(Disk::Fc(disk)) => Ok(tools.attach_fc(&fc::Names::Targets(disk.wwns.clone(), disk.lun))?),
        None => Err(format!("volume {} is no disk of the host", volume.spec_name).into()),
    }
}

/// One login or logout of a target at a time: its sessions are shared by its units.
#[derive(Default)]
pub(super) struct TargetLocks(Mutex<std::collections::HashMap<String, Arc<Mutex<()>>>>);

impl TargetLocks {
    fn of(&self, iqn: &str) -> Arc<Mutex<()>> {
        let mut all = lock(&self.0);
        all.retain(|name, one| name == iqn || Arc::strong_count(one) > 1);
        all.entry(iqn.to_owned()).or_default().clone()
    }
}

/// What proves the right to a target.
async fn chap(shared: &Shared, volume: &CsiVolume) -> Result<Chap, String> {
    let Some(Disk::Iscsi(disk)) = &volume.disk else { return Ok(Chap::default()) };
    if !disk.chap_discovery && !disk.chap_session {
        return Ok(Chap::default());
    }
    let secret = match &volume.stage_secret {
        None => Default::default(),
        Some(name) => shared
            .objects
            .secret(name)
            .await
            .map_err(|e| format!("couldn't get secret {}/{} error: {e}", name.namespace, name.name))?,
    };
    Ok(Chap { discovery: disk.chap_discovery.then(|| secret.clone()), session: disk.chap_session.then_some(secret) })
}

async fn stage(shared: &Shared, job: &Job, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    let map = of.block;
    let words = Words::by_mode(of, "MapVolume.WaitForAttach", "MountVolume.WaitForAttach");
    right_node(shared, volume, &words)?;
    if let Some(Disk::Local { path }) = &volume.disk {
        let first = Words::by_mode(of, "MapVolume.SetUpDevice", "MountVolume.NewMounter initialization");
        let at = path.clone();
        match blocking(move || Ok(local(&at)?)).await.map_err(|e| first.before(e))? {
            Local::Directory if map => return Err(first.before(format!("{path} is no block device"))),
            Local::Directory => return Ok(Outcome::Plain),
            Local::Device => {}
        }
    }
    let chap = chap(shared, volume).await.map_err(|e| words.before(e))?;
    let label = label(shared, of, volume, &DriverRules::default(), &words)?;
    let (layout, identity, wanted) = (shared.layout.clone(), of.clone(), volume.clone());
    let (tools, locks) = (shared.tools.clone(), shared.targets.clone());
    let device = blocking(move || {
        let dir = layout.staging(&identity);
        host::fsx::ensure_dirs(&dir, 0o750)?;
        if let Some(Disk::Iscsi(disk)) = &wanted.disk
            && !mount::is_mount_point(&layout.proc, &dir)?
        {
            let own = target(disk, &wanted.spec_name);
            let record = json!({"VolName": wanted.spec_name, "Portals": own.portals, "Iqn": own.iqn, "Lun": own.lun.to_string(),
                "InitIface": disk.interface, "Iface": own.interface, "InitiatorName": disk.initiator.clone().unwrap_or_default(),
                "MetricsProvider": null});
            host::fsx::write_file_atomic(&dir.join(RECORD), format!("{record}\n").as_bytes(), 0o644)?;
        }
        attach(&tools, &locks, &wanted, &chap)
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    if map {
        return Ok(Outcome::Plain);
    }
    let mut options: Vec<String> = volume.read_only.then(|| "ro".to_owned()).into_iter().collect();
    options.extend(label.as_deref().map(selinux::mount_option));
    options.extend(volume.mount_options.iter().filter(|o| !options.contains(o)).cloned().collect::<Vec<_>>());
    let words = Words { stage: "MountVolume.MountDevice", ..words };
    let (layout, identity, fs_type, tools) =
        (shared.layout.clone(), of.clone(), volume.fs_type.clone(), shared.tools.clone());
    blocking(move || {
        let dir = layout.staging(&identity);
        if mount::is_mount_point(&layout.proc, &dir)? {
            return Ok(());
        }
        Ok(tools.format_and_mount(&device, &dir, &fs_type, &options)?)
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    Ok(Outcome::Staged { label })
}

async fn publish(shared: &Shared, job: &Job, uid: &PodUid, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    if of.block {
        return map(shared, job, uid, wish).await;
    }
    let words = Words { of, stage: "MountVolume.SetUp", reason: "FailedMount" };
    let label = label(shared, of, volume, &DriverRules::default(), &words)?;
    if label != of.label && job.prior == Stand::Absent && !job.shared {
        return Ok(Outcome::OtherLabel);
    }
    let (layout, identity, pod, wanted) = (shared.layout.clone(), of.clone(), uid.clone(), volume.clone());
    let (group, shared_with) = (fs_group(wish).and_then(|g| u32::try_from(g).ok()), job.shared);
    let context = wish.pod.spec().security_context.as_ref();
    let on_mismatch = context.and_then(|c| c.fs_group_change_policy.as_deref()) == Some("OnRootMismatch");
    let other_group = blocking(move || bind(&layout, &identity, &pod, &wanted, group, (shared_with, on_mismatch)))
        .await
        .map_err(|e| words.failed(Kind::Unknown, e))?;
    if let (Some(wanted), Some(there)) = (group, other_group) {
        let text = format!(
            "The requested fsGroup is {wanted}, but the volume {} has GID {there}. The volume may not be shareable.",
            of.spec_name
        );
        shared.objects.event(&wish.pod, None, true, "AlreadyMountedVolume", &text);
    }
    let relabel = shared.selinux && of.label.is_none();
    let wanted = DriverRules::default().wanted_label(volume).to_owned();
    Ok(Outcome::Published { republish: false, label: of.label.clone(), relabel, wanted })
}

/// Bind-mounts the disk for a pod, and gives its files to the pod's group. A local directory is the group's with its first pod: the group that it
/// has, when another one wants another.
fn bind(
    layout: &Layout,
    of: &Identity,
    uid: &PodUid,
    volume: &CsiVolume,
    group: Option<u32>,
    (shared, on_mismatch): (bool, bool),
) -> Result<Option<u32>, Failure> {
    let (target, mut source, mut directory) = (layout.target(of, uid), layout.staging(of), false);
    if let Some(Disk::Local { path }) = &volume.disk
        && local(path)? == Local::Directory
    {
        (source, directory) = (path.into(), true);
    }
    if mount::is_mount_point(&layout.proc, &target)? {
        return Ok(None);
    }
    if !directory && !mount::is_mount_point(&layout.proc, &source)? {
        return Err(format!("{} is not mounted any more", source.display()).into());
    }
    host::fsx::ensure_dirs(&target, 0o750)?;
    let there = std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(&source)?);
    mount::bind(&source, &target, false)?;
    let finished = (|| -> Result<(), Failure> {
        if volume.read_only {
            return Ok(mount::remount_read_only(&layout.proc, &target)?);
        }
        if let Some(group) = group.filter(|_| !(directory && shared)) {
            host::fsx::set_fs_group(&target, group, false, on_mismatch)?;
        }
        Ok(())
    })();
    if finished.is_err() {
        // The next try must not take it for complete.
        mount::unmount(&target)?;
    }
    finished?;
    Ok((directory && shared && group.is_some_and(|g| g != there)).then_some(there))
}

/// Holds the device for a pod, and links it for its containers.
async fn map(shared: &Shared, job: &Job, uid: &PodUid, wish: &Wish) -> Result<Outcome, Failed> {
    let (of, volume) = (&job.of, &wish.volume);
    let words = Words { of, stage: "MapVolume.MapPodDevice", reason: "FailedMapVolume" };
    let chap = chap(shared, volume).await.map_err(|e| words.before(e))?;
    let (layout, identity, pod, wanted) = (shared.layout.clone(), of.clone(), uid.clone(), volume.clone());
    let (tools, locks) = (shared.tools.clone(), shared.targets.clone());
    blocking(move || {
        let device = attach(&tools, &locks, &wanted, &chap)?;
        map_device(&layout, &identity, &pod, &device)
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    if job.prior != Stand::Done {
        tell_mapped(shared, of, uid, wish);
    }
    Ok(Outcome::Published { republish: false, label: None, relabel: false, wanted: Default::default() })
}

async fn unpublish(shared: &Shared, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let of = &job.of;
    let words = Words::by_mode(of, "UnmapVolume.UnmapPodDevice", "UnmountVolume.TearDown");
    let (layout, identity, pod) = (shared.layout.clone(), of.clone(), uid.clone());
    blocking(move || {
        if identity.block {
            return unmap_device(&layout, &identity, &pod);
        }
        let target = layout.target(&identity, &pod);
        while mount::is_mount_point(&layout.proc, &target)? {
            mount::unmount(&target)?;
        }
        remove_dir(&target)
    })
    .await
    .map_err(|e| words.failed(Kind::Unknown, e))?;
    Ok(Outcome::Plain)
}

async fn unstage(shared: &Shared, job: &Job) -> Result<Outcome, Failed> {
    let words = Words { of: &job.of, stage: "UnmountDevice", reason: "FailedMount" };
    let (layout, of) = (shared.layout.clone(), job.of.clone());
    let (tools, locks) = (shared.tools.clone(), shared.targets.clone());
    blocking(move || take_down(&layout, &of, &tools, &locks)).await.map_err(|e| words.failed(Kind::Unknown, e))?;
    Ok(Outcome::Plain)
}

/// Unmounts the disk from the node and lets it go.
fn take_down(layout: &Layout, of: &Identity, tools: &Tools, locks: &TargetLocks) -> Result<(), Failure> {
    let dir = layout.staging(of);
    if !dir.exists() {
        return Ok(());
    }
    while !of.block && mount::is_mount_point(&layout.proc, &dir)? {
        mount_tool::unmount(&dir, mount_tool::LIMIT)?;
    }
    match of.driver.as_str() {
        disk::ISCSI => let_go(layout, of, &dir, tools, locks)?,
        disk::FC => tools.detach_fc(&fc_names(&of.handle)?)?,
        _ => {}
    }
    remove_file(&dir.join(RECORD))?;
    remove_dir(&dir)?;
    if of.driver == disk::ISCSI {
        // That of the interface: other disks may be over it.
        let _ = dir.parent().map(std::fs::remove_dir);
    }
    Ok(())
}

/// Takes the unit's disks off the node, and logs out when it was the last one of its target.
fn let_go(layout: &Layout, of: &Identity, dir: &Path, tools: &Tools, locks: &TargetLocks) -> Result<(), Failure> {
    let target = logged_in(of, dir)?;
    let one = locks.of(&target.iqn);
    let _held = lock(&one);
    tools.remove_iscsi_disks(&target.iqn, target.lun)?;
    let of_target = |name: &str| target.portals.iter().any(|p| name.starts_with(&format!("{p}-{}", target.iqn)));
    if layout
        .iscsi_dirs()
        .iter()
        .filter(|d| *d != dir)
        .any(|d| d.file_name().is_some_and(|n| of_target(&n.to_string_lossy())))
    {
        return Ok(());
    }
    Ok(tools.log_out(&target)?)
}

/// What the session of a disk is: as it was written down, else as its directory says.
fn logged_in(of: &Identity, dir: &Path) -> Result<Target, Failure> {
    let record =
        std::fs::read(dir.join(RECORD)).ok().and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok());
    if let Some(r) = record {
        let text = |key: &str| r[key].as_str().unwrap_or_default().to_owned();
        let portals = r["Portals"].as_array().into_iter().flatten().filter_map(|p| p.as_str()).map(str::to_owned);
        let initiator = Some(text("InitiatorName")).filter(|n| !n.is_empty());
        let target = Target {
            portals: portals.collect(),
            iqn: text("Iqn"),
            lun: text("Lun").parse()?,
            interface: text("Iface"),
            made_from: initiator.map(|name| (text("InitIface"), name)),
        };
        if !target.portals.is_empty() && !target.iqn.is_empty() {
            return Ok(target);
        }
    }
    let named = || {
        let place = of.dir.as_deref()?;
        let (interface, _) = place.strip_prefix("iface-")?.split_once('/')?;
        let handle = disk::found(disk::ISCSI, place)?;
        let (rest, lun) = handle.rsplit_once(':')?;
        let at = [":iqn.", ":eui.", ":naa."].iter().find_map(|kind| rest.find(kind))?;
        let (portal, iqn) = rest.split_at(at);
        Some(Target {
            portals: vec![portal.to_owned()],
            iqn: iqn[1..].to_owned(),
            lun: lun.parse().ok()?,
            interface: interface.to_owned(),
            made_from: None,
        })
    };
    named().ok_or_else(|| format!("{} says of no target", dir.display()).into())
}

/// The names in a handle: `[WWN …]:LUN`, `[WWID …]`.
fn fc_names(handle: &str) -> Result<fc::Names, Failure> {
    let names = |list: &str| -> Vec<String> { list.split(' ').map(str::to_owned).collect() };
    let (list, lun) =
        handle.strip_prefix('[').and_then(|h| h.split_once(']')).ok_or_else(|| format!("no disk is {handle}"))?;
    match lun.strip_prefix(':') {
        Some(lun) => Ok(fc::Names::Targets(names(list), lun.parse()?)),
        None => Ok(fc::Names::Disk(names(list))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use decide::csi::Lifecycle;

    fn identity(driver: &str, handle: &str, dir: &str) -> Identity {
        Identity {
            driver: driver.into(),
            handle: handle.into(),
            spec_name: "pv".into(),
            lifecycle: Lifecycle::Persistent,
            block: false,
            label: None,
            dir: Some(dir.into()),
        }
    }

    #[test]
    fn sessions_are_known_from_what_is_on_disk() {
        let root = tempfile::tempdir().unwrap();
        let of = identity(disk::ISCSI, "x", "iface-default/10.0.0.1:3260-iqn.a:b-c-lun-4");
        let plain = Target {
            portals: vec!["10.0.0.1:3260".into()],
            iqn: "iqn.a:b-c".into(),
            lun: 4,
            interface: "default".into(),
            made_from: None,
        };
        assert_eq!(logged_in(&of, root.path()).unwrap(), plain);
        // As a Go kubelet writes it.
        let go = r#"{"VolName":"pv","Portals":["10.0.0.1:3260","10.0.0.2:3260"],"Iqn":"iqn.a:b-c","Lun":"4","InitIface":"default","Iface":"10.0.0.1:3260:pv","InitiatorName":"iqn.me","MetricsProvider":null}"#;
        std::fs::write(root.path().join(RECORD), go).unwrap();
        let full = Target {
            portals: vec!["10.0.0.1:3260".into(), "10.0.0.2:3260".into()],
            interface: "10.0.0.1:3260:pv".into(),
            made_from: Some(("default".into(), "iqn.me".into())),
            ..plain.clone()
        };
        assert_eq!(logged_in(&of, root.path()).unwrap(), full);
        std::fs::write(root.path().join(RECORD), "torn").unwrap();
        assert_eq!(logged_in(&of, root.path()).unwrap(), plain);
    }

    #[test]
    fn names_of_fibre_channel_disks() {
        assert_eq!(fc_names("[5006 5007]:2").unwrap(), fc::Names::Targets(vec!["5006".into(), "5007".into()], 2));
        assert_eq!(fc_names("[3600]").unwrap(), fc::Names::Disk(vec!["3600".into()]));
        assert!(fc_names("3600").is_err() && fc_names("[1]:x").is_err());
    }
}
