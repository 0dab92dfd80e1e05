//! `cargo xtask bench --fake`: rubelet alone, as the node of a real control plane but on a fake runtime, with more and more pods: how its
//! memory, its idle work and the cost of one container's exit grow with their number.
//!
//! The fake runtime is a process of its own (`testing/fakes`), so that rubelet's figures are rubelet's. It makes neither processes nor cgroups,
//! and rubelet is told to make none (`cgroupsPerQOS: false`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Zoned;
use rig::cluster::{ControlPlane, Options};
use serde_json::json;

use crate::bench::{keep, machine, median};
use crate::joined::pod;
use crate::node::{Bench as _, Node};
use crate::plot::{Line, Plot, Point};
use crate::setup;
use crate::shell::Shell;

/// How long anything may take, and how often it is looked.
const LIMIT: Duration = Duration::from_secs(600);
const STEP: Duration = Duration::from_millis(250);
const NODE: &str = "node-1";
const NAMESPACE: &str = "bench";
/// Until what a burst left has settled.
const SETTLE: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_secs(20);
/// Exits of a batch, each in another pod, and the time between two.
const BATCH: usize = 100;
const APART: Duration = Duration::from_millis(50);
/// After a batch, until its last status is written.
const AFTER: Duration = Duration::from_secs(4);
const BATCHES: usize = 3;
/// With so many pods, each of them restarts once a minute.
const RESTARTING: usize = 1000;

/// What must hold: memory for each pod more (KiB), how far the cost of an exit may be from that with the fewest pods, and the share of a core
/// that [`RESTARTING`] pods may use.
const GROWTH: f64 = 60.0;
const SPREAD: f64 = 0.2;
const SHARE: f64 = 0.05;

/// Figures with one number of pods.
struct Figures {
    pods: usize,
    /// Until the last of the pods that were added runs, in seconds.
    start: f64,
    memory: Memory,
    /// Milliseconds of CPU time in a second.
    idle: f64,
    /// Milliseconds of CPU time.
    exit: f64,
    /// Share of a core.
    restarting: Option<f64>,
    /// Calls to the runtime in an idle second, by method.
    idle_calls: Calls,
    /// Calls to the runtime for one exit.
    exit_calls: Calls,
}

type Calls = BTreeMap<String, f64>;

/// In KiB.
#[derive(Default)]
struct Memory {
    all: u64,
    own: u64,
    file: u64,
}

/// Measures and prints a table; false when a bound does not hold.
///
/// # Errors
/// When a part is missing or rubelet does not get through.
pub(crate) fn run(shell: &Shell, pods: &[usize]) -> Result<bool> {
    setup::control_plane(shell, &Options::default())?;
    let program = setup::rubelet(shell, true)?;
    let fake = setup::fake_runtime(shell)?;
    let plane = ControlPlane::start("bench", Options::default())?;
    plane.namespace(NAMESPACE)?;
    let dir = plane.dir().join("node");
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let socket = dir.join("cri.sock");
    let runtime = Fake::start(&fake, &socket, &dir.join("fake.log"))?;
    let most = pods.iter().max().copied().unwrap_or_default();
    let fields = json!({
        "maxPods": most + 10, "cgroupRoot": "", "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
        // No back-off to speak of: what is measured is the restart.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": plane.authority()},
        },
        "authorization": {"mode": "Webhook"},
    });
    let flags =
        [format!("--kubeconfig={}", plane.node_kubeconfig(NODE)?.display()), format!("--hostname-override={NODE}")];
    let node = Node::start_in(&dir, &socket, "", &program, &fields, &flags)?;
    let mut bench = Bench { shell, plane: &plane, runtime, node, made: 0 };
    let measured = bench.measure(pods);
    if measured.is_err() {
        let kept = shell.log("fake bench rubelet");
        fs::copy(&bench.node.log, &kept).ok();
        println!("rubelet's log: {}", kept.display());
    }
    bench.node.stop();
    drop(bench);
    rig::mounts::detach(&dir).ok();
    rig::remove_log_links(&dir);
    plane.close()?;
    show(&measured?, &program)
}

struct Bench<'a> {
    shell: &'a Shell,
    plane: &'a ControlPlane,
    runtime: Fake,
    node: Node,
    made: usize,
}

impl crate::node::Bench for Bench<'_> {
    fn parts(&mut self) -> (&Shell, &mut Node) {
        (self.shell, &mut self.node)
    }
}

impl Bench<'_> {
    fn measure(&mut self, pods: &[usize]) -> Result<Vec<Figures>> {
        self.until("the node is there", LIMIT, STEP, |b| {
            Ok(b.plane.api().find(&format!("/api/v1/nodes/{NODE}"))?.is_some())
        })?;
        let mut counts = pods.to_vec();
        counts.sort_unstable();
        let mut all = Vec::new();
        for count in counts {
            let begun = Instant::now();
            while self.made < count {
                let pod = pod(&format!("p{}", self.made), "exec sleep 1000000", "Always");
                self.plane.api().create(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), &pod)?;
                self.made += 1;
            }
            self.until("the pods run", LIMIT, STEP, |b| Ok(b.runtime.ask("running")?.parse::<usize>()? >= count))?;
            let start = begun.elapsed().as_secs_f64();
            self.until("the API server knows", LIMIT, STEP, |b| {
                let running = "/api/v1/pods?limit=1&fieldSelector=status.phase%21%3DRunning";
                Ok(b.plane.api().list(running)?.is_empty())
            })?;
            self.pause(SETTLE)?;
            all.push(self.figures(count, start)?);
        }
        Ok(all)
    }

    fn figures(&mut self, pods: usize, start: f64) -> Result<Figures> {
        self.runtime.calls(1.0)?;
        let before = self.node.cpu()?;
        self.pause(IDLE)?;
        let idle = (self.node.cpu()? - before) / IDLE.as_secs_f64();
        let idle_calls = self.runtime.calls(IDLE.as_secs_f64())?;
        let memory = self.memory()?;
        // Once not counted: from the second on there is a dead container to remove.
        self.exits(idle)?;
        self.runtime.calls(1.0)?;
        let costs = (0..BATCHES).map(|_| self.exits(idle)).collect::<Result<Vec<f64>>>()?;
        let exit_calls = self.runtime.calls((BATCHES * BATCH.min(pods)) as f64)?;
        let restarting = if pods == RESTARTING { Some(self.restarting()?) } else { None };
        let (idle, exit) = (idle * 1000.0, median(costs).unwrap_or_default() * 1000.0);
        let figures = Figures { pods, start, memory, idle, idle_calls, exit, exit_calls, restarting };
        println!("{}", figures.line());
        Ok(figures)
    }

    /// CPU time in seconds for one exit of the same pods' containers, the idle work taken off.
    fn exits(&mut self, idle: f64) -> Result<f64> {
        let (before, begun) = (self.node.cpu()?, Instant::now());
        let ended: usize = self.runtime.ask(&format!("exit 0 {BATCH} {}", APART.as_millis()))?.parse()?;
        self.pause(AFTER)?;
        let spent = self.node.cpu()? - before - idle * begun.elapsed().as_secs_f64();
        anyhow::ensure!(ended > 0, "no container was running any more");
        Ok(spent / ended as f64)
    }

    /// The share of a core in the second of two minutes in which each pod's container ends once.
    fn restarting(&mut self) -> Result<f64> {
        let order = format!("exit 0 {RESTARTING} {}", 60_000 / RESTARTING);
        self.runtime.ask(&order)?;
        let (before, begun) = (self.node.cpu()?, Instant::now());
        self.runtime.ask(&order)?;
        Ok((self.node.cpu()? - before) / begun.elapsed().as_secs_f64())
    }

    fn memory(&self) -> Result<Memory> {
        let [all, own, file] = self.node.memory(["VmRSS", "RssAnon", "RssFile"])?;
        Ok(Memory { all, own, file })
    }
}

impl Figures {
    fn line(&self) -> String {
        format!(
            "| {} | {:.1} | {} | {} | {} | {:.2} | {:.2} | {} |",
            self.pods,
            self.start,
            self.memory.all,
            self.memory.own,
            self.memory.file,
            self.idle,
            self.exit,
            self.restarting.map_or("–".to_owned(), |share| format!("{:.1} %", share * 100.0)),
        )
    }
}

/// The fake runtime, which ends when its input does.
struct Fake {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Fake {
    fn start(program: &Path, socket: &Path, log: &Path) -> Result<Self> {
        let mut command = rig::bound(program);
        command.arg(socket).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(fs::File::create(log)?);
        let mut child = rig::spawn(command).with_context(|| format!("cannot start {}", program.display()))?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the fake runtime has no output")?);
        let mut fake = Self { child, orders, answers };
        // It answers once it listens.
        fake.ask("running")?;
        Ok(fake)
    }

    fn ask(&mut self, order: &str) -> Result<String> {
        let mut line = String::new();
        writeln!(self.orders.as_mut().context("no input")?, "{order}").context("the fake runtime does not listen")?;
        self.answers.read_line(&mut line)?;
        anyhow::ensure!(line.ends_with('\n'), "the fake runtime has ended");
        Ok(line.trim().to_owned())
    }

    /// Calls since the last time, by method, shared out among so many.
    fn calls(&mut self, among: f64) -> Result<Calls> {
        let text = self.ask("calls")?;
        let calls = text.split(' ').filter_map(|c| c.split_once('='));
        calls.map(|(call, count)| Ok((call.to_owned(), count.parse::<f64>()? / among))).collect()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.orders = None;
        if !rig::poll(Duration::from_secs(5), || matches!(self.child.try_wait(), Ok(Some(_)))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn show(all: &[Figures], program: &PathBuf) -> Result<bool> {
    let mut text = format!("\n{}, {}", Zoned::now().strftime("%Y-%m-%d"), machine());
    let size = fs::metadata(program).map_or(0, |m| m.len());
    let _ = writeln!(text, "; the program has {:.1} MB\n", size as f64 / 1e6);
    text.push_str("| pods | start, s | RSS, KiB | of it anonymous | of it files | idle CPU, ms/s | CPU for one exit, ms | each restarting once a minute, of a core |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    for figures in all {
        let _ = writeln!(text, "{}", figures.line());
    }
    for (what, get) in
        [("in an idle second", (|f| &f.idle_calls) as fn(&Figures) -> &Calls), ("for one exit", |f| &f.exit_calls)]
    {
        let _ = writeln!(text, "\ncalls to the runtime {what}:");
        for figures in all {
            let calls: Vec<String> = get(figures).iter().map(|(call, count)| format!("{call} {count:.2}")).collect();
            let _ = writeln!(text, "  {:>5} pods: {}", figures.pods, calls.join(", "));
        }
    }
    let bounds = bounds(all);
    text.push('\n');
    for (what, value, holds) in &bounds {
        let _ = writeln!(text, "{} {what}: {value}", if *holds { "holds:" } else { "MISSED:" });
    }
    println!("{text}");
    keep("fake", text.trim_start(), &plots(all))?;
    Ok(bounds.iter().all(|(_, _, holds)| *holds))
}

/// How the figures grow with the number of pods, by the name of the file.
fn plots(all: &[Figures]) -> Vec<(String, Plot)> {
    type Get = fn(&Figures) -> f64;
    let line = |(name, get): (&str, Get)| {
        let point = |f: &Figures| Point { x: f.pods as f64, y: get(f), spread: (get(f), get(f)) };
        Line { name: name.to_owned(), points: all.iter().map(point).collect() }
    };
    let plot = |file: &str, title: &str, lines: &[(&str, Get)]| {
        let lines = lines.iter().copied().map(line).collect();
        (file.to_owned(), Plot { title: format!("rubelet on a fake runtime: {title}"), x: "pods", lines })
    };
    let memory: [(&str, Get); 3] = [
        ("all (RSS)", |f| f.memory.all as f64),
        ("anonymous", |f| f.memory.own as f64),
        ("files", |f| f.memory.file as f64),
    ];
    let alone = |get: Get| [("rubelet", get)];
    vec![
        plot("memory", "memory, KiB", &memory),
        plot("exit", "CPU of one exit, ms", &alone(|f| f.exit)),
        plot("idle", "idle CPU, ms/s", &alone(|f| f.idle)),
        plot("start", "start of the pods that were added, s", &alone(|f| f.start)),
    ]
}

/// What must hold, as it was measured.
fn bounds(all: &[Figures]) -> Vec<(String, String, bool)> {
    let mut bounds = Vec::new();
    if let [few, .., many] = all {
        let growth = (many.memory.all as f64 - few.memory.all as f64) / (many.pods - few.pods).max(1) as f64;
        bounds.push((
            format!("memory for each pod more, at most {GROWTH} KiB"),
            format!("{growth:.1} KiB"),
            growth <= GROWTH,
        ));
        for other in &all[1..] {
            let ratio = other.exit / few.exit;
            let what = format!("an exit with {} pods against {}, within {SPREAD}", other.pods, few.pods);
            bounds.push((what, format!("{ratio:.2}"), (ratio - 1.0).abs() <= SPREAD));
        }
    }
    if let Some(share) = all.iter().find_map(|f| f.restarting) {
        let what = format!("{RESTARTING} pods that restart once a minute, under {SHARE} of a core");
        bounds.push((what, format!("{share:.3}"), share < SHARE));
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(pods: usize, rss: u64, exit: f64, restarting: Option<f64>) -> Figures {
        let memory = Memory { all: rss, ..Memory::default() };
        let (idle_calls, exit_calls) = (Calls::new(), Calls::new());
        Figures { pods, start: 1.0, memory, idle: 1.0, idle_calls, exit, exit_calls, restarting }
    }

    #[test]
    fn what_holds_and_what_does_not() {
        let fine = [figures(100, 30_000, 2.0, None), figures(1000, 80_000, 2.3, Some(0.04))];
        assert!(bounds(&fine).iter().all(|(_, _, holds)| *holds));
        let not = [figures(100, 30_000, 2.0, None), figures(1000, 90_000, 2.5, Some(0.06))];
        assert!(bounds(&not).iter().all(|(_, _, holds)| !*holds));
        assert!(bounds(&fine[..1]).is_empty());
        let drawn = plots(&fine);
        let names: Vec<&str> = drawn.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["memory", "exit", "idle", "start"]);
        let points = &drawn[0].1.lines[0].points;
        assert_eq!(points.iter().map(|p| (p.x, p.y)).collect::<Vec<_>>(), [(100.0, 30_000.0), (1000.0, 80_000.0)]);
    }
}
