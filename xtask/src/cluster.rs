//! `cargo xtask cluster`: a control plane, a runtime and one node on this machine, from nothing and away again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rig::Stage;
use rig::cluster::{ControlPlane, Options, is_ready, kubelet_config};
use serde_json::Value;

use crate::node::Node;
use crate::setup;
use crate::shell::{Interrupted, Shell};

/// The node's name.
const NODE: &str = "node-1";
const DEPLOYMENT: &str = include_str!("cluster.yaml");
const REPLICAS: usize = 10;
const PODS: &str = "/api/v1/namespaces/default/pods";

/// Runs the cluster; with `once` true when the deployment behaved and nothing is left.
///
/// # Errors
/// Says what is missing on this machine, or which step failed, with the end of the node's log.
pub(crate) fn run(shell: &Shell, kubelet: Option<&Path>, once: bool) -> Result<bool> {
    println!("rubelet cluster: etcd, the API server, scheduler, controller manager, a private containerd and one node");
    setup::prepare(shell)?;
    if !crate::remove_remains() {
        bail!("what an earlier run left is in the way; see above");
    }
    setup::control_plane(shell, &Options::all())?;
    let runtime = setup::reference(shell)?;
    let images = setup::images(shell)?;
    let program = match kubelet {
        Some(program) => std::path::absolute(program).context("--kubelet")?,
        None => setup::rubelet(shell, true)?,
    };
    shell.check()?;
    let mut stage = Stage::create("cluster")?;
    let mut cluster = Cluster { plane: None, node: None };
    let shown = timed("containerd runs", || stage.start_containerd(&runtime, &images, true))
        .and_then(|()| cluster.show(shell, &stage, &program, once));
    if shown.is_err() || shell.stopped() {
        println!();
    }
    let closed = cluster.close().and(stage.close());
    match shown {
        Ok(()) => {}
        // Ctrl-C is how it is meant to end.
        Err(e) if e.is::<Interrupted>() && !once => {}
        Err(e) => return Err(e),
    }
    closed.map_err(|e| anyhow!("not clean: {e:#}; `cargo xtask tidy` tries again"))?;
    println!("nothing of it is left");
    Ok(true)
}

/// Runs a step and says how long it took.
fn timed<T>(what: &str, step: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let done = step()?;
    println!("  {what:<44} {:>6.1} s", start.elapsed().as_secs_f64());
    Ok(done)
}

struct Cluster {
    plane: Option<ControlPlane>,
    node: Option<Node>,
}

impl Cluster {
    fn show(&mut self, shell: &Shell, stage: &Stage, program: &Path, once: bool) -> Result<()> {
        shell.check()?;
        let plane = self.plane.insert(timed("the control plane is ready", || {
            let plane = ControlPlane::start("cluster", Options::all())?;
            plane.wait_service_account("default")?;
            Ok(plane)
        })?);
        shell.check()?;
        let flags = plane.node_flags(NODE, &stage.address())?;
        let fields = kubelet_config(plane, &stage.address());
        let node = self.node.insert(Node::start(stage, program, &fields, &flags)?);
        timed("the node is ready", || ready(shell, plane, node))?;
        if once {
            return once_through(shell, stage, plane, node);
        }
        let kubectl = rig::lab().join("bin/kubectl");
        println!("\nThe node is {}, process {}, log {}", program.display(), node.pid(), node.log.display());
        println!("\n    export KUBECONFIG={}", plane.admin_kubeconfig().display());
        println!("    alias kubectl={}\n", kubectl.display());
        println!(
            "Three things to try, in another terminal (there is no registry; the images here are lab.test/busybox:1 and :2):"
        );
        println!("    kubectl create deployment web --image=lab.test/busybox:1 --replicas=10 -- httpd -f -p 8080");
        println!("    kubectl get pods -o wide -w");
        println!("    kubectl exec deploy/web -- wget -qO- http://127.0.0.1:8080/etc/hostname");
        println!("\nCtrl-C ends it and removes all of it.");
        loop {
            shell.check()?;
            node.ended()?;
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Ends the node and the control plane; the pods that still run go with the stage.
    fn close(self) -> Result<()> {
        if let Some(mut node) = self.node
            && !node.stop()
        {
            println!("the kubelet did not end within 10 s of SIGTERM and was killed");
        }
        self.plane.map_or(Ok(()), ControlPlane::close)
    }
}

/// Waits until the node has registered and is Ready.
fn ready(shell: &Shell, plane: &ControlPlane, node: &mut Node) -> Result<()> {
    let path = format!("/api/v1/nodes/{NODE}");
    let mut last = Value::Null;
    let up = wait(shell, node, Duration::from_secs(90), || {
        last = plane.api().find(&path)?.unwrap_or_default();
        Ok(is_ready(&last))
    })?;
    if up {
        return Ok(());
    }
    let why = if last.is_null() { "is not registered" } else { "is not Ready" };
    Err(node.fail(&format!("the node {why} after 90 s: {}", last["status"]["conditions"])))
}

/// Waits for the API server to say what is wanted, while the kubelet lives.
fn wait(shell: &Shell, node: &mut Node, limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Result<bool> {
    let mut broken = Ok(());
    let met = shell.wait(limit, || {
        std::thread::sleep(Duration::from_millis(80));
        broken = node.ended();
        match done() {
            Ok(met) => met || broken.is_err(),
            Err(e) => {
                broken = Err(e);
                true
            }
        }
    })?;
    broken.map(|()| met)
}

/// A deployment's life: made, used, rolled out anew, scaled to nothing, deleted.
fn once_through(shell: &Shell, stage: &Stage, plane: &ControlPlane, node: &mut Node) -> Result<()> {
    let file = stage.dir().join("deployment.yaml");
    std::fs::write(&file, DEPLOYMENT)?;
    let file = file.display().to_string();
    let kubectl = |what: &str, arguments: &[&str]| -> Result<String> {
        let mut command = plane.kubectl_command();
        command.args(arguments);
        let log = shell.log(what);
        let ended = shell.run(what, &mut command, Duration::from_secs(180))?;
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        if !ended.success() {
            bail!("{what}: kubectl {}: {ended}: {}", arguments.join(" "), said.trim());
        }
        Ok(said)
    };
    let rollout = ["rollout", "status", "deployment/web", "--timeout=170s"];
    timed("a deployment of 10 is made and available", || {
        kubectl("create", &["create", "-f", &file])?;
        kubectl("rollout status", &rollout).map_err(|e| with_log(node, e))
    })?;
    timed("kubectl logs", || {
        let said = kubectl("logs", &["logs", "deployment/web"])?;
        if said.contains("hello from web-") { Ok(()) } else { Err(anyhow!("kubectl logs gives {said:?}")) }
    })?;
    timed("kubectl exec", || {
        let said =
            kubectl("exec", &["exec", "deployment/web", "--", "wget", "-qO-", "http://127.0.0.1:8080/hostname"])?;
        if said.starts_with("web-") { Ok(()) } else { Err(anyhow!("kubectl exec gives {said:?}")) }
    })?;
    timed("a rollout to another image", || {
        kubectl("set image", &["set", "image", "deployment/web", "web=lab.test/busybox:2"])?;
        kubectl("rollout status", &rollout).map_err(|e| with_log(node, e))?;
        let all_new = |pods: &[Value]| {
            pods.len() == REPLICAS
                && pods.iter().all(|p| p["status"]["containerStatuses"][0]["image"] == "lab.test/busybox:2")
        };
        pods(shell, plane, node, "10 pods with the new image alone", all_new)
    })?;
    timed("scaled to 0, and no pod is left", || {
        kubectl("scale", &["scale", "deployment/web", "--replicas=0"])?;
        pods(shell, plane, node, "no pods", <[Value]>::is_empty)
    })?;
    timed("nothing of the pods is left on the node", || {
        if shell.wait(Duration::from_secs(30), || node.remains(stage).is_empty())? {
            return Ok(());
        }
        Err(node.fail(&format!("left: {}", node.remains(stage).join(", "))))
    })?;
    timed("the deployment is deleted", || {
        kubectl("delete", &["delete", "deployment/web", "--timeout=60s"])?;
        let gone = || Ok(plane.api().list("/apis/apps/v1/namespaces/default/replicasets")?.is_empty());
        if wait(shell, node, Duration::from_secs(30), gone)? { Ok(()) } else { Err(anyhow!("its replica sets stay")) }
    })
}

/// The error with the end of the kubelet's log, unless it is Ctrl-C.
fn with_log(node: &Node, error: anyhow::Error) -> anyhow::Error {
    if error.is::<Interrupted>() { error } else { node.fail(&format!("{error:#}")) }
}

/// Waits until the pods are as wanted.
fn pods(
    shell: &Shell,
    plane: &ControlPlane,
    node: &mut Node,
    what: &str,
    wanted: impl Fn(&[Value]) -> bool,
) -> Result<()> {
    let mut last = Vec::new();
    let met = wait(shell, node, Duration::from_secs(120), || {
        last = plane.api().list(PODS)?;
        Ok(wanted(&last))
    })?;
    if met {
        return Ok(());
    }
    let shown = last.iter().map(|p| {
        let status = &p["status"]["containerStatuses"][0];
        format!("{} {} {}", p["metadata"]["name"], p["status"]["phase"], status["state"])
    });
    Err(node.fail(&format!("not within 120 s: {what}; there are:\n{}", shown.collect::<Vec<_>>().join("\n"))))
}
