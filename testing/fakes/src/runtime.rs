//! [`FakeRuntime`]: a CRI runtime in memory that enforces what containerd enforces.

pub(crate) mod calls;
pub(crate) mod faults;
mod images;
mod parts;
mod port;
pub(crate) mod process;
pub(crate) mod rpc;
pub(crate) mod state;
mod views;

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cri_api::v1;
use jiff::Timestamp;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use calls::{Call, Ended};
use faults::{Fault, Pad, Rule};
use images::{Remote, full_name};
use process::{Exec, For, Process};
use state::{Done, Refusal, State};

/// What kind of runtime it is; may be changed while it runs ([`FakeRuntime::configure`]).
#[derive(Clone, Debug)]
pub struct Settings {
    /// The time of day at which the fake was made. Later times follow tokio's clock.
    pub epoch: Timestamp,
    /// What Version answers.
    pub version: v1::VersionResponse,
    /// What Status answers.
    pub status: v1::StatusResponse,
    /// What RuntimeConfig answers; None: Unimplemented.
    pub cgroup_driver: Option<v1::CgroupDriver>,
    /// Runtime handlers besides the default one.
    pub handlers: Vec<String>,
    /// Whether GetContainerEvents is implemented.
    pub events: bool,
    /// The chance of an event to get lost.
    pub lost_events: f64,
    /// The chance of an event to come twice.
    pub doubled_events: f64,
    /// The chance of an event to come only after the next one.
    pub late_events: f64,
    /// Whether lists in parts are implemented, and the number of items in a part.
    pub list_streaming: Option<usize>,
    /// Whether images that were never named can be pulled.
    pub open_registry: bool,
    /// Whether a container that starts gets its log, which stays empty.
    pub log_files: bool,
    /// Where the URLs of Exec, Attach and PortForward point.
    pub streaming_base: String,
    /// The deadlines of calls through the port's traits follow from this as those of the real client do.
    pub request_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        let condition = |kind: &str| v1::RuntimeCondition { r#type: kind.into(), status: true, ..Default::default() };
        let features = v1::RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: true };
        let handler = |name: &str| v1::RuntimeHandler { name: name.into(), features: Some(features) };
        Self {
            epoch: Timestamp::constant(1_767_225_600, 0),
            version: v1::VersionResponse {
                version: "0.1.0".into(),
                runtime_name: "containerd".into(),
                runtime_version: "v2.2.0".into(),
                runtime_api_version: "v1".into(),
            },
            status: v1::StatusResponse {
                status: Some(v1::RuntimeStatus {
                    conditions: vec![condition("RuntimeReady"), condition("NetworkReady")],
                }),
                runtime_handlers: vec![handler(""), handler("runc")],
                features: Some(v1::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
                ..Default::default()
            },
            cgroup_driver: Some(v1::CgroupDriver::Cgroupfs),
            handlers: vec!["runc".into()],
            events: true,
            lost_events: 0.0,
            doubled_events: 0.0,
            late_events: 0.0,
            list_streaming: None,
            open_registry: true,
            log_files: false,
            streaming_base: "http://127.0.0.1:10010".into(),
            request_timeout: Duration::from_secs(120),
        }
    }
}

/// How a call failed.
#[derive(Debug)]
pub(crate) enum Ending {
    Refused(Refusal),
    Lost,
    Unreachable,
}

pub(crate) type Answer<T> = Result<T, Ending>;

pub(crate) struct Inner {
    state: Mutex<State>,
    /// Told after every change.
    changed: watch::Sender<()>,
    /// The connections of now: cancelled when the runtime goes down.
    connections: watch::Sender<CancellationToken>,
}

/// A CRI runtime in memory. Cheap to clone; clones are the same runtime. Same seed and same calls: same answers.
#[derive(Clone)]
pub struct FakeRuntime(Arc<Inner>);

impl Default for FakeRuntime {
    fn default() -> Self {
        Self::new(0)
    }
}

impl FakeRuntime {
    /// A runtime like a current containerd, empty.
    pub fn new(seed: u64) -> Self {
        Self::with_settings(seed, Settings::default())
    }

    /// A runtime of this kind, empty.
    pub fn with_settings(seed: u64, settings: Settings) -> Self {
        Self(Arc::new(Inner {
            state: Mutex::new(State::new(settings, SmallRng::seed_from_u64(seed))),
            changed: watch::channel(()).0,
            connections: watch::channel(CancellationToken::new()).0,
        }))
    }

    /// Changes the settings.
    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        self.with(|state| change(&mut state.settings));
    }

    // ---- Images

    /// Puts an image into the store; its id.
    pub fn add_image(&self, name: &str) -> String {
        self.with(|state| state.images.add(name))
    }

    /// Changes an image in the store (its user, its size, …), if it is there.
    pub fn edit_image(&self, name: &str, change: impl FnOnce(&mut v1::Image)) {
        self.with(|state| {
            let id = state.images.find(name).map(|image| image.id.clone());
            if let Some(image) = id.and_then(|id| state.images.local.get_mut(&id)) {
                change(image);
            }
        });
    }

    /// Makes an image known to the registry: how long its pull takes, and the user and password that it asks for.
    pub fn add_remote_image(&self, name: &str, takes: Duration, login: Option<(&str, &str)>) {
        let login = login.map(|(user, password)| (user.into(), password.into()));
        self.with(|state| state.images.remote.insert(full_name(name), Remote { takes, login }));
    }

    // ---- Processes

    /// Scripts what the processes of these containers do: the first life for the first start of a container name in a pod, the
    /// second for the second, and so on; the last one stays. Containers without a script run until they are stopped.
    pub fn script(&self, whom: For, lives: impl IntoIterator<Item = Process>) {
        let lives = lives.into_iter().collect();
        self.with(|state| state.scripts.insert(whom, lives));
    }

    /// Scripts what ExecSync does in containers of this name; without a script it succeeds at once, silently.
    pub fn script_exec(&self, container: &str, script: impl Fn(&[String]) -> Exec + Send + Sync + 'static) {
        self.with(|state| state.exec_scripts.insert(container.into(), Arc::new(script)));
    }

    /// Ends a container's process now with this code; false if it was not running.
    pub fn exit(&self, container_id: &str, code: i32) -> bool {
        self.with(|state| {
            let live = state.containers.get(container_id).is_some_and(|container| container.live());
            state.exit(container_id, code, None, state.now);
            live
        })
    }

    /// Lets the runtime lose sight of a container: its state is unknown until it is stopped.
    pub fn lose_sight(&self, container_id: &str) {
        self.with(|state| {
            if let Some(container) = state.containers.get_mut(container_id) {
                container.state = v1::ContainerState::ContainerUnknown;
                state.changed = true;
            }
        });
    }

    /// Ends a sandbox's own process, as when pause is killed.
    pub fn end_sandbox(&self, sandbox_id: &str) {
        self.with(|state| state.end_sandbox(sandbox_id));
    }

    // ---- Events

    /// The last event that was not lost.
    pub fn last_event(&self) -> Option<v1::ContainerEventResponse> {
        self.with(|state| state.last_event.clone())
    }

    /// Tells whoever listens this event, whether or not it is so.
    pub fn tell(&self, event: v1::ContainerEventResponse) {
        // Fails when no one listens, which is no one's loss.
        self.with(|state| state.events.send(event).ok());
    }

    // ---- Faults

    /// Adds a rule by which calls go wrong.
    pub fn inject(&self, rule: Rule) {
        self.with(|state| state.faults.add(rule));
    }

    /// Drops all rules.
    pub fn heal(&self) {
        self.with(|state| state.faults.clear());
    }

    /// Stops answering: connections break, calls under way are lost, new ones cannot be sent. Containers run on.
    pub fn go_down(&self) {
        self.with(|state| {
            state.up = false;
            // Streams of events end.
            state.events = broadcast::channel(4096).0;
        });
        self.break_connections();
    }

    /// Answers again.
    pub fn come_up(&self) {
        self.with(|state| {
            state.up = true;
            state.changed = true;
        });
    }

    /// Goes down and comes up after this time.
    pub fn restart(&self, down_for: Duration) {
        self.go_down();
        if down_for.is_zero() {
            return self.come_up();
        }
        let weak = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            tokio::time::sleep(down_for).await;
            if let Some(runtime) = upgrade(&weak) {
                runtime.come_up();
            }
        });
    }

    /// Reboots the machine: everything that ran has ended, and the runtime answers after this time.
    pub fn reboot(&self, down_for: Duration) {
        self.with(State::reboot);
        self.restart(down_for);
    }

    /// The machine's clock is set forward or back. Stamps that were made stay as they are.
    pub fn jump(&self, by: jiff::SignedDuration) {
        self.with(|state| state.jump(by));
    }

    /// Breaks all connections; the runtime itself stays up.
    pub(crate) fn break_connections(&self) {
        self.0.connections.send_replace(CancellationToken::new()).cancel();
    }

    // ---- What tests ask

    /// The calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.with(|state| state.calls.clone())
    }

    /// The calls of one method so far.
    pub fn calls_of(&self, call: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|made| made.call == call).collect()
    }

    /// The calls so far that change something.
    pub fn changes(&self) -> Vec<Call> {
        self.calls().into_iter().filter(Call::changes).collect()
    }

    /// Forgets the calls so far.
    pub fn forget_calls(&self) {
        self.with(|state| state.calls.clear());
    }

    /// The containers of a pod that run or may run, oldest first.
    pub fn live_containers(&self, pod_uid: &str) -> Vec<v1::Container> {
        self.with(|state| {
            let live = state.containers.values().filter(|c| c.pod_uid == pod_uid && c.live());
            live.map(|c| state.container_item(c)).collect()
        })
    }

    /// State, start and end (Unix nanoseconds, 0: not yet) of all containers by id, oldest first: far cheaper than their statuses.
    pub fn states(&self) -> Vec<(String, v1::ContainerState, i64, i64)> {
        self.with(|state| {
            state.containers.values().map(|c| (c.id.clone(), c.state, c.started_at, c.finished_at)).collect()
        })
    }

    /// Whether each sandbox is ready, by id, oldest first.
    pub fn readiness(&self) -> Vec<(String, bool)> {
        self.with(|state| state.sandboxes.values().map(|s| (s.id.clone(), s.ready)).collect())
    }

    /// One container's status.
    pub fn status_of(&self, container_id: &str) -> Option<v1::ContainerStatus> {
        self.with(|state| state.containers.get(container_id).map(|c| state.container_status(c)))
    }

    /// All containers with their statuses, oldest first.
    pub fn containers(&self) -> Vec<v1::ContainerStatus> {
        self.with(|state| state.containers.values().map(|c| state.container_status(c)).collect())
    }

    /// All sandboxes with their statuses, oldest first.
    pub fn sandboxes(&self) -> Vec<v1::PodSandboxStatus> {
        self.with(|state| state.sandboxes.values().map(|s| s.status()).collect())
    }

    /// What a container was created from.
    pub fn container_config(&self, container_id: &str) -> Option<v1::ContainerConfig> {
        self.with(|state| state.containers.get(container_id).map(|c| c.config.clone()))
    }

    /// The sandbox that a container is in.
    pub fn sandbox_of(&self, container_id: &str) -> Option<String> {
        self.with(|state| state.containers.get(container_id).map(|c| c.sandbox.clone()))
    }

    /// What a sandbox was run from.
    pub fn sandbox_config(&self, sandbox_id: &str) -> Option<v1::PodSandboxConfig> {
        self.with(|state| state.sandboxes.get(sandbox_id).map(|s| s.config.clone()))
    }

    /// How often a container of this name was started in the pod, failed starts included.
    pub fn starts(&self, pod_uid: &str, container: &str) -> usize {
        self.with(|state| state.starts.get(&(pod_uid.into(), container.into())).copied().unwrap_or(0))
    }

    /// The pod CIDR that UpdateRuntimeConfig set; empty before.
    pub fn pod_cidr(&self) -> String {
        self.with(|state| state.pod_cidr.clone())
    }

    /// What must never happen and did, since the start: two containers of one name of one pod running at the same time, or two
    /// sandboxes of one pod ready at the same time.
    pub fn invariants(&self) -> Vec<String> {
        self.with(|state| state.violations.clone())
    }

    /// The time of day.
    pub fn now(&self) -> Timestamp {
        self.with(|state| timestamp(state.nanos(state.now)))
    }

    /// Waits until what is asked for is true; looks again after every call and every change.
    pub async fn until(&self, mut reached: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        while !reached(self) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    // ---- Inside

    /// Locks the state with all ends of processes done that are due, and tells of changes afterwards.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        state.now = Instant::now();
        state.settle();
        let result = work(&mut state);
        let alarms = std::mem::take(&mut state.alarms);
        let changed = std::mem::take(&mut state.changed);
        drop(state);
        for at in alarms {
            tokio::spawn(settle_at(Arc::downgrade(&self.0), at));
        }
        if changed {
            self.0.changed.send_replace(());
        }
        result
    }

    pub(crate) fn is_up(&self) -> bool {
        self.with(|state| state.up)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn changes_seen(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    pub(crate) fn connections(&self) -> watch::Receiver<CancellationToken> {
        self.0.connections.subscribe()
    }

    /// Takes one call through the log and the faults.
    pub(crate) async fn take<T: Pad>(
        &self,
        call: &'static str,
        subject: &str,
        id: &str,
        work: impl Future<Output = Done<T>> + Send,
    ) -> Answer<T> {
        let connection = self.0.connections.borrow().clone();
        let arrived = self.with(|state| {
            let at = timestamp(state.nanos(state.now));
            let subject = if id.is_empty() { subject.to_owned() } else { state.subject(id) };
            let ended = if state.up { None } else { Some(Ended::Unreachable) };
            let fault = if state.up { state.faults.pick(call, &subject, &mut state.random) } else { None };
            state.calls.push(Call { call, subject, id: id.into(), at, ended });
            state.changed = true;
            state.up.then_some((state.calls.len() - 1, fault))
        });
        let Some((index, fault)) = arrived else {
            return Err(Ending::Unreachable);
        };
        let run = async {
            match fault {
                Some(Fault::Fail(code, message)) => {
                    return Err(Ending::Refused(Refusal(code, message)));
                }
                Some(Fault::Hang) => std::future::pending().await,
                Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
                _ => {}
            }
            let answer = work.await;
            match fault {
                Some(Fault::DoAndHang) => std::future::pending().await,
                Some(Fault::LoseAnswer) => Err(Ending::Lost),
                Some(Fault::LateAnswer(time)) => {
                    tokio::time::sleep(time).await;
                    answer.map_err(Ending::Refused)
                }
                Some(Fault::Pad(size)) => answer.map_err(Ending::Refused).map(|mut answer| {
                    faults::pad(&mut answer, size);
                    answer
                }),
                _ => answer.map_err(Ending::Refused),
            }
        };
        let answer = tokio::select! {
            biased;
            () = connection.cancelled() => Err(Ending::Lost),
            answer = run => answer,
        };
        self.with(|state| {
            // The log may have been emptied meanwhile.
            if let Some(made) = state.calls.get_mut(index).filter(|made| made.call == call && made.ended.is_none()) {
                made.ended = Some(match &answer {
                    Ok(_) => Ended::Answered,
                    Err(Ending::Refused(Refusal(code, message))) => Ended::Failed(*code, message.clone()),
                    Err(_) => Ended::Lost,
                });
            }
        });
        answer
    }
}

/// Wakes up for the end of a process.
async fn settle_at(weak: Weak<Inner>, at: Instant) {
    tokio::time::sleep_until(at).await;
    if let Some(runtime) = upgrade(&weak) {
        runtime.with(|_| ());
    }
}

fn upgrade(weak: &Weak<Inner>) -> Option<FakeRuntime> {
    weak.upgrade().map(FakeRuntime)
}

fn timestamp(nanos: i64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or(Timestamp::MAX)
}
