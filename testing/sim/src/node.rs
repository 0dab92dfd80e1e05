//! The node: builds an agent out of the real rooms, lets time pass, cuts the agent off, starts the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cri_api::v1::{self, ContainerState};
use decide::gc::ContainerGcPolicy;
use decide::userns::{IDS_PER_POD, IdPool, Ranges};
use decide::{admission, config, resources};
use fakes::{FakeRuntime, For, Process};
use model::api::PodStatus;
use model::pod::{ContainerKind, DesiredPod, PodSource};
use model::quantity::Quantity;
use pod::desired::Dispatcher;
use pod::events::Events;
use pod::images::{Images, PullLimits};
use pod::pleg::Health;
use pod::ports::{Clock, PodHost, Random, Tasks};
use pod::prober::Prober;
use pod::registry::{PodEntry, Registry};
use pod::settings::Settings;
use pod::source::{self, StaticContext};
use pod::status::{Mirrors, StatusQueue};
use pod::userns::UserNamespaces;
use pod::worker::PodDeps;
use telemetry::LogLimiter;
use telemetry::metrics::Metrics;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::check::{Fact, Form};
use crate::host::{FakeHost, POD_LOGS, ROOT};
use crate::manifests::{Dir, Manifest};
use crate::ports::{Ports, short};
use crate::world::World;

/// The node's name; pods' names end with it.
pub const NODE: &str = "sim";

/// What a node is made from.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Of everything random.
    pub seed: u64,
    /// The runtime's nature.
    pub runtime: fakes::Settings,
}

/// A simulated node.
pub struct Node {
    world: Arc<World>,
    setup: Setup,
    clock: Clock,
    agent: Option<Agent>,
    agents: u64,
    /// When the agent that was cut off is followed by the next one.
    comes_back_after: Duration,
    /// What the manifests give, by file.
    parsed: Vec<(PathBuf, DesiredPod)>,
    wanted: BTreeSet<String>,
}

struct Agent {
    tasks: Tasks,
    cut: CancellationToken,
    registry: Arc<Registry>,
    health: watch::Receiver<Health>,
}

impl Node {
    /// An empty node with an agent on it.
    pub async fn new(seed: u64) -> Self {
        Self::with(Setup { seed, ..Setup::default() }).await
    }

    /// A node of this kind.
    pub async fn with(setup: Setup) -> Self {
        let mut node = Self::without_agent(setup);
        node.start().await;
        node
    }

    /// A node of this kind on which no agent runs yet.
    pub fn without_agent(setup: Setup) -> Self {
        crate::begin_log();
        let runtime = FakeRuntime::with_settings(setup.seed, setup.runtime.clone());
        let world = World::new(runtime, FakeHost::new(setup.seed));
        let clock = Clock::virtual_from(setup.runtime.epoch);
        let comes_back_after = Duration::from_secs(1);
        Self {
            world,
            setup,
            clock,
            agent: None,
            agents: 0,
            comes_back_after,
            parsed: Vec::new(),
            wanted: BTreeSet::new(),
        }
    }

    /// The runtime.
    pub fn runtime(&self) -> &FakeRuntime {
        &self.world.runtime
    }

    /// The host.
    pub fn host(&self) -> &FakeHost {
        &self.world.host
    }

    /// What stays when the agent dies.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The agent's clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    // ---- The agent

    /// Starts an agent, unless one runs.
    pub async fn start(&mut self) {
        if self.agent.is_some() {
            return;
        }
        self.world.look();
        self.world.note(Fact::AgentStarts);
        self.agents += 1;
        match assemble(&self.world, &self.clock, self.setup.seed.wrapping_add(self.agents << 32)).await {
            Some(agent) => self.agent = Some(agent),
            None => tracing::info!("The agent was cut off during its start"),
        }
    }

    /// Cuts the agent off, as by `kill -9`.
    pub fn kill(&mut self) {
        if let Some(agent) = self.agent.take() {
            agent.cut.cancel();
            // Nothing that it does from here on reaches anything; this ends its timers.
            agent.tasks.stop().cancel();
        }
    }

    /// Cuts the agent off and starts the next one this much later.
    pub async fn restart(&mut self, down_for: Duration) {
        self.kill();
        self.run(down_for).await;
        self.start().await;
    }

    /// When the agent is cut off at a call (see [`World::cut_at`]), the next one starts this much later.
    pub fn comes_back_after(&mut self, down_for: Duration) {
        self.comes_back_after = down_for;
    }

    /// Ends the agent in an orderly way; false when it did not end in time.
    pub async fn drain(&mut self, deadline: Duration) -> bool {
        match self.agent.take() {
            Some(agent) => {
                let ended = agent.tasks.drain(deadline).await;
                agent.cut.cancel();
                ended
            }
            None => true,
        }
    }

    /// Lets time pass. An agent that is cut off meanwhile is followed by the next one.
    pub async fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            let cut = self.agent.as_ref().map(|agent| agent.cut.clone());
            let over = match &cut {
                Some(cut) => tokio::select! {
                    biased;
                    () = cut.cancelled() => false,
                    () = tokio::time::sleep_until(end) => true,
                },
                None => {
                    tokio::time::sleep_until(end).await;
                    true
                }
            };
            self.world.look();
            if over {
                return;
            }
            self.kill();
            self.world.cut_at(None);
            tokio::time::sleep(self.comes_back_after).await;
            self.start().await;
        }
    }

    /// Lets time pass until this is so, at most this long; whether it came to be so.
    pub async fn until(&mut self, limit: Duration, mut so: impl FnMut(&Self) -> bool) -> bool {
        let end = Instant::now() + limit;
        while !so(self) {
            if Instant::now() >= end {
                return false;
            }
            self.run(Duration::from_millis(50)).await;
        }
        true
    }

    // ---- Manifests

    /// Puts a manifest into the directory.
    pub fn write(&mut self, file: &str, manifest: &Manifest) {
        self.write_bytes(file, manifest.text().into_bytes());
    }

    /// Puts any bytes into the directory. For the checker, a file that is bad wants nothing.
    pub fn write_bytes(&mut self, file: &str, bytes: Vec<u8>) {
        self.world.dir.write(file, bytes);
        self.tell();
    }

    /// Takes a file away.
    pub fn remove(&mut self, file: &str) {
        self.world.dir.remove(file);
        self.tell();
    }

    /// The pod that a file gives, if it is good.
    pub fn parsed(&self, file: &str) -> Option<DesiredPod> {
        self.parsed.iter().find(|(path, _)| *path == Dir::path(file)).map(|(_, pod)| pod.clone())
    }

    /// UID of the pod that a file gives.
    ///
    /// # Panics
    /// The file gives none.
    pub fn uid(&self, file: &str) -> String {
        match self.parsed(file) {
            Some(pod) => pod.uid().to_string(),
            None => panic!("{file} gives no pod"),
        }
    }

    fn parse(&self) -> Vec<(PathBuf, DesiredPod)> {
        let load = |(path, bytes): (PathBuf, Vec<u8>)| {
            let origin = manifest::Origin::File(path.display().to_string());
            let pods = manifest::load(&bytes, &origin, NODE, self.clock.now(), &manifest::Gates::default()).ok()?;
            let pod = pods.into_iter().next()?.ok()?;
            Some((path, pod))
        };
        self.world.dir.files().into_iter().filter_map(load).collect()
    }

    /// The pods that the manifests want: of several with one name, the last.
    pub fn wanted(&self) -> Vec<DesiredPod> {
        let last: BTreeMap<String, &DesiredPod> = self.parsed.iter().map(|(_, pod)| (pod.full_name(), pod)).collect();
        last.into_values().cloned().collect()
    }

    /// Tells the checker what is wanted now.
    fn tell(&mut self) {
        self.world.look();
        self.parsed = self.parse();
        let wanted = self.wanted();
        let uids: BTreeSet<String> = wanted.iter().map(|pod| pod.uid().to_string()).collect();
        for uid in self.wanted.difference(&uids) {
            let known = self.entries().iter().any(|e| e.uid.as_str() == uid && e.view().desired.is_some());
            self.world.note(Fact::Unwanted { uid: uid.clone(), known });
        }
        for pod in &wanted {
            self.world.note(Fact::Wanted(form(pod)));
        }
        self.wanted = uids;
    }

    // ---- What can be seen

    /// The agent's table.
    pub fn entries(&self) -> Vec<Arc<PodEntry>> {
        self.agent.as_ref().map(|agent| agent.registry.all()).unwrap_or_default()
    }

    /// What the agent shows to people: its table, and pods that are still to be admitted.
    pub fn shown(&self) -> Vec<Arc<PodEntry>> {
        self.agent.as_ref().map(|agent| agent.registry.shown()).unwrap_or_default()
    }

    /// What the agent shows of a pod.
    pub fn status(&self, uid: &str) -> PodStatus {
        let entries = self.entries();
        entries.iter().find(|e| e.uid.as_str() == uid).map(|e| e.view().status.clone()).unwrap_or_default()
    }

    /// The phase that the agent shows; empty when it shows none.
    pub fn phase(&self, uid: &str) -> String {
        self.status(uid).phase.unwrap_or_default()
    }

    /// What the agent knows of the runtime's health.
    pub fn health(&self) -> Health {
        self.agent.as_ref().map(|agent| agent.health.borrow().clone()).unwrap_or_default()
    }

    /// The message of the node's Ready condition; None: ready.
    pub fn not_ready(&self) -> Option<String> {
        decide::pleg::ready_message(&self.health().facts(), &[], self.clock.now())
    }

    /// Containers of a pod as the runtime has them, oldest first.
    pub fn containers(&self, uid: &str) -> Vec<v1::ContainerStatus> {
        let of = |c: &v1::ContainerStatus| c.labels.get(config::names::POD_UID_LABEL).is_some_and(|u| u == uid);
        self.runtime().containers().into_iter().filter(of).collect()
    }

    /// Whether a sandbox of the pod is ready; None when it has none.
    fn sandboxes_of(&self, uid: &str) -> Option<bool> {
        let all = self.runtime().sandboxes();
        let of = |s: &&v1::PodSandboxStatus| s.metadata.as_ref().is_some_and(|m| m.uid == uid);
        all.iter().filter(of).map(|s| s.state() == v1::PodSandboxState::SandboxReady).reduce(|a, b| a || b)
    }

    /// Names of a pod's containers that run.
    pub fn running(&self, uid: &str) -> Vec<String> {
        let running = self.containers(uid).into_iter().filter(|c| c.state() == ContainerState::ContainerRunning);
        running.map(|c| c.metadata.unwrap_or_default().name).collect()
    }

    /// Whether every container of the pod that is to run all the time runs.
    pub fn all_run(&self, uid: &str) -> bool {
        let running = self.running(uid);
        self.wanted().iter().find(|pod| pod.uid().as_str() == uid).is_some_and(|pod| {
            let lasting = pod.containers().filter(|c| c.kind != ContainerKind::Init);
            lasting.map(|c| &c.spec.name).all(|name| running.contains(name))
        })
    }

    /// Whether nothing of a pod is left anywhere.
    pub fn is_gone(&self, uid: &str) -> bool {
        self.leftovers(|other| other == uid).is_empty()
    }

    /// What is left, in runtime, host and table, of pods whose UID is such.
    pub fn leftovers(&self, such: impl Fn(&str) -> bool) -> Vec<String> {
        let mut left = Vec::new();
        let mut add = |what: &str, uid: &str| {
            if such(uid) {
                left.push(format!("{what} of {uid}"));
            }
        };
        for c in self.runtime().containers() {
            add("container", c.labels.get(config::names::POD_UID_LABEL).map(String::as_str).unwrap_or_default());
        }
        for s in self.runtime().sandboxes() {
            add("sandbox", s.metadata.as_ref().map(|m| m.uid.as_str()).unwrap_or_default());
        }
        let standing = self.host().standing();
        standing.cgroups.keys().for_each(|uid| add("cgroup", uid.as_str()));
        standing.dirs.iter().for_each(|uid| add("directory", uid.as_str()));
        standing.mounts.iter().for_each(|(uid, _)| add("mount", uid.as_str()));
        standing.log_dirs.iter().for_each(|dir| add("log directory", config::names::uid_of_log_dir(dir)));
        for log in standing.links.values() {
            let dir = log.trim_start_matches(POD_LOGS).trim_start_matches('/').split('/').next().unwrap_or_default();
            add("log link", config::names::uid_of_log_dir(dir));
        }
        for uid in self.allocated() {
            add("allocation", &uid);
        }
        self.entries().iter().for_each(|e| add("entry", e.uid.as_str()));
        left
    }

    /// UIDs in the checkpoint of allocations.
    fn allocated(&self) -> Vec<String> {
        self.checkpoint(pod::admit::ALLOCATED).into_keys().collect()
    }

    /// A checkpoint of resources, by its file name.
    pub fn checkpoint(&self, name: &str) -> manifest::checkpoint::Allocations {
        let standing = self.host().standing();
        let bytes = standing.files.get(&PathBuf::from(ROOT).join(name));
        bytes.and_then(|bytes| manifest::checkpoint::decode_allocations(bytes).ok()).unwrap_or_default()
    }

    // ---- Judgement

    /// # Panics
    /// Something was violated.
    pub fn assert_sound(&self) {
        self.world.look();
        let violations = self.world.violations();
        assert!(violations.is_empty(), "{}\n{}", violations.join("\n"), self.world.asked(120).join("\n"));
    }

    /// Makes everything well: no more faults, and processes that end do so no more, but for those of pods that are to run to their end.
    pub fn heal(&self) {
        self.runtime().heal();
        self.runtime().come_up();
        self.host().heal();
        self.runtime().configure(|s| {
            s.status = fakes::Settings::default().status;
            (s.lost_events, s.doubled_events, s.late_events) = (0.0, 0.0, 0.0);
        });
        for pod in self.wanted() {
            for c in pod.containers() {
                let runs_on = c.kind == ContainerKind::Sidecar
                    || (c.kind == ContainerKind::App && pod.spec().restart_policy.as_deref() == Some("Always"));
                let life = if runs_on { Process::forever() } else { Process::exits(0, Duration::from_secs(1)) };
                self.runtime().script(For::PodContainer(pod.name().to_owned(), c.spec.name.clone()), [life]);
                for running in self.containers(pod.uid().as_str()).iter().filter(|_| !runs_on) {
                    if running.metadata.as_ref().is_some_and(|m| m.name == c.spec.name) {
                        self.runtime().exit(&running.id, 0);
                    }
                }
            }
        }
    }

    /// What is still to come before the node is as its manifests want it; empty when it is.
    pub fn missing(&self) -> Vec<String> {
        let wanted = self.wanted();
        let mut missing = self.leftovers(|uid| !wanted.iter().any(|pod| pod.uid().as_str() == uid));
        for pod in &wanted {
            let uid = pod.uid().as_str();
            let phase = self.phase(uid);
            let mut running = self.running(uid);
            running.sort();
            let always = pod.spec().restart_policy.as_deref() == Some("Always");
            if !always && matches!(phase.as_str(), "Succeeded" | "Failed") {
                if !running.is_empty() {
                    missing.push(format!("{} is {phase} and runs {running:?}", pod.name()));
                }
                continue;
            }
            // A pod that is never to restart and lost its sandbox before all of its apps had run, or lost the record that they had, gets no other
            // sandbox and stays Pending, as with Go.
            let lost = self.sandboxes_of(uid).is_some_and(|ready| !ready) && !self.containers(uid).is_empty();
            if pod.spec().restart_policy.as_deref() == Some("Never") && phase == "Pending" && running.is_empty() && lost
            {
                continue;
            }
            let mut due: Vec<String> = pod
                .containers()
                .filter(|c| c.kind == ContainerKind::Sidecar || (always && c.kind == ContainerKind::App))
                .map(|c| c.spec.name.clone())
                .collect();
            due.sort();
            if !always || running != due || phase != "Running" {
                missing.push(format!("{} is {phase:?} and runs {running:?} of {due:?}", pod.name()));
            }
        }
        missing
    }

    /// Lets time pass until the node is as its manifests want it, then makes sure that the agent is at rest.
    ///
    /// # Panics
    /// It does not come to that within the limit, or something was violated.
    pub async fn settle(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            self.assert_sound();
            let missing = self.missing();
            if missing.is_empty() {
                break;
            }
            assert!(
                Instant::now() < end,
                "not settled within {limit:?}:\n{}\n{}\n{}",
                missing.join("\n"),
                self.inventory(),
                self.world.asked(120).join("\n")
            );
            self.run(Duration::from_secs(2)).await;
        }
        // Dead containers of the way here are collected with a resync, a minute after the last collection. A container that still had an end
        // before it may take another turn.
        loop {
            self.run(Duration::from_secs(180)).await;
            let before = self.changes().len();
            self.run(Duration::from_secs(120)).await;
            self.assert_sound();
            let after = self.changes();
            if after.len() == before {
                break;
            }
            assert!(Instant::now() < end, "an agent at rest changed the runtime: {:?}", &after[before..]);
        }
        let missing = self.missing();
        assert!(missing.is_empty(), "what was settled is so no more: {missing:?}");
        self.assert_bounded();
    }

    /// What the runtime has, in words.
    fn inventory(&self) -> String {
        let mut lines = Vec::new();
        for c in self.runtime().containers() {
            let uid = c.labels.get(config::names::POD_UID_LABEL).cloned().unwrap_or_default();
            let (name, attempt) = c.metadata.as_ref().map(|m| (m.name.as_str(), m.attempt)).unwrap_or_default();
            let sandbox = self.runtime().sandbox_of(&c.id).unwrap_or_default();
            let (state, code) = (c.state().as_str_name(), c.exit_code);
            lines.push(format!("{uid} {name}/{attempt} {} {state} {code} in {}", short(&c.id), short(&sandbox)));
        }
        for s in self.runtime().sandboxes() {
            let uid = s.metadata.as_ref().map(|m| m.uid.as_str()).unwrap_or_default();
            lines.push(format!("{uid} sandbox {} {}", short(&s.id), s.state().as_str_name()));
        }
        lines.join("\n")
    }

    /// Calls so far that changed the runtime; probes do not count.
    fn changes(&self) -> Vec<fakes::Call> {
        self.runtime().changes().into_iter().filter(|call| call.call != "ExecSync").collect()
    }

    /// # Panics
    /// More is kept than the settings allow: one dead container of each name, one sandbox, one entry a pod.
    fn assert_bounded(&self) {
        let mut dead: BTreeMap<(String, String), usize> = BTreeMap::new();
        for c in self.runtime().containers().iter().filter(|c| c.state() == ContainerState::ContainerExited) {
            let uid = c.labels.get(config::names::POD_UID_LABEL).cloned().unwrap_or_default();
            *dead.entry((uid, c.metadata.clone().unwrap_or_default().name)).or_default() += 1;
        }
        for ((uid, name), count) in dead {
            let terminal = matches!(self.phase(&uid).as_str(), "Succeeded" | "Failed");
            assert!(count <= 1 || terminal, "{count} dead containers {name} of pod {uid} are kept");
        }
        assert_eq!(self.entries().len(), self.wanted().len(), "entries in the table");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

fn form(pod: &DesiredPod) -> Form {
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

/// Puts an agent together, as the program's wiring does. None when it was cut off meanwhile.
async fn assemble(world: &Arc<World>, clock: &Clock, seed: u64) -> Option<Agent> {
    let ports = Ports::new(world.clone());
    let cut = ports.cut().clone();
    let ports = Arc::new(ports);
    let host: Arc<dyn PodHost> = ports.clone();
    let metrics = Arc::new(Metrics::new().ok()?);
    let random = Random::seeded(seed);
    let tasks = Tasks::default();
    let registry = Arc::new(Registry::default());
    let pleg = pod::pleg::start(ports.clone(), registry.clone(), clock.clone(), metrics.clone(), &tasks);
    let restored = tokio::select! {
        () = cut.cancelled() => return None,
        restored = pod::admit::restore(&*host, ROOT.as_ref()) => restored.ok()?,
    };
    let ranges = Ranges::new(IdPool::all(IDS_PER_POD), IDS_PER_POD, 110).ok()?;
    let user_namespaces = tokio::select! {
        () = cut.cancelled() => return None,
        restored = UserNamespaces::restore(ranges, host.clone(), ROOT.as_ref()) => restored.ok()?,
    };
    let admit = pod::admit::start(
        node_facts(),
        rules()?,
        restored,
        host.clone(),
        world.waiting.managers(),
        PathBuf::from(ROOT),
        &tasks,
    );
    let images = Images::new(
        ports.clone(),
        ports.clone(),
        clock.clone(),
        metrics.clone(),
        Events::default(),
        PullLimits { parallel: Some(1), qps: 5, burst: 10 },
    );
    let deps = Arc::new(PodDeps {
        images,
        objects: Arc::new(pod::objects::Standalone),
        prober: Prober::new(
            ports.clone(),
            tasks.clone(),
            clock.clone(),
            random.clone(),
            Events::default(),
            metrics.clone(),
        ),
        user_namespaces,
        reader: ports.clone(),
        mutator: ports.clone(),
        plugins: Arc::new(pod::ports::NoPlugins),
        managers: world.waiting.managers(),
        host,
        admit: admit.clone(),
        clock: clock.clone(),
        random,
        metrics,
        registry: registry.clone(),
        status: StatusQueue::default(),
        events: Events::to(Arc::new(world.told.clone())),
        health: pleg.health.clone(),
        limiter: LogLimiter::new(Duration::from_secs(60)),
        settings: settings(clock),
    });
    let (sets_tx, sets) = mpsc::channel(16);
    let context = StaticContext { node_name: NODE.to_owned(), gates: manifest::Gates::default() };
    let source = source::file::run(world.dir.reader(), Duration::from_secs(20), context, clock.clone(), sets_tx);
    tasks.spawn_until_stop(source);
    let dispatcher = Dispatcher::new(deps, admit, Mirrors::default(), tasks.clone(), [PodSource::File], pleg.pods);
    tasks.spawn(dispatcher.run(sets));
    Some(Agent { tasks, cut, registry, health: pleg.health })
}

fn quantity(text: &str) -> Quantity {
    match Quantity::parse(text) {
        Ok(quantity) => quantity,
        Err(e) => panic!("{text}: {e:?}"),
    }
}

fn allocatable() -> resources::ResourceList {
    [("cpu", "64"), ("memory", "64Gi"), ("pods", "110")]
        .map(|(name, amount)| (name.to_owned(), quantity(amount)))
        .into()
}

/// The node as admission sees it.
pub fn node_facts() -> admission::NodeFacts {
    admission::NodeFacts {
        name: NODE.to_owned(),
        labels: BTreeMap::from([("kubernetes.io/os".to_owned(), "linux".to_owned())]),
        allocatable: allocatable(),
        supplemental_groups_policy: true,
        ..Default::default()
    }
}

/// The node's rules of admission.
pub fn rules() -> Option<admission::Rules> {
    Some(admission::Rules {
        sysctls: admission::SysctlAllowlist::new(Some("6.8.0"), &[]).ok()?,
        apparmor_error: None,
        pod_level_resources: true,
        toleration_comparison: false,
        shutting_down: false,
        resize: decide::resize::ResizeRules::default(),
    })
}

fn settings(clock: &Clock) -> Settings {
    Settings {
        resize: decide::resize::ResizeRules::default(),
        node_name: NODE.to_owned(),
        runtime_name: "containerd".to_owned(),
        root_dir: PathBuf::from(ROOT),
        sync_frequency: Duration::from_secs(60),
        first_restart_period: decide::backoff::INITIAL,
        max_restart_period: decide::backoff::MAX,
        restart_gates: decide::restart::RestartGates::default(),
        container_gc: ContainerGcPolicy::default(),
        memory_reserve: None,
        cluster_dns: Vec::new(),
        cluster_domain: "cluster.local".to_owned(),
        resolv_conf: None,
        local_storage_isolation: true,
        cgroups_per_qos: true,
        kubepods: resources::kubepods_name("/"),
        pod_pids_limit: None,
        status_host_ips: Vec::new(),
        runtime_handlers: Vec::new(),
        agent_started: clock.now(),
        forget_on_restart: false,
        node: config::NodeFacts {
            pod_logs_dir: POD_LOGS.to_owned(),
            host_ips: Some(vec!["192.0.2.1".to_owned()]),
            allocatable: Some(allocatable()),
            memory_capacity: 64 << 30,
            swap_capacity: 0,
            hugepage_sizes: Vec::new(),
            cgroup: config::CgroupVersion::V2,
            swap_controller: false,
            swap_behavior: config::SwapBehavior::NoSwap,
            cpu_cfs_quota: true,
            cpu_cfs_period: 100_000,
            single_process_oom_kill: false,
            memory_qos: None,
            seccomp_default: false,
            seccomp_dir: format!("{ROOT}/seccomp"),
            selinux: None,
            thermal_throttle_paths: Vec::new(),
            gates: config::Gates::default(),
        },
    }
}
