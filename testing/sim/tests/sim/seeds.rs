//! Stories made from seeds. `cargo xtask sim` plays more of them.

use sim::explore::explore;
use sim::play::play;
use sim::story::Story;

#[test]
fn seeds() {
    let explored = explore(0..150, None, false);
    assert!(
        explored.failures.is_empty(),
        "{:#?}\n`cargo xtask sim --seed N --trace` tells what happens",
        explored.failures
    );
    assert!(explored.tally.acts.len() > 20 && explored.tally.checks > 10_000, "{:?}", explored.tally);
}

/// From one seed everything follows, to the last byte.
#[test]
fn the_same_seed_tells_the_same_story() {
    for seed in 0..40 {
        let [first, second] = [(); 2].map(|()| play(&Story::of(seed), None, true).lines);
        let differ = first.iter().zip(&second).position(|(a, b)| a != b);
        let at = differ.unwrap_or(first.len().min(second.len()));
        assert!(
            first == second,
            "seed {seed}, line {at}:\n{}\n--- {:?}\n--- {:?}",
            first[at.saturating_sub(20)..at].join("\n"),
            first.get(at),
            second.get(at)
        );
    }
}
