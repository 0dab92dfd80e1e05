//! The owner of the node's ledger: admits one pod at a time, writes the allocation down, then releases the pod to its worker.
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. Queue: 64 requests; the dispatcher waits for answers, workers do not. A batch of admissions costs one
//! checkpoint write. A pod that needs an answer of a plugin holds up no other: its room is booked, and its verdict comes later, within the deadline of
//! the calls to plugins. A checkpoint that cannot be written is logged and written with the next change: admission goes by the ledger in memory.
//!
//! A pod that asks for other resources than it was given keeps a wish here ([`resize`]). Wishes are looked at when the dispatcher says so: at the wish, when
//! room became free ([`AdmitHandle::freed`]), and from time to time.
//!
//! The `allocated` checkpoint holds what each pod was given, at its admission or by a resize, the `actuated` one what its containers last got; both
//! have the Go kubelet's names and format, so that either agent can take over.

mod resize;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use decide::admission::{Admitted, Amounts, Ledger, NodeFacts, Refusal, Rules};
use decide::resize::{allocation_of, stored_pending};
use decide::resources::ResourceList;
use jiff::Timestamp;
use manifest::checkpoint;
use model::allocation::{PodAllocation, ResizeState};
use model::api::{Node, Taint};
use model::pod::{DesiredPod, PodUid};
use model::quantity::Quantity;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::warn;

use self::resize::Wish;
pub use self::resize::{Change, Outcome, Resized};
use crate::ports::{HostResult, PodHost, ResourceManagers, Tasks};

/// File name of the allocated checkpoint under the root directory.
pub const ALLOCATED: &str = "allocated_pods_state";
/// File name of the actuated checkpoint under the root directory.
pub const ACTUATED: &str = "actuated_pods_state";
/// Actuations are written together this long after the first; the next start of the agent tolerates their absence.
const ACTUATED_DELAY: Duration = Duration::from_millis(200);
/// When a checkpoint that could not be written is tried again, unless something changes before.
const AGAIN: Duration = Duration::from_secs(10);

enum Request {
    Node(Box<Seen>),
    Pressures(Vec<String>),
    ShuttingDown(bool),
    Admit(Vec<Candidate>, oneshot::Sender<Vec<Verdict>>),
    /// The managers have given a pod what it asks for, or refused it: the answer to the question of this number.
    Managed(PodUid, u64, Result<(), Refusal>),
    Wish(DesiredPod, Timestamp, oneshot::Sender<Resized>),
    AddWish(DesiredPod),
    RenewWish(DesiredPod),
    DropWish(PodUid),
    Retry(Timestamp, &'static str, oneshot::Sender<Resized>),
    Actuated(PodUid, Box<PodAllocation>, Option<oneshot::Sender<()>>),
    Settled(DesiredPod),
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

/// A pod that may run, and with what.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// What it was given.
    pub allocation: Arc<PodAllocation>,
    /// What its containers last got, from an earlier agent.
    pub actuated: PodAllocation,
    /// How its wish for other resources stands.
    pub resize: ResizeState,
    /// It asks for other resources than it was given.
    pub wishes: bool,
    /// What of the node's room it is given.
    pub room: Admitted,
}

/// A pod that asks to be admitted.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The pod.
    pub pod: DesiredPod,
    /// It runs since before this agent started.
    pub alive: bool,
}

/// Whether a pod may run.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is moved once, and most are of the large kind")]
pub enum Verdict {
    /// It is decided.
    Now(Result<Admission, Refusal>),
    /// A plugin is being asked; its room on the node is taken meanwhile.
    Later(oneshot::Receiver<Result<Admission, Refusal>>),
}

/// The way to the ledger's owner.
#[derive(Clone)]
pub struct AdmitHandle {
    requests: mpsc::Sender<Request>,
    freed: Arc<Notify>,
}

impl AdmitHandle {
    /// Admits pods in this order; one verdict each. When the owner is gone (the agent stops), every pod is refused.
    pub async fn admit(&self, pods: Vec<Candidate>) -> Vec<Verdict> {
        let count = pods.len();
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.send(Request::Admit(pods, reply)).await;
        match (sent, answer.await) {
            (Ok(()), Ok(verdicts)) => verdicts,
            _ => {
                let gone =
                    || Refusal { reason: "UnexpectedAdmissionError".into(), message: "the agent is stopping".into() };
                (0..count).map(|_| Verdict::Now(Err(gone()))).collect()
            }
        }
    }

    /// The pod asks for other resources than it was given: its wish and all others are looked at.
    pub async fn wish(&self, pod: DesiredPod, now: Timestamp) -> Resized {
        let (reply, answer) = oneshot::channel();
        let _ = self.requests.send(Request::Wish(pod, now, reply)).await;
        answer.await.unwrap_or_default()
    }

    /// The same, but nothing is looked at yet.
    pub async fn add_wish(&self, pod: DesiredPod) {
        let _ = self.requests.send(Request::AddWish(pod)).await;
    }

    /// The newest form of a pod whose wish stands.
    pub async fn renew_wish(&self, pod: DesiredPod) {
        let _ = self.requests.send(Request::RenewWish(pod)).await;
    }

    /// The pod wants nothing else any more.
    pub async fn drop_wish(&self, uid: &PodUid) {
        let _ = self.requests.send(Request::DropWish(uid.clone())).await;
    }

    /// Looks at all wishes again; `trigger` is why (label `retry_trigger`), unless room became free.
    pub async fn retry(&self, now: Timestamp, trigger: &'static str) -> Resized {
        let (reply, answer) = oneshot::channel();
        let _ = self.requests.send(Request::Retry(now, trigger, reply)).await;
        answer.await.unwrap_or_default()
    }

    /// Returns when room became free while wishes wait for some.
    pub async fn freed(&self) {
        self.freed.notified().await;
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
        let _ = self.requests.send(Request::Node(Box::new(seen))).await;
    }

    /// From now on the node is under these pressures (`MemoryPressure`, …), in any order.
    pub async fn pressures(&self, pressures: Vec<String>) {
        let _ = self.requests.send(Request::Pressures(pressures)).await;
    }

    /// While the node shuts down no pod is admitted.
    pub async fn shutting_down(&self, now: bool) {
        let _ = self.requests.send(Request::ShuttingDown(now)).await;
    }

    /// Notes what the pod's containers, and the pod itself, have.
    pub async fn actuated(&self, uid: &PodUid, has: PodAllocation) {
        let _ = self.requests.send(Request::Actuated(uid.clone(), Box::new(has), None)).await;
    }

    /// [`AdmitHandle::actuated`], and returns when it is on the disk (or the disk refused): for what must not be done twice.
    pub async fn actuated_for_good(&self, uid: &PodUid, has: PodAllocation) {
        let (reply, written) = oneshot::channel();
        let _ = self.requests.send(Request::Actuated(uid.clone(), Box::new(has), Some(reply))).await;
        let _ = written.await;
    }

    /// The pod has what it was given, and no more. `pod`: in the form in which it runs.
    pub async fn settled(&self, pod: DesiredPod) {
        let _ = self.requests.send(Request::Settled(pod)).await;
    }

    /// The pod can run nothing any more: it uses no room, though its source still holds it.
    pub async fn ended(&self, uid: &PodUid) {
        let _ = self.requests.send(Request::Ended(uid.clone())).await;
    }

    /// Forgets the allocations of pods that are not among these: they went while no agent was there to see it.
    pub async fn retain(&self, known: BTreeSet<PodUid>) {
        let _ = self.requests.send(Request::Retain(known)).await;
    }

    /// The pod is gone: its room is free and its allocation forgotten.
    pub async fn release(&self, uid: PodUid) {
        let _ = self.requests.send(Request::Release(uid)).await;
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

/// A pod whose verdict waits for a plugin.
struct Waiting {
    /// The number of its question: a pod that went and came back asks anew.
    question: u64,
    pod: DesiredPod,
    /// In the form that it is judged in.
    form: DesiredPod,
    /// What the ledger says of it.
    booked: Result<Admitted, Refusal>,
    reply: oneshot::Sender<Result<Admission, Refusal>>,
}

struct Admitter {
    ledger: Ledger,
    managers: Arc<dyn ResourceManagers>,
    /// By UID. Bounded by the pods that the sources hold.
    waiting: BTreeMap<PodUid, Waiting>,
    questions: u64,
    /// The way of the managers' answers back.
    own: mpsc::WeakSender<Request>,
    tasks: Tasks,
    node: NodeFacts,
    rules: Rules,
    host: Arc<dyn PodHost>,
    root: PathBuf,
    allocated: BTreeMap<String, PodAllocation>,
    actuated: BTreeMap<String, PodAllocation>,
    allocated_dirty: bool,
    actuated_dirty: bool,
    /// The disk took a checkpoint the last time.
    writable: bool,
    /// Pods that ask for other resources than they were given.
    wishes: BTreeMap<PodUid, Wish>,
    /// Why room became free since the wishes were last looked at.
    room: Option<&'static str>,
    freed: Arc<Notify>,
}

/// Starts the owner of the ledger.
pub fn start(
    node: NodeFacts,
    rules: Rules,
    restored: Restored,
    host: Arc<dyn PodHost>,
    managers: Arc<dyn ResourceManagers>,
    root: PathBuf,
    tasks: &Tasks,
) -> AdmitHandle {
    let (tx, rx) = mpsc::channel(64);
    let freed = Arc::new(Notify::new());
    let admitter = Admitter {
        ledger: Ledger::default(),
        managers,
        waiting: BTreeMap::new(),
        questions: 0,
        own: tx.downgrade(),
        tasks: tasks.clone(),
        node,
        rules,
        host,
        root,
        allocated: restored.allocated,
        actuated: restored.actuated,
        allocated_dirty: false,
        actuated_dirty: false,
        writable: true,
        wishes: BTreeMap::new(),
        room: None,
        freed: freed.clone(),
    };
    let stop = tasks.stop().clone();
    tasks.spawn(async move { admitter.run(rx, stop).await });
    AdmitHandle { requests: tx, freed }
}

impl Admitter {
    async fn run(mut self, mut requests: mpsc::Receiver<Request>, stop: tokio_util::sync::CancellationToken) {
        loop {
            let delay = if self.writable { ACTUATED_DELAY } else { AGAIN };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                request = requests.recv() => match request {
                    Some(request) => self.handle(request).await,
                    None => break,
                },
                () = tokio::time::sleep(delay), if self.allocated_dirty || self.actuated_dirty => self.save().await,
            }
        }
        self.save().await;
    }

    async fn handle(&mut self, request: Request) {
        match request {
            Request::Admit(pods, reply) => {
                let mut verdicts = Vec::with_capacity(pods.len());
                for candidate in pods {
                    verdicts.push(self.admit(candidate).await);
                }
                // Written before the worker may act on it.
                self.save().await;
                let _ = reply.send(verdicts);
            }
            Request::Managed(uid, question, given) => {
                if self.waiting.get(&uid).is_some_and(|waiting| waiting.question != question) {
                    return;
                }
                let Some(waiting) = self.waiting.remove(&uid) else {
                    // It went while it was given something.
                    if !self.ledger.holds(&uid) {
                        self.managers.ended(&uid);
                    }
                    return;
                };
                let verdict = self.settle(&waiting.pod, &waiting.form, waiting.booked, given);
                self.save().await;
                let _ = waiting.reply.send(verdict);
            }
            Request::Node(seen) => {
                self.node.labels = seen.labels;
                self.node.taints = seen.taints;
                // What the object does not tell yet is as this host found it.
                self.node.allocatable.extend(seen.allocatable);
            }
            Request::AddWish(pod) => self.wish(pod),
            Request::RenewWish(pod) => {
                if let Some(wish) = self.wishes.get_mut(pod.uid()) {
                    wish.pod = pod;
                }
            }
            Request::Wish(pod, now, reply) => {
                self.wish(pod);
                self.look_at_wishes(now, "pod_updated", reply).await;
            }
            Request::DropWish(uid) => {
                self.wishes.remove(&uid);
            }
            Request::Retry(now, trigger, reply) => {
                let trigger = self.room.take().unwrap_or(trigger);
                self.look_at_wishes(now, trigger, reply).await;
            }
            Request::Actuated(uid, has, reply) => {
                self.actuated_dirty |= self.actuated.get(uid.as_str()) != Some(&*has);
                self.actuated.insert(uid.to_string(), *has);
                if let Some(reply) = reply {
                    self.save().await;
                    let _ = reply.send(());
                }
            }
            Request::Settled(pod) => {
                if self.ledger.settle(&pod, self.rules.pod_level_resources) {
                    self.room_is_free("pod_resized");
                }
            }
            Request::Pressures(mut pressures) => {
                pressures.sort();
                self.node.pressures = pressures;
            }
            Request::ShuttingDown(now) => self.rules.shutting_down = now,
            Request::Retain(known) => {
                for (allocations, dirty) in
                    [(&mut self.allocated, &mut self.allocated_dirty), (&mut self.actuated, &mut self.actuated_dirty)]
                {
                    let before = allocations.len();
                    allocations.retain(|uid, _| known.contains(&PodUid::new(uid.as_str())));
                    *dirty |= allocations.len() != before;
                }
                self.managers.retain(&known);
            }
            Request::Ended(uid) => {
                self.wishes.remove(&uid);
                self.managers.ended(&uid);
                if self.ledger.holds(&uid) {
                    self.ledger.release(&uid);
                    self.room_is_free("pod_terminated");
                }
            }
            Request::Release(uid) => {
                self.wishes.remove(&uid);
                self.ledger.release(&uid);
                self.managers.release(&uid);
                // Nobody waits for its verdict any more.
                self.waiting.remove(&uid);
                self.room_is_free("pods_removed");
                self.allocated_dirty |= self.allocated.remove(uid.as_str()).is_some();
                self.actuated_dirty |= self.actuated.remove(uid.as_str()).is_some();
            }
        }
    }

    /// The form that a pod is judged in: one that was given something before, by this agent or an earlier one, with that.
    fn form(&self, pod: &DesiredPod) -> DesiredPod {
        match self.allocated.get(pod.uid().as_str()) {
            Some(given) => {
                let mut given = given.clone();
                if !self.rules.resize.pod_level {
                    // The Go kubelet then keeps none.
                    given.pod_level.clone_from(&pod.spec().resources);
                }
                pod.given(&given, ResizeState::default())
            }
            None => pod.clone(),
        }
    }

    /// Books the pod and has the managers give it what it asks for. In Go's order they come after the node's pressure and the sysctls and before
    /// everything else, so that theirs is the reason when several are against it.
    async fn admit(&mut self, Candidate { pod, alive }: Candidate) -> Verdict {
        let form = self.form(&pod);
        let booked = self.book(&form);
        if let Err(refusal) = &booked
            && matches!(refusal.reason.as_str(), "Evicted" | "SysctlForbidden")
        {
            return Verdict::Now(Err(refusal.clone()));
        }
        if !self.managers.may_wait(&form) {
            let given = self.managers.allocate(&form, alive).await;
            return Verdict::Now(self.settle(&pod, &form, booked, given));
        }
        self.questions += 1;
        let question = self.questions;
        let (reply, verdict) = oneshot::channel();
        let (managers, own, asking) = (self.managers.clone(), self.own.clone(), form.clone());
        self.tasks.spawn_until_stop(async move {
            let given = managers.allocate(&asking, alive).await;
            if let Some(own) = own.upgrade() {
                let _ = own.send(Request::Managed(asking.uid().clone(), question, given)).await;
            }
        });
        self.waiting.insert(pod.uid().clone(), Waiting { question, pod, form, booked, reply });
        Verdict::Later(verdict)
    }

    /// The ledger's verdict. Of resources that the managers count, the Node's figures say nothing.
    fn book(&mut self, form: &DesiredPod) -> Result<Admitted, Refusal> {
        let counted: Vec<String> =
            self.node.allocatable.keys().filter(|name| self.managers.counts(name)).cloned().collect();
        if counted.is_empty() {
            self.ledger.admit(form, &self.node, &self.rules)
        } else {
            let mut node = self.node.clone();
            node.allocatable.retain(|name, _| !counted.contains(name));
            self.ledger.admit(form, &node, &self.rules)
        }
    }

    /// Brings both verdicts together. What a refused pod got is taken back; what another one got is noted.
    fn settle(
        &mut self,
        pod: &DesiredPod,
        form: &DesiredPod,
        booked: Result<Admitted, Refusal>,
        given: Result<(), Refusal>,
    ) -> Result<Admission, Refusal> {
        let uid = pod.uid();
        let room = match given.and(booked) {
            Ok(admitted) => admitted,
            Err(refusal) => {
                self.ledger.take_back(uid);
                self.managers.ended(uid);
                return Err(refusal);
            }
        };
        self.ledger.confirm(uid);
        let allocation = allocation_of(form, self.rules.resize.init_containers);
        let actuated = self.actuated.get(uid.as_str()).cloned().unwrap_or_default();
        let has = PodAllocation {
            pod_level: actuated.pod_level.clone().or_else(|| allocation.pod_level.clone()),
            ..decide::resize::known(&actuated).into_owned()
        };
        let has = form.given(&has, ResizeState::default());
        self.ledger.hold_at_least(uid, &Amounts::of_pod(&has, self.rules.pod_level_resources));
        let wishes = pod.asks_other_than(&allocation);
        let mut admission = Admission { actuated, wishes, room, ..Default::default() };
        if admission.wishes {
            admission.resize.pending = pod.stored_status().and_then(stored_pending);
            let wish = Wish { pod: pod.clone(), pending: admission.resize.pending.clone(), parked: false };
            self.wishes.insert(uid.clone(), wish);
        }
        admission.allocation = Arc::new(allocation.clone());
        self.allocated_dirty |= self.allocated.get(uid.as_str()) != Some(&allocation);
        self.allocated.insert(uid.to_string(), allocation);
        Ok(admission)
    }

    async fn save(&mut self) {
        if self.allocated_dirty {
            self.writable = saved(ALLOCATED, self.write(ALLOCATED, &self.allocated).await);
            self.allocated_dirty = !self.writable;
        }
        if self.actuated_dirty {
            self.writable = saved(ACTUATED, self.write(ACTUATED, &self.actuated).await);
            self.actuated_dirty = !self.writable;
        }
    }

    async fn write(&self, name: &str, content: &BTreeMap<String, PodAllocation>) -> HostResult<()> {
        self.host.write_atomic(&self.root.join(name), checkpoint::encode_allocations(content), 0o600).await
    }
}

fn saved(name: &str, result: HostResult<()>) -> bool {
    if let Err(e) = &result {
        warn!(checkpoint = name, err = e.chain(), "Checkpoint cannot be written, it is tried again later");
    }
    result.is_ok()
}
