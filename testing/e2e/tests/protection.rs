//! The node protects itself: groups of what is reserved, its own group, dead containers, shutdown.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;

use cri_api::v1::ContainerState;
use e2e::status::{phase, restarts};
use e2e::{Node, Options, container, pod, seconds, wait_until};
use fake_logind::{Bus, FakeLogind};
use serde_json::{Value, json};

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

fn shown<'a>(pod: &'a Value, field: &str) -> &'a str {
    pod["status"][field].as_str().unwrap_or_default()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_shutdown_waits_for_pods_in_the_order_of_their_priorities() {
    let Some(bus) = Bus::start() else { e2e::skip!("no dbus-daemon") };
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let logind = tokio.block_on(FakeLogind::on(&bus, 600, &PathBuf::from("/nonexistent")));
    let options = Options::default()
        .config(json!({"shutdownGracePeriod": "60s", "shutdownGracePeriodCriticalPods": "20s"}))
        .env("DBUS_SYSTEM_BUS_ADDRESS", bus.address());
    let node = Node::with(options);
    wait_until("the lock is held", seconds(30), || (logind.held() == 1).then_some(()));
    assert_eq!(logind.asked(), ["shutdown kubelet delay"]);
    let slow = "trap 'sleep 2; exit 0' TERM; while true; do sleep 0.1; done";
    let mut critical = pod("critical", [container("c", slow)]);
    critical["spec"]["priority"] = json!(2_000_001_000);
    let mut done = pod("done", [container("c", "exit 0")]);
    done["spec"]["restartPolicy"] = json!("Never");
    for mut manifest in [pod("app", [container("c", slow)]), critical, done] {
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(30);
        node.write(&format!("{}.yaml", manifest["metadata"]["name"].as_str().unwrap()), &manifest);
    }
    node.wait_running("app");
    node.wait_running("critical");
    node.wait_pod("it completes", "done", |p| phase(p) == "Succeeded");

    tokio.block_on(logind.shut_down(true));
    wait_until("the lock is released", seconds(90), || (logind.held() == 0).then_some(()));
    let ended = ["app", "critical"].map(|name| {
        let pod = node.wait_pod("it has failed", name, |p| phase(p) == "Failed");
        assert_eq!(shown(&pod, "reason"), "Terminated");
        assert_eq!(shown(&pod, "message"), "Pod was terminated in response to imminent node shutdown.");
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").unwrap();
        assert_eq!(
            (target["status"].as_str(), target["reason"].as_str()),
            (Some("True"), Some("TerminationByKubelet"))
        );
        assert_eq!(restarts(&pod, "c"), 0);
        let c = node.containers_of(name, "c").pop().unwrap();
        assert_eq!(c.state, ContainerState::ContainerExited as i32);
        let status = node.status(&c.id);
        // It had its time, and began to end when those before it had ended.
        assert_eq!(status.exit_code, 0);
        status.finished_at
    });
    assert!(ended[0] < ended[1], "{ended:?}");
    assert_eq!(phase(&node.pod("done").unwrap()), "Succeeded");
    let state = fs::read_to_string(node.root().join("graceful_node_shutdown_state")).unwrap();
    assert!(state.starts_with("{\"startTime\":\"20") && state.contains("\"endTime\":\"20"), "{state}");
    // Nothing new starts.
    node.write("late.yaml", &pod("late", [container("c", HOLD)]));
    let late = node.wait_pod("it is refused", "late", |p| phase(p) == "Failed");
    assert_eq!(shown(&late, "reason"), "NodeShutdown");
    assert_eq!(shown(&late, "message"), "Pod was rejected: Pod was rejected as the node is shutting down.");
    assert_eq!(node.get("/healthz").map(|(code, _)| code), Some(200));

    // It was called off: the node takes pods again, and holds the next one up.
    tokio.block_on(logind.shut_down(false));
    wait_until("the lock is held", seconds(30), || (logind.held() == 1).then_some(()));
    node.write("next.yaml", &pod("next", [container("c", HOLD)]));
    node.wait_running("next");
}
