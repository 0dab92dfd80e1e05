//! Devices of plugins in the node's status, and devices that pods claim.

use std::fs;
use std::path::PathBuf;

use e2e::cluster::Cluster;
use e2e::{NODE, container, pod, seconds, status, wait_until, with};
use fakes::{FakeClaimDriver, FakeDevicePlugin};
use serde_json::{Value, json};

use crate::SLEEP;

const DONGLE: &str = "example.com/dongle";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";

/// How many there are, and how many of them for pods; empty when the node says nothing.
fn amounts(cluster: &Cluster) -> [String; 2] {
    let status = &cluster.get_node()["status"];
    ["capacity", "allocatable"].map(|list| status[list][DONGLE].as_str().unwrap_or_default().to_owned())
}

fn wait_amounts(cluster: &Cluster, what: &str, wanted: [&str; 2]) {
    wait_until(what, seconds(60), || (amounts(cluster) == wanted).then_some(()));
}

pub(crate) fn of_a_plugin_are_told_in_the_node(cluster: &mut Cluster) {
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let dir = cluster.node.root().join("device-plugins");
    let register = |devices: &[(&str, bool, i64)]| {
        tokio.block_on(async {
            let plugin = FakeDevicePlugin::start(&dir, DONGLE, devices, false, false);
            plugin.register().await.unwrap();
            plugin
        })
    };
    let plugin = register(&[("a", true, -1), ("b", true, -1), ("c", false, -1)]);
    wait_amounts(cluster, "the devices are told", ["3", "2"]);
    let limits = json!({"resources": {"limits": {DONGLE: "2"}}});
    cluster.run(&pod("both", [with(container("c", SLEEP), limits)]));
    let both = cluster.wait_running("both");
    drop(plugin);
    wait_amounts(cluster, "the plugin is gone", ["3", "0"]);
    // The node does not forget who has them.
    cluster.node.restart();
    cluster.wait_ready();
    let _plugin = register(&[("a", true, -1), ("b", true, -1)]);
    wait_amounts(cluster, "the plugin is back", ["2", "2"]);
    let after = cluster.wait_running("both");
    assert_eq!(status::id(&after, "c"), status::id(&both, "c"));
    assert_eq!(status::restarts(&after, "c"), 0);
    let one = json!({"resources": {"limits": {DONGLE: "1"}}});
    cluster.run(&pod("more", [with(container("c", SLEEP), one)]));
    let refused = cluster.wait("there is none left", "more", |p| status::phase(p) == "Failed");
    assert_eq!(refused["status"]["reason"], "UnexpectedAdmissionError", "{:#}", refused["status"]);
}

/// Tells the runtime what is behind the name of a device; taken back at the end.
struct Cdi(PathBuf);

impl Cdi {
    fn new(device: &str) -> Self {
        fs::create_dir_all("/var/run/cdi").unwrap();
        let path = PathBuf::from(format!("/var/run/cdi/fake.example.com-{}.json", std::process::id()));
        let edits = json!({"env": [format!("CLAIMED={device}")]});
        let spec = json!({"cdiVersion": "0.6.0", "kind": "fake.example.com/dev", "devices": [{"name": device, "containerEdits": edits}]});
        fs::write(&path, spec.to_string()).unwrap();
        Self(path)
    }
}

impl Drop for Cdi {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

pub(crate) fn that_are_claimed_are_prepared_and_taken_back(cluster: &mut Cluster) {
    if !cluster.node.runtime_version().starts_with('2') && !cluster.node.runtime_version().starts_with("v2") {
        return;
    }
    let _cdi = Cdi::new("x");
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let registry = cluster.node.root().join("plugins_registry");
    let start = || tokio.block_on(async { FakeClaimDriver::start(&registry, "d.example.com") });
    let driver = start();
    let request = json!({"name": "r", "exactly": {"deviceClassName": "any"}});
    cluster.api().delete(&format!("{CLAIMS}/x"), &Value::Null).unwrap();
    let mut claim = cluster
        .api()
        .create(CLAIMS, &json!({"metadata": {"name": "x"}, "spec": {"devices": {"requests": [request]}}}))
        .unwrap();
    let mut manifest = pod(
        "claiming",
        [with(
            container("c", &format!("echo \"claimed $CLAIMED\"; {SLEEP}")),
            json!({"resources": {"claims": [{"name": "n"}]}}),
        )],
    );
    manifest["spec"]["resourceClaims"] = json!([{"name": "n", "resourceClaimName": "x"}]);
    let made = cluster.run(&manifest);
    // What a scheduler says.
    let result = json!({"driver": "d.example.com", "pool": "pool", "device": "x", "request": "r"});
    claim["status"] = json!({
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "claiming", "uid": made["metadata"]["uid"]}],
    });
    cluster.api().merge(&format!("{CLAIMS}/x/status"), &json!({"status": claim["status"]})).unwrap();
    let running = cluster.wait_running("claiming");
    assert_eq!(
        cluster.exec(&running, "c", &["sh", "-c", "tr '\\0' '\\n' < /proc/1/environ | grep CLAIMED"]).trim(),
        "CLAIMED=x"
    );
    assert_eq!(driver.calls(), ["prepare x"]);

    // A restarted agent knows what is to be taken back, and the pod is there until it is.
    cluster.node.restart();
    cluster.wait_ready();
    driver.fail(Some("busy"));
    cluster.delete("claiming");
    wait_until("the driver is asked", seconds(60), || driver.calls().iter().any(|c| c == "unprepare x").then_some(()));
    assert!(cluster.pod("claiming").is_some(), "gone before the driver took back its device");
    driver.fail(None);
    cluster.wait_gone("claiming", seconds(60));
    let checkpoint = fs::read_to_string(cluster.node.root().join("dra_manager_state")).unwrap();
    assert!(checkpoint.contains("\\\"ClaimInfoStateList\\\":[]"), "{checkpoint}");

    // What the driver offers goes with it.
    let slice = json!({"metadata": {"name": "offered"}, "spec": {
        "driver": "d.example.com", "nodeName": NODE, "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "x"}]}});
    let slices = "/apis/resource.k8s.io/v1/resourceslices";
    cluster.api().create(slices, &slice).unwrap();
    drop(driver);
    wait_until("the offer is gone", seconds(90), || {
        cluster.api().find(&format!("{slices}/offered")).unwrap().is_none().then_some(())
    });
}
