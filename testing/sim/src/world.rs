//! What stays when an agent dies: the runtime, the host, the manifests, and the checker that has watched from the beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cri_api::v1::ContainerState;
use decide::config::names;
use fakes::FakeRuntime;
use model::api::{ObjectReference, Pod};
use model::pod::{ContainerKind, DesiredPod, PodSource};
use pod::events::EventSink;
use pod::status::Mirror;
use tokio::time::Instant;

use crate::api::{FakeApi, is_over, uid_of};
use crate::bugs::{Bug, Planted};
use crate::check::{Ask, Checker, Fact, Form};
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
    /// The API server, if the node has one.
    pub api: Option<FakeApi>,
    /// The bug that is planted.
    pub(crate) bug: Option<Bug>,
    planted: Mutex<Planted>,
    events_late: Mutex<Duration>,
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
    /// The agent is cut off at this one; true: before it.
    cut_at: Option<(u64, bool)>,
    /// Calls of the agent since the clock last moved.
    at_once: (Duration, u64),
    /// What happened, in words, newest last.
    story: Vec<String>,
    /// Calls that only look are told too.
    verbose: bool,
    /// Facts that were judged.
    checks: u64,
    /// Pods of a list of the API that is not complete yet.
    listing: Vec<Pod>,
    /// Pods of the API that this agent was told of.
    told: BTreeSet<String>,
    /// Pods that the node has ended for good, whatever the API shows of them.
    ended: BTreeSet<String>,
    /// Pods of the API by UID: what they are to be.
    forms: BTreeMap<String, Form>,
}

/// Whether the agent is cut off at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// It goes on.
    No,
    /// The call is not made any more.
    Before,
    /// The call is the last.
    After,
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
    pub fn new(runtime: FakeRuntime, host: FakeHost, api: Option<FakeApi>, bug: Option<Bug>) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            host,
            api,
            bug,
            planted: Mutex::new(Planted::new(bug)),
            events_late: Mutex::default(),
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
        let mut judge = self.judge();
        if fact == Fact::AgentStarts {
            judge.told.clear();
        }
        judge.checks += 1;
        judge.checker.take(at, fact);
    }

    /// Adds a violation that was found elsewhere.
    pub(crate) fn accuse(&self, what: String) {
        let at = self.at();
        self.judge().checker.accuse(at, what);
    }

    pub(crate) fn planted(&self) -> MutexGuard<'_, Planted> {
        self.planted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runtime's events come this late from now on.
    pub fn delay_events(&self, late: Duration) {
        *self.events_late.lock().unwrap_or_else(PoisonError::into_inner) = late;
    }

    pub(crate) fn events_late(&self) -> Duration {
        *self.events_late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- What the agent learns of the API's pods

    /// A page of a list, or all of one.
    pub(crate) fn listing(&self, first: bool, pods: &[Pod], last: bool) {
        let whole = {
            let mut judge = self.judge();
            if first {
                judge.listing.clear();
            }
            judge.listing.extend(pods.iter().cloned());
            if !last {
                return;
            }
            std::mem::take(&mut judge.listing)
        };
        let uids: BTreeSet<String> = whole.iter().map(uid_of).collect();
        let absent: Vec<String> = self.judge().forms.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        self.tell(format!("the agent learns of {} pods", whole.len()));
        whole.iter().for_each(|pod| self.told_of(pod, false));
        for uid in absent {
            let known = self.judge().told.contains(&uid);
            self.note(Fact::Unwanted { uid, known, grace: None });
        }
    }

    /// One pod as the API shows it to the agent, or its removal.
    pub(crate) fn told_of(&self, pod: &Pod, gone: bool) {
        let Some(form) = DesiredPod::new(pod.clone(), PodSource::Api).ok().filter(|_| Mirror::of(pod).is_none()) else {
            return;
        };
        let (uid, form) = (uid_of(pod), form_of(&form));
        let known = !self.judge().told.insert(uid.clone());
        self.judge().forms.insert(uid.clone(), form.clone());
        if gone || pod.metadata.deletion_timestamp.is_some() {
            let grace = pod.metadata.deletion_grace_period_seconds.and_then(|g| u64::try_from(g).ok());
            self.tell(format!(
                "the agent learns that {uid} is to end{}",
                if gone { ", and its object gone" } else { "" }
            ));
            self.note(Fact::Unwanted { uid, known, grace });
        } else if !self.judge().ended.contains(&uid) {
            self.note(Fact::Wanted(form));
        }
        self.phases();
    }

    /// The node ends this pod for good, or an agent has forgotten that.
    pub(crate) fn ends(&self, uid: &str, ends: bool) {
        let mut judge = self.judge();
        if ends {
            judge.ended.insert(uid.to_owned());
        } else {
            judge.ended.remove(uid);
        }
    }

    /// Tells the checker which pods are over by what the API holds.
    pub(crate) fn phases(&self) {
        for pod in self.api.iter().flat_map(FakeApi::pods) {
            if is_over(&pod) {
                self.note(Fact::Over(uid_of(&pod)));
            }
        }
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

    /// What happened, as lines; the newest `count`.
    pub fn asked(&self, count: usize) -> Vec<String> {
        let judge = self.judge();
        judge.story[judge.story.len().saturating_sub(count)..].to_vec()
    }

    /// One more line of what happened.
    pub fn tell(&self, what: impl AsRef<str>) {
        let at = self.at().as_secs_f64();
        self.judge().story.push(format!("{at:10.3} {}", what.as_ref()));
    }

    /// From now on calls that only look are told too.
    pub fn verbose(&self) {
        self.judge().verbose = true;
    }

    pub(crate) fn looks(&self, what: &str) {
        if self.judge().verbose {
            self.tell(what);
        }
    }

    /// How many facts were judged.
    pub fn checks(&self) -> u64 {
        self.judge().checks
    }

    /// How many calls that change something there were.
    pub fn effects(&self) -> u64 {
        self.judge().effects
    }

    /// The agent is to be cut off at the call of this number, which is still made.
    pub fn cut_at(&self, effect: Option<u64>) {
        self.judge().cut_at = effect.map(|n| (n, false));
    }

    /// The agent is to be cut off just before the call of this number.
    pub fn cut_before(&self, effect: u64) {
        self.judge().cut_at = Some((effect, true));
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

    /// One more call that changes something, and whether the agent is to be cut off at it.
    pub(crate) fn effect(&self, what: &str) -> Cut {
        self.tell(what);
        let mut judge = self.judge();
        judge.effects += 1;
        match judge.cut_at {
            Some((at, true)) if at == judge.effects => Cut::Before,
            Some((at, false)) if at == judge.effects => Cut::After,
            _ => Cut::No,
        }
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
            judge.checks += 1;
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

/// What is wanted of a pod.
pub(crate) fn form_of(pod: &DesiredPod) -> Form {
    let images = |c: model::pod::ContainerEntry<'_>| (c.spec.name.clone(), c.spec.image.clone().unwrap_or_default());
    let watched = pod.containers().any(|c| {
        let restarts = c.spec.resize_policy.iter().flatten().any(|p| p.restart_policy == "RestartContainer");
        restarts || c.spec.lifecycle.is_some() || c.spec.liveness_probe.is_some() || c.spec.startup_probe.is_some()
    });
    Form {
        uid: pod.uid().to_string(),
        name: pod.name().to_owned(),
        grace: u64::try_from(pod.spec().termination_grace_period_seconds.unwrap_or(30)).unwrap_or(0).max(1),
        always: pod.spec().restart_policy.as_deref() == Some("Always"),
        watched,
        inits: pod.init_containers().map(|c| (c.spec.name.clone(), c.kind == ContainerKind::Sidecar)).collect(),
        apps: pod.app_containers().map(|c| c.spec.name.clone()).collect(),
        images: pod.containers().map(images).collect(),
    }
}
