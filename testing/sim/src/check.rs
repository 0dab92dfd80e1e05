//! What must hold at every moment, whatever the agent is put through, as a pure function of a log of facts.
//!
//! Facts are of two kinds: what is so (containers and sandboxes as the runtime has them, pods as the manifests want them) and what the agent
//! asks for, noted before it is done. Nothing is known here of how the agent decides, but for the numbers that the API promises: grace, and the
//! crash back-off (10 s doubled to 300 s, forgotten after a run of 600 s).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time since the simulation began.
pub type At = Duration;

/// How long a change of the manifests may take to reach a pod's worker.
const NOTICE: Duration = Duration::from_millis(100);
/// How soon a change of the manifests can reach it: the source waits this long for the end of a burst.
const SOONEST: Duration = Duration::from_millis(10);
/// How long after a change of its images a container may still be killed for an image that it no longer differs from.
const SECOND_THOUGHTS: Duration = Duration::from_secs(600);
/// First and longest crash back-off, and the run that forgets it.
const BACKOFF: (Duration, Duration, Duration) =
    (Duration::from_secs(10), Duration::from_secs(300), Duration::from_secs(600));
/// Around a run of 600 s it depends on milliseconds whether it is forgotten.
const BACKOFF_EDGE: Duration = Duration::from_secs(10);

/// What the manifests want of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Pod UID.
    pub uid: String,
    /// Pod name.
    pub name: String,
    /// Grace, seconds.
    pub grace: u64,
    /// restartPolicy is Always.
    pub always: bool,
    /// Probes or hooks may kill its containers.
    pub watched: bool,
    /// Init containers in order; true: a sidecar.
    pub inits: Vec<(String, bool)>,
    /// App containers.
    pub apps: Vec<String>,
    /// Image by container.
    pub images: BTreeMap<String, String>,
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// An agent starts, after the one before it was cut off.
    AgentStarts,
    /// The manifests want this pod, in this form.
    Wanted(Form),
    /// They do not want it any more.
    Unwanted {
        /// Pod UID.
        uid: String,
        /// The agent knows its form: it has a worker for it.
        known: bool,
        /// The grace that whoever asked for its end gives it; None: its own.
        grace: Option<u64>,
    },
    /// The API server holds a final phase of this pod.
    Over(String),
    /// The machine's clock was set forward or back.
    ClockJumped,
    /// A sandbox stands ready.
    SandboxReady {
        /// Its id.
        id: String,
        /// Its pod.
        uid: String,
    },
    /// A sandbox is ready no more.
    SandboxEnded(String),
    /// A sandbox is not there any more.
    SandboxGone(String),
    /// A container was created.
    Created {
        /// Its id.
        id: String,
        /// Its pod.
        uid: String,
        /// Its name.
        name: String,
        /// Its sandbox.
        sandbox: String,
        /// Its image as the manifest names it.
        image: String,
        /// Its restartCount.
        count: u32,
    },
    /// A container runs.
    Started(String),
    /// The runtime has lost sight of it.
    LostSight(String),
    /// A container ended with this code.
    Exited(String, i32),
    /// A container is not there any more.
    Gone(String),
    /// Logs of this pod are not there any more.
    LogsGone(String),
    /// The agent asks for something.
    Asked(Ask),
}

/// What the agent asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// RunPodSandbox for this pod.
    RunSandbox(String),
    /// CreateContainer in this sandbox.
    Create(String),
    /// StartContainer.
    Start(String),
    /// StopContainer with this grace.
    Stop(String, Duration),
    /// StopPodSandbox.
    StopSandbox(String),
    /// RemoveContainer.
    Remove(String),
    /// RemovePodSandbox.
    RemoveSandbox(String),
    /// Something that a running container of this pod needs is taken away: its volumes, its directory, its cgroup, its logs.
    TakeAway(String, &'static str),
    /// The object of this UID is to go from the API server.
    DeleteObject(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Created,
    Running,
    Unknown,
    Exited(i32),
}

#[derive(Clone, Debug)]
struct Container {
    uid: String,
    name: String,
    sandbox: String,
    image: String,
    count: u32,
    state: State,
    ended: Option<At>,
    /// The agent asked for its end.
    stopped: bool,
    gone: bool,
}

impl Container {
    fn live(&self) -> bool {
        !self.gone && matches!(self.state, State::Running | State::Unknown)
    }
}

#[derive(Clone, Debug)]
struct Sandbox {
    uid: String,
    ready: bool,
    gone: bool,
}

#[derive(Clone, Debug)]
struct Delay {
    image: String,
    delay: Duration,
    updated: At,
}

#[derive(Clone, Debug, Default)]
struct Pod {
    form: Option<Form>,
    /// Since when nobody wants it.
    unwanted: Option<At>,
    /// The agent had a worker for it when that began.
    known: bool,
    /// Its end has begun: a container of it was stopped while nobody wanted it.
    ending: bool,
    /// When it was first unwanted since then.
    end_began: Option<At>,
    /// Since when containers of it are being stopped, whatever for, and none was started.
    stopping: Option<At>,
    /// It was unwanted for a while, and the agent may still be ending what it had then.
    doubtful: bool,
    /// When its images last changed under the same UID.
    changed: Option<At>,
    /// The API holds a final phase of it since then.
    over: Option<At>,
    /// Highest restartCount of each container that ran.
    counts: BTreeMap<String, u32>,
    delays: BTreeMap<String, Delay>,
}

/// Judges facts one by one.
#[derive(Clone, Debug, Default)]
pub struct Checker {
    pods: BTreeMap<String, Pod>,
    containers: BTreeMap<String, Container>,
    sandboxes: BTreeMap<String, Sandbox>,
    agent_since: At,
    jumped: Option<At>,
    violations: Vec<String>,
    /// Containers that no signal ends; a sandbox may be stopped around them.
    pub unkillable: BTreeSet<String>,
}

impl Checker {
    /// What was violated so far.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Takes in one fact.
    pub fn take(&mut self, at: At, fact: Fact) {
        match fact {
            Fact::AgentStarts => {
                self.agent_since = at;
                for pod in self.pods.values_mut() {
                    // What the old one had begun or remembered died with it. An end that was cut off may have taken part of the pod away,
                    // logs among it.
                    if pod.doubtful {
                        pod.counts.clear();
                    }
                    pod.delays.clear();
                    pod.ending = false;
                    pod.doubtful = false;
                    pod.end_began = pod.unwanted;
                }
            }
            Fact::Wanted(form) => {
                let agent_since = self.agent_since;
                let pod = self.pods.entry(form.uid.clone()).or_default();
                if let Some(since) = pod.unwanted.take() {
                    pod.doubtful |= at > since.max(agent_since);
                    pod.end_began = pod.end_began.filter(|_| pod.doubtful);
                    // It starts anew, whatever of it is still there.
                    pod.delays.clear();
                }
                if pod.form.as_ref().is_some_and(|old| old.images != form.images) {
                    pod.changed = Some(at);
                }
                pod.form = Some(form);
            }
            Fact::Over(uid) => drop(self.pods.entry(uid).or_default().over.get_or_insert(at)),
            Fact::ClockJumped => {
                // Times of wall clocks and of nobody's clock do not go together any more.
                self.jumped = Some(at);
                self.pods.values_mut().for_each(|pod| pod.delays.clear());
            }
            Fact::Unwanted { uid, known, grace } => {
                let pod = self.pods.entry(uid).or_default();
                if let (Some(grace), Some(form)) = (grace, &mut pod.form) {
                    form.grace = grace.max(1);
                }
                if pod.unwanted.is_none() {
                    pod.known = known;
                }
                pod.unwanted.get_or_insert(at);
                pod.end_began.get_or_insert(at);
            }
            Fact::SandboxReady { id, uid } => {
                if let Some((rival, _)) =
                    self.sandboxes.iter().find(|(other, s)| **other != id && s.uid == uid && s.ready && !s.gone)
                {
                    self.violations.push(format!("{at:?}: sandbox {id} of pod {uid} is ready beside {rival}"));
                }
                self.sandboxes.insert(id, Sandbox { uid, ready: true, gone: false });
            }
            Fact::SandboxEnded(id) => {
                if let Some(s) = self.sandboxes.get_mut(&id) {
                    s.ready = false;
                }
                self.settle(&id);
            }
            Fact::SandboxGone(id) => {
                if let Some(s) = self.sandboxes.get_mut(&id) {
                    (s.ready, s.gone) = (false, true);
                }
                self.settle(&id);
            }
            Fact::Created { id, uid, name, sandbox, image, count } => {
                // What was only created and never ran does not count.
                let counts = &self.pods.entry(uid.clone()).or_default().counts;
                if let Some(before) = counts.get(&name).filter(|before| **before >= count) {
                    let text = format!("{at:?}: restartCount of {name} in pod {uid} went from {before} to {count}");
                    self.violations.push(text);
                }
                let fresh = Container {
                    uid,
                    name,
                    sandbox,
                    image,
                    count,
                    state: State::Created,
                    ended: None,
                    stopped: false,
                    gone: false,
                };
                self.containers.insert(id, fresh);
            }
            Fact::Started(id) => self.started(at, &id),
            Fact::LostSight(id) => self.set(&id, State::Unknown, None),
            Fact::Exited(id, code) => self.set(&id, State::Exited(code), Some(at)),
            Fact::Gone(id) => {
                if let Some(c) = self.containers.get_mut(&id) {
                    c.gone = true;
                    if let Some(pod) = self.pods.get_mut(&c.uid).filter(|p| p.doubtful || p.unwanted.is_some()) {
                        // It goes with the pod that it belonged to; what comes under this UID now is another one.
                        pod.counts.remove(&c.name);
                    }
                    let uid = c.uid.clone();
                    self.rest(&uid);
                }
            }
            Fact::LogsGone(uid) => {
                if let Some(pod) = self.pods.get_mut(&uid) {
                    pod.counts.clear();
                }
            }
            Fact::Asked(ask) => self.asked(at, &ask),
        }
    }

    /// Adds a violation that was found elsewhere.
    pub fn accuse(&mut self, at: At, what: String) {
        self.violations.push(format!("{at:?}: {what}"));
    }

    fn set(&mut self, id: &str, state: State, ended: Option<At>) {
        if let Some(c) = self.containers.get_mut(id) {
            c.state = state;
            c.ended = ended;
            let uid = c.uid.clone();
            self.rest(&uid);
        }
    }

    fn settle(&mut self, sandbox: &str) {
        if let Some(uid) = self.sandboxes.get(sandbox).map(|s| s.uid.clone()) {
            self.rest(&uid);
        }
    }

    fn live<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = (&'a String, &'a Container)> {
        self.containers.iter().filter(move |(_, c)| c.uid == uid && c.live())
    }

    fn ready<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a String> {
        self.sandboxes.iter().filter(move |(_, s)| s.uid == uid && s.ready && !s.gone).map(|(id, _)| id)
    }

    /// When nothing of a pod is alive any more, its end is over.
    fn rest(&mut self, uid: &str) {
        if self.live(uid).next().is_some() || self.ready(uid).next().is_some() {
            return;
        }
        let kept = self.containers.values().any(|c| c.uid == uid && !c.gone);
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.ending = false;
            pod.stopping = None;
            pod.end_began = pod.unwanted.filter(|_| kept);
            if !kept || pod.doubtful {
                pod.delays.clear();
            }
            pod.doubtful &= kept;
        }
    }

    fn started(&mut self, at: At, id: &str) {
        let Some(c) = self.containers.get(id).cloned() else {
            return self.accuse(at, format!("container {id} started and was never created"));
        };
        let what = format!("{} ({id}) in pod {}", c.name, c.uid);
        let rival =
            self.live(&c.uid).find(|(other, o)| *other != id && o.name == c.name).map(|(other, _)| other.clone());
        if let Some(rival) = rival {
            self.accuse(at, format!("{what} started while {rival} was running"));
        }
        let form = self.pods.get(&c.uid).and_then(|p| p.form.clone());
        match &form {
            None => self.accuse(at, format!("{what} started and nobody ever wanted that pod")),
            Some(form) => self.initialised(at, form, &c, &what),
        }
        self.backoff(at, id, &c, &what);
        let pod = self.pods.entry(c.uid).or_default();
        pod.stopping = None;
        let counts = &mut pod.counts;
        let highest = counts.entry(c.name).or_default();
        *highest = c.count.max(*highest);
        self.set(id, State::Running, None);
    }

    /// Init containers first, each after those before it, all in this sandbox.
    fn initialised(&mut self, at: At, form: &Form, c: &Container, what: &str) {
        let place = form.inits.iter().position(|(name, _)| *name == c.name);
        let before = match place {
            Some(place) => &form.inits[..place],
            None if form.apps.contains(&c.name) => &form.inits[..],
            None => return self.accuse(at, format!("{what} is not in the pod's spec")),
        };
        for (name, sidecar) in before {
            let done = self.containers.values().any(|o| {
                o.uid == c.uid
                    && o.name == *name
                    && o.sandbox == c.sandbox
                    && match o.state {
                        State::Exited(code) => *sidecar || code == 0,
                        State::Running | State::Unknown => *sidecar,
                        State::Created => false,
                    }
            });
            if !done {
                self.accuse(at, format!("{what} started before init container {name} was through in that sandbox"));
            }
        }
    }

    fn backoff(&mut self, at: At, id: &str, c: &Container, what: &str) {
        let previous = self
            .containers
            .iter()
            .filter(|(other, o)| *other != id && o.uid == c.uid && o.name == c.name && !o.gone)
            .filter_map(|(_, o)| Some((o.ended?, o.stopped)))
            .max();
        let Some((exit, stopped)) = previous else { return };
        let Some(pod) = self.pods.get_mut(&c.uid) else { return };
        let entry = pod.delays.get(&c.name).filter(|e| e.image == c.image);
        let ran = entry.map(|e| exit.saturating_sub(e.updated));
        let held = entry.filter(|_| ran.is_some_and(|ran| ran <= BACKOFF.2));
        let edge = ran.is_some_and(|ran| ran.abs_diff(BACKOFF.2) < BACKOFF_EDGE);
        let wait = held.map_or(Duration::ZERO, |e| e.delay);
        // What the agent itself stopped may start again at once: it was not its fault.
        let jumped = self.jumped.is_some_and(|jumped| exit <= jumped);
        let early = !stopped && !edge && !jumped && at < exit + wait;
        if stopped || edge {
            return;
        }
        let delay = held.map_or(BACKOFF.0, |e| (e.delay * 2).min(BACKOFF.1));
        pod.delays.insert(c.name.clone(), Delay { image: c.image.clone(), delay, updated: at });
        if early {
            self.accuse(at, format!("{what} started {:?} after its exit, its back-off is {wait:?}", at - exit));
        }
    }

    fn asked(&mut self, at: At, ask: &Ask) {
        let container = |id: &str| self.containers.get(id).cloned();
        match ask {
            Ask::RunSandbox(uid) => self.begins(at, uid, "a sandbox"),
            Ask::Create(sandbox) => {
                if let Some(uid) = self.sandboxes.get(sandbox).map(|s| s.uid.clone()) {
                    self.begins(at, &uid, "a container");
                }
            }
            Ask::Start(id) => {
                if let Some(c) = container(id) {
                    self.begins(at, &c.uid, &format!("the start of {}", c.name));
                }
            }
            Ask::Stop(id, grace) => {
                if let Some(c) = container(id).filter(Container::live) {
                    self.stopping(at, id, &c, *grace);
                }
                if let Some(c) = self.containers.get_mut(id) {
                    c.stopped = true;
                }
            }
            Ask::StopSandbox(id) => self.forced(at, &format!("StopPodSandbox {id}"), |_, c| c.sandbox == *id),
            Ask::RemoveSandbox(id) => {
                self.forced(at, &format!("RemovePodSandbox {id}"), |_, c| c.sandbox == *id);
                if self.sandboxes.get(id).is_some_and(|s| s.ready && !s.gone) {
                    self.accuse(at, format!("RemovePodSandbox {id} of a ready sandbox"));
                }
            }
            Ask::Remove(id) => self.forced(at, &format!("RemoveContainer {id}"), |other, _| other == id),
            Ask::DeleteObject(uid) => self.forced(at, &format!("deletion of the object {uid}"), |_, c| c.uid == *uid),
            Ask::TakeAway(uid, what) => self.forced(at, &format!("{what} of pod {uid}"), |_, c| c.uid == *uid),
        }
    }

    /// Something of a pod begins: only while it is wanted, and not in the middle of its end.
    fn begins(&mut self, at: At, uid: &str, what: &str) {
        let Some(pod) = self.pods.get(uid) else {
            return self.accuse(at, format!("{what} was asked for in pod {uid}, which nobody ever wanted"));
        };
        let late = pod.unwanted.is_some_and(|since| at > since.max(self.agent_since) + NOTICE);
        let (ending, since) = (pod.ending, pod.unwanted);
        let over = pod.over.filter(|over| at > *over + NOTICE);
        if over.is_some() {
            self.accuse(at, format!("{what} was asked for in pod {uid}, which is over since {over:?}"));
        } else if late {
            self.accuse(at, format!("{what} was asked for in pod {uid}, unwanted since {since:?}"));
        } else if ending {
            self.accuse(at, format!("{what} was asked for in pod {uid} while its end was under way"));
        }
    }

    fn stopping(&mut self, at: At, id: &str, c: &Container, grace: Duration) {
        let what = format!("StopContainer of {} ({id}) in pod {} with {grace:?}", c.name, c.uid);
        if grace < Duration::from_secs(2) {
            self.accuse(at, format!("{what}: at least 2 s are due"));
        }
        let serves = self.ready(&c.uid).collect::<Vec<_>>() == [&c.sandbox];
        let agent_since = self.agent_since;
        let Some(pod) = self.pods.get_mut(&c.uid) else { return };
        let Some(form) = pod.form.clone() else { return };
        let whole = Duration::from_secs(form.grace);
        let stopping = *pod.stopping.get_or_insert(at);
        let mut blame = None;
        match pod.unwanted {
            Some(since) => {
                // Sooner, the agent cannot know yet: it stops the container for another reason.
                pod.ending |= at >= since + SOONEST;
                // What only the runtime knows is nobody's: its form, and so its grace, is not known to an agent that started later.
                let orphan = !pod.known || agent_since >= since;
                // What began for another reason goes on within the grace that it began with.
                let left = whole.saturating_sub(at - pod.end_began.unwrap_or(since).min(stopping));
                // A hook that began for another reason, before it was unwanted, has used up some of it.
                if !orphan && grace < left && !form.watched {
                    blame = Some(format!("{what}: {left:?} of its grace are left"));
                }
            }
            None if !pod.doubtful => {
                // A sidecar waits for its turn within its own grace.
                let sidecar = form.inits.iter().any(|(name, sidecar)| *sidecar && *name == c.name);
                if grace < whole && !form.watched && !sidecar {
                    blame = Some(format!("{what}: its grace is {whole:?}"));
                }
                let same = form.images.get(&c.name) == Some(&c.image)
                    && pod.changed.is_none_or(|changed| at > changed + SECOND_THOUGHTS);
                if form.always && !form.watched && same && serves && c.state == State::Running {
                    blame = Some(format!("{what}, which was well and wanted"));
                }
            }
            None => {}
        }
        if let Some(text) = blame {
            self.accuse(at, text);
        }
    }

    /// Something was asked that ends containers without their grace.
    fn forced(&mut self, at: At, what: &str, which: impl Fn(&str, &Container) -> bool) {
        let hit: Vec<String> = self
            .containers
            .iter()
            .filter(|(id, c)| c.live() && which(id, c) && !self.unkillable.contains(*id))
            .map(|(id, c)| format!("{} ({id})", c.name))
            .collect();
        for container in hit {
            self.accuse(at, format!("{what} while {container} was running"));
        }
    }
}
