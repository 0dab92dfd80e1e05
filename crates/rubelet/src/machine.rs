//! What the agent sets on the machine for itself and for all pods together: the kernel's settings, the groups above pods and of what is reserved, and the
//! groups that processes of the system are moved into.
//!
//! Tasks: one that repeats a limit which the kernel does not take yet (more memory is used than it would be: eviction brings it down), until it does; with
//! `systemCgroups`, one that moves the processes of the root group once a minute, as new ones come. Both are owned by wire.rs and end with [`Tasks::stop`];
//! nothing waits for them.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use config::KubeletConfiguration;
use decide::node::NodeEvent;
use decide::resources::ReservedGroup;
use host::cgroup::{CgroupError, CgroupManager, HostCgroups, name_from_path};
use model::cgroup::{CgroupName, CgroupResources};
use node::NodeEvents;
use pod::ports::{Tasks, error_chain};
use tracing::{debug, info, warn};

type Failure = Box<dyn Error + Send + Sync>;

/// Between two tries to write a limit, and two looks at the processes of the system.
const AGAIN: Duration = Duration::from_secs(60);

/// Kernel settings that a node needs: file below `/proc/sys` and value.
const TUNABLES: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Sets the kernel as a node needs it; with `protectKernelDefaults` only checks. What the kernel refuses is told, and the node goes on.
///
/// # Errors
/// `protectKernelDefaults` is set and a setting differs: Go's message.
pub(crate) fn tune_kernel(proc: &Path, protect: bool) -> Result<(), String> {
    let mut wrong = Vec::new();
    for (flag, wanted) in TUNABLES {
        let file = proc.join("sys").join(flag);
        let now = match std::fs::read_to_string(&file) {
            Ok(text) => text.trim().to_owned(),
            Err(e) => {
                warn!(flag, err = &e as &dyn Error, "A kernel setting cannot be read");
                continue;
            }
        };
        if now == wanted {
            continue;
        }
        if protect {
            wrong.push(format!("invalid kernel flag: {flag}, expected value: {wanted}, actual value: {now}"));
            continue;
        }
        info!(flag, expectedValue = wanted, actualValue = now, "Updating kernel flag");
        if let Err(e) = std::fs::write(&file, wanted) {
            warn!(flag, err = &e as &dyn Error, "Updating kernel flag failed");
        }
    }
    decide::text::aggregate(&wrong).map_or(Ok(()), Err)
}

/// The group above all pods.
#[derive(Clone)]
pub(crate) struct AllPods {
    pub(crate) cgroups: Arc<dyn CgroupManager>,
    pub(crate) name: CgroupName,
    pub(crate) resources: CgroupResources,
}

impl AllPods {
    /// Makes the group and gives it its limits. Limits that the kernel does not take are tried again until it does.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) async fn enforce(self, events: Arc<dyn NodeEvents>, tasks: &Tasks) -> Result<(), Failure> {
        let this = self.clone();
        // The first try is part of the start: what follows finds the limits in place.
        let written = tokio::task::spawn_blocking(move || this.make().map(|()| this.write())).await??;
        let Err(failed) = written else {
            events.event(&NodeEvent::allocatable_enforced());
            return Ok(());
        };
        warn!(reason = failed.reason, "{}, trying again every minute", failed.message);
        events.event(&failed);
        tasks.spawn_until_stop(async move {
            loop {
                tokio::time::sleep(AGAIN).await;
                let this = self.clone();
                match tokio::task::spawn_blocking(move || this.write()).await {
                    Ok(Ok(())) => return events.event(&NodeEvent::allocatable_enforced()),
                    Ok(Err(failed)) => events.event(&failed),
                    Err(e) => warn!(err = &e as &dyn Error, "A thread that wrote cgroup limits ended"),
                }
            }
        });
        Ok(())
    }

    /// A new group has its limits from the first; the others keep what they have until [`AllPods::write`].
    fn make(&self) -> Result<(), CgroupError> {
        if self.cgroups.exists(&self.name) {
            return Ok(());
        }
        go_on_when_refused(self.cgroups.create(&self.name, &self.resources))
    }

    fn write(&self) -> Result<(), NodeEvent> {
        go_on_when_refused(self.cgroups.update(&self.name, &self.resources)).map_err(|e| {
            NodeEvent::allocatable_not_enforced(&self.cgroups.cri_cgroup_parent(&self.name), &error_chain(&e))
        })
    }
}

/// What the kernel does not let be set (a container, an odd kernel) is told, and no failure.
pub(crate) fn go_on_when_refused(done: Result<(), CgroupError>) -> Result<(), CgroupError> {
    match done {
        Err(e) if e.is_refused() => {
            warn!(err = &e as &dyn Error, "The kernel refused a cgroup setting, going on without it");
            Ok(())
        }
        done => done,
    }
}

/// Writes what is reserved into the groups that it is reserved for. They must be there: the agent does not make them. Blocks.
///
/// # Errors
/// Go's message: a group is not there, or the kernel does not take a value.
pub(crate) fn reserve(
    cgroups: &dyn CgroupManager,
    groups: &[ReservedGroup],
    events: &dyn NodeEvents,
) -> Result<(), String> {
    for reserved in groups {
        let name = name_from_path(cgroups.driver(), &reserved.group);
        let written = match cgroups.exists(&name) {
            true => cgroups.update(&name, &reserved.resources).map_err(|e| error_chain(&e)),
            false => Err(format!("cgroup {:?} does not exist in full", cgroups.cri_cgroup_parent(&name))),
        };
        if let Err(why) = written {
            let message = reserved.failed(&why);
            events.event(&NodeEvent::warning("FailedNodeAllocatableEnforcement", message.as_str()));
            return Err(message);
        }
        info!(cgroupName = reserved.group, "Enforcing {} reserved on cgroup", reserved.of);
        events.event(&NodeEvent::enforced(reserved.done()));
    }
    Ok(())
}

/// Moves this process into `kubeletCgroups`, and the system's into `systemCgroups`; empty: not.
pub(crate) fn sort_processes(config: &KubeletConfiguration, groups: HostCgroups, proc: &Path, tasks: &Tasks) {
    if !config.kubelet_cgroups.is_empty()
        && let Err(e) = groups.adopt(&config.kubelet_cgroups, std::process::id())
    {
        warn!(containerName = config.kubelet_cgroups, err = error_chain(&e), "Failed to ensure state");
    }
    if config.system_cgroups.is_empty() {
        return;
    }
    let (groups, system, proc) = (Arc::new(groups), config.system_cgroups.clone(), proc.to_owned());
    tasks.spawn_until_stop(async move {
        loop {
            let (groups, system, proc) = (groups.clone(), system.clone(), proc.clone());
            let moved = tokio::task::spawn_blocking(move || move_system(&groups, &system, &proc)).await;
            if let Err(why) = moved.unwrap_or_else(|e| Err(e.to_string())) {
                warn!(err = why, "Failed to ensure state of the system's cgroup");
            }
            tokio::time::sleep(AGAIN).await;
        }
    });
}

/// Moves all processes of the root group that are not the kernel's own; process 1 stays, as it looks after its own groups.
fn move_system(groups: &HostCgroups, system: &str, proc: &Path) -> Result<(), String> {
    let kernels = |pid: u32| {
        let exe = std::fs::read_link(proc.join(pid.to_string()).join("exe"));
        exe.is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
    };
    let found = groups.at_root().map_err(|e| error_chain(&e))?;
    let mut failures = Vec::new();
    for pid in found.into_iter().filter(|pid| *pid != 1 && !kernels(*pid)) {
        debug!(pid, system, "Moving non-kernel process");
        // One that has ended meanwhile is none of them any more.
        if let Err(e) = groups.adopt(system, pid)
            && proc.join(pid.to_string()).exists()
        {
            failures
                .push(format!("failed to move PID {pid} into the system container {system:?}: {}", error_chain(&e)));
        }
    }
    decide::text::aggregate(&failures).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_settings() {
        let dir = tempfile::tempdir().unwrap();
        let put = |flag: &str, value: &str| {
            let file = dir.path().join("sys").join(flag);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, format!("{value}\n")).unwrap();
        };
        for (flag, value) in TUNABLES {
            put(flag, value);
        }
        assert_eq!(tune_kernel(dir.path(), true), Ok(()));
        put("kernel/panic", "0");
        assert_eq!(
            tune_kernel(dir.path(), true),
            Err("invalid kernel flag: kernel/panic, expected value: 10, actual value: 0".to_owned())
        );
        // A kernel without keys is no reason to stop.
        std::fs::remove_dir_all(dir.path().join("sys/kernel/keys")).unwrap();
        assert_eq!(tune_kernel(dir.path(), false), Ok(()));
        assert_eq!(std::fs::read_to_string(dir.path().join("sys/kernel/panic")).unwrap(), "10");
        assert_eq!(tune_kernel(dir.path(), true), Ok(()));
    }
}
