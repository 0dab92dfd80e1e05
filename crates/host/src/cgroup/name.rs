//! Names to paths and back, for both drivers.
//!
//! systemd.slice(5): a slice's name is its path, the parts joined by `-`; so a `-` within a part becomes `_`, and every prefix is a
//! slice of its own.

use model::cgroup::CgroupName;

use super::{CgroupDriver, CgroupError, CgroupResult};

const SLICE: &str = ".slice";

fn escape(part: &str) -> String {
    part.replace('-', "_")
}

/// The unit of the slice that stands for this name (`kubepods-burstable.slice`; the root is `-.slice`), and its parent's.
pub fn slice_unit(name: &CgroupName) -> String {
    match name.0.as_slice() {
        [] => format!("-{SLICE}"),
        parts => parts.iter().map(|p| escape(p)).collect::<Vec<_>>().join("-") + SLICE,
    }
}

/// The group's path below the cgroup root, beginning with `/`.
pub fn cgroup_path(driver: CgroupDriver, name: &CgroupName) -> String {
    let parts: Vec<_> = match driver {
        CgroupDriver::Cgroupfs => name.0.clone(),
        CgroupDriver::Systemd => (1..=name.0.len()).map(|n| slice_unit(&CgroupName(name.0[..n].to_vec()))).collect(),
    };
    format!("/{}", parts.join("/"))
}

/// The name of a group by its path, as configuration and the kernel spell it. Under systemd only the last part counts, and `_` reads
/// as `-`.
pub fn name_from_path(driver: CgroupDriver, path: &str) -> CgroupName {
    let mut parts = path.split('/').filter(|p| !p.is_empty());
    match driver {
        CgroupDriver::Cgroupfs => CgroupName(parts.map(str::to_owned).collect()),
        CgroupDriver::Systemd => {
            let unit = parts.next_back().unwrap_or_default();
            let base = unit.strip_suffix(SLICE).unwrap_or(unit);
            CgroupName(base.split('-').filter(|p| !p.is_empty()).map(|p| p.replace('_', "-")).collect())
        }
    }
}

/// The child that a directory below this group stands for; None when it is none of ours (a scope, a service, another's slice).
pub(super) fn child_from_dir(driver: CgroupDriver, parent: &CgroupName, dir: &str) -> Option<CgroupName> {
    match driver {
        CgroupDriver::Cgroupfs => Some(parent.child(dir)),
        CgroupDriver::Systemd => {
            let unit = slice_unit(parent);
            let prefix = if parent.0.is_empty() { String::new() } else { format!("{}-", unit.strip_suffix(SLICE)?) };
            let part = dir.strip_suffix(SLICE)?.strip_prefix(&prefix)?;
            (!part.is_empty() && !part.contains('-')).then(|| parent.child(part.replace('_', "-")))
        }
    }
}

/// Refuses names that would leave the cgroup root or not be a directory below it.
pub(super) fn check(name: &CgroupName) -> CgroupResult<()> {
    let good = |p: &String| !p.is_empty() && p != "." && p != ".." && !p.contains(['/', '\0', '\n']);
    match name.0.iter().all(good) {
        true => Ok(()),
        false => Err(CgroupError::BadName(name.0.clone())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(parts: &[&str]) -> CgroupName {
        CgroupName(parts.iter().map(|p| (*p).to_owned()).collect())
    }

    #[test]
    fn paths() {
        use CgroupDriver::{Cgroupfs, Systemd};
        let pod = name(&["kubepods", "burstable", "pod0d9f1c2e-aaaa-bbbb-cccc-111122223333"]);
        assert_eq!(cgroup_path(Cgroupfs, &pod), "/kubepods/burstable/pod0d9f1c2e-aaaa-bbbb-cccc-111122223333");
        assert_eq!(
            cgroup_path(Systemd, &pod),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0d9f1c2e_aaaa_bbbb_cccc_111122223333.slice"
        );
        assert_eq!(
            cgroup_path(Systemd, &name(&["my-root", "sub", "kubepods"])),
            "/my_root.slice/my_root-sub.slice/my_root-sub-kubepods.slice"
        );
        for driver in [Cgroupfs, Systemd] {
            assert_eq!(cgroup_path(driver, &CgroupName::default()), "/");
            assert_eq!(name_from_path(driver, "/"), CgroupName::default());
        }
        assert_eq!(slice_unit(&CgroupName::default()), "-.slice");
        assert_eq!(name_from_path(Systemd, "/system.slice"), name(&["system"]));
    }

    #[test]
    fn children_are_told_from_strangers() {
        use CgroupDriver::{Cgroupfs, Systemd};
        let kubepods = name(&["kubepods"]);
        let child = |driver, dir| child_from_dir(driver, &kubepods, dir);
        assert_eq!(child(Systemd, "kubepods-burstable.slice"), Some(name(&["kubepods", "burstable"])));
        assert_eq!(child(Systemd, "kubepods-poda_b.slice"), Some(name(&["kubepods", "poda-b"])));
        assert_eq!(child(Systemd, "cri-containerd-0123.scope"), None);
        assert_eq!(child(Systemd, "kubepods.slice"), None);
        assert_eq!(child(Systemd, "kubepods-a-b.slice"), None);
        assert_eq!(child(Cgroupfs, "poda-b"), Some(name(&["kubepods", "poda-b"])));
        assert_eq!(child_from_dir(Systemd, &CgroupName::default(), "kubepods.slice"), Some(kubepods));
    }

    #[test]
    fn names_stay_below_the_root() {
        for bad in [&["a", ".."][..], &["a/b"], &[""], &["."]] {
            assert!(check(&name(bad)).is_err(), "{bad:?}");
        }
        assert!(check(&name(&["kubepods", "pod-1"])).is_ok());
    }

    proptest! {
        #[test]
        fn a_path_leads_back_to_its_name(parts in prop::collection::vec("[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", 1..5)) {
            let name = CgroupName(parts);
            for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
                let path = cgroup_path(driver, &name);
                prop_assert_eq!(&name_from_path(driver, &path), &name);
                let (parent, dir) = path.rsplit_once('/').unwrap();
                let parent = name_from_path(driver, parent);
                prop_assert_eq!(child_from_dir(driver, &parent, dir), Some(name.clone()));
            }
        }
    }
}
