//! An API server with one node and one lease, and everything else that the tasks need, for tests on a paused clock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cluster::calls::{LeaseApi, NodeApi};
use cluster::error::{ClusterError, ClusterResult, ErrorKind};
use cluster::reflect::{Collection, ListAsk, Page, Scope, WatchAsk, WatchEvent, WatchStream};
use cri_api::v1;
use decide::node::{Identity, MachineFacts, NodeAddresses, NodeEvent, Pressures};
use fakes::FakeRuntime;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::CSINode;
use model::api::{Node, ObjectMeta, Time};
use model::machine::Machine;
use model::quantity::Quantity;
use pod::pleg::Health;
use pod::ports::{Clock, Random, Tasks};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, watch};

use crate::{NodeConfig, NodeEvents, NodeHandles, NodePorts};

/// A node with nothing but an identity.
pub(crate) fn node(name: &str, uid: &str, version: &str) -> Node {
    Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    }
}

/// An error as the API server or the way to it gives it.
pub(crate) fn error(kind: ErrorKind, code: u16, reason: &str) -> ClusterError {
    ClusterError { code, reason: reason.into(), ..ClusterError::new("call", kind, format!("{kind:?} {reason}")) }
}

/// What a request that contains `on` meets.
pub(crate) struct Fault {
    pub(crate) on: &'static str,
    pub(crate) error: ClusterError,
    pub(crate) after: Duration,
}

#[derive(Default)]
struct State {
    version: u64,
    node: Option<Node>,
    lease: Option<Lease>,
    watchers: Vec<mpsc::UnboundedSender<ClusterResult<WatchEvent<Node>>>>,
    faults: VecDeque<Fault>,
    requests: Vec<(String, Value)>,
}

/// The API server.
#[derive(Default)]
pub(crate) struct FakeApi {
    state: Mutex<State>,
    pub(crate) cuts: AtomicUsize,
}

fn encoded(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

/// A strategic merge, as far as nodes need it.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    for (key, change) in patch.iter().filter(|(key, _)| !key.starts_with('$')) {
        match (key.as_str(), change) {
            (_, Value::Null) => drop(into.as_object_mut().unwrap().remove(key)),
            ("conditions", Value::Array(changes)) => {
                if !into[key].is_array() {
                    into[key] = Value::Array(vec![]);
                }
                let list = into[key].as_array_mut().unwrap();
                for change in changes {
                    match list.iter_mut().find(|c| c["type"] == change["type"]) {
                        Some(old) => merge(old, change),
                        None => list.push(change.clone()),
                    }
                }
            }
            ("addresses", Value::Array(list)) => {
                into[key] = list.iter().filter(|a| a.get("$patch").is_none()).cloned().collect();
            }
            (_, change) => merge(&mut into[key], change),
        }
    }
}

impl FakeApi {
    /// Notes a request; the fault that it meets.
    async fn enter(&self, request: String, body: Value) -> ClusterResult<()> {
        let fault = {
            let mut state = self.state.lock().unwrap();
            let at = state.faults.iter().position(|f| request.contains(f.on));
            let fault = at.and_then(|at| state.faults.remove(at));
            state.requests.push((request, body));
            fault
        };
        match fault {
            Some(fault) => {
                tokio::time::sleep(fault.after).await;
                Err(fault.error)
            }
            None => Ok(()),
        }
    }

    fn publish(state: &mut State, event: &WatchEvent<Node>) {
        state.watchers.retain(|w| w.send(Ok(event.clone())).is_ok());
    }

    fn put(state: &mut State, mut node: Node) -> Node {
        state.version += 1;
        node.metadata.resource_version = Some(state.version.to_string());
        state.node = Some(node.clone());
        Self::publish(state, &WatchEvent::Upsert(node.clone()));
        node
    }

    /// Makes the next requests that contain `on` fail.
    pub(crate) fn fail(&self, times: usize, on: &'static str, error: &ClusterError, after: Duration) {
        let mut state = self.state.lock().unwrap();
        state.faults.extend((0..times).map(|_| Fault { on, error: error.clone(), after }));
    }

    /// Changes the object, as others do.
    pub(crate) fn edit(&self, change: impl FnOnce(&mut Node)) {
        let mut state = self.state.lock().unwrap();
        let mut node = state.node.clone().unwrap();
        change(&mut node);
        Self::put(&mut state, node);
    }

    /// Makes the object, as others do.
    pub(crate) fn make(&self, mut node: Node) {
        let mut state = self.state.lock().unwrap();
        let uid = format!("uid-{}", state.version + 1);
        node.metadata.uid = Some(uid);
        Self::put(&mut state, node);
    }

    pub(crate) fn delete_node(&self) {
        let mut state = self.state.lock().unwrap();
        if let Some(node) = state.node.take() {
            state.version += 1;
            Self::publish(&mut state, &WatchEvent::Delete(node));
        }
    }

    pub(crate) fn delete_lease(&self) {
        self.state.lock().unwrap().lease = None;
    }

    pub(crate) fn edit_lease(&self, change: impl FnOnce(&mut Lease)) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        let lease = state.lease.as_mut().unwrap();
        change(lease);
        lease.metadata.resource_version = Some(version.to_string());
    }

    pub(crate) fn node(&self) -> Option<Node> {
        self.state.lock().unwrap().node.clone()
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        self.state.lock().unwrap().lease.clone()
    }

    /// Requests since the last call, without bodies.
    pub(crate) fn take(&self) -> Vec<String> {
        self.take_full().into_iter().map(|(request, _)| request).collect()
    }

    pub(crate) fn take_full(&self) -> Vec<(String, Value)> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

fn not_found() -> ClusterError {
    error(ErrorKind::NotFound, 404, "NotFound")
}

#[async_trait]
impl NodeApi for FakeApi {
    async fn get_node(&self, _: &str, from_cache: bool) -> ClusterResult<Node> {
        self.enter(format!("get node{}", if from_cache { " cached" } else { "" }), Value::Null).await?;
        self.node().ok_or_else(not_found)
    }

    async fn create_node(&self, node: &Node) -> ClusterResult<Node> {
        self.enter("create node".into(), encoded(node)).await?;
        let mut state = self.state.lock().unwrap();
        if state.node.is_some() {
            return Err(error(ErrorKind::Conflict, 409, "AlreadyExists"));
        }
        let mut node = node.clone();
        node.metadata.uid = Some(format!("uid-{}", state.version + 1));
        Ok(Self::put(&mut state, node))
    }

    async fn patch_node(&self, _: &str, _: &Value) -> ClusterResult<Node> {
        unreachable!("the status subresource takes everything")
    }

    async fn patch_node_status(&self, _: &str, patch: &Value) -> ClusterResult<Node> {
        self.enter("patch status".into(), patch.clone()).await?;
        let mut state = self.state.lock().unwrap();
        let mut value = encoded(state.node.as_ref().ok_or_else(not_found)?);
        merge(&mut value, patch);
        Ok(Self::put(&mut state, serde_json::from_value(value).unwrap()))
    }

    async fn get_csi_node(&self, _: &str) -> ClusterResult<CSINode> {
        unreachable!()
    }

    async fn create_csi_node(&self, _: &CSINode) -> ClusterResult<CSINode> {
        unreachable!()
    }

    async fn update_csi_node(&self, _: &CSINode) -> ClusterResult<CSINode> {
        unreachable!()
    }
}

#[async_trait]
impl LeaseApi for FakeApi {
    async fn get_lease(&self, _: &str, _: &str) -> ClusterResult<Lease> {
        self.enter("get lease".into(), Value::Null).await?;
        self.lease().ok_or_else(not_found)
    }

    async fn create_lease(&self, lease: &Lease) -> ClusterResult<Lease> {
        self.enter("create lease".into(), encoded(lease)).await?;
        let mut state = self.state.lock().unwrap();
        if state.lease.is_some() {
            return Err(error(ErrorKind::Conflict, 409, "AlreadyExists"));
        }
        state.version += 1;
        let mut lease = lease.clone();
        lease.metadata.uid = Some(format!("lease-{}", state.version));
        lease.metadata.resource_version = Some(state.version.to_string());
        state.lease = Some(lease.clone());
        Ok(lease)
    }

    async fn update_lease(&self, lease: &Lease) -> ClusterResult<Lease> {
        self.enter("update lease".into(), encoded(lease)).await?;
        let mut state = self.state.lock().unwrap();
        // As the real one: a lease that is gone fails the precondition of its uid.
        let same = state.lease.as_ref().is_some_and(|l| l.metadata.resource_version == lease.metadata.resource_version);
        if !same {
            return Err(error(ErrorKind::Conflict, 409, "Conflict"));
        }
        state.version += 1;
        let mut lease = lease.clone();
        lease.metadata.resource_version = Some(state.version.to_string());
        state.lease = Some(lease.clone());
        Ok(lease)
    }
}

#[async_trait]
impl Collection<Node> for FakeApi {
    async fn list(&self, _: &Scope, _: &ListAsk) -> ClusterResult<Page<Node>> {
        unreachable!("lists are streamed")
    }

    async fn watch(&self, scope: &Scope, _: &WatchAsk) -> ClusterResult<WatchStream<Node>> {
        assert_eq!(scope.field_selector.as_deref(), Some("metadata.name=n1"));
        self.enter("watch node".into(), Value::Null).await?;
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut state = self.state.lock().unwrap();
        if let Some(node) = state.node.clone() {
            sender.send(Ok(WatchEvent::Upsert(node))).unwrap();
        }
        let resource_version = state.version.to_string();
        sender.send(Ok(WatchEvent::Bookmark { resource_version, initial_events_end: true })).unwrap();
        state.watchers.push(sender);
        Ok(futures::stream::unfold(receiver, |mut r| async move { Some((r.recv().await?, r)) }).boxed())
    }

    async fn get(&self, _: Option<&str>, _: &str, _: bool) -> ClusterResult<Node> {
        unreachable!()
    }
}

/// Events as `REASON`, in order.
#[derive(Default)]
pub(crate) struct Told(Mutex<Vec<NodeEvent>>);

impl NodeEvents for Told {
    fn event(&self, event: &NodeEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl Told {
    /// Reasons since the last call.
    pub(crate) fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap()).into_iter().map(|e| e.reason).collect()
    }
}

/// A node with all its surroundings.
pub(crate) struct Rig {
    pub(crate) api: Arc<FakeApi>,
    pub(crate) told: Arc<Told>,
    pub(crate) clock: Clock,
    pub(crate) runtime: FakeRuntime,
    pub(crate) config: NodeConfig,
    pub(crate) health: watch::Sender<Health>,
    pub(crate) images_changed: watch::Sender<u64>,
    pub(crate) machine: watch::Sender<Arc<MachineFacts>>,
    pub(crate) pressures: watch::Sender<Pressures>,
    pub(crate) not_ready: watch::Sender<Vec<String>>,
    pub(crate) volumes: watch::Sender<Arc<Vec<String>>>,
    pub(crate) addresses: Arc<Mutex<Result<NodeAddresses, String>>>,
    pub(crate) tasks: Tasks,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let clock = Clock::virtual_from("2026-11-29T23:00:00Z".parse().unwrap());
        let amount = |text: &str| Quantity::parse(text).unwrap();
        let resources: decide::resources::ResourceList =
            [("cpu", "2"), ("memory", "4Gi"), ("ephemeral-storage", "9Gi"), ("pods", "110")]
                .map(|(n, q)| (n.to_owned(), amount(q)))
                .into();
        let machine = MachineFacts {
            capacity: resources.clone(),
            allocatable: resources,
            host: Machine { boot_id: "boot-1".into(), ..Machine::default() },
        };
        let config = NodeConfig {
            identity: Identity {
                name: "n1".into(),
                hostname: "n1".into(),
                architecture: "amd64".into(),
                kubelet_version: "v1.36.1".into(),
                port: 10250,
                controller_attaches: true,
                ..Identity::default()
            },
            register: true,
            update_period: Duration::from_secs(10),
            report_period: Duration::from_secs(300),
            max_images: 50,
            lease_duration: Duration::from_secs(40),
            local_storage: true,
            declared_features: vec![],
        };
        let addresses = NodeAddresses { ips: vec!["192.0.2.2".parse().unwrap()], hostname: "n1".into() };
        Self {
            api: Arc::default(),
            told: Arc::default(),
            runtime: FakeRuntime::new(1),
            config,
            health: watch::Sender::new(Self::good(clock.now())),
            clock,
            images_changed: watch::Sender::new(0),
            machine: watch::Sender::new(Arc::new(machine)),
            pressures: watch::Sender::default(),
            not_ready: watch::Sender::default(),
            volumes: watch::Sender::default(),
            addresses: Arc::new(Mutex::new(Ok(addresses))),
            tasks: Tasks::default(),
        }
    }

    fn good(now: Timestamp) -> Health {
        let condition = |name: &str| v1::RuntimeCondition { r#type: name.into(), status: true, ..Default::default() };
        Health {
            last_pass: Some(now),
            last_status: Some(now),
            conditions: Some(vec![condition("RuntimeReady"), condition("NetworkReady")]),
            handlers: None,
            evented: true,
            error: None,
        }
    }

    pub(crate) fn start(&self) -> NodeHandles {
        let (api, addresses) = (self.api.clone(), self.addresses.clone());
        let ports = NodePorts {
            drivers: None,
            nodes: self.api.clone(),
            heartbeat: self.api.clone(),
            leases: self.api.clone(),
            collection: self.api.clone(),
            cut_connections: Arc::new(move || {
                api.cuts.fetch_add(1, Ordering::Relaxed);
            }),
            runtime: Arc::new(self.runtime.clone()),
            health: self.health.subscribe(),
            images_changed: self.images_changed.subscribe(),
            machine: self.machine.subscribe(),
            addresses: Arc::new(move || addresses.lock().unwrap().clone()),
            pressures: self.pressures.subscribe(),
            not_ready: self.not_ready.subscribe(),
            volumes_in_use: self.volumes.subscribe(),
            events: self.told.clone(),
            clock: self.clock.clone(),
            random: Random::seeded(7),
        };
        // The runtime and the generator of pod events answer every 5 s.
        let (health, clock) = (self.health.clone(), self.clock.clone());
        self.tasks.spawn({
            let stop = self.tasks.stop().clone();
            async move {
                while !stop.is_cancelled() {
                    tokio::time::sleep(Duration::from_secs(5)).await;
                    let now = clock.now();
                    health.send_modify(|h| {
                        if h.error.is_none() {
                            (h.last_pass, h.last_status) = (Some(now), Some(now));
                        }
                    });
                }
            }
        });
        crate::start(self.config.clone(), ports, &self.tasks)
    }

    /// Lets time pass.
    pub(crate) async fn pass(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    /// The object's conditions as `TYPE=STATUS`.
    pub(crate) fn conditions(&self) -> Vec<String> {
        let status = self.api.node().and_then(|n| n.status).unwrap_or_default();
        status.conditions.into_iter().flatten().map(|c| format!("{}={}", c.type_, c.status)).collect()
    }

    /// A condition's message and the time of its last heartbeat.
    pub(crate) fn condition(&self, kind: &str) -> (String, Timestamp) {
        let status = self.api.node().and_then(|n| n.status).unwrap_or_default();
        let c = status.conditions.into_iter().flatten().find(|c| c.type_ == kind).unwrap();
        let Some(Time(heartbeat)) = c.last_heartbeat_time else { panic!("{kind} has no heartbeat") };
        (c.message.unwrap_or_default(), heartbeat)
    }
}
