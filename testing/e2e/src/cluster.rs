//! One control plane and one node for all tests of a file, on the stage of the other end-to-end tests.
//!
//! Such a file has a harness of its own (`harness = false`), since Rust's has no end at which to take the control plane down:
//!
//! ```no_run
//! use e2e::cluster::{Cluster, main};
//!
//! fn a_node_registers(cluster: &mut Cluster) {
//!     assert_eq!(cluster.get_node()["metadata"]["name"], "e2e");
//! }
//!
//! main(&[("a_node_registers", a_node_registers)]);
//! ```
//!
//! `RUBELET_BIN` names another kubelet, as everywhere.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ExitCode, Output};
use std::time::Duration;

use cri::RuntimeMutator;
use libtest_mimic::{Arguments, Failed, Trial};
use rig::cluster::{Api, ControlPlane, Options, missing};
use serde_json::{Value, json};

use crate::{NODE, Node, seconds, wait_until};

/// The collection that the tests' pods are in.
const PODS: &str = "/api/v1/namespaces/default/pods";

/// A test by its name.
pub type Test = (&'static str, fn(&mut Cluster));

thread_local! {
    /// Made by the first test that runs, on the harness's own thread.
    static CLUSTER: RefCell<Option<Cluster>> = const { RefCell::new(None) };
}

/// Runs the tests that the command line picks, one after the other; understands what Rust's own harness does.
pub fn main(tests: &'static [Test]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // On this thread, and not on several: they share the node.
    arguments.test_threads = Some(1);
    let runtime = std::env::var("RUBELET_E2E_CONTAINERD_VERSION").unwrap_or_default();
    let trials = if runtime.starts_with("1.") {
        // What happens between the node and the API server does not depend on the runtime: once is enough.
        Vec::new()
    } else {
        let trial = |(name, test): &'static Test| Trial::test(*name, || run(name, *test)).with_ignored_flag(true);
        tests.iter().map(trial).collect()
    };
    let ended = libtest_mimic::run(&arguments, trials).exit_code();
    drop(CLUSTER.take());
    ended
}

fn run(name: &str, test: fn(&mut Cluster)) -> Result<(), Failed> {
    let lacking = missing(&Options::all());
    if !lacking.is_empty() {
        println!("skipped: not built: lab/build-reference {}", lacking.join(" "));
        return Ok(());
    }
    CLUSTER.with_borrow_mut(|slot| {
        let done = catch_unwind(AssertUnwindSafe(|| {
            let cluster = slot.get_or_insert_with(Cluster::start);
            cluster.reset();
            test(cluster);
        }));
        done.map_err(|_| {
            if let Some(cluster) = slot {
                cluster.node.keep(name);
            }
            Failed::without_message()
        })
    })
}

/// A control plane with all its parts, and a node that has joined it.
pub struct Cluster {
    /// The node; the kubelet's log and files.
    pub node: Node,
    /// The control plane.
    pub plane: ControlPlane,
    /// The kubelet's usual flags.
    flags: Vec<String>,
}

impl Cluster {
    /// Starts both.
    #[track_caller]
    fn start() -> Self {
        let plane = must("the control plane", ControlPlane::start("e2e", Options::all()));
        must("the default service account", plane.wait_service_account("default"));
        let address = crate::node::address();
        let mut fields = rig::cluster::kubelet_config(&plane, &address);
        // Sooner than by default, so that no test waits for the next turn of something.
        for (key, value) in [("syncFrequency", json!("2s")), ("nodeLeaseDurationSeconds", json!(8))] {
            fields[key] = value;
        }
        let kubeconfig = must("a kubeconfig", plane.node_kubeconfig(NODE));
        let options = crate::Options::default()
            .config(fields)
            .flag(&format!("--kubeconfig={}", kubeconfig.display()))
            .flag(&format!("--node-ip={address}"));
        let node = Node::with(options);
        let cluster = Self { flags: node.flags().to_vec(), node, plane };
        cluster.wait_ready();
        cluster
    }

    /// Brings back what the test before took away, and removes its pods.
    #[track_caller]
    fn reset(&mut self) {
        must("the API server", self.plane.start_api_server());
        for file in std::fs::read_dir(self.node.manifests()).into_iter().flatten().flatten() {
            let _ = std::fs::remove_file(file.path());
        }
        if !self.node.running() || self.node.flags() != self.flags {
            self.node.set_flags(self.flags.clone());
            self.node.restart();
        }
        self.wait_ready();
        for pod in must("the pods", self.api().list(PODS)) {
            let path = format!("{PODS}/{}", pod["metadata"]["name"].as_str().unwrap_or_default());
            must("removing a pod", self.api().delete(&path, &json!({"gracePeriodSeconds": 0})));
        }
    }

    /// The API server, as a member of `system:masters`.
    pub fn api(&self) -> &Api {
        self.plane.api()
    }

    /// Waits until the node is Ready and pods are scheduled to it.
    ///
    /// # Panics
    /// When it is not after 60 s.
    #[track_caller]
    pub fn wait_ready(&self) {
        wait_until("the node is Ready and has no taint", seconds(60), || {
            let node = self.api().find(&format!("/api/v1/nodes/{NODE}")).ok()??;
            (rig::cluster::is_ready(&node) && node["spec"]["taints"].is_null()).then_some(())
        });
    }

    /// The node's object.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn get_node(&self) -> Value {
        must("the node", self.api().get(&format!("/api/v1/nodes/{NODE}")))
    }

    /// Makes any object, as `create("configmaps", …)`, in the namespace `default`.
    ///
    /// # Panics
    /// When the API server refuses.
    #[track_caller]
    pub fn create(&self, kind: &str, object: &Value) -> Value {
        must(kind, self.api().create(&format!("/api/v1/namespaces/default/{kind}"), object))
    }

    /// Makes a pod on the node. Without a word about it, the pod gets no token of its service account.
    ///
    /// # Panics
    /// When the API server refuses.
    #[track_caller]
    pub fn run(&self, pod: &Value) -> Value {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = json!(NODE);
        if pod["spec"]["automountServiceAccountToken"].is_null() {
            pod["spec"]["automountServiceAccountToken"] = json!(false);
        }
        self.create("pods", &pod)
    }

    /// The pod, if it is there.
    ///
    /// # Panics
    /// When the API server does not answer.
    #[track_caller]
    pub fn pod(&self, name: &str) -> Option<Value> {
        must("the pod", self.api().find(&format!("{PODS}/{name}")))
    }

    /// Waits until the pod is as `wanted`.
    ///
    /// # Panics
    /// When it is not after 60 s, with its status and events.
    #[track_caller]
    pub fn wait(&self, what: &str, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = None;
        let done = rig::poll(seconds(60), || {
            last = self.api().find(&format!("{PODS}/{name}")).ok().flatten();
            let done = last.as_ref().is_some_and(&wanted);
            if !done {
                std::thread::sleep(Duration::from_millis(60));
            }
            done
        });
        match last {
            Some(pod) if done => pod,
            Some(pod) => {
                let events: Vec<String> = self.events(name).iter().map(|e| format!("{}: {}", e.0, e.1)).collect();
                panic!("{what}: not within 60 s; its status: {:#}; its events: {events:#?}", pod["status"])
            }
            None => panic!("{what}: the pod {name} is not there"),
        }
    }

    /// Waits until the pod's phase is Running and all its containers run and are ready.
    ///
    /// # Panics
    /// As [`Cluster::wait`].
    #[track_caller]
    pub fn wait_running(&self, name: &str) -> Value {
        self.wait(&format!("{name} runs"), name, |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            pod["status"]["phase"] == "Running"
                && statuses
                    .is_some_and(|all| all.iter().all(|c| c["ready"] == true && c["state"]["running"].is_object()))
        })
    }

    /// Asks for the pod's end, with its own grace period.
    ///
    /// # Panics
    /// When the API server refuses.
    #[track_caller]
    pub fn delete(&self, name: &str) {
        must("the deletion", self.api().delete(&format!("{PODS}/{name}"), &Value::Null));
    }

    /// Waits until the pod's object is gone.
    ///
    /// # Panics
    /// When it is there after `limit`.
    #[track_caller]
    pub fn wait_gone(&self, name: &str, limit: Duration) {
        wait_until(&format!("{name} is gone"), limit, || self.pod(name).is_none().then_some(()));
    }

    /// What a command prints in a running container, by way of the runtime.
    ///
    /// # Panics
    /// When the container does not run or the runtime fails.
    #[track_caller]
    pub fn exec(&self, pod: &Value, container: &str, command: &[&str]) -> String {
        let id = crate::status::id(pod, container).to_owned();
        let command = command.iter().map(ToString::to_string).collect();
        let out = self.node.ask(self.node.cri().exec_sync(&id, command, Some(seconds(20))));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Runs kubectl.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str]) -> Output {
        must("kubectl", self.plane.kubectl(arguments))
    }

    /// Reason and message of the events about a pod or another object, in the order in which they first occurred.
    ///
    /// # Panics
    /// When the API server does not answer.
    #[track_caller]
    pub fn events(&self, name: &str) -> Vec<(String, String)> {
        let path = format!("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{name}");
        let mut all = must("the events", self.api().list(&path));
        let text = |e: &Value, key: &str| e[key].as_str().unwrap_or_default().to_owned();
        // An event's name ends in the nanosecond of its first occurrence; its times know seconds only.
        all.sort_by_key(|e| e["metadata"]["name"].as_str().and_then(|n| n.rsplit('.').next()).map(str::to_owned));
        all.iter().map(|e| (text(e, "reason"), text(e, "message"))).collect()
    }
}

/// The value with what differs from run to run replaced by its kind, and lists of named things in the order of their names: for a
/// comparison with what the Go kubelet gave.
pub fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields.iter().map(|(k, v)| (k.clone(), shape(v))).collect(),
        Value::Array(items) => {
            let mut items: Vec<Value> = items.iter().map(shape).collect();
            let name = |v: &Value| ["type", "name"].iter().find_map(|k| v[*k].as_str().map(str::to_owned));
            items.sort_by_key(name);
            Value::Array(items)
        }
        Value::String(text) => json!(text.split(' ').map(word).collect::<Vec<_>>().join(" ")),
        other => other.clone(),
    }
}

/// A word of a text, or what stands for it.
fn word(text: &str) -> String {
    if text.parse::<jiff::Timestamp>().is_ok() {
        return "TIME".to_owned();
    }
    if text.parse::<std::net::IpAddr>().is_ok() {
        return "ADDRESS".to_owned();
    }
    if let Some(volume) = text.strip_prefix("kube-api-access-").filter(|rest| rest.len() == 5) {
        return text.replace(volume, "SUFFIX");
    }
    // Digests of 64 digits, UUIDs, machine IDs; alone, after a scheme, in brackets.
    let part = |part: &str| match (part.len(), part.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')) {
        (64, true) => "HASH".to_owned(),
        (32 | 36, true) => "ID".to_owned(),
        _ => part.to_owned(),
    };
    let mut out = String::new();
    for piece in text.split_inclusive([':', '/', '@', '(', ')', '"']) {
        let end = piece.trim_end_matches([':', '/', '@', '(', ')', '"']);
        out.push_str(&part(end));
        out.push_str(&piece[end.len()..]);
    }
    out
}

#[track_caller]
fn must<T>(what: &str, result: anyhow::Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(e) => panic!("{what}: {e:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        let hash = "0123456789abcdef".repeat(4);
        let value = json!({
            "b": [{"type": "Y", "at": "2026-01-01T00:00:00Z"}, {"type": "X", "ip": "10.0.0.1"}],
            "a": [format!("containerd://{hash}"), format!("x/y@sha256:{hash}"), "pod: \"a_b(894922fa-81fb-4427-9bcc-a9f3f0908aec)\".", 7],
        });
        let expected = json!({
            "b": [{"type": "X", "ip": "ADDRESS"}, {"type": "Y", "at": "TIME"}],
            "a": ["containerd://HASH", "x/y@sha256:HASH", "pod: \"a_b(ID)\".", 7],
        });
        assert_eq!(shape(&value), expected);
    }
}
