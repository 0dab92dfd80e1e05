//! `cargo xtask demo`: one pod on this machine, from the manifest to running containers and away again.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use jiff::Timestamp;
use rig::containerd::Containerd;
use rig::{Stage, cgroup, mounts};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

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

/// The running rubelet and where it works.
struct Rubelet {
    child: Child,
    root: PathBuf,
    log: PathBuf,
    manifest: PathBuf,
}

impl Rubelet {
    fn start(stage: &Stage, program: &Path) -> Result<Self> {
        let dir = stage.dir();
        let [read_only, healthz, port] = rig::free_ports().context("no free port on the loopback address")?;
        let (root, manifests, log) = (dir.join("root"), dir.join("manifests"), dir.join("rubelet.log"));
        for sub in [&root, &manifests] {
            fs::create_dir_all(sub).with_context(|| format!("cannot make {}", sub.display()))?;
        }
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{}", stage.socket().display()),
            "staticPodPath": manifests, "podLogsDir": dir.join("logs"), "cgroupRoot": stage.cgroup(), "cgroupDriver": "cgroupfs",
            "failCgroupV1": false, "failSwapOn": false, "readOnlyPort": read_only, "healthzPort": healthz, "port": port,
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        let file = dir.join("rubelet.json");
        fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
        let output = fs::File::create(&log)?;
        let child = Command::new(program)
            .arg("--config")
            .arg(&file)
            .arg("--root-dir")
            .arg(&root)
            .args(["--hostname-override", "demo", "--v", "2"])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        println!(
            "  rubelet runs: process {}, pods at http://127.0.0.1:{read_only}/pods, log {}",
            child.id(),
            log.display()
        );
        Ok(Self { child, root, log, manifest: manifests.join("hello.yaml") })
    }

    /// The reports of its pods, once it answers.
    fn pods(&self) -> Option<Vec<Value>> {
        let (code, body) = rig::http::get_unix(&self.root.join("rubelet/rubelet.sock"), "/v1/pods").ok()?;
        if code == 200 { serde_json::from_slice(&body).ok() } else { None }
    }

    /// An error with the end of its log.
    fn fail(&self, what: &str) -> anyhow::Error {
        anyhow!("{what}; the end of rubelet's log:\n{}", rig::tail(&self.log, 25))
    }

    fn ended(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(self.fail(&format!("rubelet ended by itself ({status})"))),
            _ => Ok(()),
        }
    }
}

fn show(
    shell: &Shell,
    stage: &mut Stage,
    slot: &mut Option<Rubelet>,
    program: &Path,
    runtime: &Containerd,
    images: &[PathBuf],
    once: bool,
) -> Result<()> {
    stage.start_containerd(runtime, images, false)?;
    println!("  containerd {} runs at {}", runtime.version, stage.socket().display());
    shell.check()?;
    let rubelet = slot.insert(Rubelet::start(stage, program)?);
    let mut broken = Ok(());
    let up = shell.wait(Duration::from_secs(30), || {
        broken = rubelet.ended();
        broken.is_err() || rubelet.pods().is_some()
    })?;
    broken?;
    if !up {
        return Err(rubelet.fail("rubelet does not answer on its local socket"));
    }
    println!("\nThe pod: an init container, a sidecar, two containers. Its time line, from the manifest on:\n");
    let start = Timestamp::now();
    fs::write(&rubelet.manifest, MANIFEST).with_context(|| format!("cannot write {}", rubelet.manifest.display()))?;
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
    println!("Change {} and see what happens. Ctrl-C ends the demo and removes all of it.", rubelet.manifest.display());
    loop {
        shell.check()?;
        rubelet.ended()?;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Prints each step as it ends, until the pod is ready.
fn watch(shell: &Shell, rubelet: &mut Rubelet, start: Timestamp) -> Result<()> {
    let began = Instant::now();
    let mut printed = 0;
    loop {
        shell.check()?;
        rubelet.ended()?;
        let pod = rubelet.pods().and_then(|pods| pods.into_iter().next());
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
fn end(stage: &Stage, rubelet: Option<Rubelet>) -> Vec<String> {
    let Some(mut rubelet) = rubelet else {
        return Vec::new();
    };
    let running = matches!(rubelet.child.try_wait(), Ok(None));
    let mut left = Vec::new();
    if running && fs::remove_file(&rubelet.manifest).is_ok() {
        let start = Instant::now();
        let gone = || rubelet.pods().is_some_and(|p| p.is_empty()) && remains(stage, &rubelet).is_empty();
        if rig::poll(Duration::from_secs(30), gone) {
            println!("the manifest is removed; the pod was gone after {:.2} s", start.elapsed().as_secs_f64());
        } else {
            left = remains(stage, &rubelet);
            if left.is_empty() {
                left.push("the pod in its list".to_owned());
            }
        }
    }
    if let Some(pid) = Pid::from_raw(rubelet.child.id().cast_signed()).filter(|_| running) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if !rig::poll(Duration::from_secs(10), || !matches!(rubelet.child.try_wait(), Ok(None))) {
        left.push("its own process, 10 s after SIGTERM".to_owned());
        let _ = rubelet.child.kill();
        let _ = rubelet.child.wait();
    }
    left
}

/// What there still is of the pod.
fn remains(stage: &Stage, rubelet: &Rubelet) -> Vec<String> {
    let is_pod = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("pod"));
    let cgroups = cgroup::tree(stage.cgroup()).into_iter().filter(is_pod);
    let pods = rubelet.root.join("pods");
    let dirs = fs::read_dir(&pods).into_iter().flatten().flatten().map(|e| e.path());
    let shims =
        rig::processes::working_in(stage.dir()).into_iter().filter(|(_, p)| *p == rig::processes::Program::Shim);
    cgroups
        .map(|p| format!("cgroup {}", p.display()))
        .chain(mounts::below(&pods).iter().map(|p| format!("mount {}", p.display())))
        .chain(dirs.map(|p| format!("directory {}", p.display())))
        .chain(shims.map(|(pid, _)| format!("shim {pid}")))
        .collect()
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
