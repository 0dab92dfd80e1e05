//! Where the hierarchies are, from the mount table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::CgroupVersion;
use crate::error::{Failed, Result, found};
use crate::mount::MountTable;

/// The controllers that the kubelet sets or reads on v2.
const USED_V2: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];

/// The hierarchies whose presence makes a v1 group complete.
const USED_V1: [&str; 7] = ["cpu", "cpuacct", "cpuset", "hugetlb", "memory", "pids", "systemd"];

/// The cgroup filesystems of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLayout {
    /// What the kernel offers at the root.
    pub version: CgroupVersion,
    /// The cgroup root, `/sys/fs/cgroup`.
    pub root: PathBuf,
    /// v1: controller (or `systemd`, for the named hierarchy, and `unified` for a hybrid's v2 part) to its mount; joined controllers
    /// share one. v2: every controller that the kubelet uses and the kernel has, to the root.
    pub mounts: BTreeMap<String, PathBuf>,
    /// v2: every controller that the root offers, in the kernel's order; empty on v1.
    pub offered: Vec<String>,
    /// False for fixture trees, where the files of a group do not come by themselves.
    pub(super) real: bool,
}

impl CgroupLayout {
    /// Finds the hierarchies at and below `root` in the mount table of `proc`. Blocks.
    ///
    /// # Errors
    /// The mount table cannot be read, or no cgroup filesystem is there.
    pub fn detect(root: &Path, proc: &Path) -> Result<Self> {
        let table = MountTable::read(proc)?;
        let real = is_cgroup_filesystem(&table, root);
        if table.at(root).is_some_and(|m| m.fs_type == "cgroup2") {
            let path = root.join("cgroup.controllers");
            let text = crate::proc::read(&path)?;
            let offered: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
            let used = offered.iter().filter(|c| USED_V2.contains(&c.as_str()));
            let mounts = used.map(|c| (c.clone(), root.to_owned())).collect();
            return Ok(Self { version: CgroupVersion::V2, root: root.to_owned(), mounts, offered, real });
        }
        let mut mounts = BTreeMap::new();
        for mount in table.0.iter().filter(|m| m.mount_point.starts_with(root)) {
            let names: Vec<&str> = match mount.fs_type.as_str() {
                "cgroup2" => vec!["unified"],
                "cgroup" => mount.super_options.iter().filter_map(|o| hierarchy_name(o)).collect(),
                _ => continue,
            };
            for name in names {
                // A container may hold the same hierarchy twice; the first is the host's.
                mounts.entry(name.to_owned()).or_insert_with(|| mount.mount_point.clone());
            }
        }
        match mounts.is_empty() {
            true => Err(Failed::other(
                format!("find cgroups at {}", root.display()),
                "no cgroup filesystem is mounted there",
            )),
            false => Ok(Self { version: CgroupVersion::V1, root: root.to_owned(), mounts, offered: Vec::new(), real }),
        }
    }

    /// Every hierarchy once.
    pub(super) fn hierarchies(&self) -> BTreeSet<&Path> {
        match self.version {
            CgroupVersion::V2 => [self.root.as_path()].into(),
            CgroupVersion::V1 => self.mounts.values().map(PathBuf::as_path).collect(),
        }
    }

    /// The hierarchies that a complete v1 group is in.
    pub(super) fn needed_v1(&self) -> BTreeSet<&Path> {
        USED_V1.iter().filter_map(|c| self.mounts.get(*c)).map(PathBuf::as_path).collect()
    }

    /// The kubelet's controllers that this host has.
    pub(super) fn controllers(&self) -> BTreeSet<String> {
        let used = self.mounts.keys().filter(|c| USED_V1.contains(&c.as_str()) && *c != "systemd");
        used.cloned().collect()
    }

    /// Where this controller's files of the group at this path are.
    pub(super) fn dir(&self, controller: &str, path: &str) -> Option<PathBuf> {
        self.mounts.get(controller).map(|mount| below(mount, path))
    }
}

/// The controller, or the named hierarchy, that a v1 mount option stands for.
fn hierarchy_name(option: &str) -> Option<&str> {
    const FLAGS: [&str; 8] = ["rw", "ro", "xattr", "none", "noprefix", "clone_children", "cpuset_v2_mode", "seclabel"];
    match option.split_once('=') {
        Some(("name", name)) => Some(name),
        Some(_) => None,
        None => (!FLAGS.contains(&option)).then_some(option),
    }
}

/// A group's directory within a hierarchy.
pub(super) fn below(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

/// What a v2 group has enabled; empty when the group is not there.
pub(super) fn enabled_v2(dir: &Path) -> BTreeSet<String> {
    let text = found(std::fs::read_to_string(dir.join("cgroup.controllers"))).ok().flatten().unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// True when the first hierarchy is the kernel's own and not a fixture.
fn is_cgroup_filesystem(table: &MountTable, root: &Path) -> bool {
    const CGROUP: i64 = 0x0027_e0eb;
    const CGROUP2: i64 = 0x6367_7270;
    let mount = table.0.iter().find(|m| m.mount_point.starts_with(root) && m.fs_type.starts_with("cgroup"));
    // The field's type differs between architectures.
    #[allow(clippy::useless_conversion)]
    let magic = mount.and_then(|m| rustix::fs::statfs(&m.mount_point).ok()).map(|s| i64::from(s.f_type));
    matches!(magic, Some(CGROUP | CGROUP2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::host::fixtures;

    #[test]
    fn hybrid_v1_with_joined_controllers() {
        let dir = fixtures::v1();
        let layout = CgroupLayout::detect(&dir.path().join("cg"), &dir.path().join("proc")).unwrap();
        assert_eq!(layout.version, CgroupVersion::V1);
        let joined = dir.path().join("cg/cpu,cpuacct");
        assert_eq!(layout.mounts["cpu"], joined);
        assert_eq!(layout.mounts["cpuacct"], joined);
        assert_eq!(layout.mounts["systemd"], dir.path().join("cg/systemd"));
        assert_eq!(layout.mounts["unified"], dir.path().join("cg/unified"));
        assert_eq!(
            layout.controllers().into_iter().collect::<Vec<_>>(),
            ["cpu", "cpuacct", "cpuset", "memory", "pids"]
        );
        assert_eq!(layout.hierarchies().len(), 6);
        assert!(!layout.real);
    }

    #[test]
    fn unified() {
        let dir = fixtures::v2();
        let layout = CgroupLayout::detect(&dir.path().join("cg"), &dir.path().join("proc")).unwrap();
        assert_eq!(layout.version, CgroupVersion::V2);
        assert_eq!(layout.offered, ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"]);
        assert_eq!(
            layout.controllers().into_iter().collect::<Vec<_>>(),
            ["cpu", "cpuset", "hugetlb", "memory", "pids"]
        );
    }

    #[test]
    fn nothing_mounted_is_an_error() {
        let dir = fixtures::v2();
        assert!(CgroupLayout::detect(&dir.path().join("elsewhere"), &dir.path().join("proc")).is_err());
    }
}
