//! The collection of images on a paused clock, with the fake runtime.

use std::sync::Mutex;

use decide::text::go_duration;
use fakes::{FakeRuntime, Fault, Rule};
use model::api::Pod;
use model::pod::{DesiredPod, PodSource};
use pod::events::Events;
use pod::images::{Images, PullLimits, Wanted};
use pod::registry::PodEntry;
use serde_json::json;

use super::*;
use crate::testing::Told;

/// Runs all that is due, without moving the clock much.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

struct World {
    runtime: FakeRuntime,
    registry: Arc<Registry>,
    told: Arc<Told>,
    metrics: Arc<Metrics>,
    images: Arc<Images>,
    space: Arc<Mutex<Result<Space, String>>>,
    gc: ImageGc,
    _tasks: Tasks,
}

const PERCENT: u64 = 1 << 20;

fn space(percent_used: u64) -> Result<Space, String> {
    Ok(Space { capacity: 100 * PERCENT, available: (100 - percent_used) * PERCENT })
}

impl World {
    fn new(policy: ImageGcPolicy) -> Self {
        let runtime = FakeRuntime::new(1);
        let clock = Clock::virtual_from("2026-11-30T08:00:00Z".parse().unwrap());
        let metrics = Arc::new(Metrics::new().unwrap());
        let (reader, mutator) = (Arc::new(runtime.clone()), Arc::new(runtime.clone()));
        let limits = PullLimits { parallel: None, qps: 0, burst: 0 };
        let images = Images::new(reader.clone(), mutator, clock.clone(), metrics.clone(), Events::default(), limits);
        let (registry, told, tasks) = (Arc::new(Registry::default()), Arc::new(Told::default()), Tasks::default());
        let used = Arc::new(Mutex::new(space(10)));
        let shown = used.clone();
        let ports = ImagePorts {
            reader,
            images: images.collection(),
            space: Arc::new(move |_| shown.lock().unwrap().clone()),
            registry: registry.clone(),
            events: told.clone(),
            metrics: metrics.clone(),
            clock,
        };
        let gc = start(policy, ports, &tasks);
        Self { runtime, registry, told, metrics, images: Arc::new(images), space: used, gc, _tasks: tasks }
    }

    fn add(&self, name: &str, percent: u64) -> String {
        let id = self.runtime.add_image(name);
        self.runtime.edit_image(name, |i| i.size = percent * PERCENT);
        id
    }

    fn fill(&self, percent: u64) {
        *self.space.lock().unwrap() = space(percent);
    }

    async fn container(&self, name: &str, mounts: Vec<v1::Mount>, uid: &str) -> String {
        use cri::port::RuntimeMutator;
        let sandbox = v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: "p".into(),
                uid: uid.into(),
                namespace: "ns".into(),
                attempt: 0,
            }),
            ..Default::default()
        };
        let id = self.runtime.run_pod_sandbox(sandbox.clone(), "").await.unwrap();
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "c".into(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: name.into(), ..Default::default() }),
            labels: [(POD_UID.to_owned(), uid.to_owned())].into(),
            mounts,
            ..Default::default()
        };
        self.runtime.create_container(&id, config, sandbox).await.unwrap()
    }

    fn removed(&self) -> Vec<String> {
        let calls = self.runtime.calls_of("RemoveImage");
        self.runtime.forget_calls();
        calls.into_iter().map(|c| c.subject).collect()
    }

    fn counted(&self, reason: &str) -> bool {
        let text = self.metrics.encode().unwrap();
        text.contains(&format!("kubelet_image_garbage_collected_total{{reason=\"{reason}\"}} 1"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_brought_below_the_low_threshold() {
    let w = World::new(ImageGcPolicy::default());
    let (used, spare) = (w.add("used", 3), w.add("spare", 3));
    w.container("used", Vec::new(), "u1").await;
    settle().await;
    w.fill(84);
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.removed(), [""; 0], "below the high threshold");
    w.fill(85);
    let late = w.add("late", 3);
    tokio::time::sleep(PERIOD).await;
    // 5 % are to be freed and 3 can be: one image is used, one is too young.
    assert_eq!(w.removed(), [spare]);
    assert_eq!(w.told.take(), ["FreeDiskSpaceFailed"]);
    assert!(w.counted("space"));
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.removed(), [late]);
    assert_eq!(w.told.take(), ["FreeDiskSpaceFailed", "ImageGCFailed"], "the second time in a row");
    w.fill(10);
    tokio::time::sleep(PERIOD).await;
    assert_eq!((w.removed(), w.told.take()), (vec![], vec![]));
    assert!(w.runtime.calls_of("ListImages").len() <= 1 && !used.is_empty());
}

#[tokio::test(start_paused = true)]
async fn images_that_nothing_used_for_long_go() {
    let max_age = Duration::from_secs(3600);
    let w = World::new(ImageGcPolicy { max_age, high_percent: 100, ..ImageGcPolicy::default() });
    let old = w.add("old", 1);
    let pinned = w.add("pinned", 1);
    w.runtime.edit_image("pinned", |i| i.pinned = true);
    settle().await;
    tokio::time::sleep(max_age).await;
    assert_eq!(w.removed(), [""; 0], "the agent is not older than {}", go_duration(max_age));
    w.add("new", 1);
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.removed(), [old]);
    assert!(w.counted("age") && !pinned.is_empty());
}

#[tokio::test(start_paused = true)]
async fn eviction_gets_all_that_is_not_used() {
    // Switched off otherwise.
    let w = World::new(ImageGcPolicy { high_percent: 100, ..ImageGcPolicy::default() });
    settle().await;
    let (one, two) = (w.add("one", 1), w.add("two", 2));
    let data = w.add("data", 5);
    let spec = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u2"}, "spec": {
        "containers": [{"name": "c"}], "volumes": [{"name": "v", "image": {"reference": "data"}}]}});
    let pod: Pod = serde_json::from_value(spec).unwrap();
    let desired = DesiredPod::new(pod, PodSource::Api).unwrap();
    w.registry.insert(Arc::new(PodEntry::new(
        desired.uid().clone(),
        "ns",
        "p",
        Some(desired.clone()),
        Timestamp::UNIX_EPOCH,
    )));
    let image = v1::ImageSpec { image: data.clone(), ..Default::default() };
    let app = w.add("app", 1);
    w.container("app", vec![v1::Mount { image: Some(image), ..Default::default() }], "u2").await;
    assert_eq!(w.gc.remove_unused().await, Ok(0), "all are too young");
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.removed(), [""; 0]);
    // A container of it is about to be made.
    let wanted = Wanted { image: "one", policy: "Never", container: "c" };
    w.images.ensure(&desired, &wanted, &v1::PodSandboxConfig::default(), "").await.unwrap();
    assert_eq!(w.gc.remove_unused().await, Ok(2 * PERCENT));
    assert_eq!(w.removed(), [two]);
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.gc.remove_unused().await, Ok(PERCENT));
    assert_eq!(w.removed(), [one]);
    assert!(![data, app].iter().any(String::is_empty));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_had_or_removed_is_told_when_it_happens_again() {
    let w = World::new(ImageGcPolicy::default());
    let (a, b) = (w.add("a", 3), w.add("b", 3));
    settle().await;
    *w.space.lock().unwrap() = Ok(Space::default());
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.told.take(), ["InvalidDiskCapacity"]);
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.told.take(), ["InvalidDiskCapacity", "ImageGCFailed"]);
    // One image is held by something; the other one goes all the same.
    let mut ids = [a, b];
    ids.sort();
    w.runtime.inject(Rule::new("RemoveImage", Fault::Fail(2, "image is in use".into())).about(ids[0].as_str()));
    w.fill(88);
    w.runtime.forget_calls();
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.removed().len(), 2);
    assert_eq!(w.told.take(), ["ImageGCFailed"]);
    // Somebody else removed it meanwhile: nothing is left, and nothing breaks.
    w.runtime.heal();
    w.runtime.go_down();
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.told.take(), ["ImageGCFailed"]);
    w.runtime.come_up();
    w.fill(10);
    tokio::time::sleep(PERIOD).await;
    assert_eq!(w.told.take(), [""; 0]);
}
