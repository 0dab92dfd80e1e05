//! A stage on the real containerds: comes up, and leaves nothing, also when its owner was killed.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use rig::containerd::{BUSYBOX, Containerd};
use rig::{Stage, lab, remains};

fn images() -> Vec<PathBuf> {
    ["pause", "busybox"].map(|n| lab().join(format!("images/small/{n}.tar"))).to_vec()
}

/// What a stage may leave on the host, one thing a line.
fn traces() -> BTreeSet<String> {
    let folders = [
        "/var/tmp",
        "/run",
        "/run/containerd",
        "/run/containerd/s",
        "/run/netns",
        "/var/lib/cni",
        "/var/lib/cni/results",
        "/opt",
        "/sys/class/net",
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/cpu",
    ];
    let mut all: BTreeSet<String> = folders
        .iter()
        .flat_map(|f| std::fs::read_dir(f).into_iter().flatten().flatten())
        .map(|e| e.path().display().to_string())
        .collect();
    let rules = Command::new("iptables-save").output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    all.extend(rules.unwrap_or_default().lines().filter(|l| l.contains("CNI")).map(str::to_owned));
    all.extend(std::fs::read_to_string("/proc/self/mounts").unwrap().lines().map(str::to_owned));
    all.insert(format!("ip_forward {}", std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap()));
    all
}

/// Runs `experiment` until it changes nothing on the host. What others start and end meanwhile is seen too, so one clean run of several
/// is enough; what the stage itself leaves would be left each time.
fn assert_leaves_nothing(version: &str, experiment: impl Fn()) {
    let mut seen = String::new();
    for _ in 0..6 {
        let before = traces();
        experiment();
        let after = traces();
        if before == after {
            return;
        }
        let new: Vec<&String> = after.difference(&before).collect();
        let gone: Vec<&String> = before.difference(&after).collect();
        seen.push_str(&format!("new {new:#?}, gone {gone:#?}\n"));
    }
    panic!("containerd {version}: {seen}");
}

/// Starts a container below the stage's cgroup, as a pod's would be, without a kubelet.
fn run(stage: &Stage, runtime: &Containerd) {
    let dir = stage.dir().display();
    let out = Command::new(&runtime.ctr)
        .arg("-a")
        .arg(stage.socket())
        .args([
            "-n",
            "k8s.io",
            "run",
            "-d",
            "--runc-root",
            &format!("{dir}/runc"),
            "--fifo-dir",
            &format!("{dir}/fifo"),
            "--cgroup",
            &format!("{}/kubepods/c", stage.cgroup()),
            BUSYBOX,
            "c",
            "sleep",
            "1000",
        ])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn both() -> Vec<Containerd> {
    [Containerd::reference(), Containerd::system()].into_iter().flatten().collect()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn leaves_nothing() {
    for runtime in both() {
        assert_leaves_nothing(&runtime.version, || {
            let mut stage = Stage::create("test").unwrap();
            let dir = stage.dir().to_owned();
            stage.start_containerd(&runtime, &images(), true).unwrap();
            run(&stage, &runtime);
            assert!(!rig::cgroup::processes(stage.cgroup()).is_empty());
            assert!(remains().iter().all(|r| r.dir != dir), "its owner lives");
            stage.close().unwrap();
            assert!(rig::processes::working_in(&dir).is_empty());
        });
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn remains_are_found_and_wiped() {
    let Some(runtime) = both().pop() else { return };
    assert_leaves_nothing(&runtime.version, || {
        let mut stage = Stage::create("test").unwrap();
        stage.start_containerd(&runtime, &images(), true).unwrap();
        run(&stage, &runtime);
        let dir: PathBuf = stage.dir().to_owned();
        // As after kill -9 of the owner: nothing is taken down, and the record names a process that is no more.
        let file = dir.join("record.json");
        let record = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, record.replace("\"start\": ", "\"start\": 1")).unwrap();
        std::mem::forget(stage);
        let found = remains();
        let ours = found.iter().find(|r| r.dir == dir).unwrap();
        ours.wipe().unwrap();
        assert!(!Path::new(&dir).exists());
    });
}
