//! Pods that get other resources while they run, and agents that are cut off meanwhile.

use std::path::PathBuf;
use std::sync::Arc;

use cri_api::v1::ContainerState;
use fakes::{For, Process};
use jiff::Timestamp;
use model::api::ResourceRequirements;
use model::pod::{DesiredPod, PodSource, PodUid};
use pod::admit::{ACTUATED, ALLOCATED, AdmitHandle, Outcome, Resized};
use pod::ports::Tasks;
use serde_json::{Value, json};
use sim::host::{FakeHost, ROOT};
use sim::{Container, HostFault, HostRule, Manifest, Node, run};
use sim::{node_facts, rules};

use super::{MINUTE, SECOND, millis, newest, running_id, up};

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

/// A pod whose container is updated.
fn stays(cpu: &str, memory: &str) -> Manifest {
    Manifest::new("stays").uid("uid-stays").apps([Container::new("app").with("resources", resources(cpu, memory))])
}

/// A pod whose container is restarted when its CPU changes, though it ends well when it is told to.
fn restarts(cpu: &str, memory: &str) -> Manifest {
    let policy = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
    let app = Container::new("app").with("resources", resources(cpu, memory)).with("resizePolicy", policy);
    Manifest::new("restarts").uid("uid-restarts").policy("OnFailure").apps([app])
}

/// What the runtime, the pod's cgroup and both checkpoints say: CPU in thousandths, memory in MiB. Panics unless they agree.
fn has(node: &Node, uid: &str) -> (i64, i64) {
    let newest = newest(node, uid, "app");
    assert_eq!(newest.state(), ContainerState::ContainerRunning, "{}", node.world().asked(40).join("\n"));
    let id = newest.id;
    let linux = node.runtime().container_config(&id).unwrap().linux.unwrap().resources.unwrap();
    let of_container = (linux.cpu_quota / 100, linux.memory_limit_in_bytes >> 20);
    assert_eq!(linux.cpu_shares, of_container.0 * 1024 / 1000);
    let cgroup = node.host().standing().settings[&PodUid::new(uid)].clone();
    assert_eq!((cgroup.cpu_quota.unwrap() / 100, cgroup.memory_limit.unwrap() >> 20), of_container);
    for file in [ALLOCATED, ACTUATED] {
        let record = node.checkpoint(file)[uid].containers["app"].clone();
        assert_eq!(sizes(&record), of_container, "{file}");
    }
    of_container
}

fn ends_well() -> Process {
    Process::forever().trapping_term(0, millis(300))
}

fn sizes(r: &ResourceRequirements) -> (i64, i64) {
    let sizes = decide::resize::sizes(None, r);
    assert_eq!((sizes.cpu_request, sizes.memory_request), (sizes.cpu_limit, sizes.memory_limit));
    (sizes.cpu_limit, sizes.memory_limit >> 20)
}

fn conditions(node: &Node, uid: &str) -> Vec<(String, String)> {
    let all = node.status(uid).conditions.unwrap_or_default();
    let resize = all.into_iter().filter(|c| c.type_.starts_with("PodResize"));
    resize.map(|c| (c.type_, c.reason.unwrap_or_default())).collect()
}

#[test]
fn up_and_down_without_a_restart() {
    run(async {
        let mut node = Node::new(1).await;
        let uid = up(&mut node, "a.yaml", &stays("1", "64Mi")).await;
        let id = running_id(&node, &uid, "app");
        for (cpu, memory, expected) in
            [("2", "128Mi", (2000, 128)), ("500m", "256Mi", (500, 256)), ("1", "64Mi", (1000, 64))]
        {
            node.write("a.yaml", &stays(cpu, memory));
            node.run(2 * SECOND).await;
            assert_eq!(has(&node, &uid), expected);
            assert_eq!(running_id(&node, &uid, "app"), id, "the container runs on");
            let status = node.status(&uid).container_statuses.unwrap().remove(0);
            assert_eq!(sizes(&status.resources.unwrap()), expected, "as the status shows it");
            assert_eq!(conditions(&node, &uid), []);
        }
        node.settle(MINUTE).await;
    });
}

#[test]
fn a_policy_that_asks_for_it_restarts_the_container_once() {
    run(async {
        let mut node = Node::new(2).await;
        node.runtime().script(For::Container("app".into()), [ends_well()]);
        let uid = up(&mut node, "a.yaml", &restarts("1", "64Mi")).await;
        node.write("a.yaml", &restarts("1", "128Mi"));
        node.run(2 * SECOND).await;
        assert_eq!(
            (has(&node, &uid), node.runtime().starts(&uid, "app")),
            ((1000, 128), 1),
            "memory has no such policy"
        );
        node.write("a.yaml", &restarts("2", "128Mi"));
        node.run(10 * SECOND).await;
        assert_eq!((has(&node, &uid), node.runtime().starts(&uid, "app")), ((2000, 128), 2));
        assert_eq!(newest(&node, &uid, "app").metadata.unwrap().attempt, 1);
        node.restart(SECOND).await;
        node.run(10 * SECOND).await;
        assert_eq!(node.runtime().starts(&uid, "app"), 2, "a new agent finds it as it is to be");
        node.assert_sound();
    });
}

#[test]
fn put_off_until_there_is_room() {
    run(async {
        let mut node = Node::new(3).await;
        let other = Manifest::new("other").apps([Container::new("app").with("resources", resources("40", "1Gi"))]);
        up(&mut node, "b.yaml", &other).await;
        let uid = up(&mut node, "a.yaml", &stays("10", "64Mi")).await;
        node.write("a.yaml", &stays("30", "64Mi"));
        node.run(2 * SECOND).await;
        assert_eq!(conditions(&node, &uid), [("PodResizePending".to_owned(), "Deferred".to_owned())]);
        assert_eq!(has(&node, &uid), (10_000, 64));
        // An agent that comes new admits the pod with what it was given, and shows the same.
        node.restart(SECOND).await;
        node.run(5 * SECOND).await;
        assert_eq!((has(&node, &uid), node.phase(&uid).as_str()), ((10_000, 64), "Running"));
        assert_eq!(conditions(&node, &uid), [("PodResizePending".to_owned(), "Deferred".to_owned())]);
        node.remove("b.yaml");
        node.run(15 * SECOND).await;
        assert_eq!((has(&node, &uid), conditions(&node, &uid)), ((30_000, 64), vec![]));
        assert_eq!(node.runtime().starts(&uid, "app"), 1);
        // What is wanted no more leaves no trace.
        node.write("a.yaml", &stays("100", "64Mi"));
        node.run(2 * SECOND).await;
        assert_eq!(conditions(&node, &uid).len(), 1);
        node.write("a.yaml", &stays("30", "64Mi"));
        node.run(2 * SECOND).await;
        assert_eq!(conditions(&node, &uid), []);
        node.settle(MINUTE).await;
    });
}

#[test]
fn what_a_pod_gives_up_is_free_when_it_has_given_it_up() {
    run(async {
        let mut node = Node::new(4).await;
        let uid = up(&mut node, "a.yaml", &stays("10", "64Mi")).await;
        let other = |cpu: &str| {
            let app = Container::new("app").with("resources", resources(cpu, "1Gi"));
            Manifest::new("other").uid("uid-other").apps([app])
        };
        up(&mut node, "b.yaml", &other("50")).await;
        // Its memory is in use, so the other pod's resize cannot be done, and its CPU stays taken.
        node.host().use_memory("uid-other", 900 << 20);
        let app = Container::new("app").with("resources", resources("20", "512Mi"));
        node.write("b.yaml", &Manifest::new("other").uid("uid-other").apps([app]));
        node.run(2 * SECOND).await;
        assert_eq!(conditions(&node, "uid-other"), [("PodResizeInProgress".to_owned(), "Error".to_owned())]);
        node.write("a.yaml", &stays("30", "64Mi"));
        node.run(30 * SECOND).await;
        assert_eq!(conditions(&node, &uid), [("PodResizePending".to_owned(), "Deferred".to_owned())]);
        node.host().use_memory("uid-other", 100 << 20);
        node.run(30 * SECOND).await;
        assert_eq!((has(&node, "uid-other"), has(&node, &uid)), ((20_000, 512), (30_000, 64)));
        assert_eq!((conditions(&node, &uid), conditions(&node, "uid-other")), (vec![], vec![]));
        node.settle(MINUTE).await;
    });
}

#[test]
fn what_fails_is_shown_and_tried_again() {
    run(async {
        let mut node = Node::new(5).await;
        let uid = up(&mut node, "a.yaml", &stays("1", "64Mi")).await;
        node.host().inject(HostRule::new("update_cgroup", HostFault::Fail));
        node.write("a.yaml", &stays("2", "128Mi"));
        node.run(5 * SECOND).await;
        assert_eq!(conditions(&node, &uid), [("PodResizeInProgress".to_owned(), "Error".to_owned())]);
        let calls = node.runtime().calls().len();
        node.run(30 * SECOND).await;
        assert!(node.runtime().calls().len() - calls < 60, "it is not tried in circles");
        node.host().heal();
        node.run(30 * SECOND).await;
        assert_eq!((has(&node, &uid), conditions(&node, &uid)), ((2000, 128), vec![]));
        node.settle(MINUTE).await;
    });
}

/// Both pods are resized up and down.
async fn story(node: &mut Node) {
    node.write("a.yaml", &stays("1", "64Mi"));
    node.write("b.yaml", &restarts("1", "64Mi"));
    node.run(10 * SECOND).await;
    node.write("a.yaml", &stays("2", "128Mi"));
    node.write("b.yaml", &restarts("2", "128Mi"));
    node.run(30 * SECOND).await;
    node.write("a.yaml", &stays("500m", "256Mi"));
    node.write("b.yaml", &restarts("500m", "256Mi"));
    node.run(30 * SECOND).await;
}

#[test]
fn every_call_may_be_the_last() {
    let end = |node: &Node| {
        node.assert_sound();
        for uid in ["uid-stays", "uid-restarts"] {
            assert_eq!(has(node, uid), (500, 256), "{uid}");
            assert_eq!(conditions(node, uid), [], "{uid}");
        }
        let starts = ["uid-stays", "uid-restarts"].map(|uid| node.runtime().starts(uid, "app"));
        assert_eq!(starts, [1, 3], "a resize restarts what asks for it, once");
    };
    let process = |node: &Node| node.runtime().script(For::Container("app".into()), [ends_well()]);
    let effects = run(async {
        let mut node = Node::new(6).await;
        process(&node);
        story(&mut node).await;
        end(&node);
        node.world().effects()
    });
    assert!((30..300).contains(&effects), "{effects} calls");
    for effect in 1..=effects {
        run(async {
            let mut node = Node::without_agent(sim::Setup { seed: 6, ..Default::default() });
            process(&node);
            node.comes_back_after([millis(10), 3 * SECOND][effect as usize % 2]);
            node.world().cut_at(Some(effect));
            node.start().await;
            story(&mut node).await;
            end(&node);
        });
    }
}

/// A container that is to be restarted for another memory request, of which no setting in the kernel tells.
#[test]
fn what_the_kernel_does_not_show_is_not_forgotten() {
    let asks = |memory: &str| {
        let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let resources = json!({"requests": {"cpu": "1", "memory": memory}, "limits": {"cpu": "1", "memory": "256Mi"}});
        let app = Container::new("app").with("resources", resources).with("resizePolicy", policy);
        Manifest::new("asks").uid("uid-asks").policy("OnFailure").apps([app])
    };
    let story = async |node: &mut Node| {
        node.runtime().script(For::Container("app".into()), [ends_well()]);
        node.start().await;
        node.write("a.yaml", &asks("64Mi"));
        node.run(10 * SECOND).await;
        node.write("a.yaml", &asks("128Mi"));
        node.run(30 * SECOND).await;
        node.assert_sound();
        let uid = "uid-asks";
        assert_eq!(node.runtime().starts(uid, "app"), 2, "{}", node.world().asked(40).join("\n"));
        assert_eq!(newest(node, uid, "app").state(), ContainerState::ContainerRunning);
        let record = &node.checkpoint(ACTUATED)[uid].containers["app"];
        assert_eq!(decide::resize::sizes(None, record).memory_request, 128 << 20);
        assert_eq!(conditions(node, uid), []);
    };
    let new = || Node::without_agent(sim::Setup { seed: 8, ..Default::default() });
    let effects = run(async {
        let mut node = new();
        story(&mut node).await;
        node.world().effects()
    });
    for effect in 1..=effects {
        run(async {
            let mut node = new();
            node.comes_back_after(millis(10));
            node.world().cut_at(Some(effect));
            story(&mut node).await;
        });
    }
}

/// A pod that displaces others at its start does so too when it grows.
#[test]
fn room_that_a_lesser_pod_holds() {
    run(async {
        let mut node = Node::new(9).await;
        let pod = |name: &str, cpu: &str, priority: i64| {
            // One whose stop has other reasons than the checker knows of.
            let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
            let app = Container::new("app").with("resources", resources(cpu, "64Mi")).with("resizePolicy", policy);
            Manifest::new(name).uid(&format!("uid-{name}")).apps([app]).priority(priority)
        };
        up(&mut node, "b.yaml", &pod("lesser", "40", 1)).await;
        up(&mut node, "c.yaml", &pod("equal", "10", 10)).await;
        let uid = up(&mut node, "a.yaml", &pod("a", "10", 10)).await;
        node.write("a.yaml", &pod("a", "30", 10));
        node.run(40 * SECOND).await;
        assert_eq!((has(&node, &uid), conditions(&node, &uid)), ((30_000, 64), vec![]));
        let status = node.status("uid-lesser");
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("Preempting")));
        assert!(node.running("uid-lesser").is_empty());
        assert_eq!(node.phase("uid-equal"), "Running");
        node.assert_sound();
    });
}

// ---- The ledger's owner alone

struct Ledger {
    admit: AdmitHandle,
    tasks: Tasks,
}

impl Ledger {
    async fn new(pods: &[DesiredPod]) -> Self {
        let tasks = Tasks::default();
        let host = Arc::new(FakeHost::new(1));
        let restored = pod::admit::Restored::default();
        let admit = pod::admit::start(
            node_facts(),
            rules().unwrap(),
            restored,
            host,
            Arc::new(pod::ports::NoManagers),
            PathBuf::from(ROOT),
            &tasks,
        );
        let candidates = pods.iter().map(|pod| pod::admit::Candidate { pod: pod.clone(), alive: false });
        let verdicts = admit.admit(candidates.collect()).await;
        assert!(verdicts.iter().all(|v| matches!(v, pod::admit::Verdict::Now(Ok(_)))), "{verdicts:?}");
        Self { admit, tasks }
    }

    async fn wish(&self, pod: DesiredPod) -> Vec<String> {
        told(self.admit.wish(pod, Timestamp::UNIX_EPOCH).await)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.tasks.stop().cancel();
    }
}

fn told(resized: Resized) -> Vec<String> {
    let one = |change: pod::admit::Change| {
        let what = match change.outcome {
            Outcome::Given { was_deferred, trigger, .. } => {
                format!("given {trigger}{}", if was_deferred { " late" } else { "" })
            }
            Outcome::Pending { pending, news, word, .. } => {
                format!("{} {word}{}", pending.reason.as_str(), if news { "" } else { " again" })
            }
            Outcome::Void => "void".to_owned(),
        };
        format!("{} {what}", change.pod.name())
    };
    resized.changes.into_iter().map(one).collect()
}

fn wants(name: &str, cpu: &str, priority: i32, generation: i64) -> DesiredPod {
    let pod = json!({
        "metadata": {"name": name, "namespace": "ns", "uid": name, "generation": generation},
        "spec": {"priority": priority, "containers": [{"name": "app", "resources": {"requests": {"cpu": cpu}}}]},
    });
    DesiredPod::new(serde_json::from_value(pod).unwrap(), PodSource::Api).unwrap()
}

#[test]
fn room_goes_to_the_first_in_order() {
    run(async {
        let pods = [wants("low", "10", 0, 1), wants("high", "10", 9, 1), wants("big", "40", 0, 1)];
        let ledger = Ledger::new(&pods).await;
        assert_eq!(ledger.wish(wants("low", "20", 0, 2)).await, ["low Deferred OutOfcpu"]);
        assert_eq!(ledger.wish(wants("high", "20", 9, 2)).await, ["high Deferred OutOfcpu"], "the other is told once");
        assert_eq!(ledger.wish(wants("big", "30", 0, 2)).await, ["big given pod_updated"]);
        // Given up is not yet had: the pod's containers may still use it.
        assert_eq!(told(ledger.admit.retry(Timestamp::UNIX_EPOCH, "periodic_retry").await), [""; 0]);
        ledger.admit.settled(wants("big", "30", 0, 2)).await;
        ledger.admit.freed().await;
        let now = told(ledger.admit.retry(Timestamp::UNIX_EPOCH, "periodic_retry").await);
        assert_eq!(now, ["high given pod_resized late"]);
        ledger.admit.ended(&PodUid::new("big")).await;
        ledger.admit.freed().await;
        let now = told(ledger.admit.retry(Timestamp::UNIX_EPOCH, "periodic_retry").await);
        assert_eq!(now, ["low given pod_terminated late"]);
        // Nobody waits any more.
        ledger.admit.release(PodUid::new("high")).await;
        let told_of_room = tokio::time::timeout(MINUTE, ledger.admit.freed()).await;
        assert!(told_of_room.is_err(), "room that nobody waits for wakes nobody");
    });
}
