//! Control groups: one interface over v1 (each controller mounted on its own, hybrid too) and v2, drivers `cgroupfs` and `systemd`.
//!
//! A [`CgroupName`] is the same under every version and driver; how it looks on disk, and who creates it, is decided here.
//! Everything here blocks; destroying waits for killed processes, at most [`DESTROY_WAIT`].

mod figures;
mod host;
mod layout;
mod name;
mod notice;
mod systemd;
mod usage;
mod values;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use figures::{
    Detail, GroupDetail, GroupFigures, GroupPressure, MemoryFigures, Pressure, PressureLine, Throttling,
};
pub use host::HostCgroups;
pub use layout::CgroupLayout;
use model::cgroup::{CgroupName, CgroupResources};
pub use name::{cgroup_path, name_from_path, slice_unit};
pub use notice::MemoryNotice;
pub use systemd::{PropertyValue, SliceUnits, SystemdBus};
pub use usage::CgroupUsage;
pub use values::{shares_from_weight, weight_from_shares};

/// How long [`CgroupManager::destroy`] waits for killed processes to leave.
pub const DESTROY_WAIT: Duration = Duration::from_secs(2);

/// Which interface the kernel offers at the cgroup root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// Separate hierarchies, one or more controllers each.
    V1,
    /// The unified hierarchy.
    V2,
}

/// KubeletConfiguration `cgroupDriver`, overridden by the CRI's RuntimeConfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupDriver {
    /// Directories, made by the agent itself.
    Cgroupfs,
    /// Slices, made by systemd.
    Systemd,
}

/// Why a cgroup could not be made, changed or removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The name cannot be a cgroup's (empty part, slash, dot parts).
    #[error("invalid cgroup name {0:?}")]
    BadName(Vec<String>),
    /// The kernel refuses the write for want of rights (EPERM, EACCES, EROFS), as in user namespaces: the caller may warn and go on.
    #[error("write {value:?} to {}: refused", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What was written.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A write failed otherwise: the value is out of range, or below the usage (EBUSY).
    #[error("write {value:?} to {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What was written.
        value: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A controller that the resources need is not enabled there.
    #[error("cgroup {cgroup:?} has some missing controllers: {}", missing.join(", "))]
    MissingControllers {
        /// The cgroup's path below the root.
        cgroup: String,
        /// What is missing.
        missing: Vec<String>,
    },
    /// Processes outlived SIGKILL for [`DESTROY_WAIT`] (in uninterruptible sleep, or started faster than they were killed).
    #[error("cgroup {cgroup:?} still has processes {pids:?}")]
    StillBusy {
        /// The cgroup's path below the root.
        cgroup: String,
        /// The processes.
        pids: Vec<u32>,
    },
    /// systemd did not do it.
    #[error("{what}")]
    Systemd {
        /// What it was asked.
        what: String,
        /// Its answer, or why none came.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Any other operation.
    #[error(transparent)]
    Io(#[from] crate::Failed),
}

impl CgroupError {
    /// True when the kernel refused for want of rights: the caller may warn and go on.
    pub fn is_refused(&self) -> bool {
        match self {
            Self::Refused { .. } => true,
            Self::Io(failed) => failed.is_refused(),
            _ => false,
        }
    }
}

/// The result of a cgroup operation.
pub type CgroupResult<T> = Result<T, CgroupError>;

/// The node's control groups. Every method blocks on pseudo files; with the systemd driver create, update and destroy also wait for systemd.
pub trait CgroupManager: Send + Sync {
    /// What the kernel offers.
    fn version(&self) -> CgroupVersion;

    /// Who creates groups.
    fn driver(&self) -> CgroupDriver;

    /// The controllers that the host has, of those that the kubelet uses: cpu, cpuacct (v1), cpuset, memory, pids, hugetlb.
    fn controllers(&self) -> &BTreeSet<String>;

    /// The group's path below the cgroup root, as the CRI wants it for `cgroup_parent`: `/kubepods/burstable/pod<uid>`, or under
    /// systemd `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`.
    fn cri_cgroup_parent(&self, name: &CgroupName) -> String;

    /// True when the group is there in full: on v1 in every hierarchy of the kubelet's controllers, on v2 with all of them enabled.
    fn exists(&self, name: &CgroupName) -> bool;

    /// Makes the group and those above it, then writes the resources. Present ones are kept. Resources of controllers that the host
    /// lacks are left out, as the Go kubelet does.
    ///
    /// # Errors
    /// The first failure; the writes after it are still tried.
    fn create(&self, name: &CgroupName, resources: &CgroupResources) -> CgroupResult<()>;

    /// Writes the resources of a group that is there.
    ///
    /// # Errors
    /// The first failure; the writes after it are still tried.
    fn update(&self, name: &CgroupName, resources: &CgroupResources) -> CgroupResult<()>;

    /// Kills every process in the group and below, then removes it from every hierarchy. A group that is not there counts as removed.
    ///
    /// # Errors
    /// [`CgroupError::StillBusy`] when processes do not die in time.
    fn destroy(&self, name: &CgroupName) -> CgroupResult<()>;

    /// Every process in the group and below, in any hierarchy, ascending; none when the group is not there.
    ///
    /// # Errors
    /// A list cannot be read.
    fn pids(&self, name: &CgroupName) -> CgroupResult<Vec<u32>>;

    /// The groups directly below this one, in any hierarchy; none when it is not there. Under systemd only slices count.
    ///
    /// # Errors
    /// A directory cannot be read.
    fn list_children(&self, name: &CgroupName) -> CgroupResult<Vec<CgroupName>>;

    /// CPU, memory and process figures of a group.
    ///
    /// # Errors
    /// The group is not there, or a file cannot be read.
    fn usage(&self, name: &CgroupName) -> CgroupResult<CgroupUsage>;

    /// The CPU and memory settings that are in force.
    ///
    /// # Errors
    /// The group is not there, or a file cannot be read.
    fn limits(&self, name: &CgroupName) -> CgroupResult<CgroupResources>;
}
