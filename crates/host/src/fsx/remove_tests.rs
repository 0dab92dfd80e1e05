//! Tests of removal; those with mounts need root.

use super::*;
use crate::mount::{self, Tmpfs};
use crate::testing::{MountDir, get, may_mount, put};

const PROC: &str = "/proc";

/// A pod's directory with two volumes, one holding a file if asked.
fn pod(dir: &Path, stray: bool) -> PathBuf {
    put(dir, "pods/uid-1/etc-hosts", "x");
    put(dir, "pods/uid-1/containers/c/0badcafe", "bye");
    put(dir, "pods/uid-1/plugins/kubernetes.io~empty-dir/vol/ready", "");
    let volumes = dir.join("pods/uid-1/volumes");
    std::fs::create_dir_all(volumes.join("kubernetes.io~empty-dir/vol")).unwrap();
    std::fs::create_dir_all(volumes.join("kubernetes.io~secret/token")).unwrap();
    put(dir, "pods/uid-1/volume-subpaths/vol/c/0", "");
    std::fs::create_dir_all(dir.join("pods/uid-1/volume-subpaths/vol/c/1")).unwrap();
    if stray {
        put(&volumes, "kubernetes.io~empty-dir/vol/data", "precious");
    }
    dir.join("pods/uid-1")
}

#[test]
fn an_empty_pod_directory_goes() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(dir.path(), false);
    remove_pod_dir(Path::new(PROC), &pod).unwrap();
    assert!(!pod.exists());
    assert!(dir.path().join("pods").exists());
    remove_pod_dir(Path::new(PROC), &pod).unwrap();
}

#[test]
fn a_stray_file_is_reported_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod(dir.path(), true);
    let errors = remove_pod_dir(Path::new(PROC), &pod).unwrap_err();
    let vol = pod.join("volumes/kubernetes.io~empty-dir/vol");
    assert_eq!(errors.len(), 1);
    let text = errors[0].to_string();
    let start = format!("orphaned pod \"uid-1\" found, but failed to rmdir() volume at path {}: ", vol.display());
    assert!(text.starts_with(&start), "{text}");
    assert_eq!(get(vol.join("data")), "precious");
    assert!(!pod.join("volumes/kubernetes.io~secret").exists(), "the others do go");
    assert!(pod.join("etc-hosts").exists());

    remove_volume_dir(Path::new(PROC), &vol).unwrap();
    remove_pod_dir(Path::new(PROC), &pod).unwrap();
    assert!(!pod.exists());
}

#[test]
fn data_in_a_subpath_target_or_beside_a_volume_is_kept() {
    for stray in [
        "volume-subpaths/vol/c/1/data",
        "volumes/kubernetes.io~secret/token/x/data",
        "volumes/file",
        "volumes/kubernetes.io~secret/file",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let pod = pod(dir.path(), false);
        put(&pod, stray, "precious");
        let errors = remove_pod_dir(Path::new(PROC), &pod).unwrap_err();
        assert!(!errors.is_empty());
        assert_eq!(get(pod.join(stray)), "precious", "{errors:?}");
        assert!(pod.join("etc-hosts").exists());
    }
}

#[test]
fn nothing_is_removed_through_a_mount() {
    if !may_mount() {
        return;
    }
    // Bind mounts of the same filesystem, in a volume, in a deep directory and on a file, and a tmpfs.
    for place in ["volumes/kubernetes.io~empty-dir/vol/mnt", "containers/c/a/b", "volume-subpaths/v/c/9", "plugins/x"] {
        for tmpfs in [false, true] {
            let dir = MountDir::new();
            let pod = pod(dir.path(), false);
            let marker = put(dir.path(), "data/marker", "intact");
            let target = pod.join(place);
            std::fs::create_dir_all(&target).unwrap();
            match tmpfs {
                true => {
                    mount::mount_tmpfs(&target, Tmpfs { size: None, mode: 0o755, noswap: false }).map(drop).unwrap();
                    put(&target, "marker", "intact");
                }
                false => mount::bind(&dir.path().join("data"), &target, false).unwrap(),
            }
            let errors = remove_pod_dir(Path::new(PROC), &pod).unwrap_err();
            assert!(
                matches!(&errors[..], [OrphanError::StillMounted { mounts, .. }] if mounts == std::slice::from_ref(&target))
            );
            assert!(pod.join("etc-hosts").exists(), "nothing is touched");

            // What the mount table does not tell, the mount id does.
            let empty = tempfile::tempdir().unwrap();
            put(empty.path(), "self/mountinfo", "");
            remove_tree(empty.path(), &pod).unwrap_err();
            assert_eq!((get(marker), get(target.join("marker"))), ("intact".into(), "intact".into()), "{place}");
            assert!(mount::is_mount_point(Path::new(PROC), &target).unwrap());
        }
    }
}

#[test]
fn a_mounted_file_is_kept() {
    if !may_mount() {
        return;
    }
    let dir = MountDir::new();
    let source = put(dir.path(), "source", "intact");
    let target = put(dir.path(), "tree/file", "");
    mount::bind(&source, &target, false).unwrap();
    let empty = tempfile::tempdir().unwrap();
    put(empty.path(), "self/mountinfo", "");
    assert!(remove_tree(Path::new(PROC), &dir.path().join("tree")).is_err());
    assert!(remove_tree(empty.path(), &dir.path().join("tree")).is_err());
    assert_eq!(get(target), "intact");
}

#[test]
fn links_are_removed_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "outside/file", "kept");
    std::fs::create_dir(dir.path().join("tree")).unwrap();
    std::os::unix::fs::symlink("../outside", dir.path().join("tree/link")).unwrap();
    std::os::unix::fs::symlink("outside", dir.path().join("top")).unwrap();
    remove_tree(Path::new(PROC), &dir.path().join("tree")).unwrap();
    remove_tree(Path::new(PROC), &dir.path().join("top")).unwrap();
    remove_tree(Path::new(PROC), &dir.path().join("missing")).unwrap();
    assert_eq!(get(dir.path().join("outside/file")), "kept");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_tree_deeper_than_any_path_goes() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    let mut at = open_dir(CWD, &tree).unwrap();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&at, "ab", Mode::from_raw_mode(0o755)).unwrap();
        rustix::fs::openat(&at, "f", OFlags::CREATE | OFlags::WRONLY, Mode::from_raw_mode(0o644)).unwrap();
        at = open_dir(&at, "ab").unwrap();
    }
    drop(at);
    remove_tree(Path::new(PROC), &tree).unwrap();
    assert!(!tree.exists());
}

#[test]
fn many_files_go() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..2000 {
        put(dir.path(), &format!("tree/d{}/{i}", i % 7), "");
    }
    remove_tree(Path::new(PROC), &dir.path().join("tree")).unwrap();
    assert!(!dir.path().join("tree").exists());
}
