//! The runtime's memory and the rules by which it changes; nothing here waits.
//!
//! ```text
//!              start            exit, stop, kill
//!   CREATED ───────────▶ RUNNING ───────────────▶ EXITED
//!      │  start failed                               ▲
//!      └─────────────────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use cri_api::v1;
use cri_api::v1::{ContainerEventType, ContainerState};
use rand::rngs::SmallRng;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::Settings;
use super::calls::Call;
use super::faults::Faults;
use super::images::Images;
use super::process::{ExecScript, For, Process, Running};

/// A gRPC code and a message.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub(crate) i32, pub(crate) String);

pub(crate) const UNKNOWN: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 3;
pub(crate) const DEADLINE_EXCEEDED: i32 = 4;
pub(crate) const NOT_FOUND: i32 = 5;
pub(crate) const UNIMPLEMENTED: i32 = 12;

pub(crate) type Done<T> = Result<T, Refusal>;

pub(crate) fn refuse<T>(message: impl Into<String>) -> Done<T> {
    Err(Refusal(UNKNOWN, message.into()))
}

pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) config: v1::PodSandboxConfig,
    pub(crate) handler: String,
    pub(crate) ready: bool,
    pub(crate) created_at: i64,
    pub(crate) ip: String,
}

impl Sandbox {
    pub(crate) fn metadata(&self) -> v1::PodSandboxMetadata {
        self.config.metadata.clone().unwrap_or_default()
    }
}

pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) sandbox: String,
    pub(crate) pod_uid: String,
    pub(crate) config: v1::ContainerConfig,
    pub(crate) image_id: String,
    pub(crate) log_path: String,
    pub(crate) state: ContainerState,
    pub(crate) created_at: i64,
    pub(crate) started_at: i64,
    pub(crate) finished_at: i64,
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) process: Option<Running>,
}

impl Container {
    pub(crate) fn metadata(&self) -> v1::ContainerMetadata {
        self.config.metadata.clone().unwrap_or_default()
    }

    pub(crate) fn live(&self) -> bool {
        matches!(self.state, ContainerState::ContainerRunning | ContainerState::ContainerUnknown)
    }
}

pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) sandboxes: BTreeMap<String, Sandbox>,
    pub(crate) containers: BTreeMap<String, Container>,
    pub(crate) images: Images,
    /// Who has which name.
    reserved: BTreeMap<String, String>,
    pub(crate) scripts: BTreeMap<For, Vec<Process>>,
    pub(crate) exec_scripts: BTreeMap<String, ExecScript>,
    /// Starts by pod UID and container name.
    pub(crate) starts: BTreeMap<(String, String), usize>,
    pub(crate) faults: Faults,
    pub(crate) calls: Vec<Call>,
    pub(crate) violations: Vec<String>,
    pub(crate) random: SmallRng,
    pub(crate) events: broadcast::Sender<v1::ContainerEventResponse>,
    pub(crate) last_event: Option<v1::ContainerEventResponse>,
    /// One that comes after the next.
    late_event: Option<v1::ContainerEventResponse>,
    pub(crate) up: bool,
    pub(crate) pod_cidr: String,
    /// Ends of processes to wake up for, taken by whoever locked the state.
    pub(crate) alarms: Vec<Instant>,
    /// Set whenever something changed.
    pub(crate) changed: bool,
    pub(crate) now: Instant,
    start: Instant,
    last_stamp: i64,
    last_id: u64,
}

impl State {
    pub(crate) fn new(settings: Settings, random: SmallRng) -> Self {
        let now = Instant::now();
        Self {
            settings,
            sandboxes: BTreeMap::new(),
            containers: BTreeMap::new(),
            images: Images::default(),
            reserved: BTreeMap::new(),
            scripts: BTreeMap::new(),
            exec_scripts: BTreeMap::new(),
            starts: BTreeMap::new(),
            faults: Faults::default(),
            calls: Vec::new(),
            violations: Vec::new(),
            random,
            events: broadcast::channel(4096).0,
            last_event: None,
            late_event: None,
            up: true,
            pod_cidr: String::new(),
            alarms: Vec::new(),
            changed: false,
            now,
            start: now,
            last_stamp: 0,
            last_id: 0,
        }
    }

    /// Unix nanoseconds of a moment.
    pub(crate) fn nanos(&self, at: Instant) -> i64 {
        let since = at.saturating_duration_since(self.start).as_nanos();
        (self.settings.epoch.as_nanosecond() as i64).saturating_add(since as i64)
    }

    /// Wall time is another one from now on.
    pub(crate) fn jump(&mut self, by: jiff::SignedDuration) {
        let epoch = self.settings.epoch;
        self.settings.epoch = epoch.saturating_add(by).unwrap_or(epoch);
        self.last_stamp = self.last_stamp.min(self.nanos(self.now));
    }

    /// Unix nanoseconds of now, later than any stamp before: with a paused clock, things still happen one after the other.
    pub(crate) fn stamp(&mut self) -> i64 {
        self.last_stamp = self.nanos(self.now).max(self.last_stamp + 1);
        self.last_stamp
    }

    fn new_id(&mut self, kind: char) -> String {
        self.last_id += 1;
        format!("{kind}{:063x}", self.last_id)
    }

    fn reserve(&mut self, what: &str, name: &str, id: &str) -> Done<()> {
        if let Some(owner) = self.reserved.get(name) {
            return refuse(format!("failed to reserve {what} name {name:?}: name {name:?} is reserved for {owner:?}"));
        }
        self.reserved.insert(name.into(), id.into());
        Ok(())
    }

    // ---- Sandboxes

    pub(crate) fn run_sandbox(&mut self, config: v1::PodSandboxConfig, handler: &str) -> Done<String> {
        let Some(metadata) = config.metadata.clone() else {
            return refuse("sandbox config must include metadata");
        };
        let v1::PodSandboxMetadata { name, uid, namespace, attempt } = metadata;
        let full = format!("{name}_{namespace}_{uid}_{attempt}");
        if !handler.is_empty() && !self.settings.handlers.iter().any(|known| known == handler) {
            return refuse(format!("failed to get sandbox runtime: no runtime for {handler:?} is configured"));
        }
        let id = self.new_id('5');
        self.reserve("sandbox", &full, &id)?;
        let rival = self.sandboxes.values().find(|s| s.ready && s.metadata().uid == uid);
        if let Some(rival) = rival {
            let text = format!("sandbox {id} ({full}) was run while {} of the same pod was ready", rival.id);
            self.violations.push(text);
        }
        let host_network = super::views::namespaces(&config).is_some_and(|n| n.network() == v1::NamespaceMode::Node);
        let number = self.last_id;
        let ip =
            if host_network { String::new() } else { format!("10.88.{}.{}", number / 250 % 250, number % 250 + 2) };
        let created_at = self.stamp();
        let sandbox =
            Sandbox { id: id.clone(), name: full, config, handler: handler.into(), ready: true, created_at, ip };
        self.sandboxes.insert(id.clone(), sandbox);
        self.emit(&id, &id, ContainerEventType::ContainerCreatedEvent);
        self.emit(&id, &id, ContainerEventType::ContainerStartedEvent);
        Ok(id)
    }

    pub(crate) fn sandbox(&self, id: &str) -> Done<&Sandbox> {
        self.sandboxes
            .get(id)
            .ok_or_else(|| Refusal(NOT_FOUND, "an error occurred when try to find sandbox: not found".into()))
    }

    /// The sandbox's own process ends; containers that do not share its namespaces for processes live on.
    pub(crate) fn end_sandbox(&mut self, id: &str) {
        if let Some(sandbox) = self.sandboxes.get_mut(id)
            && sandbox.ready
        {
            sandbox.ready = false;
            self.emit(id, id, ContainerEventType::ContainerStoppedEvent);
        }
    }

    pub(crate) fn containers_of(&self, sandbox: &str) -> Vec<String> {
        self.containers.values().filter(|c| c.sandbox == sandbox).map(|c| c.id.clone()).collect()
    }

    pub(crate) fn remove_sandbox(&mut self, id: &str) {
        for container in self.containers_of(id) {
            self.kill(&container);
            self.remove_container(&container);
        }
        self.end_sandbox(id);
        self.emit(id, id, ContainerEventType::ContainerDeletedEvent);
        if let Some(sandbox) = self.sandboxes.remove(id) {
            self.reserved.remove(&sandbox.name);
        }
    }

    // ---- Containers

    pub(crate) fn create_container(&mut self, sandbox_id: &str, config: v1::ContainerConfig) -> Done<String> {
        let Some(sandbox) = self.sandboxes.get(sandbox_id) else {
            return Err(Refusal(NOT_FOUND, format!("failed to find sandbox id {sandbox_id:?}: not found")));
        };
        if !sandbox.ready {
            return Err(Refusal(
                NOT_FOUND,
                format!(
                    "failed to get sandbox container task: no running task found: task {sandbox_id} not found: not found"
                ),
            ));
        }
        let Some(metadata) = config.metadata.clone() else {
            return refuse("container config must include metadata");
        };
        let pod = sandbox.metadata();
        let log_directory = sandbox.config.log_directory.clone();
        let v1::ContainerMetadata { name, attempt } = metadata;
        let full = format!("{name}_{}_{}_{}_{attempt}", pod.name, pod.namespace, pod.uid);
        let id = self.new_id('c');
        self.reserve("container", &full, &id)?;
        let wanted = config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        let Some(image) = self.images.find(&wanted) else {
            self.reserved.remove(&full);
            return Err(Refusal(NOT_FOUND, format!("failed to resolve image {wanted:?}: not found")));
        };
        let image_id = image.id.clone();
        let log_path = match (log_directory.as_str(), config.log_path.as_str()) {
            ("", _) | (_, "") => String::new(),
            (directory, file) => format!("{}/{file}", directory.trim_end_matches('/')),
        };
        let container = Container {
            id: id.clone(),
            name: full,
            sandbox: sandbox_id.into(),
            pod_uid: pod.uid,
            config,
            image_id,
            log_path,
            state: ContainerState::ContainerCreated,
            created_at: self.stamp(),
            started_at: 0,
            finished_at: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            process: None,
        };
        self.containers.insert(id.clone(), container);
        self.emit(&id, sandbox_id, ContainerEventType::ContainerCreatedEvent);
        Ok(id)
    }

    pub(crate) fn container(&self, id: &str) -> Done<&Container> {
        self.containers.get(id).ok_or_else(|| {
            Refusal(NOT_FOUND, format!("an error occurred when try to find container {id:?}: not found"))
        })
    }

    pub(crate) fn running(&self, id: &str, what: &str) -> Done<&Container> {
        let container = self.container(id)?;
        match container.state {
            ContainerState::ContainerRunning => Ok(container),
            state => refuse(format!("{what}: container is in {} state", state.as_str_name())),
        }
    }

    pub(crate) fn start_container(&mut self, id: &str) -> Done<()> {
        let container = self.container(id)?;
        if container.state != ContainerState::ContainerCreated {
            let state = container.state.as_str_name();
            return refuse(format!("failed to set starting state for container {id:?}: container is in {state} state"));
        }
        let sandbox_id = container.sandbox.clone();
        let Some(sandbox) = self.sandboxes.get(&sandbox_id).filter(|sandbox| sandbox.ready) else {
            return refuse(format!("sandbox container {sandbox_id:?} is not running"));
        };
        let name = container.metadata().name;
        let owner = (container.pod_uid.clone(), name.clone());
        let nth = self.starts.get(&owner).copied().unwrap_or(0);
        let image = container.config.image.as_ref().map(|image| &image.user_specified_image);
        let image =
            image.filter(|image| !image.is_empty()).or(container.config.image.as_ref().map(|image| &image.image));
        let script = [
            Some(For::PodContainer(sandbox.metadata().name, name.clone())),
            Some(For::Container(name)),
            image.cloned().map(For::Image),
        ]
        .into_iter()
        .flatten()
        .find_map(|whom| self.scripts.get(&whom))
        .and_then(|lives| lives.get(nth).or(lives.last()))
        .cloned()
        .unwrap_or_else(Process::forever);

        let rival =
            self.containers.values().find(|c| c.live() && (&c.pod_uid, &c.metadata().name) == (&owner.0, &owner.1));
        if let Some(rival) = rival {
            let text =
                format!("container {id} ({}) was started while {} was running", self.containers[id].name, rival.id);
            self.violations.push(text);
        }
        self.starts.insert(owner, nth + 1);

        let (stamp, now) = (self.stamp(), self.now);
        let Some(container) = self.containers.get_mut(id) else {
            return Ok(());
        };
        if let Some(message) = script.start_error.clone() {
            container.state = ContainerState::ContainerExited;
            (container.finished_at, container.exit_code) = (stamp, 128);
            (container.reason, container.message) = ("StartError".into(), message.clone());
            self.emit(id, &sandbox_id, ContainerEventType::ContainerStoppedEvent);
            return refuse(message);
        }
        let process = Running::start(script, now);
        self.alarms.extend(process.ends_at);
        container.process = Some(process);
        if self.settings.log_files
            && let Some(log) = self.sandboxes.get(&sandbox_id).map(|s| Path::new(&s.config.log_directory))
        {
            // Whoever wants to read it says what is wrong with it.
            let _ = std::fs::File::create(log.join(&container.config.log_path));
        }
        container.state = ContainerState::ContainerRunning;
        container.started_at = stamp;
        self.emit(id, &sandbox_id, ContainerEventType::ContainerStartedEvent);
        self.settle();
        Ok(())
    }

    /// Sends the stop signal.
    pub(crate) fn term(&mut self, id: &str) {
        let now = self.now;
        let Some(process) = self.containers.get_mut(id).and_then(|container| container.process.as_mut()) else {
            return;
        };
        process.term(now);
        self.alarms.extend(process.ends_at);
        self.settle();
    }

    /// Sends SIGKILL; false when the process survives even that.
    pub(crate) fn kill(&mut self, id: &str) -> bool {
        let Some(container) = self.containers.get(id).filter(|container| container.live()) else {
            return true;
        };
        if container.process.as_ref().is_some_and(|process| !process.script.killable) {
            return false;
        }
        self.exit(id, 137, None, self.now);
        true
    }

    /// The container's process ends.
    pub(crate) fn exit(&mut self, id: &str, code: i32, reason: Option<String>, at: Instant) {
        let at = self.nanos(at);
        let Some(container) = self.containers.get_mut(id).filter(|container| container.live()) else {
            return;
        };
        container.state = ContainerState::ContainerExited;
        container.process = None;
        container.exit_code = code;
        // With a clock that was set back meanwhile it ends before it began.
        let set_back = container.started_at - at > 1_000_000_000;
        container.finished_at = if set_back { at } else { at.max(container.started_at + 1) };
        container.reason = reason.unwrap_or_else(|| if code == 0 { "Completed".into() } else { "Error".into() });
        self.last_stamp = self.last_stamp.max(container.finished_at);
        let sandbox = container.sandbox.clone();
        self.emit(id, &sandbox, ContainerEventType::ContainerStoppedEvent);
    }

    pub(crate) fn remove_container(&mut self, id: &str) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        let sandbox = container.sandbox.clone();
        self.emit(id, &sandbox, ContainerEventType::ContainerDeletedEvent);
        if let Some(container) = self.containers.remove(id) {
            self.reserved.remove(&container.name);
        }
    }

    /// Ends the processes whose time has come, in the order of their ends.
    pub(crate) fn settle(&mut self) {
        let mut due: Vec<_> = self
            .containers
            .values()
            .filter_map(|container| {
                let process = container.process.as_ref()?;
                let at = process.ends_at.filter(|at| *at <= self.now)?;
                Some((at, container.id.clone(), process.code, process.reason.clone()))
            })
            .collect();
        due.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        for (at, id, code, reason) in due {
            self.exit(&id, code, reason, at);
        }
    }

    /// The machine goes down and comes up: nothing runs any more.
    pub(crate) fn reboot(&mut self) {
        let live: Vec<_> = self.containers.values().filter(|c| c.live()).map(|c| c.id.clone()).collect();
        for id in live {
            self.exit(&id, 255, Some("Unknown".into()), self.now);
        }
        let ready: Vec<_> = self.sandboxes.keys().cloned().collect();
        for id in ready {
            self.end_sandbox(&id);
        }
    }

    // ---- Events

    fn emit(&mut self, id: &str, sandbox: &str, kind: ContainerEventType) {
        use rand::Rng;
        self.changed = true;
        if !self.settings.events || !self.up {
            return;
        }
        let copies = match (self.settings.lost_events, self.settings.doubled_events) {
            (lost, _) if lost > 0.0 && self.random.random_bool(lost) => 0,
            (_, doubled) if doubled > 0.0 && self.random.random_bool(doubled) => 2,
            _ => 1,
        };
        let event = v1::ContainerEventResponse {
            container_id: id.into(),
            container_event_type: kind.into(),
            created_at: self.stamp(),
            pod_sandbox_status: self.sandboxes.get(sandbox).map(|sandbox| sandbox.status()),
            containers_statuses: self.statuses_of(sandbox),
        };
        if copies == 0 {
            return;
        }
        self.last_event = Some(event.clone());
        let late = self.late_event.take();
        if late.is_none() && self.settings.late_events > 0.0 && self.random.random_bool(self.settings.late_events) {
            self.late_event = Some(event);
            return;
        }
        for event in std::iter::repeat_n(event, copies).chain(late) {
            // Fails when no one listens, which is no one's loss.
            let _ = self.events.send(event);
        }
    }

    /// What a call is about, in words.
    pub(crate) fn subject(&self, id: &str) -> String {
        let sandbox =
            |id: &str| self.sandboxes.get(id).map(|s| s.metadata()).map(|m| format!("{}/{}", m.namespace, m.name));
        match self.containers.get(id) {
            Some(c) => format!("{}/{}", sandbox(&c.sandbox).unwrap_or_default(), c.metadata().name),
            None => sandbox(id).unwrap_or_default(),
        }
    }

    /// How long a container has been running, for its usage figures.
    pub(crate) fn ran_for(&self, container: &Container) -> Duration {
        let nanos = match container.state {
            ContainerState::ContainerRunning => self.nanos(self.now) - container.started_at,
            _ => 0,
        };
        Duration::from_nanos(nanos.max(0) as u64)
    }
}
