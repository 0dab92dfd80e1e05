//! `cargo xtask conformance`: Kubernetes' own node test suite against rubelet or any other kubelet, in shards that can be resumed, compared with what the Go
//! kubelet gets on such a machine (`lab/go-baseline.tsv`).

mod results;
mod suite;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use rig::Stage;

use crate::setup;
use crate::shell::Shell;
use results::{Comparison, Results, Spec, State};
use suite::Suite;

/// Specs that cannot run on such a machine, by the beginning of their names: they would wait until the time is up, or leave nothing to those after them.
const NOT_HERE: [(&str, &str); 2] = [
    (
        "[sig-node] ImageGarbageCollect",
        "it first pulls every image of the suite, one of them by a digest that only its publisher can serve",
    ),
    (
        "[sig-node] Restart [Serial] [Slow] [Disruptive] Container Runtime Network",
        "it kills the container runtime and waits for the system's service manager to start it again",
    ),
];

/// What is run when nothing is said: what Kubernetes runs for every change.
const PARALLEL: &str = "NodeConformance && !Serial && !Slow && !Flaky && !Disruptive";
/// Specs of all areas that together take some minutes.
const SMOKE: &str = include_str!("../../lab/smoke.txt");
/// What a spec is taken to need when no result of it is known.
const UNKNOWN: f64 = 60.0;

/// What to run.
#[derive(Args)]
pub(crate) struct Options {
    /// A ginkgo label filter
    #[arg(long, value_name = "FILTER", default_value = PARALLEL)]
    filter: String,
    /// A regular expression on the specs' names
    #[arg(long, value_name = "REGEX", default_value = ".")]
    focus: String,
    /// Specs of all areas that together take some minutes (lab/smoke.txt)
    #[arg(long, conflicts_with_all = ["filter", "focus"])]
    smoke: bool,
    /// Another kubelet than rubelet
    #[arg(long, value_name = "PROGRAM")]
    kubelet: Option<PathBuf>,
    /// The kubelet is Go's: keep its results in lab/go-baseline.tsv
    #[arg(long, requires = "kubelet")]
    record: bool,
    /// The most that one shard takes, in minutes
    #[arg(long, value_name = "MINUTES", default_value_t = 60)]
    shard: u64,
    /// Specs side by side
    #[arg(long, value_name = "N", default_value_t = 4)]
    procs: usize,
    /// Go on with an earlier run that was cut off: specs whose result is known are not run again
    #[arg(long)]
    resume: bool,
    /// Leave it at the shards that fit into so many minutes; --resume runs the rest
    #[arg(long, value_name = "MINUTES")]
    budget: Option<u64>,
}

/// Runs the suite; true when nothing failed that Go passes, or of which Go's result is not known.
///
/// # Errors
/// Says what is missing on this machine or in the way, or that the suite does not start.
pub(crate) fn run(shell: &Shell, options: &Options) -> Result<bool> {
    setup::prepare(shell)?;
    suite::free()?;
    let (kubelet, who) = match &options.kubelet {
        Some(program) => {
            (std::path::absolute(program).context("--kubelet")?, if options.record { "go" } else { "other" })
        }
        None => (setup::rubelet(shell, true)?, "rubelet"),
    };
    on_stage(shell, kubelet, who, |suite| shards(suite, options))
}

/// The small set against this rubelet, as a test: what failed twice has failed. Gives how many passed, and those that failed with the reason.
///
/// # Errors
/// As [`run`].
pub(crate) fn smoke_test(shell: &Shell, kubelet: PathBuf) -> Result<(usize, Vec<String>)> {
    suite::free()?;
    on_stage(shell, kubelet, "smoke", |suite| {
        let specs = smoke(suite)?;
        let mut todo: Vec<&Spec> = specs.iter().collect();
        let mut failed = Vec::new();
        for attempt in ["smoke-1", "smoke-2"] {
            let ended = suite.run(attempt, &todo, 4, Duration::from_secs(900))?;
            let passed = |spec: &Spec| ended.get(&spec.name).is_some_and(|o| o.state == State::Passed);
            todo.retain(|spec| !passed(spec));
            let why = |spec: &&Spec| ended.get(&spec.name).map_or("it did not end", |o| o.why.as_str()).to_owned();
            failed = todo.iter().map(|spec| format!("{}: {}", spec.name, why(spec))).collect();
            if todo.is_empty() {
                break;
            }
            println!("  failed in {attempt}: {}", failed.join("; "));
        }
        Ok((specs.len() - failed.len(), failed))
    })
}

/// Has the suite, its images and a runtime ready; what it leaves is kept under the name `who`.
fn on_stage<T>(shell: &Shell, kubelet: PathBuf, who: &str, with: impl FnOnce(&Suite<'_>) -> Result<T>) -> Result<T> {
    setup::node_suite(shell)?;
    let runtime = setup::reference(shell)?;
    let (images, registry) = setup::suite_images(shell)?;
    let out = crate::root().join("target/conformance").join(who);
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut stage = Stage::create("conformance")?;
    // The runtime has a pause image of its own.
    let all: Vec<PathBuf> = images.iter().cloned().chain(setup::images(shell)?).collect();
    stage.start_containerd(&runtime, &all, true)?;
    let served = stage.serve(&images, &[&registry]);
    let ran = served.and_then(|()| with(&Suite { shell, stage: &stage, kubelet, out }));
    let closed = stage.close();
    let result = ran?;
    closed?;
    Ok(result)
}

fn shards(suite: &Suite<'_>, options: &Options) -> Result<bool> {
    let baseline = crate::root().join("lab/go-baseline.tsv");
    let go = results::read(&baseline)?;
    let mut specs = if options.smoke { smoke(suite)? } else { suite.select(&options.filter, &options.focus)? };
    specs.retain(|spec| match NOT_HERE.iter().find(|(name, _)| spec.name.starts_with(name)) {
        Some((_, why)) => {
            println!("  left out: {}: {why}", spec.name);
            false
        }
        None => true,
    });
    let file = suite.out.join("results.tsv");
    let mut all = if options.resume { results::read(&file)? } else { Results::new() };
    let todo: Vec<&Spec> = specs.iter().filter(|s| !all.contains_key(&s.name)).collect();
    println!("  {} specs, {} of them still to be run", specs.len(), todo.len());
    let limit = Duration::from_secs(options.shard.max(1) * 60);
    let start = Instant::now();
    let procs = options.procs.max(1);
    for (number, shard) in cut(&todo, &go, procs, limit.as_secs_f64() * 0.7).iter().enumerate() {
        let left = options.budget.map(|m| Duration::from_secs(m * 60).saturating_sub(start.elapsed()));
        if left.is_some_and(|l| l < Duration::from_secs(120)) {
            println!("  the time is up; --resume runs the rest");
            break;
        }
        let began = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string();
        let name = format!("suite-{began}");
        println!("  shard {}: {} specs, reports in {}/{name}", number + 1, shard.len(), suite.out.display());
        let side_by_side = if shard.iter().any(|s| s.serial) { 1 } else { procs };
        let ended = suite.run(&name, shard, side_by_side, left.map_or(limit, |l| l.min(limit)))?;
        let unknown = shard.iter().filter(|s| !ended.contains_key(&s.name)).count();
        if unknown > 0 {
            println!("  {unknown} of them did not come to an end; --resume runs them again");
        }
        all.extend(ended);
        results::write(&file, &all)?;
    }
    all.retain(|name, _| specs.iter().any(|s| s.name == *name));
    if options.record {
        let mut kept = go;
        kept.extend(all.clone());
        results::write(&baseline, &kept)?;
        println!("  recorded in {}", baseline.display());
        Comparison::of(&all, &kept).show(&all, &kept, "Go kubelet");
        return Ok(true);
    }
    let comparison = Comparison::of(&all, &go);
    comparison.show(&all, &go, "all");
    println!("  {} of {} specs, {:.0} s", all.len(), specs.len(), start.elapsed().as_secs_f64());
    Ok(comparison.lost.is_empty() && comparison.unknown.is_empty() && all.len() == specs.len())
}

/// The fixed small set; a name in it that the suite does not have is an error.
fn smoke(suite: &Suite<'_>) -> Result<Vec<Spec>> {
    let wanted: Vec<&str> = SMOKE.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).collect();
    let all = suite.select("", ".")?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in wanted {
        match all.iter().find(|s| s.name == name) {
            Some(spec) => found.push(spec.clone()),
            None => missing.push(name),
        }
    }
    if !missing.is_empty() {
        bail!("lab/smoke.txt names specs that this suite does not have: {}", missing.join("; "));
    }
    Ok(found)
}

/// Cuts the specs into shards of about so many seconds, by what they took with the Go kubelet. Those that run alone have shards of their own, at the
/// end.
fn cut<'a>(specs: &[&'a Spec], known: &Results, procs: usize, seconds: f64) -> Vec<Vec<&'a Spec>> {
    let mut sorted = specs.to_vec();
    sorted.sort_by_key(|s| s.serial);
    let side_by_side = f64::from(u32::try_from(procs).unwrap_or(1));
    let (mut shards, mut shard, mut sum) = (Vec::new(), Vec::new(), 0.0);
    for spec in sorted {
        let takes = known.get(&spec.name).map_or(UNKNOWN, |o| o.seconds);
        let takes = if spec.serial { takes } else { takes / side_by_side };
        // Names go to the suite as one argument, and an argument has at most 128 KiB.
        let full = sum + takes > seconds
            || shard.len() >= 400
            || shard.first().is_some_and(|first: &&Spec| first.serial != spec.serial);
        if full && !shard.is_empty() {
            shards.push(std::mem::take(&mut shard));
            sum = 0.0;
        }
        sum += takes;
        shard.push(spec);
    }
    if !shard.is_empty() {
        shards.push(shard);
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;
    use results::Outcome;

    #[test]
    fn shards_are_cut_by_time() {
        let spec = |name: &str, serial| Spec { name: name.to_owned(), serial };
        let specs = [spec("s", true), spec("a", false), spec("b", false), spec("c", false)];
        let took = |seconds| Outcome { state: State::Passed, seconds, why: String::new() };
        let known = Results::from([("a".to_owned(), took(100.0)), ("s".to_owned(), took(90.0))]);
        let all: Vec<&Spec> = specs.iter().collect();
        let names = |shards: Vec<Vec<&Spec>>| -> Vec<String> {
            shards.iter().map(|s| s.iter().map(|s| s.name.as_str()).collect::<String>()).collect()
        };
        // 50 + 30 + 30 side by side, 90 alone.
        assert_eq!(names(cut(&all, &known, 2, 100.0)), ["ab", "c", "s"]);
        assert_eq!(names(cut(&all, &known, 2, 1000.0)), ["abc", "s"]);
        assert_eq!(names(cut(&all, &known, 1, 1.0)), ["a", "b", "c", "s"]);
        assert!(cut(&[], &known, 4, 1.0).is_empty());
    }
}
