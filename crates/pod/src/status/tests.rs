//! The writer against a fake API, under paused time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cluster::calls::PodApi;
use cluster::{ClusterError, ClusterResult, ErrorKind};
use jiff::Timestamp;
use model::api::{Node, Pod, PodCondition, PodStatus};
use model::pod::{DesiredPod, PodSource, PodUid};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{Mirror, Mirrors, StatusQueue, StatusWriter};
use crate::ports::{Random, Tasks};
use crate::registry::{PodEntry, Registry};

/// An API server with pods, that can be down, refuse one pod, and counts what it is asked.
#[derive(Default)]
struct FakeApi(Mutex<State>);

#[derive(Default)]
struct State {
    pods: HashMap<String, Value>,
    version: u64,
    down: bool,
    refuse: Option<String>,
    /// The next deletion of this pod finds none, and its next creation finds no node, as by a server whose admission has seen nothing yet.
    unseen: Option<String>,
    asked: Vec<String>,
    /// Happens while the next patch is under way.
    meanwhile: Option<Box<dyn FnOnce() + Send>>,
}

impl FakeApi {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn put(&self, pod: Value) -> Pod {
        let mut state = self.state();
        state.version += 1;
        let mut pod = pod;
        pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        state.pods.insert(name, pod.clone());
        serde_json::from_value(pod).unwrap()
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.state().asked)
    }

    fn answer(&self, what: String, name: &str) -> ClusterResult<()> {
        let mut state = self.state();
        state.asked.push(what.clone());
        if state.down {
            return Err(ClusterError::new(what, ErrorKind::Unreachable, "connection refused"));
        }
        if state.refuse.as_deref() == Some(name) {
            return Err(ClusterError::from_answer(what, 403, None, b"no"));
        }
        Ok(())
    }
}

/// Applies a strategic merge patch as far as the writer makes use of it.
fn apply(target: &mut Value, patch: &Value) {
    let (Some(target), Some(patch)) = (target.as_object_mut(), patch.as_object()) else { panic!("not a map") };
    for (key, value) in patch {
        match (key.as_str(), value) {
            (k, _) if k.starts_with("$setElementOrder/") => {}
            (_, Value::Null) => drop(target.remove(key)),
            ("conditions", Value::Array(changes)) => {
                let held = target.entry(key.clone()).or_insert(json!([]));
                for change in changes {
                    let list = held.as_array_mut().unwrap();
                    match list.iter_mut().find(|c| c["type"] == change["type"]) {
                        Some(c) => apply(c, change),
                        None => list.push(change.clone()),
                    }
                }
            }
            (_, Value::Object(_)) if target.get(key).is_some_and(Value::is_object) => {
                apply(target.get_mut(key).unwrap(), value);
            }
            _ => drop(target.insert(key.clone(), value.clone())),
        }
    }
}

#[async_trait]
impl PodApi for FakeApi {
    async fn get_pod(&self, _: &str, name: &str) -> ClusterResult<Pod> {
        panic!("the writer reads nothing, but asked for {name}")
    }

    async fn create_pod(&self, pod: &Pod) -> ClusterResult<Pod> {
        let name = pod.metadata.name.clone().unwrap();
        self.answer(format!("create {name}"), &name)?;
        if self.state().unseen.take_if(|n| *n == name).is_some() {
            return Err(missing("the node"));
        }
        let mut value = serde_json::to_value(pod).unwrap();
        let uid = format!("api-{}", self.state().version);
        value["metadata"]["uid"] = json!(uid);
        Ok(self.put(value))
    }

    async fn patch_pod_status(&self, _: &str, name: &str, patch: &Value) -> ClusterResult<Pod> {
        self.answer(format!("patch {name}"), name)?;
        let mut pod = self.state().pods.get(name).cloned().ok_or_else(|| missing(name))?;
        if patch["metadata"]["uid"] != pod["metadata"]["uid"] {
            let body = br#"{"status":"Failure","code":422,"message":"Pod \"a\" is invalid: metadata.uid: Invalid value: \"x\": field is immutable"}"#;
            return Err(ClusterError::from_answer("patch", 422, None, body));
        }
        apply(&mut pod, patch);
        let meanwhile = self.state().meanwhile.take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        Ok(self.put(pod))
    }

    async fn delete_pod(&self, _: &str, name: &str, grace: i64, uid: Option<&str>) -> ClusterResult<()> {
        self.answer(format!("delete {name} {grace} {}", uid.unwrap_or("-")), name)?;
        if self.state().unseen.take_if(|n| n == name).is_some() {
            return Err(missing(name));
        }
        self.state().pods.remove(name).map(drop).ok_or_else(|| missing(name))
    }
}

fn missing(name: &str) -> ClusterError {
    ClusterError::from_answer(format!("pod {name}"), 404, None, b"")
}

struct World {
    api: Arc<FakeApi>,
    registry: Arc<Registry>,
    mirrors: Mirrors,
    queue: StatusQueue,
    node: watch::Sender<Option<Arc<Node>>>,
    tasks: Tasks,
}

impl World {
    fn start() -> Self {
        let queue = StatusQueue::watched();
        let (node, node_rx) = watch::channel(None);
        let world = Self {
            api: Arc::default(),
            registry: Arc::default(),
            mirrors: Mirrors::new(queue.clone()),
            queue,
            node,
            tasks: Tasks::default(),
        };
        let writer = StatusWriter::new(
            world.api.clone(),
            world.registry.clone(),
            world.mirrors.clone(),
            world.queue.clone(),
            node_rx,
            Random::seeded(1),
        );
        world.tasks.spawn_until_stop(writer.run());
        world
    }

    /// A pod of the API that has a worker.
    fn pod(&self, name: &str) -> DesiredPod {
        let stored = self.api.put(json!({
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
            "spec": {"containers": [{"name": "c"}]}, "status": {"phase": "Pending"},
        }));
        let pod = DesiredPod::new(stored, PodSource::Api).unwrap();
        self.enter(&pod);
        pod
    }

    fn enter(&self, pod: &DesiredPod) {
        let entry =
            PodEntry::new(pod.uid().clone(), pod.namespace(), pod.name(), Some(pod.clone()), Timestamp::UNIX_EPOCH);
        self.registry.insert(Arc::new(entry));
    }

    /// The watch shows what the API holds.
    fn see(&self, pod: &DesiredPod) {
        let held = self.api.state().pods.get(pod.name()).cloned().unwrap();
        let fresh = DesiredPod::new(serde_json::from_value(held).unwrap(), PodSource::Api).unwrap();
        self.registry.get(pod.uid()).unwrap().view().desired = Some(fresh);
        self.queue.changed(pod);
    }

    /// The watch shows a mirror pod as the API holds it.
    fn watch(&self, name: &str) {
        let held = self.api.state().pods[name].clone();
        self.mirrors.upsert(Mirror::of(&serde_json::from_value(held).unwrap()).unwrap());
    }

    fn show(&self, pod: &DesiredPod, status: PodStatus) {
        self.registry.get(pod.uid()).unwrap().view().status = status;
        self.queue.changed(pod);
    }

    fn held(&self, name: &str) -> Value {
        self.api.state().pods[name]["status"].clone()
    }
}

fn phase(phase: &str) -> PodStatus {
    PodStatus { phase: Some(phase.into()), ..PodStatus::default() }
}

fn condition(kind: &str, status: &str) -> PodCondition {
    PodCondition { type_: kind.into(), status: status.into(), ..PodCondition::default() }
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_is_one_patch_and_its_echo_none() {
    let world = World::start();
    let pod = world.pod("a");
    world.show(&pod, phase("Running"));
    settle().await;
    assert_eq!(world.api.asked(), ["patch a"]);
    // Before the watch shows it, the answer counts; afterwards the watch's copy.
    world.queue.changed(&pod);
    settle().await;
    world.see(&pod);
    settle().await;
    assert_eq!(world.api.asked(), Vec::<String>::new());
    assert_eq!(world.held("a")["phase"], "Running");
}

#[tokio::test(start_paused = true)]
async fn what_others_write_over_ours_is_put_right_and_theirs_stays() {
    let world = World::start();
    let pod = world.pod("a");
    let ours = PodStatus { conditions: Some(vec![condition("Ready", "True")]), ..phase("Running") };
    world.show(&pod, ours);
    settle().await;
    let mut meddled = world.api.state().pods["a"].clone();
    meddled["status"]["conditions"] =
        json!([{"type": "example.com/gate", "status": "True"}, {"type": "Ready", "status": "False"}]);
    world.api.put(meddled);
    world.see(&pod);
    settle().await;
    assert_eq!(world.api.asked(), ["patch a", "patch a"]);
    let held = world.held("a")["conditions"].clone();
    assert_eq!(held, json!([{"type": "example.com/gate", "status": "True"}, {"type": "Ready", "status": "True"}]));
}

#[tokio::test(start_paused = true)]
async fn an_outage_ends_in_one_patch_for_each_changed_pod() {
    let world = World::start();
    let pods: Vec<DesiredPod> = (0..20).map(|n| world.pod(&format!("p{n}"))).collect();
    world.api.state().down = true;
    for n in 0..600 {
        for pod in &pods[..10] {
            let restarts = PodStatus { message: Some(format!("{n}")), ..phase("Running") };
            world.show(pod, restarts);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let tries = world.api.asked().len();
    assert!((15..60).contains(&tries), "{tries} tries in ten minutes");
    world.api.state().down = false;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut asked = world.api.asked();
    asked.sort();
    let mut wanted: Vec<String> = (0..10).map(|n| format!("patch p{n}")).collect();
    wanted.sort();
    assert_eq!(asked, wanted);
    assert_eq!(world.held("p3")["message"], "599");
}

#[tokio::test(start_paused = true)]
async fn a_refused_pod_holds_up_nobody_and_is_tried_again() {
    let world = World::start();
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.api.state().refuse = Some("a".into());
    world.show(&a, phase("Running"));
    settle().await;
    world.show(&b, phase("Running"));
    settle().await;
    assert_eq!(world.held("b")["phase"], "Running");
    world.api.state().refuse = None;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(world.held("a")["phase"], "Running");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_goes_when_it_has_ended_after_its_last_status() {
    let world = World::start();
    let pod = world.pod("a");
    let mut stored = world.api.state().pods["a"].clone();
    stored["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    world.api.put(stored);
    world.see(&pod);
    world.show(&pod, phase("Running"));
    settle().await;
    assert_eq!(world.api.asked(), ["patch a"]);
    world.registry.get(pod.uid()).unwrap().view().finished = true;
    world.show(&pod, phase("Succeeded"));
    settle().await;
    assert_eq!(world.api.asked(), ["patch a", "delete a 0 uid-a"]);
    world.queue.changed(&pod);
    settle().await;
    assert!(!world.api.state().pods.contains_key("a"));
}

#[tokio::test(start_paused = true)]
async fn a_pod_of_the_same_name_is_not_touched() {
    let world = World::start();
    let pod = world.pod("a");
    let mut other = world.api.state().pods["a"].clone();
    other["metadata"]["uid"] = json!("another");
    world.api.put(other);
    world.show(&pod, phase("Running"));
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(world.api.asked(), ["patch a"]);
    assert_eq!(world.held("a")["phase"], "Pending");
}

fn static_pod(hash: &str) -> DesiredPod {
    let pod = json!({
        "metadata": {"name": "s", "namespace": "ns", "uid": hash, "annotations": {"kubernetes.io/config.hash": hash}},
        "spec": {"containers": [{"name": "c"}], "nodeName": "n1"},
    });
    DesiredPod::new(serde_json::from_value(pod).unwrap(), PodSource::File).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_mirror_pod_follows_its_static_pod() {
    let world = World::start();
    let pod = static_pod("h1");
    world.enter(&pod);
    world.mirrors.own(&pod);
    world.show(&pod, phase("Running"));
    settle().await;
    assert_eq!(world.api.asked(), Vec::<String>::new(), "before the API was listed nobody knows that there is none");
    world.mirrors.replace(Vec::new());
    settle().await;
    assert_eq!(world.api.asked(), Vec::<String>::new(), "without a node it has no owner");
    let node = json!({"metadata": {"name": "n1", "uid": "node-uid"}});
    world.api.state().unseen = Some("s".into());
    world.node.send_replace(Some(Arc::new(serde_json::from_value(node).unwrap())));
    settle().await;
    assert_eq!(world.api.asked(), ["create s"]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.api.asked(), ["create s"], "that its node was not found is not believed");
    world.watch("s");
    settle().await;
    assert_eq!(world.api.asked(), ["patch s"]);
    let made = world.api.state().pods["s"].clone();
    assert_eq!(made["metadata"]["annotations"]["kubernetes.io/config.mirror"], "h1");
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(made["status"]["phase"], "Running");

    // Somebody deletes it: it goes at once and comes back.
    let mut deleting = made.clone();
    deleting["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    world.mirrors.upsert(Mirror::of(&world.api.put(deleting)).unwrap());
    settle().await;
    let uid = made["metadata"]["uid"].as_str().unwrap();
    assert_eq!(world.api.asked(), [format!("delete s 0 {uid}"), "create s".into()]);
    world.watch("s");
    settle().await;
    assert_eq!(world.api.asked(), ["patch s"]);

    // Another form of the static pod: the old mirror goes, a new one comes.
    world.registry.remove(pod.uid());
    world.mirrors.disown("s_ns", pod.uid());
    let changed = static_pod("h2");
    world.enter(&changed);
    world.mirrors.own(&changed);
    settle().await;
    let asked = world.api.asked();
    assert!(asked[0].starts_with("delete s 0 ") && asked[1] == "create s", "{asked:?}");
    assert_eq!(world.api.state().pods["s"]["metadata"]["annotations"]["kubernetes.io/config.mirror"], "h2");
    world.watch("s");

    // It is deleted while a status is on its way: the answer does not bring it back.
    let uid = PodUid::new(world.api.state().pods["s"]["metadata"]["uid"].as_str().unwrap());
    let mirrors = world.mirrors.clone();
    world.api.state().meanwhile = Some(Box::new(move || assert!(mirrors.remove(&uid))));
    world.show(&changed, phase("Running"));
    settle().await;
    assert_eq!(world.api.asked(), ["patch s", "create s"]);
    world.watch("s");
    settle().await;
    world.api.asked();

    world.registry.remove(changed.uid());
    world.mirrors.disown("s_ns", changed.uid());
    settle().await;
    assert!(world.api.asked()[0].starts_with("delete s 0 "));
    assert!(world.api.state().pods.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_mirror_pod_whose_static_pod_went_while_nobody_looked_is_deleted() {
    let world = World::start();
    let left = json!({"metadata": {"name": "s", "namespace": "ns", "uid": "m1", "annotations": {"kubernetes.io/config.mirror": "h"}}});
    let left = world.api.put(left);
    world.api.state().unseen = Some("s".into());
    world.mirrors.replace(vec![Mirror::of(&left).unwrap()]);
    settle().await;
    assert_eq!(world.api.asked(), ["delete s 0 m1"]);
    assert!(world.api.state().pods.contains_key("s"));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.api.asked(), ["delete s 0 m1"], "that it was not found is not believed");
    assert!(world.api.state().pods.is_empty());
    assert!(!world.mirrors.remove(&PodUid::new("m1")), "it is forgotten");
}
