//! `cargo xtask soak`: fifty pods that come, change and go on a node of a control plane, and faults in turn: the kubelet is killed, the runtime restarts, the
//! API server is away, a pod fills its disk. At the end all pods go, and nothing may be left of them.
//!
//! Two halves. In the first the kubelet is killed as well; then all pods go, and what an empty node has is noted. In the second the same kubelet lives to the
//! end, so that what its process holds (open files, threads, tasks, memory) can be held against that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rig::Stage;
use rig::cluster::{ControlPlane, Options, is_ready, kubelet_config};
use rig::containerd::Containerd;
use serde_json::{Value, json};

use crate::node::{Bench as _, Node};
use crate::setup;
use crate::shell::Shell;

const NODE: &str = "node-1";
const PODS: &str = "/api/v1/namespaces/soak/pods";
/// Of the API server, and of manifests.
const COUNTS: [usize; 2] = [42, 8];
/// How often a pod goes and another one comes.
const CHANGE: Duration = Duration::from_millis(1500);
/// For all pods to be as they should be after a fault.
const SETTLE: Duration = Duration::from_secs(240);
/// Longer than the kubelet takes to give back memory and to let go of idle threads and connections.
const REST: Duration = Duration::from_secs(45);
const STEP: Duration = Duration::from_millis(500);
/// What a process may have more than before: a connection or thread that comes and goes.
const SLACK: u64 = 4;

/// How long, and with which changes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How long pods come and go, in minutes
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Of the changes; another one makes others
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What the kubelet's process holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    files: u64,
    threads: u64,
    tasks: u64,
    /// KiB.
    memory: u64,
}

/// Runs it; false when something leaked.
///
/// # Errors
/// When a part is missing, the kubelet ends, or pods are not as they should be.
pub(crate) fn run(shell: &Shell, arguments: &Arguments) -> Result<bool> {
    setup::prepare(shell)?;
    setup::control_plane(shell, &Options::default())?;
    let (runtime, program) = (setup::reference(shell)?, setup::rubelet(shell, true)?);
    let mut stage = Stage::create("soak")?;
    stage.start_containerd(&runtime, &setup::images(shell)?, false)?;
    let plane = ControlPlane::start("soak", Options::default())?;
    plane.namespace("soak")?;
    let flags = plane.node_flags(NODE, &stage.address())?;
    let mut fields = kubelet_config(&plane, &stage.address());
    fields["maxPods"] = json!(110);
    fields["containerLogMaxSize"] = json!("64Ki");
    fields["containerLogMonitorInterval"] = json!("3s");
    let start = |stage: &Stage| Node::start(stage, &program, &fields, &flags);
    let node = start(&stage)?;
    let mut soak = Soak {
        shell,
        plane: &plane,
        stage: &mut stage,
        runtime: &runtime,
        node: Some(node),
        wanted: BTreeMap::new(),
        count: 0,
        random: arguments.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        readers: Vec::new(),
    };
    let result = soak.all(Duration::from_secs(arguments.minutes * 60), &start);
    let Soak { node, readers, .. } = soak;
    end_all(readers);
    if let Some(mut node) = node {
        node.stop();
    }
    plane.close()?;
    stage.close()?;
    let leaks = result?;
    for leak in &leaks {
        println!("leaked: {leak}");
    }
    Ok(leaks.is_empty())
}

struct Soak<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    stage: &'a mut Stage,
    runtime: &'a Containerd,
    node: Option<Node>,
    /// Pods by name, and which kind each is.
    wanted: BTreeMap<String, usize>,
    count: usize,
    random: u64,
    /// Followed logs and sessions.
    readers: Vec<Child>,
}

/// Faults in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KubeletKilled,
    RuntimeRestarted,
    ApiServerAway,
    DiskFilled,
}

impl crate::node::Bench for Soak<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        match &mut self.node {
            Some(node) => (self.shell, node),
            // Only between its kill and its next start, where nobody asks.
            None => unreachable!("no kubelet runs"),
        }
    }
}

impl Soak<'_> {
    /// What leaked.
    fn all(&mut self, time: Duration, start: &dyn Fn(&Stage) -> Result<Node>) -> Result<Vec<String>> {
        self.until("the node is Ready", Duration::from_secs(120), STEP, |s| {
            Ok(is_ready(&s.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.unwrap_or_default()))
        })?;
        for (kind, fields) in
            [("configmaps", json!({"data": {"k": "1"}})), ("secrets", json!({"stringData": {"k": "1"}}))]
        {
            let mut object = fields;
            object["metadata"] = json!({"name": "shared"});
            self.plane.api().create(&format!("/api/v1/namespaces/soak/{kind}"), &object)?;
        }
        let begun = Instant::now();
        let mut rounds = 0;
        let mut empty = None;
        for half in 0..2_u32 {
            self.fill()?;
            let end = time / 2 * (half + 1);
            let before = rounds;
            while begun.elapsed() < end || rounds == before {
                let mut faults = vec![Fault::RuntimeRestarted, Fault::ApiServerAway, Fault::DiskFilled];
                if half == 0 {
                    faults.insert(0, Fault::KubeletKilled);
                }
                for fault in faults {
                    self.strike(fault, start)?;
                }
                rounds += 1;
                let held = self.held()?;
                println!(
                    "  {:>4.0} s, round {rounds}: {} pods so far, with fifty {held:?}",
                    begun.elapsed().as_secs_f64(),
                    self.count
                );
            }
            let pods = self.count;
            self.empty()?;
            let now = (self.rested()?, self.paths());
            println!(
                "  {:>4.0} s, empty: {:?}, {} files and directories",
                begun.elapsed().as_secs_f64(),
                now.0,
                now.1.len()
            );
            let Some((held, paths)) = &empty else {
                empty = Some(now);
                continue;
            };
            let mut leaks = self.left();
            for (what, before, after, more) in [
                ("open files", held.files, now.0.files, SLACK),
                ("threads", held.threads, now.0.threads, SLACK),
                ("tasks", held.tasks, now.0.tasks, SLACK),
                ("KiB of memory", held.memory, now.0.memory, held.memory / 5 + 2048),
            ] {
                println!("  {what}: {before} before, {after} after");
                if after > before + more {
                    leaks.push(format!("{} {what}", after - before));
                }
            }
            let (_, node) = self.parts();
            let log = fs::read(&node.log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
            leaks.extend(log.lines().filter(|l| l.contains("panicked at")).map(|l| format!("a task: {l}")));
            leaks.extend(now.1.difference(paths).map(|p| format!("{}", p.display())));
            println!("{pods} pods came and went in {rounds} rounds of faults; {} leaks", leaks.len());
            return Ok(leaks);
        }
        bail!("there are two halves")
    }

    /// One of so many numbers.
    fn chance(&mut self, of: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % of as u64).unwrap_or_default()
    }

    /// As many pods as there should be.
    fn fill(&mut self) -> Result<()> {
        for (count, prefix) in COUNTS.into_iter().zip(["p", "s"]) {
            while self.wanted.keys().filter(|n| n.starts_with(prefix)).count() < count {
                self.come(prefix)?;
            }
        }
        self.settle("all have come")
    }

    fn come(&mut self, prefix: &str) -> Result<()> {
        self.count += 1;
        let name = format!("{prefix}{}", self.count);
        let kind = match self.count % 7 {
            // A static pod names no object, and one that has ended before its mirror pod could be made has none.
            1 | 6 if prefix == "s" => 0,
            kind => kind,
        };
        if prefix == "p" {
            self.plane.api().create(PODS, &pod(&name, kind))?;
        } else {
            self.write(&name, &pod(&name, kind))?;
        }
        self.wanted.insert(name, kind);
        Ok(())
    }

    fn write(&self, name: &str, pod: &Value) -> Result<()> {
        let dir = self.stage.dir().join("manifests");
        let (temporary, file) = (dir.join(format!(".{name}")), dir.join(format!("{name}.json")));
        fs::write(&temporary, serde_json::to_vec(pod)?)?;
        fs::rename(&temporary, &file).with_context(|| format!("write {}", file.display()))
    }

    fn go(&mut self, name: &str) -> Result<()> {
        self.wanted.remove(name);
        if name.starts_with('s') {
            fs::remove_file(self.stage.dir().join("manifests").join(format!("{name}.json")))?;
            return Ok(());
        }
        self.plane.api().delete(&format!("{PODS}/{name}"), &json!({}))
    }

    /// One pod goes and another one comes. Nothing happens while the API server is away.
    fn change(&mut self, api: bool) -> Result<()> {
        let (prefix, all): (&str, Vec<String>) = if api && self.chance(5) > 0 {
            ("p", self.wanted.keys().filter(|n| n.starts_with('p')).cloned().collect())
        } else {
            ("s", self.wanted.keys().filter(|n| n.starts_with('s')).cloned().collect())
        };
        let name = all[self.chance(all.len())].clone();
        self.go(&name)?;
        self.come(prefix)
    }

    /// Changes for so long.
    fn churn(&mut self, time: Duration, api: bool) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.change(api)?;
            self.shell.wait(CHANGE, || false)?;
        }
        Ok(())
    }

    /// One fault in the middle of changes, and what comes of it.
    fn strike(&mut self, fault: Fault, start: &dyn Fn(&Stage) -> Result<Node>) -> Result<()> {
        self.read()?;
        self.churn(Duration::from_secs(6), true)?;
        match fault {
            Fault::KubeletKilled => {
                drop(self.node.take());
                let away = Duration::from_secs(self.chance(4) as u64);
                self.churn(away, true)?;
                self.node = Some(start(self.stage)?);
            }
            Fault::RuntimeRestarted => {
                self.stage.kill_containerd();
                self.churn(Duration::from_secs(3), true)?;
                self.stage.start_containerd(self.runtime, &[], false)?;
            }
            Fault::ApiServerAway => {
                self.plane.stop_api_server();
                self.churn(Duration::from_secs(12), false)?;
                self.plane.start_api_server()?;
            }
            Fault::DiskFilled => {
                let filler = "dd if=/dev/zero of=/e/big bs=1M count=24; exec sleep 1000000";
                let mut hog = one("hog", &[("c", filler)], json!([{"name": "e", "emptyDir": {"sizeLimit": "8Mi"}}]));
                hog["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "e", "mountPath": "/e"}]);
                self.plane.api().create(PODS, &hog)?;
                self.until("the pod that fills its disk is evicted", SETTLE, STEP, |s| {
                    let hog = s.plane.api().find(&format!("{PODS}/hog"))?.unwrap_or_default();
                    Ok(hog["status"]["reason"] == "Evicted")
                })?;
                self.plane.api().delete(&format!("{PODS}/hog"), &json!({}))?;
            }
        }
        self.churn(Duration::from_secs(4), true)?;
        end_all(std::mem::take(&mut self.readers));
        self.settle(&format!("after {fault:?}"))
    }

    /// Some follow logs and talk to containers, and go without a word.
    fn read(&mut self) -> Result<()> {
        let some: Vec<String> = self
            .wanted
            .iter()
            .filter(|(n, k)| n.starts_with('p') && **k != 6)
            .map(|(n, _)| n.clone())
            .take(4)
            .collect();
        for (n, name) in some.iter().enumerate() {
            let mut kubectl = self.plane.kubectl_command();
            let command: &[&str] = match n % 2 {
                0 => &["logs", "-f", "-c", "c"],
                _ => &["exec", "-c", "c"],
            };
            kubectl.args(["-n", "soak"]).args(command).arg(name);
            if n % 2 == 1 {
                kubectl.args(["--", "sleep", "1000"]);
            }
            let child = kubectl.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("cannot start kubectl")?;
            self.readers.push(child);
        }
        Ok(())
    }

    /// Waits until every pod is as it should be, and no other one is there.
    fn settle(&mut self, when: &str) -> Result<()> {
        let begun = Instant::now();
        let mut wrong = Vec::new();
        loop {
            let found = self.plane.api().list(PODS)?;
            let name = |p: &Value| p["metadata"]["name"].as_str().unwrap_or_default().replace(&format!("-{NODE}"), "");
            let all: BTreeMap<String, &Value> = found.iter().map(|p| (name(p), p)).collect();
            wrong.clear();
            for (name, kind) in &self.wanted {
                match all.get(name) {
                    None => wrong.push(format!("{name} is not there")),
                    Some(pod) if !is_fine(pod, *kind) => {
                        wrong.push(format!("{name} of kind {kind}: {}", pod["status"]))
                    }
                    Some(_) => {}
                }
            }
            wrong.extend(all.keys().filter(|n| !self.wanted.contains_key(*n)).map(|n| format!("{n} is still there")));
            if wrong.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > SETTLE {
                let (_, node) = self.parts();
                let what = format!("{when}, {} s later: {}", SETTLE.as_secs(), wrong.join("\n"));
                return Err(node.fail(&what));
            }
            self.pause(STEP)?;
        }
    }

    /// All pods go.
    fn empty(&mut self) -> Result<()> {
        for name in self.wanted.keys().cloned().collect::<Vec<_>>() {
            self.go(&name)?;
        }
        self.settle("all have gone")?;
        // What is left is looked for when it had its time.
        let begun = Instant::now();
        while !self.left().is_empty() && begun.elapsed() < Duration::from_secs(90) {
            self.pause(STEP)?;
        }
        Ok(())
    }

    /// What is left of pods: in the runtime, on disk, mounts, control groups.
    fn left(&self) -> Vec<String> {
        let mut left = self.node.as_ref().map(|node| node.remains(self.stage)).unwrap_or_default();
        // A runtime that is killed in the middle of a start forgets the shim that it had begun: containers and tasks are asked for below.
        left.retain(|what| !what.starts_with("shim "));
        let socket = self.stage.socket();
        let ctr = |what: &str| {
            let out = Command::new(&self.runtime.ctr)
                .arg("-a")
                .arg(&socket)
                .args(["-n", "k8s.io", what, "ls", "-q"])
                .output();
            let text = out.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
            text.lines().map(|id| format!("{what} {id}")).collect::<Vec<_>>()
        };
        left.extend(["containers", "tasks"].into_iter().flat_map(ctr));
        let logs = entries(&self.stage.dir().join("logs"));
        left.extend(logs.iter().map(|p| format!("logs {}", p.display())));
        let links = entries(Path::new("/var/log/containers"));
        let ours = links.iter().filter(|l| fs::read_link(l).is_ok_and(|t| t.starts_with(self.stage.dir())));
        left.extend(ours.map(|l| format!("link {}", l.display())));
        let leases = entries(&self.stage.dir().join("ipam")).into_iter().flat_map(|network| entries(&network));
        let is_address = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("10."));
        left.extend(leases.filter(is_address).map(|p| format!("address {}", p.display())));
        left
    }

    /// Everything below the kubelet's directory.
    fn paths(&self) -> BTreeSet<PathBuf> {
        let root = self.stage.dir().join("root");
        let (mut found, mut dirs) = (BTreeSet::new(), vec![root.clone()]);
        while let Some(dir) = dirs.pop() {
            for path in entries(&dir) {
                if path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
                    dirs.push(path.clone());
                }
                found.insert(path.strip_prefix(&root).unwrap_or(&path).to_owned());
            }
        }
        found
    }

    fn held(&mut self) -> Result<Held> {
        let (_, node) = self.parts();
        let count = |what: &str| entries(Path::new(&format!("/proc/{}/{what}", node.pid()))).len() as u64;
        let (files, threads) = (count("fd"), count("task"));
        let [memory] = node.memory(["VmRSS"])?;
        let page = format!("/api/v1/nodes/{NODE}/proxy/debug/pprof/goroutine?debug=1");
        let (code, page) = self.plane.api().request("GET", &page, "", None)?;
        let page = String::from_utf8_lossy(&page).into_owned();
        let tasks = page.strip_prefix("tasks: ").and_then(|rest| rest.split(' ').next()?.parse().ok());
        let tasks = tasks.with_context(|| format!("the page about tasks ({code}): {page}"))?;
        Ok(Held { files, threads, tasks, memory })
    }

    /// What it holds when it has had nothing to do for a while.
    fn rested(&mut self) -> Result<Held> {
        self.pause(REST)?;
        self.held()
    }
}

fn end_all(readers: Vec<Child>) {
    for mut reader in readers {
        let _ = reader.kill();
        let _ = reader.wait();
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

/// A pod of the node, of these containers, each a name and a script.
fn one(name: &str, containers: &[(&str, &str)], volumes: Value) -> Value {
    let container = |(name, script): &(&str, &str)| json!({"name": name, "image": "lab.test/busybox:1", "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script]});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "soak"},
        "spec": {
            "nodeName": NODE, "terminationGracePeriodSeconds": 2, "volumes": volumes,
            "containers": containers.iter().map(container).collect::<Vec<_>>(),
        },
    })
}

/// Pods of seven kinds.
fn pod(name: &str, kind: usize) -> Value {
    const HOLD: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";
    let empty = json!([{"name": "e", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}]);
    let mounts = json!([{"name": "e", "mountPath": "/e"}, {"name": "m", "mountPath": "/m"}, {"name": "e", "mountPath": "/sub", "subPath": "a/b"}]);
    match kind {
        0 => {
            let mut pod = one(name, &[("c", HOLD), ("d", "exec sleep 1000000")], empty);
            pod["spec"]["containers"][0]["volumeMounts"] = mounts;
            pod
        }
        1 => {
            let volumes = json!([{"name": "m", "configMap": {"name": "shared"}}, {"name": "s", "secret": {"secretName": "shared"}},
                {"name": "p", "projected": {"sources": [{"configMap": {"name": "shared"}}, {"serviceAccountToken": {"path": "t", "expirationSeconds": 600}}]}}]);
            let mut pod = one(name, &[("c", HOLD)], volumes);
            pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "m", "mountPath": "/m"}, {"name": "s", "mountPath": "/s"},
                {"name": "p", "mountPath": "/p"}, {"name": "m", "mountPath": "/k", "subPath": "k"}]);
            pod
        }
        2 => {
            let mut pod = one(name, &[("c", HOLD)], json!([]));
            let init = one("", &[("i", "sleep .2"), ("s", HOLD)], json!([]))["spec"]["containers"].take();
            pod["spec"]["initContainers"] = init;
            pod["spec"]["initContainers"][1]["restartPolicy"] = json!("Always");
            pod
        }
        3 => {
            let mut pod = one(name, &[("c", HOLD)], json!([]));
            let probe =
                json!({"exec": {"command": ["true"]}, "periodSeconds": 3, "timeoutSeconds": 10, "failureThreshold": 5});
            for kind in ["readinessProbe", "livenessProbe", "startupProbe"] {
                pod["spec"]["containers"][0][kind] = probe.clone();
            }
            pod["spec"]["containers"][0]["lifecycle"] =
                json!({"preStop": {"exec": {"command": ["true"]}}, "postStart": {"exec": {"command": ["true"]}}});
            pod
        }
        4 => one(name, &[("c", "sleep 2; exit 1"), ("d", HOLD)], json!([])),
        5 => one(name, &[("c", "while :; do seq 1 200; sleep 1; done")], json!([])),
        _ => {
            let mut pod = one(name, &[("c", "sleep 2")], json!([{"name": "e", "emptyDir": {}}]));
            pod["spec"]["restartPolicy"] = json!("Never");
            pod
        }
    }
}

/// Whether a pod of this kind is as it should be.
fn is_fine(pod: &Value, kind: usize) -> bool {
    let status = &pod["status"];
    let going = pod["metadata"]["deletionTimestamp"].is_string();
    let containers = status["containerStatuses"].as_array().map(Vec::as_slice).unwrap_or_default();
    let running = |c: &Value| c["state"]["running"].is_object();
    !going
        && match kind {
            4 => {
                containers.iter().any(|c| c["name"] == "d" && running(c))
                    && containers.iter().any(|c| c["restartCount"].as_u64() > Some(0))
            }
            // A runtime that was killed when it ended does not know how.
            6 => status["phase"] == "Succeeded" || status["phase"] == "Failed",
            _ => !containers.is_empty() && containers.iter().all(|c| running(c) && c["ready"] == true),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_a_pod() {
        for kind in 0..7 {
            let pod = pod("a", kind);
            assert!(pod["spec"]["containers"][0]["command"][2].is_string(), "{pod}");
            assert!(!is_fine(&pod, kind), "it has no status yet");
        }
        let status = json!({"status": {"containerStatuses": [{"name": "c", "ready": true, "state": {"running": {}}}]}});
        assert!(is_fine(&status, 0) && !is_fine(&status, 4) && !is_fine(&status, 6));
    }
}
