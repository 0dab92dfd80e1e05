//! `fuzz [TARGET…] [--seconds N] [--seed N]`: tries targets, one after the other.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use fuzz::{TARGETS, Target, engine};

/// Tries made-up input.
#[derive(Parser)]
struct Arguments {
    /// Targets; none: all
    targets: Vec<String>,
    /// How long each is tried
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Of the randomness; another one tries other inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("fuzz: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    for name in &arguments.targets {
        if TARGETS.iter().all(|t| t.name != name) {
            bail!("no target {name}; there are {}", TARGETS.iter().map(|t| t.name).collect::<Vec<_>>().join(", "));
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let chosen = |t: &&Target| arguments.targets.is_empty() || arguments.targets.iter().any(|n| n == t.name);
    let mut fine = true;
    for target in TARGETS.iter().filter(chosen) {
        let corpus =
            engine::corpus(root, target.name).with_context(|| format!("read the corpus of {}", target.name))?;
        match engine::run(target, &corpus, arguments.seed, Duration::from_secs(arguments.seconds), u64::MAX) {
            Ok(tries) => println!("{:<12} {tries} inputs in {} s", target.name, arguments.seconds),
            Err(failure) => {
                fine = false;
                let dir = root.join("found");
                std::fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
                let file = dir.join(format!("{}-{}", target.name, arguments.seed));
                std::fs::write(&file, &failure.input).with_context(|| format!("write {}", file.display()))?;
                println!(
                    "{:<12} FAILED: {}\n  input: {:?}\n  in {}",
                    target.name,
                    failure.what,
                    String::from_utf8_lossy(&failure.input),
                    file.display()
                );
            }
        }
    }
    Ok(fine)
}
