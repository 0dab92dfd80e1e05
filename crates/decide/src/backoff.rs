//! Waiting times that double: crash back-off of containers, back-off of image pulls.
//!
//! The first failure never waits; after it the waits are the initial delay, doubled up to the maximum. An entry is forgotten when
//! things went well for long enough.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use model::pod::PodUid;

/// Crash and pull back-off begin here.
pub const INITIAL: Duration = Duration::from_secs(10);
/// Default upper limit of both.
pub const MAX: Duration = Duration::from_secs(300);
/// A container that ran this long after its start has its crash back-off forgotten, whatever the maximum is.
pub const CRASH_RESET: Duration = Duration::from_secs(600);

/// An end that is further ahead than this is one in the future.
const CLOCK_SLACK: SignedDuration = SignedDuration::from_secs(1);

/// A wait that still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Its whole length, as messages name it.
    pub delay: Duration,
    /// When it ends.
    pub until: Timestamp,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Hash of what is retried; another hash is another thing with no history.
    hash: u32,
    delay: Duration,
    updated: Timestamp,
}

/// The doubling itself, with one entry for each pod and key.
#[derive(Clone, Debug)]
struct Curve {
    initial: Duration,
    max: Duration,
    reset: Duration,
    entries: BTreeMap<PodUid, BTreeMap<String, Entry>>,
}

impl Curve {
    fn get(&self, uid: &PodUid, key: &str, hash: u32, event: Timestamp) -> Option<Entry> {
        let entry = self.entries.get(uid)?.get(key)?;
        (entry.hash == hash && !self.expired(entry, event)).then_some(*entry)
    }

    fn expired(&self, entry: &Entry, event: Timestamp) -> bool {
        event.duration_since(entry.updated) > signed(self.reset)
    }

    /// The length of the wait that follows one more failure.
    fn next(&self, uid: &PodUid, key: &str, hash: u32, event: Timestamp) -> Duration {
        match self.get(uid, key, hash, event) {
            Some(entry) => (entry.delay * 2).min(self.max),
            None => self.initial.min(self.max),
        }
    }

    fn advance(&mut self, uid: &PodUid, key: &str, hash: u32, event: Timestamp, now: Timestamp) {
        let delay = self.next(uid, key, hash, event);
        self.entries.entry(uid.clone()).or_default().insert(key.to_owned(), Entry { hash, delay, updated: now });
    }

    fn prune(&mut self, now: Timestamp) {
        let reset = signed(self.reset);
        self.entries.retain(|_, keys| {
            keys.retain(|_, e| now.duration_since(e.updated) <= reset);
            !keys.is_empty()
        });
    }
}

fn signed(d: Duration) -> SignedDuration {
    SignedDuration::try_from(d).unwrap_or(SignedDuration::MAX)
}

fn later(from: Timestamp, d: Duration) -> Timestamp {
    from.saturating_add(signed(d)).unwrap_or(Timestamp::MAX)
}

/// Crash back-off of containers, counted from the end of the last run.
///
/// `hash` is the container's hash (image and name): a changed container starts with a clean slate.
#[derive(Clone, Debug)]
pub struct Backoffs(Curve);

impl Default for Backoffs {
    fn default() -> Self {
        Self::new(MAX)
    }
}

impl Backoffs {
    /// Empty; waits grow up to `max` (`crashLoopBackOff.maxContainerRestartPeriod`).
    pub fn new(max: Duration) -> Self {
        Self::starting_at(INITIAL, max)
    }

    /// Empty; waits grow from `initial` up to `max` (gate ReduceDefaultCrashLoopBackOffDecay begins at 1 s).
    pub fn starting_at(initial: Duration, max: Duration) -> Self {
        Self(Curve { initial, max, reset: CRASH_RESET, entries: BTreeMap::new() })
    }

    /// The wait that still holds this container back, given when its last run ended. An end in the future is one from before the clock was set back: when it
    /// was nobody can tell any more, and nobody waits for that time to come again.
    pub fn waits(
        &self,
        uid: &PodUid,
        container: &str,
        hash: u32,
        finished_at: Timestamp,
        now: Timestamp,
    ) -> Option<Wait> {
        let delay = self.0.get(uid, container, hash, finished_at)?.delay;
        let until = later(finished_at, delay);
        let set_back = finished_at.duration_since(now) > CLOCK_SLACK;
        (now < until && !set_back).then_some(Wait { delay, until })
    }

    /// How long the wait after the next exit will be, when it ends at `finished_at`.
    pub fn next_wait(&self, uid: &PodUid, container: &str, hash: u32, finished_at: Timestamp) -> Duration {
        self.0.next(uid, container, hash, finished_at)
    }

    /// A start is being tried. `previous_exit` is when the newest exited container of that name ended ([`crate::plan::last_exit`]);
    /// without one it is a first start, which leaves no trace.
    pub fn record_start(
        &mut self,
        uid: &PodUid,
        container: &str,
        hash: u32,
        previous_exit: Option<Timestamp>,
        now: Timestamp,
    ) {
        if let Some(exit) = previous_exit {
            self.0.advance(uid, container, hash, exit, now);
        }
    }

    /// Forgets a pod.
    pub fn remove_pod(&mut self, uid: &PodUid) {
        self.0.entries.remove(uid);
    }

    /// Forgets what is too old to count.
    pub fn prune(&mut self, now: Timestamp) {
        self.0.prune(now);
    }
}

/// Back-off of image pulls by pod and image, counted from the last failure.
#[derive(Clone, Debug)]
pub struct PullBackoffs(Curve);

impl Default for PullBackoffs {
    fn default() -> Self {
        Self(Curve { initial: INITIAL, max: MAX, reset: MAX * 2, entries: BTreeMap::new() })
    }
}

impl PullBackoffs {
    /// The wait that still holds this pull back.
    pub fn waits(&self, uid: &PodUid, image: &str, now: Timestamp) -> Option<Wait> {
        let entry = self.0.get(uid, image, 0, now)?;
        let until = later(entry.updated, entry.delay);
        (now < until).then_some(Wait { delay: entry.delay, until })
    }

    /// A pull failed.
    pub fn record_failure(&mut self, uid: &PodUid, image: &str, now: Timestamp) {
        self.0.advance(uid, image, 0, now, now);
    }

    /// Forgets a pod.
    pub fn remove_pod(&mut self, uid: &PodUid) {
        self.0.entries.remove(uid);
    }

    /// Forgets what is too old to count.
    pub fn prune(&mut self, now: Timestamp) {
        self.0.prune(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::at;

    fn uid() -> PodUid {
        PodUid::new("u")
    }

    /// Waits before each start of a container that runs for `run` seconds and fails.
    fn waits(backoffs: &mut Backoffs, run: i64, starts: usize) -> Vec<i64> {
        waits_of(backoffs, &vec![run; starts])
    }

    /// The same, each run with a length of its own.
    fn waits_of(backoffs: &mut Backoffs, runs: &[i64]) -> Vec<i64> {
        let (mut now, mut exit) = (0, None);
        runs.iter()
            .map(|run| {
                let wait = exit
                    .and_then(|e| backoffs.waits(&uid(), "c", 1, e, at(now)))
                    .map_or(0, |w| w.until.as_second() - at(now).as_second());
                now += wait;
                backoffs.record_start(&uid(), "c", 1, exit, at(now));
                now += run;
                exit = Some(at(now));
                wait
            })
            .collect()
    }

    #[test]
    fn the_curve() {
        let all = waits(&mut Backoffs::default(), 1, 10);
        assert_eq!(all, [0, 0, 10, 20, 40, 80, 160, 300, 300, 300]);
        let low = waits(&mut Backoffs::new(Duration::from_secs(30)), 1, 6);
        assert_eq!(low, [0, 0, 10, 20, 30, 30]);
        let lowest = waits(&mut Backoffs::new(Duration::from_secs(1)), 1, 4);
        assert_eq!(lowest, [0, 0, 1, 1]);
    }

    #[test]
    fn a_long_run_wipes_the_slate() {
        let of = |long| waits_of(&mut Backoffs::default(), &[1, 1, 1, 1, long, 1, 1]);
        assert_eq!(of(600), [0, 0, 10, 20, 40, 80, 160]);
        assert_eq!(of(601), [0, 0, 10, 20, 40, 0, 10]);
    }

    #[test]
    fn entries_are_apart_and_forgotten() {
        let mut b = Backoffs::default();
        b.record_start(&uid(), "c", 1, Some(at(0)), at(0));
        let waiting = |b: &Backoffs, name: &str, hash| b.waits(&uid(), name, hash, at(1), at(2)).is_some();
        assert!(waiting(&b, "c", 1));
        assert_eq!(b.waits(&uid(), "c", 1, at(1), at(2)).map(|w| w.delay), Some(Duration::from_secs(10)));
        assert!(!waiting(&b, "other", 1));
        assert!(!waiting(&b, "c", 2), "another image has no history");
        assert_eq!(b.next_wait(&uid(), "c", 1, at(1)), Duration::from_secs(20));
        b.prune(at(600));
        assert!(waiting(&b, "c", 1));
        b.prune(at(601));
        assert!(!waiting(&b, "c", 1));
        b.record_start(&uid(), "c", 1, Some(at(0)), at(0));
        b.remove_pod(&uid());
        assert!(!waiting(&b, "c", 1));
        b.record_start(&uid(), "c", 1, None, at(0));
        assert!(!waiting(&b, "c", 1), "a first start leaves no trace");
    }

    #[test]
    fn pulls() {
        let mut b = PullBackoffs::default();
        let mut now = 0;
        let mut seen = Vec::new();
        for _ in 0..7 {
            b.record_failure(&uid(), "img", at(now));
            let wait = b.waits(&uid(), "img", at(now)).expect("waits");
            seen.push(wait.delay.as_secs());
            assert_eq!(wait.until, at(now + i64::try_from(wait.delay.as_secs()).expect("small")));
            now = wait.until.as_second() - at(0).as_second();
            assert!(b.waits(&uid(), "img", at(now)).is_none());
        }
        assert_eq!(seen, [10, 20, 40, 80, 160, 300, 300]);
        assert!(b.waits(&uid(), "other", at(now)).is_none());
        // The last failure was 300 s ago; forgotten after twice the maximum.
        b.record_failure(&uid(), "img", at(now + 300));
        assert_eq!(b.waits(&uid(), "img", at(now + 300)).map(|w| w.delay), Some(Duration::from_secs(300)));
        b.record_failure(&uid(), "img", at(now + 901));
        assert_eq!(b.waits(&uid(), "img", at(now + 901)).map(|w| w.delay), Some(INITIAL));
    }

    proptest! {
        /// Runs of any length: each wait is the curve's next, or none after a run that wiped the slate, and what a restart of another container or a
        /// look in between does changes nothing.
        #[test]
        fn every_wait_is_on_the_curve(max in 1u64..600, runs in prop::collection::vec(0i64..1300, 2..20)) {
            let mut b = Backoffs::new(Duration::from_secs(max));
            let all = waits_of(&mut b, &runs);
            let max = i64::try_from(max).unwrap();
            let mut expected = vec![0];
            let mut next = 0;
            for (i, run) in runs.iter().enumerate().take(runs.len() - 1) {
                // The entry was written when this run began; the first start writes none.
                if i == 0 || *run > 600 {
                    next = 0;
                }
                expected.push(next);
                next = if next == 0 { 10.min(max) } else { (next * 2).min(max) };
            }
            prop_assert_eq!(all, expected);
        }

        /// Waits never exceed the maximum, never shrink while the container keeps failing fast, and end exactly when they say.
        #[test]
        fn waits_only_grow(max in 1u64..600, run in 0i64..100, starts in 2usize..14) {
            let mut b = Backoffs::new(Duration::from_secs(max));
            let all = waits(&mut b, run, starts);
            prop_assert_eq!(all[0], 0);
            prop_assert_eq!(all[1], 0);
            for pair in all[2..].windows(2) {
                prop_assert!(pair[0] <= pair[1] && pair[1] <= i64::try_from(max).unwrap());
                prop_assert!(pair[1] == (pair[0] * 2).min(i64::try_from(max).unwrap()));
            }
        }
    }
}
