//! Keeps the node's object true: registers it, then writes its status whenever that changes.
//!
//! Task: owned by [`start`], ends with [`Tasks::stop`] (a write cut off is found out and done again by the next agent). Inputs: watch
//! channels with whole values, so no queue; time. Deadline: the client's for each request. API server slow or gone: what changes
//! meanwhile is written as one patch when it is back. Runtime gone: the node becomes NotReady by the time of its last answer.

use std::sync::Arc;
use std::time::Duration;

use cluster::ClusterError;
use cluster::calls::NodeApi;
use decide::node::csi;
use decide::node::{Composed, NodeEvent, NodeRuntime, Pressures, StatusFacts, compose, is_ready, missing_capacity};
use decide::pleg::ready_message;
use jiff::Timestamp;
use model::api::{Node, NodeStatus};
use pod::ports::{Random, Tasks};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::object::NodeObject;
use crate::runtime::{self, Found};
use crate::status::Reports;
use crate::{NodeConfig, NodePorts};

/// A tick is this much later at most.
const JITTER: f64 = 0.04;
/// At start, how long the runtime's first answers are waited for before the node is called not ready.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// Changes that come within this time go into one patch.
const TOGETHER: Duration = Duration::from_secs(1);

pub(crate) struct Keeper {
    pub(crate) config: NodeConfig,
    pub(crate) ports: NodePorts,
    pub(crate) object: NodeObject,
    /// There is a CSINode; None: nobody waits for one.
    csi_ready: Option<watch::Receiver<bool>>,
    pub(crate) found: Found,
    pub(crate) reports: Reports,
    /// The object was registered, or found, once.
    pub(crate) registered: bool,
    /// The node was cordoned when last seen.
    unschedulable: bool,
    /// UID of the object that was last looked at; another one is looked at without waiting for the tick.
    pub(crate) uid: Option<String>,
    /// Ready as last written.
    pub(crate) ready: bool,
    /// Why the last write failed, while it does.
    pub(crate) failing: Option<String>,
    pub(crate) volumes_reported: watch::Sender<Arc<Vec<String>>>,
}

/// Starts the task; the volumes that the API server was last told to be in use.
pub(crate) fn start(
    config: NodeConfig,
    ports: NodePorts,
    object: NodeObject,
    csi_ready: Option<watch::Receiver<bool>>,
    tasks: &Tasks,
) -> watch::Receiver<Arc<Vec<String>>> {
    let found = runtime::start(
        ports.runtime.clone(),
        config.max_images,
        ports.health.clone(),
        ports.images_changed.clone(),
        ports.addresses.clone(),
        tasks,
    );
    let (volumes_reported, receiver) = watch::channel(Arc::default());
    let reports = Reports::new(config.report_period);
    let keeper = Keeper {
        config,
        ports,
        object,
        csi_ready,
        found,
        reports,
        registered: false,
        unschedulable: false,
        uid: None,
        ready: false,
        failing: None,
        volumes_reported,
    };
    tasks.spawn_until_stop(keeper.run());
    receiver
}

/// Waits for another value; for ever when there is none to come.
async fn news<T>(of: Option<&mut watch::Receiver<T>>) {
    match of {
        Some(of) => {
            if of.changed().await.is_err() {
                std::future::pending().await
            }
        }
        None => std::future::pending().await,
    }
}

impl Keeper {
    async fn run(mut self) {
        let _ = tokio::time::timeout(FIRST_LOOK, self.first_look()).await;
        loop {
            if self.must_register() {
                self.register().await;
            }
            self.update().await;
            self.wait().await;
        }
    }

    /// Waits until it is known what the first status would say; else a restart of the agent would make the node NotReady for a moment.
    async fn first_look(&mut self) {
        let mut found = self.found.clone();
        let _ = found.runtime.wait_for(|r| r.images.is_some()).await;
        if !(self.config.identity.external_cloud && self.config.identity.given_ips().is_empty()) {
            let _ = found.addresses.wait_for(Option::is_some).await;
        }
        let _ = self.ports.health.wait_for(|h| h.last_status.is_some() && h.last_pass.is_some()).await;
    }

    /// Waits for the next tick, or for something that is to be told at once.
    async fn wait(&mut self) {
        let began = Instant::now();
        let mut next = began + self.ports.random.jitter(self.config.update_period, JITTER);
        let soon = began + TOGETHER;
        let mut object = self.object.node();
        // What came while the status was written is looked at anew, except that the written object came back.
        object.mark_unchanged();
        if self.see_object() {
            next = soon;
        }
        loop {
            let now = Instant::now().max(soon);
            tokio::select! {
                () = tokio::time::sleep_until(next) => return,
                Ok(()) = object.changed() => {
                    if self.see_object() {
                        next = next.min(now);
                    }
                }
                Ok(()) = self.ports.health.changed() => {
                    // It changes with every look at the runtime; only the verdict counts.
                    if self.not_ready(self.ports.clock.now()).is_none() != self.ready {
                        next = next.min(now);
                    }
                }
                Ok(()) = self.ports.not_ready.changed() => next = next.min(now),
                Ok(()) = self.ports.pressures.changed() => next = next.min(now),
                Ok(()) = self.ports.machine.changed() => next = next.min(now),
                Ok(()) = self.ports.volumes_in_use.changed() => next = next.min(now),
                () = news(self.ports.drivers.as_mut()) => next = next.min(now),
                // The node was told to be not ready for want of it.
                () = news(self.csi_ready.as_mut()) => return,
            }
        }
    }

    fn must_register(&self) -> bool {
        self.config.register && (!self.registered || self.object.is_absent())
    }

    /// Tells of a cordon or its end. True when the object is to be made, or is another than the one that was last looked at.
    fn see_object(&mut self) -> bool {
        let Some(node) = self.object.newest() else { return self.must_register() };
        let unschedulable = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or_default();
        if std::mem::replace(&mut self.unschedulable, unschedulable) != unschedulable {
            let reason = if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" };
            self.tell(&[NodeEvent::status_is(&self.config.identity.name, reason)]);
        }
        node.metadata.uid != self.uid
    }

    pub(crate) fn tell(&self, events: &[NodeEvent]) {
        for event in events {
            self.ports.events.event(event);
        }
    }

    /// Why the node is not ready; None: it is.
    fn not_ready(&self, now: Timestamp) -> Option<String> {
        let mut others = self.ports.not_ready.borrow().clone();
        if self.csi_ready.as_ref().is_some_and(|ready| !*ready.borrow()) {
            others.push(csi::UNINITIALIZED.to_owned());
        }
        others.extend(missing_capacity(&self.ports.machine.borrow(), self.config.local_storage));
        ready_message(&self.ports.health.borrow().facts(), &others, now)
    }

    /// The status as it is to be now.
    pub(crate) fn compose(&mut self, old: &NodeStatus) -> Composed {
        let now = self.ports.clock.now();
        let not_ready = self.not_ready(now);
        let pressures: Pressures = *self.ports.pressures.borrow_and_update();
        let machine = self.ports.machine.borrow_and_update().clone();
        let runtime: Arc<NodeRuntime> = self.found.runtime.borrow().clone();
        let volumes = self.ports.volumes_in_use.borrow_and_update().clone();
        let addresses = self.found.addresses.borrow();
        let facts = StatusFacts {
            identity: &self.config.identity,
            machine: &machine,
            runtime: &runtime,
            addresses: addresses.as_ref(),
            pressures,
            not_ready: not_ready.as_deref(),
            volumes_in_use: &volumes,
            declared_features: &self.config.declared_features,
        };
        compose(&facts, old, now)
    }

    /// Takes in the object that a write gave back.
    pub(crate) fn written(&mut self, node: Node) {
        let status = node.status.as_ref();
        self.ready = is_ready(status.and_then(|s| s.conditions.as_ref()));
        let volumes = status.and_then(|s| s.volumes_in_use.clone()).unwrap_or_default();
        self.volumes_reported.send_if_modified(|known| {
            let changed = **known != volumes;
            if changed {
                *known = Arc::new(volumes);
            }
            changed
        });
        self.object.offer(node);
    }

    /// The same failure again and again is worth one line.
    pub(crate) fn failed(&mut self, what: &'static str, error: &ClusterError) {
        let node = self.config.identity.name.as_str();
        let text = error.to_string();
        if self.failing.as_ref() == Some(&text) || error.kind.concerns_every_call() {
            tracing::debug!(err = text, node, "{what}");
        } else {
            tracing::error!(err = text, node, "{what}, will retry");
            self.failing = Some(text);
        }
    }

    pub(crate) fn went_well(&mut self) {
        if self.failing.take().is_some() {
            tracing::info!(node = self.config.identity.name, "The node's object is up to date again");
        }
    }

    pub(crate) fn random(&self) -> Random {
        self.ports.random.clone()
    }

    pub(crate) fn heartbeat(&self) -> Arc<dyn NodeApi> {
        self.ports.heartbeat.clone()
    }
}
