//! [`CgroupManager`] on the host's cgroup filesystems.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use model::cgroup::{CgroupName, CgroupResources};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::layout::{below, enabled_v2};
use super::values::{self, Write};
use super::{
    CgroupDriver, CgroupError, CgroupLayout, CgroupManager, CgroupResult, CgroupUsage, CgroupVersion, DESTROY_WAIT,
    SliceUnits, SystemdBus, cgroup_path, name, slice_unit, usage,
};
use crate::error::{Attempt, Failed, found};

/// The host's control groups.
pub struct HostCgroups {
    layout: CgroupLayout,
    controllers: BTreeSet<String>,
    /// Present under the systemd driver.
    slices: Option<Arc<dyn SliceUnits>>,
    proc: PathBuf,
    /// Files of controllers that this host lacks and that were named in the log; once is enough.
    named: Mutex<BTreeSet<String>>,
}

impl HostCgroups {
    /// With the `cgroupfs` driver. `proc` is where procfs stands, for the figures of the root group.
    pub fn cgroupfs(layout: CgroupLayout, proc: &Path) -> Self {
        let controllers = layout.controllers();
        Self { layout, controllers, slices: None, proc: proc.to_owned(), named: Mutex::default() }
    }

    /// With the `systemd` driver: `slices` creates the groups, the files that systemd does not know are written here.
    pub fn systemd(layout: CgroupLayout, proc: &Path, slices: Arc<dyn SliceUnits>) -> Self {
        Self { slices: Some(slices), ..Self::cgroupfs(layout, proc) }
    }

    /// The cgroups at `root` (`/sys/fs/cgroup`), by this driver; under `systemd` on the standard system bus. Blocks.
    ///
    /// # Errors
    /// No cgroup filesystem is there.
    pub fn open(root: &Path, proc: &Path, driver: CgroupDriver) -> CgroupResult<Self> {
        let layout = CgroupLayout::detect(root, proc)?;
        Ok(match driver {
            CgroupDriver::Cgroupfs => Self::cgroupfs(layout, proc),
            CgroupDriver::Systemd => Self::systemd(layout, proc, Arc::new(SystemdBus::default())),
        })
    }

    /// Where the hierarchies are.
    pub fn layout(&self) -> &CgroupLayout {
        &self.layout
    }

    /// As [`CgroupManager::usage`], for any group by its path below the root, as a container's.
    ///
    /// # Errors
    /// The group is not there, or a file cannot be read.
    pub fn usage_at(&self, path: &str) -> CgroupResult<CgroupUsage> {
        Ok(usage::read(&self.layout, path, &self.proc)?)
    }

    /// Moves a process into the group at this path below the root, in every hierarchy, whatever the driver; a group that is not there is made. One that is in it
    /// already stays.
    ///
    /// # Errors
    /// The group cannot be made, or the kernel refuses the move.
    pub fn adopt(&self, path: &str, pid: u32) -> CgroupResult<()> {
        let name = name::name_from_path(CgroupDriver::Cgroupfs, path);
        name::check(&name)?;
        let path = format!("/{}", name.0.join("/"));
        self.make_dirs(&path)?;
        for dir in self.dirs(&path) {
            if !processes(&dir)?.contains(&pid) {
                self.put_checked(&dir.join("cgroup.procs"), &pid.to_string())?;
            }
        }
        Ok(())
    }

    /// The processes that are right in the root group of any hierarchy, ascending; kernel threads are among them.
    ///
    /// # Errors
    /// A list cannot be read.
    pub fn at_root(&self) -> CgroupResult<Vec<u32>> {
        let mut pids = BTreeSet::new();
        for dir in self.dirs("/") {
            pids.extend(processes(&dir)?);
        }
        pids.remove(&0);
        Ok(pids.into_iter().collect())
    }

    fn path(&self, name: &CgroupName) -> String {
        cgroup_path(self.driver(), name)
    }

    /// The group's directory in every hierarchy.
    fn dirs(&self, path: &str) -> Vec<PathBuf> {
        self.layout.hierarchies().into_iter().map(|mount| below(mount, path)).collect()
    }

    fn missing(&self, path: &str) -> Vec<String> {
        match self.layout.version {
            CgroupVersion::V1 => {
                let needed = self.layout.needed_v1().into_iter().map(|mount| below(mount, path));
                needed.filter(|d| !d.is_dir()).map(|d| d.display().to_string()).collect()
            }
            CgroupVersion::V2 => {
                let enabled = enabled_v2(&below(&self.layout.root, path));
                self.controllers.difference(&enabled).cloned().collect()
            }
        }
    }

    /// Makes the directories, and what a new group needs before it can hold processes.
    fn make_dirs(&self, path: &str) -> CgroupResult<()> {
        for mount in self.layout.hierarchies() {
            let mut dir = mount.to_owned();
            let cpuset = self.layout.mounts.get("cpuset").is_some_and(|m| m == mount);
            for part in path.split('/').filter(|p| !p.is_empty()) {
                if self.layout.version == CgroupVersion::V2 {
                    self.enable_below(&dir);
                }
                let parent = dir.clone();
                dir.push(part);
                match std::fs::create_dir(&dir) {
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                    other => other.on("create cgroup", &dir)?,
                }
                if cpuset && self.layout.version == CgroupVersion::V1 {
                    self.inherit_cpuset(&parent, &dir)?;
                }
            }
        }
        Ok(())
    }

    /// Enables every controller for the children of this v2 group. What cannot be enabled is met later, as a missing controller.
    fn enable_below(&self, dir: &Path) {
        let file = dir.join("cgroup.subtree_control");
        let now = found(std::fs::read_to_string(&file)).ok().flatten().unwrap_or_default();
        let now: BTreeSet<_> = now.split_whitespace().map(|c| c.trim_start_matches('+')).collect();
        let wanted: Vec<_> =
            self.layout.offered.iter().filter(|c| !now.contains(c.as_str())).map(|c| format!("+{c}")).collect();
        if wanted.is_empty() {
            return;
        }
        // One refused controller refuses the whole line: then one by one.
        if self.put(&file, &wanted.join(" ")).is_err() {
            for controller in &wanted {
                if let Err(error) = self.put(&file, controller) {
                    tracing::debug!(file = %file.display(), controller, %error, "cgroup controller cannot be enabled");
                }
            }
        }
    }

    /// A v1 cpuset without CPUs and memory nodes cannot hold a process: new ones get the parent's.
    fn inherit_cpuset(&self, parent: &Path, dir: &Path) -> CgroupResult<()> {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let text = |dir: &Path| -> CgroupResult<String> {
                let path = dir.join(file);
                Ok(found(std::fs::read_to_string(&path)).on("read", &path)?.unwrap_or_default().trim().to_owned())
            };
            if text(dir)?.is_empty() {
                let inherited = text(parent)?;
                if !inherited.is_empty() {
                    self.put_checked(&dir.join(file), &inherited)?;
                }
            }
        }
        Ok(())
    }

    fn put(&self, path: &Path, value: &str) -> io::Result<()> {
        // On a cgroup filesystem O_CREAT would turn "no such file" into "not permitted"; a fixture has no files of its own.
        let fixture = !self.layout.real;
        let mut file = std::fs::OpenOptions::new().write(true).create(fixture).truncate(fixture).open(path)?;
        file.write_all(value.as_bytes())
    }

    fn put_checked(&self, path: &Path, value: &str) -> CgroupResult<()> {
        self.put(path, value).map_err(|source| {
            let (path, value) = (path.to_owned(), value.to_owned());
            match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    CgroupError::Refused { path, value, source }
                }
                _ => CgroupError::Write { path, value, source },
            }
        })
    }

    fn apply(&self, path: &str, resources: &CgroupResources) -> CgroupResult<()> {
        let writes = match self.layout.version {
            CgroupVersion::V1 => values::v1(resources),
            CgroupVersion::V2 => values::v2(resources),
        };
        let mut first = Ok(());
        let mut again = Vec::new();
        for write in &writes {
            // A value that the kernel finds invalid may depend on one that follows (CFS period and quota): tried once more at the end.
            if let Err(error) = self.write_one(path, write) {
                match &error {
                    CgroupError::Write { source, .. } if source.raw_os_error() == Some(22) => again.push(write),
                    _ => first = first.and(Err(error)),
                }
            }
        }
        for write in again {
            first = first.and(self.write_one(path, write));
        }
        first
    }

    fn write_one(&self, path: &str, write: &Write) -> CgroupResult<()> {
        let dir = match self.layout.version {
            CgroupVersion::V1 => self.layout.dir(&write.controller, path),
            // Files of the unified map may belong to controllers that the kubelet does not use itself, or to none (`cgroup.*`).
            CgroupVersion::V2 => {
                let there = write.controller == "cgroup" || self.layout.offered.contains(&write.controller);
                there.then(|| below(&self.layout.root, path))
            }
        };
        let Some(dir) = dir else {
            if self.named.lock().unwrap_or_else(PoisonError::into_inner).insert(write.file.clone()) {
                tracing::debug!(
                    controller = write.controller,
                    file = write.file,
                    "cgroup controller is not on this host"
                );
            }
            return Ok(());
        };
        match self.put_checked(&dir.join(&write.file), &write.value) {
            Err(CgroupError::Write { source, .. }) if source.kind() == io::ErrorKind::NotFound && dir.is_dir() => {
                match write.optional {
                    true => Ok(()),
                    false => Err(CgroupError::MissingControllers {
                        cgroup: path.to_owned(),
                        missing: vec![write.controller.clone()],
                    }),
                }
            }
            other => other,
        }
    }

    /// Sets systemd's properties first: a limit known to the kernel alone is undone at the next reload.
    fn apply_with_systemd(&self, name: &CgroupName, path: &str, resources: &CgroupResources) -> CgroupResult<()> {
        let Some(slices) = &self.slices else { return self.apply(path, resources) };
        let v2 = self.layout.version == CgroupVersion::V2;
        let (properties, resources) = values::systemd(v2, slices.version()?, resources);
        let told = match properties.is_empty() {
            true => Ok(()),
            false => slices.set_properties(&slice_unit(name), &properties),
        };
        told.and(self.apply(path, &resources))
    }

    fn pids_at(&self, path: &str) -> CgroupResult<Vec<u32>> {
        let mut pids = BTreeSet::new();
        for dir in self.dirs(path) {
            for group in tree(&dir)? {
                pids.extend(processes(&group)?);
            }
        }
        pids.remove(&0);
        Ok(pids.into_iter().collect())
    }

    /// SIGKILL to every process in the group and below, once.
    fn kill(&self, path: &str) -> CgroupResult<()> {
        for dir in self.dirs(path) {
            // Since 5.14 the kernel does it without a race; elsewhere one by one.
            let all = dir.join("cgroup.kill");
            if self.layout.real && all.exists() && self.put(&all, "1").is_ok() {
                continue;
            }
            for group in tree(&dir)? {
                kill_members(&group)?;
            }
        }
        Ok(())
    }

    fn remove_dirs(&self, path: &str) -> CgroupResult<()> {
        for dir in self.dirs(path) {
            if !self.layout.real {
                found(std::fs::remove_dir_all(&dir)).on("remove cgroup", &dir)?;
                continue;
            }
            // Children first. A group stays busy for a moment after its last process has gone.
            let deadline = Instant::now() + DESTROY_WAIT;
            for group in tree(&dir)?.iter().rev() {
                loop {
                    match found(std::fs::remove_dir(group)) {
                        Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        other => {
                            other.on("remove cgroup", group)?;
                            break;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl CgroupManager for HostCgroups {
    fn version(&self) -> CgroupVersion {
        self.layout.version
    }

    fn driver(&self) -> CgroupDriver {
        if self.slices.is_some() { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs }
    }

    fn controllers(&self) -> &BTreeSet<String> {
        &self.controllers
    }

    fn cri_cgroup_parent(&self, name: &CgroupName) -> String {
        self.path(name)
    }

    fn exists(&self, name: &CgroupName) -> bool {
        self.missing(&self.path(name)).is_empty()
    }

    fn create(&self, name: &CgroupName, resources: &CgroupResources) -> CgroupResult<()> {
        name::check(name)?;
        let path = self.path(name);
        if let (Some(slices), [parents @ .., _]) = (&self.slices, name.0.as_slice()) {
            slices.start_slice(&slice_unit(name), &slice_unit(&CgroupName(parents.to_vec())), self.layout.version)?;
        }
        self.make_dirs(&path)?;
        let missing = self.missing(&path);
        if !missing.is_empty() && self.layout.real {
            return Err(CgroupError::MissingControllers { cgroup: path, missing });
        }
        self.apply_with_systemd(name, &path, resources)
    }

    fn update(&self, name: &CgroupName, resources: &CgroupResources) -> CgroupResult<()> {
        name::check(name)?;
        self.apply_with_systemd(name, &self.path(name), resources)
    }

    fn destroy(&self, name: &CgroupName) -> CgroupResult<()> {
        name::check(name)?;
        if name.0.is_empty() {
            return Err(CgroupError::BadName(Vec::new()));
        }
        let path = self.path(name);
        let deadline = Instant::now() + DESTROY_WAIT;
        loop {
            let pids = self.pids_at(&path)?;
            if pids.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                return Err(CgroupError::StillBusy { cgroup: path, pids });
            }
            self.kill(&path)?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let stopped = self.slices.as_ref().map_or(Ok(()), |slices| slices.stop_slice(&slice_unit(name)));
        // Also what systemd left behind: it does not know every hierarchy, nor groups that others made below.
        self.remove_dirs(&path).and(stopped)
    }

    fn pids(&self, name: &CgroupName) -> CgroupResult<Vec<u32>> {
        self.pids_at(&self.path(name))
    }

    fn list_children(&self, name: &CgroupName) -> CgroupResult<Vec<CgroupName>> {
        let mut children = BTreeSet::new();
        for dir in self.dirs(&self.path(name)) {
            for child in subdirs(&dir)? {
                let dir = child.file_name().and_then(|n| n.to_str());
                children.extend(dir.and_then(|d| name::child_from_dir(self.driver(), name, d)));
            }
        }
        Ok(children.into_iter().collect())
    }

    fn usage(&self, name: &CgroupName) -> CgroupResult<CgroupUsage> {
        self.usage_at(&self.path(name))
    }

    fn limits(&self, name: &CgroupName) -> CgroupResult<CgroupResources> {
        Ok(usage::limits(&self.layout, &self.path(name))?)
    }
}

fn subdirs(dir: &Path) -> Result<Vec<PathBuf>, Failed> {
    let gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(19);
    let entries = match std::fs::read_dir(dir) {
        Err(e) if gone(&e) => return Ok(Vec::new()),
        other => other.on("list", dir)?,
    };
    let mut dirs = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) if entry.file_type().is_ok_and(|t| t.is_dir()) => dirs.push(entry.path()),
            Ok(_) => {}
            // ENODEV: the group went while it was read.
            Err(e) if gone(&e) => break,
            Err(e) => return Err(Failed::new(format!("list {}", dir.display()), e)),
        }
    }
    Ok(dirs)
}

/// This group and every one below, parents before children; none when it is not there.
fn tree(dir: &Path) -> Result<Vec<PathBuf>, Failed> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let mut all = vec![dir.to_owned()];
    let mut next = 0;
    while next < all.len() {
        let children = subdirs(&all[next])?;
        all.extend(children);
        next += 1;
    }
    Ok(all)
}

/// The processes directly in this group.
fn processes(dir: &Path) -> Result<Vec<u32>, Failed> {
    let read = |file: &str| std::fs::read_to_string(dir.join(file));
    // EOPNOTSUPP: a threaded group lists threads only.
    let text =
        read("cgroup.procs").or_else(|e| if e.raw_os_error() == Some(95) { read("cgroup.threads") } else { Err(e) });
    match text {
        Ok(text) => Ok(text.lines().filter_map(|l| l.trim().parse().ok()).collect()),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(19) => Ok(Vec::new()),
        Err(e) => Err(Failed::new(format!("read the processes of {}", dir.display()), e)),
    }
}

/// Kills this group's processes. A process id may be given to another process at any time, so each is pinned by a descriptor, and
/// killed only if it is still listed after that.
fn kill_members(dir: &Path) -> Result<(), Failed> {
    let own = std::process::id();
    let pin = |pid: u32| {
        let id = Pid::from_raw(i32::try_from(pid).ok()?)?;
        Some((pid, pidfd_open(id, PidfdFlags::empty()).ok()?))
    };
    let pinned: Vec<_> = processes(dir)?.into_iter().filter(|p| *p > 1 && *p != own).filter_map(pin).collect();
    let still: BTreeSet<_> = processes(dir)?.into_iter().collect();
    for (pid, fd) in pinned {
        if still.contains(&pid) {
            // It may have ended meanwhile; the caller looks again.
            let _ = pidfd_send_signal(&fd, Signal::KILL);
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod fixtures {
    //! Fixture trees: `cg` for the cgroup root, `proc` for procfs.

    use crate::testing::put;

    /// A hybrid v1 host with joined cpu and cpuacct, without hugetlb.
    pub(crate) fn v1() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path().display();
        let mut table = format!("31 23 0:28 / {d}/cg rw - tmpfs tmpfs rw,mode=755\n");
        for (id, (mount, options)) in [
            ("cpu,cpuacct", "rw,cpu,cpuacct"),
            ("cpuset", "rw,cpuset"),
            ("memory", "rw,memory"),
            ("pids", "rw,pids"),
            ("systemd", "rw,xattr,release_agent=/lib/systemd/systemd-cgroups-agent,name=systemd"),
        ]
        .iter()
        .enumerate()
        {
            table.push_str(&format!(
                "{} 31 0:{} / {d}/cg/{mount} rw shared:9 - cgroup cgroup {options}\n",
                id + 40,
                id + 40
            ));
            put(dir.path(), &format!("cg/{mount}/cgroup.procs"), "1\n");
        }
        table.push_str(&format!("60 31 0:60 / {d}/cg/unified rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"));
        put(dir.path(), "cg/unified/cgroup.procs", "1\n");
        put(dir.path(), "cg/cpuset/cpuset.cpus", "0-3\n");
        put(dir.path(), "cg/cpuset/cpuset.mems", "0\n");
        put(dir.path(), "proc/self/mountinfo", &table);
        dir
    }

    /// A unified host.
    pub(crate) fn v2() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path().display();
        put(dir.path(), "cg/cgroup.controllers", "cpuset cpu io memory hugetlb pids\n");
        put(dir.path(), "cg/cgroup.subtree_control", "memory pids\n");
        put(dir.path(), "proc/self/mountinfo", &format!("31 23 0:28 / {d}/cg rw shared:4 - cgroup2 cgroup2 rw\n"));
        dir
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
