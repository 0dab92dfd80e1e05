//! Volumes of drivers, and disks that the host makes available itself: from what pods want to what stands, one step at a time for each volume.
//!
//! ```text
//!   worker ──mount──▶ desired ─┐                      ┌─▶ driver, disk
//!   worker ──unmount─▶  of a   ├─ decide::volumes ────┤
//!   disk (at start) ─▶ volume ─┘      next step       └─▶ actual ──▶ worker is woken
//! ```
//!
//! Each volume that pods use, or that stands on disk, has a [`Cell`]. Tasks: one for each cell that has work or waits for something (an
//! attachment, a back-off); it ends when all is as wanted. Owner of the table: [`Volumes`], shared by reference. Queue: none, wishes are
//! values in the cell. Deadline: each call to a driver has two minutes; a step that failed is tried again after 500 ms, doubling to 2m2s, or
//! at once when its driver registers anew. A driver that hangs holds its own volumes: the workers of their pods wait no longer than
//! [`PATIENCE`] for an answer, tell what they wait for, and are woken when it is there. A cancelled step leaves its data file behind, and
//! with it the knowledge that it may have been done.

mod cell;
mod disks;
mod figures;
pub(crate) mod layout;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use decide::csi::{CsiVolume, DriverRules, Growth, ResizeNews, SecretName};
use decide::selinux;
use host::disk::Tools;
use model::Timestamp;
use model::api::Node;
use model::pod::{DesiredPod, PodUid};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::csi::Drivers;
use cell::Cell;
pub use figures::{Health, Room, VolumeFigures};
pub use layout::Layout;
use layout::{Failure, Identity};

/// How long a worker waits for an answer before it goes on and is woken later.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the end of a pod waits for a driver before it says so and asks again.
const UNMOUNT: Duration = Duration::from_secs(10);
/// How long an attachment is waited for before it is looked at why it does not come. The Go kubelet's number.
const ATTACH: Duration = Duration::from_secs(123);

/// An attachment of a volume to the node (VolumeAttachment).
#[derive(Clone, Debug, Default)]
pub struct Attachment {
    /// `status.attached`.
    pub attached: bool,
    /// Its deletion was asked for.
    pub is_going: bool,
    /// `status.attachError` has the code ResourceExhausted: the node can take no more.
    pub exhausted: bool,
    /// `status.attachmentMetadata`.
    pub metadata: BTreeMap<String, String>,
}

/// What volumes need of the API server. Each call has the client's deadline.
#[async_trait]
pub trait Objects: Send + Sync {
    /// What the CSIDriver object of this name asks for.
    async fn rules(&self, driver: &str) -> Result<DriverRules, String>;
    /// A VolumeAttachment by name.
    async fn attachment(&self, name: &str) -> Result<Attachment, String>;
    /// The content of a secret.
    async fn secret(&self, name: &SecretName) -> Result<BTreeMap<String, String>, String>;
    /// A token of the pod's service account, and when it ends.
    async fn token(
        &self,
        pod: &DesiredPod,
        audience: &str,
        seconds: Option<i64>,
    ) -> Result<(String, Timestamp), String>;
    /// Tells in a claim's status how its growth goes on the node.
    async fn resized(&self, pod: &DesiredPod, growth: &Growth, news: &ResizeNews) -> Result<(), String>;
    /// Counts what came of a volume's SELinux label. `plugin`: its name, with the driver's; `access_mode`: see [`selinux::access_mode`].
    fn labelled(&self, counted: selinux::Counted, plugin: &str, access_mode: &'static str);
    /// Tells an event about a pod and, when there is one, about the claim.
    fn event(&self, pod: &DesiredPod, claim: Option<&Growth>, warning: bool, reason: &str, message: &str);
}

/// What the volumes look at of the node's object.
#[derive(Clone, Debug)]
pub struct NodeView {
    /// The newest object.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// `volumesInUse` as the API server was last told.
    pub reported: watch::Receiver<Arc<Vec<String>>>,
}

impl NodeView {
    /// What is known now is no news.
    fn settle(&mut self) {
        self.node.mark_unchanged();
        self.reported.mark_unchanged();
    }

    /// Waits for news.
    async fn changed(view: Option<&mut Self>) {
        let Some(Self { node, reported }) = view else { return std::future::pending().await };
        tokio::select! {
            Ok(()) = node.changed() => {}
            Ok(()) = reported.changed() => {}
            else => std::future::pending().await,
        }
    }
}

/// Wakes whoever waits for a volume.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// A pod's wish.
#[derive(Clone)]
pub struct Wish {
    /// The pod.
    pub pod: DesiredPod,
    /// The volume.
    pub volume: CsiVolume,
    /// It stands already for this pod: only what changes is to be done (new tokens, growth).
    pub again: bool,
    /// Called when the answer to [`Volumes::mount`] may be another one.
    pub wake: Wake,
}

/// How a pod's wish stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Containers can use it.
    Ready {
        /// Where: a directory, or for a block volume the link to its device.
        path: PathBuf,
        /// Its files want the SELinux label that the containers need, one by one.
        relabel: bool,
    },
    /// It waits for something; the wish's `wake` is called when that comes.
    Waits(String),
    /// The last try failed, and another one will be made.
    Failed {
        /// Reason of the event: `FailedMount`, `FailedMapVolume`.
        reason: &'static str,
        /// Message of the event.
        message: String,
        /// The pod was not told of this try yet.
        fresh: bool,
    },
    /// The node can take no more volumes of this driver: it was waited for long enough.
    Exhausted,
}

/// The volumes. Clones share them.
#[derive(Clone)]
pub struct Volumes(Arc<Shared>);

struct Shared {
    layout: Layout,
    /// The kernel has SELinux on.
    selinux: bool,
    drivers: Drivers,
    objects: Arc<dyn Objects>,
    node: OnceLock<NodeView>,
    cells: Mutex<HashMap<String, Arc<Cell>>>,
    /// Volumes of each pod, wanted or standing.
    pods: Mutex<HashMap<PodUid, BTreeSet<String>>>,
    /// Volumes that a controller attaches: their names in the node's status, by their cells' keys.
    in_use_names: Mutex<BTreeMap<String, String>>,
    /// The same, as the node's status is to name them.
    in_use: watch::Sender<Arc<Vec<String>>>,
    /// Every source of pods has spoken: what nobody wants may go.
    settled: watch::Sender<bool>,
    figures: figures::Figures,
    /// The host's own tools, for disks without a driver.
    tools: Tools,
    targets: Arc<disks::TargetLocks>,
    stop: CancellationToken,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Volumes {
    /// Looks at the disk for what stands. Blocks for as long as that takes. Nothing is begun before [`Volumes::start`]. `selinux`: the kernel
    /// has it on.
    pub fn new(
        layout: Layout,
        selinux: bool,
        drivers: Drivers,
        objects: Arc<dyn Objects>,
        stop: CancellationToken,
    ) -> Self {
        let (found, tools) = (layout.scan(), Tools::host());
        for dir in found.unknown {
            warn!(dir = %dir.display(), "A directory of a volume has no data that could be read, it is left as it is");
        }
        let volumes = Self(Arc::new(Shared {
            layout,
            selinux,
            drivers,
            objects,
            node: OnceLock::new(),
            cells: Mutex::default(),
            pods: Mutex::default(),
            in_use_names: Mutex::default(),
            in_use: watch::Sender::new(Arc::default()),
            settled: watch::Sender::new(false),
            figures: figures::Figures::default(),
            tools,
            targets: Arc::default(),
            stop,
        }));
        let pods = found.mounts.into_iter().map(|(uid, of)| (Some(uid), of));
        for (uid, of) in pods.chain(found.devices.into_iter().map(|of| (None, of))) {
            if let Some(uid) = &uid {
                lock(&volumes.0.pods).entry(uid.clone()).or_default().insert(of.key());
            }
            let cell = volumes.cell(&of);
            cell.found(uid, &of);
            volumes.0.note_in_use(&cell);
        }
        volumes
    }

    /// The volumes that the node's status is to name, sorted, from the first call on complete.
    pub fn in_use(&self) -> watch::Receiver<Arc<Vec<String>>> {
        self.0.in_use.subscribe()
    }

    /// Begins: with `node`, attachments are waited for; what stood on disk and nobody wants goes once `all_seen` is true.
    pub fn start(&self, node: Option<NodeView>, mut all_seen: watch::Receiver<bool>) {
        if let Some(node) = node {
            let _ = self.0.node.set(node);
        }
        let shared = self.0.clone();
        tokio::spawn(async move {
            let settle = async {
                if all_seen.wait_for(|seen| *seen).await.is_ok() {
                    shared.settled.send_replace(true);
                    let cells: Vec<Arc<Cell>> = lock(&shared.cells).values().cloned().collect();
                    cells.iter().for_each(|cell| cell.kick(&shared));
                }
            };
            tokio::select! { () = shared.stop.cancelled() => {}, () = settle => {} }
        });
        let shared = self.0.clone();
        tokio::spawn(async move {
            tokio::select! { () = shared.stop.cancelled() => {}, () = shared.follow_drivers() => {} }
        });
    }

    /// The cell of a volume, made when it is missing.
    fn cell(&self, of: &Identity) -> Arc<Cell> {
        lock(&self.0.cells).entry(of.key()).or_insert_with(|| Arc::new(Cell::new(of.clone()))).clone()
    }

    /// Asks for a volume, and waits a moment for it. To be called again whenever the wish's `wake` was called, and as often as one likes.
    pub async fn mount(&self, wish: Wish) -> Standing {
        let of = Identity {
            driver: wish.volume.driver.clone(),
            handle: wish.volume.handle.clone(),
            spec_name: wish.volume.spec_name.clone(),
            lifecycle: wish.volume.lifecycle,
            block: wish.volume.block,
            label: None,
            dir: wish.volume.disk.as_ref().map(|disk| disk.dir(&wish.volume.spec_name)),
        };
        if let Err(message) = of.check() {
            return Standing::Failed { reason: "FailedMount", message, fresh: true };
        }
        let uid = wish.pod.uid().clone();
        lock(&self.0.pods).entry(uid.clone()).or_default().insert(of.key());
        let cell = self.want(&of, wish);
        self.0.note_in_use(&cell);
        cell.kick(&self.0);
        let mut changed = cell.changed();
        let answer = tokio::time::timeout(PATIENCE, async {
            loop {
                changed.borrow_and_update();
                let standing = cell.standing(&self.0, &uid);
                if !matches!(standing, Standing::Waits(_)) || cell.is_attaching() {
                    return standing;
                }
                if changed.changed().await.is_err() {
                    return standing;
                }
            }
        });
        match answer.await {
            Ok(standing) => standing,
            Err(_) => cell.standing(&self.0, &uid),
        }
    }

    /// Puts the wish into its cell. A cell that is just going is made anew.
    fn want(&self, of: &Identity, wish: Wish) -> Arc<Cell> {
        loop {
            let cell = self.cell(of);
            if cell.want(&wish) {
                return cell;
            }
        }
    }

    /// Takes back everything that the pod has, and waits until it is gone.
    ///
    /// # Errors
    /// What is still there, and why; it is gone on with, and may be asked for again.
    pub async fn unmount(&self, uid: &PodUid) -> Result<(), String> {
        let keys = lock(&self.0.pods).get(uid).cloned().unwrap_or_default();
        if keys.is_empty() {
            return Ok(());
        }
        // Binds of parts of a volume hold its mount.
        let (proc, dir) = (self.0.layout.proc.clone(), self.0.layout.pod(uid));
        blocking(move || Ok(host::subpath::cleanup_subpaths(&proc, &dir, None)?)).await?;
        let cells: Vec<Arc<Cell>> = {
            let all = lock(&self.0.cells);
            keys.iter().filter_map(|key| all.get(key).cloned()).collect()
        };
        for cell in &cells {
            cell.unwant(uid);
            cell.kick(&self.0);
        }
        let deadline = tokio::time::Instant::now() + UNMOUNT;
        let mut left = Vec::new();
        for cell in cells {
            if let Err(reason) = cell.wait_unmounted(uid, deadline).await {
                left.push(reason);
            }
        }
        if left.is_empty() {
            lock(&self.0.pods).remove(uid);
            return Ok(());
        }
        Err(left.join("; "))
    }
}

impl Shared {
    /// Counts what came of a volume's label.
    fn count_label(&self, of: &Identity, volume: &CsiVolume, counted: selinux::Counted) {
        let plugin = match of.dir {
            Some(_) => of.driver.clone(),
            None => format!("{}/{}", decide::csi::PLUGIN, of.driver),
        };
        self.objects.labelled(counted, &plugin, selinux::access_mode(&volume.access_modes));
    }

    /// A driver that came makes its volumes' failures worth another try.
    async fn follow_drivers(self: &Arc<Self>) {
        let mut registered = self.drivers.registered();
        loop {
            let known = registered.borrow_and_update().clone();
            let cells: Vec<Arc<Cell>> = lock(&self.cells).values().cloned().collect();
            for cell in cells {
                if known.get(&cell.identity().driver).is_some_and(Option::is_some) {
                    cell.retry_now();
                    cell.kick(self);
                }
            }
            if registered.changed().await.is_err() {
                return;
            }
        }
    }

    /// Tells when the volume came into use, or is not in use any more.
    fn note_in_use(&self, cell: &Cell) {
        let (of, used) = (cell.identity(), cell.is_in_use());
        let (key, name) = (of.key(), of.in_status());
        let mut names = lock(&self.in_use_names);
        let changed = match used {
            true => names.insert(key, name.clone()).is_none_or(|before| before != name),
            false => names.remove(&key).is_some(),
        };
        if changed {
            let mut all: Vec<String> = names.values().cloned().collect();
            all.sort();
            self.in_use.send_replace(Arc::new(all));
        }
    }

    /// Takes a cell that has nothing left out of the table.
    fn retire(&self, cell: &Arc<Cell>) {
        let key = cell.identity().key();
        let mut cells = lock(&self.cells);
        if cells.get(&key).is_some_and(|there| Arc::ptr_eq(there, cell)) && cell.retire() {
            cells.remove(&key);
        }
        drop(cells);
        self.note_in_use(cell);
    }

    /// True when the controller has attached the volume and the API server knows that it is in use.
    fn is_attached(&self, name: &str) -> bool {
        let Some(view) = self.node.get() else { return false };
        if !view.reported.borrow().iter().any(|n| n == name) {
            return false;
        }
        let node = view.node.borrow();
        let attached = node.as_ref().and_then(|n| n.status.as_ref()).and_then(|s| s.volumes_attached.as_ref());
        attached.is_some_and(|all| all.iter().any(|v| v.name == name))
    }

    fn labels(&self) -> Option<BTreeMap<String, String>> {
        let node = self.node.get()?.node.borrow().clone()?;
        Some(node.metadata.labels.clone().unwrap_or_default())
    }
}

/// Runs a blocking step elsewhere.
async fn blocking<T: Send + 'static>(step: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, String> {
    match tokio::task::spawn_blocking(step).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(chain(&*e)),
        Err(e) => Err(e.to_string()),
    }
}

/// An error with its reasons.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        text.push_str(": ");
        text.push_str(&e.to_string());
        next = e.source();
    }
    text
}
