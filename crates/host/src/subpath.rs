//! subPath mounts: a place inside a volume, pinned by a bind mount that no symbolic link of the volume's users can redirect
//! (CVE-2017-1002101, CVE-2021-25741).
//!
//! The path is resolved once as the node sees it and must lie in the volume; what is bound is then opened anew, without following any
//! link, so a link swapped in between leads to a refusal. The bind's source is the open descriptor, not a name.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::FileType;

use crate::error::{Attempt, Failed, Result, found};
use crate::{fsx, mount, safe_path};

/// Below a pod's directory: `VOLUME/CONTAINER/INDEX`, the targets of the bind mounts.
pub const SUBPATHS_DIR: &str = "volume-subpaths";

/// One volumeMount with a subPath.
#[derive(Clone, Copy, Debug)]
pub struct Subpath<'a> {
    /// Where the volume is on the node.
    pub volume_path: &'a Path,
    /// The subPath, expanded.
    pub sub_path: &'a str,
    /// `ROOT/pods/UID`.
    pub pod_dir: &'a Path,
    /// The volume's name in the pod.
    pub volume: &'a str,
    /// The container's name.
    pub container: &'a str,
    /// The place in the container's volumeMounts.
    pub index: usize,
}

/// Why a subPath cannot be mounted. The texts are for users, as the Go kubelet writes them; what lies behind (`source`) tells of the
/// node's files and belongs into the log only.
#[derive(Debug, thiserror::Error)]
pub enum SubpathError {
    /// It begins with `/`.
    #[error("error SubPath `{0}` must not be an absolute path")]
    Absolute(String),
    /// It contains `..`.
    #[error("unable to provision SubPath `{0}`: must not contain '..'")]
    Backsteps(String),
    /// It was missing and could not be made.
    #[error("failed to create subPath directory for volumeMount {volume:?} of container {container:?}")]
    Create {
        /// The volume's name.
        volume: String,
        /// The container's name.
        container: String,
        /// What went wrong.
        source: Failed,
    },
    /// It leads out of the volume, or could not be opened or bound.
    #[error("failed to prepare subPath for volumeMount {volume:?} of container {container:?}")]
    Prepare {
        /// The volume's name.
        volume: String,
        /// The container's name.
        container: String,
        /// What went wrong.
        source: Failed,
    },
}

impl Subpath<'_> {
    /// The bind mount's target, the host path for the CRI mount.
    pub fn target(&self) -> PathBuf {
        let dir = self.pod_dir.join(SUBPATHS_DIR).join(self.volume).join(self.container);
        dir.join(self.index.to_string())
    }
}

/// Binds the subPath and answers the host path to mount. A missing one is made first, as directories with the volume's mode (setgid
/// carries its group). One that is bound already is kept if it is still the same file. Blocks.
///
/// # Errors
/// The subPath is not acceptable, leads out of the volume, or a system call fails; nothing stays mounted then.
pub fn prepare_subpath(proc_root: &Path, subpath: &Subpath<'_>) -> std::result::Result<PathBuf, SubpathError> {
    let (volume, container) = (subpath.volume.to_owned(), subpath.container.to_owned());
    let relative = Path::new(subpath.sub_path);
    if relative.is_absolute() {
        return Err(SubpathError::Absolute(subpath.sub_path.to_owned()));
    }
    if relative.components().any(|c| matches!(c, Component::ParentDir)) {
        return Err(SubpathError::Backsteps(subpath.sub_path.to_owned()));
    }
    let full = subpath.volume_path.join(relative);
    if std::fs::metadata(&full).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
        && let Err(source) = make_missing(subpath.volume_path, relative)
    {
        return Err(SubpathError::Create { volume, container, source });
    }
    open_inside(subpath.volume_path, &full)
        .and_then(|source| bind_to_target(proc_root, subpath, &source))
        .map_err(|source| SubpathError::Prepare { volume, container, source })
}

/// Resolves `path`, refuses it when it is not in the volume, and opens it without following links.
fn open_inside(volume: &Path, path: &Path) -> Result<OwnedFd> {
    let (volume, inside) = resolve(volume, path)?;
    open_resolved(&volume, &inside)
}

/// Where `path` leads: the volume, and the path in it.
fn resolve(volume: &Path, path: &Path) -> Result<(PathBuf, PathBuf)> {
    let volume = std::fs::canonicalize(volume).attempt(|| format!("error resolving symlinks in {volume:?}"))?;
    let real = std::fs::canonicalize(path).attempt(|| format!("error resolving symlinks in {path:?}"))?;
    match real.strip_prefix(&volume) {
        Ok(inside) => Ok((volume.clone(), inside.to_owned())),
        Err(_) => Err(Failed::other(
            format!("open subpath {path:?}"),
            format!("subpath {real:?} not within volume path {volume:?}"),
        )),
    }
}

/// Opens what was resolved: a link that was put there since is refused.
fn open_resolved(volume: &Path, inside: &Path) -> Result<OwnedFd> {
    let root = safe_path::open_root(volume).on("open", volume)?;
    safe_path::open_beneath(root, inside).attempt(|| format!("error opening subpath {}", volume.join(inside).display()))
}

/// Makes what is missing of the path, from the deepest part that is there.
fn make_missing(volume: &Path, relative: &Path) -> Result<()> {
    let mode = std::fs::metadata(volume).on("stat", volume)?.mode();
    let there = relative.ancestors().find(|a| std::fs::metadata(volume.join(a)).is_ok()).unwrap_or(Path::new(""));
    let rest = relative.strip_prefix(there).unwrap_or(relative);
    let at = open_inside(volume, &volume.join(there))?;
    safe_path::make_dirs_at(at, rest, mode)
        .attempt(|| format!("make directory {relative:?} in {}", volume.display()))?;
    Ok(())
}

fn bind_to_target(proc_root: &Path, subpath: &Subpath<'_>, source: &OwnedFd) -> Result<PathBuf> {
    let target = subpath.target();
    let stat = rustix::fs::fstat(source).attempt(|| format!("stat subpath {}", subpath.sub_path))?;
    if mount::is_mount_point(proc_root, &target)? {
        let bound = std::fs::symlink_metadata(&target).on("stat", &target)?;
        if (bound.dev(), bound.ino()) == (stat.st_dev, stat.st_ino) {
            return Ok(target);
        }
        // The volume was rewritten, as a ConfigMap is: the old file's directory is gone, a new container gets the new file.
        unmount_all(proc_root, &target)?;
    }
    make_target(subpath.pod_dir, &target, FileType::from_raw_mode(stat.st_mode).is_dir())?;
    let bound = mount::bind_fd(source, &target);
    if bound.is_err() {
        // Best effort: the target is empty, and the pod's end removes it too.
        let _ = remove_target(&target);
    }
    bound.map(|()| target)
}

/// An empty directory or file; a file can carry a bind mount of anything that is no directory.
fn make_target(pod_dir: &Path, target: &Path, directory: bool) -> Result<()> {
    if let Some(meta) = found(std::fs::symlink_metadata(target)).on("stat", target)? {
        if meta.is_dir() == directory && !meta.is_symlink() {
            return Ok(());
        }
        remove_target(target)?;
    }
    let parent = target.parent().unwrap_or(pod_dir);
    fsx::ensure_dirs(parent, 0o750)?;
    match directory {
        true => fsx::ensure_dir(target, 0o750),
        false => fsx::ensure_file(target, 0o640),
    }
}

fn remove_target(target: &Path) -> Result<()> {
    match found(std::fs::symlink_metadata(target)).on("stat", target)? {
        None => Ok(()),
        Some(meta) if meta.is_dir() => found(std::fs::remove_dir(target)).on("remove", target).map(drop),
        Some(_) => found(std::fs::remove_file(target)).on("remove", target).map(drop),
    }
}

/// Unmounts what is mounted at this path, however many times.
fn unmount_all(proc_root: &Path, target: &Path) -> Result<()> {
    for _ in 0..16 {
        if !mount::is_mount_point(proc_root, target)? {
            return Ok(());
        }
        mount::unmount(target)?;
    }
    Err(Failed::other(format!("unmount {}", target.display()), "something is mounted there again and again"))
}

/// Unmounts the subPaths of a pod (of one volume, if given) and removes their targets. Blocks.
///
/// # Errors
/// The first failure; the others are still tried.
pub fn cleanup_subpaths(proc_root: &Path, pod_dir: &Path, volume: Option<&str>) -> Result<()> {
    let top = pod_dir.join(SUBPATHS_DIR);
    let volumes = match volume {
        Some(volume) => vec![top.join(volume)],
        None => entries(&top)?,
    };
    let mut first = Ok(());
    for volume in volumes {
        for container in entries(&volume)? {
            for target in entries(&container)? {
                first = first.and(unmount_all(proc_root, &target).and_then(|()| remove_target(&target)));
            }
            first = first.and(remove_empty(&container));
        }
        first = first.and(remove_empty(&volume));
    }
    first.and(remove_empty(&top))
}

/// Removes a directory unless something is in it.
fn remove_empty(dir: &Path) -> Result<()> {
    match found(std::fs::remove_dir(dir)) {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        other => other.on("remove", dir).map(drop),
    }
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let Some(list) = found(std::fs::read_dir(dir)).on("list", dir)? else { return Ok(Vec::new()) };
    list.map(|entry| entry.map(|e| e.path()).on("list", dir)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::testing::{MountDir, get, may_mount, put};

    const PROC: &str = "/proc";

    struct Pod {
        dir: MountDir,
    }

    impl Pod {
        fn new() -> Self {
            let dir = MountDir::new();
            put(dir.path(), "host/secret", "host");
            std::fs::create_dir_all(dir.path().join("volume")).unwrap();
            std::fs::create_dir_all(dir.path().join("pod")).unwrap();
            Self { dir }
        }

        fn volume(&self) -> PathBuf {
            self.dir.path().join("volume")
        }

        fn prepare(&self, sub_path: &str, index: usize) -> std::result::Result<PathBuf, SubpathError> {
            let subpath = Subpath {
                volume_path: &self.volume(),
                sub_path,
                pod_dir: &self.dir.path().join("pod"),
                volume: "vol",
                container: "c",
                index,
            };
            prepare_subpath(Path::new(PROC), &subpath)
        }

        fn clean(&self) {
            cleanup_subpaths(Path::new(PROC), &self.dir.path().join("pod"), None).unwrap();
        }
    }

    #[test]
    fn steps_out_are_refused_with_their_text() {
        let pod = Pod::new();
        let text = |sub: &str| pod.prepare(sub, 0).unwrap_err().to_string();
        assert_eq!(text("/etc"), "error SubPath `/etc` must not be an absolute path");
        assert_eq!(text("a/../.."), "unable to provision SubPath `a/../..`: must not contain '..'");
    }

    #[test]
    fn links_out_of_the_volume_are_refused() {
        let pod = Pod::new();
        let volume = pod.volume();
        symlink(pod.dir.path().join("host"), volume.join("x")).unwrap();
        symlink("../host", volume.join("y")).unwrap();
        symlink("y", volume.join("nested")).unwrap();
        symlink("../host/secret", volume.join("file")).unwrap();
        symlink("/nonexistent/target", volume.join("dangling")).unwrap();
        symlink("loop", volume.join("loop")).unwrap();
        let prepare = "failed to prepare subPath for volumeMount \"vol\" of container \"c\"";
        let create = "failed to create subPath directory for volumeMount \"vol\" of container \"c\"";
        for (sub, text) in [
            ("x", prepare),
            ("y", prepare),
            ("nested", prepare),
            ("file", prepare),
            ("x/secret", prepare),
            ("x/new", create),
            ("y/new/deeper", create),
            ("dangling", create),
            ("dangling/below", create),
            ("loop", prepare),
        ] {
            assert_eq!(pod.prepare(sub, 0).unwrap_err().to_string(), text, "{sub}");
        }
        assert!(!pod.dir.path().join("host/new").exists());
        assert!(!mount::is_mount_point(Path::new(PROC), &pod.dir.path().join("pod/volume-subpaths/vol/c/0")).unwrap());
        pod.clean();
    }

    #[test]
    fn places_inside_are_bound() {
        if !may_mount() {
            return;
        }
        let pod = Pod::new();
        put(&pod.volume(), "real/data", "inside");
        symlink("real", pod.volume().join("z")).unwrap();
        symlink(pod.volume().join("real"), pod.volume().join("absolute")).unwrap();
        for (index, sub) in ["real", "z", "absolute", "real/data", "."].iter().enumerate() {
            let target = pod.prepare(sub, index).unwrap_or_else(|e| panic!("{sub}: {e:?}"));
            assert_eq!(target, pod.dir.path().join(format!("pod/volume-subpaths/vol/c/{index}")));
            let data = match *sub {
                "real/data" => target,
                "." => target.join("real/data"),
                _ => target.join("data"),
            };
            assert_eq!(get(data), "inside", "{sub}");
        }
        pod.clean();
        assert!(!pod.dir.path().join("pod/volume-subpaths").exists());
        assert_eq!(get(pod.volume().join("real/data")), "inside");
    }

    #[test]
    fn a_missing_place_gets_the_volumes_mode() {
        if !may_mount() {
            return;
        }
        let pod = Pod::new();
        std::fs::set_permissions(pod.volume(), std::fs::Permissions::from_mode(0o2770)).unwrap();
        std::os::unix::fs::chown(pod.volume(), None, Some(4711)).unwrap();
        std::fs::set_permissions(pod.volume(), std::fs::Permissions::from_mode(0o2770)).unwrap();
        pod.prepare("new/deeper", 3).unwrap();
        for path in ["new", "new/deeper"] {
            let meta = std::fs::metadata(pod.volume().join(path)).unwrap();
            assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o2770, 4711), "{path}");
        }
        pod.clean();
    }

    #[test]
    fn a_second_time_keeps_the_same_and_replaces_another() {
        if !may_mount() {
            return;
        }
        let pod = Pod::new();
        put(&pod.volume(), "v1/key", "old");
        symlink("v1", pod.volume().join("data")).unwrap();
        let target = pod.prepare("data/key", 0).unwrap();
        pod.prepare("data/key", 0).unwrap();
        let mounts = || mount::MountTable::read(Path::new(PROC)).unwrap().at_or_below(&target).len();
        assert_eq!((mounts(), get(&target)), (1, "old".to_owned()));

        // As an atomic volume does it: new directory, link swapped, old directory gone.
        put(&pod.volume(), "v2/key", "new");
        symlink("v2", pod.volume().join("tmp")).unwrap();
        std::fs::rename(pod.volume().join("tmp"), pod.volume().join("data")).unwrap();
        std::fs::remove_dir_all(pod.volume().join("v1")).unwrap();
        assert_eq!(get(&target), "old", "a running container keeps it");
        assert_eq!(pod.prepare("data/key", 0).unwrap(), target);
        assert_eq!((mounts(), get(&target)), (1, "new".to_owned()));

        // A directory where a file was.
        std::fs::create_dir(pod.volume().join("dir")).unwrap();
        pod.prepare("dir", 0).unwrap();
        assert!(target.is_dir());
        pod.clean();
    }

    /// The moment that the loop below may or may not meet.
    #[test]
    fn a_link_put_there_after_the_look_is_refused() {
        let pod = Pod::new();
        let volume = pod.volume();
        put(&volume, "dir/deep/file", "inside");
        for (path, swapped) in [("dir/deep/file", "dir"), ("dir/deep", "dir/deep"), ("dir/deep/file", "dir/deep/file")]
        {
            let (root, inside) = resolve(&volume, &volume.join(path)).unwrap();
            open_resolved(&root, &inside).unwrap();
            let (there, aside) = (volume.join(swapped), volume.join("aside"));
            std::fs::rename(&there, &aside).unwrap();
            for target in [pod.dir.path().join("host"), aside.clone()] {
                symlink(target, &there).unwrap();
                open_resolved(&root, &inside).unwrap_err();
                std::fs::remove_file(&there).unwrap();
            }
            std::fs::rename(&aside, &there).unwrap();
        }
    }

    #[test]
    fn a_link_swapped_in_a_loop_never_leads_out() {
        if !may_mount() {
            return;
        }
        let pod = Pod::new();
        let volume = pod.volume();
        put(&volume, "dir/secret", "inside");
        symlink(pod.dir.path().join("host"), volume.join("link")).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    let (a, b) = (volume.join("dir"), volume.join("link"));
                    rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, flags).unwrap();
                }
            });
            for _ in 0..300 {
                if let Ok(target) = pod.prepare("dir", 0) {
                    assert_eq!(get(target.join("secret")), "inside");
                    unmount_all(Path::new(PROC), &target).unwrap();
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        pod.clean();
    }
}
