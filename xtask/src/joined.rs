//! `cargo xtask bench --joined`: rubelet and the Go kubelet by turns as the one node of a control plane: memory with many pods of the API server, and what
//! an outage of the API server costs when it is over.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Timestamp;
use rig::Stage;
use rig::cluster::{ControlPlane, Options, is_ready, kubelet_config};
use serde_json::{Value, json};

use crate::node::{Bench as _, Node};
use crate::setup;
use crate::shell::Shell;

const NODE: &str = "node-1";
const NAMESPACE: &str = "bench";
/// How often it is looked.
const STEP: Duration = Duration::from_millis(250);
/// Requests count for this long after the return of the API server.
const AFTER: Duration = Duration::from_secs(120);
/// Every request of the node once, when it is answered; a watch when it is opened.
const AUDIT: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
  {"level": "Metadata", "users": ["system:node:node-1"]}, {"level": "None"}]}"#;

/// Figures of one kubelet.
struct Figures {
    name: String,
    start: f64,
    rss: u64,
    idle_cpu: f64,
    before: BTreeMap<String, usize>,
    after: BTreeMap<String, usize>,
    faults: Vec<String>,
}

/// Measures and prints a table; false when pods were touched that were not to be.
///
/// # Errors
/// When a part is missing or a kubelet does not get through.
pub(crate) fn run(shell: &Shell, pods: usize, outage: Duration) -> Result<bool> {
    setup::prepare(shell)?;
    setup::control_plane(shell, &Options::default())?;
    let mut all = Vec::new();
    for (name, program) in setup::kubelets(shell)? {
        println!("{name}");
        all.push(one(shell, name, &program, pods, outage)?);
    }
    Ok(show(&all, pods, outage))
}

fn one(shell: &Shell, name: &str, program: &Path, pods: usize, outage: Duration) -> Result<Figures> {
    let mut stage = Stage::create("joined")?;
    stage.start_containerd(&setup::reference(shell)?, &setup::images(shell)?, false)?;
    let (policy, audit) = (stage.dir().join("audit.json"), stage.dir().join("audit.log"));
    fs::write(&policy, AUDIT)?;
    let flags = vec![
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", audit.display()),
        "--audit-log-mode=blocking".to_owned(),
    ];
    let plane = ControlPlane::start("joined", Options { api_server_flags: flags, ..Options::default() })?;
    plane.namespace(NAMESPACE)?;
    let flags = plane.node_flags(NODE, &stage.address())?;
    let mut fields = kubelet_config(&plane, &stage.address());
    fields["maxPods"] = json!(250);
    let mut node = Node::start(&stage, program, &fields, &flags)?;
    let mut bench = Bench { shell, plane: &plane, node: &mut node, audit };
    let measured = bench.measure(name, pods, outage);
    node.stop();
    plane.close()?;
    stage.close()?;
    measured
}

struct Bench<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    node: &'a mut Node,
    audit: PathBuf,
}

impl crate::node::Bench for Bench<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        (self.shell, self.node)
    }
}

impl Bench<'_> {
    fn measure(&mut self, name: &str, pods: usize, outage: Duration) -> Result<Figures> {
        self.until("the node is Ready", Duration::from_secs(120), STEP, |b| {
            let found = b.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.unwrap_or_default();
            Ok(is_ready(&found))
        })?;
        let begin = Instant::now();
        for n in 0..pods {
            self.create(&format!("p{n}"), "exec sleep 1000000", "Always")?;
        }
        self.running("p", pods)?;
        let start = begin.elapsed().as_secs_f64();
        self.pause(Duration::from_secs(45))?;
        let cpu = self.node.cpu()?;
        self.pause(Duration::from_secs(30))?;
        let idle_cpu = (self.node.cpu()? - cpu) * 1000.0 / 30.0;
        let [rss] = self.node.memory(["VmRSS"])?;
        println!("  {pods} pods in {start:.1} s, RSS {rss} KiB, idle CPU {idle_cpu:.1} ms/s");

        for n in 0..5 {
            self.create(&format!("loop{n}"), "sleep 20; exit 1", "Always")?;
            self.create(&format!("end{n}"), "sleep 60", "Never")?;
        }
        for s in ["kept", "changed", "removed"] {
            self.manifest(s, "1")?;
        }
        self.running("", pods + 13)?;
        let before_ids = self.containers()?;
        self.pause(Duration::from_secs(10))?;
        let before = self.requests(Timestamp::MIN)?;
        self.plane.stop_api_server();
        println!("  the API server is stopped for {} s", outage.as_secs());
        self.pause(outage / 2)?;
        self.manifest("changed", "2")?;
        self.manifest("added", "1")?;
        fs::remove_file(self.node.manifests.join("removed.json"))?;
        self.pause(outage / 2)?;
        let returned = Timestamp::now();
        self.plane.start_api_server()?;
        self.pause(AFTER)?;
        let after = self.requests(returned)?;
        let faults = self.faults(&before_ids, pods)?;
        Ok(Figures { name: name.to_owned(), start, rss, idle_cpu, before, after, faults })
    }

    /// What is not as it should be after the outage.
    fn faults(&self, before: &BTreeMap<String, String>, pods: usize) -> Result<Vec<String>> {
        let now = self.containers()?;
        let mut faults: Vec<String> = before
            .iter()
            .filter(|(name, id)| name.starts_with('p') && now.get(*name) != Some(*id))
            .map(|(name, _)| format!("{name} lost its container"))
            .collect();
        let found = self.pods()?;
        let phase =
            |name: &str| found.iter().find(|p| p["metadata"]["name"] == name).map(|p| p["status"]["phase"].clone());
        for n in 0..5 {
            if phase(&format!("end{n}")) != Some("Succeeded".into()) {
                faults.push(format!("end{n} is {:?}", phase(&format!("end{n}"))));
            }
        }
        for (name, there) in [("kept", true), ("changed", true), ("added", true), ("removed", false)] {
            let shown = phase(&format!("{name}-{NODE}"));
            if shown != there.then(|| "Running".into()) {
                faults.push(format!("the mirror pod of {name} is {shown:?}"));
            }
        }
        let total = found.len();
        if total != pods + 13 {
            faults.push(format!("{total} pods at the API server instead of {}", pods + 13));
        }
        Ok(faults)
    }

    fn create(&self, name: &str, script: &str, restart: &str) -> Result<()> {
        let pod = pod(name, script, restart);
        self.plane.api().create(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), &pod)?;
        Ok(())
    }

    fn manifest(&self, name: &str, form: &str) -> Result<()> {
        let mut pod = pod(name, &format!("exec sleep 100000{form}"), "Always");
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        let (temporary, file) =
            (self.node.manifests.join(format!(".{name}")), self.node.manifests.join(format!("{name}.json")));
        fs::write(&temporary, serde_json::to_vec(&pod)?)?;
        fs::rename(&temporary, &file).with_context(|| format!("write {}", file.display()))
    }

    fn pods(&self) -> Result<Vec<Value>> {
        self.plane.api().list(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))
    }

    /// Waits until so many pods, whose names begin so, run or have run.
    fn running(&mut self, prefix: &str, count: usize) -> Result<()> {
        self.until("the pods run", Duration::from_secs(600), STEP, |b| {
            let fine = |p: &Value| {
                p["metadata"]["name"].as_str().is_some_and(|n| n.starts_with(prefix))
                    && p["status"]["phase"] == "Running"
            };
            Ok(b.pods()?.iter().filter(|p| fine(p)).count() >= count)
        })
    }

    /// The container of each pod.
    fn containers(&self) -> Result<BTreeMap<String, String>> {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let all = self.pods()?;
        Ok(all
            .iter()
            .map(|p| (text(&p["metadata"]["name"]), text(&p["status"]["containerStatuses"][0]["containerID"])))
            .collect())
    }

    /// The node's requests since then, by verb and resource.
    fn requests(&self, since: Timestamp) -> Result<BTreeMap<String, usize>> {
        let mut seen = BTreeSet::new();
        let mut counts = BTreeMap::new();
        for line in fs::read_to_string(&self.audit)?.lines() {
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            let at = event["requestReceivedTimestamp"].as_str().and_then(|t| t.parse::<Timestamp>().ok());
            if at.is_none_or(|at| at < since) || !seen.insert(event["auditID"].to_string()) {
                continue;
            }
            let object = &event["objectRef"];
            let part = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
            let sub = part("subresource");
            let slash = if sub.is_empty() { "" } else { "/" };
            *counts
                .entry(format!("{} {}{slash}{sub}", event["verb"].as_str().unwrap_or_default(), part("resource")))
                .or_default() += 1;
        }
        Ok(counts)
    }
}

/// A pod of one container.
pub(crate) fn pod(name: &str, script: &str, restart: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"app": "bench"}},
        "spec": {
            "nodeName": NODE,
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "lab.test/busybox:1", "command": ["sh", "-c", script]}],
        },
    })
}

fn show(all: &[Figures], pods: usize, outage: Duration) -> bool {
    println!("\n{pods} pods of the API server; API server away for {} s", outage.as_secs());
    for f in all {
        println!(
            "{:<12} start of all {:>6.1} s   RSS {:>7} KiB   idle CPU {:>6.1} ms/s",
            f.name, f.start, f.rss, f.idle_cpu
        );
    }
    for (what, get) in [
        ("requests until the outage", (|f| &f.before) as fn(&Figures) -> &BTreeMap<String, usize>),
        ("requests in the two minutes after it", |f| &f.after),
    ] {
        println!("\n{what}");
        let kinds: BTreeSet<&String> = all.iter().flat_map(|f| get(f).keys()).collect();
        for kind in kinds {
            let counts: Vec<String> = all.iter().map(|f| format!("{:>8}", get(f).get(kind).unwrap_or(&0))).collect();
            println!("  {kind:<40}{}", counts.concat());
        }
        let sums: Vec<String> = all.iter().map(|f| format!("{:>8}", get(f).values().sum::<usize>())).collect();
        println!("  {:<40}{}", "sum", sums.concat());
    }
    for f in all {
        for fault in &f.faults {
            println!("{}: {fault}", f.name);
        }
    }
    all.first().is_some_and(|f| f.faults.is_empty())
}
