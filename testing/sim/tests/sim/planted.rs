//! The simulation finds bugs: each of these is planted once, and some story among the first ones ends badly because of it.

use sim::Bug;
use sim::explore::explore;

/// So many stories are enough to find any of them.
const SEEDS: u64 = 60;

#[test]
fn each_planted_bug_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        let found = explore(0..SEEDS, Some(bug), true).failures;
        match found.first() {
            Some((seed, failure)) => {
                println!("{bug:?}: seed {seed}: {}", failure.lines().next().unwrap_or_default());
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found in {SEEDS} stories: {missed:?}");
}
