//! How a pod ends: how much grace it gets, what is stopped in which order.
//!
//! App containers stop together at once; a sidecar waits, within its grace, for the apps and for the sidecars after it (KEP-753).
//! preStop hooks begin at once for all of them. The sandboxes come last.

use std::time::Duration;

use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::pod::{ContainerKind, DesiredPod};

/// The least that a container gets between its termination signal and the kill, s: even when a hook used up all of its grace.
pub const MINIMUM_STOP: i64 = 2;
/// Grace of runtime pods that nobody wants any more, s.
pub const ORPHAN_GRACE: i64 = 1;

/// The pod's grace in seconds: at least 1, and once decided only ever shortened.
///
/// `current` is what was decided before; `deletion` is `metadata.deletionGracePeriodSeconds`; `asked` comes from eviction, node shutdown
/// or preemption; `spec` is `spec.terminationGracePeriodSeconds` and counts only when nothing else says anything.
pub fn pod_grace(current: Option<i64>, deletion: Option<i64>, asked: Option<i64>, spec: Option<i64>) -> i64 {
    [current, deletion, asked].into_iter().flatten().min().or(spec).unwrap_or(1).max(1)
}

/// The grace of one container that is killed while its pod lives on, s. `deletion` and `spec` as in [`pod_grace`]; `reason` is what the
/// reason for the kill sets ([`model::plan::Kill::grace`]).
pub fn container_grace(deletion: Option<i64>, reason: Option<i64>, spec: Option<i64>) -> i64 {
    deletion.or(reason).or(spec).unwrap_or(MINIMUM_STOP)
}

/// What is left of a container's grace while its end proceeds: hook, then turn, then stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget(i64);

impl Budget {
    /// A budget of this many seconds.
    pub fn new(grace: i64) -> Self {
        Self(grace.max(0))
    }

    /// Seconds left for the preStop hook and for waiting one's turn; None: no time for either.
    pub fn left(self) -> Option<Duration> {
        u64::try_from(self.0).ok().filter(|s| *s > 0).map(Duration::from_secs)
    }

    /// Takes off the whole seconds that a step took.
    pub fn spend(&mut self, took: Duration) {
        self.0 = self.0.saturating_sub_unsigned(took.as_secs()).max(0);
    }

    /// A later, shorter grace takes effect; a longer one does not. Both count from the start of the termination, `since` ago.
    pub fn shorten(&mut self, grace: i64, since: Duration) {
        self.0 = self.0.min(grace.saturating_sub_unsigned(since.as_secs()).max(0));
    }

    /// The timeout for StopContainer.
    pub fn stop(self) -> Duration {
        Duration::from_secs(self.0.max(MINIMUM_STOP).unsigned_abs())
    }
}

/// The end of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopContainer {
    /// CRI id.
    pub id: String,
    /// Container name.
    pub name: String,
    /// Its kind; None when the spec does not have it.
    pub kind: Option<ContainerKind>,
    /// Ids of the containers that must have ended, or its own grace run out, before it is stopped.
    pub after: Vec<String>,
    /// Grace in seconds; the hook and the wait for its turn come off it.
    pub grace: i64,
    /// preStop hook, JSON of a LifecycleHandler; it runs at once, whatever [`Self::after`] says.
    pub pre_stop: Option<String>,
}

/// The end of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TerminationPlan {
    /// Every container that runs or may run.
    pub containers: Vec<StopContainer>,
    /// All sandboxes, to be stopped when every container has ended.
    pub sandboxes: Vec<String>,
}

/// How to end what runs of a pod. `pod` is None for runtime pods that no source knows: hooks then come from what the kubelet wrote into
/// the containers, and all end at once, since the order is not recorded there.
pub fn plan(pod: Option<&DesiredPod>, observed: &ObservedPod, grace: i64) -> TerminationPlan {
    let live: Vec<(&ObservedContainer, Option<ContainerKind>, usize)> = observed
        .live_containers()
        .map(|c| {
            let entry = pod.and_then(|p| p.container(&c.name));
            (c, entry.map(|e| e.kind), entry.map_or(0, |e| e.index))
        })
        .collect();
    let containers = live
        .iter()
        .map(|&(c, kind, index)| {
            let after = if kind == Some(ContainerKind::Sidecar) {
                live.iter()
                    .filter(|(_, k, i)| match k {
                        Some(ContainerKind::App) => true,
                        Some(ContainerKind::Sidecar) => *i > index,
                        _ => false,
                    })
                    .map(|(c, ..)| c.id.clone())
                    .collect()
            } else {
                Vec::new()
            };
            let pre_stop = if grace > 0 && c.state == ContainerState::Running { pre_stop(pod, c) } else { None };
            StopContainer { id: c.id.clone(), name: c.name.clone(), kind, after, grace, pre_stop }
        })
        .collect();
    TerminationPlan { containers, sandboxes: observed.sandboxes.iter().map(|s| s.id.clone()).collect() }
}

/// The preStop hook of a container: from the spec when it still has it, else as written into the container when it was created.
pub fn pre_stop(pod: Option<&DesiredPod>, container: &ObservedContainer) -> Option<String> {
    match pod.and_then(|p| p.container(&container.name)) {
        Some(entry) => {
            let hook = entry.spec.lifecycle.as_ref()?.pre_stop.as_ref()?;
            serde_json::to_string(hook).ok()
        }
        None => container.pre_stop.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{container, pod, seen};

    #[test]
    fn pod_grace_is_only_shortened() {
        for (current, deletion, asked, spec, expected) in [
            (None, None, None, Some(30), 30),
            (None, Some(10), None, Some(30), 10),
            (None, Some(60), None, Some(30), 60),
            (None, None, Some(0), Some(600), 1),
            (None, Some(0), None, Some(600), 1),
            (None, Some(20), Some(1), Some(30), 1),
            (Some(20), Some(30), None, Some(30), 20),
            (Some(20), Some(3), None, Some(30), 3),
            (Some(20), None, None, Some(3), 20),
            (None, None, None, None, 1),
        ] {
            assert_eq!(pod_grace(current, deletion, asked, spec), expected);
        }
    }

    #[test]
    fn container_grace_by_reason() {
        assert_eq!(container_grace(None, None, Some(30)), 30);
        assert_eq!(container_grace(None, Some(2), Some(300)), 2);
        assert_eq!(container_grace(None, Some(0), Some(300)), 0);
        assert_eq!(container_grace(Some(300), Some(2), Some(30)), 300);
        assert_eq!(container_grace(None, None, None), 2);
    }

    #[test]
    fn the_hook_comes_off_the_budget() {
        let secs = Duration::from_secs;
        let mut b = Budget::new(20);
        assert_eq!(b.left(), Some(secs(20)));
        b.spend(Duration::from_millis(15_900));
        assert_eq!((b.left(), b.stop()), (Some(secs(5)), secs(5)));
        b.spend(secs(9));
        assert_eq!((b.left(), b.stop()), (None, secs(2)));
        assert_eq!((Budget::new(0).left(), Budget::new(0).stop()), (None, secs(2)));
        assert_eq!(Budget::new(1).stop(), secs(2));
        let mut b = Budget::new(20);
        b.spend(secs(4));
        b.shorten(3, secs(4));
        assert_eq!((b.left(), b.stop()), (None, secs(2)));
        let mut b = Budget::new(10);
        b.shorten(60, secs(1));
        assert_eq!(b.left(), Some(secs(10)));
    }

    /// `NAME after A+B` for each container.
    fn order(plan: &TerminationPlan) -> Vec<String> {
        plan.containers
            .iter()
            .map(|c| {
                let after: Vec<&str> = c.after.iter().map(|id| id.split('.').next().unwrap_or_default()).collect();
                format!("{} after {}", c.name, after.join("+"))
            })
            .collect()
    }

    const SIDECARS: &str = r#"{"initContainers":[
        {"name":"s1","restartPolicy":"Always"},{"name":"i"},{"name":"s2","restartPolicy":"Always"},
        {"name":"s3","restartPolicy":"Always"}],
        "containers":[{"name":"a","lifecycle":{"preStop":{"exec":{"command":["x"]}}}},{"name":"b"}],
        "ephemeralContainers":[{"name":"d"}]}"#;

    #[test]
    fn sidecars_end_in_reverse_after_the_apps() {
        let all = seen(&[
            "s0 ready",
            "s0/s1 running",
            "s0/i exit=0",
            "s0/s2 running",
            "s0/s3 running",
            "s0/a running",
            "s0/b running",
            "s0/d running",
        ]);
        let p = plan(Some(&pod(SIDECARS)), &all, 30);
        assert_eq!(
            order(&p),
            ["d after ", "b after ", "a after ", "s3 after b+a", "s2 after b+a+s3", "s1 after b+a+s3+s2"]
        );
        assert_eq!(p.sandboxes, ["s0"]);
        assert!(p.containers.iter().all(|c| c.grace == 30));
        let hook = p.containers.iter().find(|c| c.name == "a").and_then(|c| c.pre_stop.as_deref());
        assert_eq!(hook, Some(r#"{"exec":{"command":["x"]}}"#));
        assert!(p.containers.iter().filter(|c| c.name != "a").all(|c| c.pre_stop.is_none()));
        // Before initialisation is done, and without some of them.
        let early = seen(&["s0 ready", "s0/s1 running", "s0/i running"]);
        assert_eq!(order(&plan(Some(&pod(SIDECARS)), &early, 30)), ["i after ", "s1 after "]);
        let gap = seen(&["s0 ready", "s0/s1 running", "s0/s2 exit=1", "s0/s3 running", "s0/a exit=0"]);
        assert_eq!(order(&plan(Some(&pod(SIDECARS)), &gap, 30)), ["s3 after ", "s1 after s3"]);
        // No time for hooks.
        assert!(plan(Some(&pod(SIDECARS)), &all, 0).containers.iter().all(|c| c.pre_stop.is_none()));
    }

    #[test]
    fn orphans_end_by_what_was_written_into_them() {
        let mut observed =
            seen(&["s0 dead", "s1 ready", "s1/a running", "s1/b unknown", "s1/c exit=0", "s1/d created"]);
        for c in &mut observed.containers {
            c.pre_stop = Some("{\"sleep\":{\"seconds\":1}}".into());
        }
        let p = plan(None, &observed, ORPHAN_GRACE);
        assert_eq!(order(&p), ["b after ", "a after "]);
        assert_eq!(p.containers[1].pre_stop.as_deref(), Some("{\"sleep\":{\"seconds\":1}}"));
        assert_eq!(p.containers[0].pre_stop, None, "nothing runs in it for sure");
        assert_eq!(p.sandboxes, ["s1", "s0"]);
        let c = container("x", "gone", "s0", ContainerState::Running);
        assert_eq!(pre_stop(Some(&pod(SIDECARS)), &c), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Whatever is asked for and however often: at least a second, never longer than before, and no word but the shortest counts.
        #[test]
        fn a_grace_only_shrinks(spec in prop::option::of(0i64..700), asks in prop::collection::vec((prop::option::of(0i64..700), prop::option::of(0i64..700)), 1..8)) {
            let mut grace = None;
            let mut said: Vec<i64> = Vec::new();
            for (deletion, asked) in asks {
                let now = pod_grace(grace, deletion, asked, spec);
                said.extend(deletion.into_iter().chain(asked));
                prop_assert!(now >= 1);
                prop_assert!(grace.is_none_or(|before| now <= before));
                match grace {
                    // The spec's own counts only where nothing else was said at first.
                    None => prop_assert_eq!(now, said.iter().copied().min().or(spec).unwrap_or(1).max(1)),
                    Some(before) => prop_assert_eq!(now, deletion.into_iter().chain(asked).chain([before]).min().unwrap().max(1)),
                }
                grace = Some(now);
            }
        }

        /// Hook, turn and stop together take the grace and the minimum at most, whenever and however it is shortened, and the process always gets the
        /// minimum.
        #[test]
        fn a_budget_is_never_overdrawn(grace in 0i64..700, steps in prop::collection::vec((0u64..400_000, prop::option::of(0i64..700)), 0..5)) {
            let mut budget = Budget::new(grace);
            let (mut spent, mut shortest) = (Duration::ZERO, grace);
            for (millis, shorter) in steps {
                // A step takes what is left at most.
                let Some(left) = budget.left() else { break };
                let took = Duration::from_millis(millis).min(left);
                budget.spend(took);
                spent += took;
                if let Some(shorter) = shorter {
                    budget.shorten(shorter, spent);
                    shortest = shortest.min(shorter);
                }
                prop_assert!(budget.stop() >= Duration::from_secs(MINIMUM_STOP.unsigned_abs()));
                // Whole seconds are taken off: each step may gain less than one.
                let limit = Duration::from_secs(shortest.unsigned_abs()).max(spent) + Duration::from_secs(MINIMUM_STOP.unsigned_abs() + 5);
                prop_assert!(spent + budget.stop() <= limit, "{:?} + {:?} of {}", spent, budget.stop(), shortest);
            }
        }

        /// Of a kill while the pod lives: a deletion goes before the reason, the reason before the spec.
        #[test]
        fn a_kill_has_the_first_word_that_was_said(words in prop::array::uniform3(prop::option::of(0i64..700))) {
            let [deletion, reason, spec] = words;
            let first = words.into_iter().flatten().next().unwrap_or(MINIMUM_STOP);
            prop_assert_eq!(container_grace(deletion, reason, spec), first);
        }
    }
}
