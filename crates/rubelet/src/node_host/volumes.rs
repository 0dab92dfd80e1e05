//! Volumes of a pod on disk: emptyDir, hostPath, downwardAPI and projected downwardAPI, laid out as the Go kubelet does.
//!
//! ```text
//! pods/UID/volumes/kubernetes.io~empty-dir/VOL          the volume (a tmpfs for medium Memory)
//! pods/UID/plugins/kubernetes.io~empty-dir/VOL/ready    set up completely; wrapped_VOL for downwardAPI and projected
//! ```
//!
//! A marked volume is only checked: after a restart of the agent nothing is mounted twice and nothing is emptied.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use host::fsx::{self, FileProjection};
use host::mount::{self, MountTable, Tmpfs};
use jiff::Timestamp;
use model::api::{EmptyDirVolumeSource, Volume};
use model::pod::{DesiredPod, PodUid};
use pod::ports::{MountedVolume, MountedVolumes, VolumeFiles, VolumePayloads};

use super::Paths;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// The kinds of volumes whose content is the pod's own and ends with it.
const EPHEMERAL: [&str; 5] = [
    EMPTY_DIR,
    "kubernetes.io~configmap",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
    "kubernetes.io~secret",
];

/// Makes the volumes of one pod.
pub(super) struct Maker {
    pub(super) paths: Paths,
    pub(super) pod: DesiredPod,
    pub(super) payloads: VolumePayloads,
    pub(super) now: Timestamp,
}

impl Maker {
    /// Makes every volume; stops at the first that fails and names it.
    pub(super) fn make_all(&self) -> Outcome<MountedVolumes> {
        let mut mounted = MountedVolumes::new();
        let used = |v: &&Volume| decide::config::volume_is_used(&self.pod, &v.name);
        for volume in self.pod.spec().volumes.iter().flatten().filter(used) {
            let made = self
                .make(volume)
                .map_err(|e| format!("MountVolume.SetUp failed for volume \"{}\" : {}", volume.name, chain(&*e)))?;
            mounted.insert(volume.name.clone(), made);
        }
        Ok(mounted)
    }

    fn make(&self, volume: &Volume) -> Outcome<MountedVolume> {
        let name = &volume.name;
        if let Some(source) = &volume.host_path {
            let path = PathBuf::from(&source.path);
            fsx::hostpath_check(&path, source.type_.as_deref().unwrap_or_default())?;
            return Ok(MountedVolume { host_path: path, read_only: false });
        }
        if let Some(source) = &volume.empty_dir {
            let dir = self.dir(EMPTY_DIR, name);
            self.empty_dir(name, &dir, source)?;
            return Ok(MountedVolume { host_path: dir, read_only: false });
        }
        let plugin = match () {
            () if volume.downward_api.is_some() => "kubernetes.io~downward-api",
            () if volume.projected.is_some() => "kubernetes.io~projected",
            () => return Err(
                "volumes of this type are not supported yet; supported are emptyDir, hostPath, downwardAPI, projected"
                    .into(),
            ),
        };
        let dir = self.dir(plugin, name);
        let files = self.payloads.files.get(name).cloned().unwrap_or_default();
        self.files(name, &dir, files)?;
        Ok(MountedVolume { host_path: dir, read_only: true })
    }

    fn dir(&self, plugin: &str, name: &str) -> PathBuf {
        self.paths.pod(self.pod.uid()).join("volumes").join(plugin).join(name)
    }

    fn marker(&self, name: &str) -> PathBuf {
        self.paths.pod(self.pod.uid()).join("plugins").join(EMPTY_DIR).join(name).join("ready")
    }

    fn fs_group(&self) -> Option<u32> {
        let group = self.pod.spec().security_context.as_ref()?.fs_group?;
        u32::try_from(group).ok()
    }

    fn empty_dir(&self, name: &str, dir: &Path, source: &EmptyDirVolumeSource) -> Outcome<()> {
        let marker = self.marker(name);
        let medium = source.medium.as_deref().unwrap_or_default();
        let mounted = mount::is_mount_point(&self.paths.proc, dir)?;
        if marker.exists() && dir.exists() && (medium.is_empty() || mounted) {
            return Ok(());
        }
        self.volume_dir(dir)?;
        match medium {
            "" => {}
            "Memory" if !mounted => {
                let size = self.payloads.memory_sizes.get(name).copied();
                mount::mount_tmpfs(dir, Tmpfs { size, mode: 0o1777, noswap: true })?;
            }
            huge if huge.starts_with("HugePages") && !mounted => {
                mount::mount_hugetlbfs(dir, self.page_size(huge)?)?;
            }
            _ => {}
        }
        if medium != "Memory" {
            // A tmpfs has its mode from the mount, with the sticky bit.
            fsx::ensure_dir(dir, 0o777)?;
        }
        if let Some(gid) = self.fs_group() {
            fsx::set_fs_group(dir, gid, false, false)?;
        }
        mark(&marker)
    }

    /// Page size of medium `HugePages` or `HugePages-SIZE`: the one that the pod's containers ask for, when it is not named.
    fn page_size(&self, medium: &str) -> Outcome<u64> {
        let wanted = medium.strip_prefix("HugePages-");
        let limits = self.pod.containers().flat_map(|c| decide::resources::container_limits(c).into_keys());
        let mut sizes: Vec<i64> = limits.filter_map(|r| decide::resources::hugepages::page_size(&r)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let size = match wanted {
            Some(size) => decide::resources::hugepages::page_size(&format!("hugepages-{size}"))
                .ok_or_else(|| format!("medium {medium} names no page size"))?,
            None => match sizes[..] {
                [one] => one,
                [] => return Err("medium HugePages needs a container with a hugepages limit".into()),
                _ => return Err("medium HugePages can only be used with one page size in the pod".into()),
            },
        };
        Ok(u64::try_from(size)?)
    }

    /// A volume of files on a tmpfs, replaced as one step when they change.
    fn files(&self, name: &str, dir: &Path, files: VolumeFiles) -> Outcome<()> {
        if !mount::is_mount_point(&self.paths.proc, dir)? {
            self.volume_dir(dir)?;
            let size = self.payloads.memory_sizes.get(name).copied();
            mount::mount_tmpfs(dir, Tmpfs { size, mode: 0o1777, noswap: true })?;
        }
        let files: BTreeMap<String, FileProjection> =
            files.into_iter().map(|(path, (data, mode))| (path, FileProjection { data, mode, uid: None })).collect();
        let group = self.fs_group();
        fsx::write_atomic_volume(dir, &files, self.now, |new| {
            if let Some(gid) = group {
                fsx::set_fs_group(new, gid, true, false)?;
            }
            Ok(())
        })?;
        if let Some(gid) = group {
            // The volume's root and the links in it.
            fsx::set_fs_group(dir, gid, true, false)?;
        }
        mark(&self.marker(&format!("wrapped_{name}")))
    }

    /// The volume's own directory, whatever the umask is.
    fn volume_dir(&self, dir: &Path) -> Outcome<()> {
        if let Some(plugin) = dir.parent() {
            fsx::ensure_dir(plugin, 0o755)?;
        }
        Ok(fsx::ensure_dir(dir, 0o777)?)
    }
}

fn mark(marker: &Path) -> Outcome<()> {
    if let Some(dir) = marker.parent() {
        fsx::ensure_dirs(dir, 0o750)?;
    }
    Ok(fsx::ensure_file(marker, 0o644)?)
}

fn chain(error: &(dyn Error + 'static)) -> String {
    pod::ports::error_chain(error)
}

/// Unmounts the pod's subPaths and volumes and removes the volumes' content. Never through a mount: a volume with a foreign mount in it stays whole and is an error.
/// Volumes of other kinds are left as they are: what lies there may be somebody's data.
pub(super) fn take_down(paths: &Paths, uid: &PodUid) -> Outcome<()> {
    let pod_dir = paths.pod(uid);
    if !pod_dir.exists() {
        return Ok(());
    }
    host::subpath::cleanup_subpaths(&paths.proc, &pod_dir, None)?;
    let mut failures = Vec::new();
    for plugin in EPHEMERAL.map(|kind| pod_dir.join("volumes").join(kind)) {
        for dir in children(&plugin)? {
            if let Err(e) = take_down_one(paths, &dir) {
                failures.push(format!("{}: {}", dir.display(), chain(&*e)));
            }
        }
    }
    let markers = pod_dir.join("plugins").join(EMPTY_DIR);
    if failures.is_empty() && markers.exists() {
        fsx::remove_tree(&paths.proc, &markers)?;
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

fn take_down_one(paths: &Paths, dir: &Path) -> Outcome<()> {
    let table = MountTable::read(&paths.proc)?;
    let inside: Vec<String> = table.below(dir).iter().map(|m| m.mount_point.display().to_string()).collect();
    if !inside.is_empty() {
        return Err(format!("something else is mounted inside it: {}", inside.join(", ")).into());
    }
    // The pod's own mount: a tmpfs or hugetlbfs. It may stand more than once after a crash between mount and marker.
    for _ in table.at_or_below(dir) {
        mount::unmount(dir)?;
    }
    Ok(fsx::remove_volume_dir(&paths.proc, dir)?)
}

fn children(dir: &Path) -> Outcome<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Ok(entries) => Ok(entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}
