//! The managers, with device plugins behind real sockets.

use std::path::Path;
use std::time::Duration;

use decide::cpus::Options;
use fakes::{Allocate, FakeClaimDriver, FakeDevicePlugin};
use host::proc::{CpuPlace, NumaNode, NumaTopology};
use k8s_openapi::api::resource::v1::ResourceClaim;
use model::pod::PodSource;
use plugins::registration::Handler;
use serde_json::{Value, json};

use super::*;

const GPU: &str = "example.com/gpu";

struct Node {
    managers: Managers,
    tasks: Tasks,
}

/// Two NUMA nodes with two CPUs and 1000 bytes each.
fn machine() -> NumaTopology {
    let place = |n: usize| CpuPlace { core: n, socket: n / 2, numa: n / 2, cache: None };
    let node = |to: [u32; 2]| NumaNode { memory: 1000, huge_pages: vec![], distances: to.to_vec() };
    NumaTopology {
        cpus: (0..4).map(|n| (n, place(n))).collect(),
        nodes: BTreeMap::from([(0, node([10, 20])), (1, node([20, 10]))]),
    }
}

fn config(dir: &Path) -> Config {
    Config {
        root: dir.to_owned(),
        device_plugins: dir.join("device-plugins"),
        health_status: true,
        no_quota: true,
        topology: machine(),
        ..Config::default()
    }
}

fn with_policies(dir: &Path) -> Config {
    let reserved: decide::memory::Amounts = [("memory".to_owned(), 100)].into();
    Config {
        cpus: Some(CpuConfig { options: Options::default(), reserved: CpuSet::default(), count: 1 }),
        memory: Some(MemoryConfig { reserved: BTreeMap::from([(0, reserved.clone())]), whole: reserved }),
        ..config(dir)
    }
}

/// Claims of the API server: `x` of pod `p`, and of no other.
struct Objects;

#[async_trait]
impl ClaimObjects for Objects {
    async fn claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, String> {
        let result = json!({"driver": "d.example.com", "pool": "pool", "device": name, "request": "r"});
        let object = json!({
            "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-{name}")},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}, {"resource": "pods", "name": "q", "uid": "q"}],
            },
        });
        if name == "absent" { Err("not found".into()) } else { Ok(serde_json::from_value(object).unwrap()) }
    }

    fn driver_changed(&self, _: &str, _: bool) {}
}

impl Node {
    async fn start(config: Config) -> Result<Self, String> {
        let tasks = Tasks::default();
        let metrics = Arc::new(Metrics::new().unwrap());
        let managers = Managers::start(config, Arc::new(Objects), Arc::new(|_| {}), metrics, &tasks)
            .await
            .map_err(|e| e.to_string())?;
        Ok(Self { managers, tasks })
    }

    async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(20)).await);
    }

    async fn until(&self, capacity: usize, allocatable: usize) {
        let mut amounts = self.managers.amounts();
        let wanted = Amount { capacity, allocatable };
        let there = amounts.wait_for(|a| a.get(GPU) == Some(&wanted));
        tokio::time::timeout(Duration::from_secs(30), there).await.expect("amounts").unwrap();
    }

    async fn allocate(&self, pod: &DesiredPod) -> Result<(), String> {
        self.managers.allocate(pod, false).await.map_err(|r| format!("{}: {}", r.reason, r.message))
    }

    async fn env(&self, pod: &DesiredPod, container: &str) -> String {
        let grant = self.managers.container(pod, &pod.container(container).unwrap()).await.unwrap();
        grant.devices.envs.into_iter().map(|(_, v)| v).next().unwrap_or_default()
    }
}

/// A Guaranteed pod of one container.
fn pod(uid: &str, limits: serde_json::Value) -> DesiredPod {
    let container = json!({"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}});
    pod_of(uid, json!({"containers": [container]}))
}

fn pod_of(uid: &str, spec: serde_json::Value) -> DesiredPod {
    let object = json!({"metadata": {"name": uid, "namespace": "default", "uid": uid}, "spec": spec});
    DesiredPod::new(serde_json::from_value(object).unwrap(), PodSource::Api).unwrap()
}

fn uid(pod: &str) -> PodUid {
    PodUid::new(pod)
}

#[tokio::test]
async fn devices_are_given_once_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path())).await.unwrap();
    assert!(node.managers.new_machine());
    let plugin = FakeDevicePlugin::start(
        &dir.path().join("device-plugins"),
        GPU,
        &[("a", true, -1), ("b", true, -1)],
        true,
        true,
    );
    plugin.register().await.unwrap();
    node.until(2, 2).await;
    let [one, two, three] = ["one", "two", "three"].map(|name| pod(name, json!({"example.com/gpu": "1"})));
    assert!(node.managers.may_wait(&one) && node.managers.counts(GPU));
    let (first, second) = tokio::join!(node.allocate(&one), node.allocate(&two));
    assert_eq!((first, second), (Ok(()), Ok(())));
    let mut given = [node.env(&one, "c").await, node.env(&two, "c").await];
    given.sort();
    assert_eq!(given, ["a", "b"]);
    assert_eq!(
        node.allocate(&three).await.unwrap_err(),
        "UnexpectedAdmissionError: Allocate failed due to requested number of devices unavailable for example.com/gpu. \
         Requested: 1, Available: 0, which is unexpected"
    );
    assert!(plugin.calls().iter().any(|c| c == "prepare a"));
    node.managers.ended(&uid("one"));
    node.allocate(&three).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn what_a_plugin_refuses_is_free_again() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path())).await.unwrap();
    let plugin = FakeDevicePlugin::start(&dir.path().join("device-plugins"), GPU, &[("a", true, -1)], false, false);
    plugin.register().await.unwrap();
    node.until(1, 1).await;
    plugin.allocate(Allocate::Refuse("busy".into()));
    let one = pod("one", json!({"example.com/gpu": "1"}));
    assert_eq!(
        node.allocate(&one).await.unwrap_err(),
        "UnexpectedAdmissionError: Allocate failed due to rpc error: code = Unknown desc = busy, which is unexpected"
    );
    // A task that is cut off while a plugin hangs frees what it held.
    plugin.allocate(Allocate::Hang);
    let cut = tokio::time::timeout(Duration::from_millis(300), node.allocate(&one)).await;
    assert!(cut.is_err());
    plugin.allocate(Allocate::Grant);
    node.allocate(&pod("two", json!({"example.com/gpu": "1"}))).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn a_restarted_agent_knows_who_has_what() {
    let dir = tempfile::tempdir().unwrap();
    let devices = [("a", true, -1), ("b", true, -1)];
    let node = Node::start(config(dir.path())).await.unwrap();
    let plugin = FakeDevicePlugin::start(&dir.path().join("device-plugins"), GPU, &devices, false, false);
    plugin.register().await.unwrap();
    node.until(2, 2).await;
    let one = pod("one", json!({"example.com/gpu": "1"}));
    node.allocate(&one).await.unwrap();
    node.stop().await;
    drop(plugin);

    let node = Node::start(config(dir.path())).await.unwrap();
    assert!(!node.managers.new_machine());
    node.until(0, 0).await;
    assert!(node.managers.may_wait(&one));
    // It runs: the plugin is not needed.
    node.managers.allocate(&one, true).await.unwrap();
    assert_eq!(node.env(&one, "c").await, "a");
    let after_reboot = node.managers.allocate(&one, false).await.unwrap_err();
    assert!(after_reboot.message.contains("no healthy devices present"), "{after_reboot:?}");
    node.stop().await;
}

#[tokio::test]
async fn init_containers_pass_devices_on_and_sidecars_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path())).await.unwrap();
    let devices = [("a", true, -1), ("b", true, -1), ("c", true, -1)];
    let plugin = FakeDevicePlugin::start(&dir.path().join("device-plugins"), GPU, &devices, false, false);
    plugin.register().await.unwrap();
    node.until(3, 3).await;
    let limits = |n: &str| json!({"limits": {"example.com/gpu": n}, "requests": {"example.com/gpu": n}});
    let pod = pod_of(
        "p",
        json!({
            "initContainers": [
                {"name": "init", "image": "i", "resources": limits("2")},
                {"name": "side", "image": "i", "restartPolicy": "Always", "resources": limits("1")},
            ],
            "containers": [{"name": "app", "image": "i", "resources": limits("2")}],
        }),
    );
    node.allocate(&pod).await.unwrap();
    let mut given = Vec::new();
    for name in ["init", "side", "app"] {
        given.push(node.env(&pod, name).await);
    }
    assert_eq!(given, ["a,b", "a", "b,c"]);
    node.stop().await;
}

#[tokio::test]
async fn health_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path())).await.unwrap();
    let plugin = FakeDevicePlugin::start(&dir.path().join("device-plugins"), GPU, &[("a", true, -1)], false, false);
    plugin.register().await.unwrap();
    node.until(1, 1).await;
    let pod = pod("p", json!({"example.com/gpu": "1"}));
    node.allocate(&pod).await.unwrap();
    let shown = || serde_json::to_value(node.managers.health(&pod, "c")).unwrap();
    let told = |health: &str| json!([{"name": GPU, "resources": [{"resourceID": "a", "health": health}]}]);
    assert_eq!(shown(), told("Healthy"));
    plugin.set(&[("a", false, -1)]);
    node.until(1, 0).await;
    assert_eq!(shown(), told("Unhealthy"));
    node.stop().await;
}

#[tokio::test]
async fn whole_cpus_and_memory_of_one_node() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(with_policies(dir.path())).await.unwrap();
    let one = pod("one", json!({"cpu": "2", "memory": "500"}));
    assert!(!node.managers.may_wait(&one));
    node.allocate(&one).await.unwrap();
    let grant = |managers: Managers, pod: DesiredPod| async move {
        let g = managers.container(&pod, &pod.container("c").unwrap()).await.unwrap();
        (g.cpus, g.memory_nodes, g.exclusive_cpus)
    };
    assert_eq!(grant(node.managers.clone(), one.clone()).await, ("2-3".into(), "0".into(), true));
    assert!(node.managers.exclusive_cpus(&uid("one")));
    let shared = pod("shared", json!({"cpu": "500m", "memory": "10"}));
    node.allocate(&shared).await.unwrap();
    assert_eq!(grant(node.managers.clone(), shared).await, ("0-1".into(), "0".into(), false));
    assert!(
        node.allocate(&pod("big", json!({"cpu": "2", "memory": "1"})))
            .await
            .unwrap_err()
            .contains("not enough cpus available")
    );
    node.stop().await;

    // The next agent takes over; one with another policy does not start.
    let node = Node::start(with_policies(dir.path())).await.unwrap();
    assert_eq!(grant(node.managers.clone(), one).await.0, "2-3");
    node.managers.release(&uid("one"));
    node.stop().await;
    let refused = Node::start(config(dir.path())).await.err().unwrap();
    let path = dir.path().join("cpu_manager_state");
    assert_eq!(
        refused,
        format!(
            "start cpu manager error: could not restore state from checkpoint: configured policy \"none\" differs from state checkpoint \
             policy \"static\", please drain this node and delete the CPU manager checkpoint file {path:?} before restarting Kubelet"
        )
    );
    std::fs::write(&path, "{\"policyName\":\"static\",\"defaultCpuSet\":\"0-3\",\"checksum\":1}").unwrap();
    let corrupt = Node::start(with_policies(dir.path())).await.err().unwrap();
    assert!(corrupt.contains("checkpoint is corrupted, please drain this node"), "{corrupt}");
}

#[tokio::test]
async fn one_numa_node_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let strict = Config { policy: Policy::SingleNumaNode, ..with_policies(dir.path()) };
    let node = Node::start(strict).await.unwrap();
    let plugin = FakeDevicePlugin::start(
        &dir.path().join("device-plugins"),
        GPU,
        &[("a", true, 0), ("b", true, 1)],
        true,
        false,
    );
    plugin.register().await.unwrap();
    node.until(2, 2).await;
    // CPU 0 is reserved, so that two CPUs are on node 1 alone, and the device with them, whatever the plugin prefers.
    plugin.prefer(&["a"]);
    let one = pod("one", json!({"cpu": "2", "memory": "500", "example.com/gpu": "1"}));
    node.allocate(&one).await.unwrap();
    let grant = node.managers.container(&one, &one.container("c").unwrap()).await.unwrap();
    assert_eq!(
        (grant.cpus.as_str(), grant.memory_nodes.as_str(), node.env(&one, "c").await.as_str()),
        ("2-3", "1", "b")
    );
    let two = pod("two", json!({"cpu": "2", "memory": "100", "example.com/gpu": "1"}));
    assert_eq!(
        node.allocate(&two).await.unwrap_err(),
        "TopologyAffinityError: Resources cannot be allocated with Topology locality"
    );
    // Nothing of it stayed taken.
    node.allocate(&pod("three", json!({"cpu": "1", "memory": "900", "example.com/gpu": "1"}))).await.unwrap();
    node.stop().await;
}

fn claiming(pod: &str, object: &str) -> DesiredPod {
    let container = json!({"name": "c", "image": "i", "resources": {"claims": [{"name": "n", "request": "r"}]}});
    pod_of(pod, json!({"resourceClaims": [{"name": "n", "resourceClaimName": object}], "containers": [container]}))
}

#[tokio::test]
async fn claims_are_prepared_once_and_taken_back_by_the_last_pod() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path())).await.unwrap();
    let prepare = async |pod: &DesiredPod| node.managers.prepare(pod).await;
    let [p, q] = ["p", "q"].map(|name| claiming(name, "x"));
    let missing = prepare(&p).await.unwrap_err();
    assert_eq!(missing, "prepare dynamic resources: DRA driver d.example.com is not registered");
    assert!(!node.managers.has_claims(&uid("p")), "nothing is to be taken back");
    let absent = prepare(&claiming("p", "absent")).await.unwrap_err();
    assert_eq!(absent, "prepare dynamic resources: fetch ResourceClaim absent: not found");
    let driver = FakeClaimDriver::start(dir.path(), "d.example.com");
    node.managers.drivers().unwrap().register(&driver.info()).await.unwrap();
    let stranger = prepare(&claiming("stranger", "x")).await.unwrap_err();
    assert!(stranger.ends_with("pod stranger (stranger) is not allowed to use ResourceClaim x (uid-x)"), "{stranger}");

    driver.fail(Some("broken"));
    let failed = prepare(&p).await.unwrap_err();
    assert_eq!(failed, "prepare dynamic resources: NodePrepareResources failed for ResourceClaim x: broken");
    assert!(node.managers.has_claims(&uid("p")), "it may have been prepared all the same");
    driver.fail(None);
    prepare(&p).await.unwrap();
    prepare(&q).await.unwrap();
    let grant = node.managers.container(&p, &p.container("c").unwrap()).await.unwrap();
    assert_eq!(grant.devices.cdi_devices, ["fake.example.com/dev=x"]);
    assert_eq!(driver.calls(), ["prepare x", "prepare x"], "the second pod finds it prepared");

    let shown = || serde_json::to_value(node.managers.health(&p, "c")).unwrap();
    let told = |health: Value| json!([{"name": "claim:n/r", "resources": [health]}]);
    let id = "fake.example.com/dev=x";
    assert_eq!(shown(), told(json!({"resourceID": id, "health": "Unknown"})));
    driver.health(false, "too hot");
    let hot = told(json!({"resourceID": id, "health": "Unhealthy"}));
    for _ in 0..2000 {
        if shown() == hot {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(shown(), hot);

    node.managers.unprepare(&uid("p")).await.unwrap();
    assert!(!node.managers.has_claims(&uid("p")) && node.managers.has_claims(&uid("q")));
    driver.fail(Some("busy"));
    let busy = node.managers.unprepare(&uid("q")).await.unwrap_err();
    assert_eq!(busy, "unprepare dynamic resources: NodeUnprepareResources failed for ResourceClaim x: busy");
    node.stop().await;

    // The next agent knows of it, and takes it back when it learns that the pod is gone.
    driver.fail(None);
    let node = Node::start(config(dir.path())).await.unwrap();
    node.managers.drivers().unwrap().register(&driver.info()).await.unwrap();
    assert!(node.managers.has_claims(&uid("q")));
    let grant = node.managers.container(&q, &q.container("c").unwrap()).await.unwrap();
    assert_eq!(grant.devices.cdi_devices, ["fake.example.com/dev=x"], "a container can be restarted");
    node.managers.retain(&BTreeSet::new());
    for _ in 0..2000 {
        if !node.managers.has_claims(&uid("q")) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(driver.calls().last().unwrap(), "unprepare x");
    assert!(!node.managers.has_claims(&uid("q")));
    node.stop().await;
}
