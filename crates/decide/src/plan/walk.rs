//! Random walks of a pod over a small fake runtime that knows what really happened, whatever records it still has.

use std::collections::BTreeSet;

use jiff::Timestamp;
use model::observed::{ContainerState, ObservedPod};
use model::plan::{KillReason, Plan, SandboxStep};
use model::pod::{ContainerKind, DesiredPod};
use proptest::prelude::*;

use super::{PlanInput, ProbeVerdicts, StartupVerdict, last_exit, plan};
use crate::backoff::Backoffs;
use crate::restart::RestartGates;
use crate::testing::{at, container, hash, pod, sandbox};

/// The runtime, and the truth about the newest sandbox.
struct Fake {
    pod: DesiredPod,
    observed: ObservedPod,
    backoffs: Backoffs,
    now: i64,
    ids: u32,
    /// Init containers that ran to completion, and sidecars that were started, in the newest sandbox.
    complete: BTreeSet<String>,
    failed_probes: BTreeSet<String>,
    /// Exit code that the next init container ends with.
    init_code: i32,
}

impl Fake {
    fn new(spec: &str) -> Self {
        let pod = pod(spec);
        let observed = ObservedPod::empty(pod.uid().clone(), "web", "ns");
        Self {
            pod,
            observed,
            backoffs: Backoffs::default(),
            now: 0,
            ids: 0,
            complete: BTreeSet::new(),
            failed_probes: BTreeSet::new(),
            init_code: 0,
        }
    }

    fn time(&self) -> Timestamp {
        at(self.now)
    }

    fn plan(&self) -> Plan {
        let probes = |id: &str| ProbeVerdicts {
            liveness_failed: self.failed_probes.contains(id),
            startup: StartupVerdict::Started,
        };
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

    fn end(&mut self, id: &str, code: i32) {
        let now = self.time();
        for c in self.observed.containers.iter_mut().filter(|c| c.id == id) {
            c.state = ContainerState::Exited;
            c.exit_code = code;
            c.finished_at = Some(now);
        }
    }

    /// Does what a plan says, and checks each step against the truth.
    fn execute(&mut self, plan: &Plan) {
        self.now += 1;
        let live: Vec<String> = self.observed.live_containers().map(|c| c.id.clone()).collect();
        if plan.kill_pod {
            assert!(plan.kill.is_empty());
            live.iter().for_each(|id| self.end(id, 137));
            self.observed.sandboxes.iter_mut().for_each(|s| s.ready = false);
        }
        for k in &plan.kill {
            assert!(live.contains(&k.id), "kill of something that does not run: {k:?}");
            let c = self.observed.containers.iter().find(|c| c.id == k.id).expect("known");
            let reason = match k.reason {
                KillReason::LivenessProbe => self.failed_probes.contains(&k.id),
                KillReason::UnknownState => c.state == ContainerState::Unknown,
                KillReason::RestartAllContainers => true,
                _ => false,
            };
            assert!(reason, "killed without reason: {k:?}");
            self.end(&k.id, 137);
        }
        for id in &plan.prune {
            let c = self.observed.containers.iter().find(|c| c.id == *id).expect("known");
            assert!(!matches!(c.state, ContainerState::Running | ContainerState::Unknown), "removed alive: {id}");
            self.observed.containers.retain(|c| c.id != *id);
        }
        if plan.kill.iter().any(|k| k.reason == KillReason::RestartAllContainers)
            || (!plan.prune.is_empty() && plan.start.is_empty())
        {
            self.forget_if_reset();
        }
        if let SandboxStep::Create { attempt } = plan.sandbox {
            assert!(!self.observed.anything_alive(), "a new sandbox beside something alive");
            assert!(self.observed.sandboxes.iter().all(|s| s.attempt < attempt));
            let mut s = sandbox(&format!("s{attempt}"), attempt, true);
            s.created_at = self.time();
            self.observed.sandboxes.insert(0, s);
            self.complete.clear();
        }
        for s in &plan.start {
            let current = self.observed.sandboxes.first().filter(|s| s.ready).expect("a start needs a sandbox");
            let current = current.id.clone();
            assert!(!self.observed.live_containers().any(|c| c.name == s.name), "two live containers of {}", s.name);
            let pod = self.pod.clone();
            let before: Vec<_> = match s.kind {
                ContainerKind::App => pod.init_containers().collect(),
                ContainerKind::Init | ContainerKind::Sidecar => pod.init_containers().take(s.index).collect(),
                ContainerKind::Ephemeral => Vec::new(),
            };
            for e in before {
                assert!(self.complete.contains(&e.spec.name), "{} before {} was done", s.name, e.spec.name);
            }
            if s.kind == ContainerKind::Init {
                let app = pod.app_containers().any(|a| {
                    self.observed.newest_in(&a.spec.name, &current).is_some_and(|c| c.state != ContainerState::Created)
                });
                assert!(!app, "init container {} after an app was started", s.name);
            }
            let spec = pod.container(&s.name).expect("in the spec");
            let h = hash(spec.spec.image.as_deref().unwrap_or_default(), &s.name);
            let exit = last_exit(&self.observed, &s.name);
            self.backoffs.record_start(pod.uid(), &s.name, h, exit, self.time());
            self.now += 1;
            self.ids += 1;
            let mut c = container(&format!("c{}", self.ids), &s.name, &current, ContainerState::Running);
            c.restart_count = s.restart_count.unwrap_or(0);
            assert!(self.observed.containers.iter().all(|o| o.name != s.name || o.restart_count < c.restart_count));
            c.hash = Some(h);
            c.created_at = self.time();
            c.started_at = Some(self.time());
            if s.kind == ContainerKind::Init {
                c.state = ContainerState::Exited;
                c.exit_code = self.init_code;
                c.finished_at = Some(self.time());
            }
            if s.kind == ContainerKind::Sidecar || (s.kind == ContainerKind::Init && c.exit_code == 0) {
                self.complete.insert(s.name.clone());
            }
            self.observed.containers.push(c);
            self.observed.sort();
        }
    }

    /// After everything was removed for RestartAllContainers, initialisation begins anew.
    fn forget_if_reset(&mut self) {
        let none = !self.pod.containers().any(|e| self.observed.newest(&e.spec.name).is_some());
        if none {
            self.complete.clear();
        }
    }

    /// Rounds until nothing is to be done any more; time passes over back-offs, and only rounds with work count.
    fn settle(&mut self, limit: usize) {
        let mut worked = 0;
        loop {
            let p = self.plan();
            if !p.is_empty() {
                worked += 1;
                assert!(worked <= limit, "not settled after {limit} rounds: {p:?}\n{:#?}", self.observed);
                self.execute(&p);
            } else if let Some(wake) = p.wake_at {
                let wake = wake.as_second() - at(0).as_second();
                assert!(wake > self.now, "waits for what is past: {p:?}");
                self.now = wake;
            } else {
                return;
            }
        }
    }

    /// Something happens to the pod behind the planner's back.
    fn happen(&mut self, event: &Event) {
        self.now += 1;
        let pick = |n: usize, len: usize| (len > 0).then(|| n % len);
        match *event {
            Event::Exit(n, code) => {
                let live: Vec<String> = self.observed.live_containers().map(|c| c.id.clone()).collect();
                if let Some(i) = pick(n, live.len()) {
                    self.end(&live[i], code);
                }
            }
            Event::Unknown(n) => {
                let live: Vec<usize> = (0..self.observed.containers.len())
                    .filter(|i| self.observed.containers[*i].state == ContainerState::Running)
                    .collect();
                if let Some(i) = pick(n, live.len()) {
                    self.observed.containers[live[i]].state = ContainerState::Unknown;
                }
            }
            Event::Liveness(n) => {
                let live: Vec<String> = self.observed.live_containers().map(|c| c.id.clone()).collect();
                if let Some(i) = pick(n, live.len()) {
                    self.failed_probes.insert(live[i].clone());
                }
            }
            Event::SandboxDies => {
                // Its containers die with it.
                let live: Vec<String> = self.observed.live_containers().map(|c| c.id.clone()).collect();
                live.iter().for_each(|id| self.end(id, 137));
                self.observed.sandboxes.iter_mut().for_each(|s| s.ready = false);
            }
            Event::SandboxStops => self.observed.sandboxes.iter_mut().for_each(|s| s.ready = false),
            Event::AgentDiesCreating(n) => {
                // The agent died between create and start of what it was about to start.
                let p = self.plan();
                let app_or_init = p.start.get(pick(n, p.start.len()).unwrap_or(0));
                if let (Some(s), SandboxStep::Keep(id), true) = (app_or_init, &p.sandbox, p.kill.is_empty()) {
                    self.ids += 1;
                    let mut c = container(&format!("c{}", self.ids), &s.name, id, ContainerState::Created);
                    c.restart_count = s.restart_count.unwrap_or(0);
                    c.created_at = self.time();
                    self.observed.containers.push(c);
                    self.observed.sort();
                }
            }
            Event::InitRecordsVanish => {
                let pod = self.pod.clone();
                let app_ran = pod
                    .app_containers()
                    .any(|e| self.observed.newest(&e.spec.name).is_some_and(|c| c.state == ContainerState::Running));
                if app_ran {
                    self.observed.containers.retain(|c| {
                        c.state != ContainerState::Exited
                            || pod.container(&c.name).is_none_or(|e| e.kind != ContainerKind::Init)
                    });
                }
            }
            Event::Collect => {
                // The newest dead one of each name stays.
                let mut seen = BTreeSet::new();
                self.observed.containers.retain(|c| c.state != ContainerState::Exited || seen.insert(c.name.clone()));
            }
            Event::InitCode(code) => self.init_code = code,
            Event::Wait(secs) => self.now += secs,
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Exit(usize, i32),
    Unknown(usize),
    Liveness(usize),
    SandboxDies,
    SandboxStops,
    AgentDiesCreating(usize),
    InitRecordsVanish,
    Collect,
    InitCode(i32),
    Wait(i64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0usize..8, prop_oneof![Just(0), Just(1), Just(42), Just(88)]).prop_map(|(n, c)| Event::Exit(n, c)),
        1 => (0usize..8).prop_map(Event::Unknown),
        1 => (0usize..8).prop_map(Event::Liveness),
        1 => Just(Event::SandboxDies),
        1 => Just(Event::SandboxStops),
        2 => (0usize..8).prop_map(Event::AgentDiesCreating),
        1 => Just(Event::InitRecordsVanish),
        1 => Just(Event::Collect),
        1 => prop_oneof![Just(0), Just(1)].prop_map(Event::InitCode),
        1 => (1i64..700).prop_map(Event::Wait),
    ]
}

/// A spec: pod policy, init containers (plain or sidecar), apps (with or without a policy and rules of their own), an ephemeral container.
pub(super) fn spec() -> impl Strategy<Value = (String, usize)> {
    let policy = || prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")];
    let rules = r#","restartPolicyRules":[{"action":"Restart","exitCodes":{"operator":"In","values":[42]}}]"#;
    let all =
        r#","restartPolicyRules":[{"action":"RestartAllContainers","exitCodes":{"operator":"In","values":[88]}}]"#;
    let app = prop_oneof![
        3 => Just(String::new()),
        1 => policy().prop_map(|p| format!(r#","restartPolicy":"{p}""#)),
        1 => Just(format!(r#","restartPolicy":"Never"{rules}"#)),
        1 => Just(format!(r#","restartPolicy":"Never"{all}"#)),
    ];
    (policy(), prop::collection::vec(any::<bool>(), 0..4), prop::collection::vec(app, 1..3), any::<bool>()).prop_map(
        |(policy, init, apps, debug)| {
            let inits: Vec<String> = init
                .iter()
                .enumerate()
                .map(|(i, sidecar)| {
                    let own = if *sidecar { r#","restartPolicy":"Always""# } else { "" };
                    format!(r#"{{"name":"i{i}","image":"img"{own},"livenessProbe":{{}}}}"#)
                })
                .collect();
            let names: Vec<String> = apps
                .iter()
                .enumerate()
                .map(|(i, own)| format!(r#"{{"name":"a{i}","image":"img"{own},"livenessProbe":{{}}}}"#))
                .collect();
            let ephemeral = if debug { r#"[{"name":"d","image":"img"}]"# } else { "[]" };
            let text = format!(
                r#"{{"restartPolicy":"{policy}","initContainers":[{}],"containers":[{}],"ephemeralContainers":{ephemeral}}}"#,
                inits.join(","),
                names.join(",")
            );
            (text, init.len() + apps.len() + usize::from(debug))
        },
    )
}

proptest! {
    #![proptest_config(cases(400))]

    /// Whatever happens: never two of a name, never an app before initialisation was complete in its sandbox, never a kill without a
    /// reason; and once things are quiet, the pod settles within two rounds a container and a few more.
    #[test]
    fn a_pod_settles((spec, containers) in spec(), events in prop::collection::vec((event(), 0usize..4), 0..25)) {
        let mut fake = Fake::new(&spec);
        for (event, rounds) in &events {
            fake.happen(event);
            for _ in 0..*rounds {
                let p = fake.plan();
                fake.execute(&p);
            }
        }
        fake.init_code = 0;
        fake.settle(limit(containers));
    }

    /// In the quiet, an hour later, nothing is done.
    #[test]
    fn a_settled_pod_is_left_alone((spec, containers) in spec()) {
        let mut fake = Fake::new(&spec);
        fake.settle(limit(containers));
        fake.now += 3600;
        prop_assert!(fake.plan().is_empty());
    }
}

/// Rounds with work that a pod needs at most.
pub(super) fn limit(containers: usize) -> usize {
    2 * containers + 3
}

/// `RUBELET_PLAN_CASES` cases, for a long run; else `usual`.
pub(super) fn cases(usual: u32) -> ProptestConfig {
    let cases = std::env::var("RUBELET_PLAN_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual);
    ProptestConfig { cases, ..ProptestConfig::default() }
}
