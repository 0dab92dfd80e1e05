//! Many stories on all processors, and the short form of one that ends badly.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::bugs::Bug;
use crate::play::{Played, Tally, play};
use crate::story::Story;

/// How long a story is made shorter.
const SHRINKING: Duration = Duration::from_secs(90);

/// What many stories came to.
#[derive(Clone, Debug, Default)]
pub struct Explored {
    /// All that happened.
    pub tally: Tally,
    /// Seeds of the stories that ended badly, and what was wrong.
    pub failures: Vec<(u64, String)>,
}

/// Plays the stories of these seeds. With `first`, no new one begins after the first that ends badly.
pub fn explore(seeds: impl Iterator<Item = u64> + Send, bug: Option<Bug>, first: bool) -> Explored {
    let (seeds, explored, failed) = (Mutex::new(seeds), Mutex::new(Explored::default()), AtomicU64::new(0));
    let lock = || explored.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let next = || seeds.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(seed) = next().filter(|_| !first || failed.load(Ordering::Relaxed) == 0) {
                    let played = play(&Story::of(seed), bug, false);
                    let mut explored = lock();
                    explored.tally += played.tally;
                    if let Some(failure) = played.failure {
                        failed.fetch_add(1, Ordering::Relaxed);
                        explored.failures.push((seed, failure));
                    }
                }
            });
        }
    });
    let mut explored = explored.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    explored.failures.sort();
    explored
}

/// What a failure is about, whatever the names, numbers and times in it.
fn kind(failure: &str) -> Vec<&str> {
    let first = failure.lines().next().unwrap_or_default();
    let words = first.split(|c: char| !c.is_alphanumeric()).filter(|w| w.len() > 2);
    words.filter(|w| w.chars().all(char::is_alphabetic)).collect()
}

/// The shortest story found that ends in the same way, and how it is played.
pub fn shrink(story: &Story, bug: Option<Bug>) -> (Story, Played) {
    let mut played = play(story, bug, false);
    let mut story = story.clone();
    let Some(failure) = played.failure.clone() else { return (story, played) };
    let (begun, kind_of_all) = (Instant::now(), kind(&failure));
    let mut chunk = story.items.len().div_ceil(2).max(1);
    loop {
        let mut shorter = false;
        let mut at = 0;
        while at < story.items.len() && begun.elapsed() < SHRINKING {
            let mut fewer = story.clone();
            fewer.items.drain(at..(at + chunk).min(story.items.len()));
            let tried = play(&fewer, bug, false);
            if tried.failure.as_deref().is_some_and(|f| kind(f) == kind_of_all) {
                (story, played, shorter) = (fewer, tried, true);
            } else {
                at += chunk;
            }
        }
        if begun.elapsed() >= SHRINKING || (chunk == 1 && !shorter) {
            return (story, played);
        }
        chunk = if shorter { chunk } else { chunk.div_ceil(2) }.min(story.items.len()).max(1);
    }
}
