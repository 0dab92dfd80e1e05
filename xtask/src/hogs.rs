//! `cargo xtask bench --hogs`: rubelet and the Go kubelet by turns as the one node of a control plane, with pods that take too much of it: processes,
//! memory, disk, inodes. Does the right pod go, does the condition come and go once, and does the kubelet answer meanwhile?

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rig::cluster::{ControlPlane, Options, is_ready, kubelet_config};
use rig::{Stage, mounts};
use serde_json::{Value, json};

use crate::node::{Bench as _, Node};
use crate::setup;
use crate::shell::Shell;

const NODE: &str = "node-1";
const PODS: &str = "/api/v1/namespaces/bench/pods";
/// How often `/healthz` is asked for.
const PULSE: Duration = Duration::from_millis(20);
/// How long a hog may go on.
const LIMIT: Duration = Duration::from_secs(120);
/// How often the node is looked at.
const STEP: Duration = Duration::from_millis(250);
/// A condition that comes again within this time flaps.
const CALM: Duration = Duration::from_secs(20);
/// What the pods' group has, and what of it is to stay free.
const MEMORY_MIB: u64 = 300;

/// One who takes too much.
struct Hog {
    name: &'static str,
    condition: &'static str,
    script: &'static str,
    volume: Value,
}

fn hogs() -> [Hog; 4] {
    let disk = || json!({"emptyDir": {}});
    [
        Hog {
            name: "forks",
            condition: "PIDPressure",
            // A bomb within the pod's limit, that does not end when it meets it.
            script: "i=0; while [ $i -lt 900 ]; do sleep 100000 & i=$((i+1)); done; while :; do sh -c : & wait $!; done",
            volume: disk(),
        },
        Hog {
            name: "memory",
            condition: "MemoryPressure",
            script: "dd if=/dev/zero of=/v/big bs=1M count=220; sleep 100000",
            volume: json!({"emptyDir": {"medium": "Memory", "sizeLimit": "250Mi"}}),
        },
        Hog {
            name: "disk",
            condition: "DiskPressure",
            script: "dd if=/dev/zero of=/v/big bs=1M count=1000; sleep 100000",
            volume: disk(),
        },
        Hog {
            name: "inodes",
            condition: "DiskPressure",
            script: "i=0; while [ $i -lt 5300 ]; do : > /v/$i; i=$((i+1)); done; sleep 100000",
            volume: disk(),
        },
    ]
}

/// What became of one hog under one kubelet.
struct Outcome {
    hog: &'static str,
    /// From its start to its end, in seconds.
    gone: Option<f64>,
    evicted: Vec<String>,
    came: usize,
    went: usize,
    /// `/healthz`, in milliseconds, sorted; what was not answered with 200 counts as the time until it was given up.
    health: Vec<f64>,
    refused: usize,
}

impl Outcome {
    fn health(&self, share: f64) -> f64 {
        let last = self.health.len().saturating_sub(1);
        self.health.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
    }

    fn fine(&self) -> bool {
        self.evicted == [self.hog] && (self.came, self.went) == (1, 1) && self.refused == 0
    }
}

/// Measures and prints a table; false when rubelet's node was not protected, or its `/healthz` was slower than Go's.
///
/// # Errors
/// When a part is missing or a kubelet does not get through.
pub(crate) fn run(shell: &Shell) -> Result<bool> {
    if !rustix::process::geteuid().is_root() {
        bail!("needs root: the kubelet's directory gets a file system of its own");
    }
    setup::prepare(shell)?;
    setup::control_plane(shell, &Options::default())?;
    let mut all = Vec::new();
    for (name, program) in setup::kubelets(shell)? {
        println!("{name}");
        all.push((name, one(shell, &program)?));
    }
    println!(
        "\n{:<8} {:<12} {:>8}  {:<12} {:>5} {:>5}  /healthz ms: p50, p99, most; not answered",
        "hog", "kubelet", "gone s", "evicted", "came", "went"
    );
    for n in 0..hogs().len() {
        for (name, outcomes) in &all {
            let o = &outcomes[n];
            let gone = o.gone.map_or("never".to_owned(), |s| format!("{s:.1}"));
            let health = [0.5, 0.99, 1.0].map(|share| format!("{:>7.2}", o.health(share))).concat();
            println!(
                "{:<8} {name:<12} {gone:>8}  {:<12} {:>5} {:>5}  {health} {:>4}",
                o.hog,
                o.evicted.join(","),
                o.came,
                o.went,
                o.refused
            );
        }
    }
    let Some((_, ours)) = all.first() else { return Ok(false) };
    let no_slower = |n: usize, o: &Outcome| all.get(1).is_none_or(|(_, go)| o.health(0.99) <= go[n].health(0.99));
    Ok(ours.iter().enumerate().all(|(n, o)| o.fine() && no_slower(n, o)))
}

fn one(shell: &Shell, program: &Path) -> Result<Vec<Outcome>> {
    let mut stage = Stage::create("hogs")?;
    stage.start_containerd(&setup::reference(shell)?, &setup::images(shell)?, false)?;
    let plane = ControlPlane::start("hogs", Options::default())?;
    plane.namespace("bench")?;
    let root = stage.dir().join("root");
    fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=256m,nr_inodes=6000", "tmpfs"]).arg(&root).status();
    if !mounted.context("cannot start mount")?.success() {
        bail!("cannot mount a tmpfs at {}", root.display());
    }
    let measured = fields(&plane, &stage).and_then(|fields| {
        let mut node = Node::start(&stage, program, &fields, &plane.node_flags(NODE, &stage.address())?)?;
        let outcomes = Bench { shell, plane: &plane, node: &mut node }.all();
        node.stop();
        outcomes
    });
    plane.close()?;
    mounts::detach(&root)?;
    stage.close()?;
    measured
}

/// The node's configuration: it is short of everything after what one hog takes.
fn fields(plane: &ControlPlane, stage: &Stage) -> Result<Value> {
    let number = |path: &str| -> Result<u64> {
        let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        text.trim().parse().with_context(|| format!("{path} says {text:?}"))
    };
    let total = rig::meminfo_kib("MemTotal")?;
    // `0.41 0.5 0.6 2/812 4711`: the tasks that there are.
    let load = fs::read_to_string("/proc/loadavg").context("read /proc/loadavg")?;
    let tasks = load.split_whitespace().nth(3).and_then(|w| w.split_once('/')?.1.parse::<u64>().ok());
    let tasks = tasks.with_context(|| format!("/proc/loadavg says {load:?}"))?;
    let most = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let mut fields = kubelet_config(plane, &stage.address());
    fields["kubeReserved"] = json!({"memory": format!("{}Ki", total - (MEMORY_MIB << 10))});
    fields["podPidsLimit"] = json!(1000);
    fields["evictionHard"] = json!({
        "memory.available": "100Mi", "nodefs.available": "40Mi", "nodefs.inodesFree": "20%",
        "pid.available": (most - tasks - 600).to_string(),
    });
    fields["evictionPressureTransitionPeriod"] = json!("5s");
    Ok(fields)
}

struct Bench<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    node: &'a mut Node,
}

impl crate::node::Bench for Bench<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        (self.shell, self.node)
    }
}

impl Bench<'_> {
    fn all(&mut self) -> Result<Vec<Outcome>> {
        self.until("the node is Ready", LIMIT, STEP, |b| Ok(is_ready(&b.node_object()?)))?;
        // One who takes little: whoever it is that goes, it is not this one.
        self.create("modest", "dd if=/dev/zero of=/v/some bs=1M count=8; sleep 100000", &json!({"emptyDir": {}}))?;
        self.until("the modest pod runs", LIMIT, STEP, |b| Ok(b.phase("modest")? == "Running"))?;
        let mut outcomes = Vec::new();
        for hog in hogs() {
            let outcome = self.hog(&hog)?;
            println!("  {}: {} of {} gone", hog.name, outcome.evicted.join(", "), hog.condition);
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    fn hog(&mut self, hog: &Hog) -> Result<Outcome> {
        let port =
            self.node.config["healthzPort"].as_u64().and_then(|p| u16::try_from(p).ok()).context("no healthz port")?;
        let stop = AtomicBool::new(false);
        let (seen, pulse) = std::thread::scope(|scope| {
            let pulse = scope.spawn(|| pulse(port, &stop));
            let seen = self.watch(hog);
            stop.store(true, Ordering::Relaxed);
            (seen, pulse.join())
        });
        let (gone, came, went) = seen?;
        let Ok((mut health, refused)) = pulse else { bail!("the thread that asks for /healthz panicked") };
        health.sort_by(f64::total_cmp);
        let mut evicted = Vec::new();
        for pod in self.plane.api().list(PODS)? {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if pod["status"]["reason"] == "Evicted" {
                self.plane.api().delete(&format!("{PODS}/{name}"), &json!({"gracePeriodSeconds": 0}))?;
                evicted.push(name);
            }
        }
        if gone.is_none() {
            self.plane.api().delete(&format!("{PODS}/{}", hog.name), &json!({"gracePeriodSeconds": 0}))?;
        }
        Ok(Outcome { hog: hog.name, gone, evicted, came, went, health, refused })
    }

    /// Starts the hog and waits until its condition has come, gone, and stayed away; when the hog was gone, and how often the condition came and went.
    fn watch(&mut self, hog: &Hog) -> Result<(Option<f64>, usize, usize)> {
        self.create(hog.name, hog.script, &hog.volume)?;
        let begin = Instant::now();
        let (mut gone, mut came, mut went) = (None, 0, 0);
        let (mut on, mut calm) = (false, None);
        while begin.elapsed() < LIMIT && calm.is_none_or(|since: Instant| since.elapsed() < CALM) {
            self.pause(STEP)?;
            if gone.is_none() && self.phase(hog.name)? == "Failed" {
                gone = Some(begin.elapsed().as_secs_f64());
            }
            let now = self.condition(hog.condition)?;
            match (on, now) {
                (false, true) => (came, calm) = (came + 1, None),
                (true, false) => (went, calm) = (went + 1, Some(Instant::now())),
                _ => {}
            }
            on = now;
        }
        Ok((gone, came, went))
    }

    fn create(&self, name: &str, script: &str, volume: &Value) -> Result<()> {
        let mut volume = volume.clone();
        volume["name"] = json!("v");
        let pod = json!({
            "metadata": {"name": name},
            "spec": {
                "nodeName": NODE, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false,
                "volumes": [volume],
                "containers": [{"name": "c", "image": "lab.test/busybox:1", "command": ["sh", "-c", script], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            },
        });
        self.plane.api().create(PODS, &pod)?;
        Ok(())
    }

    fn node_object(&self) -> Result<Value> {
        Ok(self.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.unwrap_or_default())
    }

    fn condition(&self, kind: &str) -> Result<bool> {
        let node = self.node_object()?;
        let found = node["status"]["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == kind);
        Ok(found.is_some_and(|c| c["status"] == "True"))
    }

    fn phase(&self, name: &str) -> Result<String> {
        let pod = self.plane.api().find(&format!("{PODS}/{name}"))?.unwrap_or_default();
        Ok(pod["status"]["phase"].as_str().unwrap_or_default().to_owned())
    }
}

/// Asks for `/healthz` until told to stop: milliseconds of each answer, and how many were none.
fn pulse(port: u16, stop: &AtomicBool) -> (Vec<f64>, usize) {
    let (mut took, mut refused) = (Vec::new(), 0);
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let answer = rig::http::get_tcp(port, "/healthz");
        took.push(begin.elapsed().as_secs_f64() * 1000.0);
        refused += usize::from(!answer.is_ok_and(|(code, _)| code == 200));
        std::thread::sleep(PULSE);
    }
    (took, refused)
}
