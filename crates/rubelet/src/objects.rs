//! What pods take from the API server, over the crate `cluster`: object caches, tokens, services, trust bundles.
//!
//! Tasks: one follows the services of all namespaces (its state is a table of names, addresses and ports); one follows ClusterTrustBundles,
//! from the first pod on that shows one; the object caches run a watch for each ConfigMap and Secret in use. All of them end with
//! [`Tasks::stop`], go on over a lost API server by themselves, and hold what they last saw meanwhile.

mod tokens;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cluster::calls::{AuthApi, StorageApi};
use cluster::object_cache::{ObjectCache, OnChange, Strategy};
use cluster::reflect::Collection;
use cluster::{Client, ClusterError, Delta, ObjectKey, Reflector, Scope, Unit, Wall};
use decide::config::{env, objects as names, trust};
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::node::v1::RuntimeClass;
use model::api::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret, Service, ServiceAccount, ServiceSpec};
use model::pod::{DesiredPod, PodUid};
use pod::objects::{ObjectError, ObjectResult, PodObjects, Token, TrustBundles};
use pod::ports::Tasks;
use pod::registry::PodEntry;
use tokio::sync::watch;

use tokens::Tokens;

/// How long a container's start waits for the first list of services.
const SERVICES: Duration = Duration::from_secs(5);
/// Deltas that may wait for the table of services.
const DEPTH: usize = 64;

/// Where the objects come from; the API client is all of them.
#[derive(Clone)]
pub(crate) struct Sources {
    pub(crate) config_maps: Arc<dyn Collection<ConfigMap>>,
    pub(crate) secrets: Arc<dyn Collection<Secret>>,
    pub(crate) services: Arc<dyn Collection<Service>>,
    pub(crate) accounts: Arc<dyn Collection<ServiceAccount>>,
    pub(crate) bundles: Arc<dyn Collection<ClusterTrustBundle>>,
    pub(crate) classes: Arc<dyn Collection<RuntimeClass>>,
    pub(crate) auth: Arc<dyn AuthApi>,
    pub(crate) storage: Arc<dyn StorageApi>,
}

impl Sources {
    /// Everything from one client.
    pub(crate) fn of(client: &Arc<Client>) -> Self {
        Self {
            config_maps: client.clone(),
            secrets: client.clone(),
            services: client.clone(),
            accounts: client.clone(),
            bundles: client.clone(),
            classes: client.clone(),
            auth: client.clone(),
            storage: client.clone(),
        }
    }
}

/// What a pod names, and whom to wake.
struct Follower {
    entry: Arc<PodEntry>,
    namespace: String,
    names: names::References,
    bundles: bool,
}

type Users = HashMap<(String, String), HashMap<PodUid, Arc<PodEntry>>>;

/// Who uses what.
#[derive(Default)]
struct Index {
    pods: HashMap<PodUid, Follower>,
    config_maps: Users,
    secrets: Users,
    bundles: HashMap<PodUid, Arc<PodEntry>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tell(users: Option<&HashMap<PodUid, Arc<PodEntry>>>) {
    users.into_iter().flat_map(|u| u.values()).for_each(|entry| entry.objects_changed());
}

/// Services by namespace and name, cut down to what variables need; None until the first list.
type ServiceTable = Option<HashMap<String, BTreeMap<String, Service>>>;

/// Bundles by name; None until the first list.
type BundleTable = Option<BTreeMap<String, ClusterTrustBundle>>;

/// The port over the API server.
pub(crate) struct ClusterObjects {
    config_maps: ObjectCache<ConfigMap>,
    secrets: ObjectCache<Secret>,
    sources: Sources,
    index: Arc<Mutex<Index>>,
    tokens: Tokens,
    services: Arc<Mutex<ServiceTable>>,
    services_seen: watch::Receiver<bool>,
    /// Gate ClusterTrustBundleProjection; the table is followed from the first question on.
    trust_bundles: bool,
    bundles: OnceLock<Arc<Mutex<BundleTable>>>,
    /// Handlers that RuntimeClasses named when they were last asked for.
    handlers: Mutex<HashMap<String, String>>,
    unit: Unit,
    tasks: Tasks,
}

fn failed(e: &ClusterError) -> ObjectError {
    if e.is_not_found() { ObjectError::NotFound(e.message.clone()) } else { ObjectError::Failed(e.message.clone()) }
}

impl ClusterObjects {
    /// Starts to follow services; everything else begins with the first pod that needs it. `strategy` is
    /// `configMapAndSecretChangeDetectionStrategy`, `trust_bundles` the gate ClusterTrustBundleProjection.
    pub(crate) fn start(
        sources: Sources,
        strategy: Strategy,
        trust_bundles: bool,
        unit: Unit,
        wall: Wall,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let index: Arc<Mutex<Index>> = Arc::default();
        let waker = |pick: fn(&Index) -> &Users| -> OnChange {
            let index = Arc::downgrade(&index);
            Arc::new(move |namespace, name| {
                if let Some(index) = index.upgrade() {
                    tell(pick(&lock(&index)).get(&(namespace.to_owned(), name.to_owned())));
                }
            })
        };
        let services: Arc<Mutex<ServiceTable>> = Arc::default();
        let (seen, services_seen) = watch::channel(false);
        let (reflector, mut deltas, _) = Reflector::new(sources.services.clone(), Scope::all(), DEPTH, unit.clone());
        tasks.spawn(reflector.run(tasks.stop().clone()));
        let table = services.clone();
        tasks.spawn(async move {
            while let Some(delta) = deltas.recv().await {
                take_services(&mut lock(&table), delta);
                seen.send_if_modified(|seen| !std::mem::replace(seen, true));
            }
        });
        Arc::new(Self {
            config_maps: ObjectCache::telling(
                sources.config_maps.clone(),
                strategy.clone(),
                unit.clone(),
                waker(|i| &i.config_maps),
            ),
            secrets: ObjectCache::telling(sources.secrets.clone(), strategy, unit.clone(), waker(|i| &i.secrets)),
            tokens: Tokens::new(sources.auth.clone(), sources.accounts.clone(), unit.clone(), wall),
            sources,
            index,
            services,
            services_seen,
            trust_bundles,
            bundles: OnceLock::new(),
            handlers: Mutex::default(),
            unit,
            tasks: tasks.clone(),
        })
    }

    fn acquire(&self, uid: &PodUid, f: &Follower, index: &mut Index) {
        let key = |name: &String| (f.namespace.clone(), name.clone());
        for (name, in_volume) in &f.names.config_maps {
            self.config_maps.acquire(&f.namespace, name);
            if *in_volume {
                self.config_maps.hold(&f.namespace, name);
            }
            index.config_maps.entry(key(name)).or_default().insert(uid.clone(), f.entry.clone());
        }
        for (name, in_volume) in &f.names.secrets {
            self.secrets.acquire(&f.namespace, name);
            if *in_volume {
                self.secrets.hold(&f.namespace, name);
            }
            index.secrets.entry(key(name)).or_default().insert(uid.clone(), f.entry.clone());
        }
        if f.bundles {
            index.bundles.insert(uid.clone(), f.entry.clone());
        }
    }

    /// `kept`: a newer form of the same pod names these too.
    fn release(&self, uid: &PodUid, f: &Follower, kept: Option<&Follower>, index: &mut Index) {
        let gone = |users: &mut Users, name: &String| {
            let key = (f.namespace.clone(), name.clone());
            if let Some(pods) = users.get_mut(&key) {
                pods.remove(uid);
                if pods.is_empty() {
                    users.remove(&key);
                }
            }
        };
        for (name, in_volume) in &f.names.config_maps {
            if *in_volume {
                self.config_maps.unhold(&f.namespace, name);
            }
            self.config_maps.release(&f.namespace, name);
            if kept.is_none_or(|k| !k.names.config_maps.contains_key(name)) {
                gone(&mut index.config_maps, name);
            }
        }
        for (name, in_volume) in &f.names.secrets {
            if *in_volume {
                self.secrets.unhold(&f.namespace, name);
            }
            self.secrets.release(&f.namespace, name);
            if kept.is_none_or(|k| !k.names.secrets.contains_key(name)) {
                gone(&mut index.secrets, name);
            }
        }
        if kept.is_none_or(|k| !k.bundles) {
            index.bundles.remove(uid);
        }
    }

    /// The table of trust bundles, followed from the first call on.
    fn bundle_table(&self) -> Arc<Mutex<BundleTable>> {
        let start = || {
            let table: Arc<Mutex<BundleTable>> = Arc::default();
            let (reflector, mut deltas, _) =
                Reflector::new(self.sources.bundles.clone(), Scope::all(), DEPTH, self.unit.clone());
            self.tasks.spawn(reflector.run(self.tasks.stop().clone()));
            let (followed, index) = (table.clone(), self.index.clone());
            self.tasks.spawn(async move {
                while let Some(delta) = deltas.recv().await {
                    take_bundles(&mut lock(&followed), delta);
                    tell(Some(&lock(&index).bundles));
                }
            });
            table
        };
        self.bundles.get_or_init(start).clone()
    }
}

fn shows_bundles(pod: &DesiredPod) -> bool {
    let sources =
        pod.spec().volumes.iter().flatten().flat_map(|v| &v.projected).flat_map(|p| p.sources.iter().flatten());
    sources.into_iter().any(|s| s.cluster_trust_bundle.is_some())
}

fn take_services(table: &mut ServiceTable, delta: Delta<Service>) {
    let cut = |service: Service| {
        let spec = service.spec.map(|s| ServiceSpec { cluster_ip: s.cluster_ip, ports: s.ports, ..Default::default() });
        let mut cut = Service { spec, ..Default::default() };
        cut.metadata.name = service.metadata.name;
        cut.metadata.namespace = service.metadata.namespace;
        let key = (cut.metadata.namespace.clone().unwrap_or_default(), cut.metadata.name.clone().unwrap_or_default());
        (key, cut)
    };
    match delta {
        Delta::Snapshot(all) => {
            let mut new: HashMap<String, BTreeMap<String, Service>> = HashMap::new();
            for service in all {
                let ((namespace, name), service) = cut(service);
                new.entry(namespace).or_default().insert(name, service);
            }
            *table = Some(new);
        }
        Delta::Upsert(service) => {
            let ((namespace, name), service) = cut(service);
            table.get_or_insert_default().entry(namespace).or_default().insert(name, service);
        }
        Delta::Remove(ObjectKey { namespace, name, .. }) => {
            if let Some(table) = table
                && let Some(services) = table.get_mut(&namespace)
            {
                services.remove(&name);
                if services.is_empty() {
                    table.remove(&namespace);
                }
            }
        }
    }
}

fn take_bundles(table: &mut BundleTable, delta: Delta<ClusterTrustBundle>) {
    let named = |b: ClusterTrustBundle| (b.metadata.name.clone().unwrap_or_default(), b);
    match delta {
        Delta::Snapshot(all) => *table = Some(all.into_iter().map(named).collect()),
        Delta::Upsert(bundle) => {
            let (name, bundle) = named(bundle);
            table.get_or_insert_default().insert(name, bundle);
        }
        Delta::Remove(key) => {
            if let Some(table) = table {
                table.remove(&key.name);
            }
        }
    }
}

/// The anchors that a projection selects.
fn select(table: &BundleTable, wanted: &TrustBundles, optional: bool) -> Result<Vec<u8>, String> {
    let Some(table) = table else { return Err("ClusterTrustBundle informer has not yet synced".to_owned()) };
    let found: Vec<&str> = match wanted {
        TrustBundles::Named(name) => match table.get(name) {
            Some(bundle) => vec![bundle.spec.trust_bundle.as_str()],
            None if optional => Vec::new(),
            None => {
                return Err(format!(
                    "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"{name}\" not found"
                ));
            }
        },
        TrustBundles::Signer { name, selector } => {
            let mut found = Vec::new();
            for bundle in table.values() {
                let labels = bundle.metadata.labels.clone().unwrap_or_default();
                let selected = trust::selects(selector.as_ref(), &labels)
                    .map_err(|e| format!("while parsing label selector: {e}"))?;
                if selected && bundle.spec.signer_name.as_ref() == Some(name) {
                    found.push(bundle.spec.trust_bundle.as_str());
                }
            }
            if found.is_empty() && !optional {
                return Err("combination of signerName and labelSelector matched zero ClusterTrustBundles".to_owned());
            }
            found
        }
    };
    Ok(trust::anchors(found))
}

#[async_trait]
impl PodObjects for ClusterObjects {
    fn follow(&self, pod: &DesiredPod, entry: &Arc<PodEntry>) {
        let new = Follower {
            entry: entry.clone(),
            namespace: pod.namespace().to_owned(),
            names: names::references(pod),
            bundles: shows_bundles(pod),
        };
        let mut index = lock(&self.index);
        // The new form first, so that what both name is never let go.
        self.acquire(pod.uid(), &new, &mut index);
        if let Some(old) = index.pods.remove(pod.uid()) {
            self.release(pod.uid(), &old, Some(&new), &mut index);
        }
        index.pods.insert(pod.uid().clone(), new);
    }

    fn forget(&self, uid: &PodUid) {
        let mut index = lock(&self.index);
        if let Some(old) = index.pods.remove(uid) {
            self.release(uid, &old, None, &mut index);
        }
        drop(index);
        self.tokens.forget(uid);
    }

    async fn config_map(&self, namespace: &str, name: &str) -> ObjectResult<Arc<ConfigMap>> {
        self.config_maps.get(namespace, name).await.map_err(|e| failed(&e))
    }

    async fn secret(&self, namespace: &str, name: &str) -> ObjectResult<Arc<Secret>> {
        self.secrets.get(namespace, name).await.map_err(|e| failed(&e))
    }

    async fn token(&self, pod: &DesiredPod, audience: &str, seconds: Option<i64>) -> ObjectResult<Token> {
        self.tokens.get(pod, audience, seconds).await
    }

    async fn service_account(&self, namespace: &str, name: &str) -> ObjectResult<ServiceAccount> {
        let account = self.sources.accounts.get(Some(namespace), name, true).await.map_err(|e| failed(&e))?;
        self.tokens.seen(namespace, name, account.metadata.uid.as_deref());
        Ok(account)
    }

    async fn trust_anchors(&self, bundles: &TrustBundles, optional: bool) -> ObjectResult<Vec<u8>> {
        if !self.trust_bundles {
            let off = "ClusterTrustBundle projection is not supported in static kubelet mode";
            return Err(ObjectError::Failed(off.to_owned()));
        }
        let table = self.bundle_table();
        select(&lock(&table), bundles, optional).map_err(ObjectError::Failed)
    }

    async fn claim(&self, namespace: &str, name: &str) -> ObjectResult<PersistentVolumeClaim> {
        self.sources.storage.get_claim(namespace, name).await.map_err(|e| failed(&e))
    }

    async fn volume(&self, name: &str) -> ObjectResult<PersistentVolume> {
        self.sources.storage.get_volume(name).await.map_err(|e| failed(&e))
    }

    /// A class is asked for with each new sandbox that names it. While the server cannot be reached, what it said last still holds: a class's
    /// handler never changes.
    async fn runtime_handler(&self, class: &str) -> ObjectResult<String> {
        match self.sources.classes.get(None, class, true).await {
            Ok(found) => {
                lock(&self.handlers).insert(class.to_owned(), found.handler.clone());
                Ok(found.handler)
            }
            Err(e) if e.is_not_found() => {
                lock(&self.handlers).remove(class);
                Err(ObjectError::NotFound(format!("runtimeclass.node.k8s.io \"{class}\" not found")))
            }
            Err(e) => lock(&self.handlers)
                .get(class)
                .cloned()
                .ok_or_else(|| ObjectError::Failed(format!("failed to lookup RuntimeClass {class}: {}", e.message))),
        }
    }

    async fn service_variables(&self, namespace: &str, links: bool, wait: bool) -> Option<BTreeMap<String, String>> {
        if wait {
            let mut seen = self.services_seen.clone();
            let _ = tokio::time::timeout(SERVICES, seen.wait_for(|seen| *seen)).await;
        }
        let table = lock(&self.services);
        let table = table.as_ref()?;
        let of = |namespace: &str| table.get(namespace).into_iter().flat_map(|services| services.values());
        let default = of("default").filter(|_| namespace != "default");
        Some(env::service_variables(default.chain(of(namespace)), namespace, links))
    }
}

#[cfg(test)]
mod tests;
