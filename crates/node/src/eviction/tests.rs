//! The eviction task on a paused clock: what it asks for, whom it ends, what the node is told.
use std::sync::Mutex;

use decide::eviction::Observation;
use model::pod::PodSource;
use pod::registry::PodEntry;
use tokio::sync::mpsc;

use super::*;

const MIB: u64 = 1 << 20;

/// A node in memory: 1000 bytes of memory and of disk.
#[derive(Default)]
struct World {
    /// Memory left, and whether the kernel tells of it.
    memory: Mutex<i64>,
    disk: Mutex<Option<i64>>,
    disks_known: Mutex<bool>,
    notice: tokio::sync::Notify,
    usage: Mutex<HashMap<PodUid, PodUsage>>,
    /// What happened, in words.
    told: Mutex<Vec<String>>,
    /// Disk that images give back.
    images: Mutex<i64>,
    slow: Mutex<bool>,
    looks: Mutex<u32>,
}

impl World {
    fn note(&self, text: impl Into<String>) {
        self.told.lock().unwrap().push(text.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.told.lock().unwrap())
    }
}

#[async_trait]
impl Figures for World {
    async fn disks(&self) -> Result<Disks, String> {
        if *self.disks_known.lock().unwrap() { Ok(Disks::default()) } else { Err("no runtime".into()) }
    }

    async fn node(&self, signals: &BTreeSet<Signal>) -> Observations {
        *self.looks.lock().unwrap() += 1;
        let slow = *self.slow.lock().unwrap();
        if slow {
            std::future::pending::<()>().await;
        }
        let memory = *self.memory.lock().unwrap();
        let disk = self.disk.lock().unwrap().unwrap_or(1000);
        let of = |signal: &Signal| match signal {
            Signal::MemoryAvailable => Some(memory),
            Signal::NodeFsAvailable | Signal::ImageFsAvailable => Some(disk),
            _ => None,
        };
        signals.iter().filter_map(|s| Some((*s, Observation { available: of(s)?, capacity: 1000 }))).collect()
    }

    async fn pods(&self, _: Resource) -> Result<HashMap<PodUid, PodUsage>, String> {
        self.note("figures");
        Ok(self.usage.lock().unwrap().clone())
    }

    async fn memory_notice(&self, left: &[(Signal, i64)]) {
        self.note(format!("notice {left:?}"));
        self.notice.notified().await;
    }
}

#[async_trait]
impl NodeReclaim for World {
    async fn reclaim_containers(&self) {
        self.note("containers");
    }

    async fn reclaim_images(&self) {
        self.note("images");
        *self.disk.lock().unwrap().get_or_insert(0) += *self.images.lock().unwrap();
    }
}

#[async_trait]
impl Admission for World {
    async fn pressures(&self, pressures: Vec<String>) {
        self.note(format!("admission {pressures:?}"));
    }
}

impl NodeEvents for World {
    fn event(&self, event: &NodeEvent) {
        self.note(format!("{}: {}", event.reason, event.message));
    }
}

struct Node {
    world: Arc<World>,
    registry: Arc<Registry>,
    ends: mpsc::Receiver<EndPod>,
    pressures: watch::Receiver<Pressures>,
    metrics: Arc<Metrics>,
}

fn config(hard: &[(&str, &str)]) -> EvictionConfig {
    let map = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    EvictionConfig { hard: map(hard), transition: Duration::from_secs(60), ..EvictionConfig::default() }
}

impl Node {
    async fn start(config: EvictionConfig) -> Self {
        let world = Arc::new(World::default());
        *world.memory.lock().unwrap() = 1000;
        *world.disks_known.lock().unwrap() = true;
        Self::of(world, config).await
    }

    async fn of(world: Arc<World>, config: EvictionConfig) -> Self {
        let registry = Arc::new(Registry::default());
        let metrics = Arc::new(Metrics::new().unwrap());
        let ports = EvictionPorts {
            figures: world.clone(),
            reclaim: world.clone(),
            admit: world.clone(),
            registry: registry.clone(),
            events: Events::default(),
            node_events: world.clone(),
            metrics: metrics.clone(),
        };
        let eviction = Eviction::start(config, ports).await.unwrap();
        let pressures = eviction.pressures();
        let (handle, ends) = pod::ends::channel();
        tokio::spawn(eviction.run(handle));
        Self { world, registry, ends, pressures, metrics }
    }

    /// A pod that uses this much memory.
    fn pod(&self, name: &str, memory: u64, priority: i32) -> Arc<PodEntry> {
        let json = format!(
            r#"{{"metadata": {{"name": "{name}", "namespace": "ns", "uid": "{name}"}},
                "spec": {{"priority": {priority}, "terminationGracePeriodSeconds": 600, "containers": [{{"name": "c"}}]}}}}"#
        );
        let pod = DesiredPod::new(serde_json::from_str(&json).unwrap(), PodSource::Api).unwrap();
        let uid = pod.uid().clone();
        let usage = PodUsage { memory: Some(memory * MIB), ..PodUsage::default() };
        self.world.usage.lock().unwrap().insert(uid.clone(), usage);
        let entry = Arc::new(PodEntry::new(uid, "ns", name, Some(pod), jiff::Timestamp::UNIX_EPOCH));
        self.registry.insert(entry.clone());
        entry
    }

    fn left(&self, memory: i64) {
        *self.world.memory.lock().unwrap() = memory;
    }

    /// The next pod that is asked to end: name and grace.
    async fn asked(&mut self) -> (String, Option<i64>, Failing) {
        let end =
            tokio::time::timeout(Duration::from_secs(100), self.ends.recv()).await.expect("a pod is to end").unwrap();
        (end.uid.to_string(), end.grace, end.failing)
    }
}

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

#[tokio::test(start_paused = true)]
async fn one_pod_at_a_time_until_there_is_enough() {
    let mut node = Node::start(config(&[("memory.available", "100")])).await;
    node.pod("small", 1, 0);
    let big = node.pod("big", 50, 0);
    node.pod("critical", 900, 2_000_000_000);
    node.pod("important", 70, 100);
    seconds(15).await;
    assert!(node.world.take().is_empty());
    node.left(40);
    let (name, grace, failing) = node.asked().await;
    assert_eq!((name.as_str(), grace), ("big", Some(1)));
    assert_eq!(failing.reason, "Evicted");
    assert_eq!(failing.disruption.map(|d| d.reason).as_deref(), Some("TerminationByKubelet"));
    assert_eq!(failing.message, "The node was low on resource: memory. Threshold quantity: 100, available: 40. ");
    assert_eq!(
        node.world.take(),
        [r#"admission ["MemoryPressure"]"#, "EvictionThresholdMet: Attempting to reclaim memory", "figures"]
    );
    assert!(node.pressures.borrow().memory);
    // While it ends, nobody else goes.
    seconds(8).await;
    assert!(node.ends.try_recv().is_err());
    {
        let mut view = big.view();
        view.finished = true;
        view.state = WorkerState::Terminated;
    }
    assert_eq!(node.asked().await.0, "small");
    node.left(500);
    node.registry.remove(&PodUid::new("small"));
    seconds(59).await;
    assert!(node.pressures.borrow().memory);
    seconds(20).await;
    assert!(!node.pressures.borrow().memory);
    assert!(node.ends.try_recv().is_err());
    assert_eq!(node.world.take().last().unwrap(), "admission []");
    let page = node.metrics.encode().unwrap();
    assert!(page.contains(r#"kubelet_evictions{eviction_signal="memory.available"} 2"#), "{page}");
    assert!(page.contains(r#"kubelet_eviction_stats_age_seconds_count{eviction_signal="memory.available"} 2"#));
}

#[tokio::test(start_paused = true)]
async fn one_that_does_not_end_is_passed_over_after_its_time() {
    let mut node = Node::start(config(&[("memory.available", "100")])).await;
    node.pod("stuck", 50, 0);
    node.pod("next", 1, 0);
    node.left(40);
    assert_eq!(node.asked().await.0, "stuck");
    let before = tokio::time::Instant::now();
    assert_eq!(node.asked().await.0, "next");
    assert!(before.elapsed() >= Duration::from_secs(30), "{:?}", before.elapsed());
    // Nobody is left: the node goes on looking.
    seconds(120).await;
    assert!(node.ends.try_recv().is_err());
    node.pod("late", 1, 0);
    assert_eq!(node.asked().await.0, "late");
}

#[tokio::test(start_paused = true)]
async fn soft_thresholds_give_time_and_hard_ones_take_it_back() {
    let mut soft = config(&[("memory.available", "50")]);
    soft.soft = [("memory.available".to_owned(), "100".to_owned())].into();
    soft.soft_grace = [("memory.available".to_owned(), Duration::from_secs(90))].into();
    soft.max_pod_grace = 300;
    let mut node = Node::start(soft).await;
    node.pod("big", 50, 0);
    node.pod("small", 5, 0);
    seconds(5).await;
    node.left(80);
    let since = tokio::time::Instant::now();
    let (name, grace, _) = node.asked().await;
    assert_eq!((name.as_str(), grace), ("big", Some(300)));
    assert!(since.elapsed() >= Duration::from_secs(90));
    // It takes its time, and nobody else goes.
    seconds(100).await;
    assert!(node.ends.try_recv().is_err());
    node.left(40);
    let (name, grace, _) = node.asked().await;
    assert_eq!((name.as_str(), grace), ("big", Some(1)));
}

#[tokio::test(start_paused = true)]
async fn disks_first_take_back_what_nobody_uses() {
    let mut node = Node::start(config(&[("nodefs.available", "10%"), ("imagefs.available", "15%")])).await;
    node.pod("p", 1, 0);
    seconds(5).await;
    *node.world.images.lock().unwrap() = 200;
    *node.world.disk.lock().unwrap() = Some(90);
    seconds(10).await;
    assert_eq!(
        node.world.take(),
        [
            r#"admission ["DiskPressure"]"#,
            "EvictionThresholdMet: Attempting to reclaim ephemeral-storage",
            "containers",
            "images"
        ]
    );
    assert!(node.ends.try_recv().is_err());
    // The second time there is not enough to take.
    *node.world.images.lock().unwrap() = 1;
    *node.world.disk.lock().unwrap() = Some(120);
    let (_, _, failing) = node.asked().await;
    assert_eq!(
        failing.message,
        "The node was low on resource: ephemeral-storage. Threshold quantity: 150, available: 120. "
    );
    assert_eq!(
        node.world.take()[..4],
        ["EvictionThresholdMet: Attempting to reclaim ephemeral-storage", "containers", "images", "figures"]
    );
}

#[tokio::test(start_paused = true)]
async fn the_kernels_notice_is_not_waited_for_twice_a_second() {
    let mut wanted = config(&[("memory.available", "10%")]);
    wanted.kernel_notification = true;
    let mut node = Node::start(wanted).await;
    node.pod("p", 1, 0);
    seconds(3).await;
    assert_eq!(node.world.take(), ["notice [(MemoryAvailable, 100)]"]);
    node.left(40);
    node.world.notice.notify_one();
    let before = tokio::time::Instant::now();
    assert_eq!(node.asked().await.0, "p");
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    node.left(500);
    node.registry.remove(&PodUid::new("p"));
    seconds(2).await;
    let looks = *node.world.looks.lock().unwrap();
    for _ in 0..50 {
        node.world.notice.notify_one();
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    let more = *node.world.looks.lock().unwrap() - looks;
    assert!((1..=3).contains(&more), "{more} looks in 2 s");
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_does_not_answer_changes_nothing() {
    let node = Node::start(config(&[("memory.available", "100"), ("nodefs.available", "10%")])).await;
    node.pod("p", 1, 0);
    *node.world.slow.lock().unwrap() = true;
    node.left(40);
    seconds(100).await;
    assert!(node.world.take().is_empty() && !node.pressures.borrow().memory);
    *node.world.slow.lock().unwrap() = false;
    seconds(20).await;
    assert!(node.pressures.borrow().memory);
}

#[tokio::test(start_paused = true)]
async fn without_the_runtime_memory_is_watched_all_the_same() {
    let world = Arc::new(World::default());
    *world.memory.lock().unwrap() = 40;
    *world.disk.lock().unwrap() = Some(10);
    let mut node = Node::of(world, config(&[("memory.available", "100"), ("imagefs.available", "15%")])).await;
    // True before the node tells anything.
    assert_eq!(*node.pressures.borrow(), Pressures { memory: true, ..Pressures::default() });
    node.pod("p", 1, 0);
    assert_eq!(node.asked().await.0, "p");
    node.registry.remove(&PodUid::new("p"));
    *node.world.disks_known.lock().unwrap() = true;
    seconds(20).await;
    assert!(node.pressures.borrow().disk);
}
