//! Tests of the host's cgroups: on fixture trees, and on this machine's own when it allows it.

use std::process::{Child, Command};
use std::sync::Mutex;

use super::super::PropertyValue;
use super::*;
use crate::testing::{get, put};

fn name(parts: &[&str]) -> CgroupName {
    CgroupName(parts.iter().map(|p| (*p).to_owned()).collect())
}

fn pod_resources() -> CgroupResources {
    CgroupResources {
        cpu_shares: Some(512),
        cpu_quota: Some(50_000),
        cpu_period: Some(100_000),
        memory_limit: Some(64 << 20),
        pids_limit: Some(100),
        ..CgroupResources::default()
    }
}

fn detect(dir: &tempfile::TempDir) -> CgroupLayout {
    CgroupLayout::detect(&dir.path().join("cg"), &dir.path().join("proc")).unwrap()
}

#[test]
fn v1_group_is_made_in_every_hierarchy() {
    let dir = fixtures::v1();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    let pod = name(&["kubepods", "burstable", "pod-1"]);
    assert!(!groups.exists(&pod));
    groups.create(&pod, &pod_resources()).unwrap();
    assert!(groups.exists(&pod));
    assert_eq!(groups.cri_cgroup_parent(&pod), "/kubepods/burstable/pod-1");
    let at = |hierarchy: &str| cg.join(hierarchy).join("kubepods/burstable/pod-1");
    assert_eq!(get(at("cpu,cpuacct").join("cpu.shares")), "512");
    assert_eq!(get(at("cpu,cpuacct").join("cpu.cfs_quota_us")), "50000");
    assert_eq!(get(at("memory").join("memory.limit_in_bytes")), "67108864");
    assert_eq!(get(at("pids").join("pids.max")), "100");
    assert_eq!(get(at("cpuset").join("cpuset.cpus")), "0-3");
    assert_eq!(get(cg.join("cpuset/kubepods/cpuset.mems")), "0");
    assert!(at("systemd").is_dir() && at("unified").is_dir());

    // One hierarchy lacks it: not there.
    std::fs::remove_dir_all(at("pids")).unwrap();
    assert!(!groups.exists(&pod));

    assert_eq!(groups.list_children(&name(&["kubepods", "burstable"])).unwrap(), std::slice::from_ref(&pod));
    groups.destroy(&pod).unwrap();
    assert!(!at("cpu,cpuacct").exists() && !at("systemd").exists() && !at("unified").exists());
    assert!(cg.join("memory/kubepods/burstable").exists());
    groups.destroy(&pod).unwrap();
    assert!(groups.list_children(&name(&["nothing"])).unwrap().is_empty());
}

#[test]
fn v2_controllers_are_enabled_down_the_path() {
    let dir = fixtures::v2();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    let pod = name(&["kubepods", "pod1"]);
    let resources = CgroupResources {
        hugepage_limits: [("2MB".to_owned(), 0)].into(),
        unified: [("memory.oom.group".to_owned(), "1".to_owned())].into(),
        ..pod_resources()
    };
    groups.create(&pod, &resources).unwrap();
    // memory and pids were on already.
    assert_eq!(get(cg.join("cgroup.subtree_control")), "+cpuset +cpu +io +hugetlb");
    assert_eq!(get(cg.join("kubepods/cgroup.subtree_control")), "+cpuset +cpu +io +memory +hugetlb +pids");
    assert!(!cg.join("kubepods/pod1/cgroup.subtree_control").exists());
    assert_eq!(get(cg.join("kubepods/pod1/cpu.weight")), "20");
    assert_eq!(get(cg.join("kubepods/pod1/cpu.max")), "50000 100000");
    assert_eq!(get(cg.join("kubepods/pod1/memory.max")), "67108864");
    assert_eq!(get(cg.join("kubepods/pod1/hugetlb.2MB.max")), "0");
    assert_eq!(get(cg.join("kubepods/pod1/memory.oom.group")), "1");

    assert!(!groups.exists(&pod), "no controllers are enabled in it");
    put(&cg, "kubepods/pod1/cgroup.controllers", "cpuset cpu memory pids\n");
    assert!(!groups.exists(&pod), "hugetlb is not");
    put(&cg, "kubepods/pod1/cgroup.controllers", "cpuset cpu io memory hugetlb pids\n");
    assert!(groups.exists(&pod));
}

#[test]
fn v2_figures_and_limits() {
    let dir = fixtures::v2();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    let pod = name(&["p"]);
    assert!(groups.usage(&pod).is_err());
    put(&cg, "p/cpu.stat", "usage_usec 1500\nuser_usec 1000\n");
    put(&cg, "p/memory.current", "1000000\n");
    put(&cg, "p/memory.stat", "anon 400000\nfile 500000\ninactive_file 300000\npgfault 7\npgmajfault 2\n");
    put(&cg, "p/memory.max", "max\n");
    put(&cg, "p/pids.current", "3\n");
    let usage = groups.usage(&pod).unwrap();
    assert_eq!(usage.cpu_ns, Some(1_500_000));
    assert_eq!(usage.working_set, Some(700_000));
    assert_eq!((usage.rss, usage.page_faults, usage.major_page_faults), (Some(400_000), Some(7), Some(2)));
    assert_eq!((usage.memory_limit, usage.pids), (None, Some(3)));

    put(&cg, "p/cpu.weight", "39\n");
    put(&cg, "p/cpu.max", "max 100000\n");
    let limits = groups.limits(&pod).unwrap();
    assert_eq!((limits.cpu_shares, limits.cpu_quota, limits.cpu_period), (Some(998), Some(-1), Some(100_000)));
    assert_eq!(limits.memory_limit, Some(-1));
}

#[test]
fn v1_figures() {
    let dir = fixtures::v1();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    put(&cg, "memory/p/memory.usage_in_bytes", "1000\n");
    put(&cg, "memory/p/memory.stat", "inactive_file 1\ntotal_inactive_file 1200\ntotal_rss 5\n");
    put(&cg, "memory/p/memory.limit_in_bytes", "9223372036854771712\n");
    put(&cg, "cpu,cpuacct/p/cpuacct.usage", "42\n");
    let usage = groups.usage(&name(&["p"])).unwrap();
    assert_eq!(usage.cpu_ns, Some(42));
    assert_eq!(usage.working_set, Some(0), "never below nothing");
    assert_eq!((usage.rss, usage.memory_limit), (Some(5), None));
}

#[test]
fn pids_are_counted_once_over_all_groups_below() {
    let dir = fixtures::v1();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    put(&cg, "memory/p/cgroup.procs", "30\n10\n");
    put(&cg, "memory/p/c1/cgroup.procs", "20\n0\n");
    put(&cg, "pids/p/c1/cgroup.procs", "20\n40\n");
    assert_eq!(groups.pids(&name(&["p"])).unwrap(), [10, 20, 30, 40]);
    assert!(groups.pids(&name(&["q"])).unwrap().is_empty());
}

#[test]
fn a_refused_write_is_told_apart() {
    let dir = fixtures::v2();
    let cg = dir.path().join("cg");
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    let refused = CgroupError::Refused {
        path: cg.join("x"),
        value: "1".into(),
        source: io::Error::from(io::ErrorKind::PermissionDenied),
    };
    assert!(refused.is_refused());
    // A directory in the file's place cannot be written, and is no refusal.
    std::fs::create_dir_all(cg.join("p/memory.max")).unwrap();
    let error = groups.update(&name(&["p"]), &pod_resources()).unwrap_err();
    assert!(!error.is_refused(), "{error}");
    // The writes after it are done all the same.
    assert_eq!(get(cg.join("p/pids.max")), "100");
}

#[test]
fn the_root_and_outside_are_never_removed() {
    let dir = fixtures::v2();
    let groups = HostCgroups::cgroupfs(detect(&dir), &dir.path().join("proc"));
    assert!(groups.destroy(&CgroupName::default()).is_err());
    assert!(groups.destroy(&name(&[".."])).is_err());
    assert!(groups.create(&name(&["..", "x"]), &CgroupResources::default()).is_err());
    assert!(dir.path().join("cg/cgroup.controllers").exists());
}

#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl SliceUnits for Recorder {
    fn version(&self) -> CgroupResult<u32> {
        Ok(252)
    }

    fn start_slice(&self, unit: &str, parent: &str, _: CgroupVersion) -> CgroupResult<()> {
        self.0.lock().unwrap().push(format!("start {unit} below {parent}"));
        Ok(())
    }

    fn set_properties(&self, unit: &str, properties: &[(&'static str, PropertyValue)]) -> CgroupResult<()> {
        self.0.lock().unwrap().push(format!("set {unit} {properties:?}"));
        Ok(())
    }

    fn stop_slice(&self, unit: &str) -> CgroupResult<()> {
        self.0.lock().unwrap().push(format!("stop {unit}"));
        Ok(())
    }
}

#[test]
fn systemd_is_told_and_the_files_are_written() {
    let dir = fixtures::v2();
    let cg = dir.path().join("cg");
    let slices = Arc::new(Recorder::default());
    let groups = HostCgroups::systemd(detect(&dir), &dir.path().join("proc"), slices.clone());
    let pod = name(&["kubepods", "pod1-2"]);
    let path = "kubepods.slice/kubepods-pod1_2.slice";
    assert_eq!(groups.cri_cgroup_parent(&pod), format!("/{path}"));
    groups.create(&pod, &CgroupResources { cpu_shares: Some(2), ..CgroupResources::default() }).unwrap();
    assert_eq!(get(cg.join(path).join("cpu.weight")), "1");
    std::fs::create_dir_all(cg.join("kubepods.slice/cri-containerd-1.scope")).unwrap();
    assert_eq!(groups.list_children(&name(&["kubepods"])).unwrap(), std::slice::from_ref(&pod));
    groups.update(&pod, &CgroupResources { pids_limit: Some(7), ..CgroupResources::default() }).unwrap();
    groups.destroy(&pod).unwrap();
    assert!(!cg.join(path).exists());
    assert_eq!(
        *slices.0.lock().unwrap(),
        [
            "start kubepods-pod1_2.slice below kubepods.slice",
            "set kubepods-pod1_2.slice [(\"CPUWeight\", Number(1))]",
            "set kubepods-pod1_2.slice [(\"TasksMax\", Number(7))]",
            "stop kubepods-pod1_2.slice",
        ]
    );
}

/// This machine's cgroups, below a group that no one else uses; gone when dropped.
struct Real {
    groups: HostCgroups,
    top: CgroupName,
    children: Vec<Child>,
}

impl Real {
    fn new(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let layout = match CgroupLayout::detect(Path::new("/sys/fs/cgroup"), Path::new("/proc")) {
            Ok(layout) => layout,
            Err(e) => {
                eprintln!("skipped: {}", e.full());
                return None;
            }
        };
        let groups = HostCgroups::cgroupfs(layout, Path::new("/proc"));
        let top = name(&[&format!("rubelet-test-{test}-{}", std::process::id())]);
        if let Err(e) = groups.create(&top, &CgroupResources::default()) {
            eprintln!("skipped: this machine's cgroups cannot be written: {e}");
            let _ = groups.destroy(&top);
            return None;
        }
        Some(Self { groups, top, children: Vec::new() })
    }

    /// Starts a process in this group, in every hierarchy.
    fn start(&mut self, group: &CgroupName) -> u32 {
        let child = Command::new("sleep").arg("300").spawn().unwrap();
        let pid = child.id();
        self.children.push(child);
        for dir in self.groups.dirs(&self.groups.path(group)) {
            std::fs::write(dir.join("cgroup.procs"), pid.to_string()).unwrap();
        }
        pid
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = self.groups.destroy(&self.top);
    }
}

#[test]
fn real_group_lives_and_dies() {
    let Some(mut real) = Real::new("life") else { return };
    let pod = real.top.child("burstable").child("pod-1");
    real.groups.create(&pod, &pod_resources()).unwrap();
    assert!(real.groups.exists(&pod));
    let limits = real.groups.limits(&pod).unwrap();
    assert_eq!(limits.memory_limit, Some(64 << 20));
    assert_eq!((limits.cpu_quota, limits.cpu_period), (Some(50_000), Some(100_000)));

    // Both up and down, over the parent's and the child's checks.
    let half =
        CgroupResources { cpu_quota: Some(1_000), cpu_period: Some(10_000), memory_limit: Some(-1), ..pod_resources() };
    real.groups.update(&pod, &half).unwrap();
    let limits = real.groups.limits(&pod).unwrap();
    assert_eq!((limits.cpu_quota, limits.cpu_period, limits.memory_limit), (Some(1_000), Some(10_000), Some(-1)));

    let container = pod.child("container");
    real.groups.create(&container, &CgroupResources::default()).unwrap();
    let pid = real.start(&container);
    assert_eq!(real.groups.pids(&pod).unwrap(), [pid]);
    let usage = real.groups.usage(&pod).unwrap();
    assert!(usage.pids.is_some_and(|n| n >= 1), "{usage:?}");
    assert!(usage.memory.is_some() && usage.cpu_ns.is_some(), "{usage:?}");
    assert!(real.groups.usage(&CgroupName::default()).unwrap().memory.is_some_and(|m| m > 0));

    let mut child = real.children.pop().unwrap();
    let reaper = std::thread::spawn(move || child.wait().unwrap());
    real.groups.destroy(&pod).unwrap();
    let status = reaper.join().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    assert!(!real.groups.exists(&pod));
    assert_eq!(real.groups.list_children(&real.top).unwrap(), [real.top.child("burstable")]);
    assert!(real.groups.pids(&real.top).unwrap().is_empty());
}

/// A slice of the running systemd; needs a machine that systemd has booted.
#[test]
fn real_slice_lives_and_dies() {
    if !rustix::process::geteuid().is_root() || !Path::new("/run/systemd/system").is_dir() {
        eprintln!("skipped: needs root and systemd");
        return;
    }
    let groups = HostCgroups::open(Path::new("/sys/fs/cgroup"), Path::new("/proc"), CgroupDriver::Systemd).unwrap();
    let top = name(&[&format!("rubelettest{}", std::process::id())]);
    let pod = top.child("burstable").child("pod1-2");
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        groups.create(&pod, &pod_resources()).unwrap();
        groups.create(&pod, &pod_resources()).unwrap();
        assert!(groups.exists(&pod));
        let limits = groups.limits(&pod).unwrap();
        assert_eq!((limits.cpu_quota, limits.memory_limit), (Some(50_000), Some(64 << 20)));
        // systemd knows the limits: a reload keeps them.
        let reload = Command::new("systemctl").arg("daemon-reload").status().unwrap();
        assert!(reload.success());
        assert_eq!(groups.limits(&pod).unwrap(), limits);
        let unlimited = CgroupResources { memory_limit: Some(-1), cpu_quota: Some(-1), ..pod_resources() };
        groups.update(&pod, &unlimited).unwrap();
        assert_eq!(groups.limits(&pod).unwrap().memory_limit, Some(-1));

        let mut child = Command::new("sleep").arg("300").spawn().unwrap();
        for dir in groups.dirs(&groups.path(&pod)) {
            std::fs::write(dir.join("cgroup.procs"), child.id().to_string()).unwrap();
        }
        assert_eq!(groups.pids(&top).unwrap(), [child.id()]);
        assert_eq!(groups.list_children(&top.child("burstable")).unwrap(), std::slice::from_ref(&pod));
        let reaper = std::thread::spawn(move || child.wait().unwrap());
        groups.destroy(&pod).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&reaper.join().unwrap()), Some(9));
        assert!(!groups.exists(&pod));
        groups.destroy(&pod).unwrap();
    }));
    let _ = groups.destroy(&top.child("burstable"));
    groups.destroy(&top).unwrap();
    outcome.unwrap();
}

#[test]
fn real_group_tells_of_impossible_values() {
    let Some(real) = Real::new("values") else { return };
    let low = CgroupResources { cpu_quota: Some(1), cpu_period: Some(100_000), ..CgroupResources::default() };
    let error = real.groups.update(&real.top, &low).unwrap_err();
    assert!(matches!(error, CgroupError::Write { .. }), "{error:?}");
    let gone = real.top.child("gone");
    assert!(real.groups.update(&gone, &low).is_err());
    real.groups.destroy(&gone).unwrap();
}
