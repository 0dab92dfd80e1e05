//! The runtime goes away, comes back, hangs, loses its network.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cri_api::v1::{ContainerState, PodSandboxState};
use e2e::share::{alive, most_at_once, noting};
use e2e::status::{id, phase, restarts, runs, uid};
use e2e::{Node, Options, Share, container, pod, seconds, wait_until, with};
use rig::processes::{Program, working_in};
use rig::{Stage, http};
use rustix::process::Signal;
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn without_a_runtime_the_agent_ends_with_a_clear_error_and_comes_up_with_it() {
    let mut node = Node::prepare(Options::default());
    let real = node.stage().join("containerd.sock");
    let socket = node.dir().join("runtime.sock");
    node.configure("containerRuntimeEndpoint", json!(format!("unix://{}", socket.display())));
    node.write("p.yaml", &pod("p", [container("c", HOLD)]));
    let ends = |node: &mut Node| {
        let before = node.log().len();
        node.spawn();
        wait_until("the agent ends by itself", seconds(60), || (!node.running()).then_some(()));
        assert_eq!(node.stop().code(), Some(1));
        node.log()[before..].to_owned()
    };
    let missing = ends(&mut node);
    assert!(
        missing.contains(&format!("the container runtime at unix://{} cannot be used", socket.display())),
        "{missing}"
    );
    // A socket that nobody listens on any more, as a killed runtime leaves it.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let refused = ends(&mut node);
    assert!(refused.contains("cannot be used") && refused.contains("refused"), "{refused}");
    fs::remove_file(&socket).unwrap();
    symlink(real, &socket).unwrap();
    node.run();
    node.wait_running("p");
}

fn running(node: &Node) -> BTreeMap<String, Vec<String>> {
    let mut ids: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for c in node.containers().into_iter().filter(|c| c.state == ContainerState::ContainerRunning as i32) {
        let label = |key: &str| c.labels.get(key).cloned().unwrap_or_default();
        ids.entry(format!("{} {}", label("io.kubernetes.pod.name"), label("io.kubernetes.container.name")))
            .or_default()
            .push(c.id);
    }
    ids
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_restart_of_the_runtime_touches_nothing_that_runs_and_finishes_what_was_begun() {
    let Some(runtime) = e2e::another_runtime() else {
        e2e::skip!("no containerd of this version to start one of its own");
    };
    let images = ["pause", "busybox"].map(|n| rig::lab().join(format!("images/small/{n}.tar")));
    let mut stage = Stage::create("e2e").unwrap();
    stage.start_containerd(&runtime, &images, false).unwrap();
    let mut node = Node::with(Options::default().on(&stage));
    let share = Share::new(&node);
    let put = |manifest: Value| {
        let name = manifest["metadata"]["name"].as_str().unwrap().to_owned();
        node.write(&format!("{name}.yaml"), &share.mounted(manifest));
    };
    let guarded = |name: &str, script: &str| container("c", &format!("{}{script}", share.alone(name)));
    let steady: Vec<String> = (0..7).map(|n| format!("steady{n}")).collect();
    for name in &steady {
        put(pod(name, [guarded(name, HOLD), container("d", HOLD)]));
    }
    put(with_spec(pod("host", [guarded("host", HOLD)]), json!({"hostNetwork": true})));
    for n in 0..3 {
        let name = format!("loops{n}");
        put(pod(&name, [guarded(&name, "sleep 1; exit 1")]));
    }
    let mut dying = pod("dying", [container("c", &noting("dying", "x", 6.0))]);
    dying["spec"]["terminationGracePeriodSeconds"] = json!(40);
    put(dying);
    for name in steady.iter().map(String::as_str).chain(["host", "dying"]) {
        node.wait_running(name);
    }
    for n in 0..3 {
        node.wait_pod("it loops", &format!("loops{n}"), |p| restarts(p, "c") >= 1);
    }
    let kept = running(&node);
    let kept: BTreeMap<_, _> =
        kept.into_iter().filter(|(name, _)| name.starts_with("steady") || name.starts_with("host")).collect();
    assert_eq!(kept.len(), 15);

    // Now eight more in every stage of their start, one that ends, and the runtime is killed.
    let going = uid(&node.pod("dying").unwrap());
    node.remove("dying.yaml");
    let middle: Vec<String> = (0..8).map(|n| format!("middle{n}")).collect();
    for (n, name) in middle.iter().enumerate() {
        let mut manifest = pod(name, [guarded(name, HOLD), container("d", HOLD)]);
        if n % 2 == 0 {
            manifest["spec"]["initContainers"] =
                json!([container("i", &format!("sleep 1; echo x >> /share/init-{name}"))]);
        }
        put(manifest);
        std::thread::sleep(Duration::from_millis(200));
    }
    let agent = node.pid();
    stage.kill_containerd();
    std::thread::sleep(seconds(4));
    assert!(node.running(), "the agent ended with the runtime");
    assert_eq!(http::get_tcp(node.port("healthzPort"), "/healthz").unwrap().0, 200);
    stage.start_containerd(&runtime, &[], false).unwrap();

    for name in &middle {
        let up = node.wait_running(name);
        // A start that was under way when the runtime was killed may have got as far as a process, and that one is lost.
        assert!(restarts(&up, "d") <= 1, "{name}: {up}");
    }
    node.wait_gone(&going, seconds(60));
    assert_eq!(alive(&share.lines("dying")), Vec::<String>::new());
    assert!(
        share.read("dying").contains("stop"),
        "the grace of the one that ended was cut short: {}",
        share.read("dying")
    );
    assert_eq!(most_at_once(&share.lines("dying")), 1);
    for n in 0..3 {
        let name = format!("loops{n}");
        let before = restarts(&node.pod(&name).unwrap(), "c");
        assert!(before >= 1, "the count of {name} fell");
    }
    let now = running(&node);
    for (name, ids) in &kept {
        assert_eq!(now.get(name), Some(ids), "{name} was restarted");
    }
    for (name, ids) in &now {
        assert_eq!(ids.len(), 1, "{name} runs more than once");
    }
    let mut ready: BTreeMap<String, usize> = BTreeMap::new();
    for s in node.sandboxes().into_iter().filter(|s| s.state == PodSandboxState::SandboxReady as i32) {
        *ready.entry(s.metadata.unwrap().name).or_default() += 1;
    }
    assert_eq!(ready.values().copied().max(), Some(1), "{ready:?}");
    assert_eq!(ready.len(), 8 + 3 + 8, "{ready:?}");
    assert_eq!(share.read("twice"), "", "ran twice at once");
    assert!(node.running() && node.pid() == agent, "the agent was restarted");
    drop(node);
    stage.close().unwrap();
}

fn with_spec(mut manifest: Value, fields: Value) -> Value {
    manifest["spec"] = with(manifest["spec"].clone(), fields);
    manifest
}

/// A stopped process goes on when this goes.
struct Stopped(i32);

impl Stopped {
    fn containerd(stage: &Path) -> Self {
        let all = working_in(stage);
        let (pid, _) = all.iter().find(|(_, p)| *p == Program::Containerd).unwrap();
        rig::processes::kill(*pid, Signal::STOP);
        Self(*pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        rig::processes::kill(self.0, Signal::CONT);
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_runtime_that_hangs_is_waited_for() {
    let mut node = Node::start();
    for name in ["a", "b"] {
        node.write(&format!("{name}.yaml"), &pod(name, [container("c", HOLD)]));
    }
    let before = ["a", "b"].map(|n| id(&node.wait_running(n), "c").to_owned());
    let leaves = uid(&node.pod("b").unwrap());
    let stopped = Stopped::containerd(node.stage());
    node.write("late.yaml", &pod("late", [container("c", HOLD)]));
    node.remove("b.yaml");
    for _ in 0..10 {
        std::thread::sleep(seconds(1));
        assert!(node.running(), "the agent ended");
        assert_eq!(http::get_tcp(node.port("healthzPort"), "/healthz").unwrap().0, 200);
        assert!(node.get("/pods").is_some_and(|(code, _)| code == 200), "/pods hangs with the runtime");
    }
    assert_eq!(phase(&node.pod("a").unwrap()), "Running");
    drop(stopped);
    node.wait_running("late");
    node.wait_gone(&leaves, seconds(60));
    let after = node.wait_running("a");
    assert_eq!((id(&after, "c"), restarts(&after, "c")), (before[0].as_str(), 0));
}

/// A file that is away until this goes.
struct Away {
    from: PathBuf,
    to: PathBuf,
}

impl Away {
    fn take(from: PathBuf) -> Self {
        let to = from.with_extension("away");
        fs::rename(&from, &to).unwrap();
        Self { from, to }
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        let _ = fs::rename(&self.to, &self.from);
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn without_a_network_only_pods_on_the_hosts_start() {
    let node = Node::start();
    let report = || -> Value {
        let (_, body) = http::get_unix(&node.root().join("rubelet/rubelet.sock"), "/v1/node").unwrap();
        serde_json::from_slice(&body).unwrap()
    };
    node.write("before.yaml", &pod("before", [container("c", HOLD), container("dies", "sleep 4; exit 1")]));
    let before = node.wait_running("before");
    wait_until("the node is ready", seconds(30), || (report()["ready"] == true).then_some(()));
    let away = Away::take(node.stage().join("cni/10-stage.conflist"));
    let told = wait_until("the node says that the network is not ready", seconds(60), || {
        Some(report()).filter(|r| r["ready"] == false)
    });
    assert!(told["message"].as_str().unwrap().contains("NetworkReady=false"), "{told:#}");

    node.write("waits.yaml", &pod("waits", [container("c", HOLD)]));
    node.write("host.yaml", &with_spec(pod("host", [container("c", HOLD)]), json!({"hostNetwork": true})));
    node.wait_running("host");
    let waits = wait_until("the report says what the pod waits for", seconds(20), || {
        node.reports()
            .into_iter()
            .find(|r| r.name == "waits-e2e" && format!("{:?}", r.last_error).contains("network is not ready"))
    });
    assert_eq!(waits.phase, "Pending");
    assert!(node.containers_of("waits", "c").is_empty());
    // A sandbox that stands is no new one: what dies in it is started again.
    node.wait_pod("restarted without the network's leave", "before", |p| restarts(p, "dies") >= 1);
    drop(away);
    node.wait_running("waits");
    wait_until("the node is ready again", seconds(30), || (report()["ready"] == true).then_some(()));
    let after = node.pod("before").unwrap();
    assert_eq!((id(&after, "c"), restarts(&after, "c")), (id(&before, "c"), 0));
    assert!(runs(&after, "c"));
}
