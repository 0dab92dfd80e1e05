//! `cargo xtask bench --scrapes`: what rubelet and the Go kubelet, by turns, spend on answering `/metrics/cadvisor` and `/stats/summary`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rig::Stage;
use serde_json::{Value, json};

use crate::node::Node;
use crate::setup::{self, GO};
use crate::shell::Shell;

/// How often both pages are asked for, and how far apart: further than rubelet shares a collection, so that each is made anew.
const SCRAPES: u32 = 20;
const APART: Duration = Duration::from_secs(3);
/// Of the Go kubelet's CPU time.
const BOUND: f64 = 0.2;

/// CPU time in seconds, over the same time.
struct Figures {
    name: &'static str,
    idle: f64,
    scraped: f64,
    bytes: usize,
    seconds: f64,
}

/// Measures and prints; false when rubelet spends more than a fifth of what Go spends.
///
/// # Errors
/// When a part is missing or a kubelet does not get through.
pub(crate) fn run(shell: &Shell, pods: usize) -> Result<bool> {
    setup::prepare(shell)?;
    let mut all = Vec::new();
    for (name, program) in setup::kubelets(shell)? {
        println!("{name}");
        all.push(one(shell, name, &program, pods)?);
    }
    println!("\n{pods} pods, {SCRAPES} times /metrics/cadvisor and /stats/summary, {} s apart", APART.as_secs());
    for f in &all {
        let each = (f.scraped - f.idle).max(0.0) * 1000.0 / f64::from(SCRAPES);
        println!(
            "{:<12} CPU {:>6.2} s (idle for as long {:>5.2} s; {each:>6.1} ms each time more), {:>8} bytes, {:>5.2} s until both are there",
            f.name, f.scraped, f.idle, f.bytes, f.seconds
        );
    }
    let [ours, go] = all.as_slice() else { return Ok(true) };
    let ratio = ours.scraped / go.scraped;
    println!("ratio of the CPU times {ratio:.2}, bound {BOUND}");
    Ok(ratio <= BOUND)
}

fn one(shell: &Shell, name: &'static str, program: &Path, pods: usize) -> Result<Figures> {
    let mut stage = Stage::create("scrapes")?;
    stage.start_containerd(&setup::reference(shell)?, &setup::images(shell)?, false)?;
    let fields = json!({"maxPods": 250});
    // Both are to show the same: Go's kubelet names pods, and looks at their networks, only where it finds the runtime.
    let named = rig::kubelet::with_named_figures(program, &stage.socket(), stage.dir())?;
    let program = if name == GO { &named } else { program };
    let mut node = Node::start(&stage, program, &fields, &["--hostname-override=bench".to_owned()])?;
    for n in 0..pods {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("p{n}")},
            "spec": {"terminationGracePeriodSeconds": 1,
                     "containers": [{"name": "c", "image": "lab.test/busybox:1", "command": ["sh", "-c", "exec sleep 1000000"]}]},
        });
        fs::write(node.manifests.join(format!("p{n}.json")), pod.to_string())?;
    }
    let measured = measure(shell, name, &mut node, pods);
    node.stop();
    stage.close()?;
    measured
}

fn measure(shell: &Shell, name: &'static str, node: &mut Node, pods: usize) -> Result<Figures> {
    let port = u16::try_from(node.config["readOnlyPort"].as_u64().unwrap_or_default()).unwrap_or_default();
    let get = |path: &str| -> Result<Vec<u8>> {
        let (code, body) = rig::http::get_tcp(port, path)?;
        if code != 200 {
            bail!("{path}: {code}: {}", String::from_utf8_lossy(&body));
        }
        Ok(body)
    };
    let begun = Instant::now();
    loop {
        let list: Value = get("/pods").ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();
        let running =
            list["items"].as_array().into_iter().flatten().filter(|p| p["status"]["phase"] == "Running").count();
        if running >= pods {
            break;
        }
        if begun.elapsed() > Duration::from_secs(600) {
            return Err(node.fail(&format!("{running} of {pods} pods run after 600 s")));
        }
        node.pause(shell, Duration::from_secs(1))?;
    }
    println!("  {pods} pods run after {:.0} s", begun.elapsed().as_secs_f64());
    node.pause(shell, Duration::from_secs(30))?;
    let span = APART * SCRAPES;
    let before = node.cpu()?;
    node.pause(shell, span)?;
    let idle = node.cpu()? - before;
    let (before, start) = (node.cpu()?, Instant::now());
    let (mut bytes, mut waited) = (0, Duration::ZERO);
    for n in 1..=SCRAPES {
        let asked = Instant::now();
        bytes = get("/metrics/cadvisor")?.len() + get("/stats/summary")?.len();
        waited += asked.elapsed();
        let next = start + APART * n;
        node.pause(shell, next.saturating_duration_since(Instant::now()))?;
    }
    let scraped = node.cpu()? - before;
    Ok(Figures { name, idle, scraped, bytes, seconds: waited.as_secs_f64() / f64::from(SCRAPES) })
}
