//! Plans for any desired and observed pod, also for pairs that no history leads to: what must hold of every single plan, and that planning and doing
//! comes to an end.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::plan::{KillReason, Plan, SandboxStep};
use model::pod::{ContainerKind, DesiredPod};
use proptest::prelude::*;

use super::walk::{cases, limit, spec};
use super::{PlanInput, ProbeVerdicts, SandboxVerdict, StartupVerdict, last_exit, plan, sandbox_verdict};
use crate::backoff::Backoffs;
use crate::restart::{self, RestartGates};
use crate::testing::{at, container, hash, pod, sandbox};

/// One desired and one observed pod, and what the probes say.
#[derive(Clone, Debug)]
struct Pair {
    pod: DesiredPod,
    observed: ObservedPod,
    backoffs: Backoffs,
    probes: BTreeMap<String, ProbeVerdicts>,
    now: i64,
}

/// A container that the runtime shows: index of its name, of its sandbox, state, exit code, whether its image is another one, probes.
type Shown = (usize, usize, u8, i32, bool, u8);

fn shown() -> impl Strategy<Value = Shown> {
    let code = prop_oneof![3 => Just(0), 2 => Just(1), 1 => Just(42), 1 => Just(88)];
    (0usize..8, 0usize..3, 0u8..4, code, prop::bool::weighted(0.15), 0u8..9)
}

fn pair() -> impl Strategy<Value = (Pair, usize)> {
    let sandboxes = prop::collection::vec(any::<bool>(), 0..3);
    (spec(), any::<bool>(), sandboxes, prop::collection::vec(shown(), 0..10), 0u8..4).prop_map(
        |((mut text, count), startup, sandboxes, shown, failed)| {
            if startup {
                text = text.replace(r#""livenessProbe":{}"#, r#""livenessProbe":{},"startupProbe":{}"#);
            }
            let pod = pod(&text);
            let mut observed = ObservedPod::empty(pod.uid().clone(), "web", "ns");
            for (i, ready) in (0u32..).zip(&sandboxes) {
                let mut s = sandbox(&format!("s{i}"), i, *ready);
                s.created_at = at(i64::from(i));
                observed.sandboxes.push(s);
            }
            let mut names: Vec<String> = pod.containers().map(|c| c.spec.name.clone()).collect();
            names.push("stray".to_owned());
            let mut probes = BTreeMap::new();
            let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
            for (n, (name, sandbox, state, code, changed, verdict)) in (0i64..).zip(&shown) {
                let name = &names[name % names.len()];
                // Without a sandbox nothing runs.
                let Some(sandbox) = sandboxes.len().checked_sub(1).map(|last| format!("s{}", sandbox.min(&last)))
                else {
                    continue;
                };
                let state =
                    [ContainerState::Created, ContainerState::Running, ContainerState::Exited, ContainerState::Unknown]
                        [usize::from(*state)];
                let id = format!("c{n}");
                let mut c = container(&id, name, &sandbox, state);
                let count = counts.entry(name).or_default();
                c.restart_count = *count;
                *count += 1;
                c.created_at = at(10 + n);
                let image = if *changed { "another" } else { "img" };
                c.hash = Some(hash(image, name));
                if state != ContainerState::Created {
                    c.started_at = Some(at(10 + n));
                }
                if state == ContainerState::Exited {
                    c.exit_code = *code;
                    c.finished_at = Some(at(11 + n));
                }
                observed.containers.push(c);
                probes.insert(
                    id,
                    ProbeVerdicts {
                        liveness_failed: *verdict == 0,
                        startup: [StartupVerdict::Unknown, StartupVerdict::Failed, StartupVerdict::Started]
                            [usize::from(verdict % 3)],
                    },
                );
            }
            observed.sort();
            let mut backoffs = Backoffs::default();
            for name in names.iter().take(usize::from(failed)) {
                if let Some(exit) = last_exit(&observed, name) {
                    backoffs.record_start(pod.uid(), name, hash("img", name), Some(exit), exit);
                }
            }
            (Pair { pod, observed, backoffs, probes, now: 30 }, count)
        },
    )
}

impl Pair {
    fn time(&self) -> Timestamp {
        at(self.now)
    }

    fn verdicts(&self, id: &str) -> ProbeVerdicts {
        let new = ProbeVerdicts { liveness_failed: false, startup: StartupVerdict::Started };
        self.probes.get(id).copied().unwrap_or(new)
    }

    fn plan(&self) -> Plan {
        let probes = |id: &str| self.verdicts(id);
        plan(&PlanInput {
            pod: &self.pod,
            observed: &self.observed,
            probes: &probes,
            backoffs: &self.backoffs,
            now: self.time(),
            gates: RestartGates::default(),
            container_hash: &hash,
            has: None,
        })
    }

    fn container(&self, id: &str) -> &ObservedContainer {
        self.observed.containers.iter().find(|c| c.id == id).expect("a container that is there")
    }

    /// True when the pod's initialisation is complete in this sandbox, as far as can be seen: an app has begun; or the last init container has begun
    /// and has ended well, or is a sidecar that has started.
    fn initialised(&self, sandbox: &str) -> bool {
        let begun = |name: &str| self.observed.newest_in(name, sandbox).filter(|c| c.state != ContainerState::Created);
        if self.pod.app_containers().any(|e| begun(&e.spec.name).is_some()) {
            return true;
        }
        let Some(last) = self.pod.init_containers().last() else { return true };
        let Some(c) = begun(&last.spec.name) else { return false };
        match (last.kind, c.state) {
            (ContainerKind::Sidecar, ContainerState::Running) => {
                last.spec.startup_probe.is_none() || self.verdicts(&c.id).startup == StartupVerdict::Started
            }
            (ContainerKind::Init, ContainerState::Exited) => c.exit_code == 0,
            _ => false,
        }
    }

    /// What holds of every plan.
    fn check(&self, plan: &Plan) {
        let live: BTreeSet<&str> = self.observed.live_containers().map(|c| c.id.as_str()).collect();
        let killed: BTreeSet<&str> = plan.kill.iter().map(|k| k.id.as_str()).collect();
        let keep = match sandbox_verdict(&self.pod, &self.observed) {
            SandboxVerdict::Keep { id } => Some(id),
            SandboxVerdict::Replace { .. } => None,
        };
        assert!(!plan.kill_pod || plan.kill.is_empty(), "everything and something is killed");
        assert!(plan.start.is_empty() || !plan.kill_pod || matches!(plan.sandbox, SandboxStep::Create { .. }));
        match &plan.sandbox {
            SandboxStep::Keep(id) => assert_eq!(Some(id), keep.as_ref()),
            SandboxStep::Create { attempt } => {
                assert!(keep.is_none(), "a second sandbox");
                assert!(plan.kill_pod || !self.observed.anything_alive(), "a new sandbox beside something alive");
                assert!(self.observed.sandboxes.iter().all(|s| s.attempt < *attempt));
            }
            SandboxStep::None => assert!(plan.start.is_empty(), "a start without a sandbox"),
        }
        for k in &plan.kill {
            assert!(live.contains(k.id.as_str()), "kill of something that does not live: {k:?}");
            let c = self.container(&k.id);
            let spec = self.pod.container(&c.name).map(|e| e.spec);
            let verdicts = self.verdicts(&k.id);
            let holds = match k.reason {
                KillReason::NotInSpec => spec.is_none(),
                KillReason::SandboxChanged => keep.as_deref() != Some(&c.sandbox_id),
                KillReason::DefinitionChanged => c.hash != Some(hash("img", &c.name)),
                KillReason::LivenessProbe => {
                    spec.is_some_and(|s| s.liveness_probe.is_some()) && verdicts.liveness_failed
                }
                KillReason::StartupProbe => {
                    spec.is_some_and(|s| s.startup_probe.is_some()) && verdicts.startup == StartupVerdict::Failed
                }
                KillReason::UnknownState => {
                    c.state == ContainerState::Unknown
                        || self
                            .observed
                            .containers
                            .iter()
                            .any(|o| o.name == c.name && o.restart_count > c.restart_count)
                }
                KillReason::RestartAllContainers => {
                    restart::restart_all(&self.pod, &self.observed, RestartGates::default())
                }
                // Nobody here asks for other resources.
                KillReason::Resize => false,
                // No plan's: what a hook or the pod's end does.
                KillReason::PostStartHook | KillReason::PodEnding => false,
            };
            assert!(holds, "killed without reason: {k:?}");
        }
        for id in &plan.prune {
            let gone = plan.kill_pod || killed.contains(id.as_str());
            assert!(!live.contains(id.as_str()) || gone, "removed alive: {id}");
        }
        let mut names = BTreeSet::new();
        for s in &plan.start {
            assert!(names.insert(&s.name), "{} is started twice", s.name);
            assert!(!plan.waiting.iter().any(|w| w.name == s.name), "{} is started and waits", s.name);
            for c in self.observed.live_containers().filter(|c| c.name == s.name) {
                assert!(plan.kill_pod || killed.contains(c.id.as_str()), "two live containers of {}", s.name);
            }
            let before = self.observed.containers.iter().filter(|c| c.name == s.name).map(|c| c.restart_count).max();
            assert_eq!(s.restart_count, before.map(|n| n + 1), "the count of {}", s.name);
            if s.kind == ContainerKind::App {
                let ready = match &plan.sandbox {
                    SandboxStep::Keep(id) => self.initialised(id),
                    _ => self.pod.init_containers().next().is_none(),
                };
                assert!(ready, "app {} before its init containers", s.name);
                assert!(!plan.start.iter().any(|o| o.kind == ContainerKind::Init), "an app beside an init container");
            }
        }
        let inits = plan.start.iter().filter(|s| s.kind == ContainerKind::Init).count();
        assert!(inits <= 1, "two init containers at once");
    }

    /// Does what the plan says, as a runtime would: what is killed ends, init containers end well at once, everything else runs on.
    fn execute(&mut self, plan: &Plan) {
        self.now += 1;
        let now = self.time();
        let killed: BTreeSet<&str> = plan.kill.iter().map(|k| k.id.as_str()).collect();
        for c in &mut self.observed.containers {
            let alive = matches!(c.state, ContainerState::Running | ContainerState::Unknown);
            if alive && (plan.kill_pod || killed.contains(c.id.as_str())) {
                (c.state, c.exit_code, c.finished_at) = (ContainerState::Exited, 137, Some(now));
            }
        }
        if plan.kill_pod {
            self.observed.sandboxes.iter_mut().for_each(|s| s.ready = false);
        }
        self.observed.containers.retain(|c| !plan.prune.contains(&c.id));
        let current = match &plan.sandbox {
            SandboxStep::None => return,
            SandboxStep::Keep(id) => id.clone(),
            SandboxStep::Create { attempt } => {
                let mut s = sandbox(&format!("s{attempt}"), *attempt, true);
                s.created_at = now;
                self.observed.sandboxes.insert(0, s);
                format!("s{attempt}")
            }
        };
        for s in &plan.start {
            self.now += 1;
            let exit = last_exit(&self.observed, &s.name);
            self.backoffs.record_start(self.pod.uid(), &s.name, hash("img", &s.name), exit, self.time());
            let mut c = container(&format!("n{}", self.now), &s.name, &current, ContainerState::Running);
            c.restart_count = s.restart_count.unwrap_or(0);
            c.hash = Some(hash("img", &s.name));
            c.created_at = self.time();
            c.started_at = Some(self.time());
            if s.kind == ContainerKind::Init {
                (c.state, c.exit_code, c.finished_at) = (ContainerState::Exited, 0, Some(self.time()));
            }
            self.observed.containers.push(c);
            self.observed.sort();
        }
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    /// Every plan keeps the invariants, and so does every one after it, until nothing is left to do: soon.
    #[test]
    fn any_pair_keeps_the_invariants_and_settles((mut pair, containers) in pair()) {
        let mut worked = 0;
        loop {
            let plan = pair.plan();
            pair.check(&plan);
            prop_assert_eq!(&plan, &pair.plan(), "the same pair, another plan");
            if !plan.is_empty() {
                worked += 1;
                prop_assert!(worked <= limit(containers), "round {}: {:?}\n{:#?}", worked, plan, pair.observed);
                pair.execute(&plan);
            } else if let Some(wake) = plan.wake_at {
                pair.now = wake.as_second() - at(0).as_second();
            } else {
                break;
            }
        }
    }
}
