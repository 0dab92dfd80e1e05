//! Where volumes of drivers lie, as the Go kubelet lays them out, so that either agent finds the other's mounts.
//!
//! ```text
//! ROOT/plugins/kubernetes.io/csi/DRIVER/SHA256(HANDLE)/{globalmount,vol_data.json}     staged
//! ROOT/pods/UID/volumes/kubernetes.io~csi/NAME/{mount,vol_data.json}                   published
//! ROOT/plugins/kubernetes.io/csi/volumeDevices/NAME/{dev/UID,data/vol_data.json}       block: held for the pod, data
//! ROOT/plugins/kubernetes.io/csi/volumeDevices/{staging/NAME,publish/NAME/UID}         block: staged, published
//! ROOT/pods/UID/volumeDevices/kubernetes.io~csi/NAME                                   block: link to the device
//! ```
//!
//! `vol_data.json` is written before a driver is called and removed after it has undone its work: what is on disk is what may stand.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use decide::csi::{self, Lifecycle};
use decide::disk;
use host::mount::{MountTable, real};
use model::pod::PodUid;

/// Error of a step on the disk.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Name of the data file.
pub(crate) const DATA: &str = "vol_data.json";

/// CSI's name in directories below a pod's.
const CSI_DIR: &str = "kubernetes.io~csi";

/// Key of the SELinux label in it.
const LABEL: &str = "seLinuxMountContext";

/// Names of the directories below `volumeDevices` that are not a volume's.
const SHARED: [&str; 2] = ["staging", "publish"];

/// Paths below the root directory.
#[derive(Clone, Debug)]
pub struct Layout {
    /// `--root-dir`.
    pub root: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// The node's name.
    pub node: String,
}

/// What tells a volume: enough to undo it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) driver: String,
    pub(crate) handle: String,
    /// Name of the PersistentVolume or inline volume; empty while it is known from its staging directory alone.
    pub(crate) spec_name: String,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) block: bool,
    /// The SELinux label that it is mounted with.
    pub(crate) label: Option<String>,
    /// Of a disk of the host: its directory below the plugin's, whose name is `driver`.
    pub(crate) dir: Option<String>,
}

impl Identity {
    /// The key of its owner: one volume of a driver; inline volumes have a handle of their own.
    pub(crate) fn key(&self) -> String {
        csi::unique_name(&self.driver, &disk::normal(&self.driver, &self.handle))
    }

    /// Its name in the node's status.
    pub(crate) fn in_status(&self) -> String {
        csi::unique_name(&self.driver, &self.handle)
    }

    /// Its name as directories have it: one of a volume that is written in a pod can be a path, or a resource of a cloud.
    fn dir_name(&self) -> String {
        self.spec_name.replace('/', "~")
    }

    /// Whether all that directories are named after stays below them. The API server checks what most of it looks like; the portal and the
    /// interface of an iSCSI disk, say, are free text.
    ///
    /// # Errors
    /// What does not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let step = |name: &str| !["", ".", ".."].contains(&name) && !name.contains(['/', '\0']) && name.len() <= 255;
        let steps = |dir: &str| dir.split('/').all(step);
        let wrong = match &self.dir {
            // `iface-NAME/DISK`, the others have one step.
            Some(dir) if !steps(dir) || dir.matches('/').count() != usize::from(self.driver == disk::ISCSI) => dir,
            None if !step(&self.driver) => &self.driver,
            _ if !step(&self.dir_name()) => &self.spec_name,
            _ => return Ok(()),
        };
        Err(format!("{wrong:?} cannot be the name of a directory"))
    }

    /// The plugin's name as directories below a pod's have it.
    fn plugin_dir(&self) -> String {
        if self.dir.is_some() { self.driver.replace('/', "~") } else { CSI_DIR.to_owned() }
    }
}

impl Layout {
    fn plugin(&self) -> PathBuf {
        self.root.join("plugins").join(csi::PLUGIN)
    }

    fn devices(&self) -> PathBuf {
        self.plugin().join("volumeDevices")
    }

    /// The directory of a volume's staging and data.
    pub(crate) fn device_dir(&self, of: &Identity) -> PathBuf {
        self.plugin().join(&of.driver).join(csi::staging_name(&of.handle))
    }

    /// Where disks of a plugin are mounted on the node, or (`block`) held.
    fn disks(&self, plugin: &str, block: bool) -> PathBuf {
        let plugins = self.root.join("plugins");
        match (plugin, block) {
            // The Go kubelet writes it so for this one.
            (disk::LOCAL, true) => plugins.join(plugin.replace('/', "~")).join("volumeDevices"),
            (_, true) => plugins.join(plugin).join("volumeDevices"),
            (disk::LOCAL, false) => plugins.join(plugin).join("mounts"),
            (_, false) => plugins.join(plugin),
        }
    }

    /// The directories of all iSCSI disks.
    pub(crate) fn iscsi_dirs(&self) -> Vec<PathBuf> {
        let both = [false, true].map(|block| self.disks(disk::ISCSI, block));
        let interfaces = both.iter().flat_map(|dir| children(dir)).filter(|dir| is_interface(dir));
        interfaces.flat_map(|dir| children(&dir)).collect()
    }

    /// What the driver stages at; where a disk is mounted on the node.
    pub(crate) fn staging(&self, of: &Identity) -> PathBuf {
        if let Some(dir) = &of.dir {
            return self.disks(&of.driver, of.block).join(dir);
        }
        if of.block {
            return self.devices().join("staging").join(of.dir_name());
        }
        self.device_dir(of).join("globalmount")
    }

    /// The data of the node's part.
    pub(crate) fn device_data(&self, of: &Identity) -> PathBuf {
        if of.block {
            return self.devices().join(of.dir_name()).join("data").join(DATA);
        }
        self.device_dir(of).join(DATA)
    }

    /// A pod's directory.
    pub(crate) fn pod(&self, uid: &PodUid) -> PathBuf {
        self.root.join("pods").join(uid.as_str())
    }

    /// The directory of a pod's part; of a block volume, that of all pods' parts.
    pub(crate) fn pod_dir(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        match (of.block, of.dir.is_some()) {
            (true, true) => self.staging(of),
            (true, false) => self.devices().join("publish").join(of.dir_name()),
            (false, _) => self.pod(uid).join("volumes").join(of.plugin_dir()).join(of.dir_name()),
        }
    }

    /// What the driver publishes at.
    pub(crate) fn target(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        let dir = self.pod_dir(of, uid);
        match (of.block, of.dir.is_some()) {
            (true, _) => dir.join(uid.as_str()),
            (false, true) => dir,
            (false, false) => dir.join("mount"),
        }
    }

    /// What a block volume is held by while a pod has it.
    pub(crate) fn held(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        if of.dir.is_some() {
            return self.target(of, uid);
        }
        self.devices().join(of.dir_name()).join("dev").join(uid.as_str())
    }

    /// What a container is given of a block volume.
    pub(crate) fn link(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        self.pod(uid).join("volumeDevices").join(of.plugin_dir()).join(of.dir_name())
    }

    /// What containers use.
    pub(crate) fn usable(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        if of.block { self.link(of, uid) } else { self.target(of, uid) }
    }

    /// What a driver is asked for the figures of.
    pub(crate) fn figures_path(&self, of: &Identity, uid: &PodUid) -> PathBuf {
        if of.block { self.held(of, uid) } else { self.target(of, uid) }
    }

    /// Data of the node's part.
    pub(crate) fn device_content(&self, of: &Identity) -> BTreeMap<&'static str, String> {
        let mut content = BTreeMap::from([("driverName", of.driver.clone()), ("volumeHandle", of.handle.clone())]);
        if of.block {
            content.insert("specVolID", of.spec_name.clone());
            content.insert("nodeName", self.node.clone());
            content.insert("attachmentID", csi::attachment_name(&of.handle, &of.driver, &self.node));
        }
        content.extend(of.label.clone().map(|label| (LABEL, label)));
        content
    }

    /// Data of a pod's part.
    pub(crate) fn pod_content(&self, of: &Identity) -> BTreeMap<&'static str, String> {
        let mut content = BTreeMap::from([
            ("attachmentID", csi::attachment_name(&of.handle, &of.driver, &self.node)),
            ("driverName", of.driver.clone()),
            ("nodeName", self.node.clone()),
            ("specVolID", of.spec_name.clone()),
            ("volumeHandle", of.handle.clone()),
            ("volumeLifecycleMode", of.lifecycle.as_str().to_owned()),
        ]);
        content.extend(of.label.clone().map(|label| (LABEL, label)));
        content
    }

    /// Everything that stands, or may stand, on disk. Blocks.
    pub(crate) fn scan(&self) -> Found {
        let mut found = Found::default();
        for driver in children(&self.plugin()) {
            if driver.ends_with("volumeDevices") {
                continue;
            }
            for dir in children(&driver) {
                match read(&dir.join(DATA)) {
                    Some(of) => found.devices.push(of),
                    None => found.unknown.push(dir),
                }
            }
        }
        for dir in children(&self.devices()) {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if SHARED.contains(&name.as_str()) {
                continue;
            }
            let Some(mut of) = read(&dir.join("data").join(DATA)) else {
                found.unknown.push(dir);
                continue;
            };
            (of.block, of.spec_name) = (true, name);
            for target in children(&self.devices().join("publish").join(of.dir_name())) {
                let uid = PodUid::new(target.file_name().unwrap_or_default().to_string_lossy());
                found.mounts.push((uid, of.clone()));
            }
            found.devices.push(of);
        }
        for pod in children(&self.root.join("pods")) {
            let uid = PodUid::new(pod.file_name().unwrap_or_default().to_string_lossy());
            for dir in children(&pod.join("volumes").join(CSI_DIR)) {
                match read(&dir.join(DATA)) {
                    Some(mut of) => {
                        of.spec_name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
                        found.mounts.push((uid.clone(), of));
                    }
                    None => found.unknown.push(dir),
                }
            }
        }
        self.scan_disks(&mut found);
        found
    }

    /// Disks of the host: their directories on the node and below the pods'.
    fn scan_disks(&self, found: &mut Found) {
        let table = MountTable::read(&self.proc).unwrap_or_default();
        let named = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let pods = children(&self.root.join("pods"));
        for plugin in [disk::LOCAL, disk::ISCSI, disk::FC] {
            let mut here = Vec::new();
            for block in [false, true] {
                let base = self.disks(plugin, block);
                let below = children(&base).into_iter().filter(|dir| !dir.ends_with("volumeDevices"));
                let dirs: Vec<PathBuf> = match plugin {
                    disk::ISCSI => below.filter(|dir| is_interface(dir)).flat_map(|dir| children(&dir)).collect(),
                    _ => below.collect(),
                };
                for path in dirs {
                    let dir = path.strip_prefix(&base).map(|d| d.display().to_string()).unwrap_or_default();
                    let Some(handle) = disk::found(plugin, &dir) else {
                        found.unknown.push(path);
                        continue;
                    };
                    let spec_name = if plugin == disk::LOCAL { dir.clone() } else { String::new() };
                    here.push((path, Identity::disk(plugin, handle, spec_name, block, dir)));
                }
            }
            for pod in &pods {
                let uid = PodUid::new(named(pod));
                for dir in children(&pod.join("volumes").join(plugin.replace('/', "~"))) {
                    let device = |at: &Path| table.at(&real(at)).map(|m| m.device);
                    let over = device(&dir);
                    // Of a local disk the names are the same; of a local directory there is nothing on the node.
                    let of = here.iter().find(|(path, of)| {
                        let same = over.is_some() && device(path) == over;
                        !of.block && if plugin == disk::LOCAL { of.spec_name == named(&dir) } else { same }
                    });
                    match of {
                        Some((_, of)) => {
                            found.mounts.push((uid.clone(), Identity { spec_name: named(&dir), ..of.clone() }))
                        }
                        None if plugin == disk::LOCAL => {
                            let of = Identity::disk(plugin, named(&dir), named(&dir), false, named(&dir));
                            found.mounts.push((uid.clone(), of));
                        }
                        None => found.unknown.push(dir),
                    }
                }
            }
            for (path, mut of) in here {
                if of.block {
                    for held in children(&path).into_iter().filter(|file| !file.ends_with("iscsi.json")) {
                        let uid = PodUid::new(named(&held));
                        if let Some(name) = self.link_name(&of, &uid, &held) {
                            of.spec_name = name;
                        }
                        found.mounts.push((uid, of.clone()));
                    }
                }
                found.devices.push(of);
            }
        }
    }

    /// The name that a pod has a held device under: that of the link to the same device.
    fn link_name(&self, of: &Identity, uid: &PodUid, held: &Path) -> Option<String> {
        let device = |path: &Path| std::fs::metadata(path).ok().map(|m| m.rdev());
        let wanted = device(held)?;
        let links = children(&self.pod(uid).join("volumeDevices").join(of.plugin_dir()));
        let link = links.into_iter().find(|link| device(link) == Some(wanted))?;
        Some(link.file_name()?.to_string_lossy().into_owned())
    }
}

fn is_interface(dir: &Path) -> bool {
    dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("iface-"))
}

impl Identity {
    fn disk(plugin: &str, handle: String, spec_name: String, block: bool, dir: String) -> Self {
        let driver = plugin.to_owned();
        Self { driver, handle, spec_name, lifecycle: Lifecycle::Persistent, block, label: None, dir: Some(dir) }
    }
}

/// What a look at the disk found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The nodes' parts.
    pub(crate) devices: Vec<Identity>,
    /// The pods' parts.
    pub(crate) mounts: Vec<(PodUid, Identity)>,
    /// Directories without data, or with data that cannot be read.
    pub(crate) unknown: Vec<PathBuf>,
}

fn children(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

fn read(file: &Path) -> Option<Identity> {
    parse(&std::fs::read(file).ok()?)
}

/// What a data file says; None when it cannot be used.
pub(crate) fn parse(content: &[u8]) -> Option<Identity> {
    let content: BTreeMap<String, String> = serde_json::from_slice(content).ok()?;
    let of = |key: &str| content.get(key).cloned();
    let ephemeral = of("volumeLifecycleMode").is_some_and(|m| m == "Ephemeral");
    let found = Identity {
        driver: of("driverName").filter(|d| !d.is_empty())?,
        handle: of("volumeHandle").filter(|h| !h.is_empty())?,
        spec_name: of("specVolID").unwrap_or_default(),
        lifecycle: if ephemeral { Lifecycle::Ephemeral } else { Lifecycle::Persistent },
        block: false,
        label: of(LABEL).filter(|l| !l.is_empty()),
        dir: None,
    };
    // Its name may be known from its place alone.
    let named = Identity { spec_name: "x".to_owned(), ..found.clone() };
    let checked = if found.spec_name.is_empty() { named.check() } else { found.check() };
    checked.ok().map(|()| found)
}

/// Writes a data file as one step.
pub(crate) fn write(file: &Path, content: &BTreeMap<&'static str, String>) -> Result<(), Failure> {
    let mut text = serde_json::to_vec(content)?;
    text.push(b'\n');
    if std::fs::read(file).ok().as_ref() == Some(&text) {
        return Ok(());
    }
    Ok(host::fsx::write_file_atomic(file, &text, 0o644)?)
}

/// Removes an empty directory, or nothing.
pub(crate) fn remove_dir(dir: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("remove {}: {e}", dir.display()).into()),
        _ => Ok(()),
    }
}

/// Removes a file, or nothing.
pub(crate) fn remove_file(file: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("remove {}: {e}", file.display()).into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts and places are those that a Go kubelet 1.36.1 left on this machine.
    #[test]
    fn files_are_the_go_kubelets() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout { root: dir.path().to_owned(), proc: "/proc".into(), node: "e2e".into() };
        let of = Identity {
            driver: "plain.csi.test".into(),
            handle: "a-handle".into(),
            spec_name: "pv-a".into(),
            lifecycle: Lifecycle::Persistent,
            block: false,
            label: None,
            dir: None,
        };
        let staging = "plugins/kubernetes.io/csi/plain.csi.test/2c9540bbad8684159e83a6de758d3365f5932e4e2d3aec7bacd08cbe6869f526/globalmount";
        assert_eq!(layout.staging(&of), dir.path().join(staging));
        let uid = PodUid::new("7244bfe1");
        assert_eq!(layout.target(&of, &uid), dir.path().join("pods/7244bfe1/volumes/kubernetes.io~csi/pv-a/mount"));
        std::fs::create_dir_all(layout.staging(&of)).unwrap();
        std::fs::create_dir_all(layout.pod_dir(&of, &uid)).unwrap();
        write(&layout.device_data(&of), &layout.device_content(&of)).unwrap();
        let pod_data = layout.pod_dir(&of, &uid).join(DATA);
        write(&pod_data, &layout.pod_content(&of)).unwrap();
        assert_eq!(
            std::fs::read_to_string(layout.device_data(&of)).unwrap(),
            "{\"driverName\":\"plain.csi.test\",\"volumeHandle\":\"a-handle\"}\n"
        );
        assert_eq!(
            std::fs::read_to_string(&pod_data).unwrap(),
            "{\"attachmentID\":\"csi-23599dc3dad19b11adb6be7a498aec22d6548248b6b70ba658135c8a65e1ee25\",\"driverName\":\"plain.csi.test\",\"nodeName\":\"e2e\",\"specVolID\":\"pv-a\",\"volumeHandle\":\"a-handle\",\"volumeLifecycleMode\":\"Persistent\"}\n"
        );
        let disk = Identity { spec_name: "/subscriptions/d".to_owned(), ..of.clone() };
        let place = "pods/7244bfe1/volumes/kubernetes.io~csi/~subscriptions~d/mount";
        assert_eq!(layout.target(&disk, &uid), dir.path().join(place));
        let labelled = Identity { label: Some("u:r:t:s0:c1,c2".to_owned()), ..of.clone() };
        write(&pod_data, &layout.pod_content(&labelled)).unwrap();
        assert!(std::fs::read_to_string(&pod_data).unwrap().contains(r#""seLinuxMountContext":"u:r:t:s0:c1,c2""#));
        assert_eq!(read(&pod_data).unwrap().label, labelled.label);
        write(&pod_data, &layout.pod_content(&of)).unwrap();
        std::fs::create_dir_all(dir.path().join("pods/x/volumes/kubernetes.io~csi/no-data")).unwrap();
        let found = layout.scan();
        assert_eq!(found.devices, [Identity { spec_name: String::new(), ..of.clone() }]);
        assert_eq!(found.mounts, [(uid, of)]);
        assert_eq!(found.unknown.len(), 1);
    }

    #[test]
    fn block_volumes_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout { root: dir.path().to_owned(), proc: "/proc".into(), node: "e2e".into() };
        let of = Identity {
            driver: "d".into(),
            handle: "h".into(),
            spec_name: "pv-raw".into(),
            lifecycle: Lifecycle::Persistent,
            block: true,
            label: None,
            dir: None,
        };
        let uid = PodUid::new("u");
        std::fs::create_dir_all(layout.device_data(&of).parent().unwrap()).unwrap();
        std::fs::create_dir_all(layout.pod_dir(&of, &uid)).unwrap();
        std::fs::write(layout.target(&of, &uid), "").unwrap();
        write(&layout.device_data(&of), &layout.device_content(&of)).unwrap();
        let found = layout.scan();
        assert_eq!(found.devices, std::slice::from_ref(&of));
        assert_eq!(found.mounts, [(uid, of)]);
    }

    #[test]
    fn disks_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let layout = Layout { root: root.to_owned(), proc: "/proc".into(), node: "e2e".into() };
        let place = "iface-default/10.0.0.1:3260-iqn.a:b-lun-1";
        for path in [
            &format!("plugins/kubernetes.io/iscsi/{place}"),
            &format!("plugins/kubernetes.io/iscsi/volumeDevices/{place}/u1"),
            "plugins/kubernetes.io/iscsi/iface-default/nonsense",
            "plugins/kubernetes.io/fc/5006-lun-0",
            "plugins/kubernetes.io/local-volume/mounts/pv-1",
            "plugins/kubernetes.io~local-volume/volumeDevices/pv-2/u2",
            "pods/u1/volumes/kubernetes.io~local-volume/pv-1",
            "pods/u3/volumes/kubernetes.io~local-volume/pv-dir",
            "pods/u3/volumes/kubernetes.io~iscsi/not-mounted",
        ] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        let found = layout.scan();
        let told = |of: &Identity| format!("{}{}", of.key(), if of.block { " block" } else { "" });
        let mut devices: Vec<String> = found.devices.iter().map(told).collect();
        devices.sort();
        assert_eq!(
            devices,
            [
                "kubernetes.io/fc/[5006]:0",
                "kubernetes.io/iscsi/10.0.0.1:3260:iqn.a:b:1",
                "kubernetes.io/iscsi/10.0.0.1:3260:iqn.a:b:1 block",
                "kubernetes.io/local-volume/pv-1",
                "kubernetes.io/local-volume/pv-2 block",
            ]
        );
        let mut mounts: Vec<String> = found.mounts.iter().map(|(uid, of)| format!("{uid} {}", told(of))).collect();
        mounts.sort();
        assert_eq!(
            mounts,
            [
                "u1 kubernetes.io/iscsi/10.0.0.1:3260:iqn.a:b:1 block",
                "u1 kubernetes.io/local-volume/pv-1",
                "u2 kubernetes.io/local-volume/pv-2 block",
                "u3 kubernetes.io/local-volume/pv-dir",
            ]
        );
        assert_eq!(found.unknown.len(), 2, "{:?}", found.unknown);
        // Each lies where it was found.
        for of in &found.devices {
            assert!(layout.staging(of).is_dir(), "{of:?}");
        }
        let raw = found.mounts.iter().find(|(_, of)| of.spec_name == "pv-2").unwrap();
        assert_eq!(layout.held(&raw.1, &raw.0), root.join("plugins/kubernetes.io~local-volume/volumeDevices/pv-2/u2"));
        assert_eq!(layout.link(&raw.1, &raw.0), root.join("pods/u2/volumeDevices/kubernetes.io~local-volume/pv-2"));
    }
}
