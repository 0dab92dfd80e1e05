//! The Linux host as rubelet uses it: control groups, mounts, safe paths, files, container logs, the kernel's log, /proc, inotify, systemd.
//!
//! Everything here blocks unless it is `async`: call it from a blocking thread. Nothing reads the environment or
//! assumes where `/proc` or `/sys/fs/cgroup` stand; roots are parameters, so that fixture trees can stand in for them.

pub mod cgroup;
pub mod error;
pub mod fsx;
pub mod kmsg;
pub mod logind;
pub mod logs;
pub mod memory;
pub mod mount;
pub mod mount_tool;
pub mod proc;
mod ready;
pub mod safe_path;
pub mod subpath;
pub mod sysd;
pub mod watch;

pub use error::{Attempt, Failed, Result};

#[cfg(test)]
mod testing;
