//! Graceful shutdown of the node: holds the machine's shutdown up until the pods have ended in the order of their priorities.
//!
//! ```text
//!   service ──shutdown──▶ node not ready, pods refused ─▶ pods of the lowest priority end ─▶ … ─▶ lock released
//!      └─────called off─▶ node ready again, a new lock; pods that are ending end, the others stay
//! ```
//!
//! Task: owned by [`start`], which starts it only when shutdowns are to be held up; ends with [`Tasks::stop`], and with it the lock. Inputs: the service's
//! events, one after the other. Deadlines: the period of each group of pods; the service's own for its calls. Service gone, or none there: tried again,
//! less and less often; meanwhile nothing is held up, as its locks are gone. A lock is taken before the last look at whether a shutdown is under way, so
//! that none is missed.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use decide::node::NodeEvent;
use decide::shutdown::{self, NOT_READY, Period, Times};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::BoxStream;
use model::pod::PodUid;
use pod::ports::{Clock, Tasks};
use telemetry::metrics::Metrics;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::NodeEvents;

/// Between two tries to reach the service: the first, and the longest.
const RECONNECT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How often it is looked whether the service waits longer by now, and the first pause; each is twice the one before.
const TAKEN_UP: (u32, Duration) = (5, Duration::from_millis(100));

/// The service that shuts the machine down.
#[async_trait]
pub trait ShutdownService: Send + Sync {
    /// Connects to it.
    ///
    /// # Errors
    /// It is not there: in words.
    async fn connect(&self) -> Result<Box<dyn ShutdownSession>, String>;
}

/// A connection to the service. Errors are in words.
#[async_trait]
pub trait ShutdownSession: Send + Sync {
    /// The longest time that it waits for locks.
    async fn max_delay(&self) -> Result<Duration, String>;
    /// Has it wait longer; taken up a moment later.
    async fn set_max_delay(&self, delay: Duration) -> Result<(), String>;
    /// Whether a shutdown is under way.
    async fn is_shutting_down(&self) -> Result<bool, String>;
    /// A lock: the shutdown is held up until it is dropped.
    async fn inhibit(&self) -> Result<Lock, String>;
    /// True when a shutdown begins, false when it was called off; ends when the service has gone.
    async fn shutdowns(&self) -> Result<BoxStream<'static, bool>, String>;
}

/// What holds a shutdown up until it is dropped.
pub type Lock = Box<dyn Send + Sync>;

/// A pod that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivePod {
    /// Its UID.
    pub uid: PodUid,
    /// `NAME_NAMESPACE`, for the log.
    pub name: String,
    /// `spec.priority`.
    pub priority: i32,
    /// `spec.terminationGracePeriodSeconds`.
    pub grace: Option<i64>,
}

/// The pods of the node, for who ends them.
#[async_trait]
pub trait NodePods: Send + Sync {
    /// Those that have not ended.
    fn active(&self) -> Vec<ActivePod>;
    /// Ends a pod because the node shuts down, with this grace in seconds. Returns when it has ended and its volumes are unmounted; who gives up waiting
    /// changes nothing about the end.
    async fn end(&self, uid: &PodUid, grace: i64);
    /// From now on new pods are refused, or not any more.
    async fn refuse(&self, shutting_down: bool);
}

/// Where the times of the last shutdown are kept. Errors are in words.
#[async_trait]
pub trait StateFile: Send + Sync {
    /// The content; None: there was no shutdown.
    async fn read(&self) -> Result<Option<Vec<u8>>, String>;
    /// Written as a whole or not at all.
    async fn write(&self, content: Vec<u8>) -> Result<(), String>;
}

/// What the task works with.
pub struct ShutdownPorts {
    /// The service.
    pub service: Arc<dyn ShutdownService>,
    /// The pods.
    pub pods: Arc<dyn NodePods>,
    /// Gate GracefulNodeShutdownBasedOnPodPriority: the times of a shutdown are kept here, and shown.
    pub state: Option<Arc<dyn StateFile>>,
    /// Where events go.
    pub events: Arc<dyn NodeEvents>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// The clock.
    pub clock: Clock,
}

/// Starts the task. `periods`: see [`shutdown::periods`]; without any, shutdowns are not held up. `not_ready` shows why the node is not ready while it shuts
/// down.
pub fn start(periods: Vec<Period>, ports: ShutdownPorts, not_ready: watch::Sender<Vec<String>>, tasks: &Tasks) {
    if !periods.is_empty() {
        info!(
            shutdownGracePeriodRequested = ?shutdown::requested(&periods),
            shutdownGracePeriodByPodPriority = ?periods,
            "Creating node shutdown manager"
        );
        let keeper = Keeper { periods, ports, not_ready };
        tasks.spawn_until_stop(keeper.run());
    }
}

struct Keeper {
    periods: Vec<Period>,
    ports: ShutdownPorts,
    not_ready: watch::Sender<Vec<String>>,
}

/// What a session holds.
struct Session {
    service: Box<dyn ShutdownSession>,
    events: BoxStream<'static, bool>,
    lock: Option<Lock>,
}

impl Keeper {
    async fn run(self) {
        self.show_last().await;
        let mut pause = RECONNECT.0;
        let mut failing: Option<String> = None;
        loop {
            match self.open().await {
                Ok(session) => {
                    if failing.take().is_some() {
                        info!("The node is watched for shutdown events again");
                    }
                    pause = RECONNECT.0;
                    self.serve(session).await;
                    warn!("Ended to watching the node for shutdown events");
                }
                Err(why) => {
                    if failing.as_ref() != Some(&why) {
                        error!(err = why, "Unable to watch the node for shutdown events");
                    }
                    failing = Some(why);
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT.1);
        }
    }

    /// The times of the last shutdown, as figures.
    async fn show_last(&self) {
        let Some(file) = &self.ports.state else { return };
        let times = match file.read().await {
            Ok(None) => return,
            Ok(Some(content)) => Times::decode(&content),
            Err(why) => Err(why),
        };
        match times {
            Ok(times) => self.ports.metrics.graceful_shutdown(seconds(times.start), seconds(times.end)),
            Err(why) => error!(err = why, "Failed to load graceful shutdown state"),
        }
    }

    /// Connects, has the service wait long enough, and takes a lock.
    async fn open(&self) -> Result<Session, String> {
        let service = self.ports.service.connect().await?;
        let requested = shutdown::requested(&self.periods);
        if service.max_delay().await? < requested {
            service.set_max_delay(requested).await?;
            let (looks, mut pause) = TAKEN_UP;
            let mut now = Duration::ZERO;
            for _ in 0..looks {
                now = service.max_delay().await?;
                if now >= requested {
                    break;
                }
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            if now < requested {
                return Err(format!(
                    "node shutdown manager was timed out after {looks} attempts waiting for logind InhibitDelayMaxSec to update to \
                     {} (ShutdownGracePeriod), current value is {}",
                    decide::text::go_duration(requested),
                    decide::text::go_duration(now)
                ));
            }
        }
        let events = service.shutdowns().await?;
        let lock = service.inhibit().await?;
        // One that began before the subscription is told by nobody.
        let events = match service.is_shutting_down().await? {
            true => futures::stream::iter([true]).chain(events).boxed(),
            false => events,
        };
        Ok(Session { service, events, lock: Some(lock) })
    }

    /// Acts on the service's events until they end.
    async fn serve(&self, mut session: Session) {
        let mut shutting_down = false;
        let mut next = session.events.next().await;
        while let Some(event) = next {
            // Said twice, or called off before it began: nothing changes.
            if event == shutting_down {
                next = session.events.next().await;
                continue;
            }
            shutting_down = event;
            self.tell(event).await;
            if !event {
                match session.service.inhibit().await {
                    Ok(lock) => session.lock = Some(lock),
                    // Without a lock this session is of no use.
                    Err(why) => return error!(err = why, "Unable to hold up the next shutdown"),
                }
                next = session.events.next().await;
                continue;
            }
            // Called off under way: pods whose end has not begun stay.
            next = {
                let ended = self.end_pods();
                tokio::pin!(ended);
                let mut heard = None;
                let mut over = false;
                while heard.is_none() {
                    tokio::select! {
                        () = &mut ended, if !over => {
                            over = true;
                            session.lock = None;
                            info!("Shutdown manager completed processing shutdown event, node will shutdown shortly");
                        }
                        event = session.events.next() => match event {
                            Some(true) => {}
                            other => heard = Some(other),
                        },
                    }
                }
                heard.flatten()
            };
        }
        if shutting_down {
            // Whether the machine still goes down is not known; a node that lives on must not stay away.
            self.tell(false).await;
        }
    }

    /// Tells everybody that the node shuts down, or not any more.
    async fn tell(&self, shutting_down: bool) {
        let text = if shutting_down {
            "Shutdown manager detected shutdown event"
        } else {
            "Shutdown manager detected shutdown cancellation"
        };
        info!("{text}");
        self.ports.events.event(&NodeEvent::shutdown(text));
        self.not_ready.send_replace(if shutting_down { vec![NOT_READY.to_owned()] } else { Vec::new() });
        self.ports.pods.refuse(shutting_down).await;
    }

    /// Ends all pods, group after group, and notes when.
    async fn end_pods(&self) {
        let mut times = Times { start: Some(self.ports.clock.now()), end: None };
        self.store(times).await;
        let pods = self.ports.pods.active();
        for (period, group) in shutdown::groups(&self.periods, pods, |p| p.priority) {
            let ends = group.iter().map(|pod| {
                let grace = shutdown::grace(period, pod.grace);
                info!(pod = pod.name, gracePeriod = grace, "Shutdown manager killing pod with gracePeriod");
                self.ports.pods.end(&pod.uid, grace)
            });
            let time = Duration::from_secs(period.seconds.unsigned_abs());
            let (grace, priority) = (period.seconds, period.priority);
            match tokio::time::timeout(time, join_all(ends)).await {
                Ok(_) => info!(gracePeriod = grace, priority, "Done waiting for all pods in group to terminate"),
                Err(_) => info!(gracePeriod = grace, priority, "Shutdown manager pod killing time out"),
            }
        }
        times.end = Some(self.ports.clock.now());
        self.store(times).await;
    }

    async fn store(&self, times: Times) {
        let Some(file) = &self.ports.state else { return };
        if let Err(why) = file.write(times.encode()).await {
            error!(err = why, "Failed to store graceful shutdown state");
        }
        self.ports.metrics.graceful_shutdown(seconds(times.start), seconds(times.end));
    }
}

/// Seconds since the epoch; 0: none.
fn seconds(at: Option<jiff::Timestamp>) -> i64 {
    at.map_or(0, |at| at.as_second())
}

#[cfg(test)]
#[path = "shutdown_tests.rs"]
mod tests;
