//! Volumes of a pod on disk: emptyDir, hostPath, NFS and volumes of files, laid out as the Go kubelet does.
//!
//! ```text
//! pods/UID/volumes/kubernetes.io~empty-dir/VOL          the volume (a tmpfs for medium Memory)
//! pods/UID/volumes/kubernetes.io~configmap/VOL          on the disk; secret, projected, downward-api on a tmpfs
//! pods/UID/volumes/kubernetes.io~nfs/NAME               a share, mounted by the host's mount(8)
//! pods/UID/plugins/kubernetes.io~empty-dir/VOL/ready    set up completely; wrapped_VOL for volumes of files
//! ```
//!
//! A marked volume is only checked: after a restart of the agent nothing is mounted twice and nothing is emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};

use decide::config::claims::{ClaimedVolume, NfsShare, Place};
use decide::config::objects::VolumeFiles;
use host::fsx::{self, FileProjection};
use host::mount::{self, MountTable, Tmpfs};
use host::mount_tool;
use jiff::Timestamp;
use model::api::{EmptyDirVolumeSource, Volume};
use model::pod::{DesiredPod, PodUid};
use pod::ports::{MountedVolume, VolumePayloads, VolumeResults};

use super::Paths;

/// Stages of a mount, as messages name them.
const SET_UP: &str = "SetUp";

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
const NFS: &str = "kubernetes.io~nfs";

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
    /// Makes every volume that is not left out; one that fails does not keep the others from it.
    pub(super) fn make_all(&self) -> VolumeResults {
        let mut results = VolumeResults::default();
        // Images are mounted by the runtime.
        let used = |v: &&Volume| {
            v.image.is_none()
                && decide::config::volume_is_used(&self.pod, &v.name)
                && !self.payloads.left_out.contains(&v.name)
        };
        for volume in self.pod.spec().volumes.iter().flatten().filter(used) {
            let claimed = self.payloads.claimed.get(&volume.name);
            let made = match claimed {
                Some(claimed) => self.claimed(claimed),
                None => self.make(volume).map_err(|e| (SET_UP, e)),
            };
            match made {
                Ok(made) => {
                    results.mounted.insert(volume.name.clone(), made);
                }
                Err((stage, e)) => {
                    let name = claimed.map_or(&volume.name, |c| &c.name);
                    let message = format!("MountVolume.{stage} failed for volume \"{name}\" : {}", chain(&*e));
                    results.failed.insert(volume.name.clone(), message);
                }
            }
        }
        results
    }

    /// What a claim leads to; an error with the stage that it belongs to.
    fn claimed(&self, claimed: &ClaimedVolume) -> Result<MountedVolume, (&'static str, Box<dyn Error + Send + Sync>)> {
        let ready = |path| MountedVolume {
            read_only: claimed.read_only,
            gid: claimed.gid,
            spec_name: Some(claimed.name.clone()),
            ..MountedVolume::at(path)
        };
        match &claimed.place {
            Place::HostPath { path, kind } => {
                let path = PathBuf::from(path);
                fsx::hostpath_check(&path, kind).map_err(|e| (SET_UP, e.into()))?;
                Ok(ready(path))
            }
            Place::Nfs(share) => {
                let dir = self.dir(NFS, &claimed.name);
                self.nfs(share, &dir).map_err(|e| (SET_UP, e))?;
                Ok(ready(dir))
            }
            Place::Csi(volume) => {
                // The worker asks the plugins' volumes for it.
                Err((SET_UP, format!("a volume of plugin {} is not made here", volume.driver).into()))
            }
        }
    }

    /// Mounts a share with the host's own program.
    fn nfs(&self, share: &NfsShare, dir: &Path) -> Outcome<()> {
        if mount::is_mount_point(&self.paths.proc, dir)? {
            return Ok(());
        }
        fsx::ensure_dirs(dir, 0o750)?;
        let mounted = mount_tool::mount("nfs", &share.source, dir, &share.options, mount_tool::LIMIT);
        if mounted.is_err() && !mount::is_mount_point(&self.paths.proc, dir)? {
            // What is empty goes; a directory that is not is somebody's.
            let _ = std::fs::remove_dir(dir);
        }
        Ok(mounted?)
    }

    fn make(&self, volume: &Volume) -> Outcome<MountedVolume> {
        let name = &volume.name;
        if let Some(source) = &volume.host_path {
            let path = PathBuf::from(&source.path);
            fsx::hostpath_check(&path, source.type_.as_deref().unwrap_or_default())?;
            return Ok(MountedVolume::at(path));
        }
        if let Some(source) = &volume.empty_dir {
            let dir = self.dir(EMPTY_DIR, name);
            self.empty_dir(name, &dir, source)?;
            return Ok(MountedVolume { relabel: true, ..MountedVolume::at(dir) });
        }
        if let Some(source) = &volume.nfs {
            let dir = self.dir(NFS, name);
            self.nfs(&NfsShare::new(source, &[], false), &dir)?;
            let read_only = source.read_only == Some(true);
            return Ok(MountedVolume { read_only, ..MountedVolume::at(dir) });
        }
        let (plugin, in_memory) = match () {
            () if volume.config_map.is_some() => ("kubernetes.io~configmap", false),
            () if volume.secret.is_some() => ("kubernetes.io~secret", true),
            () if volume.downward_api.is_some() => ("kubernetes.io~downward-api", true),
            () if volume.projected.is_some() => ("kubernetes.io~projected", true),
            () => {
                return Err(
                    "volumes of this type are not supported; supported are emptyDir, hostPath, configMap, secret, \
                            projected, downwardAPI, csi, nfs, iscsi, fc, and claims of csi, hostPath, local, nfs, iscsi and fc volumes"
                        .into(),
                );
            }
        };
        let dir = self.dir(plugin, name);
        let empty = VolumeFiles::new();
        self.files(name, &dir, in_memory, self.payloads.files.get(name).unwrap_or(&empty))?;
        Ok(MountedVolume { read_only: true, relabel: true, ..MountedVolume::at(dir) })
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

    /// A volume of files, replaced as one step when they change.
    fn files(&self, name: &str, dir: &Path, in_memory: bool, files: &VolumeFiles) -> Outcome<()> {
        if !in_memory {
            if !dir.is_dir() {
                self.volume_dir(dir)?;
            }
        } else if !mount::is_mount_point(&self.paths.proc, dir)? {
            self.volume_dir(dir)?;
            let size = self.payloads.memory_sizes.get(name).copied();
            mount::mount_tmpfs(dir, Tmpfs { size, mode: 0o1777, noswap: true })?;
        }
        for nested in nested_mount_points(&self.pod, name)? {
            fsx::ensure_dirs(&dir.join(nested), 0o755)?;
        }
        let files: BTreeMap<String, FileProjection> = files
            .iter()
            .map(|(path, f)| (path.clone(), FileProjection { data: f.data.clone(), mode: f.mode, uid: f.uid }))
            .collect();
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

/// Directories in a volume on which a container mounts another one: a read-only volume must have them before.
fn nested_mount_points(pod: &DesiredPod, volume: &str) -> Outcome<BTreeSet<PathBuf>> {
    let mut nested = BTreeSet::new();
    for container in pod.containers() {
        let mounts = container.spec.volume_mounts.as_deref().unwrap_or_default();
        let clean = |path: &str| -> PathBuf { Path::new(path).components().collect() };
        let mut all: Vec<PathBuf> = mounts.iter().map(|m| clean(&m.mount_path)).collect();
        all.sort();
        for own in mounts.iter().filter(|m| m.name == volume).map(|m| clean(&m.mount_path)) {
            let mut outer: Option<&Path> = None;
            for inner in &all {
                let Ok(relative) = inner.strip_prefix(&own) else { continue };
                if relative.as_os_str().is_empty() || outer.is_some_and(|o| inner.starts_with(o)) {
                    continue;
                }
                if relative.components().any(|c| !matches!(c, std::path::Component::Normal(_))) {
                    return Err(format!("invalid container mount point {}", inner.display()).into());
                }
                outer = Some(inner);
                nested.insert(relative.to_owned());
            }
        }
    }
    Ok(nested)
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
    // What is on a server is not the pod's: nothing but the mount and its empty directory goes.
    for dir in children(&pod_dir.join("volumes").join(NFS))? {
        if let Err(e) = take_down_share(paths, &dir) {
            failures.push(format!("{}: {}", dir.display(), chain(&*e)));
        }
    }
    let markers = pod_dir.join("plugins").join(EMPTY_DIR);
    if failures.is_empty() && markers.exists() {
        fsx::remove_tree(&paths.proc, &markers)?;
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

fn take_down_one(paths: &Paths, dir: &Path) -> Outcome<()> {
    let (table, real) = (MountTable::read(&paths.proc)?, mount::real(dir));
    let inside: Vec<String> = table.below(&real).iter().map(|m| m.mount_point.display().to_string()).collect();
    if !inside.is_empty() {
        return Err(format!("something else is mounted inside it: {}", inside.join(", ")).into());
    }
    // The pod's own mount: a tmpfs or hugetlbfs. It may stand more than once after a crash between mount and marker.
    for _ in table.at_or_below(&real) {
        mount::unmount(dir)?;
    }
    Ok(fsx::remove_volume_dir(&paths.proc, dir)?)
}

fn take_down_share(paths: &Paths, dir: &Path) -> Outcome<()> {
    if mount::is_mount_point(&paths.proc, dir)? {
        mount_tool::unmount(dir, mount_tool::LIMIT)?;
    }
    for _ in MountTable::read(&paths.proc)?.at_or_below(&mount::real(dir)) {
        mount::unmount(dir)?;
    }
    if mount::is_mount_point(&paths.proc, dir)? {
        return Err("it is still mounted".into());
    }
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

fn children(dir: &Path) -> Outcome<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Ok(entries) => Ok(entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mount table has real paths, whatever way the root directory is named by.
    #[test]
    fn a_root_directory_that_is_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (data, root) = (dir.path().join("data"), dir.path().join("kubelet"));
        std::os::unix::fs::symlink(&data, &root).unwrap();
        let volume = data.join("pods/u/volumes/kubernetes.io~secret/s");
        std::fs::create_dir_all(&volume).unwrap();
        if mount::mount_tmpfs(&volume, Tmpfs { size: None, mode: 0o1777, noswap: false }).is_err() {
            // Not root, or no right to mount.
            return;
        }
        std::fs::write(volume.join("token"), "x").unwrap();
        let paths =
            Paths { root: root.clone(), pod_logs: root.clone(), container_logs: root.clone(), proc: "/proc".into() };
        let ended = take_down(&paths, &PodUid::new("u"));
        let left = volume.exists();
        let _ = mount::unmount(&volume);
        ended.unwrap();
        assert!(!left);
    }
}
