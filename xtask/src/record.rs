//! `cargo xtask dist --record`: watches which functions of rubelet run, and writes their list ([`crate::order`]).
//!
//! rubelet runs under valgrind's callgrind as the node of a control plane on a real containerd, and goes through what a node does: it starts, pods come,
//! with volumes and probes, containers end and start again, its pages are read, pods go; then it idles. The functions of idling come first in the list, then those
//! of pods' lives, then those that run at the start only: what is needed always is together, and what is not needed any more is too.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rig::Stage;
use rig::cluster::{ControlPlane, Options, is_ready, kubelet_config};
use serde_json::{Value, json};

use crate::joined::pod;
use crate::node::{Bench as _, Node};
use crate::shell::Shell;
use crate::{dist, order, setup};

const NODE: &str = "node-1";
const NAMESPACE: &str = "bench";
/// Under valgrind everything takes 50 times as long.
const LIMIT: Duration = Duration::from_secs(600);
const STEP: Duration = Duration::from_secs(1);
/// Until what the start has left to do is done.
const SETTLE: Duration = Duration::from_secs(45);
/// Containers end once in 15 s, and pages are read.
const LIFE: Duration = Duration::from_secs(90);
/// Long enough for what a node does each minute.
const IDLE: Duration = Duration::from_secs(130);
const PODS: usize = 6;

/// Records and writes the list.
///
/// # Errors
/// A part is missing, or rubelet does not get through.
pub(crate) fn run(shell: &Shell) -> Result<()> {
    setup::prepare(shell)?;
    setup::control_plane(shell, &Options::default())?;
    ensure!(rig::find_program("valgrind").is_some(), "valgrind is not installed");
    // A program of before, with its symbols, gives nearly the same list.
    let program = match std::env::var_os("RUBELET_BIN") {
        Some(program) => std::path::absolute(PathBuf::from(program)).context("RUBELET_BIN")?,
        None => dist::with_symbols(shell)?,
    };
    let mut stage = Stage::create("record")?;
    stage.start_containerd(&setup::reference(shell)?, &setup::images(shell)?, false)?;
    let plane = ControlPlane::start("record", Options::default())?;
    plane.namespace(NAMESPACE)?;
    let out = stage.dir().join("callgrind.out");
    let script = stage.dir().join("rubelet");
    let options = "--tool=callgrind --demangle=no --compress-strings=no --compress-pos=no";
    let text = format!(
        "#!/bin/sh\nexec valgrind {options} --callgrind-out-file={} {} \"$@\"\n",
        out.display(),
        program.display()
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let mut fields = kubelet_config(&plane, &stage.address());
    fields["authentication"]["anonymous"]["enabled"] = json!(true);
    fields["authorization"] = json!({"mode": "AlwaysAllow"});
    fields["runtimeRequestTimeout"] = json!("10m");
    let node = Node::start(&stage, &script, &fields, &plane.node_flags(NODE, &stage.address())?)?;
    let mut watched = Watched { shell, plane: &plane, node, out: &out };
    let phases = watched.phases();
    watched.node.stop();
    drop(watched);
    let phases = phases?;
    plane.close()?;
    stage.close()?;
    let own = order::functions(&program)?;
    let keys = keys(&phases, &own);
    let head = format!(
        "The functions of rubelet that run, in the order in which they are to stand in the program: those of an idle node, of pods' lives, of the start.\n\
         Made by `cargo xtask dist --record`; each is the beginning of the SHA-256 of its name without hashes (xtask/src/order.rs).\n\
         {} functions of {}.",
        keys.len(),
        own.len()
    );
    let list = crate::root().join(dist::LIST);
    fs::write(&list, order::format(&head, &keys)).with_context(|| format!("cannot write {}", list.display()))?;
    println!("{}: {} of {} functions", list.display(), keys.len(), own.len());
    Ok(())
}

/// The keys of what ran, each once: of the last phase first, and within a phase in the order in which the functions stand in the program.
fn keys(phases: &[HashSet<String>], own: &[String]) -> Vec<u64> {
    let mut seen = HashSet::new();
    let of_phase = |ran: &HashSet<String>| own.iter().filter(|name| ran.contains(*name)).cloned().collect::<Vec<_>>();
    let names = phases.iter().rev().flat_map(of_phase);
    names.filter_map(|name| order::key(&name)).filter(|key| seen.insert(*key)).collect()
}

struct Watched<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    node: Node,
    out: &'a Path,
}

impl crate::node::Bench for Watched<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        (self.shell, &mut self.node)
    }
}

impl Watched<'_> {
    /// The functions that ran in the start, in pods' lives, and idling.
    fn phases(&mut self) -> Result<Vec<HashSet<String>>> {
        self.until("the node is Ready", LIMIT, STEP, |w| {
            Ok(is_ready(&w.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.unwrap_or_default()))
        })?;
        let start = self.ran()?;
        self.objects()?;
        for n in 0..PODS {
            self.create(&self::plain(n))?;
        }
        self.create(&self::rich())?;
        self.create(&self::failing())?;
        self.running(PODS + 1)?;
        println!("  the pods run");
        self.pause(SETTLE)?;
        for _ in 0..3 {
            self.pause(LIFE / 3)?;
            self.read_pages();
        }
        for name in ["p0", "rich", "failing"] {
            self.plane.api().delete(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}"), &json!({}))?;
        }
        self.until("three pods are gone", LIMIT, STEP, |w| Ok(w.pods()?.len() == PODS - 1))?;
        self.pause(SETTLE)?;
        let life = self.ran()?;
        println!("  idle");
        self.pause(IDLE)?;
        Ok(vec![start, life, self.ran()?])
    }

    /// What the pod with volumes takes from the API server.
    fn objects(&self) -> Result<()> {
        let make = |kind: &str, object: &Value| {
            self.plane.api().create(&format!("/api/v1/namespaces/{NAMESPACE}/{kind}"), object)
        };
        make("configmaps", &json!({"metadata": {"name": "c"}, "data": {"a": "b"}}))?;
        make("secrets", &json!({"metadata": {"name": "s"}, "stringData": {"a": "b"}}))?;
        Ok(())
    }

    fn create(&self, pod: &Value) -> Result<()> {
        self.plane.api().create(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), pod)?;
        Ok(())
    }

    fn pods(&self) -> Result<Vec<Value>> {
        self.plane.api().list(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))
    }

    fn running(&mut self, count: usize) -> Result<()> {
        self.until("the pods run", LIMIT, STEP, |w| {
            let ready = |p: &&Value| p["status"]["containerStatuses"][0]["ready"] == true;
            Ok(w.pods()?.iter().filter(ready).count() >= count)
        })
    }

    /// Reads the pages that a node is asked for. What is refused has run all the same.
    fn read_pages(&self) {
        let port = u16::try_from(self.node.config["readOnlyPort"].as_u64().unwrap_or_default()).unwrap_or_default();
        for page in [
            "/metrics",
            "/metrics/cadvisor",
            "/metrics/resource",
            "/metrics/probes",
            "/stats/summary",
            "/pods",
            "/healthz",
        ] {
            let _ = rig::http::get_tcp(port, page);
        }
    }

    /// The functions that ran since the last call.
    fn ran(&mut self) -> Result<HashSet<String>> {
        let before = self.dumps();
        let mut dump = Command::new("callgrind_control");
        dump.arg("--dump").arg(self.node.pid().to_string());
        self.shell.need("dump", &mut dump, LIMIT)?;
        let there = self.shell.wait(LIMIT, || self.dumps().len() > before.len())?;
        ensure!(there, "callgrind wrote nothing");
        let mut ran = HashSet::new();
        for file in self.dumps().iter().filter(|file| !before.contains(file)) {
            let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            ran.extend(names(&String::from_utf8_lossy(&text)));
        }
        println!("  {} functions ran", ran.len());
        Ok(ran)
    }

    /// Callgrind's files so far.
    fn dumps(&self) -> Vec<PathBuf> {
        let dir = self.out.parent().unwrap_or(Path::new("/"));
        let own = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("callgrind.out."));
        fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).filter(own).collect()
    }
}

/// The functions of a file of callgrind's, with and without calls that it counts apart because they call themselves.
fn names(text: &str) -> impl Iterator<Item = String> {
    let names = text.lines().filter_map(|line| line.strip_prefix("fn="));
    names.map(|name| name.split('\'').next().unwrap_or(name).to_owned())
}

fn plain(n: usize) -> Value {
    pod(&format!("p{n}"), "exec sleep 1000000", "Always")
}

/// One that ends again and again.
fn failing() -> Value {
    pod("failing", "sleep 15; exit 1", "Always")
}

/// One with volumes, variables and probes.
fn rich() -> Value {
    let mut pod = pod("rich", "while sleep 1; do echo $A; done", "Always");
    let spec = &mut pod["spec"];
    spec["volumes"] = json!([
        {"name": "e", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}, {"name": "s", "secret": {"secretName": "s"}},
        {"name": "p", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token"}}, {"downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        ]}},
    ]);
    let container = &mut spec["containers"][0];
    let mount = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    container["volumeMounts"] = json!(["e", "c", "s", "p"].map(mount));
    container["env"] = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}}]);
    container["resources"] = json!({"requests": {"cpu": "10m", "memory": "10Mi"}, "limits": {"memory": "50Mi"}});
    container["readinessProbe"] = json!({"exec": {"command": ["true"]}, "periodSeconds": 5, "timeoutSeconds": 5});
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_file_of_callgrind() {
        let text = "fl=???\nfn=_RNvCs1_1a1b\n0 3\ncfn=_RNvCs1_1a1c\ncalls=1 0\n0 2\nfn=_RNvCs1_1a1d'2\n0 1\n";
        assert_eq!(names(text).collect::<Vec<_>>(), ["_RNvCs1_1a1b", "_RNvCs1_1a1d"]);
    }

    #[test]
    fn what_idles_comes_first_and_each_once() {
        let [a, b, c] = ["_RNvCs1_1a1a", "_RNvCs1_1a1b", "_RNvCs1_1a1c"];
        let set = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<HashSet<_>>();
        let own = [c, b, a, "memcpy"].map(str::to_owned);
        let key = |name: &str| order::key(name).unwrap();
        // Of other programs' functions, and of those without a Rust name, there is none.
        let phases = [set(&[a, b, "memcpy"]), set(&[b, "_RNvCs1_1z1z"]), set(&[c, b])];
        assert_eq!(keys(&phases, &own), [key(c), key(b), key(a)]);
    }
}
