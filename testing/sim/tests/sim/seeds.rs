//! Runs made from seeds. `SIM_SEEDS=3000` runs more of them, `SIM_SEED=17` one, `SIM_LOG=info` shows what happens in it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

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
    let (next, total, failed) = (AtomicU64::new(from), Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + count {
                        return;
                    }
                    match catch_unwind(AssertUnwindSafe(|| sim::run(play(seed)))) {
                        Ok(tally) => *total.lock().unwrap() += tally,
                        Err(_) => {
                            eprintln!("seed {seed} failed: SIM_SEED={seed} SIM_LOG=info cargo test -p sim seeds -- --nocapture");
                            failed.lock().unwrap().push(seed);
                        }
                    }
                }
            });
        }
    });
    eprintln!("{count} seeds: {:?}", total.into_inner().unwrap());
    let mut failed = failed.into_inner().unwrap();
    failed.sort_unstable();
    assert!(failed.is_empty(), "failed seeds: {failed:?}");
}
