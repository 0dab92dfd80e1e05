//! `cargo xtask bench`: rubelet and the Go kubelet by turns on the same runtime, with the same manifests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rig::containerd::Containerd;
use rig::{Stage, mounts};
use serde_json::{Value, json};

use crate::setup;
use crate::shell::Shell;

/// What is compared: the key in nodebench's answer, and how it reads.
const FIGURES: [(&str, &str); 7] = [
    ("start_all_s", "start of all pods, s"),
    ("stop_all_s", "stop of all pods, s"),
    ("restart_ms", "restart of a container, ms"),
    ("rss_kib", "memory (RSS), KiB"),
    ("pss_kib", "memory (PSS), KiB"),
    ("idle_cpu_ms_per_s", "idle CPU, ms/s"),
    ("runtime_idle_cpu_ms_per_s", "containerd's idle CPU, ms/s"),
];

/// Measures and prints a table of medians.
///
/// # Errors
/// When a kubelet does not get through the measurement.
pub(crate) fn run(shell: &Shell, quick: bool) -> Result<bool> {
    setup::prepare(shell)?;
    let kubelets = setup::kubelets(shell)?;
    let images = setup::images(shell)?;
    let runtime = Containerd::reference().map_or_else(setup::system, Ok)?;
    let (rounds, arguments): (usize, &[&str]) = if quick {
        (1, &["--pods", "10", "--idle", "10", "--restarts", "4"])
    } else {
        (3, &["--pods", "30", "--idle", "30"])
    };
    let mut results: Vec<Vec<Value>> = vec![Vec::new(); kubelets.len()];
    for round in 1..=rounds {
        for ((name, program), results) in kubelets.iter().zip(&mut results) {
            // A fresh runtime each time: what the other kubelet left in it would have to be cleaned up first.
            let mut stage = Stage::create("bench")?;
            stage.start_containerd(&runtime, &images, false)?;
            let what = format!("{name}, round {round} of {rounds}");
            results.push(measure(shell, &stage, &runtime, program, &what, arguments)?);
            stage.close()?;
        }
    }
    println!("\nmedians of {rounds} round(s), containerd {}, {}", runtime.version, arguments.join(" "));
    print!("{:<30}", "");
    for (name, _) in &kubelets {
        print!(" {name:>12}");
    }
    println!("{}", if kubelets.len() > 1 { "        ratio" } else { "" });
    for (key, label) in FIGURES {
        let medians: Vec<Option<f64>> =
            results.iter().map(|r| median(r.iter().flat_map(|v| numbers(&v[key])).collect())).collect();
        let shown = |m: &Option<f64>| m.map_or("-".to_owned(), |m| format!("{m:.2}"));
        print!("{label:<30}");
        for m in &medians {
            print!(" {:>12}", shown(m));
        }
        match medians.as_slice() {
            [Some(ours), Some(theirs)] if *theirs > 0.0 => println!(" {:>12.2}", ours / theirs),
            _ => println!(),
        }
    }
    Ok(true)
}

fn measure(
    shell: &Shell,
    stage: &Stage,
    runtime: &Containerd,
    program: &Path,
    what: &str,
    arguments: &[&str],
) -> Result<Value> {
    let work: PathBuf = stage.dir().join("bench");
    // What the Go kubelet would write to fixed places of the host: its chains, its serving certificate.
    let config = json!({"cgroupRoot": stage.cgroup(), "makeIPTablesUtilChains": false});
    let mut command = Command::new("python3");
    command
        .arg(crate::root().join("lab/nodebench.py"))
        .arg("--kubelet")
        .arg(program)
        .arg("--containerd")
        .arg(stage.socket())
        .arg("--containerd-pid")
        .arg(stage.containerd_pid().unwrap_or_default().to_string())
        .arg("--ctr")
        .arg(&runtime.ctr)
        .arg("--work")
        .arg(&work)
        .arg("--config")
        .arg(config.to_string())
        .arg(format!("--arg=--cert-dir={}", work.join("pki").display()))
        .args(arguments);
    let result = shell.need(what, &mut command, Duration::from_secs(1800));
    if let Err(e) = result {
        // The stage, and the kubelet's log with it, goes away: keep the log.
        let kept = shell.log(&format!("{what} kubelet"));
        std::fs::copy(work.join("kubelet.log"), &kept).ok();
        mounts::detach(&work).ok();
        return Err(e.context(format!("the kubelet's log: {}", kept.display())));
    }
    let log = shell.log(what);
    let text = std::fs::read_to_string(&log)?;
    let last =
        text.lines().rfind(|l| l.starts_with('{')).with_context(|| format!("no figures in {}", log.display()))?;
    serde_json::from_str(last).with_context(|| format!("not JSON: {last}"))
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(all) => all.iter().filter_map(Value::as_f64).collect(),
        other => other.as_f64().into_iter().collect(),
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len().is_multiple_of(2) { (values[middle - 1] + upper) / 2.0 } else { upper })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(numbers(&json!([1, 2.5])), [1.0, 2.5]);
        assert_eq!(numbers(&json!(7)), [7.0]);
    }
}
