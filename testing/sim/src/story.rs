//! Stories: what becomes of a node, as a list of items made from one number.
//!
//! A story is made before it is played, and an item says what it is about by numbers that fit whatever is there then. So items can be left out
//! and the rest still is a story: that is how one that ends badly is made short.

use std::fmt;
use std::time::Duration;

use fakes::{Fault, Process, Rule};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::api::{ApiFault, ApiRule};
use crate::host::{HostFault, HostRule};
use crate::manifests::{Container, Manifest};
use crate::node::ApiServer;

/// Manifest files that come and go.
pub const FILES: usize = 6;
/// Pods of the API that come and go.
pub const OBJECTS: usize = 5;

/// What becomes of one node.
#[derive(Clone, Debug)]
pub struct Story {
    /// Of everything random in runtime, host, API server and agent.
    pub seed: u64,
    /// The node belongs to this cluster.
    pub api: ApiServer,
    /// The runtime announces what happens.
    pub events: bool,
    /// Share of the events that are lost, that come twice, and that come after the next.
    pub unreliable: (f64, f64, f64),
    /// What happens, one after the other.
    pub items: Vec<Item>,
}

/// One thing that happens, and how long nothing else does.
#[derive(Clone, Debug)]
pub struct Item {
    /// What happens.
    pub act: Act,
    /// How long nothing else happens afterwards.
    pub then: Duration,
}

/// A pod, and what becomes of its processes.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// The pod.
    pub manifest: Manifest,
    /// What its containers' processes do, life by life.
    pub lives: Vec<(String, Vec<Process>)>,
    /// How long the pull of its first app's image takes.
    pub pull: Option<Duration>,
}

/// What happens. Numbers called `pick` choose among what is there.
#[derive(Clone, Debug)]
pub enum Act {
    /// A manifest is written.
    Write(usize, Script),
    /// One app of a manifest gets another image.
    Image(usize, usize, u32),
    /// A manifest is removed.
    Remove(usize),
    /// A manifest is taken away and put back.
    Away(usize, Duration),
    /// A file that is no pod.
    BadManifest(usize),
    /// A pod is made at the API server; one of its name is deleted by force before.
    Create(usize, Script),
    /// One app of a pod at the API server gets another image.
    ApiImage(usize, usize, u32),
    /// The deletion of a pod is asked for, with this grace.
    Delete(usize, Option<i64>),
    /// A mirror pod is deleted by somebody.
    DeleteMirror(usize),
    /// The node ends a pod of the API.
    Evict(usize),
    /// A process ends.
    Exit(usize, i32),
    /// A sandbox ends.
    EndSandbox(usize),
    /// The runtime loses sight of a container.
    LoseSight(usize),
    /// Somebody removes the dead containers.
    RemoveDead,
    /// The runtime restarts.
    RestartRuntime(Duration),
    /// The runtime goes wrong.
    Runtime(Rule),
    /// The runtime's events come late.
    LateEvents(Duration),
    /// The runtime's network is ready, or not.
    Network(bool),
    /// The host goes wrong.
    Host(HostRule),
    /// The disk is full, or not any more.
    Full(bool),
    /// A power failure tears a checkpoint; the administrator takes it away when the agent complains.
    Torn(usize),
    /// The machine's clock is set, by seconds.
    Jump(i64),
    /// The API server goes wrong.
    Api(ApiRule),
    /// No way to the API server, or there is one again.
    Reach(bool),
    /// The API server breaks its watches; true: they have expired.
    BreakWatches(bool),
    /// The API server's watches and its cache are late.
    Lag(Duration, Duration),
    /// All faults end.
    Heal,
    /// Probes fail, or do not.
    Sick(bool),
    /// The agent is cut off and comes back.
    Kill(Duration),
    /// The agent is cut off at one of its next calls, before it (true) or after it.
    Cut(u64, bool, Duration),
    /// The agent is replaced in an orderly way.
    Replace(Duration),
    /// The machine reboots: the runtime comes back, then the agent.
    Reboot(Duration, Duration),
}

impl Act {
    /// Whether there is nothing to be done without an API server.
    pub fn needs_api(&self) -> bool {
        matches!(
            self,
            Self::Create(..)
                | Self::ApiImage(..)
                | Self::Delete(..)
                | Self::DeleteMirror(_)
                | Self::Evict(_)
                | Self::Api(_)
                | Self::Reach(_)
                | Self::BreakWatches(_)
                | Self::Lag(..)
        )
    }

    /// What kind of act it is, for counting.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write(..) | Self::Image(..) | Self::Remove(_) | Self::Away(..) => "manifests",
            Self::BadManifest(_) => "bad manifests",
            Self::Create(..) | Self::ApiImage(..) | Self::Delete(..) => "pods of the API",
            Self::DeleteMirror(_) => "mirror pods deleted",
            Self::Evict(_) => "evictions",
            Self::Exit(..) => "exits",
            Self::EndSandbox(_) => "sandboxes ended",
            Self::LoseSight(_) => "containers out of sight",
            Self::RemoveDead => "removals by others",
            Self::RestartRuntime(_) => "runtime restarts",
            Self::Runtime(_) => "runtime rules",
            Self::LateEvents(_) => "late events",
            Self::Network(_) => "network",
            Self::Host(_) => "host rules",
            Self::Full(_) => "full disks",
            Self::Torn(_) => "torn checkpoints",
            Self::Jump(_) => "clock jumps",
            Self::Api(_) => "API rules",
            Self::Reach(_) => "partitions",
            Self::BreakWatches(_) => "broken watches",
            Self::Lag(..) => "late watches",
            Self::Heal => "healings",
            Self::Sick(_) => "probes",
            Self::Kill(_) => "kills",
            Self::Cut(..) => "cuts at a call",
            Self::Replace(_) => "replacements",
            Self::Reboot(..) => "reboots",
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.manifest;
        write!(f, "{} ({}, {} s of grace", m.name, m.policy, m.grace)?;
        if let Some(uid) = &m.uid {
            write!(f, ", uid {uid}")?;
        }
        f.write_str(")")?;
        for (kind, list) in [("init", &m.inits), ("app", &m.apps)] {
            for c in list {
                let kind = if c.more.get("restartPolicy").is_some() { "sidecar" } else { kind };
                write!(f, "; {kind} {}", c.name)?;
                for (key, value) in c.more.as_object().into_iter().flatten().filter(|(key, _)| *key != "restartPolicy")
                {
                    write!(f, " {key} {value}")?;
                }
                let lives = self.lives.iter().filter(|(name, _)| *name == c.name).flat_map(|(_, lives)| lives);
                for life in lives {
                    f.write_str(match (&life.start_error, life.runs_for) {
                        (Some(_), _) => " [cannot start",
                        (_, None) => " [runs",
                        _ => " [ends",
                    })?;
                    if let (None, Some(time)) = (&life.start_error, life.runs_for) {
                        write!(f, " with {} after {time:?}", life.exit_code)?;
                    }
                    write!(f, ", on TERM {:?}]", life.on_term)?;
                }
            }
        }
        if let Some(time) = self.pull {
            write!(f, "; pull takes {time:?}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(slot, script) => write!(f, "manifest {slot}: {script}"),
            Self::Create(slot, script) => write!(f, "object {slot}: {script}"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, api, events, unreliable: (lost, doubled, late), items } = self;
        writeln!(
            f,
            "seed {seed}, API server: {api:?}, events: {events}, lost: {lost}, doubled: {doubled}, late: {late}"
        )?;
        for item in items {
            writeln!(f, "  {}; then {:?}", item.act, item.then)?;
        }
        Ok(())
    }
}

impl Story {
    /// The story of this number.
    pub fn of(seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let one = |random: &mut SmallRng, list: &[f64]| *list.choose(random).unwrap_or(&0.0);
        let events = random.random_bool(0.8);
        let unreliable =
            (one(&mut random, &[0.0, 0.0, 0.1, 1.0]), one(&mut random, &[0.0, 0.3]), one(&mut random, &[0.0, 0.3]));
        let api =
            [ApiServer::None, ApiServer::Paged, ApiServer::Streamed, ApiServer::Streamed][random.random_range(0..4)];
        let mut maker = Maker { random, api: api != ApiServer::None, versions: 0 };
        let mut items = Vec::new();
        for _ in 0..maker.random.random_range(1..4) {
            items.push(Item { act: maker.pod(), then: Duration::ZERO });
        }
        for _ in 0..maker.random.random_range(10..40) {
            let act = maker.act();
            items.push(Item { act, then: maker.time() });
        }
        Self { seed, api, events, unreliable, items }
    }
}

/// Makes items.
struct Maker {
    random: SmallRng,
    api: bool,
    versions: u32,
}

impl Maker {
    fn one_in(&mut self, n: u32) -> bool {
        self.random.random_ratio(1, n)
    }

    fn below(&mut self, n: usize) -> usize {
        self.random.random_range(0..n)
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.random.random_range(0..list.len())]
    }

    /// From a millisecond to a few minutes; mostly seconds.
    fn time(&mut self) -> Duration {
        let exponent = self.random.random_range(-3.0..2.2);
        let seconds: f64 = 10f64.powf(exponent);
        Duration::from_millis((seconds * 1e3) as u64).max(Duration::from_millis(1))
    }

    fn time_below(&mut self, seconds: u64) -> Duration {
        self.time().min(Duration::from_secs(seconds))
    }

    fn act(&mut self) -> Act {
        let pick = self.random.random_range(0..1000);
        let kinds = if self.api { 50 } else { 36 };
        match self.random.random_range(0..kinds) {
            0..4 => self.pod(),
            4..6 => Act::Remove(self.below(FILES)),
            6..8 => Act::Away(self.below(FILES), self.time_below(10)),
            8..11 => Act::Exit(pick, self.of(&[0, 1, 137])),
            11 => Act::EndSandbox(pick),
            12 => Act::LoseSight(pick),
            13 => Act::RemoveDead,
            14 => Act::RestartRuntime(self.time_below(60)),
            15..19 => Act::Runtime(self.runtime_rule()),
            19..21 => Act::Host(self.host_rule()),
            21 => Act::Heal,
            22 => Act::Kill(self.time()),
            23..25 => Act::Cut(self.random.random_range(1..12), self.one_in(2), self.time()),
            25 => Act::Network(self.one_in(2)),
            26 => Act::Reboot(self.time(), self.time()),
            27 => Act::Sick(self.one_in(2)),
            28 => Act::BadManifest(self.below(4)),
            29 => Act::Replace(self.time()),
            30 => Act::LateEvents(self.time_below(20)),
            31..33 => Act::Full(self.one_in(2)),
            33 => Act::Torn(self.below(2)),
            34 => Act::Jump(self.of(&[-3600, -60, -1, 1, 60, 3600])),
            35 => self.image(),
            36..39 => self.pod(),
            39..42 => Act::Delete(self.below(OBJECTS), self.of(&[None, None, None, Some(0), Some(1), Some(60)])),
            42 => Act::DeleteMirror(pick),
            43 => Act::Evict(pick),
            44..46 => Act::Api(self.api_rule()),
            46 => Act::Reach(self.one_in(2)),
            47 => Act::BreakWatches(self.one_in(2)),
            48 => Act::Lag(self.time_below(30), self.time_below(30)),
            _ => self.image(),
        }
    }

    /// A new pod, or a change of one that is there.
    fn pod(&mut self) -> Act {
        if self.one_in(3) {
            return self.image();
        }
        if self.api && self.one_in(2) {
            let slot = self.below(OBJECTS);
            return Act::Create(slot, self.script(&format!("q{slot}")));
        }
        let slot = self.below(FILES);
        // Two files may name the same pod.
        let name = format!("p{}", if self.one_in(8) { 0 } else { slot });
        let mut script = self.script(&name);
        if self.one_in(2) {
            // One and the same UID stands for one and the same set of containers.
            self.versions += 1;
            script.manifest.uid = Some(format!("fixed-{slot}-{}", self.versions));
        }
        Act::Write(slot, script)
    }

    fn image(&mut self) -> Act {
        self.versions += 1;
        let (app, version) = (self.below(2), self.versions);
        if self.api && self.one_in(2) {
            Act::ApiImage(self.below(OBJECTS), app, version)
        } else {
            Act::Image(self.below(FILES), app, version)
        }
    }

    fn script(&mut self, name: &str) -> Script {
        let policy = self.of(&["Always", "Always", "Always", "OnFailure", "Never"]);
        let grace = self.of(&[0, 1, 2, 5, 30]);
        let mut manifest = Manifest::new(name).policy(policy).grace(grace);
        manifest.host_network = self.one_in(6);
        for n in 0..self.below(3) {
            manifest =
                if self.one_in(2) { manifest.init(&format!("i{n}")) } else { manifest.sidecar(&format!("i{n}")) };
        }
        let apps = 1 + self.below(2);
        manifest = manifest.apps((0..apps).map(|n| Container::new(&format!("a{n}"))));
        for app in 0..apps {
            if let Some((field, value)) = self.extra() {
                // A hook may not sleep longer than the grace.
                manifest.grace = if field == "lifecycle" { manifest.grace.max(8) } else { manifest.grace };
                manifest.apps[app].more[field] = value;
            }
        }
        let runs_on = |c: &Container| c.more.get("restartPolicy").is_some() || manifest.apps.contains(c);
        let all: Vec<(String, bool)> =
            manifest.inits.iter().chain(&manifest.apps).map(|c| (c.name.clone(), runs_on(c))).collect();
        let lives = all.into_iter().map(|(name, runs_on)| (name, self.lives(runs_on))).collect();
        let pull = self.one_in(4).then(|| self.time_below(30));
        Script { manifest, lives, pull }
    }

    /// A hook or a probe, now and then.
    fn extra(&mut self) -> Option<(&'static str, Value)> {
        let seconds = self.random.random_range(1..8);
        let exec = |what: &str| json!({ "exec": { "command": [what] } });
        Some(match self.below(20) {
            0 => ("lifecycle", json!({ "preStop": { "sleep": { "seconds": seconds } } })),
            1 => ("lifecycle", json!({ "preStop": exec("fail"), "postStart": { "sleep": { "seconds": seconds } } })),
            2 => ("lifecycle", json!({ "postStart": exec("well") })),
            3 => ("livenessProbe", json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds })),
            4 => (
                "startupProbe",
                json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds, "failureThreshold": 2 }),
            ),
            5 => ("readinessProbe", json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds })),
            _ => return None,
        })
    }

    /// What a container's processes do, life by life.
    fn lives(&mut self, runs_on: bool) -> Vec<Process> {
        (0..1 + self.below(3))
            .map(|_| {
                let code = self.of(&[0, 0, 1]);
                let after = self.time();
                let life = match self.below(10) {
                    0 => Process::broken("exec: \"app\": executable file not found in $PATH"),
                    1..4 => Process::exits(code, after),
                    _ if runs_on => Process::forever(),
                    _ => Process::exits(code, after.min(Duration::from_secs(3))),
                };
                match self.below(5) {
                    0 => life.ignoring_term(),
                    1 => life.trapping_term(0, after),
                    _ => life,
                }
            })
            .collect()
    }

    fn runtime_rule(&mut self) -> Rule {
        const CALLS: [&str; 14] = [
            "RunPodSandbox",
            "StopPodSandbox",
            "RemovePodSandbox",
            "CreateContainer",
            "StartContainer",
            "StopContainer",
            "RemoveContainer",
            "PullImage",
            "ImageStatus",
            "ListPodSandbox",
            "ListContainers",
            "ContainerStatus",
            "PodSandboxStatus",
            "*",
        ];
        let call = self.of(&CALLS);
        let fault = match self.below(10) {
            0..2 => Fault::Fail(2, "transport is closing".into()),
            // Of a container that is there, no runtime says that it is not; of what a new one needs it may.
            2 if matches!(
                call,
                "RunPodSandbox" | "CreateContainer" | "StartContainer" | "PullImage" | "ImageStatus"
            ) =>
            {
                Fault::Fail(5, "not found".into())
            }
            2 => Fault::Fail(4, "context deadline exceeded".into()),
            3..5 => Fault::LoseAnswer,
            5 => Fault::Delay(self.time_below(20)),
            6 => Fault::Hang,
            7 => Fault::DoAndHang,
            _ => Fault::LateAnswer(self.time_below(20)),
        };
        let rule = Rule::new(call, fault);
        match self.below(3) {
            0 => rule.times(1),
            1 => rule.times(4),
            _ => rule.chance(0.3).times(20),
        }
    }

    fn host_rule(&mut self) -> HostRule {
        const CALLS: [&str; 18] = [
            "ensure_cgroup",
            "update_cgroup",
            "cgroup_settings",
            "remove_pod_cgroup",
            "make_pod_dirs",
            "mount_volumes",
            "remove_pod_dir",
            "unmount_volumes",
            "prepare_container",
            "remove_container_log",
            "remove_pod_logs",
            "log_dir",
            "write_atomic",
            "read_file",
            "remove_file",
            "list_pod_dirs",
            "list_pod_cgroups",
            "prune_logs",
        ];
        let call = self.of(&CALLS);
        let fault = match self.below(4) {
            0 => HostFault::DoAndFail,
            // The dispatcher waits for these, and notices nothing meanwhile.
            1 if !matches!(
                call,
                "write_atomic" | "list_pod_dirs" | "list_pod_cgroups" | "prune_logs" | "remove_file"
            ) =>
            {
                HostFault::Delay(self.time_below(20))
            }
            _ => HostFault::Fail,
        };
        HostRule::new(call, fault).times(self.random.random_range(1..6))
    }

    fn api_rule(&mut self) -> ApiRule {
        let call = self.of(&["patch", "patch", "delete", "create", "list", "watch", "*"]);
        let fault = match self.below(8) {
            0..3 => ApiFault::Refuse(self.of(&[409, 429, 500, 503, 403, 404])),
            3 => ApiFault::Unreachable,
            4..6 => ApiFault::LoseAnswer,
            6 => ApiFault::Delay(self.time_below(20)),
            _ => ApiFault::LateAnswer(self.time_below(20)),
        };
        // A list or a watch that is answered 404 is of a server without pods.
        let fault = if matches!(fault, ApiFault::Refuse(404)) && !matches!(call, "patch" | "delete") {
            ApiFault::Refuse(503)
        } else {
            fault
        };
        ApiRule { call, fault, times: self.random.random_range(1..6) }
    }
}
