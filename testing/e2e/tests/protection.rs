//! The node protects itself: groups of what is reserved, its own group.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;

use e2e::{Node, Options, container, pod, seconds, wait_until};
use serde_json::json;

const HOLD: &str = "exec sleep 1000000";

/// A file of a group, wherever its hierarchy is mounted; None: it is not there.
fn group_file(controller: &str, group: &str, file: &str) -> Option<String> {
    let root = PathBuf::from("/sys/fs/cgroup");
    [root.join(controller), root.join("cpu,cpuacct"), root]
        .into_iter()
        .filter(|mount| mount.join("cgroup.procs").exists())
        .find_map(|mount| fs::read_to_string(mount.join(group.trim_start_matches('/')).join(file)).ok())
        .map(|text| text.trim().to_owned())
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn what_is_reserved_is_written_into_groups_that_are_there() {
    let mut node = Node::prepare(Options::default());
    let kube = format!("{}/kube", node.cgroup());
    node.configure("kubeReserved", json!({"cpu": "100m", "memory": "200Mi", "pid": "1000"}));
    node.configure("systemReserved", json!({"cpu": "300m", "memory": "100Mi"}));
    node.configure("kubeReservedCgroup", json!(kube));
    node.configure("systemReservedCgroup", json!(format!("{}/sys", node.cgroup())));
    node.configure("enforceNodeAllocatable", json!(["pods", "kube-reserved", "system-reserved-compressible"]));
    // The agent does not make them, and does not do without.
    rig::cgroup::create(&kube).unwrap();
    node.spawn();
    wait_until("the agent ends by itself", seconds(60), || (!node.running()).then_some(()));
    assert_eq!(node.stop().code(), Some(1));
    let told = "Failed to enforce System Reserved Compressible Cgroup Limits on";
    assert!(node.log().contains(told), "{}", node.log());
    rig::cgroup::create(&format!("{}/sys", node.cgroup())).unwrap();
    node.run();
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    node.wait_running("p");
    let read = |group: &str, controller: &str, v1: &str, v2: &str| {
        let group = format!("{}/{group}", node.cgroup());
        group_file(controller, &group, v1).or_else(|| group_file(controller, &group, v2)).unwrap_or_default()
    };
    let of = |group: &str| {
        [
            read(group, "cpu", "cpu.shares", "cpu.weight"),
            read(group, "memory", "memory.limit_in_bytes", "memory.max"),
            read(group, "pids", "pids.max", "pids.max"),
        ]
    };
    let [cpu, memory, pids] = of("kube");
    assert!(["102", "4"].contains(&cpu.as_str()), "{cpu}");
    assert_eq!((memory.as_str(), pids.as_str()), ("209715200", "1000"));
    let [cpu, memory, pids] = of("sys");
    assert!(["307", "12"].contains(&cpu.as_str()), "{cpu}");
    assert!(memory != "104857600" && pids == "max", "{memory} {pids}");
    // What is left is for pods.
    let total: u64 = fs::read_to_string("/proc/meminfo").unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    let [_, memory, _] = of("kubepods");
    assert_eq!(memory.parse::<u64>().unwrap(), (total * 1024 - (300 << 20)) / 4096 * 4096);
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_agent_goes_into_its_own_group() {
    let mut node = Node::prepare(Options::default());
    let own = format!("{}/agent", node.cgroup());
    node.configure("kubeletCgroups", json!(own));
    node.run();
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", node.pid())).unwrap();
    let elsewhere: Vec<_> = groups.lines().filter(|line| !line.ends_with(&own)).collect();
    assert!(elsewhere.is_empty(), "{groups}");
    node.stop();
}
