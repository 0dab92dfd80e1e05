//! What stays when an agent dies: the runtime, the host, the manifests, and the checker that has watched from the beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cri_api::v1::ContainerState;
use decide::config::names;
use fakes::FakeRuntime;
use model::api::ObjectReference;
use pod::events::EventSink;
use tokio::time::Instant;

use crate::check::{Ask, Checker, Fact};
use crate::host::FakeHost;
use crate::managers::Waiting;
use crate::manifests::Dir;

/// More calls than a whole node makes in one moment.
const AT_ONCE: u64 = 5000;

/// The world around the agent.
pub struct World {
    /// The runtime.
    pub runtime: FakeRuntime,
    /// The host.
    pub host: FakeHost,
    /// The manifest directory.
    pub dir: Dir,
    /// Pods whose admission waits for a plugin.
    pub waiting: Waiting,
    /// Events that the agent told.
    pub told: Told,
    began: Instant,
    judge: Mutex<Judge>,
}

#[derive(Default)]
struct Judge {
    checker: Checker,
    containers: BTreeMap<String, ContainerState>,
    sandboxes: BTreeMap<String, bool>,
    log_dirs: BTreeSet<String>,
    /// Calls that change something, so far.
    effects: u64,
    /// The agent is cut off at this one.
    cut_at: Option<u64>,
    /// Calls of the agent since the clock last moved.
    at_once: (Duration, u64),
    /// What was asked, in words, newest last.
    asked: Vec<String>,
}

/// Events that the agent told, newest last. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    /// `NAME REASON MESSAGE` of each.
    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl EventSink for Told {
    fn event(&self, about: &ObjectReference, _: &'static str, reason: &str, message: &str) {
        let name = about.name.as_deref().unwrap_or_default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{name} {reason} {message}"));
    }
}

impl World {
    /// A world in which nothing has happened.
    pub fn new(runtime: FakeRuntime, host: FakeHost) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            host,
            dir: Dir::default(),
            waiting: Waiting::default(),
            told: Told::default(),
            began: Instant::now(),
            judge: Mutex::default(),
        })
    }

    fn judge(&self) -> MutexGuard<'_, Judge> {
        self.judge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Virtual time since the beginning.
    pub fn at(&self) -> Duration {
        self.began.elapsed()
    }

    /// Tells the checker a fact.
    pub fn note(&self, fact: Fact) {
        let at = self.at();
        self.judge().checker.take(at, fact);
    }

    /// Violations so far: the checker's, and those that the runtime saw.
    pub fn violations(&self) -> Vec<String> {
        let mut all = self.judge().checker.violations().to_vec();
        all.extend(self.runtime.invariants());
        all
    }

    /// Containers that no signal ends.
    pub fn unkillable(&self, id: &str) {
        self.judge().checker.unkillable.insert(id.to_owned());
    }

    /// What the agent asked for, as lines; the newest `count`.
    pub fn asked(&self, count: usize) -> Vec<String> {
        let judge = self.judge();
        judge.asked[judge.asked.len().saturating_sub(count)..].to_vec()
    }

    /// How many calls that change something there were.
    pub fn effects(&self) -> u64 {
        self.judge().effects
    }

    /// The agent is to be cut off at the call of this number.
    pub fn cut_at(&self, effect: Option<u64>) {
        self.judge().cut_at = effect;
    }

    /// One more call of any kind; false when the agent runs in circles: then it gets no answers any more, or time would never pass.
    pub(crate) fn call(&self) -> bool {
        let at = self.at();
        let mut judge = self.judge();
        if judge.at_once.0 != at {
            judge.at_once = (at, 0);
        }
        judge.at_once.1 += 1;
        if judge.at_once.1 == AT_ONCE {
            judge.checker.accuse(at, format!("{AT_ONCE} calls without a pause"));
        }
        judge.at_once.1 < AT_ONCE
    }

    /// One more call that changes something; true when the agent is to be cut off at it.
    pub(crate) fn effect(&self, what: String) -> bool {
        let at = self.at();
        let mut judge = self.judge();
        judge.effects += 1;
        judge.asked.push(format!("{:10.3} {what}", at.as_secs_f64()));
        judge.cut_at == Some(judge.effects)
    }

    /// Notes what the agent asks for.
    pub(crate) fn ask(&self, ask: Ask) {
        self.look();
        self.note(Fact::Asked(ask));
    }

    /// Compares runtime and host with the last look and tells the checker what is new.
    pub fn look(&self) {
        let at = self.at();
        let moment = i64::try_from(self.runtime.now().as_nanosecond()).unwrap_or(i64::MAX);
        let containers = self.runtime.states();
        let sandboxes: BTreeMap<String, bool> = self.runtime.readiness().into_iter().collect();
        let log_dirs = self.host.log_dirs();
        let mut judge = self.judge();
        let judge = &mut *judge;
        let mut facts = Vec::new();

        for (id, ready) in &sandboxes {
            match (judge.sandboxes.get(id), ready) {
                (None, _) => facts.push((at, Fact::SandboxReady { id: id.clone(), uid: self.pod_of(id) })),
                (Some(true), false) => facts.push((at, Fact::SandboxEnded(id.clone()))),
                _ => {}
            }
        }
        // Ends before starts: a container may start where another one has just ended.
        let mut starts = Vec::new();
        for (id, state, started, finished) in &containers {
            let before = judge.containers.get(id).copied();
            if before == Some(*state) {
                continue;
            }
            if before.is_none() {
                facts.extend(self.created(id).map(|created| (at, created)));
            }
            let fresh = before.is_none_or(|b| b == ContainerState::ContainerCreated);
            // The log is opened before the process is: a start that fails leaves an empty one.
            if ((fresh && *started > 0) || before == Some(ContainerState::ContainerCreated))
                && let Some(status) = self.runtime.status_of(id)
            {
                self.host.log_appears(&status.log_path);
            }
            let list = if fresh && *started > 0 {
                starts.push((at, Fact::Started(id.clone())));
                &mut starts
            } else {
                &mut facts
            };
            match state {
                ContainerState::ContainerExited => {
                    // It ended when the runtime says so, which may be long before anybody looks.
                    let ago = Duration::from_nanos(u64::try_from(moment - finished).unwrap_or(0));
                    let code = self.runtime.status_of(id).map_or(0, |status| status.exit_code);
                    list.push((at.saturating_sub(ago), Fact::Exited(id.clone(), code)));
                }
                ContainerState::ContainerUnknown => list.push((at, Fact::LostSight(id.clone()))),
                _ => {}
            }
        }
        facts.extend(starts);
        let now: BTreeMap<String, ContainerState> = containers.into_iter().map(|(id, state, ..)| (id, state)).collect();
        let gone = judge.containers.keys().filter(|id| !now.contains_key(*id));
        facts.extend(gone.map(|id| (at, Fact::Gone(id.clone()))));
        let gone = judge.sandboxes.keys().filter(|id| !sandboxes.contains_key(*id));
        facts.extend(gone.map(|id| (at, Fact::SandboxGone(id.clone()))));
        let gone = judge.log_dirs.difference(&log_dirs);
        facts.extend(gone.map(|dir| (at, Fact::LogsGone(names::uid_of_log_dir(dir).to_owned()))));
        judge.log_dirs = log_dirs;
        judge.containers = now;
        judge.sandboxes = sandboxes;
        for (at, fact) in facts {
            judge.checker.take(at, fact);
        }
    }

    fn pod_of(&self, sandbox: &str) -> String {
        let metadata = self.runtime.sandbox_config(sandbox).and_then(|config| config.metadata);
        metadata.map(|m| m.uid).unwrap_or_default()
    }

    fn created(&self, id: &str) -> Option<Fact> {
        let config = self.runtime.container_config(id)?;
        let label = |key: &str| config.labels.get(key).cloned().unwrap_or_default();
        Some(Fact::Created {
            id: id.to_owned(),
            uid: label(names::POD_UID_LABEL),
            name: label(names::CONTAINER_NAME_LABEL),
            sandbox: self.runtime.sandbox_of(id).unwrap_or_default(),
            image: config.image.map(|image| image.user_specified_image).unwrap_or_default(),
            count: config.annotations.get(names::RESTART_COUNT).and_then(|n| n.parse().ok()).unwrap_or(0),
        })
    }
}
