//! Runs made from seeds. `SIM_SEEDS=3000` runs more of them, `SIM_SEED=17` one, `SIM_LOG=info` shows what happens in it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sim::scenario::{Tally, play};

/// How many run each time.
const SEEDS: u64 = 150;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn seeds() {
    if let Some(seed) = number("SIM_SEED") {
        let tally = sim::run(play(seed));
        eprintln!("seed {seed}: {tally:?}");
        return;
    }
    let from = number("SIM_FROM").unwrap_or(0);
    let count = number("SIM_SEEDS").unwrap_or(SEEDS);
    let mut total = Tally::default();
    let mut failed = Vec::new();
    for seed in from..from + count {
        match catch_unwind(AssertUnwindSafe(|| sim::run(play(seed)))) {
            Ok(tally) => total += tally,
            Err(_) => {
                eprintln!("seed {seed} failed: replay it with SIM_SEED={seed} SIM_LOG=info cargo test -p sim seeds");
                failed.push(seed);
            }
        }
    }
    eprintln!("{count} seeds: {total:?}");
    assert!(failed.is_empty(), "failed seeds: {failed:?}");
}
