//! Disks: what is on one, mounting it, and those that the host's own tools attach (iscsiadm(8), the SCSI bus in sysfs). Everything here blocks;
//! each program has a deadline.

pub mod fc;
pub mod iscsi;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::warn;

use crate::error::{Attempt, Failed, Result};
use crate::mount_tool::{self, Ended};

/// How long a program may take; making or checking a file system takes its time.
pub const LIMIT: Duration = Duration::from_secs(120);
const LONG: Duration = Duration::from_secs(1800);

/// Where things are: the host's own, or a tree that stands in for it.
#[derive(Clone, Debug)]
pub struct Tools {
    /// sysfs.
    pub sys: PathBuf,
    /// The directory of devices.
    pub dev: PathBuf,
    /// Where programs are; None: where the environment says.
    pub bin: Option<PathBuf>,
    /// How long a device may take to appear.
    pub patience: Duration,
}

impl Tools {
    /// Those of the host.
    pub fn host() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), bin: None, patience: Duration::from_secs(30) }
    }

    /// Runs a program to its end.
    fn run(&self, program: &str, arguments: &[&str], limit: Duration) -> Result<Ended> {
        let program = self.bin.as_ref().map_or_else(|| PathBuf::from(program), |bin| bin.join(program));
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        mount_tool::run(&program.display().to_string(), &arguments, limit)
    }

    /// The multipath device over a disk, as a path; None: there is none.
    fn multipath(&self, device: &Path) -> Option<PathBuf> {
        let device = device.canonicalize().ok()?;
        let name = device.file_name()?.to_str()?.to_owned();
        if name.starts_with("dm-") {
            return Some(device);
        }
        let all = names(&self.sys.join("block"));
        let over =
            |dm: &&String| dm.starts_with("dm-") && self.sys.join("block").join(dm).join("slaves").join(&name).exists();
        all.iter().find(over).map(|dm| self.dev.join(dm))
    }

    /// Takes a disk of the SCSI bus off the node, with the multipath device over it.
    ///
    /// # Errors
    /// The multipath device is in use.
    fn detach(&self, device: &Path) -> Result<()> {
        let Ok(device) = device.canonicalize() else { return Ok(()) };
        let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let disks = if name.starts_with("dm-") {
            let slaves = names(&self.sys.join("block").join(&name).join("slaves"));
            self.run("multipath", &["-f", &device.display().to_string()], LIMIT)?
                .done(&format!("flush the multipath device {}", device.display()))?;
            slaves
        } else {
            vec![name]
        };
        for disk in disks {
            let path = self.dev.join(&disk).display().to_string();
            match self.run("blockdev", &["--flushbufs", &path], LIMIT).and_then(|e| e.done(&format!("flush {path}"))) {
                Ok(_) => {}
                Err(e) => warn!(err = e.full(), "A device cannot be flushed before it goes"),
            }
            write(&self.sys.join("block").join(&disk).join("device/delete"), "1")?;
        }
        Ok(())
    }

    /// Mounts a disk, and makes a file system on it when there is nothing on it at all.
    ///
    /// # Errors
    /// The programs', or that it would have to be made on a disk that is mounted read-only.
    pub fn format_and_mount(&self, device: &Path, target: &Path, fs_type: &str, options: &[String]) -> Result<()> {
        let fs_type = if fs_type.is_empty() { "ext4" } else { fs_type };
        let read_only = options.iter().any(|o| o == "ro");
        let disk = device.display().to_string();
        let there = self.content(&disk)?;
        match (&there, read_only) {
            (None, true) => {
                return Err(Failed::other(
                    format!("cannot mount unformatted disk {disk} as we are manipulating it in read-only mode"),
                    "there is no file system on it",
                ));
            }
            (None, false) => {
                let force: &[&str] = match fs_type {
                    "ext3" | "ext4" => &["-F", "-m0"],
                    "xfs" => &["-f"],
                    _ => &[],
                };
                let arguments: Vec<&str> = force.iter().copied().chain([disk.as_str()]).collect();
                self.run(&format!("mkfs.{fs_type}"), &arguments, LONG)?
                    .done(&format!("format of disk {disk:?} failed"))?;
            }
            (Some(there), _) => {
                if there != fs_type {
                    warn!(disk, wanted = fs_type, there, "A disk has another file system than is asked for");
                }
                if !read_only {
                    self.check(&disk)?;
                }
            }
        }
        let all: Vec<String> = options.iter().cloned().chain(["defaults".to_owned()]).collect();
        mount_tool::mount(fs_type, &disk, target, &all, LIMIT)
    }

    /// What is on a disk: its file system, or that it has partitions; None: nothing.
    fn content(&self, disk: &str) -> Result<Option<String>> {
        let what = format!("failed to get disk format of disk {disk}");
        let ended = self.run("blkid", &["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", disk], LIMIT)?;
        if ended.code() == Some(2) {
            return Ok(None);
        }
        let output = ended.done(&what)?;
        let value = |key: &str| {
            output.lines().filter_map(|l| l.split_once('=')).find(|(k, _)| *k == key).map(|(_, v)| v.to_owned())
        };
        if value("PTTYPE").is_some() {
            return Ok(Some("unknown data, probably partitions".to_owned()));
        }
        Ok(value("TYPE"))
    }

    /// Repairs what can be repaired without asking.
    fn check(&self, disk: &str) -> Result<()> {
        match self.run("fsck", &["-a", disk], LONG) {
            // 1: corrected. 8 and above: it could not run.
            Ok(ended) if ended.code() == Some(4) => {
                let what = format!("'fsck' found errors on device {disk} but could not correct them");
                Err(Failed::other(what, ended.output))
            }
            Ok(ended) if ended.code().is_none_or(|c| c > 1) => {
                warn!(disk, output = ended.output, "fsck cannot check a disk");
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(e) => {
                warn!(disk, err = e.full(), "fsck cannot be run");
                Ok(())
            }
        }
    }
}

/// Names in a directory; none when it is not there.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

/// Writes to a file of sysfs that is there; one that is not has nothing to do.
fn write(file: &Path, text: &str) -> Result<()> {
    match std::fs::write(file, text) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done.on("write", file),
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use super::Tools;

    /// A tree in place of the host, with a program for each name that notes its arguments and does what its script says.
    pub(crate) fn tools(root: &Path, programs: &[(&str, &str)]) -> Tools {
        let bin = root.join("bin");
        for dir in ["sys/block", "sys/class", "dev/disk/by-path", "dev/disk/by-id", "bin"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        for (name, script) in programs {
            let text = format!("#!/bin/sh\ncd {}\necho {name} \"$@\" >> log\n{script}\n", root.display());
            std::fs::write(bin.join(name), text).unwrap();
            std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Tools { sys: root.join("sys"), dev: root.join("dev"), bin: Some(bin), patience: Duration::from_millis(200) }
    }

    pub(crate) fn log(root: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(root.join("log")).unwrap_or_default();
        std::fs::remove_file(root.join("log")).ok();
        text.lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{log, tools};

    #[test]
    fn only_an_empty_disk_is_formatted() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let blkid = "test -e content && cat content || exit 2";
        let fine =
            [("blkid", blkid), ("mkfs.ext4", ""), ("mkfs.xfs", ""), ("fsck", "exit $(cat fsck 2>/dev/null || echo 0)")];
        let tools = tools(d, &fine);
        let target = d.join("target");
        std::fs::create_dir(&target).unwrap();
        // The mount itself fails: there is no such device.
        let tried = |fs: &str, options: &[&str]| {
            let options: Vec<String> = options.iter().map(ToString::to_string).collect();
            let e = tools.format_and_mount(&d.join("dev/none"), &target, fs, &options).unwrap_err();
            (e.full(), log(d).iter().map(|l| l.replace(&d.display().to_string(), "")).collect::<Vec<_>>())
        };
        let blkid = "blkid -p -s TYPE -s PTTYPE -o export /dev/none".to_owned();
        let (e, ran) = tried("", &[]);
        assert!(e.contains("mount failed"), "{e}");
        assert_eq!(ran, [blkid.clone(), "mkfs.ext4 -F -m0 /dev/none".to_owned()]);
        let (_, ran) = tried("xfs", &["noatime"]);
        assert_eq!(ran[1], "mkfs.xfs -f /dev/none");
        let (e, ran) = tried("ext4", &["ro"]);
        assert!(e.contains("cannot mount unformatted disk") && ran.len() == 1, "{e} {ran:?}");
        for content in ["TYPE=ext4\n", "TYPE=xfs\n", "PTTYPE=gpt\n"] {
            std::fs::write(d.join("content"), content).unwrap();
            let (_, ran) = tried("ext4", &[]);
            assert_eq!(ran, [blkid.clone(), "fsck -a /dev/none".to_owned()], "{content}");
        }
        let (_, ran) = tried("ext4", &["ro"]);
        assert_eq!(ran.len(), 1, "what is mounted read-only is not repaired");
        std::fs::write(d.join("fsck"), "4").unwrap();
        let (e, _) = tried("ext4", &[]);
        assert!(e.contains("'fsck' found errors on device") && !e.contains("mount failed"), "{e}");
    }
}
