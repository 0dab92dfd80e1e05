//! `cargo xtask bench`: rubelet and the Go kubelet by turns on the same runtime, with the same manifests, with more and more pods.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rig::containerd::Containerd;
use rig::{Stage, mounts};
use serde_json::{Value, json};

use crate::plot::{Line, Plot, Point};
use crate::setup;
use crate::shell::Shell;

/// What is compared: the key in nodebench's answer, and how it reads.
const FIGURES: [(&str, &str); 8] = [
    ("start_all_s", "start of all pods, s"),
    ("stop_all_s", "stop of all pods, s"),
    ("restart_ms", "restart of a container, ms"),
    ("rss_kib", "memory (RSS), KiB"),
    ("pss_kib", "memory (PSS), KiB"),
    ("idle_cpu_ms_per_s", "idle CPU, ms/s"),
    ("scrape_cpu_ms", "CPU for reading the figures once, ms"),
    ("runtime_idle_cpu_ms_per_s", "containerd's idle CPU, ms/s"),
];

/// What was measured of one kubelet with one number of pods, over all rounds.
struct Measured {
    kubelet: String,
    pods: usize,
    answers: Vec<Value>,
}

/// Middle, least and greatest of what was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    median: f64,
    least: f64,
    greatest: f64,
}

impl Measured {
    fn figure(&self, key: &str) -> Option<Spread> {
        let values: Vec<f64> = self.answers.iter().flat_map(|answer| numbers(&answer[key])).collect();
        let (least, greatest) =
            (values.iter().copied().fold(f64::INFINITY, f64::min), values.iter().copied().fold(0.0, f64::max));
        Some(Spread { median: median(values)?, least, greatest })
    }
}

/// Measures, prints a table of medians, and writes it and plots under `target/bench`.
///
/// # Errors
/// When a kubelet does not get through the measurement.
pub(crate) fn run(shell: &Shell, quick: bool) -> Result<bool> {
    setup::prepare(shell)?;
    let kubelets = setup::kubelets(shell)?;
    let images = setup::images(shell)?;
    let runtime = Containerd::reference().map_or_else(setup::system, Ok)?;
    let (rounds, counts, arguments): (usize, &[usize], &[&str]) = if quick {
        (1, &[10], &["--idle", "10", "--restarts", "4", "--scrapes", "2"])
    } else {
        (3, &[10, 50, 110], &["--idle", "30"])
    };
    let mut all: Vec<Measured> = Vec::new();
    for &pods in counts {
        for (name, _) in &kubelets {
            all.push(Measured { kubelet: (*name).to_owned(), pods, answers: Vec::new() });
        }
    }
    for round in 1..=rounds {
        for &pods in counts {
            for (name, program) in &kubelets {
                // A fresh runtime each time: what the other kubelet left in it would have to be cleaned up first.
                let mut stage = Stage::create("bench")?;
                stage.start_containerd(&runtime, &images, false)?;
                let what = format!("{name}, {pods} pods, round {round} of {rounds}");
                let number = pods.to_string();
                let arguments: Vec<&str> = ["--pods", &number].into_iter().chain(arguments.iter().copied()).collect();
                let answer = measure(shell, &stage, &runtime, program, &what, &arguments)?;
                stage.close()?;
                let of = all.iter_mut().find(|m| m.kubelet == *name && m.pods == pods);
                of.into_iter().for_each(|m| m.answers.push(answer.clone()));
            }
        }
    }
    let head = format!(
        "{}, {}; containerd {}; medians of {rounds} round(s), with the least and the greatest",
        jiff::Zoned::now().strftime("%Y-%m-%d"),
        machine(),
        runtime.version
    );
    let text = format!("{head}\n\n{}", table(&all));
    println!("\n{text}");
    keep("compare", &text, &plots(&all, "rubelet and the Go kubelet"))?;
    Ok(true)
}

/// The figures as a table: a row for each figure and number of pods, a column for each kubelet, and their ratio when there are two.
fn table(all: &[Measured]) -> String {
    let mut kubelets: Vec<&str> = Vec::new();
    let mut counts: Vec<usize> = Vec::new();
    for m in all {
        if !kubelets.contains(&m.kubelet.as_str()) {
            kubelets.push(&m.kubelet);
        }
        if !counts.contains(&m.pods) {
            counts.push(m.pods);
        }
    }
    let two = kubelets.len() == 2;
    let mut text = format!("| | pods | {} |{}\n", kubelets.join(" | "), if two { " ratio |" } else { "" });
    let _ = writeln!(text, "|---|---|{}", "---|".repeat(kubelets.len() + usize::from(two)));
    for (key, label) in FIGURES {
        for &pods in &counts {
            let of = |kubelet: &&str| all.iter().find(|m| m.kubelet == **kubelet && m.pods == pods)?.figure(key);
            let found: Vec<Option<Spread>> = kubelets.iter().map(of).collect();
            let _ = write!(text, "| {label} | {pods} |");
            for spread in &found {
                let shown = spread.map_or("–".to_owned(), |s| match s.least < s.greatest {
                    true => format!("{:.2} ({:.2}–{:.2})", s.median, s.least, s.greatest),
                    false => format!("{:.2}", s.median),
                });
                let _ = write!(text, " {shown} |");
            }
            if two {
                let ratio = match found.as_slice() {
                    [Some(ours), Some(theirs)] if theirs.median > 0.0 => format!("{:.2}", ours.median / theirs.median),
                    _ => "–".to_owned(),
                };
                let _ = write!(text, " {ratio} |");
            }
            text.push('\n');
        }
    }
    text
}

/// A plot for each figure, by the name of its file.
fn plots(all: &[Measured], of: &str) -> Vec<(String, Plot)> {
    let mut kubelets: Vec<&str> = all.iter().map(|m| m.kubelet.as_str()).collect();
    kubelets.sort_unstable_by_key(|name| all.iter().position(|m| m.kubelet == *name));
    kubelets.dedup();
    let plot = |(key, label): (&str, &str)| {
        let line = |kubelet: &&str| {
            let points = all.iter().filter(|m| m.kubelet == **kubelet).filter_map(|m| {
                let s = m.figure(key)?;
                Some(Point { x: m.pods as f64, y: s.median, spread: (s.least, s.greatest) })
            });
            Line { name: (**kubelet).to_owned(), points: points.collect() }
        };
        let lines = kubelets.iter().map(line).collect();
        let name = key.replace('_', "-");
        (name, Plot { title: format!("{of}: {label}"), x: "pods", lines })
    };
    FIGURES.map(plot).into()
}

/// Writes a table and plots to `target/bench/NAME.md` and `NAME-PLOT.svg`.
///
/// # Errors
/// They cannot be written.
pub(crate) fn keep(name: &str, text: &str, plots: &[(String, Plot)]) -> Result<()> {
    let dir = setup::target().join("bench");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let write = |file: String, content: &str| {
        let path = dir.join(file);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    };
    write(format!("{name}.md"), text)?;
    for (plot, drawn) in plots {
        write(format!("{name}-{plot}.svg"), &drawn.svg())?;
    }
    println!("table and plots: {}/{name}*", dir.display());
    Ok(())
}

/// The machine in a few words.
pub(crate) fn machine() -> String {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let (cpus, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let value = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.starts_with(key)).and_then(|l| l.split_once(':'));
        line.map_or(String::new(), |(_, v)| v.trim().to_owned())
    };
    let cores = cpus.lines().filter(|l| l.starts_with("processor")).count();
    let gib = value(&memory, "MemTotal").split(' ').next().and_then(|n| n.parse::<f64>().ok()).unwrap_or_default();
    format!(
        "{cores} cores ({}), {:.0} GiB, Linux {}",
        value(&cpus, "model name"),
        gib / f64::from(1 << 20),
        read("/proc/sys/kernel/osrelease").trim()
    )
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

    /// Two kubelets, two numbers of pods, two rounds.
    fn recorded() -> Vec<Measured> {
        let of = |kubelet: &str, pods: usize, rss: [u64; 2]| Measured {
            kubelet: kubelet.to_owned(),
            pods,
            answers: rss.iter().map(|rss| json!({"rss_kib": rss, "restart_ms": [pods, pods + 2]})).collect(),
        };
        vec![
            of("rubelet", 10, [10_000, 12_000]),
            of("Go kubelet", 10, [100_000, 100_000]),
            of("rubelet", 110, [13_000, 13_000]),
            of("Go kubelet", 110, [130_000, 130_000]),
        ]
    }

    #[test]
    fn what_was_recorded_as_a_table() {
        let text = table(&recorded());
        assert!(text.starts_with("| | pods | rubelet | Go kubelet | ratio |\n|---|---|---|---|---|\n"), "{text}");
        let has = |row: &str| assert!(text.lines().any(|line| line == row), "{row} is not in\n{text}");
        has("| memory (RSS), KiB | 10 | 11000.00 (10000.00–12000.00) | 100000.00 | 0.11 |");
        has("| memory (RSS), KiB | 110 | 13000.00 | 130000.00 | 0.10 |");
        has("| restart of a container, ms | 10 | 11.00 (10.00–12.00) | 11.00 (10.00–12.00) | 1.00 |");
        // What nobody measured.
        has("| idle CPU, ms/s | 110 | – | – | – |");
        // One kubelet alone has nobody to be compared with.
        assert!(table(&recorded()[..1]).starts_with("| | pods | rubelet |\n|---|---|---|\n"));
    }

    #[test]
    fn what_was_recorded_as_plots() {
        let plots = plots(&recorded(), "both");
        let (_, memory) = plots.iter().find(|(name, _)| name == "rss-kib").expect("a plot of the memory");
        assert_eq!(memory.title, "both: memory (RSS), KiB");
        assert_eq!(memory.lines.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["rubelet", "Go kubelet"]);
        let first = memory.lines[0].points[0];
        assert_eq!((first.x, first.y, first.spread), (10.0, 11_000.0, (10_000.0, 12_000.0)));
        assert_eq!(memory.svg().matches("<circle").count(), 4);
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(numbers(&json!([1, 2.5])), [1.0, 2.5]);
        assert_eq!(numbers(&json!(7)), [7.0]);
    }
}
