//! The managers of devices, CPUs and memory: what a pod's containers are given when it is admitted, and what each finds when it starts.
//!
//! ```text
//!   admission ──allocate──▶ hints ─▶ place ─▶ devices, CPUs, memory reserved ─▶ plugins asked ─▶ written down ─▶ verdict
//!   worker ────container──▶ [PreStartContainer] ──▶ the container's grant
//!   plugins ──lists──▶ book ──amounts──▶ the Node's status
//!   book ──shared pool──▶ running containers without CPUs of their own
//! ```
//!
//! All verdicts are [`decide`]'s. The book is one value behind a lock that nobody holds while he waits; what a container gets is chosen and reserved
//! under one hold of it, so that pods that are admitted at the same time never get the same, and no place is promised that another pod takes.

mod claims;
mod config;
mod devices;
mod pod_resources;
mod pool;
mod restore;
mod writer;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use decide::admission::Refusal;
use decide::claims::Claims;
use decide::cpus::{self, CpuSet, Cpus};
use decide::devices::{Amount, Devices};
use decide::memory::{self, Memory};
use decide::numa::{Hint, Hints, NumaMask};
use decide::placement::{Placement, Policy, Scope};
use decide::resources::{QosClass, container_requests, has_pod_level_resources, qos_class};
use model::api::{ResourceHealth, ResourceStatus};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod, PodUid};
use plugins::devices::DevicePlugins;
use plugins::dra::ClaimDrivers;
use pod::ports::{Grant, ResourceManagers, Tasks};
use telemetry::metrics::Metrics;
use tokio::sync::watch;

pub use claims::{ClaimObjects, NoClaims};
pub use config::{Config, CpuConfig, MemoryConfig};
pub use pod_resources::serve as serve_pod_resources;
pub use pool::{CpusetSetter, keep as keep_pool};

use devices::Reservation;
use writer::Writer;

/// Is told of pods whose devices have another health now, by UID. Never waits.
pub type HealthChanged = Arc<dyn Fn(&BTreeSet<String>) + Send + Sync>;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Everything that was given away.
struct Book {
    devices: Devices,
    /// None: policy `none`.
    cpus: Option<Cpus>,
    /// None: policy `None`.
    memory: Option<Memory>,
    claims: Claims,
    /// What drivers say of the health of claimed devices.
    reports: claims::Reports,
}

struct Inner {
    config: Config,
    placement: Placement,
    book: Mutex<Book>,
    plugins: OnceLock<DevicePlugins>,
    drivers: OnceLock<ClaimDrivers>,
    objects: Arc<dyn ClaimObjects>,
    /// Pods that are gone and may have claims.
    gone: watch::Sender<BTreeSet<String>>,
    writer: Writer,
    amounts: watch::Sender<Arc<BTreeMap<String, Amount>>>,
    /// The shared pool of CPUs, as it changes.
    pool: watch::Sender<CpuSet>,
    new_machine: bool,
    health_changed: HealthChanged,
    metrics: Arc<Metrics>,
}

/// The managers. Clones share them.
#[derive(Clone)]
pub struct Managers(Arc<Inner>);

/// What containers of one pod that ended before others start had; the others may have it too.
#[derive(Default)]
struct Turn {
    devices: devices::Reusable,
    cpus: CpuSet,
    memory: memory::Reusable,
}

impl Managers {
    /// Reads what an earlier agent wrote down, and lets device plugins register.
    ///
    /// # Errors
    /// What keeps the node from starting, in Go's words: policies that do not fit the machine; checkpoints of CPUs and memory that are corrupt or of
    /// another policy; the plugins' socket that cannot be opened.
    pub async fn start(
        config: Config,
        objects: Arc<dyn ClaimObjects>,
        health_changed: HealthChanged,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
    ) -> Result<Self, Failure> {
        let placement = config.placement()?;
        let cpus = restore::cpus(&config).await.map_err(|e| format!("start cpu manager error: {e}"))?;
        let memory = restore::memory(&config).await.map_err(|e| format!("start memory manager error: {e}"))?;
        let claims = claims::restore(&config).await?;
        let devices::Restored { devices, resources, found } = devices::restore(&config.device_plugins).await;
        let managers = Self(Arc::new_cyclic(|inner| Inner {
            book: Mutex::new(Book { devices, cpus, memory, claims, reports: claims::Reports::new() }),
            placement,
            plugins: OnceLock::new(),
            drivers: OnceLock::new(),
            objects,
            gone: watch::Sender::default(),
            writer: Writer::start(inner.clone(), tasks),
            amounts: watch::Sender::default(),
            pool: watch::Sender::default(),
            new_machine: !found,
            health_changed,
            metrics,
            config,
        }));
        managers.0.tell_amounts();
        managers.0.tell_cpus();
        managers.0.writer.written().await;
        let plugins =
            DevicePlugins::new(&managers.0.config.device_plugins, managers.0.clone(), resources, tasks.stop().clone());
        plugins.serve().await?;
        let _ = managers.0.plugins.set(plugins);
        let _ = managers.0.drivers.set(ClaimDrivers::new(managers.0.clone(), tasks.stop().clone()));
        managers.0.count_claims();
        tasks.spawn_until_stop(claims::take_back(managers.0.clone(), managers.0.gone.subscribe()));
        Ok(managers)
    }

    /// The plugins, for those that register elsewhere, and for the health check.
    pub fn plugins(&self) -> Option<DevicePlugins> {
        self.0.plugins.get().cloned()
    }

    /// The drivers of claims, for their registration.
    pub fn drivers(&self) -> Option<ClaimDrivers> {
        self.0.drivers.get().cloned()
    }

    /// True when no agent wrote down devices before: a Node of this name that has some was another machine.
    pub fn new_machine(&self) -> bool {
        self.0.new_machine
    }

    /// How many devices there are, by resource. Of resources that are no more: none.
    pub fn amounts(&self) -> watch::Receiver<Arc<BTreeMap<String, Amount>>> {
        self.0.amounts.subscribe()
    }
}

impl Inner {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell_amounts(&self) {
        let now = self.book().devices.amounts();
        self.amounts.send_if_modified(|told| {
            let mut new: BTreeMap<String, Amount> = told.keys().map(|name| (name.clone(), Amount::default())).collect();
            new.extend(now);
            let changed = **told != new;
            if changed {
                *told = Arc::new(new);
            }
            changed
        });
    }

    /// Tells of the shared pool, and counts.
    fn tell_cpus(&self) {
        let book = self.book();
        let Some(cpus) = &book.cpus else { return };
        let (exclusive, shared) = (cpus.exclusive(), cpus.shared().clone());
        let per_numa = cpus.topology().per_numa(&exclusive);
        let free = shared.and(&cpus.allocatable()).len();
        drop(book);
        let metrics = &self.metrics.managers;
        metrics.exclusive_cpus.set(exclusive.len() as f64);
        metrics.shared_pool_milli.set(free as f64 * 1000.0);
        for (node, count) in per_numa {
            metrics.numa_cpus(node, count);
        }
        self.pool.send_if_modified(|told| {
            let changed = *told != shared;
            *told = shared;
            changed
        });
    }

    /// CPUs that a container is to have for itself: Guaranteed pods, whole numbers. With resources of the pod as a whole, none (gate
    /// PodLevelResourceManagers is off).
    fn exclusive_cpus_wanted(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> usize {
        if qos_class(pod, true) != QosClass::Guaranteed || has_pod_level_resources(pod) {
            return 0;
        }
        let milli = container_requests(*container).get(decide::resources::CPU).map_or(0, |q| q.milli_value());
        if milli % 1000 == 0 { usize::try_from(milli / 1000).unwrap_or(0) } else { 0 }
    }

    /// Memory that a container is to have of chosen NUMA nodes.
    fn memory_wanted(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> memory::Amounts {
        if qos_class(pod, true) != QosClass::Guaranteed || has_pod_level_resources(pod) {
            return memory::Amounts::new();
        }
        let kinds = container_requests(*container).into_iter();
        let kinds = kinds.filter(|(name, _)| name == memory::MEMORY || name.starts_with("hugepages-"));
        kinds.filter_map(|(name, q)| Some((name, u64::try_from(q.value()).ok()?))).collect()
    }

    /// Hints of every manager for one container.
    fn hints(&self, book: &Book, pod: &DesiredPod, container: &ContainerEntry<'_>, turn: &Turn) -> Vec<Hints> {
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        let mut all = devices::hints(&book.devices, pod, container, &turn.devices, &self.placement.machine.nodes);
        let needed = self.exclusive_cpus_wanted(pod, container);
        if let Some(cpus) = book.cpus.as_ref().filter(|_| needed > 0) {
            all.push(cpus.hints(&cpus::Want { pod: uid, container: name, needed, reusable: &turn.cpus }));
        }
        let wanted = self.memory_wanted(pod, container);
        if let Some(memory) = book.memory.as_ref().filter(|_| !wanted.is_empty()) {
            all.extend(memory.hints(uid, name, &wanted, &turn.memory));
        }
        all
    }

    /// Hints of every manager for all containers of a pod together.
    fn pod_hints(&self, book: &Book, pod: &DesiredPod) -> Vec<Hints> {
        let uid = pod.uid().as_str();
        let containers: Vec<ContainerEntry<'_>> = lasting(pod).collect();
        let mut all = devices::pod_hints(&book.devices, pod, &self.placement.machine.nodes);
        let each: Vec<(&str, usize)> =
            containers.iter().map(|c| (c.spec.name.as_str(), self.exclusive_cpus_wanted(pod, c))).collect();
        let amounts = |of: &dyn Fn(&ContainerEntry<'_>) -> memory::Amounts| at_once(&containers, of);
        let needed = amounts(&|c| memory::Amounts::from([(String::new(), self.exclusive_cpus_wanted(pod, c) as u64)]));
        let needed = needed.values().copied().next().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        if let Some(cpus) = book.cpus.as_ref().filter(|_| needed > 0) {
            all.push(cpus.pod_hints(uid, &each, needed));
        }
        let wanted = amounts(&|c| self.memory_wanted(pod, c));
        if let Some(memory) = book.memory.as_ref().filter(|_| !wanted.is_empty()) {
            let names: Vec<&str> = containers.iter().map(|c| c.spec.name.as_str()).collect();
            all.extend(memory.pod_hints(uid, &names, &wanted));
        }
        all
    }

    /// Finds a place, or refuses.
    fn place(&self, hints: &[Hints]) -> Result<Hint, Refusal> {
        let (best, good) = self.placement.best(hints);
        let scope = if self.placement.scope == Scope::Pod { "pod" } else { "container" };
        if self.placement.is_guaranteed() {
            self.metrics.managers.alignment(scope, "numa_node", good);
        }
        if good {
            return Ok(best);
        }
        Err(Refusal {
            reason: "TopologyAffinityError".into(),
            message: "Resources cannot be allocated with Topology locality".into(),
        })
    }

    /// Chooses and reserves everything that a container gets, under one hold of the book. What plugins have to grant comes back.
    fn reserve(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        alive: bool,
        of_pod: Option<Hint>,
        turn: &mut Turn,
    ) -> Result<Vec<Reservation>, Refusal> {
        let mut book = self.book();
        let hint = match (self.placement.policy, of_pod) {
            (_, Some(hint)) => hint,
            (Policy::None, None) => Hint { affinity: None, preferred: false },
            (_, None) => self.place(&self.hints(&book, pod, container, turn))?,
        };
        let reserved = devices::reserve(&mut book.devices, pod, container, alive, hint.affinity, &turn.devices);
        let reserved = reserved.map_err(|why| unexpected(&why))?;
        self.give_cpus(&mut book, pod, container, hint.affinity, turn)?;
        self.give_memory(&mut book, pod, container, hint, turn).map_err(|why| unexpected(&why))?;
        Ok(reserved)
    }

    fn give_cpus(
        &self,
        book: &mut Book,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        affinity: Option<NumaMask>,
        turn: &mut Turn,
    ) -> Result<(), Refusal> {
        let needed = self.exclusive_cpus_wanted(pod, container);
        let Some(cpus) = book.cpus.as_mut().filter(|_| needed > 0) else { return Ok(()) };
        let metrics = &self.metrics.managers;
        metrics.cpu_pinning_requests.inc();
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        let given = cpus.allocate(&cpus::Want { pod: uid, container: name, needed, reusable: &turn.cpus }, affinity);
        if self.config.cpus.as_ref().is_some_and(|c| c.options.full_physical_only) {
            metrics.alignment("container", "physical_cpu", given.is_ok());
        }
        let given = given.inspect_err(|_| metrics.cpu_pinning_errors.inc())?;
        if self.config.cpus.as_ref().is_some_and(|c| c.options.prefer_align_by_uncore_cache)
            && cpus.topology().share_cache(&given)
        {
            metrics.alignment("container", "uncore_cache", true);
        }
        turn.cpus =
            if container.kind == ContainerKind::Init { turn.cpus.or(&given) } else { turn.cpus.without(&given) };
        Ok(())
    }

    fn give_memory(
        &self,
        book: &mut Book,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        hint: Hint,
        turn: &mut Turn,
    ) -> Result<(), String> {
        let wanted = self.memory_wanted(pod, container);
        let Some(memory) = book.memory.as_mut().filter(|_| !wanted.is_empty()) else { return Ok(()) };
        let metrics = &self.metrics.managers;
        metrics.memory_pinning_requests.inc();
        let before = pod.init_containers().filter(|c| c.kind == ContainerKind::Init);
        let before = before.map(|c| c.spec.name.as_str());
        let inits: Vec<&str> = before.take_while(|name| *name != container.spec.name).collect();
        let who = memory::Who {
            pod: pod.uid().as_str(),
            container: &container.spec.name,
            is_init: container.kind == ContainerKind::Init,
            inits: &inits,
        };
        memory.allocate(&who, &wanted, hint, &mut turn.memory).inspect_err(|_| metrics.memory_pinning_errors.inc())
    }

    async fn give(&self, pod: &DesiredPod, alive: bool) -> Result<bool, Refusal> {
        let by_pod = self.placement.policy != Policy::None && self.placement.scope == Scope::Pod;
        let of_pod = if by_pod {
            let hints = self.pod_hints(&self.book(), pod);
            Some(self.place(&hints)?)
        } else {
            None
        };
        let mut turn = Turn::default();
        let mut changed = false;
        for container in lasting(pod) {
            let reserved = self.reserve(pod, &container, alive, of_pod, &mut turn)?;
            changed |= self.grant(pod, &container, reserved, &turn.devices).await.map_err(|why| unexpected(&why))?;
            devices::note_reusable(&self.book().devices, pod, &container, &mut turn.devices);
        }
        Ok(changed)
    }

    /// True when a container of the pod has CPUs or memory of its own.
    fn has_of_its_own(&self, pod: &str) -> bool {
        let book = self.book();
        book.cpus.as_ref().is_some_and(|c| c.assignments().contains_key(pod))
            || book.memory.as_ref().is_some_and(|m| m.assignments().contains_key(pod))
    }

    /// Takes everything back from a pod.
    fn take_back(&self, changed: impl FnOnce(&mut Book) -> bool) {
        let changed = changed(&mut self.book());
        if changed {
            self.tell_cpus();
            self.writer.soon();
        }
    }
}

/// Init containers, sidecars and app containers: those that are given something.
fn lasting(pod: &DesiredPod) -> impl Iterator<Item = ContainerEntry<'_>> {
    pod.init_containers().chain(pod.app_containers())
}

/// What the containers of a pod have at one time at most: app containers and sidecars together, or one init container and the sidecars before it.
fn at_once(containers: &[ContainerEntry<'_>], of: &dyn Fn(&ContainerEntry<'_>) -> memory::Amounts) -> memory::Amounts {
    let (mut most, mut sidecars, mut all) = (memory::Amounts::new(), memory::Amounts::new(), memory::Amounts::new());
    for container in containers {
        for (kind, size) in of(container) {
            match container.kind {
                ContainerKind::Init => {
                    let with = sidecars.get(&kind).copied().unwrap_or(0) + size;
                    let known = most.entry(kind).or_default();
                    *known = with.max(*known);
                }
                ContainerKind::Sidecar => {
                    *sidecars.entry(kind.clone()).or_default() += size;
                    *all.entry(kind).or_default() += size;
                }
                _ => *all.entry(kind).or_default() += size,
            }
        }
    }
    for (kind, size) in all {
        let known = most.entry(kind).or_default();
        *known = size.max(*known);
    }
    most
}

/// A refusal by what Go calls an unexpected error.
fn unexpected(why: &str) -> Refusal {
    Refusal {
        reason: "UnexpectedAdmissionError".into(),
        message: format!("Allocate failed due to {why}, which is unexpected"),
    }
}

#[async_trait]
impl ResourceManagers for Managers {
    fn counts(&self, resource: &str) -> bool {
        self.0.book().devices.serves(resource)
    }

    fn may_wait(&self, pod: &DesiredPod) -> bool {
        let book = self.0.book();
        lasting(pod).any(|c| !devices::wanted(&book.devices, pod, &c).is_empty())
    }

    async fn allocate(&self, pod: &DesiredPod, alive: bool) -> Result<(), Refusal> {
        let metrics = &self.0.metrics.managers;
        metrics.topology_requests.inc();
        let began = Instant::now();
        let given = self.0.give(pod, alive).await;
        metrics.topology_duration.observe(began.elapsed().as_secs_f64() * 1000.0);
        self.0.tell_cpus();
        match given {
            Ok(devices) => {
                if devices || self.0.has_of_its_own(pod.uid().as_str()) {
                    self.0.writer.written().await;
                }
                Ok(())
            }
            Err(refusal) => {
                if self.0.placement.policy != Policy::None {
                    metrics.topology_errors.inc();
                }
                self.ended(pod.uid());
                Err(refusal)
            }
        }
    }

    async fn container(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Result<Grant, String> {
        let mut devices = self.0.container_devices(pod, container).await?;
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        let book = self.0.book();
        for name in book.claims.cdi(pod, container)? {
            if !devices.cdi_devices.contains(&name) {
                devices.cdi_devices.push(name);
            }
        }
        let cpus = book.cpus.as_ref();
        let nodes = book.memory.as_ref().map_or(NumaMask::EMPTY, |memory| memory.nodes(uid, name));
        Ok(Grant {
            devices,
            cpus: cpus.map_or_else(String::new, |cpus| cpus.of(uid, name).to_string()),
            memory_nodes: nodes.nodes().map(|n| n.to_string()).collect::<Vec<_>>().join(","),
            exclusive_cpus: self.0.config.no_quota && cpus.is_some_and(|cpus| cpus.own(uid, name).is_some()),
        })
    }

    fn exclusive_cpus(&self, uid: &PodUid) -> bool {
        let has = |cpus: &Cpus| cpus.assignments().get(uid.as_str()).is_some_and(|c| !c.is_empty());
        self.0.config.no_quota && self.0.book().cpus.as_ref().is_some_and(has)
    }

    fn own_cpus(&self, uid: &PodUid, container: &str) -> bool {
        let has = |cpus: &Cpus| cpus.own(uid.as_str(), container).is_some();
        self.0.config.no_quota && self.0.book().cpus.as_ref().is_some_and(has)
    }

    fn health(&self, pod: &DesiredPod, container: &str) -> Vec<ResourceStatus> {
        if !self.0.config.health_status {
            return Vec::new();
        }
        let word = |healthy| if healthy { "Healthy" } else { "Unhealthy" };
        let health = self.0.book().devices.health(pod.uid().as_str(), container);
        let one = |(name, devices): (String, Vec<decide::devices::DeviceHealth>)| ResourceStatus {
            name,
            resources: Some(
                devices
                    .into_iter()
                    .map(|d| ResourceHealth {
                        resource_id: d.id,
                        health: Some(word(d.healthy).to_owned()),
                        ..Default::default()
                    })
                    .collect(),
            ),
        };
        let mut all: Vec<ResourceStatus> = health.into_iter().map(one).collect();
        if let Some(entry) = pod.container(container) {
            all.extend(self.0.claims_health(pod, &entry));
        }
        all
    }

    async fn prepare(&self, pod: &DesiredPod) -> Result<(), String> {
        if pod.spec().resource_claims.is_none()
            && pod.stored_status().is_none_or(|s| s.extended_resource_claim_status.is_none())
        {
            return Ok(());
        }
        let began = Instant::now();
        let done = self.0.prepare_claims(pod).await;
        self.0.metrics.managers.claims_handled("PrepareResources", began.elapsed(), done.is_err());
        done.map_err(|why| format!("prepare dynamic resources: {why}"))
    }

    fn has_claims(&self, uid: &PodUid) -> bool {
        self.0.book().claims.holds_any(uid.as_str())
    }

    async fn unprepare(&self, uid: &PodUid) -> Result<(), String> {
        let began = Instant::now();
        let done = self.0.unprepare_claims(uid.as_str()).await;
        self.0.metrics.managers.claims_handled("UnprepareResources", began.elapsed(), done.is_err());
        done.map_err(|why| format!("unprepare dynamic resources: {why}"))
    }

    fn ended(&self, uid: &PodUid) {
        let uid = uid.as_str();
        self.0.take_back(|book| {
            let devices = book.devices.ended(uid);
            let cpus = book.cpus.as_mut().is_some_and(|c| c.release(uid));
            let memory = book.memory.as_mut().is_some_and(|m| m.release(uid));
            devices || cpus || memory
        });
    }

    fn release(&self, uid: &PodUid) {
        let uid = uid.as_str();
        self.0.take_back(|book| {
            let devices = book.devices.release(uid);
            let cpus = book.cpus.as_mut().is_some_and(|c| c.release(uid));
            let memory = book.memory.as_mut().is_some_and(|m| m.release(uid));
            devices || cpus || memory
        });
    }

    fn retain(&self, known: &BTreeSet<PodUid>) {
        let held = self.0.book().claims.pods();
        let gone: BTreeSet<String> =
            held.into_iter().filter(|uid| !known.contains(&PodUid::new(uid.as_str()))).collect();
        self.0.gone.send_if_modified(|told| {
            let changed = *told != gone;
            *told = gone;
            changed
        });
        let known = |uid: &str| known.contains(&PodUid::new(uid));
        self.0.take_back(|book| {
            let devices = book.devices.retain(&known);
            let cpus = book.cpus.as_mut().is_some_and(|c| c.retain(&known));
            let memory = book.memory.as_mut().is_some_and(|m| m.retain(&known));
            devices || cpus || memory
        });
    }
}
