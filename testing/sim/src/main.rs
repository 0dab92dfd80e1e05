//! `sim [--seeds N] [--from N] [--new N] [--seed N [--trace]]`: plays stories made from numbers, and tells of those that end badly.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use sim::explore::{explore, shrink};
use sim::play::{Tally, play};
use sim::story::Story;

/// Plays stories on the simulated node.
#[derive(Parser)]
struct Arguments {
    /// How many of fixed seeds, one after the other
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// How many of seeds that nobody has tried
    #[arg(long, default_value_t = 0)]
    new: u64,
    /// This one alone
    #[arg(long, conflicts_with_all = ["seeds", "from", "new"])]
    seed: Option<u64>,
    /// Tell everything that happens in it: every item, fault and call
    #[arg(long, requires = "seed")]
    trace: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    sim::remember_panics(true);
    let fine = match arguments.seed {
        Some(seed) => one(seed, arguments.trace),
        None => many(&arguments),
    };
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn one(seed: u64, trace: bool) -> bool {
    let story = Story::of(seed);
    let played = play(&story, None, trace);
    if trace {
        println!("{story}\n{}", played.lines.join("\n"));
    }
    table(1, &played.tally);
    match &played.failure {
        None => println!("seed {seed} ends well"),
        Some(failure) => tell(seed, failure, !trace),
    }
    played.failure.is_none()
}

fn many(arguments: &Arguments) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
    let fresh = now..now + arguments.new;
    let fixed = arguments.from..arguments.from + arguments.seeds;
    let explored = explore(fixed.chain(fresh), None, false);
    table(arguments.seeds + arguments.new, &explored.tally);
    for (seed, failure) in &explored.failures {
        println!("seed {seed} FAILED: {}", failure.lines().next().unwrap_or_default());
    }
    if let Some((seed, failure)) = explored.failures.first() {
        tell(*seed, failure, true);
    }
    explored.failures.is_empty()
}

/// What is wrong with a story, and its short form.
fn tell(seed: u64, failure: &str, short: bool) {
    println!("\nseed {seed} FAILED (`cargo xtask sim --seed {seed} --trace` tells all of it):\n{failure}");
    if !short {
        return;
    }
    let (story, played) = shrink(&Story::of(seed), None);
    let last = played.lines.len().saturating_sub(150);
    println!("\nthe same in short: {story}\n{}", played.lines[last..].join("\n"));
    println!("\n{}", played.failure.unwrap_or_default());
}

fn table(seeds: u64, tally: &Tally) {
    println!("{seeds} seeds, {} virtual hours, {} changes by the agent", tally.seconds / 3600, tally.effects);
    println!("{} facts checked against the invariants", tally.checks);
    let (runtime, host, api) = (tally.runtime_faults, tally.host_faults, tally.api_faults);
    println!("calls that went wrong: runtime {runtime}, host {host}, API server {api}");
    for (kind, count) in &tally.acts {
        println!("  {kind:<24} {count}");
    }
}
