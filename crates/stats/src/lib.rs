//! The figures of the node: what it, its pods and their containers use, in the forms in which others ask for them.
//!
//! ```text
//!   runtime's lists ─▶ names ─┐
//!   control groups ─▶ groups ─┼─▶ summary   (/stats/summary)
//!   file systems ─▶ storage ──┤   cadvisor  (/metrics/cadvisor)
//!   volumes ─▶ storage ───────┘   resource  (/metrics/resource)
//!                                 pods      (eviction)
//! ```
//!
//! Nothing is collected while nobody asks. What is collected serves all who ask within [`SHARED`] (volumes: within the period of the
//! configuration), and is forgotten when nobody comes for it ([`shared`]). CPU and memory are the control groups', as cAdvisor reads
//! them; the runtime is asked for names, images and writable layers, and for containers whose groups are not here (virtual machines).
//! Rates are made of two looks: the one before, or when there was none within a minute, a short one just before.
//!
//! Only reading waits; `names`, `cadvisor`, `resource` and `summary` are pure.

mod cadvisor;
mod groups;
mod names;
mod pods;
mod resource;
mod shared;
mod shares;
mod storage;
mod summary;
mod text;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use cri::{CriError, RuntimeReader};
use cri_api::v1;
use futures::StreamExt;
use host::cgroup::Detail;
use jiff::Timestamp;
use telemetry::metrics::Metrics;
use tokio::sync::OnceCell;
use tracing::warn;

use cadvisor::{DeviceFigures, MachineFacts};
use groups::{CpuTimes, GLANCE, Groups};
use names::Names;
use shared::Shared;
use shares::Shares;
use storage::{Storage, Volume};
use text::{Kind, Page, labels};

pub use groups::GroupSettings;
pub use storage::{ClaimedVolume, Claims, DriverFigures, StorageSettings};

/// How long what was collected serves others.
pub const SHARED: Duration = Duration::from_secs(2);
/// How old the look before may be for a rate.
const RATE_WINDOW: Duration = Duration::from_secs(60);
/// Sandboxes that are asked for at once.
const SANDBOXES: usize = 8;

/// Figures could not be had.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// The runtime does not tell what runs.
    #[error("{what}")]
    Runtime {
        /// What was asked.
        what: &'static str,
        /// Its answer.
        source: CriError,
    },
    /// The host does not answer.
    #[error(transparent)]
    Host(#[from] host::Failed),
    /// A reading thread ended.
    #[error("read the figures of the node")]
    Thread(#[from] tokio::task::JoinError),
    /// The answer could not be written.
    #[error("write the figures of the node")]
    Write(#[from] std::io::Error),
}

/// What is fixed for the life of the process.
pub struct Settings {
    /// The Node object's name.
    pub node_name: String,
    /// Where the control groups are.
    pub groups: GroupSettings,
    /// Where files are.
    pub storage: StorageSettings,
    /// `volumeStatsAggPeriod`; None: volumes are not measured.
    pub volume_period: Option<Duration>,
    /// The node's root directory, `/`.
    pub node_root: PathBuf,
    /// When this process started.
    pub started: Timestamp,
}

/// The figures of the node. No task of its own; who asks does the work, on tokio's blocking threads.
pub struct Stats {
    settings: Arc<Settings>,
    reader: Arc<dyn RuntimeReader>,
    claims: Arc<dyn Claims>,
    metrics: Arc<Metrics>,
    machine: OnceCell<Arc<MachineFacts>>,
    names: Shared<Names>,
    groups: Shared<Look>,
    told: Shared<Vec<v1::ContainerStats>>,
    storage: Shared<Storage>,
    volumes: Shared<HashMap<String, Vec<Volume>>>,
    shares: Shares,
    cadvisor: Shared<Bytes>,
    /// Names of images by the ids of the containers and sandboxes that use them.
    images: Mutex<HashMap<String, Arc<str>>>,
}

/// One look at the groups, with the names of that moment.
struct Look {
    names: Arc<Names>,
    groups: Groups,
    /// What the runtime says of containers without a group here, by id.
    fallback: HashMap<String, v1::ContainerStats>,
}

impl Stats {
    /// Nothing is read yet.
    pub fn new(
        settings: Settings,
        reader: Arc<dyn RuntimeReader>,
        claims: Arc<dyn Claims>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let volumes = settings.volume_period.unwrap_or_default();
        Self {
            settings: Arc::new(settings),
            reader,
            claims,
            metrics,
            machine: OnceCell::new(),
            names: Shared::new(SHARED, SHARED),
            groups: Shared::new(SHARED, RATE_WINDOW),
            told: Shared::new(SHARED, SHARED),
            storage: Shared::new(SHARED, SHARED),
            volumes: Shared::new(volumes, volumes),
            shares: Shares::default(),
            cadvisor: Shared::new(SHARED, SHARED),
            images: Mutex::default(),
        }
    }

    /// `/stats/summary` as JSON.
    ///
    /// # Errors
    /// The runtime does not tell what runs, or the host does not answer.
    pub async fn summary(&self, only_cpu_and_memory: bool) -> Result<Vec<u8>, StatsError> {
        let look = self.look(Detail::Usage, true).await?;
        let machine = self.machine().await?;
        let storage = match only_cpu_and_memory {
            true => None,
            false => Some(self.storage(&look.names).await?),
        };
        let volumes = match (only_cpu_and_memory, self.settings.volume_period) {
            (false, Some(_)) => Some(self.volumes(&look.names).await?),
            _ => None,
        };
        let settings = self.settings.clone();
        blocking(move || {
            let proc = &settings.groups.proc;
            let processes = host::proc::max_pids(proc).ok().zip(host::proc::used_pids(proc).ok());
            let system = &settings.groups.system;
            let mut system: Vec<(&str, &str)> = system.iter().map(|(name, path)| (*name, path.as_str())).collect();
            system.push(("pods", &settings.groups.kubepods));
            let inputs = summary::Inputs {
                node_name: &settings.node_name,
                system: &system,
                started: settings.started,
                node: summary::NodeFacts {
                    booted: Timestamp::from_second(machine.booted).unwrap_or_default(),
                    memory: machine.memory,
                    swap: machine.machine.swap,
                    processes,
                },
                names: &look.names,
                groups: &look.groups,
                fallback: &look.fallback,
                storage: storage.as_deref(),
                volumes: volumes.as_deref(),
                now: Timestamp::now(),
            };
            Ok(summary::compose(&inputs).to_json()?)
        })
        .await
    }

    /// `/metrics/resource`. What cannot be had shows as `resource_scrape_error`.
    pub async fn resource(&self) -> String {
        let (look, machine) = (self.look(Detail::Usage, false).await, self.machine().await);
        let swap = machine.map_or(0, |m| m.machine.swap);
        match look {
            Ok(look) => resource::page(Some((&look.names, &look.groups)), &look.fallback, swap),
            Err(e) => {
                warn!(err = &e as &dyn std::error::Error, "The figures of the node cannot be read");
                resource::page(None, &HashMap::new(), swap)
            }
        }
    }

    /// `/metrics/cadvisor`.
    ///
    /// # Errors
    /// The runtime does not tell what runs, or the host does not answer.
    pub async fn cadvisor(&self) -> Result<Bytes, StatsError> {
        Ok((*self.cadvisor.get(|_| true, |_| self.make_cadvisor()).await?).clone())
    }

    /// What `/metrics` shows of pods' logs and claims: those figures are collected as others are, when somebody asks.
    ///
    /// # Errors
    /// The runtime does not tell what runs, or the host does not answer.
    pub async fn logs_and_claims(&self) -> Result<String, StatsError> {
        let names = self.names().await?;
        let storage = self.storage(&names).await?;
        let volumes = match self.settings.volume_period {
            Some(_) => Some(self.volumes(&names).await?),
            None => None,
        };
        Ok(logs_and_claims(&names, &storage, volumes.as_deref()))
    }

    async fn names(&self) -> Result<Arc<Names>, StatsError> {
        let make = |_| async {
            let running = v1::ContainerStateValue { state: v1::ContainerState::ContainerRunning as i32 };
            let filter = v1::ContainerFilter { state: Some(running), ..v1::ContainerFilter::default() };
            let (sandboxes, containers) = tokio::try_join!(
                async { told("list the pods' sandboxes", self.reader.list_pod_sandbox(None).await) },
                async { told("list the containers", self.reader.list_containers(Some(filter)).await) },
            )?;
            Ok(Names::new(sandboxes, containers))
        };
        self.names.get(|_| true, make).await
    }

    /// All groups, in this detail or more, with rates when they are wanted.
    async fn look(&self, detail: Detail, rated: bool) -> Result<Arc<Look>, StatsError> {
        let make = |before: Option<(Arc<Look>, Duration)>| async move {
            let names = self.names().await?;
            let outside = before.as_ref().and_then(|(look, _)| look.groups.outside);
            // A rate over no time at all would be one of the clock.
            let before = before.filter(|(_, age)| *age >= GLANCE).map(|(look, _)| look.groups.cpu_times());
            let before = match before {
                None if rated => Some(self.glance(&names).await?),
                before => before,
            };
            let (settings, of) = (self.settings.clone(), names.clone());
            let read = move || Ok(groups::read(&settings.groups, &of, detail, before.as_ref(), outside));
            let groups = blocking(read).await?;
            let fallback = self.fallback(&names, &groups).await;
            Ok(Look { names, groups, fallback })
        };
        self.groups.get(|look| look.groups.detail >= detail && (look.groups.rated || !rated), make).await
    }

    /// A first look for the rates of the second.
    async fn glance(&self, names: &Arc<Names>) -> Result<CpuTimes, StatsError> {
        let (settings, names) = (self.settings.clone(), names.clone());
        let times = blocking(move || Ok(groups::cpu_times(&settings.groups, &names))).await?;
        tokio::time::sleep(GLANCE).await;
        Ok(times)
    }

    /// What the runtime says of containers that have no group here.
    async fn fallback(&self, names: &Names, groups: &Groups) -> HashMap<String, v1::ContainerStats> {
        let grouped: HashSet<usize> = groups
            .all
            .iter()
            .filter_map(|g| match g.owner {
                names::Owner::Container(at) => Some(at),
                _ => None,
            })
            .collect();
        let missing: HashSet<&str> = names
            .containers
            .iter()
            .enumerate()
            .filter(|(at, _)| !grouped.contains(at))
            .map(|(_, c)| c.id.as_str())
            .collect();
        if missing.is_empty() {
            return HashMap::new();
        }
        let Ok(stats) = self.told().await else { return HashMap::new() };
        let known = stats.iter().filter_map(|s| Some((s.attributes.as_ref()?.id.as_str(), s)));
        known.filter(|(id, _)| missing.contains(id)).map(|(id, s)| (id.to_owned(), s.clone())).collect()
    }

    /// What the runtime says of all containers.
    async fn told(&self) -> Result<Arc<Vec<v1::ContainerStats>>, CriError> {
        self.told.get(|_| true, |_| self.reader.list_container_stats(None)).await
    }

    async fn storage(&self, names: &Arc<Names>) -> Result<Arc<Storage>, StatsError> {
        let make = |_| async {
            let (images, stats) = tokio::join!(self.reader.image_fs_info(), self.told());
            // Without them the rest is worth as much.
            let known = |e: &CriError| {
                warn!(err = e as &dyn std::error::Error, "The runtime does not tell what its files take")
            };
            let images = images.inspect_err(known).ok();
            let stats = stats.inspect_err(known).unwrap_or_default();
            let (settings, names) = (self.settings.clone(), names.clone());
            blocking(move || Ok(storage::look(&settings.storage, &names, images.as_ref(), &stats)?)).await
        };
        self.storage.get(|_| true, make).await
    }

    async fn volumes(&self, names: &Arc<Names>) -> Result<Arc<HashMap<String, Vec<Volume>>>, StatsError> {
        let make = |_| async {
            let (settings, names) = (self.settings.clone(), names.clone());
            let mut claims = HashMap::new();
            for pod in &names.pods {
                let of_pod = self.claims.claims(&pod.uid).await;
                if !of_pod.is_empty() {
                    claims.insert(pod.uid.clone(), of_pod);
                }
            }
            let (proc, pods) = (settings.groups.proc.clone(), settings.storage.root.join("pods"));
            let places = blocking(move || Ok(shares::mounted(&host::mount::MountTable::read(&proc)?, &pods))).await?;
            let ask = |place: &std::path::Path| host::fsx::filesystem(place).ok();
            let (drivers, shares) = tokio::join!(self.claims.drivers(), self.shares.measure(places, ask));
            let metrics = self.metrics.clone();
            let told = storage::Told { claims, drivers, shares };
            blocking(move || Ok(storage::volumes(&settings.storage, &names, &told, &metrics))).await
        };
        self.volumes.get(|_| true, make).await
    }

    async fn machine(&self) -> Result<Arc<MachineFacts>, StatsError> {
        let settings = self.settings.clone();
        let make = || blocking(move || Ok(Arc::new(machine_facts(&settings)?)));
        self.machine.get_or_try_init(make).await.cloned()
    }

    async fn make_cadvisor(&self) -> Result<Bytes, StatsError> {
        let look = self.look(Detail::Full, false).await?;
        let images = self.images(&look.names).await;
        let facts = self.machine().await?;
        let settings = self.settings.clone();
        blocking(move || {
            let devices = devices(&settings);
            let now = Timestamp::now().as_second();
            Ok(Bytes::from(cadvisor::page(&cadvisor::Inputs {
                facts: &facts,
                names: &look.names,
                groups: &look.groups,
                devices: &devices,
                images: &images,
                now,
            })))
        })
        .await
    }

    /// Names of the images of all that runs. The runtime is asked for new containers only.
    async fn images(&self, names: &Names) -> HashMap<String, Arc<str>> {
        let mut known = std::mem::take(&mut *self.images.lock().unwrap_or_else(PoisonError::into_inner));
        let ids = || {
            let sandboxes = names.pods.iter().map(|p| p.sandbox.as_str());
            sandboxes.chain(names.containers.iter().map(|c| c.id.as_str()))
        };
        let now: HashSet<&str> = ids().collect();
        known.retain(|id, _| now.contains(id.as_str()));
        if names.containers.iter().any(|c| !known.contains_key(&c.id)) {
            let images = self.reader.list_images(None).await.unwrap_or_default();
            let by_ref = names::image_names(&images);
            for container in &names.containers {
                let known_by = [container.image_ref.as_str(), container.image.as_str()];
                let name = known_by.iter().find_map(|key| by_ref.get(key)).copied().unwrap_or(&container.image);
                known.entry(container.id.clone()).or_insert_with(|| Arc::from(name));
            }
        }
        let new: Vec<String> =
            names.pods.iter().map(|p| p.sandbox.clone()).filter(|id| !known.contains_key(id)).collect();
        let asked = futures::stream::iter(new).map(|id: String| async move {
            let status = self.reader.pod_sandbox_status(&id, true).await.ok()?;
            Some((id, names::sandbox_image(&status)))
        });
        let told: Vec<_> = asked.buffer_unordered(SANDBOXES).collect().await;
        known.extend(told.into_iter().flatten());
        self.images.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&known);
        known
    }
}

fn told<T>(what: &'static str, answer: Result<T, CriError>) -> Result<T, StatsError> {
    answer.map_err(|source| StatsError::Runtime { what, source })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StatsError> + Send + 'static,
) -> Result<T, StatsError> {
    tokio::task::spawn_blocking(work).await?
}

fn machine_facts(settings: &Settings) -> Result<MachineFacts, StatsError> {
    let (proc, sys) = (&settings.groups.proc, &settings.groups.sys);
    let (machine, failed) = host::proc::machine(&settings.node_root, proc, sys);
    for e in failed {
        warn!(err = e.full(), "What this machine is cannot be read");
    }
    let up = host::proc::uptime(proc)?;
    let booted = Timestamp::now().as_second() - i64::try_from(up.as_secs()).unwrap_or_default();
    let memory = host::proc::memory(proc)?.total;
    Ok(MachineFacts { machine, topology: host::proc::cpu_topology(sys)?, memory, booted })
}

/// The node's file systems with their figures. Blocks.
fn devices(settings: &Settings) -> Vec<DeviceFigures> {
    let proc = &settings.groups.proc;
    let table = match host::mount::MountTable::read(proc) {
        Ok(table) => table,
        Err(e) => {
            warn!(err = e.full(), "The file systems of the node cannot be listed");
            return Vec::new();
        }
    };
    let traffic = host::proc::disk_traffic(proc).unwrap_or_default();
    let places = host::fsx::node_filesystems(&table, &[&settings.storage.root.join("pods")]);
    places
        .into_iter()
        .filter_map(|place| {
            let fs = host::fsx::filesystem(&place.mount_point).ok()?;
            Some(DeviceFigures { traffic: traffic.get(&place.number).copied().unwrap_or_default(), place, fs })
        })
        .collect()
}

/// The part of `/metrics` that is collected on demand.
fn logs_and_claims(names: &Names, storage: &Storage, volumes: Option<&HashMap<String, Vec<Volume>>>) -> String {
    let mut page = Page::default();
    let mut family = page.family(
        "kubelet_container_log_filesystem_used_bytes",
        Kind::Gauge,
        "Bytes that the container's logs take on the disk.",
    );
    for container in &names.containers {
        let Some(pod) = names.pods.get(container.pod) else { continue };
        let Some(used) = storage.logs.get(&(pod.uid.clone(), container.name.clone())) else { continue };
        let own = labels(&[
            ("container", &container.name),
            ("namespace", &pod.namespace),
            ("pod", &pod.name),
            ("uid", &pod.uid),
        ]);
        family.sample(&[&own], used.bytes, None);
    }
    // A claim that several pods use shows once.
    let mut claims = std::collections::BTreeMap::new();
    for pod in &names.pods {
        for volume in volumes.and_then(|v| v.get(&pod.uid)).into_iter().flatten() {
            if let Some(claim) = &volume.claim {
                claims.insert((pod.namespace.as_str(), claim.as_str()), volume);
            }
        }
    }
    type Value = fn(&Volume) -> Option<u64>;
    let all: [(&'static str, &'static str, Value); 7] = [
        ("kubelet_volume_stats_available_bytes", "Bytes that can still be written.", |v| Some(v.usage.fs?.available)),
        ("kubelet_volume_stats_capacity_bytes", "Size in bytes.", |v| Some(v.usage.fs?.capacity)),
        (
            "kubelet_volume_stats_health_status_abnormal",
            "1: the driver says that something is wrong with the volume.",
            |v| v.abnormal.map(u64::from),
        ),
        ("kubelet_volume_stats_inodes", "Inodes.", |v| Some(v.usage.fs?.inodes)),
        ("kubelet_volume_stats_inodes_free", "Inodes that are free.", |v| Some(v.usage.fs?.inodes_free)),
        ("kubelet_volume_stats_inodes_used", "Inodes in use.", |v| v.usage.inodes_used),
        ("kubelet_volume_stats_used_bytes", "Bytes in use.", |v| v.usage.used),
    ];
    for (name, help, value) in all {
        let mut family = page.family(name, Kind::Gauge, help);
        for ((namespace, claim), volume) in &claims {
            if let Some(value) = value(volume) {
                family.sample(&[&labels(&[("namespace", namespace), ("persistentvolumeclaim", claim)])], value, None);
            }
        }
    }
    page.into_text()
}
