//! Graceful shutdown of the node (KEP-2000, KEP-2712): which pods end in which order, with how much time.

use std::time::Duration;

use jiff::Timestamp;

/// Reason in the status of a pod that ended with the node.
pub const REASON: &str = "Terminated";
/// Message there, and of its DisruptionTarget condition.
pub const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Reason of that condition.
pub const DISRUPTION: &str = "TerminationByKubelet";
/// Why the node is not ready meanwhile.
pub const NOT_READY: &str = "node is shutting down";
/// Where the times of the last shutdown are kept, below the root directory.
pub const STATE_FILE: &str = "graceful_node_shutdown_state";
/// `system-cluster-critical`.
const CRITICAL: i32 = 2_000_000_000;

/// Time for the pods from a priority on up to the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period {
    /// Pods of this priority and above.
    pub priority: i32,
    /// Seconds that they get together.
    pub seconds: i64,
}

/// The periods in the order in which they pass: low priorities first. `by_priority`: `shutdownGracePeriodByPodPriority` (empty: not set, or its gate is off); else
/// `total` and `critical`, `shutdownGracePeriod` and `shutdownGracePeriodCriticalPods`. None at all: shutdowns are not held up.
pub fn periods(by_priority: &[Period], total: Duration, critical: Duration) -> Vec<Period> {
    if by_priority.is_empty() {
        let Some(ordinary) = total.checked_sub(critical).filter(|_| !total.is_zero()) else { return Vec::new() };
        let seconds = |d: Duration| i64::try_from(d.as_secs()).unwrap_or(i64::MAX);
        return vec![
            Period { priority: 0, seconds: seconds(ordinary) },
            Period { priority: CRITICAL, seconds: seconds(critical) },
        ];
    }
    let mut periods = by_priority.to_vec();
    periods.sort_by_key(|p| p.priority);
    periods
}

/// How long all of them take.
pub fn requested(periods: &[Period]) -> Duration {
    Duration::from_secs(periods.iter().map(|p| p.seconds.unsigned_abs()).sum())
}

/// The pods of each period, periods without pods left out: nobody waits for those. A pod below the lowest priority belongs to the lowest.
pub fn groups<P>(periods: &[Period], pods: Vec<P>, priority: impl Fn(&P) -> i32) -> Vec<(Period, Vec<P>)> {
    let mut groups: Vec<_> = periods.iter().map(|p| (*p, Vec::new())).collect();
    for pod in pods {
        let of = priority(&pod);
        let at = periods.iter().rposition(|p| p.priority <= of).unwrap_or(0);
        if let Some((_, members)) = groups.get_mut(at) {
            members.push(pod);
        }
    }
    groups.retain(|(_, members)| !members.is_empty());
    groups
}

/// A pod's grace in seconds: that of its period, or its own when that is not longer.
pub fn grace(period: Period, own: Option<i64>) -> i64 {
    own.filter(|own| *own <= period.seconds).unwrap_or(period.seconds)
}

/// When the last shutdown began and ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Its beginning.
    pub start: Option<Timestamp>,
    /// When the last pod had ended or its time was over.
    pub end: Option<Timestamp>,
}

/// Go's time that is none.
const NO_TIME: &str = "0001-01-01T00:00:00Z";

impl Times {
    /// As the state file has them.
    pub fn encode(&self) -> Vec<u8> {
        let text = |t: Option<Timestamp>| t.map_or_else(|| NO_TIME.to_owned(), |t| t.to_string());
        format!(r#"{{"startTime":"{}","endTime":"{}"}}"#, text(self.start), text(self.end)).into_bytes()
    }

    /// The content of the state file.
    ///
    /// # Errors
    /// It is none.
    pub fn decode(content: &[u8]) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_slice(content).map_err(|e| e.to_string())?;
        let time = |key: &str| match value.get(key).and_then(|t| t.as_str()) {
            None | Some(NO_TIME) => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|e| format!("{key}: {e}")),
        };
        Ok(Self { start: time("startTime")?, end: time("endTime")? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn period(priority: i32, seconds: i64) -> Period {
        Period { priority, seconds }
    }

    #[test]
    fn which_periods() {
        let secs = Duration::from_secs;
        assert_eq!(periods(&[], secs(30), secs(10)), [period(0, 20), period(CRITICAL, 10)]);
        assert_eq!(periods(&[], secs(0), secs(0)), []);
        assert_eq!(periods(&[], secs(10), secs(30)), []);
        let given = [period(1000, 5), period(0, 7), period(-10, 1)];
        let sorted = periods(&given, secs(30), secs(10));
        assert_eq!(sorted, [period(-10, 1), period(0, 7), period(1000, 5)]);
        assert_eq!(requested(&sorted), secs(13));
    }

    #[test]
    fn who_ends_when() {
        let sorted = [period(0, 7), period(1000, 5), period(CRITICAL, 2)];
        let pods = vec![-5, 0, 999, 1000, 1001, CRITICAL, i32::MAX];
        assert_eq!(
            groups(&sorted, pods, |p| *p),
            [(sorted[0], vec![-5, 0, 999]), (sorted[1], vec![1000, 1001]), (sorted[2], vec![CRITICAL, i32::MAX])]
        );
        assert_eq!(groups(&sorted, vec![5000], |p| *p), [(sorted[1], vec![5000])]);
        assert_eq!([grace(sorted[0], Some(3)), grace(sorted[0], Some(30)), grace(sorted[0], None)], [3, 7, 7]);
    }

    #[test]
    fn state_file() {
        let start = "2026-11-30T08:00:01.5Z".parse().ok();
        let times = Times { start, end: None };
        let text = String::from_utf8(times.encode()).unwrap();
        assert_eq!(text, r#"{"startTime":"2026-11-30T08:00:01.5Z","endTime":"0001-01-01T00:00:00Z"}"#);
        assert_eq!(Times::decode(text.as_bytes()), Ok(times));
        let go = br#"{"startTime":"2026-11-30T10:00:01.123456789+02:00","endTime":"2026-11-30T10:00:02Z"}"#;
        assert!(Times::decode(go).unwrap().end > Times::decode(go).unwrap().start);
        assert!(Times::decode(b"{").is_err());
    }

    proptest! {
        /// Every pod is in one group, higher priorities never before lower ones.
        #[test]
        fn everybody_in_order(given in prop::collection::btree_map(-5i32..5, 0i64..9, 1..5), pods in prop::collection::vec(-9i32..9, 0..20)) {
            let given: Vec<_> = given.into_iter().map(|(p, s)| period(p, s)).collect();
            let groups = groups(&periods(&given, Duration::ZERO, Duration::ZERO), pods.clone(), |p| *p);
            let mut placed: Vec<i32> = groups.iter().flat_map(|(_, members)| members.clone()).collect();
            let lowest = |members: &[i32]| members.iter().copied().min().unwrap_or(0);
            let highest = |members: &[i32]| members.iter().copied().max().unwrap_or(0);
            prop_assert!(groups.windows(2).all(|w| highest(&w[0].1) < lowest(&w[1].1)));
            placed.sort_unstable();
            let mut all = pods;
            all.sort_unstable();
            prop_assert_eq!(placed, all);
        }
    }
}
