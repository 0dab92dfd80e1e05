//! Seeing what runs: the pod lifecycle event generator.
//!
//! ```text
//!   runtime events ──▶ tell the pod's worker            (normal path, milliseconds)
//!   relist         ──▶ compare with the last ──▶ wake    (repair; every 1 s without a trusted stream, every 60 s with one)
//! ```
//!
//! An event says how far the pod's containers have come; a worker that knows that already goes on resting, another one looks at what is news
//! (`sync::observe`). A relist never says *what* changed: the worker looks at all of its pod. A lost event costs at most one relist period. Pods that only the runtime knows are published in [`RuntimePods`] for the dispatcher.
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. Inputs: the runtime's lists and events. No queue: its outputs are watch
//! channels. Deadline: the CRI client's for each list. Runtime slow or gone: the last good pass ages, [`Health`] turns unhealthy after the
//! threshold and heals with the next good pass; workers are left alone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cri::port::{Outcome, RuntimeReader};
use cri_api::v1;
use decide::pleg::{Fingerprint, RuntimeFacts, Told};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use jiff::Timestamp;
use model::pod::PodUid;
use telemetry::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::ports::{Clock, Tasks};
use crate::registry::Registry;

/// Relist period without a trusted event stream.
pub const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// Relist period with one.
pub const RELIST_PERIOD_EVENTED: Duration = Duration::from_secs(60);
/// Without a good pass for this long, the node is not ready.
pub const RELIST_THRESHOLD: Duration = Duration::from_secs(180);
/// How long a relist that found an unannounced change waits for the event before it distrusts the stream.
const EVENT_GRACE: Duration = Duration::from_secs(2);
/// How long a stream that lost events is distrusted.
const DISTRUST: Duration = Duration::from_secs(300);
/// First and longest pause between attempts to open the event stream.
const RECONNECT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How often the runtime's Status is asked.
pub const STATUS_PERIOD: Duration = Duration::from_secs(5);

/// A pod that the runtime shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimePod {
    /// Pod UID.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// True when a container runs or a sandbox is ready.
    pub alive: bool,
    /// It came from a file or a URL, as its sandbox says.
    pub is_static: bool,
}

/// Every pod that the runtime showed in the last pass.
#[derive(Clone, Debug, Default)]
pub struct RuntimePods {
    /// How many passes there were; 0: none yet, and nothing may be concluded from an empty list.
    pub pass: u64,
    /// The pods.
    pub pods: Arc<Vec<RuntimePod>>,
}

/// How the generator and the runtime are doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// When the last pass succeeded.
    pub last_pass: Option<Timestamp>,
    /// When the runtime's Status was last answered.
    pub last_status: Option<Timestamp>,
    /// Conditions of that answer; None before the first.
    pub conditions: Option<Vec<v1::RuntimeCondition>>,
    /// Its handlers in that answer.
    pub handlers: Option<Vec<v1::RuntimeHandler>>,
    /// True while the event stream is open and trusted.
    pub evented: bool,
    /// Why the last pass failed, while it does.
    pub error: Option<String>,
}

impl Health {
    /// What the verdicts on readiness need.
    pub fn facts(&self) -> RuntimeFacts<'_> {
        RuntimeFacts {
            last_status: self.last_status,
            conditions: self.conditions.as_deref(),
            last_relist: self.last_pass,
            relist_threshold: RELIST_THRESHOLD,
        }
    }

    /// Why the runtime's network is not ready, in Go's words.
    pub fn network_error(&self) -> Option<String> {
        decide::pleg::network_error(self.conditions.as_deref())
    }
}

/// What the generator publishes.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Runtime pods of the last pass.
    pub pods: watch::Receiver<RuntimePods>,
    /// Health.
    pub health: watch::Receiver<Health>,
}

struct Pleg {
    reader: Arc<dyn RuntimeReader>,
    registry: Arc<Registry>,
    clock: Clock,
    metrics: Arc<Metrics>,
    pods: watch::Sender<RuntimePods>,
    health: watch::Sender<Health>,
    last: Fingerprint,
    last_begin: Option<Instant>,
    /// Pods whose change came as an event since the newest pass began.
    announced: HashSet<PodUid>,
    /// Those of before it, since the last pass that succeeded began.
    announced_before: HashSet<PodUid>,
    /// Changes seen by a pass without an event, and when.
    unannounced: HashMap<PodUid, Instant>,
    distrusted_until: Option<Instant>,
}

/// Starts the generator's task and the task that asks the runtime's Status.
pub fn start(
    reader: Arc<dyn RuntimeReader>,
    registry: Arc<Registry>,
    clock: Clock,
    metrics: Arc<Metrics>,
    tasks: &Tasks,
) -> Outputs {
    let (pods_out, pods) = watch::channel(RuntimePods::default());
    let (health_out, health) = watch::channel(Health::default());
    let status = status_loop(reader.clone(), clock.clone(), health_out.clone(), registry.clone());
    tasks.spawn_until_stop(status);
    let pleg = Pleg {
        reader,
        registry,
        clock,
        metrics,
        pods: pods_out,
        health: health_out,
        last: Fingerprint::default(),
        last_begin: None,
        announced: HashSet::new(),
        announced_before: HashSet::new(),
        unannounced: HashMap::new(),
        distrusted_until: None,
    };
    tasks.spawn_until_stop(pleg.run());
    Outputs { pods, health }
}

type Lists = cri::port::CriResult<(Vec<v1::PodSandbox>, Vec<v1::Container>)>;

/// A relist under way. Events are handled meanwhile: a slow list holds up no pod.
struct Pass {
    begin: Instant,
    trusted: bool,
    lists: BoxFuture<'static, Lists>,
}

type Events = BoxStream<'static, cri::port::CriResult<v1::ContainerEventResponse>>;

impl Pleg {
    async fn run(mut self) {
        let mut events: Option<Events> = None;
        let mut supported = true;
        let mut pause = RECONNECT.0;
        let mut reconnect_at = Instant::now();
        let mut next = Instant::now();
        let mut pass: Option<Pass> = None;
        loop {
            if events.is_none() && supported && Instant::now() >= reconnect_at {
                match self.reader.container_events().await {
                    Ok(stream) => {
                        events = Some(stream);
                        self.metrics.evented_pleg_connections.inc();
                    }
                    Err(e) if e.outcome == Outcome::Unimplemented => {
                        supported = false;
                        info!("Runtime has no container events, relisting every second");
                    }
                    Err(e) => {
                        debug!(err = %e, "Container event stream cannot be opened");
                        self.metrics.evented_pleg_connection_errors.inc();
                        reconnect_at = Instant::now() + pause;
                        pause = (pause * 2).min(RECONNECT.1);
                    }
                }
                // Whatever happened while no stream was open is found by a pass that begins after it is.
                (pass, next) = (None, Instant::now());
            }
            let trusted = events.is_some() && self.distrusted_until.is_none_or(|t| Instant::now() >= t);
            self.set_health(|h| h.evented = trusted);
            let suspicion = self.unannounced.values().min().map(|t| *t + EVENT_GRACE);
            tokio::select! {
                biased;
                event = next_event(&mut events) => match event {
                    Some(Ok(event)) => { pause = RECONNECT.0; self.announce(&event); }
                    Some(Err(e)) if e.outcome == Outcome::Unimplemented => {
                        (events, supported) = (None, false);
                        info!("Runtime has no container events, relisting every second");
                        (pass, next) = (None, Instant::now());
                    }
                    ended => {
                        let why = ended.and_then(Result::err).map_or_else(|| "ended".to_owned(), |e| e.to_string());
                        self.metrics.evented_pleg_connection_errors.inc();
                        warn!(reason = why, "Container event stream lost, relisting every second until it is back");
                        events = None;
                        reconnect_at = Instant::now() + pause;
                        pause = (pause * 2).min(RECONNECT.1);
                        (pass, next) = (None, Instant::now());
                    }
                },
                () = tokio::time::sleep_until(suspicion.unwrap_or(next)), if suspicion.is_some() => self.judge_stream(),
                () = tokio::time::sleep_until(next), if pass.is_none() => pass = Some(self.begin_pass(trusted)),
                (done, lists) = finished(&mut pass) => {
                    let seen = self.end_pass(&done, lists);
                    // A pass that failed is repeated soon, so that health comes back with the runtime's.
                    let period = if trusted && seen { RELIST_PERIOD_EVENTED } else { RELIST_PERIOD };
                    next = Instant::now() + period;
                    if events.is_none() && supported {
                        next = next.min(reconnect_at.max(Instant::now() + RELIST_PERIOD));
                    }
                }
            }
            // A stream that is no longer trusted must not leave the next pass a minute away.
            if self.distrusted_until.is_some_and(|t| Instant::now() < t) {
                next = next.min(Instant::now() + RELIST_PERIOD);
            }
        }
    }

    /// An event came: tell the worker of its pod.
    fn announce(&mut self, event: &v1::ContainerEventResponse) {
        let made = Timestamp::from_nanosecond(i128::from(event.created_at)).ok().filter(|_| event.created_at > 0);
        if let Some(made) = made {
            let late = self.clock.now().duration_since(made).as_secs_f64().max(0.0);
            self.metrics.evented_pleg_latency.observe(late);
        }
        // An event without the sandbox's status does not say whose it is: the next pass finds out.
        if let Some(metadata) = event.pod_sandbox_status.as_ref().and_then(|s| s.metadata.as_ref()) {
            let uid = PodUid::new(metadata.uid.as_str());
            self.unannounced.remove(&uid);
            if let Some(entry) = self.registry.get(&uid) {
                match Told::by(event) {
                    Some(told) => entry.tell(told),
                    None => entry.wake(),
                }
            }
            self.announced.insert(uid);
        }
    }

    /// A change was found that no event announced in time: somebody else may be eating the events.
    fn judge_stream(&mut self) {
        let now = Instant::now();
        if self.unannounced.values().any(|t| now >= *t + EVENT_GRACE) {
            if self.distrusted_until.is_none_or(|t| now >= t) {
                warn!(
                    seconds = DISTRUST.as_secs(),
                    "Container events were lost, another reader may share the runtime's stream; relisting every second"
                );
            }
            self.distrusted_until = Some(now + DISTRUST);
            self.unannounced.clear();
        }
    }

    /// Begins a relist: asks for everything.
    fn begin_pass(&mut self, trusted: bool) -> Pass {
        let begin = Instant::now();
        if let Some(last) = self.last_begin {
            self.metrics.pleg_relist_interval.observe((begin - last).as_secs_f64());
        }
        self.last_begin = Some(begin);
        self.announced_before.extend(self.announced.drain());
        let reader = self.reader.clone();
        let lists =
            async move { futures::future::try_join(reader.list_pod_sandbox(None), reader.list_containers(None)).await };
        Pass { begin, trusted, lists: Box::pin(lists) }
    }

    /// Ends it: compares with the last one, wakes workers. False when it failed.
    fn end_pass(&mut self, pass: &Pass, lists: Lists) -> bool {
        self.metrics.pleg_relist_duration.observe(pass.begin.elapsed().as_secs_f64());
        let (sandboxes, containers) = match lists {
            Ok(lists) => lists,
            Err(e) => {
                let error = e.to_string();
                if self.health.borrow().error.as_deref() != Some(&error) {
                    warn!(err = error, "GenericPLEG: Unable to retrieve pods");
                }
                self.set_health(|h| h.error = Some(error.clone()));
                return false;
            }
        };
        let fresh = Fingerprint::new(&sandboxes, &containers);
        let changed: Vec<PodUid> = decide::pleg::diff(&self.last, &fresh).into_keys().collect();
        let fixed: HashSet<PodUid> = sandboxes
            .iter()
            .filter(|s| decide::observe::is_static(s))
            .filter_map(decide::observe::sandbox_uid)
            .collect();
        let pods: Vec<RuntimePod> = decide::observe::group(&sandboxes, &containers)
            .into_values()
            .map(|pod| RuntimePod {
                alive: pod.anything_alive(),
                is_static: fixed.contains(&pod.uid),
                uid: pod.uid,
                namespace: pod.namespace,
                name: pod.name,
            })
            .collect();
        let first = self.pods.borrow().pass == 0;
        for uid in &changed {
            // Removals are the agent's own doing and come without a state that could be missed.
            let announced = self.announced.contains(uid) || self.announced_before.contains(uid);
            if pass.trusted && !first && !fresh.is_gone(uid) && !announced {
                self.unannounced.entry(uid.clone()).or_insert_with(Instant::now);
            }
            if let Some(entry) = self.registry.get(uid) {
                entry.wake();
            }
        }
        self.announced_before.clear();
        self.last = fresh;
        let now = self.clock.now();
        let was_down = self.health.borrow().error.is_some();
        self.set_health(|h| {
            h.last_pass = Some(now);
            h.error = None;
        });
        self.metrics.pleg_last_seen.set(now.as_millisecond() as f64 / 1000.0);
        self.pods.send_modify(|p| {
            p.pass += 1;
            if *p.pods != pods {
                p.pods = Arc::new(pods);
            }
        });
        if was_down {
            info!("PLEG is healthy again");
            for entry in self.registry.all() {
                entry.wake();
            }
        }
        true
    }

    fn set_health(&self, change: impl FnOnce(&mut Health)) {
        set_health(&self.health, change);
    }
}

/// Changes health, and wakes its readers only when it changed.
fn set_health(health: &watch::Sender<Health>, change: impl FnOnce(&mut Health)) {
    health.send_if_modified(|h| {
        let before = h.clone();
        change(h);
        *h != before
    });
}

/// The pass under way, when its lists have come; never ready without one.
async fn finished(pass: &mut Option<Pass>) -> (Pass, Lists) {
    let lists = match pass {
        Some(pass) => (&mut pass.lists).await,
        None => std::future::pending().await,
    };
    match pass.take() {
        Some(done) => (done, lists),
        None => std::future::pending().await,
    }
}

/// The next event; never ready without a stream.
async fn next_event(events: &mut Option<Events>) -> Option<cri::port::CriResult<v1::ContainerEventResponse>> {
    match events {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

/// Asks the runtime's Status every [`STATUS_PERIOD`]. When the network or the runtime becomes ready, every pod's worker is woken.
async fn status_loop(
    reader: Arc<dyn RuntimeReader>,
    clock: Clock,
    health: watch::Sender<Health>,
    registry: Arc<Registry>,
) {
    let mut tick = tokio::time::interval(STATUS_PERIOD);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        tick.tick().await;
        let answer = reader.status(false).await;
        let failed = answer.is_err();
        let now = clock.now();
        let before = health.borrow().clone();
        match answer {
            Ok(answer) => set_health(&health, |h| {
                h.last_status = Some(now);
                h.handlers = Some(answer.runtime_handlers);
                h.conditions = Some(answer.status.map(|s| s.conditions).unwrap_or_default());
            }),
            Err(e) if !failing => warn!(err = &e as &dyn std::error::Error, "Container runtime sanity check failed"),
            Err(_) => {}
        }
        failing = failed;
        let after = health.borrow().clone();
        // Before the first answer nothing was ready, so the first good one wakes pods as well.
        let ready = |h: &Health| h.conditions.as_ref().is_some_and(|c| !c.is_empty() && c.iter().all(|c| c.status));
        if !ready(&before) && ready(&after) {
            info!("Container runtime and network are ready");
            for entry in registry.all() {
                entry.wake();
            }
        }
    }
}
