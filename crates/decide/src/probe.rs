//! Probe verdicts: how single results become a container's startup, liveness and readiness.
//!
//! Results of the same kind are counted in a row; the verdict changes when the row reaches the probe's threshold. Liveness and startup
//! stand still once they have failed (startup also once it has succeeded): they hold until the container is another one.

use model::api::Probe;

/// Which probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProbeKind {
    /// `startupProbe`.
    Startup,
    /// `livenessProbe`.
    Liveness,
    /// `readinessProbe`.
    Readiness,
}

impl ProbeKind {
    /// As in events and metrics: `Startup`, `Liveness`, `Readiness`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// The probe's numbers, as defaulted by the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// `successThreshold`, at least 1.
    pub success: u32,
    /// `failureThreshold`, at least 1.
    pub failure: u32,
}

impl Thresholds {
    /// From the API.
    pub fn of(probe: &Probe) -> Self {
        let number =
            |n: Option<i32>, default| n.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).unwrap_or(default);
        Self { success: number(probe.success_threshold, 1), failure: number(probe.failure_threshold, 3) }
    }
}

/// One probe of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeState {
    kind: ProbeKind,
    /// What counts now; None: no verdict yet.
    verdict: Option<bool>,
    last: Option<bool>,
    run: u32,
}

impl ProbeState {
    /// Before the first result: liveness counts as success, readiness as failure, startup as unknown.
    pub fn new(kind: ProbeKind) -> Self {
        let verdict = match kind {
            ProbeKind::Startup => None,
            ProbeKind::Liveness => Some(true),
            ProbeKind::Readiness => Some(false),
        };
        Self { kind, verdict, last: None, run: 0 }
    }

    /// What counts now.
    pub fn verdict(&self) -> Option<bool> {
        self.verdict
    }

    /// True when no further result can change the verdict.
    pub fn settled(&self) -> bool {
        match self.kind {
            ProbeKind::Startup => self.verdict.is_some(),
            ProbeKind::Liveness => self.verdict == Some(false),
            ProbeKind::Readiness => false,
        }
    }

    /// Takes one result; true when the verdict changed.
    pub fn take(&mut self, success: bool, thresholds: Thresholds) -> bool {
        if self.settled() {
            return false;
        }
        if self.last == Some(success) {
            self.run = self.run.saturating_add(1);
        } else {
            self.last = Some(success);
            self.run = 1;
        }
        let needed = if success { thresholds.success } else { thresholds.failure };
        let changed = self.run >= needed && self.verdict != Some(success);
        if changed {
            self.verdict = Some(success);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(kind: ProbeKind, thresholds: (u32, u32), results: &str) -> Option<bool> {
        let mut state = ProbeState::new(kind);
        for r in results.chars() {
            state.take(r == '+', Thresholds { success: thresholds.0, failure: thresholds.1 });
        }
        state.verdict()
    }

    #[test]
    fn verdicts() {
        use ProbeKind::{Liveness, Readiness, Startup};
        for (kind, thresholds, results, expected) in [
            (Liveness, (1, 3), "", Some(true)),
            (Liveness, (1, 3), "--", Some(true)),
            (Liveness, (1, 3), "--+--", Some(true)),
            (Liveness, (1, 3), "---", Some(false)),
            (Liveness, (1, 3), "---+++", Some(false)),
            (Readiness, (1, 3), "", Some(false)),
            (Readiness, (2, 3), "+", Some(false)),
            (Readiness, (2, 3), "++", Some(true)),
            (Readiness, (1, 3), "+--", Some(true)),
            (Readiness, (1, 3), "+---", Some(false)),
            (Readiness, (1, 3), "+---+", Some(true)),
            (Startup, (1, 3), "--", None),
            (Startup, (1, 3), "--+", Some(true)),
            (Startup, (1, 3), "+---", Some(true)),
            (Startup, (1, 3), "---", Some(false)),
            (Startup, (1, 3), "---+", Some(false)),
        ] {
            assert_eq!(run(kind, thresholds, results), expected, "{kind:?} {thresholds:?} {results}");
        }
    }

    proptest! {
        /// A verdict other than the initial one was reached by a full row of equal results.
        #[test]
        fn a_change_needs_a_full_row(results in proptest::collection::vec(any::<bool>(), 0..40), success in 1u32..4, failure in 1u32..4) {
            let thresholds = Thresholds { success, failure };
            let mut state = ProbeState::new(ProbeKind::Readiness);
            for (i, r) in results.iter().enumerate() {
                if state.take(*r, thresholds) {
                    let needed = if *r { success } else { failure } as usize;
                    prop_assert!(i + 1 >= needed);
                    prop_assert!(results[i + 1 - needed..=i].iter().all(|x| x == r));
                }
            }
        }
    }
}
