//! Devices of device plugins, CPUs of one container's own, and the socket that tells who has them.
#![allow(clippy::unwrap_used)]

use e2e::status::{id, phase, restarts, runs, uid};
use e2e::{Node, Options, Share, container, pod, seconds, wait_until, with};
use fakes::{Allocate, FakeDevicePlugin};
use plugins::wire::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use plugins::wire::podresources_v1::{AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest};
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";
const DONGLE: &str = "example.com/dongle";

/// Device plugins of the node, on a runtime of their own.
struct Plugins {
    tokio: tokio::runtime::Runtime,
    dir: std::path::PathBuf,
}

impl Plugins {
    fn of(node: &Node) -> Self {
        Self { tokio: tokio::runtime::Runtime::new().unwrap(), dir: node.root().join("device-plugins") }
    }

    /// A plugin that the node has registered.
    fn register(&self, resource: &str, devices: &[(&str, bool, i64)]) -> FakeDevicePlugin {
        self.tokio.block_on(async {
            let plugin = FakeDevicePlugin::start(&self.dir, resource, devices, false, false);
            plugin.register().await.unwrap();
            plugin
        })
    }

    /// Ids of devices that could be given to containers, as the pod-resources socket tells.
    fn usable(&self, node: &Node) -> Vec<String> {
        let told = self.resources(node, |mut c| async move {
            c.get_allocatable_resources(AllocatableResourcesRequest {}).await.unwrap().into_inner()
        });
        told.devices.into_iter().flat_map(|d| d.device_ids).collect()
    }

    fn resources<T, F: Future<Output = T>>(
        &self,
        node: &Node,
        ask: impl FnOnce(PodResourcesListerClient<plugins::wire::Channel>) -> F,
    ) -> T {
        let socket = node.root().join("pod-resources/kubelet.sock");
        self.tokio.block_on(async { ask(PodResourcesListerClient::new(plugins::wire::channel(socket))).await })
    }
}

fn limits(of: Value) -> Value {
    json!({"resources": {"limits": of, "requests": of}})
}

/// What a container wrote.
fn written(share: &Share, file: &str) -> String {
    wait_until(&format!("{file} is written"), seconds(90), || Some(share.read(file)).filter(|t| t.ends_with("end\n")))
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_container_gets_its_devices_and_keeps_them() {
    let mut node = Node::start();
    let share = Share::new(&node);
    let plugins = Plugins::of(&node);
    let plugin = plugins.register(DONGLE, &[("d1", true, -1), ("d2", false, -1)]);
    wait_until("the healthy device is known", seconds(30), || (plugins.usable(&node) == ["d1"]).then_some(()));

    let look = |file: &str| {
        format!(
            "{{ echo $EXAMPLE_COM_DONGLE; ls /dev/fake-null; ls -d /fake-mount; echo end; }} > /share/{file}; {HOLD}"
        )
    };
    let one = limits(json!({DONGLE: "1"}));
    // It ends when it is told to.
    let has = look("has").replace(HOLD, "while ! rm /share/end 2> /dev/null; do sleep 0.2; done");
    node.write("has.yaml", &share.mounted(pod("has", [with(container("c", &has), one.clone())])));
    assert_eq!(written(&share, "has"), "d1\n/dev/fake-null\n/fake-mount\nend\n");
    node.wait_running("has");
    assert_eq!(plugin.calls(), ["allocate d1"]);

    // The unhealthy one is for nobody.
    node.write("late.yaml", &share.mounted(pod("late", [with(container("c", &look("late")), one.clone())])));
    let refused = node.wait_pod("the second pod is refused", "late", |p| phase(p) == "Failed");
    assert_eq!(refused["status"]["reason"], "UnexpectedAdmissionError");
    assert_eq!(
        refused["status"]["message"],
        "Pod was rejected: Allocate failed due to requested number of devices unavailable for example.com/dongle. \
         Requested: 1, Available: 0, which is unexpected"
    );
    node.remove("late.yaml");

    let holds_d1 = |node: &Node| {
        let told = plugins.resources(node, |mut c| async move {
            let list = c.list(ListPodResourcesRequest {}).await.unwrap().into_inner();
            let name = list.pod_resources[0].name.clone();
            let get = GetPodResourcesRequest { pod_name: name, pod_namespace: "default".into() };
            c.get(get).await.unwrap().into_inner().pod_resources.unwrap()
        });
        assert_eq!(told.containers[0].devices[0].device_ids, ["d1"]);
        assert_eq!(told.containers[0].devices[0].resource_name, DONGLE);
    };
    holds_d1(&node);

    // Health is shown while it runs.
    plugin.set(&[("d1", false, -1), ("d2", true, -1)]);
    let health = |p: &Value| p["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"][0].clone();
    node.wait_pod("the broken device is shown", "has", |p| {
        health(p) == json!({"resourceID": "d1", "health": "Unhealthy"})
    });

    // A restarted container has the same one.
    plugin.set(&[("d1", true, -1), ("d2", false, -1)]);
    share.put("end", "");
    node.wait_pod("its container is restarted", "has", |p| restarts(p, "c") == 1 && runs(p, "c"));
    holds_d1(&node);
    let container_id = id(&node.wait_running("has"), "c").to_owned();
    assert_eq!(plugin.calls(), ["allocate d1"]);

    // A restarted agent leaves it alone, with the plugin there or not.
    drop(plugin);
    node.kill();
    node.run();
    let again = node.wait_running("has");
    assert_eq!((id(&again, "c"), restarts(&again, "c")), (container_id.as_str(), 1));
    holds_d1(&node);
    std::thread::sleep(seconds(4));
    holds_d1(&node);
    let _plugin = plugins.register(DONGLE, &[("d1", true, -1), ("d2", true, -1)]);
    wait_until("both devices are known", seconds(30), || (plugins.usable(&node).len() == 2).then_some(()));
    node.write("next.yaml", &share.mounted(pod("next", [with(container("c", &look("next")), one)])));
    assert!(written(&share, "next").starts_with("d2\n"), "the first one is still taken");

    // What has ended gives back.
    let uid = uid(&again);
    node.remove("has.yaml");
    node.wait_gone(&uid, seconds(60));
    let third = limits(json!({DONGLE: "1"}));
    node.write("third.yaml", &share.mounted(pod("third", [with(container("c", &look("third")), third)])));
    assert!(written(&share, "third").starts_with("d1\n"));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_plugin_that_hangs_holds_up_only_its_own() {
    let node = Node::start();
    let plugins = Plugins::of(&node);
    let hung = plugins.register("example.com/hung", &[("h", true, -1)]);
    hung.allocate(Allocate::Hang);
    let _good = plugins.register(DONGLE, &[("d", true, -1)]);
    wait_until("devices are known", seconds(30), || (plugins.usable(&node).len() == 2).then_some(()));
    node.write("a-hung.yaml", &pod("hung", [with(container("c", HOLD), limits(json!({"example.com/hung": "1"})))]));
    wait_until("the plugin is asked", seconds(30), || (!hung.calls().is_empty()).then_some(()));
    node.write("good.yaml", &pod("good", [with(container("c", HOLD), limits(json!({DONGLE: "1"})))]));
    node.write("plain.yaml", &pod("plain", [container("c", HOLD)]));
    node.wait_running("good");
    node.wait_running("plain");
    let held = node.pod("hung").expect("what waits for a plugin is shown");
    assert_eq!(held["status"]["phase"], "Pending");
    assert!(!runs(&held, "c"));
    // Taken away, it is forgotten, and its device free.
    node.remove("a-hung.yaml");
    hung.allocate(Allocate::Grant);
    node.write("again.yaml", &pod("again", [with(container("c", HOLD), limits(json!({"example.com/hung": "1"})))]));
    node.wait_running("again");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn whole_cpus_belong_to_one_container() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert!(cpus >= 2, "one CPU is the system's");
    let options = Options::default().config(json!({
        "cpuManagerPolicy": "static",
        "systemReserved": {"cpu": "500m"},
    }));
    let mut node = Node::with(options);
    let share = Share::new(&node);
    let shows = |file: &str| {
        format!(
            "while :; do grep Cpus_allowed_list /proc/self/status > /share/{file}.tmp; mv /share/{file}.tmp /share/{file}; sleep 0.2; done"
        )
    };
    let list = |file: &str| share.read(file).split_whitespace().last().unwrap_or_default().to_owned();
    let until = |file: &str, wanted: &dyn Fn(&str) -> bool| {
        wait_until(&format!("{file} runs where it is to"), seconds(60), || Some(list(file)).filter(|l| wanted(l)))
    };
    node.write("shared.yaml", &share.mounted(pod("shared", [container("c", &shows("shared"))])));
    let everything = until("shared", &|l| !l.is_empty());
    let whole = limits(json!({"cpu": "1", "memory": "50Mi"}));
    node.write("own.yaml", &share.mounted(pod("own", [with(container("c", &shows("own")), whole)])));
    let own = until("own", &|l| l.parse::<u32>().is_ok());
    assert_ne!(own, "0", "the first one is the system's");
    // It is taken from those that run already.
    let rest = until("shared", &|l| l != everything);
    assert!(!rest.split(',').any(|part| part == own), "{rest} is shared, {own} is not");
    let checkpoint = std::fs::read_to_string(node.root().join("cpu_manager_state")).unwrap();
    assert!(checkpoint.starts_with("{\"policyName\":\"static\",\"defaultCpuSet\":\""), "{checkpoint}");
    let running = node.wait_running("own");
    assert!(checkpoint.contains(&format!("\"{}\":{{\"c\":\"{own}\"}}", uid(&running))), "{checkpoint}");

    // Another policy does not start over it.
    node.stop();
    node.configure("cpuManagerPolicy", json!("none"));
    node.spawn();
    wait_until("the other policy is refused", seconds(30), || (!node.running()).then_some(()));
    assert!(node.log().contains("differs from state checkpoint policy"), "{}", node.log());
    node.configure("cpuManagerPolicy", json!("static"));
    node.restart();
    assert_eq!(list("own"), own);
    let running = node.wait_running("own");
    node.remove("own.yaml");
    node.wait_gone(&uid(&running), seconds(60));
    until("shared", &|l| l == everything);
}
