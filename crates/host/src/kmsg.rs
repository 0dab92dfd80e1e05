//! The kernel's log, for what the OOM killer did to the node as a whole.
//!
//! `/dev/kmsg` gives one record a read: `PRIORITY,SEQUENCE,TIME,FLAGS[,…];TEXT`, with continuation lines that begin with a blank
//! (admin-guide and ABI/testing/dev-kmsg of the kernel's documentation).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{Attempt, Result};
use crate::ready;

/// Larger than any record.
const RECORD: usize = 16 << 10;

/// A process that the kernel killed because the node had no memory left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemOom {
    /// Its number; None: the kernel did not say.
    pub pid: Option<u32>,
    /// Its name.
    pub process: String,
}

/// Puts the kernel's lines about one kill together.
#[derive(Debug, Default)]
pub struct OomReader {
    /// A kill is being told of: whether a group's own limit was the reason.
    group: Option<bool>,
}

impl OomReader {
    /// Takes one line; what it completes, if the node as a whole was out of memory and not a group.
    pub fn line(&mut self, text: &str) -> Option<SystemOom> {
        if text.contains(" invoked oom-killer:") {
            self.group = Some(false);
            return None;
        }
        let group = self.group.as_mut()?;
        // Since 4.19 one line says all of it; before, a sentence named the group and its limit.
        if let Some(facts) = text.strip_prefix("oom-kill:") {
            // Of the node as a whole: `global_oom`, and no group whose limit it was.
            let limited = facts.split(',').find_map(|f| f.strip_prefix("oom_memcg="));
            *group = limited.is_some_and(|path| path != "/");
            return None;
        }
        if let Some((_, limited)) = text.split_once(" killed as a result of limit of ") {
            *group = limited != "/";
            return None;
        }
        let (_, killed) = text.split_once("Killed process ")?;
        let group = self.group.take() == Some(true) || text.starts_with("Memory cgroup out of memory");
        let (pid, rest) = killed.split_once(' ')?;
        let name = rest.split_once('(').and_then(|(_, name)| name.rsplit_once(')')).map_or("", |(name, _)| name);
        (!group).then(|| SystemOom { pid: pid.trim_end_matches(',').parse().ok(), process: name.to_owned() })
    }
}

/// The kernel's log from now on.
pub struct KernelLog {
    file: AsyncFd<OwnedFd>,
    buffer: Vec<u8>,
}

impl KernelLog {
    /// Opens it (`/dev/kmsg`) behind what was logged so far. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// There is none, or this process may not read it.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let file = File::options().read(true).custom_flags(flags).open(path).on("open", path)?;
        rustix::fs::seek(&file, SeekFrom::End(0)).on("seek in", path)?;
        let file = ready::register(OwnedFd::from(file), Interest::READABLE).on("wait for", path)?;
        Ok(Self { file, buffer: vec![0; RECORD] })
    }

    /// The text of the next record; records that were overwritten before they were read are left out. Cancel safe.
    ///
    /// # Errors
    /// The log cannot be read.
    pub async fn next(&mut self) -> Result<String> {
        let what = || "read the kernel's log".to_owned();
        loop {
            let mut ready = self.file.readable().await.attempt(what)?;
            match rustix::io::read(self.file.get_ref(), &mut self.buffer[..]) {
                Ok(n) => return Ok(text(&self.buffer[..n])),
                Err(Errno::AGAIN) => ready.clear_ready(),
                // Overwritten: the next read goes on with the oldest that is left.
                Err(Errno::PIPE | Errno::INTR) => {}
                Err(e) => return Err(e).attempt(what),
            }
        }
    }
}

/// The text of a record, without its head and its continuation lines.
fn text(record: &[u8]) -> String {
    let record = String::from_utf8_lossy(record);
    let text = record.split_once(';').map_or(&*record, |(_, text)| text);
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> Vec<String> {
        let mut reader = OomReader::default();
        let found = lines.iter().filter_map(|line| reader.line(line));
        found.map(|oom| format!("{:?} {}", oom.pid, oom.process)).collect()
    }

    #[test]
    fn only_the_node_as_a_whole_counts() {
        let start =
            "stress invoked oom-killer: gfp_mask=0x100dca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), order=0, oom_score_adj=0";
        let global = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/kubepods/besteffort/podx,\
                      task=stress,pid=3155,uid=0";
        let group = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/kubepods/podx,task_memcg=/kubepods/podx/c,\
                     task=hog,pid=9,uid=0";
        let killed = "Out of memory: Killed process 3155 (stress) total-vm:8192kB, anon-rss:4096kB, file-rss:0kB, shmem-rss:0kB, UID:0";
        let killed_in_group = "Memory cgroup out of memory: Killed process 9 (hog) total-vm:8192kB, anon-rss:4096kB";
        assert_eq!(read(&[start, "CPU: 0 PID: 7", global, killed]), ["Some(3155) stress"]);
        assert_eq!(read(&[start, group, killed_in_group]), Vec::<String>::new());
        assert_eq!(read(&[start, group, killed_in_group, start, global, killed]), ["Some(3155) stress"]);
        // Of older kernels.
        let sentence = "Task in /kubepods/podx/c killed as a result of limit of /kubepods/podx";
        assert_eq!(read(&[start, sentence, "Killed process 9 (hog) total-vm:8192kB"]), Vec::<String>::new());
        assert_eq!(
            read(&[start, "Killed process 19667 (evil (program)) total-vm:1kB"]),
            ["Some(19667) evil (program)"]
        );
        // Without the beginning it may be anything.
        assert_eq!(read(&[killed]), Vec::<String>::new());
    }

    #[test]
    fn records() {
        assert_eq!(text(b"4,880,1234567,-;out of luck; really\n SUBSYSTEM=x\n"), "out of luck; really");
        assert_eq!(text(b"no head"), "no head");
    }

    #[tokio::test]
    async fn what_is_logged_from_now_on_is_read() {
        let path = Path::new("/dev/kmsg");
        let (Ok(mut log), Ok(mut writer)) = (KernelLog::open(path), File::options().write(true).open(path)) else {
            return;
        };
        let mark = format!("rubelet test {}", std::process::id());
        if std::io::Write::write_all(&mut writer, mark.as_bytes()).is_err() {
            return;
        }
        let found = async {
            loop {
                if log.next().await.unwrap().contains(&mark) {
                    return;
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(30), found).await.unwrap();
    }
}
