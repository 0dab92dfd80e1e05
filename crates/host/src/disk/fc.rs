//! Fibre Channel: disks by the names that udev links them under, and the rescan of the SCSI bus.

use std::path::PathBuf;

use super::{Tools, names, write};
use crate::error::{Failed, Result};

/// How a disk is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// World wide names of targets, and the logical unit on them.
    Targets(Vec<String>, i32),
    /// World wide identifiers of the disk.
    Disk(Vec<String>),
}

impl Tools {
    /// The disk's device: the multipath device over it where there is one. The bus is scanned once when it is not there.
    ///
    /// # Errors
    /// There is no such disk.
    pub fn attach_fc(&self, known_by: &Names) -> Result<PathBuf> {
        let over = |disk: &PathBuf| self.multipath(disk);
        if let Some(found) = self.fc_disks(known_by).iter().find_map(over) {
            return Ok(found);
        }
        let hosts = self.sys.join("class/scsi_host");
        for host in names(&hosts) {
            write(&hosts.join(host).join("scan"), "- - -")?;
        }
        let disks = self.fc_disks(known_by);
        let found = disks.iter().find_map(over).or_else(|| disks.last()?.canonicalize().ok());
        found.ok_or_else(|| Failed::other("find the disk", "no fc disk found"))
    }

    /// The links to its disks.
    fn fc_disks(&self, known_by: &Names) -> Vec<PathBuf> {
        let find = |dir: &str, is: &dyn Fn(&str) -> bool| -> Vec<PathBuf> {
            let dir = self.dev.join(dir);
            names(&dir).into_iter().filter(|n| is(n)).map(|n| dir.join(n)).collect()
        };
        match known_by {
            Names::Targets(wwns, lun) => find("disk/by-path", &|name| {
                let rest = name.strip_prefix("fc-").or_else(|| {
                    let (adapter, rest) = name.split_once("-fc-")?;
                    adapter.starts_with("pci-").then_some(rest)
                });
                wwns.iter().any(|wwn| rest == Some(format!("0x{wwn}-lun-{lun}").as_str()))
            }),
            Names::Disk(wwids) => {
                find("disk/by-id", &|name| name.strip_prefix("scsi-").is_some_and(|id| wwids.iter().any(|w| w == id)))
            }
        }
    }

    /// Takes the disk off the node. One that is not there is done.
    ///
    /// # Errors
    /// A multipath device over it is in use.
    pub fn detach_fc(&self, known_by: &Names) -> Result<()> {
        let disks = self.fc_disks(known_by);
        let all: std::collections::BTreeSet<PathBuf> =
            disks.into_iter().map(|d| self.multipath(&d).unwrap_or_else(|| d.canonicalize().unwrap_or(d))).collect();
        all.iter().try_for_each(|device| self.detach(device))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{log, tools};
    use super::*;

    #[test]
    fn disks_are_found_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let tools = tools(d, &[("blockdev", ""), ("multipath", "")]);
        let link = |disk: &str, name: &str| {
            std::fs::write(d.join("dev").join(disk), "").unwrap();
            std::os::unix::fs::symlink(format!("../../{disk}"), d.join("dev/disk").join(name)).unwrap();
            std::fs::create_dir_all(d.join("sys/block").join(disk).join("device")).unwrap();
            std::fs::write(d.join("sys/block").join(disk).join("device/delete"), "").unwrap();
        };
        std::fs::create_dir_all(d.join("sys/class/scsi_host/host0")).unwrap();
        let targets = Names::Targets(vec!["5006".into()], 1);
        assert!(tools.attach_fc(&targets).unwrap_err().full().contains("no fc disk found"));
        assert_eq!(std::fs::read_to_string(d.join("sys/class/scsi_host/host0/scan")).unwrap(), "- - -");
        link("sda", "by-path/pci-0000:00:01.0-fc-0x5006-lun-1");
        link("sdb", "by-path/pci-0000:00:01.0-fc-0x5006-lun-10");
        link("sdc", "by-path/fc-0x5007-lun-1");
        link("sdd", "by-id/scsi-36005");
        let at = |disk: &str| d.join("dev").join(disk).canonicalize().unwrap();
        for (known_by, disk) in [
            (targets.clone(), "sda"),
            (Names::Targets(vec!["5007".into()], 1), "sdc"),
            (Names::Disk(vec!["x".into(), "36005".into()]), "sdd"),
        ] {
            assert_eq!(tools.attach_fc(&known_by).unwrap(), at(disk), "{known_by:?}");
        }
        tools.detach_fc(&targets).unwrap();
        assert_eq!(log(d), [format!("blockdev --flushbufs {}", d.join("dev/sda").display())]);
        let deleted =
            |disk: &str| std::fs::read_to_string(d.join("sys/block").join(disk).join("device/delete")).unwrap();
        assert_eq!((deleted("sda").as_str(), deleted("sdb").as_str()), ("1", ""), "another unit's disk stays");
        // With a multipath device over both paths.
        link("sde", "by-path/fc-0x5006-lun-1");
        for slave in ["sda", "sde"] {
            std::fs::create_dir_all(d.join("sys/block/dm-0/slaves").join(slave)).unwrap();
        }
        std::fs::write(d.join("dev/dm-0"), "").unwrap();
        assert_eq!(tools.attach_fc(&targets).unwrap(), d.join("dev/dm-0"));
        tools.detach_fc(&targets).unwrap();
        assert_eq!(log(d)[0], format!("multipath -f {}", at("dm-0").display()));
        assert_eq!(deleted("sde"), "1");
        let gone = Names::Disk(vec!["nowhere".into()]);
        assert!(tools.detach_fc(&gone).is_ok());
    }
}
