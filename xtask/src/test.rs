//! `cargo xtask test`: every check, one after the other, with a table of what ran at the end.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Args;
use rig::containerd::Containerd;
use rig::{Stage, cluster};

use crate::conformance;
use crate::libtest::{self, Counts};
use crate::setup::{self, cargo};
use crate::shell::{Interrupted, Shell};

/// What to run.
#[derive(Args)]
pub(crate) struct Options {
    /// Build nothing that takes minutes, run the end-to-end tests on one containerd only, and leave out the VM and the suite
    #[arg(long)]
    quick: bool,
    /// Only the steps whose names begin so: rules, fmt, clippy, unit, fuzz, e2e, differential (against recordings of the
    /// Go kubelet), v2 (cgroup v2, in a VM), package (Debian's, in a VM with systemd), smoke (specs of Kubernetes' node test suite)
    #[arg(long, num_args = 1.., value_name = "NAME")]
    only: Vec<String>,
    /// Only the tests whose names contain this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

const STEPS: [&str; 11] =
    ["rules", "fmt", "clippy", "unit", "fuzz", "e2e-2", "differential", "e2e-1", "v2", "package", "smoke"];
/// Steps that take parts which take minutes to build.
const LONG: [&str; 3] = ["v2", "package", "smoke"];

/// How a step ended.
enum Outcome {
    /// Every test in it passed, or it has none and all is well.
    Passed(Counts),
    /// Why, and what its tests said.
    Failed(String, Counts),
    /// Why it did not run.
    Skipped(String),
}

struct Row {
    name: String,
    took: Duration,
    outcome: Outcome,
}

/// Runs the steps; true when nothing failed.
///
/// # Errors
/// When a step is named that is not there; a failed step is not an error, it is in the table.
pub(crate) fn run(shell: &Shell, options: &Options) -> Result<bool> {
    if let Some(unknown) = options.only.iter().find(|o| !STEPS.iter().any(|s| s.starts_with(o.as_str()))) {
        return Err(anyhow!("no step {unknown}; the steps: {}", STEPS.join(" ")));
    }
    let root_user = rustix::process::geteuid().is_root();
    if root_user {
        crate::remove_remains();
    }
    let mut rows: Vec<Row> = Vec::new();
    for step in STEPS {
        if !options.only.is_empty() && !options.only.iter().any(|o| step.starts_with(o.as_str())) {
            continue;
        }
        let ran = |r: &Row| r.name.starts_with("e2e") && !matches!(r.outcome, Outcome::Skipped(_));
        let second = step == "e2e-1" && rows.iter().any(ran);
        if options.quick && (second || LONG.contains(&step) && options.only.is_empty()) {
            continue;
        }
        println!("{step}");
        let start = Instant::now();
        let mut name = step.to_owned();
        let result = match step {
            "rules" => crate::checks::run(shell).map(|fine| verdict(fine, "see above")),
            "fmt" => simple(shell, step, cargo().args(["fmt", "--all", "--check", "--", "--color", "never"])),
            "clippy" => {
                let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
                simple(shell, step, cargo().args(arguments))
            }
            "unit" => {
                let arguments = ["test", "--workspace", "--exclude", "e2e", "--exclude", "rig", "--no-fail-fast"];
                let mut command = cargo();
                command.args(arguments).arg("--").args(&options.filter);
                tests(shell, step, &mut command, Duration::from_secs(2400))
            }
            "fuzz" => fuzz(shell, options, step),
            "v2" => {
                name = "cgroup v2 (VM)".to_owned();
                cgroup_v2(shell, &name)
            }
            "differential" => differential(shell, options, step),
            "package" => {
                name = "Debian package (VM)".to_owned();
                package(shell, &name)
            }
            "smoke" => {
                name = "node suite, smoke set".to_owned();
                smoke(shell)
            }
            // What needs no containerd of a certain version runs once.
            _ => end_to_end(shell, options, step == "e2e-2", !second, &mut name),
        };
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(e) if e.is::<Interrupted>() => {
                // A control plane or a stage of a test's own.
                if root_user {
                    crate::remove_remains();
                }
                return Err(e);
            }
            Err(e) => Outcome::Failed(format!("{e:#}"), Counts::default()),
        };
        let took = start.elapsed();
        match &outcome {
            Outcome::Passed(_) => println!("  passed, {:.0} s", took.as_secs_f64()),
            Outcome::Failed(why, _) => println!("  FAILED: {why}"),
            Outcome::Skipped(why) => println!("  skipped: {why}"),
        }
        rows.push(Row { name, took, outcome });
    }
    Ok(table(&rows))
}

fn verdict(fine: bool, why: &str) -> Outcome {
    if fine { Outcome::Passed(Counts::default()) } else { Outcome::Failed(why.to_owned(), Counts::default()) }
}

fn simple(shell: &Shell, name: &str, command: &mut Command) -> Result<Outcome> {
    let status = shell.run(name, command, Duration::from_secs(1800))?;
    let log = shell.log(name);
    Ok(verdict(status.success(), &format!("{status}; the end of {}:\n{}", log.display(), rig::tail(&log, 40))))
}

fn tests(shell: &Shell, name: &str, command: &mut Command, limit: Duration) -> Result<Outcome> {
    let ended = shell.run(name, command, limit);
    let log = shell.log(name);
    let text = std::fs::read(&log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let report = libtest::read(&text);
    for skip in &report.skips {
        println!("  skipped: {skip}");
    }
    let why = match ended {
        Ok(status) if status.success() && report.counts.failed == 0 => {
            return Ok(Outcome::Passed(report.counts));
        }
        Ok(status) => status.to_string(),
        Err(e) if e.is::<Interrupted>() => return Err(e),
        Err(e) => format!("{e:#}"),
    };
    let named = match report.failures.as_slice() {
        [] => format!("the end of {}:\n{}", log.display(), rig::tail(&log, 40)),
        names => format!("{}; all of it: {}\n{}", names.join(", "), log.display(), report.panics.join("\n")),
    };
    Ok(Outcome::Failed(format!("{why}; {named}"), report.counts))
}

/// Every target of `testing/fuzz` for some seconds; the same inputs each time, others by hand. The build of the tests is taken: it looks for overflows
/// too.
fn fuzz(shell: &Shell, options: &Options, step: &str) -> Result<Outcome> {
    let seconds = if options.quick { "2" } else { "10" };
    simple(shell, step, cargo().args(["run", "--package", "fuzz", "--", "--seconds", seconds, "--seed", "1"]))
}

/// rubelet's requests, files and statuses beside those that the Go kubelet was seen to make of the same manifests.
fn differential(shell: &Shell, options: &Options, step: &str) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("needs root, for containers, cgroups and a network bridge".into()));
    }
    setup::prepare(shell)?;
    let found = if options.quick { Containerd::reference() } else { Some(setup::reference(shell)?) };
    let Some(runtime) = found else {
        return Ok(Outcome::Skipped("containerd 2 is not built (lab/build-reference containerd)".into()));
    };
    let rubelet = setup::rubelet(shell, false)?;
    let images = setup::images(shell)?;
    let mut stage = Stage::create("differential")?;
    stage.start_containerd(&runtime, &images, true)?;
    let mut command = Command::new(crate::root().join("testing/differential/run"));
    command.arg("--kubelet").arg(rubelet).arg("--socket").arg(stage.socket());
    let ended = shell.run(step, &mut command, Duration::from_secs(600));
    stage.close()?;
    let status = ended?;
    let log = shell.log(step);
    Ok(match status.code() {
        Some(3) => Outcome::Skipped(rig::tail(&log, 1)),
        _ => verdict(status.success(), &format!("{status}; the end of {}:\n{}", log.display(), rig::tail(&log, 40))),
    })
}

/// Some specs of Kubernetes' node test suite over all areas (lab/smoke.txt).
fn smoke(shell: &Shell) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("needs root, for containers, cgroups and a network bridge".into()));
    }
    setup::prepare(shell)?;
    let (passed, failed) = conformance::smoke_test(shell, setup::rubelet(shell, false)?)?;
    let counts = Counts { passed, failed: failed.len(), ..Counts::default() };
    let logs = "the suite's logs: target/conformance/smoke";
    Ok(if failed.is_empty() {
        Outcome::Passed(counts)
    } else {
        Outcome::Failed(format!("{logs}; {}", failed.join("; ")), counts)
    })
}

/// Long tests of what does not depend on the runtime's version: they run on the first containerd only.
const ONCE: [&str; 4] = ["--skip", "restarts_wait_longer_each_time", "--skip", "fifty_kills"];

/// The tests on a real containerd; a stage for all of them, taken down afterwards also when they fail.
fn end_to_end(shell: &Shell, options: &Options, newest: bool, first: bool, name: &mut String) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("needs root, for containers, cgroups and a network bridge".into()));
    }
    setup::prepare(shell)?;
    let found = match (newest, options.quick) {
        (true, true) => {
            Containerd::reference().ok_or_else(|| anyhow!("containerd 2 is not built (lab/build-reference containerd)"))
        }
        (true, false) => setup::reference(shell),
        (false, _) => setup::system(),
    };
    let runtime = match found {
        Ok(runtime) => runtime,
        Err(e) if e.is::<Interrupted>() => return Err(e),
        Err(e) => return Ok(Outcome::Skipped(format!("{e:#}"))),
    };
    *name = format!("e2e on containerd {}", runtime.version);
    if newest && !options.quick {
        match setup::control_plane(shell, &cluster::Options::all()) {
            Err(e) if e.is::<Interrupted>() => return Err(e),
            // The tests that need it say themselves that they did not run.
            Err(e) => println!("  the control plane: {e:#}"),
            Ok(()) => {}
        }
    }
    let rubelet = setup::rubelet(shell, false)?;
    setup::csi_driver(shell)?;
    let images = setup::images(shell)?;
    let mut stage = Stage::create("e2e")?;
    stage.start_containerd(&runtime, &images, true)?;
    let mut command = cargo();
    command.args(["test", "--package", "e2e", "--no-fail-fast"]);
    if first {
        command.args(["--package", "rig"]);
    }
    command
        .arg("--")
        // One at a time: every kubelet takes all pods of its runtime for its own.
        .args(["--include-ignored", "--test-threads=1", "--nocapture"])
        .args(&options.filter)
        .args(if first || options.filter.is_some() { &[][..] } else { &ONCE })
        .env("RUBELET_E2E_CONTAINERD_SOCK", stage.socket())
        .env("RUBELET_E2E_CONTAINERD_VERSION", &runtime.version)
        .env("RUBELET_BIN", rubelet);
    let outcome = tests(shell, name, &mut command, Duration::from_secs(2400));
    let closed = stage.close();
    match (outcome?, closed) {
        (outcome, Ok(())) => Ok(outcome),
        (Outcome::Failed(why, counts), Err(e)) => Ok(Outcome::Failed(format!("{why}; and not clean: {e:#}"), counts)),
        (Outcome::Passed(counts), Err(e)) => Ok(Outcome::Failed(format!("not clean: {e:#}"), counts)),
        (skipped @ Outcome::Skipped(_), Err(_)) => Ok(skipped),
    }
}

/// Pods on a kernel with cgroup v2 alone, in User-mode Linux, with both cgroup drivers, against what the Go kubelet left there.
fn cgroup_v2(shell: &Shell, name: &str) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("needs root: inside the VM the files keep their owners".into()));
    }
    setup::prepare(shell)?;
    let rubelet = setup::rubelet(shell, false)?;
    setup::images(shell)?;
    if let Some(why) = no_vm(shell)? {
        return Ok(Outcome::Skipped(why));
    }
    let mut check = Command::new(crate::root().join("lab/vm/check-v2"));
    let status = shell.run(name, check.arg(rubelet), Duration::from_secs(600))?;
    let log = shell.log(name);
    if status.code() == Some(2) {
        return Ok(Outcome::Skipped(rig::tail(&log, 1).trim().to_owned()));
    }
    Ok(verdict(status.success(), &format!("{status}; the end of {}:\n{}", log.display(), rig::tail(&log, 60))))
}

/// Why there is no User-mode Linux here; None: it is ready.
fn no_vm(shell: &Shell) -> Result<Option<String>> {
    let mut prepare = Command::new(crate::root().join("lab/vm/vm-prepare"));
    match shell.run("vm-prepare", &mut prepare, Duration::from_secs(180)) {
        Ok(status) if status.success() => Ok(None),
        Ok(_) => Ok(Some(format!("no VM: {}", rig::tail(&shell.log("vm-prepare"), 1).trim()))),
        Err(e) if e.is::<Interrupted>() => Err(e),
        Err(e) => Ok(Some(format!("no VM: {e:#}"))),
    }
}

/// The Debian package in a VM with systemd: installed, restarted, upgraded, removed, installed again and purged.
fn package(shell: &Shell, name: &str) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("needs root: inside the VM the files keep their owners".into()));
    }
    setup::prepare(shell)?;
    for program in ["dpkg-deb", "strip", "systemctl"] {
        if rig::find_program(program).is_none() {
            return Ok(Outcome::Skipped(format!("there is no {program} here")));
        }
    }
    if let Some(why) = no_vm(shell)? {
        return Ok(Outcome::Skipped(why));
    }
    setup::images(shell)?;
    let stripped = crate::root().join("target/xtask/rubelet");
    crate::dist::strip(shell, &setup::rubelet(shell, false)?, &stripped)?;
    let files = crate::package::make(shell, &stripped)?;
    let deb = files.iter().find(|f| f.extension().is_some_and(|e| e == "deb")).ok_or_else(|| anyhow!("no package"))?;
    let inside = |path: &std::path::Path| format!("/run/vm/host{}", path.display());
    let lab = crate::root().join("lab/vm");
    let mut vm = Command::new(lab.join("uml-run"));
    vm.env("VM_INIT", "systemd").env("VM_MEM", "3000").env("VM_TIMEOUT", "400");
    vm.args(["env", "DRV=systemd", &format!("DEB={}", inside(deb))]);
    vm.arg(format!("IMAGES={}", inside(&rig::lab().join("images/small"))));
    vm.arg("bash").arg(inside(&lab.join("package-on-v2")));
    let status = shell.run(name, &mut vm, Duration::from_secs(450))?;
    let log = shell.log(name);
    Ok(verdict(status.success(), &format!("{status}; the end of {}:\n{}", log.display(), rig::tail(&log, 60))))
}

/// Lines that the end of the output gives to one step that failed.
const MOST_LINES: usize = 25;

/// Prints what ran, how long, and how it ended; the last line is the sum. True when nothing failed.
fn table(rows: &[Row]) -> bool {
    println!("\n{:<28} {:>8}  {:<8} tests", "step", "time", "result");
    let mut sum = Counts::default();
    let mut fine = true;
    for row in rows {
        let (result, tests) = match &row.outcome {
            Outcome::Passed(counts) => {
                sum += *counts;
                ("passed", if *counts == Counts::default() { String::new() } else { counts.to_string() })
            }
            Outcome::Failed(why, counts) => {
                fine = false;
                sum += *counts;
                // A step that failed without a failed test (it did not build, say) is one failure.
                sum.failed += usize::from(counts.failed == 0);
                let first = why.lines().next().unwrap_or_default();
                ("FAILED", if *counts == Counts::default() { first.to_owned() } else { counts.to_string() })
            }
            Outcome::Skipped(why) => {
                sum.skipped += 1;
                ("skipped", why.clone())
            }
        };
        println!("{:<28} {:>6.1} s  {result:<8} {tests}", row.name, row.took.as_secs_f64());
    }
    // Again, near the end: whoever sees only the end of a long output still learns what is wrong.
    for row in rows {
        if let Outcome::Failed(why, _) = &row.outcome {
            println!("{} FAILED: {}", row.name, why.lines().take(MOST_LINES).collect::<Vec<_>>().join("\n"));
        }
    }
    println!("{sum}");
    fine
}
