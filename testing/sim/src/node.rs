//! The node: builds an agent out of the real rooms, lets time pass, cuts the agent off, starts the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cri_api::v1::{self, ContainerState};
use decide::config;
use fakes::FakeRuntime;
use jiff::SignedDuration;
use model::api::{Pod, PodStatus};
use model::pod::{ContainerKind, DesiredPod, PodSource, PodUid};
use pod::ends::{Disruption, EndPod, Failing};
use pod::pleg::Health;
use pod::ports::Clock;
use pod::registry::PodEntry;
use pod::status::Mirror;
use tokio::time::Instant;

use crate::agent::{self, Agent, Birth};
use crate::api::FakeApi;
use crate::bugs::Bug;
use crate::check::Fact;
use crate::host::{FakeHost, ROOT};
use crate::manifests::{Dir, Manifest};
use crate::world::{World, form_of};

/// The node's name; pods' names end with it.
pub const NODE: &str = "sim";

/// What a node is made from.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Of everything random.
    pub seed: u64,
    /// The runtime's nature.
    pub runtime: fakes::Settings,
    /// The API server that the node belongs to.
    pub api: ApiServer,
    /// A bug that is planted.
    pub bug: Option<Bug>,
}

/// Whether the node belongs to a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiServer {
    /// It stands alone.
    #[default]
    None,
    /// One that lists page by page.
    Paged,
    /// One that can send a list through a watch.
    Streamed,
}

/// When systemd starts an agent again that ended by itself.
const AGAIN: Duration = Duration::from_secs(10);

/// A simulated node.
pub struct Node {
    pub(crate) world: Arc<World>,
    setup: Setup,
    clock: Clock,
    pub(crate) agent: Option<Agent>,
    agents: u64,
    /// When the agent that was cut off is followed by the next one.
    comes_back_after: Duration,
    /// What the manifests give, by file.
    parsed: Vec<(PathBuf, DesiredPod)>,
    wanted: BTreeSet<String>,
    /// An agent that ended by itself comes back then.
    again_at: Option<Instant>,
    /// Pods that the node has ended for good, and what they were to be.
    pub(crate) evicted: BTreeMap<String, DesiredPod>,
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
        let api = match setup.api {
            ApiServer::None => None,
            kind => Some(FakeApi::new(setup.seed, kind == ApiServer::Streamed)),
        };
        let world = World::new(runtime, FakeHost::new(setup.seed), api, setup.bug);
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
            again_at: None,
            evicted: BTreeMap::new(),
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
        self.again_at = None;
        self.world.look();
        self.world.note(Fact::AgentStarts);
        self.agents += 1;
        let over: BTreeSet<String> =
            self.objects().iter().filter(|pod| crate::api::is_over(pod)).map(crate::api::uid_of).collect();
        let forgotten = |uid: &String| {
            let file = PathBuf::from(ROOT).join("pods").join(uid).join("rubelet-end");
            !over.contains(uid) && !self.world.host.standing().files.contains_key(&file)
        };
        // What is not written down did not happen.
        let forgotten: Vec<String> = self.evicted.keys().filter(|uid| forgotten(uid)).cloned().collect();
        for uid in forgotten {
            if let Some(pod) = self.evicted.remove(&uid) {
                self.world.ends(&uid, false);
                self.world.note(Fact::Wanted(form_of(&pod)));
            }
        }
        self.world.tell("the agent starts");
        match agent::start(&self.world, &self.clock, self.setup.seed, self.agents).await {
            Birth::Lives(agent) => self.agent = Some(agent),
            Birth::Cut => {
                self.world.tell("the agent was cut off during its start");
                self.world.cut_at(None);
                self.again_at = Some(Instant::now() + self.comes_back_after);
            }
            Birth::Ended(why) => {
                self.world.tell(format!("the agent ended: {why}"));
                self.again_at = Some(Instant::now() + AGAIN);
            }
        }
    }

    /// Cuts the agent off, as by `kill -9`.
    pub fn kill(&mut self) {
        self.again_at = None;
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

    /// Lets time pass. An agent that is cut off meanwhile, or ends by itself, is followed by the next one.
    pub async fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            let cut = self.agent.as_ref().map(|agent| agent.cut.clone());
            let until = self.again_at.map_or(end, |at| at.min(end));
            let over = match &cut {
                Some(cut) => tokio::select! {
                    biased;
                    () = cut.cancelled() => false,
                    () = tokio::time::sleep_until(end) => true,
                },
                None => {
                    tokio::time::sleep_until(until).await;
                    until >= end
                }
            };
            self.world.look();
            if over {
                return;
            }
            if cut.is_some() {
                self.world.tell("the agent is cut off");
                self.kill();
                self.world.cut_at(None);
                self.again_at = Some(Instant::now() + self.comes_back_after);
            } else {
                self.start().await;
            }
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
    pub fn statics(&self) -> Vec<DesiredPod> {
        let last: BTreeMap<String, &DesiredPod> = self.parsed.iter().map(|(_, pod)| (pod.full_name(), pod)).collect();
        last.into_values().cloned().collect()
    }

    /// The pods that manifests and the API server want.
    pub fn wanted(&self) -> Vec<DesiredPod> {
        let desired = |pod: Pod| DesiredPod::new(pod, PodSource::Api).ok().filter(|pod| !pod.is_deleting());
        self.statics().into_iter().chain(self.objects().into_iter().filter_map(desired)).collect()
    }

    /// Tells the checker what is wanted now.
    fn tell(&mut self) {
        self.world.look();
        self.parsed = self.parse();
        let wanted = self.statics();
        let uids: BTreeSet<String> = wanted.iter().map(|pod| pod.uid().to_string()).collect();
        for uid in self.wanted.difference(&uids) {
            let known = self.entries().iter().any(|e| e.uid.as_str() == uid && e.view().desired.is_some());
            self.world.note(Fact::Unwanted { uid: uid.clone(), known, grace: None });
        }
        for pod in &wanted {
            self.world.note(Fact::Wanted(form_of(pod)));
        }
        self.wanted = uids;
    }

    // ---- The API server

    /// The API server.
    ///
    /// # Panics
    /// The node stands alone.
    pub fn api(&self) -> &FakeApi {
        match &self.world.api {
            Some(api) => api,
            None => panic!("this node has no API server"),
        }
    }

    /// Makes a pod at the API server; its UID.
    ///
    /// # Panics
    /// The name is taken.
    pub fn create(&self, manifest: &Manifest) -> String {
        match self.api().create(manifest.object()) {
            Some(pod) => crate::api::uid_of(&pod),
            None => panic!("there is a pod {}", manifest.name),
        }
    }

    /// Asks the API server for a pod's end, with its own grace or this one.
    pub fn delete(&self, name: &str, grace: Option<i64>) {
        self.api().delete(name, grace, self.clock.now());
    }

    /// Ends a pod for the node's sake, as eviction does.
    pub async fn evict(&mut self, uid: &str) {
        let (Some(agent), Some(pod)) = (&self.agent, self.wanted().into_iter().find(|p| p.uid().as_str() == uid))
        else {
            return;
        };
        let held = self.entries().iter().any(|e| e.uid.as_str() == uid);
        if !held || self.evicted.contains_key(uid) {
            return;
        }
        let why = "The node was low on resource: memory.".to_owned();
        let disruption = Disruption { reason: "TerminationByKubelet".to_owned(), message: why.clone() };
        let failing = Failing { reason: "Evicted".to_owned(), message: why, disruption: Some(disruption) };
        agent.ends.end(EndPod { uid: PodUid::new(uid), failing, grace: None }).await;
        self.world.look();
        self.world.note(Fact::Unwanted { uid: uid.to_owned(), known: true, grace: None });
        self.world.ends(uid, true);
        self.evicted.insert(uid.to_owned(), pod);
    }

    /// Sets the machine's clock forward or back.
    pub fn jump(&self, by: SignedDuration) {
        self.world.look();
        self.clock.jump(by);
        self.runtime().jump(by);
        self.world.note(Fact::ClockJumped);
    }

    /// The objects of pods that are bound to the node, and are not mirrors.
    pub fn objects(&self) -> Vec<Pod> {
        let all = self.world.api.as_ref().map(FakeApi::pods).unwrap_or_default();
        all.into_iter().filter(|pod| Mirror::of(pod).is_none()).collect()
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
    pub(crate) fn sandboxes_of(&self, uid: &str) -> Option<bool> {
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
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}
