//! The owner of the node's ledger: admits one pod at a time, writes the allocation down, then releases the pod to its worker.
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. Queue: 64 requests; the dispatcher waits for answers, workers do not. A batch of admissions costs one
//! checkpoint write. A checkpoint that cannot be written is logged and written with the next change: admission goes by the ledger in memory.
//!
//! The `allocated` checkpoint holds what each pod was admitted with, the `actuated` one what its containers were created with; both have
//! the Go kubelet's names and format, so that either agent can take over.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use decide::admission::{Admitted, Ledger, NodeFacts, Refusal, Rules};
use decide::resources::ResourceList;
use manifest::checkpoint::{self, PodAllocation};
use model::api::{Node, ResourceRequirements, Taint};
use model::pod::{ContainerKind, DesiredPod, PodUid};
use model::quantity::Quantity;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use crate::ports::{HostResult, PodHost, Tasks};

/// File name of the allocated checkpoint under the root directory.
pub const ALLOCATED: &str = "allocated_pods_state";
/// File name of the actuated checkpoint under the root directory.
pub const ACTUATED: &str = "actuated_pods_state";
/// Actuations are written together this long after the first; the next start of the agent tolerates their absence.
const ACTUATED_DELAY: Duration = Duration::from_millis(200);

enum Request {
    Node(Box<Seen>),
    Pressures(Vec<String>),
    Admit(Vec<DesiredPod>, oneshot::Sender<Vec<Verdict>>),
    ShuttingDown(bool),
    Actuated(PodUid, String, Box<ResourceRequirements>),
    Ended(PodUid),
    Release(PodUid),
    Retain(BTreeSet<PodUid>),
}

/// What the Node object at the API server says that admission goes by.
struct Seen {
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    allocatable: ResourceList,
}

/// What becomes of a pod.
pub type Verdict = Result<Admitted, Refusal>;

/// The way to the ledger's owner.
#[derive(Clone)]
pub struct AdmitHandle(mpsc::Sender<Request>);

impl AdmitHandle {
    /// Admits pods in this order; one verdict each. When the owner is gone (the agent stops), every pod is refused.
    pub async fn admit(&self, pods: Vec<DesiredPod>) -> Vec<Verdict> {
        let count = pods.len();
        let (reply, answer) = oneshot::channel();
        let sent = self.0.send(Request::Admit(pods, reply)).await;
        match (sent, answer.await) {
            (Ok(()), Ok(verdicts)) => verdicts,
            _ => {
                vec![
                    Err(Refusal { reason: "UnexpectedAdmissionError".into(), message: "the agent is stopping".into() });
                    count
                ]
            }
        }
    }

    /// From now on the node is as its object at the API server says: others may have labelled or tainted it, or given it resources.
    pub async fn node(&self, node: &Node) {
        let allocatable = node.status.as_ref().and_then(|s| s.allocatable.clone()).unwrap_or_default();
        let seen = Seen {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: node.spec.as_ref().and_then(|s| s.taints.clone()).unwrap_or_default(),
            allocatable: allocatable
                .iter()
                .filter_map(|(name, q)| Some((name.clone(), Quantity::of(q).ok()?)))
                .collect(),
        };
        let _ = self.0.send(Request::Node(Box::new(seen))).await;
    }

    /// From now on the node is under these pressures (`MemoryPressure`, …), in any order.
    pub async fn pressures(&self, pressures: Vec<String>) {
        let _ = self.0.send(Request::Pressures(pressures)).await;
    }

    /// While the node shuts down no pod is admitted.
    pub async fn shutting_down(&self, now: bool) {
        let _ = self.0.send(Request::ShuttingDown(now)).await;
    }

    /// Notes the resources that a container was created with.
    pub async fn actuated(&self, uid: &PodUid, container: &str, resources: ResourceRequirements) {
        let _ = self.0.send(Request::Actuated(uid.clone(), container.to_owned(), Box::new(resources))).await;
    }

    /// The pod can run nothing any more: it uses no room, though its source still holds it.
    pub async fn ended(&self, uid: &PodUid) {
        let _ = self.0.send(Request::Ended(uid.clone())).await;
    }

    /// Forgets the allocations of pods that are not among these: they went while no agent was there to see it.
    pub async fn retain(&self, known: BTreeSet<PodUid>) {
        let _ = self.0.send(Request::Retain(known)).await;
    }

    /// The pod is gone: its room is free and its allocation forgotten.
    pub async fn release(&self, uid: PodUid) {
        let _ = self.0.send(Request::Release(uid)).await;
    }
}

/// The checkpoints as read at start.
#[derive(Debug, Default)]
pub struct Restored {
    /// Content of the allocated checkpoint.
    pub allocated: BTreeMap<String, PodAllocation>,
    /// Content of the actuated checkpoint.
    pub actuated: BTreeMap<String, PodAllocation>,
}

/// Reads both checkpoints; absent ones are empty.
///
/// # Errors
/// A corrupt one, with the remedy: the agent does not guess at what was allocated.
pub async fn restore(host: &dyn PodHost, root: &std::path::Path) -> Result<Restored, String> {
    let mut restored = Restored::default();
    for (name, into) in [(ALLOCATED, &mut restored.allocated), (ACTUATED, &mut restored.actuated)] {
        let path = root.join(name);
        let bytes = host.read_file(&path).await.map_err(|e| e.chain())?;
        if let Some(bytes) = bytes {
            *into = checkpoint::decode_allocations(&bytes).map_err(|e| {
                format!(
                    "checkpoint {} is corrupt ({e}): drain this node and delete the file to start afresh",
                    path.display()
                )
            })?;
        }
    }
    Ok(restored)
}

struct Admitter {
    ledger: Ledger,
    node: NodeFacts,
    rules: Rules,
    host: Arc<dyn PodHost>,
    root: PathBuf,
    allocated: BTreeMap<String, PodAllocation>,
    actuated: BTreeMap<String, PodAllocation>,
    allocated_dirty: bool,
    actuated_dirty: bool,
}

/// Starts the owner of the ledger.
pub fn start(
    node: NodeFacts,
    rules: Rules,
    restored: Restored,
    host: Arc<dyn PodHost>,
    root: PathBuf,
    tasks: &Tasks,
) -> AdmitHandle {
    let (tx, rx) = mpsc::channel(64);
    let admitter = Admitter {
        ledger: Ledger::default(),
        node,
        rules,
        host,
        root,
        allocated: restored.allocated,
        actuated: restored.actuated,
        allocated_dirty: false,
        actuated_dirty: false,
    };
    let stop = tasks.stop().clone();
    tasks.spawn(async move { admitter.run(rx, stop).await });
    AdmitHandle(tx)
}

impl Admitter {
    async fn run(mut self, mut requests: mpsc::Receiver<Request>, stop: tokio_util::sync::CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                request = requests.recv() => match request {
                    Some(request) => self.handle(request).await,
                    None => break,
                },
                () = tokio::time::sleep(ACTUATED_DELAY), if self.allocated_dirty || self.actuated_dirty => self.save().await,
            }
        }
        self.save().await;
    }

    async fn handle(&mut self, request: Request) {
        match request {
            Request::Admit(pods, reply) => {
                let mut verdicts = Vec::with_capacity(pods.len());
                for pod in &pods {
                    let verdict = self.ledger.admit(pod, &self.node, &self.rules);
                    if verdict.is_ok() {
                        self.allocated.insert(pod.uid().to_string(), allocation(pod));
                        self.allocated_dirty = true;
                    }
                    verdicts.push(verdict);
                }
                // Written before the worker may act on it.
                self.save().await;
                let _ = reply.send(verdicts);
            }
            Request::Node(seen) => {
                self.node.labels = seen.labels;
                self.node.taints = seen.taints;
                // What the object does not tell yet is as this host found it.
                self.node.allocatable.extend(seen.allocatable);
            }
            Request::Pressures(mut pressures) => {
                pressures.sort();
                self.node.pressures = pressures;
            }
            Request::ShuttingDown(now) => self.rules.shutting_down = now,
            Request::Actuated(uid, container, resources) => {
                let level = self.allocated.get(uid.as_str()).and_then(|pod| pod.pod_level.clone());
                let pod = self.actuated.entry(uid.to_string()).or_default();
                pod.pod_level = level;
                pod.containers.insert(container, *resources);
                self.actuated_dirty = true;
            }
            Request::Retain(known) => {
                for (allocations, dirty) in
                    [(&mut self.allocated, &mut self.allocated_dirty), (&mut self.actuated, &mut self.actuated_dirty)]
                {
                    let before = allocations.len();
                    allocations.retain(|uid, _| known.contains(&PodUid::new(uid.as_str())));
                    *dirty |= allocations.len() != before;
                }
            }
            Request::Ended(uid) => self.ledger.release(&uid),
            Request::Release(uid) => {
                self.ledger.release(&uid);
                self.allocated_dirty |= self.allocated.remove(uid.as_str()).is_some();
                self.actuated_dirty |= self.actuated.remove(uid.as_str()).is_some();
            }
        }
    }

    async fn save(&mut self) {
        if self.allocated_dirty {
            self.allocated_dirty = !saved(ALLOCATED, self.write(ALLOCATED, &self.allocated).await);
        }
        if self.actuated_dirty {
            self.actuated_dirty = !saved(ACTUATED, self.write(ACTUATED, &self.actuated).await);
        }
    }

    async fn write(&self, name: &str, content: &BTreeMap<String, PodAllocation>) -> HostResult<()> {
        self.host.write_atomic(&self.root.join(name), checkpoint::encode_allocations(content), 0o600).await
    }
}

fn saved(name: &str, result: HostResult<()>) -> bool {
    if let Err(e) = &result {
        warn!(checkpoint = name, err = e.chain(), "Checkpoint cannot be written, the next change tries again");
    }
    result.is_ok()
}

/// What a pod is admitted with: the resources of every container but ephemeral ones.
fn allocation(pod: &DesiredPod) -> PodAllocation {
    let containers = pod
        .containers()
        .filter(|c| c.kind != ContainerKind::Ephemeral)
        .map(|c| (c.spec.name.clone(), c.spec.resources.clone().unwrap_or_default()))
        .collect();
    PodAllocation { containers, pod_level: pod.spec().resources.clone() }
}
