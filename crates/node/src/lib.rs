//! The node at the API server: its object, its status and its lease.
//!
//! ```text
//!   object watch ──▶ newest Node ──▶ admission, pods, …
//!                        │
//!   runtime's facts ──▶ keeper ──▶ registration, then PATCH of /status
//!                        │
//!                      lease ──▶ PUT every quarter of its duration
//! ```
//!
//! What is written is decided in [`decide::node`]; here it is read, timed and sent. Only this crate writes the Node. Idle, the node costs
//! one PUT of the lease and one comparison every 10 s.
//!
//! Beside it, what protects the node, with an API server or without: the collection of images ([`images`]), and
//! the node's graceful shutdown ([`shutdown`]).

mod csi_node;
pub mod eviction;
pub mod images;
mod keeper;
mod lease;
mod object;
mod registration;
mod runtime;
pub mod shutdown;
mod status;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use cluster::calls::{LeaseApi, NodeApi};
use cluster::reflect::{Collection, ReflectorStatus};
use cri::port::RuntimeReader;
use decide::node::csi::Drivers;
use decide::node::{Identity, MachineFacts, NodeAddresses, NodeEvent, Pressures};
use model::api::Node;
use pod::pleg::Health;
use pod::ports::{Clock, Random, Tasks};
use tokio::sync::watch;

/// What is configured about the node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Who the node is and how it registers.
    pub identity: Identity,
    /// `registerNode`: make the object; else somebody else does, and it is only kept up to date.
    pub register: bool,
    /// `nodeStatusUpdateFrequency`: how often it is looked whether the status changed.
    pub update_period: Duration,
    /// `nodeStatusReportFrequency`: how often it is written when it did not.
    pub report_period: Duration,
    /// `nodeStatusMaxImages`; -1: all.
    pub max_images: i32,
    /// `nodeLeaseDurationSeconds`.
    pub lease_duration: Duration,
    /// `localStorageCapacityIsolation`: a node without ephemeral-storage is not ready.
    pub local_storage: bool,
    /// Features that the node says it has (gate NodeDeclaredFeatures; empty without it).
    pub declared_features: Vec<String>,
}

/// Tells events about the node.
pub trait NodeEvents: Send + Sync {
    /// Tells one; never waits.
    fn event(&self, event: &NodeEvent);
}

/// Events of a node that nobody hears of: without an API server they are in the log alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl NodeEvents for NoEvents {
    fn event(&self, _: &NodeEvent) {}
}

/// Finds the node's addresses. May block as long as a resolver does: it runs on a thread for that.
pub type FindAddresses = Arc<dyn Fn() -> Result<NodeAddresses, String> + Send + Sync>;

/// What the tasks work with.
pub struct NodePorts {
    /// Registration: the client with the ordinary deadline and rate limit.
    pub nodes: Arc<dyn NodeApi>,
    /// The node's status: a client with the deadline [`NodeConfig::heartbeat_deadline`] and no rate limit.
    pub heartbeat: Arc<dyn NodeApi>,
    /// The lease: a client with the deadline [`NodeConfig::heartbeat_deadline`] and no rate limit.
    pub leases: Arc<dyn LeaseApi>,
    /// The node's object as a collection of one.
    pub collection: Arc<dyn Collection<Node>>,
    /// Cuts all connections to the API server ([`cluster::Client::close_connections`]): heartbeats fail again and again without an
    /// answer, so the connection may lead nowhere.
    pub cut_connections: Arc<dyn Fn() + Send + Sync>,
    /// Version, handlers, features and images of the runtime.
    pub runtime: Arc<dyn RuntimeReader>,
    /// How the runtime is doing.
    pub health: watch::Receiver<Health>,
    /// Counts up whenever an image was pulled or removed.
    pub images_changed: watch::Receiver<u64>,
    /// What the machine is.
    pub machine: watch::Receiver<Arc<MachineFacts>>,
    /// The node's addresses.
    pub addresses: FindAddresses,
    /// Shortages.
    pub pressures: watch::Receiver<Pressures>,
    /// Reasons against readiness besides the runtime's: shutdown, storage.
    pub not_ready: watch::Receiver<Vec<String>>,
    /// Drivers of volumes; None: the node has no CSINode, and nobody waits for one.
    pub drivers: Option<watch::Receiver<Arc<Drivers>>>,
    /// Volumes in use, by unique name, sorted.
    pub volumes_in_use: watch::Receiver<Arc<Vec<String>>>,
    /// Where events go.
    pub events: Arc<dyn NodeEvents>,
    /// The clock.
    pub clock: Clock,
    /// Randomness.
    pub random: Random,
}

/// What others get of the node.
#[derive(Clone, Debug)]
pub struct NodeHandles {
    /// The newest Node object as the API server has it; None before it is known, and while there is none.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// How the watch of that object is doing.
    pub watching: watch::Receiver<ReflectorStatus>,
    /// The volumes that the API server was last told to be in use: a volume may be mounted when it is among them.
    pub volumes_reported: watch::Receiver<Arc<Vec<String>>>,
}

impl NodeConfig {
    /// Deadline of a status or lease request: the update period, or the lease's duration when that is shorter.
    pub fn heartbeat_deadline(&self) -> Duration {
        self.update_period.min(self.lease_duration)
    }
}

/// Starts the node's tasks.
pub fn start(config: NodeConfig, ports: NodePorts, tasks: &Tasks) -> NodeHandles {
    let object = object::start(&config.identity.name, ports.collection.clone(), &ports.random, tasks);
    let (node, watching) = (object.node(), object.watching());
    lease::start(&config, &ports, object.clone(), tasks);
    let csi_ready = ports
        .drivers
        .clone()
        .map(|drivers| csi_node::start(ports.nodes.clone(), object.node(), drivers, &ports.random, tasks));
    let volumes_reported = keeper::start(config, ports, object, csi_ready, tasks);
    NodeHandles { node, watching, volumes_reported }
}
