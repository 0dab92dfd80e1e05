//! What takes room on the disks: images, writable layers, logs, volumes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use cri_api::v1;
use host::fsx::{DiskUsage, FilesystemFigures};
use jiff::Timestamp;
use telemetry::metrics::Metrics;
use tracing::warn;

use crate::names::Names;
use crate::shares::{self, Share};

/// Where a node's files are.
#[derive(Clone, Debug)]
pub struct StorageSettings {
    /// `--root-dir`.
    pub root: PathBuf,
    /// `podLogsDir`.
    pub pod_logs: PathBuf,
}

/// A share of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) at: Timestamp,
    /// Bytes.
    pub(crate) used: Option<u64>,
    pub(crate) inodes_used: Option<u64>,
    /// The file system that it is on.
    pub(crate) fs: Option<FilesystemFigures>,
}

/// What is on the node's own file systems.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Storage {
    pub(crate) at: Timestamp,
    /// The file system of the root directory.
    pub(crate) root: FilesystemFigures,
    /// Where the images are.
    pub(crate) images: Option<Usage>,
    /// Where the writable layers are, when not with the images.
    pub(crate) layers_fs: Option<Usage>,
    /// Writable layers by container id.
    pub(crate) layers: HashMap<String, Usage>,
    /// Logs by pod UID and container name.
    pub(crate) logs: HashMap<(String, String), DiskUsage>,
    /// Hosts files by pod UID.
    pub(crate) hosts: HashMap<String, DiskUsage>,
}

/// A volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    /// Its name in the pod's spec.
    pub(crate) name: String,
    /// The claim behind it.
    pub(crate) claim: Option<String>,
    /// It is on the node's disk and ends with the pod.
    pub(crate) ephemeral: bool,
    pub(crate) usage: Usage,
    /// Its driver says that something is wrong with it, or that nothing is.
    pub(crate) abnormal: Option<bool>,
}

/// What a driver says of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFigures {
    /// Name of the PersistentVolume; of a volume that is written in the pod, its name there.
    pub volume: String,
    /// Name of the driver.
    pub driver: String,
    /// When it was asked.
    pub at: Timestamp,
    /// How long it took to answer.
    pub took: std::time::Duration,
    /// Its file system, or what stands for one.
    pub fs: FilesystemFigures,
    /// Something is wrong with it; None: the driver does not tell.
    pub abnormal: Option<bool>,
}

/// Claims in pods.
#[async_trait]
pub trait Claims: Send + Sync {
    /// The volumes of a pod that stand for claims; those whose PersistentVolume is not known are left out.
    async fn claims(&self, pod_uid: &str) -> Vec<ClaimedVolume>;
    /// What drivers say of their volumes, by pod UID. Drivers that do not answer in a moment are left out.
    async fn drivers(&self) -> HashMap<String, Vec<DriverFigures>>;
}

/// See [`Claims`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimedVolume {
    /// Name in the pod's spec.
    pub volume: String,
    /// Name of the claim.
    pub claim: String,
    /// Name of the PersistentVolume.
    pub persistent_volume: String,
}

/// Filesystems by mount point, each asked once.
#[derive(Default)]
struct Filesystems(HashMap<PathBuf, Option<FilesystemFigures>>);

impl Filesystems {
    fn at(&mut self, path: &Path) -> Option<FilesystemFigures> {
        if let Some(known) = self.0.get(path) {
            return *known;
        }
        let found = host::fsx::filesystem(path).ok();
        self.0.insert(path.to_owned(), found);
        found
    }
}

/// Looks at everything but volumes. Blocks.
///
/// # Errors
/// The file system of the root directory does not answer.
pub(crate) fn look(
    settings: &StorageSettings,
    names: &Names,
    images: Option<&v1::ImageFsInfoResponse>,
    stats: &[v1::ContainerStats],
) -> host::Result<Storage> {
    let mut filesystems = Filesystems::default();
    let root = host::fsx::filesystem(&settings.root)?;
    let at = Timestamp::now();
    let mut told = |usage: &v1::FilesystemUsage| Usage {
        at: Timestamp::from_nanosecond(i128::from(usage.timestamp)).ok().filter(|_| usage.timestamp > 0).unwrap_or(at),
        used: usage.used_bytes.map(|v| v.value),
        inodes_used: usage.inodes_used.map(|v| v.value),
        fs: usage.fs_id.as_ref().and_then(|fs| filesystems.at(Path::new(&fs.mountpoint))),
    };
    let mut first = |all: &[v1::FilesystemUsage]| all.first().map(&mut told);
    let (image_fs, layers_fs) = match images {
        Some(info) => (first(&info.image_filesystems), first(&info.container_filesystems)),
        None => (None, None),
    };
    let layers = stats.iter().filter_map(|s| {
        let id = s.attributes.as_ref()?.id.clone();
        Some((id, told(s.writable_layer.as_ref()?)))
    });
    let layers = layers.collect();
    let mut logs = HashMap::new();
    for container in &names.containers {
        let Some(pod) = names.pods.get(container.pod) else { continue };
        let dir = settings.pod_logs.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid)).join(&container.name);
        match host::fsx::files_usage(&dir) {
            Ok(used) => {
                logs.insert((pod.uid.clone(), container.name.clone()), used);
            }
            Err(e) => warn!(err = e.full(), "A container's logs cannot be measured"),
        }
    }
    let hosts = names.pods.iter().filter_map(|pod| {
        let file = settings.root.join("pods").join(&pod.uid).join("etc-hosts");
        Some((pod.uid.clone(), host::fsx::disk_usage(&file).ok()?))
    });
    let hosts = hosts.collect();
    Ok(Storage { at, root, images: image_fs, layers_fs, layers, logs, hosts })
}

/// Kinds of volumes by their directory, and whether what they hold is measured by walking it; the others are file systems of their own.
const WALKED: [&str; 5] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
];
/// Those that are file systems, or parts of one.
const MOUNTED: [&str; 3] = ["kubernetes.io~local-volume", "kubernetes.io~iscsi", "kubernetes.io~fc"];

/// What is known of volumes before any is looked at.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Claims by pod UID.
    pub(crate) claims: HashMap<String, Vec<ClaimedVolume>>,
    /// What drivers say, by pod UID.
    pub(crate) drivers: HashMap<String, Vec<DriverFigures>>,
    /// How full servers' shares are, by the place where they are mounted.
    pub(crate) shares: HashMap<PathBuf, Share>,
}

/// Measures the volumes of all pods. Blocks for as long as the walks take.
pub(crate) fn volumes(
    settings: &StorageSettings,
    names: &Names,
    told: &Told,
    metrics: &Metrics,
) -> HashMap<String, Vec<Volume>> {
    let Told { claims, drivers, shares } = told;
    let device = |path: &Path| std::fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::dev(&m)).ok();
    let disk = device(&settings.root);
    let mut all = HashMap::new();
    for pod in &names.pods {
        let claimed = claims.get(&pod.uid).map_or(&[][..], Vec::as_slice);
        let mut found = Vec::new();
        for (plugin, dir) in volume_dirs(&settings.root.join("pods").join(&pod.uid).join("volumes")) {
            let begun = std::time::Instant::now();
            let own_name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mounted = MOUNTED.contains(&plugin.as_str());
            let is_share = plugin == shares::NFS;
            let claim = claimed.iter().find(|c| c.persistent_volume == own_name && (mounted || is_share));
            if is_share {
                // Its server was asked before: here nobody waits for one.
                let Some(share) = shares.get(&dir) else { continue };
                let fs = share.fs;
                found.push(Volume {
                    name: claim.map_or(own_name, |c| c.volume.clone()),
                    claim: claim.map(|c| c.claim.clone()),
                    ephemeral: false,
                    usage: Usage { at: share.at, used: Some(fs.used), inodes_used: Some(fs.inodes_used), fs: Some(fs) },
                    abnormal: None,
                });
                metrics.volume_measured("statfs", share.took);
                continue;
            }
            if !mounted && !WALKED.contains(&plugin.as_str()) {
                continue;
            }
            let Ok(fs) = host::fsx::filesystem(&dir) else { continue };
            let used = if mounted {
                DiskUsage { bytes: fs.used, inodes: fs.inodes_used }
            } else {
                // What vanishes under way, or a directory that is just being made, is measured the next time.
                match host::fsx::disk_usage(&dir) {
                    Ok(used) => used,
                    Err(_) => continue,
                }
            };
            // On the disk, and the kind has no other home: not a tmpfs, not what outlives the pod.
            let ephemeral = ["kubernetes.io~empty-dir", "kubernetes.io~configmap"].contains(&plugin.as_str())
                && disk.is_some()
                && device(&dir) == disk;
            found.push(Volume {
                name: claim.map_or(own_name, |c| c.volume.clone()),
                claim: claim.map(|c| c.claim.clone()),
                ephemeral,
                usage: Usage {
                    at: Timestamp::now(),
                    used: Some(used.bytes),
                    inodes_used: Some(used.inodes),
                    fs: Some(fs),
                },
                abnormal: None,
            });
            metrics.volume_measured(if mounted { "statfs" } else { "du" }, begun.elapsed());
        }
        for told in drivers.get(&pod.uid).into_iter().flatten() {
            let claim = claimed.iter().find(|c| c.persistent_volume == told.volume);
            let fs = told.fs;
            found.push(Volume {
                name: claim.map_or(&told.volume, |c| &c.volume).clone(),
                claim: claim.map(|c| c.claim.clone()),
                ephemeral: false,
                usage: Usage { at: told.at, used: Some(fs.used), inodes_used: Some(fs.inodes_used), fs: Some(fs) },
                abnormal: told.abnormal,
            });
            metrics.volume_measured(&told.driver, told.took);
        }
        found.sort_by(|a, b| (!a.ephemeral, &a.name).cmp(&(!b.ephemeral, &b.name)));
        if !found.is_empty() {
            all.insert(pod.uid.clone(), found);
        }
    }
    all
}

/// The volumes' directories below `pods/UID/volumes`, with the names of their plugins.
fn volume_dirs(volumes: &Path) -> Vec<(String, PathBuf)> {
    let list = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect::<Vec<_>>()
    };
    let plugins = list(volumes).into_iter();
    plugins
        .flat_map(|plugin| {
            let name = plugin.file_name().unwrap_or_default().to_string_lossy().into_owned();
            list(&plugin).into_iter().map(move |dir| (name.clone(), dir))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, bytes: usize) {
        let file = root.join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, vec![b'x'; bytes]).unwrap();
    }

    #[test]
    fn layers_logs_and_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        put(d, "root/pods/u/etc-hosts", 100);
        put(d, "root/pods/u/volumes/kubernetes.io~empty-dir/scratch/a/b", 50_000);
        put(d, "root/pods/u/volumes/kubernetes.io~secret/s/token", 10);
        put(d, "root/pods/u/volumes/kubernetes.io~csi/unknown/mount", 10);
        put(d, "root/pods/u/volumes/kubernetes.io~local-volume/pv-1/x", 10);
        put(d, "root/pods/u/volumes/kubernetes.io~nfs/pv-3/x", 10);
        put(d, "root/pods/u/volumes/kubernetes.io~nfs/not-mounted/x", 10);
        put(d, "logs/ns_web_u/c/0.log", 5000);
        put(d, "logs/ns_web_u/c/0.log.20260101-000000.gz", 100);
        let label = |(k, v): (&str, &str)| (k.to_owned(), v.to_owned());
        let sandbox = v1::PodSandbox {
            id: "s".into(),
            labels: [
                ("io.kubernetes.pod.name", "web"),
                ("io.kubernetes.pod.namespace", "ns"),
                ("io.kubernetes.pod.uid", "u"),
            ]
            .map(label)
            .into(),
            ..v1::PodSandbox::default()
        };
        let container = v1::Container {
            id: "id".into(),
            pod_sandbox_id: "s".into(),
            state: v1::ContainerState::ContainerRunning as i32,
            labels: [label(("io.kubernetes.container.name", "c"))].into(),
            ..v1::Container::default()
        };
        let names = Names::new(vec![sandbox], vec![container]);
        let settings = StorageSettings { root: d.join("root"), pod_logs: d.join("logs") };
        let usage = |used: u64, mountpoint: &Path| v1::FilesystemUsage {
            timestamp: 7_000_000_000,
            fs_id: Some(v1::FilesystemIdentifier { mountpoint: mountpoint.display().to_string() }),
            used_bytes: Some(v1::UInt64Value { value: used }),
            inodes_used: Some(v1::UInt64Value { value: 3 }),
        };
        let info = v1::ImageFsInfoResponse {
            image_filesystems: vec![usage(42, d)],
            container_filesystems: vec![usage(43, Path::new("/no/such/place"))],
        };
        let stats = v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes { id: "id".into(), ..Default::default() }),
            writable_layer: Some(usage(12_288, d)),
            ..v1::ContainerStats::default()
        };
        let found = look(&settings, &names, Some(&info), &[stats]).unwrap();
        assert_eq!(found.images.unwrap().used, Some(42));
        assert!(found.images.unwrap().fs.is_some() && found.layers_fs.unwrap().fs.is_none());
        let layer = found.layers["id"];
        assert_eq!((layer.used, layer.inodes_used, layer.at.as_second()), (Some(12_288), Some(3), 7));
        let logs = found.logs[&("u".to_owned(), "c".to_owned())];
        assert!(logs.inodes == 2 && logs.bytes >= 5100, "{logs:?}");
        assert_eq!(found.hosts["u"].inodes, 1);

        let claim = ClaimedVolume { volume: "data".into(), claim: "mine".into(), persistent_volume: "pv-1".into() };
        let metrics = Metrics::new().unwrap();
        let far = ClaimedVolume { volume: "far".into(), claim: "other".into(), persistent_volume: "pv-2".into() };
        let told = |volume: &str, abnormal| DriverFigures {
            volume: volume.into(),
            driver: "d".into(),
            at: Timestamp::UNIX_EPOCH,
            took: std::time::Duration::ZERO,
            fs: FilesystemFigures { capacity: 9, used: 4, ..FilesystemFigures::default() },
            abnormal,
        };
        let share = ClaimedVolume { volume: "share".into(), claim: "third".into(), persistent_volume: "pv-3".into() };
        let claims = HashMap::from([("u".to_owned(), vec![claim, far, share])]);
        let drivers = HashMap::from([("u".to_owned(), vec![told("pv-2", Some(true)), told("inline", None)])]);
        let fs = FilesystemFigures { capacity: 8, used: 5, ..FilesystemFigures::default() };
        let share = Share { at: Timestamp::UNIX_EPOCH, took: std::time::Duration::ZERO, fs };
        let shares = HashMap::from([(d.join("root/pods/u/volumes/kubernetes.io~nfs/pv-3"), share)]);
        let told = Told { claims, drivers, shares };
        let volumes = volumes(&settings, &names, &told, &metrics);
        let shown: Vec<_> =
            volumes["u"].iter().map(|v| (v.name.as_str(), v.claim.as_deref(), v.ephemeral, v.abnormal)).collect();
        let want = [
            ("scratch", None, true, None),
            ("data", Some("mine"), false, None),
            ("far", Some("other"), false, Some(true)),
            ("inline", None, false, None),
            ("s", None, false, None),
            ("share", Some("third"), false, None),
        ];
        assert_eq!(shown, want);
        assert_eq!(volumes["u"][5].usage.fs, Some(fs));
        assert_eq!(volumes["u"][2].usage.used, Some(4));
        let scratch = volumes["u"][0].usage;
        assert!(scratch.used.unwrap() >= 50_000 && scratch.inodes_used == Some(3), "{scratch:?}");
    }
}
