//! Crash points: the agent is cut off before and after every call that changes something, one after the other, in stories that go through all that
//! it does to the outside; the next agent must bring everything to its end.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use fakes::{For, Process};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use serde_json::json;
use sim::{ApiServer, Container, Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis};

/// What an agent is put through.
struct Scenario {
    name: &'static str,
    api: ApiServer,
    story: for<'a> fn(&'a mut Node) -> LocalBoxFuture<'a, ()>,
    /// What must be so at the end, beside what always must.
    end: fn(&Node),
    /// Kinds of calls that it must have made.
    calls: &'static [&'static str],
}

const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "static pods",
        api: ApiServer::None,
        story: |node| statics(node).boxed_local(),
        end: |node| ran_once(node, "c.yaml"),
        calls: &[
            "RunPodSandbox",
            "StopPodSandbox",
            "RemoveContainer",
            "remove_pod_dir",
            "unmount_volumes",
            "remove_pod_cgroup",
            "write_atomic",
        ],
    },
    Scenario {
        name: "hooks, probes and volumes",
        api: ApiServer::Streamed,
        story: |node| hooks(node).boxed_local(),
        end: |_| {},
        calls: &["mount_volumes", "link_log", "prepare_container", "POST", "PATCH", "DELETE"],
    },
    Scenario {
        name: "pods of the API server",
        api: ApiServer::Paged,
        story: |node| objects(node).boxed_local(),
        end: |_| {},
        calls: &["PATCH", "DELETE", "StopContainer", "RemovePodSandbox", "remove_pod_logs"],
    },
    Scenario {
        name: "other resources",
        api: ApiServer::None,
        story: |node| resizes(node).boxed_local(),
        end: |_| {},
        calls: &["UpdateContainerResources", "update_cgroup", "write_atomic"],
    },
    Scenario {
        name: "evictions",
        api: ApiServer::Streamed,
        story: |node| evictions(node).boxed_local(),
        end: |_| {},
        calls: &["write_atomic", "StopContainer", "PATCH"],
    },
];

fn process(node: &Node, pod: &str, name: &str, life: Process) {
    node.runtime().script(For::PodContainer(pod.to_owned(), name.to_owned()), [life]);
}

/// Six pods: plain with an init container and a sidecar, in a crash loop, run to its end, edited, removed, removed and put back.
async fn statics(node: &mut Node) {
    process(node, "order-sim", "init", Process::exits(0, SECOND));
    process(node, "loop-sim", "app", Process::exits(1, 2 * SECOND));
    process(node, "once-sim", "app", Process::exits(0, 3 * SECOND));
    process(node, "edited-sim", "app", Process::forever().trapping_term(0, 2 * SECOND));
    process(node, "removed-sim", "app", Process::forever().ignoring_term());
    process(node, "back-sim", "app", Process::forever().trapping_term(0, 3 * SECOND));
    let edited = |n: u32| Manifest::new("edited").apps([Container::new("app").image(&format!("registry.local/e:{n}"))]);
    let back = Manifest::new("back").uid("back").grace(10);
    node.write("a.yaml", &Manifest::new("order").init("init").sidecar("side"));
    node.write("b.yaml", &Manifest::new("loop"));
    node.write("c.yaml", &Manifest::new("once").policy("Never"));
    node.write("d.yaml", &edited(1));
    node.write("e.yaml", &Manifest::new("removed").grace(4).sidecar("side"));
    node.write("f.yaml", &back);
    node.run(8 * SECOND).await;
    node.write("d.yaml", &edited(2));
    node.remove("e.yaml");
    node.remove("f.yaml");
    node.run(millis(500)).await;
    node.write("f.yaml", &back);
    node.run(20 * SECOND).await;
}

fn ran_once(node: &Node, file: &str) {
    let once = node.uid(file);
    assert_eq!(node.phase(&once), "Succeeded");
    assert_eq!(node.runtime().starts(&once, "app"), 1, "what ran to its end does not run again");
}

/// Static pods with mirror pods; their containers have hooks and a probe.
async fn hooks(node: &mut Node) {
    let sleep = |seconds: u32| json!({ "sleep": { "seconds": seconds } });
    let hooked = |image: &str| {
        let app =
            Container::new("app").image(image).with("lifecycle", json!({ "postStart": sleep(1), "preStop": sleep(2) }));
        let probe = json!({ "exec": { "command": ["probe"] }, "periodSeconds": 1, "failureThreshold": 2 });
        Manifest::new("hooked")
            .uid("hooked")
            .grace(8)
            .apps([app, Container::new("probed").with("livenessProbe", probe)])
    };
    node.write("a.yaml", &hooked("registry.local/h:1"));
    node.write("b.yaml", &Manifest::new("short").init("init"));
    process(node, "short-sim", "init", Process::exits(0, millis(300)));
    node.run(4 * SECOND).await;
    node.write("a.yaml", &hooked("registry.local/h:2"));
    node.run(6 * SECOND).await;
    node.remove("b.yaml");
    // Not to the moment at which a hook that began at another full second ends.
    node.run(millis(4_900)).await;
    node.remove("a.yaml");
    node.run(10 * SECOND).await;
}

/// Pods of the API server: with an init container and a sidecar, run to its end, deleted with grace, deleted by force and made again, changed.
async fn objects(node: &mut Node) {
    process(node, "job", "app", Process::exits(0, 2 * SECOND));
    process(node, "order", "init", Process::exits(0, SECOND));
    process(node, "slow", "app", Process::forever().ignoring_term());
    process(node, "forced", "app", Process::forever().trapping_term(0, 2 * SECOND));
    node.create(&Manifest::new("order").init("init").sidecar("side"));
    node.create(&Manifest::new("job").policy("Never"));
    node.create(&Manifest::new("slow").grace(4));
    node.create(&Manifest::new("forced"));
    node.run(5 * SECOND).await;
    node.delete("slow", None);
    node.delete("forced", Some(0));
    node.create(&Manifest::new("forced"));
    node.api().edit("order", |pod| {
        if let Some(spec) = &mut pod.spec {
            spec.containers[0].image = Some("registry.local/o:2".to_owned());
        }
    });
    node.run(8 * SECOND).await;
    node.delete("job", None);
    node.delete("order", Some(2));
    node.run(10 * SECOND).await;
}

/// A pod whose containers get other resources, one of them with a restart.
async fn resizes(node: &mut Node) {
    let pod = |cpu: &str, memory: &str| {
        let resources = json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}});
        let policy = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
        let stays = Container::new("stays").with("resources", resources.clone());
        let restarts = Container::new("restarts").with("resources", resources).with("resizePolicy", policy);
        Manifest::new("sized").uid("sized").apps([stays, restarts])
    };
    node.write("a.yaml", &pod("1", "64Mi"));
    node.run(3 * SECOND).await;
    node.write("a.yaml", &pod("1", "128Mi"));
    node.run(3 * SECOND).await;
    node.write("a.yaml", &pod("2", "128Mi"));
    node.run(20 * SECOND).await;
}

/// Pods that the node ends for good; one of them is deleted then.
async fn evictions(node: &mut Node) {
    process(node, "hog", "app", Process::forever().trapping_term(0, 2 * SECOND));
    let hog = node.create(&Manifest::new("hog").sidecar("side"));
    let other = node.create(&Manifest::new("other"));
    node.run(3 * SECOND).await;
    node.evict(&hog).await;
    node.run(millis(500)).await;
    node.evict(&other).await;
    node.run(6 * SECOND).await;
    node.delete("other", None);
    node.run(5 * SECOND).await;
}

/// Everything comes to its end.
async fn end(node: &mut Node, scenario: &Scenario) {
    node.assert_sound();
    node.heal();
    let limit = node.world().at() + 3 * MINUTE;
    while !node.missing().is_empty() {
        assert!(node.world().at() < limit, "{:?}\n{}", node.missing(), node.world().asked(80).join("\n"));
        node.run(SECOND).await;
        node.assert_sound();
    }
    (scenario.end)(node);
}

fn new(scenario: &Scenario) -> Node {
    Node::without_agent(Setup { seed: 1, api: scenario.api, ..Setup::default() })
}

/// How many calls a scenario makes that change something, by their kind.
fn calls(scenario: &Scenario) -> (u64, BTreeMap<String, u64>) {
    run(async {
        let mut node = new(scenario);
        node.start().await;
        (scenario.story)(&mut node).await;
        let (count, lines) = (node.world().effects(), node.world().asked(usize::MAX));
        end(&mut node, scenario).await;
        let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
        for kind in lines.iter().filter_map(|line| line.split_whitespace().nth(1)) {
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
        (count, kinds)
    })
}

#[test]
fn every_call_may_be_the_last() {
    let mut points = Vec::new();
    for (at, scenario) in SCENARIOS.iter().enumerate() {
        let (count, kinds) = calls(scenario);
        let absent: Vec<_> = scenario.calls.iter().filter(|kind| !kinds.contains_key(**kind)).collect();
        assert!(absent.is_empty(), "{} never comes to {absent:?}: {kinds:?}", scenario.name);
        println!("{}: {count} calls", scenario.name);
        points.extend((1..=count).flat_map(|effect| [(at, effect, false), (at, effect, true)]));
    }
    assert!((500..4000).contains(&points.len()), "{} points", points.len());
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(point) = points.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    if let Err(why) = std::panic::catch_unwind(|| cut_at(*point)) {
                        let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
                        failed.lock().unwrap().push((SCENARIOS[point.0].name, point.1, point.2, why));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    let first =
        failed.first().map(|(name, effect, before, why)| format!("{name}, call {effect}, before: {before}: {why}"));
    assert!(failed.is_empty(), "{} of {} points; {}", failed.len(), points.len(), first.unwrap_or_default());
}

/// The agent is cut off at this call of this scenario, before it or after it.
fn cut_at((at, effect, before): (usize, u64, bool)) {
    let scenario = &SCENARIOS[at];
    run(async {
        let mut node = new(scenario);
        // The next agent comes at once, or when what was to end had the time to.
        node.comes_back_after([millis(10), 7 * SECOND][effect as usize % 2]);
        if before {
            node.world().cut_before(effect);
        } else {
            node.world().cut_at(Some(effect));
        }
        node.start().await;
        (scenario.story)(&mut node).await;
        end(&mut node, scenario).await;
    });
}
