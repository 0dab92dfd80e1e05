//! `cargo xtask demo`: one pod on this machine, from the manifest to running containers and away again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use jiff::Timestamp;
use rig::Stage;
use rig::containerd::Containerd;
use serde_json::{Value, json};

use crate::node::Node;
use crate::setup;
use crate::shell::{Interrupted, Shell};

const MANIFEST: &str = include_str!("demo.yaml");

/// How long the pod may take to run, from the manifest on.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the demo; true when the pod ran and left nothing behind.
///
/// # Errors
/// Says what is missing on this machine, or which step failed, with the end of its log.
pub(crate) fn run(shell: &Shell, once: bool) -> Result<bool> {
    println!("rubelet demo: one pod, a private containerd, no control plane");
    setup::prepare(shell)?;
    if !crate::remove_remains() {
        bail!("what an earlier run left is in the way; see above");
    }
    let program = setup::rubelet(shell, true)?;
    let images = setup::images(shell)?;
    let runtime = Containerd::reference().map_or_else(setup::system, Ok)?;
    shell.check()?;
    let mut stage = Stage::create("demo")?;
    let mut rubelet = None;
    let shown = show(shell, &mut stage, &mut rubelet, &program, &runtime, &images, once);
    if shown.is_err() || shell.stopped() {
        println!();
    }
    let left = end(&stage, rubelet);
    let closed = stage.close().map_err(|e| anyhow!("not clean: {e:#}; `cargo xtask tidy` tries again"));
    match shown {
        Ok(()) => {}
        // Ctrl-C is how the demo is meant to end.
        Err(e) if e.is::<Interrupted>() && !once => {}
        Err(e) => return Err(e),
    }
    closed?;
    if left.is_empty() {
        println!("nothing of it is left");
    } else {
        println!("rubelet left, and the demo removed: {}", left.join(", "));
    }
    Ok(left.is_empty())
}

/// The reports of its pods, once it answers.
fn pods(rubelet: &Node) -> Option<Vec<Value>> {
    let (code, body) = rig::http::get_unix(&rubelet.root.join("rubelet/rubelet.sock"), "/v1/pods").ok()?;
    if code == 200 { serde_json::from_slice(&body).ok() } else { None }
}

/// The pod's manifest.
fn manifest(rubelet: &Node) -> PathBuf {
    rubelet.manifests.join("hello.yaml")
}

fn show(
    shell: &Shell,
    stage: &mut Stage,
    slot: &mut Option<Node>,
    program: &Path,
    runtime: &Containerd,
    images: &[PathBuf],
    once: bool,
) -> Result<()> {
    stage.start_containerd(runtime, images, false)?;
    println!("  containerd {} runs at {}", runtime.version, stage.socket().display());
    shell.check()?;
    let rubelet = slot.insert(Node::start(stage, program, &json!({}), &["--hostname-override=demo".to_owned()])?);
    println!(
        "  rubelet runs: process {}, pods at http://127.0.0.1:{}/pods, log {}",
        rubelet.pid(),
        rubelet.config["readOnlyPort"],
        rubelet.log.display()
    );
    let mut broken = Ok(());
    let up = shell.wait(Duration::from_secs(30), || {
        broken = rubelet.ended();
        broken.is_err() || pods(rubelet).is_some()
    })?;
    broken?;
    if !up {
        return Err(rubelet.fail("rubelet does not answer on its local socket"));
    }
    println!("\nThe pod: an init container, a sidecar, two containers. Its time line, from the manifest on:\n");
    let start = Timestamp::now();
    let manifest = manifest(rubelet);
    fs::write(&manifest, MANIFEST).with_context(|| format!("cannot write {}", manifest.display()))?;
    watch(shell, rubelet, start)?;
    println!("\n$ rubelet pods --root-dir {}", rubelet.root.display());
    let status = Command::new(program).arg("pods").arg("--root-dir").arg(&rubelet.root).status();
    if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
        bail!("`rubelet pods` failed: {status:?}");
    }
    if once {
        return Ok(());
    }
    println!(
        "\nIn another terminal:  {} explain pod hello-demo --root-dir {}",
        program.display(),
        rubelet.root.display()
    );
    println!("Change {} and see what happens. Ctrl-C ends the demo and removes all of it.", manifest.display());
    loop {
        shell.check()?;
        rubelet.ended()?;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Prints each step as it ends, until the pod is ready.
fn watch(shell: &Shell, rubelet: &mut Node, start: Timestamp) -> Result<()> {
    let began = Instant::now();
    let mut printed = 0;
    loop {
        shell.check()?;
        rubelet.ended()?;
        let pod = pods(rubelet).and_then(|pods| pods.into_iter().next());
        if let Some(pod) = &pod {
            let steps: Vec<&Value> = pod["timeline"].as_array().into_iter().flatten().collect();
            let ended =
                steps.iter().take_while(|s| !s["ended"].is_null() || s["result"]["result"] != "running").count();
            for step in steps.iter().take(ended).skip(printed) {
                println!("  {}", line(step, start));
            }
            printed = printed.max(ended);
            if pod["phase"] == "Running" && pod["ready"] == true {
                println!(
                    "\nThe pod is running and ready {:.2} s after its manifest was written.",
                    began.elapsed().as_secs_f64()
                );
                return Ok(());
            }
        }
        if began.elapsed() > PATIENCE {
            let why = pod.map_or("rubelet does not show it".to_owned(), |pod| {
                format!("phase {}, last error {}, waits for {}", pod["phase"], pod["lastError"], pod["waitsFor"])
            });
            return Err(rubelet.fail(&format!("the pod is not ready after {} s: {why}", PATIENCE.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One step as a line: when it ended, what it was, how long it took.
fn line(step: &Value, start: Timestamp) -> String {
    let time = |key: &str| step[key].as_str().and_then(|t| t.parse::<Timestamp>().ok());
    let (began, ended) = (time("started"), time("ended"));
    let seconds = |from: Timestamp, to: Timestamp| (to.as_millisecond() - from.as_millisecond()).max(0) as f64 / 1000.0;
    let at = ended.or(began).map_or(0.0, |t| seconds(start, t));
    let took = match (began, ended) {
        (Some(b), Some(e)) if seconds(b, e) >= 0.001 => format!("{:.3} s", seconds(b, e)),
        _ => String::new(),
    };
    let outcome = match (step["result"]["result"].as_str(), step["result"]["detail"].as_str()) {
        (Some(result @ ("failed" | "unknown")), detail) => {
            format!("  {result}: {}", detail.unwrap_or_default())
        }
        _ => String::new(),
    };
    let text = |key: &str| step[key].as_str().unwrap_or_default();
    format!("{at:>7.3} s  {:<14} {:<24} {took:>8}{outcome}", text("kind"), text("subject")).trim_end().to_owned()
}

/// Takes the pod and rubelet down as a user would; what is left afterwards is rubelet's fault and is named.
fn end(stage: &Stage, rubelet: Option<Node>) -> Vec<String> {
    let Some(mut rubelet) = rubelet else {
        return Vec::new();
    };
    let mut left = Vec::new();
    if rubelet.running() && fs::remove_file(manifest(&rubelet)).is_ok() {
        let start = Instant::now();
        let gone = || pods(&rubelet).is_some_and(|p| p.is_empty()) && rubelet.remains(stage).is_empty();
        if rig::poll(Duration::from_secs(30), gone) {
            println!("the manifest is removed; the pod was gone after {:.2} s", start.elapsed().as_secs_f64());
        } else {
            left = rubelet.remains(stage);
            if left.is_empty() {
                left.push("the pod in its list".to_owned());
            }
        }
    }
    if !rubelet.stop() {
        left.push("its own process, 10 s after SIGTERM".to_owned());
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_as_lines() {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let done = json!({"kind": "start", "subject": "web", "started": "2026-01-01T00:00:01Z", "ended": "2026-01-01T00:00:01.25Z",
                          "result": {"result": "done"}, "count": 1});
        assert_eq!(line(&done, start), "  1.250 s  start          web                       0.250 s");
        let failed = json!({"kind": "pull", "subject": "x", "started": "2026-01-01T00:00:01Z", "ended": "2026-01-01T00:00:01Z",
                            "result": {"result": "failed", "detail": "no such image"}, "count": 1});
        assert!(line(&failed, start).ends_with("failed: no such image"));
    }
}
