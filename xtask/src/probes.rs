//! `cargo xtask bench --probes`: how soon rubelet and the Go kubelet act on what a probe finds, one after the other on the same kind of stage.
//!
//! The probed server is this program: it notes the moment in which it gives an answer. The stop is seen where it arrives, in the runtime's log (`StopContainer for …`);
//! the readiness in a watch on the API server. So nothing is asked of the kubelets themselves.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;
use rig::Stage;
use rig::cluster::{Api, ControlPlane, Options, is_ready, kubelet_config};
use serde_json::{Value, json};

use crate::bench::median;
use crate::node::{Bench as _, Node};
use crate::setup;
use crate::shell::Shell;

const NODE: &str = "node-1";
const PODS: &str = "/api/v1/namespaces/bench/pods";
/// How long anything may take, and how often it is looked.
const LIMIT: Duration = Duration::from_secs(180);
const STEP: Duration = Duration::from_millis(20);
/// How often each is measured.
const SAMPLES: usize = 20;

/// Milliseconds of one kubelet.
struct Figures {
    name: &'static str,
    stop: Vec<f64>,
    ready: Vec<f64>,
}

/// Measures and prints a table.
///
/// # Errors
/// When a part is missing or a kubelet does not get through.
pub(crate) fn run(shell: &Shell) -> Result<bool> {
    setup::prepare(shell)?;
    setup::control_plane(shell, &Options::default())?;
    let mut all = Vec::new();
    for (name, program) in setup::kubelets(shell)? {
        println!("{name}");
        all.push(one(shell, name, &program)?);
    }
    println!("\nmedians of {SAMPLES} (lowest to highest), ms");
    for (what, get) in [
        ("failing answer of a liveness probe → StopContainer", (|f| &f.stop) as fn(&Figures) -> &Vec<f64>),
        ("good answer of a readiness probe → Ready in the API", |f| &f.ready),
    ] {
        println!("{what}");
        let mut medians = Vec::new();
        for figures in &all {
            let mut values = get(figures).clone();
            values.sort_by(f64::total_cmp);
            let middle = median(values.clone()).unwrap_or(f64::NAN);
            let (low, high) = (values.first().unwrap_or(&f64::NAN), values.last().unwrap_or(&f64::NAN));
            println!("  {:<12} {middle:>9.2}   ({low:.2} to {high:.2})", figures.name);
            medians.push(middle);
        }
        if let [ours, theirs] = medians[..] {
            println!("  {:<12} {:>9.3}", "ratio", ours / theirs);
        }
    }
    Ok(true)
}

fn one(shell: &Shell, name: &'static str, program: &Path) -> Result<Figures> {
    let mut stage = Stage::create("probes")?;
    stage.start_containerd(&setup::reference(shell)?, &setup::images(shell)?, false)?;
    let plane = ControlPlane::start("probes", Options::default())?;
    plane.namespace("bench")?;
    let flags = plane.node_flags(NODE, &stage.address())?;
    let fields = kubelet_config(&plane, &stage.address());
    let mut node = Node::start(&stage, program, &fields, &flags)?;
    let log = stage.containerd_log();
    let measured = Bench { shell, plane: &plane, node: &mut node, log: &log, server: Server::start()? }.measure(name);
    node.stop();
    plane.close()?;
    stage.close()?;
    measured
}

struct Bench<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    node: &'a mut Node,
    log: &'a Path,
    server: Server,
}

impl crate::node::Bench for Bench<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        (self.shell, self.node)
    }
}

impl Bench<'_> {
    fn measure(&mut self, name: &'static str) -> Result<Figures> {
        self.until("the node is Ready", LIMIT, STEP, |b| {
            let found = b.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.unwrap_or_default();
            Ok(is_ready(&found))
        })?;
        for n in 0..SAMPLES {
            self.create(&format!("live{n}"), "livenessProbe")?;
        }
        self.create("ready", "readinessProbe")?;
        self.until("the pods are ready", LIMIT, STEP, |b| {
            let pods = b.plane.api().list(PODS)?;
            Ok(pods.len() == SAMPLES + 1 && pods.iter().all(ready))
        })?;
        self.pause(Duration::from_secs(5))?;
        let mut stop = Vec::new();
        for n in 0..SAMPLES {
            stop.push(self.stop(&format!("live{n}"))?);
        }
        println!("  stops: {stop:.1?}");
        let watch = Watch::start(self.plane.api(), "ready");
        let mut ready = Vec::new();
        for _ in 0..SAMPLES {
            ready.push(self.ready(&watch)?);
        }
        println!("  ready: {ready:.1?}");
        watch.ended.store(true, Ordering::Relaxed);
        Ok(Figures { name, stop, ready })
    }

    /// From the failing answer to the call that stops the container.
    fn stop(&mut self, pod: &str) -> Result<f64> {
        let found = self.plane.api().get(&format!("{PODS}/{pod}"))?;
        let id = found["status"]["containerStatuses"][0]["containerID"].as_str().unwrap_or_default();
        let id = id.rsplit('/').next().unwrap_or_default().to_owned();
        self.server.fail(pod, true);
        let mut stopped = None;
        self.until("the container is stopped", LIMIT, STEP, |b| {
            stopped = stop_call(&fs::read_to_string(b.log)?, &id);
            Ok(stopped.is_some())
        })?;
        let answered = self.server.first(pod).context("it was stopped without being asked")?;
        // It is well again, and the next one has the machine for itself.
        self.server.fail(pod, false);
        self.pause(Duration::from_millis(1500))?;
        Ok(millis(answered, stopped.unwrap_or(answered)))
    }

    /// From the good answer to the watch that shows the pod Ready.
    fn ready(&mut self, watch: &Watch) -> Result<f64> {
        self.server.fail("ready", true);
        self.until("it is not ready", LIMIT, STEP, |_| Ok(watch.since(false).is_some()))?;
        self.pause(Duration::from_millis(300))?;
        self.server.fail("ready", false);
        self.until("it is ready", LIMIT, STEP, |_| Ok(watch.since(true).is_some()))?;
        let answered = self.server.first("ready").context("it is ready without being asked")?;
        let shown = watch.since(true).context("it is not ready any more")?;
        Ok(millis(answered, shown))
    }

    fn create(&self, name: &str, probe: &str) -> Result<()> {
        let asked = json!({"httpGet": {"host": "127.0.0.1", "port": self.server.address.port(), "path": format!("/{name}")},
            "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 5});
        let container = json!({"name": "c", "image": "lab.test/busybox:1", "command": ["sh", "-c", "exec sleep 1000000"], probe: asked});
        let pod = json!({
            "metadata": {"name": name},
            "spec": {"nodeName": NODE, "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false, "containers": [container]},
        });
        self.plane.api().create(PODS, &pod)?;
        Ok(())
    }
}

fn ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn millis(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64() * 1000.0
}

/// When the runtime was asked to stop a container, by its log.
fn stop_call(log: &str, id: &str) -> Option<Timestamp> {
    let asked = format!("StopContainer for \\\"{id}\\\" with timeout");
    let line = log.lines().find(|l| l.contains(&asked))?;
    line.strip_prefix("time=\"")?.split('"').next()?.parse().ok()
}

/// The server that probes ask.
struct Server {
    address: SocketAddr,
    state: Arc<Mutex<BTreeMap<String, Answers>>>,
}

/// What one path is answered, and when it was first since it changed.
#[derive(Default)]
struct Answers {
    fails: bool,
    first: Option<Timestamp>,
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let server = Self { address: listener.local_addr()?, state: Arc::default() };
        let state = server.state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                thread::spawn(move || answer(stream, &state));
            }
        });
        Ok(server)
    }

    fn fail(&self, path: &str, fails: bool) {
        lock(&self.state).insert(format!("/{path}"), Answers { fails, first: None });
    }

    fn first(&self, path: &str) -> Option<Timestamp> {
        lock(&self.state).get(&format!("/{path}"))?.first
    }
}

fn answer(mut stream: TcpStream, state: &Mutex<BTreeMap<String, Answers>>) {
    let mut head = [0; 2048];
    let Ok(n) = stream.read(&mut head) else { return };
    let head = String::from_utf8_lossy(&head[..n]).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    let fails = {
        let mut state = lock(state);
        let answers = state.entry(path.to_owned()).or_default();
        answers.first.get_or_insert_with(Timestamp::now);
        answers.fails
    };
    let status = if fails { "500 Bad" } else { "200 OK" };
    let _ = stream.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").as_bytes());
}

/// A watch on one pod: since when it is Ready, or not.
struct Watch {
    state: Arc<Mutex<Option<(bool, Timestamp)>>>,
    ended: Arc<AtomicBool>,
}

impl Watch {
    fn start(api: &Api, pod: &str) -> Self {
        let watch = Self { state: Arc::default(), ended: Arc::default() };
        let (state, ended, api) = (watch.state.clone(), watch.ended.clone(), api.clone());
        let path = format!("{PODS}?watch=1&fieldSelector=metadata.name%3D{pod}");
        thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let _ = api.watch(&path, |event| {
                    let (at, now) = (Timestamp::now(), ready(&event["object"]));
                    let mut state = lock(&state);
                    if state.is_none_or(|(before, _)| before != now) {
                        *state = Some((now, at));
                    }
                    !ended.load(Ordering::Relaxed)
                });
            }
        });
        watch
    }

    /// Since when it is so; None while it is not.
    fn since(&self, ready: bool) -> Option<Timestamp> {
        lock(&self.state).filter(|(now, _)| *now == ready).map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_calls_of_the_log() {
        let log = concat!(
            "time=\"2026-11-30T03:27:38.427386609Z\" level=info msg=\"starting containerd\" version=2.2.9\n",
            "time=\"2026-11-30T03:28:00.100000000Z\" level=info msg=\"StopContainer for \\\"abc\\\" with timeout 1 (s)\"\n",
            "time=\"2026-11-30T03:29:00.100000000Z\" level=info msg=\"StopContainer for \\\"abc\\\" with timeout 1 (s)\"\n",
        );
        assert_eq!(stop_call(log, "abc"), "2026-11-30T03:28:00.1Z".parse().ok());
        assert_eq!(stop_call(log, "ab"), None);
    }
}
