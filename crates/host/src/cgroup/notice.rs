//! The kernel's word that the memory of a group runs out, instead of looking again and again.
//!
//! On v1 the memory controller tells when a group's usage crosses a value (cgroup-v1/memory.rst, "Notification API"). v2 has no such thing: there it is
//! told when tasks of the group have to wait for memory (PSI, accounting/psi.rst).

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::CgroupVersion;
use super::layout::{CgroupLayout, below};
use crate::error::{Attempt, Failed, Result};
use crate::ready;

/// Some task waited for memory 150 ms within 2 s; unprivileged windows are multiples of 2 s.
const STALL: &[u8] = b"some 150000 2000000\0";

/// Wakes when a group's memory may be running out. Says where to look, never what is true.
#[derive(Debug)]
pub struct MemoryNotice {
    fd: AsyncFd<OwnedFd>,
    /// A pressure file is ready by priority, an eventfd by being readable.
    stall: bool,
}

impl MemoryNotice {
    /// Waits for the next word. Cancel safe.
    ///
    /// # Errors
    /// The kernel gives no more words: the group went, or the file cannot be waited for.
    pub async fn next(&self) -> Result<()> {
        let what = || "wait for the kernel's word about memory".to_owned();
        loop {
            let interest = if self.stall { Interest::PRIORITY } else { Interest::READABLE };
            let mut ready = self.fd.ready(interest).await.attempt(what)?;
            if ready.ready().is_error() {
                return Err(Failed::other(what(), "the group is gone"));
            }
            if self.stall {
                ready.clear_ready();
                return Ok(());
            }
            let mut count = [0; 8];
            match rustix::io::read(self.fd.get_ref(), &mut count) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(e) => return Err(e).attempt(what),
            }
        }
    }
}

impl CgroupLayout {
    /// Asks to be told when the group at this path (`/` for the node) uses more than `usage` bytes, page cache included; on v2 when it waits for
    /// memory. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no such notification, or the group is not there.
    pub fn memory_notice(&self, path: &str, usage: u64, proc: &Path) -> Result<MemoryNotice> {
        match self.version {
            CgroupVersion::V1 => {
                let dir = self.dir("memory", path).ok_or_else(|| {
                    Failed::other(format!("watch the memory of group {path}"), "there is no memory controller")
                })?;
                crossing(&dir, usage)
            }
            CgroupVersion::V2 if path == "/" => stalling(&proc.join("pressure/memory")),
            CgroupVersion::V2 => stalling(&below(&self.root, path).join("memory.pressure")),
        }
    }
}

fn crossing(dir: &Path, usage: u64) -> Result<MemoryNotice> {
    let what = || format!("watch the memory of group {}", dir.display());
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).attempt(what)?;
    let file: PathBuf = dir.join("memory.usage_in_bytes");
    let usage_file = std::fs::File::open(&file).on("open", &file)?;
    let control = dir.join("cgroup.event_control");
    let line = format!("{} {} {usage}", fd.as_raw_fd(), usage_file.as_raw_fd());
    let mut open = OpenOptions::new().write(true).open(&control).on("open", &control)?;
    open.write_all(line.as_bytes()).on("write", &control)?;
    Ok(MemoryNotice { fd: ready::register(fd, Interest::READABLE).attempt(what)?, stall: false })
}

fn stalling(file: &Path) -> Result<MemoryNotice> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let mut open = OpenOptions::new().read(true).write(true).custom_flags(flags).open(file).on("open", file)?;
    open.write_all(STALL).on("write", file)?;
    let fd = ready::register(OwnedFd::from(open), Interest::PRIORITY).on("wait for", file)?;
    Ok(MemoryNotice { fd, stall: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On the real thing where the test may make a group; elsewhere there is nothing to try.
    #[tokio::test]
    async fn a_group_that_grows_is_told_of() {
        let Ok(layout) = CgroupLayout::detect(Path::new("/sys/fs/cgroup"), Path::new("/proc")) else { return };
        let Some(root) = layout.dir("memory", "/").filter(|_| layout.version == CgroupVersion::V1) else { return };
        let name = format!("/rubelet-notice-{}", std::process::id());
        let dir = below(&root, &name);
        if std::fs::create_dir(&dir).is_err() {
            return;
        }
        let notice = layout.memory_notice(&name, 8 << 20, Path::new("/proc"));
        let child = std::process::Command::new("sh")
            .args([
                "-c",
                "echo $$ > \"$0/cgroup.procs\"; dd if=/dev/zero of=/dev/null bs=32M count=1 2> /dev/null",
                dir.to_str().unwrap(),
            ])
            .spawn();
        let told = match &notice {
            Ok(notice) => Some(tokio::time::timeout(std::time::Duration::from_secs(60), notice.next()).await),
            Err(_) => None,
        };
        let _ = child.unwrap().wait();
        std::fs::remove_dir(&dir).unwrap();
        assert!(matches!(told, Some(Ok(Ok(())))), "{notice:?} {told:?}");
    }
}
